"""A record in a notebook: the run, all heads, one head and the self-check; and a pattern cut from a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from rich.console import RenderableType

from mhacli.record.heads import UNTYPED
from mhacli.record.pattern import Pattern
from mhacli.record.record import Record
from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.base.colours import change_colour, hex_of, ink_on
from mhacli.render.base.format import configuration, type_text
from mhacli.render.base.options import Scale, Screen, ViewOptions
from mhacli.render.base.selection import chosen_layers
from mhacli.render.checkpoint.effect import effect_table, effect_words
from mhacli.render.checkpoint.effect_map import EffectMap
from mhacli.render.checkpoint.header import checks_view, model_header
from mhacli.render.checkpoint.view import grid, listed_heads
from mhacli.render.display.fragment import COLUMNS, fragment, paragraphs, terminal_part
from mhacli.render.display.matrix import matrix
from mhacli.render.display.terminal import record_views
from mhacli.render.heads.drawable import SHORT, DrawableHead, drawable_heads, scale_of
from mhacli.render.heads.head_map import HeadMap, head_map
from mhacli.render.heads.table import heads_table
from mhacli.render.page import elements as html
from mhacli.render.page.document import most_certain
from mhacli.render.page.effects import effect_pictures
from mhacli.render.page.elements import Html, joined, tag, text
from mhacli.render.run.view import self_check_line

_SCREEN = Screen(COLUMNS, colour=False)
_WIDE = Screen(10_000, colour=False)
_ELSEWHERE = "record.page() shows every head"


def record_html(record: Record) -> str:
    """The overview of a record and the head with the largest excess; for a record without heads the terminal view."""
    options = ViewOptions(view="auto")
    if record.effect is not None:
        return fragment(_effect_parts(record))
    if not record.heads:
        return fragment([("its steps", terminal_part(record_views(record, options, _SCREEN)))])
    return fragment(_parts(record, options), elsewhere=_ELSEWHERE)


def _parts(record: Record, options: ViewOptions) -> Iterator[tuple[str, Html]]:
    heads = drawable_heads(record, options)
    yield "the configuration", paragraphs(_header(record))
    yield "the self-check", paragraphs(_checks(record))
    if record.model is not None:
        yield "the map of all heads", terminal_part([grid(record, chosen_layers(record, options), _SCREEN)])
    yield "the table of heads", _heads(record, options)
    if heads:
        head = heads[most_certain(heads)]
        yield "the matrix of a head", matrix(head_map(head, 0), scale_of(options, [head]), _title(head, len(heads)))
    yield "", tag("p", text(f"{_ELSEWHERE}, record.pattern(layer=…, head=…) one of them"), class_="dim")


def _effect_parts(record: Record) -> Iterator[tuple[str, Html]]:
    yield "the configuration", paragraphs(_header(record))
    yield "what was measured", joined(paragraphs(words) for words in effect_words(record, _WIDE))
    if record.effect is None or not record.effect.verified.ok:
        return
    yield "the pictures of effects", joined(effect_pictures(EffectMap.of(record), _painted))
    removals = effect_table(record, record.effect, _MOST_EFFECTS)
    yield "the table of removals", html.table(removals)
    n_more = len(removals.rows) - _MOST_EFFECTS
    more = f"{n_more} more; " if n_more > 0 else ""
    yield "", tag("p", text(f"{more}record.effects has every number of every removal"), class_="dim")


_MOST_EFFECTS = 12
"""The largest number of removals listed."""


def _painted(level: int) -> Mapping[str, str]:
    colour = change_colour(level - 255)
    return {"style": f"background:{hex_of(colour)};color:{ink_on(colour)};padding:1px 6px"}


def _header(record: Record) -> RenderableType:
    return configuration(record, _WIDE.width) if record.model is None else model_header(record, record.model, _WIDE)


def _checks(record: Record) -> RenderableType:
    return self_check_line(record.self_check) if record.model is None else checks_view(record, _WIDE, in_detail=True)


def _title(head: DrawableHead, count: int) -> str:
    if head.statistics is None:
        return head.label
    is_typed = head.statistics.kind not in UNTYPED
    why = "the one with the largest excess over uniform attention" if is_typed else "the first"
    return f"{head.label}: {type_text(head.statistics)}" + (f", {why} of {count} heads" if count > 1 else "")


def _heads(record: Record, options: ViewOptions) -> Html:
    """The head statistics as the terminal lists them, those with the largest excess if there are many."""
    listed, description = listed_heads(record, record.heads, options)
    shown = heads_table(record, listed, options)
    shown = replace(shown, rows=[*shown.rows, *shown.foot], foot=())  # a notebook may remove a foot
    words = [f"{description}; record.heads has all"] if description else []
    words.append(" · ".join(shown.meanings(shown.columns)))
    return joined([html.table(shown), *(tag("p", text(word), class_="dim") for word in words)])


def pattern_html(pattern: Pattern) -> str:
    """The cells of the pattern of one head; for several heads a description."""
    if pattern.head is None:
        words = f"{pattern!r}: record.pattern(layer=…, head=…) shows one head"
        return fragment([("", tag("p", text(words)))])
    scale: Scale = "linear" if len(pattern.key_tokens) <= SHORT else "log"
    title = f"layer {pattern.layer} · head {pattern.head}"
    return fragment([("the matrix", matrix(_map_of(pattern), scale, title))])


def _map_of(pattern: Pattern) -> HeadMap:
    weights = np.where(pattern.allowed, pattern.values.astype(np.float64), FORBIDDEN)
    return HeadMap(
        queries=pattern.queries,
        keys=pattern.keys,
        weights=weights,
        of_sinks=np.zeros_like(weights),
        learned=None,
        n_queries=np.asarray(pattern.allowed.any(axis=1), dtype=np.float64),
        sinks=(),
    )
