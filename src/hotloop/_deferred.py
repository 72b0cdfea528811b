"""A tensor that is one thing for the layer it is meant for, and another for everybody else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from hotloop._tree import map_leaves


class Sender(Protocol):
    """Who sends a `Deferred`."""

    def otherwise(self) -> Tensor:
        """The tensor for others than the one it is meant for. Asking for it means that there are others."""

    def refuse(self, why: str) -> None:
        """Send no more of them."""


class _Scope(threading.local):
    sent: list[weakref.ref[Deferred]] | None = None


_scope = _Scope()


class Deferred(Tensor):
    """Carries a result to the one who knows to `receive` it; any other use finds what `sender.otherwise()` computes.

    It has no storage, so that code which reaches for its memory fails instead of reading something else.
    """

    sender: Any
    in_flight: bool
    _result: Tensor | None
    _plain: Tensor | None

    @staticmethod
    def send(result: Tensor, sender: Sender) -> Deferred:
        """Shape, dtype and device are those of `result`, which have to be those of `sender.otherwise()`."""
        made: Any = Tensor._make_wrapper_subclass(Deferred, result.shape, dtype=result.dtype, device=result.device)
        made.sender, made.in_flight, made._result, made._plain = sender, True, result, None
        if _scope.sent is not None:
            _scope.sent.append(weakref.ref(made))
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


def may_send() -> bool:
    """Whether this thread is inside `settled`."""
    return _scope.sent is not None


def settled(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`run(*args, **kwargs)`, which may send; none of what it sent is left unsettled, in its output or anywhere else.

    Where it fails while a `Deferred` is on its way, it runs once more and sends none: then the error was not its own.
    """
    if _scope.sent is not None:
        return run(*args, **kwargs)
    sent: list[weakref.ref[Deferred]] = []
    _scope.sent = sent
    try:
        output = run(*args, **kwargs)
        kept = _alive(sent)
        for tensor in kept:
            tensor.plain()
        return map_leaves(_plain, output) if kept else output
    except Exception as error:
        lost = [tensor for tensor in _alive(sent) if tensor.in_flight]
        if not lost:
            raise
        for tensor in lost:
            tensor.sender.refuse(f"{type(error).__name__} where the output of a convolution is used")
    finally:
        _scope.sent = None
    return run(*args, **kwargs)


def _alive(sent: list[weakref.ref[Deferred]]) -> list[Deferred]:
    return [tensor for ref in sent if (tensor := ref()) is not None]
