"""Several processes: the group is joined, and the step averages gradients over it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotloop._facts import Facts
from hotloop._parts import Parts
from hotloop._plan import Decision
from hotloop._processes import join, leave


def decide(facts: Facts, wish: Any) -> Decision:
    """On where torchrun, or the user's own group, has more processes than this one."""
    if wish not in ("auto", True, False, None):
        raise TypeError(f"optimize(..., distributed={wish!r}): distributed is True, False or 'auto'; write one of these")
    world = facts.world
    if wish in (False, None):
        return Decision("ddp", "off", "not asked for")
    if world is None and wish is True:
        raise ValueError(
            "optimize(..., distributed=True): there is one process; start several with torchrun --nproc-per-node 2 script.py, "
            "or open a group first with torch.distributed.init_process_group"
        )
    if world is None or (world.size == 1 and wish == "auto"):
        return Decision("ddp", "off", "there is one process; torchrun starts several")
    if not facts.optimizers:
        return Decision("ddp", "off", "there is no optimizer, so nothing is exchanged")
    opened: list[bool] = []

    def apply(parts: Parts) -> Parts:
        opened.append(join(world, facts.device))
        return replace(parts, world=world)

    def revert(parts: Parts) -> Parts:
        if any(opened):
            opened.clear()
            leave()
        return replace(parts, world=None)

    why = f"this is rank {world.rank} of {world.size}"
    if facts.traits.given:
        return Decision("ddp", "as it is", f"{why}; the model is under {facts.traits.given} already", apply, revert)
    return Decision("ddp", "on", f"{why}; gradients are averaged once an update", apply, revert)
