"""The result of comparing two records as plain data. A is the reference; differences are B − A.

Non-finite numbers are None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mhacli.record.effect import Effect
from mhacli.record.heads import Kind

SiteStatus = Literal["identical", "within", "beyond", "shape", "skipped"]
"""The comparison of a site: equal bits, within the tolerance, beyond it, different shapes, or not comparable (`why`). A
step without numbers whose formula differs is `beyond`."""
ComparedBy = Literal["array", "numbers", "extremes", "shape"]
"""What was compared: arrays, all numbers of a small tensor in traces, extremes and moments in traces, or shapes alone."""
TokenChangeKind = Literal["replaced", "only A", "only B"]
AFTER_SCORES = ("max_score", "lse")
OF_PATTERN = (
    "corner", "top_shares", "top_keys", "map", "received", "profile", "span_mass", "sink", "distance", "participation",
    "entropy", "strongest_key",
)  # fmt: skip
"""Statistics of scores and patterns in records, which are not sites of the computation."""
PATTERN_SITES = ("pattern", "map")
"""The arrays with a head's attention weights: all of them, or the means of blocks."""
TokenFamily = Literal["texts", "context"]


@dataclass(frozen=True)
class Setting:
    """A setting that differs, with both values. `layers` are the labels of the layers concerned, or empty for the whole
    record."""

    name: str
    a: str
    b: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenChange:
    """Consecutive tokens without a match in the other text; `begin` … `end` are positions, end exclusive."""

    change: TokenChangeKind
    a_begin: int
    a_end: int
    b_begin: int
    b_end: int


@dataclass(frozen=True)
class Match:
    """`length` tokens that are equal in both, from the positions `a` and `b`."""

    a: int
    b: int
    length: int


@dataclass(frozen=True)
class TextDifference:
    """The matching tokens of one sequence. `n_other_ids` counts equal tokens with different ids.

    Without `exact`, the texts were too long and too different to find the longest matches. Tokens unique in both were
    then matched, with their neighbours.
    """

    family: TokenFamily
    sequence: int
    n_a: int
    n_b: int
    matches: tuple[Match, ...]
    n_other_ids: int = 0
    exact: bool = True

    @property
    def n_aligned(self) -> int:
        """The number of equal tokens."""
        return sum(match.length for match in self.matches)

    @property
    def replaced(self) -> tuple[Match, ...]:
        """Tokens replaced one to one: equally many in A and in B between two matches."""
        gaps = (change for change in self.changes if change.a_end - change.a_begin == change.b_end - change.b_begin)
        return tuple(Match(gap.a_begin, gap.b_begin, gap.a_end - gap.a_begin) for gap in gaps)

    @property
    def compared(self) -> tuple[Match, ...]:
        """The ranges whose numbers are compared, in order: equal tokens, and those replaced one to one."""
        return tuple(sorted((*self.matches, *self.replaced), key=lambda match: match.a))

    @property
    def is_same(self) -> bool:
        """Whether all tokens are equal."""
        return self.n_aligned == self.n_a == self.n_b

    @property
    def changes(self) -> tuple[TokenChange, ...]:
        """The ranges between the matches."""
        return tuple(self._gaps())

    def _gaps(self) -> Iterator[TokenChange]:
        a = b = 0
        for match in (*self.matches, Match(self.n_a, self.n_b, 0)):
            if (a, b) != (match.a, match.b):
                kind: TokenChangeKind = "only B" if a == match.a else "only A" if b == match.b else "replaced"
                yield TokenChange(kind, a, match.a, b, match.b)
            a, b = match.a + match.length, match.b + match.length


@dataclass(frozen=True)
class DiffLocation:
    """The location of a number: the names of its axes, and its indices in A and in B.

    Queries and keys count the tokens of their text, without padding. Heads have their numbers, and blocks count from 0.
    """

    axes: tuple[str, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]


@dataclass(frozen=True)
class HeadLargest:
    """The largest difference of one head at a site, and its sequence; None if only one number is finite."""

    head: int
    largest: float | None
    sequence: int


@dataclass(frozen=True)
class SiteDifference:
    """The comparison of one site of one layer.

    `largest` is the largest |B − A| of numbers finite in both, at `at`. `magnitude` is the largest number of either, to
    which the tolerance is relative. `n_different` counts unequal cells, `n_nonfinite` those of them that are non-finite
    in one, or differently in both. For a mask, `n_only_a` and `n_only_b` count cells that only one record allows; `at`
    is then the first such cell. `told` are differences in the trace's description.
    """

    site: str
    seen: ComparedBy
    status: SiteStatus
    axes: tuple[str, ...]
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    n_cells: int = 0
    n_different: int = 0
    n_nonfinite: int = 0
    n_only_a: int = 0
    n_only_b: int = 0
    largest: float | None = None
    magnitude: float | None = None
    at: DiffLocation | None = None
    why: str = ""
    heads: tuple[HeadLargest, ...] = ()
    told: tuple[Setting, ...] = ()

    @property
    def relative(self) -> float | None:
        """The largest difference relative to the largest magnitude; 0 if all numbers are 0."""
        if self.largest is None or self.magnitude is None:
            return None
        return self.largest / self.magnitude if self.magnitude else self.largest

    @property
    def is_same_bits(self) -> bool:
        """Whether every number was compared and is equal to the last bit."""
        return self.status == "identical" and self.seen in ("array", "numbers")

    @property
    def has_other_formula(self) -> bool:
        """Whether this is a step without numbers whose formula differs."""
        return self.seen == "shape" and self.status == "beyond"

    @property
    def departs(self) -> bool:
        """Whether the records differ here."""
        return self.status in ("beyond", "shape")


@dataclass(frozen=True)
class StatisticChange:
    """A statistic of a head that differs, by its name in `STATISTICS`; None if a record has no value."""

    name: str
    a: float | None
    b: float | None


@dataclass(frozen=True)
class HeadChange:
    """The changes in a head. `size` is the largest change among its weights (0 to 1); None if a number is missing or
    new."""

    layer: str
    head: int
    kind_a: Kind
    kind_b: Kind
    size: float | None
    statistics: tuple[StatisticChange, ...]


@dataclass(frozen=True)
class LayerDifference:
    """One layer of both records, or the whole records with an empty `label` if they have no layers.

    `index_a` and `index_b` are the layer's indices in each record. `n_heads` heads were compared; `heads` are those
    that changed. `only_a` and `only_b` are sites of one record alone.
    """

    label: str
    index_a: int | None
    index_b: int | None
    sites: tuple[SiteDifference, ...]
    heads: tuple[HeadChange, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    n_heads: int = 0

    def changed_heads(self, tolerance: float) -> frozenset[int]:
        """The heads whose pattern or statistics differ by more than the tolerance."""
        patterns = [(site, (site.magnitude or 0.0) * tolerance) for site in self.sites if site.site in PATTERN_SITES]
        differing = {
            head.head for site, most in patterns for head in site.heads if head.largest is None or head.largest > most
        }
        return frozenset(differing | {change.head for change in self.heads})


@dataclass(frozen=True)
class EffectChange:
    """A removal with different effects in both records; `change` is B − A."""

    a: Effect
    b: Effect
    change: float


@dataclass(frozen=True)
class EffectDifference:
    """The differences of the effects of two records in `metric`.

    `changes` are the removals, of `n_compared` in both records, whose effects differ by more than `tolerance`, the
    largest difference first. `only_a` and `only_b` are removals in one record alone.
    """

    metric: Literal["d_logit", "d_output"]
    tolerance: float
    n_compared: int
    changes: tuple[EffectChange, ...]
    only_a: tuple[Effect, ...] = ()
    only_b: tuple[Effect, ...] = ()

    @property
    def summary(self) -> str:
        """The number of changed effects: `3 of 72 effects changed`."""
        return f"{len(self.changes) or 'none'} of {self.n_compared} effect{'s' * (self.n_compared != 1)} changed"


@dataclass(frozen=True)
class Departure:
    """The first difference of two records: at `tokens`, at `ids`, at a `site` of a layer, or in `effects` alone."""

    where: Literal["tokens", "ids", "site", "effects"]
    layer: str = ""
    site: SiteDifference | None = None


@dataclass(frozen=True)
class Differences:
    """All differences of two records.

    `tolerance` is relative; `dtype` is the dtype from which it follows, None if the user set it. `alike` are equal
    settings as pairs of name and value. `only_a` and `only_b` are the labels of layers in one record alone;
    `n_sequences` counts those of each. `effects` is None unless both have proven effects.
    """

    tolerance: float
    dtype: str | None
    settings: tuple[Setting, ...]
    alike: tuple[tuple[str, str], ...]
    n_sequences: tuple[int, int]
    texts: tuple[TextDifference, ...]
    layers: tuple[LayerDifference, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    effects: EffectDifference | None = None

    @property
    def has_same_tokens(self) -> bool:
        """Whether both read the same tokens."""
        return self.n_sequences[0] == self.n_sequences[1] and all(text.is_same for text in self.texts)

    @property
    def first_site(self) -> Departure | None:
        """The first site that differs, in the order of execution; a statistic if no site of its layer differs."""
        for layer in self.layers:
            departed = [site for site in layer.sites if site.departs]
            sites = [site for site in departed if site.site not in (*AFTER_SCORES, *OF_PATTERN)]
            if departed:
                return Departure("site", layer.label, (sites or departed)[0])
        return None

    @property
    def first(self) -> Departure | None:
        """The first difference, with inputs before numbers; None if the records agree."""
        if not self.has_same_tokens:
            return Departure("tokens")
        if any(text.n_other_ids for text in self.texts):
            return Departure("ids")
        return self.first_site or (Departure("effects") if self.effects and self.effects.changes else None)

    @property
    def compared(self) -> tuple[tuple[str, SiteDifference], ...]:
        """The sites with compared numbers, each with its layer's label."""
        return tuple(
            (layer.label, site)
            for layer in self.layers
            for site in layer.sites
            if site.seen != "shape" and site.status in ("identical", "within", "beyond")
        )

    @property
    def summary(self) -> str:
        """The result in a sentence: `2 of 12 heads changed; the first difference is in layer 3 pattern`."""
        if self.verdict == "nothing":
            return "nothing can be compared: the records have no layer, site or step in common"
        n_heads = sum(layer.n_heads for layer in self.layers)
        n_changed = sum(len(layer.changed_heads(self.tolerance)) for layer in self.layers)
        changed = f"{n_changed or 'none'} of {n_heads} head{'s' * (n_heads != 1)} changed"
        parts = [changed] if n_heads else []
        parts += [self.effects.summary] if self.effects and self.effects.n_compared else []
        if self.first is None:
            n_sites = len(self.compared)
            return "; ".join(
                [f"no difference in {n_sites} site{'s' * (n_sites != 1)}" if n_sites else "no difference", *parts]
            )
        parts.append(f"the first difference is in {_place(self.first)}")
        if self.first.site is None and self.first_site is not None:
            parts.append(f"the first numbers that differ are in {_place(self.first_site)}")
        return "; ".join(parts)

    @property
    def verdict(self) -> Literal["agree", "differ", "nothing"]:
        """Whether the records agree in everything that both hold; `nothing` if they have nothing in common."""
        if self.first is not None:
            return "differ"
        is_known = any(site.status in ("identical", "within") for layer in self.layers for site in layer.sites)
        return "agree" if is_known else "nothing"


def _place(departure: Departure) -> str:
    if departure.site is None:
        return {"tokens": "the tokens", "ids": "the ids of the tokens"}.get(departure.where, "the effects")
    return f"{departure.layer} {'the mask' if departure.site.site == 'allowed' else departure.site.site}".strip()
