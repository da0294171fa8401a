"""The terminal view of effects: a map of heads or a coloured text, the table of removals by size, and the verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from operator import attrgetter

import numpy as np
from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from mhacli.record.effect import Effect, EffectSummary, numbers_of
from mhacli.record.record import InspectedLayer, Record, texts_of
from mhacli.render.base.doc import Column, Grid, Table, column
from mhacli.render.base.format import count_of, flowing, type_text
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import short_name
from mhacli.render.base.terminal import table
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import Unit, shown
from mhacli.text.tokens import AttentionKind

_KINDS = {"class": "the class ", "tag": "the tag ", "span": "the answer "}
"""What a target is that is no token."""
AT_POSITION = ("token", "tag", "vector")
"""What is measured at one position."""
_MAX_ROWS = 7
"""The largest number of table rows."""
_RELIABLE = 0.8
"""A screening whose rank correlation is lower has missed heads that matter."""
_DROPPED = ("d_logit", "first_order", "kl", "d_logprob", "type", "rank", "d_output")
"""Columns from the one that a narrow screen leaves out last to that which it leaves out first."""
_SIGNED = ("d_logit", "first_order", "d_logprob")
"""The numbers that can be below 0."""


def effect_view(record: Record, options: ViewOptions, screen: Screen) -> Iterator[RenderableType]:
    """The sections of a record with effects: the answer, the map of heads or the coloured text, the table, the verification."""
    summary = record.effect
    assert summary is not None, "a record with effects has a summary"
    question, proof = _question(record, summary, screen), _proof(summary, screen)
    if not summary.verified.ok:
        yield from (question, proof)
        return
    yield from (_answer(record, summary, screen), Text(""), question, Text(""))
    of_heads, texts = head_grids(record), [row for row in effect_rows(record) if row.tokens]
    yield from grids(of_heads, screen) if of_heads else ()
    yield from grids([_grid(record, [row], row.tokens) for row in texts], screen, form="numbers", everything=True)
    yield Text("")
    yield from table(effect_table(record, summary, None if options.everything else _MAX_ROWS), screen.width)
    yield from _interaction(record, summary)
    yield from _rank_words(summary, screen)
    yield proof


def effect_words(record: Record, screen: Screen) -> tuple[Text, ...]:
    """The lines about what was measured and removed, and the verification."""
    summary = record.effect
    assert summary is not None
    more = (*_rank_words(summary, screen),) if summary.verified.ok else ()
    answer = (_answer(record, summary, screen),) if summary.verified.ok else ()
    return _question(record, summary, screen), *more, _proof(summary, screen), *answer


def _question(record: Record, summary: EffectSummary, screen: Screen) -> Text:
    """The measured logit or vector, and what was removed."""
    token = token_label(record.sequences[0].tokens[summary.position])
    where = f"at position {summary.position} “{token}”" if summary.measured in AT_POSITION else "of the text"
    measured = "the output vector" if summary.target is None else measured_words(summary)
    parts = [Text(f"measured: {measured} {where}", style="bold")]
    if summary.target is not None:
        parts.append(Text(f"without removal {shown(summary.logit, 'number')}"))
    if summary.target is not None and summary.rank is not None:
        parts += [
            Text(f"log probability of “{token_label(summary.target)}” {shown(summary.logprob, 'number')}"),
            Text(f"rank {summary.rank}" + ", the most likely" * (summary.rank == 0)),
        ]
    return flowing([*parts, *map(Text, dict.fromkeys(map(_removed, record.effects)))], screen.width)


def _removed(effect: Effect) -> str:
    """The description of a removal."""
    if effect.removed == "edge":
        return "removed: one attention weight at a time; the rest of its row is renormalised"
    if effect.removed == "spans":
        first, second = map(token_label, effect.spans)
        return f"removed: the attention from “{second}” to “{first}” in {count_of(len(effect.layers), 'layer')}"
    by = {"zero": "zeros", "mean": "its mean over the text"}.get(effect.replace, "that for another text")
    where = "at all positions" if effect.at is None else f"at position {effect.at}"
    return f"removed: the output of a head, replaced by {by} {where}"


# --------------------------------------------------------------------------------------------------------- the pictures


@dataclass(frozen=True)
class EffectRow:
    """The heads of a layer with their effects, None for a head that was not removed; or the `tokens` of a text, each with the
    effect of the edge to it."""

    name: str
    effects: tuple[Effect | None, ...]
    tokens: tuple[str, ...] = ()


def effect_rows(record: Record) -> Iterator[EffectRow]:
    """A row for each layer with heads removed one at a time, then one for the edges of each head, or of each layer if they were
    removed from all its heads together. A layer of mha has no name."""
    by_head = {(e.kind, e.layer, e.head): e for e in record.effects if e.removed == "head"}
    layers = [(short_name(layer, record.layers), layer.kind, layer.layer, layer.n_heads) for layer in record.layers]
    if not layers:
        layers = [("", effect.kind, 0, record.config.n_heads) for effect in record.effects[:1]]
    for name, kind, number, n_heads in layers:
        effects = tuple(by_head.get((kind, number, head)) for head in range(n_heads))
        if any(effects):
            yield EffectRow(name, effects)
    edges: dict[str, list[Effect]] = {}
    for effect in record.effects:
        if effect.removed == "edge":
            edges.setdefault(removal_name(effect, record), []).append(effect)
    for name, of_name in edges.items():
        _, keys = texts_of(of_name[0].kind, record.sequences, record.context)
        yield EffectRow(name, tuple(of_name), tuple(token_label(keys[0].tokens[edge.key or 0]) for edge in of_name))


def largest_change(record: Record) -> float:
    """The end of the scale of a record's effects."""
    changes = (None if record.effect is None else record.effect.change_of(effect) for effect in record.effects)
    return max((abs(change) for change in changes if change is not None), default=0.0)


def meaning_of(summary: EffectSummary) -> str:
    """The meaning of a change."""
    if summary.metric != "d_logit":
        return "change of the output by the removal, relative to its length"
    at = f" at {summary.position}" if summary.measured in AT_POSITION else ""
    return f"change of {measured_words(summary)}{at} · negative: what was removed supports the target"


def effect_grids(record: Record) -> list[Grid]:
    """The map of heads, and the texts that queries read in parts of a few tokens."""
    drawn = head_grids(record)
    for row in effect_rows(record):
        for start in range(0, len(row.tokens), _ACROSS):
            part = slice(start, start + _ACROSS)
            tokens = row.tokens[part]
            drawn.append(_grid(record, [EffectRow(row.name, row.effects[part], tokens)], tokens))
    return drawn


_ACROSS = 24
"""The most tokens of a text in a row."""


def head_grids(record: Record) -> list[Grid]:
    """The grid with a row per layer and a column per head, where a head that was not removed is blank; none without heads."""
    rows = [row for row in effect_rows(record) if not row.tokens]
    corner = "layer" if any(row.name for row in rows) else "head"  # a layer of mha has no name
    n_columns = max((len(row.effects) for row in rows), default=0)
    return [_grid(record, rows, [*map(str, range(n_columns))], corner)] if rows else []


def _grid(record: Record, rows: Sequence[EffectRow], columns: Sequence[str], corner: str = "") -> Grid:
    """The changes by removals, NaN where nothing was removed."""
    summary = record.effect
    assert summary is not None
    width = max(len(corner), *(cell_len(row.name) for row in rows))
    effects = {(n, place): effect for n, row in enumerate(rows) for place, effect in enumerate(row.effects) if effect}
    values = np.full((len(rows), len(columns)), np.nan)
    for cell, effect in effects.items():
        values[cell] = summary.change_of(effect)
    return Grid(
        values=values,
        allowed=~np.isnan(values),
        rows=[f"{row.name:>{width}}" for row in rows],
        columns=columns,
        top=largest_change(record) or 1.0,
        scale="change",
        unit="brief",
        corner=corner,
        meaning=meaning_of(summary),
        has_all_rows=True,
        about=lambda *cell: change_words(record, effects[cell]) if np.isfinite(values[cell]) else "",
    )


# ------------------------------------------------------------------------------------------------------------ the table


def effect_table(record: Record, summary: EffectSummary, most: int | None = None) -> Table[Effect]:
    """A row for each removal, the largest change first. The column that ranks them is never left out."""
    ranked = sorted(record.effects, key=lambda effect: -abs(summary.change_of(effect) or 0.0))
    columns: list[Column[Effect]] = [column("effect", "removed", lambda effect: removal_name(effect, record))]
    if any(effect.removed == "edge" for effect in ranked):
        columns.append(column("effect", "edge", lambda effect: _edge_text(record, effect)))
    if any(effect.removed == "head" for effect in ranked):
        columns.append(column("effect", "type", lambda effect: _type(record, effect), drop=_DROPPED.index("type") + 1))
    columns += [
        number_column(name, drop=0 if name == summary.metric else _DROPPED.index(name) + 1)
        for name in numbers_of(record.effects)
    ]
    return Table(columns=columns, rows=ranked, most=most)


def number_column(name: str, drop: int = 0) -> Column[Effect]:
    """The column of a number of effects."""
    unit: Unit = "integer" if name == "rank" else "change" if name in _SIGNED else "size"
    return column("effect", name, attrgetter(name), unit, drop=drop, meaning="")  # the scale says it


def removal_words(effect: Effect, record: Record) -> str:
    """What was removed: `5.1 · induction`, or with the edge, `5.1 · 7 mat → 2 cat`."""
    more = (_edge_text(record, effect), _type(record, effect))
    return " · ".join([removal_name(effect, record), *filter(None, more)])


def change_words(record: Record, effect: Effect) -> str:
    """What was removed, with all numbers of its effect: `5.1 · mixed: Δlogit -0.2500, KL 0.01`."""
    columns = map(number_column, numbers_of(record.effects))
    numbers = (f"{column.heading} {column.text(effect)}" for column in columns)
    return f"{removal_words(effect, record)}: {', '.join(numbers)}"


def _type(record: Record, effect: Effect) -> str:
    if effect.removed != "head":
        return ""
    layer = layer_of(record, effect.kind, effect.layer)
    layer_key = (0, "") if layer is None else (layer.layer, layer.name)
    head = next((h for h in record.heads if h.head == effect.head and (h.layer, h.attention) == layer_key), None)
    return "" if head is None else type_text(head).partition(" (")[0]


def _edge_text(record: Record, effect: Effect) -> str:
    if effect.query is None or effect.key is None:
        return ""
    queries, keys = texts_of(effect.kind, record.sequences, record.context)
    query, key = token_label(queries[0].tokens[effect.query]), token_label(keys[0].tokens[effect.key])
    return f"{effect.query} {query} → {effect.key} {key}{' (masked)' if effect.masked else ''}"


def _interaction(record: Record, summary: EffectSummary) -> Iterator[Text]:
    """The change by all heads together, compared with the sum of the changes by each alone."""
    total = sum(summary.change_of(effect) or 0.0 for effect in record.effects if effect.removed == "head")
    for effect in record.effects:
        if effect.removed == "heads" and summary.metric == "d_logit":
            together = summary.change_of(effect) or 0.0
            yield Text(
                f"together {shown(together, 'change')}, the sum of each alone {shown(total, 'change')}: "
                f"interaction {shown(together - total, 'change')}"
            )


def _rank_words(summary: EffectSummary, screen: Screen) -> Iterator[Text]:
    """The rank correlation of estimates with the effects."""
    screening = summary.screening
    if screening is not None:
        words = [
            f"of {count_of(screening.n_heads, 'head')}, all estimated to first order, the {screening.n_largest} largest and "
            f"{count_of(screening.n_others, 'other')} by chance were removed",
            f"rank correlation of 1st order with Δlogit {shown(screening.correlation, 'change', 2)}",
        ]
        has_others = screening.n_largest + screening.n_others < screening.n_heads
        is_weak = has_others and (screening.correlation is None or screening.correlation < _RELIABLE)
        words += ["1st order misses heads that matter here: run without --screen"] if is_weak else []
        yield flowing([Text(part, style="yellow" if is_weak else "") for part in words], screen.width)


def _proof(summary: EffectSummary, screen: Screen) -> Text:
    """Whether a second computation of the removals agrees with the first."""
    proof = summary.verified
    words, style = "not verified: no removal was computed a second time", "yellow"
    if not proof.ok:
        words, style = "NOT verified: a second computation of the removals disagrees", "bold red"
    elif proof.n:
        repeated = f"verified: {count_of(proof.n, 'removal')} repeated by a second method"
        within = f"equal within {shown(proof.error, 'number')} (tolerance {shown(proof.tolerance, 'number')})"
        words, style = f"{repeated}, {within}", "green"
    floor = Text(f"changes up to {shown(summary.floor, 'number')} are noise and print as 0", style="dim")
    return flowing([Text(words, style=style), floor], screen.width)


# ----------------------------------------------------------------------------------------------------------- the answer


def _answer(record: Record, summary: EffectSummary, screen: Screen) -> Text:
    """A sentence on whether the removals matter: the largest change, and its effect on the prediction."""
    sizes = [abs(summary.change_of(effect) or 0.0) for effect in record.effects]
    strongest, largest = max(zip(record.effects, sizes, strict=True), key=lambda pair: pair[1])
    name, s = _subject(strongest, record), "" if strongest.removed == "heads" else "s"
    measured = "the output vector" if summary.target is None else measured_words(summary)
    n, n_without = len(sizes), sizes.count(0.0)
    remainder = f"; {n_without} of {n} removals change nothing" if n_without else ""
    sentence = f"{name} matter{s}{' most' * (n > 1)}: without {'it' if s else 'them'} "
    sentence += _consequence(strongest, summary, measured) + remainder
    if not largest:
        sentence = f"nothing removed matters here: {measured} stays as it is"
    return flowing([Text(word, style="bold") for word in sentence.split(" ")], screen.width, " ")


def _subject(effect: Effect, record: Record) -> str:
    """What was removed, as the subject of a sentence."""
    name = removal_name(effect, record)
    if effect.removed == "edge":
        return f"the weight {_edge_text(record, effect)} of {name}"
    if effect.removed == "spans":
        return f"what “{token_label(effect.spans[1])}” reads of “{token_label(effect.spans[0])}”"
    return name if name.startswith("head") else f"head{'s' * (effect.removed == 'heads')} {name}"


def _consequence(effect: Effect, summary: EffectSummary, measured: str) -> str:
    """A clause on the change by a removal, and on the prediction."""
    change = summary.change_of(effect) or 0.0
    if summary.target is None:
        return f"{measured} moves by {shown(change, 'percent')} of its length"
    words = f"{measured} {'falls' if change < 0 else 'rises'} by {shown(abs(change), 'number')}"
    if summary.versus is not None or summary.logprob is None or effect.d_logprob is None:
        return words
    before, after = (shown(exp(p), "percent") for p in (summary.logprob, summary.logprob + effect.d_logprob))
    was, now = (rank == 0 for rank in (summary.rank, effect.rank))
    kept = "is still" if was and now else "is now" if now else "is no longer" if was else "is not"
    return f"{words}, its probability goes from {before} to {after}, and it {kept} the most likely"


# --------------------------------------------------------------------------------------------------------------- names


def measured_words(summary: EffectSummary) -> str:
    """The name of the measured logit, or difference of two logits."""
    if summary.measured in ("score", "metric"):
        return f"the {summary.measured}"
    minus = "" if summary.versus is None else f" minus that of “{token_label(summary.versus)}”"
    return f"the logit of {_KINDS.get(summary.measured, '')}“{token_label(summary.target or '')}”{minus}"


def removal_name(effect: Effect, record: Record) -> str:
    """The name of a removal, such as `5.1`; `head 1` in a layer of mha."""
    if effect.removed == "spans":
        return " → ".join(map(visible, effect.spans))
    if effect.removed == "heads":
        kinds = effect.kinds or (effect.kind,) * len(effect.heads)
        pairs = zip(kinds, effect.heads, strict=True)
        return " + ".join(_head_name(kind, layer, head, record) for kind, (layer, head) in pairs)
    if effect.layer is not None and effect.head is not None:
        return "head " * (not record.layers) + _head_name(effect.kind, effect.layer, effect.head, record)
    layer = layer_of(record, effect.kind, effect.layer)
    return "all heads" if layer is None else f"layer {short_name(layer, record.layers)}"


def _head_name(kind: AttentionKind, number: int, head: int, record: Record) -> str:
    """`5.1`, `cross 5.1`; `1` in a layer of mha."""
    layer = layer_of(record, kind, number)
    return str(head) if layer is None else f"{short_name(layer, record.layers)}.{head}"


def layer_of(record: Record, kind: AttentionKind, number: int | None) -> InspectedLayer | None:
    """The layer of a checkpoint, None for a layer of mha."""
    return next((layer for layer in record.layers if (layer.kind, layer.layer) == (kind, number)), None)
