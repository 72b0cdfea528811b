"""Calls that type checkers reject. Each line marked `# error` must be one, and no other line may."""

from __future__ import annotations

import torch
from torch import nn

from hotloop import fast_eval, find_syncs, optimize, prefetch

net = nn.Linear(2, 2)
adam = torch.optim.Adam(net.parameters())

optimize(net, adam, precision="int8")  # error
optimize(net, adam, accumulate="4")  # error
optimize(net, adam, clip_norm="1")  # error
optimize(net, adam, inference="never")  # error
optimize(net, adam, unknown=1)  # error
optimize(net, adam, nn.CrossEntropyLoss(), "cuda")  # error
optimize(net, "adam")  # error
optimize(3)  # error
optimize(net, clip_norm=1.0)  # error
optimize(net, adam, loss_fn=3)  # error

model, step = optimize(net, adam)
metrics = step(torch.ones(1), weight="many")  # error
metrics["loss"] = 3.0  # error
metrics["loss"].backward()  # error
metrics.updated = True  # error
step.no_such_method()  # error


@fast_eval
def accuracy(model: nn.Module, times: int) -> float:
    return 0.0


accuracy(net, "twice")  # error
accuracy(net, 1).backward()  # error
fast_eval(precision="int8")  # error
prefetch(3)  # error
prefetch([1], "cpu", 2)  # error
find_syncs("cuda")  # error
