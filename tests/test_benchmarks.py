"""The measuring core, and that every workload trains the same with and without hotloop."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import loops, measure, reading, shapes
from benchmarks.workloads import WORKLOADS, Workload


def test_variants_take_turns_and_warm_up_is_not_kept() -> None:
    order: list[str] = []
    collecting: list[bool] = []
    variants = {name: lambda name=name: (order.append(name), collecting.append(gc.isenabled())) for name in "ABC"}
    times = measure.interleave(variants, rounds=2, warmup=1)
    assert "".join(order) == "ABC" * 3
    assert {name: len(values) for name, values in times.items()} == {"A": 2, "B": 2, "C": 2}
    assert not any(collecting)
    assert gc.isenabled()


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    times = {"base": [1.0, 10.0, 1.0, 1.0], "twice": [2.0, 20.0, 2.0, 2.0]}
    rows = measure.summary(times, base="base", per=2)
    assert rows["twice"]["ratio"] == 2.0
    assert rows["base"]["ratio"] == 1.0
    assert rows["twice"]["ms"] == 1000.0


def test_parity_is_asserted() -> None:
    a, b = {"w": torch.zeros(2), "n": torch.tensor(3)}, {"w": torch.tensor([0.0, 0.5]), "n": torch.tensor(3)}
    assert measure.assert_close(a, b, 0.5, "x") == 0.5
    with pytest.raises(AssertionError, match=r"x: the weights differ by 0\.5, more than 0\.1"):
        measure.assert_close(a, b, 0.1, "x")
    with pytest.raises(AssertionError):
        measure.assert_close(a, {"w": torch.full((2,), float("nan")), "n": torch.tensor(3)}, 1.0, "x")


def test_operators_reads_and_calls_are_counted() -> None:
    x = torch.ones(2)
    found = measure.counted(lambda: [(x + 1).sum().item() for _ in range(4)], steps=4)
    assert (found["operators"], found["reads"]) == (3, 1)
    assert found["calls"] >= 2


def test_results_tell_the_machine_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    result = json.loads(measure.write("name", {"figures": [1]}).read_text())
    assert result["figures"] == [1]
    assert {"cpu", "cores", "torch", "hotloop", "python", "commit", "accelerator"} <= result["machine"].keys()
    assert result["command"].startswith("python -m ")


# "many sizes" is the net of "ResNet-like", smaller
@pytest.mark.parametrize("workload", [w for w in WORKLOADS.values() if w.name != "ResNet-like"], ids=lambda w: w.name)
def test_exact_loops_are_the_plain_loop_to_the_bit(workload: Workload) -> None:
    short = Workload(workload.name, workload.model, workload.data)
    plain, hot = loops.naive(short), loops.wrapped(short, exact=True)
    before = plain.weights()
    for loop in (plain, hot):
        loop.run()
        loop.run()
    assert measure.assert_close(plain.weights(), hot.weights(), 0.0, workload.name) == 0.0
    with pytest.raises(AssertionError):
        measure.assert_close(plain.weights(), before, 0.0, "untrained")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they measure")
@pytest.mark.parametrize(("script", "told"), [(shapes, "random    0.000  1.000  0.667"), (reading, "same weights, to the bit")])
def test_what_needs_a_gpu_runs_as_far_as_it_goes(
    script: Any, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark"])
    script.main()
    out = capsys.readouterr().out
    assert "No results" in out
    assert told in out
