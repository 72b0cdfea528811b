"""Two gloo processes: loaders, evaluations, and models that are given under DDP or `fully_shard`."""

from __future__ import annotations

import pytest

from distributed import pair

MODULES = ("distributed.checks_data", "distributed.checks_given")
CHECKS = [(module, name) for module in MODULES for name, _ in pair.checks(module)]


@pytest.fixture(scope="module")
def results():
    return {module: pair.run(module) for module in MODULES}


@pytest.mark.parametrize(("module", "name"), CHECKS)
def test_on_two_ranks(module, name, results):
    told = results[module][name]
    assert told == [None, None], "\n".join(str(part) for part in told if part is not None)
