"""What the oracle says of a record in JSON, from its settings, its ids and its saved weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support import oracle

FIELDS = """
    entropy entropy_share effective_keys participation distance sink leading diagonal previous
    duplicate induction near at_offset duplicate_where_possible n_duplicate_queries
    induction_where_possible n_induction_queries
""".split()
KEPT = ("x", "q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out")


class Expected(NamedTuple):
    """The tensors of a layer, and which cells are visible, `[batch, head, query, key]`."""

    queries: oracle.Side
    keys: oracle.Side
    x: np.ndarray
    allowed: np.ndarray
    layer: oracle.Layer

    @property
    def marks(self) -> dict[str, np.ndarray]:
        """The cells of the statistics of a head."""
        return oracle.marked(self.queries, self.keys, is_self=self.queries is self.keys)


def weights_of(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, in float64."""
    from safetensors.torch import load_file

    return {name: tensor.double().numpy() for name, tensor in load_file(path).items()}


def expected(
    document: dict[str, Any], weights: dict[str, np.ndarray], bias: Any = None
) -> Expected:
    """The layer of a record. `bias` is the tensor of `--score-bias`; −∞ in it masks. Random rows
    are those of the record.
    """
    config = document["config"]
    queries = oracle.side(document["sequences"], config["padding"])
    keys = (
        queries
        if document["context"] is None
        else oracle.side(document["context"], config["padding"])
    )
    table = weights["embed_positions.weight"] if config["positions"] == "learned" else None
    if config["positions"] == "sinusoidal":
        table = oracle.sinusoidal(max(queries.ids.shape[1], keys.ids.shape[1]), config["d_input"])
    if config["random"]:
        x = np.array(document["x"])
        rows = x
    else:
        x, rows = (
            oracle.embedded(side.ids, weights["embed.weight"], table, side.places)
            for side in (queries, keys)
        )
    rules = {name: config[name] for name in ("causal", "window", "prefix", "sink")}
    shape = (len(x), config["n_heads"], x.shape[1], rows.shape[1])
    allowed = np.broadcast_to(oracle.visible(queries, keys, **rules), shape)
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias, dtype=np.float64), shape)
        allowed, bias = allowed & ~np.isneginf(bias), np.where(np.isneginf(bias), 0.0, bias)
    layer = oracle.layer(
        x,
        weights,
        n_heads=config["n_heads"],
        n_kv_heads=config["n_kv_heads"],
        context=None if keys is queries else rows,
        positions=config["positions"],
        places=queries.places,
        theta=config["rope_theta"],
        bias=bias,
        scale=config["scale"],
        softcap=config["softcap"],
        allowed=allowed,
    )
    return Expected(queries, keys, x, allowed, layer)


def cells(nested: Any) -> np.ndarray:
    """Numbers of a document, with NaN for null."""
    return np.array(nested, dtype=np.float64)


def require_near(computed: Any, right: Any, tolerance: float, name: str = "") -> None:
    """Equal shapes, and numbers that differ by at most `tolerance` of the largest, or of 1."""
    computed, right = cells(computed), np.asarray(right)
    assert computed.shape == right.shape, (name, computed.shape, right.shape)
    assert np.isfinite(computed).all(), name
    worst = np.abs(computed - right).max(initial=0.0) / max(1.0, np.abs(right).max(initial=0.0))
    assert worst <= tolerance, (name, worst)


def require_head(
    head: dict[str, Any], of: Callable[[int | None], dict[str, Any]], tolerance: float
) -> None:
    """The means of a head, or of uniform attention, are those that `of(offset)` gives."""
    right = of(head["offset"])
    for name in FIELDS:
        number, expected_number = head[name], right[name]
        assert (number is None) == (expected_number is None), (name, number, expected_number)
        if number is not None:
            assert abs(number - expected_number) <= tolerance * max(1.0, abs(expected_number)), (
                name,
                number,
                expected_number,
            )
    for name in oracle.QUANTILES:
        assert head[name] == right[name] or tolerance > 1e-6, (name, head[name], right[name])


def require_heads(heads: list[dict[str, Any]], right: Expected, tolerance: float) -> None:
    """Every statistic, type, extreme and sink of every head is that of the pattern."""
    pattern, scores, marks = (
        right.layer.attention.pattern,
        right.layer.attention.scores,
        right.marks,
    )
    for head in heads:
        h = head["head"]
        p, allowed, even = pattern[:, h], right.allowed[:, h], oracle.uniform(right.allowed[:, h])
        require_head(
            head,
            lambda offset, p=p, a=allowed: oracle.head_statistics(p, a, marks, offset),
            tolerance,
        )
        require_head(
            head["uniform"],
            lambda offset, p=even, a=allowed: oracle.head_statistics(p, a, marks, offset),
            tolerance,
        )
        if not allowed.any():
            continue
        kind, certainty = oracle.head_type(head, head["uniform"])
        assert head["kind"] == kind
        assert abs(head["certainty"] - certainty) <= 1e-9
        require_offset(head, p - even, marks["signed"], tolerance)
        require_extremes(head, p, scores[:, h], allowed, right, tolerance)


def require_offset(
    head: dict[str, Any], excess: np.ndarray, signed: np.ndarray, tolerance: float
) -> None:
    """The distance with the largest excess over uniform attention, 0 and −1 left out."""
    n_queries, n_keys = excess.shape[1:]
    offsets = [offset for offset in range(1 - n_queries, n_keys) if offset not in (0, -1)]
    sums = {offset: excess[signed == offset].sum() for offset in offsets}
    largest = max(sums.values(), default=0.0)
    if head["offset"] is None:
        assert largest <= 2e-6 * len(excess) * n_queries
    else:
        assert sums[head["offset"]] >= largest - max(1e-12, tolerance) * len(excess) * n_queries


def require_extremes(
    head: dict[str, Any],
    p: np.ndarray,
    scores: np.ndarray,
    allowed: np.ndarray,
    right: Expected,
    tolerance: float,
) -> None:
    """The largest score, the cells that stand out most, and the sinks. Places count from the first
    token of each text.
    """
    first_q, first_k = (np.argmax(side.real, axis=1) for side in (right.queries, right.keys))
    b, i, j = head["max_score_at"]
    largest = np.where(allowed, scores, -np.inf).max()
    assert abs(head["max_score"] - largest) <= 10 * tolerance * max(1.0, abs(largest))
    assert scores[b, i + first_q[b], j + first_k[b]] >= largest - 10 * tolerance * max(
        1.0, abs(largest)
    )
    counts = allowed.sum(axis=-1, keepdims=True)
    lifts = np.where(counts > 1, p * counts, 0.0)
    strongest = np.sort(lifts[lifts > 0])[::-1][:5]
    assert np.allclose(
        [cell["lift"] for cell in head["largest"]], strongest, rtol=0, atol=100 * tolerance
    )
    for cell in head["largest"]:
        at = (
            cell["sequence"],
            cell["query"] + first_q[cell["sequence"]],
            cell["key"] + first_k[cell["sequence"]],
        )
        assert abs(cell["share"] - p[at]) <= 10 * tolerance
        assert abs(cell["lift"] - lifts[at]) <= 100 * tolerance
    sinks = oracle.sink_keys(p, allowed)
    assert [(s["sequence"], s["key"] + first_k[s["sequence"]]) for s in head["sinks"]] == [
        place[2:] for place in sinks
    ]
    shares = [(s["share"], s["uniform"]) for s in head["sinks"]]
    assert (
        np.allclose(shares, [place[:2] for place in sinks], rtol=0, atol=10 * tolerance)
        or not sinks
    )
