"""Programs that type checkers accept, with the types that they must see. Checked by mypy and pyright; never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

from hotloop import Metrics, Plan, compare, data_loader, fast_eval, find_syncs, optimize, prefetch


class Net(nn.Module):
    vocabulary = 7

    def encode(self, x: Tensor) -> Tensor:
        return x


class Other(nn.Module):
    def decode(self, x: Tensor) -> Tensor:
        return x


net = Net()
adam = torch.optim.Adam(net.parameters())

# The user's own class stays visible, with and without an optimizer.
model, step = optimize(net, adam)
assert_type(model, Net)
assert_type(model.encode(torch.ones(1)), Tensor)
assert_type(model.vocabulary, int)
assert_type(optimize(net), Net)
assert_type(optimize(net, precision="bf16", device=torch.device("cpu")), Net)

result = optimize(net, adam, nn.CrossEntropyLoss(), clip_norm=1.0, accumulate=4, metrics={"loss2": lambda out, y: out.sum()})
assert_type(result.model, Net)

# Metrics are a mapping to floats.
metrics = step(torch.ones(1), torch.ones(1), weight=3.0)
assert_type(metrics, Metrics)
assert_type(metrics["loss"], float)
assert_type(float(metrics), float)
assert_type(metrics.item(), float)
assert_type(metrics.updated, bool)
assert_type(step.plan, Plan)
assert_type(dict(metrics), dict[str, float])

# One optimizer, or several, over one model or several.
pair, step = optimize([net, Net()], [adam])
assert_type(pair, list[Net])
mixed: list[nn.Module] = [net, Other()]
several, step = optimize(mixed, adam)
assert_type(several, list[nn.Module])


def my_loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return output.sum(), {"accuracy": target.sum()}


def build(make: Callable[[], Net]) -> Net:
    model, _ = optimize(make(), adam, my_loss, scheduler=torch.optim.lr_scheduler.StepLR(adam, 1))
    return model


# A decorated function keeps its own type, whatever it is.
@fast_eval
def accuracy(model: nn.Module, batches: list[Tensor]) -> dict[str, float]:
    return {}


@fast_eval(model=net, precision="bf16")
def loss(epoch: int) -> float:
    return 0.0


@fast_eval
async def later(model: nn.Module) -> float:
    return 0.0


@fast_eval
def each(model: nn.Module) -> Iterator[float]:
    yield 0.0


@fast_eval
async def each_later(model: nn.Module) -> AsyncIterator[float]:
    yield 0.0


class Trainer:
    model = net

    @fast_eval
    def evaluate(self, times: int) -> float:
        return 0.0

    @fast_eval
    @staticmethod
    def of(model: nn.Module) -> float:
        return 0.0


assert_type(accuracy(net, []), dict[str, float])
assert_type(loss(3), float)
assert_type(each(net), Iterator[float])
assert_type(each_later(net), AsyncIterator[float])
assert_type(Trainer().evaluate(2), float)
assert_type(Trainer.of(net), float)


async def waits() -> None:
    assert_type(await later(net), float)


# A loader stays the loader that it is.
loader = DataLoader(TensorDataset(torch.ones(4)), batch_size=2)
assert_type(prefetch(loader, model), DataLoader[tuple[Tensor, ...]])
assert_type(prefetch([1, 2], "cpu", depth=3), list[int])
made: DataLoader[tuple[Tensor, ...]] = data_loader(TensorDataset(torch.ones(4)), 2, shuffle=True)

report = compare(lambda: (Net(), adam, my_loss), loader, steps=3, exact=True)
assert_type(report.ratio, float)
with find_syncs() as syncs:
    pass
assert_type(syncs[0].line, int)
assert_type(syncs[0].op, str)
