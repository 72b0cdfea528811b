"""Which models a function works with."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import nn

from hotloop._found_models import NamedModels, held_by, in_arguments

A, B, C = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
GLOBAL = nn.Linear(1, 1)
GLOBALS = [nn.Linear(1, 1)]
BY_NAME = {"net": nn.Linear(1, 1), "other": 3}
UNUSED = nn.Linear(1, 1)
Pair = namedtuple("Pair", "model other")


@dataclass(frozen=True)
class Config:
    model: Any
    never_set: int = field(init=False)


def cycle() -> list[Any]:
    made: list[Any] = [A]
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("arguments", "models"),
    [
        ((A, 1, "text", None), [A]),
        ([A, (B, {"c": C})], [A, B, C]),
        (deque([A]), [A]),
        (UserDict(model=A), [A]),
        (Pair(A, 2), [A]),
        (Config(A), [A]),
        ({"configs": [Config(A), Config([B])]}, [A, B]),
        (A.forward, [A]),
        (cycle(), [A]),
        (nn.Linear, []),
        (Config, []),
    ],
)
def test_in_arguments(arguments: Any, models: list[nn.Module]) -> None:
    assert list(in_arguments(arguments)) == models


class Trainer:
    shared: ClassVar[nn.Module] = C

    def __init__(self) -> None:
        self.model, self.heads, self.by_name, self.rate = A, [B], {"a": A}, 0.1


class Slotted:
    __slots__ = ("model", "unset")

    def __init__(self) -> None:
        self.model = A


class One:
    __slots__ = "model"


@dataclass
class Data:
    model: nn.Module


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = A


def test_held_by_an_object() -> None:
    assert set(held_by(Trainer())) == {A, B, C}
    assert list(held_by(Slotted())) == [A]
    assert list(held_by(Data(B))) == [B]
    one = One()
    one.model = B
    assert list(held_by(one)) == [B]


@pytest.mark.parametrize("container", [
    OrderedDict(a=A, b=B), defaultdict(list, a=A, b=B), deque([A, B]), {"a": A, "b": B}, [A, B], (A, B),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_held_in_a_container(container: Any) -> None:
    one = One()
    one.model = container
    assert list(held_by(one)) == [A, B]
    assert not isinstance(container, dict) or len(container) == 2


def test_held_by_a_class_a_model_and_nobody() -> None:
    assert list(held_by(Trainer)) == [C]
    network = Network()
    assert list(held_by(network)) == [network, A]
    assert list(held_by(None)) == []


def test_named_in_the_globals() -> None:
    def one() -> Any:
        return GLOBAL

    def several() -> Any:
        return [model.weight for model in GLOBALS], BY_NAME["net"]

    def inside() -> Any:
        return (lambda: [GLOBAL for _ in range(3)])()

    def nothing() -> int:
        return len("GLOBAL")

    assert list(NamedModels(one)) == [GLOBAL]
    assert set(NamedModels(several)) == {GLOBALS[0], BY_NAME["net"]}
    assert list(NamedModels(inside)) == [GLOBAL]
    assert list(NamedModels(nothing)) == []


def test_a_global_is_looked_up_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def uses() -> Any:
        return LATER  # type: ignore[name-defined]  # noqa: F821

    named = NamedModels(uses)
    assert list(named) == []
    monkeypatch.setitem(globals(), "LATER", A)
    assert list(named) == [A]


def test_named_in_the_closure() -> None:
    model, models = nn.Linear(1, 1), [nn.Linear(1, 1)]

    def uses() -> Any:
        return model, models, missing

    assert set(NamedModels(uses)) == {model, models[0]}
    missing = nn.Linear(1, 1)
    assert missing in set(NamedModels(uses))


def test_named_as_a_default() -> None:
    def uses(model: Any = A, *, other: Any = B) -> None: ...

    assert list(NamedModels(uses)) == [A, B]


def test_through_decorators_partials_and_methods() -> None:
    def uses(_: Any = None) -> Any:
        return GLOBAL

    @functools.wraps(uses)
    def decorated(*args: Any) -> Any:
        return uses(*args)

    class Holder:
        def method(self) -> Any:
            return GLOBAL

        both = staticmethod(uses)

    for function in (decorated, functools.partial(uses, 1), Holder().method, vars(Holder)["both"]):
        assert list(NamedModels(function)) == [GLOBAL]


@pytest.mark.parametrize(
    "function", [len, Trainer(), functools.partial(len)], ids=["builtin", "object", "partial of a builtin"]
)
def test_functions_without_code_name_nothing(function: Any) -> None:
    assert list(NamedModels(function)) == []


def test_a_large_global_is_not_walked_through() -> None:
    class Vocabulary(dict):  # type: ignore[type-arg]
        def values(self) -> Any:
            raise AssertionError("not this one")

    words = Vocabulary(a=1)
    many = [object()] * 10**6 + [A]

    def uses() -> Any:
        return words, many

    assert list(NamedModels(uses)) == []


class Absent:
    """As the request of a web framework, or a lazy setting, where there is none."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("working outside of a context")

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


def test_objects_that_do_not_tell_their_class_are_no_models() -> None:
    net, absent = nn.Linear(1, 1), Absent()

    def named() -> Any:
        return net, absent

    assert [*NamedModels(named)] == [net]


STATE = SimpleNamespace(model=nn.Linear(1, 1), other=nn.Linear(2, 2))


def test_models_that_a_named_object_holds() -> None:
    local = SimpleNamespace(decoder=nn.Linear(3, 3), absent=None)

    def named(x: Any) -> Any:
        return [local.decoder(STATE.model(item)) for item in x], local.absent, STATE.missing

    assert {*NamedModels(named)} == {STATE.model, local.decoder}


def test_looking_for_models_computes_no_attribute() -> None:
    class Lazy:
        @property
        def model(self) -> nn.Module:
            raise AssertionError("computed")

    lazy = Lazy()

    def named() -> Any:
        return lazy.model

    assert [*NamedModels(named)] == []


def test_attributes_and_methods_of_the_name_of_a_global_are_not_it() -> None:
    def attribute(job: Any) -> Any:
        return job.GLOBAL, job.inner.BY_NAME

    def method(job: Any) -> Any:
        return job.GLOBAL(1), [other.GLOBALS for other in job]

    def assigned(job: Any) -> Any:
        job.GLOBAL = 1
        del job.GLOBAL
        import GLOBAL.BY_NAME as GLOBALS  # type: ignore[import-not-found]

        return GLOBALS

    for function in (attribute, method, assigned):
        assert list(NamedModels(function)) == []


def test_named_in_the_body_of_a_class() -> None:
    def uses() -> Any:
        class Holder:
            model = GLOBAL

        return Holder

    assert list(NamedModels(uses)) == [GLOBAL]
