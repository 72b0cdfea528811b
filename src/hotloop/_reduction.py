"""`fast_eval(reduce=...)`: the results of all ranks as one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotloop._processes import World, everyone
from hotloop._shares import share, size_of


class Reduction:
    """One evaluation that is shared by all ranks: each reads its part, and gets what comes of all of them."""

    def __init__(self, how: str, world: World, name: str, *, even: bool) -> None:
        self._how, self._world, self._name = how, world, name
        self._even = even  # each forward of the model waits for the other ranks
        self._parts: list[Any] = []

    def share(self, loader: Any) -> Any:
        """This rank's part of a loader."""
        self._parts.append(share(loader, self._world))
        return self._parts[-1]

    def run(self, evaluate: Callable[[], Any]) -> Any:
        """The result of `evaluate` with every number in it reduced, in one exchange; an error on one rank is one on all."""
        if not self._parts:
            raise ValueError(
                f"fast_eval(reduce={self._how!r}) in several processes: {self._name} has no loader among its arguments, so every "
                "rank would evaluate everything; pass the DataLoader as an argument, or leave reduce away"
            )
        if self._even and len({tuple(counts) for counts in everyone(list(map(_batches, self._parts)))}) > 1:
            raise ValueError(
                f"fast_eval(reduce={self._how!r}): a model under fully_shard needs as many batches on every rank, and the parts of "
                f"the loaders of {self._name} differ; leave reduce away, or choose a batch_size that divides the data evenly"
            )
        try:
            result = evaluate()
        except Exception as error:
            everyone(f"{type(error).__name__}: {error}")
            raise
        mine: list[Any] = []
        _mapped(result, lambda number: mine.append(_told(number)))
        told = everyone((mine, sum(map(size_of, self._parts))))
        for rank, its in enumerate(told):
            if isinstance(its, str):
                raise RuntimeError(f"fast_eval(reduce={self._how!r}): {self._name} failed on rank {rank}: {its}")
            if list(map(_shape, its[0])) != list(map(_shape, told[0][0])):
                raise ValueError(
                    f"fast_eval(reduce={self._how!r}): {self._name} returned {_described(told[0][0])} on rank 0 and "
                    f"{_described(its[0])} on rank {rank}; with reduce it returns as many numbers on every rank (what is one for "
                    "each sample cannot be reduced)"
                )
        reduced = iter(self._reduced([numbers for numbers, _ in told], [weight for _, weight in told]))
        return _mapped(result, lambda number: _like(number, next(reduced)))

    def _reduced(self, told: list[list[Any]], weights: list[int]) -> list[Any]:
        if self._how == "sum":
            return [sum(numbers[1:], numbers[0]) for numbers in zip(*told, strict=True)]
        counted = [(numbers, weight) for numbers, weight in zip(told, weights, strict=True) if weight]
        total = sum(weight for _, weight in counted)
        return [sum(n * w for n, w in _each(counted, i)) / total for i in range(len(told[0]))] if counted else told[0]


def _batches(part: Any) -> int:
    """How many there are in a part; -1 less the rank where that is not known, which is equal on no two ranks."""
    try:
        return len(part)
    except TypeError:
        return -1 - dist.get_rank()


def _each(counted: list[tuple[list[Any], int]], i: int) -> list[tuple[Any, int]]:
    return [(numbers[i], weight) for numbers, weight in counted]


def _mapped(value: Any, on_number: Callable[[Any], Any]) -> Any:
    """`value` with every number in it replaced, tensors included; containers keep their types."""
    if isinstance(value, Tensor):
        return value if value.dtype == torch.bool else on_number(value)
    if isinstance(value, int | float | complex):
        return value if isinstance(value, bool) else on_number(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: _mapped(item, on_number) for key, item in value.items()})
        return made
    if isinstance(value, list | tuple):
        items = [_mapped(item, on_number) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, _mapped(getattr(value, field.name), on_number))
        return changed
    return value


def _told(number: Any) -> Any:
    return number.detach().cpu() if isinstance(number, Tensor) else number


def _like(number: Any, reduced: Any) -> Any:
    return reduced.to(number.device) if isinstance(number, Tensor) else reduced


def _shape(number: Any) -> Any:
    return tuple(number.shape) if isinstance(number, Tensor) else ()


def _described(numbers: list[Any]) -> str:
    return f"{len(numbers)} numbers" + "".join(f", one of shape {_shape(n)}" for n in numbers if _shape(n))
