"""Code that silently does something else to a feature map in channels_last than to a contiguous one.

Most code does the same to both, and `view` raises. But `flatten` and the like give a view of a contiguous map and a copy of one in
channels_last, or the other way round where a permuted map is made contiguous: a write through it reaches the map or not. And
`as_strided` goes by the order of memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotloop._tensors import is_channels_last

_RESHAPING = frozenset({"flatten", "reshape", "reshape_as", "ravel", "unflatten", "contiguous"})
_BY_OPERATOR = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITING = frozenset({"__setitem__", *(f"__i{name}__" for name in _BY_OPERATOR)})


class MapWatch(TorchFunctionMode):
    """Raises where a call would do something else than to contiguous maps."""

    def __init__(self) -> None:
        super().__init__()
        self.has_met_maps = False
        # What shares its memory with a map where it would not, or does not where it would.
        self._reshaped: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and type(args[0]) is Tensor else None
        if first is None:
            return func(*args, **kwargs)
        name = func.__name__
        if name == "as_strided" and is_channels_last(first):
            raise RuntimeError("as_strided of a feature map goes by the order of memory, which is another in channels_last")
        if id(first) in self._reshaped and _writes(name, kwargs):
            raise RuntimeError(
                f"{name} writes to a reshaped feature map: whether that reaches the map depends on the order of its memory"
            )
        self.has_met_maps = self.has_met_maps or is_channels_last(first)
        result = func(*args, **kwargs)
        if type(result) is Tensor and self._tells_apart(name, first, result):
            self._reshaped[id(result)] = result
        return result

    def _tells_apart(self, name: str, first: Tensor, result: Tensor) -> bool:
        """Whether `result`, or the map that it is made of, would see a write to the other, as it would not in the plain loop."""
        if id(first) in self._reshaped:
            return _share_memory(first, result)
        if name not in _RESHAPING:
            return False
        if is_channels_last(first):
            return not _share_memory(first, result)
        return _is_permuted_map(first) and _share_memory(first, result)


def _is_permuted_map(tensor: Tensor) -> bool:
    base = tensor._base
    return base is not None and is_channels_last(base) and tensor.is_contiguous() and tensor.numel() == base.numel()


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one is other or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
    return in_place or name in _WRITING or kwargs.get("inplace") is True
