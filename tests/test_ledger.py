"""What became of the updates: counters and schedulers, right each time, without making the device wait."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as lrs

import hotloop
import simgpu
from parity.twins import differences, snapshot

# What is compared with runs on the CPU, also where there is an accelerator.
optimize = partial(hotloop.optimize, device="cpu", exact=True)
MSE = nn.MSELoss()


def net():
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def batches(count, overflow=()):
    torch.manual_seed(2)
    return [(torch.randn(4, 4), torch.randn(4, 2) * (float("inf") if i in overflow else 1.0)) for i in range(count)]


class Bare:
    """No scheduler of torch's: it has what the step needs and nothing else."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


SCHEDULERS = {
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)], [3]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)]),
    "Bare": Bare,
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_moves_once_per_update(kind, precision):
    """G8, G9, G15: of any kind; skipped updates do not move it. It is the user's own, on the user's own optimizer."""
    overflow = [0, 3, 4] if precision == "fp16" else []
    plain = net()
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    scheduler, rates = SCHEDULERS[kind](optimizer), []
    for i in range(12):
        if i not in overflow:
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[kind](optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if precision == "fp16" else None
    step = optimize(model, optimizer, MSE, scheduler=scheduler, precision=precision, scaler=scaler).step
    found = []
    for x, y in batches(12, overflow):
        step(x, y)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == rates
    assert (step.updates, step.skipped) == (12 - len(overflow), len(overflow))
    assert scheduler.optimizer is optimizer


@pytest.mark.parametrize("overflow", [[0, 1, 2], [0], [1, 2]])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_brings_no_warning_of_torchs(overflow, fused):
    """A1, A4: torch warns of a scheduler that moves before its optimizer."""
    model = net()
    optimizer = AdamW(model.parameters(), fused=fused)
    scheduler = lrs.StepLR(optimizer, 1)
    step = optimize(model, optimizer, MSE, precision="fp16", scheduler=scheduler).step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches(5, overflow):
            step(x, y)
    assert scheduler.last_epoch == 5 - len(overflow)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scheduler_step_of_the_old_loop_warns_once(accumulate):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = lrs.StepLR(optimizer, 1, 0.9)
    step = optimize(model, optimizer, MSE, scheduler=scheduler, accumulate=accumulate).step
    data = batches(4 * accumulate)
    for x, y in data[:accumulate]:
        step(x, y)
    scheduler.step()
    for x, y in data[accumulate : 2 * accumulate - 1]:
        step(x, y)
    with pytest.warns(RuntimeWarning, match=r"scheduler\.step\(\) was called besides.*once an epoch") as caught:
        step(*data[2 * accumulate - 1])
    assert caught[0].filename == __file__
    for x, y in data[2 * accumulate :]:
        step(x, y)
        scheduler.step()  # it does not warn again: pytest makes a warning an error


def test_where_a_warning_is_an_error_the_next_batches_train():
    """The line is refused, not the step for ever."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = lrs.StepLR(optimizer, 1, 0.9)
    step = optimize(model, optimizer, MSE, scheduler=scheduler, accumulate=2).step
    data = batches(8)
    for x, y in data[:3]:
        step(x, y)
    scheduler.step()
    with pytest.raises(RuntimeWarning):
        step(*data[3])
    assert [step(x, y).updated for x, y in data[4:]] == [False, True, False, True]
    assert step.updates == 3


@pytest.mark.parametrize("at", [0, 2, 4, 6])
def test_a_scheduler_that_loads_its_state_is_no_leftover(at):
    """Back, or forward by one: where it stands then is not the user's doing."""

    def run(updates):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = lrs.StepLR(optimizer, 1, 0.9)
        step = optimize(model, optimizer, MSE, scheduler=scheduler).step
        for x, y in batches(updates):
            step(x, y)
        return step, scheduler

    state = run(at)[0].state_dict()
    step, scheduler = run(3)
    step.load_state_dict(state)
    for x, y in batches(3):
        step(x, y)
    assert (step.updates, scheduler.last_epoch) == (at + 3, at + 3)


def test_a_schedule_per_epoch_stays_the_users():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = lrs.StepLR(optimizer, 1, 0.5)
    step = optimize(model, optimizer, MSE).step
    for _ in range(3):
        for x, y in batches(2):
            step(x, y)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_with_two_optimizers_an_update_counts_if_any_has_stepped():
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    optimizers = [SGD(m.parameters(), lr=0.1) for m in models]
    schedulers = [lrs.StepLR(o, 1) for o in optimizers]
    models, step = optimize(models, optimizers, precision="fp16", scheduler=schedulers)
    counts = []
    x = torch.ones(1, 4)
    for a, b in [(1, 1), (float("inf"), 1), (1, float("inf")), (float("inf"), float("inf"))]:
        metrics = step(models[0](x).mean() * a + models[1](x).mean() * b)
        counts.append((metrics.skipped, step.updates, step.skipped, [s.last_epoch for s in schedulers]))
    assert counts == [(False, 1, 0, [1, 1]), (True, 2, 1, [1, 2]), (True, 3, 2, [2, 2]), (True, 3, 3, [2, 2])]


def test_an_optimizer_that_no_loss_has_reached_is_not_one_that_has_stepped():
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    models, step = optimize(models, [SGD(m.parameters(), lr=0.1) for m in models], precision="fp16")
    assert step(models[0](torch.ones(1, 4)).mean() * float("inf")).skipped
    assert (step.updates, step.skipped) == (0, 1)


def test_the_collapse_names_the_first_parameter_that_is_not_finite():
    """A30: also beside empty parameters, and in the second of two models."""
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    models[1].nothing = nn.Parameter(torch.empty(0))
    models, step = optimize(models, SGD([p for m in models for p in m.parameters()], lr=0.1), precision="fp16")
    x = torch.ones(1, 4)

    def loss():
        healthy = models[0](x).mean() + models[1].nothing.sum()
        return healthy + models[1](x).mean() * float("inf")

    for _ in range(19):
        step(loss())
    with pytest.warns(RuntimeWarning, match=r"20 updates running.*'(1\.)?weight'"):
        step(loss())


# --- on an accelerator ------------------------------------------------------------------------------------------------


def there(data):
    return [(x.to(simgpu.NAME), y.to(simgpu.NAME)) for x, y in data]


def simulated(scheduled, **options):
    model = net()
    optimizer = AdamW(model.to(simgpu.NAME).parameters(), fused=True)
    scheduler = lrs.StepLR(optimizer, 1, 0.9) if scheduled else None
    scaler = torch.amp.GradScaler(simgpu.NAME, init_scale=64.0)
    step = hotloop.optimize(
        model, optimizer, MSE, exact=True, precision="fp16", scaler=scaler, scheduler=scheduler, **options
    ).step
    return step, scheduler


@pytest.mark.simgpu
class TestFusedOnAnAccelerator:
    @pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"accumulate": 2}], ids=["bare", "clip", "accumulate"])
    def test_nothing_waits_over_a_hundred_steps(self, options):
        step, _ = simulated(scheduled=False, **options)
        data = there(batches(100, [0, 7, 8, 50]))
        step(*data[0])
        with simgpu.asynchronous():
            simgpu.counts.clear()
            metrics = [step(x, y) for x, y in data[1:]]
            assert simgpu.host_waits() == 0
            accumulate = options.get("accumulate", 1)
            assert metrics[48 + accumulate].skipped
            assert simgpu.host_waits() == 1
        assert (step.updates, step.skipped) == (100 // accumulate - 4, 4)

    def test_counters_wait_once(self):
        step, _ = simulated(scheduled=False)
        with simgpu.asynchronous():
            for x, y in there(batches(10, [0, 3])):
                step(x, y)
            simgpu.counts.clear()
            assert (step.updates, step.skipped) == (8, 2)
            assert simgpu.counts["event.synchronize"] <= 10
            simgpu.counts.clear()
            assert (step.updates, step.skipped) == (8, 2)
            assert simgpu.host_waits() == 0

    def test_a_scheduler_is_moved_just_before_the_next_update(self):
        """So that the learning rate is always right; `last_epoch` may lag until then."""
        step, scheduler = simulated(scheduled=True)
        rates = []
        step._optimizers[0].register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
        with simgpu.asynchronous():
            lag = []
            for x, y in there(batches(6, [0, 3])):
                step(x, y)
                lag.append(scheduler.last_epoch)
        assert lag == [0, 0, 1, 2, 2, 3]
        good = [0, 0, 1, 2, 2, 3]  # updates before each, skipped ones not counted
        assert rates == pytest.approx([1e-3 * 0.9**n for n in good])
        assert step.updates == 4
        assert scheduler.last_epoch == 4

    def test_outcomes_do_not_pile_up_for_ever(self, monkeypatch):
        monkeypatch.setattr("hotloop._ledger._PENDING", 16)
        step, _ = simulated(scheduled=False)
        with simgpu.asynchronous():
            for x, y in there(batches(50)):
                step(x, y)
                assert len(step._ledger._pending) <= 16
        assert step.updates == 50

    def test_state_is_that_of_the_cpu(self):
        """Weights, scheduler and scale, with overflows at the start, in the middle and two running."""
        data = batches(8, [0, 3, 4])
        step, scheduler = simulated(scheduled=True, clip_norm=0.5)
        for x, y in there(data):
            step(x, y)
        model = net()
        optimizer = AdamW(model.parameters(), fused=True)
        on_cpu = lrs.StepLR(optimizer, 1, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        twin = optimize(model, optimizer, MSE, precision="fp16", clip_norm=0.5, scheduler=on_cpu, scaler=scaler).step
        for x, y in data:
            twin(x, y)
        assert (step.updates, step.skipped, step.scale) == (twin.updates, twin.skipped, twin.scale) == (5, 3, 8.0)
        assert differences(snapshot(scheduler), snapshot(on_cpu)) == []
        for here, there_ in zip(model.parameters(), step._lives[0].parts.model.parameters(), strict=True):
            assert torch.allclose(here, there_.cpu(), atol=1e-5)
