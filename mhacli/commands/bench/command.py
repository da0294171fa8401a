"""`mha bench`: time, error, memory and utilisation of attention backends, timed in turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, get_args

import typer

from mhacli.cli.console import loading_torch, note, progress
from mhacli.cli.help import examples
from mhacli.cli.numbers import MAX_SECONDS, Real
from mhacli.cli.options import (
    CAUSAL,
    D_HEAD,
    GROUPS,
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    MASKED_LATER,
    NUMBER_FORMAT,
    QUERY_HEADS,
    command,
    device_option,
    number,
    offers,
    option,
    option_group,
    repeat_option,
    seed_option,
    threads_option,
)
from mhacli.cli.output import COLOUR, Output, note_written, print_report, require_writable
from mhacli.cli.shared.request import leave_deleted_folder, record_command
from mhacli.cli.values import counts, words_of
from mhacli.commands.bench.comparison import BaselineComparison, compare, parse_rule
from mhacli.commands.bench.result import Benchmark, read_benchmark
from mhacli.commands.bench.workload import ALL, BACKENDS, Direction, Sweep
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.files import write_whole
from mhacli.settings import Config, Dtype

_COMPUTED, _SIZES, _TIMING, _BASELINE = "Computation", "Sizes", "Timing", "Baseline"


@option_group
class SweepOptions:
    """The backends, sizes and directions to measure; lists are combined in all ways."""

    backends: Annotated[
        str | None,
        option(
            _COMPUTED,
            f"Backends to measure: {', '.join(BACKENDS)}; or {ALL}. (default: those that suit the device)",
            metavar="LIST",
            common=True,
            autocompletion=lambda: [*BACKENDS, ALL],
        ),
    ] = None
    direction: Annotated[
        str | None,
        option(_COMPUTED, "Pass to time: forward, backward, or both. (default: forward)", metavar="LIST", common=True),
    ] = None
    causal: Annotated[bool | None, option(_COMPUTED, MASKED_LATER, *CAUSAL, common=True)] = None
    decode: Annotated[
        bool, option(_COMPUTED, "Time one decoding step: one query against all keys.", "--decode", common=True)
    ] = False
    lengths: Annotated[
        str | None,
        option(
            _SIZES,
            "Numbers of tokens, such as 512,1k or 512..16k, which doubles. (default: on a CPU 256..2k, with --decode 512..8k; "
            "longer on a GPU)",
            "--lengths",
            "--seq-len",
            metavar="LIST",
            common=True,
        ),
    ] = None
    batch: Annotated[
        str | None,
        option(
            _SIZES,
            "Numbers of sequences. (default: chosen so that every length has the same number of tokens)",
            "--batch",
            "--batch-size",
            metavar="LIST",
            common=True,
        ),
    ] = None
    heads: Annotated[
        str | None,
        option(
            _SIZES, f"{QUERY_HEADS} (default: 512 ÷ d_head, on CUDA 2048 ÷ d_head)", *HEADS, metavar="LIST", common=True
        ),
    ] = None
    kv_heads: Annotated[
        str | None,
        option(_SIZES, f"{GROUPS} (default: heads)", *KV_HEADS, metavar="LIST", common=True),
    ] = None
    d_head: Annotated[
        str | None, option(_SIZES, f"{HEAD_WIDTH} (default: 64)", *D_HEAD, metavar="LIST", common=True)
    ] = None
    dtype: Annotated[
        str | None,
        option(_SIZES, f"{NUMBER_FORMAT} (default: float32; on CUDA, bfloat16)", metavar="LIST", common=True),
    ] = None


@option_group
class MeasureOptions:
    """Device, threads, seed and duration of the measurement."""

    device: Annotated[
        str,
        device_option(_TIMING, common=True),
    ] = "auto"
    threads: Annotated[int | None, threads_option(_TIMING)] = None
    repeat: Annotated[
        int | None, repeat_option(_TIMING, "until each median is accurate to 1 %, or --budget is spent")
    ] = None
    budget: Annotated[
        float, number(_TIMING, Real(high=MAX_SECONDS, above=0), "Seconds of timing for each size.", metavar="SECONDS")
    ] = 3.0
    call_limit: Annotated[
        float,
        number(
            _TIMING,
            Real(high=MAX_SECONDS, above=0),
            "Skip a backend whose single call is predicted to take longer.",
            metavar="SECONDS",
        ),
    ] = 5.0
    seed: Annotated[int, seed_option(_TIMING)] = 0


@option_group
class BaselineOptions:
    """The baseline to compare with, and the file to save one in."""

    compare: Annotated[
        str | None,
        option(
            _BASELINE,
            "Compare with a saved run, measured at the same sizes by default.",
            metavar="FILE",
            common=True,
        ),
    ] = None
    fail_if: Annotated[
        str | None,
        option(
            _BASELINE,
            "slower:1.10: exit with code 3 if a time exceeds 1.10 × the baseline's, beyond the measured noise.",
            metavar="RULE",
            common=True,
        ),
    ] = None
    strict: Annotated[
        bool, option(_BASELINE, "With --fail-if: exit with code 3 if the result is inconclusive, too.", "--strict")
    ] = False
    save_baseline: Annotated[
        str | None, option(_BASELINE, "Save this run, for --compare.", metavar="FILE", common=True)
    ] = None


BenchOutput = Annotated[
    Output,
    offers(
        "json",
        "force",
        *COLOUR,
        csv="Print CSV: a line per row, without samples.",
        svg="Plot time and TFLOP/s against length (needs the extra plot).",
        html="Write the plots and rows as one HTML page.",
    ),
]


@examples(
    "mha bench --lengths 512,1k,2k",
    "mha bench --decode --lengths 1k..8k --heads 32 --kv-heads 8",
    "mha bench --lengths 1k --save-baseline before.json",
    "mha bench --compare before.json --fail-if slower:1.10",
)
@command
def bench(
    sweep_options: SweepOptions, measuring: MeasureOptions, against: BaselineOptions, output: BenchOutput
) -> None:
    """Times the backends and prints the report; exit code 3 if the rule of `--fail-if` is broken."""
    _ = output.format  # raises if two are given
    limit = _limit(against)
    Config(d_model=1, n_heads=1, device=measuring.device, seed=measuring.seed, threads=measuring.threads).resolved()
    saved = [] if against.save_baseline is None else [("save-baseline", against.save_baseline)]
    require_writable([*saved, *output.files], force=output.force)
    baseline = None if against.compare is None else _baseline(against.compare)
    sweep = _sweep(sweep_options, baseline)
    if baseline is not None and limit is not None:
        _require_common_length(sweep, baseline, against.compare or "")
    if output.svg or output.html:
        from mhacli.commands.bench.view import require_plots

        require_plots()
    leave_deleted_folder()
    with loading_torch():
        from mhacli.commands.bench.run import BenchOptions, measure
        from mhacli.compute.base.devices import choose_device
    n_sizes = len(sweep.workloads(choose_device(measuring.device).type))
    if measuring.repeat is None and n_sizes * measuring.budget > _ANNOUNCED_S:
        note(f"{n_sizes} sizes of {measuring.budget:g} s or more each; --budget and --lengths change it")
    options = BenchOptions(
        measuring.repeat, measuring.budget, measuring.call_limit, measuring.seed, measuring.threads, record_command()
    )
    with progress() as report_progress:
        benchmark = measure(sweep, measuring.device, options, report_progress)
    comparison = None if baseline is None else compare(benchmark, baseline, against.compare or "", limit=limit)
    if against.save_baseline is not None:
        write_whole(against.save_baseline, benchmark.to_json().encode(), force=output.force)
    if limit is not None and comparison is not None and comparison.rule is None:
        _require_times(benchmark)
        raise MhaError(f"no row of {comparison.baseline} was measured in this run", code="nothing-compared")
    _print(benchmark, comparison, output)
    _draw(benchmark, output)
    _require_times(benchmark)
    note_written(output, against.save_baseline)
    if comparison is not None:
        _end_by(comparison, output, strict=against.strict)


_ANNOUNCED_S = 15.0


def _baseline(path: str) -> Benchmark:
    """The run to compare with. Raises `MhaError` if it has no times."""
    benchmark = read_benchmark(path)
    if not any(row.interval for row in benchmark.rows):
        raise MhaError(f"{path} has no times to compare with", code="nothing-compared", path=path)
    return benchmark


def _require_common_length(sweep: Sweep, baseline: Benchmark, path: str) -> None:
    """Raises `MhaError`, before anything is measured, if no length is in the baseline."""
    lengths = sorted({row.k_len for row in baseline.rows if row.interval})
    if sweep.lengths and not set(lengths) & set(sweep.lengths):
        then, now = (", ".join(map(str, some)) for some in (lengths, sorted(sweep.lengths)))
        raise MhaError(
            f"{path} has no row for the lengths of this run",
            hint=f"lengths of {path}: {then}; of this run: {now}",
            code="nothing-compared",
        )


def _limit(against: BaselineOptions) -> float | None:
    """The largest permitted ratio of times, from `--fail-if`."""
    if against.fail_if is None:
        if against.strict:
            raise UsageError("--strict works only with --fail-if", hint="add --fail-if slower:1.10")
        return None
    limit = parse_rule(against.fail_if)
    if against.compare is None:
        raise UsageError("--fail-if needs a baseline to compare with", hint="add --compare FILE")
    return limit


def _sweep(options: SweepOptions, baseline: Benchmark | None) -> Sweep:
    """The sweep of the options; options left out take the value of the baseline, if there is one."""
    backends = words_of(options.backends, "backends", [*BACKENDS, ALL])
    chosen = {
        "backends": tuple(BACKENDS) if ALL in backends else backends,
        "batch": counts(options.batch, "batch", "1,4"),
        "n_heads": counts(options.heads, "heads", "8,16"),
        "n_kv_heads": counts(options.kv_heads, "kv-heads", "1,2,8"),
        "d_head": counts(options.d_head, "d-head", "64,128"),
        "lengths": counts(options.lengths, "lengths", "512,1k"),
        "dtypes": words_of(options.dtype, "dtype", get_args(Dtype)),
        "directions": words_of(options.direction, "direction", get_args(Direction)),
        "causal": options.causal,
        "decode": options.decode or None,
    }
    defaults = Sweep() if baseline is None else baseline.sweep
    defaults = replace(defaults, backends=tuple(name for name in defaults.backends if name in BACKENDS))
    return replace(defaults, **{name: value for name, value in chosen.items() if value not in ((), None)}).checked()  # type: ignore[arg-type]


def _draw(benchmark: Benchmark, output: Output) -> None:
    """Writes the plots and the page that were requested."""
    if output.svg is None and output.html is None:
        return
    from mhacli.commands.bench.view import page, svg

    picture = svg(benchmark)
    if output.svg is not None:
        write_whole(output.svg, picture.encode(), force=output.force)
    if output.html is not None:
        write_whole(output.html, page(benchmark, picture).encode(), force=output.force)


def _print(benchmark: Benchmark, comparison: BaselineComparison | None, output: Output) -> None:
    from mhacli.commands.bench.view import bench_view, csv_pieces

    compared = {} if comparison is None else {"comparison": comparison.to_dict()}
    print_report(
        output,
        view=lambda on: bench_view(benchmark, comparison, on),
        json=lambda: [benchmark.to_json(**compared)],
        csv=lambda: csv_pieces(benchmark),
    )


def _require_times(benchmark: Benchmark) -> None:
    """Raises `MhaError` if no backend was timed."""
    if not any(row.status == "ok" for row in benchmark.rows):
        reasons = dict.fromkeys(f"{row.backend} {row.status}: {row.reason}" for row in benchmark.rows)
        raise MhaError(f"no backend could run: {'; '.join(reasons)}", code="nothing-ran")


def _end_by(comparison: BaselineComparison, output: Output, *, strict: bool) -> None:
    """Exits with 3 if the rule is broken, with `strict` also if it is inconclusive. With CSV, and with JSON if the rule holds,
    the warnings and the result are printed on stderr as well."""
    outcome = None if comparison.rule is None else comparison.rule.outcome
    is_broken = outcome == "slower" or (strict and outcome == "inconclusive")
    name = output.format
    if name == "csv" or (name == "json" and not is_broken):
        for warning in comparison.warnings:
            note(warning)
        if outcome is not None:
            note(comparison.summary)
    if is_broken:
        raise typer.Exit(EXIT_CHECK)
