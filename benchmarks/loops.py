"""The loops that are compared, each a function that runs some steps of a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.workloads import Workload
from hotloop import optimize


@dataclass(frozen=True)
class Loop:
    """`run()` trains for as many steps as the workload has in one timed call; `model` is what it trains."""

    run: Callable[[], object]
    model: nn.Module

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def naive(workload: Workload) -> Loop:
    """As most scripts have it: the default optimizer, and the loss read in every step."""
    model, optimizer, loss_fn = workload.make()
    batches, total = workload.batches(), 0.0

    def run() -> None:
        nonlocal total
        for _ in range(workload.steps):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()

    return Loop(run, model)


def bare(workload: Workload, **adam: Any) -> Loop:
    """The same without a look at the loss."""
    model, optimizer, loss_fn = workload.make(**adam)
    return by_hand(workload, model, optimizer, loss_fn)


def tuned(workload: Workload) -> Loop:
    """By hand, in float32: fused Adam, channels_last where there are convolutions, the loss not read."""
    model, optimizer, loss_fn = workload.make(fused=True)
    if has_convolutions(model):
        model = model.to(memory_format=torch.channels_last)
    return by_hand(workload, model, optimizer, loss_fn, channels_last=has_convolutions(model))


def by_hand(workload: Workload, model: Any, optimizer: Any, loss_fn: Any, *, channels_last: bool = False) -> Loop:
    batches = workload.batches()

    def run() -> None:
        for _ in range(workload.steps):
            x, y = next(batches)
            if channels_last:
                x = x.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    return Loop(run, model)


def wrapped(workload: Workload, *, read: bool = True, **wishes: Any) -> Loop:
    """`optimize`, with the loss read in every step, as the naive loop does."""
    model, step = optimize(*workload.make(), **wishes)
    batches, total = workload.batches(), 0.0

    def run() -> None:
        nonlocal total
        for _ in range(workload.steps):
            x, y = next(batches)
            metrics = step(x, y)
            if read:
                total += metrics["loss"]

    return Loop(run, model)


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())
