"""Findings from a diagnosis and from probes: each mistake with its evidence, its line, and the
smallest example.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes import DROPPED
from mhacli.attention.stages import Mistake, ReferenceLayer
from mhacli.errors import first_names
from mhacli.numbers import shown
from mhacli.usercode.build import Built, as_float64
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.faults import SourceLine
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.masks import MaskForm
from mhacli.usercode.names import function_around, in_user_names, names_within
from mhacli.usercode.projections import read_name
from mhacli.usercode.rewriting import put, running
from mhacli.usercode.roles import role_of, stated

from .candidates import base_of, counts_of, numbers_of, score_biases_in
from .diagnose import Diagnosis, Trial, diagnose, error_of
from .layer_sites import LayerSites, sites_in
from .probes import (
    InputCase,
    is_dropout,
    operations_that_differ,
    parameters_without_effect,
    probe,
)
from .result import Finding, finding_of, words_of_code


class Findings(NamedTuple):
    """Every mistake found, and why not all was measured, if time was over."""

    found: tuple[Finding, ...]
    over: OutOfTime | None = None


def findings_of(diagnosis: Diagnosis) -> Findings:
    """Statements that the code contradicts, proven mistakes, and those that only measurements
    show.
    """
    sites = LayerSites(diagnosis.call)
    if diagnosis.candidate is not None:
        sites = sites_in(diagnosis.call, diagnosis.layer, diagnosis.mistakes)
    proven = [
        *_contradictions(diagnosis, sites),
        *_tried([*_proven(diagnosis)], partial(_is_mended, diagnosis)),
    ]
    codes = {finding.code for finding in proven}
    measured = list[Finding]()
    over = None
    for measure in _MEASURES:
        try:
            measured += measure(diagnosis, sites)
        except OutOfTime as fault:
            over = fault
    others = [finding for finding in measured if finding.code not in codes]
    return Findings((*proven, *others), over)


_ATTEMPTS = 3
"""The most codes that are tried for the findings of one diagnosis."""


class Proposal(NamedTuple):
    """A finding, and code that may be right in place of what its line has, the likelier first."""

    finding: Finding
    forms: Sequence[str]


def _tried(proposals: Sequence[Proposal], holds: Callable[[], bool]) -> list[Finding]:
    """The findings with the first code for all of them together with which a comparison `holds`,
    else with words: where none does, and where none can be tried, as in a constructor. At each
    attempt every line has its next form, and where its forms are over the first one in its next
    place.
    """
    found = [proposal.finding for proposal in proposals]
    outcome = None
    for attempt in range(_ATTEMPTS):
        try:
            file = found[0].file or ""
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
            fixes = [
                put(tree, each.line or 0, forms[attempt % len(forms)], attempt // len(forms))
                for each, forms in proposals
            ]
        except (SyntaxError, IndexError, OSError, UnicodeError):  # there is no such place or code
            continue
        outcome = False
        with suppress(SyntaxError, OutOfTime, *NO_ANSWER), running(tree, file):
            if holds():
                pairs = zip(found, fixes, strict=True)
                return [replace(each, fix=fix, fix_tried=True) for each, fix in pairs]
    words = [words_of_code(each.code).advice for each in found]
    if outcome is None:
        words = [f"{text} (not tried)" for text in words]
    pairs = zip(found, words, strict=True)
    return [replace(each, fix=text, fix_tried=outcome) for each, text in pairs]


def _is_mended(diagnosis: Diagnosis, measured: str = "") -> bool:
    """Whether the code as it is now gives the outputs of the reference in each case of a diagnosis;
    or, where the code of a mistake that was `measured` is given, shows that no more, and else
    gives what it gave.
    """
    probed = diagnosis.probed
    expected = replace(diagnosis, proofs={})
    if measured:
        again = probe(replace(probed.subject, is_without_dropout=False), probed.request)
        if measured not in probed.evidence:  # what is kept now changes the outputs
            return again.visible != probed.visible and diagnose(again).is_right
        if again.evidence or diagnosis.candidate is None:
            return not again.evidence
        expected = diagnosis
    for case in diagnosis.cases:
        output = case.output
        ends = case.inputs.ends
        if ends and diagnosis.steps is not None:
            convention = diagnosis.steps.convention
            output = convention(case.inputs.queries.to(convention.attention.dtype), ends)
        else:
            output = as_float64(probed.subject(case.inputs, mask=case.form))
        if not expected.explains(replace(case, output=output)):
            return False
    return True


def _sentence(mistake: Mistake) -> str:
    """What a mistake is, in words."""
    explanation = words_of_code(mistake.name).explanation
    return f"{explanation} ({mistake.detail})" if mistake.detail else explanation


def _proof(error: float, cases: Sequence[InputCase]) -> tuple[str, dict[str, Any]]:
    """The numbers of a proof in words, and as fields of its finding; `error` is relative to the
    tolerance.
    """
    tolerance = max(case.tolerance for case in cases)
    where = ", ".join(case.name for case in cases)
    words = (
        f"largest difference {shown(error * tolerance, 'error')}, tolerance"
        f" {shown(tolerance, 'error')} ({where})"
    )
    return words, {"proven": True, "error": error * tolerance, "tolerance": tolerance}


def _proven(diagnosis: Diagnosis) -> Iterator[Proposal]:
    """A finding for each mistake of the layer that gives the outputs, with code that may be
    right.
    """
    for mistake, proof in diagnosis.proofs.items():
        trial = proof.trial
        numbers, fields = _proof(proof.error, trial.cases)
        sites = sites_in(trial.call, diagnosis.layer, diagnosis.mistakes)
        line = _line_of(mistake, trial, sites, diagnosis.subject.built)
        codes = tuple(other.code for other in diagnosis.mistakes if other is not mistake)
        evidence = f"matches exactly if {_sentence(mistake)}: {numbers}"
        if codes:
            evidence += f", together with {' and '.join(codes)}"
        words = words_of_code(mistake.name)
        effect = words.effect + _how_to_state(mistake, trial, diagnosis.layer)
        finding = finding_of(
            mistake.name, evidence, line, effect=effect, together_with=codes, **fields
        )
        names = _user_names(line, sites, trial.cases[0], diagnosis)
        plain = ("scaled_dot_product_attention" in line.source and words.in_torch) or words.right
        right = [_fix_of(mistake, line, names, form) for form in (plain, *words.forms)]
        yield Proposal(finding, [*dict.fromkeys(right)])


def _how_to_state(mistake: Mistake, trial: Trial, layer: ReferenceLayer) -> str:
    """How a wrong scale that is one number in every call is stated; empty for other mistakes."""
    qk = sites_in(trial.call, layer).tensors.get("qk")
    varies = mistake.code in ("scale-length", "scale-batch")
    if qk is None or varies or mistake.stages.keys() != {"scale"}:
        return ""
    d_head = layer.d_head or trial.cases[0].inputs.queries.shape[-1]
    value = float(mistake.stages["scale"](layer, torch.ones_like(qk), d_head).flatten()[0])
    return f"; if it is meant, --scale {value:.8g} states it, and all else is compared"


def _line_of(mistake: Mistake, trial: Trial, sites: LayerSites, built: Built) -> SourceLine:
    """The line of a proven mistake."""
    form = trial.cases[0].form
    at = mistake.at
    if form is not None and mistake.stage in ("mask_rule", "padding_rule"):
        at = (*at, rf"(masked_fill|where\().*\b{form.parameter}\b")
    line = sites.line_for_roles(sites.line_for(at, mistake.site, built), mistake.letters)
    if mistake.stage != "scale" or re.search("[*/]", line.source):
        return line
    # queries or keys may be scaled before their products, on one line
    before = [op for role in "qk" for op in trial.call.path(role) if len(op.sources) == 1]
    scaled = {op.at for op in before if op.name.rstrip("_") in ("mul", "div")}
    return scaled.pop() if len(scaled) == 1 else line


def _fix_of(mistake: Mistake, line: SourceLine, names: Mapping[str, str], right: str) -> str:
    """The corrected line where it is clear, else the right expression in the user's names."""
    kept = _with_result_kept(line) if DROPPED in mistake.at else None
    if kept is not None:
        return kept
    projections = {
        letter: names.get(f"self.{letter}_proj", f"self.{letter}_proj") for letter in "qkv"
    }
    taking = projections[mistake.takes]
    if mistake.gives is not None:
        given = f"{projections[mistake.gives]}("
        variables = re.findall(r"\w+", line.source.rpartition(" = ")[0])
        is_of_giver = any(mistake.gives in read_name(name)[0] for name in variables)
        if line.source.count(given) == 1 and not is_of_giver:
            return line.source.replace(given, f"{taking}(")
    if mistake.stage == "project":
        names = {**names, "self.q_proj": taking}
    return in_user_names(right, names)


def _with_result_kept(line: SourceLine) -> str | None:
    """A line that fills or adds to scores but does not keep the result, with it kept; None for any
    other.
    """
    function = function_around(line)
    dropped = re.match(DROPPED, line.source)
    if function is None or dropped is None:
        return None
    alone = {each.lineno for each in ast.walk(function) if isinstance(each, ast.Expr)}
    return f"{dropped[1]} = {line.source}" if line.line in alone else None


def _contradictions(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """A finding for each statement, of heads or scale, that the matching layer contradicts, for
    each of its biases that is a mistake, and for heads of another width or number than the
    arguments give.
    """
    if diagnosis.candidate is None:
        return
    request = diagnosis.request
    layer = diagnosis.layer
    case = diagnosis.cases[0]
    numbers, proof = _proof(error_of(layer, diagnosis.mistakes, [case]), [case])
    for option in diagnosis.candidate.contradicts(request):
        if option == "heads":
            line = sites.line_of("q")
            actual = str(layer.n_heads)
            claim = str(request.n_heads)
            what = f"{actual} heads"
        else:
            scale = layer.scale
            if scale is None:
                scale = (layer.d_head or case.inputs.queries.shape[-1]) ** -0.5
            actual = "a learned number" if isinstance(scale, Tensor) else f"{scale:.4g}"
            line = sites.line_of("scaled")
            what = f"scores times {actual}"
            claim = f"{request.scale:.4g}"
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
    yield from _rates_of_another_width(diagnosis, sites)
    yield from _head_sizes(diagnosis, sites)


def _head_sizes(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """A finding for heads of another width or number than the arguments give; none where they give
    a width.
    """
    layer = diagnosis.layer
    subject = diagnosis.subject
    arguments = subject.built.arguments
    width = subject.sizes.d_in
    n_heads = diagnosis.request.n_heads or next(iter(counts_of(subject.built, "n_heads")), 1)
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


def _rates_of_another_width(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """A finding for rotary angles whose exponents are divided by d_model, or by half or twice the
    width, as the base shows; not where it may be a base that the code has as a number.
    """
    rates = diagnosis.layer.rates
    weights = diagnosis.layer.weights
    built = diagnosis.subject.built
    base = None if rates is None else base_of(rates)
    if rates is None or weights is None or base is None:
        return
    given = [value for _, value in numbers_of(built.arguments.items(), "theta") if value > 1]
    is_meant = any(abs(math.log(base, theta) - 1) < 1e-4 for theta in given or [10000.0])
    is_meant = is_meant or (not given and abs(base - round(base)) < 1e-2)
    # rates of 0 are left out, whose exponents count in the width of a head
    still = 2 * len(rates) / (diagnosis.layer.d_head or 1)
    for theta, power in product(
        given or [10000.0], (2 * len(rates) / weights.q.weight.shape[1], 0.5, 2.0)
    ):
        is_power = abs(math.log(base, theta) - power) < 1e-4
        if is_power and not is_meant and abs(power - still) > 1e-4:
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
_SIZES = {
    "d_head": "q.size(-1)",
    "q_len": "q.size(-2)",
    "k_len": "k.size(-2)",
    "batch": "x.size(0)",
    "length": "x.size(1)",
}
"""Sizes that have no name of their own."""


def _user_names(
    line: SourceLine,
    sites: LayerSites,
    case: InputCase,
    diagnosis: Diagnosis,
) -> dict[str, str]:
    """Maps names in corrected expressions to the user's names in the function around a line, or to
    what they stand for.
    """
    function = function_around(line)
    layer = diagnosis.layer
    if function is None:
        return {}
    reading = None if diagnosis.candidate is None else diagnosis.candidate.reading
    sizes = {"n_heads": layer.n_heads, "d_head": layer.d_head, "n_kv_heads": layer.n_kv_heads}
    parts = () if reading is None else reading.parts
    names = names_within(function, diagnosis.subject.module, parts=parts, sizes=sizes)
    right = sites_in(sites.call, layer)
    names |= dict(right.names_in(function)) | dict(sites.names_in(function))
    for site in ("scaled", "qk"):
        if (scores := names.pop(site, None)) is not None:
            names.setdefault("scores", scores)
    if "z" not in names and {"pattern", "v"} <= {*names} and layer.n_kv_heads == layer.n_heads:
        names["z"] = f"({names['pattern']} @ {names['v']})"
    called = r"([\w.]+)\.scaled_dot_product_attention(?:\((\w+), (\w+), (\w+))?"
    for kernel in re.finditer(called, line.source):
        given = zip("Fqkv", kernel.groups(), strict=True)
        names = {**{name: text for name, text in given if text}, **names}
    for name, text in _SIZES.items():
        if text.partition(".")[0] in names:
            names.setdefault(name, in_user_names(text, names))
    made = re.search(r"torch\.ones\((?:[^()]|\([^()]*\))*\)", line.source)
    names["ones"] = made[0] if made else in_user_names("torch.ones(length, length)", names)
    return names | _names_of_masks(function, case.form, layer, names)


def _names_of_masks(
    function: ast.FunctionDef,
    form: MaskForm | None,
    layer: ReferenceLayer,
    names: Mapping[str, str],
) -> dict[str, str]:
    """The mask of a function, or the one that it makes, and the cells that this hides."""
    arguments = [argument.arg for argument in function.args.args]
    mask = names.get("mask", "mask")
    means: str = "keep"
    if form is not None and form.parameter in arguments:
        mask = form.parameter
        means = form.kind if form.kind in _HIDDEN else form.true_means
    elif layer.causal and "mask" not in arguments:
        mask = f"{names['ones']}.tril()"
    hidden = in_user_names(_HIDDEN[means], {**names, "mask": mask})
    return {"mask": mask, "hidden": hidden, "key_padding_mask": f"({hidden})"}


# ---------------------------------------------------------------------------- shown by measurements


_IN_TRAINING = (
    (
        rf"\bF\.\w*dropout\w*\({_ARGUMENT}(, *(p=)?[^(),=]+)?(?=\))",
        r"\g<0>, training=self.training",
    ),
    (rf"(dropout\({_ARGUMENT}, *{_ARGUMENT}, *)((train|training)=)?True\b", r"\1\2self.training"),
    (rf"\bnn\.Dropout\(([^()]+)\)\(({_ARGUMENT})\)", r"F.dropout(\2, \1, training=self.training)"),
    (
        rf"(dropout_p=|_product_attention\(([^=,]+,){{4}}){_ARGUMENT}",
        r"\g<0> if self.training else 0.0",
    ),
)
"""Calls that always drop, and what they become so that they drop in training alone."""


def _likeliest(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """The mistake that gives the weighted values of a layer whose output nothing explains."""
    mistake = diagnosis.likeliest_mistake
    candidate = diagnosis.likeliest
    if mistake is not None and candidate is not None:
        likely = sites_in(diagnosis.call, candidate.layer, (mistake,))
        line = likely.line_for(mistake.at, mistake.site, diagnosis.subject.built)
        evidence = (
            f"the weighted values match if {_sentence(mistake)}; what is done with them is not"
            " understood"
        )
        yield finding_of(mistake.name, evidence, line)


def _shared_norm(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """A norm of queries or keys whose gain changes no output."""
    if diagnosis.candidate is None or diagnosis.layer.q_norm is None:
        return
    if any(mistake.stage == "norm" for mistake in diagnosis.mistakes):
        return
    if unused := parameters_without_effect(diagnosis.probed, n_axes=1):
        evidence = f"no output depends on {first_names(unused, 4)}"
        yield finding_of("qk-norm-shared", evidence, sites.line_of("k"))


def _rows_without_key(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """NaN for queries to which padding and the causal mask leave no key."""
    padded = [case for case in diagnosis.cases if case.form is not None and case.form.is_padding]
    n_nan = int(padded[0].output.isnan().any(dim=-1).sum()) if padded else 0
    if n_nan and diagnosis.layer.causal and not diagnosis.mistakes:
        rows = f"{n_nan} rows of the output are NaN when padding stands on the left"
        evidence = f"{rows}: its own causal mask leaves them no key"
        yield finding_of("fully-masked-row", evidence, sites.line_of("pattern"))


def _probed(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """What the probes show."""
    for code, evidence in diagnosis.probed.evidence.items():
        differing = operations_that_differ(diagnosis.probed, code)
        line = differing[0].at if differing else sites.line_of("pattern")
        finding = finding_of(code, evidence, line)
        if code == "dropout-in-eval" and differing and not is_dropout(differing):
            advice = words_of_code("not-repeatable").advice
            finding = finding_of("not-repeatable", evidence, line, fix=advice)
            if re.search(r"\b[A-Z]\w*\(", line.source):
                words = "a layer is made anew in every call, with other weights"
                finding = replace(finding, message=words, fix="make it once, in the constructor")
            yield finding
            continue
        rules = [re.sub(*rule, line.source) for rule in _IN_TRAINING if code == "dropout-in-eval"]
        forms = [text for text in rules if text != line.source] or [""]
        yield from _tried([Proposal(finding, forms)], partial(_is_mended, diagnosis, code))


def _ignored_masks(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """Masks without effect: their result is not kept, or they hide nothing."""
    if diagnosis.is_right:
        for line in [op.at for op in diagnosis.call.operations if not op.readers]:
            fix = _with_result_kept(line) if ".masked_fill(" in line.source else None
            if fix is not None:
                finding = finding_of("mask-ignored", "its result is not kept", line)
                holds = partial(_is_mended, diagnosis, "mask-ignored")
                yield from _tried([Proposal(finding, [fix])], holds)
    for name in diagnosis.ignored:
        evidence = f"the output is the same if {name} hides nothing"
        yield finding_of("mask-ignored", evidence, sites.line_of("scores"))


def _steps_that_differ(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """Steps behind a cache that give other outputs by no known mistake."""
    cache = diagnosis.cache
    if cache is None or cache.ok is not False:
        return
    if all(mistake.shown_by != "steps" for mistake in diagnosis.mistakes):
        message = "tokens that are read behind a cache give other outputs than in one call"
        evidence = f"{cache.reason}, up to {cache.largest or math.inf:.3g} off"
        line = sites.line_for((), "", diagnosis.subject.built)
        yield finding_of("cache-differs", evidence, line, message=message, fix="")


def _unused_projections(diagnosis: Diagnosis, sites: LayerSites) -> Iterator[Finding]:
    """Projections without effect, where nothing else explains the output."""
    if diagnosis.subject.mode is not None or diagnosis.is_right or diagnosis.mistakes:
        return
    if unused := parameters_without_effect(diagnosis.probed, n_axes=2):
        evidence = f"no output depends on {first_names(unused, 4)}"
        line = sites.line_for((), "", diagnosis.subject.built)
        yield finding_of("unused-parameters", evidence, line)


_MEASURES = (
    _likeliest,
    _shared_norm,
    _rows_without_key,
    _probed,
    _ignored_masks,
    _steps_that_differ,
    _unused_projections,
)
"""The measurements in the order of their findings."""
