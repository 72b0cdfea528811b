"""The decision on several processes, and where each is placed; what the group does is tested in tests/distributed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD

from hotloop import _agreement
from hotloop._facts import Facts, Machine, traits
from hotloop._optimizer_traits import optimizer_traits
from hotloop._processes import World
from hotloop.transforms import ddp, placement

ACCELERATOR = torch.device("cuda")


def facts(world=None, trained=True, given=""):
    model = nn.Linear(2, 2)
    optimizers = (optimizer_traits(SGD(model.parameters(), 0.1), [model]),) if trained else ()
    made = Facts(Machine(ACCELERATOR, "", False, "", False, False), traits([model]), optimizers=optimizers, world=world)
    return replace(made, traits=replace(made.traits, given=given))


@pytest.mark.parametrize(("world", "options", "wish", "choice", "why"), [
    (None, {}, "auto", "off", "one process"),
    (World(0, 1, 0), {}, "auto", "off", "one process"),
    (World(0, 1, 0), {}, True, "on", "rank 0 of 1"),
    (World(3, 4, 3), {}, "auto", "on", "rank 3 of 4; gradients are averaged once an update"),
    (World(3, 4, 3), {}, False, "off", "not asked for"),
    (World(3, 4, 3), {}, None, "off", "not asked for"),
    (World(3, 4, 3), {"trained": False}, "auto", "off", "no optimizer"),
    (World(3, 4, 3), {"given": "fully_shard"}, "auto", "as it is", "rank 3 of 4; the model is under fully_shard already"),
], ids=str)  # fmt: skip
def test_decisions(world, options, wish, choice, why):
    decision = ddp.decide(facts(world, **options), wish)
    assert decision.choice == choice
    assert why in decision.why
    assert not torch.distributed.is_initialized(), "deciding changes nothing"


@pytest.mark.parametrize(("count", "local", "device"), [(4, 3, "cuda:3"), (8, 0, "cuda:0"), (1, 3, "cuda:0")])
def test_each_process_has_the_accelerator_of_its_local_rank(monkeypatch, count, local, device):
    """A launcher may show each process one accelerator alone, which is then number 0."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    found, why = placement.resolve(facts(World(11, 16, local)), "auto")
    assert str(found) == device
    assert "LOCAL_RANK" in why


def test_more_ranks_than_accelerators_raise(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"rank 6: LOCAL_RANK=2, and this machine has 2 accelerators.*--nproc-per-node 2.*device='cpu'"
    ):
        placement.resolve(facts(World(6, 8, 2)), "auto")


def test_ranks_on_the_same_accelerator_raise():
    _agreement.check_devices([("a", "gpu 0"), ("a", "gpu 1"), ("b", "gpu 0"), ("b", None), ("b", None)])
    with pytest.raises(ValueError, match="ranks 1 and 2 are on the same accelerator of a;"):
        _agreement.check_devices([("a", "gpu 0"), ("a", "gpu 1"), ("a", "gpu 1")])
