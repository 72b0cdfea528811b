"""Evaluations, and whole epochs with loading, as most scripts have them and with hotloop. Each is a function that runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import Batch, Workload
from hotloop import fast_eval, optimize, prefetch


def plain_accuracy(model: nn.Module, batches: Any) -> float:
    """As most scripts have it."""
    model.eval()
    hits = total = 0
    with torch.no_grad():
        for x, y in batches:
            hits += (model(x).argmax(1) == y).sum().item()
            total += y.numel()
    model.train()
    return hits / total


@fast_eval
def accuracy(model: nn.Module, batches: Any) -> Any:
    hits, total = torch.zeros(()), 0
    for x, y in batches:
        hits = hits + (model(x).argmax(1) == y).sum()
        total += y.numel()
    return hits / total


def plain_evaluation(workload: Workload, *, gradients: bool = False) -> Callable[[], float]:
    model, _, _ = workload.make()
    batches = workload.some() * workload.steps
    if not gradients:
        return lambda: plain_accuracy(model, batches)

    def run() -> float:
        model.eval()
        return sum(float((model(x).argmax(1) == y).sum()) for x, y in batches)

    return run


def wrapped_evaluation(workload: Workload, **wishes: Any) -> Callable[[], float]:
    model, _ = optimize(*workload.make(), **wishes)
    batches = workload.some() * workload.steps
    return lambda: accuracy(model, batches)


def _loaders(batches: list[Batch], copies: int) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    x, y = (torch.cat(parts * copies) for parts in zip(*batches, strict=True))
    size, test = len(batches[0][0]), TensorDataset(x[: len(x) // 5], y[: len(x) // 5])
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True), DataLoader(test, batch_size=size)


def plain_epoch(workload: Workload) -> Callable[[], float]:
    """Loading, training and evaluation, as most scripts have them."""
    model, optimizer, loss_fn = workload.make()
    train, test = _loaders(workload.some(), workload.steps)

    def run() -> float:
        total = 0.0
        for x, y in train:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return plain_accuracy(model, test)

    return run


def wrapped_epoch(workload: Workload, **wishes: Any) -> Callable[[], float]:
    model, step = optimize(*workload.make(), **wishes)
    train, test = _loaders(workload.some(), workload.steps)
    batches = prefetch(train, model)

    def run() -> float:
        total = 0.0
        for x, y in batches:
            total += step(x, y)["loss"]
        return accuracy(model, test)

    return run
