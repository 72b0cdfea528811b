"""Modes of submodules: switched for a while, and given back one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hotloop import optimize
from hotloop._modes import Modes
from observing import in_threads


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Sequential(nn.Linear(8, 2), nn.Dropout()))


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def freeze(model: nn.Module, frozen: tuple[int, ...]) -> nn.Module:
    for i, module in enumerate(model.modules()):
        module.training = i not in frozen
    return model


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


MODELS = {
    "plain": net,
    "ModuleList": lambda: nn.ModuleList([net(), nn.Dropout()]),
    "ModuleDict": lambda: nn.ModuleDict({"a": net()}),
    "AveragedModel": lambda: AveragedModel(net()),
    "DataParallel": lambda: nn.DataParallel(net()),
    "holds a wrapped model": lambda: Holder(optimize(net())),
    "scripted": lambda: torch.jit.script(net()),
    "shared part": lambda: (lambda part: nn.Sequential(part, part, nn.Dropout()))(nn.Sequential(nn.Linear(4, 4), nn.Dropout())),
    "compiled": lambda: torch.compile(net(), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("frozen", [(), (2,), (0, 1, 2), (1, 4)], ids=str)
def test_every_submodule_gets_its_own_flag_back(make: Any, frozen: tuple[int, ...]) -> None:
    """N18, N19, N20"""
    model = freeze(make(), frozen)
    before = flags(model)
    assert any(before)
    modes = Modes([model])
    modes.switch()
    assert not any(flags(model))
    modes.restore()
    assert flags(model) == before


def test_a_wrapped_model_and_its_module_are_one() -> None:
    raw = freeze(net(), (2,))
    before = flags(raw)
    model = optimize(raw)
    modes = Modes([model, raw, model])
    assert len(modes.modules) == len(list(raw.modules()))
    modes.switch()
    assert not any(flags(raw))
    modes.restore()
    assert flags(raw) == before


class Counting(nn.Sequential):
    """Counts the calls of its own `train`."""

    calls: tuple[bool, ...] = ()

    def train(self, mode: bool = True) -> Counting:
        self.calls = (*self.calls, mode)
        return super().train(mode)


def test_what_is_in_eval_mode_is_left_alone() -> None:
    """N21: nothing is called, nothing is written."""
    model = Counting(net()).eval()
    model.calls = ()
    modes = Modes([model])
    modes.switch()
    modes.restore()
    assert model.calls == ()
    assert not any(flags(model))


def test_only_the_model_that_trains_is_switched() -> None:
    trains, evaluates = Counting(net()), Counting(net()).eval()
    trains.calls = evaluates.calls = ()
    modes = Modes([evaluates, trains])
    modes.switch()
    assert (trains.calls, evaluates.calls) == ((False,), ())
    modes.restore()
    assert (trains.calls, evaluates.calls) == ((False, True), ())


class Merged(nn.Linear):
    """Like an adapter that merges its weights for evaluation: its `train` does more than to set a flag."""

    merged = False

    def train(self, mode: bool = True) -> Merged:
        self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("inner", [False, True])
def test_a_train_method_of_the_users_own_is_called(inner: bool) -> None:
    """N25"""
    part = Merged(4, 4)
    model = nn.Sequential(nn.Sequential(part), nn.Dropout()) if inner else part
    modes = Modes([model])
    modes.switch()
    assert part.merged
    modes.restore()
    assert not part.merged
    assert part.training


def test_a_train_method_is_not_called_for_a_part_that_stays_in_eval_mode() -> None:
    part = Merged(4, 4).eval()
    model = nn.Sequential(part, nn.Dropout())
    modes = Modes([model])
    modes.switch()
    modes.restore()
    assert part.merged
    assert flags(model) == [True, False, True]


def test_an_eval_method_of_the_outermost_module_is_called() -> None:
    class Own(nn.Sequential):
        called = 0

        def eval(self) -> Own:
            self.called += 1
            return super().eval()

    model = Own(net())
    modes = Modes([model])
    modes.switch()
    assert model.called == 1
    assert not any(flags(model))
    modes.restore()
    assert all(flags(model))


def test_a_part_that_always_trains_goes_on() -> None:
    """Monte-Carlo dropout: what `eval()` of the user's own leaves in training mode stays there."""

    class AlwaysOn(nn.Sequential):
        def train(self, mode: bool = True) -> AlwaysOn:
            return super().train(True)

    model = nn.Sequential(nn.Dropout(), AlwaysOn(nn.Dropout()))
    modes = Modes([model])
    modes.switch()
    assert flags(model) == [False, False, True, True]
    modes.restore()
    assert flags(model) == [True] * 4


@pytest.mark.parametrize("first_out", [0, 1])
def test_overlapping_evaluations_of_models_that_share_a_part(first_out: int) -> None:
    """N25: the last one out restores, part by part."""
    shared = nn.Sequential(nn.Dropout())
    whole = nn.Sequential(shared, nn.Dropout())
    holders = [Modes([whole]), Modes([shared])]
    for modes in holders:
        modes.switch()
    holders.pop(first_out).restore()
    assert not any(flags(shared))
    assert whole[1].training == (first_out == 0)
    holders[0].restore()
    assert all(flags(whole))


def test_what_an_outer_body_trains_trains_on_after_an_inner_evaluation() -> None:
    model = net()
    outer, inner = Modes([model]), Modes([model])
    outer.switch()
    model.train()
    inner.switch()
    assert not any(flags(model))
    inner.restore()
    assert all(flags(model))
    model.eval()
    outer.restore()
    assert all(flags(model))


def test_modes_that_the_body_sets_do_not_stay() -> None:
    model = freeze(net(), (2,))
    before = flags(model)
    modes = Modes([model])
    modes.switch()
    model.train()  # the last line of many an evaluation
    modes.restore()
    assert flags(model) == before


def test_an_error_in_the_users_eval_changes_nothing() -> None:
    class Broken(nn.Sequential):
        def eval(self) -> Any:
            raise RuntimeError("not today")

    model = Broken(net())
    with pytest.raises(RuntimeError, match="not today"):
        Modes([model]).switch()
    assert all(flags(model))
    once_more = Modes([model[0]])
    once_more.switch()
    once_more.restore()
    assert all(flags(model))


def test_an_error_in_the_users_train_keeps_no_flag_from_the_others() -> None:
    class Broken(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            if mode:
                raise RuntimeError("not today")
            return super().train(mode)

    model = nn.Sequential(nn.Dropout(), Broken(nn.Dropout()), nn.Dropout())
    modes = Modes([model])
    modes.switch()
    with pytest.raises(RuntimeError, match="not today"):
        modes.restore()
    assert all(flags(model))


def test_eight_threads_evaluate_one_model() -> None:
    """F-17: with a bare flag the model ends in eval mode."""
    model = freeze(net(), (2,))
    before = flags(model)

    def work() -> None:
        for _ in range(100):
            modes = Modes([model])
            modes.switch()
            assert not any(flags(model))
            modes.restore()

    in_threads([work] * 8)
    assert flags(model) == before
