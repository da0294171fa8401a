"""Effects of removals as a picture: a row of heads per layer, and the texts that queries read, on one scale."""

from __future__ import annotations

from rich.cells import cell_len

from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.record.effect import Effect
from mhacli.record.record import Record
from mhacli.render.base.colours import change_colour
from mhacli.render.base.format import number_text
from mhacli.render.base.options import Screen
from mhacli.render.checkpoint.effect import AT_POSITION, change_words, effect_words, measured_words
from mhacli.render.checkpoint.effect_map import EffectMap, ReadText, removal_name
from mhacli.render.figures.head_picture import caption
from mhacli.render.figures.scales import hex_of, ink_on
from mhacli.render.figures.svg import (
    FAINT,
    INK,
    MONO_EM,
    SOFT,
    Piece,
    Sheet,
    element,
    heading,
    mono_width,
    rectangle,
    stacked,
    written,
)
from mhacli.text.escape import token_label

_WIDTH, _CELL, _HIGH, _SIZE = 560.0, 44.0, 22.0, 11.0
_SMALL = 24
"""The number of heads per row from which cells are narrow and have no numbers."""
_BAR, _STEPS, _NO_EFFECT = 220.0, 8, 255


def effects_figure(record: Record) -> Sheet:
    """The picture of a record's effects. Raises `MhaError` if it has none, or they are not proven."""
    if record.effect is None:
        raise MhaError(
            "the record has no effects, so none can be drawn", hint="mha effect … --save makes such a record"
        )
    if not record.effect.verified.ok:
        raise MhaError(
            "the effects are not drawn: a second computation gives other numbers",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    shown = EffectMap.of(record)
    pieces = [_grid(shown)] if shown.rows else []
    width = max([_WIDTH, *(piece.width for piece in pieces)])
    pieces += [_text(shown, read, width) for read in shown.texts]
    title, chosen = _title(record), "figure effects"
    notes = [part.plain for part in effect_words(record, Screen(10_000, False))]
    parts = [heading(title, 16), *pieces, _legend(shown), caption(notes, width=width)]
    scale = f"{shown.meaning}: {shown.low} … {number_text(shown.largest)}"
    names = [removal_name(effect, record) for effect in record.effects if effect.removed in ("head", "edge")]
    return Sheet(stacked(parts, 14), title, [scale, *notes], [*dict.fromkeys(names)], chosen)


def _title(record: Record) -> str:
    summary = record.effect
    assert summary is not None
    token = token_label(record.sequences[0].tokens[summary.position])
    what = "the output" if summary.target is None else measured_words(summary)
    if summary.measured not in AT_POSITION:
        return f"effect on {what}"
    return f"effect on {what} at {summary.position} “{token}”"


def _colour(shown: EffectMap, effect: Effect | None) -> tuple[int, int, int] | None:
    level = shown.level(effect)
    return None if level < 0 else change_colour(level - _NO_EFFECT)


def _grid(shown: EffectMap) -> Piece:
    """A row per layer and a column per head. Heads that were not removed are left out."""
    is_numbered = shown.n_columns <= _SMALL
    cell = _CELL if is_numbered else _HIGH / 2
    left = max(mono_width(f"{name}  ", _SIZE) for name in ("head", *(row.name for row in shown.rows)))
    every = 1 if is_numbered else 5
    content = written(left - 8, _SIZE, "head", _SIZE, fill=SOFT, text_anchor="end")
    content += "".join(
        written(left + (head + 0.5) * cell, _SIZE, str(head), _SIZE, fill=SOFT, text_anchor="middle")
        for head in range(0, shown.n_columns, every)
    )
    top = _SIZE + 6
    for number, row in enumerate(shown.rows):
        y = top + number * _HIGH
        content += written(left - 8, y + _HIGH / 2 + 0.35 * _SIZE, row.name, _SIZE, text_anchor="end")
        for head, effect in enumerate(row.heads):
            colour = _colour(shown, effect)
            if effect is None or colour is None:
                continue
            x = left + head * cell
            content += rectangle(x, y, cell - 1, _HIGH - 1, hex_of(colour), change_words(shown, effect))
            if is_numbered:
                middle = x + (cell - 1) / 2, y + _HIGH / 2 + 0.35 * _SIZE - 0.5
                content += written(*middle, shown.word(effect), _SIZE, fill=ink_on(colour), text_anchor="middle")
    return Piece(content, left + shown.n_columns * cell, top + len(shown.rows) * _HIGH)


def _text(shown: EffectMap, read: ReadText, width: float) -> Piece:
    """The tokens that a query reads, each in the colour of its removal's effect."""
    indent = mono_width(f"{read.name}  ", _SIZE)
    content = written(0, _HIGH / 2 + 0.35 * _SIZE, read.name, _SIZE, font_weight="bold")
    x, y = indent, 0.0
    for edge, token in zip(read.edges, read.tokens, strict=True):
        box = (cell_len(token) + 1) * MONO_EM * _SIZE
        if x > indent and x + box > width:
            x, y = indent, y + _HIGH
        colour = _colour(shown, edge)
        if colour is not None:
            content += rectangle(x, y, box, _HIGH - 3, hex_of(colour), change_words(shown, edge))
        ink = INK if colour is None else ink_on(colour)
        content += written(
            x + box / 2, y + _HIGH / 2 + 0.35 * _SIZE - 1.5, token, _SIZE, fill=ink, text_anchor="middle"
        )
        x += box + 2
    return Piece(content, width, y + _HIGH)


def _legend(shown: EffectMap) -> Piece:
    """The ramp with its range and meaning."""
    low = -255 if shown.has_signs else 0
    stops = [low + (255 - low) * step / _STEPS for step in range(_STEPS + 1)]
    gradient = element(
        "linearGradient",
        *(
            element("stop", offset=f"{100 * step / _STEPS:g}%", stop_color=hex_of(change_colour(round(level))))
            for step, level in enumerate(stops)
        ),
        id="changes",
    )
    y = 12.0
    bar = rectangle(0, 0, _BAR, y, "url(#changes)", stroke=FAINT, stroke_width=0.5)
    words = f"{shown.low} … {number_text(shown.largest)}: {shown.meaning}"
    label = written(0, y + 1.25 * _SIZE, words, 10.0)
    return Piece(element("defs", gradient) + bar + label, max(_BAR, mono_width(words, 10.0)), y + 1.6 * _SIZE)
