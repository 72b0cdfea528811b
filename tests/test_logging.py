"""The log: one logger, quiet unless asked, and at DEBUG each decision when it is made or changed."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hotloop import data_loader, fast_eval, optimize

X, Y = torch.randn(8, 4), torch.randint(2, (8,))
Step = tuple[nn.Module, torch.optim.Optimizer, nn.Module]


def small() -> Step:
    net = nn.Linear(4, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, "hotloop"):
        yield caplog


def test_it_tells_each_decision_of_a_plan(log: pytest.LogCaptureFixture) -> None:
    _, step = optimize(*small(), scheduler=None, accumulate=2)
    told = [record.getMessage() for record in log.records]
    assert told == [f"{d.name}: {d.choice} ({d.why})" for d in step.plan]
    assert {record.levelno for record in log.records} == {logging.DEBUG}
    assert {record.name for record in log.records} == {"hotloop"}


def test_it_tells_what_changes_later(log: pytest.LogCaptureFixture) -> None:
    """A sparse gradient switches the fused kernel off: the first that is seen."""
    net = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    _, step = optimize(net, optimizer, nn.CrossEntropyLoss())
    assert step.plan["fused_optimizer"].choice == "on"
    log.clear()
    for _ in range(3):
        step(torch.randint(5, (8, 2)), Y)
    (changed,) = [record.getMessage() for record in log.records]
    assert changed.startswith("fused_optimizer: off (")


def test_what_stays_is_told_once(log: pytest.LogCaptureFixture) -> None:
    """Each evaluation decides anew what to fold, and mostly decides the same."""
    model = optimize(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))

    @fast_eval
    def evaluate(model: nn.Module) -> float:
        return model(torch.ones(2, 1, 8, 8)).sum()

    for _ in range(3):
        evaluate(model)
    assert log.text.count("fold_batchnorm: ") == 1


def test_a_step_and_a_call_tell_nothing(log: pytest.LogCaptureFixture) -> None:
    model, step = optimize(*small(), clip_norm=1.0)
    log.clear()
    for _ in range(3):
        step(X, Y)
        model(X)
    assert log.records == []


def test_the_choice_of_workers_is_told(log: pytest.LogCaptureFixture) -> None:
    data_loader(torch.utils.data.TensorDataset(X, Y), 4)
    assert "num_workers: 0 (" in log.text


QUIET = """
import logging, sys, torch
from torch import nn
from hotloop import optimize

def plan():
    net = nn.Linear(4, 2)
    optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss())
    print("|", file=sys.stderr)

plan()  # as it comes
logging.getLogger("hotloop").setLevel("DEBUG")
plan()  # without a handler
logging.basicConfig()
plan()  # asked for
print(sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "hotloop"))
"""


def test_it_is_quiet_unless_asked() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True)
    as_it_comes, without_handler, asked, _ = done.stderr.split("|\n")
    assert (as_it_comes, without_handler) == ("", "")
    assert "DEBUG:hotloop:precision: " in asked
    assert done.stdout == "['hotloop']\n", "one logger"
