"""Runs the tests marked `simgpu` in a process of their own, where the simulated accelerator is registered.

The device becomes the current accelerator of its whole process, which would send the models of every other test to it. So
pytest, when it reaches the first marked test, starts one child process with all of them, and reports each one's outcome in its
own place. Selection (`-k`, one file, one test) works as usual. For a debugger, run the child by hand:

    python tests/simgpu_process.py tests/test_simgpu.py --pdb
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import simgpu

_REPORTS = "SIMGPU_REPORTS"  # the file into which the child pickles its reports, one after the other


def pytest_configure(config: pytest.Config) -> None:
    if _REPORTS in os.environ:
        config.pluginmanager.register(_Recorder(config, Path(os.environ[_REPORTS])))
    elif not simgpu.registered():
        config.pluginmanager.register(_Delegate())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not simgpu.SUPPORTED:
        for item in filter(_is_marked, items):
            item.add_marker(pytest.mark.skip("torch has devices written in Python from 2.11 on"))


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker(simgpu.NAME) is not None


class _Recorder:
    """In the child: hands every report on."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path = config, path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.path.open("ab") as file:
            pickle.dump(data, file)


class _Delegate:
    """In the parent: replays the child's reports."""

    reports: dict[str, list[dict[str, Any]]] | None = None
    output = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not _is_marked(item) or not simgpu.SUPPORTED:
            return None
        if self.reports is None:
            self.reports = self._run([i.nodeid for i in item.session.items if _is_marked(i)], item.config)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports_of(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # of modules and classes that earlier tests have set up here
        return True

    def _run(self, nodeids: list[str], config: pytest.Config) -> dict[str, list[dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "reports")
            file.touch()
            command = [sys.executable, __file__, f"--rootdir={config.rootpath}", "-p", "no:cacheprovider", "-m", "", *nodeids]
            environment = {**os.environ, _REPORTS: str(file), "CUDA_VISIBLE_DEVICES": ""}  # one accelerator a process
            done = subprocess.run(command, cwd=config.rootpath, env=environment, capture_output=True, text=True, check=False)
            self.output = done.stdout + done.stderr
            reports: dict[str, list[dict[str, Any]]] = {}
            with file.open("rb") as stream:
                while stream.tell() < file.stat().st_size:
                    data = pickle.load(stream)
                    reports.setdefault(data["nodeid"], []).append(data)
            return reports

    def _reports_of(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        assert self.reports is not None
        for data in self.reports.get(item.nodeid, []):
            yield item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        if not any(data["when"] == "teardown" for data in self.reports.get(item.nodeid, [])):
            message = f"the process with the simulated accelerator ended during or before this test:\n{self.output[-4000:]}"
            location = item.location
            yield pytest.TestReport(item.nodeid, location, {}, "failed", message, "call")


if __name__ == "__main__":
    simgpu.register()
    sys.exit(pytest.main(sys.argv[1:]))
