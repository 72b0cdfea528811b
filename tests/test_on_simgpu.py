"""Training on a second device, with all data starting on the host: what is computed, copied and waited for."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import simgpu
from hotloop import _device, _facts, fast_eval, optimize
from hotloop._reading import copies_without_blocking

pytestmark = pytest.mark.simgpu

DEVICE = f"{simgpu.NAME}:0"  # the process that only collects does not know the device
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = list(DTYPES)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def convnet():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(4, 2),
    )  # fmt: skip


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


MODELS = {"mlp": mlp, "convnet": convnet}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
FUSED = ["fused sgd", "fused adamw"]
SCALE = 1024.0  # no overflow: after one, torch's fused SGD goes on with momentum that it never initialised
X, Y = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 1, 0, 1])


def training(make=mlp, optimizer="fused adamw", loss_fn=F.cross_entropy, **wishes):
    """A wrapped model whose module and optimizer began on the host."""
    raw = make()
    opt = OPTIMIZERS[optimizer](raw.parameters())
    return (*optimize(raw, opt, loss_fn, **wishes), raw, opt)


def host(module):
    return {name: t.detach().cpu() for name, t in module.state_dict().items()}


def plain_loop(raw, optimizer, precision="fp32", steps=4):
    """What a careful user writes by hand for the device; `raw` is there already."""
    dtype, losses = DTYPES[precision], []
    scaler = torch.amp.GradScaler(simgpu.NAME, init_scale=SCALE, enabled=dtype is torch.float16)
    for seed in range(steps):
        torch.manual_seed(seed)
        x, y = X.to(DEVICE), Y.to(DEVICE)
        optimizer.zero_grad()
        with torch.autocast(simgpu.NAME, dtype=dtype, enabled=dtype is not None):
            output = raw(x)
        loss = F.cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


# --- the same training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_the_loop_written_by_hand(name, optimizer, precision):
    scaler = torch.amp.GradScaler(simgpu.NAME, init_scale=SCALE) if precision == "fp16" else None
    model, step, raw, _ = training(MODELS[name], optimizer, precision=precision, scaler=scaler)
    twin = copy.deepcopy(raw)
    losses = []
    for seed in range(4):
        torch.manual_seed(seed)
        losses.append(step(X, Y)["loss"])
    assert losses == plain_loop(twin, OPTIMIZERS[optimizer](twin.parameters()), precision)
    mine, its = host(raw), host(twin)
    assert all(torch.equal(mine[key], its[key]) for key in its)
    assert str(model.device) == DEVICE
    assert step.updates == 4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_on_a_loss_is_a_step_on_its_batch(precision):
    results = []
    for own in (True, False):
        torch.manual_seed(0)
        model, step, raw, _ = training(convnet, precision=precision)
        for seed in range(3):
            torch.manual_seed(seed)
            step(F.cross_entropy(model(X), Y.to(DEVICE))) if own else step(X, Y)
        results.append(host(raw))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_on_probabilities_trains(precision):
    """A20: autocast refuses BCE on this device, so it must be computed outside of it."""
    raw = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0))
    _, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), nn.BCELoss(), precision=precision)
    with torch.autocast(simgpu.NAME, dtype=torch.float16):
        first = step(X, Y.float())["loss"]
    for _ in range(10):
        last = step(X, Y.float())["loss"]
    assert last < first


def test_such_a_loss_in_the_forward_fails_as_in_torch():
    """A22: the user's own choice of precision is kept, and torch's error is the one that shows."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x, y):
            return F.binary_cross_entropy(self.layer(x).sigmoid()[:, 0], y)

    raw = Net()
    _, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), precision="fp16")
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        step(X, Y.float())


# --- copies and waits ------------------------------------------------------------------------------------------------------

BATCHES = {
    "two tensors": (lambda: (X, Y), 2),
    "one tuple": (lambda: ((X, Y),), 2),
    "the same tensor twice": (lambda: (X, X), 1),
    "nested": (lambda: ({"x": X, "mask": torch.ones(5, 1), "more": [X + 1, ("text", 3, None)]}, Y), 4),
    "there already": (lambda: (X.to(DEVICE), Y.to(DEVICE)), 0),
    "half there": (lambda: (X.to(DEVICE), Y), 1),
}


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch):
        return self.layer(batch["x"] if isinstance(batch, dict) else batch)


def score(output, target):
    return output.square().mean() + 0 * target.float().mean()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_one_copy_for_each_tensor_of_the_batch(name, precision):
    make, copies = BATCHES[name]
    _, step, *_ = training(Takes, loss_fn=score, precision=precision)
    step(*make())
    batches = [make() for _ in range(5)]
    simgpu.counts.clear()
    for batch in batches:
        step(*batch)
    assert simgpu.counts["h2d"] == 5 * copies
    assert simgpu.counts["h2d.blocking"] == 0


@pytest.mark.parametrize("form", ["batch", "loss"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_host_read_in_100_steps_until_a_metric_is_read_and_then_one_a_step(
    precision, optimizer, accumulate, clip_norm, form
):
    """S1, S2, S4: on a device that runs behind the host."""
    wishes = {"precision": precision, "accumulate": accumulate, "clip_norm": clip_norm}
    model, step, *_ = training(mlp, optimizer, metrics={"hits": lambda out, y: (out.argmax(1) == y).sum()}, **wishes)

    def once():
        if form == "batch":
            return step(X, Y)
        output = model(X)
        return step(F.cross_entropy(output, Y.to(DEVICE, non_blocking=True)), scale=output.detach().abs().mean())

    for _ in range(accumulate):
        once()
    with simgpu.asynchronous():
        simgpu.counts.clear()
        kept = [once() for _ in range(100)]
        assert [m.updated for m in kept] == ([False] * (accumulate - 1) + [True]) * (100 // accumulate)
        assert simgpu.host_waits() == 0
        for count, metrics in enumerate(kept[::10], 1):
            assert metrics["loss"] > 0
            dict(metrics)
            assert metrics.skipped is False
            assert simgpu.host_waits() == count
    assert step.updates == 100 // accumulate + 1
    assert step.mean()["loss"] > 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_optimizer_that_is_not_fused_reads_no_more_than_in_the_loop_by_hand(optimizer, precision):
    """In float16 torch's own scaler reads whether to skip, once a step."""
    _, step, *_ = training(mlp, optimizer, precision=precision)
    step(X, Y)
    with simgpu.asynchronous():
        simgpu.counts.clear()
        for _ in range(10):
            step(X, Y)
        assert simgpu.counts["aten::_local_scalar_dense"] == (10 if precision == "fp16" else 0)
        assert simgpu.counts["d2h.blocking"] == simgpu.counts["h2d.blocking"] == 0


def test_gradients_written_to_inside_a_window_are_not_read():
    """Clipping after each micro-batch, for example."""
    _, step, raw, _ = training(accumulate=4)

    def window():
        for _ in range(4):
            step(X, Y)
            nn.utils.clip_grad_value_(raw.parameters(), 1.0)

    window()
    with simgpu.asynchronous():
        simgpu.counts.clear()
        window()
        assert simgpu.host_waits() == 0


@pytest.mark.parametrize("optimizer", FUSED)
def test_with_a_scheduler_in_float16_it_waits_once_an_update(optimizer):
    """The learning rate depends on whether the last update was skipped; it is asked just before the next one."""
    raw = mlp()
    opt = OPTIMIZERS[optimizer](raw.parameters())
    scheduler = StepLR(opt, 1, gamma=0.9)
    _, step = optimize(raw, opt, F.cross_entropy, scheduler=scheduler, precision="fp16")
    step(X, Y)
    with simgpu.asynchronous():
        simgpu.counts.clear()
        for _ in range(10):
            step(X, Y)
        assert simgpu.host_waits() == 9  # the first outcome had arrived
    assert step.updates == 11
    assert scheduler.last_epoch == 11


@pytest.mark.parametrize("optimizer", FUSED)
def test_an_overflow_is_seen_without_a_wait_and_told_on_demand(optimizer):
    _, step, raw, _ = training(
        mlp, optimizer, precision="fp16", loss_fn=lambda output, y: output.square().mean() * y.float().max() ** 9
    )
    before = host(raw)
    with simgpu.asynchronous():
        simgpu.counts.clear()
        skipped = step(X, Y * 10**6)
        assert simgpu.host_waits() == 0
    assert all(torch.equal(before[key], value) for key, value in host(raw).items())
    good = step(X, Y)
    assert (skipped.skipped, good.skipped) == (True, False)
    assert (step.updates, step.skipped, step.scale) == (1, 1, 2.0**15)
    assert not all(torch.equal(before[key], value) for key, value in host(raw).items())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_values_that_arrive_late_are_those_of_their_step(precision):
    """S2: on a device that runs behind the host; a later change of the loss does not show."""
    _, step, raw, _ = training(mlp, precision=precision)
    twin = copy.deepcopy(raw)
    plain = plain_loop(twin, OPTIMIZERS["fused adamw"](twin.parameters()), precision, steps=10)
    with simgpu.asynchronous():
        kept = []
        for seed in range(10):
            torch.manual_seed(seed)
            kept.append(step(X, Y))
        assert [m["loss"] for m in reversed(kept)] == plain[::-1]


@pytest.mark.parametrize("wish", [None, "default", "context"])
def test_with_the_accelerator_as_default_device_nothing_waits(wish, request):
    """`torch.set_default_device`: pinned memory, and what is made on the way to the device, is the host's all the same."""
    around = torch.device(DEVICE) if wish == "context" else nullcontext()
    if wish == "default":
        torch.set_default_device(DEVICE)
    copies_without_blocking.cache_clear()
    request.addfinalizer(copies_without_blocking.cache_clear)
    try:
        with around:
            _, step, *_ = training(metrics={"one": lambda output, target: 1})
            step(X, Y)
            with simgpu.asynchronous():
                simgpu.counts.clear()
                kept = [step(X, Y) for _ in range(70)]  # longer than what waits to be summed
                assert simgpu.host_waits() == 0
            assert all(m["loss"] > 0 for m in kept)
            assert step.mean()["loss"] > 0
    finally:
        torch.set_default_device(None)


def test_a_device_without_float64(monkeypatch, request):
    """As many of Intel's GPUs: a kernel raises, and only there it shows."""
    to_copy = simgpu._HANDLERS[simgpu.aten._to_copy.default]

    def without_float64(*args, dtype=None, **kwargs):
        if dtype == torch.float64:
            raise RuntimeError("Required aspect fp64 is not supported on the device")
        return to_copy(*args, dtype=dtype, **kwargs)

    monkeypatch.setitem(simgpu._HANDLERS, simgpu.aten._to_copy.default, without_float64)
    _device._has_float64.cache_clear()
    request.addfinalizer(_device._has_float64.cache_clear)
    _, step, *_ = training(
        metrics={"hits": lambda output, y: (output.argmax(1) == y).sum(), "big": lambda o, y: y.sum() + 2**53}
    )
    kept = [step(X, Y) for _ in range(70)]  # longer than what waits to be summed
    assert {m["big"] for m in kept} == {2**53 + 3}
    assert step.mean()["loss"] == pytest.approx(sum(m["loss"] for m in kept) / 70)


@pytest.mark.parametrize("way", ["step", "call", "eval", "fast_eval"])
def test_pinned_memory_may_be_refilled_after_a_call(way):
    """The device reads it late: what it gets must be what the memory held at the call."""
    got = []

    class Keeps(nn.Linear):
        def forward(self, x):
            got.append(x)
            return super().forward(x)

    net = Keeps(4, 2)
    model, step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), F.cross_entropy)
    buffer, target = torch.zeros(5, 4).pin_memory(), Y.to(DEVICE)
    ways = {
        "step": lambda x: step(x, target),
        "call": model,
        "eval": model,
        "fast_eval": fast_eval(lambda x, net=model: net(x)),
    }
    model.train(way != "eval")
    with simgpu.asynchronous():
        simgpu.counts.clear()
        for i in range(3):
            ways[way](buffer.fill_(float(i)))
        assert simgpu.host_waits() == 0
        buffer.fill_(9.0)
    assert [x.mean().item() for x in got] == [0.0, 1.0, 2.0]


def test_a_graph_that_is_captured_reads_the_users_own_memory(monkeypatch):
    """It is filled again before each replay."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x = torch.zeros(2).pin_memory()
    model = optimize(nn.Identity(), device=DEVICE)
    with simgpu.asynchronous():
        arrived = model(x)
        x.fill_(1.0)
    assert arrived.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("view", [torch.t, lambda x: x[:, 1:], lambda x: x[:1].expand(3, 4), nn.Parameter])
def test_pinned_memory_of_any_layout_arrives(view):
    x = view(torch.arange(16.0).reshape(4, 4).pin_memory())
    model = optimize(nn.Identity(), device=DEVICE)
    with simgpu.asynchronous():
        arrived = model(x)
        with torch.no_grad():
            x.fill_(9.0)
    assert torch.equal(arrived.cpu(), view(torch.arange(16.0).reshape(4, 4)))


def test_an_eval_call_copies_its_input_and_waits_for_nothing():
    model, *_ = training(convnet, precision="bf16")
    model.eval()
    simgpu.counts.clear()
    output = model(X)
    assert (simgpu.counts["h2d"], simgpu.counts["d2h"], simgpu.host_waits()) == (1, 0, 0)
    assert str(output.device) == DEVICE
    assert output.dtype == torch.float32
    assert not output.requires_grad


def test_copies_to_the_host_block():
    """D16, D17, D19: what is copied without blocking may be read before it is there."""
    model = optimize(mlp(), device="cpu")
    there = X.to(DEVICE)
    simgpu.counts.clear()
    with simgpu.asynchronous():
        output = model.eval()(there)
    assert (simgpu.counts["d2h"], simgpu.counts["d2h.blocking"]) == (1, 1)
    assert torch.equal(output, model(X))


# --- operators --------------------------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_at_most_two_operators_more_than_the_loop_by_hand(name, optimizer, precision, clip_norm):
    """The loop by hand reads nothing; what a step adds is the snapshot of its loss."""
    _, step, raw, _ = training(MODELS[name], optimizer, precision=precision, clip_norm=clip_norm)
    twin, dtype = copy.deepcopy(raw), DTYPES[precision]
    own = OPTIMIZERS[optimizer](twin.parameters())
    scaler = torch.amp.GradScaler(simgpu.NAME, enabled=dtype is torch.float16)

    def by_hand():
        x, y = X.to(DEVICE, non_blocking=True), Y.to(DEVICE, non_blocking=True)
        own.zero_grad()
        if dtype is None:
            output = twin(x)
        else:
            with torch.autocast(simgpu.NAME, dtype=dtype):
                output = twin(x).float()
        loss = F.cross_entropy(output, y)
        scaler.scale(loss).backward()
        if clip_norm is not None:
            if scaler.is_enabled():
                scaler.unscale_(own)
            nn.utils.clip_grad_norm_(twin.parameters(), clip_norm)
        scaler.step(own)
        scaler.update()

    counted = []
    for once in (by_hand, lambda: step(X, Y)):
        once()
        once()
        with Operators() as mode:
            once()
        counted.append(mode.seen)
    plain, wrapped = counted
    assert wrapped.total() <= plain.total() + 2, (wrapped - plain, plain - wrapped)


# --- placement --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["auto", simgpu.NAME, DEVICE, 0, "torch.device"])
def test_every_way_to_name_the_device(device):
    """D9."""
    device = torch.device(simgpu.NAME) if device == "torch.device" else device
    model, step, raw, _ = training(device=device)
    assert str(model.device) == DEVICE
    assert {str(p.device) for p in raw.parameters()} == {DEVICE}
    assert step.plan["placement"].choice == DEVICE
    assert ("accelerator" if device == "auto" else "asked for") in step.plan["placement"].why


def test_the_host_on_wish():
    model, step, raw, _ = training(device="cpu")
    step(X, Y)
    assert model.device == torch.device("cpu")
    assert {p.device.type for p in raw.parameters()} == {"cpu"}


def test_another_device_that_this_machine_lacks():
    raw = mlp()
    with pytest.raises(ValueError, match=r"device='cuda'.*cannot use"):
        optimize(raw, device="cuda")
    assert raw[0].weight.device.type == "cpu"


def test_a_model_that_is_there_already_stays():
    raw = mlp().to(DEVICE)
    before = [id(p) for p in raw.parameters()]
    model = optimize(raw)
    assert [id(p) for p in model.parameters()] == before
    assert str(model.device) == DEVICE


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_placement_takes_the_state_of_the_optimizer_along(optimizer):
    """D1 to D4, O10: training that began on the host goes on there as it would have on the host."""
    raw = convnet().eval()
    raw[2].train()
    opt = OPTIMIZERS[optimizer](raw.parameters())
    twin, own = copy.deepcopy((raw, opt))

    def bare(net, its):
        its.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        its.step()

    for _ in range(3):
        bare(raw, opt)
        bare(twin, own)
    model, step = optimize(raw, opt, F.cross_entropy)
    for p in raw.parameters():
        for key, value in opt.state[p].items():
            assert str(value.device) == (DEVICE if key != "step" or "fused" in optimizer else "cpu")
    assert len(opt.state) == len(list(raw.parameters()))
    for _ in range(3):
        step(X, Y)
        bare(twin, own)
    for key, value in host(raw).items():
        torch.testing.assert_close(value, twin.state_dict()[key], atol=1e-5, rtol=1e-5)
    assert str(model.device) == DEVICE


def test_an_optimizer_with_a_closure_goes_on_there():
    """O1: LBFGS keeps lists in its state, and the list of its parameters."""

    def on_the_host(net):
        opt = torch.optim.LBFGS(net.parameters(), max_iter=3)

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(net(X), torch.ones(5, 2))
            loss.backward()
            return loss

        opt.step(closure)
        return opt, lambda: opt.step(closure).item()

    raw = nn.Linear(4, 2)
    twin = copy.deepcopy(raw)
    (opt, _), (_, plain) = on_the_host(raw), on_the_host(twin)
    _, step = optimize(raw, opt, nn.MSELoss())
    for _ in range(3):
        assert step(X, torch.ones(5, 2))["loss"] == pytest.approx(plain(), rel=1e-3, abs=1e-6)
    assert str(raw.weight.device) == DEVICE


def test_parameter_groups_keep_their_options():
    raw = mlp()
    opt = torch.optim.SGD([{"params": raw[0].parameters(), "lr": 0.5}, {"params": raw[2].parameters()}], lr=0.0)
    _, step = optimize(raw, opt, F.cross_entropy)
    before = host(raw)
    step(X, Y)
    assert [g["lr"] for g in opt.param_groups] == [0.5, 0.0]
    changed = {key for key, value in host(raw).items() if not torch.equal(before[key], value)}
    assert changed == {"0.weight", "0.bias"}


def test_frozen_and_tied_parameters_stay_so():
    """E9, F-23."""
    raw = Tied()
    _, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), lambda out, y: F.cross_entropy(out, y))
    step(torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert raw.head.weight is raw.embed.weight
    frozen = mlp()
    frozen[0].requires_grad_(False)
    optimize(frozen)
    assert [p.requires_grad for p in frozen.parameters()] == [False, False, True, True]


@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_of_the_optimizer_from_the_host_goes_on(fused):
    """D2 to D4, O10, O11."""
    model, step, raw, opt = training(mlp, "fused adamw" if fused else "adamw")
    for _ in range(3):
        step(X, Y)
    saved = copy.deepcopy(host(raw)), simgpu_to_host(opt.state_dict())
    again, step2, raw2, opt2 = training(mlp, "fused adamw" if fused else "adamw")
    again.load_state_dict(saved[0])
    opt2.load_state_dict(saved[1])
    for p in raw2.parameters():
        assert {str(v.device) for k, v in opt2.state[p].items() if k != "step"} == {DEVICE}
    step(X, Y)
    step2(X, Y)
    assert all(torch.equal(a, b) for a, b in zip(host(raw).values(), host(raw2).values(), strict=True))
    del model


def simgpu_to_host(state):
    if isinstance(state, torch.Tensor):
        return state.cpu().clone()
    if isinstance(state, dict):
        return {k: simgpu_to_host(v) for k, v in state.items()}
    return [simgpu_to_host(v) for v in state] if isinstance(state, list) else state


def test_the_loss_function_is_placed_and_its_parameters_train():
    """Class weights, and a head with parameters of its own."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.proxies = nn.Parameter(torch.ones(2, 2))
            self.register_buffer("weight", torch.ones(2))

        def forward(self, output, target):
            return F.cross_entropy(output @ self.proxies, target, self.weight)

    raw, head = mlp(), Head()
    opt = torch.optim.SGD([*raw.parameters(), *head.parameters()], lr=0.1)
    _, step = optimize(raw, opt, head)
    step(X, Y)
    assert str(head.weight.device) == str(head.proxies.device) == DEVICE
    assert not torch.equal(head.proxies.detach().cpu(), torch.ones(2, 2))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    _, step, *_ = training(loss_fn=weighted)
    step(X, Y)


def test_several_models_are_placed_together():
    one, two = nn.Linear(4, 4), nn.Linear(4, 2)
    opt = torch.optim.AdamW([*one.parameters(), *two.parameters()], fused=True)
    (a, b), step = optimize([one, two], opt, precision="fp16")
    with simgpu.asynchronous():
        simgpu.counts.clear()
        step(F.cross_entropy(b(a(X)), Y.to(DEVICE, non_blocking=True)))
        assert simgpu.host_waits() == 0
    assert step.updates == 1
    assert str(one.weight.device) == str(two.weight.device) == DEVICE


def test_a_model_on_the_host_joins_one_that_is_there_already():
    one, two = nn.Linear(4, 4).to(DEVICE), nn.Linear(4, 2)
    opt = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    (a, b), step = optimize([one, two], opt)
    step(b(a(X)).square().mean())
    assert str(two.weight.device) == DEVICE
    assert step.plan["placement"].choice == DEVICE


def test_a_model_that_is_spread_stays_as_it_is_and_is_not_said_to_have_been_moved():
    class Offloaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2).to(DEVICE)
            self.bad = False

        def forward(self, x):
            x = self.first(x.cpu())
            return self.second(x if self.bad else x.to(DEVICE))

    model, step, raw, _ = training(Offloaded)
    step(X, Y)
    assert step.plan["placement"].choice == "as it is"
    assert raw.first.weight.device.type == "cpu"
    raw.bad = True
    with pytest.raises(RuntimeError, match="same device") as error:
        model(X)
    assert "optimize moved" not in str(error.value)


class Spread(nn.Module):
    """The layers are on two devices, and only what lies between them is moved."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).to(first), nn.Linear(4, 2).to(second)

    def forward(self, x):
        return self.second(self.first(x).to(self.second.weight.device))


@pytest.mark.parametrize("labels", ["cpu", DEVICE])
@pytest.mark.parametrize("devices", [("cpu", DEVICE), (DEVICE, "cpu")], ids=str)
@pytest.mark.parametrize("form", ["batch", "tuple", "mapping", "own loss"])
def test_a_model_on_two_devices_takes_inputs_where_they_are_and_targets_where_its_output_is(form, devices, labels):
    class OwnLoss(Spread):
        def forward(self, x, y):
            output = super().forward(x)
            return F.cross_entropy(output, y.to(output.device))

    class Mapped(Spread):
        def forward(self, x, y):
            return super().forward(x)

    made = {"own loss": OwnLoss, "mapping": Mapped}.get(form, Spread)
    loss_fn = {"own loss": None, "mapping": lambda output, batch: F.cross_entropy(output, batch["y"])}.get(
        form, F.cross_entropy
    )
    torch.manual_seed(0)
    raw = made(*devices)
    twin = copy.deepcopy(raw)
    metrics = {"hits": lambda output, target: (output.argmax(1) == target).sum()} if form in ("batch", "tuple") else None
    _, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), loss_fn, metrics=metrics)
    x, y = X.to(devices[0]), Y.to(labels)
    batches = {"tuple": ((x, y),), "mapping": ({"x": x, "y": y},)}
    m = step(*batches.get(form, (x, y)))

    opt = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss = OwnLoss.forward(twin, x, y) if form == "own loss" else F.cross_entropy(Spread.forward(twin, x), y.to(devices[1]))
    loss.backward()
    opt.step()
    assert m["loss"] == pytest.approx(loss.item())
    for key, value in host(twin).items():
        torch.testing.assert_close(host(raw)[key], value)


def test_a_model_that_is_no_longer_on_two_devices_takes_everything_to_its_own():
    model, step, raw, _ = training(lambda: Spread("cpu", DEVICE), "sgd")
    step(X, Y)
    model.load_state_dict(model.state_dict())
    assert str(model.device) == DEVICE  # it is spread still
    step(X, Y)
    model.to(DEVICE)
    step(X, Y)
    assert {str(p.device) for p in raw.parameters()} == {DEVICE}


def test_to_apply_and_revert_placement_leaves_everything_as_it_was():
    from hotloop import _plan
    from hotloop._facts import Facts, machine, traits
    from hotloop._parts import Parts
    from hotloop.transforms import placement

    raw = Tied()
    opt = torch.optim.SGD(raw.parameters(), lr=0.1)
    before, parts = copy.deepcopy(raw.state_dict()), Parts(raw, (opt,))
    decision = placement.decide(Facts(machine(), traits([raw])), "auto")
    applied = decision.apply(parts)
    assert (str(applied.device), applied.autocast.device_type) == (DEVICE, simgpu.NAME)
    reverted = _plan.revert([decision], applied)
    assert (reverted.device.type, reverted.autocast.device_type) == ("cpu", "cpu")
    assert all(torch.equal(before[name], value) for name, value in raw.state_dict().items())
    assert raw.head.weight is raw.embed.weight
    assert opt.param_groups[0]["params"] == [raw.embed.weight]


@pytest.mark.parametrize("devices", [("simgpu", "cpu"), ("cpu", "simgpu")])
def test_a_call_of_a_model_on_two_devices_leaves_things_where_they_are(devices):
    class Noted(Spread):
        def forward(self, x, y):
            self.seen = [x.device.type, y.device.type]
            return super().forward(x)

    raw = Noted(*devices)
    model, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for mode in (True, False):
        output = model.train(mode)(X.to(devices[0]), Y.to(devices[1]))
        assert raw.seen == list(devices)
    model.train()
    output = model(X.to(devices[0]), Y.to(devices[1]))
    assert step(F.cross_entropy(output, Y.to(output.device))).updated


class Immovable(nn.Linear):
    def _apply(self, fn, recurse=True):
        raise RuntimeError("it stays")

    def forward(self, x, *target):
        return super().forward(x)


@pytest.mark.parametrize("place", ["second model", "loss function"])
def test_a_failure_halfway_puts_back_what_was_placed_before_it(place):
    raw, stuck = Tied(), Immovable(4, 2)
    opt = torch.optim.SGD([*raw.parameters(), *stuck.parameters()], lr=0.1, momentum=0.9)
    raw(torch.tensor([1])).sum().backward()
    opt.step()
    before = copy.deepcopy(raw.state_dict())
    given = ([raw, stuck], opt) if place == "second model" else (raw, opt, stuck)
    with pytest.raises(RuntimeError, match="it stays"):
        optimize(*given)
    assert raw.head.weight is raw.embed.weight
    assert raw.embed.weight.device.type == "cpu"
    assert torch.equal(raw.embed.weight, before["embed.weight"])
    assert opt.param_groups[0]["params"][0] is raw.embed.weight
    assert opt.state[raw.embed.weight]["momentum_buffer"].device.type == "cpu"
    assert raw.embed.weight.grad.device.type == "cpu"


# --- moves after optimize ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", ["to", "cpu"])
def test_to_the_host_and_back(way, optimizer, precision):
    model, step, raw, opt = training(mlp, optimizer, precision=precision)
    for _ in range(2):
        step(X, Y)
    assert (model.cpu() if way == "cpu" else model.to("cpu")) is model
    assert model.device == torch.device("cpu")
    devices = {t.device.type for p in raw.parameters() for t in (p, *opt.state[p].values())}
    assert devices == {"cpu"}
    assert model.eval()(X).device.type == "cpu"
    model.train()
    step(X, Y)
    assert model.to(DEVICE) is model
    assert str(model.device) == DEVICE
    assert {str(v.device) for p in raw.parameters() for k, v in opt.state[p].items() if k != "step"} == {DEVICE}
    assert step(X, Y)["loss"] > 0
    assert step.updates == 4
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in raw.parameters()]


def test_the_loss_function_follows_a_move():
    """It was `optimize` that placed it, so a script without a line for it must go on."""
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(2))
    model, step, *_ = training(loss_fn=loss_fn)
    model.to("cpu")
    step(X, Y)
    assert loss_fn.weight.device.type == "cpu"
    model.to(DEVICE)
    step(X, Y)


def test_evaluation_on_the_host_in_between():
    """`net.eval().cpu()` and back, as style transfer scripts do."""
    model, step, raw, _ = training(convnet)
    step(X, Y)
    assert model.eval().cpu()(X).device.type == "cpu"
    model.to(DEVICE).train()
    before = host(raw)
    step(X, Y)
    assert any(not torch.equal(before[key], value) for key, value in host(raw).items())


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_an_automatic_precision_holds_where_it_was_chosen_for(precision, monkeypatch):
    """A wish of the user's holds everywhere."""
    monkeypatch.setattr(_facts, "_cpu_16bit", lambda: "AMX")
    seen = []
    raw = nn.Linear(512, 512)
    raw.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model, step = optimize(
        raw, torch.optim.SGD(raw.parameters(), lr=0.1), lambda o, y: F.mse_loss(o, y), device="cpu", precision=precision
    )
    x = torch.randn(64, 512)
    for device in ("cpu", DEVICE, "cpu"):
        model.to(device)
        step(x, x)
        model.eval()(x)
        model.train()
    there = torch.float32 if precision == "auto" else torch.bfloat16
    assert seen == [torch.bfloat16] * 2 + [there] * 2 + [torch.bfloat16] * 2


def test_a_copy_is_on_the_device_and_moves_alone():
    model, step, raw, opt = training()
    step(X, Y)
    made = copy.deepcopy(model)
    assert str(made.device) == DEVICE
    made.to("cpu")
    assert made(X).device.type == "cpu"
    assert str(model.device) == DEVICE
    step(X, Y)
    assert {str(p.device) for p in raw.parameters()} == {DEVICE}
    del opt


def test_an_average_on_the_device():
    model, step, raw, _ = training(convnet)
    average = AveragedModel(model)
    for _ in range(2):
        step(X, Y)
        average.update_parameters(model)
    assert str(average.eval()(X).device) == DEVICE
    assert not torch.equal(host(average.module)["1.weight"], host(raw)["1.weight"])


def test_a_users_own_method_that_moves():
    class Places(nn.Linear):
        def place(self, device):
            return self.to(device)

    model = optimize(Places(4, 2))
    assert model.place("cpu") is model
    assert model.device == torch.device("cpu")
    assert model(X).device.type == "cpu"


def test_a_parent_that_moves_takes_it_along():
    model, *_ = training()
    nn.Sequential(model).to("cpu")
    assert model.device == torch.device("cpu")
    assert model(X).device.type == "cpu"


# --- mixed devices -----------------------------------------------------------------------------------------------------------


class Left(nn.Module):
    """Keeps a plain tensor, which no move takes along."""

    def __init__(self):
        super().__init__()
        self.layer, self.register = nn.Linear(4, 2), nn.Module()
        self.register_buffer("moved", torch.ones(2))
        self.register.t = torch.zeros(2)
        self.mean = torch.zeros(2)

    def forward(self, x):
        return self.layer(x) * self.moved + self.mean


class Makes(nn.Module):
    """Makes a tensor on the host in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) + torch.zeros(2)


CALLS = {
    "step": lambda model, step: step(X, Y),
    "train": lambda model, step: model(X),
    "eval": lambda model, step: model.eval()(X),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_that_stayed_behind_is_named(call):
    """D5: torch's error, with ours behind it: what moved, what stayed, what to do."""
    model, step, raw, _ = training(Left)
    raw.there = torch.zeros(2).to(DEVICE)
    with pytest.raises(RuntimeError) as error:
        CALLS[call](model, step)
    text = str(error.value)
    assert text.startswith("Expected all tensors to be on the same device")
    assert "optimize moved the model from cpu to simgpu:0" in text
    assert "self.mean" in text
    assert "self.register.t" in text
    assert "self.moved" not in text
    assert "self.there" not in text
    assert "register_buffer" in text
    assert "device='cpu'" in text
    assert text.count("hotloop:") == 1


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_made_on_the_host_in_the_forward(call):
    model, step, *_ = training(Makes)
    with pytest.raises(RuntimeError, match=r"(?s)same device.*optimize moved the model from cpu to simgpu:0.*device='cpu'"):
        CALLS[call](model, step)


def test_kept_on_the_host_such_a_model_runs():
    for make in (Left, Makes):
        _, step, *_ = training(make, device="cpu")
        step(X, Y)


def test_a_label_that_stayed_behind_in_the_loss():
    left = torch.zeros(5, dtype=torch.int64)
    _, step, *_ = training(loss_fn=lambda output, _: F.cross_entropy(output, left))
    with pytest.raises(RuntimeError, match=r"(?s)same device.*optimize moved the model.*prefetch\(loader, model\)"):
        step(X, Y)


@pytest.mark.parametrize("who", ["the user before", "the user after"])
def test_a_move_of_the_users_own_is_not_blamed_on_optimize(who):
    if who == "the user before":
        raw = Makes().to(DEVICE)
        model = optimize(raw)
    else:
        model = optimize(Makes()).to("cpu").to(DEVICE)
    with pytest.raises(RuntimeError) as error:
        model(X)
    assert "optimize moved" not in str(error.value)


@pytest.mark.parametrize("error", [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError(f"a {simgpu.NAME} kernel failed"),
    torch.OutOfMemoryError(f"out of memory, see notes/{simgpu.NAME}.html"),
], ids=str)  # fmt: skip
def test_another_error_is_left_alone(error):
    class Fails(nn.Linear):
        def forward(self, x):
            raise error

    before = str(error)
    model, *_ = training(lambda: Fails(4, 2))
    with pytest.raises(type(error)) as raised:
        model(X)
    assert raised.value is error
    assert str(error) == before


def test_the_next_good_batch_trains():
    class Sometimes(Makes):
        bad = True

        def forward(self, x):
            return super().forward(x) if self.bad else self.layer(x)

    _, step, raw, _ = training(Sometimes)
    with pytest.raises(RuntimeError, match="optimize moved"):
        step(X, Y)
    raw.bad = False
    before = host(raw)
    step(X, Y)
    assert step.updates == 1
    assert not torch.equal(before["layer.weight"], host(raw)["layer.weight"])


@pytest.mark.parametrize("kind", ["parameter", "view of one", "detached view"])
def test_a_parameter_among_the_metrics_is_read_as_it_was_before_the_update(kind):
    """A temperature, for example: the update writes to the memory that the metric is in."""
    net = nn.Module()
    net.w = nn.Parameter(torch.tensor([2.0]))
    step = optimize(net, torch.optim.SGD(net.parameters(), lr=1.0), device=DEVICE).step
    shown = {"parameter": net.w, "view of one": net.w[0], "detached view": net.w.detach()[0]}[kind]
    metrics = step((net.w * 3).sum(), w=shown)
    assert (net.w.item(), metrics["w"], metrics["loss"]) == (-1.0, 2.0, 6.0)
