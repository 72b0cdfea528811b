"""The device that a user names, and the accelerator that a machine has."""

from __future__ import annotations

from typing import Any

import torch


def accelerator() -> torch.device | None:
    """The accelerator of this machine, if it has one. (Where it has none, torch 2.6 raises when it is asked for it.)"""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def usable(device: Any, call: str) -> torch.device:
    """The device with its index, so that comparing devices is enough later; raises for `call` if torch cannot use it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"{call}: torch cannot use this device ({str(error).splitlines()[0]}); name one that this machine has, or leave "
            "device='auto'"
        ) from None


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def autocasts(device_type: str) -> bool:
    """Whether autocast is on, which torch does not tell of the meta device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
