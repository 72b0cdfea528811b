"""An automatic choice that user code cannot bear is taken back: the loop goes on, and the plan quotes the error."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import RMSprop

import hotloop
from hotloop._parts import Live, Parts
from hotloop._plan import Decision, Plan
from hotloop._recovery import Recovery
from hotloop.transforms import precision as decisions
from observing import Operators, Uncast, in_threads
from parity.twins import differences, plain_loop, snapshot

pytestmark = pytest.mark.usefixtures("sixteen_bit_units")

WIDE = 512  # layers from here on are worth 16-bit units


def MSE(output, target):  # noqa: N802 - a loss of the user's own, in which nobody sees a regression
    return nn.functional.mse_loss(output, target)


# RMSprop has no fused kernels, so that precision is the only choice that could round. On the CPU, also beside an accelerator.
optimize = partial(hotloop.optimize, device="cpu")


def index_add(h, x):
    return torch.zeros_like(x).index_add_(0, torch.arange(len(h)), h)


def scatter_add(h, x):
    return torch.zeros_like(x).scatter_add(0, torch.zeros(h.shape, dtype=torch.long), h)


def masked_assignment(h, x):
    out = torch.zeros_like(x)
    out[x > 0] = h[x > 0]
    return out + h


def numpy(h, x):
    return h + torch.from_numpy(h.detach().numpy()).mean()


def lerp(h, x):
    return torch.lerp(x, h, 0.5)


TROUBLE = {
    "index_add_": index_add,
    "scatter_add": scatter_add,
    "masked assignment": masked_assignment,
    "numpy": numpy,
    "lerp": lerp,
}


class Net(nn.Module):
    """Draws random numbers and changes buffers before the operator that fails."""

    def __init__(self, trouble, *, from_call=0):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, WIDE), nn.BatchNorm1d(WIDE), nn.Dropout(0.3)
        self.second, self.out = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
        self.weight = nn.Parameter(torch.eye(WIDE))
        self.trouble, self.from_call, self.calls = trouble, from_call, 0

    def forward(self, x):
        self.calls += 1
        h = self.drop(self.norm(self.first(x)))
        hidden = self.second(h)
        if self.trouble == "backward":
            hidden = Uncast.apply(hidden, self.weight)
        elif self.trouble and self.calls > self.from_call:
            hidden = self.trouble(hidden, h.float())
        return self.out(hidden)


def build(trouble, **options):
    torch.manual_seed(1)
    return Net(trouble, **options)


def batches(count):
    torch.manual_seed(2)
    return [(torch.randn(5, 4), torch.randn(5, 2)) for _ in range(count)]


def made(model, **options):
    optimizer = RMSprop(model.parameters(), lr=1e-3)
    return (*optimize(model, optimizer, MSE, **options), optimizer)


def called(form, model, step, x, y):
    if form == "batch":
        step(x, y)
    elif form == "loss":
        step(MSE(model(x), y))
    else:
        model(x)


def precision(step):
    return step.plan.as_dict()["precision"]


def test_the_choice_is_made_here():
    model, step, _ = made(build(None))
    seen = []
    model.second.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    step(*batches(1)[0])
    assert precision(step)["choice"] == "bf16"
    assert "AMX" in precision(step)["why"]
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("form", ["batch", "loss", "accumulate"])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_the_loop_is_then_bitwise_the_one_in_float32(trouble, form):
    """With dropout and BatchNorm: the random state and the statistics are as if nothing had happened."""
    accumulate = 2 if form == "accumulate" else 1
    plain = build(TROUBLE[trouble])
    optimizer = RMSprop(plain.parameters(), lr=1e-3)
    data = batches(4)
    torch.manual_seed(3)
    plain_loop(plain, optimizer, MSE, data, accumulate=accumulate)
    expected = snapshot(plain, optimizer)

    model, step, optimizer = made(build(TROUBLE[trouble]), accumulate=accumulate)
    torch.manual_seed(3)
    for x, y in data:
        if form == "loss":
            step(MSE(model(x), y))
        else:
            step(x, y)
    assert differences(snapshot(model, optimizer), expected) == []
    assert precision(step)["choice"] == "fp32"


def test_an_error_in_the_backward():
    """Nothing of the half backward is left."""
    plain = build("backward")
    optimizer = RMSprop(plain.parameters(), lr=1e-3)
    torch.manual_seed(3)
    plain_loop(plain, optimizer, MSE, batches(3))
    expected = snapshot(plain, optimizer)
    model, step, optimizer = made(build("backward"))
    torch.manual_seed(3)
    for x, y in batches(3):
        step(x, y)
    assert differences(snapshot(model, optimizer), expected) == []
    assert precision(step)["choice"] == "fp32"


@pytest.mark.parametrize("form", ["step", "step.backward"])
def test_an_error_in_the_backward_of_a_loss_of_the_users_own_names_the_way_out(form):
    """Its forward was the user's call and is not run again; the error stays torch's own where the precision was asked for."""
    x, y = batches(1)[0]
    for options, hinted in (({}, True), ({"precision": "bf16"}, False)):
        model, step, _ = made(build("backward"), **options)
        with pytest.raises(RuntimeError, match="BFloat16") as caught:
            (step if form == "step" else step.backward)(MSE(model(x), y))
        assert ("optimize(..., precision='fp32')" in str(caught.value)) is hinted
        assert all(p.grad is None for p in model.parameters())


def test_an_error_of_another_kind_in_the_backward_has_no_such_hint():
    model, step, _ = made(build(None))
    loss = MSE(model(batches(1)[0][0]), batches(1)[0][1])
    loss.register_hook(lambda grad: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError) as caught:
        step(loss)
    assert "optimize(" not in str(caught.value)


def test_the_plan_quotes_the_error():
    model, step, _ = made(build(index_add))
    with pytest.raises(RuntimeError) as caught, torch.autocast("cpu", torch.bfloat16):
        model.__wrapped__(torch.randn(5, 4))
    step(*batches(1)[0])
    why = precision(step)["why"]
    assert "RuntimeError" in why
    assert str(caught.value).splitlines()[0] in why
    assert "bf16" in why


def test_it_happens_once():
    """From then on a call is a call: nothing is tried twice."""
    model, step, _ = made(build(index_add))
    data = batches(4)
    step(*data[0])
    before = model.calls
    for x, y in data[1:]:
        step(x, y)
    assert model.calls == before + 3


@pytest.mark.parametrize("form", ["batch", "loss"])
def test_an_error_that_comes_late(form):
    """Three calls are fine, the fourth is not: from there on weights and optimizer are those of the loop in float32."""
    data = batches(6)
    plain = build(index_add, from_call=3)
    model, step, optimizer = made(build(index_add, from_call=3))
    torch.manual_seed(3)
    for x, y in data[:3]:
        step(x, y)
    assert precision(step)["choice"] == "bf16"
    plain.load_state_dict(model.state_dict())
    plain.calls = 3
    twin = RMSprop(plain.parameters(), lr=1e-3)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    random = torch.get_rng_state()
    plain_loop(plain, twin, MSE, data[3:])
    expected = [dict(plain.named_parameters()), twin.state_dict(), torch.get_rng_state()]
    torch.set_rng_state(random)
    for x, y in data[3:]:
        if form == "loss":
            step(MSE(model(x), y))
        else:
            step(x, y)
    assert precision(step)["choice"] == "fp32"
    assert differences([dict(model.named_parameters()), optimizer.state_dict(), torch.get_rng_state()], expected) == []


@pytest.mark.parametrize("trouble", ["forward", "backward"])
@pytest.mark.parametrize("twice", [False, True], ids=["works in float32", "never works"])
def test_statistics_move_once_where_the_error_comes_late(trouble, twice):
    """BatchNorm and its count, InstanceNorm, which does not count, a buffer that the failed run has not reached, a constant."""

    class Late(Net):
        def __init__(self):
            super().__init__("backward" if trouble == "backward" else None)
            self.spread = nn.InstanceNorm1d(2, track_running_stats=True)
            self.seen, self.constant = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(3))
            self.failing = False

        def forward(self, x):
            self.trouble = ("backward" if trouble == "backward" else index_add) if self.failing else None
            self.spread(x.reshape(-1, 2, 2))
            output = super().forward(x)
            with torch.no_grad():
                self.seen += 1
            if self.failing and twice:
                raise ValueError("own words")
            return output

    torch.manual_seed(1)
    model, step, _ = made(Late())
    data = batches(4)
    for x, y in data[:3]:
        step(x, y)
    model.failing = True
    before = copy.deepcopy(dict(model.named_buffers()))
    batch_mean = model.first(data[3][0]).mean(0).detach()
    if twice:
        with pytest.raises(ValueError, match="own words"):
            step(*data[3])
        assert precision(step)["choice"] == "bf16"
    else:
        step(*data[3])
        assert precision(step)["choice"] == "fp32"
    assert model.norm.num_batches_tracked == before["norm.num_batches_tracked"] + 1 == 4
    assert model.seen == 4
    assert torch.equal(model.constant, torch.ones(3))
    # One step of the mean: 0.9 of what it was, and 0.1 of the batch's.
    expected = 0.9 * before["norm.running_mean"] + 0.1 * batch_mean
    assert torch.allclose(model.norm.running_mean, expected, atol=0.002 * expected.abs().max())
    expected = 0.9 * before["spread.running_mean"] + 0.1 * data[3][0].reshape(-1, 2, 2).mean((0, 2))
    assert torch.allclose(model.spread.running_mean, expected)


class Stateful(Net):
    """Keeps state in every way that a module may, and draws from every generator that it may have."""

    def __init__(self, *, from_call=0):
        super().__init__(index_add, from_call=from_call)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("lazily", None)
        self.own, self.numpy_own, self.python_own = torch.Generator(), np.random.default_rng(1), random.Random(1)
        self.legacy = np.random.RandomState(1)
        self.pointer, self.rate, self.late, self.drawn = 0, 1.0, None, []

    def forward(self, x):
        self.steps = self.steps + 1  # another tensor
        self.pointer = (self.pointer + len(x)) % 7
        self.rate *= 0.5
        self.late = 1 if self.late is None else self.late + 1
        if self.lazily is None:
            self.lazily = self.first(x).detach().mean()
        if not hasattr(self, "made"):
            self.made = 0
            self.register_buffer("added", self.first(x).detach().mean())
        self.made += 1
        drawn = [random.random(), np.random.rand(), self.numpy_own.random(), self.python_own.random(), self.legacy.rand()]
        self.drawn = [*drawn, torch.rand((), generator=self.own).item()]
        return super().forward(x)

    def state(self):
        numbers = [self.pointer, self.rate, self.late, self.made, *self.drawn]
        return [numbers, *[self.get_buffer(name) for name in ("steps", "lazily", "added", "norm.num_batches_tracked")]]


@pytest.mark.parametrize("form", ["batch", "loss", "eval"])
@pytest.mark.parametrize("calls_before", [0, 2], ids=["at once", "late"])
def test_what_a_module_keeps_and_draws_is_as_if_nothing_had_happened(calls_before, form):
    """A buffer that is assigned anew, a queue's pointer, random numbers of Python, NumPy, and the module's own."""
    data = batches(calls_before + 1)
    torch.manual_seed(1)
    plain = Stateful(from_call=calls_before)
    torch.manual_seed(1)
    model, step, _ = made(Stateful(from_call=calls_before))
    if form == "eval":
        model.eval()
        plain.eval()

    def seed():
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    seed()
    for x, y in data:
        called(form, model, step, x, y)
    assert precision(step)["choice"] == "fp32"
    seed()
    for x, _ in data:
        plain(x)
    ours, theirs = model.state(), plain.state()
    if calls_before:  # its first value was in bf16
        ours[2:4] = theirs[2:4] = []
    assert differences(ours, theirs) == []


def test_the_loss_functions_buffers_move_once():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("total", torch.zeros(()))

        def forward(self, output, y):
            self.steps = self.steps + 1
            self.total += 1
            if output.grad_fn is not None and torch.equal(output, output.bfloat16().float()):
                raise RuntimeError("no rounded numbers here")
            return MSE(output, y)

    model, loss_fn = build(None), Loss()
    step = optimize(model, RMSprop(model.parameters(), lr=1e-3), loss_fn).step
    step(*batches(1)[0])
    assert precision(step)["choice"] == "fp32"
    assert (loss_fn.steps, loss_fn.total) == (1, 1)


@pytest.mark.parametrize("form", ["batch", "loss", "eval"])
def test_to_be_on_the_watch_costs_no_operator_once_a_mode_has_run(form):
    """A copy of every buffer in every step would be slower than the plain loop on a model with many of them."""
    counted = []
    for wish in ("auto", "bf16"):
        model, step, _ = made(build(None), precision=wish)
        model.train(form != "eval")

        def run(x, y, model=model, step=step):
            called(form, model, step, x, y)

        first, *data = batches(4)
        run(*first)
        with Operators() as operators:
            for x, y in data:
                run(x, y)
        counted.append(Counter(operators.seen))
    assert counted[0] == counted[1]


def test_an_error_in_the_middle_of_a_window_keeps_the_window():
    data = batches(2)
    model, step, _ = made(build(index_add, from_call=1), accumulate=2)
    step(*data[0])
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert precision(step)["choice"] == "bf16"
    assert step(*data[1]).updated
    assert precision(step)["choice"] == "fp32"
    assert not any(torch.equal(gradient, model.get_parameter(name).grad) for name, gradient in first.items())
    assert step.updates == 1


@pytest.fixture
def float16(monkeypatch):
    """As on a CUDA device without bfloat16: float16 with a scaler is the automatic choice."""
    monkeypatch.setattr(decisions, "_automatic", lambda facts: decisions._decision(facts, "fp16", "for the test"))


def small(output, y):
    """Far from an overflow at the scaler's first scale."""
    return MSE(output, y) * 1e-2


@pytest.mark.parametrize("close", ["micro-batch", "further loss", "evaluation"])
def test_scaled_gradients_of_an_open_window_are_not_applied_as_they_are(float16, close):
    """float16 is taken back in the middle of a window: what is in it already is 65536 times its size."""

    class Net(nn.Linear):
        fine = True

        def forward(self, x):
            h = super().forward(x)
            return h if self.fine else index_add(h, torch.zeros(len(x), 2))

    torch.manual_seed(1)
    model = Net(4, 2)
    plain = copy.deepcopy(model)
    (x, y), *_ = batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    model, step = optimize(model, optimizer, small, accumulate=2)
    step(x, y)
    assert precision(step)["choice"] == "fp16"
    model.__wrapped__.fine = False
    if close == "micro-batch":
        assert step(x, y).updated
    elif close == "further loss":
        step.backward(model(x).sum() * 0)
        assert step.flush()
    else:
        model.eval()
        model(x)
        assert step.flush()
    assert precision(step)["choice"] == "fp32"
    plain_loop(plain, torch.optim.SGD(plain.parameters(), lr=10.0), small, [(x, y)])
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, its, atol=1e-3)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_run_that_has_taken_a_choice_back_resumes(kind, monkeypatch):
    """Made with the same arguments the step begins with the choice again: the state tells that it was taken back.

    The later calls run in either precision, so that only the state can tell.
    """
    monkeypatch.setattr(decisions, "_automatic", lambda facts: decisions._decision(facts, kind, "for the test"))

    class Net(nn.Linear):
        fine = False

        def forward(self, x):
            h = super().forward(x)
            return h if self.fine else index_add(h, torch.zeros(len(x), 2))

    def run():
        torch.manual_seed(1)
        model = Net(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, step = optimize(model, optimizer, small, accumulate=2)
        assert precision(step)["choice"] == kind
        return model, optimizer, step

    data = batches(6)
    whole, optimizer, step = run()
    for x, y in data[:3]:
        step(x, y)
        whole.__wrapped__.fine = True
    assert precision(step)["choice"] == "fp32"
    states = copy.deepcopy([whole.state_dict(), optimizer.state_dict(), step.state_dict()])
    resumed, optimizer, again = run()
    resumed.__wrapped__.fine = True
    for part, state in zip((resumed, optimizer, again), states, strict=True):
        part.load_state_dict(state)
    assert precision(again) == {"choice": "fp32", "why": f"the automatic {kind} was taken back: in the run that is resumed"}
    assert differences(again.state_dict(), states[2]) == []
    for x, y in data[3:]:
        step(x, y)
        again(x, y)
    assert differences(whole.state_dict(), resumed.state_dict()) == []


def test_threads_that_fail_at_once_all_go_on_without_the_choice():
    class Meets(nn.Module):
        """Cannot run in 16 bits, and fails only once all threads are there."""

        def __init__(self, count):
            super().__init__()
            self.layer, self.together = nn.Linear(4, WIDE), threading.Barrier(count)
            self.wide = nn.Linear(WIDE, WIDE)

        def forward(self, x):
            h = self.wide(self.layer(x))
            if h.dtype == torch.bfloat16:
                self.together.wait(timeout=30)
            return index_add(h, torch.zeros(len(x), WIDE))

    model = optimize(Meets(4)).eval()
    x = torch.randn(5, 4)
    outputs = []
    in_threads([lambda: outputs.append(model(x))] * 4)
    expected = model(x)
    assert len(outputs) == 4
    assert all(torch.equal(output, expected) for output in outputs)
    assert model._self_live.plan["precision"].choice == "fp32"


def test_the_users_own_scaler_is_not_taken_back():
    """It is an explicit wish: the error is the user's to see."""
    model = build(index_add)
    scaler = torch.amp.GradScaler("cpu")
    step = optimize(model, RMSprop(model.parameters(), lr=1e-3), MSE, scaler=scaler).step
    with pytest.raises(RuntimeError, match="index_add"):
        step(*batches(1)[0])
    assert precision(step)["choice"] == "fp16"
    assert step.scaler is scaler


def test_an_eval_mode_call():
    """The plan tells, and the next step trains in float32 too."""
    model, step, _ = made(build(index_add))
    model.eval()
    x, _ = batches(1)[0]
    expected = build(index_add).eval()(x)
    assert torch.equal(model(x), expected)
    assert precision(step)["choice"] == "fp32"


def test_every_model_of_a_step_runs_as_the_plan_says():
    models = [build(index_add), build(None)]
    optimizer = RMSprop([p for m in models for p in m.parameters()], lr=1e-3)
    seen = []
    models[1].second.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    models, step = optimize(models, optimizer)
    x, y = batches(1)[0]
    step(MSE(models[0](x), y))
    assert precision(step)["choice"] == "fp32"
    step(MSE(models[1](x), y))
    assert seen == [torch.float32]


# --- errors of the user's own -----------------------------------------------------------------------------------------

BAD = {
    "the model's": (lambda x, y: (x[:, :3], y), RuntimeError, "shapes cannot be multiplied"),
    "the loss's": (lambda x, y: (x, y[:, :1].bool().expand(5, 3)), RuntimeError, "size of tensor"),
    "no target": (lambda x, y: (x,), TypeError, "target"),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize(("bad", "kind", "text"), BAD.values(), ids=BAD)
def test_an_error_of_the_users_own_takes_nothing_back(bad, kind, text, proven):
    """It is raised as the plain configuration raises it; precision, weights and the next batch are as before."""
    data = batches(3)
    model, step, optimizer = made(build(None))
    twin = build(None)
    twin.load_state_dict(model.state_dict())
    if proven:
        step(*data[0])
    states = copy.deepcopy([dict(model.named_parameters()), optimizer.state_dict()])
    with pytest.raises(kind, match=text):
        step(*bad(*data[1]))
    assert precision(step)["choice"] == "bf16"
    assert differences([dict(model.named_parameters()), optimizer.state_dict()], states) == []
    seen = []
    model.second.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert step(*data[2]).updated
    assert seen == [torch.bfloat16]


def test_an_explicit_precision_is_not_taken_back():
    step = made(build(index_add), precision="bf16")[1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="index_add"):
            step(*batches(1)[0])
    assert precision(step)["choice"] == "bf16"


def test_out_of_memory_is_not_tried_again():
    def full(h, x):
        raise torch.OutOfMemoryError("own words")

    model, step, _ = made(build(full))
    with pytest.raises(torch.OutOfMemoryError, match="own words"):
        step(*batches(1)[0])
    assert model.calls == 1
    assert precision(step)["choice"] == "bf16"


def test_an_interrupt_is_not_tried_again():
    def interrupted(h, x):
        raise KeyboardInterrupt

    model, step, _ = made(build(interrupted))
    with pytest.raises(KeyboardInterrupt):
        step(*batches(1)[0])
    assert model.calls == 1


# --- several choices --------------------------------------------------------------------------------------------------


class Choice:
    """Is on while it is applied."""

    def __init__(self, name):
        self.on = True
        self.decision = Decision(name, "on", "because", self._set(True), self._set(False))

    def _set(self, value):
        def change(parts):
            self.on = value
            return replace(parts)

        return change


def several(needs_off):
    """A recovery over two choices; its run fails while any of those named is on."""
    choices = {name: Choice(name) for name in ("a", "b")}
    live = Live(Parts(nn.Linear(1, 1)))
    live.plan = Plan([c.decision for c in choices.values()])
    live.recovery = Recovery([live], [(c.decision, "off") for c in choices.values()])
    runs = []

    def run():
        runs.append((choices["a"].on, choices["b"].on))
        if any(choices[name].on for name in needs_off):
            raise ValueError("with " + " and ".join(n for n in needs_off if choices[n].on))
        return "fine"

    return choices, live, runs, run


@pytest.mark.parametrize("culprit", ["a", "b"])
def test_one_choice_alone_is_taken_back(culprit):
    choices, live, _, run = several([culprit])
    other = "b" if culprit == "a" else "a"
    assert live.recovery.attempt(live, run) == "fine"
    assert {name: c.on for name, c in choices.items()} == {culprit: False, other: True}
    assert live.plan[culprit].choice == "off"
    assert f"ValueError: with {culprit}" in live.plan[culprit].why
    assert live.plan[other].choice == "on"
    assert live.recovery is not None


def test_both_choices_are_taken_back():
    choices, live, _, run = several(["a", "b"])
    assert live.recovery.attempt(live, run) == "fine"
    assert [c.on for c in choices.values()] == [False, False]
    assert [d.choice for d in live.plan] == ["off", "off"]
    assert live.recovery is None


def test_where_none_helps_all_stay_and_the_plain_error_is_raised():
    choices, live, runs, _ = several([])
    parts = live.parts

    def run():
        runs.append((choices["a"].on, choices["b"].on))
        raise ValueError(f"{runs[-1]}")

    with pytest.raises(ValueError, match=r"\(False, False\)"):
        live.recovery.attempt(live, run)
    assert runs == [(True, True), (False, True), (True, False), (False, False)]
    assert [c.on for c in choices.values()] == [True, True]
    assert [d.choice for d in live.plan] == ["on", "on"]
    assert live.parts is parts
    assert live.recovery is not None


@pytest.mark.parametrize("fails", ["the copy", "the model"])
def test_the_plan_tells_what_the_model_takes_back_and_not_a_copy_of_it(fails):
    model, step, _ = made(build(numpy, from_call=10**9))
    (x, y), *_ = batches(1)
    step(x, y)
    twin = copy.deepcopy(model)
    dtypes = {}
    for name, one in {"model": model, "copy": twin}.items():
        one.second.register_forward_hook(lambda module, args, output, name=name: dtypes.update({name: output.dtype}))
    (twin if fails == "the copy" else model).from_call = 0
    twin(x)
    step(x, y)
    assert dtypes == {name: torch.float32 if name in fails else torch.bfloat16 for name in ("model", "copy")}
    assert precision(step)["choice"] == ("bf16" if fails == "the copy" else "fp32")
    assert step.state_dict()["taken_back"] == ([] if fails == "the copy" else ["precision"])
