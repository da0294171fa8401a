"""`mha check`: probes a user's attention, compares it with the reference, and diagnoses its mistakes."""

from __future__ import annotations

import json
import platform
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

import mhacli
from mhacli.attention.devices import one_thread
from mhacli.attention.mistakes.stages import RIGHT, SourceHints
from mhacli.commands.check.against import compare
from mhacli.commands.check.behaviour import Asked, Claim, asker_of, claim_of, is_of_transformers
from mhacli.commands.check.candidates import Candidate, candidates, intended_layer, source_of
from mhacli.commands.check.diagnose import Diagnosis, PriorKnowledge, diagnose, forms_with_meaning
from mhacli.commands.check.findings import by_other_sizes, contradictions, findings_of
from mhacli.commands.check.hypotheses import difference, may_be_nan, observe, stages_with
from mhacli.commands.check.inputs import arguments_without_effect, with_random_weights
from mhacli.commands.check.observed_properties import observed_properties
from mhacli.commands.check.probes import Probed, probe
from mhacli.commands.check.result import (
    CheckRequest,
    Examination,
    Finding,
    FirstDifference,
    ModeReport,
    OutputComparison,
    ProbeResult,
)
from mhacli.commands.check.stepwise import examine_stepwise
from mhacli.io.data import decode, finite
from mhacli.usercode.arguments import parse_value
from mhacli.usercode.call.find_call import find_modes
from mhacli.usercode.call.sequences import Sequences, sequences_of_ids, sequences_of_vectors, with_zeros_drawn
from mhacli.usercode.call.signature import documented_meaning
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.process import Stage
from mhacli.usercode.target import DEFAULT_TIME_LIMIT_S, Choice, Mode, TargetRequest, split_target, targets_beside
from mhacli.usercode.types import Built, MaskForm
from mhacli.usercode.user_module import arguments_of, load_built

_CAUSAL = ("causal", "autoregressive", "masked", "unidirectional")
_DENIALS = ("non", "not", "anti", "or", "bi", "un", "optionally", "optional", "possibly", "no", "without")
_CAUSAL_TITLE = re.compile(
    r"(?i)(?P<before>\w+)?[\s-]*\b(?:causal|autoregressive|unidirectional|masked(?=[ -]self))"
    r"(?:[ -](?:multi-?head(?:ed)?|multi-?query|grouped-?query|self|sliding[ -]window|local))*[ -]attention\b"
)
"""The title of causal attention in a docstring, with the preceding word, which may negate it."""
_BACKWARD = re.compile(
    r"(?i)\b(?:backward|anti-?causal|right[- ]to[- ]left|those after|later ones|strictly causal|not see itself)\b"
)
_MOST_PARTS = 4
_SMALL = 5_000_000
"""Parameters of a model for which several threads would only wait."""
_LONGER = 2
"""The factor by which a longer time limit allows all pairs of mistakes."""
_CRITICAL = ("batch independence", "finite")
"""Probes that every right attention passes."""


def examine_request(request: Mapping[str, Any], stage: Stage) -> bytes:
    """The requested examination as JSON. Raises `MhaError` if a target cannot be imported, built or called."""
    check_request = decode(CheckRequest, request, "request")
    return json.dumps(examined(check_request, stage).to_dict()).encode()


def examined(request: CheckRequest, stage: Stage) -> Examination:
    """The requested examination, with its duration and the versions."""
    started = time.perf_counter()
    if request.against is not None:
        with one_thread():
            examination = compare(request, stage)
    else:
        examination = examine(request, stage)
    environment = {"mha": mhacli.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return replace(examination, time_s=time.perf_counter() - started, environment=environment)


def examine(request: CheckRequest, stage: Stage) -> Examination:
    """The behaviour of a checkpoint, or of a target that takes token ids; else probes, compares and diagnoses the attention in
    each of its modes."""
    if request.model is not None:
        return _examined_checkpoint(request.model, request.model, request, stage)
    built = load_built(request.of, stage)
    if built.module is not None and is_of_transformers(built.module):
        return _examined_checkpoint(built.module, request.of.target, request, stage)
    model = _model_of_ids(built, request)
    if model is not None:
        n_parameters = sum(parameter.numel() for parameter in model.module.parameters()) if model.module else 0
        with one_thread() if n_parameters < _SMALL else nullcontext():
            is_decoder = model.source is not None and request.states_causal is None
            claim = claim_of(built.module, causal=True if is_decoder else request.states_causal)
            asker = asker_of(model, claim, request.seed, stage)
            asker.all()
        return replace(_of_behaviour(request.of.target, asker.asked, model), arguments=arguments_of(built))
    with one_thread():  # faster for such small products
        subjects = find_modes(built, request.of)
        return combined([(subject.mode, _with_behaviour(subject, request, stage)) for subject in subjects])


def _examined_checkpoint(model: str | nn.Module, name: str, request: CheckRequest, stage: Stage) -> Examination:
    from mhacli.commands.check.checkpoint import ask_checkpoint  # loads what only checkpoints need

    return _of_behaviour(name, *ask_checkpoint(model, request, stage))


def _model_of_ids(built: Built, request: CheckRequest) -> Sequences | None:
    """The target as a function of token ids; None if it takes none."""
    if built.module is None:
        return None
    fixed = {name: parse_value(text) for name, text in request.of.call_arguments}
    module = with_zeros_drawn(built.module, request.seed)
    return sequences_of_ids(
        request.of.target, module, fixed=fixed, length=request.length, seed=request.seed, means=request.mask_means
    )


def _of_behaviour(target: str, asked: Asked, model: Sequences) -> Examination:
    """The report on a model that takes token ids: its behaviour."""
    open_ones = [behaviour for behaviour in asked.behaviours if behaviour.ok is None]
    verdict = "wrong" if asked.findings else "consistent" if asked.holds else "unknown"
    return Examination(
        verdict=verdict,  # type: ignore[arg-type]
        target=target,
        called=model.called,
        arguments=(),
        findings=asked.findings,
        choices=(),
        probes=(),
        comparison=None,
        reason="; ".join(f"{b.name}: {b.reason}" for b in open_ones[:1]) if verdict == "unknown" else None,
        n_parameters=sum(parameter.numel() for parameter in model.module.parameters()) if model.module else 0,
        behaviour=asked.behaviours,
    )


def _with_behaviour(subject: UserAttention, request: CheckRequest, stage: Stage) -> Examination:
    """The report on one mode, with its behaviour over a long text where it reads one sequence of vectors."""
    report = _examined_as_stated(subject, request, stage)
    sequences = None if subject.mode == "cross" else sequences_of_vectors(subject, request.length)
    if sequences is None or report.verdict == "wrong":
        return report
    choices = {choice.name for choice in report.choices}
    is_causal = (is_meant_causal(subject, request.of) or "causal" in choices) and "causal-by-mask" not in choices
    is_known = request.not_causal or report.verdict == "right"
    stated = True if is_causal else False if is_known else None
    asker = asker_of(sequences, Claim(stated), request.seed, stage)
    asker.all()
    asked = asker.asked
    verdict = "wrong" if asked.findings else report.verdict
    return replace(report, verdict=verdict, findings=asked.findings, behaviour=asked.behaviours)


class _ModeResult(NamedTuple):
    """The report on one mode, with its diagnosis."""

    report: Examination
    diagnosis: Diagnosis
    subject: UserAttention


def _examined_as_stated(subject: UserAttention, request: CheckRequest, stage: Stage) -> Examination:
    """The report on one mode. If only layers with another number of heads or scale than stated match, the code contradicts the
    statement."""
    facts = [fact for fact in ("n_heads", "scale") if getattr(request, fact) is not None]
    if facts:
        report = _examined_mode(subject, request, stage, patience=0).report
        for dropped in [] if report.verdict != "unknown" else [*([fact] for fact in facts), *[facts][: len(facts) - 1]]:
            relaxed = replace(request, **dict.fromkeys(dropped))  # type: ignore[arg-type]
            result = _examined_mode(subject, relaxed, stage, patience=0)
            if result.report.verdict != "unknown" and result.diagnosis.candidate is not None:
                findings = contradictions(request, dropped, result.diagnosis, result.subject, result.report.comparison)
                return replace(result.report, verdict="wrong", findings=(*findings, *result.report.findings))
        if report.verdict != "unknown":
            return report
    return _examined_mode(subject, request, stage, patience=request.time_limit_s / DEFAULT_TIME_LIMIT_S).report


def _examined_mode(subject: UserAttention, request: CheckRequest, stage: Stage, *, patience: float) -> _ModeResult:
    """The examination of one mode; `patience` multiplies the number of pairs of mistakes to try."""
    expects_causal = is_meant_causal(subject, request.of)
    probed = probe(subject, request, stage, expects_causal=expects_causal)
    stage(f"comparing {request.of.target} with the reference", limited=False)
    examined = with_random_weights(subject, probed, request.of.seed)
    causal = _open_causality(probed, subject, expects_causal)
    properties = observed_properties(examined.subject, request.of.seed)
    intended = intended_layer(subject.built, examined.module, request, causal, properties)
    layers = candidates(examined.subject, examined.module, examined.tensors, intended, request)
    prior = _prior_knowledge(
        subject, probed, request, expects_causal=expects_causal, is_pairing_known=intended.is_pairing_known
    )
    prior = replace(prior, patience=patience)
    diagnosis = diagnose(examined.subject, examined.module, layers, prior, request.of.seed)
    for code, alternatives in list(diagnosis.alternatives.items()):
        mistake = next(applied for applied in diagnosis.mistakes if applied.mistake.code == code)
        remaining = by_other_sizes((mistake, *alternatives), subject, probed, causal, request, stage)
        diagnosis.narrow(mistake, remaining)
    stage(f"giving {request.of.target} a text step by step", limited=False)
    steps = examine_stepwise(examined, probed, diagnosis, request.of.seed, stage)
    findings = (*findings_of(diagnosis, probed, examined, prior, request), *steps.findings)
    failed = [
        probe_result.name
        for probe_result in probed.probes
        if probe_result.ok is False and probe_result.name in _CRITICAL
    ]
    verdict = "wrong" if findings else "right" if diagnosis.is_right and not failed else "unknown"
    departure = _departure(diagnosis, examined.subject, layers) if verdict == "unknown" else None
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
        else _unknown_reason(diagnosis, layers, probed, departure, request, subject.sizes.d_in),
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
    """The facts for the diagnosis."""
    built, facts = subject.built, probed.facts
    is_documented_backward = _BACKWARD.search(built.documentation) is not None and facts.visible != "full"
    is_custom = facts.visible in ("other", "itself only") or is_documented_backward
    return PriorKnowledge(
        SourceHints(expects_causal, is_pairing_known, "inf" in source_of(built).lower()),
        facts.influence if is_custom else None,
        _forms_as_stated(subject.mask_forms, built, request),
        _forms_as_stated(subject.padding_forms, built, request),
        "window" in source_of(built).lower(),
    )


def is_meant_causal(subject: UserAttention, request: TargetRequest) -> bool:
    """Whether it is meant to be causal: by the option, an argument, its name, or the first line of its docstring. For
    cross-attention only an argument counts, because the context has its own positions."""
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
    """The answers that its behaviour leaves open: whether it masks the future itself."""
    if probed.facts.visible == "full":
        return (False, True) if not expects else (False,) if subject.mask_forms else (True,)
    return (True, False) if expects else (False, True)


def _forms_as_stated(forms: tuple[MaskForm, ...], built: Built, request: CheckRequest) -> tuple[MaskForm, ...]:
    documented = (documented_meaning(built.documentation, form.parameter) for form in forms)
    return forms_with_meaning(forms, request.mask_means or next(documented, None))


# ----------------------------------------------------------------------------------------------------------------- the report


def _choices(
    diagnosis: Diagnosis, probed: Probed, subject: UserAttention, request: CheckRequest, *, expects_causal: bool
) -> tuple[Choice, ...]:
    candidate, facts = diagnosis.candidate, probed.facts
    choices = [] if candidate is None else list(candidate.choices)
    if candidate is not None:
        layer = candidate.layer
        if layer.weights is not None:
            choices += _weight_choices(diagnosis)
        if layer.causal and not expects_causal and not diagnosis.mistakes:
            choices.append(Choice("causal", "it hides later tokens by itself"))
    if expects_causal and not request.of.causal:
        choices.append(Choice("meant-causal", f"it is meant to be causal, as {_causality_source(subject)} says"))
    if facts.is_causal_by_mask and expects_causal:
        choices.append(Choice("causal-by-mask", "it is causal only through the mask that it is given"))
    if facts.empty_row in ("nan", "mean", "other"):
        description = {"nan": "NaN", "mean": "the mean of the values"}.get(facts.empty_row, "another value")
        choices.append(Choice("fully-masked-row", f"a query whose keys are all masked gives {description}"))
    return tuple(dict.fromkeys([*choices, *diagnosis.choices]))


def _causality_source(subject: UserAttention) -> str:
    if subject.causal_by is not None:
        return f"its argument {subject.causal_by}"
    return "its name" if _is_named_causal(subject) else "its docstring"


def _weight_choices(diagnosis: Diagnosis) -> list[Choice]:
    assert diagnosis.candidate is not None
    layer = diagnosis.candidate.layer
    assert layer.weights is not None
    choices = []
    projections = {"q": layer.weights.q, "k": layer.weights.k, "v": layer.weights.v, "the output": layer.weights.out}
    without_bias = [
        name for name, projection in projections.items() if projection is not None and projection.bias is None
    ]
    if without_bias:
        choices.append(
            Choice(
                "no-bias",
                "no projection has a bias"
                if len(without_bias) == len(projections)
                else f"no bias: {', '.join(without_bias)}",
            )
        )
    if layer.n_kv_heads != layer.n_heads:
        choices.append(Choice("gqa", f"{layer.n_heads} query heads share {layer.n_kv_heads} kv heads"))
    d_v = layer.weights.v.weight.shape[0] // layer.n_kv_heads
    if layer.d_head is not None and d_v != layer.d_head:
        choices.append(Choice("d-v", f"values are {d_v} wide, queries and keys {layer.d_head}"))
    return choices


def _comparison(diagnosis: Diagnosis, subject: UserAttention) -> OutputComparison | None:
    """The difference between the module and the reference with the mistakes found."""
    if diagnosis.candidate is None or not diagnosis.cases:
        return None
    cases = diagnosis.cases
    layer, stages, is_nan = diagnosis.candidate.layer, stages_with(diagnosis.mistakes), may_be_nan(diagnosis.mistakes)
    errors = [(difference(layer, stages, case, may_be_nan=is_nan), case.tolerance) for case in cases]
    largest, tolerance = max(errors, key=lambda error_and_tolerance: error_and_tolerance[0] / error_and_tolerance[1])
    dtype = str(subject.dtype).removeprefix("torch.")
    return OutputComparison("reference", dtype, len(cases), finite(largest), tolerance)


def _closest(diagnosis: Diagnosis) -> str | None:
    """The closest hypothesis, if it comes within a tenth of the output."""
    if diagnosis.closest is None or not diagnosis.unexplained or not diagnosis.closest.mistakes:
        return None
    descriptions = " and if ".join(applied.variant.description for applied in diagnosis.closest.mistakes)
    case = diagnosis.cases[0]
    error, finite = diagnosis.closest.error * case.tolerance, case.output[case.output.isfinite()].abs()
    if not finite.numel() or not error <= 0.1 * finite.max().item():  # also for NaN
        return None
    return f"if {descriptions}, the reference still differs by {error:.3g}"


def _unknown_reason(
    diagnosis: Diagnosis,
    layers: list[Candidate],
    probed: Probed,
    departure: FirstDifference | None,
    request: CheckRequest,
    d_in: int,
) -> str:
    if probed.facts.visible == "itself only":
        return "no token attends to another: this is not attention"
    if not layers and request.n_heads and d_in % request.n_heads:
        return f"--heads {request.n_heads} does not divide the width {d_in} of its input"
    if not layers:
        return "the names and shapes of the parameters do not show which project queries, keys and values"
    failed = [f"{probe.name}: {probe.message}" for probe in probed.probes if probe.ok is False]
    if diagnosis.candidate is not None and not diagnosis.unexplained:
        return f"the reference gives the same output, but {_failed_probe_text(failed)}"
    part = _unknown_part(layers[0], departure)
    return part + (f"; {_failed_probe_text(failed)}" if failed else "")


def _failed_probe_text(failed: Sequence[str]) -> str:
    others = f"; {len(failed) - 1} more probe{'s fail' if len(failed) > 2 else ' fails'}" if len(failed) > 1 else ""
    return f"a probe fails, {failed[0]}{others}"


def _next_steps(
    diagnosis: Diagnosis, probed: Probed, departure: FirstDifference | None, request: CheckRequest
) -> tuple[str, ...]:
    """Suggestions if nothing matches."""
    if probed.facts.visible == "itself only":
        target = shlex.quote(request.of.target)
        siblings = targets_beside(*split_target(request.of.target))
        others = [f"mha check {shlex.quote(other)}" for other in siblings]
        return (f"mha trace {target} shows what it computes, step by step", *others[:_MOST_PARTS])
    options = {"heads": request.n_heads, "scale": request.scale, "rope": request.rope, "mask-means": request.mask_means}
    open_options = [
        f"--{name}" for name, value in (options | {"causal": request.of.causal or None}).items() if value is None
    ]
    has_line = departure is not None and departure.line is not None
    first = "check names up to two mistakes at once; if the line above is one, correct it and check again"
    steps = [first] if has_line else []
    steps += ["--against TARGET compares it with code that you trust"]
    steps += [f"{', '.join(open_options)} state what its code does not show"] if open_options else []
    stated_options = [f"--{name}" for name in ("heads", "scale") if options[name] is not None]
    steps += [f"without {' and '.join(stated_options)}, which may contradict the code"] if stated_options else []
    longer = f"--time-limit {_LONGER * request.time_limit_s:g} tries more pairs of mistakes"
    return (*steps, longer) if diagnosis.is_cut_short else tuple(steps)


def _unknown_part(likeliest: Candidate, departure: FirstDifference | None) -> str:
    """The parameters that belong to no projection, or else the first site that differs."""
    unused = () if likeliest.reading is None else likeliest.reading.unused
    parts = list(dict.fromkeys(re.sub(r"\.(weight|bias)$", "", name) for name in unused))
    if parts:
        names = ", ".join(parts[:_MOST_PARTS]) + (", …" if len(parts) > _MOST_PARTS else "")
        return f"it is not clear what it does with {names}"
    if departure is not None:
        return f"it is not clear how it computes {departure.site}"
    return "no known mistake explains its output"


def _departure(diagnosis: Diagnosis, subject: UserAttention, layers: list[Candidate]) -> FirstDifference | None:
    """The first site of the likeliest layer that the subject does not compute."""
    if not layers or not diagnosis.cases:
        return None
    layer = layers[0].layer if diagnosis.closest is None else diagnosis.closest.layer
    try:
        return observe(subject, layer, RIGHT, diagnosis.cases[0]).departure()
    except Exception:  # the call cannot be recorded
        return None


# ---------------------------------------------------------------------------------------------- both modes as one report


_OVER = {"self": "in self-attention", "cross": "in cross-attention"}
Reports = Sequence[tuple[Mode, Examination]]


def combined(examinations: Sequence[tuple[Mode | None, Examination]]) -> Examination:
    """One examination for all modes: wrong if one is wrong, right if all are."""
    reports = [(mode, report) for mode, report in examinations if mode is not None]
    if len(reports) < 2:
        return examinations[0][1]
    verdicts = {report.verdict for _, report in reports}
    verdict = next(verdict for verdict in ("wrong", "unknown", "right") if verdict in verdicts)
    unknown = next(((mode, report) for mode, report in reports if report.verdict == "unknown"), None)
    last = reports[-1][1]
    return replace(
        last,
        verdict=verdict,
        called="; ".join(report.called for _, report in reports),
        findings=tuple(_findings_of_modes(reports)),
        choices=tuple(_choices_of_modes(reports)),
        probes=tuple(_probes_of_modes(reports)),
        comparison=_comparison_of_modes([report.comparison for _, report in reports if report.comparison is not None]),
        reason=None if unknown is None or verdict == "wrong" else f"{_OVER[unknown[0]]} {unknown[1].reason}",
        closest=None if unknown is None else unknown[1].closest,
        next_steps=() if unknown is None or verdict == "wrong" else unknown[1].next_steps,
        departure=None if unknown is None else unknown[1].departure,
        n_hypotheses=sum(report.n_hypotheses for _, report in reports),
        not_examined=tuple(
            name for name in last.not_examined if all(name in report.not_examined for _, report in reports)
        ),
        notes=tuple(dict.fromkeys(note for _, report in reports for note in report.notes)),
        modes=tuple(_mode_report(*report) for report in reports),
    )


def _mode_report(mode: Mode, report: Examination) -> ModeReport:
    codes = tuple(dict.fromkeys(finding.code for finding in report.findings))
    return ModeReport(mode, report.verdict, report.called, codes, report.probes, report.comparison, report.reason)


def _findings_of_modes(reports: Reports) -> Iterator[Finding]:
    """Every finding once, proven ones first, with its modes."""
    modes: dict[str, tuple[Mode, ...]] = {}
    best: dict[str, Finding] = {}
    for mode, report in reports:
        for finding in report.findings:
            modes[finding.code] = (*modes.get(finding.code, ()), mode)
            if finding.code not in best or (finding.proven and not best[finding.code].proven):
                best[finding.code] = finding
    for finding in sorted(best.values(), key=lambda finding: not finding.proven):
        yield replace(finding, modes=modes[finding.code])


def _choices_of_modes(reports: Reports) -> Iterator[Choice]:
    """Every choice once. A choice of only one mode says so, except mask forms, whose name shows the mode."""
    for mode, report in reports:
        others = [choice for other, report in reports if other != mode for choice in report.choices]
        for choice in report.choices:
            if choice not in others and choice.name != "mask-form":
                yield replace(choice, message=f"{choice.message} ({_OVER[mode]})")
            elif mode == reports[0][0] or choice not in others:
                yield choice


def _probes_of_modes(reports: Reports) -> Iterator[ProbeResult]:
    """Every probe once, from the mode in which it fails, if any. The cache is probed in one mode only."""
    by_name: dict[str, list[ProbeResult]] = {}
    for report in reports:
        for result in _named(*report):
            by_name.setdefault(result.name, []).append(result)
    yield from (_worst(probes) for probes in by_name.values())


def _named(mode: Mode, report: Examination) -> list[ProbeResult]:
    """The probes of a mode; messages of failed ones name the mode."""
    return [
        replace(probe, message=f"{_OVER[mode]}: {probe.message}") if probe.ok is False else probe
        for probe in report.probes
    ]


def _worst(probes: Sequence[ProbeResult]) -> ProbeResult:
    """The first failed probe, else the first that passed, else the first with a measurement."""
    return min(probes, key=lambda probe: (probe.ok is not False, probe.ok is not True, probe.value is None))


def _comparison_of_modes(comparisons: Sequence[OutputComparison]) -> OutputComparison | None:
    """The comparison with the largest difference, with the inputs of all modes counted."""
    if not comparisons:
        return None

    def relative_difference(comparison: OutputComparison) -> float:
        return (
            float("inf")
            if comparison.max_abs_difference is None
            else comparison.max_abs_difference / comparison.tolerance
        )

    return replace(
        max(comparisons, key=relative_difference), n_inputs=sum(comparison.n_inputs for comparison in comparisons)
    )
