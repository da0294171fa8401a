"""Writes the table of wrong attentions in docs/CORRECTNESS.md, between the comments `mutants` and `/mutants`.

    python docs/zoo.py

It runs the checks of tests/test_mutants.py on every mutant, and tells for each how many of them it fails.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BETWEEN = re.compile(r"(?<=<!-- mutants -->\n).*?(?=<!-- /mutants -->)", re.DOTALL)


def written(page: str, table: str) -> str:
    """The text of the page with the table between its markers."""
    if len(BETWEEN.findall(page)) != 1:
        sys.exit(
            "docs/CORRECTNESS.md must have one place between <!-- mutants --> and <!-- /mutants -->, each on its own line"
        )
    return BETWEEN.sub(lambda _: f"{table}\n", page)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    from test_mutants import table

    page = ROOT / "docs" / "CORRECTNESS.md"
    page.write_text(written(page.read_text(), table()))
