"""The ways to call a step, and the texts for calls that are none of them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import hotloop
from parity.twins import differences, snapshot
from parity.untouched import refused

# What is compared with runs on the CPU, also where there is an accelerator.
optimize = partial(hotloop.optimize, device="cpu")


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch():
    return torch.randn(5, 4), torch.randint(2, (5,))


def made(loss_fn=None, model=None, **options):
    model = net() if model is None else model
    return optimize(model, SGD(model.parameters(), lr=0.1, momentum=0.9), loss_fn, **options)


class Masked(nn.Module):
    """Several arguments, of which one has a default."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, image, mask, scale=1.0):
        return self.layer(image * mask) * scale


@dataclass
class Output:
    loss: Any
    logits: Any = None


Pair = namedtuple("Pair", "x y")
Own = namedtuple("Own", "logits loss")


class OwnLoss(nn.Module):
    """Returns its own loss, in the form that it is told."""

    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(4, 2), form

    def forward(self, x, y=None):
        logits = self.layer(x)
        return self.form(logits, F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long) if y is None else y))


def trained_by(call, make, rounds=3):
    """The weights after some calls of a step, and the metrics of the last one."""
    torch.manual_seed(1)
    model, step = make()
    for _ in range(rounds):
        metrics = call(step, model)
    return snapshot(model), dict(metrics)


# --- batches ----------------------------------------------------------------------------------------------------------

WITH_LOSS_FN = {
    "x, y": lambda step, x, y: step(x, y),
    "a tuple": lambda step, x, y: step((x, y)),
    "a list": lambda step, x, y: step([x, y]),
    "a named tuple": lambda step, x, y: step(Pair(x, y)),
}


@pytest.mark.parametrize("form", WITH_LOSS_FN)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_is_the_step_of_its_loss(form, precision):
    """The law: `step(x, y)` is exactly `step(loss_fn(model(x), y))`."""
    loss_fn = nn.CrossEntropyLoss()
    make = partial(made, loss_fn, precision=precision, clip_norm=0.5)
    x, y = batch()
    by_batch = trained_by(lambda step, model: WITH_LOSS_FN[form](step, x, y), make)
    by_loss = trained_by(lambda step, model: step(loss_fn(model(x), y)), make)
    assert differences(by_batch, by_loss) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_law_holds_for_losses_that_autocast_would_round(precision):
    loss_fn = lambda output, y: output.exp().mean() + output.softmax(1)[:, 0].sum()  # noqa: E731
    x, y = batch()
    by_batch = trained_by(lambda step, model: step(x, y), partial(made, loss_fn, precision=precision))
    by_loss = trained_by(lambda step, model: step(loss_fn(model(x), y)), partial(made, loss_fn, precision=precision))
    assert differences(by_batch, by_loss) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda step, x, m, y: step(x, m, y),
        lambda step, x, m, y: step((x, m, y)),
        lambda step, x, m, y: step(x, y, mask=m),
        lambda step, x, m, y: step(x, m, y, scale=1.0),
    ],
    ids=["positional", "tuple", "keyword", "both"],
)
def test_the_last_positional_argument_is_the_target(call):
    (x, y), mask = batch(), torch.rand(5, 4)
    loss_fn = nn.CrossEntropyLoss()
    make = lambda: made(loss_fn, Masked())  # noqa: E731
    expected = trained_by(lambda step, model: step(loss_fn(model(x, mask), y)), make)
    assert differences(trained_by(lambda step, model: call(step, x, mask, y), make), expected) == []


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_a_mapping_is_the_keywords_of_the_model_and_the_target_of_the_loss(kind):
    x, y = batch()
    given = kind(image=x, mask=torch.rand(5, 4))
    seen = []

    def loss_fn(output, target):
        seen.append(target)
        return F.cross_entropy(output, y) + target["mask"].sum() * 0

    expected = trained_by(lambda step, model: step(loss_fn(model(**given), given)), lambda: made(loss_fn, Masked()))
    assert differences(trained_by(lambda step, model: step(given), lambda: made(loss_fn, Masked())), expected) == []
    assert {type(target) for target in seen} == {kind}


def test_keywords_beside_a_mapping():
    x, y = batch()
    loss_fn = lambda output, target: F.cross_entropy(output, y)  # noqa: E731
    expected = trained_by(lambda step, model: step(loss_fn(model(x, x, 2.0), None)), lambda: made(loss_fn, Masked()))
    by_batch = trained_by(lambda step, model: step({"image": x, "mask": x}, scale=2.0), lambda: made(loss_fn, Masked()))
    assert differences(by_batch, expected) == []


FORMS = {
    "a scalar": lambda logits, loss: loss,
    "a tensor of one element": lambda logits, loss: loss.reshape(1),
    "output.loss": lambda logits, loss: Output(loss, logits),
    "a named tuple with .loss": lambda logits, loss: Own(logits, loss),
    "output['loss']": lambda logits, loss: {"logits": logits, "loss": loss},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "call",
    [
        lambda step, x, y: step(x, y),
        lambda step, x, y: step((x, y)),
        lambda step, x, y: step({"x": x, "y": y}),
        lambda step, x, y: step(x=x, y=y),
        lambda step, x, y: step(x, y=y),
        lambda step, x, y: step({"x": x}, y=y),
    ],
    ids=["positional", "tuple", "mapping", "keywords", "mixed", "mapping and keyword"],
)
def test_a_model_that_returns_its_own_loss(form, call):
    x, y = batch()
    make = lambda: made(model=OwnLoss(FORMS[form]))  # noqa: E731
    expected = trained_by(lambda step, model: step(F.cross_entropy(model.layer(x), y)), make)
    assert differences(trained_by(lambda step, model: call(step, x, y), make), expected) == []


@pytest.mark.parametrize("lone", [lambda x: x, lambda x: (x,), lambda x: [x]], ids=["tensor", "tuple", "list"])
def test_a_lone_tensor_without_a_graph_is_a_batch(lone):
    x, _ = batch()
    make = lambda: made(model=OwnLoss(FORMS["a scalar"]))  # noqa: E731
    expected = trained_by(lambda step, model: step(model(x)), make)
    assert differences(trained_by(lambda step, model: step(lone(x)), make), expected) == []


def test_a_named_tuple_as_a_batch_is_unpacked():
    x, y = batch()
    step = made(nn.CrossEntropyLoss()).step
    assert step(Pair(x, y))["loss"] > 0


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("loss_fn", [None, nn.CrossEntropyLoss()], ids=["no loss_fn", "loss_fn"])
def test_a_lone_tensor_with_a_graph_is_a_loss(shape, loss_fn):
    """With a `loss_fn` too, and whatever its shape."""
    x, y = batch()
    expected = trained_by(lambda step, model: step(x, y), partial(made, nn.CrossEntropyLoss()))
    by_loss = trained_by(lambda step, model: step(F.cross_entropy(model(x), y).reshape(shape)), partial(made, loss_fn))
    assert differences(by_loss, expected) == []


def test_a_loss_may_be_a_parameter():
    """What the metrics hold is its value before the update."""
    scale, model = nn.Parameter(torch.tensor(3.0)), net()
    step = optimize(model, SGD([*model.parameters(), scale], lr=0.5)).step
    assert dict(step(scale, scale=scale.detach())) == {"loss": 3.0, "scale": 3.0}
    assert scale.item() == 2.5


@pytest.mark.parametrize(
    "form",
    [
        lambda loss, **named: (loss, named),
        lambda loss, **named: {"loss": loss, **named},
        lambda loss, **named: {**named, "loss": loss},
    ],
    ids=["pair", "dict", "dict, loss last"],
)
def test_what_a_loss_function_returns(form):
    """The named scalars are metrics: tensors of one element, with a graph or without, and numbers."""
    x, y = batch()

    def loss_fn(output, target):
        hits = (output.argmax(1) == target).sum()
        return form(F.cross_entropy(output, target), hits=hits, top1=output[:1, 0].abs(), n=5, good=True, z=1 + 2j)

    model, step = made(loss_fn)
    output = model(x)
    metrics = step(x, y)
    assert next(iter(metrics)) == "loss"
    assert dict(metrics) == {
        "loss": F.cross_entropy(output, y).item(),
        "hits": (output.argmax(1) == y).sum().item(),
        "top1": output[0, 0].abs().item(),
        "n": 5,
        "good": True,
        "z": 1 + 2j,
    }


def test_named_scalars_of_a_loss_of_the_users_own():
    x, y = batch()
    model, step = made()
    loss = F.cross_entropy(model(x), y)
    metrics = step(loss, accuracy=torch.tensor([0.5]), entropy=loss * 2, n=3)
    assert dict(metrics) == {"loss": loss.item(), "accuracy": 0.5, "entropy": loss.item() * 2, "n": 3}


@pytest.mark.parametrize("number", [10**400, -(10**400)], ids=["large", "negative"])
@pytest.mark.parametrize("way", ["own", "metrics"])
def test_a_metric_that_no_float_can_hold_is_refused(number, way):
    model, step = made(F.cross_entropy, metrics={"n": lambda *_: number} if way == "metrics" else None)
    x, y = batch()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"step\(.*: the metric 'n' is an integer that no float can hold; .*logarithm"):
        step(F.cross_entropy(model(x), y), n=number) if way == "own" else step(x, y)
    assert differences(before, snapshot(model)) == []
    assert step.updates == 0
    step(F.cross_entropy(model(x), y), n=10**300)
    assert step.mean()["n"] == 1e300


def test_metrics_functions():
    """Called on the detached output, without a graph; one of them may return several."""
    x, y = batch()
    seen = []

    def accuracy(output, target):
        seen.append((output.requires_grad, torch.is_grad_enabled(), target is y))
        return (output.argmax(1) == target).float().mean()

    def two(output, target):
        return {"a": output.sum(), "b": 2}

    model, step = made(nn.CrossEntropyLoss(), metrics={"accuracy": accuracy, "two": two, "n": lambda output, y: len(y)})
    output = model(x).detach()
    assert dict(step(x, y)) == {
        "loss": F.cross_entropy(output, y).item(),
        "accuracy": (output.argmax(1) == y).float().mean().item(),
        "a": output.sum().item(),
        "b": 2,
        "n": 5,
    }
    assert seen == [(False, False, True)]


@pytest.mark.parametrize("form", FORMS)
def test_the_output_is_kept_on_demand(form):
    x, y = batch()
    model, step = made(model=OwnLoss(FORMS[form]), keep_output=True)
    logits = model.layer(x).detach()
    kept = step(x, y).output
    found = list(hotloop._tree.leaves(kept))
    assert not any(t.requires_grad for t in found)
    if "scalar" not in form and "one element" not in form:
        assert any(torch.equal(t, logits) for t in found)


def test_the_output_is_kept_in_float32():
    x, y = batch()
    metrics = made(nn.CrossEntropyLoss(), precision="bf16", keep_output=True).step(x, y)
    assert metrics.output.dtype is torch.float32
    assert not metrics.output.requires_grad


# --- what is refused --------------------------------------------------------------------------------------------------

ANY = nn.CrossEntropyLoss()
X, Y = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 0, 1, 1])


def returning(value):
    """A loss function with this result; `value` may be computed from the output."""
    return lambda output, target: value(output) if callable(value) else value


LOSS_FN_RESULTS = {
    "not scalar": (lambda o: o.sum(1), ValueError, r"step\(<tensor \(5, 4\)>, <.*the loss has shape \(5,\).*\.mean\(\)"),
    "empty": (lambda o: o[:0], ValueError, r"the loss has shape \(0, 2\)"),
    "detached": (lambda o: o.detach().sum(), RuntimeError, r"does not require grad.*detached"),
    "argmax": (lambda o: o.argmax(), RuntimeError, r"does not require grad.*argmax"),
    "None": (None, TypeError, r"loss_fn returned <NoneType>.*`return` missing"),
    "a float": (0.5, TypeError, r"loss_fn returned <float>.*\.item\(\)"),
    "complex": (lambda o: o.sum() * (1 + 1j), ValueError, r"the loss is complex.*\.abs\(\)"),
    "dict without loss": (lambda o: {"a": o.sum()}, TypeError, r"'a'.*without 'loss'.*sum\(losses\.values\(\)\), \*\*losses"),
    "dict with loss None": (lambda o: {"loss": None}, TypeError, r"the loss is <NoneType>"),
    "loss and number": (lambda o: (o.sum(), 7), TypeError, r"\(<tensor \(\)>, <int>\).*return loss, \{'name': value\}"),
    "three": (lambda o: (o.sum(), {}, {}), TypeError, r"\(scalar, \{name: scalar\}\)"),
    "a list": (lambda o: [o.sum()], TypeError, r"loss_fn returned <list>"),
    "vector metric": (lambda o: (o.sum(), {"acc": o[0]}), ValueError, r"'acc' has shape \(2,\).*\.mean\(\).*keep_output=True"),
    "text metric": (lambda o: (o.sum(), {"acc": "high"}), ValueError, r"'acc' is <str>"),
    "None metric": (lambda o: (o.sum(), {"acc": None}), ValueError, r"'acc' is <NoneType>"),
    "meta metric": (lambda o: (o.sum(), {"acc": o.sum().to("meta")}), ValueError, r"'acc' is on the meta device"),
    "metric named grad_norm": (lambda o: (o.sum(), {"grad_norm": 1.0}), ValueError, r"'grad_norm' is the step's own"),
    "metric named loss": (lambda o: (o.sum(), {"loss": 1.0}), ValueError, r"'loss' is the step's own"),
}  # fmt: skip


def opened(loss_fn=None, model=None, **options):
    """A step in the middle of a window, with momentum and gradients to lose."""
    model, step = made(loss_fn, model, accumulate=3, **options)
    for _ in range(4):
        step(sum(p.square().sum() for p in model.parameters()))
    assert step.state_dict()["window"]["gradients"]
    return model, step


@pytest.mark.parametrize(("result", "kind", "text"), LOSS_FN_RESULTS.values(), ids=LOSS_FN_RESULTS)
def test_what_a_loss_function_must_not_return(result, kind, text):
    _, step = opened(returning(result))
    with refused(step, kind, text):
        step(X, Y)


METRICS = {
    "vector": (lambda o, y: o[0], ValueError, r"'acc' has shape \(2,\)"),
    "text": (lambda o, y: "high", ValueError, r"'acc' is <str>"),
    "nested": (lambda o, y: {"a": {"b": 1}}, ValueError, r"'a' is <dict>"),
    "taken by loss_fn": (lambda o, y: {"hits": 1}, ValueError, r"already a metric 'hits'|a metric 'hits' already"),
    "the step's own": (lambda o, y: {"loss": 1}, ValueError, r"'loss' is the step's own metric"),
    "an error of its own": (lambda o, y: 1 // 0, ZeroDivisionError, "division"),
}


@pytest.mark.parametrize(("metric", "kind", "text"), METRICS.values(), ids=METRICS)
def test_what_a_metrics_function_must_not_return(metric, kind, text):
    _, step = opened(returning(lambda o: (o.sum(), {"hits": 3})), metrics={"acc": metric})
    with refused(step, kind, text):
        step(X, Y)


def own(value):
    return OwnLoss(lambda logits, loss: value(logits, loss))


MODEL_RESULTS = {
    "tuple": (lambda o, loss: (o, loss), TypeError, r"tuple of 2.*`logits, loss = model\(x, y\); step\(loss\)`.*loss_fn"),
    "list": (lambda o, loss: [o], TypeError, r"returned a list of 1"),
    "dict of losses": (lambda o, loss: {"a": loss, "b": loss}, TypeError, r"'a', 'b'.*step\(sum\(losses\.values"),
    "None": (lambda o, loss: None, TypeError, r"returned <NoneType>.*pass loss_fn to optimize"),
    "logits": (lambda o, loss: o, ValueError, r"no loss_fn, a tensor of shape \(5, 2\).*pass loss_fn"),
    "object without": (lambda o, loss: Output(None, o), TypeError, r"returned <Output>"),
    "detached": (lambda o, loss: loss.detach(), RuntimeError, r"does not require grad"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "kind", "text"), MODEL_RESULTS.values(), ids=MODEL_RESULTS)
def test_what_a_model_without_loss_fn_must_not_return(form, kind, text):
    _, step = opened(model=OwnLoss(form))
    with refused(step, kind, text):
        step(X, Y)


def frozen():
    return net().requires_grad_(False)


WRITTEN = r"step\(<tensor \(5, 4\)>, <tensor \(5, 4\)>, <tensor \(5,\)>\)"
CALLS = {
    "no batch": (ANY, lambda s, m: s(), TypeError, r"step\(\): there is no batch; write step\(x, y\)"),
    "no batch, own loss": (None, lambda s, m: s(), TypeError, r"step\(\): there is no batch"),
    "an empty batch": (ANY, lambda s, m: s(()), TypeError, r"step"),
    "None": (ANY, lambda s, m: s(None), TypeError, r"last argument is the target.*write step\(x, y\)"),
    "no target": (ANY, lambda s, m: s(X), TypeError, r"last argument is the target"),
    "no target, keywords": (ANY, lambda s, m: s(input=X), TypeError, r"last argument is the target"),
    "vector loss": (None, lambda s, m: s(m(X).sum(1)), ValueError, r"step\(<tensor \(5,\)>\): the loss has shape \(5,\)"),
    "detached loss": (None, lambda s, m: s(m(X).sum().detach()), RuntimeError, r"does not require grad.*detached"),
    "detached loss, loss_fn": (ANY, lambda s, m: s(m(X).sum().detach()), RuntimeError, r"does not require grad"),
    "detached (1,) loss": (ANY, lambda s, m: s(m(X).sum()[None].detach()), TypeError, r"must carry a graph"),
    "complex loss": (None, lambda s, m: s(m(X).sum() * 1j), ValueError, r"complex"),
    "argmax loss": (None, lambda s, m: s(m(X).argmax()), RuntimeError, r"argmax"),
    "vector metric": (None, lambda s, m: s(m(X).sum(), acc=X), ValueError, r"acc=<tensor \(5, 4\)>\): the metric 'acc'"),
    "metric named loss": (None, lambda s, m: s(m(X).sum(), loss=1.0), ValueError, r"'loss' is the step's own"),
    "metric named grad_norm": (None, lambda s, m: s(m(X).sum(), grad_norm=1.0), ValueError, r"'grad_norm' is the step's own"),
    "text metric": (None, lambda s, m: s(m(X).sum(), acc="high"), ValueError, r"'acc' is <str>"),
    "weight -1": (None, lambda s, m: s(m(X).sum(), weight=-1), ValueError, r"weight=-1\).*not negative.*number of samples"),
    "weight nan": (None, lambda s, m: s(m(X).sum(), weight=float("nan")), ValueError, r"weight=nan"),
    "weight inf": (None, lambda s, m: s(m(X).sum(), weight=float("inf")), ValueError, r"weight=inf"),
    "weight text": (ANY, lambda s, m: s(X, Y, weight="3"), ValueError, r"weight='3'"),
    "weight True": (ANY, lambda s, m: s(X, Y, weight=True), ValueError, r"weight=True"),
    "weight tensor": (None, lambda s, m: s(m(X).sum(), weight=X.sum()), TypeError, r"weight=<tensor>.*len\(x\).*another name"),
    "losses, not a batch": (None, lambda s, m: s({"a": m(X).sum(), "b": m(X).sum()}), TypeError, r"\{'a', 'b'\}.*step\(sum\("),
    "an output with loss": (None, lambda s, m: s({"loss": m(X).sum()}), TypeError, r"write step\(outputs\.loss\)"),
    "too many": (ANY, lambda s, m: s(X, X, Y), TypeError, WRITTEN + r".*forward takes \(input\)"),
    "unknown keyword": (ANY, lambda s, m: s(X, Y, mask=X), TypeError, r"mask=.*forward takes \(input\)"),
    "backward of a vector": (None, lambda s, m: s.backward(m(X).sum(1)), ValueError, r"backward\(<tensor \(5,\)>\): .*shape"),
    "backward of a detached": (None, lambda s, m: s.backward(m(X).sum().detach()), RuntimeError, r"does not require grad"),
    "backward of None": (None, lambda s, m: s.backward(None), TypeError, r"step\.backward\(<NoneType>\): the loss is"),
}  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "call", "kind", "text"), CALLS.values(), ids=CALLS)
def test_calls_that_are_refused(loss_fn, call, kind, text):
    model, step = opened(loss_fn)
    with refused(step, kind, text):
        call(step, model)


def test_a_mapping_whose_keys_forward_does_not_take():
    """The text lists what forward takes, and how to pass the batch."""
    _, step = opened(ANY, Masked())
    with refused(
        step, TypeError, r"forward takes \(image, mask, scale\), not 'label'; write step\(batch\['image'\], batch\['mask'\]\)"
    ):
        step({"image": X, "mask": X, "label": Y})


def test_a_type_error_of_the_models_own_stays_as_it_is():
    class Broken(nn.Linear):
        def forward(self, x):
            return len(3)

    _, step = opened(ANY, Broken(4, 2))
    with refused(step, TypeError, r"^object of type 'int' has no len\(\)$"):
        step(X, Y)


@pytest.mark.parametrize("call", [lambda s, m: s(X, Y), lambda s, m: s(m(X).sum())], ids=["batch", "loss"])
def test_every_parameter_is_frozen(call):
    """A12"""
    model = net()
    model, step = made(ANY, model)
    model.requires_grad_(False)
    with refused(step, RuntimeError, r"does not require grad.*every parameter frozen"):
        call(step, model)


def test_a_loss_from_an_eval_mode_call_names_the_ways_out():
    """N12, A11: such a call keeps no graph."""
    model, step = opened(ANY)
    model.eval()
    with refused(step, RuntimeError, r"eval mode.*model\.train\(\).*step\(x, y\).*inference='grad'"):
        step(model(X).sum())


@pytest.mark.parametrize(
    "call",
    [
        lambda step, x, y, loss: step(x, y),
        lambda step, x, y, loss: step(loss),
        lambda step, x, y, loss: step.backward(loss),
        lambda step, x, y, loss: step.flush(),
    ],
    ids=["batch", "loss", "backward", "flush"],
)
def test_inside_inference_mode(call):
    """Gradients cannot be enabled there, and state made there cannot be trained later: the text names `no_grad`."""
    model, step = opened(ANY)
    loss = model(X).sum()
    with torch.inference_mode():
        with refused(step, RuntimeError, r"inference_mode.*no_grad"):
            call(step, X, Y, loss)


def test_several_models_cannot_take_a_batch():
    models = [net(), net()]
    models, step = optimize(models, SGD([p for m in models for p in m.parameters()], lr=0.1), ANY, accumulate=2)
    step(models[0](X).sum() + models[1](X).sum())
    with refused(step, TypeError, r"several models.*write step\(loss\)"):
        step(X, Y)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda step, loss: step(loss), r"step\(<tensor \(\)>\) with LBFGS.*write step\(x, y\)"),
        (lambda step, loss: step.backward(loss), r"LBFGS"),
    ],
    ids=["loss", "backward"],
)
def test_an_optimizer_with_a_closure_cannot_take_a_ready_loss(call, text):
    model = net()
    model, step = optimize(model, torch.optim.LBFGS(model.parameters(), max_iter=2), ANY)
    step(X, Y)
    with refused(step, TypeError, text):
        call(step, model(X).sum())


def test_two_losses_that_share_a_graph():
    model, step = made(accumulate=3)
    hidden = model(X).exp()
    step.backward(hidden.sum())
    with pytest.raises(RuntimeError, match=r"a second time[^$]*step\.backward\(loss, retain_graph=True\)[^$]*step\(a \+ b\)"):
        step(hidden.mean())
    hidden = model(X).exp()
    step.backward(hidden.sum(), retain_graph=True)
    assert step(hidden.mean())["loss"] > 0


def test_an_error_of_torch_in_the_backward_is_torchs_own():
    """A29"""

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("own words")

    model, step = made()
    with pytest.raises(RuntimeError, match=r"^own words$"):
        step(Bad.apply(model(X)).sum())
