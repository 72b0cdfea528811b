"""Generators, async functions and async generators under `fast_eval`: each piece of a body runs in its evaluation, nothing else."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
import torch
from torch import nn

from hotloop import fast_eval, optimize

X = torch.linspace(-1, 1, 20).reshape(5, 4)
INSIDE, OUTSIDE = (False, True, False), (True, False, True)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def state(model: nn.Module) -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), model.training


evaluated = fast_eval(precision="bf16")


# --- generators ---------------------------------------------------------------------------------------------------------


@evaluated
def states(model: nn.Module, count: int = 3) -> Iterator[Any]:
    for _ in range(count):
        yield state(model)


def test_a_generator_evaluates_only_while_its_body_runs() -> None:
    """N15, N17, F-19, F-20"""
    model = net()
    model[1].eval()
    values = states(model)
    assert state(model) == OUTSIDE
    for value in values:
        assert value == INSIDE
        assert state(model) == OUTSIDE
        assert [m.training for m in model] == [True, False, True, True]
    assert state(model) == OUTSIDE


def test_the_caller_trains_between_two_values() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(1))
    images = torch.randn(64, 3, 32, 32)
    model(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @fast_eval
    def outputs(model: nn.Module) -> Iterator[Any]:
        while True:
            model(images)
            model(images)
            yield model(images)

    values = outputs(model)
    for _ in range(3):
        twin = copy.deepcopy(model).eval()
        torch.testing.assert_close(next(values), twin(images).detach(), rtol=1e-4, atol=1e-4)
        model(images).square().mean().backward()
        optimizer.step()
    values.close()


def test_it_is_a_generator() -> None:
    values = states(net())
    assert inspect.isgenerator(values)
    assert values.__name__ == "states"
    assert values.__qualname__ == "states"


def talk(model: nn.Module, log: list[Any]) -> Generator[Any, Any, Any]:
    """Answers what it is sent, and notes what happens to it."""
    sent = None
    try:
        while sent != "end":
            try:
                sent = yield torch.tensor(float(len(log))), sent
            except KeyError as error:
                log.append((error.args, state(model)))
        return torch.tensor(7)
    finally:
        log.append(("closed", state(model)))


def test_send_throw_close_and_the_result_go_through() -> None:
    """N15, F-19"""
    model, log, plain_log = net(), [], []  # type: ignore[var-annotated]
    values, plain = evaluated(talk)(model, log), talk(model, plain_log)
    for step in (
        lambda g: next(g),
        lambda g: g.send("a"),
        lambda g: g.throw(KeyError("k")),
        lambda g: g.send("b"),
    ):
        assert step(values) == step(plain)
        assert state(model) == OUTSIDE
    with pytest.raises(StopIteration) as stop:
        values.send("end")
    assert (stop.value.value, type(stop.value.value)) == (7, int)
    assert log == [(("k",), INSIDE), ("closed", INSIDE)]
    with pytest.raises(StopIteration):
        next(values)


def test_yield_from_gets_the_result() -> None:
    def outer(model: nn.Module) -> Iterator[Any]:
        result = yield from evaluated(talk)(model, [])
        yield result

    values = outer(net())
    next(values)
    assert values.send("end") == 7


def test_closing_runs_the_bodys_own_end_in_its_evaluation() -> None:
    model, log = net(), []  # type: ignore[var-annotated]
    values = evaluated(talk)(model, log)
    next(values)
    values.close()
    assert log == [("closed", INSIDE)]
    assert state(model) == OUTSIDE


def test_a_generator_that_is_dropped_ends_its_body() -> None:
    model, log = net(), []  # type: ignore[var-annotated]
    values = evaluated(talk)(model, log)
    next(values)
    del values
    gc.collect()
    assert log == [("closed", INSIDE)]
    assert state(model) == OUTSIDE


def test_a_generator_that_never_starts_changes_nothing() -> None:
    model, log = net(), []  # type: ignore[var-annotated]
    values = evaluated(talk)(model, log)
    values.close()
    assert log == []
    assert state(model) == OUTSIDE


def test_an_error_in_the_middle_of_a_generator() -> None:
    model = net()

    @evaluated
    def fails(model: nn.Module) -> Iterator[Any]:
        yield 1
        raise KeyError("mine")

    values = fails(model)
    assert next(values) == 1
    with pytest.raises(KeyError, match="mine") as caught:
        next(values)
    assert state(model) == OUTSIDE
    assert "raise KeyError" in str(caught.traceback[-1].statement)
    with pytest.raises(StopIteration):
        next(values)


def test_an_error_thrown_and_not_caught_comes_back() -> None:
    model = net()
    values = states(model)
    next(values)
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        values.throw(error)
    assert caught.value is error
    assert state(model) == OUTSIDE


def test_values_are_numbers_and_detached() -> None:
    model = net()

    @fast_eval
    def values(model: nn.Module) -> Iterator[Any]:
        with torch.enable_grad():
            yield {"loss": model(X).sum(), "output": model(X)}

    for value in values(model):
        assert type(value["loss"]) is float
        assert not value["output"].requires_grad


def test_two_generators_of_one_model_by_turns() -> None:
    model = net()
    first, second = states(model), states(model)
    for a, b in zip(first, second, strict=True):
        assert a == b == INSIDE
        assert state(model) == OUTSIDE


def test_a_generator_runs_on_in_another_thread() -> None:
    model = net()
    values = states(model)
    assert next(values) == INSIDE
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(values))
    thread.start()
    thread.join()
    assert got == [INSIDE, INSIDE]
    assert state(model) == OUTSIDE


def test_a_generator_that_a_function_returns() -> None:
    """F-19: it begins when the function has ended."""
    model = net()

    @evaluated
    def lazily(model: nn.Module) -> Any:
        return (state(model) for _ in range(2))

    for value in lazily(model):
        assert value == INSIDE
        assert state(model) == OUTSIDE


def test_a_context_manager_evaluates_around_its_with() -> None:
    model = net()
    seen: list[Any] = []

    @contextmanager
    @evaluated
    def prepared(model: nn.Module) -> Iterator[Any]:
        seen.append(state(model))
        yield model(X).sum()
        seen.append(state(model))

    with prepared(model) as total:
        assert type(total) is float
        assert state(model) == OUTSIDE
    assert seen == [INSIDE, INSIDE]


# --- async functions ----------------------------------------------------------------------------------------------------


@evaluated
async def awaits(model: nn.Module, log: list[Any], naps: int = 3) -> Any:
    for _ in range(naps):
        log.append(state(model))
        await asyncio.sleep(0)
    log.append(state(model))
    return model(X).sum(), torch.is_grad_enabled()


def test_an_async_function() -> None:
    """W9, F-19"""
    model, log = net(), []  # type: ignore[var-annotated]
    total, grad = asyncio.run(awaits(model, log))
    assert type(total) is float
    assert not grad
    assert log == [INSIDE] * 4
    assert state(model) == OUTSIDE


def test_other_tasks_have_gradients_and_precision_of_their_own() -> None:
    """F-20; the modes are the model's, and hold until the coroutine ends."""
    model, log, others = net(), [], []  # type: ignore[var-annotated]

    async def other() -> None:
        for _ in range(3):
            others.append(state(model))
            await asyncio.sleep(0)

    async def main() -> Any:
        return await asyncio.gather(awaits(model, log), other())

    asyncio.run(main())
    assert others == [(True, False, False)] * 3
    assert log == [INSIDE] * 4
    assert state(model) == OUTSIDE


def test_gathered_evaluations_of_one_model() -> None:
    model, log = net(), []  # type: ignore[var-annotated]
    model[1].eval()

    async def main() -> Any:
        return await asyncio.gather(*(awaits(model, log, naps) for naps in (1, 5, 3)))

    totals = asyncio.run(main())
    assert len(set(totals)) == 1
    assert log == [INSIDE] * len(log)
    assert [m.training for m in model.modules()] == [True, True, False, True, True]


def test_an_async_function_is_a_coroutine() -> None:
    coroutine = awaits(net(), [])
    assert inspect.iscoroutine(coroutine)
    assert coroutine.__name__ == "awaits"

    async def main() -> Any:
        return await asyncio.create_task(coroutine)

    assert asyncio.run(main())[1] is False


@pytest.mark.parametrize("how", ["error", "cancel", "timeout"])
def test_an_async_function_that_ends_early(how: str) -> None:
    model, log = net(), []  # type: ignore[var-annotated]

    @evaluated
    async def endless(model: nn.Module) -> None:
        try:
            while True:
                await asyncio.sleep(0.001)
                if how == "error":
                    raise KeyError("mine")
        finally:
            log.append(state(model))

    async def main() -> None:
        if how == "error":
            with pytest.raises(KeyError, match="mine"):
                await endless(model)
        elif how == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(endless(model), 0.02)
        else:
            task = asyncio.create_task(endless(model))
            await asyncio.sleep(0.01)
            assert not model.training
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert state(model) == OUTSIDE

    asyncio.run(main())
    assert log == [INSIDE]


def test_context_variables_are_the_tasks_own() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="none")

    @fast_eval
    async def sets(model: nn.Module) -> str:
        before = variable.get()
        variable.set("inside")
        await asyncio.sleep(0)
        return before

    async def main() -> None:
        variable.set("outside")
        model = net()
        assert await sets(model) == "outside"
        assert variable.get() == "inside", "as an await in the same task does"
        assert await asyncio.create_task(sets(model)) == "inside"

    asyncio.run(main())


def test_an_async_method_and_a_wrapped_model() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = optimize(net())

        @evaluated
        async def evaluate(self) -> Any:
            await asyncio.sleep(0)
            return state(self.model)

    trainer = Trainer()
    assert asyncio.run(trainer.evaluate()) == INSIDE
    assert trainer.model.training


def test_a_function_that_returns_a_coroutine() -> None:
    model = net()

    async def body() -> Any:
        await asyncio.sleep(0)
        return state(model)

    assert asyncio.run(evaluated(lambda model: body())(model)) == INSIDE
    assert state(model) == OUTSIDE


def test_a_coroutine_that_is_never_awaited_changes_nothing() -> None:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coroutine = awaits(model, [])
        del coroutine
        gc.collect()
    assert state(model) == OUTSIDE


class Told(nn.Linear):
    """Notes how it computes."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.log: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.log.append((torch.is_grad_enabled(), output.dtype))
        return output


async def later(model: nn.Module) -> Any:
    await asyncio.sleep(0)
    return model(X)


async def gathers(model: nn.Module) -> Any:
    return (await asyncio.gather(later(model), later(model)))[1]


async def in_a_task(model: nn.Module) -> Any:
    return await asyncio.create_task(later(model))


async def in_a_thread(model: nn.Module) -> Any:
    return await asyncio.to_thread(model, X)


async def in_an_executor(model: nn.Module) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, model, X)


def in_the_callers_context(model: nn.Module) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, model, X).result()


@pytest.mark.parametrize("precision", ["auto", "bf16"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("body", [gathers, in_a_task, in_a_thread, in_an_executor, in_the_callers_context])
def test_tasks_and_threads_of_the_body_call_models_as_it_does(body: Any, wrapped: bool, precision: Any) -> None:
    model = optimize(Told(), device="cpu", precision="fp32") if wrapped else Told()
    result = fast_eval(precision=precision)(body)(model)
    output = asyncio.run(result) if inspect.iscoroutine(result) else result
    assert (output.requires_grad, output.dtype) == (False, torch.float32)
    assert {*model.log} == {(False, torch.bfloat16 if precision == "bf16" else torch.float32)}


def test_a_task_that_outlives_its_evaluation_is_not_in_it() -> None:
    model = optimize(Told(), device="cpu", precision="fp32").eval()
    left: list[Any] = []

    async def after(ended: asyncio.Event) -> Any:
        await ended.wait()
        inner = fast_eval(lambda model: model(X))(model)
        return model(X).requires_grad, inner.requires_grad

    @fast_eval(precision="bf16")
    async def leaves_behind(model: nn.Module, ended: asyncio.Event) -> None:
        left.append(asyncio.create_task(after(ended)))

    async def main() -> Any:
        ended = asyncio.Event()
        await leaves_behind(model, ended)
        ended.set()
        return await left[0]

    assert asyncio.run(main()) == (False, False)
    assert model.log == [(False, torch.float32)] * 2


# --- async generators ---------------------------------------------------------------------------------------------------


@evaluated
async def async_states(model: nn.Module, log: list[Any], count: int = 3) -> AsyncIterator[Any]:
    try:
        for i in range(count):
            await asyncio.sleep(0)
            try:
                sent = yield state(model), torch.tensor(i)
                if sent is not None:
                    yield "got", sent
            except KeyError as error:
                yield "caught", error.args
    finally:
        await asyncio.sleep(0)
        log.append(state(model))


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(main())  # type: ignore[arg-type]


def test_an_async_generator_evaluates_only_while_its_body_runs() -> None:
    """F-19"""
    model, log = net(), []  # type: ignore[var-annotated]

    async def main() -> None:
        got = []
        async for value in async_states(model, log):
            got.append(value)
            assert state(model) == OUTSIDE
        assert got == [(INSIDE, i) for i in range(3)]
        assert [type(i) for _, i in got] == [int] * 3

    run(main)
    assert log == [INSIDE]
    assert inspect.isasyncgen(async_states(model, log))


def test_asend_and_athrow_go_through() -> None:
    model = net()

    async def main() -> None:
        values = async_states(model, [])
        assert await values.__anext__() == (INSIDE, 0)
        assert await values.asend("a") == ("got", "a")
        assert (await values.__anext__())[1] == 1
        assert await values.athrow(KeyError("k")) == ("caught", ("k",))
        with pytest.raises(ValueError, match="mine"):
            await values.athrow(ValueError("mine"))
        assert state(model) == OUTSIDE

    run(main)


@pytest.mark.parametrize("how", ["aclose", "aclosing", "break"])
def test_an_async_generator_that_is_closed_early(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model, log = net(), []  # type: ignore[var-annotated]

    async def main() -> Any:
        values = async_states(model, log)
        if how == "aclosing":
            async with aclosing(values):
                await values.__anext__()
        else:
            async for _ in values:
                break
            if how == "aclose":
                await values.aclose()
        assert state(model) == OUTSIDE
        return values

    run(main)  # which closes what is left open
    assert [record.message for record in caplog.records] == []
    assert log == [INSIDE]
    assert state(model) == OUTSIDE


def test_an_error_in_an_async_generator() -> None:
    model = net()

    @evaluated
    async def fails(model: nn.Module) -> AsyncIterator[Any]:
        yield 1
        await asyncio.sleep(0)
        raise KeyError("mine")

    async def main() -> None:
        values = fails(model)
        assert await values.__anext__() == 1
        with pytest.raises(KeyError, match="mine"):
            await values.__anext__()
        with pytest.raises(StopAsyncIteration):
            await values.__anext__()

    run(main)
    assert state(model) == OUTSIDE


def test_async_generators_by_turns() -> None:
    model = net()

    async def collect(log: list[Any]) -> list[Any]:
        return [value async for value in async_states(model, log)]

    async def main() -> Any:
        return await asyncio.gather(collect([]), collect([]), collect([]))

    assert run(main) == [[(INSIDE, i) for i in range(3)]] * 3
    assert state(model) == OUTSIDE


def test_an_async_context_manager() -> None:
    model = net()

    @asynccontextmanager
    @evaluated
    async def prepared(model: nn.Module) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        yield state(model)

    async def main() -> None:
        async with prepared(model) as inside:
            assert inside == INSIDE
            assert state(model) == OUTSIDE

    run(main)


def test_a_finished_evaluation_keeps_nothing_alive() -> None:
    model = net()
    list(states(model))
    asyncio.run(awaits(model, []))
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def left_early(values: Any) -> None:
    for _ in values:
        break


def closed(values: Any) -> None:
    next(values)
    values.close()


def thrown_into(values: Any) -> None:
    next(values)
    with pytest.raises(KeyError):
        values.throw(KeyError("mine"))


async def closed_while_it_waits(values: Any) -> None:
    await anext(values)
    await values.aclose()


async def thrown_into_while_it_waits(values: Any) -> None:
    await anext(values)
    with pytest.raises(KeyError):
        await values.athrow(KeyError("mine"))


@fast_eval
def endless(model: nn.Module, x: torch.Tensor) -> Iterator[Any]:
    while True:
        yield model(x)


@fast_eval
async def endless_async(model: nn.Module, x: torch.Tensor) -> AsyncIterator[Any]:
    while True:
        yield model(x)


@pytest.mark.parametrize(
    ("function", "end"),
    [
        (endless, left_early),
        (endless, closed),
        (endless, thrown_into),
        (endless_async, closed_while_it_waits),
        (endless_async, thrown_into_while_it_waits),
    ],
)
def test_what_ends_early_frees_its_arguments_at_once(function: Any, end: Any) -> None:
    x = torch.randn(3, 4)
    alive = weakref.ref(x)
    gc.disable()
    try:
        ended = end(function(nn.Linear(4, 2), x))
        if inspect.iscoroutine(ended):
            asyncio.run(ended)
        del x, ended
        assert alive() is None
    finally:
        gc.enable()
