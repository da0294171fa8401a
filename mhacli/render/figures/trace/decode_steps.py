"""A decoded sequence as a table: a row per step, what came in, what was read of the past, and how far it is from recomputing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from mhacli.render.base.format import bytes_text, count_text, fitted, number_text
from mhacli.render.base.options import balanced
from mhacli.render.base.steps import new_tokens_text
from mhacli.render.figures.svg.elements import FAINT, INK, MONO_EM, SOFT, Piece, element, rectangle, written
from mhacli.results.record.record import CacheStep, Record, Step

_SIZE, _ROW, _MOST, _APART, _TOKENS = 10.0, 17.0, 48, 2, 36
_BAR = 120.0
_COLUMNS = ("step", "phase", "new tokens", "past", "q", "k", "FLOPs", "cache", "differs by", "read of the past")
_LEFT = ("phase", "new tokens")


def has_steps(record: Record) -> bool:
    """Whether the trace is of decoding: every step reads what is kept of the past."""
    return bool(record.trace) and all(step.cache is not None for step in record.trace)


def step_table(record: Record) -> Piece:
    """The table, with a bar for what each step reads; of many steps the first and the last."""
    shown = balanced(len(record.trace), _MOST)
    steps = [(number, record.trace[number]) for number in shown.shown]
    cells = [_cells(number, step, step.cache) for number, step in steps if step.cache is not None]
    widths = [max(cell_len(line[i]) for line in (*cells, _COLUMNS[:-1])) for i in range(len(_COLUMNS) - 1)]
    starts = [sum(widths[:i]) + i * _APART for i in range(len(_COLUMNS))]
    content = _line(_COLUMNS, starts, widths, 0, fill=SOFT)
    largest = max(step.cache.read_bytes for _, step in steps if step.cache is not None) or 1
    y = _ROW
    for place, (_, step) in enumerate(steps):
        if shown.hidden and place == shown.before:
            content += written(0, y + 0.7 * _ROW, f"⋮ {shown.hidden} steps not drawn", _SIZE, fill=SOFT)
            y += _ROW
        assert step.cache is not None
        content += element("line", x1=0, y1=y, x2=_x(starts[-1]) + _BAR + 80, y2=y, stroke=FAINT, stroke_width=0.5)
        content += _line(cells[place], starts, widths, y, fill=INK)
        read = step.cache.read_bytes
        content += rectangle(_x(starts[-1]), y + 4, _BAR * read / largest, _ROW - 8, "#44607c")
        text = written(_x(starts[-1]) + _BAR * read / largest + 6, y + 0.7 * _ROW, bytes_text(read), _SIZE)
        content += text
        y += _ROW
    return Piece(content, _x(starts[-1]) + _BAR + 80, y)


def _x(cells: float) -> float:
    return cells * MONO_EM * _SIZE


def _line(texts: Sequence[str], starts: Sequence[int], widths: Sequence[int], y: float, *, fill: str) -> str:
    content = ""
    for place, text in enumerate(texts):
        is_left = _COLUMNS[place] in _LEFT or place == len(widths)
        x = starts[place] if is_left else starts[place] + widths[place]
        content += written(_x(x), y + 0.7 * _ROW, text, _SIZE, fill=fill, text_anchor=None if is_left else "end")
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
