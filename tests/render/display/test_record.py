"""Records and patterns in a notebook: the record's numbers in small, static output."""

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from rich.console import Group
from support.checkpoint_views import HOSTILE, RECORDS
from support.heads_made import surveyed
from support.html_read import Sanitizer, TableReader
from support.layers_made import layered, text_of
from support.records import drawn, make_record, make_sequence, walked

from mhacli.render.base.colours import RAMP
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.display.terminal import record_views
from mhacli.render.page.document import page
from mhacli.results.record.record import Record

LIMIT = 200_000
TEXT = ("the", "cat", "sat", "on", "a", "mat")


def read(shown: object) -> TableReader:
    return TableReader(shown._repr_html_())  # type: ignore[attr-defined]


def require_static(html: str) -> None:
    assert len(html.encode()) < LIMIT
    assert not re.search(r"<script|<iframe|<img|<link|@import|url\(|\son\w+=", html)
    assert "http" not in html


def test_the_matrix_of_a_pattern_has_the_numbers_of_the_record() -> None:
    record = make_record(TEXT, causal=True, n_heads=3)
    (cells,) = read(record.pattern(head=2)).tables
    pattern = record.arrays["pattern"][0, 2]
    assert cells[0][1:] == [row[0] for row in cells[1:]] == [*TEXT]
    for i, row in enumerate(cells[1:]):
        assert row[1:] == [f"{pattern[i, j]:.2f}".removeprefix("0") if j <= i else "0" for j in range(6)]


def test_cells_have_colours_of_their_own_in_the_order_of_the_weights() -> None:
    record = make_record(TEXT, causal=True)
    (styles,) = read(record.pattern(head=0)).styles
    pattern = record.arrays["pattern"][0, 0]
    top = pattern[1:].max()  # the first query has one key only
    points = np.linspace(0, 1, len(RAMP))
    for i in range(6):
        for j in range(6):
            found = re.search("background:#([0-9a-f]{6})", styles[1 + i][1 + j])
            assert (found is None) == (j > i)
            if found is not None:
                expected = [np.interp(min(1, pattern[i, j] / top), points, part) for part in zip(*RAMP, strict=True)]
                assert np.abs(np.frombuffer(bytes.fromhex(found[1]), np.uint8) - expected).max() <= 3


def test_many_tokens_are_pooled_to_means_over_queries_and_that_is_noted() -> None:
    n, block = 70, 3  # the least that makes 32 cells or fewer
    record = make_record(tuple(f"t{i}" for i in range(n)), n_heads=1)
    shown = record.pattern(head=0)
    (titles,) = read(shown).titles
    pattern = record.arrays["pattern"][0, 0].astype(np.float64)
    assert len(titles) - 1 == len(titles[0]) - 1 == 24
    for i in range(24):
        for j in range(24):
            mean = pattern[i * block : (i + 1) * block, j * block : (j + 1) * block].sum(axis=1).mean()
            places = [f"{k * block}–{min(n, (k + 1) * block) - 1}" for k in (i, j)]
            assert titles[1 + i][1 + j] == f"{places[0]} → {places[1]} {f'{mean:.3f}'.removeprefix('0')}"
    assert "3 × 3 tokens" in shown._repr_html_()


def test_a_cell_without_a_number_has_a_sign_for_readers_without_colours() -> None:
    record = make_record(tuple(f"t{i}" for i in range(20)), n_heads=1)
    (cells,) = read(record.pattern(head=0)).tables
    weights = record.arrays["pattern"][0, 0]
    i, j = np.unravel_index(weights.argmax(), weights.shape)
    assert cells[1 + i][1 + j] == "█"
    assert {cell for row in cells[1:] for cell in row[1:]} <= set("·░▒▓█")


def test_a_number_that_is_none_and_a_masked_cell_look_different() -> None:
    record = make_record(TEXT, causal=True)
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 4, 2] = np.nan
    (cells,) = read(replace(record, arrays={**record.arrays, "pattern": pattern}).pattern(head=0)).tables
    assert (cells[5][3], cells[1][3]) == ("nan", "0")


def test_a_record_shows_its_heads_and_the_one_with_the_largest_excess() -> None:
    record = layered(n_layers=3, n_heads=4)
    html = record._repr_html_()
    heads, matrix = TableReader(html).tables
    listed = [(row[0], row[1]) for row in heads[1:] if row[0]]
    typed = [head for head in record.heads if head.kind not in ("mixed", "uniform")]
    ordered = sorted(typed, key=lambda head: -head.certainty)
    assert listed == [(str(head.layer), str(head.head)) for head in ordered[:10]]
    best = max(typed, key=lambda head: head.certainty)
    assert f"layer {best.layer} · head {best.head}: " in unescape(html)
    weights = record.pattern(layer=best.layer, head=best.head).values
    assert matrix[1][1] == f"{weights[0, 0]:.2f}".removeprefix("0")
    assert "self-check ok" in html


def test_a_record_of_mixed_heads_shows_the_first() -> None:
    html = make_record(TEXT, n_heads=3)._repr_html_()
    assert "head 0: " in html
    assert "the first of 3 heads" in html


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_html_of_a_checkpoint_is_static(name: str) -> None:
    require_static(RECORDS[name]._repr_html_())


def test_the_html_of_records_of_other_commands_is_static() -> None:
    record = make_record(TEXT, context=[("a", "dog")])
    for shown in (record, walked(make_record(TEXT)), replace(record, heads=()), surveyed("the cat sat", n_heads=2)):
        require_static(shown._repr_html_())


@pytest.mark.parametrize("keeps_styles", [False, True])
@pytest.mark.parametrize("name", sorted(RECORDS))
def test_what_a_sanitizer_leaves_of_an_output_says_the_same(name: str, keeps_styles: bool) -> None:
    """GitHub shows saved notebooks without style sheets and scripts, and by some accounts without inline styles."""
    for shown in (RECORDS[name], make_record(TEXT, causal=True).pattern(head=0)):
        html = shown._repr_html_()
        left = Sanitizer(html, frozenset({"style"}) if keeps_styles else frozenset())
        assert left.removed == {"style"}
        before, after = TableReader(html), TableReader(left.text)
        assert (after.tables, after.titles) == (before.tables, before.titles)
        assert before.tables
        assert (after.styles == before.styles) == (keeps_styles or not any(map(str, before.styles)))
        assert "{" not in left.text


def of_length(n: int, n_layers: int, n_heads: int, token: str) -> Record:
    """A record of `n_layers` × `n_heads` heads with matrices of `n` × `n`, which share their memory."""
    small = layered(text_of(("a",) * 3, parts=()), n_layers=n_layers, n_heads=n_heads, causal=True)
    tokens = tuple(f"{token}{i}" for i in range(n))
    weights = np.tri(n, dtype=np.float32) / np.arange(1, n + 1, dtype=np.float32)[:, None]
    arrays = dict(small.arrays)
    for index in range(n_layers):
        arrays[f"layers.{index}.pattern"] = np.broadcast_to(weights, (1, n_heads, n, n))
        arrays[f"layers.{index}.allowed"] = np.broadcast_to(np.tri(n, dtype=bool), (1, 1, n, n))
    return replace(small, sequences=(make_sequence(tokens, sorted(tokens)),), arrays=arrays)


@pytest.mark.parametrize("token", ["t", "<b>&\"'" * 40])
def test_the_html_of_4000_tokens_and_144_heads_is_below_the_limit(token: str) -> None:
    record = of_length(4000, 12, 12, token)
    for shown in (record, record.pattern(layer=3, head=5)):
        html = shown._repr_html_()
        require_static(html)
        assert "125 × 125 tokens" in html
    assert len(TableReader(record._repr_html_()).tables[-1]) == 33


def test_a_part_that_has_no_room_is_left_out_by_name() -> None:
    record = of_length(10, 2, 3, "t")
    assert record.model is not None
    html = replace(record, model=replace(record.model, family="x" * LIMIT))._repr_html_()
    require_static(html)
    assert "left out, to stay below 195.3 KiB: the configuration; record.page() shows every head" in html
    assert "self-check ok" in html


def test_tokens_cannot_bring_elements_with_them() -> None:
    tokens = ("<script>alert(1)</script>", '"><img onerror=x>', *HOSTILE)
    record = make_record(tokens, n_heads=1)
    for shown in (record, record.pattern(head=0)):
        assert read(shown).tags <= {
            "div",
            "style",
            "p",
            "b",
            "span",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "pre",
        }


# -------------------------------------------------------------------------------------------------- repr, rich, the page


def test_repr_is_one_line_that_says_what_it_is() -> None:
    record = layered(n_layers=2, n_heads=4)
    n = len(record.sequences[0].tokens)
    assert repr(record) == f"<Record of ./tiny, 2 layers: 8 heads, {n} tokens, self-check ok>"
    assert repr(record.heads).startswith("<HeadTable: 8 heads, 2 layers")
    assert repr(record.pattern(layer=1, head=2)) == f"<Pattern layer=1 head=2 batch=0: query={n} key={n}>"
    assert repr(make_record(TEXT, ("a", "dog"))) == "<Record: 2 heads, 6 + 2 tokens, self-check ok>"


@pytest.mark.parametrize("record", [layered(), make_record(TEXT)], ids=["model", "layer"])
def test_rich_prints_what_mha_show_prints(record: Record) -> None:
    views = record_views(record, ViewOptions(view="auto"), Screen(90, False))
    assert drawn(record, 90) == drawn(Group(*views), 90)


def test_the_page_of_a_record_is_that_of_mha_show_in_a_frame() -> None:
    record = make_record(TEXT)
    shown = record.page()
    assert shown.html == page(record, ViewOptions())
    found = re.fullmatch(
        r'<iframe sandbox="allow-scripts" style="[^"]*" srcdoc="([^"]*)"></iframe>', shown._repr_html_()
    )
    assert found is not None
    assert unescape(found[1]) == shown.html
