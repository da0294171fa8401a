"""The rooms of the package: a file imports from its own row or one below, without circles of files or folders."""

import ast
import functools
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "mhacli"
ROWS = (
    ("cli", "viewer", "__main__"),
    ("compute", "render"),
    ("adapters",),
    ("attention",),
    ("requests",),
    ("results",),
    ("checkpoints", "text"),
    ("spec",),
    ("io",),
    ("errors",),
)
APART = ({"compute", "render"},)
WITH_TORCH = {"compute", "adapters", "attention"}
WITH_SCREEN = {"cli", "viewer", "render", "__main__"}
SCREEN_LIBRARIES = {"rich", "typer", "textual"}
OF_DATA = {"requests", "results", "checkpoints", "text", "spec"}
MAX_ENTRIES, MAX_LINES, MAX_FUNCTION = 12, 600, 50


class Import(NamedTuple):
    """The module or name that is imported, and where."""

    name: str
    place: str


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    return {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def parsed(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a file."""
    return tuple(ast.walk(ast.parse(source)))


def imports_of(source: str, module: str, modules: set[str]) -> Iterator[Import]:
    """Every import: under TYPE_CHECKING, in the bodies of functions, and in strings that name a module of the package."""
    for node in parsed(source):
        place = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, place) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            for alias in node.names:
                yield Import(f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in modules else origin, place)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules - {"mhacli"}:
            yield Import(node.value, place)


def room_of(module: str) -> str:
    """The entry at the root of the package in which a module lies: `mhacli.text.encode` lies in `text`."""
    return [*module.split("."), "__init__"][1]


def faults_of(code: dict[str, str], modules: set[str]) -> list[str]:
    """Every import that goes upwards, across, or out to a library that its room may not use."""
    rank = {room: number for number, row in enumerate(ROWS) for room in row}
    faults = []
    for module, source in code.items():
        room = room_of(module)
        if room == "__init__":
            continue  # the public names, imported when they are used
        for imported, place in imports_of(source, module, modules):
            library, other = imported.split(".")[0], room_of(imported)
            if library == "torch" and room not in WITH_TORCH:
                faults.append(f"{place}: {room} imports torch")
            if library in SCREEN_LIBRARIES and room not in WITH_SCREEN:
                faults.append(f"{place}: {room} imports {library}")
            if library == "mhacli" and other != "__init__":
                if rank[other] < rank[room]:
                    faults.append(f"{place}: {room} imports {other}, which lies above it")
                if {room, other} in APART:
                    faults.append(f"{place}: {room} imports {other}")
                elif room == "render" and other in WITH_TORCH:
                    faults.append(f"{place}: {room} imports {other}, which needs torch")
    return faults


def circles(code: dict[str, str]) -> list[str]:
    """In each folder, the entries that import each other in a circle; a folder counts with all that lies in it."""
    modules = set(code)
    arrows: dict[str, dict[str, dict[str, str]]] = {}
    for module, source in code.items():
        for imported, place in imports_of(source, module, modules):
            if imported not in modules or "mhacli" in (module, imported):
                continue
            here, there = module.split("."), imported.split(".")
            common = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            if common is not None:
                entries = arrows.setdefault(".".join(here[:common]), {})
                entries.setdefault(here[common], {}).setdefault(there[common], place)
    return [circle for folder, entries in arrows.items() for circle in _circles_within(folder, entries)]


def _circles_within(folder: str, arrows: dict[str, dict[str, str]]) -> Iterator[str]:
    done: set[str] = set()

    def visit(entry: str, path: tuple[str, ...]) -> Iterator[str]:
        if entry in path:
            around = (*path[path.index(entry) :], entry)
            steps = pairwise(around)
            yield f"{folder}: " + ", ".join(f"{a} imports {b} ({arrows[a][b]})" for a, b in steps)
        elif entry not in done:
            for other in arrows.get(entry, {}):
                yield from visit(other, (*path, entry))
            done.add(entry)

    for entry in arrows:
        yield from visit(entry, ())


def crowded(folders: dict[str, list[str]]) -> list[str]:
    """The folders with too many entries; `__init__.py` is none."""
    return [
        f"{folder} has {len(entries)} entries"
        for folder, entries in folders.items()
        if len(entries) > MAX_ENTRIES and folder != "cli/commands"
    ]


def lengthy(code: dict[str, str]) -> list[str]:
    """The files and functions that are too long, docstrings of functions aside."""
    faults = []
    for module, source in code.items():
        if (lines := source.count("\n")) > MAX_LINES:
            faults.append(f"{module} has {lines} lines")
        for node in parsed(source):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
                length = (node.end_lineno or 0) - node.body[has_docstring].lineno + 1
                if length > MAX_FUNCTION:
                    faults.append(f"{module}:{node.lineno} {node.name} has {length} lines")
    return faults


def changeable(code: dict[str, str]) -> list[str]:
    """The dataclasses that are not frozen, of the rooms that hold data."""
    return [
        f"{module}.{node.name}"
        for module, source in code.items()
        if room_of(module) in OF_DATA
        for node in parsed(source)
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.startswith("dataclass") and "frozen=True" not in decorator
    ]


def test_every_import_goes_sideways_or_down() -> None:
    assert faults_of(sources(), set(sources())) == []


def test_every_entry_at_the_root_has_a_row() -> None:
    assert {room_of(module) for module in sources()} == {room for row in ROWS for room in row} | {"__init__"}


def test_no_files_and_no_folders_import_each_other_in_a_circle() -> None:
    assert circles(sources()) == []


def test_no_folder_is_crowded() -> None:
    folders = {
        str(folder.relative_to(PACKAGE)): [
            e.name
            for e in folder.iterdir()
            if e.name not in ("__init__.py", "__pycache__") and not e.name.startswith(".")
        ]
        for folder in PACKAGE.rglob("*")
        if folder.is_dir() and (folder / "__init__.py").is_file()
    }
    assert crowded(folders) == []


def test_functions_and_files_stay_short() -> None:
    assert lengthy(sources()) == []


def test_data_is_frozen() -> None:
    assert changeable(sources()) == ["mhacli.results.diff.arrays.Tally"]  # it counts


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("mhacli.results.check", "import torch", "mhacli.results.check:1: results imports torch"),
        ("mhacli.cli.app", "def f():\n    from torch import nn", "mhacli.cli.app:2: cli imports torch"),
        ("mhacli.text.encode", "from rich.text import Text", "mhacli.text.encode:1: text imports rich"),
        ("mhacli.compute.heads", "import typer", "mhacli.compute.heads:1: compute imports typer"),
        ("mhacli.attention.core", "from mhacli.compute.layer.run import inspect",
         "mhacli.attention.core:1: attention imports compute, which lies above it"),
        ("mhacli.render.json", "from mhacli.compute import layer", "mhacli.render.json:1: render imports compute"),
        ("mhacli.render.json", "from mhacli.attention.core import attend",
         "mhacli.render.json:1: render imports attention, which needs torch"),
        ("mhacli.spec.config", "if TYPE_CHECKING:\n    from mhacli.results import check",
         "mhacli.spec.config:2: spec imports results, which lies above it"),
        ("mhacli.io.files", "import_module('mhacli.text.encode')", "mhacli.io.files:1: io imports text, which lies above it"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_file_and_line(module: str, source: str, fault: str) -> None:
    assert faults_of({module: source}, set(sources())) == [fault]


def test_circles_of_files_and_of_folders_are_named_with_file_and_line() -> None:
    files = {"mhacli.io.a": "from mhacli.io import b", "mhacli.io.b": "def f():\n    import mhacli.io.a"}
    assert circles(files) == ["mhacli.io: a imports b (mhacli.io.a:1), b imports a (mhacli.io.b:2)"]
    folders = {
        "mhacli.io.a": "import mhacli.text.c",
        "mhacli.text.d": "if TYPE_CHECKING:\n    import mhacli.io.b",
        "mhacli.io.b": "",
        "mhacli.text.c": "",
    }
    assert circles(folders) == ["mhacli: io imports text (mhacli.io.a:1), text imports io (mhacli.text.d:2)"]


def test_what_is_too_long_or_too_crowded_is_named() -> None:
    body = "    pass\n"
    assert lengthy({"mhacli.a": "def f():\n" + body * 51}) == ["mhacli.a:1 f has 51 lines"]
    assert lengthy({"mhacli.a": "x = 1\n" * 601}) == ["mhacli.a has 601 lines"]
    assert lengthy({"mhacli.a": "def f():\n" + body * 50}) == []
    assert crowded({"io": [str(i) for i in range(13)], "text": [str(i) for i in range(12)]}) == ["io has 13 entries"]
