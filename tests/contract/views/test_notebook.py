"""What Python and a notebook get of a record: tables, patterns and displays, all with the numbers
of the record.
"""

from __future__ import annotations

import functools
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.browser import contrasts_of, opened
from support.html import Html
from support.mha import run
from support.records import SHOWN, document, pattern, saved, short, tokens

import mhacli

OF_COMMAND = re.compile(r"--[a-z]|exit code|command|\bmha (run|heads|show|trace|view|explain)\b")
LIMIT = 200_000
"""The most bytes of a display."""


@functools.cache
def record(name: str) -> mhacli.Record:
    return mhacli.load(str(saved(name)))


def displayed(shown: Any) -> Html:
    """What a notebook shows of it."""
    return Html(shown._repr_html_())


# ------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("name", ["plain", "gpt2", "blocks"])
def test_heads_are_a_tuple_and_a_table_with_the_names_and_numbers_of_the_json(name: str) -> None:
    heads, held = record(name).heads, document(name)["heads"]
    rows = heads.to_dicts()
    assert len(heads) == len(tuple(heads)) == len(rows) == len(held)
    for row, printed in zip(rows, held, strict=True):
        assert row == {column: printed[column] for column in row}
        assert {"layer", "head", "kind", "entropy", "previous", "offset", "learned_sink"} <= set(
            row
        )
    assert heads[1].entropy == held[1]["entropy"]


def test_effects_are_a_table_too() -> None:
    effects = record("effects").effects
    for row, printed in zip(effects.to_dicts(), document("effects")["effects"], strict=True):
        assert all(
            row[column] == value for column, value in printed.items() if not isinstance(value, list)
        )
    assert effects[3].d_logit == document("effects")["effects"][3]["d_logit"]


@pytest.mark.parametrize("library", ["polars", "pandas", "pyarrow"])
def test_libraries_get_every_column_with_its_type_and_missing_values(library: str) -> None:
    pytest.importorskip(library)
    for table in (
        record("plain").heads,
        record("gpt2").pattern(layer=1),
        record("effects").effects,
    ):
        rows = table.to_dicts()
        if library == "polars":
            frame = table.to_polars()
            parsed, names = frame.to_dicts(), frame.columns
        elif library == "pyarrow":
            frame = table.to_arrow()
            parsed, names = frame.to_pylist(), frame.column_names
        else:
            import pandas

            frame = table.to_pandas()
            names = list(frame.columns)
            values = [
                [None if pandas.isna(value) else value for value in row]
                for row in frame.itertuples(index=False)
            ]
            parsed = [dict(zip(names, row, strict=True)) for row in values]
        assert names == list(rows[0])
        assert parsed == rows


def test_types_of_columns_are_numbers_where_values_are_missing() -> None:
    polars = pytest.importorskip("polars")
    schema = record("plain").heads.to_polars().schema
    kinds = {
        name: schema[name] for name in ("head", "kind", "entropy", "window_50", "learned_sink")
    }
    assert kinds == {
        "head": polars.Int64,
        "kind": polars.String,
        "entropy": polars.Float64,
        "window_50": polars.Int64,
        "learned_sink": polars.Float64,
    }


# ----------------------------------------------------------------------------------------- patterns


def test_a_pattern_is_an_array_with_its_tokens() -> None:
    parsed = record("pair").pattern(head=1, batch=1)
    assert np.array_equal(np.asarray(parsed), pattern("pair")[1, 1, 4:, 4:].astype(np.float32))
    assert (parsed.dims, parsed.layer, parsed.head, parsed.batch) == (("query", "key"), 0, 1, 1)
    assert parsed.query_tokens == parsed.key_tokens == ("a", "dog", "ran")
    assert np.array_equal(parsed.allowed, np.tri(3, dtype=bool))
    assert np.asarray(parsed, dtype=np.float64).dtype == np.float64
    for cell in parsed.to_dicts():
        assert cell["pattern"] == parsed.values[cell["query"], cell["key"]]
        assert (cell["query_token"], cell["allowed"]) == (
            parsed.query_tokens[cell["query"]],
            cell["key"] <= cell["query"],
        )


def test_without_a_head_or_a_layer_a_pattern_has_all_of_them() -> None:
    whole = record("gpt2").pattern()
    assert whole.dims == ("layer", "head", "query", "key")
    for layer in range(3):
        assert np.array_equal(whole.values[layer], pattern("gpt2", layer)[0].astype(np.float32))
        assert np.array_equal(record("gpt2").pattern(layer=layer).values, whole.values[layer])
    alone = record("gpt2").of_layer(1)
    assert np.array_equal(alone.arrays["pattern"][0], whole.values[1])
    assert [head.layer for head in alone.heads] == [1] * 6


def test_the_array_of_xarray_has_names_and_tokens() -> None:
    pytest.importorskip("xarray")
    whole = record("gpt2").pattern().to_xarray()
    assert whole.dims == ("layer", "head", "query", "key")
    assert list(whole.coords["query"].values) == tokens("gpt2")
    cell = whole.sel(layer=1, head=2).isel(query=9, key=4)
    assert float(cell) == np.float32(pattern("gpt2", 1)[0, 2, 9, 4])


def test_kinds_of_attention_are_chosen_and_keys_are_those_of_their_text() -> None:
    kinds = [(layer["kind"], layer["layer"]) for layer in document("t5")["layers"]]
    cross = record("t5").pattern(layer=1, head=0, kind="cross")
    assert np.array_equal(
        cross.values, pattern("t5", kinds.index(("cross", 1)))[0, 0].astype(np.float32)
    )
    assert cross.key_tokens == tuple(document("t5")["context"][0]["tokens"])
    assert record("t5").pattern(kind="encoder").values.shape[:2] == (2, 6)


@pytest.mark.parametrize(
    ("name", "choice", "says"),
    [
        ("gpt2", {"layer": 7}, "7"),
        ("gpt2", {"layer": 0, "head": 9}, "9"),
        ("gpt2", {"layer": 0, "kind": "cross"}, "cross"),
        ("gpt2", {"batch": 1}, "1"),
        ("t5", {"layer": 1}, "1"),
        ("t5", {}, "layer"),
        ("bare", {"head": 0}, "pattern"),
        ("blocks", {"head": 0}, 'keep=["pattern"]'),
    ],
    ids=str,
)
def test_a_pattern_that_is_not_there_is_an_error_that_names_it(
    name: str, choice: dict[str, Any], says: str
) -> None:
    with pytest.raises(mhacli.MhaError) as caught:
        record(name).pattern(**choice)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_a_record_is_saved_and_loaded_and_has_its_steps(tmp_path: Path) -> None:
    record("traced").save(str(tmp_path / "again.safetensors"))
    again = mhacli.load(str(tmp_path / "again.safetensors"))
    assert (tmp_path / "again.safetensors").read_bytes() == saved("traced").read_bytes()
    held = document("traced")["trace"]
    assert [(step.site, list(step.axes), list(step.shape)) for step in again.trace] == [
        (step["site"], step["axes"], step["shape"]) for step in held
    ]
    with pytest.raises(mhacli.MhaError) as caught:
        record("traced").save(str(tmp_path / "again.safetensors"))
    assert (caught.value.code, "force" in str(caught.value.hint)) == ("exists", True)


# ----------------------------------------------------------------------------------------- displays


def test_a_repr_is_one_line_that_says_what_it_is() -> None:
    heads, one = record("gpt2").heads, record("gpt2").pattern(layer=1, head=2)
    for shown, numbers in (
        (record("gpt2"), ("18", "13")),
        (heads, ("18", "3")),
        (one, ("1", "2", "13")),
    ):
        words = repr(shown)
        assert "\n" not in words
        assert words.startswith("<")
        assert all(re.search(rf"\b{number}\b", words) for number in numbers), words
    assert "7 + 3 tokens" in repr(record("pair"))


def test_a_pattern_is_displayed_as_a_table_of_its_weights() -> None:
    parsed = displayed(record("plain").pattern(head=2))
    (cells,) = parsed.tables
    weights = pattern("plain")[0, 2]
    assert cells[0][1:] == [row[0] for row in cells[1:]] == tokens("plain")
    assert [row[1:] for row in cells[1:]] == [[short(weight) for weight in row] for row in weights]
    colours = [
        re.search("background:#([0-9a-f]{6})", style)[1]
        for row in parsed.styles[0][1:]
        for style in row[1:]
    ]
    light = [np.dot([*bytes.fromhex(colour)], (0.2126, 0.7152, 0.0722)) for colour in colours]
    assert (np.diff(np.array(light)[np.argsort(weights.ravel())]) > -1.5).all()


def test_masked_cells_and_cells_without_a_number_look_unlike_small_weights() -> None:
    (cells,) = displayed(record("nan").pattern(head=0)).tables
    assert cells[5][1:] == ["nan"] * 7
    (cells,) = displayed(record("nan").pattern(head=1)).tables
    assert cells[3][1:] == ["0"] * 7
    (cells,) = displayed(record("sinks").pattern(head=2)).tables
    assert ".00" in cells[4][1:]


def test_many_tokens_are_displayed_as_means_of_blocks() -> None:
    shown = displayed(record("long").pattern(head=1))
    (titles,) = shown.titles
    weights, named = pattern("long")[0, 1], 0
    for title in (title for row in titles[1:] for title in row[1:]):
        if parsed := re.fullmatch(r"(\d+)–(\d+) → (\d+)–(\d+) (\d?\.\d+)", title):
            top, bottom, left, right = map(int, parsed.groups()[:4])
            mean = weights[top : bottom + 1, left : right + 1].sum(axis=1).mean()
            assert float(parsed[5]) == pytest.approx(mean, abs=6e-4)
            named += 1
    assert named > 200


@pytest.mark.parametrize(
    "name",
    ["plain", "gpt2", "t5", "blocks", "effects", "edges", "decoded", "traced", "bare", "hostile"],
)
def test_a_display_is_small_and_static(name: str) -> None:
    html = record(name)._repr_html_()
    assert len(html.encode()) < LIMIT
    assert not re.search(r"<script|<iframe|<img|<link|@import|url\(|\son\w+=|https?:", html)
    table = {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert Html(html).tags <= {"div", "style", "p", "b", "span", "pre"} | table
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e]", html)
    assert not OF_COMMAND.search(Html(html).text)


@pytest.mark.parametrize("name", ["gpt2", "effects"])
def test_tables_are_displayed_with_their_numbers_and_without_empty_columns(name: str) -> None:
    for table in (record(name).heads, record("effects").effects):
        rows = table.to_dicts()
        ((names, *cells),) = displayed(table).tables
        assert names == [key for key in rows[0] if any(row[key] is not None for row in rows)]
        assert len(cells) == len(rows)
        for row, printed in zip(rows, cells, strict=True):
            for key, cell in zip(names, printed, strict=True):
                if isinstance(row[key], float):
                    assert float(cell) == pytest.approx(row[key], rel=1e-3)
                else:
                    assert cell == ("–" if row[key] is None else str(row[key]))


def test_a_long_table_is_displayed_by_its_first_rows() -> None:
    heads = record("gpt2").heads
    (cells,) = displayed(type(heads)([*heads, *heads, *heads])).tables
    assert len(cells) == 41


def test_a_record_displays_the_head_that_stands_out_most() -> None:
    html = record("sinks")._repr_html_()
    best = max(
        document("sinks")["heads"],
        key=lambda head: head["certainty"] if head["kind"] != "mixed" else 0,
    )
    assert f"head {best['head']}" in unescape(html)
    printed = [row[1:] for row in Html(html).tables[-1][1:]]
    weights = pattern("sinks")[0, best["head"]]
    assert printed == [
        [short(w) if key <= query else "0" for key, w in enumerate(row)]
        for query, row in enumerate(weights)
    ]


def test_effects_are_displayed_with_their_numbers() -> None:
    parsed = displayed(record("effects"))
    assert parsed.text.count("layer ↓ head →") == 1
    grid = parsed.tables[0]
    held = np.array([effect["d_logit"] for effect in document("effects")["effects"]]).reshape(3, 6)
    assert np.array([row[1:] for row in grid[1:]], float) == pytest.approx(held, abs=0.0051)


def test_hostile_tokens_are_displayed_as_text() -> None:
    (cells,) = displayed(record("hostile").pattern(head=0)).tables
    for shown, token in zip(cells[0][1:], tokens("hostile"), strict=True):
        assert shown.rstrip("…")
        assert SHOWN.get(token, token).startswith(shown.rstrip("…"))


def test_rich_prints_what_show_prints(tmp_path: Path) -> None:
    with (tmp_path / "printed").open("w") as file:
        Console(width=100, file=file).print(record("plain"))
    shown = run(tmp_path, "show", saved("plain"), env={"COLUMNS": "100"}).stdout
    lines = [
        [line.rstrip() for line in text.splitlines()]
        for text in (shown, (tmp_path / "printed").read_text())
    ]
    assert len(lines[0]) == len(lines[1])
    assert not any(OF_COMMAND.search(line) for line in lines[1])
    for shown, printed in zip(*lines, strict=True):
        assert shown == printed or "--" in shown


def test_the_page_of_a_record_is_that_of_show_in_a_frame(tmp_path: Path) -> None:
    run(tmp_path, "show", saved("plain"), "--view", "none", "--html", "page.html")
    shown = record("plain").page()
    assert shown.html == (tmp_path / "page.html").read_text()
    frame = re.fullmatch(r"<iframe ([^>]*)></iframe>", shown._repr_html_())
    assert frame is not None
    assert 'sandbox="allow-scripts"' in frame[1]
    assert unescape(re.search('srcdoc="([^"]*)"', frame[1])[1]) == shown.html


def test_a_comparison_is_displayed_as_the_command_prints_it(tmp_path: Path) -> None:
    difference = mhacli.diff(record("plain"), str(saved("bare")))
    assert "\n" not in repr(difference)
    html = difference._repr_html_()
    assert difference.summary in repr(difference)
    assert difference.summary in html
    assert len(html.encode()) < LIMIT
    assert not re.search(r"<script|<iframe|<img|<link|https?:", html)
    document_of_command = run(
        tmp_path, "diff", saved("plain"), saved("bare"), "--json", code=3
    ).json
    assert (difference.verdict, document_of_command["verdict"]) == ("differ", "differ")
    assert json.loads(json.dumps(difference.to_dict())).keys() == document_of_command.keys()
    with (tmp_path / "printed").open("w") as file:
        Console(width=100, file=file).print(difference)
    printed = (tmp_path / "printed").read_text()
    command = run(
        tmp_path, "diff", saved("plain"), saved("bare"), env={"COLUMNS": "100"}, code=3
    ).stdout
    assert printed.splitlines()[-1].rstrip() == command.splitlines()[-1].rstrip()


# ------------------------------------------------------------------------------------- in a browser


@pytest.mark.real
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_notebook_reads_in_both_schemes_whatever_its_rules_for_tables(
    tmp_path: Path, scheme: str
) -> None:
    stripes = {"light": "#111", "dark": "white"}[scheme]
    rules = (
        "<style>.jp tbody tr:nth-child(odd), .jp tr:nth-child(even), .jp pre { background:"
        f" {stripes}; }}</style>"
    )
    displays = [record("gpt2"), record("sinks"), record("plain").pattern(head=1), record("effects")]
    html = f'<div class="jp">{"".join(shown._repr_html_() for shown in displays)}{rules}</div>'
    with opened(
        tmp_path, f'<!doctype html><meta charset="utf-8"><body>{html}', scheme=scheme
    ) as tab:
        contrasts = contrasts_of(tab, "p, p span, td, th, pre, pre span, b")
        assert len(contrasts) > 100
        assert min(contrasts) > 4


@pytest.mark.real
def test_a_display_without_its_style_sheet_takes_the_colours_of_its_page(tmp_path: Path) -> None:
    bare = re.sub("<style>.*?</style>", "", record("sinks")._repr_html_(), flags=re.DOTALL)
    for ground, ink in (("white", "black"), ("#111", "white")):
        page = (
            f'<!doctype html><meta charset="utf-8"><body style="background: {ground}; color:'
            f' {ink}">{bare}'
        )
        with opened(tmp_path, page) as tab:
            assert min(contrasts_of(tab, "p, td, th")) > 4


@pytest.mark.real
def test_the_page_runs_in_its_frame(tmp_path: Path) -> None:
    shown = f'<!doctype html><meta charset="utf-8"><body>{record("plain").page()._repr_html_()}'
    with opened(tmp_path, shown, allowed_message="autofocus") as tab:
        frame = tab.frame_locator("iframe")
        frame.get_by_role("status").wait_for()
        assert frame.get_by_role("status").inner_text()
