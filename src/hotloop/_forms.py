"""What a step is called with and what a loss function returns: the forms that are taken, and texts for those that are not."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Named = dict[str, Any]

Call = tuple[Any, ...]  # what `written` takes: the arguments of a step, for the text of an error

RESERVED = ("loss", "grad_norm")


def written(args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "step") -> str:
    """The call of a step, as the user may have written it."""
    items = [*map(kind_of, args), *(f"{name}={kind_of(value)}" for name, value in kwargs.items())]
    return f"{name}({', '.join(items)})"


def kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"<tensor {tuple(value.shape)}>"
    return f"<{type(value).__name__}>"


def as_number(value: Any) -> Any:
    """A number of NumPy's, or of a subclass of Python's own, as the Python number that it is; anything else as it is."""
    if type(value) in (float, int, bool, complex) or isinstance(value, Tensor):
        return value
    if getattr(value, "size", None) == 1 and callable(getattr(value, "item", None)):
        return value.item()
    kinds: tuple[Any, ...] = (int, float, complex)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)


def with_loss_fn(models: Sequence[nn.Module], loss_fn: Any) -> list[nn.Module]:
    """The models, and the loss function where it is a module: it may hold parameters that train with theirs."""
    return [*models, loss_fn] if isinstance(loss_fn, nn.Module) else [*models]


def is_loss(value: Any) -> bool:
    """Whether a lone argument is the user's own loss: a tensor that carries a graph, or a scalar that has lost its own."""
    return isinstance(value, Tensor) and (value.grad_fn is not None or value.dim() == 0)


def unpacked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Mapping[str, Any] | None]:
    """The batch as arguments; a mapping that is the whole batch comes back a third time, as the target of `loss_fn`."""
    if len(args) == 1:
        batch = args[0]
        if isinstance(batch, Mapping):
            _refuse_losses(batch)
            return (), {**batch, **kwargs}, batch
        if isinstance(batch, tuple | list):
            return tuple(batch), kwargs, None
        if isinstance(batch, int | float):
            raise TypeError(
                f"step({batch!r}): a loss is a tensor that carries a graph, and this is a number; remove the .item()"
            )
    if not args and not kwargs:
        raise TypeError("step(): there is no batch; write step(x, y), step(batch) or step(loss)")
    return args, kwargs, None


def _refuse_losses(batch: Mapping[str, Any]) -> None:
    if any(isinstance(v, Tensor) and v.grad_fn is not None and v.numel() == 1 for v in batch.values()):
        given = "outputs.loss" if "loss" in batch else "sum(losses.values()), **losses"
        raise TypeError(
            f"step({{{', '.join(map(repr, batch))}}}): these values carry a graph, so they are losses and no batch; "
            f"write step({given})"
        )


def loss_and_metrics(result: Any, own: bool) -> tuple[Any, Named]:
    """The loss and the named scalars in what `loss_fn` returned, or the model itself (`own`)."""
    if isinstance(result, Tensor):
        return result, {}
    if own:
        return _own_loss(result), {}
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise TypeError(_no_loss("loss_fn returned a dict", result))
        return result["loss"], {name: value for name, value in result.items() if name != "loss"}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result[0], dict(result[1])
    if isinstance(result, tuple):
        raise TypeError(
            f"loss_fn returned ({', '.join(map(kind_of, result))}): it returns a scalar, (scalar, {{name: scalar}}) or a dict with "
            "'loss'; write `return loss, {'name': value}`"
        )
    raise TypeError(
        f"loss_fn returned {kind_of(result)}: it returns a scalar tensor that carries a graph; "
        "is a `return` missing, or an .item() too early?"
    )


def _own_loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        if "loss" in output:
            return output["loss"]
        raise TypeError(_no_loss("the model returned a dict", output))
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, tuple | list):
        raise TypeError(
            f"the model returned a {type(output).__name__} of {len(output)}, and without loss_fn a model returns its own loss (a "
            "scalar, output.loss or output['loss']); write `logits, loss = model(x, y); step(loss)`, or pass loss_fn to optimize"
        )
    raise TypeError(
        f"the model returned {kind_of(output)}, and without loss_fn a model returns its own loss (a scalar, output.loss or "
        "output['loss']); pass loss_fn to optimize"
    )


def _no_loss(what: str, losses: Mapping[str, Any]) -> str:
    return (
        f"{what} with {', '.join(map(repr, losses))} and without 'loss': which of them is to be minimised? "
        "Write `losses = model(...); step(sum(losses.values()), **losses)`, or return a 'loss'"
    )


def check_loss(loss: Any, call: Call, own: bool = False, *, in_eval: bool = False) -> None:
    """Raise unless `loss` is a real scalar that carries a graph. `own`: it is what a model returned, without a loss_fn."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{written(*call)}: the loss is {kind_of(loss)}; a loss is a tensor with one element that carries a graph"
        )
    if loss.numel() != 1:
        what = "the model returned, as its own loss, since there is no loss_fn, a tensor of" if own else "the loss has"
        fix = "pass loss_fn to optimize, or reduce it" if own else "reduce it, for example with .mean()"
        raise ValueError(f"{written(*call)}: {what} shape {tuple(loss.shape)}; a loss has one element: {fix}")
    if not loss.requires_grad:
        eval_mode = (
            "the model is in eval mode, where a call keeps no graph: call model.train(), write step(x, y), or wrap it with "
            "optimize(..., inference='grad')"
            if in_eval
            else "was it detached, computed under no_grad, taken through argmax, or is every parameter frozen?"
        )
        raise RuntimeError(f"{written(*call)}: the loss does not require grad, so there is nothing to train; {eval_mode}")
    if loss.is_complex():
        raise ValueError(f"{written(*call)}: the loss is complex; a loss is real: take .abs() or .real")


def check_metrics(named: Named, call: Call) -> None:
    """Raise unless every named value is a scalar: a one-element tensor or a number, which becomes one of Python's own."""
    for name, given in list(named.items()):
        named[name] = value = as_number(given)
        if name in RESERVED:
            raise ValueError(f"{written(*call)}: {name!r} is the step's own metric; give yours another name")
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"{written(*call)}: the metric {name!r} has shape {tuple(value.shape)}; a metric is a scalar: reduce it, for example "
                    f"with .mean(), or take it from the output with keep_output=True"
                )
            if value.is_meta:
                raise ValueError(f"{written(*call)}: the metric {name!r} is on the meta device, which holds no values")
        elif not isinstance(value, int | float | complex):
            raise ValueError(
                f"{written(*call)}: the metric {name!r} is {kind_of(value)}; a metric is a one-element tensor or a number"
            )
        elif isinstance(value, int) and abs(value) > sys.float_info.max:  # its mean could not be told
            raise ValueError(
                f"{written(*call)}: the metric {name!r} is an integer that no float can hold; a metric is at most "
                f"{sys.float_info.max:.1e}: pass its logarithm, or float('inf')"
            )


def check_weight(weight: Any) -> float:
    """The weight of a micro-batch, as a float."""
    if isinstance(weight, Tensor):
        raise TypeError(
            "step(..., weight=<tensor>): weight is the step's own argument, the number of samples or tokens of this micro-batch, "
            "as a Python number; write weight=len(x), and give a metric of yours another name"
        )
    weight = as_number(weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= sys.float_info.max:
        raise ValueError(
            f"step(..., weight={weight!r}): weight is a finite number that is not negative; pass the number of samples"
        )
    return float(weight)


def check_target(args: tuple[Any, ...], call: Call) -> None:
    """Raise unless there is something for the model and a target behind it."""
    if len(args) < 2:
        lost = len(args) == 1 and isinstance(args[0], Tensor) and args[0].numel() == 1
        hint = "a loss of your own must carry a graph: does it require grad?" if lost else "write step(x, y)"
        by_position = " (by position, not by name)" if call[1] else ""
        raise TypeError(
            f"{written(*call)}: with a loss_fn the last argument is the target, and there is none{by_position}; {hint}"
        )


def refuse_inference_mode(args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "step") -> None:
    """Raise inside `torch.inference_mode`, where nothing can be trained."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{written(args, kwargs, name)} inside torch.inference_mode: gradients cannot be enabled there; use torch.no_grad, or "
            "train outside of it"
        )


def several_models(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The text for a batch given to a step of several models."""
    return (
        f"{written(args, kwargs)}: the step has several models and cannot know which of them to call; call them yourself and "
        "write step(loss)"
    )


def loss_for_closure(args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: object, name: str = "step") -> str:
    """The text for a ready loss given to an optimizer that must evaluate it again."""
    return (
        f"{written(args, kwargs, name)} with {type(optimizer).__name__}: this optimizer evaluates the loss several times, and a loss "
        "that is ready cannot be evaluated again; write step(x, y) with a loss_fn, or step(batch)"
    )
