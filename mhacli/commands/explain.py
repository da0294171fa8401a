"""`mha explain`: the meaning of a term on the screens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec.structs import replace

from mhacli.cli.output import Output, print_report
from mhacli.cli.parameters import choices_of, command, help_of, offers, typed_names
from mhacli.errors import UsageError
from mhacli.numbers import shown
from mhacli.record.glossary import TABLES, Word, did_you_mean, plain, words_of
from mhacli.record.heads import UNTYPED
from mhacli.record.sites import SITES
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.settings import SINK_TOKENS, setting

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "mha.explain/1"
_TERM = (
    "A column, sign, head type, site, mistake or concept, or a group such as sites. (default: list"
    " all terms)"
)
_FIELDS = ("name", "group", "explanation", "formula", "source", "example", "wrong", "right", "also")
_MOST_EXPLAINED = 26
"""The size up to which a group is explained in full; a larger group is listed."""
_COUNTED = ("site", "mistake")
"""Groups that the list of all terms only counts, because they would fill the screen."""


@command(
    "mha explain", "mha explain induction", "mha explain effective keys", "mha explain mistakes"
)
def explain(
    *,
    term: tuple[str, ...] = setting((), "", _TERM, argument=True, metavar="[TERM]"),
    output: Annotated[Output, offers("json")],
) -> None:
    """Prints the explanation of a term, the list of the terms of a group, or of all terms."""
    matching = _named(" ".join(term)) if term else terms()
    if not matching:  # several terms, such as the headings of a table
        each = [_named(word) for word in term]
        matching = tuple(dict.fromkeys(chain.from_iterable(each))) if all(each) else ()
    if not matching:
        names = [name for each in (*terms(), *options()) for name in (*each.also, each.name)]
        hint = did_you_mean(" ".join(term), names) or "mha explain lists every term"
        raise UsageError(f"no term is called {' '.join(term)[:40]!r}", hint=hint)
    is_list = not term or len(matching) > _MOST_EXPLAINED
    if not is_list:
        matching = tuple(map(_with_example, matching))
    listed = [{name: getattr(each, name) for name in _FIELDS} for each in matching]
    print_report(
        output,
        json=lambda: {"schema": SCHEMA, "terms": listed},
        view=lambda on: (_list_view if is_list else _terms_view)(matching, on.width),
    )


@cache
def terms() -> tuple[Word, ...]:
    """Every term, group by group, with its name on the screens, and with synonyms, JSON names and
    headings in `also`.
    """
    tables: list[tuple[str, Literal["columns", "glossary", "mistakes"], str]] = [
        ("concept", "glossary", "concept"),
        ("sign", "glossary", "sign"),
        ("column", "columns", "statistic"),
        ("head type", "columns", "head_type"),
        ("probe", "glossary", "probe"),
        ("mistake", "mistakes", "mistake"),
        ("behaviour", "glossary", "behaviour"),
        *((command, "columns", command) for command in TABLES),
    ]
    listed = []
    for group, file, table in tables:
        for key, word in words_of(file, table).items():
            heading, explanation = word.heading.format(sink_tokens=SINK_TOKENS), word.explanation
            if group == "head type" and key not in UNTYPED:
                explanation += f" {words_of('columns', 'rule')['head_type'].explanation}"
            elif group in ("mistake", "behaviour"):
                advice = word.advice if group == "behaviour" else ""  # a mistake shows code
                explanation = " ".join(
                    f"{clause[:1].upper()}{clause[1:].removesuffix('.')}."
                    for clause in (explanation, word.effect, advice)
                    if clause
                )
            names = (heading or key,) if group in TABLES else (heading, word.name, key, word.short)
            name, *also = dict.fromkeys(each for each in (*names, *word.also) if each)
            if (
                group != "mistake" or ", " not in key
            ):  # the further forms of a mistake have no terms
                more = {"group": group, "explanation": explanation}
                listed.append(replace(word, name=name, also=tuple(also), **more))
    for site in SITES.values():
        explanation, formula = site.in_general()
        listed.append(Word(name=site.name, group="site", explanation=explanation, formula=formula))
    order = list(words_of("glossary", "group"))
    return tuple(sorted(listed, key=lambda term: order.index(term.group)))


def _with_example(term: Word) -> Word:
    """The term with the numbers of a run, if it has some."""
    if term.name != "scaling":
        return term
    return replace(term, example=scores_with_and_without_scale())


def _named(word: str) -> tuple[Word, ...]:
    """The terms that a word, a group or the sign of a head type names, ignoring case, spaces,
    hyphens, underscores and the s of a plural; or else the options, which stand first if the word
    is typed as one.
    """
    spelt, types = plain(word), {sign: kind for kind, (sign, _) in KIND_SIGNS.items()}
    of_name = tuple(term for term in terms() if spelt in map(plain, (term.name, *term.also)))
    if word.startswith("-"):
        return *(o for o in options() if word in (o.name, *o.also)), *of_name
    of_group = tuple(term for term in terms() if spelt in (term.group, f"{term.group}s"))
    if spelt in TABLES:
        return of_group
    if of_name or of_group:
        return of_name or of_group
    if word in types:
        return _named(types[word])
    of_option = tuple(o for o in options() if spelt in map(plain, (o.name, *o.also)))
    for prefix in ("uniform ", "control "):  # of the same columns
        if not of_option and spelt.startswith(prefix):
            return _named(spelt.removeprefix(prefix))
    is_plural = not of_option and len(spelt) > 3 and spelt.endswith("s")
    return _named(spelt[:-1]) if is_plural else of_option


@cache
def options() -> tuple[Word, ...]:
    """Every option, with the commands that have it, and with its other names and its choices in
    `also`.
    """
    from mhacli.commands import decode, heads, run, samples, show, view, vocab, weights
    from mhacli.commands.bench.command import bench
    from mhacli.commands.check.command import check
    from mhacli.commands.diff.command import diff
    from mhacli.commands.doctor.command import doctor
    from mhacli.commands.effect.command import effect
    from mhacli.commands.scan.command import scan
    from mhacli.commands.trace.command import trace

    found: dict[Word, list[str]] = {}
    commands = {
        "run": run.run,
        "heads": heads.heads,
        "effect": effect,
        "scan": scan,
        "trace": trace,
        "decode": decode.decode,
        "bench": bench,
        "doctor": doctor,
        "check": check,
        "samples": samples.samples,
        "vocab": vocab.vocab,
        "weights": weights.weights,
        "view": view.view,
        "show": show.show,
        "explain": explain,
        "diff": diff,
    }
    for command_name, each in commands.items():
        for declared in (one for one in each.settings if not one.option.argument):
            first, *others = typed_names(declared)
            also = (*others, *map(str, choices_of(declared.hint)))
            option = Word(name=first, group="option", explanation=help_of(declared), also=also)
            found.setdefault(option, []).append(f"mha {command_name}")
    return tuple(
        replace(option, explanation=f"{option.explanation} Of {', '.join(names)}.")
        for option, names in found.items()
    )


def scores_with_and_without_scale() -> str:
    """The variance of scores of random queries and keys, and the mean of the largest weight of a
    query, with and without the scale.
    """
    import numpy as np

    n, generator, sizes = 256, np.random.default_rng(0), []
    for d_head in (8, 64):
        q, k = generator.standard_normal((2, n, d_head))
        numbers = []
        for scores in (q @ k.T, q @ k.T / d_head**0.5):
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            largest = (weights.max(axis=1) / weights.sum(axis=1)).mean()
            numbers.append(f"{scores.var():.2f} (largest weight {shown(largest, 'weight')})")
        unscaled, scaled = numbers
        sizes.append(f"with d_head {d_head}: {unscaled} unscaled, {scaled} scaled")
    return f"variance of the scores of {n} random queries and keys: {'; '.join(sizes)}"


def _terms_view(matching: Sequence[Word], width: int) -> RenderableType:
    """Each term with its explanation, formula and source."""
    from rich.console import Group as Lines

    from mhacli.render.base.doc import pairs
    from mhacli.render.base.terminal import spaced, table

    parts = []
    for term in matching:
        also = f" · also: {', '.join(term.also)}" if term.also else ""
        fields = [
            (name, getattr(term, name))
            for name in ("explanation", "formula", "example", "wrong", "right", "source")
        ]
        rows = [(name, words) for name, words in fields if words]
        parts.append(
            Lines(
                *table(pairs(rows, style="dim", title=f"{term.name} · {term.group}{also}"), width)
            )
        )
    return spaced(parts)


def _list_view(matching: Sequence[Word], width: int) -> RenderableType:
    """The names of terms by group. Among several groups, the long ones are only counted."""
    from rich.console import Group as Lines
    from rich.text import Text

    from mhacli.render.base.format import flowing

    parts = []
    for group, word in words_of("glossary", "group").items():
        names = [term.name for term in matching if term.group == group]
        if group in _COUNTED and 0 < len(names) < len(matching):
            names = [f"mha explain {group}s ({len(names)} names)"]
        if names:
            parts.append(flowing([f"{word.explanation}: {names[0]}", *names[1:]], width))
            parts[-1].stylize("bold", 0, len(word.explanation))
    return Lines(*parts, Text("mha explain TERM says what one of them means", style="dim"))
