"""The heads of a record as a table: a row for each layer, a column for each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhacli.errors import UsageError
from mhacli.record.heads import HeadStatistics
from mhacli.record.record import Record
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import listed_numbers, short_name
from mhacli.render.heads.drawable import DrawableHead, drawable_heads
from mhacli.text.escape import visible
from mhacli.text.tokens import LayerChoice

if TYPE_CHECKING:  # imported only for records with arrays
    from mhacli.record.record import InspectedLayer, NonAttentionLayer


@dataclass(frozen=True, eq=False)
class TableHead:
    """A head with its statistics and its drawable map, each None if the record lacks it. `record` is its layer's."""

    record: Record
    head: int
    label: str
    statistics: HeadStatistics | None
    drawable: DrawableHead | None
    layer: InspectedLayer | None = None

    def is_of(self, layers: Sequence[LayerChoice]) -> bool:
        """Whether the head is in one of the layers, each given by kind (None: any) and number."""
        if self.layer is None:
            return False
        return any(self.layer.layer == n and kind in (None, self.layer.kind) for kind, n in layers)


@dataclass(frozen=True)
class LayerRow:
    """A layer: its short name, and its heads by column, None for heads that were not inspected.

    `instead` is the type of a layer without attention.
    """

    name: str
    heads: tuple[TableHead | None, ...] = ()
    instead: str = ""


@dataclass(frozen=True)
class HeadTable:
    """All heads: rows are layers in the order of execution, and columns are head numbers."""

    rows: tuple[LayerRow, ...]
    columns: tuple[int, ...]

    def head_at(self, row: int, column: int) -> TableHead | None:
        """The head at a row and column, or None."""
        heads = self.rows[row].heads
        return heads[column] if 0 <= column < len(heads) else None

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The row and column of every head, in the order of execution."""
        return tuple((r, c) for r, row in enumerate(self.rows) for c, head in enumerate(row.heads) if head is not None)

    def place_of(self, head: int | None, layers: Sequence[LayerChoice] | None) -> tuple[int, int] | None:
        """The row and column of the first head with this number (None: any) in one of the layers (None: any); None
        without a request.

        Raises `UsageError` for a head that does not exist.
        """
        if head is None and layers is None:
            return None
        for place in self.places:
            entry = self.head_at(*place)
            if entry is not None and head in (None, entry.head) and (layers is None or entry.is_of(layers)):
                return place
        if layers is not None:
            raise UsageError(f"{_typed(head, layers)} is not in the record")
        raise UsageError(f"--head {head} is not in the record, which has {listed_numbers(self.columns)}")

    def beside(self, place: tuple[int, int], step: int) -> tuple[int, int]:
        """The next or previous head, across layers and around the ends."""
        places = self.places
        return places[(places.index(place) + step) % len(places)]

    def above(self, place: tuple[int, int], step: int) -> tuple[int, int]:
        """The same head of the next or previous layer that has one; unchanged without one."""
        row, column = place[0] + step, place[1]
        while 0 <= row < len(self.rows):
            if self.head_at(row, column) is not None:
                return row, column
            row += step
        return place


def head_table(record: Record) -> HeadTable:
    """Every head with statistics, a pattern or a map in the record."""
    drawable = drawable_heads(record, ViewOptions())
    if record.model is None:
        return _laid_out(record, [("", None, record, drawable)])
    layers = []
    for index, layer in enumerate(record.layers):
        heads_of_layer = [head for head in drawable if head.layer is layer]
        view = heads_of_layer[0].record if heads_of_layer else record.of_layer(index)
        layers.append((short_name(layer, record.layers), layer, view, heads_of_layer))
    laid = _laid_out(record, layers)
    return HeadTable(_with_missing(laid.rows, record), laid.columns)


_Layer = tuple[str, "InspectedLayer | None", Record, Sequence[DrawableHead]]


def _laid_out(record: Record, layers: Sequence[_Layer]) -> HeadTable:
    columns = sorted(
        {h.head for _, _, view, _ in layers for h in view.heads} | {h.head for layer in layers for h in layer[3]}
    )
    rows = []
    for name, layer, view, heads_of_layer in layers:
        statistics, drawable = {h.head: h for h in view.heads}, {h.head: h for h in heads_of_layer}
        entries = tuple(
            TableHead(view, head, _label(layer, head, record.layers), statistics.get(head), drawable.get(head), layer)
            if head in statistics or head in drawable
            else None
            for head in columns
        )
        rows.append(LayerRow(name, entries))
    return HeadTable(tuple(rows), tuple(columns))


def _typed(head: int | None, layers: Sequence[LayerChoice]) -> str:
    named = ", ".join(str(n) if kind is None else f"{kind}.{n}" for kind, n in layers)
    return f"--layer {named}" + ("" if head is None else f" --head {head}")


def _label(layer: InspectedLayer | None, head: int, layers: Sequence[InspectedLayer]) -> str:
    """The layer and the head, with the module's name if the layer has several attentions of one kind."""
    if layer is None:
        return f"head {head}"
    has_twin = sum(other.label == layer.label for other in layers) > 1
    return f"{layer.label} · " + (f"{visible(layer.name)} · " if has_twin else "") + f"head {head}"


def _with_missing(rows: Sequence[LayerRow], record: Record) -> tuple[LayerRow, ...]:
    assert record.model is not None
    missing = list(record.model.without)
    with_missing: list[LayerRow] = []
    for row, layer in zip(rows, record.layers, strict=True):
        while missing and layer.kind != "encoder" and missing[0].layer < layer.layer:
            with_missing.append(_row_without(missing.pop(0)))
        with_missing.append(row)
    return (*with_missing, *map(_row_without, missing))


def _row_without(layer: NonAttentionLayer) -> LayerRow:
    return LayerRow(str(layer.layer), instead=visible(layer.type))
