"""The viewer's state for all screens: the record, the head under the cursor, and the settings of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from mhacli.record.arrays import read_arrays
from mhacli.record.consistency import contradictions
from mhacli.record.record import Record
from mhacli.render.base.options import Scale, ViewOptions
from mhacli.render.heads.drawable import scale_of
from mhacli.text.escape import visible
from mhacli.viewer.head_table import HeadTable, TableHead, head_table

if TYPE_CHECKING:  # numpy is imported after the first screen is visible
    from mhacli.viewer.picture import Picture

_SCALES: tuple[Scale, ...] = get_args(Scale)
_KEPT_PICTURES = 64
"""The most pictures in the cache. Of large maps, which may take hundreds of megabytes, only the last is kept."""
_LARGE = 1_000_000


@dataclass(frozen=True)
class ViewerOptions:
    """The initial state of the viewer.

    `place` is a row and column in the table of heads, None for the first; `is_open` opens that head at once. `scale`
    None: linear for short texts, log for long ones and blocks.
    """

    colour: bool = True
    scale: Scale | None = None
    hides_sinks: bool = False
    sequence: int = 0
    place: tuple[int, int] | None = None
    is_open: bool = False


class Session:
    """The state of the viewer. `has_sinks`: whether any head has a sink key or a sink logit."""

    def __init__(self, record: Record, options: ViewerOptions) -> None:
        self.record, self.colour = record, options.colour
        self.head_table: HeadTable = head_table(record)
        self.sequence, self.scale = options.sequence, options.scale
        self.has_sinks = any(head.sink_keys or head.learned_sink is not None for head in record.heads)
        self.hides_sinks = options.hides_sinks and self.has_sinks
        self.place = options.place or next(iter(self.head_table.places), (0, 0))
        self._pictures: dict[tuple[object, ...], Picture] = {}
        self._contradicts: dict[int, bool] = {}

    def contradicts_itself(self) -> bool:
        """Whether the record, as far as it is read, contains contradictions."""
        n_read = len(read_arrays(self.record.arrays))
        if n_read not in self._contradicts:
            self._contradicts[n_read] = bool(contradictions(self.record))
        return self._contradicts[n_read]

    def head(self) -> TableHead:
        """The head under the cursor."""
        head = self.head_table.head_at(*self.place)
        assert head is not None, "the cursor stands on heads alone"
        return head

    def picture(self) -> Picture | None:
        """The picture of the head; None if it cannot be drawn."""
        return self.picture_of(self.head())

    def picture_of(self, head: TableHead) -> Picture | None:
        """The cached picture of a head."""
        key = (head, self.sequence, self.scale, self.hides_sinks)
        if key not in self._pictures:
            picture = self.new_picture_of(head)
            if picture is None:
                return None
            is_large = picture.n_rows * picture.n_columns > _LARGE
            while self._pictures and (is_large or len(self._pictures) >= _KEPT_PICTURES):
                self._pictures.pop(next(iter(self._pictures)))
            self._pictures[key] = picture
        return self._pictures[key]

    def new_picture_of(self, head: TableHead) -> Picture | None:
        """The picture of a head, not cached."""
        from mhacli.viewer.picture import Picture

        if head.drawable is None:
            return None
        return Picture(head, head.drawable, self.sequence, self.scale_for(head), self.hides_sinks)

    def scale_for(self, head: TableHead) -> Scale:
        """The scale of a head's picture: the chosen one, or its default."""
        return scale_of(ViewOptions(map_scale=self.scale), [] if head.drawable is None else [head.drawable])

    def why_nothing(self) -> str:
        """Why a head cannot be drawn, and how to keep its pattern."""
        if self.record.survey is None and self.record.model is None:
            return "the record holds no pattern: mha run … --keep pattern keeps it"
        return "the record holds neither a pattern nor a map of this head"

    def scale_words(self) -> str:
        """The shading of thumbnails in words."""
        shown = "sinks shown" if self.has_sinks else "no sinks"
        sinks = "sinks taken out, rows renormalised" if self.hides_sinks else shown
        return f"pictures: {self.scale_for(self.head())}, each up to its own maximum · {sinks}"

    def picture_facts(self) -> Sequence[tuple[str, str]]:
        """The settings of the picture, as lines for the provenance page."""
        from mhacli.viewer.picture import scale_range, sink_words

        shown = self.picture() if self.head_table.places else None
        if shown is None:
            return ()
        kept = [("not kept", ", ".join(map(visible, self.record.not_kept)))] if self.record.not_kept else []
        return [
            ("drawn", shown.head.label),
            ("scale", f"{shown.scale}, {scale_range(shown.at(1), shown.scale)}"),
            ("sinks", sink_words(shown)),
            *kept,
        ]

    # ---------------------------------------------------------------------------------------------------------- what changes

    def to_head(self, step: int) -> None:
        """Selects the next or previous head."""
        self.place = self.head_table.beside(self.place, step)

    def to_layer(self, step: int) -> bool:
        """Selects the same head of another layer; False if there is none."""
        before, self.place = self.place, self.head_table.above(self.place, step)
        return self.place != before

    def to_sequence(self, step: int) -> bool:
        """Selects another sequence, around the ends; False if there is only one."""
        self.sequence = (self.sequence + step) % len(self.record.sequences)
        return len(self.record.sequences) > 1

    def to_next_scale(self) -> None:
        """Changes between linear and log."""
        now = self.scale_for(self.head())
        self.scale = _SCALES[(_SCALES.index(now) + 1) % len(_SCALES)]

    def toggle_sinks(self) -> bool:
        """Hides or shows sinks; False if no head has one."""
        self.hides_sinks = self.has_sinks and not self.hides_sinks
        return self.has_sinks
