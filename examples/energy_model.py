"""An energy model: the forces on atoms are the derivative of an energy, taken inside of forward.

    python examples/energy_model.py [--updates 400]

Forward needs gradients in evaluation as well, where a call has them off: it switches them on for itself, and it works
under `fast_eval`, in eval mode and in training.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from hotloop import fast_eval, optimize

ATOMS = 5
FIRST, SECOND = torch.triu_indices(ATOMS, ATOMS, offset=1)


def distances(positions: Tensor) -> Tensor:
    return (positions[:, FIRST] - positions[:, SECOND]).norm(dim=-1)


def derivative(energy: Tensor, positions: Tensor, keep_graph: bool) -> Tensor:
    (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=keep_graph)
    return -gradient


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Small clusters of atoms that attract and repel each other (a Morse potential), and the force on each atom."""
    positions = 0.9 * torch.randn(count, ATOMS, 3, generator=torch.Generator().manual_seed(seed))
    positions.requires_grad_()
    energy = (1 - torch.exp(1 - distances(positions))).square().sum(1)
    return positions.detach(), derivative(energy, positions, keep_graph=False)


class EnergyModel(nn.Module):
    """The energy of each pair, summed; returns energies of shape (batch,) and forces of shape (batch, atoms, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.pair(distances(positions)[..., None]).sum((1, 2))
            return energy, derivative(energy, positions, keep_graph=self.training)


@fast_eval
def force_error(model: nn.Module, positions: Tensor, forces: Tensor) -> float:
    """The mean error, as a share of the mean force."""
    _, predicted = model(positions)
    return (predicted - forces).abs().mean() / forces.abs().mean()


def main(updates: int = 400) -> dict[str, float]:
    torch.manual_seed(0)
    positions, forces = make_data(2000, seed=0)
    test = make_data(500, seed=1)
    model = EnergyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    # Forces are small differences of energies: 16 bits are too few for them.
    model, train_step = optimize(model, optimizer, scheduler=schedule, precision="fp32")

    before = force_error(model, *test)
    for update in range(updates):
        rows = torch.randint(len(positions), (128,))
        energy, predicted = model(positions[rows])
        loss = nn.functional.mse_loss(predicted, forces[rows].to(model.device))
        train_step(loss, energy=energy.mean())
        if (update + 1) % 100 == 0:
            print(f"update {update + 1}: mean squared error {train_step.mean()['loss']:.4f}")
    after = force_error(model, *test)
    print(f"error of the forces: {before:.1%} before, {after:.1%} after")
    return {"before": before, "after": after}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
