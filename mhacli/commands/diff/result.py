"""The results of `mha diff` as data: the differences of two records, and those of two models."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from mhacli.io.data import plain
from mhacli.record.heads import Kind
from mhacli.record.record import Record
from mhacli.record.shown import Shown

SCHEMA = "mha.diff/1"
Verdict = Literal["agree", "differ", "nothing"]
Part = Literal["embedding", "attention", "mlp", "norm", "logits"]
Stack = Literal["encoder", "decoder", "cross"]
MAPPED = "mapped "
"""What the site of a module begins with that was asked for by its name."""


Document = TypeVar("Document", "RecordDocument", "ModelDocument")


class Diff(dict[str, Any], Shown, Generic[Document]):
    """The document that `mha diff --json` prints, which also shows itself as the command does.
    `verdict` says whether the two are equal up to rounding in all that was compared, `nothing`
    if that is nothing; `ok` is True if they agree; `summary` is the result in a sentence.
    """

    def __init__(self, document: Document) -> None:
        super().__init__(plain(document))
        self.document: Document = document
        self.verdict: Verdict = document.verdict
        self.ok = self.verdict == "agree"
        self.summary = document.summary

    def __repr__(self) -> str:
        """The result in a sentence."""
        return f"<Diff: {self.summary}>"

    def to_dict(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """The document, of this `command`."""
        return {**self, "command": [*command]}


# -------------------------------------------------------------------------------------- two records


class TokenChange(msgspec.Struct, frozen=True):
    """Tokens of A, of B, or of both, between equal ones, with their first position and the one
    after the last.
    """

    change: Literal["replaced", "only A", "only B"]
    a_begin: int
    a_end: int
    a: list[str]
    b_begin: int
    b_end: int
    b: list[str]


class Match(msgspec.Struct, frozen=True):
    """A run of equal tokens: its positions in A and in B."""

    a: int
    b: int
    length: int


class TextDifference(msgspec.Struct, frozen=True):
    """Runs of equal tokens of a text of A and one of B (`matches`), some with other ids, and the
    tokens between (`changes`).
    """

    family: str
    sequence: int
    n_a: int
    n_b: int
    matches: list[Match]
    n_other_ids: int
    exact: bool
    n_aligned: int
    is_same: bool
    n_replaced: int
    changes: list[TokenChange]


class CellPlace(msgspec.Struct, frozen=True):
    """The place of a number by the names of its axes, with its indices in A and in B: tokens of
    their text, and numbers of heads.
    """

    axes: list[str]
    a: list[int]
    b: list[int]


class HeadGap(msgspec.Struct, frozen=True):
    """The largest difference of a head at a site, None if it is not finite, and its sequence."""

    head: int
    largest: float | None
    sequence: int


class FormulaChange(msgspec.Struct, frozen=True):
    """Two formulas of a step."""

    a: str
    b: str
    name: str = "formula"
    layers: tuple[str, ...] = ()


class SiteDifference(msgspec.Struct, frozen=True):
    """The comparison of one site of one layer: of arrays, of all numbers of a small tensor in
    traces, of extremes and moments, or of shapes alone (`seen`). `status` is equal bits of all
    numbers, within the tolerance, beyond it, another shape or formula, or not compared (`why`),
    such as numbers that one record lacks. `largest` is the largest |B − A| of numbers finite in
    both, `magnitude` the largest number of either, and `relative` their ratio. `n_different` cells
    are unequal; `n_nonfinite` of them are not finite in one, or differently in both; of a mask one
    record alone allows `n_only_a` and `n_only_b`. `at` is the place of the largest or first
    difference, and `told` are other formulas.
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
    at: CellPlace | None = None
    why: str = ""
    heads: list[HeadGap] = []
    told: list[FormulaChange] = []
    relative: float | None = None

    @property
    def departs(self) -> bool:
        """Whether the records differ here."""
        return self.status in ("beyond", "shape")

    @property
    def is_compared(self) -> bool:
        """Whether numbers of both were compared."""
        return self.seen != "shape" and self.status in ("identical", "within", "beyond")

    @property
    def has_same_shape(self) -> bool:
        """Whether both have it, with the same shape, and its numbers were not compared."""
        is_known = self.seen == "shape" and self.shape_a is not None
        return is_known and self.status == "skipped" and self.shape_a == self.shape_b


class StatisticChange(msgspec.Struct, frozen=True):
    """A statistic of a head that changed, None in a record that lacks it."""

    name: str
    a: float | None
    b: float | None


class HeadChange(msgspec.Struct, frozen=True):
    """A head that changed, with its types; `size` is the largest change of a weight, None if a
    number is missing or new.
    """

    layer: str
    head: int
    kind_a: Kind
    kind_b: Kind
    size: float | None
    statistics: list[StatisticChange]


class LayerDifference(msgspec.Struct, frozen=True):
    """The sites of a layer, the heads that changed, and the arrays of A alone, and of B alone."""

    layer: str
    sites: list[SiteDifference]
    heads: list[HeadChange]
    only_a: list[str]
    only_b: list[str]


class Site(msgspec.Struct, frozen=True):
    """A site of a layer."""

    layer: str
    site: str


class First(msgspec.Struct, frozen=True):
    """In what two records first differ, and the site, if it is one."""

    where: Literal["tokens", "ids", "site"]
    layer: str = ""
    site: str | None = None


class UsedTolerance(msgspec.Struct, frozen=True):
    """The tolerance, relative to the largest number of a site, and the dtype from which it follows,
    None if the user set it.
    """

    relative: float
    of_dtype: str | None


class RecordDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of two records, their layers in the order of execution; `said` is the summary
    again, as documents have had it. `settings` and `effects` are always empty.
    """

    schema: str = SCHEMA
    command: list[str] = []
    verdict: Verdict
    summary: str
    said: str
    a: str
    b: str
    tolerance: UsedTolerance
    first: First | None
    first_site: Site | None
    n_sequences: tuple[int, int]
    texts: list[TextDifference]
    layers: list[LayerDifference]
    only_a: list[str]
    only_b: list[str]
    settings: list[str] = []
    effects: None = None


class RecordDiff(Diff[RecordDocument]):
    """The differences of two records."""

    def __init__(self, document: RecordDocument, records: tuple[Record, Record]) -> None:
        super().__init__(document)
        self.records = records

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of `--csv`: a site of a layer, or a statistic of a head."""
        for layer in self["layers"]:
            label = layer["layer"]
            for site in layer["sites"]:
                fields = {name: site[name] for name in site if name not in ("heads", "told")}
                yield {"layer": label, **fields}
            for head in layer["heads"]:
                for row in head["statistics"]:
                    about = {"layer": label, "head": head["head"], "statistic": row["name"]}
                    yield {**about, "a": row["a"], "b": row["b"]}


# --------------------------------------------------------------------------------------- two models


class Layer(NamedTuple):
    """The number of a layer in its stack, None outside of layers."""

    stack: Stack | None
    number: int | None


class Located(msgspec.Struct, frozen=True):
    """Where a model computes something: a `site` in a `part` of a layer. The embedding, the final
    norm and the logits have no layer.
    """

    layer: int | None
    stack: Stack | None
    part: Part
    site: str

    @property
    def of_layer(self) -> Layer:
        """The stack and the number of its layer."""
        return Layer(self.stack, self.layer)

    @property
    def where(self) -> dict[str, Any]:
        """The layer, the stack, the part and the site by these names."""
        return {name: getattr(self, name) for name in Located.__struct_fields__}


class _OfBoth(Located, frozen=True):
    """A place of one model or of both, with the names of the modules; the `number` of one that is
    compared or not counts the earlier places of the same kind, such as tables of embeddings.
    """

    name_a: str | None
    name_b: str | None


class Difference(_OfBoth, frozen=True):
    """The difference of two models at a place: `relative` to what the first computes, the `largest`
    of a number with its indices `at`, and the `head` that differs most; None for what is not
    finite. These are kv heads if query heads share them, and query heads where keys were repeated.
    It is `beyond` rounding, and so are `heads`; it is `healed` if what follows from it
    agrees again, such as after two implementations that scale in another order.
    """

    relative: float | None
    rounding: float
    largest: float | None
    at: tuple[int, ...] | None
    head: int | None
    heads: tuple[int, ...]
    n_heads: int
    beyond: bool
    healed: bool = False
    number: int = 0
    of_kv_heads: bool = False


class Unmatched(_OfBoth, frozen=True):
    """A place that could not be compared, and why."""

    why: str
    number: int = 0


class ModelDocument(msgspec.Struct, frozen=True):
    """The differences of two models at the `places` that both have, in the order of execution of
    the first, the other places, the dtypes of both, and notes. Nothing is compared of two models
    that read other `ids`. `random_weights` has the seed of a model, `a` or `b`, whose weights were
    drawn for a config without any.
    """

    schema: str = SCHEMA
    kind: Literal["models"] = "models"
    command: list[str] = []
    a: str = ""
    b: str = ""
    places: list[Difference] = []
    unmatched: list[Unmatched] = []
    notes: list[str] = []
    dtypes: list[str] = []
    times_rounding: int | None = None
    ids: tuple[list[int], list[int]] | None = None
    first: Difference | None = None
    verdict: Literal["agree", "differ"] = "agree"
    summary: str = ""
    random_weights: dict[str, int] = {}


class ModelDiff(Diff[ModelDocument]):
    """The differences of two models."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of `--csv`: a place."""
        for place in self["places"]:
            yield {name: value for name, value in place.items() if name != "heads"}
