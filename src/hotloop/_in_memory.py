"""Whole batches by one index: reading a `DataLoader` over tensors in memory without going item by item."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data._utils import collate

from hotloop._shares import Shard, Share
from hotloop._transfer import send_tensor

_CHUNK = 8192  # items whose index is made at a time: large enough to be cheap, small enough not to delay the first batch

# Each of them knows its numbers when it begins. A SubsetRandomSampler looks them up in its user's list one by one.
_READABLE_AHEAD = (SequentialSampler, WeightedRandomSampler, DistributedSampler, Shard, Share)

_Indexed = tuple[Tensor | None, list[Any]]  # the index of a batch, where it has one, and the items as the sampler gave them
_ToIndex = Callable[[list[Any]], Tensor | None]


def whole_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """`iter(loader)`: the same batches and the same draws of random numbers, by whole batches where that is possible.

    It is for a `TensorDataset`, or a `Subset` of one, with default collation and without workers. Any other loader gets its
    own iterator.
    """
    # torch's own iterator draws the base seed, starts the batch sampler and warns, as it does in the version at hand. There
    # is no public way to what it has started.
    iterator = DataLoader.__iter__(loader)
    started = getattr(iterator, "_sampler_iter", None)
    pins = getattr(iterator, "_pin_memory", loader.pin_memory)
    tensors = in_memory(loader)
    if tensors is None or started is None or (pins and tensors[0].device.type != "cpu"):
        return iterator
    return _WholeBatches(loader, started, tensors, pins)


def in_memory(loader: DataLoader[Any]) -> tuple[Tensor, ...] | None:
    """The tensors that a pass over `loader` takes rows of; None if it does anything else."""
    dataset = subsets(loader.dataset)[-1]
    if type(dataset) is not TensorDataset or loader.num_workers or loader.batch_sampler is None:
        return None
    tensors = dataset.tensors
    plain = not has_torch_function(tensors) and all(map(_is_plain, tensors)) and len({t.device for t in tensors}) == 1
    return tensors if plain and _stacks(loader.collate_fn) else None


def subsets(dataset: Any) -> list[Any]:
    """Subsets from the outermost inwards, and at last the dataset that they are taken of."""
    chain = [dataset]
    while type(chain[-1]) is Subset:
        chain.append(chain[-1].dataset)
    return chain


def _is_plain(tensor: Tensor) -> bool:
    # Stacking items refuses sparse tensors, and gradients take another way through it. What indexing cannot do is left to it.
    return tensor.layout is torch.strided and not tensor.requires_grad


def _stacks(collate_fn: Any) -> bool:
    # `default_collate` asks a table first, which its documentation invites the user to change.
    table = collate.default_collate_fn_map
    changed = table.get(Tensor) is not collate.collate_tensor_fn or any(issubclass(tuple, kind) for kind in table)
    return collate_fn is default_collate and not changed


class _WholeBatches(Iterator[Any]):
    """One pass over a loader. As torch's own iterator it goes on after an error, with the next batch."""

    def __init__(self, loader: DataLoader[Any], started: Iterator[Any], tensors: tuple[Tensor, ...], pins: bool) -> None:
        self._loader = loader
        self._tensors: tuple[Tensor, ...] | None = tensors
        self._pins = pins
        self._device = tensors[0].device
        self._length = len(tensors[0])
        # Of a subset the sampler's numbers are not those of rows: which these are is looked up batch by batch.
        to_index = self._index if loader.dataset is subsets(loader.dataset)[-1] else _no_index
        batches = loader.batch_sampler
        ahead = _readable_ahead(batches)
        self._batches = _in_chunks(batches, to_index) if ahead else _one_by_one(started, to_index)

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> list[Tensor]:
        index, items = next(self._batches)
        batch = self._rows(index, items)
        if batch is None:
            batch = self._loader.collate_fn([self._loader.dataset[item] for item in items])
        return [tensor.pin_memory() for tensor in batch] if self._pins else batch

    def _rows(self, index: Tensor | None, items: list[Any]) -> list[Tensor] | None:
        try:
            # Between two batches the user may have changed what they are taken of: torch looks at each batch, and so does this.
            dataset: Any = self._loader.dataset
            rows = items
            while type(dataset) is Subset:
                dataset, rows = dataset.dataset, list(map(dataset.indices.__getitem__, rows))
            if rows is not items:
                index = self._index(rows)
            if dataset.tensors is not self._tensors:
                self._tensors = in_memory(self._loader) if self._device.type == "cpu" else None
            if index is None or self._tensors is None:
                return None
            return [tensor.index_select(0, index) for tensor in self._tensors]
        except Exception:
            return None  # an index that counts from the end; or the dataset says itself what is wrong

    def _index(self, items: list[Any]) -> Tensor | None:
        kinds = {*map(type, items)}
        if bool in kinds or (any(issubclass(kind, Tensor) for kind in kinds) and not all(map(_is_number, items))):
            return None
        try:
            numbers = array("q", items)  # takes integers alone, and is five times faster to fill than a tensor
            index = torch.frombuffer(numbers, dtype=torch.int64)
            if self._device.type == "cpu":
                return index
            inside = min(numbers) >= 0 and max(numbers) < self._length  # a GPU does not survive what is outside
            return send_tensor(index, self._device) if inside else None
        except Exception:
            return None


def _is_number(item: Any) -> bool:
    """Not what numbers a row and keeps a dimension of it: a tensor of one element, or of booleans."""
    return not isinstance(item, Tensor) or (item.dim() == 0 and item.dtype not in (torch.bool, torch.uint8))


def _no_index(items: list[Any]) -> None:
    return None


def _readable_ahead(batches: Any) -> bool:
    """Whether nobody can tell, once the first number is drawn, how far ahead the sampler is read."""
    if type(batches) is not BatchSampler:
        return False
    sampler = batches.sampler
    if type(sampler) is RandomSampler:
        return sampler.generator is None  # it draws from a generator of the user's during the pass, and once more at its end
    return type(sampler) in _READABLE_AHEAD


def _in_chunks(batches: Any, to_index: _ToIndex) -> Iterator[_Indexed]:
    size = batches.batch_size
    # The count is known: a RandomSampler that is asked once more makes, and throws away, another permutation.
    numbers = islice(chain.from_iterable(_runs(iter(batches.sampler))), len(batches.sampler))
    while items := list(islice(numbers, max(_CHUNK // size, 1) * size)):
        if batches.drop_last:
            del items[len(items) - len(items) % size :]
        starts = range(0, len(items), size)
        index = to_index(items)
        parts: Iterable[Tensor | None] = repeat(None) if index is None else torch.split(index, size)
        for start, part in zip(starts, parts, strict=False):
            yield part, items[start : start + size]


def _runs(numbers: Iterator[Any]) -> Iterator[Iterable[Any]]:
    """The numbers again, in pieces: torch's samplers hand on a list, and reading that spares a generator's step a number."""
    for first in numbers:
        yield (first,)
        yield getattr(numbers, "gi_yieldfrom", None) or numbers


def _one_by_one(batches: Iterator[Any], to_index: _ToIndex) -> Iterator[_Indexed]:
    for batch in batches:
        items = list(batch)
        yield to_index(items), items
