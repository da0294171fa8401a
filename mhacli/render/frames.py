"""What stands around the words of a view: the line above a section, and tables without lines."""

from __future__ import annotations

from rich.rule import Rule
from rich.table import Table
from rich.text import Text


def title_rule(words: str) -> Rule:
    """The line above a section, its title on the left."""
    return Rule(Text(words, style="bold"), align="left", style="dim")


def plain_table(*columns: tuple[str, bool], width: int | None = None) -> Table:
    """A table without lines, of columns that do not break; of each its head, and whether its words stand on the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", width=width)
    for name, is_right in columns:
        table.add_column(name, justify="right" if is_right else "left", no_wrap=True)
    return table
