"""The training step of one process among several."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotloop import _forms as forms
from hotloop._dynamo import kept_from_dynamo
from hotloop._exchange import Exchange
from hotloop._given import Given
from hotloop._metrics import Metrics
from hotloop._processes import everyone, explain_lost, summed
from hotloop._scaling import make_ready
from hotloop._step import Step


class DistributedStep(Step):
    """A step whose gradients are averaged over all ranks, once an update: two ranks with half a batch each do what one
    process does with the whole batch.

    Every rank must make the same calls, in the same order; a rank that has no more batches calls `flush()`.
    """

    def __init__(self, exchange: Exchange | Given, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exchange = exchange
        self._size = dist.get_world_size()
        self._is_first = True
        self._update.averaged = isinstance(exchange, Exchange)
        self._switch()

    @kept_from_dynamo
    def __call__(self, /, *args: Any, weight: float | None = None, **kwargs: Any) -> Metrics:
        """As `Step.__call__`; `weight` is this micro-batch's weight among those of all ranks."""
        if weight is not None and self._window.common is None:
            self._window.common = self._exchange.agree(forms.check_weight(weight))
        try:
            return super().__call__(*args, weight=weight, **kwargs)
        finally:
            self._switch()

    def _switch(self) -> None:
        # At the end of a call: the forward that comes next may be the user's own.
        self._exchange.switch(self._window.count == self._window.size - 1)

    def _backward(self, loss: Tensor, weight: float) -> None:
        if not self._communicates():
            super()._backward(loss, weight)
            return
        try:
            if self._is_first:
                self._is_first = False
                with warnings.catch_warnings():
                    # Said once in a process: convolutions of one channel have strides that mean the same and are not equal.
                    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
                    self._exchanged(loss, weight)
            else:
                self._exchanged(loss, weight)
        except RuntimeError as error:
            explain_lost(error)
            raise

    def _communicates(self) -> bool:
        return self._closure or self._window.count >= self._window.size - 1

    def _exchanged(self, loss: Tensor, weight: float) -> None:
        window = self._window
        self._exchange.arm(window_is_open=window.is_open)
        super()._backward(loss, weight)
        self._exchange.finish(window.weight + weight / window.reference)

    def _close(self, factor: float) -> tuple[Tensor | None, list[Any]]:
        if not self._exchange.weighed:
            return super()._close(factor)
        # The weighted mean over what was in the window on all ranks; not read, so that nothing waits.
        weight = self._exchange.weight
        self._update.rescale(torch.where(weight == 0, 1.0, self._window.size * self._size / weight))
        return super()._close(1.0)

    def _closure_loss(self, loss: Tensor) -> Tensor:
        return (summed([loss.item()], loss.device) / self._size).to(loss.dtype)

    def flush(self, rescale: bool = True) -> bool:
        """Apply windows that are not full, and tell whether there was one on any rank; waits for all ranks.

        A rank that has no more batches waits here, and takes part in the updates of those that still have some, until all of
        them are here: ranks may have different numbers of batches. As under torch's `Join` an update is then divided by the
        number of all ranks; what is left in the end is the mean over what is really in it.
        """
        forms.refuse_inference_mode((), {}, "step.flush")
        self._window.check()
        if self._closure:
            return False
        if self._window.is_open:
            self._scaling.catch_up(self.scaler)
        try:
            return self._meet(rescale)
        except RuntimeError as error:
            explain_lost(error)
            raise
        finally:
            self._switch()

    def _meet(self, rescale: bool) -> bool:
        window = self._window
        self._exchange.end()
        make_ready(self.scaler, self._live.parts.device)
        while True:
            kept = self._set_aside()
            self._exchange.meet(window.weight)
            if self._exchange.all_have_ended():
                break
            self._record(*self._close(1.0))
        self._exchange.part()
        told = everyone((window.is_open, window.count, window.weight))
        if not any(is_open for is_open, _, _ in told):
            for parameter, gradient in kept:
                parameter.grad = gradient
            return False
        count, weight = sum(count for _, count, _ in told), sum(weight for _, _, weight in told)
        factor = (window.size * self._size if rescale else count) / weight if weight else 1.0
        self._record(*super()._close(factor))
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Step.load_state_dict`. Each rank loads its own state; where no window is open, that of any rank will do."""
        super().load_state_dict(state)
        self._switch()

    def _set_aside(self) -> list[tuple[Tensor, Tensor | None]]:
        """The gradients of an update that is done: they can be looked at, and belong to no other one."""
        if self._window.is_open:
            return []
        kept = [(parameter, parameter.grad) for parameter in self._exchange.everything]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    def mean(self) -> dict[str, float]:
        """The mean of every metric since the last call, over the steps of all ranks in which it was present, skipped ones
        left out; weighted by `weight=` where it was given. Every rank must call it, and gets the same numbers.
        """
        totals: dict[str, list[Any]] = {}
        for sums in everyone(self._taken_sums()):
            for name, (total, weight) in sums.items():
                pair = totals.setdefault(name, [0.0, 0.0])
                pair[0] += total
                pair[1] += weight
        return {name: total / weight for name, (total, weight) in totals.items() if weight}
