"""Single cells on a page: tables parsed from the HTML against the record's arrays and the terminal's words."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from support.heads_made import surveyed
from support.hostile import HOSTILE, WEB, escaped
from support.layers_made import layered, text_of
from support.records import drawn

from mhacli.render.base.colours import ramp_colour
from mhacli.render.base.options import ViewOptions
from mhacli.render.heads.view import strongest_keys
from mhacli.render.page.document import page
from mhacli.results.record.head_statistics import Corner, HeadsRequest, Kept

MEGABYTE = 1_048_576
LONG, SHORT = "the cat sat on the red mat and ran off to see a dog", "a dog ran by"


class Tables(HTMLParser):
    """The tables of each section: its caption, and its rows as (tag, class, scope, text)."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.found, self.words, self.styles, self.names = {}, {}, [], []
        self._section, self._into = "", None
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.names.append((tag, attrs))
        if tag == "section":
            self._section = attrs["id"]
        if tag == "table":
            self.found.setdefault(self._section, []).append({"caption": [""], "rows": []})
        if tag == "tr":
            self.found[self._section][-1]["rows"].append([])
        if tag == "caption":
            self._into = self.found[self._section][-1]["caption"]
        if tag in ("td", "th"):
            cell = [tag, attrs.get("class", ""), attrs.get("scope", ""), ""]
            self.found[self._section][-1]["rows"][-1].append(cell)
            self._into = cell
        if tag == "br" and self._into is not None:
            self._into[-1] += "\n"

    def handle_endtag(self, tag):
        if tag in ("td", "th", "caption"):
            self._into = None

    def handle_data(self, data):
        self.words[self._section] = self.words.get(self._section, "") + data
        if self._into is not None:
            self._into[-1] += data


def tables(record, section, **options):
    return Tables(page(record, ViewOptions(**options))).found.get(section, [])


def looked_at(kept, *texts, **choices):
    choices = {"d_model": 66} | choices
    return surveyed(*(texts or (LONG, SHORT)), wanted=HeadsRequest(kept=kept, command=("mha", "heads")), **choices)


def words_of(row):
    return [cell[-1] for cell in row]


CORNER = Kept(corner=Corner(1, 6, 2, 9))
ASKED = Kept(queries=(12, 3), top=4)


# --------------------------------------------------------------------------------------------------------------- cells


@pytest.mark.parametrize("causal", [False, True])
def test_every_cell_that_was_kept_is_reported_and_what_is_not_allowed_is_no_small_weight(causal):
    record = looked_at(CORNER, causal=causal, n_heads=3)
    made = tables(record, "cells")
    assert [table["caption"][0].split("\n")[0] for table in made] == [
        f"sequence {b} · head {h} · cells" for h in range(3) for b in range(2)
    ]
    words = LONG.split(), SHORT.split()
    for number, table in enumerate(made):
        head, b = divmod(number, 2)
        weights = record.arrays["corner"][b, head]
        rows, columns = (range(1, min(last, len(words[b]))) for last in (7, 11))
        columns = range(2, columns.stop)
        first, *body = table["rows"]
        assert words_of(first)[1:] == [f"{b}:{key} “{words[b][key]}”" for key in columns]
        assert {cell[2] for cell in first} == {"col"}
        assert [row[0][1:] for row in body] == [["", "row", f"{b}:{query} “{words[b][query]}”"] for query in rows]
        for query, row in zip(rows, body, strict=True):
            for key, cell in zip(columns, row[1:], strict=True):
                weight = weights[query - 1, key - 2]
                if causal and key > query:
                    assert np.isnan(weight)
                    assert cell[1:] == ["closed", "", "0"]
                else:
                    assert cell[1] != "closed"
                    assert len(cell[-1]) >= 4
                    assert float(cell[-1]) == pytest.approx(
                        weight, abs=0.5 * 10.0 ** -len(cell[-1].split(".")[1]) + 1e-9
                    )


def test_a_weight_that_rounds_to_nothing_differs_from_one_that_is_not_allowed():
    record = looked_at(CORNER, LONG, causal=True, n_heads=2)
    record.arrays["corner"][0, 0, 4, 0] = 1e-9
    cells = [cell for row in tables(record, "cells")[0]["rows"][1:] for cell in row[1:]]
    told = {(cell[1], cell[-1]) for cell in cells if float(cell[-1]) == 0}
    assert ("", ".000") in told
    assert ("closed", "0") in told
    assert "hatch" in re.search(r"#cells \.closed \{[^}]*\}", page(record, ViewOptions())).group()


def test_a_shade_is_the_weight_on_a_linear_scale_up_to_the_largest_of_its_table():
    record = looked_at(CORNER, LONG, n_heads=2)
    weights = np.linspace(0, 0.5, 54).reshape(6, 9)
    record.arrays["corner"][0, 1] = weights
    source = page(record, ViewOptions())
    found = dict(re.findall(r"#cells (?:\.)?(td|l\d+) \{ background: (#[0-9a-f]{6});", source))
    assert found == {
        f"l{n}" if n else "td": "#" + bytes(ramp_colour(17 * n)).hex() for n in range(16)
    }  # fifteen steps of seventeen levels
    table = Tables(source).found["cells"][1]
    assert table["caption"][0].split("\n")[1] == "shade linear, 0 … .500"
    steps = [int(cell[1][1:] or 0) for row in table["rows"][1:] for cell in row[1:]]
    assert max(abs(step - weight / 0.5 * 15) for step, weight in zip(steps, weights.ravel(), strict=True)) <= 1.01
    assert (steps[0], steps[-1]) == (0, 15)
    assert steps == sorted(steps)


def test_small_weights_of_long_texts_keep_three_digits_of_the_largest():
    record = looked_at(CORNER, LONG, n_heads=2)
    record.arrays["corner"][0] = np.linspace(0, 0.00829, 54).reshape(6, 9)
    made = tables(record, "cells")[1]
    assert made["rows"][-1][-1][-1] == ".00829"
    assert made["caption"][0].endswith("shade linear, 0 … .00829")
    assert tables(record, "cells", precision=6)[1]["rows"][-1][-1][-1] == ".008290"


def test_what_is_no_number_is_neither_a_weight_nor_forbidden():
    record = looked_at(CORNER, LONG, causal=True, n_heads=2)
    record.arrays["entropy"][0, 1, 3] = np.nan
    record.arrays["corner"][0, 1, 2] = np.nan
    first, second = tables(record, "cells")
    assert {(cell[1], cell[-1]) for cell in second["rows"][3][1:]} == {("missing", "?")}
    assert {cell[1] for row in first["rows"] for cell in row} >= {"closed"}
    assert "missing" not in {cell[1] for table in (first, second) for row in table["rows"][4:] for cell in row}


def test_cells_outside_of_a_text_are_left_out():
    record = looked_at(Kept(corner=Corner(5, 3, 0, 4)), causal=True, n_heads=2)
    assert [table["caption"][0].split(" ·")[0] for table in tables(record, "cells")] == ["sequence 0"] * 2
    assert "‹pad›" not in Tables(page(record, ViewOptions())).words["cells"]


# ------------------------------------------------------------------------------------------------------ strongest keys


def test_the_strongest_keys_are_those_of_the_record_with_their_weights_and_the_rest():
    record = looked_at(ASKED, causal=True, n_heads=3)
    made = tables(record, "asked")
    assert [table["caption"][0] for table in made] == [
        "sequence 0 · query 0:12 “a” · 13 visible keys, 7.7 % each if uniform",
        "sequence 0 · query 0:3 “on” · 4 visible keys, 25 % each if uniform",
        "sequence 1 · query 1:3 “by” · 4 visible keys, 25 % each if uniform",
    ]
    words = LONG.split(), SHORT.split()
    for table, (b, number) in zip(made, ((0, 0), (0, 1), (1, 1)), strict=True):
        first, *body = table["rows"]
        assert words_of(first) == ["head", "strongest keys, in order", "the rest"]
        assert [cell[2] for cell in first] == ["col", "colgroup", "col"]
        for head, row in enumerate(body):
            assert row[0] == ["th", "", "row", f"head {head}"]
            keys, weights = (record.arrays[name][b, head, number] for name in ("top_keys", "top_shares"))
            told = [cell.rsplit(" ", 3) for cell in words_of(row)[1:-1]]
            assert [cell[:2] for cell in told] == [[f"{b}:{key}", f"“{words[b][key]}”"] for key in keys]
            assert [float(cell[2]) for cell in told] == pytest.approx(100 * weights, rel=0.051)
            rest = row[-1][-1]
            left = 100 * (1 - weights.astype(float).sum())
            assert (rest == "–") == (left <= 1e-3)
            assert rest == "–" or float(rest.split()[0]) == pytest.approx(left, rel=0.051)


@pytest.mark.parametrize("sinks", [False, True])
def test_the_terminal_says_the_same_in_one_line(sinks):
    record = layered(text_of(LONG.split()), n_layers=2, n_heads=3, sinks=sinks, kept=Kept(queries=(2, 5), top=4))
    made = tables(record, "asked")
    rest = "the rest and the sink logit" if sinks else "the rest"
    assert [words_of(table["rows"][0])[-1] for table in made] == [rest] * 2
    for layer in range(2):
        view = record.of_layer(layer)
        lines = drawn(strongest_keys(view, view.heads, 0), 400)
        for number, table in enumerate(made):
            title, *rows = lines[4 * number : 4 * number + 4]
            assert title.rstrip(" ─") == table["caption"][0]
            for head, line in enumerate(rows):
                name, *keys, left = words_of(table["rows"][1 + 3 * layer + head])
                assert name == f"layer {layer} · head {head}"
                assert line.strip() == f"head {head}  {', '.join(keys)}, {rest} {left}"


def test_layers_that_read_other_texts_or_see_fewer_keys_have_tables_of_their_own():
    pair = layered(
        text_of(SHORT.split()),
        context=[text_of(LONG.split())],
        n_layers=1,
        n_heads=2,
        kept=Kept(queries=(2,), top=3),
    )
    assert [table["caption"][0] for table in tables(pair, "asked")] == [
        "encoder layers · query 2 “cat” · 16 visible keys, 6.2 % each if uniform",
        "decoder layers · query 2 “dog” · 3 visible keys, 33 % each if uniform",
        "cross layers · query 2 “dog” · 16 visible keys, 6.2 % each if uniform",
    ]
    windows = layered(
        text_of(LONG.split()), n_layers=4, n_heads=2, causal=True, windows=(3, None), kept=Kept(queries=(7,), top=3)
    )
    made = tables(windows, "asked")
    assert [re.search(r"(\d+) visible", table["caption"][0]).group(1) for table in made] == ["3", "8"]
    assert [words_of(row)[0] for row in made[1]["rows"][1:]] == [
        f"layer {n} · head {h}" for n in (1, 3) for h in (0, 1)
    ]


def test_heads_that_see_different_keys_each_show_what_uniform_attention_gives():
    record = looked_at(ASKED, LONG, causal=True, n_heads=2)
    visible = np.repeat(record.arrays["visible"], 2, axis=1)
    visible[0, 1, 12] = 4
    made = tables(replace(record, arrays={**record.arrays, "visible": visible}), "asked")
    assert made[0]["caption"][0] == "sequence 0 · query 12 “a” · 4 to 13 visible keys"
    assert [words_of(row)[-1] for row in made[0]["rows"]] == ["each if uniform", "7.7 %", "25 %"]
    assert len(made[1]["rows"][0]) == 3


def test_a_query_without_keys_is_distinguished_from_one_whose_weights_are_no_numbers():
    record = looked_at(ASKED, LONG, causal=True, n_heads=2)
    record.arrays["top_keys"][0, :, 0] = -1
    record.arrays["top_shares"][0, :, 0] = [[0.0] * 4, [np.nan] * 4]
    record.arrays["top_keys"][0, 0, 1, 2:] = -1
    first, second = tables(record, "asked")
    assert [words_of(row) for row in first["rows"][1:]] == [["head 0", "no visible key"], ["head 1", "not a number"]]
    assert words_of(second["rows"][1])[3:5] == ["", ""]


# --------------------------------------------------------------------------------------------------------------- whole


def test_nothing_of_a_token_becomes_an_element_of_a_table():
    tokens = [*HOSTILE, *WEB]
    n = len(tokens)
    kept = Kept(queries=tuple(range(1, n + 1)), top=n + 2, corner=Corner(0, n + 2, 0, n + 2))
    record = layered(text_of(tokens, parts=()), n_layers=1, n_heads=2, kept=kept)
    read = Tables(page(record, ViewOptions()))
    assert not {"img", "b64", "iframe", "svg"} & {name for name, _ in read.names}
    assert [name for name, _ in read.names].count("script") == 2
    assert not [attrs for _, attrs in read.names if any(key.startswith("on") or key == "style" for key in attrs)]
    table = read.found["cells"][0]
    for rows in (words_of(table["rows"][0])[1:], [row[0][-1] for row in table["rows"][1:]]):
        for place, (token, told) in enumerate(zip(tokens, rows[1:], strict=False), 1):
            number, _, shown = told.partition(" ")
            shown = shown.removeprefix("“").removesuffix("”")
            assert number == str(place)
            assert escaped(token).startswith(shown.removeprefix("◌").removesuffix("…").rstrip()), token
            assert shown
    captions = "".join(table["caption"][0] for table in read.found["asked"])
    assert "<script>" in captions
    assert "\x1b" not in captions


@pytest.mark.full
def test_tables_of_a_large_record_keep_the_page_below_its_limit_and_say_what_they_leave_out():
    text = text_of([f"word{n}" for n in range(70)], parts=())
    kept = Kept(queries=tuple(range(5, 37)), top=64, corner=Corner(2, 64, 3, 64))
    record = layered(text, n_layers=5, n_heads=7, keep=False, kept=kept)
    source = page(record, ViewOptions())
    assert len(source.encode()) <= MEGABYTE
    read = Tables(source)
    n_shown, n_all = map(int, re.search(r"room for the first (\d+) of (\d+) tables:", read.words["cells"]).groups())
    assert (len(read.found["cells"]), n_all) == (n_shown, 35)
    assert 1 <= n_shown < 35
    n_heads = int(re.search(r"room for the first (\d+) of 35 heads:", read.words["asked"]).group(1))
    assert {len(table["rows"]) for table in read.found["asked"]} == {1 + n_heads}
    assert len(read.found["asked"]) == 32
    assert source.count("<details>") == 1 + (n_shown > 8)
    assert source == page(record, ViewOptions())
    full = page(record, ViewOptions(full=True))
    assert full.count(" · cells<br>") == 35
    assert full.count('<th scope="row">layer ') == 35 * 32
    assert "there is room for" not in full


def test_where_one_head_alone_is_too_much_some_of_its_queries_are_there():
    text = text_of([f"word{n}" for n in range(500)], parts=())
    record = layered(text, n_layers=1, n_heads=2, keep=False, kept=Kept(queries=tuple(range(400)), top=64))
    source = page(record, ViewOptions())
    assert len(source.encode()) <= MEGABYTE
    read = Tables(source)
    n = int(re.search(r"room for (\d+) of 400 queries of layer 0 · head 0 alone", read.words["asked"]).group(1))
    assert 1 < n == len(read.found["asked"]) < 400
    assert {len(table["rows"]) for table in read.found["asked"]} == {2}


def test_options_choose_whose_cells_are_shown_and_their_order():
    kept = replace(CORNER, queries=(3,), top=2)
    record = looked_at(kept, n_heads=3)
    assert len(tables(record, "cells", heads=(2, 1), sequences=(1,))) == 2
    (asked,) = tables(record, "asked", heads=(2, 1), sequences=(1,))
    assert [row[0][-1] for row in asked["rows"][1:]] == ["head 1", "head 2"]
    (asked,) = tables(record, "asked", sequences=(1,), sort="entropy")
    entropies = {f"head {head.head}": head.entropy for head in record.heads}
    assert [row[0][-1] for row in asked["rows"][1:]] == sorted(entropies, key=entropies.get, reverse=True)
    model = layered(n_layers=3, n_heads=2, kept=kept)
    assert [table["caption"][0].split("\n")[0] for table in tables(model, "cells", layers=((None, 1),))] == [
        f"layer 1 · head {h} · cells" for h in range(2)
    ]


def test_the_policy_allows_the_style_of_these_tables_and_other_pages_do_not_carry_it():
    for kept in (Kept(), CORNER, ASKED):
        source = page(looked_at(kept, SHORT * 4, n_heads=2), ViewOptions())
        (style,) = re.findall(r"<style>(.*?)</style>", source, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        assert f"style-src 'sha256-{digest}'" in source
        assert ("#cells" in style) == (kept != Kept())
        assert [name in Tables(source).found for name in ("cells", "asked")] == [kept is CORNER, kept is ASKED]
        assert "is not drawn here" not in source
