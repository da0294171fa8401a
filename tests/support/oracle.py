"""Attention from the formula, in numpy float64. It shares no code with mhacli.

Axes are `[batch, head, query, key]`; `allowed` is True where a query may attend to a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# ---------------------------------------------------------------------------------------- attention


class Attention(NamedTuple):
    """Every matrix on the way, `[batch, head, query, key]`, and the result `[batch, head, query,
    d_v]`.
    """

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
    sinks: Any = None,
) -> Attention:
    """`softmax(softcap(scale · q kᵀ) + bias) v`, masked. A query without an allowed key gets zeros.

    Query head `h` reads key head `h // (heads / key heads)`. `sinks` are the learned logits of the
    heads, `[head]`.
    """
    q, k, v = (np.asarray(array, dtype=np.float64) for array in (q, k, v))
    k, v = (np.repeat(array, q.shape[1] // array.shape[1], axis=1) for array in (k, v))
    qk = q @ k.swapaxes(-1, -2)
    scores = qk * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + np.asarray(bias, dtype=np.float64)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    pattern = softmax(scores, sinks)
    return Attention(qk, scores, pattern, pattern @ v)


def softmax(scores: Any, sinks: Any = None) -> np.ndarray:
    """Weights of each row, which sum to 1, or to less with a sink; zeros where no score is above
    −∞.
    """
    scores = np.asarray(scores, dtype=np.float64)
    largest = scores.max(axis=-1, keepdims=True)
    sink = -np.inf if sinks is None else np.asarray(sinks, dtype=np.float64)[:, None, None]
    largest = np.maximum(largest, sink)
    largest = np.where(np.isneginf(largest), 0.0, largest)
    powers = np.exp(scores - largest)
    total = powers.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
    return powers / np.where(total == 0, 1.0, total)


# ---------------------------------------------------------------------------------------- the layer


def linear(rows: Any, weights: Mapping[str, Any], name: str) -> np.ndarray:
    """`rows · weightᵀ + bias`. Weights are named as on disk and have one row per output."""
    out = (
        np.asarray(rows, dtype=np.float64)
        @ np.asarray(weights[f"{name}.weight"], dtype=np.float64).T
    )
    return out + np.asarray(weights.get(f"{name}.bias", 0.0), dtype=np.float64)


def split_heads(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Columns `h·d … (h+1)·d` of every row are head `h`: `[batch, head, length, d]`."""
    return rows.reshape(*rows.shape[:2], n_heads, -1).transpose(0, 2, 1, 3)


def merge_heads(z: np.ndarray) -> np.ndarray:
    """The heads side by side: `[batch, query, head·d_v]`."""
    return z.transpose(0, 2, 1, 3).reshape(z.shape[0], z.shape[2], -1)


class Layer(NamedTuple):
    """The tensors of a layer. `q_turned` and `k_turned` are queries and keys as they meet each
    other.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_turned: np.ndarray
    k_turned: np.ndarray
    attention: Attention
    concat: np.ndarray
    out: np.ndarray


def layer(
    x: Any,
    weights: Mapping[str, Any],
    *,
    n_heads: int,
    n_kv_heads: int | None = None,
    context: Any = None,
    positions: str = "none",
    places: Any = None,
    theta: float = 10_000.0,
    bias: Any = None,
    **scores: Any,
) -> Layer:
    """Multi-head attention of rows `[batch, query, d_input]`. Keys and values come from `context`
    where there is one.

    `positions` of rope, rope-interleaved or alibi act here, at `places` `[batch, length]`. Without
    `o_proj.weight` the merged heads are the output. `scores` are `scale`, `softcap`, `allowed` and
    `sinks` of `attention`.
    """
    x = np.asarray(x, dtype=np.float64)
    rows = x if context is None else np.asarray(context, dtype=np.float64)
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    places = (
        np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
        if places is None
        else np.asarray(places)
    )
    q = split_heads(linear(x, weights, "q_proj"), n_heads)
    k, v = (split_heads(linear(rows, weights, name), n_kv_heads) for name in ("k_proj", "v_proj"))
    q_turned, k_turned = q, k
    if positions.startswith("rope"):
        interleaved = positions == "rope-interleaved"
        q_turned, k_turned = (
            rotated(heads, places, theta=theta, interleaved=interleaved) for heads in (q, k)
        )
    if positions == "alibi":
        bias = alibi(n_heads, places, places) + (0.0 if bias is None else bias)
    result = attention(q_turned, k_turned, v, bias=bias, **scores)
    concat = merge_heads(result.z)
    out = linear(concat, weights, "o_proj") if "o_proj.weight" in weights else concat
    return Layer(q, k, v, q_turned, k_turned, result, concat, out)


# ---------------------------------------------------------------------------------------- positions


def sinusoidal(length: int, d_model: int) -> np.ndarray:
    """Sine in even columns, cosine of the same angle in the odd column that follows: `[length,
    d_model]`.
    """
    column = np.arange(d_model)
    angles = np.arange(length)[:, None] / 10_000 ** (column // 2 * 2 / d_model)
    return np.where(column % 2 == 0, np.sin(angles), np.cos(angles))


def embedded(ids: Any, embedding: Any, table: Any = None, places: Any = None) -> np.ndarray:
    """One row of the embedding per id, plus the row of `table` at its place. Padding (id −1) stays
    zeros.
    """
    ids = np.asarray(ids)
    rows = np.asarray(embedding, dtype=np.float64)[ids]
    if table is not None:
        rows = (
            rows
            + np.asarray(table, dtype=np.float64)[
                np.arange(ids.shape[1]) if places is None else places
            ]
        )
    return np.where(ids[..., None] >= 0, rows, 0.0)


def rotated(
    heads: Any, places: Any, *, theta: float = 10_000.0, interleaved: bool = False
) -> np.ndarray:
    """Every pair of columns of `[batch, head, length, d]` turned by the angle `place ·
    theta^(−2j/d)`.

    Pair `j` is columns `j` and `j + d/2`, or with `interleaved` `2j` and `2j + 1`. `places` is
    `[batch, length]`.
    """
    heads = np.asarray(heads, dtype=np.float64)
    d = heads.shape[-1]
    angles = np.asarray(places)[:, None, :, None] / theta ** (np.arange(0, d, 2) / d)
    first, second = (
        (slice(0, d, 2), slice(1, d, 2)) if interleaved else (slice(0, d // 2), slice(d // 2, d))
    )
    turned = np.empty_like(heads)
    turned[..., first] = heads[..., first] * np.cos(angles) - heads[..., second] * np.sin(angles)
    turned[..., second] = heads[..., second] * np.cos(angles) + heads[..., first] * np.sin(angles)
    return turned


def slopes(n_heads: int) -> list[float]:
    """The slopes of ALiBi as its authors published them: a geometric row, and gaps filled from the
    row twice as long.
    """
    power = 1 << (n_heads.bit_length() - 1)
    row = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    return row if power == n_heads else row + slopes(2 * power)[::2][: n_heads - power]


def alibi(n_heads: int, q_places: Any, k_places: Any) -> np.ndarray:
    """What ALiBi adds to each score, `[batch, head, query, key]`. Places are `[batch, length]`."""
    distance = np.abs(
        np.asarray(q_places)[:, None, :, None] - np.asarray(k_places)[:, None, None, :]
    )
    return -np.asarray(slopes(n_heads))[:, None, None] * distance


# --------------------------------------------------------------------------- tokens and their masks


class Side(NamedTuple):
    """The tokens of queries or keys, `[batch, length]`: ids with −1 for padding, the document of
    each token, and its place in that document.
    """

    ids: np.ndarray
    documents: np.ndarray
    places: np.ndarray

    @property
    def real(self) -> np.ndarray:
        """True for what is no padding."""
        return self.ids >= 0


def side(sequences: Sequence[Mapping[str, Any]], padding: str = "right") -> Side:
    """The rows of the `sequences` of a record in JSON, padded to the longest."""
    longest = max(len(s["ids"]) for s in sequences)
    rows = []
    for s in sequences:
        n = len(s["ids"])
        documents = s.get("documents") or [0] * n
        places = [documents[:t].count(documents[t]) for t in range(n)]
        around = ((longest - n, 0) if padding == "left" else (0, longest - n),)
        columns = ((s["ids"], -1), (documents, -1), (places, 0))
        rows.append([np.pad(list(row), around[0], constant_values=fill) for row, fill in columns])
    return Side(*(np.array(column) for column in zip(*rows, strict=True)))


def visible(
    queries: Side,
    keys: Side,
    *,
    causal: bool = False,
    window: Any = None,
    prefix: int | None = None,
    sink: int | None = None,
) -> np.ndarray:
    """The mask `[batch, 1, query, key]` that the options of these names mean: True where a query
    may attend to a key.
    """
    i, j, place = (
        np.arange(queries.ids.shape[1])[:, None],
        np.arange(keys.ids.shape[1]),
        keys.places[:, None, :],
    )
    cells = np.ones((len(keys.ids), len(i), len(j)), dtype=bool)
    if window is not None:
        cells &= ((j >= i - window[0]) & (j <= i + window[1])) | (place < (sink or 0))
    if causal or prefix:
        cells &= j <= i
    cells |= place < (prefix or 0)
    cells &= queries.documents[:, :, None] == keys.documents[:, None, :]
    return (cells & queries.real[:, :, None] & keys.real[:, None, :])[:, None]


# ----------------------------------------------------------------------------- statistics of a head

TYPES = {
    "sink": "sink",
    "previous": "previous-token",
    "diagonal": "diagonal",
    "induction": "induction",
    "duplicate": "duplicate-token",
    "at_offset": "positional",
}
MEANS = ("entropy", "entropy_share", "effective_keys", "participation", "distance")
COPIES = ("duplicate", "induction")
QUANTILES = {"window_50": 0.5, "window_90": 0.9, "window_99": 0.99}


def uniform(allowed: np.ndarray) -> np.ndarray:
    """The same weight for every visible key."""
    return allowed / np.maximum(allowed.sum(axis=-1, keepdims=True), 1)


def entropy(pattern: np.ndarray) -> np.ndarray:
    """Of each row, in nats."""
    return -(pattern * np.log(np.where(pattern > 0, pattern, 1.0))).sum(axis=-1)


def marked(queries: Side, keys: Side, *, is_self: bool = True) -> dict[str, np.ndarray]:
    """The cells `[batch, query, key]` whose weights each of these statistics adds up, and the
    `signed` distance of each cell: columns of one text are those of its tokens, of two texts each
    is counted from its own first token.
    """
    first_q, first_k = (
        0 if is_self else np.argmax(side.real, axis=1)[:, None, None] for side in (queries, keys)
    )
    signed = (np.arange(keys.ids.shape[1]) - first_k) - (
        np.arange(queries.ids.shape[1])[:, None] - first_q
    )
    token = np.where(queries.real, queries.ids, -2)[:, :, None]
    before = np.where(keys.real & (keys.places > 0), np.roll(keys.ids, 1, axis=1), -1)
    marks = {
        "sink": (keys.places == 0)[:, None, :],
        "leading": (keys.places < 4)[:, None, :],
        "diagonal": signed == 0,
        "previous": signed == -1,
        "duplicate": (keys.ids[:, None, :] == token) & ~(is_self & (signed == 0)),
        "induction": (before[:, None, :] == token) & ~(is_self & (signed == 1)),
        "near": abs(signed) <= 8,
        "signed": signed,
    }
    shape = (len(keys.ids), *signed.shape[-2:])
    return {name: np.broadcast_to(cells, shape) for name, cells in marks.items()}


def head_statistics(
    pattern: np.ndarray,
    allowed: np.ndarray,
    marks: Mapping[str, np.ndarray],
    offset: int | None = None,
    *,
    has_sink: bool = False,
) -> dict[str, float | None]:
    """The means over all queries with a key of one head, `[batch, query, key]`, by their names in
    JSON.

    `at_offset` is the weight at the distance `offset`. The windows forgive rounding of a
    millionth. A learned sink gets what is left of each row, as one more key;
    the distance is a mean over what the other keys get.
    """
    seen, signed = allowed.any(axis=-1), marks["signed"]
    marks = {name: cells for name, cells in marks.items() if name != "signed"}
    if not seen.any():
        possible = dict.fromkeys(f"{name}_where_possible" for name in COPIES)
        counts = dict.fromkeys((f"n_{name}_queries" for name in COPIES), 0)
        return dict.fromkeys((*MEANS, *QUANTILES, *marks, "at_offset")) | possible | counts
    p, far, counts = pattern[seen], abs(signed[seen]), allowed[seen].sum(axis=-1) + has_sink
    rows = np.column_stack([p, 1 - p.sum(axis=-1)]) if has_sink else p
    h, choice = entropy(rows), counts > 1
    distances = (p * far).sum(axis=-1) / (p.sum(axis=-1) if has_sink else 1)
    mass = {
        name: float(np.where(cells[seen], p, 0.0).sum(axis=-1).mean())
        for name, cells in marks.items()
    }
    within = np.bincount(far.ravel(), p.ravel()).cumsum()
    means = (
        h.mean(),
        (h[choice] / np.log(counts[choice])).mean() if choice.any() else None,
        np.exp(h).mean(),
        (1 / (rows**2).sum(axis=-1)).mean(),
        distances.mean(),
    )
    return {
        **{
            name: None if mean is None else float(mean)
            for name, mean in zip(MEANS, means, strict=True)
        },
        **{
            name: int(np.argmax(within >= (part - 1e-6) * within[-1]))
            for name, part in QUANTILES.items()
        },
        **mass,
        **_where_possible(p, allowed[seen], {name: marks[name][seen] for name in COPIES}),
        "at_offset": None if offset is None else float(pattern[signed == offset].sum() / len(p)),
    }


def _where_possible(
    p: np.ndarray, allowed: np.ndarray, marks: Mapping[str, np.ndarray]
) -> dict[str, float | None]:
    """The means over the queries that see a marked key, and how many these are."""
    means: dict[str, float | None] = {}
    for name, cells in marks.items():
        rows = (cells & allowed).any(axis=-1)
        weight = np.where(cells, p, 0.0).sum(axis=-1)[rows]
        means |= {
            f"{name}_where_possible": float(weight.mean()) if rows.any() else None,
            f"n_{name}_queries": int(rows.sum()),
        }
    return means


def head_type(means: Mapping[str, Any], uniformly: Mapping[str, Any]) -> tuple[str, float]:
    """The type of a head and its certainty: the excess `(w − u) / (1 − u)` of its weights over
    uniform attention; of copies over the queries that see any, if these are at least 4, and no
    distance that the head keeps explains them.
    """

    def excess(name: str) -> float:
        if means.get(f"n_{name}_queries", 0) >= 4 and TYPES[name] not in means.get(
            "positional", ()
        ):
            name = f"{name}_where_possible"
        weight, even = means.get(name), uniformly.get(name)
        return (
            0.0
            if weight is None or even is None or even > 1 - 1e-6
            else (weight - even) / (1 - even)
        )

    names = [name for name in TYPES if name != "at_offset" or means.get("also_at") is None]
    largest = max(names, key=excess)
    if excess(largest) >= 0.4:
        return TYPES[largest], excess(largest)
    if excess("near") >= 0.4:
        return "local", excess("near")
    if (means["entropy_share"] or 0) >= 0.9:
        return "uniform", means["entropy_share"]
    return "mixed", 1 - max(0.0, excess(largest), excess("near"))


def sink_keys(
    pattern: np.ndarray, allowed: np.ndarray, least: float = 0.1
) -> list[tuple[float, float, int, int]]:
    """`(weight, uniform weight, sequence, key)` of the sinks of one head, as fractions of all
    attention of the sequence.

    A sink gets the fraction `least` and three times its uniform fraction, and three times the
    uniform weight from more than half of the 8 or more queries that see it.
    """
    even, total = uniform(allowed), np.maximum(allowed.any(axis=-1).sum(axis=-1), 1)[:, None]
    weight, fair, n_queries = (
        pattern.sum(axis=1) / total,
        even.sum(axis=1) / total,
        allowed.sum(axis=1),
    )
    often = ((pattern >= 3 * even) & allowed).sum(axis=1)
    is_sink = (n_queries >= 8) & (weight >= least) & (weight >= 3 * fair) & (2 * often > n_queries)
    return sorted(
        ((weight[b, j], fair[b, j], b, j) for b, j in np.argwhere(is_sink).tolist()), reverse=True
    )[:8]
