"""The call of a model inside an evaluation."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from hotloop._call import body, call, finished, transform_level
from hotloop._deferred import in_call, settled, silent
from hotloop._detours import Detour
from hotloop._device import autocasts
from hotloop._facts import Facts, machine, traits
from hotloop._folding import NORMS
from hotloop._parts import Live, Parts, lives_within
from hotloop._plan import Plan
from hotloop._recovery import Recovery
from hotloop._tensors import SIXTEEN_BITS, address
from hotloop._traces import Proven
from hotloop._tree import leaves
from hotloop.transforms import memory_format


@dataclass(frozen=True)
class Region:
    """A precision that somebody asked for: opens an autocast region, or shuts the ones around it."""

    device_type: str
    dtype: torch.dtype | None

    def __call__(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None)


_NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # others cannot be joined


class ModelCall(Detour):
    """The call of a plain model as that of a wrapped one, and of a wrapped one in the precision asked for.

    The models inside a model are called as it calls them. `parts` are all of its modules. In threads and tasks that
    the body starts, which begin with gradients and without a precision, a model is called without gradients and in `region`.
    """

    def __init__(
        self, module: nn.Module, parts: Sequence[nn.Module], device: torch.device, region: Region | None, *, wrapped: bool
    ) -> None:
        super().__init__(module)
        self._region = region
        self._device_type = device.type
        self._parts = parts
        self._live: Live | None = None
        self._laid_out: _LaidOut | None = None
        if not wrapped:
            # A model whose own parameters are 16-bit gives what it gives: the next one may be its like.
            dtype = next((p.dtype for p in _parameters(parts) if p.is_floating_point()), None)
            self._live = Live(Parts(module, device=device), inference="no_grad", exact=dtype in SIXTEEN_BITS)
            self._laid_out = _laid_out(self._live, parts, dtype)
        # Nothing to move without an accelerator: a tiny model takes no longer than looking for it.
        moves = device.type != "cpu" or torch.accelerator.is_available()
        self._folds = any(isinstance(part, NORMS) for part in parts)
        self._light = None if moves else self._live

    def renew(self) -> None:
        self._casts_of: list[nn.Parameter] = []
        self._placed: list[nn.Parameter] = []
        self._places: list[int] = []
        self._first: list[Tensor] = []
        self._seen: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_call() or transform_level() is not None:  # what torch.func transforms can do less than a plain call
            return self.run(*args, **kwargs)
        if self._region is not None and not torch.compiler.is_compiling() and not body.evaluates and body.region is None:
            body.region = self._region
            try:
                with self._region():
                    return self(*args, **kwargs)
            finally:
                body.region = None
        if (laid_out := self._laid_out) is not None and not torch.compiler.is_compiling() and laid_out.takes(args, kwargs):
            return laid_out.call(self._settled, args, kwargs)
        light = self._light
        if (
            light is not None
            and not autocasts(self._device_type)
            and not torch.compiler.is_compiling()
            and (body.evaluates or not torch.is_grad_enabled())
        ):
            output = (settled if self._folds else silent)(self.run, args, kwargs)
            if type(output) is Tensor and output.dtype is torch.float32:
                return output
            return finished(output, light, light.parts)
        if self._live is not None:
            return call(self._settled, self._live, args, kwargs)
        region = body.region
        if region is None:
            if self._folds or autocasts(self._device_type):
                return self._settled(*args, **kwargs)
            return silent(self.run, args, kwargs)
        with region():  # inside the one that the wrapped model has opened
            return self._settled(*args, **kwargs)

    def _settled(self, *args: Any, **kwargs: Any) -> Any:
        if autocasts(self._device_type):
            self._drop_stale_casts()
        return settled(self.run, args, kwargs)

    def _drop_stale_casts(self) -> None:
        # Autocast keeps the casts of the weights as long as a region is open, also when the weights change (a state that is
        # loaded, a step that trains, an average that is swapped in); and before torch 2.10 those made without gradients are used
        # with them.
        if not self._casts_of:
            self._casts_of = [p for p in self.module.parameters() if not (p.is_inference() or is_lazy(p))]
            self._placed = [p for p in self._casts_of if address(p)]
        places = [p.data_ptr() for p in self._placed]
        if places != self._places:
            self._places = places
            numbers = [p for p in self._placed if p.device.type == "cpu" and p.dtype in _NUMBERS and p.is_contiguous()]
            with torch.no_grad():
                self._first = [p.view(-1)[:1] for p in numbers[:: len(numbers) // 16 + 1]]
        # What is written past the version counter (`.data`, NumPy) shows in a first number, which a CPU need not be waited for.
        first = torch.cat(self._first).tolist() if self._first else []
        now = [torch.is_grad_enabled(), *(p._version for p in self._casts_of), *places, *first]
        if now != self._seen:
            torch.clear_autocast_cache()
            self._seen = now


@dataclass(frozen=True)
class _Layout:
    """What is known of the layout of a plain model's images, for as long as it is the model that it was."""

    decided_for: tuple[Any, ...]
    plan: Plan  # remembers what had to be taken back
    least: int  # elements of images
    proven: dict[tuple[int, bool], Proven]


_layouts: Any = WeakIdKeyDictionary()


class _LaidOut:
    """The calls of a plain model in channels_last, until one of them fails in it, or shows that the body might."""

    def __init__(self, live: Live, parts: Sequence[nn.Module], layout: _Layout) -> None:
        decision = layout.plan[memory_format.NAME]
        self._parts, self._layout = parts, layout
        self._live = Live(decision.apply(live.parts), inference=live.inference, exact=live.exact)
        self._live.plan = layout.plan
        self._recovery = Recovery([self._live], [(decision, "off")], layout.proven)
        self._first = threading.Lock()

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is of this kind: its images are large enough, and no hook is given one."""
        images = any(tensor.numel() >= self._layout.least for tensor in leaves((args, kwargs)))
        return images and not any(part._forward_pre_hooks for part in self._parts)

    def call(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attempt = partial(call, run, self._live, args, kwargs)
        if self._recovery.proven:
            return self._recovery.attempt(self._live, attempt, (args, kwargs))
        with self._first:  # of several threads, one finds out for all
            result = self._recovery.attempt(self._live, attempt, (args, kwargs))
            # Cells are dictionaries of the modules, which may hold the model: it would never be freed.
            self._layout.proven.update({mode: found for mode, found in self._recovery.proven.items() if not found.cells})
            return result


def _laid_out(live: Live, parts: Sequence[nn.Module], dtype: torch.dtype | None) -> _LaidOut | None:
    """The calls of a plain model in channels_last, where `optimize` would choose it as well."""
    module, device = live.parts.model, live.parts.device
    if not any(isinstance(part, nn.Conv2d | nn.ConvTranspose2d) for part in parts) or any(lives_within(module)):
        return None  # nothing to lay out, or wrapped models inside, which do it where they should
    buffers = (id(buffer) for part in parts for buffer in part._buffers.values())
    decided_for = (device, dtype, *map(id, parts), *buffers)
    layout = _layouts.get(module)
    if layout is None or layout.decided_for != decided_for:
        found = replace(traits([module]), dropout_on_maps=False)  # in eval mode it draws nothing
        facts = Facts(machine(device), found, device=device)
        plan = Plan([memory_format.decide(facts, "auto")])
        layout = _layouts[module] = _Layout(decided_for, plan, memory_format.least(facts), {})
    return _LaidOut(live, parts, layout) if layout.plan[memory_format.NAME].choice == "on" else None


def _parameters(parts: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    # `Module.parameters()` builds a name for each one, which takes several times as long.
    return (p for part in parts for p in part._parameters.values() if p is not None)
