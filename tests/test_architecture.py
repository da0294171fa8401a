"""The house has rows, and a file imports only from its own row or one below, without cycles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mhacli"
ROWS = (
    ("cli", "__main__", "commands", "viewer", "options", "values", "streams", "interrupts"),
    ("studies", "render"),
    ("models", "modules"),
    ("attention",),
    (
        "record",
        "arrays",
        "consistency",
        "parts",
        "sections",
        "survey",
        "masksurvey",
        "trace",
        "formulas",
        "variants",
        "facts",
        "costs",
        "workload",
        "expected",
        "sweep",
        "intervals",
        "benchmark",
        "heads",
        "layers",
        "findings",
        "health",
        "patterns",
        "comparison",
        "differences",
        "text",
        "plan",
        "checkpoints",
        "layerfile",
        "biasfile",
        "tensorfile",
        "schema",
        "memory",
        "config",
        "errors",
        "extras",
        "files",
    ),
    ("__init__",),
)
NEVER_TORCH = {
    "__main__",
    "interrupts",
    "cli",
    "commands",
    "viewer",
    "options",
    "values",
    "streams",
    "render",
    *ROWS[-2],
}
NEVER_SCREEN = {"studies", "models", "modules", "attention", *ROWS[-2]}


def room_of(module: str) -> str:
    """The room of a module: `mhacli.text.read` lives in `text`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports_of(source: str, where: str) -> list[tuple[str, str]]:
    """(imported module, place) for every import outside `if TYPE_CHECKING:`, bodies of functions included."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, f"{where}:{node.lineno}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            submodules = [f"{module}.{alias.name}" for alias in node.names if is_module(f"{module}.{alias.name}")]
            found += [(name, f"{where}:{node.lineno}") for name in submodules or [module]]
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.parent / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def violations(sources: dict[str, str]) -> list[str]:
    """Every import that goes upward, across, or out to a library that its room must not know."""
    rank = {room: number for number, row in enumerate(ROWS) for room in row}
    faults = []
    for module, source in sources.items():
        room = room_of(module)
        for imported, place in imports_of(source, module):
            top = imported.split(".")[0]
            if top == "torch" and room in NEVER_TORCH:
                faults.append(f"{place} imports torch into {room}")
            if top in ("rich", "typer") and room in NEVER_SCREEN:
                faults.append(f"{place} imports {top} into {room}")
            if top == "mhacli" and room != "__init__":
                other = room_of(imported)
                if rank[other] < rank[room]:
                    faults.append(f"{place}: {room} imports {other}, which lies above it")
                if {room, other} == {"studies", "render"}:
                    faults.append(f"{place}: {room} imports {other}")
                if other == "attention" and room in NEVER_TORCH:
                    faults.append(f"{place}: {room} imports {other}, which needs torch")
    return faults


def own_sources() -> dict[str, str]:
    return {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_import_goes_sideways_or_down() -> None:
    assert violations(own_sources()) == []


def test_every_file_has_a_row() -> None:
    rooms = {room_of(module) for module in own_sources()}
    assert rooms == {room for row in ROWS for room in row}


def test_modules_import_without_cycles() -> None:
    graph = {
        module: {imported for imported, _ in imports_of(source, module) if imported.startswith("mhacli.")}
        for module, source in own_sources().items()
    }
    graph["mhacli.__init__"] = set()  # names its rooms for lazy use only
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path, module))
        if module not in done:
            for imported in graph.get(module, set()):
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("mhacli.record", "import torch", "mhacli.record:1 imports torch into record"),
        ("mhacli.record", "def f():\n    from torch import nn", "mhacli.record:2 imports torch into record"),
        ("mhacli.text.read", "from rich.text import Text", "mhacli.text.read:1 imports rich into text"),
        ("mhacli.attention.core", "from mhacli.studies.inspect import inspect",
         "mhacli.attention.core:1: attention imports studies, which lies above it"),
        ("mhacli.render.json", "from mhacli.studies import inspect", "mhacli.render.json:1: render imports studies"),
        ("mhacli.commands.run", "from mhacli.attention.core import attend",
         "mhacli.commands.run:1: commands imports attention, which needs torch"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_file_and_line(module: str, source: str, fault: str) -> None:
    assert violations({module: source}) == [fault]


def test_functions_and_modules_stay_short() -> None:
    for module, source in own_sources().items():
        assert source.count("\n") <= 400, f"{module} has {source.count(chr(10))} lines"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
                body = node.body[1:] if has_docstring else node.body
                length = (node.end_lineno or 0) - body[0].lineno + 1
                assert length <= 40, f"{module}:{node.lineno} {node.name} has {length} lines"
