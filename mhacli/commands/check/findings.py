"""Findings from a diagnosis and from probes: each mistake with its evidence, its line, and the smallest example."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mhacli.attention.mistakes.stages import words_of_mistake
from mhacli.commands.check.candidates import stated_heads
from mhacli.commands.check.diagnose import Diagnosis
from mhacli.commands.check.hypotheses import SourceLocator, error_of, recorded, smallest
from mhacli.commands.check.inputs import Examined, InputCase, output_for
from mhacli.commands.check.probes import with_dropout
from mhacli.commands.check.result import Finding
from mhacli.errors import first_names
from mhacli.text.numbers import shown
from mhacli.usercode.build import seeded
from mhacli.usercode.graph import Operation, watch
from mhacli.usercode.names import function_around, in_user_names, names_on, names_within
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import parts_of
from mhacli.usercode.roles import role_of, stated
from mhacli.usercode.user_attention import UserAttention


def findings_of(diagnosis: Diagnosis, examined: Examined) -> tuple[Finding, ...]:
    """Every mistake found: statements that the code contradicts, proven mistakes, and those that only measurements show."""
    proven = [*_contradictions(diagnosis, examined), *_proven(diagnosis, examined)]
    codes = {finding.code for finding in proven}
    return (*proven, *(finding for finding in _measured(diagnosis, examined) if finding.code not in codes))


def _proven(diagnosis: Diagnosis, examined: Examined) -> Iterator[Finding]:
    subject = examined.subject
    for mistake in diagnosis.mistakes:
        error, cases = diagnosis.proofs[mistake.code]
        run = _located(diagnosis, examined, cases[0])
        line, *other_lines = run.lines_for(mistake.at, mistake.sites, subject.built)
        others = tuple(other for other in diagnosis.mistakes if other is not mistake)
        codes = tuple(other.code for other in others)
        together = f", together with {' and '.join(codes)}" if codes else ""
        proof = f"matches exactly if {mistake.description}: {_in_numbers(error, cases)}{together}"
        example = smallest(subject, diagnosis.layer, others, cases[0], examined.request.of.seed)
        lines = [proof, example] + [f"the same in line {at.line}: {at.source}" for at in other_lines if at.line]
        evidence = "\n".join(line for line in lines if line is not None)
        finding = finding_of(mistake.code, evidence, line, form=mistake.form)
        names = _user_names(line, run, examined, cases[0], diagnosis)
        if mistake.stage == "project":
            names |= names_on(line, mistake.sites[0][0])
        tolerance = max(case.tolerance for case in cases)
        yield replace(
            finding, fix=in_user_names(finding.fix, names), proven=True, error=error * tolerance, tolerance=tolerance,
            together_with=codes,
        )  # fmt: skip


def _in_numbers(error: float, cases: Sequence[InputCase]) -> str:
    tolerance, where = max(case.tolerance for case in cases), ", ".join(case.name for case in cases)
    return f"largest difference {shown(error * tolerance, 'error')}, tolerance {shown(tolerance, 'error')} ({where})"


def _located(diagnosis: Diagnosis, examined: Examined, case: InputCase) -> SourceLocator:
    """The recorded run of a case, with the sites of the diagnosed layer."""
    run = recorded(examined.subject, case)
    return run.at_sites(diagnosis.layer, diagnosis.mistakes, case)


def finding_of(code: str, evidence: str, line: SourceLine, *, form: str = "") -> Finding:
    """The finding for a mistake at a line."""
    words = words_of_mistake(code, form)
    return Finding(
        code=code,
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
    parts = () if reading is None else reading.parts
    names = names_within(function, examined.subject.built.module, parts=parts, sizes=sizes)
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
    elif layer.causal and "length" in names and "mask" not in ast.unparse(function):
        names["mask"] = f"torch.ones({names['length']}, {names['length']}).tril()"
    return names


# ----------------------------------------------------------------------------------------------- shown by measurements


_LINES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "head-width": ((), ("q",)),
    "heads-missing": ((), ("qk",)),
    "causal-missing": ((), ("scores",)),
    "fully-masked-row": ((), ("pattern",)),
    "dropout-in-eval": ((r"dropout\(", "scaled_dot_product_attention"), ("pattern",)),
    "dropout-not-rescaled": (("bernoulli", "rand", "dropout"), ("pattern",)),
    "state-kept-between-calls": ((r"self\.\w+\s*[-+*/]?=(?!=)|\.append\(|\.copy_\(|if self\.\w+ is None",), ("k",)),
}
"""What finds the line of a mistake: patterns, the likelier first, else sites."""


def _measured(diagnosis: Diagnosis, examined: Examined) -> Iterator[Finding]:
    """Mistakes that only measurements show."""
    built, run = examined.subject.built, SourceLocator((), {})
    if diagnosis.shown is not None and diagnosis.likeliest is not None:
        case, mistake = diagnosis.cases[0], diagnosis.shown
        shown_run = recorded(examined.subject, case).at_sites(diagnosis.likeliest.layer, (mistake,), case)
        line = shown_run.lines_for(mistake.at, mistake.sites, built)[0]
        evidence = f"the weighted values match if {mistake.description}; what is done with them is not understood"
        yield finding_of(mistake.code, evidence, line, form=mistake.form)
    for code, evidence in _measured_codes(diagnosis, examined):
        if diagnosis.candidate is not None:
            run = _located(diagnosis, examined, diagnosis.cases[0])
        unsteady = _first_that_varies(examined) if code == "dropout-in-eval" else None
        patterns, sites = _LINES.get(code, ((), ()))
        line = run.lines_for(patterns, sites, built)[0] if unsteady is None else unsteady.at
        yield finding_of(code, evidence, line)


def _measured_codes(diagnosis: Diagnosis, examined: Examined) -> Iterator[tuple[str, str]]:
    """The codes of mistakes that only measurements show, each with its evidence."""
    subject, probed = examined.subject, examined.probed
    messages = {result.name: result.message for result in probed.probes}
    yield from _wrong_heads(diagnosis, examined)
    if diagnosis.n_nan_rows:
        rows = f"{diagnosis.n_nan_rows} rows of the output are NaN when padding stands on the left"
        yield "fully-masked-row", f"{rows}: its own causal mask leaves them no key"
    if probed.is_random:
        yield "dropout-in-eval", messages["determinism"]
    elif probed.is_random_with_dropout:
        yield "dropout-in-eval", messages["dropout in eval"]
    if probed.is_rescaled is False:
        yield "dropout-not-rescaled", messages["dropout in training"]
    if probed.keeps_state:
        yield "state-kept-between-calls", messages["determinism"]
    if not (diagnosis.is_right or diagnosis.mistakes):
        unused = unused_projections(subject, examined.request.of.seed)
        if unused:
            yield "unused-parameters", f"no output depends on {first_names(unused, 4)}"
    is_unexplained = diagnosis.candidate is None and not subject.mask_forms
    if examined.expects_causal and is_unexplained and (probed.largest_future or 0) > 0:
        yield "causal-missing", f"a later token changes an earlier output by up to {probed.largest_future:.0%}"


def _wrong_heads(diagnosis: Diagnosis, examined: Examined) -> Iterator[tuple[str, str]]:
    """Heads of another width, or in another number, than is stated; nothing where a width is stated."""
    arguments, width = examined.subject.built.arguments, examined.subject.sizes.d_in
    n_heads = stated_heads(examined) or 1
    if diagnosis.candidate is None or n_heads == 1 or stated(arguments, "d_head") is not None:
        return
    layer, reading = diagnosis.layer, diagnosis.candidate.reading
    if layer.weights is None or reading is None:
        return
    query_width = layer.weights.q.weight.shape[0]
    joins_heads = layer.weights.out is not None
    numbers = [name for name, value in arguments.items() if type(value) in (int, float)]
    may_be_narrow = any(role_of(str(name).rpartition(".")[2]) is None for name in numbers)  # as by downsample_rate=2
    if joins_heads and layer.n_heads == 1:
        yield "heads-missing", f"matches exactly if there is one head, where {n_heads} are given"
    if query_width * n_heads == width and joins_heads and not may_be_narrow:
        widths = f"{reading.parts[0]} makes {query_width} columns of {width}"
        yield "head-width", f"{widths}; {n_heads} heads of {query_width} columns are {width}"
    elif layer.d_head == n_heads and layer.n_heads not in (1, n_heads):
        heads = f"matches exactly if there are {layer.n_heads} heads of {n_heads} columns"
        yield "head-width", f"{heads}, where {n_heads} heads of {layer.n_heads} columns are given"


def _first_that_varies(examined: Examined) -> Operation | None:
    """The first operation, on a line of user code, that gives another result in a second call with the same input; None if there
    is none, and for a function."""
    subject = examined.subject
    if subject.built.module is None:
        return None
    try:
        subject = subject.of(with_dropout(subject.built.module, 0.5)[0].eval(), subject.dtype)
        inputs = subject.drawer(examined.request.of.seed).inputs(with_context=False)
        runs = []
        for seed in range(2):
            with seeded(seed, subject.device):
                runs.append(watch(lambda: output_for(subject, inputs), subject.built.file)[1])
    except Exception:  # user code may raise anything
        return None
    steps = zip(*runs, strict=False)
    pairs = ((op, op.output, again.output) for op, again in steps if op.at.line is not None)
    same_shape = ((op, a.nan_to_num(), b.nan_to_num()) for op, a, b in pairs if a.shape == b.shape)
    return next((op for op, output, again in same_shape if not torch.equal(output, again)), None)


def unused_projections(subject: UserAttention, seed: int) -> tuple[str, ...]:
    """The projections of a module with random weights that change no output. Biases do not count, because a key bias never
    changes one, and neither does a module with two modes, since one need not use the projections of the other."""
    module = subject.built.module
    if module is None or subject.mode is not None:
        return ()
    drawer = subject.drawer(seed)
    inputs = [drawer.inputs(with_context=with_context) for with_context in {False, subject.takes_context}]
    before = [subject(each, seed=0) for each in inputs]
    parts = [part for part in parts_of(module, {}) if part.letters and part.number is None]
    names = {part.name for part in parts} | {f"{part.name}.weight" for part in parts}
    unused = []
    for name, weight in [pair for pair in module.named_parameters() if pair[0] in names]:
        original = weight.detach().clone()
        try:
            weight.data.mul_(-1.5).add_(0.1)
            after = [subject(each, seed=0) for each in inputs]
        finally:
            weight.data.copy_(original)
        if all(map(torch.equal, before, after)):
            unused.append(name)
    return tuple(unused)


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
