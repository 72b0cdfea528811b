"""Models that are under DDP or `fully_shard` already; run by `pair`, collected by `test_data_over_ranks`."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed.checks_step import LOSS, assert_same_on_both, batches, half, net, optimize, raises
from hotloop import fast_eval
from parity.twins import differences


def full(parameter):
    return parameter.full_tensor().detach() if hasattr(parameter, "full_tensor") else parameter.detach()


def under_ddp(module):
    return DistributedDataParallel(module)


def under_fully_shard(module):
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(module)


def assert_close(alone, given):
    for a, b in zip(alone.parameters(), given.parameters(), strict=True):
        assert (a - full(b)).abs().max() < 1e-6, (a - full(b)).abs().max()


def check_a_model_given_under_something_is_taken_as_it_is(rank):
    for put, make, options in itertools.product(
        (under_ddp, under_fully_shard),
        (partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=0.01)),
        ({}, {"clip_norm": 0.1}, {"accumulate": 3, "clip_norm": 0.1}),
    ):
        plain = net()
        alone, one = optimize(plain, make(plain.parameters()), LOSS, distributed=False, **options)
        given = put(net())
        keys = list(given.state_dict())
        model, step = optimize(given, make(given.parameters()), LOSS, **options)
        assert model.__wrapped__ is given
        assert step.plan["ddp"].choice == "as it is"
        assert list(model.state_dict()) == keys
        for i, batch in enumerate(batches(8)):
            x, y = half(batch, rank)
            theirs, mine = one(*batch), step(x, y) if i % 2 else step(LOSS(model(x), y))
            if mine.updated and "clip_norm" in options:
                assert abs(mine["grad_norm"] - theirs["grad_norm"]) < 1e-9
        assert one.flush() == step.flush() == ("accumulate" in options)
        assert_close(alone, given)
        assert abs(step.mean()["loss"] - one.mean()["loss"]) < 1e-6


def check_the_users_ddp_communicates_once_a_window(rank):
    given = DistributedDataParallel(net())
    sent = []

    def hook(_, bucket):
        sent.append(1)
        return allreduce_hook(None, bucket)

    given.register_comm_hook(None, hook)
    model, step = optimize(given, SGD(given.parameters(), 0.1), LOSS, accumulate=3)
    for i, batch in enumerate(batches(9)):
        x, y = half(batch, rank)
        step(LOSS(model(x), y)) if i % 2 else step(x, y)
        assert len(sent) == (i + 1) // 3
    assert_same_on_both(given.state_dict())


def check_weights_of_micro_batches_under_the_users_ddp(rank):
    for put in (under_ddp, under_fully_shard):
        plain, given = net(), put(net())
        alone, one = optimize(plain, SGD(plain.parameters(), 0.5), LOSS, distributed=False)
        _, step = optimize(given, SGD(given.parameters(), 0.5), LOSS, accumulate=2)
        torch.manual_seed(2)
        for _ in range(2):
            rows = [(torch.randn(n, 6).double(), torch.randint(3, (n,))) for n in (1, 4, 5, 2)]
            one(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
            for x, y in (rows[rank], rows[rank + 2]):
                step(x, y, weight=len(x))
        assert_close(alone, given)


def flat(**options):
    return FullyShardedDataParallel(net(dtype=torch.float32), device_id=torch.device("cpu"), **options)


def whole(module):
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def check_flat_shards_train_as_one_process_does(rank):
    """With the model's own clipping: a flat shard is a plain tensor, and a norm over it that of one rank."""
    for use_orig_params, options in itertools.product((False, True), ({}, {"accumulate": 3}, {"clip_norm": 0.1})):
        plain, given = net(dtype=torch.float32), flat(use_orig_params=use_orig_params)
        _, one = optimize(plain, SGD(plain.parameters(), 0.1), LOSS, distributed=False, **options)
        clip = options.pop("clip_norm", None)
        _, step = optimize(
            given,
            SGD(given.parameters(), 0.1),
            LOSS,
            before_update=clip and (lambda model=given: model.clip_grad_norm_(0.1)),
            **options,
        )
        assert step.plan["ddp"].why.endswith("under FullyShardedDataParallel already")
        for batch in batches(5, dtype=torch.float32):
            size = len(half(batch, rank)[1])
            one(*batch, weight=2 * size)
            step(*half(batch, rank), weight=size)
        assert one.flush() == step.flush() == ("accumulate" in options)
        expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
        assert (expected - whole(given)[: len(expected)]).abs().max() < 1e-6


def check_what_flat_shards_cannot_do_is_refused(rank):
    given = flat()
    before = whole(given)
    for wish, fix in (
        ({"clip_norm": 0.5}, "before_update=lambda: model.clip_grad_norm_(0.5)"),
        ({"precision": "fp16"}, "precision='bf16'"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "precision='bf16'"),
    ):
        raises(
            ValueError,
            lambda wish=wish: optimize(given, SGD(given.parameters(), 0.1), LOSS, **wish),
            *("FullyShardedDataParallel", "own shard", "fully_shard", fix, next(iter(wish)) + "="),
        )
    assert differences(before, whole(given)) == []
    optimize(given, SGD(given.parameters(), 0.1), LOSS, scaler=torch.amp.GradScaler("cpu", enabled=False))


def check_state_dicts_of_a_sharded_model(rank):
    def made(seed):
        module = under_fully_shard(net(seed=seed))
        optimizer = AdamW(module.parameters(), 0.01)
        return (*optimize(module, optimizer, LOSS), optimizer)

    model, step, optimizer = made(1)
    data = [half(b, rank) for b in batches(6)]
    for x, y in data[:3]:
        step(x, y)
    saved = copy.deepcopy(get_state_dict(model.__wrapped__, optimizer))
    for x, y in data[3:]:
        step(x, y)
    again, resumed, its = made(2)
    set_state_dict(again.__wrapped__, its, model_state_dict=saved[0], optim_state_dict=saved[1])
    for x, y in data[3:]:
        resumed(x, y)
    assert differences([full(p) for p in model.parameters()], [full(p) for p in again.parameters()]) == []


def check_a_sharded_model_is_evaluated_in_parts_of_as_many_batches(rank):
    module = under_fully_shard(net())
    model, _ = optimize(module, SGD(module.parameters(), 0.1), LOSS)
    x = torch.cat([x for x, _ in batches(3)])  # 24 rows

    @fast_eval(reduce="mean")
    def mean(model, loader):
        return torch.cat([model(x) for (x,) in loader]).mean()

    plain = net()
    assert abs(mean(model, DataLoader(TensorDataset(x), 5)) - plain(x).mean().item()) < 1e-12
    for uneven in (DataLoader(TensorDataset(x[:21]), 5), DataLoader(Rows(x), 5)):
        raises(ValueError, partial(mean, model, uneven), "fully_shard", "as many batches", "batch_size")


class Rows(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter([(row,) for row in self.rows])


def check_state_dicts_of_a_plain_model(rank):
    """torch's own way to load makes the optimizer's state by stepping it: no step from outside to be warned of."""
    plain = net()
    optimizer = AdamW(plain.parameters(), 0.01)
    model, step = optimize(plain, optimizer, LOSS)
    step(*half(batches(1)[0], rank))
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    assert list(saved[0]) == list(plain.state_dict())
    again = net(seed=2)
    its = AdamW(again.parameters(), 0.01)
    wrapped, _ = optimize(again, its, LOSS)
    wrapped.load_state_dict(saved[0])
    set_state_dict(wrapped, its, model_state_dict=saved[0], optim_state_dict=saved[1])
    assert differences(plain.state_dict(), again.state_dict()) == []
    assert differences(optimizer.state_dict()["state"], its.state_dict()["state"]) == []
