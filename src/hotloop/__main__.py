"""The command line: `python -m hotloop doctor` and `python -m hotloop compare module:make`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotloop
from hotloop._compare import compare
from hotloop._facts import machine
from hotloop._optimize import optimize
from hotloop._plan import Plan
from hotloop._processes import world_around


class _UserError(Exception):
    """What the user can mend; its text is all that is shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for something to mend, 2 for a command line that is not understood."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except _UserError as mistake:
        print(f"hotloop: {mistake}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hotloop", description="What hotloop does on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="show the machine, and what optimize would choose on it and why")
    doctor.add_argument("--json", action="store_true", help="print JSON in place of text")
    doctor.set_defaults(run=_doctor)
    comparison = commands.add_parser("compare", help="time your model in the plain loop and in the wrapped one")
    comparison.add_argument("make", metavar="MODULE:MAKE", help="a function that returns (model, optimizer, loss_fn)")
    comparison.add_argument(
        "--batches", default="batches", metavar="NAME", help="where the module keeps its batches, or a function for them"
    )
    comparison.add_argument("--steps", type=int, default=100, metavar="N", help="steps to time (default: 100)")
    comparison.add_argument("--exact", action="store_true", help="make only choices that keep every bit")
    comparison.add_argument("--json", metavar="FILE", help="write the report as JSON")
    comparison.add_argument("--plot", metavar="FILE", help="draw times and losses")
    comparison.set_defaults(run=_compare)
    return parser


def _compare(options: argparse.Namespace) -> None:
    ours = sys.argv
    try:
        make, batches = _load(options.make, options.batches)
        report = compare(make, batches, steps=options.steps, exact=options.exact)
    except (TypeError, ValueError) as error:
        if not str(error).startswith(("compare(", "optimize(", "step(")):
            raise  # from the user's own code: its traceback tells more
        raise _UserError(error) from error
    except SystemExit as ended:
        raise _UserError(
            f"compare {options.make}: the code that it calls ended the process (exit code {ended.code}); "
            f"{options.make.partition(':')[2]}() builds and returns, and the rest of a script belongs under "
            '`if __name__ == "__main__":`'
        ) from ended
    finally:
        sys.argv = ours
    print(report)
    try:
        if options.json:
            Path(options.json).write_text(json.dumps(report.as_dict(), indent=2) + "\n")
        if options.plot:
            report.plot(options.plot)
    except (OSError, ImportError, ValueError) as error:  # the last for a suffix that matplotlib does not draw
        raise _UserError(f"the report was not written: {error}") from error


def _load(path: str, batches_name: str) -> tuple[Any, Any]:
    """What `module:make` names, and the batches beside it."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise _UserError(f"compare {path}: write module:make, for example `python -m hotloop compare train:make`")
    plain = module_name.removesuffix(".py").replace("\\", "/").strip("./").replace("/", ".")
    if module_name != plain:
        raise _UserError(
            f"compare {path}: {module_name} is a file, and a module is asked for; write {plain}:{name}, in the folder that holds it"
        )
    try:
        sys.argv = [module_name]  # a script that looks for its arguments has none; nor has a package around it
        spec = importlib.util.find_spec(module_name)
        sys.argv = [spec.origin if spec and spec.origin else module_name]
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise _UserError(
            f"compare {path}: cannot import {module_name} ({error}); run it in the folder that holds {module_name}.py"
        ) from error
    except SystemExit as ended:
        raise _UserError(
            f"compare {path}: importing {module_name} ended the process (exit code {ended.code}); put what it does as a script, "
            'such as reading the command line, under `if __name__ == "__main__":`'
        ) from ended
    make, batches = getattr(module, name, None), getattr(module, batches_name, None)
    if not callable(make):
        raise _UserError(
            f"compare {path}: {module_name} has no function {name!r}; write `def {name}(): return model, optimizer, loss_fn`"
        )
    if batches is None:
        raise _UserError(
            f"compare {path}: {module_name} has no {batches_name!r}; write `{batches_name} = DataLoader(...)`, a list of "
            "batches or a function that returns one, or name it with --batches"
        )
    return make, batches


def _doctor(options: argparse.Namespace) -> None:
    facts, plan = {"versions": _versions(), "machine": _machine()}, _sample_plan()
    if options.json:
        print(json.dumps({**facts, "plan": plan.as_dict()}, indent=2))
        return
    for title, rows in facts.items():
        print("\n".join([title, *(f"  {name:<16}  {value}" for name, value in rows.items()), ""]))
    print(f"what optimize chooses for a convolutional network\n{plan}")


def _versions() -> dict[str, str]:
    cudnn: Any = torch.backends.cudnn
    return {
        "hotloop": hotloop.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "wrapt": version("wrapt"),
        "cuda": str(torch.version.cuda or "none"),
        "cudnn": str(cudnn.version() if cudnn.is_available() else "none"),
    }


def _machine() -> dict[str, Any]:
    facts = {name: str(value) if isinstance(value, torch.device) else value for name, value in asdict(machine()).items()}
    own = {"system": platform.platform(), "processor": platform.machine(), "threads": torch.get_num_threads()}
    return {**own, "processes": _processes(), **facts}


def _processes() -> str:
    try:
        world = world_around()
    except ValueError as error:
        return str(error)
    if world is None:
        return "1"
    return f"{world.size}, by the environment, and this is rank {world.rank}: optimize joins them, which the doctor does not"


def _sample_plan() -> Plan:
    blocks = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.ReLU()]
    network = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    # To join other processes is to wait for them.
    return optimize(network, optimizer, nn.CrossEntropyLoss(), distributed="auto" if _processes() == "1" else False).step.plan


if __name__ == "__main__":
    sys.exit(main())
