"""The scale that the gradients of an open window carry."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Scaling:
    """Keeps an open window's gradients at one scale.

    The scale may change between two micro-batches: another step with the same scaler updates it, the user does, or float16 is
    taken back. Nothing is read from the device.
    """

    def __init__(self, rescale: Callable[[float | Tensor], None]) -> None:
        self._rescale = rescale
        self._scale: float | Tensor = 1.0
        self._seen = (0, -1)

    def remember(self, scaler: torch.amp.GradScaler) -> None:
        """The gradients carry the scale of now."""
        seen = _version(scaler)
        if seen != self._seen:
            self._seen, self._scale = seen, _scale(scaler)

    def catch_up(self, scaler: torch.amp.GradScaler) -> None:
        """Bring the gradients to the scale of now, if it is another one."""
        if _version(scaler) != self._seen:
            self._rescale(_scale(scaler) / self._scale)
            self.remember(scaler)


def make_ready(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Have the scaler make its scale, as it does at the first loss: a window may be closed before there is one."""
    scaler.scale(torch.zeros((), device=device))


def _tensor(scaler: torch.amp.GradScaler) -> Tensor | None:
    # The scaler makes it when it is first used, and then writes to it in place. A disabled one has none.
    return getattr(scaler, "_scale", None)


def _version(scaler: torch.amp.GradScaler) -> tuple[int, int]:
    scale = _tensor(scaler)
    return id(scaler), -1 if scale is None else scale._version


def _scale(scaler: torch.amp.GradScaler) -> float | Tensor:
    scale = _tensor(scaler)
    return scaler.get_scale() if scale is None else scale.clone()
