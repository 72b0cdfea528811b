"""Reading whole batches: the very batches and random numbers of DataLoader, without going item by item."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from hotloop import prefetch

N = 23


def data(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, 2, generator=generator)
    return TensorDataset(x, torch.arange(n), (x[:, 0] > 0).to(torch.uint8))


def a_pass(loader):
    """Everything that a loop can see of one pass: the batches, and the random numbers that are left for it."""
    return [(batch, torch.rand(1).item(), random.random()) for batch in loader], torch.get_rng_state()


def assert_same(make, *, passes=2):
    """A loop over the loader and a loop over its prefetched twin see the same."""
    plain, wrapped = make(), prefetch(make(), "cpu")
    for epoch in range(passes):
        results = []
        for loader in (plain, wrapped):
            torch.manual_seed(epoch)
            random.seed(epoch)
            results.append(a_pass(loader))
        (expected, state), (got, own_state) = results
        assert len(expected) == len(got)
        for (batch, *numbers), (own, *own_numbers) in zip(expected, got, strict=True):
            assert numbers == own_numbers
            assert type(own) is type(batch)
            for a, b in zip(batch, own, strict=True):
                assert (type(b), b.dtype, b.shape, b.stride()) == (type(a), a.dtype, a.shape, a.stride())
                assert (b.requires_grad, b.is_conj(), b.is_neg()) == (a.requires_grad, a.is_conj(), a.is_neg())
                assert torch.equal(a, b)
        assert torch.equal(state, own_state)


@pytest.fixture
def item_reads(monkeypatch):
    """The positions that TensorDataset was asked for one by one."""
    reads = []
    one = TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, item: reads.append(item) or one(self, item))
    return reads


def seeded():
    return torch.Generator().manual_seed(7)


LOADERS = {
    "in order": lambda: DataLoader(data(), 4),
    "shuffled": lambda: DataLoader(data(), 4, shuffle=True),
    "drop_last": lambda: DataLoader(data(), 4, shuffle=True, drop_last=True),
    "drop_last in order": lambda: DataLoader(data(), 5, drop_last=True),
    "even": lambda: DataLoader(data(24), 4, shuffle=True),
    "even drop_last": lambda: DataLoader(data(24), 4, shuffle=True, drop_last=True),
    "one batch": lambda: DataLoader(data(), 100, shuffle=True),
    "nothing in a batch": lambda: DataLoader(data(), 100, drop_last=True),
    "batch of one": lambda: DataLoader(data(), 1, shuffle=True),
    "several chunks": lambda: DataLoader(data(9000), 1000, shuffle=True),
    "empty": lambda: DataLoader(TensorDataset(torch.zeros(0, 2)), 4),
    "one tensor": lambda: DataLoader(TensorDataset(torch.randn(9, 2, generator=seeded())), 4, shuffle=True),
    "scalars": lambda: DataLoader(TensorDataset(torch.arange(9.0)), 4),
    "generator": lambda: DataLoader(data(), 4, shuffle=True, generator=seeded()),
    "even generator": lambda: DataLoader(data(24), 4, shuffle=True, generator=seeded()),
    "global generator": lambda: DataLoader(data(), 4, shuffle=True, generator=torch.default_generator),
    "even global generator": lambda: DataLoader(data(24), 4, shuffle=True, generator=torch.default_generator),
    "with replacement": lambda: DataLoader(data(), 4, sampler=RandomSampler(data(), replacement=True, num_samples=70)),
    "with replacement, global generator": lambda: DataLoader(
        data(), 4, sampler=RandomSampler(data(), replacement=True, num_samples=70, generator=torch.default_generator)
    ),
    "more than once": lambda: DataLoader(data(), 4, sampler=RandomSampler(data(), num_samples=60)),
    "weighted": lambda: DataLoader(data(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, N + 1), 50)),
    "weighted, generator": lambda: DataLoader(
        data(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, N + 1), 50, generator=torch.default_generator)
    ),
    "subset sampler": lambda: DataLoader(data(), 4, sampler=SubsetRandomSampler([3, 1, 7, 5, 22])),
    "subset sampler from the end": lambda: DataLoader(data(), 4, sampler=SubsetRandomSampler([3, 1, -1, 5, -22])),
    "distributed sampler": lambda: DataLoader(data(), 4, sampler=DistributedSampler(data(), 2, 1)),
    "list as sampler": lambda: DataLoader(data(), 4, sampler=[5, 3, 8, 1, 1, -2]),
    "tensors as sampler": lambda: DataLoader(data(), 4, sampler=torch.tensor([5, 3, 8, 1, -2])),
    "tensors of one element as sampler": lambda: DataLoader(data(), 4, sampler=torch.tensor([[5], [3], [8], [1], [1]])),
    "booleans as sampler": lambda: DataLoader(data(), 4, sampler=[True, True, True, True, True]),
    "booleans in tensors as sampler": lambda: DataLoader(data(), 2, sampler=torch.tensor([True, True, True])),
    "subset, tensors of one element as sampler": lambda: DataLoader(
        Subset(data(), [5, 3, 8]), 2, sampler=torch.tensor([[2], [1], [0]])
    ),
    "subset of tensors of one element": lambda: DataLoader(Subset(data(), torch.tensor([[5], [3], [8]])), 2, shuffle=True),
    "own sampler": lambda: DataLoader(data(), 4, sampler=Drawing()),
    "own batch sampler": lambda: DataLoader(data(), batch_sampler=DrawingBatches()),
    "batch sampler of lists": lambda: DataLoader(data(), batch_sampler=[[1, 2], [3], [22, 0, 5]]),
    "batch sampler of tensors": lambda: DataLoader(data(), batch_sampler=torch.arange(20).view(5, 4)),
    "batch sampler of arrays": lambda: DataLoader(data(), batch_sampler=torch.arange(20).view(5, 4).numpy()),
    "batch sampler of ranges": lambda: DataLoader(data(), batch_sampler=[range(3), range(5, 20, 2)]),
    "own BatchSampler": lambda: DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), 3, True)),
    "subset": lambda: DataLoader(Subset(data(), [5, 3, 8, 1, 1, -2]), 4, shuffle=True),
    "subset by tensor": lambda: DataLoader(Subset(data(), torch.tensor([5, 3, 8])), 2, shuffle=True),
    "subset by array": lambda: DataLoader(Subset(data(), torch.tensor([5, 3, 8]).numpy()), 2, shuffle=True),
    "subset of a subset": lambda: DataLoader(Subset(Subset(data(), range(2, 20)), range(15, 2, -2)), 3, shuffle=True),
    "split": lambda: DataLoader(random_split(data(), [13, 10], generator=seeded())[1], 3, shuffle=True),
    "timid workers' options": lambda: DataLoader(data(), 4, worker_init_fn=print, in_order=False),
}


class Drawing:
    """Draws one number of each kind for every item."""

    def __iter__(self):
        for _ in range(9):
            yield (random.randrange(N) + int(torch.randint(N, ()))) % N

    def __len__(self):
        return 9


class DrawingBatches:
    def __iter__(self):
        for size in (3, 1, 4):
            yield tuple(torch.randint(N, (size,)).tolist())


@pytest.mark.parametrize("name", LOADERS)
def test_batches_and_random_numbers_are_dataloaders_own(name):
    """L1, L2, L5, L9."""
    assert_same(LOADERS[name])


@pytest.mark.parametrize("name", ["in order", "shuffled", "generator", "own batch sampler", "subset of a subset", "split"])
def test_items_are_not_read_one_by_one(name, item_reads):
    list(prefetch(LOADERS[name](), "cpu"))
    assert item_reads == []


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 70),
    size=st.integers(1, 30),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    indices=st.none() | st.lists(st.integers(0, 69), min_size=1),
)
def test_any_size_and_subset(n, size, shuffle, drop_last, indices):
    def make():
        dataset = data(n) if indices is None else Subset(data(n), [i % n for i in indices])
        return DataLoader(dataset, size, shuffle=shuffle, drop_last=drop_last)

    assert_same(make, passes=1)


LAYOUTS = {
    "channels_last": lambda: torch.randn(9, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed items": lambda: torch.randn(9, 4, 5).transpose(1, 2),
    "transposed": lambda: torch.randn(4, 9).t(),
    "every other row": lambda: torch.randn(18, 4)[::2],
    "narrowed": lambda: torch.randn(9, 8, 4)[:, 2:5],
    "expanded": lambda: torch.randn(1, 4).expand(9, 4),
    "empty items": lambda: torch.randn(9, 0, 2),
    **{str(dtype): lambda dtype=dtype: torch.arange(9).to(dtype) for dtype in (torch.bool, torch.int8, torch.float16)},
    "bfloat16": lambda: torch.randn(9, 2).bfloat16(),
    "uint16": lambda: torch.arange(9).to(torch.uint16),
    "complex": lambda: torch.randn(9, 2, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(9, 2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(9, 2, dtype=torch.complex64).conj().imag,
    "with a gradient": lambda: torch.randn(9, 2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(9, 2), requires_grad=False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_and_dtypes(name):
    values = LAYOUTS[name]()
    assert_same(lambda: DataLoader(TensorDataset(values, torch.arange(9)), 4, shuffle=True))


def test_gradients_reach_inputs_that_are_learned():
    x = torch.randn(6, 2, requires_grad=True)
    for (batch,) in prefetch(DataLoader(TensorDataset(x), 4), "cpu"):
        (batch * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((6, 2), 2.0))


class Doubled(TensorDataset):
    def __getitem__(self, item):
        return tuple(2 * value for value in super().__getitem__(item))


class Reversed(Subset):
    def __getitem__(self, item):
        return super().__getitem__(len(self) - 1 - item)

    def __getitems__(self, items):
        return [self[item] for item in items]


class Loader(DataLoader):
    def __iter__(self):
        yield from ("a", "b")


@pytest.mark.parametrize("make", [
    pytest.param(lambda: DataLoader(Doubled(*data().tensors), 4), id="a subclass of TensorDataset"),
    pytest.param(lambda: DataLoader(Reversed(data(), range(9)), 4), id="a subclass of Subset"),
    pytest.param(lambda: DataLoader(Subset([[torch.ones(2)]] * 9, range(5)), 4), id="a subset of something else"),
    pytest.param(lambda: DataLoader(data(), 4, collate_fn=lambda items: [default_collate(items)[1]]), id="own collate_fn"),
    pytest.param(lambda: DataLoader(data(), None), id="batch_size=None"),
    pytest.param(lambda: DataLoader(TensorDataset(torch.ones(5, 2), torch.ones(5, 2)), None, collate_fn=default_collate),
                 id="batch_size=None with default collation"),
    pytest.param(lambda: DataLoader(data(), None, sampler=[[1, 2], [3]]), id="batches as sampler"),
])  # fmt: skip
def test_what_does_more_than_index_is_left_to_dataloader(make):
    assert_same(make)


def test_workers_that_are_asked_for_are_used():
    loader = DataLoader(data(), 4, num_workers=1)
    assert type(iter(prefetch(loader, "cpu"))) is type(iter(loader))


def test_a_subclass_of_dataloader_iterates_as_it_likes():
    assert list(prefetch(Loader(data(), 4), "cpu")) == ["a", "b"]


@pytest.mark.parametrize("kind", [torch.Tensor, tuple])
def test_a_changed_collation_table_counts(kind, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, kind, lambda batch, *, collate_fn_map=None: len(batch))
    loader = DataLoader(TensorDataset(torch.arange(5.0)), 4)
    assert list(prefetch(loader, "cpu")) == list(loader)


@pytest.mark.parametrize("make", [
    pytest.param(lambda: DataLoader(TensorDataset(torch.eye(4).to_sparse()), 2), id="sparse"),
    pytest.param(lambda: DataLoader(data(), 4, sampler=[0, 1, 2, 3, N]), id="position"),
    pytest.param(lambda: DataLoader(Subset(data(), [0, 1, N, 3, 2]), 2), id="position of a subset"),
    pytest.param(lambda: DataLoader(data(), 4, sampler=[0, 1, 2, 3, 0.5]), id="no number"),
    pytest.param(lambda: DataLoader(data(), batch_sampler=[[0, 1], []]), id="empty batch"),
])  # fmt: skip
def test_an_error_is_the_one_that_dataloader_raises_where_it_raises_it(make):
    def run(loader):
        batches, iterator = [], iter(loader)
        with pytest.raises(Exception) as caught:
            while True:
                batches.append(next(iterator))
        return len(batches), caught.type, str(caught.value), caught.value.__context__

    assert run(prefetch(make(), "cpu")) == run(make())


def test_the_pass_goes_on_after_an_error():
    make = lambda: DataLoader(data(), batch_sampler=[[0, 1], [N], [2, 3]])  # noqa: E731
    iterator = iter(prefetch(make(), "cpu"))
    next(iterator)
    with pytest.raises(IndexError):
        next(iterator)
    assert next(iterator)[1].tolist() == [2, 3]


def test_what_is_changed_in_place_is_seen():
    dataset = data()
    iterator = iter(prefetch(DataLoader(dataset, 4), "cpu"))
    next(iterator)
    dataset.tensors[1].fill_(7)
    assert next(iterator)[1].tolist() == [7] * 4


def test_batches_are_copies():
    dataset = data()
    for _, y, _ in prefetch(DataLoader(dataset, 4), "cpu"):
        y.zero_()
    assert torch.equal(dataset.tensors[1], torch.arange(N))


def test_the_iterator_has_the_length_of_dataloaders():
    assert len(iter(prefetch(DataLoader(data(), 4), "cpu"))) == len(iter(DataLoader(data(), 4))) == 6


def test_set_epoch_of_a_distributed_sampler_is_seen():
    def epochs(wrap):
        sampler = DistributedSampler(data(), 2, 0, seed=5)
        loader = wrap(DataLoader(data(), 4, sampler=sampler))
        orders = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            orders.append([y.tolist() for _, y, _ in loader])
        return orders

    first, second = epochs(lambda loader: prefetch(loader, "cpu"))
    assert [first, second] == epochs(lambda loader: loader)
    assert first != second


def test_a_break_leaves_the_random_state_where_dataloader_leaves_it():
    states = []
    for wrap in (lambda loader: loader, lambda loader: prefetch(loader, "cpu")):
        torch.manual_seed(0)
        for _ in wrap(DataLoader(data(), 4, shuffle=True, generator=torch.default_generator)):
            break
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_pinned_memory_warns_as_dataloader_does_where_nothing_can_be_pinned():
    with pytest.warns(UserWarning, match="no accelerator is found"):
        batches = list(prefetch(DataLoader(data(), 4, pin_memory=True), "cpu"))
    assert len(batches) == 6


@pytest.mark.simgpu
def test_pinned_memory_is_kept():
    loader = DataLoader(data(), 4, pin_memory=True)
    assert all(t.is_pinned() for batch in prefetch(loader, "cpu") for t in batch)


@pytest.mark.simgpu
@pytest.mark.parametrize(("sampler", "indexed", "one_by_one"), [(None, 12, []), ([5, 3, 8, 1, -1], 2, [-1])])
def test_tensors_on_a_device_are_indexed_there(sampler, indexed, one_by_one, item_reads):
    import simgpu

    host = DataLoader(data(), 2, sampler=sampler)
    there = DataLoader(TensorDataset(*(t.to("simgpu") for t in data().tensors)), 2, sampler=sampler)
    expected = list(host)
    item_reads.clear()
    simgpu.counts.clear()
    batches = list(prefetch(there, "simgpu"))
    assert simgpu.host_waits() == 0
    assert item_reads == one_by_one
    assert simgpu.counts["aten::index_select"] == 3 * indexed
    for batch, other in zip(batches, expected, strict=True):
        assert type(batch) is list
        assert all(a.device.type == "simgpu" and torch.equal(a.cpu(), b) for a, b in zip(batch, other, strict=True))


def replace_tensors(dataset):
    dataset.tensors = tuple(t.flip(0) for t in dataset.tensors)


def shrink(dataset):
    dataset.tensors = tuple(t[:6] for t in dataset.tensors)


def other_kind(dataset):
    dataset.tensors = (dataset.tensors[0].to_sparse(), *dataset.tensors[1:])


def replace_dataset(subset):
    subset.dataset = TensorDataset(*(t.flip(0) for t in subset.dataset.tensors))


def replace_indices(subset):
    subset.indices = [0] * N


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("change", "subset"),
    [
        (replace_tensors, False),
        (lambda dataset: dataset.tensors[0].neg_(), False),
        (shrink, False),
        (other_kind, False),
        (replace_dataset, True),
        (replace_indices, True),
        (lambda subset: subset.indices.reverse(), True),
        (lambda subset: subset.indices.clear(), True),
    ],
)
def test_a_data_set_that_changes_between_two_batches(change, subset, shuffle):
    """What a batch holds is looked up when it is made, as DataLoader does it: not when the pass begins."""

    def seen(wrap):
        torch.manual_seed(0)
        dataset = Subset(data(), list(range(N))) if subset else data()
        batches = []
        try:
            for batch in wrap(DataLoader(dataset, 4, shuffle=shuffle)):
                batches.append([t.clone() for t in batch])
                if len(batches) == 2:
                    change(dataset)
        except Exception as error:
            batches.append(type(error))
        return batches

    expected, got = seen(lambda loader: loader), seen(lambda loader: prefetch(loader, "cpu"))
    assert len(expected) == len(got)
    for batch, own in zip(expected, got, strict=True):
        assert batch == own if isinstance(batch, type) else all(map(torch.equal, batch, own))


def test_a_list_that_a_sampler_draws_from_changes_between_two_batches():
    def seen(wrap):
        torch.manual_seed(0)
        indices = list(range(N))
        batches = []
        for _, numbers, _ in wrap(DataLoader(data(), 4, sampler=SubsetRandomSampler(indices))):
            batches.append(numbers.tolist())
            indices[:] = [0] * N
        return batches

    assert seen(lambda loader: prefetch(loader, "cpu")) == seen(lambda loader: loader)
