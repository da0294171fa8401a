"""`mha explain`: the meaning of a term on the screens."""

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

    from mhacli.record.glossary import Term
    from mhacli.render.base.options import Screen

SCHEMA = "mha.explain/1"
_MOST_EXPLAINED = 26
"""The size up to which a group is explained in full; a larger group is listed."""


@format_options(json=JSON)
class ExplainFormats(Formats):
    """Formats of terms."""


@option_group
class ExplainOptions:
    """The term to explain."""

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
def explain(options: ExplainOptions, colour: ColourOptions) -> None:
    """Prints the explanation of a term, the list of the terms of a group, or of all terms."""
    from mhacli.record.glossary import similar, terms

    word = " ".join(options.term or ())
    matching = (_explained(word) or _each_explained(options.term or [])) if word else terms()
    if not matching:
        nearest = similar(word)
        hint = f"try mha explain {nearest[0]}" if nearest else "mha explain lists every term"
        more = f", or {', '.join(nearest[1:])}" if nearest[1:] else ""
        if len(options.term or ()) > 1 and all(map(os.path.lexists, options.term or ())):
            hint, more = "the shell puts file names in place of *: mha explain star", ""
        raise UsageError(f"no term is called {word[:40]!r}", hint=hint + more)

    def view(on: Screen) -> RenderableType:
        from mhacli.commands.explain.view import list_view, terms_view

        return terms_view(matching) if word and len(matching) <= _MOST_EXPLAINED else list_view(matching, on)

    document = {"schema": SCHEMA, "terms": [asdict(term) for term in matching]}
    print_report(options.formats.chosen(), colour, formats={"json": lambda: json_document(document)}, view=view)


def _explained(word: str) -> tuple[Term, ...]:
    """The terms that a word, a group or the sign of a head type names."""
    from mhacli.record.glossary import meanings, of_group

    return meanings(word) or of_group(word) or meanings(_type_of(word))


def _each_explained(words: Sequence[str]) -> tuple[Term, ...]:
    """The terms of several words, such as the headings of a table; none if one of them is unknown."""
    matches = [_explained(word) for word in words]
    return tuple(dict.fromkeys(term for of_word in matches for term in of_word)) if all(matches) else ()


def _type_of(sign: str) -> str:
    """The head type of a sign; the word itself if it is no sign."""
    from mhacli.render.base.colours import KIND_SIGNS

    return next((kind for kind, (kind_sign, _) in KIND_SIGNS.items() if kind_sign == sign), sign)
