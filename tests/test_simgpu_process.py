"""Marked tests run in a child process and are reported one by one in this one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import simgpu

pytestmark = pytest.mark.skipif(not simgpu.SUPPORTED, reason="torch has devices written in Python from 2.11 on")

FILE = """
    import os, pytest, torch

    @pytest.mark.simgpu
    def test_passes():
        assert torch.ones(1, device="simgpu").device.type == "simgpu"

    @pytest.mark.slow
    @pytest.mark.simgpu
    def test_is_picked_by_the_parent_alone():
        pass

    @pytest.mark.simgpu
    def test_fails():
        assert torch.ones(1, device="simgpu").sum() == 7

    @pytest.mark.simgpu
    def test_skips():
        pytest.skip("for a reason")

    @pytest.mark.simgpu
    def test_ends_the_process():
        os._exit(3)

    def test_elsewhere():
        with pytest.raises(RuntimeError):
            torch.ones(1, device="simgpu")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest("from simgpu_process import pytest_collection_modifyitems, pytest_configure")
    pytester.makeini(f"[pytest]\naddopts = -m 'not slow'\nmarkers =\n  simgpu\n  slow\npythonpath = {Path(__file__).parent}")
    pytester.makepyfile(FILE)
    return pytester


def test_each_test_is_reported_in_its_own_place(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("-p", "no:asyncio", "-v", "-k", "not ends")
    result.assert_outcomes(passed=2, failed=1, skipped=1, deselected=2)
    result.stdout.fnmatch_lines(["*test_passes PASSED*", "*test_fails FAILED*", "*test_skips SKIPPED*", "*elsewhere PASSED*"])
    result.stdout.fnmatch_lines(["*assert torch.ones(1, device=*"])


def test_one_test_can_be_picked(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess("-p", "no:asyncio", "-k", "passes").assert_outcomes(passed=1, deselected=5)
    suite.runpytest_inprocess("-p", "no:asyncio", "-m", "slow").assert_outcomes(passed=1, deselected=5)


def test_a_process_that_dies_fails_its_test(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("-p", "no:asyncio")
    result.assert_outcomes(passed=2, failed=2, skipped=1, deselected=1)
    result.stdout.fnmatch_lines(["*the process with the simulated accelerator ended during or before this test*"])


@pytest.mark.simgpu
def test_the_child_knows_the_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(simgpu.NAME)


def test_the_parent_does_not() -> None:
    assert not simgpu.registered()
