"""`make demo`: both loops learn the digits, and everything that it promises to show is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parent.parent / "examples" / "digits.py"


def test_demo(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    command = [sys.executable, str(DEMO), "--epochs", "10", "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    right = {name: float(value) for name, value in re.findall(r"^(\w+) +([\d.]+)% of the test digits right", done.stdout, re.M)}
    assert right.keys() == {"plain", "hotloop"}
    assert min(right.values()) >= 98
    assert re.search(r"^precision +\w+ +\w", done.stdout, re.M), "the plan is printed"
    assert re.search(r"^hotloop took \d+\.\d\d of the plain loop's time", done.stdout, re.M)
    assert "10/10" in done.stderr, "the progress bars"
    assert picture.read_bytes().startswith(b"\x89PNG")
