"""Each transform alone, against the wrapped model with all of them off, on every workload.

    python -m benchmarks.ablation [--compile]

A transform is measured as "auto" has it. Where "auto" leaves it off it is asked for, if that is possible, which tells whether it
is left off for good reason. What gains nowhere that "auto" switches it on has no place in the library, on any machine that shows it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import loops
from benchmarks.loops import Loop
from benchmarks.measure import assert_close, interleave, one_thread, summary, table, write
from benchmarks.workloads import WORKLOADS, Workload
from hotloop import optimize

ROUNDS = 25
FEWER_ROUNDS = {"ResNet-like": 5}
OFF: dict[str, Any] = {"precision": "fp32", "channels_last": False, "fused": False, "cudnn_benchmark": False, "compile": False}
IN_THE_PLAN = {"fused": "fused_optimizer"}  # where its name is not the wish's
LEFT_OFF = ("off", "fp32", "as it is")
# What to ask for where "auto" leaves a transform off. cuDNN's flag is never on without a convolution, and then it does nothing.
ASKED_FOR = {"precision": "bf16", "channels_last": True, "fused": True, "compile": True}
GAIN = 0.97  # what takes more of the time than this has no gain


def alone(workload: Workload, name: str) -> tuple[str, Loop | None]:
    """What "auto" chooses for one transform, and a loop with that transform alone; None where it cannot be had."""
    wish: Any = "auto" if name != "compile" else False
    plan = optimize(*workload.make(), **{**OFF, name: wish}).step.plan
    choice = plan[IN_THE_PLAN.get(name, name)].choice
    if choice in LEFT_OFF:
        if name not in ASKED_FOR:
            return choice, None
        wish = ASKED_FOR[name]
    try:
        return choice, loops.wrapped(workload, read=False, **{**OFF, name: wish})
    except ValueError:
        return choice, None


def measure(workload: Workload, names: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    off = loops.wrapped(workload, read=False, **OFF)
    found = {name: alone(workload, name) for name in names}
    made = {"off": off, **{name: loop for name, (_, loop) in found.items() if loop is not None}}
    for loop in made.values():
        loop.run()
    assert_same(workload, made)
    times = interleave({name: loop.run for name, loop in made.items()}, rounds=rounds)
    rows = summary(times, base="off", per=workload.steps)
    return {"off": rows["off"], **{name: {"auto": choice, **rows.get(name, {})} for name, (choice, _) in found.items()}}


def assert_same(workload: Workload, made: dict[str, Loop]) -> None:
    """With everything off it is the naive loop, to the bit; with one transform it has learned the same, but for rounding."""
    if not torch.accelerator.is_available():
        naive = loops.naive(workload)
        naive.run()
        assert_close(naive.weights(), made["off"].weights(), 0.0, f"{workload.name}, everything off")
    x, y = next(workload.batches())
    with torch.no_grad():
        losses = {name: float(workload.loss_fn(loop.model(x).cpu(), y)) for name, loop in made.items()}
    if any(abs(loss - losses["off"]) > 0.05 for loss in losses.values()):
        raise AssertionError(f"{workload.name}: losses after a few steps differ: {losses}")


def verdict(results: dict[str, dict[str, dict[str, Any]]], names: list[str]) -> dict[str, str]:
    """For each transform, whether it has a gain where "auto" switches it on."""
    told = {}
    for name in names:
        on = {w: (rows[name], rows["off"]) for w, rows in results.items() if rows[name]["auto"] not in LEFT_OFF}
        ratios = {w: row["ratio"] for w, (row, _) in on.items()}
        # Beyond the spread as well: a flag that does nothing has a ratio below 1 half of the time.
        gains = [w for w, (row, off) in on.items() if row["ratio"] <= GAIN and row["high"] < off["ms"]]
        if gains:
            best = min(gains, key=ratios.__getitem__)
            told[name] = f"gains on {len(gains)} of {len(ratios)} workloads, most on {best} ({ratios[best]:.2f})"
        else:
            told[name] = f"no gain anywhere on this machine; switched on for {len(ratios)} workloads"
        slower = [w for w, (row, off) in on.items() if row["ratio"] > 2 - GAIN and row["low"] > off["ms"]]
        if slower:
            told[name] += f"; slower on {', '.join(f'{w} ({ratios[w]:.2f})' for w in slower)}"
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="torch.compile too, which takes minutes")
    names = [name for name in OFF if name != "compile" or parser.parse_args().compile]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with one_thread():
        for name, workload in WORKLOADS.items():
            results[name] = measure(workload, names, FEWER_ROUNDS.get(name, ROUNDS))
            print(f"\n{name}\n{table(results[name])}", flush=True)
    told = verdict(results, names)
    print("", *(f"{name}: {text}" for name, text in told.items()), sep="\n")
    file = "ablation_gpu" if torch.accelerator.is_available() else "ablation"
    print(write(file, {"alone": results, "verdict": told}))


if __name__ == "__main__":
    main()
