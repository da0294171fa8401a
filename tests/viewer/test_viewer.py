"""The viewer, driven by keys and the mouse: it shows the record's numbers.

Whole screens are compared with screens/*.txt; `MHA_NEW_SCREENS=1 pytest -n0 tests/viewer/test_viewer.py` rewrites them.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("textual")

from support.heads_made import surveyed
from support.layers_made import layered, spoiled
from support.records import make_record, walked, with_sinks
from support.viewer_driven import End, drive, pictured, seen
from textual import events
from textual.geometry import Size
from textual.screen import Screen

from mhacli.render.base.colours import KIND_SIGNS
from mhacli.results.record.corpus import CorpusSummary
from mhacli.results.record.head_statistics import HEAD_TYPES, HeadStatistics, Sink
from mhacli.results.record.record import NonAttentionLayer, Record, UserModule
from mhacli.viewer.app import Viewer
from mhacli.viewer.effects import EffectsScreen
from mhacli.viewer.head import HeadScreen
from mhacli.viewer.head_table import head_table
from mhacli.viewer.overview import Overview
from mhacli.viewer.panes.heads import HeadGrid
from mhacli.viewer.panes.matrix import Matrix
from mhacli.viewer.panes.tokens import Tokens, bar, flow, matches
from mhacli.viewer.picture import Zoom, fitting, zoom_levels
from mhacli.viewer.screen import EFFECT_KEYS, HEAD_KEYS, OVERVIEW_KEYS, TEXT_KEYS
from mhacli.viewer.session import ViewerOptions
from mhacli.viewer.text import TextScreen

SCREENS = Path(__file__).parent / "screens"
MAT = ("the", "cat", "sat", "on", "the", "mat")


def head_of(app: Viewer | End) -> HeadScreen:
    assert isinstance(app.screen, HeadScreen)
    return app.screen


def short(share: float, decimals: int) -> str:
    """A share as views write it."""
    return f"{share:.{decimals}f}".removeprefix("0")


def require_screen(name: str, shown: str) -> None:
    """The screen is the one that is kept."""
    path = SCREENS / f"{name}.txt"
    if os.environ.get("MHA_NEW_SCREENS"):
        path.write_text(shown + "\n")
    assert shown.split("\n") == path.read_text()[:-1].split("\n")


def with_sink(record: Record) -> Record:
    """The record with a head that says so of its first and last key of the first sequence, and what kind it is."""
    heads = [replace(head, kind="sink", certainty=0.625) for head in record.heads]
    heads[0] = replace(heads[0], sinks=(Sink(0, len(record.keys[0].tokens) - 1, 0.5, 0.125), Sink(0, 0, 0.5, 0.125)))
    return replace(record, heads=tuple(heads))


# -------------------------------------------------------------------------------------------------------------------- cells


def styles_of_cells(app: Viewer) -> list[tuple[str, Any]]:
    """The pieces of the matrix, the texts and the small pictures of a screen that stand for shares."""
    found = []
    for pane in app.screen.query(Matrix):
        found += [piece for line in pane.paint(*pane.size)[3:] for piece in line[2:]]
    for pane in app.screen.query(Tokens):
        found += [piece for line in pane.paint(*pane.size)[1:] for piece in line[1::2]]
    for pane in app.screen.query(HeadGrid):
        found += [piece for line in pane.paint(*pane.size) for piece in line if set(piece.text) & set("▀▄░○┃◀")]
    return [(piece.text, piece.style) for piece in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize(
    "keys", [(), ("enter",), ("enter", "+"), ("enter", "+", "+"), ("enter", "-"), ("enter", "right", "down", "x")]
)
def test_no_cell_is_bold_faint_or_underlined_not_even_the_chosen_one(keys: tuple[str, ...], colour: bool) -> None:
    record = (
        surveyed(" ".join(MAT * 5), causal=True, n_heads=2, d_model=6) if not keys else make_record(MAT, causal=True)
    )
    cells: list[tuple[str, Any]] = []

    async def look(app: Viewer, pilot: Any) -> None:
        cells.extend(styles_of_cells(app))

    drive(record, *keys, size=(100, 40), act=look, colour=colour)
    assert len(cells) >= 2
    assert [(text, str(style)) for text, style in cells if style and (style.bold or style.dim or style.underline)] == []


def test_a_chosen_token_that_is_shaded_has_a_mark_in_front() -> None:
    _, shown = drive(make_record(MAT), "enter", size=(100, 40), colour=True)
    assert shown.count(" the cat sat on the▸mat") == 2


# ------------------------------------------------------------------------------------------------------------- whole screens


@pytest.mark.parametrize(
    ("name", "keys", "size"),
    [
        ("overview", (), (80, 24)),
        ("head", ("enter",), (80, 24)),
        ("head_small", ("enter",), (60, 20)),
        ("head_tiny", ("enter",), (40, 12)),
        ("head_wide", ("enter", "x"), (160, 36)),
        ("overview_tiny", (), (60, 9)),
        ("keys", ("enter", "question_mark"), (80, 24)),
        ("origin", ("i",), (80, 24)),
        ("walk", ("w",), (80, 24)),
    ],
)
def test_a_screen_is_as_it_is_kept(name: str, keys: tuple[str, ...], size: tuple[int, int]) -> None:
    require_screen(name, drive(walked(with_sinks(make_record(MAT, causal=True), 0)), *keys, size=size)[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(20, 5), (24, 6), (30, 8), (36, 10), (60, 9), (130, 8)])
def test_the_smallest_screens_keep_the_heads_and_the_matrix(size: tuple[int, int]) -> None:
    record = make_record(MAT, n_heads=3, causal=True)
    _, shown = drive(record, size=size)
    assert re.search("0.*1.*2", shown.split("\n")[2])
    _, shown = drive(record, "enter", size=size)
    assert re.search(r"^5 mat *▸[^ ]", shown, re.MULTILINE), "the row of the cursor, with its cells"
    assert "query 5 mat" in shown


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [(40, 8), (40, 12), (80, 24)])
def test_a_click_finds_the_cell_under_it_however_many_lines_stand_above(size: tuple[int, int]) -> None:
    clicked = []

    async def click(app: Viewer, pilot: Any) -> None:
        rows = [(number, line) for number, line in enumerate(seen(app).split("\n")) if re.match(r"[1-5][ –]", line)]
        y, line = rows[0]
        clicked.append(int(line[0]))
        await pilot.click(offset=(12, y))

    end, _ = drive(make_record(MAT), "enter", *["up"] * 6, act=click, size=size)
    assert end.screen.row in (clicked[0], clicked[0] + 1)
    assert end.screen.row > 0


def test_layers_stand_in_rows_with_a_sign_for_each_head() -> None:
    record = layered(n_layers=4, n_heads=11, without=(NonAttentionLayer(2, "mamba"),))
    require_screen("layers", drive(record, "down", "right")[1])


# -------------------------------------------------------------------------------------------------------------- cursor


def test_the_read_out_shows_the_weight_entropy_and_names_of_the_cursors_cell() -> None:
    record = make_record(MAT, causal=True)
    end, shown = drive(record, "enter", "up", "home", "right")
    assert (head_of(end).row, head_of(end).column) == (4, 1)
    weight, entropy = record.arrays["pattern"][0, 0, 4, 1], record.arrays["entropy"][0, 0, 4]
    assert f"query 4 the  key 1 cat  weight {short(weight, 4)}" in shown
    assert f"({weight:.6g})" in shown
    assert f"entropy {entropy:.4g} nats" in shown
    assert "row sum 1.0000" in shown


def test_keys_move_the_cursor_and_stop_at_the_ends() -> None:
    record = make_record(MAT, causal=True)
    assert record.arrays["pattern"][0, 0, 5].argmax() == 5, "where the cursor begins"
    steps = (
        (("ctrl+home",), (0, 5)),
        (("ctrl+home", "ctrl+end", "home"), (5, 0)),
        (("ctrl+home", "end"), (0, 0)),
        (("up", "up", "down", "home", "left"), (4, 0)),
        (("down", "end", "right"), (5, 5)),
        (("pageup", "home"), (0, 0)),
    )

    async def move(app: Viewer, pilot: Any) -> None:
        for keys, cell in steps:
            head_of(app).go(5, 5)
            await pilot.press(*keys)
            assert (head_of(app).row, head_of(app).column) == cell, keys

    drive(record, "enter", act=move)


def test_pages_of_the_overview_stop_at_the_first_and_the_last_layer() -> None:
    record = layered(n_layers=25)

    async def turn(app: Viewer, pilot: Any) -> None:
        rows = []
        for key in ("pagedown", "pagedown", "pagedown", "pageup", "pageup", "pageup"):
            await pilot.press(key)
            rows.append(app.session.place)
        (first, _), *_ = rows
        assert 1 < first < 24
        assert rows[1:3] == [(2 * first, 0), (24, 0)]
        assert rows[3:] == [(24 - first, 0), (24 - 2 * first, 0), (0, 0)]

    drive(record, act=turn)


def test_a_cell_that_the_mask_forbids_is_reported_as_such() -> None:
    _, shown = drive(make_record(MAT, causal=True), "enter", "ctrl+home", "right")
    assert "query 0 the  key 5 mat  weight masked" in shown


def test_the_list_has_the_strongest_keys_in_order_with_exact_weights_and_what_is_left() -> None:
    record = make_record(MAT, n_heads=3)
    end, shown = drive(record, "enter", "T", "h")
    row = record.arrays["pattern"][0, 1, 5]
    order = np.argsort(-row, kind="stable")
    listed = re.findall(r"(\d) (\w+) +(\.\d{5})", shown)
    assert [(int(place), token) for place, token, _ in listed] == [(int(i), MAT[i]) for i in order[:5]]
    assert [float(weight) for *_, weight in listed] == pytest.approx(row[order[:5]], abs=6e-6)
    assert f"1 more get .{round(1e5 * float(row[order[5]])):05d}" in shown
    assert end.app.session.place == (0, 1)


def test_the_lists_keys_are_walked_by_arrows_when_it_has_the_focus() -> None:
    record = make_record(MAT)
    order = np.argsort(-record.arrays["pattern"][0, 0, 5], kind="stable")
    end, _ = drive(record, "enter", "tab", "down", "down")
    assert head_of(end).column == order[2]


def test_texts_are_shaded_by_the_cursors_row_and_column_up_to_the_largest_of_each() -> None:
    record = make_record(MAT)
    pattern = record.arrays["pattern"][0, 0].astype(float)
    _, shown = drive(record, "enter", "up", "home", "right", size=(120, 36))
    row, column = pattern[4], pattern[:, 1]
    signs = ["·░▒▓█"[min(4, round(255 * x / of.max()) * 5 // 256)] for of in (row, column) for x in of]
    assert "".join(f"{sign}{token}" for sign, token in zip(signs[:6], MAT, strict=True)) in shown
    assert "".join(f"{sign}{token}" for sign, token in zip(signs[6:], MAT, strict=True)) in shown
    assert f"attention from query 4 the · max {short(row.max(), 4)}" in shown
    assert f"attention to key 1 cat · max {short(column.max(), 4)}" in shown


@pytest.mark.parametrize(
    ("width", "words"), [(80, "to key 1 cat · max "), (120, "queries: attention to key 1 cat · max ")]
)
def test_the_title_of_a_text_is_the_longest_that_fits(width: int, words: str) -> None:
    record = make_record(MAT)
    largest = short(float(record.arrays["pattern"][0, 0][:, 1].max()), 4)
    _, shown = drive(record, "enter", "home", "right", size=(width, 30))
    assert f"─ {words}{largest} ─" in shown


def test_arrows_walk_the_texts_from_token_to_token_and_line_to_line() -> None:
    record = make_record(tuple("abcdefghijklmnopqrstuvwxyz"), n_heads=2)
    end, _ = drive(record, "enter", "home", "tab", "tab", "right", "right", size=(60, 20))
    assert head_of(end).column == 2
    end, _ = drive(record, "enter", "tab", "tab", "tab", "up", size=(60, 20))
    assert head_of(end).row == 12, "a line of the queries' pane, 26 columns wide, holds 13 letters, so z stands below m"


# -------------------------------------------------------------------------------------------------------- what is drawn


def test_taking_sinks_out_renormalises_rows_and_says_how_much_went() -> None:
    record = with_sink(make_record(MAT))
    end, shown = drive(record, "enter", "home", "right", "x")
    pattern = record.arrays["pattern"][0, 0].astype(float)
    left = 1 - pattern[:, 0] - pattern[:, 5]
    assert f"weight {short(pattern[5, 1] / left[5], 4)}" in shown
    assert f"taken out {short(1 - left[5], 4)}" in shown
    assert f"sinks: keys 0, 5, {100 * (1 - left).mean():.0f} %, taken out, rows renormalised" in shown
    _, again = drive(record, "enter", "home", "right", "x", "x")
    assert f"weight {short(pattern[5, 1], 4)}" in again
    assert end.app.session.hides_sinks


def test_where_no_head_has_a_sink_none_is_taken_out_and_that_is_noted() -> None:
    end, shown = drive(make_record(MAT), "enter", "x")
    assert "no head of this record has a sink to take out" in shown
    assert not end.app.session.hides_sinks
    assert "taken out, rows renormalised" not in shown
    _, shown = drive(make_record(MAT), "enter", size=(200, 40))
    assert " sinks" not in shown.split("\n")[-1]


def test_the_last_line_keeps_the_most_useful_keys_that_fit() -> None:
    record = with_sink(make_record(MAT))
    last = [drive(record, "enter", size=(width, 24))[1].split("\n")[-1] for width in (80, 60, 20)]
    words = [re.findall(r"\b(move|part|head|zoom|scale|sinks|find|walk|copy|help|back)\b", line) for line in last]
    assert words[0] == ["move", "part", "head", "zoom", "scale", "sinks", "help", "back"]
    assert words[1] == ["move", "part", "head", "zoom", "help", "back"]
    assert words[2] == ["help", "back"]


def test_a_cell_that_was_taken_out_is_reported_as_such_and_not_as_a_small_weight() -> None:
    record = with_sink(make_record(MAT, causal=True))
    was = record.arrays["pattern"][0, 0, 5, 0]
    _, shown = drive(record, "enter", "home", "x")
    assert f"weight taken out (was {was:.6g})" in shown
    assert {"0", "–"} <= {line.split(":")[0] for line in re.split(" · |\n", shown)}
    assert re.search(r"^5 mat ▸\[ +–\].*·\.16 +–", shown, re.MULTILINE), "the first key, and the last"
    assert "top 4 of 4 keys" in shown
    assert "key 0 the is taken out" in shown
    assert "0 the " not in "".join(line[50:] for line in shown.split("\n")[:7]), "it is not in the list"
    _, shown = drive(record, "enter", "x", "minus", "minus")
    assert "blank: masked or taken out" in " ".join(shown.split())
    _, shown = drive(record, "enter", "x", "ctrl+home")
    assert "no key but sinks" in shown


def test_the_legend_shows_how_this_zoom_shows_what_is_not_allowed() -> None:
    for colour in (True, False):
        _, shown = drive(make_record(MAT, causal=True), "enter", colour=colour)
        assert "0: masked" in shown
        _, shown = drive(make_record(MAT, causal=True), "enter", "minus", "minus", colour=colour)
        assert "blank: masked" in shown


def test_a_scale_whose_top_is_exceeded_says_so() -> None:
    record = make_record(MAT, causal=True)
    pattern = record.arrays["pattern"][0, 0]
    assert pattern[0, 0] == 1, "a query that sees one key alone"
    assert f"linear, 0 … {pattern[1:].max():.4g} or more" in drive(record, "enter")[1]
    assert "or more" not in drive(make_record(MAT), "enter")[1]


def test_scales_go_round_and_the_caption_shows_their_range() -> None:
    record = make_record(MAT)
    top = record.arrays["pattern"][0, 0].max()

    async def turn(app: Viewer, pilot: Any) -> None:
        said = (
            f"scale linear, 0 … {top:.4g}",
            f"scale log, {top / 1000:.4g} or less … {top:.4g}",
            "scale rank, the smallest … the largest of 36 cells",
        )
        for words in (*said, said[0]):
            assert words in seen(app)
            await pilot.press("s")

    drive(record, "enter", act=turn)


def test_signs_follow_the_linear_scale_where_there_is_no_colour() -> None:
    record = make_record(tuple(f"w{i}" for i in range(9)), causal=True)
    pattern = record.arrays["pattern"][0, 0].astype(float)
    top = pattern[1:].max()

    async def look(app: Viewer, pilot: Any) -> None:
        assert head_of(app).matrix.zoom() == Zoom(1, 2)
        lines = [line for line in seen(app).split("\n") if re.match(r"\d w\d ", line)]
        for row in range(9):
            levels = [round(255 * min(1.0, pattern[row, column] / top)) for column in range(row + 1)]
            expected = "".join(2 * "·░▒▓█"[min(4, level * 5 // 256)] for level in levels)
            assert lines[row][7 : 7 + 2 * (row + 1)] == expected

    drive(record, "enter", "minus", act=look)


@pytest.mark.parametrize("colour", [True, False])
def test_a_cell_of_four_columns_has_a_number_with_a_blank_before_it(colour: bool) -> None:
    record = make_record(tuple(f"w{i}" for i in range(9)), causal=True)
    pattern = record.arrays["pattern"][0, 0].astype(float)

    async def look(app: Viewer, pilot: Any) -> None:
        assert head_of(app).matrix.zoom() == Zoom(1, 4)
        lines = [line for line in seen(app).split("\n") if re.match(r"\d w\d ", line)]
        for row in range(9):
            cells = [lines[row].ljust(50)[7 + 4 * column : 11 + 4 * column] for column in range(9)]
            assert cells == [
                f"{short(pattern[row, column], 2)[:3] if column <= row else '0':>4}" for column in range(9)
            ]

    drive(record, "enter", act=look, colour=colour)


def test_blocks_are_means_of_sums_where_not_all_cells_fit() -> None:
    record = make_record(tuple(f"w{i}" for i in range(61)), n_heads=2)
    pattern = record.arrays["pattern"][0, 0].astype(float)

    async def look(app: Viewer, pilot: Any) -> None:
        factor = head_of(app).matrix.zoom().factor
        assert factor > 1
        row, column = head_of(app).row // factor, head_of(app).column // factor
        block = pattern[row * factor : (row + 1) * factor, column * factor : (column + 1) * factor]
        assert f"{factor} × {factor} tokens a cell, here {short(block.sum(axis=1).mean(), 4)}" in seen(app)

    drive(record, "enter", act=look)


def test_lines_of_two_blocks_are_named_by_all_their_places() -> None:
    record = make_record(tuple(f"w{i}" for i in range(120)), n_heads=2)

    async def look(app: Viewer, pilot: Any) -> None:
        factor = head_of(app).matrix.zoom().factor
        named = [tuple(map(int, found)) for found in re.findall(r"^(\d+)–(\d+) ", seen(app), re.MULTILINE)]
        assert head_of(app).matrix.zoom().halves
        assert factor > 1
        assert named[:4] == [(2 * factor * line, 2 * factor * (line + 1) - 1) for line in range(4)]

    drive(record, "enter", act=look, colour=True)


def test_many_cells_are_made_small_pictures_of_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhacli.viewer.panes.heads._CELLS_AT_ONCE", 1)

    async def wait(app: Viewer, pilot: Any) -> None:
        for _ in range(200):
            if len(app.screen.heads._small) == 5:
                break
            await pilot.pause(0.02)
        assert all(re.search("[░▒▓█]", seen(app).split("\n")[3][16 * head :][:16]) for head in range(5))
        assert len(app.screen.heads._small) == 5
        await pilot.press("s")
        assert app.screen.heads._small_as[2] == "log", "another scale, other pictures"

    drive(make_record(MAT, n_heads=5), act=wait)


@pytest.mark.parametrize("colour", [True, False])
def test_small_pictures_have_numbers_where_every_cell_has_room(colour: bool) -> None:
    record = make_record(MAT, n_heads=4, causal=True)
    _, shown = drive(record, size=(120, 40), colour=colour)
    rows = [line[:70] for line in shown.split("\n") if re.search(r"\.\d\d |1\.00", line[:70])]
    pattern = record.arrays["pattern"][0].astype(float)
    expected = [
        [short(weight, 2) for head in pair for weight in pattern[head, row, : row + 1]]
        for pair in ((0, 1), (2, 3))
        for row in range(6)
    ]
    assert [row.split() for row in rows if "nearest" not in row] == expected


def test_heads_of_one_layer_stand_in_as_many_lines_as_make_them_largest() -> None:
    async def walk(app: Viewer, pilot: Any) -> None:
        for key, place in (("down", (0, 2)), ("right", (0, 3)), ("down", (0, 3)), ("up", (0, 1)), ("up", (0, 1))):
            await pilot.press(key)
            assert app.session.place == place, key
        await pilot.click("#heads", offset=(2, 22))
        assert app.session.place == (0, 2)

    drive(make_record(MAT, n_heads=4, causal=True), size=(120, 40), act=walk)


def test_below_the_signs_of_many_heads_stand_the_pictures_of_the_cursors_layer() -> None:
    record = layered(n_layers=12, n_heads=12)

    async def look(app: Viewer, pilot: Any) -> None:
        grid = app.screen.heads
        assert grid.layout_for(*grid.size).thumbnail is None
        top, layout = grid.tiles_for(*grid.size)
        lines = seen(app).split("\n")
        assert lines[1 + top - 1].startswith("─ layer 0 ─")
        await pilot.press("down", "right")
        await pictured(app, pilot)
        assert seen(app).split("\n")[1 + top - 1].startswith("─ layer 1 ─")
        drawn = {(head.layer.layer, head.head) for head in grid._small}
        assert drawn == {(layer, head) for layer in (0, 1) for head in range(12)}
        await pilot.click("#heads", offset=(layout.width + 1, top + layout.height + 1))
        assert app.session.place == (1, layout.side_by_side + 1)
        await pilot.click("#heads", offset=(layout.width, 4))
        assert app.session.place[0] == 2, "a sign, in the third of the layers"

    drive(record, size=(120, 40), act=look)


def test_a_move_sends_two_titles_and_no_picture_but_another_scale_sends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    render_line = HeadGrid.render_line

    def noted(grid: HeadGrid, y: int) -> Any:
        sent.append(y)
        return render_line(grid, y)

    async def move(app: Viewer, pilot: Any) -> None:
        height = app.screen.heads.size.height
        below = 1 + app.screen.heads.layout_for(*app.screen.heads.size).height
        for key, lines in (("right", {1}), ("down", {1, below}), ("s", set(range(height)))):
            sent.clear()
            await pilot.press(key)
            await pilot.pause()
            assert set(sent) == lines, key

    monkeypatch.setattr(HeadGrid, "render_line", noted)
    drive(make_record(MAT, n_heads=4, causal=True), size=(120, 40), act=move)


@pytest.mark.parametrize("size", [(120, 40), (200, 50)])
def test_a_wide_screen_has_a_small_picture_of_each_of_seventy_two_heads(size: tuple[int, int]) -> None:
    record = layered(n_layers=6, n_heads=12)

    async def look(app: Viewer, pilot: Any) -> None:
        layout = app.screen.heads.layout_for(*app.screen.heads.size)
        assert len(app.screen.heads._small) == 72
        assert layout.thumbnail.width >= 8
        assert layout.thumbnail.height >= 4
        legend = " ".join(seen(app).split("\n")[-3:])
        for head in record.heads:
            sign = KIND_SIGNS[head.kind][0]
            assert f"{sign} {HEAD_TYPES[head.kind].name}" in legend or layout.width > app.screen.heads.widest_title

    drive(record, size=size, act=look)


def test_two_attentions_of_one_layer_have_each_its_own_picture() -> None:
    record = layered(n_layers=3, n_heads=4)
    twins = tuple(replace(one, layer=0) if one.layer == 1 else one for one in record.layers)
    heads = tuple(replace(one, layer=0) if one.layer == 1 else one for one in record.heads)

    async def look(app: Viewer, pilot: Any) -> None:
        entries = [app.session.head_table.head_at(row, 2) for row in (0, 1)]
        pictures = [app.session.picture_of(entry) for entry in entries]
        assert pictures[0] is not pictures[1]
        assert not np.array_equal(pictures[0].base.weights, pictures[1].base.weights)
        assert app.session.picture_of(entries[0]) is pictures[0]

    _, shown = drive(replace(record, layers=twins, heads=heads), "down", "enter", act=look)
    assert shown.startswith(f"layer 0 · {twins[1].name} · head 0"), "and a name of its own"


def test_the_first_line_says_which_layer_is_not_verified() -> None:
    record = spoiled(layered(), 1)
    lines = [drive(record, *["down"] * layer, "enter")[1].split("\n")[0] for layer in range(3)]
    assert ["not verified" in line for line in lines] == [False, True, False]
    beside = [drive(record, *["down"] * layer, size=(140, 40))[1] for layer in range(3)]
    assert ["not verified" in shown for shown in beside] == [False, True, False]


def test_the_first_line_of_a_corpus_says_what_is_of_all_documents_and_what_of_one() -> None:
    record = replace(layered(), corpus=CorpusSummary(1234, 98765, 0, 512, "c.jsonl", 17, ("cpu",), ()))
    assert "means over 1,234 documents, patterns of one: " in drive(record)[1].split("\n")[0]
    assert "documents" not in drive(layered())[1]


def test_the_chosen_cell_alone_is_reversed() -> None:
    record = make_record(MAT)

    async def look(app: Viewer, pilot: Any) -> None:
        screen = head_of(app)
        pieces = [piece for line in screen.matrix.paint(*screen.matrix.size) for piece in line]
        (marked,) = (piece.text for piece in pieces if piece.style is not None and piece.style.reverse)
        assert short(record.arrays["pattern"][0, 0, screen.row, screen.column], 2) in marked

    drive(record, "enter", "up", "up", "left", act=look)


def test_zooming_goes_from_blocks_to_four_decimals_and_back() -> None:
    record = make_record(tuple(f"w{i}" for i in range(40)), n_heads=2)

    async def zoom_in(app: Viewer, pilot: Any) -> None:
        matrix = head_of(app).matrix
        widths = [(matrix.zoom().factor, matrix.zoom().width)]
        for _ in range(9):
            await pilot.press("plus")
            widths.append((matrix.zoom().factor, matrix.zoom().width))
        assert widths[0][0] > 1
        assert widths[-1] == (1, 8)
        assert widths == sorted(widths, key=lambda zoom: (-zoom[0], zoom[1]))
        assert "cells are as large as they get" in seen(app)
        await pilot.press("0")
        assert (matrix.zoom().factor, matrix.zoom().width) == widths[0]
        await pilot.press("minus")
        assert "all of it is on the screen" in seen(app)

    drive(record, "enter", act=zoom_in)


def test_a_window_of_large_cells_follows_the_cursor() -> None:
    record = make_record(tuple(f"w{i}" for i in range(40)), n_heads=2)
    _, shown = drive(record, "enter", *["plus"] * 6, "slash", "2", "0", "enter", "slash", "tab", "2", "5", "enter")
    weight = record.arrays["pattern"][0, 0, 20, 25]
    assert re.search(r"rows \d+–\d+ of 40", shown)
    assert f"{short(weight, 4)}]" in shown
    assert "▾ 25 w25" in shown or "25 w25 ▾" in shown


# -------------------------------------------------------------------------------------------------------------- finding


def test_typing_jumps_to_the_first_match_from_the_cursor_on_and_n_goes_round() -> None:
    async def search(app: Viewer, pilot: Any) -> None:
        assert "to a query: th   2 of 2" in seen(app)
        assert head_of(app).row == 4
        await pilot.press("enter")
        for key, row in (("n", 0), ("n", 4), ("N", 0), ("N", 4)):
            await pilot.press(key)
            assert head_of(app).row == row

    drive(make_record(MAT), "enter", "up", "slash", "t", "h", act=search)


def test_a_number_jumps_to_its_place_and_tab_turns_to_the_other_axis() -> None:
    end, _ = drive(make_record(MAT), "enter", "slash", "3", "enter")
    assert head_of(end).row == 3
    end, _ = drive(make_record(MAT), "enter", "slash", "tab", "3", "enter")
    assert (head_of(end).row, head_of(end).column) == (5, 3)


def test_keys_that_come_in_one_piece_are_all_typed() -> None:
    async def burst(app: Viewer, pilot: Any) -> None:
        for key in ("slash", "m", "a", "t"):
            app.post_message(events.Key(key, "/" if key == "slash" else key))
        await pilot.pause()
        await pilot.pause()
        assert "to a query: mat   1 of 1" in seen(app)
        for key in ("backspace", "backspace", "backspace", "o", "n"):
            app.post_message(events.Key(key, key if len(key) == 1 else None))
        app.post_message(events.Key("enter", None))
        await pilot.pause()
        await pilot.pause()
        assert head_of(app).row == 3
        assert not head_of(app).prompt.display

    drive(make_record(MAT), "enter", "ctrl+home", act=burst)


def test_a_search_without_a_match_says_so_when_it_is_taken() -> None:
    end, shown = drive(make_record(MAT), "enter", "up", "slash", "z", "z", "enter")
    assert "no query matches zz" in shown.split("\n")[-1]
    assert head_of(end).row == 4


def test_escape_goes_back_to_where_the_search_began() -> None:
    end, shown = drive(make_record(MAT), "enter", "up", "slash", "c", "a", "escape")
    assert head_of(end).row == 4
    assert "move" in shown.split("\n")[-1]


def test_letters_that_are_keys_are_only_typed_while_searching() -> None:
    end, shown = drive(make_record(MAT), "enter", "slash", "q", "s", "question_mark", "space", "backspace")
    assert "to a query: qs?   no match" in shown
    assert isinstance(end.screen, HeadScreen)


def test_matches_look_at_tokens_as_they_are_and_as_they_are_shown() -> None:
    text = make_record(("A\x1bb", "cab", "12", "x")).sequences[0]
    assert matches(text, "ab") == (1,)
    assert matches(text, "\\x1b") == (0,)
    assert matches(text, "a") == (0, 1)
    assert matches(text, "1") == (1, 0, 2)
    assert matches(text, "") == ()


# -------------------------------------------------------------------------------------------------------------- copying


def test_the_row_is_copied_as_json_with_the_records_own_numbers() -> None:
    record = with_sinks(make_record(MAT, causal=True), 0)
    end, shown = drive(record, "enter", "up", "y")
    copied = json.loads(end.app.clipboard)
    row = record.arrays["pattern"][0, 0, 4]
    assert copied["schema"] == "mha.row/1"
    assert (copied["layer"], copied["head"], copied["sequence"]) == (None, 0, 0)
    assert copied["query"] == {"place": 4, "token": "the"}
    assert [(key["place"], key["token"]) for key in copied["keys"]] == [(i, MAT[i]) for i in range(5)]
    assert [np.float32(key["share"]) for key in copied["keys"]] == list(row[:5])
    assert all(len(repr(key["share"])) <= 14 for key in copied["keys"]), "float32 has no more digits than that"
    assert copied["sinks"] == {"places": [0], "share": pytest.approx(row[0]), "removed": False}
    assert f"copied query 4 the as JSON: 5 keys, {len(end.app.clipboard)} bytes, by OSC 52" in shown


def test_a_row_without_sinks_says_so_when_it_is_copied() -> None:
    record = with_sink(make_record(MAT))
    end, _ = drive(record, "enter", "x", "y")
    copied, row = json.loads(end.app.clipboard), record.arrays["pattern"][0, 0, 5].astype(float)
    taken = row[0] + row[5]
    assert copied["sinks"] == {"places": [0, 5], "share": pytest.approx(taken), "removed": True}
    assert copied["shares"] == "renormalised without sinks"
    assert [key["place"] for key in copied["keys"]] == [1, 2, 3, 4], "what was taken out is no share of 0"
    assert [key["share"] for key in copied["keys"]] == pytest.approx(row[1:5] / (1 - taken))


# --------------------------------------------------------------------------------------------------------------- mouse


def test_a_click_chooses_a_head_and_another_one_opens_it() -> None:
    async def click(app: Viewer, pilot: Any) -> None:
        await pilot.click("#heads", offset=(45, 4))
        assert app.session.place == (0, 1)
        assert isinstance(app.screen, Overview)
        await pilot.click("#heads", offset=(45, 4))
        assert isinstance(app.screen, HeadScreen)

    drive(make_record(MAT), act=click)


def test_clicks_choose_a_cell_a_token_and_a_key_of_the_list() -> None:
    record = make_record(MAT)

    async def click(app: Viewer, pilot: Any) -> None:
        lines = seen(app).split("\n")
        y = next(i for i, line in enumerate(lines) if line.startswith("2 sat"))
        x = next(line.index(" on ") + 1 for line in lines if line.startswith("query  the"))
        await pilot.click(offset=(x, y))
        assert (head_of(app).row, head_of(app).column) == (2, 3)
        await pilot.click("#keys", offset=(2, 1))
        assert (head_of(app).row, head_of(app).column) == (2, 0)
        await pilot.click("#queries", offset=(6, 1))
        assert head_of(app).row == 1
        await pilot.click("#top-keys", offset=(4, 2))
        assert head_of(app).column == int(np.argsort(-record.arrays["pattern"][0, 0, 1])[1])

    drive(record, "enter", act=click)


def test_the_wheel_moves_the_matrix_and_scrolls_texts() -> None:
    record = make_record(tuple(f"w{i}" for i in range(90)), n_heads=2)

    async def turn(app: Viewer, pilot: Any) -> None:
        screen = head_of(app)
        factor = screen.matrix.zoom().factor
        column = screen.column
        for sideways in (False, True):
            wheel = (0, 0, 0, -1, 0, sideways, False, False)
            screen.matrix.post_message(events.MouseScrollUp(screen.matrix, *wheel))
            await pilot.pause()
        assert (screen.row, screen.column) == (89 - 3 * factor, max(0, column - 3 * factor))
        before, place = screen.queries_pane.top, screen.row
        screen.queries_pane.post_message(events.MouseScrollUp(screen.queries_pane, 0, 0, 0, -1, 0, False, False, False))
        await pilot.pause()
        assert (screen.queries_pane.top, screen.row) == (before - 1, place)

    drive(record, "enter", act=turn)


# --------------------------------------------------------------------------------------------- sequences, heads, layers


def test_sequences_of_different_lengths_show_their_own_tokens_whatever_the_padding() -> None:
    record = make_record(MAT, ("a", "dog"))
    shifted = {name: np.roll(array, 4, axis=2) if array.ndim > 2 else array for name, array in record.arrays.items()}
    left = replace(
        record,
        config=replace(record.config, padding="left"),
        arrays={
            name: np.concatenate([record.arrays[name][:1], _shifted(shifted[name], name)[1:]]) for name in record.arrays
        },
    )
    for each in (record, left):
        end, shown = drive(each, "enter", "full_stop")
        weight = record.arrays["pattern"][1, 0, 1, head_of(end).column]
        assert end.app.session.sequence == 1
        assert "sequence 1 of 0–1" in shown
        assert f"weight {short(weight, 4)}" in shown
        assert re.search(r"query +a +dog", shown)
    end, _ = drive(record, "enter", "comma")
    assert end.app.session.sequence == 1, "around the ends"


def _shifted(array: np.ndarray, name: str) -> np.ndarray:
    """Keys too moved behind their padding."""
    has_keys = name in ("qk", "scores", "pattern", "allowed")
    return np.roll(array, 4, axis=3) if has_keys else array


def test_heads_are_walked_around_all_layers_and_layers_to_their_ends() -> None:
    steps = (
        ("h", (0, 1)), ("H", (0, 0)), ("H", (2, 3)), ("right_square_bracket", (0, 0)), ("left_square_bracket", (2, 3)),
        ("h", (0, 0)), ("l", (1, 0)), ("l", (2, 0)), ("l", (2, 0)), ("L", (1, 0)), ("left_curly_bracket", (0, 0)), ("L", (0, 0)),
    )  # fmt: skip

    async def walk(app: Viewer, pilot: Any) -> None:
        for key, place in steps:
            await pilot.press(key)
            assert app.session.place == place, key
        assert "no layer there has this head" in seen(app)

    drive(layered(n_layers=3, n_heads=4), "enter", act=walk)


def test_the_cursor_stays_on_its_tokens_from_head_to_head_and_while_the_screen_changes_size() -> None:
    async def resize(app: Viewer, pilot: Any) -> None:
        await pilot.resize_terminal(170, 50)
        await pilot.pause()
        assert "query 3 on  key 1 cat" in seen(app)
        assert app.screen.has_class("wide")
        await pilot.resize_terminal(60, 20)
        await pilot.pause()
        assert "query 3 on  key 1 cat" in seen(app)

    _, shown = drive(make_record(MAT), "enter", "up", "up", "home", "right", "h", act=resize)
    assert "head 1" in shown


def test_a_gallery_has_a_row_for_layers_without_attention() -> None:
    record = layered(n_layers=3, n_heads=4, without=(NonAttentionLayer(1, "mamba"),))
    laid = head_table(record)
    assert [(row.name, row.instead) for row in laid.rows] == [("0", ""), ("1", "mamba"), ("2", ""), ("3", "")]
    assert laid.above((0, 2), 1) == (2, 2)
    assert laid.beside((0, 3), 1) == (2, 0)


# ------------------------------------------------------------------------------------------------- odd records and texts


HOSTILE = ("[bold]x[/]", "\x1b[31m", "\u202eabc", "日本語", "🎉", "$(rm)", "a b", "◌", "x" * 90)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [(80, 24), (60, 20), (160, 40)])
def test_hostile_and_wide_tokens_are_shown_harmless_and_in_line(size: tuple[int, int]) -> None:
    record = make_record(HOSTILE)
    _, shown = drive(record, "enter", size=size)
    assert "[bold]x[/]" in shown
    assert "\\x1b[31m" in shown
    assert "日本語" in shown
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    drive(record, "enter", *["plus"] * 4, size=size)


def test_nan_is_a_question_mark_and_null() -> None:
    record = make_record(MAT)
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 5] = np.nan
    end, shown = drive(replace(record, arrays={**record.arrays, "pattern": pattern}), "enter", "y")
    assert "weight nan" in shown
    assert "?: not a number" in shown
    assert json.loads(end.app.clipboard)["keys"][0]["share"] is None
    bad = replace(record, arrays={**record.arrays, "pattern": pattern})
    for keys, colour in (
        (("minus", "minus"), False),
        (("minus", "minus"), True),
        (("minus", "minus", "minus"), True),
    ):  # two columns, and half lines
        _, shown = drive(bad, "enter", *keys, colour=colour)
        assert re.search(r"^[45] \w+ +▸\s?(\[\])?\?+", shown, re.MULTILINE), shown


def test_a_query_that_sees_no_key_says_so() -> None:
    record = make_record(MAT)
    allowed, pattern = record.arrays["allowed"].copy(), record.arrays["pattern"].copy()
    allowed[0, 0, 5], pattern[0, :, 5] = False, 0.0
    end, shown = drive(replace(record, arrays={**record.arrays, "allowed": allowed, "pattern": pattern}), "enter", "y")
    assert "this query sees no key" in shown
    assert "no visible key" in shown
    assert json.loads(end.app.clipboard)["keys"] == []


def test_training_says_that_the_pattern_is_that_before_dropout() -> None:
    assert "before dropout" in drive(make_record(MAT, dropout=0.5), "enter")[1]


def test_a_learned_sink_is_reported_beside_the_row() -> None:
    record = make_record(MAT)
    heads = tuple(replace(head, learned_sink=0.25) for head in record.heads)
    arrays = {**record.arrays, "pattern": (record.arrays["pattern"] * 0.75).astype(np.float32)}
    _, shown = drive(replace(record, heads=heads, arrays=arrays), "enter")
    assert "sink logit .2500  row sum .7500" in shown
    assert "sink logit .25000" in shown


def test_a_record_without_patterns_says_how_to_keep_them() -> None:
    record = make_record(MAT)
    arrays = {name: array for name, array in record.arrays.items() if name != "pattern"}
    end, shown = drive(replace(record, arrays=arrays), "enter")
    assert isinstance(end.screen, Overview)
    assert "the record holds no pattern: mha run … --keep pattern keeps it" in shown


def test_a_record_of_user_code_is_its_walkthrough() -> None:
    record = make_record(MAT)
    module = UserModule("mine.py:Mine", (), "forward(x)", (("batch", 2),), 1, (2, 5, 6), (2, 5, 6))
    end, shown = drive(replace(record, module=module, heads=(), arrays={}))
    assert isinstance(end.screen, TextScreen)
    assert "mine.py:Mine" in shown


def test_the_walkthrough_of_a_record_without_steps_says_which_command_shows_them() -> None:
    _, shown = drive(layered(n_layers=3, n_heads=4), "w")
    assert "mha trace TEXT --model" in shown
    assert "total" not in shown


def test_cross_attention_has_other_tokens_on_its_keys() -> None:
    record = make_record(("a", "b"), context=[("v", "w", "x", "y", "z")])
    end, shown = drive(record, "enter", "home", "right")
    assert f"query 1 b  key 1 w  weight {short(record.arrays['pattern'][0, 0, 1, 1], 4)}" in shown
    assert head_of(end).picture is not None
    assert (head_of(end).picture.n_rows, head_of(end).picture.n_columns) == (2, 5)


def test_a_record_of_head_statistics_is_drawn_in_its_blocks() -> None:
    record = surveyed(" ".join(f"w{i % 97}" for i in range(700)), n_heads=2, d_model=16, causal=True)
    end, shown = drive(record, "enter", "ctrl+end", "home", "y")
    assert record.survey.block > 1
    copied = json.loads(end.app.clipboard)
    row = record.arrays["map"][0, 0, -1]
    assert copied["query"] == {"first": (len(row) - 1) * record.survey.block, "last": 699}
    assert [key["share"] for key in copied["keys"]] == pytest.approx(row)
    assert f"the record holds blocks of {record.survey.block} × {record.survey.block} tokens" in shown
    assert "mean entropy" in shown


def test_positions_in_head_statistics_are_counted_without_the_padding_before_them() -> None:
    texts = " ".join(f"w{i % 97}" for i in range(700)), " ".join(f"v{i}" for i in range(411))
    record = surveyed(*texts, n_heads=2, d_model=16, padding="left")
    block, first = record.survey.block, 700 - 411

    async def look(app: Viewer, pilot: Any) -> None:
        await pilot.press("slash", "4", "0", "0", "enter")
        screen = head_of(app)
        begins = (first + 400) // block * block - first
        assert screen.row == (begins + first) // block - first // block, "of the rows that hold a token"
        begin, end = screen.picture.base.query_places(screen.row)
        assert (begin, end) == (begins, min(410, begins + block - 1))
        assert f"query {begin}–{end}  key" in seen(app)

    drive(record, "enter", sequence=1, act=look)


# ------------------------------------------------------------------------------------------------------------ the parts


def test_every_key_does_something_and_the_help_shows_it() -> None:
    _, shown = drive(make_record(MAT), "enter", "question_mark", size=(120, 70))
    for keys, screen in (
        (HEAD_KEYS, HeadScreen),
        (OVERVIEW_KEYS, Overview),
        (EFFECT_KEYS, EffectsScreen),
        (TEXT_KEYS, TextScreen),
    ):
        for key in keys:
            namespace, _, name = key.action.partition("(")[0].rpartition(".")
            assert hasattr(Viewer if namespace == "app" else screen, f"action_{name}"), key
            assert not key.words or key.words[:50] in " ".join(shown.split())


def test_colours_run_along_the_ramp_two_queries_to_a_line() -> None:
    record = make_record(tuple(f"w{i}" for i in range(14)), n_heads=2)
    pattern = record.arrays["pattern"][0, 0]
    brightest = np.unravel_index(pattern.argmax(), pattern.shape)

    async def look(app: Viewer, pilot: Any) -> None:
        matrix = app.screen.query_one(Matrix)
        assert matrix.zoom() == Zoom(1, 1, True)
        row, column = map(int, brightest)
        strip = matrix.render_line(3 + row // 2)
        place, styles = 0, {}
        for piece in strip:
            for _ in piece.text:
                styles[place] = piece.style
                place += 1
        style = styles[matrix._label_width() + 2 + column]
        colour = style.bgcolor if row % 2 else style.color
        assert tuple(colour.triplet) == (253, 231, 37)

    drive(record, "enter", "up", "up", act=look, colour=True)


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (6, 6), (13, 29), (300, 300), (4834, 17), (5, 2000)])
def test_the_smallest_zoom_shows_all_and_each_next_one_is_larger(shape: tuple[int, int], colour: bool) -> None:
    steps = zoom_levels(shape, (18, 60), colour=colour)
    assert steps[0].fits(shape, (18, 60))
    assert steps[-1] == Zoom(1, 8)
    sizes = [(zoom.columns(shape[1]), zoom.lines(shape[0])) for zoom in steps]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(sizes))
    assert fitting(shape, (18, 60), colour=colour).fits(shape, (18, 60))


def test_a_text_flows_without_losing_or_overlapping_tokens() -> None:
    text = make_record(("ab", "c", "日本語", "x" * 30, "d")).sequences[0]
    laid = flow(text, 11)
    assert laid.starts == (0, 2, 3, 4)
    assert laid.labels[3] == "x" * 9 + "…"
    assert [laid.at(0, x) for x in range(7)] == [None, 0, 0, None, 1, None, None]
    assert laid.at(1, 6) == 2
    assert laid.below(1, 1) == 2


def test_bars_are_as_long_as_their_share() -> None:
    assert [bar(weight, 4) for weight in (0.0, 0.125, 0.5, 1.0, 2.0, float("nan"))] == [
        "",
        "▌",
        "██",
        "████",
        "████",
        "",
    ]


def test_statistics_are_reported_beside_those_of_uniform_attention() -> None:
    said = HeadStatistics(head=0, entropy=1.25, entropy_share=0.75, sink=0.4321, previous=0.0625)
    record = replace(make_record(MAT), heads=(said, replace(said, head=1)))
    _, shown = drive(record, size=(140, 40))
    assert re.search(r"entropy +1\.25 nats", shown)
    assert re.search(r"first-token weight +\.432", shown)
    assert re.search(r"previous-token score +\.062", shown)


@pytest.mark.parametrize("word", [None, "1", ""])
@pytest.mark.parametrize("colour", [True, False])
def test_the_environment_is_as_it_was_when_the_viewer_has_begun(
    word: str | None, colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if word is not None:
        monkeypatch.setenv("NO_COLOR", word)
    app = Viewer(make_record(("the", "cat")), ViewerOptions(colour=colour))
    assert os.environ.get("NO_COLOR") == word
    assert app.no_color is not colour


def test_two_sizes_in_short_order_do_not_answer_each_other_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = []
    lay_out = Screen._refresh_layout

    def counted(*given: Any, **how: Any) -> None:
        laid_out.append(given)
        lay_out(*given, **how)

    monkeypatch.setattr(Screen, "_refresh_layout", counted)

    async def act(app: Viewer, pilot: Any) -> None:
        laid_out.clear()
        for size in (Size(40, 12), Size(100, 30)):
            app.screen.post_message(events.Resize(size, size))
        await pilot.pause(0.3)
        assert len(laid_out) <= 6
        assert app.screen.size == app.size == Size(80, 24)

    drive(make_record(MAT), act=act)
