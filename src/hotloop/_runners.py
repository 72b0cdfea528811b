"""Running a decorated function, in whatever way Python runs it, and handing out numbers in place of scalars."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from hotloop._dynamo import kept_from_dynamo
from hotloop._evaluation import Evaluation
from hotloop._reading import read_numbers
from hotloop._tree import leaves, map_leaves


def as_result(value: Any) -> Any:
    """`value` with every 0-dim tensor as a Python number, all read in one transfer; larger tensors are detached."""
    scalars = {id(tensor): tensor for tensor in leaves(value) if tensor.dim() == 0 and tensor.device.type != "meta"}
    numbers = dict(zip(scalars, read_numbers(list(scalars.values())), strict=True))

    def finish(tensor: Tensor) -> Any:
        if id(tensor) in numbers:
            return numbers[id(tensor)]
        return tensor.detach() if tensor.requires_grad else tensor

    return map_leaves(finish, value)


@kept_from_dynamo
def _piece(context: AbstractContextManager[None], step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context:
        return step(*args, **kwargs)


def run(evaluation: Evaluation, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `function(*args, **kwargs)`; where that is a generator or a coroutine, its body is evaluated as it runs."""
    result = _piece(evaluation.whole(), function, *args, **kwargs)
    return lazily(evaluation, result)


def lazily(evaluation: Evaluation, result: Any) -> Any:
    """A generator, iterator or coroutine whose body has not begun, as one that is evaluated while it runs; else the result."""
    kind: Any
    for kind, runner in _LAZY:
        if isinstance(result, kind):
            made = runner(evaluation, result)
            made.__name__, made.__qualname__ = result.__name__, result.__qualname__  # for messages and tracebacks
            return made
    body = getattr(result, "gen", None) if isinstance(result, AbstractContextManager) else None
    if isinstance(body, types.GeneratorType):
        raise TypeError(
            f"fast_eval(contextmanager({body.__name__})): what is evaluated is the body of a function, and never the block of a "
            f"`with`; leave {body.__name__} as it is, and write @fast_eval over the function that has the block"
        )
    return as_result(_running(evaluation, result))


def _running(evaluation: Evaluation, result: Any) -> Any:
    """The result with every iterator that is still to run, such as a `map`, evaluated as it runs."""
    if isinstance(result, types.GeneratorType):
        return _generator(evaluation, result)
    if isinstance(result, Iterator) and not isinstance(result, io.IOBase):
        return _generator(evaluation, _from(result))
    if type(result) is dict:
        made = {key: _running(evaluation, value) for key, value in result.items()}
        return made if any(made[key] is not result[key] for key in made) else result
    if type(result) in (list, tuple) and not all(map(_is_plain, result)):
        return type(result)(_running(evaluation, value) for value in result)
    return result


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, float, int, str)  # of predictions there may be thousands


def _from(iterator: Iterator[Any]) -> Generator[Any, Any, Any]:
    yield from iterator


def _generator(evaluation: Evaluation, body: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    result = yield from _in_pieces(body, evaluation.whole, as_result)
    return as_result(result)


def _in_pieces(
    body: Any, context: Callable[[], AbstractContextManager[None]], finish: Callable[[Any], Any]
) -> Generator[Any, Any, Any]:
    """Runs `body` to its end, each piece up to its next `yield` (or `await`) in a context of its own."""
    # The traceback of an error that is thrown in and comes out again holds the frames on its way. None of them may hold the error:
    # with the arguments of the body they would stay until the garbage is collected. So the next step is handed on in a list.
    steps = [partial(body.send, None)]
    try:
        while True:
            done, item = _piece(context(), _advance, steps)
            if done:
                return item
            try:
                steps.append(partial(body.send, (yield finish(item))))
            except BaseException as error:  # also GeneratorExit: the body cleans up in its context
                steps.append(partial(body.throw, error))
    finally:
        del body


def _advance(steps: list[Callable[[], Any]]) -> tuple[bool, Any]:
    """Whether the body has ended, and what it yields or returns."""
    try:
        return False, steps.pop()()
    except StopIteration as stop:
        return True, stop.value


class _Awaited:
    """Awaits `body` piece by piece: between them other tasks run, with gradients and precision of their own."""

    def __init__(self, evaluation: Evaluation, body: Any) -> None:
        self._evaluation, self._body = evaluation, body

    def __await__(self) -> Generator[Any, Any, Any]:
        return _in_pieces(self._body, self._evaluation.running, lambda awaited: awaited)


async def _coroutine(evaluation: Evaluation, body: Any) -> Any:
    with evaluation.held():
        result = await _Awaited(evaluation, body)
    return as_result(result)


async def _async_generator(evaluation: Evaluation, body: Any) -> AsyncGenerator[Any, Any]:
    steps = [_first_step(body)]
    while True:
        try:
            with evaluation.held():
                item = await _Awaited(evaluation, steps.pop())
        except StopAsyncIteration:
            return
        try:
            steps = [body.asend((yield as_result(item)))]
        except BaseException as error:  # also GeneratorExit
            steps = [body.athrow(error)]


def _first_step(body: Any) -> Any:
    # An event loop closes the generators that it sees begin. It sees ours, which closes this one.
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return body.asend(None)
    finally:
        sys.set_asyncgen_hooks(*hooks)


_LAZY: tuple[tuple[type, Callable[[Evaluation, Any], Any]], ...] = (
    (types.GeneratorType, _generator),
    (types.CoroutineType, _coroutine),
    (types.AsyncGeneratorType, _async_generator),
)
