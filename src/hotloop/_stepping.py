"""How one optimizer is stepped: what fused kernels need before, and the call itself."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optim

from hotloop._rebind import fit_state

_pre_hooks, _post_hooks = optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks
_watching: dict[int, Callable[[], None]] = {}  # those of the hooks for all optimizers that are our own


def _code_around(decorate: Callable[[Any], Any]) -> CodeType | None:
    """What tells a function that `decorate` has made from any other; torch marks them in no way that a user's wrapper keeps out."""
    return getattr(decorate(lambda: None), "__code__", None)


_HOOKED = _code_around(Optimizer.profile_hook_step)
_WITHOUT_GRADIENTS = _code_around(optim._use_grad_for_differentiable)


def issue(optimizer: Optimizer) -> None:
    """`optimizer.step()`, past torch's wrappers around it where they have nothing to do.

    The outer one opens a profiler region and loops over hooks, the inner one turns gradients off in a roundabout way: together
    they take as long as a third of a small fused step. They are left out where no profiler runs and the only hook is ours, which
    tells foreign steps from our own. Nor is the outer one safe while another thread begins or ends an evaluation, which watches
    all optimizers: torch loops over the hooks themselves.
    """
    step: Any = type(optimizer).step
    if (
        getattr(step, "__code__", None) is _HOOKED
        and "step" not in optimizer.__dict__
        and len(optimizer._optimizer_step_post_hooks) == 1
        and not optimizer._optimizer_step_pre_hooks
        and not _pre_hooks
        and (not _post_hooks or _post_hooks.keys() <= _watching.keys())
        and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    ):
        run = step.__wrapped__
        if getattr(run, "__code__", None) is _WITHOUT_GRADIENTS and not optimizer.defaults["differentiable"]:
            torch.set_grad_enabled(False)
            try:
                run.__wrapped__(optimizer)
            finally:
                torch.set_grad_enabled(True)
        else:
            run(optimizer)
        if _watching:
            for watcher in list(_watching.values()):
                watcher()
    else:
        optimizer.step()


def watch_all(watcher: Callable[[], None]) -> Callable[[], None]:
    """Have `watcher` called after the step of any optimizer, the user's too; returns what ends that."""
    handle = optim.register_optimizer_step_post_hook(lambda *_: watcher())
    _watching[handle.id] = watcher

    def end() -> None:
        handle.remove()
        _watching.pop(handle.id, None)

    return end


class Preparation:
    """Sees to what the fused kernels of one optimizer need, and torch does not.

    On a CPU they run over the memory of a parameter, its gradient and its state side by side, whatever the strides say: where
    user code has laid one of them out otherwise, the weights would be wrong without a word. SGD's momentum buffers are made
    together: torch fails where one parameter has its first gradient later than others, and leaves all of them uninitialised
    when the first scaled step overflows. (With dampening zeros would not be what torch starts from.)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._layouts: dict[int, tuple[int, ...]] | None = None  # the strides of the parameters that are not contiguous

    def __call__(self, *, scaled: bool) -> None:
        """Before each step of the optimizer."""
        optimizer = self._optimizer
        layouts: dict[int, tuple[int, ...]] = {}
        for group in optimizer.param_groups:
            if not group.get("fused"):
                continue
            for parameter in group["params"]:
                gradient = parameter.grad
                # Both questions cost less than the strides do.
                if not parameter.is_contiguous():
                    layouts[id(parameter)] = parameter.stride()
                elif gradient is None or gradient.is_contiguous():
                    continue
                if gradient is not None and gradient.layout is torch.strided and gradient.stride() != parameter.stride():
                    with torch.no_grad():
                        parameter.grad = torch.empty_like(parameter).copy_(gradient)
            if type(optimizer) is torch.optim.SGD and group["momentum"] and not group["dampening"]:
                reached = [p for p in group["params"] if p.grad is not None]
                missing = [p for p in reached if optimizer.state[p].get("momentum_buffer") is None]
                if scaled or len(missing) < len(reached):
                    for parameter in missing:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        if layouts != self._layouts:  # the plain module was given another layout since
            self._layouts = layouts
            fit_state(optimizer)
