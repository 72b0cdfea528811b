"""The backward of a loss: what torch's public function does, also where its private one is not used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from hotloop import _backward, optimize


class Tagged(torch.Tensor):
    """A tensor with a `__torch_function__` of its own."""


def gradients_of(loss_fn):
    torch.manual_seed(1)
    net = nn.Linear(4, 2)
    _, step = optimize(net, SGD(net.parameters(), lr=0.0), loss_fn, device="cpu", exact=True)
    step(torch.ones(3, 4), torch.zeros(3, 2))
    return [p.grad.clone() for p in net.parameters()]


@pytest.fixture
def private(monkeypatch):
    """The losses that went past torch's public function."""
    seen = []
    run = _backward._run
    monkeypatch.setattr(_backward, "_run", lambda losses, *args, **kwargs: (seen.append(losses), run(losses, *args, **kwargs)))
    return seen


LOSS = nn.MSELoss()


def test_a_plain_loss_goes_straight_to_the_engine(private):
    gradients_of(LOSS)
    assert len(private) == 1


def test_the_gradients_are_those_of_the_public_function(monkeypatch):
    straight = gradients_of(LOSS)
    monkeypatch.setattr(_backward, "_run", None)
    assert all(map(torch.equal, straight, gradients_of(LOSS)))


def test_a_loss_of_another_class_keeps_its_own_backward(private):
    straight = gradients_of(LOSS)
    private.clear()
    assert all(map(torch.equal, straight, gradients_of(lambda o, y: LOSS(o, y).as_subclass(Tagged))))
    assert not private


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hook_on_the_loss_sees_a_one_of_its_shape_and_type(shape, dtype):
    seen = []

    def loss_fn(output, target):
        loss = LOSS(output, target).to(dtype).reshape(shape)
        loss.register_hook(seen.append)
        return loss

    gradients_of(loss_fn)
    (one,) = seen
    assert one.dtype == dtype
    assert torch.equal(one, torch.ones(shape, dtype=dtype))


def test_inside_a_functorch_transform_torchs_error_is_given(private):
    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(lambda w: (_backward.backward(w * w), w)[1])(torch.tensor(2.0))
    assert not private
