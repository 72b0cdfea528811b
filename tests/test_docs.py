"""The pages of the documentation: every block runs and says what stands behind it, and every page can be reached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import documents

FOLDER = Path(__file__).parent.parent / "docs"
PAGES = sorted(FOLDER.glob("*.md"))
CODE = [page for page in PAGES if "```python" in page.read_text()]
# Another library changes its process at import: such a page runs in one of its own.
OTHERS = {"from_accelerate.md": "accelerate", "from_fabric.md": "lightning_fabric", "from_ignite.md": "ignite"}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def namespace() -> dict[str, Any]:
    """What stands for the reader's own on every page."""
    torch.manual_seed(0)
    images, labels = torch.randn(96, 1, 8, 8), torch.randint(10, (96,))
    data = TensorDataset(images, labels)
    return {
        "torch": torch,
        "nn": nn,
        "Net": Net,
        "images": images,
        "labels": labels,
        "loader": DataLoader(data, batch_size=16, shuffle=True),
        "train_loader": DataLoader(data, batch_size=16),
        "test_loader": DataLoader(data, batch_size=32),
    }


def run(page: Path) -> None:
    text = page.read_text()
    assert documents.run(text, page.name, namespace()) == text.count("```python")


@pytest.mark.parametrize("page", [page for page in CODE if page.name not in OTHERS], ids=lambda page: page.name)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("name", OTHERS)
def test_every_block_beside_another_library_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip(OTHERS[name])
    code = f"import sys, pathlib, test_docs; test_docs.run(pathlib.Path({str(FOLDER / name)!r}))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"\b([\w-]+\.md)\b", (FOLDER.parent / "mkdocs.yml").read_text())
    assert sorted(named) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+\.\w+)\)", page.read_text())
    assert [link for link in links if not (FOLDER / link).exists()] == []


def test_every_example_is_on_its_page() -> None:
    shown = set(re.findall(r"^\| `([\w.]+)` \|", (FOLDER / "examples.md").read_text(), re.MULTILINE))
    there = {path.name for path in (FOLDER.parent / "examples").glob("*.*") if path.name != "scenes.py"}
    assert shown == there


def test_every_public_name_is_in_the_reference() -> None:
    import hotloop

    page = (FOLDER / "api.md").read_text()
    assert [name for name in hotloop.__all__ if f"::: hotloop.{name}\n" not in page] == []
