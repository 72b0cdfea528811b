"""The plan: it prints, it reads as data, and it shows what was done."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn

from hotloop import Plan, optimize
from hotloop._parts import Parts
from hotloop._plan import Decision, apply, revert


@pytest.fixture
def plan():
    return Plan([Decision("placement", "cpu", "there is no accelerator"), Decision("precision", "fp32", "asked for")])


def test_it_prints_a_table(plan):
    assert str(plan).splitlines() == [
        "           choice  why",
        "placement  cpu     there is no accelerator",
        "precision  fp32    asked for",
    ]


def test_it_reads_as_data(plan):
    assert plan.as_dict() == {
        "placement": {"choice": "cpu", "why": "there is no accelerator"},
        "precision": {"choice": "fp32", "why": "asked for"},
    }
    assert list(plan.as_dict()) == ["placement", "precision"]


def test_what_it_hands_out_is_a_copy(plan):
    plan.as_dict()["placement"]["choice"] = "changed"
    assert plan["placement"].choice == "cpu"


def test_it_iterates_and_indexes(plan):
    assert [d.name for d in plan] == ["placement", "precision"]
    assert len(plan) == 2
    assert plan["precision"].why == "asked for"
    with pytest.raises(KeyError):
        plan["nothing"]


def test_its_repr_is_short(plan):
    assert repr(plan) == "Plan(placement=cpu, precision=fp32)"


def test_a_notebook_shows_it_escaped():
    shown = Plan([Decision("precision", "fp32", "RuntimeError: <unset> & 'x'")])._repr_html_()
    assert shown.startswith("<table>")
    assert "&lt;unset&gt; &amp;" in shown
    assert "<unset>" not in shown
    assert shown.count("<tr>") == 2


def test_an_empty_plan_prints():
    assert str(Plan([])).split() == ["choice", "why"]


def test_a_new_decision_takes_the_place_of_the_old_one(plan):
    plan.record(Decision("placement", "meta", "moved"))
    plan.record(Decision("scheduler", "StepLR", "once per update"))
    assert [d.name for d in plan] == ["placement", "precision", "scheduler"]
    assert plan["placement"].choice == "meta"


def test_a_decision_cannot_be_changed(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan["placement"].choice = "other"


def traced(name, log, *, fails=False):
    def on_apply(parts):
        log.append(f"apply {name}")
        if fails:
            raise RuntimeError(name)
        return replace(parts, autocast=replace(parts.autocast, device_type=name))

    def on_revert(parts):
        log.append(f"revert {name}")
        return parts

    return Decision(name, "on", "why", on_apply, on_revert)


def test_decisions_are_applied_in_order_and_reverted_backwards():
    log = []
    decisions = [traced("a", log), traced("b", log)]
    parts = apply(decisions, Parts(nn.Linear(1, 1)))
    assert parts.autocast.device_type == "b"
    revert(decisions, parts)
    assert log == ["apply a", "apply b", "revert b", "revert a"]


def test_one_that_fails_is_undone_with_those_before_it():
    log = []
    with pytest.raises(RuntimeError, match="b"):
        apply([traced("a", log), traced("b", log, fails=True), traced("c", log)], Parts(nn.Linear(1, 1)))
    assert log == ["apply a", "apply b", "revert b", "revert a"]


def test_a_decision_without_an_effect_leaves_the_parts():
    parts = Parts(nn.Linear(1, 1))
    assert apply([Decision("x", "off", "why")], parts) is parts
    assert revert([Decision("x", "off", "why")], parts) is parts


def test_the_plan_of_a_step_names_every_transform_with_a_reason():
    raw = nn.Linear(4, 2)
    _, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), nn.MSELoss())
    assert {"placement", "precision", "cudnn_benchmark"} <= set(step.plan.as_dict())
    assert all(entry["choice"] and entry["why"] for entry in step.plan.as_dict().values())


def test_the_plan_names_the_scheduler_and_what_else_the_optimizer_trains():
    """A per-epoch schedule is the user's to step; a parameter of no given model is named."""
    raw, alpha = nn.Linear(4, 2), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*raw.parameters(), alpha], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    _, step = optimize(raw, optimizer, nn.MSELoss(), scheduler=scheduler)
    assert step.plan["scheduler"].choice == "StepLR"
    assert "once per update" in step.plan["scheduler"].why
    assert "(3,)" in step.plan["other parameters"].why


def test_a_copy_goes_its_own_way():
    plan = Plan([Decision("a", "on", "why")])
    made = copy.copy(plan)
    assert made.as_dict() == plan.as_dict()
    made.record(Decision("a", "off", "why not"))
    plan.record(Decision("b", "on", "why"))
    assert [(d.name, d.choice) for d in plan] == [("a", "on"), ("b", "on")]
    assert [(d.name, d.choice) for d in made] == [("a", "off")]


def test_plans_of_two_models_are_their_own():
    one, two = (
        optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss()).step.plan
        for net in (nn.Linear(4, 2), nn.Conv2d(1, 1, 1))
    )
    assert one["cudnn_benchmark"].choice == "off"
    assert two["cudnn_benchmark"].choice == "by shape"
