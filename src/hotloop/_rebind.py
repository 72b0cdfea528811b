"""What holds on to a module's parameters follows them when they move or are replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._tree import move


@contextmanager
def following(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside, the module's parameters may move or be replaced; on the way out ties, optimizer groups and state follow.

    `Module.to` swaps the data of a parameter in place for most moves, but makes new parameters for some backends and for the
    meta device, and `load_state_dict(assign=True)` always does: the optimizer would go on with tensors that nobody uses, and
    tied weights would come apart.
    """
    before = _slots(module)
    try:
        yield
    finally:
        renamed: dict[Tensor, nn.Parameter] = {}
        for (owner, name), old in before.items():
            new = owner._parameters.get(name)
            if new is not None and new is not old:
                owner._parameters[name] = renamed.setdefault(old, new)
        for old, new in renamed.items():
            if old.grad is not None and new.grad is None and new.shape == old.shape:
                new.grad = old.grad.to(new.device, new.dtype)  # of an open window
        for optimizer in optimizers:
            if renamed:
                _repoint(optimizer, renamed)
            fit_state(optimizer)


def _slots(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    # A ScriptModule keeps its parameters in C++, moves them in place, and hands out new Python objects each time.
    modules = (m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule))
    return {(m, name): p for m in modules for name, p in m._parameters.items() if p is not None}


def _repoint(optimizer: Optimizer, renamed: dict[Tensor, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [renamed.get(p, p) for p in group["params"]]  # LBFGS holds on to the list itself
    for old, new in renamed.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def fit_state(optimizer: Optimizer) -> None:
    """Optimizer state lives where its parameter does, in its memory format; a step counter only where the kernel wants it.

    Fused kernels run over the memory of a parameter and its state side by side and do not look at strides: where these differ
    they silently update the wrong elements.
    """
    for group in optimizer.param_groups:
        counter_follows = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if key != "step" or counter_follows:
                    state[key] = _in_strides_of(parameter, move(value, parameter.device))


def _in_strides_of(parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.shape != parameter.shape:
        return value
    if value.stride() == parameter.stride():
        return value
    return torch.empty_strided(value.shape, parameter.stride(), dtype=value.dtype, device=value.device).copy_(value)
