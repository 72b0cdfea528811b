"""What the decisions look at: an optimizer, as plain data."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop._stepping import has_gaps

# Where an optimizer that is switched to fused kernels holds what it was before. torch leaves it out of copies and pickles.
SWITCHED = "_switched_to_fused"


@dataclass(frozen=True)
class OptimizerTraits:
    """What an optimizer is, and what its user has set."""

    kind: str  # the name of one of torch's own classes, or a full name
    fused: bool  # already, in every group
    foreach: bool
    chosen: bool  # fused or foreach were set, to whatever value
    differentiable: bool
    momentum: bool
    dampened: bool
    tensor_lr: bool
    half: bool  # some parameter is float16
    lazy: bool  # some parameters have no size yet
    floating: bool  # all parameters are plain floating tensors, each with memory of its own without gaps
    outside: frozenset[str]  # device types of parameters that belong to no model


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` cannot be called without a closure, as LBFGS cannot."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def optimizer_traits(optimizer: Optimizer, modules: Sequence[nn.Module]) -> OptimizerTraits:
    """What this optimizer of these modules is."""
    groups, kind = optimizer.param_groups, type(optimizer)
    fused = users_fused(optimizer)
    own = {id(p) for module in modules for p in module.parameters()}
    parameters = [p for group in groups for p in group["params"]]
    return OptimizerTraits(
        kind=kind.__name__ if kind.__module__.startswith("torch.optim.") else f"{kind.__module__}.{kind.__qualname__}",
        fused=all(fused),
        foreach=any(group.get("foreach") for group in groups),
        chosen=any(value is not None for value in (*fused, *(group.get("foreach") for group in groups))),
        differentiable=any(group.get("differentiable") for group in groups),
        momentum=any(group.get("momentum") for group in groups),
        dampened=any(group.get("momentum") and group.get("dampening") for group in groups),
        tensor_lr=any(isinstance(group.get("lr"), torch.Tensor) for group in groups),
        half=any(p.dtype is torch.float16 for p in parameters),
        lazy=any(map(is_lazy, parameters)),
        floating=all(map(is_plain, parameters)),
        outside=frozenset(p.device.type for p in parameters if id(p) not in own),
    )


def users_fused(optimizer: Optimizer) -> list[Any]:
    """`fused` of each group as the user has it, also where an earlier `optimize` has switched it on."""
    before = vars(optimizer).get(SWITCHED)
    return [group.get("fused") for group in optimizer.param_groups] if before is None else before.groups_now()


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether this is a floating tensor of no special kind whose memory has no gaps: fused kernels would write over them."""
    if type(parameter) not in (nn.Parameter, torch.Tensor) or not parameter.is_floating_point():
        return False
    return not has_gaps(parameter)
