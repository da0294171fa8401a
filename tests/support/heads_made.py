"""Statistics of heads from their definitions, in loops over plain numpy: what `mha heads` must find, without mhacli."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def surveyed(*texts: str, context: Sequence[str] = (), wanted: Any = None, **choices: Any) -> Any:
    """A real record of heads of these texts."""
    from mhacli.compute.heads import prepare_heads
    from mhacli.requests.layer import layer_request
    from mhacli.results.record.head_statistics import HeadsRequest
    from mhacli.spec.config import Config
    from mhacli.text.encode import encode

    config = Config(**{"device": "cpu", "init": "uniform", "threads": 1, **choices}).resolved()
    request = layer_request(encode(texts, config, context=context), config)
    run = prepare_heads(request, wanted or HeadsRequest(command=("mha", "heads")))
    run.run()
    return run.record()


WINDOWS = {"window_50": 0.5, "window_90": 0.9, "window_99": 0.99}
SCALARS = (
    "entropy", "entropy_share", "effective_keys", "participation", "distance", "sink", "leading", "diagonal", "previous",
    "duplicate", "induction", "near", "at_offset",
)  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """The rows of queries and keys: where each text begins on its axis, its ids, and each token's place in its document."""

    q_ids: Sequence[Sequence[int]]
    k_ids: Sequence[Sequence[int]]
    k_places: Sequence[Sequence[int]]
    q_first: Sequence[int]
    k_first: Sequence[int]
    is_self: bool
    sink_tokens: int = 4

    @staticmethod
    def of(record: Any, sink_tokens: int = 4) -> Texts:
        """Those of a record, with the columns counted here."""
        left = record.config.padding == "left"

        def firsts(family: Any) -> list[int]:
            longest = max(len(s.ids) for s in family)
            return [longest - len(s.ids) if left else 0 for s in family]

        def places(s: Any) -> list[int]:
            own = s.documents or (0,) * len(s.ids)
            return [sum(own[u] == own[t] for u in range(t)) for t in range(len(own))]

        queries, keys = record.sequences, record.sequences if record.context is None else record.context
        return Texts(
            [list(s.ids) for s in queries], [list(s.ids) for s in keys], [places(s) for s in keys], firsts(queries),
            firsts(keys), record.context is None, sink_tokens,
        )  # fmt: skip

    def key_id(self, b: int, j: int) -> int | None:
        """The token in a column of the keys; None for padding."""
        at = j - self.k_first[b]
        return self.k_ids[b][at] if 0 <= at < len(self.k_ids[b]) else None

    def query_id(self, b: int, i: int) -> int | None:
        """The token in a column of the queries."""
        at = i - self.q_first[b]
        return self.q_ids[b][at] if 0 <= at < len(self.q_ids[b]) else None

    def place(self, b: int, j: int) -> int | None:
        """The place of a key in its document."""
        at = j - self.k_first[b]
        return self.k_places[b][at] if 0 <= at < len(self.k_ids[b]) else None

    def is_duplicate(self, b: int, i: int, j: int) -> bool:
        """Whether a key is the query's token, elsewhere."""
        same = self.key_id(b, j) == self.query_id(b, i) and self.query_id(b, i) is not None
        return same and not (self.is_self and i == j)

    def is_induction(self, b: int, i: int, j: int) -> bool:
        """Whether the token before a key, in its document, is the query's, elsewhere."""
        place = self.place(b, j)
        if not place or self.query_id(b, i) is None:
            return False
        return self.key_id(b, j - 1) == self.query_id(b, i) and not (self.is_self and i == j - 1)


def row_numbers(pattern: np.ndarray, allowed: np.ndarray, texts: Texts) -> dict[str, np.ndarray]:
    """Per query: the vectors that a record holds, NaN where no key is allowed."""
    shape = pattern.shape[:3]
    rows = {name: np.full(shape, np.nan) for name in ("entropy", "participation", "distance", "sink", "visible")}
    for b, h, i in np.ndindex(*shape):
        keys = [j for j in range(pattern.shape[3]) if allowed[b, h, i, j]]
        rows["visible"][b, h, i] = len(keys)
        if keys:
            p = {j: float(pattern[b, h, i, j]) for j in keys}
            rows["entropy"][b, h, i] = -sum(x * math.log(x) for x in p.values() if x > 0)
            rows["participation"][b, h, i] = 1 / sum(x * x for x in p.values())
            rows["distance"][b, h, i] = sum(x * abs(i - j) for j, x in p.items())
            rows["sink"][b, h, i] = sum(x for j, x in p.items() if texts.place(b, j) == 0)
    return rows


def means(
    pattern: np.ndarray,
    allowed: np.ndarray,
    texts: Texts,
    offset: int | None,
    conditions: Sequence[Callable[..., bool]] = (),
) -> dict[str, Any]:
    """Every mean of one head, `[batch, query, key]`; `conditions` are asked `(b, i, j)` in columns."""
    queries = [(b, i) for b in range(pattern.shape[0]) for i in range(pattern.shape[1]) if allowed[b, i].any()]
    if not queries:
        return dict.fromkeys((*SCALARS, *WINDOWS)) | {"patterns": (None,) * len(conditions)}
    n = len(queries)
    rows = row_numbers(pattern[:, None], allowed[:, None], texts)
    own = {name: [row[b, 0, i] for b, i in queries] for name, row in rows.items()}
    choices = [e / math.log(v) for e, v in zip(own["entropy"], own["visible"], strict=True) if v > 1]
    cells = [(b, i, j, float(pattern[b, i, j])) for b, i in queries for j in np.flatnonzero(allowed[b, i]).tolist()]

    def mass(holds: Callable[[int, int, int], Any]) -> float:
        return sum(p for b, i, j, p in cells if holds(b, i, j)) / n

    found: dict[str, Any] = {
        "entropy": sum(own["entropy"]) / n,
        "entropy_share": sum(choices) / len(choices) if choices else None,
        "effective_keys": sum(map(math.exp, own["entropy"])) / n,
        "participation": sum(own["participation"]) / n,
        "distance": sum(own["distance"]) / n,
        "sink": mass(lambda b, i, j: texts.place(b, j) == 0),
        "leading": mass(lambda b, i, j: texts.place(b, j) < texts.sink_tokens),
        "diagonal": mass(lambda b, i, j: i == j),
        "previous": mass(lambda b, i, j: j == i - 1),
        "duplicate": mass(texts.is_duplicate),
        "induction": mass(texts.is_induction),
        "near": mass(lambda b, i, j: abs(i - j) <= 8),
        "at_offset": None if offset is None else mass(lambda b, i, j: j - i == offset),
        "patterns": tuple(map(mass, conditions)),
    }
    for name, share in WINDOWS.items():
        found[name] = next(
            d
            for d in range(sum(pattern.shape[1:]))
            if mass(lambda b, i, j, d=d: abs(i - j) <= d) >= (share - 2e-6) * mass(lambda *_: True)
        )
    return found


def uniform_of(allowed: np.ndarray) -> np.ndarray:
    """The same share for every visible key; zeros in rows without one."""
    counts = allowed.sum(axis=-1, keepdims=True)
    return np.where(allowed, 1 / np.maximum(counts, 1), 0.0)


def excess_at(pattern: np.ndarray, allowed: np.ndarray) -> dict[int, float]:
    """For one head `[batch, query, key]` the mass beyond the uniform share at each distance key − query but 0 and −1."""
    beyond = (pattern - uniform_of(allowed)) * allowed
    _, n_queries, n_keys = pattern.shape
    offsets = [offset for offset in range(1 - n_queries, n_keys) if offset not in (0, -1)]
    return {offset: float(np.trace(beyond, offset, axis1=1, axis2=2).sum()) for offset in offsets}


def require_means(found: Any, expected: Mapping[str, Any], tolerance: float) -> None:
    """Every mean of a head, or of its uniform, is what the definitions say."""
    for name in SCALARS:
        value, wanted = getattr(found, name), expected[name]
        assert (value is None) == (wanted is None), name
        if wanted is not None:
            assert abs(value - wanted) <= tolerance * max(1.0, abs(wanted)), (name, value, wanted)
    for name in WINDOWS:
        assert getattr(found, name) == expected[name], name
    assert len(found.patterns) == len(expected["patterns"])
    for value, wanted in zip(found.patterns, expected["patterns"], strict=True):
        assert (value is None) == (wanted is None)
        assert wanted is None or abs(value - wanted) <= tolerance


def largest_cells(pattern: np.ndarray, allowed: np.ndarray, most: int = 5) -> list[tuple[float, float, int, int, int]]:
    """The cells of one head with the greatest lift, `(lift, share, b, i, j)`, where the query has a choice."""
    counts = allowed.sum(axis=-1)
    cells = [
        (float(pattern[b, i, j] * counts[b, i]), float(pattern[b, i, j]), b, i, j)
        for b, i, j in np.ndindex(*pattern.shape)
        if counts[b, i] > 1 and pattern[b, i, j] > 0
    ]
    return sorted(cells, reverse=True)[:most]


def sinks_of(
    pattern: np.ndarray, allowed: np.ndarray, least: float, most: int = 8
) -> list[tuple[float, int, int, float, int]]:
    """The sinks of one head, `(share, b, j, often, n)`: keys with the share `least` of all attention of their sequence and three
    times as much as uniformly, of whose n >= 8 queries more than a half give them three times their uniform share."""
    found = []
    for b in range(len(pattern)):
        visible = [sum(bool(cell) for cell in row) for row in allowed[b]]
        for j in range(pattern.shape[2]):
            rows = [i for i in range(len(visible)) if allowed[b][i][j]]
            total = float(pattern[b].sum())
            share = float(pattern[b, :, j].sum()) / total if total else 0.0
            uniform = sum(1 / visible[i] for i in rows) / max(1, sum(n > 0 for n in visible))
            often = sum(float(pattern[b, i, j]) >= 3 / visible[i] for i in rows)
            if len(rows) >= 8 and share >= least and share >= 3 * uniform and 2 * often > len(rows):
                found.append((share, b, j, often / len(rows), len(rows)))
    return sorted(found, reverse=True)[:most]
