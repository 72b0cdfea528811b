"""Every Python block of the READMEs runs, in order, in one namespace for each file.

What a block needs and a reader does not (a loader, a model) stands before it in a comment that GitHub does not show:

    <!-- setup
    loader = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    -->
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = sorted(path.name for path in ROOT.glob("README*.md"))
BLOCK = re.compile(r"^(?P<fence><!-- setup|```python)\n(?P<code>.*?)^(?:-->|```)$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, int, str]]:
    """Each block's kind, the line it starts at, and its code."""
    return [(m["fence"], text.count("\n", 0, m.start("code")), m["code"]) for m in BLOCK.finditer(text)]


def run(text: str, name: str) -> int:
    """Run the blocks; a traceback shows the file's own lines. Returns how many a reader sees."""
    namespace: dict[str, object] = {"__name__": "readme"}
    found = blocks(text)
    for _, line, code in found:
        exec(compile("\n" * line + code, name, "exec"), namespace)
    return sum(fence == "```python" for fence, _, _ in found)


@pytest.mark.parametrize("name", READMES)
def test_every_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / name).read_text()
    assert run(text, name) == text.count("```python")


@pytest.mark.parametrize("name", [name for name in READMES if name != "README.md"])
def test_translations_show_the_same_code(name: str) -> None:
    """Comments may be translated, code may not differ."""

    def code(file: str) -> list[str]:
        return [ast.dump(ast.parse(block)) for fence, _, block in blocks((ROOT / file).read_text()) if fence == "```python"]

    assert code(name) == code("README.md")


EXAMPLE = """
<!-- setup
x = 3
-->
```python
y = x + 1
```
Some words.
```bash
exit 1
```
```python
assert y == {}
```
"""


def test_blocks_share_a_namespace_and_setup_is_run_but_not_counted() -> None:
    assert run(EXAMPLE.format(4), "README.md") == 2


def test_a_wrong_block_fails_and_shows_its_line() -> None:
    with pytest.raises(AssertionError) as caught:
        run(EXAMPLE.format(5), "README.md")
    assert caught.traceback[-1].lineno + 1 == 13
