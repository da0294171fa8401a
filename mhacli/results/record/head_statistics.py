"""The heads of a record: their statistics, what type of head these make them, and how they were counted."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mhacli.errors import UsageError

if TYPE_CHECKING:
    from mhacli.spec.conditions import Pattern
    from mhacli.spec.config import Reducer


Kind = Literal[
    "previous-token", "sink", "diagonal", "duplicate-token", "induction", "local", "positional", "uniform", "mixed"
]
"""The types of heads that have a name. `mixed` is every other."""

CERTAIN_ENOUGH = 0.4
"""The least excess over uniform attention that gives a head its name. Voita et al. 2019 call a head positional from 0.9 of
its largest weights on, Clark et al. 2019 describe such heads from about half of all attention on."""
NEARLY_UNIFORM = 0.9
"""H/max from which a head that has no other type is uniform."""
WORTH_NAMING = 0.05
"""The least excess with which a type is named that a mixed head comes near to."""
NEAR = 8
"""Tokens to each side that count as near, for a local head."""
SINK_TOKENS = 4
"""How many first tokens `leading` counts together. Source: Xiao et al. 2023, "StreamingLLM", section 3.2."""
SINK_SHARE, SINK_LIFT, SINK_PART, SINK_QUERIES = 0.1, 3.0, 0.5, 8
"""What makes a key a sink, as `is_sink` says: the least part of all attention; so many times uniform attention; the part of the
queries that see it of which more must give it so much; and how many these must be, for what few do is no habit. Source: Gu et al.
2024, "When Attention Sink Emerges in Language Models" (the mean weight of a key over the queries that see it, above
a threshold), here relative to uniform attention, of which early keys of a causal text get much; Xiao et al. 2023, section 3.1."""
MAX_SINKS, MAX_LARGEST = 8, 5


@dataclass(frozen=True, kw_only=True)
class Averages:
    """Means over all queries that see a key, of all sequences; None where no query counts or a number is not finite.

    `entropy` is in nats, `entropy_share` divides it by the log of the visible keys, over the queries that see more than
    one. `effective_keys` is the mean of exp(entropy), `participation` that of 1/Σp². `distance` is |i − j| in tokens;
    `window_50` … the least distance within which that percentage of all attention lies. The others are weights: on the first
    token of each text or document (`sink`), on its `leading` tokens, on the query itself, on the token before it, on tokens
    that equal the query (`duplicate`), on tokens that follow such a one (`induction`), within `NEAR` tokens, and on each of
    the user's patterns; `at_offset` is that at the signed distance, neither 0 nor −1, that has most beyond the uniform weight
    (`offset`; both None where none has more). `learned_sink` is the weight that a sink logit takes and no key gets;
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
    """A key that receives much: `share` is its part of all attention of its sequence, `uniform` what it would get uniformly.

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
    """Whether a key is a sink: it gets the part `least` of all attention and `SINK_LIFT` times what uniform attention gives it,
    and of the queries that see it, at least `SINK_QUERIES`, more than `SINK_PART` give it as many times their uniform weight.

    The one definition for every surface. Records hold keys beyond a least part of their own; what a record does not know of a
    key does not count against it.
    """
    is_led = key.share >= max(least, SINK_LIFT * key.uniform)
    is_usual = key.often is None or key.often > SINK_PART
    return is_led and is_usual and (key.n_queries is None or key.n_queries >= SINK_QUERIES)


@dataclass(frozen=True)
class StrongCell:
    """A cell: `share` is its attention weight, `lift` the ratio to that of its query's uniform row."""

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
    cells with the greatest ratio, for the largest weights themselves stand in the first rows of any causal head. `uniform` are
    the same means if all visible keys got the same.
    """

    max_score: float | None = None
    max_score_at: tuple[int, int, int] | None = None
    sinks: tuple[Sink, ...] = ()
    largest: tuple[StrongCell, ...] = ()
    uniform: Averages | None = None

    @property
    def sink_keys(self) -> tuple[Sink, ...]:
        """Those of `sinks` that are sinks: older records named keys by their part of all attention alone."""
        return tuple(key for key in self.sinks if is_sink(key))


# ---------------------------------------------------------------------------------------------------- the table of statistics

Unit = Literal["weight", "fraction", "nats", "tokens", "count", "score"]
"""What a statistic counts: attention weight, from 0 to 1; another fraction; nats; distances in tokens; keys; scores."""


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One statistic of a head: a field of `HeadStatistics`, and what every surface needs to show and explain it.

    `name` is its noun; `explanation` one to three sentences on what it says, with its `formula` and `source` where it has them.
    The overview gives it a column if it has a `heading`, and explains that by its `legend`, by default the name. Both may contain
    `{sink_tokens}`. Where the screen is too narrow, columns with the largest `priority` go first. An `optional`
    column is shown only where a head has a value. A column stands after the one above it in the table, or `beside` another
    field's. A statistic `of` another field can be compared only where that field is the same.
    """

    field: str
    unit: Unit
    name: str
    explanation: str = ""
    formula: str = ""
    source: str = ""
    heading: str = ""
    legend: str = ""
    priority: int = 0
    optional: bool = False
    beside: str = ""
    of: str = ""

    @property
    def is_change(self) -> bool:
        """Whether its difference between two heads says how far they changed: it is from 0 to 1 in any head."""
        return self.unit in ("weight", "fraction") and not self.of

    @property
    def is_main(self) -> bool:
        """Whether it is among those that a screen for one head shows."""
        return bool(self.heading) and self.priority < LEAST_PRIORITY


LEAST_PRIORITY = 7
"""The `priority` of columns that only a wide screen shows."""

STATISTICS = (
    Statistic(
        field="entropy", unit="nats", heading="H", priority=3, name="entropy", legend="entropy in nats",
        explanation="The entropy of a query's attention weights in nats, averaged over the queries. 0 means that a query attends "
        "to one key; ln n means that it attends to n keys equally.",
        formula="H = −Σ p ln p", source="Shannon 1948, theorem 2",
    ),
    Statistic(
        field="entropy_share", unit="fraction", heading="H/max", priority=1, name="normalised entropy",
        legend="entropy ÷ its maximum",
        explanation="The entropy divided by its largest possible value, that of uniform attention over the visible keys. 0 % "
        "means that one key gets everything, 100 % that all visible keys get the same. Queries that see only one key do not "
        "count.",
        formula="H / ln(number of visible keys)",
    ),
    Statistic(
        field="effective_keys", unit="count", heading="eff.keys", priority=2, name="effective keys",
        legend="effective keys, mean of exp(H)",
        explanation="The number of keys that a query effectively attends to: that many keys with equal weights would have the "
        "same entropy. Averaged over the queries, so it is at least exp(H), H being the mean entropy.",
        formula="mean over i of exp(H_i), H_i the entropy of query i", source="Hill 1973 (order 1)",
    ),
    Statistic(
        field="participation", unit="count", heading="1/Σp²", priority=7, name="participation ratio",
        explanation="Another effective number of keys, in which small weights count less than in eff.keys. Averaged over the "
        "queries.",
        formula="mean over i of 1 / Σ_j p[i, j]²", source="Hill 1973 (order 2)",
    ),
    Statistic(
        field="distance", unit="tokens", heading="|i−j|", priority=1, name="mean distance",
        explanation="The mean distance in tokens between a query and the keys that it attends to, weighted by attention.",
        formula="Σ p · |i − j|", source="Vig and Belinkov 2019, equation 2",
    ),
    Statistic(
        field="window_50", unit="tokens", heading="d50", priority=7, name="50 % distance quantile",
        legend="distance within which 50 % lies",
        explanation="The smallest distance within which 50 % of the attention lies, in tokens.",
    ),
    Statistic(
        field="window_90", unit="tokens", heading="d90", priority=5, name="90 % distance quantile",
        legend="distance within which 90 % lies",
        explanation="The smallest distance within which 90 % of the attention lies, in tokens.",
    ),
    Statistic(
        field="window_99", unit="tokens", heading="d99", priority=7, name="99 % distance quantile",
        legend="distance within which 99 % lies",
        explanation="The smallest distance within which 99 % of the attention lies, in tokens.",
    ),
    Statistic(
        field="sink", unit="weight", heading="first", priority=1, name="first-token weight",
        legend="weight on the first token",
        explanation="The attention weight on the first token of the text, or of the document, averaged over the queries. JSON "
        "names it sink, but it does not show a sink: in a short causal text the first token always gets much.",
        formula="Σ_i p[i, 0] / n", source="Xiao et al. 2023, section 3.1",
    ),
    Statistic(
        field="leading", unit="weight", heading="first {sink_tokens}", priority=7,
        name="weight on the first few tokens", legend="on the first {sink_tokens} tokens",
        explanation=f"The attention weight on the first {SINK_TOKENS} tokens of the text together, averaged over the queries. "
        "--first-tokens changes their number.",
        source="Xiao et al. 2023, section 3.2",
    ),
    Statistic(
        field="diagonal", unit="weight", heading="self", priority=3, name="self score", legend="weight on the token itself",
        explanation="The attention weight of a token on itself, averaged over the queries.",
        formula="Σ_i p[i, i] / n",
    ),
    Statistic(
        field="previous", unit="weight", heading="prev", priority=1, name="previous-token score",
        legend="on the previous token",
        explanation="The attention weight on the token directly before the query, averaged over the queries.",
        formula="Σ_i p[i, i − 1] / n", source="Clark et al. 2019, section 3.1",
    ),
    Statistic(
        field="duplicate", unit="weight", heading="dup", priority=1, name="duplicate-token score", legend="on equal tokens",
        explanation="The attention weight on other tokens that equal the query, averaged over the queries.",
        formula="mean over i of Σ p[i, j] over j ≠ i with token j = token i", source="Wang et al. 2022, section 3.1",
    ),
    Statistic(
        field="induction", unit="weight", heading="ind", priority=1, name="induction score",
        legend="on tokens after an equal one",
        explanation="The attention weight on tokens that follow an earlier occurrence of the query token, averaged over the "
        "queries. A model that has seen 'A B … A' and attends from the second A to B can predict B.",
        formula="mean over i of Σ p[i, j] over j with token j − 1 = token i", source="Olsson et al. 2022",
    ),
    Statistic(
        field="near", unit="weight", heading=f"±{NEAR}", priority=6, name=f"weight within {NEAR} tokens",
        explanation=f"The attention weight within {NEAR} tokens of the query, on both sides, averaged over the queries.",
        formula=f"mean over i of Σ p[i, j] over j with |i − j| ≤ {NEAR}",
    ),
    Statistic(
        field="offset", unit="tokens", name="strongest distance",
        explanation="The signed distance, other than 0 and −1, with the largest excess over uniform attention.",
        source="Voita et al. 2019",
    ),
    Statistic(
        field="at_offset", unit="weight", of="offset", name="weight at the strongest distance",
        explanation="The attention weight at the strongest distance, averaged over the queries.",
    ),
    Statistic(
        field="learned_sink", unit="weight", heading="s_aux", beside="sink", optional=True, name="weight of the sink logit",
        legend="weight of the sink logit, which no key gets",
        explanation="The part of the attention that a sink logit takes, averaged over the queries. No key gets it, and H and "
        "eff.keys count it as one more key.",
        formula="exp(sink logit) / (exp(sink logit) + Σ_k exp(s[i, k]))", source="gpt-oss",
    ),
    Statistic(
        field="max_score", unit="score", heading="max", priority=4, name="largest score",
        explanation="The largest attention score that the softmax reads, of any query and key. Very large scores make the "
        "weights insensitive to everything else.",
    ),
    Statistic(
        field="certainty", unit="fraction", of="kind", name="excess over uniform",
        explanation="How far the attention weight that defines the head's type exceeds that of uniform attention: 0 for "
        f"uniform attention, 1 if nothing else gets any. A head has a type from {CERTAIN_ENOUGH} on. It stands beside the "
        "type; beside 'uniform' stands H/max.",
        formula="(w − u) / (1 − u), w the weight, u that of uniform attention",
    ),
)  # fmt: skip
"""Every statistic of a head, in the order in which surfaces show them."""

# ------------------------------------------------------------------------------------------------------------------ head types


@dataclass(frozen=True)
class HeadType:
    """A type of head: its name on screens, in a narrow column too, what it means, and the statistic that makes a head one."""

    name: str
    short: str
    field: str
    explanation: str


HEAD_TYPES: Mapping[Kind, HeadType] = {
    "sink": HeadType("first token", "first", "sink", "Much of the attention goes to the first token of the text."),
    "previous-token": HeadType(
        "previous token", "prev", "previous", "Much of the attention goes to the token directly before the query."
    ),
    "diagonal": HeadType("itself", "self", "diagonal", "Much of the attention of a token goes to itself."),
    "induction": HeadType(
        "induction", "ind", "induction",
        "Much of the attention goes to tokens that follow an earlier occurrence of the query token.",
    ),
    "duplicate-token": HeadType(
        "duplicate token", "dup", "duplicate", "Much of the attention goes to other tokens that equal the query."
    ),
    "positional": HeadType(
        "positional", "pos", "at_offset",
        "Much of the attention goes to one fixed distance other than 0 and −1, which JSON and CSV name as offset.",
    ),
    "local": HeadType(
        "local", "local", "near",
        f"Much of the attention stays within {NEAR} tokens of the query, without one distance that stands out.",
    ),
    "uniform": HeadType(
        "uniform", "uniform", "entropy_share",
        f"All visible keys get nearly the same weight: H/max is at least {100 * NEARLY_UNIFORM:.0f} %.",
    ),
    "mixed": HeadType(
        "mixed", "mixed", "",
        f"No single type: no excess over uniform attention reaches {CERTAIN_ENOUGH}. The nearest type is named, with its excess.",
    ),
}  # fmt: skip
"""Every type of head, by its name in JSON. Where two exceed uniform attention equally, the first decides."""
UNTYPED: tuple[Kind, ...] = ("uniform", "mixed")
"""The types of heads in which no weight exceeds that of uniform attention by much."""

# --------------------------------------------------------------------------------------------------------------- kind and order


def with_kind(head: HeadStatistics) -> HeadStatistics:
    """The head with its type: the one whose weight exceeds uniform attention most, if that is enough; else uniform or mixed.

    The excess of a weight w over the uniform u is (w − u) / (1 − u): 0 for uniform attention, 1 where nothing else gets any.
    """
    excess = _excesses(head)
    near = excess.pop("local")
    strongest = max(excess, key=lambda kind: excess[kind])
    if excess[strongest] < CERTAIN_ENOUGH:  # near holds the weights on single distances too: it comes into play last
        strongest, excess["local"] = "local", near
    if excess[strongest] >= CERTAIN_ENOUGH:
        return replace(head, kind=strongest, certainty=excess[strongest])
    entropy = head.entropy_share or 0.0
    if entropy >= NEARLY_UNIFORM:
        return replace(head, kind="uniform", certainty=entropy)
    return replace(head, kind="mixed", certainty=1 - max(*excess.values(), 0.0))


def nearest_type(head: HeadStatistics) -> tuple[Kind, float] | None:
    """Of a mixed head the type that comes nearest, with its excess; None where none comes near."""
    excess = _excesses(head)
    nearest = max(excess, key=lambda kind: excess[kind])
    return (nearest, excess[nearest]) if head.kind == "mixed" and excess[nearest] >= WORTH_NAMING else None


def _excesses(head: HeadStatistics) -> dict[Kind, float]:
    """The excess of each type that is made by one weight."""
    return {kind: _excess(head, HEAD_TYPES[kind].field) for kind in HEAD_TYPES if kind not in UNTYPED}


_ROUNDING = 1e-5


def _excess(head: HeadStatistics, name: str) -> float:
    weight: float | None = getattr(head, name)
    uniform: float | None = getattr(head.uniform, name, None)
    if weight is None or uniform is None or uniform > 1 - _ROUNDING:  # nothing is left to exceed it by
        return 0.0
    return min(1.0, (weight - uniform) / (1 - uniform))


SORTS = ("head", "layer", "kind", "certainty", *(row.field for row in STATISTICS if row.heading))
"""What heads can be ordered by."""

_HEADINGS: Mapping[str, str] = {
    row.heading.format(sink_tokens=SINK_TOKENS): row.field for row in STATISTICS if row.heading
}
"""The statistics by the headings of their columns."""


def require_order(sort: str) -> tuple[str, bool]:
    """What heads are ordered by, which may be given by the heading of its column, and whether that rises. Raises `UsageError` for
    what is none of `SORTS`."""
    word, colon, way = sort.partition(":")
    name = _HEADINGS.get(word, word)
    if name not in SORTS or way not in (("up", "down") if colon else ("",)):
        raise UsageError(
            f"--sort {shlex.quote(sort[:40])} is not one of {', '.join(SORTS)}, alone or with :up or :down"
        )
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


ROW_SUMS = "every query's weights sum to 1"
COLUMN_TOTALS = "row and column totals agree"
MAP_TOTALS = "row and map totals agree"
HEAD_OUTPUTS = "weights × values give the kernel's z"
"""The names of the checks."""
_EARLIER_HEAD_OUTPUTS = "z of the pattern is the kernel's"
"""That of the last in records of earlier versions."""


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
    def severity(self) -> tuple[bool, float]:
        """What orders checks of one name: those that fail come last, and of these or the others the largest error."""
        return not self.ok, math.inf if self.error is None else self.error

    @property
    def is_of_outputs(self) -> bool:
        """Whether it compares what came out, which only a layer has whose values were seen."""
        return self.name in (HEAD_OUTPUTS, _EARLIER_HEAD_OUTPUTS)


def worst_check(same: Sequence[Check]) -> Check:
    """Of checks of one name the one that came nearest to its tolerance, or passed it most, with the largest rounding of any."""
    return replace(max(same, key=lambda check: check.severity), rounding=max(check.rounding for check in same))


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
    counted together and from which part of all attention any key is a sink, what to keep cell by cell, and which `reducer` makes
    the statistics."""

    heads: tuple[int, ...] | None = None
    patterns: tuple[Pattern, ...] = ()
    sink_tokens: int = SINK_TOKENS
    sink_share: float = SINK_SHARE
    kept: Kept = Kept()
    allow_nonfinite: bool = False
    reducer: Reducer = "auto"
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadsSummary:
    """How heads were looked at without their matrices.

    `block` queries and keys make a cell of the maps; `steps` are the upper ends of the distances in the profile; `patterns`
    the user's own. `kernel` made z and the log-sum-exp, `reducer` the statistics: torch, triton, or both for different heads, and
    `torch_because` says why torch. `peak_bytes` was foreseen, `full_bytes` is what the matrices would
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
    reducer: str = "torch"
    torch_because: str | None = None


def summary_shapes(
    survey: HeadsSummary, *, batch: int, n_heads: int, q_len: int, k_len: int, d_v: int, n_spans: int = 0
) -> Mapping[str, tuple[int, ...]]:
    """The arrays of a record of heads and their shapes; a head axis of 1 holds for all in `visible` and `uniform_…`.

    Per query: `entropy` (nats), `participation` (1/Σp²), `distance` (tokens), `sink` (weight on the first token), `max_score`,
    `lse`; NaN where no key is seen. Per key: `received`. `map`: the mean weight that the queries of a block give a block of
    keys. `profile`: the part of all attention at distances up to each of `steps`. `corner` (NaN where masked), and the
    `top_keys` (−1 for none) and `top_shares` of the asked queries, where they were asked for; `z` where it was kept. Of a
    checkpoint also `span_mass`, the mean weight that the queries of a span give another span, where there are spans, and the
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
