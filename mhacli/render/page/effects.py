"""Effects of removals as HTML: coloured tables of heads and of the texts that queries read, and all numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mhacli.record.record import Record
from mhacli.render.checkpoint.effect import effect_grids, effect_table, effect_words
from mhacli.render.page.elements import WIDE, Html, change_class, lines_of, table, tag, text
from mhacli.render.page.grids import Paint, grid, legend


def effects(record: Record) -> Html:
    """A section with pictures of the effects, and a row for each removal; empty without removals."""
    if record.effect is None:
        return Html("")
    words = [tag("p", line) for part in effect_words(record, WIDE) for line in lines_of(part, WIDE.width)]
    body = []
    if record.effect.verified.ok:
        body = [*effect_pictures(record, lambda level: {"class_": change_class(level)})]
        title = "what each removal changes, the largest change first"
        body += [table(replace(effect_table(record, record.effect), title=title))]
    return tag("section", tag("h2", text("effects")), *words, *body, id="effects")


def effect_pictures(record: Record, paint: Paint) -> Iterator[Html]:
    """The table of heads, those of texts, and their scale."""
    drawn = effect_grids(record)
    yield from (grid(of, paint) for of in drawn)
    if drawn:
        yield legend(drawn, paint)
