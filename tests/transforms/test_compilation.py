"""torch.compile on wish: T1, T2, T4, T6, T8, T9, M2, M3 of the field cases. Backends that only count keep the tests quick."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hotloop import optimize

pytestmark = pytest.mark.usefixtures("dynamo_is_at_work")

CE = nn.CrossEntropyLoss()


class Counting:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return module.forward


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(steps: int = 6, **wishes):
    raw = net()
    model, step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), CE, **wishes)
    torch.manual_seed(1)
    losses = [step(torch.randn(5 + i % 3, 4), torch.randint(2, (5 + i % 3,)))["loss"] for i in range(steps)]
    return raw, model, step, losses


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_compiled_model_trains_as_an_uncompiled_one(precision, accumulate):
    """T6, with shapes that change."""
    backend = Counting()
    wishes = {"precision": precision, "accumulate": accumulate}
    raw, _, step, losses = train(**wishes, compile={"backend": backend})
    plain, _, _, expected = train(**wishes)
    assert backend.graphs > 0
    assert losses == pytest.approx(expected, abs=1e-3)
    assert all(p.grad.dtype == torch.float32 for p in raw.parameters())
    for p, q in zip(raw.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=0)
    assert step.plan["compile"].choice == "on"


def test_keys_stay_clean_and_modes_follow():
    """M2, M3, T1, T2, T4."""
    raw, model, _, _ = train(compile={"backend": "eager"})
    assert "_orig_mod" not in "".join(model.state_dict())
    assert model.eval() is model
    assert (model.training, raw.training) == (False, False)
    x, other = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model(x)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x).detach())
    assert not model(x).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_the_plain_module_stays_uncompiled():
    """T8, T9: tracing and exporting it, copying and pickling the wrapper."""
    raw, model, _, _ = train(compile={"backend": "eager"})
    x = torch.randn(3, 4)
    model.eval()
    expected = model(x)
    torch.testing.assert_close(torch.jit.trace(model.__wrapped__, x)(x), expected)
    torch.testing.assert_close(torch.export.export(raw, (x,)).module()(x), expected)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)


@pytest.mark.parametrize("wish", [3, "yes", [1], {1: 2}, {"no_such_argument": 1}])
def test_other_wishes_are_refused(wish):
    raw = net()
    with pytest.raises(TypeError, match=r"optimize\(\.\.\., compile=.*torch\.compile"):
        optimize(raw, compile=wish)


@pytest.mark.parametrize("wish", [{"backend": "no such"}, {"mode": "no such"}, {"mode": "default", "options": {"a": 1}}])
def test_what_torch_refuses_is_refused_at_the_door(wish):
    raw = net()
    optimizer = torch.optim.Adam(raw.parameters())
    with pytest.raises(ValueError, match=r"optimize\(\.\.\., compile=\{.*torch\.compile refuses this"):
        optimize(raw, optimizer, CE, compile=wish)
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("wish", [False, None, {"disable": True}])
def test_off(wish):
    raw = net()
    step = optimize(raw, torch.optim.SGD(raw.parameters(), lr=0.1), CE, compile=wish).step
    assert step.plan["compile"].choice == "off"
