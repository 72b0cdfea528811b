"""What hotloop adds to a bare loop with the same settings: time, dispatched operators, host reads, Python calls.

python -m benchmarks.overhead
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import loops
from benchmarks.loops import Loop
from benchmarks.measure import assert_close, counted, interleave, one_thread, table, write
from benchmarks.workloads import WORKLOADS, Workload
from hotloop import optimize

ROUNDS = 80


def clipped(workload: Workload) -> Loop:
    model, optimizer, loss_fn = workload.make(fused=True)
    batches = workload.batches()

    def run() -> None:
        for _ in range(workload.steps):
            x, y = next(batches)
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return Loop(run, model)


def accumulated(workload: Workload) -> Loop:
    model, optimizer, loss_fn = workload.make(fused=True)
    batches = workload.batches()

    def run() -> None:
        for number in range(workload.steps):
            x, y = next(batches)
            (loss_fn(model(x), y) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    return Loop(run, model)


def under_ddp(workload: Workload) -> Loop:
    model, optimizer, loss_fn = workload.make(fused=True)
    return Loop(loops.by_hand(workload, DistributedDataParallel(model), optimizer, loss_fn).run, model)


def wrapped(fused: bool, **wishes: Any) -> Callable[[Workload], Loop]:
    def make(workload: Workload) -> Loop:
        model, step = optimize(*workload.make(fused=fused), exact=True, **wishes)
        batches = workload.batches()

        def run() -> None:
            for _ in range(workload.steps):
                step(*next(batches))

        return Loop(run, model)

    return make


# The bare loop, and the wrapped one that does the same.
PAIRS: dict[str, tuple[Callable[[Workload], Loop], Callable[[Workload], Loop]]] = {
    "Adam": (loops.bare, wrapped(False)),
    "fused Adam": (lambda workload: loops.bare(workload, fused=True), wrapped(True)),
    "clipping": (clipped, wrapped(True, clip_norm=1.0)),
    "accumulation": (accumulated, wrapped(True, accumulate=2)),
    "one of several processes": (under_ddp, wrapped(True, distributed=True)),
}


def measure(workload: Workload, make_bare: Any, make_wrapped: Any) -> dict[str, float]:
    bare, hot = make_bare(workload), make_wrapped(workload)
    for loop in (bare, hot):
        loop.run()
    assert_close(bare.weights(), hot.weights(), 0.0, "hotloop with the same settings")
    times = interleave({"bare": bare.run, "hotloop": hot.run}, rounds=ROUNDS, warmup=10)
    added = [h - b for h, b in zip(times["hotloop"], times["bare"], strict=True)]
    before, after = counted(bare.run, workload.steps), counted(hot.run, workload.steps)
    return {
        "bare µs": round(1e6 * statistics.median(times["bare"]) / workload.steps, 1),
        "added µs": round(1e6 * statistics.median(added) / workload.steps, 1),
        **{f"added {name}": round(after[name] - before[name], 1) for name in before},
    }


def main() -> None:
    workload = WORKLOADS["tiny MLP"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with one_thread():
        results = {name: measure(workload, *pair) for name, pair in PAIRS.items()}
    dist.destroy_process_group()
    print(table(results))
    print(write("overhead", {"workload": workload.name, "a step": results}))


if __name__ == "__main__":
    main()
