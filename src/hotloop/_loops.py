"""Two trainings to compare, the plain one and the wrapped one, each with random numbers of its own."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop import _forms as forms
from hotloop._comparison import Measured
from hotloop._device import accelerator
from hotloop._optimizer_traits import needs_closure
from hotloop._syncs import find_syncs
from hotloop._tree import map_leaves


class Loop:
    """One of the two trainings."""

    def __init__(
        self, name: str, step: Callable[[Any], Any], model: nn.Module, optimizer: Optimizer, device: torch.device
    ) -> None:
        self._name, self._step, self._model, self._optimizer, self._device = name, step, model, optimizer, device
        self._random = RandomState(device)
        self._losses: list[float] = []
        self._memory: int | None = None
        self._syncs = 0
        self.times: list[float] = []

    def train(self, batches: list[Any], step: Callable[[Any], Any] | None = None) -> float:
        """Train on these batches; returns the seconds until the device was done with them."""
        step = step or self._step
        self._random.put_back()
        self._synchronize()
        start = time.perf_counter()
        to_read = [step(batch) for batch in batches]
        self._synchronize()
        seconds = time.perf_counter() - start
        self._random = RandomState(self._device)
        for loss in map(float, to_read):
            self._losses.append(loss)
            if not math.isfinite(loss):
                raise ValueError(
                    f"compare(make, batches): the loss of the {self._name} loop is {loss} at step {len(self._losses)}, so "
                    "neither times nor weights mean anything; look at the learning rate, the data or the precision"
                )
        return seconds

    def measure_memory(self, batches: list[Any]) -> None:
        """What belongs to the loop, and what a step takes on top of it."""
        memory: Any = torch.get_device_module(self._device)
        if not hasattr(memory, "reset_peak_memory_stats"):
            self.train(batches)
            return
        parameters = list(self._model.parameters())
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        owned = [*parameters, *(p.grad for p in parameters), *self._model.buffers(), *states]
        own = sum(t.nbytes for t in owned if isinstance(t, Tensor) and t.device == self._device)
        memory.reset_peak_memory_stats(self._device)
        before = memory.memory_allocated(self._device)
        self.train(batches)
        self._memory = own + memory.max_memory_allocated(self._device) - before

    def count_syncs(self, batches: list[Any]) -> None:
        """How often a step makes the host wait."""

        def watched(batch: Any) -> Any:
            with find_syncs() as syncs:
                loss = self._step(batch)
            self._syncs = sum(sync.count for sync in syncs)
            return loss

        self.train(batches, watched)

    def measured(self) -> Measured:
        """What there is to report."""
        return Measured(self.times, self._memory, self._syncs, self._losses)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def plain_step(model: nn.Module, optimizer: Optimizer, loss_fn: Any, device: torch.device) -> Callable[[Any], Any]:
    """A step as most scripts have it, with as little around it as in theirs."""
    takes_closure = needs_closure(optimizer)

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return map_leaves(lambda tensor: tensor.to(device), value, lambda thing: thing.to(device))

    def result_of(batch: Any) -> Any:
        if loss_fn is not None and isinstance(batch, tuple | list):
            *inputs, target = map(moved, batch)
            return loss_fn(model(*inputs), target)
        args, kwargs, target = forms.unpacked((moved(batch),), {})
        output = model(*args, **kwargs)
        return output if loss_fn is None else loss_fn(output, target)

    def backward(batch: Any) -> Any:
        optimizer.zero_grad()
        result = result_of(batch)
        loss = result if isinstance(result, Tensor) else forms.loss_and_metrics(result, loss_fn is None)[0]
        loss.backward()
        return loss

    def step(batch: Any) -> Any:
        if takes_closure:
            loss: Any = optimizer.step(lambda: backward(batch))
        else:
            loss = backward(batch)
            optimizer.step()
        return loss.detach()

    return step


def seed() -> None:
    """Start every global generator from the same place."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


class RandomState:
    """The state of every global generator at one moment."""

    def __init__(self, device: torch.device | None = None) -> None:
        device = device or accelerator() or torch.device("cpu")
        self._states: list[tuple[Callable[..., Any], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
        ]
        if device.type != "cpu":
            module: Any = torch.get_device_module(device)
            self._states.append((lambda state: module.set_rng_state(state, device), module.get_rng_state(device)))
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            self._states.append((numpy.random.set_state, numpy.random.get_state()))

    def put_back(self) -> None:
        for put, state in self._states:
            put(state)
