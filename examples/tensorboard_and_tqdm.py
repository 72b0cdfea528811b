"""Logging: a progress bar and TensorBoard, with the lines that such loops have.

    python examples/tensorboard_and_tqdm.py [--epochs 5] [--folder runs]

`bar.set_postfix(metrics)` and `writer.add_scalar(tag, metrics["loss"], n)` work as they are. Both look at values, and
a look is what makes a loop wait for a GPU: here every ten steps, in place of each. The means of an epoch are summed
on the device and read once. Without TensorBoard (`pip install tensorboard`) the same numbers go to a CSV file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from digits import make_data, make_model
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from hotloop import fast_eval, optimize, prefetch


class CsvWriter:
    """The part of TensorBoard's SummaryWriter that is used here, for machines that do not have it."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.file = (Path(folder) / "scalars.csv").open("w")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.file.write(f"{step},{tag},{value}\n")

    def close(self) -> None:
        self.file.close()


def make_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(f"TensorBoard is not installed; the numbers go to {Path(folder) / 'scalars.csv'}")
        return CsvWriter(folder)
    return SummaryWriter(folder)


@fast_eval
def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    hits = sum((model(x).argmax(1) == y).sum() for x, y in loader)
    return hits / len(loader.dataset)


def main(epochs: int = 5, folder: str = "runs") -> dict[str, float]:
    train, test = make_data()
    loader, test_loader = DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=64)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * len(loader))
    model, train_step = optimize(model, optimizer, nn.CrossEntropyLoss(), clip_norm=5.0, scheduler=schedule)

    writer = make_writer(folder)
    with tqdm(total=epochs * len(loader), unit="step") as bar:
        for epoch in range(epochs):
            for x, y in prefetch(loader, model):
                metrics = train_step(x, y)
                bar.update()
                if bar.n % 10 == 0:
                    bar.set_postfix(metrics)
                    writer.add_scalar("train/loss", metrics["loss"], bar.n)
                    writer.add_scalar("train/lr", schedule.get_last_lr()[0], bar.n)
            means, share = train_step.mean(), accuracy(model, test_loader)
            writer.add_scalar("epoch/loss", means["loss"], epoch)
            writer.add_scalar("epoch/accuracy", share, epoch)
    writer.close()
    print(f"{share:.2%} of the test digits right; the curves are in {folder}/")
    return {"accuracy": share, "steps": train_step.updates}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", default="runs")
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
