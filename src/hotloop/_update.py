"""The end of a window: unscale, before_update, clip, optimizer step, scaler update, in this order."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._stepping import Stepping, issue
from hotloop._window import Window


class Update:
    """Applies the gradients of a window with every optimizer.

    An overflow in float16 skips the optimizer. A fused optimizer decides that on the device, and nothing waits; any other one
    makes torch's own scaler read the flag.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        clip_norm: float | None,
        before_update: Callable[[], object] | None,
        window: Window,
        on_foreign: Callable[[str], None],
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._steppings = [Stepping(optimizer) for optimizer in optimizers]
        self._clip_norm = clip_norm
        self._before_update = before_update
        self._window = window
        self._on_foreign = on_foreign
        self.averaged = False  # over several processes: then a step from outside lets their weights drift apart
        self._running = False
        self._stepped: set[int] = set()
        self._applied: list[Any] = []  # weakly, one gradient of each group that has been applied
        self._reporting: set[int] = set()
        for optimizer in optimizers:
            # An optimizer around another one may have left torch's constructor, and with it the hooks, out.
            if getattr(type(optimizer).step, "hooked", False) and hasattr(optimizer, "_optimizer_step_post_hooks"):
                handle = optimizer.register_step_post_hook(_reporting_to(self))
                weakref.finalize(self, handle.remove)
                self._reporting.add(id(optimizer))

    def __call__(self, factor: float, scaler: torch.amp.GradScaler) -> tuple[Tensor | None, list[Any]]:
        """The norm of the gradients before clipping, if they are clipped, and for each optimizer whether it was skipped.

        The flags are empty without a scaler, and tensors where only the device knows.
        """
        if factor != 1.0:
            self.rescale(factor)
        self._running = True
        self._stepped.clear()
        try:
            if scaler.is_enabled():
                norm, flags = self._scaled(scaler)
            else:
                norm, flags = self.finish_gradients(), []
                for stepping in self._steppings:
                    stepping.run(issue, scaled=False)
        finally:
            self._running = False
            self._remember()
        if not self._applied:
            self._check_trained()
        return norm, flags

    def with_closure(self, closure: Callable[[], Tensor]) -> None:
        """A step of an optimizer that evaluates the loss itself."""
        self._running = True
        try:
            self._optimizers[0].step(closure)  # type: ignore[arg-type]
        finally:
            self._running = False
            self._remember()
        if not self._applied:
            self._check_trained()

    def _scaled(self, scaler: torch.amp.GradScaler) -> tuple[Tensor | None, list[Any]]:
        # The scaler refuses an optimizer that none of the losses reached; its own step has nothing to do then.
        reached = [o for o in self._optimizers if any(p.grad is not None for p in _parameters(o))]
        flags: dict[Optimizer, Any] = {}
        try:
            if self._clip_norm is not None or self._before_update is not None:
                for optimizer in reached:
                    scaler.unscale_(optimizer)
            norm = self.finish_gradients()
            if self._clip_norm is not None and len(reached) > 1:
                _share_overflow(scaler, reached)
            for optimizer, stepping in zip(self._optimizers, self._steppings, strict=True):
                if optimizer in reached:
                    stepping.run(scaler.step, scaled=True)
                    flags[optimizer] = self._flag(scaler, optimizer)
                else:
                    issue(optimizer)
        except BaseException:
            scaler.update(scaler.get_scale())  # forget what was unscaled; the scale stays
            for optimizer in reached:  # what the scaler gives to a fused one for a step: the next one would divide by both
                vars(optimizer).pop("grad_scale", None)
                vars(optimizer).pop("found_inf", None)
            raise
        if not reached:
            return norm, []
        scaler.update()
        if len(reached) < len(self._optimizers):
            nothing = _all_skipped(list(flags.values()))
            return norm, [flags.get(o, nothing) for o in self._optimizers]
        return norm, list(flags.values())

    def _flag(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Any:
        """Whether the optimizer was skipped: a tensor if its kernel has decided that on the device, or if it reports nothing."""
        if id(optimizer) in self._reporting and not getattr(optimizer, "_step_supports_amp_scaling", False):
            return id(optimizer) not in self._stepped
        found = list(scaler._found_inf_per_device(optimizer).values())
        if len(found) > 1:
            return torch.stack([f.to(found[0].device, non_blocking=True) for f in found]).amax()
        # With several optimizers `scaler.update` adds them up in place.
        return found[0] if len(self._optimizers) == 1 else found[0].clone()

    def finish_gradients(self) -> Tensor | None:
        """What happens between the last backward and the optimizer: the user's hook, then clipping."""
        if self._before_update is not None:
            self._before_update()
        if self._clip_norm is None:
            return None
        clipped = list(self._clipped())
        try:
            norm = torch.nn.utils.clip_grad_norm_(clipped, self._clip_norm)
        except NotImplementedError as error:
            sparse = next((p for p in clipped if p.grad is not None and p.grad.is_sparse), None)
            if sparse is None:
                raise
            raise TypeError(
                f"optimize(..., clip_norm={self._clip_norm}): the gradient of {self._name(sparse)} is sparse, and torch has no norm "
                "of sparse gradients; make the layer with sparse=False, or leave clip_norm away and clip the others in before_update="
            ) from error
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded parameters

    def _name(self, parameter: Tensor) -> str:
        named = (name for model in self._models for name, p in model.named_parameters() if p is parameter)
        return next((repr(name) for name in named), f"a parameter {tuple(parameter.shape)}")

    def _clipped(self) -> Iterator[Tensor]:
        """The models' parameters in their own order, then the optimizers' others: the order of the sum is part of its bits."""
        seen: set[int] = set()
        for source in (*(model.parameters() for model in self._models), *map(_parameters, self._optimizers)):
            for parameter in source:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply every gradient. A factor that is a tensor has one element."""
        with torch.no_grad():
            for parameter in self._clipped():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _remember(self) -> None:
        self._applied = applied = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        applied.append(weakref.ref(parameter.grad))
                        break

    def _check_trained(self) -> None:
        """No parameter of an optimizer had a gradient: raise if the models have other ones than the optimizers train."""
        own = {id(p): p for model in self._window.models for p in model.parameters()}
        if any(id(p) in own for o in self._optimizers for p in _parameters(o)):
            return
        if any(p.grad is not None for p in own.values()):
            raise RuntimeError(
                "step(...): the optimizer trains none of this model's parameters any more; something has replaced them, such as "
                "load_state_dict(..., assign=True) on the plain module; load into the wrapped model, or without assign, or make the "
                "optimizer anew and call optimize again"
            )

    def on_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: ours, or, with gradients that are applied already, a leftover of the old loop."""
        if self._running:
            self._stepped.add(id(optimizer))
        elif self._window.is_open:
            self._on_foreign("with the gradients of a part of an accumulation window: each call would apply some of them again")
        elif self._has_applied(optimizer):
            self._on_foreign("with the gradients that step has applied already: the update is done twice")
        elif self.averaged and any(group.get("lr") != 0 for group in optimizer.param_groups):  # 0 only makes the state
            self._on_foreign(
                "with gradients that were not averaged over the processes, so that their weights now differ: write step(loss)"
            )

    def _has_applied(self, optimizer: Optimizer) -> bool:
        applied = [gradient for reference in self._applied if (gradient := reference()) is not None]
        return any(p.grad is gradient for p in _parameters(optimizer) for gradient in applied)


def first_not_finite(models: Sequence[nn.Module]) -> str:
    """Names the first parameter with a gradient that is not finite. Reads gradients from the device."""
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not math.isfinite(parameter.grad.abs().max().item()):
                return f"the first parameter with a gradient that is not finite is {name!r}"
    return "no gradient that is left is other than finite"


def _share_overflow(scaler: torch.amp.GradScaler, optimizers: Sequence[Optimizer]) -> None:
    """Let an overflow of one optimizer skip all: the joint norm is not finite then, and clipping has spoiled every gradient."""
    found = [f for optimizer in optimizers for f in scaler._found_inf_per_device(optimizer).values()]
    # Fused kernels skip when the flag is exactly one.
    overflow = torch.stack([f.to(found[0].device, non_blocking=True) for f in found]).amax()
    for f in found:
        f.copy_(overflow, non_blocking=True)


def _all_skipped(flags: list[Any]) -> Any:
    """Whether every optimizer was skipped; a tensor if one of the flags is."""
    device = next((f.device for f in flags if isinstance(f, Tensor)), None)
    if device is None:
        return all(flags)
    return torch.stack([torch.as_tensor(f, dtype=torch.float32, device=device) for f in flags]).amin()


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _reporting_to(update: Update) -> Callable[[Optimizer, Any, Any], None]:
    # The user's optimizer outlives the step: it must not keep it alive.
    reference = weakref.ref(update)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.on_step(optimizer)

    return hook
