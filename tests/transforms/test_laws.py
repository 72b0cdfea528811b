"""One table of laws, run over every transform."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from hotloop import _facts, _plan
from hotloop._facts import Facts, Machine, traits
from hotloop._parts import Parts
from hotloop.transforms import TRANSFORMS

CPU, META = torch.device("cpu"), torch.device("meta")

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
    "wide": lambda: nn.Linear(512, 512),
    "convnet": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "volume": lambda: nn.Conv3d(1, 1, 1),
    "lstm": lambda: nn.LSTM(2, 2),
    "half": lambda: nn.Linear(2, 2).half(),
    "bfloat16": lambda: nn.Linear(2, 2).bfloat16(),
    "double": lambda: nn.Linear(2, 2).double(),
    "mixed": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()),
    "spread": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
    "lazy": lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()),
    "empty": lambda: nn.Sequential(),
}

# The meta device stands in for an accelerator: tensors can be made on it.
MACHINES = [
    Machine(accelerator, "", bf16, units, benchmark, deterministic)
    for accelerator, bf16, units, benchmark, deterministic in itertools.product(
        (None, META), (False, True), ("", "AMX"), (False, True), (False, True)
    )
]
DEVICES = [CPU, META, torch.device("cuda", 0), torch.device("mps")]
SCALERS = [None, torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)]

WISHES = {
    "device": ["auto", "cpu", CPU, "meta"],
    "precision": ["auto", "fp32", "bf16", "fp16"],
    "channels_last": ["auto", True, False],
    "fused": ["auto", True, False],
    "cudnn_benchmark": ["auto", True, False, None],
    "compile": [False],
    "distributed": ["auto", False],
}
each = pytest.mark.parametrize(("name", "decide"), TRANSFORMS, ids=[name for name, _ in TRANSFORMS])


def situations(model):
    """Every combination of machine, device and wishes around one model."""
    found = traits([model])
    for machine, device, exact, closure in itertools.product(MACHINES, DEVICES, (False, True), (False, True)):
        yield Facts(machine, found, device=device, exact=exact, closure=closure)


def state():
    cudnn = torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.deterministic, cudnn.enabled, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return torch.get_rng_state().tolist(), flags


@each
@pytest.mark.parametrize("model", MODELS)
def test_an_automatic_choice_never_raises_and_has_a_reason(model, name, decide):
    """Nor does it look like a wish."""
    for facts in situations(MODELS[model]()):
        decision = decide(facts, "auto" if "auto" in WISHES[name] else WISHES[name][0])
        assert decision.name
        assert decision.choice
        assert len(decision.why) > 8
        assert decision.why != "asked for"
        assert "\n" not in decision.choice + decision.why


@each
@pytest.mark.parametrize("scaler", SCALERS, ids=["no scaler", "a scaler", "a disabled scaler"])
def test_a_decision_depends_on_facts_and_wish_alone(name, decide, scaler):
    """Asked twice it answers the same, and asking changes nothing."""
    some = [replace(facts, scaler=scaler) for facts in situations(MODELS["convnet"]())][::7]
    before = state()
    for wish, facts in itertools.product(WISHES[name], some):
        kept = copy.copy(facts)
        assert answer(decide, facts, wish) == answer(decide, facts, wish)
        assert facts == kept
    assert state() == before


def answer(decide, facts, wish):
    """The choice and its reason, or the text of the refusal."""
    try:
        decision = decide(facts, wish)
    except ValueError as error:
        return "", str(error)
    return decision.choice, decision.why


@each
@pytest.mark.parametrize("model", MODELS)
def test_an_explicit_wish_is_obeyed_or_raises_naming_the_argument(model, name, decide):
    for wish, facts in itertools.product([w for w in WISHES[name] if w != "auto"], situations(MODELS[model]())):
        choice, text = answer(decide, facts, wish)
        if choice:
            assert choice == {True: "on", False: "off", None: "off"}.get(wish, str(wish))
        else:
            assert f"{name}={wish!r}" in text


@each
@pytest.mark.parametrize("wish", [object(), "nonsense", 1.5, (), b"auto"], ids=str)
def test_a_wish_that_is_none_raises_naming_the_argument(name, decide, wish):
    with pytest.raises((ValueError, TypeError), match=f"{name}="):
        decide(Facts(_facts.machine(), traits([MODELS["mlp"]()])), wish)


@each
def test_exact_changes_no_bit_by_itself(name, decide):
    allowed = {"device": {"cpu", "meta", "as it is"}, "precision": {"fp32", "as it is"}, "cudnn_benchmark": {"off", "as it is"}}
    for model in MODELS.values():
        for facts in situations(model()):
            if facts.exact:
                wish = "auto" if "auto" in WISHES[name] else WISHES[name][0]
                assert decide(facts, wish).choice in allowed.get(name, {"off", "as it is"})


def fields(parts):
    """What parts hold, to compare: a scaler by what it does."""
    return {**vars(parts), "scaler": (parts.scaler.is_enabled(), parts.scaler.state_dict())}


def tensors(module):
    return [(id(t), t.device, t.dtype, t.stride(), t._version) for t in module.state_dict(keep_vars=True).values()]


@each
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("model", ["mlp", "wide", "convnet", "bfloat16"])
def test_to_apply_and_revert_leaves_everything_as_it_was(model, exact, name, decide):
    for wish, machine in itertools.product([w for w in WISHES[name] if w != "meta"], MACHINES):
        module = MODELS[model]()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        machine = replace(machine, accelerator=None)
        try:
            decision = decide(Facts(machine, traits([module]), exact=exact), wish)
        except ValueError:
            continue
        parts, flags, groups = Parts(module, (optimizer,)), state(), copy.deepcopy(optimizer.state_dict())
        before, there = fields(parts), tensors(module)
        reverted = _plan.revert([decision], _plan.apply([decision], parts))
        assert fields(reverted) == before
        assert tensors(module) == there
        assert optimizer.state_dict() == groups
        assert state() == flags


@each
def test_applying_changes_neither_the_flags_nor_the_parts_that_it_was_given(name, decide):
    """Parts are frozen, and flags are written around calls only."""
    module = MODELS["convnet"]()
    before, parts = state(), Parts(module)
    kept = fields(parts)
    for wish in WISHES[name]:
        facts = Facts(_facts.machine(), traits([module]))
        if wish != "meta" and answer(decide, facts, wish)[0]:
            decide(facts, wish).apply(parts)
    assert fields(parts) == kept
    assert state() == before


def test_the_names_are_those_of_the_arguments_and_distinct():
    from hotloop import optimize

    names = [name for name, _ in TRANSFORMS]
    assert len(set(names)) == len(names)
    assert set(names) <= set(optimize.__kwdefaults__)
    decisions = [decide(Facts(_facts.machine(), traits([nn.ReLU()])), WISHES[name][0]) for name, decide in TRANSFORMS]
    assert len({d.name for d in decisions}) == len(decisions)
