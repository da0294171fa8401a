"""Mistakes that are accepted, and codes that are accepted although what they mean was tried and
held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .result import CODES, HELD, Accepted, Examination, Finding, finding_of

_GRADIENTS = ("gradient-differs", "gradient-cut")
_BEYOND = "further lengths, dtypes and gradients"


def with_accepted(report: Examination, stated: Sequence[Accepted]) -> Examination:
    """The report with what is accepted of its mistakes, those that are not before the others; with
    a mistake for what is accepted and held, and a note for what was not tried.
    """
    if not stated:
        return report
    accepted, findings, notes = list[Accepted](), list[Finding](), [*report.notes]
    for finding in report.findings:
        covered = [*_covered(finding, stated)]
        accepted += covered
        findings.append(replace(finding, accepted=len(covered) == len(_places(finding))))
    for each in stated:
        if any(_covers(each, finding, at) for finding in findings for at in _places(finding)):
            continue
        evidence, untried = _trial(report, each)
        option = each.code if each.part is None else f"{each.code}@{each.part}"
        if untried:
            notes.append(f"{option} is accepted, and was not tried: {untried}")
        else:
            words = f"{option} is accepted, and was tried and held"
            fix = f"take --accept {option} out"
            findings.append(finding_of(HELD, evidence, message=words, fix=fix))
    is_held = any(finding.code == HELD for finding in findings)
    report = replace(
        report,
        verdict="wrong" if is_held else report.verdict,
        reason=None if is_held else report.reason,
        findings=tuple(sorted(findings, key=lambda finding: finding.accepted)),
        accepted=tuple(dict.fromkeys(accepted)),
        notes=tuple(notes),
    )
    if report.is_accepted and (untried := ", ".join(_untried_beside(report))):
        notes.append(f"not tried beside what is accepted: {untried}")
    return replace(report, notes=tuple(notes))


def _places(finding: Finding) -> Sequence[str]:
    """The parts in which a mistake was found, or the modes; "" is the whole code."""
    return finding.parts or finding.modes or ("",)


def _covers(accepted: Accepted, finding: Finding, place: str) -> bool:
    """Whether what is accepted is this mistake at this place: of a part also in what is inside."""
    part = accepted.part
    is_there = part is None or place == part or place.startswith(f"{part}.")
    return accepted.code == finding.code and is_there


def _covered(finding: Finding, stated: Sequence[Accepted]) -> Iterator[Accepted]:
    """What is accepted of a mistake, for each place."""
    for place in _places(finding):
        reasons = [each.reason for each in stated if _covers(each, finding, place)]
        if reasons:
            yield Accepted(finding.code, place or None, reasons[0])


def _trial(report: Examination, accepted: Accepted) -> tuple[str, str]:
    """What shows that an accepted mistake was tried and is not there, or else why that is not
    known.
    """
    code, part = accepted.code, accepted.part
    if report.against is not None or code == "differs":
        return report.sentence, _unless(report.against is not None and code == "differs", report)
    names = ["sees"] if code == "misses-stated" else [n for n, c in CODES.items() if c == code]
    if names and not report.mask:
        return _behaved(report, code, names)
    if part is not None and report.inside:
        inside = [
            each
            for each in report.inside
            if any(f"{name}.".startswith(f"{part}.") for name in each.names)
        ]
        is_right = all(each.verdict == "right" for each in inside) and bool(inside)
        return f"the attention in {part} is right", _unless(is_right, report)
    compared = report.compared
    if code in _GRADIENTS and compared is not None and not compared.backward.compared:
        return "", compared.backward.reason or "gradients were not compared"
    if code == "differs-in-16-bits" and compared and not any("16" in d for d in compared.dtypes):
        return "", "nothing was compared in 16 bits"
    is_right = report.verdict == "right" or (bool(report.mask) and report.ok)
    return report.sentence, _unless(is_right, report)


def _unless(is_right: bool, report: Examination) -> str:
    """Why something was not tried, unless it was."""
    if is_right:
        return ""
    return "other mistakes were found" if report.findings else report.reason or report.sentence


def _behaved(report: Examination, code: str, names: Sequence[str]) -> tuple[str, str]:
    """The same for the failure of behaviours of some names."""
    answers = [each for each in report.behaviour if each.name in names]
    tried = [each for each in answers if each.ok is not None]
    late = [name for name in names if name in report.not_examined]
    if not tried or late:
        reasons = [each.reason.removeprefix("not tried: ") for each in answers if each not in tried]
        return "", ", ".join(dict.fromkeys(reasons)) or report.reason or "it was not asked"
    found = [finding for finding in report.findings if finding.code == code]
    if not found:
        return "; ".join(f"{each.name}: {each.reason}" for each in tried), ""
    places = [place for finding in found for place in _places(finding)]
    elsewhere = f"found in {', '.join(places)} alone"
    # one failure implies others, and where it is not known in which part it is, it may be in any
    return elsewhere, "" if len(answers) == 1 and "" not in places else elsewhere


def _untried_beside(report: Examination) -> Iterator[str]:
    """What an accepted mistake kept from being tried."""
    yield from (each.name for each in report.behaviour if each.is_implied)
    if not report.behaviour:
        yield "behaviours"
    if report.compared is None or not report.compared.attention:
        yield _BEYOND
