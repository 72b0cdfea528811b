"""Train a small convolutional network on real handwritten digits, with a plain loop and with hotloop, side by side.

    python examples/digits.py [--epochs 30] [--picture demo.png]

Both start from the same weights and see the same batches. They take turns, epoch by epoch, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from hotloop import fast_eval, optimize, prefetch

SEED = 0
Loader = DataLoader[tuple[Tensor, ...]]


def make_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 2 * 2, 10)),
    )


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels: four fifths to train on, one fifth to test."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    train, test = order[: len(x) * 4 // 5], order[len(x) * 4 // 5 :]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


@dataclass
class Run:
    """One way to train: an epoch, which returns the loss of each step, and the accuracy on a loader."""

    name: str
    train: Callable[[], list[float]]
    accuracy: Callable[[Loader], float]
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def epoch(self, bar: tqdm[object], seed: int) -> None:
        torch.manual_seed(seed)  # the same shuffle and the same dropout for both
        start = time.perf_counter()
        losses = self.train()
        self.seconds += time.perf_counter() - start
        self.losses += losses
        bar.set_postfix(loss=f"{sum(losses) / len(losses):.4f}")
        bar.update()


def plain(loader: Loader) -> Run:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss()

    def train() -> list[float]:
        losses = []
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def accuracy(loader: Loader) -> float:
        hits = total = 0
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                hits += (model(x).argmax(1) == y).sum().item()
                total += len(y)
        return hits / total

    return Run("plain", train, accuracy)


def wrapped(loader: Loader) -> Run:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    model, train_step = optimize(model, optimizer, nn.CrossEntropyLoss())  # the one line

    def train() -> list[float]:
        model.train()
        return [train_step(x, y)["loss"] for x, y in prefetch(loader, model)]

    @fast_eval
    def accuracy(loader: Loader) -> float:
        hits = total = 0
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum()
            total += len(y)
        return hits / total

    print(f"What hotloop switched on, and why:\n{train_step.plan}\n")
    return Run("hotloop", train, accuracy)


def draw(runs: list[Run], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=True):
        smooth = smoothed(run.losses)
        seconds = [run.seconds * i / len(smooth) for i in range(len(smooth))]
        by_step.plot(smooth, style, label=run.name)
        by_time.plot(seconds, smooth, style, label=f"{run.name}, {run.seconds:.1f} s")
    by_step.set(title="The same training ...", xlabel="step", ylabel="training loss (running mean)", yscale="log")
    by_time.set(title="... and its time", xlabel="seconds")
    for axes in (by_step, by_time):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smoothed(losses: list[float], keep: float = 0.95) -> list[float]:
    means = [losses[0]]
    for loss in losses[1:]:
        means.append(keep * means[-1] + (1 - keep) * loss)
    return means


def main(epochs: int = 30, picture: str = "demo.png") -> None:
    torch.set_num_threads(1)  # a net this small gains nothing from more, and threads suffer most on a busy machine
    train, test = make_data()
    loader = DataLoader(train, batch_size=64, shuffle=True)
    runs = [plain(loader), wrapped(loader)]
    bars = [tqdm(total=epochs, desc=f"{run.name:<8}", unit="epoch", position=i) for i, run in enumerate(runs)]
    for epoch in range(epochs):
        for run, bar in zip(runs, bars, strict=True):
            run.epoch(bar, seed=epoch)
    for bar in bars:
        bar.close()

    for run in runs:
        accuracy = run.accuracy(DataLoader(test, batch_size=64))
        print(f"{run.name:<8} {accuracy:.2%} of the test digits right, {run.seconds:.2f} s of training")
    print(f"hotloop took {runs[1].seconds / runs[0].seconds:.2f} of the plain loop's time")
    draw(runs, picture)
    print(f"loss curves: {picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--picture", default="demo.png")
    main(**vars(parser.parse_args()))
