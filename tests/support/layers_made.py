"""Hand-made records of checkpoints: layers whose numbers come from plain numpy, so that views are tested without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mhacli.results.record.head_statistics import (
    HEAD_OUTPUTS,
    ROW_SUMS,
    Averages,
    Check,
    Corner,
    HeadsSummary,
    HeadStatistics,
    Kept,
    Sink,
    StrongCell,
)
from mhacli.results.record.record import (
    Environment,
    Generated,
    InspectedLayer,
    Model,
    NonAttentionLayer,
    Record,
    SelfCheck,
    SpanTokens,
    Timing,
)
from mhacli.spec.config import Config
from mhacli.spec.tokens import Piece, TokenSequence

D_HEAD = 5
NOTHING_KEPT = Kept()
KINDS = (
    "mixed", "sink", "uniform", "previous-token", "mixed", "induction", "local", "uniform", "diagonal", "duplicate-token",
    "positional",
)  # fmt: skip
WORDS = ("the", "quick", "brown", "fox", "es", "jump", "ed", "over", "it", ".", "then", "slept", "on")
"""Tokens of which the fifth and the seventh go on with the word before them."""


def text_of(tokens: Sequence[str], *, parts: Sequence[int] = (4, 6)) -> TokenSequence:
    """A sequence between special tokens; those at `parts` (in the given tokens) continue the word before them."""
    shown, pieces, offsets, word, end = ["[CLS]"], [Piece("[CLS]", b"[CLS]".hex(), special=True)], [(0, 0)], -1, 0
    for i, token in enumerate(tokens):
        is_part = i in parts
        word += not is_part
        start = end if is_part or not i else end + 1
        end = start + len(token)
        shown.append(token)
        raw = token.encode("utf-8", "surrogatepass").hex()
        pieces.append(Piece(f"##{token}" if is_part else token, raw, word=word))
        offsets.append((start, end))
    shown.append("[SEP]")
    pieces.append(Piece("[SEP]", b"[SEP]".hex(), special=True))
    offsets.append((0, 0))
    ids = tuple(100 + i for i in range(len(shown)))
    return TokenSequence(" ".join(tokens), tuple(shown), ids, tuple(offsets), pieces=tuple(pieces))


def layered(
    *texts: TokenSequence,
    context: Sequence[TokenSequence] | None = None,
    n_layers: int = 3,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    causal: bool = False,
    windows: Sequence[int | None] = (),
    sinks: bool = False,
    keep: bool = True,
    spans: Sequence[SpanTokens] = (),
    kept: Kept = NOTHING_KEPT,
    generated: Generated | None = None,
    without: Sequence[NonAttentionLayer] = (),
    padding: str = "right",
    seed: int = 0,
) -> Record:
    """A record of layers with random patterns; of a pair where there is a `context`. Kinds of heads come in a fixed order."""
    texts = texts or (text_of(WORDS),)
    numbers = [n for n in range(n_layers + len(without)) if n not in [one.layer for one in without]]
    places = [(n, "self") for n in numbers]
    if context is not None:
        places = [(n, "encoder") for n in numbers] + [(n, kind) for n in numbers for kind in ("decoder", "cross")]
    rng = np.random.default_rng(seed)
    layers, heads, arrays = [], [], {}
    for index, (number, kind) in enumerate(places):
        queries = context if kind == "encoder" else texts
        keys = context if kind in ("encoder", "cross") else texts
        window = windows[index % len(windows)] if windows else None
        is_causal = kind == "decoder" or (causal and kind == "self")
        own = _arrays(
            rng, queries, keys, n_heads, is_causal, window, sinks, spans if keys is texts else (), kept, padding
        )
        name = f"{kind}.{number}.attention"
        layers.append(_layer(number, kind, name, own, n_heads, n_kv_heads or n_heads, is_causal, window, sinks, kept))
        heads += [_head(own, number, name, h, KINDS[(3 * index + h) % len(KINDS)], sinks) for h in range(n_heads)]
        stored = own if keep else {k: a for k, a in own.items() if k not in ("pattern", "allowed", "strongest_key")}
        arrays |= {f"layers.{index}.{key}": array for key, array in stored.items()}
    return Record(
        command=("mha", "run", "--model", "./tiny"),
        config=Config(
            d_model=n_heads * D_HEAD, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=D_HEAD, d_v=D_HEAD, padding=padding,
            device="cpu",
        ).resolved(),
        sequences=tuple(texts),
        context=None if context is None else tuple(context),
        vocabulary=(),
        trace=(),
        heads=tuple(heads),
        timings={"total": Timing(0.219, (0.219,), 0.219, 0.0)},
        self_check=SelfCheck(3e-7, 2e-6, True),
        environment=Environment("0.1.0", "2.6.0", "2.1.0", "3.11.7", "Linux x86_64", "cpu", "a CPU", "auto", 2),
        model=Model(
            path="./tiny", revision=None, family="tinybert", architecture="TinyModel", implementation="sdpa",
            path_inspected="sdpa (unchanged)", identical_outputs=True, compared_len=4096, n_layers=n_layers + len(without),
            n_parameters=22_713_216, n_vocabulary=30_522, positions="learned", max_positions=512, dtype="float32",
            without=tuple(without), generated=generated,
        ),
        layers=tuple(layers),
        spans=tuple(spans),
        arrays=arrays,
    )  # fmt: skip


def _first(own: int, longest: int, padding: str) -> int:
    return longest - own if padding == "left" else 0


def _arrays(rng, queries, keys, n_heads, causal, window, sinks, spans, kept, padding):
    """Patterns of random scores, and what a survey says of them, from the definitions."""
    batch, q_len, k_len = len(queries), *(max(len(t.tokens) for t in f) for f in (queries, keys))
    allowed = np.zeros((batch, 1, q_len, k_len), bool)
    for b in range(batch):
        q0, k0 = (_first(len(f[b].tokens), n, padding) for f, n in ((queries, q_len), (keys, k_len)))
        allowed[b, 0, q0 : q0 + len(queries[b].tokens), k0 : k0 + len(keys[b].tokens)] = True
    i, j = np.indices((q_len, k_len))
    allowed &= (j <= i) if causal else True
    allowed &= (i - j < window) if window is not None else True
    scores = rng.normal(size=(batch, n_heads, q_len, k_len)) * 2
    raised = np.where(allowed, np.exp(scores), 0.0)
    sums = raised.sum(-1, keepdims=True) + (np.exp(0.7) if sinks else 0.0)
    pattern = (raised / np.where(sums > 0, sums, 1.0)).astype(np.float32)
    seen = allowed.any(-1)
    p = pattern.astype(np.float64)
    logs = np.log(np.where(p > 0, p, 1.0))
    lacking = np.where(seen, 1 - p.sum(-1), 0.0) if sinks else np.zeros(p.shape[:3])
    entropy = -(p * logs).sum(-1) - np.where(lacking > 0, lacking * np.log(np.where(lacking > 0, lacking, 1.0)), 0.0)
    uniform = np.where(allowed, 1 / np.maximum(allowed.sum(-1, keepdims=True), 1), 0.0)
    steps, distance = _steps(q_len, k_len), np.abs(i - j)
    sink = np.stack([p[b, ..., _first(len(keys[b].tokens), k_len, padding)] for b in range(batch)])
    found = {
        "pattern": pattern, "allowed": allowed, "strongest_key": np.where(seen, pattern.argmax(-1), -1),
        "entropy": entropy, "participation": 1 / np.maximum((p**2).sum(-1), 1e-9), "distance": (p * distance).sum(-1),
        "sink": sink, "max_score": scores.max(-1), "lse": np.zeros(p.shape[:3]), "received": p.sum(-2), "map": p,
        "profile": _profile(p, distance, steps), "visible": allowed.sum(-1), "uniform_map": uniform,
        "uniform_received": uniform.sum(-2), "uniform_profile": _profile(uniform, distance, steps),
    }  # fmt: skip
    if spans:
        found["span_mass"], found["uniform_span_mass"] = (
            _span_mass(x, spans, queries, q_len, padding) for x in (p, uniform)
        )
    if kept.corner is not None:
        c = kept.corner
        cells = (slice(c.first_query, c.first_query + c.n_queries), slice(c.first_key, c.first_key + c.n_keys))
        found["corner"] = np.where(allowed[:, :, *cells], p[:, :, *cells], np.nan)
    if kept.queries:
        asked = p[:, :, list(kept.queries)]
        found["top_keys"] = np.argsort(-asked, axis=-1)[..., : kept.top]
        found["top_shares"] = np.take_along_axis(asked, found["top_keys"], -1)
    return {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array
        for name, array in found.items()
    }  # fmt: skip


def _steps(q_len: int, k_len: int) -> tuple[int, ...]:
    last = max(q_len, k_len) - 1
    return (0, *(1 << n for n in range(20) if 1 << n < last), last)


def _profile(p, distance, steps):
    total = np.maximum(p.sum((-1, -2)), 1e-9)
    begins = (-1, *steps)
    return np.stack(
        [
            np.where((distance > a) & (distance <= b), p, 0).sum((-1, -2)) / total
            for a, b in zip(begins, steps, strict=False)
        ],
        axis=-1,
    )


def _span_mass(p, spans, queries, length, padding):
    masses = np.full((*p.shape[:2], len(spans), len(spans)), np.nan)
    for b, text in enumerate(queries):
        first = _first(len(text.tokens), length, padding)
        for x, one in enumerate(spans):
            for y, other in enumerate(spans):
                rows, columns = ([first + t for t in span.tokens[b]] for span in (one, other))
                if rows:
                    masses[b, :, x, y] = p[b][:, rows][:, :, columns].sum(-1).mean(-1)
    return masses


def _layer(number, kind, name, own, n_heads, n_kv_heads, causal, window, sinks, kept):
    q_len, k_len = own["pattern"].shape[2:]
    checks = tuple(
        Check(check, (index + 1) * 1e-8 * (number + 1), 2e-6, True)
        for index, check in enumerate((ROW_SUMS, HEAD_OUTPUTS))
    )
    mask = "all keys" if not causal else "causal" if window is None else f"causal, window {window}"
    return InspectedLayer(
        layer=number, name=name, kind=kind, captured_by="registry", kernel="flash", n_heads=n_heads, n_kv_heads=n_kv_heads,
        d_head=D_HEAD, d_v=D_HEAD, scale=1 / math.sqrt(D_HEAD), softcap=None, mask=mask, bias=False, sinks=sinks,
        verified=True, unverified=(), self_check=SelfCheck(checks[-1].error, 2e-6, True),
        survey=HeadsSummary(
            block=1, steps=_steps(q_len, k_len), patterns=(), sink_tokens=4, sink_share=0.1, kernel="flash", checks=checks,
            peak_bytes=0, full_bytes=4 * own["pattern"].size, kept=kept,
        ),
    )  # fmt: skip


def _head(own, number, name, h, kind, sinks):
    """What is said of a head; its certainty differs from head to head."""
    uniform = own["uniform_map"][:, 0].astype(np.float64)
    said = _averages(own["pattern"][:, h].astype(np.float64), own["allowed"][:, 0])
    rows = own["allowed"][:, 0].any(-1)
    learned = float((1 - own["pattern"][:, h].sum(-1))[rows].mean()) if sinks else None
    p = own["pattern"][0, h]
    key = int(p.sum(0).argmax())
    query = int(p[:, key].argmax())
    return HeadStatistics(
        layer=number, attention=name, head=h, kind=kind, certainty=0.99 - 0.011 * h - 0.0317 * number,
        **said, learned_sink=learned, max_score=float(own["max_score"][0, h].max()), max_score_at=(0, query, key),
        sinks=(Sink(0, key, float(p.sum(0)[key] / p.sum()), 0.01),),
        largest=(StrongCell(0, query, key, float(p[query, key]), 3.5),),
        uniform=Averages(**_averages(uniform, own["allowed"][:, 0])),
    )  # fmt: skip


def _averages(p, allowed):
    rows = allowed.any(-1)
    i, j = np.indices(p.shape[1:])
    logs = np.log(np.where(p > 0, p, 1.0))
    entropy = -(p * logs).sum(-1)[rows]
    counts = allowed.sum(-1)[rows]
    many = counts > 1
    masses = {"sink": j == 0, "leading": j < 4, "diagonal": i == j, "previous": j == i - 1, "near": abs(i - j) <= 8}
    return {
        "entropy": float(entropy.mean()), "entropy_share": float((entropy[many] / np.log(counts[many])).mean()),
        "effective_keys": float(np.exp(entropy).mean()), "participation": 3.25, "duplicate": 0.125, "induction": 0.0625,
        "distance": float((p * abs(i - j)).sum(-1)[rows].mean()), "window_50": 2, "window_90": 5, "window_99": 9,
        **{name: float((p * where).sum(-1)[rows].mean()) for name, where in masses.items()},
    }  # fmt: skip


def corner(n_queries: int = 2, n_keys: int = 3) -> Kept:
    """Two queries' keys, and a part of the pattern."""
    return Kept((3, 1), 2, Corner(1, n_queries, 0, n_keys))


def spoiled(record: Record, index: int, *reasons: str) -> Record:
    """The record with a layer that is not verified: its last check fails, and for other reasons."""
    layer = record.layers[index]
    last = replace(layer.survey.checks[-1], error=0.125, ok=False)
    survey = replace(layer.survey, checks=(*layer.survey.checks[:-1], last))
    said = (f"the check '{last.name}' differs by 0.125", *reasons)
    bad = replace(layer, verified=False, unverified=said, self_check=SelfCheck(0.125, 2e-6, False), survey=survey)
    layers = (*record.layers[:index], bad, *record.layers[index + 1 :])
    return replace(record, layers=layers, self_check=SelfCheck(0.125, 2e-6, False))
