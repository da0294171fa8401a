"""The page of `--html`: its numbers are the record's, it runs nothing but its own script, and its
controls do what they say.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.browser import contrasts_of, opened, overlaps_of
from support.html import Html
from support.mha import run
from support.records import SHOWN, document, pattern, saved, scanned, short, tokens

SEVEN = ("the", "cat", "sat", "on", "a", "mat", "and")
MEBIBYTE = 1 << 20


def page_of(folder: Path, name: str, *words: str) -> str:
    """The page of a stored record."""
    run(folder, "show", saved(name), "--view", "none", *words, "--html", "page.html", "--force")
    return (folder / "page.html").read_text()


# -------------------------------------------------------------------------------- without a browser


@pytest.mark.parametrize("name", ["sinks", "pair", "gpt2", "t5", "hostile", "blocks"])
def test_the_data_in_a_page_are_those_of_the_record(tmp_path: Path, name: str) -> None:
    page, held = Html(page_of(tmp_path, name)), document(name)
    assert page.data["schema"] == "mha.page/1"
    expected = [[SHOWN.get(token, token) for token in side["tokens"]] for side in held["sequences"]]
    assert all(
        [label.replace("␣", " ").strip() for label in text] in page.data["texts"]
        or text in page.data["texts"]
        or [token.replace(" ", "␣") for token in text] in page.data["texts"]
        for text in expected
    )
    shown, heads = (
        [(head["head"], head["kind"], head["entropy"]) for head in side["heads"]]
        for side in (page.data, held)
    )
    assert shown == heads


@pytest.mark.parametrize("name", ["plain", "gpt2", "blocks"])
def test_statistics_are_readable_without_a_script(tmp_path: Path, name: str) -> None:
    tables = Html(page_of(tmp_path, name)).tables
    (table,) = (
        table for table in tables if {"H", "prev", "self"} <= {cell.strip() for cell in table[0]}
    )
    columns = [cell.strip() for cell in table[0]]
    rows = [row for row in table[1:] if row[columns.index("head")].strip().isdigit()]
    by_head = {
        (int(row[0]) if "layer" in columns else 0, int(row[columns.index("head")])): row
        for row in rows
    }
    assert len(by_head) == len(document(name)["heads"])
    for head in document(name)["heads"]:
        row = by_head[head["layer"], head["head"]]
        for column, statistic, error in (
            ("H", "entropy", 0.0051),
            ("self", "diagonal", 5.1e-4),
            ("prev", "previous", 5.1e-4),
            ("|i−j|", "distance", 0.051),
        ):
            assert float(row[columns.index(column)]) == pytest.approx(head[statistic], abs=error)


def test_steps_effects_and_decoding_are_tables_with_the_numbers_of_the_record(
    tmp_path: Path,
) -> None:
    steps = Html(page_of(tmp_path, "traced"))
    cells = [[cell.strip() for cell in row] for table in steps.tables for row in table]
    for step in document("traced")["trace"]:
        assert any(re.fullmatch(rf"(\d+ )?{step['site']}", row[0]) for row in cells), step["site"]
    ranked = [
        row
        for table in Html(page_of(tmp_path, "effects")).tables
        for row in table
        if re.fullmatch(r"\d\.\d", row[0].strip())
    ]
    held = {
        f"{effect['layer']}.{effect['head']}": effect["d_logit"]
        for effect in document("effects")["effects"]
    }
    assert len(ranked) >= 5
    assert all(
        float(next(cell for cell in row[1:] if re.fullmatch(r"[-+]\d+\.\d+", cell.strip())))
        == pytest.approx(held[row[0].strip()], abs=6e-5)
        for row in ranked
    )
    decoded = Html(page_of(tmp_path, "decoded"))
    assert (
        sum("decode" in " ".join(row) for table in decoded.tables for row in table)
        >= len(document("decoded")["trace"]) - 1
    )


def test_hostile_tokens_are_text_and_only_our_script_runs(tmp_path: Path) -> None:
    html = page_of(tmp_path, "hostile")
    page = Html(html)
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert sorted(attributes.get("type", "") for attributes in scripts) == ["", "application/json"]
    names = [name for _, attributes in page.elements for name in attributes]
    assert not [
        name for name in names if name.startswith("on") or name in ("src", "srcset", "action")
    ]
    assert not [
        a
        for _, a in page.elements
        if "://" in a.get("href", "") or "javascript:" in str(a.get("href"))
    ]
    policy = next(
        a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy.partition("script-src")[2].partition(";")[0]
    assert not {"img", "iframe", "object", "link", "b"} & {tag for tag, _ in page.elements}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e]", html)


@pytest.mark.parametrize("name", ["sinks", "gpt2", "effects", "bare"])
def test_a_page_says_what_made_it_and_what_it_lacks(tmp_path: Path, name: str) -> None:
    text, held = Html(page_of(tmp_path, name)).text, document(name)
    assert held["environment"]["mha"] in text
    assert held["environment"]["torch"] in text
    assert held["command"][1] in text
    assert ("--keep" in text) or name != "bare"


def test_the_sinks_of_a_map_are_those_of_its_own_text(tmp_path: Path) -> None:
    bias = np.zeros((2, 1, 9, 9), np.float32)
    bias[0, :, :, 2] = bias[1, :, :, 5] = 9
    save_file({"bias": bias}, tmp_path / "bias.safetensors")
    texts = [" ".join(f"{letter}{place}" for place in range(9)) for letter in "vw"]
    layer = (
        "--heads",
        "1",
        "--d-model",
        "2",
        "--scale",
        "1e-12",
        "--score-bias",
        "bias.safetensors",
    )
    run(tmp_path, "run", *texts, *layer, "--repeat", "1", "--view", "none", "--html", "page.html")
    maps = Html((tmp_path / "page.html").read_text()).data["maps"]
    assert [shown["sinks"] for shown in maps] == [[2], [5]]


@pytest.mark.real
def test_a_large_page_stays_below_a_mebibyte_unless_all_is_requested(tmp_path: Path) -> None:
    words = " ".join(f"w{place}" for place in range(512))
    options = "--heads 8 --causal --repeat 1 --view none --save r --html small.html".split()
    run(tmp_path, "run", words, *options)
    assert (tmp_path / "small.html").stat().st_size < MEBIBYTE
    run(tmp_path, "show", "r", "--view", "none", "--full", "--html", "full.html")
    assert (tmp_path / "full.html").stat().st_size > 4 * MEBIBYTE


def unpacked(text: str, dtype: str) -> Any:
    """Numbers as a page packs them, in digits that need no escape in HTML."""
    assert not {*"<>&"} & {*text}
    content = zlib.decompress(base64.b85decode(text.translate(str.maketrans(",./", "<>&"))))
    by_byte = np.frombuffer(content, np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return by_byte.T.copy().view(dtype).ravel()


def whole_numbers(text: str) -> Any:
    """Numbers of 16 bits as a page packs them."""
    return unpacked(text, "<u2").astype(int)


def test_the_arrays_in_a_page_are_those_of_each_text_without_its_padding(tmp_path: Path) -> None:
    layer = ("--d-model", "8", "--heads", "4", "--kv-heads", "2", "--padding", "left")
    kept = ("--keep", "pattern,qk,scores,v,z", "--repeat", "1", "--html", "page.html", "--json")
    held = run(tmp_path, "run", "the cat sat on", "a dog ran", *layer, *kept).json
    maps = Html((tmp_path / "page.html").read_text()).data["maps"]
    for shown, (head, text) in zip(maps, itertools.product(range(4), range(2)), strict=True):
        own = slice(text, None)  # the second text is shorter by one token
        for name in ("pattern", "qk", "scores", "v", "z"):
            array = np.array(held[name], np.float32)[text, head // 2 if name == "v" else head, own]
            packed = shown["numbers"]["cells"] if name == "pattern" else shown["parts"][name]
            of_page = unpacked(packed, "<f4")
            assert np.array_equal(of_page, (array if name in "vz" else array[:, own]).ravel()), name


def test_a_page_of_blocks_has_the_strongest_keys_of_every_query_to_three_digits(
    tmp_path: Path,
) -> None:
    html, weights = page_of(tmp_path, "many"), pattern("many")[0].astype(np.float32)
    data = Html(html).data
    assert len(html.encode()) < MEBIBYTE
    block = data["maps"][0]["block"]
    assert block > 1
    strongest = "the 8 strongest keys of every query with weights to 3 digits"
    assert f"the mean of {block} × {block} tokens, and {strongest}" in Html(html).text
    for head, held in enumerate(data["maps"]):
        keys, codes = (
            whole_numbers(held["strongest"][name]).reshape(300, 8) for name in ("keys", "shares")
        )
        is_key = np.arange(8) <= np.arange(300)[:, None]  # the first queries see fewer
        assert ((keys > 0) == is_key).all()
        codes = (2 * codes[:, :1] - np.cumsum(codes, axis=1))[is_key] - 3
        shares = [float(f"{100 + code % 900}e{code // 900 - 42}") for code in codes.tolist()]
        assert shares == [
            float(f"{weight:.2e}") for weight in -np.sort(-weights[head])[:, :8][is_key]
        ]
        assert shares == [
            float(f"{weight:.2e}")
            for weight in np.take_along_axis(weights[head], keys - 1, 1)[is_key]
        ]


@pytest.mark.real
def test_cells_that_fit_into_a_page_only_to_three_digits_have_three(tmp_path: Path) -> None:
    words = " ".join(f"w{place % 37}" for place in range(200))
    options = ("--heads", "8", "--repeat", "1", "--html", "page.html", "--json")
    weights = np.array(run(tmp_path, "run", words, *options).json["pattern"], np.float32)[
        0, 3
    ].ravel()
    html = (tmp_path / "page.html").read_text()
    assert len(html.encode()) < MEBIBYTE
    assert "every cell to 3 digits" in Html(html).text
    codes = whole_numbers(Html(html).data["maps"][3]["rounded"]).ravel() - 3
    rounded = [float(f"{100 + code % 900}e{code // 900 - 42}") for code in codes.tolist()]
    assert rounded == [float(f"{weight:.2e}") for weight in weights]


# ------------------------------------------------------------------------------------- in a browser


@dataclass(frozen=True)
class Tab:
    """An open page, and how its matrix is read."""

    tab: Any

    @property
    def matrix(self) -> Any:
        return self.tab.get_by_role("application")

    @property
    def said(self) -> str:
        """What is said of the cell under the pointer or the cursor."""
        return self.tab.get_by_role("status").text_content() or ""

    @property
    def number(self) -> float:
        return float(self.tab.get_by_role("status").locator("strong").inner_text())

    @property
    def address(self) -> dict[str, str]:
        return dict(part.split("=") for part in self.tab.evaluate("location.hash")[1:].split("&"))

    def place_of(self, row: float, column: float) -> dict[str, float]:
        """Where a place among the cells lies in the matrix."""
        held = {
            name: float(number)
            for name, number in self.matrix.evaluate("(e) => ({...e.dataset})").items()
        }
        x = held["left"] + (column - held["column"]) * held["wide"]
        return {"x": x, "y": held["top"] + (row - held["row"]) * held["high"]}

    def point_at(self, row: int, column: int) -> None:
        self.matrix.hover(position=self.place_of(row + 0.5, column + 0.5))
        self.wait_for_picture()

    def wait_for_picture(self) -> None:
        """Waits for what a move or a choice draws with the next picture."""
        self.tab.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)
        self.wait_for_picture()

    def set(self, role: str, name: str) -> None:
        self.tab.get_by_role(role, name=name, exact=True).check()
        self.wait_for_picture()

    def tokens(self, side: str) -> list[list[str]]:
        """The words of each line of the list of queries or keys."""
        return [
            text.split()
            for text in (
                self.tab.get_by_role("listbox", name=side).get_by_role("option").all_inner_texts()
            )
        ]

    def option(self, side: str, place: int) -> Any:
        return self.tab.get_by_role("listbox", name=side).get_by_role("option").nth(place)

    def picture(self) -> np.ndarray:
        """The pixels of the window."""
        image = pytest.importorskip("PIL.Image")
        return np.asarray(image.open(io.BytesIO(self.tab.screenshot())).convert("RGB"))

    def brightness_of(self, pixels: np.ndarray, row: int, column: int) -> float:
        """How bright a cell is near its corner, beside its number."""
        box, place = self.matrix.bounding_box(), self.place_of(row, column)
        colour = pixels[round(box["y"] + place["y"] + 4), round(box["x"] + place["x"] + 4)]
        return float(colour @ np.array([0.2126, 0.7152, 0.0722]))


Open = Callable[..., contextlib.AbstractContextManager[Tab]]


@pytest.fixture
def show(tmp_path: Path) -> Open:
    """`with show(record, …) as page` opens its page. `words` are options of `mha show`."""

    @contextlib.contextmanager
    def open_page(name: str, *words: str, **choices: Any) -> Iterator[Tab]:
        with opened(tmp_path, page_of(tmp_path, name, *words), **choices) as tab:
            tab.get_by_role("status").or_(tab.get_by_role("table")).first.wait_for()
            tab.wait_for_selector("html[data-ready=true]", state="attached")
            yield Tab(tab)

    return open_page


def is_named(said: str, query: int, key: int, names: tuple[str, ...] = SEVEN) -> bool:
    """Whether these words name a cell."""
    return f"query {query} “{names[query]}” → key {key} “{names[key]}”" in said


@pytest.mark.real
def test_the_pointer_and_the_arrow_keys_show_the_weight_of_the_record(show: Open) -> None:
    weights = pattern("plain")[0, 2].astype(np.float32)
    with show("plain", at="#head=2") as page:
        for query, key in ((0, 6), (3, 1), (6, 0), (5, 5)):
            page.point_at(query, key)
            assert is_named(page.said, query, key)
            assert np.float32(page.number) == weights[query, key]
        page.matrix.click(position=page.place_of(2.5, 3.5))
        page.tab.mouse.move(1, 1)
        for press, query, key in (
            ("ArrowUp", 1, 3),
            ("ArrowLeft", 1, 2),
            ("ArrowDown", 2, 2),
            ("End", 2, 6),
            ("ArrowRight", 2, 6),
            ("Home", 2, 0),
        ):
            page.press(press)
            assert is_named(page.said, query, key)
            assert np.float32(page.number) == weights[query, key]
            assert (page.address["query"], page.address["key"]) == (str(query), str(key))
        page.press("Enter")
        assert np.float32(page.number) == weights[2].max()


@pytest.mark.real
def test_masked_cells_and_numbers_that_are_none_are_named_as_such(show: Open) -> None:
    with show("sinks", at="#head=0") as page:
        page.point_at(1, 4)
        assert "masked" in page.said
        assert "masked" in page.tab.get_by_role("main").inner_text()
    with show("nan", at="#head=0") as page:
        page.point_at(4, 1)
        assert "not a number" in page.said


@pytest.mark.real
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_cells_are_brighter_the_larger_their_weight(show: Open, scale: str) -> None:
    weights = pattern("plain")[0, 1]
    with show("plain", at="#head=1&query=0&key=0") as page:
        page.set("radio", scale)
        page.tab.mouse.move(1, 1)
        pixels = page.picture()
        cells = [(query, key) for query in range(1, 7) for key in range(1, 7)]
        light = np.array([page.brightness_of(pixels, *cell) for cell in cells])
        order = np.argsort([weights[cell] for cell in cells])
        assert (np.diff(light[order]) > -3).all()
        assert np.ptp(light) > 80
        assert page.address["scale"] == scale


@pytest.mark.real
def test_hidden_sinks_leave_the_rest_of_each_row(show: Open) -> None:
    weights = pattern("sinks")[0, 2]
    left = 1 - weights[12, 2] - weights[12, 4]
    with show("sinks", at="#head=2") as page:
        page.point_at(12, 9)
        assert np.float32(page.number) == np.float32(weights[12, 9])
        page.set("switch", "hide sinks")
        page.point_at(12, 9)
        rest = re.findall(r"\d?\.\d+", page.said.partition("·")[2])
        assert float(rest[0]) == pytest.approx(weights[12, 9] / left, abs=6e-4)
        assert page.address["sinks"] == "hidden"
        page.tab.get_by_role("switch", name="hide sinks").uncheck()
        page.point_at(12, 4)
        assert np.float32(page.number) == np.float32(weights[12, 4])


@pytest.mark.real
def test_a_head_is_chosen_by_its_picture_its_buttons_and_its_row(show: Open) -> None:
    with show("gpt2") as page:
        heads = page.tab.get_by_role("group", name=re.compile("^heads")).get_by_role("button")
        assert heads.count() == 18
        heads.nth(7).click()
        page.wait_for_picture()
        title = page.tab.get_by_role("heading", level=2, name=re.compile(r"layer \d · head \d"))
        title.filter(has_text="layer 1 · head 1").wait_for()
        assert (page.address["layer"], page.address["head"]) == ("1", "1")
        page.point_at(9, 4)
        assert np.float32(page.number) == np.float32(pattern("gpt2", 1)[0, 1, 9, 4])
        page.tab.get_by_role("button", name="next head").click()
        title.filter(has_text="layer 1 · head 2").wait_for()
        page.tab.get_by_role("button", name="previous head").click()
        title.filter(has_text="layer 1 · head 1").wait_for()
        heads.nth(7).focus()
        page.press("ArrowDown", "ArrowRight", "Enter")
        title.filter(has_text="layer 2 · head 2").wait_for()
        assert heads.nth(14).get_attribute("aria-pressed") == "true"
        page.tab.get_by_role("row", name=re.compile("^0 3 ")).click()
        page.wait_for_picture()
        title.filter(has_text="layer 0 · head 3").wait_for()


@pytest.mark.real
def test_statistics_sort_by_their_columns(show: Open) -> None:
    entropies = {
        (head["layer"], head["head"]): head["entropy"] for head in document("gpt2")["heads"]
    }
    with show("gpt2") as page:
        button = (
            page.tab.get_by_role("columnheader")
            .get_by_role("button")
            .filter(has_text=re.compile(r"^\s*H\s*$"))
        )
        for is_down in (True, False):
            button.click()
            rows = [text.split() for text in page.tab.locator("tbody tr").all_inner_texts()]
            parsed = [
                entropies[int(row[0]), int(row[1])]
                for row in rows
                if len(row) > 5 and row[0].isdigit() and row[1].isdigit()
            ]
            assert len(parsed) == 18
            assert parsed == pytest.approx(sorted(parsed, reverse=is_down), abs=0.006)


@pytest.mark.real
def test_a_token_shows_what_it_attends_to_and_a_click_keeps_it(show: Open) -> None:
    weights = pattern("sinks")[0, 0]
    with show("sinks", at="#head=0") as page:
        page.option("queries", 4).hover()
        page.wait_for_picture()
        assert [words[-1] for words in page.tokens("keys")] == [
            short(weight) for weight in weights[4, :5]
        ] + ["–"] * 8
        left, right = (
            page.tab.get_by_role("listbox", name=side).bounding_box()
            for side in ("queries", "keys")
        )
        rows, columns = (
            slice(round(left["y"]), round(left["y"] + 300)),
            slice(round(left["x"] + left["width"]), round(right["x"])),
        )
        assert len(np.unique(page.picture()[rows, columns].reshape(-1, 3), axis=0)) > 9, (
            "lines are drawn between the lists"
        )
        page.option("queries", 2).click()
        page.tab.mouse.move(1, 1)
        page.wait_for_picture()
        assert [words[-1] for words in page.tokens("keys")][:3] == [
            short(weight) for weight in weights[2, :3]
        ]
        assert page.address["query"] == "2"
        page.option("keys", 11).hover()
        page.wait_for_picture()
        strongest = int(weights[:, 11].argmax())
        assert f"query {strongest} “{tokens('sinks')[strongest]}”" in page.said


@pytest.mark.real
def test_an_address_opens_a_view_and_one_of_another_page_is_ignored(show: Open) -> None:
    with show("gpt2", at="#layer=2&head=3&query=7&key=4&scale=log&sinks=hidden") as page:
        title = page.tab.get_by_role("heading", level=2, name=re.compile(r"layer \d · head \d"))
        title.filter(has_text="layer 2 · head 3").wait_for()
        assert np.float32(page.number) == np.float32(pattern("gpt2", 2)[0, 3, 7, 4])
        assert page.tab.get_by_role("radio", name="log", exact=True).is_checked()
        assert page.tab.get_by_role("switch", name="hide sinks").is_checked()
        page.tab.evaluate("location.hash = '#layer=1&head=0&query=9'")
        page.wait_for_picture()
        title.filter(has_text="layer 1 · head 0").wait_for()
        assert np.float32(page.number) == np.float32(pattern("gpt2", 1)[0, 0, 9].max())
    for other in ("#layer=9&head=77&query=999&key=-4&scale=<b>&sinks", "#&&==%%%"):
        with show("plain", at=other) as page:
            assert page.said.startswith("query 6 “and” → key ")


@pytest.mark.real
def test_each_sequence_has_its_tokens_without_padding(show: Open) -> None:
    with show("pair", at="#head=1") as page:
        assert [words[1] for words in page.tokens("queries")] == list(SEVEN)
        page.tab.get_by_role("combobox").select_option("1")
        page.wait_for_picture()
        assert [words[1] for words in page.tokens("keys")] == ["a", "dog", "ran"]
        page.point_at(2, 1)
        assert is_named(page.said, 2, 1, ("a", "dog", "ran"))
        assert np.float32(page.number) == np.float32(pattern("pair")[1, 1, 6, 5])


@pytest.mark.real
def test_hostile_tokens_are_read_and_not_run_on_a_narrow_screen(show: Open) -> None:
    names = [SHOWN.get(token, token) for token in tokens("hostile")]
    with show("hostile", size=(320, 800)) as page:
        assert [words[1] for words in page.tokens("queries")] == names
        for place, name in enumerate(names):
            page.point_at(place, 0)
            assert f"query {place} “{name}”" in page.said
        assert page.tab.locator("img, iframe").count() == 0
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 320
        page.tab.set_viewport_size({"width": 400, "height": 800})
        page.wait_for_picture()
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.real
@pytest.mark.parametrize("width", [390, 1280])
def test_no_name_of_a_row_or_column_covers_another(show: Open, width: int) -> None:
    with show("hostile", size=(width, 900)) as page:
        for place in range(3):
            page.point_at(place, place)
            names = page.matrix.evaluate(
                """(matrix) => [...matrix.querySelectorAll("span")]
                .filter((e) => e.checkVisibility() && e.textContent.trim())
                .map((e) => [e.textContent.split(" ").pop(), e.getBoundingClientRect().toJSON()])"""
            )
            covered = [
                (one, other)
                for (one, a), (other, b) in itertools.combinations(names, 2)
                if one != other
                and min(a["right"], b["right"]) - max(a["left"], b["left"]) > 2
                and min(a["bottom"], b["bottom"]) - max(a["top"], b["top"]) > 2
            ]
            assert covered == []


@pytest.mark.real
def test_everything_is_reached_from_the_keyboard(show: Open) -> None:
    with show("gpt2") as page:
        name = (
            "(e => (e.closest('[role=group], fieldset, [role=listbox], table') ??"
            " e).getAttribute('aria-label') ?? e.tagName)"
        )
        reached: list[str] = []
        for _ in range(60):
            page.tab.keyboard.press("Tab")
            part = page.tab.evaluate(f"{name}(document.activeElement)")
            reached += [part] if part not in reached else []
        for part in ("heads", "queries", "keys"):
            assert any(part in known for known in reached), reached
        assert page.tab.get_by_role("application").evaluate("e => e.tabIndex") == 0
        page.press("?")
        dialog = (
            page.tab.get_by_text("Arrow", exact=False)
            .or_(page.tab.get_by_text("arrow keys", exact=False))
            .first
        )
        assert dialog.is_visible()
        page.press("Escape")
        assert not dialog.is_visible()


@pytest.mark.real
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_both_schemes_and_one_can_be_chosen(
    show: Open, scheme: str
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with show("sinks", at="#sinks=hidden", scheme=scheme) as page:
        contrasts = contrasts_of(page.tab, "body *:not(script):not(style)")
        assert len(contrasts) > 80
        assert min(contrasts) >= 4.5
        by_system = page.tab.evaluate(ground)
        page.set("radio", {"light": "dark", "dark": "light"}[scheme])
        assert page.tab.evaluate(ground) != by_system
        page.set("radio", "auto")
        assert page.tab.evaluate(ground) == by_system


@pytest.mark.real
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("text", ["words", "long words", "many words"])
def test_no_label_covers_another(tmp_path: Path, text: str, width: int) -> None:
    words = {
        "words": "the cat sat on the mat while a small dog slept in the sun",
        "long words": " ".join(f"internationally{place}interesting" for place in range(14)),
        "many words": " ".join(f"w{place % 23}" for place in range(300)),
    }[text]
    layer = ("--heads", "2", "--d-model", "8", "--repeat", "1", "--view", "none")
    run(tmp_path, "run", words, *layer, "--html", "page.html")
    last = len(words.split()) - 1
    html = (tmp_path / "page.html").read_text()
    with opened(tmp_path, html, size=(width, 900), scheme="dark") as tab:
        tab.wait_for_selector("html[data-ready=true]", state="attached")
        page, labels = Tab(tab), "#plot :is(.names, .corner) span"
        for query, key in ((0, 0), (last // 2, last // 2 - 1), (last, last)):
            tab.evaluate(f"location.hash = '#query={query}&key={key}'")
            page.wait_for_picture()
            assert overlaps_of(tab, labels) == []
            assert tab.locator(labels).locator("visible=true").count() >= 4
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.real
def test_paper_holds_every_column_of_every_table(show: Open) -> None:
    with show("traced") as page:
        page.tab.set_viewport_size({"width": 720, "height": 1000})  # A4 without margins
        page.tab.emulate_media(media="print")
        beyond = page.tab.locator("table").evaluate_all(
            "(all) => all.map((t) => t.getBoundingClientRect().right - innerWidth)"
        )
        assert len(beyond) >= 2
        assert max(beyond) <= 0


@pytest.mark.real
def test_zooming_and_dragging_keep_the_cell_under_the_pointer(show: Open) -> None:
    weights = pattern("long")[0, 1].astype(np.float32)
    with show("long", at="#head=1") as page:
        page.matrix.click(position=page.place_of(60.5, 20.5))
        for _ in range(3):
            page.tab.get_by_role("button", name="zoom in").click()
        page.wait_for_picture()
        page.point_at(60, 20)
        assert np.float32(page.number) == weights[60, 20]
        box, before = page.matrix.bounding_box(), page.place_of(60.5, 20.5)
        page.tab.mouse.down()
        page.tab.mouse.move(box["x"] + before["x"] - 60, box["y"] + before["y"] - 30, steps=3)
        page.tab.mouse.up()
        after = page.place_of(60.5, 20.5)
        assert (after["x"], after["y"]) == pytest.approx(
            (before["x"] - 60, before["y"] - 30), abs=1
        )
        page.tab.get_by_role("button", name=re.compile("fit")).click()
        page.wait_for_picture()
        page.point_at(96, 3)
        assert np.float32(page.number) == weights[96, 3]


@pytest.mark.real
def test_the_weight_of_a_cell_is_computed_step_by_step(show: Open) -> None:
    held = {
        name: np.array(document("plain")[name], float)[0, 1]
        for name in ("qk", "scores", "pattern", "v", "z")
    }

    def written(number: float) -> str:
        return f"{float(f'{number:.4g}'):.10g}".replace("-", "−")

    with show("plain", at="#head=1&query=5&key=2") as page:
        product, score, weight, output = (
            page.tab.get_by_role("main").locator("ol:not([role]) li").all_inner_texts()[:4]
        )
        assert written(held["qk"][5, 2]) in product
        assert written(held["scores"][5, 2]) in score
        assert written(np.exp(held["scores"][5] - held["scores"][5].max()).sum()) in weight
        assert str(np.float32(held["pattern"][5, 2])) in weight
        assert written(1 / 7) in weight, "of uniform attention"
        assert all(written(number) in output for number in (*held["v"][2, :3], *held["z"][5, :3]))
        page.matrix.click(position=page.place_of(3.5, 1.5))
        page.wait_for_picture()
        assert (
            written(held["scores"][3, 1])
            in page.tab.get_by_role("main").locator("ol:not([role]) li").nth(1).inner_text()
        )
    with show("sinks", at="#head=1&query=2&key=5") as page:
        assert "−∞" in page.tab.get_by_role("main").locator("ol:not([role]) li").nth(1).inner_text()
    with show("cross", at="#head=1&query=1&key=2") as page:
        assert "--keep" in page.tab.get_by_role("main").locator("ol:not([role])").inner_text(), (
            "values are not in the record"
        )


@pytest.mark.real
def test_blocks_of_a_long_text_show_their_mean(show: Open) -> None:
    block, weights = (
        document("blocks")["survey"]["block"],
        np.array(document("blocks")["map"], float)[0, 0],
    )
    with show("blocks", at="#head=0") as page:
        for row, column in ((9, 4), (40, 0), (57, 57)):
            page.point_at(row, column)
            first, last, left, right = (
                place // block for place in map(int, re.findall(r"\d+", page.said)[:4])
            )
            mean = weights[first : last + 1, left : right + 1].sum(axis=1).mean()
            assert first > 0
            assert page.number == pytest.approx(mean, abs=1e-3, rel=0.02)


@pytest.mark.real
def test_a_block_names_its_strongest_weight_and_tokens_their_strongest_keys(show: Open) -> None:
    weights = pattern("many")[0, 5].astype(np.float32)
    with show("many", at="#head=5&query=200") as page:
        by_weight = np.argsort(-weights[200])
        strongest = page.tab.get_by_role("status").locator("strong").last
        assert f"query 200 “w6” → key {by_weight[0]} “" in page.said
        assert float(strongest.inner_text()) == float(f"{weights[200].max():.2e}")
        assert (
            "8 strongest keys of every query, their weights to 3 digits"
            in page.tab.get_by_role("main").inner_text()
        )
        shown = {
            int(words[0]): words[-1] for words in page.tokens("keys") if words[-1].startswith(".")
        }
        assert shown == {int(key): short(weights[200, key]) for key in by_weight[:8]}
        block = int(re.findall(r"(\d+) × ", page.tab.get_by_role("main").inner_text())[0])
        cell = (200 // block, int(by_weight[0]) // block)
        page.point_at(*cell)
        rows, columns = (slice(place * block, (place + 1) * block) for place in cell)
        assert page.said.startswith(f"queries {rows.start}–{rows.stop - 1} → keys {columns.start}–")
        mean = float(page.tab.get_by_role("status").locator("strong").first.inner_text())
        assert mean == pytest.approx(weights[rows, columns].sum(axis=1).mean(), abs=6e-4)
        assert float(strongest.inner_text()) == float(f"{weights[rows, columns].max():.2e}")
        page.matrix.click(position=page.place_of(cell[0] + 0.5, cell[1] + 0.5))
        page.wait_for_picture()
        query, key = int(page.address["query"]), int(page.address["key"])
        assert weights[query, key] == weights[rows, columns].max()


@pytest.mark.real
def test_the_page_of_a_scan_has_the_means_over_documents(tmp_path: Path) -> None:
    held = run(tmp_path, "show", scanned(), "--json").json
    run(tmp_path, "show", scanned(), "--view", "none", "--html", "page.html")
    with opened(tmp_path, (tmp_path / "page.html").read_text(), at="#layer=1&head=3") as tab:
        tab.get_by_role("table").first.wait_for()
        row = tab.get_by_role("row", name=re.compile("^1 3 ")).inner_text().split()
        head = next(head for head in held["heads"] if (head["layer"], head["head"]) == (1, 3))
        assert f"{head['entropy']:.2f}" in row
        assert f"{held['corpus']['n_documents']} documents" in tab.inner_text("body")
