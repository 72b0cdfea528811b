"""Facts: what the machine can do and what the models are made of, as plain data."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from hotloop import _facts, optimize
from hotloop._facts import Facts, machine, traits
from hotloop._optimizer_traits import needs_closure
from observing import Operators


def test_the_machine_without_an_accelerator():
    found = machine()
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    assert found.accelerator is None
    assert found.accelerator_name == ""
    assert not found.accelerator_bf16


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")], ids=repr)
def test_a_model_that_stays_on_the_cpu_does_not_initialise_cuda(monkeypatch, device):
    """Workers that are forked later could not use it any more."""

    def refuse(*_):
        raise AssertionError("asked")

    monkeypatch.setattr(_facts, "accelerator", lambda: torch.device("cuda"))
    for name in ("_lazy_init", "get_device_name", "get_device_properties", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    net = nn.Linear(2, 2)
    _, step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss(), device=device)
    assert step(torch.ones(3, 2), torch.ones(3, 2))["loss"] > 0
    assert optimize(nn.Linear(2, 2), device=device).device.type == "cpu"


@pytest.mark.parametrize("flag", ["benchmark", "deterministic"])
def test_the_machine_sees_the_users_flags(flag):
    assert not getattr(machine(), {"benchmark": "cudnn_benchmark"}.get(flag, flag))
    setattr(torch.backends.cudnn, flag, True)
    try:
        assert getattr(machine(), {"benchmark": "cudnn_benchmark"}.get(flag, flag))
    finally:
        setattr(torch.backends.cudnn, flag, False)


def test_the_machine_sees_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        assert machine().deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("amx", "avx512", "units"), [
    (False, False, ""), (False, True, "AVX512-BF16"), (True, True, "AMX"), (True, False, "AMX"),
])  # fmt: skip
def test_the_units_of_the_cpu(monkeypatch, amx, avx512, units):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    assert machine().cpu_16bit == units


def test_a_torch_without_the_question_has_no_units(monkeypatch):
    for probe in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, probe, raising=False)
    assert machine().cpu_16bit == ""


@pytest.mark.parametrize(("layer", "dimensions"), [
    (nn.Conv1d(1, 1, 1), 1), (nn.Conv2d(1, 1, 1), 2), (nn.Conv3d(1, 1, 1), 3),
    (nn.ConvTranspose1d(1, 1, 1), 1), (nn.ConvTranspose2d(1, 1, 1), 2), (nn.ConvTranspose3d(1, 1, 1), 3),
    (nn.LazyConv2d(1, 1), 2), (type("Mine", (nn.Conv2d,), {})(1, 1, 1), 2),
])  # fmt: skip
def test_convolutions(layer, dimensions):
    assert traits([nn.Sequential(nn.Identity(), nn.Sequential(layer))]).convolutions == {dimensions}


def test_a_model_without_convolutions():
    assert traits([nn.Linear(2, 2)]).convolutions == frozenset()


@pytest.mark.parametrize(("layer", "has"), [(nn.LSTM(2, 2), True), (nn.LSTMCell(2, 2), True), (nn.GRU(2, 2), False)])
def test_lstm(layer, has):
    assert traits([nn.Sequential(layer)]).lstm is has


@pytest.mark.parametrize(("layer", "trait", "has"), [
    (nn.RNN(2, 2), "recurrent", True), (nn.GRU(2, 2), "recurrent", True), (nn.RNNCell(2, 2), "recurrent", True),
    (nn.GRUCell(2, 2), "recurrent", True), (nn.LSTM(2, 2), "recurrent", False), (nn.LSTMCell(2, 2), "lstm_cells", True),
    (nn.LSTM(2, 2), "lstm_cells", False),
    (nn.Conv2d(8, 8, 3, groups=8), "depthwise", True), (nn.Conv1d(8, 16, 3, groups=8), "depthwise", True),
    (nn.Conv2d(8, 8, 3, groups=4), "depthwise", False), (nn.Conv2d(1, 8, 3), "depthwise", False),
    (nn.LazyConv2d(8, 3), "depthwise", False),
    (nn.Embedding(9, 128), "ids", "token"), (nn.Embedding(9, 8), "ids", "column"), (nn.EmbeddingBag(9, 128), "ids", "column"),
    (nn.ModuleList([nn.Embedding(9, 128), nn.EmbeddingBag(9, 128)]), "ids", "column"), (nn.Linear(2, 2), "ids", ""),
])  # fmt: skip
def test_what_decides_about_16_bits(layer, trait, has):
    assert getattr(traits([nn.Sequential(layer)]), trait) == has


def test_devices_and_dtypes_include_every_model():
    one, two = nn.Linear(2, 2), nn.BatchNorm1d(2, device="meta", dtype=torch.float64)
    found = traits([one, two])
    assert found.devices == {torch.device("cpu"), torch.device("meta")}
    assert found.floats == {torch.float32, torch.float64}


def test_a_shared_parameter_counts_once():
    one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    two.weight = one.weight
    assert traits([one, two]).parameters == traits([nn.ModuleList([one, one])]).parameters == 9


@pytest.mark.parametrize(("layer", "share"), [
    (nn.Linear(512, 512, bias=False), 1.0), (nn.Linear(511, 1000, bias=False), 0.0), (nn.Linear(1000, 10, bias=False), 0.0),
    (nn.Conv2d(32, 32, 1, bias=False), 1.0), (nn.Conv2d(31, 64, 1, bias=False), 0.0), (nn.Conv2d(4, 32, 3, bias=False), 1.0),
    (nn.BatchNorm1d(1000), 0.0),
])  # fmt: skip
def test_the_share_of_wide_layers(layer, share):
    assert traits([layer]).wide == share


def tokens(*, head=512, **convolution):
    return nn.Sequential(nn.Conv2d(3, 128, **{"kernel_size": (4, 2), "stride": (4, 2), **convolution}), nn.Linear(head, 128))


@pytest.mark.parametrize(("module", "patch"), [
    (tokens(), (4, 2)), (tokens(padding="valid"), (4, 2)), (tokens(head=513), None), (tokens(kernel_size=4), None),
    (tokens(padding=1), None), (tokens(kernel_size=1, stride=1), None), (nn.Sequential(tokens(), tokens()), None),
    (nn.ConvTranspose2d(3, 128, 4, 4), None), (nn.Linear(512, 128), None),
])  # fmt: skip
def test_patches_that_become_tokens(module, patch):
    assert traits([module]).patch == patch


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("module", [
    pytest.param(lambda: nn.Linear(4, 0), id="no outputs"), pytest.param(lambda: nn.Linear(0, 4), id="no inputs"),
    pytest.param(lambda: nn.Sequential(), id="no layers"), pytest.param(lambda: nn.LazyLinear(3), id="lazy"),
    pytest.param(lambda: nn.LazyBatchNorm2d(), id="lazy buffers"), pytest.param(lambda: nn.Conv2d(1, 1, 0), id="empty kernel"),
    pytest.param(lambda: nn.ParameterList([torch.zeros(0, 3), torch.tensor(1.0)]), id="odd shapes"),
])  # fmt: skip
def test_unusual_parameters_are_no_obstacle(module):
    found = traits([module()])
    assert 0.0 <= found.wide <= 1.0


def test_looking_at_a_model_reads_and_copies_nothing():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.LazyLinear(10))
    with Operators() as operators:
        traits([model])
    assert not [op for op in operators.seen if op != "aten.select.int"]


@pytest.mark.parametrize(("make", "needs"), [
    (torch.optim.LBFGS, True), (torch.optim.SGD, False), (torch.optim.Adam, False), (torch.optim.SparseAdam, False),
])  # fmt: skip
def test_which_optimizers_need_a_closure(make, needs):
    """O4: by the signature, so that a user's own optimizer is known as well."""
    assert needs_closure(make([nn.Parameter(torch.ones(1))], lr=0.1)) is needs


def test_a_scheduler_on_it_does_not_hide_that():
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(1))])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert needs_closure(optimizer)


def test_a_users_own_optimizer():
    class Needs(torch.optim.SGD):
        def step(self, closure):
            return super().step(closure)

    class Without(torch.optim.SGD):
        def step(self):
            return super().step()

    assert needs_closure(Needs([nn.Parameter(torch.ones(1))], lr=0.1))
    assert not needs_closure(Without([nn.Parameter(torch.ones(1))], lr=0.1))


def test_facts_are_plain_frozen_data():
    facts = Facts(machine(), traits([nn.Linear(2, 2)]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.exact = True
    assert facts == Facts(machine(), traits([nn.Linear(2, 2)]))


def test_nothing_is_remembered_between_models():
    assert _facts.traits([nn.Conv2d(1, 1, 1)]).convolutions
    assert not _facts.traits([nn.Linear(1, 1)]).convolutions
