"""What removals change, from a record: a map of heads or a text in colours, the table by size, and the proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.render.base.cells import CHANGES, cell, change_levels
from mhacli.render.base.format import count_of, flowing, left_out, number_text, or_dash, plain_table, type_text
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import short_name
from mhacli.results.record.effect import Effect, EffectSummary
from mhacli.results.record.head_statistics import HeadStatistics
from mhacli.results.record.record import InspectedLayer, Record, texts_of
from mhacli.text.escape import token_label

_MAX_ROWS, _NUMBER, _MARK = 12, 6, 2
"""The most rows of the table, and the columns of a cell of the map with and without its number."""


def effect_view(record: Record, options: ViewOptions, screen: Screen) -> Iterator[RenderableType]:
    """The sections of a record with effects."""
    summary = record.effect
    assert summary is not None, "a record with effects says what was measured"
    changes = [value for effect in record.effects if (value := change_of(effect, summary)) is not None]
    largest = max(map(abs, changes), default=0.0)
    yield _question(record, summary, screen)
    if not summary.verified.ok:
        yield _proof(summary, screen)
        return
    if any(effect.removed == "head" for effect in record.effects):
        yield _head_map(record, summary, largest, screen)
    for name, edges in _edges_by_head(record).items():
        yield _coloured_text(record, name, edges, summary, largest, screen)
    yield _scale(summary, largest, screen)
    yield _table(record, summary, options)
    yield from _interaction(record, summary)
    yield _proof(summary, screen)


def effect_words(record: Record, screen: Screen) -> tuple[Text, Text]:
    """What was measured and removed, and whether the removals are proven."""
    assert record.effect is not None
    return _question(record, record.effect, screen), _proof(record.effect, screen)


def change_of(effect: Effect, summary: EffectSummary) -> float | None:
    """The change by which removals are ranked."""
    return effect.d_logit if summary.metric == "d_logit" else effect.d_output


def _question(record: Record, summary: EffectSummary, screen: Screen) -> Text:
    """What is measured, and what is removed."""
    token = token_label(record.sequences[0].tokens[summary.position])
    where = f"at position {summary.position} “{token}”"
    if summary.target is None:
        parts = [Text(f"measured: the output vector {where}", style="bold")]
        return flowing([*parts, *_what_is_removed(record)], screen.width)
    target = f"“{token_label(summary.target)}”"
    what = f"the logit of {target}"
    if summary.versus is not None:
        what += f" minus that of “{token_label(summary.versus)}”"
    parts = [Text(f"measured: {what} {where}", style="bold"), Text(f"untouched {or_dash(summary.logit, number_text)}")]
    parts += [
        Text(f"log probability of {target} {or_dash(summary.logprob, number_text)}"),
        Text(f"rank {summary.rank}"),
    ]
    return flowing([*parts, *_what_is_removed(record)], screen.width)


def _what_is_removed(record: Record) -> list[Text]:
    return [Text(words) for words in dict.fromkeys(map(_removed, record.effects))]


def _removed(effect: Effect) -> str:
    """What a removal does, in words."""
    if effect.removed == "edge":
        return "removed: one attention weight at a time, the rest of its row growing in proportion"
    if effect.removed == "spans":
        first, second = map(token_label, effect.spans)
        return f"removed: what “{second}” reads of “{first}” in {count_of(len(effect.layers), 'layer')}"
    by = "zeros" if effect.replace == "zero" else "its mean over the text"
    where = "at all positions" if effect.at is None else f"at position {effect.at}"
    return f"removed: the output of a head, replaced by {by} {where}"


# --------------------------------------------------------------------------------------------------------- the pictures


def _head_map(record: Record, summary: EffectSummary, largest: float, screen: Screen) -> Text:
    """A row per layer, a column per head; a head that was not removed is a space."""
    effects = {(e.kind, e.layer, e.head): change_of(e, summary) for e in record.effects if e.removed == "head"}
    layers = [layer for layer in record.layers if any(key[:2] == (layer.kind, layer.layer) for key in effects)]
    n_heads = max(layer.n_heads for layer in layers)
    names = [short_name(layer, record.layers) for layer in layers]
    label = max(len("layer"), *map(len, names)) + 2
    is_numbered = label + n_heads * _NUMBER <= screen.width
    width = _NUMBER if is_numbered else _MARK
    lines = [Text(f"{'head':>{label - 2}}  ", style="dim").append(_axis(n_heads, width), style="dim")]
    for layer, name in zip(layers, names, strict=True):
        line = Text(f"{name:>{label - 2}}  ")
        values = [effects.get((layer.kind, layer.layer, head)) for head in range(layer.n_heads)]
        numbers = np.array([np.nan if value is None else value for value in values])
        for value, level in zip(values, change_levels(numbers, largest).astype(int).tolist(), strict=True):
            word = _short(value) if is_numbered and value is not None else ""
            line.append(*cell(level, width, colour=screen.colour, ramp=CHANGES, gap=1, word=word))
        lines.append(line)
    return Text("\n").join(lines)


def _axis(n_heads: int, width: int) -> str:
    if width == _NUMBER:
        return "".join(f"{head:>{width - 1}} " for head in range(n_heads)).rstrip()
    return "".join(f"{head:<{5 * width}}" for head in range(0, n_heads, 5)).rstrip()


def _short(value: float) -> str:
    """A change in five columns: `-1.20`, `.31`, `0`."""
    if value == 0:
        return "0"
    words = f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
    return words.replace("0.", ".", 1) if abs(value) < 0.995 else words


def _edges_by_head(record: Record) -> Mapping[str, list[Effect]]:
    """The edges of each head, or of each layer where all its heads lose them together."""
    grouped: dict[str, list[Effect]] = {}
    for effect in record.effects:
        if effect.removed == "edge":
            grouped.setdefault(_name(effect, record), []).append(effect)
    return grouped


def _coloured_text(
    record: Record, name: str, edges: Sequence[Effect], summary: EffectSummary, largest: float, screen: Screen
) -> Text:
    """The tokens that a query reads, in the colours of what the loss of each changes."""
    _, keys = texts_of(edges[0].kind, record.sequences, record.context)
    values = np.array([change_of(edge, summary) for edge in edges], dtype=float)
    parts = []
    for edge, level in zip(edges, change_levels(values, largest).astype(int).tolist(), strict=True):
        token = token_label(keys[0].tokens[edge.key or 0])
        sign, style = cell(level, 1, colour=screen.colour, ramp=CHANGES, word="" if not screen.colour else " ")
        parts.append(Text(token, style=style) if screen.colour else Text(f"{sign}{token}"))
    return Text(f"{name}  ", style="bold").append_text(flowing(parts, screen.width - len(name) - 2, " "))


def _scale(summary: EffectSummary, largest: float, screen: Screen) -> Text:
    """The colours and signs of changes, and what they are of."""
    has_signs = summary.metric == "d_logit"
    swatches = Text.assemble(*CHANGES.swatches(colour=screen.colour))
    swatches = swatches if has_signs else swatches[len(swatches) // 2 :]  # no change is below 0
    low = f"−{number_text(largest)}" if has_signs else "0"
    parts = [Text(f"{low} ").append_text(swatches).append(f" {number_text(largest)}")]
    if summary.metric == "d_logit":
        parts += [Text("change of the logit by the removal; negative: the head supports the target", style="dim")]
    else:
        parts += [Text("change of the output by the removal, relative to its length", style="dim")]
    return flowing(parts, screen.width)


# ------------------------------------------------------------------------------------------------------------ the table


def _table(record: Record, summary: EffectSummary, options: ViewOptions) -> Table:
    """A row per removal, the largest change first."""
    headings, rows = effect_rows(record, summary)
    shown = rows if options.everything else rows[:_MAX_ROWS]
    n_words = len(headings) - _n_numbers(summary)
    table = plain_table(*((name, place >= n_words) for place, name in enumerate(headings)))
    for row in shown:
        table.add_row(*row)
    if len(rows) > len(shown):
        table.add_row(left_out(len(rows) - len(shown)))
    return table


def _n_numbers(summary: EffectSummary) -> int:
    return 5 if summary.metric == "d_logit" else 1


def effect_rows(record: Record, summary: EffectSummary) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings, and a row of words per removal, the largest change first."""
    ranked = sorted(record.effects, key=lambda effect: -abs(change_of(effect, summary) or 0.0))
    heads = {(head.layer, head.attention, head.head): head for head in record.heads}
    has_edges, has_heads = (any(effect.removed == kind for effect in ranked) for kind in ("edge", "head"))
    headings = ["removed", *["from → to"] * has_edges, *["type"] * has_heads]
    headings += ["Δlogit", "Δlogprob", "KL", "rank"] if summary.metric == "d_logit" else []
    rows = []
    for effect in ranked:
        row = [_name(effect, record)]
        row += [_edge_text(record, effect)] if has_edges else []
        row += [_type(record, effect, heads)] if has_heads else []
        if summary.metric == "d_logit":
            row += [or_dash(effect.d_logit, _signed), or_dash(effect.d_logprob, _signed)]
            row += [or_dash(effect.kl, number_text), or_dash(effect.rank, str)]
        rows.append((*row, number_text(effect.d_output)))
    return (*headings, "Δoutput"), rows


def _signed(number: float) -> str:
    return "0" if number == 0 else f"{number:+.4f}" if abs(number) >= 1e-4 else f"{number:+.1e}"


def _name(effect: Effect, record: Record) -> str:
    """`5.1`, or what else was removed."""
    if effect.removed == "heads":
        return " + ".join(f"{layer}.{head}" for layer, head in effect.heads)
    if effect.removed == "spans":
        return f"{effect.spans[0]} → {effect.spans[1]}"
    layer = _layer(record, effect)
    name = short_name(layer, record.layers)
    return f"{name}.{effect.head}" if effect.head is not None else f"layer {name}"


def _layer(record: Record, effect: Effect) -> InspectedLayer:
    return next(layer for layer in record.layers if (layer.kind, layer.layer) == (effect.kind, effect.layer))


def _type(record: Record, effect: Effect, heads: Mapping[tuple[int, str, int], HeadStatistics]) -> str:
    if effect.removed != "head":
        return ""
    layer = _layer(record, effect)
    head = heads.get((layer.layer, layer.name, effect.head or 0))
    return "" if head is None else type_text(head).partition(" (")[0]


def _edge_text(record: Record, effect: Effect) -> str:
    if effect.query is None or effect.key is None:
        return ""
    queries, keys = texts_of(effect.kind, record.sequences, record.context)
    query, key = token_label(queries[0].tokens[effect.query]), token_label(keys[0].tokens[effect.key])
    return f"{effect.query} {query} → {effect.key} {key}"


def _interaction(record: Record, summary: EffectSummary) -> Iterator[Text]:
    """What heads change together beyond the sum of what each changes alone."""
    alone = {(e.layer, e.head): change_of(e, summary) or 0.0 for e in record.effects if e.removed == "head"}
    for effect in record.effects:
        if effect.removed == "heads" and summary.metric == "d_logit":
            total, together = sum(alone[key] for key in effect.heads), change_of(effect, summary) or 0.0
            yield Text(
                f"together {_signed(together)}, the sum of each alone {_signed(total)}: interaction {_signed(together - total)}"
            )


def _proof(summary: EffectSummary, screen: Screen) -> Text:
    """Whether the removals did what they say, by the second computation."""
    proof = summary.verified
    floor = Text(f"changes up to {number_text(summary.floor)} are noise and print as 0", style="dim")
    if not proof.ok:
        return flowing(
            [Text("NOT verified: removals computed in another way differ", style="bold red"), floor], screen.width
        )
    if proof.n == 0:
        words = Text("not verified: this family offers no second way to do these removals", style="yellow")
        return flowing([words, floor], screen.width)
    words = Text(
        f"verified: {count_of(proof.n, 'removal')} computed in another way within {number_text(proof.max_abs_error)} "
        f"(tolerance {number_text(proof.tolerance)})",
        style="green",
    )
    return flowing([words, floor], screen.width)
