"""What was chosen for a picture, in words: texts, heads, rows, the scale; the command of its record need not say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from mhacli.render.base.format import count_of, fitted
from mhacli.render.base.options import Figure, ViewOptions
from mhacli.render.base.selection import names_of, ranges
from mhacli.render.figures.heads.subject import Subject
from mhacli.render.figures.svg.colour_scale import Shading
from mhacli.results.record.record import Record
from mhacli.spec.tokens import TokenSequence
from mhacli.text.escape import visible


def drawn_as(
    record: Record, options: ViewOptions, kind: Figure, *, subjects: Sequence[Subject], shaded: Shading
) -> str:
    """The choices on one line: `figure grid · heads 0, 2 · scale log · sinks hidden`."""
    one = subjects[0]
    layers = [*dict.fromkeys(other.head.layer for other in subjects if other.head.layer is not None)]
    heads = sorted({other.head.head for other in subjects})
    parts = [f"figure {kind}"] + ([names_of(layers)] if layers else [])
    parts += [f"head{'s' * (len(heads) > 1)} {ranges(heads)}"]
    n = len(record.sequences)
    parts += [f"sequence {one.sequence} of 0–{n - 1}"] if n > 1 else []
    parts += [f"scale {shaded.scale}", "sinks hidden" if options.hide_sinks else "sinks shown"]
    parts += [] if one.rows is None else [f"queries {ranges(one.rows)}"]
    return " · ".join([*parts, *(["words"] if options.words else [])])


def texts_of(subjects: Sequence[Subject], cells: int) -> Iterator[str]:
    """What is looked at and by what, a line of at most `cells` cells for each pair of texts: `5 tokens: “the cat …”`."""
    alike = of_same_texts(subjects)
    for group in alike:
        one = group[0]
        queries, keys = one.shown.queries, one.shown.keys
        layers = [other.head.layer for other in group if other.head.layer is not None]
        where = f"{names_of(layers)}: " if len(alike) > 1 else ""
        if queries == keys:
            yield _text(where, queries, one, cells)
        else:
            yield _text(f"{where}queries, ", queries, one, cells)
            yield _text(f"{where}keys, ", keys, one, cells)


def of_same_texts(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """The heads, those together that read the same texts."""
    groups: list[list[Subject]] = []
    for one in subjects:
        texts = (one.shown.queries, one.shown.keys)
        group = next((found for found in groups if (found[0].shown.queries, found[0].shown.keys) == texts), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def _text(begin: str, text: TokenSequence, one: Subject, cells: int) -> str:
    """How many tokens, and the text, cut where it is long; rows that are random have none."""
    count = begin + count_of(len(text.tokens), "word" if one.in_words else "token", grouped=True)
    words = " ".join(text.text.split())
    room = cells - cell_len(count) - len(": “”")
    return f"{count}: “{fitted(visible(words), room)}”" if words and room > 1 else count
