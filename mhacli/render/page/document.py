"""The page of a record: one HTML file with its style, its script and its numbers, that asks no network for anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rich.console import RenderableType

from mhacli.render.base.format import configuration, count_of, fitted
from mhacli.render.base.options import ViewOptions, chosen
from mhacli.render.base.provenance import provenance
from mhacli.render.checkpoint.header import checks_view, model_header
from mhacli.render.heads.head_map import DrawableHead, drawable_heads, scale_of
from mhacli.render.page import assets
from mhacli.render.page.budget import LIMIT_BYTES, Drawn, Maps, drawn_head, exact_maps, fitting_maps
from mhacli.render.page.cells import kept_cells
from mhacli.render.page.html import WIDE, Html, joined, lines_of, tag, text
from mhacli.render.page.notes import notes, quantised_text
from mhacli.render.page.payload import View, payload
from mhacli.render.page.statistics import statistics
from mhacli.render.page.trace import walkthrough
from mhacli.render.run.user_code import module_header
from mhacli.results.record.record import Record
from mhacli.text.escape import visible

_RESERVE = 6 << 10
"""Bytes for what is said of the maps."""
_LEAST_ROOM = LIMIT_BYTES // 4
"""Bytes that maps, and single cells with them, get although tokens and tables alone fill the page."""
_PARTS = (1 / 2, 1 / 4, 1 / 16, 0)
"""What part of the room single cells may take: the first with which maps fit, too."""
_TITLE = 80
_NO_SCRIPT = (
    "Without JavaScript this page shows no patterns: their numbers are in it, packed. What follows can be read without."
)


def page(record: Record, options: ViewOptions) -> str:
    """The whole page, as text to write to a file. Raises `UsageError` for a head, layer or sequence that the record lacks.

    It weighs at most `LIMIT_BYTES`, if that can be, unless `options.full`; it says in words what that cost.
    """
    heads = drawable_heads(record, options)
    sequences = chosen(options.sequences, len(record.sequences), 1, True, "sequence").shown
    begin = 0 if options.heads is not None else surest(heads)
    view = View(heads, sequences, scale_of(options, heads), options.hide_sinks, begin=begin)
    drawn = [drawn_head(head, b, options.rows) for head in heads for b in sequences]
    title = _title(record)
    said, walk = statistics(record, options, view.heads), walkthrough(record)
    frame = _Frame(record, options, view, tuple(drawn), title, said, walk, cells=Html(""))
    if options.full or not drawn:
        return replace(frame, cells=kept_cells(heads, sequences, options, room=None)).whole(exact_maps(drawn))
    for part in _PARTS:
        tried = frame.with_cells(part)
        maps = fitting_maps(drawn, max(tried.room, tried.least_room), rows_first=options.rows is not None)
        if maps.n_bytes <= tried.room or maps.n_bytes > frame.room:  # else fewer cells would help
            break
    return tried.whole(replace(maps, is_small=maps.n_bytes <= tried.room))


def surest(heads: Sequence[DrawableHead]) -> int:
    """Where the head stands whose kind is surest, of those with a kind that can be seen; the first where none has one."""
    named = [
        (-head.statistics.certainty, place)
        for place, head in enumerate(heads)
        if head.statistics is not None
        and head.statistics.certainty is not None
        and head.statistics.kind not in ("mixed", "uniform")
    ]
    return min(named)[1] if named else 0


@dataclass(frozen=True)
class _Frame:
    """Everything of a page but its maps. Statistics, walk and `cells` can be read without a script."""

    record: Record
    options: ViewOptions
    view: View
    drawn: tuple[Drawn, ...]
    title: str
    statistics: Html
    walk: Html
    cells: Html

    @cached_property
    def room(self) -> int:
        """The bytes that are left below the limit; negative where there are none."""
        return LIMIT_BYTES - len(self.whole(exact_maps([])).encode()) - _RESERVE

    @property
    def least_room(self) -> int:
        """The bytes that maps get in any case: what single cells take of it is theirs."""
        return _LEAST_ROOM - len(self.cells.encode())

    def with_cells(self, part: float) -> _Frame:
        """The page with as many single cells as fit in a part of its room; as it is where the record has none."""
        room = int(max(self.room, _LEAST_ROOM) * part)
        cells = kept_cells(self.view.heads, self.view.sequences, self.options, room=room)
        return replace(self, cells=cells) if cells else self

    def whole(self, maps: Maps) -> str:
        """The page with these maps, or none of them."""
        view = replace(self.view, quantised=quantised_text(maps))
        drawn = self.drawn if maps.maps else ()
        told = [*notes(self.record, self.options, view, drawn, maps)]
        sections = _drawn_sections() if view.heads else [_nothing_section(told.pop(0))]
        sections += [self.statistics, *([self.cells] if self.cells else []), self.walk]
        sections += [*([_notes_section(told)] if told else []), _provenance(self.record)]
        content = tag("script", payload(view, maps), type="application/json", id="record")
        script, style = assets.script(), assets.style(has_cells=bool(self.cells))
        body = joined(
            [*_top(self.record, self.title), tag("main", joined(sections)), content, tag("script", Html(script))]
        )
        head = _head(self.title, assets.policy(script, style), style)
        return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>\n'


def _head(title: str, policy: str, style: str) -> Html:
    metas = (
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="referrer" content="no-referrer">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
    )
    return joined(
        [Html("<head>"), *map(Html, metas), tag("title", text(title)), tag("style", Html(style)), Html("</head>")]
    )


def _title(record: Record) -> str:
    """What the page is about, in a line: the model, the module, or the first text."""
    if record.module is not None:
        return f"shapes of {visible(record.module.target)}"
    what = "decoding" if record.decoding is not None else "attention"
    if record.config.random is not None and record.model is None:
        return f"{what} over random rows"
    words = " ".join(record.sequences[0].text[: 8 * _TITLE].split())
    cut = fitted(visible(words), _TITLE)
    more = f" and {count_of(len(record.sequences) - 1, 'text')} more" if len(record.sequences) > 1 else ""
    model = "" if record.model is None else f" in {visible(record.model.path.rstrip('/').rpartition('/')[2])}"
    return f"{what}{model}: “{cut}”{more}"


def _top(record: Record, title: str) -> list[Html]:
    """What stands above everything: the title, what was computed, and room for controls."""
    said: RenderableType = configuration(record, WIDE.width)
    if record.module is not None:
        said = module_header(record, record.module, WIDE)
    elif record.model is not None:
        said = model_header(record, record.model, WIDE)
    origin = tag("div", *(tag("p", line) for line in lines_of(said, WIDE.width)), id="origin")
    skip = tag("a", text("to the chosen head"), href="#chosen", class_="skip", data_script="", hidden="")
    controls = tag("div", id="controls", hidden="")
    return [
        skip,
        tag("header", tag("h1", tag("bdi", text(title))), origin, controls, id="top"),
        tag("noscript", tag("p", text(_NO_SCRIPT), class_="warning")),
    ]


def _nothing_section(why: str) -> Html:
    return tag("section", tag("p", text(why), class_="warning"), id="nothing")


def _drawn_sections() -> list[Html]:
    """What the script fills: small maps of all heads, the chosen one, its tokens."""
    readout = tag("p", id="readout", role="status", aria_live="polite")
    chosen_one = [tag("h2", id="chosen-title"), tag("div", id="matrix-area"), readout]
    return [
        tag("section", tag("h2", text("heads")), tag("div", id="thumbnails"), id="heads", data_script="", hidden=""),
        tag("section", *chosen_one, id="chosen", data_script="", hidden=""),
        tag("section", tag("h2", text("tokens")), tag("div", id="tokens-area"), id="tokens", data_script="", hidden=""),
    ]


def _notes_section(told: Sequence[str]) -> Html:
    items = tag("ul", *(tag("li", text(sentence)) for sentence in told))
    return tag("section", tag("h2", text("how it was drawn")), items, id="notes")


def _provenance(record: Record) -> Html:
    rows = (tag("tr", tag("th", text(word), scope="row"), tag("td", text(line))) for word, line in provenance(record))
    whole = tag("table", tag("caption", text("what made this page")), tag("tbody", *rows))
    checks = [] if record.model is None else [*lines_of(checks_view(record, WIDE), WIDE.width)]
    said = (tag("p", line) for line in checks)
    return tag("section", tag("h2", text("provenance")), tag("div", whole, class_="scroll"), *said, id="provenance")
