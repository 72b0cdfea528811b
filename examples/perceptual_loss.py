"""Perceptual loss: digits shrunk to 4 x 4 pixels are restored so that a frozen network sees in them what it saw in the originals.

    python examples/perceptual_loss.py [--epochs 10]

The frozen network is called twice in each step. In eval mode a call keeps a graph exactly when its input has one: the
features of the original come detached, those of the restored image carry the gradient back to it.
"""

from __future__ import annotations

import argparse

import torch
from digits import make_data, make_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hotloop import fast_eval, optimize, prefetch


def shrunk(x: Tensor) -> Tensor:
    """The image with a quarter of its pixels, at its old size."""
    return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear")


def make_restorer() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
        nn.Conv2d(32, 1, 3, padding=1),
    )


@fast_eval
def judge(classifier: nn.Module, restorer: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> dict[str, float]:
    """The share of digits that the classifier reads, from shrunk and from restored images."""
    right = {"shrunk": torch.zeros(()), "restored": torch.zeros(())}
    for x, y in loader:
        for name, image in (("shrunk", shrunk(x)), ("restored", restorer(shrunk(x)))):
            right[name] += (classifier(image).argmax(1) == y).sum().cpu()
    return {name: hits / len(loader.dataset) for name, hits in right.items()}


def main(epochs: int = 10) -> dict[str, float]:
    train, test = make_data()
    loader = DataLoader(train, batch_size=64, shuffle=True)

    classifier = make_model()
    classifier, step = optimize(classifier, torch.optim.Adam(classifier.parameters(), lr=2e-3), nn.CrossEntropyLoss())
    for _ in range(5):
        for x, y in prefetch(loader, classifier):
            step(x, y)
    classifier.eval().requires_grad_(False)
    features = optimize(classifier.__wrapped__[:7])  # the first two convolutions: no optimizer, nothing to train

    restorer = make_restorer()
    restorer, train_step = optimize(restorer, torch.optim.Adam(restorer.parameters(), lr=3e-3))
    losses = []
    for _ in range(epochs):
        for x, _ in prefetch(loader, restorer):
            restored = restorer(shrunk(x))
            perceptual = F.mse_loss(features(restored), features(x))
            train_step(perceptual + 0.1 * F.l1_loss(restored, x), perceptual=perceptual)
        losses.append(train_step.mean()["perceptual"])
        print(f"perceptual loss {losses[-1]:.4f}")

    result = judge(classifier, restorer, DataLoader(test, batch_size=64))
    print(f"digits read: {result['shrunk']:.1%} of the shrunk, {result['restored']:.1%} of the restored")
    return {**result, "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
