"""float16 with a real `GradScaler` on the CPU: bitwise the loop written by hand, also where gradients overflow."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import hotloop
from parity.twins import differences, snapshot

optimize = partial(hotloop.optimize, device="cpu", exact=True, precision="fp16")

OVERFLOW = 1e34  # the gradient of the 16-bit output becomes inf; the forward stays finite
SCALE = 1024.0  # small enough for every good batch here
HOPELESS = {"none": [], "first": [0], "middle": [3], "two running": [3, 4], "first two": [0, 1], "first and last": [0, 7]}
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "fused sgd": partial(SGD, lr=0.1, fused=True),
    "fused sgd momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "fused adam": partial(Adam, lr=0.01, fused=True),
    "fused adamw": partial(AdamW, lr=0.01, fused=True),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.head, self.tail = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden), self.tail(hidden)


def loss_fn(output, target):
    """Two heads, each with a factor of its own, so that each can overflow alone."""
    (a, b), (y, factor_a, factor_b) = output, target
    return F.cross_entropy(a, y) * factor_a + F.cross_entropy(b, y) * factor_b


def data(count, overflow=(), in_tail=()):
    torch.manual_seed(3)
    factors = [(OVERFLOW if i in overflow else 1.0, OVERFLOW if i in in_tail else 1.0) for i in range(count)]
    return [(torch.randn(5, 6), (torch.randint(3, (5,)), *pair)) for pair in factors]


def build(make_optimizers):
    torch.manual_seed(1)
    model = Net()
    optimizers = make_optimizers(model)
    schedulers = [StepLR(o, 2, 0.5) for o in optimizers]
    return model, optimizers, schedulers


def by_hand(model, optimizers, schedulers, batches, scaler, *, accumulate=1, clip_norm=None, before_update=None):
    """The loop of torch's documentation; each optimizer's scheduler moves if its gradients were finite."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("momentum") and group["fused"]:  # torch would start with memory as it found it
                for p in group["params"]:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    skips = []
    for i, (x, y) in enumerate(batches):
        if i % accumulate == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        scaler.scale(loss_fn(tuple(o.float() for o in output), y) / accumulate).backward()
        if (i + 1) % accumulate:
            continue
        finite = [all(p.grad.isfinite().all() for g in o.param_groups for p in g["params"]) for o in optimizers]
        if clip_norm is not None or before_update is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if before_update is not None:
            before_update()
        if clip_norm is not None:
            clip_grad_norm_(model.parameters(), clip_norm)
        if clip_norm is not None:  # a norm that is not finite has spoiled the gradients of all
            finite = [all(finite)] * len(finite)
        for fine, optimizer in zip(finite, optimizers, strict=True):
            if fine or clip_norm is None:
                scaler.step(optimizer)
        scaler.update()
        for fine, scheduler in zip(finite, schedulers, strict=True):
            if fine:
                scheduler.step()
        skips.append(not all(finite))
    return skips


def scaler(init_scale=SCALE, **options):
    return torch.amp.GradScaler("cpu", init_scale=init_scale, **options)


def assert_as_by_hand(make_optimizers, batches, *, accumulate=1, clip_norm=None, hook=None, **scaling):
    hand, wrapped = scaler(**scaling), scaler(**scaling)
    model, optimizers, schedulers = build(make_optimizers)
    torch.manual_seed(5)
    options = {"accumulate": accumulate, "clip_norm": clip_norm}
    before_update = None if hook is None else partial(hook, model)
    skips = by_hand(model, optimizers, schedulers, batches, hand, before_update=before_update, **options)
    expected = snapshot(model, *optimizers, *schedulers, hand)

    plain, optimizers, schedulers = build(make_optimizers)
    torch.manual_seed(5)
    before_update = None if hook is None else partial(hook, plain)
    model, step = optimize(
        plain, optimizers, loss_fn, scheduler=schedulers, scaler=wrapped, before_update=before_update, **options
    )
    closed = [m for m in [step(x, y) for x, y in batches] if m.updated]
    assert [m.skipped for m in closed] == skips
    assert differences(snapshot(model, *optimizers, *schedulers, step.scaler), expected) == []
    assert step.skipped == sum(skips)
    return step


def one(make):
    return lambda model: [make(model.parameters())]


@pytest.mark.parametrize("where", HOPELESS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_overflow(optimizer, where):
    """A1 to A4: weights, optimizer state, scheduler, scale and counters as by hand."""
    step = assert_as_by_hand(one(OPTIMIZERS[optimizer]), data(8, HOPELESS[where]))
    assert step.updates == 8 - len(HOPELESS[where])
    assert step.scale == SCALE / 2 ** len(HOPELESS[where])


@pytest.mark.parametrize("where", ["none", "first", "two running"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_and_hook(optimizer, where):
    """A9, G12: the hook and the clip see gradients of their true size."""
    hook = lambda model: clip_grad_value_(model.parameters(), 0.05)  # noqa: E731
    assert_as_by_hand(one(OPTIMIZERS[optimizer]), data(8, HOPELESS[where]), clip_norm=0.1, hook=hook)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("overflow", [[], [1], [0, 4], [6, 7]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accumulation(optimizer, overflow, clip_norm):
    """A6 to A8, O8: an overflow in any micro-batch skips its window; gradients stay scaled inside a window."""
    step = assert_as_by_hand(one(OPTIMIZERS[optimizer]), data(8, overflow), accumulate=2, clip_norm=clip_norm)
    assert step.updates == 4 - len({i // 2 for i in overflow})


def body_and_tail(first, second):
    def make(model):
        body = [*model.body.parameters(), *model.head.parameters()]
        return [first(body), second(model.tail.parameters())]

    return make


@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False)], ids=["plain", "fused", "mixed"])
def test_several_optimizers(fused):
    """O9: one scaler, one update; an optimizer that overflows alone is skipped alone, its scheduler with it."""
    makes = [partial(AdamW, lr=0.01, fused=fused[0]), partial(SGD, lr=0.1, fused=fused[1])]
    make = body_and_tail(*makes)

    def cut(model):
        model.tail.register_forward_pre_hook(lambda _, args: (args[0].detach(),))  # its overflow stays its own
        return make(model)

    step = assert_as_by_hand(cut, data(9, overflow=[2, 7], in_tail=[0, 4, 5, 7]))
    assert (step.updates, step.skipped) == (9 - 1, 5)


@pytest.mark.parametrize("fused", [False, True])
def test_several_optimizers_and_one_joint_norm(fused):
    """Where one overflows, the norm of all is not finite: all are skipped."""
    makes = [partial(AdamW, lr=0.01, fused=fused), partial(SGD, lr=0.1, fused=fused)]
    step = assert_as_by_hand(body_and_tail(*makes), data(9, overflow=[0, 4], in_tail=[0, 2, 5]), clip_norm=0.1)
    assert (step.updates, step.skipped) == (5, 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_scale_grows(optimizer):
    step = assert_as_by_hand(one(OPTIMIZERS[optimizer]), data(8, [3]), init_scale=16.0, growth_interval=2)
    assert step.scale == 16.0 * 2 / 2 * 2 * 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("first", [0, 3])
def test_a_skip_leaves_everything_as_it_was(optimizer, first):
    """A1, A2: weights, optimizer, scheduler and counters; the metrics tell."""
    model, optimizers, schedulers = build(one(OPTIMIZERS[optimizer]))
    model, step = optimize(model, optimizers, loss_fn, scheduler=schedulers, scaler=scaler())
    for x, y in data(first):
        assert not step(x, y).skipped
    weights = copy.deepcopy(dict(model.named_parameters()))
    before = copy.deepcopy(optimizers[0].state_dict())
    for skipped in (1, 2, 3):
        ((x, y),) = data(1, [0])
        metrics = step(x, y)
        assert metrics.updated
        assert metrics.skipped
        assert (step.updates, step.skipped) == (first, skipped)
        assert step.scale == SCALE / 2**skipped
        assert schedulers[0].last_epoch == first
        assert differences(dict(model.named_parameters()), weights) == []
        if first:  # a first step makes the state, skipped or not
            assert differences(optimizers[0].state_dict(), before) == []
    ((x, y),) = data(1)
    assert not step(x, y).skipped
    assert (step.updates, schedulers[0].last_epoch) == (first + 1, first + 1)


def test_fused_momentum_survives_an_overflow_in_the_first_step():
    """torch leaves the momentum buffers as it found the memory; here new memory is filled with NaN."""
    model, optimizers, _ = build(one(OPTIMIZERS["fused sgd momentum"]))
    model, step = optimize(model, optimizers, loss_fn)
    torch.use_deterministic_algorithms(True)
    try:
        assert step(*data(1, [0])[0]).skipped
        step(*data(1)[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_that_no_loss_has_reached(fused, scheduled):
    """In float32 it takes a step over nothing; with a scaler neither it nor its scheduler may complain."""
    makes = [partial(AdamW, lr=0.01, fused=fused), partial(SGD, lr=0.1, fused=fused)]
    model, optimizers, schedulers = build(body_and_tail(*makes))
    model, step = optimize(model, optimizers, scheduler=schedulers if scheduled else None, scaler=scaler())
    before = copy.deepcopy(model.tail.state_dict())
    for _ in range(3):
        metrics = step(model(torch.randn(5, 6))[0].sum())
        assert not metrics.skipped
    assert step.updates == 3
    assert differences(model.tail.state_dict(), before) == []


@pytest.mark.parametrize("fused", [False, True])
def test_the_users_own_scaler_and_its_state(fused):
    """`step.scaler` is the user's own object, before and after `load_state_dict`."""
    own, net = scaler(8.0, growth_interval=1), Net()
    step = optimize(net, AdamW(net.parameters(), fused=fused), loss_fn, scaler=own).step
    assert step.scaler is own
    for batch in data(2):
        step(*batch)
    assert step.scale == 32.0
    assert step.state_dict()["scaler"] == own.state_dict()


def test_the_scaler_alone_chooses_float16():
    own, net = scaler(4.0), Net()
    step = hotloop.optimize(net, SGD(net.parameters(), lr=0.1), loss_fn, device="cpu", scaler=own).step
    assert step.plan.as_dict()["precision"]["choice"] == "fp16"
    assert step.scaler is own
    assert step.scale == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_nan_data_does_not_loop_in_silence(fused):
    """A30: twenty skips running warn once, naming the parameter; the metrics show nan and the scale keeps halving."""
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    step = optimize(net, AdamW(net.parameters(), fused=fused), nn.CrossEntropyLoss()).step
    x, y = torch.full((5, 6), float("nan")), torch.zeros(5, dtype=torch.long)
    for _ in range(19):
        assert step(x, y).skipped
    with pytest.warns(RuntimeWarning, match=r"20 updates running.*'0\.weight'.*bf16") as caught:
        metrics = step(x, y)
    assert caught[0].filename == __file__
    assert metrics["loss"] != metrics["loss"]
    assert step.scale == 65536.0 / 2**20
    for _ in range(25):
        step(x, y)  # it does not warn again: pytest makes a warning an error
    assert (step.updates, step.skipped) == (0, 45)


def test_a_loss_in_sixteen_bits_does_not_overflow_by_its_scale():
    """Scaled in float16, a loss of 100 would be infinite."""
    net = nn.Linear(6, 3)
    optimizer = SGD(net.parameters(), lr=0.1)
    model, step = hotloop.optimize(net, optimizer, device="cpu", precision="fp16", scaler=scaler())
    metrics = step((model(torch.ones(2, 6)).mean() + 100).half())
    assert metrics["loss"] > 90
    assert not metrics.skipped


def test_a_good_step_ends_a_run_of_skips():
    net = Net()
    step = optimize(net, SGD(net.parameters(), lr=0.1), loss_fn, scaler=scaler()).step
    for i in range(45):
        step(*data(1, [0] if i % 15 else [])[0])
    assert step.skipped == 42


@pytest.mark.parametrize("hook", [None, "raises"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_exception_at_the_end_of_a_window(fused, hook):
    """The scaler forgets what it had unscaled, and the next batch trains as if nothing had happened."""
    broken = [True]

    def before_update():
        if broken[0]:
            raise ZeroDivisionError("in the hook")

    net = Net()
    net.body[3].p = 0.0
    twin = copy.deepcopy(net)
    batch = data(1)[0]
    step = optimize(net, AdamW(net.parameters(), fused=fused), loss_fn, before_update=before_update, scaler=scaler()).step
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        step(*batch)
    assert all(p.grad is None for p in net.parameters())
    assert (step.updates, step.skipped, step.scale) == (0, 0, SCALE)
    assert differences(dict(net.named_parameters()), dict(twin.named_parameters())) == []
    broken[0] = False
    net.load_state_dict(twin.state_dict())  # the batch statistics of the failed forward
    assert not step(*batch).skipped
    optimizer = AdamW(twin.parameters(), fused=fused)
    by_hand(twin, [optimizer], [StepLR(optimizer, 1)], [batch], scaler(), before_update=lambda: None)
    assert differences(net.state_dict(), twin.state_dict()) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("change", ["another step", "another step overflows", "by hand", "saved and loaded"])
def test_a_scale_that_changes_inside_an_open_window(change, fused):
    """One scaler for two steps: where the other one's update moves the scale, the micro-batches before count as they should."""
    shared = scaler(16.0, growth_interval=1)

    def build_two():
        torch.manual_seed(1)
        nets = [nn.Linear(6, 3), nn.Linear(6, 3)]
        optimizers = [AdamW(n.parameters(), lr=0.01, fused=fused) for n in nets]
        return nets, optimizers

    (first, second), optimizers = build_two()
    step = optimize(first, optimizers[0], nn.CrossEntropyLoss(), scaler=shared, accumulate=3).step
    other = optimize(second, optimizers[1], nn.CrossEntropyLoss(), scaler=shared, accumulate=2).step
    batches = [(x, y[0]) for x, y in data(9)]
    expected = twin_of_first(fused, batches)
    for i, (x, y) in enumerate(batches):
        step(x, y)
        if i % 3 == 2:
            continue
        if change == "by hand":
            shared.update(32.0 if i % 2 else 8.0)
            continue
        for x, y in data(1, overflow=[0] * (change == "another step overflows" and i % 2)):
            for _ in range(2):
                other(x, y[0])
        if change == "saved and loaded":
            step.load_state_dict(copy.deepcopy(step.state_dict()))
    assert step.updates == 3
    assert change == "by hand" or other.updates == 6
    for p, q in zip(first.parameters(), expected, strict=True):
        torch.testing.assert_close(p, q, atol=2e-5, rtol=2e-4)


def twin_of_first(fused, batches):
    """The same with a scaler of its own, whose scale stays."""
    torch.manual_seed(1)
    net = nn.Linear(6, 3)
    step = optimize(
        net, AdamW(net.parameters(), lr=0.01, fused=fused), nn.CrossEntropyLoss(), scaler=scaler(16.0), accumulate=3
    ).step
    for x, y in batches:
        step(x, y)
    return list(net.parameters())
