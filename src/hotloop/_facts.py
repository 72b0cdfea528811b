"""What the decisions look at: the machine and the model, as plain data."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hotloop._benchmark_flag import users_value
from hotloop._device import accelerator
from hotloop._given import given
from hotloop._optimizer_traits import OptimizerTraits
from hotloop._processes import World
from hotloop._tensors import is_channels_last

_CONVOLUTIONS = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}


NARROW = 16  # so many float32 channels fill a register of AVX-512, which is what convolution kernels work in

MANY_ROWS = 512  # in a call: tokens, patches, or samples of features
SOME_ROWS = 32  # from here on 16-bit units save more on wide layers than casting their weights costs
LSTM_ROWS = 16  # in a time step of an LSTM; as cells it needs SOME_ROWS


@dataclass(frozen=True)
class Machine:
    """Capabilities of the machine, and the process-wide flags that the user has set."""

    accelerator: torch.device | None
    accelerator_name: str
    accelerator_bf16: bool  # native, not emulated
    cpu_16bit: str  # the CPU's 16-bit units, "" if it has none
    cudnn_benchmark: bool
    deterministic: bool
    onednn: bool = True  # its kernels for x86


@dataclass(frozen=True)
class Traits:
    """What the models are made of."""

    devices: frozenset[torch.device]
    spread: bool  # one of the models has parameters on an accelerator and elsewhere
    floats: frozenset[torch.dtype]  # dtypes of the floating parameters
    half_trained: bool  # a float16 parameter wants gradients
    lazy: bool  # some parameters have no size yet
    convolutions: frozenset[int]  # their spatial dimensions
    deep: int  # how many 2-D convolutions have at least NARROW input channels
    widest: int  # the output channels of the widest 2-D convolution
    max_pools: int
    batch_norm: bool
    instance_norm: bool
    strided_pointwise: bool  # a 1x1 convolution with a stride on fewer than NARROW channels
    channels_last: bool  # 4-D parameters are in this memory format already
    five_dimensional: bool  # some parameter has five dimensions
    lstm: bool
    lstm_cells: bool
    recurrent: bool  # RNN or GRU, layers or cells
    depthwise: bool  # a convolution that takes each channel by itself
    ids: str  # what an integer of the input stands for: "token", "column" of a sample, or nothing known
    dropout_on_maps: bool  # an element-wise dropout may sit on feature maps
    parameters: int
    given: str  # what the user has put them under for several processes
    wide: float  # the share of the parameters that lies in matrices large enough for 16-bit units to pay
    fairly_wide: float  # ... to pay for a call with at least MANY_ROWS rows
    patch: tuple[int, int] | None  # height and width of the patches that a first layer makes tokens of
    complex: bool = False  # a trained parameter is complex


@dataclass(frozen=True)
class Facts:
    """Everything that a decision may depend on besides the user's wish."""

    machine: Machine
    traits: Traits
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # where the models will be
    optimizers: tuple[OptimizerTraits, ...] = ()
    sixteen_bit: bool = False  # the precision that has been decided
    exact: bool = False
    scaler: torch.amp.GradScaler | None = None
    regression: str = ""  # the name of a loss that measures how far predictions are off
    closure: bool = False  # an optimizer that evaluates the loss again, such as LBFGS
    world: World | None = None  # the processes around this one


def machine(device: Any = "auto") -> Machine:
    """The machine that this process runs on. For a device that is the CPU nothing is asked that would initialise CUDA."""
    current = accelerator()
    cuda = current is not None and current.type == "cuda" and not str(device).startswith("cpu")
    cudnn = torch.backends.cudnn
    return Machine(
        accelerator=current,
        accelerator_name=torch.cuda.get_device_name() if cuda else str(current or ""),
        accelerator_bf16=cuda and torch.cuda.is_bf16_supported(including_emulation=False),
        cpu_16bit=_cpu_16bit(),
        cudnn_benchmark=users_value(),
        deterministic=cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        onednn=torch.backends.mkldnn.is_available() and _is_x86(),  # type: ignore[no-untyped-call]
    )


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _cpu_16bit() -> str:
    # There is no public question for these; `is_autocast_available("cpu")` is True everywhere and no guide.
    units = {"AMX": "_is_amx_tile_supported", "AVX512-BF16": "_is_avx512_bf16_supported"}
    return next((name for name, probe in units.items() if getattr(torch.cpu, probe, bool)()), "")


def traits(modules: Sequence[nn.Module]) -> Traits:
    """What these modules are made of. Looks at types and shapes; reads no value and copies nothing."""
    parts = [part for module in modules for part in module.modules()]
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    tensors = [*parameters, *(b for module in modules for b in module.buffers())]
    known = [p for p in parameters if not isinstance(p, nn.parameter.UninitializedParameter)]
    images = [part for part in parts if isinstance(part, nn.Conv2d | nn.ConvTranspose2d)]
    total = sum(p.numel() for p in known)
    looked_up = {id(p) for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag) for p in part.parameters()}
    multiplied = [p for p in known if id(p) not in looked_up]
    return Traits(
        devices=frozenset(t.device for t in tensors),
        spread=any(_is_spread(module) for module in modules),
        floats=frozenset(p.dtype for p in parameters if p.is_floating_point()),
        half_trained=any(p.dtype is torch.float16 and p.requires_grad for p in parameters),
        lazy=len(known) < len(parameters),
        deep=sum(c.in_channels >= NARROW for c in images),
        widest=max((c.out_channels for c in images), default=0),
        max_pools=sum(isinstance(part, nn.MaxPool2d) for part in parts),
        batch_norm=any(isinstance(part, nn.BatchNorm2d) for part in parts),
        instance_norm=any(isinstance(part, nn.InstanceNorm2d) for part in parts),
        strided_pointwise=any(_is_strided_pointwise(part) for part in parts if isinstance(part, nn.Conv2d)),
        channels_last=any(is_channels_last(p) for p in known),
        five_dimensional=any(p.dim() == 5 for p in known),
        convolutions=frozenset(n for part in parts for kind, n in _CONVOLUTIONS.items() if isinstance(part, kind)),
        lstm=any(isinstance(part, nn.LSTM | nn.LSTMCell) for part in parts),
        lstm_cells=any(isinstance(part, nn.LSTMCell) for part in parts),
        recurrent=any(isinstance(part, nn.RNN | nn.GRU | nn.RNNCell | nn.GRUCell) for part in parts),
        depthwise=any(isinstance(part, nn.modules.conv._ConvNd) and 1 < part.groups == part.in_channels for part in parts),
        ids=_ids(parts),
        dropout_on_maps=any(map(_drops_in_maps, modules)),
        parameters=total,
        given=given(modules),
        wide=sum(p.numel() for p in known if _is_wide(p, 512)) / max(total, 1),
        fairly_wide=sum(p.numel() for p in multiplied if _is_wide(p, 128)) / max(sum(p.numel() for p in multiplied), 1),
        patch=_patch(images, known),
        complex=any(p.is_complex() and p.requires_grad for p in parameters),
    )


def _is_spread(module: nn.Module) -> bool:
    devices = {t.device for t in (*module.parameters(), *module.buffers())}
    return len(devices) > 1 and any(device.type != "cpu" for device in devices)


def _is_strided_pointwise(convolution: nn.Conv2d) -> bool:
    narrow = convolution.in_channels // convolution.groups < NARROW
    return max(convolution.kernel_size) == 1 and max(convolution.stride) > 1 and narrow


def _drops_in_maps(module: nn.Module) -> bool:
    """Whether an element-wise dropout may sit on feature maps, as far as the order of the modules tells.

    The head begins behind the last 2-D convolution with a layer that leaves no map; a Sequential of linear layers is one anywhere.
    (Dropout2d and FeatureAlphaDropout draw a number for each channel, whatever the layout.)
    """
    parts = list(module.modules())
    images = {id(part) for part in parts if isinstance(part, nn.Conv2d | nn.ConvTranspose2d)}
    if not images:
        return False
    last = max(i for i, part in enumerate(parts) if id(part) in images)
    tail = parts[last + 1 :]
    begin = next((i for i, part in enumerate(tail) if _leaves_no_map(part)), len(tail))
    safe = {id(part) for part in tail[begin:]}
    for part in parts:
        if isinstance(part, nn.Sequential) and any(isinstance(child, nn.Linear) for child in part):
            inner = {id(p) for p in part.modules()}
            if not inner & images:
                safe |= inner
    return any(isinstance(part, nn.Dropout | nn.AlphaDropout) and part.p > 0 and id(part) not in safe for part in parts)


def _leaves_no_map(part: nn.Module) -> bool:
    if isinstance(part, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d):
        return part.output_size in (1, (1, 1))
    return isinstance(part, nn.Flatten | nn.Linear)


def _is_wide(parameter: torch.Tensor, features: int) -> bool:
    # Measured on AVX512-BF16: linear layers gain from 512 features and SOME_ROWS on (of 256, a batch of 32 takes 1.1 times as
    # long), convolutions, which use each weight many times, from 32 channels on; below that the casts cost more than they save.
    # With MANY_ROWS linear layers of 128 features take a quarter of the time.
    if parameter.dim() < 2:
        return False
    narrow = min(parameter.shape[0], parameter.numel() // max(parameter.shape[0], 1))
    return narrow >= (features if parameter.dim() == 2 else 32)


def _ids(parts: Sequence[nn.Module]) -> str:
    """Tokens go through the linear layers one by one; columns are joined or summed to a sample, as bags and small tables say."""
    tables = [part for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    if not tables:
        return ""
    tokens = all(isinstance(part, nn.Embedding) for part in tables) and max(part.embedding_dim for part in tables) >= 128
    return "token" if tokens else "column"


def _patch(images: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """The patches of a model such as a vision transformer: its one 2-D convolution cuts images up, and the rest sees its channels.

    Matrices with more than four times as many inputs, which a transformer's layers stay below, belong to flattened maps: they
    see one row a sample.
    """
    if len(images) != 1 or not isinstance(cut := images[0], nn.Conv2d):
        return None
    if cut.kernel_size != cut.stride or min(cut.kernel_size) < 2 or cut.padding not in ((0, 0), "valid"):
        return None
    if any(p.dim() == 2 and p.shape[1] > 4 * cut.out_channels for p in parameters):
        return None
    height, width = cut.kernel_size
    return height, width
