"""The backward of a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

# Half of what `torch.autograd.backward` costs the host is sorting out arguments that a step never gives (5 microseconds, a
# twentieth of a tiny model's step). What it calls in the end is private: a torch without it takes the public way.
_run: Any = getattr(graph, "_engine_run_backward", None)
_is_transformed: Any = getattr(torch._C, "_are_functorch_transforms_active", None)


def backward(loss: Tensor, retain_graph: bool = False) -> None:
    """`torch.autograd.backward(loss)` for a real loss with one element."""
    if type(loss) is not Tensor or _run is None or _is_transformed is None or _is_transformed():
        torch.autograd.backward(loss, retain_graph=retain_graph)
    else:
        _run((loss,), (torch.ones_like(loss),), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)
