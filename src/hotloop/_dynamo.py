"""Keeping dynamo out: it would trace through steps and evaluations, and compile what they do in its own way."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

# Whether dynamo looks at the frames of this thread; nothing public tells. A torch without it: as if it did.
_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)


def kept_from_dynamo(function: F) -> F:
    """`function`, which dynamo neither traces nor compiles. Where it is not at work that costs next to nothing.

    Else every frame within goes through its hook: 3 microseconds for a tiny model's step.
    """
    # As torch.compiler.disable, which would import dynamo at once, and of methods as well.
    apart = torch._disable_dynamo(  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        lambda *args, **kwargs: function(*args, **kwargs)
    )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _callback() is not None:
            return apart(*args, **kwargs)
        return function(*args, **kwargs)

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    del call.__wrapped__  # dynamo would follow it
    return call  # type: ignore[return-value]


_lock = threading.Lock()
_eager: list[Any] = []  # the regions that are open, each as the stance that the first one has set


@contextmanager
def run_eagerly(*, also_new_code: bool = False) -> Iterator[None]:
    """A region in which compiled code runs as it was written, where dynamo is in use and not at work around it.

    With `also_new_code` in any case. The stance is one for the whole process: of regions that overlap in several threads the
    first one sets it, and the last one puts back what there was.
    """
    if not also_new_code and ("torch._dynamo" not in sys.modules or _callback() not in (None, False)):
        yield
        return
    with _lock:
        _eager.append(_eager[0] if _eager else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            stance = _eager.pop()
            if not _eager:
                stance.__exit__(None, None, None)
