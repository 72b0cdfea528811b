"""The models that are measured. Small on purpose: what a library adds to a step shows most where the step is short."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader

Made = tuple[nn.Module, Optimizer, Callable[..., Tensor]]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model with its data. `make()` always builds the same weights, `batches()` goes round the same few batches."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], list[Batch]]
    steps: int = 1  # in one timed call, so that a call is long against the clock's grain
    loss_fn: Callable[..., Tensor] = F.cross_entropy

    def make(self, **adam: Any) -> Made:
        torch.manual_seed(0)
        model = self.model()
        return model, torch.optim.Adam(model.parameters(), **adam), self.loss_fn

    def some(self) -> list[Batch]:
        torch.manual_seed(1)
        return self.data()

    def batches(self) -> Iterator[Batch]:
        return itertools.cycle(self.some())


def classification(*shape: int, classes: int = 10, count: int = 4) -> list[Batch]:
    return [(torch.randn(*shape), torch.randint(classes, shape[:1])) for _ in range(count)]


# --- models -----------------------------------------------------------------------------------------------------------


def mlp(*widths: int) -> nn.Module:
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(inputs, outputs, stride),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet(*widths: int) -> nn.Module:
    blocks = [Residual(a, b, stride=1 if a == b else 2) for a, b in itertools.pairwise((widths[0], *widths))]
    return nn.Sequential(convolution(3, widths[0]), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class UNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second = convolution(3, width), convolution(width, 2 * width)
        self.bottom = convolution(2 * width, 4 * width)
        self.up = nn.ModuleList([nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)])
        self.joined = nn.ModuleList([convolution(4 * width, 2 * width), convolution(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        for up, joined, skip in zip(self.up, self.joined, (second, first), strict=True):
            x = joined(torch.cat([up(x), skip], dim=1))
        return self.head(x)


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 128, layers: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.blocks(x, mask=self.mask, is_causal=True)).flatten(0, 1)


class LSTM(nn.Module):
    def __init__(self, features: int = 32, width: int = 128) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(features, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


def two_layers(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Mixer(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        count = (32 // patch) ** 2
        self.across = nn.ModuleList([two_layers(count, 64) for _ in range(layers)])
        self.within = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), two_layers(width, 256)) for _ in range(layers)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for across, within in zip(self.across, self.within, strict=True):
            x = x + across(x.transpose(1, 2)).transpose(1, 2)
            x = x + within(x)
        return self.head(x.mean(1))


def digits_net() -> nn.Module:
    """The demo's, without dropout: loops that take turns draw different random numbers."""
    from examples import digits

    model = digits.make_model()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


# --- data -------------------------------------------------------------------------------------------------------------


def segmentation() -> list[Batch]:
    return [(torch.randn(8, 3, 64, 64), torch.randint(4, (8, 64, 64))) for _ in range(4)]


def text() -> list[Batch]:
    return [(ids[:, :-1], ids[:, 1:].flatten()) for ids in (torch.randint(256, (16, 65)) for _ in range(4))]


def images_of_many_sizes() -> list[Batch]:
    """As a detector meets them: hardly a batch has the shape of the one before."""
    sizes = [(24 + 4 * (i * 5 % 8), 24 + 4 * (i * 3 % 7)) for i in range(16)]
    return [(torch.randn(8, 3, *size), torch.randint(10, (8,))) for size in sizes]


def handwritten() -> list[Batch]:
    """Real ones."""
    from examples import digits

    train, _ = digits.make_data()
    return [(x, y) for x, y in DataLoader(train, batch_size=64, drop_last=True)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny MLP", lambda: mlp(32, 64, 10), lambda: classification(32, 32), steps=50),
        Workload("tabular MLP", lambda: mlp(64, 1024, 1024, 128, 10), lambda: classification(128, 64), steps=5),
        Workload("ResNet-like", lambda: resnet(64, 64, 128, 128, 256, 256), lambda: classification(64, 3, 32, 32)),
        Workload("digits net", digits_net, handwritten, steps=4),
        Workload("UNet-like", UNet, segmentation, steps=2),
        Workload("GPT-like", GPT, text, steps=2),
        Workload("LSTM", LSTM, lambda: classification(32, 24, 32), steps=5),
        Workload("MLP-mixer", Mixer, lambda: classification(32, 3, 32, 32), steps=2),
        Workload("many sizes", lambda: resnet(16, 32, 64), images_of_many_sizes, steps=4),
    )
    if workload.name != "digits net" or importlib.util.find_spec("sklearn")  # a GPU machine may have nothing but torch
}
