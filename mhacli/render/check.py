"""The report of `mha check`: the verdict, each mistake with its proof, its line and its fix, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.findings import Comparison, Examination, Finding, Probe
from mhacli.render.options import Screen
from mhacli.render.words import count_of, filled, fitted, flowing, number_text, seconds_text
from mhacli.text.escape import visible

_LABEL = 9
_IN_FULL, _MOST_FAILED, _MOST_OPEN, _MOST_PRINTED, _MOST_DEFAULTS = 3, 8, 9, 3, 12
_RAISES = ("raises ", "could not be asked")
_LEFT_OUT = "left out: "

Line = tuple[str, Text]
"""A label, such as `fix`, empty where the line goes on, and what is said under it."""


def check_view(examination: Examination, on: Screen) -> RenderableType:
    """The verdict, the mistakes, how it was built and asked, and what the probes and the comparison gave."""
    blocks: list[RenderableType] = [_verdict(examination, on)]
    for finding in examination.findings[:_IN_FULL]:
        blocks += [Text(""), _mistake(finding), _grid(_finding(finding))]
    others = examination.findings[_IN_FULL:]
    if others:
        named = [f"{visible(finding.code)}: {visible(finding.message)}" for finding in others]
        blocks += [Text(""), Text(f"{len(others)} more"), *(Text(f"  {name}") for name in named)]
    blocks += [Text(""), _grid([*_building(examination), *_probes(examination.probes, on), *_closing(examination)])]
    return Group(*blocks)


_SIGNS = {"right": ("✓ right", "bold green"), "wrong": ("✗ wrong", "bold red"), "unknown": ("? unknown", "bold yellow")}


def _verdict(examination: Examination, on: Screen) -> Text:
    """The verdict with the target, and in plain words."""
    sign, style = _SIGNS[examination.verdict]
    names = [Text(sign, style=style), Text(visible(examination.target), style="bold")]
    if examination.against is not None:
        names.append(Text(f"against {visible(examination.against)}", style="bold"))
    return Text("\n").join([flowing(names, on.width, "  "), Text(visible(_in_words(examination)))])


def _in_words(examination: Examination) -> str:
    if examination.verdict == "wrong":
        said = "; ".join(dict.fromkeys(finding.message for finding in examination.findings[:_IN_FULL]))
        n_more = len(examination.findings) - _IN_FULL
        return said + (f"; and {count_of(n_more, 'mistake')} more" if n_more > 0 else "")
    if examination.verdict == "unknown":
        return examination.reason or "whether it is right could not be decided"
    if examination.against is not None:
        return "with the same weights both answer the same"
    if examination.comparison is None:
        return "every probe is passed"
    return "the reference, given the same weights, answers the same"


# ----------------------------------------------------------------------------------------------------------------- mistakes


def _mistake(finding: Finding) -> Text:
    """The code, and whether it is proven."""
    title = Text(visible(finding.code), style="bold red")
    if finding.together_with:
        title.append(f" with {', '.join(map(visible, finding.together_with))}", style="red")
    return title.append("  proven" if finding.proven else "  not proven, seen by a probe", style="dim")


def _finding(finding: Finding) -> Iterator[Line]:
    """Where it stands, how it is mended, what it does, and why that is sure."""
    if finding.file is not None:
        place = finding.file if finding.line is None else f"{finding.file}:{finding.line}"
        if finding.source:
            yield "found", Text(visible(finding.source.strip()), style="red")
        yield ("" if finding.source else "found"), Text(visible(place), style="dim")
    if finding.fix:
        yield from _lines("fix", finding.fix, "green")
    if finding.effect:
        yield from _lines("effect", finding.effect)
    yield from _lines("proof" if finding.proven else "evidence", _evidence(finding))


def _evidence(finding: Finding) -> str:
    """What shows it; the numbers of the proof where it does not tell them itself."""
    if not finding.proven or finding.error is None or "exactly" in finding.evidence:
        return finding.evidence
    within = "" if finding.tolerance is None else f", tolerance {number_text(finding.tolerance)}"
    said = f"the reference with this mistake gives the same within {number_text(finding.error)}{within}"
    return f"{said}\n{finding.evidence}" if finding.evidence else said


def _lines(label: str, said: str, style: str = "") -> Iterator[Line]:
    """Each line of a text under one label."""
    for number, line in enumerate(said.splitlines()):
        yield ("" if number else label), Text(visible(line.rstrip()), style=style)


# ---------------------------------------------------------------------------------------------------------- what it rests on


def _building(examination: Examination) -> Iterator[Line]:
    """How it was built and called, and what its author chose."""
    given = [one for one in examination.arguments if one.origin == "given"]
    guessed = [one for one in examination.arguments if one.origin == "guessed"]
    defaults = [f"{one.name}={one.value}" for one in examination.arguments if one.origin == "default"]
    if examination.arguments:
        name = examination.target.rpartition(":")[2]
        said = ", ".join(f"{one.name}={one.value}" for one in (*given, *guessed))
        yield "built", Text(visible(f"{name}({said})"))
    for number, one in enumerate(guessed):
        line = Text(visible(f"{one.name}={one.value}" + (f": {one.why}" if one.why else "")), style="yellow")
        if one is guessed[-1]:
            line.append(f" (--arg {visible(one.name)}=… says otherwise)", style="dim")
        yield ("" if number else "guessed"), line
    if defaults:
        n_more = len(defaults) - _MOST_DEFAULTS
        listed = defaults[:_MOST_DEFAULTS] + ([f"{n_more} more"] if n_more > 0 else [])
        yield "defaults", Text(visible(", ".join(listed)), style="dim")
    if examination.called:
        yield "called", Text(visible(examination.called))
    for number, choice in enumerate(examination.choices):
        yield ("" if number else "choices"), Text(visible(choice.message))


def _probes(probes: Sequence[Probe], on: Screen) -> Iterator[Line]:
    """Those that fail and those that tell something in a line each, the others by name and number."""
    failed = [probe for probe in probes if probe.ok is False]
    passed = [probe for probe in probes if probe.ok]
    open_ones = [probe for probe in probes if probe.ok is None and _tells(probe)]
    left_out = [probe for probe in probes if probe.message.startswith(_LEFT_OUT)]
    unasked = [probe for probe in probes if probe.ok is None and not _tells(probe) and probe not in left_out]
    if not probes:
        return
    n_unasked = len(left_out) + len(unasked)
    counts = [f"{len(passed)} ok", f"{len(failed)} not ok"]
    counts += [f"{len(open_ones)} that judge nothing"] if open_ones else []
    counts += [f"{n_unasked} not asked"] if n_unasked else []
    yield "probes", Text(" · ".join(counts))
    for kind, style, most in ((failed, "red", _MOST_FAILED), (open_ones, "", _MOST_OPEN)):
        sign = "✗" if kind is failed else "·"
        for probe in kind[:most]:
            said = f"{sign} {visible(probe.name)}: {visible(probe.message)}"
            yield "", Text(said if kind is failed else fitted(said, max(20, on.width - _LABEL)), style=style)
        if len(kind) > most:
            yield (
                "",
                Text(f"{sign} {len(kind) - most} more: {', '.join(visible(p.name) for p in kind[most:])}", style=style),
            )
    room = max(20, on.width - _LABEL)
    if passed:
        yield "", Text("\n".join(filled([f"✓ {_named(probe)}" for probe in passed], room, "  ")), style="green")
    for those, why in ((left_out, f"left out as {_reason_of(left_out)}: "), (unasked, "not asked: ")):
        parts = [visible(probe.name) for probe in those]
        if parts:
            yield "", Text("\n".join(filled([why + parts[0], *parts[1:]], room)), style="dim")


def _reason_of(left_out: Sequence[Probe]) -> str:
    """Why probes are left out, as the first of them says it."""
    said = left_out[0].message.removeprefix(_LEFT_OUT).partition(",")[0] if left_out else ""
    return visible(said)


def _tells(probe: Probe) -> bool:
    """Whether a probe that decides nothing says something worth a line."""
    return probe.value is not None or probe.message.startswith(_RAISES)


def _named(probe: Probe) -> str:
    """Its name and number; 0 of what must be none is not said."""
    if not probe.value:
        return visible(probe.name)
    number = f"{probe.value:,.0f}" if probe.value == int(probe.value) else f"{probe.value:.1g}"
    return f"{visible(probe.name)} {number}"


def _closing(examination: Examination) -> Iterator[Line]:
    """The comparison, how near the catalogue came, what it printed, and the cost."""
    if examination.comparison is not None:
        yield "compared", Text(visible(_compared(examination.comparison, examination)))
    if examination.closest is not None:
        yield "closest", Text(visible(examination.closest))
    gone = examination.departure
    if gone is not None:
        since = "" if gone.last_shared is None else f"; {gone.last_shared} is the last that both make"
        yield "departs", Text(visible(f"it does not make the reference's {gone.site}{since}"))
        if gone.file is not None:
            place = gone.file if gone.line is None else f"{gone.file}:{gone.line}"
            yield "", Text(visible(f"{place}  {gone.source.strip()}".rstrip()), style="dim")
    for number, line in enumerate(_printed(examination.printed)):
        yield ("" if number else "printed"), Text(line, style="dim")
    versions = [f"{name} {version}" for name, version in examination.environment]
    count = [count_of(examination.n_parameters, "parameter", grouped=True)] if examination.n_parameters else []
    time = [f"took {seconds_text(examination.time_s)}"] if examination.time_s else []
    if count or time or versions:
        yield "", Text(visible(" · ".join([*count, *time, *versions])), style="dim")


def _compared(found: Comparison, examination: Examination) -> str:
    """How far it is from what it was compared with; a reference that makes the mistakes that are proven is said to."""
    n_hypotheses = examination.n_hypotheses
    mistaken = any(finding.proven for finding in examination.findings) and examination.against is None
    other = "the reference" if found.against == "reference" else found.against
    said = f"with {other}{' that makes the same mistake' if mistaken else ''}, in {found.dtype}, "
    said += f"{count_of(found.n_inputs, 'input')}: "
    if found.max_abs_difference is None:
        said += "no difference that is a number"
    else:
        said += f"largest difference {number_text(found.max_abs_difference)}"
    said += f", tolerance {number_text(found.tolerance)}"
    tried = f"{n_hypotheses:,} hypothes{'is' if n_hypotheses == 1 else 'es'} tried"
    return f"{said}; {tried}" if n_hypotheses else said


def _printed(printed: str) -> list[str]:
    """The last lines that it printed."""
    lines = [visible(line) for line in printed.splitlines() if line.strip()]
    left = len(lines) - _MOST_PRINTED
    return ([f"… {count_of(left, 'line')} before"] if left > 0 else []) + [
        fitted(line, 200) for line in lines[-_MOST_PRINTED:]
    ]


def _grid(lines: Iterator[Line] | Sequence[Line]) -> Table:
    """Labels on the left, what is said beside them, wrapped within its column."""
    table = Table(box=None, padding=0, pad_edge=False, show_header=False)
    table.add_column(width=_LABEL, no_wrap=True, style="dim")
    table.add_column(overflow="fold", ratio=1)
    for label, said in lines:
        table.add_row(Text(label), said)
    return table
