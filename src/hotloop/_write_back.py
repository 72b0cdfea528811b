"""What a function writes into its arguments, where it was given copies of them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, MutableMapping
from operator import is_not
from typing import Any

_ABSENT = object()


class WriteBack:
    """Gives the caller's own dictionaries, lists and dataclasses what was written into the copies `made` of them.

    Called whenever the function may have written. What stands in the place of something of the caller's goes back as that.
    """

    def __init__(self, given: Any, made: Any) -> None:
        self._originals: dict[int, tuple[Any, Any]] = {}  # by the id of what stands in their places, which is kept alive
        self._copies = [(own, copy, _shallow(copy)) for own, copy in self._pairs(given, made)]

    def __call__(self) -> None:
        for own, copy, known in self._copies:
            if isinstance(copy, MutableMapping):
                self._write_items(own, copy, known)
            elif len(copy) != len(known) or any(map(is_not, copy, known)):
                added = list(own)[len(known) :]  # by others meanwhile
                own.clear()
                own.extend([*map(self._original, copy), *added])
                known[:] = copy

    def _write_items(self, own: Any, copy: Any, known: Any) -> None:
        for key in known.keys() - copy.keys():
            del known[key]
            own.pop(key, None)
        for key, value in copy.items():
            if value is not known.get(key, _ABSENT):
                own[key] = self._original(value)
                known[key] = value

    def _original(self, value: Any) -> Any:
        return self._originals.get(id(value), (value, value))[1]

    def _pairs(self, given: Any, made: Any) -> Iterator[tuple[Any, Any]]:
        if given is made or id(made) in self._originals:
            return
        self._originals[id(made)] = (made, given)
        if type(given) is not type(made):
            return
        if isinstance(given, MutableMapping):
            yield given, made
            children = [(value, made[key]) for key, value in given.items()]
        elif isinstance(given, list | deque | tuple) and len(given) == len(made):  # else it is a share of what there is
            if not isinstance(given, tuple):
                yield given, made
            children = list(zip(given, made, strict=True))
        elif dataclasses.is_dataclass(given) and hasattr(given, "__dict__"):
            children = [(vars(given), vars(made))]
        else:
            return
        for pair in children:
            yield from self._pairs(*pair)


def _shallow(container: Any) -> Any:
    return dict(container) if isinstance(container, MutableMapping) else list(container)
