"""Generators of random numbers: how to read their state, and how to put it back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

State = tuple[Callable[[], Any], Callable[[Any], object]]  # what reads it, and what puts it back


def global_states() -> Iterator[State]:
    """Those of the whole process besides torch's own: Python's, and NumPy's if it is in use."""
    yield random.getstate, random.setstate
    if numpy := sys.modules.get("numpy.random"):
        yield numpy.get_state, numpy.set_state


def random_state(thing: Any) -> State | None:
    """The state of a random generator of torch, of Python or of NumPy; None for anything else."""
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):  # which has no state
        return thing.getstate, thing.setstate
    if isinstance(thing, torch.Generator):
        return thing.get_state, thing.set_state
    if type(thing).__module__.startswith("numpy.random"):
        if hasattr(thing, "bit_generator"):
            bits = thing.bit_generator
            return lambda: bits.state, lambda was: setattr(bits, "state", was)
        if hasattr(thing, "get_state"):
            return thing.get_state, thing.set_state
    return None
