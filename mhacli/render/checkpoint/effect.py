"""The terminal view of effects: a map of heads or a coloured text, the table of removals by size, and the verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp
from operator import attrgetter

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from mhacli.record.effect import Effect, EffectSummary, numbers_of
from mhacli.record.record import Record, texts_of
from mhacli.render.base.doc import Column, Grid, Table, Unit, column, shown
from mhacli.render.base.format import count_of, flowing, number_text, or_dash, percent_text, type_text
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.terminal import table
from mhacli.render.checkpoint.effect_map import AT_POSITION, EffectMap, layer_of, measured_words, removal_name
from mhacli.text.escape import token_label

_MAX_ROWS = 7
"""The largest number of table rows."""
_RELIABLE = 0.8
"""A screening whose rank correlation is lower has missed heads that matter."""
_SMALL = 0.01
"""The relative change of the output vector below which a removal hardly matters."""
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
    shown = EffectMap.of(record)
    if shown.rows:
        yield from grids([head_grid(shown)], screen)
    texts = [effect_grid(shown, [read.name], read.tokens, [read.effects]) for read in shown.texts]
    yield from grids(texts, screen, form="numbers", everything=True)
    yield Text("")
    yield from table(effect_table(record, summary, None if options.everything else _MAX_ROWS), screen.width)
    yield from _interaction(record, summary)
    yield from _masked_words(record, screen)
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
        parts.append(Text(f"without removal {or_dash(summary.logit, number_text)}"))
    if summary.target is not None and summary.rank is not None:
        parts += [
            Text(f"log probability of “{token_label(summary.target)}” {or_dash(summary.logprob, number_text)}"),
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


def effect_grids(record: Record) -> list[Grid]:
    """The map of heads, and the texts that queries read in parts of a few tokens."""
    shown = EffectMap.of(record)
    drawn = [head_grid(shown)] if shown.rows else []
    for read in shown.texts:
        for start in range(0, len(read.effects), _ACROSS):
            part = slice(start, start + _ACROSS)
            drawn.append(effect_grid(shown, [read.name], read.tokens[part], [read.effects[part]]))
    return drawn


_ACROSS = 24
"""The most tokens of a text in a row."""


def head_grid(shown: EffectMap) -> Grid:
    """A row per layer, a column per head; a head that was not removed is blank."""
    corner = "layer" if any(row.name for row in shown.rows) else "head"  # a layer of mha has no name
    width = max(len(corner), *(len(row.name) for row in shown.rows))
    names = [f"{row.name:>{width}}" for row in shown.rows]
    return effect_grid(shown, names, [*map(str, range(shown.n_columns))], [row.effects for row in shown.rows], corner)


def effect_grid(
    shown: EffectMap,
    rows: Sequence[str],
    columns: Sequence[str],
    effects: Sequence[Sequence[Effect | None]],
    corner: str = "",
) -> Grid:
    """The changes by removals, NaN where nothing was removed."""
    values = np.full((len(rows), len(columns)), np.nan)
    words = {}
    for row, of_row in enumerate(effects):
        for place, effect in enumerate(of_row):
            change = None if effect is None else shown.summary.change_of(effect)
            if effect is not None and change is not None:
                values[row, place] = change
                words[row, place] = change_words(shown, effect)
    return Grid(
        values=values,
        allowed=~np.isnan(values),
        rows=rows,
        columns=columns,
        top=shown.largest or 1.0,
        scale="change",
        unit="brief",
        corner=corner,
        meaning=shown.meaning,
        has_all_rows=True,
        about=lambda row, place: words.get((row, place), ""),
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


def change_words(shown: EffectMap, effect: Effect) -> str:
    """What was removed, with all numbers of its effect: `5.1 · mixed: Δlogit -0.2500, KL 0.01`."""
    columns = map(number_column, numbers_of(shown.record.effects))
    numbers = (f"{column.heading} {column.text(effect)}" for column in columns)
    return f"{removal_words(effect, shown.record)}: {', '.join(numbers)}"


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


def _masked_words(record: Record, screen: Screen) -> Iterator[Text]:
    """The number of removals of masked weights, which change nothing."""
    n = sum(effect.masked for effect in record.effects)
    if n:
        words = f"{n} of {count_of(len(record.effects), 'removal')} affect only masked weights: exactly 0"
        yield flowing([Text(words, style="dim")], screen.width)


def _rank_words(summary: EffectSummary, screen: Screen) -> Iterator[Text]:
    """The rank correlation of estimates with the effects."""
    screening = summary.screening
    if screening is not None:
        words = [
            f"of {count_of(screening.n_heads, 'head')}, all estimated to first order, the {screening.n_largest} largest and "
            f"{count_of(screening.n_others, 'other')} by chance were removed",
            f"rank correlation of 1st order with Δlogit {or_dash(screening.correlation, '{:+.2f}'.format)}",
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
        within = f"equal within {number_text(proof.error)} (tolerance {number_text(proof.tolerance)})"
        words, style = f"{repeated}, {within}", "green"
    floor = Text(f"changes up to {number_text(summary.floor)} are noise and print as 0", style="dim")
    return flowing([Text(words, style=style), floor], screen.width)


# ----------------------------------------------------------------------------------------------------------- the answer


def _answer(record: Record, summary: EffectSummary, screen: Screen) -> Text:
    """A sentence on whether the removals matter: the largest change, and its effect on the prediction."""
    sizes = [abs(summary.change_of(effect) or 0.0) for effect in record.effects]
    strongest, largest = max(zip(record.effects, sizes, strict=True), key=lambda pair: pair[1])
    name, s = _subject(strongest, record), "" if strongest.removed == "heads" else "s"
    measured = "the output vector" if summary.target is None else measured_words(summary)
    n, n_without = len(sizes), sizes.count(0.0)
    if not largest:
        clause = f"{name} does not matter here" if n == 1 else f"none of the {n} removals matters here"
        return _sentence(f"{clause}: {measured} stays as it is", screen)
    is_small, consequence = _consequence(strongest, summary, measured)
    verb = f"matter{s} most" if n > 1 else f"hardly matter{s}" if is_small else f"matter{s}"
    remainder = f"; {n_without} of {n} removals change nothing" if n_without else ""
    return _sentence(f"{name} {verb}: without {'it' if s else 'them'} {consequence}{remainder}", screen)


def _sentence(words: str, screen: Screen) -> Text:
    return flowing([Text(word, style="bold") for word in words.split(" ")], screen.width, " ")


def _subject(effect: Effect, record: Record) -> str:
    """What was removed, as the subject of a sentence."""
    name = removal_name(effect, record)
    if effect.removed == "edge":
        return f"the weight {_edge_text(record, effect)} of {name}"
    if effect.removed == "spans":
        return f"what “{token_label(effect.spans[1])}” reads of “{token_label(effect.spans[0])}”"
    return name if name.startswith("head") else f"head{'s' * (effect.removed == 'heads')} {name}"


def _consequence(effect: Effect, summary: EffectSummary, measured: str) -> tuple[bool, str]:
    """Whether the prediction stays the same as displayed, and a clause on the change by a removal."""
    change = summary.change_of(effect) or 0.0
    if summary.target is None:
        return change < _SMALL, f"{measured} moves by {percent_text(change)} of its length"
    words = f"{measured} {'falls' if change < 0 else 'rises'} by {number_text(abs(change))}"
    if summary.versus is not None or summary.logprob is None or effect.d_logprob is None:
        return False, words
    before, after = (percent_text(exp(p)) for p in (summary.logprob, summary.logprob + effect.d_logprob))
    was, now = (rank == 0 for rank in (summary.rank, effect.rank))
    kept = "is still" if was and now else "is now" if now else "is no longer" if was else "is not"
    is_small = before == after and was == now
    return is_small, f"{words}, its probability goes from {before} to {after}, and it {kept} the most likely"
