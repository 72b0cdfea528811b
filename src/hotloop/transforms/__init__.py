"""The transforms, in the order in which they are decided and applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotloop._facts import Facts
from hotloop._plan import Decision
from hotloop.transforms import compilation, cudnn_benchmark, ddp, fused_optimizer, memory_format, placement, precision

# ddp before placement: joining names the current accelerator, and what runs on it comes after.
# Placement before precision: which 16-bit kernels there are, and whether a scaler is needed, depends on the device.
# Precision before channels_last: on CUDA that pays in 16 bits only.
# channels_last before fused: a fused kernel needs the optimizer's state in the format of its parameters.
# fused before cudnn_benchmark: neither needs the other; what changes the model and the optimizer comes before what flags do.
# Compilation last: it compiles the module as the others have left it.
TRANSFORMS: tuple[tuple[str, Callable[[Facts, Any], Decision]], ...] = (
    ("distributed", ddp.decide),
    ("device", placement.decide),
    ("precision", precision.decide),
    ("channels_last", memory_format.decide),
    ("fused", fused_optimizer.decide),
    ("cudnn_benchmark", cudnn_benchmark.decide),
    ("compile", compilation.decide),
)

# What tuning may try, by its wish, and the wish that holds without it. cuDNN's benchmark flag is none of them: a shape that ran
# once with the flag off keeps its plan, so the two cannot be compared in one process. Compiling takes longer than tuning.
TRIALS: tuple[tuple[str, Callable[[Facts], Decision | None], Any], ...] = (
    ("precision", precision.trial, "fp32"),
    ("channels_last", memory_format.trial, False),
    ("fused", fused_optimizer.trial, False),
)
