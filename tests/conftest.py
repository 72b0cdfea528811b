"""Fixtures and hooks for every test."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

import simgpu_process
from guard import leaves_no_trace as leaves_no_trace
from hotloop._facts import machine
from hotloop.transforms import precision
from simgpu_process import pytest_configure as pytest_configure

# The models of the tests are tiny: more threads gain nothing, and beside other processes they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    simgpu_process.pytest_collection_modifyitems(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip("needs a CUDA device"))


@pytest.fixture(scope="module")
def dynamo_is_at_work() -> None:
    """torch patches `nn.Module` when it first compiles."""
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1))


@pytest.fixture
def sixteen_bit_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU for which bfloat16 is the automatic choice, in every call."""
    found = replace(machine(), cpu_16bit="AMX", accelerator=None)
    monkeypatch.setattr("hotloop._optimize.machine", lambda *_: found)
    monkeypatch.setattr(precision, "SOME_ROWS", 0)
