"""The viewer's state for all screens: the heads of a record, the one under the cursor, and how pictures are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from mhacli.errors import MhaError, UsageError
from mhacli.record.arrays import read_arrays
from mhacli.record.consistency import contradictions
from mhacli.record.record import Record
from mhacli.render.base.options import Scale, ViewOptions
from mhacli.render.base.selection import short_name
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, scale_of
from mhacli.text.escape import visible
from mhacli.text.tokens import LayerChoice

if TYPE_CHECKING:  # numpy is imported after the first screen is visible
    from mhacli.record.record import InspectedLayer, NonAttentionLayer
    from mhacli.viewer.matrix import Picture

Place = tuple[int, int]
"""The row of a head's layer, and the head's number."""
_KEPT_CELLS = 4_000_000
"""The most cells of cached pictures, about 100 MB."""


class Session:
    """The state of the viewer. `rows` are the names of layers in the order of execution, `heads` the heads by place. `fault`
    is why a picture could not be read."""

    def __init__(
        self,
        record: Record,
        *,
        colour: bool = True,
        scale: Scale | None = None,
        hides_sinks: bool = False,
        sequence: int = 0,
    ) -> None:
        self.record, self.colour, self.sequence, self.scale = record, colour, sequence, scale
        self.has_sinks = any(head.sink_keys or head.learned_sink is not None for head in record.heads)
        self.hides_sinks = hides_sinks and self.has_sinks
        self.rows: list[str] = []
        self.heads: dict[Place, DrawableHead] = {}
        drawable = drawable_heads(record, ViewOptions())
        for row, (name, layer, view) in enumerate(_layers(record)):
            self.rows.append(name)
            if view is not None:
                without = [DrawableHead(view, place, head.head, head, layer) for place, head in enumerate(view.heads)]
                listed = [head for head in drawable if head.layer is layer] or without
                self.heads |= {(row, head.head): head for head in listed}
        self.place = next(iter(self.heads), (0, 0))
        self.fault: MhaError | None = None
        self._pictures: dict[tuple[object, ...], Picture] = {}
        self._top = cache(self._largest)
        self._is_contradicted = cache(lambda n_read: bool(contradictions(record)))

    @property
    def head(self) -> DrawableHead:
        """The head under the cursor."""
        return self.heads[self.place]

    def choose(self, number: int | None, layers: Sequence[LayerChoice] | None) -> None:
        """Moves to the first head with this number (None: any) in one of the layers (None: any).

        Raises `UsageError` if there is none.
        """
        places = [place for place, head in self.heads.items() if _is_chosen(head, number, layers)]
        if places:
            self.place = places[0]
        elif number is not None or layers is not None:
            names = [str(n) if kind is None else f"{kind}.{n}" for kind, n in layers or ()]
            layer = f"--layer {', '.join(names)} " if names else ""
            head = "" if number is None else f"--head {number} "
            raise UsageError(f"{layer}{head}is not in the record")

    def contradicts_itself(self) -> bool:
        """Whether the record, as far as it is read, contains contradictions."""
        return self._is_contradicted(len(read_arrays(self.record.arrays)))

    # ---------------------------------------------------------------------------------------------------------- pictures

    def picture(self, head: DrawableHead | None = None) -> Picture | None:
        """The picture of a head (None: of that under the cursor); None if the record lacks its weights."""
        from mhacli.viewer.matrix import Picture

        head = head or self.head
        if "pattern" not in head.record.arrays and "map" not in head.record.arrays:
            return None
        key = (id(head), self.sequence, self.scale, self.hides_sinks)
        if key not in self._pictures:
            try:
                picture = Picture(
                    head, self.sequence, self.scale_of(head), self._top(self.hides_sinks), hides_sinks=self.hides_sinks
                )
            except MhaError as fault:
                self.fault = fault
                return None
            if len(self._pictures) * picture.weights.size > _KEPT_CELLS:
                self._pictures.clear()
            self._pictures[key] = picture
        return self._pictures[key]

    def _largest(self, hides_sinks: bool) -> float:
        """The top of the scale that all heads of the record share, as on a page and in figures."""
        from mhacli.render.heads.head_map import head_map, largest_of_maps

        sequences = range(len(self.record.sequences))
        maps = (head_map(head, sequence) for head in self.heads.values() for sequence in sequences)
        return largest_of_maps(each.without_sinks() if hides_sinks else each for each in maps)

    def scale_of(self, head: DrawableHead) -> Scale:
        """The scale of a head's picture: the chosen one, or its default."""
        return scale_of(ViewOptions(map_scale=self.scale), [head])

    def why_nothing(self) -> str:
        """Why a head cannot be drawn."""
        without = "the record holds no pattern of this head: --keep pattern keeps it"
        return without if self.fault is None else self.fault.message


def _layers(record: Record) -> Iterator[tuple[str, InspectedLayer | None, Record | None]]:
    """The name, layer and record of each row. A layer without attention has no record, and its type in its name."""
    if record.model is None:
        yield "", None, record
        return
    missing = list(record.model.without)
    for index, layer in enumerate(record.layers):
        while missing and layer.kind != "encoder" and missing[0].layer < layer.layer:
            yield _without_attention(missing.pop(0))
        yield short_name(layer, record.layers), layer, record.of_layer(index)
    yield from map(_without_attention, missing)


def _without_attention(layer: NonAttentionLayer) -> tuple[str, None, None]:
    return f"{layer.layer} {visible(layer.type)}", None, None


def _is_chosen(head: DrawableHead, number: int | None, layers: Sequence[LayerChoice] | None) -> bool:
    layer = head.layer
    is_of_layer = layers is None or (
        layer is not None and any(layer.layer == n and kind in (None, layer.kind) for kind, n in layers)
    )
    return is_of_layer and number in (None, head.head)
