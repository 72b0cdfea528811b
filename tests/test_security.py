"""What hotloop does not do: unpickle, execute, import what nobody asked for, reach for a network, write files, half-load a state."""

from __future__ import annotations

import ast
import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR, StepLR

import hotloop
from parity.twins import differences
from parity.untouched import _everything

SOURCE = Path(hotloop.__file__).parent

# Everything that Python tells an audit hook of: sockets with an address of a network, code that is unpickled, programs that are
# started, files that are opened to be written.
WATCH = """
import sys

events = []

def hook(event, arguments):
    if event.startswith("socket.") and any(isinstance(a, tuple) for a in arguments) or event in ("socket.getaddrinfo", "urllib.Request"):
        events.append(event)
    elif event in ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "ctypes.dlopen"):
        events.append(event)
    elif event == "open" and isinstance(arguments[0], str) and isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+"):
        if not arguments[0].endswith(".pyc") and not arguments[0].startswith("/dev/"):
            events.append(f"open {arguments[0]}")

import torch
import torch.utils.data
sys.addaudithook(hook)
"""

WORK = """
import hotloop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(net.parameters(), fused=False)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cpu")
model, step = hotloop.optimize(net, optimizer, nn.CrossEntropyLoss(), device="cpu", precision="fp16", scaler=scaler,
                               scheduler=scheduler, accumulate=2, clip_norm=1.0)
loader = hotloop.data_loader(data, 8)
for x, y in hotloop.prefetch(loader, model):
    dict(step(x, y))

@hotloop.fast_eval
def accuracy(model, loader):
    return sum((model(x).argmax(1) == y).sum() for x, y in loader) / len(data)

accuracy(model, loader)
step.load_state_dict(step.state_dict())
model.load_state_dict(model.state_dict())
with hotloop.find_syncs() as syncs:
    step(*data[:8])
str(step.plan), str(syncs), step.mean()
print(events)
"""


def run(code: str, *arguments: str, folder: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_training_and_evaluating_touch_neither_network_nor_files_nor_pickles(tmp_path: Path) -> None:
    assert run(WATCH + WORK, folder=tmp_path) == "[]"
    assert list(tmp_path.iterdir()) == []


def test_the_watch_sees_what_it_is_for(tmp_path: Path) -> None:
    seen = run(
        WATCH
        + """
import pickle, socket, collections
pickle.loads(pickle.dumps(collections.OrderedDict(a=1)))
try:
    socket.socket().connect(("127.0.0.1", 9))
except OSError:
    pass
open("file", "w").close()
print(events)
""",
        folder=tmp_path,
    )
    assert seen == "['pickle.find_class', 'socket.connect', 'open file']"


COMMANDS = {
    "doctor": ["doctor"],
    "compare": ["compare", "package.script:make", "--steps", "2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_imports_only_what_it_is_told_to(command: str, tmp_path: Path) -> None:
    """A folder full of modules that must not run: neighbours of the script, and names that tools look for."""
    package = tmp_path / "package"
    package.mkdir()
    for name in ("conftest", "setup", "hotloop_plugin", "plugin", "train", "batches", "make", "package/neighbour"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this was not asked for')")
    for name in ("pyproject.toml", "setup.cfg"):
        (tmp_path / name).write_text("[tool.hotloop]\nplugins = ['plugin']\n")
    (package / "__init__.py").write_text("")
    (package / "script.py").write_text(
        "import torch\nfrom torch import nn\nbatches = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]\n"
        "def make():\n    model = nn.Linear(3, 2)\n    return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()\n"
    )
    code = f"""{WATCH}
import json, runpy, pathlib, contextlib, io
sys.argv = ["hotloop", *{COMMANDS[command]!r}]
sys.path.insert(0, "")
before = set(sys.modules)
with contextlib.redirect_stdout(io.StringIO()) as out:
    try:
        runpy.run_module("hotloop", run_name="__main__")
    except SystemExit as exit:
        assert not exit.code, exit.code
assert out.getvalue()
here = str(pathlib.Path.cwd())
mine = [n for n, m in sys.modules.items() if (getattr(m, "__file__", None) or "").startswith((here, "package"))]
print(json.dumps([sorted(mine), events]))
"""
    imported, events = json.loads(run(code, folder=tmp_path))
    assert imported == (["package", "package.script"] if command == "compare" else [])
    assert [event for event in events if event.startswith(("socket", "pickle", "urllib", "open"))] == []


FORBIDDEN_MODULES = {
    "socket",
    "ssl",
    "http",
    "urllib",
    "requests",
    "ftplib",
    "smtplib",
    "marshal",
    "shelve",
    "subprocess",
    "ctypes",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {"load", "loads", "Unpickler", "system", "popen"}
ALLOWED = {"_processes": {"socket"}}  # for the name of this host in a message


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_file_has_the_means_to(path: Path) -> None:
    """To unpickle, execute text, start programs or speak to a network."""
    tree = ast.parse(path.read_text())
    imported = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & FORBIDDEN_MODULES <= ALLOWED.get(path.stem, set())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called & FORBIDDEN_CALLS == set()
    assert {name for name in called if name.rpartition(".")[2] in FORBIDDEN_METHODS} <= {"_state.load"}


# --- states -------------------------------------------------------------------------------------------------------------


def made(seed: int = 1, steps: int = 5) -> Any:
    """A step in the middle of a window, which holds something of everything."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedulers = [
        StepLR(optimizer, 1, 0.9),
        MultiStepLR(optimizer, [2, 4]),
        SequentialLR(optimizer, [LinearLR(optimizer, 0.1), StepLR(optimizer, 2)], [2]),
    ]
    options: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu", init_scale=64.0), "precision": "fp16", "accumulate": 3}
    step = hotloop.optimize(model, optimizer, nn.MSELoss(), device="cpu", scheduler=schedulers, **options).step
    for i in range(steps):
        step(torch.randn(3, 4), torch.randn(3, 2), weight=1 + i)
    return step


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a nested state."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return found + [p for key, item in items for p in paths(item, (*path, key))]


STRANGE = [
    None, True, -1, 0, 1, 2, 7, 10**30, 10**400, -(2**40), 0.0, 0.5, -0.5, 1e300, math.nan, math.inf, -math.inf, 1j, "", "text", b"bytes",
    [], [1.0], [1.0, 2.0], [math.nan, 1.0], [1, -1], (), (1, 2), {}, {"a": 1}, {1: 2}, set(), object(), len,
    torch.ones(()), torch.ones(2, 4), torch.ones(2), torch.full((2, 4), math.nan), torch.ones(2, 4).double(), torch.ones(2, 4).long(),
    torch.ones(2, 4, dtype=torch.complex64), torch.ones(2, 4, device="meta"), torch.ones(0), torch.ones(2, 4).to_sparse(),
]  # fmt: skip


@st.composite
def changes(draw: Any) -> Any:
    return (
        draw(st.integers(0, 10**6)),
        draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"])),
        draw(st.integers(0, len(STRANGE) - 1)),
    )


def apply(state: Any, number: int, how: str, strange: int) -> None:
    everywhere = paths(state)
    *way, last = everywhere[number % len(everywhere)]
    for key in way:
        state = state[key]
    if how == "remove":
        del state[last]
    elif how == "replace":
        state[last] = copy.deepcopy(STRANGE[strange])
    elif isinstance(state, dict):
        state[str(strange)] = copy.deepcopy(STRANGE[strange])
    else:
        state.append(copy.deepcopy(STRANGE[strange]))


STEP, STATE = made(), made(seed=2, steps=11).state_dict()
AT_REST = STEP.state_dict()


@settings(max_examples=400, deadline=None)
@given(st.lists(changes(), min_size=1, max_size=2))
def test_a_state_that_was_tampered_with_is_loaded_whole_or_not_at_all(changed: Any) -> None:
    """Missing and extra items, other types, shapes and devices, numbers that are none: refused, with everything as it was, or
    taken over entirely, and then training goes on."""
    STEP.load_state_dict(AT_REST)
    state = copy.deepcopy(STATE)
    for change in changed:
        apply(state, *change)
    before, refusal = _everything(STEP), ""
    try:
        STEP.load_state_dict(state)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:  # a scheduler has words of its own
        refusal = str(error) if type(error) is ValueError else "nothing has been loaded"
    if refusal:
        assert "nothing has been loaded" in refusal
        assert differences(before, _everything(STEP)) == []
        return
    now = STEP.state_dict()
    assert now["window"]["count"] == state["window"]["count"]
    assert {**now, "schedulers": 0, "mean": 0}.items() >= {k: state[k] for k in ("updates", "skipped", "running_skips")}.items()
    assert now["scaler"] == state["scaler"]
    assert differences(now["window"]["gradients"], state["window"]["gradients"]) == []
    if state["schedulers"] != STATE["schedulers"]:  # what a number means in there is the scheduler's own affair
        return
    for _ in range(3):
        metrics = STEP(torch.ones(3, 4), torch.ones(3, 2))
        assert math.isfinite(metrics["loss"])
    STEP.mean()


def test_nothing_of_a_state_is_shared_with_the_step() -> None:
    step, state = made(), made(seed=2).state_dict()
    kept = copy.deepcopy(state)
    step.load_state_dict(state)
    for _ in range(5):
        step(torch.randn(3, 4), torch.randn(3, 2))
    assert differences(state, kept) == []


BAD_NUMBERS = {
    "a scale that is no number": (["scaler", "scale"], math.nan, "scale of its scaler is nan"),
    "a scale of zero": (["scaler", "scale"], 0.0, "scale of its scaler"),
    "a scale beyond float32": (["scaler", "scale"], 10**400, "scale of its scaler"),
    "a complex scale": (["scaler", "scale"], 1j, "scale of its scaler"),
    "a factor below one": (["scaler", "growth_factor"], 0.5, "growth_factor"),
    "a tracker beyond its type": (["scaler", "_growth_tracker"], 2**31, "_growth_tracker"),
    "updates that are no number": (["updates"], math.nan, "updates in its state is of another type"),
    "skips running below zero": (["running_skips"], -1, "counters are out of range"),
    "a weight that is no number": (["window", "weight"], math.nan, "weights of its window"),
    "a reference of zero": (["window", "reference"], 0.0, "weights of its window"),
    "an epoch that is no number": (["schedulers", 0, "last_epoch"], math.nan, "last_epoch of its StepLR is of another kind"),
    "text for a rate": (["schedulers", 1, "_last_lr"], ["high"], "_last_lr of its MultiStepLR"),
    "an inner schedule": (["schedulers", 2, "_schedulers", 0, "last_epoch"], "late", "_schedulers of its SequentialLR"),
    "a gradient of another dtype": (["window", "gradients", "0.weight"], torch.ones(2, 4).double(), "torch.float64"),
    "a gradient without memory": (["window", "gradients", "0.weight"], torch.ones(2, 4, device="meta"), "on meta"),
    "a negative weight of a mean": (["mean", "loss"], [1.0, -1.0], "mean of 'loss'"),
    "an empty window with gradients": (["window", "count"], 0, "in a window that is not open"),
}


@pytest.mark.parametrize(("path", "value", "text"), BAD_NUMBERS.values(), ids=BAD_NUMBERS)
def test_numbers_that_no_step_gives_are_refused(path: list[Any], value: Any, text: str) -> None:
    state = made(seed=2).state_dict()
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    step = made()
    before = _everything(step)
    with pytest.raises(ValueError, match=text):
        step.load_state_dict(state)
    assert differences(before, _everything(step)) == []


@pytest.mark.parametrize("place", [0, 1])
def test_a_sum_that_no_float_can_hold_is_refused(place):
    state = copy.deepcopy(AT_REST)
    state["mean"]["loss"] = [1.0, 1.0]
    state["mean"]["loss"][place] = 10**400
    with pytest.raises(ValueError, match=r"its mean of 'loss' is not \[sum, weight\]"):
        STEP.load_state_dict(state)
