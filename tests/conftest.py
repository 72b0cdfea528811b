"""Fixtures and hooks for every test."""

from __future__ import annotations

from guard import leaves_no_trace as leaves_no_trace
from simgpu_process import pytest_collection_modifyitems as pytest_collection_modifyitems
from simgpu_process import pytest_configure as pytest_configure
