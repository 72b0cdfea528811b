"""channels_last: images with their channels beside each other in memory, which 2-D convolutions read best.

What "auto" lays out anew is the images that a call is given: feature maps follow them through the model, whatever the layout of
the weights. The weights stay as they are, so that `p.view(-1)`, `p.grad.view(-1)` and the model's other methods do what they do
in the plain loop, and what a call returns is contiguous again. True converts the weights as well, as
`model.to(memory_format=torch.channels_last)` does.

A forward hook may keep a map for code that views it: while there is one images stay as they are.

Random numbers for a tensor are drawn in the order of its memory: a dropout on maps gets another mask. Where a module may do that
"auto" stays off; what a forward draws by itself (`F.dropout`, `torch.randn_like`) cannot be seen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hotloop._facts import NARROW, Facts
from hotloop._parts import Parts
from hotloop._plan import Decision
from hotloop._rebind import fit_state
from hotloop._tree import map_leaves

NAME = "channels_last"
_LAYOUT = torch.channels_last
_DRAWS = "a dropout may sit on feature maps, and would draw other masks: numbers are drawn in the order of memory"


def decide(facts: Facts, wish: Any) -> Decision:
    """On for models whose convolutions are all 2-D, where it pays; floating inputs of four dimensions follow."""
    if wish is None or wish is False:
        return Decision(NAME, "off", "asked for: images and weights stay as they are")
    if wish is not True and wish != "auto":
        raise ValueError(f"optimize(..., channels_last={wish!r}): channels_last is 'auto', True or False; write one of these")
    if wish is True:
        problem = _impossible(facts)
        if problem:
            raise ValueError(f"optimize(..., channels_last=True): {problem}; write channels_last='auto', or leave it away")
        return _decision("asked for: weights and 4-D inputs; rounds differently (1e-6)", facts, weights=True)
    if facts.traits.channels_last:
        return Decision(NAME, "as it is", "the weights are in channels_last already: your choice")
    problem = _unwise(facts)
    if problem:
        return Decision(NAME, "off", problem)
    gain = "tensor cores read this layout" if facts.device.type == "cuda" else "such models take 0.5 to 1.0 of the time"
    return _decision(
        f"{gain}; 4-D inputs follow{_but(facts)}, weights and outputs stay as they are; rounds differently (1e-6)",
        facts,
        weights=False,
    )


def trial(facts: Facts) -> Decision | None:
    """What tuning may try where the wish is "auto"."""
    if facts.traits.channels_last or facts.traits.convolutions != {2} or facts.traits.dropout_on_maps or _impossible(facts):
        return None
    return _decision(
        f"4-D inputs follow{_but(facts)}, weights and outputs stay as they are; rounds differently (1e-6)", facts, weights=False
    )


def _impossible(facts: Facts) -> str:
    """Why the layout cannot be had, or nothing."""
    if 2 not in facts.traits.convolutions:
        return "the model has no 2-D convolution"
    if 3 in facts.traits.convolutions or facts.traits.five_dimensional:
        return "the model has 3-D convolutions or weights of five dimensions, which have no such layout"
    if facts.traits.strided_pointwise and facts.device.type == "cpu":
        return (
            f"the model has a strided 1x1 convolution of fewer than {NARROW} channels, whose backward writes beyond its memory in "
            "this layout on a CPU (oneDNN) and may end the process"
        )
    return ""


def _unwise(facts: Facts) -> str:
    """Why images are better left as they are, or nothing."""
    traits, device = facts.traits, facts.device.type
    if facts.exact:
        return "exact=True: convolutions round differently in another layout"
    if problem := _impossible(facts):
        return problem
    if traits.convolutions != {2}:
        return "the model has 1-D convolutions as well"
    if traits.dropout_on_maps:
        return _DRAWS
    if device == "cuda":
        if not facts.sixteen_bit and not traits.floats <= {torch.float16, torch.bfloat16}:
            return "on CUDA it is known to pay in 16 bits, and this model runs in 32"
        return "" if traits.wide >= 0.5 else "the convolutions are too narrow for tensor cores to pay"
    if device != "cpu":
        return f"it is not known to pay on {device}"
    if not facts.machine.onednn or torch.float64 in traits.floats:
        return "on a CPU it is known to pay with oneDNN's float32 kernels for x86"
    # Measured with AVX-512: max pooling gains most, and so do convolutions that are handed feature maps in this layout. A head
    # that flattens or averages hands contiguous gradients back, which costs the last feature map's layers more than they gain:
    # shallow models took up to 1.4 times as long. Instance normalisation works on contiguous images.
    if traits.instance_norm:
        return "instance normalisation works on contiguous images"
    pools = traits.max_pools >= (1 if traits.batch_norm else 2) and traits.widest >= NARROW
    if pools or traits.deep >= 6:
        return ""
    return f"the model is too shallow to gain: {traits.deep} convolutions of {NARROW} input channels or more"


def least(facts: Facts) -> int:
    """The elements that images must have. Fewer pay less than the weights cost, which a CPU's kernels lay out in every call."""
    # Measured with AVX-512, 2.8 million parameters and images of 3072 elements: 1.1 to 1.7 of the time with one or two, 0.98 to 1.08
    # with four, 0.84 to 0.95 with eight.
    return facts.traits.parameters // 128 if facts.device.type == "cpu" else 0


def _but(facts: Facts) -> str:
    return f" from {count} elements on" if (count := least(facts)) > 1000 else ""


def _decision(why: str, facts: Facts, *, weights: bool) -> Decision:
    before: dict[nn.Module, list[tuple[Tensor, tuple[int, ...]]]] = {}
    handles: list[Any] = []

    def apply(parts: Parts) -> Parts:
        if weights:
            before[parts.model] = _convert(parts.model)
            for optimizer in parts.optimizers:
                fit_state(optimizer)
                if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # one around another may lack torch's hooks
                    handles.append(optimizer.register_load_state_dict_post_hook(fit_state))
        images = _Images(0, []) if weights else _Images(least(facts), _hooks_of(parts.model))
        return replace(parts, on_inputs=(*parts.on_inputs, images.lay_out), on_outputs=(*parts.on_outputs, images.give_back))

    def revert(parts: Parts) -> Parts:
        for tensor, stride in before.pop(parts.model, []):
            tensor.data = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor.data)
        for handle in handles:
            handle.remove()
        for optimizer in parts.optimizers if weights else ():
            fit_state(optimizer)
        return replace(
            parts,
            on_inputs=tuple(f for f in parts.on_inputs if not _is_of_images(f)),
            on_outputs=tuple(f for f in parts.on_outputs if not _is_of_images(f)),
        )

    return Decision(NAME, "on", why, apply, revert)


class _Images(threading.local):
    """The images of a call, of at least `fewest` elements: laid out for the model, and what it returns contiguous again.

    `of_this_call` are those that the caller gave and what the model got in their place, in this thread: a forward may change its
    input in place, and the caller go on with that. `hooks` are the forward hooks of the model's modules.
    """

    of_this_call: Sequence[tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]] = ()

    def __init__(self, fewest: int, hooks: list[Mapping[int, Any]]) -> None:
        self._fewest, self._hooks = fewest, hooks

    def lay_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.of_this_call = []
        if any(self._hooks) and any(_is_users(hook) for hooks in self._hooks for hook in hooks.values()):
            return args, kwargs  # it may keep a feature map, for code that views it
        return map_leaves(lambda tensor: tensor if tensor.numel() < self._fewest else self._noted(tensor), (args, kwargs))

    def _noted(self, given: Tensor) -> Tensor:
        made = _laid_out(given)
        if made is not given and not made.is_inference():  # such tensors count no changes
            self.of_this_call = [*self.of_this_call, (weakref.ref(given), weakref.ref(made), made._version)]
        return made

    def give_back(self, output: Any) -> Any:
        for given, made, version in self.of_this_call:
            one, other = given(), made()
            if one is not None and other is not None and other._version != version:
                one.copy_(other)
        self.of_this_call = ()
        # What the plain model returns can be given to `view`.
        return map_leaves(lambda t: t.contiguous() if t.dim() > 2 and t.layout is torch.strided else t, output)


def _is_of_images(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), _Images)


def _hooks_of(module: nn.Module) -> list[Mapping[int, Any]]:
    return [part._forward_hooks for part in module.modules()]


def _is_users(hook: Any) -> bool:
    """Torch's own keep no maps."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.")


def _convert(module: nn.Module) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Lay the module's weights out in place; what was changed, with its strides."""
    tensors = (t for t in (*module.parameters(), *module.buffers()) if not nn.parameter.is_lazy(t))
    changed = [(t, t.stride()) for t in tensors if t.dim() == 4 and not t.is_contiguous(memory_format=_LAYOUT)]
    for tensor, _ in changed:
        tensor.data = tensor.data.contiguous(memory_format=_LAYOUT)
    return changed


def _laid_out(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4 or not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    batch, channels, height, width = tensor.shape
    if channels == 1 or height * width == 1:
        # Both layouts at once, and torch takes that for contiguous unless the strides say otherwise. This copies nothing.
        return tensor.contiguous().view(batch, height, width, channels).permute(0, 3, 1, 2)
    return tensor.contiguous(memory_format=_LAYOUT)
