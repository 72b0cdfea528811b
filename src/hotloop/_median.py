"""Medians, without the modules that `statistics` brings along: they would make up a tenth of the import."""

from __future__ import annotations

from collections.abc import Iterable


def median(values: Iterable[float]) -> float:
    """The value in the middle, or the mean of the two that are."""
    ordered = sorted(values)
    middle, odd = divmod(len(ordered), 2)
    return ordered[middle] if odd else (ordered[middle - 1] + ordered[middle]) / 2
