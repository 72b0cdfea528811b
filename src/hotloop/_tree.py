"""Nested batches: one walk over containers of any kind that keeps their types and rebuilds only what changed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hotloop._device import is_capturing

T = TypeVar("T")

_NO_DEVICE = frozenset({"unit", "units", "path", "file", "tz"})  # first arguments of methods `to` that mean something else

_PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None)})


def map_leaves(
    on_tensor: Callable[[Tensor], Any], value: T, on_object: Callable[[Any], Any] | None = None, _seen: Any = None
) -> T:
    """`value` with `on_tensor` applied to every tensor in it.

    Walks lists, tuples, named tuples, deques, any `Mapping` and dataclasses (frozen ones too). Types are kept, an object
    met twice is mapped once, and a container in which nothing changed is returned as it is. `on_object`, where given, is
    asked about every object that has a `.to` method; a mapping that it returns is walked as well.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if _seen is None:
            return on_tensor(value)  # type: ignore[no-any-return]
        return _once(on_tensor, value, _seen)  # type: ignore[no-any-return]
    seen = {} if _seen is None else _seen
    if id(value) in seen:
        return seen[id(value)][1]  # type: ignore[no-any-return]
    seen[id(value)] = (value, value)  # a container that holds itself ends here
    mapped = _map_container(on_tensor, value, on_object, seen)
    seen[id(value)] = (value, mapped)  # the original is kept alive, so that its id stays its own
    return mapped  # type: ignore[no-any-return]


def _once(on_tensor: Callable[[Tensor], Any], value: Tensor, seen: dict[int, tuple[Any, Any]]) -> Any:
    if id(value) not in seen:
        seen[id(value)] = (value, on_tensor(value))
    return seen[id(value)][1]


def _map_container(on_tensor: Callable[[Tensor], Any], value: Any, on_object: Any, seen: Any) -> Any:
    def walk(child: Any) -> Any:
        return map_leaves(on_tensor, child, on_object, seen)

    if on_object is not None and has_to(value):
        moved = on_object(value)
        if moved is None:  # it has moved in place
            moved = value
        if not isinstance(moved, Mapping):
            return moved
        value = moved
    if isinstance(value, Mapping):
        changes = {k: new for k, v in value.items() if (new := walk(v)) is not v}
        if changes and not hasattr(value, "__setitem__"):
            return _rebuilt_mapping(value, changes, walk)
        return _replaced(value, changes)
    if isinstance(value, tuple):
        return rebuilt_tuple(value, [walk(v) for v in value])
    if isinstance(value, list | deque):
        return _replaced(value, {i: new for i, v in enumerate(value) if (new := walk(v)) is not v})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _replaced_fields(value, walk)
    return value


def has_to(value: Any) -> bool:
    """Whether `value` is an object that can take itself to a device. A module passed as an argument stays where it is."""
    if isinstance(value, nn.Module | type) or not callable(getattr(value, "to", None)):
        return False
    return torch.compiler.is_compiling() or _takes_device(type(value))  # type: ignore[arg-type]


@lru_cache(maxsize=1000)
def _takes_device(kind: type) -> bool:
    """Whether `.to(device)` fits, as far as its signature tells: there are `.to(unit)` and `.to(*, device)`."""
    function = inspect.getattr_static(kind, "to", None)
    if not isinstance(function, FunctionType):
        return True
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        given = signature.bind(None, None).arguments
    except TypeError:
        return False
    return _NO_DEVICE.isdisjoint(given)


def _replaced(container: Any, changes: dict[Any, Any]) -> Any:
    """A shallow copy with some items replaced, of the same type: what a subclass carries besides its items is kept."""
    if not changes:
        return container
    try:
        made = copy.copy(container)
        for key, item in changes.items():
            made[key] = item
    except Exception:  # checks of the user's own: past them, as past a constructor
        if not isinstance(container, dict):
            raise
        made = type(container).__new__(type(container))
        getattr(made, "__dict__", {}).update(getattr(container, "__dict__", {}))
        put = OrderedDict.__setitem__ if isinstance(container, OrderedDict) else dict.__setitem__
        for key, item in {**container, **changes}.items():
            put(made, key, item)
    return made


def _rebuilt_mapping(value: Any, changes: dict[Any, Any], walk: Callable[[Any], Any]) -> Any:
    """A read-only mapping: what it holds is in an attribute, or goes to its constructor; else it stays."""

    def by_its_attributes() -> Any:
        made = copy.copy(value)
        vars(made).update({name: walk(held) for name, held in vars(value).items()})
        return made

    for make in (by_its_attributes, lambda: type(value)({**value, **changes})):
        try:
            made = make()
            if all(made[key] is item for key, item in changes.items()):
                return made
        except Exception:  # it has no attributes, or a constructor of its own
            continue
    return value


def rebuilt_tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple of the same type with these items; itself where they are its own."""
    if all(map(_is, items, value)):
        return value
    kind: Any = type(value)
    if hasattr(kind, "n_sequence_fields"):  # such as torch.return_types.max
        return kind(items)
    made = tuple.__new__(kind, items)  # past a constructor of the user's own, as `copy.copy` goes past it
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def _is(a: object, b: object) -> bool:
    return a is b


def _replaced_fields(value: Any, walk: Callable[[Any], Any]) -> Any:
    made = value
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):  # an `init=False` field that was never set
            continue
        old = getattr(value, field.name)
        new = walk(old)
        if new is not old:
            made = copy.copy(value) if made is value else made
            object.__setattr__(made, field.name, new)  # also for frozen dataclasses
    return made


def move(value: T, device: torch.device, stays_on: frozenset[torch.device] = frozenset()) -> T:
    """`value` with every tensor, and every object with its own `.to(device)`, on `device`; dtypes never change.

    What is there already, or on a device of `stays_on`, is returned as it is, without a copy. Copies to an accelerator do not
    block the host; copies to the host always do, since they would be read before they are complete.
    """

    def on_tensor(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device or tensor.device in stays_on else move_tensor(tensor, device)

    def on_object(thing: Any) -> Any:
        return thing if stays_on and any(t.device in stays_on for t in leaves(thing)) else thing.to(device)

    return map_leaves(on_tensor, value, on_object)


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device. It has been read when this returns: the user may write to it at once.

    A device reads pinned memory only when it gets there. So the user's is copied to a pinned block that nobody writes to, and
    that torch keeps until it has been read. Of memory that is not pinned torch itself makes such a copy. A CUDA graph reads the
    user's own at each replay.
    """
    if device.type == "cpu":
        return tensor.to(device)
    if _is_pinned(tensor) and not is_capturing():
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return tensor.to(device)
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def _is_pinned(tensor: Tensor) -> bool:
    try:
        return tensor.is_pinned()
    except RuntimeError:  # `torch.vmap` cannot ask
        return False


def move_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, stays_on: frozenset[torch.device] = frozenset()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call on `device`, in one walk. Tensors that are all there cost next to nothing."""
    if not kwargs:
        for value in args:
            if type(value) is not Tensor or value.device != device:
                break
        else:
            return args, kwargs
    return move((args, kwargs), device, stays_on)


def leaves(value: Any, _seen: set[int] | None = None, *, within_objects: bool = False) -> Iterator[Tensor]:
    """Every tensor in a nested batch, in order. Looks into what `map_leaves` looks into, and changes nothing.

    With `within_objects` also into the attributes of objects that take themselves to a device, such as graph batches.
    """
    if isinstance(value, Tensor):
        yield value
        return
    seen = set() if _seen is None else _seen
    if type(value) in _PLAIN or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Any = value.values()
    elif isinstance(value, tuple | list | deque):
        children = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    elif within_objects and has_to(value):
        # Its long lists hold texts or numbers; a tensor is an attribute, or among a few.
        own = getattr(value, "__dict__", {}).values()
        children = [item for item in own if not isinstance(item, list | tuple) or len(item) <= 100]
    else:
        return
    for child in children:
        yield from leaves(child, seen, within_objects=within_objects)
