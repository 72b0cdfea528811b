"""The means of metrics over many steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hotloop._device import wide
from hotloop._reading import Reading, join

# So many steps are summed by one set of operators: a sum for each step would cost operators in every step.
_CHUNK = 64

_Step = tuple[list[str], Reading, float]  # the names, the values, and flags behind them; the weight


class Means:
    """Weighted sums of the metrics of many steps.

    Steps wait until a chunk of them is summed: what has been read on the host, the rest on its device by a few operators.
    Nothing is read from a device before `sums`. Whether an update was skipped tells the reading of the step that closed its
    window: its verdict on all steps of that window.
    """

    def __init__(self) -> None:
        self._open: list[_Step] = []  # without a verdict by now
        self._host: dict[str, list[Any]] = {}  # name -> [weighted sum, weight]
        self._device: dict[Any, Tensor] = {}  # layout -> weighted sums of its words, and the weight
        self._waiting: list[tuple[_Step, _Step]] = []  # each with the step that closed its window

    def add(self, names: list[str], reading: Reading, weight: float, *, is_open: bool = False) -> None:
        """Take in one step. Values of `reading` beyond the names are overflow flags: a skipped window does not count.

        `is_open` says that flags may come with a later step.
        """
        step = (names, reading, weight)
        if is_open:
            self._open.append(step)
            return
        if self._open:
            self._close(step)
        if weight:
            self._waiting.append((step, step))
        if len(self._waiting) >= _CHUNK:
            self._sum_waiting()

    def _close(self, last: _Step | None) -> None:
        """The open steps have a verdict, or count whatever becomes of their window."""
        self._waiting += [(step, last or step) for step in self._open if step[2]]
        self._open.clear()

    def _sum_waiting(self) -> None:
        layouts: dict[Any, list[tuple[Reading, float, Reading]]] = {}
        for (names, reading, weight), (closing, verdict, _) in self._waiting:
            known = verdict.known()[len(closing) :]
            if True in known:
                continue
            values = reading.known()
            if reading.packed is None and None not in known:
                self._add_on_host(names, values, weight)
                continue
            slots, kinds = ((), ()) if reading.packed is None else (reading.slots, reading.kinds)  # somebody has looked
            on_host = tuple((i, isinstance(v, complex)) for i, v in enumerate(values) if i not in slots)
            layout = (tuple(names), slots, kinds, on_host, known.count(None))
            layouts.setdefault(layout, []).append((reading, weight, verdict))
        self._waiting.clear()
        for layout, rows in layouts.items():
            summed = _weighted_sums(rows, slots=layout[1], flags=layout[4])
            self._device[layout] = self._device[layout] + summed if layout in self._device else summed

    def _add_on_host(self, names: list[str], values: list[Any], weight: float) -> None:
        for name, value in zip(names, values, strict=False):
            total = self._host.setdefault(name, [0.0, 0.0])
            total[0] += value * weight
            total[1] += weight

    def sums(self) -> dict[str, list[Any]]:
        """`{name: [weighted sum, weight]}` of everything taken in. Waits for the device, with one transfer."""
        self._close(None)
        self._sum_waiting()
        total = {name: list(pair) for name, pair in self._host.items()}
        if not self._device:
            return total
        device = next(iter(self._device.values())).device
        words = iter(torch.cat([sums.to(device) for sums in self._device.values()]).cpu().tolist())
        for (names, slots, kinds, on_host, _), sums in self._device.items():
            row: dict[int, Any] = {i: join(words, kind, sums.dtype) for i, kind in zip(slots, kinds, strict=True)}
            row.update(
                (i, join(words, torch.complex128 if is_complex else sums.dtype, sums.dtype)) for i, is_complex in on_host
            )
            weight = next(words)
            for i, name in enumerate(names):
                pair = total.setdefault(name, [0.0, 0.0])
                pair[0] += row[i]
                pair[1] += weight
        return total

    def open_steps(self) -> list[list[Any]]:
        """Those that wait for a verdict, as `[names, values, weight]`; they are no longer taken in. Waits for the device."""
        steps = [[list(names), list(reading.values()), weight] for names, reading, weight in self._open]
        self._open.clear()
        return steps

    def restore(self, sums: dict[str, list[Any]], open_steps: list[list[Any]] | tuple[()] = ()) -> None:
        """Forget everything and go on from these sums."""
        self._open = [(names, Reading(list(values)), weight) for names, values, weight in open_steps]
        self._waiting.clear()
        self._device.clear()
        self._host = {name: list(pair) for name, pair in sums.items()}


def _weighted_sums(rows: list[tuple[Reading, float, Reading]], slots: tuple[int, ...], flags: int) -> Tensor:
    """The weighted sums of the rows' words, then of the numbers that were on the host, then the weight itself."""
    packs = [reading.packed for reading, _, _ in rows if reading.packed is not None]
    verdicts = [verdict.packed for _, _, verdict in rows if verdict.packed is not None]
    device = (packs or verdicts)[0].device
    with torch.no_grad():
        dtype = wide(device)
        host = [[*_host_words(reading, slots), 1.0] for reading, _, _ in rows]
        # Copies to the device from a temporary do not wait for it.
        words = torch.tensor(host, dtype=dtype, device="cpu").to(device, non_blocking=True)
        weights = torch.tensor([[w] for _, w, _ in rows], dtype=dtype, device="cpu").to(device, non_blocking=True)
        if packs:
            words = torch.cat([torch.stack(packs).reshape(len(packs), -1).to(dtype), words], dim=1)
        if flags:  # the flags are the last words on the device; a skipped step may hold nan
            skipped = torch.stack([verdict.reshape(-1)[-flags:] for verdict in verdicts]).any(dim=1, keepdim=True)
            words = torch.where(skipped, torch.zeros_like(words), words)
        return (words * weights).sum(dim=0)


def _host_words(reading: Reading, slots: tuple[int, ...]) -> Iterator[float]:
    for i, value in enumerate(reading.known()):
        if i not in slots:
            yield from (value.real, value.imag) if isinstance(value, complex) else (value,)
