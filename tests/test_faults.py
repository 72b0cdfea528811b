"""Whatever raises, and wherever: everything is as it was, nothing is left alive, and the next batch trains."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import hotloop
from guard import _states as process_states
from hotloop import fast_eval, prefetch
from parity.twins import differences, snapshot

KINDS = [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def process():
    """What holds for the whole process: grad mode, autocast and its cache, flags, hooks of torch's own classes ..."""
    return {name: read() for name, read, _ in process_states()}


class Point:
    """Where faults are put in: `reach(name)` raises while `at` is that name."""

    def __init__(self):
        self.at = self.kind = None

    def reach(self, name):
        if self.at == name:
            raise self.kind(f"at {name}")


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, point):
        ctx.point = point
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.point.reach("backward")
        return gradient, None


class Movable:
    def __init__(self, tensor, point):
        self.tensor, self.point = tensor, point

    def to(self, device):
        self.point.reach("move")
        return self.tensor


class Output(dict):
    """The container of a model's output, which is made anew where its tensors are cast."""

    point = Point()

    def items(self):
        self.point.reach("output cast")
        return super().items()


class Net(nn.Module):
    def __init__(self, point):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.drop, self.head = nn.Conv2d(1, 3, 2), nn.Dropout(0.2), nn.Linear(3, 2)
        self.point, self.made = point, []

    def forward(self, x):
        hidden = self.drop(self.conv(x).amax((2, 3)))
        self.made.append(weakref.ref(hidden))
        self.point.reach("forward")
        logits = self.head(Breaks.apply(hidden, self.point))
        self.made.append(weakref.ref(logits))
        return Output(logits=logits)


class Momentum(SGD):
    point: Point

    def step(self, closure=None):
        self.point.reach("optimizer")
        return super().step(closure)


class Scheduler(StepLR):
    def step(self):
        point = self.optimizer.point
        point.reach("scheduler")
        if point.at != "scheduler stands still":
            super().step()


class Scaler(torch.amp.GradScaler):
    def __init__(self, point, **options):
        super().__init__("cpu", init_scale=64.0, growth_interval=3, **options)
        self.point = point

    def unscale_(self, optimizer):
        self.point.reach("unscale")
        return super().unscale_(optimizer)

    def update(self, new_scale=None):
        if new_scale is None:
            self.point.reach("scaler update")
        return super().update(new_scale)


class Job:
    def __init__(self, precision="fp32", accumulate=1, clip_norm=0.5):
        self.point = point = Point()
        Output.point = point
        self.net = Net(point)
        self.optimizer = Momentum(self.net.parameters(), lr=0.1, momentum=0.9)
        self.optimizer.point = point
        self.scheduler = Scheduler(self.optimizer, 2, 0.7)

        def loss_fn(output, y):
            point.reach("loss")
            return F.cross_entropy(output["logits"], y)

        def metric(output, y):
            point.reach("metric")
            return output["logits"].mean()

        self.model, self.step = hotloop.optimize(
            self.net,
            self.optimizer,
            loss_fn,
            device="cpu",
            exact=True,
            precision=precision,
            accumulate=accumulate,
            clip_norm=clip_norm,
            cudnn_benchmark=True,
            scheduler=self.scheduler,
            scaler=Scaler(point) if precision == "fp16" else None,
            before_update=lambda: point.reach("before_update"),
            metrics={"mean": metric},
        )

    def train(self, i, at=None):
        """The i-th batch. Dropout draws the same for it in every job."""
        Output.point = self.point
        torch.manual_seed(i)
        x, y = torch.randn(4, 1, 3, 3), torch.randint(2, (4,))
        self.point.at = at
        try:
            return self.step(Movable(x, self.point), y)
        finally:
            self.point.at = None

    def fails(self, i, at, kind):
        """The same, with a fault; nothing of the error is kept."""
        self.point.kind = kind
        try:
            self.train(i, at)
        except kind as error:
            return str(error)
        return ""

    def state(self):
        state = self.step.state_dict()
        del state["mean"]
        return [snapshot(self.net, self.optimizer, self.scheduler)[:-1], state]

    def around(self):
        """What a step must leave alone."""
        modes = [m.training for m in self.net.modules()]
        hooks = [len(v) for m in self.net.modules() for k, v in vars(m).items() if k.endswith("_hooks")]
        hooks += [len(v) for k, v in vars(self.optimizer).items() if k.endswith("_hooks")]
        return process(), modes, hooks, self.model._self_live.in_step


def assert_dead(made):
    if any(tensor() is not None for tensor in made):  # which takes long
        gc.collect()
    assert [tensor for tensor in made if tensor() is not None] == []


BEFORE = ["move", "forward", "output cast", "loss", "metric"]  # the window so far is kept
WITHIN = ["backward", "before_update", "clip", "optimizer"]  # it is dropped
SCALED = ["unscale", "scaler update"]
CASES = [(stage, p, n) for stage in [*BEFORE, *WITHIN, "scheduler"] for p in ("fp32", "bf16", "fp16") for n in (1, 2)]
CASES += [(stage, "fp16", n) for stage in SCALED for n in (1, 2)]


@each_kind
@pytest.mark.parametrize(("stage", "precision", "accumulate"), CASES)
def test_a_fault_in_any_stage_of_a_step(stage, precision, accumulate, kind, monkeypatch):
    """After three good batches the fourth fails; then training goes on as if it had not been given."""
    job, twin = Job(precision, accumulate), Job(precision, accumulate)
    job.net.head.eval()
    clip = torch.nn.utils.clip_grad_norm_

    def clipping(*arguments):
        Output.point.reach("clip")
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipping)
    for i in range(3):
        job.train(i)
        if stage in [*BEFORE, "scheduler"] or accumulate == 1 or i < 2:
            twin.train(i)
    if stage == "scheduler":  # the update has been made
        twin.train(3, "scheduler stands still")
    if stage == "scaler update":  # so has this one, but for the scale
        for i in range(2, 4) if accumulate == 2 else [3]:
            twin.train(i, "scheduler stands still")
    around = job.around()
    message = job.fails(3, stage, kind)
    assert f"at {stage}" in message
    assert job.around() == around
    assert_dead(job.net.made)
    job.model.eval()
    assert not job.model(torch.ones(1, 1, 3, 3))["logits"].requires_grad, "the model believes to be inside of a step"
    job.model.train()
    if stage == "scaler update":
        assert differences(job.state()[0][:2], twin.state()[0][:2]) == []
        return
    assert differences(job.state(), twin.state()) == []
    for i in range(4, 9):
        metrics, expected = job.train(i), twin.train(i)
        assert differences(dict(metrics), dict(expected)) == []
    assert differences(job.state(), twin.state()) == []


@each_kind
@pytest.mark.parametrize("stage", ["forward", "loss", "backward"])
def test_a_fault_with_a_loss_of_the_users_own(stage, kind):
    """The model's call is the user's; what it raises is too."""
    job, twin = Job(accumulate=2), Job(accumulate=2)

    def train(job, i, at=None):
        Output.point = job.point
        torch.manual_seed(i)
        x, y = torch.randn(4, 1, 3, 3), torch.randint(2, (4,))
        job.point.at, job.point.kind = at, kind
        try:
            output = job.model(x)
            job.point.reach("loss")
            job.step(F.cross_entropy(output["logits"], y))
        finally:
            job.point.at = None

    for i in range(3):
        train(job, i)
        if stage != "backward" or i < 2:
            train(twin, i)
    around = job.around()
    with pytest.raises(kind, match=f"at {stage}"):
        train(job, 3, stage)
    # A training-mode call of the user's own leaves cuDNN's flag for the backward, which reads it; the next step puts it back.
    for i in range(4, 8):
        train(job, i)
        train(twin, i)
    assert job.around() == around
    assert differences(job.state(), twin.state()) == []


@each_kind
def test_a_fault_in_a_flush(kind):
    job, twin = Job(accumulate=3), Job(accumulate=3)
    job.train(0)
    job.point.at, job.point.kind = "optimizer", kind
    around = job.around()
    with pytest.raises(kind, match="at optimizer"):
        job.step.flush()
    assert job.around() == around
    job.point.at = None
    assert job.step.flush() is False
    for i in range(1, 7):
        job.train(i)
        twin.train(i)
    assert differences(job.state(), twin.state()) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_surrounding_autocast_has_no_stale_weights_after_a_fault(precision):
    """The first of two optimizers has stepped when the second one raises."""
    torch.manual_seed(1)
    nets, point = [nn.Linear(4, 4), nn.Linear(4, 4)], Point()
    optimizers = [SGD(nets[0].parameters(), lr=1.0), Momentum(nets[1].parameters(), lr=1.0)]
    optimizers[1].point = point
    _, step = hotloop.optimize(nn.Sequential(*nets), optimizers, device="cpu", precision=precision, exact=True)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = step._models[0](x).float().sum()
        point.at, point.kind = "optimizer", ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            step(loss)
        got = nets[0](x)
        torch.clear_autocast_cache()
        assert torch.equal(got, nets[0](x))


# --- evaluations --------------------------------------------------------------------------------------------------------


def plain_function(model, point):
    @fast_eval
    def evaluate():
        total = model(torch.ones(2, 1, 3, 3))["logits"].sum()
        point.reach("body")
        return {"total": total}

    return evaluate


def generator(model, point):
    @fast_eval
    def evaluate():
        yield model(torch.ones(2, 1, 3, 3))["logits"].sum()
        point.reach("body")
        yield model(torch.ones(2, 1, 3, 3))["logits"].mean()

    return lambda: list(evaluate())


def coroutine(model, point):
    @fast_eval
    async def evaluate():
        total = model(torch.ones(2, 1, 3, 3))["logits"].sum()
        await asyncio.sleep(0)
        point.reach("body")
        return total

    return lambda: asyncio.run(evaluate())


def asynchronous_generator(model, point):
    @fast_eval
    async def evaluate():
        for _ in range(2):
            yield model(torch.ones(2, 1, 3, 3))["logits"].sum()
            await asyncio.sleep(0)
            point.reach("body")

    async def collect():
        return [value async for value in evaluate()]

    return lambda: asyncio.run(collect())


def nested(model, point):
    inner = plain_function(model, point)

    @fast_eval
    def evaluate():
        return [model(torch.ones(2, 1, 3, 3))["logits"].sum(), inner()["total"]]

    return evaluate


def caught_inside(model, point):
    """The inner one fails, and the outer one goes on in eval mode."""
    inner = plain_function(model, point)

    @fast_eval
    def evaluate():
        try:
            inner()
        except BaseException as error:
            assert not any(m.training for m in model.modules())
            assert not torch.is_grad_enabled()
            raise error from None

    return evaluate


def in_a_loader(model, point):
    class Images(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 2:
                point.reach("body")
            return torch.full((1, 3, 3), float(i))

    @fast_eval
    def evaluate(loader):
        return [model(x)["logits"].sum() for x in loader]

    return partial(evaluate, DataLoader(Images(), batch_size=1))


EVALUATIONS = [
    plain_function,
    generator,
    coroutine,
    asynchronous_generator,
    nested,
    caught_inside,
    in_a_loader,
]


@each_kind
@pytest.mark.parametrize("where", ["body", "forward", "move"])
@pytest.mark.parametrize("make", EVALUATIONS, ids=lambda make: make.__name__)
def test_a_fault_in_an_evaluation(make, where, kind):
    """Modes of every submodule, gradients, autocast and flags are as before; the next evaluation and training go on."""
    if where == "move" and make is not in_a_loader:
        make = moving
    job, twin = Job("bf16", accumulate=2), Job("bf16", accumulate=2)
    for each in (job, twin):
        each.train(0)
        each.net.drop.eval()
    Output.point = job.point
    evaluate = make(job.model, job.point)
    expected = evaluate()
    around, state = job.around(), job.state()
    job.point.kind = kind
    made = len(job.net.made)
    for _ in range(2):
        job.point.at = where
        if (where, make) == ("move", in_a_loader):
            job.point.at = "body"
        with pytest.raises(kind, match="at "):
            evaluate()
        job.point.at = None
        assert job.around() == around
    assert_dead(job.net.made[made:])
    assert differences(job.state(), state) == []
    assert evaluate() == expected
    for i in range(1, 4):
        job.train(i)
        twin.train(i)
    assert differences(job.state(), twin.state()) == []


def moving(model, point):
    @fast_eval
    def evaluate():
        return model(Movable(torch.ones(2, 1, 3, 3), point))["logits"].sum()

    return evaluate


@each_kind
def test_a_generator_that_is_left_or_thrown_into(kind):
    job = Job()
    model = job.model

    @fast_eval
    def evaluate():
        try:
            yield model(torch.ones(2, 1, 3, 3))["logits"].sum()
            yield 1
        finally:
            assert not torch.is_grad_enabled()

    around = job.around()
    running = evaluate()
    next(running)
    running.close()
    assert job.around() == around
    running = evaluate()
    next(running)
    with pytest.raises(kind, match="thrown"):
        running.throw(kind("thrown"))
    assert job.around() == around


# --- loaders ------------------------------------------------------------------------------------------------------------


class Spoiled(Dataset):
    """Its item 5 raises."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise self.kind("at item 5")
        return torch.full((1, 3, 3), i / 8), i % 2


@each_kind
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_in_a_loader(workers, kind):
    """Batches before it train; it is raised at its turn; nothing of the loader goes on; the next loader trains."""
    if workers and kind is KeyboardInterrupt:
        pytest.skip("a worker of torch ends at it without a word; a keyboard interrupts the parent as well")
    job, twin = Job(accumulate=2), Job(accumulate=2)
    good = [(torch.stack([torch.full((1, 3, 3), j / 8) for j in (i, i + 1)]), torch.tensor([0, 1])) for i in (0, 2)]
    around = job.around()
    torch.manual_seed(5)
    loader = DataLoader(Spoiled(kind), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
    trained = []
    with pytest.raises(kind, match="at item 5"):
        for x, y in prefetch(loader, job.model):
            torch.manual_seed(len(trained))
            trained.append(job.step(x, y))
    if workers:  # torch's error holds its iterator in a cycle, and a worker that is collected is waited for for five seconds
        loader._iterator._shutdown_workers()
    assert len(trained) == 2
    assert job.around() == around
    for i, (x, y) in enumerate(good):
        torch.manual_seed(i)
        twin.step(x, y)
    for i in range(2, 5):
        job.train(i)
        twin.train(i)
    assert differences(job.state(), twin.state()) == []


# --- optimize itself ----------------------------------------------------------------------------------------------------


@each_kind
def test_a_fault_while_the_model_is_wrapped(kind, monkeypatch):
    """`optimize` changes nothing where it does not end: neither model nor optimizer, and it can be called again."""
    net = nn.Sequential(nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20), nn.MaxPool2d(2))
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    before = [net[0].weight.stride(), copy.deepcopy(optimizer.state_dict()), len(optimizer._optimizer_step_post_hooks)]
    hooks = len(optimizer._optimizer_load_state_dict_post_hooks)

    def compiled(*arguments, **options):
        raise kind("while compiling")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", compiled)
        with pytest.raises((kind, ValueError), match="while compiling"):
            hotloop.optimize(net, optimizer, F.mse_loss, device="cpu", channels_last=True, compile=True)
    assert [net[0].weight.stride(), optimizer.state_dict(), len(optimizer._optimizer_step_post_hooks)] == before
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == hooks
    assert (
        hotloop.optimize(net, optimizer, F.mse_loss, device="cpu", channels_last=True).step.plan["channels_last"].choice == "on"
    )
