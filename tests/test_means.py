"""The means of metrics over many steps."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import simgpu
from hotloop._means import Means
from hotloop._reading import Reading


def mean(means):
    return {name: total / weight for name, (total, weight) in means.sums().items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param(simgpu.NAME, marks=pytest.mark.simgpu)])
class TestMeans:
    def add(self, means, device, values, weight=1.0, flags=(), numbers=(), **how):
        """One step with these values as tensors on the device, and `numbers` as they are."""
        tensors = [torch.tensor(v).to(device) for v in values.values()]
        reading = Reading([*tensors, *numbers, *(torch.tensor(f).to(device) for f in flags)])
        means.add([*values, *(f"number {i}" for i in range(len(numbers)))], reading, weight, **how)
        return reading

    @pytest.mark.parametrize("steps", [1, 63, 64, 65, 200])
    def test_over_any_number_of_steps(self, device, steps):
        means = Means()
        for i in range(steps):
            self.add(means, device, {"loss": float(i), "hits": i, "good": i % 2 == 0})
        assert mean(means) == {"loss": (steps - 1) / 2, "hits": (steps - 1) / 2, "good": (steps + 1) // 2 / steps}

    def test_weighted(self, device):
        means = Means()
        self.add(means, device, {"loss": 1.0}, 3.0)
        self.add(means, device, {"loss": 5.0}, 1.0)
        assert mean(means) == {"loss": 2.0}

    def test_over_the_steps_in_which_it_was_present(self, device):
        means = Means()
        for i in range(70):
            self.add(means, device, {"loss": 1.0} if i % 7 else {"loss": 1.0, "grad_norm": float(i)})
        assert mean(means) == {"loss": 1.0, "grad_norm": sum(range(0, 70, 7)) / 10}

    @pytest.mark.parametrize("flag", [bool, float], ids=["bool", "float"])
    def test_skipped_steps_are_left_out(self, device, flag):
        means = Means()
        for i in range(70):
            skipped = i % 10 == 3
            self.add(means, device, {"loss": math.nan if skipped else float(i)}, flags=[flag(skipped), flag(False)])
        kept = [i for i in range(70) if i % 10 != 3]
        assert mean(means) == {"loss": sum(kept) / len(kept)}

    @pytest.mark.parametrize("looked", ["never", "at the micro-batch", "at the window", "at both"])
    def test_a_skipped_window_is_left_out_whole(self, device, looked):
        """Its micro-batches came before anybody knew."""
        means = Means()
        for i in range(40):
            skipped = i % 10 == 3
            for last in (False, True):
                value = math.nan if skipped else float(i)
                reading = self.add(means, device, {"loss": value}, flags=[float(skipped)] * last, is_open=not last)
                if looked in ("at both", "at the window" if last else "at the micro-batch"):
                    reading.values()
        kept = [i for i in range(40) if i % 10 != 3]
        assert mean(means) == {"loss": sum(kept) / len(kept)}

    def test_an_open_window_is_in_the_mean(self, device):
        means = Means()
        self.add(means, device, {"loss": 2.0}, is_open=True)
        assert mean(means) == {"loss": 2.0}

    def test_weight_zero_counts_for_nothing(self, device):
        """As where all labels are padding, and the loss is 0 / 0."""
        means = Means()
        self.add(means, device, {"loss": math.nan}, 0.0)
        self.add(means, device, {"loss": 2.0}, 3.0)
        self.add(means, device, {"loss": math.nan}, 0.0, is_open=True)
        assert mean(means) == {"loss": 2.0}

    @pytest.mark.parametrize("number", [3, True, 2.5, 1 + 2j, 2**70])
    def test_python_numbers(self, device, number):
        """Numbers that were never on the device are summed beside those that were."""
        means = Means()
        for _ in range(70):
            self.add(means, device, {"loss": 1.0}, numbers=[number])
        assert mean(means) == {"loss": 1.0, "number 0": number}

    def test_complex_values(self, device):
        means = Means()
        for z in (1 + 2j, 3 + 0j):
            self.add(means, device, {"z": z})
        assert mean(means) == {"z": 2 + 1j}

    def test_what_somebody_has_looked_at_counts_once(self, device):
        means = Means()
        for i in range(10):
            reading = self.add(means, device, {"loss": float(i)}, flags=[float(i == 9)])
            if i % 3 == 0:
                reading.values()
        assert mean(means) == {"loss": 4.0}

    def test_restored_they_go_on(self, device):
        means, resumed = Means(), Means()
        for i in range(100):
            self.add(means, device, {"loss": float(i)})
        self.add(resumed, device, {"loss": 777.0})
        resumed.restore(copy.deepcopy(means.sums()))
        for each in (means, resumed):
            self.add(each, device, {"loss": 300.0}, 2.0)
        assert means.sums() == resumed.sums() == {"loss": [4950.0 + 600.0, 102.0]}

    def test_sums_can_be_asked_for_twice(self, device):
        means = Means()
        for i in range(70):
            self.add(means, device, {"loss": float(i)})
        first = means.sums()
        first["loss"][0] = 0.0
        assert means.sums() == {"loss": [2415.0, 70.0]}


@pytest.mark.simgpu
def test_means_wait_once_however_many_steps():
    means = Means()
    simgpu.counts.clear()
    for i in range(150):
        means.add(["loss", "hits"], Reading([torch.tensor(v).to(simgpu.NAME, non_blocking=True) for v in (float(i), i)]), 1.0)
    assert simgpu.host_waits() == 0
    assert mean(means) == {"loss": 74.5, "hits": 74.5}
    assert simgpu.host_waits() == 1


@pytest.mark.simgpu
def test_means_keep_no_step_alive_for_ever():
    """A reading per step would grow for as long as nobody asks for the mean."""
    means = Means()
    readings = []
    for _ in range(1000):
        readings.append(Reading([torch.ones((), device=simgpu.NAME)]))
        means.add(["loss"], readings[-1], 1.0)
    held = len(means._waiting)
    assert held <= 64


STEP = st.tuples(
    st.sets(st.sampled_from(["loss", "accuracy", "hits"])),
    st.floats(-1e6, 1e6),
    st.floats(0.0, 100.0),
    st.booleans(),
)


@given(st.lists(STEP, max_size=150))
def test_means_are_what_a_list_of_all_values_gives(steps):
    means, kept = Means(), {}
    for names, value, weight, skipped in steps:
        flags = [torch.tensor(skipped)]
        means.add(sorted(names), Reading([torch.tensor(value, dtype=torch.float64)] * len(names) + flags), weight)
        for name in [] if skipped or not weight else names:
            kept.setdefault(name, []).append((value, weight))
    sums = means.sums()
    assert sums.keys() == kept.keys()
    for name, pairs in kept.items():
        assert math.isclose(sums[name][0], math.fsum(v * w for v, w in pairs), rel_tol=1e-9, abs_tol=1e-3)
        assert math.isclose(sums[name][1], math.fsum(w for _, w in pairs), rel_tol=1e-9)
