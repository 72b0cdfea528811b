"""Fused optimizer kernels, switched on in the user's own optimizer: one pass over the memory where torch makes several."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from hotloop._facts import Facts
from hotloop._optimizer_traits import SWITCHED, OptimizerTraits, is_plain
from hotloop._parts import Parts
from hotloop._plan import Decision
from hotloop._rebind import fit_state

_NAME = "fused_optimizer"
# Where torch has fused kernels that pay. It has some for further devices, which nobody has measured here.
_KERNELS = {"Adam": ("cuda", "cpu"), "AdamW": ("cuda", "cpu"), "SGD": ("cuda", "cpu"), "Adagrad": ("cpu",)}


def decide(facts: Facts, wish: Any) -> Decision:
    """On for Adam, AdamW, SGD and Adagrad where torch supports it for device and dtype and it pays; state is kept."""
    if wish is None or wish is False:
        return _off("asked for: the optimizers stay as they are")
    if wish is not True and wish != "auto":
        raise ValueError(f"optimize(..., fused={wish!r}): fused is 'auto', True or False; write one of these")
    if wish is True and not facts.optimizers:
        raise ValueError("optimize(..., fused=True): there is no optimizer to switch; leave fused away, or pass one")
    if not facts.optimizers:
        return Decision(_NAME, "off", "there is no optimizer")
    if wish is True:
        problem = next((reason for o in facts.optimizers if (reason := _impossible(o, facts))), "")
        if problem:
            raise ValueError(f"optimize(..., fused=True): {problem}; leave fused='auto', which switches what can be switched")
        return _decision("on", "asked for", [not o.fused for o in facts.optimizers])
    if facts.exact:
        return _off("exact=True: fused kernels round differently (3e-8)")
    reasons = [_impossible(o, facts) or _unwise(o, facts) for o in facts.optimizers]
    if all(reasons):
        return _off("; ".join(dict.fromkeys(reasons)))
    names = ", ".join(dict.fromkeys(o.kind for o, reason in zip(facts.optimizers, reasons, strict=True) if not reason))
    others = "".join(f"; not for another: {reason}" for reason in dict.fromkeys(filter(None, reasons)))
    why = f"torch has a fused kernel for {names} on {facts.device.type}; rounds differently (3e-8 a step){others}"
    return _decision("on", why, [not reason for reason in reasons])


def trial(facts: Facts) -> Decision | None:
    """What tuning may try where the wish is "auto"."""
    switch = [not (_impossible(o, facts) or o.chosen or o.tensor_lr) for o in facts.optimizers]
    return _decision("on", "rounds differently (3e-8 a step)", switch) if any(switch) else None


def _impossible(optimizer: OptimizerTraits, facts: Facts) -> str:
    """Why torch has no fused kernel for this optimizer as it stands, or nothing."""
    kind = optimizer.kind
    if optimizer.fused:
        return ""
    if kind not in _KERNELS:
        return f"torch has no fused kernel for {kind}"
    # Parameters of the models will be on the device; what they look like now is all the same for others.
    elsewhere = sorted({facts.device.type, *optimizer.outside} - set(_KERNELS[kind]))
    if elsewhere:
        return f"{kind} has no fused kernel on {', '.join(elsewhere)} that is known to pay"
    if optimizer.foreach:
        return f"{kind} was made with foreach=True, which excludes fused=True"
    if optimizer.differentiable:
        return f"{kind} was made with differentiable=True, which excludes fused=True"
    if optimizer.lazy:
        return f"{kind} has lazy parameters, whose sizes are not known yet"
    if not optimizer.floating:
        return f"{kind} has parameters that are not plain floating tensors, or are slices of others"
    if optimizer.dampened:
        return f"{kind} has momentum with dampening, whose first fused step under a scaler torch gets wrong"
    return ""


def _unwise(optimizer: OptimizerTraits, facts: Facts) -> str:
    """Why a kernel that exists is better left off, or nothing."""
    if optimizer.chosen:
        return f"{optimizer.kind} has fused= or foreach= set already: left as it is"
    if optimizer.tensor_lr:
        return f"{optimizer.kind} has a tensor as learning rate"
    if optimizer.kind == "SGD" and not optimizer.momentum and facts.device.type == "cpu":
        return "SGD without momentum is one addition, which a fused kernel does no faster (1.0 to 1.3 times the time)"
    return ""


def _off(why: str) -> Decision:
    """As the user has made them: what an earlier `optimize` has switched on is switched back."""
    undone: list[_Switch] = []

    def apply(parts: Parts) -> Parts:
        undone.extend(filter(None, map(_undo_earlier, parts.optimizers)))
        return parts

    def revert(parts: Parts) -> Parts:
        for earlier in undone:
            _Switch(earlier.optimizer)
        undone.clear()
        return parts

    return Decision(_NAME, "off", why, apply, revert)


def _undo_earlier(optimizer: Optimizer) -> _Switch | None:
    earlier: _Switch | None = vars(optimizer).get(SWITCHED)
    if earlier is not None:
        earlier.undo()
    return earlier


def _decision(choice: str, why: str, switch: list[bool]) -> Decision:
    switched: dict[Optimizer, _Switch] = {}

    def watch() -> Decision | None:
        for optimizer, done in list(switched.items()):
            reason = done.problem()
            if reason:
                done.undo()
                del switched[optimizer]
                return Decision(_NAME, "on" if switched else "off", f"taken back: {reason}", apply, revert)
        return None

    def apply(parts: Parts) -> Parts:
        for optimizer, wanted in zip(parts.optimizers, switch, strict=True):
            if optimizer not in switched:
                _undo_earlier(optimizer)
                if wanted:
                    switched[optimizer] = _Switch(optimizer)
        return replace(parts, on_gradients=(*parts.on_gradients, watch))

    def revert(parts: Parts) -> Parts:
        for done in switched.values():
            done.undo()
        switched.clear()
        return replace(parts, on_gradients=tuple(f for f in parts.on_gradients if f is not watch))

    return Decision(_NAME, choice, why, apply, revert)


@dataclass
class _Switch:
    """One optimizer, switched to its fused kernel in place, and what it was before."""

    optimizer: Optimizer
    handles: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        optimizer = self.optimizer
        self.groups = [group.get("fused") for group in optimizer.param_groups]
        self.default = optimizer.defaults.get("fused")
        self.known = len(optimizer.param_groups)
        self.supported = optimizer.__dict__.get("_step_supports_amp_scaling")
        vars(optimizer)[SWITCHED] = self
        _switch_on(optimizer)
        # A checkpoint holds the user's own settings; one that is loaded brings its settings along.
        self.handles = [
            optimizer.register_load_state_dict_post_hook(_switch_on),
            optimizer.register_state_dict_post_hook(self._as_it_was),
        ]

    def problem(self) -> str:
        """Why the optimizer cannot stay switched now, or nothing. It may have got new parameters, or sparse gradients."""
        groups, name = self.optimizer.param_groups, type(self.optimizer).__name__
        if len(groups) > self.known:
            self.known = len(groups)
            if not all(is_plain(p) for group in groups for p in group["params"]):
                return f"{name} was given parameters that its fused kernel cannot take"
        # The others refuse sparse gradients, fused or not.
        if name in ("SGD", "Adagrad") and any(
            p.grad is not None and p.grad.is_sparse for group in groups for p in group["params"]
        ):
            return f"a gradient is sparse, which {name}'s fused kernel cannot take"
        return ""

    def groups_now(self) -> list[Any]:
        """`fused` of each group without the switch; groups that were added meanwhile have the default."""
        count = len(self.optimizer.param_groups)
        return [*self.groups, *[self.default] * count][:count]

    def _as_it_was(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        for group, fused in zip(state["param_groups"], self.groups_now(), strict=True):
            group["fused"] = fused

    def undo(self) -> None:
        for handle in self.handles:
            handle.remove()
        optimizer = self.optimizer
        vars(optimizer).pop(SWITCHED, None)
        for group, fused in zip(optimizer.param_groups, self.groups_now(), strict=True):
            group["fused"] = fused
            if not group.get("capturable"):
                _place_counters(optimizer, group, on_host=True)
        optimizer.defaults["fused"] = self.default
        if self.supported is None:
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        else:
            optimizer._step_supports_amp_scaling = self.supported  # type: ignore[attr-defined]


def _switch_on(optimizer: Optimizer) -> None:
    # Only the flags: what has been optimized so far stays, and so does the class. `defaults` serves groups added later.
    optimizer.defaults["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["fused"] = True
        _place_counters(optimizer, group, on_host=False)
    fit_state(optimizer)


def _place_counters(optimizer: Optimizer, group: dict[str, Any], *, on_host: bool) -> None:
    # A fused kernel reads its step counter as float32 beside the parameter; the others want it on the host.
    for parameter in group["params"]:
        counter = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
        if isinstance(counter, torch.Tensor):
            optimizer.state[parameter]["step"] = counter.to("cpu" if on_host else parameter.device, torch.float32)
