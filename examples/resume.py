"""A run that may be killed at any moment: started again, it goes on from its last checkpoint and ends with the same weights, bit by bit.

    python examples/resume.py [--folder run] [--steps 300] [--every 20]

Interrupt it, or `kill -9` it, and start it again. A checkpoint is written beside the old one and takes its name when it is whole on
the disk, so that there is always one to load.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from digits import make_data, make_model
from torch import nn

from hotloop import optimize

BATCH = 64


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint as a whole or not at all, whatever happens meanwhile."""
    beside = path.with_name(f"{path.name}.new")  # in the same folder: to rename across disks is to copy
    with open(beside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    if os.name == "posix":  # the name is on the disk when the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: Path) -> dict[str, Any] | None:
    """The last checkpoint, if there is one. Nothing in it is executed: it holds tensors and plain data."""
    state: dict[str, Any] | None = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    return state


def rows_of(number: int, rows: int) -> torch.Tensor:
    """What is in a batch, by its number alone: a run that resumes needs to know no more than where it is."""
    epoch, i = divmod(number, rows // BATCH)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))
    return order[i * BATCH : (i + 1) * BATCH]


def main(folder: str = "run", steps: int = 300, every: int = 20) -> dict[str, float]:
    path = Path(folder, "checkpoint.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = make_data()[0].tensors
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps // 2)

    model, train_step = optimize(model, optimizer, nn.CrossEntropyLoss(), accumulate=2, clip_norm=1.0, scheduler=scheduler)

    first, loss = 0, float("nan")
    if (state := load(path)) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train_step.load_state_dict(state["step"])  # counters, scaler, scheduler, and a window that is half full
        torch.set_rng_state(state["random"])  # dropout goes on where it was
        first = state["batches"]
        print(f"resumed after {first} batches, {train_step.updates} updates")

    for number in range(first, steps):
        rows = rows_of(number, len(x))
        metrics = train_step(x[rows], y[rows])
        if (number + 1) % every == 0 or number + 1 == steps:
            loss = metrics["loss"]
            print(f"batch {number + 1}: loss {loss:.4f}", flush=True)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": train_step.state_dict(),
                "random": torch.get_rng_state(),
                "batches": number + 1,
            }
            save(state, path)
    return {"resumed after": first, "updates": train_step.updates, "loss": loss}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
