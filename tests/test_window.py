"""Accumulation: what counts into an update, and what does not."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

import hotloop
from parity.twins import differences, plain_loop, snapshot
from parity.untouched import refused

# What is compared with runs on the CPU, also where there is an accelerator.
optimize = partial(hotloop.optimize, device="cpu", exact=True)
MSE = nn.MSELoss()


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(*sizes):
    torch.manual_seed(2)
    return [(torch.randn(n, 4), torch.randn(n, 2)) for n in sizes]


def made(loss_fn=MSE, *, lr=0.5, **options):
    model = net()
    return optimize(model, SGD(model.parameters(), lr=lr), loss_fn, **options)


def gradient_of(data, loss_fn=MSE):
    """The gradient of the mean loss over all rows of these batches."""
    model = net()
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    loss_fn(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def moved_by(model, lr=0.5):
    """The gradient behind the weights' way from where `net()` starts."""
    return [(old - new).detach() / lr for old, new in zip(net().parameters(), model.parameters(), strict=True)]


def close(a, b, tolerance=1e-6):
    return all(torch.allclose(x, y, rtol=0, atol=tolerance) for x, y in zip(a, b, strict=True))


# --- weights and flush ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4, 2), (1, 6, 3), (5, 5, 5), (1, 1000, 2)])
def test_weighted_by_its_samples_a_window_is_one_large_batch(sizes):
    """G1: the mean of the means is something else."""
    data = batches(*sizes)
    model, step = made(accumulate=3)
    assert [step(x, y, weight=len(x)).updated for x, y in data] == [False, False, True]
    assert close(moved_by(model), gradient_of(data))
    if len(set(sizes)) > 1:
        unweighted, step = made(accumulate=3)
        for x, y in data:
            step(x, y)
        assert not close(moved_by(unweighted), gradient_of(data), 1e-3)


@pytest.mark.parametrize("weight", [1, 4, 0.25, 1e6])
def test_equal_weights_change_no_bit(weight):
    data = batches(3, 3, 3, 3)
    weighted, plain = made(accumulate=2), made(accumulate=2)
    for x, y in data:
        weighted.step(x, y, weight=weight)
        plain.step(x, y)
    assert differences(snapshot(weighted.model), snapshot(plain.model)) == []


@pytest.mark.parametrize("weights", [(2, 0, 3), (0, 2, 3), (2, 3, 0)])
def test_a_weight_of_zero_leaves_a_micro_batch_out(weights):
    data = batches(4, 4, 4)
    model, step = made(accumulate=3)
    for (x, y), weight in zip(data, weights, strict=True):
        step(x, y, weight=weight)
    repeated = [pair for pair, weight in zip(data, weights, strict=True) for _ in range(weight)]
    assert close(moved_by(model), gradient_of(repeated))


def masked(output, mask):
    """The mean over what counts: 0 / 0, and so are its gradients, where nothing does."""
    return (output.square().mean(1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("weights", [(2, 0, 3), (0, 2, 3), (2, 3, 0), (0, 0, 3)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_weight_of_zero_counts_for_nothing_also_where_its_gradient_is_not_finite(precision, weights):
    """A batch of padding alone."""
    data = [(x, torch.full((4,), float(weight > 0))) for (x, _), weight in zip(batches(4, 4, 4), weights, strict=True)]
    model, step = made(masked, accumulate=3, precision=precision)
    for (x, mask), weight in zip(data, weights, strict=True):
        metrics = step(x, mask, weight=weight)
    repeated = [pair for pair, weight in zip(data, weights, strict=True) for _ in range(weight)]
    assert close(moved_by(model), gradient_of(repeated, masked), 1e-6 if precision == "fp32" else 1e-2)
    assert metrics.updated
    assert not metrics.skipped
    assert math.isfinite(step.mean()["loss"])


def test_a_window_of_weights_zero_changes_nothing():
    model, step = made(accumulate=2)
    for x, y in batches(4, 4):
        step(x, y, weight=0)
    assert close(moved_by(model), [torch.zeros(())] * 4, 0)


def test_tokens_as_weights_do_not_blow_gradients_up():
    """float16 would overflow if the loss were multiplied with the number of tokens."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    step = optimize(model, SGD(model.parameters(), lr=0.5), MSE, accumulate=2, precision="fp16", scaler=scaler).step
    for x, y in batches(4, 4):
        skipped = step(x, y, weight=1_000_000).skipped
    assert not skipped


@pytest.mark.parametrize("accumulate", [2, 3, 4])
def test_flush_divides_by_the_true_size(accumulate):
    """G3 to G5: the last short window is neither dropped nor made too small."""
    data = batches(*[4] * 5)
    model, step = made(accumulate=accumulate)
    for x, y in data[: 5 // accumulate * accumulate]:
        step(x, y)
    before = copy.deepcopy(model)
    rest = data[5 // accumulate * accumulate :]
    for x, y in rest:
        assert not step(x, y).updated
    assert step.flush() is True
    assert step.updates == 5 // accumulate + 1
    x, y = (torch.cat(part) for part in zip(*rest, strict=True))
    MSE(before(x), y).backward()
    expected = [p - 0.5 * p.grad for p in before.__wrapped__.parameters()]
    assert close(model.parameters(), expected)


def test_flush_without_rescaling_is_the_loop_that_most_people_write():
    """Bitwise the loop that divides by `accumulate` and applies what is there at the end of an epoch."""
    data = batches(*[4] * 5)
    plain = net()
    optimizer = Adam(plain.parameters(), lr=0.01)
    for _ in range(2):
        for i, (x, y) in enumerate(data):
            (MSE(plain(x), y) / 3).backward()
            if i % 3 == 2 or i == 4:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    expected = snapshot(plain, optimizer)
    model = net()
    optimizer = Adam(model.parameters(), lr=0.01)
    step = optimize(model, optimizer, MSE, accumulate=3, clip_norm=0.1).step
    for _ in range(2):
        for x, y in data:
            step(x, y)
        step.flush(rescale=False)
    assert differences(snapshot(model, optimizer), expected) == []


@pytest.mark.parametrize("rescale", [True, False])
def test_flush_of_a_weighted_window(rescale):
    data = batches(4, 2)
    model, step = made(accumulate=4)
    for x, y in data:
        step(x, y, weight=len(x))
    step.flush(rescale=rescale)
    share = 1.0 if rescale else 2 / 4
    assert close(moved_by(model), [g * share for g in gradient_of(data)])


def test_flush_where_nothing_is_open_does_nothing():
    model, step = made(accumulate=2, clip_norm=1.0)
    for x, y in batches(4, 4):
        step(x, y)
    step.mean()
    before = snapshot(model, step)
    assert step.flush() is False
    assert differences(snapshot(model, step), before) == []
    assert step.mean() == {}


def test_flush_clips_and_moves_the_scheduler():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 1)
    step = optimize(model, optimizer, MSE, accumulate=4, clip_norm=0.01, scheduler=scheduler).step
    for x, y in batches(4, 4):
        step(x, y)
    step.mean()
    step.flush()
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in moved_by(model)]))
    assert norm.item() == pytest.approx(0.01, rel=1e-3)
    assert scheduler.last_epoch == 1
    mean = step.mean()
    assert list(mean) == ["grad_norm"]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradient_of(batches(4, 4))]))
    assert mean["grad_norm"] == pytest.approx(expected.item(), rel=1e-5)


# --- windows ----------------------------------------------------------------------------------------------------------


def test_an_open_window_is_carried_over():
    """G9: two epochs of five batches with windows of two are five updates; the scheduler moves with each, and only then."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 100)
    step = optimize(model, optimizer, MSE, accumulate=2, scheduler=scheduler).step
    seen = []
    for _ in range(2):
        for x, y in batches(*[4] * 5):
            seen.append((step(x, y).updated, scheduler.last_epoch))
    assert seen == [(bool(i % 2), (i + 1) // 2) for i in range(10)]
    assert step.updates == 5


def test_the_scheduler_moves_once_an_update():
    """G8"""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 1)
    step = optimize(model, optimizer, MSE, accumulate=4, scheduler=scheduler).step
    for x, y in batches(*[4] * 8):
        step(x, y)
    assert scheduler.last_epoch == 2


def test_the_reported_loss_is_never_divided():
    step = made(accumulate=3).step
    for (x, y), weight in zip(batches(4, 4), (1, 7), strict=True):
        assert step(x, y, weight=weight)["loss"] == MSE(net()(x), y).item()


def test_batch_statistics_see_micro_batches():
    """G13"""
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    step = optimize(model, SGD(model.parameters(), lr=0.1), MSE, accumulate=2).step
    for x, y in batches(4, 4, 4, 4):
        step(x, y)
    assert model[1].num_batches_tracked.item() == 4


def test_clipping_is_over_the_sum_of_the_window():
    """Clipped once: clipping each micro-batch gives another direction (F-28)."""
    model = net()
    data = batches(4, 4)
    plain = net()
    plain_loop(plain, SGD(plain.parameters(), lr=0.5), MSE, data, accumulate=2, clip_norm=0.1)
    step = optimize(model, SGD(model.parameters(), lr=0.5), MSE, accumulate=2, clip_norm=0.1).step
    norms = ["grad_norm" in step(x, y) for x, y in data]
    assert norms == [False, True]
    assert differences(snapshot(model), snapshot(plain)) == []


# --- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_can_be_looked_at_after_a_step():
    model, step = made()
    ((x, y),) = batches(4)
    step(x, y)
    assert close([p.grad for p in model.parameters()], gradient_of([(x, y)]), 0)


def test_gradients_are_dropped_before_the_forward_of_a_batch():
    """Not after the update, and not only before the backward: the forward has their memory."""
    model, step = made(accumulate=2)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append([p.grad is None for p in module.parameters()]))
    for x, y in batches(4, 4, 4):
        step(x, y)
    assert seen == [[True] * 4, [False] * 4, [True] * 4]


def test_before_the_backward_of_a_loss_of_the_users_own():
    model, step = made(None)
    (x, y), (x2, y2) = batches(4, 4)
    step(MSE(model(x), y))
    kept = [p.grad.clone() for p in model.parameters()]
    loss = MSE(model(x2), y2)
    assert close(kept, [p.grad for p in model.parameters()], 0)
    before = copy.deepcopy(model.__wrapped__)
    MSE(before(x2), y2).backward()
    step(loss)
    expected = [p.grad for p in before.parameters()]
    assert close([p.grad for p in model.parameters()], expected, 0)


@pytest.mark.parametrize("form", ["batch", "loss", "backward"])
def test_what_another_loss_left_does_not_count(form):
    model, step = made(None if form == "loss" else MSE)
    ((x, y),) = batches(4)
    model(x).square().sum().backward()
    if form == "batch":
        step(x, y)
    elif form == "loss":
        step(MSE(model(x), y))
    else:
        step.backward(MSE(model(x), y))
        step.flush()
    assert close(moved_by(model), gradient_of([(x, y)]))


def test_gradients_of_parameters_that_no_optimizer_has_do_not_grow():
    """A head alone is trained; the backbone's gradients would spoil the norm."""
    model = net()
    step = optimize(model, SGD(model[2].parameters(), lr=0.0), MSE, clip_norm=100.0).step
    ((x, y),) = batches(4)
    norms = [step(x, y)["grad_norm"] for _ in range(3)]
    assert norms[0] == norms[1] == norms[2]
    assert close([p.grad for p in model.parameters()], gradient_of([(x, y)]))


def test_gradients_of_the_loss_functions_and_the_optimizers_other_parameters_are_dropped():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, y):
            return MSE(output * self.scale * other, y)

    loss_fn, other, model = Scaled(), nn.Parameter(torch.ones(())), net()
    step = optimize(model, SGD([*model.parameters(), loss_fn.scale, other], lr=0.0), loss_fn).step
    ((x, y),) = batches(4)
    gradients = []
    for _ in range(2):
        step(x, y)
        gradients.append((loss_fn.scale.grad.item(), other.grad.item()))
    assert gradients[0] == gradients[1]
    assert gradients[0][0] != 0


def test_a_model_of_several_kinds_of_modules_has_all_its_gradients_dropped():
    """Shared modules, parameters that are None, lists of parameters, and parts replaced after `optimize`."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Linear(4, 4, bias=False)
            self.rows = nn.ParameterList([nn.Parameter(torch.ones(4))])
            self.register_parameter("nothing", None)
            self.nobody = None
            self.c = nn.Linear(4, 4)

        def forward(self, x):
            return self.c(self.b(self.a(x)) * self.rows[0]).sum()

    model = Odd()
    model, step = optimize(model, SGD(model.parameters(), lr=0.0))
    step(torch.ones(2, 4))
    model.c = nn.Linear(4, 4)
    step(torch.ones(2, 4))
    step(torch.ones(2, 4))
    fresh = copy.deepcopy(model.__wrapped__)
    fresh.zero_grad()
    fresh(torch.ones(2, 4)).backward()
    assert close([p.grad for p in model.parameters()], [p.grad for p in fresh.parameters()], 0)


def test_an_optimizer_with_a_zero_grad_of_its_own_has_it_called():
    calls = []

    class Own(SGD):
        def zero_grad(self, set_to_none=True):
            calls.append(set_to_none)
            super().zero_grad(set_to_none)

    model = net()
    step = optimize(model, Own(model.parameters(), lr=0.1), MSE, accumulate=2).step
    for x, y in batches(4, 4, 4):
        step(x, y)
    assert len(calls) == 2


# --- further losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_further_loss_is_added_as_it_is(accumulate):
    """Not divided, and not counted as a micro-batch."""
    data = batches(*[4] * accumulate)
    plain = net()
    for x, y in data:
        (MSE(plain(x), y) / accumulate).backward()
        plain(x).abs().sum().backward()
    expected = [p.grad for p in plain.parameters()]
    model, step = made(accumulate=accumulate)
    updated = []
    for x, y in data:
        step.backward(model(x).abs().sum())
        updated.append(step(x, y).updated)
    assert updated == [False] * (accumulate - 1) + [True]
    assert close(moved_by(model), expected)
    assert step.updates == 1


def test_a_window_of_further_losses_alone():
    ((x, y),) = batches(4)
    for rescale in (True, False):
        model, step = made(accumulate=3)
        step.backward(MSE(model(x), y))
        assert step.updates == 0
        assert step.flush(rescale=rescale)
        assert close(moved_by(model), gradient_of([(x, y)]))


def test_losses_that_share_a_graph():
    ((x, y),) = batches(4)
    model, step = made(None)
    output = model(x)
    step.backward(output.sum(), retain_graph=True)
    step(MSE(output, y))
    plain = net()
    (plain(x).sum() + MSE(plain(x), y)).backward()
    assert close(moved_by(model), [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_further_loss_under_no_grad(precision):
    """The loss carries its graph: what surrounds the call must not cut it off."""
    ((x, _),) = batches(4)
    model = net()
    model, step = hotloop.optimize(model, SGD(model.parameters(), lr=0.1), device="cpu", precision=precision)
    loss = model(x).sum()
    half = loss.to(torch.bfloat16)
    with torch.no_grad():
        step.backward(loss, retain_graph=True)
        step.backward(half)
        assert not torch.is_grad_enabled()
    assert all(p.grad is not None for p in model.parameters())


# --- leftover zero_grad -----------------------------------------------------------------------------------------------

STRAY = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
}
NEXT = {
    "batch": lambda model, step, x, y: step(x, y),
    "loss": lambda model, step, x, y: step(MSE(model(x), y)),
    "backward": lambda model, step, x, y: step.backward(MSE(model(x), y)),
    "flush": lambda model, step, x, y: step.flush(),
}


@pytest.mark.parametrize("following", NEXT)
@pytest.mark.parametrize("stray", STRAY)
def test_a_stray_zero_grad_inside_a_window_raises(stray, following):
    """It would lose most of the window in silence. The window is dropped, and the next one is whole."""
    model = net()
    optimizer = SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.5)
    model, step = optimize(model, optimizer, MSE, accumulate=3)
    first, second, *data = batches(4, 4, 4, 4, 4)
    step(*first)
    STRAY[stray](model, optimizer)
    with pytest.raises(RuntimeError, match=r"1 of 3 micro-batches.*zero_grad\(\)"):
        NEXT[following](model, step, *second)
    assert all(p.grad is None for p in model.parameters())
    assert [step(x, y).updated for x, y in data] == [False, False, True]
    assert close(moved_by(model), gradient_of(data))


@pytest.mark.parametrize("which", [0, 1])
def test_a_stray_zero_grad_of_one_of_several_models_raises(which):
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    models, step = optimize(models, SGD([p for m in models for p in m.parameters()], lr=0.5), accumulate=2)
    ((x, _),) = batches(4)
    step(sum(m(x).sum() for m in models))
    models[which].zero_grad()
    with pytest.raises(RuntimeError, match="zero_grad"):
        step(sum(m(x).sum() for m in models))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, once a process
@pytest.mark.parametrize("sparse", [False, True])
def test_a_stray_zero_grad_that_leaves_zeros_raises(sparse):
    model = nn.EmbeddingBag(6, 2, sparse=sparse)
    optimizer = SGD(model.parameters(), lr=0.5)
    step = optimize(model, optimizer, accumulate=2).step
    words = torch.randint(6, (3, 2))
    step(model(words).sum())
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="zero_grad"):
        step(model(words).sum())
    assert [step(model(words).sum()).updated for _ in range(2)] == [False, True]


def test_gradients_that_are_changed_in_place_are_no_alarm():
    """Clipped by hand inside a window, for example."""
    model, step = made(accumulate=2)
    first, second = batches(4, 4)
    step(*first)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert step(*second).updated


@pytest.mark.parametrize("following", NEXT)
def test_a_stray_zero_grad_before_another_backward_is_told(following):
    """Gradients are there, but not those of the window. Others may be meant, so it warns, and once."""
    model, step = made(accumulate=3)
    optimizer = step._optimizers[0]
    first, second, third = batches(4, 4, 4)
    step(*first)
    optimizer.zero_grad()
    MSE(model(second[0]), second[1]).backward()
    with pytest.warns(RuntimeWarning, match=r"all gradients have been replaced.*zero_grad\(\).*step\.backward") as caught:
        NEXT[following](model, step, *third)
    assert caught[0].filename == __file__
    optimizer.zero_grad()
    MSE(model(second[0]), second[1]).backward()
    step(*third)  # it does not warn again: pytest makes a warning an error


@pytest.mark.parametrize("further", ["backward", "one gradient", "between windows"])
def test_what_leaves_gradients_of_the_window_is_no_alarm(further):
    model, step = made(accumulate=2)
    first, second = batches(4, 4)
    step(*first)
    if further == "backward":
        MSE(model(second[0]), second[1]).backward()
    elif further == "one gradient":
        model[0].weight.grad = model[0].weight.grad * 0.5
    else:
        step(*first)
        model.zero_grad()
        MSE(model(second[0]), second[1]).backward()
    step(*second)
    step.flush()


def test_a_stray_zero_grad_after_a_further_loss_raises():
    model, step = made()
    ((x, y),) = batches(4)
    step.backward(model(x).sum())
    model.zero_grad()
    with pytest.raises(RuntimeError, match="zero_grad"):
        step(x, y)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_zero_grad_between_windows_is_harmless(accumulate):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.5)
    step = optimize(model, optimizer, MSE, accumulate=accumulate).step
    data = batches(*[4] * 4)
    for i, (x, y) in enumerate(data):
        if i % accumulate == 0:
            optimizer.zero_grad()
        step(x, y)
    plain = net()
    plain_loop(plain, SGD(plain.parameters(), lr=0.5), MSE, data, accumulate=accumulate)
    assert differences(snapshot(model), snapshot(plain)) == []


def test_a_parameter_that_is_reached_in_some_micro_batches_only_is_no_alarm():
    model = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    step = optimize(model, SGD(model.parameters(), lr=0.1), accumulate=4).step
    ((x, _),) = batches(4)
    for name in "abab":
        updated = step(model[name](x).sum()).updated
    assert updated


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda step, x, y: step(x), "target"),
        (lambda step, x, y: step(x[:, :3], y), "shapes cannot be multiplied"),
        (lambda step, x, y: step(x, y[:3]), "size of tensor"),
        (lambda step, x, y: step(x, y, weight=-1), "weight"),
    ],
    ids=["no target", "model", "loss_fn", "weight"],
)
def test_a_batch_that_fails_before_its_backward_keeps_the_window(bad, text):
    ((x, y),) = batches(4)
    model, step = made(accumulate=2, loss_fn=lambda output, y: (output - y).square().mean())
    step(x, y)
    with refused(step, Exception, text):
        bad(step, x, y)
    assert step(x, y).updated
    assert close(moved_by(model), gradient_of([(x, y)]))


def test_the_window_of_one_step_is_not_that_of_another():
    models = [net(), net()]
    steps = [optimize(m, SGD(m.parameters(), lr=0.5), MSE, accumulate=2).step for m in models]
    a, b = batches(4, 4)
    steps[0](*a)
    steps[1](*b)
    steps[0](*a)
    assert close(moved_by(models[0]), gradient_of([a]))
    assert close(moved_by(models[1]), [torch.zeros(())] * 4, 0)
    assert [s.updates for s in steps] == [1, 0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("weights", [(1, 300), (0, 300), (1, 5, 3000), (0.01, 7, 1)], ids=str)
def test_a_heavy_micro_batch_after_a_light_one_does_not_blow_gradients_up(weights, precision):
    """In float16 sound data would overflow; in float32 no bit depends on what weights count relative to."""
    data = batches(*[4] * len(weights))
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8192.0, enabled=precision == "fp16")
    options = {"precision": precision, **({"scaler": scaler} if precision == "fp16" else {})}
    step = optimize(model, SGD(model.parameters(), lr=0.5), MSE, accumulate=len(weights), **options).step
    for (x, y), weight in zip(data, weights, strict=True):
        metrics = step(x, y, weight=weight)
    assert not metrics.skipped
    plain = net()
    sum(MSE(plain(x), y) * weight / sum(weights) for (x, y), weight in zip(data, weights, strict=True)).backward()
    assert close(moved_by(model), [p.grad for p in plain.parameters()], 1e-6 if precision == "fp32" else 1e-2)


def test_a_further_loss_keeps_its_size_beside_a_heavy_micro_batch():
    """What is in the window already is made smaller for it, and larger again in the end."""
    (x, y), (u, v) = batches(4, 4)
    moved = []
    for heavy in (4.0, 400.0):
        model, step = made(accumulate=2)
        step(x, y, weight=1)
        step.backward(model(x).sum())
        step(u, v, weight=heavy)
        plain = net()
        loss = (MSE(plain(x), y) + heavy * MSE(plain(u), v) + 2 * plain(x).sum()) / (1 + heavy)
        loss.backward()
        moved.append(close(moved_by(model), [p.grad for p in plain.parameters()]))
    assert moved == [True, True]
