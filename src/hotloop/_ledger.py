"""What became of the updates: counted, and the schedulers moved, without making the device wait."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hotloop._reading import Reading, read_all

COLLAPSE = 20  # so many skips running mean that something is wrong
_PENDING = 1024  # updates whose outcome may be unknown


class Ledger:
    """Counts updates and skips, and steps each scheduler once per update of its optimizer.

    An update that a fused kernel may have skipped is known on the device alone. Its outcome is read late: with a scheduler
    just before the next update is issued, so that the learning rate is always right; else when somebody asks, or when it has
    arrived anyway.
    """

    def __init__(self, optimizers: Sequence[Any], schedulers: Sequence[Any], blame: Callable[[], str]) -> None:
        self.updates = 0
        self.skipped = 0
        self.running = 0  # skips without an update between them
        self._schedulers = [(s, next(i for i, o in enumerate(optimizers) if o is s.optimizer)) for s in schedulers]
        self._moved: list[Any] = [None] * len(schedulers)  # where each scheduler stood when we last moved it
        self._blame = blame
        self._warned: set[str] = set()
        self._pending: deque[tuple[Reading, int]] = deque()

    def add(self, reading: Reading, flags: int) -> None:
        """An update was issued. The last `flags` values of `reading` tell for each optimizer whether it was skipped."""
        if flags == 0:
            self.updates += 1
            if self._schedulers:
                self._move_schedulers([])
        else:
            self._pending.append((reading, flags))
            self.poll()

    def before_update(self) -> None:
        """Learn what must be known before the next update is issued."""
        if self._schedulers:
            self._notice_foreign_steps()
        if self._pending and (self._schedulers or len(self._pending) >= _PENDING):
            self.settle()

    def poll(self) -> None:
        """Take in the outcomes that have arrived."""
        while self._pending and self._pending[0][0].ready():
            reading, flags = self._pending.popleft()
            self._count(reading.values()[-flags:])

    def settle(self) -> None:
        """Take in all outcomes. Waits for the device, with one transfer."""
        if self._pending:
            read_all([reading for reading, _ in self._pending])
            self.poll()

    def restore(self, updates: int, skipped: int, running: int) -> None:
        """Go on from these counts; the schedulers have been restored by then."""
        self._pending.clear()
        self.updates, self.skipped, self.running = updates, skipped, running
        self._moved = [None] * len(self._schedulers)

    def _count(self, skips: list[Any]) -> None:
        self.updates += not all(skips)
        self.skipped += any(skips)
        self.running = self.running + 1 if any(skips) else 0
        self._move_schedulers(skips)
        if self.running == COLLAPSE:
            self._warn(
                "collapse",
                f"{COLLAPSE} updates running were skipped, since gradients overflowed in float16, and the scale keeps halving; "
                f"{self._blame()}. Look at the data and the loss, or use precision='bf16'",
            )

    def _move_schedulers(self, skips: list[Any]) -> None:
        for i, (scheduler, optimizer) in enumerate(self._schedulers):
            if not (skips and skips[optimizer]):
                try:
                    scheduler.step()
                finally:
                    self._moved[i] = _position(scheduler)

    def _notice_foreign_steps(self) -> None:
        for (scheduler, _), moved in zip(self._schedulers, self._moved, strict=True):
            if moved is not None and _position(scheduler) == moved + 1:
                self._warn(
                    "scheduler",
                    "scheduler.step() was called besides the step's own: the learning rate moves twice an update; remove the "
                    "call from the loop, or leave scheduler= away and step it yourself, for example once an epoch",
                )

    def foreign_update(self, what: str) -> None:
        """Warn, once, of an `optimizer.step()` from outside."""
        self._warn("optimizer", f"optimizer.step() was called after step(...) {what}; remove the call from the loop")

    def replaced_gradients(self) -> None:
        """Warn, once, of gradients that are other tensors than those of the open window."""
        self._warn(
            "gradients",
            "inside of an accumulation window all gradients have been replaced: after zero_grad() and another backward the update "
            "would miss the micro-batches before; remove zero_grad() from the loop, give further losses to step.backward(loss), and "
            "change gradients in before_update=",
        )

    def cut_graph(self, call: str, model: str) -> None:
        """Warn, once, of a loss that does not train a model which the step is to train."""
        self._warn(
            "graph",
            f"{call} with {model} in eval mode: an eval-mode call keeps no graph, so this loss does not train it through that call; "
            "write optimize(..., inference='grad'), or model.train() with only the BatchNorm layers in eval; where that is meant, "
            "call it under torch.no_grad()",
        )

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"hotloop: {text}", RuntimeWarning, stacklevel=_outside())


def _position(scheduler: Any) -> int | None:
    position: int | None = getattr(scheduler, "last_epoch", None)  # a ChainedScheduler has none
    return position


def _outside() -> int:
    """The stack level of the user's line, for `warnings.warn` in the caller."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("hotloop", "torch"):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level
