"""Terms with what they mean, and the list of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.render.base.format import filled
from mhacli.render.base.options import Screen
from mhacli.results.glossary import GROUPS, Term
from mhacli.results.glossary import Group as TermGroup

_TITLES: dict[TermGroup, str] = {
    "concept": "concepts",
    "sign": "signs in tables",
    "column": "columns of the table of heads",
    "head type": "types of heads",
    "site": "sites: the tensors of the walkthrough",
    "mistake": "mistakes that mha check names",
}


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
    """The names of all terms, group by group."""
    parts: list[RenderableType] = []
    for group in GROUPS:
        names = [term.name for term in terms if term.group == group]
        parts += [Text(_TITLES[group], style="bold"), Text("\n".join(filled(names, screen.width))), Text("")]
    return Group(*parts, Text("mha explain TERM says what one of them means", style="dim"))
