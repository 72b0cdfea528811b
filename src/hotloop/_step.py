"""The training step: forward, loss, backward, and at the end of a window the update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop import _forms as forms
from hotloop._backward import backward
from hotloop._batch_loss import BatchLoss, Settings
from hotloop._dynamo import kept_from_dynamo
from hotloop._hints import explain_backward
from hotloop._metrics import Metrics
from hotloop._parts import Live
from hotloop._plan import Plan
from hotloop._progress import Progress
from hotloop._reading import Reading, snapshot
from hotloop._scaling import Scaling
from hotloop._tensors import as_float32
from hotloop._update import Update


class Step(Progress):
    """One training step: `step(x, y)`, `step(batch)` or `step(loss)`.

    `step(x, y)` is exactly `step(loss_fn(model(x), y))`. Losses are divided by `accumulate`; every `accumulate`-th call closes
    the window: gradients are unscaled, clipped, applied, the scaler updated and the scheduler moved, in this order. Gradients
    are dropped at the start of a window, so that they can be looked at after a step. A window left open is carried over.

    Made by `optimize`; see there for an example. `tuning` is True as long as `tune=True` measures.
    """

    tuning = False

    def __init__(
        self,
        lives: Sequence[Live],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        settings: Settings,
        plan: Plan,
        *,
        closure: bool,
    ) -> None:
        super().__init__(lives, optimizers, schedulers, plan, window=settings.accumulate, loss_fn=settings.loss_fn)
        self._batch_loss = BatchLoss(self._lives, settings)
        self._closure = closure
        self._update = Update(
            self._models,
            self._optimizers,
            clip_norm=settings.clip_norm,
            before_update=settings.before_update,
            window=self._window,
            on_foreign=self._ledger.foreign_update,
        )
        self._scaling = Scaling(self._update.rescale)

    @kept_from_dynamo
    def __call__(self, /, *args: Any, weight: float | None = None, **kwargs: Any) -> Metrics:
        """Train on one batch, or on one loss; returns its metrics, which are read when they are looked at.

        With `loss_fn` the last positional argument is the target; one tuple or list is unpacked; a mapping is
        `model(**batch)`. Without `loss_fn` the model returns its own loss. A lone tensor that carries a graph is a loss, and
        keyword arguments are then further metrics. `weight` is this micro-batch's weight in its window, such as its number of
        samples or tokens.
        """
        share = 1.0 if weight is None else forms.check_weight(weight)
        forms.refuse_inference_mode(args, kwargs)
        if self._window.is_open:
            self._window.check()
        enabled, was_in_step, thread = torch.is_grad_enabled(), self._live.in_step, get_ident()
        for live in self._inside:
            live.in_step = thread
        try:
            if not enabled:
                torch.set_grad_enabled(True)
            return self._train(args, kwargs, share)
        finally:
            for live in self._inside:
                live.in_step = was_in_step
                live.parts.flags.restore()
            if not enabled:
                torch.set_grad_enabled(False)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any], weight: float) -> Metrics:
        if self._closure:
            return self._train_with_closure(args, kwargs, weight)
        if len(args) == 1 and forms.is_loss(args[0]):
            loss, named, output = args[0], kwargs, ()
            self._check_own_loss(loss, (args, kwargs))
            forms.check_metrics(named, (args, kwargs))
            self._window.open()
            self._backward(loss, weight)
        elif (recovery := self._live.recovery) is None or self._window.is_open:  # another thread may take it away
            loss, named, output = self._micro_batch(args, kwargs, weight)
        else:
            loss, named, output = recovery.attempt(self._live, partial(self._micro_batch, args, kwargs, weight), (args, kwargs))
        names, values = ["loss", *named], snapshot([loss, *named.values()])
        norm = flags = None
        if self._window.add(weight):
            norm, flags = self._close(self._window.factor())
        else:
            self._scaling.remember(self.scaler)
        return self._report(names, values, output, norm, flags, weight)

    def _micro_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], weight: float) -> tuple[Tensor, forms.Named, Any]:
        self._window.open()
        loss, named, output = self._batch_loss(args, kwargs)
        self._backward(loss, weight)
        return loss, named, output

    def _backward(self, loss: Tensor, weight: float) -> None:
        """The backward of a micro-batch's loss, divided by the window's size as a plain loop divides it."""
        if not self._live.exact:
            loss = as_float32(loss)
        share = self._window.share(weight, self._update.rescale)
        if share != 1.0:
            loss = loss * share
        if self._window.size != 1:
            loss = loss / self._window.size
        if weight == 0 and not self._communicates():
            with self._window.apart():
                self._run_backward(loss)
        else:
            self._run_backward(loss)

    def _communicates(self) -> bool:
        """Whether the next backward exchanges gradients with other processes."""
        return False

    def _run_backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        scaler = self._live.parts.scaler
        if self._window.is_open:
            self._scaling.catch_up(scaler)
        try:
            backward(scaler.scale(loss), retain_graph)
        except BaseException as error:
            self._window.drop()  # half a backward cannot be undone
            if isinstance(error, RuntimeError):
                recovery = self._live.recovery
                explain_backward(error, () if recovery is None or recovery.is_attempting() else recovery.names)
            raise

    def _close(self, factor: float) -> tuple[Tensor | None, list[Any]]:
        """Apply the window."""
        try:
            self._ledger.before_update()
            for look in self._live.parts.on_gradients:
                if (changed := look()) is not None:
                    self.plan.record(changed)
            norm, flags = self._update(factor, self._live.parts.scaler)
        except BaseException:
            self._window.drop()
            raise
        finally:
            torch.clear_autocast_cache()  # a surrounding autocast region would go on with casts of the old weights
        self._window.close()
        return norm, flags

    def _report(
        self,
        names: list[str],
        values: list[Any],
        output: tuple[Any, ...],
        norm: Tensor | None,
        flags: list[Any] | None,
        weight: float,
    ) -> Metrics:
        if norm is not None:
            names.append("grad_norm")
            values.append(norm)
        values.extend(flags or ())
        reading = Reading(values)
        if flags is not None:
            self._ledger.add(reading, len(flags))
        self._means.add(names, reading, weight, is_open=flags is None and self.scaler.is_enabled())
        return Metrics(names, reading, updated=flags is not None, output=output)

    def _train_with_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any], weight: float) -> Metrics:
        """For optimizers such as LBFGS, which evaluate the loss of the same batch several times."""
        if len(args) == 1 and forms.is_loss(args[0]):
            raise TypeError(forms.loss_for_closure(args, kwargs, self._optimizers[0]))
        first: list[Any] = []

        def closure() -> Tensor:
            self._window.drop()
            loss, named, output = self._batch_loss(args, kwargs)
            self._backward(loss, 1.0)
            norm = self._update.finish_gradients()
            if not first:
                first.append((["loss", *named], snapshot([loss, *named.values()]), output, norm))
            return self._closure_loss(loss)

        self._ledger.before_update()
        try:
            self._update.with_closure(closure)
        finally:
            torch.clear_autocast_cache()
        names, values, output, norm = first[0]
        return self._report(names, values, output, norm, [], weight)

    def _closure_loss(self, loss: Tensor) -> Tensor:
        """What the optimizer is told of a loss."""
        return loss

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Add the gradient of a further loss to the open window, as it is; it does not count as a micro-batch.

        For several losses with one update: `step.backward(a); step(b)` applies the sum of both gradients. Only `flush` and
        weights rescale it, with the rest of its window.
        """
        if self._closure:
            raise TypeError(forms.loss_for_closure((loss,), {}, self._optimizers[0], "step.backward"))
        forms.refuse_inference_mode((loss,), {}, "step.backward")
        self._check_own_loss(loss, ((loss,), {}, "step.backward"))
        self._window.check()
        self._window.open()
        with torch.enable_grad():
            self._run_backward(loss, retain_graph)
        self._window.extra = True
        self._window.watch()
        self._scaling.remember(self.scaler)

    def flush(self, rescale: bool = True) -> bool:
        """Apply a window that is not full, and tell whether there was one.

        Its gradient is divided by its true size; with `rescale=False` it stays divided by `accumulate`, as most hand-written
        loops leave it.
        """
        forms.refuse_inference_mode((), {}, "step.flush")
        self._window.check()
        if not self._window.is_open:
            return False
        self._scaling.catch_up(self.scaler)
        self._record(*self._close(self._window.factor(rescale=rescale)))
        return True

    def _record(self, norm: Tensor | None, flags: list[Any]) -> None:
        """Count an update that came without a batch."""
        self._report([], [], (), norm, flags, 1.0)
