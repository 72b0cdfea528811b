"""What makes the host wait for an accelerator, and what to write instead: the rules behind `find_syncs`.

An operator waits where its result must be known to the host: a value, a size that depends on values, a check, a copy that
blocks. The rules are those of CUDA, read from its kernels' launchers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

from hotloop._tree import leaves

Rule = Callable[..., bool]

READ = "keep it on the device; read it, or branch on it, every n steps"
SHAPE = "the result's size depends on values: torch.where, or a product with the mask, keeps the shape"
SIZE = "give the size (output_size=, num_classes=, min= and max=), or scatter_add into zeros of a known size"
COPY = "batches: prefetch(loader, model), or pinned memory and non_blocking=True; results: one copy after the loop"
MADE = "torch.full, zeros, arange or stack make it on the device; or make it once, before the loop"
CHECK = "torch reads the values to check them; a variant without the check (linalg.*_ex) does not"
TERMS = "torch reads the norms to choose how many terms to take; do it every n steps, or outside of the loop"
VALUE = "a number is not read; nor is a tensor by torch.where(mask, value, x)"
LENGTHS = "the kernel reads the lengths on the host: keep them there"
PUT = "a mask becomes positions, and positions from the host are copied: torch.where, or positions on the device"
INDEX = "positions from the host are copied: make them a tensor on the device once, before the loop"
ASKED = "leave it out of the loop; to measure time, record events and read them at the end"
STORED = "store every n steps; it copies every tensor to the host"
LOOK = "look at the metrics every n steps; step.mean() sums them on the device"
FLAGS = "whether float16 skipped an update, for a scheduler or for step.updates; bf16 needs no such flags"
RESULT = "one transfer for all the numbers of a result; evaluate less often if it is too much"


def never(*_: Any, **__: Any) -> bool:
    return False


def _always(*_: Any, **__: Any) -> bool:
    return True


def _crosses(source: Tensor, *_: Any, device: torch.device | None = None, non_blocking: bool = False, **__: Any) -> bool:
    return device is not None and device.type != source.device.type and not non_blocking


def _copies(target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    return target.device.type != source.device.type and not non_blocking


def _selects(source: Tensor, indices: Any, *_: Any) -> bool:
    """A mask becomes positions, whose number must be known; an index on another device is copied first."""
    given = [index for index in indices if index is not None]
    return any(i.dtype in (torch.bool, torch.uint8) or i.device.type != source.device.type for i in given)


def _assigns(target: Tensor, indices: Any, values: Tensor, *rest: Any) -> bool:
    # `x[mask] = 0` is a masked_fill.
    fills = len(indices) == 1 and values.dim() == 0 and values.device.type == "cpu"
    return not fills and _selects(target, indices)


def _reads_value(target: Tensor, *rest: Any) -> bool:
    """The last argument, a tensor that the kernel takes as a number. To read it from the host does not wait."""
    return isinstance(rest[-1], Tensor) and rest[-1].device == target.device


def _reads_bounds(*bounds: Any, device: torch.device | None = None, **_: Any) -> bool:
    tensors = [bound for bound in bounds if isinstance(bound, Tensor)]
    return any(device is None or tensor.device.type == device.type for tensor in tensors)


def _reads_lengths(log_probs: Tensor, _: Tensor, *lengths: Any, **__: Any) -> bool:
    return _reads_value(log_probs, lengths[0]) or _reads_value(log_probs, lengths[1])


def _checks_deviation(_: Any, std: Any = 1.0, *__: Any, **___: Any) -> bool:
    return isinstance(std, Tensor) and std.numel() > 0


def _is_checked(*_: Any, check_errors: bool = False, **__: Any) -> bool:
    return check_errors


def _has_no_bounds(_: Tensor, bins: int = 100, min: float = 0, max: float = 0, **__: Any) -> bool:
    return min == max


def _has_no_size(_: Tensor, *, output_size: int | None = None) -> bool:
    return output_size is None


def _checks_weights(_: Tensor, num_samples: int, replacement: bool = False, **__: Any) -> bool:
    return not replacement or num_samples == 1


def _sorts(elements: Any, tests: Any, *, assume_unique: bool = False, **_: Any) -> bool:
    """`isin` compares with few elements directly, and makes many of them unique first."""
    if assume_unique or not (isinstance(elements, Tensor) and isinstance(tests, Tensor)):
        return False
    return bool(tests.numel() >= 10 * elements.numel() ** 0.145)


# By the operator's name in torch.ops.aten.
OPERATORS: dict[str, tuple[Rule, str]] = {
    **dict.fromkeys(("_local_scalar_dense", "equal", "allclose"), (_always, READ)),
    **dict.fromkeys(("nonzero", "masked_select", "_to_sparse", "_coalesce"), (_always, SHAPE)),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), (_always, SHAPE)),
    "index": (_selects, SHAPE),
    "index_put": (_assigns, SHAPE),
    "index_put_": (_assigns, SHAPE),
    "isin": (_sorts, SHAPE),
    "repeat_interleave": (_has_no_size, SIZE),
    "bincount": (_always, SIZE),
    "histc": (_has_no_bounds, SIZE),
    "multinomial": (_checks_weights, CHECK),
    "normal": (_checks_deviation, CHECK),
    "_linalg_check_errors": (_always, CHECK),
    # These check inside of their kernels.
    **dict.fromkeys(("_linalg_eigh", "linalg_eig", "_linalg_eigvals", "_linalg_svd", "linalg_pinv"), (_always, CHECK)),
    **dict.fromkeys(("linalg_lstsq", "cholesky", "cholesky_inverse"), (_always, CHECK)),
    **dict.fromkeys(("linalg_inv_ex", "linalg_cholesky_ex", "_linalg_solve_ex"), (_is_checked, CHECK)),
    **dict.fromkeys(("linalg_lu_factor_ex", "linalg_ldl_factor_ex"), (_is_checked, CHECK)),
    "linalg_matrix_exp": (_always, TERMS),
    **dict.fromkeys(("masked_fill", "masked_fill_", "index_fill", "index_fill_"), (_reads_value, VALUE)),
    **dict.fromkeys(("linspace", "logspace"), (_reads_bounds, READ)),
    "_ctc_loss": (_reads_lengths, LENGTHS),
    "_to_copy": (_crosses, COPY),
    "copy_": (_copies, COPY),
}


def _moves(_: Tensor, device: Any = None, dtype: Any = None, non_blocking: bool = False, *__: Any, **___: Any) -> bool:
    return isinstance(device, str | torch.device) and not non_blocking


def _is_built(data: Any, *_: Any, device: Any = None, **__: Any) -> bool:
    """From host memory, by a copy that blocks; or from tensors, each of which is read."""
    return device is not None or (not isinstance(data, Tensor) and any(True for _ in leaves(data)))


def _copies_to_new(_: Tensor, data: Any, *__: Any, device: Any = None, **___: Any) -> bool:
    return device is not None or not isinstance(data, Tensor)


def _indexes_from_host(_: Tensor, index: Any, *__: Any) -> bool:
    """A list, a range or an array of positions becomes a tensor on the device; a list of tensors is a tuple of indices."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(hasattr(part, "__len__") and not any(True for _ in leaves(part)) for part in parts)


def _puts(target: Tensor, index: Any, value: Any, *_: Any, **__: Any) -> bool:
    """`x[mask] = 0` is a masked_fill, `x[mask] = scalar_tensor` is not, and an operator cannot tell them apart on a CPU."""
    is_masked = any(leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves(index))
    return (is_masked and isinstance(value, Tensor) and value.dim() == 0) or _indexes_from_host(target, index)


# What dispatches nothing that tells, where the tensor is on the CPU already; such a tensor stands for one on a device.
FUNCTIONS: dict[Callable[..., Any], tuple[Rule, str]] = {
    **dict.fromkeys((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__), (_always, READ)),
    Tensor.cpu: (_always, COPY),
    Tensor.to: (_moves, COPY),
    torch.tensor: (_is_built, MADE),
    torch.as_tensor: (_is_built, MADE),
    torch.asarray: (_is_built, MADE),
    Tensor.new_tensor: (_copies_to_new, MADE),
    Tensor.__getitem__: (_indexes_from_host, INDEX),
    Tensor.__setitem__: (_puts, PUT),
    **dict.fromkeys((torch.index_put, Tensor.index_put, Tensor.index_put_), (_puts, PUT)),
}

# Calls that torch's own code makes on tensors that are where they should be.
PLACING = (Tensor.to, torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


def checks_on_host(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call reads its values on a CPU only: `one_hot` leaves the check to the kernel where it can."""
    return func == F.one_hot and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) != -1


_DUNDERS = {
    "__bool__": "bool()",
    "__int__": "int()",
    "__float__": "float()",
    "__complex__": "complex()",
    "__index__": "index()",
    "__repr__": "print()",
    "__format__": "format()",
    "__array__": "numpy.asarray()",
    "__contains__": "in",
    "__getitem__": "[...]",
    "__setitem__": "[...] =",
}

_OPERATOR_NAMES = {"_local_scalar_dense": ".item()", "_to_copy": ".to()", "copy_": ".copy_()", "index": "[...]"}


def call_name(func: Callable[..., Any]) -> str:
    """A torch function as users write it: `.item()`, `bool()`, `torch.unique()`."""
    short = func.__name__
    full = resolve_name(func) or short
    if full.startswith("torch.Tensor."):
        return _DUNDERS.get(short, f".{short}()")
    return full.replace("torch.functional.", "torch.").replace("torch.nn.functional.", "F.") + "()"


def operator_name(name: str) -> str:
    """An operator that ran outside any call, such as in a backward pass."""
    return _OPERATOR_NAMES.get(name, f"{name.strip('_')}()")
