"""What tests look on with: the operators that reach the dispatcher, and threads that take turns at every chance."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Notes the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        """How many of them have `name` in their name."""
        return sum(name in op for op in self.seen)


def in_threads(functions: Iterable[Callable[[], object]]) -> None:
    """Run them all at once, each in a thread that is interrupted as often as Python can; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[function]) for function in functions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


class Uncast(torch.autograd.Function):
    """A custom operator without `custom_fwd`: under autocast its backward meets two dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient
