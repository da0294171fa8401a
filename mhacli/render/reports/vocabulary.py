"""A vocabulary as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.render.base.format import count_of, fitted, left_out, plain_table
from mhacli.render.base.options import Screen, balanced
from mhacli.text.escape import token_label
from mhacli.text.vocabulary import Entry

MAX_ROWS = 24
_LEAST_ROOM = 5


def vocabulary_table(
    rows: Sequence[Entry], n_distinct: int, n_tokens: int, *, everything: bool, on: Screen
) -> RenderableType:
    """Token, id, count and bytes; first and last rows of a long one. The caption counts the whole vocabulary."""
    table = plain_table()
    table.add_column("id", justify="right")
    table.add_column("token", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("bytes", justify="right")
    room = max(_LEAST_ROOM, on.width - _numbers_width(rows))
    shown = balanced(len(rows), len(rows) if everything else MAX_ROWS)
    for place, index in enumerate(shown.shown):
        if shown.hidden and place == shown.before:
            table.add_row("⋮", left_out(shown.hidden))
        row = rows[index]
        name = fitted(token_label(row.token), room)
        table.add_row(str(row.id), Text(name, style="bold"), f"{row.count:,}", str(row.bytes))
    caption = f"{count_of(n_tokens, 'token')}, {n_distinct} distinct"
    return Group(Text(caption, style="bold"), table)


def _numbers_width(rows: Sequence[Entry]) -> int:
    """What id, count and bytes take, with the gaps between the four columns."""
    ids = max(len("id"), *(len(str(row.id)) for row in rows))
    counts = max(len("count"), *(len(f"{row.count:,}") for row in rows))
    sizes = max(len("bytes"), *(len(str(row.bytes)) for row in rows))
    return ids + counts + sizes + 3 * 2
