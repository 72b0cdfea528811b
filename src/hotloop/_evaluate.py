"""`fast_eval`: a function that evaluates models, run as an evaluation should be."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_not
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hotloop._decorated import decorated
from hotloop._evaluation import DTYPES, Evaluation, Wishes
from hotloop._found_models import NamedModels, bound_to, held_by, in_arguments
from hotloop._given import given
from hotloop._ledger import _outside
from hotloop._loading import Prefetch
from hotloop._reduction import Reduction
from hotloop._runners import lazily, run
from hotloop._shares import evaluating_world, whole
from hotloop._tree import move
from hotloop._write_back import WriteBack

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D", bound="classmethod[Any, Any, Any] | staticmethod[Any, Any]")

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Inference = Literal["no_grad", "inference_mode"]
Reduce = Literal["sum", "mean"]


@overload
def fast_eval(function: D, /) -> D: ...  # type: ignore[overload-overlap]  # a staticmethod can be called as well
@overload
def fast_eval(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def fast_eval(
    *,
    model: nn.Module | Sequence[nn.Module] | None = ...,
    precision: Precision = ...,
    inference: Inference = ...,
    fold_batchnorm: bool | Literal["auto"] | None = ...,
    reduce: Reduce | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def fast_eval(
    function: Any = None,
    /,
    *others: Any,
    model: nn.Module | Sequence[nn.Module] | None = None,
    precision: str = "auto",
    inference: str = "no_grad",
    fold_batchnorm: bool | str | None = "auto",
    reduce: str | None = None,
) -> Any:
    """Decorate a function that evaluates models: they are in eval mode, gradients are off, and it returns numbers.

    Works on functions, methods, classmethods, staticmethods, generators, async functions and async generators. While the body
    runs (of a generator: only while it runs, not between two of its values)

    - every model among the arguments, in `self` or another first argument or its attributes, in `model=`, and in the closure
      and globals that the function names, is in eval mode. Afterwards, also after an error, each submodule has the mode that
      it had. Where no model is found, a warning says so once;
    - gradients are off; inside the body `torch.enable_grad()` works as usual;
    - models are called as wrapped ones: their arguments are moved to their device, and the 16-bit outputs of float32 models come
      back in float32. Tensors among the arguments of the function are moved as well, and a `DataLoader` among them is prefetched;
    - plain models take their images in channels_last where `optimize` would choose it; outputs and weights keep their layout,
      and models with hooks are left alone. Rounds differently (1e-6);
    - BatchNorm layers that take the output of a convolution are computed with it, from the weights of the moment (a few filters
      that the body writes through NumPy or `.data` go unnoticed). The modules stay as they are, and layers with hooks are left
      alone. Rounds differently (3e-7). Neither is done on models wrapped with `exact=True`.

    The result, and every value that a generator yields, is detached, and each 0-dim tensor in it, at any depth, becomes a
    Python number, all of them in one transfer. Larger tensors stay where they are.

    Costs some 200 microseconds a call for a model of 60 modules in training mode, which is what `eval()` and `train()` take,
    and a few microseconds for each call of a model, of a plain one on a CPU without BatchNorm one microsecond.

    Args:
        model: a model, or a list of them, that the function uses and that cannot be found.
        precision: "fp32", "bf16" or "fp16" for the whole body; with "auto" the calls of a wrapped model have its precision,
            and everything else is as it is without.
        inference: "no_grad", or "inference_mode", whose tensors cannot be used in training afterwards.
        fold_batchnorm: "auto" where it can be done; False leaves it; True makes it an error where nothing can be folded.
        reduce: among several processes, where every rank else evaluates everything: "sum" or "mean" gives each its part of
            every loader among the arguments, no sample twice and none left out (`loader.dataset` stays whole), and reduces
            every returned number and tensor over the ranks, in one exchange. "mean" weighs each rank by its samples.

    Raises:
        TypeError: what is decorated is a class, a model or no function at all.
        ValueError: a wish that does not exist; and at a call, one that its models do not allow.

    Example:
        >>> @fast_eval
        ... def accuracy(model, batches):
        ...     hits = sum((model(x).argmax(1) == y).sum() for x, y in batches)
        ...     return {"accuracy": hits / sum(len(y) for _, y in batches)}
        >>> accuracy(nn.Linear(4, 1), [(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))])
        {'accuracy': 1.0}
    """
    if others:
        raise _called_with_arguments((function, *others))
    wishes = Wishes(_models(model), precision, inference, fold_batchnorm, reduce)
    _check(wishes)

    def decorate(function: Any) -> Any:
        function = _decorable(function)
        return decorated(function, _Evaluator(function, wishes).call)

    return decorate if function is None else decorate(function)


class _Evaluator:
    """What the decoration puts around the function."""

    def __init__(self, function: Any, wishes: Wishes) -> None:
        plain = getattr(function, "__func__", function)
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        self._is_lazy = any(is_kind(plain) for is_kind in kinds)
        self._name = getattr(plain, "__qualname__", type(plain).__name__)
        self._is_method = _first_parameter(function) in ("self", "cls")
        self._function = function
        self._named = NamedModels(function)
        if wishes.reduce is not None and self._is_lazy:
            raise TypeError(
                f"fast_eval(reduce={wishes.reduce!r}) over {self._name}: what a generator or a coroutine hands out cannot be reduced; "
                "write a function that returns its numbers"
            )
        self._wishes = wishes
        self._has_warned = False

    def call(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        models = self._models(instance, args, kwargs)
        evaluation = Evaluation(self._wishes, models)
        world = None if self._wishes.reduce is None else evaluating_world(evaluation.world)
        reduction = None if world is None else Reduction(str(self._wishes.reduce), world, self._name, even=_is_sharded(models))
        device, own = evaluation.device, (args, kwargs)
        if device is not None or reduction is not None:
            args, kwargs = _prefetched((args, kwargs), evaluation.loads_to, whole if reduction is None else reduction.share)
        if device is not None and (device.type != "cpu" or torch.accelerator.is_available()):  # else all there is is there
            args, kwargs = move((args, kwargs), device)
        if args is not own[0] or kwargs is not own[1]:
            evaluation.write_back = WriteBack(own, (args, kwargs))
        if reduction is not None:
            return reduction.run(partial(run, evaluation, wrapped, args, kwargs))
        if self._is_lazy:
            return lazily(evaluation, wrapped(*args, **kwargs))
        return run(evaluation, wrapped, args, kwargs)

    def _models(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
        if instance is None:  # through a property or another decorator `self` comes first, and a trainer in its place
            first = next(iter(args or kwargs.values()), None)
            instance = first if self._is_method or not isinstance(first, nn.Module | Tensor) else None
        bound = bound_to(self._function)
        found = [*in_arguments((args, kwargs)), *held_by(instance), *bound, *self._wishes.models, *self._named]
        if not found and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"fast_eval found no model in the arguments, in self, or in what {self._name} names, so that none is put in eval "
                "mode; write @fast_eval(model=net)",
                stacklevel=_outside(),
            )
        return list({id(model): model for model in found}.values())


def _is_sharded(models: list[nn.Module]) -> bool:
    return given(models) not in ("", "DistributedDataParallel")


def _first_parameter(function: Any) -> str | None:
    code = getattr(function, "__code__", None)
    return code.co_varnames[0] if code is not None and code.co_argcount else None


def _prefetched(value: Any, target: Any, read: Callable[[Any], Any]) -> Any:
    """Arguments, with data loaders of which this process reads what `read` gives, and that send their batches to the model."""
    if isinstance(value, Prefetch):
        over = read(value.__wrapped__)
        return value if over is value.__wrapped__ else value._self_over(over)
    if isinstance(value, DataLoader):
        return Prefetch(read(value), target, depth=2)
    if type(value) is dict:
        items = {key: _prefetched(item, target, read) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if type(value) in (tuple, list) and not (value and type(value[0]) is Tensor):  # of batches there may be thousands
        made = type(value)(_prefetched(item, target, read) for item in value)
        return made if any(map(is_not, made, value)) else value
    return value


def _decorable(function: Any) -> Any:
    if isinstance(function, type):
        raise TypeError(
            f"@fast_eval class {function.__name__}: it decorates functions, and a class would lose its `super()`; "
            "decorate the methods that evaluate"
        )
    if isinstance(function, nn.Module):
        raise TypeError(
            f"fast_eval({type(function).__name__}(...)): it decorates a function; write @fast_eval(model=net) over one that "
            "uses the model, or net = optimize(net) to call it as it is"
        )
    if not callable(function) and not isinstance(function, classmethod | staticmethod):
        raise TypeError(
            f"fast_eval({type(function).__name__}): it decorates a function; write it next to the `def`, below @property and "
            "the like"
        )
    return function


def _called_with_arguments(given: tuple[Any, ...]) -> TypeError:
    called = ", ".join(getattr(value, "__name__", type(value).__name__) for value in given)
    return TypeError(
        f"fast_eval({called}): it decorates a function, and does not call it; write fast_eval(function)(model, loader), or "
        "@fast_eval over the `def` and function(model, loader)"
    )


def _models(given: Any) -> tuple[nn.Module, ...]:
    models = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"fast_eval(model={type(model).__name__}): model is a torch.nn.Module, or a list of modules")
    return models


def _check(wishes: Wishes) -> None:
    rules: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("precision", wishes.precision, ("auto", *DTYPES)),
        ("inference", wishes.inference, ("no_grad", "inference_mode")),
        ("fold_batchnorm", wishes.fold_batchnorm, ("auto", True, False, None)),
        ("reduce", wishes.reduce, (None, "sum", "mean")),
    ]
    for name, wish, allowed in rules:
        if wish not in allowed:
            raise ValueError(
                f"fast_eval({name}={wish!r}): {name} is one of {', '.join(map(repr, allowed))}; write one of these"
            )
