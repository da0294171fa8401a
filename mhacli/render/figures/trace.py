"""The steps of a trace, or of decoding, as a figure: the table of the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mhacli.errors import MhaError
from mhacli.record.record import Record
from mhacli.render.base.format import (
    bytes_text,
    configuration,
    count_of,
    count_text,
    number_text,
    token_at,
    token_text,
    trace_totals,
)
from mhacli.render.base.options import ViewOptions
from mhacli.render.figures.head_picture import caption
from mhacli.render.figures.svg import MONO_EM, SOFT, Sheet, heading, paragraph, stacked, table, wrapped
from mhacli.render.run.decode import step_table
from mhacli.render.run.steps import steps_table
from mhacli.text.escape import visible

_LEAST_WIDTH, _SIZE, _MOST = 640.0, 10.5, 64
_DRAWN_AS = "figure walk"


def trace_figure(record: Record, options: ViewOptions) -> Sheet:
    """The picture of a record's steps. Raises `MhaError` if it has none."""
    if not record.trace:
        raise MhaError("the record has no steps to draw", hint="mha trace records them")
    caches = [step.cache for step in record.trace if step.cache is not None]
    if caches:
        body = table(step_table(caches, range(len(record.sequences)), _MOST))
    else:
        body = table(replace(steps_table(record, in_brief=True), most=_MOST))
    title, notes = _title(record), [*_notes(record)]
    width = max(body.width, _LEAST_WIDTH)
    header = paragraph(wrapped(_what(record), int(width / (MONO_EM * _SIZE))), _SIZE, fill=SOFT)
    pieces = [stacked([heading(title, 16), header], 4), body, *([caption(notes, width=width)] if notes else [])]
    sites = [visible(step.site) for step in record.trace]
    return Sheet(stacked(pieces, 16), title, [_what(record), *notes], sites, _DRAWN_AS)


def _title(record: Record) -> str:
    if record.module is not None:
        return visible(record.module.target)
    if record.model is not None:
        return f"{visible(record.model.family)} · {record.layers[0].label}"
    return "attention, site by site" if record.decoding is None else "decoding, step by step"


def _what(record: Record) -> str:
    """The sizes and options of the traced run on one line."""
    if record.module is not None:
        sizes = " · ".join(f"{visible(word)} {size}" for word, size in record.module.sizes)
        return f"called: {visible(record.module.called)} · {sizes}"
    if record.model is not None:
        layer = record.layers[0]
        sizes = f"{count_of(layer.n_heads, 'head')} × d_head {layer.d_head} · {count_of(layer.n_kv_heads, 'kv head')}"
        return f"{visible(layer.name)} · {sizes} · mask: {visible(layer.mask)} · kernel {visible(layer.kernel)}"
    return configuration(record, 1 << 20).plain


def _notes(record: Record) -> Iterator[str]:
    steps = record.trace
    flops, n_bytes, n_parameters = trace_totals(steps)
    if record.decoding is None:
        which = "in all" if record.survey is None else "these steps alone, attention itself not counted:"
        yield f"{which} {count_text(flops)} FLOPs · {bytes_text(n_bytes)} in new tensors · {n_parameters:,} weights"
    if record.module is not None:
        m = record.module
        verdict = "the shape" if m.result == m.expected else f"where attention gives {list(m.expected)}: NOT the shape"
        yield f"result {list(m.result)}, {verdict} that attention gives"
    if record.cell is not None:
        yield _cell(record)


def _cell(record: Record) -> str:
    """One number of the pattern and its computation."""
    cell, view = record.cell, record if record.model is None else record.of_layer(0)
    assert cell is not None
    query = token_at(token_text(view.sequences[cell.sequence], cell.query), cell.query)
    key = token_at(token_text(view.keys[cell.sequence], cell.key), cell.key)
    score = f"q·k {number_text(cell.qk)}, score {number_text(cell.score)}" if cell.allowed else "masked, score −∞"
    return f"head {cell.head}: {query} → {key}: {score}, weight {number_text(cell.share)}"
