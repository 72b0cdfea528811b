"""BatchNorm folded into the convolution before it: the same results, fewer operators, never stale, nothing left behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.nn.utils import prune

from hotloop import _deferred, _folded_weights, fast_eval
from hotloop._deferred import settled
from hotloop._detours import close_detour, open_detour
from hotloop._folding import Folding
from hotloop._modes import submodules
from observing import Operators, in_threads


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold in the first call in which it is possible, however small the feature map."""
    monkeypatch.setattr(_folded_weights, "PRICE", -(10**9))
    monkeypatch.setattr(_folded_weights, "OVERHEAD", 0)


pytestmark = pytest.mark.usefixtures("eager")


@contextmanager
def folding(model: nn.Module) -> Iterator[Folding]:
    """Calls of `model` are folded, and gradients off."""
    found = Folding(list(submodules([model])))
    with ExitStack() as stack, torch.no_grad():
        for module, kind in found.diversions:
            open_detour(module, kind)
            stack.callback(close_detour, module)
        yield found


def called(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return settled(model, args, kwargs)


def norms_run(model: nn.Module, *args: Any) -> int:
    """How many BatchNorm kernels one call runs."""
    with Operators() as operators:
        called(model, *args)
    return operators.count("batch_norm")


def awake(model: nn.Module) -> nn.Module:
    """In eval mode, with statistics and affine parameters that are not those of a fresh layer."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.bias):
                if tensor is not None:
                    tensor.data.normal_()
            for tensor in (module.running_var, module.weight):
                if tensor is not None:
                    tensor.data.uniform_(0.5, 2.0)
    return model.eval()


class Residual(nn.Module):
    inplace = True

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)
        self.skip = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        out = self.bn1(out)
        out = F.relu(out, inplace=self.inplace)
        out = self.bn2(self.conv2(out))
        return self.head((out + self.skip(x)).mean((2, 3)))


def residual() -> nn.Module:
    return awake(Residual())


def pair(conv: nn.Module, norm: nn.Module) -> nn.Module:
    return awake(nn.Sequential(conv, norm))


X = torch.randn(4, 3, 8, 8)


PAIRS = {
    "1d": (lambda: pair(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6)), (2, 3, 9)),
    "2d": (lambda: pair(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), (2, 3, 9, 9)),
    "3d": (lambda: pair(nn.Conv3d(3, 6, 3, bias=False), nn.BatchNorm3d(6)), (2, 3, 5, 5, 5)),
    "transposed 1d": (lambda: pair(nn.ConvTranspose1d(3, 6, 3), nn.BatchNorm1d(6)), (2, 3, 9)),
    "transposed 2d": (lambda: pair(nn.ConvTranspose2d(3, 6, 3, 2, output_padding=1), nn.BatchNorm2d(6)), (2, 3, 9, 9)),
    "transposed 3d": (lambda: pair(nn.ConvTranspose3d(3, 6, 3), nn.BatchNorm3d(6)), (2, 3, 4, 4, 4)),
    "grouped": (lambda: pair(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)), (2, 4, 9, 9)),
    "depthwise": (lambda: pair(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4)), (2, 4, 9, 9)),
    "circular padding": (lambda: pair(nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(6)), (2, 3, 9, 9)),
    "same padding": (lambda: pair(nn.Conv2d(3, 6, 3, padding="same", dilation=2), nn.BatchNorm2d(6)), (2, 3, 9, 9)),
    "large eps": (lambda: pair(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, eps=0.5)), (2, 3, 9, 9)),
    "affine=False": (lambda: pair(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)), (2, 3, 9, 9)),
    "float64": (lambda: pair(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)).double(), (2, 3, 9, 9)),
    "batch of one": (lambda: pair(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), (1, 3, 9, 9)),
    "a subclass that only sets itself up": (
        lambda: pair(
            type("Own", (nn.Conv2d,), {"__init__": lambda self: nn.Conv2d.__init__(self, 3, 6, 3)})(), nn.BatchNorm2d(6)
        ),
        (2, 3, 9, 9),
    ),
}


@pytest.mark.parametrize(("make", "shape"), PAIRS.values(), ids=PAIRS)
def test_the_result_is_the_same_to_rounding(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make()
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        expected = model(x)
    tolerance = 1e-12 if x.dtype == torch.float64 else 1e-5
    with folding(model):
        first = called(model, x)
        assert norms_run(model, x) == 1, "the second call checks the first folded result"
        assert norms_run(model, x) == 0
        folded = called(model, x)
    assert torch.equal(first, expected)
    torch.testing.assert_close(folded, expected, rtol=tolerance, atol=tolerance)
    assert type(folded) is Tensor
    assert folded.dtype == expected.dtype


def test_a_network_with_branches() -> None:
    model = residual()
    with torch.no_grad():
        expected = model(X)
    with folding(model) as found:
        called(model, X)
        called(model, X)
        assert norms_run(model, X) == 0
        torch.testing.assert_close(called(model, X), expected, rtol=1e-5, atol=1e-5)
        decision = found.decision()
    assert decision is not None
    assert decision.choice == "on"
    assert "3 of 3 convolutions" in decision.why
    assert torch.equal(model(X).detach(), expected), "afterwards the plain layers run"


def test_a_second_evaluation_folds_from_its_first_call() -> None:
    model = residual()
    with folding(model):
        called(model, X)
        called(model, X)
    with folding(model):
        assert norms_run(model, X) == 0


def test_any_control_flow_will_do() -> None:
    """Nothing is traced: branches on values, on shapes and on attributes are the user's own in each call."""

    class Branching(Residual):
        twice = False

        def forward(self, x: Tensor) -> Tensor:
            if self.twice:
                x = x * 2
            return super().forward(x) if x.sum() > 0 else -super().forward(-x)

    model = awake(Branching())
    inputs = [X.abs(), -X.abs()]
    with folding(model):
        for x in inputs:
            called(model, x)
        for model.twice in (False, True):
            for x in inputs:
                with torch.no_grad():
                    expected = copy.deepcopy(model)(x)
                torch.testing.assert_close(called(model, x), expected, rtol=1e-5, atol=1e-5)
        assert norms_run(model, inputs[1]) == 0


CHANGES: dict[str, Callable[[Residual], object]] = {
    "weight in place": lambda m: m.conv1.weight.mul_(2),
    "weight through .data": lambda m: m.conv1.weight.data.copy_(torch.randn_like(m.conv1.weight)),
    "another .data": lambda m: setattr(m.conv1.weight, "data", torch.randn_like(m.conv1.weight)),
    "bias of the convolution": lambda m: m.conv2.bias.add_(1),
    "gamma": lambda m: m.bn1.weight.add_(1),
    "beta": lambda m: m.bn1.bias.add_(1),
    "running mean": lambda m: m.bn1.running_mean.add_(1),
    "running variance": lambda m: m.bn2.running_var.mul_(3),
    "another running_mean.data": lambda m: setattr(m.bn1.running_mean, "data", torch.randn(8)),
    "eps": lambda m: setattr(m.bn1, "eps", 2.0),
    "load_state_dict": lambda m: m.load_state_dict(residual().state_dict()),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(residual().state_dict(), assign=True),
    "a parameter in its place": lambda m: setattr(m.conv1, "weight", nn.Parameter(torch.randn(8, 3, 3, 3))),
    "an optimizer step": lambda m: train_a_step(m),
    "a forward in training mode": lambda m: (m.train(), m(X), m.eval()),
    "float64": lambda m: m.double(),
    "padding_mode": lambda m: setattr(m.conv1, "padding_mode", "circular"),
    "another BatchNorm": lambda m: setattr(m, "bn1", awake(nn.BatchNorm2d(8))),
    "another convolution": lambda m: setattr(m, "conv1", nn.Conv2d(3, 8, 3, padding=1)),
    "no BatchNorm": lambda m: setattr(m, "bn1", nn.Identity()),
    "a part in training mode": lambda m: m.bn1.train(),
    "a forward set on the convolution": lambda m: setattr(m.conv1, "forward", partial(zeros_like_of, m.conv1)),
    "a forward set on the BatchNorm": lambda m: setattr(m.bn1, "forward", torch.zeros_like),
}


def zeros_like_of(conv: nn.Module, x: Tensor) -> Tensor:
    return torch.zeros_like(nn.Conv2d.forward(conv, x))  # type: ignore[arg-type]


def train_a_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.enable_grad():
        model(X).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_never_stale_within_an_evaluation(change: Callable[[Residual], object]) -> None:
    model: Any = residual()
    with folding(model):
        for _ in range(3):
            called(model, X)
        change(model)
        x = X.double() if next(model.parameters()).dtype == torch.float64 else X
        for _ in range(3):
            twin = copy.deepcopy(model)
            expected = twin(x)
            torch.testing.assert_close(called(model, x), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_never_stale_between_evaluations(change: Callable[[Residual], object]) -> None:
    model: Any = residual()
    with folding(model):
        called(model, X)
        called(model, X)
    with torch.no_grad():
        change(model)
    x = X.double() if next(model.parameters()).dtype == torch.float64 else X
    with folding(model):
        for _ in range(3):
            expected = copy.deepcopy(model)(x)
            torch.testing.assert_close(called(model, x), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("change", [c for name, c in CHANGES.items() if name != "weight through .data"])
def test_never_stale_where_values_are_not_looked_at(
    change: Callable[[Residual], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where a look would wait."""
    monkeypatch.setattr(_folded_weights.Watch, "_sampled", lambda self: torch.empty(0))
    test_never_stale_within_an_evaluation(change)


def test_an_evaluation_inside_another_begins_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_folded_weights.Watch, "_sampled", lambda self: torch.empty(0))
    model: Any = residual()
    with folding(model):
        for _ in range(3):
            called(model, X)
        model.conv1.weight.data.mul_(3)
        with folding(model):
            torch.testing.assert_close(called(model, X), copy.deepcopy(model)(X), rtol=1e-5, atol=1e-5)


def test_a_forward_that_changes_its_own_weights() -> None:
    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
            self.conv, self.bn, self.bound = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), None

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if self.bound is not None:
                self.conv.weight.data = torch.renorm(self.conv.weight.data, 2, 0, self.bound)
            return self.bn(self.conv(x))

    model: Any = awake(Bounded())
    with folding(model):
        for _ in range(3):
            called(model, X)
        model.bound = 0.1
        torch.testing.assert_close(called(model, X), copy.deepcopy(model)(X), rtol=1e-5, atol=1e-5)


class UsedTwice(nn.Module):
    """The output of the convolution goes to its BatchNorm, and under `how` also somewhere else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.bn, self.how, self.kept = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), how, None
        self.bn2 = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Any:
        x = x * 1
        y = self.conv(x)
        if self.how == "before":
            return self.bn(y) + y.mean()
        if self.how == "another bn":
            return self.bn2(y)
        z = self.bn(y)
        if self.how == "after":
            return z + y
        if self.how == "returned":
            return z, y
        if self.how == "kept":
            self.kept = y
        if self.how == "in another layer":
            return z + F.hardtanh(y)
        if self.how == "in place":
            y.mul_(2)
            return z + y
        if self.how == "shape":
            return z.flatten(1)[:, : y.shape[1]]
        if self.how == "custom function":
            return z + Doubled.apply(y)
        if self.how == "input changed meanwhile":
            x.mul_(3)
            return z + y
        if self.how == "bn twice":
            return z + self.bn(y)
        if self.how == "scripted":
            return z + scripted(y)
        return z


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return x * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


WAYS = [
    "before",
    "after",
    "returned",
    "kept",
    "in another layer",
    "in place",
    "shape",
    "custom function",
    "scripted",
    "input changed meanwhile",
    "bn twice",
    "another bn",
]


@pytest.mark.parametrize("at_first", [False, True], ids=["later", "from the start"])
@pytest.mark.parametrize("how", WAYS)
def test_an_output_that_is_used_elsewhere_is_the_plain_one(how: str, at_first: bool) -> None:
    model: Any = awake(UsedTwice(how if at_first else "only by its BatchNorm"))
    plain = copy.deepcopy(model)
    with folding(model) as found:
        for _ in range(3):
            called(model, X)
        model.how = plain.how = how
        for _ in range(3):
            torch.testing.assert_close(called(model, X), plain(X), rtol=1e-5, atol=1e-5)
        if how == "kept":
            kept = model.kept
            torch.nn.init.zeros_(model.conv.weight)
            torch.testing.assert_close(kept + 0, plain.kept, rtol=1e-5, atol=1e-5)
        decision = found.decision()
    assert decision is not None
    assert decision.choice == "off" or (how == "another bn" and at_first)


def test_no_tensor_of_ours_gets_out() -> None:
    model: Any = awake(UsedTwice("only by its BatchNorm"))
    with folding(model):
        called(model, X)
        called(model, X)
        model.how = "returned"
        assert [type(t) for t in called(model, X)] == [Tensor, Tensor]


def test_code_that_reaches_for_the_memory_runs_again_with_the_plain_output() -> None:
    class Reaching(UsedTwice):
        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            if self.how == "reach":
                assert y.untyped_storage().nbytes() == 4 * y.numel()
            return self.bn(y)

    model: Any = awake(Reaching("only by its BatchNorm"))
    expected = copy.deepcopy(model)(X)
    with folding(model):
        called(model, X)
        called(model, X)
        model.how = "reach"
        torch.testing.assert_close(called(model, X), expected, rtol=1e-5, atol=1e-5)


def test_an_error_of_the_users_own_is_raised_once() -> None:
    class Failing(Residual):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.conv1(x)
            z = self.bn1(y)
            raise KeyError("mine", y is z)

    model = awake(Failing())
    with folding(model):
        for _ in range(3):
            with pytest.raises(KeyError, match="mine"):
                called(model, X)
    assert model.calls == 3


def test_a_bad_input_raises_what_the_layer_raises() -> None:
    model = residual()
    with folding(model):
        called(model, X)
        called(model, X)
        for bad in (torch.randn(4, 5, 8, 8), torch.randn(4), X.double()):
            with pytest.raises(RuntimeError) as plain:
                copy.deepcopy(model)(bad)
            with pytest.raises(RuntimeError) as ours:
                called(model, bad)
            assert str(ours.value) == str(plain.value)
        assert norms_run(model, X) == 0, "and folding goes on"


HOOKED = ["conv1", "bn1"]
HOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward": lambda m, f: m.register_forward_hook(f),
    "pre": lambda m, f: m.register_forward_pre_hook(f),
    "full backward": lambda m, f: m.register_full_backward_hook(f),
}


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("name", HOOKED)
def test_a_layer_with_hooks_is_left_alone(name: str, register: Any, when: str) -> None:
    model: Any = residual()
    model.inplace = False  # backward hooks do not allow it
    seen: list[Any] = []
    expected: list[Any] = []

    def looking(where: list[Any]) -> Any:
        return lambda module, *args: where.append([a.clone() for a in args[-1] if isinstance(a, Tensor)] or args[-1])

    twin = copy.deepcopy(model)
    register(getattr(twin, name), looking(expected))
    twin(X)
    if when == "before":
        register(getattr(model, name), looking(seen))
    with folding(model):
        if when == "within":
            called(model, X)
            called(model, X)
            register(getattr(model, name), looking(seen))
        else:
            called(model, X)
            called(model, X)
        seen.clear()
        assert norms_run(model, X) == 1, "the pair with the hook, and no other"
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


def test_a_hook_on_a_container_sees_what_it_saw() -> None:
    model: Any = residual()
    seen: list[Tensor] = []
    model.skip.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with folding(model):
        for _ in range(3):
            called(model, X)
        assert norms_run(model, X) == 0
    torch.testing.assert_close(seen[-1], seen[0], rtol=1e-5, atol=1e-5)


def test_global_hooks_see_every_layer() -> None:
    model = residual()
    seen: list[str] = []
    with folding(model):
        called(model, X)
        called(model, X)
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        try:
            called(model, X)
        finally:
            handle.remove()
    assert seen.count("BatchNorm2d") == 3
    assert seen.count("Conv2d") == 3


class OwnForward(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight.abs(), bias)


class OwnWeight(nn.Conv2d):
    @property
    def weight(self) -> Tensor:
        return self._parameters["weight"].abs()


def own_weight() -> nn.Module:
    conv = nn.Conv2d(3, 6, 3)
    conv.__class__ = OwnWeight
    return pair(conv, nn.BatchNorm2d(6))


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


def monkeypatched() -> nn.Module:
    conv = nn.Conv2d(3, 6, 3)
    conv.forward = lambda x: F.conv2d(x, conv.weight.abs(), conv.bias)  # type: ignore[method-assign]
    return pair(conv, nn.BatchNorm2d(6))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.conv(self.one(self.conv(x))))


LEFT = {
    "a forward of its own": lambda: pair(OwnForward(3, 6, 3), nn.BatchNorm2d(6)),
    "a convolution of its own": lambda: pair(OwnConvolution(3, 6, 3), nn.BatchNorm2d(6)),
    "a weight of its own": own_weight,
    "a norm of its own": lambda: pair(nn.Conv2d(3, 6, 3), OwnNorm(6)),
    "a parametrization": lambda: pair(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6)),
    "spectral norm": lambda: pair(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6)),
    "pruning": lambda: pair(prune.random_unstructured(nn.Conv2d(3, 6, 3), "weight", 0.5), nn.BatchNorm2d(6)),
    "no running statistics": lambda: pair(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)),
    "a ReLU between": lambda: awake(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6))),
    "BatchNorm first": lambda: awake(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3))),
    "a forward set on the instance": monkeypatched,
    "instance norm": lambda: awake(nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True))),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_what_is_not_a_plain_pair_is_left_alone(make: Callable[[], nn.Module]) -> None:
    model = make()
    expected = model(X)
    with folding(model):
        for _ in range(3):
            with Operators() as operators:
                assert torch.equal(called(model, X), expected)
            assert operators.count("aten.convolution") == 1, "nothing is tried"


def test_a_convolution_with_two_batchnorms() -> None:
    model = awake(Twice())
    expected = copy.deepcopy(model)(X)
    with folding(model):
        for _ in range(4):
            torch.testing.assert_close(called(model, X), expected, rtol=1e-5, atol=1e-5)
        with Operators() as operators:
            called(model, X)
    assert operators.count("aten.convolution") <= 2, "and no work is done twice"


def test_a_sample_without_a_batch_tells_nothing_about_batches() -> None:
    model = pair(nn.Conv2d(3, 6, 3), nn.BatchNorm1d(6))
    with folding(model):
        for _ in range(3):
            called(model, X[0])
        for _ in range(2):
            with pytest.raises(ValueError, match="expected 2D or 3D input"):
                called(model, X)


def test_a_transposed_grouped_convolution_is_left_alone() -> None:
    model = pair(nn.ConvTranspose2d(4, 8, 3, groups=2), nn.BatchNorm2d(8))
    x = torch.randn(2, 4, 9, 9)
    expected = model(x)
    with folding(model):
        for _ in range(3):
            assert torch.equal(called(model, x), expected)


def test_with_gradients_the_plain_layers_run() -> None:
    model = residual()
    with folding(model):
        called(model, X)
        called(model, X)
        with torch.enable_grad(), Operators() as operators:
            x = X.clone().requires_grad_()
            called(model, x).sum().backward()
    assert operators.count("aten.convolution.default") == 3
    twin = copy.deepcopy(model)
    twin.zero_grad()
    other = X.clone().requires_grad_()
    twin(other).sum().backward()
    assert torch.equal(x.grad, other.grad)
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad), name


def test_gradients_that_are_switched_on_between_the_two_layers() -> None:
    class Switching(UsedTwice):
        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            with torch.set_grad_enabled(self.how == "on"):
                return self.bn(y)

    model: Any = awake(Switching("off"))
    with folding(model):
        called(model, X)
        called(model, X)
        model.how = "on"
        assert called(model, X).requires_grad


def test_function_transforms() -> None:
    model = residual()
    other = {name: parameter + 1 for name, parameter in model.named_parameters()}
    with folding(model):
        for _ in range(3):
            called(model, X)
        run = lambda weights: torch.func.functional_call(model, weights, (X,))  # noqa: E731
        with torch.no_grad():
            twin = copy.deepcopy(model)
            expected = torch.func.functional_call(twin, other, (X,))
        for _ in range(2):
            torch.testing.assert_close(settled(run, (other,), {}), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(called(model, X), twin(X), rtol=1e-5, atol=1e-5)
        batched = torch.func.vmap(model)
        torch.testing.assert_close(called(batched, X[:, None]), twin(X)[:, None], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_folded_weights_once(dtype: torch.dtype) -> None:
    model = residual()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = copy.deepcopy(model)(X)
    with folding(model), torch.autocast("cpu", dtype):
        for _ in range(3):
            called(model, X)
        with Operators() as operators:
            folded = called(model, X)
        assert operators.count("batch_norm") == 0
        # The input for two convolutions; what is between them is in 16 bits already. Weights: none.
        assert operators.count("_to_copy") == 2
    assert folded.dtype == expected.dtype
    torch.testing.assert_close(folded.float(), expected.float(), rtol=0.1, atol=0.1)


def test_precisions_by_turns() -> None:
    model = residual()
    with folding(model):
        for _ in range(3):
            plain = called(model, X)
            with torch.autocast("cpu", torch.bfloat16):
                half = called(model, X)
            torch.testing.assert_close(half.float(), plain, rtol=0.1, atol=0.1)
            assert (plain.dtype, half.dtype) == (torch.float32, torch.bfloat16)


def test_inference_mode_folds_no_inputs_of_its_own() -> None:
    """F-21: such tensors count no changes, so that nothing could tell whether an input is still the same."""
    model = residual()
    expected = model(X)
    with folding(model), torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(called(model, X), expected, rtol=1e-5, atol=1e-5)


def test_the_memory_format_is_kept() -> None:
    """F-33"""
    model = residual().to(memory_format=torch.channels_last)
    x = X.to(memory_format=torch.channels_last)
    formats = []
    model.conv2.register_forward_hook(lambda module, args, output: formats.append(args[0].stride()))
    with folding(model):
        for _ in range(3):
            called(model, x)
    assert formats[0] == formats[-1]


def test_nothing_is_left_behind() -> None:
    model = residual()
    state = copy.deepcopy(model.state_dict())
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    with folding(model):
        for _ in range(3):
            called(model, X)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_copies_made_meanwhile_are_plain() -> None:
    model = residual()
    file = io.BytesIO()
    with folding(model):
        for _ in range(3):
            expected = called(model, X)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        torch.save(model, file)
    file.seek(0)
    assert b"hotloop" not in pickle.dumps(model)
    for made in [*copies, torch.load(file, weights_only=False)]:
        nn.init.zeros_(made.conv1.weight)
        assert all("_compiled_call_impl" not in vars(module) for module in made.modules())
        assert not torch.allclose(made(X), expected)


class OwnState(nn.Conv2d):
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def test_a_copy_of_a_module_with_a_getstate_of_its_own_is_plain() -> None:
    model = pair(OwnState(3, 6, 3), nn.BatchNorm2d(6))
    with folding(model):
        called(model, X)
        called(model, X)
        made: Any = copy.deepcopy(model)
        stored = pickle.loads(pickle.dumps(model))
    for other in (made, stored):
        nn.init.zeros_(other[0].weight)
        nn.init.zeros_(other[0].bias)
        assert other[0](X).abs().max() == 0


def test_a_convolution_dies_with_its_model() -> None:
    import gc
    import weakref

    model = residual()
    with folding(model):
        for _ in range(3):
            called(model, X)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_eight_threads_fold_one_model() -> None:
    model = residual()
    inputs = [torch.randn(4, 3, 8, 8) for _ in range(8)]
    expected = [model(x).detach() for x in inputs]

    def work(x: Tensor, right: Tensor) -> None:
        for _ in range(20):
            with folding(model):
                for _ in range(3):
                    torch.testing.assert_close(called(model, x), right, rtol=1e-5, atol=1e-5)

    in_threads(partial(work, *pair) for pair in zip(inputs, expected, strict=True))
    assert all("_compiled_call_impl" not in vars(module) for module in model.modules())


def test_outside_of_a_model_call_the_layers_are_plain() -> None:
    model: Any = residual()
    with folding(model):
        for _ in range(3):
            called(model, X)
        assert torch.equal(model.conv1(X), copy.deepcopy(model.conv1)(X))


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_a_model_in_compiled_code_is_left_to_it() -> None:
    """T1"""
    model = torch.compile(residual(), backend="eager")
    with folding(model) as found:
        torch.testing.assert_close(called(model, X), copy.deepcopy(model)(X))
        assert found.diversions == []
        decision = found.decision()
    assert decision is not None
    assert (decision.choice, "compiled" in decision.why) == ("off", True)


@pytest.mark.usefixtures("dynamo_is_at_work")
def test_compiled_code_that_calls_the_model() -> None:
    model = residual()
    expected = model(X)
    compiled = torch.compile(lambda x: model(x) * 2, backend="eager")
    with folding(model):
        called(model, X)
        called(model, X)
        for _ in range(2):
            torch.testing.assert_close(compiled(X), expected * 2)
            torch.testing.assert_close(settled(compiled, (X,), {}), expected * 2)
    torch.testing.assert_close(compiled(X), expected * 2)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace.*:DeprecationWarning")
def test_jit_trace_sees_the_plain_layers() -> None:
    model = residual().requires_grad_(False)
    with folding(model):
        called(model, X)
        called(model, X)
        traced = torch.jit.trace(lambda x: called(model, x), X)
    assert "batch_norm" in str(traced.inlined_graph)


def test_a_layer_that_rounds_too_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = residual()
    expected = model(X)
    right = _folded_weights.Fold._fold

    def wrong(self: Any, *args: Any) -> Any:
        weight, bias = right(self, *args)
        return (weight * 1.01, bias) if self.conv is model.conv2 else (weight, bias)

    monkeypatch.setattr(_folded_weights.Fold, "_fold", wrong)
    with folding(model) as found:
        for _ in range(3):
            torch.testing.assert_close(called(model, X), expected, rtol=1e-5, atol=1e-5)
        assert norms_run(model, X) == 1
        decision = found.decision()
    assert decision is not None
    assert decision.choice == "on"
    assert "differs from the plain one" in decision.why


def test_folding_waits_until_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    small, large = torch.randn(1, 3, 64, 64), torch.randn(32, 3, 64, 64)
    model = pair(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
    with folding(model):
        assert [norms_run(model, small) for _ in range(30)] == [1] * 30
        norms_run(model, large)
        assert norms_run(model, large) == 0
    with folding(model):
        medium = torch.randn(14, 3, 64, 64)  # 344064 elements come out: (300000 + 162) / (344064 - 300000) calls
        assert [norms_run(model, medium) for _ in range(8)] == [1, 1, 1, 1, 1, 1, 0, 0]
    narrowing = pair(nn.Conv2d(3, 6, 3, stride=4), nn.BatchNorm2d(6))
    with folding(narrowing):
        assert [norms_run(narrowing, large) for _ in range(6)] == [1] * 6
    widening = pair(nn.ConvTranspose2d(3, 6, 3, stride=4), nn.BatchNorm2d(6))
    with folding(widening):
        assert [norms_run(widening, small) for _ in range(6)] == [1, 1, 1, 1, 1, 0]


def test_decision_without_layers_to_fold() -> None:
    for model, text in (
        (nn.Linear(2, 2), "no convolutions with BatchNorm"),
        (nn.Conv2d(3, 3, 3), "no convolutions with BatchNorm"),
    ):
        decision = Folding(list(submodules([model]))).decision()
        assert decision is not None
        assert (decision.choice, text in decision.why) == ("off", True)
    assert Folding(list(submodules([residual()]))).decision() is None, "not known before the first call"


def test_a_fused_update_in_the_body_is_seen():
    """Fused kernels count no version: what was folded before such a step must go."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    norms = [p for layer in net if isinstance(layer, nn.BatchNorm2d) for p in layer.parameters()]
    optimizer = torch.optim.Adam(norms, 0.3, fused=True)
    x = torch.randn(16, 3, 32, 32)

    @fast_eval
    def adapt(model):
        for _ in range(6):
            model(x)
        with torch.enable_grad():
            torch.autograd.backward(model(x).square().mean())
        optimizer.step()
        return model(x)

    adapted = adapt(net)
    with torch.no_grad():
        torch.testing.assert_close(adapted, net.eval()(x), atol=1e-4, rtol=1e-4)


def test_an_input_that_the_forward_changes_is_changed_once():
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

        def forward(self, x):
            h = self.conv(x)
            y = self.norm(h)
            x.mul_(2.0)
            return y + h

    torch.manual_seed(0)
    net = Doubles().eval()
    batches = [torch.randn(8, 3, 64, 64) for _ in range(6)]
    given = [x.clone() for x in batches]
    outputs = fast_eval(lambda model: [model(x) for x in given])(net)
    with torch.no_grad():
        for x, seen, output in zip(batches, given, outputs, strict=True):
            torch.testing.assert_close(output, net(x), atol=1e-4, rtol=1e-4)
            assert torch.equal(seen, x)


@pytest.mark.parametrize(
    "name", ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "conv.weight", "conv.bias"]
)
@pytest.mark.parametrize("write", [lambda t: t.data.mul_(3), lambda t: t.detach().numpy().fill(2)], ids=["data", "numpy"])
def test_values_written_past_the_version_counter_are_seen(name: str, write: Callable[[Tensor], Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    model = awake(Net())
    nn.init.ones_(model.conv.bias)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 8, 8)
    with folding(model):
        called(model, x)
        called(model, x)
        assert norms_run(model, x) == 0
        write({**dict(model.named_parameters()), **dict(model.named_buffers())}[name])
        torch.testing.assert_close(called(model, x), model(x), rtol=1e-4, atol=1e-4)


def test_a_forward_that_asks_for_the_type_of_an_output_finds_a_tensor() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.found: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x)
            self.found += [type(h) is Tensor, h.__class__ is Tensor]
            return self.norm(h)

    model = awake(Net())
    with folding(model) as found:
        for _ in range(3):
            called(model, torch.randn(2, 3, 8, 8))
        assert model.found == [True] * 6
        decision = found.decision()
    assert decision is not None
    assert (decision.choice, "asks for types" in decision.why) == ("off", True)


def test_a_feature_that_is_kept_keeps_no_other_tensor_alive() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            self.feature = self.conv(x)
            return self.norm(self.feature)

    model = awake(Net())
    with folding(model):
        called(model, torch.randn(2, 3, 8, 8))
        x = torch.randn(2, 3, 8, 8)
        called(model, x)
        kept = weakref.ref(x)
        del x
        assert kept() is None


def test_the_folded_weights_go_with_the_evaluation() -> None:
    model = awake(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    gc.collect()
    gc.disable()
    try:
        with folding(model) as found:
            called(model, torch.randn(2, 3, 8, 8))
            called(model, torch.randn(2, 3, 8, 8))
            weights = weakref.ref(next(iter(found._folds[0]._made.values()))[0])
            assert weights() is not None
        del found
        assert weights() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "register",
    [
        module_hooks.register_module_forward_hook,
        module_hooks.register_module_forward_pre_hook,
        module_hooks.register_module_full_backward_hook,
        module_hooks.register_module_full_backward_pre_hook,
    ],
)
def test_global_hooks_are_seen_where_torch_does_not_tell(register: Callable[..., Any]) -> None:
    """torch 2.6 has no function for it."""
    assert not _deferred._some_global_hook()
    handle = register(lambda *_: None)
    try:
        assert _deferred._some_global_hook()
    finally:
        handle.remove()
