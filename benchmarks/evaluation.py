"""What `fast_eval` makes of an evaluation: against the loop that most scripts have, and against the same code written by hand.

python -m benchmarks.evaluation
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import interleave, one_thread, summary, table, write
from benchmarks.workloads import WORKLOADS
from hotloop import fast_eval, optimize


def score(model: nn.Module, batches: list[Tensor]) -> Any:
    """The body of every variant but the naive one; a metric that costs next to nothing, so that the model is what is timed."""
    return sum(model(x).square().mean() for x in batches)


def naive(model: nn.Module, batches: list[Tensor]) -> Callable[[], float]:
    """As many scripts have it: gradients on, a read in every batch."""

    def run() -> float:
        model.eval()
        total = 0.0
        for x in batches:
            total += model(x).square().mean().item()
        model.train()
        return total

    return run


def by_hand(model: nn.Module, batches: list[Tensor]) -> Callable[[], float]:
    def run() -> float:
        model.eval()
        with torch.no_grad():
            total = float(score(model, batches))
        model.train()
        return total

    return run


def decorated(model: nn.Module, batches: list[Tensor], **wishes: Any) -> Callable[[], float]:
    evaluate = fast_eval(**wishes)(score)
    return lambda: evaluate(model, batches)


def whole(name: str, size: int, count: int = 8) -> dict[str, dict[str, float]]:
    """Milliseconds a batch, and the ratio to the naive loop."""
    make = WORKLOADS[name].make
    batches = data(name, size, count)
    variants = {
        "naive": naive(make()[0], batches),
        "no_grad by hand": by_hand(make()[0], batches),
        "fast_eval": decorated(make()[0], batches),
        "channels_last and no_grad by hand": by_hand(make()[0].to(memory_format=torch.channels_last), batches),
        "optimize in float32, fast_eval": decorated(optimize(make()[0], precision="fp32"), batches),
        "optimize, fast_eval": decorated(optimize(make()[0]), batches),
    }
    assert_same(variants)
    return summary(interleave(variants, rounds=5, warmup=1), base="naive", per=count)


def overhead(name: str, size: int, count: int) -> dict[str, dict[str, float]]:
    """Milliseconds a batch, and the ratio to the same code by hand, for the same model."""
    model = WORKLOADS[name].make()[0]
    batches = data(name, size, count)
    variants = {
        "by hand": by_hand(model, batches),
        "fast_eval, nothing folded": decorated(model, batches, fold_batchnorm=False),
        "fast_eval": decorated(model, batches),
    }
    assert_same(variants)
    return summary(interleave(variants, rounds=15, warmup=2), base="by hand", per=count)


def data(name: str, size: int, count: int) -> list[Tensor]:
    """Batches of the workload's own shape, but for their size."""
    torch.manual_seed(1)
    return [torch.randn(size, *WORKLOADS[name].data()[0][0].shape[1:]) for _ in range(count)]


def assert_same(variants: dict[str, Callable[[], float]]) -> None:
    """Timing what differs would be vain. bfloat16 rounds to 8 bits."""
    found = {name: run() for name, run in variants.items()}
    if not max(found.values()) - min(found.values()) <= 2e-2 * max(found.values()):
        raise AssertionError(f"the variants compute something else: {found}")


def main() -> None:
    ratios: dict[str, Any] = {}
    for name, size in (("ResNet-like", 64), ("UNet-like", 16)):
        ratios[f"{name}, batch {size}"] = whole(name, size)
        print(f"{name}, batch {size}\n{table(ratios[f'{name}, batch {size}'])}\n", flush=True)
    costs: dict[str, Any] = {}
    with one_thread():
        for name, size, count in (("tiny MLP", 32, 100), ("LSTM", 32, 8)):
            ratios[f"{name}, batch {size}, one thread"] = whole(name, size, count)
            print(f"{name}, batch {size}\n{table(ratios[f'{name}, batch {size}, one thread'])}\n", flush=True)
        for name, size, count in (("ResNet-like", 1, 40), ("ResNet-like", 64, 2), ("UNet-like", 1, 40)):
            costs[f"{name}, batch {size}"] = overhead(name, size, count)
            print(f"{name}, batch {size}\n{table(costs[f'{name}, batch {size}'])}\n", flush=True)
    threads = torch.get_num_threads()
    print(write("evaluation", {"threads": threads, "x naive": ratios, "x by hand, one thread": costs}))


if __name__ == "__main__":
    main()
