"""What stands below a picture: what a cell is, what was taken out, what made it; and the same for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import set_cell_size

from mhacli.render.base.format import share_text, token_text
from mhacli.render.base.provenance import RECORD_BY, provenance
from mhacli.render.figures.heads.subject import Subject
from mhacli.render.figures.svg.colour_scale import Shading
from mhacli.render.figures.svg.elements import INK, LINE, MONO_EM, SOFT, Piece, stacked, wrapped, written
from mhacli.render.figures.svg.sheet import Sheet
from mhacli.render.heads.drawable import is_before_dropout
from mhacli.results.record.arrays import Array
from mhacli.results.record.record import InspectedLayer, Record
from mhacli.text.escape import visible

_WORDS = (
    "words: shares are summed over the tokens of a word that is looked at, and averaged over those of the word that looks; "
    "what is said of the head is of tokens"
)
_SIZE, _LABEL, _MOST_LINES, _MOST_SINKS = 9.5, 11, 6, 4
_DRAWN_AS = "drawn as"


def caption(record: Record, notes: Sequence[str], drawn_as: str, *, width: float) -> Piece:
    """The notes, the choices for the picture and the provenance as lines of at most that width; a line that takes more than six
    is cut, with an ellipsis."""
    cells = max(30, int(width / (MONO_EM * _SIZE)))
    pieces = [_lines("", note, cells, INK) for note in notes]
    pieces += [_lines(word, line, cells, SOFT) for word, line in ((_DRAWN_AS, drawn_as), *provenance(record))]
    return stacked(pieces, 1.0)


def _lines(word: str, text: str, cells: int, fill: str) -> Piece:
    indent = _LABEL if word else 0
    lines = wrapped(text, cells - indent)
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], set_cell_size(lines[_MOST_LINES - 1], cells - indent - 2).rstrip() + " …"]
    height = LINE * _SIZE
    x = indent * MONO_EM * _SIZE
    content = written(0, height - 3, word, _SIZE, fill=fill, font_weight="bold") if word else ""
    content += "".join(written(x, (place + 1) * height - 3, line, _SIZE, fill=fill) for place, line in enumerate(lines))
    return Piece(content, cells * MONO_EM * _SIZE, len(lines) * height)


def map_notes(record: Record, subjects: Sequence[Subject], shaded: Shading) -> Iterator[str]:
    """What a cell is, what was put together, left out or taken out, in sentences."""
    yield _what_a_cell_is(subjects)
    if any(one.in_words for one in subjects):
        yield _WORDS
    rows = subjects[0].rows
    if rows is not None:
        yield f"{len(rows)} of {len(subjects[0].shown.queries.tokens)} queries are drawn"
    if shaded.is_exceeded:
        yield "a row with a single cell that is allowed gives it everything: such rows do not set the scale"
    if shaded.is_empty:
        yield "no cell that is drawn has any share"
    if is_before_dropout(record):
        yield f"in training: the pattern before dropout {record.config.dropout:g}; what dropout left of it is not drawn"
    if record.facts.padded:
        yield "padding is not drawn"


def unverified(layer: InspectedLayer) -> str:
    """Why what is shown of a layer may not be what it computed."""
    return f"NOT verified: {visible('; '.join(layer.unverified))}"


def removed_note(one: Subject, precision: int, *, is_hidden: bool) -> Iterator[str]:
    """What sinks took of a head, told where they are hidden; and a learned sink's share, told wherever there is one."""
    learned = one.whole.learned_mass
    if is_hidden and not one.whole.sinks and learned is None:
        yield "no key is a sink here, so none is taken out"
    elif is_hidden:
        mass, names = sink_text([one], precision), _sink_names(one)
        also = "" if learned is None else f", and the learned sink with {share_text(learned, precision)}"
        yield (f"sinks are hidden: {names} with {mass}{also} taken out; the rest of each row is renormalised")
    elif learned is not None:
        mass = share_text(learned, precision)
        yield f"a learned sink takes {mass} of all attention: no key gets it, so rows sum to less than 1"


def sink_text(subjects: Sequence[Subject], precision: int) -> str:
    """What sinks get of the attention of heads, on average over those whose shares are numbers."""
    mass = sink_mass(subjects)
    return f"{'an unknown part' if mass is None else share_text(mass, precision)} of all attention"


def sink_mass(subjects: Sequence[Subject]) -> float | None:
    """What sinks get on average over all queries of these heads whose shares are numbers; None where there is no such query."""
    return _mean([(one.whole.sink_mass, one.whole.sink_shares, one.whole.n_queries) for one in subjects])


def learned_mass(subjects: Sequence[Subject]) -> float | None:
    """What learned sinks take on average over all queries of those heads that have one; None where none has."""
    maps = [one.whole for one in subjects]
    return _mean(
        [(m.learned_mass, m.learned, m.n_queries) for m in maps if m.learned is not None and m.learned_mass is not None]
    )


def _mean(masses: Sequence[tuple[float, Array, Array]]) -> float | None:
    """The mean of masses, each with its rows, of which some may be NaN, and with the queries of each row."""
    counts = [float(n_queries[~np.isnan(rows)].sum()) for _, rows, n_queries in masses]
    return float(np.average([mass for mass, *_ in masses], weights=counts)) if sum(counts) else None


def _sink_names(one: Subject) -> str:
    keys = one.whole.keys
    if not one.whole.sinks:
        return "no key"
    shown = ", ".join(f"{token_text(keys, place)} {place}" for place in one.whole.sinks[:_MOST_SINKS])
    more = len(one.whole.sinks) - _MOST_SINKS
    return (f"key {shown}" if len(one.whole.sinks) == 1 else f"keys {shown}") + (
        f" and {more} more" if more > 0 else ""
    )


def _what_a_cell_is(subjects: Sequence[Subject]) -> str:
    blocks = sorted({one.shown.block for one in subjects})
    if blocks == [1]:
        return "each cell: the share of attention that a query (row) gives to a key (column)"
    sizes = f"{blocks[0]}" if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
    rows = (
        "a query gives" if any(one.rows is not None for one in subjects) else f"{sizes} queries (rows) give on average"
    )
    return f"each cell: the share of attention that {rows} to {sizes} keys (a column) together"


def metadata(record: Record, sheet: Sheet) -> str:
    """The provenance as JSON, in ASCII: what was drawn and how, the record's whole command, and every line of the caption."""
    content = {
        "drawn": [*sheet.drawn],
        _DRAWN_AS: sheet.drawn_as,
        "said": [*sheet.said],
        "command": [*record.command],
        **{word: line for word, line in provenance(record) if word != RECORD_BY},
    }
    return json.dumps(content)
