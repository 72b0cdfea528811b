"""Any sequence of calls leaves the step where a loop written by hand would be, to the last bit."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import hotloop
from hotloop._tree import leaves
from parity.twins import differences, snapshot

CE = nn.CrossEntropyLoss()
SCALE = 64.0

OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "fused adamw": partial(AdamW, lr=0.01, fused=True),
}


class BrokenError(Exception):
    pass


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise BrokenError


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))


def batch(seed, width=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, width, generator=generator), torch.randint(2, (4,), generator=generator)


def loss_fn(output, y):
    """A target of more than classes fails; one below zero makes the gradient overflow in float16, -2 breaks the backward."""
    if y[0] == -2:
        return CE(Break.apply(output), y.clamp(min=0))
    return CE(output, y.clamp(min=0)) * (1e34 if y[0] == -1 else 1.0)


@hotloop.fast_eval
def evaluate(model, x):
    return {"mean": model(x).mean()}


class Wrapped:
    """What a user of hotloop writes."""

    def __init__(self, make, accumulate, clip_norm, precision):
        self.net = net()
        self.optimizer = make(self.net.parameters())
        self.scheduler = StepLR(self.optimizer, 2, 0.7)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2) if precision == "fp16" else None
        self.model, self.step = hotloop.optimize(
            self.net,
            self.optimizer,
            loss_fn,
            device="cpu",
            exact=True,
            precision=precision,
            accumulate=accumulate,
            clip_norm=clip_norm,
            scheduler=self.scheduler,
            scaler=scaler,
            inference="grad",  # losses of one's own in eval mode too
        )

    def train(self, x, y):
        self.step(x, y)

    def train_on_loss(self, x, y):
        self.step(loss_fn(self.model(x), y))

    def further(self, x, y):
        self.step.backward(loss_fn(self.model(x), y))

    def flush(self, rescale):
        return self.step.flush(rescale=rescale)

    def predict(self, x):
        with torch.no_grad():
            return self.model(x)

    def evaluate(self, x):
        return evaluate(self.model, x)

    def zero_grad_in_the_middle(self):
        self.net.zero_grad()
        if self.step.state_dict()["window"]["count"] or self.step.state_dict()["window"]["extra"]:
            with pytest.raises(RuntimeError, match="zero_grad"):
                self.step.flush()

    def save(self):
        parts = (self.net, self.optimizer, self.step)
        self.saved = [copy.deepcopy(part.state_dict()) for part in parts] + [torch.get_rng_state()]

    def load(self):
        *states, random = self.saved
        for part, state in zip((self.net, self.optimizer, self.step), states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(random)

    def state(self):
        window = self.step.state_dict()["window"]
        counts = [self.step.updates, self.step.skipped, window["count"], window["extra"]]
        return [snapshot(self.net, self.optimizer, self.scheduler, self.step.scaler), window["gradients"], counts]


class ByHand:
    """The same with torch alone. A window's gradients are dropped at its start; what fails in a backward ends the window."""

    def __init__(self, make, accumulate, clip_norm, precision):
        self.net = net()
        self.optimizer = make(self.net.parameters())
        self.scheduler = StepLR(self.optimizer, 2, 0.7)
        self.half, self.accumulate, self.clip_norm = precision == "fp16", accumulate, clip_norm
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2, enabled=self.half)
        self.count, self.extra, self.updates, self.skipped = 0, False, 0, 0

    def open(self):
        if not (self.count or self.extra):
            self.optimizer.zero_grad()

    def predict(self, x):
        with torch.no_grad():
            return self.forward(x)

    def evaluate(self, x):
        modes = [(m, m.training) for m in self.net.modules()]
        self.net.eval()
        mean = self.predict(x).mean().item()
        for module, mode in modes:
            module.training = mode
        return {"mean": mean}

    def forward(self, x):
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            return self.net(x).float()

    def backward(self, loss):
        try:
            self.scaler.scale(loss).backward()
        except BrokenError:
            self.optimizer.zero_grad()
            self.count, self.extra = 0, False
            raise

    def train(self, x, y):
        self.open()
        self.train_on_loss(x, y)

    def train_on_loss(self, x, y):
        loss = loss_fn(self.forward(x), y)
        self.open()
        self.backward(loss / self.accumulate)
        self.count += 1
        if self.count == self.accumulate:
            self.update()

    def further(self, x, y):
        loss = loss_fn(self.forward(x), y)
        self.open()
        self.backward(loss)
        self.extra = True

    def flush(self, rescale):
        if not (self.count or self.extra):
            return False
        if rescale and self.count:
            for p in self.net.parameters():
                p.grad.mul_(self.accumulate / self.count)
        self.update()
        return True

    def update(self):
        finite = all(p.grad.isfinite().all() for p in self.net.parameters())
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.net.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if finite or not self.half:
            self.scheduler.step()
            self.updates += 1
        else:
            self.skipped += 1
        self.count, self.extra = 0, False

    def zero_grad_in_the_middle(self):
        self.optimizer.zero_grad()
        self.count, self.extra = 0, False

    def save(self):
        parts = (self.net, self.optimizer, self.scheduler, self.scaler)
        gradients = [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]
        counts = (self.count, self.extra, self.updates, self.skipped)
        self.saved = [copy.deepcopy(part.state_dict()) for part in parts], gradients, counts, torch.get_rng_state()

    def load(self):
        states, gradients, counts, random = copy.deepcopy(self.saved)
        for part, state in zip((self.net, self.optimizer, self.scheduler, self.scaler), states, strict=True):
            part.load_state_dict(state)
        self.count, self.extra, self.updates, self.skipped = counts
        for p, gradient in zip(self.net.parameters(), gradients, strict=True):
            p.grad = gradient if self.count or self.extra else None
        torch.set_rng_state(random)

    def state(self):
        open_ = self.count or self.extra
        gradients = {name: p.grad for name, p in self.net.named_parameters() if open_ and p.grad is not None}
        counts = [self.updates, self.skipped, self.count, self.extra]
        return [snapshot(self.net, self.optimizer, self.scheduler, self.scaler), gradients, counts]


def spoiled(x, y, how):
    """A batch that fails in the model, in the loss or in the backward, or that overflows in float16."""
    if how == "model":
        return x[:, :2], y
    if how is not None:
        y[0] = {"loss": 5, "overflow": -1, "backward": -2}[how]
    return x, y


HOW = st.sampled_from([None, None, None, None, None, "model", "loss", "backward", "overflow"])
SEED = st.integers(0, 50)
CALLS = st.one_of(
    st.tuples(st.just("train"), SEED, HOW),
    st.tuples(st.just("train"), SEED, HOW),
    st.tuples(st.just("train_on_loss"), SEED, HOW),
    st.tuples(st.just("further"), SEED, HOW),
    st.tuples(st.just("flush"), st.booleans()),
    st.tuples(st.just("mode"), st.booleans()),
    st.tuples(st.just("predict"), SEED),
    st.tuples(st.just("evaluate"), SEED),
    st.tuples(st.just("freeze"), st.booleans()),
    st.tuples(st.just("rate"), st.sampled_from([0.0, 0.01, 0.5])),
    st.tuples(st.just("schedule"), st.sampled_from([0.5, 1.0, 1.5])),
    st.tuples(st.just("save")),
    st.tuples(st.just("load")),
    st.tuples(st.just("zero_grad_in_the_middle")),
)


def perform(job, call):
    """What comes of a call: its result, or the kind of its error."""
    name, *arguments = call
    if name == "mode":
        job.net.train(arguments[0])
        return None
    if name == "freeze":  # the statistics of BatchNorm, by hand
        job.net[1].train(not arguments[0])
        return None
    if name == "rate":
        job.optimizer.param_groups[0]["lr"] = arguments[0]
        return None
    if name == "schedule":
        job.scheduler.gamma = arguments[0]
        return None
    if name in ("save", "zero_grad_in_the_middle", "load"):
        return getattr(job, name)() if name != "load" or hasattr(job, "saved") else None
    if name == "flush":
        return job.flush(*arguments)
    if name in ("predict", "evaluate"):
        return getattr(job, name)(batch(*arguments)[0])
    seed, how = arguments
    try:
        return getattr(job, name)(*spoiled(*batch(seed), how))
    except (RuntimeError, IndexError, BrokenError) as error:
        return type(error).__name__


@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(CALLS, max_size=25),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    accumulate=st.integers(1, 3),
    clip_norm=st.sampled_from([None, 0.3]),
    precision=st.sampled_from(["fp32", "fp16"]),
)
def test_any_sequence_of_calls_is_the_loop_written_by_hand(calls, optimizer, accumulate, clip_norm, precision):
    if precision == "fp32":  # there it would be an update with infinite gradients
        calls = [(*call[:2], None) if call[-1] == "overflow" else call for call in calls]
    ours, hand = (kind(OPTIMIZERS[optimizer], accumulate, clip_norm, precision) for kind in (Wrapped, ByHand))
    streams = [torch.get_rng_state()] * 2
    for i, call in enumerate(calls):
        outcomes, states = [], []
        for k, job in enumerate((ours, hand)):
            torch.set_rng_state(streams[k])
            outcomes.append(perform(job, call))
            states.append(job.state())
            streams[k] = torch.get_rng_state()
        assert differences(*outcomes) == [], (i, call)
        assert differences(*states) == [], (i, call)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0), st.integers(1, 9), st.floats(0.01, 1e6)), min_size=1, max_size=5),
    more=st.integers(0, 3),
    rescale=st.booleans(),
    sizes=st.lists(st.integers(1, 5), min_size=5, max_size=5),
)
def test_a_window_is_the_weighted_mean_of_its_micro_batches(weights, more, rescale, sizes):
    """Whole or cut short; in float64, so that only a wrong formula can differ."""

    def build():
        torch.manual_seed(1)
        return nn.Linear(3, 2).double()

    data = [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in sizes]
    model, mse = build(), nn.MSELoss()
    step = hotloop.optimize(
        model, SGD(model.parameters(), lr=1.0), mse, device="cpu", accumulate=len(weights) + more, exact=True
    ).step
    for (x, y), weight in zip(data, weights, strict=False):
        step(x, y, weight=weight)
    assert step.flush(rescale=rescale) is (more > 0)

    plain, total = build(), sum(weights)
    if total:
        losses = [mse(plain(x), y) * (w / total) for (x, y), w in zip(data, weights, strict=False)]
        share = len(weights) / (len(weights) + more) if more and not rescale else 1.0
        (sum(losses) * share).backward()
        for p in plain.parameters():
            p.data -= p.grad
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-9)


# --- nested batches -----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Sample:
    image: object
    label: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: object


class Own(dict):
    """A mapping of a library's own."""


LEAF = st.one_of(
    st.integers(0, 99).map(lambda seed: torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))),
    st.integers(0, 99).map(lambda seed: torch.randint(9, (2,), generator=torch.Generator().manual_seed(seed))),
    st.sampled_from([None, "text", 3, 2.5, b"raw"]),
)
NAMES = st.lists(st.sampled_from(["a", "b", "label", "loss", "weight"]), unique=True, max_size=3)


def containers(inner):
    items = st.lists(inner, max_size=3)
    named = NAMES.flatmap(
        lambda names: st.tuples(*[inner] * len(names)).map(lambda values: dict(zip(names, values, strict=True)))
    )
    return st.one_of(
        items,
        items.map(tuple),
        items.map(deque),
        named,
        named.map(OrderedDict),
        named.map(UserDict),
        named.map(Own),
        named.map(lambda d: defaultdict(list, d)),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.tuples(inner, inner).map(lambda pair: Sample(*pair)),
        inner.map(Frozen),
    )


NESTED = st.recursive(LEAF, containers, max_leaves=8)


class Nested(nn.Module):
    """Takes whatever it is given, and notes how it is built."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.seen = nn.Linear(3, 2), []

    def forward(self, batch):
        self.seen.append(batch)
        floats = [t for t in leaves(batch) if t.is_floating_point()]
        return sum((self.layer(t).mean() for t in floats), self.layer.weight.sum() * 0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(NESTED, min_size=1, max_size=3), st.booleans())
def test_nested_batches_of_any_shape_train_as_in_a_plain_loop(given_, on_loss):
    """Where everything is on the device already the model is handed the very objects."""
    model, plain = Nested(), Nested()
    its = SGD(plain.parameters(), lr=0.1)
    optimizer = SGD(model.parameters(), lr=0.1)
    step = hotloop.optimize(model, optimizer, lambda output, target: output * 2, device="cpu", exact=True).step
    wrapped = hotloop.optimize(copy.deepcopy(model), device="cpu")
    for each in given_:
        its.zero_grad()
        (plain(each) * 2).backward()
        its.step()
        if on_loss:
            assert torch.equal(wrapped(each), Nested()(each))
        step(each, each)
    assert all(a is b for a, b in zip(model.seen, given_, strict=True))
    assert differences(snapshot(model, optimizer), snapshot(plain, its)) == []


NUMBERS = {
    torch.float64: st.floats(width=64),
    torch.float32: st.floats(width=32),
    torch.float16: st.floats(width=16),
    torch.int64: st.integers(-(2**63), 2**63 - 1),
    torch.int32: st.integers(-(2**31), 2**31 - 1),
    torch.uint8: st.integers(0, 255),
    torch.uint64: st.integers(0, 2**64 - 1),
    torch.bool: st.booleans(),
    torch.complex128: st.complex_numbers(),
}
METRIC = st.sampled_from(list(NUMBERS)).flatmap(
    lambda dtype: st.tuples(st.just(dtype), NUMBERS[dtype], st.sampled_from([(), (1,), (1, 1), None]))
)


@settings(deadline=None)
@example({"self": (torch.float64, 0.5, ())})
@given(st.dictionaries(st.text(min_size=1).filter(lambda s: s not in ("loss", "grad_norm", "weight")), METRIC, max_size=5))
def test_metrics_of_any_kind_come_out_as_they_went_in(named):
    """Tensors of any dtype with one element, and numbers."""
    model = nn.Linear(1, 1)
    step = hotloop.optimize(model, SGD(model.parameters(), lr=0.1), device="cpu", exact=True).step
    given_, expected = {}, {}
    for name, (dtype, value, shape) in named.items():
        tensor = torch.tensor(value, dtype=dtype)
        given_[name] = value if shape is None else tensor.reshape(shape)
        expected[name] = value if shape is None else tensor.item()
    metrics = dict(step(model.weight.sum() * 2, **given_))
    loss = metrics.pop("loss")
    assert type(loss) is float
    assert list(metrics) == list(expected)
    assert differences(metrics, expected) == []
