"""The plain loop against the wrapped loop, on the user's own model and batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop._arguments import misfit_of
from hotloop._comparison import Comparison
from hotloop._loops import Loop, RandomState, plain_step, seed
from hotloop._optimize import optimize
from hotloop._parts import live_of
from hotloop._rebind import following
from hotloop._tree import leaves, map_leaves

Made = tuple[nn.Module, Optimizer, Any]

_WARM_UP = 5  # steps that are not timed: the memory is measured in the last but one, syncs are found in the last
_TURNS = 20
_CHANGES = frozenset({"accumulate", "clip_norm", "scheduler", "before_update"})


def compare(
    make: Callable[[], Any], batches: Iterable[Any] | Callable[[], Iterable[Any]], *, steps: int = 100, **wishes: Any
) -> Comparison:
    """Train by the plain loop and by the wrapped one, and report what the wrap is worth on this model.

    Args:
        make: builds a fresh `(model, optimizer, loss_fn)`, or `(model, optimizer)` for a model that returns its own loss. It
            is called twice, from one seed.
        batches: what both loops train on, in this order; begun again at its end, unless it is an iterator. Or a function that
            returns it. Tensors that the model changes in place are copied for each loop.
        steps: how many steps of each loop are timed. Five more come before.
        wishes: arguments for `optimize` that leave the training what it is, such as `exact=True` or `precision="bf16"`.

    The loops take turns of a few steps, on the same device, each with a random state of its own. The plain one moves the
    batch, then calls `zero_grad`, the model, the loss, `backward` and `optimizer.step`; a turn ends when the device is done.
    Loading is not timed, and neither loop reads its loss within a turn: a loop that does gains more on an accelerator.

    Returns:
        A report: time per step and its ratio (wrapped to plain), peak memory, syncs per step, the largest difference between
        the weights, and the final losses. `print` shows it, `as_dict()` is plain data, `plot(path)` draws it.

    Raises:
        TypeError: `make` returns something else, or `batches` are none.
        ValueError: `make` cannot build twice, the batches run out, or a loss is not finite.

    Costs the time of the steps and the memory of both models. The global random state is put back.

    >>> def make():
    ...     net = nn.Linear(4, 2)
    ...     return net, torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
    >>> report = compare(make, [(torch.randn(8, 4), torch.randint(2, (8,)))], steps=20, exact=True)
    >>> report.max_weight_difference
    0.0
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"compare(..., steps={steps!r}): steps is how many steps of each loop are timed; pass 1 or more")
    if isinstance(make, nn.Module) or not callable(make):
        raise TypeError(
            f"compare(<{type(make).__name__}>, ...): two models are trained, and made for it; pass a function that builds and "
            "returns a new (model, optimizer, loss_fn)"
        )
    changes = sorted(wishes.keys() & _CHANGES)
    if changes:
        raise TypeError(
            f"compare(..., {changes[0]}=...): this changes the training, and the plain loop would train something else; "
            "compare without it"
        )
    before = RandomState()
    try:
        batches = _iterable(batches)
        (model, optimizer, loss_fn), wrapped = _build_twice(make)
        wrapped_model, step = optimize(*wrapped, **wishes)
        device = live_of(wrapped_model).parts.device  # type: ignore[union-attr]
        for module in (model, loss_fn):
            if isinstance(module, nn.Module):
                with following(module, [optimizer]):
                    module.to(device)
        seed()
        plain = Loop("plain", plain_step(model, optimizer, loss_fn, device), model, optimizer, device)
        ours = Loop("wrapped", step, *wrapped[:2], device)
        _run((plain, ours), _Batches(batches, steps), steps)
    finally:
        before.put_back()
    return Comparison(plain.measured(), ours.measured(), _difference(model, wrapped[0]), step.plan, device)


def _run(loops: tuple[Loop, Loop], batches: _Batches, steps: int) -> None:
    are_changed = False
    for measure, count in ((Loop.train, _WARM_UP - 2), (Loop.measure_memory, 1), (Loop.count_syncs, 1)):
        chunk = batches.take(count)
        for loop in reversed(loops):  # a step explains what is wrong with a batch, a plain loop does not
            copies = map_leaves(_copy, chunk)
            measure(loop, copies)
            are_changed |= any(tensor._version for tensor in leaves(copies))
    length = max(1, steps // _TURNS)
    for turn, first in enumerate(range(0, steps, length)):
        chunk = batches.take(min(length, steps - first))
        for loop in loops if turn % 2 == 0 else loops[::-1]:
            own = map_leaves(_copy, chunk) if are_changed else chunk
            loop.times.append(loop.train(own) / len(own))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _iterable(batches: Any) -> Iterable[Any]:
    made = _called(batches, "batches") if callable(batches) and not isinstance(batches, Iterable) else batches
    if not isinstance(made, Iterable) and not hasattr(made, "__getitem__"):
        what = f"<{type(made).__name__}>" if made is batches else f"<function that returns {type(made).__name__}>"
        raise TypeError(
            f"compare(make, {what}): both loops train on batches; pass a loader, a list of batches, or a function that returns one"
        )
    return made  # type: ignore[no-any-return]


class _Batches:
    """The batches in turns, from the start again where they can be."""

    def __init__(self, batches: Iterable[Any], steps: int) -> None:
        self._batches, self._steps = _cycle(batches), steps
        self._taken = 0

    def take(self, count: int) -> list[Any]:
        taken = list(islice(self._batches, count))
        self._taken += len(taken)
        if len(taken) < count:
            raise ValueError(
                f"compare(make, batches, steps={self._steps}): the batches ran out after {self._taken}, and "
                f"{self._steps + _WARM_UP} are needed; pass a loader or a list, which can be begun again, or fewer steps"
            )
        return taken


def _cycle(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches)
    while True:
        is_empty = True
        for batch in iterator:
            is_empty = False
            yield batch
        if is_empty:  # as an iterator is the second time
            return
        iterator = iter(batches)


def _called(function: Callable[[], Any], name: str) -> Any:
    if misfit := misfit_of(function):
        raise TypeError(
            f"compare(make, batches): {name}() is called without arguments, which does not fit: {misfit}; give it defaults, or "
            "pass a lambda"
        )
    return function()


def _build_twice(make: Callable[[], Any]) -> tuple[Made, Made]:
    """What `make` builds, twice from one seed: two trainings that share nothing and start alike."""
    seed()
    first = _checked(_called(make, "make"))
    seed()
    try:
        second = _checked(make())
    except Exception as error:
        raise ValueError(
            f"compare(make, batches): make() failed when it was called for the second time ({type(error).__name__}: {error}); "
            "it builds a new model, a new optimizer and a new loss_fn each time"
        ) from error
    if first[1] is second[1] or _trained(first) & _trained(second):
        raise ValueError(
            "compare(make, batches): make() returned the same model or optimizer twice, or a loss_fn with the same trained "
            "parameters, and two loops cannot train them; build new ones inside of make()"
        )
    if first[2] is second[2] and isinstance(first[2], nn.Module):  # it may count, or average
        with suppress(Exception):  # one that cannot be copied is shared, as in the user's own loops
            second = *second[:2], copy.deepcopy(second[2])
    theirs = dict(_state(second))
    for name, ours in _state(first):
        if not is_lazy(ours) and not _are_equal(ours, theirs.get(name)):
            raise ValueError(
                f"compare(make, batches): make() built two models that differ from the start, in {name!r}, although both were "
                "built from the same seed; take all random numbers in it from the global generators, and leave no memory as "
                "torch.empty gives it"
            )
    return first, second


def _trained(made: Made) -> set[int]:
    model, optimizer, _ = made
    return {id(p) for p in chain(model.parameters(), *(group["params"] for group in optimizer.param_groups))}


def _state(made: Made) -> Iterator[tuple[str, Tensor]]:
    for module, prefix in ((made[0], ""), (made[2], "loss_fn")):
        if isinstance(module, nn.Module):
            yield from chain(module.named_parameters(prefix), module.named_buffers(prefix))


def _are_equal(ours: Tensor, theirs: Tensor | None) -> bool:
    if theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.layout is not torch.strided or ours.is_meta:  # such as a graph in a buffer, which torch does not compare
        return True
    return torch.equal(ours, theirs) or torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def _checked(made: Any) -> Made:
    parts = tuple(made) if isinstance(made, tuple | list) else (made,)
    if len(parts) in (2, 3) and isinstance(parts[0], nn.Module) and isinstance(parts[1], Optimizer):
        loss_fn = parts[2] if len(parts) == 3 else None
        if live_of(parts[0]) is not None:
            raise TypeError("compare(make, batches): make() returned a wrapped model; return the plain one, compare wraps it")
        if loss_fn is None or callable(loss_fn):
            return parts[0], parts[1], loss_fn
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise TypeError(
        f"compare(make, batches): make() returned ({kinds}); it returns (model, optimizer, loss_fn), or (model, optimizer) "
        "for a model that returns its own loss"
    )


def _difference(first: nn.Module, second: nn.Module) -> float:
    largest = 0.0
    theirs = second.state_dict()
    for name, ours in first.state_dict().items():
        if isinstance(ours, Tensor) and ours.layout is torch.strided and ours.numel():
            wide = torch.complex128 if ours.is_complex() else torch.float64
            difference = (ours.cpu().to(wide) - theirs[name].cpu().to(wide)).abs().max().item()
            if not difference <= largest:  # nan is the largest of all
                largest = difference
    return largest
