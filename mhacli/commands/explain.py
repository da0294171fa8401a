"""`mha explain`: the meaning of a term on the screens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.help import examples
from mhacli.cli.output import COLOUR, Output, json_document, print_report
from mhacli.cli.parameters import command, offers
from mhacli.errors import UsageError
from mhacli.record.glossary import TABLES, Group, Word, words_of
from mhacli.record.heads import UNTYPED
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.settings import SINK_TOKENS, setting
from mhacli.sites import SITES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.render.base.options import Screen

SCHEMA = "mha.explain/1"
_MOST_EXPLAINED = 26
"""The size up to which a group is explained in full; a larger group is listed."""
_MOST_SUGGESTED, _ALIKE = 3, 0.75
"""The most suggestions for a misspelt term, and the least fraction of letters in common."""

_COUNTED: tuple[Group, ...] = ("site", "probe", "mistake")
"""Groups that the list of all terms only counts, because they would fill the screen."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term with its explanation. `also` are synonyms, JSON names and headings included.

    A mistake has its expression (`wrong`) and the correct one (`right`).
    """

    name: str
    group: Group
    explanation: str
    formula: str = ""
    source: str = ""
    wrong: str = ""
    right: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """The term to explain."""

    term: tuple[str, ...] = setting(
        (),
        "",
        "A column, sign, head type, site, mistake or concept, or a group such as sites. (default: list all terms)",
        argument=True,
        metavar="[TERM]",
        many=True,
    )


@command()
@examples("mha explain", "mha explain induction", "mha explain effective keys", "mha explain mistakes")
def explain(options: ExplainOptions, output: Annotated[Output, offers("json", *COLOUR)]) -> None:
    """Prints the explanation of a term, the list of the terms of a group, or of all terms."""
    words = options.term
    word = " ".join(words)
    matching = (_named(word) or _each_named(words)) if word else terms()
    if not matching:
        raise UsageError(f"no term is called {word[:40]!r}", hint=_hint(words))
    is_list = not word or len(matching) > _MOST_EXPLAINED
    document = {"schema": SCHEMA, "terms": [asdict(term) for term in matching]}
    print_report(
        output,
        json=lambda: json_document(document),
        view=lambda on: _list_view(matching, on) if is_list else _terms_view(matching),
    )


def _hint(words: Sequence[str]) -> str:
    if len(words) > 1 and all(map(os.path.lexists, words)):
        return "the shell puts file names in place of *: mha explain star"
    nearest = _similar(" ".join(words))
    if not nearest:
        return "mha explain lists every term"
    return f"try mha explain {nearest[0]}" + (f", or {', '.join(nearest[1:])}" if nearest[1:] else "")


# -------------------------------------------------------------------------------------------------------------- terms


@cache
def terms() -> tuple[Term, ...]:
    """Every term, group by group."""
    return tuple(_terms())


def _terms() -> Iterator[Term]:
    yield from (_term("concept", word, name) for name, word in words_of("glossary", "concept").items())
    yield from (_term("sign", word, name) for name, word in words_of("glossary", "sign").items())
    for field, column in words_of("columns", "statistic").items():
        yield _term("column", column, column.heading.format(sink_tokens=SINK_TOKENS), column.name, field)
    for kind, head_type in words_of("columns", "head_type").items():
        rule = "" if kind in UNTYPED else f" {words_of('columns', 'rule')['head_type'].explanation}"
        yield _term("head type", head_type, head_type.name, kind, head_type.short, more=rule)
    for group, tables in TABLES.items():
        columns = (column for table in tables for column in words_of("columns", table).values())
        yield from (_term(group, column, column.heading) for column in columns)
    for site in SITES.values():
        explanation, formula = site.in_general()
        yield Term(name=site.name, group="site", explanation=explanation, formula=formula)
    yield from (_term("probe", word, name) for name, word in words_of("glossary", "probe").items())
    for code, of in words_of("mistakes", "mistake").items():
        if ", " not in code:  # further forms of a mistake
            explanation = f"{_sentence(of.explanation)} {_sentence(of.effect)}"
            yield Term(name=code, group="mistake", explanation=explanation, wrong=of.wrong, right=of.right)


def _term(group: Group, word: Word, *names: str, more: str = "") -> Term:
    name, *also = dict.fromkeys(name for name in (*names, *word.also) if name)
    explanation, formula, source = word.explanation + more, word.formula, word.source
    return Term(name=name, group=group, explanation=explanation, formula=formula, source=source, also=tuple(also))


def _sentence(clause: str) -> str:
    return f"{clause[:1].upper()}{clause[1:]}."


# ------------------------------------------------------------------------------------------------------------- search


def _named(word: str) -> tuple[Term, ...]:
    """The terms that a word, a group or the sign of a head type names, ignoring case, spaces, hyphens and underscores."""
    types = {sign: kind for kind, (sign, _) in KIND_SIGNS.items()}
    of_command = tuple(term for term in terms() if term.group == word and word in TABLES)
    return (
        of_command
        or tuple(term for term in terms() if word.strip() in (term.name, *term.also))
        or tuple(term for term in terms() if _plain(word) in map(_plain, (term.name, *term.also)))
        or tuple(term for term in terms() if _plain(word) in (term.group, f"{term.group}s"))
        or (_named(types[word]) if word in types else ())
    )


def _each_named(words: Sequence[str]) -> tuple[Term, ...]:
    """The terms of several words, such as the headings of a table; none if one of them is unknown."""
    matches = [_named(word) for word in words]
    return tuple(dict.fromkeys(term for of_word in matches for term in of_word)) if all(matches) else ()


def _similar(word: str) -> tuple[str, ...]:
    """The terms with the most similar spelling, then terms of several words that contain the word."""
    names = {_plain(name): name for term in terms() for name in (*term.also, term.name)}
    near = get_close_matches(_plain(word), names, _MOST_SUGGESTED, _ALIKE)
    words = {part: None for term in terms() for part in _plain(term.name).split()}
    nearest = get_close_matches(_plain(word), words, 1, _ALIKE)
    longer = [term.name for term in terms() if not {*nearest}.isdisjoint(_plain(term.name).split())]
    return tuple(dict.fromkeys([*(names[name] for name in near), *longer]))[:_MOST_SUGGESTED]


def _plain(word: str) -> str:
    return " ".join(word.casefold().replace("−", "-").replace("-", " ").replace("_", " ").split()) or word


# --------------------------------------------------------------------------------------------------------------- view


def _terms_view(matching: Sequence[Term]) -> RenderableType:
    """Each term with its explanation, formula and source."""
    from rich.console import Group as Lines
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    for term in matching:
        title = Text(term.name, style="bold").append(f" · {term.group}", style="not bold dim")
        if term.also:
            title.append(f" · also: {', '.join(term.also)}", style="not bold dim")
        lines = {"Formula": term.formula, "Wrong": term.wrong, "Right": term.right, "Source": term.source}
        labelled = (Text().append(f"{name}: ", style="dim").append(line) for name, line in lines.items() if line)
        texts = [Text(term.explanation), *labelled]
        parts += [Text(""), title, *(Padding(text, (0, 0, 0, 2)) for text in texts)]
    return Lines(*parts[1:])


def _list_view(matching: Sequence[Term], screen: Screen) -> RenderableType:
    """The names of terms by group. Among several groups, the long ones are only counted."""
    from rich.console import Group as Lines
    from rich.text import Text

    from mhacli.render.base.format import filled

    names = {group: [term.name for term in matching if term.group == group] for group in words_of("glossary", "group")}
    counted = [group for group in _COUNTED if names[group] and len({term.group for term in matching}) > 1]
    parts: list[RenderableType] = []
    for group, of_group in names.items():
        if of_group and group not in counted:
            group_title = words_of("glossary", "group")[group].explanation
            title, *rest = filled([f"{group_title}: {of_group[0]}", *of_group[1:]], screen.width)
            words = Text(title)
            words.stylize("bold", 0, len(group_title))
            parts.append(Text("\n").join([words, *map(Text, rest)]))
    lists = [f"mha explain {group}s ({len(names[group])} names)" for group in counted]
    parts += map(Text, filled([f"more: {lists[0]}", *lists[1:]], screen.width) if lists else ())
    return Lines(*parts, Text("mha explain TERM says what one of them means", style="dim"))
