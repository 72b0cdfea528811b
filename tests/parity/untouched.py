"""A context in which a call must fail and leave everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from parity.twins import differences, snapshot


@contextmanager
def refused(step: Any, kind: type[BaseException], match: str) -> Iterator[None]:
    """Inside, `kind` is raised with `match` in its text; models, optimizers, the window and the thread's modes do not change.

    Gradients that the open window holds stay. Where none is open, they may be dropped: the next window does that anyway.
    """
    before = _everything(step)
    with pytest.raises(kind, match=match):
        yield
    assert differences(before, _everything(step)) == []


def _everything(step: Any) -> list[Any]:
    memory = step._memory()
    modes = [(module.training, [p.requires_grad for p in module.parameters()]) for m in memory.models for module in m.modules()]
    thread = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    return [*snapshot(*memory.models, *memory.optimizers, step)[:-1], modes, thread, step.plan.as_dict()]
