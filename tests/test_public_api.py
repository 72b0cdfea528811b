"""What users may rely on: the names, the signatures, and docstrings whose examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from importlib.metadata import metadata, requires
from typing import Any

import pytest
import torch
from torch import nn

import hotloop

NAMES = {"optimize", "fast_eval", "prefetch", "data_loader", "compare", "find_syncs", "Metrics", "Plan"}

SIGNATURES = {
    "optimize": "(model, optimizer=None, loss_fn=None, *, device='auto', precision='auto', channels_last='auto', fused='auto', "
    "cudnn_benchmark='auto', "
    "compile=False, distributed='auto', inference='no_grad', accumulate=1, clip_norm=None, scheduler=None, scaler=None, "
    "before_update=None, methods=(), metrics=None, keep_output=False, exact=False, tune=False, **unknown)",
    "fast_eval": "(function=None, /, *others, model=None, precision='auto', inference='no_grad', fold_batchnorm='auto', reduce=None)",
    "prefetch": "(loader, device='auto', *, depth=2)",
    "data_loader": "(dataset, batch_size=1, **dataloader_arguments)",
    "compare": "(make, batches, *, steps=100, **wishes)",
    "find_syncs": "()",
}


def test_the_public_names() -> None:
    assert set(hotloop.__all__) == NAMES
    assert all(hasattr(hotloop, name) for name in NAMES)


def test_everything_else_is_private() -> None:
    modules = {name for name, value in vars(hotloop).items() if inspect.ismodule(value)}
    public = {name for name in vars(hotloop) if not name.startswith("_")}
    assert public - modules == NAMES
    assert {name for name in modules if not name.startswith("_")} <= {"transforms"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(getattr(hotloop, name)).parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_documented_and_annotated(name: str) -> None:
    thing = getattr(hotloop, name)
    assert len(inspect.getdoc(thing) or "") > 60
    functions = (
        [thing] if inspect.isfunction(thing) else [f for n, f in vars(thing).items() if inspect.isfunction(f) and n[0] != "_"]
    )
    for function in functions:
        assert function.__doc__, function
        assert "return" in function.__annotations__, function


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_shows_an_example(name: str) -> None:
    """An example that a reader can type: it runs below, and takes nothing private."""
    lines = [
        line
        for line in (inspect.getdoc(getattr(hotloop, name)) or "").splitlines()
        if line.strip().startswith((">>> ", "... "))
    ]
    assert lines
    assert not [line for line in lines if re.search(r"hotloop\._|\bReading\b", line)]


def examples() -> list[Any]:
    """Every docstring of the package that holds an example."""
    paths = [info.name for info in pkgutil.walk_packages(hotloop.__path__, "hotloop.") if not info.name.endswith("__main__")]
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for path in paths for test in finder.find(importlib.import_module(path)) if test.examples]
    return [pytest.param(test, id=test.name) for test in found]


@pytest.mark.parametrize("example", examples())
def test_examples_in_docstrings_run(example: doctest.DocTest) -> None:
    example.globs.update(torch=torch, nn=nn)  # known to every reader
    said: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert tried > 0
    assert failed == 0, "".join(said)


def test_what_is_installed_with_it() -> None:
    needed = {line.split(";")[0].split(">")[0].strip() for line in requires("hotloop") or [] if "extra ==" not in line}
    assert needed == {"torch", "wrapt", "typing-extensions"}
    assert metadata("hotloop")["Requires-Python"] == ">=3.10"
    assert metadata("hotloop")["Version"] == hotloop.__version__
