"""What two ranks must do with loaders and evaluations; run by `pair`, collected by `test_data_over_ranks`."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict, namedtuple

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from distributed.checks_step import assert_same_on_both, everyone, net, raises
from hotloop import data_loader, fast_eval, optimize, prefetch
from parity.twins import differences

ROWS = 23


class Items(Dataset):
    """A data set that is not in memory."""

    def __getitem__(self, i):
        return torch.tensor(float(i)), i % 3

    def __len__(self):
        return ROWS


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.tensor(float(i)), i % 3) for i in range(ROWS)])


def table():
    return TensorDataset(torch.arange(float(ROWS)), torch.arange(ROWS) % 3)


def wrapped():
    plain = net(dtype=torch.float32)
    return optimize(plain, SGD(plain.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu")[0]


def check_a_shuffling_loader_is_sharded_as_by_the_samplers_own_loader(rank):
    """L7: order and epochs of a DataLoader with a DistributedSampler, through `prefetch` and `data_loader`."""
    model = wrapped()
    for dataset, drop_last, workers in itertools.product((table(), Items()), (False, True), (0, 1)):
        options = {"batch_size": 4, "drop_last": drop_last, "num_workers": workers}
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank)
        reference = DataLoader(dataset, sampler=sampler, **options)
        own = DataLoader(dataset, shuffle=True, **options)
        loaders = [prefetch(own, model), prefetch(own, "cpu"), data_loader(dataset, shuffle=True, **options)]
        loaders.append(prefetch(loaders[-1], model))
        for loader in loaders[: 2 if workers else 4]:
            assert len(loader) == len(reference) < len(own)
            assert isinstance(loader.sampler, DistributedSampler)
            assert loader.dataset is dataset
        for epoch in range(2):
            sampler.set_epoch(epoch)
            expected = list(reference)
            for loader in loaders[:3] if not workers else loaders[:1]:
                assert differences(expected, list(loader)) == []
        sampler.set_epoch(7)
        loaders[0].sampler.set_epoch(7)
        assert differences(list(reference), list(loaders[0])) == []
        assert type(own.sampler) is RandomSampler  # the user's loader is as it was
    assert data_loader(table(), 4, shuffle=True).plan["sharding"].choice == "on"
    assert data_loader(table(), 4).plan["sharding"].choice == "off"


def check_what_is_not_sharded(rank):
    model = wrapped()
    data = table()
    samplers = [
        SequentialSampler(data),
        SubsetRandomSampler(range(5)),
        WeightedRandomSampler([1.0] * ROWS, 5),
        RandomSampler(data, replacement=True),
        RandomSampler(data, num_samples=7),
        DistributedSampler(data, num_replicas=2, rank=1 - rank),
    ]
    for sampler in samplers:
        assert prefetch(DataLoader(data, 4, sampler=sampler), model).sampler is sampler
    own = BatchSampler(RandomSampler(data), 3, drop_last=True)
    assert prefetch(DataLoader(data, batch_sampler=own), model).batch_sampler is own
    assert len(list(prefetch(DataLoader(Stream(), 4), model))) == 6
    assert list(prefetch([1, 2, 3], model)) == [1, 2, 3]
    loader = DataLoader(data, 4, shuffle=True)
    plain = net()
    alone, _ = optimize(plain, SGD(plain.parameters(), 0.1), distributed=False)
    for target in (alone, optimize(net())):
        assert prefetch(loader, target).sampler is loader.sampler  # a model that trains alone, or not at all


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.weight


def check_an_evaluation_is_whole_on_every_rank(rank):
    """Without `reduce`: also for a loader that shuffles, and for one that was sharded for training."""
    model = wrapped()
    evaluated = fast_eval(lambda model, loader: [sum(len(x) for x, _ in loader), len(loader.dataset)])
    for loader in (
        DataLoader(table(), 4),
        DataLoader(table(), 4, shuffle=True),
        data_loader(table(), 4, shuffle=True),
        prefetch(DataLoader(table(), 4, shuffle=True), model),
    ):
        assert evaluated(model, loader) == [ROWS, ROWS]


def loaders_of_every_kind(rank):
    data = table()
    yield DataLoader(data, 4)
    yield DataLoader(data, 4, shuffle=True)
    yield DataLoader(data, None, shuffle=True)
    yield DataLoader(data, 4, sampler=SubsetRandomSampler(range(ROWS)))
    yield DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=rank))
    yield DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, drop_last=False))
    yield DataLoader(data, batch_sampler=[[3, 1, 2], *([i] for i in (0, *range(4, ROWS)))])
    yield DataLoader(Items(), 4, num_workers=1, persistent_workers=True)
    yield DataLoader(Stream(), 4)
    yield data_loader(data, 4, shuffle=True)
    yield prefetch(DataLoader(data, 4, shuffle=True), "cpu")
    yield prefetch([(x, y) for x, y in DataLoader(data, 4)], "cpu")


def check_reduce_gives_each_sample_to_one_rank(rank):
    model = Sums()
    seen = []

    @fast_eval(reduce="sum")
    def total(model, loader):
        got = [(model(x.reshape(-1)), x.reshape(-1)) for x, _ in loader]
        seen.append([v for _, x in got for v in x.tolist()])
        return {"sum": sum((out.sum() for out, _ in got), torch.zeros(())), "rows": sum(len(x) for _, x in got)}

    for loader in loaders_of_every_kind(rank):
        found = total(model, loader)
        assert found == {"sum": ROWS * (ROWS - 1) / 2, "rows": ROWS}, (loader, found)
        assert type(found["rows"]) is int
        parts = everyone(seen.pop())
        assert sorted([*parts[0], *parts[1]]) == [float(i) for i in range(ROWS)], loader
        assert min(map(len, parts)) >= 8, loader
    dropping = DataLoader(table(), 4, drop_last=True)
    assert total(model, dropping)["rows"] == 20


def check_the_mean_weighs_ranks_by_their_samples(rank):
    model = Sums()

    @fast_eval(reduce="mean")
    def average(model, loader):
        values = torch.cat([model(x) for x, _ in loader])
        return values.mean()

    for loader in (DataLoader(table(), 4), data_loader(table(), 5, shuffle=True)):
        assert abs(average(model, loader) - (ROWS - 1) / 2) < 1e-6
    one = TensorDataset(torch.tensor([5.0]), torch.tensor([0]))
    empty_here = fast_eval(reduce="mean")(lambda model, loader: sum(model(x).sum() for x, _ in loader) / 1)
    assert empty_here(model, DataLoader(one, 4)) == 5.0  # rank 1 has nothing, and counts for nothing


def check_reduce_keeps_containers_and_reduces_tensors(rank):
    Pair = namedtuple("Pair", "a b")

    @dataclasses.dataclass
    class Scores:
        hits: int
        name: str = "x"

    @fast_eval(reduce="sum")
    def counts(model, loader):
        confusion = torch.zeros(3, 3, dtype=torch.long)
        for x, y in loader:
            model(x)
            confusion.index_put_((y, y), torch.ones_like(y), accumulate=True)
        many = defaultdict(list, {"c": [confusion.sum(), (1.5, None, True)]})
        return Pair(confusion, Scores(2)), many, 1 + 2j

    (pair, many, number) = counts(Sums(), DataLoader(table(), 4))
    assert type(pair) is Pair or type(pair).__name__ == "Pair"
    assert pair.a.diagonal().tolist() == [8, 8, 7]
    assert (pair.b.hits, pair.b.name) == (4, "x")
    assert type(many) is defaultdict
    assert many == {"c": [ROWS, (3.0, None, True)]}
    assert number == 2 + 4j
    assert_same_on_both(pair.a, dict(many))


def check_what_cannot_be_reduced_raises_on_both(rank):
    model, loader = Sums(), DataLoader(table(), 4)
    evaluated = fast_eval(reduce="sum")
    raises(ValueError, lambda: evaluated(lambda model: 1.0)(model), "reduce='sum'", "no loader among its arguments")
    predictions = evaluated(lambda model, loader: torch.cat([model(x) for x, _ in loader]))
    raises(ValueError, lambda: predictions(model, loader), "(12,)", "on rank 0", "(11,)", "on rank 1", "one for each sample")

    def fails(model, loader):
        if rank == 1:
            raise KeyError("lost")
        return 1.0

    if rank == 1:
        raises(KeyError, lambda: evaluated(fails)(model, loader), "lost")
    else:
        raises(RuntimeError, lambda: evaluated(fails)(model, loader), "failed on rank 1: KeyError: 'lost'")
    with pytest.raises(TypeError, match="cannot be reduced"):

        @fast_eval(reduce="sum")
        def generator(model, loader):
            yield 1
