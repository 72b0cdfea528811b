"""With `exact=True`, fifty steps give bitwise the plain loop's weights, buffers, optimizer state and metrics."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import StepLR

import hotloop
from parity.twins import differences, plain_closure_loop, plain_loop, snapshot

# The plain loop runs on the CPU, also where there is an accelerator.
optimize = partial(hotloop.optimize, device="cpu", exact=True)

STEPS = 50


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Convnet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
            nn.Flatten(), nn.Linear(48, 3),
        )  # fmt: skip


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x[..., None])).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent, self.head = kind(1, 5, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.recurrent(x[..., None])[0][:, -1])


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.mix(self.embed((x > 0).long()).mean(1)).tanh())


MODELS = {
    "mlp": Mlp,
    "convnet": Convnet,
    "encoder": Encoder,
    "gru": partial(Recurrent, nn.GRU),
    "lstm": partial(Recurrent, nn.LSTM),
    "tied": Tied,
}
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=0.01),
    "adamw": partial(AdamW, lr=0.01),
    "rmsprop": partial(RMSprop, lr=0.005),
    "adagrad": partial(Adagrad, lr=0.05),
}


def data():
    torch.manual_seed(3)
    return [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(STEPS)]


def groups(model):
    """Matrices decay, the rest does not: the order of the groups is not the order of the model."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def build(make_model, make_optimizer, *, grouped=False, scheduled=False):
    torch.manual_seed(1)
    model = make_model()
    optimizer = make_optimizer(groups(model) if grouped else model.parameters())
    scheduler = StepLR(optimizer, 7, 0.7) if scheduled else None
    return model, optimizer, scheduler


def assert_bitwise(make_model, make_optimizer, *, loop=plain_loop, grouped=False, scheduled=False, **options):
    loss_fn = nn.CrossEntropyLoss()
    model, optimizer, scheduler = build(make_model, make_optimizer, grouped=grouped, scheduled=scheduled)
    batches = data()
    expected_metrics = loop(model, optimizer, loss_fn, batches, scheduler=scheduler, **options)
    expected = snapshot(model, optimizer, *[scheduler] * scheduled)

    plain, optimizer, scheduler = build(make_model, make_optimizer, grouped=grouped, scheduled=scheduled)
    model, step = optimize(plain, optimizer, loss_fn, scheduler=scheduler, **options)
    batches = data()
    metrics = [dict(step(x, y)) for x, y in batches]
    assert differences(snapshot(model, optimizer, *[scheduler] * scheduled), expected) == []
    assert metrics == expected_metrics


VARIANTS = {
    "bare": {},
    "clip": {"clip_norm": 0.3},
    "clip, two groups": {"clip_norm": 0.3, "grouped": True},
    "scheduler": {"scheduled": True},
    "accumulate": {"accumulate": 3},
    "all": {"clip_norm": 0.3, "grouped": True, "scheduled": True, "accumulate": 5},
}


@pytest.mark.parametrize("variant", ["bare", "all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_with_every_optimizer(model, optimizer, variant):
    assert_bitwise(MODELS[model], OPTIMIZERS[optimizer], **VARIANTS[variant])


@pytest.mark.parametrize("variant", ["clip", "clip, two groups", "scheduler", "accumulate"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_option_alone(optimizer, variant):
    assert_bitwise(MODELS["convnet"], OPTIMIZERS[optimizer], **VARIANTS[variant])


@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.3}, {"clip_norm": 0.3, "scheduled": True}], ids=["bare", "clip", "clip and scheduler"]
)
@pytest.mark.parametrize("model", MODELS)
def test_lbfgs(model, options):
    """O1, O3: every evaluation sees the same batch, and dropout draws as it does in the plain loop."""
    lbfgs = partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=4)
    assert_bitwise(MODELS[model], lbfgs, loop=plain_closure_loop, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("variant", ["bare", "clip", "accumulate"])
def test_models_of_other_dtypes(dtype, optimizer, variant):
    """They run as they are: nothing is cast, neither the output nor the loss."""

    def run(loop):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6, dtype=dtype), nn.Linear(6, 2, dtype=dtype))
        batches = [(torch.randn(5, 4).to(dtype), torch.randn(5, 2).to(dtype)) for _ in range(10)]
        optimizer_ = OPTIMIZERS[optimizer](model.parameters())
        return loop(model, optimizer_, batches), snapshot(model, optimizer_)

    def loss_fn(output, y):
        return (output - y).abs().square().mean()

    def by_hand(model, optimizer, batches):
        return plain_loop(model, optimizer, loss_fn, batches, **VARIANTS[variant])

    def wrapped(model, optimizer, batches):
        model, step = optimize(model, optimizer, loss_fn, **VARIANTS[variant])
        return [dict(step(x, y)) for x, y in batches]

    assert differences(run(wrapped), run(by_hand)) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model():
    def script(make):
        torch.manual_seed(1)
        return torch.jit.script(make())

    assert_bitwise(partial(script, Mlp), OPTIMIZERS["adam"], accumulate=2)


def test_batches_of_a_tensor_class_of_the_users_own():
    class Image(torch.Tensor):
        pass

    plain, model = Mlp(), Mlp()
    model.load_state_dict(plain.state_dict())
    batches = [(x.as_subclass(Image), y) for x, y in data()[:10]]
    logged = plain_loop(plain, OPTIMIZERS["sgd"](plain.parameters()), nn.CrossEntropyLoss(), batches)
    step = optimize(model, OPTIMIZERS["sgd"](model.parameters()), nn.CrossEntropyLoss()).step
    assert [dict(step(x, y)) for x, y in batches] == logged
    assert differences(snapshot(model), snapshot(plain)) == []
