"""The end of a window: in which order things happen, to which gradients, and how often."""

from __future__ import annotations

import copy
import functools
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hotloop
from hotloop._stepping import watch_all
from parity.twins import differences, plain_loop, snapshot

# What is compared with runs on the CPU, also where there is an accelerator.
optimize = partial(hotloop.optimize, device="cpu", exact=True)
MSE = nn.MSELoss()


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(count, size=4):
    torch.manual_seed(2)
    return [(torch.randn(size, 4), torch.randn(size, 2)) for _ in range(count)]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


class TestOrder:
    """unscale, before_update, clip, optimizer, scaler, scheduler."""

    @pytest.fixture
    def order(self, monkeypatch):
        self.seen = seen = []

        class Scaler(torch.amp.GradScaler):
            def unscale_(self, optimizer):
                seen.append("unscale")
                super().unscale_(optimizer)

            def update(self, new_scale=None):
                seen.append("scaler")
                super().update(new_scale)

        def clip(*args, **kwargs):
            seen.append("clip")
            return clip_grad_norm_(*args, **kwargs)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        return seen, Scaler

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_with_a_scaler(self, order, fused, accumulate):
        seen, scaler = order
        expected = ["unscale", "hook", "clip", "optimizer", "scaler", "scheduler"]
        assert self.run(seen, scaler=scaler("cpu"), fused=fused, accumulate=accumulate) == expected * 2

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_without_a_scaler(self, order, accumulate):
        seen, _ = order
        assert self.run(seen, accumulate=accumulate) == ["hook", "clip", "optimizer", "scheduler"] * 2

    def test_flush(self, order):
        seen, _ = order
        assert self.run(seen, accumulate=5, flush=True) == ["hook", "clip", "optimizer", "scheduler"]

    def run(self, seen, *, fused=False, accumulate=1, flush=False, **options):
        model = net()
        optimizer = AdamW(model.parameters(), fused=fused)
        optimizer.register_step_pre_hook(lambda *_: seen.append("optimizer"))
        scheduler = LambdaLR(optimizer, lambda epoch: seen.append("scheduler") or 1.0)
        seen.clear()
        step = optimize(
            model,
            optimizer,
            MSE,
            accumulate=accumulate,
            clip_norm=1.0,
            before_update=lambda: seen.append("hook"),
            scheduler=scheduler,
            **options,
        ).step
        for x, y in batches(2 * accumulate if not flush else 3):
            step(x, y)
        if flush:
            step.flush()
        return seen


# --- clipping and the hook --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_norm_is_the_norm_before_clipping(precision, fused):
    """A9, G12: and the update is that of gradients of their true size, clipped."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "fp16" else None
    step = optimize(
        model, SGD(model.parameters(), lr=1.0, fused=fused), MSE, precision=precision, clip_norm=0.05, scaler=scaler
    ).step
    ((x, y),) = batches(1)
    metrics = step(x, y)
    plain = net()
    MSE(plain(x), y).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    assert metrics["grad_norm"] == pytest.approx(expected.item(), rel=2e-2)
    moved = [(a - b).detach().flatten() for a, b in zip(plain.parameters(), model.parameters(), strict=True)]
    assert torch.linalg.vector_norm(torch.cat(moved)).item() == pytest.approx(0.05, rel=1e-2)


def test_without_clipping_there_is_no_norm():
    model = net()
    step = optimize(model, SGD(model.parameters(), lr=1.0), MSE).step
    assert list(step(*batches(1)[0])) == ["loss"]


def test_a_norm_above_all_gradients_changes_no_bit():
    plain, model = net(), net()
    plain_loop(plain, SGD(plain.parameters(), lr=0.1), MSE, batches(3), clip_norm=1e6)
    step = optimize(model, SGD(model.parameters(), lr=0.1), MSE, clip_norm=1e6).step
    for x, y in batches(3):
        step(x, y)
    assert differences(snapshot(model), snapshot(plain)) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_norm_is_summed_in_the_order_of_the_model(seed):
    """Summed in the order of the optimizer's groups, its last bit, and with it the weights, would differ."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(7, 7), nn.LayerNorm(7))])
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    plain = copy.deepcopy(model)
    MSE(plain(x), y).backward()
    expected = clip_grad_norm_(plain.parameters(), 1.0).item()
    groups = [{"params": [p for p in model.parameters() if p.dim() == d], "weight_decay": 0.1 * d} for d in (2, 1)]
    step = optimize(model, AdamW(groups), MSE, clip_norm=1.0).step
    assert step(x, y)["grad_norm"] == expected


def test_the_norm_is_over_the_models_and_then_the_optimizers_other_parameters():
    model, other = net(), nn.Parameter(torch.full((3,), 2.0))
    loss = lambda model, x, y: MSE(model(x), y) + other.square().sum()  # noqa: E731
    ((x, y),) = batches(1)
    plain = net()
    loss(plain, x, y).backward()
    expected = clip_grad_norm_([*plain.parameters(), other], 1e6).item()
    model, step = optimize(model, SGD([other, *model.parameters()], lr=0.1), clip_norm=1e6)
    assert step(loss(model, x, y))["grad_norm"] == expected


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("rescale", [True, False])
def test_the_hook_sees_gradients_of_their_true_size(precision, rescale):
    """Unscaled, and in a window cut short already divided as they will be applied."""
    seen = []
    model = net()
    step = optimize(
        model,
        SGD(model.parameters(), lr=0.0),
        MSE,
        precision=precision,
        accumulate=4,
        before_update=lambda: seen.append(gradients(model)),
    ).step
    data = batches(2)
    for x, y in data:
        step(x, y)
    assert seen == []
    step.flush(rescale=rescale)
    plain = net()
    for x, y in data:
        (MSE(plain(x), y) / (2 if rescale else 4)).backward()
    assert len(seen) == 1
    for found, p in zip(seen[0], plain.parameters(), strict=True):
        assert torch.allclose(found, p.grad, rtol=0.05, atol=1e-3)


def test_what_the_hook_does_to_the_gradients_is_applied():
    plain, model = net(), net()
    optimizer = SGD(plain.parameters(), lr=0.1)
    for x, y in batches(3):
        optimizer.zero_grad()
        MSE(plain(x), y).backward()
        clip_grad_value_(plain.parameters(), 0.01)
        optimizer.step()
    hook = lambda: clip_grad_value_(model.parameters(), 0.01)  # noqa: E731
    step = optimize(model, SGD(model.parameters(), lr=0.1), MSE, before_update=hook).step
    for x, y in batches(3):
        step(x, y)
    assert differences(snapshot(model), snapshot(plain)) == []


def test_a_hook_may_drop_gradients():
    """As DINO does with its last layer: a parameter without a gradient stays."""
    model = net()
    before = copy.deepcopy(model.state_dict())
    step = optimize(model, SGD(model.parameters(), lr=0.1), MSE, before_update=lambda: model[2].zero_grad(), clip_norm=1.0).step
    step(*batches(1)[0])
    assert [torch.equal(before[name], value) for name, value in model.state_dict().items()] == [False, False, True, True]


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_happens_exactly_once(precision, accumulate):
    """O9, O12: also for an optimizer of the user's own class."""
    calls = []

    class Own(SGD):
        def step(self, closure=None):
            calls.append(closure)
            return super().step(closure)

    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=64.0) if precision == "fp16" else None
    options = {"precision": precision, "accumulate": accumulate, "scaler": scaler}
    step = optimize(model, Own(model.parameters(), lr=0.1), MSE, **options).step
    for x, y in batches(6):
        step(x, y)
    assert calls == [None] * (6 // accumulate)
    assert step.updates == 6 // accumulate


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_float16_has_a_scaler(precision):
    """A25"""
    model = net()
    step = optimize(model, SGD(model.parameters(), lr=0.1), MSE, precision=precision).step
    step(*batches(1)[0])
    assert not step.scaler.is_enabled()
    assert step.scale == 1.0
    assert step.skipped == 0


def test_a_learning_rate_set_by_hand_holds_in_the_next_step():
    """G14"""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = optimize(model, optimizer, MSE).step
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    step(*batches(1)[0])
    assert differences(model.state_dict(), before) == []


def test_a_tensor_as_learning_rate_stays_one():
    """G11"""
    model = net()
    lr = torch.tensor(0.1)
    optimizer = Adam(model.parameters(), lr=lr, foreach=False)
    scheduler = StepLR(optimizer, 1, 0.5)
    step = optimize(model, optimizer, MSE, scheduler=scheduler).step
    step(*batches(1)[0])
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.05)


def test_parameters_added_later_are_trained():
    model = net()
    optimizer = SGD(model[0].parameters(), lr=0.1)
    step = optimize(model, optimizer, MSE).step
    x, y = batches(1)[0]
    step(x, y)
    assert torch.equal(model[2].weight, net()[2].weight)
    optimizer.add_param_group({"params": model[2].parameters()})
    step(x, y)
    assert not torch.equal(model[2].weight, net()[2].weight)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, once a process
@pytest.mark.parametrize("make", [partial(SGD, lr=0.1), partial(Adagrad, lr=0.1), partial(torch.optim.SparseAdam, lr=0.1)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients(make, accumulate):
    """O15"""

    def build():
        torch.manual_seed(1)
        return nn.EmbeddingBag(10, 2, sparse=True)

    torch.manual_seed(2)
    data = [(torch.randint(10, (4, 3)), torch.randn(4, 2)) for _ in range(4)]
    plain, model = build(), build()
    optimizer = make(plain.parameters())
    plain_loop(plain, optimizer, MSE, data, accumulate=accumulate)
    expected = snapshot(plain, optimizer)
    optimizer = make(model.parameters())
    step = optimize(model, optimizer, MSE, accumulate=accumulate).step
    for x, y in data:
        step(x, y)
    assert differences(snapshot(model, optimizer), expected) == []


def test_several_optimizers_share_one_update():
    """One joint norm for clipping, one count."""

    def loop(model, make_step):
        optimizers = [AdamW(model[0].parameters(), lr=0.01), SGD(model[2].parameters(), lr=0.1, momentum=0.9)]
        schedulers = [StepLR(o, 2, 0.5) for o in optimizers]
        run = make_step(model, optimizers, schedulers)
        for x, y in batches(6):
            run(x, y)
        return snapshot(model, *optimizers, *schedulers)

    def by_hand(model, optimizers, schedulers):
        def run(x, y):
            for optimizer in optimizers:
                optimizer.zero_grad()
            MSE(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            for each in (*optimizers, *schedulers):
                each.step()

        return run

    steps = []

    def wrapped(model, optimizers, schedulers):
        steps.append(optimize(model, optimizers, MSE, clip_norm=0.1, scheduler=schedulers).step)
        return steps[0]

    assert differences(loop(net(), wrapped), loop(net(), by_hand)) == []
    assert steps[0].updates == 6


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, as they are found in many repositories: torch's own constructor is not called."""

    def __init__(self, base):
        self.base, self.count = base, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def step(self, closure=None):
        self.base.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_optimizer_around_another(precision):
    def optimizer_of(model):
        return Lookahead(SGD(model.parameters(), lr=0.1))

    plain, model = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=precision == "fp16")
    optimizer = optimizer_of(plain)
    for x, y in batches(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
            output = plain(x)
        scaler.scale(MSE(output.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    options = {"scaler": torch.amp.GradScaler("cpu", init_scale=64.0)} if precision == "fp16" else {}
    step = optimize(model, optimizer_of(model), MSE, precision=precision, **options).step
    assert not any(step(x, y).skipped for x, y in batches(5))
    assert differences(snapshot(model), snapshot(plain)) == []
    assert (step.updates, step.skipped) == (5, 0)


HOOKS = {
    "before": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "after": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "before any": lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
    "after any": lambda optimizer, hook: register_optimizer_step_post_hook(hook),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_users_own_run_once_per_update(kind, late, precision):
    """On the optimizer and for all optimizers, set before `optimize` or later."""
    seen, model = [], net()
    optimizer = SGD(model.parameters(), lr=1e-3)
    handle = None if late else HOOKS[kind](optimizer, lambda *_: seen.append(kind))
    step = optimize(model, optimizer, MSE, precision=precision).step
    data = batches(3)
    step(*data[0])
    handle = handle or HOOKS[kind](optimizer, lambda *_: seen.append(kind))
    step(*data[1])
    handle.remove()
    step(*data[2])
    assert len(seen) == (1 if late else 2)


def test_a_profiler_sees_the_update():
    model = net()
    step = optimize(model, SGD(model.parameters(), lr=0.1), MSE).step
    step(*batches(1)[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(*batches(1)[0])
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_an_update_of_ones_own_class_is_the_one_that_runs():
    """Also where the class changes `step` after `optimize`, or the instance has a step of its own."""
    calls, model = [], net()

    class Own(SGD):
        pass

    optimizer = Own(model.parameters(), lr=0.1)
    step = optimize(model, optimizer, MSE).step
    step(*batches(1)[0])
    Own.step = lambda self, closure=None: calls.append("class")
    step(*batches(1)[0])
    optimizer.step = lambda closure=None: calls.append("instance")
    step(*batches(1)[0])
    assert calls == ["class", "instance"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["bare", "clip"])
def test_a_loss_that_reaches_no_parameter(precision, options):
    """As in a plain loop nothing is changed, and nothing complains."""
    model = net()
    before = copy.deepcopy(model.state_dict())
    step = optimize(model, SGD(model.parameters(), lr=0.1), precision=precision, **options).step
    x = torch.randn(4, requires_grad=True)
    assert step(x.sum()).updated
    assert differences(model.state_dict(), before) == []
    model_loss = MSE(model(torch.randn(5, 4)), torch.randn(5, 2))
    step(model_loss)
    assert not torch.equal(before["0.weight"], model[0].weight)


def test_a_tuple_of_optimizers_and_one_scheduler():
    model = net()
    optimizers = (SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1))
    scheduler = StepLR(optimizers[1], 1, 0.5)
    step = optimize(model, optimizers, MSE, scheduler=scheduler).step
    step(*batches(1)[0])
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.1, 0.05]


def test_lbfgs_reaches_the_end_in_one_step():
    """O1, O4: and the metric is the first loss."""
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    x = torch.randn(20, 4)
    y = x @ torch.randn(4, 2)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    first = MSE(model(x), y).item()
    calls.clear()
    step = optimize(model, torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=20), MSE).step
    with torch.no_grad():
        metrics = step(x, y)
    assert metrics["loss"] == first
    assert metrics.updated
    assert all(calls)
    assert 1 < len(calls) <= 25
    assert MSE(model(x), y).item() < 1e-5
    assert step.updates == 1


def test_lbfgs_with_a_hook_and_a_norm():
    """Both are applied to every evaluation; what is reported is the first norm."""
    model, seen = net(), []
    step = optimize(
        model,
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
        MSE,
        clip_norm=0.05,
        before_update=lambda: seen.append(gradients(model)),
    ).step
    ((x, y),) = batches(1)
    plain = net()
    MSE(plain(x), y).backward()
    expected = clip_grad_norm_(plain.parameters(), 1e6).item()
    metrics = step(x, y)
    assert metrics["grad_norm"] == expected
    assert len(seen) > 1
    assert differences([p.grad for p in plain.parameters()], seen[0]) == []


# --- leftovers of the old loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "groups",
    [
        lambda m: m.parameters(),
        lambda m: [{"params": m[0].parameters(), "lr": 0.2}, {"params": m[2].parameters()}],
    ],
    ids=["one group", "two groups"],
)
def test_an_optimizer_step_of_the_old_loop_warns_once(precision, groups):
    model = net()
    optimizer = SGD(groups(model), lr=0.1)
    step = optimize(model, optimizer, MSE, precision=precision).step
    data = batches(3)
    step(*data[0])
    with pytest.warns(RuntimeWarning, match=r"optimizer\.step\(\) was called after step.*remove the call") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    for x, y in data[1:]:
        step(x, y)
        optimizer.step()  # it does not warn again: pytest makes a warning an error


def test_of_several_optimizers_too():
    model = net()
    optimizers = [SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)]
    step = optimize(model, optimizers, MSE).step
    step(*batches(1)[0])
    with pytest.warns(RuntimeWarning, match=r"optimizer\.step\(\)"):
        optimizers[1].step()


def test_where_the_first_group_is_frozen_too():
    model = net()
    model[0].requires_grad_(False)
    optimizer = SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    step = optimize(model, optimizer, MSE).step
    step(*batches(1)[0])
    with pytest.warns(RuntimeWarning, match=r"optimizer\.step\(\)"):
        optimizer.step()


def test_a_loop_of_the_users_own_beside_the_step_is_no_leftover():
    """A32: the user's own backward and update with fresh gradients; they are not scaled either."""
    model, plain = net(), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, step = optimize(model, optimizer, MSE)
    x, y = batches(1)[0]
    step(x, y)
    optimizer.zero_grad()
    MSE(model(x), y).backward()
    optimizer.step()
    plain_loop(plain, SGD(plain.parameters(), lr=0.1), MSE, [(x, y)] * 2)
    assert differences(snapshot(model), snapshot(plain)) == []


def test_two_steps_that_share_an_optimizer_are_no_leftovers():
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    optimizer = SGD([p for m in models for p in m.parameters()], lr=0.1)
    steps = [optimize(m, optimizer, MSE).step for m in models]
    for _ in range(3):
        for step in steps:
            step(*batches(1)[0])


def test_a_step_that_is_gone_warns_no_more():
    """The user's optimizer outlives the step, and does not keep it alive."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = optimize(model, optimizer, MSE).step
    step(*batches(1)[0])
    alive = weakref.ref(step)
    del step
    assert alive() is None
    optimizer.step()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", ["hook", "optimizer", "scheduler"])
def test_an_error_at_the_end_of_a_window(stage, precision):
    """The window is dropped, nothing is counted that did not happen, and the next windows train."""
    broken = [False]

    def fail(at):
        if broken[0] and at == stage:
            raise ZeroDivisionError(at)

    class Own(SGD):
        def step(self, closure=None):
            fail("optimizer")
            return super().step(closure)

    model = net()
    optimizer = Own(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda epoch: fail("scheduler") or 1.0)
    step = optimize(
        model,
        optimizer,
        MSE,
        accumulate=2,
        clip_norm=1.0,
        precision=precision,
        before_update=lambda: fail("hook"),
        scheduler=scheduler,
    ).step
    data = batches(7)
    for x, y in data[:3]:
        step(x, y)
    assert step.updates == 1
    before = copy.deepcopy(model.state_dict())
    broken[0] = True
    with pytest.raises(ZeroDivisionError, match=stage):
        step(*data[3])
    broken[0] = False
    happened = stage == "scheduler"
    assert step.updates == 1 + happened
    assert (differences(model.state_dict(), before) == []) is not happened
    if not happened:
        assert all(p.grad is None for p in model.parameters())
    assert [step(x, y).updated for x, y in data[4:]] == [False, True, False]
    assert step.updates == 2 + happened
    assert step.scale == (65536.0 if precision == "fp16" else 1.0)


@pytest.mark.parametrize("kind", [SGD, Adam, Adagrad])
def test_a_step_that_user_code_has_put_around_torchs_is_called(kind, monkeypatch):
    """A profiler or an experiment tracker wraps `Adam.step` for every instance, and keeps its attributes as it should."""
    calls = []
    model = net()
    step = optimize(model, kind(model.parameters(), lr=0.1), MSE).step
    step(*batches(1)[0])  # by now torch has put its own wrapper there
    original = kind.step

    @functools.wraps(original)
    def counted(self, closure=None):
        calls.append(self)
        return original(self, closure)

    monkeypatch.setattr(kind, "step", counted)
    for x, y in batches(2):
        step(x, y)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", [SGD, Adam, Adagrad])
def test_an_optimizer_that_is_differentiated_through_keeps_its_gradients_on(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, differentiable=True)
    # In place on leaves that require grad, such an update raises: torch's own loop does as well.
    with pytest.raises(RuntimeError, match="leaf Variable"):
        optimize(model, optimizer, MSE).step(*batches(1)[0])
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", ["fp32", "fp16", "the user's own"])
def test_an_evaluation_may_begin_and_end_while_an_optimizer_steps(kind):
    """In another thread, for example; torch's own loop over its hooks bears none that comes or goes meanwhile."""
    model = nn.Linear(4, 2)
    optimizer = AdamW(model.parameters())
    watch_all(lambda: None)()
    if kind == "the user's own":
        run = optimizer.step
    else:
        step = hotloop.optimize(model, optimizer, nn.MSELoss(), device="cpu", precision=kind).step
        run = partial(step, torch.ones(3, 4), torch.ones(3, 2))
    ends = []
    end = watch_all(lambda: ends.append(watch_all(lambda: None)))
    try:
        for _ in range(2):
            run()
    finally:
        for each in (end, *ends):
            each()
    assert len(ends) == 2
    run()
    assert len(ends) == 2


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, once a process
def test_the_norm_of_sparse_gradients_is_refused_by_name():
    model = nn.Sequential(nn.EmbeddingBag(10, 2, sparse=True), nn.Linear(2, 2))
    before = copy.deepcopy(model.state_dict())
    step = optimize(model, SGD(model.parameters(), lr=0.1), MSE, clip_norm=1.0).step
    with pytest.raises(
        TypeError, match=r"clip_norm=1\.0\): the gradient of '0\.weight' is sparse.*sparse=False.*before_update="
    ):
        step(torch.randint(10, (4, 3)), torch.randn(4, 2))
    assert differences(model.state_dict(), before) == []
    assert step.updates == 0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("form", ["batch", "loss", "two optimizers", "flush"])
def test_parameters_that_were_replaced_behind_the_optimizer_raise(form, precision):
    """Nothing would be trained from then on, without a word."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    if form == "two optimizers":
        optimizer = [SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)]
    step = optimize(model, optimizer, MSE, precision=precision, accumulate=2 if form == "flush" else 1).step
    (x, y), *_ = batches(1)
    assert step(x, y).updated == (form != "flush")
    step.flush()
    updates = step.updates
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match=r"trains none of this model's parameters any more.*assign=True"):
        if form == "loss":
            step(MSE(model(x), y))
        else:
            step(x, y)
            step.flush()
    assert step.updates == updates


@pytest.mark.parametrize("clip_norm", [None, 100.0])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_after_an_error_in_a_fused_optimizer_the_next_update_is_a_whole_one(kind, parts, clip_norm):
    """In float16 the scale travels with the optimizer."""

    def training():
        model = net()
        own = [list(model.parameters())] if parts == 1 else [list(model[0].parameters()), list(model[2].parameters())]
        optimizers = [kind(p, lr=0.1, fused=True) for p in own]
        return model, optimizers, optimize(model, optimizers, MSE, precision="fp16", clip_norm=clip_norm).step

    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    one, two, three = batches(3)
    plain, _, step = training()
    step(*one)
    step(*three)
    expected = plain.state_dict()

    model, optimizers, step = training()
    step(*one)
    handle = optimizers[0].register_step_pre_hook(fails)
    with pytest.raises(torch.OutOfMemoryError):
        step(*two)
    handle.remove()
    assert step(*three).updated
    assert differences(model.state_dict(), expected) == []
    assert step.updates == 2


def test_a_loss_that_reaches_only_what_no_optimizer_trains_is_no_replacement():
    model = net()
    step = optimize(model, SGD(model[0].parameters(), lr=0.1)).step
    assert step(model[2](torch.randn(4, 8)).sum()).updated
