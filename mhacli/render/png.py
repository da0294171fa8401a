"""A picture as PNG, drawn from its SVG by resvg, which comes with the extra `png`."""

from __future__ import annotations

from importlib.util import find_spec

from mhacli.errors import MhaError
from mhacli.io.extras import installing
from mhacli.render.figures.svg import INK, MONO, element, written

_ZOOM = 2.0
"""Pixels per unit of the picture: sharp on screens of twice the usual density."""


def require_png() -> None:
    """Raises `MhaError` where pictures cannot be drawn as PNG: without the library, or without a font, when all text would be
    missing."""
    if find_spec("resvg_py") is None:
        raise MhaError(
            "png must be drawn by resvg_py, which is not installed", hint=f"{installing('resvg-py')} installs it"
        )
    if png(_probe("mha")) == png(_probe("")):
        raise MhaError(
            "png must have a font to write with, got none", hint="install one, such as DejaVu Sans Mono, or use --svg"
        )


def png(svg: str) -> bytes:
    """The picture as PNG, at twice its size."""
    import resvg_py

    drawn: bytes = resvg_py.svg_to_bytes(svg_string=svg, zoom=_ZOOM, background="#ffffff")
    return drawn


def _probe(text: str) -> str:
    """A picture of a word alone, in the family that pictures use."""
    word = written(0, 12, text, 12, fill=INK, font_family=MONO)
    return element("svg", word, xmlns="http://www.w3.org/2000/svg", width=40.0, height=16.0)
