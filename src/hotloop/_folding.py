"""BatchNorm computed together with the convolution before it, while an evaluation runs.

In eval mode a BatchNorm is an affine map of each channel, which the weights of the convolution before it can take up. The
user's forward runs as it is written; only those two calls change. The convolution runs with folded weights, made from the
current ones in each evaluation, and hands out a `Deferred`, which its BatchNorm takes as its own result and which is the plain
output of the convolution for everybody else. So there is no analysis of the forward that could be wrong or out of date.

Which BatchNorm follows which convolution is seen at the first call; the first folded result of each pair is checked.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotloop import _folded_weights
from hotloop._deferred import Deferred, sending_call
from hotloop._detours import Detour, is_compiled
from hotloop._folded_weights import Fold, Watch
from hotloop._pairs import Pair, Sent, pair_of
from hotloop._plan import Decision

# The forward of a convolution -> its class, the dimensions of a batch, and the dimension of the weight that holds the output
# channels. A BatchNorm takes batches of its own dimensions only, so that any that takes the output is of the right kind.
_KINDS: dict[Any, tuple[Any, int, int]] = {
    nn.Conv1d.forward: (nn.Conv1d, 3, 0),
    nn.Conv2d.forward: (nn.Conv2d, 4, 0),
    nn.Conv3d.forward: (nn.Conv3d, 5, 0),
    nn.ConvTranspose1d.forward: (nn.ConvTranspose1d, 3, 1),
    nn.ConvTranspose2d.forward: (nn.ConvTranspose2d, 4, 1),
    nn.ConvTranspose3d.forward: (nn.ConvTranspose3d, 5, 1),
}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


_NOTHING = Watch([])


class _Latest(threading.local):
    """The output of a convolution that was called for the first time, until its BatchNorm comes."""

    output: weakref.ref[Tensor] | None = None
    pair: Pair


_latest = _Latest()


class Folding:
    """The folding of one model for the length of an evaluation. `diversions` are the calls to divert, and by what."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        norms = [m for m in modules if isinstance(m, NORMS) and type(m).forward is nn.BatchNorm2d.forward]
        # The class of a scripted module has no forward.
        convolutions = [m for m in modules if getattr(type(m), "forward", None) in _KINDS] if norms else []
        self._pairs = [(m, pair_of(m)) for m in convolutions]
        self._is_out_of_reach = bool(self._pairs) and any(map(_calls_elsewhere, modules))
        self._waiting: list[Convolution] = []
        self._folds: list[Fold] = []
        self._watch = _NOTHING
        self.observed = False
        self._forgotten = False
        known = {id(norm) for norm in norms}
        chosen = [(m, pair) for m, pair in self._pairs if not self._is_out_of_reach and _may_fold(m, pair, known)]
        self._chosen = chosen
        self._norms = norms if chosen else []

    @property
    def diversions(self) -> list[tuple[nn.Module, Callable[[nn.Module], Detour]]]:
        """Made when asked for: what is kept in here would keep the folded weights until the garbage collector comes."""
        convolutions = [(m, partial(Convolution, pair=pair, folding=self)) for m, pair in self._chosen]
        return [*convolutions, *((norm, Norm) for norm in self._norms)]

    def decision(self) -> Decision | None:
        """What has come of it, for the plan; None as long as no convolution was called."""
        followed = [pair for _, pair in self._pairs if pair.norm() is not None]
        folded = sum(not pair.refusal for pair in followed)
        refusals = "; ".join(dict.fromkeys(pair.refusal for pair in followed if pair.refusal))
        if self._is_out_of_reach:
            why = "compiled code calls the layers, or replicas of them on several devices"
        elif not self._pairs:
            why = "there are no convolutions with BatchNorm layers"
        elif folded:
            count = f"{folded} of {len(self._pairs)} convolutions"
            why = f"{count} take up their BatchNorm in fast_eval; rounds differently (3e-7)"
            return Decision("fold_batchnorm", "on", f"{why}; {refusals}" if refusals else why)
        elif any(pair.called for _, pair in self._pairs):
            why = refusals or "no BatchNorm takes the output of a convolution directly"
        else:
            return None
        return Decision("fold_batchnorm", "off", why)

    def join(self, convolution: Convolution) -> None:
        """Take in a convolution whose call is diverted."""
        self._waiting.append(convolution)

    def forget(self) -> None:
        """The weights have changed: nothing that was folded is current."""
        self._forgotten = True

    def look(self) -> None:
        """At the start of a call of the model: fold the pairs that are known by now, and drop what is not current."""
        begun = [convolution for convolution in self._waiting if convolution.begin()]
        if begun:
            self._waiting = [convolution for convolution in self._waiting if convolution not in begun]
            self._folds += [convolution.fold for convolution in begun if convolution.fold is not None]
        if begun or self._forgotten or self._watch.changed():
            self._forgotten = False
            for fold in self._folds:
                fold.drop()
            self._watch = Watch(self._folds)
        self.observed = self._watch.hooked()


def _calls_elsewhere(module: nn.Module) -> bool:
    compiled = is_compiled(module) or "_orig_mod" in module._modules
    return compiled or (isinstance(module, nn.DataParallel) and len(module.device_ids) > 1)


def _may_fold(module: Any, pair: Pair, norms: set[int]) -> bool:
    kind: Any = type(module)
    base, _, channels = _KINDS[kind.forward]
    # A parametrization makes the weight a property of the class; a subclass may convolve in a way of its own.
    if kind.__call__ is not nn.Module.__call__ or hasattr(kind, "weight") or hasattr(kind, "bias"):
        return False
    if channels == 0 and kind._conv_forward is not base._conv_forward:
        return False
    if channels == 1 and module.groups != 1:  # its weight holds the channels group by group
        return False
    return not pair.refusal and (not pair.called or id(pair.norm()) in norms)


class Convolution(Detour):
    """The call of a convolution: with the weights of its BatchNorm folded in, where all is as it was found."""

    def __init__(self, module: nn.Module, pair: Pair, folding: Folding) -> None:
        super().__init__(module)
        _, self._dim, self._channels = _KINDS[type(module).forward]
        self._pair, self._folding = pair, folding
        self._growth = _growth(module, transposed=self._channels == 1)
        self.fold: Fold | None = None
        folding.join(self)

    def renew(self) -> None:
        if self.fold is not None:
            self.fold.drop()

    def begin(self) -> bool:
        """Whether there is a pair to fold."""
        norm = self._pair.norm()
        if norm is not None:
            self.fold = Fold(self.module, norm, self._channels)
        return norm is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._pair.called:
            return self._watched(*args, **kwargs)
        call = sending_call()
        if call is None or kwargs or len(args) != 1 or type(args[0]) is not Tensor or torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        x = args[0]
        size = x.numel() * self._growth
        if size <= _folded_weights.OVERHEAD:
            return self.run(x)
        if call.looked is not self._folding:
            self._folding.look()
            call.looked = self._folding
        fold = self.fold
        weights = fold.weights(x, size) if fold is not None and self._is_ready(fold, x) else None
        if weights is None:
            return self.run(x)
        return Deferred.send(self._convolve(x, weights), Sent(self._pair, self.run, x), call)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        self._pair.called = True
        if _caller_asks_for_types():
            self._pair.refuse("the forward that calls a convolution asks for types, and a folded output has one of its own")
        output = self.run(*args, **kwargs)
        if isinstance(output, Tensor) and output.dim() == self._dim:
            _latest.output, _latest.pair = weakref.ref(output), self._pair
        return output

    def _is_ready(self, fold: Fold, x: Tensor) -> bool:
        return (
            x.dim() == self._dim
            and not x.is_inference()  # such tensors count no changes
            and not fold.norm.training
            and not self._pair.refusal
            and not (self._folding.observed and fold.hooked())
            and "forward" not in vars(self.module)
            and "forward" not in vars(fold.norm)
        )

    def _convolve(self, x: Tensor, weights: tuple[Tensor, Tensor]) -> Any:
        module: Any = self.module
        if self._channels == 0:
            return module._conv_forward(x, *weights)
        # A twin shares all but the weights: stride, padding and the rest are the module's own.
        twin = object.__new__(type(module))
        vars(twin).update(vars(module), _parameters=dict(zip(("weight", "bias"), weights, strict=True)))
        return twin.forward(x)


def _caller_asks_for_types() -> bool:
    """Whether the function that calls the layer, which may look at what comes out of it, has `type` in its code."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in (__file__, nn.modules.module.__file__) and frame.f_back is not None:
        frame = frame.f_back
    return not {"type", "__class__"}.isdisjoint(frame.f_code.co_names)


def _growth(convolution: Any, *, transposed: bool) -> float:
    """The elements of its output over those of its input, edges aside."""
    steps: int = math.prod(convolution.stride)
    channels: float = convolution.out_channels / convolution.in_channels
    return channels * steps if transposed else channels / steps


class Norm(Detour):
    """The call of a BatchNorm: nothing is left to do where its convolution has done it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return self.run(*args, **kwargs)
        x = args[0]
        if type(x) is not Deferred:
            self._watch(x)
            return self.run(x)
        if x.sender.pair.norm() is self.module and not torch.is_grad_enabled():
            result = x.receive()
            if result is not None and x.sender.agrees(result, self.run):
                return result
        return self.run(x.plain())

    def _watch(self, x: Any) -> None:
        if _latest.output is not None and _latest.output() is x:
            _latest.pair.norm = weakref.ref(self.module)
