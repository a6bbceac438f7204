"""The map in docs/architecture.md is true: no import goes up, none in a circle, and private names stay in one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "sanc"
FLOORS = [  # a room imports only from rooms above it in this list, and from itself
    {"errors", "_version"},
    {"theory"},
    {"core"},
    {"minibatch", "autograd", "functions", "sums"},
    {"graphs", "problems", "ranks"},
    {"presets"},
    {"optim", "minimisation"},
    {"__init__", "sklearn"},
    {"lab"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules():
    return sorted(SOURCE.rglob("*.py"))


def name_of(path):
    return path.relative_to(SOURCE).with_suffix("")


def imports(path):
    """Modules of the package that a file imports, also within functions and for the type checker alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    files = {".".join(("sanc", *name_of(p).parts)).removesuffix(".__init__"): p for p in modules()}
    return {files[name] for name in found if name in files}


def room(path):
    return name_of(path).parts[0]


def test_every_file_is_in_a_room():
    assert {room(path) for path in modules()} == set(FLOOR)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(name_of(path)))
def test_no_import_goes_up(path):
    for target in imports(path):
        if room(target) == "__init__" and room(path) == "lab":
            continue  # the laboratory uses the public names
        assert room(target) == room(path) or FLOOR[room(target)] < FLOOR[room(path)], f"{path} imports {target}"


def test_the_laboratory_uses_public_names_only():
    allowed = {"__init__", "_version", "errors", "problems", "theory", "lab"}
    for path in SOURCE.glob("lab/*.py"):
        assert {room(target) for target in imports(path)} <= allowed, path


def test_only_the_driver_of_the_optimisers_imports_the_graphs():
    assert {room(p) for p in modules() for target in imports(p) if room(target) == "graphs"} <= {"graphs", "optim"}


def test_there_is_no_circle():
    graph = {path: imports(path) - {path} for path in modules() if room(path) != "__init__"}
    done = []
    while graph:
        free = [path for path, targets in graph.items() if not targets & graph.keys()]
        assert free, f"these import each other: {sorted(map(str, graph))}"
        done += free
        graph = {path: targets for path, targets in graph.items() if path not in free}


def test_private_names_of_torch_are_used_in_one_place():
    used = r"\b(?:torch(?:\.\w+)*|np|numpy|scipy(?:\.\w+)*)\._(?!_)\w+"
    private = re.compile(used + r"|from (?:torch|numpy|scipy)[\w.]*\._(?!_)\w+")
    for path in modules():
        if name_of(path).parts[-1] != "internals":
            assert not private.search(path.read_text()), path


def test_sigma_has_one_writer():
    """Who assigns to `sigma` of something but the judge only copies it into a state or a record."""
    for path in modules():
        if name_of(path).parts[-1] == "judge":
            continue
        for line in path.read_text().splitlines():
            if re.search(r"\bjudge\.sigma(, [\w.]+)* = ", line):
                raise AssertionError(f"{path}: {line}")
