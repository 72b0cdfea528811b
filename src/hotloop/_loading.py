"""`prefetch`: a loader whose batches arrive on a device, the next ones while the current one is computed on."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
import wrapt
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from hotloop._device import accelerator, of_this_process, usable
from hotloop._in_memory import whole_batches
from hotloop._parts import live_of
from hotloop._shares import loading_world, sharded
from hotloop._transfer import Sent, Transfer, transfer_to
from hotloop._tree import move

LoaderT = TypeVar("LoaderT", bound=Iterable[Any])


def prefetch(loader: LoaderT, device: torch.device | str | int | nn.Module = "auto", *, depth: int = 2) -> LoaderT:
    """`loader`, with its batches on `device`: the next ones travel while the current one is computed on.

    The result stands for the loader: `len`, `dataset`, `sampler`, `batch_size`, `sampler.set_epoch(...)` and everything else
    are the loader's own, to read and to write, and `isinstance` sees its class. It can be iterated again and again.

    - On an accelerator a batch is copied from pinned memory on a stream of its own; the host never waits for the copy, and
      the step waits for its own batch alone. Containers keep their types and tensors their dtypes. Pinned memory of yours may
      be filled again as soon as the next batch is asked for.
    - Whatever has a `.to` method moves itself: where that blocks, the host waits. Its tensors are out of sight, so from the
      first such batch on the copies to that device wait for the steps issued before them.
    - On the CPU nothing is added: no thread, no copy.
    - On either, a plain `DataLoader` over a `TensorDataset`, or a `Subset` of one, with default collation and without
      workers is read by whole batches: the same batches, the same random state, a tenth of the time and less.

    Among several processes a `DataLoader` that shuffles, and has no sampler of yours, is read in shards: by torch's
    `DistributedSampler`, which goes on to the next epoch with each pass, or to the one of `sampler.set_epoch`. `len` is that of
    the shard. Any other loader is read whole.

    Batches are fetched in the calling thread and in the loader's order, so a data set is used as it was before; an error in
    batch 3 is raised at batch 3. What looking ahead can change: where the loader (without workers) and the loop's own body
    both draw from the CPU's random numbers, their draws come in another order. `depth=1` keeps it, and so does a model
    wrapped with `exact=True`; the next batch is then fetched when it is asked for, and its copy is still not waited for. So it
    is for a loader with a `state_dict`, which tells where to resume.

    Args:
        loader: any iterable of batches: a `DataLoader`, a list, a generator, an endless stream.
        device: where to; `"auto"` is the accelerator if there is one, else the CPU. A wrapped model stands for the device
            that it is on when an iteration starts.
        depth: how many batches are in use or on their way at a time, the current one counted. No more are fetched. Write 1
            for a generator that uses NumPy arrays again: only tensors are copied as they are fetched. Memory on the device
            comes back when the device is through with a batch: there it is the steps that the host runs ahead that count.

    Raises:
        TypeError: `loader` is not iterable, or is a model or a data set; `device` is a model that is not wrapped.
        ValueError: `depth` is less than 1, or torch cannot use `device`.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.arange(10))
        >>> loader = prefetch(torch.utils.data.DataLoader(data, batch_size=4), "cpu")
        >>> [len(x) for x, y in loader]
        [4, 4, 2]
    """
    if isinstance(loader, Prefetch):
        loader = loader.__wrapped__
    _check_loader(loader)
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ValueError(f"prefetch(..., depth={depth!r}): depth counts the batches in use or on their way; give 1 or more")
    target = _checked_target(device)
    live = live_of(target)
    kind = PrefetchedIterator if isinstance(loader, Iterator) else Prefetch
    return cast(LoaderT, kind(sharded(loader, loading_world() if live is None else live.parts.world), target, depth))


class Prefetch(wrapt.BaseObjectProxy):  # type: ignore[type-arg]
    """What `prefetch` returns: the loader, but for its iteration."""

    def __init__(self, loader: Iterable[Any], target: Any, depth: int) -> None:
        super().__init__(loader)
        self._self_target = target
        self._self_depth = depth

    def __iter__(self) -> Iterator[Any]:
        device = self._self_device()
        batches = _batches(self.__wrapped__)
        if device.type != "cpu":
            live = live_of(self._self_target)
            # A loader that can be resumed counts what it has handed out: a batch ahead would be lost.
            in_step = (live is not None and live.exact) or callable(getattr(self.__wrapped__, "state_dict", None))
            depth = 1 if in_step else self._self_depth
            return Ahead(batches, transfer_to(device), depth, lasting=_makes_new_memory(self.__wrapped__))
        # Without an accelerator there is no place but the CPU that a batch could come from.
        return map(partial(move, device=device), batches) if torch.accelerator.is_available() else batches

    def _self_over(self, loader: Iterable[Any]) -> Prefetch:
        """The same for another loader."""
        return type(self)(loader, self._self_target, self._self_depth)

    def __repr__(self) -> str:
        return f"prefetch({self.__wrapped__!r}, {str(self._self_device())!r}, depth={self._self_depth})"

    def __copy__(self) -> Prefetch:
        return self._self_over(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetch:
        target = copy.deepcopy(self._self_target, memo)
        memo[id(self)] = made = type(self)(copy.deepcopy(self.__wrapped__, memo), target, self._self_depth)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A wrapped model is stored as the plain module, which names no device: what is stored is the device itself.
        return partial(prefetch, depth=self._self_depth), (self.__wrapped__, self._self_device())

    def _self_device(self) -> torch.device:
        live = live_of(self._self_target)
        device: torch.device = self._self_target if live is None else live.parts.device
        return device


class PrefetchedIterator(Prefetch):
    """The same for an iterator, which has one pass: `next` takes a batch of it, and a second loop goes on where the first ended."""

    _self_pass: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._self_pass is None:
            self._self_pass = super().__iter__()
        return self._self_pass

    def __next__(self) -> Any:
        return next(iter(self))


class Ahead(Iterator[Any]):
    """The batches of one pass, fetched up to `depth` at a time and sent on their way at once.

    A `lasting` batch is one that the loader never writes to again.
    """

    def __init__(self, batches: Iterator[Any], transfer: Transfer, depth: int, *, lasting: bool) -> None:
        self._batches = batches
        self._lasting = lasting
        self._transfer = transfer
        self._depth = depth
        self._queue: deque[Sent | Exception] = deque()
        self._open = True  # there may be more to fetch, and no error is waiting for its turn

    def __next__(self) -> Any:
        while self._open and len(self._queue) < self._depth:
            self._fetch()
        if not self._queue:
            raise StopIteration
        first = self._queue.popleft()
        if isinstance(first, Sent):
            return self._transfer.receive(first)
        self._open = True  # an iterator may go on after an error, as DataLoader's does
        try:
            raise first
        finally:
            del first  # its traceback holds this frame: leave no cycle, which would keep the batches alive

    def _fetch(self) -> None:
        try:
            self._queue.append(self._transfer.send(next(self._batches), lasting=self._lasting))
        except StopIteration:
            self._open = False
        except Exception as error:
            self._open = False
            self._queue.append(error)


def _batches(loader: Iterable[Any]) -> Iterator[Any]:
    # A subclass of DataLoader may iterate in a way of its own.
    return whole_batches(loader) if type(loader) is DataLoader else iter(loader)


def _makes_new_memory(loader: Any) -> bool:
    """Whether every pinned batch of a loader is memory of its own: pinned by its thread, or stacked from items."""
    if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        return False
    return loader.num_workers > 0 or loader.collate_fn is default_collate


def _check_loader(loader: Any) -> None:
    if isinstance(loader, nn.Module):
        raise TypeError("prefetch(model, ...): the loader comes first; write prefetch(loader, model)")
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        raise TypeError(
            f"prefetch({type(loader).__name__}(...)): a data set holds items, not batches; "
            "write prefetch(DataLoader(dataset, batch_size=32), ...), or data_loader(dataset, 32) in place of DataLoader"
        )
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not iterable or isinstance(loader, str | bytes | Tensor | Mapping | type):
        raise TypeError(
            f"prefetch({type(loader).__name__}, ...): takes an iterable of batches, such as a DataLoader, a list or a generator"
        )


def _checked_target(device: Any) -> Any:
    """A wrapped model, which is asked for its device at each iteration, or a device with its index."""
    if live_of(device) is not None:
        return device
    if isinstance(device, nn.Module):
        raise TypeError(
            f"prefetch(loader, {type(device).__name__}(...)): the model is not wrapped, so it names no device; "
            "wrap it first (model = optimize(model)), or write prefetch(loader, next(model.parameters()).device)"
        )
    if not isinstance(device, str | int | torch.device):
        raise TypeError(
            f"prefetch(loader, <{type(device).__name__}>): the second argument is a device or a wrapped model; write "
            "prefetch(loader, model)"
        )
    if device == "auto":
        return of_this_process(usable(accelerator() or "cpu", "prefetch(loader)"))
    return usable(device, f"prefetch(loader, {device!r})")
