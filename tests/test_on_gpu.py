"""What only a real CUDA device can show. `make gpu` runs these; elsewhere they are skipped."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hotloop import optimize, prefetch

pytestmark = pytest.mark.gpu
GPU = "cuda"


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 4 * 4, 10))


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(16, 3, 8, 8), torch.randint(10, (16,))) for _ in range(count)]


def on_gpu(given: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(GPU), y.to(GPU)) for x, y in given]


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    other = b.state_dict()
    assert [name for name, value in a.state_dict().items() if not torch.equal(value, other[name])] == []


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN may add in another order from one run to the next, whoever calls it."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operator that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("make", [linear, convolutional])
def test_exact_training_is_the_plain_loop_to_the_bit(make: Any) -> None:
    plain = make().to(GPU)
    start = copy.deepcopy(plain)
    mine = copy.deepcopy(plain)
    given = batches()
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for x, y in on_gpu(given):
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    model, step = optimize(mine, torch.optim.Adam(mine.parameters(), lr=1e-2), F.cross_entropy, exact=True)
    torch.manual_seed(1)
    assert [step(x, y)["loss"] for x, y in given] == losses
    assert_same_bits(plain, model)
    assert not torch.equal(next(start.parameters()), next(plain.parameters()))


def test_a_wait_would_be_found() -> None:
    loss = torch.ones(1, device=GPU)
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        loss.item()


@pytest.mark.parametrize(
    "wishes",
    [{}, {"exact": True}, {"clip_norm": 1.0}, {"accumulate": 2}, {"precision": "fp32"}, {"precision": "fp16", "fused": True}],
    ids=str,
)
def test_no_step_waits_until_a_metric_is_read(wishes: dict[str, Any]) -> None:
    given = on_gpu(batches())
    net = convolutional()
    _, step = optimize(net, torch.optim.Adam(net.parameters(), lr=1e-2), F.cross_entropy, **wishes)
    step(*given[0])  # what CUDA and cuDNN set up at first may wait
    step.flush()
    with no_waiting():
        metrics = [step(x, y) for x, y in given]
    losses = [m["loss"] for m in metrics]
    assert len(set(losses)) == len(given)
    assert all(0 < loss < 10 for loss in losses)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_prefetch_copies_beside_the_computation_and_brings_the_right_values(depth: int) -> None:
    host = [torch.full((1024, 256), float(i)) for i in range(24)]
    busy = torch.randn(2048, 2048, device=GPU)
    sums = []
    for (x,) in prefetch(DataLoader(TensorDataset(torch.cat(host)), batch_size=1024), GPU, depth=depth):
        assert x.device.type == GPU
        busy = torch.tanh(busy @ busy)  # the values are used long after the next batches were sent
        sums.append((x + 0 * busy[:1024, :256]).sum(dtype=torch.float64))
        del x  # its memory may be given to a later batch, once this computation is through with it
    assert torch.stack(sums).tolist() == [1024 * 256 * float(i) for i in range(24)]


@pytest.mark.parametrize("way", ["prefetch", "call"])
def test_a_pinned_buffer_that_is_refilled_arrives_as_it_was(way: str) -> None:
    """The device reads pinned memory when it gets there, and it is behind."""
    buffer = torch.empty(1 << 22, pin_memory=True)
    refilled = (buffer.fill_(float(i)) for i in range(8))
    busy = torch.randn(4096, 4096, device=GPU)
    sums = []
    for x in prefetch(refilled, GPU) if way == "prefetch" else map(optimize(nn.Identity(), device=GPU), refilled):
        for _ in range(10):
            busy = torch.tanh(busy @ busy)
        sums.append(x.sum(dtype=torch.float64))
    assert torch.stack(sums).tolist() == [(1 << 22) * float(i) for i in range(8)]


def test_prefetch_does_not_copy_on_the_stream_of_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []
    to = Tensor.to

    def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        streams.append(torch.cuda.current_stream())
        return to(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", watched)
        assert len(list(prefetch(batches(), GPU))) == 6
    assert streams
    assert torch.cuda.current_stream() not in streams


@pytest.mark.usefixtures("deterministic")
def test_float16_with_a_fused_optimizer_and_clipping_is_the_loop_by_hand() -> None:
    plain = linear().to(GPU).eval()  # no dropout
    mine = copy.deepcopy(plain)
    given = on_gpu(batches())
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler(GPU)
    norms = []
    for x, y in given:
        optimizer.zero_grad()
        with torch.autocast(GPU, torch.float16):
            output = plain(x)
        loss = F.cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()

    adam = torch.optim.Adam(mine.parameters(), lr=1e-2, fused=True)
    model, step = optimize(mine, adam, F.cross_entropy, precision="fp16", clip_norm=0.5)
    assert [step(x, y)["grad_norm"] for x, y in given] == pytest.approx(norms, rel=1e-3)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clip_norm", [None, 100.0])
def test_after_an_error_in_a_fused_optimizer_the_next_update_is_a_whole_one(clip_norm: float | None) -> None:
    """In float16 the scale travels with the optimizer."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    first = linear().eval()  # no dropout
    second = copy.deepcopy(first)
    one, two, three = on_gpu(batches(3))
    wishes: dict[str, Any] = {"precision": "fp16", "fused": True, "clip_norm": clip_norm}
    plain, step = optimize(first, torch.optim.SGD(first.parameters(), lr=0.1), F.cross_entropy, **wishes)
    step(*one)
    step(*three)

    sgd = torch.optim.SGD(second.parameters(), lr=0.1)
    model, step = optimize(second, sgd, F.cross_entropy, **wishes)
    step(*one)
    handle = sgd.register_step_pre_hook(fails)
    with pytest.raises(torch.OutOfMemoryError):
        step(*two)
    handle.remove()
    assert step(*three).updated
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_an_overflow_in_float16_skips_the_update() -> None:
    net = linear()
    model, step = optimize(net, torch.optim.Adam(net.parameters()), F.cross_entropy, precision="fp16", fused=True)
    before = copy.deepcopy(net.state_dict())
    scale = step.scale
    metrics = step(torch.full((4, 3, 8, 8), 1e30), torch.randint(10, (4,)))
    assert metrics.skipped
    assert step.scale < scale
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_benchmark_flag_is_on_for_the_first_eight_shapes_and_put_back() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    flags: list[bool] = []
    net.register_forward_pre_hook(lambda *_: flags.append(torch.backends.cudnn.benchmark))
    _, step = optimize(net, torch.optim.Adam(net.parameters()), F.cross_entropy)
    sizes = [8 + i for i in range(10)]
    for size in (*sizes, *sizes):
        step(torch.randn(2, 3, size, size), torch.randint(10, (2,)))
        assert not torch.backends.cudnn.benchmark
    assert flags == [True] * 8 + [False] * 2 + [True] * 8 + [False] * 2
