"""The viewer's state for all screens: the heads of a record, the one under the cursor, and how
pictures are drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from mhacli.errors import MhaError, UsageError
from mhacli.record.record import Record
from mhacli.render.base.options import Scale, ViewOptions
from mhacli.render.base.selection import DrawableHead, is_among, scale_of
from mhacli.settings import LayerChoices

if TYPE_CHECKING:  # numpy is imported after the first screen is visible
    from .picture import Picture

Place = tuple[int, int]
"""The row of a head's layer, and the head's number."""
_KEPT_CELLS = 4_000_000
"""The most cells of cached pictures, about 100 MB."""


class Session:
    """The state of the viewer. `rows` are the names of layers in the order of execution, `heads`
    the heads by place, also those that cannot be drawn. `fault` is why a picture could not be read.
    """

    def __init__(
        self, record: Record, *, colour: bool, scale: Scale | None, hides_sinks: bool, sequence: int
    ) -> None:
        self.record = record
        self.colour = colour
        self.sequence = sequence
        self.has_sinks = any(
            head.sink_keys or head.learned_sink is not None for head in record.heads
        )
        self.hides_sinks = hides_sinks and self.has_sinks
        self.rows = [layer.name for layer in record.attentions]
        self.heads = dict[Place, DrawableHead]()
        for row, layer in enumerate(record.attentions):
            for place, head in enumerate(layer.record.heads):
                self.heads[row, head.head] = DrawableHead(layer, place)
        self.scale = scale_of(ViewOptions(map_scale=scale), [*self.heads.values()])
        self.place = next(iter(self.heads), (0, 0))
        self.fault: MhaError | None = None
        longest = max(len(text.tokens) for text in (*record.sequences, *record.keys))
        self._picture = lru_cache(maxsize=1 + _KEPT_CELLS // (longest + 1) ** 2)(self._read)
        self._top = cache(self._largest)

    @property
    def head(self) -> DrawableHead:
        """The head under the cursor."""
        return self.heads[self.place]

    def choose(self, number: int | None, layers: LayerChoices) -> None:
        """Moves to the first head with this number (None: any) in one of the layers (None: any).

        Raises `UsageError` if there is none.
        """
        for place, head in self.heads.items():
            has_layer = layers is None or (
                head.layer.label and is_among(head.layer.inspected, layers)
            )
            if has_layer and number in (None, head.statistics.head):
                self.place = place
                return
        choices = [f"{kind or 'layer'} {layer}" for kind, layer in layers or ()]
        if number is not None:
            choices.append(f"head {number}")
        if choices:
            raise UsageError(f"{', '.join(choices)} is not in the record")

    def picture(self, place: Place | None = None) -> Picture | None:
        """The picture of a head (None: of that under the cursor); None if the record lacks its
        weights, or before numpy is imported.
        """
        place = place or self.place
        if not self.heads[place].layer.is_drawable or "mhacli.viewer.picture" not in sys.modules:
            return None
        try:
            return self._picture(place, self.sequence, self.scale, self.hides_sinks)
        except MhaError as fault:
            self.fault = fault
            return None

    def _read(self, place: Place, *_: object) -> Picture:
        """The picture of a head; the other arguments are what else it depends on."""
        from .picture import Picture

        return Picture(self, self.heads[place], self._top(self.hides_sinks))

    def _largest(self, hides_sinks: bool) -> float:
        """The top of the scale that all heads of the record share, as on a page and in figures."""
        from mhacli.render.heads.head_map import head_map, largest_of_maps

        sequences = range(len(self.record.sequences))
        maps = (head_map(head, sequence) for head in self.heads.values() for sequence in sequences)
        return largest_of_maps(cells.without_sinks() if hides_sinks else cells for cells in maps)

    def why_nothing(self) -> str:
        """Why a head cannot be drawn, or not yet."""
        if self.fault is not None:
            return self.fault.typed_message
        if "mhacli.viewer.picture" not in sys.modules:
            return "pictures follow"
        return "the record holds no pattern of this head: --keep pattern keeps it"


def places_ahead(places: Collection[Place], at: Place, down: int, right: int) -> list[Place]:
    """The places in a direction, the nearest first."""
    axis = 1 if down else 0  # which stays the same
    line = sorted({at, *(place for place in places if place[axis] == at[axis])})
    here = line.index(at)
    return line[here + 1 :] if down + right > 0 else line[:here][::-1]
