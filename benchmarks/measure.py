"""How everything here is measured: variants take turns in one process, and only their ratios are believed.

A shared machine drifts by far more than the differences of interest, so the variants run A B C A B C, and the ratio of two is
the median of the ratios within each round.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hotloop

RESULTS = Path(__file__).parent / "results"
Times = dict[str, list[float]]


def synchronize() -> None:
    """Wait for the accelerator, if there is one: without this its work would be timed as done when it is only queued."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def interleave(variants: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 3) -> Times:
    """Seconds of each call, for each variant, in rounds of one call each. Warm-up rounds are not kept."""
    times: Times = {name: [] for name in variants}
    with _no_collection():
        for number in range(warmup + rounds):
            for name, run in variants.items():
                synchronize()
                start = time.perf_counter()
                run()
                synchronize()
                if number >= warmup:
                    times[name].append(time.perf_counter() - start)
            gc.collect(0)
    return times


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run with one thread: with more, processes on the same cores wait for each other, and take up to ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Operators(TorchDispatchMode):
    """Counts what reaches the dispatcher, and how much of it hands a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.reads = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.reads += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))


def counted(run: Callable[[], object], steps: int) -> dict[str, float]:
    """Dispatched operators, host reads and Python calls (of functions in Python and in C) of one step."""
    with _Operators() as seen:
        run()
    calls = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {"operators": seen.operators / steps, "reads": seen.reads / steps, "calls": round(calls / steps, 1)}


def summary(times: Times, *, base: str, per: int = 1) -> dict[str, dict[str, float]]:
    """Median and quartiles in milliseconds (of one of the `per` steps in each call), and the ratio to `base`."""
    return {name: {**_spread(values, per), "ratio": ratio(values, times[base])} for name, values in times.items()}


def _spread(values: list[float], per: int) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {key: round(1e3 * value / per, 5) for key, value in (("ms", median), ("low", low), ("high", high))}


def ratio(values: list[float], base: list[float]) -> float:
    """The median of the ratios within each round."""
    return round(statistics.median(v / b for v, b in zip(values, base, strict=True)), 4)


def assert_close(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], tolerance: float, what: str) -> float:
    """The largest difference of two state dicts, at most `tolerance` (0: bitwise): timing what differs would be vain."""
    worst = max((float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()), default=0.0)
    if not worst <= tolerance:
        raise AssertionError(f"{what}: the weights differ by {worst:.2g}, more than {tolerance:.2g}")
    return worst


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "accelerator": _accelerator(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hotloop": hotloop.__version__,
        "commit": _commit(),
        "16-bit units": [
            name for name, probe in (("AVX512-BF16", "_is_avx512_bf16_supported"), ("AMX", "_is_amx_tile_supported"))
            if getattr(torch.cpu, probe, bool)()
        ],
    }  # fmt: skip


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else str(torch.accelerator.current_accelerator())


def _commit() -> str:
    root = Path(__file__).parent.parent

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False).stdout.strip()

    # What one benchmark after the other writes changes nothing of what is measured.
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!README*.md")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def write(name: str, payload: Mapping[str, Any]) -> Path:
    """`benchmarks/results/NAME.json`: the figures, the machine, and the command that made them."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    command = " ".join(["python -m", _module(), *sys.argv[1:]])
    path.write_text(json.dumps({"command": command, "machine": machine(), **payload}, indent=1) + "\n")
    return path


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else "benchmarks"


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Rows of figures, aligned for a terminal."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [["", *columns], *([name, *(_cell(row.get(c)) for c in columns)] for name, row in rows.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(line) for line in aligned)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
