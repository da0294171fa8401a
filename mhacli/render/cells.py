"""Single cells of heads that were never computed whole: the strongest, a corner, and what chosen queries looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mhacli.errors import UsageError
from mhacli.heads import Corner, HeadStatistics
from mhacli.parts import TokenSequence
from mhacli.record import Record
from mhacli.render.colours import level_of, shade
from mhacli.render.options import Screen, ViewOptions, balanced
from mhacli.render.words import count_of, fitted, percent_text, share_text, short_text, token_text


def places_of(record: Record, heads: Sequence[int]) -> list[int]:
    """Where heads stand on the head axis of the arrays. Raises `UsageError` for one that the record does not have."""
    known = [head.head for head in record.heads]
    for head in heads:
        if head not in known:
            raise UsageError(f"head and map must name heads of the record, {listed_numbers(known)}, got {head}")
    return [known.index(head) for head in heads]


def listed_numbers(heads: Sequence[int]) -> str:
    """Heads as an error names them: `0 to 3`, or `1, 3`."""
    whole = list(heads) == list(range(heads[0], heads[-1] + 1))
    return f"{heads[0]} to {heads[-1]}" if whole and len(heads) > 2 else ", ".join(map(str, heads))


def where(record: Record, sequence: int, layer: str, head: int | None = None) -> str:
    """The title of what is drawn: its sequence and head; of a layer that has a name this, and the sequence if not alone."""
    text = f"sequence {sequence}" if not layer or len(record.sequences) > 1 else ""
    own = "" if head is None else f"head {head}"
    return " · ".join(part for part in ((layer, own, text) if layer else (text, own)) if part)


def strong_places(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> RenderableType:
    """Per head the keys that receive most, the cells that stand out most, and where the largest score is."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("head", justify="right", no_wrap=True)
    for name in ("receives most (× uniform)", "stands out: query → key"):
        table.add_column(name, ratio=1, overflow="fold")
    if screen.width >= _WIDE:
        table.add_column("largest score", no_wrap=True)
    shown = listed if options.everything else listed[:MAX_PLACES]
    for head in shown:
        row = [str(head.head), _receivers(record, head, options), _standing_out(record, head, options)]
        table.add_row(*row, *([_top_score(record, head)] if screen.width >= _WIDE else []))
    if len(shown) < len(listed):
        table.add_row("⋮", Text(f"{len(listed) - len(shown)} more (--all)", style="dim"))
    return table


_WIDE, MAX_PLACES, _MOST = 120, 8, 3


def _receivers(record: Record, head: HeadStatistics, options: ViewOptions) -> str:
    """The heavy hitters of all sequences: `the 12 .034 ×5.2`."""
    place = [known.head for known in record.heads].index(head.head)
    received, uniform = record.arrays["received"][:, place], record.arrays["uniform_received"]
    uniform = uniform[:, min(place, uniform.shape[1] - 1)]
    totals = np.nansum(received.astype(np.float64), axis=1, keepdims=True)
    shares = np.nan_to_num(received / np.where(totals > 0, totals, 1.0))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(received.astype(np.float64) / uniform)
    said = []
    for flat in np.argsort(-shares.ravel(), kind="stable")[:_MOST].tolist():
        b, key = divmod(flat, received.shape[1])
        times = ratios[b, key]
        name = key_name(record, b, key - record.first_key(b))
        said.append(f"{name} {percent_text(float(shares[b, key]))} ×{short_text(float(times))}")
    return "\n".join(said)


def _standing_out(record: Record, head: HeadStatistics, options: ViewOptions) -> str:
    return "\n".join(
        f"{_query_name(record, cell.sequence, cell.query)} → {key_name(record, cell.sequence, cell.key)} "
        f"{share_text(cell.share, options.precision)} ×{short_text(cell.lift)}"
        for cell in head.largest[:_MOST]
        if cell.lift > 1
    )


def _top_score(record: Record, head: HeadStatistics) -> str:
    if head.max_score is None or head.max_score_at is None:
        return "–"
    b, query, key = head.max_score_at
    return f"{short_text(head.max_score)} at {_query_name(record, b, query)} → {key_name(record, b, key)}"


def _query_name(record: Record, sequence: int, index: int) -> str:
    """A query's token and index, with its sequence where there are several."""
    return _named(record.sequences, sequence, index)


def key_name(record: Record, sequence: int, index: int) -> str:
    """A key's token and index, with its sequence where there are several."""
    return _named(record.keys, sequence, index)


def _named(family: Sequence[TokenSequence], sequence: int, index: int) -> str:
    several = f"{sequence}:" if len(family) > 1 else ""
    return f"{fitted(token_text(family[sequence], index), _TOKEN_WIDTH)} {several}{index}"


_TOKEN_WIDTH, _ROUNDING = 12, 1e-5


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
    """Any part of the pattern, cell by cell, as much as fits. `layer` is the name of the layer, where there are several."""
    shares = record.arrays["corner"][sequence, place]
    width = options.precision + 2
    rows = balanced(corner.n_queries, corner.n_queries if options.everything else _CORNER_ROWS)
    fit = max(2, (screen.width - _TOKEN_WIDTH - 8) // (width + 1))
    keys = balanced(corner.n_keys, corner.n_keys if options.everything else fit)
    largest = float(np.nanmax(shares, initial=0.0)) or 1.0
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("query", no_wrap=True)
    for key in keys.shown:
        index = corner.first_key + key - record.first_key(sequence)
        name = fitted(token_text(record.keys[sequence], index), width)
        table.add_column(Text(f"{name}\n{index}"), justify="right", no_wrap=True, min_width=width)
    for number, row in enumerate(rows.shown):
        if rows.hidden and number == rows.before:
            table.add_row(Text(f"⋮ {rows.hidden} (--all)", style="dim"))
        index = corner.first_query + row - record.first_query(sequence)
        cells = [_corner_cell(float(shares[row, key]), largest, options, screen) for key in keys.shown]
        table.add_row(Text(_query_name(record, sequence, index), style="bold"), *cells)
    head = record.heads[place].head
    hidden = f", {count_of(keys.hidden, 'key')} between not drawn (--all)" if keys.hidden else ""
    caption = f"shade linear, 0 … {share_text(largest, options.precision)} · 0 not allowed{hidden}"
    name = f"{where(record, sequence, layer, head)} · cells"
    title = Rule(Text(name, style="bold"), align="left", style="dim")
    return Group(title, table, Text(caption, style="dim"))


_CORNER_ROWS = 40


def _corner_cell(share: float, largest: float, options: ViewOptions, screen: Screen) -> Text:
    if math.isnan(share):
        return Text("0", style="dim")
    style = shade(level_of(share, largest)) if screen.colour else ""
    return Text(share_text(share, options.precision), style=style)


def strongest_keys(
    record: Record,
    listed: Sequence[HeadStatistics],
    sequence: int,
    options: ViewOptions,
    screen: Screen,
    *,
    layer: str = "",
) -> RenderableType:
    """What the asked queries looked at, in every head, the strongest first, of a layer that may have a name."""
    assert record.survey is not None, "only a record of heads has them"
    survey = record.survey
    parts: list[RenderableType] = []
    for number, query in enumerate(survey.kept.queries):
        if not 0 <= query - record.first_query(sequence) < len(record.sequences[sequence].tokens):
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for place in places_of(record, [head.head for head in listed]):
            shares = record.arrays["top_shares"][sequence, place, number].tolist()
            keys = record.arrays["top_keys"][sequence, place, number].tolist()
            said = ", ".join(
                f"{key_name(record, sequence, key - record.first_key(sequence))} {percent_text(share)}"
                for key, share in zip(keys, shares, strict=True)
                if key >= 0
            )
            has_sink = record.heads[place].learned_sink is not None
            left = 1 - sum(shares)
            others = "the rest and the learned sink" if has_sink else "the rest"
            rest = f", {others} {percent_text(left)}" if said and left > _ROUNDING else ""
            table.add_row(f"head {record.heads[place].head}", (said or "no key allowed") + rest)
        name = _query_name(record, sequence, query - record.first_query(sequence))
        seen = sorted({int(n) for n in record.arrays["visible"][sequence, :, query]})
        n_visible = (
            count_of(seen[0], "visible key", grouped=True)
            if len(seen) == 1
            else f"{seen[0]:,} to {seen[-1]:,} visible keys"
        )
        uniform = f", {percent_text(1 / seen[0])} each if uniform" if len(seen) == 1 and seen[0] else ""
        title = f"{where(record, sequence, layer)} · query {name} · {n_visible}{uniform}"
        parts.append(Group(Rule(Text(title, style="bold"), align="left", style="dim"), table))
    return Group(*parts)
