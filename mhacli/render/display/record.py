"""A record in a notebook: the run, all heads, one head and the self-check; and a pattern cut from a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mhacli.record.exports import Pattern
from mhacli.record.record import Record
from mhacli.render.base.colours import CHANGES, RGB, UNKNOWN, WEIGHTS, hex_of, ink_on
from mhacli.render.base.format import fitted, type_text
from mhacli.render.base.options import Scale, Screen, ViewOptions
from mhacli.render.display.fragment import COLUMNS, fragment, terminal_part
from mhacli.render.display.show import record_views
from mhacli.render.heads.drawable import drawable_heads, scale_of, usual_scale
from mhacli.render.heads.grids import cell_meaning, grid_of
from mhacli.render.heads.head_map import HeadMap, cell_map, head_map
from mhacli.render.page.document import most_certain
from mhacli.render.page.effects import effect_pictures
from mhacli.render.page.elements import Html, joined, tag, text
from mhacli.render.page.grids import grid as grid_table
from mhacli.render.page.grids import legend
from mhacli.text.numbers import shown

_SCREEN, _OPTIONS = Screen(COLUMNS, colour=False), ViewOptions(view="none")
_ELSEWHERE = "record.page() shows every head, record.pattern(layer=…, head=…) one of them"
_MOST_CELLS = 24
"""The most cells of a matrix per side before pooling."""
_NAME, _SHORT_NAME = 12, 7
"""The widest name of a row, and of a column if there are more than so many."""


def record_html(record: Record) -> str:
    """What the terminal shows of a record, with its effects as coloured tables, or with the head of the largest excess."""
    parts = [("what mha show prints", terminal_part(record_views(record, _OPTIONS, _SCREEN)))]
    if record.effect is not None and record.effect.verified.ok:
        pictures = effect_pictures(record, lambda level: _painted(CHANGES.colours[level]))
        return fragment([("the pictures of effects", joined(pictures)), *parts])
    heads = drawable_heads(record, _OPTIONS) if record.heads else ()
    if heads:
        head = heads[most_certain(heads)]
        title = head.label if head.statistics is None else f"{head.label}: {type_text(head.statistics)}"
        parts.append(("the matrix of a head", _matrix(head_map(head, 0), scale_of(_OPTIONS, [head]), title)))
        parts.append(("", tag("p", text(_ELSEWHERE), class_="dim")))
    return fragment(parts, elsewhere=_ELSEWHERE)


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
