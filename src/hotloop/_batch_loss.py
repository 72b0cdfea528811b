"""The loss of a batch: the model's call, the loss function in float32, the user's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotloop import _forms as forms
from hotloop import _hints as hints
from hotloop._call import call, explain_devices
from hotloop._device import autocasts
from hotloop._parts import Live
from hotloop._tensors import as_float32
from hotloop._tree import leaves, map_leaves, move, move_call


@dataclass(frozen=True)
class Settings:
    """What the user wished of a step."""

    loss_fn: Callable[..., Any] | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    before_update: Callable[[], object] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    keep_output: bool = False


class BatchLoss:
    """Computes what a step minimises for a batch: the wrapped model's call, then `loss_fn` outside of autocast."""

    def __init__(self, lives: Sequence[Live], settings: Settings) -> None:
        self._lives = lives
        self._live = lives[0]
        self._settings = settings

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, forms.Named, Any]:
        """The loss of a batch, checked, with its metrics and, in a tuple, the output if it is kept."""
        written = (args, kwargs)
        if len(self._lives) > 1:
            raise TypeError(forms.several_models(args, kwargs))
        live, loss_fn = self._live, self._settings.loss_fn
        args, kwargs = move_call(args, kwargs, live.parts.device, live.parts.spread)
        batch = None
        if len(args) < 2:
            args, kwargs, batch = forms.unpacked(args, kwargs)
        target: Any = batch
        if batch is None and loss_fn is not None:
            forms.check_target(args, written)
            args, target = args[:-1], args[-1]
        elif batch is None and args:
            target = args[-1]
        output = self._call(args, kwargs, written)
        if live.parts.spread:
            target = _beside(output, target)
        result = output if loss_fn is None else self._loss(output, target)
        loss, named = (result, {}) if isinstance(result, Tensor) else forms.loss_and_metrics(result, loss_fn is None)
        forms.check_loss(loss, written, loss_fn is None)
        if self._settings.metrics is None and not self._settings.keep_output:
            if named:
                forms.check_metrics(named, written)
            return loss, named, ()
        output = map_leaves(Tensor.detach, output)
        if self._settings.metrics is not None:
            named = {**named, **self._user_metrics(output, target, named)}
        forms.check_metrics(named, written)
        return loss, named, (output,) if self._settings.keep_output else ()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], written: forms.Call) -> Any:
        live = self._live
        forward, model = live.parts.forward, live.parts.model
        try:
            return call(model if forward is None else forward, live, args, kwargs, moved=True)
        except TypeError as error:
            clearer = hints.explain_call(error, model, args, kwargs, self._settings.loss_fn is None, written)
            if clearer is error:
                hints.explain_loss_as_batch(error, args, written)
                raise
            raise clearer from None
        except (RuntimeError, IndexError) as error:
            hints.explain_loss_as_batch(error, args, written)
            raise

    def _loss(self, output: Any, target: Any) -> Any:
        """`loss_fn(output, target)` in float32: outside of autocast, also of the user's own."""
        loss_fn: Any = self._settings.loss_fn
        device_type = self._live.parts.device.type
        try:
            if autocasts(device_type):  # a region of the user's own
                with torch.autocast(device_type, enabled=False):
                    return loss_fn(map_leaves(as_float32, output), target)
            return loss_fn(output, target)
        except RuntimeError as error:
            explain_devices(error, self._live)
            raise
        except (TypeError, AttributeError) as error:
            hints.explain_loss(error, output, target)
            raise

    def _user_metrics(self, output: Any, target: Any, taken: forms.Named) -> forms.Named:
        found: forms.Named = {}
        with torch.no_grad():
            for name, metric in (self._settings.metrics or {}).items():
                value = metric(output, target)
                for key, scalar in value.items() if isinstance(value, Mapping) else [(name, value)]:
                    if key in found or key in taken:
                        raise ValueError(f"metrics={{{name!r}: ...}}: there is a metric {key!r} already; give it another name")
                    found[key] = scalar
        return found


def _beside(output: Any, target: Any) -> Any:
    """The target on the device where a model that is on several has left its output."""
    first = next(leaves(output), None)
    return target if first is None else move(target, first.device)
