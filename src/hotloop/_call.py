"""A call of a wrapped model: move, autocast, gradients as the mode asks, float32 out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotloop._parts import Live, Parts
from hotloop._tree import leaves, map_leaves, move_call

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


def call(run: Any, live: Live, args: tuple[Any, ...], kwargs: dict[str, Any], *, moved: bool = False) -> Any:
    """`run(*args, **kwargs)` as a call of the wrapped model; `run` is its module, or a method of it.

    In training mode, and inside a step, gradients are as the caller set them; in eval mode they are off, unless an argument
    requires grad or `inference="grad"`. Outputs in 16 bits come back in float32, detached where gradients are off.
    """
    if not moved and (torch.compiler.is_compiling() or torch.jit.is_tracing()):  # type: ignore[no-untyped-call, attr-defined]
        return _traceable(run, live, args, kwargs)
    if live.recovery is not None:
        return live.recovery.attempt(partial(_call, run, live, args, kwargs, moved))
    return _call(run, live, args, kwargs, moved)


def _call(run: Any, live: Live, args: tuple[Any, ...], kwargs: dict[str, Any], moved: bool) -> Any:
    parts = live.parts
    keeps = live.in_step or parts.model.training
    try:
        if not moved:
            args, kwargs = move_call(args, kwargs, parts.device)
        args, kwargs = parts.on_inputs(args, kwargs)
        if keeps:
            if parts.autocast.dtype is None:
                output = run(*args, **kwargs)
            else:
                with parts.autocast():
                    output = run(*args, **kwargs)
            return _finished(output, live, parts, detach=False)
        with _inference(live, args, kwargs), parts.autocast():
            output = run(*args, **kwargs)
            return _finished(output, live, parts, detach=not torch.is_grad_enabled())
    except RuntimeError as error:
        explain_devices(error, live)
        raise
    finally:
        # A training call outside of a step leaves its flags to its backward, which reads them.
        if not keeps:
            parts.restore_flags()


def _inference(live: Live, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
    """What an eval-mode call runs in."""
    if live.inference == "grad" or any(t.requires_grad for t in leaves((args, kwargs))):
        return _AS_IT_IS
    if live.inference == "inference_mode":
        return torch.inference_mode()
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


def _finished(output: Any, live: Live, parts: Parts, *, detach: bool) -> Any:
    """The output as a call returns it: 16-bit floating tensors in float32, and detached on demand."""
    # With exact=True a model whose own parameters are 16-bit gives what it gives: only our autocast is undone.
    cast = not live.exact or parts.autocast.dtype is not None
    if type(output) is Tensor and output.dtype not in _SIXTEEN_BITS and not detach:
        return output

    def finish(tensor: Tensor) -> Tensor:
        if cast and tensor.dtype in _SIXTEEN_BITS:
            tensor = tensor.float()
        return tensor.detach() if detach and tensor.requires_grad else tensor

    return map_leaves(finish, output)


def _traceable(run: Any, live: Live, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same call in a form that `torch.compile`, `export` and `jit.trace` can follow."""
    parts = live.parts
    args, kwargs = _moved(args, parts.device), _moved(kwargs, parts.device)
    keeps = live.in_step or parts.model.training or live.inference == "grad" or not torch.is_grad_enabled()
    if keeps or any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values())):
        with parts.autocast():
            return _as_float32(run(*args, **kwargs))
    with torch.no_grad(), parts.autocast():
        return _as_float32(run(*args, **kwargs))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)([_moved(v, device) for v in value])
    return {k: _moved(v, device) for k, v in value.items()} if type(value) is dict else value


def _as_float32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _SIXTEEN_BITS else value
    if type(value) in (tuple, list):
        return type(value)([_as_float32(v) for v in value])
    return {k: _as_float32(v) for k, v in value.items()} if type(value) is dict else value


def explain_devices(error: RuntimeError, live: Live) -> None:
    """Add to torch's complaint about mixed devices that `optimize` moved the model, and what was left behind."""
    device, text = live.parts.device, str(error)
    if live.moved_from is None or device.type not in text:
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
