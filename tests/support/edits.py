"""Mistakes that are made on purpose: words of a right layer of the zoo, replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from support import user_code

NOTHING: Mapping[str, object] = MappingProxyType({})


class Edit(NamedTuple):
    """A layer of the zoo, named as `file:Class`, in which `old` is replaced by `new`, and what
    `mha check` must answer.
    """

    layer: str
    old: str
    new: str
    expect: str
    """The code of the mistake, or a verdict. Codes that give the same numbers are separated by
    `|`."""
    common: bool = False
    """Whether the case is run by default. The others are marked `real`."""
    also: tuple[tuple[str, str], ...] = ()
    """Further words that are replaced, and by what."""
    part: str = ""
    """The part of the model that must be named."""
    states: Mapping[str, object] = NOTHING
    """What the user states about the layer."""
    sizes: Mapping[str, int] = NOTHING
    """Sizes with which the layer is built, in place of the usual ones."""
    is_line_named: bool = True
    """False where no line is wrong by itself, or where the line of another operation is named."""

    @property
    def name(self) -> str:
        """The class or the function."""
        return self.layer.partition(":")[2]

    @property
    def codes(self) -> set[str]:
        return set(self.expect.split("|"))

    def write(self, folder: Path) -> tuple[Path, int]:
        """Writes the file of the layer with the mistake. Returns its path and the line of `new`."""
        return user_code.write(folder, self.layer, (self.old, self.new), *self.also)


def parameters(edits: Iterable[Edit]) -> list[object]:
    """The cases for `parametrize`, named by layer and expectation, and numbered where that is not
    one of a kind.
    """
    seen: Counter[str] = Counter()
    rows = []
    for edit in edits:
        code = edit.expect.partition("|")[0]
        name = f"{edit.name}-{code}"
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}-{seen[name]}"
        marks = [] if edit.common else [pytest.mark.real]
        rows.append(pytest.param(edit, id=name, marks=marks))
    return rows
