"""The words of the screens: headings, names, explanations, formulas and sources.

They stand beside this file, one word a line: columns.toml has those of tables, glossary.toml all
others, mistakes.toml those of `mha check`. Each file is read once, when the first of its words is
needed. Screens, legends, tooltips, `mha explain` and docs/READING.md take their words from here.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

TABLES = ("bench", "decode", "effect", "diff", "doctor")
"""The commands with a table of their own in columns.toml, beside those of heads."""


class Word(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A word with its explanation. `also` are further names, those of JSON fields included.

    A column has a `heading` (a statistic without one has no column), a `name` elsewhere, and a
    `legend`; a head type has a `name` and a `short` one. The texts of sites and variants are
    templates; `general` is the formula of a site for any run, if it differs, and `why` the use of a
    variant. A mistake has an `effect`, a `wrong` and the `right` expression, and that of torch's
    fused function, `in_torch`, further ones, `forms`, and `advice` in words; a failure of a model
    has an `effect`, and `advice` what to do.
    `group` is set for `mha explain`, and so is the `example`, which is computed.
    """

    group: str = ""
    explanation: str
    formula: str = ""
    source: str = ""
    also: tuple[str, ...] = ()
    heading: str = ""
    name: str = ""
    legend: str = ""
    short: str = ""
    general: str = ""
    why: str = ""
    effect: str = ""
    wrong: str = ""
    right: str = ""
    in_torch: str = ""
    forms: tuple[str, ...] = ()
    advice: str = ""
    example: str = ""


def words_of(file: Literal["columns", "glossary", "mistakes"], table: str) -> Mapping[str, Word]:
    """The words of a table of a file, by name: of a column its field, and of a mistake its code, or
    `code, form` for its further forms.
    """
    return tables_of(file)[table]


@cache
def tables_of(file: str) -> Mapping[str, Mapping[str, Word]]:
    """All tables of a file, by name."""
    import tomllib  # not for a help text

    text = Path(__file__).with_name(f"{file}.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, dict[str, Word]])


def plain(word: str) -> str:
    """A word as it is compared: without regard to case, blanks, hyphens and underscores.

    >>> plain("Effective_Keys") == plain("effective keys")
    True
    """
    spaced = word.casefold().replace("−", "-").replace("-", " ").replace("_", " ")
    return " ".join(spaced.split()) or word


def did_you_mean(word: str, names: Iterable[str]) -> str | None:
    """The names that are nearest to an unknown word, as a question; None if none is near."""
    by_spelling = {plain(name): name for name in names}
    near = [by_spelling[name] for name in get_close_matches(plain(word), by_spelling)]
    return f"did you mean {' or '.join(near)}?" if near else None
