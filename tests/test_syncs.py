"""find_syncs names every operation that makes the host wait for the device, by the user's line, and none in a clean step."""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import simgpu
from hotloop._means import Means
from hotloop._metrics import Metrics
from hotloop._optimize import optimize
from hotloop._reading import Reading, read_numbers
from hotloop._syncs import find_syncs

x = torch.tensor([-1.0, 2.0, 0.5, 3.0])
mask = x > 0
counts = torch.tensor([1, 2, 1, 1])
labels = torch.tensor([0, 2, 1])
scalar = torch.tensor(3)
device = torch.device("cpu")
square = torch.eye(3) * 2
half = torch.tensor(0.5)


def entries(syncs: Any) -> list[tuple[str, int]]:
    return [(s.op, s.count) for s in syncs]


def mask_assignment() -> None:
    torch.zeros(4)[mask] = torch.ones(3)


def scalar_by_mask() -> None:
    torch.zeros(4)[mask] = half


def value_by_list() -> None:
    torch.zeros(4)[[0, 2]] = 1.0


def ctc_loss() -> torch.Tensor:
    lengths = torch.tensor([5, 5]), torch.tensor([2, 2])
    return F.ctc_loss(torch.randn(5, 2, 4).log_softmax(2), torch.ones(2, 2, dtype=torch.long), *lengths)


PLANTED: list[tuple[str, Callable[[], object]]] = [
    (".item()", lambda: x[0].item()),
    ("float()", lambda: float(scalar)),
    ("int()", lambda: int(scalar)),
    ("complex()", lambda: complex(scalar)),
    ("bool()", lambda: bool(scalar > 1)),
    ("bool()", lambda: 1 if scalar else 2),
    ("bool()", lambda: "all" if mask.all() else "some"),
    ("bool()", lambda: max(x[0], x[1])),
    ("index()", lambda: [1, 2, 3, 4][scalar]),
    ("index()", lambda: list(range(scalar))),
    ("[...]", lambda: x[scalar]),
    ("[...]", lambda: x[:scalar]),
    ("torch.zeros()", lambda: torch.zeros(2, scalar) if False else torch.zeros(scalar)),
    ("in", lambda: 3 in labels),
    (".cpu()", lambda: x.cpu()),
    (".cpu()", lambda: x.cpu().numpy()),
    (".to()", lambda: x.to("cpu")),
    (".to()", lambda: x.to(device, torch.float64)),
    (".to()", lambda: x.to(device=device)),
    (".tolist()", lambda: x.tolist()),
    (".numpy()", lambda: x.numpy()),
    ("numpy.asarray()", lambda: np.asarray(x)),
    ("print()", lambda: repr(x)),
    ("print()", lambda: str({"loss": x})),
    ("format()", lambda: f"{x[0]:.3f}"),
    ("format()", lambda: f"{x}"),
    (".nonzero()", lambda: x.nonzero()),
    ("torch.nonzero()", lambda: torch.nonzero(x)),
    ("torch.argwhere()", lambda: torch.argwhere(mask)),
    ("torch.where()", lambda: torch.where(mask)),
    ("[...]", lambda: x[mask]),
    ("[...] =", mask_assignment),
    (".masked_select()", lambda: x.masked_select(mask)),
    ("torch.unique()", lambda: torch.unique(labels)),
    ("torch.unique()", lambda: torch.unique(labels[:, None], dim=0)),
    ("torch.unique_consecutive()", lambda: torch.unique_consecutive(labels)),
    ("torch.isin()", lambda: torch.isin(torch.arange(9), torch.arange(99))),
    ("torch.equal()", lambda: torch.equal(x, x)),
    ("torch.allclose()", lambda: torch.allclose(x, x)),
    (".repeat_interleave()", lambda: x.repeat_interleave(counts)),
    ("torch.bincount()", lambda: torch.bincount(labels)),
    ("torch.histc()", lambda: torch.histc(x)),
    ("F.one_hot()", lambda: F.one_hot(labels)),
    ("torch.multinomial()", lambda: torch.multinomial(x.abs(), 2)),
    ("torch.linalg.inv()", lambda: torch.linalg.inv(torch.eye(3))),
    (".to_sparse()", lambda: x.to_sparse()),
    ("torch.tensor()", lambda: torch.tensor(0.5, device=x.device)),
    ("torch.tensor()", lambda: torch.tensor([x[0], x[1]])),
    ("torch.as_tensor()", lambda: torch.as_tensor([1.0], device=device)),
    ("synchronize()", lambda: torch.cpu.synchronize()),
    ("[...] =", scalar_by_mask),
    (".index_put()", lambda: x.index_put((mask,), half)),
    (".masked_fill()", lambda: x.masked_fill(mask, half)),
    ("torch.index_fill()", lambda: torch.index_fill(x, 0, labels, half)),
    ("torch.normal()", lambda: torch.normal(x, x.abs())),
    ("torch.normal()", lambda: torch.normal(0.0, x.abs())),
    ("torch.linspace()", lambda: torch.linspace(0, half, 5)),
    ("torch.linalg.eigh()", lambda: torch.linalg.eigh(square)),
    ("torch.linalg.eigvalsh()", lambda: torch.linalg.eigvalsh(square)),
    ("torch.linalg.eig()", lambda: torch.linalg.eig(square)),
    ("torch.linalg.eigvals()", lambda: torch.linalg.eigvals(square)),
    ("torch.linalg.svd()", lambda: torch.linalg.svd(square)),
    ("torch.linalg.matrix_rank()", lambda: torch.linalg.matrix_rank(square)),
    ("torch.linalg.pinv()", lambda: torch.linalg.pinv(square)),
    ("torch.linalg.lstsq()", lambda: torch.linalg.lstsq(square, square)),
    ("torch.linalg.matrix_exp()", lambda: torch.linalg.matrix_exp(square)),
    ("torch.linalg.cholesky()", lambda: torch.linalg.cholesky(square)),
    ("torch.cholesky_inverse()", lambda: torch.cholesky_inverse(square)),
    ("torch.linalg.inv_ex()", lambda: torch.linalg.inv_ex(square, check_errors=True)),
    ("torch.linalg.solve()", lambda: torch.linalg.solve(square, x[:3])),
    ("F.ctc_loss()", ctc_loss),
    (".new_tensor()", lambda: x.new_tensor([1.0])),
    ("torch.asarray()", lambda: torch.asarray([1.0], device=device)),
    ("[...]", lambda: x[[0, 2]]),
    ("[...]", lambda: x[None, range(2)]),
    ("[...]", lambda: x[np.array([0, 2])]),
    ("[...] =", value_by_list),
]


@pytest.mark.parametrize(("op", "planted"), PLANTED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_planted_wait_is_found_once_with_its_line(op: str, planted: Callable[[], object]) -> None:
    with find_syncs() as syncs:
        planted()
    code = planted.__code__
    line = code.co_firstlineno + {"<lambda>": 0, "ctc_loss": 2}.get(code.co_name, 1)
    assert [(s.op, s.count, s.file, s.line) for s in syncs] == [(op, 1, __file__, line)]
    assert syncs[0].hint


@pytest.mark.parametrize(("op", "planted"), PLANTED, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("around", [False, True])
def test_inference_mode_hides_nothing(op: str, planted: Callable[[], object], around: bool) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        with find_syncs() as syncs, torch.inference_mode():
            planted()
        return syncs

    with torch.inference_mode(around):
        syncs = run()
    assert entries(syncs) == [(op, 1)]


def test_inference_mode_gives_the_results_of_plain_code() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(2), nn.LSTM(16, 4, batch_first=True)
    ).eval()
    images = torch.randn(2, 2, 6, 6)
    with torch.inference_mode():
        plain = model(images)[0]
        with find_syncs() as syncs:
            watched = model(images)[0]
    assert torch.equal(watched, plain)
    assert watched.is_inference()
    assert entries(syncs) == []


packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 2, 1), torch.tensor([3, 2]))

CLEAN: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (x * 2 + x.sum()).softmax(0).argmax(),
    "non_blocking": lambda: x.to("cpu", non_blocking=True),
    "dtype": lambda: x.to(torch.float64).double().float(),
    "like another tensor": lambda: x.to(x.double()),
    "masked fill": lambda: x.clone().__setitem__(mask, 0.0),
    "index by positions": lambda: x[labels],
    "slice": lambda: x[1:3],
    "where with values": lambda: torch.where(mask, x, 0),
    "known size": lambda: (x.repeat_interleave(counts, output_size=5), x.repeat_interleave(2)),
    "known classes": lambda: (F.one_hot(labels, 3), F.one_hot(labels, num_classes=3)),
    "known bounds": lambda: torch.histc(x, 4, -1, 3),
    "few elements": lambda: torch.isin(torch.arange(9), torch.arange(2)),
    "with replacement": lambda: torch.multinomial(x.abs(), 2, replacement=True),
    "unchecked": lambda: torch.linalg.inv_ex(torch.eye(3)),
    "from numbers": lambda: torch.tensor([1.0, 2.0]),
    "shapes": lambda: (x.shape, len(x), x.size(0), x.numel(), x.device, x.dtype),
    "identity": lambda: (hash(x), x is x, isinstance(x, torch.Tensor)),
    "iteration": lambda: sum(v for v in x),
    "clipping": lambda: nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0),
    "packing": lambda: nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 2, 1), torch.tensor([3, 2])),
    "moving a module": lambda: nn.Linear(2, 2).to(device),
    "deep copy": lambda: copy.deepcopy(x),
    "filled by a number": lambda: (x.masked_fill(mask, 0.5), x.index_fill(0, labels, 0.5), x.index_put((labels,), x[:3])),
    "one deviation": lambda: torch.normal(x, 1.0),
    "decompositions without a check": lambda: (
        torch.linalg.qr(square),
        torch.linalg.det(square),
        torch.linalg.cholesky_ex(square),
    ),
    "index by tensors": lambda: (x[labels, None], x[..., 0], x[-1], x[None]),
    "a bound": lambda: torch.linspace(0, 1, 5),
    "packed sequences": lambda: [recurrent(packed) for recurrent in (nn.LSTM(1, 2), nn.GRU(1, 2), nn.RNN(1, 2))],
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_does_not_wait_is_not_reported(name: str) -> None:
    with find_syncs() as syncs:
        CLEAN[name]()
    assert entries(syncs) == []


# --- a training loop --------------------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    """A data set that reads its own tensors, as many do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.as_tensor(np.full(4, i, np.float32)), int(torch.tensor(i % 2).item())


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adam, tensor lr": functools.partial(torch.optim.Adam, lr=torch.tensor(0.1)),
    "adamw, foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw, fused": functools.partial(torch.optim.AdamW, fused=True),
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_clean_loop_has_none(make_optimizer: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    total = torch.zeros(())
    with find_syncs() as syncs:
        for batch, targets in DataLoader(Items(), batch_size=4, shuffle=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.detach()
    assert entries(syncs) == []


def test_waits_inside_torch_are_named_by_the_users_line() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    scaler = torch.amp.GradScaler("cpu")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    with find_syncs() as syncs:
        optimizer.step(closure)  # reads the loss
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(sgd)  # reads whether a gradient overflowed
        averaged.update_parameters(model)  # reads whether this is the first time
    where = {(s.file, s.line) for s in syncs}
    assert where == {(__file__, line_of(f"  # reads {what}")) for what in ("the loss", "whether a", "whether this")}


def test_an_optimizer_that_reads_its_parameters_is_reported() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.Adafactor([weight])
    weight.sum().backward()
    with find_syncs() as syncs:
        optimizer.step()
    assert [s.op for s in syncs] == [".item()"]


def test_a_backward_hook_has_its_own_line() -> None:
    weight = torch.ones((), requires_grad=True)
    weight.register_hook(lambda grad: grad * grad.item())
    with find_syncs() as syncs:
        (weight * 2).backward()
        torch.autograd.grad(weight * 2, weight)
    assert [(s.op, s.count, s.line) for s in syncs] == [(".item()", 2, line_of("weight.register_hook(lambda grad"))]


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, start=1) if text in line)


# --- what is said about a place -----------------------------------------------------------------------------------------


def test_counts_are_by_place_in_the_order_of_their_first_appearance() -> None:
    with find_syncs() as syncs:
        for i in range(3):
            x.sum().item()
            if i:
                float(x[0]), float(x[1])
                x.tolist()
    assert entries(syncs) == [(".item()", 3), ("float()", 4), (".tolist()", 2)]
    assert [s.op for s in syncs[1:]] == ["float()", ".tolist()"]
    assert isinstance(syncs, Sequence)
    assert len(syncs) == 3
    assert syncs[0] in syncs


def test_a_copy_to_the_host_leaves_the_original_on_the_device() -> None:
    with find_syncs() as syncs:
        loss = x.sum()
        history = [loss.cpu().item(), x.cpu().tolist()]
        history.append(loss.item())
        torch.unique(x)
        x.tolist()
    assert entries(syncs) == [(".cpu()", 2), (".item()", 1), ("torch.unique()", 1), (".tolist()", 1)]


def test_the_table_tells_where_what_how_often_and_what_to_do() -> None:
    with find_syncs() as syncs:
        pass
    assert str(syncs) == "nothing made the host wait for the device"
    with find_syncs() as syncs:
        x[0].item()  # in the table
    header, row, note = str(syncs).splitlines()
    assert header.split() == ["where", "call", "count", "what", "to", "do"]
    assert row.startswith(f"test_syncs.py:{line_of('x[0].item()  # in the table')}  .item()      1  keep it on the device")
    assert "CPU" in note


def test_libraries_are_skipped_for_the_line_that_calls_them(tmp_path: Any) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    module = imported(folder / "library.py", "def read(t):\n    return t.item()\n")
    with find_syncs() as syncs:
        module.read(x[0])  # this one
        logging.getLogger("quiet").critical("%s", "-")
        functools.reduce(max, x)
    assert [(s.op, s.file, s.line - line_of("module.read(x[0])  # this one")) for s in syncs] == [
        (".item()", __file__, 0),
        ("bool()", __file__, 2),
    ]


def test_where_all_is_library_code_the_innermost_line_outside_of_torch_is_named(tmp_path: Any) -> None:
    (tmp_path / "site-packages").mkdir()
    source = (
        "def run(find, t):\n    with find() as found:\n        t.backward()\n        t.item()\n    found_in.append(found)\n"
    )
    module = imported(tmp_path / "site-packages" / "library.py", f"found_in = []\n{source}")
    thread = threading.Thread(target=module.run, args=(find_syncs, torch.ones((), requires_grad=True)))
    thread.start()
    thread.join()
    assert [(s.op, s.file, s.line) for s in module.found_in[0]] == [(".item()", module.__file__, 5)]


def imported(path: Any, source: str) -> Any:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("library", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the block ----------------------------------------------------------------------------------------------------------


def test_blocks_nest() -> None:
    with find_syncs() as outer:
        x[0].item()
        with find_syncs() as inner:
            x.tolist()
            torch.cpu.synchronize()
        float(x[0])
    assert entries(inner) == [(".tolist()", 1), ("synchronize()", 1)]
    assert entries(outer) == [(".item()", 1), (".tolist()", 1), ("synchronize()", 1), ("float()", 1)]
    assert {s.file for s in outer} == {__file__}


def test_an_exception_passes_through_and_the_list_stays() -> None:
    before = torch.cpu.synchronize, Reading.values, Means.sums
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"), find_syncs() as syncs:
        x.tolist()
        x.item()
    assert entries(syncs) == [(".tolist()", 1)]
    assert before == (torch.cpu.synchronize, Reading.values, Means.sums)
    x.tolist()
    assert len(syncs) == 1


def test_results_are_those_of_the_plain_code() -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        loss = model(x).square().mean()
        loss.backward()
        return [loss.item(), model[0].weight.grad.tolist(), x[mask].tolist(), x.cpu() is x, f"{loss:.2f}", repr(loss)]

    with find_syncs():
        watched = run()
    assert watched == run()


def test_other_threads_are_not_the_users_loop() -> None:
    def work() -> None:
        x.tolist()
        torch.cpu.synchronize()
        Metrics(["loss"], Reading([x[0]]))["loss"]

    with find_syncs() as syncs:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert entries(syncs) == []


@pytest.fixture(scope="module")
def compiler() -> Any:
    torch.compile(torch.sin, backend="eager")(x)  # the first compilation of a process changes nn.Module for good
    yield torch.compile
    torch.compiler.reset()


@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_code_is_seen_and_stays_compiled(compiler: Any, compiled_before: bool) -> None:
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    def function(t: torch.Tensor) -> torch.Tensor:
        return (t * 2).nonzero()

    compiled = compiler(function, backend=backend)
    if compiled_before:
        compiled(x)
    at_start = len(compilations)
    with find_syncs() as syncs:
        compiled(x)
    assert [(s.op, s.line) for s in syncs] == [(".nonzero()", function.__code__.co_firstlineno + 1)]
    assert len(compilations) == at_start == compiled_before
    compiled(x)
    assert len(compilations) == 1


# --- metrics --------------------------------------------------------------------------------------------------------------


def test_a_look_at_metrics_is_the_users_read_and_the_steps_own_is_not() -> None:
    means = Means()
    with find_syncs() as syncs:
        made = [Metrics(["loss", "acc"], Reading([x[0], x[1]])) for _ in range(2)]
        means.add(["loss"], Reading([x[0]]), 1.0)
        assert entries(syncs) == []
        for metrics in made:
            dict(metrics), metrics["acc"], f"{metrics:.2f}"
    assert entries(syncs) == [("metrics[...]", 2)]
    assert syncs[0].line == line_of("dict(metrics), metrics")


@pytest.mark.parametrize(
    ("op", "look"),
    [
        ("metrics[...]", lambda metrics, means: float(metrics)),
        ("metrics[...]", lambda metrics, means: metrics.item()),
        ("metrics.skipped", lambda metrics, means: metrics.skipped),
        ("pickle.dumps()", lambda metrics, means: pickle.dumps(metrics)),
        ("step.mean()", lambda metrics, means: means.sums()),
        ("fast_eval()", lambda metrics, means: read_numbers([x[0], x[1]])),
    ],
)
def test_every_way_to_look_counts_once(op: str, look: Any) -> None:
    metrics, means = Metrics(["loss"], Reading([x[0]])), Means()
    with find_syncs() as syncs:
        look(metrics, means)
    assert [(s.op, s.count, s.line) for s in syncs] == [(op, 1, look.__code__.co_firstlineno)]


# --- an accelerator ---------------------------------------------------------------------------------------------------------


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(simgpu.NAME) for tensor in tensors]


DEVICE: dict[str, Callable[[Any, Any, Any], object]] = {
    "item": lambda t, m, s: s.item(),
    "float": lambda t, m, s: float(s),
    "branch": lambda t, m, s: 1 if s > 0 else 2,
    "cpu": lambda t, m, s: t.cpu(),
    "cpu, then read": lambda t, m, s: t.cpu().tolist(),
    "to cpu": lambda t, m, s: t.to("cpu"),
    "to cpu, non_blocking": lambda t, m, s: t.to("cpu", non_blocking=True),
    "to device": lambda t, m, s: torch.ones(3).to(simgpu.NAME),
    "to device, non_blocking": lambda t, m, s: torch.ones(3).to(simgpu.NAME, non_blocking=True),
    "already there": lambda t, m, s: t.to(simgpu.NAME),
    "copy_": lambda t, m, s: torch.empty(4).copy_(t),
    "element from the host": lambda t, m, s: t.clone().__setitem__(0, 1.0),
    "mask": lambda t, m, s: t[m],
    "unique": lambda t, m, s: torch.unique(t),
    "filled by a value from the host": lambda t, m, s: t.masked_fill(m, half),
    "nonzero": lambda t, m, s: torch.nonzero(t),
    "equal": lambda t, m, s: torch.equal(t, t),
    "arithmetic": lambda t, m, s: (t * 2 + s).sum(),
    "module": lambda t, m, s: torch.get_device_module(simgpu.NAME).synchronize(),
    "accelerator": lambda t, m, s: torch.accelerator.synchronize(),
    "event": lambda t, m, s: torch.Event(simgpu.NAME).synchronize(),
    "stream": lambda t, m, s: torch.accelerator.current_stream().synchronize(),
    "read on the host": lambda t, m, s: (x.tolist(), x[mask], float(scalar), x.cpu(), print(end=f"{x}"[:0])),
}


@pytest.mark.simgpu
@pytest.mark.parametrize("name", DEVICE)
def test_on_an_accelerator_it_finds_what_waits_and_nothing_else(name: str) -> None:
    arguments = on_device(x, mask, scalar)
    with find_syncs() as syncs:
        arguments[0] + 1
        simgpu.counts.clear()
        DEVICE[name](*arguments)
        waited = simgpu.host_waits()
    assert sum(s.count for s in syncs) == waited
    assert {(s.file, s.line) for s in syncs} <= {(__file__, DEVICE[name].__code__.co_firstlineno)}
    assert "CPU" not in str(syncs)


@pytest.mark.simgpu
def test_reads_of_the_host_before_the_device_was_met_are_dropped() -> None:
    with find_syncs() as syncs:
        torch.randperm(4).tolist()
        assert entries(syncs) == [(".tolist()", 1)]
        torch.ones(3, device=simgpu.NAME)
    assert entries(syncs) == []


@pytest.mark.simgpu
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_kernel_reads_is_found_on_an_accelerator(inference: bool) -> None:
    values, where, value = on_device(x, mask, scalar)
    with find_syncs() as syncs, torch.inference_mode(inference):
        values.masked_fill(where, value)
        values.sum().item()
        torch.normal(values, values.abs())
    assert entries(syncs) == [(".masked_fill()", 1), (".item()", 1), ("torch.normal()", 1)]


@pytest.mark.simgpu
def test_a_backward_pass_on_the_devices_thread_is_seen() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * grad.item()  # the wait

    weight = torch.ones(()).to(simgpu.NAME).requires_grad_()
    with find_syncs() as syncs:
        Reads.apply(weight).backward()
    assert [(s.op, s.count, s.line) for s in syncs] == [(".item()", 1, line_of("grad.item()  # the wait"))]


@pytest.mark.simgpu
def test_a_wait_in_torchs_own_backward_is_named_by_the_line_that_calls_it() -> None:
    values, where = on_device(x, mask)
    loss = values.requires_grad_()[where].sum()
    with find_syncs() as syncs:
        loss.backward()  # of a selection by mask
    line = line_of("loss.backward()  # of a selection")
    assert [(s.op, s.count, s.file, s.line) for s in syncs] == [("index_put()", 1, __file__, line)]


@pytest.mark.simgpu
def test_positions_on_the_host_are_copied_with_a_wait() -> None:
    values, positions = on_device(x, labels)
    with find_syncs() as syncs:
        values[positions], values[labels]
    assert entries(syncs) == [("[...]", 1)]


@pytest.mark.simgpu
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adam])
def test_a_loop_on_an_accelerator(optimizer_type: Any) -> None:
    model = nn.Linear(4, 2).to(simgpu.NAME)
    optimizer = optimizer_type(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), batch_size=4, shuffle=True)
    with find_syncs() as syncs:
        for batch, targets in loader:
            loss = F.cross_entropy(model(batch.to(simgpu.NAME, non_blocking=True)), targets.to(simgpu.NAME))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert entries(syncs) == [(".to()", 2)]


@pytest.mark.simgpu
def test_metrics_from_an_accelerator_wait_once() -> None:
    metrics = Metrics(["loss"], Reading(on_device(x.sum())))
    with find_syncs() as syncs:
        metrics["loss"], metrics.item()
    assert entries(syncs) == [("metrics[...]", 1)]


@pytest.mark.simgpu
def test_a_mean_of_numbers_from_the_host_does_not_wait() -> None:
    means = Means()
    means.add(["loss"], Reading([0.5]), 1.0)
    with find_syncs() as syncs:
        torch.ones(1, device=simgpu.NAME)
        means.sums()
    assert entries(syncs) == []


@pytest.mark.simgpu
def test_what_has_arrived_is_taken_in_without_a_wait() -> None:
    reading = Reading(on_device(x.sum()))
    with find_syncs() as syncs:
        assert reading.ready()
        assert reading.values() == [4.5]
    assert entries(syncs) == []


# --- a wrapped loop ---------------------------------------------------------------------------------------------------------

WISHES: dict[str, dict[str, Any]] = {
    "auto": {},
    "exact": {"exact": True},
    "bf16": {"precision": "bf16"},
    "clipped": {"clip_norm": 1.0, "accumulate": 2},
}


def check_step(wish: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _, step = optimize(model, optimizer, nn.CrossEntropyLoss(), scheduler=scheduler, **wish)
    batches = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(4)]
    device = next(model.parameters()).device
    batches = [(batch.to(device), target.to(device)) for batch, target in batches]
    with find_syncs() as syncs:
        for batch in batches:
            metrics = step(*batch)
        assert entries(syncs) == []
        float(metrics)
        step.mean()
    assert entries(syncs) == [("metrics[...]", 1), ("step.mean()", 1)]


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_a_step_has_none_until_somebody_looks(wish: dict[str, Any]) -> None:
    check_step(wish)


@pytest.mark.simgpu
@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_a_step_on_an_accelerator_has_none_until_somebody_looks(wish: dict[str, Any]) -> None:
    check_step(wish)


@pytest.mark.parametrize(
    ("op", "store"),
    [
        ("torch.save()", lambda thing: torch.save(thing, io.BytesIO())),
        ("pickle.dumps()", lambda thing: pickle.dumps(thing)),
        ("pickle.dump()", lambda thing: pickle.dump(thing, io.BytesIO())),
    ],
)
@pytest.mark.parametrize("thing", [torch.ones(2), {"state": [torch.ones(2)]}, nn.Linear(2, 2)], ids=["tensor", "dict", "model"])
def test_what_is_stored_is_read(op, store, thing):
    with find_syncs() as syncs:
        store(thing)
        store({"epoch": 1})
        copy.copy(torch.ones(2))
    assert [(s.op, s.count) for s in syncs] == [(op, 1)]
