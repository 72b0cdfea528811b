"""A run that is saved anywhere, in the middle of a window too, and resumed in new objects ends bitwise where it would have."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

import hotloop
import simgpu
from parity.twins import differences, snapshot

optimize = partial(hotloop.optimize, device="cpu", exact=True)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))


class Loss(nn.Module):
    """With a parameter of its own, which has no name in the model."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, y):
        return nn.functional.mse_loss(output * self.scale, y)


sgd = partial(SGD, lr=0.1, momentum=0.9)


def warmed(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 2), CosineAnnealingLR(optimizer, 5)], [2])


RUNS = {
    "sgd momentum": {},
    "accumulate": {"accumulate": 3},
    "accumulate, clip, scheduler": {"accumulate": 3, "clip_norm": 0.1, "make_scheduler": warmed},
    "adamw": {"make": partial(AdamW, lr=0.01), "accumulate": 2, "make_scheduler": lambda o: StepLR(o, 1, 0.9)},
    "fused adamw": {"make": partial(AdamW, lr=0.01, fused=True), "accumulate": 2},
    "float16": {"precision": "fp16", "accumulate": 2, "clip_norm": 0.1, "make_scheduler": lambda o: StepLR(o, 1, 0.9)},
    "float16 fused": {"precision": "fp16", "accumulate": 3, "make": partial(SGD, lr=0.1, momentum=0.9, fused=True)},
    "weighted": {"accumulate": 3, "weighted": True},
    "further losses": {"accumulate": 2, "further": True},
}


class Run:
    """Everything that a script would make, and one round of its loop."""

    def __init__(self, *, make=sgd, make_scheduler=None, weighted=False, further=False, **options):
        self.loss_fn, net = Loss(), Net()
        self.optimizer = make([*net.parameters(), self.loss_fn.scale])
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        if options.get("precision") == "fp16":
            options["scaler"] = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=2)
        self.model, self.step = optimize(net, self.optimizer, self.loss_fn, scheduler=self.scheduler, **options)
        self.weighted, self.further = weighted, further

    def round(self, i):
        generator = torch.Generator().manual_seed(i)
        x, y = torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)
        if self.weighted:
            self.step(x, y, weight=1 + i % 3)
        else:
            if self.further:
                self.step.backward(self.model(x).square().mean())
            self.step(x, y * (1e30 if self.scheduler is None and i in (1, 6) and self.step.scaler.is_enabled() else 1.0))

    def parts(self):
        return [self.model, self.loss_fn, self.optimizer, self.step, *[self.scheduler] * (self.scheduler is not None)]

    def save(self):
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts()[:4]] + [torch.get_rng_state()], file)
        return file

    def load(self, file):
        file.seek(0)
        *states, random = torch.load(file, map_location="cpu", weights_only=True)
        for part, state in zip(self.parts()[:4], states, strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(random)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("run", RUNS)
def test_resumed_bitwise(run, at):
    """D4, O10: what `step.state_dict()` holds, with the model's and the optimizer's own, is all that there is."""
    torch.manual_seed(1)
    whole = Run(**RUNS[run])
    for i in range(8):
        if i == at:
            file = whole.save()
        whole.round(i)
    expected, mean = snapshot(*whole.parts()), whole.step.mean()

    torch.manual_seed(999)
    resumed = Run(**RUNS[run])
    resumed.load(file)
    for i in range(at, 8):
        resumed.round(i)
    assert differences(snapshot(*resumed.parts()), expected) == []
    assert resumed.step.mean() == mean


def test_resumed_after_a_further_loss():
    torch.manual_seed(1)
    whole, x = Run(), torch.randn(4, 4)
    whole.step.backward(whole.model(x).sum())
    file = whole.save()
    whole.round(0)
    expected = snapshot(*whole.parts())
    resumed = Run()
    resumed.load(file)
    resumed.round(0)
    assert differences(snapshot(*resumed.parts()), expected) == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_models_with_parameters_of_the_same_name(accumulate):
    def build(seed):
        torch.manual_seed(seed)
        models = [nn.Linear(4, 2), nn.Linear(4, 2)]
        optimizer = AdamW([p for m in models for p in m.parameters()], lr=0.01)
        return (*optimize(models, optimizer, accumulate=accumulate), optimizer)

    def train(models, step, first, last):
        for i in range(first, last):
            step(sum(m(torch.full((1, 4), float(i))).square().sum() for m in models))

    models, step, optimizer = build(1)
    train(models, step, 0, 3)
    saved = [part.state_dict() for part in (*models, optimizer, step)]
    saved = torch.load(_stored(saved), weights_only=True)
    train(models, step, 3, 6)
    expected = snapshot(*models, optimizer, step)[:-1]
    models, step, optimizer = build(2)
    for part, state in zip((*models, optimizer, step), saved, strict=True):
        part.load_state_dict(state)
    train(models, step, 3, 6)
    assert differences(snapshot(*models, optimizer, step)[:-1], expected) == []


def _stored(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


def test_going_back_in_the_same_objects():
    """A state is a copy: what happens later does not show in it, and loading it twice gives the same run twice."""
    torch.manual_seed(1)
    run = Run(**RUNS["accumulate, clip, scheduler"])
    for i in range(4):
        run.round(i)
    file, state = run.save(), run.step.state_dict()
    ends = []
    for _ in range(2):
        run.load(file)
        run.step.load_state_dict(state)
        for i in range(4, 8):
            run.round(i)
        ends.append(snapshot(*run.parts()))
    assert differences(*ends) == []


@pytest.mark.simgpu
@pytest.mark.parametrize("run", ["sgd momentum", "accumulate, clip, scheduler", "fused adamw"])
@pytest.mark.parametrize("at", [2, 4])
def test_saved_on_an_accelerator_and_resumed_on_the_cpu(run, at):
    """In the middle of a window too. The simulated device computes as the CPU does, to the bit."""
    torch.manual_seed(1)
    whole = Run(**RUNS[run])
    for i in range(8):
        whole.round(i)
    expected = snapshot(*whole.parts())[:-1]

    torch.manual_seed(1)
    first = Run(**RUNS[run], device=simgpu.NAME)
    for i in range(at):
        first.round(i)
    file = first.save()
    resumed = Run(**RUNS[run])
    resumed.load(file)
    for i in range(at, 8):
        resumed.round(i)
    assert differences(snapshot(*resumed.parts())[:-1], expected) == []
