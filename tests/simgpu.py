"""A simulated accelerator, so that everything about a second device is tested on a machine that has none.

After `register()`, torch has a device named `simgpu`. Its memory is host memory behind a wall: a tensor gets there and back
only by a copy, and an operation that mixes devices raises what CUDA raises. Autograd, autocast, `GradScaler("simgpu")`, fused
optimizers, convolutions, recurrent and attention layers, `deepcopy` and `torch.save` work on it.

`counts` tells what was done, by the operator's name and by these keys:

    h2d, d2h            copies to the device and back; `h2d.blocking` and `d2h.blocking` are those that stop the host
    event.record, event.query, event.synchronize, stream.wait, stream.synchronize, device.synchronize

and `host_waits()` adds up everything that makes a host wait for its device. Inside `asynchronous()` a copy into pinned memory
arrives only once an event that was recorded after it, or the device, is waited for; until then the memory holds garbage. A copy
out of pinned memory that does not block brings what that memory holds when the device is waited for.

The device becomes the current accelerator of the whole process, and torch allows no way back. So importing this file changes
nothing, and tests that need the device carry `@pytest.mark.simgpu`: `simgpu_process` runs them in a process of their own.
`Module.to` replaces the parameters on it, which CUDA's does not.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

NAME = "simgpu"
SUPPORTED = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)

counts: Counter[str] = Counter()
aten = torch.ops.aten

_WAITS = ["h2d.blocking", "d2h.blocking", "event.synchronize", "stream.synchronize", "device.synchronize"]
# The size of the result, or the result itself, is known to the device alone: these stop the host inside the operator.
_WAITING_OPS = [
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "boolean index",
]  # fmt: skip


def host_waits() -> int:
    """How often the host has waited for the device since `counts.clear()`."""
    return sum(counts[name] for name in (*_WAITS, *_WAITING_OPS))


# --- asynchronous copies ----------------------------------------------------------------------------------------------

_pinned: WeakSet[Any] = WeakSet()  # storages
_in_flight: list[tuple[int, Callable[[], object]]] = []
_read_late: list[tuple[Tensor, Tensor, Tensor]] = []  # pinned memory, what it held when its copy was issued, where to
_issued = 0
_delayed = False


@contextmanager
def asynchronous() -> Iterator[None]:
    """Hold copies into pinned memory back until they are waited for."""
    global _delayed
    _delayed = True
    try:
        yield
    finally:
        _delayed = False
        arrive()


def in_flight() -> int:
    """How many copies have been issued and have not arrived."""
    return len(_in_flight)


def arrive(until: int | None = None) -> None:
    """Let the copies issued so far, or the first `until` of the process, arrive: the device has got there."""
    for source, values, target in _read_late:
        if not torch.equal(source, values):
            target.copy_(source)
    _read_late.clear()
    while _in_flight and (until is None or _in_flight[0][0] <= until):
        _in_flight.pop(0)[1]()


def _send(target: Tensor, values: Tensor) -> None:
    global _issued
    if not _delayed:
        target.copy_(values)
        return
    _issued += 1
    target.fill_(float("nan") if target.is_floating_point() or target.is_complex() else 77)
    snapshot = values.clone()  # streams run in order: a later change on the device comes after this copy
    _in_flight.append((_issued, lambda: target.copy_(snapshot)))


def _counted(name: str) -> None:
    counts[name] += 1


class _Event(torch.Event):
    _until = 0

    def record(self, stream: Any = None) -> None:
        _counted("event.record")
        self._until = _issued

    def query(self) -> bool:
        _counted("event.query")
        return not any(number <= self._until for number, _ in _in_flight)

    def synchronize(self) -> None:
        _counted("event.synchronize")
        arrive(self._until)

    def wait(self, stream: Any = None) -> None:
        _counted("stream.wait")

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _Stream(torch.Stream):
    def record_event(self, event: Any = None) -> _Event:
        event = _Event(NAME) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        _counted("stream.wait")

    def wait_stream(self, stream: Any) -> None:
        _counted("stream.wait")

    def query(self) -> bool:
        return not _in_flight

    def synchronize(self) -> None:
        _counted("stream.synchronize")
        arrive()


def _synchronize(device: Any = None) -> None:
    _counted("device.synchronize")
    arrive()


# --- tensors ----------------------------------------------------------------------------------------------------------


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `host` is the host tensor that holds its values, out of reach for the code under test."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            layout=host.layout, device=torch.device(NAME, 0),
        )  # fmt: skip
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{NAME}({self.host!r})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = (self.detach().cpu(), self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, parts

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: DeviceTensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.host = value.host

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _HANDLERS.get(op, functools.partial(_run, op))(*args, **(kwargs or {}))


def _on_device(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


_CPU_TENSORS_WELCOME = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
                        aten._pack_padded_sequence.default}  # fmt: skip


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the host tensors behind its arguments."""
    counts[op.name()] += 1
    known: dict[int, DeviceTensor] = {}  # an in-place operator returns its argument
    mixed = False

    def to_host(value: Any) -> Any:
        nonlocal mixed
        if isinstance(value, DeviceTensor):
            known[id(value.host)] = value
            return value.host
        if isinstance(value, Tensor):
            mixed |= value.dim() > 0
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else DeviceTensor(value)

    args, kwargs = pytree.tree_map(to_host, (args, kwargs))
    if mixed and known and op not in _CPU_TENSORS_WELCOME:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! ({op})"
        )
    return pytree.tree_map(to_device, op(*args, **kwargs))


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`target.copy_(source)`, from, to or on the device."""
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        counts["d2d"] += 1
        target.host.copy_(source.host)
    elif isinstance(target, DeviceTensor):
        _count_copy("h2d", non_blocking)
        target.host.copy_(source)
        if _delayed and non_blocking and source.is_pinned():
            _read_late.append((source.detach(), source.detach().clone(), target.host))
    elif isinstance(source, DeviceTensor):
        asynchronous_copy = non_blocking and target.is_pinned()
        _count_copy("d2h", asynchronous_copy)
        if asynchronous_copy:
            _send(target, source.host)
        else:
            arrive()
            target.copy_(source.host)
    return target


def _count_copy(kind: str, non_blocking: bool) -> None:
    counts[kind] += 1
    if not non_blocking:
        counts[f"{kind}.blocking"] += 1


def _to_copy(source: Tensor, *, device: Any = None, non_blocking: bool = False, dtype: Any = None, **kwargs: Any) -> Tensor:
    if device is None or torch.device(device).type == NAME:
        return _run(aten._to_copy.default, source, dtype=dtype, **kwargs)
    # Pinned: as CUDA does it.
    host = torch.empty(source.shape, dtype=dtype or source.dtype, device="cpu", pin_memory=non_blocking)
    return _copy(host, source, non_blocking)


def _local_scalar_dense(source: DeviceTensor) -> Any:
    counts["aten::_local_scalar_dense"] += 1
    arrive()
    return source.host.item()


def _index(op: Any, source: Tensor, indices: Any, *rest: Any) -> Any:
    if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
        counts["boolean index"] += 1
    return _run(op, source, indices, *rest)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _local_scalar_dense,
    aten.is_pinned.default: lambda *_, **__: False,
    aten.record_stream.default: lambda *_: _counted("aten::record_stream"),
    aten.index.Tensor: functools.partial(_index, aten.index.Tensor),
    aten.index_put_.default: functools.partial(_index, aten.index_put_.default),
    aten._index_put_impl_.default: functools.partial(_index, aten._index_put_impl_.default),
}


# --- registration -----------------------------------------------------------------------------------------------------

_libraries: list[torch.library.Library] = []


def registered() -> bool:
    return bool(_libraries)


def register() -> None:
    """Make the device known to torch, for the rest of the process."""
    if registered():
        return
    from torch.utils import _device, backend_registration

    _device._device_constructors()  # which a default device changes: torch keeps the list, and shall keep its own functions

    class Backend(backend_registration._DummyBackendModule):
        Event, Stream, synchronize = _Event, _Stream, staticmethod(_synchronize)

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

        def get_rng_state(self, device: Any = None) -> Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, state: Tensor, device: Any = None) -> None:
            torch.set_rng_state(state)

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    _register_kernels()
    _register_autocast()
    _replace_host_functions()


def _library(namespace: str, key: str = "") -> torch.library.Library:
    _libraries.append(torch.library.Library(namespace, "IMPL", key))
    return _libraries[-1]


def _register_kernels() -> None:
    _library("_").fallback(_run, "PrivateUse1")  # factory functions: no device tensor among their arguments
    # `torch.tensor` and `as_tensor` copy with torch's dispatch to Python switched off.
    _library("aten", "PrivateUse1").impl("_copy_from", lambda source, target, *rest: _copy(target, source, *rest))
    from torch._decomp import decompositions

    composites = _library("aten", "AutogradPrivateUse1")
    for name, function in {"lstm.input": decompositions.lstm_impl, "gru.input": decompositions.gru_impl}.items():
        composites.impl(name, function)


_CAST_DOWN = "linear matmul mm bmm addmm baddbmm conv1d conv2d conv3d conv_transpose2d.input scaled_dot_product_attention"
_CAST_UP = """
    softmax.int log_softmax.int layer_norm group_norm sum sum.dim_IntList mean mean.dim exp log pow.Tensor_Scalar norm.Scalar
    cross_entropy_loss mse_loss nll_loss l1_loss smooth_l1_loss kl_div binary_cross_entropy_with_logits cosine_similarity
"""


def _register_autocast() -> None:
    """The operators that CUDA's autocast casts, as far as the tests use them, and the one that it refuses."""
    _library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels = _library("aten", "AutocastPrivateUse1")
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(op: Any, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
        to = dtype or torch.get_autocast_dtype(NAME)

        def cast(value: Any) -> Any:
            floating = isinstance(value, DeviceTensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(to) if floating else value

        with torch._C._ExcludeDispatchKeyGuard(off):
            args, kwargs = pytree.tree_map(cast, (args, kwargs))
            return op(*args, **kwargs)

    def refuse(*_: Any) -> None:
        raise RuntimeError("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.")

    for names, dtype in ((_CAST_DOWN, None), (_CAST_UP, torch.float32)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            kernels.impl(name, functools.partial(kernel, op, dtype))
    kernels.impl("binary_cross_entropy", refuse)


def _replace_host_functions() -> None:
    """Pinned memory, streams and events: torch's backend in Python has none, so their Python entries are replaced."""
    current = [_Stream(NAME)]

    def pinned(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(factory)
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            tensor = factory(*args, **kwargs)
            if pin_memory and _on_device(tensor):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            return pin(tensor) if pin_memory else tensor

        return made

    def pin(tensor: Tensor) -> Tensor:
        _pinned.add(tensor.untyped_storage())
        return tensor

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            raise RuntimeError(f"cannot pin '{NAME}' tensors, only dense CPU tensors can be pinned")
        return tensor if tensor.is_pinned() else pin(tensor.clone())

    for name in ("empty", "empty_like", "empty_strided", "zeros", "ones", "full", "tensor"):
        setattr(torch, name, pinned(getattr(torch, name)))
    replaced: Any = torch.Tensor
    replaced.pin_memory = pin_memory
    replaced.is_pinned = lambda tensor, device=None: not _on_device(tensor) and tensor.untyped_storage() in _pinned
    modules: Any = torch
    modules.Event, modules.Stream = _Event, _Stream
    modules.accelerator.synchronize = _synchronize
    modules.accelerator.current_stream = lambda device=None: current[0]
    modules.accelerator.set_stream = lambda stream: current.__setitem__(0, stream)
