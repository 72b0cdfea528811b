"""Plain loops against hotloop, on every workload: training, evaluation, and a whole epoch with loading.

    python -m benchmarks.baseline [workload ...]

Against the naive loop (default optimizer, float32, the loss read in every step):

- bare: the same without reading the loss; hand-tuned: fused Adam and channels_last, written out by hand;
- hotloop: as it comes; hotloop, fp32: the same without 16-bit kernels; hotloop, exact: bitwise the naive loop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import loops
from benchmarks.loops import Loop
from benchmarks.measure import assert_close, interleave, one_thread, summary, table, write
from benchmarks.workloads import WORKLOADS, Workload

SECONDS = 25  # for the timed rounds of one workload
LOOPS: dict[str, Callable[[Workload], Loop]] = {
    "naive": loops.naive,
    "bare": loops.bare,
    "hand-tuned": loops.tuned,
    "hotloop": loops.wrapped,
    "hotloop, fp32": lambda workload: loops.wrapped(workload, precision="fp32"),
    "hotloop, exact": lambda workload: loops.wrapped(workload, exact=True),
}
EXACT = ("bare", "hotloop, exact")


def training(workload: Workload) -> dict[str, Any]:
    with one_thread():
        made = {name: make(workload) for name, make in LOOPS.items()}
        first = interleave({name: loop.run for name, loop in made.items()}, rounds=2, warmup=1)
        for name in EXACT:
            assert_close(made["naive"].weights(), made[name].weights(), 0.0, f"{workload.name}, {name}")
        rounds = min(60, max(7, int(SECONDS / sum(min(times) for times in first.values()))))
        times = interleave({name: loop.run for name, loop in made.items()}, rounds=rounds)
        losses = {name: loss_of(workload, loop) for name, loop in made.items()}
    rows = summary(times, base="naive", per=workload.steps)
    return {name: {**row, "loss": losses[name]} for name, row in rows.items()}


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
    results = {}
    for name in chosen:
        results[name] = training(WORKLOADS[name])
        print(f"\n{name}\n{table(results[name])}", flush=True)
    if chosen == list(WORKLOADS):
        print(write("baseline", {"load": os.getloadavg(), "training": results}))


if __name__ == "__main__":
    main()
