"""What `optimize` refuses at the door. Each text gives the call as written, the rule and the fix."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hotloop._arguments import misfit_of
from hotloop._forms import RESERVED, with_loss_fn
from hotloop._optimizer_traits import needs_closure
from hotloop._parts import live_of


def models(given: Any) -> list[nn.Module]:
    """The modules to wrap, from one or from a list."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not found:
        raise ValueError("optimize([], ...): there is no model; pass one module, or a list of modules")
    for model in found:
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise TypeError(
                f"optimize({model.__name__}, ...): this is a class; pass a module: optimize({model.__name__}(...), ...)"
            )
        if isinstance(model, torch.Tensor):
            raise TypeError(
                f"optimize({_kind(model)}, ...): a bare parameter needs no wrap; optimize the module, and keep the parameter in "
                "the optimizer"
            )
        if not isinstance(model, nn.Module):
            order = "; the model comes first, then the optimizer" if isinstance(model, Optimizer) else ""
            raise TypeError(f"optimize({_kind(model)}, ...): the model must be a torch.nn.Module, or a list of modules{order}")
        if live_of(model) is not None:
            raise ValueError(
                "optimize(model, ...): this model is wrapped already, and would be moved and cast twice; pass the plain module, "
                "model.__wrapped__, to wrap it anew"
            )
    _each_once(found, "optimize([...], ...)", "model")
    return found


def _each_once(found: Sequence[Any], call: str, what: str) -> None:
    if len({id(thing) for thing in found}) < len(found):
        raise ValueError(f"{call}: the same {what} is in the list twice; name each once")


def optimizers(given: Any, modules: Sequence[nn.Module], loss_fn: Any) -> list[Optimizer]:
    """The optimizers, each with parameters of these modules or of the loss function."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not found:
        raise ValueError("optimize(model, []): there is no optimizer; pass one, or write optimize(model) for inference")
    _each_once(found, "optimize(model, [...])", "optimizer")
    own = {id(p) for m in with_loss_fn(modules, loss_fn) for p in m.parameters()}
    for optimizer in found:
        name = type(optimizer).__name__
        if isinstance(optimizer, type):
            raise TypeError(
                f"optimize(model, {optimizer.__name__}): this is a class; pass {optimizer.__name__}(model.parameters())"
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimize(model, {_kind(optimizer)}): the second argument is the torch optimizer; write "
                "optimize(model, optimizer, loss_fn), or optimize(model) for inference"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters:
            raise ValueError(f"optimize(model, {name}): the optimizer has no parameters; make it with model.parameters()")
        if not any(id(p) in own for p in parameters):
            raise ValueError(
                f"optimize(model, {name}): the optimizer trains none of this model's parameters; make it from this model "
                "(was the model copied, or moved in a way that replaces parameters, after the optimizer was made?)"
            )
    if len(found) > 1 and any(map(needs_closure, found)):
        raise ValueError(
            "optimize(model, [...]): an optimizer that takes a closure evaluates the loss itself and cannot share a step; "
            "give each its own optimize"
        )
    return found


def schedulers(given: Any, found: Sequence[Optimizer]) -> list[Any]:
    """The schedulers, each of one of these optimizers."""
    result = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    _each_once(result, "optimize(..., scheduler=[...])", "scheduler")
    for scheduler in result:
        name = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "optimize(..., scheduler=ReduceLROnPlateau): it needs a metric, which an update does not have; leave scheduler "
                "away and call scheduler.step(metric) yourself after each evaluation"
            )
        if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "optimizer"):
            raise TypeError(
                f"optimize(..., scheduler={_kind(scheduler)}): pass a torch.optim.lr_scheduler, or "
                "step your own schedule yourself, once `metrics.updated` is True"
            )
        if misfit := misfit_of(scheduler.step):
            raise TypeError(
                f"optimize(..., scheduler={name}): an update calls scheduler.step(), which does not fit this one: {misfit}; leave "
                "scheduler away and step it yourself, once `metrics.updated` is True"
            )
        if not any(scheduler.optimizer is optimizer for optimizer in found):
            raise ValueError(
                f"optimize(..., scheduler={name}): this scheduler moves another optimizer; make it with the optimizer given here"
            )
    return result


def settings(
    *,
    loss_fn: Any,
    accumulate: Any,
    clip_norm: Any,
    before_update: Any,
    metrics: Any,
    scaler: Any,
    closure: bool,
    **flags: Any,
) -> None:
    """The arguments of a step that no transform looks at."""
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(
            f"optimize(..., loss_fn={_kind(loss_fn)}): a loss_fn is called as loss_fn(output, target); pass a function"
        )
    if isinstance(loss_fn, type):
        raise TypeError(f"optimize(..., loss_fn={loss_fn.__name__}): this is a class; pass {loss_fn.__name__}()")
    if loss_fn is not None and (misfit := misfit_of(loss_fn, "output", "target")):
        raise TypeError(
            f"optimize(..., loss_fn={_kind(loss_fn)}): a loss_fn is called as loss_fn(output, target), which does not fit: {misfit}; "
            "write loss_fn=lambda output, target: ..., or leave it away and call step(loss)"
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(
            f"optimize(..., accumulate={accumulate!r}): accumulate counts micro-batches; pass a whole number from 1 on"
        )
    if closure and accumulate > 1:
        raise ValueError(
            f"optimize(..., accumulate={accumulate}) with an optimizer that takes a closure: it evaluates one batch several times; "
            "make one large batch, or use another optimizer"
        )
    if clip_norm is not None and (isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float) or not clip_norm > 0):
        off = "; to switch clipping off use None" if clip_norm == 0 else ""
        raise ValueError(
            f"optimize(..., clip_norm={clip_norm!r}): clip_norm is the largest gradient norm, a number above zero{off}"
        )
    if before_update is not None and not callable(before_update):
        raise TypeError(f"optimize(..., before_update={_kind(before_update)}): it is called without arguments; pass a function")
    if before_update is not None and (misfit := misfit_of(before_update)):
        raise TypeError(
            f"optimize(..., before_update={_kind(before_update)}): it is called without arguments, which does not fit: {misfit}; "
            "write before_update=lambda: ..."
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"optimize(..., scaler={_kind(scaler)}): pass a torch.amp.GradScaler, or leave it away")
    _check_metrics(metrics)
    for name, value in flags.items():
        flag(name, value)


def _check_metrics(metrics: Any) -> None:
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
        raise TypeError(f"optimize(..., metrics={_kind(metrics)}): pass {{name: function(output, target)}}")
    for name in metrics:
        if name in RESERVED:
            raise ValueError(f"optimize(..., metrics={{{name!r}: ...}}): {name!r} is the step's own metric; use another name")
        if misfit := misfit_of(metrics[name], "output", "target"):
            raise TypeError(
                f"optimize(..., metrics={{{name!r}: ...}}): a metric is called as f(output, target), which does not fit: {misfit}; "
                "write lambda output, target: ..."
            )


def flag(name: str, value: Any) -> None:
    """A switch that is on or off."""
    if not isinstance(value, bool):
        raise TypeError(f"optimize(..., {name}={value!r}): {name} is True or False")


def inference(wish: Any) -> None:
    """What an eval-mode call does with gradients."""
    if wish not in ("no_grad", "inference_mode", "grad"):
        raise ValueError(
            f"optimize(..., inference={wish!r}): inference is 'no_grad', 'inference_mode' or 'grad'; write one of these"
        )


def methods(names: Any, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Names of methods that are called as forward is."""
    if names is None or names is False:
        return ()
    if isinstance(names, str):
        raise TypeError(f"optimize(..., methods={names!r}): methods is a tuple of names; write methods=({names!r},)")
    if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"optimize(..., methods={names!r}): methods is a tuple of names; write methods=('encode', 'decode')")
    for name in names:
        if not any(callable(getattr(module, name, None)) for module in modules):
            raise ValueError(f"optimize(..., methods=({name!r},)): the model has no method of this name; name one that it has")
        having = [module for module in modules if getattr(module, name, None) is not None]
        for module in [module for module in having if _is_method(getattr(module, name), module)] or having:
            _check_method(name, module)
    return tuple(names)


def _is_method(value: Any, module: nn.Module) -> bool:
    return isinstance(value, MethodType) and value.__self__ is module


def _check_method(name: str, module: nn.Module) -> None:
    value, call = getattr(module, name, None), f"optimize(..., methods=({name!r},))"
    if any(
        is_kind(value) for is_kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    ):
        raise ValueError(
            f"{call}: {name} is a generator or an async function, whose body runs when the call is over; write it as a function "
            "outside of the model, over calls of the wrapped model, and leave it out of methods"
        )
    if not _is_method(value, module):
        kinds = {staticmethod: "static method", classmethod: "class method"}
        kind = kinds.get(type(inspect.getattr_static(type(module), name, None)), type(value).__name__)
        raise ValueError(
            f"{call}: {name} is a {'submodule' if isinstance(value, nn.Module) else kind}, and only methods of the class are called "
            f"as forward is; write `def {name}(self, ...)` in class {type(module).__name__}, and in it what {name} is now"
        )


def without_optimizer(**given: Any) -> None:
    """Refuse wishes that concern training where there is no optimizer."""
    wished = [name for name, (value, default) in given.items() if value is not default and value != default]
    if wished:
        raise TypeError(
            f"optimize(model, {wished[0]}=...): without an optimizer there is nothing to train, and {', '.join(wished)} "
            f"concern{'s' if len(wished) == 1 else ''} training; write optimize(model, optimizer, ...)"
        )


def _kind(value: Any) -> str:
    return f"<{type(value).__name__}>"
