"""Placement: the model, its loss and its optimizer's state, on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hotloop._device import of_this_process, usable
from hotloop._facts import Facts
from hotloop._parts import Parts
from hotloop._plan import Decision
from hotloop._processes import World
from hotloop._rebind import following

Device = torch.device | str | int
_BY_RANK = "the accelerator of this process, by LOCAL_RANK"


def decide(facts: Facts, wish: Device) -> Decision:
    """Where the parameters already are if that is an accelerator; else the accelerator (among several processes, that of
    the rank); else the CPU."""
    device, why = resolve(facts, wish)
    if wish == "auto" and facts.traits.spread:
        why = f"the model is spread over {', '.join(sorted(map(str, facts.traits.devices)))}"
        return Decision("placement", "as it is", why, partial(_at, device, spread=facts.traits.devices))
    return _on(device, why)


def resolve(facts: Facts, wish: Device) -> tuple[torch.device, str]:
    """The device that calls will move their arguments to, and why."""
    elsewhere = sorted((d for d in facts.traits.devices if d.type != "cpu"), key=str)
    if wish != "auto":
        return usable(wish, f"optimize(..., device={wish!r})"), "asked for"
    if elsewhere:
        return elsewhere[0], "the parameters are there"
    if facts.machine.accelerator is None:
        return torch.device("cpu"), "there is no accelerator"
    if facts.world is None:
        current = usable(facts.machine.accelerator, "optimize(...)")
        device = of_this_process(current)
        return device, "the accelerator of this machine" if device == current else _BY_RANK
    return _of_its_own(facts.machine.accelerator.type, facts.world), _BY_RANK


def _of_its_own(kind: str, world: World) -> torch.device:
    """The accelerator of this rank. Where a launcher shows each process a single one, that is it."""
    count = torch.accelerator.device_count()
    if world.local_rank >= count > 1:
        raise ValueError(
            f"optimize(...) on rank {world.rank}: LOCAL_RANK={world.local_rank}, and this machine has {count} accelerators; start "
            f"torchrun with --nproc-per-node {count}, or keep this model on the CPU with device='cpu'"
        )
    return torch.device(kind, world.local_rank if count > 1 else 0)


def _at(device: torch.device, parts: Parts, spread: frozenset[torch.device] = frozenset()) -> Parts:
    return replace(parts, device=device, spread=spread, autocast=replace(parts.autocast, device_type=device.type))


def _on(device: torch.device, why: str) -> Decision:
    came_from: dict[nn.Module, torch.device] = {}

    def apply(parts: Parts) -> Parts:
        tensors = [*parts.model.parameters(), *parts.model.buffers()]
        if any(t.device != device for t in tensors):
            came_from[parts.model] = tensors[0].device
            with following(parts.model, parts.optimizers):
                parts.model.to(device)
        return _at(device, parts)

    def revert(parts: Parts) -> Parts:
        origin = came_from.get(parts.model)
        if origin is None:
            return parts
        with following(parts.model, parts.optimizers):
            parts.model.to(origin)
        return _at(origin, parts)

    return Decision("placement", str(device), why, apply, revert)
