"""The same file trains alone and in several processes.

    python examples/distributed_classifier.py
    torchrun --nproc-per-node 2 examples/distributed_classifier.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/distributed_classifier.py

A classifier of handwritten digits, with an average of its weights and a cosine schedule that moves with each update. Under
torchrun each process reads its shard of the training set, gradients are averaged once an update, `step.mean()` is the mean over
all processes, and the test set is shared among them and counted exactly.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from hotloop import data_loader, fast_eval, optimize, prefetch

GLOBAL_BATCH = 64


def make_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(x) * 4 // 5], order[len(x) * 4 // 5 :]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )


@fast_eval
def accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """The whole test set, on each process."""
    hits = sum((model(x).argmax(1) == y).sum() for x, y in loader)
    return hits / len(loader.dataset)  # type: ignore[return-value, arg-type]


# The same number in a part of the time: each process counts the hits in its part, and the parts are added up.
shared_accuracy = fast_eval(reduce="sum")(accuracy.__wrapped__)  # type: ignore[attr-defined]


def main(epochs: int = 12, device: str = "auto") -> dict[str, float]:
    train, test = make_data()
    # Each process takes its part of a global batch, so that one process and eight train alike.
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    loader = data_loader(train, GLOBAL_BATCH // processes, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=256)

    net = make_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))  # the batches of this process are the updates of all
    model, step = optimize(net, optimizer, nn.CrossEntropyLoss(), scheduler=scheduler, device=device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    print(step.plan["ddp"].why)

    for epoch in range(epochs):
        for x, y in prefetch(loader, model):
            step(x, y)
            average.update_parameters(model)
        step.flush()  # processes may have different numbers of batches; they wait for each other here
        print(f"epoch {epoch + 1}: loss {step.mean()['loss']:.4f}")
    result = {
        "accuracy of the average": accuracy(average, test_loader),
        "accuracy": accuracy(model, test_loader),
        "accuracy, shared": shared_accuracy(model, test_loader),
        "updates": step.updates,
        "lr": optimizer.param_groups[0]["lr"],
    }
    print(", ".join(f"{name} {value:.4g}" for name, value in result.items()))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--device", default="auto")
    main(**vars(parser.parse_args()))
