"""A script that trains in every way of the table below, saves after each batch, and is killed from outside.

    python tests/parity/killed.py FOLDER LIFE

It goes on from what the folder holds. Its life's number decides how the states go in and out: by the wrapped model or the plain one.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "src")]

from resume import load, save  # noqa: E402

import hotloop  # noqa: E402

BATCHES = 12
sgd = partial(SGD, lr=0.05, momentum=0.9)
adamw = partial(AdamW, lr=0.01)

RUNS = {
    "fp32": {"make": sgd},
    "fp32 fused": {"make": adamw, "fused": True},
    "fp32 not fused": {"make": adamw, "fused": False},
    "bf16": {"make": adamw, "precision": "bf16"},
    "bf16 in a window": {"make": sgd, "precision": "bf16", "accumulate": 3},
    "fp16": {"make": adamw, "precision": "fp16"},
    "fp16 fused in a window": {"make": adamw, "precision": "fp16", "fused": True, "accumulate": 5, "clip_norm": 0.1},
    "fp16 momentum": {"make": sgd, "precision": "fp16", "fused": True, "accumulate": 2},
    "channels_last": {"make": adamw, "channels_last": True, "fused": True},
    "channels_last in a window": {"make": sgd, "channels_last": True, "accumulate": 3},
    "images alone in channels_last": {"make": adamw, "channels_last": "auto", "wide": True},
    "exact": {"make": adamw, "exact": True, "accumulate": 2, "clip_norm": 0.1},
}


class Run:
    def __init__(self, *, make, wide=False, **options):
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            *([nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.MaxPool2d(2)] if wide else []),
            nn.Flatten(), nn.Dropout(0.2), nn.LazyLinear(4),
        )  # fmt: skip
        self.net(torch.zeros(2, 3, 8, 8))
        self.optimizer = make(self.net.parameters())
        self.scheduler = StepLR(self.optimizer, 2, 0.8)
        if options.get("precision") == "fp16":  # its scale grows after every second update
            options["scaler"] = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        self.options, self.done = {"device": "cpu", "precision": "fp32", "channels_last": False, **options}, 0

    def optimize(self):
        self.model, self.step = hotloop.optimize(
            self.net, self.optimizer, nn.CrossEntropyLoss(), scheduler=self.scheduler, **self.options
        )

    def start(self, state, *, plain):
        """The states of model and optimizer go into the plain objects, or into those that are wrapped already."""
        if not plain:
            self.optimize()
        if state is not None:
            (self.net if plain else self.model).load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.done = state["done"]
        if plain:
            self.optimize()
        if state is not None:
            self.step.load_state_dict(state["step"])

    def train(self):
        torch.manual_seed(self.done)
        x, y = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
        if self.done == 4 and "scaler" in self.options:
            x[0, 0, 0, 0] = torch.inf  # an update is skipped
        self.step(x, y)
        self.done += 1

    def state(self, *, plain):
        parts = {"model": self.net if plain else self.model, "optimizer": self.optimizer, "step": self.step}
        return {**{name: part.state_dict() for name, part in parts.items()}, "done": self.done}


def main(folder, life):
    torch.set_num_threads(1)
    runs = {}
    for i, (name, options) in enumerate(RUNS.items()):
        runs[name] = Run(**options)
        runs[name].start(load(folder / f"{name}.pt"), plain=(life + i) % 2 == 0)
    print("started", flush=True)
    for _ in range(BATCHES):
        for i, (name, run) in enumerate(runs.items()):
            if run.done < BATCHES:
                run.train()
                save(run.state(plain=(life + i) % 4 < 2), folder / f"{name}.pt")
                print(name, run.done, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
