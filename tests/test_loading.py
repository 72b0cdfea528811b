"""prefetch: the loader itself but for its batches, which come on the device, the next ones ahead of time."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import subprocess
import sys
import threading
import traceback
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import simgpu
from hotloop import optimize, prefetch
from hotloop._transfer import transfer_to

Pair = namedtuple("Pair", "x y")


def loader(n=10, batch=4):
    return DataLoader(TensorDataset(torch.randn(n, 3), torch.arange(n)), batch)


def host(batch):
    return batch.cpu()


class Source:
    """Batches one after the other; tells how many it was asked for, and which of them are still alive."""

    def __init__(self, length=6, raises_at=None):
        self.length, self.raises_at = length, raises_at
        self.asked = 0
        self.closed = False
        self.made: list[Any] = []

    def __iter__(self):
        try:
            for i in range(self.length):
                self.asked += 1
                if i == self.raises_at:
                    self.fail()
                yield self.remember(torch.full((2,), float(i)))
        finally:
            self.closed = True

    def fail(self):
        raise LookupError("no batch 3 today")

    def remember(self, batch):
        self.made.append(weakref.ref(batch))
        return batch


# --- the loader itself ------------------------------------------------------------------------------------------------


def test_it_stands_for_the_loader():
    """L7."""
    plain = loader()
    wrapped = prefetch(plain, "cpu")
    assert isinstance(wrapped, DataLoader)
    assert len(wrapped) == len(plain) == 3
    assert wrapped.dataset is plain.dataset
    assert wrapped.sampler is plain.sampler
    assert wrapped.batch_size == 4
    wrapped.pin_memory = True
    assert plain.pin_memory is True
    assert repr(wrapped).startswith("prefetch(<torch.utils.data.dataloader.DataLoader object")


class Curriculum(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 2)


def test_set_epoch_reaches_the_same_objects():
    """L7."""
    wrapped = prefetch(DataLoader(Curriculum(), 2), "cpu")
    wrapped.dataset.set_epoch(5)
    assert [b.tolist() for b in wrapped] == [[5, 5]]
    sampler = DistributedSampler(range(4), 2, 0)
    prefetch(DataLoader(range(4), sampler=sampler), "cpu").sampler.set_epoch(3)
    assert sampler.epoch == 3


def test_a_generator_has_no_length():
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch(iter([1]), "cpu"))


def test_it_can_be_iterated_again_and_nested_and_after_a_break():
    wrapped = prefetch(loader(), "cpu")
    for _ in wrapped:
        break
    pairs = [(a.tolist(), b.tolist()) for _, a in wrapped for _, b in wrapped]
    labels = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert pairs == list(itertools.product(labels, labels))


def test_wrapping_again_takes_the_new_settings():
    inner = loader()
    again = prefetch(prefetch(inner, "cpu"), "meta", depth=3)
    assert again.__wrapped__ is inner
    assert next(iter(again))[0].device.type == "meta"


def test_copies_and_pickles():
    wrapped = prefetch(loader(), "cpu", depth=3)
    deep = copy.deepcopy(wrapped)
    assert deep.dataset is not wrapped.dataset
    shallow = copy.copy(wrapped)
    assert shallow.dataset is wrapped.dataset
    stored = pickle.loads(pickle.dumps(wrapped))
    for other in (deep, shallow, stored):
        assert type(other) is type(wrapped)
        assert all(map(torch.equal, next(iter(other)), next(iter(wrapped))))
        assert repr(other).endswith("'cpu', depth=3)")


def test_a_pickle_keeps_the_device_of_the_model():
    model = optimize(nn.Linear(2, 2), device="meta")
    stored = pickle.loads(pickle.dumps(prefetch([torch.ones(2)], model)))
    assert next(iter(stored)).device.type == "meta"


# --- on the CPU -------------------------------------------------------------------------------------------------------


def test_on_the_cpu_batches_are_handed_on_as_they_are():
    batches = [[torch.ones(2), "a"], {"x": torch.ones(1)}, object()]
    threads = threading.active_count()
    for own, batch in zip(prefetch(batches, "cpu"), batches, strict=True):
        assert own is batch
        assert threading.active_count() == threads


def test_on_the_cpu_nothing_is_fetched_ahead():
    source = Source()
    iterator = iter(prefetch(source, "cpu", depth=4))
    assert source.asked == 0
    next(iterator)
    assert source.asked == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("empty", [[], iter(()), DataLoader(TensorDataset(torch.ones(0, 2)), 4)])
def test_nothing_in_nothing_out(device, empty):
    """L9."""
    assert list(prefetch(empty, device)) == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_endless_stream(device):
    stream = prefetch(iter(lambda: torch.ones(1), None), device)
    assert len(list(itertools.islice(stream, 5))) == 5


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_an_error_in_batch_3_is_raised_at_batch_3(device, depth):
    source = Source(raises_at=2)
    iterator = iter(prefetch(source, device, depth=depth))
    next(iterator)
    next(iterator)
    with pytest.raises(LookupError, match="no batch 3 today") as caught:
        next(iterator)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-2:] == ["__iter__", "fail"]
    with pytest.raises(StopIteration):
        next(iterator)


class Faulty:
    """Goes on after its error, as a DataLoader does."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        if self.n == 2:
            raise OSError("a bad file")
        if self.n == 5:
            raise StopIteration
        return torch.tensor(self.n)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_an_iterator_goes_on_after_its_error(depth):
    source = Faulty()
    iterator = iter(prefetch(source, "meta", depth=depth))
    next(iterator)
    assert source.n <= 2
    with pytest.raises(OSError, match="a bad file"):
        next(iterator)
    assert len(list(iterator)) == 2


def test_an_interrupt_is_not_kept_for_later():
    def batches():
        yield torch.ones(1)
        raise KeyboardInterrupt

    iterator = iter(prefetch(batches(), "meta", depth=2))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_break_closes_the_source_at_once(device):
    source = Source()
    gc.disable()
    try:
        for _ in prefetch(source, device):
            break
        assert source.closed
    finally:
        gc.enable()


def test_an_error_leaves_no_cycle():
    gc.collect()
    gc.disable()
    try:
        source = Source(raises_at=1)
        with pytest.raises(LookupError):
            list(prefetch(source, "meta"))
        dead = weakref.ref(source)
        del source
        assert dead() is None
    finally:
        gc.enable()


WORKER_DIES = """
import os, sys, time, torch
from torch.utils.data import DataLoader
from hotloop import prefetch

class Dying:
    def __len__(self):
        return 8

    def __getitem__(self, item):
        if item == 5:
            time.sleep(0.5)  # what was sent before has arrived
            os._exit(7)
        return torch.ones(2)

for n, batch in enumerate(prefetch(DataLoader(Dying(), 2, num_workers=1), sys.argv[1])):
    print(n)
"""


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_worker_that_dies_is_named_and_the_run_ends(device):
    """In a process of its own: torch raises from a signal handler, wherever the main thread is."""
    command = [sys.executable, "-c", WORKER_DIES, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert re.search(r"DataLoader worker \(pid.* exited unexpectedly", done.stderr), done.stderr
    assert done.returncode == 1
    assert done.stdout.split() == ["0", "1"]


# --- what a batch is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


class Tokens(UserDict):
    """A mapping that moves itself, as tokenizers' batches do."""

    def to(self, device):
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self


class Graph:
    """An object of the user's that moves itself into a new one."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


class Named(dict):
    note = ""


def containers():
    x = torch.arange(4.0)
    return {
        "tensor": (x, lambda b: [b]),
        "list": ([x, "a", None, 3], lambda b: [b[0]]),
        "named tuple": (Pair(x, x + 1), list),
        "dict subclass": (Named(x=x), lambda b: [b["x"]]),
        "ordered dict": (OrderedDict(x=x), lambda b: [b["x"]]),
        "defaultdict": (defaultdict(list, x=x), lambda b: [b["x"]]),
        "dataclass": (Sample(x, "a"), lambda b: [b.x]),
        "mapping that moves itself": (Tokens(x=x, y=x + 1), lambda b: [b["x"], b["y"]]),
        "object that moves itself": (Graph(x), lambda b: [b.x]),
        "packed sequence": (pack_sequence([x, x[:2]]), lambda b: [b.data]),
        "nested": ({"a": [Pair(x, (x + 1,))]}, lambda b: [b["a"][0].x, b["a"][0].y[0]]),
    }


@pytest.mark.parametrize("device", ["meta", pytest.param("simgpu", marks=pytest.mark.simgpu)])
@pytest.mark.parametrize("name", containers())
def test_containers_keep_their_types(name, device):
    """L13, L14, L15."""
    batch, tensors = containers()[name]
    values = [t.clone() for t in tensors(batch)]
    (moved,) = prefetch([batch], device)
    assert type(moved) is type(batch) or isinstance(batch, torch.Tensor)
    assert [t.device.type for t in tensors(moved)] == [device] * len(values)
    if device == "simgpu":
        assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors(moved), values, strict=True))
    if isinstance(moved, PackedSequence):
        assert moved.batch_sizes.device.type == "cpu"


# --- on an accelerator ------------------------------------------------------------------------------------------------


@pytest.fixture
def counts():
    transfer_to.cache_clear()  # a stream that has seen no batch
    simgpu.counts.clear()
    return simgpu.counts


@pytest.mark.simgpu
def test_auto_is_the_accelerator():
    assert [y.device.type for _, y in prefetch(loader())] == ["simgpu"] * 3


@pytest.mark.simgpu
@pytest.mark.parametrize("depth", [1, 2, 3, 10])
def test_depth_batches_are_in_use_or_on_their_way(depth):
    """L11, L16: for any iterable, and none more."""
    source = Source()
    handed_out = 0
    for batch in prefetch(iter(source), "simgpu", depth=depth):
        assert batch.cpu().tolist() == [handed_out] * 2
        handed_out += 1
        assert source.asked == min(handed_out - 1 + depth, source.length)
        assert sum(ref() is not None for ref in source.made) == 0  # what was copied is not kept on the host
    assert handed_out == source.length


class Moving:
    """A batch that is the same object on the device, so that it can be counted there."""

    def to(self, device):
        return self


@pytest.mark.simgpu
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depth_batches_are_alive(depth):
    """L16."""
    source = Source()
    alive = []
    batches = iter(prefetch((source.remember(Moving()) for _ in range(8)), "simgpu", depth=depth))
    for batch in batches:
        alive.append(sum(ref() is not None for ref in source.made))
        del batch
    assert max(alive) == depth


@pytest.mark.simgpu
def test_one_copy_a_tensor_from_pinned_memory_and_nobody_waits(counts):
    x = torch.randn(4, 3)
    batches = [{"x": x, "again": x, "y": [torch.arange(4)]} for _ in range(3)]
    pinned = []
    to = torch.Tensor.to

    def spy(tensor, *args, **kwargs):
        pinned.append(tensor.is_pinned())
        return to(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", spy)
        for batch in prefetch(batches, "simgpu"):
            assert batch["x"] is batch["again"]
    assert pinned == [True] * 6
    assert counts["h2d"] == 6
    assert simgpu.host_waits() == 0


class Refilled:
    """One block of pinned memory that holds batch after batch."""

    def __init__(self, **options):
        self.block = torch.empty(2, pin_memory=True, **options)

    def fill(self, i):
        with torch.no_grad():
            return self.block.fill_(float(i))

    def __iter__(self):
        for i in range(4):
            self.fill(i)
            yield [self.block]

    def collate(self, items):
        return [self.fill(items[0])]


REFILLED = {
    "generator": lambda: iter(Refilled()),
    "learned": lambda: iter(Refilled(requires_grad=True)),
    "collate_fn": lambda: DataLoader(range(4), collate_fn=Refilled().collate),
    "pinned by the loader": lambda: DataLoader(range(4), collate_fn=Refilled().collate, pin_memory=True),
}


@pytest.mark.simgpu
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", REFILLED)
def test_pinned_memory_that_is_refilled_arrives_as_it_was(kind, depth, counts):
    with simgpu.asynchronous():
        batches = [x for (x,) in prefetch(REFILLED[kind](), "simgpu", depth=depth)]
        assert simgpu.host_waits() == 0
    assert [x.tolist() for x in batches] == [[float(i)] * 2 for i in range(4)]


@pytest.mark.simgpu
@pytest.mark.parametrize("dataset", [TensorDataset(torch.ones(4, 2)), list(torch.ones(4, 2))], ids=["whole", "items"])
def test_what_a_loader_has_pinned_is_not_copied_once_more(dataset, counts):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch, "empty_like")
        assert len(list(prefetch(DataLoader(dataset, 2, pin_memory=True), "simgpu"))) == 2
    assert counts["h2d"] == 2
    assert simgpu.host_waits() == 0


@pytest.mark.simgpu
def test_a_step_waits_for_its_own_batch_and_every_leaf_is_recorded(counts):
    batches = prefetch([[torch.ones(2), {"y": (torch.ones(1), torch.ones(1))}] for _ in range(3)], "simgpu")
    for n, _ in enumerate(batches, 1):
        assert counts["aten::record_stream"] == 3 * n
        assert counts["stream.wait"] == n
        assert counts["event.record"] == min(n + 1, 3)


@pytest.mark.simgpu
def test_copies_run_on_a_stream_of_their_own():
    seen = []

    class Watching(Graph):
        def to(self, device):
            seen.append(torch.accelerator.current_stream())
            return super().to(device)

    computing = torch.accelerator.current_stream()
    for _ in range(2):  # two loaders share it, and with it its memory
        for _ in prefetch([Watching(torch.ones(1))], "simgpu"):
            assert torch.accelerator.current_stream() is computing
    assert seen[0] is not computing
    assert seen[0] is seen[1]


@pytest.mark.simgpu
def test_a_batch_that_cannot_be_moved_leaves_the_stream_and_is_raised_at_its_turn():
    class Stuck(Graph):
        def to(self, device):
            raise OSError("it does not move")

    computing = torch.accelerator.current_stream()
    iterator = iter(prefetch([torch.ones(1), Stuck(None), torch.ones(1)], "simgpu"))
    next(iterator)
    assert torch.accelerator.current_stream() is computing
    with pytest.raises(OSError, match="it does not move"):
        next(iterator)
    assert next(iterator).device.type == "simgpu"


@pytest.mark.simgpu
def test_an_object_that_records_itself_is_asked_to(counts):
    class Recording(Graph):
        streams: list[Any] = []

        def to(self, device):
            return Recording(self.x.to(device))

        def record_stream(self, stream):
            self.streams.append(stream)

    list(prefetch([Recording(torch.ones(1)) for _ in range(2)], "simgpu"))
    assert Recording.streams == [torch.accelerator.current_stream()] * 2


@pytest.mark.simgpu
def test_the_memory_of_an_object_that_cannot_be_recorded_is_safe(counts):
    """Its tensors are hidden, so later copies wait on the device for the steps before them; the host does not."""
    side = transfer_to(torch.device("simgpu", 0))
    side.receive(side.send(torch.ones(1)))
    side.send(torch.ones(1))
    assert counts["stream.wait"] == 1  # the batch that was handed out
    side.receive(side.send(Graph(torch.ones(1))))
    side.send(torch.ones(1))
    assert counts["stream.wait"] == 3  # that batch, and the copy after it
    assert simgpu.counts["event.synchronize"] == simgpu.counts["stream.synchronize"] == 0


@pytest.mark.simgpu
def test_what_cannot_be_pinned_is_moved_all_the_same():
    class Unpinnable(Graph):
        def pin_memory(self):
            raise RuntimeError("cannot pin")

    (moved,) = prefetch([Unpinnable(torch.ones(1))], "simgpu")
    assert moved.x.device.type == "simgpu"


@pytest.mark.simgpu
def test_an_object_is_asked_to_pin_itself():
    """L14."""

    class Pinning(Graph):
        def pin_memory(self):
            return Graph(self.x + 1)

    (moved,) = prefetch([Pinning(torch.zeros(1))], "simgpu")
    assert moved.x.cpu().item() == 1


@pytest.mark.simgpu
def test_gradients_reach_inputs_that_are_learned():
    x = torch.ones(2, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.Tensor, "pin_memory")  # through which no gradient goes
        (batch,) = prefetch([x], "simgpu")
    (batch * 3).sum().backward()
    assert x.grad.tolist() == [3, 3]


@pytest.mark.simgpu
def test_what_is_there_already_is_not_copied(counts):
    x = torch.ones(2, device="simgpu")
    counts.clear()
    (batch,) = prefetch([x], "simgpu")
    assert batch is x
    assert counts["h2d"] == counts["d2d"] == 0


@pytest.mark.simgpu
@pytest.mark.parametrize("depth", [1, 2])
def test_draws_of_loader_and_loop_keep_their_order_at_depth_1(depth):
    def draw(batches):
        torch.manual_seed(0)
        return [(float(batch.cpu()), torch.rand(1).item()) for batch in batches]

    def source():
        for _ in range(4):
            yield torch.rand(1)

    assert (draw(prefetch(source(), "simgpu", depth=depth)) == draw(source())) is (depth == 1)


@pytest.mark.simgpu
@pytest.mark.parametrize("exact", [False, True])
def test_an_exact_model_has_nothing_fetched_ahead(exact):
    model = optimize(nn.Linear(2, 2), exact=exact)
    source = Source()
    next(iter(prefetch(source, model, depth=2)))
    assert source.asked == (1 if exact else 2)


class Resumable:
    """Knows which batch comes next, as torchdata's StatefulDataLoader does."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 6:
            self.next += 1
            yield torch.tensor([self.next - 1.0])

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.simgpu
@pytest.mark.parametrize("device", ["cpu", "simgpu"])
def test_a_loader_is_resumed_with_the_batch_that_comes_next(device):
    """One that was fetched ahead would be lost."""
    first, second = prefetch(Resumable(), device), prefetch(Resumable(), device)
    batches = iter(first)
    seen = [int(next(batches).cpu()) for _ in range(3)]
    second.load_state_dict(first.state_dict())
    assert [*seen, *(int(batch.cpu()) for batch in second)] == list(range(6))


@pytest.mark.simgpu
def test_a_wrapped_model_is_asked_for_its_device_at_each_iteration():
    model = optimize(nn.Linear(2, 2))
    batches = prefetch([torch.ones(2)], model)
    assert next(iter(batches)).device.type == "simgpu"
    model.cpu()
    assert next(iter(batches)).device.type == "cpu"


@pytest.mark.simgpu
def test_batches_of_the_accelerator_come_to_a_model_on_the_cpu():
    batches = [[torch.ones(2, device="simgpu"), "a"]]
    assert [b[0].device.type for b in prefetch(batches, "cpu")] == ["cpu"]


@pytest.mark.simgpu
def test_labels_meet_predictions():
    net = nn.Linear(3, 10)
    model, step = optimize(net, torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    for x, y in prefetch(loader(), model):
        assert (model(x).argmax(1) == y).shape == y.shape
        step(x, y)


# --- bad input --------------------------------------------------------------------------------------------------------


class Items(torch.utils.data.Dataset):
    def __getitem__(self, item):
        return item


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: prefetch(5), TypeError, "takes an iterable of batches"),
    (lambda: prefetch(None), TypeError, "takes an iterable of batches"),
    (lambda: prefetch("cuda"), TypeError, "takes an iterable of batches"),
    (lambda: prefetch({"train": []}), TypeError, "takes an iterable of batches"),
    (lambda: prefetch(torch.ones(3)), TypeError, "takes an iterable of batches"),
    (lambda: prefetch(DataLoader), TypeError, "takes an iterable of batches"),
    (lambda: prefetch(nn.Linear(1, 1), []), TypeError, "the loader comes first"),
    (lambda: prefetch(nn.Sequential(), []), TypeError, "the loader comes first"),
    (lambda: prefetch(Items()), TypeError, "a data set holds items"),
    (lambda: prefetch(TensorDataset(torch.ones(3))), TypeError, "a data set holds items"),
    (lambda: prefetch([], nn.Linear(1, 1)), TypeError, "the model is not wrapped"),
    (lambda: prefetch([], "nowhere"), ValueError, "torch cannot use this device"),
    (lambda: prefetch([], "cuda:17"), ValueError, "torch cannot use this device"),
    (lambda: prefetch([], 3.5), TypeError, "a device or a wrapped model"),
    (lambda: prefetch([], "cpu", depth=0), ValueError, "depth=0"),
    (lambda: prefetch([], "cpu", depth=-1), ValueError, "depth=-1"),
    (lambda: prefetch([], "cpu", depth=1.5), ValueError, "depth=1.5"),
    (lambda: prefetch([], "cpu", depth=True), ValueError, "depth=True"),
])  # fmt: skip
def test_bad_input_raises_at_the_door(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_the_message_says_what_to_write():
    with pytest.raises(TypeError, match=r"prefetch\(DataLoader\(dataset, batch_size=32\), ...\)"):
        prefetch(Items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_iterator_stays_one(device):
    batches = prefetch(iter([torch.ones(i) for i in range(5)]), device, depth=2)
    assert len(next(batches)) == 0
    for batch in batches:
        assert len(batch) == 1
        break
    assert [len(batch) for batch in batches] == [2, 3, 4]
    with pytest.raises(StopIteration):
        next(batches)
    assert not hasattr(prefetch([1], device), "__next__")


class Reused:
    def __iter__(self):
        tensor, array = torch.zeros(2), numpy.zeros(2)
        for i in range(4):
            tensor.fill_(i)
            array[:] = i
            yield tensor, array


@pytest.mark.simgpu
@pytest.mark.parametrize("make", [Reused, lambda: iter(Reused())])
def test_buffers_that_a_generator_uses_again_are_read_in_time(make):
    """Tensors are at any depth."""
    assert [(t.cpu()[0].item(), a[0]) for t, a in prefetch(make(), "simgpu", depth=1)] == [(i, i) for i in range(4)]
    assert [t.cpu()[0].item() for t, _ in prefetch(make(), "simgpu")] == [0, 1, 2, 3]
