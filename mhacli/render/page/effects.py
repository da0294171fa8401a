"""Effects of removals as HTML: a coloured table of heads, the texts that queries read, and all numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mhacli.record.effect import Effect
from mhacli.record.record import Record
from mhacli.render.base.format import number_text
from mhacli.render.checkpoint.effect import change_words, effect_table, effect_words
from mhacli.render.checkpoint.effect_map import EffectMap, ReadText
from mhacli.render.page.elements import WIDE, Html, change_class, joined, lines_of, table, tag, text

Paint = Callable[[int], Mapping[str, str]]
"""The attributes that colour an element by a level of change, 0 … 510."""
_TOP, _SWATCHES = 510, 15


def effects(record: Record) -> Html:
    """A section with pictures of the effects, and a row for each removal; empty without removals."""
    if record.effect is None:
        return Html("")
    words = [tag("p", line) for part in effect_words(record, WIDE) for line in lines_of(part, WIDE.width)]
    body = []
    if record.effect.verified.ok:
        body = [*effect_pictures(EffectMap.of(record), lambda level: {"class_": change_class(level)})]
        title = "what each removal changes, the largest change first"
        body += [table(replace(effect_table(record, record.effect), title=title))]
    return tag("section", tag("h2", text("effects")), *words, *body, id="effects")


def effect_pictures(shown: EffectMap, paint: Paint) -> Iterator[Html]:
    """The table of heads, the texts, and their scale."""
    if shown.rows:
        head = tag(
            "tr", tag("th", text("head")), *(tag("th", text(str(n)), scope="col") for n in range(shown.n_columns))
        )
        rows = (
            tag("tr", tag("th", text(row.name), scope="row"), *(_cell(shown, effect, paint) for effect in row.heads))
            for row in shown.rows
        )
        whole = tag("table", tag("thead", head), tag("tbody", *rows), class_="changes")
        yield tag("div", whole, class_="scroll")
    yield from (_text(shown, read, paint) for read in shown.texts)
    levels = (_TOP * place // (_SWATCHES - 1) for place in range(0 if shown.has_signs else _SWATCHES // 2, _SWATCHES))
    ramp = [tag("span", text("\u00a0"), **paint(level)) for level in levels]
    yield tag("p", text(f"{shown.low} "), *ramp, text(f" {number_text(shown.largest)} · {shown.meaning}"), class_="dim")


def _cell(shown: EffectMap, effect: Effect | None, paint: Paint) -> Html:
    if effect is None or (level := shown.level(effect)) < 0:
        return tag("td")
    return tag("td", text(shown.word(effect)), title=change_words(shown, effect), **paint(level))


def _text(shown: EffectMap, read: ReadText, paint: Paint) -> Html:
    """The tokens that a query reads, each in the colour of its removal's effect."""
    tokens = (
        tag("span", text(token), title=change_words(shown, edge), **({} if (n := shown.level(edge)) < 0 else paint(n)))
        for edge, token in zip(read.edges, read.tokens, strict=True)
    )
    return tag("p", tag("b", text(read.name)), text(" "), joined(tokens, " "), class_="read")
