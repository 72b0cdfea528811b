"""Importing hotloop changes nothing and costs little; it needs torch and wrapt alone."""

from __future__ import annotations

import subprocess
import sys

import pytest


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STATE = """
import os, signal, sys, threading, warnings
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.data import DataLoader

def state():
    cudnn = torch.backends.cudnn
    flags = [cudnn.benchmark, cudnn.deterministic, cudnn.enabled, cudnn.allow_tf32, torch.backends.mkldnn.enabled]
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
             torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized(), torch.cuda.is_initialized()]
    values = [torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision(),
              torch.initial_seed(), torch.get_rng_state().tolist()]
    owners = (torch, torch.Tensor, nn.Module, torch.optim.Optimizer, DataLoader)
    patched = [{name: id(value) for name, value in vars(owner).items()} for owner in owners]
    global_hooks = [len(v) for n, v in vars(hooks).items() if n.startswith("_global_") and hasattr(v, "__len__")]
    process = [threading.active_count(), list(warnings.filters), signal.getsignal(signal.SIGINT), dict(os.environ),
               sys.excepthook, sys.getprofile(), sys.gettrace(), list(sys.path), list(sys.meta_path)]
    return flags, modes, values, patched, global_hooks, process
"""


def test_importing_changes_no_state() -> None:
    code = f"{STATE}\nbefore = state()\nimport hotloop\nassert state() == before\nprint('same')"
    assert in_a_fresh_process(code) == "same"


@pytest.mark.parametrize("change", ["torch.backends.cudnn.benchmark = True", "nn.Module.x = 1", "torch.rand(1)"])
def test_the_state_that_is_compared_shows_a_change(change: str) -> None:
    assert in_a_fresh_process(f"{STATE}\nbefore = state()\n{change}\nprint(state() == before)") == "False"


def test_importing_needs_only_torch_wrapt_and_the_standard_library() -> None:
    code = """
import sys, torch, wrapt, typing_extensions
before = set(sys.modules)
import hotloop
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"hotloop", "torch", "wrapt"}))
"""
    assert in_a_fresh_process(code) == "[]"


def test_importing_compiles_and_loads_no_heavy_part_of_torch() -> None:
    """What makes an import slow is what it loads, which is asserted in place of a time."""
    code = """
import sys, torch
before = set(sys.modules)
import hotloop
heavy = ("torch._dynamo", "torch._inductor", "torch.fx.experimental", "torch.distributed.tensor", "torch.export", "sympy")
print([name for name in set(sys.modules) - before if name.startswith(heavy)])
"""
    assert in_a_fresh_process(code) == "[]"


def test_it_imports_where_the_optional_packages_are_missing() -> None:
    code = """
import sys
for name in ("tqdm", "matplotlib", "sklearn", "numpy"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")
import hotloop
print(hotloop.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(".") == 2
