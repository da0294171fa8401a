"""The differences of two records as plain data. A is the reference; differences are B − A.

Non-finite numbers are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mhacli.io.data import plain
from mhacli.record.arrays import Array
from mhacli.record.display import Shown
from mhacli.record.effect import Effect
from mhacli.record.heads import HeadStatistics, Kind
from mhacli.record.record import InspectedLayer, Record
from mhacli.text.align import Alignment
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence

SCHEMA = "mha.diff/1"
Status = Literal["identical", "within", "beyond", "shape", "skipped"]
"""The comparison of a site: equal bits, within the tolerance, beyond it, different shapes, or not comparable (`why`). A
step of user code whose formula differs is `beyond`."""
ComparedBy = Literal["array", "numbers", "extremes", "shape"]
"""What was compared: arrays, all numbers of a small tensor in traces, extremes and moments in traces, or shapes alone."""
TokenFamily = Literal["texts", "context"]
PATTERN_SITES = ("pattern", "map")
"""The arrays with a head's attention weights: all of them, or the means of blocks."""
MASK = ("visible", "uniform_map", "uniform_received", "uniform_profile", "uniform_span_mass", "allowed")
"""Arrays that depend only on the mask."""
AFTER_SCORES = ("max_score", "lse")
OF_PATTERN = (
    "corner", "top_shares", "top_keys", "map", "received", "profile", "span_mass", "sink", "distance", "participation",
    "entropy", "strongest_key",
)  # fmt: skip
"""Statistics of scores and patterns in records, which are not sites of the computation."""


@dataclass(frozen=True)
class Setting:
    """A setting that differs, with both values. `layers` are the labels of the layers concerned, or empty for the whole
    record."""

    name: str
    a: str
    b: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextDifference:
    """Two texts with the alignment of their tokens. `n_other_ids` counts equal tokens with different ids."""

    family: TokenFamily
    sequence: int
    a: TokenSequence
    b: TokenSequence
    alignment: Alignment
    n_other_ids: int

    @property
    def is_same(self) -> bool:
        """Whether all tokens are equal."""
        return self.alignment.n_equal == self.alignment.n_a == self.alignment.n_b

    @property
    def changes(self) -> list[tuple[range, range]]:
        """The positions in A and in B between equal tokens."""
        return [(a, b) for a, b, is_equal in self.alignment.parts if not is_equal]

    def document(self) -> dict[str, Any]:
        """The alignment and the changed tokens as JSON values."""
        return {
            "family": self.family,
            "sequence": self.sequence,
            "n_a": self.alignment.n_a,
            "n_b": self.alignment.n_b,
            "matches": plain(self.alignment.matches),
            "n_other_ids": self.n_other_ids,
            "exact": self.alignment.exact,
            "n_aligned": self.alignment.n_equal,
            "is_same": self.is_same,
            "n_replaced": sum(len(a) for a, b in self.changes if len(a) == len(b)),
            "changes": [self._change(a, b) for a, b in self.changes],
        }

    def _change(self, a: range, b: range) -> dict[str, Any]:
        return {
            "change": "only B" if not a else "only A" if not b else "replaced",
            "a_begin": a.start,
            "a_end": a.stop,
            "b_begin": b.start,
            "b_end": b.stop,
            "a": [without_surrogates(self.a.tokens[i]) for i in a],
            "b": [without_surrogates(self.b.tokens[j]) for j in b],
        }


@dataclass(frozen=True)
class Place:
    """The place of a number: the names of its axes, and its indices in A and in B.

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
class Difference:
    """The comparison of one site of one layer.

    `largest` is the largest |B − A| of numbers finite in both, at `at`. `magnitude` is the largest number of either, to
    which the tolerance is relative. `n_different` counts unequal cells, `n_nonfinite` those of them that are non-finite
    in one, or differently in both. For a mask, `n_only_a` and `n_only_b` count cells that only one record allows; `at`
    is then the first such cell. `told` are differences in the trace's description.
    """

    site: str
    seen: ComparedBy
    status: Status
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
    at: Place | None = None
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
    def departs(self) -> bool:
        """Whether the records differ here."""
        return self.status in ("beyond", "shape")


@dataclass(frozen=True)
class StatisticChange:
    """A statistic of a head that differs, by its name in `STATISTICS`; None if a record has no value."""

    name: str
    a: float | None
    b: float | None

    @property
    def size(self) -> float:
        """The absolute change; infinite if only one record has a value, 0 if neither has."""
        if self.a is None or self.b is None:
            return 0.0 if self.a == self.b else math.inf
        return abs(self.b - self.a)


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
    """One layer of both records (`a` and `b`), or the whole records with an empty `label` if they have no layers.

    `queries` and `keys` are its aligned texts, and `inspected` describes the layers of checkpoints. `n_heads` heads were
    compared; `heads` are those that changed. `only_a` and `only_b` are sites of one record alone.
    """

    label: str
    a: Record
    b: Record
    queries: tuple[TextDifference, ...]
    keys: tuple[TextDifference, ...]
    inspected: tuple[InspectedLayer, ...]
    sites: tuple[Difference, ...] = ()
    heads: tuple[HeadChange, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    n_heads: int = 0

    @property
    def head_pairs(self) -> list[tuple[HeadStatistics, HeadStatistics]]:
        """The heads with statistics in both records; none if the numbers of heads differ."""
        heads_b = {head.head: head for head in self.b.heads}
        is_alike = self.a.config.n_heads == self.b.config.n_heads
        return [(head, heads_b[head.head]) for head in self.a.heads if is_alike and head.head in heads_b]

    def arrays(self, name: str) -> tuple[Array, Array]:
        """An array that both have."""
        return self.a.arrays[name], self.b.arrays[name]

    def changed_heads(self, tolerance: float) -> set[int]:
        """The heads whose pattern or statistics differ by more than the tolerance."""
        of_pattern = [(tolerance * (s.magnitude or 0.0), s.heads) for s in self.sites if s.site in PATTERN_SITES]
        differing = {h.head for most, heads in of_pattern for h in heads if h.largest is None or h.largest > most}
        return differing | {change.head for change in self.heads}

    @property
    def drawn_site(self) -> list[Difference]:
        """The site whose heads are drawn: the pattern if both records have it, else the map; none without either."""
        return [site for name in PATTERN_SITES for site in self.sites if site.site == name][:1]

    def name(self, site: Difference) -> str:
        """A site with its layer, in a sentence: `layer 3 pattern`."""
        return f"{self.label} {'the mask' if site.site == 'allowed' else site.site}".strip()

    def document(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "layer": self.label,
            "sites": [{**plain(site), "relative": plain(site.relative)} for site in self.sites],
            "heads": plain(self.heads),
            "only_a": [*self.only_a],
            "only_b": [*self.only_b],
        }


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
    only_a: tuple[Effect, ...]
    only_b: tuple[Effect, ...]

    @property
    def summary(self) -> str:
        """The number of changed effects: `3 of 72 effects changed`."""
        return f"{len(self.changes) or 'none'} of {self.n_compared} effect{'s' * (self.n_compared != 1)} changed"


@dataclass(frozen=True, repr=False)
class RecordDiff(Shown):
    """All differences of two records, whose labels are `names`.

    `tolerance` is relative; `dtype` is the dtype from which it follows, None if the user set it. `alike` are equal
    settings as pairs of name and value. `only_a` and `only_b` are the labels of layers in one record alone. `effects` is
    None unless both have proven effects.
    """

    a: Record
    b: Record
    names: tuple[str, str]
    tolerance: float
    dtype: str | None
    settings: tuple[Setting, ...]
    alike: tuple[tuple[str, str], ...]
    texts: tuple[TextDifference, ...]
    layers: tuple[LayerDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    effects: EffectDifference | None

    def __repr__(self) -> str:
        """The verdict in a sentence."""
        return f"<RecordDiff: {self.summary}>"

    def views(self, screen: Any) -> Iterator[Any]:
        """What `mha diff` prints on a screen."""
        from mhacli.commands.diff.view import diff_view
        from mhacli.render.base.options import ViewOptions

        yield diff_view(self, ViewOptions(view="heatmap"), screen)

    @property
    def first_site(self) -> tuple[LayerDifference, Difference] | None:
        """The first site that differs, in the order of execution, with its layer; a statistic if no site of the layer
        differs."""
        for layer in self.layers:
            departed = [site for site in layer.sites if site.departs]
            if departed:
                return layer, min(departed, key=lambda site: site.site in (*AFTER_SCORES, *OF_PATTERN))
        return None

    @property
    def first(self) -> Literal["tokens", "ids", "site", "effects"] | None:
        """Where the records differ first, with inputs before numbers; None if they agree."""
        if len(self.a.sequences) != len(self.b.sequences) or not all(text.is_same for text in self.texts):
            return "tokens"
        if any(text.n_other_ids for text in self.texts):
            return "ids"
        return "site" if self.first_site else "effects" if self.effects and self.effects.changes else None

    @property
    def compared(self) -> list[tuple[LayerDifference, Difference]]:
        """The sites with compared numbers, each with its layer."""
        sites = ((layer, site) for layer in self.layers for site in layer.sites)
        return [
            (layer, site) for layer, site in sites if site.seen != "shape" and site.status not in ("shape", "skipped")
        ]

    @property
    def verdict(self) -> Literal["agree", "differ", "nothing"]:
        """Whether the records agree in everything that both hold; `nothing` if they have nothing in common."""
        if self.first is not None:
            return "differ"
        is_known = any(site.status in ("identical", "within") for layer in self.layers for site in layer.sites)
        return "agree" if is_known else "nothing"

    @property
    def summary(self) -> str:
        """The result in a sentence: `2 of 12 heads changed; the first difference is in layer 3 pattern`."""
        if self.verdict == "nothing":
            return "nothing can be compared: the records have no layer, site or step in common"
        n_heads, n_sites = sum(layer.n_heads for layer in self.layers), len(self.compared)
        n_changed = sum(len(layer.changed_heads(self.tolerance)) for layer in self.layers)
        parts = [f"{n_changed or 'none'} of {n_heads} head{'s' * (n_heads != 1)} changed"] if n_heads else []
        parts += [self.effects.summary] if self.effects and self.effects.n_compared else []
        if self.first is None:
            sites = f" in {n_sites} site{'s' * (n_sites != 1)}" if n_sites else ""
            return "; ".join([f"no difference{sites}", *parts])
        site = self.first_site[0].name(self.first_site[1]) if self.first_site else ""
        places = {"tokens": "the tokens", "ids": "the ids of the tokens", "site": site, "effects": "the effects"}
        parts.append(f"the first difference is in {places[self.first]}")
        parts += [f"the first numbers that differ are in {site}"] if site and self.first != "site" else []
        return "; ".join(parts)

    def to_dict(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """The document that `mha diff --json` prints, of this `command`."""
        from mhacli.commands.diff.view import verdict_text

        site = self.first_site and {"layer": self.first_site[0].label, "site": self.first_site[1].site}
        at = site if site and self.first == "site" else {"layer": "", "site": None}
        return {
            "schema": SCHEMA,
            "command": [*command],
            "verdict": self.verdict,
            "summary": self.summary,
            "said": verdict_text(self),
            "a": without_surrogates(self.names[0]),
            "b": without_surrogates(self.names[1]),
            "tolerance": {"relative": self.tolerance, "of_dtype": self.dtype},
            "first": self.first and {"where": self.first, **at},
            "first_site": site,
            "settings": plain(self.settings),
            "n_sequences": [len(self.a.sequences), len(self.b.sequences)],
            "texts": [text.document() for text in self.texts],
            "layers": [layer.document() for layer in self.layers],
            "only_a": [*self.only_a],
            "only_b": [*self.only_b],
            "effects": plain(self.effects),
        }
