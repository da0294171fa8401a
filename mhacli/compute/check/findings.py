"""Findings from a diagnosis and from probes: the mistake, its proof, its line, and the smallest input that shows it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from mhacli.adapters.usercode.arguments import role_of, stated
from mhacli.adapters.usercode.call.find_call import find_modes
from mhacli.adapters.usercode.call.user_attention import UserAttention
from mhacli.adapters.usercode.names import function_around, in_user_names, names_within
from mhacli.adapters.usercode.process import SourceLine, Stage
from mhacli.adapters.usercode.projections import parts_of
from mhacli.adapters.usercode.types import Built
from mhacli.attention.mistakes import BY_CODE, MISTAKES, Mistake
from mhacli.attention.mistakes.stages import ReferenceLayer, SourceEvidence, Symptoms
from mhacli.compute.base.user_module import limited
from mhacli.compute.check.candidates import candidates, intended_layer, stated_heads
from mhacli.compute.check.diagnose import Diagnosis, PriorKnowledge
from mhacli.compute.check.hypotheses import (
    AppliedMistake,
    Smallest,
    SourceLocator,
    observe,
    smallest,
    stages_with,
    tried,
)
from mhacli.compute.check.inputs import Examined, InputCase, core_cases, with_own_weights
from mhacli.compute.check.observed_properties import observed_properties
from mhacli.compute.check.probes.catalogue import Probed
from mhacli.requests.user_code import CheckRequest
from mhacli.results.check import Finding, OutputComparison
from mhacli.spec.tolerances import error_text


def findings_of(
    diagnosis: Diagnosis, probed: Probed, examined: Examined, known: PriorKnowledge, request: CheckRequest
) -> tuple[Finding, ...]:
    """Every mistake that was found, the proven ones first."""
    proven = list(_proven(diagnosis, examined.subject, request))
    codes = {finding.code for finding in proven}
    seen = [one for one in _from_symptoms(diagnosis, probed, examined, known, request) if one.code not in codes]
    return (*proven, *seen)


def _proven(diagnosis: Diagnosis, subject: UserAttention, request: CheckRequest) -> Iterator[Finding]:
    candidate = diagnosis.candidate
    if candidate is None:
        return
    for made in diagnosis.made:
        case = _case_of(diagnosis, made)
        observed = _observed(diagnosis, subject, case)
        alike = (made, *diagnosis.alternatives.get(made.mistake.code, ()))
        order = None if candidate.reading is None else candidate.reading.order
        settled = by_source(alike, SourceEvidence(observed.operations, order))
        line, *more = observed.lines_for(settled.mistake, settled.sites, subject.built)
        error, tolerance, cases = diagnosis.proofs[made.mistake.code]
        where = ", ".join(one.name for one in cases)
        others = tuple(one.mistake.code for one in diagnosis.made if one is not made)
        others_alone = stages_with(one for one in diagnosis.made if one is not made)
        small = smallest(subject, candidate.layer, others_alone, case, request.of.seed)
        lines = [
            f"matches exactly if {settled.variant.description}: "
            f"largest difference {error_text(error)}, tolerance {error_text(tolerance)} ({where})"
            + (f", together with {' and '.join(others)}" if others else "")
        ]
        if small is not None:
            lines.append(_smallest_text(small))
        lines += [f"the same in line {other.line}: {other.source}" for other in more if other.line is not None]
        parts = () if candidate.reading is None else candidate.reading.parts
        finding = finding_of(settled.mistake, "\n".join(lines), line, error=error, tolerance=tolerance, together=others)
        names = _their_names(line, observed, subject, case, parts)
        if settled.mistake.stage == "scale":  # their variable holds what is scaled already
            names.pop("scores", None)
        effect = settled.variant.effect or finding.effect
        yield replace(finding, fix=in_user_names(finding.fix, names), effect=effect)


def _their_names(
    line: SourceLine, observed: SourceLocator, subject: UserAttention, case: InputCase, parts: Sequence[str]
) -> dict[str, str]:
    """What the author calls the things that corrected expressions speak of, in the function of a line."""
    function = function_around(line)
    if function is None:
        return {}
    names = names_within(function, subject.built.module, parts) | dict(observed.names_in(function))
    mask = None if case.form is None else case.form.parameter
    if mask is not None and mask in (one.arg for one in function.args.args):
        names["mask"] = mask
    return names


def _smallest_text(small: Smallest) -> str:
    batch, q_len, k_len, gap, largest, is_nan = small
    rows = f"{batch} sequence{'s' if batch > 1 else ''} of "
    rows += f"{q_len} token{'s' if q_len > 1 else ''}" if q_len == k_len else f"{q_len} queries and {k_len} keys"
    size = f" (its largest number is {largest:.3g})" if largest == largest else ""
    not_comparable = "NaN" if is_nan else "infinite or of another shape"
    words = not_comparable if gap == float("inf") else f"off by {gap:.3g}{size}"
    return f"smallest example, {rows}: the output is {words}"


def _case_of(diagnosis: Diagnosis, made: AppliedMistake) -> InputCase:
    """The first case in whose proof a mistake stands."""
    return diagnosis.proofs[made.mistake.code].cases[0]


def _observed(diagnosis: Diagnosis, subject: UserAttention, case: InputCase) -> SourceLocator:
    assert diagnosis.candidate is not None
    try:
        return observe(subject, diagnosis.candidate.layer, stages_with(diagnosis.made), case)
    except Exception:  # what cannot be watched has no lines
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
    """A mistake at its line; proven where there is an `error`."""
    return Finding(
        code=mistake.code,
        message=mistake.message,
        evidence=evidence,
        fix=("scaled_dot_product_attention" in line.source and mistake.fix_in_torch) or mistake.fix,
        effect=mistake.effect,
        proven=error is not None,
        error=error,
        tolerance=tolerance,
        together_with=together,
        file=line.file,
        line=line.line,
        source=line.source,
    )


# ----------------------------------------------------------------------------------------------------------- without a proof


def _from_symptoms(
    diagnosis: Diagnosis, probed: Probed, examined: Examined, known: PriorKnowledge, request: CheckRequest
) -> Iterator[Finding]:
    """Mistakes that probes alone show; those first of which there is no other proof."""
    subject, observed = examined.subject, SourceLocator((), {})
    seen = _symptoms(diagnosis, probed, examined, known, request)
    found = [(mistake, mistake.symptom(seen)) for mistake in MISTAKES if mistake.symptom is not None]
    shown = [(mistake, evidence) for mistake, evidence in found if evidence is not None]
    if shown and diagnosis.cases and diagnosis.candidate is not None:
        observed = _observed(diagnosis, subject, diagnosis.cases[0])
    for mistake, evidence in sorted(shown, key=lambda one: one[0].stage is not None):
        line = observed.lines_for(mistake, (mistake.site,), subject.built)[0]
        yield finding_of(mistake, evidence, line)


def _symptoms(
    diagnosis: Diagnosis, probed: Probed, examined: Examined, known: PriorKnowledge, request: CheckRequest
) -> Symptoms:
    facts, subject, candidate = probed.facts, examined.subject, diagnosis.candidate
    width, name = _width_of_queries(diagnosis, subject)
    is_told = not subject.is_function and stated(subject.built.arguments, "d_head") is None
    n_heads = next(iter(stated_heads(subject.built, subject.built.module, request)), 1) if is_told else 1
    return Symptoms(
        {probe.name: probe.message for probe in probed.probes},
        is_random=facts.is_random,
        is_random_with_dropout=facts.is_random_with_dropout,
        is_rescaled=facts.is_rescaled,
        keeps_state=examined.keeps_state and facts.keeps_state,
        remembers_masks=examined.keeps_state and not facts.keeps_state,
        largest_future=facts.largest_future,
        n_nan_rows=diagnosis.n_nan_rows,
        expects_causal=known.hints.expects_causal,
        takes_mask=bool(subject.mask_forms),
        layer=None if candidate is None else candidate.layer,
        n_heads=n_heads,
        d_in=subject.sizes.d_in,
        query_width=width,
        query_name=name,
        may_be_narrow=_may_be_narrow(subject),
    )


def _may_be_narrow(subject: UserAttention) -> bool:
    """Whether a number among its arguments may say that it is narrower inside, such as `downsample_rate=2`."""
    numbers = [
        name for name, value in subject.built.arguments.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and role_of(str(name).rpartition(".")[2]) is None
    ]  # fmt: skip
    return bool(numbers)


def _width_of_queries(diagnosis: Diagnosis, subject: UserAttention) -> tuple[int, str]:
    """How many columns all queries have together, and what makes them."""
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


# --------------------------------------------------------------------------------- what is stated and the code contradicts


def contradictions(
    request: CheckRequest,
    facts: Sequence[str],
    diagnosis: Diagnosis,
    subject: UserAttention,
    comparison: OutputComparison | None,
) -> Iterator[Finding]:
    """A finding for each of the facts, `n_heads` or `scale`, that the request states and the layer that was found contradicts;
    `comparison` is that of this layer."""
    assert diagnosis.candidate is not None
    layer, case = diagnosis.candidate.layer, diagnosis.cases[0]
    observed = _observed(diagnosis, subject, case)
    measured = comparison or OutputComparison("reference", "", 0, None, case.tolerance)
    error, tolerance, proof = measured.max_abs_difference, measured.tolerance, ""
    if error is not None:
        proof = f": largest difference {error_text(error)}, tolerance {error_text(tolerance)} ({case.name})"
    for fact in facts:
        if fact == "n_heads":
            finding, line = _of_heads(request, layer, subject.built, subject.sizes.d_in), observed.line_of("q")
        else:
            finding, line = _of_scale(request, layer, case), observed.line_of("scaled")
        yield replace(
            finding, evidence=finding.evidence + proof, proven=error is not None, error=error, tolerance=tolerance,
            file=line.file, line=line.line, source=line.source,
        )  # fmt: skip


def _of_heads(request: CheckRequest, layer: ReferenceLayer, built: Built, d_in: int) -> Finding:
    n_heads, meant = layer.n_heads, request.n_heads or 1
    has = f"{n_heads} head{'s' * (n_heads != 1)}"
    names = [name for name in built.arguments if role_of(name.rpartition(".")[2]) == "n_heads" and d_in % meant == 0]
    built_so = f"build it with --arg {names[0]}={meant}, or " if names else ""
    return Finding(
        code="heads-not-as-stated",
        message=f"the code has {has}, and --heads says {meant}",
        evidence=f"matches exactly with {has}",
        fix=f"{built_so}state --heads {n_heads}",
        effect="each head has other columns than intended",
    )


def _of_scale(request: CheckRequest, layer: ReferenceLayer, case: InputCase) -> Finding:
    if isinstance(layer.scale, Tensor):
        has = "a learned number of each head"
    elif layer.scale is None:
        d_head = layer.d_head or case.rows.queries.shape[-1]
        has = f"{d_head**-0.5:.4g} = 1/√d_head"
    else:
        has = f"{layer.scale:.4g}"
    return Finding(
        code="scale-not-as-stated",
        message=f"the code multiplies the scores by {has}, and --scale says {request.scale:.4g}",
        evidence=f"matches exactly if the scores are multiplied by {has}",
        fix=f"scores = qk * {request.scale:.4g}",
        effect="the softmax is sharper or flatter than intended",
    )


# ----------------------------------------------------------------------------------- mistakes that give the same numbers


def by_other_sizes(
    alike: Sequence[AppliedMistake],
    asked: UserAttention,
    probed: Probed,
    causal: tuple[bool, ...],
    request: CheckRequest,
    stage: Stage,
) -> list[AppliedMistake]:
    """Those of some mistakes that still give what is answered when it is built with another number of heads: √d_model and d_head
    are both 8 at 64 columns and 8 heads. All of them where it cannot be built so."""
    built = asked.built
    for changes in _other_heads(built):
        try:
            stage(f"building {built.name} with {', '.join(f'{name}={n}' for name, n in changes.items())}")
            modes = find_modes(limited(built.rebuild(changes), stage), request.of)
            subject = next((one for one in modes if one.mode == asked.mode), modes[0])
            examined = with_own_weights(subject, probed, request.of.seed)
            properties = observed_properties(examined.subject, request.of.seed)
            intended = intended_layer(subject.built, examined.module, request, causal, properties)
            layers = [
                c.layer for c in candidates(examined.subject, examined.module, examined.tensors, intended, request)[:8]
            ]
            cases = list(core_cases(examined.subject, request.of.seed))
        except Exception:  # sizes that its author did not think of
            continue
        left = [made for made in alike if any(tried(layer, (made,), cases).matches for layer in layers)]
        if left:
            return left
    return list(alike)


def _other_heads(built: Built) -> Iterator[dict[str, int]]:
    """Arguments that give it another number of heads."""
    for name, value in built.arguments.items():
        if role_of(str(name).rpartition(".")[2]) == "n_heads" and isinstance(value, int) and value > 0:
            yield from ({name: n} for n in (value // 2, value * 2, value // 3) if n > 1)
            return


def by_source(alike: Sequence[AppliedMistake], written: SourceEvidence) -> AppliedMistake:
    """The one that the author's lines show: the entries of the catalogue tell two of them from each other."""
    codes = {made.mistake.code: made for made in alike}
    rivals = [made for made in codes.values() if _rules(made, codes)]
    chosen, *others = rivals or alike[:1]
    for other in others:
        chosen = _preferred(chosen, other, written)
    return chosen


def _rules(made: AppliedMistake, codes: Collection[str]) -> bool:
    """Whether an entry tells a mistake from another of these codes."""
    others = (BY_CODE[code] for code in codes if code != made.mistake.code)
    return any(made.mistake.code in other.rather_than or other.code in made.mistake.rather_than for other in others)


def _preferred(one: AppliedMistake, other: AppliedMistake, written: SourceEvidence) -> AppliedMistake:
    """Which of two mistakes the lines show; the first where nothing tells them apart."""
    for first, second in ((one, other), (other, one)):
        is_first = first.mistake.rather_than.get(second.mistake.code)
        if is_first is not None:
            return first if is_first(written) else second
    return one
