"""The walkthrough as a diagram: what each site is, what it is made of, and whether the output follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from mhacli.errors import MhaError
from mhacli.render.base.format import bytes_text, configuration, count_of, count_text, number_text, token_text
from mhacli.render.base.options import ViewOptions, balanced
from mhacli.render.figures.heads.caption import caption
from mhacli.render.figures.svg.elements import MONO_EM, SOFT, Piece, heading, paragraph, stacked, wrapped
from mhacli.render.figures.svg.sheet import Sheet
from mhacli.render.figures.trace.boxes import box, legend
from mhacli.render.figures.trace.decode_steps import has_steps, step_table
from mhacli.render.figures.trace.flow import flow, is_flow
from mhacli.results.record.record import Record, Step
from mhacli.text.escape import visible

_WIDTH, _SIZE = 936.0, 10.5
_MOST, _GAP = 64, 9.0
_DRAWN_AS = "figure walk"


def walk_figure(record: Record, options: ViewOptions) -> Sheet:
    """The picture of the steps that the record holds. Raises `MhaError` where it holds none."""
    if not record.trace:
        raise MhaError("the record must hold the steps of a walk to draw them, got none", hint="mha trace records them")
    title, is_decoding = _title(record), has_steps(record)
    body = _body(record)
    width = body.width if is_decoding else max(_WIDTH, body.width)
    header = paragraph(wrapped(_what(record), int(width / (MONO_EM * _SIZE))), _SIZE, fill=SOFT)
    notes = [*_notes(record)]
    pieces = [stacked([heading(title, 16), header], 4), body]
    pieces += [] if is_decoding else [legend()]
    pieces.append(caption(record, notes, _DRAWN_AS, width=width))
    sites = [visible(step.site) for step in record.trace]
    return Sheet(stacked(pieces, 16), title, [_what(record), *notes], sites, _DRAWN_AS)


def _body(record: Record) -> Piece:
    if has_steps(record):
        return step_table(record)
    return flow(record.trace) if is_flow(record.trace) else _listed(record.trace)


def _listed(steps: Sequence[Step]) -> Piece:
    """The steps below each other, as somebody's own attention or a checkpoint's passes them; of very many the first and last."""
    shown = balanced(len(steps), _MOST)
    pieces = []
    for place, index in enumerate(shown.shown):
        if shown.hidden and place == shown.before:
            pieces.append(paragraph([f"⋮ {count_of(shown.hidden, 'step')} not drawn"], _SIZE, fill=SOFT))
        pieces.append(box(index + 1, steps[index], _WIDTH))
    return stacked(pieces, _GAP)


def _title(record: Record) -> str:
    if record.module is not None:
        return visible(record.module.target)
    if record.model is not None:
        return f"{visible(record.model.family)} · {record.layers[0].label}"
    return "decoding, step by step" if has_steps(record) else "attention, site by site"


def _what(record: Record) -> str:
    """The sizes and choices of what was walked, on one line."""
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
    flops = sum(step.flops for step in steps)
    n_bytes = sum(step.bytes for step in steps if step.built and step.layout == "copy")
    n_parameters = sum(prod(s) for s in {p.name: p.shape for step in steps for p in step.parameters}.values())
    if not has_steps(record):
        which = "in all" if record.survey is None else "these steps alone, attention itself not counted:"
        yield f"{which} {count_text(flops)} FLOPs · {bytes_text(n_bytes)} in new tensors · {n_parameters:,} weights"
        if is_flow(steps):
            yield "numbers give the order of execution; an arrow leads from what is read to what is made of it"
        else:
            yield "from top to bottom in the order of execution"
    if record.module is not None:
        m = record.module
        verdict = "the shape" if m.result == m.expected else f"where attention gives {list(m.expected)}: NOT the shape"
        yield f"result {list(m.result)}, {verdict} that attention gives"
    for route in record.routes:
        verdict = "ok" if route.ok else "FAILED"
        yield f"written as {visible(route.route)}: {verdict}, differs by at most {number_text(route.max_abs_difference)}"
    if record.cell is not None:
        yield _cell(record)


def _cell(record: Record) -> str:
    """One number of the pattern, and how it came to be."""
    cell, view = record.cell, record if record.model is None else record.of_layer(0)
    assert cell is not None
    query = f"{token_text(view.sequences[cell.sequence], cell.query)} {cell.query}"
    key = f"{token_text(view.keys[cell.sequence], cell.key)} {cell.key}"
    score = f"q·k {number_text(cell.qk)}, score {number_text(cell.score)}" if cell.allowed else "not allowed, score −∞"
    return f"head {cell.head}: {query} → {key}: {score}, share {number_text(cell.share)}"
