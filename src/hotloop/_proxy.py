"""The wrapped model: a transparent proxy around the user's module, which stays in place and keeps its identity."""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
import wrapt
from torch import nn

from hotloop._call import call
from hotloop._parts import Live
from hotloop._rebind import following

_SPECIAL = (
    *("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__contains__"),
    *("__enter__", "__exit__", "__aenter__", "__aexit__"),
)

# What the proxy's base has, whatever it wraps. None is Python's way to take a method away: `isinstance(model, Sized)` is False.
_TAKEN_AWAY = (
    *("__len__", "__enter__", "__exit__", "__aenter__", "__aexit__"),
    *("__int__", "__float__", "__complex__", "__index__", "__bytes__", "__abs__", "__round__"),
)

# Methods that move parameters or replace them, and the floating dtype that they lead to.
_DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
_MOVING = {"to", "cpu", "cuda", "ipu", "xpu", "mtia", "hpu", "to_empty", "type", "load_state_dict", "_apply", *_DTYPES}


class ModelProxy(wrapt.BaseObjectProxy):  # type: ignore[type-arg]
    """The user's module, called as hotloop calls it. Attributes, parameters, hooks and `isinstance` are the module's own.

    `model.__wrapped__` is the module, `model.device` the device it runs on (unless the module has an attribute of that name).
    Inside compiled functions read plain attributes through `model.__wrapped__`: torch cannot guard them on a proxy.
    """

    _self_kind: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `type(model)(...)` is written for another module of the user's class.
        return super().__new__(cls) if any(isinstance(given, Live) for given in args) else cls._self_kind(*args, **kwargs)

    def __init__(self, module: nn.Module, live: Live) -> None:
        super().__init__(module)
        self._self_live = live
        if not hasattr(module, "training"):  # `jit.freeze` takes it away; `eval()` brings it back
            module.training = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        live = self._self_live
        forward = live.parts.forward
        return call(self.__wrapped__ if forward is None else forward, live, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        module = self.__wrapped__
        try:
            value = getattr(module, name)
        except AttributeError:
            if name == "device":
                return self._self_live.parts.device
            if name == "module":  # as under DDP
                return module
            raise
        if not isinstance(value, types.MethodType) or value.__self__ is not module:
            return value
        if torch.compiler.is_compiling():  # dynamo cannot see into a proxy of a method
            return self._self_called(value) if name in self._self_live.methods else value
        method = _Method(value)
        method._self_proxy = self
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_users(name):
            setattr(self.__wrapped__, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if _is_users(name):
            delattr(self.__wrapped__, name)
        else:
            super().__delattr__(name)

    def _self_called(self, method: types.MethodType) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(method, self._self_live, args, kwargs)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __dir__(self) -> list[str]:
        return [*dir(self.__wrapped__), "device"]

    def __copy__(self) -> ModelProxy:
        return self._self_wrapping(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelProxy:
        made = self._self_wrapping(copy.deepcopy(self.__wrapped__, memo))
        memo[id(self)] = made
        return made

    def _self_wrapping(self, module: nn.Module) -> ModelProxy:
        return type(self)(module, self._self_live.copy(module))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # What is stored is the plain module, by way of the standard library alone, so that it loads where hotloop is not
        # installed; as an item of a tuple it stays one object with other references to the module.
        return operator.getitem, ((self.__wrapped__,), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)


def _is_users(name: str) -> bool:
    # wrapt keeps every name with its prefix on the proxy.
    return name.startswith("_self_") and name != "_self_live"


class _Method(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
    """A method of the module that hands back the wrapper where it would hand back the module."""

    _self_proxy: ModelProxy

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        method, proxy = self.__wrapped__, self._self_proxy
        name = method.__name__
        if name in proxy._self_live.methods:
            return proxy._self_called(method)(*args, **kwargs)
        result = _moving(method, proxy, args, kwargs) if name in _MOVING else method(*args, **kwargs)
        if result is not method.__self__:
            return result
        if not hasattr(nn.Module, name):
            _follow(proxy)
        return proxy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __copy__(self) -> Any:
        return self.__wrapped__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


def _moving(method: Callable[..., Any], proxy: ModelProxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a method that moves or replaces parameters; the optimizers' groups and state and `model.device` follow."""
    live, module = proxy._self_live, proxy.__wrapped__
    _refuse_other_dtype(method.__name__, module, args, kwargs)
    with following(module, live.parts.optimizers):
        result = method(*args, **kwargs)
    _follow(proxy)
    return result


def _follow(proxy: ModelProxy) -> None:
    """Let `model.device`, the precision, the loss function and the optimizers' state be where the model is now."""
    live, module = proxy._self_live, proxy.__wrapped__
    devices = [t.device for t in (*module.parameters(), *module.buffers())]
    if live.parts.spread and len(set(devices)) > 1:
        return
    device = next(iter(devices), live.parts.device)
    if device == live.parts.device and not live.parts.spread:
        return
    live.parts = replace(live.parts, device=device, spread=frozenset(), autocast=live.parts.autocast.on(device.type))
    live.moved_from = None  # from here on it is the user who moves
    for companion in live.companions:
        with following(companion, live.parts.optimizers):
            companion.to(device)
    with following(module, live.parts.optimizers):
        pass  # a method of the user's own has moved it


def _refuse_other_dtype(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    changed = {str(old): str(new) for old, new in _conversions(name, module, args, kwargs) if old != new}
    if changed:
        olds, news = ", ".join(sorted(changed)), ", ".join(sorted(set(changed.values())))
        raise TypeError(
            f"model.{name}(...) would turn {olds} parameters into {news}, but the plan and the optimizer's state were made for "
            "them as they are: change the dtype of the plain module (model.__wrapped__) and call optimize again"
        )


def _conversions(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """The dtypes of the floating parameters, before and after the method."""
    parameters = {n: p.dtype for n, p in module.named_parameters() if p.is_floating_point()}
    if name == "load_state_dict":
        given = args[0] if args else kwargs.get("state_dict", {})
        if kwargs.get("assign", len(args) > 2 and args[2]):
            yield from ((parameters[n], v.dtype) for n, v in given.items() if n in parameters)
        return
    for dtype in set(parameters.values()):
        if name == "_apply":
            yield dtype, (args[0] if args else kwargs["fn"])(torch.empty(0, dtype=dtype)).dtype
        elif name == "to":
            yield dtype, torch._C._nn._parse_to(*args, **kwargs)[1] or dtype  # what Module.to itself asks
        elif name == "type":
            wish = args[0] if args else kwargs["dst_type"]
            yield dtype, wish if isinstance(wish, torch.dtype) else torch.empty(0).type(wish).dtype
        else:
            yield dtype, _DTYPES.get(name, dtype)


def wrap(module: nn.Module, live: Live) -> ModelProxy:
    """The module in a proxy of a class made for its type: `len`, indexing and iteration exist exactly where it has them."""
    kind = type(module)
    made = _classes.get(kind)
    if made is None:
        made = _classes[kind] = _class_for(kind)
    proxy: ModelProxy = made(module, live)
    return proxy


_classes: WeakValueDictionary[type[nn.Module], type[ModelProxy]] = WeakValueDictionary()


def _class_for(kind: type[nn.Module]) -> type[ModelProxy]:
    special = {name for name in _SPECIAL if hasattr(kind, name)}
    body: dict[str, Any] = {name: None for name in _TAKEN_AWAY if not hasattr(kind, name)}
    body.update({name: _forwarding(name) for name in special})
    # The base's indexing raises as it should, and None there would make `iter` succeed.
    if not {"__iter__", "__getitem__", "__contains__"} & special:
        body["__contains__"] = None
    return type(ModelProxy.__name__, (ModelProxy,), {**body, "__module__": __name__, "_self_kind": kind})


def _forwarding(name: str) -> Callable[..., Any]:
    def method(self: ModelProxy, *args: Any) -> Any:
        module = self.__wrapped__
        result = getattr(module, name)(*args)
        return self if result is module else result

    method.__name__ = name
    return method
