"""Two gloo processes: what `checks_step` says of a step must hold on both ranks."""

from __future__ import annotations

import pytest

from distributed import pair

MODULE = "distributed.checks_step"


@pytest.fixture(scope="module")
def results():
    return pair.run(MODULE)


@pytest.mark.parametrize("name", [name for name, _ in pair.checks(MODULE)])
def test_on_two_ranks(name, results):
    assert results[name] == [None, None], "\n".join(str(told) for told in results[name] if told is not None)
