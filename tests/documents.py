"""The Python blocks of a Markdown file, run in order in one namespace, as a doctest runs a docstring.

What a block needs and a reader does not (a loader, a model) stands before it in a comment that is not shown:

    <!-- setup
    loader = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    -->

A block ```` ```text ```` right behind a Python block is what that block prints, or the error or the warning that ends it; `...`
stands for anything, and white space does not count. Lines that tell of the machine are named before it, by how they begin, and
not compared:

    <!-- machine: placement precision -->
"""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
import warnings
from dataclasses import dataclass
from typing import Any

BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- setup|```python(?P<shown>[^\n]*))\n(?P<code>.*?)^(?P=indent)(?:-->|```)$"
    r"(?:\s+<!-- machine: (?P<machine>[^\n]*) -->)?(?:\s+^(?P=indent)```text[^\n]*\n(?P<says>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)
RAISED = re.compile(r"(\w+(?:Error|Warning)): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block, the line that it starts at, and what it says when it is run."""

    code: str
    line: int
    is_shown: bool
    says: str | None
    machine: tuple[str, ...]


def blocks(text: str) -> list[Block]:
    """The blocks of a file, those that are not shown as well."""
    return [
        Block(
            textwrap.dedent(m["code"]),
            text.count("\n", 0, m.start("code")),
            m["shown"] is not None,
            None if m["says"] is None else textwrap.dedent(m["says"]),
            tuple((m["machine"] or "").split()),
        )
        for m in BLOCK.finditer(text)
    ]


def run(text: str, name: str, namespace: dict[str, Any] | None = None) -> int:
    """Run the blocks; a traceback shows the file's own lines. Returns how many a reader sees."""
    names = {} if namespace is None else namespace
    names.setdefault("__name__", "documents")
    found = blocks(text)
    for block in found:
        said = _run(block, name, names)
        if block.says is not None:
            wanted, got = (_compared(text, block.machine) for text in (block.says, said))
            assert matches(wanted, got), f"{name}, line {block.line}: the block says\n{said}\nand not\n{block.says}"
    return sum(block.is_shown for block in found)


def _run(block: Block, name: str, names: dict[str, Any]) -> str:
    code = compile("\n" * block.line + block.code, name, "exec")
    raised = RAISED.match(block.says or "")
    said = io.StringIO()
    if raised is None:
        with contextlib.redirect_stdout(said):
            exec(code, names)
    elif raised[1].endswith("Warning"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(code, names)
        said.write("\n".join(f"{w.category.__name__}: {w.message}" for w in caught))
    else:
        try:
            exec(code, names)
        except Exception as error:
            said.write(f"{type(error).__name__}: {error}")
    return said.getvalue()


def _compared(text: str, machine: tuple[str, ...]) -> str:
    lines = [line for line in text.splitlines() if not (machine and line.strip().startswith(machine))]
    return " ".join(" ".join(lines).split())


def matches(wanted: str, got: str) -> bool:
    """Whether a text is the one that is wanted, where `...` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, wanted.split("..."))), got, re.DOTALL) is not None
