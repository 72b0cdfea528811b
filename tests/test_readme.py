"""Every Python block of the READMEs runs, in order, in one namespace for each file, and says what stands behind it.

The diff at the top is two programs, before and after, and both run.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def programs(text: str) -> tuple[str, str]:
    """The program before the change, and the one after it."""
    found = re.search(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = [(line[:1], line[2:]) for line in found[1].splitlines()]
    before, after = ("\n".join(code for sign, code in lines if sign in ("", " ", kept)) for kept in "-+")
    return before, after


@pytest.mark.parametrize("name", READMES)
def test_both_sides_of_the_diff_run_and_learn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = programs((ROOT / name).read_text())
    assert len(before.splitlines()) == 30, "a loop of thirty lines"
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)
    for code in (before, after):
        torch.manual_seed(0)
        names: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "Net": lambda: nn.Linear(8, 2),
            "train_loader": loader,
            "test_loader": loader,
        }
        exec(compile(code, name, "exec"), names)
        rows = [[float(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()]
        assert [row[0] for row in rows] == [0, 1, 2]
        assert rows[-1][1] < rows[0][1], "the loss falls"
        assert rows[-1][2] > rows[0][2] - 0.01
