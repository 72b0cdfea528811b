"""`optimize`: validate, gather facts, decide, apply, once; then out of the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop import _validate
from hotloop._arguments import refuse_unknown
from hotloop._batch_loss import Settings
from hotloop._build import build, remarks
from hotloop._distributed_step import DistributedStep
from hotloop._facts import Facts, machine, traits
from hotloop._forms import as_number
from hotloop._given import check_wishes
from hotloop._losses import regression
from hotloop._optimized import Optimized
from hotloop._optimizer_traits import needs_closure, optimizer_traits
from hotloop._parts import Live
from hotloop._processes import world_around
from hotloop._proxy import wrap
from hotloop._step import Step
from hotloop._tune import Tuner, trials

M = TypeVar("M", bound=nn.Module)

Device = torch.device | str | int
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Inference = Literal["no_grad", "inference_mode", "grad"]
Scheduler = Any  # anything with `step` and `optimizer`: torch's schedulers have no common public type


@overload
def optimize(
    model: M,
    *,
    device: Device = ...,
    precision: Precision = ...,
    channels_last: bool | Literal["auto"] | None = ...,
    cudnn_benchmark: bool | Literal["auto"] | None = ...,
    compile: bool | dict[str, Any] = ...,
    inference: Inference = ...,
    methods: Sequence[str] = ...,
    exact: bool = ...,
) -> M: ...
@overload
def optimize(
    model: M,
    optimizer: Optimizer | Sequence[Optimizer],
    loss_fn: Callable[..., Any] | None = ...,
    *,
    device: Device = ...,
    precision: Precision = ...,
    channels_last: bool | Literal["auto"] | None = ...,
    fused: bool | Literal["auto"] | None = ...,
    cudnn_benchmark: bool | Literal["auto"] | None = ...,
    compile: bool | dict[str, Any] = ...,
    distributed: bool | Literal["auto"] | None = ...,
    inference: Inference = ...,
    accumulate: int = ...,
    clip_norm: float | None = ...,
    scheduler: Scheduler | None = ...,
    scaler: torch.amp.GradScaler | None = ...,
    before_update: Callable[[], object] | None = ...,
    methods: Sequence[str] = ...,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = ...,
    keep_output: bool = ...,
    exact: bool = ...,
    tune: bool = ...,
) -> Optimized[M]: ...
@overload
def optimize(
    model: list[M],
    optimizer: Optimizer | Sequence[Optimizer],
    loss_fn: Callable[..., Any] | None = ...,
    *,
    device: Device = ...,
    precision: Precision = ...,
    channels_last: bool | Literal["auto"] | None = ...,
    fused: bool | Literal["auto"] | None = ...,
    cudnn_benchmark: bool | Literal["auto"] | None = ...,
    compile: bool | dict[str, Any] = ...,
    distributed: bool | Literal["auto"] | None = ...,
    inference: Inference = ...,
    accumulate: int = ...,
    clip_norm: float | None = ...,
    scheduler: Scheduler | None = ...,
    scaler: torch.amp.GradScaler | None = ...,
    before_update: Callable[[], object] | None = ...,
    methods: Sequence[str] = ...,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = ...,
    keep_output: bool = ...,
    exact: bool = ...,
    tune: bool = ...,
) -> Optimized[list[M]]: ...
def optimize(
    model: Any,
    optimizer: Any = None,
    loss_fn: Any = None,
    *,
    device: Device = "auto",
    precision: str = "auto",
    channels_last: Any = "auto",
    fused: Any = "auto",
    cudnn_benchmark: Any = "auto",
    compile: bool | dict[str, Any] = False,
    distributed: Any = "auto",
    inference: str = "no_grad",
    accumulate: int = 1,
    clip_norm: float | None = None,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    before_update: Callable[[], object] | None = None,
    methods: Sequence[str] = (),
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    keep_output: bool = False,
    exact: bool = False,
    tune: bool = False,
    **unknown: Any,
) -> Any:
    """Wrap a model, and with an optimizer make its training step.

    Args:
        model: the module, or a list of modules that one step trains. It stays in place and keeps its identity.
        optimizer: a torch optimizer, or a list; without one, `optimize(model)` returns the wrapped model for inference.
        loss_fn: called as `loss_fn(output, target)` in float32; returns a scalar, `(scalar, {name: scalar})` or a dict with
            `"loss"`. Without it the model returns its own loss, or `step(loss)` is given one. A module is moved too.
        device: where to run. "auto": where the parameters are, else the accelerator, else the CPU.
        precision: "fp32", "bf16", "fp16" (with a gradient scaler), or "auto": 16 bits where this hardware gains from it.
        channels_last: the memory format of 2-D convolutions and their inputs; "auto": where it pays.
        fused: fused optimizer kernels, switched on in your own optimizer; "auto": where they pay.
        cudnn_benchmark: "auto" sets the flag for each shape when it is first seen; True and False are obeyed.
        compile: True, or a dict of torch.compile's arguments.
        distributed: average gradients over the processes that torchrun started ("auto": where there are several). The group is
            joined unless you have, and closed when the process ends; ranks start with the weights of rank 0. False: train alone.
        inference: what an eval-mode call does with gradients: "no_grad", "inference_mode" or "grad".
        accumulate: micro-batches to an update.
        clip_norm: the largest norm of all gradients together; the norm before clipping is the metric `grad_norm`.
        scheduler: moved once per update. A schedule per epoch stays yours to step, as does ReduceLROnPlateau.
        scaler: your own `torch.amp.GradScaler`, for float16.
        before_update: called with the gradients unscaled and of their true size, before clipping.
        methods: further methods of the model to be called as forward is.
        metrics: `{name: fn(output, target) -> scalar tensor or number}`, called on the detached output.
        keep_output: keep the detached output as `metrics.output`.
        exact: only choices that leave every bit as the plain loop has it, but for an explicit wish (`precision=`, `fused=`).
        tune: measure instead of guessing: the first steps, each a real one, try each automatic choice against the plain
            configuration, and what takes at most 0.97 of its time stays. `step.tuning` is True until then.

    Returns:
        `Optimized(model, step)`, or the wrapped model alone without an optimizer. `step.plan` tells what was chosen and why.

    Raises:
        TypeError, ValueError: a wish that cannot be met, naming the fix; nothing has been changed then.

    Cost: nothing is copied or measured; a step adds some 15 microseconds of Python to the bare loop.

    >>> net = nn.Linear(4, 2)
    >>> model, step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss())
    >>> metrics = step(torch.randn(8, 4), torch.randint(2, (8,)))
    >>> sorted(metrics), metrics.updated
    (['loss'], True)
    """
    if unknown:
        refuse_unknown(unknown, ["optimizer", "loss_fn", *(optimize.__kwdefaults__ or ())])
    modules = _validate.models(model)
    accumulate, clip_norm = as_number(accumulate), as_number(clip_norm)
    wishes = {
        "device": device,
        "precision": precision,
        "channels_last": channels_last,
        "fused": fused,
        "cudnn_benchmark": cudnn_benchmark,
        "compile": compile,
        "distributed": distributed,
    }
    _validate.inference(inference)
    _validate.flag("exact", exact)
    _validate.flag("tune", tune)
    called = _validate.methods(methods, modules)
    if optimizer is None:
        _validate.without_optimizer(
            loss_fn=(loss_fn, None),
            distributed=(distributed, "auto"),
            fused=(fused, "auto"),
            accumulate=(accumulate, 1),
            clip_norm=(clip_norm, None),
            scheduler=(scheduler, None),
            scaler=(scaler, None),
            before_update=(before_update, None),
            metrics=(metrics, None),
            keep_output=(keep_output, False),
            tune=(tune, False),
        )
        facts = Facts(machine(device), traits(modules), exact=exact, world=world_around())
        lives, _ = build(modules, [], None, wishes, facts, {})
        return _wrapped(model, lives, inference, called)
    optimizers = _validate.optimizers(optimizer, modules, loss_fn)
    closure = needs_closure(optimizers[0])
    _validate.settings(
        loss_fn=loss_fn,
        accumulate=accumulate,
        clip_norm=clip_norm,
        before_update=before_update,
        metrics=metrics,
        scaler=scaler,
        closure=closure,
        keep_output=keep_output,
    )
    schedulers = _validate.schedulers(scheduler, optimizers)
    facts = Facts(
        machine(device),
        traits(modules),
        optimizers=tuple(optimizer_traits(o, modules) for o in optimizers),
        exact=exact,
        scaler=scaler,
        regression=regression(loss_fn),
        closure=closure,
        world=None if distributed in (False, None) else world_around(),
    )
    check_wishes(facts.traits.given, clip_norm=clip_norm, precision=precision, scaler=scaler)
    candidates = trials(facts, wishes) if tune else {}
    wishes.update({name: plain for name, (_, plain) in candidates.items()})
    agreed = {"accumulate": accumulate, "clip_norm": clip_norm, "scheduler": [type(s).__name__ for s in schedulers]}
    lives, exchange = build(modules, optimizers, loss_fn, wishes, facts, agreed)
    plan = lives[0].plan
    for decision in remarks(modules, optimizers, loss_fn, schedulers):
        plan.record(decision)
    settings = Settings(loss_fn, accumulate, clip_norm, before_update, metrics, keep_output)
    if exchange is None:
        step = Step(lives, optimizers, schedulers, settings, plan, closure=closure)
    else:
        step = DistributedStep(exchange, lives, optimizers, schedulers, settings, plan, closure=closure)
    if candidates:
        Tuner(step, lives, list(candidates.values()))
    return Optimized(_wrapped(model, lives, inference, called), step)


def _wrapped(given: Any, lives: list[Live], inference: str, methods: tuple[str, ...]) -> Any:
    for live in lives:
        live.inference, live.methods = inference, methods
    wrapped = [wrap(live.parts.model, live) for live in lives]
    return wrapped if isinstance(given, list | tuple) else wrapped[0]
