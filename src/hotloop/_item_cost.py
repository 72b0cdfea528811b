"""What the items of a data set cost, measured on a few of them, without a trace in any random state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from hotloop._random_states import State, global_states, random_state
from hotloop._tree import leaves

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_MOST_ITEMS = 4  # in each of the two measurements
_BUDGET = 0.025  # seconds, after which neither of them starts another item


@dataclass(frozen=True)
class Cost:
    """Seconds of an item in this process, of one in a worker, where torch has a single thread, and of a batch's collation."""

    item: float
    worker_item: float
    busy: float  # the cores that an item keeps busy in a worker: near 0 while it waits for a disk or a network
    collation: float
    size: int  # items in a batch
    batch: Any  # what was collated of the items measured
    bytes: int  # of a whole batch


def measure(loader: DataLoader[Any], generators: Sequence[Any] = ()) -> Cost:
    """Read three to nine items: no more than three if they are slow, no more than 50 ms of them if they are not.

    Of a data set that reads many items together, some more are read, in the same time.
    What they draw at random, from the global states or from `generators`, is put back. What they raise is raised.
    """
    count = len(loader.dataset)  # type: ignore[arg-type]
    if not count:
        raise ValueError("the data set is empty")
    size = _batch_size(loader, count)
    with _random_states_kept(generators):
        # The first opens files, imports modules, fills caches: that is not what an item costs.
        first, seconds, _ = _read(loader.dataset, [0])
        _collated(loader, first)
        most = _MOST_ITEMS
        if hasattr(loader.dataset, "__getitems__"):  # what an item costs depends on how many are read together
            most = max(most, min(size, int(_BUDGET / seconds)))
        indices = [i * count // (2 * most + 1) for i in range(1, 2 * most + 1)]
        items, item, _ = _read(loader.dataset, indices[::2])
        with _one_thread():
            _, worker_item, busy = _read(loader.dataset, indices[1::2])
            start = time.perf_counter()
            batch = _collated(loader, items)
            collation = time.perf_counter() - start
    scale = size / (1 if loader.batch_sampler is None else len(items))
    size_in_bytes = int(scale * sum(leaf.nbytes for leaf in leaves(batch)))
    return Cost(item, worker_item, busy, scale * collation, size, batch, size_in_bytes)


def _read(dataset: Any, indices: list[int]) -> tuple[list[Any], float, float]:
    """The items, or the first of them if they take long; the seconds that one took; the cores that were busy meanwhile."""
    start, cpu_start, waits_start = time.perf_counter(), time.process_time(), _waits()
    items: list[Any] = []
    if at_once := getattr(dataset, "__getitems__", None):
        items = at_once(indices)
    else:
        for index in indices:
            items.append(dataset[index])
            if time.perf_counter() - start > _BUDGET:
                break
    seconds, cpu = max(time.perf_counter() - start, 1e-9), time.process_time() - cpu_start
    # On a crowded machine an item that computes has little of a core as well; but it does not wait on its own account.
    waited = _waits() - waits_start >= len(items)
    return items, seconds / len(items), max(cpu / seconds, 0.01 if waited else 1.0)


def _waits() -> int:
    """How often this thread has given up its core to wait for something; always 0 where the system does not tell."""
    if resource is None:
        return 0
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def _collated(loader: DataLoader[Any], items: list[Any]) -> Any:
    return loader.collate_fn(items[0] if loader.batch_sampler is None else items)


def _batch_size(loader: DataLoader[Any], count: int) -> int:
    if loader.batch_sampler is None:  # the items are batches
        return 1
    return int(getattr(loader.batch_sampler, "batch_size", 0)) or max(1, count // len(loader))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _random_states_kept(generators: Sequence[Any]) -> Iterator[None]:
    states: list[State] = [(torch.get_rng_state, torch.set_rng_state), *global_states()]
    states += filter(None, map(random_state, generators))
    before = [read() for read, _ in states]
    try:
        yield
    finally:
        for (_, put_back), was in zip(states, before, strict=True):
            put_back(was)
