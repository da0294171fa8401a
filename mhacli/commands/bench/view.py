"""A benchmark as tables, JSON and CSV, and as plots of time and rate against length."""

from __future__ import annotations

import csv
import html
import io
import logging
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from io import StringIO
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.commands.bench.result import NOT_NOW, Benchmark, Comparison
from mhacli.commands.bench.workload import BACKENDS, LAYERS, MIN_ROUNDS, RETURNS_PATTERN, BenchRow
from mhacli.errors import MhaError, missing_library
from mhacli.io.files import write_whole
from mhacli.record.glossary import words_of
from mhacli.render.base.format import bytes_text, count_of, filled, seconds_text, seconds_unit
from mhacli.render.base.options import Screen
from mhacli.render.csv import cell_text
from mhacli.text.escape import visible

_BAR = 8
_SHORT_S = 1e-3
_ALONE_SHOWN = 3
"""The most rows without a counterpart that are named. More are counted."""
_COLUMNS = tuple(name for name in words_of("columns", "bench") if name != "change")
_LEAST_WIDTHS = {
    "quartiles": 104, "interval": 104, "rate": 88, "first": 120, "min": 134, "n": 134, "mean": 150,
    "intensity": 160,
}  # fmt: skip
"""The least screen width for some columns. The others are always shown."""
_DROP_ORDER = (
    "mean", "intensity", "n", "min", "first", "rate", "quartiles", "interval", "error", "memory", "bar"
)  # fmt: skip
"""Columns in the order in which they are dropped if others need the room. Numbers are never cut."""
_CHANGED = ("then", "now", words_of("columns", "bench")["change"].heading, "95 % of both", "verdict")
_CHANGED_NARROW = ("now/then", "95 %", "verdict")
_NARROW = 60
"""The least screen width for both times beside their ratio."""
_SIMILAR = "≈ not certainly changed: the interval contains 1"
_NAME = max(map(len, BACKENDS))


def bench_view(benchmark: Benchmark, comparison: Comparison | None, screen: Screen) -> RenderableType:
    """The complete output of `mha bench`."""
    parts: list[RenderableType] = [_machine(benchmark, screen.width)]
    for family, rows in families(benchmark.rows):
        parts += [Text(), _family(family, rows, benchmark, screen)]
    rounds = [row for row in benchmark.rows if row.samples_s]
    parts += [Text(), _legend(benchmark, rounds, screen)] if rounds else []
    parts.append(Text())
    parts += [Text(visible(sentence), style="bold") for sentence in benchmark.summary]
    if comparison is not None:
        parts += [Text(), _changes(comparison, screen), Text(), _conclusion(comparison)]
    return Group(*parts)


def sentences(benchmark: Benchmark) -> tuple[str, ...]:
    """One sentence per family of sizes: the fastest backend, its margin, and whether that is certain."""
    timed = families([row for row in benchmark.rows if row.interval is not None])
    if len(timed) < 2:
        return tuple(_sentence(rows) for _, rows in timed) or ("nothing could be timed",)
    return tuple(f"{family}: {_sentence(rows)}" for family, rows in timed)


def _sentence(rows: Sequence[BenchRow]) -> str:
    """The fastest backend at the longest size, of those with two timed rows if any, against `explicit`, the plain formula, or
    else against the slowest."""
    sizes = [[row for row in rows if row.size == size] for size in dict.fromkeys(row.size for row in rows)]
    longest = max(sizes, key=lambda of_size: (len(of_size) > 1, of_size[0].k_len, of_size[0].batch))
    first, *others = sorted(longest, key=lambda row: row.median_s or 0.0)
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


def ratio_text(ratio: float) -> str:
    """A ratio in three digits: `0.98`, `3.40`, `24.6`, `1,234`."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"


def _machine(benchmark: Benchmark, width: int) -> Text:
    e = benchmark.environment
    parts = [f"mha {e['mha']} bench", f"{e['device']}{' (auto)' * (e['device_asked'] == 'auto')}", e["device_name"]]
    parts += [] if e["driver"] is None else [f"driver {e['driver']}"]
    parts += [count_of(e["threads"], "thread") + f" of {count_of(e['n_cpus'], 'core')}", f"torch {e['torch']}"]
    parts += [] if e["load_average"] is None else [f"load {e['load_average']:.1f} at the start"]
    parts += [f"seed {benchmark.seed}"]
    return Text("\n".join(filled([visible(part) for part in parts], width)), style="bold")


def _ranked_sizes(rows: Sequence[BenchRow]) -> Iterator[list[BenchRow]]:
    """The rows of each size by time, those without a time last."""
    for _, of_size in groupby(rows, key=lambda row: (row.batch, row.k_len)):
        yield sorted(of_size, key=lambda row: row.median_s or math.inf)


def _is_in_tera(rows: Sequence[BenchRow]) -> bool:
    return max((row.tflops or 0.0 for row in rows), default=0.0) >= 1


def _headings(in_tera: bool) -> dict[str, str]:
    headings = {name: words_of("columns", "bench")[name].heading for name in _COLUMNS}
    return headings | ({"rate": "TFLOP/s"} if in_tera else {})


def _family(family: str, rows: list[BenchRow], benchmark: Benchmark, screen: Screen) -> RenderableType:
    in_tera = _is_in_tera(rows)
    headings = _headings(in_tera)
    lines: list[tuple[dict[str, str], str | None]] = []
    for ranked in _ranked_sizes(rows):
        for place, row in enumerate(ranked):
            cells = _cells(row, in_tera) | ({} if place == 0 else {"size": ""})
            if _is_short(row.median_s, benchmark):
                cells["median"] = f"~{cells['median']}"
            lines.append((cells, "bold" if row.is_fastest else None))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", title_justify="left")
    fitting = _fitting([headings, *(cells for cells, _ in lines)], screen.width)
    for name in fitting:
        is_text = name in ("size", "backend", "bar")
        table.add_column(
            headings[name], justify="left" if is_text else "right", no_wrap=name != "backend", overflow="fold"
        )
    for cells, style in lines:
        table.add_row(*(cells.get(name, "") for name in fitting), style=style)
    sizes_of: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            sizes_of.setdefault(_why(row), []).append(size_text(row))
    n_sizes = len({size_text(row) for row in rows})
    notes = [Text(visible(_at(why, sizes, n_sizes)), style="dim") for why, sizes in sizes_of.items()]
    return Group(Text(visible(family), style="bold underline"), table, *notes)


def _fitting(lines: Sequence[dict[str, str]], width: int) -> list[str]:
    needed = {name: max(cell_len(line.get(name, "")) for line in lines) + 1 for name in _COLUMNS}
    columns = [name for name in _COLUMNS if width >= _LEAST_WIDTHS.get(name, 0)]
    for name in _DROP_ORDER:
        if sum(needed[name] for name in columns) - 1 <= width:
            break
        columns = [column for column in columns if column != name]
    return columns


def _cells(row: BenchRow, in_tera: bool) -> dict[str, str]:
    """The texts of a row by column."""
    size = {"size": size_text(row), "backend": backend_text(row)}
    if row.median_s is None or row.ratio is None or row.tflops is None:
        return size | {"median": "–", "bar": row.status}
    scale, _ = seconds_unit(row.median_s)
    return size | {
        "median": seconds_text(row.median_s),
        "quartiles": f"{(row.p25_s or 0) * scale:.3g}–{(row.p75_s or 0) * scale:.3g}",
        "min": f"{(row.min_s or 0) * scale:.3g}",
        "n": str(len(row.samples_s)),
        "first": seconds_text(row.first_s),
        "ratio": _ratio(row) + ("*" if row.is_fastest else " "),
        "interval": f"{ratio_text(row.ratio_low or 0)}–{ratio_text(row.ratio_high or 0)}",
        "bar": "█" * max(1, round(_BAR / row.ratio)),
        "rate": f"{row.tflops * (1 if in_tera else 1e3):.3g}",
        "intensity": f"{row.flops_per_byte:.3g}",
        "memory": "–" if row.extra_bytes is None else bytes_text(row.extra_bytes),
        "error": _error(row.max_error),
        "mean": _error(row.mean_error),
    }  # fmt: skip


def _ratio(row: BenchRow) -> str:
    """The ratio, with the sign of an uncertain rank."""
    return ("≈ " if row.is_similar else "") + ratio_text(row.ratio or 0)


def _why(row: BenchRow) -> str:
    return f"{row.backend}: {row.reason}" if row.status == "ok" else f"{row.backend}: {row.status}: {row.reason}"


def _at(why: str, sizes: Sequence[str], n_sizes: int) -> str:
    """A reason, with its sizes unless it holds for all."""
    listed = dict.fromkeys(sizes)
    return why if len(listed) == n_sizes else f"{why} (at {', '.join(listed)})"


def size_text(row: BenchRow) -> str:
    """Batch and length; the length alone for a batch of one."""
    return f"{row.k_len}" if row.batch == 1 else f"{row.batch} × {row.k_len}"


def backend_text(row: BenchRow) -> str:
    """The backend, with the kernel that ran unless its name says so; `!` for a fallback."""
    return (
        row.backend
        + ("" if row.ran in (None, row.backend) or _implies_kernel(row) else f" → {row.ran}")
        + ("!" if row.is_fallback else "")
    )


def _implies_kernel(row: BenchRow) -> bool:
    return row.backend == RETURNS_PATTERN and row.ran == "unfused"


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.0e}" if error else "0"


def _legend(benchmark: Benchmark, rounds: Sequence[BenchRow], screen: Screen) -> Text:
    """The meaning of columns and signs, for timed rows."""
    n_hidden = sum(screen.width < least for least in _LEAST_WIDTHS.values())
    lines = [
        "ratio: median ÷ that of the fastest, the first row",
        *(["* certainly the fastest"] * any(row.is_fastest for row in rounds)),
        *(
            ["≈ not certainly slower: the 95 % interval of the ratio contains 1"]
            * any(row.is_similar for row in rounds)
        ),
        "memory: the most that torch's allocator held for a call",
        "error: largest difference from float64",
        *(["tokens: batch × length"] if any(row.batch > 1 for row in rounds) else []),
        *_remarks(benchmark, rounds),
        *([f"{max(_LEAST_WIDTHS.values())} columns show {n_hidden} more: mha explain bench"] if n_hidden else []),
    ]
    return Text("\n".join(filled(lines, screen.width)), style="dim")


def _remarks(benchmark: Benchmark, rounds: Sequence[BenchRow]) -> Iterator[str]:
    """Warnings about the times, and explanations of single rows."""
    if any(_is_short(row.median_s, benchmark) for row in rounds):
        yield "~ less than a millisecond: mostly the cost of calling torch, not of attention"
    if not all(row.is_sure for row in rounds):
        yield f"with less than {MIN_ROUNDS} rounds the intervals are the whole range of the times"
    if any(row.is_fallback for row in rounds):
        yield "! not a fused kernel"
    if any(row.backend in LAYERS for row in rounds):
        yield "torch-mha computes the projections too"
    if any(row.n_error_queries == 0 for row in rounds):
        yield "error –: too large for float64"


def _is_short(seconds: float | None, benchmark: Benchmark) -> bool:
    """Whether a time is below a millisecond. CUDA's clock excludes the overhead of calls."""
    return seconds is not None and seconds < _SHORT_S and not benchmark.environment["device"].startswith("cuda")


def _changes(comparison: Comparison, screen: Screen) -> RenderableType:
    """Each size's ratio to the baseline, and the rows that cannot be compared."""
    parts: list[RenderableType] = []
    for size, changes in groupby(comparison.changes, key=itemgetter("name")):
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        is_narrow = screen.width < _NARROW
        table.add_column("backend", overflow="fold", min_width=None if is_narrow else _NAME)
        headings = _CHANGED_NARROW if is_narrow else _CHANGED
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True, min_width=len("1.23 ms"))
        for change in changes:
            word, low, high = change["verdict"], ratio_text(change["ratio_low"]), ratio_text(change["ratio_high"])
            cells = (
                seconds_text(change["baseline_s"]), seconds_text(change["median_s"]),
                ("≈ " if word == "similar" else "") + ratio_text(change["ratio"]), f"{low}–{high}",
                "" if word == "similar" else word,
            )  # fmt: skip
            colour = {"slower": "red", "faster": "green"}.get(word)
            table.add_row(change["backend"], *cells[-len(headings) :], style=colour)
        parts += [Text(size), table]
    if any(change["verdict"] == "similar" for change in comparison.changes):
        parts.append(Text(_SIMILAR, style="dim"))
    notes = [*comparison.warnings, *comparison.broken, *_alone(comparison)]
    title = Text(f"against {visible(comparison.baseline)}", style="bold underline")
    return Group(title, *parts, *(Text(visible(line), style="dim") for line in notes))


def _alone(comparison: Comparison) -> Sequence[str]:
    """The rows of one run alone, by name if they are few."""
    alone, baseline = comparison.unmatched, comparison.baseline
    if len(alone) <= _ALONE_SHOWN:
        return alone
    n_then = sum(line.endswith(NOT_NOW) for line in alone)
    counts = ((n_then, f"of {baseline} not measured now"), (len(alone) - n_then, f"measured now, not in {baseline}"))
    return [f"{count_of(n, 'row')} {what}" for n, what in counts if n]


_OUTCOMES = {"slower": "bold red", "inconclusive": "bold yellow", "passed": "bold green"}


def _conclusion(comparison: Comparison) -> Text:
    style = "bold" if comparison.rule is None else _OUTCOMES[comparison.rule["outcome"]]
    return Text(visible(comparison.summary), style=style)


def csv_pieces(benchmark: Benchmark) -> Iterator[str]:
    """The rows as CSV (RFC 4180): every number but the samples, with JSON names as headings."""
    paper = StringIO()
    documents = [asdict(row) for row in benchmark.rows]
    names = [name for name, value in documents[0].items() if not isinstance(value, (list, tuple))]
    writer = csv.writer(paper, lineterminator="\n")
    writer.writerow(names)
    for document in documents:
        values = [document[name] for name in names]
        place = names.index("reason")
        values[place] = None if values[place] is None else cell_text(values[place])
        writer.writerow(values)
    yield paper.getvalue()


# --------------------------------------------------------------------------------------------------------------- plots


MAX_FAMILIES = 24
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D31",
    "#7B3294",
    "#5AAE61",
)
"""Colours that differ without red-green vision; marks differ too. Source of the first seven: Okabe and Ito 2008, "Color
Universal Design"."""
_MARKS = "osD^vP*X<>h"
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
body {{ color: #1a1a1a; background: #fff }}
svg {{ max-width: 100%; height: auto }}
.rows {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
th:nth-child(-n+2), td:nth-child(-n+2) {{ text-align: left }}
td.reason {{ text-align: left; white-space: normal; color: #555 }}
</style></head><body>
<h1>mha bench</h1>
<p>{about}</p>
{figure}
{tables}
<dl>
{backends}
</dl>
</body></html>
"""
_DESCRIPTIONS = {
    "explicit": "the readable definition, attend, which builds the whole pattern",
    "sdpa": "scaled_dot_product_attention with the kernel that torch picks",
    "math": "scaled_dot_product_attention, its unfused kernel",
    "flash": "scaled_dot_product_attention, its flash kernel",
    "efficient": "scaled_dot_product_attention, its memory-efficient kernel",
    "cudnn": "scaled_dot_product_attention, cuDNN's kernel",
    "flex": "FlexAttention through torch.compile",
    "compiled": "attend through torch.compile",
    "torch-mha": "nn.MultiheadAttention without weights",
    "torch-mha-weights": "nn.MultiheadAttention with weights for every head",
}

_PAGE_COLUMNS = ("size", "backend", "median", "quartiles", "ratio", "interval", "rate", "memory", "error")


def require_plots() -> None:
    """Raises `MhaError` if matplotlib is missing, before any measurement."""
    if find_spec("matplotlib") is None:
        raise missing_library("matplotlib", "the chart of --svg or --html")


def svg(benchmark: Benchmark) -> str:
    """The plots as one SVG. Raises `MhaError` if matplotlib is missing, or for too many families."""
    require_plots()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs its caches
    import matplotlib
    from matplotlib.figure import Figure

    series = _series([row for row in benchmark.rows if row.median_s is not None])
    if not 1 <= len(series) <= MAX_FAMILIES:
        raise MhaError(
            f"a plot has room for {MAX_FAMILIES} families of sizes, and this run has {len(series)}"
            if series
            else "there is nothing to plot: no backend was timed",
            hint="name fewer heads, widths, dtypes or directions" if series else None,
            code="nothing-to-plot",
        )
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 3.6 * len(series) + 0.8), layout="constrained")
        backends = list(dict.fromkeys(row.backend for row in benchmark.rows))
        for (family, rows), (left, right) in zip(series, figure.subplots(len(series), 2, squeeze=False), strict=True):
            _plot_family(family, rows, backends, left, right)
        below = about(benchmark).replace("$", r"\$")  # $ would begin a formula
        figure.supxlabel(below, fontsize=7, color="#555555", wrap=True)
        paper = io.StringIO()
        figure.savefig(paper, format="svg", metadata={"Date": None, "Creator": "mha", "Description": about(benchmark)})
    return paper.getvalue()


def write_plots(benchmark: Benchmark, svg_path: str | None, html_path: str | None, *, force: bool) -> None:
    """Writes the picture and the page that were requested."""
    picture = svg(benchmark) if svg_path or html_path else ""
    if svg_path is not None:
        write_whole(svg_path, picture.encode(), force=force)
    if html_path is not None:
        write_whole(html_path, page(benchmark, picture).encode(), force=force)


def page(benchmark: Benchmark, picture: str) -> str:
    """One static page: the picture of `svg`, and every row as a table."""
    tables = "\n".join(_table(family, rows) for family, rows in families(benchmark.rows))
    names = dict.fromkeys(row.backend for row in benchmark.rows)
    return _PAGE.format(
        about=html.escape(about(benchmark)),
        figure=picture[picture.index("<svg") :],
        tables=tables,
        backends="\n".join(
            f"<dt>{name}</dt><dd>{html.escape(_DESCRIPTIONS.get(name, 'unknown here'))}</dd>"
            for name in map(html.escape, names)
        ),
    )


def about(benchmark: Benchmark) -> str:
    """The command, machine, versions and seed of the run."""
    e = benchmark.environment
    parts = [shlex.join(benchmark.command), e["device_name"], f"{e['threads']} threads", f"torch {e['torch']}"]
    parts += [f"mha {e['mha']}"] + ([] if e["driver"] is None else [f"driver {e['driver']}"])
    return visible(" · ".join([*parts, f"seed {benchmark.seed}"]))


def _plot_family(family: str, rows: Sequence[BenchRow], backends: list[str], left: Any, right: Any) -> None:
    """Time on the left, rate on the right."""
    for place, backend in enumerate(backends):
        of_backend = sorted((row for row in rows if row.backend == backend), key=lambda row: row.k_len)
        if not of_backend:
            continue
        look = {
            "color": _COLOURS[place % len(_COLOURS)], "marker": _MARKS[place % len(_MARKS)], "markersize": 4,
            "linewidth": 1.2, "label": backend,
        }  # fmt: skip
        lengths = [row.k_len for row in of_backend]
        quartiles = [
            [(time or 0) * 1e3 for time in times]
            for times in zip(*((r.p25_s, r.p75_s) for r in of_backend), strict=True)
        ]
        left.plot(lengths, [(row.median_s or 0) * 1e3 for row in of_backend], **look)
        left.fill_between(lengths, *quartiles, color=look["color"], alpha=0.15, linewidth=0)
        right.plot(lengths, [row.tflops or 0 for row in of_backend], **look)
    from matplotlib.ticker import FuncFormatter, LogLocator

    for axes, what in ((left, "time of a call (ms), p25–p75 shaded"), (right, "TFLOP/s")):
        sizes = {row.k_len: size_text(row) for row in rows}
        axes.set(xscale="log", yscale="log", ylabel=what, xlabel="tokens")
        axes.set_xticks(list(sizes), list(sizes.values()))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
    left.set_title(visible(family), loc="left", fontsize=9)
    left.legend(fontsize=7, ncols=2, loc="upper left")  # the upper left is free because times grow to the right


def _series(rows: Sequence[BenchRow]) -> list[tuple[str, list[BenchRow]]]:
    """The rows of a family, split by batch if lengths and batches are crossed."""
    series: list[tuple[str, list[BenchRow]]] = []
    for family, members in families(rows):
        if len({(row.batch, row.k_len) for row in members}) == len({row.k_len for row in members}):
            series.append((family, members))
            continue
        for batch in dict.fromkeys(row.batch for row in members):
            series.append((f"batch {batch} · {family}", [row for row in members if row.batch == batch]))
    return series


def _table(family: str, rows: Sequence[BenchRow]) -> str:
    in_tera, words = _is_in_tera(rows), words_of("columns", "bench")
    headings = _headings(in_tera)
    lines = ["".join(f'<th title="{html.escape(words[n].explanation)}">{headings[n]}</th>' for n in _PAGE_COLUMNS)]
    for row in (row for ranked in _ranked_sizes(rows) for row in ranked):
        cells = _cells(row, in_tera)
        shown = _PAGE_COLUMNS if row.median_s is not None else ("size", "backend")
        line = "".join(f"<td>{html.escape(cells[name].strip())}</td>" for name in shown)
        if row.median_s is None:
            reason = html.escape(visible(f"{row.status}: {row.reason}"))
            line += f'<td class="reason" colspan="{len(_PAGE_COLUMNS) - 2}">{reason}</td>'
        lines.append(line)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<h2>{html.escape(family)}</h2>\n<div class="rows"><table>{body}\n</table></div>'
