"""Bad input raises at the door: the text names the argument, the rule and the fix, and nothing has been changed."""

from __future__ import annotations

import copy
import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from hotloop import _facts, optimize


class Scheduler:
    """Moved by epochs, as in other libraries."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        raise AssertionError("not called here")


class Triplet(nn.Module):
    def forward(self, anchor, positive, negative):
        return anchor.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.layer(x))

    def encode(self, x):
        return self.layer(x)


def kit():
    """A model in the middle of its training, with all that belongs to it."""
    net, other = Net(), Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2)
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(2))
    loss_fn(net(torch.randn(5, 4)), torch.zeros(5, dtype=torch.int64)).backward()
    optimizer.step()
    scheduler.step()
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    return SimpleNamespace(
        net=net, optimizer=optimizer, scheduler=scheduler, loss_fn=loss_fn, scaler=torch.amp.GradScaler("cpu"), other=other,
        elsewhere=elsewhere, its_scheduler=StepLR(elsewhere, 2),
    )  # fmt: skip


def tensors(module):
    return {
        name: (id(t), t.device, t.dtype, None if t.is_meta else t.tolist())
        for name, t in module.state_dict(keep_vars=True).items()
    }


def hooks(owner):
    return {name: dict(value) for name, value in vars(owner).items() if "hooks" in name and value}


def everything(k):
    """All that `optimize` could touch, to compare."""
    modules = {}
    for name in ("net", "other", "loss_fn"):
        module = getattr(k, name)
        grads = [(id(p.grad), None if p.grad.is_meta else p.grad.tolist()) for p in module.parameters() if p.grad is not None]
        flags = [m.training for m in module.modules()], [p.requires_grad for p in module.parameters()]
        modules[name] = (type(module), set(vars(module)), tensors(module), grads, flags, [hooks(m) for m in module.modules()])
    optimizers = {}
    for name in ("optimizer", "elsewhere"):
        optimizer = getattr(k, name)
        groups = [{**g, "params": [id(p) for p in g["params"]]} for g in optimizer.param_groups]
        state = {id(p): {key: (id(v), v.tolist()) for key, v in s.items()} for p, s in optimizer.state.items()}
        optimizers[name] = (type(optimizer), set(vars(optimizer)), groups, state, hooks(optimizer))
    others = k.scheduler.state_dict(), k.its_scheduler.state_dict(), k.scaler.state_dict()
    machine = torch.get_rng_state().tolist(), torch.backends.cudnn.benchmark, torch.get_default_dtype()
    return copy.deepcopy((modules, optimizers, others, machine))


# What is wrong in the first three arguments: the call, the error, and what its text holds: the argument, the rule, the fix.
CALLS = {
    "a number for a model": (lambda k: [3], TypeError, r"optimize\(<int>.*must be a torch\.nn\.Module"),
    "a function for a model": (lambda k: [len, k.optimizer], TypeError, r"must be a torch\.nn\.Module"),
    "a class for a model": (lambda k: [Net, k.optimizer], TypeError, r"optimize\(Net.*is a class.*Net\(\.\.\.\)"),
    "a parameter for a model": (
        lambda k: [nn.Parameter(torch.ones(1)), k.optimizer], TypeError, r"bare parameter needs no wrap.*optimizer",
    ),
    "a tensor for a model": (lambda k: [torch.ones(1), k.optimizer], TypeError, r"a bare parameter needs no wrap; optimize the module"),
    "no model": (lambda k: [[], k.optimizer], ValueError, r"optimize\(\[\].*no model.*pass"),
    "a number among models": (lambda k: [[k.net, 3], k.optimizer], TypeError, r"<int>.*torch\.nn\.Module"),
    "a model twice": (lambda k: [[k.net, k.net], k.optimizer], ValueError, r"twice.*once"),
    "a wrapped model": (lambda k: [optimize(k.net), k.optimizer], ValueError, r"wrapped already.*model\.__wrapped__"),
    "a wrapped model alone": (lambda k: [optimize(k.net)], ValueError, r"wrapped already.*model\.__wrapped__"),
    "a wrapped model among models": (lambda k: [[k.other, optimize(k.net)], k.optimizer], ValueError, r"wrapped already"),
    "a loss for an optimizer": (
        lambda k: [k.net, k.loss_fn], TypeError, r"<CrossEntropyLoss>.*second argument.*optimize\(model, optimizer, loss_fn\)",
    ),
    "parameters for an optimizer": (lambda k: [k.net, k.net.parameters()], TypeError, r"<generator>.*second argument"),
    "a scheduler for an optimizer": (lambda k: [k.net, k.scheduler], TypeError, r"<StepLR>.*second argument"),
    "a class for an optimizer": (lambda k: [k.net, torch.optim.SGD], TypeError, r"this is a class; pass SGD"),
    "no optimizer in the list": (
        lambda k: [k.net, []], ValueError, r"optimize\(model, \[\]\).*no optimizer.*optimize\(model\)",
    ),
    "an optimizer of another model": (
        lambda k: [k.net, k.elsewhere], ValueError,
        r"optimize\(model, SGD\).*none of this model's parameters.*make it from this model",
    ),
    "an optimizer of a copy": (
        lambda k: [copy.deepcopy(k.net), k.optimizer], ValueError, r"AdamW.*none of this model's.*copied",
    ),
    "one optimizer of two": (lambda k: [k.net, [k.optimizer, k.elsewhere]], ValueError, r"SGD.*none of this model's"),
    "an optimizer twice": (lambda k: [k.net, [k.optimizer, k.optimizer]], ValueError, r"twice.*once"),
    "a number for a loss_fn": (
        lambda k: [k.net, k.optimizer, 5], TypeError, r"loss_fn=<int>.*loss_fn\(output, target\).*pass a function",
    ),
    "a name for a loss_fn": (lambda k: [k.net, k.optimizer, "mse"], TypeError, r"loss_fn=<str>.*pass a function"),
    "a loss_fn of one": (
        lambda k: [k.net, k.optimizer, lambda output: output.sum()], TypeError,
        r"loss_fn=<function>.*called as loss_fn\(output, target\).*too many positional arguments; write loss_fn=lambda output, target",
    ),
    "a loss_fn of three": (
        lambda k: [k.net, k.optimizer, Triplet()], TypeError, r"loss_fn=<Triplet>.*missing a required argument: 'negative'",
    ),
    "a class for a loss_fn": (
        lambda k: [k.net, k.optimizer, nn.MSELoss], TypeError, r"loss_fn=MSELoss.*is a class.*MSELoss\(\)",
    ),
}  # fmt: skip

# Wishes by name, each with a value that does not fit, the error, and the rest of its text.
WISHES = [
    ("accumulate", 0, ValueError, r"0.*counts micro-batches.*from 1 on"),
    ("accumulate", -1, ValueError, r"-1.*from 1 on"),
    ("accumulate", 1.5, ValueError, r"1\.5.*whole number"),
    ("accumulate", True, ValueError, r"True.*whole number"),
    ("accumulate", None, ValueError, r"None.*whole number"),
    ("clip_norm", -1, ValueError, r"-1.*above zero"),
    ("clip_norm", 0.0, ValueError, r"0\.0.*above zero.*use None"),
    ("clip_norm", float("nan"), ValueError, r"nan.*above zero"),
    ("clip_norm", True, ValueError, r"True.*above zero"),
    ("clip_norm", "1", ValueError, r"'1'.*above zero"),
    ("precision", "half", ValueError, r"'half'.*'auto', 'fp32', 'bf16' or 'fp16'"),
    ("precision", torch.float16, ValueError, r"torch\.float16.*'fp16'"),
    ("precision", None, ValueError, r"None.*'fp32'"),
    ("device", "nonsense", ValueError, r"'nonsense'.*cannot use.*name one that this machine has"),
    ("device", 1.5, ValueError, r"1\.5.*cannot use.*device='auto'"),
    ("device", "xpu:7", ValueError, r"'xpu:7'.*cannot use.*this machine"),
    ("device", False, ValueError, r"False.*cannot use"),
    ("cudnn_benchmark", "yes", ValueError, r"'yes'.*'auto', True or False"),
    ("inference", "off", ValueError, r"'off'.*'no_grad', 'inference_mode' or 'grad'"),
    ("inference", None, ValueError, r"None.*'grad'"),
    ("methods", "encode", TypeError, r"'encode'.*tuple of names.*\('encode',\)"),
    ("methods", ("encode", "nothing"), ValueError, r"\('nothing',\).*no method"),
    ("methods", ("training",), ValueError, r"\('training',\).*no method"),
    ("methods", 5, TypeError, r"5.*tuple of names"),
    ("exact", 1, TypeError, r"1.*True or False"),
    ("keep_output", "yes", TypeError, r"'yes'.*True or False"),
    ("before_update", 5, TypeError, r"<int>.*pass a function"),
    ("scaler", 5, TypeError, r"<int>.*torch\.amp\.GradScaler"),
    ("metrics", len, TypeError, r"<.*>.*\{name: function\(output, target\)\}"),
    ("metrics", {"a": 1}, TypeError, r"<.*>.*\{name: function\(output, target\)\}"),
    ("metrics", {"loss": len}, ValueError, r"\{'loss'.*another name"),
    ("metrics", {"grad_norm": len}, ValueError, r"\{'grad_norm'.*another name"),
    ("scheduler", 0.1, TypeError, r"<float>.*lr_scheduler"),
]

# The same for values that are made of the kit.
KIT_WISHES = {
    "a scheduler of another optimizer": (
        lambda k: {"scheduler": k.its_scheduler}, ValueError, r"scheduler=StepLR.*another optimizer.*make it with",
    ),
    "one scheduler of two": (lambda k: {"scheduler": [k.scheduler, k.its_scheduler]}, ValueError, r"another optimizer"),
    "a scheduler twice": (lambda k: {"scheduler": [k.scheduler, k.scheduler]}, ValueError, r"twice.*once"),
    "a plateau scheduler": (
        lambda k: {"scheduler": ReduceLROnPlateau(k.optimizer)}, TypeError,
        r"ReduceLROnPlateau.*needs a metric.*scheduler\.step\(metric\)",
    ),
    "a scheduler by epochs": (
        lambda k: {"scheduler": Scheduler(k.optimizer)}, TypeError,
        r"scheduler=Scheduler.*does not fit this one: missing a required argument: 'epoch'.*once `metrics\.updated`",
    ),
    "a before_update of the model": (
        lambda k: {"before_update": lambda model: None}, TypeError,
        r"before_update=<function>.*without arguments.*missing a required argument: 'model'.*before_update=lambda: ",
    ),
    "a metric of three": (
        lambda k: {"metrics": {"a": lambda x, output, target: 0}}, TypeError,
        r"metrics=\{'a'.*called as f\(output, target\).*missing a required argument: 'target'",
    ),
    "a scaler with bf16": (
        lambda k: {"scaler": k.scaler, "precision": "bf16"}, ValueError,
        r"precision='bf16', scaler=.*only float16.*precision='fp16'",
    ),
    "a scaler with fp32": (lambda k: {"scaler": k.scaler, "precision": "fp32"}, ValueError, r"scaler=.*leave scaler away"),
}  # fmt: skip


def refused(k, error, text, arguments, wishes):
    before = everything(k)
    with pytest.raises(error, match=f"(?s){text}"):
        optimize(*arguments, **wishes)
    assert everything(k) == before


# With a device that would move the model, a check that comes too late shows.
placed = pytest.mark.parametrize("placed", [{}, {"device": "meta"}], ids=["", "placed"])


@placed
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_raises_and_changes_nothing(name, placed):
    call, error, text = CALLS[name]
    k = kit()
    refused(k, error, text, call(k), placed)


@placed
@pytest.mark.parametrize(("name", "value", "error", "text"), WISHES)
def test_a_bad_wish_raises_and_changes_nothing(name, value, error, text, placed):
    k = kit()
    refused(k, error, f"{name}={text}", [k.net, k.optimizer, k.loss_fn], {**placed, name: value})


@placed
@pytest.mark.parametrize("name", KIT_WISHES)
def test_a_wish_that_does_not_fit_the_rest_raises_and_changes_nothing(name, placed):
    wishes, error, text = KIT_WISHES[name]
    k = kit()
    refused(k, error, text, [k.net, k.optimizer, k.loss_fn], {**placed, **wishes(k)})


def test_the_comparison_shows_a_change():
    """Every assertion above rests on it."""
    k = kit()
    before = everything(k)
    changes = [
        lambda: k.net.layer.weight.data.add_(1),
        lambda: k.optimizer.param_groups[0].update(fused=True),
        lambda: k.optimizer.register_step_post_hook(lambda *_: None),
        lambda: k.scheduler.step(),
        lambda: k.net.eval(),
        lambda: k.net.to("meta"),
    ]
    for change in changes:
        change()
        now = everything(k)
        assert now != before
        before = now


def test_an_optimizer_without_parameters():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"].clear()
    with pytest.raises(ValueError, match=r"optimize\(model, SGD\).*no parameters.*model\.parameters\(\)"):
        optimize(net, optimizer)


@pytest.mark.parametrize("wish", [
    {"accumulate": 2}, {"clip_norm": 1.0}, {"before_update": len}, {"metrics": {"a": len}}, {"keep_output": True},
    {"loss_fn": len}, {"scheduler": object()}, {"scaler": torch.amp.GradScaler("cpu")},
], ids=lambda wish: next(iter(wish)))  # fmt: skip
def test_wishes_for_training_without_an_optimizer(wish):
    (name,) = wish
    with pytest.raises(
        TypeError, match=rf"optimize\(model, {name}=.*without an optimizer.*optimize\(model, optimizer, \.\.\.\)"
    ):
        optimize(Net(), **wish)


def test_several_of_them_are_all_named():
    with pytest.raises(TypeError, match="accumulate, clip_norm"):
        optimize(Net(), accumulate=2, clip_norm=1.0)


UNKNOWN = {
    "clip_norm": ["grad_clip", "max_norm", "max_grad_norm", "gradient_clip_val"],
    "before_update": ["clip_value", "before_updates"],
    "accumulate": ["accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches", "acumulate"],
    "precision": ["amp", "mixed_precision", "dtype", "precison"],
    "scheduler": ["lr_scheduler", "schedulers"],
    "channels_last": ["memory_format", "channel_last"],
    "scaler": ["grad_scaler"],
    "loss_fn": ["criterion", "loss_fun"],
    "compile": ["torch_compile"],
    "cudnn_benchmark": ["benchmark"],
}


@pytest.mark.parametrize(("meant", "given"), [(meant, given) for meant, names in UNKNOWN.items() for given in names])
def test_an_argument_of_another_name_is_told_ours(meant, given):
    k = kit()
    text = rf"optimize\(\.\.\., {given}=\.\.\.\): there is no argument of this name; write {meant}="
    refused(k, TypeError, text, [k.net, k.optimizer, k.loss_fn], {given: 1})
    refused(k, TypeError, text, [k.net], {given: 1})


def test_an_argument_that_nothing_is_like_is_told_all():
    with pytest.raises(TypeError, match=r"xyz=.*it takes optimizer, loss_fn, device, precision, .*tune$"):
        optimize(Net(), xyz=1)


def adds_arguments(function):
    """A decorator that gives a function more than it is called with."""

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args, None)

    return wrapper


class Bare(nn.Module):
    """Its call is its own."""

    def __call__(self, output, target):
        return output.square().mean()


def hooked():
    loss_fn = Triplet()
    loss_fn.register_forward_pre_hook(lambda _, args: (*args, args[-1]))
    return loss_fn


@pytest.mark.parametrize("loss_fn", [
    adds_arguments(lambda output, target, more: output.sum()), Bare(), hooked(), torch.nn.functional.mse_loss, torch.dist,
    functools.partial(lambda scale, output, target: output.sum() * scale, 2.0), nn.MSELoss(),
    lambda *args: args[0].sum(), lambda output, target, weight=None: output.sum(),
])  # fmt: skip
def test_a_loss_fn_that_fits_or_whose_signature_does_not_tell(loss_fn):
    net = Net()
    _, step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_fn)
    assert step(torch.randn(5, 4), torch.zeros(5, 2)).updated


# --- float16, closures, LSTMs -------------------------------------------------------------------------------------------


def test_fp16_parameters_with_fp16():
    """A13."""
    net = Net().half()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"precision='fp16'.*float16 parameters.*unscaled.*model\.float\(\)"):
        optimize(net, optimizer, nn.MSELoss(), precision="fp16")
    assert {p.dtype for p in net.parameters()} == {torch.float16}


@pytest.mark.parametrize("wish", [{"precision": "fp16"}, {"scaler": torch.amp.GradScaler("cpu")}], ids=["asked for", "scaler"])
def test_complex_parameters_with_fp16(wish):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, dtype=torch.complex64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"precision='fp16'.*complex parameters.*write precision='bf16' or 'fp32'"):
        optimize(net, optimizer, nn.MSELoss(), **wish)
    optimize(net[0], optimizer, nn.MSELoss(), **wish)
    net[1].requires_grad_(False)
    optimize(net, optimizer, nn.MSELoss(), **wish)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_parameters_with_fp16_are_fine(dtype):
    """A13."""
    net = Net().to(dtype)
    _, step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss(), precision="fp16")
    assert step.scaler.is_enabled()


def lbfgs(net):
    return torch.optim.LBFGS(net.parameters())


def test_a_closure_with_fp16():
    """O2."""
    net = Net()
    with pytest.raises(ValueError, match=r"precision='fp16'.*closure.*'bf16' or 'fp32'"):
        optimize(net, lbfgs(net), nn.MSELoss(), precision="fp16")


def test_a_closure_with_a_scaler():
    """O2."""
    net = Net()
    with pytest.raises(ValueError, match=r"fp16.*closure"):
        optimize(net, lbfgs(net), nn.MSELoss(), scaler=torch.amp.GradScaler("cpu"))


def test_a_closure_with_accumulation():
    net = Net()
    with pytest.raises(ValueError, match=r"accumulate=2.*closure.*one large batch"):
        optimize(net, lbfgs(net), nn.MSELoss(), accumulate=2)


def test_a_closure_among_several_optimizers():
    net = Net()
    optimizers = [lbfgs(net.layer), torch.optim.SGD(net.norm.parameters(), lr=0.1)]
    for given in (optimizers, optimizers[::-1]):
        with pytest.raises(ValueError, match=r"closure.*its own optimize"):
            optimize(net, given, nn.MSELoss())


@pytest.mark.parametrize("precision", ["bf16", "fp32", "auto"])
def test_a_closure_in_other_precisions(precision):
    net = Net()
    _, step = optimize(net, lbfgs(net), nn.MSELoss(), precision=precision)
    step(torch.randn(5, 4), torch.zeros(5, 2))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.LSTMCell])
def test_16_bits_with_an_lstm_on_a_cpu_without_units(monkeypatch, layer, precision):
    """F-15c: an explicit wish that cannot be met raises at the door."""
    monkeypatch.setattr(_facts, "_cpu_16bit", str)
    with pytest.raises(ValueError, match=rf"precision='{precision}'.*LSTM.*precision='fp32'"):
        optimize(nn.Sequential(layer(2, 2)), precision=precision)


# --- what is welcome ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda o: StepLR(o, 1), lambda o: CosineAnnealingLR(o, 3), lambda o: LambdaLR(o, lambda n: 1.0),
    lambda o: OneCycleLR(o, 1.0, 10), lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 1)], [2]),
    lambda o: ChainedScheduler([LinearLR(o), StepLR(o, 1)], o),
], ids=["StepLR", "CosineAnnealingLR", "LambdaLR", "OneCycleLR", "SequentialLR", "ChainedScheduler"])  # fmt: skip
def test_every_other_scheduler_is_taken(make):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    _, step = optimize(net, optimizer, nn.MSELoss(), scheduler=make(optimizer))
    for _ in range(3):
        step(torch.randn(5, 4), torch.zeros(5, 2))


def test_off_is_a_value():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wishes = {"clip_norm": None, "scheduler": None, "scaler": None, "metrics": None, "before_update": None}
    _, step = optimize(net, optimizer, nn.MSELoss(), cudnn_benchmark=False, methods=(), **wishes)
    assert step.plan["cudnn_benchmark"].choice == "off"


class Methods(Net):
    """What may have a method's name, and is none."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 2)
        self.compiled = torch.compile(self.encode, backend="eager")
        self.set = lambda x: x
        self.others = Net().forward

    def encode(self, x):
        return x

    def stream(self, x):
        yield x

    async def ask(self, x):
        return x

    async def listen(self, x):
        yield x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return x


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("encoder", r"encoder is a submodule.*write `def encoder\(self, \.\.\.\)` in class Methods"),
        ("compiled", r"compiled is a function.*write `def compiled"),
        ("set", "set is a function"),
        ("others", "others is a method"),
        ("static", "static is a static method"),
        ("of_class", "of_class is a class method"),
        ("stream", "stream is a generator or an async function.*write it as a function outside"),
        ("ask", "ask is a generator or an async"),
        ("listen", "listen is a generator or an async"),
    ],
)
def test_names_of_what_cannot_be_called_as_forward_is(name, text):
    with pytest.raises(ValueError, match=rf"optimize\(\.\.\., methods=\('{name}',\)\): {text}"):
        optimize(Methods(), methods=("encode", name))
    assert optimize(Methods(), methods=("encode",)).encode(torch.ones(1)).item() == 1


def test_methods_none_is_off():
    assert optimize(Net(), methods=None)(torch.randn(5, 4)).shape == (5, 2)


def test_the_defaults_spelled_out_are_welcome_without_an_optimizer():
    model = optimize(Net(), None, None, accumulate=1, clip_norm=None, keep_output=False, metrics=None)
    assert model(torch.randn(5, 4)).shape == (5, 2)


def test_a_method_of_one_of_several_models_may_be_something_else_of_another():
    class Encoder(nn.Linear):
        def encode(self, x):
            return self(x)

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(2, 2)

        def forward(self, x):
            return self.encode(x)

    one, other = Encoder(2, 2), Wrapper()
    (one, other), _ = optimize(
        [one, other], torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1), methods=("encode",)
    )
    assert one.encode(torch.ones(1, 2)).shape == other.encode(torch.ones(1, 2)).shape == (1, 2)


def test_what_somebody_says_of_a_signature_is_not_taken_for_it():
    def loss_fn(*args):
        return (args[0] - args[1]).square().mean()

    loss_fn.__signature__ = inspect.Signature()
    model = nn.Linear(2, 2)
    step = optimize(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn).step
    assert step(torch.ones(1, 2), torch.ones(1, 2)).updated
