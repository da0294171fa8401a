"""The report of `mha check`: the verdict, each mistake with evidence, line and fix, and the checks
behind it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.numbers import shown
from mhacli.record.record import words_of_random
from mhacli.record.shown import draws
from mhacli.render.base.doc import pairs
from mhacli.render.base.format import count_of, fitted
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import bare
from mhacli.text.escape import visible
from mhacli.usercode.faults import shown_path

from .result import (
    Accepted,
    Examination,
    Examinations,
    Finding,
    FirstDifference,
    OutputComparison,
    line_in_words,
)

_LABEL = 9
"""The width of the labels."""
_MOST_PRINTED = 3
_MOST_CELLS = 32
_MOST_MASKS = 4
"""The most printed lines, cells of a side, and masks that are shown."""
_ANSWERS = {
    "right": ("✓ right", "bold green"),
    "consistent": ("✓ consistent", "bold green"),
    "wrong": ("✗ wrong", "bold red"),
    "unknown": ("? unknown", "bold yellow"),
    "wrong, accepted": ("✗ wrong, accepted", "bold yellow"),
}
_SIGNS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}

Line = tuple[str, Text]
"""A label, such as `fix`, and its text; the label is empty for further lines."""


@draws(Examination)
def check_view(examination: Examination, on: Screen) -> RenderableType:
    """The mistakes, the construction and call, what was measured, and last the verdict in a
    sentence behind its limits.
    """
    blocks: list[RenderableType] = []
    if words := words_of_random(examination.random_weights, is_tiny=examination.tiny):
        blocks += [_text(words, "bold yellow"), Text("")]
    for finding in examination.findings:
        title = Text(finding.code, style="bold red")
        if finding.together_with:
            title.append(f" with {', '.join(finding.together_with)}", style="red")
        found = "  proven" if finding.proven else "  measured"
        if finding.modes:
            found += f" in {' and '.join(finding.modes)} attention"
        title.append(found, style="dim not bold default")
        reasons = [each for each in examination.accepted if each.code == finding.code]
        lines = [*_finding(finding), *_accepted(reasons)]
        blocks += [title, _grid(lines, on), Text("")]
        if on.verbose and finding.reproduce:  # lines that can be copied
            blocks.append(Text(finding.reproduce, no_wrap=True, overflow="ignore"))
    answers = _answers(examination, is_verbose=on.verbose)
    rest = [*_building(examination), *answers, *_measured(examination)]
    limits = [_text(limit, "yellow") for limit in examination.limits]
    against = "" if examination.against is None else f" against {examination.against}"
    words, style = _ANSWERS[examination.answer]
    target = f"{visible(examination.target + against)}:"
    verdict = Text.assemble((target, "bold"), " ", _text(examination.sentence))
    end = bare(pairs([(words, verdict)], style=style), on.width)
    return Group(*blocks, _grid(rest, on), Text(""), *limits, end)


@draws(Examinations)
def checks_view(examinations: Examinations, on: Screen) -> RenderableType:
    """The path of the table, the report on each target, and how many have which verdict."""
    reports = [part for each in examinations.reports for part in (each.view(on), Text(""))]
    path = Text(visible(shown_path(examinations.path)), "dim", no_wrap=True, overflow="ignore")
    return Group(path, Text(""), *reports, _text(examinations.summary, "bold"))


def _text(text: str, style: str = "") -> Text:
    return Text("\n".join(visible(line.rstrip()) for line in text.splitlines()), style=style)


def _grid(lines: Iterable[Line], on: Screen) -> RenderableType:
    """A table with labels on the left and wrapped text beside them."""
    return bare(
        pairs([(f"{label:<{_LABEL}}", text) for label, text in lines], style="dim", gap=0), on.width
    )


def _finding(finding: Finding) -> Iterator[Line]:
    """The location, fix, effect and evidence of a finding."""
    if finding.source:
        yield "found", _text(finding.source.strip(), "red")
    if finding.file is not None:
        yield (
            "" if finding.source else "found",
            _text(line_in_words(finding.file, finding.line), "dim"),
        )
    if finding.fix:
        yield "fix", _text(finding.fix, "green")
    if finding.effect:
        yield "effect", _text(finding.effect)
    yield "proof" if finding.proven else "evidence", _text(finding.evidence)


def _accepted(accepted: Sequence[Accepted]) -> Iterator[Line]:
    """Where a mistake is accepted, and why."""
    for reason in dict.fromkeys(each.reason for each in accepted):
        parts = [each.part for each in accepted if each.reason == reason and each.part]
        where = f"in {', '.join(parts)}: " if parts else ""
        yield "accepted", _text(where + reason, "yellow")


def _building(examination: Examination) -> Iterator[Line]:
    """The construction, the call, and the design choices."""
    if examination.arguments:
        name = examination.target.rpartition(":")[2]
        words = [f"{of.name}={of.value}" for of in examination.arguments]
        yield "built", _text(f"{name}({', '.join(words)})")
    guessed = [of for of in examination.arguments if of.origin == "guessed"]
    if guessed:
        lines = [f"{of.name}={of.value}" + (f" ({of.why})" if of.why else "") for of in guessed]
        yield "guessed", _text("\n".join(lines), "yellow")
    if examination.called:
        yield "called", _text(examination.called)
    if examination.example:
        call = f"as --example '{examination.example}'"
        masks = re.findall(r"(\w+)=…", examination.called)
        if further := [name for name in masks if name not in examination.example]:
            call += f"; further calls also pass {', '.join(further)}"
        yield "", _text(call, "dim")
    if examination.choices:
        yield "choices", _text("\n".join(choice.message for choice in examination.choices))


def _answers(examination: Examination, *, is_verbose: bool) -> Iterator[Line]:
    """Each behaviour with what was seen, and the probes. Those that were not tried share a line,
    without their reasons unless it `is_verbose`.
    """
    answers = [
        ("behaves", one.sign, one.name, one.reason, one.tried)
        for one in examination.behaviour
        if is_verbose or not one.was_omitted
    ]
    omitted = [one.name for one in examination.behaviour if one.was_omitted]
    if omitted and not is_verbose:
        answers.append(("behaves", None, "not tried", ", ".join(omitted), None))
    answers += [("probes", one.ok, one.name, one.message, None) for one in examination.probes]
    before = ""
    length = None
    for label, ok, name, text, tried in answers:
        sign, style = _SIGNS[ok]
        lengths = "" if tried is None or tried.length == length else f" ({tried.length} tokens)"
        yield "" if label == before else label, _text(f"{sign} {name}: {text}{lengths}", style)
        before = label
        length = length if tried is None else tried.length


def _measured(examination: Examination) -> Iterator[Line]:
    """The comparison, the first difference, the printed output, next steps, and facts."""
    other = examination.against or "the reference"
    if examination.comparison is not None:
        yield "compared", _text(_comparison(examination, examination.comparison, other))
    if examination.mask:
        yield from _cells(examination)
    if examination.departure is not None:
        yield from _difference(examination, examination.departure, other)
    printed = [line for line in examination.printed.splitlines() if line.strip()]
    if printed:
        last = [fitted(visible(line), 200) for line in printed[-_MOST_PRINTED:]]
        yield "printed", Text("\n".join(last), style="dim")
    if examination.next_steps:
        yield "next", _text("\n".join(examination.next_steps))
    facts = _facts(examination)
    if facts:
        yield "", _text(" · ".join(facts), "dim")


def _cells(examination: Examination) -> Iterator[Line]:
    """The cells of a mask of which nothing is stated as 0 and 1, of each head."""
    drawn = [seen for seen in examination.sees if not seen.stated]
    for seen in drawn[:_MOST_MASKS]:
        n = len(seen.measured)
        rows = [row[:_MOST_CELLS] for row in seen.measured[:_MOST_CELLS]]
        cut = [] if n <= _MOST_CELLS else [f"the first {_MOST_CELLS} of {n}; --html draws all"]
        yield "sees", _text("\n".join([*([seen.words] if seen.words else []), *rows, *cut]))


def _comparison(examination: Examination, comparison: OutputComparison, other: str) -> str:
    """The largest difference from the other, in words."""
    inputs = count_of(comparison.n_inputs, "input")
    error = comparison.max_abs_difference
    if any(finding.proven for finding in examination.findings):
        other += " with these mistakes"
    largest = "not finite" if error is None else shown(error, "error")
    text = (
        f"with {other}, in {comparison.dtype}, {inputs}: largest difference {largest},"
        f" tolerance {shown(comparison.tolerance, 'error')}"
    )
    n = examination.n_hypotheses
    return f"{text}; hypotheses: {n:,}" if n else text


def _difference(
    examination: Examination, difference: FirstDifference, other: str
) -> Iterator[Line]:
    """The first difference, with its line in each implementation."""
    text = f"first at {difference.site}, compared with {other}"
    if difference.last_shared is not None:
        text += f"; {difference.last_shared} is still the same"
    yield "differs", _text(text)
    lines = [(examination.target, difference.file, difference.line, difference.source)]
    if examination.against is not None:
        theirs = (difference.other_file, difference.other_line, difference.other_source)
        lines.append((other, *theirs))
    for target, file, line, source in lines:
        at = target if target.partition(":")[0].endswith(".py") else f"{target}  in library code"
        if file is not None:
            at = f"{line_in_words(file, line)}  {source.strip()}"
        yield "", _text(at, "dim")


def _facts(examination: Examination) -> list[str]:
    """The number of parameters, the time and versions."""
    facts = []
    if examination.n_parameters:
        facts.append(count_of(examination.n_parameters, "parameter"))
    if examination.time_s:
        facts.append(shown(examination.time_s, "seconds"))
    versions = examination.environment.items()
    return [*facts, *(f"{name} {version}" for name, version in versions if name != "python")]
