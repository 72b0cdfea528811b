"""A call of the wrapped model: what it moves, under which autocast and gradient mode it runs, and what it returns."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop import fast_eval, optimize
from hotloop._tree import leaves
from observing import Operators

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = list(DTYPES)
X, Y = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 1, 0, 1])


@dataclasses.dataclass
class Seen:
    """What a forward saw."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    grad: bool
    inference: bool
    output: torch.dtype


class Probe(nn.Module):
    """A linear layer that writes down how its forward is run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: list[Seen] = []

    def forward(self, x, *args, **kwargs):
        output = self.layer(x)
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.seen.append(Seen((x, *args), kwargs, autocast, *modes, output.dtype))
        return output

    def encode(self, x):
        return self.forward(x)


class Returns(nn.Module):
    """Returns what it is told to make of its 16-bit activation."""

    def __init__(self, make=lambda h: h) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 2), make

    def forward(self, x):
        return self.make(self.layer(x))


def wrapped(module=None, **wishes):
    module = Probe() if module is None else module
    return optimize(module, **wishes), module


def training(module, loss_fn=F.cross_entropy, **wishes):
    return optimize(module, torch.optim.SGD(module.parameters(), lr=0.1), loss_fn, **wishes)


# --- the table ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("grad", [True, False])
def test_in_training_mode(precision, grad):
    """M15: autocast on, gradients as the caller set them, float32 out with its graph."""
    model, raw = wrapped(precision=precision)
    with torch.set_grad_enabled(grad):
        output = model(X)
    seen = raw.seen[0]
    assert seen.autocast == (None if precision == "fp32" else DTYPES[precision])
    assert seen.output == DTYPES[precision]
    assert seen.grad is grad
    assert output.dtype == torch.float32
    assert output.requires_grad is grad


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", ["no_grad", "inference_mode", "grad"])
def test_in_eval_mode(precision, grad, inference):
    """A26, A27: autocast on, gradients off unless `inference="grad"`, float32 out, so that `.numpy()` works."""
    model, raw = wrapped(precision=precision, inference=inference)
    model.eval()
    with torch.set_grad_enabled(grad):
        output = model(X)
    seen, keeps = raw.seen[0], grad and inference == "grad"
    assert seen.autocast == (None if precision == "fp32" else DTYPES[precision])
    assert seen.output == DTYPES[precision]
    assert seen.grad is keeps
    assert seen.inference is (inference == "inference_mode")
    assert output.dtype == torch.float32
    assert output.requires_grad is keeps
    if not keeps:
        assert output.numpy().shape == (5, 2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_inside_a_step(precision, grad, mode):
    """N22: gradients are on in both modes, and the step leaves the mode as it is; so the weights train in eval mode, too."""
    raw = Probe()
    outputs = []

    def loss_fn(output, target):
        outputs.append((output.dtype, output.requires_grad, torch.is_autocast_enabled("cpu")))
        return F.cross_entropy(output, target)

    model, step = training(raw, loss_fn, precision=precision)
    model.train(mode)
    before = raw.layer.weight.detach().clone()
    with torch.set_grad_enabled(grad):
        step(X, Y)
        assert torch.is_grad_enabled() is grad
    seen = raw.seen[0]
    assert seen.autocast == (None if precision == "fp32" else DTYPES[precision])
    assert seen.grad is True
    assert outputs == [(torch.float32, True, False)]
    assert raw.training is mode
    assert not torch.equal(raw.layer.weight, before)


@pytest.mark.parametrize("who", ["both", "the child alone"])
def test_inside_a_step_a_wrapped_child_keeps_its_graph(who):
    """F-6c: a wrapped part of the model that is trained must not be cut off without a word."""
    backbone = nn.Linear(4, 4)
    child = optimize(backbone)
    model, step = training(nn.Sequential(child, nn.Linear(4, 2)))
    (model if who == "both" else child).eval()
    before = backbone.weight.detach().clone()
    step(X, Y)
    assert not torch.equal(backbone.weight, before)
    assert not child.eval()(X).requires_grad


def test_after_a_step_an_eval_call_keeps_no_graph():
    model, step = training(Probe())
    step(X, Y)
    assert not model.eval()(X).requires_grad


def test_after_a_step_that_raised_an_eval_call_keeps_no_graph():
    model, step = training(Probe())
    with pytest.raises(RuntimeError):
        step(torch.zeros(5, 3), Y)
    assert not model.eval()(X).requires_grad


@pytest.mark.parametrize("place", ["argument", "keyword", "nested"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_eval_mode_an_input_that_requires_grad_keeps_the_graph(precision, place):
    """N7, N12, N13: saliency maps, residuals of equations and attributions work on a wrapped model."""
    model, _ = wrapped(precision=precision)
    model.eval()
    x = X.clone().requires_grad_()
    call = {"argument": lambda: model(x), "keyword": lambda: model(x=x), "nested": lambda: model(X, {"more": [x]})}
    output = call[place]()
    assert output.requires_grad
    if place != "nested":
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert gradient.shape == X.shape


class Graph:
    """A batch that takes itself to a device, as those of graph libraries do."""

    def __init__(self, x):
        self.stores = [{"x": x}]

    def to(self, device):
        return Graph(self.stores[0]["x"].to(device))


@pytest.mark.parametrize("grad", [True, False])
def test_in_eval_mode_an_input_inside_an_object_counts_as_well(grad):
    class Energy(Probe):
        def forward(self, graph):
            return super().forward(graph.stores[0]["x"])

    model, _ = wrapped(Energy())
    x = X.clone().requires_grad_(grad)
    assert model.eval()(Graph(x)).requires_grad is grad


def test_gradients_of_the_plain_module_are_its_own_affair():
    """N13."""
    model, raw = wrapped()
    model.eval()
    x = X.clone().requires_grad_()
    assert torch.autograd.grad(raw(x).sum(), x)[0].shape == X.shape
    assert raw(X).requires_grad


def test_a_loss_built_on_an_eval_call_says_what_to_do():
    """N12: there is no graph, and the text names the way out."""
    model, step = training(Probe())
    model.eval()
    with pytest.raises(RuntimeError, match=r"does not require grad.*eval mode.*model\.train\(\).*inference='grad'"):
        step(F.cross_entropy(model(X), Y))


def test_in_eval_mode_under_a_callers_no_grad_an_input_that_requires_grad_gives_no_graph():
    model, _ = wrapped()
    with torch.no_grad():
        assert not model.eval()(X.clone().requires_grad_()).requires_grad


def test_a_parameter_that_is_returned_in_eval_mode_is_detached():
    model, raw = wrapped(Returns(lambda h: h))
    raw.forward = lambda x: (raw.layer.weight, x)
    weight, x = model.eval()(X)
    assert not weight.requires_grad
    assert x is X
    assert model.train()(X)[0] is raw.layer.weight


def test_in_eval_mode_the_output_can_be_trained_on():
    """N3 to N5: what an eval call returns, or keeps, is no inference tensor."""

    class Caches(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "cache"):
                self.register_buffer("cache", self.weight.new_ones(2) * 2)
            return super().forward(x) * self.cache

    model, raw = wrapped(Caches(4, 2))
    features = model.eval()(X)
    head = nn.Linear(2, 2)
    head(features).sum().backward()
    assert head.weight.grad is not None
    model.train()(X).sum().backward()
    assert raw.weight.grad is not None


def test_inference_mode_on_wish():
    model, _ = wrapped(inference="inference_mode")
    assert model.eval()(X).is_inference()
    assert not model.train()(X).is_inference()


def test_inference_mode_of_the_caller_is_fine():
    model, _ = wrapped(precision="bf16")
    with torch.inference_mode():
        assert model.eval()(X).dtype == model.train()(X).dtype == torch.float32


@pytest.mark.parametrize("inference", ["no_grad", "inference_mode", "grad"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_call_that_raises_leaves_no_mode_behind(mode, inference):
    model, _ = wrapped(precision="bf16", inference=inference)
    model.train(mode)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(5, 3))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert model.training is mode


# --- outputs ------------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a n")


@dataclasses.dataclass
class Output:
    a: Tensor
    n: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Tensor
    n: int = 3


class ModelOutput(OrderedDict):
    """Like the outputs of language model libraries: a dict whose items are attributes as well."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


MAKES = {
    "tensor": lambda h: h,
    "tuple": lambda h: (h, 3),
    "list": lambda h: [h, [h]],
    "dict": lambda h: {"a": h, "n": 3},
    "dict with other keys": lambda h: {0: h, (1, "b"): h},
    "OrderedDict": lambda h: OrderedDict(a=h),
    "namedtuple": lambda h: Pair(h, 3),
    "dataclass": lambda h: Output(h),
    "frozen dataclass": lambda h: Frozen(h),
    "deep": lambda h: {"a": [h, (h, {"b": Pair(h, None)})], "text": "t", "none": None},
    "deque": lambda h: deque([h, h], maxlen=3),
    "defaultdict": lambda h: defaultdict(list, a=h),
    "UserDict": lambda h: UserDict(a=h),
    "ModelOutput": lambda h: ModelOutput(a=h),
}


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", MAKES)
def test_outputs_are_float32_at_any_depth_in_containers_of_the_same_type(kind, precision, mode):
    """M15."""
    model, raw = wrapped(Returns(MAKES[kind]), precision=precision)
    output, plain = model.train(mode)(X), raw.train(mode)(X)
    assert type(output) is type(plain)
    found = list(leaves(output))
    assert len(found) == len(list(leaves(plain)))
    assert {t.dtype for t in found} == {torch.float32}
    assert {t.requires_grad for t in found} == {mode}


def test_other_dtypes_come_out_as_they_are():
    made = {"i": torch.tensor([1]), "b": torch.tensor([True]), "d": torch.ones(1, dtype=torch.float64), "c": torch.ones(1) * 1j}
    model, _ = wrapped(Returns(lambda h: made), precision="bf16")
    for mode in (True, False):
        assert model.train(mode)(X) is made


def test_an_output_in_float32_is_returned_as_it_is():
    made = {}

    def make(h):
        made["output"] = [h, {"h": h}]
        return made["output"]

    model, _ = wrapped(Returns(make))
    assert model(X) is made["output"]
    assert model.eval()(X) is made["output"]


def test_the_graph_goes_through_the_cast():
    model, raw = wrapped(Returns(), precision="bf16")
    model(X).sum().backward()
    assert raw.layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype_is_run_as_it_is(dtype):
    """A model with parameters that are not float32 is not put under autocast."""
    model, raw = wrapped(Probe().to(dtype))
    output = model(X.to(dtype))
    assert raw.seen[0].autocast is None
    assert output.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)


def test_exact_leaves_the_output_of_a_16_bit_model():
    assert optimize(Probe().bfloat16(), exact=True)(X.bfloat16()).dtype == torch.bfloat16


def test_exact_leaves_the_output_under_a_users_own_autocast():
    model, raw = wrapped(exact=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(X), raw(X))
        assert model(X).dtype == torch.bfloat16


def test_without_exact_a_users_own_autocast_gives_float32_out_too():
    model, raw = wrapped()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X).dtype == torch.float32
    assert raw.seen[0].autocast == torch.bfloat16


# --- one law ------------------------------------------------------------------------------------------------------------


def convnet():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4, 2),
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_on_a_batch_is_a_step_on_its_loss(precision, accumulate):
    """`step(x, y)` is exactly `step(loss_fn(model(x), y))`."""
    nets = []
    for own in (False, True):
        raw = convnet()
        model, step = training(raw, precision=precision, accumulate=accumulate)
        for seed in range(4):
            torch.manual_seed(seed)
            metrics = step(F.cross_entropy(model(X), Y)) if own else step(X, Y)
        nets.append((raw.state_dict(), metrics["loss"]))
    (one, loss), (two, same_loss) = nets
    assert loss == same_loss
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_on_probabilities_is_computed_in_float32_outside_of_autocast(dtype):
    """A20, A21."""
    raw = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    seen = []

    def loss_fn(output, target):
        seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
        return nn.BCELoss()(output[:, 0], target)

    y, plain = Y.float(), nn.BCELoss()(raw(X)[:, 0], Y.float()).item()
    _, step = training(raw, loss_fn, precision={v: k for k, v in DTYPES.items()}[dtype])
    with torch.autocast("cpu", dtype):
        assert step(X, y)["loss"] == pytest.approx(plain, abs=1e-2)
    assert seen == [(torch.float32, False)]


def test_training_by_hand_through_the_wrapped_model_works():
    """A32: the user's own backward and optimizer step are not scaled."""
    raw = Probe()
    twin = copy.deepcopy(raw)
    model, _ = training(raw, precision="fp16")
    with torch.autocast("cpu", torch.float16):
        output = twin(X)
    for out, net in ((model(X), raw), (output.float(), twin)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        F.cross_entropy(out, Y).backward()
        optimizer.step()
    assert torch.equal(raw.layer.weight, twin.layer.weight)


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class PlainSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def test_a_custom_function_made_for_autocast():
    """A28."""
    raw = Returns(lambda h: Square.apply(h))
    _, step = training(raw, precision="bf16")
    assert step(X, Y)["loss"] > 0
    assert raw.layer.weight.grad.dtype == torch.float32
    assert raw.layer.weight.grad.isfinite().all()


def test_a_custom_function_not_made_for_autocast_fails_as_it_does_in_torch():
    """A29: the error is torch's own."""
    weight = nn.Parameter(torch.ones(2, 2))
    raw = Returns(lambda h: PlainSquare.apply(h, weight))
    model, _ = wrapped(raw, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        output = raw(X)
    with pytest.raises(RuntimeError, match="dtype") as plain:
        output.sum().backward()
    with pytest.raises(RuntimeError) as error:
        model(X).sum().backward()
    assert str(error.value) == str(plain.value)


@pytest.mark.parametrize("inference", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_and_training_in_one_autocast_region_of_the_users_own(precision, inference):
    """A15 to A17, A19: weights that an evaluation has cast are neither without a graph nor of yesterday."""
    raw = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model, step = training(raw, precision=precision, inference=inference)
    with torch.autocast("cpu", torch.bfloat16):
        before = model.eval()(X)
        model.train()
        step(X, Y)
        assert all(p.grad is not None for p in raw.parameters())
        after = model.eval()(X)
    assert not torch.equal(before, after)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(X), after)


# --- arguments ----------------------------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.copies.append(func)
        return func(*args, **(kwargs or {}))


class Custom:
    """A graph batch: it takes itself to a device and returns a new object."""

    def __init__(self, x):
        self.x, self.asked = x, []

    def to(self, device):
        made = Custom(self.x.to(device))
        made.asked = [*self.asked, device]
        return made


class Tokens(UserDict):
    """A tokenizer's batch: a mapping with its own `to`."""

    def to(self, device):
        return Tokens({k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.items()})


@dataclasses.dataclass(frozen=True)
class Late:
    x: Tensor
    made: Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "made", self.x + 1)


BATCHES = {
    "tensor": lambda: X,
    "list": lambda: [X, X + 1],
    "tuple": lambda: (X, X + 1),
    "namedtuple": lambda: Pair(X, 3),
    "dict": lambda: {"x": X, "n": None, "task": "a", "l": ["s", 3]},
    "defaultdict": lambda: defaultdict(list, x=X),
    "OrderedDict": lambda: OrderedDict(x=X),
    "deque": lambda: deque([X], maxlen=2),
    "UserDict": lambda: UserDict(x=X),
    "dataclass": lambda: Output(X),
    "frozen dataclass": lambda: Frozen(X),
    "dataclass with a late field": lambda: Late(X),
    "own to": lambda: Custom(X),
    "tokens": lambda: Tokens(x=X, text="t"),
    "packed sequence": lambda: pack_padded_sequence(torch.ones(3, 2, 4), [3, 2]),
    "deep": lambda: {"a": [(X, {"b": Pair(X, [X])})]},
}


def device_types(value):
    if isinstance(value, Custom):
        value = value.x
    return {t.device.type for t in leaves(value)}


@pytest.mark.parametrize("kind", BATCHES)
def test_arguments_are_moved_in_containers_of_the_same_type(kind):
    """D7, D9, D11, D15."""
    model, raw = wrapped(nn.Identity(), device="meta")
    received = []
    raw.forward = lambda x, **more: received.extend([x, more["k"]])
    batch = BATCHES[kind]()
    model(batch, k=batch)
    assert type(received[0]) is type(batch)
    if kind != "packed sequence":  # its sizes stay on the host
        assert device_types(received[0]) == {"meta"}
    assert received[0] is received[1]  # an object met twice is moved once
    assert device_types(batch) == {"cpu"}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_is_there_already_is_not_copied_or_rebuilt(kind):
    model, raw = wrapped(nn.Identity())
    received = []
    raw.forward = lambda x, **more: received.extend([x, more["k"]])
    batch = BATCHES[kind]()
    with Copies() as mode:
        model(batch, k=[batch])
    assert mode.copies == []
    if kind not in ("own to", "tokens", "packed sequence"):  # these are asked, and their answer is used
        assert received[0] is batch
    assert [t.data_ptr() for t in leaves(received[0])] == [t.data_ptr() for t in leaves(batch)]


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_call_dispatches_what_the_plain_module_dispatches(mode):
    """In float32 and with the batch in place a call adds no operator."""
    model, raw = wrapped(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))
    model.train(mode)
    seen = []
    for called in (raw, model):
        with Operators() as operators, torch.set_grad_enabled(mode):
            called(X)
        seen.append(operators.seen)
    assert seen[0] == seen[1]


def test_an_objects_own_to_gets_a_device_and_its_answer_is_used():
    """D9, D15."""
    model, raw = wrapped(nn.Identity())
    raw.forward = lambda graph: graph.asked
    assert model(Custom(X)) == [torch.device("cpu")]


def test_a_step_asks_an_object_once():
    """One walk over all arguments of a step, the target's among them."""
    raw = nn.Linear(4, 2)
    plain = raw.forward
    raw.forward = lambda graph: (asked.extend(graph.asked), plain(graph.x))[1]
    asked = []
    _, step = training(raw, lambda output, target: (asked.extend(target.asked), output.square().mean())[1])
    graph = Custom(X)
    step(graph, graph)
    assert asked == [torch.device("cpu")] * 2  # once, seen by the forward and by the loss


@pytest.mark.parametrize("value", [
    "text", None, 3, 2.5, True, b"b", {1, 2}, object(), range(3), [3, 2], np.ones(3), np.float64(1), [np.ones(2), "s"], torch.float16,
], ids=str)  # fmt: skip
def test_what_is_no_tensor_passes_through_untouched(value):
    """D11, D13: also lengths in a plain list; NumPy arrays."""
    model, raw = wrapped(nn.Identity(), device="meta")
    raw.forward = lambda v: received.append(v)
    received = []
    model(value)
    assert received[0] is value


def test_a_module_as_an_argument_stays_where_it_is():
    model, raw = wrapped(nn.Identity(), device="meta")
    other = nn.Linear(2, 2)
    raw.forward = lambda m: m
    assert model(other) is other
    assert other.weight.device.type == "cpu"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float16, torch.complex64]
)
def test_the_dtype_of_an_argument_is_never_changed(dtype, precision):
    """D10, D20."""
    model, raw = wrapped(nn.Identity(), precision=precision)
    received = []
    raw.forward = lambda v: received.append(v)
    value = torch.ones(3).to(dtype)
    model(value)
    assert received[0] is value


def test_token_ids_beyond_16_bits_survive():
    """D10."""
    model, raw = wrapped(nn.Embedding(70_000, 2), precision="bf16")
    assert torch.equal(model(torch.tensor([69_999]))[0], raw.weight[69_999])


def test_float64_targets_train_and_float64_inputs_fail_as_in_torch():
    """D20 to D22."""
    raw = nn.Linear(4, 2)
    _, step = training(raw, nn.MSELoss())
    assert type(step(X, torch.from_numpy(np.random.rand(5, 2)))["loss"]) is float
    assert raw.weight.grad.dtype == torch.float32
    with pytest.raises(RuntimeError) as plain:
        raw(X.double())
    with pytest.raises(RuntimeError) as error:
        step(X.double(), torch.zeros(5, 2))
    assert str(error.value) == str(plain.value)


def test_a_packed_sequence_keeps_its_order_and_lengths():
    """D23."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(2, 3, batch_first=True)

        def forward(self, packed):
            return self.lstm(packed)[0]

    model, raw = wrapped(Encoder())
    packed = pack_padded_sequence(torch.rand(3, 4, 2), torch.tensor([2, 4, 1]), batch_first=True, enforce_sorted=False)
    (got, lengths), (plain, same) = (pad_packed_sequence(m(packed), batch_first=True) for m in (model, raw))
    assert torch.equal(got, plain)
    assert torch.equal(lengths, same)


def test_positional_and_keyword_arguments_reach_forward_as_given():
    model, raw = wrapped()
    assert torch.equal(model(x=X), model(X))
    more = object()
    model(X, 1, more, k="v")
    assert raw.seen[-1].args == (X, 1, more)
    assert raw.seen[-1].kwargs == {"k": "v"}


def test_wrong_arguments_fail_as_in_torch():
    model, raw = wrapped(Returns())
    with pytest.raises(TypeError) as plain:
        raw()
    with pytest.raises(TypeError) as error:
        model()
    assert str(error.value) == str(plain.value)


def test_a_batch_that_holds_itself_ends():
    model, _ = wrapped(nn.Identity())
    batch: dict[str, Any] = {"x": X}
    batch["self"] = batch
    assert model(batch) is batch


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_model_on_meta(mode):
    model, _ = training(nn.Linear(4, 2).to("meta"), nn.MSELoss(), device="meta")
    x = torch.ones(3, 4, device="meta")
    output = getattr(model, mode)()(x)
    assert (output.shape, output.device.type, output.requires_grad) == ((3, 2), "meta", mode == "train")
    assert fast_eval(lambda model: model(x))(model).shape == (3, 2)


def test_a_step_on_meta():
    _, step = training(nn.Linear(4, 2).to("meta"), nn.MSELoss(), device="meta")
    assert step(torch.ones(3, 4, device="meta"), torch.ones(3, 2, device="meta")).updated


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_frozen_scripted_model():
    raw = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 2)).eval()))
    model, x = optimize(raw), torch.ones(3, 4)
    for one in (model, copy.deepcopy(model), model.eval()):
        assert torch.equal(one(x), raw(x))
        assert not one.training


# --- methods ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_methods_run_as_the_user_wrote_them(precision):
    """M13."""
    model, raw = wrapped(precision=precision)
    output = model.eval().encode(X)
    assert raw.seen[0].autocast is None
    assert output.requires_grad
    assert torch.equal(output, raw(X))


def test_a_method_named_in_methods_is_called_as_forward_is():
    """M13."""
    model, raw = wrapped(precision="bf16", methods=("encode",))
    assert model.encode(X).dtype == torch.float32
    assert raw.seen[0].autocast == torch.bfloat16
    assert not model.eval().encode(X).requires_grad
    assert model.encode(X.clone().requires_grad_()).requires_grad


def test_inside_a_step_a_named_method_keeps_its_graph():
    class Agent(Probe):
        def act(self, x):
            return self.encode(x).softmax(-1)

    raw = Agent()
    model, step = training(raw, None, methods=("act",), precision="bf16")
    before = raw.layer.weight.detach().clone()
    step((model.act(X)[:, 0] * torch.arange(5)).mean())
    assert not torch.equal(raw.layer.weight, before)
    assert raw.seen[0].autocast == torch.bfloat16


def test_a_method_that_calls_the_module_calls_the_plain_one():
    """F-4: `self` inside of a method is the user's module."""

    class Generates(Probe):
        def generate(self, x):
            return self(x)

    model, raw = wrapped(Generates(), precision="bf16")
    assert model.eval().generate(X).requires_grad
    assert raw.seen[0].autocast is None


def test_the_forward_is_looked_up_at_the_call():
    model, raw = wrapped()
    raw.forward = lambda x: x + 1
    assert torch.equal(model(X), X + 1)


# --- threads, functional calls, derivatives -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_autocast_holds_in_a_new_thread(mode):
    """P7: autocast is entered by the call."""
    model, raw = wrapped(precision="bf16")
    model.train(mode)
    thread = threading.Thread(target=lambda: model(X))
    thread.start()
    thread.join()
    assert raw.seen[0].autocast == torch.bfloat16
    assert raw.seen[0].grad is mode


def test_many_threads_at_once():
    model, _ = wrapped(Returns(), precision="bf16")
    model.eval()
    expected = model(X)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: model(X), range(60)))
    assert all(torch.equal(o, expected) and not o.requires_grad for o in outputs)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_functional_call_trains_the_parameters_that_it_is_given(mode):
    model, raw = wrapped()
    model.train(mode)
    given = {name: p.detach().clone().requires_grad_() for name, p in raw.named_parameters()}
    results = []
    for called in (raw, model):
        functional_call(called, given, (X,)).sum().backward()
        results.append(given["layer.weight"].grad)
        given["layer.weight"].grad = None
    assert torch.equal(*results)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_derivatives_by_parameters_are_those_of_the_plain_module(mode):
    """N11: they are not zero without a word."""
    model, raw = wrapped()
    model.train(mode)
    given = {name: p.detach() for name, p in raw.named_parameters()}

    def derivative(called):
        return torch.func.grad(lambda p: functional_call(called, p, (X,)).square().sum())(given)["layer.weight"]

    assert derivative(raw).abs().sum() > 0
    assert torch.equal(derivative(model), derivative(raw))


DERIVATIVES = {
    "jacrev": lambda net: torch.func.jacrev(net)(X),
    "vjp": lambda net: torch.func.vjp(net, X)[1](torch.ones(5, 2)),
    "jvp": lambda net: torch.func.jvp(net, (X,), (X,)),
    "jacfwd": lambda net: torch.func.jacfwd(net)(X),
    "autograd": lambda net: torch.autograd.functional.jacobian(net, X),
    "grad": lambda net: torch.func.grad(lambda x: net(x).sum())(X),
    "vmap": lambda net: torch.func.vmap(net)(X[:, None]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_by_inputs_are_those_of_the_plain_module(name, mode):
    """N9, N10."""
    model, _ = wrapped(Returns())
    raw = model.train(mode).__wrapped__
    got, plain = DERIVATIVES[name](model), DERIVATIVES[name](raw)
    torch.testing.assert_close(got, plain)


def test_an_ensemble_of_wrapped_models():
    nets = [optimize(Returns(torch.relu)) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(nets)
    outputs = torch.func.vmap(lambda p, b: functional_call(nets[0], (p, b), (X,)))(parameters, buffers)
    torch.testing.assert_close(outputs, torch.stack([net(X) for net in nets]))


def test_gradient_checkpointing():
    model, raw = wrapped(precision="bf16")
    calls = []
    raw.register_forward_pre_hook(lambda *_: calls.append(torch.is_autocast_enabled("cpu")))
    torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False).sum().backward()
    assert calls == [True, True]
    assert raw.layer.weight.grad is not None


def test_a_frozen_teacher_and_its_student():
    """Distillation and perceptual losses: a wrapped net in eval mode passes gradients through to what it is given."""
    teacher, critic = optimize(Returns()).eval(), optimize(nn.Linear(2, 1)).eval()
    student_raw = Returns()
    student, step = training(student_raw, lambda output, x: (output - teacher(x)).square().mean() + critic(output).mean())
    step(X, X)
    assert student_raw.layer.weight.grad.abs().sum() > 0
    assert student.training


# --- lazy and odd modules -----------------------------------------------------------------------------------------------


def test_a_lazy_module_is_made_by_its_first_call():
    model, raw = wrapped(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
    assert model.eval()(X).shape == (5, 3)
    assert isinstance(raw[0], nn.Linear)
    model.train()(X).sum().backward()
    assert raw[0].weight.grad is not None


def test_a_module_without_parameters():
    model, _ = wrapped(nn.ReLU(), precision="bf16")
    assert model(X) is not None
    assert model.device == torch.device("cpu")


def test_a_module_with_its_own_call():
    class Own(Probe):
        def __call__(self, x):
            return super().__call__(x), "own"

    model, _ = wrapped(Own(), precision="bf16")
    output, text = model(X)
    assert text == "own"
    assert output.dtype == torch.float32


def test_layers_with_16_bit_casts_of_their_own():
    """A model that disables autocast for a part of itself is left to it."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                return self.b(h.float())

    model, _ = wrapped(Mixed(), precision="bf16")
    assert model(X).dtype == torch.float32


# --- an eval-mode call whose graph a loss would have needed -------------------------------------------------------------


def parts():
    torch.manual_seed(1)
    return nn.Linear(4, 8), nn.Linear(8, 2)


def step_of_both(**options):
    body, head = parts()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    (body, head), step = optimize([body, head], optimizer, device="cpu", **options)
    return body, head, step


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("form", ["two models", "a plain head", "a penalty", "a model inside", "a further loss"])
def test_a_loss_that_an_eval_mode_call_is_missing_from_warns_once(form, exact):
    """The rest of the loss has a graph, so that torch says nothing, and the plain loop would train the model."""
    body, head = parts()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    options = {"exact": exact, "device": "cpu"}
    if form in ("two models", "a further loss"):
        (body, head), step = optimize([body, head], optimizer, **options)
    elif form == "a model inside":
        inner = optimize(body, torch.optim.SGD(body.parameters(), lr=0.1), **options).model
        whole, step = optimize(nn.Sequential(inner, head), optimizer, **options)
    else:
        body, step = optimize(body, optimizer, **options)
    (inner if form == "a model inside" else body).eval()

    def loss():
        output = whole(X) if form == "a model inside" else head(body(X))
        penalty = sum(p.square().sum() for p in body.parameters()) if form == "a penalty" else 0
        return F.cross_entropy(output, Y) + 1e-3 * penalty

    text = r"\(<tensor \(\)>\) with Linear in eval mode: an eval-mode call keeps no graph.*inference='grad'.*model\.train\(\)"
    give = step.backward if form == "a further loss" else step
    with pytest.warns(RuntimeWarning, match=text):
        give(loss())
    step(loss())  # the second time it is silent


@pytest.mark.parametrize("case", ["train", "grad", "no_grad", "frozen", "of before", "of another optimizer"])
def test_a_loss_that_misses_nothing_does_not_warn(case):
    body, head, step = step_of_both(inference="grad" if case == "grad" else "no_grad")
    if case == "of another optimizer":
        body, head = parts()
        (body, head), step = optimize([body, head], torch.optim.SGD(head.parameters(), lr=0.1), device="cpu")
    if case == "frozen":
        body.requires_grad_(False)
    if case != "train":
        body.eval()
    if case == "of before":
        body(X)  # an evaluation; then training goes on
        body.train()
        step(F.cross_entropy(head(body(X)), Y))
        body.eval()
    with torch.set_grad_enabled(case not in ("no_grad", "of before")):
        hidden = body(X)
    step(F.cross_entropy(head(hidden), Y))
