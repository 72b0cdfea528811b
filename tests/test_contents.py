"""What a run that has failed under an automatic choice has changed counts once, and what a model keeps is as in the plain loop."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.optim import RMSprop

import hotloop
from hotloop import fast_eval
from observing import Operators

pytestmark = pytest.mark.usefixtures("sixteen_bit_units")

WIDE = 512
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 2
CE = nn.CrossEntropyLoss()

optimize = partial(hotloop.optimize, device="cpu")


def made(model, **options):
    return optimize(model, RMSprop(model.parameters(), lr=1e-3), CE, **options)


class Net(nn.Module):
    """Does something, and then what no 16-bit number can be given to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
        self.prepare()

    def prepare(self):
        pass

    def act(self, x, h):
        pass

    def state(self):
        return self.kept

    def forward(self, x):
        h = self.second(self.first(x))
        self.act(x, h.detach().float())
        self.refuse(h)
        return self.head(h)

    def refuse(self, h):
        torch.zeros(WIDE).index_add_(0, torch.arange(WIDE), h.detach().mean(0))


# --- what a failed run has changed ------------------------------------------------------------------------------------


class Attribute(Net):
    def prepare(self):
        self.kept = torch.zeros(3)

    def act(self, x, h):
        self.kept.add_(1)


class InAList(Net):
    def prepare(self):
        self.kept = [torch.zeros(3)]

    def act(self, x, h):
        self.kept[0].add_(1)


class InADictionary(Net):
    def prepare(self):
        self.kept = {"sum": torch.zeros(3), "names": {"a"}}

    def act(self, x, h):
        self.kept["sum"] = self.kept["sum"] + 1
        self.kept[len(self.kept)] = 1


class InASet(Net):
    def prepare(self):
        self.kept = {0}

    def act(self, x, h):
        self.kept.add(len(self.kept))


class Array(Net):
    def prepare(self):
        self.kept = np.zeros(3)

    def act(self, x, h):
        self.kept += 1


class Momentum(Net):
    """As in MoCo: an encoder that follows another one, in the forward."""

    def prepare(self):
        self.key = nn.Linear(4, WIDE).requires_grad_(False)

    def act(self, x, h):
        self.key.weight.data = 0.9 * self.key.weight.data + 0.1 * self.first.weight.data
        self.key.bias.mul_(0.5)

    def state(self):
        return [self.key.weight, self.key.bias]


class Resized(Net):
    def prepare(self):
        self.register_buffer("kept", torch.empty(0))

    def act(self, x, h):
        if not self.kept.numel():
            self.kept.resize_(WIDE).zero_()
        self.kept.add_(1)


class Transposed(Net):
    def prepare(self):
        self.register_buffer("kept", torch.zeros(2, 3))

    def act(self, x, h):
        self.kept.t_().add_(1)


class Expanded(Net):
    """Which nobody can write to."""

    def prepare(self):
        self.register_buffer("kept", torch.ones(1).expand(5))


KINDS = [Attribute, InAList, InADictionary, InASet, Array, Momentum, Resized, Transposed, Expanded]


@pytest.mark.parametrize("form", ["batch", "loss", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_counts_once(kind, form):
    plain, raw = kind(), kind()
    model, step = made(raw)
    for _ in range(2):
        plain(X)
        if form == "batch":
            step(X, Y)
        elif form == "loss":
            step(CE(model(X), Y))
        else:
            model.eval()(X)
            plain.eval()
        raw.first.load_state_dict(plain.first.state_dict())  # for an encoder that follows it
    assert step.plan["precision"].choice == "fp32"
    assert "index_add_" in step.plan["precision"].why
    np.testing.assert_equal(as_plain_data(raw.state()), as_plain_data(plain.state()))


def as_plain_data(state):
    if isinstance(state, dict):
        return {key: as_plain_data(value) for key, value in state.items()}
    if isinstance(state, list):
        return [as_plain_data(value) for value in state]
    return state.detach().numpy() if isinstance(state, torch.Tensor) else state


def test_large_buffers_are_not_copied(monkeypatch):
    """A memory bank may fill half of the device."""

    class Bank(Net):
        def prepare(self):
            self.register_buffer("kept", torch.zeros(1000))

        def act(self, x, h):
            self.kept.add_(1)

    class Unfailing(Bank):
        def refuse(self, h):
            pass

    def clones(kind):
        model, _ = made(kind())
        with Operators() as seen:
            model.eval()(X)
        assert torch.equal(model.kept, torch.ones(1000))
        return seen.count("clone")

    copied = clones(Unfailing)
    monkeypatch.setattr("hotloop._traces._LARGEST", 1000)
    assert clones(Unfailing) == copied - 1
    clones(Bank)


@pytest.mark.parametrize("form", ["batch", "model", "eval"])
def test_a_batch_that_is_changed_in_place(form):
    """It is normalised once, and the caller sees that."""

    class Normalising(Net):
        def forward(self, x):
            return super().forward(x.sub_(0.5).div_(0.25))

    plain, raw = Normalising(), Normalising()
    theirs, ours = X.clone(), X.clone()
    expected = plain(theirs)
    model, step = made(raw)
    if form == "batch":
        assert step(ours, Y)["loss"] == CE(expected, Y).item()
    else:
        assert torch.equal(model.train(form == "model")(ours), expected)
    assert torch.equal(ours, theirs)


# --- errors -----------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


def table(h):
    return {torch.float32: 1e-6, torch.float64: 1e-12}[h.dtype]


def by_name(h):
    return getattr(np, str(h.dtype).removeprefix("torch."))


def own(h):
    if h.dtype is not torch.float32:
        raise OwnError(f"no kernel for {h.dtype}")


@pytest.mark.parametrize(("check", "kind"), [(table, "KeyError"), (by_name, "AttributeError"), (own, "OwnError")])
def test_whatever_code_raises_that_is_given_another_dtype(check, kind):
    class Checked(Net):
        refuse = staticmethod(check)

    _, step = made(Checked())
    assert step(X, Y).updated
    assert step.plan["precision"].choice == "fp32"
    assert kind in step.plan["precision"].why


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="this torch has no error of its own for a failed device")
def test_a_device_that_has_failed_is_not_asked_again():
    class Dead(Net):
        calls = 0

        def refuse(self, h):
            Dead.calls += 1
            raise torch.AcceleratorError("device-side assert")

    _, step = made(Dead())
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        step(X, Y)
    assert Dead.calls == 1


def test_nothing_of_a_failed_run_is_alive_in_the_next_one_nor_after_both():
    """Where there is memory for one run there is none for two."""
    activations, alive = [], []

    class Failing(Net):
        def refuse(self, h):
            alive.append([reference() is not None for reference in activations])
            activations.append(weakref.ref(h))
            raise ValueError("own words")

    _, step = made(Failing())
    gc.disable()
    try:
        with pytest.raises(ValueError, match="own words"):
            step(X, Y)
        assert alive == [[], [False]]
        assert [reference() for reference in activations] == [None, None]
    finally:
        gc.enable()


# --- what leaves a model otherwise than as a tensor that it returns ---------------------------------------------------


class Keeps(Net):
    """Keeps a state of its own, as VAEs, stateful RNNs and models with caches do."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        if how == "buffer":
            self.register_buffer("kept", None)
        else:
            self.kept = {} if how == "dictionary" else [] if how == "list" else None

    def refuse(self, h):
        match self.how:
            case "tuple":
                self.kept = (h, h.detach())
            case "dictionary":
                self.kept["last"] = h
            case "list":
                self.kept.append((h, h))
            case _:
                self.kept = h

    def tensors(self):
        flat = self.kept.values() if isinstance(self.kept, dict) else self.kept
        if isinstance(flat, list):
            flat = [h for pair in flat for h in pair]
        return [flat] if isinstance(flat, torch.Tensor) else list(flat)


@pytest.mark.parametrize("form", ["batch", "loss", "eval"])
@pytest.mark.parametrize("how", ["attribute", "buffer", "tuple", "dictionary", "list"])
def test_what_a_model_keeps_is_no_16_bit_number(how, form):
    raw = Keeps(how)
    model, step = made(raw)
    assert step.plan["precision"].choice == "bf16"
    if form == "batch":
        step(X, Y)
    elif form == "loss":
        loss = CE(model(X), Y) + raw.tensors()[0].square().mean()
        loss.backward()
        assert raw.first.weight.grad is not None
    else:
        model.eval()(X)
    assert [h.dtype for h in raw.tensors()] == [torch.float32] * len(raw.tensors())
    raw.tensors()[0].detach().numpy()
    assert step.plan["precision"].choice == "fp32"
    assert "Keeps.kept" in step.plan["precision"].why


def test_an_explicit_precision_stays_whatever_a_model_keeps():
    raw = Keeps("attribute")
    _, step = made(raw, precision="bf16")
    step(X, Y)
    assert raw.kept.dtype is torch.bfloat16
    assert step.plan["precision"].choice == "bf16"


class Returns(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(self.head(self.second(self.first(x))))


class Output:
    def __init__(self, logits):
        self.logits = logits


HIDING = {
    "own class": (Output, lambda o: o.logits),
    "namespace": (lambda h: SimpleNamespace(logits=h), lambda o: o.logits),
    "inside": (lambda h: {"a": [Output(Output(h))]}, lambda o: o["a"][0].logits.logits),
    "categorical": (lambda h: Categorical(logits=h), lambda o: o.logits),
    "normal": (lambda h: Independent(Normal(h, 1.0), 1), lambda o: o.mean),
}


@pytest.mark.parametrize("form", ["batch", "model", "eval", "evaluation"])
@pytest.mark.parametrize(("kind", "look"), HIDING.values(), ids=HIDING)
def test_an_object_that_hides_its_tensors_holds_no_16_bit_ones(kind, look, form):
    raw = Returns(kind)
    seen = []

    def loss_fn(output, y):
        seen.append(look(output).dtype)
        return CE(look(output), y)

    model, step = optimize(raw, RMSprop(raw.parameters()), loss_fn)
    if form == "batch":
        step(X, Y)
    elif form == "evaluation":
        fast_eval(lambda model: seen.append(look(model(X)).dtype))(model)
    else:
        seen.append(look(model.train(form == "model")(X)).dtype)
    assert seen == [torch.float32]
    assert step.plan["precision"].choice == "fp32"
    assert "returns 16-bit tensors inside" in step.plan["precision"].why


def test_an_explicit_precision_stays_whatever_a_model_returns():
    raw = Returns(Output)
    model, step = optimize(raw, RMSprop(raw.parameters()), lambda o, y: CE(o.logits.float(), y), precision="bf16")
    step(X, Y)
    assert model(X).logits.dtype is torch.bfloat16
    assert step.plan["precision"].choice == "bf16"


def test_a_copy_of_a_model_takes_its_own_choices_back():
    raw = Keeps("attribute")
    model, step = made(raw)
    other = copy.deepcopy(model)
    other.eval()(X)
    assert other.kept.dtype is torch.float32
    raw.eval()
    step(X, Y)
    assert raw.kept.dtype is torch.float32


@pytest.mark.parametrize("replaced", [True, False])
def test_buffers_that_came_in_the_place_of_others_count_once(replaced):
    class Late(Net):
        failing = False

        def prepare(self):
            self.norm = nn.BatchNorm1d(WIDE)

        def act(self, x, h):
            self.norm(h)

        def refuse(self, h):
            if self.failing:
                super().refuse(h)

    plain, raw = Late(), Late()
    _, step = made(raw)
    for failing in (False, False, True):
        for name, buffer in list(raw.norm.named_buffers()) if replaced else ():
            setattr(raw.norm, name, buffer.clone())
        raw.failing = failing
        plain(X)
        step(X, Y)
        for name in ("first", "second"):
            getattr(raw, name).load_state_dict(getattr(plain, name).state_dict())
    assert step.plan["precision"].choice == "fp32"
    assert raw.norm.num_batches_tracked == 3
    torch.testing.assert_close(raw.norm.running_mean, plain.norm.running_mean, rtol=0.05, atol=0.01)


def test_a_model_that_returns_such_an_object_is_run_once():
    """What it has written into its arguments would be there twice."""

    class Notes(Returns):
        def forward(self, x, notes):
            notes.append(len(x))
            return super().forward(x)

    notes = []
    model, step = made(Notes(Output))
    assert model(X, notes).logits.dtype is torch.float32
    assert notes == [8]
    assert step.plan["precision"].choice == "fp32"


class Cache:
    """What a decoder hands to its next call."""

    def __init__(self, keys):
        self.keys = [keys]


def test_what_an_object_keeps_in_containers_is_its_own():
    raw = Returns(lambda h: {"logits": h, "cache": Cache(h)})
    model, step = optimize(raw, RMSprop(raw.parameters()), lambda o, batch: CE(o["logits"], Y))
    step({"x": X})
    assert model(X)["logits"].dtype is torch.float32
    assert model(X)["cache"].keys[0].dtype is torch.bfloat16
    assert step.plan["precision"].choice == "bf16"


def test_a_list_that_others_hold_too_stays_the_same_list():
    """And what was in it before is nobody's feature."""
    raw = Keeps("list")
    bank = torch.ones(2, dtype=torch.float64)
    mine = raw.kept
    mine.append((bank, bank))
    _, step = made(raw)
    step(X, Y)
    assert raw.kept is mine
    assert [t.dtype for t in mine[0]] == [torch.float64] * 2
    assert [t.dtype for t in mine[1]] == [torch.float32] * 2
    assert mine[0][0] is bank


def test_what_was_in_16_bits_before_is_the_users_own():
    class Bank(Net):
        def prepare(self):
            self.kept = torch.zeros(1, WIDE, dtype=torch.bfloat16)

        def refuse(self, h):
            self.kept = torch.cat([self.kept, h.detach().bfloat16()])

    raw = Bank()
    _, step = made(raw)
    step(X, Y)
    assert raw.kept.dtype is torch.bfloat16
    assert step.plan["precision"].choice == "bf16"


class EnoughError(Exception):
    """Ends a forward early, as extractors of features do."""


def test_an_exception_of_the_users_own_that_ends_a_forward_early_is_no_complaint():
    class Short(Net):
        calls = 0

        def refuse(self, h):
            Short.calls += 1
            raise EnoughError

    model, step = made(Short())
    for _ in range(3):
        with pytest.raises(EnoughError):
            model(X)
    assert Short.calls == 3
    assert step.plan["precision"].choice == "bf16"


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("place", ["buffer", "argument"])
@pytest.mark.parametrize("kind", ["sparse", "read-only"])
def test_what_cannot_be_written_to_is_not_put_back(place, kind, tmp_path):
    """A write to a map of a file would end the process."""
    if kind == "sparse":
        tensor = torch.eye(8).to_sparse()
    else:
        np.save(tmp_path / "rows.npy", np.ones((8, 8), dtype=np.float32))
        tensor = torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="r"))

    class Mixes(Net):
        def prepare(self):
            self.register_buffer("table", tensor if place == "buffer" else None)

        def forward(self, x, table=None):
            return super().forward((self.table if table is None else table) @ x)

    model, step = made(Mixes())
    given = () if place == "buffer" else (tensor,)
    assert model.eval()(X, *given).shape == (8, 2)
    assert step.plan["precision"].choice == "fp32"
    assert "index_add_" in step.plan["precision"].why


def test_a_generator_that_has_no_state_is_no_obstacle():
    """Numbers of the operating system cannot be drawn again."""

    class Draws(Net):
        def prepare(self):
            self.kept = random.SystemRandom()

        def act(self, x, h):
            self.kept.random()

    _, step = made(Draws())
    assert step(X, Y).updated
    assert step.plan["precision"].choice == "fp32"
