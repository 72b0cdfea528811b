"""Fixtures and hooks for every test."""

from __future__ import annotations

import os

import torch

from guard import leaves_no_trace as leaves_no_trace
from simgpu_process import pytest_collection_modifyitems as pytest_collection_modifyitems
from simgpu_process import pytest_configure as pytest_configure

# The models of the tests are tiny: more threads gain nothing, and beside other processes they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)
