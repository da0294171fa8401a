"""`--svg` and `--png`: every cell is the record's number in its place, and the file is safe, whole
and says what made it.
"""

from __future__ import annotations

import io
import re
from base64 import b64decode
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support.browser import opened, overlaps_of
from support.records import SHOWN, bias, document, pattern, saved, short, tokens
from support.svg import SVG, Shape, brightness, cells, shapes, texts

HARMLESS = """
    svg g rect text tspan line path image defs marker linearGradient stop title desc metadata
    style
""".split()
Run = Callable[..., Any]


def weights_of(svg: str) -> np.ndarray:
    return np.array([cell.weight for cell in cells(svg)])


@pytest.fixture
def figure(mha: Run, tmp_path: Path) -> Run:
    """The SVG of a stored record."""

    def draw(name: str, *words: str) -> str:
        mha("show", saved(name), "--view", "none", *words, "--svg", "figure.svg", "--force")
        return (tmp_path / "figure.svg").read_text()

    return draw


# ------------------------------------------------------------------------------------------- labels


@pytest.mark.real
@pytest.mark.parametrize(("n_tokens", "n_heads"), [(14, 4), (30, 4), (30, 1), (300, 4), (300, 1)])
def test_no_label_covers_another_and_every_map_has_an_axis(
    mha: Run, tmp_path: Path, n_tokens: int, n_heads: int
) -> None:
    words = " ".join(f"international{place}" for place in range(n_tokens))
    layer = ("--heads", str(n_heads), "--d-model", "8", "--repeat", "1", "--view", "none")
    mha("run", words, *layer, "--svg", "figure.svg")
    svg = (tmp_path / "figure.svg").read_text()
    labels = [text for text in texts(svg) if re.fullmatch(r"(international)?\d+", text)]
    assert len(labels) >= 2 * (n_heads + 1)
    assert any(re.search(r"(linear|log), .+ … ", text) for text in texts(svg))
    with opened(tmp_path, svg.partition("?>")[2], size=(1280, 1000)) as tab:
        assert overlaps_of(tab, "svg text") == []


# ----------------------------------------------------------------------------------------- one head


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_each_cell_has_its_tokens_its_weight_and_a_colour_that_follows_it(
    figure: Run, scale: str
) -> None:
    svg = figure("sinks", "--head", "0", "--map-scale", scale, "--precision", "3")
    weights, names, parsed = pattern("sinks")[0, 0], tokens("sinks"), cells(svg)
    visible = np.tri(13, dtype=bool).ravel()
    expected = [f"{query} → {key}" for query in names for key in names]
    assert [cell.tooltip.rpartition(": ")[0] for cell in parsed] == expected
    assert weights_of(svg)[visible] == pytest.approx(weights.ravel()[visible], abs=1e-6)
    assert np.isnan(weights_of(svg)[~visible]).all()
    masked = {
        cell.colour for cell, is_visible in zip(parsed, visible, strict=True) if not is_visible
    }
    shown = sorted(
        (cell for cell, is_visible in zip(parsed, visible, strict=True) if is_visible),
        key=lambda c: c.weight,
    )
    assert len(masked) == 1
    assert not masked & {cell.colour for cell in shown}
    light = [brightness(cell.colour) for cell in shown]
    assert all(before <= after + 1 for before, after in pairwise(light))
    assert light[-1] > light[0] + 100
    for cell in shown[-9:]:
        inside = [
            shape.text
            for shape in shapes(svg)
            if shape.tag == "text"
            and 0 < shape.x - cell.x < cell.number("width")
            and 0 < shape.y - cell.y < cell.number("height")
        ]
        assert inside in ([short(cell.weight, 3)], [])
    top = max(weights[row, : row + 1].max() for row in range(1, 13))
    ends = [text.partition(" … ")[2] for text in texts(svg)]
    assert any(end.endswith(f"{top:.4g}") for end in ends), "the range of the scale"


def test_rows_and_columns_are_labelled_where_they_stand(figure: Run) -> None:
    svg = figure("cross", "--head", "1")
    parsed, first = [shape for shape in shapes(svg) if shape.tag == "text"], cells(svg)[0]
    assert weights_of(svg) == pytest.approx(pattern("cross")[0, 1].ravel(), abs=1e-6)
    for row, token in enumerate(("the", "cat")):
        assert any(
            s.text == token
            and s.x < first.x
            and 0 < s.y - first.y - row * first.number("height") < first.number("height")
            for s in parsed
        )
    for column, token in enumerate("vwxyz"):
        left = first.x + column * first.number("width")
        assert any(
            s.text == token and s.y < first.y and 0 < s.x - left < first.number("width")
            for s in parsed
        )


def test_sinks_that_are_left_out_rescale_their_rows_and_look_unlike_weights(figure: Run) -> None:
    svg = figure("sinks", "--head", "2", "--hide-sinks")
    weights = pattern("sinks")[0, 2]
    left = 1 - weights[:, [2, 4]].sum(1)
    for place, cell in enumerate(cells(svg)):
        query, key = divmod(place, 13)
        if key in (2, 4) and key <= query:
            assert "sink" in cell.tooltip
        elif key <= query:
            shown = float(re.findall(r": ([\d.e-]+)", cell.tooltip)[0])
            assert shown == pytest.approx(
                weights[query, key] / left[query], rel=1e-5 + 3e-7 / left[query], abs=1e-6
            )


def test_numbers_that_are_none_and_rows_without_keys_have_colours_of_their_own(figure: Run) -> None:
    broken = cells(figure("nan", "--head", "0"))
    nan_row = {cell.colour for cell in broken[28:35]}
    assert len(nan_row) == 1
    assert not nan_row & {cell.colour for cell in (*broken[:28], *broken[35:])}
    masked = {cell.colour for cell in cells(figure("nan", "--head", "1"))[14:21]}
    assert len(masked) == 1
    assert masked != nan_row
    assert np.isneginf(bias("nan")[1, 2]).all()


def test_sequences_rows_and_blocks_are_those_that_are_chosen(figure: Run) -> None:
    assert weights_of(figure("pair", "--head", "1", "--sequence", "1"))[
        [0, 3, 4, 6, 7, 8]
    ] == pytest.approx(pattern("pair")[1, 1, 4:, 4:][np.tri(3, dtype=bool)], abs=1e-6)
    chosen = weights_of(figure("gpt2", "--layer", "2", "--head", "2", "--from", "4,2"))
    expected = pattern("gpt2", 2)[0, 2]
    assert chosen[~np.isnan(chosen)] == pytest.approx(
        [*expected[4, :5], *expected[2, :3]], abs=1e-6
    )
    assert weights_of(figure("trained", "--head", "1")) == pytest.approx(
        pattern("trained")[0, 1].ravel(), abs=1e-6
    )


def test_words_sum_their_parts_over_keys_and_average_them_over_queries(figure: Run) -> None:
    names = tokens("gpt2")
    begins = [
        place
        for place, token in enumerate(names)
        if place == 0 or token.startswith((" ", "Ġ", "␣"))
    ]
    summed = np.add.reduceat(pattern("gpt2", 1)[0, 3], begins, axis=1)
    expected = np.add.reduceat(summed, begins, axis=0) / np.diff([*begins, len(names)])[:, None]
    shown = weights_of(figure("gpt2", "--layer", "1", "--head", "3", "--words"))
    assert shown[~np.isnan(shown)] == pytest.approx(
        expected[np.tri(len(begins), dtype=bool)], abs=2e-6
    )


# ----------------------------------------------------------------------------- grids and long texts


def test_a_grid_has_the_cells_of_every_head_under_its_name(figure: Run) -> None:
    svg = figure("plain")
    parsed = cells(svg)
    by_head: dict[int, list[Shape]] = {}
    titles = sorted(
        (s for s in shapes(svg) if s.tag == "text" and re.match(r"head \d ", s.text)),
        key=lambda s: (s.y, s.x),
    )
    assert [title.text[:6] for title in titles] == ["head 0", "head 1", "head 2"]
    for cell in parsed:
        above = [
            head for head, title in enumerate(titles) if title.y < cell.y and title.x <= cell.x + 1
        ]
        by_head.setdefault(
            max(above, key=lambda head: (titles[head].y, titles[head].x)), []
        ).append(cell)
    for head in range(3):
        assert [cell.weight for cell in by_head[head]] == pytest.approx(
            pattern("plain")[0, head].ravel(), abs=1e-6
        )


def test_a_checkpoint_has_a_row_for_each_layer(figure: Run) -> None:
    parsed = shapes(figure("gpt2"))
    layers = {s.text: s.y for s in parsed if s.tag == "text" and re.fullmatch(r"layer \d", s.text)}
    assert list(layers) == ["layer 0", "layer 1", "layer 2"]
    assert sorted(layers.values()) == list(layers.values())
    assert sum(bool(re.match(r"head \d", s.text)) for s in parsed if s.tag == "text") == 18
    one = figure("t5", "--layer", "cross.1", "--head", "2")
    cross = next(
        place
        for place, layer in enumerate(document("t5")["layers"])
        if (layer["kind"], layer["layer"]) == ("cross", 1)
    )
    assert weights_of(one) == pytest.approx(pattern("t5", cross)[0, 2].ravel(), abs=1e-6)


def test_the_many_cells_of_a_long_text_have_the_colours_of_their_weights(figure: Run) -> None:
    image = pytest.importorskip("PIL.Image")
    svg = figure("long", "--head", "1", "--map-scale", "linear")
    weights, visible = pattern("long")[0, 1], np.tri(97, dtype=bool)
    pictures = [s.attributes["href"] for s in shapes(svg) if s.tag == "image"]
    if pictures:
        pixels = np.asarray(
            image.open(io.BytesIO(b64decode(pictures[0].rpartition(",")[2]))).convert("RGB")
        )
    else:
        pixels = np.array([cell.colour for cell in cells(svg)]).reshape(97, 97, 3)
    assert pixels.shape == (97, 97, 3)
    light = (pixels @ np.array([0.2126, 0.7152, 0.0722]))[visible]
    order = np.argsort(weights[visible])
    assert (np.diff(light[order]) > -1.5).all()
    assert len(svg) < 400_000


def test_effects_stand_in_a_grid_with_every_number_and_two_hues(figure: Run) -> None:
    held = document("effects")["effects"]
    svg = figure("effects")
    parsed = {s.tooltip.split(" ")[0]: s for s in shapes(svg) if s.tag == "rect" and s.tooltip}
    assert set(parsed) == {f"{effect['layer']}.{effect['head']}" for effect in held}
    for effect in held:
        cell = parsed[f"{effect['layer']}.{effect['head']}"]
        for label, name in (("Δlogit", "d_logit"), ("Δoutput", "d_output"), ("KL", "kl")):
            number = re.search(rf"{label} ([-+]?[\d.]+)", cell.tooltip)
            assert number is not None
            assert float(number[1]) == pytest.approx(effect[name], abs=6e-5)
    largest = max(held, key=lambda effect: abs(effect["d_logit"]))
    red, _, blue = (
        channel.astype(int)
        for channel in np.array([parsed[f"{e['layer']}.{e['head']}"].colour for e in held]).T
    )
    order = np.argsort([effect["d_logit"] for effect in held])
    assert (np.diff((red - blue)[order]) >= 0).all(), "from one hue to the other"
    assert any(f"{abs(largest['d_logit']):.4g}" in text for text in texts(svg))
    assert "Δlogit" not in figure("effects", "--figure", "grid")


# ----------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("words", [(), ("--head", "0", "--hide-sinks")], ids=["grid", "head"])
def test_hostile_tokens_are_text_and_nothing_is_run_or_fetched(
    figure: Run, words: tuple[str, ...]
) -> None:
    svg = figure("hostile", *words)
    root = ElementTree.fromstring(svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= set(HARMLESS)
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.lower().startswith("on")
            assert "href" not in name or value.startswith("data:image/png;base64,")
            assert all(place.startswith("#") for place in re.findall(r"url\((.*?)\)", value))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e]|@import|@font-face", svg)
    if "--head" in words:
        tooltips = " ".join(shape.tooltip for shape in shapes(svg))
        assert all(SHOWN.get(token, token) in tooltips for token in tokens("hostile"))


@pytest.mark.parametrize("name", ["plain", "hostile", "gpt2", "effects", "decoded"])
def test_nothing_reaches_over_the_edge_and_the_file_says_what_made_it(
    figure: Run, name: str
) -> None:
    svg = figure(name, *(["--figure", "walk"] if name == "decoded" else []))
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.get("viewBox", "").split()[2:])
    for shape in shapes(svg):
        assert 0 <= shape.x <= width
        assert 0 <= shape.y <= height
        if shape.tag in ("rect", "image"):
            assert shape.x + shape.number("width") <= width + 0.01
            assert shape.y + shape.number("height") <= height + 0.01
        elif shape.tag == "text" and "transform" not in shape.attributes:
            length = (
                sum(2 if ord(c) > 0x2E80 else 1 for c in shape.text)
                * 0.602
                * shape.number("font-size")
            )
            before = {"end": 1.0, "middle": 0.5}.get(
                shape.attributes.get("text-anchor", ""), 0.0
            ) * length
            assert shape.x - before >= -0.5
            assert shape.x - before + length <= width + 0.5, shape.text
    held = document(name)
    said = "".join(root.itertext())
    assert all(
        word in said
        for word in (held["environment"]["mha"], f"torch {held['environment']['torch']}")
    )
    assert "seed" in said or held["model"]
    assert (root.get("role"), bool(root.findtext(f"{SVG}title"))) == ("img", True)


def test_a_run_and_the_record_that_it_saved_give_the_same_files(mha: Run, tmp_path: Path) -> None:
    mha(
        "run",
        "the cat sat",
        *"--heads 2 --repeat 1 --save r --html a.html --svg a.svg".split(),
    )
    mha("show", "r", "--html", "b.html", "--svg", "b.svg")
    for kind in ("html", "svg"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


@pytest.mark.parametrize(
    "words", [("--head", "1", "--hide-sinks", "--map-scale", "log"), ()], ids=str
)
def test_a_png_has_the_pixels_of_the_svg_twice_as_large(
    mha: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("resvg_py")
    mha("show", saved("sinks"), "--view", "none", *words, "--svg", "f.svg", "--png", "f.png")
    svg = (tmp_path / "f.svg").read_text()
    pixels = np.asarray(image.open(tmp_path / "f.png").convert("RGB"))
    root = ElementTree.fromstring(svg)
    assert pixels.shape[:2] == pytest.approx(
        [2 * float(root.get(side, "")) for side in ("height", "width")], abs=1.5
    )
    for cell in cells(svg):
        for part in (0.1, 0.9):  # beside the number in the middle
            x, y = (
                int(2 * (at + part * cell.number(side)))
                for at, side in ((cell.x, "width"), (cell.y, "height"))
            )
            assert tuple(pixels[y, x]) == cell.colour, cell.tooltip


@pytest.mark.parametrize(
    ("name", "words", "code", "says"),
    [
        ("plain", ("--svg", "x", "--figure", "head"), 2, "3"),
        ("plain", ("--svg", "x", "--figure", "cube"), 2, "cube"),
        ("plain", ("--figure", "grid"), 2, "--figure"),
        ("plain", ("--hide-sinks",), 2, "--hide-sinks"),
        ("plain", ("--map-scale", "log"), 2, "--map-scale"),
        ("plain", ("--svg", "x", "--head", "7"), 2, "7"),
        ("plain", ("--svg", "x", "--html", "./x"), 2, "--html"),
        ("gpt2", ("--svg", "x", "--from", "99"), 2, "--from"),
        ("pair", ("--svg", "x", "--sequence", "0,1"), 2, "--sequence"),
        ("pair", ("--svg", "x", "--sequence", "3"), 2, "3"),
        ("bare", ("--svg", "x"), 1, "pattern"),
        ("gpt2", ("--svg", "x", "--figure", "effects"), (1, 2), "effect"),
        ("plain", ("--svg", "kept"), 1, "--force"),
        ("plain", ("--png", "folder"), 1, "folder"),
    ],
    ids=lambda value: (
        " ".join(value) if isinstance(value, tuple) and str in map(type, value) else None
    ),
)
def test_what_cannot_be_drawn_is_refused_and_no_file_changes(
    mha: Run, tmp_path: Path, name: str, words: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "folder").mkdir()
    assert says in mha("show", saved(name), "--view", "none", "--json", *words, code=code).said
    assert (tmp_path / "kept").read_text() == "mine"
    assert not (tmp_path / "x").exists()


def test_a_figure_of_weights_that_are_not_kept_is_refused_before_anything_runs(mha: Run) -> None:
    assert "pattern" in mha("run", "the cat", "--keep", "z", "--svg", "x.svg", code=2).said
