"""A model that the user has put under DistributedDataParallel or `fully_shard`: it communicates by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hotloop._exchange import Exchange
from hotloop._forms import with_loss_fn
from hotloop._processes import everyone, summed


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
    gradients stay sharded. All ranks must have as many batches: a forward of such a model waits for the others.
    """

    everything: Sequence[Tensor] = ()
    weighed = False

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._plain = [module.module if isinstance(module, DistributedDataParallel) else module for module in modules]
        self._optimizers = optimizers
        self._device = device
        self._late: Exchange | None = None  # for what a window that is cut short leaves behind under DDP
        self.weight = torch.empty(0)

    def switch(self, last: bool) -> None:
        """Whether the next micro-batch is the last of its window, before its forward: DDP asks then."""
        for replica in self._replicas:
            replica.require_backward_grad_sync = last  # as `no_sync` does, which is a context and would end too early

    def arm(self, *, window_is_open: bool) -> None:
        """Nothing: the model's own forward has done it."""

    def finish(self, weight: float) -> None:
        """The backward has averaged the gradients; `weight` is summed over the ranks where micro-batches are weighed."""
        if self.weighed:
            (self.weight,) = summed([weight], self._device)

    def meet(self, weight: float) -> None:
        """Average the gradients of windows that are cut short."""
        if self._replicas:
            self._late = self._late or Exchange(self._plain, self._optimizers)
            self._late.meet(weight)
        self.finish(weight)

    def end(self) -> None:
        """Nothing: the others end with this rank."""

    def all_have_ended(self) -> bool:
        """They have, since all ranks have as many batches."""
        return True

    def part(self) -> None:
        """Nothing to remember."""

    def agree(self, weight: float) -> float:
        """What weights count relative to on all ranks, each of which has a micro-batch."""
        self.weighed = True
        given = [w for w in everyone(weight) if w > 0]
        return sum(given) / len(given) if given else 1.0


def exchange_of(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], loss_fn: Any, device: torch.device
) -> Exchange | Given:
    """What averages the gradients: the model itself where the user has seen to it, else DDP of our own."""
    if given(modules):
        return Given(modules, optimizers, device)
    return Exchange(with_loss_fn(modules, loss_fn), optimizers)
