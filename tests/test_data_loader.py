"""data_loader: what is chosen, on what grounds, and that measuring leaves no trace."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from hotloop import _item_cost, _workers, data_loader, prefetch
from hotloop._item_cost import Cost, measure
from hotloop._workers import Room, workers_for


class Clock:
    """Time that passes when an item says so, not when the machine is slow."""

    def __init__(self):
        self.now = self.cpu = 0.0
        self.waits = 0

    def compute(self, seconds, cores=1.0):
        self.now += seconds
        self.cpu += seconds * cores

    def wait(self, seconds):
        self.now += seconds
        self.waits += 1


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(_item_cost.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(_item_cost.time, "process_time", lambda: made.cpu)
    monkeypatch.setattr(_item_cost, "_waits", lambda: made.waits)
    return made


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    """The machine of these tests, whatever machine they run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)  # which torch asks as well
    monkeypatch.setattr(_workers, "_cores", lambda: 4)
    monkeypatch.setattr(_workers, "_shared_memory", lambda: 1e9)


class Items(Dataset):
    """Items that take their time by a clock. Remembers which of them were asked for in this process."""

    def __init__(self, act=int, n=400):
        self.act, self.n = act, n
        self.asked: list[int] = []

    def __len__(self):
        return self.n

    def __getitem__(self, item):
        self.asked.append(item)
        self.act()
        return torch.full((3,), float(item)), item


def computing(clock, seconds=2e-3):
    return lambda: clock.compute(seconds)


def waiting(clock, seconds=2e-3):
    return lambda: clock.wait(seconds)


# --- the choice -------------------------------------------------------------------------------------------------------


def test_costly_items_get_a_worker_for_each_core(clock):
    loader = data_loader(Items(computing(clock)), 32)
    assert isinstance(loader, DataLoader)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (4, True, 2)
    assert "2 ms an item, 64 ms a batch of 32, computing; from 4 workers one takes 16.4 ms" in str(loader.plan)


def test_items_that_wait_get_more_workers_than_cores_and_no_warning(clock):
    loader = data_loader(Items(waiting(clock)), 32)
    assert loader.num_workers == 8
    assert "mostly waiting" in loader.plan["num_workers"].why


def test_items_that_compute_on_a_crowded_machine_are_not_taken_to_wait(clock):
    def act():
        clock.now += 20e-3
        clock.cpu += 1e-3

    assert data_loader(Items(act), 32).num_workers == 4


def test_cheap_items_get_none(clock):
    """L2."""
    loader = data_loader(Items(computing(clock, 2e-6)), 32)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (0, False, None)
    assert "2 µs an item" in loader.plan["num_workers"].why


class Batched(Items):
    """Reads many items in the time of one."""

    def __getitems__(self, items):
        self.asked += items
        self.act()
        return [(torch.zeros(3), item) for item in items]


def test_items_that_are_read_together_are_measured_together(clock):
    assert data_loader(Items(computing(clock, 1e-4), 10_000), 64).num_workers == 4
    assert data_loader(Batched(computing(clock, 1e-4), 10_000), 64).num_workers == 0


def test_a_slow_collation_counts(clock):
    def collate(items):
        clock.compute(1e-3 * len(items))
        return len(items)

    assert data_loader(Items(), 32, collate_fn=collate).num_workers == 4


def test_items_that_are_batches(clock):
    loader = data_loader(Items(computing(clock, 50e-3)), None)
    assert loader.num_workers == 4
    assert "a batch of 1" in loader.plan["num_workers"].why


@pytest.mark.parametrize("batches", [[[1, 2]] * 9, [[i] * 32 for i in range(12)]])
def test_own_batch_samplers(clock, batches):
    loader = data_loader(Items(computing(clock), 384), batch_sampler=batches)
    size = 384 // len(batches)
    assert f"a batch of {size}" in loader.plan["num_workers"].why
    assert loader.batch_sampler is batches


def cost(item=2e-3, *, worker_item=None, busy=1.0, collation=0.0, size=32, bytes=1000):
    return Cost(item, item if worker_item is None else worker_item, busy, collation, size, None, bytes)


@pytest.mark.parametrize(("what", "where", "batches", "persistent", "count"), [
    pytest.param(cost(), Room(1, 1e9, "fork"), 100, True, 0, id="a single core"),
    pytest.param(cost(), Room(2, 1e9, "fork"), 100, True, 2, id="two cores"),
    pytest.param(cost(), Room(64, 1e9, "fork"), 100, True, 16, id="many cores"),
    pytest.param(cost(), Room(64, 1e9, "fork"), 3, True, 3, id="few batches"),
    pytest.param(cost(), Room(64, 1e9, "fork"), float("inf"), True, 16, id="unknown length"),
    pytest.param(cost(busy=0.01), Room(1, 1e9, "fork"), 100, True, 8, id="waiting on one core"),
    pytest.param(cost(busy=0.5), Room(2, 1e9, "fork"), 100, True, 2, id="half waiting"),
    pytest.param(cost(busy=4), Room(4, 1e9, "fork"), 100, True, 0, id="all cores busy already"),
    pytest.param(cost(worker_item=4e-3, busy=1), Room(4, 1e9, "fork"), 100, True, 4, id="slower on one thread, still worth it"),
    pytest.param(cost(worker_item=8e-3, busy=1), Room(4, 1e9, "fork"), 100, True, 0, id="slower on one thread"),
    pytest.param(cost(20e-6), Room(4, 1e9, "fork"), 1e6, True, 0, id="less than the handing over"),
    pytest.param(cost(200e-6), Room(4, 1e9, "fork"), 1e6, True, 4, id="more than the handing over"),
    pytest.param(cost(1e-3, bytes=200e6), Room(4, 1e12, "fork"), 1e6, True, 0, id="large batches are costly to hand over"),
    pytest.param(cost(10e-3, bytes=5e6), Room(4, 64e6, "fork"), 1e6, True, 3, id="a container's shared memory"),
    pytest.param(cost(10e-3, bytes=30e6), Room(4, 64e6, "fork"), 1e6, True, 0, id="no room"),
    pytest.param(cost(), Room(2, 1e9, "fork"), 2, False, 0, id="an epoch too short to pay for the start"),
    pytest.param(cost(), Room(2, 1e9, "fork"), 2, True, 2, id="a start for all epochs"),
    pytest.param(cost(), Room(2, 1e9, "spawn"), 20, True, 0, id="spawned workers start slowly"),
    pytest.param(cost(), Room(2, 1e9, "spawn"), 100, True, 2, id="spawned workers for a long epoch"),
    pytest.param(cost(), Room(2, 1e9, "spawn"), 100, False, 0, id="spawned workers for each epoch"),
    pytest.param(cost(), Room(2, 1e9, "fork"), 0, True, 0, id="no batch at all"),
])  # fmt: skip
def test_how_many_pay(what, where, batches, persistent, count):
    """L1, L2, L3."""
    assert workers_for(what, where, batches, persistent)[0] == count


def test_memory_for_fewer_batches_ahead(clock, monkeypatch):
    monkeypatch.setattr(_workers, "_shared_memory", lambda: 32 * 20 * 4 * 2 * 2.5)
    loader = data_loader(Items(computing(clock)), 32)
    assert (loader.num_workers, loader.prefetch_factor) == (4, 1)
    assert "shared memory" in loader.plan["prefetch_factor"].why


# --- who gets no workers ----------------------------------------------------------------------------------------------


def test_tensors_in_memory_get_none_and_are_read_by_whole_batches(monkeypatch):
    """L1."""
    reads = []
    one = TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, item: reads.append(item) or one(self, item))
    dataset = Subset(TensorDataset(torch.randn(50, 3), torch.arange(50)), range(40))
    loader = data_loader(dataset, 8, shuffle=True)
    torch.manual_seed(3)
    batches = list(loader)
    assert reads == []
    assert (loader.num_workers, loader.plan["batching"].choice) == (0, "whole batches")
    torch.manual_seed(3)
    for own, batch in zip(batches, DataLoader(dataset, 8, shuffle=True), strict=True):
        assert all(map(torch.equal, own, batch))


class Stream(IterableDataset):
    def __init__(self):
        self.asked = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.asked += 1
        return iter(range(4))


def test_an_iterable_data_set_is_never_repeated_nor_read():
    """L8."""
    loader = data_loader(Stream(), 2)
    assert loader.num_workers == 0
    assert loader.dataset.asked == 0
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]
    assert "repeat" in loader.plan["num_workers"].why


class Failing(Items):
    def __getitem__(self, item):
        raise OSError(f"no file for {item}")


def test_items_that_fail_mean_no_workers_and_the_plan_says_so():
    loader = data_loader(Failing(), 4)
    assert loader.num_workers == 0
    assert loader.plan["num_workers"].why == "the items could not be measured: OSError: no file for 0"
    with pytest.raises(OSError, match="no file for 0"):
        next(iter(loader))


@pytest.mark.parametrize("make", [
    pytest.param(lambda: Items(n=0), id="empty"),
    pytest.param(lambda: type("Keys", (), {"__getitem__": lambda self, key: {"a": 1}[key]})(), id="keys of another kind"),
])  # fmt: skip
def test_what_cannot_be_measured_gets_none(make):
    loader = data_loader(make(), 4, sampler=["a", "a"])
    assert loader.num_workers == 0
    assert "could not be measured" in loader.plan["num_workers"].why


class Holding(Items):
    def __init__(self, act, thing):
        super().__init__(act)
        self.names = list(map(str, range(5000)))
        self.thing = thing


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.parametrize("make", [
    pytest.param(lambda file: file, id="a file"),
    pytest.param(lambda file: {"deep": [file]}, id="deep inside"),
    pytest.param(lambda file: [(name, file) for name in range(10**6)], id="in a long list"),
    pytest.param(lambda file: threading.Lock(), id="a lock"),
    pytest.param(lambda file: (i for i in range(3)), id="a generator"),
])  # fmt: skip
def test_what_processes_cannot_share_stays_in_one(clock, make):
    with Path(__file__).open() as file:
        loader = data_loader(Holding(computing(clock), make(file)), 32, multiprocessing_context="fork")
    assert loader.num_workers == 0
    assert "dataset holds something that processes cannot share (" in loader.plan["num_workers"].why


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_functions_and_large_data_are_shared_by_a_fork(clock):
    class Local(Holding):
        pass

    thing = {"f": lambda x: x, "t": torch.ones(100), "a": np.ones(3), "m": torch.nn.Linear(1, 1), "long": list(range(10**6))}
    assert data_loader(Local(computing(clock), thing), 32, multiprocessing_context="fork").num_workers == 4


def test_functions_are_not_shared_with_a_spawned_process(clock, monkeypatch):
    loader = data_loader(Holding(lambda: clock.compute(2.0), 1), 32, multiprocessing_context="spawn")
    assert loader.num_workers == 0
    assert "cannot share" in loader.plan["num_workers"].why  # `act` is a lambda


class Slow(Items):
    clock: Any = None

    def __getitem__(self, item):
        type(self).clock.compute(1.0)
        return item


@pytest.mark.parametrize(("source", "count"), [("if __name__ == '__main__':\n    main()", 4), ("main()", 0), (None, 0)])
def test_a_main_module_without_a_guard_is_not_imported_again(clock, monkeypatch, tmp_path, source, count):
    monkeypatch.setattr(Slow, "clock", clock)
    if source is None:
        monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    else:
        main = tmp_path / "train.py"
        main.write_text(source)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(main), raising=False)
    loader = data_loader(Slow(), 32, multiprocessing_context=multiprocessing.get_context("spawn"))
    assert loader.num_workers == count


def test_the_start_method_is_not_fixed_by_asking():
    code = (
        "import multiprocessing; from hotloop._workers import start_method; start_method(None); "
        "multiprocessing.set_start_method('spawn'); assert start_method(None) == 'spawn'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("collate", [
    pytest.param(lambda items: torch.ones(2, requires_grad=True) * 2, id="gradients"),
    pytest.param(lambda items: torch.ones(2, device="meta"), id="device"),
    pytest.param(lambda items: (i for i in items), id="no pickle"),
])  # fmt: skip
def test_batches_that_cannot_cross_processes(clock, collate):
    assert data_loader(Items(computing(clock)), 32, collate_fn=collate).num_workers == 0


def test_a_worker_starts_no_workers(clock, monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    loader = data_loader(Items(computing(clock)), 32)
    assert loader.plan["num_workers"].why == "this process is a worker itself"


class Epochs(Items):
    def set_epoch(self, epoch):
        pass


def test_set_epoch_reaches_workers_that_are_started_each_epoch(clock):
    """L7."""
    loader = data_loader(Subset(Epochs(computing(clock)), range(400)), 32)
    assert (loader.num_workers, loader.persistent_workers) == (4, False)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_few_items_are_read(clock):
    fast, slow = Items(computing(clock, 1e-6)), Items(computing(clock, 5.0))
    data_loader(fast, 4)
    data_loader(slow, 4)
    assert len(fast.asked) == 9
    assert len(slow.asked) == 3
    assert len({*fast.asked}) == 9
    together = Batched(computing(clock, 1e-3))
    data_loader(together, 100)
    assert len(together.asked) == 1 + 2 * 25


def test_no_item_is_read_where_nothing_is_left_to_choose():
    """L5."""
    items = Items()
    loader = data_loader(items, 4, num_workers=0)
    assert items.asked == []
    assert loader.plan.as_dict()["num_workers"] == {"choice": "0", "why": "given"}


class Drawing(Items):
    """Draws from every random state there is, and from generators of its own."""

    def __init__(self):
        super().__init__()
        self.own = [random.Random(1), torch.Generator().manual_seed(2), np.random.default_rng(3), np.random.RandomState(4)]

    def draws(self):
        python, generator, numpy, legacy = self.own
        own = [python.random(), torch.rand(1, generator=generator).item(), numpy.random(), legacy.rand()]
        return [random.random(), torch.rand(1).item(), np.random.rand(), *own]

    def __getitem__(self, item):
        return torch.tensor(self.draws())


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_leaves_every_random_state(fails):
    def collate(items):
        random.random()
        if fails:
            raise ValueError("no batch")
        return items

    def seeded():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return Drawing()

    expected = seeded().draws()
    dataset = seeded()
    data_loader(dataset, 4, shuffle=True, collate_fn=collate)
    assert dataset.draws() == expected


SHARED = np.random.default_rng(5)
UNSEEDED = random.SystemRandom()


class DrawingElsewhere(Items):
    """Draws from generators of its class and of its module, in items and in their collation."""

    inherited = random.Random(1)

    def __getitem__(self, item):
        return torch.tensor([self.inherited.random(), self.of_the_class.random(), UNSEEDED.random()])


class DrawingFromItsClass(DrawingElsewhere):
    of_the_class = np.random.default_rng(2)


def collate_with_noise(items):
    return torch.stack(items) + SHARED.random()


def test_measuring_leaves_generators_of_classes_and_modules():
    generators = (DrawingElsewhere.inherited.getstate, lambda: DrawingFromItsClass.of_the_class.bit_generator.state)
    generators = (*generators, lambda: SHARED.bit_generator.state)
    before = [state() for state in generators]
    loader = data_loader(DrawingFromItsClass(), 4, collate_fn=collate_with_noise)
    assert "could not be measured" not in str(loader.plan)
    assert [state() for state in generators] == before


@pytest.mark.parametrize(("ranks", "cores"), [("", 4), ("2", 2), ("9", 1), ("0", 4), ("many", 4), ("-1", 4)])
def test_cores_are_shared_with_the_ranks_of_the_machine(monkeypatch, ranks, cores):
    monkeypatch.undo()  # of what stands in for the cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(_workers, "Path", lambda _: SimpleNamespace(read_text=lambda: "max 100000"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert _workers.room().cores == cores


def test_measuring_leaves_the_number_of_threads(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    measure(DataLoader(Items(), 4))
    assert seen == [1, 3]


def test_what_waits_is_told_from_what_computes():
    """With the real clocks: waiting is what keeps no core busy, at any speed of the machine."""
    assert measure(DataLoader(Items(lambda: time.sleep(0.02)), 4)).busy < 0.3
    assert measure(DataLoader(Items(lambda: sum(range(200_000))), 4)).busy > 0.3


# --- what the user says -----------------------------------------------------------------------------------------------


def test_what_is_given_is_obeyed(clock):
    """L5."""
    given: dict[str, Any] = {
        "num_workers": 2, "persistent_workers": False, "prefetch_factor": 5, "pin_memory": False, "drop_last": True,
        "timeout": 7, "worker_init_fn": print, "generator": torch.Generator(), "collate_fn": list,
    }  # fmt: skip
    loader = data_loader(Items(computing(clock)), 32, **given)
    assert {name: getattr(loader, name) for name in given} == given
    assert {d.name for d in loader.plan if d.why == "given"} == {
        "num_workers", "persistent_workers", "prefetch_factor", "pin_memory",
    }  # fmt: skip


def test_given_workers_over_tensors_in_memory_are_obeyed():
    loader = data_loader(TensorDataset(torch.ones(4)), 2, num_workers=1)
    assert (loader.num_workers, loader.plan["batching"].choice) == (1, "item by item")


def test_wishes_about_workers_are_no_error_where_there_are_none():
    loader = data_loader(Items(n=8), 4, prefetch_factor=3, persistent_workers=True, timeout=5, multiprocessing_context="spawn")
    assert loader.num_workers == 0
    assert len(list(loader)) == 2


def test_more_given_workers_than_cores_warn_as_ever():
    with pytest.warns(UserWarning, match="will create 9 worker processes"):
        data_loader(Items(), 4, num_workers=9)


def test_a_sampler_without_a_length(clock):
    class Endless:
        def __iter__(self):
            return itertools.count()

    assert data_loader(Items(computing(clock)), 32, sampler=Endless()).num_workers == 4


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: data_loader(DataLoader([1]), 4), TypeError, r"write data_loader\(loader.dataset, batch_size\)"),
    (lambda: data_loader((i for i in range(3)), 4), TypeError, "takes a data set"),
    (lambda: data_loader(5, 4), TypeError, "takes a data set"),
    (lambda: data_loader(Failing(), 0), ValueError, "batch_size"),
    (lambda: data_loader(Failing(), 4, shufle=True), TypeError, "shufle"),
    (lambda: data_loader(Failing(), 4, shuffle=True, sampler=[1]), ValueError, "mutually exclusive"),
    (lambda: data_loader(Failing(), 4, num_workers=-1), ValueError, "num_workers"),
])  # fmt: skip
def test_bad_input_raises_at_the_door(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("kwargs", "text"), [({"batch_size": -3}, "batch_size"), ({"batch_size": 4, "drop_last": 1}, "drop_last")]
)
def test_wrong_arguments_raise_before_an_item_is_read(kwargs, text):
    items = Items()
    with pytest.raises(ValueError, match=text):
        data_loader(items, **kwargs)
    assert items.asked == []


# --- the loader -------------------------------------------------------------------------------------------------------


def test_it_pickles_and_is_prefetched_like_any_other():
    loader = data_loader(TensorDataset(torch.arange(6)), 4)
    again = pickle.loads(pickle.dumps(loader))
    assert str(again.plan) == str(loader.plan)
    assert [x.tolist() for (x,) in prefetch(again, "cpu")] == [[0, 1, 2, 3], [4, 5]]


def test_there_is_nothing_to_pin_for_without_an_accelerator():
    assert data_loader(Items(), 4).plan["pin_memory"].why == "there is no accelerator"


@pytest.mark.simgpu
@pytest.mark.parametrize(("make", "pins", "why"), [
    (lambda: TensorDataset(torch.arange(6)), True, "copies to simgpu"),
    (lambda: TensorDataset(torch.arange(6).to("simgpu")), False, "on a device already"),
    (Items, True, "copies to simgpu"),
    (Stream, False, "not known what a batch holds"),
])  # fmt: skip
def test_pinned_memory_for_an_accelerator(make, pins, why):
    for given in ({}, {"num_workers": 0}):
        loader = data_loader(make(), 4, **given)
        assert loader.pin_memory is pins
        assert why in loader.plan["pin_memory"].why
        next(iter(loader))


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, item):
        return int(np.random.randint(1 << 30)), torch.utils.data.get_worker_info().id, os.getpid()


def test_workers_draw_different_numbers_and_are_started_once():
    """L3, L4."""
    loader = data_loader(Numbers(), 2, num_workers=2)
    batches = [batch for _ in range(3) for batch in loader]
    numbers = [n for batch, _, _ in batches for n in batch.tolist()]
    assert len({*numbers}) == len(numbers)
    assert len({pid for _, _, pids in batches for pid in pids.tolist()}) == 2
    assert {i for _, ids, _ in batches for i in ids.tolist()} == {0, 1}
    del loader


def test_the_random_state_is_that_of_dataloader():
    def state(make):
        torch.manual_seed(0)
        for _ in make(Items(n=8), 4, shuffle=True):
            torch.rand(1)
        return torch.get_rng_state()

    assert torch.equal(state(data_loader), state(DataLoader))
    sampler = RandomSampler(range(3))
    assert data_loader(Items(), 4, sampler=sampler).sampler is sampler
