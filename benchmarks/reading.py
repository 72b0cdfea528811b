"""What it costs to look at the loss: in every step, in every 50th, never, and in every step but one step late.

    python -m benchmarks.reading

Plain loop and hotloop do the same (`exact=True`), on batches that are on the device already. Reading costs where the host would
otherwise run ahead, so this needs an accelerator; on the CPU two models run for two steps, and no results are written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.loops import Loop
from benchmarks.measure import assert_close, interleave, summary, table, write
from benchmarks.workloads import WORKLOADS, Batch, Workload
from hotloop import optimize

ROUNDS = 20
STEPS = 50  # in one timed call
SAME = 2e-3  # between losses; rounding leaves 1e-4 after two steps, and one step more or less makes 1e-2
EVERY = {"never": 0, "every 50": 50, "every step": 1}
CHOSEN = ("tiny MLP", "tabular MLP", "ResNet-like", "GPT-like")


def device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def batches(workload: Workload) -> Iterator[Batch]:
    return itertools.cycle([(x.to(device()), y.to(device())) for x, y in workload.some()])


def plain(workload: Workload, every: int, steps: int) -> Loop:
    model, optimizer, loss_fn = workload.make()
    model.to(device())
    given = batches(workload)

    def run() -> None:
        for number in range(steps):
            x, y = next(given)
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            if every and number % every == 0:
                loss.item()

    return Loop(run, model)


def wrapped(workload: Workload, every: int, steps: int) -> Loop:
    model, step = optimize(*workload.make(), exact=True)
    given = batches(workload)

    def run() -> None:
        for number in range(steps):
            metrics = step(*next(given))
            if every and number % every == 0:
                metrics.item()

    return Loop(run, model)


def late(workload: Workload, steps: int) -> Loop:
    """Each step's loss is read once the next step is on its way."""
    model, step = optimize(*workload.make(), exact=True)
    given = batches(workload)

    def run() -> None:
        last: Any = None
        for _ in range(steps):
            metrics = step(*next(given))
            if last is not None:
                last.item()
            last = metrics

    return Loop(run, model)


def variants(workload: Workload, steps: int) -> dict[str, Loop]:
    made = {f"plain, {name}": plain(workload, every, steps) for name, every in EVERY.items()}
    made |= {f"hotloop, {name}": wrapped(workload, every, steps) for name, every in EVERY.items()}
    made["hotloop, one step late"] = late(workload, steps)
    return made


def run_once(made: dict[str, Loop], workload: Workload) -> None:
    """All of them do the same steps: to the bit on a CPU. An accelerator's kernels may add in another order each time.

    So there it is the loss that must be the same, and after few steps: a gradient that is next to nothing may have either sign,
    Adam makes a whole step of it, and from there the weights of two runs go apart.
    """
    for loop in made.values():
        loop.run()
    base = made["plain, never"]
    for variant, loop in made.items():
        if device().type == "cpu":
            assert_close(base.weights(), loop.weights(), 0.0, f"{workload.name}, {variant}")
        elif not (apart := abs(loss(loop, workload) - loss(base, workload))) <= SAME:
            raise AssertionError(
                f"{workload.name}, {variant}: losses after the same steps are {apart:.2g} apart, more than {SAME}"
            )


@torch.no_grad()
def loss(loop: Loop, workload: Workload) -> float:
    x, y = next(batches(workload))
    return float(workload.loss_fn(loop.model(x), y))


def measure(workload: Workload) -> dict[str, dict[str, float]]:
    run_once(variants(workload, steps=2), workload)
    made = variants(workload, STEPS)
    for loop in made.values():
        loop.run()
    times = interleave({name: loop.run for name, loop in made.items()}, rounds=ROUNDS)
    return summary(times, base="plain, never", per=STEPS)


def as_far_as_it_goes() -> None:
    print("No accelerator here: two steps of each loop on the CPU show that everything runs. No results.")
    for name in CHOSEN[:2]:
        run_once(variants(WORKLOADS[name], steps=2), WORKLOADS[name])
        print(f"{name}: all loops have the same weights, to the bit")


def main() -> None:
    if device().type == "cpu":
        as_far_as_it_goes()
        return
    results: dict[str, Any] = {}
    for name in CHOSEN:
        results[name] = measure(WORKLOADS[name])
        print(f"\n{name}\n{table(results[name])}", flush=True)
    print(write("reading", {"training": results}))


if __name__ == "__main__":
    main()
