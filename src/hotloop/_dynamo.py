"""Keeping dynamo out: it would trace through steps and evaluations, and compile what they do in its own way."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


def run_eagerly() -> AbstractContextManager[Any]:
    """A region in which compiled code runs as it was written, where dynamo is in use and not at work around it."""
    if "torch._dynamo" not in sys.modules or _callback() not in (None, False):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
