"""The proxies with the oldest wrapt that `pyproject.toml` allows; the other tests run with the newest. W4."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that imports it."""
    found = re.search(r'"wrapt>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    folder = tmp_path_factory.mktemp("wrapt")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"wrapt=={found[1]}"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package registry here")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def run(*arguments: str, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_another_one_than_the_installed_one(oldest: dict[str, str]) -> None:
    version = ("-c", "from importlib.metadata import version; print(version('wrapt'))")
    assert run(*version, env=oldest) != run(*version, env=dict(os.environ))


def test_wrapped_models_and_loaders(oldest: dict[str, str]) -> None:
    files = ("tests/test_proxy.py", "tests/test_loading.py", "tests/test_state.py")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, env=oldest)
