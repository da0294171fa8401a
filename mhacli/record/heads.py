"""Head statistics in a record: the statistics, the head types that follow from them, and how they
were computed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import Struct

from mhacli.errors import UsageError
from mhacli.settings import SINK_SHARE, SINK_TOKENS

from .checks import Check
from .glossary import Word, did_you_mean, plain, words_of

Kind = Literal[
    "previous-token",
    "sink",
    "diagonal",
    "duplicate-token",
    "induction",
    "local",
    "positional",
    "uniform",
    "mixed",
]
"""The head types. `mixed` is any head without another type."""

# columns.toml and glossary.toml state these numbers in words.
CERTAIN_ENOUGH = 0.4
"""The least excess over uniform attention for a head type. Voita et al. 2019 call a head positional
from 0.9 of its largest weights on, Clark et al. 2019 describe such heads from about half of all
attention on."""
NEARLY_UNIFORM = 0.9
"""H/max from which a head without another type is uniform."""
WORTH_NAMING = 0.05
"""The least excess for naming the nearest type of a mixed head."""
LEAST_COPY_QUERIES = 4
"""With fewer queries at which a copy can be attended to, the mean over all queries decides."""
NEAR = 8
"""The distance in tokens up to which attention counts as local."""
SINK_LIFT = 3.0
"""The least multiple of uniform attention that counts as attending to a sink."""
SINK_PART = 0.5
"""The fraction of the queries that see a sink and must attend to it."""
SINK_QUERIES = 8
"""The least number of queries that see a sink.

The thresholds of `is_sink` are these, and `SINK_SHARE` of all attention. Source: Gu et al. 2024,
"When Attention Sink Emerges in Language Models" (the mean weight of a key over the queries that see
it, above a threshold); here relative to uniform attention, which is large for early keys of a
causal text; Xiao et al. 2023, section 3.1.
"""
MAX_SINKS = 8
MAX_LARGEST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Averages:
    """Means over all queries with a visible key, of all sequences; None if there is none, or a
    number is not finite.

    `entropy` is in nats; `entropy_share` divides it by the log of the number of visible keys, over
    queries that see more than one. `effective_keys` is the mean of exp(entropy), `participation`
    that of 1/Σp². `distance` is |i − j| in tokens; `window_50` … are the least distances that cover
    that percentage of all attention. The others are weights: on the first token of each text or
    document (`sink`), on its `leading` tokens, on the query itself, on the token before it, on
    tokens equal to the query (`duplicate`), on tokens after such a token (`induction`), within
    `NEAR` tokens, and on the cells of each user condition (`patterns`).
    `duplicate_where_possible` and `induction_where_possible` are means over only those queries that
    see such a token, `n_duplicate_queries` and `n_induction_queries`. `at_offset` is the weight
    at the signed distance `offset`, neither 0 nor −1, whose excess over uniform attention is
    largest; both are None if no distance has one. `learned_sink` is the weight of a sink logit;
    None without one.
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
    duplicate_where_possible: float | None = None
    n_duplicate_queries: int | None = None
    induction_where_possible: float | None = None
    n_induction_queries: int | None = None
    near: float | None = None
    offset: int | None = None
    at_offset: float | None = None
    learned_sink: float | None = None
    patterns: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Sink:
    """A key that receives much attention. `share` is its fraction of its sequence's attention,
    `uniform` its uniform fraction.

    `n_queries` see it, and the fraction `often` of them give it at least `SINK_LIFT` times their
    uniform weight. Both are None in older records.
    """

    sequence: int
    key: int
    share: float
    uniform: float
    often: float | None = None
    n_queries: int | None = None


def is_sink(key: Sink, least: float = 0.0) -> bool:
    """Whether a key is a sink.

    It gets at least the fraction `least` of all attention and at least `SINK_LIFT` times the
    uniform fraction. It is visible to at least `SINK_QUERIES` queries, and more than `SINK_PART` of
    them give it at least `SINK_LIFT` times their uniform weight. Conditions on numbers that an
    older record lacks are skipped. This is the only definition of a sink key.
    """
    is_led = key.share >= max(least, SINK_LIFT * key.uniform)
    is_usual = key.often is None or key.often > SINK_PART
    return is_led and is_usual and (key.n_queries is None or key.n_queries >= SINK_QUERIES)


class StrongCell(Struct, frozen=True):
    """A cell of the pattern. `share` is its attention weight, `lift` its ratio to the query's
    uniform weight.
    """

    sequence: int
    query: int
    key: int
    share: float
    lift: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadStatistics(Averages):
    """The statistics of one head of one layer: its type with the excess (`certainty`), means over
    queries, and extremes.

    `attention` is the module's name in a checkpoint. `also_at` is the one distance that explains
    the weights of an induction or duplicate-token head as well, as where a text repeats one block.
    `positional` are the types of those two whose weights lie at a distance that the head also keeps
    where nothing repeats. `max_score` is the largest score before
    softmax, at `max_score_at` (sequence, query, key). `sinks` are sink keys (see `is_sink`).
    `largest` are the cells with the greatest ratio to uniform, because the largest weights of any
    causal head are in its first rows. `uniform` are the same means under uniform attention.

    `d_logit` and `d_output` are what the removal of the head changes (see `Effect`), as means over
    the texts, and `floor` is the largest noise floor of the first of them that is known; changes up
    to it are 0. `control` are the statistics of the head on random tokens. All are None unless
    requested.
    """

    layer: int = 0
    attention: str = ""
    head: int = 0
    kind: Kind = "mixed"
    certainty: float | None = None
    also_at: int | None = None
    positional: tuple[Kind, ...] = ()
    max_score: float | None = None
    max_score_at: tuple[int, int, int] | None = None
    sinks: tuple[Sink, ...] = ()
    largest: tuple[StrongCell, ...] = ()
    uniform: Averages | None = None
    d_logit: float | None = None
    d_output: float | None = None
    floor: float | None = None
    control: HeadStatistics | None = None

    @property
    def sink_keys(self) -> tuple[Sink, ...]:
        """The sink keys. Older records list keys by their fraction of attention alone."""
        return tuple(key for key in self.sinks if is_sink(key))


HeadKey = tuple[int, str, int]
"""The layer, the module and the number of a head."""


# -------------------------------------------------------------------------- the table of statistics

Unit = Literal["weight", "fraction", "nats", "tokens", "count", "score", "change"]
"""The unit of a statistic: attention weight (0 to 1), another fraction, nats, tokens of distance,
keys, scores, or that of what a removal changes."""


class Statistic(Struct, frozen=True):
    """One statistic of a head: a field of `HeadStatistics`, whose words stand in columns.toml.

    The overview has a column for it unless `priority` is None. On narrow screens, columns with the
    largest `priority` are dropped first. An `optional` column appears only if a head has a value. A
    statistic `of` another field is comparable only if that field is equal. Its words stand in a
    `table`.
    """

    field: str
    unit: Unit
    priority: int | None = None
    optional: bool = False
    of: str = ""
    table: Literal["statistic", "effect"] = "statistic"

    @property
    def words(self) -> Word:
        """Its heading, its names and its explanation."""
        return words_of("columns", self.table)[self.field]

    @property
    def is_change(self) -> bool:
        """Whether its difference between two heads measures change: it is from 0 to 1 in every
        head.
        """
        return self.unit in ("weight", "fraction") and not self.of


STATISTICS = (
    Statistic("entropy", "nats", 3),
    Statistic("entropy_share", "fraction", 1),
    Statistic("effective_keys", "count", 2),
    Statistic("participation", "count", 7),
    Statistic("distance", "tokens", 1),
    Statistic("window_50", "tokens", 7),
    Statistic("window_90", "tokens", 5),
    Statistic("window_99", "tokens", 7),
    Statistic("sink", "weight", 1),
    Statistic("learned_sink", "weight", 0, optional=True),
    Statistic("leading", "weight", 7),
    Statistic("diagonal", "weight", 3),
    Statistic("previous", "weight", 1),
    Statistic("duplicate", "weight", 1),
    Statistic("induction", "weight", 1),
    Statistic("near", "weight", 6),
    Statistic("offset", "tokens"),
    Statistic("at_offset", "weight", of="offset"),
    Statistic("max_score", "score", 4),
    Statistic("certainty", "fraction", of="kind"),
)
"""Every head statistic in display order."""
OF_REMOVAL = tuple(
    Statistic(name, "change", 0, optional=True, table="effect")
    for name in ("d_logit", "d_output", "floor")
)
"""The columns of what the removal of a head changes."""


def removal_columns(heads: Sequence[HeadStatistics]) -> tuple[Statistic, ...]:
    """The columns of `OF_REMOVAL` in which a head has a value."""
    return tuple(
        row for row in OF_REMOVAL if any(getattr(head, row.field) is not None for head in heads)
    )


# --------------------------------------------------------------------------------------- head types


HEAD_TYPES: Mapping[Kind, str] = {
    "sink": "sink",
    "previous-token": "previous",
    "diagonal": "diagonal",
    "induction": "induction",
    "duplicate-token": "duplicate",
    "positional": "at_offset",
    "local": "near",
    "uniform": "entropy_share",
    "mixed": "",
}
"""The statistic that defines each head type. Among equal excesses the first type wins."""
COPY_TYPES: tuple[Kind, ...] = ("induction", "duplicate-token")
"""The types that the mean over the queries at which they are possible decides."""
UNTYPED: tuple[Kind, ...] = ("uniform", "mixed")
"""The head types without a weight much above uniform attention."""


def words_of_type(kind: Kind) -> Word:
    """The names of a head type, and its explanation."""
    return words_of("columns", "head_type")[kind]


# ----------------------------------------------------------------------------------- kind and order


def with_kind(head: HeadStatistics, repeated: Collection[Kind] = ()) -> HeadStatistics:
    """The head with its type: that of the largest excess if it is large enough, else uniform or
    mixed. `repeated` are the types whose weights its strongest distance explains as well, because
    of what the text repeats: they come before positional.

    The excess of a weight w over the uniform u is (w − u) / (1 − u): 0 for uniform attention, 1 for
    all attention.
    """
    excess = _excesses(head)
    certain = [kind for kind in excess if excess[kind] >= CERTAIN_ENOUGH]
    if certain:  # `near` includes weights at single distances, so `local` comes last
        later = {"local"} if {*repeated}.isdisjoint(certain) else {"local", "positional"}
        kind = max(certain, key=lambda kind: (kind not in later, excess[kind]))
        also_at = head.offset if kind in repeated else None
        return replace(head, kind=kind, certainty=excess[kind], also_at=also_at)
    entropy = head.entropy_share or 0.0
    if entropy >= NEARLY_UNIFORM:
        return replace(head, kind="uniform", certainty=entropy)
    return replace(head, kind="mixed", certainty=1 - max(*excess.values(), 0.0))


def nearest_type(head: HeadStatistics) -> tuple[Kind, float] | None:
    """The nearest type of a mixed head with its excess; None if none is near."""
    excess = _excesses(head)
    nearest = max(excess, key=lambda kind: excess[kind])
    if head.kind != "mixed" or excess[nearest] < WORTH_NAMING:
        return None
    return nearest, excess[nearest]


def where_possible(name: str) -> str:
    """The statistic over only those queries at which weights as in `name` are possible."""
    return f"{name}_where_possible"


def statistic_of_type(head: HeadStatistics, kind: Kind) -> str:
    """The statistic that decides whether the head has a type."""
    name = HEAD_TYPES[kind]
    n_possible = getattr(head, f"n_{name}_queries", None) or 0
    is_of_copies = kind not in head.positional and n_possible >= LEAST_COPY_QUERIES
    return where_possible(name) if is_of_copies else name


def _excesses(head: HeadStatistics) -> dict[Kind, float]:
    excesses = dict[Kind, float]()
    for kind in HEAD_TYPES:
        if kind not in UNTYPED:
            name = statistic_of_type(head, kind)
            weight, uniform = (getattr(means, name, None) for means in (head, head.uniform))
            excesses[kind] = 0.0
            if weight is not None and uniform is not None and uniform <= 1 - _ROUNDING:
                excesses[kind] = min(1.0, (weight - uniform) / (1 - uniform))
    return excesses


_ROUNDING = 1e-5
"""The least room for an excess over uniform attention."""


_COLUMNS = tuple(row for row in (*STATISTICS, *OF_REMOVAL) if row.priority is not None)
CONDITION = "where"
SORTS = ("head", "layer", "kind", "certainty", *(row.field for row in _COLUMNS), CONDITION)
"""The keys by which heads can be sorted; the second condition of --where is `where2`."""


def require_order(sort: str) -> tuple[str, bool]:
    """The sort key and whether it ascends. A key is a field, or the heading or the name of its
    column. Raises `UsageError` for others.
    """
    word, colon, direction = sort.partition(":")
    of_columns = {
        spelling.format(sink_tokens=SINK_TOKENS): row.field
        for row in _COLUMNS
        for spelling in (row.words.heading, row.words.name)
        if spelling
    }
    fields = {"type": "kind", **of_columns, **{name: name for name in SORTS}}
    name = {plain(spelling): field for spelling, field in fields.items()}.get(plain(word), word)
    # the name in tables of Python and JSON, and the heading
    name = re.sub("^(pattern_|p)(?=[0-9])", CONDITION, name)
    is_condition = re.fullmatch(f"{CONDITION}[1-9][0-9]?", name) is not None
    if not (name in SORTS or is_condition) or direction not in (("up", "down") if colon else ("",)):
        known = f"one of {', '.join(SORTS)}, where2 …, alone or with :up or :down"
        hint = did_you_mean(word, fields)
        raise UsageError(f"--sort {shlex.quote(sort[:40])} is not {known}", hint=hint)
    return name, direction == "up" or (not direction and name in ("head", "layer", "kind"))


def in_order(heads: Sequence[HeadStatistics], sort: str) -> tuple[HeadStatistics, ...]:
    """The heads sorted by one of `SORTS`: numbers descending, or ascending with `:up`, with missing
    values last; changes by their size.

    `head` and `kind` ascend by default. Raises `UsageError` for another key.
    """
    name, rises = require_order(sort)
    if name == "head":  # heads are in the order of execution already
        return tuple(heads if rises else reversed(heads))
    is_change = name in {row.field for row in OF_REMOVAL}
    is_condition = name.startswith(CONDITION)
    at = int(name.removeprefix(CONDITION) or 1) - 1 if is_condition else 0

    def number(head: HeadStatistics) -> Any:
        if is_condition:
            return head.patterns[at] if at < len(head.patterns) else None
        return getattr(head, name)

    known = [head for head in heads if number(head) is not None]
    may_lack = is_condition or any(row.optional for row in _COLUMNS if row.field == name)
    if heads and not known and may_lack:
        hint = "add --where CONDITION" if is_condition else "mha explain " + name
        raise UsageError(f"--sort {sort} orders by a number that no head here has", hint=hint)
    known.sort(key=lambda head: abs(number(head)) if is_change else number(head), reverse=not rises)
    return (*known, *(head for head in heads if number(head) is None))


# ---------------------------------------------------------------------- statistics without matrices


class Corner(Struct, frozen=True):
    """A block of the patterns to keep: `n_queries` from `first_query` on, `n_keys` from `first_key`
    on.
    """

    first_query: int
    n_queries: int
    first_key: int
    n_keys: int


class Kept(Struct, frozen=True):
    """The cells to keep of every head: the `top` keys of some `queries`, a block (`corner`), and
    z.
    """

    queries: tuple[int, ...] = ()
    top: int = 0
    corner: Corner | None = None
    z: bool = False


@dataclass(frozen=True, slots=True)
class HeadsSummary:
    """How head statistics were computed without matrices.

    `block` queries and keys make a cell of the maps. `steps` are the upper ends of the profile's
    distances. `patterns` are the user's conditions. `kernel` computed z, `blocks` with the
    statistics. `reducer` computed the statistics: torch, or the compiled block (`c`);
    `torch_because` is the reason for torch. `peak_bytes` was predicted; `full_bytes` is the size of
    the matrices that were not built.

    The record's arrays then are, per query `[batch, head, query]`: `entropy` (nats),
    `participation` (1/Σp²), `distance` (tokens), `sink` (weight on the first token), `max_score`,
    `lse`; NaN without a visible key. Per key `[batch, head, key]`: `received`. `map` `[batch, head,
    query block, key block]`: the mean weight from a block of queries to a block of keys. `profile`
    `[batch, head, step]`: the fraction of all attention at distances up to each of `steps`. On
    request: `corner` (NaN where masked), `top_keys` (−1 for none) and `top_shares` of the requested
    queries, and `z`. For a checkpoint also `span_mass`, the mean weight from the queries of a span
    to another span, and the kept matrices, with `strongest_key` and the mask `allowed`. In
    `FOR_ALL_HEADS`, a head axis of 1 means all heads.
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


UNMEASURED = HeadsSummary(
    block=1,
    steps=(),
    patterns=(),
    sink_tokens=SINK_TOKENS,
    sink_share=SINK_SHARE,
    kernel="",
    checks=(),
    peak_bytes=0,
    full_bytes=0,
)
"""The summary of a run, whose statistics follow from its matrices."""
PER_QUERY = ("entropy", "participation", "distance", "sink", "max_score", "lse")

FOR_ALL_HEADS = (
    "visible",
    "uniform_received",
    "uniform_profile",
    "uniform_map",
    "uniform_span_mass",
    "allowed",
)
