"""Autoregressive decoding with a KV cache, step by step, and the time of each kind of cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.core import Tap, no_tap
from mhacli.attention.devices import free_bytes
from mhacli.attention.layer import CACHES, MultiHeadAttention, Past, TokenVectors
from mhacli.attention.memory import require_layer_room
from mhacli.attention.taps import Stopwatch, largest_difference, require_finite, step_of, time_stages, timing
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.layer.run import Observed, make_record, prepare
from mhacli.layer.setup import Setup
from mhacli.record.checks import SelfCheck
from mhacli.record.record import CacheStep, CacheTiming, DecodeSummary, Record, Step, Timing
from mhacli.run import Run
from mhacli.settings import Config
from mhacli.sites import (
    CacheKind,
    crossing_len,
    moved_bytes,
    step_flops,
    token_bytes,
    total_moved_bytes,
    weight_bytes,
)

_ROWS: Mapping[str, float] = {"qk": 0.0, "scores": -torch.inf, "pattern": 0.0}
"""Sites with one row per query, and the value for keys that a step does not see yet."""


def decode(
    request: Run, *, cache: CacheKind = "preallocated", prompt_len: int = 0, lengths: Sequence[int] = ()
) -> Record:
    """A record whose trace has one entry per step: a prefill of `prompt_len` tokens if any, then one token at a time.

    Its arrays are the steps' results, row by row. Its self-check compares them with a full recomputation of the
    sequence. The kinds of cache are timed at `lengths`, by default the length of the text. Raises `MhaError` as
    `inspect` does, and `UsageError` for options that token-by-token decoding does not support.
    """
    setup = prepare(request)
    with torch.no_grad():
        for length in lengths:
            _require_room(setup, length)
        decoder = Decoder(setup, setup.rows(), cache, prompt_len)
        observed = decoder.observe()
        if not request.allow_nonfinite:
            require_finite(observed.tensors["qk"], observed.tensor("out"), setup.config.dtype)
        timings = time_stages(decoder.run, observed.first_s, setup.device, request.repeat)
        record = make_record(setup, request, observed, timings)
        timings_of_caches = time_caches(
            setup.layer.attention, setup.config, lengths or (setup.facts.q_len,), setup.facts.batch
        )
    return replace(
        record,
        self_check=_against_recomputation(record),
        decoding=DecodeSummary(
            cache=cache,
            prompt_len=prompt_len,
            ways=timings_of_caches,
            weight_bytes=weight_bytes(setup.config),
            token_bytes=token_bytes(setup.config),
            full_token_bytes=token_bytes(setup.config, setup.config.n_heads),
            crossing_len=crossing_len(setup.config, setup.facts.batch),
        ),
    )


@dataclass(frozen=True)
class Decoder:
    """The token vectors of a text and a kind of cache, for repeatable runs."""

    setup: Setup
    x: TokenVectors
    cache: CacheKind
    prompt_len: int

    def spans(self) -> list[tuple[int, int]]:
        """The start and end of each step's new tokens."""
        return spans_of(self.prompt_len, self.x.shape[1])

    def run(self, tap: Tap) -> None:
        """Runs all steps. The tap receives each output as `step N`."""
        past = self._empty()
        for number, (start, end) in enumerate(self.spans()):
            out, past = self.step(start, end, past)
            tap(site_of(number), out)

    def step(self, start: int, end: int, past: Past | None, tap: Tap = no_tap) -> tuple[TokenVectors, Past | None]:
        """The output of the tokens from `start` to `end`, and the cache after them."""
        layer, places = self.setup.layer.attention, self.setup.places[..., :end]
        if past is None:
            bias = self._bias(0, end)
            out = layer(self.x[:, :end], allowed=self.setup.allowed, bias=bias, places=places, tap=tap)[0]
            return out[:, start:], None
        allowed = masks.shifted(self.setup.allowed or masks.causal(), start)
        bias = self._bias(start, end)
        new, new_places = self.x[:, start:end], places[..., start:]
        out, _, past = layer.decode(new, past, allowed=allowed, bias=bias, places=new_places, tap=tap)
        return out, past

    def observe(self) -> Observed:
        """Runs all steps once, and assembles their rows into whole tensors."""
        whole: dict[str, Tensor] = {}
        steps: list[Step] = []
        seconds: dict[str, float] = {}
        full, past = self.setup.run(), self._empty()
        for number, span in enumerate(self.spans()):
            tensors_of_step: dict[str, Tensor] = {}
            watch = Stopwatch(self.setup.device)
            out, past = self.step(
                *span, past, lambda site, tensor, into=tensors_of_step, **_: into.update({site: tensor})
            )
            watch(site_of(number), out)
            seconds |= watch.seconds
            self._gather(whole, tensors_of_step | {"out": out}, span)
            whole["v"] = tensors_of_step["v"] if past is None else past.v
            difference = largest_difference(out, full[:, slice(*span)])
            steps.append(self._step(number, span, tensors_of_step, past, difference))
        tensors = {site: tensor.cpu() for site, tensor in whole.items()}
        return Observed(tuple(steps), tensors, self.setup.visible().cpu(), seconds)

    def _gather(self, whole: dict[str, Tensor], seen: Mapping[str, Tensor], span: tuple[int, int]) -> None:
        """Copies the rows of a step's queries into the whole tensors. Later keys keep their initial value."""
        n_new, length = span[1] - span[0], self.x.shape[1]
        for site in ("qk", "scores", "pattern", "z", "out"):
            rows = seen[site][..., -n_new:, :]
            shape = (*rows.shape[:-2], length, length if site in _ROWS else rows.shape[-1])
            into = whole.setdefault(site, rows.new_full(shape, _ROWS.get(site, 0.0)))
            into[..., slice(*span), : rows.shape[-1]] = rows

    def _step(
        self, number: int, span: tuple[int, int], seen: Mapping[str, Tensor], past: Past | None, difference: float
    ) -> Step:
        (start, end), config, batch = span, self.setup.config, self.x.shape[0]
        n_new = end - start
        cost: dict[str, Any] = {"batch": batch, "n_new": n_new, "length": end, "cache": self.cache}
        token = batch * token_bytes(config)
        past_and_new = f"softmax(scale · q[{_span(start, end)}] k[{_span(0, end)}]ᵀ) v[{_span(0, end)}]"
        return decode_step(
            number,
            seen["out"][:, -n_new:],
            n_keys=end,
            axes=("batch", "query", "d_model" if config.out_proj else "head·d_v"),
            formula=f"out = {past_and_new}{_output_words(config)}",
            flops=step_flops(config, **cost),
            cache=CacheStep(
                phase=phase_of(number, self.prompt_len),
                start=start,
                tokens=self._tokens(start, end),
                q_shape=tuple(seen["q"].shape),
                k_shape=tuple(seen["k"].shape),
                v_shape=tuple(seen["v"].shape),
                n_past=start,
                read_bytes=0 if past is None else end * token,
                appended_bytes=0 if past is None else n_new * token,
                moved_bytes=moved_bytes(config, **cost),
                cache_bytes=0 if past is None else sum(t.untyped_storage().nbytes() for t in (past.k, past.v)),
                max_abs_difference=finite(difference),
            ),
        )

    def _tokens(self, start: int, end: int) -> tuple[tuple[str, ...], ...]:
        """The names of each sequence's new tokens; empty for padding."""
        named = []
        for sequence in self.setup.encoded.sequences:
            first = self.setup.config.first_column(len(sequence.tokens), self.x.shape[1])
            named.append(sequence.tokens[max(0, start - first) : max(0, end - first)])
        return tuple(named)

    def _empty(self) -> Past | None:
        if self.cache == "none":
            return None
        return CACHES[self.cache](self.setup.layer.attention, self.x.shape[0], self.x.shape[1])

    def _bias(self, start: int, end: int) -> Tensor | None:
        """The part of the score bias for these queries and their keys."""
        bias = self.setup.bias
        if bias is None:
            return None
        whole: Tensor = torch.atleast_2d(bias)
        rows: Tensor = whole if whole.shape[-2] == 1 else whole[..., start:end, :]
        return rows if rows.shape[-1] == 1 else rows[..., :end]


def _require_room(setup: Setup, length: int) -> None:
    """Raises `MhaError` if recomputing the whole sequence, one of the kinds of cache, does not fit into memory."""
    longer = replace(setup.facts, q_len=length, k_len=length)
    try:
        require_layer_room(longer, (), 0, free_bytes(setup.config.device))
    except MhaError as fault:
        raise MhaError(
            f"--lengths {length}: {fault.message}",
            hint="shorter --lengths need less",
            code=fault.code,
        ) from None


# --------------------------------------------------------------------------------------------- steps, also for checkpoints


def spans_of(prompt_len: int, length: int) -> list[tuple[int, int]]:
    """The start and end of each step's new tokens: the prompt at once, then token by token."""
    after = [(t, t + 1) for t in range(prompt_len, length)]
    return [(0, prompt_len), *after] if prompt_len else after


def site_of(number: int) -> str:
    """The name of a step in traces and timings."""
    return f"step {number}"


def phase_of(number: int, prompt_len: int) -> Literal["prefill", "decode"]:
    """The phase of a step: `prefill` for the prompt, else `decode`."""
    return "prefill" if number == 0 < prompt_len else "decode"


def decode_step(number: int, out: TokenVectors, *, n_keys: int, cache: CacheStep, **described: Any) -> Step:
    """A step of the trace with its output and the size of the `cache`. `described` are further arguments of `step_of`."""
    new = "the prompt at once" if cache.phase == "prefill" else "one new token"
    return step_of(site_of(number), out, meaning=f"{new} over {n_keys} keys and values", cache=cache, **described)


def largest_of(steps: Sequence[Step]) -> float:
    """The largest difference of a step's output from the full recomputation; infinite if one is not finite."""
    differences = [step.cache.max_abs_difference for step in steps if step.cache is not None]
    return max((math.inf if error is None else error for error in differences), default=0.0)


# ------------------------------------------------------------------------------------------------------------ mha's own layer


def _output_words(config: Config) -> str:
    if not config.out_proj:
        return ""
    return " W_oᵀ + b_o" if config.bias else " W_oᵀ"


def _span(start: int, end: int) -> str:
    return str(start) if end == start + 1 else f"{start} … {end - 1}"


def _against_recomputation(record: Record) -> SelfCheck:
    """The larger of two errors: of the outputs against the pattern shown, and against a full recomputation.

    Both sides of the second comparison round, so its tolerance is twice that of one output. The first keeps the
    tolerance of one output.
    """
    shown_error, tolerance = record.self_check.error, 2 * record.self_check.tolerance
    check = SelfCheck.of(max(math.inf if shown_error is None else shown_error, largest_of(record.trace)), tolerance)
    return record.self_check if check.ok and not record.self_check.ok else check


# ----------------------------------------------------------------------------------------------------- timing of caches


KINDS: tuple[CacheKind, ...] = get_args(CacheKind)
N_TIMED = 9
"""The number of timed lengths, from 1 to the whole. Steps between them are interpolated."""
_MIN_ROUNDS, _MAX_ROUNDS, _BUDGET_S = 6, 50, 0.9


def time_caches(
    layer: MultiHeadAttention, config: Config, lengths: Sequence[int], batch: int
) -> tuple[CacheTiming, ...]:
    """The timings of each kind of cache at each length, over random vectors with a causal mask.

    Every round runs all kinds at all lengths, so that noise affects all alike.
    """
    timings_of_caches: list[CacheTiming] = []
    for length in sorted(set(lengths)):
        grid = sorted({round(1 + (length - 1) * part / (N_TIMED - 1)) for part in range(N_TIMED)})
        timings = _time_steps(layer, batch, grid)
        timings_of_caches += [_cache_timing(kind, timings, config, batch) for kind in KINDS]
    return tuple(timings_of_caches)


def _cache_timing(
    kind: CacheKind, timings: Mapping[int, Mapping[str, Timing]], config: Config, batch: int
) -> CacheTiming:
    length = max(timings)
    return CacheTiming(
        cache=kind,
        length=length,
        step=timings[length][kind],
        total_s=interpolated_sum({point: of[kind].median_s for point, of in timings.items()}),
        n_timed=len(timings),
        step_bytes=moved_bytes(config, batch=batch, n_new=1, length=length, cache=kind),
        total_bytes=total_moved_bytes(config, batch=batch, length=length, cache=kind),
        step_flops=step_flops(config, batch=batch, n_new=1, length=length, cache=kind),
        cache_bytes=0 if kind == "none" else batch * length * token_bytes(config),
    )


def interpolated_sum(timed: Mapping[int, float]) -> float:
    """The sum over all integers from the first to the last point, with linear interpolation between the points.

    >>> interpolated_sum({1: 1.0, 4: 4.0})  # 1 + 2 + 3 + 4
    10.0
    """
    points = sorted(timed)
    total = timed[points[0]]
    for left, right in pairwise(points):
        n = right - left
        total += n * timed[left] + (timed[right] - timed[left]) * (n + 1) / 2
    return total


def _time_steps(layer: MultiHeadAttention, batch: int, lengths: Sequence[int]) -> dict[int, dict[str, Timing]]:
    """The timings of the last step to each length, by kind of cache."""
    like = layer.q_proj.weight
    steps: dict[tuple[int, str], Callable[[], object]] = {}
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        rows = torch.randn(batch, length, like.shape[1], generator=generator).to(like)
        steps |= {(length, kind): _step_of(kind, layer, rows, generator) for kind in KINDS}
    first = {place: _seconds(step, like.device) for place, step in steps.items()}
    samples: dict[tuple[int, str], list[float]] = {place: [] for place in steps}
    began = perf_counter()
    for round_ in range(_MAX_ROUNDS):
        if round_ >= _MIN_ROUNDS and perf_counter() - began > _BUDGET_S:
            break
        for place, step in steps.items():
            samples[place].append(_seconds(step, like.device))
    return {length: {kind: timing(first[length, kind], samples[length, kind]) for kind in KINDS} for length in lengths}


def _step_of(
    kind: CacheKind, layer: MultiHeadAttention, rows: Tensor, generator: torch.Generator
) -> Callable[[], object]:
    """One step, repeatable because its input state stays unchanged."""
    if kind == "none":
        return lambda: layer(rows, allowed=masks.causal())[0][:, -1:]
    batch, n_past = rows.shape[0], rows.shape[1] - 1
    past: Past = CACHES[kind](layer, batch, rows.shape[1])
    if n_past:
        shapes = [(batch, layer.n_kv_heads, n_past, width) for width in (layer.d_head, layer.d_v)]
        k, v = (torch.randn(shape, generator=generator).to(rows) for shape in shapes)
        past = past.extended(k, v)
    return lambda: layer.decode(rows[:, -1:], past)[0]


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    began = perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter() - began
