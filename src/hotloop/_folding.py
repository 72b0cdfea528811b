"""BatchNorm computed together with the convolution before it, while an evaluation runs.

In eval mode a BatchNorm is an affine map of each channel, which the weights of the convolution before it can take up. The
user's forward runs as it is written; only those two calls change. The convolution runs with folded weights, made from the
current ones in each evaluation, and hands out a `Deferred`, which its BatchNorm takes as its own result and which is the plain
output of the convolution for everybody else. So there is no analysis of the forward that could be wrong or out of date.

Which BatchNorm follows which convolution is seen at the first call; the first folded result of each pair is checked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.weak import WeakIdKeyDictionary

from hotloop._deferred import Deferred, may_send
from hotloop._detours import Detour, is_compiled
from hotloop._folded_weights import FoldedWeights
from hotloop._plan import Decision

# The forward of a convolution -> its class, the BatchNorm that may follow, the dimensions of a batch, and the dimension of the
# weight that holds the output channels.
_KINDS: dict[Any, tuple[Any, type[nn.Module], int, int]] = {
    nn.Conv1d.forward: (nn.Conv1d, nn.BatchNorm1d, 3, 0),
    nn.Conv2d.forward: (nn.Conv2d, nn.BatchNorm2d, 4, 0),
    nn.Conv3d.forward: (nn.Conv3d, nn.BatchNorm3d, 5, 0),
    nn.ConvTranspose1d.forward: (nn.ConvTranspose1d, nn.BatchNorm1d, 3, 1),
    nn.ConvTranspose2d.forward: (nn.ConvTranspose2d, nn.BatchNorm2d, 4, 1),
    nn.ConvTranspose3d.forward: (nn.ConvTranspose3d, nn.BatchNorm3d, 5, 1),
}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

# Relative to the largest value: the sums are the same, rounded in other places.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# Private, as these hooks have no public list; where torch cannot tell, nothing is folded.
_has_global_hooks: Callable[[], bool] = getattr(module_hooks, "_has_any_global_hook", lambda: True)


class _Pair:
    """What is known of a convolution for as long as it lives: the BatchNorm that takes its output, if one does."""

    def __init__(self) -> None:
        self.norm: Callable[[], nn.Module | None] = _nobody
        self.checked = False
        self.refusal = ""


def _nobody() -> None:
    return None


_pairs: Any = WeakIdKeyDictionary()  # convolution -> _Pair


class _Latest(threading.local):
    """The latest output of a convolution whose BatchNorm is not known."""

    output: Callable[[], Any] = _nobody
    source: Any = None


_latest = _Latest()


def detours(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, type[Detour]]]:
    """The calls to divert so that the BatchNorm layers among `modules` are folded; none where nothing can be."""
    norms = [m for m in modules if isinstance(m, _NORMS) and type(m).forward is nn.BatchNorm2d.forward]
    if not norms or any(map(_has_copied_calls, modules)):
        return []
    known = {id(norm) for norm in norms}
    found: list[tuple[nn.Module, type[Detour]]] = [(m, Convolution) for m in modules if _may_fold(m, known)]
    return [*found, *[(norm, Norm) for norm in norms]] if found else []


def _has_copied_calls(module: nn.Module) -> bool:
    """Whether the calls below are not made one by one: compiled code runs them, or replicas on other devices."""
    compiled = is_compiled(module) or "_orig_mod" in module._modules
    return compiled or (isinstance(module, nn.DataParallel) and len(module.device_ids) > 1)


def _may_fold(module: Any, norms: set[int]) -> bool:
    kind: Any = type(module)
    if kind.forward not in _KINDS or kind.__call__ is not nn.Module.__call__:
        return False
    base, _, _, channels = _KINDS[kind.forward]
    # A parametrization makes the weight a property of the class; a subclass may convolve in a way of its own.
    if hasattr(kind, "weight") or hasattr(kind, "bias"):
        return False
    if channels == 0 and kind._conv_forward is not base._conv_forward:
        return False
    if channels == 1 and module.groups != 1:  # its weight holds the channels group by group
        return False
    pair = _pairs.get(module)
    return pair is None or (id(pair.norm()) in norms and not pair.refusal)


def decision(modules: Sequence[nn.Module]) -> Decision | None:
    """What has come of it, for the plan; None as long as no convolution was called."""
    convolutions = [m for m in modules if type(m).forward in _KINDS]
    if any(map(_has_copied_calls, modules)):
        return Decision("fold_batchnorm", "off", "compiled code calls the layers, or copies of them on several devices")
    if not convolutions or not any(isinstance(m, _NORMS) for m in modules):
        return Decision("fold_batchnorm", "off", "there are no convolutions with BatchNorm layers")
    known = [pair for m in convolutions if (pair := _pairs.get(m)) is not None]
    followed = [pair for pair in known if pair.norm() is not None]
    folded = sum(not pair.refusal for pair in followed)
    refusals = "; ".join(dict.fromkeys(pair.refusal for pair in followed if pair.refusal))
    if folded:
        why = f"{folded} of {len(convolutions)} convolutions take up their BatchNorm in fast_eval; rounds differently (3e-7)"
        return Decision("fold_batchnorm", "on", f"{why}; {refusals}" if refusals else why)
    if not known:
        return None
    return Decision("fold_batchnorm", "off", refusals or "no BatchNorm takes the output of a convolution directly")


class Convolution(Detour):
    """The call of a convolution: with the weights of its BatchNorm folded in, where all is as it was found."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._forward: Any = type(module).forward
        _, self._norm_kind, self._dim, self._channels = _KINDS[self._forward]
        self._pair: _Pair | None = _pairs.get(module)

    def renew(self) -> None:
        self._weights: FoldedWeights | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pair = self._pair
        if pair is None:
            return self._watched(*args, **kwargs)
        norm = pair.norm()
        if norm is None or kwargs or len(args) != 1 or not self._ready(pair, norm, args[0]):
            return self.run(*args, **kwargs)
        if self._weights is None:
            self._weights = FoldedWeights(self.module, norm, self._channels)
        x = args[0]
        weights = self._weights.for_input(x)
        if weights is None:
            return self.run(x)
        # The twin shares all but the weights: stride, padding and the rest are the module's own.
        twin = object.__new__(type(self.module))
        vars(twin).update(vars(self.module), _parameters=weights)
        return Deferred.send(self._forward(twin, x), _Sent(pair, self.run, x))

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        self._pair = _pairs.setdefault(self.module, _Pair())
        output = self.run(*args, **kwargs)
        if isinstance(output, Tensor):
            _latest.output, _latest.source = weakref.ref(output), self
        return output

    def followed_by(self, norm: nn.Module) -> None:
        """Remember that `norm` takes the output of this convolution."""
        if isinstance(norm, self._norm_kind) and self._pair is not None:
            self._pair.norm = weakref.ref(norm)

    def _ready(self, pair: _Pair, norm: nn.Module, x: Any) -> bool:
        return (
            may_send()
            and not torch.is_grad_enabled()
            and type(x) is Tensor
            and x.dim() == self._dim
            and x.numel() > 0
            and not x.is_inference()  # such tensors count no changes
            and not norm.training
            and not pair.refusal
            and _is_bare(self.module)
            and _is_bare(norm)
            and not _has_global_hooks()
            and not torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]
            and not torch.compiler.is_compiling()
        )


class _Sent:
    """One folded call: what its BatchNorm has to know, and what others get."""

    __slots__ = ("_given", "_run", "_version", "pair")

    def __init__(self, pair: _Pair, run: Any, given: Tensor) -> None:
        self.pair, self._run, self._given, self._version = pair, run, given, given._version

    def otherwise(self) -> Tensor:
        self.refuse("the output of a convolution is used by others than its BatchNorm")
        if self._given._version != self._version:
            raise RuntimeError("the input of a convolution was changed in place before its output was used")
        return self._run(self._given)  # type: ignore[no-any-return]

    def refuse(self, why: str) -> None:
        self.pair.refusal = self.pair.refusal or why

    def agrees(self, result: Tensor, run_norm: Any) -> bool:
        """Whether the result is that of the two layers, by its first sample; looked at once for each pair."""
        if not self.pair.checked:
            self.pair.checked = True
            expected = run_norm(self._run(self._given[:1]))
            tolerance = _TOLERANCE[expected.dtype] * expected.abs().max()
            if not bool((result[:1] - expected).abs().max() <= tolerance):
                self.refuse("a folded result differs from the plain one by more than rounding")
        return not self.pair.refusal


class Norm(Detour):
    """The call of a BatchNorm: nothing is left to do where its convolution has done it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return self.run(*args, **kwargs)
        x = args[0]
        if type(x) is not Deferred:
            if x is not None and x is _latest.output():
                _latest.source.followed_by(self.module)
            return self.run(x)
        if x.sender.pair.norm() is self.module:
            result = x.receive()
            if result is not None and x.sender.agrees(result, self.run):
                return result
        return self.run(x.plain())


def _is_bare(module: nn.Module) -> bool:
    """Whether nobody sees the calls of this module but its caller."""
    own = vars(module)
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not hooks and "forward" not in own
