"""A model that the user has put under DistributedDataParallel, `fully_shard` or FullyShardedDataParallel: it communicates by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hotloop._exchange import Exchange
from hotloop._forms import with_loss_fn
from hotloop._processes import everyone, summed

FLAT = "FullyShardedDataParallel"  # its shards are plain tensors: what is computed of them is of this rank's alone


def given(modules: Sequence[nn.Module]) -> str:
    """What one of the modules is under, by name; empty if none is under anything."""
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        return "DistributedDataParallel"
    sharding = sys.modules.get("torch.distributed.fsdp")  # who has not imported it cannot have used it
    for name, what in ((FLAT, FLAT), ("FSDPModule", "fully_shard")):
        if any(isinstance(part, getattr(sharding, name, ())) for module in modules for part in module.modules()):
            return what
    placed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return "DTensor" if any(isinstance(p, placed) for module in modules for p in module.parameters()) else ""


def check_wishes(what: str, *, clip_norm: float | None, precision: Any, scaler: torch.amp.GradScaler | None) -> None:
    """Refuse what would be of each rank's own shard."""
    if what != FLAT or dist.get_world_size() == 1:
        return
    if clip_norm is not None:
        raise ValueError(
            f"optimize(..., clip_norm={clip_norm}) with {FLAT}: the norm would be that of each rank's own shard; shard the model with "
            f"fully_shard, or leave clip_norm away and write before_update=lambda: model.clip_grad_norm_({clip_norm})"
        )
    if precision == "fp16" or (scaler is not None and scaler.is_enabled()):
        wish = "precision='fp16'" if scaler is None else "scaler=..."
        raise ValueError(
            f"optimize(..., {wish}) with {FLAT}: each rank would see the overflows of its own shard, and ranks would skip different "
            "updates; shard the model with fully_shard, or write precision='bf16' or 'fp32'"
        )


class Given:
    """Stands in for an `Exchange` where the model exchanges gradients in its own backward.

    Under DDP micro-batches before the last one of a window do not communicate. Where they are sharded each one does, so that
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
        self.weight = torch.empty(0, device="cpu")

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
