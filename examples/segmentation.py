"""Segmentation: digits cut out of noisy pictures of several shapes by a small U-Net.

    python examples/segmentation.py [--epochs 4]

The batches are dictionaries, the loss has two parts that are reported one by one, gradients are clipped, the learning
rate follows the Dice score of each evaluation, and the last prediction is kept to be looked at.
"""

from __future__ import annotations

import argparse

import torch
from scenes import scene, train_and_test_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hotloop import fast_eval, optimize, prefetch

SHAPES = [(32, 32), (32, 48), (48, 64)]
Batch = dict[str, Tensor]


def make_batches(digits: Tensor, count: int, seed: int, size: int = 16) -> list[Batch]:
    random = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        scenes = [scene(digits, *SHAPES[i % len(SHAPES)], random) for _ in range(size)]
        batches.append({"image": torch.stack([s[0] for s in scenes]), "mask": torch.stack([s[1] for s in scenes])})
    return batches


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
    )


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down, self.middle = double_conv(1, width), double_conv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join, self.out = double_conv(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down(image)
        coarse = self.middle(F.max_pool2d(fine, 2))
        return self.out(self.join(torch.cat([fine, self.up(coarse)], 1))).squeeze(1)


def dice(prediction: Tensor, mask: Tensor) -> Tensor:
    return (2 * (prediction * mask).sum() + 1) / (prediction.sum() + mask.sum() + 1)


def loss_fn(logits: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    cross_entropy, overlap = F.binary_cross_entropy_with_logits(logits, mask), 1 - dice(logits.sigmoid(), mask)
    return cross_entropy + overlap, {"cross_entropy": cross_entropy, "overlap": overlap}


@fast_eval
def dice_score(model: nn.Module, loader: DataLoader[Batch]) -> float:
    scores = [dice((model(batch["image"]) > 0).float(), batch["mask"]) for batch in loader]
    return torch.stack(scores).mean()


def main(epochs: int = 4) -> dict[str, float]:
    torch.manual_seed(0)
    train_digits, test_digits = train_and_test_digits()
    loader = DataLoader(make_batches(train_digits, 24, seed=0), batch_size=None, shuffle=True)
    test_loader = DataLoader(make_batches(test_digits, 6, seed=1), batch_size=None)

    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)  # stays in the loop: it needs a score
    model, train_step = optimize(model, optimizer, loss_fn, clip_norm=1.0, keep_output=True)
    print(f"{train_step.plan}\n")

    before = dice_score(model, test_loader)
    for _ in range(epochs):
        for batch in prefetch(loader, model):
            metrics = train_step(batch["image"], batch["mask"])  # `train_step(batch)` would be `model(**batch)`
        score = dice_score(model, test_loader)
        plateau.step(score)
        covered = (metrics.output > 0).float().mean()  # the output of the last step, detached
        print(
            f"cross entropy {metrics['cross_entropy']:.3f}, overlap {metrics['overlap']:.3f}, gradient norm {metrics['grad_norm']:.2f}, "
            f"{covered:.0%} covered, Dice {score:.3f}"
        )
    print(f"Dice of the test pictures: {before:.3f} before, {score:.3f} after")
    return {"before": before, "after": score}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
