"""`step.state_dict()`: what is in it, and that a state which does not fit changes nothing."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import hotloop
from parity.twins import differences
from parity.untouched import refused

optimize = partial(hotloop.optimize, device="cpu", exact=True)
MSE = nn.MSELoss()


def made(*, shape=(4, 2), scheduler=True, **options):
    """A step in the middle of a window, which holds something of everything."""
    torch.manual_seed(1)
    model = nn.Linear(*shape)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"accumulate": 3, "precision": "fp16", **options}
    step = optimize(model, optimizer, MSE, scheduler=StepLR(optimizer, 1, 0.9) if scheduler else None, **options).step
    for i in range(5 if options["accumulate"] == 3 else 4):
        step(torch.randn(3, shape[0]), torch.randn(3, shape[1]) * (1e30 if i == 0 else 1e-3), weight=1 + i)
    return step


def test_what_a_state_holds():
    step = made()
    state = step.state_dict()
    assert state["version"] == 1
    assert state["scaler"] == step.scaler.state_dict()
    assert state["scaler"]["scale"] == 65536.0 / 2
    assert (state["updates"], state["skipped"]) == (0, 1) == (step.updates, step.skipped)
    assert state["schedulers"][0]["last_epoch"] == 0
    assert state["window"]["size"] == 3
    assert state["window"]["count"] == 2
    assert state["window"]["gradients"].keys() == {"weight", "bias"}


def test_a_closed_window_holds_no_gradients():
    step = made(accumulate=2)
    assert step._lives[0].parts.model.weight.grad is not None
    assert step.state_dict()["window"]["gradients"] == {}


def test_it_is_a_copy():
    step = made()
    state = step.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(4):
        step(torch.randn(3, 4), torch.randn(3, 2))
    assert differences(state, kept) == []
    step.load_state_dict(state)
    for _ in range(4):
        step(torch.randn(3, 4), torch.randn(3, 2))
    step.mean()
    assert differences(state, kept) == []


def test_what_was_open_before_is_gone():
    step = made()
    model = step._lives[0].parts.model
    state = made(accumulate=3).state_dict()
    state["window"].update(count=0, weight=0.0, gradients={}, steps=[])
    step.load_state_dict(state)
    assert model.weight.grad is None
    assert step.flush() is False


def test_a_disabled_scaler_has_an_empty_state():
    step = made(precision="fp32")
    assert step.state_dict()["scaler"] == {}
    step.load_state_dict(step.state_dict())


@pytest.mark.parametrize("scheduled", [True, False])
def test_loaded_it_is_the_same(scheduled):
    state = made(scheduler=scheduled).state_dict()
    other = made(scheduler=scheduled)
    for _ in range(5):
        other(torch.randn(3, 4), torch.randn(3, 2))
    other.load_state_dict(state)
    assert differences(other.state_dict(), state) == []


def changed(path, value):
    """A change of a state: the item at this path."""

    def change(state):
        *way, last = path
        for key in way:
            state = state[key]
        if value is ...:
            del state[last]
        else:
            state[last] = value

    return change


BAD = {
    "another version": (changed(["version"], 2), r"its version is 2, and this hotloop writes version 1"),
    "no version": (changed(["version"], ...), r"not the state of a step"),
    "a key that lacks": (changed(["updates"], ...), r"keys version, scaler"),
    "a key too many": (changed(["epoch"], 3), r"should have the keys"),
    "no window": (changed(["window"], None), r"the window should have the keys"),
    "a key of the window": (changed(["window", "count"], ...), r"the window should have the keys"),
    "another accumulate": (changed(["window", "size"], 4), r"accumulate=4, and this step accumulate=3"),
    "a count too high": (changed(["window", "count"], 3), r"counters are out of range"),
    "a count below zero": (changed(["window", "count"], -1), r"counters are out of range"),
    "updates below zero": (changed(["updates"], -1), r"counters are out of range"),
    "skips below zero": (changed(["skipped"], -1), r"counters are out of range"),
    "text for a number": (changed(["updates"], "3"), r"updates in its state is of another type"),
    "a number for a weight": (changed(["window", "weight"], "heavy"), r"weight in its window is of another type"),
    "a scaler that lacks": (changed(["scaler"], {}), r"saved without a gradient scaler, and this step is with one"),
    "no scheduler": (changed(["schedulers"], []), r"holds 0 schedulers, and this step has 1"),
    "a scheduler of another kind": (changed(["schedulers", 0], {"T_max": 5, "last_epoch": 2}), r"schedul"),
    "text for a scheduler": (changed(["schedulers", 0], "StepLR"), r"."),
    "an unknown parameter": (changed(["window", "gradients", "head.weight"], torch.ones(2)), r"gradient of 'head\.weight'"),
    "a gradient of another shape": (changed(["window", "gradients", "weight"], torch.ones(2, 3)), r"'weight' has not the shape \(2, 4\)"),
    "a gradient that is none": (changed(["window", "gradients", "weight"], [1.0]), r"'weight' has not the shape"),
    "text for a scale": (changed(["scaler", "scale"], "large"), r"."),
    "text for a sum": (changed(["mean", "loss"], "large"), r"mean"),
    "a sum without weight": (changed(["mean", "loss"], [1.0]), r"mean"),
    "a step that is none": (changed(["window", "steps"], [3]), r"a step of its window"),
    "text for a step's values": (changed(["window", "steps"], [[["loss"], ["low"], 1.0]]), r"a step of its window"),
    "a step without a weight": (changed(["window", "steps"], [[["loss"], [1.0], None]]), r"a step of its window"),
    "a step without a name": (changed(["window", "steps"], [[[], [1.0], 1.0]]), r"a step of its window"),
    "numbers for names": (changed(["taken_back"], [1]), r"taken back should be names"),
    "nothing for a sum": (changed(["mean", "loss"], None), r"mean"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), BAD.values(), ids=BAD)
def test_a_state_that_does_not_fit_changes_nothing(change, text):
    """The state of a run that was elsewhere, so that anything taken over would show."""
    step, other = made(), made()
    for _ in range(7):
        other(torch.randn(3, 4), torch.randn(3, 2))
    state = other.state_dict()
    change(state)
    with refused(step, (ValueError, TypeError), text):
        step.load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], "state", {}, {"weight": torch.ones(2)}], ids=str)
def test_something_else_is_no_state(state):
    with refused(
        made(), ValueError, r"step\.load_state_dict\(state\): this is not the state of a step.*nothing has been loaded"
    ):
        made().load_state_dict(state)


OTHER_STEPS = {
    "without a scaler": ({"precision": "fp32"}, r"without a gradient scaler"),
    "another accumulate": ({"accumulate": 4}, r"accumulate=4"),
    "another model": ({"shape": (5, 2)}, r"'weight' has not the shape"),
    "without a scheduler": ({"scheduler": False}, r"0 schedulers"),
}


@pytest.mark.parametrize(("options", "text"), OTHER_STEPS.values(), ids=OTHER_STEPS)
def test_the_state_of_another_step(options, text):
    step = made()
    with refused(step, ValueError, text):
        step.load_state_dict(made(**options).state_dict())


def test_a_state_with_a_scaler_in_a_step_without_one():
    step = made(precision="fp32")
    with refused(step, ValueError, r"saved with a gradient scaler, and this step is without one"):
        step.load_state_dict(made().state_dict())


def test_the_state_of_a_step_with_another_scheduler():
    step = made()
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    other = optimize(model, optimizer, MSE, accumulate=3, precision="fp16", scheduler=CosineAnnealingLR(optimizer, 5)).step
    with refused(step, ValueError, r"schedul"):
        step.load_state_dict(other.state_dict())


def test_a_scheduler_that_refuses_its_state():
    """What is taken over before it is put back."""

    class Own(StepLR):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            if state["last_epoch"] == 77:
                raise KeyError("own words")

    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    step = optimize(model, optimizer, MSE, scheduler=[StepLR(optimizer, 1), Own(optimizer, 1)]).step
    step(torch.randn(3, 4), torch.randn(3, 2))
    state = step.state_dict()
    state["schedulers"][0]["last_epoch"] = 66
    state["schedulers"][1]["last_epoch"] = 77
    with refused(step, Exception, "own words"):
        step.load_state_dict(state)
    assert [s.last_epoch for s in step._schedulers] == [1, 1]


@pytest.mark.parametrize("close", ["flush", "step"])
def test_an_open_window_that_is_loaded_in_float16_can_be_closed_at_once(close):
    """Before any loss has been scaled."""
    first, resumed = made(), made()
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    fresh = optimize(model, optimizer, MSE, scheduler=StepLR(optimizer, 1, 0.9), accumulate=3, precision="fp16").step
    fresh.load_state_dict(first.state_dict())
    for step in (fresh, resumed):
        assert step.flush() if close == "flush" else step(torch.ones(3, 4), torch.ones(3, 2)).updated
    assert fresh.updates == resumed.updates == 1
    ours, theirs = (step._lives[0].parts.model.state_dict() for step in (fresh, resumed))
    assert differences(ours, theirs) == []


def test_a_state_of_before_steps_were_kept_loads():
    state = made().state_dict()
    del state["window"]["steps"]
    kept = copy.deepcopy(state)
    step = made()
    step.load_state_dict(state)
    assert differences(state, kept) == []
    assert step.state_dict()["window"]["count"] == kept["window"]["count"]
