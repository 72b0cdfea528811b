"""Every Python block of the READMEs runs, in order, in one namespace for each file, and says what stands behind it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import documents

ROOT = Path(__file__).parent.parent
READMES = sorted(path.name for path in ROOT.glob("README*.md"))


@pytest.mark.parametrize("name", READMES)
def test_every_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / name).read_text()
    assert documents.run(text, name) == text.count("```python")


@pytest.mark.parametrize("name", [name for name in READMES if name != "README.md"])
def test_translations_show_the_same_code(name: str) -> None:
    """Comments may be translated, code may not differ."""

    def code(file: str) -> list[str]:
        return [ast.dump(ast.parse(block.code)) for block in documents.blocks((ROOT / file).read_text()) if block.is_shown]

    assert code(name) == code("README.md")
