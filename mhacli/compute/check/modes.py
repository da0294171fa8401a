"""What is said of an attention in each mode of calling it, as one report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mhacli.results.check import Choice, Comparison, Examination, Finding, Mode, ModeReport, Probe

_OVER = {"self": "over its own rows", "cross": "over a context"}
Reports = Sequence[tuple[Mode, Examination]]


def together(found: Sequence[tuple[Mode | None, Examination]]) -> Examination:
    """The examinations of one attention as one: wrong where one is wrong, right where all are."""
    reports = [(mode, one) for mode, one in found if mode is not None]
    if len(reports) < 2:
        return found[0][1]
    verdicts = {one.verdict for _, one in reports}
    verdict = next(verdict for verdict in ("wrong", "unknown", "right") if verdict in verdicts)
    open_one = next(((mode, one) for mode, one in reports if one.verdict == "unknown"), None)
    last = reports[-1][1]
    return replace(
        last,
        verdict=verdict,
        called="; ".join(one.called for _, one in reports),
        findings=tuple(_findings(reports)),
        choices=tuple(_choices(reports)),
        probes=tuple(_probes(reports)),
        comparison=_comparison([one.comparison for _, one in reports if one.comparison is not None]),
        reason=None if open_one is None or verdict == "wrong" else f"{_OVER[open_one[0]]} {open_one[1].reason}",
        closest=None if open_one is None else open_one[1].closest,
        departure=None if open_one is None else open_one[1].departure,
        n_hypotheses=sum(one.n_hypotheses for _, one in reports),
        not_examined=tuple(name for name in last.not_examined if all(name in one.not_examined for _, one in reports)),
        modes=tuple(_report(*report) for report in reports),
    )


def _report(mode: Mode, one: Examination) -> ModeReport:
    codes = tuple(dict.fromkeys(finding.code for finding in one.findings))
    return ModeReport(mode, one.verdict, one.called, codes, one.probes, one.comparison, one.reason)


def _findings(reports: Reports) -> Iterator[Finding]:
    """Every mistake once, the proven ones first, with the modes in which it was seen."""
    modes: dict[str, tuple[Mode, ...]] = {}
    best: dict[str, Finding] = {}
    for mode, one in reports:
        for finding in one.findings:
            modes[finding.code] = (*modes.get(finding.code, ()), mode)
            if finding.code not in best or (finding.proven and not best[finding.code].proven):
                best[finding.code] = finding
    for finding in sorted(best.values(), key=lambda finding: not finding.proven):
        yield replace(finding, modes=modes[finding.code])


def _choices(reports: Reports) -> Iterator[Choice]:
    """Every choice once; one that was made in one mode alone says so, but for the form of a mask, which says whose it is."""
    for mode, one in reports:
        others = [choice for other, report in reports if other != mode for choice in report.choices]
        for choice in one.choices:
            if choice not in others and choice.name != "mask-form":
                yield replace(choice, message=f"{choice.message} ({_OVER[mode]})")
            elif mode == reports[0][0] or choice not in others:
                yield choice


def _probes(reports: Reports) -> Iterator[Probe]:
    """Every probe once, as in the mode that it speaks against; a cache is asked for in one mode alone."""
    found: dict[str, list[Probe]] = {}
    for report in reports:
        for probe in _named(*report):
            found.setdefault(probe.name, []).append(probe)
    yield from (_worst(probes) for probes in found.values())


def _named(mode: Mode, one: Examination) -> list[Probe]:
    """The probes, with the mode in the message of those that fail."""
    return [
        replace(probe, message=f"{_OVER[mode]}: {probe.message}") if probe.ok is False else probe
        for probe in one.probes
    ]


def _worst(probes: Sequence[Probe]) -> Probe:
    """The first that fails; else the first that passes, or that measured something."""
    return min(probes, key=lambda probe: (probe.ok is not False, probe.ok is not True, probe.value is None))


def _comparison(found: Sequence[Comparison]) -> Comparison | None:
    """The one that differs most, of as many inputs as all together."""
    if not found:
        return None

    def gap(one: Comparison) -> float:
        return float("inf") if one.max_abs_difference is None else one.max_abs_difference / one.tolerance

    return replace(max(found, key=gap), n_inputs=sum(one.n_inputs for one in found))
