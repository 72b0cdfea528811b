"""Detection in the manner of torchvision: lists of pictures, dictionaries of targets, a dictionary of losses.

    python examples/detector.py [--epochs 5]

In training mode the model returns its losses, in eval mode what it found. Lists and dictionaries arrive on the
model's device, the evaluation is a generator, and `find_syncs` shows where the loop that is usually written for such
models waits for a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from scenes import SIDE, scene, train_and_test_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hotloop import fast_eval, find_syncs, optimize, prefetch

SHAPES = [(32, 48), (48, 32), (48, 48), (32, 64)]
STRIDE = 4
Target = dict[str, Tensor]
Batch = tuple[list[Tensor], list[Target]]


def make_pictures(digits: Tensor, count: int, seed: int) -> list[tuple[Tensor, Target]]:
    random = torch.Generator().manual_seed(seed)
    scenes = [scene(digits, *SHAPES[i % len(SHAPES)], random) for i in range(count)]
    return [(picture, {"boxes": boxes}) for picture, _, boxes in scenes]


def collate(rows: list[tuple[Tensor, Target]]) -> Batch:
    return [picture for picture, _ in rows], [target for _, target in rows]


class Detector(nn.Module):
    """Finds centres on a map of a quarter of the size, and a box around each."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.Conv2d(2 * width, 2 * width, 5, padding=2), nn.BatchNorm2d(2 * width), nn.ReLU()),
        )
        self.centre, self.size = nn.Conv2d(2 * width, 1, 1), nn.Conv2d(2 * width, 2, 1)

    def forward(self, pictures: list[Tensor], targets: list[Target] | None = None) -> Any:
        height, width = (max(p.shape[i] for p in pictures) for i in (1, 2))
        padded = [F.pad(p, (0, width - p.shape[2], 0, height - p.shape[1])) for p in pictures]
        features = self.body(torch.stack(padded))
        centres, sizes = self.centre(features).squeeze(1), self.size(features)
        if self.training:
            return self.losses(centres.float(), sizes.float(), targets or [])
        return [self.found(centre, size) for centre, size in zip(centres.float(), sizes.float(), strict=True)]

    def losses(self, centres: Tensor, sizes: Tensor, targets: list[Target]) -> dict[str, Tensor]:
        wanted, size_errors = torch.zeros_like(centres), []
        for i, target in enumerate(targets):
            x0, y0, x1, y1 = target["boxes"].T
            column, row = ((x0 + x1) / 2 // STRIDE).long(), ((y0 + y1) / 2 // STRIDE).long()
            wanted[i, row, column] = 1
            size_errors.append(sizes[i, :, row, column] - torch.stack([x1 - x0, y1 - y0]) / SIDE)
        return {
            "centre": F.binary_cross_entropy_with_logits(centres, wanted, pos_weight=centres.new_full((), 20.0)),
            "size": torch.cat(size_errors, 1).abs().mean(),
        }

    def found(self, centre: Tensor, size: Tensor) -> Target:
        highest = centre == F.max_pool2d(centre[None], 5, stride=1, padding=2)[0]
        row, column = (highest & (centre > 0)).nonzero(as_tuple=True)
        x, y = (column + 0.5) * STRIDE, (row + 0.5) * STRIDE
        half = size[:, row, column] * SIDE / 2
        return {
            "boxes": torch.stack([x - half[0], y - half[1], x + half[0], y + half[1]], 1),
            "scores": centre[row, column].sigmoid(),
        }


def overlaps(ours: Tensor, theirs: Tensor) -> Tensor:
    """Intersection over union, each box with each."""
    low, high = torch.maximum(ours[:, None, :2], theirs[:, :2]), torch.minimum(ours[:, None, 2:], theirs[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (ours, theirs)]
    return shared / (areas[0][:, None] + areas[1] - shared)


@fast_eval
def detections(model: nn.Module, loader: Iterable[Batch]) -> Iterator[tuple[Target, Target]]:
    """What was found in each picture, beside what is there. Between two of its values the model is in the mode that it had."""
    for pictures, targets in loader:
        yield from zip(model(pictures), targets, strict=True)


def quality(model: nn.Module, loader: Iterable[Batch]) -> dict[str, float]:
    """The share of the digits that were found, and of the boxes that hold one, at an overlap of one half."""
    hits = wanted = offered = 0
    for found, target in detections(model, loader):
        hits += int((overlaps(target["boxes"], found["boxes"]) > 0.5).any(1).sum()) if len(found["boxes"]) else 0
        wanted, offered = wanted + len(target["boxes"]), offered + len(found["boxes"])
    return {"recall": hits / wanted, "precision": hits / max(offered, 1)}


def naive_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
    for pictures, targets in batches:
        losses = model(pictures, targets)
        loss = sum(losses.values())
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _ = {name: value.item() for name, value in losses.items()}  # for a progress bar


def main(epochs: int = 5) -> dict[str, float]:
    torch.manual_seed(0)
    train_digits, test_digits = train_and_test_digits()
    loader = DataLoader(make_pictures(train_digits, 320, seed=0), batch_size=16, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(make_pictures(test_digits, 64, seed=1), batch_size=16, collate_fn=collate)

    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with find_syncs() as syncs:
        naive_loop(model, optimizer, [next(iter(loader)) for _ in range(3)])
    print(f"Where three steps of the usual loop make the host wait:\n{syncs}\n")

    model, train_step = optimize(model, optimizer)
    for _ in range(epochs):
        for pictures, targets in prefetch(loader, model):
            losses = model(pictures, targets)
            train_step(sum(losses.values()), **losses)
        result = quality(model, test_loader)
        print(", ".join(f"{name} {value:.3f}" for name, value in {**train_step.mean(), **result}.items()))
    return {**result, "waits": sum(sync.count for sync in syncs)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
