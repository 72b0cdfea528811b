"""cudnn.benchmark: on for a shape when it is first seen, with a credit against ever-new shapes, and put back afterwards."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cudnn

from hotloop import optimize
from hotloop._benchmark_flag import users_value
from hotloop._facts import Facts, machine, traits
from hotloop.transforms.cudnn_benchmark import CREDIT, EARN, ByShape, decide, signature
from observing import in_threads


class Net(nn.Module):
    """A convolution that notes the flag in its forward and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.seen, self.backward_saw = [], []

    def forward(self, x, **_):
        self.seen.append(cudnn.benchmark)
        output = self.conv(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.backward_saw.append(cudnn.benchmark))
        return output


def image(size=4, n=1):
    return torch.zeros(n, 1, size, size)


def loss_fn(output, target):
    return (output - target).square().mean()


def training(raw=None, loss=loss_fn, **wishes):
    raw = Net() if raw is None else raw
    return (*optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), loss, **wishes), raw)


@pytest.fixture(autouse=True)
def flag_goes_back():
    """A training-mode call outside of a step leaves the flag to its backward; the next step puts it back."""
    _, step, _ = training()
    yield
    step(image(1), image(1))
    assert cudnn.benchmark is False


@pytest.fixture
def user_sets():
    """Set a flag as the user would."""
    before = {name: getattr(cudnn, name) for name in ("benchmark", "deterministic")}

    def set_(name, value):
        setattr(cudnn, name, value)

    yield set_
    for name, value in before.items():
        setattr(cudnn, name, value)


@pytest.fixture(params=["step", "eval", "train"])
def caller(request):
    """(the net, a call of it): in a step, in eval mode, in training mode."""
    model, step, raw = training()
    call = {"step": lambda x: step(x, x), "eval": model.eval() if request.param == "eval" else model, "train": model}
    return raw, call[request.param]


# --- the credit rule ----------------------------------------------------------------------------------------------------


def test_one_shape_sees_it_on_in_every_call(caller):
    """C1."""
    raw, call = caller
    for _ in range(20):
        call(image())
    assert raw.seen == [True] * 20


def test_ever_new_shapes_run_out_of_credit(caller):
    """C1: 40 ever-new shapes see it on for the first 8."""
    raw, call = caller
    for size in range(1, 41):
        call(image(size))
    assert raw.seen == [True] * CREDIT + [False] * (40 - CREDIT)
    assert CREDIT == 8


def test_a_shape_keeps_the_value_it_was_first_seen_with(caller):
    """The plan-cache trap: torch keeps the plan of a shape that first ran with the flag off, whatever the flag is later."""
    raw, call = caller
    for size in range(1, CREDIT + 2):
        call(image(size))
    raw.seen.clear()
    for _ in range(2 * EARN):  # credit comes back, and is for shapes not seen before
        call(image(CREDIT + 1))
        call(image(1))
    assert raw.seen == [False, True] * 2 * EARN


def test_credit_comes_back_with_known_shapes(caller):
    """C2: after a run of ever-new shapes, a new shape is benchmarked again once there is credit."""
    raw, call = caller
    for size in range(1, 41):
        call(image(size))
    for _ in range(EARN):
        call(image(1))
    raw.seen.clear()
    for size in (50, 51):
        call(image(size))
    assert raw.seen == [True, False]


def test_credit_ends_at_its_start(caller):
    """C2: 400 calls of one shape earn no more than 8."""
    raw, call = caller
    for _ in range(CREDIT * EARN + EARN):
        call(image())
    raw.seen.clear()
    for size in range(10, 30):
        call(image(size))
    assert raw.seen == [True] * CREDIT + [False] * (20 - CREDIT)


def test_a_ragged_last_batch_costs_one_credit_once():
    flag = ByShape()
    values = [flag((image(n=n),), {}) for _ in range(20) for n in (8, 8, 8, 3)]
    assert all(values)
    assert [flag((image(size),), {}) for size in range(10, 20)] == [True] * (CREDIT - 1) + [False] * (11 - CREDIT)


def test_each_model_has_its_own_credit():
    """C6: one with a stable shape and one without, each with its own value in its own forward."""
    (stable, _, one), (unstable, _, two) = training(), training()
    for size in range(1, 31):
        stable.eval()(image())
        unstable.eval()(image(size))
    assert one.seen == [True] * 30
    assert two.seen == [True] * CREDIT + [False] * (30 - CREDIT)


def test_a_copy_has_its_own_credit():
    model = optimize(Net()).eval()
    made = copy.deepcopy(model)
    for size in range(1, 20):
        made(image(size))
    for size in range(1, CREDIT + 1):
        model(image(size))
    assert model.seen == [True] * CREDIT


@pytest.mark.parametrize(("one", "two", "same"), [
    (((image(),), {}), ((image(),), {}), True),
    (((image(),), {}), ((image(5),), {}), False),
    (((image(), image()), {}), ((image(),), {}), False),
    (((image(),), {"mask": image()}), ((image(),), {"mask": image(5)}), False),
    ((({"a": [image()]},), {}), (({"a": [image(5)]},), {}), False),
    (((UserDict(a=image()),), {}), ((UserDict(a=image(5)),), {}), False),
    (((image(), 3, "text"), {}), ((image(), 4, "other"), {}), True),
    (((image().to(memory_format=torch.channels_last),), {}), ((image(),), {}), True),
], ids=["same", "size", "number", "keyword", "nested", "mapping", "numbers and texts", "memory format"])  # fmt: skip
def test_what_tells_shapes_apart(one, two, same):
    assert (signature(*one) == signature(*two)) is same
    hash(signature(*one))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_tensors_without_a_shape_of_their_own(layout):
    """Nested tensors; what is not a plain shape must not fail a call that the plain model can do."""

    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 2, 1)

        def forward(self, batch):
            return torch.stack([self.conv(x.t()[None]).sum() for x in batch.unbind()])

    model = optimize(Pools()).eval()
    batch = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=layout)
    assert model(batch).shape == (2,)
    assert model(torch.eye(4).expand(2, 4, 4)).shape == (2,)


def test_shapes_that_are_remembered_have_an_end(monkeypatch):
    from hotloop.transforms import cudnn_benchmark

    monkeypatch.setattr(cudnn_benchmark, "_REMEMBERED", 3)
    flag = ByShape()
    for size in range(1, 10):
        flag((image(size),), {})
    assert len(flag._known) == 3


# --- what is put back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", ["auto", True, False])
def test_optimize_alone_leaves_the_flag(wish):
    """C3."""
    training(cudnn_benchmark=wish)
    assert cudnn.benchmark is False


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("wish", ["auto", True, False])
def test_a_step_and_an_eval_call_put_back_what_they_found(user_sets, wish, value):
    """The value that the user sets after `optimize` too."""
    model, step, _ = training(cudnn_benchmark=wish)
    user_sets("benchmark", value)
    step(image(), image())
    assert cudnn.benchmark is value
    model.eval()(image())
    assert cudnn.benchmark is value


def test_a_training_call_outside_of_a_step_leaves_it_to_its_backward():
    model, step, raw = training()
    model(image()).sum().backward()
    assert raw.seen == raw.backward_saw == [True]
    assert cudnn.benchmark is True
    step(image(), image())
    assert cudnn.benchmark is False


def test_a_step_on_a_loss_puts_back_what_the_call_set():
    model, step, raw = training()
    step(loss_fn(model(image()), image()))
    assert raw.seen == raw.backward_saw == [True]
    assert cudnn.benchmark is False


@pytest.mark.parametrize("form", ["batch", "loss"])
def test_an_eval_call_before_the_backward_leaves_the_flag_to_it(form):
    """Distillation: a teacher between the student's forward and backward must not switch it off for that backward."""
    teacher = optimize(Net()).eval()
    student, step, raw = training(loss=lambda output, x: loss_fn(output, teacher(x)))
    x = image()
    if form == "batch":
        step(x, x)
    else:
        output = student(x)
        step(loss_fn(output, teacher(x)))
    assert raw.seen == [True]
    assert raw.backward_saw == [True]
    assert teacher.seen == [True]
    assert cudnn.benchmark is False


def test_a_flag_that_the_user_sets_between_calls_is_the_users(user_sets):
    model, _, _ = training()
    model(image()).sum().backward()
    user_sets("benchmark", True)
    model.eval()(image())
    assert cudnn.benchmark is True


def test_so_it_is_while_a_call_of_ours_has_it_off(user_sets):
    """Two values of ours with the user's behind them, and then one of the user's: that one counts."""
    model, step, raw = training()
    for size in range(1, CREDIT + 2):
        model(image(size))
    assert cudnn.benchmark is False  # ours, for a shape without credit
    user_sets("benchmark", True)
    step(image(CREDIT + 1), image(CREDIT + 1))
    assert raw.seen[-1] is False
    assert cudnn.benchmark is True


@pytest.mark.parametrize("mode", ["step", "eval"])
def test_a_call_that_raises_puts_it_back(mode):
    model, step, _ = training()
    bad = torch.zeros(1, 7, 4, 4)
    with pytest.raises(RuntimeError):
        step(bad, bad) if mode == "step" else model.eval()(bad)
    assert cudnn.benchmark is False


@pytest.mark.parametrize("mode", ["step", "eval"])
def test_inside_a_block_with_flags_of_the_users_own(mode):
    """F-26."""
    model, step, raw = training()
    with cudnn.flags(enabled=False, benchmark=False):
        step(image(), image()) if mode == "step" else model.eval()(image())
        assert (cudnn.enabled, cudnn.benchmark) == (False, False)
    assert raw.seen == [True]


def test_other_flags_stay_as_they_are():
    """F-26: cuDNN itself stays on, and TF32 as it is."""
    seen = []
    raw = Net()
    raw.register_forward_hook(lambda *_: seen.append((cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32)))
    before = cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32
    optimize(raw).eval()(image())
    assert seen == [before]


def test_threads_leave_it_as_they_found_it():
    model = optimize(Net()).eval()
    _, step, _ = training()
    errors = []

    def work(call):
        try:
            for size in range(1, 60):
                call(image(size % 12 + 1))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(c,)) for c in (model, model, lambda x: step(x, x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cudnn.benchmark is False


def test_an_evaluation_that_outlasts_a_step_of_another_thread():
    """What it found was not the user's: the flag ends as the user has it."""
    stepping, evaluating, stepped = threading.Event(), threading.Event(), threading.Event()

    class Waits(Net):
        def forward(self, x):
            evaluating.set()
            assert stepped.wait(10)
            return super().forward(x)

    evaluated = optimize(Waits()).eval()

    def evaluate():
        assert stepping.wait(10)
        evaluated(image())

    def loss(output, target):
        stepping.set()
        assert evaluating.wait(10)
        return loss_fn(output, target)

    _, step, _ = training(loss=loss)
    thread = threading.Thread(target=evaluate)
    thread.start()
    step(image(), image())
    stepped.set()
    thread.join()
    assert cudnn.benchmark is False


# --- whose choice it is -------------------------------------------------------------------------------------------------


def test_a_flag_that_is_on_already_is_the_users_choice(user_sets):
    """C6."""
    user_sets("benchmark", True)
    model, step, raw = training()
    for size in range(1, 21):
        step(image(size), image(size))
        model.eval()(image(size))
        model.train()
    assert raw.seen == [True] * 40
    assert cudnn.benchmark is True
    assert step.plan["cudnn_benchmark"].choice == "as it is"


@pytest.mark.parametrize(("wish", "choice"), [(True, "on"), (False, "off"), (None, "off")])
@pytest.mark.parametrize("found", [True, False])
def test_a_wish_is_obeyed_within_the_calls(user_sets, wish, choice, found):
    """C4, C5: there is a way out, also where the flag is on."""
    user_sets("benchmark", found)
    model, step, raw = training(cudnn_benchmark=wish)
    for size in range(1, 21):
        step(image(size), image(size))
    model.eval()(image())
    assert raw.seen == [bool(wish)] * 21
    assert cudnn.benchmark is found
    assert step.plan["cudnn_benchmark"].choice == choice


@pytest.mark.parametrize("wish", ["auto", True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["cudnn", "torch"])
def test_never_on_where_deterministic_algorithms_are_asked_for(user_sets, wish, when, how):
    """C8, C9."""

    def ask():
        if how == "cudnn":
            user_sets("deterministic", True)
        else:
            torch.use_deterministic_algorithms(True)

    try:
        if when == "before":
            ask()
        model, step, raw = training(cudnn_benchmark=wish)
        ask()
        step(image(), image())
        model.eval()(image())
        assert raw.seen == [False, False]
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_plan_says_so_where_they_were_asked_for_before(user_sets):
    """C8."""
    user_sets("deterministic", True)
    assert "deterministic" in training()[1].plan["cudnn_benchmark"].why


@pytest.mark.parametrize("wishes", [{}, {"exact": True}], ids=["", "exact"])
def test_the_plan_does_not_call_a_flag_off_that_the_user_has_on(user_sets, wishes):
    user_sets("benchmark", True)
    _, step, raw = training(**wishes)
    step(image(), image())
    assert raw.seen == [True]
    assert step.plan["cudnn_benchmark"].choice == "as it is"


def test_exact_leaves_it_off():
    model, step, raw = training(exact=True)
    step(image(), image())
    model.eval()(image())
    assert raw.seen == [False, False]
    assert "exact" in step.plan["cudnn_benchmark"].why


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_it_is_for_models_that_hold_a_convolution(layer):
    raw = nn.Sequential(nn.Identity(), layer(1, 1, 1))
    _, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), loss_fn)
    assert step.plan["cudnn_benchmark"].choice == "by shape"


def test_a_flag_that_another_model_has_left_on_is_not_the_users_choice():
    """A training-mode call outside of a step leaves it on; what is wrapped then has a credit of its own."""
    model, _, _ = training()
    model(image())
    _, step, raw = training()
    assert step.plan["cudnn_benchmark"].choice == "by shape"
    for size in range(1, 21):
        step(image(size), image(size))
    assert raw.seen == [True] * CREDIT + [False] * (20 - CREDIT)
    assert cudnn.benchmark is False


def test_a_model_without_convolutions_never_touches_it(monkeypatch):
    """C3."""
    raw = nn.Linear(4, 2)
    model, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), F.cross_entropy)
    written = []
    monkeypatch.setattr(type(cudnn), "__setattr__", lambda self, name, value: written.append(name))
    step(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
    model.eval()(torch.zeros(3, 4))
    assert written == []


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_inside_a_compiled_region_it_is_left_alone():
    model = optimize(nn.Conv2d(1, 1, 1)).eval()
    torch.compile(nn.Sequential(model), backend="eager")(image())
    assert cudnn.benchmark is False


def test_after_global_flags_are_disabled_training_goes_on():
    """F-26: torch then refuses every write, which is no reason to fail."""
    code = """
import torch
from torch import nn
from hotloop import optimize
from hotloop._benchmark_flag import users_value
from hotloop._facts import Facts, machine, traits
raw = nn.Conv2d(1, 1, 1)
model, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), nn.MSELoss())
torch.backends.disable_global_flags()
x = torch.zeros(1, 1, 4, 4)
for _ in range(3):
    loss = step(x, x)["loss"]
    step(nn.functional.mse_loss(model(x), x))
    model.eval()(x)
    model.train()
print(loss >= 0, torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "True"]


def test_disabled_between_a_call_and_its_step():
    """A flag that was set cannot be put back any more; nothing raises, and nothing is tried for ever."""
    code = """
import torch
from torch import nn
from hotloop import optimize
from hotloop._benchmark_flag import users_value
from hotloop._facts import Facts, machine, traits
raw = nn.Conv2d(1, 1, 1)
model, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), nn.MSELoss())
x = torch.zeros(1, 1, 4, 4)
loss = nn.functional.mse_loss(model(x), x)
torch.backends.disable_global_flags()
step(loss)
step(x, x)
print("ok")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"


def test_the_plan_explains_the_rule():
    why = training()[1].plan["cudnn_benchmark"].why
    assert str(CREDIT) in why
    assert str(EARN) in why


def test_threads_that_overlap_leave_the_users_value():
    """One thread begins while another has set the flag, and sets it again when the other one is done."""
    begun, ended = threading.Event(), threading.Event()

    class First(nn.Conv2d):
        def forward(self, x):
            begun.set()
            assert second_is_in.wait(10)
            return super().forward(x)

    class Second(nn.Conv2d):
        def forward(self, x):
            second_is_in.set()
            assert ended.wait(10)
            return inner(super().forward(x))

    second_is_in = threading.Event()
    first, second, inner = (
        optimize(kind(3, 3, 1), device="cpu", cudnn_benchmark=True).eval() for kind in (First, Second, nn.Conv2d)
    )
    x = torch.ones(1, 3, 4, 4)

    def run_first():
        first(x)
        ended.set()

    def run_second():
        assert begun.wait(10)
        second(x)

    in_threads([run_first, run_second])
    assert torch.backends.cudnn.benchmark is False
    assert users_value() is False


@pytest.mark.parametrize(("device", "rounds"), [("cuda", True), ("cpu", False)])
def test_the_plan_says_that_another_algorithm_may_round_differently(device, rounds):
    facts = Facts(machine(), traits([Net()]), device=torch.device(device))
    assert ("round differently (1e-6" in decide(facts, "auto").why) is rounds
