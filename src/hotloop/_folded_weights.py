"""The weights of a convolution with its BatchNorm folded in, for as long as they are current."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

# In elements of a feature map, of which a BatchNorm takes some five in a nanosecond: what folding costs besides the weights,
# and what a folded call saves besides the feature map.
_PRICE, _SAVING = 100_000, 20_000


class FoldedWeights:
    """Folds when that has paid for itself, and again when a weight, a statistic or the precision has changed.

    `channels` is the dimension of the weight that holds the output channels.
    """

    def __init__(self, conv: nn.Module, norm: Any, channels: int) -> None:
        self._conv, self._norm, self._channels = conv, norm, channels
        tensors = _tensors(conv, norm)
        self._tensors = tensors if _foldable(*tensors) else ()
        self._key: Any = None
        self._folded: dict[str, Tensor] | None = None

    def for_input(self, x: Tensor) -> dict[str, Tensor] | None:
        """`{"weight": ..., "bias": ...}` for a call with `x`; None where they cannot be had, or do not pay yet.

        A call that folds at once is no slower than one that does not: the time it takes is no more than the calls so far
        would have saved.
        """
        tensors = _tensors(self._conv, self._norm)
        # Tensors put in place of the first ones (functional_call, an assigned state) may be gone at the next call.
        if not self._tensors or not all(map(is_, tensors, self._tensors)):
            return None
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = (self._norm.eps, autocast, *[(t._version, t.data_ptr()) for t in tensors if t is not None])
        if key != self._key or (self._folded is not None and self._has_drifted()):
            self._key, self._folded = key, None
            self._owed = _PRICE + tensors[0].numel()
        folded = self._folded
        if folded is None:
            self._owed -= _SAVING + x.numel()
            if self._owed <= 0:
                folded = self._folded = self._fold(autocast, *tensors)
        return folded

    def _fold(
        self,
        autocast: torch.dtype | None,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        mean: Tensor,
        var: Tensor,
    ) -> dict[str, Tensor]:
        dtype, wide = weight.dtype, torch.promote_types(weight.dtype, torch.float32)
        scale = torch.rsqrt(var.to(wide) + self._norm.eps)
        scale = scale if gamma is None else scale * gamma
        shift = (-mean if bias is None else bias - mean) * scale
        shift = shift if beta is None else shift + beta
        if autocast is not None and dtype == torch.float32:
            dtype = autocast  # autocast keeps its casts of parameters only: these it would cast in every call
        shape = [1] * weight.dim()
        shape[self._channels] = -1
        self._sample = weight.detach().as_strided((min(64, weight.numel()),), (max(1, weight.numel() // 64),))
        self._sampled = self._sample.clone()
        return {"weight": (weight.to(wide) * scale.view(shape)).to(dtype), "bias": shift.to(dtype)}

    def _has_drifted(self) -> bool:
        # What is written through `.data` leaves no trace but the values, in memory order here. On an accelerator it would
        # take a wait to look at them.
        return self._sample.device.type == "cpu" and not torch.equal(self._sample, self._sampled)


def _tensors(conv: nn.Module, norm: nn.Module) -> tuple[Any, ...]:
    convolution, affine, statistics = conv._parameters, norm._parameters, norm._buffers
    return (
        convolution.get("weight"),
        convolution.get("bias"),
        affine.get("weight"),
        affine.get("bias"),
        statistics.get("running_mean"),
        statistics.get("running_var"),
    )


def _foldable(weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> bool:
    present = [t for t in (weight, mean, var, bias, gamma, beta) if t is not None]
    return (
        not any(t is None for t in (weight, mean, var))
        and all(type(t) in (nn.Parameter, Tensor) and t.is_floating_point() and not t.is_inference() for t in present)
        and len({t.device for t in present}) == 1
    )
