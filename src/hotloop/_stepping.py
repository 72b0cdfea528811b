"""How one optimizer is stepped: what fused kernels need before, and the call itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim import optimizer as optim

from hotloop._rebind import fit_state

_pre_hooks, _post_hooks = optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks
_watchers: dict[object, Callable[[], None]] = {}  # what evaluations of now have called after any optimizer's step
_own_hook: Any = None  # the one hook for all optimizers that is ours


def _code_around(decorate: Callable[[Any], Any]) -> CodeType | None:
    """What tells a function that `decorate` has made from any other; torch marks them in no way that a user's wrapper keeps out."""
    return getattr(decorate(lambda: None), "__code__", None)


_HOOKED = _code_around(Optimizer.profile_hook_step)
_WITHOUT_GRADIENTS = _code_around(optim._use_grad_for_differentiable)


def issue(optimizer: Optimizer) -> None:
    """`optimizer.step()`, past torch's wrappers around it where they have nothing to do.

    The outer one opens a profiler region and loops over hooks, the inner one turns gradients off in a roundabout way: together
    they take as long as a third of a small fused step. They are left out where no profiler runs and the only hooks are ours.
    """
    step: Any = type(optimizer).step
    try:
        if (
            getattr(step, "__code__", None) is _HOOKED
            and "step" not in optimizer.__dict__
            and len(optimizer._optimizer_step_post_hooks) == 1
            and not optimizer._optimizer_step_pre_hooks
            and not _pre_hooks
            and (not _post_hooks or (len(_post_hooks) == 1 and _is_watched()))
            and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        ):
            run = step.__wrapped__
            if getattr(run, "__code__", None) is _WITHOUT_GRADIENTS and not optimizer.defaults["differentiable"]:
                enabled = torch.is_grad_enabled()
                torch.set_grad_enabled(False)
                try:
                    run.__wrapped__(optimizer)
                finally:
                    torch.set_grad_enabled(enabled)
            else:
                run(optimizer)
            if _watchers:
                _tell_watchers()
        else:
            optimizer.step()
    except (AssertionError, TypeError) as error:
        _explain_closure(optimizer, error)
        raise


def _explain_closure(optimizer: Optimizer, error: Exception) -> None:
    """Add the way out where an optimizer wants a closure that its signature says it can do without."""
    if type(optimizer).__module__.startswith("torch.") or "closure" not in inspect.signature(optimizer.step).parameters:
        return
    name = type(optimizer).__name__
    error.args = (
        f"{error}\n\nhotloop: {name}.step() was called without a closure. If it needs one, say so in its signature, and the step "
        f"passes one that evaluates the loss again: `class Own({name}): def step(self, closure): return super().step(closure)`",
    )


def watch_all(watcher: Callable[[], None]) -> Callable[[], None]:
    """Have `watcher` called after the step of any optimizer, the user's too; returns what ends that."""
    global _own_hook
    # Once and for good: torch loops over the hooks themselves, and one that comes or goes makes a step in another thread fail.
    if not _is_watched():
        _own_hook = optim.register_optimizer_step_post_hook(_tell_watchers)
    key = object()
    _watchers[key] = watcher

    def end() -> None:
        _watchers.pop(key, None)

    return end


def _is_watched() -> bool:
    return _own_hook is not None and _own_hook.id in _post_hooks


def _tell_watchers(*_: Any) -> None:
    for watcher in list(_watchers.values()):
        watcher()


class Stepping:
    """The step of one optimizer, with what its fused kernels need and torch does not see to.

    They run over the memory of a parameter, its gradient and its state side by side, whatever strides and sizes say. Where user
    code has laid one of them out otherwise the weights would be wrong without a word; where it has made one larger, the kernel
    would write beyond the other. SGD's momentum buffers are made together: torch fails where one parameter has its first gradient
    later than others, and leaves all of them uninitialised when the first scaled step overflows. (With dampening zeros would not
    be what torch starts from.)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._layouts: list[Any] = []  # of the parameters, as they were when all was in order
        self._state: Any = None
        self._in_slices: list[Tensor] = []  # parameters that are slices of other tensors

    def run(self, step: Callable[[Optimizer], Any], *, scaled: bool) -> None:
        """`step(optimizer)`, once everything is in order."""
        self._prepare(scaled)
        if not self._in_slices:
            step(self._optimizer)
            return
        slices = [(parameter, parameter.data) for parameter in self._in_slices]
        try:
            for parameter, part in slices:
                parameter.data = part.clone(memory_format=torch.contiguous_format)
            self._lay_out_gradients()
            fit_state(self._optimizer)
            step(self._optimizer)
        finally:
            for parameter, part in slices:
                parameter.data = part.copy_(parameter.data)

    def _prepare(self, scaled: bool) -> None:
        optimizer, layouts, odd = self._optimizer, [], False
        for group in optimizer.param_groups:
            if not group.get("fused"):
                continue
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None and is_lazy(parameter):  # no batch has reached it by now
                    continue
                # These questions cost less than shapes and strides do.
                if parameter.is_contiguous():
                    layouts.append(parameter.numel())
                    odd = odd or not (gradient is None or gradient.is_contiguous())
                else:
                    layouts.append((parameter.shape, parameter.stride()))
                    odd = True
            if type(optimizer) is torch.optim.SGD and group["momentum"] and not group["dampening"]:
                self._make_momentum(group, scaled)
        if odd:
            self._lay_out_gradients()
        if layouts != self._layouts or optimizer.state is not self._state:
            self._refit()
            self._layouts, self._state = layouts, optimizer.state

    def _make_momentum(self, group: dict[str, Any], scaled: bool) -> None:
        state = self._optimizer.state
        reached = [p for p in group["params"] if p.grad is not None]
        missing = [p for p in reached if state[p].get("momentum_buffer") is None]
        if scaled or len(missing) < len(reached):
            for parameter in missing:
                state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def _lay_out_gradients(self) -> None:
        for parameter in self._fused():
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and gradient.stride() != parameter.stride():
                with torch.no_grad():
                    parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def _refit(self) -> None:
        """The optimizer is new, its parameters are laid out in another way, or another state was loaded."""
        optimizer = self._optimizer
        for parameter in self._fused():
            beside = {"gradient": parameter.grad, **optimizer.state.get(parameter, {})}
            for name, value in beside.items():
                if name != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
                    raise RuntimeError(
                        f"{type(optimizer).__name__}: a parameter has the shape {tuple(parameter.shape)} now, and its {name} "
                        f"{tuple(value.shape)}; after parameters were resized make a new optimizer, or drop what it holds of them "
                        "(optimizer.state.pop(parameter)); a checkpoint must be one of the same model"
                    )
        self._in_slices = [p for p in self._fused() if not p.is_contiguous() and has_gaps(p)]
        fit_state(optimizer)

    def _fused(self) -> Iterator[Tensor]:
        return (p for group in self._optimizer.param_groups if group.get("fused") for p in group["params"] if not is_lazy(p))


def has_gaps(tensor: Tensor) -> bool:
    """Whether there is memory of others, or of its own once more, between a tensor's elements."""
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return extent != max(tensor.numel(), 1)
