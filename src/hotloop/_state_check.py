"""Whether a state is one that a step could have given."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

VERSION = 1
_LARGEST_SCALE = 3.4e38  # it is kept in float32
_LARGEST_TRACKER = 2**31 - 1  # and this in int32
_LARGEST_INTEGER = 2**63


def check(
    state: Any,
    expected: dict[str, Any],
    parameters: Mapping[str, Tensor],
    schedulers: Sequence[Any],
    may_take_back: Sequence[str],
) -> None:
    """Raise, with the reason, unless the state fits the step; `expected` is the state that it has now.

    A run that has taken automatic float16 back has no scaler any more; this step, which `may_take_back` the same, still has one.
    """
    if not isinstance(state, dict) or "version" not in state:
        _refuse("this is not the state of a step")
    if type(state["version"]) is not int or state["version"] != VERSION:
        _refuse(f"its version is {state['version']!r}, and this hotloop writes version {VERSION}")
    for place, mine, its in (("state", expected, state), ("window", expected["window"], state.get("window"))):
        if not isinstance(its, dict) or its.keys() != mine.keys():
            _refuse(f"the {place} should have the keys {', '.join(mine)}")
    for place, mine, its in (("state", expected, state), ("window", expected["window"], state["window"])):
        wrong = [key for key in mine if type(its[key]) is not type(mine[key])]
        if wrong:
            _refuse(f"{', '.join(wrong)} in its {place} {'is' if len(wrong) == 1 else 'are'} of another type")
    if not all(isinstance(name, str) for name in state["taken_back"]):
        _refuse("what it has taken back should be names")
    if min(state["updates"], state["skipped"], state["running_skips"]) < 0:
        _refuse("its counters are out of range")
    if state["scaler"] or "precision" not in {*state["taken_back"]} & {*may_take_back}:
        _check_scaler(state["scaler"], expected["scaler"])
    _check_schedulers(state["schedulers"], expected["schedulers"], schedulers)
    _check_window(state["window"], expected["window"]["size"], parameters)
    for name, pair in state["mean"].items():
        fits = isinstance(name, str) and isinstance(pair, list) and len(pair) == 2
        if (
            not fits
            or (not isinstance(pair[0], complex) and not _is_real(pair[0]))
            or not _is_real(pair[1])
            or not pair[1] >= 0
        ):
            _refuse(f"its mean of {name!r} is not [sum, weight]")


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"step.load_state_dict(state): {what}; load what step.state_dict() gave for a step made with the same arguments "
        "(nothing has been loaded)"
    )


def _check_scaler(its: dict[str, Any], mine: dict[str, Any]) -> None:
    if its.keys() != mine.keys():
        given, here = ("with" if part else "without" for part in (its, mine))
        _refuse(
            f"it was saved {given} a gradient scaler, and this step is {here} one; write the precision= of that run, since 'auto' "
            "follows the hardware"
        )
    for name, value in its.items():
        if not _is_real(value) or not _RANGES.get(name, math.isfinite)(value):
            _refuse(f"{name} of its scaler is {value!r}")


_RANGES: dict[str, Callable[[Any], bool]] = {
    "scale": lambda value: 0 < value < (_LARGEST_SCALE if isinstance(value, float) else _LARGEST_INTEGER),
    "growth_factor": lambda value: 1 <= value < _LARGEST_SCALE,
    "backoff_factor": lambda value: 0 < value <= 1,
    "growth_interval": lambda value: 1 <= value < _LARGEST_INTEGER,
    "_growth_tracker": lambda value: 0 <= value <= _LARGEST_TRACKER,
}


def _check_schedulers(its: list[Any], mine: list[Any], schedulers: Sequence[Any]) -> None:
    if len(its) != len(mine):
        _refuse(f"it holds {len(its)} schedulers, and this step has {len(mine)}")
    for scheduler, one, other in zip(schedulers, mine, its, strict=True):
        if not isinstance(other, dict) or other.keys() != one.keys():
            _refuse(f"its scheduler is no {type(scheduler).__name__}")
        wrong = [key for key in one if not _is_like(other[key], one[key], as_long=key != "_last_lr")]
        if wrong:
            _refuse(
                f"{', '.join(wrong)} of its {type(scheduler).__name__} {'is' if len(wrong) == 1 else 'are'} of another kind"
            )


def _is_like(its: Any, mine: Any, *, as_long: bool = True) -> bool:
    """Whether a value may stand where `mine` does. What it means is the scheduler's own affair."""
    if mine is None:
        return True
    if _is_real(mine):
        return _is_real(its) and its == its
    if isinstance(mine, Counter):
        return isinstance(its, dict) and all(map(_is_real, its.values()))
    if isinstance(mine, dict):
        return isinstance(its, dict) and its.keys() == mine.keys() and all(_is_like(its[key], mine[key]) for key in mine)
    if isinstance(mine, list | tuple):
        fits = isinstance(its, list | tuple) and (len(its) == len(mine) or not as_long)  # groups may have come since
        return fits and all(_is_like(one, other) for one, other in zip(its, mine, strict=False))
    return isinstance(its, type(mine))


def _check_window(window: dict[str, Any], size: int, parameters: Mapping[str, Tensor]) -> None:
    if window["size"] != size:
        _refuse(f"its window has accumulate={window['size']}, and this step accumulate={size}")
    if not 0 <= window["count"] < size:
        _refuse("its counters are out of range")
    if not 0 <= window["weight"] < math.inf or not 0 < window["reference"] < math.inf:
        _refuse("the weights of its window are out of range")
    for name, gradient in window["gradients"].items():
        if name not in parameters:
            _refuse(f"it holds a gradient of {name!r}, which this model does not have")
        if not isinstance(gradient, Tensor) or gradient.shape != parameters[name].shape:
            _refuse(f"its gradient of {name!r} has not the shape {tuple(parameters[name].shape)}")
        if gradient.dtype != parameters[name].dtype or gradient.is_meta:
            _refuse(
                f"its gradient of {name!r} is {gradient.dtype} on {gradient.device}, and the parameter {parameters[name].dtype}"
            )
    for step in window["steps"]:
        names, values, weight = step if isinstance(step, list) and len(step) == 3 else ([], None, None)
        fits = isinstance(names, list) and isinstance(values, list) and len(names) == len(values) > 0 and _is_real(weight)
        fits = fits and all(isinstance(name, str) for name in names) and 0 <= weight < math.inf
        if not (fits and all(isinstance(value, complex | bool) or _is_real(value) for value in values)):
            _refuse("a step of its window is not [names, values, weight]")
    if window["count"] == 0 and (window["steps"] or window["weight"] or (window["gradients"] and not window["extra"])):
        _refuse("there is something in a window that is not open")


def _is_real(value: Any) -> bool:
    # An integer that no float can hold would fail in the sums that go on from it.
    fits = isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    return fits and not isinstance(value, bool)
