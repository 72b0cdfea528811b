"""The simulated accelerator behaves as a real one where the tests depend on it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import simgpu

pytestmark = pytest.mark.simgpu

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)),
    "convnet": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(1), nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True), nn.Flatten(), nn.Linear(6, 3)
    ),
    "lstm": lambda: Last(nn.LSTM(1, 4, num_layers=2, batch_first=True)),
    "gru": lambda: Last(nn.GRU(1, 4, batch_first=True)),
}  # fmt: skip


class Last(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.recurrent(x[..., None])[0][:, -1])


def host(state):
    return {name: value.cpu() for name, value in state.items()}


def train(device, make, optimizer, *, steps=4, dtype=None):
    torch.manual_seed(1)
    model = make().to(device)
    opt = optimizer(model.parameters())
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    for step in range(steps):
        opt.zero_grad()
        torch.manual_seed(step)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            out = model(x.to(device))
        loss = nn.functional.cross_entropy(out.float(), y.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    return host(model.state_dict()), loss.item()


@pytest.mark.parametrize("optimizer", [
    pytest.param(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), id="sgd"),
    pytest.param(lambda p: torch.optim.AdamW(p, 0.01), id="adamw"),
    pytest.param(lambda p: torch.optim.AdamW(p, 0.01, fused=True), id="fused adamw"),
])  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_training_gives_what_the_host_gives(name, optimizer):
    here, loss = train("cpu", MODELS[name], optimizer)
    there, device_loss = train(simgpu.NAME, MODELS[name], optimizer)
    assert loss == pytest.approx(device_loss, abs=1e-5)
    for key, value in here.items():
        torch.testing.assert_close(there[key], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mlp", "convnet", "attention"])
def test_training_under_autocast(name, dtype):
    _, single = train(simgpu.NAME, MODELS[name], lambda p: torch.optim.SGD(p, 0.1))
    _, loss = train(simgpu.NAME, MODELS[name], lambda p: torch.optim.SGD(p, 0.1), dtype=dtype)
    assert loss == pytest.approx(single, abs=0.03)
    assert loss != single


def test_autocast_casts_as_cuda_does():
    x = torch.randn(2, 4, device=simgpu.NAME)
    with torch.autocast(simgpu.NAME, dtype=torch.float16):
        out = nn.Linear(4, 2).to(simgpu.NAME)(x)
        assert out.dtype == torch.float16
        assert out.softmax(-1).dtype == torch.float32
        assert out.mean().dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(out.sigmoid(), torch.ones_like(out))
    assert x.dtype == torch.float32


def test_an_overflow_skips_the_update_without_a_wait_when_the_optimizer_is_fused():
    weight = nn.Parameter(torch.ones(2, device=simgpu.NAME))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = torch.amp.GradScaler(simgpu.NAME)
    scaler.scale((weight * float("inf")).sum()).backward()
    simgpu.counts.clear()
    scaler.step(optimizer)
    scaler.update()
    assert simgpu.host_waits() == 0
    assert weight.detach().tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 32768.0


def test_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device=simgpu.NAME) + torch.ones(2)
    with pytest.raises(TypeError, match="can't convert simgpu:0 device type tensor to numpy"):
        torch.ones(2, device=simgpu.NAME).numpy()
    assert (torch.ones(2, device=simgpu.NAME) + torch.tensor(1.0)).tolist() == [2.0, 2.0]  # a scalar travels along


def test_it_is_the_current_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device(simgpu.NAME)
    assert nn.Linear(2, 2).to(simgpu.NAME).weight.device == torch.device(simgpu.NAME, 0)


def test_strides_and_views_are_those_of_the_host():
    x = torch.zeros(2, 3, 4, 4, device=simgpu.NAME).to(memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.view(2, -1)
    x[:, 0].fill_(1)
    assert x.sum().item() == 32


def test_copies_are_counted_by_direction_and_by_whether_they_block():
    simgpu.counts.clear()
    there = torch.ones(2).to(simgpu.NAME)
    assert (simgpu.counts["h2d"], simgpu.host_waits()) == (1, 1)
    torch.ones(2).to(simgpu.NAME, non_blocking=True)
    assert (simgpu.counts["h2d"], simgpu.host_waits()) == (2, 1)
    there.to("cpu", non_blocking=True)
    assert (simgpu.counts["d2h"], simgpu.host_waits()) == (1, 1)
    there.cpu()
    assert (simgpu.counts["d2h"], simgpu.host_waits()) == (2, 2)
    torch.empty(2).copy_(there, non_blocking=True)  # into pageable memory: it blocks, whatever was asked for
    assert simgpu.host_waits() == 3
    assert there.to(simgpu.NAME) is there
    assert (simgpu.counts["h2d"], simgpu.counts["d2h"]) == (2, 3)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool(x[0] > 0),
        lambda x: f"{x[0]:.1f}",
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: x.__setitem__(x > 0, x.clone()),
        lambda x: torch.accelerator.synchronize(),
        lambda x: torch.tensor([1.0], device=x.device),
    ],
)
def test_what_makes_the_host_wait_is_counted(read):
    x = torch.tensor([1.0, 2.0], device=simgpu.NAME)
    simgpu.counts.clear()
    read(x)
    assert simgpu.host_waits() == 1


def test_work_on_the_device_does_not_make_the_host_wait():
    x = torch.randn(4, 4, device=simgpu.NAME, requires_grad=True)
    simgpu.counts.clear()
    (x @ x).relu()[:, 1].mean().backward()
    torch.stack([x.detach().sum(), x.grad.norm()]).clone()
    assert simgpu.host_waits() == 0
    assert simgpu.counts["aten::mm"] == 3


def test_a_delayed_copy_arrives_when_its_own_event_is_waited_for():
    x = torch.ones(2, device=simgpu.NAME)
    with simgpu.asynchronous():
        first = torch.empty(2, pin_memory=True).copy_(x, non_blocking=True)
        event = torch.Event(simgpu.NAME)
        event.record()
        x.add_(1)
        second = x.to("cpu", non_blocking=True)
        assert first.isnan().all()
        assert not event.query()
        event.synchronize()
        assert first.tolist() == [1.0, 1.0]
        assert event.query()
        assert second.isnan().all()
        assert simgpu.in_flight() == 1
        torch.accelerator.synchronize()
        assert second.tolist() == [2.0, 2.0]


def test_pinned_memory_is_read_late():
    with simgpu.asynchronous():
        x = torch.ones(2, pin_memory=True)
        late, now = x.to(simgpu.NAME, non_blocking=True), x.to(simgpu.NAME)
        x.fill_(2.0)
    assert (late.tolist(), now.tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_the_device_can_be_the_default_one():
    with torch.device(simgpu.NAME):
        assert torch.empty(2).device.type == simgpu.NAME
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            torch.empty(2, pin_memory=True)


def test_a_delayed_copy_arrives_before_a_blocking_read():
    x = torch.ones(2, device=simgpu.NAME)
    with simgpu.asynchronous():
        copied = x.to("cpu", non_blocking=True)
        assert copied.isnan().all()
        x.sum().item()
        assert copied.tolist() == [1.0, 1.0]


def test_streams_and_events_are_counted():
    simgpu.counts.clear()
    stream = torch.Stream(simgpu.NAME)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        x = torch.ones(2, pin_memory=True).to(simgpu.NAME, non_blocking=True)
    event = stream.record_event()
    torch.accelerator.current_stream().wait_event(event)
    x.record_stream(torch.accelerator.current_stream())
    expected = {"stream.wait": 2, "event.record": 1, "aten::record_stream": 1, "h2d": 1}
    assert {name: simgpu.counts[name] for name in expected} == expected
    assert simgpu.host_waits() == 0


def test_pinned_memory():
    assert torch.empty(2, pin_memory=True).is_pinned()
    assert torch.ones(2).pin_memory()[1:].is_pinned()
    assert not torch.ones(2).is_pinned()
    assert not torch.ones(2, device=simgpu.NAME).is_pinned()
    batches = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2, pin_memory=True)
    assert next(iter(batches)).is_pinned()


def test_copies_and_checkpoints():
    model = nn.Linear(2, 2).to(simgpu.NAME)
    twin = copy.deepcopy(model)
    assert twin.weight.device.type == simgpu.NAME
    with torch.no_grad():
        twin.weight.zero_()
    assert model.weight.abs().sum() > 0
    for location, expected in ((None, simgpu.NAME), ("cpu", "cpu")):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert loaded["weight"].device.type == expected
        assert torch.equal(loaded["weight"].cpu(), model.weight.cpu())


def test_sparse_gradients():
    embedding = nn.Embedding(4, 2, sparse=True).to(simgpu.NAME)
    embedding(torch.tensor([1], device=simgpu.NAME)).sum().backward()
    assert embedding.weight.grad.is_sparse
    torch.optim.SGD(embedding.parameters(), 0.1).step()


def test_setting_data_takes_the_values_along():
    weight = nn.Parameter(torch.ones(2, device=simgpu.NAME))
    weight.data = torch.zeros(2, device=simgpu.NAME)
    assert weight.detach().tolist() == [0.0, 0.0]
