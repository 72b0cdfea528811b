"""What is known of a convolution and the BatchNorm that follows it, and what one folded call hands from the one to the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# Relative to the largest value: the sums are the same, rounded in other places.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Pair:
    """What is known of a convolution for as long as it lives: the BatchNorm that takes its output, if one does."""

    def __init__(self) -> None:
        self.called = False
        self.norm: Callable[[], nn.Module | None] = _nobody
        self.checked = False
        self.refusal = ""

    def refuse(self, why: str) -> None:
        """Fold it no more."""
        self.refusal = self.refusal or why


def _nobody() -> None:
    return None


_pairs: Any = WeakIdKeyDictionary()


def pair_of(convolution: nn.Module) -> Pair:
    """The one record for this convolution."""
    pair: Pair = _pairs.setdefault(convolution, Pair())
    return pair


class Sent:
    """One folded call: what its BatchNorm has to know, and what others get."""

    __slots__ = ("_given", "_run", "_version", "pair")

    def __init__(self, pair: Pair, run: Any, given: Tensor) -> None:
        # The first call of a pair shows who uses the output: for that one the input is kept as it is now.
        if not pair.checked:
            with torch.inference_mode(False):
                given = given.clone()
        self.pair, self._run, self._given, self._version = pair, run, given, given._version

    def otherwise(self) -> Tensor:
        self.refuse("the output of a convolution is used by others than its BatchNorm")
        if self._given._version != self._version:
            raise RuntimeError("the input of a convolution was changed in place before its output was used")
        plain = self._run(self._given)
        del self._given  # a tensor that is kept keeps no other
        return plain  # type: ignore[no-any-return]

    def refuse(self, why: str) -> None:
        self.pair.refuse(why)

    def agrees(self, result: Tensor, run_norm: Any) -> bool:
        """Whether the result is that of the two layers, by its first sample; looked at once for each pair."""
        if not self.pair.checked:
            self.pair.checked = True
            expected = run_norm(self._run(self._given[:1]))
            tolerance = _TOLERANCE[expected.dtype] * expected.abs().max()
            if not bool((result[:1] - expected).abs().max() <= tolerance):
                self.refuse("a folded result differs from the plain one by more than rounding")
        return not self.pair.refusal
