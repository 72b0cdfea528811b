"""Taking an automatic choice back when the user's code cannot run under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hotloop._parts import Live, Parts
from hotloop._plan import Decision, revert

T = TypeVar("T")

# What torch and user code raise when they are given a dtype or a layout that they cannot work with. Other exceptions are no
# complaints: torch ends a recomputation under `checkpoint` with one.
_TELLING = (RuntimeError, TypeError, ValueError, AssertionError)


class Recovery:
    """Runs calls under automatic choices that user code may not bear, and runs a failed one again without them.

    The first call that raises is repeated without one choice, then without all, from the same random state, and so that each
    buffer is changed once. Where that works, the choice stays off for all models of the plan, which quotes the error; where it
    does not, the error was the user's own and is the one that the plain configuration gives.
    """

    def __init__(self, lives: Sequence[Live], choices: list[tuple[Decision, str]]) -> None:
        self._lives = lives
        self._choices = choices  # with what holds in its place
        self._running = False
        self._proven: dict[tuple[int, bool], _Buffers] = {}  # modes that have run

    def copy(self, live: Live) -> Recovery:
        """For a copy of a model."""
        return Recovery([live], list(self._choices))

    def attempt(self, live: Live, run: Callable[[], T]) -> T:
        """`run()`, which reads the live parts afresh each time; at most a few more times if it raises."""
        if self._running:  # a call inside a step is repeated with the whole step
            return run()
        mode = (id(live), live.parts.model.training)
        proven = self._proven.get(mode)
        saved = _Snapshot(live.parts, proven)
        self._running = True
        try:
            result = run()
            if proven is None:
                self._proven[mode] = _Buffers(live.parts.model)
            return result
        except torch.OutOfMemoryError:
            raise
        except _TELLING as error:
            return self._without(run, saved, error)
        finally:
            self._running = False

    def _without(self, run: Callable[[], T], saved: _Snapshot, first: Exception) -> T:
        error = first
        saved.failed()
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
            saved.finish()
            self._settle(dropped, first)
            return result
        saved.finish()
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


class _Buffers:
    """A model's buffers, and how to see which of them a run has changed without a copy of each.

    A buffer's version tells, but not of the statistics that a normalisation's kernel writes: BatchNorm counts its batches in
    another buffer, so that a module's buffers are taken together; InstanceNorm does not, and has its copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self.seen: list[Tensor] = []
        self.unseen: list[Tensor] = []
        self._owners: list[int] = []
        for i, part in enumerate(module.modules()):
            own = [b for b in part._buffers.values() if b is not None and not nn.parameter.is_lazy(b) and not b.is_inference()]
            if isinstance(part, nn.modules.instancenorm._InstanceNorm):
                self.unseen += own
            else:
                self.seen += own
                self._owners += [i] * len(own)

    def versions(self) -> list[int]:
        return [b._version for b in self.seen]

    def changed_since(self, versions: list[int]) -> list[Tensor]:
        touched = {owner for b, owner, version in zip(self.seen, self._owners, versions, strict=True) if b._version != version}
        return [b for b, owner in zip(self.seen, self._owners, strict=True) if owner in touched]


class _Snapshot:
    """What a call changes besides its result: the random state, and the model's buffers.

    Until a mode has run once the buffers are copied, which costs an operator each. From then on those that a failed run has
    changed are found by their versions: they hold what the batch gives them, and hold it again after the last run.
    """

    def __init__(self, parts: Parts, proven: _Buffers | None) -> None:
        self._random = torch.get_rng_state()
        self._device = parts.device
        module: Any = None if parts.device.type == "cpu" else torch.get_device_module(parts.device)
        self._module = module if hasattr(module, "get_rng_state") else None
        self._on_device = None if self._module is None else self._module.get_rng_state(parts.device)
        self._proven = proven
        if proven is None:
            buffers = _Buffers(parts.model)
            self._before = _copied([*buffers.seen, *buffers.unseen])
        else:
            self._before, self._versions = _copied(proven.unseen), proven.versions()
        self._changed: list[tuple[Tensor, Tensor]] = []

    def failed(self) -> None:
        """The first run has raised."""
        if self._proven is not None:
            self._changed = _copied(self._proven.changed_since(self._versions))

    def restore(self) -> None:
        """Before another run."""
        torch.set_rng_state(self._random)
        if self._module is not None:
            self._module.set_rng_state(self._on_device, self._device)
        _put_back(self._before)

    def finish(self) -> None:
        """After the last run."""
        _put_back(self._changed)


def _copied(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return [(tensor, tensor.clone()) for tensor in tensors]


def _put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in copies:
        tensor.data.copy_(value)  # its version stays: the run that worked may have saved it for its backward
