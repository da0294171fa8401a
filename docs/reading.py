"""Writes the tables and the glossary of READING.md anew, from the tables that the screens use.

python docs/reading.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mhacli.record.glossary import words_of
from mhacli.record.heads import SINK_TOKENS, STATISTICS, words_of_type
from mhacli.render.base.colours import KIND_SIGNS

PAGE = Path(__file__).parent / "READING.md"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [
        headings,
        ["---"] * len(headings),
        *([cell.replace("|", "\\|") or "–" for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(words: str) -> str:
    """Words as they stand on a screen; nothing for nothing."""
    return f"`{words}`" if words else ""


def columns() -> str:
    """A row for each statistic of a head."""
    rows = (
        (
            code(words.heading.format(sink_tokens=SINK_TOKENS)),
            words.name,
            code(row.field),
            row.unit,
            words.explanation,
            code(words.formula),
            words.source,
        )
        for row, words in ((row, row.words) for row in STATISTICS)
    )
    return table(("column", "name", "in JSON", "unit", "meaning", "formula", "source"), rows)


def head_types() -> str:
    """A row for each type of head."""
    rows = (
        (sign, words.name, code(kind), words.explanation)
        for kind, sign, words in (
            (kind, sign, words_of_type(kind)) for kind, (sign, _) in KIND_SIGNS.items()
        )
    )
    return table(("sign", "type", "in JSON", "meaning"), rows)


def signs() -> str:
    """A row for each sign."""
    return table(
        ("sign", "meaning"),
        ((code(name), word.explanation) for name, word in words_of("glossary", "sign").items()),
    )


def concepts() -> str:
    """A row for each concept, by the alphabet."""
    words = sorted(words_of("glossary", "concept").items(), key=lambda item: item[0].casefold())
    rows = (
        (name, ", ".join(word.also), word.explanation, code(word.formula), word.source)
        for name, word in words
    )
    return table(("concept", "also", "meaning", "formula", "source"), rows)


PARTS = {"columns": columns, "head types": head_types, "signs": signs, "glossary": concepts}
"""What stands between `<!-- NAME -->` and `<!-- /NAME -->`."""


def written(page: str) -> str:
    """The page with its generated parts as they are now."""
    for name, part in PARTS.items():
        page = re.sub(
            rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)",
            part().replace("\\", r"\\"),
            page,
            flags=re.DOTALL,
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
