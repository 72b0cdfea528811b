"""What two ranks must do with a step; run by `pair`, collected by `test_step_over_ranks`."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import hotloop
from parity.test_bitwise import MODELS
from parity.twins import differences, plain_loop

optimize = partial(hotloop.optimize, device="cpu", exact=True)
LOSS = nn.CrossEntropyLoss()


def raises(kind, call, *parts):
    with pytest.raises(kind) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), f"{caught.value} lacks one of {parts}"


def everyone(value):
    told = [None, None]
    dist.all_gather_object(told, value)
    return told


def assert_same_on_both(*states):
    mine, other = everyone([copy.deepcopy(state) for state in states])
    assert differences(mine, other) == []


def communications(step):
    """Counts the buckets that DDP sends."""
    sent = []

    def hook(_, bucket):
        sent.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    step._exchange._ddp.register_comm_hook(None, hook)
    return sent


def net(kind="mlp", dtype=torch.float64, seed=1):
    torch.manual_seed(seed)
    made = MODELS[kind]().to(dtype)
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.0
    return made


def batches(count=12, size=8, dtype=torch.float64):
    torch.manual_seed(3)
    return [(torch.randn(size, 6, dtype=dtype), torch.randint(3, (size,))) for _ in range(count)]


def half(batch, rank):
    return tuple(t.chunk(2)[rank] for t in batch)


def close(a, b, tolerance=1e-6):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert (x - y).abs().max() <= tolerance, (name, (x - y).abs().max())


MOMENTUM = partial(SGD, lr=0.05, momentum=0.9)


def twins(kind="mlp", make=MOMENTUM, scheduled=False, seed=1, **options):
    """The same model twice: for one process with whole batches, and for two with half of each."""
    made = []
    for distributed in (False, "auto"):
        plain = net(kind, seed=seed)
        optimizer = make(plain.parameters())
        scheduler = StepLR(optimizer, 2, 0.5) if scheduled else None
        made.append(optimize(plain, optimizer, LOSS, scheduler=scheduler, distributed=distributed, **options))
    return made


def check_half_batches_give_the_weights_of_whole_ones(rank):
    variants = [
        {},
        {"accumulate": 3},
        {"clip_norm": 0.1},
        {"scheduled": True},
        {"accumulate": 2, "clip_norm": 0.1, "scheduled": True},
    ]
    for kind, make, options in itertools.product(
        ("mlp", "encoder", "gru", "lstm", "tied"), (partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=0.01)), variants
    ):
        (alone, one), (model, step) = twins(kind, make, **options)
        start = copy.deepcopy(alone.state_dict())
        for batch in batches():
            one(*batch)
            step(*half(batch, rank))
        assert differences(start, alone.state_dict()) != []
        close(alone, model)
        assert_same_on_both(model.state_dict())
        assert step.updates == one.updates


def check_every_step_is_bitwise_the_plain_loop_under_ddp(rank):
    for kind, options in itertools.product(MODELS, ({}, {"clip_norm": 0.1}, {"accumulate": 3, "clip_norm": 0.1})):
        # Dropout and BatchNorm as they are: each rank draws for itself, and buffers are those of rank 0.
        torch.manual_seed(1)
        plain, wrapped = (MODELS[kind]() for _ in range(2))
        wrapped.load_state_dict(plain.state_dict())
        ddp = DistributedDataParallel(plain)
        data = [half(b, rank) for b in batches(dtype=torch.float32)]
        random = torch.get_rng_state()
        optimizer = SGD(ddp.parameters(), 0.05, momentum=0.9)
        if options.get("accumulate"):
            for i in range(0, 12, 3):
                optimizer.zero_grad()
                for j in range(3):
                    x, y = data[i + j]
                    ddp.require_backward_grad_sync = j == 2
                    (LOSS(ddp(x), y) / 3).backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
                optimizer.step()
        else:
            plain_loop(ddp, optimizer, LOSS, data, **options)
        torch.set_rng_state(random)
        model, step = optimize(wrapped, SGD(wrapped.parameters(), 0.05, momentum=0.9), LOSS, **options)
        for x, y in data:
            step(x, y)
        assert differences(list(plain.parameters()), list(model.parameters())) == []
        if rank == 0:
            assert differences(plain.state_dict(), model.state_dict()) == []
        assert_same_on_both(model.state_dict())


def check_one_communication_a_window_for_every_model(rank):
    """P1, P2, P3: whatever the form of the step, and however the forward was called."""
    forms = {
        "batch": lambda model, step, x, y: step(x, y),
        "loss": lambda model, step, x, y: step(LOSS(model(x), y)),
        "plain forward": lambda model, step, x, y: step(LOSS(model.module(x), y)),
        "two backwards": lambda model, step, x, y: (step.backward(model(x).square().mean()), step(LOSS(model(x), y))),
        "two losses of one forward": lambda model, step, x, y: (
            (out := model(x)),
            step.backward(out.square().mean(), retain_graph=True),
            step(LOSS(out, y)),
        ),
    }
    for kind, (name, call), accumulate in itertools.product(MODELS, forms.items(), (1, 3)):
        (_, _), (model, step) = twins(kind, accumulate=accumulate)
        sent = communications(step)
        for i, batch in enumerate(batches(6)):
            call(model, step, *half(batch, rank))
            assert len(sent) == (i + 1) // accumulate, (kind, name, accumulate)
        assert_same_on_both(model.state_dict())


def calls_of(run):
    """How many functions, in Python and in C, a call of `run` calls."""
    count = 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    run()
    run()
    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def check_a_step_adds_no_more_to_ddp_than_to_the_plain_loop(rank):
    x, y = half(batches(1, dtype=torch.float32)[0], rank)

    def by_hand(model):
        optimizer = SGD(model.parameters(), 0.05)

        def run():
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()

        return run

    def stepped(**options):
        model = net("mlp", torch.float32)
        _, step = optimize(model, SGD(model.parameters(), 0.05), LOSS, **options)
        return lambda: step(x, y)

    alone = calls_of(stepped(distributed=False)) - calls_of(by_hand(net("mlp", torch.float32)))
    over_ddp = calls_of(stepped()) - calls_of(by_hand(DistributedDataParallel(net("mlp", torch.float32))))
    assert over_ddp <= alone


def check_a_torch_whose_ddp_has_no_parts_of_a_forward(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotloop._exchange._before_forward", None)
        (_, _), (model, step) = twins("mlp")
        sent = communications(step)
        step(*half(batches(1)[0], rank))
    assert len(sent) == 1
    assert_same_on_both(model.state_dict())


def check_a_method_of_the_users_own_is_averaged_as_well(rank):
    """P4, and methods such as `get_action_and_value`: torch's hooks are on the parameters, so no way past them is left."""

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.body(x).tanh())

        def act(self, x):
            return self(x).logsumexp(1)

    for options in ({}, {"methods": ("act",)}):
        results = []
        for distributed in (False, True):
            torch.manual_seed(5)
            plain = Agent().double()
            model, step = optimize(plain, SGD(plain.parameters(), 0.1), distributed=distributed, **options)
            for x, y in batches(3):
                x = half((x, y), rank)[0] if distributed else x
                step(model.act(x).mean() + model.module.act(x).square().mean())
            results.append(plain)
        close(*results)


def check_the_model_is_the_users_own(rank):
    """M1, M4, M17: no prefix, no other class, and `model.module` as under DDP."""
    plain = net()
    model, step = optimize(plain, SGD(plain.parameters(), 0.1), LOSS)
    assert list(model.state_dict()) == list(net().state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in net().named_parameters()]
    assert isinstance(model, nn.Sequential)
    assert model.module is plain is model.__wrapped__
    assert step.plan["ddp"].choice == "on"
    assert f"rank {rank} of 2" in step.plan["ddp"].why
    copied = copy.deepcopy(model)
    copied(batches(1)[0][0]).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def check_ranks_start_with_the_weights_of_rank_0(rank):
    plain = nn.Sequential(net(seed=rank), nn.BatchNorm1d(3).double())
    plain[1].running_mean += rank
    model, _ = optimize(plain, SGD(plain.parameters(), 0.1), LOSS)
    assert_same_on_both(model.state_dict())
    close(model[0], net(seed=0))
    assert model[1].running_mean.tolist() == [0.0] * 3


def check_the_defaults_say_nothing_of_a_convolution_of_one_channel(rank):
    """channels_last gives its weight gradients in strides that DDP warns of; here a warning is an error."""
    images = torch.randn(8, 1, 12, 12)
    plain = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32)),
        *(nn.Flatten(), nn.Linear(32 * 64, 3)),
    )
    model, step = hotloop.optimize(plain, AdamW(plain.parameters()), LOSS, device="cpu", channels_last=True)
    for _ in range(3):
        step(images, torch.randint(3, (8,)))
    assert_same_on_both(model.state_dict())


def check_a_compiled_model(rank):
    results = []
    for wish in (False, {"backend": "eager"}):
        plain = net()
        model, step = hotloop.optimize(plain, SGD(plain.parameters(), 0.1), LOSS, device="cpu", compile=wish)
        for batch in batches(3):
            step(*half(batch, rank))
        results.append(model.state_dict())
    assert differences(*results) == []
    assert_same_on_both(results[0])


def check_an_evaluation_on_one_rank_alone_does_not_wait(rank):
    plain = nn.Sequential(net(), nn.BatchNorm1d(3).double())
    model, step = optimize(plain, SGD(plain.parameters(), 0.1), LOSS)
    (x, y), *_ = batches(1)
    step(*half((x, y), rank))
    if rank == 0:
        model.eval()(x)
        hotloop.fast_eval(lambda m: m(x).sum())(model)


def check_parameters_that_are_not_reached(rank):
    """They keep no gradient where no rank reaches them, and are averaged where one does."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b, self.never = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x, which):
            return {"a": self.a, "b": self.b}[which](self.body(x))

    for accumulate in (1, 2):
        plain = Heads()
        model, step = optimize(plain, AdamW(plain.parameters(), 0.1, weight_decay=0.5), accumulate=accumulate)
        start = copy.deepcopy(plain.state_dict())
        sent = communications(step)
        for i in range(4):
            which = "ab"[rank] if i < 2 else "a"
            if accumulate == 2 and i < 2:
                which = "ab"[i]  # the last backward of the window reaches one of them
            step(model(torch.randn(4, 6), which).square().mean())
        assert len(sent) == 4 // accumulate
        assert plain.never.weight.grad is None
        assert plain.b.weight.grad is None
        assert plain.a.weight.grad is not None
        assert differences(start["never.weight"], plain.never.weight.detach()) == []
        assert differences(start["b.weight"], plain.b.weight.detach()) != []
        assert_same_on_both(plain.state_dict())


def check_layers_are_frozen_and_unfrozen_on_the_way(rank):
    (alone, one), (model, step) = twins(make=partial(SGD, lr=0.1))
    for i, batch in enumerate(batches(6)):
        for m in (alone, model):
            m[0].requires_grad_(i not in (2, 3))
        one(*batch)
        step(*half(batch, rank))
    close(alone, model)
    assert_same_on_both(model.state_dict())


def check_what_a_window_has_gathered_is_averaged_although_its_layer_is_frozen(rank):
    """Or replaced, or taken from the optimizer: as one process applies it. What is new holds from there on."""

    def frozen(model, optimizer):
        model[0].requires_grad_(False)

    def replaced(model, optimizer):
        torch.manual_seed(5)
        model[0] = nn.Linear(6, 8).double()
        optimizer.add_param_group({"params": list(model[0].parameters())})

    def taken_away(model, optimizer):
        del optimizer.param_groups[0]["params"][:2]

    def frozen_and_taken_away(model, optimizer):
        frozen(model, optimizer)
        taken_away(model, optimizer)

    def closed(step, model, x, y):
        return step(x, y)

    def flushed(step, model, x, y):
        return step.flush()

    def closed_after_a_backward(step, model, x, y):
        step.backward(model(x).square().mean())
        return step(x, y)

    for change, end, (accumulate, before) in itertools.product(
        (frozen, replaced, taken_away, frozen_and_taken_away), (closed, flushed, closed_after_a_backward), ((2, 3), (3, 4))
    ):
        pairs = twins(make=partial(AdamW, lr=0.01), accumulate=accumulate, clip_norm=0.1)
        old = pairs[1][0][0].weight
        for alone, (m, step) in zip((True, False), pairs, strict=True):
            data = [batch if alone else half(batch, rank) for batch in batches(12)]
            for batch in data[:before]:
                step(*batch)
            change(m, step._optimizers[0])
            for batch in data[before:-4]:
                end(step, m, *batch)
            for batch in data[-4:]:
                step(*batch)
        close(*(m for m, _ in pairs))
        assert_same_on_both(pairs[1][0].state_dict(), old.detach())


def check_a_layer_is_frozen_in_a_window_that_one_rank_has_left_open(rank):
    """The other rank has no gradient of it, and none of the update before."""
    (alone, one), (model, step) = twins(make=partial(SGD, lr=0.5), accumulate=2)
    data = batches(3)
    for batch in data:
        one(*batch)
    for batch in data if rank else data[:2]:
        step(*batch)
    for m, s in ((alone, one), (model, step)):
        m[0].requires_grad_(False)
        assert s.flush()
        assert not s.flush()
    close(alone, model)


def check_a_window_in_which_a_layer_was_frozen_is_resumed(rank):
    (_, _), (model, step) = twins(accumulate=2)
    data = [half(b, rank) for b in batches(4)]
    for x, y in data[:3]:
        step(x, y)
    saved = copy.deepcopy((model.state_dict(), step._optimizers[0].state_dict(), step.state_dict()))
    plain = net()
    plain[0].requires_grad_(False)
    optimizer = MOMENTUM(plain.parameters())
    again, resumed = optimize(plain, optimizer, LOSS, accumulate=2)
    for loads, state in zip((again, optimizer, resumed), saved, strict=True):
        loads.load_state_dict(state)
    model[0].requires_grad_(False)
    for s in (step, resumed):
        s(*data[3])
    assert differences(model.state_dict(), again.state_dict()) == []
    assert_same_on_both(model.state_dict())


class Tables(nn.Module):
    """Two tables with sparse gradients, of which a batch reaches one or both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(10, 4, sparse=True), nn.EmbeddingBag(10, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, ids, both=True):
        return self.head(self.a(ids).mean(1) + (self.b(ids) if both else 0.0))


def check_tables_with_sparse_gradients(rank):
    torch.manual_seed(3)
    data = [(torch.randint(10, (8, 2)), torch.randint(3, (8,))) for _ in range(5)]
    for accumulate, weighed, freezes in itertools.product((1, 2), (False, True), (False, True)):
        made = []
        for distributed in (False, "auto"):
            torch.manual_seed(1)
            plain = Tables().double()
            model, step = optimize(plain, SGD(plain.parameters(), 0.5), accumulate=accumulate, distributed=distributed)
            made.append(plain)
            for i, batch in enumerate(data):
                ids, y = half(batch, rank) if distributed else batch
                step(LOSS(model(ids, both=i % 2 == 0), y), **({"weight": len(y)} if weighed else {}))
                if freezes and i == 2:
                    plain.b.requires_grad_(False)
            assert step.flush() == (accumulate == 2)
        close(*made)
        assert_same_on_both(made[1].state_dict())


def check_a_table_with_sparse_gradients_at_a_ragged_end(rank):
    """A table that no rank has reached in the update keeps its weights and has no gradient."""
    torch.manual_seed(1)
    plain = Tables()
    model, step = optimize(plain, SGD(plain.parameters(), 0.5), accumulate=2)
    for _ in range((2, 5)[rank]):
        step(LOSS(model(torch.randint(10, (4, 2)), both=False), torch.randint(3, (4,))))
    assert step.flush()
    assert plain.b.weight.grad is None
    assert step.updates == 3
    assert_same_on_both(plain.state_dict())


def check_parameters_outside_of_the_model_are_averaged(rank):
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    plain = net()
    model, step = optimize(plain, SGD([*plain.parameters(), scale], 0.1))
    for x, y in batches(3):
        x, y = half((x, y), rank)
        step(LOSS(model(x) * scale, y))
    assert scale.item() != 1.0
    assert_same_on_both(model.state_dict(), scale.detach())


def check_a_gan_of_two_steps_with_batch_norm(rank):
    """Two forwards of one BatchNorm in one loss, and gradients of another step's model, which are no one's to send."""
    generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    g, step_g = optimize(generator, SGD(generator.parameters(), 0.1))
    c, step_c = optimize(critic, SGD(critic.parameters(), 0.1))
    sent_g, sent_c = communications(step_g), communications(step_c)
    for x, _ in batches(4, dtype=torch.float32):
        fake = g(torch.randn(8, 2))
        step_c(c(x).mean() - c(fake.detach()).mean())
        step_g(c(fake).mean())
    assert (len(sent_g), len(sent_c)) == (4, 4)
    assert_same_on_both(generator.state_dict(), critic.state_dict())


def check_several_models_and_optimizers_in_one_step(rank):
    results = []
    for distributed in (False, "auto"):
        a, b = net(seed=1), net(seed=2)
        optimizers = [SGD(a.parameters(), 0.1), AdamW(b.parameters(), 0.01)]
        (x_model, y_model), step = optimize([a, b], optimizers, clip_norm=0.5, distributed=distributed)
        for batch in batches(4):
            x, y = half(batch, rank) if distributed else batch
            step(LOSS(x_model(x) + y_model(x), y))
        results.append((a, b))
    for alone, both in zip(*results, strict=True):
        close(alone, both)


def check_weights_count_among_those_of_all_ranks(rank):
    """Micro-batches of 1 to 6 rows, weighted by them, on both ranks: the mean over rows, as in one process with all."""
    sizes = [[(1, 6), (4, 2)], [(3, 3), (5, 1)]]  # windows of two micro-batches, for rank 0 and rank 1
    results = []
    for distributed in (False, "auto"):
        torch.manual_seed(7)
        plain = net()
        _, step = optimize(plain, SGD(plain.parameters(), 0.5), LOSS, accumulate=2, distributed=distributed)
        for window in sizes:
            rows = [(torch.randn(n, 6).double(), torch.randint(3, (n,))) for pair in window for n in pair]
            if distributed:
                for x, y in (rows[rank], rows[rank + 2]):
                    step(x, y, weight=len(x))
            else:
                whole = [torch.cat(parts) for parts in zip(*rows, strict=True)]
                for x, y in ([t[:5] for t in whole], [t[5:] for t in whole]):
                    step(x, y, weight=len(x))
        results.append(plain)
    close(*results)
    assert_same_on_both(results[1].state_dict())


def check_weights_that_are_zero(rank):
    """On one rank the first of a window, or all; on both, all; at the start, or later."""
    masked, sizes = batches(1)[0], [(0, 0), (0, 0), (0, 30), (5, 4), (0, 3), (0, 40), (5, 3), (0, 4)]  # on both ranks
    for order in (sizes, sizes[6:] + sizes[:6]):
        (alone, one), (model, step) = twins(make=partial(SGD, lr=0.5), accumulate=2)
        for pair in order:
            rows = [(torch.randn(n, 6).double(), torch.randint(3, (n,))) for n in pair]
            whole = [torch.cat(columns) for columns in zip(*rows, strict=True)]
            one(*(whole if any(pair) else masked), weight=sum(pair))
            step(*(rows[rank] if pair[rank] else masked), weight=pair[rank])
        close(alone, model)
        assert_same_on_both(model.state_dict())
        assert step.updates == one.updates == 4


def check_a_rank_without_a_batch(rank):
    """In every precision, with and without weights, which may begin on the way."""
    for precision, weights, accumulate in itertools.product(
        ("fp32", "fp16"), ((1, 1, 1, 1, 1), (None,) * 5, (None, None, 4, 4, 4)), (1, 2)
    ):
        dtype = torch.float64 if precision == "fp32" else torch.float32
        results = []
        for distributed in (False, "auto"):
            plain = net(dtype=dtype)
            _, step = hotloop.optimize(
                plain,
                SGD(plain.parameters(), 0.5),
                LOSS,
                device="cpu",
                precision=precision,
                fused=False,
                accumulate=accumulate,
                clip_norm=None if None in weights else 0.1,
                distributed=distributed,
            )
            for batch, weight in zip(batches(5, dtype=dtype), weights, strict=True):
                if rank == 0 or not distributed:
                    step(*batch, **({} if weight is None else {"weight": weight}))
            assert step.flush() == (accumulate == 2)
            results.append(plain)
        assert step.updates == -(-5 // accumulate)
        assert_same_on_both(plain.state_dict(), step.updates, step.skipped, step.scale)
        if None not in weights:  # the mean is over what was in an update, not over the ranks
            close(*results, tolerance=1e-6 if precision == "fp32" else 2e-4)


def check_weights_at_a_ragged_end(rank):
    """Each update is the mean over the rows that were in it, also when one rank has none any more."""
    (alone, one), (model, step) = twins(make=partial(SGD, lr=0.5))
    torch.manual_seed(7)
    rows = [[(torch.randn(n, 6).double(), torch.randint(3, (n,))) for n in sizes] for sizes in ((3, 5), (2,), (4,))]
    for parts in rows:
        one(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        if rank < len(parts):
            x, y = parts[rank]
            step(x, y, weight=len(x))
    assert not step.flush()
    close(alone, model)
    assert step.updates == 3


def check_flush_at_a_ragged_end(rank):
    """Ranks with different numbers of batches end together, with the same weights and counters; gradients are sent once."""
    for accumulate, counts in ((1, (5, 3)), (2, (5, 4)), (4, (10, 9)), (4, (8, 7)), (3, (0, 7)), (2, (3, 3)), (2, (4, 4))):
        plain = net()
        model, step = optimize(plain, AdamW(plain.parameters(), 0.01), LOSS, accumulate=accumulate, clip_norm=1.0)
        for batch in batches(counts[rank]):
            step(*half(batch, rank))
        sent = communications(step) if counts == (3, 3) else []
        done = step.flush()
        left = [(n % accumulate) for n in counts]
        assert done == (any(left) and max(counts) % accumulate != 0), (accumulate, counts)
        if counts == (3, 3):
            assert len(sent) == 1
        assert step.flush() is False
        assert step.updates == -(-max(counts) // accumulate)
        assert_same_on_both(model.state_dict(), step.updates, done)
        for batch in batches(accumulate):  # and go on with the next epoch
            step(*half(batch, rank))
        assert_same_on_both(model.state_dict())


def check_flush_is_the_mean_over_what_is_left(rank):
    for rescale in (True, False):
        (alone, one), (model, step) = twins(make=partial(SGD, lr=0.5), accumulate=4)
        for batch in batches(6):
            one(*batch)
            step(*half(batch, rank))
        assert one.flush(rescale=rescale)
        assert step.flush(rescale=rescale)
        close(alone, model)
    # One rank alone has something left: its mean, undiluted.
    (alone, one), (model, step) = twins(make=partial(SGD, lr=0.5), accumulate=2)
    batch = batches(1)[0]
    one(*batch)
    one.flush()
    if rank == 1:
        step(*batch)
    step.flush()
    close(alone, model)


def check_flush_leaves_the_gradients_of_the_last_update(rank):
    (_, _), (model, step) = twins()
    step(*half(batches(1)[0], rank))
    before = [p.grad.clone() for p in model.parameters()]
    assert not step.flush()
    assert differences(before, [p.grad for p in model.parameters()]) == []


def check_skips_in_float16_are_agreed_on(rank):
    """An overflow on one rank skips the update on all, halves the scale, and leaves the scheduler."""
    for fused in (False, True):
        plain = net(dtype=torch.float32)
        optimizer = SGD(plain.parameters(), 0.1, momentum=0.9)
        scheduler = StepLR(optimizer, 1, 0.5)
        model, step = hotloop.optimize(
            plain, optimizer, LOSS, device="cpu", precision="fp16", fused=fused, scheduler=scheduler, accumulate=2
        )
        start = copy.deepcopy(plain.state_dict())
        data = [half(b, rank) for b in batches(4, dtype=torch.float32)]
        for i, (x, y) in enumerate(data):
            metrics = step(x * (float("inf") if (rank, i) == (1, 0) else 1), y)
            if i == 1:
                assert metrics.skipped
                assert differences(start, plain.state_dict()) == []
        assert not metrics.skipped
        assert (step.updates, step.skipped, step.scale, scheduler.last_epoch) == (1, 1, 32768.0, 1)
        assert_same_on_both(model.state_dict())


def check_the_mean_is_over_all_ranks_by_their_weights(rank):
    plain = net()
    _, step = optimize(plain, SGD(plain.parameters(), 0.0), LOSS)
    assert step.mean() == {}
    data = [half(b, rank) for b in batches(3)]
    for x, y in data:
        step(x, y)
    told = everyone([LOSS(plain(x), y).item() for x, y in data])
    losses = [loss for rank_losses in told for loss in rank_losses]
    mean = step.mean()
    assert abs(mean["loss"] - sum(losses) / 6) < 1e-12
    assert_same_on_both(mean)
    # By weight, and a metric that one rank alone has.
    for i, weight in enumerate(((1, 2), (5, 0))[rank]):
        step(LOSS(plain(data[i][0]), data[i][1]), weight=weight, **({"extra": 3.0} if rank else {}))
    mean = step.mean()
    expected = (told[0][0] * 1 + told[0][1] * 2 + told[1][0] * 5) / 8
    assert abs(mean["loss"] - expected) < 1e-12
    assert mean["extra"] == 3.0


def check_lbfgs(rank):
    for line_search in (None, "strong_wolfe"):
        make = partial(torch.optim.LBFGS, max_iter=6, line_search_fn=line_search)
        (alone, one), (model, step) = twins(make=make)
        for batch in batches(2):
            one(*batch)
            step(*half(batch, rank))
        close(alone, model)


def check_a_step_resumes_in_the_middle_of_a_window(rank):
    (_, _), (model, step) = twins(accumulate=2, clip_norm=0.1)
    data = [half(b, rank) for b in batches(6)]
    for x, y in data[:3]:
        step(x, y)
    saved = copy.deepcopy((model.state_dict(), step.state_dict()))
    optimizer_state = copy.deepcopy(step._optimizers[0].state_dict())
    for x, y in data[3:]:
        step(x, y)
    plain = net()
    optimizer = SGD(plain.parameters(), 0.05, momentum=0.9)
    again, resumed = optimize(plain, optimizer, LOSS, accumulate=2, clip_norm=0.1)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(saved[1])
    for x, y in data[3:]:
        resumed(x, y)
    assert differences(model.state_dict(), again.state_dict()) == []


def check_an_optimizer_stepped_from_outside_is_noticed(rank):
    plain = net()
    optimizer = SGD(plain.parameters(), 0.1)
    model, step = optimize(plain, optimizer, LOSS)
    x, y = half(batches(1)[0], rank)
    step(x, y)
    optimizer.zero_grad()
    LOSS(model(x), y).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["not averaged" in str(w.message) for w in caught] == [True]


def check_ranks_must_agree(rank):
    def other(**options):
        plain = options.pop("model", None) or net()
        make = options.pop("make", partial(SGD, lr=0.1))
        optimizer = make(plain.parameters())
        return lambda: optimize(plain, optimizer, LOSS, **options)

    wider = nn.Sequential(nn.Linear(6, 8 + rank), nn.Linear(8 + rank, 3))
    raises(ValueError, other(model=wider), "'0.weight'", "(9, 6)", "on rank 1", "(8, 6)", "on rank 0")
    raises(ValueError, other(accumulate=1 + rank), "accumulate is 2 on rank 1", "1 on rank 0")
    raises(ValueError, other(clip_norm=rank or None), "clip_norm is 1 on rank 1", "None on rank 0")
    raises(
        ValueError, other(make=partial((SGD, AdamW)[rank], lr=0.1)), "optimizers is ['AdamW'] on rank 1", "['SGD'] on rank 0"
    )
    raises(
        ValueError,
        other(make=partial(SGD, lr=0.1 * (1 + rank))),
        "lr in group 0 of optimizer 0 is 0.2 on rank 1",
        "0.1 on rank 0",
    )
    raises(ValueError, other(precision=("fp32", "bf16")[rank], exact=False), "precision is bf16 on rank 1", "fp32 on rank 0")
    raises(ValueError, other(model=nn.LazyLinear(3)), "no shape yet", "one batch")
    raises(ValueError, other(model=net().requires_grad_(False)), "requires grad", "unfreeze")
    other()()


def check_a_model_that_was_all_frozen_for_a_while_trains_again(rank):
    plain = net()
    _, step = optimize(plain, SGD(plain.parameters(), 0.1), LOSS)
    x, y = half(batches(1)[0], rank)
    step(x, y)
    plain.requires_grad_(False)
    raises(RuntimeError, step.flush, "requires a gradient")  # torch's own words
    plain.requires_grad_(True)
    before = copy.deepcopy(plain.state_dict())
    assert [step(x, y).updated for _ in range(2)] == [True, True]
    assert differences(before, plain.state_dict()) != []
    assert_same_on_both(plain.state_dict())


def check_what_leaves_the_group_alone(rank):
    plain = net(seed=rank)
    _, step = optimize(plain, SGD(plain.parameters(), 0.1), LOSS, distributed=False)
    assert type(step) is hotloop._step.Step
    assert step.plan["ddp"].choice == "off"
    if rank == 0:
        step(*batches(1)[0])  # waits for nobody
        step.flush()
        step.mean()
    inference = optimize(net())
    assert inference(batches(1)[0][0]).shape == (8, 3)


def check_the_group_stays_the_users(rank):
    plain = net()
    optimize(plain, SGD(plain.parameters(), 0.1), LOSS)
    assert dist.is_initialized()
    raises(ValueError, lambda: optimize(plain, SGD(plain.parameters(), 0.1), LOSS, accumulate=1 + rank), "accumulate")
    assert dist.is_initialized()
