"""A wrapped model inside of what torch has to run models in: compilers, exporters, DataParallel, DistributedDataParallel."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

from hotloop import _facts, fast_eval, optimize
from hotloop._dynamo import run_eagerly
from hotloop._tree import leaves

pytestmark = [
    pytest.mark.usefixtures("dynamo_is_at_work"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated"),
]

X, Y = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 1, 0, 1])


class Net(nn.Module):
    def __init__(self, make=lambda h: h) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 2), make

    def forward(self, x):
        return self.make(self.layer(x))


def normed():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


def training(module, loss_fn=F.cross_entropy, **wishes):
    return optimize(module, torch.optim.SGD(module.parameters(), lr=0.1), loss_fn, **wishes)


@pytest.fixture
def compiled():
    def compile_(function, **options):
        return torch.compile(function, backend="eager", fullgraph=True, **options)

    torch._dynamo.reset()
    yield compile_
    torch._dynamo.reset()


# --- torch.compile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_it_compiles_whole(compiled, precision, mode):
    """M18, F-9."""
    model = optimize(normed(), precision=precision).train(mode)
    twin = copy.deepcopy(model)
    output, expected = compiled(model)(X), twin(X)
    torch.testing.assert_close(output, expected)
    assert output.dtype == torch.float32
    assert output.requires_grad is expected.requires_grad is mode


def test_compiled_it_follows_the_mode(compiled):
    """T1, T4."""
    model = optimize(normed())
    call = compiled(model)
    for mode in (True, False, True):
        model.train(mode)
        assert call.training is mode
        assert call(X).requires_grad is mode
    call.eval()
    assert not model.training
    model.load_state_dict(normed().state_dict())
    torch.testing.assert_close(call(X), model(X))


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_compiled_it_stays_compiled(compiled, mode):
    model, step = training(normed(), precision="bf16")
    call = compiled(model.train(mode))
    call(X)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            call(X)
            if mode:
                step(X, Y)


@pytest.mark.parametrize("inference", ["no_grad", "inference_mode", "grad"])
def test_compiled_an_eval_call_obeys_its_wish(compiled, inference):
    model = optimize(Net(), inference=inference).eval()
    assert compiled(model)(X).requires_grad is (inference == "grad")


def test_compiled_an_input_that_requires_grad_keeps_the_graph(compiled):
    model = optimize(Net(), precision="bf16").eval()
    x = X.clone().requires_grad_()
    assert torch.autograd.grad(compiled(model)(x).sum(), x)[0].shape == X.shape


Pair = namedtuple("Pair", "a n")


@dataclasses.dataclass
class Output:
    a: torch.Tensor
    n: int = 3


class Taking(Net):
    """Takes its input from what holds it."""

    def forward(self, held):
        while not isinstance(held, torch.Tensor):
            held = held.a if isinstance(held, Output) else next(iter(held.values() if isinstance(held, dict) else held))
        return super().forward(held)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "hold",
    [
        lambda x: [x],
        lambda x: (3, [x])[1:],
        lambda x: {"a": {"x": x}},
        lambda x: OrderedDict(a=x),
        lambda x: Pair(x, 3),
        Output,
    ],
    ids=["list", "tuple", "dict", "OrderedDict", "namedtuple", "dataclass"],
)
def test_compiled_an_input_in_a_container_that_requires_grad_keeps_the_graph(compiled, hold, grad):
    model = optimize(Taking(), precision="bf16").eval()
    assert compiled(model)(hold(X.clone().requires_grad_(grad))).requires_grad is grad


MAKES = {
    "tuple": lambda h: (h, 3),
    "list": lambda h: [h, [h]],
    "dict": lambda h: {"a": h, "n": 3},
    "dict with other keys": lambda h: {0: h, 1: h},
    "OrderedDict": lambda h: OrderedDict(a=h),
    "namedtuple": lambda h: Pair(h, 3),
    "dataclass": lambda h: Output(h),
    "deep": lambda h: {"a": [h, (h, {"b": h})], "text": "t", "none": None},
}


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", MAKES)
def test_compiled_its_outputs_are_float32_in_containers_of_the_same_type(compiled, kind, mode):
    """M15."""
    model = optimize(Net(MAKES[kind]), precision="bf16").train(mode)
    output, plain = compiled(model)(X), model(X)
    assert type(output) is type(plain)
    assert [(t.shape, t.dtype) for t in leaves(output)] == [(t.shape, torch.float32) for t in leaves(plain)]


@pytest.mark.parametrize("kind", MAKES)
def test_compiled_it_takes_the_same_containers(compiled, kind):
    model = optimize(Net(), precision="bf16")
    batch = MAKES[kind](X)
    pick = {"dict": lambda b: b["a"], "OrderedDict": lambda b: b["a"], "dataclass": lambda b: b.a, "deep": lambda b: b["a"][0]}
    first = pick.get(kind, lambda b: b[0])
    model.forward = lambda batch: first(batch) * 2
    assert torch.equal(compiled(model)(batch), X * 2)


def test_a_compiled_function_that_calls_it(compiled):
    model = optimize(normed(), precision="bf16")

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    twin = copy.deepcopy(model)
    value = compiled(loss)(X, Y)
    torch.testing.assert_close(value, F.cross_entropy(twin(X), Y))
    value.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_compiled_module_that_holds_it(compiled):
    model = optimize(normed(), precision="bf16")
    outer = nn.Sequential(model, nn.Softmax(-1))
    twin = copy.deepcopy(outer)
    torch.testing.assert_close(compiled(outer)(X), twin(X))


class Encodes(Net):
    def encode(self, x):
        return self.layer(x) * 2


class Outer(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net.encode(x)


IN_COMPILED_CODE = {
    "a method": lambda net: lambda x: net.encode(x),
    "forward": lambda net: lambda x: net.forward(x),
    "parameters": lambda net: lambda x: net(x) * sum(p.sum() for p in net.parameters()),
    "a method of a child": lambda net: Outer(net),
    "a bound method": lambda net: net.encode,
    "functional_call": lambda net: lambda x: functional_call(net, {n: p * 2 for n, p in net.named_parameters()}, (x,)),
    "state_dict": lambda net: lambda x: net(x) * len(net.state_dict()),
}


@pytest.mark.parametrize("methods", [(), ("encode",)], ids=["", "named"])
@pytest.mark.parametrize("name", IN_COMPILED_CODE)
@pytest.mark.usefixtures("compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, of swapped parameters behind a graph break
def test_methods_in_compiled_code(name, methods):
    """F-9c: they may break the graph, and run."""
    model = optimize(Encodes(), methods=methods)
    make = IN_COMPILED_CODE[name]
    got = torch.compile(make(model), backend="eager")(X)
    torch.testing.assert_close(got, make(model.__wrapped__)(X))


@pytest.mark.usefixtures("compiled")
def test_a_named_method_in_compiled_code_is_called_as_forward_is():
    model = optimize(Encodes(), methods=("encode",), precision="bf16").eval()
    expected = model.encode(X)
    got = torch.compile(lambda x: model.encode(x), backend="eager")(X)
    assert (got.dtype, got.requires_grad) == (torch.float32, False)
    assert torch.equal(got, expected)


def test_compiled_exact_leaves_the_output_of_a_16_bit_model(compiled):
    model = optimize(Net().bfloat16(), exact=True)
    assert compiled(model)(X.bfloat16()).dtype == model(X.bfloat16()).dtype == torch.bfloat16


def test_plain_attributes_are_read_through_the_module(compiled):
    """F-9c: torch cannot guard an attribute that is read off a proxy."""
    model = optimize(Net())
    model.factor = 2.0
    torch.testing.assert_close(compiled(lambda x: model(x) * model.__wrapped__.factor)(X), model(X) * 2)


def test_a_model_compiled_in_place_trains_and_keeps_clean_keys(compiled):
    """M2, M3, F-11."""
    raw = normed()
    raw.compile(backend="eager")
    model, step = training(raw, precision="bf16")
    assert "_orig_mod" not in "".join(model.state_dict())
    model.load_state_dict(normed().state_dict())
    twin = normed()
    twin.load_state_dict(raw.state_dict())
    _, plain = training(twin, precision="bf16")
    assert step(X, Y)["loss"] == pytest.approx(plain(X, Y)["loss"], abs=1e-3)
    assert {p.grad.dtype for p in raw.parameters()} == {torch.float32}


def test_compiling_through_the_wrapper_compiles_the_module(compiled):
    model, raw = (net := optimize(Net())), net.__wrapped__
    assert model.compile(backend="eager") is None
    assert raw._compiled_call_impl is not None
    assert model(X).shape == (5, 2)
    assert torch.jit.trace(Net(), X)(X).shape == (5, 2)


def test_a_compiled_model_is_wrapped(compiled):
    raw = Net()
    model, step = training(compiled(raw))
    before = raw.layer.weight.detach().clone()
    step(X, Y)
    assert not torch.equal(raw.layer.weight, before)
    assert model.eval() is model
    assert not raw.training


def test_a_step_inside_a_compiled_function_is_left_alone():
    """dynamo compiles what is around it, and neither the loss nor the optimizer's own code."""
    frames = torch._dynamo.testing.CompileCounter()
    seen = []

    def loss_fn(output, target):
        seen.append((torch.compiler.is_compiling(), torch._C._dynamo.eval_frame.get_eval_frame_callback()))
        return F.cross_entropy(output, target)

    raw, twin = normed(), normed()
    twin.load_state_dict(raw.state_dict())
    _, step = training(raw, loss_fn, exact=True)
    _, plain = training(twin, exact=True)
    torch._dynamo.reset()
    run = torch.compile(lambda x: step(x * 2, Y)["loss"], backend=frames)
    try:
        losses = [run(X) for _ in range(3)]
    finally:
        torch._dynamo.reset()
    assert losses == [plain(X * 2, Y)["loss"] for _ in range(3)]
    assert seen == [(False, None)] * 3
    assert frames.frame_count == 1


def test_compiled_and_trained_by_steps(compiled):
    raw = normed()
    model, step = training(raw, precision="bf16")
    call = compiled(model)
    before = raw[0].weight.detach().clone()
    step(F.cross_entropy(call(X), Y))
    assert not torch.equal(raw[0].weight, before)


# --- export and jit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "strict"), [("fp32", True), ("fp32", False), ("bf16", False)])
def test_export(precision, strict):
    """T9, T10: after training, the wrapped model and the plain one. torch cannot export autocast regions with strict=True."""
    raw = normed()
    model, step = training(raw, precision=precision)
    step(X, Y)
    model.eval()
    exported = torch.export.export(model, (X,), strict=strict).module()
    torch.testing.assert_close(exported(X), model(X))
    torch.testing.assert_close(torch.export.export(raw, (X,), strict=strict).module()(X), raw(X))


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_jit_trace(precision, mode):
    """T7, T8: the weight cache of autocast must be off while tracing."""
    raw = Net()
    model, step = training(raw, precision=precision)
    step(X, Y)
    model.train(mode)
    traced = torch.jit.trace(model, X)
    torch.testing.assert_close(traced(X), model(X))
    assert traced(X).dtype == torch.float32
    torch.testing.assert_close(torch.jit.trace(model.__wrapped__, X)(X), raw(X))


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_jit_trace_inside_a_users_own_autocast(mode):
    """T7, F-14c: weights that the surrounding region has cast cannot go into the trace."""
    model = optimize(Net(), precision="bf16").train(mode)
    with torch.autocast("cpu", torch.bfloat16):
        expected = copy.deepcopy(model)(X)
        torch.testing.assert_close(torch.jit.trace(model, X)(X), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_jit_trace_of_what_holds_it(precision):
    outer = nn.Sequential(optimize(Net(), precision=precision), nn.ReLU()).eval()
    torch.testing.assert_close(torch.jit.trace(outer, X)(X), outer(X))


def test_autocast_caches_again_after_a_trace():
    model = optimize(Net(), precision="bf16").eval()
    torch.jit.trace(model, X)
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, X)], ids=["script", "trace"])
def test_a_jit_module_is_wrapped_trained_moved_and_loaded(make):
    raw = make(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    model, step = training(raw, precision="bf16")
    before = [p.detach().clone() for p in raw.parameters()]
    step(X, Y)
    assert any(not torch.equal(p, old) for p, old in zip(raw.parameters(), before, strict=True))
    assert model.eval() is model
    assert (model(X).dtype, model(X).requires_grad) == (torch.float32, False)
    assert model.to("cpu") is model
    model.load_state_dict({name: torch.zeros_like(value) for name, value in raw.state_dict().items()})
    assert model(X).abs().sum() == 0


# --- parallel -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def one_step(model, raw):
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    return raw.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inside_data_parallel(precision):
    raw, twin = normed(), normed()
    twin.load_state_dict(raw.state_dict())
    model = optimize(raw, precision=precision)
    parallel = DataParallel(model)
    assert parallel.module is model
    state = one_step(parallel, raw)
    same = one_step(optimize(twin, precision=precision), twin)
    assert all(torch.equal(state[name], same[name]) for name in state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inside_distributed_data_parallel(group, precision):
    """M4, P7, F-16."""
    raw, twin = normed(), normed()
    twin.load_state_dict(raw.state_dict())
    parallel = DistributedDataParallel(optimize(raw, precision=precision))
    assert parallel.module.state_dict().keys() == raw.state_dict().keys()
    notes = []
    raw[0].register_forward_hook(lambda module, args, out: notes.append(out.dtype))
    state = one_step(parallel, raw)
    assert notes == [torch.bfloat16 if precision == "bf16" else torch.float32]
    same = one_step(optimize(twin, precision=precision), twin)
    assert all(torch.equal(state[name], same[name]) for name in state)


def test_a_model_under_distributed_data_parallel_is_taken_as_it_is(group):
    raw, twin = normed(), normed()
    twin.load_state_dict(raw.state_dict())
    syncs = []
    parallel = DistributedDataParallel(raw)
    parallel.register_comm_hook(syncs, _counted)
    model, step = training(parallel)
    assert isinstance(model, DistributedDataParallel)
    assert model.module is raw
    _, plain = training(twin)
    for _ in range(2):
        assert step(X, Y)["loss"] == plain(X, Y)["loss"]
    assert len(syncs) == 2
    assert list(model.state_dict()) == list(parallel.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(raw.state_dict().values(), twin.state_dict().values(), strict=True))
    with model.no_sync():
        step(X, Y)
    assert len(syncs) == 2


def _counted(syncs, bucket):
    syncs.append(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# --- evaluations -----------------------------------------------------------------------------------------------------


def convolutions(inputs=3, channels=16):
    """Deep enough for channels_last, and with layers to fold."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))]
    return nn.Sequential(nn.Conv2d(inputs, channels, 3), *layers)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("make", [
    pytest.param(lambda net: torch.compile(net, backend="eager"), id="torch.compile"),
    pytest.param(lambda net: optimize(net, compile={"backend": "eager"}, precision="fp32"), id="optimize"),
    pytest.param(lambda net: net.compile(backend="eager") or net, id="module.compile"),
])  # fmt: skip
@pytest.mark.parametrize(("net", "shape"), [(convolutions, (4, 3, 16, 16)), (Net, (5, 4))])
def test_compiled_models_are_evaluated(net, shape, make, monkeypatch):
    monkeypatch.setattr(_facts, "_is_x86", lambda: True)
    raw, x = net().eval(), torch.randn(shape)
    expected = raw(x).detach()
    evaluate = fast_eval(lambda model: [model(x) for _ in range(3)])
    for made in evaluate(make(raw)):
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


# --- averages -----------------------------------------------------------------------------------------------------------


def test_batch_norm_statistics_of_an_average_can_be_computed():
    """F-7: `update_bn` calls the wrapped model with the loader's batches."""
    raw = normed()
    average = AveragedModel(optimize(raw, precision="bf16"))
    before = average.module[1].running_mean.clone()
    update_bn(DataLoader(X, batch_size=5), average)
    assert not torch.equal(average.module[1].running_mean, before)
    assert torch.equal(raw[1].running_mean, torch.zeros(3))


def test_regions_that_run_eagerly_may_overlap_in_threads():
    """The first one to begin is the first one to end; what holds for the process is then as before."""
    graphs, first, second = [], run_eagerly(), run_eagerly()

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    @torch.compile(backend=backend)
    def double(x):
        return x * 2

    def enter_and_leave(*calls):
        for call in calls:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    enter_and_leave(first.__enter__, second.__enter__)
    double(X)
    enter_and_leave(lambda: first.__exit__(None, None, None))
    double(X)
    assert graphs == []
    enter_and_leave(lambda: second.__exit__(None, None, None))
    double(X)
    assert len(graphs) == 1
