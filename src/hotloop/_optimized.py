"""What `optimize` returns where there is something to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from typing_extensions import NamedTuple

from hotloop._step import Step

T = TypeVar("T")


class Optimized(NamedTuple, Generic[T]):
    """What `optimize` returns: the wrapped model, typed as the user's own class, and the training step."""

    model: T
    step: Step

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: what was meant is a call of the model."""
        raise TypeError(_BOTH)


_BOTH = "optimize(model, optimizer, ...) returns both; write `model, step = optimize(model, optimizer, ...)`"


def _refuse_attribute(_: Any, name: str) -> NoReturn:
    raise AttributeError(f"there is no {name!r} here: {_BOTH}")


if not TYPE_CHECKING:  # a checker knows the two names
    Optimized.__getattr__ = _refuse_attribute
