"""Attention from the formula: Python floats and loops over batch, head, query and key. Shares no code with mhacli."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Attention(NamedTuple):
    """Every matrix on the way, `[batch, head, query, key]`, and the result `[batch, head, query, d_v]`, in float64."""

    qk: np.ndarray
    scores: np.ndarray
    pattern: np.ndarray
    z: np.ndarray


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    allowed: Any = None,
) -> Attention:
    """`softmax(scale · q kᵀ) v`. `bias` and `allowed` (True = may attend) have all four axes `[batch, head, query, key]`.

    `q` `[batch, head, query, d_head]`, `k` and `v` `[batch, kv_head, key, …]`. A row without an allowed key is zeros.
    """
    q, k, v = (np.asarray(array, dtype=np.float64) for array in (q, k, v))
    (n_batch, n_heads, n_queries, d_head), (_, n_kv_heads, n_keys, _), d_v = q.shape, k.shape, v.shape[3]
    kv_head_of = [kv_head for kv_head in range(n_kv_heads) for _ in range(n_heads // n_kv_heads)]
    factor = 1 / math.sqrt(d_head) if scale is None else scale
    qk, scores, pattern = (np.zeros((n_batch, n_heads, n_queries, n_keys)) for _ in range(3))
    z = np.zeros((n_batch, n_heads, n_queries, d_v))
    for b in range(n_batch):
        for h in range(n_heads):
            for i in range(n_queries):
                for j in range(n_keys):
                    qk[b, h, i, j] = dot(q[b, h, i], k[b, kv_head_of[h], j])
                    score = float(qk[b, h, i, j]) * factor
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if bias is not None:
                        score += float(bias[b][h][i][j])
                    if allowed is not None and not allowed[b][h][i][j]:
                        score = -math.inf
                    scores[b, h, i, j] = score
                pattern[b, h, i] = softmax([float(score) for score in scores[b, h, i]])
                for c in range(d_v):
                    shares = [float(share) for share in pattern[b, h, i]]
                    z[b, h, i, c] = sum(
                        shares[j] * float(v[b, kv_head_of[h], j, c]) for j in range(n_keys) if shares[j] != 0
                    )
    return Attention(qk, scores, pattern, z)


def softmax(scores: list[float]) -> list[float]:
    """Shares that sum to 1; zeros where no score is above −∞."""
    largest = max(scores)
    if largest == -math.inf:
        return [0.0] * len(scores)
    powers = [math.exp(score - largest) for score in scores]
    return [power / sum(powers) for power in powers]


def dot(a: Any, b: Any) -> float:
    """The sum of the products of two rows."""
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def linear(rows: Any, weights: Mapping[str, Any], name: str) -> np.ndarray:
    """`rows[b, t] · weight[o] + bias[o]` for every output `o`: weights lie as on disk, one row per output."""
    rows, weight, bias = np.asarray(rows), weights[f"{name}.weight"], weights.get(f"{name}.bias")
    out = np.zeros((*rows.shape[:2], len(weight)))
    for b in range(rows.shape[0]):
        for t in range(rows.shape[1]):
            for o in range(len(weight)):
                out[b, t, o] = dot(rows[b, t], weight[o]) + (0.0 if bias is None else float(bias[o]))
    return out


def cut(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Columns `h·d … (h+1)·d` of every row become head `h`: `[batch, head, length, d]`."""
    n_batch, length, width = rows.shape
    d = width // n_heads
    heads = np.zeros((n_batch, n_heads, length, d))
    for b in range(n_batch):
        for h in range(n_heads):
            for t in range(length):
                for c in range(d):
                    heads[b, h, t, c] = rows[b, t, h * d + c]
    return heads


def joined(z: np.ndarray) -> np.ndarray:
    """The heads side by side: `[batch, query, head·d_v]`."""
    n_batch, n_heads, length, d = z.shape
    rows = np.zeros((n_batch, length, n_heads * d))
    for b in range(n_batch):
        for h in range(n_heads):
            for t in range(length):
                for c in range(d):
                    rows[b, t, h * d + c] = z[b, h, t, c]
    return rows


class LayerResult(NamedTuple):
    """The layer's tensors by the names of the house."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    attention: Attention
    concat: np.ndarray
    out: np.ndarray


def layer(
    x: Any,
    weights: Mapping[str, Any],
    *,
    n_heads: int,
    n_kv_heads: int,
    context: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    allowed: Any = None,
) -> LayerResult:
    """Multi-head attention of rows `[batch, query, d_model]`, with weights named and laid out as on disk.

    Keys and values come from `context` where there is one. Without `o_proj.weight` the joined heads are the output.
    """
    rows = x if context is None else context
    q = cut(linear(x, weights, "q_proj"), n_heads)
    k = cut(linear(rows, weights, "k_proj"), n_kv_heads)
    v = cut(linear(rows, weights, "v_proj"), n_kv_heads)
    result = attention(q, k, v, scale=scale, softcap=softcap, allowed=allowed)
    concat = joined(result.z)
    out = linear(concat, weights, "o_proj") if "o_proj.weight" in weights else concat
    return LayerResult(q, k, v, result, concat, out)


def waves(length: int, d_model: int) -> np.ndarray:
    """Sinusoidal positions: sine in even columns, cosine of the same angle in the odd one that follows."""
    table = np.zeros((length, d_model))
    for i in range(length):
        for j in range((d_model + 1) // 2):
            angle = i / 10000 ** (2 * j / d_model)
            table[i, 2 * j] = math.sin(angle)
            if 2 * j + 1 < d_model:
                table[i, 2 * j + 1] = math.cos(angle)
    return table


def embed(ids: list[list[int]], embedding: Any, *, sinusoidal: bool) -> np.ndarray:
    """One row of the embedding per id, plus its position; ids of −1 are padding and stay zeros."""
    embedding = np.asarray(embedding, dtype=np.float64)
    d_model = embedding.shape[1]
    rows = np.zeros((len(ids), len(ids[0]), d_model))
    table = waves(len(ids[0]), d_model) if sinusoidal else np.zeros((len(ids[0]), d_model))
    for b, sequence in enumerate(ids):
        for t, token in enumerate(sequence):
            for c in range(d_model):
                rows[b, t, c] = embedding[token, c] + table[t, c] if token >= 0 else 0.0
    return rows


def full(rule: Any, n_batch: int, n_heads: int, n_queries: int, n_keys: int) -> np.ndarray:
    """`rule(b, i, j)` written out for every cell of `[batch, head, query, key]`."""
    cells = np.zeros((n_batch, n_heads, n_queries, n_keys), dtype=bool)
    for b in range(n_batch):
        for h in range(n_heads):
            for i in range(n_queries):
                for j in range(n_keys):
                    cells[b, h, i, j] = bool(rule(b, i, j))
    return cells
