"""A model that the user has put under DistributedDataParallel or `fully_shard`: it communicates by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hotloop._exchange import HEAD, Exchange


def given(modules: Sequence[nn.Module]) -> str:
    """What one of the modules is under, by name; empty if none is under anything."""
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        return "DistributedDataParallel"
    sharding = sys.modules.get("torch.distributed.fsdp")  # who has not imported it cannot have used it
    kinds = tuple(kind for name in ("FSDPModule", "FullyShardedDataParallel") if (kind := getattr(sharding, name, None)))
    if any(isinstance(part, kinds) for module in modules for part in module.modules()):
        return "fully_shard"
    placed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return "DTensor" if any(isinstance(p, placed) for module in modules for p in module.parameters()) else ""


class Given:
    """Stands in for an `Exchange` where the model exchanges gradients in its own backward.

    Under DDP micro-batches before the last one of a window do not communicate. Under `fully_shard` each one does, so that
    gradients stay sharded. What ranks must know of each other is exchanged apart, and only where it is asked for.
    """

    parameters: Sequence[Tensor] = ()

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._plain = [getattr(module, "module", module) if module in self._replicas else module for module in modules]
        self._optimizers = optimizers
        self._device = device if dist.get_backend() == dist.get_default_backend_for_device(device) else torch.device("cpu")
        self._late: Exchange | None = None  # for what a window that is cut short leaves behind under DDP
        self._averages = torch.zeros(len(HEAD))

    def switch(self, last: bool) -> None:
        """Whether the next micro-batch is the last of its window, before its forward: DDP asks then."""
        for replica in self._replicas:
            replica.require_backward_grad_sync = last  # as `no_sync` does, which is a context and would end too early

    def arm(self, *, window_is_open: bool) -> None:
        """Nothing: the model's own forward has done it."""

    def finish(self, head: list[float], *, told: bool) -> None:
        """The backward has averaged the gradients; on demand the ranks tell each other `head`."""
        if told:
            self._averages = torch.tensor(head, dtype=torch.float64, device=self._device)
            dist.all_reduce(self._averages)
            self._averages /= dist.get_world_size()

    def meet(self, head: list[float]) -> None:
        """Average the gradients of windows that are cut short."""
        if not self._replicas:
            self.finish(head, told=True)
            return
        if self._late is None:
            self._late = Exchange(self._plain, self._optimizers)
        self._late.meet(head)
        self._averages = self._late.head()

    def average(self, name: str) -> Tensor:
        """What the ranks told for an item of HEAD: the mean."""
        return self._averages[HEAD.index(name)]

    def head(self) -> Any:
        """All of it, on the device."""
        return self._averages
