"""The transforms, in the order in which they are decided and applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotloop._facts import Facts
from hotloop._plan import Decision
from hotloop.transforms import compilation, cudnn_benchmark, fused_optimizer, placement, precision

# Placement before precision: which 16-bit kernels there are, and whether a scaler is needed, depends on the device.
# Precision before fused_optimizer: neither needs the other, and a plan reads best with what touches the model first.
# fused_optimizer before cudnn_benchmark: the flag is set last before the call, when the inputs are what the kernels will see.
# Compilation last: it compiles the module as the others have left it.
TRANSFORMS: tuple[tuple[str, Callable[[Facts, Any], Decision]], ...] = (
    ("device", placement.decide),
    ("precision", precision.decide),
    ("fused", fused_optimizer.decide),
    ("cudnn_benchmark", cudnn_benchmark.decide),
    ("compile", compilation.decide),
)
