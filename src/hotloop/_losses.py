"""The losses whose values show how exact a model's outputs are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

_REGRESSIONS: tuple[Any, ...] = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.GaussianNLLLoss, nn.PoissonNLLLoss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.gaussian_nll_loss, F.poisson_nll_loss),
)


def regression(loss_fn: Any) -> str:
    """The name of the loss, where it is one of torch's for regression."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    kind = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    return str(kind.__name__) if any(kind is known for known in _REGRESSIONS) else ""
