"""Scalars on their way to the host: exact, in one transfer, and a snapshot of the moment."""

from __future__ import annotations

import gc
import math
import struct
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import simgpu
from hotloop._device import wide
from hotloop._reading import Reading, _words, pack, read_all, read_numbers, unpack

# Every dtype that `.item()` knows, with values at the edges of what it holds.
EDGES = {
    torch.float64: [0.1, -0.0, math.inf, math.nan, 1e-310, 1.7976931348623157e308],
    torch.float32: [0.1, -0.0, -math.inf, math.nan, 1e-42],
    torch.float16: [0.1, 65504.0, 6e-8],
    torch.bfloat16: [0.1, 3e38],
    torch.float8_e4m3fn: [0.5, 448.0],
    torch.int64: [0, -1, 2**53 + 1, -(2**63), 2**63 - 1],
    torch.int32: [-(2**31), 2**31 - 1],
    torch.int16: [-(2**15)],
    torch.int8: [-128],
    torch.uint8: [255],
    torch.uint16: [65535],
    torch.uint32: [2**32 - 1],
    torch.uint64: [0, 2**63 + 1, 2**64 - 1],
    torch.bool: [True, False],
    torch.complex64: [1 + 2j, complex(math.nan, -0.0)],
    torch.complex128: [0.1 - 1e300j],
}
CASES = [pytest.param(dtype, value, id=f"{str(dtype)[6:]} {value}") for dtype, values in EDGES.items() for value in values]


def same(a, b):
    """Equal in type and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return struct.pack("d", a) == struct.pack("d", b) if isinstance(a, float) and a == a else a == b or (a != a and b != b)


def scalar(dtype, value, shape=()):
    if dtype == torch.float8_e4m3fn:
        return torch.tensor(value).to(dtype).reshape(shape)
    return torch.tensor(value, dtype=dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(("dtype", "value"), CASES)
def test_a_value_is_what_item_gives(dtype, value, shape):
    """S11: also for shapes of one element, for 64-bit integers, bool and complex."""
    tensor = scalar(dtype, value, shape)
    assert same(read_numbers([tensor])[0], tensor.item())


@pytest.mark.parametrize("together", [torch.float32, torch.int64], ids=["narrow", "wide"])
@pytest.mark.parametrize(("dtype", "value"), CASES)
def test_packed_for_the_way_and_unpacked_it_is_the_same(dtype, value, together):
    tensors = [scalar(dtype, value), torch.ones(1, dtype=together), scalar(dtype, value, (1,))]
    packed = pack(tensors)
    numbers = unpack(packed.tolist(), [t.dtype for t in tensors], wide(packed.device))
    assert all(map(same, numbers, [t.item() for t in tensors]))


@given(st.integers(-(2**63), 2**63 - 1))
def test_integers_survive_a_device_without_float64(value):
    words = [word.to(torch.float32).item() for word in _words(torch.tensor(value), torch.float32)]
    assert unpack(words, [torch.int64], torch.float32) == [value]


@pytest.mark.parametrize("value", [0.5, 3, True, 1 + 2j, 2**70])
def test_python_numbers_stay_as_they_are(value):
    assert same(Reading([value, torch.ones(())]).values()[0], value)


def test_on_the_cpu_a_reading_is_ready_and_a_snapshot():
    loss = torch.ones((), requires_grad=True) * 2
    reading = Reading([loss])
    loss.detach().zero_()
    assert reading.ready()
    assert reading.values() == [2.0]
    assert reading.packed is None


def test_nothing_of_the_tensor_stays_alive():
    """S5: neither the tensor nor the graph behind it."""
    saved = torch.ones((), requires_grad=True) * 2
    loss = saved * saved
    alive = [weakref.ref(loss), weakref.ref(saved)]
    reading = Reading([loss])
    del loss, saved
    assert [ref() for ref in alive] == [None, None]
    assert reading.values() == [4.0]


def on(device, *values):
    return [torch.tensor(v).to(device) for v in values]


@pytest.mark.simgpu
class TestOnAnAccelerator:
    @pytest.mark.parametrize(("dtype", "value"), CASES)
    def test_a_value_is_what_item_gives(self, dtype, value):
        tensor = scalar(dtype, value)
        there = tensor.to(simgpu.NAME)
        assert same(Reading([there, torch.ones((), device=simgpu.NAME)]).values()[0], tensor.item())

    def test_one_copy_that_does_not_block_and_no_wait_before_the_value_is_looked_at(self):
        """S1, S2"""
        tensors = on(simgpu.NAME, 0.5, 7, True)
        simgpu.counts.clear()
        with simgpu.asynchronous():
            reading = Reading([*tensors, 3])
            assert simgpu.counts["d2h"] == 1
            assert simgpu.host_waits() == 0
            assert not reading.ready()
            assert reading.values() == [0.5, 7, True, 3]
            assert simgpu.host_waits() == 1
            assert reading.values() == [0.5, 7, True, 3]
        assert simgpu.host_waits() == 1
        assert reading.ready()

    def test_a_read_waits_for_its_own_values_alone(self):
        """S2"""
        with simgpu.asynchronous():
            first, second = (Reading(on(simgpu.NAME, value)) for value in (1.0, 2.0))
            assert first.values() == [1.0]
            assert first.ready()
            assert not second.ready()
            assert simgpu.in_flight() == 1

    def test_it_is_a_snapshot(self):
        with simgpu.asynchronous():
            (value,) = on(simgpu.NAME, 1.0)
            reading = Reading([value])
            value.mul_(0)
            assert reading.values() == [1.0]

    def test_nothing_of_the_tensors_stays_alive(self):
        (loss,) = on(simgpu.NAME, 1.0)
        loss = loss.requires_grad_() * 2
        alive = weakref.ref(loss)
        reading = Reading([loss])
        del loss
        gc.collect()  # the simulated tensors hold on to themselves
        assert alive() is None
        assert reading.values() == [2.0]

    def test_tensors_on_two_devices_and_numbers(self):
        (there,) = on(simgpu.NAME, 2**53 + 1)
        assert Reading([torch.tensor(0.5), there, 3, torch.tensor(True)]).values() == [0.5, 2**53 + 1, 3, True]

    @pytest.mark.parametrize("pinned", [True, False])
    def test_many_readings_arrive_together(self, pinned, monkeypatch):
        """Where nothing is sent ahead, all of them are one transfer."""
        if not pinned:
            monkeypatch.setattr("hotloop._reading.copies_without_blocking", lambda device_type: False)
        readings = [Reading(on(simgpu.NAME, float(i), i, i > 1)) for i in range(3)] + [Reading([torch.tensor(9)])]
        assert [r.ready() for r in readings] == [pinned] * 3 + [True]
        simgpu.counts.clear()
        read_all(readings)
        assert simgpu.counts["d2h"] == (0 if pinned else 1)
        simgpu.counts.clear()
        assert [r.values() for r in readings] == [[0.0, 0, False], [1.0, 1, False], [2.0, 2, True], [9]]
        assert simgpu.host_waits() == 0
