"""What `mha bench` measures, and its result as data (`mha.bench/1`), alone or beside an earlier
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from mhacli.errors import UsageError
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole
from mhacli.record.shown import Shown
from mhacli.render.base.selection import grouped
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
from mhacli.text.numbers import shown

Direction = Literal["forward", "backward", "both"]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
Seconds = Annotated[float, msgspec.Meta(ge=1e-12, le=1e12)]
"""A time of a call, within bounds in which all ratios are finite."""
BackendStatus = Literal["ok", "unsupported", "out-of-memory", "too-large", "too-slow", "failed"]
"""`too-large` and `too-slow` were predicted and not tried; `out-of-memory` was tried; `unsupported`
cannot run; `failed` should have run."""

LAYERS = ("torch-mha", "torch-mha-weights")
"""Whole layers: they compute the projections too, and cannot decode because they have no cache."""
_ON_CPU = ("explicit", "sdpa", "math", "flash")
BACKENDS: tuple[str, ...] = (*_ON_CPU, "efficient", "cudnn", "flex", "compiled", *LAYERS)
"""The backends in default order."""
TIMING = ("device", "threads", "repeat", "budget", "call_limit", "seed")
"""The fields of a sweep that say where and how long it measures; a saved run has the others."""
_COMPARABLE = (
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


class Interval(NamedTuple):
    """A median, or a ratio of two medians, and the ends of its 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class BenchSize:
    """What is computed at once, with values as wide as keys. A single query is the newest token,
    which sees all keys.
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

    @property
    def family(self) -> str:
        """The properties that sizes differing only in batch and length have in common, as text."""
        heads = f"{_count(self.n_heads, 'head')} × {self.d_head}"
        if self.n_kv_heads != self.n_heads:
            heads += f" · {_count(self.n_kv_heads, 'kv head')}"
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
    def is_masked(self) -> bool:
        """Whether any cell is masked."""
        return self.causal and self.q_len > 1


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


@dataclass(frozen=True)
class BenchRow(BenchSize):
    """One backend at one size.

    Without status `ok` the times are None, and `reason` says why. `ran` is the observed kernel;
    `is_fallback`: it is unfused although a fused kernel was expected. One sample has `n_calls`
    calls. `ratio` is the median ÷ that of the fastest row of the size. `low` and `high` are the 95
    % interval of a median or ratio. `is_similar`: the interval of the ratio contains 1, so the row
    is not certainly slower. Without `is_sure` there were too few rounds to call a row the fastest;
    with it, all are that are not certainly slower (`is_fastest`). `predicted_bytes`, `limit` and
    `share_of_peak` are always None now.
    """

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
        return Interval(self.median_s, self.median_low_s, self.median_high_s)

    @property
    def size(self) -> BenchSize:
        """The size alone."""
        return BenchSize(**{name: getattr(self, name) for name in SIZE})

    @property
    def title(self) -> str:
        """The backend and its size."""
        return f"{self.backend}, {self.length_text} · {self.family}"


SIZE = tuple(field.name for field in fields(BenchSize))
"""The fields of a row that are its size."""


@dataclass(frozen=True)
class TimeChange(BenchSize):
    """The ratio of a row's time to the baseline's (above 1 = slower), from the fastest likely time
    now over the slowest likely time then to the reverse: two runs share no rounds.

    It is similar if this interval contains 1, or comes from too few rounds to be sure. `shows_from`
    is the least ratio that an interval of this width shows to be above the limit; `noise_high` is
    always null now.
    """

    backend: str
    name: str
    baseline_s: float
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: Literal["slower", "faster", "similar"]
    shows_from: float | None
    noise_high: float | None = None


@dataclass(frozen=True)
class Rule:
    """The result of `--fail-if slower:limit`: `slower` if a time is certainly above the limit or a
    row could not run, `passed` if all times are certainly at most the limit. `undecided` are the
    changes that are neither.
    """

    limit: float
    outcome: Literal["slower", "inconclusive", "passed"]
    undecided: tuple[TimeChange, ...]


@dataclass(frozen=True)
class Comparison:
    """A run beside an earlier one: the rows that have a time in both, and those that cannot be
    compared. Without a rule or changes `rule` is None.
    """

    baseline: str
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    summary: str
    changes: tuple[TimeChange, ...]
    rule: Rule | None


_COMPUTED = "Computation"
_SIZES = "Sizes"
_TIMING = "Timing"
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
        full = self._with_defaults(kind)
        width, n_tokens = (2048, 16_384) if kind == "cuda" else (512, 1024)
        heads = product(
            full.dtypes, full.directions, full.d_head, full.n_heads or (0,), full.n_kv_heads or (0,)
        )
        sizes = []
        for dtype, direction, d_head, given, given_kv in heads:
            n_heads = given or max(1, width // d_head)
            n_kv_heads = given_kv or n_heads
            Config(d_model=1, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head).resolved()
            for given_batch, k_len in product(full.batch or (int(full.decode),), full.lengths):
                batch = given_batch or max(1, n_tokens // k_len)
                q_len = 1 if full.decode else k_len
                size = (batch, n_heads, n_kv_heads, d_head, q_len, k_len)
                rest = (dtype, full.causal, direction)
                sizes.append([BenchRow(*size, *rest, name, "ok") for name in full.backends])
        return full, sizes

    def _with_defaults(self, kind: str) -> Sweep:
        """The sweep with the backends, lengths, widths and dtypes that suit a type of device."""
        is_gpu = kind == "cuda"
        suited = BACKENDS if is_gpu else (*_ON_CPU, *LAYERS)
        lengths = "512..32k" if is_gpu else "256..2k"
        if self.decode:
            suited = suited[: -len(LAYERS)]
            lengths = "1k..64k" if is_gpu else "512..8k"
        return replace(
            self,
            backends=BACKENDS if "all" in self.backends else self.backends or suited,
            lengths=self.lengths or counts(lengths),
            d_head=self.d_head or (64,),
            dtypes=self.dtypes or ("bfloat16" if is_gpu else "float32",),
        )


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
    comparison: Comparison | None = None

    def __repr__(self) -> str:
        """One line that names the fastest backend."""
        return f"<Benchmark: {'; '.join(self.summary)}>"

    @property
    def summary(self) -> tuple[str, ...]:
        """One sentence per family of sizes: the fastest backend, its margin, and whether that is
        certain.
        """
        timed = grouped((row for row in self.rows if row.interval is not None), _FAMILY)
        sentences = []
        for family, rows in timed.items():
            sentence = _sentence(rows)
            sentences.append(f"{family}: {sentence}" if len(timed) > 1 else sentence)
        return tuple(sentences) or ("nothing could be timed",)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON values. All numbers are finite. `ceilings` and `controls` are always
        empty now.
        """
        run: dict[str, Any] = msgspec.to_builtins(self)
        for name in TIMING:
            del run["sweep"][name]
        if self.comparison is None:
            del run["comparison"]
        summary = {"schema": self.schema, "summary": list(self.summary)}
        return {**summary, **run, "ceilings": [], "controls": []}

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


# -------------------------------------------------------------------------------------- the summary

_FAMILY = attrgetter("family")
"""What rows have in common that differ only in batch, length and backend."""


def _sentence(rows: Sequence[BenchRow]) -> str:
    """The fastest backend at the longest size against `explicit`, the plain formula, or else
    against the slowest.
    """
    first, *others = longest(rows)
    time, where = shown(first.median_s, "seconds"), first.length_text
    if not others:
        return f"{first.backend} takes {time} at {where}; no other backend was timed"
    other = next((row for row in others if row.backend == "explicit"), others[-1])
    is_certain = first.is_sure and (other.ratio_low or 0.0) > 1
    verb = "is" if is_certain else "was"
    ratio, low = shown(other.ratio, "short"), shown(other.ratio_low, "short")
    sentence = (
        f"{first.backend} {verb} {ratio} × faster than {other.backend} at {where} ({time} against"
        f" {shown(other.median_s, 'seconds')}, 95 % interval {low} to"
        f" {shown(other.ratio_high, 'short')} ×)"
    )
    return sentence if is_certain else f"{sentence}, which may be chance"


def longest(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The timed rows of the longest size, of those with two of them if any, the fastest first."""
    by_size = grouped((row for row in rows if row.interval is not None), attrgetter("size"))
    of_size = max(
        by_size.values(), key=lambda rows: (len(rows) > 1, rows[0].k_len, rows[0].batch), default=[]
    )
    return sorted(of_size, key=lambda row: row.median_s or 0.0)


# ----------------------------------------------------------------------------------- the comparison


def compare(
    now: Benchmark, baseline: Benchmark, path: str, limit: float | None = None
) -> Benchmark:
    """The benchmark `now` with its comparison with the baseline from the file `path`, by the rule
    `slower:limit` if there is a limit.
    """
    then = {(row.backend, row.size): row for row in baseline.rows}
    changes: list[TimeChange] = []
    undecided: list[TimeChange] = []
    broken: list[str] = []
    unmatched: list[str] = []
    for row in now.rows:
        before = then.pop((row.backend, row.size), None)
        if before is None:
            unmatched.append(f"{row.title}: not in {path}")
        elif before.interval is None:
            continue
        elif row.interval is None:
            broken.append(f"{row.title}: {row.status} now ({row.reason})")
        else:
            is_sure = row.is_sure and before.is_sure
            change = _change(row, row.interval, before.interval, limit=limit, is_sure=is_sure)
            changes.append(change)
            if limit is not None and (not is_sure or change.ratio_low <= limit < change.ratio_high):
                undecided.append(change)
    unmatched += [f"{row.title}: not measured now" for row in then.values()]
    verdicts = [change.verdict for change in changes]
    n_slower, n_faster = verdicts.count("slower"), verdicts.count("faster")
    summary = f"{n_slower} slower and {n_faster} faster than in {path}"
    rule: Rule | None = None
    if limit is not None and (changes or broken):
        n_slower = sum(change.ratio_low > limit for change in changes if change not in undecided)
        rule = Rule(limit, "passed", tuple(undecided))
        if broken or n_slower:
            rule = replace(rule, outcome="slower")
        elif undecided:
            rule = replace(rule, outcome="inconclusive")
        summary = (
            f"{n_slower} surely and {len(undecided)} perhaps more than {limit:g} × that in {path}:"
            f" {rule.outcome}"
        )
    comparison = Comparison(
        baseline=path,
        broken=tuple(broken),
        unmatched=tuple(unmatched),
        warnings=tuple(_warnings(now, baseline)),
        summary=f"of {len(changes)} timings, {summary}",
        changes=tuple(changes),
        rule=rule,
    )
    return replace(now, comparison=comparison)


def _warnings(now: Benchmark, baseline: Benchmark) -> Iterator[str]:
    """What the two runs should have in common and have not."""
    pairs = {
        name: (baseline.environment.get(name), now.environment.get(name)) for name in _COMPARABLE
    }
    for name, (old, new) in {**pairs, "seed": (baseline.seed, now.seed)}.items():
        if old != new:
            yield f"{name} differs: {old} then, {new} now"


def _change(
    row: BenchRow, now: Interval, then: Interval, *, limit: float | None, is_sure: bool
) -> TimeChange:
    """The ratio of a row's time to the baseline's."""
    ratio, low, high = now.median / then.median, now.low / then.high, now.high / then.low
    verdict: Literal["slower", "faster", "similar"] = "similar"
    if is_sure and low > 1:
        verdict = "slower"
    elif is_sure and high < 1:
        verdict = "faster"
    return TimeChange(
        **vars(row.size),
        backend=row.backend,
        name=f"{row.length_text} · {row.family}",
        baseline_s=then.median,
        median_s=now.median,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        verdict=verdict,
        shows_from=None if limit is None else limit * ratio / low,
    )
