"""`mha bench`: time, error and memory of attention backends, timed in turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, assert_never

import typer

from mhacli.cli.console import loading_torch, note, progress
from mhacli.cli.output import Output, print_report, require_writable
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import record_command
from mhacli.commands.bench.result import (
    BACKENDS,
    Benchmark,
    Comparison,
    Sweep,
    compare,
    read_benchmark,
)
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.io.files import write_whole
from mhacli.settings import setting

_BASELINE = "Baseline"
_FAIL_IF = "slower:1.10: exit with code 3 if a time certainly exceeds 1.10 × the baseline's."
_COMPARE = "Compare with a saved run, measured at the same sizes by default."
_STRICT = "With --fail-if: exit with code 3 if the result is inconclusive, too."
_CSV = "Print CSV: a line per row, without samples."
_SVG = "Write what is printed and plots of time and rate as an SVG picture."
_HTML = "Write what is printed and the plots as an HTML page."


def _rule(word: str) -> float:
    """The ratio in `slower:RATIO`."""
    match = re.fullmatch(r"slower:([0-9]{1,6}(?:\.[0-9]{1,9})?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{word[:40]!r} is no rule: it takes slower:RATIO, such as slower:1.10")
    return float(match[1])


@command(
    "mha bench --lengths 512,1k,2k",
    "mha bench --decode --lengths 1k..8k --heads 32 --kv-heads 8",
    "mha bench --lengths 1k --save-baseline before.json",
    "mha bench --compare before.json --fail-if slower:1.10",
)
def bench(
    given: Annotated[Mapping[str, Any], Sweep],
    output: Annotated[Output, offers("json", "force", csv=_CSV, svg=_SVG, html=_HTML)],
    compare_with: str | None = setting(
        None, _BASELINE, _COMPARE, "--compare", metavar="FILE", common=True
    ),
    fail_if: float | None = setting(
        None, _BASELINE, _FAIL_IF, parse=_rule, metavar="RULE", common=True, needs=("compare_with",)
    ),
    strict: bool = setting(False, _BASELINE, _STRICT, needs=("fail_if",)),
    save_baseline: str | None = setting(
        None, _BASELINE, "Save this run, for --compare.", metavar="FILE", common=True
    ),
) -> None:
    """Times the backends and prints the report; exit code 3 if the rule of `--fail-if` is broken.
    Sizes that are not given are those of the baseline.
    """
    saved = {} if save_baseline is None else {"save-baseline": save_baseline}
    sweep = Sweep(**given).checked()
    require_writable(saved | output.files, force=output.force)
    baseline = None if compare_with is None else read_benchmark(compare_with)
    if baseline is not None:
        known = tuple(name for name in baseline.sweep.backends if name in BACKENDS)
        sweep = replace(baseline.sweep, **{"backends": known, **given}).checked()
        if fail_if is not None:
            _require_common_lengths(baseline, sweep, compare_with or "")
    with loading_torch():
        from mhacli.commands.bench.measure import measure
    with progress() as report_progress:
        benchmark = replace(measure(sweep, report_progress), command=record_command())
    if save_baseline is not None:
        write_whole(save_baseline, benchmark.to_json().encode(), force=output.force)
    if baseline is not None:
        benchmark = compare(benchmark, baseline, compare_with or "", fail_if)
    from mhacli.commands.bench.view import plots

    print_report(
        output,
        view=benchmark.view,
        json=benchmark.to_json,
        csv=benchmark.without_samples,
        command=benchmark.command,
        figures=lambda: plots(benchmark),
        saved=saved.values(),
    )
    if not any(row.status == "ok" for row in benchmark.rows):
        reasons = dict.fromkeys(
            f"{row.backend} {row.status}: {row.reason}" for row in benchmark.rows
        )
        raise MhaError(f"no backend could run: {'; '.join(reasons)}", code="nothing-ran")
    if benchmark.comparison is not None:
        if output.csv:  # it has no place for warnings and the result
            note("; ".join([*benchmark.comparison.warnings, benchmark.comparison.summary]))
        if fail_if is not None:
            _require_passed(benchmark.comparison, strict=strict)


def _require_common_lengths(baseline: Benchmark, sweep: Sweep, path: str) -> None:
    """Raises `MhaError` for a baseline without a time at a length that will be measured."""
    timed = sorted({row.k_len for row in baseline.rows if row.interval is not None})
    if not {*timed} & {*sweep.lengths}:
        lengths = ", ".join(map(str, timed)) or "none"
        message = f"{path} has times of other lengths than this run: {lengths}"
        raise MhaError(message, code="nothing-compared", path=path)


def _require_passed(comparison: Comparison, *, strict: bool) -> None:
    """Ends with the exit code of a failed check if the rule of `--fail-if` is broken, and if it is
    `strict` also if the result is inconclusive. Raises `MhaError` where nothing was compared.
    """
    if comparison.rule is None:
        message = f"no row of {comparison.baseline} was measured in this run"
        raise MhaError(message, code="nothing-compared")
    match comparison.rule.outcome:
        case "slower":
            raise typer.Exit(EXIT_CHECK)
        case "inconclusive":
            if strict:
                raise typer.Exit(EXIT_CHECK)
        case "passed":
            pass
        case _:
            assert_never(comparison.rule.outcome)
