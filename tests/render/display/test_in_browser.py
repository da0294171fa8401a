"""Notebook output in a real browser, offline: no requests, no logs, and readable in both colour schemes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.layers_made import layered
from support.records import make_record

PAGE = '<!doctype html><meta charset="utf-8"><body style="background: {}">{}</body>'
TEXT = ("the", "cat", "sat")
COLOURS = """(all) => all.map((one) => {
  const style = getComputedStyle(one);
  let ground = one;
  while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  return [style.color, getComputedStyle(ground).backgroundColor];
})"""


def luminance(colour: str) -> float:
    """Source: WCAG 2.2, relative luminance."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(ink: str, ground: str) -> float:
    dark, light = sorted((luminance(ink), luminance(ground)))
    return (light + 0.05) / (dark + 0.05)


def opened(
    browser: Any, path: Path, html: str, *, scheme: str, ground: str = "white"
) -> tuple[Any, list[str], list[str]]:
    """A tab with the output, and what it asked for and logged."""
    path.write_text(PAGE.format(ground, html), encoding="utf-8")
    tab = browser.new_context(color_scheme=scheme, offline=True).new_page()
    requests: list[str] = []
    problems: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda fault: problems.append(str(fault)))
    tab.goto(path.as_uri())
    return tab, requests, problems


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_output_asks_for_nothing_and_every_word_can_be_read(browser: Any, tmp_path: Path, scheme: str) -> None:
    for shown in (layered(), make_record(TEXT, causal=True), make_record(TEXT).pattern(head=1)):
        tab, requests, problems = opened(browser, tmp_path / "output.html", shown._repr_html_(), scheme=scheme)
        assert (requests, problems) == ([(tmp_path / "output.html").as_uri()], [])
        words = "p, p span, td, th, pre, pre span, b"
        pairs = [pair for pair in tab.locator(words).evaluate_all(COLOURS) if pair[0] != pair[1]]
        assert len(pairs) > 10
        assert min(contrast(ink, ground) for ink, ground in pairs) > 4
        grounds = {ground for _, ground in pairs}
        assert ("rgb(22, 29, 37)" in grounds) == (scheme == "dark")
        tab.context.close()


@pytest.mark.parametrize(("ground", "ink"), [("white", "black"), ("#111", "white")])
def test_without_its_style_sheet_the_output_has_the_colours_of_the_page(
    browser: Any, tmp_path: Path, ground: str, ink: str
) -> None:
    html = make_record(TEXT, causal=True)._repr_html_()
    begin, end = html.index("<style>"), html.index("</style>") + len("</style>")
    bare = f'<div style="color: {ink}">{html[:begin]}{html[end:]}</div>'
    tab, _, _ = opened(browser, tmp_path / "bare.html", bare, scheme="light", ground=ground)
    pairs = tab.locator("p, td, th").evaluate_all(COLOURS)
    assert min(contrast(*pair) for pair in pairs) > 4
    assert len({ground for _, ground in pairs}) > 3, "cells keep their colours"
    tab.context.close()


@pytest.mark.parametrize(("scheme", "stripes"), [("light", "#111"), ("dark", "white")])
def test_a_notebooks_rules_for_tables_and_text_do_not_reach_the_output(
    browser: Any, tmp_path: Path, scheme: str, stripes: str
) -> None:
    rules = f".jp tbody tr:nth-child(odd), .jp tr:nth-child(even), .jp pre {{ background: {stripes}; }}"
    html = f'<div class="jp">{layered()._repr_html_()}<style>{rules}</style></div>'
    tab, _, _ = opened(browser, tmp_path / "striped.html", html, scheme=scheme)
    pairs = [pair for pair in tab.locator("td, th, pre, pre span").evaluate_all(COLOURS) if pair[0] != pair[1]]
    assert min(contrast(*pair) for pair in pairs) > 4
    tab.context.close()


def test_the_page_of_a_record_runs_in_its_frame(browser: Any, tmp_path: Path) -> None:
    tab, requests, problems = opened(
        browser, tmp_path / "page.html", make_record(TEXT).page()._repr_html_(), scheme="light"
    )
    frame = tab.frame_locator("iframe")
    frame.locator("html[data-ready=true]").wait_for(state="attached")
    assert frame.locator("#chosen-title").inner_text().startswith("head 0")
    assert requests == [(tmp_path / "page.html").as_uri()]
    assert [problem for problem in problems if "autofocus" not in problem] == []
    tab.context.close()
