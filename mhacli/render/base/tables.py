"""What stands around the words of a view: the line above a section, and tables without lines."""

from __future__ import annotations

from rich.rule import Rule
from rich.table import Table
from rich.text import Text


def title_rule(words: str | Text) -> Rule:
    """The line above a section, its title on the left: bold, or in the styles of its own."""
    return Rule(Text(words, style="bold") if isinstance(words, str) else words, align="left", style="dim")


def left_out(count: int) -> Text:
    """What stands in a table for rows that are left out."""
    return Text(f"{count} more (--all)", style="dim")


def plain_table(*columns: tuple[str, bool], width: int | None = None, gap: int = 2) -> Table:
    """A table without lines, of columns that do not break, `gap` cells apart; of each its head, and whether its words stand on
    the right. Columns of another kind are added to it."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", width=width)
    for name, is_right in columns:
        table.add_column(name, justify="right" if is_right else "left", no_wrap=True)
    return table
