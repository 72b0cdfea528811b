"""Precision: 16 bits where the hardware gains from them, a scaler exactly with float16, and a way back."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop import _facts, optimize
from hotloop._facts import Facts, Machine, traits
from hotloop.transforms import precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDTH, ROWS = 600, 32
X, Y = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH), torch.arange(ROWS) % 2


def machine(*, bf16=False, units=""):
    return Machine(CUDA, "H9", bf16, units, False, False)


def facts(model=None, device=CPU, *, bf16=False, units="", **more):
    return Facts(machine(bf16=bf16, units=units), traits([nn.Linear(512, 512) if model is None else model]), device, **more)


def choice(*args, wish="auto", **more):
    decision = precision.decide(facts(*args, **more), wish)
    return decision.choice, decision.why


@pytest.fixture
def amx(monkeypatch):
    """A CPU with 16-bit units, on which bfloat16 is chosen by itself. Any CPU computes what such a one does."""
    monkeypatch.setattr(_facts, "_cpu_16bit", lambda: "AMX")


# --- the automatic choice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "expected", "why"), [
    ({"device": CUDA, "bf16": True}, "bf16", "H9 has native bfloat16.*4e-3"),
    ({"device": CUDA}, "fp16", "H9 has float16 kernels.*5e-4"),
    ({"device": CUDA, "closure": True}, "fp32", "float16 scaling does not allow"),
    ({"device": CUDA, "model": nn.Linear(2, 2, dtype=torch.complex64)}, "fp32", "complex parameters, which float16 scaling"),
    ({"device": CUDA, "bf16": True, "closure": True}, "bf16", "native bfloat16"),
    ({"device": CUDA, "bf16": True, "exact": True}, "fp32", "exact=True"),
    ({"device": torch.device("mps")}, "fp32", "mps.*precision='bf16' asks"),
    ({}, "fp32", "no 16-bit units"),
    ({"units": "AMX"}, "bf16", "AMX units.*at least 32 tokens, patches or samples.*4e-3"),
    ({"units": "AMX", "model": nn.Conv2d(32, 32, 3)}, "bf16", "AMX units of this CPU; rounds.*4e-3"),
    ({"units": "AMX", "model": nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 64, 1))}, "fp32", "depthwise.*AMX"),
    ({"units": "AMX", "model": nn.RNN(512, 512)}, "fp32", "RNN or a GRU.*AMX"),
    ({"units": "AMX", "model": nn.GRU(128, 128)}, "fp32", "RNN or a GRU.*AMX"),
    ({"units": "AMX", "model": nn.Sequential(nn.GRUCell(128, 128), nn.Linear(512, 512))}, "fp32", "RNN or a GRU"),
    ({"units": "AMX", "model": nn.LSTM(128, 128)}, "bf16", "AMX units.*at least 16 sequences"),
    ({"units": "AMX", "model": nn.LSTM(512, 512)}, "bf16", "AMX units.*at least 16 sequences"),
    ({"units": "AMX", "model": nn.LSTMCell(128, 128)}, "bf16", "AMX units.*at least 32 sequences"),
    ({"device": CUDA, "bf16": True, "model": nn.GRU(128, 128)}, "bf16", "native bfloat16"),
    ({"units": "AVX512-BF16"}, "bf16", "AVX512-BF16 units"),
    ({"units": "AMX", "exact": True}, "fp32", "exact=True"),
    ({"units": "AMX", "model": nn.Linear(8, 8)}, "fp32", "too small"),
    ({"units": "AMX", "model": nn.Linear(128, 128)}, "bf16", "AMX units.*at least 512 tokens, patches or samples"),
    ({"units": "AMX", "model": nn.Sequential(nn.Embedding(128, 128), nn.Linear(128, 8))}, "fp32", "too small"),
    ({"units": "AMX", "model": nn.Linear(512, 512).double()}, "as it is", "float64 parameters"),
    ({"device": CUDA, "bf16": True, "model": nn.Linear(2, 2).half()}, "as it is", "float16 parameters"),
    ({"device": CUDA, "bf16": True, "model": nn.Linear(2, 2).bfloat16()}, "as it is", "bfloat16 parameters"),
], ids=str)  # fmt: skip
def test_auto(given, expected, why):
    """A23, A24: a CPU without units stays in float32."""
    got, reason = choice(**given)
    assert got == expected
    assert re.search(why, reason)


def test_on_this_machine():
    """A23: the default keeps float32 where the CPU has no 16-bit units."""
    if _facts.machine().accelerator is None and not _facts.machine().cpu_16bit:
        seen = []
        raw = nn.Linear(512, 512)
        raw.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        optimize(raw)(torch.ones(1, 512))
        assert seen == [torch.float32]


@pytest.mark.parametrize("wish", ["bf16", "fp16"])
def test_an_explicit_wish_on_a_cpu_without_units_is_obeyed_with_its_cost_in_the_plan(wish):
    got, why = choice(wish=wish)
    assert got == wish
    assert "ten times slower" in why


@pytest.mark.parametrize("wish", ["fp32", "bf16", "fp16"])
def test_an_explicit_wish_elsewhere_is_obeyed(wish):
    assert choice(device=CUDA, wish=wish) == (wish, "asked for")
    assert choice(units="AMX", wish=wish) == (wish, "asked for")


@pytest.mark.parametrize("wish", ["fp32", "auto"])
def test_an_lstm_is_fine_in_float32(wish):
    assert choice(nn.LSTM(2, 2), wish=wish)[0] == "fp32"


def test_an_lstm_in_16_bits_where_there_are_units():
    assert choice(nn.LSTM(2, 2), units="AMX", wish="bf16")[0] == "bf16"


# --- linear layers: only with enough rows -------------------------------------------------------------------------------


class Narrow(nn.Module):
    """Keeps the dtype that its linear layer gives."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 128), nn.Linear(128, 128)

    def forward(self, x):
        h = x if x.is_floating_point() else self.table(x)
        h = self.layer(h)
        self.seen = h.dtype
        return h


CALLS = {
    "features": lambda rows: torch.ones(rows, 128),
    "sequences": lambda rows: torch.ones(rows // 4, 4, 128),
    "tokens": lambda rows: torch.ones(rows // 4, 4, dtype=torch.long),
    "one sequence of tokens": lambda rows: torch.ones(rows, dtype=torch.int32),
}


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_narrow_layers_run_in_16_bits_when_they_see_many_rows(kind, named, training):
    model = optimize(Narrow(), device="cpu").train(training)
    for rows, expected in [(512, torch.bfloat16), (508, torch.float32), (1024, torch.bfloat16)]:
        x = CALLS[kind](rows)
        out = model(x=x) if named else model(x)
        assert model.seen == expected
        assert out.dtype == torch.float32


@pytest.mark.usefixtures("amx")
def test_where_the_rows_are_not_known_narrow_layers_stay_in_float32():
    model = optimize(Narrow(), device="cpu")
    model(torch.ones(8, 8, 16, 128))
    assert model.seen == torch.float32


class Patches(nn.Module):
    """As a vision transformer begins; keeps the dtype that its linear layers give."""

    def __init__(self):
        super().__init__()
        self.cut, self.layers = nn.Conv2d(3, 128, 8, 8), nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))

    def forward(self, x):
        h = self.layers(self.cut(x).flatten(2).transpose(1, 2))
        self.seen = h.dtype
        return h


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(("images", "expected"), [
    ((32, 3, 32, 39), torch.bfloat16), ((31, 3, 32, 39), torch.float32),
    ((3, 256, 128), torch.bfloat16), ((3, 248, 128), torch.float32),
], ids=str)  # fmt: skip
def test_patches_of_images_are_rows(images, expected):
    """Those of an image without a batch too."""

    class Cuts(Patches):
        def forward(self, x):
            return super().forward(x if x.dim() == 4 else x[None])

    model = optimize(Cuts(), device="cpu").eval()
    model(torch.ones(*images))
    assert model.seen == expected


class Sees(nn.Module):
    """Has these layers, and keeps the dtype that a linear layer gives in a call."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.probe = nn.ModuleList(layers), nn.Linear(1, 1)

    def forward(self, x):
        self.seen = self.probe(torch.ones(1, 1)).dtype
        return x


def wide():
    return nn.Linear(512, 512)


def narrow():
    return nn.Linear(128, 128)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("layers", "enough", "too_few"), [
    pytest.param([wide], torch.zeros(32, 512), torch.zeros(31, 512), id="wide"),
    pytest.param([wide], torch.zeros(2, 16, 512), torch.zeros(1, 16, 512), id="wide, sequences"),
    pytest.param([wide], torch.zeros(32, 1, 16, 32), torch.zeros(31, 1, 16, 32), id="wide, images made flat"),
    pytest.param([wide], torch.zeros(32, 512), torch.zeros(512), id="wide, one sample"),
    pytest.param([wide], torch.zeros(32, 512), torch.zeros(32, 1, 28, 28, dtype=torch.uint8), id="images of bytes"),
    pytest.param([wide], torch.zeros(32, 512), torch.zeros(64, 512, dtype=torch.bool), id="a mask"),
    pytest.param([wide], torch.zeros(32, 512), torch.zeros(64, 512, dtype=torch.long), id="integers without a table"),
    pytest.param([lambda: nn.Conv2d(32, 512, 3)], torch.zeros(1, 32, 8, 8), None, id="convolutions"),
    pytest.param([lambda: nn.Conv2d(3, 8, 3), narrow], torch.zeros(512, 128), torch.zeros(512, 3, 8, 8), id="few convolutions"),
    pytest.param([narrow, lambda: nn.Embedding(9, 128)], torch.zeros(8, 64, dtype=torch.int), torch.zeros(8, 63, dtype=torch.int),
                 id="tokens"),
    pytest.param([narrow, lambda: nn.Embedding(9, 8)], torch.zeros(512, 9, dtype=torch.int), torch.zeros(511, 9, dtype=torch.int),
                 id="columns"),
    pytest.param([narrow, lambda: nn.EmbeddingBag(9, 128)], torch.zeros(512, 9, dtype=torch.long),
                 torch.zeros(511, 9, dtype=torch.long), id="bags"),
    pytest.param([narrow, lambda: nn.EmbeddingBag(9, 128)], torch.zeros(512, 1, dtype=torch.long),
                 torch.zeros(900, dtype=torch.long), id="bags with offsets"),
    pytest.param([lambda: nn.LSTM(128, 128)], torch.zeros(16, 600, 128), torch.zeros(15, 600, 128), id="LSTM, batch first"),
    pytest.param([lambda: nn.LSTM(128, 128)], torch.zeros(600, 16, 128), torch.zeros(600, 1, 128), id="LSTM, time first"),
    pytest.param([lambda: nn.LSTM(512, 512)], torch.zeros(24, 32, 512), torch.zeros(600, 512), id="LSTM, one sequence"),
    pytest.param([lambda: nn.LSTM(128, 128), lambda: nn.Embedding(9, 128)], torch.zeros(16, 50, dtype=torch.long),
                 torch.zeros(8, 500, dtype=torch.long), id="LSTM, tokens"),
    pytest.param([lambda: nn.LSTMCell(128, 128)], torch.zeros(32, 50, 128), torch.zeros(31, 50, 128), id="LSTM cells"),
])  # fmt: skip
def test_a_call_runs_in_16_bits_when_its_layers_see_enough_rows(layers, enough, too_few, training):
    model = optimize(Sees(*(make() for make in layers)), device="cpu", cudnn_benchmark=False).train(training)
    model(enough)
    assert model.seen == torch.bfloat16
    if too_few is not None:
        model(too_few)
        assert model.seen == torch.float32


@pytest.mark.usefixtures("amx")
def test_a_step_in_16_bits_by_rows_trains_as_a_call_does():
    raw = Narrow()
    _, step = training(raw, lambda output, y: F.mse_loss(output, y))
    for rows, expected in [(600, torch.bfloat16), (8, torch.float32)]:
        x, y = torch.ones(rows, 128), torch.zeros(rows, 128)
        plain = F.mse_loss(raw(x), y).item()
        metrics = step(x, y)
        assert raw.seen == expected
        assert metrics["loss"] == pytest.approx(plain, rel=1e-2)


@pytest.mark.usefixtures("amx")
def test_an_explicit_wish_asks_for_no_rows():
    model = optimize(Narrow(), device="cpu", precision="bf16")
    model(torch.ones(1, 128))
    assert model.seen == torch.bfloat16


# --- the scaler ---------------------------------------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def training(raw, loss_fn=F.cross_entropy, **wishes):
    return optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), loss_fn, **wishes)


@pytest.mark.parametrize(("wish", "enabled"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_a_scaler_exactly_with_float16(wish, enabled):
    """A25."""
    _, step = training(net(), precision=wish)
    assert step.scaler.is_enabled() is enabled
    assert (step.scale == 1.0) is not enabled


def test_the_users_own_scaler_means_float16():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _, step = training(net(), scaler=scaler)
    assert step.scaler is scaler
    assert step.plan["precision"].choice == "fp16"
    step(X, Y)
    assert step.scale == 8.0


@pytest.mark.parametrize("wish", ["auto", "fp32", "bf16", "fp16"])
def test_a_users_disabled_scaler_is_taken_with_every_precision(wish):
    """Scripts write `GradScaler(enabled=use_amp)`, and save its state."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    _, step = training(net(), scaler=scaler, precision=wish)
    assert step.scaler is scaler
    step(X, Y)


def test_without_an_optimizer_there_is_none():
    model = optimize(net(), precision="fp16")
    assert not model._self_live.parts.scaler.is_enabled()
    assert model(X).dtype == torch.float32


# --- the way back -------------------------------------------------------------------------------------------------------


class Scatters(nn.Module):
    """Fails under autocast: its own zeros are float32, and the layer's output is not."""

    def __init__(self, fail=lambda h: torch.zeros(2, WIDTH).index_add_(0, Y, h)):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.fail, self.calls = fail, []

    def forward(self, x):
        h = self.layer(x)
        self.calls.append(h.dtype)
        return self.fail(self.drop(self.norm(h)).to(h.dtype))


def masked(h):
    out = torch.zeros(3, WIDTH)
    out[torch.tensor([True, False, True])] = h[:2]
    return out


FAILURES = {
    "index_add_": lambda h: torch.zeros(2, WIDTH).index_add_(0, Y, h),
    "scatter_add": lambda h: torch.zeros(3, WIDTH).scatter_add(0, Y[:, None].expand(ROWS, WIDTH), h),
    "masked assignment": masked,
    "lerp": lambda h: torch.zeros(ROWS, WIDTH).lerp(h, 0.5),
    "numpy": lambda h: h + torch.from_numpy(h.detach().numpy()),
}


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_under_an_automatic_choice_is_run_again_in_float32(amx, name, mode):
    raw = Scatters(FAILURES[name])
    twin = copy.deepcopy(raw)
    model, step = training(raw, lambda output, y: output.square().mean())
    assert step.plan["precision"].choice == "bf16"
    for net_ in (model, twin):
        net_.train(mode)
    torch.manual_seed(1)
    output = model(X)
    torch.manual_seed(1)
    expected = twin(X)
    assert torch.equal(output, expected)  # from the same random state
    assert torch.equal(raw.norm.running_mean, twin.norm.running_mean)  # and counted once
    assert torch.equal(raw.norm.num_batches_tracked, twin.norm.num_batches_tracked)
    model(X)
    assert raw.calls == [torch.bfloat16, torch.float32, torch.float32]
    assert step.plan["precision"].choice == "fp32"
    assert "taken back" in step.plan["precision"].why
    assert "Error" in step.plan["precision"].why


@pytest.mark.parametrize("name", FAILURES)
def test_so_does_a_step(amx, name):
    raw = Scatters(FAILURES[name])
    twin = copy.deepcopy(raw)
    _, step = training(raw, lambda output, y: output.square().mean())
    _, plain = training(twin, lambda output, y: output.square().mean(), precision="fp32")
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss = step(X, Y)["loss"]
        torch.manual_seed(seed)
        assert loss == plain(X, Y)["loss"]
    assert all(torch.equal(a, b) for a, b in zip(raw.state_dict().values(), twin.state_dict().values(), strict=True))
    assert step.plan["precision"].choice == "fp32"
    assert step.updates == 2


def test_a_copy_finds_the_way_back_as_well(amx):
    model = optimize(Scatters())
    made = copy.deepcopy(model)
    assert made(X).dtype == torch.float32
    assert model(X).dtype == torch.float32


def test_an_average_finds_the_way_back_as_well(amx):
    average = torch.optim.swa_utils.AveragedModel(optimize(Scatters()))
    assert average.eval()(X).dtype == torch.float32


def test_an_explicit_wish_is_not_taken_back(amx):
    raw = Scatters()
    model, step = training(raw, precision="bf16")
    with pytest.raises(RuntimeError, match="index_add_"):
        model(X)
    assert raw.calls == [torch.bfloat16]
    assert step.plan["precision"].choice == "bf16"


def test_the_users_own_error_is_the_users_own(amx):
    """It fails in float32 too: the precision stays, and the error is the one that the plain model gives."""

    class Fails(Scatters):
        def forward(self, x):
            super().forward(x)
            raise KeyError("mine")

    raw = Fails(lambda h: h)
    model, step = training(raw)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            model(X)
    assert step.plan["precision"].choice == "bf16"
    assert raw.calls[0] == torch.bfloat16
    assert raw.norm.num_batches_tracked <= 2


def test_a_batch_of_the_wrong_shape_does_not_cost_the_precision(amx):
    raw = net()
    model, step = training(raw)
    model(X)
    with pytest.raises(RuntimeError, match="shapes"):
        step(torch.zeros(ROWS, 7), Y)
    step(X, Y)
    assert step.plan["precision"].choice == "bf16"


def test_running_out_of_memory_is_no_reason(amx):
    raw = Scatters(lambda h: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    model, step = training(raw)
    with pytest.raises(torch.OutOfMemoryError):
        model(X)
    assert len(raw.calls) == 1
    assert step.plan["precision"].choice == "bf16"


def test_once_taken_back_it_costs_nothing_more(amx):
    model = optimize(Scatters())
    model(X)
    assert model._self_live.recovery is None


def test_lazy_modules_under_an_automatic_choice(amx):
    """F-5 of the field: a buffer without a shape yet cannot be copied."""
    raw = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    model = optimize(raw)
    assert model._self_live.parts.autocast.dtype == torch.bfloat16
    assert model(X).shape == (ROWS, 2)


def test_checkpointing_under_an_automatic_choice(amx):
    """torch ends a recomputation early with an exception of its own, which is no failure."""
    raw = net()
    model, step = training(raw)
    output = torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False)
    step(F.cross_entropy(output, Y))
    assert step.plan["precision"].choice == "bf16"
    assert raw[0].weight.grad is not None


REGRESSIONS = [
    nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    partial(F.mse_loss, reduction="sum"),
]  # fmt: skip


@pytest.mark.parametrize("loss_fn", REGRESSIONS, ids=str)
def test_predictions_of_a_regression_are_not_rounded_without_a_word(amx, loss_fn):
    """Temperatures around 300 would be told apart in steps of 2."""
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    raw[1].bias.data.fill_(300.0)
    model, step = training(raw, loss_fn)
    step(X, torch.full((ROWS, 1), 300.0))
    assert len(model.eval()(X).unique()) == ROWS
    plan = step.plan["precision"]
    assert plan.choice == "fp32"
    assert plan.why.startswith(("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "mse", "l1", "smooth", "huber"))
    assert "precision='bf16'" in plan.why
    assert training(raw, loss_fn, precision="bf16").step.plan["precision"].choice == "bf16"


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), F.cross_entropy, lambda output, y: F.mse_loss(output, y), None], ids=str
)
def test_other_losses_follow_the_hardware(amx, loss_fn):
    assert training(net(), loss_fn).step.plan["precision"].choice == "bf16"


def test_where_there_are_no_units_the_plan_says_that():
    raw = nn.Sequential(nn.Linear(2, 2))
    assert "MSELoss" not in training(raw, nn.MSELoss(), device="cpu").step.plan["precision"].why


def test_lazy_layers_are_not_called_small(amx):
    raw = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyLinear(WIDTH))
    plan = training(raw).step.plan
    assert "lazy" in plan["precision"].why
    assert "small" not in plan["precision"].why


class Adapted(nn.Module):
    """Float32 adapters on a frozen float16 backbone."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, 2).half().requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


def test_frozen_float16_parameters_need_no_unscaling():
    raw = Adapted()
    step = optimize(
        raw, torch.optim.SGD(raw.adapter.parameters(), lr=0.1), F.cross_entropy, precision="fp16", device="cpu"
    ).step
    assert step(X, Y).updated


@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_float16_parameters_that_train_are_refused(place):
    raw = Adapted()
    extra = nn.Parameter(torch.ones((), dtype=torch.float16))
    trained = list(raw.parameters()) if place == "model" else [*raw.adapter.parameters(), extra]
    raw.base.requires_grad_(place == "model")
    with pytest.raises(ValueError, match="float16 parameters to train"):
        optimize(raw, torch.optim.SGD(trained, lr=0.1), F.cross_entropy, precision="fp16", device="cpu")


def test_shards_of_a_flat_parameter_stay_in_float32_where_float16_would_be_chosen():
    """Each rank would skip the updates that overflow in its own shard."""
    sharded = replace(traits([nn.Linear(512, 512)]), given="FullyShardedDataParallel")
    decision = precision.decide(Facts(machine(), sharded, CUDA), "auto")
    assert decision.choice == "fp32"
    assert "FullyShardedDataParallel" in decision.why
