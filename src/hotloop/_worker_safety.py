"""Whether a data set can be read by worker processes that its user did not ask for."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from hotloop._random_states import random_state
from hotloop._tree import leaves

_MOST_OBJECTS = 20_000
_BEGINNING = 1000


def obstacle(loader: DataLoader[Any], batch: Any, method: str) -> str:
    """Why workers could not read the data set as this process does; "" if nothing speaks against it.

    `batch` is one of its batches, `method` the way in which workers are started.
    """
    if multiprocessing.current_process().daemon:
        return "this process is a worker itself"
    if method != "fork" and not _main_is_guarded():
        return f"{method} imports the main module again, and that has no `if __name__ == '__main__':`"
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        if error := Contents(forked=method == "fork").read(getattr(loader, name)):
            return f"{name} holds something that processes cannot share ({error})"
    for leaf in leaves(batch):
        if leaf.device.type != "cpu":
            return f"the items are on {leaf.device}"
        if leaf.requires_grad:
            return "the items carry gradients, which do not cross processes"
    error = Contents(forked=False).read(batch)
    return f"a batch cannot come from another process ({error})" if error else ""


class Contents(pickle.Pickler):
    """Reads what an object holds by pickling it into nothing: whether it can be handed over, and its random generators.

    A forked worker inherits functions, classes and modules. Not so an open file, a connection, a lock: after a fork two
    processes would use the same one. All of these refuse to be pickled. Of long lists only the beginning is read.
    """

    def __init__(self, forked: bool) -> None:
        super().__init__(_Nowhere())
        self.generators: list[Any] = []
        self._forked = forked
        self._inherited = (FunctionType, BuiltinFunctionType, ModuleType, type) if forked else ()
        self._left = _MOST_OBJECTS
        self._seen: set[int] = set()

    def read(self, thing: Any) -> str:
        """The error that stands in the way; "" if none."""
        try:
            self.dump(thing)
        except _LongEnoughError:
            pass
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def persistent_id(self, thing: Any) -> str | None:
        """Called for every object on the way; one that gets a name here is not looked into."""
        self._left -= 1
        if self._left < 0:
            raise _LongEnoughError
        if random_state(thing):
            self.generators.append(thing)
            return "random generator"
        if isinstance(thing, (FunctionType, type)):
            self._look_beside(thing)
        if isinstance(thing, (Tensor, self._inherited)) or type(thing).__module__ == "numpy":
            return "data or code"
        if isinstance(thing, (list, tuple, set, dict)) and len(thing) > _BEGINNING:
            self._read_beginning(thing)
            return "long container"
        return None

    def _look_beside(self, code: Any) -> None:
        """Generators that code finds by name: in its class and what that inherits from, in their modules."""
        for owner in getattr(code, "__mro__", (code,)):
            for place in (owner, sys.modules.get(owner.__module__)):
                if id(place) not in self._seen:
                    self._seen.add(id(place))
                    self.generators += filter(_is_generator, list(getattr(place, "__dict__", {}).values()))

    def _read_beginning(self, container: Any) -> None:
        inner = Contents(self._forked)
        beginning = islice(container.items() if isinstance(container, dict) else container, _BEGINNING)
        if error := inner.read([*beginning]):
            raise pickle.PicklingError(error)
        self.generators += inner.generators


def _is_generator(thing: Any) -> bool:
    try:
        return random_state(thing) is not None
    except Exception:  # a proxy of something that is not there
        return False


class _LongEnoughError(Exception):
    pass


class _Nowhere:
    def write(self, data: bytes) -> None:
        pass


def _main_is_guarded() -> bool:
    try:
        return "__main__" in Path(sys.modules["__main__"].__file__ or "").read_text()
    except (AttributeError, OSError, UnicodeDecodeError):
        return False  # a notebook, a prompt
