"""Scalars on their way to the host. This is the only place in hotloop that reads a value from a device.

On an accelerator the scalars of one step are packed into one tensor, which is copied to pinned memory without blocking; a
read waits for the event behind that copy alone, not for what was queued later. On the CPU a value is read at once: that
takes 0.4 microseconds and is cheaper than any lazy scheme.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hotloop._device import accelerator, wide

Number = float | int | bool | complex


def read_numbers(tensors: Sequence[Tensor]) -> list[Number]:
    """What `.item()` gives for each one-element tensor, all of them in one transfer."""
    return Reading(list(tensors)).values()


def snapshot(values: list[Any]) -> list[Any]:
    """The values as they are now, before an update that may change a parameter, or a view of one, among them."""
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            if value.device.type == "cpu":
                values[i] = value.item()
            elif value.grad_fn is None or value._is_view():
                values[i] = value.detach().clone()
    return values


class Reading:
    """Values that are on their way. `values()` waits for them, once; `ready()` tells whether that would wait.

    Each value is a one-element tensor, or a Python number, which is kept as it is. Either way it is a snapshot: what is done
    to the tensor later does not show. `packed` holds what is still on the device, in the layout `kinds`.
    """

    __slots__ = ("_on_the_way", "_values", "kinds", "packed", "slots")

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self.packed: Tensor | None = None
        self.slots: tuple[int, ...] = ()
        remote = []
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                if value.device.type == "cpu":
                    values[i] = value.item()
                else:
                    remote.append(i)
        if remote:
            self._send(values, tuple(remote))

    @classmethod
    def of(cls, values: Iterable[Any]) -> Reading:
        """Of values that are what they are, tensors too."""
        made = cls([])
        made._values = list(values)
        return made

    def _send(self, values: list[Any], slots: tuple[int, ...]) -> None:
        tensors = [values[i] for i in slots]
        for i in slots:
            values[i] = None  # nothing of the step stays alive in here
        self.slots = slots
        self.kinds = tuple(t.dtype for t in tensors)
        self.packed = pack(tensors)
        self._on_the_way = _start_copy(self.packed)

    def known(self) -> list[Any]:
        """What is known on the host now: None stands for a value that is still on the device."""
        return self._values

    def ready(self) -> bool:
        """Whether reading the values would not wait for the device."""
        if self.packed is None:
            return True
        event = self._on_the_way[1]
        return event is not None and bool(event.query())

    def values(self) -> list[Any]:
        """The values as exact Python numbers. Waits for the device on the first call, where they came from one."""
        packed = self.packed
        if packed is not None:
            host, event = self._on_the_way
            if event is not None:
                event.synchronize()
            self._arrived((packed if host is None else host).cpu().reshape(-1).tolist(), wide(packed.device))
        return self._values

    def _arrived(self, words: list[float], dtype: torch.dtype) -> None:
        for i, number in zip(self.slots, unpack(words, self.kinds, dtype), strict=True):
            self._values[i] = number
        self.packed = None
        self._on_the_way = (None, None)


def read_all(readings: Sequence[Reading]) -> None:
    """Wait for many readings, with one transfer where they have not been sent to the host already."""
    for reading in readings:
        if reading.packed is not None and reading._on_the_way[1] is not None:
            reading.values()
    waiting = [(reading, reading.packed) for reading in readings if reading.packed is not None]
    if not waiting:
        return
    dtype = wide(waiting[0][1].device)
    words = torch.cat([packed.reshape(-1).to(dtype) for _, packed in waiting]).cpu().tolist()
    for reading, packed in waiting:
        reading._arrived(words[: packed.numel()], dtype)
        del words[: packed.numel()]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One-element tensors as one tensor of words that hold every value exactly; one operator in the usual case."""
    device = tensors[0].device
    with torch.no_grad():
        if len(tensors) == 1 and tensors[0].dtype == torch.float32:
            return tensors[0].clone()
        flat = [_flat(t) if t.device == device else _flat(t).to(device, non_blocking=True) for t in tensors]
        if all(t.dtype == torch.float32 for t in flat):
            return torch.stack(flat)
        dtype = wide(device)
        return torch.stack([word.to(dtype) for t in flat for word in _words(t, dtype)])


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 0 else tensor.reshape(())


def _word_bits(dtype: torch.dtype) -> int:
    # A float holds no 64-bit integer exactly: two words of 32 bits do, or four of 16 bits in float32.
    return 32 if dtype == torch.float64 else 16


def _words(value: Tensor, dtype: torch.dtype) -> list[Tensor]:
    if value.is_complex():
        return [value.real, value.imag]
    if value.dtype not in _WIDE_INTEGERS:
        return [value]
    if value.dtype == torch.uint64:
        value = value.view(torch.int64)
    bits = _word_bits(dtype)
    low = [(value >> shift) & ((1 << bits) - 1) for shift in range(0, 64 - bits, bits)]
    return [*low, value >> (64 - bits)]


_WIDE_INTEGERS = (torch.int64, torch.uint64)


def join(words: Iterator[float], kind: torch.dtype, dtype: torch.dtype) -> Number:
    """The value of the next words. Linear in them, so that it holds for sums of packed values as well."""
    if kind.is_complex:
        return complex(next(words), next(words))
    if kind in _WIDE_INTEGERS:
        bits = _word_bits(dtype)
        whole = [next(words) for _ in range(64 // bits)]
        if all(word.is_integer() for word in whole):
            return sum(int(word) << (bits * i) for i, word in enumerate(whole))
        return sum(word * 2.0 ** (bits * i) for i, word in enumerate(whole))
    return next(words)


def unpack(words: Sequence[float], kinds: Sequence[torch.dtype], dtype: torch.dtype) -> list[Number]:
    """The Python numbers behind what `pack` made of tensors of these dtypes, with words of `dtype`."""
    rest = iter(words)
    return [_as_item(join(rest, kind, dtype), kind) for kind in kinds]


def _as_item(value: Any, kind: torch.dtype) -> Number:
    if kind == torch.bool:
        return bool(value)
    if kind == torch.uint64:
        return int(value) % (1 << 64)
    exact: Number = value if kind.is_floating_point or kind.is_complex else int(value)
    return exact


def _start_copy(packed: Tensor) -> tuple[Tensor | None, Any]:
    """Send `packed` to pinned memory without waiting; (None, None) on a device that cannot, where a read copies."""
    if not copies_without_blocking(packed.device.type):
        return None, None
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = torch.Event(packed.device)
    event.record(torch.accelerator.current_stream(packed.device))
    return host, event


@functools.cache
def copies_without_blocking(device_type: str) -> bool:
    """Whether a device of this type copies from and to pinned memory while the host goes on."""
    current = accelerator()
    if current is None or current.type != device_type:
        return False
    try:
        torch.Event(device_type)
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False
