"""Optimizers, their state and ties follow parameters that move or are replaced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hotloop._rebind import following


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def trained(make, optimizer=torch.optim.Adam, **options):
    module = make()
    opt = optimizer(module.parameters(), **options)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    return module, opt


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_groups_and_state_are_pointed_to_new_parameters():
    """D1."""
    module, optimizer = trained(lambda: nn.Linear(4, 2))
    old = list(module.parameters())
    with following(module, [optimizer]):
        module.to("meta")
    assert all(new is not o for new, o in zip(module.parameters(), old, strict=True))
    assert [id(p) for p in parameters(optimizer)] == [id(p) for p in module.parameters()]
    assert {id(p) for p in optimizer.state} == {id(p) for p in module.parameters()}


def test_state_goes_where_its_parameter_is():
    """D1 to D4: every tensor of the state but the step counter, which an unfused kernel wants on the host."""
    module, optimizer = trained(lambda: nn.Linear(4, 2))
    with following(module, [optimizer]):
        module.to("meta")
    for p in module.parameters():
        devices = {key: value.device.type for key, value in optimizer.state[p].items()}
        assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_the_step_counter_follows_where_the_kernel_wants_it(option):
    """O10."""
    module, optimizer = trained(lambda: nn.Linear(4, 2))
    optimizer.param_groups[0][option] = True
    with following(module, [optimizer]):
        module.to("meta")
    assert {optimizer.state[p]["step"].device.type for p in module.parameters()} == {"meta"}


def test_ties_are_kept():
    """E9, F-23: `Module.to` unties where it makes new parameters."""
    plain = Tied().to("meta")
    assert plain.head.weight is not plain.embed.weight
    module, optimizer = trained(Tied)
    with following(module, [optimizer]):
        module.to("meta")
    assert module.head.weight is module.embed.weight
    assert len(parameters(optimizer)) == len(set(map(id, parameters(optimizer)))) == 2


def test_loading_by_assignment():
    """E7, F-27d: the optimizer would train tensors that nobody uses."""
    module, optimizer = trained(Tied)
    state = copy.deepcopy(Tied().state_dict())
    with following(module, [optimizer]):
        module.load_state_dict(state, assign=True)
    assert module.head.weight is module.embed.weight
    assert {id(p) for p in parameters(optimizer)} == {id(p) for p in module.parameters()}
    before = module.embed.weight.detach().clone()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(before, module.embed.weight)


def test_momentum_survives_a_replacement():
    module, optimizer = trained(lambda: nn.Linear(4, 2), torch.optim.SGD, lr=0.1, momentum=0.9)
    momentum = optimizer.state[module.weight]["momentum_buffer"]
    with following(module, [optimizer]):
        module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    assert optimizer.state[module.weight]["momentum_buffer"] is momentum


def test_several_optimizers_and_groups_keep_their_options_and_order():
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    one = torch.optim.SGD([{"params": [module[0].weight], "lr": 0.5}, {"params": [module[0].bias]}], lr=0.1)
    two = torch.optim.AdamW(module[1].parameters())
    with following(module, [one, two]):
        module.to("meta")
    assert [group["lr"] for group in one.param_groups] == [0.5, 0.1]
    assert [id(p) for p in (*parameters(one), *parameters(two))] == [id(p) for p in module.parameters()]


def test_a_parameter_of_another_module_is_left_alone():
    module, other = nn.Linear(4, 2), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*module.parameters(), other], lr=0.1)
    with following(module, [optimizer]):
        module.to("meta")
    assert parameters(optimizer)[-1] is other
    assert other.device.type == "cpu"


def test_nothing_happens_where_nothing_moved():
    module, optimizer = trained(lambda: nn.Linear(4, 2))
    before = [id(p) for p in parameters(optimizer)], [{k: id(v) for k, v in s.items()} for s in optimizer.state.values()]
    with following(module, [optimizer]):
        module.float()
    assert (
        [id(p) for p in parameters(optimizer)],
        [{k: id(v) for k, v in s.items()} for s in optimizer.state.values()],
    ) == before


def test_it_follows_also_when_the_move_fails_halfway():
    module, optimizer = trained(lambda: nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="halfway"), following(module, [optimizer]):
        module.to("meta")
        raise RuntimeError("halfway")
    assert [id(p) for p in parameters(optimizer)] == [id(p) for p in module.parameters()]


def test_a_parameter_that_the_user_removes_or_adds_is_no_concern():
    module, optimizer = trained(lambda: nn.Linear(4, 2))
    bias = module.bias
    with following(module, [optimizer]):
        module.bias = None
        module.scale = nn.Parameter(torch.ones(1))
    assert parameters(optimizer) == [module.weight, bias]


def test_the_swap_of_parameters_on_conversion_is_fine():
    """F-23: with torch's other way to convert, parameters keep their identity."""
    module, optimizer = trained(Tied)
    weight = module.embed.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with following(module, [optimizer]):
            module.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert module.embed.weight is module.head.weight is weight
    assert optimizer.state[weight]["exp_avg"].is_meta


def quadratic(module):
    def closure():
        module.zero_grad()
        loss = module(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    return closure


def test_an_optimizer_that_keeps_the_list_of_a_group():
    """O1: LBFGS reads its parameters off the list that it was made with."""
    module = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(module.parameters())
    with following(module, [optimizer]):
        module.load_state_dict(copy.deepcopy(nn.Linear(4, 2).state_dict()), assign=True)
    optimizer.step(quadratic(module))
    assert quadratic(module)().item() < 1e-6


def test_state_at_any_depth_goes_along():
    """O1: LBFGS keeps lists of directions, all in the state of its first parameter."""
    module = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)
    optimizer.step(quadratic(module))
    with following(module, [optimizer]):
        module.to("meta")
    state = optimizer.state[module.weight]
    assert state["d"].is_meta
    assert [t.device.type for t in state["old_dirs"]] == ["meta"] * len(state["old_dirs"])
    assert state["old_dirs"]
