"""How fast batches come: tensors in memory through `prefetch`, and what `data_loader` chooses, against DataLoader's own.

python -m benchmarks.loading
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.measure import Times, interleave, ratio, summary, table, write
from hotloop import data_loader, prefetch

ITEM = 2e-3  # seconds that an item of the second part takes in this process
SIZE = 32
WORKERS = (0, 1, 2, 4)


def drain(loader: Iterable[Any]) -> Callable[[], None]:
    def run() -> None:
        for _x, _y in loader:
            pass

    return run


# --- tensors in memory ------------------------------------------------------------------------------------------------


def in_memory(shape: tuple[int, ...], batch: int, items: int = 8192, **options: Any) -> dict[str, dict[str, float]]:
    """Milliseconds a batch, and the ratio to DataLoader. What copies the rows and does nothing else is the least that there is."""
    dataset = TensorDataset(torch.randn(items, *shape), torch.randint(10, (items,)))
    plain = DataLoader(dataset, batch, shuffle=True, **options)
    ahead = prefetch(DataLoader(dataset, batch, shuffle=True, **options), "cpu")
    assert_same(plain, ahead)
    variants = {"DataLoader": drain(plain), "prefetch": drain(ahead), "index_select alone": drain(Rows(dataset.tensors, batch))}
    times = interleave(variants, rounds=25)
    return summary(times, base="DataLoader", per=len(plain))


class Rows:
    """Batches of the tensors' rows in a random order."""

    def __init__(self, tensors: tuple[Tensor, ...], batch: int) -> None:
        self.tensors, self.batch = tensors, batch

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index in torch.randperm(len(self.tensors[0])).split(self.batch):
            yield [tensor.index_select(0, index) for tensor in self.tensors]


def assert_same(plain: Iterable[Any], other: Iterable[Any]) -> None:
    """Timing what differs would be vain."""
    torch.manual_seed(0)
    batches = list(plain)
    torch.manual_seed(0)
    for batch, own in zip(batches, other, strict=True):
        if not all(map(torch.equal, batch, own)):
            raise AssertionError("prefetch gives other batches than DataLoader")


# --- items that cost something ----------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    """Items that do the same work, as often as takes 2 ms."""

    def __init__(self, work: Callable[[], Tensor], count: int = 12 * SIZE) -> None:
        self.work, self.count = work, count
        self.times = repeats(work)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        for _ in range(self.times):
            result = self.work()
        return result, item


def repeats(work: Callable[[], object]) -> int:
    start, n = time.process_time(), 0
    while time.process_time() - start < 0.2:
        work()
        n += 1
    return max(1, round(n * ITEM / 0.2))


def python() -> Tensor:
    return torch.tensor([float(sum(i * i for i in range(500)))])


_MATRIX = np.random.default_rng(0).random((64, 64), dtype=np.float32)


def numpy() -> Tensor:
    return torch.from_numpy(np.sort(_MATRIX, axis=1))


def _jpeg() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((224, 224)).save(file, "JPEG")
    return file.getvalue()


_JPEG = _jpeg()


def image() -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(_JPEG)).convert("RGB"))).permute(2, 0, 1)


class Waiting(Items):
    """Items that come from a disk or a network, so to say."""

    def __init__(self) -> None:
        self.count = 12 * SIZE

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        time.sleep(ITEM)
        return torch.ones(3), item


KINDS: dict[str, Callable[[], Dataset[Any]]] = {
    "Python": lambda: Items(python),
    "NumPy": lambda: Items(numpy),
    "image": lambda: Items(image),
    "waiting": Waiting,
}


def chosen(make: Callable[[], Dataset[Any]]) -> dict[str, Any]:
    """What `data_loader` takes, over the fastest of the fixed numbers of workers."""
    dataset = make()
    loader = data_loader(dataset, SIZE)
    fixed = {n: DataLoader(dataset, SIZE, num_workers=n, persistent_workers=n > 0) for n in WORKERS}
    times = interleave({"data_loader": drain(loader), **{str(n): drain(fixed[n]) for n in WORKERS}}, rounds=7, warmup=1)
    return {"chosen": loader.num_workers, **over_the_best(times), "why": loader.plan["num_workers"].why}


def over_the_best(times: Times) -> dict[str, float]:
    ratios = {f"{n} workers": ratio(times[str(n)], times["0"]) for n in WORKERS}
    best = min(WORKERS, key=lambda n: ratios[f"{n} workers"])
    return {**ratios, "data_loader": ratio(times["data_loader"], times["0"]),
            "to the best": ratio(times["data_loader"], times[str(best)])}  # fmt: skip


def main() -> None:
    memory = {
        f"{'x'.join(map(str, shape))}, batch {batch}": in_memory(shape, batch)
        for shape in ((64,), (3, 32, 32))
        for batch in (32, 256)
    }
    for name, figures in memory.items():
        print(f"{name}\n{table(figures)}\n", flush=True)
    costly = {name: chosen(make) for name, make in KINDS.items()}
    print(table({name: {k: v for k, v in row.items() if k != "why"} for name, row in costly.items()}))
    threads = torch.get_num_threads()
    print(write("loading", {"threads": threads, "tensors in memory, a batch": memory, "items of 2 ms, x no workers": costly}))


if __name__ == "__main__":
    main()
