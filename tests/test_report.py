"""The READMEs hold exactly what `benchmarks/report.py` makes of the results, and no other figures in their tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks import report

MACHINE = {
    "cpu": "A CPU",
    "16-bit units": ["AMX"],
    "accelerator": None,
    "torch": "2.6.0",
    "python": "3.10.1",
    "commit": "abc1234",
}
BASE: dict[str, Any] = {"command": "python -m benchmarks.x", "machine": MACHINE}


def rows(base: str, **others: float) -> dict[str, dict[str, float]]:
    return {name: {"ms": 9.87, "ratio": ratio} for name, ratio in {base: 1.0, **others}.items()}


NAIVE = {"small": rows("naive", bare=0.9, hotloop=0.512), "large": rows("naive", hotloop=0.25)}
RESULTS: dict[str, dict[str, Any]] = {
    "baseline": {
        "training": NAIVE,
        "evaluation": NAIVE,
        "epoch": NAIVE,
        "compare": {"small": {"compare": 0.661, "baseline": 0.65}},
    },
    "peers": {"versions": {"other": "1.2.3"}, "training": NAIVE},
    "memory": {"peak": {"small": {"naive": {"ratio": 1.0}, "hotloop": {"added MiB": 2.0, "ratio": 0.994}}}},
    "overhead": {"workload": "small", "a step": {"Adam": {"bare µs": 439.5, "added calls": -0.0}}},
    "loading": {
        "tensors in memory, a batch": {"64": rows("DataLoader", prefetch=0.11)},
        "items of 2 ms, x no workers": {"image": {"chosen": 2, "0 workers": 1.0, "2 workers": 0.48, "why": "7 ms an item"}},
    },
    "ablation": {
        "alone": {
            "small": {
                "off": {"ratio": 1.0},
                "fused": {"auto": "on", "ratio": 0.881},
                "precision": {"auto": "fp32", "ratio": 1.55},
                "channels_last": {"auto": "off"},
            }
        }
    },
    "shapes": {
        "streams": {"stable": rows("off", on=0.7, auto=0.71)},
        "one convolution": {"64 to 64": {"off": {"ratio": 1.0}, "on from the start": {"ratio": 0.62}}},
    },
    "reading": {"training": {"small": rows("plain, never", **{"hotloop, every step": 1.31})}},
}
RESULTS["ablation_gpu"] = RESULTS["ablation"]

# A table's name, and lines that it must have.
LINES = [
    ("training", ["| x naive | bare | hotloop |", "| small | 0.90 | 0.51 |", "| large |  | 0.25 |"]),
    ("evaluation", ["| small | 0.90 | 0.51 |"]),
    ("epoch", ["| small | 0.90 | 0.51 |"]),
    ("compare", ["| x bare | compare | baseline |", "| small | 0.66 | 0.65 |"]),
    ("peers", ["| large |  | 0.25 |", "other 1.2.3"]),
    ("memory", ["| peak x naive | hotloop |", "| small | 0.99 |"]),
    ("overhead", ["| small | bare µs | added calls |", "| Adam | 439.5 | 0.0 |"]),
    ("loading", ["| 64 | 0.11 |", "| x no workers | chosen | 2 workers |", "| image | 2 | 0.48 |"]),
    ("ablation", ["| x off | fused | precision | channels_last |", "| small | **0.88** | 1.55 |  |"]),
    ("ablation on a GPU", ["| small | **0.88** | 1.55 |  |"]),
    ("shapes", ["| stable | 0.70 | 0.71 |", "| 64 to 64 | 0.62 |"]),
    ("reading", ["| small | 1.31 |"]),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, results in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**BASE, **results}))
    return tmp_path


def marked(name: str) -> str:
    return f"before\n<!-- results: {name} -->\nwritten by hand\n<!-- end -->\nafter\n"


@pytest.mark.parametrize(("name", "lines"), LINES, ids=[name for name, _ in LINES])
def test_a_table_holds_its_results_and_who_made_them(name: str, lines: list[str], folder: Path) -> None:
    text = report.filled(marked(name), "README.md", folder).splitlines()
    assert set(lines) <= set(text)
    assert "`python -m benchmarks.x` · A CPU, AMX · torch 2.6.0, Python 3.10.1 · commit abc1234" in text
    assert (text[0], text[-1]) == ("before", "after")
    assert "written by hand" not in text
    again = report.filled("\n".join(text) + "\n", "README.md", folder)
    assert again.splitlines() == text


def test_every_table_is_tested() -> None:
    assert {name for name, _ in LINES} == report.TABLES.keys()


@pytest.mark.parametrize(("readme", "words"), report.NOT_MEASURED.items())
@pytest.mark.parametrize(("name", "target"), [("training", "bench"), ("shapes", "gpu"), ("picture", "bench")])
def test_what_was_not_measured_says_so(name: str, target: str, readme: str, words: str, tmp_path: Path) -> None:
    assert f"\n{words}: `make {target}`\n" in report.filled(marked(name), readme, tmp_path)


def test_a_name_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="speeds"):
        report.filled(marked("speeds"), "README.md", tmp_path)


def test_the_picture_is_drawn(folder: Path) -> None:
    report.draw(json.loads((folder / "baseline.json").read_text()), folder / report.PICTURE)
    assert (folder / report.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert "\n![speed](benchmarks/results/speed.png)\n" in report.filled(marked("picture"), "README.md", folder)


@pytest.mark.parametrize("readme", report.READMES)
def test_readme_is_what_the_results_say(readme: str) -> None:
    text = (report.ROOT / readme).read_text()
    assert text == report.filled(text, readme), "run `python -m benchmarks.report`"
    assert {found["name"] for found in report.MARKED.finditer(text)} == {"picture", *report.TABLES}


@pytest.mark.parametrize("readme", report.READMES)
def test_no_figure_stands_in_a_table_by_hand(readme: str) -> None:
    by_hand = report.MARKED.sub("", (report.ROOT / readme).read_text())
    in_tables = [line for line in by_hand.splitlines() if line.startswith("|")]
    assert in_tables, "the table of the step's calls"
    assert not [line for line in in_tables if re.search(r"\d", line)]
