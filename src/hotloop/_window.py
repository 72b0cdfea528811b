"""The accumulation window: the micro-batches whose gradients make one update."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_HEAVY = 8.0  # times the weight that others count relative to


class Window:
    """Counts micro-batches and their weights, and drops gradients at the start.

    Each loss is divided by the window's size before its backward, as a plain loop does; `factor` is what is left to multiply
    the gradients with at the end, when the window was cut short or its micro-batches were weighted.
    """

    def __init__(
        self,
        size: int,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self.size = size
        self.count = 0
        self.extra = False  # a `step.backward` has opened the window
        self.weight = 0.0
        self.reference = 1.0  # weights count relative to the first that is not 0, so that token counts do not blow gradients up
        self.common: float | None = None  # what weights count relative to instead, where several processes have agreed on it
        self.models = models
        self._optimizers = optimizers
        self._on_replaced = on_replaced
        self._watched: list[tuple[Tensor, int, weakref.ref[Tensor]]] = []

    @property
    def is_open(self) -> bool:
        return self.count > 0 or self.extra

    def open(self) -> None:
        """Drop what earlier losses left, unless the window is open already."""
        if not self.is_open:
            self.drop()

    def drop(self) -> None:
        """Forget the window: no gradients, no count."""
        self.close()
        for model in self.models:
            _drop_gradients(model)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            if type(optimizer).zero_grad is not Optimizer.zero_grad:
                optimizer.zero_grad()  # it may drop more than gradients

    def close(self) -> None:
        """The window has been applied. Its gradients can be looked at until the next one opens."""
        self.count = 0
        self.extra = False
        self.weight = 0.0
        self.reference = 1.0

    def share(self, weight: float, rescale: Callable[[float], None]) -> float:
        """What the loss of the next micro-batch is multiplied with, besides being divided by the window's size.

        Where it is much heavier than those before, `rescale` makes their gradients smaller instead: float16 would overflow.
        """
        if self.weight == 0 and weight > 0:
            self.reference = self.common or weight
        share = weight / self.reference
        if share > _HEAVY and self.common is None:
            power = 2.0 ** math.ceil(math.log2(share))  # of two: in float32 no bit is lost
            self.reference *= power
            self.weight /= power
            rescale(1 / power)
            share = weight / self.reference
        return share

    @contextmanager
    def apart(self) -> Iterator[None]:
        """For a backward whose gradients count for nothing, be they finite or not: it leaves zeros where there was none."""
        trained = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        parameters = {id(p): p for p in (*trained, *(p for model in self.models for p in model.parameters()))}
        before = [(p, p.grad) for p in parameters.values()]
        for parameter, _ in before:
            parameter.grad = None
        yield
        for parameter, gradient in before:
            if gradient is not None or parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad) if gradient is None else gradient

    def add(self, weight: float) -> bool:
        """A micro-batch's gradient is in; tells whether the window is full."""
        self.count += 1
        self.weight += weight / self.reference
        if self.count == self.size:
            return True
        self.watch()
        return False

    def factor(self, *, rescale: bool = True) -> float:
        """What the gradients must be multiplied with to be the weighted mean over what was really in the window.

        Without `rescale` the mean stays divided by the full size, as most hand-written loops leave it.
        """
        if self.count == 0 or self.weight == 0:
            return 1.0
        return (self.size if rescale else self.count) / self.weight

    def watch(self) -> None:
        """Remember the first and the last parameter with a gradient of each group, the gradients, weakly, and their versions."""
        self._watched = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for order in (group["params"], reversed(group["params"])):
                    for parameter in order:
                        if parameter.grad is not None:
                            self._watched.append((parameter, parameter.grad._version, weakref.ref(parameter.grad)))
                            break

    def _vanished(self) -> bool:
        if any(p.grad is None for p, _, _ in self._watched):
            return True
        # `zero_grad(set_to_none=False)` writes to all of them; only gradients that somebody has written to are worth a read, and
        # none that a device would have to be waited for.
        if any(p.device.type != "cpu" for p, _, _ in self._watched):
            return False
        written = all(p.grad is not None and p.grad._version != version for p, version, _ in self._watched)
        return bool(self._watched) and written and not any(p.grad is not None and p.grad.any() for p, _, _ in self._watched)

    def check(self) -> None:
        """Raise if a gradient of the open window has vanished since the last call; tell if all have been replaced by others."""
        if not self.is_open:
            return
        if self._vanished():
            done = f"{self.count} of {self.size} micro-batches"
            self.drop()
            raise RuntimeError(
                f"step(...): after {done} of a window their gradients have vanished, so the update would miss them; step drops "
                "gradients itself, at the start of a window: remove zero_grad() from the loop. The window has been dropped"
            )
        if self._watched and all(p.grad is not gradient() for p, _, gradient in self._watched):
            self._on_replaced()


def _drop_gradients(module: nn.Module) -> None:
    # By hand: `parameters()` and `zero_grad()` cost several times as much. Modules and parameters are looked up afresh, since
    # user code may replace them at any time.
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.grad = None
    for child in module._modules.values():
        if child is not None:
            _drop_gradients(child)
