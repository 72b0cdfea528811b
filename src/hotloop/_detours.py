"""Something else in place of a module's call, for a while: around its hooks, and gone without a trace afterwards.

`nn.Module.__call__` runs the instance's `_compiled_call_impl` in place of the call where there is one: that is how
`module.compile()` works, and torch itself leaves it out of copies and pickles. It is private, but there is no public place
like it: a hook cannot replace a computation, and hooks or a `forward` set on the instance travel with `deepcopy` and
`torch.save`.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from torch import nn

_SLOT = "_compiled_call_impl"
_lock = threading.Lock()


def _is_traced() -> bool:
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


class Detour:
    """What is called in place of a module; `run` is the call as it was.

    Evaluations that overlap share one detour per module: the first to `open_detour` makes it, and the last one to
    `close_detour` removes it.
    """

    # `jit.script` leaves out a function that it cannot compile, and gives up on any other object. Dynamo looks into a function.
    __class__ = property(lambda self: type(self) if _is_traced() else types.FunctionType)

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before = vars(module).get(_SLOT)
        self.run: Any = module._call_impl if self._before is None else self._before
        self._users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def renew(self) -> None:
        """Forget what was derived from the module's weights: one more evaluation begins."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # no detour in a copy, also where the module has a `__getstate__` of its own


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    call = vars(module).get(_SLOT)
    return call is not None and not isinstance(call, Detour)


def open_detour(module: nn.Module, kind: Callable[[nn.Module], Detour]) -> None:
    """Send the calls of `module` through `kind(module)`. Where a detour is open already, it stays and gets one more user."""
    with _lock:
        detour = vars(module).get(_SLOT)
        if not isinstance(detour, Detour):
            detour = kind(module)
            vars(module)[_SLOT] = detour
        detour._users += 1
    detour.renew()


def close_detour(module: nn.Module) -> None:
    """Give up one use of the detour; the last one gives the module its own call back."""
    with _lock:
        own = vars(module)
        detour = own.get(_SLOT)
        if not isinstance(detour, Detour):  # the module was compiled meanwhile, and keeps that
            return
        detour._users -= 1
        if not detour._users:
            del own[_SLOT]
            if detour._before is not None:
                own[_SLOT] = detour._before
