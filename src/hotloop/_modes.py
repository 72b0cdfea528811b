"""Eval mode for a while: every submodule gets back the flag that it had, whatever happened in between.

Each submodule counts the evaluations that hold it. The first one remembers its flag and the last one out gives it back, so
that nested and concurrent evaluations, also of models that share parts, do not thaw each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import wrapt
from torch import nn

_lock = threading.RLock()  # a user's `train()` may itself evaluate something
_held: dict[int, _Held] = {}


class _Held:
    """How many evaluations hold a module, and the flag it had before the first of them."""

    __slots__ = ("count", "flag")

    def __init__(self, flag: bool) -> None:
        self.count = 0
        self.flag = flag


class Modes:
    """Puts modules in eval mode, once or many times. `modules` is every submodule, parents first.

    The switch is the one of `module.eval()`: a `train()` or `eval()` of the user's own is called, by the parent or for the
    module alone. Where everything is in eval mode already, nothing is called and nothing is written.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = [plain(root) for root in roots]
        self.modules = list(submodules(self._roots))
        self._give_back: list[bool] = []

    def switch(self) -> None:
        """Put everything in eval mode. Each `switch` needs one `restore`."""
        with _lock:
            self._give_back = [_hold(module) for module in self.modules]
            try:
                if _any_in_training(self.modules):
                    for root in self._roots:
                        if len(self._roots) == 1 or _any_in_training(submodules([root])):
                            _evaluate(root, outermost=True)
            except BaseException:
                self.restore()
                raise

    def restore(self) -> None:
        """Give each submodule its flag back, unless another evaluation still needs it in eval mode."""
        with _lock:
            flags = [_release(module, flag) for module, flag in zip(self.modules, self._give_back, strict=True)]
            error: BaseException | None = None
            for module, flag in zip(self.modules, flags, strict=True):
                if _flag(module) is not flag:
                    try:
                        if _overrides(module):
                            module.train(flag)  # may set what is below as well: that comes later in the list
                    except BaseException as raised:  # the others get theirs all the same
                        error = error or raised
                    _set(module, flag)
            if error is not None:
                raise error


def plain(module: nn.Module) -> nn.Module:
    """The module itself, where it is wrapped in a proxy."""
    return module.__wrapped__ if isinstance(module, wrapt.BaseObjectProxy) else module


def submodules(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Every module below `roots`, parents first, each one once; proxies are looked through."""
    # `Module.modules()` builds a name for each one, which takes several times as long.
    seen: set[int] = set()
    waiting = list(reversed(roots))
    while waiting:
        module = plain(waiting.pop())
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]


def _hold(module: nn.Module) -> bool:
    """Count one more evaluation, and tell which flag it must give back when it is not the last one out."""
    held = _held.get(id(module))
    if held is None:
        held = _held[id(module)] = _Held(_flag(module))
        flag = False
    else:
        flag = _flag(module)  # True where the body of an outer evaluation trains
    held.count += 1
    return flag


def _release(module: nn.Module, flag: bool) -> bool:
    held = _held[id(module)]
    held.count -= 1
    if held.count:
        return flag
    del _held[id(module)]
    return held.flag


def _evaluate(module: nn.Module, *, outermost: bool = False) -> None:
    # What `module.eval()` does, without the seven microseconds that it takes for each plain submodule.
    if not _overrides(module):
        if _flag(module):
            _set(module, False)
        for child in module._modules.values():
            if child is not None:
                _evaluate(plain(child))
    elif outermost:
        try:
            module.eval()
        except NotImplementedError:
            if "eval" not in vars(module):  # the module of an exported program: what it does is settled
                raise
    else:
        module.train(False)


def _any_in_training(modules: Iterable[nn.Module]) -> bool:
    return any(map(_flag, modules))


def _flag(module: nn.Module) -> bool:
    return getattr(module, "training", False)  # frozen scripted modules have lost theirs


def _set(module: nn.Module, flag: bool) -> None:
    own = vars(module)
    if "training" in own:
        own["training"] = flag  # a tenth of the time that `Module.__setattr__` takes
    else:
        module.training = flag  # scripted and compiled modules keep it elsewhere


def _overrides(module: nn.Module) -> bool:
    kind, own = type(module), vars(module)
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval or "train" in own or "eval" in own
