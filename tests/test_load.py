"""Loads: many steps, many evaluations, many models, many threads. Nothing grows, nothing mixes.

Each has a short form, and a long one that is marked `soak` and run by `make soak`.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

import hotloop
from hotloop import fast_eval
from observing import in_threads
from parity.twins import differences, snapshot

MIB = 2**20
soak = pytest.mark.soak


def short_and_long(short, long):
    return pytest.mark.parametrize("count", [short, pytest.param(long, marks=soak)])


def resident():
    """Bytes of this process in memory, or none where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class Growth:
    """What is alive, and how much memory it takes, after a warm-up and in the end."""

    def __init__(self):
        self.tensors, self.objects, self.bytes = tensors(), len(gc.get_objects()), resident()

    def assert_none(self):
        assert tensors() <= self.tensors
        assert len(gc.get_objects()) <= self.objects + 50  # pytest and the interpreter make some now and then
        assert resident() - self.bytes < 1 * MIB


def job(precision="fp32", seed=1, optimizer=AdamW, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    made = optimizer(net.parameters(), lr=1e-3)
    if precision == "fp16":
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=50)
    return (*hotloop.optimize(net, made, F.cross_entropy, device="cpu", precision=precision, **options), made)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=generator), torch.randint(3, (4,), generator=generator)


LOADS = {
    "plain": {},
    "everything": {"precision": "fp16", "accumulate": 3, "clip_norm": 1.0, "fused": True},
    "metrics": {"metrics": {"top": lambda output, y: (output.argmax(1) == y).float().mean()}, "keep_output": True},
}


@short_and_long(2_000, 100_000)
@pytest.mark.parametrize("load", LOADS)
def test_many_steps(load, count, request):
    """S5, S8: metrics are kept, read and dropped at random; a bad batch comes now and then; the state is saved now and then."""
    chance, kept, seconds = random.Random(0), [], []
    options = dict(LOADS[load])
    step = job(**options)[1]
    data = [batch(i) for i in range(10)]
    warm = min(count // 2, 5_000)
    growth = None
    for i in range(count):
        if i == warm:
            kept.clear()
            growth = Growth()
        x, y = data[i % 10]
        start = time.perf_counter()
        metrics = step(x, y)
        seconds.append(time.perf_counter() - start) if i < 1000 or i >= count - 1000 else None
        action = chance.randrange(100)
        if action < 30:
            kept.append(metrics)
        elif action < 60:
            assert metrics["loss"] == metrics["loss"]
        elif action == 98:
            with pytest.raises(IndexError):
                step(x, y + 3)
        elif action == 99:
            step.load_state_dict(step.state_dict())
            step.mean()
        if len(kept) > 50:
            del kept[:]
    kept.clear()
    del metrics
    step.mean()
    size = len(seconds)
    early, late = sorted(seconds[: size // 2]), sorted(seconds[size // 2 :])
    seconds.clear()
    growth.assert_none()
    assert step.updates + step.skipped == count // options.get("accumulate", 1)
    if request.node.get_closest_marker("soak"):  # the quickest tenth: what other processes do is not in it
        assert late[size // 20] < 1.3 * early[size // 20]


@short_and_long(200, 10_000)
def test_many_evaluations_inside_training(count):
    """N18: training is bitwise as without them, and nothing of an evaluation stays."""
    torch.manual_seed(1)

    def build():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.LazyLinear(3))
        net(torch.zeros(2, 1, 6, 6))
        optimizer = SGD(net.parameters(), lr=0.01, momentum=0.9)
        return (*hotloop.optimize(net, optimizer, F.cross_entropy, device="cpu"), optimizer)

    x, y = torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])
    model, step, optimizer = build()

    @fast_eval
    def evaluate(model):
        return {"loss": F.cross_entropy(model(x), y), "scores": [s.mean() for s in model(x)]}

    @fast_eval
    def stream(model):
        for _ in range(2):
            yield model(x).sum()

    growth = None
    for i in range(count):
        if i == count // 2:
            growth = Growth()
        torch.manual_seed(i)
        step(x, y)
        result = evaluate(model)
        assert type(result["loss"]) is float
        if i % 10 == 0:
            next(stream(model))  # left in the middle
            assert len(list(stream(model))) == 2
        assert model.training
    del result
    growth.assert_none()

    twin, plain, its = build()
    for i in range(count):
        torch.manual_seed(i)
        plain(x, y)
    assert differences(snapshot(model, optimizer)[:-1], snapshot(twin, its)[:-1]) == []


@pytest.mark.parametrize("count", [64])
def test_many_models_in_one_process(count):
    """Each trains as it does alone; deleted, nothing of them is left."""
    kinds = itertools.cycle([{}, {"precision": "fp16", "fused": True}, {"accumulate": 2}, {"clip_norm": 0.1, "exact": True}])
    options = list(itertools.islice(kinds, count))
    gc.collect()
    jobs = [job(seed=i, **o) for i, o in enumerate(options)]
    for number in range(6):
        for model, step, optimizer in jobs:
            step(*batch(number))
            if number == 3:
                model.eval()
                assert not model(batch(0)[0]).requires_grad
                model.train()
            assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    for i in (0, 1, 2, 3, count - 1):
        model, step, optimizer = job(seed=i, **options[i])
        for number in range(6):
            step(*batch(number))
        assert differences(snapshot(model, optimizer)[:-1], snapshot(jobs[i][0], jobs[i][2])[:-1]) == []
    left = [weakref.ref(thing) for model, step, optimizer in jobs for thing in (model.__wrapped__, step, optimizer)]
    del jobs, model, step, optimizer
    gc.collect()
    assert [ref for ref in left if ref() is not None] == []


@short_and_long(20, 2_000)
def test_eight_threads_each_with_its_own_model(count):
    """Each ends bitwise where it does alone: precision, gradients and flags of one are not those of another."""
    kinds = [{}, {"precision": "bf16"}, {"precision": "fp16", "accumulate": 2}, {"clip_norm": 0.1}] * 2

    def train(made, evaluated):
        model, step, _ = made

        @fast_eval
        def evaluate(model):
            return model(batch(0)[0]).sum()

        for i in range(count):
            step(*batch(i))
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            if i % 5 == 0:
                evaluated.append(evaluate(model))

    ends = []
    for run in (in_threads, lambda functions: [function() for function in functions]):
        jobs = [job(seed=i, exact=True, **options) for i, options in enumerate(kinds)]
        results = [[] for _ in jobs]
        run([lambda made=made, found=found: train(made, found) for made, found in zip(jobs, results, strict=True)])
        ends.append([[snapshot(model, optimizer)[:-1] for model, _, optimizer in jobs], results])
    assert differences(*ends) == []


@short_and_long(20, 1_000)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eight_threads_that_evaluate_one_model(precision, count):
    """F-17: all see the model in eval mode, and it ends in the modes it had, submodule by submodule."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(3))
    net(torch.randn(8, 1, 6, 6))
    model = hotloop.optimize(net, device="cpu", precision=precision)
    model.train()
    net[3].eval()
    images = [torch.randn(2, 1, 6, 6) for _ in range(8)]
    modes = [m.training for m in net.modules()]
    buffers = copy.deepcopy(dict(net.named_buffers()))

    @fast_eval
    def evaluate(model, x):
        assert not any(m.training for m in model.modules())
        assert not torch.is_grad_enabled()
        return [score.sum() for score in model(x)]

    expected = [evaluate(model, x) for x in images]

    def check(i):
        for _ in range(count):
            assert evaluate(model, images[i]) == pytest.approx(expected[i], abs=1e-5 if precision == "fp32" else 0.05)

    in_threads([lambda i=i: check(i) for i in range(8)])
    assert [m.training for m in net.modules()] == modes
    assert differences(dict(net.named_buffers()), buffers) == []
