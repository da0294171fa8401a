"""A benchmark on the terminal, and as plots of time and rate against length."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter, methodcaller
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.numbers import Unit, shown
from mhacli.record.shown import draws
from mhacli.render.base.doc import Column, Table, column
from mhacli.render.base.format import count_of, escaped, flowing
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import table
from mhacli.render.figures import svg
from mhacli.render.figures.svg import Piece, element, rectangle, written
from mhacli.text.escape import visible

from .result import Benchmark, BenchRow


@draws(Benchmark)
def bench_view(benchmark: Benchmark, screen: Screen) -> RenderableType:
    """The complete output of `mha bench`: the answer, the times, what they mean, and the
    machine.
    """
    return Group(
        escaped(benchmark.summary, "bold"),
        Text(),
        *table(_times(benchmark), screen.width),
        *_reasons(benchmark.rows),
        Text(),
        flowing(_machine(benchmark), screen.width, style="dim"),
    )


# ------------------------------------------------------------------------------------------- tables


def _size(row: BenchRow) -> str:
    """Batch and length; the length alone for a batch of one."""
    return f"{row.k_len}" if row.batch == 1 else f"{row.batch} × {row.k_len}"


def _ends(low: float | None, high: float | None, unit: Unit) -> str | None:
    return None if low is None or high is None else f"{shown(low, unit)}–{shown(high, unit)}"


_NUMBERS: Sequence[Column[BenchRow]] = (
    column("bench", "ratio", lambda row: row.ratio, "short"),
    column("bench", "memory", lambda row: row.extra_bytes, "bytes"),
    column("bench", "error", lambda row: shown(row.max_error, "error", 1), "id"),
    column("bench", "interval", lambda row: _ends(row.ratio_low, row.ratio_high, "short"), "id"),
    column("bench", "rate", lambda row: None if row.tflops is None else f"{row.tflops:.3g}", "id"),
    column("bench", "quartiles", lambda row: _ends(row.p25_s, row.p75_s, "seconds"), "id"),
)
"""The numbers of a row beside its time, the most important first."""


def _times(benchmark: Benchmark) -> Table[Mapping[str, str]]:
    """The times of the backends at each size, the fastest at the longest one first, and its other
    numbers. Of sizes, a narrow screen leaves out the shortest, after these numbers.
    """
    sizes = [*dict.fromkeys(map(_size, benchmark.rows))]
    cells = {
        row.backend: {each.heading: each.text(row) for each in _NUMBERS}
        for row in benchmark.longest
    }
    for row in benchmark.rows:
        if row.median_s is not None:
            star = "* " if row.ratio == 1 or row.is_similar else ""
            times = cells.setdefault(row.backend, {})
            times[_size(row)] = star + shown(row.median_s, "seconds")
            is_known = row.ran == row.backend or row.backend == "torch-mha-weights"
            times["backend"] = row.backend if is_known else f"{row.backend} → {row.ran}"
    columns = [Column[Mapping[str, str]](heading="backend", value=itemgetter("backend"))]
    meanings = dict.fromkeys(sizes, "") | {each.heading: each.meaning for each in _NUMBERS}
    drops = [*reversed(range(len(sizes))), *range(len(sizes), len(meanings))]
    for (heading, meaning), drop in zip(meanings.items(), drops, strict=True):
        value = methodcaller("get", heading)
        columns.append(Column(heading, value, unit="id", drop=drop, meaning=meaning))
    legend = ["* fastest, or not certainly slower"]
    title = benchmark.rows[0].family
    return Table(columns=columns, rows=[*cells.values()], title=title, gap=1, legend=legend)


def _reasons(rows: Sequence[BenchRow]) -> Iterator[Text]:
    """Why rows have no time, or no error, with the sizes."""
    sizes: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            words = (row.backend, row.status, row.reason)
            sizes.setdefault(": ".join(word for word in words if word != "ok"), []).append(
                _size(row)
            )
    for why, of_why in sizes.items():
        yield escaped(f"{why} (at {', '.join(of_why)})", "dim")


def _machine(benchmark: Benchmark) -> Iterator[str]:
    e = benchmark.environment
    yield f"mha {e['mha']} bench"
    device = f"{e['device']} (auto)" if e["device_asked"] == "auto" else e["device"]
    yield visible(f"{device}, {e['device_name']}")
    yield f"{count_of(e['threads'], 'thread')} of {count_of(e['n_cpus'], 'core')}"
    yield f"torch {e['torch']}"
    yield f"load {e['load_average'] or 0:.1f} at the start"
    yield f"seed {benchmark.seed}"


# -------------------------------------------------------------------------------------------- plots


_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#808080")
"""Colours that readers with any colour vision tell apart, with a contrast of 3 to light and dark
pages. Source: four of Okabe and Ito 2008, "Color Universal Design".
"""
_DASHES = "5 3"
"""Of the lines after the first of each colour."""
_LEFT = 50.0
"""The left edge of the area of a chart, beside which its labels stand."""
_SIZE = 10.0
"""The size of its labels."""
_TOP = 20.0
_RIGHT = 310.0
_BOTTOM = 220.0


def plots(benchmark: Benchmark) -> list[Piece]:
    """Time and rate against length."""
    timed = [row for row in benchmark.rows if row.median_s is not None]
    if not timed:
        return []
    strokes: list[dict[str, Any]] = [
        {"fill": "none", "stroke": colour, "stroke_width": 2, "stroke_dasharray": dashes}
        for dashes in (None, _DASHES)
        for colour in _COLOURS
    ]
    lines = dict(zip(dict.fromkeys(row.backend for row in timed), strokes, strict=False))
    key, x, y = "", 0.0, 11.0
    for backend, line in lines.items():
        width = svg.mono_width(backend, _SIZE) + 30
        if x + width > _RIGHT:
            x, y = 0.0, y + 16
        key += element("polyline", points=f"{x},{y - 4} {x + 20},{y - 4}", **line)
        key += written(x + 25, y, backend, _SIZE)
        x += width + 15
    batch = f"batch {timed[0].batch} · " if benchmark.sweep.batch else ""
    times = _chart(timed, "time of a call (ms)", lambda row: 1e3 * (row.median_s or 0.0), lines)
    rates = _chart(timed, "TFLOP/s", lambda row: row.tflops or 0.0, lines)
    words = svg.lines([batch + timed[0].family])
    return [svg.stacked([words, Piece(key, _RIGHT, y + 3)], 8), times, rates]


def _chart(
    rows: Sequence[BenchRow],
    label: str,
    number: Callable[[BenchRow], float],
    lines: Mapping[str, Mapping[str, Any]],
) -> Piece:
    """A line per backend of a number against length, on logarithmic axes. A length without room
    has no label.
    """
    powers = [math.log10(number(row)) for row in rows]
    lengths = sorted({row.k_len for row in rows})
    ticks = [10.0**power for power in range(math.floor(min(powers)), math.floor(max(powers)) + 2)]

    def x(length: int) -> float:
        return float(
            np.interp(
                math.log(length), np.log([min(lengths) / 1.1, max(lengths) * 1.1]), [_LEFT, _RIGHT]
            )
        )

    def y(value: float) -> float:
        return float(np.interp(math.log(value), np.log([ticks[0], ticks[-1]]), [_BOTTOM, _TOP]))

    content = written(_LEFT, _TOP - 8, label, _SIZE) + written(
        _RIGHT, _BOTTOM + 30, "tokens", _SIZE, text_anchor="end"
    )
    for tick in ticks:
        content += rectangle(_LEFT, y(tick), _RIGHT - _LEFT, 0.5, svg.FAINT)
        content += written(_LEFT - 6, y(tick) + 3, f"{tick:g}", _SIZE, text_anchor="end")
    end = 0.0
    for length in lengths:
        half = svg.mono_width(str(length), _SIZE) / 2
        if x(length) - half >= end:
            content += written(x(length), _BOTTOM + 15, str(length), _SIZE, text_anchor="middle")
            end = x(length) + half + _SIZE
    for backend, line in lines.items():
        points = [(x(row.k_len), y(number(row))) for row in rows if row.backend == backend]
        path = " ".join(f"{svg.value_text(a)},{svg.value_text(b)}" for a, b in points)
        content += element("polyline", points=path, **line)
        for a, b in points:
            content += element("circle", cx=a, cy=b, r=3, fill=line["stroke"])
    return Piece(content, _RIGHT + 20, _BOTTOM + 35)
