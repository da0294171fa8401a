"""`mha check`: probes a user's attention, compares it with the reference, and diagnoses its mistakes."""

from __future__ import annotations

import json
import platform
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

import mhacli
from mhacli.attention.devices import one_thread
from mhacli.attention.mistakes.stages import RIGHT, ReferenceLayer, run
from mhacli.commands.check.against import compare
from mhacli.commands.check.behaviour import Asker, asker_of, is_claimed_causal, is_of_transformers
from mhacli.commands.check.diagnose import Diagnosis, diagnose, error_of
from mhacli.commands.check.findings import findings_of
from mhacli.commands.check.inputs import Examined, arguments_without_effect, make_case, max_error, with_random_weights
from mhacli.commands.check.probes import probe
from mhacli.commands.check.result import (
    AttentionInside,
    CheckRequest,
    Examination,
    Finding,
    FirstDifference,
    OutputComparison,
    Verdict,
)
from mhacli.commands.check.stepwise import examine_stepwise
from mhacli.errors import MhaError
from mhacli.io.data import decode, finite
from mhacli.usercode.build import arguments_of, copied, load_built, parse_value
from mhacli.usercode.find_call import example_of, find_modes
from mhacli.usercode.process import Stage, exception_text
from mhacli.usercode.sequences import sequences_of_ids, sequences_of_vectors, with_zeros_drawn
from mhacli.usercode.target import Choice, TargetRequest, naming, split_target, targets_beside
from mhacli.usercode.user_attention import UserAttention

_CAUSAL = ("causal", "autoregressive", "masked", "unidirectional")
_DENIALS = ("non", "not", "anti", "or", "bi", "un", "optionally", "optional", "possibly", "no", "without")
_MOST_PARTS = 4
_SMALL = 5_000_000
"""Parameters of a model for which several threads would only wait."""


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
    model = None
    if built.module is not None:
        model = sequences_of_ids(
            request.of.target,
            with_zeros_drawn(built.module, request.seed),
            fixed={name: parse_value(text) for name, text in request.of.call_arguments},
            length=request.length,
            means=request.mask_means,
            example=None if request.example is None else example_of(request.example, built),
        )
    if model is not None:
        with one_thread() if _n_parameters(model.module) < _SMALL else nullcontext():
            is_decoder = model.has_source and request.states_causal is None
            claim = True if is_decoder else request.states_causal
            asker = asker_of(model, request.seed, stage, is_causal=claim)
            parts = _ask(asker, claimed=is_claimed_causal(built.module))
        with one_thread():
            _compare_inside(parts, asker, request, stage)
        return replace(_of_behaviour(request.of.target, asker), arguments=arguments_of(built))
    with one_thread():  # faster for such small products
        subjects = find_modes(built, request.of)
        return combined([(subject, _with_behaviour(subject, request, stage)) for subject in subjects])


def _examined_checkpoint(model: str | nn.Module, name: str, request: CheckRequest, stage: Stage) -> Examination:
    from mhacli.commands.check.checkpoint import ask_checkpoint  # loads what only checkpoints need

    return _of_behaviour(name, ask_checkpoint(model, request, stage))


def _n_parameters(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _of_behaviour(target: str, asker: Asker) -> Examination:
    """The report on a model that takes token ids: its behaviour."""
    open_ones = [behaviour for behaviour in asker.behaviours if behaviour.ok is None]
    verdict: Verdict = "wrong" if asker.findings else "consistent" if asker.holds else "unknown"
    if verdict == "consistent" and asker.inside and all(each.verdict == "right" for each in asker.inside):
        verdict = "right"
    return Examination(
        verdict=verdict,
        target=target,
        called=asker.of.called,
        findings=tuple(asker.findings),
        reason="; ".join(f"{b.name}: {b.reason}" for b in open_ones[:1]) if verdict == "unknown" else None,
        n_parameters=_n_parameters(asker.module),
        behaviour=asker.behaviours,
        inside=asker.inside,
    )


def _with_behaviour(subject: UserAttention, request: CheckRequest, stage: Stage) -> Examination:
    """The report on one mode, with its behaviour over a long text where it reads one sequence of vectors."""
    report = _examined_mode(subject, request, stage)
    sequences = None if subject.mode == "cross" else sequences_of_vectors(subject, request.length)
    if sequences is None or report.verdict == "wrong":
        return report
    choices = {choice.name for choice in report.choices}
    is_causal = (is_meant_causal(subject, request.of) or "causal" in choices) and "causal-by-mask" not in choices
    stated = True if is_causal else False if request.not_causal else None
    asker = asker_of(sequences, request.seed, stage, is_causal=stated)
    parts = _ask(asker)
    if report.verdict == "unknown":  # it may be a block around an attention
        _compare_inside(parts, asker, request, stage)
    if asker.inside or subject.is_pooled:
        behaved = _of_behaviour(request.of.target, asker)
        return replace(behaved, called=report.called, arguments=report.arguments, example=report.example)
    verdict = "wrong" if asker.findings else report.verdict
    return replace(report, verdict=verdict, findings=tuple(asker.findings), behaviour=asker.behaviours)


def _examined_mode(subject: UserAttention, request: CheckRequest, stage: Stage) -> Examination:
    """The report on one mode."""
    if subject.is_pooled:
        return Examination(
            verdict="unknown",
            target=request.of.target,
            called=subject.described,
            arguments=arguments_of(subject.built),
            reason="its output is of a whole text, not of each token",
        )
    expects_causal = is_meant_causal(subject, request.of)
    probed = probe(subject, request.of.seed, stage)
    stage(f"comparing {request.of.target} with the reference", limited=False)
    examined = with_random_weights(subject, probed, request, expects_causal=expects_causal)
    diagnosis = diagnose(examined)
    stage(f"giving {request.of.target} a text step by step", limited=False)
    steps = examine_stepwise(examined, diagnosis)
    findings = (*findings_of(diagnosis, examined), *steps.findings)
    verdict: Verdict = "wrong" if findings else "right" if diagnosis.is_right else "unknown"
    passed, comparison, departure = (*steps.names, *subject.unread), None, None
    likeliest = diagnosis.candidate or diagnosis.likeliest
    if verdict == "unknown" and likeliest is not None and diagnosis.run.operations:
        located = diagnosis.run.at_sites(likeliest.layer)
        departure = located.departure() if located.sites else None
    if diagnosis.candidate is not None:
        errors = [(error_of(diagnosis.layer, diagnosis.mistakes, [case]), case.tolerance) for case in diagnosis.cases]
        relative, tolerance = max(errors)
        dtype = str(subject.dtype).removeprefix("torch.")
        comparison = OutputComparison("reference", dtype, len(errors), finite(relative * tolerance), tolerance)
    return Examination(
        verdict=verdict,
        target=request.of.target,
        called=subject.described,
        example="" if subject.example else subject.example_text,
        arguments=arguments_of(subject.built),
        findings=findings,
        choices=_choices(diagnosis, examined),
        probes=(*probed.probes, *steps.probes),
        comparison=comparison,
        reason=_reason(diagnosis, examined, departure) if verdict == "unknown" else None,
        departure=departure,
        n_parameters=_n_parameters(examined.module),
        n_hypotheses=diagnosis.n_hypotheses,
        not_examined=tuple(name for name in (*subject.untried, *diagnosis.not_examined) if name not in passed),
        notes=(*arguments_without_effect(subject), *steps.notes),
        next_steps=_next_steps(examined, departure) if verdict == "unknown" else (),
    )


def is_meant_causal(subject: UserAttention, request: TargetRequest) -> bool:
    """Whether it is meant to be causal: by the option, an argument, or its name. For cross-attention only an argument counts,
    because the context has its own positions."""
    if subject.causal_by is not None or subject.mode == "cross":
        return subject.causal_by is not None
    name = getattr(subject.built.thing, "__name__", type(subject.built.thing).__name__)
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return request.causal or (any(word in _CAUSAL for word in words) and not any(word in _DENIALS for word in words))


# ---------------------------------------------------------------------------------------- the attention inside a model


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Those of `scaled_dot_product_attention` in order; torch's modules call the other function with its masks by name."""
_WHOLE = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_HIDDEN = -1e3
"""Terms added to scores below this number hide a key."""
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


class _Running(TorchFunctionMode):
    """Notes, of a model that attends over `length` tokens, None for an unknown number, the innermost module with weights that
    computes attention weights, and whether any weights of these tokens over themselves are zero for all later tokens."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.length = length
        self.running: list[nn.Module] = []
        self.found: list[nn.Module] = []
        self.is_causal = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, and notes the module if these are the weights of queries over keys."""
        result = func(*args, **(kwargs or {}))
        is_pattern = func in _SOFTMAX and result.ndim > 2 and self._is_of_all(result)
        if is_pattern or func in _WHOLE:
            self.found += [part for part in reversed(self.running) if any(True for _ in part.parameters())][:1]
            by_place = args if func is F.scaled_dot_product_attention else ()
            named = {**dict(zip(_ARGUMENTS, by_place, strict=False)), **(kwargs or {})}
            mask = result if is_pattern else named.get("attn_mask")
            self.is_causal |= named.get("is_causal") is True or self._hides_later(mask, is_pattern=is_pattern)
        return result

    def _is_of_all(self, pattern: Tensor) -> bool:
        """Whether a mask or a pattern has a row and a column for each token."""
        n_tokens = self.length or pattern.shape[-1]
        return pattern.shape[-2:] == (n_tokens, n_tokens) and n_tokens > 1

    def _hides_later(self, mask: Tensor | None, *, is_pattern: bool) -> bool:
        """Whether a mask, or a pattern, hides all later keys from each query."""
        if mask is None or not self._is_of_all(mask):
            return False
        later = mask[..., torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)]
        if is_pattern:
            return not bool(later.any())
        if mask.dtype == torch.bool:  # torch's functions and modules differ in what True means
            return bool((later != mask[..., :1, 0]).all())
        return bool((later < _HIDDEN).all())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows which module runs, inside the context."""

        def leave(*_: object) -> None:
            self.running.pop()

        begin = register_module_forward_pre_hook(lambda part, _: self.running.append(part))
        end = register_module_forward_hook(leave, always_call=True)
        try:
            with self:
                yield
        finally:
            begin.remove()
            end.remove()


def _ask(asker: Asker, *, claimed: bool | None = None) -> Mapping[type, Mapping[str, nn.Module]]:
    """Asks all behaviours, and gives the modules that compute attention weights in a pass, by class and name, none if the model
    itself does. Where nothing states if tokens may see later ones, an attention that hides them does, else what is `claimed`."""
    watched = _Running(None if asker.of.is_pooled else asker.length)
    with watched.watching():
        asker.read(asker.text)
    if asker.is_causal is None:
        asker.is_causal = True if watched.is_causal else claimed
    asker.all()
    found, by_class = set(map(id, watched.found)), dict[type, dict[str, nn.Module]]()
    for name, part in (
        asker.module.named_modules() if asker.module is not None and id(asker.module) not in found else ()
    ):
        if id(part) in found:
            by_class.setdefault(type(part), {})[name] = part
    return by_class


def _compare_inside(
    parts: Mapping[type, Mapping[str, nn.Module]], asker: Asker, request: CheckRequest, stage: Stage
) -> None:
    """Compares each class of attention inside a model with the reference; their mistakes come before those of behaviour."""
    inside, mistakes = list[AttentionInside](), list[Finding]()
    for cls, named in parts.items():
        verdict: Verdict = "unknown"
        try:
            with naming(copied(next(iter(named.values())))) as target:
                alone = replace(request, target=target, arg=(), call_arg=(), example=None, causal=False)
                subjects = find_modes(load_built(alone.of, stage), alone.of)
                compared = combined([(subject, _examined_mode(subject, alone, stage)) for subject in subjects])
            verdict, reason = compared.verdict, compared.reason or ""
            mistakes += compared.findings
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as fault:  # user code may raise anything
            reason = fault.message if isinstance(fault, MhaError) else exception_text(fault)
        inside.append(AttentionInside(cls.__name__, tuple(named), verdict, reason))
    asker.inside, asker.findings = tuple(inside), [*mistakes, *asker.findings]


# ----------------------------------------------------------------------------------------------------------------- the report


def _choices(diagnosis: Diagnosis, examined: Examined) -> tuple[Choice, ...]:
    """The design choices of the diagnosed layer, and those that the probes show."""
    subject, choices = examined.subject, list[Choice]()
    if diagnosis.candidate is not None:
        choices += [*diagnosis.candidate.choices, *_weight_choices(diagnosis.layer)]
        if diagnosis.layer.causal and not examined.expects_causal and not diagnosis.mistakes:
            choices.append(Choice("causal", "it hides later tokens by itself"))
    if examined.expects_causal and not examined.request.of.causal:
        source = "its name" if subject.causal_by is None else f"its argument {subject.causal_by}"
        choices.append(Choice("meant-causal", f"it is meant to be causal, as {source} says"))
    form = diagnosis.mask_form
    if examined.expects_causal and examined.probed.visible == "full" and form is not None and "query" in form.axes:
        choices.append(Choice("causal-by-mask", "it is causal only through the mask that it is given"))
    if (row := _empty_row(diagnosis, subject)) is not None:
        choices.append(Choice("fully-masked-row", f"a query whose keys are all masked gives {row}"))
    return tuple(dict.fromkeys([*choices, *diagnosis.choices]))


def _empty_row(diagnosis: Diagnosis, subject: UserAttention) -> str | None:
    """What a query whose keys are all masked gets, in words; None for no attention at all, and without a mask that it obeys."""
    form = diagnosis.mask_form
    if form is None or "query" not in form.axes:
        return None
    inputs = next(case.inputs for case in diagnosis.cases if case.form is form)
    assert inputs.allowed is not None
    hides_first = (torch.arange(inputs.queries.shape[-2]) > 0)[:, None]
    try:
        case = make_case("mask", "", subject, inputs._replace(allowed=inputs.allowed & hides_first), form)
    except Exception:  # user code may raise anything
        return None
    row = case.output[..., 0, :]
    if row.isnan().any():
        return "NaN"
    for words, layer in ((None, diagnosis.layer), ("the mean of the values", replace(diagnosis.layer, hidden=-1e9))):
        if max_error(run(RIGHT, layer, case.rows).out[..., 0, :], row) <= case.tolerance:
            return words
    return "another value"


def _weight_choices(layer: ReferenceLayer) -> list[Choice]:
    if layer.weights is None:
        return []
    choices, projections = [], dict(zip(("q", "k", "v", "the output"), layer.weights, strict=True))
    unbiased = [name for name, projection in projections.items() if projection is not None and projection.bias is None]
    if unbiased:
        is_all = len(unbiased) == len(projections)
        choices.append(Choice("no-bias", "no projection has a bias" if is_all else f"no bias: {', '.join(unbiased)}"))
    if layer.n_kv_heads != layer.n_heads:
        choices.append(Choice("gqa", f"{layer.n_heads} query heads share {layer.n_kv_heads} kv heads"))
    d_v = layer.weights.v.weight.shape[0] // layer.n_kv_heads
    if layer.d_head is not None and d_v != layer.d_head:
        choices.append(Choice("d-v", f"values are {d_v} wide, queries and keys {layer.d_head}"))
    return choices


def _reason(diagnosis: Diagnosis, examined: Examined, departure: FirstDifference | None) -> str:
    """Why there is no verdict: no attention, weights that cannot be read, the first site that differs, or a probe."""
    n_heads, d_in, likeliest = examined.request.n_heads, examined.subject.sizes.d_in, diagnosis.likeliest
    if examined.probed.visible == "itself only":
        return "no token attends to another: this is not attention"
    if likeliest is None and diagnosis.candidate is None:
        if n_heads and d_in % n_heads:
            return f"--heads {n_heads} does not divide the width {d_in} of its input"
        return "the names and shapes of the parameters do not show which project queries, keys and values"
    reading = None if likeliest is None else likeliest.reading
    unused = () if reading is None else reading.unused
    parts = list(dict.fromkeys(re.sub(r"\.(weight|bias)$", "", name) for name in unused))
    if parts:
        more = ", …" if len(parts) > _MOST_PARTS else ""
        part = f"it is not clear what it does with {', '.join(parts[:_MOST_PARTS])}{more}"
    else:
        part = "no known mistake explains its output"
        part = part if departure is None else f"it is not clear how it computes {departure.site}"
    failed = [f"a probe fails, {each.name}: {each.message}" for each in examined.probed.probes if each.ok is False]
    return "; ".join([part, *failed[:1]])


def _next_steps(examined: Examined, departure: FirstDifference | None) -> tuple[str, ...]:
    """Suggestions if nothing matches."""
    request = examined.request
    if examined.probed.visible == "itself only":
        siblings = targets_beside(*split_target(request.of.target))
        others = [f"mha check {shlex.quote(other)}" for other in siblings]
        trace = f"mha trace {shlex.quote(request.of.target)} shows what it computes, step by step"
        return (trace, *others[:_MOST_PARTS])
    options = {"heads": request.n_heads, "scale": request.scale, "rope": request.rope, "mask-means": request.mask_means}
    options["causal"] = request.of.causal or None
    open_options = [f"--{name}" for name, value in options.items() if value is None]
    steps = (
        []
        if departure is None or departure.line is None
        else ["if the line above is a mistake, correct it and check again"]
    )
    steps.append("--against TARGET compares it with code that you trust")
    steps += [f"{', '.join(open_options)} state what its code does not show"] if open_options else []
    return tuple(steps)


# ---------------------------------------------------------------------------------------------- both modes as one report


_SEVERITY: Sequence[Verdict] = ("wrong", "unknown", "consistent", "right")


def combined(reports: Sequence[tuple[UserAttention, Examination]]) -> Examination:
    """The report on the worst mode, with the findings of all, proven ones first."""
    worst = min((report for _, report in reports), key=lambda report: _SEVERITY.index(report.verdict))
    if len(reports) == 1:
        return worst
    findings: dict[str, Finding] = {}
    for subject, report in reports:
        for finding in report.findings:
            earlier = findings.get(finding.code, finding)
            modes = (*earlier.modes, *([] if subject.mode is None else [subject.mode]))
            findings[finding.code] = replace(max(earlier, finding, key=lambda one: one.proven), modes=modes)
    every = [report for _, report in reports]
    return replace(
        worst,
        called="; ".join(report.called for report in every),
        findings=tuple(sorted(findings.values(), key=lambda finding: not finding.proven)),
        choices=tuple(dict.fromkeys(choice for report in every for choice in report.choices)),
        n_hypotheses=sum(report.n_hypotheses for report in every),
        not_examined=tuple(name for name in worst.not_examined if all(name in one.not_examined for one in every)),
        notes=tuple(dict.fromkeys(note for report in every for note in report.notes)),
    )
