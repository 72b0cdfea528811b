"""Logistic regression on handwritten digits with LBFGS, which evaluates the loss several times in each step.

    python examples/lbfgs.py [--steps 5]

The closure of an ordinary LBFGS loop is gone: `step(x, y)` makes it.
"""

from __future__ import annotations

import argparse

import torch
from digits import make_data
from torch import Tensor, nn

from hotloop import fast_eval, optimize


@fast_eval
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(1) == y).float().mean()


def main(steps: int = 5) -> dict[str, float]:
    torch.manual_seed(0)
    train, test = make_data()
    x, y = train.tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")

    # A line search compares losses that are close to each other: 16 bits are too few for that.
    model, train_step = optimize(model, optimizer, nn.CrossEntropyLoss(), precision="fp32")

    losses = []
    for _ in range(steps):
        losses.append(train_step(x, y).item())  # the loss of the first evaluation in this step
        print(f"loss {losses[-1]:.4f}")
    share = accuracy(model, *test.tensors)
    print(f"{share:.2%} of the test digits right, after {steps} steps")
    return {"first": losses[0], "last": losses[-1], "accuracy": share}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)  # a net this small gains nothing from more
    main(**options)
