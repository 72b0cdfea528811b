"""A decorated function: it looks like the function, is stored and bound as one, and is not looked through by dynamo."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import wrapt

from hotloop._dynamo import kept_from_dynamo


def decorated(function: Any, evaluator: Callable[..., Any]) -> Any:
    """`function`, whose calls are made by `evaluator(function, instance, args, kwargs)`."""
    is_generator = inspect.isgeneratorfunction(getattr(function, "__func__", function))
    return (_Generator if is_generator else _Function)(function, kept_from_dynamo(evaluator))


class _NoContainer:
    """Takes away what wrapt's proxies have, whatever they wrap: `isinstance(function, Sized)` is False, as it is of a function."""

    __len__ = __contains__ = __enter__ = __exit__ = __aenter__ = __aexit__ = None


class _Method(_NoContainer, wrapt.BoundFunctionWrapper):  # type: ignore[type-arg, misc]
    """A decorated method, as it comes from its class or an instance."""

    _torchdynamo_disable = True

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        owner = getattr(self.__wrapped__, "__self__", None)
        if owner is not None:
            return getattr, (owner, self.__name__)
        where = (self.__module__, self.__qualname__)
        _by_name(*where)  # what cannot be found again fails now
        return _by_name, where

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = getattr(self.__wrapped__, "__self__", None)
        return self if owner is None else getattr(copy.deepcopy(owner, memo), self.__name__)


class _Function(_NoContainer, wrapt.FunctionWrapper):  # type: ignore[type-arg, misc]
    """A decorated function; stored by its name, and its own copy, as functions are."""

    __bound_function_wrapper__ = _Method

    # Dynamo follows `__wrapped__`, and would leave the evaluation out of compiled code without a word.
    _torchdynamo_disable = True

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None and self._self_binding == "function":
            return self  # as a function does; dynamo takes a new object at each look for a change
        return super().__get__(instance, owner)

    def __reduce_ex__(self, protocol: Any) -> str:
        name: str = self.__qualname__
        return name

    def __copy__(self) -> _Function:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Function:
        return self


def _untraceable() -> None: ...


_untraceable._torchdynamo_disable = True  # type: ignore[attr-defined]


def _shown(*args: Any, **kwargs: Any) -> Iterator[None]:
    _untraceable()
    yield


def _of_shown(name: str) -> property:
    return property(lambda _: getattr(_shown, name))


class _Generator(_Function):
    """Dynamo goes by the code of a generator function, whatever holds it. It is shown one that it cannot trace, and calls this."""

    __code__ = _of_shown("__code__")
    __globals__ = _of_shown("__globals__")
    __closure__ = _of_shown("__closure__")
    __defaults__ = _of_shown("__defaults__")
    __kwdefaults__ = _of_shown("__kwdefaults__")


def _by_name(module: str, qualified: str) -> Any:
    return functools.reduce(getattr, qualified.split("."), importlib.import_module(module))
