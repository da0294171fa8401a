"""Terms with their explanations, and the list of all terms."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.record.glossary import GROUPS, Term
from mhacli.record.glossary import Group as TermGroup
from mhacli.render.base.format import filled
from mhacli.render.base.options import Screen

_TITLES: dict[TermGroup, str] = {
    "concept": "concepts",
    "sign": "signs",
    "column": "columns of heads",
    "head type": "types of heads",
    "bench": "bench",
    "decode": "decode",
    "effect": "effect",
    "diff": "diff",
    "doctor": "doctor",
    "site": "sites, the tensors of a layer",
    "probe": "probes of mha check",
    "mistake": "mistakes that mha check names",
}
_COUNTED: tuple[TermGroup, ...] = ("site", "probe", "mistake")
"""Groups that the list of all terms only counts, because they would fill the screen."""


def terms_view(terms: Sequence[Term]) -> RenderableType:
    """Each term with its explanation, formula and source."""
    parts = [part for term in terms for part in (Text(""), *_term(term))]
    return Group(*parts[1:])


def _term(term: Term) -> list[RenderableType]:
    title = Text(term.name, style="bold").append(f" · {term.group}", style="not bold dim")
    if term.also:
        title.append(f" · also: {', '.join(term.also)}", style="not bold dim")
    lines = (("Formula", term.formula), ("Wrong", term.wrong), ("Right", term.right), ("Source", term.source))
    texts = [
        Text(term.explanation),
        *(Text().append(f"{name}: ", style="dim").append(line) for name, line in lines if line),
    ]
    return [title, *(Padding(text, (0, 0, 0, 2)) for text in texts)]


def list_view(terms: Sequence[Term], screen: Screen) -> RenderableType:
    """The names of terms by group. Among several groups, the long ones are only counted."""
    groups = [group for group in GROUPS if any(term.group == group for term in terms)]
    parts: list[RenderableType] = []
    counted = [group for group in groups if len(groups) > 1 and group in _COUNTED]
    for group in (group for group in groups if group not in counted):
        names = [term.name for term in terms if term.group == group]
        title, *rest = filled([f"{_TITLES[group]}: {names[0]}", *names[1:]], screen.width)
        words = Text(title)
        words.stylize("bold", 0, len(_TITLES[group]))
        parts.append(Text("\n").join([words, *map(Text, rest)]))
    lists = [f"mha explain {group}s ({sum(term.group == group for term in terms)} names)" for group in counted]
    parts += map(Text, filled([f"more: {lists[0]}", *lists[1:]], screen.width) if lists else ())
    return Group(*parts, Text("mha explain TERM says what one of them means", style="dim"))
