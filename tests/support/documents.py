"""What a document shows, and what its commands print."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support import forks

BINARIES = Path(sys.executable).parent
VARYING = (
    (r"\b\d[\d.e+-]* (ns|µs|ms|s)\b", "TIME"),
    (r"\b\d\.?\d*e-\d\d\b", "TINY"),  # rounding errors
    (r"\b\d+ threads?\b", "THREADS"),
    (r"torch \S+", "TORCH"),
)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a document in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def steps(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every `$ …` line of a document with the lines that it shows below; those that install something left out."""
    for block in blocks(text, "console"):
        for chunk in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = chunk.rstrip("\n").split("\n")
            if "venv" not in command and not command.startswith("pip install"):
                yield command, shown


def settled(line: str) -> str:
    """The line without what differs from run to run and from machine to machine."""
    for pattern, name in VARYING:
        line = re.sub(pattern, name, line)
    return line.rstrip()


def unmatched(shown: list[str], printed: list[str]) -> str | None:
    """The first shown line that the output lacks; a line `…` stands for any lines, all others follow each other."""
    place, free = 0, False
    for line in map(settled, shown):
        if line == "…":
            free = True
            continue
        while free and place < len(printed) and settled(printed[place]) != line:
            place += 1
        if place >= len(printed) or settled(printed[place]) != line:
            return line
        place, free = place + 1, False
    return None if free or place == len(printed) or not shown else f"(more output: {printed[place]!r})"


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command line in a shell, as a reader would type it, on a screen of 80 columns."""
    mha = "" if forks.IS_COLD else f"{forks.stand_in_folder()}:"
    places = {"PATH": f"{mha}{BINARIES}:/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "80", "LANG": "C.UTF-8"}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=places, capture_output=True, text=True, check=False)


def printed_by(code: str, folder: Path) -> str:
    """What Python code prints in a folder, without the end of its last line."""
    paper = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(paper):
        exec(code, {"__name__": "__main__"})
    return paper.getvalue().rstrip("\n")
