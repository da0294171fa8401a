"""A finished picture, before it is a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mhacli.render.figures.svg.elements import Piece


@dataclass(frozen=True)
class Sheet:
    """A picture with its `title`, what is `said` of it in sentences, the names of what is `drawn`, and how: `drawn_as` tells
    the choices that were made for the picture, which the command of the record does not."""

    body: Piece
    title: str
    said: Sequence[str]
    drawn: Sequence[str]
    drawn_as: str
