"""A record in a notebook: the run, all heads, one head and the self-check; and a pattern cut from a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mhacli.record.heads import UNTYPED
from mhacli.record.pattern import Pattern
from mhacli.record.record import Record
from mhacli.render.base.colours import CHANGES, RGB, UNKNOWN, WEIGHTS, hex_of, ink_on
from mhacli.render.base.format import fitted, type_text
from mhacli.render.base.options import Scale, Screen, ViewOptions
from mhacli.render.base.selection import chosen_layers
from mhacli.render.checkpoint.effect import effect_table, effect_words
from mhacli.render.checkpoint.header import checks_view
from mhacli.render.checkpoint.view import grid, listed_heads
from mhacli.render.display.fragment import COLUMNS, fragment, paragraphs, terminal_part
from mhacli.render.display.show import record_views
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, scale_of, usual_scale
from mhacli.render.heads.grids import cell_meaning, grid_of
from mhacli.render.heads.head_map import HeadMap, cell_map, head_map
from mhacli.render.heads.table import heads_table
from mhacli.render.page import elements as html
from mhacli.render.page.document import most_certain
from mhacli.render.page.effects import effect_pictures
from mhacli.render.page.elements import WIDE, Html, joined, tag, text
from mhacli.render.page.grids import grid as grid_table
from mhacli.render.page.grids import legend
from mhacli.render.run.trace import header
from mhacli.render.run.view import self_check_line
from mhacli.text.numbers import shown

_SCREEN, _OPTIONS = Screen(COLUMNS, colour=False), ViewOptions(view="auto")
_ELSEWHERE = "record.page() shows every head"
_MOST_EFFECTS, _MOST_CELLS = 12, 24
"""The most removals listed, and the most cells of a matrix per side before pooling."""
_NAME, _SHORT_NAME = 12, 7
"""The widest name of a row, and of a column if there are more than so many."""


def record_html(record: Record) -> str:
    """The overview of a record and the head with the largest excess; for a record without heads the terminal view."""
    if record.effect is not None:
        return fragment(_effect_parts(record))
    if not record.heads:
        return fragment([("its steps", terminal_part(record_views(record, _OPTIONS, _SCREEN)))])
    return fragment(_parts(record), elsewhere=_ELSEWHERE)


def _parts(record: Record) -> Iterator[tuple[str, Html]]:
    yield "the configuration", paragraphs(header(record, WIDE))
    if record.model is None:
        yield "the self-check", paragraphs(self_check_line(record.self_check))
    else:
        yield "the self-check", paragraphs(checks_view(record, WIDE, in_detail=True))
        yield "the map of all heads", terminal_part([grid(record, chosen_layers(record, _OPTIONS), _SCREEN)])
    yield "the table of heads", _heads(record)
    heads = drawable_heads(record, _OPTIONS)
    if heads:
        head = heads[most_certain(heads)]
        yield "the matrix of a head", _matrix(head_map(head, 0), scale_of(_OPTIONS, [head]), _title(head, len(heads)))
    yield "", _remark(f"{_ELSEWHERE}, record.pattern(layer=…, head=…) one of them")


def _effect_parts(record: Record) -> Iterator[tuple[str, Html]]:
    yield "the configuration", paragraphs(header(record, WIDE))
    yield "what was measured", joined(paragraphs(words) for words in effect_words(record, WIDE))
    if record.effect is not None and record.effect.verified.ok:
        yield "the pictures of effects", joined(effect_pictures(record, lambda level: _painted(CHANGES.colours[level])))
        yield "the table of removals", html.table(effect_table(record, record.effect, _MOST_EFFECTS))
        yield "", _remark("record.effects has every number of every removal")


def _remark(words: str) -> Html:
    return tag("p", text(words), class_="dim")


def _title(head: DrawableHead, count: int) -> str:
    if head.statistics is None:
        return head.label
    is_typed = head.statistics.kind not in UNTYPED
    why = "the one with the largest excess over uniform attention" if is_typed else "the first"
    return f"{head.label}: {type_text(head.statistics)}" + (f", {why} of {count} heads" if count > 1 else "")


def _heads(record: Record) -> Html:
    """The head statistics as the terminal lists them, those with the largest excess if there are many."""
    listed, description = listed_heads(record, record.heads, _OPTIONS)
    shown = heads_table(record, listed, _OPTIONS)
    shown = replace(shown, rows=[*shown.rows, *shown.foot], foot=())  # a notebook may remove a foot
    words = [f"{description}; record.heads has all"] if description else []
    return joined([html.table(shown), *map(_remark, [*words, " · ".join(shown.meanings(shown.columns))])])


def pattern_html(pattern: Pattern) -> str:
    """The cells of the pattern of one head; for several heads a description."""
    if pattern.head is None:
        words = f"{pattern!r}: record.pattern(layer=…, head=…) shows one head"
        return fragment([("", tag("p", text(words)))])
    cells = cell_map(pattern.queries, pattern.keys, pattern.values, pattern.allowed)
    title = f"layer {pattern.layer} · head {pattern.head}"
    return fragment([("the matrix", _matrix(cells, usual_scale([pattern.keys]), title))])


def _matrix(cells: HeadMap, scale: Scale, title: str) -> Html:
    """The cells of a pattern, or blocks of a long one, with tooltips that have one decimal more."""
    blocks = cells.fitting(_MOST_CELLS, _MOST_CELLS)
    of = grid_of(blocks, "", scale=scale)
    rows, columns = of.rows, of.columns
    widest = _SHORT_NAME if len(columns) > _NAME else _NAME
    of = replace(
        of,
        rows=[fitted(name, _NAME) for name in rows],
        columns=[fitted(name, widest) for name in columns],
        corner="query ↓ key →",
        meaning=cell_meaning(blocks.block) + " · 0 is masked" * (not of.allowed.all()),
        about=lambda row, key: f"{rows[row]} → {columns[key]} {shown(float(of.values[row, key]), 'weight', 3)}",
    )
    return joined([tag("p", tag("b", text(title))), grid_table(of, _weight), legend([of], _weight)])


def _weight(level: int) -> Mapping[str, str]:
    return _painted(UNKNOWN if level < 0 else WEIGHTS.colours[level])


def _painted(colour: RGB) -> Mapping[str, str]:
    return {"style": f"background:{hex_of(colour)};color:{ink_on(colour)};padding:1px 6px"}
