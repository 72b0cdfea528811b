"""A call of a wrapped model: move, autocast, gradients as the mode asks, float32 out."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hotloop._device import autocasts
from hotloop._parts import Live, Parts
from hotloop._tensors import SIXTEEN_BITS, as_float32, is_16_bit
from hotloop._tree import leaves, map_leaves, move_call

_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


class _Body(threading.local):
    """What runs in this thread at the moment; as torch's grad mode, nothing of it reaches the tasks and threads that it starts."""

    evaluates = False  # in the body of an evaluation, which begins without gradients: where they are on, it wants them
    region: Callable[[], AbstractContextManager[Any]] | None = None  # opens the precision that the evaluation was asked for


body = _Body()


def call(run: Any, live: Live, args: tuple[Any, ...], kwargs: dict[str, Any], *, moved: bool = False) -> Any:
    """`run(*args, **kwargs)` as a call of the wrapped model; `run` is its module, or a method of it.

    In training mode, and inside a step, gradients are as the caller set them; in eval mode they are off, unless an argument
    requires grad or `inference="grad"`. Outputs in 16 bits come back in float32, detached where gradients are off.
    """
    if not moved and (torch.compiler.is_compiling() or torch.jit.is_tracing()):  # type: ignore[no-untyped-call, attr-defined]
        return _traceable(run, live, args, kwargs)
    recovery = live.recovery  # another thread may take it away
    if recovery is not None:
        if transform_level() is not None:  # torch.func bears less than a plain call, and nothing can be put back inside it
            args, kwargs = move_call(args, kwargs, live.parts.device, live.parts.spread)
            return run(*args, **kwargs)
        return recovery.attempt(live, partial(_call, run, live, args, kwargs, moved), (args, kwargs))
    return _call(run, live, args, kwargs, moved)


def _call(run: Any, live: Live, args: tuple[Any, ...], kwargs: dict[str, Any], moved: bool) -> Any:
    parts = live.parts
    try:
        if not moved:
            args, kwargs = move_call(args, kwargs, parts.device, parts.spread)
        if parts.model.training or live.is_stepping():
            # The flags that this sets stay set for the backward, which reads them; the step restores them.
            for look in parts.on_inputs:
                args, kwargs = look(args, kwargs)
            if parts.autocast.dtype is None:
                return finished(run(*args, **kwargs), live, parts)
            with parts.autocast(*args, **kwargs):
                output = run(*args, **kwargs)
            return finished(output, live, parts)
        return _call_in_eval(run, live, parts, args, kwargs)
    except RuntimeError as error:
        explain_devices(error, live)
        raise


def _call_in_eval(run: Any, live: Live, parts: Parts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = parts.flags.found()
    try:
        for look in parts.on_inputs:
            args, kwargs = look(args, kwargs)
        with _gradients(live, parts, args, kwargs), parts.autocast(*args, **kwargs):
            output = run(*args, **kwargs)
            return finished(output, live, parts, detach=not torch.is_grad_enabled())
    finally:
        parts.flags.put_back(found)
        if autocasts(parts.device.type) and torch.is_grad_enabled() and _casts_lose_their_graph():
            torch.clear_autocast_cache()


@functools.cache
def _casts_lose_their_graph() -> bool:
    """Whether autocast hands out a cast that it made without gradients where gradients are on, as an older torch does."""
    weight = torch.ones(1, 1, device="cpu", requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight, weight)
        return not torch.mm(weight, weight).requires_grad


def _gradients(live: Live, parts: Parts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
    """What an eval-mode call runs in: gradients are off, unless one of its inputs asks for them."""
    off = not torch.is_grad_enabled()
    if live.inference == "grad" or (off and live.inference == "no_grad") or (not off and body.evaluates):
        return _AS_IT_IS
    if any(t.requires_grad for t in leaves((args, kwargs), within_objects=True)) or _has_swapped_parameters(parts.model):
        return _AS_IT_IS
    if not off:
        live.cut = True  # a step that is given a loss asks for it
    return torch.no_grad() if live.inference == "no_grad" else torch.inference_mode()


def _has_swapped_parameters(module: nn.Module) -> bool:
    """Whether `torch.func` has put its own tensors in the parameters' places: they are inputs as well."""
    if transform_level() is not None:
        return True
    first = _first_parameter(module)  # a look at all of them would cost as much as a small model's call
    return first is not None and not isinstance(first, nn.Parameter)


transform_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", lambda: None)


def _first_parameter(module: nn.Module) -> Tensor | None:
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    children = (_first_parameter(child) for child in module._modules.values() if child is not None)
    return next((found for found in children if found is not None), None)


def finished(output: Any, live: Live, parts: Parts, *, detach: bool = False) -> Any:
    """The output as a call returns it: 16-bit floating tensors in float32, and detached on demand."""
    for look in parts.on_outputs:
        output = look(output)
    if type(output) is Tensor and output.dtype not in SIXTEEN_BITS and not (detach and output.requires_grad):
        return output
    cast = _casts(live, parts)

    def finish(tensor: Tensor) -> Tensor:
        tensor = as_float32(tensor) if cast else tensor
        return tensor.detach() if detach and tensor.requires_grad else tensor

    output = map_leaves(finish, output)
    recovery = live.recovery
    if recovery is not None and parts.autocast.dtype is not None and not recovery.has_proven(live):
        for holder in _rounded(output):
            own = vars(holder)
            own.update({name: as_float32(value) for name, value in own.items() if isinstance(value, Tensor)})
            recovery.take_back(["precision"], f"the model returns 16-bit tensors inside a {type(holder).__name__}")
    return output


def _rounded(value: Any, depth: int = 4) -> Iterator[Any]:
    """The objects of the user's, such as distributions, that have 16-bit tensors for attributes, which no map has reached.

    Those that they keep in containers are more likely their own: a cache that the next call is given.
    """
    items: Iterable[Any] = ()
    if isinstance(value, tuple | list | Mapping):
        items = value.values() if isinstance(value, Mapping) else value
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | type | nn.Module):
        items = [item for item in vars(value).values() if not isinstance(item, tuple | list | Mapping)]
        if any(isinstance(item, Tensor) and is_16_bit(item) for item in items):
            yield value
    if depth:
        for item in islice(items, 100):  # it may lead to a whole data set
            yield from _rounded(item, depth - 1)


def _traceable(run: Any, live: Live, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same call in a form that `torch.compile`, `export` and `jit.trace` can follow."""
    parts = live.parts
    args, kwargs = _traced_map(lambda t: t.to(parts.device), (args, kwargs))
    finish = as_float32 if _casts(live, parts) else _as_it_is
    keeps = live.in_step != 0 or parts.model.training or live.inference == "grad" or not torch.is_grad_enabled()
    if keeps or _traced_requires_grad((args, kwargs)):
        with parts.autocast(*args, **kwargs):
            return _traced_map(finish, run(*args, **kwargs))
    with torch.no_grad(), parts.autocast(*args, **kwargs):
        return _traced_map(finish, run(*args, **kwargs))


def _casts(live: Live, parts: Parts) -> bool:
    # With exact=True a model whose own parameters are 16-bit gives what it gives: only our autocast is undone.
    return not live.exact or parts.autocast.dtype is not None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _traced_map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`map_leaves` in terms that dynamo can follow: without identities and copies."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):  # dynamo of torch 2.6 knows no `tuple | list`
        items = [_traced_map(function, v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) in (dict, OrderedDict):
        return type(value)([(k, _traced_map(function, v)) for k, v in value.items()])
    if isinstance(value, dict):  # such as transformers' ModelOutput, whose keys are its fields
        return type(value)(**{k: _traced_map(function, v) for k, v in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _traced_map(function, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    return value


def _traced_requires_grad(value: Any) -> bool:
    """Whether a tensor in what `_traced_map` walks through requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, (tuple, list)):
        return any(_traced_requires_grad(v) for v in value)
    if isinstance(value, dict):
        return any(_traced_requires_grad(v) for v in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_traced_requires_grad(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
    return False


_MIXED = ("same device", "should be the same", "Input type", "is on cpu", "mixed with")


def explain_devices(error: RuntimeError, live: Live) -> None:
    """Add to torch's complaint about mixed devices that `optimize` moved the model, and what was left behind."""
    device, text = live.parts.device, str(error)
    if live.moved_from is None or device.type not in text or not any(sign in text for sign in _MIXED):
        return
    left = [
        f"self.{f'{name}.' if name else ''}{attribute}"
        for name, module in live.parts.model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.device != device
    ]
    behind = f"; {', '.join(left)} stayed behind: make it a buffer (register_buffer)" if left else ""
    error.args = (
        f"{text}\n\nhotloop: optimize moved the model from {live.moved_from} to {device}{behind}. Make tensors in forward on "
        f"the device of its inputs, take batches from prefetch(loader, model), or keep the model with "
        f"optimize(..., device={str(live.moved_from)!r})",
    )
