"""`torch.backends.cudnn.benchmark`, shared with the user: what hotloop sets for its calls does not outlast them.

The flag is one for the whole process, and wrapped models may run inside each other and in several threads. The thread that
changes it first remembers what the user had, and puts that back when its call is done; a thread that finds it changed by another
leaves that to the other one. A value that is not the one written last is the user's own, set meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from threading import get_ident

import torch

from hotloop._parts import NoFlags

_lock = threading.Lock()
_users_value: list[bool] = []  # empty while the flag is the user's
_written = [False]
_owner = [0]  # the thread that has changed the flag


def users_value() -> bool:
    """The flag as the user has it, also while a call of ours has set it."""
    current = torch.backends.cudnn.benchmark
    with _lock:
        return _users_value[0] if _users_value and current == _written[0] else current


def choose(value: bool) -> None:
    """Set the flag for what runs next; never on where deterministic algorithms are asked for."""
    cudnn = torch.backends.cudnn
    value = value and not (cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    if cudnn.benchmark == value:
        return
    with _lock:
        found = cudnn.benchmark
        if not _users_value:
            _users_value.append(found)
            _owner[0] = get_ident()
        elif found != _written[0]:
            _users_value[0] = found
        _write(value)


def _write(value: bool) -> None:
    # After torch.backends.disable_global_flags() torch refuses. `cudnn.flags(...)` would still work, but its defaults switch
    # cuDNN itself off inside the block.
    with contextlib.suppress(RuntimeError):
        torch.backends.cudnn.benchmark = value
        _written[0] = value


def _is_mine() -> bool:
    return bool(_users_value) and _owner[0] == get_ident()


class BenchmarkFlag(NoFlags):
    """The flag, as calls and steps find it and leave it."""

    def found(self) -> tuple[bool, bool]:
        return torch.backends.cudnn.benchmark, _is_mine()

    def put_back(self, found: tuple[bool, bool]) -> None:
        if not _is_mine():
            return
        with _lock:
            value, mine = found
            if mine:  # for the call around this one
                _write(value)
            elif _users_value:
                _write(_users_value.pop())

    def restore(self) -> None:
        if _users_value:
            with _lock:
                value = _users_value.pop() if _users_value else _written[0]
                if torch.backends.cudnn.benchmark == _written[0]:
                    _write(value)
