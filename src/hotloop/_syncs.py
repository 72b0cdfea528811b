"""Where the host waits for the device, by the user's own file and line."""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from types import CodeType
from typing import Any, overload

import torch

from hotloop import _waits as rules
from hotloop._device import accelerator
from hotloop._dynamo import run_eagerly
from hotloop._means import Means
from hotloop._metrics import Metrics
from hotloop._reading import Reading, read_all, read_numbers
from hotloop._tree import leaves
from hotloop._watch import Call, Functions, Operators, Sync, Watch


class Syncs(Sequence[Sync]):
    """The places found so far, in order of first appearance. `print(syncs)` shows a table, with what to do instead."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @overload
    def __getitem__(self, index: int) -> Sync: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sync]: ...
    def __getitem__(self, index: int | slice) -> Sync | list[Sync]:
        return list(self._watch.found.values())[index]

    def __len__(self) -> int:
        return len(self._watch.found)

    def __repr__(self) -> str:
        return f"Syncs({list(self)!r})"

    def __str__(self) -> str:
        if not self:
            return "nothing made the host wait for the device"
        rows = [("where", "call", "count", "what to do")]
        rows += [(f"{os.path.basename(s.file)}:{s.line}", s.op, str(s.count), s.hint) for s in self]
        where, call, count = (max(len(row[i]) for row in rows) for i in (0, 1, 2))
        lines = [f"{a:<{where}}  {b:<{call}}  {c:>{count}}  {d}" for a, b, c, d in rows]
        if not self._watch.on_accelerator:
            lines.append("(seen on a CPU: these would wait on an accelerator)")
        return "\n".join(lines)


@contextmanager
def find_syncs() -> Iterator[Syncs]:
    """List every operation of a block that makes the host wait for the device.

    `with find_syncs() as syncs:` fills `syncs`, a sequence of entries with `.op` (the call as written), `.count`, `.file`,
    `.line` (the innermost line that belongs neither to torch, hotloop, the standard library nor an installed package) and
    `.hint`. `print(syncs)` shows a table. The list stays filled after the block, also when an exception leaves it.

    On an accelerator only a read of its memory counts, or a copy from or to it without `non_blocking`. On a CPU the entries
    are what *would* wait there: each tensor stands for one on the device, save in the work of a `DataLoader` and in the
    step counters of optimizers, which live on the host; `x.to(device)` stands for a copy.

    It sees the thread that enters the block, and its backward passes; not other threads, and on a CPU not what backward
    hooks copy by `.cpu()`, `.numpy()` or `.tolist()`. `synchronize` is seen where it is called through its module, or on
    the streams and events of that module; `torch.save`, `pickle.dump` and `pickle.dumps` likewise. Inside the block each
    operator costs some microseconds more and compiled code runs eagerly; outside nothing is changed.

    >>> loss = torch.ones(3).sum()
    >>> with find_syncs() as syncs:
    ...     for _ in range(2):
    ...         value = loss.item()
    >>> [(s.op, s.count, s.line) for s in syncs]
    [('.item()', 2, 3)]
    """
    watch = Watch()
    unseen = _Unseen(watch)
    with ExitStack() as stack:
        # Code that is first compiled under a dispatch mode is marked as not to be compiled, for ever.
        stack.enter_context(run_eagerly(also_new_code=True))
        for owner in _synchronizing():
            stack.enter_context(_replaced(owner, "synchronize", unseen.synchronize))
        for owner, name in ((torch, "save"), (pickle, "dump"), (pickle, "dumps")):
            stack.enter_context(_replaced(owner, name, unseen.storing))
        stack.enter_context(_replaced(Reading, "values", unseen.values))
        stack.enter_context(_replaced(Means, "sums", unseen.sums))
        stack.enter_context(Operators(watch))
        stack.enter_context(Functions(watch))
        yield Syncs(watch)


class _Unseen:
    """What neither mode sees: `synchronize`, what is stored, and a look at metrics, which a step on a CPU has read at once."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: Reading | None = None

    def synchronize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._run(Call("synchronize()", rules.ASKED, waits=True), original, *args, **kwargs)

    def storing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thing = args[0] if args else kwargs.get("obj")
        tensors = [*thing.parameters(), *thing.buffers()] if isinstance(thing, torch.nn.Module) else []
        if not isinstance(thing, Metrics):  # to look into these is to wait for them
            tensors += leaves(thing)
        if not tensors:
            return original(*args, **kwargs)
        waits = any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)
        if waits:
            self._watch.meet_accelerator()
        op = f"{'torch' if original.__module__.startswith('torch') else 'pickle'}.{original.__name__}()"
        return self._run(Call(op, rules.STORED, waits, may_wait=True), original, *args, **kwargs)

    def values(self, original: Callable[..., Any], reading: Reading) -> Any:
        """The first look at a step's values waits for them. So it would where a CPU has them at once."""
        looker = next(self._watch.stack()).f_code
        looks = looker in _LOOKS
        if reading.packed is not None:
            self._watch.meet_accelerator()
            waits = looks or not reading.ready()
        else:
            waits = looks and reading is not self._seen and not self._watch.on_accelerator
        if waits:
            self._seen = reading
        op, hint = _LOOKS.get(looker, (f"{looker.co_name}()", rules.LOOK))
        return self._run(Call(op, hint, waits), original, reading)

    def sums(self, original: Callable[..., Any], means: Means) -> Any:
        return self._run(Call("step.mean()", rules.LOOK, waits=not self._watch.on_accelerator), original, means)

    def _run(self, call: Call, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._watch.thread:  # a worker that waits does not hold up the loop
            return original(*args, **kwargs)
        return self._watch.run(call, original, *args, **kwargs)


# Who looks at values and may have to wait for them: the user through these, a step for the flags of float16.
_LOOKS: dict[CodeType, tuple[str, str]] = {
    Metrics.__getitem__.__code__: ("metrics[...]", rules.LOOK),
    Metrics.skipped.fget.__code__: ("metrics.skipped", rules.LOOK),  # type: ignore[attr-defined]
    Metrics.__reduce__.__code__: ("pickle.dumps()", rules.LOOK),
    read_numbers.__code__: ("fast_eval()", rules.RESULT),
    read_all.__code__: ("overflow flags", rules.FLAGS),
}


def _synchronizing() -> list[Any]:
    """The modules that have a `synchronize`, and those of their classes that define it in Python."""
    current = accelerator()
    names = {"cpu", "cuda", "mps", "xpu"} | ({current.type} if current is not None else set())
    modules: list[Any] = [torch.accelerator, *map(torch.get_device_module, sorted(names))]
    owners = [owner for m in modules for owner in (m, getattr(m, "Stream", None), getattr(m, "Event", None))]
    return [owner for owner in dict.fromkeys(owners) if isfunction(getattr(owner, "synchronize", None))]


@contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
