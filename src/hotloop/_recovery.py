"""Taking an automatic choice back when the user's code cannot run under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from hotloop._parts import Live
from hotloop._plan import Decision

T = TypeVar("T")

# What torch and user code raise when they are given a dtype or a layout that they cannot work with. Other exceptions are no
# complaints: torch ends a recomputation under `checkpoint` with one.
_TELLING = (RuntimeError, TypeError, ValueError, AssertionError)


class Recovery:
    """Runs calls under automatic choices that user code may not bear, and runs a failed one again without them.

    The first call that raises is repeated without one choice, then without all, from the same random state and (in the
    first call of each mode) the same buffers. Where that works, the choice stays off and the plan quotes the error; where it
    does not, the error was the user's own and is the one that the plain configuration gives.
    """

    def __init__(self, live: Live, choices: list[tuple[Decision, str]]) -> None:
        self._live = live
        self._choices = choices  # with what holds in its place
        self._proven: set[bool] = set()

    def copy(self, live: Live) -> Recovery:
        """For a copy of the model."""
        return Recovery(live, list(self._choices))

    def attempt(self, run: Callable[[], T]) -> T:
        """`run()`, which reads the live parts afresh each time; at most a few more times if it raises."""
        model = self._live.parts.model
        mode = model.training
        saved = _Snapshot(self._live.parts.device, None if mode in self._proven else model)
        try:
            result = run()
        except torch.OutOfMemoryError:
            raise
        except _TELLING as error:
            return self._without(run, saved, error)
        self._proven.add(mode)
        return result

    def _without(self, run: Callable[[], T], saved: _Snapshot, error: Exception) -> T:
        live, first = self._live, error
        alone = [[choice] for choice in self._choices]
        for dropped in [*alone, self._choices] if len(alone) > 1 else alone:
            saved.restore()
            before = live.parts
            for decision, _ in dropped:
                live.parts = decision.revert(live.parts)
            try:
                result = run()
            except _TELLING as second:
                error = second
                for decision, _ in dropped:
                    decision.apply(before)  # for what it changes in place
                live.parts = before
                continue
            self._settle(dropped, first)
            return result
        raise error.with_traceback(error.__traceback__) from None

    def _settle(self, dropped: list[tuple[Decision, str]], error: Exception) -> None:
        quoted = str(error).strip().split("\n")[0]
        for decision, instead in dropped:
            why = f"the automatic {decision.choice} was taken back: {type(error).__name__}: {quoted}"
            self._live.plan.record(replace(decision, choice=instead, why=why))
        self._choices = [choice for choice in self._choices if choice not in dropped]
        if not self._choices:
            self._live.recovery = None


class _Snapshot:
    """What a call changes besides its result: the random state, and the buffers of `model` if it is given."""

    def __init__(self, device: torch.device, model: nn.Module | None) -> None:
        self._random = torch.get_rng_state()
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        if not hasattr(self._module, "get_rng_state"):
            self._module = None
        self._device = device
        self._on_device = None if self._module is None else self._module.get_rng_state(device)
        self._buffers = (
            [] if model is None else [(b, b.detach().clone()) for b in model.buffers() if not nn.parameter.is_lazy(b)]
        )

    def restore(self) -> None:
        torch.set_rng_state(self._random)
        if self._module is not None:
            self._module.set_rng_state(self._on_device, self._device)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
