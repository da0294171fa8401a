"""The report of `mha check`: the verdict, each mistake with evidence, line and fix, and the checks behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.commands.check.result import Examination, Finding, FirstDifference, OutputComparison, ProbeResult, place
from mhacli.render.base.doc import pairs
from mhacli.render.base.format import count_of, filled, fitted, flowing
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import bare
from mhacli.text.escape import visible
from mhacli.text.numbers import shown

_LABEL, _LEAST_ROOM = 9, 11
_IN_FULL, _MOST_PRINTED = 3, 3
_RAISES = "could not run"
_LEFT_OUT = "left out: "

Line = tuple[str, Text]
"""A label, such as `fix`, and its text; the label is empty for further lines."""


def check_view(examination: Examination, on: Screen) -> RenderableType:
    """The verdict, the mistakes, the construction and call, the probes, and the comparison."""
    blocks: list[RenderableType] = [_verdict(examination, on)]
    for finding in examination.findings[:_IN_FULL]:
        blocks += [Text(""), _mistake(finding, examination), _grid(_finding(finding, on), on)]
    others = examination.findings[_IN_FULL:]
    if others:
        lines = [f"{visible(finding.code)}: {visible(finding.message)}" for finding in others]
        blocks += [Text(""), Text(f"{len(others)} more"), *(Text(f"  {name}") for name in lines)]
    rest = [
        *_building(examination, on),
        *_behaviours(examination),
        *_probes(examination, on),
        *_closing(examination, on),
    ]
    blocks += [
        Text(""),
        _grid(rest, on),
        Text(""),
        Text(visible(examination.summary), style=_SIGNS[examination.verdict][1]),
    ]
    return Group(*blocks)


_SIGNS = {
    "right": ("✓ right", "bold green"),
    "consistent": ("✓ consistent", "bold green"),
    "wrong": ("✗ wrong", "bold red"),
    "unknown": ("? unknown", "bold yellow"),
}


def _verdict(examination: Examination, on: Screen) -> Text:
    """The verdict and the target, a sentence, and the limits of the verdict."""
    sign, style = _SIGNS[examination.verdict]
    names = [Text(sign, style=style), Text(visible(examination.target), style="bold")]
    if examination.against is not None:
        names.append(Text(f"against {visible(examination.against)}", style="bold"))
    lines = [flowing(names, on.width, "  ")]
    if examination.verdict != "unknown":  # the last line explains an unknown verdict
        lines.append(Text(visible(_in_words(examination))))
    if examination.not_examined:
        lines.append(Text(f"not examined: {visible(', '.join(examination.not_examined))}", style="yellow"))
    lines += [Text(f"note: {visible(note)}", style="yellow") for note in examination.notes]
    return Text("\n").join(lines)


def _in_words(examination: Examination) -> str:
    if examination.verdict == "wrong":
        messages = "; ".join(dict.fromkeys(finding.message for finding in examination.findings[:_IN_FULL]))
        n_more = len(examination.findings) - _IN_FULL
        return messages + (f"; and {count_of(n_more, 'mistake')} more" if n_more > 0 else "")
    if examination.verdict == "consistent":
        return f"it behaves as a model should; {examination.attention_inside}"
    if examination.inside:
        return f"it behaves as a model should; {examination.attention_inside}"
    if examination.against is not None:
        return "both give the same output with the same weights"
    if examination.comparison is None:
        return "every probe passes"
    return "the reference gives the same output with the same weights"


# ----------------------------------------------------------------------------------------------------------------- mistakes


def _mistake(finding: Finding, examination: Examination) -> Text:
    """The code of a mistake, and whether it is proven."""
    is_probed = examination.against is None and examination.probes
    without = "not proven, seen by a probe" if is_probed else "measured"
    title = Text(visible(finding.code), style="bold red")
    if finding.together_with:
        title.append(f" with {', '.join(map(visible, finding.together_with))}", style="red")
    return title.append("  proven" if finding.proven else f"  {without}", style="dim")


def _finding(finding: Finding, on: Screen) -> Iterator[Line]:
    """The location, fix, effect and evidence of a finding."""
    if finding.file is not None:
        if finding.source:
            yield "found", Text(_code(finding.source, on), style="red")
        yield ("" if finding.source else "found"), Text(visible(place(finding.file, finding.line)), style="dim")
    if finding.fix:
        yield "fix", Text("\n".join(_code(line, on) for line in finding.fix.splitlines()), style="green")
    if finding.effect:
        yield from _lines("effect", finding.effect)
    yield from _lines("proof" if finding.proven else "evidence", _evidence(finding))


def _evidence(finding: Finding) -> str:
    """The evidence, with the numbers of the proof unless it includes them."""
    if not finding.proven or finding.error is None or "exactly" in finding.evidence:
        return finding.evidence
    within = "" if finding.tolerance is None else f", tolerance {shown(finding.tolerance, 'error')}"
    proof = f"the reference with this mistake gives the same within {shown(finding.error, 'error')}{within}"
    return f"{proof}\n{finding.evidence}" if finding.evidence else proof


def _lines(label: str, text: str, style: str = "") -> Iterator[Line]:
    """The lines of a text under one label."""
    for number, line in enumerate(text.splitlines()):
        yield ("" if number else label), Text(visible(line.rstrip()), style=style)


def _code(source: str, on: Screen) -> str:
    """Code wrapped at blanks, else after a comma or bracket, else anywhere."""
    lines, rest, room = [], visible(source.strip()), _room(on)
    while cell_len(rest) > room:
        head = chop_cells(rest, room)[0]
        blank, sign = head.rfind(" ") + 1, max(head.rfind(sign) for sign in ",([{=") + 1
        end = blank if blank > len(head) // 3 else sign or len(head)
        lines.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return "\n".join([*lines, rest])


def _room(on: Screen) -> int:
    """The width beside the labels."""
    return max(_LEAST_ROOM, on.width - _LABEL)


# ------------------------------------------------------------------------------------------------- construction and probes


def _building(examination: Examination, on: Screen) -> Iterator[Line]:
    """The construction, the call, and the design choices."""
    given = [argument for argument in examination.arguments if argument.origin == "given"]
    guessed = [argument for argument in examination.arguments if argument.origin == "guessed"]
    defaults = [
        f"{argument.name}={argument.value}" for argument in examination.arguments if argument.origin == "default"
    ]
    if examination.arguments:
        name = examination.target.rpartition(":")[2]
        arguments = ", ".join(f"{argument.name}={argument.value}" for argument in (*given, *guessed))
        yield "built", Text(visible(f"{name}({arguments})"))
    if guessed:
        parts = [
            visible(f"{argument.name}={argument.value}" + (f" ({argument.why})" if argument.why else ""))
            for argument in guessed
        ]
        options = " ".join(f"--arg {visible(argument.name)}=…" for argument in guessed)
        lines = filled([*parts, f"set {'it' if len(guessed) == 1 else 'them'} with {options}"], _room(on))
        yield "guessed", Text("\n".join(lines), style="yellow")
    if defaults:
        yield "defaults", Text(fitted(visible(", ".join(defaults)), _room(on)), style="dim")
    if examination.called:
        yield "called", Text(visible(examination.called))
    if examination.example:
        yield "", Text(visible(f"as --example '{examination.example}'"), style="dim")
    if examination.choices:
        yield "choices", Text("\n".join(filled([visible(choice.message) for choice in examination.choices], _room(on))))


def _behaviours(examination: Examination) -> Iterator[Line]:
    """Each behaviour with what was seen; those that were not asked with the reason."""
    signs = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}
    for number, behaviour in enumerate(examination.behaviour):
        sign, style = signs[behaviour.ok]
        at = "" if behaviour.tried is None else f" ({behaviour.tried.length} tokens)"
        text = visible(f"{sign} {behaviour.name}: {behaviour.reason}{at}")
        yield "" if number else "behaves", Text(text, style=style)


def _probes(examination: Examination, on: Screen) -> Iterator[Line]:
    """The counts of results, the messages of failed and informative probes, and the names of passed ones. If every mistake is
    proven, only failed probes are listed."""
    probes, is_proven = examination.probes, bool(examination.findings) and all(f.proven for f in examination.findings)
    failed = [probe for probe in probes if probe.ok is False]
    passed = [visible(probe.name) for probe in probes if probe.ok]
    undecided = [probe for probe in probes if probe.ok is None and _has_information(probe)]
    if not probes:
        return
    yield "probes", Text("\n".join(filled(_counts(probes, len(passed), len(failed), len(undecided)), _room(on))))
    for probe in failed:
        yield "", Text(f"✗ {visible(probe.name)}: {visible(probe.message)}", style="red")
    for probe in [] if is_proven else undecided:
        yield "", Text(f"· {visible(probe.name)}: {visible(probe.message)}")
    if passed and not is_proven:
        yield "", Text("\n".join(filled([f"✓ {passed[0]}", *passed[1:]], _room(on))), style="green")


def _counts(probes: Sequence[ProbeResult], n_passed: int, n_failed: int, n_open: int) -> list[str]:
    """The counts of results, with the reason for skipped probes."""
    left_out = [probe.message.removeprefix(_LEFT_OUT) for probe in probes if probe.message.startswith(_LEFT_OUT)]
    n_others = len(probes) - n_passed - n_failed - n_open - len(left_out)
    counts = [f"{n_passed} pass", f"{n_failed} fail"]
    counts += [f"{n_open} without a verdict"] if n_open else []
    counts += [f"{n_others} do{'es' if n_others == 1 else ''} not apply"] if n_others else []
    return counts + [f"{len(left_out)} left out: {visible(left_out[0].partition(',')[0])}" for _ in left_out[:1]]


def _has_information(probe: ProbeResult) -> bool:
    """Whether an undecided probe has information worth a line."""
    return probe.value is not None or probe.message.startswith(_RAISES)


def _closing(examination: Examination, on: Screen) -> Iterator[Line]:
    """The comparison, the closest hypothesis, the printed output, next steps, and the cost."""
    if examination.comparison is not None:
        yield "compared", Text(visible(_compared(examination.comparison, examination)))
    if examination.closest is not None:
        yield "closest", Text(visible(examination.closest))
    if examination.departure is not None:
        yield from _first_difference_lines(examination.departure, examination, on)
    for number, line in enumerate(_printed(examination.printed)):
        yield ("" if number else "printed"), Text(line, style="dim")
    if examination.next_steps:
        yield "next", Text("\n".join(map(visible, examination.next_steps)))
    yield from _cost(examination, on)


def _first_difference_lines(difference: FirstDifference, examination: Examination, on: Screen) -> Iterator[Line]:
    """The first site that differs, with its line in each implementation."""
    before = "" if difference.last_shared is None else f"; {difference.last_shared} is still the same"
    other = "the reference" if examination.against is None else "the other"
    yield "differs", Text(visible(f"first at {difference.site}, compared with {other}{before}"))
    lines = [(examination.target, difference.file, difference.line, difference.source)]
    if examination.against is not None:
        lines.append((examination.against, difference.other_file, difference.other_line, difference.other_source))
    for target, file, line, source in lines:
        if file is not None:
            yield "", Text(_code(f"{place(file, line)}  {source.strip()}", on), style="dim")
        elif examination.against is not None:
            yield "", Text(visible(f"{target}  in library code"), style="dim")


def _cost(examination: Examination, on: Screen) -> Iterator[Line]:
    """The number of parameters, the time, and the versions, as far as they fit on a line."""
    versions = [f"{name} {version}" for name, version in examination.environment.items() if name != "python"]
    count = [count_of(examination.n_parameters, "parameter")] if examination.n_parameters else []
    time = [shown(examination.time_s, "seconds")] if examination.time_s else []
    if count or time or versions:
        yield "", Text(fitted(visible(" · ".join([*count, *time, *versions])), _room(on)), style="dim")


def _compared(comparison: OutputComparison, examination: Examination) -> str:
    """The comparison with the reference, with proven mistakes in it, or with another implementation."""
    n_hypotheses = examination.n_hypotheses
    n_mistakes = 0 if examination.against is not None else sum(finding.proven for finding in examination.findings)
    mistaken = f" with the same mistake{'s' * (n_mistakes > 1)}" if n_mistakes else ""
    other = "the reference" if comparison.against == "reference" else comparison.against
    text = f"with {other}{mistaken}, in {comparison.dtype}, "
    text += f"{count_of(comparison.n_inputs, 'input')}: "
    if comparison.max_abs_difference is None:
        text += "the difference is not finite"
    else:
        text += f"largest difference {shown(comparison.max_abs_difference, 'error')}"
    text += f", tolerance {shown(comparison.tolerance, 'error')}"
    tried = f"{n_hypotheses:,} hypothes{'is' if n_hypotheses == 1 else 'es'} tried"
    return f"{text}; {tried}" if n_hypotheses else text


def _printed(printed: str) -> list[str]:
    """The last lines printed by user code."""
    lines = [visible(line) for line in printed.splitlines() if line.strip()]
    n_omitted = len(lines) - _MOST_PRINTED
    return ([f"… {count_of(n_omitted, 'line')} before"] if n_omitted > 0 else []) + [
        fitted(line, 200) for line in lines[-_MOST_PRINTED:]
    ]


def _grid(lines: Iterable[Line], on: Screen) -> RenderableType:
    """A table with labels on the left and wrapped text beside them."""
    return bare(pairs([(f"{label:<{_LABEL}}", text) for label, text in lines], style="dim", gap=0), on.width)
