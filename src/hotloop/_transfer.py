"""Copies to an accelerator beside what it computes: pinned memory, a stream of their own, nothing waits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotloop._reading import copies_without_blocking
from hotloop._tree import map_leaves, move, move_tensor


def send_tensor(tensor: Tensor, device: torch.device, *, lasting: bool = False) -> Tensor:
    """`tensor` on `device`, without waiting for the device: by way of pinned memory, where it can pin.

    A `lasting` tensor is one that nobody writes to any more: where it is pinned it is copied from where it lies.
    """
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and not tensor.requires_grad and copies_without_blocking(device.type):
        pinned = _pinned(tensor)
        if lasting or pinned is not tensor:
            return pinned.to(device, non_blocking=True)  # type: ignore[no-any-return]
    return move_tensor(tensor, device)


def _pinned(thing: Any) -> Any:
    try:
        return thing.pin_memory()
    except Exception:
        return thing  # no method of that name, or something in it that cannot be pinned: the copy then starts from here


class Sent(NamedTuple):
    """A batch on its way: what was put on the copy stream for it, and the event behind that."""

    batch: Any
    made: list[Any]
    event: Any = None


@functools.cache
def transfer_to(device: torch.device) -> Transfer:
    """The one way to `device`. A stream has memory of its own, which the next loader and the next epoch shall use again."""
    return SideStream(device) if copies_without_blocking(device.type) else Transfer(device)


class Transfer:
    """Moves batches to a device without streams of its own: `send` moves, `receive` hands out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, batch: Any, *, lasting: bool = False) -> Sent:
        """Start the copy of everything in `batch`, which nobody writes to any more if it is `lasting`."""
        return Sent(move(batch, self.device), [])

    def receive(self, sent: Sent) -> Any:
        return sent.batch


class SideStream(Transfer):
    """Moves batches on a stream of its own, while the current stream computes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.Stream(device)
        self._records_all = True

    def send(self, batch: Any, *, lasting: bool = False) -> Sent:
        made: list[Any] = []

        def on_tensor(tensor: Tensor) -> Tensor:
            made.append(send_tensor(tensor, self.device, lasting=lasting))
            return made[-1]  # type: ignore[no-any-return]

        def on_object(thing: Any) -> Any:
            made.append(_pinned(thing).to(self.device))
            return made[-1]

        if not self._records_all:
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with _current(self._stream):
            return Sent(map_leaves(on_tensor, batch, on_object), made, self._stream.record_event())

    def receive(self, sent: Sent) -> Any:
        """The batch, for use on the current stream: that stream waits for the copy, the host does not."""
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(sent.event)
        for thing in sent.made:
            try:
                thing.record_stream(current)
            except (AttributeError, NotImplementedError, RuntimeError):
                # An object of the user's whose tensors we cannot see, a sparse tensor: its memory may come back to the copy
                # stream while a step still reads it. From here on copies wait for the steps issued before them.
                self._records_all = False
        return sent.batch


@contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    # Making a stream current makes its device current as well, so there are two streams to put back.
    before = [torch.accelerator.current_stream(stream.device), torch.accelerator.current_stream()]
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        for earlier in before:
            torch.accelerator.set_stream(earlier)
