"""What a run of a model changes besides its result, and how to put it back."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from hotloop._contents import OF_EVERY_MODULE, Contents, Kept, copies, held_tensors, put_back
from hotloop._parts import Live
from hotloop._random_states import State, global_states, random_state
from hotloop._tensors import is_16_bit
from hotloop._tree import leaves

Cell = tuple[dict[str, Any], str]  # where a module keeps a buffer or an attribute: a dictionary of its own, and the name

_NUMBERS = (int, float, bool)
_LARGEST = 2**26  # bytes of what is copied before a first run: a memory bank may fill half of the device


@dataclass(frozen=True)
class Proven:
    """What to look at in a mode that has run: what that run has changed, and the buffers.

    A buffer's version tells that it was changed, but not of the statistics that a normalisation's kernel writes: BatchNorm
    counts its batches in another buffer, so that a module's buffers are taken together; InstanceNorm does not, and has its copied.
    Buffers are held by their places, since a state may be loaded in the place of them.
    """

    cells: list[Cell]
    sources: list[State]
    seen: list[tuple[Cell, int]]  # and the module that they belong to
    unseen: list[Cell]

    def versions(self) -> list[int]:
        return [_version(kept.get(name)) for (kept, name), _ in self.seen]

    def changed_since(self, versions: list[int]) -> list[Tensor]:
        now = self.versions()
        touched = {owner for (_, owner), before, after in zip(self.seen, versions, now, strict=True) if before != after}
        return [kept[name] for (kept, name), owner in self.seen if owner in touched and kept.get(name) is not None]


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None else buffer._version


class Snapshot:
    """The random state, the buffers, and what the attributes of modules are (a queue's pointer, a count).

    Until a mode has run once all of it is kept, which costs an operator a buffer. From then on only the random states, the
    numbers and the places of buffers that this run has changed: of buffers that a failed run has changed in place their versions
    tell; they hold what the batch gives them, and hold it again after the last run. A first run's arguments, `given`, are kept too.
    """

    def __init__(self, live: Live, proven: Proven | None, given: Any = ()) -> None:
        self._random = torch.get_rng_state()
        self._device = live.parts.device
        module: Any = None if self._device.type == "cpu" else torch.get_device_module(self._device)
        self._module = module if hasattr(module, "get_rng_state") else None
        self._on_device = None if self._module is None else self._module.get_rng_state(self._device)
        self._proven = proven
        if proven is None:
            self._parts = [part for model in (live.parts.model, *live.companions) for part in model.modules()]
            cells = list(_cells(self._parts))
            sources = list(_sources(self._parts))
            self._held = list(held_tensors(self._parts))  # alive, so that no new tensor gets the id of one of them
            buffers = [b for part in self._parts for b in part._buffers.values() if b is not None and _has_values(b)]
            # Other devices get a copy in each run. A leaf that wants gradients is written to by none.
            buffers += [t for t in leaves(given) if t.device == self._device and not t.requires_grad and _has_values(t)]
            buffers = [b for b in buffers if b.layout is torch.strided and not b.is_nested and b.nbytes <= _LARGEST]
            self._contents = Contents(self._parts, self._held, buffers)
        else:
            cells = [(kept, name) for kept, name in proven.cells if name in kept]
            sources = proven.sources
            buffers = [kept[name] for kept, name in proven.unseen if kept.get(name) is not None]
            self._versions = proven.versions()
        self._cells = [(kept, name, kept[name]) for kept, name in cells]
        self._sources = [(read, put, read()) for read, put in sources]
        self._before = copies(buffers)
        self._changed: list[tuple[Tensor, Tensor]] = []

    def proven(self) -> Proven:
        """After a first run that was fine: what to look at from now on."""
        before = {(id(kept), name): value for kept, name, value in self._cells}
        moved = [(kept, name) for kept, name in _cells(self._parts) if before.get((id(kept), name), before) is not kept[name]]
        own_buffers = {id(part._buffers) for part in self._parts}
        # A tensor among the attributes may be a feature map: kept for another run it would stay in memory.
        cells = [(kept, name) for kept, name in moved if id(kept) in own_buffers or type(kept[name]) in _NUMBERS]
        sources = [(read, put) for read, put, state in self._sources if pickle.dumps(read()) != pickle.dumps(state)]
        replaced = {(id(kept), name) for kept, name in cells}
        made = Proven(cells, sources, [], [])
        for i, part in enumerate(self._parts):
            own = [(part._buffers, name) for name, b in part._buffers.items() if b is not None and _has_values(b)]
            own = [(kept, name) for kept, name in own if (id(kept), name) not in replaced]
            if isinstance(part, nn.modules.instancenorm._InstanceNorm):
                made.unseen.extend(own)
            else:
                made.seen.extend((cell, i) for cell in own)
        return made

    def kept(self) -> list[Kept]:
        """After a first run that was fine: the tensors that modules have kept of it."""
        known = {id(tensor) for there in self._held for tensor in there.tensors}
        small = {(id(there.holder), there.name) for there in self._held if any(map(is_16_bit, there.tensors))}
        found = []
        for there in held_tensors(self._parts):
            if new := [tensor for tensor in there.tensors if id(tensor) not in known]:
                found += [there._replace(tensors=new, was_16_bit=(id(there.holder), there.name) in small)]
        return found

    def failed(self) -> None:
        """The first run has raised."""
        if self._proven is None:
            self._contents.failed()
        else:
            self._changed = copies(self._proven.changed_since(self._versions))

    def restore(self) -> None:
        """Before another run."""
        torch.set_rng_state(self._random)
        if self._module is not None:
            self._module.set_rng_state(self._on_device, self._device)
        for _, put, state in self._sources:
            put(state)
        if self._proven is None:
            known = {(id(kept), name) for kept, name, _ in self._cells}
            for kept, name in list(_cells(self._parts)):
                if (id(kept), name) not in known:
                    del kept[name]
            self._contents.restore()
        for kept, name, value in self._cells:
            kept[name] = value
        put_back(self._before)

    def finish(self) -> None:
        """After the last run."""
        if self._proven is None:
            self._contents.finish()
        put_back(self._changed)


def _cells(parts: Sequence[nn.Module]) -> Iterator[Cell]:
    for part in parts:
        yield from ((part._buffers, name) for name, _ in part._buffers.items())
        if not isinstance(part, LazyModuleMixin):  # it takes its sizes from the first batch, once
            attributes = vars(part)
            yield from ((attributes, name) for name in attributes if name not in OF_EVERY_MODULE)


def _sources(parts: Sequence[nn.Module]) -> Iterator[State]:
    """The random number generators besides torch's own: those of the process, and those that modules hold."""
    yield from global_states()
    held = {id(value): value for part in parts for value in vars(part).values()}
    yield from filter(None, map(random_state, held.values()))


def _has_values(buffer: Tensor) -> bool:
    return not nn.parameter.is_lazy(buffer) and not buffer.is_inference()
