"""The architecture, held by tests: each layer imports only lower ones, and files stay short."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import hotloop

SOURCE = Path(hotloop.__file__).parent
MOST_LINES = 250

# From the bottom. A module imports only modules of lower layers; a transform never imports another one.
LAYERS = [
    # plain data, and tools that know nothing of the rest
    "_device _tensors _random_states",
    "_processes",
    "_tree _exchange _median _backward _dynamo _reading _modes _window _scaling _state_check _forms",
    "_arguments _losses _hints _map_watch _contents _decorated _detours _folded_weights _pairs _found_models _shares _write_back",
    # the parts; how an optimizer is handled
    "_parts _given _rebind",
    "_stepping",
    # one duty each, over the parts and the tools
    "_plan _traces _metrics _means _call _ledger _update _transfer _deferred _waits _item_cost _benchmark_flag _optimizer_traits",
    # the wrapped model, and what decisions, steps, loaders and reports are made of
    "_facts _proxy _recovery _state _batch_loss _in_memory _folding _agreement _watch _workers _worker_safety _comparison",
    # the decisions; the loaders
    "transforms.* _validate _progress _loading _data_loader _syncs",
    "transforms _step _loops _model_calls",
    "_build _distributed_step _reduction _evaluation _tune _optimized",
    "_optimize _runners",
    "_compare _evaluate",
    "__init__",
    "__main__",
]
RUNTIME = {"torch", "wrapt", "typing_extensions"}
ON_DEMAND = {"matplotlib", "tqdm"}


def modules() -> dict[str, Path]:
    names = {path: path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".") for path in SOURCE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


MODULES = modules()


def layer(name: str) -> int | None:
    places = [i for i, names in enumerate(LAYERS) if name in names.split()]
    if name.startswith("transforms."):
        places = [i for i, names in enumerate(LAYERS) if "transforms.*" in names.split()]
    return places[0] if len(places) == 1 else None


def imports(path: Path) -> list[str]:
    """The modules of hotloop that a file imports, at its top or inside a function, without the package's name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hotloop":
            inner = (node.module or "").partition(".")[2]
            candidates = [f"{inner}.{alias.name}".strip(".") for alias in node.names]
            found += [name if name in MODULES else inner or "__init__" for name in candidates]
        elif isinstance(node, ast.Import):
            found += [a.name.partition(".")[2] or "__init__" for a in node.names if a.name.split(".")[0] == "hotloop"]
    return found


@pytest.mark.parametrize("name", MODULES)
def test_every_file_has_one_layer_and_imports_only_lower_ones(name: str) -> None:
    own = layer(name)
    assert own is not None, f"{name} belongs in exactly one row of LAYERS"
    wrong = [other for other in imports(MODULES[name]) if (place := layer(other)) is None or place >= own]
    assert wrong == []


def test_every_row_of_the_table_exists() -> None:
    named = {name for names in LAYERS for name in names.split()} - {"transforms.*"}
    assert named - MODULES.keys() == set()


@pytest.mark.parametrize("name", MODULES)
def test_files_are_short(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", MODULES)
def test_imports_are_absolute_and_only_of_what_is_declared(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text())
    assert [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level] == []
    foreign = {top for top in _top_level_imports(tree.body) if not _standard(top)}
    assert foreign - RUNTIME - {"hotloop"} == set()
    anywhere = {top for top in _top_level_imports(list(ast.walk(tree))) if not _standard(top)}
    assert anywhere - RUNTIME - ON_DEMAND - {"hotloop"} == set()


def _top_level_imports(nodes: list[ast.AST] | list[ast.stmt]) -> set[str]:
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def _standard(name: str) -> bool:
    return name in sys.stdlib_module_names


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("transforms.")])
def test_transforms_meet_only_in_the_parts(name: str) -> None:
    reached, waiting = set(), [name]
    while waiting:
        for other in imports(MODULES[waiting.pop()]):
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    assert [other for other in reached if other.startswith("transforms")] == []
    assert reached & {"_proxy", "_step"} == set()


@pytest.mark.parametrize("name", MODULES)
def test_files_are_for_python_3_10_and_postpone_annotations(name: str) -> None:
    text = MODULES[name].read_text()
    ast.parse(text, feature_version=(3, 10))
    assert "from __future__ import annotations" in text or "def " not in text
