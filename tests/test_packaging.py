"""The wheel and the source distribution: built, looked into, and the wheel used as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import hotloop

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`{"whl": ..., "gz": ...}`: what `make dist` builds."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {path.suffix[1:]: path for path in folder.iterdir()}


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["test", "cover", "soak", "bench"])
def test_make_hides_accelerators_from_what_compares_runs_on_the_cpu(target: str, tmp_path: Path) -> None:
    told = tmp_path / "python"
    told.write_text('#!/bin/sh\necho "sees [$CUDA_VISIBLE_DEVICES]"\n')
    told.chmod(0o755)
    done = [f"{tmp_path}/.dev", f"{tmp_path}/.bench", "lint", "types"]  # as if they were up to date
    command = ["make", f"VENV={tmp_path}", f"BIN={tmp_path}", *(word for name in done for word in ("-o", name)), target]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"}
    )
    assert "sees []" in ran.stdout, ran.stdout + ran.stderr


def test_the_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["whl"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        extra = {name.partition(".dist-info/")[2] for name in wheel.namelist()} - {""}
    source = ROOT / "src"
    assert names == {
        path.relative_to(source).as_posix() for path in source.glob("hotloop/**/*") if path.suffix in (".py", ".typed")
    }
    assert "hotloop/py.typed" in names
    assert extra == {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}


def test_its_metadata(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["whl"]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "hotloop"
    assert metadata["Version"] == hotloop.__version__, "the version stands in one place"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = metadata.get_all("Requires-Dist") or []
    assert sorted(line for line in needed if "extra ==" not in line) == ["torch>=2.6", "typing-extensions>=4.10", "wrapt>=2.0"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# hotloop\n")


def test_the_source_distribution_holds_what_a_clone_does(built: dict[str, Path]) -> None:
    with tarfile.open(built["gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("src", "tests", "benchmarks", "examples", "docs"):
        there = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert there <= names
    for name in (
        "Makefile",
        "README.md",
        "README.zh-CN.md",
        "LICENSE",
        "constraints.txt",
        "mkdocs.yml",
        "docs/index.md",
        "CHANGELOG.md",
    ):
        assert name in names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "site/"))]


def test_the_wheel_works(built: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built["whl"]) as wheel:
        wheel.extractall(tmp_path)
    code = "import hotloop, hotloop.__main__ as shell; print(hotloop.__file__); shell.main(['doctor'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path)), "it is the wheel's, not the clone's"
    assert "what optimize chooses" in done.stdout
