"""The processes that train together: who they are, how this one joins and leaves them, and what they tell each other."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotloop._device import wide

_users: weakref.WeakSet[Any] = weakref.WeakSet()

_PLACE = ("RANK", "WORLD_SIZE")
_MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")
_START = "start the script with torchrun --nproc-per-node N script.py, or write distributed=False to run it alone"


@dataclass(frozen=True)
class World:
    """The place of this process among all that train together."""

    rank: int
    size: int
    local_rank: int  # among those of its machine: the accelerator that is its own


def world_around() -> World | None:
    """The processes around this one: the user's own group, else what torchrun's environment tells; None for a single one.

    Raises ValueError where the environment is half set, since the other processes would wait for this one.
    """
    if not dist.is_available():
        return None
    if dist.is_initialized():
        rank, local = dist.get_rank(), os.environ.get("LOCAL_RANK", "")
        return World(
            rank, dist.get_world_size(), int(local) if local.isdigit() else rank % max(torch.accelerator.device_count(), 1)
        )
    return _from_environment()


def _from_environment() -> World | None:
    given = {name: os.environ[name] for name in (*_PLACE, *_MEETING_POINT, "LOCAL_RANK") if os.environ.get(name)}
    if not given.keys() & {*_PLACE}:
        return None
    if given.get("WORLD_SIZE") == "1" and not given.keys() >= {*_PLACE, *_MEETING_POINT}:
        return None  # one process needs no meeting point
    missing = [name for name in (*_PLACE, *_MEETING_POINT) if name not in given]
    numbers = {name: given[name] for name in (*_PLACE, "LOCAL_RANK") if name in given}
    if missing:
        found = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"optimize(...): torchrun's environment is half set: {found}, and no {', '.join(missing)}; {_START}")
    wrong = [f"{name}={value}" for name, value in numbers.items() if not value.isdigit()]
    if wrong or int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):
        shown = ", ".join(wrong) or f"RANK={numbers['RANK']} with WORLD_SIZE={numbers['WORLD_SIZE']}"
        raise ValueError(f"optimize(...): {shown} is no rank among processes, which are counted from 0; {_START}")
    return World(int(numbers["RANK"]), int(numbers["WORLD_SIZE"]), int(numbers.get("LOCAL_RANK", 0)))


def join(world: World, device: torch.device) -> bool:
    """Open the process group unless the user has, and tell whether it was opened. It is closed when the process ends.

    NCCL for CUDA, and gloo beside it: what ranks tell each other on the host does not wait for the device.
    """
    backends = "gloo"
    if device.type != "cpu":
        # NCCL, the kernels and `tensor.cuda()` of user code ask for the current device.
        torch.accelerator.set_device_index(device.index)
    if dist.is_initialized():
        return False
    if device.type != "cpu":
        backends = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backends, rank=world.rank, world_size=world.size)
    atexit.register(leave)
    return True


def leave() -> None:
    """Close the group that `join` opened, if it is still open."""
    atexit.unregister(leave)
    _release()
    if dist.is_initialized():
        dist.destroy_process_group()


def released_at_the_end(user: Any) -> None:
    """Have `user.release()` called before the group is closed, or at the end of the process, if `user` lives until then.

    What of torch's communicates over a group and is left to the end of the interpreter aborts the process now and then.
    """
    atexit.unregister(_release)
    atexit.register(_release)
    _users.add(user)


def _release() -> None:
    for user in list(_users):
        user.release()
    gc.collect()


def everyone(value: Any) -> list[Any]:
    """What each rank gives here, in the order of ranks; waits for all of them."""
    told: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(told, value)
    except RuntimeError as error:
        explain_lost(error)
        raise
    return told


def summed(values: list[float], device: torch.device) -> Tensor:
    """The sums of these numbers over all ranks, on the device, which nothing here waits for."""
    sums = torch.tensor(values, dtype=wide(device), device="cpu").to(device, non_blocking=True)
    dist.all_reduce(sums)
    return sums


class Notes:
    """Numbers that ranks write for the others to read, beside the group's communication."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._names = [f"{name}/{rank}" for rank in range(dist.get_world_size())]
        self.write(-1)

    def write(self, number: int) -> None:
        """Let the others read this of this rank, from now on."""
        if (store := _store()) is not None:
            store.set(self._names[dist.get_rank()], str(number))

    def read(self) -> list[int]:
        """What each rank has written last."""
        store = _store()
        return [] if store is None else [int(store.get(name)) for name in self._names]

    def first(self, value: float) -> float:
        """What the first rank that called this has given."""
        store = _store()
        return value if store is None else float(store.compare_set(f"{self._name}/first", "", repr(value)))


def _store() -> Any:
    # There is no public way to the store of a group; it is where processes meet that have nothing to send each other.
    return getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()


_LOST = ("Connection", "connection", "Broken pipe", "imed out", "imeout", "gloo", "NCCL", "ocket")
_PATIENCE = timedelta(seconds=3)


def explain_lost(error: RuntimeError) -> None:
    """Add to an error of the communication which ranks are gone: all that are left fail with it, and say so to each other."""
    if "\n\nhotloop: " in str(error):
        return
    if not any(sign in str(error) for sign in _LOST) or not dist.is_initialized() or (store := _store()) is None:
        return
    lost, own = [], dist.get_rank()
    try:
        store.set(f"hotloop/{own} is left", "")
        for rank in range(dist.get_world_size()):
            try:
                store.wait([f"hotloop/{rank} is left"], _PATIENCE)
            except dist.DistStoreError:
                lost.append(rank)
                if len(lost) == 8:  # enough to look at
                    break
    except RuntimeError:
        lost = [0]  # which holds the store
    named = " and ".join(f"rank {rank}" for rank in lost)
    if lost:
        why = f"{named} does not answer: it has ended or hangs; look for the first error in its output"
    else:
        why = "all ranks are there and wait for different things: each must make the same calls (step, flush, mean) in the same order"
    error.args = (f"{error}\n\nhotloop: {why}",)


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()
