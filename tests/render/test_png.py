"""PNG pictures against their SVG: size, colours pixel by pixel, and missing libraries."""

from __future__ import annotations

from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from support.records import make_record
from support.svg_read import FIVE, THREE, cells, images, of_tokens, shapes, texts

from mhacli.errors import MhaError
from mhacli.render.base.options import ViewOptions
from mhacli.render.figures import document as module
from mhacli.render.figures.document import figure, png, require_png

HEAD = ViewOptions(heads=(0,))


def pixels(content: bytes) -> np.ndarray:
    """Red, green and blue of a PNG, `[row, column, 3]`."""
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return np.asarray(Image.open(BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize("options", [HEAD, ViewOptions(), ViewOptions(heads=(1,), hide_sinks=True, map_scale="log")])
def test_every_cell_has_the_colour_that_the_svg_says(options):
    svg = figure(make_record(FIVE, causal=True), options)
    drawn = pixels(png(svg))
    for cell in cells(svg):
        x, y, width, height = cell.x, cell.y, cell.number("width"), cell.number("height")
        for part in (0.1, 0.9):  # away from the number in the middle and from the frame
            assert tuple(drawn[int(2 * (y + part * height)), int(2 * (x + part * width))]) == cell.rgb, cell.said


def test_a_picture_is_twice_as_many_pixels_as_it_is_wide_and_high():
    svg = figure(make_record(THREE), HEAD)
    root = ElementTree.fromstring(svg)
    expected = [2 * float(root.get(side)) for side in ("height", "width")]
    assert np.allclose(pixels(png(svg)).shape[:2], expected, atol=1.5)


def test_cells_of_an_image_keep_sharp_edges():
    record = of_tokens((f"t{i}" for i in range(60)), causal=True, n_heads=1)
    svg = figure(record, HEAD)
    drawn, (expected,) = pixels(png(svg)), images(svg)
    (image,) = [one for one in shapes(svg) if one.tag == "image"]
    step = image.number("width") / 60
    for offset in (0.2, 0.5, 0.8):
        rows = [int(2 * (image.y + (place + offset) * step)) for place in range(60)]
        columns = [int(2 * (image.x + (place + offset) * step)) for place in range(60)]
        assert np.array_equal(drawn[np.ix_(rows, columns)], expected)


def test_text_is_drawn_where_it_stands():
    svg = figure(make_record(THREE), HEAD)
    drawn = pixels(png(svg))
    written = [one for one in shapes(svg) if one.tag == "text" and "transform" not in one.attributes and one.text]
    for one in written:
        anchor = {"end": -0.6, "middle": -0.3}.get(one.attributes.get("text-anchor", ""), 0.0) * len(one.text)
        size = one.number("font-size")
        left, top = int(2 * (one.x + anchor * size)), int(2 * (one.y - 0.8 * size))
        assert np.ptp(drawn[top : int(2 * one.y), left : left + int(size)].astype(int)) > 40, one.text
    assert len(written) == sum(bool(text) for text in texts(svg))


def test_the_same_picture_gives_the_same_bytes():
    svg = figure(make_record(THREE), ViewOptions(figure="walk"))
    assert png(svg) == png(svg)


def test_png_can_be_drawn_here():
    require_png()


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MhaError) as caught:
        require_png()
    assert caught.value.message == "--png needs resvg-py, which is not installed"
    assert caught.value.hint == 'pip install "resvg-py<1,>=0.3" installs it'


def test_without_a_font_nothing_is_drawn_and_the_reason_reported(monkeypatch):
    import resvg_py

    drawing = resvg_py.svg_to_bytes
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda **asked: drawing(**asked, skip_system_fonts=True))
    with pytest.raises(MhaError) as caught:
        require_png()
    assert caught.value.message == "--png needs a font, and none is installed"
    assert caught.value.hint == "install one, such as DejaVu Sans Mono, or use --svg"
