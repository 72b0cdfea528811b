"""A GAN on handwritten digits: two models, two steps, and an update made of two backward passes.

    python examples/gan.py [--epochs 20]

Lines of an ordinary GAN loop that are gone: both `zero_grad()`, every `backward()`, both `optimizer.step()`. The
generator's loss leaves gradients in the discriminator; they are dropped when the discriminator's next update begins.
"""

from __future__ import annotations

import argparse

import torch
from digits import make_data
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hotloop import fast_eval, optimize, prefetch

NOISE = 16


def make_generator() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(NOISE, 128), nn.LeakyReLU(0.2)),
        *(nn.Linear(128, 256), nn.LeakyReLU(0.2)),
        *(nn.Linear(256, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))),
    )


def make_discriminator() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        nn.Linear(128, 1),
    )


def is_real(logits: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def is_fake(logits: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


@fast_eval
def distance(generator: nn.Module, real: Tensor) -> float:
    """How far the generated digits are from the real ones: the mean difference of each pixel's mean and spread."""
    fake = generator(torch.randn(1000, NOISE, device=real.device))
    return ((fake.mean(0) - real.mean(0)).abs() + (fake.std(0) - real.std(0)).abs()).mean()


def main(epochs: int = 20) -> dict[str, float]:
    torch.manual_seed(0)
    digits, _ = make_data()
    loader = DataLoader(digits, batch_size=64, shuffle=True, drop_last=True)
    generator, discriminator = make_generator(), make_discriminator()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))

    generator, g_step = optimize(generator, g_optimizer)
    discriminator, d_step = optimize(discriminator, d_optimizer)

    before = distance(generator, digits.tensors[0])
    for epoch in range(epochs):
        for real, _ in prefetch(loader, discriminator):
            fake = generator(torch.randn(len(real), NOISE, device=generator.device))

            on_real = is_real(discriminator(real))
            d_step.backward(on_real)  # its graph is free before the next one is made
            d_step(is_fake(discriminator(fake.detach())), on_real=on_real)  # one update from both

            g_step(is_real(discriminator(fake)))
        if (epoch + 1) % 5 == 0:
            d, g = d_step.mean(), g_step.mean()
            print(f"epoch {epoch + 1:3}  real {d['on_real']:.3f}  fake {d['loss']:.3f}  generator {g['loss']:.3f}")

    after = distance(generator, digits.tensors[0])
    print(f"distance between generated and real digits: {before:.3f} before, {after:.3f} after")
    return {"before": before, "after": after, "updates": d_step.updates}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
