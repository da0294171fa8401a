"""`mha decode`: autoregressive decoding with a KV cache, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mhacli.attention import masks
from mhacli.attention.core import Tap, no_tap
from mhacli.attention.layer import KvCache, TokenVectors
from mhacli.attention.taps import Stopwatch, largest_difference, step_of
from mhacli.io.data import finite
from mhacli.layer.run import Observed, make_record, prepare
from mhacli.layer.setup import Setup
from mhacli.record.checks import SelfCheck
from mhacli.record.record import CacheStep, DecodeSummary, Record, Step
from mhacli.run import Run
from mhacli.sites import CacheKind, moved_bytes, step_flops, token_bytes

_ROWS: Mapping[str, float] = {"qk": 0.0, "scores": -torch.inf, "pattern": 0.0}
"""Sites with one row per query, and the value for keys that a step does not see yet."""


def decode(request: Run, *, cache: CacheKind, prompt_len: int) -> Record:
    """A record whose trace has one entry per step: a prefill of `prompt_len` tokens if any, then one token at a time.

    Its arrays are the steps' results, row by row. Its self-check is the worse of two: of the output against the pattern, and
    of the steps against a full pass, where both sides round. Raises `MhaError` as `inspect` does.
    """
    setup = prepare(request)
    with torch.no_grad():
        decoder = Decoder(setup, setup.rows(setup.queries), cache, prompt_len)
        observed = decoder.observe()
        record = make_record(setup, request, observed, again=decoder.run)
    weights = weight_bytes(setup.layer.attention)
    token, full = (token_bytes(setup.config, n) for n in (setup.config.n_kv_heads, setup.config.n_heads))
    of_steps = SelfCheck.of(largest_of(record.trace), 2 * record.self_check.tolerance)
    return replace(
        record,
        self_check=max(record.self_check, of_steps, key=lambda check: check.severity),
        decoding=DecodeSummary(cache, prompt_len, weights, token, full, weights / (setup.facts.batch * token)),
    )


@dataclass(frozen=True)
class Decoder:
    """The token vectors of a text and a kind of cache, for repeatable runs."""

    setup: Setup
    x: TokenVectors
    cache: CacheKind
    prompt_len: int

    def run(self, tap: Tap, inside: Tap = no_tap) -> None:
        """Runs all steps. The tap receives each output as `step N`, and the tap `inside` the tensors of the layer."""
        batch, length, _ = self.x.shape
        past: KvCache | None = None
        if self.cache != "none":
            past = KvCache.empty(self.setup.layer.attention, batch, room=length if self.cache == "preallocated" else 0)
        for number, span in enumerate(spans_of(self.prompt_len, length)):
            out, past = self._step(*span, past, inside)
            tap(site_of(number), out, span=span, past=past)

    def _step(self, start: int, end: int, past: KvCache | None, tap: Tap) -> tuple[TokenVectors, KvCache | None]:
        """The output of the tokens from `start` to `end`, and the cache after them."""
        layer, places = self.setup.layer.attention, self.setup.queries.places[..., :end]
        if past is None:
            bias = self._bias(0, end)
            out = layer(self.x[:, :end], allowed=self.setup.allowed, bias=bias, places=places, tap=tap)[0]
            return out[:, start:], None
        allowed = masks.shifted(self.setup.allowed or masks.causal(), start)
        bias = self._bias(start, end)
        new, new_places = self.x[:, start:end], places[..., start:]
        out, _, past = layer.decode(new, past, allowed=allowed, bias=bias, places=new_places, tap=tap)
        return out, past

    def _bias(self, start: int, end: int) -> Tensor | None:
        """The part of the score bias for these queries and their keys."""
        if self.setup.bias is None:
            return None
        n, length = self.setup.bias.ndim, self.x.shape[1]
        whole = self.setup.bias.expand(*self.setup.bias.shape[: max(0, n - 2)], length, length)
        return whole[..., start:end, :end]

    def observe(self) -> Observed:
        """Runs all steps once, compares each with a full pass, and assembles their rows into whole tensors."""
        full = self.setup.run()
        whole: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}
        steps: list[Step] = []

        def take(site: str, tensor: Tensor, **where: Any) -> None:
            span, past = where["span"], where["past"]
            seen["out"] = tensor
            self._gather(whole, seen, span)
            whole["v"] = seen["v"] if past is None else past.v
            difference = largest_difference(tensor, full[:, slice(*span)])
            steps.append(self._described(len(steps), span, seen=seen, past=past, difference=difference))

        watch = Stopwatch(self.setup.device, then=take)
        self.run(watch, inside=lambda site, tensor, **_: seen.update({site: tensor}))
        tensors = {site: tensor.cpu() for site, tensor in whole.items()}
        return Observed(tuple(steps), tensors, self.setup.visible().cpu(), watch.seconds)

    def _gather(self, whole: dict[str, Tensor], seen: Mapping[str, Tensor], span: tuple[int, int]) -> None:
        """Copies the rows of a step's queries into the whole tensors. Later keys keep their initial value."""
        n_new, length = span[1] - span[0], self.x.shape[1]
        for site in ("qk", "scores", "pattern", "z", "out"):
            rows = seen[site][..., -n_new:, :]
            shape = (*rows.shape[:-2], length, length if site in _ROWS else rows.shape[-1])
            into = whole.setdefault(site, rows.new_full(shape, _ROWS.get(site, 0.0)))
            into[..., slice(*span), : rows.shape[-1]] = rows

    def _described(
        self, number: int, span: tuple[int, int], *, seen: Mapping[str, Tensor], past: KvCache | None, difference: float
    ) -> Step:
        (start, end), config, axes, batch = span, self.setup.config, self.setup.axes, self.x.shape[0]
        cost: dict[str, Any] = {"batch": batch, "n_new": end - start, "length": end, "cache": self.cache}
        token = 0 if past is None else batch * token_bytes(config)
        new, words = _span(start, end), (" W_oᵀ" + " + b_o" * config.bias) * config.out_proj
        return decode_step(
            number,
            seen["out"],
            n_keys=end,
            axes=("batch", "query", "d_model" if config.out_proj else "head·d_v"),
            formula=f"out = softmax(scale · q[{new}] k[{_span(0, end)}]ᵀ) v[{_span(0, end)}]{words}",
            flops=step_flops(config, **cost),
            cache=CacheStep(
                phase=phase_of(number, self.prompt_len),
                start=start,
                tokens=tuple(
                    text.tokens[max(0, start - axes.first_query(b)) : max(0, end - axes.first_query(b))]
                    for b, text in enumerate(axes.queries)
                ),
                q_shape=tuple(seen["q"].shape),
                k_shape=tuple(seen["k"].shape),
                v_shape=tuple(seen["v"].shape),
                n_past=start,
                read_bytes=end * token,
                appended_bytes=(end - start) * token,
                moved_bytes=moved_bytes(config, **cost),
                cache_bytes=0 if past is None else sum(t.untyped_storage().nbytes() for t in (past.k, past.v)),
                max_abs_difference=finite(difference),
            ),
        )


def _span(start: int, end: int) -> str:
    return str(start) if end == start + 1 else f"{start} … {end - 1}"


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


def weight_bytes(module: nn.Module) -> int:
    """The bytes of a module's weights, which each step reads."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
