"""How processes find each other, start, end, and die: real ones, each with a time limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from distributed import pair
from hotloop import optimize

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from hotloop import optimize
torch.manual_seed(0)
net = nn.Linear(4, 2)
model, step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), device="cpu")
for i in range(5):
    step(torch.randn(8, 4), torch.randint(2, (8,)))
    {body}
size = dist.is_initialized() and dist.get_world_size()
line = " ".join(map(str, (step.plan["ddp"].choice, size, round(step.mean()["loss"], 6))))
sys.stdout.write(line + chr(10))  # in one piece: lines of two ranks would run into each other
"""


def place(**given):
    """The environment of this process, with only these of torchrun's variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(given)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


def wrap(**wishes):
    net = nn.Linear(4, 2)
    return optimize(net, SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu", **wishes)


FULL = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


@pytest.mark.parametrize("missing", FULL)
def test_half_an_environment_raises_and_names_what_is_missing(missing):
    place(**{name: value for name, value in FULL.items() if name != missing})
    with pytest.raises(ValueError, match=rf"half set.*no {missing}.*torchrun"):
        wrap()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"), ({"RANK": "x"}, "RANK=x"), ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1")],
)
def test_numbers_that_are_no_ranks_raise(wrong, match):
    place(**FULL, **{k: v for k, v in wrong.items() if k not in FULL})
    os.environ.update(wrong)
    with pytest.raises(ValueError, match=match):
        wrap()


@pytest.mark.parametrize(
    "given",
    [{}, {"MASTER_ADDR": "localhost"}, {"WORLD_SIZE": "1"}, {**FULL, "WORLD_SIZE": "1"}],
    ids=["none", "address", "one", "all"],
)
def test_one_process_trains_alone(given):
    place(**given)
    _, step = wrap()
    assert step.plan["ddp"].choice == "off"
    assert not dist.is_initialized()
    step(torch.randn(8, 4), torch.randint(2, (8,)))
    step.flush()


def test_without_wish_nothing_is_looked_at():
    place(RANK="0")
    _, step = wrap(distributed=False)
    assert step.plan["ddp"].choice == "off"


def test_asked_for_without_processes():
    place()
    with pytest.raises(ValueError, match=r"distributed=True\).*torchrun --nproc-per-node"):
        wrap(distributed=True)


@pytest.mark.parametrize("wish", ["yes", 2, "ddp"])
def test_other_wishes_raise(wish):
    place()
    with pytest.raises(TypeError, match=r"distributed=.*True, False or 'auto'"):
        wrap(distributed=wish)


def test_tuning_is_for_one_process():
    place(**FULL)
    with pytest.raises(ValueError, match=r"tune=True\).*ranks would choose differently.*one process"):
        wrap(tune=True)
    assert not dist.is_initialized()


def test_without_an_optimizer_the_wish_raises():
    place()
    with pytest.raises(TypeError, match="distributed concerns training"):
        optimize(nn.Linear(4, 2), distributed=True)


def test_one_process_can_be_a_group():
    """P1 to P4 with a world of one: asked for, it is under DDP; the group is closed by its user."""
    place(**{**FULL, "WORLD_SIZE": "1", "MASTER_PORT": pair.free_port()})
    dist.init_process_group("gloo")
    try:
        _, alone = wrap()
        assert alone.plan["ddp"].choice == "off"
        _, step = wrap(distributed=True)
        assert step.plan["ddp"].choice == "on"
        step(torch.randn(8, 4), torch.randint(2, (8,)))
        assert step.updates == 1
        assert not step.flush()
        assert step.mean().keys() == {"loss"}
    finally:
        dist.destroy_process_group()


def on_two_ranks(*script):
    """What torchrun makes of a script."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", pair.free_port()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launch, *script], capture_output=True, text=True, timeout=90, env=environment)


@pytest.mark.parametrize("own_group", ["", "torch.distributed.init_process_group('gloo')"])
def test_nothing_of_torchs_communication_is_left_to_the_end_of_the_interpreter(own_group):
    """Its threads would abort the process now and then."""
    script = f"""
import atexit, gc, torch
from torch.nn.parallel import DistributedDataParallel
atexit.register(lambda: print(any(isinstance(o, DistributedDataParallel) for o in gc.get_objects())))
from hotloop import optimize
{own_group}
net = torch.nn.Linear(4, 2)
model, step = optimize(net, torch.optim.SGD(net.parameters(), lr=0.1), device="cpu", distributed=True)
step(model(torch.ones(3, 4)).sum())
print(any(isinstance(o, DistributedDataParallel) for o in gc.get_objects()))
"""
    place(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=pair.free_port())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "False"]), done.stderr


def test_the_same_script_alone_and_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{body}", ""))
    place()
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert alone.stdout.startswith("off False"), alone.stderr
    both = on_two_ranks(str(script))
    assert both.returncode == 0, both.stderr
    # Each rank has the mean over both (their lines may run into each other), and the group is closed without a complaint.
    assert both.stdout.count(f"on 2 {alone.stdout.split()[-1]}") == both.stdout.count("on") == 2
    assert "destroy_process_group" not in both.stderr


def test_the_example_under_torchrun():
    """EMA, a schedule per update, `step.mean()`, the whole test set on each rank: the same on both, to the last digit shown."""
    script = str(pair.HERE.parent.parent / "examples" / "distributed_classifier.py")
    place()
    done = on_two_ranks(script, "--epochs", "5", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    lines = [part for line in done.stdout.splitlines() for part in re.split(r"(?=epoch|accuracy of the average)", line) if part]
    ends = [line for line in lines if line.startswith("accuracy of the average")]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    found = dict(pair_.rsplit(" ", 1) for pair_ in ends[0].split(", ") if pair_[-1].isdigit())
    assert found["updates"] == "110"
    assert float(found["accuracy"]) > 0.9
    assert len([line for line in lines if line.startswith("epoch 5: loss")]) == 2
    assert len({line for line in lines if line.startswith("epoch 5: loss")}) == 1


@pytest.mark.parametrize(("dies", "how"), [(0, "raise RuntimeError('out of luck')"), (1, "import os; os._exit(7)")])
def test_a_rank_that_dies_is_named_by_the_other(dies, how, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{body}", f"if dist.get_rank() == {dies} and i == 2: {how}"))
    started = time.monotonic()
    ended = pair.outputs(pair.start([[sys.executable, str(script)]] * 2), 60)
    status, output = ended[1 - dies]
    assert status == 1
    assert f"hotloop: rank {dies} does not answer" in output
    assert time.monotonic() - started < 50


def test_several_steps_at_a_ragged_end_are_noticed(tmp_path):
    """A rank that waits in the flush of one answers updates of the other, where their sizes do not tell them apart."""
    script = tmp_path / "train.py"
    script.write_text("""
import os, torch
from hotloop import optimize
nets = [torch.nn.Linear(4, 2) for _ in range(2)]
steps = [optimize(n, torch.optim.SGD(n.parameters(), lr=0.1), torch.nn.MSELoss(), device="cpu").step for n in nets]
for _ in range(4 + 2 * int(os.environ["RANK"])):
    for step in steps:
        step(torch.randn(6, 4), torch.randn(6, 2))
for step in steps:
    step.flush()
""")
    (first, output), (second, _) = pair.outputs(pair.start([[sys.executable, str(script)]] * 2), 60)
    assert "a loop with several steps needs as many batches on every rank" in output
    assert 0 not in (first, second)
