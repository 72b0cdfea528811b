"""Averaging gradients over processes: torch's DistributedDataParallel, armed by the step at the end of each window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# What a rank tells in front of its flags of reached parameters; averaged over the ranks with the gradients.
HEAD = ("active", "open", "count", "weight", "loss")


class _Carrier(nn.Module):
    """Holds all that is trained. Its forward has nothing to compute: calling it under DDP makes the next backward communicate.

    `tally` is a parameter whose gradient carries what ranks must know of each other, so that it costs no communication of
    its own. As the first parameter it lies in the bucket that DDP sends last.
    """

    def __init__(self, tally: nn.Parameter, modules: Iterable[nn.Module], others: Iterable[Tensor]) -> None:
        super().__init__()
        self.tally = tally
        self.held = nn.ModuleList(modules)
        self.others = nn.ParameterList(others)

    def forward(self) -> None:
        """Nothing."""


class Exchange:
    """Averages the gradients of a window over all ranks, once, overlapped with its last backward.

    The user's forward never goes through DDP: whichever way a loss was computed, the hooks are on the parameters. So every
    loss is averaged, micro-batches before the last one communicate nothing, and one forward more or less does no harm.
    Buffers follow rank 0 at the end of each window.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._armed = False
        self._build(init_sync=True)  # weights and buffers become those of rank 0

    def _build(self, *, init_sync: bool) -> None:
        """DDP over everything that is trained now."""
        self._groups = self._grouped()
        own = {id(p) for module in self._modules for p in module.parameters()}
        others = [p for p in self._groups if id(p) not in own]
        self._everything = [*(p for module in self._modules for p in module.parameters()), *others]
        self._pattern = [p.requires_grad for p in self._everything]
        self.parameters = list({id(p): p for p in self._everything if p.requires_grad}.values())
        first = self.parameters[0] if self.parameters else torch.empty(0)
        kinds = [p.dtype for p in self.parameters if p.is_floating_point()]
        dtype = torch.float32 if torch.float32 in kinds else next(iter(kinds), torch.float32)  # the dtype of a bucket there is
        self._tally = nn.Parameter(torch.zeros(len(HEAD) + len(self.parameters), dtype=dtype, device=first.device))
        self._usual: tuple[list[float], Tensor] | None = None
        self._ddp = DistributedDataParallel(_Carrier(self._tally, self._modules, others), init_sync=init_sync)
        self._has_buffers = any(True for module in self._modules for _ in module.buffers())
        self._share_buffers()
        self._armed = False

    def _grouped(self) -> list[Tensor]:
        return [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]

    def _is_stale(self) -> bool:
        """Whether user code has frozen, unfrozen, added or replaced parameters, or a backward broke off half done."""
        moved = bool(self.parameters) and self.parameters[0].device != self._tally.device
        if self._armed or moved or [p.requires_grad for p in self._everything] != self._pattern:
            return True
        groups = self._grouped()
        return len(groups) != len(self._groups) or any(p is not q for p, q in zip(groups, self._groups, strict=True))

    def _share_buffers(self) -> None:
        if self._has_buffers:
            with torch.no_grad():  # a forward without gradients is all that DDP needs to send rank 0's buffers
                self._ddp()

    def arm(self, *, window_is_open: bool) -> None:
        """The backward that follows communicates, while it runs; `finish` must be called after it."""
        if self._is_stale():
            self._build(init_sync=False)  # between a forward and its backward, which would notice new weights
        # Parameters that only earlier micro-batches reached have a gradient, which this backward leaves as it is.
        self._before = [_mark(p) for p in self.parameters] if window_is_open else None
        self._tally.grad = None
        self._ddp()
        self._armed = True

    def finish(self, head: list[float], *, told: bool) -> None:
        """Complete the exchange, and tell the other ranks `head` with it, whether or not it is asked for (`told`)."""
        if self._before is None:
            self._complete(head, [i for i, p in enumerate(self.parameters) if p.grad is None])
        else:
            self._complete(head, [i for i, p in enumerate(self.parameters) if _mark(p) == self._before[i]])

    def meet(self, head: list[float]) -> None:
        """Average the gradients that there are, without a backward."""
        self.arm(window_is_open=False)
        self._complete(head, list(range(len(self.parameters))))

    def _complete(self, head: list[float], unreached: list[int]) -> None:
        """Give what the backward did not reach a gradient of zeros, which DDP waits for.

        A parameter that no rank has reached in the window keeps no gradient, as in a single process.
        """
        missing = [i for i in unreached if self.parameters[i].grad is None]
        roots = [self._tally, *(self.parameters[i] for i in unreached)]
        torch.autograd.backward(roots, [self._row(head, missing), *map(_zeros, roots[1:])])
        self._armed = False
        if missing:
            assert self._tally.grad is not None
            reached = self._tally.grad[len(HEAD) :].tolist()
            for i in missing:
                if not reached[i]:
                    self.parameters[i].grad = None
        self._share_buffers()

    def _row(self, head: list[float], missing: list[int]) -> Tensor:
        if not missing and self._usual is not None and self._usual[0] == head:
            return self._usual[1]
        flags = [1.0] * len(self.parameters)
        for i in missing:
            flags[i] = 0.0
        row = torch.tensor([*head, *flags], dtype=self._tally.dtype).to(self._tally.device, non_blocking=True)
        if not missing:
            self._usual = (head, row)
        return row

    def switch(self, last: bool) -> None:
        """Nothing: whether a backward communicates is told by `arm`."""

    def average(self, name: str) -> Tensor:
        """What the last exchange brought for an item of HEAD: the mean over the ranks, on the device."""
        return self.head()[HEAD.index(name)]

    def head(self) -> Tensor:
        """All of it."""
        assert self._tally.grad is not None
        return self._tally.grad[: len(HEAD)]


def _mark(parameter: Tensor) -> tuple[int, int]:
    """Changes whenever a backward adds to the parameter's gradient."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _zeros(parameter: Tensor) -> Any:
    return parameter.new_zeros(()).expand(parameter.shape)
