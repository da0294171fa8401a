"""The page in a real browser: its text, pixels and controls agree with the record's numbers in numpy.

Every page is opened offline, and after every test: one request was made, nothing was logged, and no policy was violated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support.layers_made import layered, text_of
from support.records import make_record, walked, with_sinks

from mhacli.render.base.colours import RAMP
from mhacli.render.base.options import ViewOptions
from mhacli.render.page.document import page
from mhacli.results.record.head_statistics import HeadStatistics, Sink
from mhacli.results.record.record import Record

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

TEXT = ("the", "cat", "sat", "on", "a", "mat", "and")
_OWN = "willReadFrequently"
"""What the browser says of these tests, which read pixels; the page never does."""
HOOKS = """
window.ran = []; window.violations = [];
for (const name of ["alert", "confirm", "prompt"]) window[name] = () => window.ran.push(name);
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@dataclass(frozen=True)
class Opened:
    """A page in a browser, and how its matrix is read."""

    tab: playwright.Page
    requests: list[str]
    problems: list[str]

    @property
    def readout(self) -> str:
        return self.tab.locator("#readout").text_content() or ""

    @property
    def fragment(self) -> dict[str, str]:
        return dict(part.split("=") for part in self.tab.evaluate("location.hash")[1:].split("&"))

    def place_of(self, row: float, column: float) -> tuple[float, float]:
        """Where a place among the cells of the matrix lies in its canvas."""
        g = {name: float(number) for name, number in self.tab.evaluate("({...matrix.dataset})").items()}
        return g["left"] + (column - g["column"]) * g["wide"], g["top"] + (row - g["row"]) * g["high"]

    def move_to(self, row: int, column: int) -> None:
        x, y = self.place_of(row + 0.5, column + 0.5)
        self.tab.locator("#matrix").hover(position={"x": x, "y": y})
        self.settle()

    def settle(self) -> None:
        """Waits for what a move or a choice draws with the next picture."""
        self.tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def share_read(self) -> float:
        """The number in the read-out, once there is one, as text that numpy reads back."""
        self.tab.wait_for_function("() => parseFloat(document.querySelector('#readout strong')?.innerText) >= 0")
        return float(self.tab.locator("#readout strong").inner_text())

    def colour_at(self, x: float, y: float) -> tuple[int, ...]:
        pixel = "([x, y]) => [...matrix.getContext('2d').getImageData(x, y, 1, 1).data]"
        return tuple(self.tab.evaluate(pixel, [round(x), round(y)]))

    def colour_of(self, row: int, column: int) -> tuple[int, ...]:
        """The colour of a cell near its corner, beside its number."""
        x, y = self.place_of(row, column)
        return self.colour_at(x + 4, y + 4)


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: playwright.Browser, tmp_path: Path) -> Iterator[Open]:
    opened: list[Opened] = []

    def open_one(
        shown: Record | str,
        *,
        at: str = "",
        width: int = 1360,
        height: int = 900,
        scheme: str = "light",
    ) -> Opened:
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(shown if isinstance(shown, str) else page(shown, ViewOptions()), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True, reduced_motion="reduce"
        )
        one = Opened(context.new_page(), [], [])
        one.tab.set_default_timeout(120_000)
        one.tab.add_init_script(HOOKS)
        one.tab.on("request", lambda request: one.requests.append(request.url))
        one.tab.on("console", lambda message: one.problems.append(message.text) if _OWN not in message.text else None)
        one.tab.on("pageerror", lambda fault: one.problems.append(str(fault)))
        one.tab.goto(f"{path.as_uri()}{at}")
        one.tab.wait_for_selector("html[data-ready=true]", state="attached")
        opened.append(one)
        return one

    yield open_one
    for one in opened:
        assert one.problems == []
        assert len(one.requests) == 1
        assert one.tab.evaluate("[...window.ran, ...window.violations]") == []
        one.tab.context.close()


def of_text(*, causal: bool = True, n_heads: int = 3) -> Record:
    return make_record(TEXT, causal=causal, n_heads=n_heads)


def with_pattern(record: Record, change: Callable[[np.ndarray], None]) -> Record:
    pattern = record.arrays["pattern"].copy()
    change(pattern)
    return replace(record, arrays={**record.arrays, "pattern": pattern})


def near(colour: tuple[int, ...], expected: np.ndarray) -> bool:
    """Whether two colours differ by no more than one level of the scale does."""
    return bool(np.abs(np.array(colour[:3]) - expected).max() <= 3) and colour[3] == 255


def ramp(parts: np.ndarray) -> np.ndarray:
    """Colours of places 0 … 1 on the ramp, straight between its points."""
    points = np.linspace(0, 1, len(RAMP))
    return np.stack([np.interp(parts, points, channel) for channel in zip(*RAMP, strict=True)], axis=-1)


def top_of(patterns: np.ndarray, allowed: np.ndarray) -> float:
    """The largest share of all rows that had a choice of the allowed keys."""
    has_choice = allowed.sum(-1) > 1
    return float(patterns.max(-1)[:, has_choice].max())


def choose_scale(opened: Opened, scale: str) -> None:
    opened.tab.check(f"#scale input[value={scale}]")
    opened.settle()


def test_resting_on_a_cell_gives_the_number_that_the_record_holds(open_page: Open):
    record = with_sinks(of_text(causal=False), 0)
    opened = open_page(record, at="#head=2")
    pattern = record.arrays["pattern"][0, 2]
    for query, key in ((0, 6), (3, 1), (6, 0), (5, 5)):
        opened.move_to(query, key)
        sink = " · a sink" if key == 0 else ""
        assert (
            opened.readout
            == f"query {query} “{TEXT[query]}” → key {key} “{TEXT[key]}”: {pattern[query, key]!s} exact{sink}"
        )
        assert np.float32(opened.share_read()) == pattern[query, key]


@pytest.mark.full
def test_numbers_of_64_bits_are_reported_as_rounded(open_page: Open):
    record = of_text()
    pattern = record.arrays["pattern"].astype(np.float64)
    pattern[0, 0, 4, 2] = 0.123456789012345678
    config = replace(record.config, dtype="float64")
    opened = open_page(replace(record, config=config, arrays={**record.arrays, "pattern": pattern}))
    opened.move_to(4, 2)
    assert opened.readout == "query 4 “a” → key 2 “sat”: 0.12345679 rounded to 32 bits"


def test_a_forbidden_cell_is_reported_and_hatched_and_no_number_is_reported_as_that(open_page: Open):
    def spoil(pattern: np.ndarray) -> None:
        pattern[0, 0, 4, 1] = np.nan

    opened = open_page(with_pattern(of_text(), spoil))
    opened.move_to(1, 4)
    assert opened.readout == "query 1 “cat” → key 4 “a”: masked"
    opened.move_to(4, 1)
    assert opened.readout == "query 4 “a” → key 1 “cat”: not a number"
    assert opened.colour_of(4, 1) == (240, 90, 20, 255)
    legend = opened.tab.locator("#legend").inner_text()
    assert "masked" in legend
    assert "not a number" in legend


@pytest.mark.parametrize("scale", ["linear", "log", "rank"])
def test_cells_have_the_colours_that_numpy_predicts_of_the_scale(open_page: Open, scale: str):
    record = of_text()
    opened = open_page(record, at="#head=1")
    choose_scale(opened, scale)
    pattern, allowed = record.arrays["pattern"][0].astype(float), record.arrays["allowed"][0, 0]
    top = top_of(pattern, allowed)
    open_cells = np.sort(pattern[1][allowed])
    smallest = np.unravel_index(np.where(allowed, pattern[1], 2).argmin(), allowed.shape)
    for query, key in ((1, 0), (3, 2), (6, 1), (5, 5), map(int, smallest)):
        weight = pattern[1, query, key]
        place = {
            "linear": weight / top,
            "log": 1 + np.log10(max(weight, top / 1000) / top) / 3,
            "rank": (open_cells < weight).sum() / (len(open_cells) - 1),
        }[scale]
        assert near(opened.colour_of(query, key), ramp(np.clip(place, 0, 1))), (query, key)


@pytest.mark.full
def test_hidden_sinks_leave_the_rest_of_each_row_and_stand_beside_it(open_page: Open):
    record = with_sinks(of_text(), 0)
    opened = open_page(record, at="#head=1")
    opened.tab.check("#sinks")
    opened.settle()
    pattern, allowed = record.arrays["pattern"][0].astype(float), record.arrays["allowed"][0, 0]
    rest = pattern.copy()
    rest[:, :, 0] = 0
    left = 1 - pattern[:, :, :1]
    drawn = np.where(left > 1e-6, rest / np.maximum(left, 1e-6), 0)
    is_choice = allowed & (np.arange(len(TEXT)) > 0)
    top = top_of(drawn, is_choice)
    for query, key in ((3, 2), (6, 1), (6, 5)):
        assert near(opened.colour_of(query, key), ramp(np.array(drawn[1, query, key] / top))), (query, key)
    for query in (1, 4, 6):  # taken out is not a small share: the card shows through
        assert opened.colour_of(query, 0)[:3] == (255, 255, 255)
    opened.move_to(6, 5)
    assert opened.readout.endswith(f"exact · {drawn[1, 6, 5]:.3f} of what is left beside sinks".replace(" 0.", " ."))
    x, y = opened.place_of(6.5, 0)
    opened.tab.locator("#matrix").hover(position={"x": x - 20, "y": y})
    opened.settle()
    assert opened.readout == f"query 6 “and” → sinks, taken out: {record.arrays['pattern'][0, 1, 6, 0]!s}"
    assert near(opened.colour_at(x - 12, y - 12), np.array([255, 64, 200]) * pattern[1, 6, 0])
    legend = opened.tab.locator("#legend").inner_text()
    uniform = (allowed[:, 0] / allowed.sum(1)).mean()
    told = f"taken out · had {pattern[1, :, 0].mean():.2g} of all attention, {uniform:.2g} if uniform"
    assert told.replace(" 0.", " .") in legend


def lines_of(opened: Opened) -> dict[int, tuple[float, float]]:
    """Of the lines between tokens: the place at the other end, with the line's share and width."""
    read = "(lines) => lines.map((line) => [line.dataset.place, line.dataset.share, line.getAttribute('stroke-width')])"
    found = opened.tab.locator(".lines path").evaluate_all(read)
    return {int(place): (float(weight), float(width)) for place, weight, width in found}


def test_lines_follow_weights_of_the_query_that_the_pointer_or_the_focus_rests_on(open_page: Open):
    record = of_text()
    opened = open_page(record)
    pattern = record.arrays["pattern"][0, 0]
    opened.tab.hover("#queries [data-place='3']")
    opened.settle()
    by_pointer = lines_of(opened)
    assert {place: np.float32(weight) for place, (weight, _) in by_pointer.items()} == dict(enumerate(pattern[3, :4]))
    widths = [width for _, width in sorted(by_pointer.values())]
    assert widths == sorted(widths)
    assert widths[-1] > 3 * widths[0]
    opened.tab.mouse.move(1, 1)
    opened.tab.focus("#queries [data-place='4']")
    opened.settle()
    assert sorted(lines_of(opened)) == [0, 1, 2, 3, 4]
    shown = opened.tab.locator("#keys .share").all_inner_texts()
    assert shown == [f"{weight:.2f}".removeprefix("0") for weight in pattern[4, :5]] + ["–", "–"]


@pytest.mark.full
def test_lines_of_a_key_come_from_the_queries_that_see_it(open_page: Open):
    record = of_text()
    opened = open_page(record)
    opened.tab.hover("#keys [data-place='5']")
    opened.settle()
    column = record.arrays["pattern"][0, 0, :, 5]
    assert {place: np.float32(weight) for place, (weight, _) in lines_of(opened).items()} == {
        5: column[5],
        6: column[6],
    }
    assert opened.readout.startswith(
        "key 5 “mat” is given most by query 5 “mat”"
        if column[5] > column[6]
        else "key 5 “mat” is given most by query 6 “and”"
    )


@pytest.mark.full
def test_a_click_keeps_the_lines_and_leaving_gives_them_back(open_page: Open):
    opened = open_page(of_text())
    assert sorted(lines_of(opened)) == [*range(7)]
    opened.tab.click("#queries [data-place='2']")
    opened.tab.hover("#queries [data-place='0']")
    opened.settle()
    assert sorted(lines_of(opened)) == [0]
    opened.tab.mouse.move(1, 1)
    opened.settle()
    assert sorted(lines_of(opened)) == [0, 1, 2]
    assert opened.fragment["query"] == "2"
    assert opened.tab.get_attribute("#queries [data-place='2']", "aria-selected") == "true"


def test_arrow_keys_move_the_cell_and_a_click_chooses_it(open_page: Open):
    record = of_text(causal=False)
    opened = open_page(record)
    x, y = opened.place_of(2.5, 3.5)
    opened.tab.click("#matrix", position={"x": x, "y": y})
    opened.tab.mouse.move(1, 1)
    for key, query, place in (
        ("ArrowUp", 1, 3),
        ("ArrowLeft", 1, 2),
        ("ArrowDown", 2, 2),
        ("End", 2, 6),
        ("ArrowRight", 2, 6),
        ("Home", 2, 0),
    ):
        opened.tab.keyboard.press(key)
        opened.settle()
        assert opened.readout.startswith(f"query {query} “{TEXT[query]}” → key {place} “{TEXT[place]}”: ")
        assert (opened.fragment["query"], opened.fragment["key"]) == (str(query), str(place))
    opened.tab.keyboard.press("Enter")
    opened.settle()
    assert np.float32(opened.share_read()) == record.arrays["pattern"][0, 0, 2].max()


def test_thumbnails_choose_a_head_by_pointer_and_by_keys(open_page: Open):
    record = layered(n_layers=3, n_heads=4)
    opened = open_page(record)
    opened.tab.click("#thumbnails [data-head='5']")
    opened.settle()
    assert opened.tab.inner_text("#chosen-title") == "layer 1 · head 1"
    assert (opened.fragment["layer"], opened.fragment["head"]) == ("1", "1")
    opened.move_to(3, 2)
    assert np.float32(opened.share_read()) == record.arrays["layers.1.pattern"][0, 1, 3, 2]
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        opened.tab.keyboard.press(key)
    assert opened.tab.inner_text("#chosen-title") == "layer 1 · head 1"
    opened.tab.keyboard.press("Enter")
    opened.settle()
    assert opened.tab.inner_text("#chosen-title") == "layer 2 · head 3"
    assert opened.tab.locator("#thumbnails [aria-pressed=true]").get_attribute("data-head") == "11"


@pytest.mark.full
def test_thumbnails_have_the_colours_of_their_cells(open_page: Open):
    record = of_text(causal=False)
    opened = open_page(record)
    opened.tab.wait_for_selector("html[data-drawn]", state="attached")
    pattern = record.arrays["pattern"][0].astype(float)
    pixels = (
        "(canvas) => [canvas.width, ...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    )
    for head in range(3):
        width, *read = opened.tab.locator(f"[data-head='{head}'] canvas").first.evaluate(pixels)
        drawn = np.array(read).reshape(-1, width, 4)
        assert np.abs(drawn[..., :3] - ramp(pattern[head] / pattern.max())).max() <= 3


def test_a_column_of_statistics_sorts_the_heads_and_a_row_chooses_one(open_page: Open):
    record = layered(n_layers=2, n_heads=5)
    opened = open_page(record)
    titles = [title.strip() for title in opened.tab.locator("#statistics thead th").all_inner_texts()]
    button = opened.tab.locator("#statistics thead th button").nth(titles.index("H"))
    order = np.argsort([head.entropy for head in record.heads])
    for expected in (order[::-1], order):
        button.click()
        rows = opened.tab.locator("#statistics tbody tr").evaluate_all(
            "(rows) => rows.map((row) => Number(row.dataset.head))"
        )
        entropies = [record.heads[row].entropy for row in rows]
        assert np.allclose(entropies, [record.heads[row].entropy for row in expected], atol=0.006)
    opened.tab.locator("#statistics tbody tr[data-head='7']").click()
    opened.settle()
    assert opened.tab.inner_text("#chosen-title") == "layer 1 · head 2"


LUMINANCE = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour, under) => {
    canvas.fillStyle = `rgb(${under.join(" ")})`; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (part) => part / 255 <= .04045 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4;
  const light = (c) => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const ground = (e) => e ? rgb(getComputedStyle(e).backgroundColor, ground(e.parentElement)) : [255, 255, 255];
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.checkVisibility() || ["SCRIPT", "STYLE"].includes(e.tagName)) continue;
    const own = getComputedStyle(e), row = e.closest("li[data-place]");
    const under = row ? rgb(getComputedStyle(row).getPropertyValue("--wash"), ground(row)) : ground(e);
    const [a, b] = [light(rgb(own.color, under)), light(under)].sort((x, y) => y - x);
    found.push([(a + .05) / (b + .05), walker.currentNode.data.slice(0, 30)]);
  }
  return found;
}"""


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_both_themes(open_page: Open, scheme: str):
    opened = open_page(layered(n_layers=2, causal=True), at="#sinks=hidden", scheme=scheme)
    found = opened.tab.evaluate(LUMINANCE)
    assert len(found) > 100
    assert min(found)[0] >= 4.5, sorted(found)[:8]


@pytest.mark.full
def test_the_theme_follows_the_system_until_one_is_chosen(open_page: Open):
    opened = open_page(of_text())

    def ground() -> tuple[int, ...]:
        colour = opened.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return tuple(map(int, re.findall(r"\d+", colour)))

    assert min(ground()) > 230
    hatched = opened.colour_of(0, 5)
    opened.tab.emulate_media(color_scheme="dark")
    opened.settle()
    assert max(ground()) < 40
    assert max(opened.colour_of(0, 5)[:3]) < 80 < min(hatched[:3])
    opened.tab.check("#theme input[value=light]")
    assert min(ground()) > 230
    assert opened.colour_of(0, 5) == hatched
    opened.tab.check("#theme input[value=auto]")
    assert max(ground()) < 40


HOSTILE = (
    "<script>alert(1)</script>", "</script><!--", '"><img src=x onerror=alert(1)>', "&lt;b&gt;", "\u202egnp.exe", "a\u200bb",
    "\x1b[31m", "javascript:alert(1)", "${alert(1)}", "{{7*7}}",
)  # fmt: skip
LABELS = (
    "<script>alert(1)</script>", "</script><!--", '"><img␣src=x␣onerror=alert(1)>', "&lt;b&gt;", "\\u202egnp.exe", "a\\u200bb",
    "\\x1b[31m", "javascript:alert(1)", "${alert(1)}", "{{7*7}}",
)  # fmt: skip


def test_hostile_tokens_are_text_and_nothing_of_them_runs(open_page: Open):
    opened = open_page(make_record(HOSTILE, HOSTILE[::-1], causal=False))
    assert opened.tab.locator("#queries .token").all_inner_texts() == list(LABELS)
    for place, label in enumerate(LABELS):
        opened.move_to(place, (place + 1) % len(LABELS))
        assert f"query {place} “{label}”" in opened.readout
        opened.tab.hover(f"#keys [data-place='{place}']")
        opened.settle()
        assert opened.tab.get_attribute(f"#keys [data-place='{place}']", "title") == label
    opened.tab.select_option("#sequence", "1")
    opened.settle()
    assert opened.tab.locator("#keys .token").all_inner_texts() == list(LABELS[::-1])
    assert opened.tab.locator("img, iframe, script:not(#record)").count() == 1


KEYBOARD_ORDER = [
    "scale",
    "sinks",
    "theme",
    "help",
    "thumbnails",
    "previous",
    "next",
    "matrix",
    "queries",
    "keys",
    "statistics",
]


def test_a_page_is_used_from_the_keyboard_alone(open_page: Open):
    opened = open_page(layered(n_layers=2, n_heads=3))
    part = "document.activeElement.closest('#scale, #theme, #thumbnails, #statistics, #queries, #keys') ?? document.activeElement"
    reached: list[str] = []
    for _ in range(60):
        opened.tab.keyboard.press("Tab")
        name = opened.tab.evaluate(f"({part}).id")
        reached += [name] if name and name not in reached else []
    assert reached == KEYBOARD_ORDER
    opened.tab.focus("#queries [tabindex='0']")
    opened.tab.keyboard.press("Home")
    opened.tab.keyboard.press("ArrowDown")
    opened.tab.keyboard.press("Enter")
    opened.settle()
    assert opened.fragment["query"] == "1"
    opened.tab.keyboard.press("?")
    assert opened.tab.locator("#help-text").is_visible()
    opened.tab.keyboard.press("Escape")
    assert not opened.tab.locator("#help-text").is_visible()


def test_an_address_brings_back_the_view_and_follows_it(open_page: Open):
    record = layered(n_layers=3, n_heads=4, causal=True)
    view = "#layer=2&head=3&query=7&key=4&scale=rank&sinks=hidden"
    opened = open_page(record, at=view)
    assert opened.tab.inner_text("#chosen-title") == "layer 2 · head 3"
    assert opened.readout.startswith("query 7 “ed” → key 4 “fox”: ")
    assert opened.tab.is_checked("#scale input[value=rank]")
    assert opened.tab.is_checked("#sinks")
    assert opened.fragment == {"layer": "2", "head": "3", "query": "7", "key": "4", "scale": "rank", "sinks": "hidden"}
    opened.tab.evaluate("location.hash = '#layer=1&head=0&query=3&sinks=shown'")
    opened.settle()
    assert opened.tab.inner_text("#chosen-title") == "layer 1 · head 0"
    pattern = record.arrays["layers.1.pattern"][0, 0, 3]
    assert opened.fragment["key"] == str(pattern.argmax())
    assert np.float32(opened.share_read()) == pattern.max()


@pytest.mark.full
@pytest.mark.parametrize(
    "fragment", ["#layer=9&head=77&query=999&key=-4&scale=<b>&sinks", "#&&==%%%", "#query=1e9&sequence=5"]
)
def test_an_address_of_another_page_is_let_go(open_page: Open, fragment: str):
    opened = open_page(of_text(), at=fragment)
    assert opened.readout.startswith("query 6 “and” → key ")
    assert opened.tab.inner_text("#chosen-title") == "head 0"


def test_sequences_are_chosen_by_their_number_and_padding_is_left_out(open_page: Open):
    record = make_record(TEXT, ("a", "mat"), ("cat", "and", "mat"))
    opened = open_page(record, at="#sequence=2&query=1&key=2")
    pattern = record.arrays["pattern"]
    assert opened.readout == f"query 1 “and” → key 2 “mat”: {pattern[2, 0, 1, 2]!s} exact"
    opened.tab.select_option("#sequence", "1")
    opened.move_to(1, 0)
    assert opened.readout.startswith(f"query 1 “mat” → key 0 “a”: {pattern[1, 0, 1, 0]!s} exact")
    assert opened.tab.locator("#keys [data-place]").count() == 2


@pytest.mark.full
def test_other_keys_than_queries_have_their_own_names(open_page: Open):
    record = make_record(TEXT, context=[("le", "chat", "noir")])
    opened = open_page(record)
    opened.move_to(4, 2)
    assert opened.readout == f"query 4 “a” → key 2 “noir”: {record.arrays['pattern'][0, 0, 4, 2]!s} exact"
    assert opened.tab.locator("#keys .token").all_inner_texts() == ["le", "chat", "noir"]


@pytest.mark.full
def test_zooming_and_dragging_keep_what_is_under_the_pointer(open_page: Open):
    words = tuple(f"w{place}" for place in range(90))
    record = make_record(words, causal=True)
    opened = open_page(record)
    mouse, canvas = opened.tab.mouse, opened.tab.locator("#matrix")

    def cell_size() -> float:
        return float(canvas.get_attribute("data-wide") or 0)

    def on_screen(row: float, column: float) -> np.ndarray:
        box, place = canvas.bounding_box(), opened.place_of(row, column)
        return np.array([box["x"], box["y"]]) + place

    fitted = cell_size()
    opened.tab.click("#matrix", position=dict(zip("xy", opened.place_of(60.5, 20.5), strict=True)))
    for _ in range(3):
        opened.tab.click("[aria-label='zoom in']")
    pointer, zoomed = on_screen(60.5, 20.5), cell_size()
    assert zoomed > 3 * fitted
    mouse.move(*pointer)
    opened.tab.keyboard.down("Control")
    mouse.wheel(0, -100)
    opened.settle()
    opened.tab.keyboard.up("Control")
    assert cell_size() > 1.2 * zoomed
    assert np.abs(on_screen(60.5, 20.5) - pointer).max() < 1
    opened.move_to(60, 20)
    assert np.float32(opened.share_read()) == record.arrays["pattern"][0, 0, 60, 20]
    mouse.down()
    mouse.move(*(pointer - (150, 50)), steps=3)
    mouse.up()
    assert np.abs(on_screen(60.5, 20.5) - pointer + (150, 50)).max() < 1
    assert (opened.fragment["query"], opened.fragment["key"]) == ("60", "20")
    opened.tab.click("text=fit")
    assert cell_size() == fitted


LONG = ("Donaudampfschifffahrtsgesellschaft" * 6, "注意力机制" * 20, "مرحبا", "e\u0301" * 40, "👩‍👩‍👧‍👦", "x")


@pytest.mark.full
@pytest.mark.parametrize("width", [320, 400])
def test_a_narrow_screen_scrolls_no_page_sideways_whatever_the_words(open_page: Open, width: int):
    opened = open_page(make_record(LONG, TEXT, n_heads=5), width=width, height=800)
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    opened.move_to(1, 0)
    assert opened.readout.startswith(f"query 1 “{LONG[1]}” → key 0 “{LONG[0]}”: ")
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    right = "(elements) => Math.max(...elements.map((e) => e.getBoundingClientRect().right))"
    assert (
        opened.tab.locator("main > section, #controls > *, #readout, #matrix, .tokens li").evaluate_all(right) <= width
    )


@pytest.mark.full
def test_paper_holds_every_column_of_every_table(open_page: Open):
    opened = open_page(walked(make_record(TEXT, causal=True)))
    opened.tab.set_viewport_size({"width": 720, "height": 1000})  # A4 without margins
    opened.tab.emulate_media(media="print")
    beyond = "[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right - innerWidth)"
    widths = opened.tab.evaluate(beyond)
    assert len(widths) >= 2
    assert max(widths) <= 0
    cut = "[...document.querySelectorAll('.scroll')].filter(e => getComputedStyle(e).overflowX !== 'visible').length"
    assert opened.tab.evaluate(cut) == 0


@pytest.mark.full
def test_a_window_without_width_comes_back_as_it_was(open_page: Open):
    opened = open_page(make_record(tuple(f"w{place}" for place in range(90))))
    before = opened.tab.evaluate("({...matrix.dataset})")
    for width in ("0", ""):
        opened.tab.evaluate(
            "(width) => { document.body.style.width = width; dispatchEvent(new Event('resize')); }", width
        )
        opened.settle()
    assert opened.tab.evaluate("({...matrix.dataset})") == before


@pytest.mark.full
def test_a_record_without_matrices_has_a_page_without_pictures(open_page: Open):
    record = of_text()
    opened = open_page(replace(record, arrays={name: a for name, a in record.arrays.items() if name != "pattern"}))
    assert opened.tab.locator("#statistics table").count() == 1
    assert opened.tab.locator("#matrix").count() == 0
    assert opened.tab.locator("#scale").count() == 0


@pytest.mark.full
def test_the_legend_names_the_keys_that_this_head_has_as_sinks(open_page: Open):
    record = of_text()
    pattern = record.arrays["pattern"]
    pattern[0, 1] = np.tri(7) / np.arange(1, 8)[:, None]
    pattern[0, 2] = np.eye(7)[0]
    said = HeadStatistics(head=2, sinks=(Sink(0, 0, 0.9, 0.1), Sink(0, 3, 0.5, 0.1), Sink(0, 4, 0.2, 0.1)))
    record = replace(record, heads=(*record.heads[:2], said))
    opened = open_page(record, at="#head=1")
    legend = opened.tab.locator("#legend .sink")
    assert legend.count() == 0
    opened.move_to(4, 0)
    assert opened.readout.endswith(" exact")
    opened.tab.check("#sinks")
    opened.move_to(4, 0)
    assert legend.inner_text() == "no sink here, none taken out"
    assert opened.readout.endswith(" exact")
    assert "sink" not in (opened.tab.get_attribute("#matrix", "aria-label") or "")
    opened.tab.uncheck("#sinks")
    opened.tab.click("#thumbnails [data-head='2']")
    opened.settle()
    assert legend.inner_text().startswith("▾ sinks of this head: first token “the”, key 3 “on” · 1 of all attention, ")


@pytest.mark.full
def test_small_maps_show_ranks_as_those_of_each_head(open_page: Open):
    opened = open_page(of_text())
    opened.tab.wait_for_selector("html[data-drawn]", state="attached")
    note = opened.tab.locator("#thumbnails-note")
    assert note.inner_text().startswith("one scale for all: linear, up to ")
    opened.tab.check("#scale input[value=rank]")
    opened.tab.wait_for_selector("html[data-drawn]", state="attached")
    assert note.inner_text().splitlines()[0] == "rank among each head’s own cells"


@pytest.mark.full
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_that_sees_one_key_is_reported_to_be_above_the_scale(open_page: Open, causal: bool):
    record = of_text(causal=causal)
    legend = open_page(record).tab.locator("#legend .pair").first.inner_text()
    top = top_of(record.arrays["pattern"][0].astype(float), record.arrays["allowed"][0, 0])
    end = f"{top:.2g}".removeprefix("0")
    assert re.sub(r"\s+", " ", legend).strip() == (f"0 ≥ {end}" if causal else f"0 {end}")


INK = """([left, right]) => {
  const joined = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  Object.assign(joined.canvas, {width: matrix.width, height: matrix.height});
  joined.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
  joined.fillRect(0, 0, matrix.width, matrix.height);
  const [ground] = joined.getImageData(0, 0, 1, 1).data;
  for (const canvas of [matrix, document.getElementById("matrix-cursor")]) joined.drawImage(canvas, 0, 0);
  const top = Number(matrix.dataset.top) - 22, {data} = joined.getImageData(left, top, right - left, 15);
  return [...data].filter((part, i) => i % 4 === 0 && Math.abs(part - ground) > 40).length;
}"""


@pytest.mark.full
def test_a_tag_leaves_no_half_of_a_number_beside_it(open_page: Open):
    opened = open_page(make_record(tuple(f"w{place}" for place in range(310)), n_heads=1), at="#head=0&query=5&key=5")
    middle, _ = opened.place_of(0, 100.5)
    tick = [round(middle) - 12, round(middle) + 12]
    before = opened.tab.evaluate(INK, tick)
    assert before > 20
    name = opened.tab.evaluate("matrix.getContext('2d').measureText('110 w110').width") + 10
    wide = float(opened.tab.get_attribute("#matrix", "data-wide") or 0)
    column = 100 + round((name / 2 + 2) / wide)
    opened.move_to(200, column)
    left = opened.place_of(0, column + 0.5)[0] - name / 2
    assert tick[0] < left < tick[1]
    assert opened.tab.evaluate(INK, [tick[0] - 4, int(left) - 2]) == 0
    opened.move_to(200, 290)
    assert opened.tab.evaluate(INK, tick) == before


def test_the_head_that_is_surest_is_the_first_that_is_seen(open_page: Open):
    record = layered(n_layers=2, n_heads=3)
    kinds = [
        replace(head, certainty=0.1 + 0.2 * (head.layer == 1 and head.head == 2), kind="local") for head in record.heads
    ]
    record = replace(record, heads=tuple(kinds))
    assert open_page(record).tab.inner_text("#chosen-title") == "layer 1 · head 2"
    assert open_page(record, at="#layer=0&head=1").tab.inner_text("#chosen-title") == "layer 0 · head 1"


N_LONG = 512


@pytest.fixture(scope="module")
def many() -> Record:
    """48 heads of 512 tokens, causal: more than a page takes cell by cell."""
    text = text_of(tuple(f"w{place}" for place in range(N_LONG - 2)), parts=())
    made = layered(n_layers=6, n_heads=8, causal=True)
    rng, allowed = np.random.default_rng(5), np.tri(N_LONG, dtype=bool)[None, None]
    of_few_tokens = ("entropy", "strongest_key", "scores", "visible", "participation")
    arrays = {name: array for name, array in made.arrays.items() if not name.endswith(of_few_tokens)}
    for layer in range(6):
        raised = rng.random((1, 8, N_LONG, N_LONG), dtype=np.float32) ** 20 * allowed
        raised[..., 0] += 3
        arrays[f"layers.{layer}.pattern"] = raised / raised.sum(-1, keepdims=True)
        arrays[f"layers.{layer}.allowed"] = allowed
    return replace(made, sequences=(text,), arrays=arrays)


EXACT_ROW = 301


@pytest.fixture(scope="module")
def many_page(many: Record) -> str:
    """Their page, with an exact row."""
    return page(many, ViewOptions(rows=(EXACT_ROW,)))


@pytest.mark.full
def test_a_large_record_is_ready_and_its_numbers_are_near(
    open_page: Open, many: Record, many_page: str, record_property: Callable[[str, object], None]
):
    opened = open_page(many_page, at="#layer=4&head=7")
    ready = opened.tab.evaluate("performance.getEntriesByName('mha-ready')[0].startTime")
    record_property("milliseconds until the first matrix", round(ready))
    pattern = many.arrays["layers.4.pattern"][0, 7].astype(float)
    block = opened.tab.evaluate("JSON.parse(record.textContent).maps[0].block")
    for row, column in ((20, 3), (60, 0), (9, 9)):
        opened.move_to(row, column)
        found = re.fullmatch(
            r"queries (\d+)–\d+ → keys (\d+)–\d+: ≈ (\.\d+) ± (\.\d+) \(kept in 8 bits\) of .*", opened.readout
        )
        assert found is not None, opened.readout
        assert (int(found[1]), int(found[2])) == (row * block, column * block)
        rows, columns = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
        assert abs(float(found[3]) - pattern[rows, columns].sum(1).mean()) <= float(found[4]) < 0.003
    opened.tab.wait_for_selector("html[data-drawn]", state="attached")
    assert opened.tab.locator("#thumbnails canvas").evaluate_all("(all) => Math.min(...all.map((c) => c.width))") > 1


@pytest.mark.full
def test_rows_that_a_large_record_keeps_are_reported_exactly(open_page: Open, many: Record, many_page: str):
    opened = open_page(many_page, at=f"#layer=4&head=7&query={EXACT_ROW}")
    row = many.arrays["layers.4.pattern"][0, 7, EXACT_ROW]
    listed = {place: weight for place, (weight, _) in lines_of(opened).items()}
    strongest = np.argsort(-row)[:10]
    assert {int(place) for place in strongest} <= set(listed)
    for place in strongest:
        assert np.float32(listed[int(place)]) == row[place]
    opened.tab.hover(f"#queries [data-place='{EXACT_ROW}'][data-to='{EXACT_ROW}']")
    opened.settle()
    assert np.float32(opened.share_read()) == row.max()


@pytest.mark.full
def test_cells_smaller_than_a_pixel_are_put_together_as_numpy_does(open_page: Open):
    record = make_record(tuple(f"w{place}" for place in range(310)), causal=True, n_heads=1)
    opened = open_page(record, width=320)
    factor = int(opened.tab.get_attribute("#matrix", "data-factor") or 0)
    assert factor == 2
    pattern = record.arrays["pattern"][0, 0].astype(float)
    opened.move_to(50, 7)
    assert opened.readout.startswith("queries 100–101 → keys 14–15: ")
    assert abs(opened.share_read() - pattern[100:102, 14:16].sum(1).mean()) < 0.0006
    assert "a cell is 2 × 2 tokens" in opened.tab.locator("#legend").inner_text()


# --------------------------------------------------------------------------------------------------------------- the story


def story_of(opened: Opened) -> list[str]:
    """The steps of the chosen cell's story."""
    return opened.tab.locator("#story li").all_inner_texts()


def told(number: float) -> str:
    """A number as the story writes it."""
    return f"{float(f'{number:.4g}'):.10g}".replace("-", "−")


def numbered(record: Record, **arrays: np.ndarray) -> Record:
    """The record with arrays whose numbers are made by hand: its pattern is the softmax of its scores."""
    return replace(record, arrays={**record.arrays, **arrays})


def scored(*, causal: bool = True) -> Record:
    """A record of three heads and seven tokens with dot products, scores, values and results that belong together."""
    record = of_text(causal=causal)
    generator = np.random.default_rng(5)
    allowed = np.broadcast_to(record.arrays["allowed"], record.arrays["pattern"].shape)
    qk = generator.normal(size=allowed.shape).astype(np.float32)
    scores = np.where(allowed, qk * np.float32(record.config.scale), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    pattern = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    v = generator.normal(size=(1, 3, 7, 8)).astype(np.float32)
    return numbered(record, qk=qk, scores=scores.astype(np.float32), pattern=pattern, v=v, z=pattern @ v)


def test_a_chosen_cell_shows_its_score_weight_and_what_it_adds(open_page: Open) -> None:
    record = scored()
    opened = open_page(record, at="#head=1&query=5&key=2")
    qk, scores, pattern, v, z = (record.arrays[name][0, 1] for name in ("qk", "scores", "pattern", "v", "z"))
    product, score, weight, output = story_of(opened)
    assert f"= {told(qk[5, 2])}:" in product
    assert f"{told(record.config.scale)} · {told(qk[5, 2])} = {told(scores[5, 2])}." in score
    top, total = scores[5].max(), np.exp(scores[5] - scores[5].max()).sum()
    assert f"exp({told(scores[5, 2])} − {told(top) if top >= 0 else f'({told(top)})'}) ÷ {told(total)} = " in weight
    assert "over the 6 keys" in weight
    assert (
        f"number {1 + int((pattern[5] > pattern[5, 2]).sum())} of the row; each key would get {told(1 / 6)}" in weight
    )
    assert float(opened.tab.locator("#story strong").inner_text()) == pytest.approx(pattern[5, 2])
    assert f"{told(pattern[5, 2])} · [{', '.join(told(x) for x in v[2, :6])}, … {len(v[2]) - 6} more]" in output
    assert f"= [{', '.join(told(np.float32(pattern[5, 2]) * x) for x in v[2, :2])}, " in output
    assert f"z = [{', '.join(told(x) for x in z[5, :6])}, … " in output


def test_a_click_shows_the_story_of_another_cell(open_page: Open) -> None:
    opened = open_page(scored(), at="#head=0")
    opened.move_to(4, 1)
    before = story_of(opened)
    opened.tab.mouse.down()
    opened.tab.mouse.up()
    opened.settle()
    assert "query 4" in opened.tab.locator("#story h3").inner_text()
    assert story_of(opened) != before


def test_a_masked_cell_has_the_score_of_minus_infinity_and_adds_nothing(open_page: Open) -> None:
    opened = open_page(scored(), at="#head=0&query=2&key=5")
    _, score, weight, output = story_of(opened)
    assert "−∞" in score
    assert "= 0, exactly" in weight
    assert "adds nothing" in output


def test_what_the_record_does_not_have_is_reported_with_how_to_keep_it(open_page: Open) -> None:
    record = scored()
    kept = {name: array for name, array in record.arrays.items() if name not in ("qk", "scores", "v", "z")}
    product, score, weight, output = story_of(open_page(replace(record, arrays=kept), at="#head=0&query=3&key=1"))
    for step in (product, score, weight, output):
        assert "--keep qk,scores,pattern,z,out,v keeps it" in step
    assert "v was not kept" in output
    assert "number " in weight


def test_an_option_stands_on_one_line_with_its_value_however_narrow_the_window(open_page: Open) -> None:
    record = scored()
    kept = {name: array for name, array in record.arrays.items() if name != "v"}
    opened = open_page(replace(record, arrays=kept), at="#head=0&query=3&key=1")
    option = opened.tab.locator("#story code")
    assert option.inner_text() == "--keep qk,scores,pattern,z,out,v"
    for width in (1200, 420):
        opened.tab.set_viewport_size({"width": width, "height": 800})
        # The page draws its text anew after the window has changed.
        opened.tab.wait_for_function(
            "document.querySelector('#story code')?.getClientRects().length === 1", timeout=30_000
        )


def test_softcap_and_bias_stand_in_their_order(open_page: Open) -> None:
    record = scored()
    config = replace(record.config, softcap=2.0, positions="alibi")
    capped = 2 * np.tanh(record.arrays["qk"] * np.float32(config.scale) / 2)
    scores = np.where(np.isfinite(record.arrays["scores"]), capped - 0.5, -np.inf).astype(np.float32)
    opened = open_page(replace(numbered(record, scores=scores), config=config), at="#head=2&query=6&key=3")
    score = story_of(opened)[1]
    assert (
        f"by the softcap {told(capped[0, 2, 6, 3])}, and a bias of −0.5 is added: {told(scores[0, 2, 6, 3])}." in score
    )


def test_columns_types_and_words_explain_themselves_where_the_pointer_rests(open_page: Open) -> None:
    opened = open_page(layered(text_of(TEXT), n_layers=1, n_heads=2))
    titles = opened.tab.locator("#statistics thead th[title]")
    assert titles.count() >= 10
    assert "entropy" in (opened.tab.locator("#statistics th", has_text="eff.keys").get_attribute("title") or "")
    assert opened.tab.locator("#facts .chip").get_attribute("title")
    assert opened.tab.locator("#legend .term").first.get_attribute("title")


@pytest.mark.full
def test_of_blocks_a_story_says_only_what_is_known_of_the_cell(open_page: Open, many: Record, many_page: str) -> None:
    pattern = many.arrays["layers.4.pattern"][0, 7]
    key = int(pattern[EXACT_ROW].argmax())
    known = story_of(open_page(many_page, at=f"#layer=4&head=7&query={EXACT_ROW}&key={key}"))
    assert "number 1 of the row" in known[2]
    assert f"each key would get {told(1 / (EXACT_ROW + 1))} if" in known[2]
    strongest = int(pattern[400].argmax())
    opened = open_page(many_page, at=f"#layer=4&head=7&query=400&key={strongest}")
    assert float(opened.tab.locator("#story strong").inner_text()) == pytest.approx(pattern[400, strongest])
    assert "number " not in story_of(opened)[2]
    opened = open_page(many_page, at=f"#layer=4&head=7&query=400&key={int(pattern[400, :400].argmin())}")
    assert story_of(opened) == []
    assert "tokens" in opened.tab.locator("#story").inner_text()
