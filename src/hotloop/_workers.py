"""How many worker processes pay: from what the items cost and what the machine has."""

from __future__ import annotations

import math
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop._item_cost import Cost

# What a batch from a worker costs over one made here; measured with forked workers on two x86-64 cores.
_HANDOVER, _HANDOVER_BYTE = 1.5e-3, 1e-9  # seconds
_START, _START_WITH_IMPORTS = 0.05, 2.5  # seconds until a worker is there: forked, or with torch to import first
_EPOCHS = 3  # in which persistent workers have to pay for their start
_WORTH = 0.8  # the share of the time here that workers must get below

_WAITS = 0.3  # an item that keeps less of a core busy waits for something else
_MOST, _MOST_WAITING = 16, 8


@dataclass(frozen=True)
class Room:
    """What there is for workers."""

    cores: int
    shared_memory: float  # free bytes of the memory through which workers hand batches over
    method: str  # "fork", "spawn" or "forkserver"


def room(context: Any = None) -> Room:
    """What this process may use. `context` is a start method, one of its contexts, or None for the default."""
    return Room(_cores(), _shared_memory(), start_method(context))


def start_method(context: Any) -> str:
    if context is None:  # asked so that the default does not get fixed for the process
        return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return context if isinstance(context, str) else str(context.get_start_method())


def _cores() -> int:
    """By the process's affinity, its container's share, and the other ranks on the machine."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no such file, or no limit in it
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, allowed // max(1, int(ranks) if ranks.isdecimal() else 1))


def _shared_memory() -> float:
    try:
        state = os.statvfs("/dev/shm")
    except (AttributeError, OSError):
        return math.inf
    return state.f_bavail * state.f_frsize


def workers_for(cost: Cost, room: Room, batches: float, persistent: bool) -> tuple[int, str]:
    """The number of workers that pays, 0 if none does, and the figures behind it. `batches` is the length of an epoch."""
    here = cost.size * cost.item + cost.collation
    there = cost.size * cost.worker_item + cost.collation + _HANDOVER + _HANDOVER_BYTE * cost.bytes
    waits = cost.busy < _WAITS
    fitting = in_shared_memory(cost, room)
    figures = f"{_time(cost.item)} an item, {_time(here)} a batch of {cost.size}"
    if not fitting:
        return 0, f"{figures}; a batch has {_mb(cost.bytes)}, the shared memory {_mb(room.shared_memory)} left"
    count = int(max(1, min(max(room.cores, _MOST_WAITING) if waits else room.cores, _MOST, fitting, batches)))
    # Items that keep several cores busy have their gain already; items that wait share a core.
    period = there / min(count, room.cores / cost.busy)
    if period > _WORTH * here:
        return 0, f"{figures}; from {_workers(count)} one would take {_time(period)}"
    start = (_START if room.method == "fork" else _START_WITH_IMPORTS) * count
    if (here - period) * batches * (_EPOCHS if persistent else 1) < start:
        return 0, f"{figures}; {_workers(count)} would not earn the {start:.1f} s that they take to start"
    kind = "mostly waiting" if waits else "computing"
    return count, f"{figures}, {kind}; from {_workers(count)} one takes {_time(period)}"


def in_shared_memory(cost: Cost, room: Room, ahead: int = 1) -> int:
    """How many workers can each hold `ahead` batches, and one in the making, in half of the free shared memory."""
    return int(min(room.shared_memory / 2 / max(cost.bytes * (ahead + 1), 1), _MOST))


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _time(seconds: float) -> str:
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    return f"{seconds / size:.3g} {unit}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.0f} MB"
