"""The state of a step, saved and loaded whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._ledger import Ledger
from hotloop._metrics import Means
from hotloop._window import Window

VERSION = 1


@dataclass(frozen=True)
class Memory:
    """Where a step keeps what must survive it."""

    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    scaler: torch.amp.GradScaler
    window: Window
    ledger: Ledger
    means: Means

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by a name that a resumed run gives it as well; those outside of the models by their position."""
        several = len(self.models) > 1
        named: dict[str, Tensor] = {}
        for i, model in enumerate(self.models):
            named.update({f"{i}.{name}" if several else name: p for name, p in model.named_parameters()})
        known = {id(p) for p in named.values()}
        for i, optimizer in enumerate(self.optimizers):
            flat = [p for group in optimizer.param_groups for p in group["params"]]
            named.update({f"optimizer {i}, parameter {j}": p for j, p in enumerate(flat) if id(p) not in known})
        return named


def of(memory: Memory) -> dict[str, Any]:
    """The state as plain data and tensors."""
    window, ledger = memory.window, memory.ledger
    ledger.settle()
    gradients = {}
    if window.is_open:
        gradients = {name: p.grad.detach().clone() for name, p in memory.parameters().items() if p.grad is not None}
    return {
        "version": VERSION,
        "scaler": memory.scaler.state_dict(),
        "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in memory.schedulers],
        "updates": ledger.updates,
        "skipped": ledger.skipped,
        "running_skips": ledger.running,
        "window": {
            "size": window.size,
            "count": window.count,
            "extra": window.extra,
            "weight": window.weight,
            "reference": window.reference,
            "gradients": gradients,
        },
        "mean": memory.means.sums(),
    }


def load(memory: Memory, state: dict[str, Any]) -> None:
    """Take over a state; one that does not fit raises, with everything as it was."""
    parameters = memory.parameters()
    _check(memory, parameters, state)
    # Both of these may still refuse what is inside their own part, so they are put back.
    kept = [copy.deepcopy(scheduler.state_dict()) for scheduler in memory.schedulers]
    try:
        for scheduler, its in zip(memory.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(its))
        if memory.scaler.is_enabled():
            memory.scaler.load_state_dict(state["scaler"])
    except BaseException:
        for scheduler, its in zip(memory.schedulers, kept, strict=True):
            scheduler.load_state_dict(its)
        raise
    saved, window = state["window"], memory.window
    window.drop()
    for name, gradient in saved["gradients"].items():
        parameter = parameters[name]
        parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)
    window.count, window.extra = saved["count"], saved["extra"]
    window.weight, window.reference = saved["weight"], saved["reference"]
    window.watch()
    memory.ledger.restore(state["updates"], state["skipped"], state["running_skips"])
    memory.means.restore(state["mean"])


def _check(memory: Memory, parameters: dict[str, Tensor], state: Any) -> None:
    def refuse(what: str) -> None:
        raise ValueError(
            f"step.load_state_dict(state): {what}; load what step.state_dict() gave for a step made with the same arguments "
            "(nothing has been loaded)"
        )

    expected = of(memory)
    if not isinstance(state, dict) or "version" not in state:
        refuse("this is not the state of a step")
    if state["version"] != VERSION:
        refuse(f"its version is {state['version']!r}, and this hotloop writes version {VERSION}")
    for place, mine, its in (("state", expected, state), ("window", expected["window"], state.get("window"))):
        if not isinstance(its, dict) or its.keys() != mine.keys():
            refuse(f"the {place} should have the keys {', '.join(mine)}")
    for place, mine, its in (("state", expected, state), ("window", expected["window"], state["window"])):
        wrong = [key for key in mine if type(its[key]) is not type(mine[key])]
        if wrong:
            refuse(f"{', '.join(wrong)} in its {place} {'is' if len(wrong) == 1 else 'are'} of another type")
    if state["scaler"].keys() != expected["scaler"].keys():
        given, here = ("with" if part["scaler"] else "without" for part in (state, expected))
        refuse(f"it was saved {given} a gradient scaler, and this step is {here} one (see precision=)")
    if not all(_is_number(value) for value in state["scaler"].values()):
        refuse("its scaler holds something other than numbers")
    if len(state["schedulers"]) != len(memory.schedulers):
        refuse(f"it holds {len(state['schedulers'])} schedulers, and this step has {len(memory.schedulers)}")
    for scheduler, mine, its in zip(memory.schedulers, expected["schedulers"], state["schedulers"], strict=True):
        if not isinstance(its, dict) or its.keys() != mine.keys():
            refuse(f"its scheduler is no {type(scheduler).__name__}")
    for name, pair in state["mean"].items():
        if not isinstance(name, str) or not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_number, pair)):
            refuse(f"its mean of {name!r} is not [sum, weight]")
    window = state["window"]
    if window["size"] != memory.window.size:
        refuse(f"its window has accumulate={window['size']}, and this step accumulate={memory.window.size}")
    if not (0 <= window["count"] < window["size"]) or min(state["updates"], state["skipped"]) < 0:
        refuse("its counters are out of range")
    for name, gradient in window["gradients"].items():
        if name not in parameters:
            refuse(f"it holds a gradient of {name!r}, which this model does not have")
        if not isinstance(gradient, Tensor) or gradient.shape != parameters[name].shape:
            refuse(f"its gradient of {name!r} has not the shape {tuple(parameters[name].shape)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)
