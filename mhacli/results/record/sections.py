"""What only some records have: steps of decoding, other routes of the computation, the story of a cell, somebody's own attention.

Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mhacli.results.record.measures import Timing


@dataclass(frozen=True)
class CacheStep:
    """One step of decoding: new tokens come in, read what is kept of the past, and are kept themselves.

    `start` is the position of the first new token, `tokens` names the new ones of each sequence (empty for padding).
    Shapes are those of the new queries, keys and values. `read_bytes` are keys and values that attention reads,
    `appended_bytes` those that this step adds, `moved_bytes` all that this way of keeping the past reads and writes of it,
    `cache_bytes` the storage that it holds. `max_abs_difference` is the distance of the output from the rows of a full
    recomputation; None where not finite.
    """

    phase: Literal["prefill", "decode"]
    start: int
    tokens: tuple[tuple[str, ...], ...]
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    n_past: int
    read_bytes: int
    appended_bytes: int
    moved_bytes: int
    cache_bytes: int
    max_abs_difference: float | None


@dataclass(frozen=True)
class Way:
    """One way of keeping the past, at one length: time and bytes of its last step, and of the whole sequence.

    `total_s` is the sum over all steps, of which `n_timed` were timed and the rest interpolated between them.
    """

    cache: str
    length: int
    step: Timing
    total_s: float
    n_timed: int
    step_bytes: int
    total_bytes: int
    step_flops: int
    cache_bytes: int


@dataclass(frozen=True)
class DecodeSummary:
    """A decoded sequence: how the past was kept, how long the prompt was, and how the ways of keeping it compare.

    `weight_bytes` are read at every step whatever the length, `token_bytes` per token and sequence that is kept; they are
    equal at `crossing_len` tokens. `full_token_bytes` is what a token would take with a kv head for every query head.
    """

    cache: str
    prompt_len: int
    ways: tuple[Way, ...]
    weight_bytes: int
    token_bytes: int
    full_token_bytes: int
    crossing_len: float


@dataclass(frozen=True)
class RouteCheck:
    """One way of writing the computation: how far its output is from that of the separate projections."""

    route: str
    sites: tuple[str, ...]
    max_abs_difference: float | None
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class ScorePart:
    """One of the terms that add up to a score, and whether it comes from what the tokens are, where they stand, or both.

    `value` is None where it is not finite; of a bias that is `given`, −∞: the cell is not allowed. What is `added` comes
    after scale and softcap.
    """

    name: str
    kind: Literal["content", "position", "both", "given", "softcap"]
    value: float | None
    added: bool = False


@dataclass(frozen=True)
class Cell:
    """One number followed all the way: how a query of a head came to give a key its share.

    `q`, `k`, `v` are the vectors, `scores_row` and `pattern_row` the query's whole rows (None where not allowed),
    `share` the weight that multiplies `v` (after dropout, in training), `z` the head's result for the query. `qk` is the
    dot product as it was scaled, after any rotation; `parts` are the terms of the score.
    """

    sequence: int
    head: int
    query: int
    key: int
    q: tuple[float | None, ...]
    k: tuple[float | None, ...]
    v: tuple[float | None, ...]
    qk: float | None
    scale: float
    softcap: float | None
    allowed: bool
    score: float | None
    scores_row: tuple[float | None, ...]
    pattern_row: tuple[float | None, ...]
    share: float | None
    z: tuple[float | None, ...]
    parts: tuple[ScorePart, ...] = ()


@dataclass(frozen=True)
class Argument:
    """An argument that the class or function was given: `origin` says by whom: given, default, or guessed."""

    name: str
    value: str
    origin: Literal["given", "default", "guessed"]
    why: str = ""


@dataclass(frozen=True)
class OwnModule:
    """Somebody's own attention that was walked: the `target` that names it, the `arguments` it was built with, how it was
    `called`, and the `sizes` that it was asked with, as `(word, size)`. `n_runs` with other sizes told the axes apart. The
    `result` has a shape, and `expected` is the one that attention must give; what it `printed` is kept."""

    target: str
    arguments: tuple[Argument, ...]
    called: str
    sizes: tuple[tuple[str, int], ...]
    n_runs: int
    result: tuple[int, ...]
    expected: tuple[int, ...]
    printed: str = ""
