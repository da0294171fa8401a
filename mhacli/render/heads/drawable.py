"""Which heads of a record can be drawn, and on which scale: without numpy, which the viewer's first screen does not wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhacli.render.base.options import Scale, ViewOptions, chosen
from mhacli.render.base.selection import chosen_layers, places_of, require_inspected_heads
from mhacli.results.record.head_statistics import HeadStatistics
from mhacli.results.record.record import Record

if TYPE_CHECKING:  # loaded where a record has them
    from mhacli.results.record.record import InspectedLayer

SHORT = 64
"""Up to so many keys a uniform attention weight is a shade that can be told from nothing on a linear scale."""


@dataclass(frozen=True)
class DrawableHead:
    """A head that can be drawn: the record of its layer, its place on the head axis there, its number, and its statistics, None
    where the record has none. `layer` is None for a layer of our own."""

    record: Record
    place: int
    head: int
    statistics: HeadStatistics | None = None
    layer: InspectedLayer | None = None

    @property
    def label(self) -> str:
        """`layer 3 · head 5`, or `head 5`."""
        name = f"head {self.head}"
        return name if self.layer is None else f"{self.layer.label} · {name}"

    @property
    def is_exact(self) -> bool:
        """Whether the record holds its cells; else it holds sums of blocks."""
        survey = self.record.survey
        return "pattern" in self.record.arrays or (survey is not None and survey.block == 1)


def drawable_heads(record: Record, options: ViewOptions) -> tuple[DrawableHead, ...]:
    """The heads that options choose, or all, in the order of execution: those of which the record holds the pattern or a map.

    Raises `UsageError` for a head or layer that it does not have.
    """
    if record.model is None:
        return tuple(_of_our_own(record, options))
    layers = chosen_layers(record, options)
    require_inspected_heads(layers, options.heads or ())
    return tuple(
        DrawableHead(layer.record, place, head.head, head, layer.inspected)
        for layer in layers
        for place, head in enumerate(layer.record.heads)
        if (options.heads is None or head.head in options.heads) and layer.is_drawable
    )


def _of_our_own(record: Record, options: ViewOptions) -> Iterable[DrawableHead]:
    known = {head.head: head for head in record.heads}
    if "pattern" in record.arrays:
        heads = chosen(options.heads, record.config.n_heads, 0, True, "head").shown
        return [DrawableHead(record, head, head, known.get(head)) for head in heads]
    if "map" not in record.arrays:
        return []
    places = range(len(record.heads)) if options.heads is None else places_of(record, options.heads)
    return [DrawableHead(record, place, record.heads[place].head, record.heads[place]) for place in places]


def is_before_dropout(record: Record) -> bool:
    """Whether the layer was in training: it did not compute with the pattern that is drawn, but with what dropout left of it."""
    return record.config.train


def scale_of(options: ViewOptions, heads: Sequence[DrawableHead]) -> Scale:
    """The scale that was asked for; else linear for the cells of short texts, and log for those of long ones and for blocks,
    whose attention weights lie further apart: linear, they would be dark."""
    is_short = all(len(keys.tokens) <= SHORT for head in heads for keys in head.record.keys)
    return options.map_scale or ("linear" if is_short and all(head.is_exact for head in heads) else "log")
