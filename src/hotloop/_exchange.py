"""Averaging gradients over processes: torch's DistributedDataParallel, armed by the step at the end of each window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hotloop._processes import Notes, everyone, released_at_the_end, summed

_numbers = itertools.count()

# What DDP's forward does around that of its module. Three quarters of its time goes into a region for profilers, around nothing
# here. Private: a torch without these takes the public way.
_before_forward: Any = getattr(DistributedDataParallel, "_pre_forward", None)
_after_forward: Any = getattr(DistributedDataParallel, "_post_forward", None)


class _Carrier(nn.Module):
    """Holds all that is trained. Its forward has nothing to compute: calling it under DDP makes the next backward communicate."""

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Tensor]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)
        self.others = nn.ParameterList(others)

    def forward(self) -> None:
        """Nothing."""


class Exchange:
    """Averages the gradients of a window over all ranks, once, overlapped with its last backward.

    The user's forward never goes through DDP: whichever way a loss was computed, the hooks are on the parameters. So every
    loss is averaged, micro-batches before the last one communicate nothing, and one forward more or less does no harm.
    Buffers follow rank 0 at the end of each window.

    A rank without batches takes part by `meet`. Whether all ranks did so is not told with the gradients, which would cost
    every step: each notes in the group's store from which exchange on it has no more batches, before it takes part in that.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._armed = False
        self._count = 0  # exchanges begun
        self._parted = -1  # the last one that all ranks met in
        self._missed: bool | None = None  # parameters that some rank's backward did not reach; None until one was looked at
        self._tells_reached = False  # whether ranks tell each other in every exchange what they have reached
        name = f"hotloop/{next(_numbers)}"
        self._notes, self._weighing = Notes(name), Notes(f"{name}/weights")
        self.weighed = False  # whether ranks tell each other the weights of their micro-batches
        self.weight = torch.empty(0, device="cpu")  # of the last exchange, over all ranks
        released_at_the_end(self)
        self._build(init_sync=True)  # weights and buffers become those of rank 0

    def _build(self, *, init_sync: bool) -> None:
        """DDP over everything that is trained now. It refuses where nothing is: then all stays as it was."""
        groups = self._grouped()
        own = {id(p) for module in self._modules for p in module.parameters()}
        others = [p for p in groups if id(p) not in own]
        self._ddp = DistributedDataParallel(_Carrier(self._modules, others), init_sync=init_sync)
        self._groups = groups
        self.everything = [*(p for module in self._modules for p in module.parameters()), *others]
        self._pattern = [p.requires_grad for p in self.everything]
        self._parameters = list({id(p): p for p in self.everything if p.requires_grad}.values())
        self._frozen = list({id(p): p for p in self.everything if not p.requires_grad}.values())  # looked at once
        self._sparse = _sparse(self._modules)
        self._device = self._parameters[0].device
        self._has_buffers = any(True for module in self._modules for _ in module.buffers())
        self._share_buffers()
        self._armed = False

    def release(self) -> None:
        """No more exchanges: the group is about to be closed, or the process to end."""
        vars(self).pop("_ddp", None)

    def _grouped(self) -> list[Tensor]:
        return [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]

    def _is_stale(self) -> bool:
        """Whether user code has frozen, unfrozen, added, moved or replaced parameters, or a backward broke off half done."""
        if self._armed or self._parameters[0].device != self._device:
            return True
        groups = self._grouped()
        if len(groups) != len(self._groups) or any(p is not q for p, q in zip(groups, self._groups, strict=True)):
            return True
        return [p.requires_grad for p in self.everything] != self._pattern

    def _share_buffers(self) -> None:
        if self._has_buffers:
            with torch.no_grad():  # a forward without gradients is all that DDP needs to send rank 0's buffers
                self._ddp()

    def switch(self, last: bool) -> None:
        """Nothing: whether a backward communicates is told by `arm`."""

    def arm(self, *, window_is_open: bool) -> None:
        """The backward that follows communicates, while it runs; `finish` must be called after it."""
        if self._is_stale():
            self._build(init_sync=False)  # between a forward and its backward, which would notice new weights
            if not self._tells_reached:
                self._missed = None  # what is new may be reached less often
        # Parameters that only earlier micro-batches reached have a gradient, which this backward leaves as it is.
        self._before = [_mark(p) for p in self._parameters] if window_is_open else None
        self._count += 1
        if _before_forward is None or _after_forward is None:
            self._ddp()
        else:
            _before_forward(self._ddp)
            _after_forward(self._ddp, None)
        self._armed = True

    def finish(self, weight: float) -> None:
        """Complete the exchange after its backward; `weight`, of this rank's window, is summed over the ranks that have weights."""
        if self._before is None:
            unreached = [p for p in self._parameters if p.grad is None]
        else:
            unreached = [p for p, mark in zip(self._parameters, self._before, strict=True) if _mark(p) == mark]
        self._complete(unreached, any(p.grad is None for p in unreached))
        self._tell(weight)

    def meet(self, weight: float) -> None:
        """Average the gradients that there are, without a backward."""
        self.arm(window_is_open=False)
        self._complete(self._parameters, None)
        if not self.weighed:  # a rank without batches has seen no weight; the others have, before this exchange
            self._wait()
            self.weighed = any(0 <= note <= self._count for note in self._weighing.read())
        self._tell(weight)

    def _complete(self, unreached: list[Tensor], missed: bool | None) -> None:
        """Give what the backward did not reach a gradient of zeros, which DDP waits for.

        A parameter that no rank has reached in the window keeps no gradient, as in a single process.
        """
        learns = self._missed is None
        reached = [p.grad is not None for p in self._parameters] if learns or self._tells_reached else []
        if unreached:
            torch.autograd.backward(unreached, [_no_rows(p) if id(p) in self._sparse else _zeros(p) for p in unreached])
        self._armed = False
        if learns or missed:
            self._learn(missed)
        if self._tells_reached:
            found = summed([float(r) for r in reached], self._device)
            if not all(reached):  # else there is nothing to wait for
                for parameter, count in zip(self._parameters, found.tolist(), strict=True):
                    if not count:
                        parameter.grad = None
        if self._frozen:
            self._average_frozen()

    def _tell(self, weight: float) -> None:
        if self.weighed:
            (self.weight,) = summed([weight], self._device)
        self._share_buffers()

    def _average_frozen(self) -> None:
        """What an open window has gathered in a parameter that was frozen since, which DDP does not hold any more."""
        frozen, self._frozen = self._frozen, []
        told = everyone([p.grad is not None for p in frozen])
        for parameter, *reached in zip(frozen, *told, strict=True):
            if any(reached):
                if parameter.grad is None:
                    parameter.grad = _no_rows(parameter) if id(parameter) in self._sparse else torch.zeros_like(parameter)
                average = parameter.grad / len(told)
                if not average.is_sparse:
                    average = average.contiguous()  # ranks may have it in other strides
                dist.all_reduce(average)
                parameter.grad.copy_(average)

    def _learn(self, missed: bool | None) -> None:
        """Whether there are parameters that a window may not reach: asked once of all ranks, and again where they `part`."""
        if self._missed is not None:
            self._missed = True
        elif known := [told for told in everyone(missed) if told is not None]:
            self._missed = self._tells_reached = any(known)
        else:
            self._tells_reached = True  # in this exchange, to which no rank brings a backward

    def end(self) -> None:
        """Note that this rank has no more batches: from here on it meets the others."""
        self._notes.write(self._count + 1)

    def all_have_ended(self) -> bool:
        """Whether every rank took part in the last exchange by `meet`. Waits for the device."""
        self._wait()
        notes = self._notes.read()
        have_ended = all(self._parted < note <= self._count for note in notes)
        if have_ended and max(notes, default=self._count) < self._count:
            raise RuntimeError(
                "step.flush(): this rank, without batches, has answered updates of another step as if they were of this one, and their "
                "weights are wrong from there on; a loop with several steps needs as many batches on every rank"
            )
        return have_ended

    def _wait(self) -> None:
        """The last exchange is over: what other ranks noted before it can be read."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def part(self) -> None:
        """All ranks have met, and go on."""
        self._parted = self._count
        self._tells_reached = any(everyone(bool(self._missed)))

    def agree(self, weight: float) -> float | None:
        """What weights count relative to on all ranks, so that gradients do not blow up: None as long as this rank's are zero.

        It is near the first weight of the first rank that has one; ranks without batches are not asked. It is a power of two, so
        that no bit depends on who comes first.
        """
        if not self.weighed:
            self.weighed = True
            self._weighing.write(self._count + 1)
        return float(self._weighing.first(2.0 ** round(math.log2(weight)))) if weight else None


def _sparse(modules: Iterable[nn.Module]) -> set[int]:
    """The parameters of which DDP expects sparse gradients."""
    layers = (part for module in modules for part in module.modules())
    return {id(part.weight) for part in layers if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse}


def _mark(parameter: Tensor) -> tuple[int, int]:
    """Changes whenever a backward adds to the parameter's gradient."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _zeros(parameter: Tensor) -> Any:
    return parameter.new_zeros(()).expand(parameter.shape)


def _no_rows(parameter: Tensor) -> Tensor:
    """Sparse zeros."""
    rows, indices = parameter.new_empty(0, *parameter.shape[1:]), torch.empty(1, 0, dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(indices, rows, parameter.shape, check_invariants=True)
