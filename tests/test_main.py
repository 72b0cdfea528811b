"""`python -m hotloop doctor | compare`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.__main__ import main

SCRIPT = """
import torch
from torch import nn

batches = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]

def more_batches():
    yield from batches * 9

def make():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()

def make_nothing():
    pass

def make_diverging():
    model, optimizer, _ = make()
    return model, optimizer, lambda output, target: output.sum() / 0.0

made = make()

def make_once():
    return made

def make_with_a_bug():
    return {}["key"]

number = 3
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "training_script.py").write_text(SCRIPT)
    (tmp_path / "broken_script.py").write_text("import not_installed_anywhere")
    (tmp_path / "ending_script.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("training_script", None)


def run(*arguments: str) -> int:
    return main(arguments)


def test_compare_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "training_script:make", "--steps", "2", "--exact") == 0
    out = capsys.readouterr().out
    assert out.startswith(" ")
    for line in ("time per step", "final loss", "bitwise equal", "exact=True"):
        assert line in out


def test_compare_writes_json_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("compare", "training_script:make", "--steps", "2", "--json", "r.json", "--plot", "r.png") == 0
    assert list(json.loads((tmp_path / "r.json").read_text())) == ["plain", "wrapped", "ratio", "max_weight_difference"]
    assert (tmp_path / "r.png").stat().st_size > 0


def test_batches_may_be_named_and_a_function() -> None:
    assert run("compare", "training_script:make", "--steps", "3", "--batches", "more_batches") == 0


MISTAKES = {
    "no colon": (["training_script"], "write module:make"),
    "no module": ([":make"], "write module:make"),
    "a relative name": ([".training_script:make"], "write module:make"),
    "a module that ends the process": (["ending_script:make"], "(exit code 3); put what it does as a script"),
    "a file name": (["training_script.py:make"], "name the module without its .py"),
    "no such module": (["no_such_module:make"], "cannot import no_such_module (No module named 'no_such_module')"),
    "a module that does not import": (["broken_script:make"], "No module named 'not_installed_anywhere'"),
    "no such function": (["training_script:build"], "has no function 'build'; write `def build()"),
    "not a function": (["training_script:number"], "has no function 'number'"),
    "no batches": (["training_script:make", "--batches", "loader"], "has no 'loader'; write `loader = DataLoader(...)`"),
    "nothing made": (["training_script:make_nothing"], "make() returned (NoneType)"),
    "built once": (["training_script:make_once"], "the same model or optimizer twice"),
    "not finite": (["training_script:make_diverging"], "loop is"),
    "batches run out": (["training_script:make", "--steps", "9", "--batches", "more_batches"], "the batches ran out after"),
    "steps": (["training_script:make", "--steps", "0"], "steps=0): steps is how many"),
    "no folder for the report": (
        ["training_script:make", "--steps", "1", "--json", "none/r.json"],
        "the report was not written",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_1(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, text = MISTAKES[name]
    assert run("compare", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("hotloop: compare") or name == "no folder for the report"
    assert text in error
    assert error.count("\n") == 1


def test_an_error_in_the_users_own_code_keeps_its_traceback() -> None:
    with pytest.raises(KeyError, match="key"):
        run("compare", "training_script:make_with_a_bug")


@pytest.mark.parametrize("arguments", [[], ["compare"], ["train"], ["compare", "training_script:make", "--steps", "many"]])
def test_a_command_line_that_is_not_understood_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    assert "usage: python -m hotloop" in capsys.readouterr().err


def test_doctor_shows_the_machine_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 0
    out = capsys.readouterr().out
    for word in ("versions", "machine", "torch", "accelerator", "cpu_16bit", "placement", "precision", "why"):
        assert word in out


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["versions", "machine", "plan"]
    assert found["versions"]["hotloop"] == hotloop.__version__
    assert set(found["plan"]["placement"]) == {"choice", "why"}


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", "compare", "no_such_module:make"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hotloop: compare no_such_module:make: cannot import")
