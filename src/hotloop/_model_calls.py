"""The call of a model inside an evaluation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hotloop._call import call
from hotloop._deferred import current_call, settled
from hotloop._detours import Detour
from hotloop._parts import Live, Parts


@dataclass(frozen=True)
class Region:
    """A precision that somebody asked for: opens an autocast region, or shuts the ones around it."""

    device_type: str
    dtype: torch.dtype | None

    def __call__(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None)


# The precision asked for by the evaluation that runs in this thread or task.
asked: ContextVar[Region | None] = ContextVar("asked", default=None)


class ModelCall(Detour):
    """The call of a plain model as that of a wrapped one, and of a wrapped one in the precision asked for.

    The models inside a model are called as it calls them.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, wrapped: bool) -> None:
        super().__init__(module)
        self._device_type = device.type
        # A model whose own parameters are 16-bit gives what it gives: the next one may be its like.
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        in_16_bits = dtype in (torch.float16, torch.bfloat16)
        self._live = None if wrapped else Live(Parts(module, device=device), inference="grad", exact=in_16_bits)

    def renew(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._seen: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_call() is not None:
            return self.run(*args, **kwargs)
        if self._live is not None:
            return call(self._settled, self._live, args, kwargs)
        region = asked.get()
        if region is None:
            return self._settled(*args, **kwargs)
        with region():  # inside the one that the wrapped model has opened
            return self._settled(*args, **kwargs)

    def _settled(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(self._device_type):
            self._drop_stale_casts()
        return settled(self.run, args, kwargs)

    def _drop_stale_casts(self) -> None:
        # Autocast keeps the casts of the weights as long as a region is open, also when the weights change (a state that is
        # loaded, a step that trains); and before torch 2.10 those made without gradients are used with them.
        if not self._parameters:
            self._parameters = [p for p in self.module.parameters() if not p.is_inference()]
        now = [torch.is_grad_enabled(), *[p._version for p in self._parameters]]
        if now != self._seen:
            torch.clear_autocast_cache()
            self._seen = now
