"""Heatmaps of the heads that changed most: A, B, and B − A, on common axes and scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.color import Color
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from mhacli.errors import UsageError
from mhacli.render.base.cells import FORBIDDEN, NOT_A_NUMBER, levels, range_text
from mhacli.render.base.colours import (
    GLYPHS,
    NAN_SIGN,
    change_glyph,
    change_paint,
    change_style,
    glyph,
    half_block,
    ramp_paint,
    shade,
)
from mhacli.render.base.format import fitted, number_text, share_text
from mhacli.render.base.options import Scale, Screen, ViewOptions, chosen
from mhacli.render.base.tables import title_rule
from mhacli.render.diff.grids import Grids, grids
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, is_before_dropout, scale_of
from mhacli.render.heads.head_map import head_map
from mhacli.results.diff.result import Differences, LayerDifference, SiteDifference, TextDifference
from mhacli.results.record.arrays import Array
from mhacli.results.record.record import Record

_MAX_MAPS = 3
_MAX_LINES, _LABEL, _NARROW_LABEL, _BETWEEN = 40, 12, 7, "  "
_WIDE, _NAMED, _NUMBERED, _MAX_CELL = 100, 5, 5, 8
_BLANK, _BROKEN = -1000, -1001
"""A cell of which nothing is known, and one that is no number in one record alone."""


@dataclass(frozen=True)
class _Chosen:
    """A head of a sequence in both records, and what its layer is called."""

    label: str
    a: DrawableHead
    b: DrawableHead
    sequence: int
    largest: float | None

    @property
    def heads(self) -> tuple[DrawableHead, DrawableHead]:
        """That of A and that of B."""
        return self.a, self.b


@dataclass(frozen=True)
class _Drawn:
    """A head's pictures in as many cells as fit, None where its maps cannot lie beside each other; and what all pictures or their
    caption need of the maps: the largest change, the top of the scale, whether cells were put together, whether a learned sink
    takes a share, whether there are NaN."""

    choice: _Chosen
    fit: _Fit | None
    change: float
    top: float
    is_pooled: bool
    has_learned: bool
    has_nan: bool


@dataclass(frozen=True)
class _Scales:
    """What all pictures share: the largest share, the largest change, and how shades follow shares."""

    top: float
    change: float
    kind: Scale


def maps_view(
    found: Differences, records: tuple[Record, Record], *, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The chosen heads, or those that changed most: choices that `require_drawable` lets pass."""
    if options.view == "none":
        return
    choices = _choices(found, records, options)
    if not choices:
        if options.heads or options.layers or options.sequences:
            yield Text(f"no head is drawn: {_why_nothing(found)}", style="yellow")
        return
    drawn = [_drawn(choice, found, screen, options) for choice in choices]
    heads = [head for choice in choices for head in choice.heads]
    scales = _Scales(max(one.top for one in drawn) or 1.0, max(one.change for one in drawn), scale_of(options, heads))
    shares = [cells for one in drawn if one.fit is not None for cells in (one.fit.own.a, one.fit.own.b)]
    leveled = _leveled(shares, scales)
    for one in drawn:
        body = _LIKE_NOTHING
        if one.fit is not None:
            of_shares = (next(leveled), next(leveled))
            body = _panels(one.fit, of_shares, scales, screen=screen, precision=options.precision)
        yield Group(_title(one), body)
    if shares:
        yield _caption(shares, scales, screen, remarks=_remarks(drawn, records, has_same_tokens=found.has_same_tokens))


_LIKE_NOTHING = Text("the blocks of its maps stand for other tokens, so they cannot lie beside each other", style="dim")


def _title(drawn: _Drawn) -> Rule:
    choice, fit = drawn.choice, drawn.fit
    said = [choice.label] if choice.label else []
    said += [f"head {choice.a.head}"]
    said += [f"sequence {choice.sequence}"] if len(choice.a.record.sequences) > 1 else []
    said += [] if fit is None else [f"largest change {number_text(drawn.change)}"]
    said += [] if fit is None or fit.own.block == 1 else [f"each mark {fit.own.block} × {fit.own.block} tokens"]
    return title_rule(" · ".join(said))


# ------------------------------------------------------------------------------------------------------------------- choices


def require_drawable(records: tuple[Record, Record], options: ViewOptions) -> None:
    """Raises `UsageError` for a head, layer or sequence that one of the records does not have."""
    for record in records:
        chosen(options.sequences, len(record.sequences), 1, False, "sequence")
        if record.model is None and options.layers is not None:
            raise UsageError("layer must be of records of a checkpoint, got another", hint="leave --layer out")
        if record.model is None:
            chosen(options.heads, record.config.n_heads, 1, False, "head")
        drawable_heads(record, options)


def _choices(found: Differences, records: tuple[Record, Record], options: ViewOptions) -> list[_Chosen]:
    """The heads that were asked for, all of which both records hold the pattern; else those that changed, the largest changes
    first."""
    own_a, own_b = ({_key(head, record): head for head in drawable_heads(record, options)} for record in records)
    known = [
        _Chosen(layer.label, own_a[key_a], own_b[key_b], sequence, one.largest)
        for layer in found.layers
        for site in _drawn_site(layer)
        for one in site.heads
        if (key_a := (layer.index_a, one.head)) in own_a and (key_b := (layer.index_b, one.head)) in own_b
        for sequence in options.sequences or (one.sequence,)
    ]
    if options.heads is not None or options.layers is not None:
        return known
    changed = sorted((one for one in known if one.largest != 0), key=lambda one: -_rank(one))
    return changed if options.everything else changed[:_MAX_MAPS]


def _why_nothing(found: Differences) -> str:
    """Why no head can be drawn."""
    reasons = dict.fromkeys(site.why for layer in found.layers for site in _drawn_site(layer) if not site.heads)
    return "; ".join(reasons) or "both records must hold its pattern or map (--keep pattern)"


def _key(head: DrawableHead, record: Record) -> tuple[int | None, int]:
    """The place of its layer among those of the record, which tells two of one label apart, and its number."""
    return next((index for index, layer in enumerate(record.layers) if layer is head.layer), None), head.head


def _rank(one: _Chosen) -> float:
    """Numbers that one alone has count most."""
    return math.inf if one.largest is None else one.largest


def _drawn_site(layer: LayerDifference) -> Sequence[SiteDifference]:
    """The site that is drawn: the pattern where both have it, else the map."""
    return [site for name in ("pattern", "map") for site in layer.sites if site.site == name][:1]


def _drawn(choice: _Chosen, found: Differences, screen: Screen, options: ViewOptions) -> _Drawn:
    a, b = (head_map(head, choice.sequence) for head in choice.heads)
    queries, keys = (_text(found, choice, is_key=is_key) for is_key in (False, True))
    own = grids(a, b, queries, keys)
    fit = None if own is None else _fitted(own, screen, options)
    return _Drawn(
        choice,
        fit,
        change=0.0 if own is None else _largest_change(own),
        top=max(a.largest, b.largest),
        is_pooled=own is not None and fit is not None and fit.own.block > own.block,
        has_learned=a.learned is not None or b.learned is not None,
        has_nan=bool(np.isnan(a.shares).any() or np.isnan(b.shares).any()),
    )


def _text(found: Differences, choice: _Chosen, *, is_key: bool) -> TextDifference:
    """How the tokens of an axis match: of an encoder, and of keys that are a context, those of the context."""
    kind = None if choice.a.layer is None else choice.a.layer.kind
    families = {text.family for text in found.texts}
    is_context = "context" in families and (kind == "encoder" or (is_key and kind in (None, "cross")))
    family = "context" if is_context else "texts"
    return next(text for text in found.texts if text.family == family and text.sequence == choice.sequence)


def _largest_change(own: Grids) -> float:
    """The largest change either way, 0 where none is known."""
    return float(np.abs(own.change).max(initial=0.0, where=np.isfinite(own.change)))


# -------------------------------------------------------------------------------------------------------------------- panels


@dataclass(frozen=True)
class _Panel:
    """Levels of cells, `_BLANK` and `_BROKEN` among them, their numbers in words, and how a level is drawn."""

    name: str
    levels: Array
    words: Sequence[Sequence[str]]
    style: Callable[[int], Style]
    paint: Callable[[int], Color]
    sign: Callable[[int], str]


@dataclass(frozen=True)
class _Fit:
    """Pictures in as many cells as fit, each `cell` columns wide, or half a character where `is_halved`; `label` columns for the
    names of rows."""

    own: Grids
    cell: int
    is_halved: bool
    label: int


def _fitted(own: Grids, screen: Screen, options: ViewOptions) -> _Fit:
    """Three panels beside each other, as wide as the screen lets them be."""
    label = _LABEL if screen.width >= _WIDE else _NARROW_LABEL
    room = max(1, (screen.width - label - 1 - 2 * len(_BETWEEN)) // 3)
    lines = 1 << 30 if options.everything else _MAX_LINES
    fit = own.fitting(2 * lines if screen.colour else lines, room)
    n_rows, n_columns = fit.a.shape
    cell = min(_MAX_CELL, room // n_columns)
    is_halved = screen.colour and (cell < 2 or n_rows > lines)
    return _Fit(fit, 1 if is_halved else cell, is_halved, label)


def _panels(fit: _Fit, of_shares: tuple[Array, Array], scales: _Scales, *, screen: Screen, precision: int) -> Text:
    """A, B and B − A beside each other, of the levels of A and B."""
    drawn = _three(fit.own, of_shares, scales, precision)
    text = _header(fit, [panel.name for panel in drawn])
    for row in range(0, len(fit.own.rows), 2 if fit.is_halved else 1):
        is_token = fit.own.block == 1 and not fit.is_halved
        name = fit.own.rows[row] if is_token else _number(fit.own.row_places[row])
        text.append("\n").append(_cells(name, fit.label) + " ", style="bold" if is_token else "dim")
        for number, panel in enumerate(drawn):
            text.append(_BETWEEN if number else "")
            text.append_text(_halves(panel, row) if fit.is_halved else _row(panel, row, fit.cell, screen.colour))
    return text


def _leveled(shares: Sequence[Array], scales: _Scales) -> Iterator[Array]:
    """The levels of each picture, `_BLANK` and `_BROKEN` among them, on one scale: a rank is one among the cells of all."""
    if not shares:
        return
    known = levels(np.concatenate([cells.ravel() for cells in shares]), scales.kind, scales.top)
    drawn = np.select([known == FORBIDDEN, known == NOT_A_NUMBER], [_BLANK, _BROKEN], known)
    ends = np.cumsum([cells.size for cells in shares])
    for cells, part in zip(shares, np.split(drawn, ends[:-1]), strict=True):
        yield part.reshape(cells.shape)


def _three(fit: Grids, of_shares: tuple[Array, Array], scales: _Scales, precision: int) -> tuple[_Panel, ...]:
    shares = [
        _Panel(name, drawn, _words(cells, precision), shade, ramp_paint, glyph)
        for name, drawn, cells in zip("AB", of_shares, (fit.a, fit.b), strict=True)
    ]
    is_known = np.isfinite(fit.change)
    change = np.rint(255 * np.clip(np.where(is_known, fit.change, 0.0) / (scales.change or 1.0), -1, 1))
    change = np.select([np.isnan(fit.change), ~is_known], [_BLANK, _BROKEN], change)
    is_told = scales.change >= 10.0**-precision  # else all of them would round to 0
    words = _words(fit.change, precision, signed=True) if is_told else [[""] * fit.change.shape[1]] * len(fit.change)
    return (*shares, _Panel("B − A", change, words, change_style, change_paint, change_glyph))


def _words(cells: Array, precision: int, *, signed: bool = False) -> list[list[str]]:
    """Numbers with their sign where it is a change; a change that rounds to 0 has none."""

    def word(value: float) -> str:
        if not math.isfinite(value):
            return NAN_SIGN
        said = share_text(abs(value), precision)
        is_zero = not said.strip("0.")
        return said if not signed or is_zero else ("+" if value > 0 else "−") + said

    return [[word(value) for value in row] for row in cells.tolist()]


def _number(place: int) -> str:
    """A place in A, nothing for what is none."""
    return str(place) if place >= 0 else ""


def _header(fit: _Fit, names: Sequence[str]) -> Text:
    """What the panels are, and their columns: tokens where there is room, else their places, all or every tenth."""
    own, cell, margin = fit.own, fit.cell, " " * (fit.label + 1)
    width = cell * len(own.columns)
    text = Text(margin)
    text.append(_BETWEEN.join(f"{fitted(name, width):<{width}}" for name in names).rstrip(), style="bold")
    if cell >= _NAMED and own.block == 1:
        axis = "".join(_cells(name, cell - 1) + " " for name in own.columns)
    else:
        axis = _ticks(own, cell, every=1 if cell > len(str(max(own.column_places))) else 10)
    return text.append("\n" + margin).append(_BETWEEN.join([axis] * len(names)).rstrip(), style="dim")


def _ticks(fit: Grids, cell: int, *, every: int) -> str:
    """The places of so many columns, padding left out."""
    width = cell * len(fit.columns)
    axis = [" "] * width
    for column, place in enumerate(fit.column_places):
        number = _number(place)
        if column % every == 0 and column * cell + len(number) <= width:
            axis[column * cell : column * cell + len(number)] = number
    return "".join(axis)


def _cells(name: str, width: int) -> str:
    """A name in exactly so many cells."""
    short = fitted(name, width)
    return short + " " * (width - cell_len(short))


def _row(panel: _Panel, row: int, cell: int, colour: bool) -> Text:
    """One line of a panel: shades, with numbers in them where they fit; or signs."""
    text = Text()
    for level, word in zip(panel.levels[row].astype(int).tolist(), panel.words[row], strict=True):
        fits = 0 < len(word) < cell and cell >= _NUMBERED
        if level == _BLANK:
            text.append(" " * cell)
        elif level == _BROKEN:
            text.append(f"{NAN_SIGN:>{cell}}" if cell < 2 else f"{NAN_SIGN:>{cell - 1}} ")
        elif colour:
            text.append(f"{word if fits else '':>{cell - 1}} ", style=panel.style(level))
        else:
            text.append(f"{word:>{cell - 1}} " if fits else panel.sign(level) * max(1, cell - 1) + " " * (cell > 1))
    return text


def _halves(panel: _Panel, row: int) -> Text:
    """One line of a panel that shows two rows, in half-block characters."""
    text = Text()
    upper = panel.levels[row].astype(int).tolist()
    lower = panel.levels[row + 1].astype(int).tolist() if row + 1 < len(panel.levels) else [_BLANK] * len(upper)
    for levels_of in zip(upper, lower, strict=True):
        if _BROKEN in levels_of:
            text.append(NAN_SIGN)
            continue
        top, bottom = (None if one == _BLANK else one for one in levels_of)
        text.append(*half_block(top, bottom, panel.paint))
    return text


# ------------------------------------------------------------------------------------------------------------------- caption


def _remarks(drawn: Sequence[_Drawn], records: tuple[Record, Record], *, has_same_tokens: bool) -> Sequence[str]:
    """What signs mean, and what is not in the pictures."""
    said = ["a blank is not allowed" if has_same_tokens else "a blank is not allowed, or not of the same tokens"]
    said += [f"{NAN_SIGN} is not a number"] if any(one.has_nan for one in drawn) else []
    if any(one.is_pooled for one in drawn):
        said += ["a mark of several cells shows the largest, of B − A the largest either way"]
    trained = [letter for letter, record in zip("AB", records, strict=True) if is_before_dropout(record)]
    said += [f"{' and '.join(trained)} before dropout"] if trained else []
    return said + (["what learned sinks take is not drawn"] if any(one.has_learned for one in drawn) else [])


def _caption(shares: Sequence[Array], scales: _Scales, screen: Screen, *, remarks: Sequence[str]) -> RenderableType:
    """Both scales with their ranges, and the remarks."""
    n_open = sum(int(((cells != FORBIDDEN) & ~np.isnan(cells)).sum()) for cells in shares)
    is_exceeded = any((cells > scales.top).any() for cells in shares)
    said = range_text(scales.kind, scales.top, n_open, is_exceeded=is_exceeded)
    ramp = Text(f"A and B: {scales.kind}, {said}, the same for all: ")
    change = Text(f"B − A: linear, −{number_text(scales.change)} … +{number_text(scales.change)}: ")
    if screen.colour:
        for level in range(0, 256, 17):
            ramp.append(" ", style=shade(level))
            change.append(" ", style=change_style(2 * level - 255))
        change.append(" blue less in B, grey the same, orange more")
    else:
        ramp.append(f"{GLYPHS} from small to large")
        change.append("= - less in B, . about the same, + # more")
    if not scales.change:
        change = Text("B − A: no change of a number")
    return Group(ramp, change, Text("; ".join(remarks), style="dim"))
