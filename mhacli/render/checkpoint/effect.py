"""The terminal view of effects: the answer, a map of heads or a coloured text, the table of
removals, the verification.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, floor, log10
from operator import attrgetter
from typing import NamedTuple, assert_never

import numpy as np
from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from mhacli.numbers import Unit, shown
from mhacli.record.effect import Effect, EffectSummary, numbers_of
from mhacli.record.record import CheckpointRecord, EffectRecord, Record, is_a, texts_of
from mhacli.render.base.doc import Column, Grid, Table, column
from mhacli.render.base.format import (
    configuration,
    count_of,
    flowing,
    plural,
    random_line,
    type_text,
)
from mhacli.render.base.grids import Form, grids
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import grouped
from mhacli.render.base.terminal import table
from mhacli.render.heads.table import beside_types
from mhacli.text.escape import token_label, visible

from .header import model_header, texts_read

_MOST_ROWS = 5
"""The most rows of the table."""
_ACROSS = 24
"""The most tokens of a text in a row of a picture."""
_RELIABLE = 0.8
"""A screening whose rank correlation is lower has missed heads that matter."""
_SIGNED = ("d_logit", "first_order", "d_logprob")
"""The numbers that can be below 0."""
_IT_IS = {
    (True, True): "is still",
    (False, True): "is now",
    (True, False): "is no longer",
    (False, False): "is not",
}
"""The verb before `the most likely`, by whether that holds before and after a removal."""


def effect_view(
    record: EffectRecord, options: ViewOptions, screen: Screen, *, has_map: bool = True
) -> Iterator[RenderableType]:
    """The sections of a record with effects: what was read, the answer, the map of heads or the
    coloured text unless a picture of it stands elsewhere, the table, the verification.
    """
    words = _words(record, screen)
    if is_a(record, CheckpointRecord):
        yield model_header(record, screen, in_brief=True)
    else:
        yield configuration(record, screen.width, *texts_read(record))
    yield Text("")
    yield from words[:2]
    if record.effect.verified.ok:
        panels = effect_grids(record) if has_map else ()
        if panels:
            form: Form = "numbers" if len(panels[0].rows) == 1 else "auto"
            yield from grids(panels, screen, form=form, everything=True)
            yield Text("")
        rows = effect_table(record, digits_of(record))
        most = None if options.everything else _MOST_ROWS
        yield from table(replace(rows, most=most), screen.width)
    yield from words[2:]


def effect_words(record: EffectRecord, screen: Screen) -> tuple[Text, ...]:
    """Whether the weights are random, then the answer, what was measured and removed, how good
    estimates are, and the verification last; without a verification no answer.
    """
    return *random_line(record), *_words(record, screen)


def _words(record: EffectRecord, screen: Screen) -> tuple[Text, ...]:
    """The words of effects, without what is known of the weights."""
    question = flowing(_question(record), screen.width)
    proof = _proof(record)
    if not record.effect.verified.ok:
        return question, proof
    answer = Text(_answer(record), "bold")
    return answer, question, *_together(record), *_screening(record.effect, screen), proof


def _question(record: EffectRecord) -> Iterator[str]:
    """What was measured, without removal too, and what was removed."""
    summary = record.effect
    yield f"measured: {measured_words(record)}"
    if summary.target is not None:
        yield f"without removal {shown(summary.logit, 'number')}"
        if summary.rank is not None:
            yield f"log probability {shown(summary.logprob, 'size')}"
            most_likely = ", the most likely" if summary.rank == 0 else ""
            yield f"rank {summary.rank}{most_likely}"
    yield from dict.fromkeys(map(_removal, record.effects))


def _removal(effect: Effect) -> str:
    """The description of a removal."""
    match effect.removed:
        case "edge":
            return "removed: one attention weight at a time; the rest of its row is renormalised"
        case "spans":
            first, second = map(token_label, effect.spans)
            return (
                f"removed: the attention from “{second}” to “{first}” in"
                f" {count_of(len(effect.layers), 'layer')}"
            )
        case "head" | "heads":
            where = "" if effect.at is None else f" at position {effect.at}"
            return f"heads replaced by {_replacement(effect)}{where}"
        case _:
            assert_never(effect.removed)


def _replacement(effect: Effect) -> str:
    """What stands in place of the outputs of removed heads."""
    match effect.replace:
        case "zero":
            return "zeros"
        case "mean":
            return "their mean over the text"
        case "resample":
            return "those for another text"
        case "renormalise":
            return "those of renormalised weights"
        case _:
            assert_never(effect.replace)


# --------------------------------------------------------------------------------------- the answer


def _ranked(record: EffectRecord) -> list[Effect]:
    """The removals, the largest change first."""
    return sorted(record.effects, key=lambda effect: -abs(record.effect.change_of(effect) or 0.0))


def _answer(record: EffectRecord) -> str:
    """A sentence on whether the removals matter: the largest change, and its effect on the
    prediction.
    """
    summary = record.effect
    strongest = _ranked(record)[0]
    change = summary.change_of(strongest) or 0.0
    measured = _measured(summary)
    if not change:
        return f"nothing removed matters here: {measured} stays as it is"
    amount = shown(abs(change), "brief", digits_of(record))
    if summary.target is None:
        consequence = f"moves by {amount} of its length"
    else:
        direction = "falls" if change < 0 else "rises"
        consequence = f"{direction} by {amount}{_prediction(strongest, summary)}"
    n = len(record.effects)
    n_without = sum(not summary.change_of(effect) for effect in record.effects)
    if n_without:
        consequence += f"; {n_without} of {n} removals change nothing"
    verb, it = ("matter", "them") if strongest.removed == "heads" else ("matters", "it")
    if n > 1:
        verb += " most"
        if strongest.removed != "edge" and n < len(record.heads):
            verb += f" of the {n} removals"
    return f"{_subject(strongest, record)} {verb}: without {it} {measured} {consequence}"


def _subject(effect: Effect, record: Record) -> str:
    """What was removed, as the subject of a sentence."""
    name = removal_name(effect, record)
    match effect.removed:
        case "edge":
            return f"the weight {_edge_text(record, effect)} of {name}"
        case "spans":
            first, second = map(token_label, effect.spans)
            return f"what “{second}” reads of “{first}”"
        case "head" | "heads":
            if not record.layers:  # the name of a head of mha says so
                return name
            return f"heads {name}" if effect.removed == "heads" else f"head {name}"
        case _:
            assert_never(effect.removed)


def _prediction(effect: Effect, summary: EffectSummary) -> str:
    """What a removal does to the prediction of a token."""
    if summary.versus is not None or summary.logprob is None or effect.d_logprob is None:
        return ""
    before = shown(exp(summary.logprob), "percent")
    after = shown(exp(summary.logprob + effect.d_logprob), "percent")
    it_is = _IT_IS[summary.rank == 0, effect.rank == 0]
    return f", its probability goes from {before} to {after}, and it {it_is} the most likely"


def _together(record: EffectRecord) -> Iterator[Text]:
    """The change by all heads together, compared with the sum of the changes by each alone."""
    summary = record.effect
    total = sum(
        summary.change_of(effect) or 0.0 for effect in record.effects if effect.removed == "head"
    )
    for effect in record.effects:
        if effect.removed == "heads" and summary.metric == "d_logit":
            together = summary.change_of(effect) or 0.0
            numbers = together, total, together - total
            digits = digits_of(record)
            while digits < _MOST_DIGITS and _is_off(digits, *numbers):
                digits += 1
            words = [shown(number, "brief", digits) for number in numbers]
            yield Text("together {}, the sum of each alone {}: interaction {}".format(*words))


_MOST_DIGITS = 9
"""The most decimals of an interaction."""


def _is_off(digits: int, together: float, total: float, interaction: float) -> bool:
    """Whether the difference of two numbers that are printed is not the number beside them."""
    difference = round(together, digits) - round(total, digits)
    return round(difference, digits) != round(interaction, digits)


def _screening(summary: EffectSummary, screen: Screen) -> Iterator[Text]:
    """The rank correlation of estimates with the effects."""
    screening = summary.screening
    if screening is None:
        return
    words = [
        (
            f"of {count_of(screening.n_heads, 'head')}, all estimated to first order, the"
            f" {screening.n_largest} largest and {count_of(screening.n_others, 'other')} by chance"
            " were removed"
        ),
        (
            "rank correlation of 1st order with Δlogit"
            f" {'–' if screening.correlation is None else f'{screening.correlation:+.2f}'}"
        ),
    ]
    has_others = screening.n_largest + screening.n_others < screening.n_heads
    is_weak = has_others and (screening.correlation is None or screening.correlation < _RELIABLE)
    if is_weak:
        words.append("1st order misses heads that matter here: run without --screen")
    yield flowing([Text(part, "yellow" if is_weak else "") for part in words], screen.width)


def _proof(record: EffectRecord) -> Text:
    """Whether a second computation of the removals agrees with the first, and the changes that are
    noise.
    """
    summary = record.effect
    proof = summary.verified
    if not proof.ok:
        return Text("NOT verified: a second computation of the removals disagrees", "bold red")
    words = "not verified: no removal was computed a second time"
    if proof.n:
        near = (
            f"equal within {shown(proof.error, 'number')}" if proof.error else "bit for bit equal"
        )
        words = f"verified: {count_of(proof.n, 'removal')} repeated by a second method, {near}"
    if not all(summary.change_of(effect) for effect in record.effects):
        words += f"; up to {shown(summary.floor, 'number')} is noise and prints as 0"
    return Text(words, "green" if proof.n else "yellow")


# ------------------------------------------------------------------------------------- the pictures


class EffectRow(NamedTuple):
    """A name with effects: of a layer those of its heads, None for a head that was not removed; or
    of `tokens` of a text those of the edges to them.
    """

    name: str
    effects: Sequence[Effect | None]
    tokens: Sequence[str] = ()


def effect_rows(record: Record) -> Iterator[EffectRow]:
    """A row for each layer with heads removed one at a time, then one for the edges of each head,
    or of each layer if they were removed from all its heads together. A layer of mha has no name.
    """
    by_head = {(e.kind, e.layer, e.head): e for e in record.effects if e.removed == "head"}
    for view in record.attentions:
        layer = view.inspected
        kind = layer.kind if view.name else record.effects[0].kind
        effects = [by_head.get((kind, layer.layer, head)) for head in range(layer.n_heads)]
        if any(effects):
            yield EffectRow(view.name, effects)
    edges = [effect for effect in record.effects if effect.removed == "edge"]
    for name, group in grouped(edges, lambda edge: removal_name(edge, record)).items():
        _, keys = texts_of(group[0].kind, record.sequences, record.context)
        tokens = [token_label(keys[0].tokens[edge.key or 0]) for edge in group]
        yield EffectRow(name, group, tokens)


def largest_change(record: EffectRecord) -> float:
    """The end of the scale of a record's effects."""
    change_of = record.effect.change_of
    return max((abs(change_of(effect) or 0.0) for effect in record.effects), default=0.0)


def digits_of(record: EffectRecord) -> int:
    """The decimals of all changes on a screen: two, or as many as the largest one needs for two
    digits.
    """
    return max(2, 1 - floor(log10(largest_change(record) or 1.0)))


def meaning_of(summary: EffectSummary) -> str:
    """The meaning of a change."""
    if summary.metric != "d_logit":
        return "change of the output by the removal, relative to its length"
    change = f"change of {_measured(summary)}"
    if _is_of_number(summary):
        return change
    return f"{change} · negative: what was removed supports the target"


def effect_grids(record: EffectRecord) -> list[Grid]:
    """The map with a row per layer and a column per head, where a head that was not removed is
    blank, if there are heads; and the texts that queries read in parts of a few tokens.
    """
    rows = [*effect_rows(record)]
    panels = []
    layers = [row for row in rows if not row.tokens]
    if layers:
        corner = "layer ↓ head →" if record.layers else "head"
        n_heads = max(len(layer.effects) for layer in layers)
        panels.append(_grid(record, layers, [*map(str, range(n_heads))], corner))
    for row in rows:
        for start in range(0, len(row.tokens), _ACROSS):
            part = slice(start, start + _ACROSS)
            panels.append(_grid(record, [EffectRow(row.name, row.effects[part])], row.tokens[part]))
    return panels


def _grid(
    record: EffectRecord, rows: Sequence[EffectRow], columns: Sequence[str], corner: str = ""
) -> Grid:
    """The changes by removals, NaN where nothing was removed."""
    summary = record.effect
    width = max(len(corner), *(cell_len(row.name) for row in rows))
    effects = {
        (n, place): effect
        for n, row in enumerate(rows)
        for place, effect in enumerate(row.effects)
        if effect
    }
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
        digits=digits_of(record),
        corner=corner,
        meaning=meaning_of(summary),
        has_all_rows=True,
        about=lambda *cell: (
            change_words(record, effects[cell]) if np.isfinite(values[cell]) else ""
        ),
    )


# ---------------------------------------------------------------------------------------- the table


def effect_table(record: EffectRecord, digits: int | None = None) -> Table[Effect]:
    """A row for each removal, the largest change first, with the `digits` of a map beside it (None:
    all). The column that ranks them is never left out.
    """
    columns: list[Column[Effect]] = [
        column("effect", "removed", lambda effect: removal_name(effect, record))
    ]
    removed = {effect.removed for effect in record.effects}
    if "edge" in removed:
        columns.append(column("effect", "edge", lambda effect: _edge_text(record, effect)))
    if "head" in removed:
        columns.append(column("effect", "type", lambda effect: _type(record, effect), drop=4))
    columns += number_columns(record, digits)
    legend = []
    if "kl" in numbers_of(record.effects):
        legend += ["Δlogprob and KL in nats", "rank 0: the most likely"]
    if record.effect.metric != "d_output" and not _is_of_number(record.effect):
        legend.append("Δoutput relative to the length of the output")
    if "head" in removed:
        legend += beside_types(record.heads)
    return Table(columns, _ranked(record), legend=legend)


def number_columns(record: EffectRecord, digits: int | None = None) -> list[Column[Effect]]:
    """The columns of numbers of effects, with the `digits` of a map (None: all). A single number
    that is measured names its column, and has no length.
    """
    summary = record.effect
    columns = []
    for place, name in enumerate(numbers_of(record.effects), 1):
        number = _number_column(name, None if name == "rank" else digits)
        if _is_of_number(summary):
            if name == "d_output":
                continue
            if name == "d_logit":
                number = replace(number, heading=f"Δ{summary.measured}")
        columns.append(replace(number, drop=0 if name == summary.metric else place))
    return columns


def _is_of_number(summary: EffectSummary) -> bool:
    """Whether a single number was measured, and no logit of several."""
    return summary.measured in ("score", "metric")


def _number_column(name: str, digits: int | None) -> Column[Effect]:
    """The column of a number of effects, with the `digits` of a map (None: all)."""
    unit: Unit
    if name == "rank":
        unit = "integer"
    elif digits:
        unit = "brief"
    else:
        unit = "change" if name in _SIGNED else "size"
    # without a meaning: the scale of the map says it
    return column("effect", name, attrgetter(name), unit, digits=digits, meaning="")


# -------------------------------------------------------------------------------------------- names


def removal_words(effect: Effect, record: Record) -> str:
    """What was removed: `5.1 · induction`, or with the edge, `5.1 · 7 mat → 2 cat`."""
    more = (_edge_text(record, effect), _type(record, effect))
    return " · ".join([removal_name(effect, record), *filter(None, more)])


def change_words(record: EffectRecord, effect: Effect) -> str:
    """What was removed, with all numbers of its effect: `5.1 · mixed: Δlogit -0.2500, KL 0.01`."""
    numbers = (f"{column.heading} {column.text(effect)}" for column in number_columns(record))
    return f"{removal_words(effect, record)}: {', '.join(numbers)}"


def _type(record: Record, effect: Effect) -> str:
    """The type of a head that was removed, with its excess unless it is mixed."""
    if effect.removed != "head":
        return ""
    attentions = {(layer.kind, layer.layer): layer.name for layer in reversed(record.layers)}
    removed = effect.layer, attentions.get((effect.kind, effect.layer or 0), ""), effect.head
    return next(
        (
            type_text(head)
            for head in record.heads
            if (head.layer or 0, head.attention, head.head) == removed
        ),
        "",
    )


def _edge_text(record: Record, effect: Effect) -> str:
    """The query and the key of a removed edge; empty for other removals."""
    if effect.query is None or effect.key is None:
        return ""
    queries, keys = texts_of(effect.kind, record.sequences, record.context)
    query = f"{effect.query} {token_label(queries[0].tokens[effect.query])}"
    key = f"{effect.key} {token_label(keys[0].tokens[effect.key])}"
    return f"{query} → {key}{' (masked)' if effect.masked else ''}"


def measured_words(record: EffectRecord) -> str:
    """What was measured, and where."""
    summary = record.effect
    match summary.measured:
        case "class" | "span" | "score" | "metric":
            where = "of the text"
        case "token" | "tag" | "vector":
            token = token_label(record.sequences[0].tokens[summary.position])
            where = f"at position {summary.position} “{token}”"
        case _:
            assert_never(summary.measured)
    return f"{_measured(summary)} {where}"


def _measured(summary: EffectSummary) -> str:
    """The name of the measured vector, logit, or difference of two logits."""
    if summary.target is None:
        return "the output vector"
    match summary.measured:
        case "score" | "metric":
            return f"the {summary.measured}"
        case "token" | "vector":
            kind = ""
        case "class":
            kind = "the class "
        case "tag":
            kind = "the tag "
        case "span":
            kind = "the answer "
        case _:
            assert_never(summary.measured)
    minus = "" if summary.versus is None else f" minus that of “{token_label(summary.versus)}”"
    return f"the logit of {kind}“{token_label(summary.target)}”{minus}"


def removal_name(effect: Effect, record: Record) -> str:
    """The name of a removal, such as `5.1`; `head 1` in a layer of mha."""
    names = {
        (view.inspected.kind, view.inspected.layer): view.name
        for view in reversed(record.attentions)
        if view.name
    }
    if effect.removed == "spans":
        return " → ".join(map(visible, reversed(effect.spans)))
    heads = effect.heads if effect.head is None else ((effect.layer or 0, effect.head),)
    if not heads:
        return f"layer {names[effect.kind, effect.layer or 0]}" if names else "all heads"
    if not names:
        return f"{plural(len(heads), 'head')} {' + '.join(str(head) for _, head in heads)}"
    kinds = effect.kinds or [effect.kind] * len(heads)
    return " + ".join(
        f"{names[kind, layer]}.{head}" for kind, (layer, head) in zip(kinds, heads, strict=True)
    )
