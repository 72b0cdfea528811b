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

def make_and_leave():
    raise SystemExit(0)

def batches_of(count):
    return batches

number = 3
"""

PARSING = """
import argparse
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.1)
options = parser.parse_args()
seen = list(sys.argv)
from training_script import *

def make_by_arguments():
    assert parser.parse_args() == options
    return make()
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "training_script.py").write_text(SCRIPT)
    (tmp_path / "broken_script.py").write_text("import not_installed_anywhere")
    (tmp_path / "ending_script.py").write_text("raise SystemExit(3)")
    (tmp_path / "leaving_script.py").write_text("raise SystemExit")
    (tmp_path / "asking_script.py").write_text(PARSING.replace("default=0.1", "required=True"))
    (tmp_path / "parsing_script.py").write_text(PARSING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("training_script", "parsing_script"):
        sys.modules.pop(name, None)


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


def test_a_module_that_reads_the_command_line_sees_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["hotloop", "compare", "parsing_script:make_by_arguments", "--steps", "2", "--exact"]
    monkeypatch.setattr(sys, "argv", given)
    assert run(*given[1:]) == 0
    assert sys.modules["parsing_script"].seen == [str(tmp_path / "parsing_script.py")]
    assert sys.argv is given


MISTAKES = {
    "no colon": (["training_script"], "write module:make"),
    "no module": ([":make"], "write module:make"),
    "a relative name": ([".training_script:make"], "write training_script:make"),
    "a path": (
        ["./training_script:make"],
        "./training_script is a file, and a module is asked for; write training_script:make",
    ),
    "a path in a folder": (["../runs/training_script.py:make"], "write runs.training_script:make"),
    "a module that ends the process well": (["leaving_script:make"], "(exit code None)"),
    "a module that needs arguments": (["asking_script:make"], "ended the process (exit code 2)"),
    "make ends the process": (["training_script:make_and_leave"], "ended the process (exit code 0); make_and_leave() builds"),
    "a module that ends the process": (["ending_script:make"], "(exit code 3); put what it does as a script"),
    "a file name": (["training_script.py:make"], "write training_script:make, in the folder"),
    "no such module": (["no_such_module:make"], "cannot import no_such_module (No module named 'no_such_module')"),
    "a module that does not import": (["broken_script:make"], "No module named 'not_installed_anywhere'"),
    "no such function": (["training_script:build"], "has no function 'build'; write `def build()"),
    "not a function": (["training_script:number"], "has no function 'number'"),
    "no batches": (["training_script:make", "--batches", "loader"], "has no 'loader'; write `loader = DataLoader(...)`"),
    "batches are something else": (["training_script:make", "--batches", "number"], "<int>): both loops train on batches"),
    "batches need an argument": (["training_script:make", "--batches", "batches_of"], "batches() is called without arguments"),
    "batches are a model": (["training_script:make", "--batches", "make"], "hotloop: step(<Linear>): with a loss_fn the last"),
    "make needs an argument": (["training_script:batches_of"], "make() is called without arguments"),
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
    lines = error.splitlines()
    assert lines[-1].startswith(("hotloop: compare", "hotloop: step(", "hotloop: the report was not written"))
    assert text in lines[-1]
    assert len(lines) == 1 or name == "a module that needs arguments"  # whose parser says which


def test_a_plot_that_cannot_be_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert run("compare", "training_script:make", "--steps", "1", "--plot", "report.xyz") == 1
    shown = capsys.readouterr()
    assert "time per step" in shown.out
    assert shown.err.startswith("hotloop: the report was not written: Format 'xyz' is not supported")
    assert shown.err.count("\n") == 1


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


@pytest.mark.parametrize(
    ("environment", "remark"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"},
            "2, by the environment, and this is rank 1",
        ),
        ({"RANK": "0"}, "torchrun's environment is half set: RANK=0"),
        ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}, "WORLD_SIZE=two is no rank"),
        ({"WORLD_SIZE": "1"}, "1"),
        ({"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "y"}, "1"),
    ],
)
def test_doctor_waits_for_no_other_process(
    environment: dict[str, str], remark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run("doctor", "--json") == 0
    assert remark in json.loads(capsys.readouterr().out)["machine"]["processes"]


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
