"""The heads of a record that can be drawn, and their scale. Needs no numpy, so that the viewer starts quickly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhacli.record.heads import HeadStatistics
from mhacli.record.record import Record
from mhacli.render.base.options import Scale, ViewOptions, chosen
from mhacli.render.base.selection import chosen_layers, names_of, places_of, ranges, require_inspected_heads
from mhacli.text.escape import visible

if TYPE_CHECKING:  # imported only for records with arrays
    from mhacli.record.record import InspectedLayer

_SHORT = 64
"""The most keys for which a uniform attention weight is visible on a linear scale."""


@dataclass(frozen=True)
class DrawableHead:
    """A head that can be drawn: its layer's record, its index on the head axis, its number, and its statistics, if any.

    `layer` is None for mha's own layer.
    """

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
        """Whether the record has the head's cells, rather than blocks."""
        survey = self.record.survey
        return "pattern" in self.record.arrays or (survey is not None and survey.block == 1)


def drawable_heads(record: Record, options: ViewOptions) -> tuple[DrawableHead, ...]:
    """The heads chosen by the options, or all, whose pattern or map is in the record, in the order of execution.

    Raises `UsageError` for a head or layer that the record lacks.
    """
    if record.model is None:
        return tuple(_of_one_layer(record, options))
    layers = chosen_layers(record, options)
    require_inspected_heads(layers, options.heads or ())
    return tuple(
        DrawableHead(layer.record, place, head.head, head, layer.inspected)
        for layer in layers
        for place, head in enumerate(layer.record.heads)
        if (options.heads is None or head.head in options.heads) and layer.is_drawable
    )


def _of_one_layer(record: Record, options: ViewOptions) -> Iterator[DrawableHead]:
    statistics_of = {head.head: head for head in record.heads}
    if "pattern" in record.arrays:
        for head in chosen(options.heads, record.config.n_heads, 0, True, "head").shown:
            yield DrawableHead(record, head, head, statistics_of.get(head))
    elif "map" in record.arrays:
        for place in range(len(record.heads)) if options.heads is None else places_of(record, options.heads):
            yield DrawableHead(record, place, record.heads[place].head, record.heads[place])


def missing_notes(record: Record, options: ViewOptions) -> Iterator[str]:
    """What pictures of a record's heads leave out."""
    if record.config.train:
        p = record.config.dropout
        yield f"the pattern is drawn before dropout ({p:g}); the layer's output was computed after dropout"
    if record.dims.padded:
        yield "padding gets no attention and is left out"
    if record.model is None:
        return
    without = [layer.inspected for layer in chosen_layers(record, options) if not layer.is_drawable]
    if without:
        yield f"not drawn, because the record has neither pattern nor map: {names_of(without)}; --keep-limit makes room"
    for kind in dict.fromkeys(other.type for other in record.model.without if options.layers is None):
        numbers = [other.layer for other in record.model.without if other.type == kind]
        yield f"without an attention matrix: layer{'s' * (len(numbers) > 1)} {ranges(numbers)}, {visible(kind)}"


def scale_of(options: ViewOptions, heads: Sequence[DrawableHead]) -> Scale:
    """The requested scale; else linear for cells of short texts, and log for long texts and blocks, which would be
    dark."""
    keys = (keys.tokens for head in heads for keys in head.record.keys)
    is_exact = all(head.is_exact for head in heads)
    return options.map_scale or (usual_scale(keys) if is_exact else "log")


def usual_scale(texts: Iterable[Sequence[str]]) -> Scale:
    """The scale of cells over these keys: linear for short texts, and log for long ones."""
    return "linear" if all(len(keys) <= _SHORT for keys in texts) else "log"
