"""What one tensor is: its numbers, its layout, its place."""

from __future__ import annotations

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def is_16_bit(tensor: Tensor) -> bool:
    """Whether its numbers are rounded to 16 bits."""
    return tensor.dtype in SIXTEEN_BITS


def as_float32(tensor: Tensor) -> Tensor:
    """A 16-bit tensor in float32, any other as it is."""
    return tensor.float() if tensor.dtype in SIXTEEN_BITS else tensor


def is_channels_last(tensor: Tensor) -> bool:
    """Whether its channels lie beside each other, and not the pixels."""
    if tensor.dim() != 4 or tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


def address(tensor: Tensor) -> int:
    """Where its memory begins, 0 where it has none of its own."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, a subclass around others, a device that does not tell
        return 0
