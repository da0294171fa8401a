"""A benchmark as a picture: time and rate against length, log-log, with the machine's ceiling; SVG alone, or in a page.

Drawn by matplotlib, an extra that is imported only here. The same benchmark gives the same bytes.
"""

from __future__ import annotations

import html
import io
import logging
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from mhacli.errors import MhaError
from mhacli.io.extras import installing
from mhacli.render.base.format import bytes_text, seconds_text
from mhacli.render.reports.bench import backend_text, families, ratio_text, size_text
from mhacli.results.bench.result import Benchmark, Row
from mhacli.results.bench.workload import BACKENDS
from mhacli.text.escape import visible

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
"""Colours that are told apart without seeing red and green alike. Source of the first seven: Okabe and Ito 2008, "Color
Universal Design"; marks differ too."""
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
tr.fastest {{ font-weight: 600 }}
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
_HEADINGS = ("tokens", "backend", "median", "p25", "p75", "ratio", "95 %", "TFLOP/s", "of peak", "memory", "max error")


def require_plots() -> None:
    """Raises `MhaError` where the extra is missing: asked before anything is measured."""
    if find_spec("matplotlib") is None:
        raise MhaError(
            "matplotlib must be installed to draw a plot, got none",
            hint=f"{installing('matplotlib')} installs it",
            code="missing-extra",
        )


def svg(benchmark: Benchmark) -> str:
    """The plots as one SVG. Raises `MhaError` where there is no matplotlib, or more families than fit one picture."""
    require_plots()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its caches
    import matplotlib
    from matplotlib.figure import Figure

    drawn = _series([row for row in benchmark.rows if row.median_s is not None])
    if not 1 <= len(drawn) <= MAX_FAMILIES:
        raise MhaError(
            f"a plot must show from 1 to {MAX_FAMILIES} families of sizes, got {len(drawn)}",
            hint="name fewer heads, widths, dtypes or directions" if drawn else None,
            code="nothing-to-plot",
        )
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 3.6 * len(drawn) + 0.8), layout="constrained")
        backends = list(dict.fromkeys(row.backend for row in benchmark.rows))
        for (family, rows), (left, right) in zip(drawn, figure.subplots(len(drawn), 2, squeeze=False), strict=True):
            _family(benchmark, family, rows, backends, left, right)
        below = about(benchmark).replace("$", r"\$")  # which would begin a formula
        figure.supxlabel(below, fontsize=7, color="#555555", wrap=True)
        paper = io.StringIO()
        figure.savefig(paper, format="svg", metadata={"Date": None, "Creator": "mha", "Description": about(benchmark)})
    return paper.getvalue()


def page(benchmark: Benchmark, picture: str) -> str:
    """One page without scripts or anything from elsewhere: the picture of `svg`, and every row as a table."""
    tables = "\n".join(_table(family, rows) for family, rows in families(benchmark.rows))
    names = dict.fromkeys(row.backend for row in benchmark.rows)
    return _PAGE.format(
        about=html.escape(about(benchmark)),
        figure=picture[picture.index("<svg") :],
        tables=tables,
        backends="\n".join(
            f"<dt>{name}</dt><dd>{html.escape(_described(name))}</dd>" for name in map(html.escape, names)
        ),
    )


def _described(name: str) -> str:
    """What a backend is; a file of a later version may know others."""
    return BACKENDS[name].about if name in BACKENDS else "unknown here"


def about(benchmark: Benchmark) -> str:
    """The command, machine, versions and seed that made it."""
    e = benchmark.environment
    parts = [shlex.join(benchmark.command), e.device_name, f"{e.threads} threads", f"torch {e.torch}", f"mha {e.mha}"]
    parts += [] if e.driver is None else [f"driver {e.driver}"]
    return visible(" · ".join([*parts, f"seed {benchmark.seed}"]))


def _family(benchmark: Benchmark, family: str, rows: Sequence[Row], backends: list[str], left: Any, right: Any) -> None:
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
    _ceiling(benchmark, rows, left, right)
    from matplotlib.ticker import FuncFormatter, LogLocator

    for axes, what in ((left, "time of a call (ms), p25–p75 shaded"), (right, "TFLOP/s")):
        sizes = {row.k_len: size_text(row) for row in rows}
        axes.set(xscale="log", yscale="log", ylabel=what, xlabel="tokens")
        axes.set_xticks(list(sizes), list(sizes.values()))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
    left.set_title(visible(family), loc="left", fontsize=9)
    left.legend(fontsize=7, ncols=2, loc="upper left")  # times grow to the right: nothing else is there


def _ceiling(benchmark: Benchmark, rows: Sequence[Row], left: Any, right: Any) -> None:
    """The least time and the highest rate of attention alone on this machine."""
    ceiling = next(c for c in benchmark.ceilings if c.dtype == rows[0].dtype)
    work = {
        row.k_len: (row.attention_flops, ceiling.floor_s(row.attention_flops, row.attention_bytes)[0]) for row in rows
    }
    lengths = sorted(work)
    look = {"linestyle": "--", "color": "#555555", "linewidth": 1, "label": "this machine's ceiling"}
    left.plot(lengths, [work[length][1] * 1e3 for length in lengths], **look)
    right.plot(lengths, [work[length][0] / work[length][1] / 1e12 for length in lengths], **look)


def _series(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Families in which a length has one batch: one that crosses lengths with batches comes apart by batch."""
    found: list[tuple[str, list[Row]]] = []
    for family, members in families(rows):
        if len({(row.batch, row.k_len) for row in members}) == len({row.k_len for row in members}):
            found.append((family, members))
            continue
        for batch in dict.fromkeys(row.batch for row in members):
            found.append((f"batch {batch} · {family}", [row for row in members if row.batch == batch]))
    return found


def _table(family: str, rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in _HEADINGS)
    body = "\n".join(_line(row) for row in rows)
    return f'<h2>{html.escape(family)}</h2>\n<div class="rows"><table><tr>{head}</tr>\n{body}\n</table></div>'


def _line(row: Row) -> str:
    first = [size_text(row), backend_text(row)]
    if row.median_s is None:
        cells = "".join(f"<td>{html.escape(word)}</td>" for word in first)
        said = html.escape(visible(f"{row.status}: {row.reason}"))
        return f'<tr>{cells}<td class="reason" colspan="{len(_HEADINGS) - len(first)}">{said}</td></tr>'
    words = [
        *first, seconds_text(row.median_s), seconds_text(row.p25_s), seconds_text(row.p75_s),
        ("≈ " if row.is_similar else "") + ratio_text(row.ratio or 0),
        f"{ratio_text(row.ratio_low or 0)}–{ratio_text(row.ratio_high or 0)}", f"{row.tflops:.3g}",
        f"{row.share_of_peak:.0%}", "–" if row.extra_bytes is None else bytes_text(row.extra_bytes),
        "–" if row.max_error is None else f"{row.max_error:.0e}",
    ]  # fmt: skip
    cells = "".join(f"<td>{html.escape(word)}</td>" for word in words)
    return f'<tr class="fastest">{cells}</tr>' if row.is_fastest else f"<tr>{cells}</tr>"
