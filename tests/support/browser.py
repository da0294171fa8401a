"""Pages in a headless Chromium, offline: one request, nothing logged, nothing forbidden by the
page's policy.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.mha import PATIENCE_S

HOOKS = """
window.ran = []; window.violations = [];
for (const name of ["alert", "confirm", "prompt"]) window[name] = () => window.ran.push(name);
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(event.violatedDirective));
"""
CONTRASTS = """(elements) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const paint = (colour, under) => {
    canvas.fillStyle = `rgb(${under.join(" ")})`; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (part) =>
    part / 255 <= .04045 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4;
  const light = (c) => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const ground = (e) =>
    e ? paint(getComputedStyle(e).backgroundColor, ground(e.parentElement)) : [255, 255, 255];
  const texts = (e) => [...e.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
  return elements.filter((e) => texts(e).length && e.checkVisibility()).map((e) => {
    const row = e.closest("li"), wash = row && getComputedStyle(row).getPropertyValue("--wash");
    const under = wash ? paint(wash, ground(row)) : ground(e);
    const shades = [light(paint(getComputedStyle(e).color, under)), light(under)];
    const [a, b] = shades.sort((x, y) => y - x);
    return (a + .05) / (b + .05);
  });
}"""
"""The contrast of each element's text with what is behind it. Source: WCAG 2.2, relative
luminance."""

OVERLAPS = """(elements) => {
  const hidden = { visibilityProperty: true, opacityProperty: true };
  const boxes = elements.filter((e) => e.checkVisibility(hidden) && e.textContent.trim())
    .map((e) => [e.textContent, e.getBoundingClientRect()])
    .filter(([, box]) => box.width && box.height);
  const over = (a, b, low, high) => Math.min(a[high], b[high]) - Math.max(a[low], b[low]);
  const pairs = boxes.flatMap((a, i) => boxes.slice(i + 1).map((b) => [a, b]));
  return pairs.filter(([[, a], [, b]]) =>
    over(a, b, "left", "right") > 3 && over(a, b, "top", "bottom") > 3
  ).map(([[a], [b]]) => `${a} | ${b}`);
}"""
"""The labels that cover each other by more than the blank around their letters."""


@functools.cache
def _chromium() -> Any:
    """The browser, one for each process of the tests; it ends with it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    candidates = [
        os.environ.get("MHA_CHROMIUM"),
        *map(shutil.which, ("chromium-headless-shell", "chromium")),
    ]
    path = next((path for path in candidates if path and Path(path).exists()), None)
    if path is None:
        pytest.skip("needs chromium, or its path in MHA_CHROMIUM")
    arguments = ["--disable-background-networking", "--no-first-run", "--disable-gpu"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    return (
        playwright.sync_playwright().start().chromium.launch(executable_path=path, args=arguments)
    )


@contextmanager
def opened(
    folder: Path,
    html: str,
    *,
    at: str = "",
    size: tuple[int, int] = (1360, 900),
    scheme: str = "light",
    allowed_message: str = "willReadFrequently",
) -> Iterator[Any]:
    """A tab with a page. At the end nothing else was fetched, and nothing was logged but what is
    allowed.
    """
    path = folder / "opened.html"
    path.write_text(html, encoding="utf-8")
    requests: list[str] = []
    problems: list[str] = []
    viewport = {"width": size[0], "height": size[1]}
    context = _chromium().new_context(
        viewport=viewport, color_scheme=scheme, offline=True, reduced_motion="reduce"
    )
    try:
        tab = context.new_page()
        tab.set_default_timeout(1000 * PATIENCE_S)
        tab.add_init_script(HOOKS)
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda fault: problems.append(str(fault)))
        tab.goto(f"{path.as_uri()}{at}")
        yield tab
        assert [problem for problem in problems if allowed_message not in problem] == []
        assert len(requests) == 1, requests
        assert tab.evaluate("[...window.ran, ...window.violations]") == []
    finally:
        context.close()


def contrasts_of(tab: Any, selector: str) -> list[float]:
    """The contrast of every visible text that a selector names, but of those that have the colour
    of their ground.
    """
    return [contrast for contrast in tab.locator(selector).evaluate_all(CONTRASTS) if contrast > 1]


def overlaps_of(tab: Any, selector: str) -> list[str]:
    """The pairs of visible texts that a selector names, of which one covers the other."""
    pairs: list[str] = tab.locator(selector).evaluate_all(OVERLAPS)
    return pairs
