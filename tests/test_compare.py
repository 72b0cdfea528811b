"""compare trains the plain and the wrapped loop on the user's model, alike but for what the plan says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import simgpu
from hotloop._compare import compare
from hotloop._comparison import Comparison, Measured
from hotloop._optimize import optimize
from hotloop._plan import Decision, Plan

WARM_UP = 5


def batches(count: int = 3, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, 4), torch.randint(2, (rows,))) for _ in range(count)]


def make(optimizer: Any = torch.optim.Adam) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    return model, optimizer(model.parameters()), nn.CrossEntropyLoss()


class Own(nn.Module):
    """A model that returns its own loss, from a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner(x), y), "more": x}


def make_own() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Own()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def make_with_noise() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(output, target) * (1 + random.random() + np.random.rand())
        return loss, {"double": 2 * loss}

    model, optimizer, _ = make()
    return model, optimizer, loss_fn


def make_lbfgs() -> Any:
    model = nn.Linear(4, 2)
    return model, torch.optim.LBFGS(model.parameters(), max_iter=2), nn.CrossEntropyLoss()


EXACT: dict[str, tuple[Callable[[], Any], Iterable[Any]]] = {
    "classifier": (make, batches()),
    "loader": (make, DataLoader(TensorDataset(torch.randn(12, 4), torch.arange(12) % 2), batch_size=4, shuffle=True)),
    "own loss": (make_own, [{"x": x, "y": y} for x, y in batches()]),
    "own loss, tuples": (make_own, batches()),
    "random loss": (make_with_noise, batches()),
    "closure": (make_lbfgs, batches()),
}


@pytest.mark.parametrize("case", EXACT)
def test_both_loops_train_alike(case: str) -> None:
    report = compare(*EXACT[case], steps=6, exact=True)
    assert report.max_weight_difference == 0.0
    assert report.plain.losses == report.wrapped.losses
    assert len(report.plain.losses) == 6 + WARM_UP
    assert len(set(report.plain.losses)) > 6
    assert "bitwise equal" in str(report)


def test_the_plain_loop_is_the_loop_that_one_writes() -> None:
    """The losses of the report are those of a loop written by hand from the same seed."""
    data = batches()
    report = compare(lambda: make(torch.optim.SGD), data, steps=1, exact=True)
    torch.manual_seed(0)
    model, optimizer, loss_fn = make(torch.optim.SGD)
    torch.manual_seed(0)
    losses = []
    for i in range(1 + WARM_UP):
        x, y = data[i % 3]
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert report.plain.losses == losses


def test_a_choice_that_changes_rounding_shows_in_the_weights() -> None:
    report = compare(make, batches(), steps=2, precision="bf16")
    assert 0 < report.max_weight_difference < 1
    assert "at most" in str(report)
    assert report.plan["precision"].choice == "bf16"


def test_syncs_are_those_of_one_step() -> None:
    """The plain loop moves x and y and waits for each; a read in the loss makes both loops wait."""

    def make_reading() -> Any:
        model, optimizer, _ = make()
        return model, optimizer, lambda output, target: output.square().mean() * output.mean().item()

    clean, reading = (compare(m, batches(), steps=1) for m in (make, make_reading))
    assert (clean.plain.syncs, clean.wrapped.syncs) == (2, 0)
    assert (reading.plain.syncs, reading.wrapped.syncs) == (3, 1)


def test_the_report_as_data() -> None:
    report = compare(make, batches(), steps=4).as_dict()
    assert list(report) == ["plain", "wrapped", "ratio", "max_weight_difference"]
    for loop in (report["plain"], report["wrapped"]):
        assert list(loop) == ["seconds_per_step", "peak_memory", "syncs_per_step", "final_loss"]
        seconds = loop["seconds_per_step"]
        assert 0 < seconds["first_quartile"] <= seconds["median"] <= seconds["third_quartile"]


PLAN = Plan([Decision("precision", "fp32", "asked for")])


def test_figures_and_table() -> None:
    plain = Measured([0.002, 0.004, 0.003, 0.005], None, 2, [1.0, 0.5])
    wrapped = Measured([0.001, 0.004, 0.0015, 0.0025], 3 * 2**20, 0, [1.0, 0.25])
    report = Comparison(plain, wrapped, 0.125, PLAN, torch.device("cpu"))
    assert plain.median == 0.0035
    assert plain.quartiles == pytest.approx((0.00275, 0.00425))
    assert Measured([7.0], None, 0, [1.0]).quartiles == (7.0, 7.0)
    assert report.ratio == 0.5  # of 0.5, 1, 0.5, 0.5
    lines = [line.split("  ") for line in str(report).splitlines()]
    cells = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines if len(line) > 1}
    assert cells["time per step"] == ["3.5 ms", "2 ms", "(0.50 of plain)"]
    assert cells["peak memory"] == ["not counted", "3.0 MiB"]
    assert cells["syncs per step"] == ["2", "0"]
    assert cells["final loss"] == ["0.5", "0.25"]
    assert "at most 0.12" in str(report)
    assert str(PLAN) in str(report)


def test_plot(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    measured = Measured([0.002, 0.004], None, 2, [1.0, 0.5])
    Comparison(measured, measured, 0.0, PLAN, torch.device("cpu")).plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    measured = Measured([0.002], None, 2, [1.0])
    with pytest.raises(ImportError, match=r"pip install 'hotloop\[plot\]'"):
        Comparison(measured, measured, 0.0, PLAN, torch.device("cpu")).plot("unused.png")


def test_the_global_generators_go_on_as_if_nothing_had_been() -> None:
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = draws()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    data = [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))]
    compare(make_with_noise, data, steps=1)
    assert draws() == expected


# --- bad input --------------------------------------------------------------------------------------------------------


def refusing(error: type[Exception], match: str, make: Any, data: Any = None, **arguments: Any) -> None:
    with pytest.raises(error, match=match):
        compare(make, batches() if data is None else data, **{"steps": 2, **arguments})


LINEAR = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("made", "kinds"),
    [
        (None, r"\(NoneType\)"),
        (LINEAR, r"\(Linear\)"),
        ((LINEAR, "sgd"), r"\(Linear, str\)"),
        ((LINEAR, torch.optim.SGD(LINEAR.parameters()), 3), r"\(Linear, SGD, int\)"),
        ((LINEAR, torch.optim.SGD(LINEAR.parameters()), None, None), r"\(Linear, SGD, NoneType, NoneType\)"),
    ],
)
def test_make_returns_something_else(made: Any, kinds: str) -> None:
    refusing(TypeError, rf"make\(\) returned {kinds}; it returns \(model, optimizer, loss_fn\)", lambda: made)


def test_make_returns_a_wrapped_model() -> None:
    def make_wrapped() -> Any:
        model, optimizer, loss_fn = make()
        return optimize(model, optimizer, loss_fn).model, optimizer, loss_fn

    refusing(TypeError, "a wrapped model; return the plain one", make_wrapped)


def test_make_returns_the_same_model_twice() -> None:
    made = make()
    refusing(ValueError, "the same model or optimizer twice", lambda: made)
    refusing(ValueError, "the same model or optimizer twice", lambda: (nn.Sequential(made[0]), *made[1:]))
    refusing(ValueError, "the same model or optimizer twice", lambda: (make()[0], *made[1:]))


class Learned(nn.Module):
    """A loss with a parameter, and a count in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output, target) * self.scale * (1 + self.calls / 100)


LEARNED, FROZEN = Learned(), Learned().requires_grad_(False)


@pytest.mark.parametrize(
    "wrap", [lambda loss_fn: loss_fn, lambda loss_fn: nn.Sequential(loss_fn), lambda loss_fn: loss_fn.forward]
)
def test_two_loops_cannot_train_the_same_loss(wrap: Any) -> None:
    def make_with_one_loss() -> Any:
        model = make()[0]
        return model, torch.optim.SGD([*model.parameters(), *LEARNED.parameters()], lr=0.1), wrap(LEARNED)

    refusing(ValueError, "or a loss_fn with the same trained parameters", make_with_one_loss)


def test_each_loop_has_its_own_state_of_a_loss() -> None:
    report = compare(lambda: (*make()[:2], FROZEN), batches(), steps=4, exact=True)
    assert report.max_weight_difference == 0.0
    assert report.plain.losses == report.wrapped.losses


def test_a_trained_loss_built_each_time_will_do() -> None:
    def make_with_a_loss() -> Any:
        model, loss_fn = make()[0], Learned()
        return model, torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1), loss_fn

    assert compare(make_with_a_loss, batches(), steps=4, exact=True).max_weight_difference == 0.0


def test_make_fails_the_second_time() -> None:
    made = [make()]
    refusing(ValueError, r"second time \(IndexError: pop from empty list\)", lambda: made.pop())


def test_make_fails_the_first_time_with_its_own_error() -> None:
    refusing(ZeroDivisionError, "division by zero", lambda: 1 / 0)


def test_make_draws_from_elsewhere() -> None:
    generator = torch.Generator()

    def make_differently() -> Any:
        model, optimizer, loss_fn = make()
        with torch.no_grad():
            model[0].bias.normal_(generator=generator)
        return model, optimizer, loss_fn

    refusing(ValueError, "differ from the start, in '0.bias'", make_differently)


@pytest.mark.parametrize("holder", ["model", "loss_fn"])
def test_buffers_that_differ(holder: str) -> None:
    drawn = iter(range(9))

    def make_differently() -> Any:
        model, optimizer, loss_fn = make()
        {"model": model, "loss_fn": loss_fn}[holder].register_buffer("drawn", torch.tensor(next(drawn)))
        return model, optimizer, loss_fn

    refusing(ValueError, f"differ from the start, in '{'loss_fn.' * (holder == 'loss_fn')}drawn'", make_differently)


def test_buffers_that_are_no_numbers_or_sparse_are_no_difference() -> None:
    def make_with_gaps() -> Any:
        model, optimizer, loss_fn = make()
        model.register_buffer("gaps", torch.tensor([1.0, float("nan")]), persistent=False)
        model.register_buffer("graph", torch.eye(3).to_sparse())
        return model, optimizer, loss_fn

    assert compare(make_with_gaps, batches(), steps=1, exact=True).max_weight_difference == 0.0


def test_a_function_may_give_the_batches() -> None:
    data = batches()
    assert compare(make, lambda: data, steps=2).plain.losses
    assert compare(make, lambda: iter(data * 3), steps=2).plain.losses


@pytest.mark.parametrize(("data", "given"), [(5, "<int>"), (lambda: None, "returns NoneType>")])
def test_what_is_no_batches(data: Any, given: str) -> None:
    refusing(TypeError, f"{given}\\): both loops train on batches; pass a loader", make, data)


class InPlace(nn.Module):
    """A forward that scales its input in place, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.sub_(0.5).mul_(2.0))


def make_in_place() -> Any:
    model = InPlace()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_that_changes_its_batch_gets_one_of_its_own(nested: bool) -> None:
    data = [([x], y) if nested else (x, y) for x, y in batches()]
    before = [batch[0][0].clone() for batch in data]
    made = make_in_place
    if nested:

        def made() -> Any:
            model, optimizer, loss_fn = make_in_place()
            forward = model.forward
            model.forward = lambda x: forward(x[0])
            return model, optimizer, loss_fn

    report = compare(made, data, steps=6, exact=True)
    assert report.max_weight_difference == 0.0
    assert report.plain.losses == report.wrapped.losses
    assert all(torch.equal(batch[0][0], was) for batch, was in zip(data, before, strict=True))


def test_batches_that_stay_as_they_are_are_not_copied_while_the_clock_runs() -> None:
    data = batches()
    seen = []

    def make_watching() -> Any:
        model, optimizer, loss_fn = make()
        model.register_forward_pre_hook(lambda _, args: seen.append(args[0].data_ptr()))
        return model, optimizer, loss_fn

    compare(make_watching, data, steps=6, exact=True)
    assert set(seen[-6:]) <= {x.data_ptr() for x, _ in data}


def test_batches_run_out() -> None:
    refusing(ValueError, r"steps=20\): the batches ran out after 7, and 25 are needed", make, iter(batches(7)), steps=20)
    refusing(ValueError, "ran out after 0", make, [])


def test_a_batch_that_does_not_fit_is_explained_by_the_step() -> None:
    refusing(TypeError, "with a loss_fn the last argument is the target", make, [torch.randn(4, 4)])


def test_an_iterator_that_is_long_enough_will_do() -> None:
    assert len(compare(make, iter(batches(8)), steps=3).plain.losses) == 8


@pytest.mark.parametrize(("call", "where"), [(2, "wrapped loop is nan at step 2"), (6, "plain loop is nan at step 3")])
def test_a_loss_that_is_not_finite(call: int, where: str) -> None:
    calls: list[None] = []  # the first turn is three steps of each loop

    def make_broken() -> Any:
        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return output.sum() * (float("nan") if len(calls) == call else 1.0)

        return *make()[:2], loss_fn

    refusing(ValueError, f"the loss of the {where}", make_broken)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "9"])
def test_steps_is_a_positive_number(steps: Any) -> None:
    refusing(ValueError, rf"steps={steps!r}\): steps is how many", make, steps=steps)


@pytest.mark.parametrize("wish", [{"accumulate": 2}, {"clip_norm": 1.0}, {"scheduler": None}, {"before_update": print}])
def test_wishes_that_change_the_training_are_refused(wish: dict[str, Any]) -> None:
    refusing(TypeError, f"{next(iter(wish))}=...\\): this changes the training", make, **wish)


def test_a_bad_wish_is_that_of_optimize() -> None:
    refusing(ValueError, "precision='int8'", make, precision="int8")


# --- an accelerator -------------------------------------------------------------------------------------------------------


@pytest.mark.simgpu
def test_both_loops_run_on_the_accelerator() -> None:
    report = compare(make, batches(), steps=4, exact=True)
    assert report.device.type == simgpu.NAME
    assert report.max_weight_difference == 0.0
    assert (report.plain.syncs, report.wrapped.syncs) == (2, 0)


@pytest.mark.simgpu
def test_memory_is_what_a_loop_owns_and_what_its_step_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.get_device_module(simgpu.NAME)
    monkeypatch.setattr(module, "reset_peak_memory_stats", lambda device: None, raising=False)
    monkeypatch.setattr(module, "memory_allocated", lambda device: 1000, raising=False)
    monkeypatch.setattr(module, "max_memory_allocated", lambda device: 1700, raising=False)

    def make_small() -> Any:
        model = nn.Linear(4, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss()

    report = compare(make_small, batches(), steps=1, exact=True)
    ten_floats = 10 * 4
    assert report.plain.peak_memory == 3 * ten_floats + 700  # weights, gradients, momentum
    assert report.wrapped.peak_memory == 3 * ten_floats + 700


def test_a_shared_loss_that_cannot_be_copied_is_shared() -> None:
    class Stuck(nn.MSELoss):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot be copied")

    loss_fn = Stuck()

    def make() -> Any:
        net = nn.Linear(3, 2)
        return net, torch.optim.SGD(net.parameters(), 0.1), loss_fn

    report = compare(make, [(torch.ones(4, 3), torch.zeros(4, 2))], steps=2, exact=True)
    assert report.max_weight_difference == 0.0
