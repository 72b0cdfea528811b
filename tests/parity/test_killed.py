"""A run that is killed at any moment, and started again, ends bitwise where an unbroken one does."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from parity import killed
from parity.twins import differences

LIVES = 4


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The last checkpoints of runs that were killed and resumed until they were done, and how far each life came."""
    folder = tmp_path_factory.mktemp("killed")
    chance = random.Random()
    steps = len(killed.RUNS) * killed.BATCHES
    command = [sys.executable, str(Path(killed.__file__)), str(folder)]
    lives = []
    for life in range(LIVES):
        with subprocess.Popen([*command, str(life)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "started\n"
            lines = 0
            while lines < steps // LIVES + chance.randrange(len(killed.RUNS)) and process.stdout.readline():
                lines += 1
            if life < LIVES - 1:
                time.sleep(chance.random() * 0.01)
                process.send_signal(signal.SIGKILL)
            lines += len(process.stdout.read().splitlines())
        lives.append((lines, process.returncode))
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in killed.RUNS}, lives


@pytest.fixture(scope="module")
def unbroken():
    runs = {}
    for name, options in killed.RUNS.items():
        runs[name] = killed.Run(**options)
        runs[name].start(None, plain=True)
        for _ in range(killed.BATCHES):
            runs[name].train()
    return runs


def test_it_was_killed_each_time_but_the_last(ends):
    _, lives = ends
    assert [code for _, code in lives] == [*[-signal.SIGKILL] * (LIVES - 1), 0]
    assert min(lines for lines, _ in lives) > 0, "each life has trained"


@pytest.mark.parametrize("name", killed.RUNS)
def test_it_ends_as_the_unbroken_run(ends, unbroken, name):
    """D4, O10: killed by SIGKILL, loaded with `weights_only=True`, through the wrapped model and the plain one in turn."""
    states, _ = ends
    assert states[name]["done"] == killed.BATCHES
    assert differences(states[name], unbroken[name].state(plain=False)) == []


def test_the_table_is_what_it_says(unbroken):
    """Scales have grown and been halved, a window is open, layouts and fused kernels are in use."""
    assert unbroken["fp16"].step.skipped == 1
    assert unbroken["fp16"].step.scale > 16.0
    assert unbroken["fp16"].step.state_dict()["scaler"]["_growth_tracker"] == 1
    assert unbroken["fp16 fused in a window"].step.state_dict()["window"]["count"] == killed.BATCHES % 5 == 2
    for name, run in unbroken.items():
        plan = run.step.plan
        assert plan["channels_last"].choice == ("on" if "channels_last" in name else "off"), name
        assert plan["precision"].choice == run.options["precision"]
        if "fused" in run.options:
            assert plan["fused_optimizer"].choice == ("on" if run.options["fused"] else "off")
