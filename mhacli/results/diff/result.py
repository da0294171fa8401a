"""What comparing two records comes to. Plain data; A is the reference, and B − A a difference.

Numbers that are not finite are None wherever they would stand alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mhacli.results.record.effect import Effect
from mhacli.results.record.head_statistics import Kind

SiteStatus = Literal["identical", "within", "beyond", "shape", "skipped"]
"""Of what both records hold: the same numbers to the last bit, within the tolerance, beyond it, of another shape, or not
comparable for a reason that is no fault of theirs (`why`). Of a step without numbers another formula is `beyond`."""
ComparedBy = Literal["array", "numbers", "extremes", "shape"]
"""What was compared: an array that both keep, the numbers that a trace tells of a small tensor, the extremes and moments that it
tells of any, or the shape alone."""
TokenChangeKind = Literal["replaced", "only A", "only B"]
AFTER_SCORES = ("max_score", "lse")
OF_PATTERN = (
    "corner", "top_shares", "top_keys", "map", "received", "profile", "span_mass", "sink", "distance", "participation",
    "entropy", "strongest_key",
)  # fmt: skip
"""What records hold that was counted of scores and of a pattern: statistics, and no sites of the computation."""
PATTERN_SITES = ("pattern", "map")
"""Where the attention weights of a head are: all of them, or the means of blocks."""
TokenFamily = Literal["texts", "context"]


@dataclass(frozen=True)
class Setting:
    """Something that is said differently of the two: its name, and the words of either. `layers` are the labels of those layers
    of a checkpoint of which it is said, none where it is said of the whole."""

    name: str
    a: str
    b: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenChange:
    """Neighbouring tokens that have no equal in the other text; `begin` … `end` are places in either, the end left out."""

    change: TokenChangeKind
    a_begin: int
    a_end: int
    b_begin: int
    b_end: int


@dataclass(frozen=True)
class Match:
    """`length` tokens that are the same in both, from the places `a` and `b` on."""

    a: int
    b: int
    length: int


@dataclass(frozen=True)
class TextDifference:
    """How the tokens of one sequence of A find theirs in B. `n_other_ids` counts tokens that are the same but for their number.

    Not `exact`: the texts were too long and too different to find the longest parts that they share; tokens that each has once
    were matched instead, and their neighbours.
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
        """How many tokens are the same in both."""
        return sum(match.length for match in self.matches)

    @property
    def replaced(self) -> tuple[Match, ...]:
        """Tokens that are replaced one to one: as many of A stand between two matches as of B."""
        gaps = (change for change in self.changes if change.a_end - change.a_begin == change.b_end - change.b_begin)
        return tuple(Match(gap.a_begin, gap.b_begin, gap.a_end - gap.a_begin) for gap in gaps)

    @property
    def compared(self) -> tuple[Match, ...]:
        """The parts whose numbers are compared, in order: tokens that are the same, and those replaced one to one."""
        return tuple(sorted((*self.matches, *self.replaced), key=lambda match: match.a))

    @property
    def is_same(self) -> bool:
        """Whether the tokens are the same, all of them."""
        return self.n_aligned == self.n_a == self.n_b

    @property
    def changes(self) -> tuple[TokenChange, ...]:
        """What lies between the matches."""
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
    """Where a number stands: the words of its axes, and its index on each of them in A and in B. Queries and keys count the
    tokens of their text, so padding lies outside of it; heads have their numbers; blocks of tokens count from the first."""

    axes: tuple[str, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]


@dataclass(frozen=True)
class HeadLargest:
    """The largest difference of one head at a site, None where one of the two is not finite alone, and in which sequence."""

    head: int
    largest: float | None
    sequence: int


@dataclass(frozen=True)
class SiteDifference:
    """One site of one layer.

    `largest` is the largest |B − A| of the numbers that are finite in both, `at` where; `magnitude` the largest number of either,
    to which the tolerance is relative. `n_different` counts cells that are not equal, `n_nonfinite` those of them that are not
    finite in one, or in both but not alike. Of a mask `n_only_a` and `n_only_b` are cells that only one of them allows.
    `at` is the first such cell where no number says more. `told` is what a trace says differently of it.
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
        """The largest difference by the largest magnitude; 0 where all is 0."""
        if self.largest is None or self.magnitude is None:
            return None
        return self.largest / self.magnitude if self.magnitude else self.largest

    @property
    def is_same_bits(self) -> bool:
        """Whether every number was compared, and is the same to the last bit."""
        return self.status == "identical" and self.seen in ("array", "numbers")

    @property
    def has_other_formula(self) -> bool:
        """Whether it is a step without numbers that another formula makes."""
        return self.seen == "shape" and self.status == "beyond"

    @property
    def departs(self) -> bool:
        """Whether the records differ here."""
        return self.status in ("beyond", "shape")


@dataclass(frozen=True)
class StatisticChange:
    """A statistic of a head that differs, by its name in `STATISTICS`; None where a record has no value."""

    name: str
    a: float | None
    b: float | None


@dataclass(frozen=True)
class HeadChange:
    """What changed in a head. `size` is the largest change among its weights, which run from 0 to 1; None where a number is gone
    or new."""

    layer: str
    head: int
    kind_a: Kind
    kind_b: Kind
    size: float | None
    statistics: tuple[StatisticChange, ...]


@dataclass(frozen=True)
class LayerDifference:
    """One layer that both have, or all there is where there are no layers, then `label` is empty. `index_a` and `index_b` are its
    places among the records' layers. `n_heads` heads were compared; `heads` are those that changed. `only_a` and `only_b` are
    sites that one record alone holds."""

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
    """A removal of both records that does not change the output alike; `change` is B − A."""

    a: Effect
    b: Effect
    change: float


@dataclass(frozen=True)
class EffectDifference:
    """How the effects of two records differ in `metric`: the removals, of `n_compared` that both have, whose effects differ by
    more than `tolerance`, the largest difference first; and those that one alone has."""

    metric: Literal["d_logit", "d_output"]
    tolerance: float
    n_compared: int
    changes: tuple[EffectChange, ...]
    only_a: tuple[Effect, ...] = ()
    only_b: tuple[Effect, ...] = ()

    @property
    def summary(self) -> str:
        """How many effects changed: `3 of 72 effects changed`."""
        return f"{len(self.changes) or 'none'} of {self.n_compared} effect{'s' * (self.n_compared != 1)} changed"


@dataclass(frozen=True)
class Departure:
    """Where two records first depart: at the `tokens`, at their `ids`, at a `site` of a layer, or in `effects` alone."""

    where: Literal["tokens", "ids", "site", "effects"]
    layer: str = ""
    site: SiteDifference | None = None


@dataclass(frozen=True)
class Differences:
    """Everything that two records do not have in common. `tolerance` is relative; `dtype` the number format that it follows from,
    None where it was asked for. `alike` are pairs of a name and a word that hold of both. `only_a` and `only_b` are the labels of
    layers that one alone holds; `n_sequences` counts those of either. `effects` is None where not both have some
    that are proven."""

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
        """The first site, in the order of execution, where the numbers depart; a statistic where no site of its layer does."""
        for layer in self.layers:
            departed = [site for site in layer.sites if site.departs]
            sites = [site for site in departed if site.site not in (*AFTER_SCORES, *OF_PATTERN)]
            if departed:
                return Departure("site", layer.label, (sites or departed)[0])
        return None

    @property
    def first(self) -> Departure | None:
        """Where they first depart, the input before any number; None where they agree."""
        if not self.has_same_tokens:
            return Departure("tokens")
        if any(text.n_other_ids for text in self.texts):
            return Departure("ids")
        return self.first_site or (Departure("effects") if self.effects and self.effects.changes else None)

    @property
    def compared(self) -> tuple[tuple[str, SiteDifference], ...]:
        """The sites of which numbers were compared, each with its layer's label."""
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
        """Whether they agree in everything that both hold; `nothing` where they hold nothing in common."""
        if self.first is not None:
            return "differ"
        is_known = any(site.status in ("identical", "within") for layer in self.layers for site in layer.sites)
        return "agree" if is_known else "nothing"


def _place(departure: Departure) -> str:
    if departure.site is None:
        return {"tokens": "the tokens", "ids": "the ids of the tokens"}.get(departure.where, "the effects")
    return f"{departure.layer} {'the mask' if departure.site.site == 'allowed' else departure.site.site}".strip()
