"""A benchmark on the terminal and as CSV, and as plots of time and rate against length."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.commands.bench.result import LAYERS, Benchmark, BenchRow
from mhacli.render.base.doc import Column, Table, column
from mhacli.render.base.format import count_of, filled
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import bare, table
from mhacli.render.csv import rows_csv
from mhacli.render.figures import svg
from mhacli.render.figures.document import document
from mhacli.render.figures.svg import Piece, Sheet, element, placed, rectangle, written
from mhacli.render.page import elements
from mhacli.render.page.elements import Html, tag
from mhacli.render.report import POLICY
from mhacli.text.escape import visible
from mhacli.text.numbers import Unit, shown

_OUTCOMES = {"slower": "bold red", "inconclusive": "bold yellow", "passed": "bold green"}


def bench_view(benchmark: Benchmark, screen: Screen) -> RenderableType:
    """The complete output of `mha bench`: the answer, the times of each family of sizes, what they mean, and the machine."""
    parts: list[RenderableType] = [Text(visible(sentence), style="bold") for sentence in benchmark.summary]
    for family, rows in families(benchmark.rows).items():
        parts += [Text(), Text(visible(family), style="bold"), bare(_times(rows), screen.width), *_reasons(rows)]
    legend = filled([*_legend(benchmark)], screen.width) if any(row.interval for row in benchmark.rows) else []
    about = filled([*_machine(benchmark)], screen.width)
    parts += [Text(), Text("\n".join([*legend, *about]), style="dim")]
    return Group(*parts, *([] if benchmark.comparison is None else _changes(benchmark.comparison, screen.width)))


def sentences(benchmark: Benchmark) -> tuple[str, ...]:
    """One sentence per family of sizes: the fastest backend, its margin, and whether that is certain."""
    timed = families([row for row in benchmark.rows if row.interval is not None])
    if len(timed) < 2:
        return tuple(_sentence(rows) for rows in timed.values()) or ("nothing could be timed",)
    return tuple(f"{family}: {_sentence(rows)}" for family, rows in timed.items())


def _sentence(rows: Sequence[BenchRow]) -> str:
    """The fastest backend at the longest size against `explicit`, the plain formula, or else against the slowest."""
    first, *others = sorted(_longest(rows), key=lambda row: row.median_s or 0.0)
    time = shown(first.median_s, "seconds")
    if not others:
        return f"{first.backend} takes {time} at {first.length_text}; no other backend was timed"
    other = next((row for row in others if row.backend == "explicit"), others[-1])
    low, high = other.ratio_low or 0.0, other.ratio_high or 0.0
    is_certain = first.is_sure and low > 1
    faster = f"{shown(other.ratio or 1.0, 'short')} × faster than {other.backend} at {first.length_text}"
    interval = f"95 % interval {shown(low, 'short')} to {shown(high, 'short')} ×"
    evidence = f"{shown(other.median_s, 'seconds')} against {time}, {interval}"
    return f"{first.backend} {'is' if is_certain else 'was'} {faster} ({evidence}){', which may be chance' * (not is_certain)}"


def families(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """Rows that differ only in batch, length and backend, by their common properties, in the order of measurement."""
    by_family: dict[str, list[BenchRow]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row)
    return by_family


def _longest(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The timed rows of the longest size, of those with two of them if any."""
    timed = [row for row in rows if row.interval is not None]
    sizes = [[row for row in timed if row.size == size] for size in dict.fromkeys(row.size for row in timed)]
    return max(sizes, key=lambda of_size: (len(of_size) > 1, of_size[0].k_len, of_size[0].batch), default=[])


# -------------------------------------------------------------------------------------------------------------- tables


def size_text(row: BenchRow) -> str:
    """Batch and length; the length alone for a batch of one."""
    return f"{row.k_len}" if row.batch == 1 else f"{row.batch} × {row.k_len}"


def _ends(low: float | None, high: float | None, unit: Unit) -> str | None:
    return None if low is None or high is None else f"{shown(low, unit)}–{shown(high, unit)}"


_COLUMNS: Sequence[Column[BenchRow]] = (
    column("bench", "ratio", lambda row: row.ratio, "short"),
    column("bench", "memory", lambda row: row.extra_bytes, "bytes"),
    column("bench", "error", lambda row: shown(row.max_error, "error", 0)),
    column("bench", "interval", lambda row: _ends(row.ratio_low, row.ratio_high, "short")),
    column("bench", "rate", lambda row: None if row.tflops is None else f"{row.tflops:.3g}"),
    column("bench", "quartiles", lambda row: _ends(row.p25_s, row.p75_s, "seconds")),
)
"""The numbers of a row beside its time, the most important first."""


def _times(rows: Sequence[BenchRow]) -> Table[str]:
    """The times of the backends at each size, the fastest at the longest one first, and its other numbers. Of sizes, a narrow
    screen leaves out the shortest, after these numbers."""
    longest = {row.backend: row for row in sorted(_longest(rows), key=lambda row: row.median_s or 0.0)}
    timed = [row for row in rows if row.interval is not None]
    names = [*dict.fromkeys([*longest, *(row.backend for row in timed)])]
    first = {name: _kernel_text([row for row in rows if row.backend == name]) for name in names}
    times = {(row.backend, size_text(row)): _time(row) for row in timed}
    sizes = [*dict.fromkeys(map(size_text, rows))]

    def time_at(size: str) -> Callable[[str], str]:
        return lambda name: times.get((name, size), "– ")

    def number(of: Column[BenchRow]) -> Callable[[str], str | None]:
        return lambda name: of.text(longest[name]) if name in longest else None

    columns: list[Column[str]] = [Column(heading="backend", value=first.__getitem__, least=_MOST)]
    for drop, size in enumerate(reversed(sizes)):
        columns.insert(1, Column(heading=f"{size} ", value=time_at(size), unit="id", drop=drop))
    for drop, of in enumerate(_COLUMNS, len(sizes)):
        columns.append(Column(heading=of.heading, value=number(of), unit="id", drop=drop))
    return Table(columns=columns, rows=names, gap=1)


_MOST = 100
"""The widest name of a backend, which is never shortened."""


def _time(row: BenchRow) -> str:
    """The median, with a sign where the row is not certainly slower than the fastest."""
    return f"{shown(row.median_s, 'seconds')}{'*' if row.ratio == 1 or row.is_similar else ' '}"


def _kernel_text(rows: Sequence[BenchRow]) -> str:
    """A backend, with the kernels that ran unless its name says so."""
    name = rows[0].backend
    kernels = [str(row.ran) for row in rows if row.ran not in (None, name) and name != "torch-mha-weights"]
    return f"{name} → {', '.join(dict.fromkeys(kernels))}" if kernels else name


def _why(row: BenchRow) -> str:
    return ": ".join(word for word in (row.status, row.reason) if word not in ("ok", None))


def _reasons(rows: Sequence[BenchRow]) -> Iterator[Text]:
    """Why rows have no time, or no error, with the sizes unless it holds for all."""
    sizes_of: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            sizes_of.setdefault(f"{row.backend}: {_why(row)}", []).append(size_text(row))
    for why, sizes in sizes_of.items():
        where = "" if {*sizes} == {*map(size_text, rows)} else f" (at {', '.join(sizes)})"
        yield Text(visible(why + where), style="dim")


def _legend(benchmark: Benchmark) -> Iterator[str]:
    """What numbers and signs mean, and doubts about the times."""
    timed = [row for row in benchmark.rows if row.interval is not None]
    batches = " (batch × length)" if any(row.batch > 1 for row in timed) else ""
    lengths = dict.fromkeys(_longest(rows)[0].length_text for rows in families(timed).values())
    yield f"median time of a call by number of tokens{batches}"
    yield "* fastest, or not certainly slower"
    yield f"ratio to the fastest, memory of torch's allocator, error against float64: at {', '.join(lengths)}"
    if not all(row.is_sure for row in timed):
        yield "too few rounds: intervals are the whole range of the times"
    if any(row.backend in LAYERS for row in timed):
        yield "torch-mha computes the projections too"
    yield "every number: --csv"


def _machine(benchmark: Benchmark) -> Iterator[str]:
    e = benchmark.environment
    yield f"mha {e['mha']} bench"
    yield f"{e['device']}{' (auto)' * (e['device_asked'] == 'auto')}"
    yield visible(e["device_name"])
    if e["driver"] is not None:
        yield f"driver {e['driver']}"
    yield f"{count_of(e['threads'], 'thread')} of {count_of(e['n_cpus'], 'core')}"
    yield f"torch {e['torch']}"
    yield f"load {e['load_average'] or 0:.1f} at the start"
    yield f"seed {benchmark.seed}"


def _changes(comparison: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """Each size's ratio to the baseline, the rows that cannot be compared, and the outcome."""
    yield Text(f"\nagainst {visible(comparison['baseline'])}", style="bold")
    colours = {"slower": "red", "faster": "green"}
    look: dict[str, Any] = {"style": lambda row: colours.get(row["verdict"], "")}
    columns: list[Column[Mapping[str, Any]]] = [
        Column(heading="backend", value=itemgetter("backend"), **look),
        Column(heading="then", value=itemgetter("baseline_s"), unit="seconds", **look),
        Column(heading="now", value=itemgetter("median_s"), unit="seconds", **look),
        Column(heading="now/then", value=itemgetter("ratio"), unit="short", **look),
        Column(
            heading="95 %", value=lambda row: _ends(row["ratio_low"], row["ratio_high"], "short"), unit="id", **look
        ),
        Column(heading="", value=itemgetter("verdict"), **look),
    ]
    for size, changes in groupby(comparison["changes"], key=itemgetter("name")):
        yield from table(Table(columns=columns, rows=[*changes], title=size), width)
    alone = count_of(len(comparison["unmatched"]), "row") + " in one of the runs alone (--json)"
    notes = [*comparison["warnings"], *comparison["broken"], *([alone] if comparison["unmatched"] else [])]
    yield from (Text(visible(line), style="dim") for line in notes)
    style = "bold" if comparison["rule"] is None else _OUTCOMES[comparison["rule"]["outcome"]]
    yield Text(f"\n{visible(comparison['summary'])}", style=style)


def csv_pieces(benchmark: Benchmark) -> Iterator[str]:
    """The rows as CSV: every number but the samples, with JSON names as headings."""
    documents = [asdict(row) for row in benchmark.rows]
    return rows_csv([{name: value for name, value in row.items() if name != "samples_s"} for row in documents])


# --------------------------------------------------------------------------------------------------------------- plots


def bench_page(benchmark: Benchmark) -> str:
    """One static page: the picture, and every row as a table."""
    picture = bench_figure(benchmark)
    columns: list[Column[BenchRow]] = [
        column("bench", "backend", lambda row: _kernel_text([row])),
        column("bench", "size", size_text),
        column("bench", "median", lambda row: row.median_s, "seconds"),
        *_COLUMNS,
        Column(heading="", value=lambda row: visible(_why(row))),
    ]
    plots = tag("div", Html(picture[picture.index("<svg") :]), class_="scroll")
    tables = [
        elements.table(Table(columns=columns, rows=rows, title=family))
        for family, rows in families(benchmark.rows).items()
    ]
    body = tag("main", *(tag("section", part, class_="numbers") for part in (plots, *tables)))
    return elements.whole("mha bench", POLICY, elements.page_style(), body)


_COLOURS = (
    "#006ba4", "#ff800e", "#595959", "#5f9ed1", "#c85200", "#ababab", "#1a1a1a", "#ffbc79", "#a2c8ec", "#898989"
)  # fmt: skip
"""Colours that readers with any colour vision tell apart."""
_LEFT, _TOP, _RIGHT, _BOTTOM = 50.0, 20.0, 430.0, 250.0
"""The edges of the area of a chart, beside which its labels stand."""
_TICKS = [digit * 10.0**power for power in range(-12, 13) for digit in (1, 2, 5)]


def bench_figure(benchmark: Benchmark) -> str:
    """An SVG picture of time and rate against length, for each family of sizes, and each of the batches that were asked for."""
    timed = [row for row in benchmark.rows if row.interval is not None]
    colours = dict(zip(dict.fromkeys(row.backend for row in timed), _COLOURS, strict=False))
    series: dict[str, list[BenchRow]] = {}
    for row in timed:
        series.setdefault(f"batch {row.batch} · {row.family}" if benchmark.sweep.batch else row.family, []).append(row)
    key, x = "", 0.0
    for backend, colour in colours.items():
        key += rectangle(x, 2, 10, 10, colour) + written(x + 15, 11, backend, 10)
        x += svg.mono_width(backend, 10) + 35
    body = [Piece(key, x, 14)]
    for title, rows in series.items():
        times = _chart(rows, "time of a call (ms)", lambda row: 1e3 * (row.median_s or 0.0), colours)
        rates = _chart(rows, "TFLOP/s", lambda row: row.tflops or 0.0, colours)
        charts = placed(times, 0, 0) + placed(rates, times.width, 0)
        body += [svg.lines([visible(title)]), Piece(charts, times.width + rates.width, times.height)]
    about = visible(" · ".join([shlex.join(benchmark.command), *_machine(benchmark)]))
    sheet = Sheet(title="mha bench", about=[about], body=body, drawn=[*colours])
    return document(sheet, ". ".join(benchmark.summary), {"command": [*benchmark.command]})


def _chart(
    rows: Sequence[BenchRow], label: str, number: Callable[[BenchRow], float], colours: Mapping[str, str]
) -> Piece:
    """A line per backend of a number against length, on logarithmic axes."""
    rows = [row for row in rows if number(row) > 0]
    if not rows:
        return Piece()
    numbers, lengths = [*map(number, rows)], {row.k_len for row in rows}
    first, last = bisect_right(_TICKS, min(numbers)) - 1, bisect_left(_TICKS, max(numbers))
    ticks = _TICKS[first : max(last, first + 1) + 1]

    def x(length: int) -> float:
        return float(np.interp(math.log(length), np.log([min(lengths) / 1.1, max(lengths) * 1.1]), [_LEFT, _RIGHT]))

    def y(value: float) -> float:
        return float(np.interp(math.log(value), np.log([ticks[0], ticks[-1]]), [_BOTTOM, _TOP]))

    content = written(_LEFT, _TOP - 8, label, 10) + written(_RIGHT, _BOTTOM + 30, "tokens", 9, text_anchor="end")
    for tick in ticks:
        content += rectangle(_LEFT, y(tick), _RIGHT - _LEFT, 0.5, svg.FAINT)
        content += written(_LEFT - 6, y(tick) + 3, f"{tick:g}", 9, text_anchor="end")
    for length in lengths:
        content += written(x(length), _BOTTOM + 15, str(length), 9, text_anchor="middle")
    for backend, colour in colours.items():
        points = [(x(row.k_len), y(number(row))) for row in rows if row.backend == backend]
        path = " ".join(f"{svg.value_text(a)},{svg.value_text(b)}" for a, b in points)
        content += element("polyline", points=path, fill="none", stroke=colour, stroke_width=2)
        content += "".join(element("circle", cx=a, cy=b, r=3, fill=colour) for a, b in points)
    return Piece(content, _RIGHT + 20, _BOTTOM + 35)
