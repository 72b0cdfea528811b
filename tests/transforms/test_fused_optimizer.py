"""Fused kernels, switched on in the user's own optimizer: O10 to O15, G14, G15 of the field cases."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

from hotloop import optimize

CE = nn.CrossEntropyLoss()
FUSED = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "AdamW": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.1),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batches(count: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(5, 4, generator=generator), torch.randint(2, (5,), generator=generator)


def train_plain(model, optimizer, data) -> None:
    for x, y in data:
        optimizer.zero_grad()
        CE(model(x), y).backward()
        optimizer.step()


def assert_close(a, b) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_switched_on_in_place(make):
    """O14: the optimizer stays what it is; only the flag is set."""
    raw, plain = net(), net()
    optimizer, expected = make(raw.parameters()), make(plain.parameters())
    step = optimize(raw, optimizer, CE).step
    assert step.plan["fused_optimizer"].choice == "on"
    assert "3e-8" in step.plan["fused_optimizer"].why
    assert all(group["fused"] for group in optimizer.param_groups)
    for x, y in batches(6):
        step(x, y)
    train_plain(plain, expected, batches(6))
    assert_close(raw, plain)


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_state_of_a_running_optimizer_is_kept(make):
    raw, plain = net(), net()
    optimizer, expected = make(raw.parameters()), make(plain.parameters())
    train_plain(raw, optimizer, batches(3))
    train_plain(plain, expected, batches(3))
    step = optimize(raw, optimizer, CE).step
    for x, y in batches(3, seed=2):
        step(x, y)
    train_plain(plain, expected, batches(3, seed=2))
    assert_close(raw, plain)


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_checkpoint_goes_both_ways(make):
    """O10, O11: a plain checkpoint is loaded and the kernel stays fused; a saved one is as the user made the optimizer."""
    plain = net()
    optimizer = make(plain.parameters())
    train_plain(plain, optimizer, batches(3))
    raw = net()
    raw.load_state_dict(plain.state_dict())
    fused = make(raw.parameters())
    step = optimize(raw, fused, CE).step
    fused.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(group["fused"] for group in fused.param_groups)
    saved = fused.state_dict()
    assert [g["fused"] for g in saved["param_groups"]] == [g["fused"] for g in optimizer.state_dict()["param_groups"]]
    for x, y in batches(3, seed=2):
        step(x, y)
    train_plain(plain, optimizer, batches(3, seed=2))
    assert_close(raw, plain)
    again = make(net().parameters())
    again.load_state_dict(fused.state_dict())
    assert not any(group["fused"] for group in again.param_groups)


def test_added_groups_learning_rates_and_schedulers():
    """G14, G15."""
    raw, head = net(), nn.Linear(2, 2)
    optimizer = Adam(raw.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = optimize(raw, optimizer, CE, scheduler=scheduler).step
    optimizer.add_param_group({"params": head.parameters()})
    assert optimizer.param_groups[1]["fused"]
    step(*next(batches(1)))
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert scheduler.optimizer is optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: SGD(p, lr=0.1), "SGD without momentum"),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda p: RMSprop(p), "no fused kernel for RMSprop"),
        (lambda p: NAdam(p), "no fused kernel for NAdam"),
        (lambda p: Adam(p, foreach=True), "foreach=True"),
        (lambda p: Adam(p, fused=False), "left as it is"),
        (lambda p: Adam(p, fused=True), "left as it is"),
        (lambda p: Adam(p, differentiable=True), "differentiable"),
        (lambda p: Adam(p, lr=torch.tensor(0.1)), "tensor as learning rate"),
        (lambda p: Mine(p), "no fused kernel for"),
    ],
)
def test_left_alone_with_the_reason(make, reason):
    """O12, O15."""
    raw = net()
    optimizer = make(raw.parameters())
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    step = optimize(raw, optimizer, CE).step
    assert step.plan["fused_optimizer"].choice == "off"
    assert reason in step.plan["fused_optimizer"].why
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == before


def test_parameters_that_the_kernel_cannot_take_may_be_added():
    raw = net()
    optimizer = Adam(raw.parameters())
    step = optimize(raw, optimizer, CE).step
    step(*next(batches(1)))
    late = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    optimizer.add_param_group({"params": [late]})
    step(raw(torch.ones(1, 4)).sum() + late.abs().sum())
    assert step.plan["fused_optimizer"].choice == "off"
    assert "given parameters" in step.plan["fused_optimizer"].why
    assert not torch.equal(late, torch.ones(3, dtype=torch.cfloat))


def test_optimized_again_the_old_hooks_are_gone():
    raw = net()
    optimizer = Adam(raw.parameters())
    for _ in range(3):
        step = optimize(raw, optimizer, CE).step
    step(*next(batches(1)))
    assert len(optimizer._optimizer_step_post_hooks) == 1


class Mine(Adam):
    """Not exactly torch's: what its `step` does with the flag is not known."""


def test_exact_leaves_it_off():
    raw = net()
    optimizer = Adam(raw.parameters())
    assert optimize(raw, optimizer, CE, exact=True).step.plan["fused_optimizer"].choice == "off"
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    "make", [lambda p: RMSprop(p), lambda p: Adam(p, foreach=True), lambda p: SGD(p, momentum=0.9, dampening=0.5)]
)
def test_a_wish_that_cannot_be_met_raises(make):
    raw = net()
    optimizer = make(raw.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"optimize\(\.\.\., fused=True\): .*leave fused='auto'"):
        optimize(raw, optimizer, CE, fused=True)
    assert optimizer.state_dict() == before
    with pytest.raises(ValueError, match="fused='yes'"):
        optimize(raw, optimizer, CE, fused="yes")


def test_a_wish_is_obeyed_where_auto_would_not():
    raw = net()
    optimizer = SGD(raw.parameters(), lr=0.1)
    step = optimize(raw, optimizer, CE, fused=True).step
    step(*next(batches(1)))
    assert optimizer.param_groups[0]["fused"]
    assert step.plan["fused_optimizer"].why == "asked for"


def test_one_of_several():
    raw = net()
    optimizers = [Adam(raw[0].parameters()), RMSprop(raw[2].parameters())]
    step = optimize(raw, optimizers, CE).step
    step(*next(batches(1)))
    assert optimizers[0].param_groups[0]["fused"]
    assert "fused" not in optimizers[1].param_groups[0]
    assert "no fused kernel for RMSprop" in step.plan["fused_optimizer"].why


class Words(nn.Module):
    """Sparse gradients that no look at the model foresees."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(9, 3)), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(nn.functional.embedding(x, self.table, sparse=True).mean(1))


@pytest.mark.parametrize("make", [FUSED["SGD"], FUSED["Adagrad"]], ids=["SGD", "Adagrad"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_taken_back_at_the_first_sparse_gradient(make):
    torch.manual_seed(0)
    raw = Words()
    plain = copy.deepcopy(raw)
    if make is FUSED["SGD"]:
        optimizer, expected = SGD(raw.parameters(), 0.1, momentum=0.9), SGD(plain.parameters(), 0.1, momentum=0.9)
    else:
        optimizer, expected = make(raw.parameters()), make(plain.parameters())
    data = [(torch.randint(9, (4, 5)), torch.randint(2, (4,))) for _ in range(4)]
    step = optimize(raw, optimizer, CE).step
    assert step.plan["fused_optimizer"].choice == "on"
    for x, y in data:
        step(x, y)
    assert step.plan["fused_optimizer"].choice == "off"
    assert "sparse" in step.plan["fused_optimizer"].why
    assert not optimizer.param_groups[0]["fused"]
    train_plain(plain, expected, data)
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), plain.parameters(), strict=True))


def test_reverted_leaves_the_optimizer_as_it_was():
    raw = net()
    optimizer = Adam(raw.parameters())
    train_plain(raw, optimizer, batches(2))
    before, attributes = copy.deepcopy(optimizer.state_dict()), set(vars(optimizer))
    step = optimize(raw, optimizer, CE).step
    step._live.parts = step.plan["fused_optimizer"].revert(step._live.parts)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert set(vars(optimizer)) == attributes
    assert optimizer.defaults["fused"] is None
    assert not optimizer._optimizer_load_state_dict_post_hooks
    assert not optimizer._optimizer_state_dict_post_hooks


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_the_optimizer_can_be_copied(duplicate):
    raw = net()
    optimizer = Adam(raw.parameters())
    step = optimize(raw, optimizer, CE).step
    step(*next(batches(1)))
    copied = duplicate(optimizer)
    for p in (p for group in copied.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in copied.param_groups[0]["params"]]
    copied.step()
    assert all(not torch.equal(p, q) for p, q in zip(copied.param_groups[0]["params"], before, strict=True))


def test_a_training_step_in_float16_reads_nothing_more():
    """The kernel decides on the device whether to skip."""
    raw = net()
    step = optimize(raw, Adam(raw.parameters()), CE, precision="fp16").step
    x, y = next(batches(1))
    good = step(x, y)
    before = [p.detach().clone() for p in raw.parameters()]
    bad = step(x * float("inf"), y)
    assert (good.skipped, bad.skipped, step.updates, step.skipped) == (False, True, 1, 1)
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), before, strict=True))


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_slice_of_another_tensor_is_left_to_the_plain_kernel(make):
    """A fused kernel would write over its gaps, into memory that is no parameter."""
    torch.manual_seed(0)
    big = torch.randn(2, 8)
    raw, kept = nn.Linear(4, 2), big.clone()
    raw.weight = nn.Parameter(big[:, :4])
    plain = nn.Linear(4, 2)
    plain.load_state_dict(raw.state_dict())
    optimizer, expected = make(raw.parameters()), make(plain.parameters())
    step = optimize(raw, optimizer, CE).step
    assert "slices of others" in step.plan["fused_optimizer"].why
    for x, y in batches(4):
        step(x, y)
    train_plain(plain, expected, batches(4))
    assert_close(raw, plain)
    assert torch.equal(big[:, 4:], kept[:, 4:])


@pytest.mark.parametrize("first", [{}, {"fused": True}])
@pytest.mark.parametrize("then", [{"exact": True}, {"fused": False}, {}])
@pytest.mark.parametrize("users", [None, False, True])
def test_wrapping_anew_begins_with_what_the_user_has_made(users, then, first):
    """A cell of a notebook that runs again, this time with `exact=True`."""
    if users is False and first:
        first = {}  # that wish would be a contradiction
    raw = nn.Linear(4, 4)
    ours = Adam(raw.parameters(), fused=users)
    optimize(raw, ours, CE, **first)
    step = optimize(raw, ours, CE, **then).step
    fused = ours.param_groups[0]["fused"]
    if "exact" in then or "fused" in then:
        assert fused is users
        assert step.plan["fused_optimizer"].choice == "off"
    else:
        assert fused is (users is not False)
    assert ours.state_dict()["param_groups"][0]["fused"] is users
    step(torch.randn(3, 4), torch.arange(3))


def test_what_is_switched_back_comes_back_where_optimize_fails():
    raw = nn.Linear(4, 4)
    ours = Adam(raw.parameters())
    optimize(raw, ours, CE)
    with pytest.raises(ValueError, match="backend"):
        optimize(raw, ours, CE, exact=True, compile={"backend": "no such backend"})
    assert ours.param_groups[0]["fused"] is True
    assert ours.state_dict()["param_groups"][0]["fused"] is None


class Heads(nn.Module):
    """Of which a batch reaches one."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.LazyLinear(8), nn.ModuleList(nn.LazyLinear(3) for _ in range(2))

    def forward(self, x, task):
        return self.heads[task](self.body(x))


@pytest.mark.parametrize("fused", [None, True])
def test_lazy_layers_that_no_batch_has_reached(fused):
    raw = Heads()
    ours = Adam(raw.parameters(), fused=fused)
    step = optimize(raw, ours, CE, device="cpu").step
    assert fused or "lazy" in step.plan["fused_optimizer"].why
    for task in (0, 0, 1):
        assert step(torch.ones(4, 5), task, torch.arange(4) % 3).updated
