"""A benchmark on the terminal and as CSV, and as plots of time and rate against length."""

from __future__ import annotations

import csv
import io
import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.commands.bench.result import Benchmark, Comparison
from mhacli.commands.bench.workload import LAYERS, BenchRow
from mhacli.io.files import write_whole
from mhacli.record.glossary import words_of
from mhacli.render.base.format import bytes_text, count_of, filled, or_dash, plain_table, seconds_text
from mhacli.render.base.options import Screen
from mhacli.render.csv import cell_text
from mhacli.render.page.elements import Html, table, tag, text
from mhacli.text.escape import visible

_SPARE = ("ratio", "memory", "error", "interval", "rate", "quartiles")
"""The numbers at the longest length that are shown beside all times, as far as there is room."""
_OUTCOMES = {"slower": "bold red", "inconclusive": "bold yellow", "passed": "bold green"}


def bench_view(benchmark: Benchmark, comparison: Comparison | None, screen: Screen) -> RenderableType:
    """The complete output of `mha bench`: the answer, the times of each family of sizes, what they mean, and the machine."""
    parts: list[RenderableType] = [Text(visible(sentence), style="bold") for sentence in benchmark.summary]
    for family, rows in families(benchmark.rows):
        parts += [Text(), Text(visible(family), style="bold"), *_times(rows, screen.width), *_reasons(rows)]
    legend = filled([*_legend(benchmark)], screen.width) if any(row.interval for row in benchmark.rows) else []
    about = filled([*_machine(benchmark)], screen.width)
    parts += [Text(), Text("\n".join([*legend, *about]), style="dim")]
    return Group(*parts, *([] if comparison is None else _changes(comparison)))


def sentences(benchmark: Benchmark) -> tuple[str, ...]:
    """One sentence per family of sizes: the fastest backend, its margin, and whether that is certain."""
    timed = families([row for row in benchmark.rows if row.interval is not None])
    if len(timed) < 2:
        return tuple(_sentence(rows) for _, rows in timed) or ("nothing could be timed",)
    return tuple(f"{family}: {_sentence(rows)}" for family, rows in timed)


def _sentence(rows: Sequence[BenchRow]) -> str:
    """The fastest backend at the longest size against `explicit`, the plain formula, or else against the slowest."""
    first, *others = sorted(_longest(rows), key=lambda row: row.median_s or 0.0)
    time = seconds_text(first.median_s)
    if not others:
        return f"{first.backend} takes {time} at {first.length_text}; no other backend was timed"
    other = next((row for row in others if row.backend == "explicit"), others[-1])
    low, high = other.ratio_low or 0.0, other.ratio_high or 0.0
    is_certain = first.is_sure and low > 1
    faster = f"{ratio_text(other.ratio or 1.0)} × faster than {other.backend} at {first.length_text}"
    evidence = f"{seconds_text(other.median_s)} against {time}, 95 % interval {ratio_text(low)} to {ratio_text(high)} ×"
    return f"{first.backend} {'is' if is_certain else 'was'} {faster} ({evidence}){', which may be chance' * (not is_certain)}"


def families(rows: Sequence[BenchRow]) -> list[tuple[str, list[BenchRow]]]:
    """Rows that differ only in batch, length and backend, by their common properties, in the order of measurement."""
    by_family: dict[str, list[BenchRow]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row)
    return list(by_family.items())


def _longest(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The timed rows of the longest size, of those with two of them if any."""
    timed = [row for row in rows if row.interval is not None]
    sizes = [[row for row in timed if row.size == size] for size in dict.fromkeys(row.size for row in timed)]
    return max(sizes, key=lambda of_size: (len(of_size) > 1, of_size[0].k_len, of_size[0].batch), default=[])


def ratio_text(ratio: float) -> str:
    """A ratio in three digits: `0.98`, `3.40`, `24.6`, `1,234`."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"


# -------------------------------------------------------------------------------------------------------------- tables


def size_text(row: BenchRow) -> str:
    """Batch and length; the length alone for a batch of one."""
    return f"{row.k_len}" if row.batch == 1 else f"{row.batch} × {row.k_len}"


def _numbers(row: BenchRow) -> dict[str, str]:
    """The texts of the numbers of a timed row, by column."""
    return {
        "median": seconds_text(row.median_s),
        "quartiles": f"{seconds_text(row.p25_s)}–{seconds_text(row.p75_s)}",
        "ratio": or_dash(row.ratio, ratio_text),
        "interval": f"{or_dash(row.ratio_low, ratio_text)}–{or_dash(row.ratio_high, ratio_text)}",
        "rate": or_dash(row.tflops, "{:.3g}".format),
        "memory": "–" if row.extra_bytes is None else bytes_text(row.extra_bytes),
        "error": or_dash(row.max_error, "{:.0e}".format),
    }


def _times(rows: Sequence[BenchRow], width: int) -> Iterator[Table]:
    """The times of the backends at each size, the fastest at the longest one first, and its other numbers. What is wider than the
    screen continues in another table."""
    longest = {row.backend: row for row in sorted(_longest(rows), key=lambda row: row.median_s or 0.0)}
    names = [*longest, *dict.fromkeys(row.backend for row in rows if row.interval and row.backend not in longest)]
    columns = []
    for size in dict.fromkeys(map(size_text, rows)):
        of_size = {row.backend: row for row in rows if size_text(row) == size}
        columns.append([f"{size} ", *(_time(of_size.get(name)) for name in names)])
    numbers = [_numbers(longest[name]) if name in longest else {} for name in names]
    spare = [[words_of("columns", "bench")[of].heading, *(each.get(of, "–") for each in numbers)] for of in _SPARE]
    first = ["backend", *(_kernel_text([row for row in rows if row.backend == name]) for name in names)]
    tables, room = list[list[list[str]]](), 0
    for column in [*columns, *spare]:
        needed = 1 + max(map(cell_len, column))
        if needed > room and column in columns:
            tables.append([first])
            room = width - max(map(cell_len, first))
        if needed <= room or column in columns:
            tables[-1].append(column)
            room -= needed
    for shown in tables if names else []:
        table = plain_table(*((heading, heading != "backend") for heading, *_ in shown), gap=1)
        for cells in zip(*(cells for _, *cells in shown), strict=True):
            table.add_row(*cells)
        yield table


def _time(row: BenchRow | None) -> str:
    """The median, with a sign where the row is not certainly slower than the fastest."""
    if row is None or row.ratio is None:
        return "– "
    return f"{seconds_text(row.median_s)}{'*' if row.ratio == 1 or row.is_similar else ' '}"


def _kernel_text(rows: Sequence[BenchRow]) -> str:
    """A backend, with the kernels that ran unless its name says so."""
    name = rows[0].backend
    kernels = [str(row.ran) for row in rows if row.ran not in (None, name) and name != "torch-mha-weights"]
    return f"{name} → {', '.join(dict.fromkeys(kernels))}" if kernels else name


def _reasons(rows: Sequence[BenchRow]) -> Iterator[Text]:
    """Why rows have no time, or no error, with the sizes unless it holds for all."""
    sizes_of: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            status = "" if row.status == "ok" else f"{row.status}: "
            sizes_of.setdefault(f"{row.backend}: {status}{row.reason}", []).append(size_text(row))
    for why, sizes in sizes_of.items():
        where = "" if {*sizes} == {*map(size_text, rows)} else f" (at {', '.join(sizes)})"
        yield Text(visible(why + where), style="dim")


def _legend(benchmark: Benchmark) -> Iterator[str]:
    """What numbers and signs mean, and doubts about the times."""
    timed = [row for row in benchmark.rows if row.interval is not None]
    batches = " (batch × length)" if any(row.batch > 1 for row in timed) else ""
    lengths = dict.fromkeys(_longest(rows)[0].length_text for _, rows in families(timed))
    yield f"median time of a call by number of tokens{batches}"
    yield "* fastest, or not certainly slower"
    yield f"ratio to the fastest, memory of torch's allocator, error against float64: at {', '.join(lengths)}"
    is_on_cuda = benchmark.environment["device"].startswith("cuda")  # its clock excludes the overhead of calls
    if not is_on_cuda and any((row.median_s or 0.0) < 1e-3 for row in timed):
        yield "below a millisecond mostly the cost of calling torch"
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


def _changes(comparison: Comparison) -> Iterator[RenderableType]:
    """Each size's ratio to the baseline, the rows that cannot be compared, and the outcome."""
    yield Text(f"\nagainst {visible(comparison.baseline)}", style="bold")
    for size, changes in groupby(comparison.changes, key=itemgetter("name")):
        headings = [(name, True) for name in ("then", "now", "now/then", "95 %")]
        columns = plain_table(("backend", False), *headings, ("", False))
        for change in changes:
            cells = [seconds_text(change["baseline_s"]), seconds_text(change["median_s"]), ratio_text(change["ratio"])]
            cells.append(f"{ratio_text(change['ratio_low'])}–{ratio_text(change['ratio_high'])}")
            colour = {"slower": "red", "faster": "green"}.get(change["verdict"])
            columns.add_row(change["backend"], *cells, change["verdict"], style=colour)
        yield from (Text(size), columns)
    alone = count_of(len(comparison.unmatched), "row") + " in one of the runs alone (--json)"
    notes = [*comparison.warnings, *comparison.broken, *([alone] if comparison.unmatched else [])]
    yield from (Text(visible(line), style="dim") for line in notes)
    style = "bold" if comparison.rule is None else _OUTCOMES[comparison.rule["outcome"]]
    yield Text(f"\n{visible(comparison.summary)}", style=style)


def csv_pieces(benchmark: Benchmark) -> Iterator[str]:
    """The rows as CSV (RFC 4180): every number but the samples, with JSON names as headings."""
    documents = [asdict(row) for row in benchmark.rows]
    names = [name for name in documents[0] if name != "samples_s"]
    paper = io.StringIO()
    writer = csv.DictWriter(paper, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"reason": row["reason"] and cell_text(row["reason"])} for row in documents)
    yield paper.getvalue()


# --------------------------------------------------------------------------------------------------------------- plots


_MARKS = "osD^vP*X<>"
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "mha", "font.family": "sans-serif", "font.size": 9, "axes.grid": True,
    "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>mha bench</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }}
svg {{ max-width: 100%; height: auto }}
.scroll {{ overflow-x: auto; margin: 1rem 0 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
caption {{ text-align: left; font-weight: bold }}
th, td {{ padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
</style></head><body>
<h1>mha bench</h1>
{body}
</body></html>
"""
_PAGE_COLUMNS = ("median", "quartiles", "ratio", "interval", "rate", "memory", "error")


def write_plots(benchmark: Benchmark, svg: str | None, html: str | None, *, force: bool) -> None:
    """Writes the picture and the page that were requested."""
    if svg is None and html is None:
        return
    picture = _svg(benchmark)
    if svg is not None:
        write_whole(svg, picture.encode(), force=force)
    if html is not None:
        write_whole(html, _page(benchmark, picture).encode(), force=force)


def _page(benchmark: Benchmark, picture: str) -> str:
    """One static page: the picture, and every row as a table."""
    words = words_of("columns", "bench")
    parts = [tag("p", text(_about(benchmark))), Html(picture[picture.index("<svg") :])]
    for family, rows in families(benchmark.rows):
        lines = []
        for row in rows:
            cells = [_numbers(row)[name] for name in _PAGE_COLUMNS]
            if row.interval is None:
                cells = [visible(f"{row.status}: {row.reason}")]
            lines.append([text(cell) for cell in (_kernel_text([row]), size_text(row), *cells)])
        headings = [words[name].heading for name in ("backend", "size", *_PAGE_COLUMNS)]
        parts.append(table(family, headings, lines))
    return _PAGE.format(body="\n".join(parts))


def _about(benchmark: Benchmark) -> str:
    """The command and the machine."""
    return visible(" · ".join([shlex.join(benchmark.command), *_machine(benchmark)]))


def _svg(benchmark: Benchmark) -> str:
    """Time on the left and rate on the right against length, for each family of sizes."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs its caches
    import matplotlib.style
    from matplotlib.figure import Figure

    timed = [row for row in benchmark.rows if row.interval is not None]
    series = dict[str, list[BenchRow]]()
    for row in timed:  # lengths of several batches are lines of their own
        series.setdefault(f"batch {row.batch} · {row.family}" if benchmark.sweep.batch else row.family, []).append(row)
    backends, about = list(dict.fromkeys(row.backend for row in timed)), _about(benchmark)
    with matplotlib.style.context(["tableau-colorblind10", _STYLE]):
        figure = Figure(figsize=(10, 3.6 * len(series) + 0.8), layout="constrained")
        axes = figure.subplots(len(series), 2, squeeze=False)
        for (title, rows), (left, right) in zip(series.items(), axes, strict=True):
            left.set_title(visible(title), loc="left", fontsize=9)
            _plot(rows, backends, left, right)
        figure.supxlabel(about.replace("$", r"\$"), fontsize=7, color="#555555", wrap=True)  # $ would begin a formula
        paper = io.StringIO()
        figure.savefig(paper, format="svg", metadata={"Date": None, "Creator": "mha", "Description": about})
    return paper.getvalue()


def _plot(rows: Sequence[BenchRow], backends: Sequence[str], left: Any, right: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    for place, backend in enumerate(backends):
        line = [row for row in rows if row.backend == backend]
        lengths, colour = [row.k_len for row in line], f"C{place}"
        look = {"color": colour, "marker": _MARKS[place], "markersize": 4, "label": backend}
        median, low, high = ([1e3 * getattr(row, name) for row in line] for name in ("median_s", "p25_s", "p75_s"))
        left.plot(lengths, median, **look)
        left.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
        right.plot(lengths, [row.tflops for row in line], **look)
    sizes = {row.k_len: size_text(row) for row in rows}
    for axes, label in ((left, "time of a call (ms), p25–p75 shaded"), (right, "TFLOP/s")):
        axes.set(xscale="log", yscale="log", ylabel=label, xlabel="tokens")
        axes.set_xticks(list(sizes), list(sizes.values()))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
    left.legend(fontsize=7, ncols=2, loc="upper left")  # the upper left is free because times grow to the right
