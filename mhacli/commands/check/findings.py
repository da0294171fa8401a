"""Findings from a diagnosis and from probes: each mistake with its evidence, its line, and the smallest example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mhacli.attention.mistakes import MISTAKES, Mistake
from mhacli.attention.mistakes.stages import Symptoms
from mhacli.commands.check.candidates import stated_heads
from mhacli.commands.check.diagnose import Diagnosis
from mhacli.commands.check.hypotheses import SourceLocator, error_of, recorded, smallest
from mhacli.commands.check.inputs import Examined, InputCase, output_for
from mhacli.commands.check.result import Finding
from mhacli.text.numbers import shown
from mhacli.usercode.arguments import role_of, stated
from mhacli.usercode.call.user_attention import UserAttention, call_attention, drawer_of
from mhacli.usercode.inputs import seeded
from mhacli.usercode.names import function_around, in_user_names, mentions, names_on, names_within
from mhacli.usercode.operations import watch
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import parts_of
from mhacli.usercode.types import Operation


def findings_of(diagnosis: Diagnosis, examined: Examined) -> tuple[Finding, ...]:
    """Every mistake found: statements that the code contradicts, proven mistakes, and those that only probes show."""
    proven = [*_contradictions(diagnosis, examined), *_proven(diagnosis, examined)]
    codes = {finding.code for finding in proven}
    return (*proven, *(finding for finding in _from_symptoms(diagnosis, examined) if finding.code not in codes))


def _proven(diagnosis: Diagnosis, examined: Examined) -> Iterator[Finding]:
    subject = examined.subject
    for applied in diagnosis.mistakes:
        error, cases = diagnosis.proofs[applied.mistake.code]
        run = _located(diagnosis, examined, cases[0])
        line, *other_lines = run.lines_for(applied.mistake, applied.sites, subject.built)
        others = tuple(other for other in diagnosis.mistakes if other is not applied)
        codes = tuple(other.mistake.code for other in others)
        together = f", together with {' and '.join(codes)}" if codes else ""
        proof = f"matches exactly if {applied.variant.description}: {_in_numbers(error, cases)}{together}"
        example = smallest(subject, diagnosis.layer, others, cases[0], examined.request.of.seed)
        lines = [proof, example] + [f"the same in line {at.line}: {at.source}" for at in other_lines if at.line]
        evidence = "\n".join(line for line in lines if line is not None)
        finding = finding_of(applied.mistake, evidence, line)
        names = _user_names(line, run, examined, cases[0], diagnosis)
        if applied.mistake.stage == "project":
            names |= names_on(line, applied.mistake.site[0])
        tolerance = max(case.tolerance for case in cases)
        yield replace(
            finding, fix=in_user_names(finding.fix, names), effect=applied.variant.effect or finding.effect, proven=True,
            error=error * tolerance, tolerance=tolerance, together_with=codes,
        )  # fmt: skip


def _in_numbers(error: float, cases: Sequence[InputCase]) -> str:
    tolerance, where = max(case.tolerance for case in cases), ", ".join(case.name for case in cases)
    return f"largest difference {shown(error * tolerance, 'error')}, tolerance {shown(tolerance, 'error')} ({where})"


def _located(diagnosis: Diagnosis, examined: Examined, case: InputCase) -> SourceLocator:
    """The recorded run of a case, with the sites of the diagnosed layer."""
    run = recorded(examined.subject, case)
    return run.at_sites(diagnosis.layer, diagnosis.mistakes, case)


def finding_of(mistake: Mistake, evidence: str, line: SourceLine) -> Finding:
    """The finding for a mistake at a line."""
    words = mistake.words
    return Finding(
        code=mistake.code,
        message=words.explanation,
        evidence=evidence,
        fix=("scaled_dot_product_attention" in line.source and words.in_torch) or words.right,
        effect=words.effect,
        file=line.file,
        line=line.line,
        source=line.source,
    )


def _user_names(
    line: SourceLine, run: SourceLocator, examined: Examined, case: InputCase, diagnosis: Diagnosis
) -> dict[str, str]:
    """Maps names in corrected expressions to the user's names in the function around a line, or to what they stand for."""
    function, layer = function_around(line), diagnosis.layer
    if function is None:
        return {}
    reading = None if diagnosis.candidate is None else diagnosis.candidate.reading
    sizes = {"n_heads": layer.n_heads, "d_head": layer.d_head}
    names = names_within(function, examined.subject.built.module, () if reading is None else reading.parts, sizes)
    names |= dict(run.names_in(function))
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


# ----------------------------------------------------------------------------------------------------------------- symptoms


def _from_symptoms(diagnosis: Diagnosis, examined: Examined) -> Iterator[Finding]:
    """Mistakes that only probes show, first those that no hypothesis can prove."""
    symptoms = _symptoms(diagnosis, examined)
    built = examined.subject.built
    results = [(mistake, mistake.symptom(symptoms)) for mistake in MISTAKES if mistake.symptom is not None]
    present = [(mistake, evidence) for mistake, evidence in results if evidence is not None]
    run = SourceLocator((), {})
    if present and diagnosis.candidate is not None:
        run = _located(diagnosis, examined, diagnosis.cases[0])
    for mistake, evidence in sorted(present, key=lambda one: one[0].stage is not None):
        unsteady = _first_that_varies(examined) if mistake.code == "dropout-in-eval" else None
        lines = [unsteady.at] if unsteady is not None else run.lines_for(mistake, (mistake.site,), built)
        yield finding_of(mistake, evidence, lines[0])


def _first_that_varies(examined: Examined) -> Operation | None:
    """The first operation, on a line of user code, that gives another result in a second call with the same input; None if there
    is none, or if the code cannot be built with dropout."""
    subject, facts = examined.subject, examined.probed.facts
    try:
        module = subject.built.rebuild(dict.fromkeys(facts.dropout_names, 0.5)).module
        assert module is not None
        subject = subject.of(module.to(subject.dtype).eval(), subject.dtype)
        inputs = drawer_of(subject, examined.request.of.seed).inputs(with_context=False)
        runs = []
        for seed in range(2):
            with seeded(seed, subject.device):
                runs.append(watch(lambda: output_for(subject, inputs), subject.built.files)[1])
    except Exception:  # the constructor may reject it, and user code may raise anything
        return None
    steps = zip(*runs, strict=False)
    return next((op for op, again in steps if op.line is not None and _differs(op.output, again.output)), None)


def _differs(output: Tensor, again: Tensor) -> bool:
    return output.shape == again.shape and not torch.equal(output.nan_to_num(), again.nan_to_num())


def _symptoms(diagnosis: Diagnosis, examined: Examined) -> Symptoms:
    probed, subject, facts = examined.probed, examined.subject, examined.probed.facts
    weights = None if diagnosis.candidate is None else diagnosis.layer.weights
    reading = None if diagnosis.candidate is None else diagnosis.candidate.reading
    has_default_width = not subject.is_function and stated(subject.built.arguments, "d_head") is None
    is_explained = diagnosis.mistakes or facts.is_random or facts.keeps_state
    leaks = any(result.name == "batch independence" and result.ok is False for result in probed.probes)
    return Symptoms(
        {result.name: result.message for result in probed.probes},
        is_random=facts.is_random,
        is_random_with_dropout=facts.is_random_with_dropout,
        is_rescaled=facts.is_rescaled,
        keeps_state=facts.keeps_state,
        largest_future=facts.largest_future,
        n_nan_rows=diagnosis.n_nan_rows,
        expects_causal=examined.expects_causal,
        takes_mask=bool(subject.mask_forms),
        layer=None if diagnosis.candidate is None else diagnosis.layer,
        leaks_batch=leaks and not is_explained,
        unused=()
        if diagnosis.is_right or diagnosis.mistakes
        else unused_projections(subject, examined.request.of.seed),
        n_heads=(stated_heads(examined) or 1) if has_default_width else 1,
        d_in=subject.sizes.d_in,
        query_width=0 if weights is None else weights.q.weight.shape[0],
        query_name="" if reading is None else reading.parts[0],
        may_be_narrow=_may_be_narrow(subject.built.arguments),
    )


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
    for name, weight in [pair for pair in module.named_parameters() if pair[0] in names]:
        original = weight.detach().clone()
        try:
            weight.data.mul_(-1.5).add_(0.1)
            after = [call_attention(subject, each, seed=0).out for each in inputs]
        finally:
            weight.data.copy_(original)
        if all(map(torch.equal, before, after)):
            unused.append(name)
    return tuple(unused)


def _may_be_narrow(arguments: Mapping[str, object]) -> bool:
    """Whether a numeric argument may make it narrower inside, such as `downsample_rate=2`."""
    numbers = [name for name, value in arguments.items() if type(value) in (int, float)]
    return any(role_of(str(name).rpartition(".")[2]) is None for name in numbers)


# ----------------------------------------------------------------------------------------------------------- contradictions


def _contradictions(diagnosis: Diagnosis, examined: Examined) -> Iterator[Finding]:
    """A finding for each statement, of heads or scale, that the matching layer contradicts."""
    if diagnosis.candidate is None or not diagnosis.candidate.contradicts:
        return
    case = diagnosis.cases[0]
    error = error_of(diagnosis.layer, diagnosis.mistakes, [case])
    run = _located(diagnosis, examined, case)
    for statement in diagnosis.candidate.contradicts:
        line = run.line_of("q" if statement == "n_heads" else "scaled")
        if statement == "n_heads":
            finding = _heads_finding(diagnosis, examined)
        else:
            finding = _scale_finding(diagnosis, examined, _user_names(line, run, examined, case, diagnosis))
        yield replace(
            finding, evidence=f"{finding.evidence}: {_in_numbers(error, [case])}", proven=True, error=error * case.tolerance,
            tolerance=case.tolerance, file=line.file, line=line.line, source=line.source,
        )  # fmt: skip


def _heads_finding(diagnosis: Diagnosis, examined: Examined) -> Finding:
    n_heads, meant = diagnosis.layer.n_heads, examined.request.n_heads or 1
    subject, heads_text = examined.subject, f"{n_heads} head{'s' * (n_heads != 1)}"
    names = [name for name in subject.built.arguments if role_of(name.rpartition(".")[2]) == "n_heads"]
    advice = f"build it with --arg {names[0]}={meant}, or " if names and subject.sizes.d_in % meant == 0 else ""
    return Finding(
        code="heads-not-as-stated",
        message=f"the code has {heads_text}, and --heads says {meant}",
        evidence=f"matches exactly with {heads_text}",
        fix=f"{advice}state --heads {n_heads}",
        effect="each head has other columns than intended",
    )


def _scale_finding(diagnosis: Diagnosis, examined: Examined, names: Mapping[str, str]) -> Finding:
    layer, meant, advice = diagnosis.layer, examined.request.scale, ""
    if isinstance(layer.scale, Tensor):
        scale_text = "a learned number of each head"
    else:
        d_head = layer.d_head or diagnosis.cases[0].rows.queries.shape[-1]
        scale = d_head**-0.5 if layer.scale is None else layer.scale
        scale_text = f"{scale:.4g}" + " = 1/√d_head" * (layer.scale is None)
        advice = f", or state --scale {scale:.4g}"
    return Finding(
        code="scale-not-as-stated",
        message=f"the code multiplies the scores by {scale_text}, and --scale says {meant:.4g}",
        evidence=f"matches exactly if the scores are multiplied by {scale_text}",
        fix=in_user_names(f"q @ k.transpose(-2, -1) * {meant:.4g}", names) + advice,
        effect="the softmax is sharper or flatter than intended",
    )
