"""The guard: a test that leaves something changed for the whole process fails, and the next one starts clean.

Each row of `_states()` is a name, a function that reads the state and one that puts it back.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.backends import cudnn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks
from torch.utils.data import DataLoader

from hotloop._stepping import watch_all

State = tuple[str, Callable[[], Any], Callable[[Any], object]]

# The first evaluation leaves one hook for the whole process, for good. It is there from the start, so that any other is seen.
watch_all(lambda: None)()


def _states() -> Iterator[State]:
    for flag in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        yield f"torch.backends.cudnn.{flag}", partial(getattr, cudnn, flag), partial(setattr, cudnn, flag)
    yield "deterministic algorithms", _deterministic, lambda was: torch.use_deterministic_algorithms(was[0], warn_only=was[1])
    yield "float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield "number of threads", torch.get_num_threads, torch.set_num_threads
    yield "inference mode", torch.is_inference_mode_enabled, _leave_inference_mode
    yield "grad mode", torch.is_grad_enabled, torch.set_grad_enabled
    yield "anomaly mode", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield "default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "default device", torch.get_default_device, lambda was: torch.set_default_device(None if was.type == "cpu" else was)
    yield "autocast nesting", _autocast_nesting, _restore_autocast_nesting
    yield "autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    for device in {"cpu", "cuda", "xpu", torch._C._get_privateuse1_backend_name()}:
        yield f"autocast on {device}", partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        yield (
            f"autocast dtype on {device}",
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        )
    yield "process group", torch.distributed.is_initialized, lambda _: torch.distributed.destroy_process_group()
    yield "profile function", sys.getprofile, sys.setprofile
    yield "dispatch modes", torch._C._len_torch_dispatch_stack, _pop_dispatch_modes
    for owner in (module_hooks, optimizer_hooks):
        for name, hooks in vars(owner).items():
            if name.startswith("_global_") and isinstance(hooks, MutableMapping):
                yield f"{owner.__name__}.{name}", partial(dict, hooks), partial(_refill, hooks)
    for patched in (torch.Tensor, nn.Module, Optimizer, DataLoader):
        yield f"methods of {patched.__name__}", partial(_methods, patched), partial(_unpatch, patched)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast_nesting() -> int:
    """How many regions are open. The weight cache is emptied where the last one ends, so one left open makes weights stale."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _restore_autocast_nesting(depth: int) -> None:
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


_kept: list[Any] = []  # a context that is entered for good must not be collected


def _leave_inference_mode(_: bool) -> None:
    _kept.append(torch.inference_mode(False))
    _kept[-1].__enter__()


def _pop_dispatch_modes(size: int) -> None:
    while torch._C._len_torch_dispatch_stack() > size:
        torch._C._pop_torch_dispatch_stack(None)


def _refill(hooks: MutableMapping[Any, Any], was: dict[Any, Any]) -> None:
    hooks.clear()
    hooks.update(was)


def _methods(owner: type) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if callable(value)}


def _unpatch(owner: type, was: dict[str, Any]) -> None:
    for name, value in was.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)
    for name in _methods(owner).keys() - was.keys():
        delattr(owner, name)


def _threads_left(before: set[threading.Thread]) -> list[str]:
    """The names of threads that the test started and that do not end. tqdm keeps one monitor thread for the process."""

    def left() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in before and type(t).__name__ != "TMonitor"]

    if left():
        gc.collect()  # an abandoned iterator ends its worker when it is collected
    patience = time.monotonic() + 2
    while left() and time.monotonic() < patience:
        time.sleep(0.01)
    return [thread.name for thread in left()]


@pytest.fixture(autouse=True)
def leaves_no_trace() -> Iterator[None]:
    """Seed torch, run the test, then fail it for everything that it left changed."""
    torch.manual_seed(0)
    states = list(_states())
    before = [read() for _, read, _ in states]
    threads = set(threading.enumerate())
    yield
    leaks = []
    for (name, read, restore), was in zip(states, before, strict=True):
        now = read()
        if now != was:
            restore(was)
            leaks.append(f"{name}: {_short(was)} before, {_short(now)} after")
    leaks += [f"thread {name!r} still runs" for name in _threads_left(threads)]
    if leaks:
        pytest.fail("the test left the process changed:\n  " + "\n  ".join(leaks), pytrace=False)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{type(value).__name__} of {len(value)}"
