"""`mha explain`: what a term of the screens means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mhacli.cli.help import examples
from mhacli.cli.options import ColourOptions, command, option_group
from mhacli.cli.shared.output import JSON, Formats, format_options, json_document, print_report
from mhacli.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.render.base.options import Screen
    from mhacli.results.glossary import Term

SCHEMA = "mha.explain/1"
_MOST_EXPLAINED = 26
"""The most terms of a group that are explained at once; a larger group is listed."""


@format_options(json=JSON)
class ExplainFormats(Formats):
    """Formats of terms."""


@option_group
class ExplainOptions:
    """The term."""

    term: Annotated[
        list[str] | None,
        typer.Argument(
            help="A column, sign, head type, site, mistake or concept, or a group such as sites. (default: list all terms)",
            metavar="[TERM]",
            show_default=False,
        ),
    ] = None
    formats: ExplainFormats


@command
@examples("mha explain", "mha explain induction", "mha explain effective keys", "mha explain mistakes")
def explain(wanted: ExplainOptions, colour: ColourOptions) -> None:
    """A term in, its explanation out; without one the list of all, with the name of a group that of its terms."""
    from mhacli.results.glossary import similar, terms

    word = " ".join(wanted.term or ())
    found = (_explained(word) or _each_explained(wanted.term or [])) if word else terms()
    if not found:
        near = similar(word)
        hint = f"try mha explain {near[0]}" if near else "mha explain lists every term"
        more = f", or {', '.join(near[1:])}" if near[1:] else ""
        if len(wanted.term or ()) > 1 and all(map(os.path.lexists, wanted.term or ())):
            hint, more = "the shell puts file names in place of *: mha explain star", ""
        raise UsageError(f"no term is called {word[:40]!r}", hint=hint + more)

    def view(on: Screen) -> RenderableType:
        from mhacli.render.reports.explain import list_view, terms_view

        return terms_view(found) if word and len(found) <= _MOST_EXPLAINED else list_view(found, on)

    document = {"schema": SCHEMA, "terms": [asdict(term) for term in found]}
    print_report(wanted.formats.chosen(), colour, formats={"json": lambda: json_document(document)}, view=view)


def _explained(word: str) -> tuple[Term, ...]:
    """The terms that a word, a group or the sign of a head type names."""
    from mhacli.results.glossary import meanings, of_group

    return meanings(word) or of_group(word) or meanings(_type_of(word))


def _each_explained(words: Sequence[str]) -> tuple[Term, ...]:
    """The terms of several words, such as the headings of a table; none if one of them is unknown."""
    each = [_explained(word) for word in words]
    return tuple(dict.fromkeys(term for found in each for term in found)) if all(each) else ()


def _type_of(sign: str) -> str:
    """The type of head that a sign stands for; the word itself where it is none."""
    from mhacli.render.base.colours import KIND_SIGNS

    return next((kind for kind, (drawn, _) in KIND_SIGNS.items() if drawn == sign), sign)
