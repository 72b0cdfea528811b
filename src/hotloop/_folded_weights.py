"""The weights of convolutions with their BatchNorm folded in, and whether they are still current."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from hotloop._device import autocasts
from hotloop._tensors import is_channels_last

# In elements of a feature map, of which a BatchNorm takes some five in a nanosecond: what a folded call takes besides the
# convolution, so that smaller feature maps are not worth it; and what it takes to fold a pair besides its weights.
OVERHEAD, PRICE = 300_000, 300_000

_version = attrgetter("_version")
_LAYOUT = torch.channels_last

_NOTHING = torch.empty(0, device="cpu")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Fold:
    """A convolution with the BatchNorm after it, and their folded weights as long as they are current.

    `channels` is the dimension of the weight that holds the output channels. What is folded are the tensors found at the start:
    others that come in their place (functional_call, an assigned state) may be gone at the next call.
    """

    def __init__(self, conv: nn.Module, norm: Any, channels: int) -> None:
        self.conv, self.norm, self._channels = conv, norm, channels
        self.slots = [(own, name) for own, names in _places(conv, norm) for name in names]
        self.tensors: list[Any] = [own.get(name) for own, name in self.slots]  # some of them may be None
        self.possible = _can_be_folded(*self.tensors)
        self.drop()

    def drop(self) -> None:
        """Something has changed: fold again, when that pays."""
        self._made: dict[torch.dtype | None, tuple[Tensor, Tensor]] = {}
        self._made_from: tuple[int, int] = (0, 0)
        self._owed: float = PRICE + (self.tensors[0].numel() if self.possible else 0)

    def hooked(self) -> bool:
        """Whether anybody has hooks on one of the two layers."""
        return any(vars(module)[name] for module in (self.conv, self.norm) for name in _HOOKS)

    def weights(self, x: Tensor, size: float) -> tuple[Tensor, Tensor] | None:
        """The folded weight and bias for a call with `x`, whose result has `size` elements; None where they do not pay yet.

        To make them takes no longer than the calls up to this one would have saved, so that no evaluation is too short for it.
        """
        if not self.possible:
            return None
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if autocasts(device) else None
        weight = self.tensors[0]
        if autocast is None and x.dtype != weight.dtype:  # for the layer to complain about
            return None
        if made := self._made.get(autocast):
            if (weight._version, weight.data_ptr()) == self._made_from:
                return made
            self.drop()  # by the forward itself: everything else is looked at before each call of the model
        self._owed -= size - OVERHEAD
        if self._owed > 0 or not all(map(is_, self.tensors, (own.get(name) for own, name in self.slots))):
            return None
        self._made_from = (weight._version, weight.data_ptr())
        made = self._fold(autocast, *self.tensors[:-1])
        if is_channels_last(x):
            made = made[0].contiguous(memory_format=_LAYOUT), made[1]  # or the kernel does it in every call
        self._made[autocast] = made
        return made

    def _fold(
        self,
        autocast: torch.dtype | None,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        mean: Tensor,
        var: Tensor,
    ) -> tuple[Tensor, Tensor]:
        dtype, wide = weight.dtype, torch.promote_types(weight.dtype, torch.float32)
        scale = torch.rsqrt(var.to(wide) + self.norm.eps)
        scale = scale if gamma is None else scale * gamma
        shift = (-mean if bias is None else bias - mean) * scale
        shift = shift if beta is None else shift + beta
        if autocast is not None and dtype == torch.float32 and self._channels == 0:  # not all devices cast the transposed
            dtype = autocast  # autocast keeps its casts of parameters only: these it would cast in every call
        shape = [1] * weight.dim()
        shape[self._channels] = -1
        return (weight.to(wide) * scale.view(shape)).to(dtype), shift.to(dtype)


class Watch:
    """Looks after many folds at once: in one pass it takes a tenth of the time."""

    def __init__(self, folds: Sequence[Fold]) -> None:
        self._folds = [fold for fold in folds if fold.possible]
        self._hooks = [vars(module)[name] for fold in folds for module in (fold.conv, fold.norm) for name in _HOOKS]
        self._slots = [slot for fold in self._folds for slot in fold.slots]
        self._tensors = [tensor for fold in self._folds for tensor in fold.tensors]
        self._present = [tensor for tensor in self._tensors if tensor is not None]
        on_cpu = [fold for fold in self._folds if fold.tensors[0].device.type == "cpu"]
        self._samples = [_sample(t) for fold in on_cpu for t in fold.tensors[:-1] if t is not None]
        self._state = self._now()
        self._values = self._sampled()

    def changed(self) -> bool:
        """Whether anything has changed since the start."""
        if not all(map(is_, self._tensors, [own.get(name) for own, name in self._slots])) or self._now() != self._state:
            return True
        return not torch.equal(self._values, self._sampled())

    def hooked(self) -> bool:
        """Whether anybody has hooks on any of the layers."""
        return any(self._hooks)

    def _now(self) -> tuple[Any, ...]:
        versions, places = map(_version, self._present), map(Tensor.data_ptr, self._present)
        return [fold.norm.eps for fold in self._folds], list(versions), list(places)

    def _sampled(self) -> Tensor:
        # What is written through `.data` leaves no trace but the values. On an accelerator it takes a wait to look at them.
        return torch.cat(self._samples) if self._samples else _NOTHING


def _sample(tensor: Tensor) -> Tensor:
    """A view of its values; of weights, which nobody else reads, so that each comes from far in every call, a few."""
    if tensor.dim() == 1:
        return tensor.detach()
    middle = [size // 2 for size in tensor.shape[2:]]
    place: Any = (slice(None, None, -(-tensor.shape[0] // 8)), -1, *middle)
    return tensor.detach()[place]


def _places(conv: nn.Module, norm: nn.Module) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    return [
        (conv._parameters, ("weight", "bias")),
        (norm._parameters, ("weight", "bias")),
        # The kernel that updates the statistics counts no change of them; the layer counts its batches.
        (norm._buffers, ("running_mean", "running_var", "num_batches_tracked")),
    ]


def _can_be_folded(weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, var: Any, batches: Any) -> bool:
    present = [t for t in (weight, bias, gamma, beta, mean, var) if t is not None]
    return (
        not any(t is None for t in (weight, mean, var))
        and all(type(t) in (nn.Parameter, Tensor) and t.is_floating_point() for t in present)
        and not any(t.is_inference() for t in (*present, batches) if t is not None)  # they count no changes
        and len({t.device for t in present}) == 1
    )
