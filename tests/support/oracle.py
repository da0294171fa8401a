"""Attention from the formula: Python floats and loops over batch, head, query and key. Shares no code with mhacli."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Turn = Callable[[np.ndarray], np.ndarray]
"""`[batch, head, length, d_head]` to the same, turned by places."""


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
    bias: Any = None,
    allowed: Any = None,
    turn: Turn | None = None,
) -> LayerResult:
    """Multi-head attention of rows `[batch, query, d_input]`, with weights named and laid out as on disk.

    Keys and values come from `context` where there is one. Without `o_proj.weight` the joined heads are the output.
    `turn` turns queries and keys by their places; `q` and `k` of the result are those before it.
    """
    rows = x if context is None else context
    q = cut(linear(x, weights, "q_proj"), n_heads)
    k = cut(linear(rows, weights, "k_proj"), n_kv_heads)
    v = cut(linear(rows, weights, "v_proj"), n_kv_heads)
    q_turned, k_turned = (heads if turn is None else turn(heads) for heads in (q, k))
    result = attention(q_turned, k_turned, v, scale=scale, softcap=softcap, bias=bias, allowed=allowed)
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


def rotated(heads: Any, places: Any, *, theta: float = 10_000.0, interleaved: bool = False) -> np.ndarray:
    """Every pair of columns of `[batch, head, length, d]` turned by `place · theta^(−2j/d)`; `places` `[batch][length]`."""
    heads = np.asarray(heads, dtype=np.float64)
    n_batch, n_heads, length, d = heads.shape
    turned = np.zeros(heads.shape)
    for b in range(n_batch):
        for h in range(n_heads):
            for t in range(length):
                for j in range(d // 2):
                    one, other = (2 * j, 2 * j + 1) if interleaved else (j, j + d // 2)
                    angle = places[b][t] / theta ** (2 * j / d)
                    x, y = float(heads[b, h, t, one]), float(heads[b, h, t, other])
                    turned[b, h, t, one] = x * math.cos(angle) - y * math.sin(angle)
                    turned[b, h, t, other] = y * math.cos(angle) + x * math.sin(angle)
    return turned


def slopes(n_heads: int) -> list[float]:
    """The slopes of ALiBi as its authors published them: a geometric row, and gaps filled from the row twice as long."""
    power = 1
    while power * 2 <= n_heads:
        power *= 2
    if power == n_heads:
        first = 2.0 ** (-8.0 / n_heads)
        return [first**h for h in range(1, n_heads + 1)]
    return slopes(power) + slopes(2 * power)[::2][: n_heads - power]


def distances(n_heads: int, q_places: Any, k_places: Any) -> np.ndarray:
    """What ALiBi adds to each score, `[batch, head, query, key]`; places are `[batch][length]`."""
    rates = slopes(n_heads)
    costs = np.zeros((len(q_places), n_heads, len(q_places[0]), len(k_places[0])))
    for b in range(len(q_places)):
        for h in range(n_heads):
            for i, q_place in enumerate(q_places[b]):
                for j, k_place in enumerate(k_places[b]):
                    costs[b, h, i, j] = -rates[h] * abs(q_place - k_place)
    return costs


def placed(ids: Any, places: Any, embedding: Any, *, positions: str, table: Any = None) -> np.ndarray:
    """One row of the embedding per id, plus the wave or the row of the table of its place; padding (−1) stays zeros."""
    embedding = np.asarray(embedding, dtype=np.float64)
    width = embedding.shape[1]
    if positions == "sinusoidal":
        table = waves(max(max(row) for row in places) + 1, width)
    rows = np.zeros((len(ids), len(ids[0]), width))
    for b, sequence in enumerate(ids):
        for t, token in enumerate(sequence):
            for c in range(width if token >= 0 else 0):
                rows[b, t, c] = float(embedding[token, c])
                if positions in ("sinusoidal", "learned"):
                    rows[b, t, c] += float(table[places[b][t]][c])
    return rows


class VariantResult(NamedTuple):
    """The tensors of a layer of any variant: `q` and `k` as projected, and as they met each other."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_met: np.ndarray
    k_met: np.ndarray
    attention: Attention
    concat: np.ndarray
    out: np.ndarray


def variant(
    x: Any,
    weights: Mapping[str, Any],
    *,
    n_heads: int,
    n_kv_heads: int,
    places: Any,
    positions: str = "none",
    theta: float = 10_000.0,
    context: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    allowed: Any = None,
) -> VariantResult:
    """`layer` with the positions that act inside it, and an additive bias `[batch][head][query][key]`.

    `places` are those of queries and keys, `[batch][length]`: such positions have one text.
    """
    rows = x if context is None else context
    q = cut(linear(x, weights, "q_proj"), n_heads)
    k = cut(linear(rows, weights, "k_proj"), n_kv_heads)
    v = cut(linear(rows, weights, "v_proj"), n_kv_heads)
    q_met, k_met = q, k
    if positions in ("rope", "rope-interleaved"):
        q_met, k_met = (rotated(t, places, theta=theta, interleaved=positions != "rope") for t in (q, k))
    added = None if bias is None else np.array(bias, dtype=np.float64)
    if positions == "alibi":
        costs = distances(n_heads, places, places)
        added = costs if added is None else added + costs
    result = attention(q_met, k_met, v, scale=scale, softcap=softcap, bias=added, allowed=allowed)
    concat = joined(result.z)
    out = linear(concat, weights, "o_proj") if "o_proj.weight" in weights else concat
    return VariantResult(q, k, v, q_met, k_met, result, concat, out)
