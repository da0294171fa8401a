"""Writes the README's table of wrong attentions, between the comments `mutants` and `/mutants`.

    python docs/zoo.py

It runs the checks of tests/test_mutants.py on every mutant, and tells for each how many of them it fails.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BETWEEN = re.compile(r"(?<=<!-- mutants -->\n).*?(?=<!-- /mutants -->)", re.DOTALL)


def written(readme: str, table: str) -> str:
    """The text of the README with the table between its markers."""
    if len(BETWEEN.findall(readme)) != 1:
        sys.exit("README.md must have one place between <!-- mutants --> and <!-- /mutants -->, each on its own line")
    return BETWEEN.sub(lambda _: f"{table}\n", readme)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    from test_mutants import table

    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text(), table()))
