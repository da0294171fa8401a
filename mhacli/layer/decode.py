"""`mha decode`: autoregressive decoding with a KV cache, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mhacli.attention import masks
from mhacli.attention.core import Tap, no_tap
from mhacli.attention.layer import KvCache, TokenVectors
from mhacli.attention.taps import Stopwatch, largest_difference, step_of
from mhacli.io.data import finite
from mhacli.layer.run import make_record, prepare
from mhacli.layer.setup import Setup
from mhacli.record.checks import SelfCheck
from mhacli.record.record import CacheStep, DecodeSummary, Record, Step
from mhacli.run import Run
from mhacli.sites import CacheKind, moved_bytes, step_flops, token_bytes

_ROWS: Mapping[str, float] = {"qk": 0.0, "scores": -torch.inf, "pattern": 0.0}
"""Sites with one row per query, and the value for keys that a step does not see yet."""


@torch.no_grad()
def decode(request: Run, *, cache: CacheKind, prompt_len: int) -> Record:
    """A record whose trace has one entry per step: a prefill of `prompt_len` tokens if any, then one token at a time.

    Its arrays are the steps' results, row by row. Its self-check is the worse of two: of the output against the pattern, and
    of the steps against a full pass, where both sides round. Raises `MhaError` as `inspect` does.
    """
    setup = prepare(request)
    x, full = setup.rows(setup.queries), setup.run()
    whole, seen, steps = dict[str, Tensor](), dict[str, Tensor](), list[Step]()

    def take(site: str, tensor: Tensor, **where: Any) -> None:
        span, past = where["span"], where["past"]
        seen["out"] = tensor
        _gather(whole, seen, span, x.shape[1])
        whole["v"] = seen["v"] if past is None else past.v
        found: dict[str, Any] = {"phase": phase_of(len(steps), prompt_len)}
        found["max_abs_difference"] = finite(largest_difference(tensor, full[:, slice(*span)]))
        found["cache_bytes"] = 0 if past is None else sum(t.untyped_storage().nbytes() for t in (past.k, past.v))
        steps.append(_described(setup, len(steps), span, seen=seen, cache=cache, **found))

    run = partial(_run_steps, setup, x, cache, prompt_len)
    watch = Stopwatch(setup.device, then=take)
    run(watch, inside=lambda site, tensor, **_: seen.update({site: tensor}))
    record, _ = make_record(setup, request, steps, whole, watch.seconds, again=run)
    weights = weight_bytes(setup.layer.attention)
    token, of_all = (token_bytes(setup.config, n) for n in (setup.config.n_kv_heads, setup.config.n_heads))
    of_steps = SelfCheck.of(largest_of(record.trace), 2 * record.self_check.tolerance)
    return replace(
        record,
        self_check=max(record.self_check, of_steps, key=lambda check: check.severity),
        decoding=DecodeSummary(cache, prompt_len, weights, token, of_all, weights / (setup.facts.batch * token)),
    )


def _run_steps(
    setup: Setup, x: TokenVectors, cache: CacheKind, prompt_len: int, tap: Tap, inside: Tap = no_tap
) -> None:
    """Runs all steps over the token vectors of a text. The tap receives each output as `step N`, and the tap `inside` the
    tensors of the layer."""
    layer, bias, past = setup.layer.attention, setup.bias, None
    batch, length, _ = x.shape
    if cache != "none":
        past = KvCache.empty(layer, batch, room=length if cache == "preallocated" else 0)
    if bias is not None:
        bias = bias.expand(*bias.shape[:-2], length, length)
    for number, (start, end) in enumerate(spans_of(prompt_len, length)):
        first = 0 if past is None else start
        given: dict[str, Any] = {
            "places": setup.queries.places[..., first:end],
            "bias": None if bias is None else bias[..., first:end, :end],
            "tap": inside,
        }
        if past is None:
            out = layer(x[:, :end], allowed=setup.allowed, **given)[0][:, start:]
        else:
            allowed = masks.shifted(setup.allowed or masks.causal(), start)
            out, _, past = layer.decode(x[:, start:end], past, allowed=allowed, **given)
        tap(f"step {number}", out, span=(start, end), past=past)


def _gather(whole: dict[str, Tensor], seen: Mapping[str, Tensor], span: tuple[int, int], length: int) -> None:
    """Copies the rows of a step's queries into the whole tensors. Later keys keep their initial value."""
    for site in ("qk", "scores", "pattern", "z", "out"):
        rows = seen[site][..., span[0] - span[1] :, :]
        shape = (*rows.shape[:-2], length, length if site in _ROWS else rows.shape[-1])
        into = whole.setdefault(site, rows.new_full(shape, _ROWS.get(site, 0.0)))
        into[..., slice(*span), : rows.shape[-1]] = rows


def _described(
    setup: Setup, number: int, span: tuple[int, int], *, seen: Mapping[str, Tensor], cache: CacheKind, **found: Any
) -> Step:
    """A step of the trace. `found` are the other fields of its `CacheStep`."""
    (start, end), config, axes, batch = span, setup.config, setup.axes, len(seen["out"])
    cost: dict[str, Any] = {"batch": batch, "n_new": end - start, "length": end, "cache": cache}
    token = 0 if cache == "none" else batch * token_bytes(config)
    tokens = []
    for b, text in enumerate(axes.queries):
        first = axes.first_query(b)
        tokens.append(text.tokens[max(0, start - first) : max(0, end - first)])
    entry = CacheStep(
        start=start,
        tokens=tuple(tokens),
        q_shape=tuple(seen["q"].shape),
        k_shape=tuple(seen["k"].shape),
        v_shape=tuple(seen["v"].shape),
        n_past=start,
        read_bytes=end * token,
        appended_bytes=(end - start) * token,
        moved_bytes=moved_bytes(config, **cost),
        **found,
    )
    new, words = _span(start, end), (" W_oᵀ" + " + b_o" * config.bias) * config.out_proj
    return decode_step(
        number,
        seen["out"],
        n_keys=end,
        axes=("batch", "query", "d_model" if config.out_proj else "head·d_v"),
        formula=f"out = softmax(scale · q[{new}] k[{_span(0, end)}]ᵀ) v[{_span(0, end)}]{words}",
        flops=step_flops(config, **cost),
        cache=entry,
    )


def _span(start: int, end: int) -> str:
    return str(start) if end == start + 1 else f"{start} … {end - 1}"


# --------------------------------------------------------------------------------------------- steps, also for checkpoints


def spans_of(prompt_len: int, length: int) -> list[tuple[int, int]]:
    """The start and end of each step's new tokens: the prompt at once, then token by token."""
    after = [(t, t + 1) for t in range(prompt_len, length)]
    return [(0, prompt_len), *after] if prompt_len else after


def phase_of(number: int, prompt_len: int) -> Literal["prefill", "decode"]:
    """The phase of a step: `prefill` for the prompt, else `decode`."""
    return "prefill" if number == 0 < prompt_len else "decode"


def decode_step(number: int, out: TokenVectors, *, n_keys: int, cache: CacheStep, **described: Any) -> Step:
    """A step of the trace with its output and the size of the `cache`. `described` are further arguments of `step_of`."""
    new = "the prompt at once" if cache.phase == "prefill" else "one new token"
    return step_of(f"step {number}", out, meaning=f"{new} over {n_keys} keys and values", cache=cache, **described)


def largest_of(steps: Sequence[Step]) -> float:
    """The largest difference of a step's output from the full recomputation; infinite if one is not finite."""
    differences = [step.cache.max_abs_difference for step in steps if step.cache is not None]
    return max((math.inf if error is None else error for error in differences), default=0.0)


def weight_bytes(module: nn.Module) -> int:
    """The bytes of a module's weights, which each step reads."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
