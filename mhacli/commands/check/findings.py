"""Findings from a diagnosis and from probes: each mistake with its evidence, its line, and the smallest example."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mhacli.attention.mistakes import BY_CODE, MISTAKES, Mistake
from mhacli.attention.mistakes.stages import ReferenceLayer, SourceEvidence, Symptoms
from mhacli.commands.check.candidates import candidates, intended_layer, stated_heads
from mhacli.commands.check.diagnose import Diagnosis, PriorKnowledge
from mhacli.commands.check.hypotheses import (
    AppliedMistake,
    Smallest,
    SourceLocator,
    evaluate,
    observe,
    smallest,
    stages_with,
)
from mhacli.commands.check.inputs import Examined, InputCase, core_cases, with_random_weights
from mhacli.commands.check.observed_properties import observed_properties
from mhacli.commands.check.probes import Probed
from mhacli.commands.check.result import CheckRequest, Finding, OutputComparison
from mhacli.record.checks import error_text
from mhacli.usercode.arguments import role_of, stated
from mhacli.usercode.call.find_call import find_modes
from mhacli.usercode.call.user_attention import UserAttention, call_attention, drawer_of
from mhacli.usercode.names import function_around, in_user_names, mentions, names_within
from mhacli.usercode.process import SourceLine, Stage
from mhacli.usercode.projections import parts_of
from mhacli.usercode.types import Built
from mhacli.usercode.user_module import limited


def findings_of(
    diagnosis: Diagnosis, probed: Probed, examined: Examined, prior: PriorKnowledge, request: CheckRequest
) -> tuple[Finding, ...]:
    """Every mistake found, proven ones first."""
    proven = list(_proven(diagnosis, examined.subject, request))
    codes = {finding.code for finding in proven}
    unproven = [
        finding for finding in _from_symptoms(diagnosis, probed, examined, prior, request) if finding.code not in codes
    ]
    return (*proven, *unproven)


def _proven(diagnosis: Diagnosis, subject: UserAttention, request: CheckRequest) -> Iterator[Finding]:
    candidate = diagnosis.candidate
    if candidate is None:
        return
    for applied in diagnosis.mistakes:
        error, tolerance, cases = diagnosis.proofs[applied.mistake.code]
        case = cases[0]
        observed = _observed(diagnosis, subject, case)
        indistinguishable = (applied, *diagnosis.alternatives.get(applied.mistake.code, ()))
        order = None if candidate.reading is None else candidate.reading.order
        chosen = by_source(indistinguishable, SourceEvidence(observed.operations, order))
        line, *other_lines = observed.lines_for(chosen.mistake, chosen.sites, subject.built)
        where = ", ".join(proof_case.name for proof_case in cases)
        others = tuple(other.mistake.code for other in diagnosis.mistakes if other is not applied)
        other_stages = stages_with(other for other in diagnosis.mistakes if other is not applied)
        example = smallest(subject, candidate.layer, other_stages, case, request.of.seed)
        lines = [
            f"matches exactly if {chosen.variant.description}: "
            f"largest difference {error_text(error)}, tolerance {error_text(tolerance)} ({where})"
            + (f", together with {' and '.join(others)}" if others else "")
        ]
        if example is not None:
            lines.append(_smallest_text(example))
        lines += [f"the same in line {other.line}: {other.source}" for other in other_lines if other.line is not None]
        parts = () if candidate.reading is None else candidate.reading.parts
        finding = finding_of(chosen.mistake, "\n".join(lines), line, error=error, tolerance=tolerance, together=others)
        names = _user_names(line, observed, subject, case, parts, candidate.layer)
        effect = chosen.variant.effect or finding.effect
        yield replace(finding, fix=in_user_names(finding.fix, names), effect=effect)


def _user_names(
    line: SourceLine,
    observed: SourceLocator,
    subject: UserAttention,
    case: InputCase,
    parts: Sequence[str],
    layer: ReferenceLayer,
) -> dict[str, str]:
    """Maps names in corrected expressions to the user's names in the function around a line, or to what they stand for."""
    function = function_around(line)
    if function is None:
        return {}
    sizes = {"n_heads": layer.n_heads, "d_head": layer.d_head}
    names = names_within(function, subject.built.module, parts, sizes) | dict(observed.names_in(function))
    if (scaled := names.pop("scaled", None)) is not None:
        names.setdefault("scores", scaled)
    if "z" not in names and {"pattern", "v"} <= {*names} and layer.n_kv_heads == layer.n_heads:
        names["z"] = f"({names['pattern']} @ {names['v']})"
    if "q" in names:
        names.setdefault("d_head", f"{names['q']}.size(-1)")
    mask = None if case.form is None else case.form.parameter
    if mask is not None and mask in (argument.arg for argument in function.args.args):
        names["mask"] = mask
    elif layer.causal and "length" in names and not mentions(function, "mask"):
        names["mask"] = f"torch.ones({names['length']}, {names['length']}).tril()"
    return names


def _smallest_text(small: Smallest) -> str:
    batch, q_len, k_len, error, largest, is_nan = small
    inputs = f"{batch} sequence{'s' if batch > 1 else ''} of "
    inputs += f"{q_len} token{'s' if q_len > 1 else ''}" if q_len == k_len else f"{q_len} queries and {k_len} keys"
    size = f" (its largest number is {largest:.3g})" if largest == largest else ""
    not_comparable = "NaN" if is_nan else "infinite or of another shape"
    result = not_comparable if error == float("inf") else f"off by {error:.3g}{size}"
    return f"smallest example, {inputs}: the output is {result}"


def _observed(diagnosis: Diagnosis, subject: UserAttention, case: InputCase) -> SourceLocator:
    assert diagnosis.candidate is not None
    try:
        return observe(subject, diagnosis.candidate.layer, stages_with(diagnosis.mistakes), case)
    except Exception:  # the call cannot be recorded
        return SourceLocator((), {})


def finding_of(
    mistake: Mistake,
    evidence: str,
    line: SourceLine,
    *,
    error: float | None = None,
    tolerance: float | None = None,
    together: tuple[str, ...] = (),
) -> Finding:
    """The finding for a mistake at a line; proven if there is an `error`."""
    words = mistake.words
    return Finding(
        code=mistake.code,
        message=words.explanation,
        evidence=evidence,
        fix=("scaled_dot_product_attention" in line.source and words.in_torch) or words.right,
        effect=words.effect,
        proven=error is not None,
        error=error,
        tolerance=tolerance,
        together_with=together,
        file=line.file,
        line=line.line,
        source=line.source,
    )


# ----------------------------------------------------------------------------------------------------------------- symptoms


def _from_symptoms(
    diagnosis: Diagnosis, probed: Probed, examined: Examined, prior: PriorKnowledge, request: CheckRequest
) -> Iterator[Finding]:
    """Mistakes that only probes show, first those that no hypothesis can prove."""
    subject, observed = examined.subject, SourceLocator((), {})
    symptoms = _symptoms(diagnosis, probed, examined, prior, request)
    results = [(mistake, mistake.symptom(symptoms)) for mistake in MISTAKES if mistake.symptom is not None]
    present = [(mistake, evidence) for mistake, evidence in results if evidence is not None]
    if present and diagnosis.cases and diagnosis.candidate is not None:
        observed = _observed(diagnosis, subject, diagnosis.cases[0])
    for mistake, evidence in sorted(
        present, key=lambda mistake_and_evidence: mistake_and_evidence[0].stage is not None
    ):
        line = observed.lines_for(mistake, (mistake.site,), subject.built)[0]
        yield finding_of(mistake, evidence, line)


def _symptoms(
    diagnosis: Diagnosis, probed: Probed, examined: Examined, prior: PriorKnowledge, request: CheckRequest
) -> Symptoms:
    facts, subject, candidate = probed.facts, examined.subject, diagnosis.candidate
    width, name = _width_of_queries(diagnosis, subject)
    has_default_width = not subject.is_function and stated(subject.built.arguments, "d_head") is None
    n_heads = next(iter(stated_heads(subject.built, subject.built.module, request)), 1) if has_default_width else 1
    return Symptoms(
        {probe.name: probe.message for probe in probed.probes},
        is_random=facts.is_random,
        is_random_with_dropout=facts.is_random_with_dropout,
        is_rescaled=facts.is_rescaled,
        keeps_state=examined.keeps_state and facts.keeps_state,
        remembers_masks=examined.keeps_state and not facts.keeps_state,
        largest_future=facts.largest_future,
        n_nan_rows=diagnosis.n_nan_rows,
        expects_causal=prior.hints.expects_causal,
        takes_mask=bool(subject.mask_forms),
        layer=None if candidate is None else candidate.layer,
        leaks_batch=_leaks_batch(diagnosis, probed),
        unused=() if diagnosis.is_right or diagnosis.mistakes else unused_projections(subject, request.of.seed),
        n_heads=n_heads,
        d_in=subject.sizes.d_in,
        query_width=width,
        query_name=name,
        may_be_narrow=_may_be_narrow(subject),
    )


def _leaks_batch(diagnosis: Diagnosis, probed: Probed) -> bool:
    """Whether sequences of a batch influence each other, and neither a known mistake nor chance nor state explains it."""
    is_explained = diagnosis.mistakes or probed.facts.is_random or probed.facts.keeps_state
    return not is_explained and any(probe.name == "batch independence" and probe.ok is False for probe in probed.probes)


def unused_projections(subject: UserAttention, seed: int) -> tuple[str, ...]:
    """The projections of a module with random weights that change no output. Biases do not count, because a key bias never
    changes one, and neither does a module with two modes, since one need not use the projections of the other."""
    module = subject.built.module
    if module is None or subject.mode is not None:
        return ()
    drawer = drawer_of(subject, seed)
    inputs = [drawer.inputs(with_context=with_context) for with_context in {False, subject.takes_context}]
    before = [call_attention(subject, each, seed=0).out for each in inputs]
    parts = [part for part in parts_of(module, {}) if part.letters and part.number is None]
    names = {part.name for part in parts} | {f"{part.name}.weight" for part in parts}
    unused = []
    for name, weight in module.named_parameters():
        if name not in names:
            continue
        original = weight.detach().clone()
        try:
            weight.data.mul_(-1.5).add_(0.1)
            after = [call_attention(subject, each, seed=0).out for each in inputs]
        finally:
            weight.data.copy_(original)
        if all(map(torch.equal, before, after)):
            unused.append(name)
    return tuple(unused)


def _may_be_narrow(subject: UserAttention) -> bool:
    """Whether a numeric argument may make it narrower inside, such as `downsample_rate=2`."""
    numbers = [
        name for name, value in subject.built.arguments.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and role_of(str(name).rpartition(".")[2]) is None
    ]  # fmt: skip
    return bool(numbers)


def _width_of_queries(diagnosis: Diagnosis, subject: UserAttention) -> tuple[int, str]:
    """The total width of all queries, and the name of the query projection."""
    candidate = diagnosis.candidate
    if candidate is not None and candidate.layer.weights is not None and candidate.reading is not None:
        return candidate.layer.weights.q.weight.shape[0], candidate.reading.parts[0]
    for part in parts_of(subject.built.module, subject.tensors):
        if (
            part.letters == "q"
            and part.number is None
            and part.weight.ndim == 2
            and subject.sizes.d_in in part.weight.shape
        ):
            return part.weight.numel() // subject.sizes.d_in, part.name
    return 0, ""


# ----------------------------------------------------------------------------------------------------------- contradictions


def contradictions(
    request: CheckRequest,
    facts: Sequence[str],
    diagnosis: Diagnosis,
    subject: UserAttention,
    comparison: OutputComparison | None,
) -> Iterator[Finding]:
    """A finding for each stated fact, `n_heads` or `scale`, that the matching layer contradicts; `comparison` is that of this
    layer."""
    assert diagnosis.candidate is not None
    layer, case = diagnosis.candidate.layer, diagnosis.cases[0]
    observed = _observed(diagnosis, subject, case)
    measured = comparison or OutputComparison("reference", "", 0, None, case.tolerance)
    error, tolerance, proof = measured.max_abs_difference, measured.tolerance, ""
    if error is not None:
        proof = f": largest difference {error_text(error)}, tolerance {error_text(tolerance)} ({case.name})"
    for fact in facts:
        if fact == "n_heads":
            finding, line = _heads_finding(request, layer, subject.built, subject.sizes.d_in), observed.line_of("q")
        else:
            line = observed.line_of("scaled")
            reading = diagnosis.candidate.reading
            names = _user_names(line, observed, subject, case, () if reading is None else reading.parts, layer)
            finding = _scale_finding(request, layer, case, names)
        yield replace(
            finding, evidence=finding.evidence + proof, proven=error is not None, error=error, tolerance=tolerance,
            file=line.file, line=line.line, source=line.source,
        )  # fmt: skip


def _heads_finding(request: CheckRequest, layer: ReferenceLayer, built: Built, d_in: int) -> Finding:
    n_heads, meant = layer.n_heads, request.n_heads or 1
    heads_text = f"{n_heads} head{'s' * (n_heads != 1)}"
    names = [name for name in built.arguments if role_of(name.rpartition(".")[2]) == "n_heads" and d_in % meant == 0]
    advice = f"build it with --arg {names[0]}={meant}, or " if names else ""
    return Finding(
        code="heads-not-as-stated",
        message=f"the code has {heads_text}, and --heads says {meant}",
        evidence=f"matches exactly with {heads_text}",
        fix=f"{advice}state --heads {n_heads}",
        effect="each head has other columns than intended",
    )


def _scale_finding(request: CheckRequest, layer: ReferenceLayer, case: InputCase, names: Mapping[str, str]) -> Finding:
    advice = ""
    if isinstance(layer.scale, Tensor):
        scale_text = "a learned number of each head"
    else:
        scale = (layer.d_head or case.rows.queries.shape[-1]) ** -0.5 if layer.scale is None else layer.scale
        scale_text = f"{scale:.4g}" + " = 1/√d_head" * (layer.scale is None)
        advice = f", or state --scale {scale:.4g}"
    return Finding(
        code="scale-not-as-stated",
        message=f"the code multiplies the scores by {scale_text}, and --scale says {request.scale:.4g}",
        evidence=f"matches exactly if the scores are multiplied by {scale_text}",
        fix=in_user_names(f"q @ k.transpose(-2, -1) * {request.scale:.4g}", names) + advice,
        effect="the softmax is sharper or flatter than intended",
    )


# -------------------------------------------------------------------------------------------- indistinguishable mistakes


def by_other_sizes(
    indistinguishable: Sequence[AppliedMistake],
    original: UserAttention,
    probed: Probed,
    causal: tuple[bool, ...],
    request: CheckRequest,
    stage: Stage,
) -> list[AppliedMistake]:
    """The mistakes that still match after a rebuild with another number of heads. For example, √d_model and d_head are both 8
    for 64 columns and 8 heads. All of the mistakes if it cannot be rebuilt."""
    built = original.built
    for changes in _other_heads(built):
        try:
            stage(f"building {built.name} with {', '.join(f'{name}={n}' for name, n in changes.items())}")
            modes = find_modes(limited(built.rebuild(changes), stage), request.of)
            subject = next((mode_subject for mode_subject in modes if mode_subject.mode == original.mode), modes[0])
            examined = with_random_weights(subject, probed, request.of.seed)
            properties = observed_properties(examined.subject, request.of.seed)
            intended = intended_layer(subject.built, examined.module, request, causal, properties)
            layers = [
                c.layer for c in candidates(examined.subject, examined.module, examined.tensors, intended, request)[:8]
            ]
            cases = list(core_cases(examined.subject, request.of.seed))
        except Exception:  # the code may not support these sizes
            continue
        remaining = [
            applied
            for applied in indistinguishable
            if any(evaluate(layer, (applied,), cases).matches for layer in layers)
        ]
        if remaining:
            return remaining
    return list(indistinguishable)


def _other_heads(built: Built) -> Iterator[dict[str, int]]:
    """Arguments for another number of heads."""
    for name, value in built.arguments.items():
        if role_of(str(name).rpartition(".")[2]) == "n_heads" and isinstance(value, int) and value > 0:
            yield from ({name: n} for n in (value // 2, value * 2, value // 3) if n > 1)
            return


def by_source(indistinguishable: Sequence[AppliedMistake], evidence: SourceEvidence) -> AppliedMistake:
    """The mistake that the source suggests, by the pairwise rules of the catalogue."""
    codes = {applied.mistake.code: applied for applied in indistinguishable}
    rivals = [applied for applied in codes.values() if _has_rule(applied, codes)]
    chosen, *others = rivals or indistinguishable[:1]
    for other in others:
        chosen = _preferred(chosen, other, evidence)
    return chosen


def _has_rule(applied: AppliedMistake, codes: Collection[str]) -> bool:
    """Whether a rule of the catalogue separates a mistake from one with another of these codes."""
    others = (BY_CODE[code] for code in codes if code != applied.mistake.code)
    return any(
        applied.mistake.code in other.rather_than or other.code in applied.mistake.rather_than for other in others
    )


def _preferred(applied: AppliedMistake, other: AppliedMistake, evidence: SourceEvidence) -> AppliedMistake:
    """The mistake that the source suggests; the first if no rule applies."""
    for first, second in ((applied, other), (other, applied)):
        is_first = first.mistake.rather_than.get(second.mistake.code)
        if is_first is not None:
            return first if is_first(evidence) else second
    return applied
