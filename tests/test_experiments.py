"""The benchmarks that ask one question each: every transform alone, cuDNN's flag under changing shapes, reading the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import ablation, loops, reading, shapes
from benchmarks.measure import counted
from benchmarks.workloads import Workload, classification, mlp
from torch import Tensor, nn

SMALL = Workload("small", lambda: mlp(8, 16, 10), lambda: classification(4, 8), steps=2)

# --- each transform alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "choice", "measured"),
    [("fused", "on", True), ("precision", "fp32", True), ("channels_last", "off", False), ("cudnn_benchmark", "off", False)],
)
def test_what_is_left_off_is_asked_for_where_it_can_be_had(name: str, choice: str, measured: bool) -> None:
    found, loop = ablation.alone(SMALL, name)
    assert (found, loop is not None) == (choice, measured)


def test_transforms_are_measured_against_the_naive_loop_to_the_bit() -> None:
    rows = ablation.measure(SMALL, ["fused", "channels_last"], rounds=2)
    assert rows["off"]["ratio"] == 1.0
    assert rows["fused"]["auto"] == "on"
    assert rows["fused"]["ratio"] > 0
    assert rows["channels_last"] == {"auto": "off"}


def test_loops_that_have_learned_something_else_are_not_timed() -> None:
    made = {"off": loops.wrapped(SMALL, **ablation.OFF), "other": loops.wrapped(SMALL, **ablation.OFF)}
    made["off"].run()
    for _ in range(40):
        made["other"].run()
    with pytest.raises(AssertionError, match="small: losses after a few steps differ"):
        ablation.assert_same(SMALL, made)


def row(ratio: float, auto: str = "on", spread: float = 0.01) -> dict[str, Any]:
    return {"auto": auto, "ratio": ratio, "ms": ratio, "low": ratio - spread, "high": ratio + spread}


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (row(0.5), row(0.9), "gains on 2 of 2 workloads, most on a (0.50)"),
        (row(0.5), row(1.2), "gains on 1 of 2 workloads, most on a (0.50); slower on b (1.20)"),
        (row(0.5, auto="off"), row(0.99), "no gain anywhere on this machine; switched on for 1 workloads"),
        (row(0.9, spread=0.2), row(1.1, spread=0.2), "no gain anywhere on this machine; switched on for 2 workloads"),
        ({"auto": "off"}, row(0.5, auto="fp32"), "no gain anywhere on this machine; switched on for 0 workloads"),
    ],
)
def test_a_gain_counts_where_it_is_switched_on_and_beyond_the_spread(
    first: dict[str, Any], second: dict[str, Any], told: str
) -> None:
    results = {"a": {"off": {"ms": 1.0}, "x": first}, "b": {"off": {"ms": 1.0}, "x": second}}
    assert ablation.verdict(results, ["x"]) == {"x": told}


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_streams_of_shapes() -> None:
    stable, bucketed, random = (shapes.STREAMS[name](100) for name in ("stable", "bucketed", "random"))
    assert [len(set(sizes)) for sizes in (stable, bucketed, random)] == [1, 10, 100]


@pytest.mark.parametrize(("wish", "share"), [("off", 0.0), ("on", 1.0), ("auto", 8 / 12)])
def test_ever_new_shapes_run_out_of_credit(wish: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SIZES", [(8 + i, 8) for i in range(12)])
    assert shapes.stream("random", wish, steps=12)["flag on"] == share


@pytest.mark.parametrize(
    ("when", "expected"),
    [("off", [False] * 4), ("on from the start", [True] * 4), ("on after the first call", [False, True, True, True])],
)
def test_the_flag_is_turned_on_when_the_variant_says(when: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # put back in the end
    monkeypatch.setattr(shapes, "CONVOLUTIONS", [(2, 2, 3, 1, 4)])
    flags: list[bool] = []
    forward = nn.Conv2d.forward

    def watched(layer: nn.Conv2d, x: Tensor) -> Tensor:
        flags.append(torch.backends.cudnn.benchmark)
        return forward(layer, x)

    monkeypatch.setattr(nn.Conv2d, "forward", watched)
    assert shapes.trap("0", when, calls=3)["ms"] > 0
    assert flags == expected


# --- reading ----------------------------------------------------------------------------------------------------------


def test_all_loops_do_the_same_and_read_as_often_as_they_say() -> None:
    made = reading.variants(SMALL, steps=2)
    reading.run_once(made, SMALL)
    never = counted(made["plain, never"].run, 2)["reads"]
    reads = {name: counted(loop.run, 2)["reads"] - never for name, loop in made.items() if name.startswith("plain")}
    assert reads == {"plain, never": 0, "plain, every 50": 0.5, "plain, every step": 1}


def test_loops_that_have_done_other_steps_are_not_timed() -> None:
    made = reading.variants(SMALL, steps=2)
    made["hotloop, never"].run()
    with pytest.raises(AssertionError, match="small, hotloop, never: the weights differ"):
        reading.run_once(made, SMALL)


def learned(steps: int = 2, noise: float = 0.0) -> dict[str, Tensor]:
    """What Adam makes of gradients that differ as much as another order of summation lets them."""
    model, optimizer, loss_fn = SMALL.make()
    generator = torch.Generator().manual_seed(7)
    for x, y in SMALL.some()[:steps]:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        for p in model.parameters():
            p.grad += noise * p.grad.abs().max() * torch.randn(p.shape, generator=generator)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def learning(**how: Any) -> loops.Loop:
    model = SMALL.make()[0]
    return loops.Loop(lambda: model.load_state_dict(learned(**how)), model)


@pytest.fixture
def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may add in another order in each run."""
    monkeypatch.setattr(reading, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(reading, "batches", lambda workload: iter(workload.some()))


@pytest.mark.usefixtures("on_an_accelerator")
def test_on_an_accelerator_loops_that_differ_by_rounding_are_timed() -> None:
    reading.run_once({"plain, never": learning(), "hotloop, never": learning(noise=1e-5)}, SMALL)


@pytest.mark.usefixtures("on_an_accelerator")
@pytest.mark.parametrize("other", [{"steps": 0}, {"steps": 1}, {"noise": 1.0}], ids=str)
def test_on_an_accelerator_loops_that_have_learned_something_else_are_not_timed(other: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="small, hotloop, never: losses after the same steps"):
        reading.run_once({"plain, never": learning(), "hotloop, never": learning(**other)}, SMALL)
