"""Each command that a screen suggests can be typed in a shell as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support import golden
from support.mha import run

pytestmark = pytest.mark.real
SECTIONS = ("next steps", "check: next", "machine")


def suggested(text: str) -> list[str]:
    """The commands that a screen says to type next, with their line breaks."""
    below = re.findall(r"^next: (mha (?:[^\n]*\\\n)*[^\n]*)", text, re.M)
    beside = re.findall(r"^(?:next)? +(mha (?:check|trace) [^\n]*)$", text, re.M)
    return below + beside


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_suggested_can_be_typed(section: str, tmp_path: Path) -> None:
    rows = [row for row in golden.commands() if row.section == section]
    folder = tmp_path / "here"
    shutil.copytree(golden.FOLDER / "files", folder)
    shutil.copytree(golden.SAMPLES, folder / "sample_texts")
    written = Path(os.environ["MHA_TESTS_SHARED"], "golden", re.sub(r"\W+", "-", section))
    typed = {
        command: row
        for row in rows
        for command in suggested(golden.printed(section)[row.line].stdout)
    }
    assert len(typed) >= (20 if section == "next steps" else 1)
    for path in written.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    for command in typed:
        shown = ["sh", "-c", f"mha() {{ printf '%s\\0' \"$@\"; }}; {command}"]
        words = subprocess.run(shown, cwd=folder, capture_output=True, check=True).stdout
        assert words, command
        allowed = (0, 3) if command.startswith(("mha check", "mha diff")) else (0,)
        env = {"CUDA_VISIBLE_DEVICES": ""}
        run(folder, *words.split(b"\0")[:-1], code=allowed, env=env)


def test_the_benchmark_that_is_suggested_can_be_typed(tmp_path: Path) -> None:
    words = "bench --backends sdpa --lengths 16 --repeat 2 --heads 2 --budget 0.1".split()
    shown = run(tmp_path, *words, terminal=(80, 24), env=golden.ON_TERMINAL).stdout
    (command,) = suggested(shown)
    run(tmp_path, *shlex.split(command)[1:])
