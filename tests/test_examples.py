"""Every example runs, learns what it is to learn, and shows what its first lines promise."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.twins import differences

FOLDER = Path(__file__).parent.parent / "examples"
Example = Callable[..., dict[str, float]]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Example]]:
    """An example's `main`. The examples import each other as scripts do; afterwards their names are free again."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield lambda name: importlib.import_module(name).main
    for name in {path.stem for path in FOLDER.glob("*.py")} & (sys.modules.keys() - before):
        del sys.modules[name]


def test_gan(example: Any) -> None:
    result = example("gan")(epochs=8)
    assert result["updates"] == 8 * 22, "two backward passes, one update"
    assert result["after"] < 0.7 * result["before"]


@pytest.mark.parametrize("kind", ["gpt", "lstm"])
def test_language_model(example: Any, kind: str) -> None:
    result = example("language_model")(model=kind, updates=40)
    assert result["difference"] == 0.0, "resumed in the middle of an update, it ends with the same weights"
    assert result["updates"] == 40
    assert result["after"] < 0.7 * result["before"]


def test_resume(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = example("resume")
    whole = main(str(tmp_path / "whole"), steps=30, every=7)
    broken = str(tmp_path / "broken")
    replace, saves = os.replace, []

    def dies(*arguments: Any) -> None:
        saves.append(arguments)
        if len(saves) == 3:
            raise KeyboardInterrupt
        replace(*arguments)

    with monkeypatch.context() as patched:  # it dies while it saves: the checkpoint before is whole
        patched.setattr("os.replace", dies)
        with pytest.raises(KeyboardInterrupt):
            main(broken, steps=30, every=7)
    resumed = main(broken, steps=30, every=7)
    assert resumed == {**whole, "resumed after": 14}
    files = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "broken")]
    assert differences(*files) == []
    assert [path.name for path in (tmp_path / "broken").iterdir()] == ["checkpoint.pt"]


def test_distillation(example: Any) -> None:
    result = example("distillation")(epochs=5)
    assert result["accuracy"] > 0.8
    assert result["agreement"] > 0.8


def test_perceptual_loss(example: Any) -> None:
    result = example("perceptual_loss")(epochs=4)
    assert result["last"] < 0.7 * result["first"]
    assert result["restored"] > result["shrunk"] + 0.2


def test_distributed_classifier_alone(example: Any) -> None:
    """Under torchrun it is tested in tests/distributed."""
    result = example("distributed_classifier")(epochs=5, device="cpu")
    assert result["updates"] == 5 * 22
    assert result["lr"] < 1e-9, "the schedule has come to its end"
    assert result["accuracy"] == result["accuracy, shared"] > 0.9
    assert result["accuracy of the average"] > 0.9


def test_segmentation(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = example("segmentation")(epochs=2)
    assert result["before"] < 0.5
    assert result["after"] > 0.8
    assert "channels_last" in capsys.readouterr().out, "the plan is printed"


def test_token_batches(example: Any) -> None:
    result = example("token_batches")()
    assert result["accuracy"] > result["by_guessing"] + 0.2


def test_energy_model(example: Any) -> None:
    result = example("energy_model")(updates=200)
    assert result["before"] > 0.5
    assert result["after"] < 0.1


def test_lbfgs(example: Any) -> None:
    result = example("lbfgs")(steps=3)
    assert result["last"] < 0.1 < result["first"]
    assert result["accuracy"] > 0.93


def test_detector(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = example("detector")(epochs=4)
    assert result["recall"] > 0.8
    assert result["precision"] > 0.8
    assert result["waits"] == 3 * (1 + 2), "in each of three steps a check of the loss, and two losses for the bar"
    assert "detector.py:" in capsys.readouterr().out, "the waits are shown with their line"


@pytest.mark.parametrize("is_installed", [True, False], ids=["with TensorBoard", "without"])
def test_tensorboard_and_tqdm(
    example: Any, is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if is_installed:
        pytest.importorskip("tensorboard")
    else:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = example("tensorboard_and_tqdm")(epochs=2, folder=str(tmp_path))
    assert result["accuracy"] > 0.9
    assert result["steps"] == 2 * 23
    out, err = capfd.readouterr()
    assert "loss=" in err, "the progress bar shows the metrics"
    files = [path.name for path in tmp_path.iterdir()]
    if is_installed:
        assert files
        assert all(name.startswith("events") for name in files)
    else:
        assert "TensorBoard is not installed" in out
        tags = [line.split(",")[1] for line in (tmp_path / "scalars.csv").read_text().splitlines()]
        assert tags.count("train/loss") == 2 * 23 // 10
        assert tags.count("epoch/accuracy") == 2


def cells(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def run_cell(code: str, namespace: dict[str, Any]) -> Any:
    """Run a cell; its last expression is what a notebook shows."""
    body = ast.parse(code).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
    return None if last is None else eval(compile(last, "cell", "eval"), namespace)


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Jupyter: its code runs here, and a stand-in takes the pictures."""
    monkeypatch.chdir(tmp_path)
    display = types.ModuleType("IPython.display")
    display.Image = lambda path: Path(path).read_bytes()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    namespace: dict[str, Any] = {"__name__": "notebook"}
    shown = [run_cell(code, namespace) for code in cells(FOLDER / "plan_and_compare.ipynb")]
    shown = [value for value in shown if value is not None]
    plan, (metrics, means, updates), picture, difference, syncs = shown
    assert "<table>" in plan._repr_html_()
    assert metrics["loss"] < 1
    assert means["loss"] < 2
    assert updates == 29
    assert picture.startswith(b"\x89PNG")
    assert difference == 0.0
    assert [(op, count) for op, count, _ in syncs] == [(".item()", 29)]


def test_notebook_is_stored_as_it_was_run() -> None:
    """Readers see its outputs without running it, and no path of the machine that ran it."""
    text = (FOLDER / "plan_and_compare.ipynb").read_text()
    stored = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    kinds = {kind for cell in stored for output in cell["outputs"] for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds
    assert [cell["execution_count"] for cell in stored] == [*range(1, len(stored) + 1)]
    assert "/home/" not in text


def test_every_example_tells_how_it_is_run() -> None:
    silent = [path.name for path in FOLDER.glob("*.py") if f"python examples/{path.name}" not in path.read_text()]
    assert silent == ["scenes.py"], "it makes the data of others"
