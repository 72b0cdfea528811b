"""Two modes that see each operation of a block which makes the host wait, and the stack that leads to it.

A dispatch mode sees every operator, also those of a backward pass on the device's own thread, and knows the devices. A
function mode sees the call as the user wrote it, and what dispatches nothing on a CPU (`.cpu()`, `.numpy()`, printing).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public name for it

from hotloop import _waits as rules
from hotloop._tree import leaves

Place = tuple[str, int]  # a file and a line


@dataclass
class Sync:
    """One place that makes the host wait: the call as written, how often it ran, the user's file and line, the way out."""

    op: str
    count: int
    file: str
    line: int
    hint: str


@dataclass
class Call:
    """A call in progress: all that waits in it counts once, as this call."""

    op: str | Callable[..., Any]
    hint: str = ""
    waits: bool = False
    may_wait: bool = False  # where its CPU tensors stand for tensors on a device
    on_host: bool = False  # what it reads is on the host in any case


class Watch:
    """What one block has seen. Until it meets an accelerator, CPU tensors stand for tensors on one."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, int], Sync] = {}
        self.on_accelerator = False
        self.thread = threading.get_ident()
        self._call: Call | None = None
        # What the last `.cpu()` returned, and where. On a CPU that is the tensor itself: to read it in `x.cpu().numpy()` is no
        # second wait, but another line may read the original.
        self._copied: tuple[weakref.ref[Tensor], Place] | None = None

    def run(self, call: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function`, and record what waits in it as one call."""
        if self._call is not None:  # a part of the call in progress
            return function(*args, **kwargs)
        self._call = call
        try:
            return function(*args, **kwargs)
        finally:
            self._call = None
            self._record(call)

    def run_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads, hint = rules.FUNCTIONS.get(func, (rules.never, ""))
        on_host = self._is_copied_here(args) or rules.checks_on_host(func, args, kwargs)
        may_wait = reads(*args, **kwargs)
        call = Call(func, hint if may_wait else "", False, may_wait, on_host)
        result = self.run(call, func, *args, **kwargs)
        if func == Tensor.cpu:
            self._copied = weakref.ref(result), _place(list(self.stack()))
        return result

    def _is_copied_here(self, args: tuple[Any, ...]) -> bool:
        if self._copied is None or not args:
            return False
        copied, place = self._copied
        return copied() is args[0] and place == _place(list(self.stack()))

    def see_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        devices = {tensor.device.type for tensor in leaves((args, kwargs))}
        if kwargs.get("device") is not None:
            devices.add(kwargs["device"].type)
        on_accelerator = not devices <= {"cpu", "meta"}
        if on_accelerator:
            self.meet_accelerator()
        name = func.overloadpacket.__name__
        waits, hint = rules.OPERATORS.get(name, (rules.never, ""))
        if waits(*args, **kwargs):
            call = self._call or Call(rules.operator_name(name))
            call.hint = call.hint or hint
            call.waits |= on_accelerator
            call.may_wait = True
            if self._call is None:
                self._record(call)

    def meet_accelerator(self) -> None:
        """From now on, and looking back, a CPU tensor stands for itself alone: only a call for `synchronize` stays."""
        if not self.on_accelerator:
            self.on_accelerator = True
            self.found = {key: sync for key, sync in self.found.items() if sync.hint == rules.ASKED}

    def _record(self, call: Call) -> None:
        assumed = not call.waits
        if assumed and (not call.may_wait or call.on_host or self.on_accelerator):
            return
        stack = list(self.stack())
        if assumed and _is_work_of_the_host(stack, call.op):
            return
        op = call.op if isinstance(call.op, str) else rules.call_name(call.op)
        file, line = _place(stack)
        self.found.setdefault((op, file, line), Sync(op, 0, file, line, call.hint)).count += 1

    def stack(self) -> Iterator[FrameType]:
        """Innermost first. A backward pass on a thread of its own goes on where its caller waits for it."""
        tops: list[FrameType | None] = [sys._getframe()]
        if threading.get_ident() != self.thread:
            tops.append(sys._current_frames().get(self.thread))
        for frame in tops:
            while frame is not None:
                if frame.f_code.co_filename not in _FINDER:
                    yield frame
                frame = frame.f_back


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operator to a watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Inference mode leaves it to the kernels to take operators apart, such as `item` and `linalg.inv`: out of sight.
        if torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE.name):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        self._watch.see_operator(func, args, kwargs)
        return func(*args, **kwargs)


class Functions(TorchFunctionMode):
    """Shows every call of a torch function to a watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:
            return func(*args, **kwargs)
        return self._watch.run_function(func, args, kwargs)


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# A backward pass is many operators and hooks, and each of them counts by itself.
_BACKWARD = (Tensor.backward, torch.autograd.grad)

_OWN = sys._getframe().f_code.co_filename
_HOTLOOP = os.path.dirname(_OWN) + os.sep
_FINDER = (_OWN, f"{_HOTLOOP}_syncs.py")
_PLAIN_LOOP = f"{_HOTLOOP}_loops.py"  # stands for a user's
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LOADERS = (os.path.join(_TORCH, "utils", "data", ""), f"{_HOTLOOP}_loading.py")
_RECURRENT = torch.nn.modules.rnn.__file__
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_PYTHON = ("<frozen", "<eval_with_key", os.path.dirname(os.__file__) + os.sep)


def _owner(frame: FrameType) -> str:
    """Whose code runs in a frame: torch, hotloop, an installed package, Python itself, or the user."""
    file = frame.f_code.co_filename
    if file.startswith(_TORCH):
        return "torch"
    if file.startswith(_HOTLOOP):
        return "user" if file == _PLAIN_LOOP else "hotloop"
    if any(folder in file for folder in _PACKAGES):
        return "package"
    return "python" if file.startswith(_PYTHON) else "user"


def _place(stack: list[FrameType]) -> Place:
    """The innermost line of the user's; where there is none, of a package."""
    frame = next((f for f in stack if _owner(f) == "user"), None)
    frame = frame or next((f for f in stack if _owner(f) == "package"), stack[0])
    return frame.f_code.co_filename, frame.f_lineno


def _is_work_of_the_host(stack: list[FrameType], op: Any) -> bool:
    """Whether code that reads CPU tensors would read CPU tensors on a machine with an accelerator too.

    So do data loaders, an optimizer with its step counter and learning rate, a recurrent layer with the `batch_sizes` of a
    packed sequence, torch where it places what it made, and hotloop, which leaves on a device what it reads at once on a CPU.
    """
    inner = stack[0]
    owner = _owner(inner)
    if owner == "hotloop" or inner.f_code.co_filename == _RECURRENT:
        return True
    if owner == "torch" and (op in rules.PLACING or _is_setting(inner.f_code.co_name, op)):
        return True
    return any(frame.f_code.co_filename.startswith(_LOADERS) for frame in stack)


def _is_setting(function: str, op: Any) -> bool:
    """Whether one of torch's optimizers reads its counter, or passes a tensor as the learning rate."""
    return function == "_get_value" or (function.startswith(("_single_tensor_", "_multi_tensor_")) and op != Tensor.item)
