"""What a step returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import Tensor

from hotloop._reading import Reading

_MISSING = {
    "output": "metrics.output: the step keeps no output, so that its memory is free again; "
    "write optimize(..., keep_output=True), and call the step with a batch",
    "backward": "metrics.backward(): step has run the backward and the update already; remove the line",
}


class Metrics(Mapping[str, float]):
    """The numbers of one step: an immutable mapping from names to exact Python numbers, read when they are looked at.

    `m["loss"]` is what `.item()` gives; `float(m)`, `m.item()` and `f"{m:.3f}"` are the loss, so that the lines of an old loop
    keep working. `dict(m)` is plain data. On an accelerator the first look waits for the step's own values, and only for
    them; on the CPU nothing ever waits.

    >>> from hotloop import optimize
    >>> net = nn.Linear(4, 2)
    >>> _, step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1))
    >>> m = step(0 * net(torch.ones(1, 4)).sum() + 0.5, accuracy=1)
    >>> m["loss"], f"{m:.2f}", m["accuracy"], m.updated, m.skipped
    (0.5, '0.50', 1, True, False)
    """

    __slots__ = ("_names", "_output", "_reading", "_updated")

    def __init__(
        self, names: list[str], reading: Reading | None = None, *, updated: bool = True, output: tuple[Any, ...] = ()
    ) -> None:
        if reading is None:  # by code that maps over collections and makes them anew, as `type(m)({name: value})`
            names, reading = list(names), Reading.of(cast("Mapping[str, Any]", names).values())
        self._names = names
        self._reading = reading  # values beyond the names are the optimizers' overflow flags
        self._updated = updated
        self._output = output

    def __getitem__(self, name: str) -> float:
        try:
            index = self._names.index(name)
        except ValueError:
            raise KeyError(f"{name!r}: this step has {', '.join(map(str, self._names))}") from None
        value: float = self._reading.values()[index]
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def item(self) -> float:
        """The loss, as a Python number."""
        return self["loss"]

    def __float__(self) -> float:
        return float(self["loss"])

    def __format__(self, spec: str) -> str:
        return format(self["loss"], spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # NumPy would take a mapping for a sequence, and an array of its keys for what was meant.
        return sys.modules["numpy"].asarray(float(self), dtype=dtype)

    def __or__(self, other: Any) -> Any:
        return {**self, **other} if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    @property
    def updated(self) -> bool:
        """Whether the call closed an accumulation window. Known without a wait."""
        return self._updated

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped, since a gradient overflowed in float16. Reading it waits for the step."""
        return any(self._reading.values()[len(self._names) :])

    @property
    def output(self) -> Any:
        """The detached output of the model, with `keep_output=True`."""
        if not self._output:
            raise AttributeError(_MISSING["output"])
        return self._output[0]

    def __repr__(self) -> str:
        return repr(dict(self))

    if not TYPE_CHECKING:  # a checker refuses these by itself

        def __getattr__(self, name: str) -> NoReturn:
            old_line = "step returned numbers by name, and no tensor; write metrics['loss']"
            known = (
                f"metrics are read by name; write metrics[{name!r}]" if name in self._names else "there is no such attribute"
            )
            default = f"metrics.{name}: {old_line if hasattr(Tensor, name) else known}"
            raise AttributeError(_MISSING.get(name, default))

        def _is_no_number(self, *_: object) -> NoReturn:
            raise TypeError(
                "arithmetic, or a comparison, with what step returned: it is a mapping of numbers; write metrics['loss'] for "
                "the number, or float(metrics), as in `total += float(metrics)`"
            )

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _is_no_number
        __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pos__ = __abs__ = __round__ = __pow__ = __rpow__ = _is_no_number
        __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = __int__ = _is_no_number
        __array_ufunc__ = None  # NumPy's numbers leave it to these

    def __reduce__(self) -> tuple[Any, ...]:
        values = list(self._reading.values())
        return _restored, (list(self._names), values, self._updated, self._output)


def _restored(names: list[str], values: list[Any], updated: bool, output: tuple[Any, ...]) -> Metrics:
    return Metrics(names, Reading(values), updated=updated, output=output)
