"""What is inside the attributes of modules: tensors, and containers that a run may change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotloop._tensors import address
from hotloop._tree import rebuilt_tuple

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_MOST = 1000  # items of a container, or kilobytes of an array: there may be a whole data set in one


class Kept(NamedTuple):
    """Tensors that a module holds under a name: alone, or in a container."""

    holder: dict[str, Any]
    name: str
    tensors: list[Tensor]
    label: str
    was_16_bit: bool = False  # before a run as well, as one that the user has made so


def held_tensors(parts: Sequence[nn.Module]) -> Iterator[Kept]:
    """Where modules hold tensors besides their parameters."""
    for part in parts:
        for holder, name, value in [*((part._buffers, *item) for item in part._buffers.items()), *_attributes(part)]:
            if tensors := list(_tensors(value)):
                yield Kept(holder, name, tensors, f"{type(part).__name__}.{name}")


def _attributes(part: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    own = vars(part)
    return [(own, name, value) for name, value in own.items() if name not in OF_EVERY_MODULE]


def _tensors(value: Any, depth: int = 2) -> Iterator[Tensor]:
    """Itself, or those among the first items of a container."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in islice(value.values() if isinstance(value, dict) else value, 100):
            yield from _tensors(item, depth - 1)


class Contents:
    """The insides of attributes before a first run, to put back if it fails; its parameters as well.

    Dictionaries, sets and arrays get what they had. Tensors, but for those `copied` elsewhere, are not copied beforehand: what
    a failed run has written to them in place is what the batch gives, and they get it again after the last run.
    """

    def __init__(self, parts: Sequence[nn.Module], held: Sequence[Kept], copied: Sequence[Tensor]) -> None:
        others = {id(tensor) for tensor in copied}
        tensors = [t for there in held for t in there.tensors if id(t) not in others]
        parameters = [p for part in parts for p in part._parameters.values() if p is not None]
        self._before = [(t, _mark(t)) for t in (*tensors, *parameters) if not is_lazy(t) and not t.is_inference()]
        values = [value for part in parts for _, _, value in _attributes(part)]
        self._put_back = [put for value in values if (put := _inside(value)) is not None]
        self._changed: list[tuple[Tensor, Tensor]] = []

    def failed(self) -> None:
        """The run has raised."""
        self._changed = copies([tensor for tensor, mark in self._before if _mark(tensor) != mark])

    def restore(self) -> None:
        """Before another run."""
        for put in self._put_back:
            put()

    def finish(self) -> None:
        """After the last run."""
        put_back(self._changed)


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Is another one after a write in place, or after `tensor.data = ...`."""
    return tensor._version, address(tensor)


def _inside(value: Any) -> Callable[[], None] | None:
    """What gives a dictionary, a set or an array its contents of now. To a list only the user knows what is added."""
    if isinstance(value, dict | set) and len(value) <= _MOST:
        held: Any = dict(value) if isinstance(value, dict) else set(value)

        def put_items() -> None:
            value.clear()
            value.update(held)

        return put_items
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and value.nbytes <= _MOST * 1000 and value.flags.writeable:
        array = value.copy()

        def put_array() -> None:
            value[...] = array

        return put_array
    return None


def replaced(value: Any, kept: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with these of its tensors changed; lists and dictionaries stay what they are, since others may hold them."""
    if isinstance(value, Tensor):
        return change(value) if any(value is tensor for tensor in kept) else value
    if isinstance(value, list | dict):
        for key in range(len(value)) if isinstance(value, list) else list(value):
            if (new := replaced(value[key], kept, change)) is not value[key]:
                value[key] = new
        return value
    if isinstance(value, tuple):
        return rebuilt_tuple(value, [replaced(item, kept, change) for item in value])
    return value


def copies(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each with a copy of its value."""
    with torch.no_grad():
        return [(tensor, tensor.clone()) for tensor in tensors]


def put_back(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give each tensor its value again."""
    for tensor, value in values:
        if tensor.shape != value.shape:  # a run has resized it, as one that takes its size from the first batch
            tensor.data = value.clone()
        elif not _is_same(tensor, value):  # nobody writes to expanded tensors, nor to a read-only map of a file
            tensor.data.copy_(value)  # its version stays: the run that worked may have saved it for its backward


def _is_same(one: Tensor, other: Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except (RuntimeError, NotImplementedError):  # a layout, or a dtype, that cannot be compared
        return False
