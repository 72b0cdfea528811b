"""Other libraries' training loops, each written as its documentation has it, against the naive loop and hotloop.

python -m benchmarks.peers
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from benchmarks import loops
from benchmarks.loops import Loop
from benchmarks.measure import assert_close, counted, interleave, one_thread, summary, table, write
from benchmarks.workloads import WORKLOADS, Workload

ROUNDS = {"tiny MLP": 60, "tabular MLP": 20, "ResNet-like": 6, "UNet-like": 12, "GPT-like": 12, "LSTM": 20, "MLP-mixer": 10}


def accelerate(workload: Workload) -> Loop:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loss_fn = workload.make()
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = workload.batches()

    def run() -> None:
        for _ in range(workload.steps):
            x, y = next(batches)
            with accelerator.accumulate(model):
                loss = loss_fn(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(run, model)


def fabric(workload: Workload) -> Loop:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    original, optimizer, loss_fn = workload.make()
    model, optimizer = fabric.setup(original, optimizer)
    batches = workload.batches()

    def run() -> None:
        for _ in range(workload.steps):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            fabric.backward(loss)
            optimizer.step()

    return Loop(run, original)


def ignite(workload: Workload) -> Loop:
    from ignite.engine import create_supervised_trainer

    model, optimizer, loss_fn = workload.make()
    trainer = create_supervised_trainer(model, optimizer, loss_fn)
    batches = workload.batches()

    def run() -> None:
        trainer.run([next(batches) for _ in range(workload.steps)], max_epochs=1)

    return Loop(run, model)


def torchtnt(workload: Workload) -> Loop:
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train

    model, optimizer, loss_fn = workload.make()

    class Unit(AutoUnit[Any]):
        def compute_loss(self, state: Any, data: Any) -> tuple[torch.Tensor, Any]:
            output = self.module(data[0])
            return loss_fn(output, data[1]), output

        def configure_optimizers_and_lr_scheduler(self, module: Any) -> tuple[Any, None]:
            return optimizer, None

    unit = Unit(module=model, device=torch.device("cpu"))
    batches = workload.batches()

    def run() -> None:
        epochs = unit.train_progress.num_epochs_completed  # the unit counts on from one call to the next
        train(unit, [next(batches) for _ in range(workload.steps)], max_epochs=epochs + 1)

    return Loop(run, model)


LOOPS: dict[str, Callable[[Workload], Loop]] = {
    "naive": loops.naive,
    "hand-tuned": loops.tuned,
    "hotloop": loops.wrapped,
    "hotloop, fp32": lambda workload: loops.wrapped(workload, precision="fp32"),
    "Accelerate": accelerate,
    "Fabric": fabric,
    "Ignite": ignite,
    "torchtnt": torchtnt,
}
SAME_AS_NAIVE = ("Accelerate", "Fabric", "Ignite", "torchtnt")


def measure(workload: Workload, rounds: int) -> dict[str, dict[str, float]]:
    with one_thread():
        made = {name: make(workload) for name, make in LOOPS.items()}
        for loop in made.values():
            loop.run()
        assert_same(made)
        times = interleave({name: loop.run for name, loop in made.items()}, rounds=rounds, warmup=1)
        assert_same(made)
        rows = summary(times, base="naive", per=workload.steps)
        return {name: {**row, **counted(made[name].run, workload.steps)} for name, row in rows.items()}


def assert_same(made: dict[str, Loop]) -> None:
    """Each peer has done the very steps that the naive loop has done."""
    for name in SAME_AS_NAIVE:
        assert_close(made["naive"].weights(), made[name].weights(), 0.0, name)


def main() -> None:
    warnings.filterwarnings("ignore")
    results = {}
    for name, rounds in ROUNDS.items():
        results[name] = measure(WORKLOADS[name], rounds)
        print(f"\n{name}\n{table(results[name])}", flush=True)
    peers = ("accelerate", "lightning-fabric", "pytorch-ignite", "torchtnt")
    print(write("peers", {"versions": {peer: version(peer) for peer in peers}, "training": results}))


if __name__ == "__main__":
    main()
