"""What stands around a matrix: what the cursor is on, and what the shades mean."""

from __future__ import annotations

import numpy as np
from rich.cells import cell_len

from mhacli.render.base.cells import FORBIDDEN, WEIGHTS, range_text
from mhacli.render.base.format import fitted, number_text, percent_text, share_text
from mhacli.render.base.options import Scale
from mhacli.render.heads.drawable import is_before_dropout
from mhacli.viewer.pictures.heading import Piece, flowed
from mhacli.viewer.pictures.lines import BOLD, DIM, PLAIN, WARNING, Line, segments
from mhacli.viewer.pictures.picture import TAKEN_SIGN, Picture, Shades
from mhacli.viewer.pictures.zoom import Zoom

_MANY = 6


def read_out(picture: Picture, cell: tuple[int, int], width: int) -> list[Line]:
    """What the cursor is on: query, key and share; then the row's entropy, what sinks take of it, and its sum."""
    row, column = cell
    share = _share(picture, cell)
    room = max(6, (width - sum(cell_len(text) for text, _ in share) - len("query   key   share ")) // 2)
    names = [fitted(name, room) for name in (picture.query_name(row), picture.key_name(column))]
    first: list[Piece] = [
        ("query ", DIM),
        (names[0], BOLD),
        ("  key ", DIM),
        (names[1], BOLD),
        ("  share ", DIM),
        *share,
    ]
    entropy = picture.entropy(row)
    if entropy is None:
        return [segments(first), segments([("this query sees no key", WARNING)])]
    numbers = [("entropy" if picture.base.block == 1 else "mean entropy", f"{number_text(entropy)} nats")]
    if picture.hides_sinks:
        numbers[0] = f"{numbers[0][0]} with sinks", numbers[0][1]
        numbers.append(("taken out", share_text(float(picture.base.sink_shares[row]), 4)))
    if picture.base.learned is not None:
        numbers.append(("learned sink", share_text(float(picture.base.learned[row]), 4)))
    numbers.append(("row sum", share_text(picture.row_sum(row), 4)))
    second = [piece for word, number in numbers for piece in ((f"{word} ", DIM), (f"{number}  ", BOLD))]
    return [segments(first), segments(second)]


def _share(picture: Picture, cell: tuple[int, int]) -> list[Piece]:
    share = float(picture.base.shares[cell])
    if share == FORBIDDEN:
        return [("not allowed", WARNING)]
    if picture.is_taken[cell]:
        return [("taken out", WARNING), (f" (was {float(picture.whole.shares[cell]):.6g})", DIM)]
    exact = f" ({share:.6g})" if np.isfinite(share) and share > 0 else ""
    return [(share_text(share, 4), BOLD), (exact, DIM)]


def captions(picture: Picture, zoom: Zoom, width: int, *, colour: bool) -> list[Line]:
    """What the shades mean, what was taken out, and what is not drawn: as many lines as that takes."""
    shades = picture.at(zoom.factor)
    parts: list[list[Piece]] = [
        [(f"scale {picture.scale}, {scale_range(shades, picture.scale)} ", PLAIN), *WEIGHTS.swatches(8, colour=colour)]
    ]
    parts.append([(sink_words(picture), PLAIN)])
    if is_before_dropout(picture.drawn.view):
        parts.append([("before dropout", WARNING)])
    if picture.base.block > 1:
        parts.append(
            [(f"the record holds blocks of {picture.base.block} × {picture.base.block} tokens, no cells", PLAIN)]
        )
    parts += [[(words, DIM)] for words in _signs(picture, shades, zoom)]
    if np.isnan(shades.map.shares).any():
        parts.append([("?: not a number", WARNING)])
    return flowed(parts, width)


def _signs(picture: Picture, shades: Shades, zoom: Zoom) -> list[str]:
    """How cells look that have no share."""
    is_forbidden = not bool(shades.map.is_open.all())
    is_taken = zoom.factor == 1 and bool(picture.is_taken.any())
    if zoom.decimals:
        return ["0: not allowed"] * is_forbidden + [f"{TAKEN_SIGN}: taken out"] * is_taken
    words = ["not allowed"] * is_forbidden + ["taken out"] * is_taken
    return ["blank: " + " or ".join(words)] if words else []


def scale_range(shades: Shades, scale: Scale) -> str:
    """From where to where a scale goes."""
    return range_text(scale, shades.largest, int((shades.cells >= 0).sum()), is_exceeded=shades.is_exceeded)


def sink_words(picture: Picture) -> str:
    """Where sinks are, what share they get, and whether they are taken out."""
    drawn, places = picture.base, list(map(str, picture.base.sinks))
    listed = ", ".join(places[:_MANY]) + (f" and {len(places) - _MANY} more" if len(places) > _MANY else "")
    if not places and drawn.learned_mass is None:
        return "no sink in blocks" if drawn.block > 1 else "no sink"
    named = f"sink{'s' * (len(places) != 1)} ({listed})" if places else "sinks (none)"
    learned = "" if drawn.learned_mass is None else f" and the learned sink {percent_text(drawn.learned_mass)}"
    if picture.hides_sinks:
        return f"{named} {percent_text(drawn.sink_mass)}{learned} taken out, rows renormalised"
    return f"{named} shown: {percent_text(drawn.sink_mass)}{learned} of a row on average"
