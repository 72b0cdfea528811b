"""The peak of a training process's memory, plain and wrapped, each in a process of its own.

    python -m benchmarks.memory

"added MiB" is what training this model added to a process that had trained a tiny one; "process MiB" is the peak of the whole
process, torch itself included, relative to the naive loop's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import loops
from benchmarks.loops import Loop
from benchmarks.measure import table, write
from benchmarks.workloads import WORKLOADS, Workload

NAMES = ("tabular MLP", "ResNet-like", "UNet-like", "GPT-like")
LOOPS: dict[str, Callable[[Workload], Loop]] = {
    "naive": loops.naive,
    "hotloop": loops.wrapped,
    "hotloop, fp32": lambda workload: loops.wrapped(workload, precision="fp32"),
    "hotloop, exact": lambda workload: loops.wrapped(workload, exact=True),
}
# Memory that was freed goes back to the system at once: else the peak depends on the allocator's luck.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def peak(workload: Workload, loop: str) -> tuple[float, float]:
    """The peak of this process in MiB, before and after training. Runs in a process of its own: a peak cannot be reset."""
    import resource

    def highest() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    torch.set_num_threads(1)
    small = WORKLOADS["tiny MLP"]
    LOOPS[loop](small).run()  # loads what is loaded on first use
    before = highest()
    made = LOOPS[loop](workload)
    for _ in range(3):
        made.run()
    return before, highest()


def measure(name: str) -> dict[str, dict[str, Any]]:
    peaks = {loop: _in_a_process(name, loop) for loop in LOOPS}
    _, naive = peaks["naive"]
    return {
        loop: {"added MiB": round(after - before, 1), "process MiB": round(after, 1), "ratio": round(after / naive, 4)}
        for loop, (before, after) in peaks.items()
    }


def _in_a_process(name: str, loop: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.memory", name, loop]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ENVIRONMENT)
    before, after = map(float, done.stdout.split())
    return before, after


def main() -> None:
    if len(sys.argv) == 3:
        print(*peak(WORKLOADS[sys.argv[1]], sys.argv[2]))
        return
    results = {}
    for name in NAMES:
        results[name] = measure(name)
        print(f"\n{name}\n{table(results[name])}", flush=True)
    print(write("memory", {"peak": results}))


if __name__ == "__main__":
    main()
