"""What `mha bench` measures, and its result as data (`mha.bench/1`), alone or beside an earlier
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal, get_args

import msgspec

from mhacli.errors import UsageError
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole
from mhacli.record.exports import Shown
from mhacli.settings import (
    MAX_LENGTH,
    MAX_SECONDS,
    Config,
    Dtype,
    counts,
    like,
    require_ranges,
    setting,
    word_list,
)

Direction = Literal["forward", "backward", "both"]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
Seconds = Annotated[float, msgspec.Meta(ge=1e-12, le=1e12)]
"""A time of a call, within bounds in which all ratios are finite."""
Interval = tuple[float, float, float]
"""A median, or a ratio of two medians, and the ends of its 95 % interval."""
BackendStatus = Literal["ok", "unsupported", "out-of-memory", "too-large", "too-slow", "failed"]
"""`too-large` and `too-slow` were predicted and not tried; `out-of-memory` was tried; `unsupported`
cannot run; `failed` should have run."""

LAYERS = ("torch-mha", "torch-mha-weights")
"""Whole layers: they compute the projections too, and cannot decode because they have no cache."""
_ON_CPU = ("explicit", "sdpa", "math", "flash")
BACKENDS: tuple[str, ...] = (*_ON_CPU, "efficient", "cudnn", "flex", "compiled", *LAYERS)
"""The backends in default order."""
SIZE = (
    "batch",
    "n_heads",
    "n_kv_heads",
    "d_head",
    "q_len",
    "k_len",
    "dtype",
    "causal",
    "direction",
)
"""The fields of a row that are its size."""
TIMING = ("device", "threads", "repeat", "budget", "call_limit", "seed")
"""The fields of a sweep that say where and how long it measures; a saved run has the others."""
_SAME = (
    "device_name",
    "cpu_name",
    "n_cpus",
    "threads",
    "driver",
    "torch",
    "python",
    "platform",
    "mha",
)
"""What of the environment two runs should have in common."""


@dataclass(frozen=True)
class BenchRow:
    """One backend at one size, with values as wide as keys. A single query is the newest token,
    which sees all keys.

    Without status `ok` the times are None, and `reason` says why. `ran` is the observed kernel;
    `is_fallback`: it is unfused although a fused kernel was expected. One sample has `n_calls`
    calls. `ratio` is the median ÷ that of the fastest row of the size. `low` and `high` are the 95
    % interval of a median or ratio. `is_similar`: the interval of the ratio contains 1, so the row
    is not certainly slower. Without `is_sure` there were too few rounds to call a row the fastest;
    with it, all are that are not certainly slower (`is_fastest`). `predicted_bytes`, `limit` and
    `share_of_peak` are always None now.
    """

    batch: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    q_len: int
    k_len: int
    dtype: Dtype
    causal: bool
    direction: Direction
    backend: str
    status: BackendStatus
    predicted_bytes: int | None = None
    reason: str | None = None
    ran: str | None = None
    is_fallback: bool = False
    first_s: float | None = None
    n_calls: int = 0
    samples_s: tuple[Seconds, ...] = ()
    median_s: Seconds | None = None
    median_low_s: Seconds | None = None
    median_high_s: Seconds | None = None
    p25_s: float | None = None
    p75_s: float | None = None
    min_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    is_sure: bool = True
    is_similar: bool = False
    is_fastest: bool = False
    limit: str | None = None
    share_of_peak: float | None = None
    extra_bytes: int | None = None
    max_error: float | None = None
    mean_error: float | None = None
    n_error_queries: int = 0
    n_samples: int = 0
    flops: int = 0
    bytes: int = 0
    flops_per_byte: float = 0.0
    tflops: float | None = None

    @property
    def interval(self) -> Interval | None:
        """The median seconds with their interval."""
        if self.median_s is None or self.median_low_s is None or self.median_high_s is None:
            return None
        return self.median_s, self.median_low_s, self.median_high_s

    @property
    def size(self) -> tuple[Any, ...]:
        """The values of the fields `SIZE`."""
        return tuple(getattr(self, name) for name in SIZE)

    @property
    def family(self) -> str:
        """The properties that sizes differing only in batch and length have in common, as text."""
        heads = f"{self.n_heads} head{'s' * (self.n_heads > 1)} × {self.d_head}"
        if self.n_kv_heads != self.n_heads:
            heads += f" · {self.n_kv_heads} kv head{'s' * (self.n_kv_heads > 1)}"
        if self.q_len < self.k_len:
            return f"{heads} · {self.dtype} · one query, all keys"
        direction = "forward and backward" if self.direction == "both" else self.direction
        return f"{heads} · {self.dtype} · {'causal' if self.causal else 'full'} · {direction}"

    @property
    def length_text(self) -> str:
        """Batch and length: `1,024 tokens`, `4 × 256 tokens`, or `8,192 keys` for a single
        query.
        """
        batch = "" if self.batch == 1 else f"{self.batch} × "
        return f"{batch}{self.k_len:,} {'keys' if self.q_len < self.k_len else 'tokens'}"

    @property
    def title(self) -> str:
        """The backend and its size."""
        return f"{self.backend}, {self.length_text} · {self.family}"

    @property
    def is_masked(self) -> bool:
        """Whether any cell is masked."""
        return self.causal and self.q_len > 1


_COMPUTED, _SIZES, _TIMING = "Computation", "Sizes", "Timing"
_BACKENDS = f"Backends to measure: {', '.join(BACKENDS)}; or all."
_CALL_LIMIT = "Skip a backend whose single call is predicted to take longer."
_REPEAT = "until each median is accurate to 1 %, or --budget is spent"
_list: Any = partial(setting, (), metavar="LIST", common=True)
_like: Any = partial(like, Config, value=(), metavar="LIST", low=None, high=None, common=True)


@dataclass(frozen=True)
class Sweep:
    """The sizes to measure, all lists combined, and how. `plan` fills in empty lists for a type of
    device.
    """

    backends: tuple[str, ...] = _list(
        _COMPUTED,
        _BACKENDS,
        default="those that suit the device",
        parse=word_list(*BACKENDS, "all"),
        words=(*BACKENDS, "all"),
    )
    directions: tuple[Direction, ...] = setting(
        ("forward",),
        _COMPUTED,
        "Pass to time: forward, backward, or both.",
        "--direction",
        default="forward",
        parse=word_list(*get_args(Direction)),
        metavar="LIST",
        common=True,
    )
    causal: bool = like(Config, "causal", _COMPUTED)
    decode: bool = setting(
        False, _COMPUTED, "Time one decoding step: one query against all keys.", common=True
    )
    lengths: tuple[Count, ...] = _list(
        _SIZES,
        "Numbers of tokens, such as 512,1k or 512..16k, which doubles.",
        "--lengths --seq-len",
        parse=counts,
        default="on a CPU 256..2k, with --decode 512..8k; longer on a GPU",
    )
    batch: tuple[Count, ...] = _list(
        _SIZES,
        "Numbers of sequences.",
        "--batch --batch-size",
        parse=counts,
        default="chosen so that every length has the same number of tokens",
    )
    n_heads: tuple[int, ...] = _like(
        "n_heads", _SIZES, parse=counts, default="512 ÷ d_head, on CUDA 2048 ÷ d_head"
    )
    n_kv_heads: tuple[int, ...] = _like("n_kv_heads", _SIZES, parse=counts)
    d_head: tuple[int, ...] = _like("d_head", _SIZES, parse=counts, default="64")
    dtypes: tuple[Dtype, ...] = _like(
        "dtype",
        _SIZES,
        names=("--dtype",),
        parse=word_list(*get_args(Dtype)),
        default="float32; on CUDA, bfloat16",
    )
    device: str = like(Config, "device", _TIMING, default="", common=True)
    threads: int | None = like(Config, "threads", _TIMING)
    repeat: int | None = setting(
        None, _TIMING, "Number of timed runs.", low=1, high=100_000, default=_REPEAT
    )
    budget: float = setting(
        3.0,
        _TIMING,
        "Seconds of timing for each size.",
        above=0,
        high=MAX_SECONDS,
        metavar="SECONDS",
    )
    call_limit: float = setting(
        5.0, _TIMING, _CALL_LIMIT, above=0, high=MAX_SECONDS, metavar="SECONDS"
    )
    seed: int = like(Config, "seed", _TIMING)

    def checked(self) -> Sweep:
        """The sweep itself. Raises `UsageError` for unknown backends and invalid sizes."""
        require_ranges(self)
        Config(d_model=1, n_heads=1, device=self.device).resolved()
        if unknown := {*self.backends} - {*BACKENDS, "all"}:
            raise UsageError(f"--backends {min(unknown)[:40]!r} is not among {', '.join(BACKENDS)}")
        if self.decode and self.directions != ("forward",):
            raise UsageError(
                "--direction does not go with --decode: a decoding step has no backward pass"
            )
        self.plan("cpu")  # whose heads must not contradict each other
        return self

    def plan(self, kind: str) -> tuple[Sweep, list[list[BenchRow]]]:
        """The sweep with the defaults of a type of device, and the rows to measure of every size,
        family by family. Raises `UsageError` for heads that contradict each other.

        By default the width of all heads and the tokens of a batch are constant, as in the
        benchmark of FlashAttention, scaled to the device. Source: Dao 2023, "FlashAttention-2",
        section 4.1: 16k tokens, hidden dimension 2048.
        """
        is_gpu = kind == "cuda"
        width, n_tokens = (2048, 16_384) if is_gpu else (512, 1024)
        suited, lengths = (
            BACKENDS if is_gpu else (*_ON_CPU, *LAYERS),
            "512..32k" if is_gpu else "256..2k",
        )
        if self.decode:
            suited, lengths = suited[: -len(LAYERS)], "1k..64k" if is_gpu else "512..8k"
        full = replace(
            self,
            backends=BACKENDS if "all" in self.backends else self.backends or suited,
            lengths=self.lengths or counts(lengths),
            d_head=self.d_head or (64,),
            dtypes=self.dtypes or ("bfloat16" if is_gpu else "float32",),
        )
        heads = product(
            full.dtypes, full.directions, full.d_head, full.n_heads or (0,), full.n_kv_heads or (0,)
        )
        sizes = []
        for dtype, direction, d_head, given, given_kv in heads:
            n_heads = given or max(1, width // d_head)
            n_kv_heads = given_kv or n_heads
            Config(d_model=1, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head).resolved()
            for n, k_len in product(full.batch or (int(full.decode),), full.lengths):
                batch, q_len = n or max(1, n_tokens // k_len), 1 if full.decode else k_len
                size = (
                    batch,
                    n_heads,
                    n_kv_heads,
                    d_head,
                    q_len,
                    k_len,
                    dtype,
                    full.causal,
                    direction,
                )
                sizes.append([BenchRow(*size, name, "ok") for name in full.backends])
        return full, sizes


@dataclass(frozen=True, repr=False)
class Benchmark(Shown):
    """A complete run of `mha bench`. `environment` is that of a record, with the processor, its
    number of cores, the driver of a GPU, and the load of the machine at the beginning. `comparison`
    is that of `compare` with an earlier run.
    """

    command: tuple[str, ...]
    seed: int
    environment: Mapping[str, Any]
    sweep: Sweep
    rows: tuple[BenchRow, ...]
    schema: Literal["mha.bench/1"] = "mha.bench/1"
    comparison: Mapping[str, Any] | None = None

    def view(self, screen: Any) -> Any:
        """What `mha bench` prints on a screen."""
        from mhacli.commands.bench.view import bench_view

        return bench_view(self, screen)

    def __repr__(self) -> str:
        """One line that names the fastest backend."""
        return f"<Benchmark: {'; '.join(self.summary)}>"

    @property
    def summary(self) -> tuple[str, ...]:
        """One sentence per family of sizes: the fastest backend, its margin, and whether that is
        certain.
        """
        from mhacli.commands.bench.view import sentences

        return sentences(self)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON values. All numbers are finite. `ceilings` and `controls` are always
        empty now.
        """
        run: dict[str, Any] = msgspec.to_builtins(self)
        for name in TIMING:
            del run["sweep"][name]
        if self.comparison is None:
            del run["comparison"]
        return (
            {"schema": self.schema, "summary": list(self.summary)}
            | run
            | {"ceilings": [], "controls": []}
        )

    def without_samples(self) -> list[dict[str, Any]]:
        """The rows with every number but the single times."""
        rows = self.to_dict()["rows"]
        return [{name: value for name, value in row.items() if name != "samples_s"} for row in rows]

    def to_json(self) -> str:
        """The JSON document."""
        return msgspec.json.encode(self.to_dict()).decode() + "\n"


def read_benchmark(path: str) -> Benchmark:
    """The benchmark in a JSON file, which `--save-baseline` writes. Raises `MhaError` for an
    unreadable file or another schema.
    """
    document = load_json(read_whole(path, 256 << 20), path)
    return decode(Benchmark, document, f"{path} is not a benchmark (mha.bench/1)", path=path)


def compare(
    now: Benchmark, baseline: Benchmark, path: str, limit: float | None = None
) -> Benchmark:
    """The benchmark `now` beside the baseline: the `changes` of rows that have a time in both, the
    rows that cannot be compared, `warnings`, and the result of the `rule` `slower:limit`, which is
    None without a rule or changes. Its `outcome` is `slower` if a time is certainly above the limit
    or a row could not run, `passed` if all times are certainly at most the limit.
    """
    then = {(row.backend, row.size): row for row in baseline.rows}
    changes, unsure, broken, unmatched = [], [], [], []
    for row in now.rows:
        before = then.pop((row.backend, row.size), None)
        if before is None:
            unmatched.append(f"{row.title}: not in {path}")
        elif row.interval is not None and before.interval is not None:
            is_sure = row.is_sure and before.is_sure
            changes.append(
                _change(row, row.interval, before.interval, limit=limit, is_sure=is_sure)
            )
            unsure += changes[-1:] * (not is_sure)
        elif before.interval is not None:
            broken.append(f"{row.title}: {row.status} now ({row.reason})")
    unmatched += [f"{row.title}: not measured now" for row in then.values()]
    pairs = {name: (baseline.environment.get(name), now.environment.get(name)) for name in _SAME}
    pairs["seed"] = (baseline.seed, now.seed)
    warnings = [
        f"{name} differs: {old} then, {new} now" for name, (old, new) in pairs.items() if old != new
    ]
    verdicts, rule = [change["verdict"] for change in changes], None
    summary = (
        f"{verdicts.count('slower')} slower and {verdicts.count('faster')} faster than in {path}"
    )
    if limit is not None and (changes or broken):
        undecided = [
            each
            for each in changes
            if each in unsure or each["ratio_low"] <= limit < each["ratio_high"]
        ]
        n_slower = sum(each["ratio_low"] > limit for each in changes if each not in undecided)
        outcome = "slower" if broken or n_slower else "inconclusive" if undecided else "passed"
        rule = {"limit": limit, "outcome": outcome, "undecided": undecided}
        summary = (
            f"{n_slower} surely and {len(undecided)} perhaps more than {limit:g} × that in {path}:"
            f" {outcome}"
        )
    summary = f"of {len(changes)} timings, {summary}"
    parts = {"baseline": path, "broken": broken, "unmatched": unmatched, "warnings": warnings}
    return replace(now, comparison={**parts, "summary": summary, "changes": changes, "rule": rule})


def _change(
    row: BenchRow, now: Interval, then: Interval, *, limit: float | None, is_sure: bool
) -> dict[str, Any]:
    """The ratio of a row's time to the baseline's (above 1 = slower), from the fastest likely time
    now over the slowest likely time then to the reverse: two runs share no rounds. It is similar if
    this interval contains 1, or comes from too few rounds to be sure. `shows_from` is the least
    ratio that an interval of this width shows to be above the limit; `noise_high` is always null
    now.
    """
    ratio, low, high = now[0] / then[0], now[1] / then[2], now[2] / then[1]
    return {
        **{name: getattr(row, name) for name in SIZE},
        "backend": row.backend,
        "name": f"{row.length_text} · {row.family}",
        "baseline_s": then[0],
        "median_s": now[0],
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "verdict": (
            "slower" if is_sure and low > 1 else "faster" if is_sure and high < 1 else "similar"
        ),
        "shows_from": None if limit is None else limit * ratio / low,
        "noise_high": None,
    }
