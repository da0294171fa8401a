"""The walkthrough as a diagram: each site, its sources, and the self-check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePath

from rich.cells import cell_len

from mhacli.errors import MhaError
from mhacli.record.record import CacheStep, Record, Step
from mhacli.render.base.format import (
    bytes_text,
    configuration,
    count_of,
    count_text,
    filled,
    fitted,
    memory_text,
    new_tokens_text,
    number_text,
    single_parameters,
    token_at,
    token_text,
    trace_totals,
    values_text,
)
from mhacli.render.base.options import ViewOptions, balanced
from mhacli.render.figures.head_picture import caption
from mhacli.render.figures.svg import (
    ALARM,
    FAINT,
    INK,
    LINE,
    MONO_EM,
    SOFT,
    Piece,
    Sheet,
    characters,
    element,
    heading,
    paragraph,
    placed,
    rectangle,
    stacked,
    value_text,
    wrapped,
    written,
)
from mhacli.render.run.trace import repeats_text
from mhacli.render.run.view import axes_text
from mhacli.text.escape import visible

_WIDTH, _SIZE = 936.0, 10.5
_MOST, _GAP = 64, 9.0
_DRAWN_AS = "figure walk"


def trace_figure(record: Record, options: ViewOptions) -> Sheet:
    """The picture of a record's steps. Raises `MhaError` if it has none."""
    if not record.trace:
        raise MhaError("the record has no steps to draw", hint="mha trace records them")
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
    """The steps in a column, for user code and checkpoints; the first and last of very many."""
    selection = balanced(len(steps), _MOST)
    pieces = []
    for place, index in enumerate(selection.shown):
        if selection.hidden and place == selection.before:
            pieces.append(paragraph([f"⋮ {count_of(selection.hidden, 'step')} not drawn"], _SIZE, fill=SOFT))
        pieces.append(box(index + 1, steps[index], _WIDTH))
    return stacked(pieces, _GAP)


def _title(record: Record) -> str:
    if record.module is not None:
        return visible(record.module.target)
    if record.model is not None:
        return f"{visible(record.model.family)} · {record.layers[0].label}"
    return "decoding, step by step" if has_steps(record) else "attention, site by site"


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


# -------------------------------------------------------------------------------------- positions and sources of sites


_DOWN_GAP, _LANE, _BETWEEN = 26.0, 300.0, 18.0
_ARROW = "#44607c"
_Q, _K, _V, _ADDED = (0,), (1,), (2,), (3,)
_PAIR, _KV, _ALL = (0, 1), (1, 2), (0, 1, 2)


@dataclass(frozen=True)
class _SitePosition:
    """The lanes of a site, and the sites that it is computed from. It is placed below the sites in `after`."""

    lanes: tuple[int, ...]
    sources: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def _projected(lane: tuple[int, ...], letter: str, rows: tuple[str, ...]) -> Mapping[str, _SitePosition]:
    """The sites of queries, keys or values."""
    fused = ("qkv",) if letter == "q" else ("qkv", "kv")
    return {
        f"{letter}_proj": _SitePosition(lane, rows),
        f"{letter}_per_head": _SitePosition(lane, rows),
        letter: _SitePosition(lane, (f"{letter}_proj", f"{letter}_per_head", *fused)),
    }


_OF_KEYS = ("context", "x")
"""The sources of keys and values: the first of these in the trace."""
SITE_POSITIONS: Mapping[str, _SitePosition] = {
    "ids": _SitePosition(_Q),
    "random": _SitePosition(_Q),
    "embed": _SitePosition(_Q, ("ids",)),
    "positions": _SitePosition(_K, (), ("ids",)),
    "x": _SitePosition(_Q, ("embed", "random", "positions")),
    "context": _SitePosition(_KV, (), ("positions",)),
    "qkv": _SitePosition(_ALL, ("x",)),
    "kv": _SitePosition(_KV, ("context",)),
    **_projected(_Q, "q", ("x",)),
    **_projected(_K, "k", _OF_KEYS),
    **_projected(_V, "v", _OF_KEYS),
    "q_rot": _SitePosition(_Q, ("q",)),
    "k_rot": _SitePosition(_K, ("k",)),
    "alibi": _SitePosition(_ADDED, (), ("q", "k")),
    "bias": _SitePosition(_ADDED, (), ("q", "k")),
    "qk": _SitePosition(_PAIR, ("q", "q_rot", "k", "k_rot")),
    "scores": _SitePosition(_PAIR, ("qk", "alibi", "bias")),
    "pattern": _SitePosition(_PAIR, ("scores",)),
    "dropped": _SitePosition(_PAIR, ("pattern",)),
    "z": _SitePosition(_ALL, ("pattern", "dropped", "v")),
    "concat": _SitePosition(_ALL, ("z",)),
    "head_out": _SitePosition(_ALL, ("z",)),
    "out": _SitePosition(_ALL, ("concat", "z")),
    "out_sum": _SitePosition(_ALL, ("head_out",)),
}
"""The sites in the diagram. A test checks them against their formulas."""
_REPLACED = {"q": "q_rot", "k": "k_rot", "pattern": "dropped", "z": "concat"}
"""Sites that are not read if the other site is in the trace."""


def is_flow(steps: Sequence[Step]) -> bool:
    """Whether every step is a site of mha's own layer, each once."""
    names = [step.site for step in steps]
    return bool(names) and set(names) <= set(SITE_POSITIONS) and len(names) == len(set(names))


def sources_of(site: str, passed: Sequence[str]) -> tuple[str, ...]:
    """The sites among those `passed` that a site is computed from.

    >>> sources_of("qk", ("q", "k", "q_rot", "k_rot"))
    ('q_rot', 'k_rot')
    """
    sources = [source for source in SITE_POSITIONS[site].sources if source in passed]
    if SITE_POSITIONS[site].sources == _OF_KEYS:
        return tuple(sources[:1])
    return tuple(source for source in sources if _REPLACED.get(source) not in sources)


@dataclass(frozen=True)
class _Box:
    lanes: tuple[int, ...]
    y: float
    piece: Piece

    @property
    def bottom(self) -> float:
        return self.y + self.piece.height


def flow(steps: Sequence[Step]) -> Piece:
    """The diagram: queries, keys and values in lanes, with arrows from the sources of each site."""
    boxes: dict[str, _Box] = {}
    bottoms: dict[int, float] = {}
    for number, step in enumerate(steps, 1):
        lanes = _lanes(step.site, [s.site for s in steps])
        place, sources = SITE_POSITIONS[step.site], sources_of(step.site, [*boxes])
        above = [bottoms.get(lane, -_DOWN_GAP) for lane in lanes]
        above += [boxes[name].bottom for name in (*sources, *place.after) if name in boxes]
        y = max(above) + _DOWN_GAP
        width = len(lanes) * _LANE + (len(lanes) - 1) * _BETWEEN
        boxes[step.site] = _Box(lanes, y, box(number, step, width))
        bottoms |= dict.fromkeys(lanes, boxes[step.site].bottom)
    arrows = "".join(_arrows(boxes))
    content = "".join(placed(site_box.piece, _left(site_box.lanes[0]), site_box.y) for site_box in boxes.values())
    n_lanes = 1 + max(max(site_box.lanes) for site_box in boxes.values())
    return Piece(
        _marker() + arrows + content, _left(n_lanes) - _BETWEEN, max(site_box.bottom for site_box in boxes.values())
    )


def _lanes(site: str, passed: Sequence[str]) -> tuple[int, ...]:
    """The lanes of a site. The input spans the lanes computed from it, beside any context."""
    return _ALL if site in ("x", "random") and "context" not in passed else SITE_POSITIONS[site].lanes


def _left(lane: int) -> float:
    return lane * (_LANE + _BETWEEN)


def _middle(lanes: Sequence[int]) -> float:
    return (_left(lanes[0]) + _left(lanes[-1]) + _LANE) / 2


def _arrows(boxes: Mapping[str, _Box]) -> Iterator[str]:
    for site, target in boxes.items():
        for source in sources_of(site, [*boxes]):
            yield _arrow(boxes[source], target)


def _arrow(source: _Box, target: _Box) -> str:
    """An arrow: straight down within a lane; otherwise down, across and down; from beside, into the right edge."""
    shared = [lane for lane in target.lanes if lane in source.lanes]
    if shared:
        x = _middle(shared)
        path = f"M{value_text(x)} {value_text(source.bottom)}V{value_text(target.y - 2)}"
    elif source.lanes == _ADDED:
        edge, y = _left(target.lanes[-1]) + _LANE + 2, target.y + target.piece.height / 2
        path = f"M{value_text(_middle(source.lanes))} {value_text(source.bottom)}V{value_text(y)}H{value_text(edge)}"
    else:
        start, end, y = _middle(source.lanes), _middle(target.lanes), target.y - _DOWN_GAP / 2
        path = f"M{value_text(start)} {value_text(source.bottom)}V{value_text(y)}H{value_text(end)}V{value_text(target.y - 2)}"
    return element("path", d=path, fill="none", stroke=_ARROW, stroke_width=1.2, marker_end="url(#arrow)")


def _marker() -> str:
    head = element("path", d="M0 0L8 4L0 8Z", fill=_ARROW)
    marker = element(
        "marker",
        head,
        id="arrow",
        viewBox="0 0 8 8",
        refX=7.0,
        refY=4.0,
        markerWidth=7.0,
        markerHeight=7.0,
        orient="auto",
    )
    return element("defs", marker)


# --------------------------------------------------------------------------------------------------------------- boxes


SIZE, INSET = 10.0, 9.0
_WIDE = 90
"""The width in cells from which measurements stand right of the name."""
_MADE, _WITH_WEIGHTS, _SEEN = "#f6f8fb", "#e3edf9", "#ffffff"
_EDGE, _LINES_OF_THEIRS = "#44607c", "#1b6b3a"
_DASHES = "4 3"


@dataclass(frozen=True)
class _BoxLine:
    """A line of a box and its look."""

    text: str
    fill: str = INK
    weight: str | None = None


def box(number: int, step: Step, width: float) -> Piece:
    """The box of a step: dashed for a view, darker if it uses weights."""
    cells = int((width - 2 * INSET) / (MONO_EM * SIZE))
    lines = [*_name(number, step, cells)]
    for line in _lines(step, is_wide=cells >= _WIDE):
        lines += [_BoxLine(part, line.fill, line.weight) for part in wrapped(line.text, cells)]
    height = len(lines) * LINE * SIZE + 2 * INSET - 3
    is_view = step.layout == "view"
    fill = _SEEN if is_view else _WITH_WEIGHTS if step.parameters else _MADE
    title = [element("title", characters(visible(step.meaning)))] if step.meaning else []
    outline = rectangle(
        0, 0, width, height, fill, rx=5.0, stroke=_EDGE, stroke_width=1.0, stroke_dasharray=_DASHES if is_view else None
    )
    texts = "".join(
        written(INSET, INSET + (place + 0.78) * LINE * SIZE, line.text, SIZE, fill=line.fill, font_weight=line.weight)
        for place, line in enumerate(lines)
    )
    if cells >= _WIDE:
        y = INSET + 0.78 * LINE * SIZE
        texts += written(width - INSET, y, _measured(step), SIZE, fill=SOFT, text_anchor="end")
    return Piece(element("g", *title, outline, texts), width, height)


def legend() -> Piece:
    """The meaning of box styles."""
    content, x = "", 0.0
    for fill, dashes, label in (
        (_WITH_WEIGHTS, None, "made with weights"),
        (_MADE, None, "a new tensor"),
        (_SEEN, _DASHES, "a view: memory that is there already"),
    ):
        content += rectangle(x, 0, 22, 12, fill, rx=3.0, stroke=_EDGE, stroke_width=1.0, stroke_dasharray=dashes)
        content += written(x + 28, 10, label, SIZE, fill=SOFT)
        x += 28 + (len(label) + 3) * MONO_EM * SIZE
    return Piece(content, x, 14)


def _name(number: int, step: Step, cells: int) -> Iterator[_BoxLine]:
    """The name with the axes beside it, or below if they do not fit."""
    name, axes = f"{number} {visible(step.site)}", axes_text(step.axes, step.shape) + repeats_text(step)
    yield _BoxLine(name, INK, "bold")
    yield from (_BoxLine(line, _EDGE) for line in filled(axes.split(" · "), cells))


def _lines(step: Step, *, is_wide: bool) -> Iterator[_BoxLine]:
    if step.file is not None and step.line is not None:
        place = f"{visible(PurePath(step.file).name)}:{step.line}"
        yield _BoxLine(f"{place}  {visible(step.source)}", _LINES_OF_THEIRS)
    yield _BoxLine(visible(step.formula))
    if step.remark:
        yield _BoxLine(f"! {visible(step.remark)}", ALARM, "bold")
    if not is_wide:
        yield _BoxLine(_measured(step), SOFT)
    if step.parameters:
        yield _BoxLine(_parameters(step), SOFT)
    if step.values is not None:
        yield _BoxLine(values_text(step, step.values, in_brief=True), SOFT)


def _measured(step: Step) -> str:
    flops = f" · {count_text(step.flops)} FLOPs" if step.flops else ""
    return f"{memory_text(step, in_brief=True)} · {bytes_text(step.bytes)} {visible(step.dtype)}{flops}"


def _parameters(step: Step) -> str:
    shown = single_parameters(step)
    more = f" and {len(step.parameters) - len(shown)} more" if len(shown) < len(step.parameters) else ""
    total = sum(prod(parameter.shape) for parameter in step.parameters)
    named = ", ".join(f"{visible(parameter.name)} {list(parameter.shape)}" for parameter in shown)
    return f"weights {named}{more}: {total:,} numbers"


# ------------------------------------------------------------------------------------------------------------ decoding


_STEP_SIZE, _ROW, _MOST_STEPS, _APART, _TOKENS = 10.0, 17.0, 48, 2, 36
_BAR = 120.0
_COLUMNS = ("step", "phase", "new tokens", "past", "q", "k", "FLOPs", "cache", "differs by", "read of the past")
_LEFT = ("phase", "new tokens")


def has_steps(record: Record) -> bool:
    """Whether the trace is of decoding, where every step reads the cache."""
    return bool(record.trace) and all(step.cache is not None for step in record.trace)


def step_table(record: Record) -> Piece:
    """The table of decoding steps, with a bar for the bytes read; the first and last of many."""
    selection = balanced(len(record.trace), _MOST_STEPS)
    steps = [(number, record.trace[number]) for number in selection.shown]
    cells = [_cells(number, step, step.cache) for number, step in steps if step.cache is not None]
    widths = [max(cell_len(line[i]) for line in (*cells, _COLUMNS[:-1])) for i in range(len(_COLUMNS) - 1)]
    starts = [sum(widths[:i]) + i * _APART for i in range(len(_COLUMNS))]
    content = _line(_COLUMNS, starts, widths, 0, fill=SOFT)
    largest = max(step.cache.read_bytes for _, step in steps if step.cache is not None) or 1
    y = _ROW
    for place, (_, step) in enumerate(steps):
        if selection.hidden and place == selection.before:
            content += written(0, y + 0.7 * _ROW, f"⋮ {selection.hidden} steps not drawn", _STEP_SIZE, fill=SOFT)
            y += _ROW
        assert step.cache is not None
        content += element("line", x1=0, y1=y, x2=_x(starts[-1]) + _BAR + 80, y2=y, stroke=FAINT, stroke_width=0.5)
        content += _line(cells[place], starts, widths, y, fill=INK)
        read = step.cache.read_bytes
        content += rectangle(_x(starts[-1]), y + 4, _BAR * read / largest, _ROW - 8, "#44607c")
        text = written(_x(starts[-1]) + _BAR * read / largest + 6, y + 0.7 * _ROW, bytes_text(read), _STEP_SIZE)
        content += text
        y += _ROW
    return Piece(content, _x(starts[-1]) + _BAR + 80, y)


def _x(cells: float) -> float:
    return cells * MONO_EM * _STEP_SIZE


def _line(texts: Sequence[str], starts: Sequence[int], widths: Sequence[int], y: float, *, fill: str) -> str:
    content = ""
    for place, text in enumerate(texts):
        is_left = _COLUMNS[place] in _LEFT or place == len(widths)
        x = starts[place] if is_left else starts[place] + widths[place]
        content += written(_x(x), y + 0.7 * _ROW, text, _STEP_SIZE, fill=fill, text_anchor=None if is_left else "end")
    return content


def _cells(number: int, step: Step, cache: CacheStep) -> tuple[str, ...]:
    tokens = " | ".join(new_tokens_text(new, len(new)) for new in cache.tokens)
    return (
        str(number),
        cache.phase,
        fitted(tokens, _TOKENS),
        str(cache.n_past),
        "×".join(map(str, cache.q_shape)),
        "×".join(map(str, cache.k_shape)),
        count_text(step.flops),
        bytes_text(cache.cache_bytes),
        number_text(cache.max_abs_difference),
    )
