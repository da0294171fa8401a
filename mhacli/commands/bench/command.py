"""`mha bench`: time, error and memory of attention backends, timed in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, get_args

import typer

from mhacli.cli.console import loading_torch, note, progress
from mhacli.cli.help import examples
from mhacli.cli.numbers import MAX_SECONDS
from mhacli.cli.output import COLOUR, Output, note_written, print_report, require_writable
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import leave_deleted_folder, record_command
from mhacli.cli.values import counts, words_of
from mhacli.commands.bench.comparison import BaselineComparison, compare, parse_rule
from mhacli.commands.bench.result import Benchmark, read_benchmark
from mhacli.commands.bench.workload import ALL, BACKENDS, Direction, Sweep
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.files import write_whole
from mhacli.settings import (
    CAUSAL,
    CAUSAL_NAMES,
    D_HEAD,
    DEVICE_WORDS,
    DEVICES,
    HEAD_WIDTH,
    KV_HEADS,
    MAX_SEED,
    MAX_THREADS,
    N_HEADS,
    N_KV_HEADS,
    NUMBER_FORMAT,
    QUERY_HEADS,
    THREADS,
    Config,
    Dtype,
    setting,
)

_COMPUTED, _TIMING, _BASELINE = "Computation", "Timing", "Baseline"


def _counts(name: str, example: str, text: str, names: str = "") -> Any:
    """A setting that takes a list of numbers."""
    parse = partial(counts, name=name, example=example)
    return setting(None, "Sizes", text, names, parse=parse, metavar="LIST", common=True)


def _words(panel: str, choices: tuple[str, ...], text: str, name: str) -> Any:
    """A setting that takes a list of words."""
    parse = partial(words_of, name=name, choices=choices)
    return setting(None, panel, text, f"--{name}", parse=parse, metavar="LIST", common=True, words=choices)


_BACKENDS = f"Backends to measure: {', '.join(BACKENDS)}; or {ALL}. (default: those that suit the device)"
_LENGTHS = "Numbers of tokens, such as 512,1k or 512..16k, which doubles."
_LENGTHS += " (default: on a CPU 256..2k, with --decode 512..8k; longer on a GPU)"
_BATCH = "Numbers of sequences. (default: chosen so that every length has the same number of tokens)"
_HEADS = f"{QUERY_HEADS} (default: 512 ÷ d_head, on CUDA 2048 ÷ d_head)"
_DTYPES = f"{NUMBER_FORMAT} (default: float32; on CUDA, bfloat16)"
_PASSES = "Pass to time: forward, backward, or both. (default: forward)"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The fields of a `Sweep`; lists are combined in all ways. None: not given."""

    # fmt: off
    backends: tuple[str, ...] | None = _words(_COMPUTED, (*BACKENDS, ALL), _BACKENDS, "backends")
    directions: tuple[Direction, ...] | None = _words(_COMPUTED, get_args(Direction), _PASSES, "direction")
    causal: bool | None = setting(None, _COMPUTED, CAUSAL, CAUSAL_NAMES, common=True)
    decode: bool = setting(False, _COMPUTED, "Time one decoding step: one query against all keys.", common=True)
    lengths: tuple[int, ...] | None = _counts("lengths", "512,1k", _LENGTHS, "--lengths --seq-len")
    batch: tuple[int, ...] | None = _counts("batch", "1,4", _BATCH, "--batch --batch-size")
    n_heads: tuple[int, ...] | None = _counts("heads", "8,16", _HEADS, N_HEADS)
    n_kv_heads: tuple[int, ...] | None = _counts("kv-heads", "1,2,8", f"{KV_HEADS} (default: heads)", N_KV_HEADS)
    d_head: tuple[int, ...] | None = _counts("d-head", "64,128", f"{HEAD_WIDTH} (default: 64)", D_HEAD)
    dtypes: tuple[Dtype, ...] | None = _words("Sizes", get_args(Dtype), _DTYPES, "dtype")
    # fmt: on


_BUDGET = "Seconds of timing for each size."
_CALL_LIMIT = "Skip a backend whose single call is predicted to take longer."
_REPEAT = "until each median is accurate to 1 %, or --budget is spent"


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Device, threads, seed and duration of the measurement."""

    # fmt: off
    device: str = setting("auto", _TIMING, DEVICES, words=DEVICE_WORDS, default="", common=True)
    threads: int | None = setting(None, _TIMING, THREADS, low=1, high=MAX_THREADS, default="chosen by torch")
    repeat: int | None = setting(None, _TIMING, "Number of timed runs.", low=1, high=100_000, default=_REPEAT)
    budget: float = setting(3.0, _TIMING, _BUDGET, above=0, high=MAX_SECONDS, metavar="SECONDS")
    call_limit: float = setting(5.0, _TIMING, _CALL_LIMIT, above=0, high=MAX_SECONDS, metavar="SECONDS")
    seed: int = setting(0, _TIMING, "Seed of random numbers.", low=0, high=MAX_SEED)
    # fmt: on


_COMPARE = "Compare with a saved run, measured at the same sizes by default."
_FAIL_IF = "slower:1.10: exit with code 3 if a time certainly exceeds 1.10 × the baseline's."
_STRICT = "With --fail-if: exit with code 3 if the result is inconclusive, too."
_SAVE = "Save this run, for --compare."


@dataclass(frozen=True, kw_only=True)
class BaselineOptions:
    """The baseline to compare with, and the file to save one in."""

    compare: str | None = setting(None, _BASELINE, _COMPARE, metavar="FILE", common=True)
    fail_if: float | None = setting(None, _BASELINE, _FAIL_IF, parse=parse_rule, metavar="RULE", common=True)
    strict: bool = setting(False, _BASELINE, _STRICT)
    save_baseline: str | None = setting(None, _BASELINE, _SAVE, metavar="FILE", common=True)


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
@command()
def bench(
    sweep_options: SweepOptions, measuring: MeasureOptions, against: BaselineOptions, output: BenchOutput
) -> None:
    """Times the backends and prints the report; exit code 3 if the rule of `--fail-if` is broken."""
    _ = output.format  # raises if two are given
    if against.strict and against.fail_if is None:
        raise UsageError("--strict works only with --fail-if", hint="add --fail-if slower:1.10")
    if against.fail_if is not None and against.compare is None:
        raise UsageError("--fail-if needs a baseline to compare with", hint="add --compare FILE")
    Config(d_model=1, n_heads=1, device=measuring.device, seed=measuring.seed, threads=measuring.threads).resolved()
    saved = [] if against.save_baseline is None else [("save-baseline", against.save_baseline)]
    require_writable([*saved, *output.files], force=output.force)
    lengths = None if against.fail_if is None else sweep_options.lengths
    baseline = None if against.compare is None else _baseline(against.compare, lengths)
    sweep = _sweep(sweep_options, baseline)
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
    if against.save_baseline is not None:
        write_whole(against.save_baseline, benchmark.to_json().encode(), force=output.force)
    comparison = None
    if baseline is not None:
        comparison = compare(benchmark, baseline, against.compare or "", limit=against.fail_if)
    _print(benchmark, comparison, output)
    if not any(row.status == "ok" for row in benchmark.rows):
        reasons = dict.fromkeys(f"{row.backend} {row.status}: {row.reason}" for row in benchmark.rows)
        raise MhaError(f"no backend could run: {'; '.join(reasons)}", code="nothing-ran")
    note_written(output, against.save_baseline)
    if comparison is not None:
        _judge(comparison, output.format, against)


_ANNOUNCED_S = 15.0


def _baseline(path: str, lengths: Sequence[int] | None) -> Benchmark:
    """The run to compare with. Raises `MhaError` if it has no times, or none at these lengths."""
    benchmark = read_benchmark(path)
    measured = sorted({row.k_len for row in benchmark.rows if row.interval})
    if not measured:
        raise MhaError(f"{path} has no times to compare with", code="nothing-compared", path=path)
    if lengths and not {*lengths} & {*measured}:
        message = f"{path} has no row for the lengths of this run"
        raise MhaError(message, hint=f"its lengths: {', '.join(map(str, measured))}", code="nothing-compared")
    return benchmark


def _sweep(options: SweepOptions, baseline: Benchmark | None) -> Sweep:
    """The sweep of the options; options left out take the value of the baseline, if there is one."""
    defaults = Sweep() if baseline is None else baseline.sweep
    known = tuple(name for name in defaults.backends if name in BACKENDS)
    given = {name: value for name, value in vars(options).items() if value not in (None, False)}
    if options.causal is not None:
        given["causal"] = options.causal
    if ALL in (options.backends or ()):
        given["backends"] = tuple(BACKENDS)
    return replace(defaults, **{"backends": known} | given).checked()


def _print(benchmark: Benchmark, comparison: BaselineComparison | None, output: Output) -> None:
    """Prints the report, and writes the plots and the page that were requested."""
    from mhacli.commands.bench.view import bench_view, csv_pieces, page, svg

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


def _judge(comparison: BaselineComparison, name: str | None, against: BaselineOptions) -> None:
    """Exits with 3 if the rule is broken, with `--strict` also if it is inconclusive. With CSV, and with JSON if the rule holds,
    the warnings and the result are printed on stderr as well. Raises `MhaError` if the rule has nothing to judge."""
    if against.fail_if is not None and comparison.rule is None:
        raise MhaError(f"no row of {comparison.baseline} was measured in this run", code="nothing-compared")
    outcome = None if comparison.rule is None else comparison.rule.outcome
    is_broken = outcome == "slower" or (against.strict and outcome == "inconclusive")
    if name == "csv" or (name == "json" and not is_broken):
        for text in (*comparison.warnings, *([] if outcome is None else [comparison.summary])):
            note(text)
    if is_broken:
        raise typer.Exit(EXIT_CHECK)
