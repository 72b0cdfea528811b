"""Plain loops against hotloop, on every workload: training, evaluation, and a whole epoch with loading.

    python -m benchmarks.baseline [workload ...]

Against the naive loop (default optimizer, float32, the loss read in every step):

- bare: the same without reading the loss; hand-tuned: fused Adam and channels_last, written out by hand;
- hotloop: as it comes; hotloop, fp32: the same without 16-bit kernels; hotloop, exact: bitwise the naive loop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import epochs, loops
from benchmarks.loops import Loop
from benchmarks.measure import assert_close, interleave, one_thread, summary, table, write
from benchmarks.workloads import WORKLOADS, Workload
from hotloop import compare

SECONDS = 3  # for the timed rounds of one table
LOOPS: dict[str, Callable[[Workload], Loop]] = {
    "naive": loops.naive,
    "bare": loops.bare,
    "hand-tuned": loops.tuned,
    "hotloop": loops.wrapped,
    "hotloop, fp32": lambda workload: loops.wrapped(workload, precision="fp32"),
    "hotloop, exact": lambda workload: loops.wrapped(workload, exact=True),
}
EXACT = ("bare", "hotloop, exact")
EPOCHS = ("tiny MLP", "tabular MLP", "ResNet-like")


def training(workload: Workload) -> dict[str, Any]:
    made = {name: make(workload) for name, make in LOOPS.items()}
    runs = {name: loop.run for name, loop in made.items()}
    rounds = _rounds(runs)
    for name in EXACT:
        assert_close(made["naive"].weights(), made[name].weights(), 0.0, f"{workload.name}, {name}")
    rows = summary(interleave(runs, rounds=rounds, warmup=1), base="naive", per=workload.steps)
    return {name: {**row, "loss": loss_of(workload, made[name])} for name, row in rows.items()}


def evaluation(workload: Workload) -> dict[str, Any]:
    runs = {
        "naive": epochs.plain_evaluation(workload),
        "with gradients": epochs.plain_evaluation(workload, gradients=True),
        "hotloop": epochs.wrapped_evaluation(workload),
        "hotloop, fp32": epochs.wrapped_evaluation(workload, precision="fp32"),
        "hotloop, exact": epochs.wrapped_evaluation(workload, exact=True),
    }
    _assert_same(workload, {name: run() for name, run in runs.items() if name != "with gradients"})
    return summary(interleave(runs, rounds=_rounds(runs), warmup=1), base="naive")


def epoch(workload: Workload) -> dict[str, Any]:
    runs = {
        "naive": epochs.plain_epoch(workload),
        "hotloop": epochs.wrapped_epoch(workload),
        "hotloop, fp32": epochs.wrapped_epoch(workload, precision="fp32"),
        "hotloop, exact": epochs.wrapped_epoch(workload, exact=True),
    }
    found = {}
    for name, run in runs.items():
        torch.manual_seed(2)  # the same order of samples
        found[name] = run()
    _assert_same(workload, found)
    return summary(interleave(runs, rounds=_rounds(runs), warmup=1), base="naive")


def agreement(training: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What a user of `compare` is told of the digits net, whose plain loop is the bare one, beside what is measured here."""
    workload = WORKLOADS["digits net"]
    start = time.perf_counter()
    told = compare(workload.make, workload.some(), steps=200).as_dict()["ratio"]
    seconds = time.perf_counter() - start
    rows = training[workload.name]
    measured = rows["hotloop"]["ms"] / rows["bare"]["ms"]
    return {workload.name: {"compare": round(told, 4), "baseline": round(measured, 4), "seconds": round(seconds, 1)}}


def _rounds(runs: dict[str, Callable[[], object]]) -> int:
    """As many as fit into the time for a table, by a first look."""
    first = interleave(runs, rounds=2, warmup=1)
    return min(60, max(5, int(SECONDS / sum(min(times) for times in first.values()))))


def _assert_same(workload: Workload, found: dict[str, float]) -> None:
    exact, naive = found["hotloop, exact"], found["naive"]
    if abs(exact - naive) > 1e-6 or abs(found["hotloop"] - naive) > 0.05:  # the one is a float32, the other a float64
        raise AssertionError(f"{workload.name}: {found}")


def loss_of(workload: Workload, loop: Loop) -> float:
    """The loss on one batch after all those steps: the faster loops must have learned the same."""
    x, y = next(workload.batches())
    loop.model.eval()
    with torch.no_grad():
        loss = float(workload.loss_fn(loop.model(x), y))
    loop.model.train()
    return round(loss, 4)


def main() -> None:
    chosen = sys.argv[1:] or list(WORKLOADS)
    results: dict[str, dict[str, Any]] = {"training": {}, "evaluation": {}, "epoch": {}}
    with one_thread():
        for kind, measure, names in (
            ("training", training, WORKLOADS),
            ("evaluation", evaluation, WORKLOADS),
            ("epoch", epoch, EPOCHS),
        ):
            for name in filter(chosen.__contains__, names):
                results[kind][name] = measure(WORKLOADS[name])
                print(f"\n{kind}: {name}\n{table(results[kind][name])}", flush=True)
    if chosen == list(WORKLOADS):
        with one_thread():
            results["compare"] = agreement(results["training"])
        print(f"\ncompare\n{table(results['compare'])}")
        print(write("baseline", results))


if __name__ == "__main__":
    main()
