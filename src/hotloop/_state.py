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
from hotloop._means import Means
from hotloop._scaling import make_ready
from hotloop._state_check import VERSION, check
from hotloop._window import Window


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
    taken_back: Sequence[str]  # automatic choices
    may_take_back: Sequence[str]

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
    window, ledger, means = memory.window, memory.ledger, memory.means
    ledger.settle()
    steps = means.open_steps() if window.count else []
    sums = means.sums()
    means.restore(sums, steps)
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
            "steps": steps,
        },
        "mean": sums,
        "taken_back": list(memory.taken_back),
    }


def load(memory: Memory, state: dict[str, Any]) -> None:
    """Take over a state; one that does not fit raises, with everything as it was."""
    parameters = memory.parameters()
    if isinstance(state, dict) and isinstance(state.get("window"), dict):  # one of before these were kept lacks them
        state = {**state, "window": {**state["window"], "steps": state["window"].get("steps", [])}}
    check(state, of(memory), parameters, memory.schedulers, memory.may_take_back)
    saved, window = state["window"], memory.window
    gradients = {}
    for name, gradient in saved["gradients"].items():
        gradients[name] = gradient.to(parameters[name].device, copy=True)
    # Both of these may still refuse what is inside their own part, so they are put back.
    kept = [copy.deepcopy(scheduler.state_dict()) for scheduler in memory.schedulers]
    try:
        for scheduler, its in zip(memory.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(its))
        if state["scaler"]:
            memory.scaler.load_state_dict(state["scaler"])
    except BaseException:
        for scheduler, its in zip(memory.schedulers, kept, strict=True):
            scheduler.load_state_dict(its)
        raise
    window.drop()
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    if gradients:
        make_ready(memory.scaler, next(iter(gradients.values())).device)
    window.count, window.extra = saved["count"], saved["extra"]
    window.weight, window.reference = saved["weight"], saved["reference"]
    window.watch()
    memory.ledger.restore(state["updates"], state["skipped"], state["running_skips"])
    memory.means.restore(state["mean"], saved["steps"])
