"""`mha check`: what a user's attention does, whether that is attention, and if not, which mistake it makes."""

from __future__ import annotations

import json
import platform
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import mhacli
from mhacli.adapters.usercode.call.signature import documented_meaning
from mhacli.adapters.usercode.call.user_attention import UserAttention
from mhacli.adapters.usercode.process import Stage
from mhacli.adapters.usercode.target import split_target, targets_beside
from mhacli.adapters.usercode.types import Built, MaskForm
from mhacli.attention.mistakes.stages import RIGHT, SourceHints
from mhacli.compute.base.user_module import arguments_of, load_user_modes
from mhacli.compute.check.against import compare
from mhacli.compute.check.candidates import Candidate, candidates, intended_layer, source_of
from mhacli.compute.check.diagnose import Diagnosis, PriorKnowledge, diagnose, stated
from mhacli.compute.check.findings import by_other_sizes, contradictions, findings_of
from mhacli.compute.check.hypotheses import difference, may_be_nan, observe, stages_with
from mhacli.compute.check.inputs import arguments_without_effect, with_own_weights
from mhacli.compute.check.observed_properties import observed_properties
from mhacli.compute.check.probes.catalogue import Probed, probe
from mhacli.compute.check.stepwise import examine_stepwise
from mhacli.io.json_schema import decode, finite
from mhacli.requests.user_code import DEFAULT_TIME_LIMIT_S, CheckRequest, TargetRequest
from mhacli.results.check import (
    Choice,
    Examination,
    Finding,
    FirstDifference,
    Mode,
    ModeReport,
    OutputComparison,
    ProbeResult,
)

_CAUSAL = ("causal", "autoregressive", "masked", "unidirectional")
_DENIALS = ("non", "not", "anti", "or", "bi", "un", "optionally", "optional", "possibly", "no", "without")
_CAUSAL_TITLE = re.compile(
    r"(?i)(?P<before>\w+)?[\s-]*\b(?:causal|autoregressive|unidirectional|masked(?=[ -]self))"
    r"(?:[ -](?:multi-?head(?:ed)?|multi-?query|grouped-?query|self|sliding[ -]window|local))*[ -]attention\b"
)
"""What the first line of a docstring says of a causal attention, with the word before, which may deny it."""
_BACKWARD = re.compile(
    r"(?i)\b(?:backward|anti-?causal|right[- ]to[- ]left|those after|later ones|strictly causal|not see itself)\b"
)
_MOST_PARTS = 4
_LONGER = 2
"""How many times the time limit suffices for all pairs of mistakes."""
_CRITICAL = ("batch independence", "batch of one", "finite")
"""Probes that no right attention fails."""


def examine_request(request: Mapping[str, Any], stage: Stage) -> bytes:
    """The examination that is asked for, as JSON. Raises `MhaError` for what cannot be imported, built or called."""
    asked = decode(CheckRequest, request, "request")
    torch.set_num_threads(1)  # for products as small as these more threads only wait for each other
    return json.dumps(examined(asked, stage).to_dict()).encode()


def examined(request: CheckRequest, stage: Stage) -> Examination:
    """The examination that is asked for, with its time and the versions."""
    begun = time.perf_counter()
    examination = compare(request, stage) if request.against is not None else examine(request, stage)
    environment = {"mha": mhacli.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return replace(examination, time_s=time.perf_counter() - begun, environment=environment)


def examine(request: CheckRequest, stage: Stage) -> Examination:
    """Probes, comparison with the reference, diagnosis, in each mode of calling it."""
    subjects = load_user_modes(request.of, stage)
    return together([(subject.mode, _examined_as_stated(subject, request, stage)) for subject in subjects])


class _ModeResult(NamedTuple):
    """What is said of one mode, and what it rests on."""

    report: Examination
    diagnosis: Diagnosis
    subject: UserAttention


def _examined_as_stated(subject: UserAttention, request: CheckRequest, stage: Stage) -> Examination:
    """What is said of one mode. Where nothing explains it with the heads and the scale that are stated, and something does
    without one of them, the code contradicts what is stated."""
    facts = [fact for fact in ("n_heads", "scale") if getattr(request, fact) is not None]
    if facts:
        report = _examined_mode(subject, request, stage, patience=0).report
        for dropped in [] if report.verdict != "unknown" else [*([fact] for fact in facts), *[facts][: len(facts) - 1]]:
            freely = replace(request, **dict.fromkeys(dropped))  # type: ignore[arg-type]
            found = _examined_mode(subject, freely, stage, patience=0)
            if found.report.verdict != "unknown" and found.diagnosis.candidate is not None:
                against = contradictions(request, dropped, found.diagnosis, found.subject, found.report.comparison)
                return replace(found.report, verdict="wrong", findings=(*against, *found.report.findings))
        if report.verdict != "unknown":
            return report
    return _examined_mode(subject, request, stage, patience=request.time_limit_s / DEFAULT_TIME_LIMIT_S).report


def _examined_mode(subject: UserAttention, request: CheckRequest, stage: Stage, *, patience: float) -> _ModeResult:
    """The examination of one mode; `patience` is how many times the usual number of pairs of mistakes is tried."""
    expects_causal = is_meant_causal(subject, request.of)
    probed = probe(subject, request, stage, expects_causal=expects_causal)
    stage(f"comparing {request.of.target} with the reference", limited=False)
    examined = with_own_weights(subject, probed, request.of.seed)
    causal = _open_causality(probed, subject, expects_causal)
    properties = observed_properties(examined.subject, request.of.seed)
    intended = intended_layer(subject.built, examined.module, request, causal, properties)
    found = candidates(examined.subject, examined.module, examined.tensors, intended, request)
    known = _prior_knowledge(
        subject, probed, request, expects_causal=expects_causal, is_pairing_known=intended.is_pairing_known
    )
    known = replace(known, patience=patience)
    diagnosis = diagnose(examined.subject, examined.module, found, known, request.of.seed)
    for code, others in list(diagnosis.alternatives.items()):
        first = next(made for made in diagnosis.made if made.mistake.code == code)
        left = by_other_sizes((first, *others), subject, probed, causal, request, stage)
        diagnosis.narrow(first, left)
    stage(f"giving {request.of.target} a text step by step", limited=False)
    steps = examine_stepwise(examined, probed, diagnosis, request.of.seed, stage)
    findings = (*findings_of(diagnosis, probed, examined, known, request), *steps.findings)
    failed = [one.name for one in probed.probes if one.ok is False and one.name in _CRITICAL]
    verdict = "wrong" if findings else "right" if diagnosis.is_right and not failed else "unknown"
    departure = _departure(diagnosis, examined.subject, found) if verdict == "unknown" else None
    report = Examination(
        verdict=verdict,  # type: ignore[arg-type]
        target=request.of.target,
        called=subject.described,
        arguments=arguments_of(subject.built),
        findings=findings,
        choices=_choices(diagnosis, probed, subject, request, expects_causal=expects_causal) + steps.choices,
        probes=probed.probes + steps.probes,
        comparison=_comparison(diagnosis, subject),
        reason=None
        if verdict != "unknown"
        else _reason(diagnosis, found, probed, departure, request, subject.sizes.d_in),
        closest=_closest(diagnosis),
        departure=departure,
        n_parameters=0 if examined.module is None else sum(p.numel() for p in examined.module.parameters()),
        n_hypotheses=diagnosis.n_hypotheses,
        not_examined=tuple(name for name in subject.untried if name not in (*steps.names, *subject.unread)),
        notes=(*arguments_without_effect(subject, request.of.seed), *steps.notes),
        next_steps=() if verdict != "unknown" else _next_steps(diagnosis, probed, departure, request),
    )
    return _ModeResult(report, diagnosis, examined.subject)


def _prior_knowledge(
    subject: UserAttention, probed: Probed, request: CheckRequest, *, expects_causal: bool, is_pairing_known: bool
) -> PriorKnowledge:
    """What the diagnosis may rely on."""
    built, facts = subject.built, probed.facts
    is_documented = _BACKWARD.search(built.documentation) is not None and facts.visible != "full"
    is_own = facts.visible in ("other", "itself only") or is_documented
    return PriorKnowledge(
        SourceHints(expects_causal, is_pairing_known, "inf" in source_of(built).lower()),
        facts.influence if is_own else None,
        _stated(subject.mask_forms, built, request),
        _stated(subject.padding_forms, built, request),
        "window" in source_of(built).lower(),
    )


def is_meant_causal(subject: UserAttention, request: TargetRequest) -> bool:
    """Whether it is to be causal: by the option, by an argument, by its name, or by its docstring's first line. Over a context
    that may be left out only by an argument: the order of the rows is that of its own."""
    if subject.causal_by is not None or subject.mode == "cross":
        return subject.causal_by is not None
    return request.causal or _is_named_causal(subject) or _is_titled_causal(subject)


def _is_named_causal(subject: UserAttention) -> bool:
    words = [
        word.lower()
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", getattr(subject.built.thing, "__name__", ""))
    ]
    return any(word in _CAUSAL for word in words) and not any(word in _DENIALS for word in words)


def _is_titled_causal(subject: UserAttention) -> bool:
    docstring = vars(subject.built.thing).get("__doc__") if isinstance(subject.built.thing, type) else None
    title = _CAUSAL_TITLE.search((docstring or "").strip().partition("\n")[0])
    return title is not None and (title["before"] or "").lower() not in _DENIALS


def _open_causality(probed: Probed, subject: UserAttention, expects: bool) -> tuple[bool, ...]:
    """The answers to whether it masks the future itself that its behaviour leaves open."""
    if probed.facts.visible == "full":
        return (False, True) if not expects else (False,) if subject.mask_forms else (True,)
    return (True, False) if expects else (False, True)


def _stated(forms: tuple[MaskForm, ...], built: Built, request: CheckRequest) -> tuple[MaskForm, ...]:
    """The forms that agree with what is stated of them."""
    documented = (documented_meaning(built.documentation, form.parameter) for form in forms)
    return stated(forms, request.mask_means or next(documented, None))


# ----------------------------------------------------------------------------------------------------------------- the report


def _choices(
    diagnosis: Diagnosis, probed: Probed, subject: UserAttention, request: CheckRequest, *, expects_causal: bool
) -> tuple[Choice, ...]:
    candidate, facts = diagnosis.candidate, probed.facts
    said = [] if candidate is None else list(candidate.choices)
    if candidate is not None:
        layer = candidate.layer
        if layer.weights is not None:
            said += _of_weights(diagnosis)
        if layer.causal and not expects_causal and not diagnosis.made:
            said.append(Choice("causal", "it hides later tokens by itself"))
    if expects_causal and not request.of.causal:
        said.append(Choice("meant-causal", f"it is meant to be causal, as {_why_causal(subject)} says"))
    if facts.is_causal_by_mask and expects_causal:
        said.append(Choice("causal-by-mask", "it is causal only through the mask that it is given"))
    if facts.empty_row in ("nan", "mean", "constant", "other"):
        words = {"nan": "NaN", "mean": "the mean of the values"}.get(facts.empty_row, "another value")
        said.append(Choice("fully-masked-row", f"a query whose keys are all masked gives {words}"))
    return tuple(dict.fromkeys([*said, *diagnosis.choices]))


def _why_causal(subject: UserAttention) -> str:
    if subject.causal_by is not None:
        return f"its argument {subject.causal_by}"
    return "its name" if _is_named_causal(subject) else "its docstring"


def _of_weights(diagnosis: Diagnosis) -> list[Choice]:
    assert diagnosis.candidate is not None
    layer = diagnosis.candidate.layer
    assert layer.weights is not None
    said = []
    named = {"q": layer.weights.q, "k": layer.weights.k, "v": layer.weights.v, "the output": layer.weights.out}
    bare = [name for name, one in named.items() if one is not None and one.bias is None]
    if bare:
        said.append(
            Choice("no-bias", "no projection has a bias" if len(bare) == len(named) else f"no bias: {', '.join(bare)}")
        )
    if layer.n_kv_heads != layer.n_heads:
        said.append(Choice("gqa", f"{layer.n_heads} query heads share {layer.n_kv_heads} kv heads"))
    d_v = layer.weights.v.weight.shape[0] // layer.n_kv_heads
    if layer.d_head is not None and d_v != layer.d_head:
        said.append(Choice("d-v", f"values are {d_v} wide, queries and keys {layer.d_head}"))
    return said


def _comparison(diagnosis: Diagnosis, subject: UserAttention) -> OutputComparison | None:
    """How far the reference with the module's weights is from the module, as it is and with the mistakes that were found."""
    if diagnosis.candidate is None or not diagnosis.cases:
        return None
    cases = diagnosis.cases
    layer, stages, is_nan = diagnosis.candidate.layer, stages_with(diagnosis.made), may_be_nan(diagnosis.made)
    gaps = [(difference(layer, stages, case, may_be_nan=is_nan), case.tolerance) for case in cases]
    largest, tolerance = max(gaps, key=lambda gap: gap[0] / gap[1])
    dtype = str(subject.dtype).removeprefix("torch.")
    return OutputComparison("reference", dtype, len(cases), finite(largest), tolerance)


def _closest(diagnosis: Diagnosis) -> str | None:
    """The hypothesis that came closest, where it came close: within a tenth of the output."""
    if diagnosis.closest is None or not diagnosis.unexplained or not diagnosis.closest.made:
        return None
    made = " and if ".join(one.variant.description for one in diagnosis.closest.made)
    case = diagnosis.cases[0]
    gap, finite = diagnosis.closest.error * case.tolerance, case.answer[case.answer.isfinite()].abs()
    if not finite.numel() or not gap <= 0.1 * finite.max().item():  # also where it is NaN
        return None
    return f"if {made}, the reference still differs by {gap:.3g}"


def _reason(
    diagnosis: Diagnosis,
    found: list[Candidate],
    probed: Probed,
    departure: FirstDifference | None,
    request: CheckRequest,
    d_in: int,
) -> str:
    if probed.facts.visible == "itself only":
        return "no token attends to another: this is not attention"
    if not found and request.n_heads and d_in % request.n_heads:
        return f"--heads {request.n_heads} does not divide the width {d_in} of its input"
    if not found:
        return "the names and shapes of the parameters do not show which project queries, keys and values"
    failed = [f"{probe.name}: {probe.message}" for probe in probed.probes if probe.ok is False]
    if diagnosis.candidate is not None and not diagnosis.unexplained:
        return f"the reference gives the same output, but {_certain(failed)}"
    told = _not_understood(found[0], departure)
    return told + (f"; {_certain(failed)}" if failed else "")


def _certain(failed: Sequence[str]) -> str:
    """The first of the probes that fail with its message, and how many more there are."""
    more = f"; {len(failed) - 1} more probe{'s fail' if len(failed) > 2 else ' fails'}" if len(failed) > 1 else ""
    return f"a probe fails, {failed[0]}{more}"


def _next_steps(
    diagnosis: Diagnosis, probed: Probed, departure: FirstDifference | None, request: CheckRequest
) -> tuple[str, ...]:
    """What to try where nothing explains it."""
    if probed.facts.visible == "itself only":
        target = shlex.quote(request.of.target)
        beside = targets_beside(*split_target(request.of.target))
        others = [f"mha check {shlex.quote(other)}" for other in beside]
        return (f"mha trace {target} shows what it computes, step by step", *others[:_MOST_PARTS])
    given = {"heads": request.n_heads, "scale": request.scale, "rope": request.rope, "mask-means": request.mask_means}
    open_ones = [
        f"--{name}" for name, value in (given | {"causal": request.of.causal or None}).items() if value is None
    ]
    has_line = departure is not None and departure.line is not None
    first = "check names up to two mistakes at once; if the line above is one, correct it and check again"
    steps = [first] if has_line else []
    steps += ["--against TARGET compares it with code that you trust"]
    steps += [f"{', '.join(open_ones)} state what its code does not show"] if open_ones else []
    stated = [f"--{name}" for name in ("heads", "scale") if given[name] is not None]
    steps += [f"without {' and '.join(stated)}, which may contradict the code"] if stated else []
    longer = f"--time-limit {_LONGER * request.time_limit_s:g} tries more pairs of mistakes"
    return (*steps, longer) if diagnosis.is_cut_short else tuple(steps)


def _not_understood(likeliest: Candidate, departure: FirstDifference | None) -> str:
    """The parts of it whose parameters no projection has, else the first site that it makes in a way of its own."""
    unused = () if likeliest.reading is None else likeliest.reading.unused
    parts = list(dict.fromkeys(re.sub(r"\.(weight|bias)$", "", name) for name in unused))
    if parts:
        named = ", ".join(parts[:_MOST_PARTS]) + (", …" if len(parts) > _MOST_PARTS else "")
        return f"it is not clear what it does with {named}"
    if departure is not None:
        return f"it is not clear how it computes {departure.site}"
    return "no known mistake explains its output"


def _departure(diagnosis: Diagnosis, subject: UserAttention, found: list[Candidate]) -> FirstDifference | None:
    """The first site of the likeliest layer whose numbers it does not make."""
    if not found or not diagnosis.cases:
        return None
    layer = found[0].layer if diagnosis.closest is None else diagnosis.closest.layer
    try:
        return observe(subject, layer, RIGHT, diagnosis.cases[0]).departure()
    except Exception:  # what cannot be watched tells nothing
        return None


# ---------------------------------------------------------------------------------------------- both modes as one report


_OVER = {"self": "in self-attention", "cross": "in cross-attention"}
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
        findings=tuple(_findings_of_modes(reports)),
        choices=tuple(_choices_of_modes(reports)),
        probes=tuple(_probes_of_modes(reports)),
        comparison=_comparison_of_modes([one.comparison for _, one in reports if one.comparison is not None]),
        reason=None if open_one is None or verdict == "wrong" else f"{_OVER[open_one[0]]} {open_one[1].reason}",
        closest=None if open_one is None else open_one[1].closest,
        next_steps=() if open_one is None or verdict == "wrong" else open_one[1].next_steps,
        departure=None if open_one is None else open_one[1].departure,
        n_hypotheses=sum(one.n_hypotheses for _, one in reports),
        not_examined=tuple(name for name in last.not_examined if all(name in one.not_examined for _, one in reports)),
        notes=tuple(dict.fromkeys(note for _, one in reports for note in one.notes)),
        modes=tuple(_mode_report(*report) for report in reports),
    )


def _mode_report(mode: Mode, one: Examination) -> ModeReport:
    codes = tuple(dict.fromkeys(finding.code for finding in one.findings))
    return ModeReport(mode, one.verdict, one.called, codes, one.probes, one.comparison, one.reason)


def _findings_of_modes(reports: Reports) -> Iterator[Finding]:
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


def _choices_of_modes(reports: Reports) -> Iterator[Choice]:
    """Every choice once; one that was made in one mode alone says so, but for the form of a mask, which says whose it is."""
    for mode, one in reports:
        others = [choice for other, report in reports if other != mode for choice in report.choices]
        for choice in one.choices:
            if choice not in others and choice.name != "mask-form":
                yield replace(choice, message=f"{choice.message} ({_OVER[mode]})")
            elif mode == reports[0][0] or choice not in others:
                yield choice


def _probes_of_modes(reports: Reports) -> Iterator[ProbeResult]:
    """Every probe once, as in the mode that it speaks against; a cache is asked for in one mode alone."""
    found: dict[str, list[ProbeResult]] = {}
    for report in reports:
        for answer in _named(*report):
            found.setdefault(answer.name, []).append(answer)
    yield from (_worst(probes) for probes in found.values())


def _named(mode: Mode, one: Examination) -> list[ProbeResult]:
    """The probes, with the mode in the message of those that fail."""
    return [
        replace(probe, message=f"{_OVER[mode]}: {probe.message}") if probe.ok is False else probe
        for probe in one.probes
    ]


def _worst(probes: Sequence[ProbeResult]) -> ProbeResult:
    """The first that fails; else the first that passes, or that measured something."""
    return min(probes, key=lambda probe: (probe.ok is not False, probe.ok is not True, probe.value is None))


def _comparison_of_modes(found: Sequence[OutputComparison]) -> OutputComparison | None:
    """The one that differs most, of as many inputs as all together."""
    if not found:
        return None

    def gap(one: OutputComparison) -> float:
        return float("inf") if one.max_abs_difference is None else one.max_abs_difference / one.tolerance

    return replace(max(found, key=gap), n_inputs=sum(one.n_inputs for one in found))
