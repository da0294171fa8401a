"""Rewrites the outputs that README.md and the manual show, from what the commands print now.

    python docs/outputs.py [PAGE.md …]

An output that still agrees is left alone, so times do not change without need. In another one each
part between two `…` is replaced by the part of the new output that resembles it most. Where a part
resembles nothing, the output is reported and left: choose its lines by hand.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.documents import (  # noqa: E402
    exit_code,
    furnish,
    is_run,
    manual,
    run,
    split_steps,
    unmatched,
    without_varying,
)

ELISION = "…"
ALIKE = 0.6
"""The least resemblance of an old part and its replacement, from 0 to 1."""


def refitted(shown: Sequence[str], printed: Sequence[str]) -> tuple[list[str], float]:
    """The lines to show in place of `shown`, elided in the same places, and how much the least
    similar part resembles its own.
    """
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == ELISION:
            parts.append([])
        else:
            parts[-1].append(line)
    new: list[str] = []
    begin, worst = 0, 1.0
    for index, part in enumerate(parts):
        if part:
            begin, end, likeness = _place(
                part, printed, begin, is_first=index == 0, is_last=index == len(parts) - 1
            )
            new += printed[begin:end]
            begin, worst = end, min(worst, likeness)
        new += [ELISION] * (index < len(parts) - 1)
    return new, worst


def _place(
    old: Sequence[str], printed: Sequence[str], begin: int, *, is_first: bool, is_last: bool
) -> tuple[int, int, float]:
    """Where the part of the output lies that resembles `old` most, at or after `begin`, and how
    much it does.
    """
    if is_first and is_last:
        return 0, len(printed), 1.0
    starts = [0] if is_first else range(begin, max(begin, len(printed) - len(old)) + 1)
    found = max((_likeness(old, printed[at : at + len(old)]), -at) for at in starts)
    start = -found[1]
    if is_last:
        start = max(start, begin)
    return start, len(printed) if is_last else min(start + len(old), len(printed)), found[0]


def _likeness(old: Sequence[str], new: Sequence[str]) -> float:
    if len(new) < len(old):
        return 0.0
    ratios = [
        1.0 if a == b else SequenceMatcher(None, a, b).ratio()
        for a, b in zip(map(without_varying, old), map(without_varying, new), strict=False)
    ]
    return sum(ratios) / len(ratios)


def rewrite(page: Path) -> None:
    """Runs the commands of a page in a new folder, and replaces the outputs that differ."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = furnish(Path(name))
        new = "".join([_rewritten(page, piece, step, folder) for piece, step in split_steps(text)])
    if new != text:
        page.write_text(new)


def _rewritten(page: Path, piece: str, step: tuple[str, list[str]] | None, folder: Path) -> str:
    if step is None or not is_run(step[0]):
        return piece
    command, shown = step
    done = run(command, folder)
    printed = done.stdout.rstrip("\n").split("\n")
    if done.returncode != exit_code(command):
        print(f"{page.name}: {command}: exit code {done.returncode}\n{done.stderr}")
        return piece
    if not shown or unmatched(shown, printed) is None:
        return piece
    lines, likeness = refitted(shown, printed)
    if likeness < ALIKE or unmatched(lines, printed) is not None:
        print(f"{page.name}: {command}: choose by hand (likeness {likeness:.2f})")
        return piece
    print(f"{page.name}: {command}: rewritten")
    return "\n".join([f"$ {command}", *lines]) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:] or [str(path) for path in manual()]:
        rewrite(Path(name).resolve())
