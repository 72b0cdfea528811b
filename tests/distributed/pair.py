"""Runs checks in one pair of gloo processes: a start costs seconds, a check milliseconds.

Every function `check_...` of the module `checks` runs on both ranks, in their order; what goes wrong on a rank, or what a check
returns there, is handed back. A rank in which a check has failed ends, and so does the other one, which would wait for it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import hotloop

HERE = Path(__file__).parent


def free_port() -> str:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return str(opened.getsockname()[1])


def environment(rank: int, size: int, port: str) -> dict[str, str]:
    """What torchrun sets."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    paths = os.pathsep.join(map(str, (HERE.parent, HERE.parent.parent, Path(hotloop.__file__).parent.parent)))
    return {
        **os.environ,
        **{k: str(v) for k, v in place.items()},
        "MASTER_PORT": port,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
    }


def start(commands: Sequence[Sequence[str]], **options: Any) -> list[subprocess.Popen[str]]:
    """One process for each rank."""
    port = free_port()
    return [
        subprocess.Popen(
            command,
            env=environment(rank, len(commands), port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )
        for rank, command in enumerate(commands)
    ]


def outputs(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str]]:
    """Exit status and output of each, which are killed with all that they have started where they take longer."""
    ends = time.monotonic() + seconds
    found = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=max(ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            for late in processes:
                if late.poll() is None:
                    os.killpg(late.pid, signal.SIGKILL)
            output = process.communicate()[0] + f"\n(killed after {seconds:.0f} s)"
        found.append((process.returncode, output))
    return found


def run(module: str, seconds: float = 100.0) -> dict[str, list[Any]]:
    """What every check of a module returned on each rank, or the traceback, as a `str`, of how it failed there."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(2)]
        processes = start([[sys.executable, __file__, module, str(file)] for file in files], cwd=folder)
        ended = outputs(processes, seconds)
        found: dict[str, list[Any]] = {}
        for rank, file in enumerate(files):
            told = _told(file)
            for name, _ in checks(module):
                found.setdefault(name, []).append(
                    told.get(name, f"did not run to its end; rank {rank} said:\n{ended[rank][1]}")
                )
        return found


def checks(module: str) -> list[tuple[str, Callable[[int], Any]]]:
    members = vars(importlib.import_module(module))
    return [(name, function) for name, function in members.items() if name.startswith("check_")]


def _told(file: Path) -> dict[str, Any]:
    told = {}
    if file.exists():
        with file.open("rb") as stream:
            while stream.peek():
                told.update(pickle.load(stream))
    return told


def _main(module: str, file: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name, check in checks(module):
        torch.manual_seed(0)
        try:
            returned, failed = check(rank), False
        except BaseException:
            returned, failed = traceback.format_exc(), True
        with open(file, "ab") as stream:
            pickle.dump({name: returned}, stream)
        if failed:
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
