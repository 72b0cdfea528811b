"""Arguments that do not fit: names that `optimize` does not have, and functions that cannot take what they will be called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

# What other libraries, and plain loops, call these.
_MEANT = {
    "accumulate=4": "accumulation_steps gradient_accumulation_steps accumulate_grad_batches grad_accum_steps grad_accum accum_steps",
    "before_update=f, with a function that clips": "clip_value clip_grad_value gradient_clip_value",
    "channels_last=True": "memory_format",
    "clip_norm=1.0": "clip grad_clip clip_grad clip_grad_norm max_norm max_grad_norm gradient_clip gradient_clip_val gradient_clipping",
    "compile=True": "torch_compile jit",
    "cudnn_benchmark=True": "benchmark",
    "distributed=True": "ddp strategy world_size",
    "fused=True": "foreach",
    "loss_fn=f": "criterion loss loss_function loss_func",
    "optimizer=o": "optim optimizers opt",
    "precision='bf16', 'fp16' or 'fp32'": "amp use_amp mixed_precision dtype torch_dtype autocast fp16 bf16 half",
    "scaler=s": "grad_scaler gradscaler",
    "scheduler=s": "lr_scheduler schedulers sched lr_schedule",
}


def refuse_unknown(unknown: Iterable[str], names: Sequence[str]) -> None:
    """Refuse arguments that `optimize` does not have, with the one of its `names` that is likely meant."""
    for given in unknown:
        meant = next((ours for ours, theirs in _MEANT.items() if given.lower() in theirs.split()), None)
        close = [meant] if meant else [f"{name}=..." for name in get_close_matches(given, names, n=1)]
        fix = f"write {close[0]}" if close else f"it takes {', '.join(names)}"
        raise TypeError(f"optimize(..., {given}=...): there is no argument of this name; {fix}")


def misfit_of(function: Any, *args: str) -> str:
    """Why a call with these arguments fails, as far as the signature tells; "" where it does not."""
    if isinstance(function, nn.Module):
        if function._forward_pre_hooks or type(function).__call__ is not nn.Module.__call__:  # what forward gets is theirs
            return ""
        function = function.forward
    if hasattr(function, "__signature__"):  # what somebody says of it
        return ""
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may add arguments
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return ""
