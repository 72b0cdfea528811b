"""tune=True: real training steps in turns, and what a clock of ours makes the quickest stays."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam

from hotloop import _facts, _tune, optimize

CE = nn.CrossEntropyLoss()
COSTS = {"bf16": 1.0, "channels_last": 1.0, "fused": 1.0}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 2)
    )  # fmt: skip


def batches(count: int):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.randint(2, (4,), generator=generator)) for _ in range(count)]


class Clock:
    """Time passes in forwards alone, as much as the configuration in force costs; every forward is noted."""

    def __init__(self, raw: nn.Module, optimizer, **costs: float) -> None:
        self.time, self.costs, self.optimizer, self.seen = 0.0, {**COSTS, **costs}, optimizer, []
        raw.register_forward_pre_hook(self.forward)

    def __call__(self) -> float:
        return self.time

    def forward(self, module, args) -> None:
        on = {
            "bf16": torch.is_autocast_enabled("cpu"),
            "channels_last": args[0].is_contiguous(memory_format=torch.channels_last),
            "fused": bool(self.optimizer.param_groups[0].get("fused")),
        }
        self.seen.append(tuple(name for name, value in on.items() if value))
        self.time += math.prod(self.costs[name] for name in self.seen[-1])


@pytest.fixture
def make(monkeypatch):
    """`make(wishes, costs)`: a step that tunes by a clock of ours, on a CPU that has 16-bit units."""
    monkeypatch.setattr(_facts, "_cpu_16bit", lambda: "AMX")

    def made(optimizer=lambda p: SGD(p, 0.05, momentum=0.9), costs=None, loss_fn=CE, **wishes):
        raw = net()
        made_optimizer = optimizer(raw.parameters())
        clock = Clock(raw, made_optimizer, **(costs or {}))
        monkeypatch.setattr(_tune, "clock", clock)
        model, step = optimize(raw, made_optimizer, loss_fn, **{"tune": True, **wishes})
        return model, step, clock

    return made


def run(step, limit: int = 300) -> int:
    """Train until it is done; how many steps that took."""
    for i, (x, y) in enumerate(batches(limit)):
        if not step.tuning:
            return i
        step(x, y)
    raise AssertionError("tuning does not end")


CHOICES = {
    "bf16": ("precision", "bf16", "fp32"),
    "channels_last": ("channels_last", "on", "off"),
    "fused": ("fused_optimizer", "on", "off"),
}
each = pytest.mark.parametrize("name", CHOICES)


@each
@pytest.mark.parametrize(("cost", "wins"), [(0.9, True), (0.96, True), (0.98, False), (1.0, False), (1.1, False)])
def test_what_wins_by_three_percent_stays_and_the_plan_gives_the_ratio(make, name, cost, wins):
    _, step, clock = make(costs={name: cost})
    decision, on, off = CHOICES[name]
    assert step.tuning
    assert "being measured" in step.plan[decision].why
    run(step)
    assert step.plan[decision].choice == (on if wins else off)
    assert f"{cost:.2f} x the plain step" in step.plan[decision].why
    for other, (decision, _, off) in CHOICES.items():
        if other != name:
            assert step.plan[decision].choice == off
    for x, y in batches(3):
        step(x, y)
    assert clock.seen[-3:] == [(name,) if wins else ()] * 3


@each
def test_trials_alternate_with_the_plain_configuration(make, name):
    _, step, clock = make(costs={name: 0.5})
    run(step)
    turns = [s for s in clock.seen if s in ((), (name,))]
    first = turns.index((name,))
    assert turns[first : first + 17] == [(name,), *[(), (name,)] * 8]
    assert all(len(s) < 2 for s in clock.seen)


@each
def test_a_trial_twice_as_slow_is_dropped_after_the_first_step_that_counts(make, name):
    _, step, clock = make(costs={name: 2.5})
    run(step)
    assert clock.seen.count((name,)) == 2
    assert "2.50 x" in step.plan[CHOICES[name][0]].why


def test_winners_together_must_beat_the_best_of_them(make):
    _, step, clock = make(costs={"bf16": 0.5, "fused": 0.8, "channels_last": 0.7})
    run(step)
    assert [step.plan[d].choice for d, _, _ in CHOICES.values()] == ["bf16", "on", "on"]
    step(*batches(1)[0])
    assert clock.seen[-1] == ("bf16", "channels_last", "fused")


def test_winners_that_hinder_each_other_leave_the_best(make):
    _, step, clock = make(costs={"bf16": 0.5, "fused": 0.8})
    alone = clock.forward

    def forward(module, args):
        alone(module, args)
        if len(clock.seen[-1]) > 1:
            clock.time += 1

    step._live.parts.model._forward_pre_hooks.clear()
    step._live.parts.model.register_forward_pre_hook(forward)
    run(step)
    assert [step.plan[d].choice for d, _, _ in CHOICES.values()] == ["bf16", "off", "off"]
    assert "with precision" in step.plan["fused_optimizer"].why


@each
def test_noise_does_not_decide(make, name, monkeypatch):
    """A ratio of one with a spread of a half, by a generator of its own."""
    _, step, clock = make()
    noise, alone = torch.Generator().manual_seed(7), clock.forward

    def forward(module, args):
        alone(module, args)
        clock.time += float(torch.rand((), generator=noise)) - 0.5

    step._live.parts.model._forward_pre_hooks.clear()
    step._live.parts.model.register_forward_pre_hook(forward)
    run(step)
    assert step.plan[CHOICES[name][0]].choice == CHOICES[name][2]


def test_only_what_is_left_to_it_is_tried(make):
    _, step, clock = make(costs={"fused": 0.5}, precision="fp32", channels_last=False)
    run(step)
    assert set(clock.seen) == {(), ("fused",)}
    _, step, clock = make(costs={"bf16": 0.5}, exact=True)
    assert not step.tuning
    step(*batches(1)[0])
    assert set(clock.seen) == {()}


def test_it_asks_for_16_bits_only_where_there_are_units(make, monkeypatch):
    monkeypatch.setattr(_facts, "_cpu_16bit", lambda: "")
    _, step, clock = make()
    run(step)
    assert not any("bf16" in s for s in clock.seen)
    assert "no 16-bit units" in step.plan["precision"].why


@pytest.mark.parametrize("optimizer", [lambda p: SGD(p, 0.05, momentum=0.9), lambda p: Adam(p, 1e-3)], ids=["SGD", "Adam"])
def test_the_weights_are_those_of_an_untuned_run_within_rounding(make, optimizer):
    model, step, _ = make(optimizer, costs={"fused": 0.5}, precision="fp32")
    count = run(step)
    plain = net()
    theirs = optimizer(plain.parameters())
    for x, y in batches(count):
        theirs.zero_grad()
        CE(plain(x), y).backward()
        theirs.step()
    assert step.updates == count
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=1e-2)


def test_losses_of_the_users_own_forward(make):
    """`step(loss)`: the forward lies before the call."""
    model, step, _ = make(costs={"fused": 0.8, "bf16": 3.0}, loss_fn=None)
    for x, y in batches(200):
        if not step.tuning:
            break
        step(CE(model(x), y))
    assert step.plan["fused_optimizer"].choice == "on"
    assert step.plan["precision"].choice == "fp32"
    assert "0.80 x" in step.plan["fused_optimizer"].why


def test_windows_are_measured_whole(make):
    _, step, clock = make(costs={"fused": 0.5}, accumulate=3)
    run(step, 600)
    assert step.plan["fused_optimizer"].choice == "on"
    assert all(len(set(clock.seen[i : i + 3])) == 1 for i in range(0, len(clock.seen) - 2, 3))


def test_flushed_windows_and_further_backwards(make):
    """They make units of other sizes, which is noise; what pays all the same is found."""
    model, step, _ = make(costs={"fused": 0.2}, accumulate=2, loss_fn=None)
    for i, (x, y) in enumerate(batches(400)):
        if not step.tuning:
            break
        if i % 13 == 0:
            step.backward(CE(model(x), y))
        step(CE(model(x), y))
        if i % 11 == 0:
            step.flush()
    assert not step.tuning
    assert step.plan["fused_optimizer"].choice == "on"


def test_a_unit_that_raises_is_repeated(make):
    _, step, clock = make(costs={"fused": 0.5}, precision="fp32", channels_last=False)
    for i, (x, y) in enumerate(batches(200)):
        if not step.tuning:
            break
        if i % 3 == 2:
            before = clock.optimizer.param_groups[0]["fused"]
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                step(x, y[:2])
            assert clock.optimizer.param_groups[0]["fused"] == before
        step(x, y)
    assert step.plan["fused_optimizer"].choice == "on"
    assert "8 pairs" in step.plan["fused_optimizer"].why


def test_a_choice_that_user_code_cannot_bear_is_taken_back(make):
    """F4: `.view` on a feature map."""
    model, step, _ = make(costs={"channels_last": 0.5}, precision="fp32", fused=False)
    model.__wrapped__[3].forward = lambda x: x.view(len(x), -1)
    run(step)
    assert step.plan["channels_last"].choice == "off"
    assert "taken back" in step.plan["channels_last"].why
    assert step._live.parts.on_outputs == ()


def test_float16_with_a_scaler(make):
    _, step, clock = make(costs={"fused": 0.5}, precision="fp16")
    bad = batches(1)[0][0] * float("inf")
    for i, (x, y) in enumerate(batches(300)):
        if not step.tuning:
            break
        step(bad if i % 9 == 4 else x, y)
    assert step.plan["fused_optimizer"].choice == "on"
    assert step.plan["precision"].choice == "fp16"
    assert step.skipped > 0
    assert all("bf16" in s for s in clock.seen)  # autocast is on throughout


def test_a_state_is_loaded_in_mid_tuning(make):
    model, step, clock = make(costs={"fused": 0.5}, precision="fp32", channels_last=False)
    for x, y in batches(5):
        step(x, y)
    states = [copy.deepcopy(part.state_dict()) for part in (model, clock.optimizer, step)]
    for x, y in batches(4):
        step(x, y)
    for part, state in zip((model, clock.optimizer, step), states, strict=True):
        part.load_state_dict(state)
    assert step.updates == 5
    run(step)
    assert clock.optimizer.param_groups[0]["fused"]


def test_an_optimizer_with_a_closure(make):
    _, step, _ = make(lambda p: LBFGS(p, max_iter=2), costs={"channels_last": 0.5}, precision="fp32")
    run(step)
    assert step.plan["channels_last"].choice == "on"


def test_it_leaves_nothing_on_the_step_and_everything_can_be_reverted(make):
    _, step, clock = make(costs={"fused": 0.5, "channels_last": 0.5})
    before = set(vars(step)) - {"_train", "tuning"}
    run(step)
    assert set(vars(step)) - {"tuning"} == before
    parts = step._live.parts
    for name in ("channels_last", "fused_optimizer"):
        parts = step.plan[name].revert(parts)
    assert parts.on_outputs == ()
    assert clock.optimizer.param_groups[0]["fused"] is None


def test_slow_steps_are_boxed_in_time(make, monkeypatch):
    monkeypatch.setattr(_tune, "TIME_BOX", 20.0)
    _, step, clock = make(costs={"fused": 0.5})
    run(step)
    assert clock.time < 40
    assert step.plan["fused_optimizer"].choice == "off"


@pytest.mark.parametrize("wish", ["yes", 1, None])
def test_other_wishes_raise(wish):
    raw = net()
    with pytest.raises((TypeError, ValueError), match=r"optimize\(\.\.\., tune="):
        optimize(raw, SGD(raw.parameters(), 0.1), CE, tune=wish)


def test_without_an_optimizer_there_is_nothing_to_measure():
    with pytest.raises((TypeError, ValueError), match="tune"):
        optimize(net(), tune=True)


@pytest.mark.simgpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_on_an_accelerator(make, precision, monkeypatch):
    """What is timed is the work and not its issue: the model's device is waited for, but only while it measures."""
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: waited.append(device))
    _, step, _ = make(costs={"fused": 0.5}, precision=precision)
    run(step)
    assert step.plan["placement"].choice.startswith("simgpu")
    assert step.plan["fused_optimizer"].choice in ("on", "off")
    assert not step.tuning
    assert set(waited) == {torch.device("simgpu", 0)}
    waited.clear()
    step(*batches(1)[0])
    assert not waited
