"""What all processes must have in common, compared once, in `optimize`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop._given import FLAT, given
from hotloop._plan import Decision
from hotloop._processes import everyone, host

_OWN = ("ddp", "placement")  # decisions that name the rank, or a device of its own


def check(
    modules: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    decisions: Iterable[Decision],
    settings: dict[str, Any],
    device: torch.device,
) -> None:
    """Raise the same ValueError on all ranks unless they have the same model, optimizers and settings, each a device of its own."""
    mine: dict[str, Any] = {d.name: d.choice for d in decisions if d.name not in _OWN}
    mine.update(settings)
    mine["the class of the models"] = [type(module).__name__ for module in modules]
    mine["the class of the optimizers"] = [type(optimizer).__name__ for optimizer in optimizers]
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if isinstance(value, int | float | str | tuple | None)}
            mine.update({f"{key} in group {j} of optimizer {i}": value for key, value in options.items()})
            mine[f"the number of parameters in group {j} of optimizer {i}"] = len(group["params"])
    shards_differ = given(modules) == FLAT  # in their sizes
    for i, module in enumerate(modules):
        for name, p in module.named_parameters():
            if nn.parameter.is_lazy(p):
                raise ValueError(
                    f"optimize(...) in several processes: the parameter {name!r} has no shape yet; run one batch through the model "
                    "before optimize"
                )
            shape = "" if shards_differ else f"{tuple(p.shape)}, "
            mine[f"the parameter {name!r} of model {i}"] = f"{shape}{p.dtype}, requires_grad={p.requires_grad}"
    if not any(p.requires_grad for o in optimizers for group in o.param_groups for p in group["params"]):
        raise ValueError(
            "optimize(...) in several processes: no parameter of the optimizer requires grad, so there is nothing to average; "
            "unfreeze some first"
        )
    told = everyone((mine, host(), _identity(device)))
    _compare([items for items, _, _ in told])
    check_devices([(name, identity) for _, name, identity in told])


def _compare(told: list[dict[str, Any]]) -> None:
    first = told[0]
    for rank, items in enumerate(told):
        for name in [*first, *(name for name in items if name not in first)]:
            if items.get(name, "none") != first.get(name, "none"):
                raise ValueError(
                    f"optimize(...) in several processes: {name} is {items.get(name, 'none')} on rank {rank}, and "
                    f"{first.get(name, 'none')} on rank 0; every rank trains the same model with the same settings: make both the "
                    "same on all ranks (a wish in place of 'auto' where machines differ)"
                )


def _identity(device: torch.device) -> str | None:
    """What tells accelerators of one machine apart, also where each process sees only one of them."""
    if device.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return str(getattr(properties, "uuid", device))


def check_devices(places: Sequence[tuple[str, str | None]]) -> None:
    """Raise if two ranks, each given as its machine and its accelerator, share one."""
    for rank, place in enumerate(places):
        if place[1] is not None and places.index(place) != rank:
            raise ValueError(
                f"optimize(...) in several processes: ranks {places.index(place)} and {rank} are on the same accelerator of "
                f"{place[0]}; start no more processes on a machine than it has accelerators (torchrun --nproc-per-node), and "
                "leave the model on the CPU, or on the device of LOCAL_RANK"
            )
