"""The decisions that `optimize` took, in a form to print, to show in a notebook and to read by a program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hotloop._parts import Parts

_log = logging.getLogger("hotloop")  # the only one; at DEBUG it tells each decision when it is made or changed
_log.addHandler(logging.NullHandler())


def _unchanged(parts: Parts) -> Parts:
    return parts


@dataclass(frozen=True)
class Decision:
    """One choice: what was chosen, why, and the change that it makes. `apply` is what ran, so the report cannot drift."""

    name: str
    choice: str
    why: str
    apply: Callable[[Parts], Parts] = field(default=_unchanged, repr=False)
    revert: Callable[[Parts], Parts] = field(default=_unchanged, repr=False)


class Plan:
    """What `optimize` switched on, what it left off, and why.

    `print(step.plan)` shows a table, a notebook shows it as HTML, and `as_dict()` gives
    `{name: {"choice": ..., "why": ...}}`. A choice that changes at run time (a fall-back, a measured winner) shows here too.

    >>> from hotloop import optimize
    >>> net = nn.Linear(4, 2)
    >>> plan = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss()).step.plan
    >>> plan["compile"].choice, plan["channels_last"].why
    ('off', 'the model has no 2-D convolution')
    """

    __slots__ = ("_decisions",)

    def __init__(self, decisions: list[Decision]) -> None:
        self._decisions: dict[str, Decision] = {}
        for decision in decisions:
            self.record(decision)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._decisions.values())

    def __len__(self) -> int:
        return len(self._decisions)

    def __getitem__(self, name: str) -> Decision:
        return self._decisions[name]

    def record(self, decision: Decision) -> None:
        """Replace the decision of the same name: the plan always tells what holds now."""
        before = self._decisions.get(decision.name)
        self._decisions[decision.name] = decision
        if before is None or (before.choice, before.why) != (decision.choice, decision.why):
            _log.debug("%s: %s (%s)", decision.name, decision.choice, decision.why)

    def __copy__(self) -> Plan:
        # For a copy of the model: what one of them takes back from here on does not show in the other.
        made = Plan([])
        made._decisions = dict(self._decisions)
        return made

    def as_dict(self) -> dict[str, dict[str, str]]:
        """`{name: {"choice": ..., "why": ...}}`, in the order in which the decisions were applied."""
        return {d.name: {"choice": d.choice, "why": d.why} for d in self}

    def __str__(self) -> str:
        rows = [("", "choice", "why"), *((d.name, d.choice, d.why) for d in self)]
        name, choice = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{a:<{name}}  {b:<{choice}}  {c}".rstrip() for a, b, c in rows)

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{d.name}={d.choice}' for d in self)})"

    def _repr_html_(self) -> str:
        import html  # for notebooks alone

        cells: Any = html.escape
        rows = "".join(f"<tr><th>{cells(d.name)}</th><td>{cells(d.choice)}</td><td>{cells(d.why)}</td></tr>" for d in self)
        return f"<table><thead><tr><th></th><th>choice</th><th>why</th></tr></thead><tbody>{rows}</tbody></table>"


def apply(decisions: list[Decision], parts: Parts) -> Parts:
    """Carry the decisions out, in order; if one fails, undo those before it, so that nothing is half done."""
    done: list[Decision] = []
    try:
        for decision in decisions:
            done.append(decision)
            parts = decision.apply(parts)
    except BaseException:
        revert(done, parts)
        raise
    return parts


def revert(decisions: list[Decision], parts: Parts) -> Parts:
    """Undo what `apply` has carried out."""
    for decision in reversed(decisions):
        parts = decision.revert(parts)
    return parts
