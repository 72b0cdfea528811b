"""cudnn.benchmark, decided for each shape when it is first seen.

torch keeps convolution plans in a cache that is keyed by the convolution and *not* by the flag, and asks that cache first
(`run_single_conv` in aten/src/ATen/native/cudnn/Conv_v8.cpp). A shape that first ran with the flag off keeps its heuristic
plan for ever: turning the flag on later does nothing for it. So "wait until the shapes look stable, then switch on" never
works, silently. Here the flag is on when a shape is first seen, as long as there is credit for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from hotloop._benchmark_flag import BenchmarkFlag, choose
from hotloop._facts import Facts
from hotloop._parts import NO_FLAGS, Parts
from hotloop._plan import Decision
from hotloop._tree import leaves

CREDIT = 8  # unseen shapes that may be benchmarked; each costs one
EARN = 50  # calls with a known shape that earn one credit back
_REMEMBERED = 10_000  # as many shapes as torch's own plan cache holds

Wish = bool | str


def decide(facts: Facts, wish: Wish) -> Decision:
    """On for a shape when it is first seen, with a credit against ever-new shapes; left alone where the user has chosen."""
    if wish is None or wish is False:
        return _decision("off", "asked for", lambda: Fixed(False))
    if wish is True:
        return _decision("on", "asked for", lambda: Fixed(True))
    if wish != "auto":
        raise ValueError(
            f"optimize(..., cudnn_benchmark={wish!r}): cudnn_benchmark is 'auto', True or False; write one of these"
        )
    if facts.machine.cudnn_benchmark:
        return Decision("cudnn_benchmark", "as it is", "torch.backends.cudnn.benchmark is on already: your choice")
    if facts.machine.deterministic:
        return Decision("cudnn_benchmark", "off", "deterministic algorithms are asked for, and benchmarking may change them")
    if facts.exact:
        return Decision("cudnn_benchmark", "off", "exact=True: another algorithm may round differently")
    if not facts.traits.convolutions:
        return Decision("cudnn_benchmark", "off", "the model has no convolution")
    why = f"on when a shape is first seen, for {CREDIT} shapes; {EARN} calls with a known shape earn one more"
    if facts.device.type == "cuda":
        why += "; the algorithms it picks may round differently (1e-6, with TF32 1e-3)"
    return _decision("by shape", why, ByShape)


def _decision(choice: str, why: str, make: Callable[[], Fixed | ByShape]) -> Decision:
    mine: list[Any] = []

    def apply(parts: Parts) -> Parts:
        flag = make()  # each model has its own credit

        def on_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            choose(flag(args, kwargs))
            return args, kwargs

        mine.append(on_inputs)
        return replace(parts, on_inputs=(*parts.on_inputs, on_inputs), flags=BenchmarkFlag())

    def revert(parts: Parts) -> Parts:
        return replace(parts, on_inputs=tuple(f for f in parts.on_inputs if f not in mine), flags=NO_FLAGS)

    return Decision("cudnn_benchmark", choice, why, apply, revert)


class Fixed:
    """The user's own value."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._value


class ByShape:
    """The value of the flag for each call of one model, by the shapes of its arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}
        self._credit = CREDIT
        self._calls = 0

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        shapes = signature(args, kwargs)
        known = self._known.get(shapes)
        if known is None:
            return self._first(shapes)
        self._calls += 1
        if self._calls == EARN:
            self._calls = 0
            self._credit = min(self._credit + 1, CREDIT)
        return known

    def _first(self, shapes: Any) -> bool:
        on = self._credit > 0
        self._credit -= on
        if len(self._known) == _REMEMBERED:
            self._known.pop(next(iter(self._known)))
        self._known[shapes] = on
        return on


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shapes of all tensors in the arguments of a call, hashable."""
    if not kwargs and all(type(a) is Tensor and not a.is_nested for a in args):
        return tuple([a.shape for a in args])
    return tuple([(t.dim(), t.numel()) if t.is_nested else t.shape for t in leaves((args, kwargs))])
