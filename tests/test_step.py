"""A step in its surroundings: modes, autocast, no_grad, errors, memory, and what it costs the device."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import hotloop
import simgpu
from observing import Operators, Uncast, in_threads
from parity.twins import differences, plain_loop, snapshot

# What is compared with runs on the CPU, also where there is an accelerator.
optimize = partial(hotloop.optimize, device="cpu", exact=True)
CE = nn.CrossEntropyLoss()


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def batches(count):
    torch.manual_seed(2)
    return [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(count)]


def made(model=None, loss_fn=CE, **options):
    model = net() if model is None else model
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return (*optimize(model, optimizer, loss_fn, **options), optimizer)


def by_hand(model, data, loss_fn=CE, prepare=lambda model: None, **options):
    prepare(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    plain_loop(model, optimizer, loss_fn, data, **options)
    return snapshot(model, optimizer)


# --- modes ------------------------------------------------------------------------------------------------------------

MODES = {
    "train": lambda model: model.train(),
    "eval": lambda model: model.eval(),
    "frozen BatchNorm": lambda model: model.train()[1].eval(),
    "frozen BatchNorm and its weights": lambda model: model.train()[1].eval().requires_grad_(False),
    "dropout alone": lambda model: model.eval()[3].train(),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_the_users(mode):
    """N18, N20, N22, N24, N25: every submodule keeps its flag, and trains as it would in a plain loop with these flags."""
    data = batches(5)
    expected = by_hand(net(), data, prepare=MODES[mode])
    plain = net()
    MODES[mode](plain)
    flags = [m.training for m in plain.modules()]
    model, step, optimizer = made(plain)
    torch.manual_seed(3)
    for x, y in data:
        step(x, y)
    assert [m.training for m in plain.modules()] == flags
    assert differences(snapshot(model, optimizer), expected) == []


def test_train_and_eval_are_never_called():
    class Strict(nn.Linear):
        def train(self, mode=True):
            raise AssertionError("called")

        def eval(self):
            raise AssertionError("called")

    _, step, _ = made(Strict(4, 3), accumulate=2)
    for x, y in batches(3):
        step(x, y)
    step.flush()


def test_evaluation_between_steps_changes_nothing():
    data = batches(6)
    expected = by_hand(net(), data)
    model, step, optimizer = made()
    torch.manual_seed(3)
    for x, y in data:
        step(x, y)
        model.eval()
        assert not model(x).requires_grad
        model.train()
    assert differences(snapshot(model, optimizer), expected) == []


# --- gradients off ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["batch", "own loss", "lbfgs"])
@pytest.mark.parametrize("off", [torch.no_grad, partial(torch.set_grad_enabled, False)], ids=["no_grad", "set_grad_enabled"])
def test_a_surrounding_no_grad_does_not_matter(off, form):
    """N14"""
    data = batches(3)

    def train(model, surrounding):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2) if form == "lbfgs" else SGD(model.parameters(), lr=0.1)
        model, step = optimize(model, optimizer, CE)
        torch.manual_seed(3)
        for x, y in data:
            if form == "own loss":
                loss = CE(model(x), y)
                with surrounding():
                    step(loss)
            else:
                with surrounding():
                    before = torch.is_grad_enabled()
                    step(x, y)
                    assert torch.is_grad_enabled() is before
        return snapshot(model, optimizer)

    assert differences(train(net(), off), train(net(), torch.enable_grad)) == []


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("form", ["batch", "loss"])
def test_a_surrounding_autocast_neither_freezes_nor_breaks_training(form, exact):
    """One region around the whole loop: its weight cache would go on with the weights of the first step. The loss is in float32."""
    data = batches(5)
    plain = net()
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(x)
        loss = CE(output.float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = snapshot(plain, optimizer)
    model, step, optimizer = made(exact=exact, fused=False)
    torch.manual_seed(3)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for x, y in data:
            found.append(step(x, y)["loss"] if form == "batch" else step(CE(model(x).float(), y))["loss"])
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert found == losses
    assert differences(snapshot(model, optimizer), expected) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_and_training_in_one_region(mode):
    """A15 to A17, A19: casts that an evaluation has cached have no graph."""
    model, step, _ = made()
    data = batches(3)
    with torch.autocast("cpu", torch.bfloat16):
        for x, y in data:
            model.eval()
            with mode():
                model(x)
            model.train()
            before = copy.deepcopy(dict(model.named_parameters()))
            step(x, y)
            assert all(p.grad is not None for p in model.parameters())
            assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_bce_on_probabilities(precision):
    """A20, A21: the loss is computed in float32, outside of autocast."""
    seen = []

    class Loss(nn.BCELoss):
        def forward(self, output, y):
            seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
            return super().forward(output, y)

    data = [(x, (y > 0).float()[:, None]) for x, y in batches(10)]
    build = lambda: nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())  # noqa: E731
    torch.manual_seed(1)
    plain = build()
    model = copy.deepcopy(plain)
    plain_loop(plain, SGD(plain.parameters(), lr=0.1), nn.BCELoss(), data)
    step = optimize(model, SGD(model.parameters(), lr=0.1), Loss(), precision=precision).step
    for x, y in data:
        step(x, y)
    assert set(seen) == {(torch.float32, False)}
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, its, atol=1e-2)


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_custom_operator_with_its_own_casts(precision):
    """A28"""

    class Net(nn.Linear):
        def forward(self, x):
            return Doubled.apply(x, self.weight.T) + self.bias

    model, step, _ = made(Net(4, 3), precision=precision)
    step(*batches(1)[0])
    assert all(p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_a_custom_operator_without_casts_fails_in_words_of_torchs():
    """A29: where the precision was asked for, it is not taken back."""

    class Net(nn.Linear):
        def forward(self, x):
            return Uncast.apply(super().forward(x), torch.eye(3).requires_grad_())

    model, step, _ = made(Net(4, 3), precision="bf16")
    with pytest.raises(RuntimeError, match="dtype") as caught:
        step(*batches(1)[0])
    assert "hotloop" not in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(precision, reentrant):
    """The forward runs again inside the backward, with the same dropout and the same casts."""

    class Net(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            torch.manual_seed(1)
            self.body, self.head, self.checkpointed = net(), nn.Linear(3, 3), checkpointed

        def forward(self, x):
            if self.checkpointed:
                return self.head(checkpoint(self.body[3:], self.body[:3](x), use_reentrant=reentrant))
            return self.head(self.body(x))

    ends = []
    for checkpointed in (False, True):
        model, step, optimizer = made(Net(checkpointed), precision=precision)
        torch.manual_seed(3)
        for x, y in batches(3):
            step(x, y)
        ends.append(snapshot(model, optimizer))
    assert differences(*ends) == []


# --- other models inside a step ---------------------------------------------------------------------------------------


def test_a_teacher_inside_the_loss_keeps_no_graph():
    """It is not the model of this step: in eval mode its calls keep no gradients."""
    teacher = optimize(net().eval())
    seen = []

    def loss_fn(output, y):
        scores = teacher(y[1])
        seen.append(scores.requires_grad)
        return F.mse_loss(output, scores)

    model, step, _ = made(loss_fn=loss_fn)
    model.eval()
    for x, y in batches(2):
        step(x, (y, x))
    assert seen == [False, False]
    assert not model(x).requires_grad


@pytest.mark.parametrize("form", ["model", "child"])
def test_a_call_in_another_thread_is_not_inside_of_the_step(form):
    """One thread trains in eval mode, with frozen statistics; what another one evaluates meanwhile keeps no graph.

    A device's own thread recomputes a checkpoint in its backward: that belongs to the step.
    """
    seen = {}

    def loss_fn(output, y):
        evaluated = model if form == "model" else model[0]
        seen["inside"] = evaluated(torch.ones(5, 4)).requires_grad

        def evaluate():
            seen["beside"] = evaluated(torch.ones(5, 4)).requires_grad

        def recompute(gradient):
            with torch.enable_grad():
                seen["in a backward beside"] = evaluated(torch.ones(5, 4)).requires_grad

        def backward():
            x = torch.ones(1, requires_grad=True) * 2
            x.register_hook(recompute)
            x.backward()

        in_threads([evaluate, backward])
        return CE(output, y)

    inner = net() if form == "model" else nn.Sequential(optimize(nn.Linear(4, 3)), nn.Dropout(0.1))
    model, step, _ = made(inner, loss_fn)
    model.eval()
    step(*batches(1)[0])
    assert seen == {"inside": True, "beside": False, "in a backward beside": True}


# --- errors -----------------------------------------------------------------------------------------------------------


class UnluckyError(Exception):
    pass


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, when):
        ctx.when = when
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.when():
            raise UnluckyError("backward")
        return gradient, None


class Batch:
    """Has a `.to` that may fail."""

    def __init__(self, tensor, broken):
        self.tensor, self.broken = tensor, broken

    def to(self, device):
        if self.broken:
            raise UnluckyError("move")
        return self.tensor


class Failing:
    """A step of which every stage can be made to fail, in an error or an interrupt."""

    def __init__(self, kind, **options):
        self.at, self.kind = None, kind
        outer = self

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

            def forward(self, x):
                hidden = self.a(x)
                outer.fail("forward")
                return self.b(Fails.apply(hidden, lambda: outer.at == "backward"))

        def loss_fn(output, y):
            outer.fail("loss")
            return CE(output, y)

        def metric(output, y):
            outer.fail("metric")
            return output.mean()

        self.net = Net()
        self.model, self.step, self.optimizer = made(self.net, loss_fn, metrics={"mean": metric}, **options)

    def fail(self, stage):
        if self.at == stage:
            raise self.kind(stage)

    def run(self, x, y):
        return self.step(Batch(x, self.at == "move"), y)


STAGES = ["move", "forward", "loss", "metric", "backward"]


@pytest.mark.parametrize("kind", [UnluckyError, KeyboardInterrupt])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_leaves_everything_as_it_was_and_the_next_batch_trains(stage, precision, kind):
    """Before the backward the window so far is kept; inside it the window is dropped."""
    if kind is KeyboardInterrupt and stage in ("move", "backward"):
        pytest.skip("raises an error of its own")
    data = batches(8)
    kept = stage != "backward"
    twin = Failing(kind, accumulate=2, precision=precision)
    for x, y in data[:3] if kept else data[:2]:
        twin.run(x, y)

    job = Failing(kind, accumulate=2, precision=precision)
    for x, y in data[:3]:
        job.run(x, y)
    job.at = stage
    with torch.no_grad(), pytest.raises((UnluckyError, kind), match=stage):
        job.run(*data[3])
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert differences(snapshot(job.model, job.optimizer), snapshot(twin.model, twin.optimizer)) == []
    state, its = (copy.deepcopy(j.step.state_dict()) for j in (job, twin))
    del state["mean"], its["mean"]
    assert differences(state, its) == []
    job.at = None
    job.model.eval()
    assert not job.model(data[0][0]).requires_grad, "it still believes to be inside of a step"
    job.model.train()
    for x, y in data[4:]:
        job.run(x, y)
        twin.run(x, y)
    assert differences(snapshot(job.model, job.optimizer), snapshot(twin.model, twin.optimizer)) == []
    assert job.step.updates == twin.step.updates == 3


def test_an_error_inside_a_further_backward_drops_the_window():
    job = Failing(UnluckyError, accumulate=3)
    (x, y), *_ = batches(1)
    job.run(x, y)
    job.at = "backward"
    loss = job.model(x).sum()
    with pytest.raises(UnluckyError, match="backward"):
        job.step.backward(loss)
    assert all(p.grad is None for p in job.model.parameters())
    assert job.step.flush() is False


def test_a_failed_step_in_lbfgs_and_the_next():
    model = nn.Linear(4, 3)
    step = optimize(model, torch.optim.LBFGS(model.parameters(), max_iter=2), CE).step
    x, y = batches(1)[0]
    with pytest.raises(IndexError):
        step(x, y + 7)
    assert step.updates == 0
    before = CE(model(x), y).item()
    assert step(x, y)["loss"] == before
    assert CE(model(x), y).item() < before
    assert step.updates == 1


# --- memory -----------------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Notes everything that a forward makes."""

    def __init__(self, alive):
        super().__init__()
        self.a, self.b, self.alive = nn.Linear(4, 8), nn.Linear(8, 3), alive

    def forward(self, x, y=None):
        hidden = self.a(x).exp()
        output = self.b(hidden)
        self.alive += [weakref.ref(hidden), weakref.ref(output)]
        return output if y is None else {"loss": CE(output, y), "logits": output}


KINDS = {
    "batch": lambda step, model, x, y: step(x, y),
    "tuple": lambda step, model, x, y: step((x, y)),
    "own loss": lambda step, model, x, y: step({"x": x, "y": y}),
    "a loss": lambda step, model, x, y: step(CE(model(x), y), top=model(x).sum()),
    "a further loss": lambda step, model, x, y: (step.backward(model(x).sum()), step(CE(model(x), y)))[1],
}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "fp16", "clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_step_stays_alive(kind, options):
    """S5: neither batch, nor output, nor graph, though the metrics are kept."""
    alive = []
    model, step, _ = made(Watched(alive), None if kind == "own loss" else CE, **options)
    kept = []
    for _ in range(3):
        x, y = torch.randn(5, 4), torch.randint(3, (5,))
        alive += [weakref.ref(x), weakref.ref(y)]
        kept.append(KINDS[kind](step, model, x, y))
        del x, y
        assert [ref() for ref in alive if ref() is not None] == []
    assert len(alive) >= 12
    assert all(m["loss"] > 0 for m in kept)


def test_what_a_loss_function_made_dies_too():
    alive = []

    def loss_fn(output, y):
        part = output.exp()
        alive.append(weakref.ref(part))
        loss = part.square().mean()
        alive.append(weakref.ref(loss))
        return loss, {"part": part.sum()}

    _, step, _ = made(loss_fn=loss_fn, metrics={"m": lambda output, y: alive.append(weakref.ref(output)) or 1.0})
    kept = step(*batches(1)[0])
    assert len(alive) == 3
    assert [ref() for ref in alive if ref() is not None] == []
    assert kept["part"] > 0


def test_a_kept_output_holds_no_graph():
    alive = []
    _, step, _ = made(Watched(alive), keep_output=True)
    metrics = step(*batches(1)[0])
    assert alive[0]() is None
    assert metrics.output.shape == (5, 3)
    assert metrics.output.grad_fn is None


def test_nothing_of_a_failed_step_stays_alive():
    alive = []
    _, step, _ = made(Watched(alive))
    x, y = batches(1)[0]
    with suppress(IndexError):
        step(x, y + 7)
    assert [ref() for ref in alive if ref() is not None] == []


def test_nothing_of_an_lbfgs_step_stays_alive():
    alive = []
    model = Watched(alive)
    step = optimize(model, torch.optim.LBFGS(model.parameters(), max_iter=3), CE).step
    metrics = step(*batches(1)[0])
    assert len(alive) > 4
    assert [ref() for ref in alive if ref() is not None] == []
    assert metrics["loss"] > 0


def test_step_model_and_optimizer_do_not_hold_each_other_for_ever():
    parts = list(made())
    parts[1](*batches(1)[0])
    alive = [weakref.ref(parts[1]), weakref.ref(parts[0].__wrapped__)]
    del parts[1]
    assert alive[0]() is None
    del parts[0]
    assert alive[1]() is None


# --- means ------------------------------------------------------------------------------------------------------------


def test_the_mean_of_every_metric():
    """Over the steps since the last call, each metric over those in which it was."""
    _, step, _ = made(accumulate=2, clip_norm=1.0, metrics={"n": lambda output, y: len(y)})
    metrics = [step(x, y) for x, y in batches(6)]
    means = step.mean()
    assert means.keys() == {"loss", "n", "grad_norm"}
    assert means["loss"] == pytest.approx(sum(m["loss"] for m in metrics) / 6)
    assert means["grad_norm"] == pytest.approx(sum(m["grad_norm"] for m in metrics[1::2]) / 3)
    assert means["n"] == 5.0
    assert all(type(v) is float for v in means.values())
    assert step.mean() == {}
    last = step(*batches(1)[0])
    assert step.mean()["loss"] == last["loss"]


def test_the_mean_is_weighted_where_weights_are_given():
    _, step, _ = made()
    data = [(x[:n], y[:n]) for (x, y), n in zip(batches(3), (5, 5, 2), strict=True)]
    metrics = [step(x, y, weight=len(x)) for x, y in data]
    expected = sum(m["loss"] * len(x) for m, (x, _) in zip(metrics, data, strict=True)) / 12
    assert step.mean()["loss"] == pytest.approx(expected)


@pytest.mark.parametrize("fused", [False, True])
def test_the_mean_leaves_skipped_steps_out(fused):
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = optimize(model, AdamW(model.parameters(), fused=fused), F.mse_loss, precision="fp16", scaler=scaler).step
    losses = []
    for i, (x, _) in enumerate(batches(6)):
        metrics = step(x, torch.full((5, 1), float("inf") if i in (0, 3) else 1.0))
        if not metrics.skipped:
            losses.append(metrics["loss"])
    assert len(losses) == 4
    assert step.mean()["loss"] == pytest.approx(sum(losses) / 4)


def test_a_step_that_fails_is_in_no_mean():
    _, step, _ = made()
    x, y = batches(1)[0]
    good = step(x, y)["loss"]
    with pytest.raises(IndexError):
        step(x, y + 7)
    assert step.mean() == {"loss": good}


# --- threads ----------------------------------------------------------------------------------------------------------


def test_in_a_thread_of_its_own():
    data = batches(3)
    expected = by_hand(net(), data)
    model, step, optimizer = made()
    torch.manual_seed(3)

    def train():
        for x, y in data:
            step(x, y)

    with torch.no_grad():
        worker = threading.Thread(target=train)
        worker.start()
        worker.join()
    assert differences(snapshot(model, optimizer), expected) == []


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["batch", "loss"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"accumulate": 2}], ids=str)
def test_at_most_two_operators_more_than_the_plain_loop(form, options):
    """One of them reads the loss, which the plain loop is not asked for here."""
    data = batches(6)

    def plain():
        model = net()
        optimizer = AdamW(model.parameters())
        accumulate = options.get("accumulate", 1)

        def run(i, x, y):
            if i % accumulate == 0:
                optimizer.zero_grad()
            loss = CE(model(x), y)
            (loss / accumulate if accumulate > 1 else loss).backward()
            if i % accumulate == accumulate - 1:
                if "clip_norm" in options:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

        return run

    def wrapped():
        model = net()
        model, step = optimize(model, AdamW(model.parameters()), CE, **options)
        return lambda i, x, y: step(x, y) if form == "batch" else step(CE(model(x), y))

    counted = []
    for make in (plain, wrapped):
        run = make()
        for i, (x, y) in enumerate(data[:2]):
            run(i, x, y)
        with Operators() as operators:
            for i, (x, y) in enumerate(data[2:]):
                run(i, x, y)
        counted.append(Counter(operators.seen))
    more = sum((counted[1] - counted[0]).values())
    assert more <= 2 * 4 + (4 if "clip_norm" in options else 0), counted[1] - counted[0]


@pytest.mark.simgpu
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"accumulate": 4}], ids=str)
def test_a_hundred_steps_wait_for_nothing(options):
    """S1, S4: then one wait for each step that is looked at."""
    model = net()
    step = hotloop.optimize(model, AdamW(model.parameters(), fused=True), CE, device=simgpu.NAME, exact=True, **options).step
    data = batches(10)
    step(*data[0])
    with simgpu.asynchronous():
        simgpu.counts.clear()
        metrics = [step(*data[i % 10]) for i in range(100)]
        assert simgpu.host_waits() == 0
        assert simgpu.counts["d2h"] <= 100
        simgpu.counts.clear()
        assert [m["loss"] > 0 for m in metrics[:7]] == [True] * 7
        assert simgpu.host_waits() == 7
        simgpu.counts.clear()
        assert step.mean()["loss"] > 0
        assert simgpu.host_waits() <= 1


@pytest.mark.simgpu
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_at_most_two_operators_more_on_an_accelerator(options):
    counted = []
    for wrapped in (False, True):
        model = net().to(simgpu.NAME)
        optimizer = AdamW(model.parameters(), fused=True)
        data = [(x.to(simgpu.NAME), y.to(simgpu.NAME)) for x, y in batches(8)]
        accumulate = options.get("accumulate", 1)
        if wrapped:
            step = hotloop.optimize(model, optimizer, CE, exact=True, **options).step
        for i, (x, y) in enumerate(data):
            if i == 4:
                simgpu.counts.clear()
            if wrapped:
                step(x, y)
                continue
            if i % accumulate == 0:
                optimizer.zero_grad()
            loss = CE(model(x), y)
            (loss / accumulate if accumulate > 1 else loss).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
        counted.append(Counter({name: n for name, n in simgpu.counts.items() if name.startswith("aten::")}))
    more = counted[1] - counted[0]
    assert sum(more.values()) <= 2 * 4, more


# --- hints ----------------------------------------------------------------------------------------------------------------


class Pair(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return h, h


def training(model, loss_fn=nn.MSELoss()):  # noqa: B008
    return optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.CrossEntropyLoss(), lambda output, y: (output - y).mean()])
def test_a_loss_fn_that_cannot_take_what_the_model_returns_says_what_it_was(loss_fn):
    step = training(Pair(4, 2), loss_fn).step
    with pytest.raises((TypeError, AttributeError), match="what the model returned, a tuple of 2, and <tensor"):
        step(torch.ones(3, 4), torch.ones(3, 2))


def test_an_error_of_loss_fn_on_a_tensor_is_its_own():
    step = training(nn.Linear(4, 2), lambda output, y: output.nothing).step
    with pytest.raises(AttributeError, match=r"nothing'$"):
        step(torch.ones(3, 4), torch.ones(3, 2))


def test_a_loss_given_where_a_batch_is_expected():
    model, step = training(nn.Linear(4, 2))
    loss = model(torch.ones(3, 4)).sum()
    with pytest.raises(RuntimeError, match=r"a scalar that carries a graph; if it is a loss of your own write step\(loss\)"):
        step(loss, torch.ones(3, 2))


def test_so_it_does_where_the_model_misses_a_dimension():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    step = optimize(model, SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()).step
    loss = model(torch.ones(3, 4)).sum()
    with pytest.raises(IndexError, match=r"Dimension out of range[\s\S]*if it is a loss of your own write step\(loss\)"):
        step(loss, torch.zeros(3, dtype=torch.long))


def test_a_closure_that_the_signature_does_not_ask_for():
    """O4: some optimizers want one all the same."""

    class Wants(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            assert closure is not None
            with torch.enable_grad():
                closure()
            return super().step()

    net = nn.Linear(4, 2)
    step = optimize(net, Wants(net.parameters(), lr=0.1), nn.MSELoss()).step
    with pytest.raises(AssertionError, match=r"class Own\(Wants\): def step\(self, closure\)"):
        step(torch.ones(3, 4), torch.ones(3, 2))

    class Own(Wants):
        def step(self, closure):
            return super().step(closure)

    plain = copy.deepcopy(net)
    step = optimize(net, Own(net.parameters(), lr=0.1), nn.MSELoss(), exact=True, device="cpu").step
    step(torch.ones(3, 4), torch.ones(3, 2))
    nn.MSELoss()(plain(torch.ones(3, 4)), torch.ones(3, 2)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(net.weight, plain.weight)


def test_what_optimize_returns_is_not_the_model():
    made = training(nn.Linear(4, 2))
    with pytest.raises(TypeError, match="write `model, step = optimize"):
        made(torch.ones(3, 4))


def test_a_step_prints_what_it_trains():
    assert repr(training(nn.Linear(4, 2)).step).startswith("<hotloop step of Linear, SGD, accumulate=1")


def test_parameters_of_a_loss_fn_that_nothing_trains_are_in_the_plan():
    net, head = nn.Linear(4, 2), nn.Bilinear(2, 2, 1)
    step = optimize(net, torch.optim.SGD(net.parameters()), Bilinear(head)).step
    assert step.plan["untrained"].choice == "2"


class Bilinear(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, output, target):
        return self.head(output, target).mean()


def test_a_decision_prints_without_addresses():
    assert "0x" not in repr(training(nn.Linear(4, 2)).step.plan["precision"])


@pytest.mark.parametrize("fused", [True, False])
def test_a_flush_leaves_the_mode_of_gradients_as_it_was(fused):
    model = nn.Linear(4, 2)
    _, step = hotloop.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), accumulate=2, fused=fused)
    step(torch.randn(3, 4), torch.randn(3, 2))
    with torch.no_grad():
        assert step.flush()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
