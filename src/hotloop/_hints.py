"""What is added to errors of torch and of user code inside a step: what was called with what, and the way out."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from hotloop._forms import Call, kind_of, written


def explain_call(
    error: TypeError, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], own: bool, call: Call
) -> TypeError:
    """A clearer error where the arguments of a step do not fit the model's forward; else the error itself."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return error
    names = ", ".join(signature.parameters)
    unknown = [name for name in kwargs if name not in signature.parameters]
    if unknown and not args:
        keys = list(kwargs)
        example = ", ".join(f"batch[{key!r}]" for key in keys[:2])
        return TypeError(
            f"step({{{', '.join(map(repr, keys))}}}): a mapping is model(**batch), and forward takes ({names}), not "
            f"{', '.join(map(repr, unknown))}; write step({example})"
        )
    meaning = "model(*batch), since there is no loss_fn" if own else "loss_fn(model(*batch[:-1]), batch[-1])"
    return TypeError(
        f"{written(*call)}: a step is {meaning}, and forward takes ({names}): {error}; "
        f"{'pass loss_fn to optimize' if own else 'pass what forward takes, and the target last'}, or call the model yourself "
        "and write step(loss)"
    )


def explain_loss(error: Exception, output: Any, target: Any) -> None:
    """Add what `loss_fn` was called with, where the model returned something else than a tensor."""
    if not isinstance(output, Tensor):
        items = f"a {type(output).__name__}" + (f" of {len(output)}" if isinstance(output, tuple | list) else "")
        error.args = (
            f"{error}\n\nhotloop: loss_fn(output, target) was called with what the model returned, {items}, and {kind_of(target)}; "
            "take out what the loss needs: loss_fn=lambda output, target: ..., or `logits, loss = model(x, y); step(loss)`",
        )


def explain_loss_as_batch(error: Exception, args: tuple[Any, ...], call: Call) -> None:
    """Add the way out where a model could not be called with what looks like a loss."""
    if args and isinstance(args[0], Tensor) and args[0].dim() == 0 and args[0].grad_fn is not None:
        error.args = (
            f"{error}\n\nhotloop: {written(*call)} calls the model with its first argument, a scalar that carries a graph; if "
            "it is a loss of your own write step(loss)",
        )


def explain_backward(error: RuntimeError, automatic: Collection[str]) -> None:
    """Add the way out to torch's complaint about a graph that is used twice, or one that an `automatic` choice is behind."""
    text = str(error)
    if "backward through the graph a second time" in text:
        error.args = (
            f"{error}\n\nhotloop: a step runs the backward itself. Remove a loss.backward() of your own; .detach() what is carried on "
            "from an earlier step (a hidden state, a generated batch); where two losses do share this graph, write "
            "step.backward(loss, retain_graph=True) for all but the last of them, or add them up: step(a + b)",
        )
    for name, (signs, without) in _SIGNS.items():
        if name in automatic and any(sign in text for sign in signs):
            error.args = (
                f"{text}\n\nhotloop: {name} was chosen automatically, and a forward that has come to its backward is not run "
                f"again without it; write optimize(..., {without})",
            )


# What torch says in a backward whose code does not bear a choice, and the wish that goes without it.
_SIGNS = {
    "precision": (("BFloat16", "Half"), "precision='fp32'"),
    "channels_last": (("view size is not compatible",), "channels_last=False"),
}
