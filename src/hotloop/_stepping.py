"""How one optimizer is stepped: what fused kernels need before, and the call itself."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optim

from hotloop._rebind import fit_state

_global_hooks = (optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks)


def issue(optimizer: Optimizer) -> None:
    """`optimizer.step()`, past torch's wrapper around it where that has nothing to do.

    The wrapper opens a profiler region and loops over hooks, which takes as long as a third of a small fused step. It is left
    out where no profiler runs and the only hook is ours, which tells foreign steps from our own.
    """
    step = type(optimizer).step
    if (
        getattr(step, "hooked", False)
        and "step" not in optimizer.__dict__
        and len(optimizer._optimizer_step_post_hooks) == 1
        and not optimizer._optimizer_step_pre_hooks
        and not _global_hooks[0]
        and not _global_hooks[1]
        and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    ):
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        optimizer.step()


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
