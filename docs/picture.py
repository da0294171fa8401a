"""Draws docs/run.svg, the README's picture: a real run, as a terminal shows it, without fonts from a network.

    python docs/picture.py

It runs the installed `mha`, keeps the configuration, the heads and the self-check, and lets rich set them as SVG.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WORDS = ["run", "the cat sat on the mat", "--heads", "4", "--causal", "--head", "0,1"]
TITLE = 'mha run "the cat sat on the mat" --heads 4 --causal --head 0,1'
COLUMNS = 84


def coloured_output() -> str:
    """What the command prints on a terminal that has colour."""
    screen = {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    command = [str(Path(sys.executable).with_name("mha")), *WORDS]
    return subprocess.run(command, env=os.environ | screen, capture_output=True, text=True, check=True).stdout


def parts_to_show(output: str) -> str:
    """The configuration, the heads with their caption, and the self-check: what does not change from run to run."""
    sections = output.strip("\n").split("\n\n")
    wanted = ("mha ", "sequence 0 · head", "shade linear", "self-check")
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", section) for section in sections]
    return "\n\n".join(s for s, words in zip(sections, plain, strict=True) if words.startswith(wanted))


def svg(text: str) -> str:
    """The text as SVG in whatever monospaced font the reader has."""
    console = Console(
        record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(Text.from_ansi(text))
    drawn = console.export_svg(title=TITLE, theme=MONOKAI, unique_id="mha", font_aspect_ratio=0.6)
    without_network = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return without_network.replace("Fira Code", "DejaVu Sans Mono")


if __name__ == "__main__":
    Path(__file__).with_name("run.svg").write_text(svg(parts_to_show(coloured_output())))
