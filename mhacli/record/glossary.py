"""The words of the screens: headings, names, explanations, formulas and sources.

They stand beside this file, one word a line: columns.toml has those of tables, glossary.toml all others, mistakes.toml
those of `mha check`. Each file is read once, when the first of its words is needed. Screens, legends, tooltips, `mha
explain` and docs/READING.md take their words from here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

Group = Literal[
    "concept", "sign", "column", "head type", "bench", "decode", "effect", "diff", "doctor", "site", "probe", "mistake"
]
"""The groups of words. The columns of a command's tables are the group of its name."""


class Word(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A word with its explanation. `also` are further names, those of JSON fields included."""

    explanation: str
    formula: str = ""
    source: str = ""
    also: tuple[str, ...] = ()


class Column(Word, frozen=True, kw_only=True):
    """A column: its `heading` (a statistic without one has no column), its `name` elsewhere, and its `legend`."""

    heading: str = ""
    name: str = ""
    legend: str = ""


class HeadTypeWords(Word, frozen=True, kw_only=True):
    """The names of a head type."""

    name: str
    short: str


class SiteWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Templates for a site's meaning and its formula in a run; `general` is the formula for any run, if it differs."""

    meaning: str
    formula: str
    general: str = ""


class VariantWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a variant of attention does (a template), why, and its source."""

    what: str
    why: str
    source: str


class MistakeWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mistake: its message, its effect, a wrong and the right expression, and that of torch's fused function."""

    message: str
    effect: str
    wrong: str = ""
    right: str = ""
    in_torch: str = ""


class Columns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The columns of all tables by field, in display order, and the head types."""

    head_type_rule: str
    statistic: Mapping[str, Column]
    head_type: Mapping[str, HeadTypeWords]
    bench: Mapping[str, Column]
    step: Mapping[str, Column]
    decode: Mapping[str, Column]
    effect: Mapping[str, Column]
    diff: Mapping[str, Column]
    doctor: Mapping[str, Column]

    @property
    def by_command(self) -> Mapping[Group, tuple[Column, ...]]:
        """The columns of each command other than those of heads."""
        tables: Mapping[Group, tuple[Mapping[str, Column], ...]] = {
            "bench": (self.bench,), "decode": (self.step, self.decode), "effect": (self.effect,), "diff": (self.diff,),
            "doctor": (self.doctor,),
        }  # fmt: skip
        return {name: tuple(column for table in of for column in table.values()) for name, of in tables.items()}


class Glossary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All other words."""

    group: Mapping[Group, str]
    concept: Mapping[str, Word]
    sign: Mapping[str, Word]
    probe: Mapping[str, Word]
    site: Mapping[str, SiteWords]
    variant: Mapping[str, VariantWords]


@cache
def column_words() -> Columns:
    """The words of columns.toml."""
    return msgspec.convert(_parsed("columns"), Columns)


@cache
def glossary() -> Glossary:
    """The words of glossary.toml."""
    return msgspec.convert(_parsed("glossary"), Glossary)


@cache
def mistake_words() -> Mapping[str, MistakeWords]:
    """The words of mistakes.toml, by the code of a mistake, and by `code, form` for its further forms."""
    return msgspec.convert(_parsed("mistakes"), dict[str, MistakeWords])


def _parsed(name: str) -> object:
    return tomllib.loads(resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
