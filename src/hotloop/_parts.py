"""What the run-time path works with: a frozen record that the transforms build, and the one place it is replaced."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop._processes import World

_OFF: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class Autocast:
    """Opens an autocast region of one dtype for a call, given its arguments; with no dtype it opens nothing.

    With `least_rows` it opens one only for a call with so many rows: 16-bit units gain nothing on fewer. What the rows are:
    `patch` is the height and width of the patches where the model cuts images into such; `ids` says what an integer stands for, a
    "token" or a "column" of a sample; `steps` is set where an LSTM sees the batch at one time; `flat` where more dimensions than
    a sequence has are flattened or gone through, not convolved.

    `automatic` is the type of device that a dtype was chosen for, and that dtype: on a device of another type there is none.
    """

    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    least_rows: int = 0
    patch: tuple[int, int] | None = None
    ids: str = ""
    steps: bool = False
    flat: bool = False
    automatic: tuple[str, torch.dtype | None] | None = None

    def as_automatic(self) -> Autocast:
        """The same, chosen for devices of this type alone."""
        return replace(self, automatic=(self.device_type, self.dtype))

    def on(self, device_type: str) -> Autocast:
        """The same for a model that has gone to a device of this type."""
        if self.automatic is None:
            return replace(self, device_type=device_type)
        chosen_for, dtype = self.automatic
        return replace(self, device_type=device_type, dtype=dtype if device_type == chosen_for else None)

    def __call__(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        if self.dtype is None or (self.least_rows and rows(self, args, kwargs) < self.least_rows):
            return _OFF
        # `jit.trace` cannot hold the casts that the weight cache makes.
        cached = torch.compiler.is_compiling() or not torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]
        return torch.autocast(self.device_type, self.dtype, cache_enabled=cached)


def rows(how: Autocast, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many rows a linear layer sees at once, or fewer: tokens, patches, samples of features; 0 where not known."""
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if first is None or first.is_nested:
        return 0
    shape, count, ids = first.shape, first.dim(), not first.is_floating_point()
    if ids and first.dtype not in (torch.int64, torch.int32):
        return 0  # an image, a mask
    if how.steps:  # the batch is the first dimension or the second
        return min(shape[0], shape[1]) if count == (2 if ids else 3) else 0
    if ids:  # where one dimension holds several bags, the rows are elsewhere
        return first.numel() if how.ids == "token" else shape[0] if how.ids and count == 2 else 0
    if how.patch is not None and count in (3, 4):
        patches = (shape[-2] // how.patch[0]) * (shape[-1] // how.patch[1])
        return patches if count == 3 else shape[0] * patches
    if count in (2, 3):
        return math.prod(shape[:-1])
    return shape[0] if how.flat and count > 3 else 0


class NoFlags:
    """Process-wide flags that a call sets, where it sets none."""

    def found(self) -> Any:
        """What holds now, to put back after a call that leaves nothing behind."""

    def put_back(self, found: Any) -> None:
        """Let hold again what a call found."""

    def restore(self) -> None:
        """Let hold again what the user had set."""


NO_FLAGS = NoFlags()
# The backward pass that runs in this thread, -1 if none does. There is no public question for it.
backward_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
OnInputs = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Parts:
    """What a call and a step need. What follows the device does nothing until a transform fills it.

    `spread` holds the devices of a model that is on several of them: arguments on one of these stay there, others go to `device`.
    `forward` is what a call runs in place of the module; None means the module itself. `autocast` opens a region in the plan's
    precision. `scaler` is disabled unless the precision is float16. Each of `on_inputs` sees the arguments of a call once they
    are on the device, and returns them; `flags` puts back what they set for the whole process. Each of `on_outputs` sees what
    the model returns, and returns it. Each of `on_gradients` looks at the gradients before an update, and may return a decision
    that it takes back. `world` is this process's place among those that train together; None where it trains alone.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    spread: frozenset[torch.device] = frozenset()
    forward: nn.Module | None = None
    autocast: Autocast = field(default_factory=Autocast)
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    on_inputs: tuple[OnInputs, ...] = ()
    on_outputs: tuple[Callable[[Any], Any], ...] = ()
    flags: NoFlags = NO_FLAGS
    on_gradients: tuple[Callable[[], Any], ...] = ()
    world: World | None = None


class Live:
    """The parts that hold now, shared by a wrapped model and its step.

    Parts are frozen; what changes at run time (a move to another device, a choice taken back) swaps the whole record here,
    so that a call reads one consistent set. `in_step` is the thread that runs a step, 0 outside of one: its calls keep their
    gradients, also in eval mode.
    """

    __slots__ = (
        "__weakref__",
        "companions",
        "cut",
        "exact",
        "in_step",
        "inference",
        "methods",
        "moved_from",
        "parts",
        "plan",
        "recovery",
        "taken_back",
    )

    def __init__(self, parts: Parts, *, inference: str = "no_grad", exact: bool = False, methods: tuple[str, ...] = ()) -> None:
        self.parts = parts
        self.inference = inference
        self.exact = exact
        self.methods = methods
        self.in_step = 0
        self.cut = False  # an eval-mode call has left out the graph that the plain model would have made
        self.moved_from: torch.device | None = None  # where `optimize` found the model, if it moved it
        self.companions: list[nn.Module] = []  # what was placed with the model and moves with it: a loss function
        self.plan: Any = None
        self.recovery: Any = None  # runs a call again without an automatic choice that it fails under
        self.taken_back: list[str] = []  # which of them by now

    def is_stepping(self) -> bool:
        """Whether a call made now is part of a step: in its thread, or in one of autograd's, which recomputes a checkpoint."""
        return self.in_step != 0 and (self.in_step == get_ident() or backward_task() != -1)

    def copy(self, model: nn.Module) -> Live:
        """For a copy of the model: the same settings, its own module, outside of any step and of DDP."""
        made = Live(
            replace(self.parts, model=model, optimizers=(), forward=None, world=None),
            inference=self.inference,
            exact=self.exact,
            methods=self.methods,
        )
        made.moved_from = self.moved_from
        made.plan = copy.copy(self.plan)  # what it takes back is its own
        made.recovery = None if self.recovery is None else self.recovery.copy(made)
        return made


def live_of(model: Any) -> Live | None:
    """The live parts of a wrapped model, or None for anything else."""
    live = getattr(model, "_self_live", None)
    return live if isinstance(live, Live) else None


def lives_within(module: nn.Module) -> Iterator[Live]:
    """The live parts of the wrapped models that a module is made of."""
    for child in module._modules.values():  # `modules()` would pass by the wrappers
        if child is not None:
            live = live_of(child)
            if live is not None:
                yield live
            yield from lives_within(child)
