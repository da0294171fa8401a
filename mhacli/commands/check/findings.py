"""Findings from a diagnosis and from probes: each mistake with its evidence, its line, and the
smallest example.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.mistakes import DROPPED
from mhacli.attention.stages import Mistake, ReferenceLayer
from mhacli.attention.taps import largest_difference
from mhacli.commands.check.candidates import base_of, counts_of, numbers_of, score_biases_in
from mhacli.commands.check.diagnose import Diagnosis, error_of
from mhacli.commands.check.layer_sites import LayerSites, sites_in
from mhacli.commands.check.probes import RAISED_DROPOUT, InputCase, ProbedAttention, with_dropout
from mhacli.commands.check.result import Finding, finding_of, words_of_code
from mhacli.errors import first_names
from mhacli.text.numbers import shown
from mhacli.usercode.build import copied
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.faults import SourceLine
from mhacli.usercode.graph import recorded
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.names import function_around, in_user_names, names_within
from mhacli.usercode.projections import read_name
from mhacli.usercode.roles import role_of, stated


def findings_of(diagnosis: Diagnosis, probed: ProbedAttention) -> tuple[Finding, ...]:
    """Every mistake found: statements that the code contradicts, proven mistakes, and those that
    only measurements show.
    """
    sites = LayerSites(diagnosis.call)
    if diagnosis.candidate is not None:
        sites = sites_in(diagnosis.call, diagnosis.layer, diagnosis.mistakes)
    proven = [*_contradictions(diagnosis, probed, sites), *_proven(diagnosis, probed)]
    codes = {finding.code for finding in proven}
    measured = list[Finding]()
    with suppress(OutOfTime):  # then the diagnosis says that it was not ended
        measured += _measured(diagnosis, probed, sites)
    return (*proven, *(finding for finding in measured if finding.code not in codes))


def _sentence(mistake: Mistake) -> str:
    """What a mistake is, in words."""
    explanation = words_of_code(mistake.name).explanation
    return f"{explanation} ({mistake.detail})" if mistake.detail else explanation


def _proof(error: float, cases: Sequence[InputCase]) -> tuple[str, dict[str, Any]]:
    """The numbers of a proof in words, and as fields of its finding; `error` is relative to the
    tolerance.
    """
    tolerance, where = max(case.tolerance for case in cases), ", ".join(case.name for case in cases)
    words = (
        f"largest difference {shown(error * tolerance, 'error')}, tolerance"
        f" {shown(tolerance, 'error')} ({where})"
    )
    return words, {"proven": True, "error": error * tolerance, "tolerance": tolerance}


def _proven(diagnosis: Diagnosis, probed: ProbedAttention) -> Iterator[Finding]:
    for mistake, (error, trial) in diagnosis.proofs.items():
        case = trial.cases[0]
        numbers, proof = _proof(error, trial.cases)
        sites = sites_in(trial.call, diagnosis.layer, diagnosis.mistakes)
        at = mistake.at
        if case.form is not None and mistake.stage in ("mask_rule", "padding_rule"):
            at = (*at, rf"(masked_fill|where\().*\b{case.form.parameter}\b")
        line = sites.line_for(at, mistake.site, probed.subject.built)
        before = [op for role in "qk" for op in trial.call.path(role) if len(op.sources) == 1]
        scaled = {op.at for op in before if op.name.rstrip("_") in ("mul", "div")}
        if mistake.stage == "scale" and len(scaled) == 1 and not re.search("[*/]", line.source):
            (line,) = scaled
        codes = tuple(other.code for other in diagnosis.mistakes if other is not mistake)
        together = f", together with {' and '.join(codes)}" if codes else ""
        evidence = f"matches exactly if {_sentence(mistake)}: {numbers}{together}"
        names = _user_names(line, sites, probed, case, diagnosis)
        letter, giver = mistake.site[0], mistake.code.partition("-from-")[2][:1]
        taking, given = (
            names.get(f"self.{each}_proj", f"self.{each}_proj") for each in (letter, giver)
        )
        if mistake.stage == "project":
            names["self.q_proj"] = taking
        finding = finding_of(mistake.name, evidence, line, together_with=codes, **proof)
        fix = in_user_names(finding.fix, names)
        assigned = "".join(
            read_name(name)[0] for name in re.findall(r"\w+", line.source.rpartition(" = ")[0])
        )
        if line.source.count(f"{given}(") == 1 and giver not in assigned:
            fix = line.source.replace(f"{given}(", f"{taking}(")
        yield replace(finding, fix=(DROPPED in mistake.at and _with_result_kept(line)) or fix)


def _with_result_kept(line: SourceLine) -> str:
    """A line that fills or adds to scores but does not keep the result, with it kept; empty for any
    other.
    """
    function = function_around(line)
    alone = (
        []
        if function is None
        else [each.lineno for each in ast.walk(function) if isinstance(each, ast.Expr)]
    )
    dropped = re.match(DROPPED, line.source)
    return "" if dropped is None or line.line not in alone else f"{dropped[1]} = {line.source}"


def _contradictions(
    diagnosis: Diagnosis, probed: ProbedAttention, sites: LayerSites
) -> Iterator[Finding]:
    """A finding for each statement, of heads or scale, that the matching layer contradicts, for
    each of its biases that is a mistake, and for heads of another width or number than the
    arguments give.
    """
    if diagnosis.candidate is None:
        return
    request, layer, case = probed.request, diagnosis.layer, diagnosis.cases[0]
    numbers, proof = _proof(error_of(layer, diagnosis.mistakes, [case]), [case])
    for option in diagnosis.candidate.contradicts(request):
        if option == "heads":
            line, actual, claim = sites.line_of("q"), str(layer.n_heads), str(request.n_heads)
            what = f"{actual} heads"
        else:
            scale = (
                (layer.d_head or case.inputs.queries.shape[-1]) ** -0.5
                if layer.scale is None
                else layer.scale
            )
            actual = "a learned number" if isinstance(scale, Tensor) else f"{scale:.4g}"
            line, what, claim = (
                sites.line_of("scaled"),
                f"scores times {actual}",
                f"{request.scale:.4g}",
            )
        message = f"the code has {what}, and --{option} says {claim}"
        fix = f"write it for --{option} {claim}, or state --{option} {actual}"
        evidence = f"matches exactly with {what}: {numbers}"
        yield finding_of(
            f"{option}-not-as-stated", evidence, line, message=message, fix=fix, **proof
        )
    for bias in score_biases_in(diagnosis.call):
        if bias.mistake:
            yield finding_of(
                bias.mistake, f"matches exactly with this bias: {numbers}", bias.at, **proof
            )
    yield from _rates_of_another_width(diagnosis, probed, sites)
    yield from _head_sizes(layer, probed, sites)


def _head_sizes(
    layer: ReferenceLayer, probed: ProbedAttention, sites: LayerSites
) -> Iterator[Finding]:
    """A finding for heads of another width or number than the arguments give; none where they give
    a width.
    """
    arguments, width = probed.subject.built.arguments, probed.subject.sizes.d_in
    n_heads = probed.request.n_heads or next(iter(counts_of(probed.subject.built, "n_heads")), 1)
    if n_heads == 1 or stated(arguments, "d_head") is not None or layer.weights is None:
        return
    joins_heads = layer.weights.out is not None
    sizes = [name for name, value in arguments.items() if type(value) in (int, float)]
    may_be_narrow = any(
        role_of(name.rpartition(".")[2]) is None for name in sizes
    )  # as by downsample_rate=2
    is_narrow = len(layer.weights.q.weight) * n_heads == width and joins_heads and not may_be_narrow
    is_exchanged = layer.d_head == n_heads and layer.n_heads not in (1, n_heads)
    evidence = (
        f"matches exactly with {layer.n_heads} × {layer.d_head} columns, where {n_heads} heads are"
        " given"
    )
    if (
        joins_heads and layer.n_heads == 1 and layer.d_head != n_heads
    ):  # which may be the width of the one head
        yield finding_of("heads-missing", evidence, sites.line_of("qk"))
    if is_narrow or is_exchanged:
        yield finding_of("head-width", evidence, sites.line_of("q"))


def _rates_of_another_width(
    diagnosis: Diagnosis, probed: ProbedAttention, sites: LayerSites
) -> Iterator[Finding]:
    """A finding for rotary angles whose exponents are divided by d_model, or by half or twice the
    width, as the base shows; not where it may be a base that the code has as a number.
    """
    rates, weights, built = diagnosis.layer.rates, diagnosis.layer.weights, probed.subject.built
    base = None if rates is None else base_of(rates)
    if rates is None or weights is None or base is None:
        return
    given = [value for _, value in numbers_of(built.arguments.items(), "theta") if value > 1]
    is_meant = any(abs(math.log(base, theta) - 1) < 1e-4 for theta in given or [10000.0])
    is_meant = is_meant or (not given and abs(base - round(base)) < 1e-2)
    for theta, power in product(
        given or [10000.0], (2 * len(rates) / weights.q.weight.shape[1], 0.5, 2.0)
    ):
        if not is_meant and abs(math.log(base, theta) - power) < 1e-4:
            evidence = (
                f"matches exactly with base {base:.6g}, which is {theta:g} to the power of"
                f" {power:.4g}"
            )
            message = (
                "the exponents of rotary angles are divided by another number than the width that"
                " is rotated"
            )
            line = sites.line_for((r"\*\*.*arange",), "q", built)
            yield finding_of("rope-rates", evidence, line, message=message)


_ARGUMENT = r"(?:[^(),]|\([^()]*\))+"
"""An argument in a line of code."""
_HIDDEN = {
    "keep": "mask == 0",
    "hide": "mask != 0",
    "additive": "mask < 0",
    "lengths": "torch.arange(length) >= mask[:, None]",
}
"""The cells that a mask hides, by its kind, or else by what True means."""


def _user_names(
    line: SourceLine,
    sites: LayerSites,
    probed: ProbedAttention,
    case: InputCase,
    diagnosis: Diagnosis,
) -> dict[str, str]:
    """Maps names in corrected expressions to the user's names in the function around a line, or to
    what they stand for.
    """
    function, layer = function_around(line), diagnosis.layer
    if function is None:
        return {}
    reading = None if diagnosis.candidate is None else diagnosis.candidate.reading
    sizes = {"n_heads": layer.n_heads, "d_head": layer.d_head, "n_kv_heads": layer.n_kv_heads}
    parts = () if reading is None else reading.parts
    names = names_within(function, probed.subject.built.module, parts=parts, sizes=sizes)
    names |= dict(sites.names_in(function))
    if (scaled := names.pop("scaled", None)) is not None:
        names.setdefault("scores", scaled)
    if "z" not in names and {"pattern", "v"} <= {*names} and layer.n_kv_heads == layer.n_heads:
        names["z"] = f"({names['pattern']} @ {names['v']})"
    if "q" in names:
        names.setdefault("d_head", f"{names['q']}.size(-1)")
    form, means, made = (
        case.form,
        "keep",
        re.search(r"torch\.ones\((?:[^()]|\([^()]*\))*\)", line.source),
    )
    ones = made[0] if made else in_user_names("torch.ones(length, length)", names)
    if form is not None and form.parameter in (argument.arg for argument in function.args.args):
        names["mask"], means = (
            form.parameter,
            form.kind if form.kind in _HIDDEN else form.true_means,
        )
    elif layer.causal and "mask" not in ast.unparse(function):
        names["mask"] = f"{ones}.tril()"
    hidden = in_user_names(_HIDDEN[means], names)
    return names | {"ones": ones, "hidden": hidden, "key_padding_mask": f"({hidden})"}


# ---------------------------------------------------------------------------- shown by measurements


_IN_TRAINING = (
    (
        rf"\bF\.\w*dropout\w*\({_ARGUMENT}(, *(p=)?[^(),=]+)?(?=\))",
        r"\g<0>, training=self.training",
    ),
    (rf"(dropout\({_ARGUMENT}, *{_ARGUMENT}, *)((train|training)=)?True\b", r"\1\2self.training"),
    (rf"\bnn\.Dropout\(([^()]+)\)\(({_ARGUMENT})\)", r"F.dropout(\2, \1, training=self.training)"),
    (
        rf"(dropout_p=|_product_attention\(({_ARGUMENT},){{4}}){_ARGUMENT}",
        r"\g<0> if self.training else 0.0",
    ),
)
"""Calls that always drop, and what they become so that they drop in training alone."""


def _measured(
    diagnosis: Diagnosis, probed: ProbedAttention, sites: LayerSites
) -> Iterator[Finding]:
    """Mistakes that only measurements show."""
    subject, built = probed.subject, probed.subject.built
    if diagnosis.likeliest_mistake is not None and diagnosis.likeliest is not None:
        mistake = diagnosis.likeliest_mistake
        line = sites_in(diagnosis.call, diagnosis.likeliest.layer, (mistake,)).line_for(
            mistake.at, mistake.site, built
        )
        evidence = (
            f"the weighted values match if {_sentence(mistake)}; what is done with them is not"
            " understood"
        )
        yield finding_of(mistake.name, evidence, line)
    if diagnosis.candidate is not None:
        has_norms = diagnosis.layer.q_norm is not None and all(
            each.stage != "norm" for each in diagnosis.mistakes
        )
        if has_norms and (unused := _unused(probed, n_axes=1)):
            yield finding_of(
                "qk-norm-shared",
                f"no output depends on {first_names(unused, 4)}",
                sites.line_of("k"),
            )
    padded = next(
        (case for case in diagnosis.cases if case.form is not None and case.form.is_padding), None
    )
    n_nan = 0 if padded is None else int(padded.output.isnan().any(dim=-1).sum())
    if n_nan and diagnosis.layer.causal and not diagnosis.mistakes:
        rows = f"{n_nan} rows of the output are NaN when padding stands on the left"
        evidence = f"{rows}: its own causal mask leaves them no key"
        yield finding_of("fully-masked-row", evidence, sites.line_of("pattern"))
    for code, evidence in probed.evidence.items():
        line = _first_that_differs(probed, code) or sites.line_of("pattern")
        finding = finding_of(code, evidence, line)
        fixed = [
            re.sub(*rule, line.source) for rule in _IN_TRAINING if re.search(rule[0], line.source)
        ]
        yield replace(finding, fix=fixed[0]) if code == "dropout-in-eval" and fixed else finding
    for line in [
        op.at for op in diagnosis.call.operations if diagnosis.is_right and not op.readers
    ]:
        if ".masked_fill(" in line.source and (fix := _with_result_kept(line)):
            yield finding_of("mask-ignored", "its result is not kept", line, fix=fix)
    for name in diagnosis.ignored:
        yield finding_of(
            "mask-ignored",
            f"the output is the same if {name} hides nothing",
            sites.line_of("scores"),
        )
    cache = diagnosis.cache
    if (
        cache is not None
        and cache.ok is False
        and all(each.shown_by != "steps" for each in diagnosis.mistakes)
    ):
        message = "tokens that are read behind a cache give other outputs than in one call"
        evidence = f"{cache.reason}, up to {cache.largest or math.inf:.3g} off"
        yield finding_of(
            "cache-differs", evidence, sites.line_for((), "", built), message=message, fix=""
        )
    is_open = subject.mode is None and not (diagnosis.is_right or diagnosis.mistakes)
    if is_open and (unused := _unused(probed, n_axes=2)):
        evidence = f"no output depends on {first_names(unused, 4)}"
        yield finding_of("unused-parameters", evidence, sites.line_for((), "", built))


def _first_that_differs(probed: ProbedAttention, code: str) -> SourceLine | None:
    """The first line of user code that computes something else in a second call with the same
    input: with another seed, in training mode, or only because it is the second. None if there is
    none.
    """
    subject = replace(probed.subject, is_without_dropout=False)
    twin = with_dropout(subject, RAISED_DROPOUT) or subject.with_call(copied(subject.built.call))
    seed, training = int(code == "dropout-in-eval"), code == "dropout-not-rescaled"
    with suppress(*NO_ANSWER):
        inputs = twin.drawer(probed.request.seed).inputs(with_context=False)
        first, second = recorded(twin, inputs, 0), recorded(twin, inputs, seed, training=training)
        for one, other in zip(first.operations, second.operations, strict=False):
            is_of_user = other.at.line is not None and other.output.numel() > 0
            if is_of_user and largest_difference(one.output, other.output) > 0:
                return other.at
    return None


def _unused(probed: ProbedAttention, *, n_axes: int) -> list[str]:
    """The projections of a module with random weights, or of one axis the gains of queries and
    keys, that change no output. Biases do not count, because a key bias never changes one.
    """
    module = copied(probed.subject.built.module)
    if module is None:
        return []
    subject = probed.subject.with_call(module)
    drawer = subject.drawer(probed.request.seed)
    inputs = [
        drawer.inputs(with_context=with_context) for with_context in {False, subject.takes_context}
    ]
    after, unused = [subject(each, seed=0) for each in inputs], []
    for name, parameter in module.named_parameters():
        letters, number = read_name(name)
        is_meant = letters in ("q", "k") if n_axes == 1 else letters and number is None
        if min(parameter.ndim, 2) == n_axes and is_meant and "bias" not in name:
            before = after
            parameter.data.mul_(-1.5).add_(0.1)
            after = [subject(each, seed=0) for each in inputs]
            unused += [name.removesuffix(".weight")] if all(map(torch.equal, before, after)) else []
    return unused
