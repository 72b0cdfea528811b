"""`data_loader`: a `DataLoader` whose workers, pinning and batching are chosen by measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from hotloop._device import accelerator
from hotloop._in_memory import in_memory, subsets, whole_batches
from hotloop._item_cost import Cost, measure
from hotloop._plan import Decision, Plan
from hotloop._reading import copies_without_blocking
from hotloop._shares import Shard, loading_world, sharded
from hotloop._tree import leaves
from hotloop._worker_safety import Contents, obstacle
from hotloop._workers import Room, in_shared_memory, room, workers_for

_OF_WORKERS = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context")


class MeasuredLoader(DataLoader[Any]):
    """A `DataLoader` that tells in `plan` how it was set up, and reads tensors in memory by whole batches."""

    plan: Plan

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return whole_batches(self)


class _WaitingLoader(MeasuredLoader):
    def check_worker_number_rationality(self) -> None:
        """Nothing to warn of: workers that wait for their input may be more than the cores."""


def data_loader(dataset: Any, batch_size: int | None = 1, **dataloader_arguments: Any) -> MeasuredLoader:
    """A `DataLoader` over `dataset`, with workers, pinning and batching chosen by measuring a few items.

    What is given is obeyed, under the names that `DataLoader` has for it; `loader.plan` tells what was chosen for the rest,
    and the figures behind it:

    - `num_workers`: 0 where an item is cheap, as many as pay where it is not. Never more than the cores that this process
      may use, unless items mostly wait (for a disk, a network). None for tensors in memory, for an `IterableDataset`, which
      every worker would repeat, and for a data set with something that processes cannot share, such as an open file.
    - `persistent_workers`: on with workers, unless the data set has a `set_epoch`, which would not reach them. A data set
      that is changed between epochs in another way needs `persistent_workers=False`.
    - `prefetch_factor`: 2, or 1 where the shared memory holds no more.
    - `pin_memory`: on where an accelerator copies from pinned memory.
    - Tensors in memory (a `TensorDataset` or a `Subset` of one, with default collation) are read by whole batches.

    Among several processes (torchrun's, or those of your group) a loader that shuffles is one over a shard, as `prefetch` has it,
    so that `len(loader)` counts the batches of this process. A sampler of yours is left alone.

    Measuring reads three to nine items in this process: some 50 ms of them, or three if they are slow. The random states of
    torch, Python and NumPy, and of generators that the data set, its class or its module holds, are put back. Items that
    fail, or that could not come from a worker, mean no workers. Random transforms draw other numbers in a worker than in this
    process: a run that must repeat bit for bit needs its own `num_workers`.

    Args:
        dataset: a map-style data set or an `IterableDataset`.
        batch_size: as `DataLoader` takes it; None if the items are batches already.
        **dataloader_arguments: any other argument of `DataLoader`.

    Raises:
        TypeError: `dataset` is no data set. What `DataLoader` raises on wrong arguments, it raises before an item is read.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.arange(10))
        >>> loader = data_loader(data, 4, shuffle=True)
        >>> loader.plan["num_workers"].choice, len(loader)
        ('0', 3)
    """
    _check(dataset)
    given = dataloader_arguments
    # Checks the arguments, and is what the measurement reads with.
    probe = MeasuredLoader(dataset, batch_size, **{k: v for k, v in given.items() if k not in ("num_workers", *_OF_WORKERS)})
    undecided = "num_workers" not in given or ("pin_memory" not in given and torch.accelerator.is_available())
    cost = _cost(probe) if undecided else "num_workers is given: nothing was measured"
    place = room(given.get("multiprocessing_context"))
    workers = _Choice(given, "num_workers", *_workers(probe, cost, place, given))
    choices = [workers]
    if workers.value:
        choices.append(_Choice(given, "persistent_workers", *_persistent(dataset)))
        choices.append(_Choice(given, "prefetch_factor", *_ahead(cost, place, workers.value)))
    elif "num_workers" not in given:
        given = {k: v for k, v in given.items() if k not in _OF_WORKERS}  # there is nobody whom they would concern
    choices.append(_Choice(given, "pin_memory", *_pinned(probe, cost)))
    kind = _WaitingLoader if workers.value > place.cores and "num_workers" not in given else MeasuredLoader
    loader = kind(dataset, batch_size, **{**given, **{c.name: c.value for c in choices}})
    world = loading_world()
    loader = cast(MeasuredLoader, sharded(loader, world))
    found = [_batching(loader), *(Decision(c.name, str(c.value), c.why) for c in choices)]
    if world is not None:
        is_shard = isinstance(loader.sampler, Shard)
        why = f"this is rank {world.rank} of {world.size}, and the loader {'shuffles' if is_shard else 'does not shuffle by itself'}"
        found.append(Decision("sharding", "on" if is_shard else "off", why))
    loader.plan = Plan(found)
    return loader


class _Choice:
    """One argument of `DataLoader`: what was given, else what was chosen and why."""

    def __init__(self, given: dict[str, Any], name: str, value: Any, why: str) -> None:
        self.name = name
        self.value = given.get(name, value)
        self.why = "given" if name in given else why


def _check(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise TypeError("data_loader(loader): takes a data set; write data_loader(loader.dataset, batch_size)")
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"data_loader({type(dataset).__name__}, ...): takes a data set, which has `__getitem__` and `__len__`, or an "
            "IterableDataset; an iterable of batches goes to prefetch(batches) as it is"
        )


def _cost(probe: DataLoader[Any]) -> Cost | str:
    """What the items cost, or why that is not known."""
    if isinstance(probe.dataset, IterableDataset):
        return "an IterableDataset: every worker would repeat it"
    if in_memory(probe) is not None:
        return "tensors in memory: an index a batch is all there is to do"
    contents = Contents(forked=True)
    for code in (probe.dataset, probe.collate_fn):
        contents.read(code)
    try:
        return measure(probe, contents.generators)
    except Exception as error:
        return f"the items could not be measured: {type(error).__name__}: {error}"


def _workers(probe: DataLoader[Any], cost: Cost | str, place: Room, given: dict[str, Any]) -> tuple[int, str]:
    if isinstance(cost, str):
        return 0, cost
    try:
        batches: float = len(probe)
    except TypeError:  # a sampler without a length
        batches = math.inf
    persistent = given.get("persistent_workers", _persistent(probe.dataset)[0])
    count, why = workers_for(cost, place, batches, persistent)
    if count and (reason := obstacle(probe, cost.batch, place.method)):
        return 0, reason
    return count, why


def _persistent(dataset: Any) -> tuple[bool, str]:
    if any(hasattr(part, "set_epoch") for part in subsets(dataset)):
        return False, "the data set has a set_epoch, which would not reach running workers"
    return True, "workers are started once, not once an epoch"


def _ahead(cost: Cost | str, place: Room, workers: int) -> tuple[int, str]:
    if isinstance(cost, str) or in_shared_memory(cost, place, ahead=2) >= workers:
        return 2, "batches ahead for each worker"
    return 1, "the shared memory holds no more"


def _pinned(probe: DataLoader[Any], cost: Cost | str) -> tuple[bool, str]:
    current = accelerator()
    if current is None:
        return False, "there is no accelerator"
    if not copies_without_blocking(current.type):
        return False, f"{current} does not copy from pinned memory"
    batch = in_memory(probe) if isinstance(cost, str) else cost.batch
    if batch is None:
        return False, "not known what a batch holds; prefetch pins what can be pinned"
    if any(leaf.device.type != "cpu" for leaf in leaves(batch)):
        return False, "the batches are on a device already"
    return True, f"copies to {current} need not be waited for"


def _batching(loader: DataLoader[Any]) -> Decision:
    if in_memory(loader) is not None:
        return Decision("batching", "whole batches", "tensors in memory, with default collation and no workers")
    return Decision("batching", "item by item", "more than indexing tensors in memory")
