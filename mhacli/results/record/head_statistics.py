"""The heads of a record: their statistics, what kind of head these make them, and how they were counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mhacli.errors import UsageError

if TYPE_CHECKING:
    from mhacli.spec.conditions import Pattern


Kind = Literal[
    "previous-token", "sink", "diagonal", "duplicate-token", "induction", "local", "positional", "uniform", "mixed"
]
"""The kinds of heads that have a name. `mixed` is every other."""

CERTAIN_ENOUGH = 0.4
"""The least excess over uniform attention that gives a head its name. Voita et al. 2019 call a head positional from 0.9 of
its largest shares on, Clark et al. 2019 describe such heads from about half of all attention on."""
NEARLY_UNIFORM = 0.9
"""The share of the largest possible entropy from which a head that has no other name is uniform."""
NEAR = 8
"""Tokens to each side that count as near, for a local head."""
SINK_TOKENS = 4
"""The first tokens that are looked at together as sinks. Source: Xiao et al. 2023, "StreamingLLM", section 3.2."""
SINK_SHARE, SINK_LIFT, SINK_PART, SINK_QUERIES = 0.1, 3.0, 0.5, 8
"""What makes a key a sink, as `is_sink` says: the least share of all attention; so many times uniform attention; the part of the
queries that see it of which more must give it so much; and how many these must be, for what few do is no habit. Source: Gu et al.
2024, "When Attention Sink Emerges in Language Models" (the mean share of a key over the queries that see it, above
a threshold), here relative to uniform attention, of which early keys of a causal text get much; Xiao et al. 2023, section 3.1."""
MAX_SINKS, MAX_LARGEST = 8, 5


@dataclass(frozen=True, kw_only=True)
class Averages:
    """Means over all queries that see a key, of all sequences; None where no query counts or a number is not finite.

    `entropy` is in nats, `entropy_share` divides it by the log of the visible keys, over the queries that see more than
    one. `effective_keys` is the mean of exp(entropy), `participation` that of 1/Σp². `distance` is |i − j| in tokens;
    `window_50` … the least distance within which that percentage of all mass lies. The others are masses: on the first
    token of each text or document (`sink`), on its `leading` tokens, on the query itself, on the token before it, on tokens
    that equal the query (`duplicate`), on tokens that follow such a one (`induction`), within `NEAR` tokens, and on each of
    the user's patterns; `at_offset` is that at the signed distance, neither 0 nor −1, that has most beyond the uniform mass
    (`offset`; both None where none has more). `learned_sink` is the share that no key gets, for a learned sink takes it;
    None where there is none.
    """

    entropy: float | None = None
    entropy_share: float | None = None
    effective_keys: float | None = None
    participation: float | None = None
    distance: float | None = None
    window_50: int | None = None
    window_90: int | None = None
    window_99: int | None = None
    sink: float | None = None
    leading: float | None = None
    diagonal: float | None = None
    previous: float | None = None
    duplicate: float | None = None
    induction: float | None = None
    near: float | None = None
    offset: int | None = None
    at_offset: float | None = None
    learned_sink: float | None = None
    patterns: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Sink:
    """A key that receives much: its share of all attention of its sequence, and what it would get uniformly.

    `n_queries` see it, and the part `often` of them give it at least `SINK_LIFT` times what they would uniformly; None in
    records that do not know.
    """

    sequence: int
    key: int
    share: float
    uniform: float
    often: float | None = None
    n_queries: int | None = None


def is_sink(key: Sink, least: float = 0.0) -> bool:
    """Whether a key is a sink: it gets the share `least` of all attention and `SINK_LIFT` times what uniform attention gives it,
    and of the queries that see it, at least `SINK_QUERIES`, more than `SINK_PART` give it as many times their uniform share.

    The one definition for every surface. Records hold keys beyond a least share of their own; what a record does not know of a
    key does not count against it.
    """
    is_led = key.share >= max(least, SINK_LIFT * key.uniform)
    is_usual = key.often is None or key.often > SINK_PART
    return is_led and is_usual and (key.n_queries is None or key.n_queries >= SINK_QUERIES)


@dataclass(frozen=True)
class StrongCell:
    """A cell with its share, and how many times that of its query's uniform row it is."""

    sequence: int
    query: int
    key: int
    share: float
    lift: float


@dataclass(frozen=True)
class _Named:
    layer: int = 0
    attention: str = ""
    head: int = 0
    kind: Kind = "mixed"
    certainty: float | None = None


@dataclass(frozen=True, kw_only=True)
class HeadStatistics(Averages, _Named):
    """One head of one layer: `kind` with how `certain` that is, means over queries, and extremes.

    `attention` is the name of its module in a checkpoint. `max_score` is the largest score that softmax saw, at
    `max_score_at` (sequence, query, key). `sinks` are the keys that `is_sink` says are some; `largest` the
    cells with the greatest lift, for the largest shares themselves stand in the first rows of any causal head. `uniform` are
    the same means if all visible keys got the same.
    """

    max_score: float | None = None
    max_score_at: tuple[int, int, int] | None = None
    sinks: tuple[Sink, ...] = ()
    largest: tuple[StrongCell, ...] = ()
    uniform: Averages | None = None

    @property
    def sink_keys(self) -> tuple[Sink, ...]:
        """Those of `sinks` that are sinks: older records named keys by their share alone."""
        return tuple(key for key in self.sinks if is_sink(key))


# ---------------------------------------------------------------------------------------------------- the table of statistics

Unit = Literal["weight", "fraction", "nats", "tokens", "count", "score"]
"""What a statistic counts: attention weight, from 0 to 1; another fraction; nats; distances in tokens; keys; scores."""


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One statistic of a head: a field of `HeadStatistics`, and what every surface needs to show it.

    `meaning` explains it below a comparison, under the name of the field. The overview gives it a column if it has a `heading`,
    and explains that in its `legend`; both may contain `{sink_tokens}`. Where the screen is too narrow, columns with the largest
    `priority` go first. `words` name it in the viewer, which leaves out statistics without them. `page` is the heading and the
    legend on the HTML page, where the overview's would mislead. An `optional` column is shown only where a head has a value. A
    column stands after the one above it in the table, or `beside` another field's. A statistic `of` another field can be compared
    only where that field is the same.
    """

    field: str
    unit: Unit
    meaning: str = ""
    heading: str = ""
    legend: str = ""
    priority: int = 0
    words: str = ""
    page: tuple[str, str] | None = None
    optional: bool = False
    beside: str = ""
    of: str = ""

    @property
    def is_change(self) -> bool:
        """Whether its difference between two heads says how far they changed: it is from 0 to 1 in any head."""
        return self.unit in ("weight", "fraction") and not self.of


STATISTICS = (
    Statistic(
        field="entropy", unit="nats", heading="H", priority=3, words="entropy (nats)",
        legend="H entropy in nats", meaning="in nats (H)",
    ),
    Statistic(
        field="entropy_share", unit="fraction", heading="H/max", priority=1, words="of its maximum",
        legend="H/max entropy relative to that of uniform attention",
        meaning="entropy relative to that of uniform attention (H/max)",
    ),
    Statistic(
        field="effective_keys", unit="count", heading="keys", priority=2, words="keys, exp(entropy)",
        legend="keys mean of exp H", meaning="mean of exp H (keys)",
    ),
    Statistic(field="participation", unit="count", heading="1/Σp²", priority=7, meaning="mean of 1/Σp²"),
    Statistic(
        field="distance", unit="tokens", heading="|i−j|", priority=1, words="distance |i−j|",
        legend="|i−j| mean distance in tokens", meaning="mean of |i−j|",
    ),
    Statistic(
        field="window_50", unit="tokens", heading="50%", priority=6,
        legend="50% 90% 99% of the mass lie within so many tokens", meaning="the distance within which 50 % lie",
    ),
    Statistic(
        field="window_90", unit="tokens", heading="90%", priority=5, words="90 % within",
        meaning="the distance within which 90 % lie",
    ),
    Statistic(
        field="window_99", unit="tokens", heading="99%", priority=7, meaning="the distance within which 99 % lie",
    ),
    Statistic(
        field="sink", unit="weight", heading="sink", priority=1, words="on the first token",
        legend="mass on: sink the first token", page=("first token", "mass on: the first token"),
        meaning="what the first token gets",
    ),
    Statistic(
        field="leading", unit="weight", heading="≤{sink_tokens}", priority=7,
        legend="≤{sink_tokens} the first {sink_tokens}", meaning="the first few (≤)",
    ),
    Statistic(
        field="diagonal", unit="weight", heading="diag", priority=3, words="on the query itself",
        legend="diag itself", meaning="the token itself (diag)",
    ),
    Statistic(
        field="previous", unit="weight", heading="prev", priority=1, words="on the token before",
        legend="prev the token before", meaning="the one before (prev)",
    ),
    Statistic(
        field="duplicate", unit="weight", heading="dup", priority=1, words="on equal tokens",
        legend="dup the same token", meaning="the same token (dup)",
    ),
    Statistic(
        field="induction", unit="weight", heading="ind", priority=1, words="on what followed them",
        legend="ind the token after one like it", meaning="the one after one like it (ind)",
    ),
    Statistic(
        field="near", unit="weight", heading=f"±{NEAR}", priority=6, words=f"within {NEAR} tokens",
        legend=f"±{NEAR} near tokens", meaning=f"those within {NEAR} tokens (±{NEAR})",
    ),
    Statistic(
        field="offset", unit="tokens",
        meaning="the distance that gets most beyond uniform attention, at_offset: what it gets",
    ),
    Statistic(field="at_offset", unit="weight", of="offset"),
    Statistic(
        field="learned_sink", unit="weight", heading="σ", beside="sink", optional=True, words="of a learned sink",
        legend="σ learned sink: the share that no key gets, counted by H and keys as one more", meaning="what no key gets",
    ),
    Statistic(
        field="max_score", unit="score", heading="max", priority=4, words="largest score",
        legend="max the largest score", meaning="the largest score (max)",
    ),
    Statistic(
        field="certainty", unit="fraction", of="kind",
        meaning="how far the mass of its kind exceeds uniform attention's",
    ),
)  # fmt: skip
"""Every statistic of a head, in the order in which surfaces show them."""

FIELD_OF: Mapping[Kind, str] = {
    "sink": "sink",
    "previous-token": "previous",
    "diagonal": "diagonal",
    "induction": "induction",
    "duplicate-token": "duplicate",
    "positional": "at_offset",
    "local": "near",
    "uniform": "entropy_share",
}
"""The statistic that gives a head its kind. Of equal ones the first decides."""

# --------------------------------------------------------------------------------------------------------------- kind and order


def with_kind(head: HeadStatistics) -> HeadStatistics:
    """The head with its kind: the name whose mass exceeds uniform attention most, if that is enough; else uniform or mixed.

    The excess of a mass m over the uniform u is (m − u) / (1 − u): 0 for uniform attention, 1 where nothing else gets any.
    """
    excess = {kind: _excess(head, FIELD_OF[kind]) for kind in FIELD_OF if kind not in ("local", "uniform")}
    strongest = max(excess, key=lambda kind: excess[kind])
    if excess[strongest] < CERTAIN_ENOUGH:  # near holds the masses on single distances too: it comes into play last
        strongest, excess["local"] = "local", _excess(head, FIELD_OF["local"])
    if excess[strongest] >= CERTAIN_ENOUGH:
        return replace(head, kind=strongest, certainty=excess[strongest])
    share = head.entropy_share or 0.0
    if share >= NEARLY_UNIFORM:
        return replace(head, kind="uniform", certainty=share)
    return replace(head, kind="mixed", certainty=1 - max(*excess.values(), 0.0))


_ROUNDING = 1e-5


def _excess(head: HeadStatistics, name: str) -> float:
    mass: float | None = getattr(head, name)
    uniform: float | None = getattr(head.uniform, name, None)
    if mass is None or uniform is None or uniform > 1 - _ROUNDING:  # nothing is left to exceed it by
        return 0.0
    return min(1.0, (mass - uniform) / (1 - uniform))


SORTS = ("head", "layer", "kind", "certainty", *(row.field for row in STATISTICS if row.heading))
"""What heads can be ordered by."""


def require_order(sort: str) -> tuple[str, bool]:
    """What heads are ordered by, and whether that rises. Raises `UsageError` for what is none of `SORTS`."""
    name, colon, way = sort.partition(":")
    if name not in SORTS or way not in (("up", "down") if colon else ("",)):
        raise UsageError(f"sort must be one of {', '.join(SORTS)}, or one with :up or :down, got {sort[:40]!r}")
    return name, way == "up" or (not way and name in ("head", "layer", "kind"))


def in_order(heads: Sequence[HeadStatistics], sort: str) -> tuple[HeadStatistics, ...]:
    """The heads by one of `SORTS`: numbers from the largest down, or with `:up` from the smallest; what is missing last.

    `head` and `kind` go up by themselves. Raises `UsageError` for another word.
    """
    name, rises = require_order(sort)
    if name == "head":  # layer by layer, in the order of execution
        layers = list(dict.fromkeys((head.layer, head.attention) for head in heads))
        return tuple(sorted(heads, key=lambda h: (layers.index((h.layer, h.attention)), h.head), reverse=not rises))
    known = [head for head in heads if getattr(head, name) is not None]
    ordered = sorted(known, key=lambda head: (getattr(head, name),), reverse=not rises)
    return (*ordered, *(head for head in heads if getattr(head, name) is None))


# --------------------------------------------------------------------- how heads were looked at without their matrices


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
class HeadsRequest:
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
class HeadsSummary:
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


def summary_shapes(
    survey: HeadsSummary, *, batch: int, n_heads: int, q_len: int, k_len: int, d_v: int, n_spans: int = 0
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
