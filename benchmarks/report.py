"""The tables of the READMEs and their picture, made from the results.

    python -m benchmarks.report [--tables]

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; what is written there by hand is lost. With --tables
the picture stays as it is, and matplotlib is not needed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.zh-CN.md")
PICTURE = "speed.png"
MARKED = re.compile(r"(<!-- results: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = {"README.md": "Not measured yet", "README.zh-CN.md": "尚未测量"}

Row = Mapping[str, Any]
Rows = Mapping[str, Row]


# --- tables -----------------------------------------------------------------------------------------------------------


def table(corner: str, rows: Rows) -> str:
    """A Markdown table; what a row lacks stays empty."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [[corner, *columns], ["---", *["---:"] * len(columns)]]
    lines += [[name, *(_cell(row.get(column)) for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def ratios(results: Mapping[str, Rows], without: str) -> dict[str, dict[str, Any]]:
    """The ratios of each workload in one row; `without` is what they are relative to, and 1."""
    return {name: {v: row["ratio"] for v, row in rows.items() if v != without} for name, rows in results.items()}


def _training(results: Any) -> str:
    return table("x naive", ratios(results["training"], "naive"))


def _evaluation(results: Any) -> str:
    return table("x naive", ratios(results["evaluation"], "naive"))


def _epoch(results: Any) -> str:
    return table("x naive", ratios(results["epoch"], "naive"))


def _compare(results: Any) -> str:
    return table("x bare", results["compare"])


def _peers(results: Any) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"{table('x naive', ratios(results['training'], 'naive'))}\n\n{versions}"


def _memory(results: Any) -> str:
    return table("peak x naive", ratios(results["peak"], "naive"))


def _overhead(results: Any) -> str:
    rows = {name: {k: f"{v + 0.0:.1f}" for k, v in row.items()} for name, row in results["a step"].items()}
    return table(results["workload"], rows)


def _loading(results: Any) -> str:
    batches = ratios(results["tensors in memory, a batch"], "DataLoader")
    items = results["items of 2 ms, x no workers"]
    chosen = {name: {k: v for k, v in row.items() if k not in ("why", "0 workers")} for name, row in items.items()}
    return f"{table('x DataLoader', batches)}\n\n{table('x no workers', chosen)}"


def _ablation(results: Any) -> str:
    def cell(row: Row) -> str | None:
        on = row["auto"] not in ("off", "fp32", "as it is")
        return None if "ratio" not in row else f"**{row['ratio']:.2f}**" if on else f"{row['ratio']:.2f}"

    rows = results["alone"]
    return table("x off", {w: {name: cell(row) for name, row in made.items() if name != "off"} for w, made in rows.items()})


def _shapes(results: Any) -> str:
    streams = table("x flag off", ratios(results["streams"], "off"))
    return f"{streams}\n\n{table('x flag off', ratios(results['one convolution'], 'off'))}"


def _reading(results: Any) -> str:
    return table("x plain, never", ratios(results["training"], "plain, never"))


# What stands between the markers of this name: the results file, and what is made of it.
TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "training": ("baseline", _training),
    "evaluation": ("baseline", _evaluation),
    "epoch": ("baseline", _epoch),
    "compare": ("baseline", _compare),
    "peers": ("peers", _peers),
    "memory": ("memory", _memory),
    "overhead": ("overhead", _overhead),
    "loading": ("loading", _loading),
    "ablation": ("ablation", _ablation),
    "ablation on a GPU": ("ablation_gpu", _ablation),
    "shapes": ("shapes", _shapes),
    "reading": ("reading", _reading),
}


def made_by(results: Mapping[str, Any]) -> str:
    """The command and the machine, in words that need no translation."""
    machine = results["machine"]
    units = "".join(f", {unit}" for unit in machine["16-bit units"])
    device = machine["accelerator"] or f"{machine['cpu']}{units}"
    versions = f"torch {machine['torch']}, Python {machine['python']}"
    return f"`{results['command']}` · {device} · {versions} · commit {machine['commit']}"


def section(name: str, readme: str, folder: Path) -> str:
    """What belongs between the markers of one name."""
    if name == "picture":
        path = folder / PICTURE
        return f"![speed](benchmarks/results/{PICTURE})" if path.exists() else f"{NOT_MEASURED[readme]}: `make bench`"
    file, make = TABLES[name]
    path = folder / f"{file}.json"
    if not path.exists():
        return f"{NOT_MEASURED[readme]}: `make {'gpu' if file in ('ablation_gpu', 'shapes', 'reading') else 'bench'}`"
    results = json.loads(path.read_text())
    return f"{make(results)}\n\n{made_by(results)}"


def filled(text: str, readme: str, folder: Path = RESULTS) -> str:
    """The text of a README with its tables as the results have them."""
    return MARKED.sub(lambda found: f"{found[1]}{section(found['name'], readme, folder)}\n{found[3]}", text)


# --- picture ----------------------------------------------------------------------------------------------------------

STYLES = {"bare": "|", "hand-tuned": "s", "hotloop, exact": "D", "hotloop, fp32": "^", "hotloop": "o"}
COLOURS = {
    "bare": "0.55",
    "hand-tuned": "0.35",
    "hotloop, exact": "tab:cyan",
    "hotloop, fp32": "tab:blue",
    "hotloop": "tab:red",
}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Time relative to the naive loop: a row for each workload, a mark for each loop."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    titles = {"training": "a training step", "evaluation": "an evaluation", "epoch": "an epoch with loading"}
    figure, panels = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        _panel(axes, ratios(results[kind], "naive"))
        axes.set(title=title, xlabel="time, relative to the naive loop")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(STYLES) + 1, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axes: Any, rows: Rows) -> None:
    names = list(rows)
    axes.axvline(1.0, color="black", linewidth=1, label="naive")
    for loop, style in STYLES.items():
        points = [(rows[name][loop], i) for i, name in enumerate(names) if loop in rows[name]]
        if points:
            axes.plot(*_columns(points), style, color=COLOURS[loop], markersize=8, label=loop, linestyle="none", zorder=3)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _columns(points: Iterable[tuple[float, int]]) -> tuple[Any, ...]:
    return tuple(zip(*points, strict=True))


def main() -> None:
    baseline = RESULTS / "baseline.json"
    if baseline.exists() and "--tables" not in sys.argv:
        draw(json.loads(baseline.read_text()), RESULTS / PICTURE)
    for name in READMES:
        path = ROOT / name
        path.write_text(filled(path.read_text(), name))
        print(path)


if __name__ == "__main__":
    main()
