"""What holds while a decorated function runs: the modes and the calls of its models, gradients, and the precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hotloop._call import body
from hotloop._detours import Detour, close_detour, open_detour
from hotloop._device import accelerator, autocasts
from hotloop._folding import Folding
from hotloop._model_calls import ModelCall, Region
from hotloop._modes import Modes, plain, submodules
from hotloop._parts import live_of, lives_within
from hotloop._plan import Decision, Plan
from hotloop._stepping import watch_all

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

Diversion = tuple[nn.Module, Callable[[nn.Module], Detour]]


@dataclass(frozen=True)
class Wishes:
    """The arguments of `fast_eval`."""

    models: tuple[nn.Module, ...] = ()
    precision: str = "auto"
    inference: str = "no_grad"
    fold_batchnorm: bool | str | None = "auto"
    reduce: str | None = None


class Evaluation:
    """One call of a decorated function. Its body may run in pieces: both contexts can be entered again and again."""

    def __init__(self, wishes: Wishes, models: Sequence[nn.Module]) -> None:
        models = sorted(models, key=lambda model: live_of(model) is None)  # of two calls of one module, the wrapped one
        if wishes.precision != "auto" and any(map(_is_exact, models)):
            raise ValueError(
                f"fast_eval(precision={wishes.precision!r}) on a model wrapped with exact=True: it keeps its precision here as "
                "well; leave precision away"
            )
        self._wishes = wishes
        self.write_back: Callable[[], None] = _nothing  # of arguments that the body was given copies of
        self._modes = Modes(models)
        self._casts = any(live.parts.autocast.dtype is not None for model in models if (live := live_of(model)) is not None)
        alone = self._modes.modules if len(models) == 1 else None
        precision = None if wishes.precision == "auto" else wishes.precision
        self._calls = [diversion for model in models for diversion in _model_calls(model, precision, alone)]
        self._folded = _folded(models, self._modes.modules, wishes.fold_batchnorm)
        if wishes.fold_batchnorm is True and not any(folded.folding.diversions for folded in self._folded):
            raise self._not_folded()
        devices = ((model, device) for model in models if (device := device_of(model)) is not None)
        self.device: torch.device | None
        main, self.device = next(devices, (None, None))
        self.world = next((live.parts.world for live in map(live_of, models) if live is not None and live.parts.world), None)
        self.loads_to = self.device if live_of(main) is None else main

    @contextmanager
    def held(self) -> Iterator[None]:
        """The models are in eval mode, and called as models that are evaluated."""
        self._modes.switch()
        opened = []
        # Fused kernels change weights without counting a version: what was made from them goes at every optimizer's step.
        unwatch = watch_all(self._weights_change)
        try:
            for module, kind in [*self._calls, *(d for folded in self._folded for d in folded.folding.diversions)]:
                open_detour(module, kind)
                opened.append(module)
            yield
            decisions = [folded.decision() for folded in self._folded]
            if self._wishes.fold_batchnorm is True and all(d is not None and d.choice == "off" for d in decisions):
                raise self._not_folded()
        finally:
            unwatch()
            for module in opened:
                close_detour(module)
            self._modes.restore()

    def _weights_change(self) -> None:
        torch.clear_autocast_cache()
        for folded in self._folded:
            folded.folding.forget()

    def _not_folded(self) -> ValueError:
        reasons = [decision.why for folded in self._folded if (decision := folded.decision()) is not None]
        return ValueError(
            f"fast_eval(fold_batchnorm=True): nothing can be folded ({'; '.join(reasons) or 'no model was found'}); "
            "leave fold_batchnorm away"
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Gradients and the precision are as asked for, in this thread."""
        gradients = torch.inference_mode if self._wishes.inference == "inference_mode" else torch.no_grad
        before, body.evaluates = body.evaluates, True
        try:
            with gradients(), self._precision():
                yield
        finally:
            body.evaluates = before
            self.write_back()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Both of them, for a body that runs without a break."""
        with self.held(), self.running():
            yield

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """One autocast region around everything, so that weights are cast once and not in every call.

        With a precision asked for, it holds for the body as well. Otherwise the region changes nothing by itself: wrapped models
        open their own, and what the body computes from their outputs, such as a loss, is as it is in training.
        """
        kind = (self.device or accelerator() or torch.device("cpu")).type
        region = None if self._wishes.precision == "auto" else Region(kind, DTYPES[self._wishes.precision])
        if region is None and not (self._casts or autocasts(kind)):
            yield
            return
        before, body.region = body.region, region or body.region
        try:
            with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind)) if region is None else region():
                yield
        finally:
            body.region = before
            torch.clear_autocast_cache()


def _nothing() -> None: ...


class _Folded:
    """One model and its folding, if it may be folded."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], wish: bool | str | None) -> None:
        live = live_of(model)
        self._plan: Plan | None = None if live is None else live.plan
        self._forbidden = "exact=True leaves every bit alone" if _is_exact(model) else "" if wish else "switched off"
        self.folding = Folding([] if self._forbidden else modules)

    def decision(self) -> Decision | None:
        """What has come of it, as far as is known by now; it shows in the model's plan."""
        off = Decision("fold_batchnorm", "off", self._forbidden) if self._forbidden else None
        decision = off or self.folding.decision()
        if self._plan is not None and decision is not None:
            self._plan.record(decision)
        return decision


def _folded(models: Sequence[nn.Module], everything: Sequence[nn.Module], wish: bool | str | None) -> list[_Folded]:
    """One for each model that is not part of another."""
    if len(models) == 1:
        return [_Folded(models[0], everything, wish)]
    covered: set[int] = set()
    found = []
    for model in models:
        if id(plain(model)) not in covered:
            modules = list(submodules([model]))
            covered.update(map(id, modules))
            found.append(_Folded(model, modules, wish))
    return found


def _is_exact(model: nn.Module) -> bool:
    """Whether it, or a wrapped model that it is made of (an average of one, a head around one), was wrapped with exact=True."""
    live = live_of(model)
    return any(inner.exact for inner in ([live] if live is not None else lives_within(model)))


def device_of(model: nn.Module) -> torch.device | None:
    """The device that a model is called on; None for one without tensors, such as most loss functions, or without values."""
    live = live_of(model)
    if live is not None:
        return live.parts.device
    for kind in ("_parameters", "_buffers"):  # `parameters()` builds a name for each one, which takes several times as long
        for module in submodules([model]):
            for tensor in getattr(module, kind).values():
                if tensor is not None and tensor.device.type != "meta":
                    return tensor.device  # type: ignore[no-any-return]
    return None


def _model_calls(model: nn.Module, precision: str | None, parts: Sequence[nn.Module] | None = None) -> Iterator[Diversion]:
    """The calls to divert for a model: its own, or those of its parts where it has no forward, as a ModuleList.

    `parts` are all of its modules, where they are known.
    """
    if live_of(model) is None and getattr(type(model), "forward", None) is nn.Module.forward:
        for child in model.children():
            yield from _model_calls(child, precision)
        return
    device = device_of(model)
    if device is not None:
        parts = list(submodules([model])) if parts is None else parts
        region = None if precision is None else Region(device.type, DTYPES[precision])
        wrapped = live_of(model) is not None
        yield plain(model), partial(ModelCall, parts=parts, device=device, region=region, wrapped=wrapped)
