"""What each rank reads of a data set: a shard of one to train on, a share of one to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeGuard, cast

import torch.distributed as dist
import wrapt
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from hotloop._processes import World, everyone, world_around


class Shard(DistributedSampler[Any]):
    """A `DistributedSampler` that goes on to the next epoch by itself; `set_epoch` is obeyed as well."""

    def __init__(self, whole: RandomSampler, world: World) -> None:
        super().__init__(cast(Any, whole.data_source), num_replicas=world.size, rank=world.rank)
        self.whole = whole

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


class Share(Sampler[Any]):
    """The samples of this rank's part of an evaluation."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)


def loading_world() -> World | None:
    """The processes that a loader made now will feed; None for a single one."""
    try:
        world = world_around()
    except ValueError:
        return None  # `optimize` says what is wrong
    return world if world is not None and world.size > 1 else None


def sharded(loader: Any, world: World | None) -> Any:
    """The loader with a `DistributedSampler`, where it shuffles and has no sampler of the user's own; else itself."""
    if world is None or world.size == 1 or not isinstance(loader, DataLoader):
        return loader
    if not _permutes(loader.sampler) or not _batches_by_number(loader):
        return loader
    return resampled(loader, Shard(loader.sampler, world))


def _permutes(sampler: Any) -> TypeGuard[RandomSampler]:
    """Whether this is what `shuffle=True` makes: it gives every sample once."""
    return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _batches_by_number(loader: DataLoader[Any]) -> bool:
    """Whether batches are so many samples each, in the order of the sampler, or the samples themselves."""
    batches = loader.batch_sampler
    return batches is None or (type(batches) is BatchSampler and batches.sampler is loader.sampler)


def whole(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader without what `sharded` did to it."""
    return resampled(loader, loader.sampler.whole) if isinstance(loader.sampler, Shard) else loader


def resampled(loader: DataLoader[Any], sampler: Any, batches: Any = None, **changes: Any) -> DataLoader[Any]:
    """A copy of the loader with another sampler, and batches of its own making unless they are given."""
    if batches is None and loader.batch_sampler is not None:
        batches = BatchSampler(sampler, loader.batch_size or 1, changes.get("drop_last", loader.drop_last))
    made = copy.copy(loader)
    # Past `DataLoader.__setattr__`, which refuses this on a loader that is in use; this one is new.
    vars(made).update(sampler=sampler, batch_sampler=batches, _iterator=None, **changes)
    return made


class Part(wrapt.BaseObjectProxy):  # type: ignore[type-arg]
    """Every so-many-th batch of an iterable that cannot be indexed."""

    def __init__(self, batches: Any, world: World) -> None:
        super().__init__(batches)
        self._self_world = world
        self._self_given = 0

    def __iter__(self) -> Iterator[Any]:
        self._self_given = 0
        for batch in islice(iter(self.__wrapped__), self._self_world.rank, None, self._self_world.size):
            self._self_given += 1
            yield batch

    def __len__(self) -> int:
        return len(range(self._self_world.rank, len(self.__wrapped__), self._self_world.size))


def share(loader: Any, world: World) -> Any:
    """This rank's part of what the loader reads: over all ranks no sample is left out and none comes twice."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return Part(loader, world)
    part, own = slice(world.rank, None, world.size), {"persistent_workers": False}
    order = _common_order(loader)
    if order is None:
        # In an order that ranks cannot know of each other, rank 0's holds for all.
        if loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler:
            order = everyone(list(loader.sampler) if world.rank == 0 else None)[0]
        else:
            batches = everyone(list(loader.batch_sampler) if world.rank == 0 else None)[0]
            return resampled(loader, loader.sampler, batches[part], **own)
    if loader.batch_sampler is not None and loader.drop_last:
        order = order[: len(order) - len(order) % (loader.batch_size or 1)]
    return resampled(loader, Share(order[part]), drop_last=False, **own)


def _common_order(loader: DataLoader[Any]) -> Any:
    """The samples that an evaluation reads, in an order that all ranks find by themselves; None if there is none."""
    sampler: Any = loader.sampler
    if not _batches_by_number(loader):
        return None
    if isinstance(sampler, DistributedSampler):  # it repeats samples, so that ranks get as many
        return range(len(sampler.dataset))  # type: ignore[arg-type]
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices)
    if _permutes(sampler) or type(sampler) is SequentialSampler:
        return range(len(sampler.data_source))
    return None


def size_of(part: Any) -> int:
    """How much a share weighs: its samples, or the batches that it gave where samples cannot be counted."""
    if isinstance(part, Part):
        return int(part._self_given)
    if part.batch_sampler is None or type(part.batch_sampler) is BatchSampler:
        return len(part.sampler)
    return sum(map(len, part.batch_sampler))


def evaluating_world(found: World | None) -> World | None:
    """The processes that share an evaluation: those of its model, else those of the user's group."""
    world = found if found is not None or not dist.is_available() or not dist.is_initialized() else world_around()
    return world if world is not None and world.size > 1 else None
