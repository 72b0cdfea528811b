"""What a comparison of two loops found, to print, to plot and to read by a program."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from hotloop._median import median
from hotloop._plan import Plan


@dataclass(frozen=True)
class Measured:
    """One of the loops: seconds per step, one value for each turn; bytes; host waits in a step; the loss of each step."""

    times: list[float]
    peak_memory: int | None  # None where the device does not count its memory, as a CPU does not
    syncs: int
    losses: list[float]

    @property
    def median(self) -> float:
        """The median time of a step, in seconds."""
        return median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the time of a step, in seconds."""
        if len(self.times) == 1:
            return self.times[0], self.times[0]
        import statistics  # takes as long to import as a tenth of hotloop

        first, _, third = statistics.quantiles(self.times, n=4, method="inclusive")
        return first, third

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without the series."""
        first, third = self.quartiles
        return {
            "seconds_per_step": {"median": self.median, "first_quartile": first, "third_quartile": third},
            "peak_memory": self.peak_memory,
            "syncs_per_step": self.syncs,
            "final_loss": self.losses[-1],
        }


@dataclass(frozen=True)
class Comparison:
    """The plain loop against the wrapped one. `print` shows a table; `ratio` below 1 means that the wrapped loop is faster."""

    plain: Measured
    wrapped: Measured
    max_weight_difference: float
    plan: Plan
    device: torch.device

    @property
    def ratio(self) -> float:
        """The time of the wrapped loop by that of the plain loop: the median over turns that ran one after the other."""
        return median(w / p for p, w in zip(self.plain.times, self.wrapped.times, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data: `plain`, `wrapped`, `ratio` and `max_weight_difference`."""
        return {
            "plain": self.plain.as_dict(),
            "wrapped": self.wrapped.as_dict(),
            "ratio": self.ratio,
            "max_weight_difference": self.max_weight_difference,
        }

    def __str__(self) -> str:
        plain, wrapped = self.plain, self.wrapped
        rows = [
            ("", "plain", "wrapped"),
            ("time per step", _time(plain.median), f"{_time(wrapped.median)}  ({self.ratio:.2f} of plain)"),
            ("  quartiles", _times(plain.quartiles), _times(wrapped.quartiles)),
            ("peak memory", _size(plain.peak_memory), _size(wrapped.peak_memory)),
            ("syncs per step", str(plain.syncs), str(wrapped.syncs)),
            ("final loss", f"{plain.losses[-1]:.6g}", f"{wrapped.losses[-1]:.6g}"),
        ]
        name, first = (max(len(row[i]) for row in rows) for i in (0, 1))
        table = "\n".join(f"{a:<{name}}  {b:<{first}}  {c}".rstrip() for a, b, c in rows)
        same = self.max_weight_difference == 0
        difference = "none, they are bitwise equal" if same else f"at most {self.max_weight_difference:.2g}"
        return (
            f"{table}\ndifference of the weights on {self.device}, after {len(plain.losses)} steps: {difference}\n\n{self.plan}"
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the times of the turns and the losses into a file. Needs matplotlib (`pip install hotloop[plot]`)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("report.plot(path) needs matplotlib: pip install 'hotloop[plot]'") from error
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        times, losses = figure.subplots(1, 2)
        for name, loop in (("plain", self.plain), ("wrapped", self.wrapped)):
            times.plot([1e3 * t for t in loop.times], marker=".", label=name)
            losses.plot(loop.losses, label=name)
        times.set(xlabel="turn", ylabel="ms per step", ylim=(0, None), title=f"wrapped: {self.ratio:.2f} of plain")
        losses.set(xlabel="step", ylabel="loss")
        losses.legend()
        figure.savefig(path)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _times(pair: tuple[float, float]) -> str:
    return " to ".join(map(_time, pair))


def _size(count: int | None) -> str:
    return "not counted" if count is None else f"{count / 2**20:,.1f} MiB"
