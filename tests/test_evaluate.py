"""`fast_eval`: modes, gradients, calls of models, results, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import io
import itertools
import json
import multiprocessing
import operator
import pickle
import types
import warnings
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Container, Iterable, Iterator, Sized
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from hotloop import fast_eval, optimize
from observing import Operators, in_threads

X, Y = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 1, 0, 1])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


IMAGES = torch.randn(96, 3, 32, 32)  # large enough to be folded in the second call

GLOBAL = net()


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def state(*models: nn.Module) -> tuple[bool, ...]:
    """What an evaluation changes, as it is here and now."""
    return (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), *(model.training for model in models))


def by_hand(model: nn.Module, x: Tensor = X) -> Tensor:
    twin = copy.deepcopy(getattr(model, "__wrapped__", model)).eval()
    with torch.no_grad():
        return twin(x)


# --- modes and gradients ------------------------------------------------------------------------------------------------


@fast_eval
def looks(model: Any, *others: Any) -> Any:
    return state(model), flags(model)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("frozen", [(), (2,), (1, 3), (0, 1, 2, 3, 4)], ids=str)
def test_eval_mode_and_no_gradients_while_it_runs(frozen: tuple[int, ...], wrapped: bool) -> None:
    """N18, N19, N20, N21"""
    raw = net()
    for i, module in enumerate(raw.modules()):
        module.training = i not in frozen
    before = flags(raw)
    model = optimize(raw) if wrapped else raw
    assert looks(model) == ((False, False, False), [False] * 5)
    assert flags(raw) == before
    assert state() == (True, False)


@pytest.mark.parametrize("make", [lambda: AveragedModel(net()), lambda: nn.DataParallel(net()), lambda: nn.ModuleList([net()])])
def test_models_of_models(make: Callable[[], nn.Module]) -> None:
    model = make()
    list(model.modules())[-1].training = False
    before = flags(model)
    assert looks(model)[1] == [False] * len(before)
    assert flags(model) == before


def test_the_evaluation_of_an_average_changes_no_statistics() -> None:
    """E10"""
    model = convnet()
    average = AveragedModel(model)
    before = {name: buffer.clone() for name, buffer in (*model.named_buffers(), *average.named_buffers())}

    @fast_eval
    def evaluate(average: nn.Module) -> float:
        return average(IMAGES).sum()  # type: ignore[no-any-return]

    for _ in range(3):
        evaluate(average)
    for name, buffer in (*model.named_buffers(), *average.named_buffers()):
        assert torch.equal(buffer, before[name]), name


def test_what_a_plain_loop_computes() -> None:
    """The old lines may stay: `eval()`, `no_grad()`, `item()`, `train()`."""

    @fast_eval
    def test(model: nn.Module, loader: DataLoader[Any]) -> dict[str, Any]:
        model.eval()
        hits, loss = 0, 0.0
        with torch.no_grad():
            for x, y in loader:
                output = model(x)
                loss += F.cross_entropy(output, y, reduction="sum").item()
                hits += (output.argmax(1) == y).sum()
        model.train()
        return {"loss": loss / len(loader.dataset), "accuracy": hits / len(loader.dataset)}

    for model in (net(), optimize(net())):
        model[2].eval()
        got = test(model, DataLoader(TensorDataset(X, Y), batch_size=2))
        output = by_hand(model)
        assert got == {
            "loss": pytest.approx(F.cross_entropy(output, Y).item()),
            "accuracy": pytest.approx((output.argmax(1) == Y).float().mean().item()),
        }
        assert [type(v) for v in got.values()] == [float, float]
        assert flags(model) == [True, True, True, False, True]


def test_an_error_leaves_everything_as_it_was() -> None:
    model = net()

    @fast_eval(precision="bf16")
    def fails(model: nn.Module) -> None:
        assert state(model) == (False, True, False)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails(model)
    assert state(model) == (True, False, True)
    assert "_compiled_call_impl" not in vars(model)


def test_gradients_inside_the_body() -> None:
    """N1, N7"""
    model = net()

    @fast_eval
    def residual(model: nn.Module) -> Any:
        x = X.clone()
        with torch.enable_grad():
            x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = slope.square().sum()
            weights = torch.autograd.grad(loss, model.parameters(), allow_unused=True)  # type: ignore[arg-type]
        return loss, [w for w in weights if w is not None]

    loss, weights = residual(model)
    twin = copy.deepcopy(model).eval()
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(twin(x).sum(), x, create_graph=True)
    expected = slope.square().sum()
    grads = torch.autograd.grad(expected, list(twin.parameters()), allow_unused=True)
    assert loss == pytest.approx(expected.item())
    for got, grad in zip(weights, [g for g in grads if g is not None], strict=True):
        torch.testing.assert_close(got, grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, in jacfwd
@pytest.mark.parametrize(
    "jacobian",
    [
        lambda f: torch.func.jacrev(f)(X[0]),
        lambda f: torch.func.jacfwd(f)(X[0]),
        lambda f: torch.autograd.functional.jacobian(f, X[0]),
        lambda f: torch.func.vjp(f, X[0])[1](torch.ones(2))[0],
        lambda f: torch.func.grad(lambda x: f(x).sum())(X[0]),
    ],
    ids=["jacrev", "jacfwd", "jacobian", "vjp", "grad"],
)
def test_jacobians(jacobian: Callable[[Any], Any]) -> None:
    """N9, N10, N11"""
    model = net()

    @fast_eval
    def evaluate(model: nn.Module) -> Tensor:
        with torch.enable_grad():
            return jacobian(lambda x: model(x[None])[0])  # type: ignore[no-any-return]

    twin = copy.deepcopy(model).eval()
    torch.testing.assert_close(evaluate(model), jacobian(lambda x: twin(x[None])[0]))
    assert evaluate(model).abs().sum() > 0


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_outputs_can_be_used_in_training(wrapped: bool) -> None:
    """N3, N4, N5"""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lazy = nn.Linear(4, 4), nn.LazyLinear(2)

        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("last", self.layer(x))
            return self.lazy(self.last)

    raw = Remembers()
    model = optimize(raw) if wrapped else raw
    output = fast_eval(lambda model: model(X))(model)
    assert not output.requires_grad
    nn.Linear(2, 1)(output).sum().backward()
    (raw(X).sum() + raw.last.sum()).backward()
    assert raw.lazy.weight.grad is not None


def test_inference_mode_on_wish() -> None:
    evaluate = fast_eval(inference="inference_mode")(lambda model: (model(X), torch.is_inference_mode_enabled()))
    output, on = evaluate(net())
    assert on
    assert output.is_inference()
    assert not torch.is_inference_mode_enabled()


def test_nested_evaluations() -> None:
    model = net()

    @fast_eval
    def inner(model: nn.Module) -> Any:
        return state(model)

    @fast_eval
    def outer(model: nn.Module) -> Any:
        return inner(model), state(model)

    assert outer(model) == ((False, False, False), (False, False, False))
    assert state(model) == (True, False, True)


def test_eight_threads_evaluate_one_model() -> None:
    """N25, F-17, F-18"""
    model = convnet()
    model[2].eval()
    before = flags(model)
    expected = by_hand(model, IMAGES)

    @fast_eval
    def evaluate(model: nn.Module) -> Any:
        return [model(IMAGES) for _ in range(3)], state(model)

    def work() -> None:
        for _ in range(5):
            outputs, inside = evaluate(model)
            assert inside == (False, False, False)
            for output in outputs:
                torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)

    in_threads([work] * 8)
    assert flags(model) == before
    assert all("_compiled_call_impl" not in vars(module) for module in model.modules())


def test_modes_are_switched_once_and_not_in_every_call() -> None:
    class Counting(nn.Sequential):
        calls = 0

        def train(self, mode: bool = True) -> Counting:
            self.calls += 1
            return super().train(mode)

    model = Counting(nn.Linear(4, 2), nn.Dropout())
    fast_eval(lambda model: [model(X) for _ in range(5)])(model)
    assert model.calls == 2, "off, and on again"


# --- where models are found ---------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self) -> None:
        self.model = net()

    @fast_eval
    def evaluate(self) -> Any:
        return state(self.model)

    @fast_eval
    @classmethod
    def by_class(cls, model: nn.Module) -> Any:
        return cls.__name__, state(model)

    @classmethod
    @fast_eval
    def by_class_outside(cls, model: nn.Module) -> Any:
        return cls.__name__, state(model)

    @fast_eval
    @staticmethod
    def static(model: nn.Module) -> Any:
        return state(model)

    @staticmethod
    @fast_eval
    def static_outside(model: nn.Module) -> Any:
        return state(model)

    @property
    @fast_eval
    def score(self) -> Any:
        return state(self.model)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)  # type: ignore[no-any-return]

    @fast_eval
    def validate(self) -> Any:
        return state(self, self.part), self(X), self.part(X)


OFF = (False, False, False)


def test_methods() -> None:
    trainer = Trainer()
    assert trainer.evaluate() == OFF
    assert Trainer.evaluate(trainer) == OFF
    assert trainer.score == OFF
    assert trainer.model.training


@pytest.mark.parametrize("name", ["by_class", "by_class_outside"])
def test_classmethods(name: str) -> None:
    class Child(Trainer): ...

    model = net()
    assert getattr(Trainer, name)(model) == ("Trainer", OFF)
    assert getattr(Child(), name)(model) == ("Child", OFF)
    assert model.training


@pytest.mark.parametrize("name", ["static", "static_outside"])
def test_staticmethods_get_no_further_argument(name: str) -> None:
    """W13"""
    model = net()
    assert getattr(Trainer, name)(model) == OFF
    assert getattr(Trainer(), name)(model) == OFF


def test_a_method_of_a_model() -> None:
    network = Network()
    inside, output, of_part = network.validate()
    assert inside == (*OFF, False)
    assert torch.equal(output, by_hand(network))
    assert torch.equal(of_part, output)
    assert all(flags(network))


def test_closures_globals_and_model() -> None:
    model = net()

    @fast_eval
    def closure() -> Any:
        return state(model)

    @fast_eval
    def by_global() -> Any:
        return state(GLOBAL)

    @fast_eval(model=model)
    def told() -> Any:
        return state(here["model"]())

    @fast_eval(model=[model, GLOBAL])
    def told_both() -> Any:
        return state(here["model"](), here["global"]())

    here = {"model": lambda: model, "global": lambda: GLOBAL}
    assert closure() == by_global() == told() == OFF
    assert told_both() == (*OFF, False)
    assert all(flags(model))
    assert all(flags(GLOBAL))


def test_without_a_model_it_warns_once() -> None:
    @fast_eval
    def evaluate(number: int) -> Any:
        return torch.ones(2).sum() + number, torch.is_grad_enabled()

    with pytest.warns(UserWarning, match=r"found no model.*evaluate.*@fast_eval\(model=net\)") as caught:
        assert evaluate(1) == (3.0, False)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(2)


def test_a_model_that_is_given_is_the_one_that_the_body_sees() -> None:
    model = net()

    @fast_eval
    def evaluate(given: nn.Module, nested: Any) -> Any:
        given.remark = "seen"  # type: ignore[assignment]
        return given is model, nested["model"] is model, type(given) is nn.Sequential

    assert evaluate(model, {"model": model}) == (True, True, True)
    assert model.remark == "seen"


# --- calls of models ----------------------------------------------------------------------------------------------------


def test_hooks_of_the_users_own_see_what_they_saw() -> None:
    model = net()
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(("pre", module is model, args[0] is X)))
    model.register_forward_hook(lambda module, args, output: seen.append(("post", module is model, output.dtype)))

    @fast_eval
    def evaluate(model: nn.Module) -> None:
        model(X)

    evaluate(model)
    assert seen == [("pre", True, True), ("post", True, torch.float32)]
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


def test_16_bit_outputs_come_back_in_float32() -> None:
    """A26, A27"""

    def evaluate(model: nn.Module) -> Any:
        return model(X), model(X).numpy().sum().item()

    assert fast_eval(evaluate)(optimize(net(), precision="bf16"))[0].dtype == torch.float32
    assert fast_eval(precision="bf16")(evaluate)(net())[0].dtype == torch.float32


def test_models_in_16_bits_of_their_own_go_on_in_16_bits() -> None:
    encoder, decoder = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2).bfloat16()

    @fast_eval
    def evaluate(encoder: nn.Module, decoder: nn.Module) -> Any:
        return decoder(encoder(X.bfloat16()) * 0.5)

    assert torch.equal(evaluate(encoder, decoder), decoder(encoder(X.bfloat16()) * 0.5).detach())


def test_the_precision_asked_for() -> None:
    @fast_eval(precision="bf16")
    def evaluate(model: nn.Module) -> Any:
        with Operators() as operators:
            output = model(X)
        return "aten._to_copy.default" in operators.seen, output.dtype, torch.is_autocast_enabled("cpu"), X @ X.T

    for model in (net(), optimize(net(), precision="fp32")):
        assert evaluate(model)[:3] == (True, torch.float32, True)
        assert evaluate(model)[3].dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_the_parts_of_a_list_of_models_are_called_as_models() -> None:
    models = nn.ModuleList([net(), net()])
    evaluate = fast_eval(precision="bf16")(lambda models: [model(X) for model in models])
    assert [output.dtype for output in evaluate(models)] == [torch.float32] * 2


def test_a_model_that_is_found_wrapped_and_plain() -> None:
    raw = net()
    model = optimize(raw, precision="bf16")

    @fast_eval(precision="fp32")
    def evaluate(raw: nn.Module) -> Any:
        return model(X)

    assert torch.equal(evaluate(raw), by_hand(raw))


def test_float32_asked_for_on_a_model_wrapped_in_16_bits() -> None:
    model = optimize(net(), precision="bf16")

    @fast_eval(precision="fp32")
    def evaluate(model: nn.Module) -> Any:
        return model(X)

    assert torch.equal(evaluate(model), by_hand(model))


def test_a_wrapped_model_keeps_its_precision_and_the_body_its_own() -> None:
    """What is computed from the outputs, such as a loss, is as it is in training."""
    model = optimize(net(), precision="bf16")

    @fast_eval
    def evaluate(model: nn.Module) -> Any:
        with Operators() as operators:
            output = model(X)
        probabilities = output.softmax(1)[:, 0]
        loss = F.binary_cross_entropy(probabilities, torch.ones(5))
        return (
            operators.count("_to_copy") > 1,
            (output @ output.T).dtype,
            loss,
            torch.is_autocast_enabled("cpu"),
        )

    cast, dtype, loss, on = evaluate(model)
    assert (cast, dtype, on) == (True, torch.float32, False)
    assert loss == pytest.approx(F.binary_cross_entropy(by_hand(model).softmax(1)[:, 0], torch.ones(5)).item(), rel=0.1)


@pytest.mark.parametrize("surrounded", [False, True])
def test_weights_are_cast_once_an_evaluation(surrounded: bool) -> None:
    model = optimize(net(), precision="bf16")

    @fast_eval
    def evaluate(model: nn.Module, calls: int) -> Any:
        with Operators() as operators:
            for _ in range(calls):
                model(X)
        return operators.count("_to_copy")

    with torch.autocast("cpu", torch.bfloat16, enabled=surrounded):
        one, three = evaluate(model, 1), evaluate(model, 3)
    # Two weights and two biases once; the input and, where there is one, the float32 output in each call.
    assert three - one == 2 * (one - 4)


def by_data(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].clone()


def into_data(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])


def as_a_vector(model: nn.Module, weights: dict[str, Tensor]) -> None:
    vector = torch.cat([weights[name].reshape(-1) for name, _ in model.named_parameters()])
    nn.utils.vector_to_parameters(vector, model.parameters())


def by_numpy(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.detach().numpy()[...] = weights[name].numpy()


@pytest.mark.parametrize("write", [nn.Module.load_state_dict, by_data, into_data, as_a_vector, by_numpy])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_casts_are_never_older_than_the_weights(wrapped: bool, write: Callable[..., object]) -> None:
    """F-14b: an autocast region keeps its casts while weights change, as where an average is swapped in for a second score."""
    model = optimize(net(), precision="bf16") if wrapped else net()
    states = [copy.deepcopy(model.state_dict()) for _ in range(3)]
    for i, weights in enumerate(states):
        weights["3.weight"].fill_(i)

    @fast_eval(precision="bf16")
    def evaluate_all(model: nn.Module) -> Any:
        outputs = []
        for weights in states:
            write(model, weights)
            outputs.append(model(X))
        return outputs

    outputs = evaluate_all(model)
    for output, weights in zip(outputs, states, strict=True):
        model.load_state_dict(weights)
        torch.testing.assert_close(output, by_hand(model), rtol=0.1, atol=0.1)


def test_parameters_of_unusual_dtypes_are_no_obstacle() -> None:
    model = net()
    model.scale = nn.Parameter(torch.ones(3).to(torch.float8_e5m2), requires_grad=False)
    model.index = nn.Parameter(torch.arange(3), requires_grad=False)
    assert fast_eval(precision="bf16")(lambda model: model(X).sum())(model) == pytest.approx(
        by_hand(model).sum().item(), abs=0.1
    )


@pytest.mark.parametrize("cached_before", [False, True])
def test_casts_of_an_evaluation_do_not_reach_a_surrounding_training(cached_before: bool) -> None:
    """A15, A16, A17, A19"""
    model = net()
    inner = fast_eval(lambda model: model(X))
    with torch.autocast("cpu", torch.bfloat16):
        if cached_before:
            model(X)
        with torch.no_grad():
            model[0].weight.mul_(2)
        output = inner(model)
        torch.testing.assert_close(output, by_hand(model).float(), rtol=0.1, atol=0.1)
        model(X).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.dim() == 2)


def test_no_casts_stay_in_a_surrounding_region() -> None:
    model = net()

    def casts(run: Callable[[], Any]) -> int:
        with Operators() as operators:
            run()
        return operators.count("_to_copy")

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first = casts(lambda: model(X))
        assert casts(lambda: model(X)) < first, "torch keeps them"
        fast_eval(lambda model: model(X))(model)
        assert casts(lambda: model(X)) == first


def test_training_inside_the_body_is_seen() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    @fast_eval(precision="bf16")
    def adapts(model: nn.Module) -> Any:
        before = model(X)
        with torch.enable_grad():
            model(X).float().square().sum().backward()
        optimizer.step()
        return before, model(X)

    before, after = adapts(model)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, by_hand(model), rtol=0.1, atol=0.1)


def test_convolutions_take_up_their_batchnorm() -> None:
    model = optimize(convnet())
    expected = by_hand(model, IMAGES)

    @fast_eval
    def evaluate(model: nn.Module) -> Any:
        counts, outputs = [], []
        for _ in range(3):
            with Operators() as operators:
                outputs.append(model(IMAGES))
            counts.append(operators.count("batch_norm"))
        return counts, outputs

    counts, outputs = evaluate(model)
    assert counts == [1, 1, 0], "the second one checks the first folded result"
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert evaluate(model)[0] == [0, 0, 0]
    assert model._self_live.plan["fold_batchnorm"].choice == "on"
    assert evaluate(convnet())[0] == [1, 1, 0]


@pytest.mark.parametrize("wish", [False, None])
def test_folding_can_be_switched_off(wish: Any) -> None:
    model = optimize(convnet())
    evaluate = fast_eval(fold_batchnorm=wish)(lambda model: [model(IMAGES) for _ in range(3)])
    assert all(torch.equal(output, by_hand(model, IMAGES)) for output in evaluate(model))
    assert "switched off" in model._self_live.plan["fold_batchnorm"].why


def test_a_model_wrapped_with_exact_keeps_every_bit() -> None:
    model = optimize(convnet(), exact=True)
    evaluate = fast_eval(lambda model: [model(IMAGES) for _ in range(3)])
    assert all(torch.equal(output, by_hand(model, IMAGES)) for output in evaluate(model))
    assert "exact" in model._self_live.plan["fold_batchnorm"].why
    for wish in ({"precision": "bf16"}, {"precision": "fp32"}):
        with pytest.raises(ValueError, match=r"precision='\w+'.*exact=True.*leave precision away"):
            fast_eval(**wish)(lambda model: model(IMAGES))(model)
    with pytest.raises(ValueError, match=r"fold_batchnorm=True\).*exact=True.*leave fold_batchnorm away"):
        fast_eval(fold_batchnorm=True)(lambda model: model(IMAGES))(model)
    assert all(flags(model))


class NotDirectly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (net(), "no convolutions"),
        (nn.Sequential(nn.Conv2d(3, 3, 3)), "no convolutions"),
        (NotDirectly(), "no BatchNorm takes the output"),
    ],
)
def test_folding_that_is_demanded_and_cannot_be_done(model: nn.Module, reason: str) -> None:
    evaluate = fast_eval(fold_batchnorm=True)(lambda model: model(X if isinstance(model[0], nn.Linear) else IMAGES))
    if isinstance(model, NotDirectly):
        evaluate = fast_eval(fold_batchnorm=True)(lambda model: model(IMAGES))
    with pytest.raises(ValueError, match=rf"fast_eval\(fold_batchnorm=True\): .*{reason}.*leave fold_batchnorm away"):
        evaluate(model)
    assert all(flags(model))


def test_folding_that_is_demanded_and_done() -> None:
    evaluate = fast_eval(fold_batchnorm=True)(lambda model, loss_fn: [model(IMAGES) for _ in range(3)])
    assert len(evaluate(convnet(), nn.CrossEntropyLoss())) == 3


def test_a_copy_made_inside_is_plain() -> None:
    model = convnet()

    @fast_eval
    def keeps(model: nn.Module) -> Any:
        model(IMAGES)
        file = io.BytesIO()
        torch.save(model, file)
        return copy.deepcopy(model), pickle.dumps(model), file

    made, stored, file = keeps(model)
    file.seek(0)
    assert b"hotloop" not in stored
    for other in (made, pickle.loads(stored), torch.load(file, weights_only=False)):
        assert "_compiled_call_impl" not in vars(other)
        nn.init.zeros_(other[0].weight)
        assert not torch.allclose(other.eval()(IMAGES), by_hand(model, IMAGES))


def test_models_inside_models_are_called_as_they_call_them() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = nn.Linear(4, 4), []

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            self.seen.append(x.dtype)
            return x

    model = Outer()

    @fast_eval(precision="bf16")
    def evaluate(model: Any, part: nn.Module) -> Any:
        return model(X), part(X)

    assert [t.dtype for t in evaluate(model, model.inner)] == [torch.float32] * 2
    assert model.seen == [torch.bfloat16]


def test_a_loss_function_is_no_model_to_be_cast() -> None:
    @fast_eval(precision="fp32")
    def evaluate(model: nn.Module, loss_fn: nn.Module) -> Any:
        return loss_fn(model(X), Y), "_compiled_call_impl" in vars(loss_fn), "_compiled_call_impl" in vars(model)

    assert evaluate(net(), nn.CrossEntropyLoss())[1:] == (False, True)


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_a_compiled_module_stays_compiled() -> None:
    model = net()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    output = fast_eval(lambda model: model(X))(model)
    assert model._compiled_call_impl is compiled
    torch.testing.assert_close(output, by_hand(model))


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_compiling_inside_the_body_stays() -> None:
    model = net()

    @fast_eval
    def compiles(model: nn.Module) -> Any:
        model.compile(backend="eager")
        return model(X)

    torch.testing.assert_close(compiles(model), by_hand(model))
    assert model._compiled_call_impl is not None
    assert all(flags(model))


@pytest.mark.filterwarnings("ignore:.torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model() -> None:
    model = net()
    scripted = torch.jit.script(model)
    torch.testing.assert_close(fast_eval(lambda model: model(X))(scripted), by_hand(model))
    assert all(flags(scripted))


# --- results ------------------------------------------------------------------------------------------------------------

Result = namedtuple("Result", "loss name")


@dataclass(frozen=True)
class Report:
    loss: Any
    curve: Any


SCALARS = {
    "float": (torch.tensor(0.5), 0.5),
    "int64": (torch.tensor(2**53 + 1), 2**53 + 1),
    "bool": (torch.tensor(True), True),
    "complex": (torch.tensor(1 + 2j), 1 + 2j),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "parameter": (nn.Parameter(torch.tensor(0.5)), 0.5),
}


@pytest.mark.parametrize(("scalar", "number"), SCALARS.values(), ids=SCALARS)
def test_a_scalar_becomes_a_number(scalar: Tensor, number: Any) -> None:
    got = fast_eval(lambda model: scalar)(GLOBAL)
    assert (got, type(got)) == (number, type(number))


def test_scalars_at_any_depth() -> None:
    s = torch.tensor(0.5)
    given = {
        "list": [s, (s, {"deep": s})],
        "tuple": Result(s, "a"),
        "report": Report(s, torch.ones(3, requires_grad=True)),
        "vector": torch.ones(1),
        "text": "b",
        "none": None,
    }
    got = fast_eval(lambda model: given)(GLOBAL)
    assert got["list"] == [0.5, (0.5, {"deep": 0.5})]
    assert got["tuple"] == Result(0.5, "a")
    assert (got["report"].loss, got["report"].curve.requires_grad) == (0.5, False)
    assert got["vector"].shape == (1,)
    assert json.dumps([got["list"], got["tuple"], got["text"], got["none"]])
    assert given["list"][0] is s, "what the body holds stays as it is"


def test_larger_tensors_stay_as_they_are() -> None:
    plain, attached = torch.ones(3), torch.ones(3, requires_grad=True)
    got = fast_eval(lambda model: (plain, attached))(GLOBAL)
    assert got[0] is plain
    assert got[1].data_ptr() == attached.data_ptr()
    assert not got[1].requires_grad


def test_a_result_without_scalars_is_the_object_itself() -> None:
    given = {"a": [1, 2], "b": object()}
    assert fast_eval(lambda model: given)(GLOBAL) is given
    assert fast_eval(lambda model: model)(GLOBAL) is GLOBAL


# --- arguments ----------------------------------------------------------------------------------------------------------


def test_arguments_keep_their_identity() -> None:
    log: list[Any] = []
    batches = {"x": X, "more": [Y]}

    @fast_eval
    def evaluate(model: nn.Module, log: list[Any], batches: Any, *, best: Any = None) -> Any:
        log.append(model(X).sum().item())
        return batches is given, best is log

    given = batches
    assert evaluate(net(), log, batches, best=log) == (True, True)
    assert len(log) == 1


def test_a_data_loader_is_prefetched() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)

    @fast_eval
    def evaluate(model: nn.Module, loader: Any, named: Any) -> Any:
        return [
            (type(given).__name__, isinstance(given, DataLoader), len(given), [len(x) for x, _ in given])
            for given in (loader, named["test"], named["nested"][0])
        ]

    got = evaluate(net(), loader, {"test": loader, "nested": [loader]})
    assert got == [("Prefetch", True, 3, [2, 2, 1])] * 3


def test_without_a_model_a_loader_is_left_alone() -> None:
    loader = DataLoader(TensorDataset(X, Y))
    with pytest.warns(UserWarning, match="found no model"):
        assert fast_eval(lambda loader: type(loader) is DataLoader)(loader)


@dataclass
class Run:
    batches: Any
    best: float = 0.0


def write(model: nn.Module, state: Any, log: Any) -> Any:
    model(X)
    state["best"] = state.pop("worst") + 1
    state["same"] = state["loader"]
    state["inner"]["seen"] = True
    log[1:1] = ["inserted"]
    log.append(log[0])
    return 0


def write_and_fail(model: nn.Module, state: Any, log: Any) -> Any:
    write(model, state, log)
    raise KeyError("mine")


def write_in_pieces(model: nn.Module, state: Any, log: Any) -> Any:
    yield 1
    write(model, state, log)
    yield 2


async def write_in_a_coroutine(model: nn.Module, state: Any, log: Any) -> Any:
    await asyncio.sleep(0)
    write(model, state, log)


RUN = {
    write: lambda function, *args: function(*args),
    write_and_fail: lambda function, *args: function(*args),
    write_in_pieces: lambda function, *args: (values := function(*args), next(values), next(values)),  # not to its end
    write_in_a_coroutine: lambda function, *args: asyncio.run(function(*args)),
}


@pytest.mark.parametrize("function", RUN)
def test_what_the_body_writes_into_its_arguments_reaches_the_caller(function: Any) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    state, log = {"loader": loader, "worst": 1, "inner": {"test": [loader]}}, [loader]
    same = (state, state["inner"], log)
    kept = None
    with contextlib.suppress(KeyError):
        kept = RUN[function](fast_eval(function), net(), state, log)
    assert state == {"loader": loader, "inner": {"test": [loader], "seen": True}, "best": 2, "same": loader}
    assert log == [loader, "inserted", loader]
    assert all(map(operator.is_, same, (state, state["inner"], log)))
    del kept


@pytest.mark.simgpu
class TestOnASecondDevice:
    """Everything begins on the host; the model is on the device."""

    def test_what_the_body_writes_into_arguments_that_were_moved(self, device: str) -> None:
        @fast_eval
        def evaluate(model: nn.Module, state: Any, log: Any, run: Any) -> Any:
            state["new"] = model(state["x"])
            log.appendleft(state["x"])
            run.best = 0.5
            return 0

        x = torch.ones(3, 4)
        state, log, run = defaultdict(list, x=x), deque([x]), Run([x])
        evaluate(self.model(device), state, log, run)
        assert state["x"] is x
        assert state["new"].device == torch.device(device)
        assert [item is x for item in log] == [True, True]
        assert (run.best, run.batches[0] is x) == (0.5, True)

    @pytest.fixture
    def device(self) -> str:
        import simgpu

        simgpu.counts.clear()
        return f"{simgpu.NAME}:0"

    @staticmethod
    def model(device: str) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)

    @pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
    def test_labels_meet_predictions(self, device: str, wrapped: bool) -> None:
        import simgpu

        @fast_eval
        def evaluate(model: nn.Module, loader: Any, weights: Tensor) -> Any:
            total = hits = 0
            for x, y in loader:
                output = model(x)
                hits = hits + (output.argmax(1) == y).sum()
                total = total + F.cross_entropy(output, y, weight=weights)
            return {"hits": hits, "loss": total, "nested": [(total * 2,)]}

        model = self.model(device)
        host = copy.deepcopy(model).to("cpu")
        if wrapped:
            model = optimize(model)
        loader = DataLoader(TensorDataset(X, Y), batch_size=5)
        evaluate(model, loader, torch.ones(2))
        simgpu.counts.clear()
        got = evaluate(model, loader, torch.ones(2))
        assert got["hits"] == (host(X).argmax(1) == Y).sum().item()
        assert got["loss"] == pytest.approx(F.cross_entropy(host(X), Y).item())
        assert got["nested"] == [(pytest.approx(2 * got["loss"]),)]
        assert simgpu.counts["d2h"] == 1, "all numbers in one transfer"
        assert simgpu.counts["aten::_local_scalar_dense"] == 0

    def test_inputs_are_moved_in_the_call_of_a_plain_model(self, device: str) -> None:
        model = self.model(device)
        output = fast_eval(lambda model: model(X))(model)
        assert output.device.type == model[0].weight.device.type

    def test_a_generator_reads_each_value_in_one_transfer(self, device: str) -> None:
        import simgpu

        @fast_eval
        def evaluate(model: nn.Module) -> Iterator[Any]:
            for _ in range(2):
                output = model(X)
                yield {"sum": output.sum(), "max": output.max()}

        list(evaluate(model := self.model(device)))
        simgpu.counts.clear()
        values = list(evaluate(model))
        assert all(type(v) is float for value in values for v in value.values())
        assert simgpu.counts["d2h"] == 2


# --- functions of every kind --------------------------------------------------------------------------------------------


@fast_eval
def at_module_level(number: int, model: nn.Module = GLOBAL) -> Any:
    """A function for other processes."""
    return number, state(model)


def test_it_pickles_by_name() -> None:
    """W5"""
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
    assert copy.deepcopy(at_module_level) is copy.copy(at_module_level) is at_module_level
    assert pickle.loads(pickle.dumps(Trainer.static))(net()) == OFF
    assert pickle.loads(pickle.dumps(Trainer.by_class))(net()) == ("Trainer", OFF)
    trainer = Trainer()
    assert pickle.loads(pickle.dumps(trainer.evaluate))() == OFF
    assert copy.deepcopy(trainer.evaluate).__self__ is not trainer


def test_what_cannot_be_found_by_name_does_not_pickle() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(fast_eval(lambda model: 1))


def test_other_processes_run_it() -> None:
    """W5"""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(at_module_level, [1, 2])) == [(1, OFF), (2, OFF)]


def test_it_looks_like_the_function() -> None:
    assert at_module_level.__name__ == "at_module_level"
    assert at_module_level.__doc__ == "A function for other processes."
    assert list(inspect.signature(at_module_level).parameters) == ["number", "model"]
    assert isinstance(at_module_level, types.FunctionType)


def test_with_and_without_arguments() -> None:
    for decorate in (fast_eval, fast_eval(), fast_eval(precision="auto"), fast_eval(model=None)):
        assert decorate(lambda model: state(model))(net()) == OFF


def test_functions_that_others_have_decorated() -> None:
    def evaluate(model: nn.Module, shift: int = 0) -> Any:
        return state(model)

    model = net()
    assert fast_eval(torch.no_grad()(evaluate))(model) == OFF
    assert torch.enable_grad()(fast_eval(evaluate))(model) == OFF
    assert fast_eval(functools.partial(evaluate, shift=3))(model) == OFF
    assert fast_eval(functools.lru_cache(evaluate))(model) == OFF
    assert fast_eval(fast_eval(evaluate))(model) == OFF
    assert all(flags(model))


def test_a_bad_call_raises_what_python_raises() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fast_eval(lambda model, x: model(x))(net())


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a class": (lambda: fast_eval(type("C", (nn.Module,), {})), TypeError, "@fast_eval class C.*decorate the methods"),
    "a model": (lambda: fast_eval(net()), TypeError, r"fast_eval\(Sequential.*@fast_eval\(model=net\)"),
    "a wrapped model": (lambda: fast_eval(optimize(net())), TypeError, r"@fast_eval\(model=net\)"),
    "a number": (lambda: fast_eval(3), TypeError, r"fast_eval\(int\).*next to the `def`"),
    "a property": (lambda: fast_eval(property(len)), TypeError, r"fast_eval\(property\).*below @property"),
    "no such precision": (lambda: fast_eval(precision="bf32"), ValueError, "precision='bf32'.*'auto', 'fp32', 'bf16', 'fp16'"),
    "no such inference": (lambda: fast_eval(inference="grad"), ValueError, "inference='grad'.*'no_grad', 'inference_mode'"),
    "no such folding": (lambda: fast_eval(fold_batchnorm="yes"), ValueError, "fold_batchnorm='yes'.*'auto', True, False"),
    "no model": (lambda: fast_eval(model="net"), TypeError, r"fast_eval\(model=str\).*torch.nn.Module"),
    "a list with something else": (lambda: fast_eval(model=[net(), 3]), TypeError, r"fast_eval\(model=int\)"),
}


@pytest.mark.parametrize(("call", "error", "text"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_at_the_decoration(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    """W11"""
    with pytest.raises(error, match=text):
        call()


def test_async_and_generators_are_still_what_they_are() -> None:
    """W9"""

    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    assert inspect.iscoroutinefunction(fast_eval(coroutine))
    assert inspect.isgeneratorfunction(fast_eval(generator))
    assert inspect.isasyncgenfunction(fast_eval(async_generator))
    assert not inspect.iscoroutinefunction(fast_eval(lambda: 1))
    assert inspect.iscoroutinefunction(asyncio.sleep)


# --- inside compiled code -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_it_is_not_skipped_inside_compiled_code() -> None:
    """W14, W15, F-10"""
    model = net()

    @fast_eval(precision="bf16")
    def evaluate(model: nn.Module, x: Tensor) -> Any:
        output = model(x)
        return {"output": output, "state": state(model), "sum": output.sum()}

    def caller(x: Tensor) -> Any:
        return evaluate(model, x * 1)

    torch._dynamo.reset()
    for _ in range(2):
        got, expected = torch.compile(caller, backend="eager")(X), caller(X)
        assert got["state"] == expected["state"] == (False, True, False)
        assert got["output"].dtype == torch.float32, "the body itself is not compiled: its models are called as models"
        assert type(got["sum"]) is float
        assert got["sum"] == pytest.approx(expected["sum"])
        assert not got["output"].requires_grad
    assert all(flags(model))


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_a_method_and_a_compiled_evaluation() -> None:
    trainer, model = Trainer(), net()
    bound = trainer.evaluate
    for call, expected in (
        (lambda: trainer.evaluate(), OFF),
        (lambda: Trainer.evaluate(trainer), OFF),
        (lambda: bound(), OFF),
        (bound, OFF),
        (lambda: Trainer.by_class(model), ("Trainer", OFF)),
        (lambda: trainer.by_class(model), ("Trainer", OFF)),
        (lambda: Trainer.by_class_outside(model), ("Trainer", OFF)),
        (lambda: Trainer.static(model), OFF),
        (lambda: trainer.static(model), OFF),
        (lambda: trainer.static_outside(model), OFF),
    ):
        torch._dynamo.reset()
        assert torch.compile(call, backend="eager")() == expected
    assert all(flags(trainer.model))


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_a_generator_inside_compiled_code() -> None:
    """T11"""
    model = net()

    @fast_eval
    def values(model: nn.Module) -> Iterator[Any]:
        for i in range(3):
            yield i, state(model), model(X).sum()

    def caller() -> Any:
        return [value for value in values(model)], torch.is_grad_enabled()  # noqa: C416

    torch._dynamo.reset()
    got, grad = torch.compile(caller, backend="eager")()
    assert [(i, inside, type(number)) for i, inside, number in got] == [(i, OFF, float) for i in range(3)]
    assert grad
    assert all(flags(model))


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_a_compiled_model_inside_stays_compiled() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = net()
    compiled = torch.compile(model, backend=counter)
    evaluate = fast_eval(lambda model: [model(X) for _ in range(3)])
    for output in evaluate(compiled):
        torch.testing.assert_close(output, by_hand(model))
    once = counter.frame_count
    assert once >= 1
    evaluate(compiled)
    assert counter.frame_count == once, "nothing is compiled again"
    torch._dynamo.reset()


# --- models and bodies that are found late ------------------------------------------------------------------------------


class Looked(nn.Module):
    """Keeps how each of its calls ran: in training mode, with gradients."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2), []

    def forward(self, x):
        self.calls.append((self.training, torch.is_grad_enabled()))
        return self.layer(x)


@pytest.mark.parametrize(
    "late",
    [
        lambda m, xs: map(lambda x: m(x).sum(), xs),  # noqa: C417
        lambda m, xs: zip(map(lambda x: m(x).sum(), xs), strict=True),  # noqa: C417
        lambda m, xs: filter(None, (m(x).sum() for x in xs)),
        lambda m, xs: itertools.islice((m(x).sum() for x in xs), 2),
        lambda m, xs: itertools.chain((m(x).sum() for x in xs), []),
        lambda m, xs: enumerate(m(x).sum() for x in xs),
        lambda m, xs: {"totals": (m(x).sum() for x in xs)},
        lambda m, xs: [[map(m, xs)]],
    ],
)
def test_a_lazy_result_is_evaluated_as_it_runs(late):
    model = Looked()
    result = fast_eval(late)(model, [torch.ones(3, 4)] * 2)
    while isinstance(result, dict | list):
        result = next(iter(result.values() if isinstance(result, dict) else result))
    assert len(list(result)) == 2
    assert model.calls == [(False, False)] * 2
    assert model.training


class Scores:
    @fast_eval
    def score(self): ...


ABSTRACT = [Sized, Container, Iterable, contextlib.AbstractContextManager, contextlib.AbstractAsyncContextManager]


@pytest.mark.parametrize("kind", ABSTRACT)
@pytest.mark.parametrize("decorated", [fast_eval(net), Scores().score], ids=["function", "method"])
def test_a_decorated_function_is_no_container(decorated, kind):
    assert isinstance(decorated, Callable)
    assert not isinstance(decorated, kind)


def test_a_context_manager_cannot_evaluate_the_block_of_a_with():
    def held(model):
        yield model(torch.ones(1, 4))

    with pytest.raises(
        TypeError, match=r"fast_eval\(contextmanager\(held\)\).*@fast_eval over the function that has the block"
    ):
        fast_eval(contextlib.contextmanager(held))(Looked())


@pytest.mark.parametrize("wish", [{}, {"precision": "bf16"}])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_called_from_a_thread_of_the_body(wrapped, wish):
    model = optimize(Looked(), device="cpu", exact=False) if wrapped else Looked()
    x = torch.rand(3, 4)

    @fast_eval(**wish)
    def evaluate(model):
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(model, x).result()
        return [there.requires_grad, torch.equal(there, model(x))]

    assert evaluate(model) == [False, True]
    assert model.calls == [(False, False)] * 2


class Holder:
    def __init__(self):
        self.net = Looked()

    def total(self):
        return self.net(torch.ones(3, 4)).sum()

    def __call__(self):
        return self.total()

    @property
    @fast_eval
    def shown(this):  # noqa: N805 - no name is reserved for it
        return this.total()


@pytest.mark.parametrize(
    "call",
    [
        lambda holder: fast_eval(partial(lambda m: m(torch.ones(3, 4)).sum(), holder.net))(),
        lambda holder: fast_eval(partial(holder.total))(),
        lambda holder: fast_eval(partial(Holder.total, holder))(),
        lambda holder: fast_eval(holder)(),
        lambda holder: fast_eval(lambda f: f())(partial(holder.net, torch.ones(3, 4))),
        lambda holder: holder.shown,
        lambda holder: fast_eval(lambda trainer, loader: trainer.total())(holder, []),
        lambda holder: fast_eval(lambda trainer: trainer.total())(trainer=holder),
    ],
)
def test_models_behind_partials_callable_objects_and_first_arguments(call):
    holder = Holder()
    call(holder)
    assert holder.net.calls == [(False, False)]


def test_fast_eval_called_with_what_the_function_takes():
    with pytest.raises(TypeError, match=r"fast_eval\(Looked, list\): it decorates a function.*write fast_eval\(function\)"):
        fast_eval(Looked(), [])
    with pytest.raises(TypeError, match=r"fast_eval\(total, Looked, list\)"):
        fast_eval(Holder.total, Looked(), [])


def test_a_model_that_a_module_holds_apart_is_found_through_a_property():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = [Looked()]

        @property
        @fast_eval
        def score(self):
            return self.teacher[0](torch.ones(3, 4)).sum()

    student = Student()
    assert isinstance(student.score, float)
    assert student.teacher[0].calls == [(False, False)]


def test_what_others_add_to_a_list_meanwhile_is_kept() -> None:
    model, mine = nn.Linear(4, 2), [DataLoader(TensorDataset(X), batch_size=5)]

    @fast_eval
    def evaluate(model: nn.Module, given: list[Any]) -> None:
        given.append("by the body")
        mine.append("by the caller")

    evaluate(model, mine)
    assert mine[1:] == ["by the body", "by the caller"]
