"""Files with the program of a user, each a case of a test.

The first comments of a file say what a test expects of it: `# expect: wrong batch-leak`. Other
lines of the form `# name: value` give what the test needs besides; a value of several lines has its
name on each. `# common: yes` stands where only some files of the folder are run by default: the
others are marked `real`.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from support import user_code


class Case(NamedTuple):
    """A file, and the comments that it begins with."""

    path: Path
    comments: Mapping[str, str]

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def expect(self) -> list[str]:
        """The words that say what is expected."""
        return self.comments["expect"].split()

    @property
    def options(self) -> dict[str, object]:
        """The keywords of the call, from a line such as `# options: causal=True, length=32`."""
        call = ast.parse(f"call({self.comments.get('options', '')})", mode="eval").body
        assert isinstance(call, ast.Call)
        return {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}

    def load(self) -> ModuleType:
        return user_code.load(self.path)


def read(path: Path) -> Case:
    """A file as a case."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments: dict[str, str] = {}
    for line in itertools.takewhile(lambda line: line.startswith("# "), lines):
        name, _, value = line.removeprefix("# ").partition(":")
        comments[name] = "\n".join(filter(None, (comments.get(name), value.strip())))
    return Case(path, comments)


def parameters(folder: Path, *, all_common: bool = False) -> list[object]:
    """The files of a folder for `parametrize`, named as the files are."""
    cases = [read(path) for path in sorted(folder.glob("*.py"))]
    assert cases, folder
    return [
        pytest.param(
            case,
            id=case.path.stem,
            marks=[] if all_common or case.comments.get("common") == "yes" else [pytest.mark.real],
        )
        for case in cases
    ]
