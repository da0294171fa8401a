"""How heads are named and told apart: the first line of a screen, signs of their kinds, and lines that break between parts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.style import Style

from mhacli.render.base.colours import EMPTY, KIND_SIGNS
from mhacli.render.base.format import share_text
from mhacli.results.record.heads import HeadStatistics
from mhacli.viewer.pictures.gallery import Entry
from mhacli.viewer.pictures.lines import ACCENT, BOLD, DIM, PLAIN, WARNING, Line, segments

Piece = tuple[str, Style]


def kind_sign(said: HeadStatistics | None) -> Piece:
    """The sign of a head's kind, in its colour; a question mark where nothing is said of it."""
    if said is None:
        return "?", EMPTY
    sign, colour = KIND_SIGNS[said.kind]
    return sign, EMPTY if said.kind in ("mixed", "uniform") else Style(color=colour)


def kind_words(said: HeadStatistics | None) -> str:
    """The kind of a head, and how sure it is."""
    if said is None:
        return "nothing is said of it"
    sure = "" if said.certainty is None or said.kind == "mixed" else f" {share_text(said.certainty, 2)}"
    return said.kind + sure


def heading(entry: Entry, sequence: int, *, failed: bool, doubtful: bool = False) -> Line:
    """The first line: which head of which sequence, and what kind of head it is."""
    parts: list[Piece] = [
        (entry.label, ACCENT),
        ("  ", PLAIN),
        kind_sign(entry.said),
        (f" {kind_words(entry.said)}", PLAIN),
    ]
    n_sequences = len(entry.view.sequences)
    if n_sequences > 1:
        parts.append((f"  sequence {sequence}", BOLD))
        parts.append((f" of 0–{n_sequences - 1}", DIM))
    if failed:
        parts.append(("  self-check FAILED: i tells", WARNING))
    if doubtful:
        parts.append(("  the record contradicts itself: i tells", WARNING))
    if entry.layer is not None and not entry.layer.verified:
        parts.append(("  not verified", WARNING))
    return segments(parts)


def flowed(parts: Sequence[Sequence[Piece]], width: int, between: str = " · ") -> list[Line]:
    """The parts in lines that break between them."""
    lines: list[list[Piece]] = [[]]
    used = 0
    for part in parts:
        size = sum(cell_len(text) for text, _ in part)
        if lines[-1] and used + len(between) + size > width:
            lines.append([])
            used = 0
        if lines[-1]:
            lines[-1].append((between, DIM))
            used += len(between)
        lines[-1] += part
        used += size
    return [segments(line) for line in lines]
