"""What imports what: inside of `mhacli`, and in the tests that use `mhacli` as its users do."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mhacli

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "mhacli",
    "mhacli.attention.attend",
    "mhacli.attention.masks",
    *(f"mhacli.{name}" for name in mhacli.__all__),
}
"""What users import: the public names, `attend` and the masks."""


def test_imports_keep_the_rule() -> None:
    """The rule is in docs/DESIGN.md, and in pyproject.toml for import-linter."""
    code = (
        "import sys; from importlinter.cli import lint_imports;"
        " sys.exit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def imports(path: Path) -> Iterator[str]:
    """Each name of `mhacli` that a file imports."""
    text = path.read_text()
    if "from mhacli" not in text and "import mhacli." not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "mhacli")
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "mhacli"
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ["contract", "golden", "support"])
def test_tests_of_the_outside_import_what_users_import(folder: str) -> None:
    inside = {
        str(path): sorted({*imports(path)} - PUBLIC)
        for path in (ROOT / "tests" / folder).rglob("*.py")
    }
    assert {path: names for path, names in inside.items() if names} == {}


def test_modules_of_ours_are_imported_by_name_in_three_files_alone() -> None:
    """import-linter does not see such an import, so it could hide a circle."""
    found = {
        path.relative_to(ROOT / "mhacli").as_posix()
        for path in (ROOT / "mhacli").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and any(
            isinstance(part, ast.Constant) and str(part.value).startswith("mhacli")
            for part in ast.walk(node)
        )
    }
    assert found == {"__init__.py", "attention/__init__.py", "cli/app.py"}


def typer_names(path: Path) -> Iterator[str]:
    """Each name of Typer or click that a file uses: `typer.Exit`, `typer.core`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name for name in names if name.startswith(("typer.", "click")))
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] in ("typer", "click"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "typer":
            yield f"typer.{node.attr}"


def test_typer_is_used_by_its_public_names_alone() -> None:
    """What is not public changes with any version, and has changed."""
    import typer

    public = {f"typer.{name}" for name, value in vars(typer).items() if not inspect.ismodule(value)}
    used = {name for path in (ROOT / "mhacli").rglob("*.py") for name in typer_names(path)}
    assert used - public == set()
    assert "typer.Option" in used
