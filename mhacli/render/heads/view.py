"""The terminal view of many heads: an overview, and single cells: the strongest, a block, and requested queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.record.arrays import Array
from mhacli.record.heads import SINK_LIFT, Corner, HeadsSummary, HeadStatistics, in_order
from mhacli.record.record import Record
from mhacli.render.base.colours import EMPTY, NAN_SIGN, level_of, shade
from mhacli.render.base.format import (
    agreement,
    bytes_text,
    checks_in_brief,
    configuration,
    count_of,
    filled,
    fitted,
    left_out,
    percent_text,
    plain_table,
    reducer_text,
    seconds_text,
    short_text,
    texts_in_words,
    title_rule,
    token_at,
    token_text,
    weight_text,
)
from mhacli.render.base.options import Screen, ViewOptions, balanced, chosen
from mhacli.render.base.selection import places_of, survey_of
from mhacli.render.base.terminal import bare, table
from mhacli.render.base.tokens import token_tables
from mhacli.render.heads.head_map import where
from mhacli.render.heads.heatmap import pooled_map
from mhacli.render.heads.table import heads_table
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence

MAX_SEQUENCES = 4


def heads_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete output of `mha heads`. Raises `UsageError` for a head or sequence out of range."""
    survey = survey_of(record)
    listed = in_order(record.heads, options.sort)
    if options.heads is not None:
        places_of(record, options.heads)
        listed = tuple(head for head in listed if head.head in options.heads)
    of_heads = heads_table(record, listed, options)
    if options.brief:
        return Group(bare(of_heads, screen.width), Text(""), _checks(record, survey, options, screen))
    drawn = chosen(options.sequences, len(record.sequences), MAX_SEQUENCES, options.everything, "sequence")
    sequences = drawn.shown
    sections: list[RenderableType] = [
        Group(configuration(record, screen.width), _summary(record, survey, screen)),
        *(token_tables(record, drawn, options, screen) if options.tokens or options.verbose else ()),
        strong_places(record, listed, options, screen),
        *(
            pooled_map(record, place, b, options, screen)
            for place in places_of(record, options.maps)
            for b in sequences
        ),
    ]
    if survey.kept.corner is not None:
        corners = ((place, b) for place in places_of(record, [head.head for head in listed]) for b in sequences)
        sections += [corner_view(record, survey.kept.corner, place, b, options, screen) for place, b in corners]
    if survey.kept.queries:
        sections += [strongest_keys(record, listed, b) for b in sequences]
    sinks = sinks_line(record, listed, survey.sink_share, screen)
    sections.append(Group(*table(of_heads, screen.width, has_all=options.verbose), sinks))
    sections.append(_checks(record, survey, options, screen))
    spaced = [part for section in sections for part in (Text(""), section)]
    return Group(*spaced[1:])


# ---------------------------------------------------------------------------------------------------------- overview


def _summary(record: Record, survey: HeadsSummary, screen: Screen) -> Text:
    """What was inspected, the method, the time, and the memory that whole matrices would have taken."""
    from mhacli.attention.memory import BASE_BYTES

    total = record.timings.get("total")
    parts = [
        *texts_in_words(record),
        f"kernel {visible(survey.kernel)}",
        *([] if total is None else [f"took {seconds_text(total.median_s)}"]),
        f"memory about {bytes_text(max(0, survey.peak_bytes - BASE_BYTES))} in addition to torch's own",
        f"full attention matrices would take {bytes_text(survey.full_bytes)}",
    ]
    return Text("\n".join(filled(parts, screen.width)), style="dim")


def sinks_are(least: float) -> str:
    """The definition of a sink key in words. `least` is its least fraction of all attention."""
    return f"sinks (at least {percent_text(least)} of all attention and {SINK_LIFT:g} × uniform, from most queries)"


def sinks_line(record: Record, listed: Sequence[HeadStatistics], least: float, screen: Screen) -> Text:
    """Every sink key by head, with its fraction of all attention and its ratio to uniform."""
    texts = [
        f"head {head.head}: "
        + ", ".join(
            f"{key_name(record, s.sequence, s.key)} {percent_text(s.share)} (uniform {percent_text(s.uniform)})"
            for s in head.sink_keys
        )
        for head in listed
        if head.sink_keys
    ]
    return Text(
        "\n".join(labelled(f"{sinks_are(least)}:", texts or ["none"], screen.width)),
        style="magenta" if texts else "dim",
    )


def labelled(label: str, parts: list[str], width: int) -> list[str]:
    """Lines of parts behind a label, which has a line of its own where the first part has no room beside it."""
    beside = f"{label} {parts[0]}"
    return filled([beside, *parts[1:]], width) if cell_len(beside) <= width else [label, *filled(parts, width)]


def _checks(record: Record, survey: HeadsSummary, options: ViewOptions, screen: Screen) -> Text:
    ok = record.self_check.ok
    verdict = Text("self-check ok: " if ok else "self-check FAILED: ", style="bold green" if ok else "bold red")
    if ok and not options.verbose:
        brief = checks_in_brief(survey.checks) + reducer_text(record, [survey])
        return verdict.append(brief, style="not bold default")
    lines = "\n".join(filled([agreement(check) for check in survey.checks], screen.width, "; "))
    return verdict.append(f"\n{lines}{reducer_text(record, [survey])}", style="not bold default")


# --------------------------------------------------------------------------------------------------------- single cells


def strong_places(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> RenderableType:
    """Per head the keys with most attention, the cells with the largest ratio to uniform, and the largest score."""
    rows = plain_table(("head", True))
    for name in ("receives most (× uniform)", "stands out: query → key (× uniform)"):
        rows.add_column(name, ratio=1, overflow="fold")
    if screen.width >= _WIDE:
        rows.add_column("largest score", no_wrap=True)
    shown = listed if options.everything else listed[:MAX_PLACES]
    for head in shown:
        row = [str(head.head), _receivers(record, head), _standing_out(record, head, options)]
        rows.add_row(*row, *([_top_score(record, head)] if screen.width >= _WIDE else []))
    if len(shown) < len(listed):
        rows.add_row("⋮", left_out(len(listed) - len(shown)))
    return rows


_WIDE, MAX_PLACES, _MOST = 120, 8, 3
_TOKEN_WIDTH, _SHORT_TOKEN = 12, 9
"""The largest width of a token in a list, and of two tokens on a line."""


def _receivers(record: Record, head: HeadStatistics) -> str:
    """The keys with most attention over all sequences: `12 “the” 3.4 % ×5.2`."""
    place = [other.head for other in record.heads].index(head.head)
    received, uniform = record.arrays["received"][:, place], record.arrays["uniform_received"]
    uniform = uniform[:, min(place, uniform.shape[1] - 1)]
    totals = np.nansum(received.astype(np.float64), axis=1, keepdims=True)
    weights = np.nan_to_num(received / np.where(totals > 0, totals, 1.0))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(received.astype(np.float64) / uniform)
    lines = []
    for flat in np.argsort(-weights.ravel(), kind="stable")[:_MOST].tolist():
        b, key = divmod(flat, received.shape[1])
        times = ratios[b, key]
        name = key_name(record, b, key - record.first_key(b), _SHORT_TOKEN)
        lines.append(f"{name} {percent_text(float(weights[b, key]))} ×{short_text(float(times))}")
    return "\n".join(lines)


def _standing_out(record: Record, head: HeadStatistics, options: ViewOptions) -> str:
    return "\n".join(
        f"{query_name(record, cell.sequence, cell.query, _SHORT_TOKEN)} → "
        f"{key_name(record, cell.sequence, cell.key, _SHORT_TOKEN)} "
        f"{weight_text(cell.share, options.precision)} ×{short_text(cell.lift)}"
        for cell in head.largest[:_MOST]
        if cell.lift > 1
    )


def _top_score(record: Record, head: HeadStatistics) -> str:
    if head.max_score is None or head.max_score_at is None:
        return "–"
    b, query, key = head.max_score_at
    return f"{short_text(head.max_score)} at {query_name(record, b, query)} → {key_name(record, b, key)}"


def query_name(record: Record, sequence: int, index: int, width: int = _TOKEN_WIDTH) -> str:
    """A query's position and token, `25 “for”`, with its sequence if there are several, `1:25 “for”`."""
    return _named(record.sequences, sequence, index, width)


def key_name(record: Record, sequence: int, index: int, width: int = _TOKEN_WIDTH) -> str:
    """A key's position and token, with its sequence if there are several."""
    return _named(record.keys, sequence, index, width)


def _named(family: Sequence[TokenSequence], sequence: int, index: int, width: int) -> str:
    several = f"{sequence}:" if len(family) > 1 else ""
    return token_at(token_text(family[sequence], index), f"{several}{index}", width)


_ROUNDING = 1e-5
"""A smaller rest of a row is a rounding error."""


@dataclass(frozen=True, eq=False)
class CornerCells:
    """The kept block of a head's pattern in a sequence, under its `title`.

    `weights` `[row, column]` are NaN in masked cells, and in rows marked `is_broken` `[row]`, whose queries see keys
    but have NaN weights.
    """

    title: str
    weights: Array
    is_broken: Array

    @property
    def largest(self) -> float:
        """The top of the scale."""
        return float(np.nanmax(self.weights, initial=0.0)) or 1.0

    def caption(self, precision: int) -> str:
        """The meaning of the shades and signs that occur."""
        is_closed = bool(np.isnan(self.weights[~self.is_broken]).any())
        signs = " · 0 masked" * is_closed + f" · {NAN_SIGN} not a number" * bool(self.is_broken.any())
        return f"shade linear, 0 … {weight_text(self.largest, precision)}{signs}"


def corner_cells(record: Record, corner: Corner, place: int, sequence: int, *, layer: str = "") -> CornerCells:
    """The kept block of the head at an index of the head axis. `layer` is the layer's name, if there are several."""
    arrays, queries = record.arrays, slice(corner.first_query, corner.first_query + corner.n_queries)
    visible = arrays["visible"][sequence]
    has_keys = visible[min(place, len(visible) - 1), queries] > 0
    is_broken = has_keys & np.isnan(arrays["entropy"][sequence, place, queries])
    title = f"{where(record, sequence, layer, record.heads[place].head)} · cells"
    return CornerCells(title, arrays["corner"][sequence, place], is_broken)


def corner_view(
    record: Record,
    corner: Corner,
    place: int,
    sequence: int,
    options: ViewOptions,
    screen: Screen,
    *,
    layer: str = "",
) -> RenderableType:
    """The kept block of the pattern, cell by cell, as far as it fits. `layer` is the layer's name, if there are
    several."""
    cells = corner_cells(record, corner, place, sequence, layer=layer)
    width = options.precision + 2
    rows = balanced(corner.n_queries, corner.n_queries if options.everything else _CORNER_ROWS)
    room = screen.width - _TOKEN_WIDTH - 8
    if corner.n_keys * (width + 1) > room:  # keys are hidden, but the largest of each row is listed
        room -= _LARGEST_WIDTH + 1
    keys = balanced(corner.n_keys, corner.n_keys if options.everything else max(2, room // (width + 1)))
    drawn = plain_table(("query", False), gap=1)
    for key in keys.shown:
        index = corner.first_key + key - record.first_key(sequence)
        name = fitted(token_text(record.keys[sequence], index), width)
        drawn.add_column(Text(f"{name}\n{index}"), justify="right", no_wrap=True, min_width=width)
    if keys.hidden:
        drawn.add_column(Text("largest"), no_wrap=True, max_width=_LARGEST_WIDTH)
    for number, row in enumerate(rows.shown):
        if rows.hidden and number == rows.before:
            drawn.add_row(Text(f"⋮ {rows.hidden} (--all)", style="dim"))
        index = corner.first_query + row - record.first_query(sequence)
        texts = [_corner_cell(cells, (row, key), options, screen) for key in keys.shown]
        texts += [Text(_largest_of_row(record, corner, cells.weights[row], sequence, options))] if keys.hidden else []
        drawn.add_row(Text(query_name(record, sequence, index), style="bold"), *texts)
    hidden = f", {count_of(keys.hidden, 'key')} between not drawn (--all)" if keys.hidden else ""
    return Group(title_rule(cells.title), drawn, Text(cells.caption(options.precision) + hidden, style="dim"))


_CORNER_ROWS, _LARGEST_WIDTH = 40, 18


def _largest_of_row(record: Record, corner: Corner, weights: Array, sequence: int, options: ViewOptions) -> str:
    """The largest weight of a row with its key; a dash if all are masked or NaN."""
    if np.isnan(weights).all():
        return "–"
    key = int(np.nanargmax(weights))
    index = corner.first_key + key - record.first_key(sequence)
    name = token_at(token_text(record.keys[sequence], index), index, _TOKEN_WIDTH)
    return f"{weight_text(float(weights[key]), options.precision)} {name}"


def _corner_cell(cells: CornerCells, at: tuple[int, int], options: ViewOptions, screen: Screen) -> Text:
    weight = float(cells.weights[at])
    if math.isnan(weight):
        return Text(NAN_SIGN, style="red") if cells.is_broken[at[0]] else Text("0", style=EMPTY)
    style = shade(level_of(weight, cells.largest)) if screen.colour else ""
    return Text(weight_text(weight, options.precision), style=style)


@dataclass(frozen=True)
class Strongest:
    """The top keys of a query by name with their weights, in descending order. `rest` is the remaining weight, empty if
    none.

    If there are no keys, `instead` says why.
    """

    keys: tuple[tuple[str, str], ...]
    rest: str
    instead: str = ""


def requested_queries(record: Record, sequence: int) -> list[tuple[int, int]]:
    """The requested queries within a sequence, each after its index in the request."""
    assert record.survey is not None, "only a record of heads has them"
    first, n_tokens = record.first_query(sequence), len(record.sequences[sequence].tokens)
    return [(number, q) for number, q in enumerate(record.survey.kept.queries) if 0 <= q - first < n_tokens]


def requested_title(record: Record, sequence: int, query: int, *, layer: str = "") -> str:
    """A requested query with its number of visible keys, and, if all heads agree, its uniform weight."""
    seen = sorted({int(n) for n in record.arrays["visible"][sequence, :, query]})
    n_visible = (
        count_of(seen[0], "visible key", grouped=True)
        if len(seen) == 1
        else f"{seen[0]:,} to {seen[-1]:,} visible keys"
    )
    uniform = f", {percent_text(1 / seen[0])} each if uniform" if len(seen) == 1 and seen[0] else ""
    name = query_name(record, sequence, query - record.first_query(sequence))
    return f"{where(record, sequence, layer)} · query {name} · {n_visible}{uniform}"


def strongest_of(record: Record, place: int, sequence: int, number: int) -> Strongest:
    """The top keys of the head at `place` for the requested query `number`."""
    keys, weights = (record.arrays[name][sequence, place, number].tolist() for name in ("top_keys", "top_shares"))
    first = record.first_key(sequence)
    named = tuple(
        (key_name(record, sequence, key - first), percent_text(weight))
        for key, weight in zip(keys, weights, strict=True)
        if key >= 0
    )
    if not named:
        return Strongest((), "", "not a number" if any(map(math.isnan, weights)) else "no visible key")
    left = 1 - sum(weights)
    return Strongest(named, percent_text(left) if left > _ROUNDING else "")


def rest_name(head: HeadStatistics) -> str:
    """The name of the weight that the top keys leave."""
    return "the rest" if head.learned_sink is None else "the rest and the sink logit"


def strongest_keys(
    record: Record, listed: Sequence[HeadStatistics], sequence: int, *, layer: str = ""
) -> RenderableType:
    """The top keys of the requested queries in every head. `layer` is an optional name."""
    parts: list[RenderableType] = []
    for number, query in requested_queries(record, sequence):
        drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
        drawn.add_column(justify="right", no_wrap=True)
        drawn.add_column(overflow="fold")
        for place in places_of(record, [head.head for head in listed]):
            strongest, head = strongest_of(record, place, sequence, number), record.heads[place]
            texts = [f"{name} {weight}" for name, weight in strongest.keys] or [strongest.instead]
            texts += [f"{rest_name(head)} {strongest.rest}"] if strongest.rest else []
            drawn.add_row(f"head {head.head}", ", ".join(texts))
        parts.append(Group(title_rule(requested_title(record, sequence, query, layer=layer)), drawn))
    return Group(*parts)
