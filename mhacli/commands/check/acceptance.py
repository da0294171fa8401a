"""Mistakes that are accepted, and what is accepted although the code does not have it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from .result import (
    CODES,
    HELD,
    Accepted,
    Behaviour,
    Examination,
    Finding,
    finding_of,
    words_of_code,
)


def with_accepted(report: Examination, stated: Sequence[Accepted]) -> Examination:
    """The report with what is accepted of its mistakes, those that are not first; with a mistake
    for what is accepted and not there, and a note for what was not tried. Undecided where there was
    no time for a behaviour beside what is accepted.
    """
    if not stated:
        return report
    accepted = list[Accepted]()
    findings = list[Finding]()
    used = set[Accepted]()
    for finding in report.findings:
        places = {place: _covering(stated, finding.code, place) for place in _places(finding)}
        used.update(chain.from_iterable(places.values()))
        accepted += [
            Accepted(finding.code, place or None, covering[0].reason)
            for place, covering in places.items()
            if covering
        ]
        findings.append(replace(finding, accepted=all(places.values())))
    held = list[Finding]()
    notes = [*report.notes]
    for each in stated:
        if each in used:
            continue
        option = each.code if each.part is None else f"{each.code}@{each.part}"
        if untried := _why_untried(report, each):
            notes.append(f"{option} is accepted, and was not tried: {untried}")
        else:
            words = f"{option} is accepted, but is not in the code"
            shows = (
                f"{b.name}: {b.reason}" for b in report.behaviour if CODES[b.name] == each.code
            )
            evidence = "; ".join(shows) or report.sentence
            advice = words_of_code(HELD).advice
            held.append(finding_of(HELD, evidence, message=words, fix=advice))
    findings.sort(key=lambda finding: finding.accepted)
    report = replace(report, findings=(*held, *findings), accepted=tuple(accepted))
    if held:
        report = replace(report, verdict="wrong", reason=None)
    elif report.is_accepted and (late := _without_time(report)):
        names = ", ".join(each.name for each in late)
        report = replace(report, verdict="unknown", reason=f"{names}: {late[0].reason}")
    elif report.is_accepted and (beside := ", ".join(untried_beside(report))):
        because = "not tried because of what is accepted"
        notes.append(f"{because}: {beside}; other mistakes there are not found")
    return replace(report, notes=tuple(notes))


def _places(finding: Finding) -> Sequence[str]:
    """The parts in which a mistake was found, or the modes; "" is the whole code."""
    return finding.parts or finding.modes or ("",)


def _covering(stated: Sequence[Accepted], code: str, place: str) -> list[Accepted]:
    """What is stated of this mistake at this place: of a part it is also of what is inside."""
    return [
        each
        for each in stated
        if each.code == code and (each.part is None or f"{place}.".startswith(f"{each.part}."))
    ]


def _why_untried(report: Examination, accepted: Accepted) -> str:
    """Why it is not known whether an accepted mistake that was not found is there; empty where it
    was tried and is not.
    """
    names = [name for name, code in CODES.items() if code == accepted.code]
    if accepted.code == "misses-stated":
        names = ["sees"]
    if not names or report.mask:
        is_compared = _is_compared(report, accepted)
        return "" if is_compared else report.reason or "the comparison does not show it"
    answers = [each for each in report.behaviour if each.name in names]
    found = [each for each in report.findings if each.code == accepted.code]
    # one failure may imply others, and that of the whole code is in an unknown part
    is_elsewhere = len(answers) == 1 and all("" not in _places(each) for each in found)
    is_tried = any(each.ok is not None for each in answers)
    if is_tried and {*names}.isdisjoint(report.not_examined) and (not found or is_elsewhere):
        return ""
    reasons = dict.fromkeys(each.why_untried or each.reason for each in answers)
    return "; ".join(reasons) or "it was not asked"


def _is_compared(report: Examination, accepted: Accepted) -> bool:
    """Whether a comparison that would show an accepted mistake found none."""
    code = accepted.code
    part = accepted.part
    compared = report.compared
    if compared is not None and code.startswith("gradient-") and not compared.backward.compared:
        return False
    if compared is not None and code == "differs-in-16-bits" and "16" not in str(compared.dtypes):
        return False
    inside = report.inside
    if part is not None and inside:
        prefix = f"{part}."
        inside = tuple(
            each for each in inside if any(f"{name}.".startswith(prefix) for name in each.names)
        )
        return bool(inside) and all(each.verdict == "right" for each in inside)
    return report.verdict == "right" and (code == "differs") == (report.against is not None)


def _without_time(report: Examination) -> list[Behaviour]:
    """The behaviours that decide and for which there was no time."""
    omitted = [each for each in report.behaviour if each.was_omitted and CODES[each.name]]
    return [each for each in omitted if each.name in report.not_examined]


def untried_beside(report: Examination) -> Iterator[str]:
    """What an accepted mistake kept from being tried: behaviours that its failure implies, and all
    that follows a comparison which found it. Nothing follows that of a mask or of two
    implementations.
    """
    if report.mask or report.against is not None:
        return
    yield from (each.name for each in report.behaviour if each.is_implied)
    # these are asked of every attention
    if {each.name for each in report.behaviour} <= {"cache", "sees", "packing"}:
        yield "behaviours"
    if report.compared is None or not report.compared.attention:
        yield "further lengths, dtypes and gradients"
