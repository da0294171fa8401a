"""The differences of two records as plain data. A is the reference; differences are B − A.

The classes made of fields alone are parts of the JSON document, as are dictionaries. Non-finite numbers are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mhacli.io.data import plain
from mhacli.record.display import Shown
from mhacli.record.effect import Effect
from mhacli.record.heads import HeadStatistics, Kind
from mhacli.record.record import InspectedLayer, Record
from mhacli.text.align import Part
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence

SCHEMA = "mha.diff/1"
Status = Literal["identical", "within", "beyond", "shape", "skipped"]
"""The comparison of a site: equal bits, within the tolerance, beyond it, different shapes, or not comparable (`why`). A
step of user code whose formula differs is `beyond`."""
ComparedBy = Literal["array", "numbers", "extremes", "shape"]
"""What was compared: arrays, all numbers of a small tensor in traces, extremes and moments in traces, or shapes alone."""
TokenFamily = Literal["texts", "context"]
Setting = dict[str, Any]
"""A setting that differs: its `name`, its words in `a` and `b`, and the labels of the `layers` concerned, or none for the
whole record."""
PATTERN_SITES = ("pattern", "map")
"""The arrays with a head's attention weights: all of them, or the means of blocks."""
STATISTICS_OF_ROWS = (
    "max_score", "lse", "corner", "top_shares", "map", "received", "profile", "span_mass", "sink", "distance",
    "participation", "entropy",
)  # fmt: skip
"""Statistics of scores and patterns in records, which are not sites of the computation."""


class TextDifference(msgspec.Struct, frozen=True):
    """The aligned tokens of one sequence of both records, of which `n_other_ids` equal ones have different ids.

    `matches` are runs of equal tokens (`a`, `b`, `length`), and `changes` the tokens between them.
    """

    family: TokenFamily
    sequence: int
    n_a: int
    n_b: int
    matches: list[dict[str, int]]
    n_other_ids: int
    exact: bool
    n_aligned: int
    is_same: bool
    n_replaced: int
    changes: list[dict[str, Any]]

    @property
    def parts(self) -> list[Part]:
        """All positions of both in order: ranges, and whether their tokens are equal."""
        equal = [(range(m["a"], m["a"] + m["length"]), range(m["b"], m["b"] + m["length"]), True) for m in self.matches]
        others = [(range(c["a_begin"], c["a_end"]), range(c["b_begin"], c["b_end"]), False) for c in self.changes]
        return sorted([*equal, *others], key=lambda part: (part[0].start, part[1].start, part[2]))

    def of(self, record: Record) -> TokenSequence:
        """The text in one of the records."""
        return (record.sequences if self.family == "texts" else record.keys)[self.sequence]


class Difference(msgspec.Struct, frozen=True):
    """The comparison of one site of one layer.

    `largest` is the largest |B − A| of numbers finite in both. `magnitude` is the largest number of either, to which the
    tolerance is relative; `relative` is their ratio. `n_different` counts unequal cells, `n_nonfinite` those of them
    that are non-finite in one, or differently in both. For a mask, `n_only_a` and `n_only_b` count cells that only one
    record allows. `at` is the place of the largest or first difference: the `axes`, and the indices in `a` and in `b`.
    Queries and keys count the tokens of their text, and heads have their numbers. `heads` are the largest difference of
    each head and its sequence. `told` are differences in the description of a step.
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
    at: dict[str, Any] | None = None
    why: str = ""
    heads: tuple[dict[str, Any], ...] = ()
    told: tuple[Setting, ...] = ()
    relative: float | None = None

    @property
    def is_same_bits(self) -> bool:
        """Whether every number was compared and is equal to the last bit."""
        return self.status == "identical" and self.seen in ("array", "numbers")

    @property
    def departs(self) -> bool:
        """Whether the records differ here."""
        return self.status in ("beyond", "shape")


class HeadChange(msgspec.Struct, frozen=True):
    """The changes in a head. `size` is the largest change among its weights (0 to 1); None if a number is missing or
    new. `statistics` are those that differ, by `name`, in `a` and in `b`."""

    layer: str
    head: int
    kind_a: Kind
    kind_b: Kind
    size: float | None
    statistics: list[dict[str, Any]]


def change_of(a: float | None, b: float | None) -> float:
    """The size of a change; infinite if only one record has a value, 0 if neither has."""
    if a is None or b is None:
        return 0.0 if a == b else math.inf
    return abs(b - a)


@dataclass(frozen=True)
class LayerDifference:
    """One layer of both records (`a` and `b`), or the whole records with an empty `label` if they have no layers.

    `queries` and `keys` are its aligned texts, and `inspected` describes the layers of checkpoints. `heads` are those
    that changed. `only_a` and `only_b` are sites of one record alone.
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

    @property
    def head_pairs(self) -> list[tuple[HeadStatistics, HeadStatistics]]:
        """The heads with statistics in both records; none if the numbers of heads differ."""
        heads_b = {head.head: head for head in self.b.heads}
        is_alike = self.a.config.n_heads == self.b.config.n_heads
        return [(head, heads_b[head.head]) for head in self.a.heads if is_alike and head.head in heads_b]

    @property
    def patterns(self) -> list[Difference]:
        """The sites with attention weights: the pattern and the map, as far as both records have them."""
        return [site for name in PATTERN_SITES for site in self.sites if site.site == name]

    @property
    def n_heads(self) -> int:
        """The number of heads compared."""
        return max([len(self.head_pairs), *(len(site.heads) for site in self.patterns)])

    def changed_heads(self, tolerance: float) -> set[int]:
        """The heads whose pattern or statistics differ by more than the tolerance."""
        of_pattern = [(tolerance * (site.magnitude or 0.0), head) for site in self.patterns for head in site.heads]
        differing = {head["head"] for most, head in of_pattern if head["largest"] is None or head["largest"] > most}
        return differing | {change.head for change in self.heads}

    def name(self, site: Difference) -> str:
        """A site with its layer, in a sentence: `layer 3 pattern`."""
        return f"{self.label} {'the mask' if site.site == 'allowed' else site.site}".strip()


class EffectDifference(msgspec.Struct, frozen=True):
    """The differences of the effects of two records in `metric`.

    `changes` are the removals, of `n_compared` in both records, whose effects `a` and `b` differ by more than
    `tolerance`, the largest `change` first. `only_a` and `only_b` are removals in one record alone.
    """

    metric: Literal["d_logit", "d_output"]
    tolerance: float
    n_compared: int
    changes: list[dict[str, Any]]
    only_a: tuple[Effect, ...]
    only_b: tuple[Effect, ...]

    @property
    def summary(self) -> str:
        """The number of changed effects: `3 of 72 effects changed`."""
        if not self.n_compared:
            return "no removal is in both, so no effects can be compared"
        return f"{len(self.changes) or 'none'} of {self.n_compared} effect{'s' * (self.n_compared != 1)} changed"


@dataclass(frozen=True, repr=False)
class RecordDiff(Shown):
    """All differences of two records, whose labels are `names`.

    `tolerance` is relative; `dtype` is the dtype from which it follows, None if the user set it. `alike` are equal
    settings by name. `only_a` and `only_b` are the labels of layers in one record alone. `effects` is None unless both
    have proven effects.
    """

    a: Record
    b: Record
    names: tuple[str, str]
    tolerance: float
    dtype: str | None
    settings: tuple[Setting, ...]
    alike: dict[str, str]
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
        departed = [(layer, [site for site in layer.sites if site.departs]) for layer in self.layers]
        first = next((each for each in departed if each[1]), None)
        return first and (first[0], min(first[1], key=lambda site: site.site in STATISTICS_OF_ROWS))

    @property
    def first(self) -> Literal["tokens", "ids", "site", "effects"] | None:
        """Where the records differ first, with inputs before numbers; None if they agree."""
        if len(self.a.sequences) != len(self.b.sequences) or not all(text.is_same for text in self.texts):
            return "tokens"
        if any(text.n_other_ids for text in self.texts):
            return "ids"
        has_others = self.effects and (self.effects.changes or not self.effects.n_compared)
        return "site" if self.first_site else "effects" if has_others else None

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
        parts += [self.effects.summary] if self.effects else []
        if self.first is None:
            sites = f" in {n_sites} site{'s' * (n_sites != 1)}" if n_sites else ""
            return "; ".join([f"no difference{sites}", *parts])
        return "; ".join(
            [*parts, self.first_text(self.first_site[0].name(self.first_site[1]) if self.first_site else "")]
        )

    def first_text(self, site: str) -> str:
        """Where the records differ first, of which `site` is the first site in words."""
        places = {"tokens": "the tokens", "ids": "the ids of the tokens", "effects": "the effects"}
        text = f"the first difference is in {places.get(self.first or '', site)}"
        return text + (f"; the first numbers that differ are in {site}" if site and self.first != "site" else "")

    def to_dict(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """The document that `mha diff --json` prints, of this `command`."""
        from mhacli.commands.diff.view import verdict_text

        site = self.first_site and {"layer": self.first_site[0].label, "site": self.first_site[1].site}
        at = site if site and self.first == "site" else {"layer": "", "site": None}
        fields = ("sites", "heads", "only_a", "only_b")
        document: dict[str, Any] = {
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
            "settings": self.settings,
            "n_sequences": [len(self.a.sequences), len(self.b.sequences)],
            "texts": self.texts,
            "layers": [{"layer": each.label, **{name: getattr(each, name) for name in fields}} for each in self.layers],
            "only_a": self.only_a,
            "only_b": self.only_b,
            "effects": self.effects,
        }
        return {name: plain(value) for name, value in document.items()}
