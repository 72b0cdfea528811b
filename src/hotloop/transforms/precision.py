"""Precision: 16-bit kernels where they pay, and a gradient scaler exactly where float16 needs one."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from hotloop._facts import LSTM_ROWS, MANY_ROWS, SOME_ROWS, Facts
from hotloop._given import FLAT
from hotloop._parts import Autocast, Parts
from hotloop._plan import Decision

Precision = Literal["auto", "fp32", "bf16", "fp16"]

_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_MEANT = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "16-mixed": "fp16"}
_SLOW = "asked for; this CPU has no 16-bit units: expect a step to be about ten times slower than float32"


def decide(facts: Facts, wish: Precision) -> Decision:
    """bfloat16 on CUDA with native support, float16 with a scaler on older CUDA, bfloat16 on a CPU with units for it."""
    if wish not in ("auto", *_DTYPES):
        meant = _MEANT.get(str(wish).removeprefix("torch."))
        fix = f"write precision={meant!r}" if meant else "write one of these"
        raise ValueError(f"optimize(..., precision={wish!r}): precision is 'auto', 'fp32', 'bf16' or 'fp16'; {fix}")
    scaler = facts.scaler if facts.scaler is not None and facts.scaler.is_enabled() else None
    if wish == "auto" and scaler is not None:
        return _checked(facts, "fp16", "scaler= was given")
    if scaler is not None and wish != "fp16":
        raise ValueError(
            f"optimize(..., precision={wish!r}, scaler=...): only float16 gradients need scaling; "
            "write precision='fp16', or leave scaler away"
        )
    if wish == "auto":
        found = _automatic(facts)
        if found.choice not in ("bf16", "fp16") or not facts.regression:
            return found
        why = (
            f"{facts.regression} measures how far predictions are off, which 16-bit kernels round as well (relative error 4e-3)"
        )
        return _decision(facts, "fp32", f"{why}; precision='bf16' asks for them")
    return _checked(facts, wish, "asked for")


def trial(facts: Facts) -> Decision | None:
    """What tuning may try where the wish is "auto": bfloat16 where there are units for it."""
    machine, device = facts.machine, facts.device.type
    units = machine.cpu_16bit if device == "cpu" else machine.accelerator_bf16 if device == "cuda" else ""
    if (
        not units
        or facts.regression
        or facts.traits.floats != {torch.float32}
        or (facts.scaler is not None and facts.scaler.is_enabled())
    ):
        return None
    return _decision(facts, "bf16", "rounds to 8 bits (relative error 4e-3)")


def _automatic(facts: Facts) -> Decision:
    machine, traits, device = facts.machine, facts.traits, facts.device
    if facts.exact:
        return _decision(facts, "fp32", "exact=True: 16-bit kernels change rounding")
    if traits.floats - {torch.float32}:
        return _decision(facts, "as it is", f"the model has {_names(traits.floats)} parameters")
    if device.type == "cuda":
        if machine.accelerator_bf16:
            return _decision(
                facts, "bf16", f"{machine.accelerator_name} has native bfloat16; rounds to 8 bits (relative error 4e-3)"
            )
        if traits.complex:
            return _decision(facts, "fp32", "the model has complex parameters, which float16 scaling does not allow")
        if facts.closure:
            return _decision(facts, "fp32", "the optimizer evaluates the loss again, which float16 scaling does not allow")
        if traits.given == FLAT:
            return _decision(facts, "fp32", f"under {FLAT} a rank would see the overflows of its own shard alone")
        return _decision(
            facts, "fp16", f"{machine.accelerator_name} has float16 kernels; rounds to 11 bits (relative error 5e-4)"
        )
    if device.type != "cpu":
        return _decision(facts, "fp32", f"16-bit kernels on {device.type} are not known to pay; precision='bf16' asks for them")
    if not machine.cpu_16bit:
        return _decision(
            facts, "fp32", "this CPU has no 16-bit units (bfloat16 trained a ResNet 12 times slower on such a CPU)"
        )
    units = f"the {machine.cpu_16bit} units of this CPU"
    if traits.depthwise:
        return _decision(facts, "fp32", f"the model has depthwise convolutions, which {units} slow down")
    if traits.recurrent:
        return _decision(facts, "fp32", f"the model has an RNN or a GRU, which {units} slow down")
    if max(traits.wide, traits.fairly_wide) < 0.5:
        if traits.lazy:
            return _decision(facts, "fp32", f"the sizes of lazy layers are not known yet, and {units} pay for wide ones")
        return _decision(facts, "fp32", f"the layers are too small for {units} to pay")
    if traits.wide >= 0.5 and traits.convolutions:
        return _decision(facts, "bf16", f"{units}; rounds to 8 bits (relative error 4e-3)")
    if traits.lstm:
        least, rows = SOME_ROWS if traits.lstm_cells else LSTM_ROWS, "sequences"
    else:
        least, rows = SOME_ROWS if traits.wide >= 0.5 else MANY_ROWS, "tokens, patches or samples of features"
    why = f"{units}, for calls with at least {least} {rows}; rounds to 8 bits (relative error 4e-3)"
    return _decision(facts, "bf16", why, least_rows=least)


def _checked(facts: Facts, choice: str, why: str) -> Decision:
    """An explicit wish, or the reason why it cannot be met."""
    call = f"optimize(..., precision={choice!r})"
    if choice == "fp16" and facts.closure:
        raise ValueError(
            f"{call} with an optimizer that takes a closure: a gradient scaler cannot skip inside a closure; "
            "write precision='bf16' or 'fp32'"
        )
    if choice == "fp16" and (facts.traits.half_trained or any(o.half for o in facts.optimizers)):
        raise ValueError(
            f"{call}: there are float16 parameters to train, whose gradients cannot be unscaled; keep them in float32 "
            "(model.float()), autocast runs the kernels in float16 all the same"
        )
    if choice == "fp16" and facts.traits.complex and facts.optimizers:
        raise ValueError(
            f"{call}: the model has complex parameters, whose gradients torch's scaler cannot unscale; write precision='bf16' or 'fp32'"
        )
    if choice == "fp32" or facts.device.type != "cpu":
        return _decision(facts, choice, why)
    if not facts.machine.cpu_16bit:
        if facts.traits.lstm:
            raise ValueError(
                f"{call}: the model has an LSTM, which a CPU without 16-bit units cannot run in 16 bits; write precision='fp32'"
            )
        return _decision(facts, choice, _SLOW)
    return _decision(facts, choice, why)


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


def _decision(facts: Facts, choice: str, why: str, *, least_rows: int = 0) -> Decision:
    def apply(parts: Parts) -> Parts:
        traits = facts.traits
        chosen = Autocast(
            parts.autocast.device_type,
            _DTYPES.get(choice),
            least_rows,
            patch=traits.patch,
            ids=traits.ids,
            steps=traits.lstm,
            flat=not traits.convolutions,
        )
        parts = replace(parts, autocast=chosen)
        if facts.scaler is not None:
            return replace(parts, scaler=facts.scaler)
        if choice != "fp16" or not parts.optimizers:
            return parts
        return replace(parts, scaler=torch.amp.GradScaler(parts.device.type))

    def revert(parts: Parts) -> Parts:
        disabled = torch.amp.GradScaler(parts.device.type, enabled=False)
        return replace(parts, autocast=Autocast(parts.autocast.device_type), scaler=disabled)

    return Decision("precision", choice, why, apply, revert)
