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

Batch = tuple[Tensor, Tensor]


def hits(model: nn.Module, batches: list[Batch]) -> Any:
    """The body of every variant but the naive one."""
    return sum((model(x).argmax(1) == y).sum() for x, y in batches)


def naive(model: nn.Module, batches: list[Batch]) -> Callable[[], int]:
    def run() -> int:
        model.eval()
        found = 0
        for x, y in batches:
            found += int((model(x).argmax(1) == y).sum().item())
        model.train()
        return found

    return run


def by_hand(model: nn.Module, batches: list[Batch]) -> Callable[[], int]:
    def run() -> int:
        model.eval()
        with torch.no_grad():
            found = hits(model, batches)
        model.train()
        return int(found)

    return run


def decorated(model: nn.Module, batches: list[Batch], **wishes: Any) -> Callable[[], int]:
    evaluate = fast_eval(**wishes)(hits)
    return lambda: evaluate(model, batches)


def whole(name: str, size: int, count: int = 8) -> dict[str, dict[str, float]]:
    """Milliseconds a batch, and the ratio to the naive loop. In float32, so that all of them compute the same."""
    make = WORKLOADS[name].make
    batches = data(name, size, count)
    variants = {
        "naive": naive(make()[0], batches),
        "no_grad by hand": by_hand(make()[0], batches),
        "fast_eval": decorated(make()[0], batches),
        "channels_last and no_grad by hand": by_hand(make()[0].to(memory_format=torch.channels_last), batches),
        "optimize and fast_eval": decorated(optimize(make()[0], precision="fp32", channels_last=True), batches),
    }
    assert_same(variants)
    return summary(interleave(variants, rounds=9, warmup=2), base="naive", per=count)


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


def data(name: str, size: int, count: int) -> list[Batch]:
    """Batches of the workload's own shapes, but for their size."""
    torch.manual_seed(1)
    x, y = WORKLOADS[name].data()[0]
    return [(torch.randn(size, *x.shape[1:]), torch.randint(int(y.max()) + 1, (size, *y.shape[1:]))) for _ in range(count)]


def assert_same(variants: dict[str, Callable[[], int]]) -> None:
    """Timing what differs would be vain. A rounded logit may change the winner of a few elements."""
    found = {name: run() for name, run in variants.items()}
    if max(found.values()) - min(found.values()) > 0.001 * max(found.values()) + 1:
        raise AssertionError(f"the variants find other numbers of hits: {found}")


def main() -> None:
    ratios: dict[str, Any] = {}
    for name, size in (("ResNet-like", 64), ("UNet-like", 16)):
        ratios[f"{name}, batch {size}"] = whole(name, size)
        print(f"{name}, batch {size}\n{table(ratios[f'{name}, batch {size}'])}\n", flush=True)
    costs: dict[str, Any] = {}
    with one_thread():
        for name, size, count in (("ResNet-like", 1, 40), ("ResNet-like", 64, 2), ("UNet-like", 1, 40)):
            costs[f"{name}, batch {size}"] = overhead(name, size, count)
            print(f"{name}, batch {size}\n{table(costs[f'{name}, batch {size}'])}\n", flush=True)
    threads = torch.get_num_threads()
    print(write("evaluation", {"threads": threads, "x naive": ratios, "x by hand, one thread": costs}))


if __name__ == "__main__":
    main()
