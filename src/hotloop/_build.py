"""What `optimize` does once everything is known to be in order: decide, apply to every module, write the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hotloop import _agreement, _plan
from hotloop._exchange import Exchange
from hotloop._facts import Facts
from hotloop._forms import with_loss_fn
from hotloop._given import Given, exchange_of
from hotloop._parts import Live, Parts
from hotloop._plan import Decision, Plan
from hotloop._recovery import Recovery
from hotloop.transforms import TRANSFORMS, placement


def build(
    modules: list[nn.Module],
    optimizers: list[Optimizer],
    loss_fn: Any,
    wishes: dict[str, Any],
    facts: Facts,
    settings: dict[str, Any],
) -> tuple[list[Live], Exchange | Given | None]:
    """Decide, then apply to every module; the first error undoes everything.

    Several processes must agree on all of it; what averages their gradients comes second.
    """
    device, _ = placement.resolve(facts, wishes["device"])
    facts = replace(facts, device=device)
    decisions = []
    for name, decide in TRANSFORMS:
        decisions.append(decide(facts, wishes[name]))
        if name == "precision":
            facts = replace(facts, sixteen_bit=decisions[-1].choice in ("bf16", "fp16"))
    before = [next((t.device for t in (*m.parameters(), *m.buffers())), device) for m in modules]
    placed = next(d for d in decisions if d.name == "placement")
    jobs = [(module, decisions) for module in modules]
    if isinstance(loss_fn, nn.Module):
        jobs.append((loss_fn, [placed]))  # a loss function is placed, and nothing else
    done: list[Parts] = []
    exchange = None
    try:
        done.extend(_plan.apply(chosen, Parts(module, tuple(optimizers))) for module, chosen in jobs)
        if done[0].world is not None:
            _agreement.check(modules, optimizers, decisions, settings, device)
            exchange = exchange_of(modules, optimizers, loss_fn, device)
    except BaseException:
        for parts, (_, chosen) in zip(done, jobs, strict=False):
            _plan.revert(chosen, parts)
        raise
    plan = Plan(decisions)
    # A user's own scaler is a wish for float16, and no automatic choice.
    automatic = {name for name, wish in wishes.items() if wish == "auto"}
    if facts.scaler is not None and facts.scaler.is_enabled():
        automatic.discard("precision")
    if "precision" in automatic:
        done = [replace(parts, autocast=parts.autocast.as_automatic()) for parts in done]
    instead = {"precision": "fp32", "channels_last": "off"}
    taken_back = [
        (d, instead[d.name]) for d in decisions if d.name in automatic & {*instead} and d.choice in ("bf16", "fp16", "on")
    ]
    lives = [Live(parts, exact=facts.exact) for parts in done[: len(modules)]]
    recovery = Recovery(lives, taken_back) if taken_back else None
    for live, came_from in zip(lives, before, strict=True):
        live.plan, live.recovery = plan, recovery
        live.companions = [module for module, _ in jobs[len(modules) :]]
        live.moved_from = None if came_from == device or placed.choice == "as it is" else came_from
    return lives, exchange


def remarks(modules: list[nn.Module], optimizers: list[Optimizer], loss_fn: Any, schedulers: list[Any]) -> list[Decision]:
    """What a reader of the plan should know besides the decisions."""
    remarks = []
    if schedulers:
        names = ", ".join(type(s).__name__ for s in schedulers)
        remarks.append(Decision("scheduler", names, "moved once per update; a schedule per epoch is yours to step"))
    placed = with_loss_fn(modules, loss_fn)
    own = {id(p) for m in placed for p in m.parameters()}
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    untrained = [n for m in placed for n, p in m.named_parameters() if p.requires_grad and id(p) not in trained]
    if untrained:
        shown = ", ".join(untrained[:4]) + (f" and {len(untrained) - 4} more" if len(untrained) > 4 else "")
        remarks.append(Decision("untrained", str(len(untrained)), f"no optimizer given here trains {shown}"))
    others = [
        f"parameter {j} of {type(o).__name__} {tuple(p.shape)}"
        for o in optimizers
        for j, p in enumerate(p for group in o.param_groups for p in group["params"])
        if id(p) not in own
    ]
    if others:
        shown = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        why = f"the optimizer also trains {shown}: in no model given here, so hotloop neither moves nor casts them"
        remarks.append(Decision("other parameters", str(len(others)), why))
    return remarks
