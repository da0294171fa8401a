"""What `mha bench` measures, and its result as data (`mha.bench/1`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal, get_args

import msgspec

from mhacli.errors import UsageError
from mhacli.numbers import shown
from mhacli.record.shown import Shown
from mhacli.render.base.format import count_of
from mhacli.render.base.selection import grouped
from mhacli.settings import (
    MAX_LENGTH,
    MAX_SECONDS,
    Config,
    Dtype,
    as_option,
    counts,
    like,
    require_ranges,
    setting,
    word_list,
)

Direction = Literal["forward", "both"]
"""A pass forward, or one forward and backward."""
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
BackendStatus = Literal["ok", "unsupported", "out-of-memory", "too-large", "too-slow", "failed"]
"""`too-large` and `too-slow` were predicted and not tried; `out-of-memory` was tried; `unsupported`
cannot run; `failed` should have run."""

LAYERS = ("torch-mha", "torch-mha-weights")
"""Whole layers: they compute the projections too, and cannot decode because they have no cache."""
_ON_CPU = ("explicit", "sdpa", "math", "flash")
BACKENDS: tuple[str, ...] = (*_ON_CPU, "efficient", "cudnn", "flex", "compiled", *LAYERS)
"""The backends in default order."""
TIMING = ("device", "threads", "repeat", "budget", "call_limit", "seed")
"""The fields of a sweep that say where and how long it measures. JSON has the others."""
_ONE_VALUE = ("directions", "batch", "n_heads", "n_kv_heads", "d_head", "dtypes")
"""The lists of a sweep that have one entry at most: only lengths and backends may be several."""


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
    samples_s: tuple[float, ...] = ()
    median_s: float | None = None
    median_low_s: float | None = None
    median_high_s: float | None = None
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
    def family(self) -> str:
        """The properties that sizes differing only in batch and length have in common, as text."""
        heads = f"{count_of(self.n_heads, 'head')} × {self.d_head}"
        if self.n_kv_heads != self.n_heads:
            heads += f" · {count_of(self.n_kv_heads, 'kv head')}"
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


_COMPUTED = "Computation"
_SIZES = "Sizes"
_TIMING = "Timing"
_list: Any = partial(setting, (), metavar="LIST", common=True)
_like: Any = partial(like, Config, value=(), low=None, high=None, common=True)


@dataclass(frozen=True)
class Sweep:
    """The sizes to measure, and how. Backends and lengths are lists; every other list has at most
    one entry. `plan` fills in empty lists for a type of device.
    """

    backends: tuple[str, ...] = _list(
        _COMPUTED,
        f"Backends to measure: {', '.join(BACKENDS)}; or all.",
        default="those that suit the device",
        parse=word_list(*BACKENDS, "all"),
        words=(*BACKENDS, "all"),
    )
    directions: tuple[Direction, ...] = setting(
        ("forward",),
        _COMPUTED,
        "Pass to time: forward, or both forward and backward.",
        "--direction",
        default="forward",
        parse=word_list(*get_args(Direction)),
        metavar="|".join(get_args(Direction)),
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
        "Number of sequences.",
        "--batch --batch-size",
        parse=counts,
        metavar="N",
        default="chosen so that every length has the same number of tokens",
    )
    n_heads: tuple[int, ...] = _like(
        "n_heads", _SIZES, parse=counts, metavar="N", default="512 ÷ d_head, on CUDA 2048 ÷ d_head"
    )
    n_kv_heads: tuple[int, ...] = _like("n_kv_heads", _SIZES, parse=counts, metavar="N")
    d_head: tuple[int, ...] = _like("d_head", _SIZES, parse=counts, metavar="N", default="64")
    dtypes: tuple[Dtype, ...] = _like(
        "dtype",
        _SIZES,
        names=("--dtype",),
        parse=word_list(*get_args(Dtype)),
        metavar="|".join(get_args(Dtype)),
        default="float32; on CUDA, bfloat16",
    )
    device: str = like(Config, "device", _TIMING, default="", common=True)
    threads: int | None = like(Config, "threads", _TIMING)
    repeat: int | None = setting(
        None,
        _TIMING,
        "Number of timed runs.",
        low=1,
        high=100_000,
        default="until each median is accurate to 1 %, or --budget is spent",
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
        5.0,
        _TIMING,
        "Skip a backend whose single call is predicted to take longer.",
        above=0,
        high=MAX_SECONDS,
        metavar="SECONDS",
    )
    seed: int = like(Config, "seed", _TIMING)

    def checked(self) -> Sweep:
        """The sweep itself. Raises `UsageError` for unknown backends and invalid sizes."""
        require_ranges(self)
        for name in _ONE_VALUE:
            if len(values := getattr(self, name)) > 1:
                message = f"{as_option(name, values, Sweep)} are {len(values)} values"
                raise UsageError(message, hint="run mha bench once for each of them")
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
        """The sweep with the defaults of a type of device, and the rows to measure of every length.
        Raises `UsageError` for heads that contradict each other.

        By default the width of all heads and the tokens of a batch are constant, as in the
        benchmark of FlashAttention, scaled to the device. Source: Dao 2023, "FlashAttention-2",
        section 4.1: 16k tokens, hidden dimension 2048.
        """
        full = self._with_defaults(kind)
        width, n_tokens = (2048, 16_384) if kind == "cuda" else (512, 1024)
        (d_head,) = full.d_head
        n_heads = full.n_heads[0] if full.n_heads else max(1, width // d_head)
        n_kv_heads = full.n_kv_heads[0] if full.n_kv_heads else n_heads
        Config(d_model=1, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head).resolved()
        sizes = []
        for k_len in full.lengths:
            usual_batch = 1 if full.decode else max(1, n_tokens // k_len)
            rows = [
                BenchRow(
                    batch=full.batch[0] if full.batch else usual_batch,
                    n_heads=n_heads,
                    n_kv_heads=n_kv_heads,
                    d_head=d_head,
                    q_len=1 if full.decode else k_len,
                    k_len=k_len,
                    dtype=full.dtypes[0],
                    causal=full.causal,
                    direction=full.directions[0],
                    backend=name,
                    status="ok",
                )
                for name in full.backends
            ]
            sizes.append(rows)
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
    number of cores, the driver of a GPU, and the load of the machine at the beginning.
    """

    command: tuple[str, ...]
    seed: int
    environment: Mapping[str, Any]
    sweep: Sweep
    rows: tuple[BenchRow, ...]
    schema: Literal["mha.bench/1"] = "mha.bench/1"

    def __repr__(self) -> str:
        """One line that names the fastest backend."""
        return f"<Benchmark: {self.summary}>"

    @property
    def summary(self) -> str:
        """A sentence: the fastest backend at the longest size, its margin over `explicit`, the
        plain formula, or else over the slowest, and whether that is certain.
        """
        timed = self.longest
        if not timed:
            return "nothing could be timed"
        first, *others = timed
        time, where = shown(first.median_s, "seconds"), first.length_text
        if not others:
            return f"{first.backend} takes {time} at {where}; no other backend was timed"
        other = next((row for row in others if row.backend == "explicit"), others[-1])
        is_certain = first.is_sure and (other.ratio_low or 0.0) > 1
        verb = "is" if is_certain else "was"
        ratio, low = shown(other.ratio, "short"), shown(other.ratio_low, "short")
        sentence = (
            f"{first.backend} {verb} {ratio} × faster than {other.backend} at {where} ({time}"
            f" against {shown(other.median_s, 'seconds')}, 95 % interval {low} to"
            f" {shown(other.ratio_high, 'short')} ×)"
        )
        return sentence if is_certain else f"{sentence}, which may be chance"

    @property
    def longest(self) -> list[BenchRow]:
        """The timed rows of the longest size, of those with two of them if any, the fastest
        first.
        """
        timed = (row for row in self.rows if row.median_s is not None)
        by_length = grouped(timed, attrgetter("k_len")).items()
        _, rows = max(by_length, key=lambda item: (len(item[1]) > 1, item[0]), default=(0, []))
        return sorted(rows, key=lambda row: row.median_s or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON values. All numbers are finite. `ceilings` and `controls` are always
        empty now.
        """
        run: dict[str, Any] = msgspec.to_builtins(self)
        for name in TIMING:
            del run["sweep"][name]
        summary = {"schema": self.schema, "summary": [self.summary]}
        return {**summary, **run, "ceilings": [], "controls": []}

    def without_samples(self) -> list[dict[str, Any]]:
        """The rows with every number but the single times."""
        rows = self.to_dict()["rows"]
        return [{name: value for name, value in row.items() if name != "samples_s"} for row in rows]
