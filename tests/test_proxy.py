"""The wrapped model is the user's module in everything but its call."""

from __future__ import annotations

import collections.abc
import copy
import gc
import inspect
import io
import json
import operator
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import singledispatch
from typing import (
    Any,
    SupportsAbs,
    SupportsBytes,
    SupportsComplex,
    SupportsFloat,
    SupportsIndex,
    SupportsInt,
    SupportsRound,
)

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from hotloop import optimize


class Net(nn.Module):
    """A user's net."""

    kind = "net"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.vocab = 7

    def forward(self, x, scale=1.0):
        return self.head(x) * scale

    def logits(self, x):
        return self.head(x)

    def freeze(self):
        return self.requires_grad_(False)

    def twin(self):
        return copy.deepcopy(self)

    def both(self):
        return self, self.head

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.vocab = 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def sgd(module, **options):
    return torch.optim.SGD(module.parameters(), lr=0.1, **options)


def wrapped(module=None, **wishes):
    module = Net() if module is None else module
    return optimize(module, **wishes), module


X = torch.linspace(-1, 1, 20).reshape(5, 4)


# --- identity -----------------------------------------------------------------------------------------------------------


def test_the_module_is_in_place_and_the_wrapper_tells_it():
    """M12, W7: an unwrap gives exactly the module; `isinstance` holds and `type` tells the wrapper."""
    model, raw = wrapped()
    assert model.__wrapped__ is raw
    assert isinstance(model, Net)
    assert isinstance(model, nn.Module)
    assert model.__class__ is Net
    assert type(model) is not Net
    assert model is not raw


def test_wrapping_leaves_the_module_as_it_was():
    raw = Net()
    before = dict(vars(raw)), [id(t) for t in raw.state_dict(keep_vars=True).values()], raw.training, type(raw)
    optimize(raw)
    assert (dict(vars(raw)), [id(t) for t in raw.state_dict(keep_vars=True).values()], raw.training, type(raw)) == before


def test_unwrapped_it_pickles_after_training():
    """M12."""
    raw = Net()
    model, step = optimize(raw, sgd(raw), nn.MSELoss())
    for _ in range(3):
        step(X, torch.zeros(5, 2))
    assert torch.equal(pickle.loads(pickle.dumps(model.__wrapped__)).head.weight, raw.head.weight)


def test_hash_equality_and_weak_references_are_the_modules_own():
    model, raw = wrapped()
    assert model == raw
    assert raw == model
    assert hash(model) == hash(raw)
    assert {raw: 1}[model] == 1
    assert weakref.ref(model)() is model


def test_singledispatch_finds_the_users_class():
    @singledispatch
    def name(_: object) -> str:
        return "object"

    name.register(Net, lambda _: "net")
    assert name(wrapped()[0]) == "net"


@pytest.mark.parametrize("show", [repr, str, "{}".format])
def test_it_is_shown_as_the_module(show):
    model, raw = wrapped()
    assert show(model) == show(raw)


def test_documentation_and_signature_are_the_modules_own():
    model, raw = wrapped()
    assert model.__doc__ == "A user's net."
    assert model.__module__ == raw.__module__
    assert inspect.signature(model.forward) == inspect.signature(raw.forward)


def test_isinstance_in_a_loop_over_modules():
    """M17: init and freeze loops see the same types."""
    model, raw = wrapped(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    assert [type(m) for m in model.modules()] == [type(m) for m in raw.modules()]
    assert isinstance(optimize(nn.Linear(2, 2)), nn.Linear)


# --- attributes ---------------------------------------------------------------------------------------------------------


def test_attributes_go_through_both_ways():
    """M5."""
    model, raw = wrapped()
    assert model.vocab == 7
    assert model.kind == "net"
    model.new = 1
    assert raw.new == 1
    model.extra = nn.Linear(2, 2)
    assert "extra.weight" in raw.state_dict()
    del model.new
    assert not hasattr(raw, "new")
    assert not hasattr(model, "new")


def test_a_missing_attribute_is_the_modules_own_error():
    model, raw = wrapped()
    with pytest.raises(AttributeError) as plain:
        _ = raw.nothing
    with pytest.raises(AttributeError) as error:
        _ = model.nothing
    assert str(error.value) == str(plain.value)


def test_device_and_module():
    model, raw = wrapped()
    assert model.device == torch.device("cpu")
    assert model.module is raw
    assert "device" in dir(model)
    assert set(dir(raw)) <= set(dir(model))


def test_the_modules_own_device_and_module_come_first():
    class Own(nn.Module):
        device = "here"

        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    model, raw = wrapped(Own())
    assert model.device == "here"
    assert model.module is raw.module


def test_parameters_hooks_and_keys_are_the_modules_own():
    """M1."""
    model, raw = wrapped()
    assert [id(p) for p in model.parameters()] == [id(p) for p in raw.parameters()]
    assert [n for n, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    assert list(model.state_dict()) == list(raw.state_dict())
    assert Net().load_state_dict(model.state_dict()).missing_keys == []
    other = Net()
    model.load_state_dict(other.state_dict())
    assert torch.equal(raw.head.weight, other.head.weight)


def test_hooks_run_once_and_get_the_module():
    model, raw = wrapped()
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(("pre", module is raw)))
    raw.register_forward_hook(lambda module, args, out: calls.append(("forward", module is raw)))
    model.register_full_backward_hook(lambda module, *_: calls.append(("backward", module is raw)))
    model(X.clone().requires_grad_()).sum().backward()
    assert [name for name, _ in calls] == ["pre", "forward", "backward"]


def test_a_forward_hook_may_replace_the_output():
    model, _ = wrapped()
    handle = model.register_forward_hook(lambda *_: torch.zeros(1))
    assert model(X).tolist() == [0.0]
    handle.remove()
    assert model(X).shape == (5, 2)


# --- protocols ----------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], nn.Module]] = {
    "module": Net,
    "Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
    "ModuleList": lambda: nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ReLU()}),
    "ParameterList": lambda: nn.ParameterList([torch.ones(2), torch.ones(3)]),
    "ParameterDict": lambda: nn.ParameterDict({"a": torch.ones(2)}),
}


def entered(model):
    with model:
        return True


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "bool": bool,
    "iter": lambda m: [id(v) if isinstance(v, nn.Module) else str(v) for v in m],
    "reversed": lambda m: [id(v) if isinstance(v, nn.Module) else str(v) for v in reversed(m)],
    "first": lambda m: id(m[0]),
    "last": lambda m: id(m[-1]),
    "key": lambda m: id(m["a"]),
    "slice": lambda m: type(m[:1]),
    "in": lambda m: "a" in m,
    "keys": lambda m: list(m.keys()),
    "unpack": lambda m: [id(v) if isinstance(v, nn.Module) else str(v) for v in [*m]],
    "enter": entered,
    "int": int,
    "index": operator.index,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_protocols_exist_exactly_where_the_module_has_them(kind, action):
    model, raw = wrapped(KINDS[kind]())
    act = ACTIONS[action]
    try:
        expected = act(raw)
    except (TypeError, KeyError, AttributeError, NotImplementedError) as error:
        with pytest.raises((type(error), TypeError)):  # Python 3.10 calls what cannot be entered an AttributeError
            act(model)
    else:
        assert act(model) == expected


PROTOCOLS = [getattr(collections.abc, name) for name in ("Sized", "Iterable", "Iterator", "Callable", "Hashable", "Awaitable")]
PROTOCOLS += [AbstractContextManager, AbstractAsyncContextManager]
PROTOCOLS += [SupportsInt, SupportsFloat, SupportsComplex, SupportsIndex, SupportsBytes, SupportsAbs, SupportsRound]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", KINDS)
def test_abstract_classes_see_the_same_protocols(kind, protocol):
    model, raw = wrapped(KINDS[kind]())
    assert isinstance(model, protocol) == isinstance(raw, protocol)


def test_items_can_be_replaced_and_removed():
    model, raw = wrapped(KINDS["Sequential"]())
    tanh = nn.Tanh()
    model[1] = tanh
    del model[2]
    assert raw[1] is tanh
    assert len(raw) == len(model) == 2
    assert tanh in model


def test_in_place_operators_keep_the_wrapper():
    model, raw = wrapped(KINDS["Sequential"]())
    same = model
    model += nn.Sequential(nn.Tanh())
    model *= 2
    assert model is same
    assert len(raw) == 8


# --- methods that return the module -------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "to": (("cpu",), {}),
    "type": ((torch.float32,), {}),
    "apply": ((lambda module: None,), {}),
    "_apply": ((lambda tensor: tensor,), {}),
    "to_empty": ((), {"device": "cpu"}),
    "half": ((), {}),
}
DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


def plain_for(name):
    return Net().to(DTYPES.get(name, torch.float32))


def returning_methods():
    """The methods of `nn.Module` that return the module itself, found by calling each that can be called."""
    for name, method in inspect.getmembers(nn.Module, inspect.isfunction):
        if (name.startswith("_") and name != "_apply") or name in ("forward", "compile"):
            continue
        args, kwargs = ARGUMENTS.get(name, ((), {}))
        try:
            inspect.signature(method).bind(None, *args, **kwargs)
        except TypeError:
            continue  # it needs arguments, and those known to return the module have theirs above
        module = plain_for(name)
        try:
            if getattr(module, name)(*args, **kwargs) is module:
                yield name
        except (RuntimeError, AssertionError, AttributeError, ImportError, NotImplementedError):
            pass  # for a device that this machine lacks


RETURNING = sorted(returning_methods())


def test_the_walk_finds_the_methods():
    modes, moves = {"train", "eval"}, {"to", "cpu", "to_empty", "share_memory", "_apply"}
    dtypes, others = {"half", "bfloat16", "float", "double", "type"}, {"requires_grad_", "apply"}
    assert set(RETURNING) >= modes | moves | dtypes | others
    assert "zero_grad" not in RETURNING


@pytest.mark.parametrize("name", RETURNING)
def test_a_method_that_returns_the_module_returns_the_wrapper(name):
    """M6."""
    model, _ = wrapped(plain_for(name))
    args, kwargs = ARGUMENTS.get(name, ((), {}))
    assert getattr(model, name)(*args, **kwargs) is model


@pytest.mark.parametrize("kind", ["Sequential", "ModuleList"])
@pytest.mark.parametrize(("name", "args"), [("append", (nn.ReLU(),)), ("extend", ([nn.ReLU()],)), ("insert", (0, nn.ReLU()))])
def test_so_do_the_methods_of_containers(kind, name, args):
    model, raw = wrapped(KINDS[kind]())
    expected = getattr(raw, name)(*args)
    assert getattr(model, name)(*args) is (model if expected is raw else None)
    assert sum(isinstance(m, nn.ReLU) for m in raw.children()) >= 2


def test_so_does_a_users_own_method():
    model, raw = wrapped()
    assert model.freeze() is model
    assert not raw.head.weight.requires_grad


def test_so_does_a_users_context_manager():
    model, raw = wrapped()
    with model as entered:
        assert entered is model
    assert raw.vocab == 0


def test_other_results_are_handed_on_as_they_are():
    model, raw = wrapped()
    assert model.both() == (raw, raw.head)
    assert type(model.twin()) is Net
    assert model.get_submodule("head") is raw.head
    assert model.zero_grad() is None


def test_a_chain_as_in_scripts():
    model, _ = wrapped()
    assert model.to("cpu").train().float().requires_grad_(True).eval() is model
    assert not model.training


@pytest.mark.parametrize("mode", [True, False])
def test_modes_are_the_modules_own(mode):
    model, raw = wrapped()
    model.train(mode)
    assert model.training is raw.training is raw.head.training is mode


def test_a_train_method_of_the_users_own_is_called():
    """N25: a `train` that keeps a BatchNorm frozen is not bypassed."""

    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    model, raw = wrapped(Frozen(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert model.train() is model
    assert raw.training
    assert not raw[1].training
    before = raw[1].running_mean.clone()
    model(X)
    assert torch.equal(raw[1].running_mean, before)


def test_a_bound_method_is_the_modules_own():
    model, raw = wrapped()
    assert model.forward == raw.forward
    assert hash(model.forward) == hash(raw.forward)
    assert inspect.ismethod(model.forward)
    assert torch.equal(pickle.loads(pickle.dumps(model.forward))(X), raw(X))


def test_an_object_that_keeps_a_method_can_be_copied():
    model, raw = wrapped()
    kept = copy.deepcopy({"call": model.forward})
    assert torch.equal(kept["call"](X), raw(X))
    assert copy.copy(model.freeze)() in (model, raw)


# --- copies and storage -------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_wrapped_and_shares_nothing():
    """W3, E5."""
    model, raw = wrapped(precision="bf16")
    made = copy.deepcopy(model)
    assert type(made) is type(model)
    assert made.__wrapped__ is not raw
    mine, its = ({t.untyped_storage().data_ptr() for t in m.state_dict().values()} for m in (model, made))
    assert not mine & its
    assert made(X).dtype == torch.float32
    assert torch.equal(made(X), model(X))


def test_a_deep_copy_calls_its_own_module():
    model, _ = wrapped()
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.head.weight.zero_()
        made.head.bias.fill_(3)
    assert made(X).eq(3).all()
    assert not model(X).eq(3).any()


def test_a_deep_copy_keeps_its_settings():
    model, _ = wrapped(inference="inference_mode", methods=("logits",))
    made = copy.deepcopy(model.eval())
    assert made(X).is_inference()
    assert made.logits(X).is_inference()


def test_a_copy_is_wrapped_and_shares_its_tensors():
    """W3."""
    model, raw = wrapped()
    made = copy.copy(model)
    assert type(made) is type(model)
    assert made.__wrapped__ is not raw
    assert made.head.weight is raw.head.weight


def test_copies_keep_what_is_shared():
    """E4: the link between the parameters and the optimizer, and between two names of one object."""
    raw = Net()
    model, _ = optimize(raw, sgd(raw), nn.MSELoss())
    (one, two), plain, optimizer = copy.deepcopy(([model, model], raw, sgd(raw)))
    assert one is two
    assert one.__wrapped__ is plain
    assert optimizer.param_groups[0]["params"][0] is one.head.weight


def test_moving_a_copy_leaves_the_original_alone():
    raw = Net()
    model, step = optimize(raw, sgd(raw, momentum=0.9), nn.MSELoss())
    step(X, torch.zeros(5, 2))
    copy.deepcopy(model).to("meta")
    assert model.device == torch.device("cpu")
    assert raw.head.weight.device.type == "cpu"
    step(X, torch.zeros(5, 2))


def test_a_copy_made_within_a_step_is_outside_of_it():
    copies = []

    def loss_fn(output, target):
        copies.append(copy.deepcopy(model).eval())
        return (output - target).square().mean()

    raw = Net()
    model, step = optimize(raw, sgd(raw), loss_fn)
    step(X, torch.zeros(5, 2))
    assert not copies[0](X).requires_grad


def test_a_tied_parameter_stays_tied_in_a_deep_copy():
    """E9."""
    made = copy.deepcopy(optimize(Tied()))
    assert made.head.weight is made.embed.weight


def test_both_names_of_a_tied_parameter_are_in_the_state_dict():
    """E8."""
    assert set(optimize(Tied()).state_dict()) == {"embed.weight", "head.weight"}


def test_a_subclass_of_the_wrapper_keeps_its_class_when_copied():
    """W3: a deep copy that names a fixed class would lose what a subclass does."""
    model, raw = wrapped()
    subclass = type("Special", (type(model),), {})
    special = subclass(raw, model._self_live)
    assert type(copy.deepcopy(special)) is type(copy.copy(special)) is subclass


class Wide(nn.Linear):
    def __init__(self, width: int = 8) -> None:
        super().__init__(4, width)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((3,), {}), ((), {"width": 3})])
def test_its_type_makes_plain_modules_of_the_users_class(args, kwargs):
    model = optimize(Wide())
    for made in (type(model)(*args, **kwargs), type(copy.deepcopy(model))(*args, **kwargs)):
        assert type(made) is Wide
        assert made(torch.ones(2, 4)).shape == (2, 3 if args or kwargs else 8)


def test_wrapped_models_of_one_class_have_one_type():
    first, second = optimize(Wide()), optimize(Wide())
    assert type(first) is type(second) is type(copy.deepcopy(first)) is not type(optimize(nn.Linear(1, 1)))


def test_a_class_is_not_kept_alive():
    kind = type("Short", (Net,), {})
    model = optimize(kind())
    model(X)
    alive = weakref.ref(kind)
    del kind, model
    gc.collect()
    gc.collect()  # classes are cycles: that of the wrapper, then its own
    assert alive() is None


@pytest.mark.parametrize("name", ["_self_attention", "_self_proxy", "_called", "_wrapping", "_moving"])
def test_names_that_a_proxy_may_have_are_the_modules(name):
    model, raw = wrapped()
    part = nn.Linear(4, 4)
    setattr(model, name, part)
    assert getattr(raw, name) is getattr(model, name) is part
    assert f"{name}.weight" in raw.state_dict()
    delattr(model, name)
    assert not hasattr(raw, name)
    raw.register_buffer(name, torch.ones(1))
    assert getattr(model, name) is getattr(raw, name)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_pickled_is_the_plain_module(precision, protocol):
    """W1, W2, M10."""
    model, raw = wrapped(precision=precision)
    loaded = pickle.loads(pickle.dumps(model, protocol))
    assert type(loaded) is Net
    assert torch.equal(loaded(X), raw(X))
    assert torch.equal(optimize(loaded, precision=precision)(X), model(X))


def test_torch_save_stores_the_plain_module():
    model, raw = wrapped(precision="bf16")
    file = io.BytesIO()
    torch.save({"model": model, "again": model, "raw": raw}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded["model"]) is Net
    assert loaded["model"] is loaded["again"] is loaded["raw"]


def test_a_checkpoint_loads_where_hotloop_is_not_installed(tmp_path):
    """M8, W1."""
    model = optimize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), precision="bf16")
    torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    code = f"""
import json, sys
sys.modules["hotloop"] = sys.modules["wrapt"] = None
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
state = torch.load({str(tmp_path / "state.pt")!r})
model.load_state_dict(state)
print(json.dumps([type(model).__name__, model(torch.ones(1, 4)).tolist()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name, output = json.loads(done.stdout)
    assert name == "Sequential"
    torch.testing.assert_close(torch.tensor(output), model.__wrapped__(torch.ones(1, 4)).detach())


def test_a_wrapped_model_inside_a_module_is_pickled_plain():
    outer = nn.Sequential(optimize(Net()), nn.ReLU())
    loaded = pickle.loads(pickle.dumps(outer))
    assert type(loaded[0]) is Net
    assert list(outer.state_dict()) == list(loaded.state_dict())


def test_averaged_model():
    """E1, F-7."""
    raw = Net()
    model, step = optimize(raw, sgd(raw), nn.MSELoss())
    average = AveragedModel(model)
    for _ in range(2):
        step(X, torch.ones(5, 2))
        average.update_parameters(model)
    assert type(average.module) is type(model)
    assert not torch.equal(average.module.head.weight, raw.head.weight)
    assert set(average.state_dict()) == {"n_averaged", "module.head.weight", "module.head.bias", "module.seen"}
    assert average.eval()(X).shape == (5, 2)


def test_averaged_model_of_a_parametrized_module():
    """E1: what a module's class is swapped for shows through the wrapper."""
    raw = nn.Linear(4, 2)
    model = optimize(raw)
    parametrizations.weight_norm(model)
    average = AveragedModel(model)
    average.update_parameters(model)
    torch.testing.assert_close(average(X), model(X))
    assert "parametrizations.weight.original0" in model.state_dict()


def test_evaluating_an_average_leaves_the_trained_statistics_alone():
    """E10."""
    raw = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = optimize(raw)
    model(X)
    average = AveragedModel(model)
    before = raw[1].running_mean.clone(), average.module[1].running_mean.clone()
    average.eval()(X)
    assert torch.equal(raw[1].running_mean, before[0])
    assert torch.equal(average.module[1].running_mean, before[1])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_what_torch_cannot_copy_is_wrapped_and_trained_all_the_same():
    """E2: nothing is deep-copied by `optimize`, and copying fails as it does for the plain module."""
    raw = torch.nn.utils.weight_norm(nn.Linear(4, 2))
    model, step = optimize(raw, sgd(raw), nn.MSELoss())
    step(X, torch.zeros(5, 2))
    with pytest.raises(RuntimeError) as plain:
        copy.deepcopy(raw)
    with pytest.raises(RuntimeError) as error:
        copy.deepcopy(model)
    assert str(error.value) == str(plain.value)


def test_pruning_through_the_wrapper():
    model, raw = wrapped()
    prune.l1_unstructured(model.head, "weight", amount=0.5)
    assert int((raw.head.weight == 0).sum()) == 4
    assert model(X).shape == (5, 2)


# --- moves and dtypes ---------------------------------------------------------------------------------------------------

MOVES: dict[str, Callable[[Any], Any]] = {
    "to": lambda m: m.to("meta"),
    "to(device=)": lambda m: m.to(device="meta"),
    "to(tensor)": lambda m: m.to(torch.empty(0, device="meta")),
    "to_empty": lambda m: m.to_empty(device="meta"),
    "parent": lambda m: nn.Sequential(m).to("meta"),
}


@pytest.mark.parametrize("move", MOVES)
def test_the_optimizer_follows_parameters_that_a_move_replaces(move):
    """D1: on the meta device `Module.to` makes new parameters."""
    raw = Tied()
    optimizer = sgd(raw, momentum=0.9)
    model, step = optimize(raw, optimizer, lambda out, y: out.sum())
    step(torch.tensor([1, 2]), torch.tensor(0))
    MOVES[move](model)
    assert model.device == torch.device("meta")
    assert raw.embed.weight.is_meta
    assert raw.head.weight is raw.embed.weight
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(raw.embed.weight)]
    assert list(optimizer.state) == [raw.embed.weight]
    assert optimizer.state[raw.embed.weight]["momentum_buffer"].is_meta


def test_a_move_there_already_changes_nothing():
    raw = Net()
    optimizer = sgd(raw, momentum=0.9)
    model, step = optimize(raw, optimizer, nn.MSELoss())
    step(X, torch.zeros(5, 2))
    before = [id(p) for p in raw.parameters()], {id(p): id(s["momentum_buffer"]) for p, s in optimizer.state.items()}
    model.to("cpu").cpu().float()
    assert ([id(p) for p in raw.parameters()], {id(p): id(s["momentum_buffer"]) for p, s in optimizer.state.items()}) == before


def test_loading_by_assignment_keeps_training_and_ties():
    """M19, F-27d."""
    raw, other = Tied(), Tied()
    optimizer = sgd(raw, momentum=0.9)
    model, step = optimize(raw, optimizer, lambda out, y: out.square().mean())
    step(torch.tensor([1, 2]), torch.tensor(0))
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert raw.head.weight is raw.embed.weight
    assert optimizer.param_groups[0]["params"] == [raw.embed.weight]
    before = raw.embed.weight.detach().clone()
    step(torch.tensor([1, 2]), torch.tensor(0))
    assert not torch.equal(raw.embed.weight, before)


def test_a_load_that_fails_leaves_the_optimizer_with_the_parameters_in_use():
    raw = Net()
    optimizer = sgd(raw)
    model, _ = optimize(raw, optimizer, nn.MSELoss())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"head.weight": torch.zeros(2, 4)}, assign=True)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in raw.parameters()]


DTYPE_CHANGES: dict[str, Callable[[Any], Any]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to(dtype)": lambda m: m.to(torch.float16),
    "to(device, dtype)": lambda m: m.to("cpu", torch.bfloat16),
    "to(dtype=)": lambda m: m.to(dtype=torch.float64),
    "to(tensor)": lambda m: m.to(torch.empty(0, dtype=torch.float64)),
    "type": lambda m: m.type(torch.float64),
    "type(text)": lambda m: m.type("torch.DoubleTensor"),
    "type(dst_type=)": lambda m: m.type(dst_type=torch.float16),
    "parent": lambda m: nn.Sequential(m).half(),
    "assign": lambda m: m.load_state_dict({k: v.half() for k, v in m.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("change", DTYPE_CHANGES)
def test_changing_the_floating_dtype_raises_and_changes_nothing(change):
    model, raw = wrapped()
    before = copy.deepcopy(raw.state_dict())
    with pytest.raises(TypeError, match="optimize again"):
        DTYPE_CHANGES[change](model)
    assert {t.dtype for t in raw.state_dict().values()} == {torch.float32}
    assert all(torch.equal(before[k], v) for k, v in raw.state_dict().items())


def test_the_text_names_the_call_the_rule_and_the_fix():
    with pytest.raises(TypeError, match=r"model\.half\(.*float32.*float16.*model\.__wrapped__.*optimize again"):
        wrapped()[0].half()


def test_the_plain_module_may_change_its_dtype_and_be_wrapped_anew():
    model, raw = wrapped()
    model.__wrapped__.double()
    again = optimize(raw)
    assert again(X.double()).dtype == torch.float64


def test_the_dtype_it_has_already_is_welcome():
    model, _ = wrapped(Net().double())
    assert model.double().to(torch.float64).type(torch.float64) is model


def test_memory_format_may_change():
    """E9, F-23: parameters keep their identity."""
    raw = nn.Conv2d(3, 4, 3)
    model, weight = optimize(raw), raw.weight
    assert model.to(memory_format=torch.channels_last) is model
    assert raw.weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


# --- containers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [
    pytest.param(lambda m: nn.Sequential(m), id="Sequential"),
    pytest.param(lambda m: nn.ModuleList([m]), id="ModuleList"),
    pytest.param(lambda m: nn.ModuleDict({"0": m}), id="ModuleDict"),
])  # fmt: skip
def test_as_a_child_it_stays_wrapped_and_keeps_clean_keys(place):
    """F-6c."""
    model, raw = wrapped(precision="bf16")
    outer = place(model)
    child = next(outer.children())
    assert child is model
    assert list(outer.state_dict()) == [f"0.{name}" for name in raw.state_dict()]
    assert child(X).dtype == torch.float32
    outer.eval()
    assert not raw.training


def test_inside_a_sequential_its_call_runs():
    model, raw = wrapped(precision="bf16")
    dtypes = []
    raw.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    out = nn.Sequential(model, nn.ReLU())(X)
    assert dtypes == [torch.bfloat16]
    assert out.dtype == torch.float32
    out.sum().backward()
    assert raw.head.weight.grad.dtype == torch.float32


def test_as_an_attribute_of_a_users_module():
    class Outer(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x).relu()

    model, _ = wrapped(precision="bf16")
    outer = Outer(model)
    assert outer.net is model
    assert outer(X).dtype == torch.float32
    assert [n for n, _ in outer.named_parameters()] == ["net.head.weight", "net.head.bias"]
