"""Files of user code: loaded as modules whose source Python finds, and changed in one place."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import mhacli
from support.mha import forking

ZOO = Path(__file__).parents[1] / "contract" / "check" / "zoo"
"""Attention as people write it; all of it is right but `odd.py`."""

PATIENCE_S = 600.0
"""Seconds for an examination: a busy machine must not change its verdict."""


def check(target: object, **how: Any) -> Any:
    """The examination of a target, with time enough, and without a new process of Python."""
    with forking() if isinstance(target, str) else nullcontext():
        return mhacli.check(target, **{"max_time_s": PATIENCE_S, **how})


def load(path: Path) -> ModuleType:
    """A file as a new module."""
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    # bytecode may be of the file before it
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return module


def text_of(layer: str) -> str:
    """The file of a layer, which is named as `file:Class`."""
    return (ZOO / f"{layer.partition(':')[0]}.py").read_text(encoding="utf-8")


def write(folder: Path, layer: str, *pairs: tuple[str, str]) -> tuple[Path, int]:
    """Writes the file of a layer with pieces replaced, and returns its path and the line of the
    first piece.

    A piece is looked for from the beginning of the class on, and if it is not there, in the whole
    file.
    """
    file, _, name = layer.partition(":")
    text, line = text_of(layer), 0
    for old, new in pairs:
        begin = max(text.find(f"class {name}("), text.find(f"def {name}("))
        at = text.find(old, begin)
        at = at if at >= 0 else text.index(old)
        line = line or text[:at].count("\n") + 1
        text = text[:at] + new + text[at + len(old) :]
    path = folder / f"{file}.py"
    path.write_text(text, encoding="utf-8")
    return path, line
