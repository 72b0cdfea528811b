"""Calls of models inside an evaluation: the layout of images, gradients that the body asks for, scripting."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop import _facts, fast_eval, optimize
from hotloop._tree import leaves as _leaves
from observing import Operators, in_threads

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def deep() -> nn.Sequential:
    """Deep enough for channels_last to pay."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), *[nn.Conv2d(16, 16, 1) for _ in range(6)], nn.ReLU())


class Seen(nn.Module):
    """What its layers see: whether the images were in channels_last, and how often it was called."""

    def __init__(self, *, view: bool = False, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = deep() if body is None else body
        self.view = view
        self.laid_out: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        self.laid_out.append(h.is_contiguous(memory_format=torch.channels_last))
        return h.view(len(h), -1) if self.view else h


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which channels_last is known to pay."""
    monkeypatch.setattr(_facts, "_is_x86", lambda: True)


@fast_eval
def output(model: nn.Module, x: Tensor) -> Any:
    return model(x)


@pytest.mark.usefixtures("pays")
class TestPlainModelsInChannelsLast:
    def test_images_are_laid_out_and_outputs_and_weights_are_not(self) -> None:
        model = Seen().eval()
        strides = [p.stride() for p in model.parameters()]
        expected = model(X).detach()
        made = output(model, X)
        assert model.laid_out == [False, True]
        assert made.is_contiguous()
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
        assert [p.stride() for p in model.parameters()] == strides
        model(X)
        assert model.laid_out[-1] is False  # outside nothing has changed

    @pytest.mark.parametrize(
        "make", [lambda: nn.Conv2d(3, 4, 3), lambda: nn.Sequential(*deep(), nn.InstanceNorm2d(16)), lambda: deep().double()]
    )
    def test_not_where_optimize_would_leave_it(self, make: Any) -> None:
        model = Seen(body=make())
        output(model, X.to(next(model.parameters()).dtype))
        assert model.laid_out == [False]

    def test_the_body_can_view_what_a_model_returns(self) -> None:
        """Case F6."""

        @fast_eval
        def hits(model: nn.Module, x: Tensor) -> Any:
            return (model(x).topk(2, dim=1).values.view(-1) > 0).sum()

        model = Seen().eval()
        assert hits(model, X) == int((model(X).topk(2, dim=1).values > 0).sum())
        assert model.laid_out[0] is True

    def test_not_for_a_model_wrapped_with_exact(self) -> None:
        model = Seen()
        with torch.no_grad():
            expected = model.eval()(X)
        assert torch.equal(output(optimize(model, exact=True), X), expected)

    def test_a_forward_that_cannot_bear_it_is_run_without_it_from_then_on(self) -> None:
        """Case F5."""
        model = Seen(view=True)
        for _ in range(2):
            assert output(model, X).shape == (4, 16 * 14 * 14)
        assert model.laid_out == [True, False, False]

    def test_of_several_threads_one_finds_out_for_all(self) -> None:
        model = Seen(view=True)

        @fast_eval
        def body(x: Tensor) -> None:
            in_threads([lambda: model(x)] * 8)

        body(X)
        assert model.laid_out.count(True) == 1

    def test_hooked_models_are_left_alone(self) -> None:
        model = Seen()
        features: list[Tensor] = []
        handle = model.body[0].register_forward_hook(lambda module, inputs, made: features.append(made.view(4, -1)))
        output(model, X)
        handle.remove()
        output(model, X)
        assert (model.laid_out, len(features)) == ([False, True], 1)

    @pytest.mark.parametrize("keep", [lambda h: h, lambda h: [h], lambda h: {"h": h}], ids=["alone", "list", "dict"])
    def test_feature_maps_that_the_model_keeps_can_be_viewed_by_the_body(self, keep: Any) -> None:
        class Keeps(Seen):
            def forward(self, x: Tensor) -> Tensor:
                self.feature = keep(self.body(x))
                self.laid_out.append(next(_leaves(self.feature)).is_contiguous(memory_format=torch.channels_last))
                return next(_leaves(self.feature)).mean((2, 3))

        model = Keeps()

        @fast_eval
        def body(x: Tensor) -> Any:
            model(x)
            first = next(_leaves(model.feature)).view(4, -1).sum()
            model(x)
            return first, next(_leaves(model.feature)).view(4, -1).sum()

        first, second = body(X)
        assert first == pytest.approx(second, rel=1e-4, abs=1e-4)
        assert model.laid_out == [True, False]

    def test_other_layers_make_another_choice(self) -> None:
        model = Seen(body=nn.Conv2d(3, 16, 3))
        output(model, X)
        model.body = deep()
        output(model, X)
        assert model.laid_out == [False, True]

    def test_inputs_of_other_shapes_are_left(self) -> None:
        """Cases F1, F3."""
        seen: list[Any] = []

        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = deep()

            def forward(self, batch: dict[str, Tensor]) -> Tensor:
                seen.append({key: (value.stride(), value.dtype) for key, value in batch.items()})
                return self.body(batch["x"])

        batch = {
            "x": X,
            "mask": torch.ones(4, 3, 16, 16, dtype=torch.long),
            "t": torch.ones(2, 3),
            "v": torch.ones(2, 3, 4, 4, 4),
        }
        output(Many(), batch)
        for key in ("mask", "t", "v"):
            assert seen[0][key] == (batch[key].stride(), batch[key].dtype)
        assert seen[0]["x"][0] != X.stride()


@pytest.mark.parametrize("wrap", [False, True])
def test_gradients_that_the_body_enables_reach_every_model(wrap: bool) -> None:
    """Case N7: as under plain torch, `enable_grad` gives a graph, and without it there is none."""
    net = nn.Linear(3, 2)
    model: Any = optimize(net) if wrap else net

    @fast_eval
    def body(x: Tensor) -> Any:
        without = model(x).requires_grad
        with torch.enable_grad():
            loss = model(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, net.weight)
        return {"without": without, "gradient": gradient}

    made = body(torch.ones(1, 3))
    assert made["without"] is False
    expected = torch.autograd.grad(net(torch.ones(1, 3)).square().sum(), net.weight)[0]
    assert torch.equal(made["gradient"], expected)
    # The rule of wrapped models holds again outside, and in the caller of a generator.
    assert model.eval()(torch.ones(1, 3)).requires_grad is not wrap


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("wrap", [False, True])
def test_scripting_inside_the_body(wrap: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    net = Net()
    model: Any = optimize(net, precision="fp32") if wrap else net

    @fast_eval
    def both(x: Tensor) -> Any:
        return model(x).sum(), torch.jit.script(net)(x).sum()

    plain, scripted = both(X)
    assert plain == pytest.approx(scripted, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
def test_a_frozen_scripted_model_which_has_no_mode() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    frozen = torch.jit.freeze(torch.jit.script(net))
    assert torch.equal(output(frozen, X), frozen(X))


def test_an_exported_program_whose_modes_are_settled() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    exported = torch.export.export(net.eval(), (torch.ones(1, 3),)).module()
    assert torch.equal(output(exported, torch.ones(1, 3)), net(torch.ones(1, 3)))
    assert exported.training  # as it came


def test_an_eval_method_of_the_class_that_is_not_implemented_raises() -> None:
    class Net(nn.Linear):
        def eval(self) -> Any:
            raise NotImplementedError

    model = Net(2, 2)
    with pytest.raises(NotImplementedError):
        output(model, torch.ones(1, 2))
    assert model.training


def wide() -> nn.Sequential:
    """Deep enough for channels_last to pay, and with so many weights that it does not for small images."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64))]
    return nn.Sequential(nn.Conv2d(3, 64, 3), *layers).eval()


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize(("make", "shape"), [
    pytest.param(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (2, 3), id="small model"),
    pytest.param(wide, (1, 3, 8, 8), id="small images"),
])  # fmt: skip
def test_where_nothing_pays_no_operator_is_added(make: Any, shape: tuple[int, ...]) -> None:
    model = make()

    def seen(run: Any) -> list[str]:
        with Operators() as operators, torch.no_grad():
            run(model, torch.ones(shape))
        return operators.seen

    assert seen(output) == seen(lambda model, x: model(x))


@pytest.mark.usefixtures("pays")
def test_only_the_first_evaluation_in_channels_last_keeps_copies_of_buffers_and_images() -> None:
    model = wide()

    def copies() -> int:
        with Operators() as operators:
            output(model, torch.ones(16, 3, 16, 16))
        return operators.count("aten.clone")

    first, buffers = copies(), len(list(model.buffers()))
    assert first - copies() == buffers + 1
    model[2].running_mean = model[2].running_mean.clone()
    assert copies() == first, "a buffer that came in the place of another"


@pytest.mark.usefixtures("pays")
def test_a_model_that_counts_and_knows_itself_is_not_kept_alive() -> None:
    class Counting(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.owners = 0, [self]

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x)

    model = Counting()
    output(model, X)
    output(model, X)
    assert model.laid_out == [True, True]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("pays")
def test_tensors_that_the_user_has_made_stay_what_they_are() -> None:
    """Only what comes in a call is a feature map that the model keeps."""

    class Own(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.randn(1, 14, 14, 16)
            self.bias = self.table.permute(0, 3, 1, 2)  # what is written to the table shows in it

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.bias

    model = Own().eval()
    output(model, X)
    assert model.laid_out == [True]
    assert not model.bias.is_contiguous()
    assert model.bias.data_ptr() == model.table.data_ptr()
    output(model, X)
    assert model.laid_out == [True, True]


@pytest.mark.usefixtures("pays")
def test_a_buffer_that_the_forward_replaces_can_be_viewed() -> None:
    class Last(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last.mean((2, 3))

    @fast_eval
    def evaluate(model: nn.Module) -> Any:
        return model(X), model.last.view(4, -1)

    assert evaluate(Last())[1].shape == (4, 16 * 14 * 14)


def stacked(net: nn.Module) -> Any:
    """One forward of three models at once."""
    parameters, buffers = torch.func.stack_module_state([net, net, net])

    def run(model: nn.Module) -> Any:
        one = lambda p, b: torch.func.functional_call(model, (p, b), (X,))  # noqa: E731
        return torch.vmap(one)(parameters, buffers)

    return run


def per_sample(net: nn.Module) -> Any:
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def run(model: nn.Module) -> Any:
        loss = lambda p, x: torch.func.functional_call(model, p, (x[None],)).square().mean()  # noqa: E731
        return torch.vmap(torch.func.grad(loss), (None, 0))(parameters, X)

    return run


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("call", [
    pytest.param(lambda net: lambda model: torch.vmap(lambda x: model(x[None]))(X), id="vmap"),
    pytest.param(stacked, id="ensemble"),
    pytest.param(per_sample, id="per-sample gradients"),
])  # fmt: skip
@pytest.mark.parametrize("way", ["wrapped", "in an evaluation", "wrapped in an evaluation"])
def test_transforms_of_functions_are_what_they_are_plainly(call: Any, way: str) -> None:
    """They bear neither automatic layouts nor folded layers, nor that a call that failed is put back."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)).eval()
    run = call(net)
    expected = run(net)
    model = optimize(net) if "wrapped" in way else net
    evaluate = fast_eval(run) if "evaluation" in way else run
    for _ in range(2):
        torch.testing.assert_close(evaluate(model), expected, rtol=1e-4, atol=1e-5)
        output(model, torch.randn(256, 3, 16, 16))  # a call as usual, which folds


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("around", [
    pytest.param(lambda model: nn.Sequential(model, nn.Softmax(1)), id="head"),
    pytest.param(torch.optim.swa_utils.AveragedModel, id="average"),
])  # fmt: skip
def test_an_exact_model_inside_another_module_is_evaluated_exactly(around: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    images = torch.randn(256, 3, 16, 16)
    model = around(optimize(net, exact=True))

    @fast_eval
    def evaluate(model: nn.Module) -> Any:
        return [model(images) for _ in range(3)]

    made = evaluate(model)
    model.eval()
    with torch.no_grad():
        expected = model(images)
    assert all(torch.equal(one, expected) for one in made)
