"""How heads were looked at without their matrices: what was wanted, what was kept, and the arrays that this comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhacli.results.record.heads import SINK_SHARE, SINK_TOKENS

if TYPE_CHECKING:
    from mhacli.spec.conditions import Pattern


@dataclass(frozen=True)
class Check:
    """One check of the statistics: how far they are from what must hold.

    `rounding` is the part of the tolerance that is put down to scores too large for their dtype; 0 where it was not needed.
    """

    name: str
    error: float | None
    tolerance: float
    ok: bool
    rounding: float = 0.0

    @property
    def strain(self) -> float:
        """How much of its tolerance the error takes; infinite where it is not finite or none is allowed."""
        if self.error is None or not self.tolerance:
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.tolerance


@dataclass(frozen=True)
class Corner:
    """A part of the patterns that was kept cell by cell: so many queries from `first_query` on, and keys likewise."""

    first_query: int
    n_queries: int
    first_key: int
    n_keys: int


@dataclass(frozen=True)
class Kept:
    """What to keep of every head cell by cell: the `top` keys of some `queries`, a `corner`; and z."""

    queries: tuple[int, ...] = ()
    top: int = 0
    corner: Corner | None = None
    z: bool = False


@dataclass(frozen=True)
class Wanted:
    """What to find out beyond the config: which `heads` (None: all), the user's `patterns`, how many first tokens are
    looked at as sinks and from which share any key is one, and what to keep cell by cell."""

    heads: tuple[int, ...] | None = None
    patterns: tuple[Pattern, ...] = ()
    sink_tokens: int = SINK_TOKENS
    sink_share: float = SINK_SHARE
    kept: Kept = Kept()
    allow_nonfinite: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """How heads were looked at without their matrices.

    `block` queries and keys make a cell of the maps; `steps` are the upper ends of the distances in the profile; `patterns`
    the user's own. `kernel` made z and the log-sum-exp. `peak_bytes` was foreseen, `full_bytes` is what the matrices would
    have taken.
    """

    block: int
    steps: tuple[int, ...]
    patterns: tuple[str, ...]
    sink_tokens: int
    sink_share: float
    kernel: str
    checks: tuple[Check, ...]
    peak_bytes: int
    full_bytes: int
    kept: Kept = Kept()


def survey_shapes(
    survey: Survey, *, batch: int, n_heads: int, q_len: int, k_len: int, d_v: int, n_spans: int = 0
) -> Mapping[str, tuple[int, ...]]:
    """The arrays of a record of heads and their shapes; a head axis of 1 holds for all in `visible` and `uniform_…`.

    Per query: `entropy` (nats), `participation` (1/Σp²), `distance` (tokens), `sink` (share of the first token), `max_score`,
    `lse`; NaN where no key is seen. Per key: `received`. `map`: the mean share that the queries of a block give a block of
    keys. `profile`: the share of all mass at distances up to each of `steps`. `corner` (NaN where not allowed), and the
    `top_keys` (−1 for none) and `top_shares` of the asked queries, where they were asked for; `z` where it was kept. Of a
    checkpoint also `span_mass`, the mean share that the queries of a span give another span, where there are spans, and the
    matrices and `strongest_key` of a run, with which mask they were `allowed`, where they were kept.
    """
    rows = (batch, n_heads, q_len)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(PER_QUERY, rows)
    shapes |= {
        "received": (batch, n_heads, k_len),
        "map": (batch, n_heads, -(-q_len // survey.block), -(-k_len // survey.block)),
        "profile": (batch, n_heads, len(survey.steps)),
        "visible": rows,
        "uniform_map": (batch, n_heads, -(-q_len // survey.block), -(-k_len // survey.block)),
        "uniform_received": (batch, n_heads, k_len),
        "uniform_profile": (batch, n_heads, len(survey.steps)),
        "z": (*rows, d_v),
    }
    shapes |= {name: (*rows, k_len) for name in MATRICES} | {"strongest_key": rows}
    if n_spans:
        shapes |= dict.fromkeys(("span_mass", "uniform_span_mass"), (batch, n_heads, n_spans, n_spans))
    if survey.kept.corner is not None:
        shapes["corner"] = (batch, n_heads, survey.kept.corner.n_queries, survey.kept.corner.n_keys)
    if survey.kept.queries:
        asked = (batch, n_heads, len(survey.kept.queries), min(survey.kept.top, k_len))
        shapes |= {"top_keys": asked, "top_shares": asked}
    return shapes


PER_QUERY = ("entropy", "participation", "distance", "sink", "max_score", "lse")
MATRICES = ("qk", "scores", "pattern", "allowed")
OPTIONAL = ("z", *MATRICES, "strongest_key")
FOR_ALL_HEADS = ("visible", "uniform_received", "uniform_profile", "uniform_map", "uniform_span_mass", "allowed")
