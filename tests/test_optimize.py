"""`optimize`: what it returns, what it leaves alone, and several models, losses and optimizers together."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop import Plan, optimize
from hotloop._optimized import Optimized
from hotloop._step import Step

X, Y = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 1, 0, 1])


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(*modules, **options):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], **{"lr": 0.1, **options})


# --- what it returns ----------------------------------------------------------------------------------------------------


def test_the_one_line():
    raw = net()
    model, step = optimize(raw, sgd(raw), nn.CrossEntropyLoss())
    before = copy.deepcopy(raw.state_dict())
    metrics = step(X, Y)
    assert metrics["loss"] > 0
    assert not torch.equal(before["0.weight"], raw.state_dict()["0.weight"])
    assert model.__wrapped__ is raw


def test_it_returns_a_pair_with_names():
    raw = net()
    made = optimize(raw, sgd(raw), nn.CrossEntropyLoss())
    assert isinstance(made, Optimized)
    assert made.model is made[0]
    assert made.step is made[1]
    assert isinstance(made.step, Step)
    assert isinstance(made.step.plan, Plan)


def test_a_pair_that_was_not_unpacked_says_so():
    raw = net()
    made = optimize(raw, sgd(raw), nn.CrossEntropyLoss())
    with pytest.raises(
        AttributeError, match=r"no 'train' here: optimize\(model, optimizer, \.\.\.\) returns both; write `model, step ="
    ):
        made.train()
    assert not hasattr(made, "parameters")
    assert copy.copy(made) == made


def test_without_an_optimizer_it_returns_the_model_alone():
    raw = net()
    model = optimize(raw)
    assert model.__wrapped__ is raw
    assert torch.equal(model(X), raw(X))


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_models_come_back_in_a_list(kind):
    raws = [net(), net()]
    models, step = optimize(kind(raws), sgd(*raws))
    assert isinstance(models, list)
    assert [m.__wrapped__ for m in models] == raws
    assert isinstance(step, Step)
    assert [m.__wrapped__ for m in optimize(kind(raws))] == raws


def test_a_list_of_one_comes_back_as_a_list():
    raw = net()
    models, step = optimize([raw], sgd(raw), F.cross_entropy)
    assert [m.__wrapped__ for m in models] == [raw]
    step(X, Y)


def test_wrapping_the_plain_module_anew_is_fine():
    raw = net()
    first = optimize(raw, precision="bf16")
    second = optimize(first.__wrapped__, precision="fp32")
    assert not torch.equal(first(X), second(X))


# --- what it leaves alone -----------------------------------------------------------------------------------------------


def test_nothing_is_drawn_copied_or_flagged():
    """C3: flags are checked by the guard of every test as well."""
    raw = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.LazyLinear(2))
    torch.backends.cudnn.benchmark = False
    random, before = torch.get_rng_state(), [p.data_ptr() for p in raw[0].parameters()]
    optimize(raw, torch.optim.SGD(raw[0].parameters(), lr=0.1), F.cross_entropy)
    assert torch.equal(torch.get_rng_state(), random)
    assert [p.data_ptr() for p in raw[0].parameters()] == before
    assert torch.backends.cudnn.benchmark is False


def test_modes_and_frozen_parts_are_the_users():
    """N18, N24: a BatchNorm frozen by hand stays frozen, in a step too."""
    raw = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    raw[1].eval().requires_grad_(False)
    statistics = raw[1].running_mean.clone()
    model, step = optimize(raw, sgd(raw), F.cross_entropy)
    step(X, Y)
    assert (raw.training, raw[1].training) == (True, False)
    assert torch.equal(raw[1].running_mean, statistics)
    assert raw[1].weight.grad is None
    assert model[1] is raw[1]


def test_the_optimizer_is_the_users_own():
    """G14, G15: what is changed on it holds from the next step on."""
    raw = net()
    optimizer = sgd(raw)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    _, step = optimize(raw, optimizer, F.cross_entropy, scheduler=scheduler)
    step(X, Y)
    assert scheduler.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == 0.05
    optimizer.param_groups[0]["lr"] = 0.0
    before = raw[0].weight.detach().clone()
    step(X, Y)
    assert torch.equal(raw[0].weight, before)


def test_it_keeps_nothing_alive():
    raw = net()
    optimizer = sgd(raw)
    model, step = optimize(raw, optimizer, F.cross_entropy)
    step(X, Y)
    gone = [weakref.ref(step), weakref.ref(model)]
    del model, step
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    F.cross_entropy(raw(X), Y).backward()
    optimizer.step()  # the user goes on without us


def test_the_module_outlives_its_wrapper_unchanged():
    raw = net()
    kept = set(vars(raw)), {name: len(v) for name, v in vars(raw).items() if name.endswith("hooks")}
    step = optimize(raw, sgd(raw), F.cross_entropy).step
    step(X, Y)
    assert (set(vars(raw)), {name: len(v) for name, v in vars(raw).items() if name.endswith("hooks")}) == kept


# --- exact --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    net,
    lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(), nn.Linear(3, 2)
    ),
], ids=["mlp", "convnet"])  # fmt: skip
def test_exact_gives_the_bits_of_the_plain_loop(make):
    raw = make()
    twin = copy.deepcopy(raw)
    _, step = optimize(raw, sgd(raw, momentum=0.9), F.cross_entropy, exact=True)
    optimizer = sgd(twin, momentum=0.9)
    for seed in range(5):
        torch.manual_seed(seed)
        loss = step(X, Y)["loss"]
        torch.manual_seed(seed)
        optimizer.zero_grad()
        plain = F.cross_entropy(twin(X), Y)
        plain.backward()
        optimizer.step()
        assert loss == plain.item()
    assert all(torch.equal(a, b) for a, b in zip(raw.state_dict().values(), twin.state_dict().values(), strict=True))


# --- several models -----------------------------------------------------------------------------------------------------


def test_one_optimizer_over_two_critics():
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    twins = copy.deepcopy([one, two])
    (a, b), step = optimize([one, two], sgd(one, two))
    loss = step(a(X).square().mean() + (b(X) - 1).square().mean())["loss"]
    optimizer = sgd(*twins)
    plain = twins[0](X).square().mean() + (twins[1](X) - 1).square().mean()
    plain.backward()
    optimizer.step()
    assert loss == plain.item()
    assert torch.equal(one.weight, twins[0].weight)
    assert torch.equal(two.weight, twins[1].weight)


def test_inside_the_step_every_model_keeps_its_graph():
    one, two = nn.Linear(4, 4), nn.Linear(4, 2)
    seen = []
    (a, b), step = optimize([one, two], sgd(one, two))
    a.eval()
    b.eval()
    two.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    with pytest.raises(RuntimeError, match="eval mode"):
        step(b(a(X)).sum())
    a.train()
    b.train()
    step(b(a(X)).sum())
    assert seen == [False, True]


def test_a_batch_for_several_models_says_what_to_do():
    one, two = nn.Linear(4, 2), nn.Linear(4, 2)
    _, step = optimize([one, two], sgd(one, two), F.cross_entropy)
    with pytest.raises(TypeError, match=r"several models.*step\(loss\)"):
        step(X, Y)


def test_a_list_of_optimizers():
    """One model, two optimizers: both step, each its own parameters."""
    raw = net()
    before = copy.deepcopy(raw.state_dict())
    _, step = optimize(raw, [sgd(raw[0]), torch.optim.Adam(raw[2].parameters())], F.cross_entropy)
    step(X, Y)
    assert all(not torch.equal(before[name], value) for name, value in raw.state_dict().items())


def test_a_parameter_of_no_model_trains_and_is_named_in_the_plan():
    raw, alpha = net(), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*raw.parameters(), alpha], lr=0.1)
    model, step = optimize(raw, optimizer)
    step(model(X).square().mean() + (alpha - 1).square().sum())
    assert alpha.item() == pytest.approx(0.2)
    assert "(1,)" in step.plan["other parameters"].why


def test_a_loss_function_with_parameters_trains():
    """Metric learning: a head with its own weights."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(2, 2))

        def forward(self, output, target):
            return F.cross_entropy(output @ self.proxies, target)

    raw, head = net(), Head()
    before = head.proxies.detach().clone()
    _, step = optimize(raw, sgd(raw, head), head)
    step(X, Y)
    assert not torch.equal(head.proxies, before)
    assert "other parameters" not in step.plan.as_dict()


def test_a_loss_function_alone_may_train():
    """A head on features that need no training of their own."""
    raw, head = net(), nn.Linear(2, 1)

    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, output, target):
            return self.head(output).sigmoid().sub(target[:, None]).square().mean()

    weights, before = copy.deepcopy(raw.state_dict()), head.weight.detach().clone()
    _, step = optimize(raw, sgd(head), Score())
    step(X, Y)
    assert not torch.equal(head.weight, before)
    assert all(torch.equal(weights[name], value) for name, value in raw.state_dict().items())


# --- placement of what belongs to the model ------------------------------------------------------------------------------


def test_the_loss_function_goes_where_the_model_goes():
    raw = net()
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(2))
    model, _ = optimize(raw, sgd(raw), loss_fn, device="meta")
    assert model.device == torch.device("meta")
    assert loss_fn.weight.is_meta


def test_several_models_go_to_one_device_with_their_optimizers():
    one, two = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = sgd(one, two)
    (a, b), _ = optimize([one, two], optimizer, device="meta")
    assert a.device == b.device == torch.device("meta")
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for m in (one, two) for p in m.parameters()]
