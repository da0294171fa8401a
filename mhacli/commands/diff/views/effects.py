"""The changed effects of two records, and the removals in only one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.commands.diff.result import EffectDifference
from mhacli.errors import first_names
from mhacli.record.effect import Effect
from mhacli.record.glossary import column_words
from mhacli.record.record import Record
from mhacli.render.base.format import count_of, flowing, number_text, plain_table, title_rule
from mhacli.render.base.options import Screen
from mhacli.render.checkpoint.effect import number_words, removal_words, signed_text
from mhacli.render.checkpoint.effect_map import removal_name

_MOST = 10


def effects_view(
    difference: EffectDifference | None, records: tuple[Record, Record], screen: Screen, *, everything: bool
) -> Iterator[RenderableType]:
    """A table of the effects that changed; empty unless both records have effects."""
    if difference is None:
        return
    parts: list[RenderableType] = []
    if difference.changes:
        heading = column_words().effect[difference.metric].heading
        table = plain_table(("removed", False), (f"{heading} of A", True), ("of B", True), ("B − A", True))
        shown = difference.changes if everything else difference.changes[:_MOST]
        for change in shown:
            words = number_words(change.a, difference.metric), number_words(change.b, difference.metric)
            table.add_row(*map(Text, (removal_words(change.a, records[0]), *words, signed_text(change.change))))
        parts.append(table)
        hidden = len(difference.changes) - len(shown)
        parts += [Text(f"⋮ {count_of(hidden, 'removal')} more (--all)", style="dim")] if hidden else []
        least = f"differences up to {number_text(difference.tolerance)} are noise or within the tolerance"
        parts.append(flowing([Text(least, style="dim")], screen.width))
    for letter, effects, record in zip("AB", (difference.only_a, difference.only_b), records, strict=True):
        if effects:
            parts.append(
                flowing([Text(f"removed only in {letter}: {_names(effects, record)}", style="dim")], screen.width)
            )
    if parts:
        yield Group(title_rule(f"{difference.summary}, the largest difference first"), *parts)


def _names(effects: Sequence[Effect], record: Record) -> str:
    return first_names(dict.fromkeys(removal_name(effect, record) for effect in effects))
