"""What the parity tests share: comparison to the last bit, and the plain loop written by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested states differ, by path; empty where every bit is the same. NaNs compare by their bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if _bits(a) == _bits(b) else [f"{path}: {_apart(a, b)}"]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = [f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))} in one only"] if a.keys() != b.keys() else []
        return found + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        found = [f"{path}: {len(a)} and {len(b)} items"] if len(a) != len(b) else []
        return found + [d for i, (x, y) in enumerate(zip(a, b, strict=False)) for d in differences(x, y, f"{path}[{i}]")]
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__} and {type(b).__name__}"]
    same = repr(a) == repr(b) if isinstance(a, float | complex) else a == b  # nan is nan, and -0.0 is not 0.0
    return [] if same else [f"{path}: {a!r} and {b!r}"]


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    raw = dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return tensor.dtype, tensor.shape, tensor.layout, raw


def _apart(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    return f"tensors up to {(a.detach().double() - b.detach().double()).abs().max().item():.1e} apart"


def snapshot(*parts: Any) -> list[Any]:
    """A copy of the states of models, optimizers and schedulers, and the random state."""
    return [*(copy.deepcopy(part.state_dict()) for part in parts), torch.get_rng_state()]


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Any,
    batches: Any,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    scheduler: Any = None,
) -> list[dict[str, float]]:
    """The loop that everybody writes; returns what the wrapped loop's metrics should hold."""
    logged: list[dict[str, float]] = []
    for i, (x, y) in enumerate(batches):
        if i % accumulate == 0:
            optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        (loss / accumulate if accumulate > 1 else loss).backward()
        logged.append({"loss": loss.item()})
        if (i + 1) % accumulate:
            continue
        if clip_norm is not None:
            logged[-1]["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return logged


def plain_closure_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Any,
    batches: Any,
    *,
    clip_norm: float | None = None,
    scheduler: Any = None,
) -> list[dict[str, float]]:
    """The same for an optimizer that evaluates the loss itself; what is logged is the first evaluation's."""
    logged: list[dict[str, float]] = []
    for x, y in batches:
        evaluations: list[dict[str, float]] = []

        def closure(x: Any = x, y: Any = y, evaluations: Any = evaluations) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = loss_fn(model(x), y)
            loss.backward()
            evaluations.append({"loss": loss.item()})
            if clip_norm is not None:
                evaluations[-1]["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item()
            return loss

        optimizer.step(closure)
        logged.append(evaluations[0])
        if scheduler is not None:
            scheduler.step()
    return logged
