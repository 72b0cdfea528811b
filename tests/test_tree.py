"""Nested batches: what is walked, what is kept, and that nothing is copied or rebuilt without need."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from hotloop._tree import leaves, map_leaves, move

META = torch.device("meta")
CPU = torch.device("cpu")

Point = namedtuple("Point", "x label")


class Typed(NamedTuple):
    x: Tensor
    n: int = 3


class TupleKind(tuple):
    pass


class ListKind(list):
    """A list that carries more than its items."""

    note = "kept"


class DictKind(OrderedDict):
    pass


class User(UserDict):
    pass


class ReadOnly(Mapping):
    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclasses.dataclass
class Batch:
    x: Tensor
    name: str = "a"
    more: list[Tensor] = dataclasses.field(default_factory=list)
    cached: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    size: int = 1


class Graph:
    """A graph batch: it takes itself to a device and returns a new object."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.x, self.edges, self.asked = x, edges, []

    def to(self, device: Any) -> Graph:
        self.asked.append(device)
        return Graph(self.x.to(device), self.edges.to(device))


class Encoding(UserDict):
    """A tokenizer's batch: a mapping with its own `to`, which knows of `input_ids` alone."""

    def to(self, device: Any) -> Encoding:
        assert isinstance(device, torch.device)
        made = Encoding(self.data)
        made["input_ids"] = made["input_ids"].to(device)
        return made


def tensor() -> Tensor:
    return torch.ones(2)


CONTAINERS = {
    "list": lambda t: [t, 1],
    "list subclass": lambda t: ListKind([t, 1]),
    "tuple": lambda t: (t, "a"),
    "tuple subclass": lambda t: TupleKind((t, "a")),
    "named tuple": lambda t: Point(t, "a"),
    "typed named tuple": lambda t: Typed(t),
    "deque": lambda t: deque([t, None], maxlen=5),
    "dict": lambda t: {"x": t, "task": "a", "none": None, "lengths": ["s", 3]},
    "defaultdict": lambda t: defaultdict(list, {"x": t}),
    "ordered dict": lambda t: OrderedDict(x=t),
    "dict subclass": lambda t: DictKind(x=t),
    "UserDict": lambda t: User({"x": t}),
    "read-only mapping": lambda t: ReadOnly({"x": t, "n": 1}),
    "dataclass": lambda t: Batch(t, more=[t]),
    "frozen dataclass": lambda t: Frozen(t),
    "nested": lambda t: {"a": [({"b": (t,)}, 3)]},
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_types_are_kept_and_every_tensor_moves(make: Any) -> None:
    """D7, D11, L13, L14 and F-24: containers of every kind, with strings and None among the items."""
    batch = make(tensor())
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert moved is not batch
    assert [t.device for t in leaves(moved)] == [META] * len(list(leaves(batch)))
    assert [t.device for t in leaves(batch)] == [CPU] * len(list(leaves(batch)))


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_a_batch_that_is_there_is_returned_as_it_is(make: Any) -> None:
    batch = make(tensor())
    assert move(batch, CPU) is batch


class Labelled(ReadOnly):
    """With a constructor of its own."""

    def __init__(self, label: str, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.label = label


class FrozenDict(dict):
    note = ""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("frozen")


class FrozenOrderedDict(OrderedDict):
    note = ""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self:
            raise TypeError("frozen")
        super().__setitem__(key, value)


class OnDemand(Mapping):
    """Makes its values at each look."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, key: int) -> Tensor:
        return torch.ones(self.size)

    def __iter__(self) -> Any:
        return iter([0])

    def __len__(self) -> int:
        return 1


def test_mappings_with_a_constructor_of_their_own() -> None:
    batch = Labelled("a", {"x": tensor(), "n": 3})
    moved = move(batch, META)
    assert (type(moved), moved.label, moved["n"], moved["x"].device) == (Labelled, "a", 3, META)
    assert batch["x"].device == CPU
    assert move(types.MappingProxyType({"x": tensor()}), META)["x"].device == META
    on_demand = OnDemand(3)
    assert move(on_demand, META) is on_demand


@pytest.mark.parametrize("kind", [FrozenDict, FrozenOrderedDict])
def test_dictionaries_that_refuse_changes(kind: Any) -> None:
    batch = kind({"x": tensor(), "n": 3})
    batch.note = "own"
    moved = move(batch, META)
    assert (type(moved), moved.note, list(moved), moved["n"], moved["x"].device) == (kind, "own", ["x", "n"], 3, META)
    assert batch["x"].device == CPU


def test_other_items_and_what_a_container_carries_are_kept() -> None:
    """D11 and D13: strings, numbers and None pass through, at any depth."""
    moved = move({"x": tensor(), "task": "a", "none": None, "lengths": ["s", 3]}, META)
    assert {k: v for k, v in moved.items() if k != "x"} == {"task": "a", "none": None, "lengths": ["s", 3]}
    assert move(deque([tensor()], maxlen=5), META).maxlen == 5
    factory = defaultdict(lambda: 7, {"x": tensor()})
    assert move(factory, META)["absent"] == 7
    kind = ListKind([tensor()])
    kind.note = "own"
    assert move(kind, META).note == "own"
    assert move(Typed(tensor(), 9), META).n == 9


def test_unset_fields_of_a_dataclass_stay_unset() -> None:
    batch = Batch(tensor())
    assert not hasattr(move(batch, META), "cached")
    batch.cached = tensor()
    assert move(batch, META).cached.device == META
    assert batch.cached.device == CPU


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"b",
        1,
        2.0,
        True,
        1j,
        None,
        np.ones(2),
        {1, 2},
        types.SimpleNamespace(x=1),
        range(3),
        object(),
        torch.int,
        Batch,
    ],
    ids=lambda v: type(v).__name__,
)
def test_everything_else_passes_through_untouched(value: Any) -> None:
    assert move(value, META) is value
    assert move([value], META)[0] is value


def test_a_module_among_the_arguments_stays_where_it_is() -> None:
    layer = nn.Linear(2, 2)
    assert move({"layer": layer}, META)["layer"] is layer
    assert layer.weight.device == CPU


def test_dtypes_never_change() -> None:
    """D10 and D20: ids stay integers, float64 stays float64."""
    kinds = [torch.int64, torch.uint8, torch.bool, torch.float64, torch.float16, torch.complex64]
    moved = move([torch.zeros(2, dtype=kind) for kind in kinds], META)
    assert [t.dtype for t in moved] == kinds


def test_an_object_met_twice_is_moved_once() -> None:
    x, shared = tensor(), [tensor()]
    moved = move((x, {"again": x}, shared, shared), META)
    assert moved[0] is moved[1]["again"]
    assert moved[2] is moved[3]


def test_a_container_that_holds_itself_ends() -> None:
    """D11: no endless recursion."""
    loop: list[Any] = [tensor()]
    loop.append(loop)
    assert move(loop, META)[0].device == META
    assert len(list(leaves(loop))) == 1


def test_ids_of_dead_temporaries_are_not_confused() -> None:
    class Fresh(Mapping):
        """Makes its values anew at each look, so that their ids are used again."""

        def __getitem__(self, key: int) -> list[Tensor]:
            return [torch.full((1,), float(key))]

        def __iter__(self) -> Any:
            return iter(range(50))

        def __len__(self) -> int:
            return 50

        def __setitem__(self, key: int, value: Any) -> None:
            seen[key] = value[0].item()

    seen: dict[int, float] = {}
    spare: list[list[int]] = [[] for _ in range(60)]  # memory for the new lists, so that the old ones' becomes free again

    def plus_one(value: Tensor) -> Tensor:
        spare.pop()
        return value + 1

    map_leaves(plus_one, Fresh())
    assert seen == {key: key + 1.0 for key in range(50)}


def test_an_objects_own_to_is_used_and_gets_a_device() -> None:
    """D9 and D15: the return value of `to` counts; it is asked once."""
    graph = Graph(tensor(), tensor())
    moved = move([graph, graph], META)
    assert moved[0] is moved[1] is not graph
    assert moved[0].edges.device == META
    assert graph.asked == [META]


class InPlace:
    """Moves itself, and returns nothing."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> None:
        self.x = self.x.to(device)


class InPlaceMapping(InPlace, User):
    def __init__(self, x: Tensor) -> None:
        User.__init__(self, y=x)
        InPlace.__init__(self, x)


@pytest.mark.parametrize("device", [CPU, META])
def test_an_object_that_moves_in_place_stays_itself(device: torch.device) -> None:
    thing = InPlace(tensor())
    assert move({"a": [thing]}, device)["a"][0] is thing
    assert thing.x.device == device
    moved = move(InPlaceMapping(tensor()), device)
    assert (moved.x.device, moved["y"].device) == (device, device)


class ByUnit:
    def to(self, unit: str) -> Any:
        raise AssertionError("not called")


class ByKeyword:
    def to(self, *, device: Any) -> Any:
        raise AssertionError("not called")


class Message:
    def to(self) -> Any:
        raise AssertionError("not called")


@pytest.mark.parametrize("device", [CPU, META])
@pytest.mark.parametrize("kind", [ByUnit, ByKeyword, Message])
def test_a_to_that_takes_no_device_is_not_called(kind: Any, device: torch.device) -> None:
    value = kind()
    assert move((value,), device)[0] is value


class Decorated:
    """As many libraries have it: the wrapper's signature tells nothing."""

    def _takes_more(self, more: Any, device: Any) -> str:
        return f"on {device}"

    @functools.wraps(_takes_more)
    def to(self, *args: Any) -> str:
        return self._takes_more(None, *args)


class OfTheInstance:
    def __init__(self) -> None:
        self.to = lambda device: f"on {device}"


@pytest.mark.parametrize("kind", [Decorated, OfTheInstance])
def test_where_the_signature_does_not_tell_it_is_called(kind: Any) -> None:
    assert move(kind(), META) == "on meta"


def test_a_mapping_with_its_own_to_is_walked_afterwards() -> None:
    """D7: what the object's `to` does not know of moves as well."""
    moved = move(Encoding(input_ids=tensor(), extra=[tensor()], text="a"), META)
    assert type(moved) is Encoding
    assert [t.device for t in leaves(moved)] == [META, META]
    assert moved["text"] == "a"


def test_a_packed_sequence_moves_with_its_indices_and_keeps_its_lengths() -> None:
    """D13, D23 and L15: the lengths stay on the CPU by design."""
    packed = pack_padded_sequence(torch.ones(2, 3, 4), torch.tensor([2, 3]), batch_first=True, enforce_sorted=False)
    moved = move({"x": packed}, META)["x"]
    assert type(moved) is type(packed)
    assert (moved.data.device, moved.sorted_indices.device, moved.batch_sizes.device) == (META, META, CPU)
    assert move(packed, CPU).data is packed.data
    doubled = map_leaves(lambda t: t * 2, packed)
    assert torch.equal(doubled.data, packed.data * 2)


def test_copies_to_an_accelerator_do_not_block_and_copies_to_the_host_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """D16, D17 and D19: a copy to the host is complete when it is read."""
    asked = []
    monkeypatch.setattr(Tensor, "to", lambda self, device, non_blocking=False: asked.append((device, non_blocking)) or self)
    move([torch.empty(1)], META)
    move([torch.empty(1, device=META)], CPU)
    assert asked == [(META, True), (CPU, False)]


def test_gradients_flow_through_a_move_of_a_mapped_leaf() -> None:
    x = tensor().requires_grad_()
    (out,) = map_leaves(lambda t: t * 3, [x])
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


class Tagged(Tensor):
    pass


def test_tensors_of_every_kind_are_leaves() -> None:
    kinds = [nn.Parameter(tensor()), tensor().as_subclass(Tagged), torch.eye(2).to_sparse()]
    assert list(map(type, leaves(kinds))) == [nn.Parameter, Tagged, Tensor]
    assert [t.device for t in move(kinds, META)] == [META] * 3


def test_leaves_are_in_order_and_look_into_what_is_walked() -> None:
    a, b, c, d, e = (torch.full((), float(i)) for i in range(5))
    batch = {"a": [a, (b, "text")], "point": Point(c, None), "data": Frozen(d), "deque": deque([e])}
    assert [t.item() for t in leaves(batch)] == [0, 1, 2, 3, 4]
    assert list(leaves("text")) == list(leaves(Graph(a, b))) == []
    assert list(leaves(a)) == [a]


# --- any batch --------------------------------------------------------------------------------------------------------

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just("T"))


def _nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(deque),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.tuples(children, children).map(lambda pair: Point(*pair)),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(User),
    )


batches = st.recursive(scalars, _nested, max_leaves=12)


def _with_tensors(value: Any) -> Any:
    """The batch with a new tensor for each "T"."""
    if value == "T":
        return torch.zeros(1)
    if isinstance(value, Point):
        return Point(*map(_with_tensors, value))
    if isinstance(value, Mapping):
        return type(value)({k: _with_tensors(v) for k, v in value.items()})
    return type(value)(map(_with_tensors, value)) if isinstance(value, list | tuple | deque) else value


def _shape(value: Any) -> Any:
    """The structure of a batch, comparable."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return type(value), [(k, _shape(v)) for k, v in value.items()]
    return (type(value), list(map(_shape, value))) if isinstance(value, list | tuple | deque) else value


@settings(deadline=None, max_examples=150)
@given(batches)
def test_any_batch_keeps_its_structure_and_its_original(plan: Any) -> None:
    batch = _with_tensors(plan)
    before = copy.copy(_shape(batch))
    moved = map_leaves(lambda t: t + 1, batch)
    assert _shape(moved) == _shape(batch) == before
    assert Counter(t.item() for t in leaves(moved)) == Counter({1.0: len(list(leaves(batch)))} if list(leaves(batch)) else {})
    assert all(t.item() == 0 for t in leaves(batch))
    assert map_leaves(lambda t: t, batch) is batch


class Pair(tuple):
    """A tuple with a constructor and an attribute of its own."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_a_tuple_of_the_users_own_keeps_its_type_and_attributes() -> None:
    pair = Pair(torch.ones(1), 2)
    pair.note = "kept"
    mapped = map_leaves(lambda t: t + 1, pair)
    assert type(mapped) is Pair
    assert (mapped[0].item(), mapped[1], mapped.note) == (2.0, 2, "kept")
    found = map_leaves(lambda t: t + 1, torch.ones(2, 2).max(dim=0))
    assert type(found) is torch.return_types.max
    assert found.values.tolist() == [2.0, 2.0]
