"""How much the named parts of a text give each other, beside what uniform attention would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.render.base.format import fitted, share_text, short_text
from mhacli.render.base.options import Screen, ViewOptions, balanced
from mhacli.render.base.selection import LayerView, places_of, short_name
from mhacli.render.base.tables import left_out
from mhacli.results.record.record import Record
from mhacli.text.escape import token_label

_MAX_ROWS, _NAME_WIDTH, _GAP, _LIFT_WIDTH = 16, 12, 2, 6
_MUCH, _LITTLE = 2.0, 0.5

_Pair = tuple[int, int]


def span_view(
    record: Record, layers: Sequence[LayerView], sequences: Sequence[int], options: ViewOptions, screen: Screen
) -> RenderableType:
    """A row per layer, or per chosen head, a column per pair of spans: mass and lift; as many tables as the pairs need."""
    rows = [
        row
        for layer in layers
        if "span_mass" in layer.record.arrays
        for row in _rows(record, layer, sequences, options)
    ]
    shown = balanced(len(rows), len(rows) if options.everything else _MAX_ROWS)
    names = [fitted(token_label(span.name), _NAME_WIDTH) for span in record.spans]
    label = max([len("layer"), *(cell_len(name) for name, _, _ in rows)])
    width = max(options.precision + 2 + _LIFT_WIDTH, *(cell_len(f"→ {name}") for name in names))
    tables = []
    for pairs in _panels(len(names), max(1, (screen.width - label) // (width + _GAP))):
        table = Table(box=None, padding=(0, 0, 0, _GAP), pad_edge=False, header_style="dim")
        table.add_column(Text("\nlayer"), justify="right", no_wrap=True, min_width=label)
        for one, other in pairs:
            table.add_column(Text(f"{names[one]}\n→ {names[other]}"), justify="right", no_wrap=True, min_width=width)
        for place, row in enumerate(shown.shown):
            if shown.hidden and place == shown.before:
                table.add_row("⋮", left_out(shown.hidden))
            name, mass, uniform = rows[row]
            cells = [_cell(float(mass[pair]), float(uniform[pair]), options.precision) for pair in pairs]
            table.add_row(name, *cells)
        tables.append(table)
    averaged = [] if options.heads is not None else ["heads"]
    averaged += ["sequences"] if len(sequences) > 1 else []
    of = f", mean over {' and '.join(averaged)}" if averaged else ""
    caption = Text(
        f"a → b: the mean share that a token of a gives all tokens of b{of} · × its lift: that share ÷ the share of uniform "
        "attention over the same keys, so corrected for length · attention is not causation",
        style="dim",
    )
    return Group(Text("between spans", style="bold"), *tables, caption)


def _panels(n_spans: int, room: int) -> Iterator[list[_Pair]]:
    """The pairs of spans in as many parts as need be, the pairs of whole spans together where they fit."""
    per_panel = room // n_spans * n_spans or room
    pairs = [(one, other) for one in range(n_spans) for other in range(n_spans)]
    if room >= n_spans:
        yield from (pairs[start : start + per_panel] for start in range(0, len(pairs), per_panel))
        return
    for one in range(n_spans):
        own = [pair for pair in pairs if pair[0] == one]
        yield from (own[start : start + room] for start in range(0, n_spans, room))


def _rows(
    record: Record, layer: LayerView, sequences: Sequence[int], options: ViewOptions
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Names with masses and those of uniform attention, `[span, span]`, NaN where no query counts."""
    name, view = short_name(layer.inspected, record.layers), layer.record
    mass, uniform = (view.arrays[key][list(sequences)].astype(np.float64) for key in ("span_mass", "uniform_span_mass"))
    uniform = np.broadcast_to(uniform, mass.shape)
    if options.heads is None:
        yield name, _mean(mass, (0, 1)), _mean(uniform, (0, 1))
        return
    known = {head.head for head in view.heads}
    own = [head for head in dict.fromkeys(options.heads) if head in known]
    for head, place in zip(own, places_of(view, own), strict=True):
        yield f"{name} · head {head}", _mean(mass[:, place], (0,)), _mean(uniform[:, place], (0,))


def _mean(numbers: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of what is a number; NaN where nothing is."""
    counts = np.isfinite(numbers).sum(axis=axes)
    mean: np.ndarray = np.where(counts > 0, np.nansum(numbers, axis=axes) / np.maximum(counts, 1), np.nan)
    return mean


def _cell(mass: float, uniform: float, precision: int) -> Text:
    if not np.isfinite(mass):
        return Text("–", style="dim")
    lift = mass / uniform if uniform > 0 else None
    said = f"{share_text(mass, precision)} {'–' if lift is None else f'×{short_text(lift)}':>{_LIFT_WIDTH}}"
    style = "" if lift is None else "bold" if lift >= _MUCH else "dim" if lift <= _LITTLE else ""
    return Text(said, style=style)
