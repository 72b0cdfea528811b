"""What a step returns, and the means over many of them."""

from __future__ import annotations

import copy
import enum
import io
import json
import operator
import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

import simgpu
from hotloop import Metrics, optimize
from hotloop._reading import Reading


def metrics(values=None, *, flags=(), device="cpu", **options):
    values = {"loss": 0.5, "hits": 3} if values is None else values
    tensors = [torch.tensor(v).to(device) for v in (*values.values(), *flags)]
    return Metrics(list(values), Reading(tensors), **options)


class TestMetrics:
    def test_a_mapping_of_exact_numbers(self):
        """W8: nothing but Python numbers comes out, by whichever way."""
        m = metrics()
        assert isinstance(m, Mapping)
        assert dict(m) == {**m} == {"loss": 0.5, "hits": 3} == m
        assert [type(v) for v in m.values()] == [float, int]
        assert list(m.items()) == [("loss", 0.5), ("hits", 3)]
        assert list(m) == ["loss", "hits"]
        assert (len(m), m.get("other"), "hits" in m, "other" in m) == (2, None, True, False)

    def test_what_is_done_with_a_loss(self):
        m = metrics()
        assert json.dumps(dict(m)) == '{"loss": 0.5, "hits": 3}'
        assert torch.tensor(m["loss"]).item() == 0.5
        assert (lambda loss, hits: loss + hits)(**m) == 3.5

    def test_a_progress_bar_takes_it_as_it_is(self):
        tqdm = pytest.importorskip("tqdm").tqdm
        with tqdm(total=1, file=io.StringIO()) as bar:
            bar.set_postfix(metrics())
            assert bar.postfix == "loss=0.5, hits=3"

    @pytest.mark.parametrize("read", [float, lambda m: m.item(), lambda m: m["loss"]], ids=["float", "item", "index"])
    def test_it_stands_for_the_loss(self, read):
        value = read(metrics({"hits": 3, "loss": 0.25}))
        assert type(value) is float
        assert value == 0.25

    @pytest.mark.parametrize("left", [0, 1.5, torch.tensor(1.0), np.float64(1)], ids=lambda v: type(v).__name__)
    @pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd])
    def test_arithmetic_says_what_to_write(self, operation, left):
        for arguments in ((left, metrics()), (metrics(), left)):
            with pytest.raises(TypeError, match=r"metrics\['loss'\].*float\(metrics\)"):
                operation(*arguments)

    @pytest.mark.parametrize(
        "use",
        [lambda m: m < 0.1, lambda m: m <= 0.1, lambda m: -m, abs, lambda m: round(m, 3), lambda m: m**0.5, lambda m: sum([m])],
    )
    def test_other_uses_as_a_number_say_what_to_write(self, use):
        with pytest.raises(TypeError, match=r"float\(metrics\)"):
            use(metrics())

    @pytest.mark.parametrize("spec", ["", ".3f", "8.1e", "%"])
    def test_format_is_that_of_the_loss(self, spec):
        assert format(metrics(), spec) == format(0.5, spec)

    def test_a_running_mean_by_hand_is_a_float(self):
        """S8"""
        average = 0.0
        for _ in range(100):
            average = 0.9 * average + 0.1 * metrics()["loss"]
        assert type(average) is float

    def test_a_name_that_is_not_there(self):
        with pytest.raises(KeyError, match=r"'accuracy'.*loss, hits"):
            metrics()["accuracy"]

    def test_names_may_be_anything(self):
        metrics = Metrics(["loss", 1], Reading([0.5, 2]))
        assert (metrics[1], metrics.get(1), metrics.get("acc"), metrics.get(2)) == (2, 2, None, None)

    def test_it_cannot_be_changed(self):
        m = metrics()
        with pytest.raises(TypeError):
            m["loss"] = 1.0
        with pytest.raises(AttributeError):
            m.loss = 1.0
        dict(m)["loss"] = 1.0
        assert m["loss"] == 0.5

    def test_repr_shows_the_numbers(self):
        assert repr(metrics()) == "{'loss': 0.5, 'hits': 3}"

    @pytest.mark.parametrize("again", [lambda m: pickle.loads(pickle.dumps(m)), copy.copy, copy.deepcopy])
    def test_a_copy_is_as_it_was(self, again):
        m = again(metrics(flags=[True], updated=True, output=(torch.ones(2),)))
        assert type(m) is Metrics
        assert m == {"loss": 0.5, "hits": 3}
        assert (m.updated, m.skipped, m.output.tolist()) == (True, True, [1.0, 1.0])

    @pytest.mark.parametrize(("flags", "skipped"), [([], False), ([False], False), ([True], True), ([0.0, 1.0], True)])
    def test_flags_behind_the_names_tell_that_the_update_was_skipped(self, flags, skipped):
        m = metrics(flags=flags)
        assert m.skipped is skipped
        assert list(m) == ["loss", "hits"]

    @pytest.mark.parametrize("updated", [True, False])
    def test_updated(self, updated):
        assert metrics(updated=updated).updated is updated

    def test_an_output_that_was_not_kept(self):
        with pytest.raises(AttributeError, match=r"metrics\.output.*keep_output=True"):
            metrics().output  # noqa: B018
        assert metrics(output=(None,)).output is None

    @pytest.mark.simgpu
    @pytest.mark.parametrize(
        "look",
        [
            list,
            len,
            lambda m: m.updated,
            lambda m: "loss" in m,
            lambda m: "other" in m,
            lambda m: m.get("other"),
            lambda m: m.keys(),
        ],
        ids=["names", "len", "updated", "in", "not in", "get", "keys"],
    )
    def test_nothing_but_a_value_waits(self, look):
        m = metrics(device=simgpu.NAME)
        simgpu.counts.clear()
        look(m)
        assert simgpu.host_waits() == 0
        assert m["loss"] == 0.5
        assert simgpu.host_waits() == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("backward", "has run the backward.*remove the line"),
        ("detach", r"numbers by name, and no tensor; write metrics\['loss'\]"),
        ("output", "keep_output=True"),
        ("accuracy", "there is no such attribute"),
    ],
)
def test_lines_of_the_old_loop_on_what_step_returned(name: str, text: str) -> None:
    metrics = Metrics(["loss"], Reading([torch.tensor(0.5)]))
    with pytest.raises(AttributeError, match=text):
        getattr(metrics, name)
    assert not hasattr(metrics, name)


# --- numbers of NumPy's, and NumPy's arrays of metrics --------------------------------------------------------------------


class Level(enum.IntEnum):
    HIGH = 3


NUMBERS = {
    "float64": (np.float64(0.5), 0.5),
    "float32": (np.float32(0.5), 0.5),
    "int64": (np.int64(3), 3),
    "bool_": (np.bool_(True), True),
    "0-d array": (np.array(0.5), 0.5),
    "IntEnum": (Level.HIGH, 3),
    "complex64": (np.complex64(1j), 1j),
}


@pytest.mark.parametrize("way", ["loss", "metrics"])
@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_of_another_library_becomes_a_python_number(kind, way):
    given, expected = NUMBERS[kind]
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if way == "loss":
        model, step = optimize(net, optimizer)
        metrics = step(model(torch.ones(1, 4)).sum(), f1=given)
    else:
        step = optimize(net, optimizer, nn.MSELoss(), metrics={"f1": lambda output, target: given}).step
        metrics = step(torch.ones(1, 4), torch.ones(1, 2))
    assert metrics["f1"] == expected
    assert type(metrics["f1"]) is type(expected)
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["mean"].keys() == {"loss", "f1"}


def test_arguments_of_a_step_may_be_numpys():
    net = nn.Linear(4, 2)
    step = optimize(net, torch.optim.SGD(net.parameters()), nn.MSELoss(), accumulate=np.int64(2), clip_norm=np.float32(1)).step
    assert not step(torch.ones(1, 4), torch.ones(1, 2), weight=np.int64(3)).updated
    assert step(torch.ones(1, 4), torch.ones(1, 2), weight=np.float32(3)).updated


@pytest.mark.parametrize("weight", [10**400, -(10**400), float("inf"), float("nan"), np.float32("nan"), np.array([1, 2])])
def test_a_weight_that_is_no_finite_number_is_refused(weight):
    net = nn.Linear(4, 2)
    step = optimize(net, torch.optim.SGD(net.parameters()), nn.MSELoss()).step
    with pytest.raises(ValueError, match="weight is a finite number"):
        step(torch.ones(1, 4), torch.ones(1, 2), weight=weight)


def test_numpy_takes_metrics_for_their_losses():
    first, second = metrics({"loss": 0.5, "acc": 1.0}), metrics({"loss": 1.5, "acc": 0.0})
    assert np.array([first, second]).tolist() == [0.5, 1.5]
    assert np.mean([first, second]) == 1.0
    assert np.asarray(first, dtype=np.float32).dtype == np.float32
    assert np.append(np.zeros(1), first).tolist() == [0.0, 0.5]


def test_metrics_are_joined_with_other_mappings():
    m = metrics({"loss": 0.5, "acc": 1.0})
    assert {"epoch": 1} | m == {"epoch": 1, "loss": 0.5, "acc": 1.0}
    assert m | {"acc": 2.0} == {"loss": 0.5, "acc": 2.0}
    with pytest.raises(TypeError):
        m | 1


@pytest.mark.parametrize("use", [int, lambda m: m % 2, lambda m: m // 2, lambda m: +m, lambda m: divmod(m, 2)])
def test_other_arithmetic_says_what_to_write(use):
    with pytest.raises(TypeError, match=r"write metrics\['loss'\]"):
        use(metrics({"loss": 0.5}))


def test_a_metric_asked_for_as_an_attribute():
    with pytest.raises(AttributeError, match=r"metrics.acc: metrics are read by name; write metrics\['acc'\]"):
        getattr(metrics({"loss": 0.5, "acc": 1.0}), "acc")  # noqa: B009


def test_code_that_makes_collections_anew():
    """As `apply_to_collection`, `recursively_apply` and other helpers for nested batches do: by the type."""
    model = nn.Linear(2, 1)
    metrics = optimize(model, torch.optim.SGD(model.parameters(), 0.1)).step(model(torch.ones(1, 2)).sum(), seen=3)
    tensor = torch.ones(2)
    made = type(metrics)({name: [value, tensor] for name, value in metrics.items()})
    assert type(made) is type(metrics)
    assert dict(made) == {"loss": [metrics["loss"], tensor], "seen": [3, tensor]}
    assert made["seen"][1] is tensor
    assert not made.skipped
