"""The differences of two records as plain data. A is the reference; differences are B − A.

Dictionaries are parts of the JSON document as they are. Non-finite numbers are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mhacli.io.data import plain
from mhacli.record.arrays import Array
from mhacli.record.display import Shown
from mhacli.record.heads import HeadStatistics
from mhacli.record.record import InspectedLayer, Record
from mhacli.text.escape import without_surrogates

SCHEMA = "mha.diff/1"
STATISTICS_OF_ROWS = (
    "max_score", "lse", "corner", "top_shares", "map", "received", "profile", "span_mass", "sink", "distance",
    "participation", "entropy",
)  # fmt: skip
"""Statistics of scores and patterns in records, which are not sites of the computation."""


class Difference(msgspec.Struct, frozen=True):
    """The comparison of one site of one layer.

    `seen` is what was compared: arrays, all numbers of a small tensor in traces, extremes and moments in traces, or
    shapes. `status` is equal bits, within the tolerance, beyond it, another shape, or not comparable (`why`); a step of
    user code with another formula is `beyond`. `largest` is the largest |B − A| of numbers finite in both, `magnitude`
    the largest number of either, to which the tolerance is relative, and `relative` their ratio. `n_different` counts
    unequal cells, `n_nonfinite` those of them that are non-finite in one, or differently in both. For a mask, `n_only_a`
    and `n_only_b` count cells that only one record allows. `at` is the place of the largest or first difference: the
    `axes`, and the indices in `a` and in `b`. Queries and keys count the tokens of their text, and heads have their
    numbers. `heads` are the largest difference of each head and its sequence. `told` are other formulas, as settings.
    """

    site: str
    seen: Literal["array", "numbers", "extremes", "shape"]
    status: Literal["identical", "within", "beyond", "shape", "skipped"]
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
    heads: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    relative: float | None = None

    @property
    def departs(self) -> bool:
        """Whether the records differ here."""
        return self.status in ("beyond", "shape")

    @property
    def is_compared(self) -> bool:
        """Whether numbers were compared."""
        return self.seen != "shape" and self.status not in ("shape", "skipped")

    @property
    def is_same_bits(self) -> bool:
        """Whether every number was compared and is equal to the last bit."""
        return self.status == "identical" and self.seen in ("array", "numbers")


@dataclass(frozen=True)
class LayerDifference:
    """One layer of both records (`a` and `b`), or the whole records with an empty `label` if they have no layers.

    `inspected` describes the layers of checkpoints. `queries` and `keys` are the positions of tokens that correspond,
    `[2, tokens]` for each sequence. `heads` are those of another type or with other statistics: `size` is the largest
    change of a weight, None if a number is missing or new. `only_a` and `only_b` are sites of one record alone.
    """

    label: str
    a: Record
    b: Record
    inspected: Sequence[InspectedLayer]
    queries: Sequence[Array]
    keys: Sequence[Array]
    sites: Sequence[Difference] = ()
    heads: Sequence[dict[str, Any]] = ()
    only_a: Sequence[str] = ()
    only_b: Sequence[str] = ()

    @property
    def has_same_tokens(self) -> bool:
        """Whether the texts that both have are the same."""
        texts = [*zip(self.a.sequences, self.b.sequences, strict=False), *zip(self.a.keys, self.b.keys, strict=False)]
        return all(x.tokens == y.tokens for x, y in texts)

    @property
    def head_pairs(self) -> list[tuple[HeadStatistics, HeadStatistics]]:
        """The heads with statistics in both records; none if the numbers of heads differ."""
        of_b = {head.head: head for head in self.b.heads}
        is_alike = self.a.config.n_heads == self.b.config.n_heads
        return [(head, of_b[head.head]) for head in self.a.heads if is_alike and head.head in of_b]


@dataclass(frozen=True, repr=False)
class RecordDiff(Shown):
    """All differences of two records, whose labels are `names`.

    `tolerance` is relative; `dtype` is the dtype from which it follows, None if the user set it. `settings` are those
    that differ, with the labels of the `layers` concerned. `texts` are the aligned texts, with runs of equal tokens
    (`matches`), of which `n_other_ids` have different ids, and the tokens between them (`changes`). `only_a` and
    `only_b` are the labels of layers in one record alone. `effects` compares `n_compared` removals, and is None unless
    both have proven effects.
    """

    a: Record
    b: Record
    names: tuple[str, str]
    tolerance: float
    dtype: str | None
    settings: list[dict[str, Any]]
    texts: list[dict[str, Any]]
    layers: Sequence[LayerDifference]
    only_a: list[str]
    only_b: list[str]
    effects: dict[str, Any] | None

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
            departed = sorted(layer.sites, key=lambda site: site.site in STATISTICS_OF_ROWS)
            for site in departed:
                if site.departs:
                    return layer, site
        return None

    @property
    def first(self) -> Literal["tokens", "ids", "site", "effects"] | None:
        """Where the records differ first, with inputs before numbers; None if they agree."""
        if len(self.a.sequences) != len(self.b.sequences) or not all(text["is_same"] for text in self.texts):
            return "tokens"
        if any(text["n_other_ids"] for text in self.texts):
            return "ids"
        if self.first_site is not None:
            return "site"
        has_others = self.effects and (self.effects["changes"] or not self.effects["n_compared"])
        return "effects" if has_others else None

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
        n_changed, n_heads = (sum(len(getattr(each, name)) for each in self.layers) for name in ("heads", "head_pairs"))
        parts = [f"{n_changed or 'none'} of {n_heads} head{'s' * (n_heads != 1)} changed"] if n_heads else []
        parts += [self.changed_effects] if self.effects else []
        if self.first is not None:
            return "; ".join([*parts, self.first_text()])
        n_sites = sum(site.is_compared for layer in self.layers for site in layer.sites)
        sites = f" in {n_sites} site{'s' * (n_sites != 1)}" if n_sites else ""
        return "; ".join([f"no difference{sites}", *parts])

    @property
    def changed_effects(self) -> str:
        """The number of changed effects, if there are `effects`: `3 of 72 effects changed`."""
        assert self.effects is not None
        n_changed, n_compared = len(self.effects["changes"]), self.effects["n_compared"]
        if not n_compared:
            return "no removal is in both, so no effects can be compared"
        return f"{n_changed or 'none'} of {n_compared} effect{'s' * (n_compared != 1)} changed"

    def first_text(self, details: str = "") -> str:
        """Where the records differ first, and the first site whose numbers differ, with its details."""
        words = "the effects"
        if self.first_site is not None:
            layer, site = self.first_site
            words = f"{layer.label} {'the mask' if site.site == 'allowed' else site.site}".strip() + details
        if self.first in ("site", "effects"):
            return f"the first difference is in {words}"
        text = f"the first difference is in the {'ids of the ' if self.first == 'ids' else ''}tokens"
        return text + (f"; the first numbers that differ are in {words}" if self.first_site else "")

    def to_dict(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """The document that `mha diff --json` prints, of this `command`."""
        from mhacli.commands.diff.view import verdict_text

        site = self.first_site and {"layer": self.first_site[0].label, "site": self.first_site[1].site}
        at = site if site and self.first == "site" else {"layer": "", "site": None}
        fields = ("sites", "heads", "only_a", "only_b")
        document = {
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


def change_of(a: float | None, b: float | None) -> float:
    """The size of a change; infinite if only one record has a value, 0 if neither has."""
    if a is None or b is None:
        return 0.0 if a == b else math.inf
    return abs(b - a)
