"""`mha bench`: time, error and memory of attention backends, timed in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from mhacli.cli.console import loading_torch, note, progress
from mhacli.cli.output import COLOUR, Output, note_written, print_report, require_writable
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import record_command
from mhacli.commands.bench.comparison import BaselineComparison, compare, parse_rule
from mhacli.commands.bench.result import Benchmark, read_benchmark
from mhacli.commands.bench.workload import BACKENDS, Sweep
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.io.files import write_whole
from mhacli.settings import MAX_SECONDS, Config, like, setting

_TIMING, _BASELINE = "Timing", "Baseline"
_BUDGET = "Seconds of timing for each size."
_CALL_LIMIT = "Skip a backend whose single call is predicted to take longer."
_REPEAT = "until each median is accurate to 1 %, or --budget is spent"
_COMPARE = "Compare with a saved run, measured at the same sizes by default."
_FAIL_IF = "slower:1.10: exit with code 3 if a time certainly exceeds 1.10 × the baseline's."
_STRICT = "With --fail-if: exit with code 3 if the result is inconclusive, too."
_SAVE = "Save this run, for --compare."
_CSV = "Print CSV: a line per row, without samples."
_SVG = "Plot time and TFLOP/s against length (needs the extra plot)."
_HTML = "Write the plots and rows as one HTML page."


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Device and duration of the measurement, the baseline to compare with, and the file to save one in."""

    # fmt: off
    device: str = like(Config, "device", _TIMING, default="", common=True)
    threads: int | None = like(Config, "threads", _TIMING)
    repeat: int | None = setting(None, _TIMING, "Number of timed runs.", low=1, high=100_000, default=_REPEAT)
    budget: float = setting(3.0, _TIMING, _BUDGET, above=0, high=MAX_SECONDS, metavar="SECONDS")
    call_limit: float = setting(5.0, _TIMING, _CALL_LIMIT, above=0, high=MAX_SECONDS, metavar="SECONDS")
    seed: int = like(Config, "seed", _TIMING)
    compare: str | None = setting(None, _BASELINE, _COMPARE, metavar="FILE", common=True)
    fail_if: float | None = setting(None, _BASELINE, _FAIL_IF, parse=parse_rule, metavar="RULE", common=True, needs=("compare",))
    strict: bool = setting(False, _BASELINE, _STRICT, needs=("fail_if",))
    save_baseline: str | None = setting(None, _BASELINE, _SAVE, metavar="FILE", common=True)
    # fmt: on


GivenSizes = Annotated[Mapping[str, Any], Sweep]
"""The fields of `Sweep` that the command line sets: others are those of the baseline."""
BenchOutput = Annotated[Output, offers("json", "force", *COLOUR, csv=_CSV, svg=_SVG, html=_HTML)]


@command(
    "mha bench --lengths 512,1k,2k",
    "mha bench --decode --lengths 1k..8k --heads 32 --kv-heads 8",
    "mha bench --lengths 1k --save-baseline before.json",
    "mha bench --compare before.json --fail-if slower:1.10",
)
def bench(given: GivenSizes, options: BenchOptions, output: BenchOutput) -> None:
    """Times the backends and prints the report; exit code 3 if the rule of `--fail-if` is broken."""
    Config(d_model=1, n_heads=1, device=options.device).resolved()
    saved = [] if options.save_baseline is None else [("save-baseline", options.save_baseline)]
    require_writable([*saved, *output.files], force=output.force)
    baseline = None if options.compare is None else read_benchmark(options.compare)
    sweep = Sweep() if baseline is None else baseline.sweep
    known = tuple(name for name in sweep.backends if name in BACKENDS)
    sweep = replace(sweep, **{"backends": known, **given}).checked()
    if baseline is not None and options.fail_if is not None:
        timed = sorted({row.k_len for row in baseline.rows if row.interval is not None})
        if not {*timed} & {*sweep.lengths}:
            message = (
                f"{options.compare} has times of other lengths than this run: {', '.join(map(str, timed)) or 'none'}"
            )
            raise MhaError(message, code="nothing-compared", path=options.compare)
    if output.svg or output.html:
        from mhacli.commands.bench.view import require_plots

        require_plots()
    with loading_torch():
        from mhacli.commands.bench.run import measure
    with progress() as report_progress:
        benchmark = measure(
            sweep, report_progress, device=options.device, threads=options.threads, repeat=options.repeat,
            budget_s=options.budget, call_limit_s=options.call_limit, seed=options.seed, command=record_command(),
        )  # fmt: skip
    comparison = None
    if baseline is not None:
        comparison = compare(benchmark, baseline, options.compare or "", limit=options.fail_if)
    _write(benchmark, comparison, options, output)
    if not any(row.status == "ok" for row in benchmark.rows):
        reasons = dict.fromkeys(f"{row.backend} {row.status}: {row.reason}" for row in benchmark.rows)
        raise MhaError(f"no backend could run: {'; '.join(reasons)}", code="nothing-ran")
    note_written(output, options.save_baseline)
    if comparison is not None:
        _judge(comparison, options, is_csv=output.csv)


def _write(benchmark: Benchmark, comparison: BaselineComparison | None, options: BenchOptions, output: Output) -> None:
    """Saves the baseline, prints the report, and writes the plots and the page that were requested."""
    from mhacli.commands.bench.view import bench_view, csv_pieces, page, svg

    if options.save_baseline is not None:
        write_whole(options.save_baseline, benchmark.to_json().encode(), force=output.force)
    compared = {} if comparison is None else {"comparison": comparison.to_dict()}
    print_report(
        output,
        view=lambda on: bench_view(benchmark, comparison, on),
        json=lambda: [benchmark.to_json(**compared)],
        csv=lambda: csv_pieces(benchmark),
    )
    picture = svg(benchmark) if output.svg or output.html else ""
    if output.svg is not None:
        write_whole(output.svg, picture.encode(), force=output.force)
    if output.html is not None:
        write_whole(output.html, page(benchmark, picture).encode(), force=output.force)


def _judge(comparison: BaselineComparison, options: BenchOptions, *, is_csv: bool) -> None:
    """Exits with 3 if the rule is broken, with `--strict` also if it is inconclusive. CSV has no place for warnings and the
    result, which are then printed on stderr. Raises `MhaError` if the rule has nothing to judge."""
    outcome = comparison.outcome
    if options.fail_if is not None and outcome is None:
        raise MhaError(f"no row of {comparison.baseline} was measured in this run", code="nothing-compared")
    if is_csv:
        note("; ".join([*comparison.warnings, comparison.summary]))
    if outcome == "slower" or (options.strict and outcome == "inconclusive"):
        raise typer.Exit(EXIT_CHECK)
