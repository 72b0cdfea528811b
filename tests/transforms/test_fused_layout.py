"""Fused kernels read memory as it lies; what user code lays out otherwise must not change what is learnt."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from hotloop import optimize

FUSED = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: Adagrad(p, lr=0.1),
}
each = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.late = nn.Conv2d(3, 6, 3), nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x, late=True):
        h = self.head(self.conv(x).amax((2, 3)))
        return self.late(h) if late else h


def batches(count: int):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, 8, 8, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(count)]


def write_transposed(model: nn.Module) -> None:
    """As code does that orthogonalises or projects gradients."""
    for p in model.parameters():
        if p.dim() == 2:
            p.grad = p.grad.t().contiguous().t()
        elif p.dim() == 4:
            p.grad = p.grad.contiguous(memory_format=torch.channels_last)


def convert(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def assign(model: nn.Module) -> None:
    """As code does that loads or averages weights by hand."""
    model.conv.weight.data = model.conv.weight.data.contiguous(memory_format=torch.channels_last)


def back(model: nn.Module) -> None:
    model.to(memory_format=torch.contiguous_format)


def assert_as_plain(make, *, between=None, before_update=None, start=lambda model: model, inner=False) -> None:
    """The same weights as the plain loop with the plain optimizer.

    `between` is called on both models after two steps: on the wrapped one, or on the plain module in it (`inner`).
    """
    raw, plain = Net(), Net()
    start(raw)
    start(plain)
    ours, theirs = make(raw.parameters()), make(plain.parameters())
    hook = None if before_update is None else lambda: before_update(raw)
    model, step = optimize(raw, ours, nn.functional.mse_loss, before_update=hook, precision="fp32")
    assert step.plan["fused_optimizer"].choice == "on"
    for i, (x, y) in enumerate(batches(4)):
        if between is not None and i == 2:
            between(raw if inner else model)
            between(plain)
        step(x, y)
        theirs.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        theirs.step()
    for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4)


@each
def test_gradients_that_user_code_lays_out_otherwise(make):
    assert_as_plain(make, before_update=write_transposed)


@each
def test_a_model_that_changes_its_layout_after_some_steps(make):
    """The optimizer's state follows."""
    assert_as_plain(make, between=convert)


@each
@pytest.mark.parametrize(("start", "between"), [(back, convert), (back, assign), (convert, back)])
def test_the_plain_module_changes_its_layout_after_some_steps(make, start, between):
    """Nobody tells the step: it sees the strides."""
    assert_as_plain(make, start=start, between=between, inner=True)


@each
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_checkpoint_in_another_layout(make, layout):
    plain = Net()
    theirs = make(plain.parameters())
    train(plain, theirs, batches(2))
    raw = Net().to(memory_format=layout)
    ours = make(raw.parameters())
    model, step = optimize(raw, ours, nn.functional.mse_loss, precision="fp32")
    plain.to(memory_format=torch.channels_last)
    saved = copy.deepcopy(theirs.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if value is not None and value.dim() == 4:
                state[key] = value.contiguous(memory_format=torch.channels_last)
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(saved)
    plain.to(memory_format=torch.contiguous_format)
    for x, y in batches(2):
        step(x, y)
    train(plain, theirs, batches(2))
    for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4)


def train(model, optimizer, data) -> None:
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@each
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_parameter_whose_first_gradient_comes_later(make, precision):
    raw, plain = Net(), Net()
    ours, theirs = make(raw.parameters()), make(plain.parameters())
    model, step = optimize(raw, ours, precision=precision, channels_last=False)
    for i, (x, y) in enumerate(batches(4)):
        step(nn.functional.mse_loss(model(x, late=i > 1), y))
        theirs.zero_grad()
        nn.functional.mse_loss(plain(x, late=i > 1), y).backward()
        theirs.step()
    assert step.updates + step.skipped == 4
    if precision == "fp32":
        for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4)


def test_exact_with_a_fused_optimizer_of_the_users_own_is_bitwise():
    raw, plain = Net(), Net()
    ours = SGD(raw.parameters(), lr=0.1, momentum=0.9, fused=True)
    theirs = SGD(plain.parameters(), lr=0.1, momentum=0.9, fused=True)
    step = optimize(raw, ours, nn.functional.mse_loss, exact=True).step
    for x, y in batches(4):
        step(x, y)
    train(plain, theirs, batches(4))
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), plain.parameters(), strict=True))


def slice_of_another(model: nn.Module) -> None:
    """As code does that keeps weights in a larger buffer."""
    for layer in (model.conv, model.head):
        room = torch.full((layer.weight.shape[0], *(n + 2 for n in layer.weight.shape[1:])), 7.0)
        part = room[(slice(None), *(slice(n) for n in layer.weight.shape[1:]))]
        layer.weight.data = part.copy_(layer.weight.data)
        layer.room = room


@each
@pytest.mark.parametrize("before", [0, 2], ids=["from the start", "after some steps"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_parameter_that_becomes_a_slice_of_another_tensor(make, before, precision):
    """A fused kernel would write over what lies between its elements."""
    raw, plain = Net(), Net()
    ours, theirs = make(raw.parameters()), make(plain.parameters())
    step = optimize(raw, ours, nn.functional.mse_loss, precision=precision, channels_last=False).step
    assert step.plan["fused_optimizer"].choice == "on"
    for i, (x, y) in enumerate(batches(4)):
        if i == before:
            slice_of_another(raw)
            slice_of_another(plain)
        step(x, y)
        if precision == "fp32":
            train(plain, theirs, [(x, y)])
    for layer in (raw.conv, raw.head):
        assert layer.weight.data_ptr() == layer.room.data_ptr(), "it is the same slice still"
        between = layer.room.clone()
        between[tuple(slice(n) for n in layer.weight.shape)] = 7.0
        assert torch.equal(between, torch.full_like(between, 7.0))
    if precision == "fp32":
        for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4)
    else:
        assert step.updates + step.skipped == 4


def grown(model: nn.Module) -> None:
    """As code does that adds words to an embedding or classes to a head."""
    model.head.weight.data = torch.randn(9, 6)
    model.head.bias.data = torch.randn(9)


def of_a_larger_model(optimizer: torch.optim.Optimizer) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if key != "step" and isinstance(value, torch.Tensor):
                state[key] = torch.cat([value, value])
    optimizer.load_state_dict(saved)


@each
@pytest.mark.parametrize("how", ["parameters grow", "a checkpoint of a larger model", "in before_update"])
def test_sizes_that_do_not_fit_are_an_error_and_no_write_beyond_memory(make, how):
    """torch's kernels without `fused` say so as well."""
    raw = Net()
    optimizer = make(raw.parameters())
    calls = []

    def before_update():
        calls.append(0)
        if len(calls) == 3 and how == "in before_update":
            grown(raw)

    model, step = optimize(raw, optimizer, before_update=before_update)
    data = batches(3)
    for x, y in data[:2]:
        step(nn.functional.mse_loss(model(x), y))
    if how == "parameters grow":
        raw.late = nn.Linear(9, 4)
        grown(raw)
    if how == "a checkpoint of a larger model":
        of_a_larger_model(optimizer)
    with pytest.raises(RuntimeError, match=r"shape \(.*make a new optimizer"):
        step(nn.functional.mse_loss(model(data[2][0]), data[2][1]))
    if how == "parameters grow":  # and the way out that the message names
        for p in raw.head.parameters():
            optimizer.state.pop(p)
        step(nn.functional.mse_loss(model(data[2][0]), data[2][1]))
        assert step.updates == 3
