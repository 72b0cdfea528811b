"""Taking an automatic choice back when the user's code cannot run under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from hotloop._parts import Live, Parts
from hotloop._plan import Decision, revert

T = TypeVar("T")

# What torch and user code raise when they are given a dtype or a layout that they cannot work with. Other exceptions are no
# complaints: torch ends a recomputation under `checkpoint` with one.
_TELLING = (RuntimeError, TypeError, ValueError, AssertionError)


class Recovery:
    """Runs calls under automatic choices that user code may not bear, and runs a failed one again without them.

    The first call that raises is repeated without one choice, then without all, from the same random state and (until the
    mode has run once: saving them costs an operator each) the same buffers. Where that works, the choice stays off for all
    models of the plan, which quotes the error; where it does not, the error was the user's own and is the one that the plain
    configuration gives.
    """

    def __init__(self, lives: Sequence[Live], choices: list[tuple[Decision, str]]) -> None:
        self._lives = lives
        self._choices = choices  # with what holds in its place
        self._running = False
        self._proven: set[tuple[int, bool]] = set()

    def copy(self, live: Live) -> Recovery:
        """For a copy of a model."""
        return Recovery([live], list(self._choices))

    def attempt(self, live: Live, run: Callable[[], T]) -> T:
        """`run()`, which reads the live parts afresh each time; at most a few more times if it raises."""
        if self._running:  # a call inside a step is repeated with the whole step
            return run()
        mode = (id(live), live.parts.model.training)
        saved = _Snapshot(live.parts, with_buffers=mode not in self._proven)
        self._running = True
        try:
            result = run()
            self._proven.add(mode)
            return result
        except torch.OutOfMemoryError:
            raise
        except _TELLING as error:
            return self._without(run, saved, error)
        finally:
            self._running = False

    def _without(self, run: Callable[[], T], saved: _Snapshot, first: Exception) -> T:
        error = first
        alone = [[choice] for choice in self._choices]
        for dropped in [*alone, self._choices] if len(alone) > 1 else alone:
            saved.restore()
            before = [live.parts for live in self._lives]
            for live in self._lives:
                live.parts = revert([decision for decision, _ in dropped], live.parts)
            try:
                result = run()
            except _TELLING as second:
                error = second
                for live, parts in zip(self._lives, before, strict=True):
                    for decision, _ in dropped:
                        decision.apply(parts)  # for what it changes in place
                    live.parts = parts
                continue
            self._settle(dropped, first)
            return result
        raise error.with_traceback(error.__traceback__) from None

    def _settle(self, dropped: list[tuple[Decision, str]], error: Exception) -> None:
        quoted = str(error).strip().split("\n")[0]
        for decision, instead in dropped:
            why = f"the automatic {decision.choice} was taken back: {type(error).__name__}: {quoted}"
            self._lives[0].plan.record(replace(decision, choice=instead, why=why))
        self._choices = [choice for choice in self._choices if choice not in dropped]
        if not self._choices:
            for live in self._lives:
                live.recovery = None


class _Snapshot:
    """What a call changes besides its result: the random state and, on demand, the model's buffers."""

    def __init__(self, parts: Parts, *, with_buffers: bool) -> None:
        self._random = torch.get_rng_state()
        self._device = parts.device
        module: Any = None if parts.device.type == "cpu" else torch.get_device_module(parts.device)
        self._module = module if hasattr(module, "get_rng_state") else None
        self._on_device = None if self._module is None else self._module.get_rng_state(parts.device)
        self._buffers = [b for b in parts.model.buffers() if not nn.parameter.is_lazy(b)] if with_buffers else []
        with torch.no_grad():
            self._values = [b.clone() for b in self._buffers]

    def restore(self) -> None:
        torch.set_rng_state(self._random)
        if self._module is not None:
            self._module.set_rng_state(self._on_device, self._device)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                buffer.copy_(value)
