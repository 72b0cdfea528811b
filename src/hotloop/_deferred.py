"""A tensor that is one thing for the layer it is meant for, and another for everybody else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.modules import module as module_hooks

from hotloop._tree import map_leaves


def _some_global_hook() -> bool:
    forward = module_hooks._global_forward_pre_hooks or module_hooks._global_forward_hooks
    return bool(forward or module_hooks._global_backward_pre_hooks or module_hooks._global_backward_hooks)


# Private, as these hooks have no public list. torch 2.6 has the lists, and not the function.
_has_global_hooks: Callable[[], bool] = getattr(module_hooks, "_has_any_global_hook", _some_global_hook)


class Sender(Protocol):
    """Who sends a `Deferred`."""

    def otherwise(self) -> Tensor:
        """The tensor for others than the one it is meant for. Asking for it means that there are others."""

    def refuse(self, why: str) -> None:
        """Send no more of them."""


class Call:
    """One call of a model in this thread: what was sent in it, and who has looked at the state of things at its start."""

    __slots__ = ("looked", "sent")

    def __init__(self) -> None:
        self.sent: list[weakref.ref[Deferred]] = []
        self.looked: Any = None


_SILENT = Call()  # a call in which there is nothing to send


class _Scope(threading.local):
    call: Call | None = None


_scope = _Scope()


def in_call() -> bool:
    """Whether this thread is in a call of a model."""
    return _scope.call is not None


def sending_call() -> Call | None:
    """The call of a model that this thread is in, if it may send."""
    call = _scope.call
    return None if call is _SILENT else call


def silent(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`run(*args, **kwargs)` as a call of a model in which nothing is sent."""
    _scope.call = _SILENT
    try:
        return run(*args, **kwargs)
    finally:
        _scope.call = None


class Deferred(Tensor):
    """Carries a result to the one who knows to `receive` it; any other use finds what `sender.otherwise()` computes.

    It has no storage, so that code which reaches for its memory fails instead of reading something else.
    """

    sender: Any
    in_flight: bool
    _result: Tensor | None
    _plain: Tensor | None

    @staticmethod
    def send(result: Tensor, sender: Sender, call: Call) -> Deferred:
        """Shape, dtype and device are those of `result`, which have to be those of `sender.otherwise()`."""
        made: Any = Tensor._make_wrapper_subclass(Deferred, result.shape, dtype=result.dtype, device=result.device)
        made.sender, made.in_flight, made._result, made._plain = sender, True, result, None
        call.sent.append(weakref.ref(made))
        return made  # type: ignore[no-any-return]

    def receive(self) -> Tensor | None:
        """The result, once; None after that, and where somebody has used the plain tensor."""
        result, self._result = self._result, None
        self.in_flight = False
        return result

    def plain(self) -> Tensor:
        """The tensor for everybody else."""
        if self._plain is None:
            self.in_flight = True  # until it is there: it may be too late to compute it
            self._plain = self.sender.otherwise()
            self.receive()
        return self._plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_leaves(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]  # C++ code does not pass the other


def _plain(tensor: Tensor) -> Tensor:
    return tensor.plain() if type(tensor) is Deferred else tensor


def settled(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`run(*args, **kwargs)`, which may send; none of what it sent is left unsettled, in its output or anywhere else.

    Nothing is sent where calls are traced, or seen by global hooks. Where it fails while a `Deferred` is on its way, it runs
    once more and sends none: then the error was not its own.
    """
    traced = torch.jit.is_tracing() or torch.compiler.is_compiling()  # type: ignore[no-untyped-call, attr-defined]
    if traced or _has_global_hooks():
        return run(*args, **kwargs)
    call = Call()
    _scope.call = call
    try:
        output = run(*args, **kwargs)
        kept = _alive(call)
        for tensor in kept:
            tensor.plain()
        return map_leaves(_plain, output) if kept else output
    except Exception as error:
        lost = [tensor for tensor in _alive(call) if tensor.in_flight]
        if not lost:
            raise
        for tensor in lost:
            tensor.sender.refuse(f"{type(error).__name__} where the output of a convolution is used")
    finally:
        _scope.call = None
    return run(*args, **kwargs)


def _alive(call: Call) -> list[Deferred]:
    return [tensor for ref in call.sent if (tensor := ref()) is not None]
