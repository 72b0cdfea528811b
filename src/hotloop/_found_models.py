"""Which models a function works with: those among its arguments, in `self`, and those that its code names."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn

# A closure or a global may be a vocabulary of a million words: models are found among the first items.
_FIRST = 100
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, deque)

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # in a function, and in the body of a class inside it


def in_arguments(values: Any) -> Iterator[nn.Module]:
    """Models in nested arguments, and those whose bound methods are passed."""
    return _walk(values, set())


def _is_model(value: Any) -> bool:
    try:
        return isinstance(value, nn.Module)
    except Exception:  # a proxy of something that is not there, such as the request of a web framework
        return False


def _walk(value: Any, seen: set[int]) -> Iterator[nn.Module]:
    if type(value) is Tensor:  # there may be thousands
        return
    if _is_model(value):
        yield value
    elif isinstance(value, types.MethodType):
        yield from _walk(value.__self__, seen)
    elif isinstance(value, functools.partial):
        yield from _walk((value.func, value.args, value.keywords), seen)
    elif id(value) not in seen:
        seen.add(id(value))
        for child in _children(value):
            yield from _walk(child, seen)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Tensor):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def held_by(instance: Any) -> Iterator[nn.Module]:
    """`self`, or the class, of a method: where it is a model, and the models that it holds as attributes."""
    if isinstance(instance, nn.Module):
        yield instance
    kinds = instance.__mro__ if isinstance(instance, type) else type(instance).__mro__
    for kind in kinds:
        yield from _among(list(vars(kind).values()))
        slots = () if isinstance(instance, type) else vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from _among([getattr(instance, name, None) for name in names if name != "__dict__"])
    if not isinstance(instance, type):
        yield from _among(list(getattr(instance, "__dict__", {}).values()))


def bound_to(function: Any) -> Iterator[nn.Module]:
    """The models that a callable carries: arguments of a partial, the object of a bound method, a callable object's own."""
    while True:
        if isinstance(function, functools.partial):
            yield from in_arguments((function.args, function.keywords))
            yield from held_by(next(iter(function.args), None))
            function = function.func
        elif isinstance(function, types.MethodType):
            yield from held_by(function.__self__)
            function = function.__func__
        elif "__wrapped__" in getattr(function, "__dict__", {}):
            function = function.__wrapped__
        else:
            if not isinstance(function, types.FunctionType | classmethod | staticmethod):
                yield from held_by(function)
            return


def _among(values: Iterable[Any]) -> Iterator[nn.Module]:
    for value in values:
        if _is_model(value):
            yield value
        elif type(value) in _CONTAINERS:
            items = value.values() if isinstance(value, dict) else value
            yield from filter(_is_model, islice(items, _FIRST))


class NamedModels:
    """The models that a function names: in its closure, in the globals that its code looks up, and as defaults.

    Also those that it takes from an object of these by an attribute, as in `state.model(x)`.
    """

    def __init__(self, function: Any) -> None:
        function = _innermost(function)
        self._function = function if isinstance(function, types.FunctionType) else None
        self._names = tuple(dict.fromkeys(_names(function.__code__))) if self._function is not None else ()
        self._attributes = tuple(dict.fromkeys(_attributes(function.__code__))) if self._function is not None else ()

    def __iter__(self) -> Iterator[nn.Module]:
        function = self._function
        if function is None:
            return
        yield from _among(_contents(function))
        yield from _among(function.__globals__[name] for name in self._names if name in function.__globals__)
        yield from filter(_is_model, self._taken(function))
        yield from _among(function.__defaults__ or ())
        yield from _among((function.__kwdefaults__ or {}).values())

    def _taken(self, function: types.FunctionType) -> Iterator[Any]:
        enclosed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, attribute in self._attributes:
            try:
                owner = enclosed[name].cell_contents if name in enclosed else function.__globals__[name]
                yield vars(owner).get(attribute)  # what the object holds; nothing is computed by looking
            except Exception:  # a name of the builtins, a variable that is not assigned yet, an object without a dictionary
                continue


def _innermost(function: Callable[..., Any]) -> Any:
    while True:
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType | classmethod | staticmethod):
            function = function.__func__
        else:  # of a callable object the method
            return function if isinstance(function, types.FunctionType) else getattr(type(function), "__call__", None)  # noqa: B004


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that the code loads; `co_names` holds the names of attributes as well."""
    yield from (instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _LOADS)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # an inner function or comprehension
            yield from _names(constant)


def _attributes(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """The attributes that the code takes from what it names, as `("state", "model")`."""
    name = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            name = instruction.argval
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name is not None:
            yield name, instruction.argval
            name = None
        else:
            name = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _attributes(constant)


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
