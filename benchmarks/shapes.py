"""cuDNN's benchmark flag under stable, bucketed and random shapes, and what becomes of a flag that is turned on too late.

    python -m benchmarks.shapes

cuDNN's plans are kept for the whole process, by the convolution and not by the flag, so every variant runs in processes of its
own. Without CUDA there is nothing to time: everything runs once on the CPU, as far as it goes, and no results are written.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import synchronize, table, write
from benchmarks.workloads import resnet
from hotloop import optimize

PROCESSES = 3  # for each variant, in turns
STEPS = 100
CALLS = 200
BATCH = 32 if torch.cuda.is_available() else 2  # on the CPU nothing is timed
Size = tuple[int, int]

# The sizes of the images, step by step.
SIZES = [(h, w) for h in range(32, 160, 8) for w in range(32, 160, 8)]
STREAMS: dict[str, Callable[[int], list[Size]]] = {
    "stable": lambda steps: [(96, 96)] * steps,
    "bucketed": lambda steps: random.Random(0).choices(SIZES[::26], k=steps),  # ten sizes
    "random": lambda steps: random.Random(0).sample(SIZES, k=steps),
}
WISHES: dict[str, Any] = {"off": False, "on": True, "auto": "auto"}

# Input channels, output channels, kernel size, stride, images' size.
CONVOLUTIONS = [(64, 64, 3, 1, 56), (128, 256, 3, 2, 28), (256, 512, 1, 1, 28), (32, 64, 5, 1, 64)]
FLAGS = {"off": (False, False), "on from the start": (True, True), "on after the first call": (False, True)}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stream(name: str, wish: str, steps: int = STEPS) -> dict[str, float]:
    """Milliseconds a step of a small ResNet, the search for plans included and, over the last quarter, mostly without."""
    torch.manual_seed(0)
    model = resnet(32, 32, 64)
    flags: list[bool] = []
    model.register_forward_pre_hook(lambda *_: flags.append(torch.backends.cudnn.benchmark))
    model, step = optimize(model, torch.optim.Adam(model.parameters()), F.cross_entropy, cudnn_benchmark=WISHES[wish])
    times = []
    for height, width in STREAMS[name](steps):
        x, y = torch.randn(BATCH, 3, height, width, device=device()), torch.randint(10, (BATCH,), device=device())
        times.append(seconds(lambda x=x, y=y: step(x, y)))
    last = times[-(-3 * steps // 4) :]
    return {"ms": 1e3 * statistics.mean(times), "last ms": 1e3 * statistics.mean(last), "flag on": sum(flags) / steps}


def trap(convolution: str, when: str, calls: int = CALLS) -> dict[str, float]:
    """Milliseconds of one convolution, forward and backward, once its plan is chosen."""
    inputs, outputs, kernel, stride, size = CONVOLUTIONS[int(convolution)]
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, device=device())
    x = torch.randn(BATCH, inputs, size, size, device=device(), requires_grad=True)
    first, later = FLAGS[when]

    def run() -> None:
        layer(x).sum().backward()

    torch.backends.cudnn.benchmark = first
    run()
    torch.backends.cudnn.benchmark = later
    for _ in range(calls // 10):
        run()
    return {"ms": 1e3 * statistics.median(seconds(run) for _ in range(calls))}


def seconds(run: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def wake() -> None:
    """What the first convolution of a process loads is none of the flag's business."""
    nn.Conv2d(8, 8, 3, device=device())(torch.randn(2, 8, 9, 9, device=device())).sum().backward()


QUESTIONS: dict[str, Callable[..., dict[str, float]]] = {"stream": stream, "trap": trap}


def measure(question: str, what: str, variants: list[str]) -> dict[str, dict[str, float]]:
    """Each variant's median over its processes, with the ratio of all steps to the flag off."""
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for _ in range(PROCESSES):
        for variant in variants:
            command = [sys.executable, "-m", "benchmarks.shapes", question, what, variant]
            found[variant].append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
    rows = {v: {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]} for v, runs in found.items()}
    return {
        v: {**row, **{f"ratio{k[:-3]}": round(row[k] / rows["off"][k], 4) for k in row if k.endswith("ms")}}
        for v, row in rows.items()
    }


def as_far_as_it_goes() -> None:
    print("No CUDA here: a few steps on the CPU show that everything runs, and how often the flag would be on. No results.")
    flag = {name: {wish: stream(name, wish, steps=12)["flag on"] for wish in WISHES} for name in STREAMS}
    before = torch.backends.cudnn.benchmark
    for number in range(len(CONVOLUTIONS)):
        for when in FLAGS:
            trap(str(number), when, calls=2)
    torch.backends.cudnn.benchmark = before
    print(f"\nflag on, share of 12 steps\n{table(flag)}")


def main() -> None:
    if sys.argv[1:]:
        question, what, variant = sys.argv[1:]
        wake()
        print(json.dumps(QUESTIONS[question](what, variant)))
        return
    if not torch.cuda.is_available():
        as_far_as_it_goes()
        return
    results: dict[str, dict[str, Any]] = {"streams": {}, "one convolution": {}}
    for name in STREAMS:
        results["streams"][name] = measure("stream", name, list(WISHES))
        print(f"\n{name} shapes\n{table(results['streams'][name])}", flush=True)
    for number, convolution in enumerate(CONVOLUTIONS):
        name = "{} to {} channels, {}x{}, stride {}, {} pixels".format(*convolution[:3], *convolution[2:])
        results["one convolution"][name] = measure("trap", str(number), list(FLAGS))
        print(f"\n{name}\n{table(results['one convolution'][name])}", flush=True)
    print(write("shapes", results))


if __name__ == "__main__":
    main()
