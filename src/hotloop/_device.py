"""The device that a user names, and the accelerator that a machine has."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch


def accelerator() -> torch.device | None:
    """The accelerator of this machine, if it has one. (Where it has none, torch 2.6 raises when it is asked for it.)"""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def of_this_process(current: torch.device) -> torch.device:
    """The accelerator of a process that trains alone: the current one, or where nobody has chosen that, the one of `LOCAL_RANK`.

    A launcher starts a process for each accelerator, and only optimizers that train together make it the current one.
    """
    local = os.environ.get("LOCAL_RANK", "")
    if current.index == 0 and local.isdigit() and int(local) < torch.accelerator.device_count():
        return torch.device(current.type, int(local))
    return current


def usable(device: Any, call: str) -> torch.device:
    """The device with its index, so that comparing devices is enough later; raises for `call` if torch cannot use it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"{call}: torch cannot use this device ({str(error).splitlines()[0]}); name one that this machine has, or leave "
            "device='auto'"
        ) from None


def wide(device: torch.device) -> torch.dtype:
    """The widest float of a device. It holds every value that is no 64-bit integer, where the device has float64."""
    return torch.float64 if _has_float64(device.type) else torch.float32


@functools.cache
def _has_float64(device_type: str) -> bool:
    # Apple's GPUs have none, nor have many of Intel's; only a kernel tells.
    try:
        torch.ones(1, device=device_type).to(torch.float64)
    except (RuntimeError, TypeError):
        return False
    return True


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def autocasts(device_type: str) -> bool:
    """Whether autocast is on, which torch does not tell of the meta device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
