"""Placement: where the parameters are if that is an accelerator, else the accelerator, else the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hotloop import _facts, optimize, prefetch
from hotloop._facts import Facts, Machine, traits
from hotloop._parts import Parts
from hotloop.transforms import placement

CPU, META = torch.device("cpu"), torch.device("meta")


def machine(accelerator=None):
    return Machine(accelerator, str(accelerator or ""), False, "", False, False)


def facts(*models, accelerator=None):
    return Facts(machine(accelerator), traits(models))


def spread():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


# The meta device stands in for an accelerator.
@pytest.mark.parametrize(("make", "accelerator", "device", "why"), [
    (lambda: nn.Linear(2, 2), None, CPU, "no accelerator"),
    (lambda: nn.Linear(2, 2), META, META, "accelerator of this machine"),
    (lambda: nn.Linear(2, 2, device="meta"), None, META, "parameters are there"),
    (lambda: nn.Linear(2, 2, device="meta"), META, META, "parameters are there"),
    (lambda: nn.BatchNorm1d(2, affine=False, device="meta"), None, META, "parameters are there"),
    (lambda: nn.ReLU(), None, CPU, "no accelerator"),
    (lambda: nn.ReLU(), META, META, "accelerator of this machine"),
    (lambda: nn.LazyLinear(2), META, META, "accelerator of this machine"),
], ids=["host", "accelerator", "there", "there already", "buffers", "nothing", "nothing, accelerator", "lazy"])  # fmt: skip
def test_auto(make, accelerator, device, why):
    decision = placement.decide(facts(make(), accelerator=accelerator), "auto")
    assert decision.choice == str(device)
    assert why in decision.why


@pytest.mark.parametrize("wish", ["cpu", CPU, "meta", META])
@pytest.mark.parametrize("accelerator", [None, META])
def test_a_wish_is_obeyed(wish, accelerator):
    decision = placement.decide(facts(nn.Linear(2, 2), accelerator=accelerator), wish)
    assert decision.choice == str(torch.device(wish))
    assert decision.why == "asked for"


def test_a_model_that_is_spread_stays_as_it_is():
    model = spread()
    decision = placement.decide(facts(model, accelerator=META), "auto")
    parts = decision.apply(Parts(model))
    assert decision.choice == "as it is"
    assert "cpu, meta" in decision.why
    assert [p.device.type for p in model.parameters()] == ["cpu", "cpu", "meta", "meta"]
    assert parts.device == META


def test_a_spread_model_goes_where_it_is_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].to("meta")
    wrapped = optimize(model, device="meta")
    assert {p.device for p in model.parameters()} == {META}
    assert wrapped.device == META


def test_the_device_is_compared_with_its_index():
    """`cuda` and `cuda:0` are one device; the parts hold what a tensor there reports."""
    device, _ = placement.resolve(facts(nn.ReLU()), "cpu")
    assert device == torch.empty(0).device


def test_what_is_there_already_is_not_touched():
    model = nn.Linear(2, 2)
    before = [(id(p), p._version) for p in model.parameters()]
    optimize(model)
    assert [(id(p), p._version) for p in model.parameters()] == before


def test_parameters_and_buffers_move_and_the_optimizer_follows():
    """D1."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    wrapped, _ = optimize(model, optimizer, nn.MSELoss(), device="meta")
    assert {t.device for t in model.state_dict().values()} == {META}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert {optimizer.state[p]["exp_avg"].device for p in model.parameters()} == {META}
    assert wrapped.device == META


def test_autocast_is_for_the_device():
    model = optimize(nn.Linear(2, 2), device="meta", precision="bf16")
    assert model._self_live.parts.autocast.device_type == "meta"


def test_on_this_machine():
    """The plan of a plain call tells where the model is and why."""
    model, step = optimize(net := nn.Linear(2, 2), torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss())
    expected = _facts.machine().accelerator or CPU
    assert step.plan["placement"].choice.split(":")[0] == expected.type
    assert model.device.type == expected.type


@pytest.mark.simgpu
@pytest.mark.parametrize(
    ("rank", "count", "index"), [("3", 8, 3), ("0", 8, 0), ("3", 1, 0), ("3", 2, 0), ("x", 8, 0), ("", 8, 0), (None, 8, 0)]
)
def test_a_process_that_a_launcher_started_has_an_accelerator_of_its_own_also_alone(monkeypatch, rank, count, index):
    """With distributed=False, for inference, and for a loader that names no device; a launcher may show it one alone."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert optimize(nn.ReLU()).device == torch.device("simgpu", index)
    assert f"'simgpu:{index}'" in repr(prefetch([]))


@pytest.mark.simgpu
def test_a_device_that_the_user_has_made_current_is_kept(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(placement, "usable", lambda device, call: torch.device("simgpu", 5))
    assert placement.resolve(facts(nn.ReLU(), accelerator=torch.device("simgpu")), "auto")[0].index == 5
