"""The import rule of docs/DESIGN.md, which pyproject.toml states for import-linter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_imports_keep_the_rule() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
