"""`mha check`: probes a user's attention, compares it with the reference, and diagnoses its
mistakes.
"""

import math
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mhacli
from mhacli.attention.core import dtype_name
from mhacli.attention.devices import one_thread
from mhacli.attention.stages import Inputs
from mhacli.errors import MhaError, first_names
from mhacli.io.data import decode, finite
from mhacli.models.capture import Call, captured
from mhacli.models.layer_names import config_of
from mhacli.settings import ModelSettings
from mhacli.usercode.accepted import random_inputs
from mhacli.usercode.axes import leaves
from mhacli.usercode.build import (
    Built,
    arguments_of,
    is_of_torch,
    load_built,
    seeded,
    with_zeros_drawn,
)
from mhacli.usercode.copies import copied
from mhacli.usercode.door import NO_ANSWER, call_user
from mhacli.usercode.find_call import find_modes, require_call, with_own_queries
from mhacli.usercode.limits import OutOfTime, TimedStage
from mhacli.usercode.process import Stage
from mhacli.usercode.roles import role_of
from mhacli.usercode.target import (
    Choice,
    Mode,
    TargetRequest,
    naming,
    split_target,
    targets_beside,
)
from mhacli.usercode.text_model import text_model_of_ids, text_model_of_vectors
from mhacli.usercode.user_attention import UserAttention

from .against import compare
from .behaviour import TESTS, BehaviourTester, is_claimed_causal
from .beyond import GRID, Beyond, compare_beyond
from .diagnose import REFERENCE, Diagnosis, diagnose, error_of
from .findings import findings_of
from .gradients import without_reference
from .layer_sites import LayerSites, sites_in
from .masks_as_targets import examine_mask, is_mask, mask_of_target
from .observed import Intent, reason_of
from .packing import isolation
from .passes import Passes, TooLong
from .probes import (
    ProbedAttention,
    arguments_changed,
    arguments_without_effect,
    differing,
    influence_in,
    probe,
    within_block,
)
from .result import (
    NOT_TRIED,
    AttentionInside,
    Behaviour,
    CheckRequest,
    Compared,
    Examination,
    Finding,
    OutputComparison,
    Tried,
    Verdict,
    finding_of,
)
from .sees import cells_of, statement_of
from .stated import seeing_in, stated_causal, tests_stated

_NO_PROJECTIONS = (
    "the names and shapes of the parameters do not show which project queries, keys and values"
)
NO_ATTENTION = "no token attends to another: this is not attention"
_MOST_PARTS = 4
_SMALL = 5_000_000
"""Parameters of a model for which several threads would only wait."""
_ENVIRONMENT = {
    "mha": mhacli.__version__,
    "torch": torch.__version__,
    "python": platform.python_version(),
}


def examine_request(request: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    """The document of the requested examination. Raises `MhaError` if a target cannot be imported,
    built or called.
    """
    asked = decode(CheckRequest, request, "request")
    sys.path[:0] = [folder for folder in asked.import_path if folder not in sys.path]
    return examination_of(asked, stage).to_dict()


def examination_of(request: CheckRequest, stage: Stage) -> Examination:
    """The requested examination, with its duration and the versions."""
    started = time.perf_counter()
    with torch.random.fork_rng([]):  # an example, or code of the user's, draws random numbers
        examination = examine(request, stage)
    return replace(examination, time_s=time.perf_counter() - started, environment=_ENVIRONMENT)


def suits_a_fork(target: object, device: str) -> bool:
    """Whether an object can be examined in a copy of this process, where torch computes in one
    thread on the CPU: on Linux alone other libraries bear a copy of their threads.
    """
    module = target if isinstance(target, nn.Module) else None
    return (
        sys.platform == "linux"
        and device == "cpu"
        and not torch.cuda.is_initialized()
        and _n_parameters(module) < _SMALL
    )


def examine(request: CheckRequest, stage: Stage) -> Examination:
    """The comparison of two implementations, or the behaviour of a checkpoint, or of a target that
    takes token ids; else probes, compares and diagnoses the attention in each of its modes.
    """
    timed = TimedStage(stage, request.max_time_s)
    statement = statement_of(request)
    if statement is not None:
        request = replace(request, causal=statement.is_triangle)
    if request.against is not None:
        with one_thread():
            return compare(request, timed)
    if request.model is not None:
        return _of_checkpoint(request.model_settings, request, stage)
    mask = mask_of_target(request, timed)
    if is_mask(mask):
        return examine_mask(mask, request, timed)
    try:
        return _of_target(request, timed, stage)
    except MhaError as refusal:
        if mask is None or refusal.code == "out-of-memory":
            raise
        with suppress(OutOfTime, *NO_ANSWER):
            return examine_mask(mask, request, timed)
        raise


def _of_target(request: CheckRequest, timed: TimedStage, stage: Stage) -> Examination:
    """The report on code that attends, or that contains attention, or makes a function of
    FlexAttention.
    """
    target = request.target_request
    built = load_built(target, timed, partial(_require_call, target))
    module = built.module
    if is_mask(built.call):
        return examine_mask(built.call, request, timed)
    if module is not None and config_of(module) is not None:
        return _of_checkpoint(module, request, stage)
    if module is not None:
        built = replace(built, call=with_zeros_drawn(module, request.seed))
    with one_thread() if _n_parameters(module) < _SMALL else nullcontext():
        try:
            report = _of_code(built, request)
        except OutOfTime as over:  # during the search of a call, or the first pass over a text
            return Examination(
                verdict="unknown",
                target=request.target_request.target,
                called="",
                arguments=arguments_of(built),
                reason=f"{over} before anything was compared",
                n_parameters=_n_parameters(module),
                not_examined=(REFERENCE, *TESTS),
            )
    if built.unset:
        note = f"its constructor sets no numbers in {first_names(built.unset, 4)}: random ones are"
        report = replace(report, notes=(*report.notes, f"{note} used"))
    return report


def _require_call(target: TargetRequest, built: Built) -> None:
    """Raises `UserRaised` or `MhaError` if it is not known how code is called."""
    if text_model_of_ids(built, target) is None:
        require_call(built, target)


def _of_checkpoint(
    model: ModelSettings | nn.Module, request: CheckRequest, stage: Stage
) -> Examination:
    """The report on a model of transformers by its behaviour."""
    # loads what only checkpoints need
    from .checkpoint import admitted, checkpoint_behaviour

    stage("loading the model", limited=None)
    loaded = admitted(model)
    target = request.target_request.target if request.model is None else loaded.source
    _leave(Examination("unknown", target, "", environment=_ENVIRONMENT), stage)
    tester, notes = checkpoint_behaviour(loaded, request, stage)
    report = _of_behaviour(tester, target)
    return replace(
        report,
        notes=(*report.notes, *notes),
        random_weights=loaded.random_weights,
        tiny=loaded.is_tiny,
    )


def _of_code(built: Built, request: CheckRequest) -> Examination:
    """The report on a model of token ids, or on an attention. Raises `OutOfTime` if time is over
    before there is anything to compare.
    """
    of_ids = partial(text_model_of_ids, built, request.target_request, means=request.mask_means)
    model = of_ids()
    if model is None:
        try:
            modes = find_modes(built, request.target_request)
        except MhaError:
            model = of_ids(has_table=False)
            if model is None:
                raise
        else:
            subjects = (each for mode in modes for each in (mode, *_switched(mode, request)))
            return combined([_with_behaviour(subject, request) for subject in subjects])
    _leave(_begun(model.attention, request), built.stage)
    claim = stated_causal(request)
    if model.has_source and claim is None:
        claim = True
    passes = Passes(model, request.seed, requested=request.length)
    intent = Intent(claim, packed=request.packed)
    tester = BehaviourTester(passes, intent, tests_stated(request))
    parts = _ask(tester, is_claimed_causal(built.module))
    _compare_inside(parts, tester, request)
    report = _of_behaviour(tester, request.target_request.target)
    if stated_causal(request) and model.attention.is_pooled and report.verdict != "wrong":
        # what is stated of its tokens was not seen
        reason = f"causality: {tester.results['causality'].reason}"
        report = replace(report, verdict="unknown", reason=reason)
    with suppress(OutOfTime, *NO_ANSWER):
        report = replace(report, notes=(*report.notes, *_parameters_unread(passes)))
    return replace(report, arguments=arguments_of(built))


def _parameters_unread(passes: Passes) -> Iterator[str]:
    """A sentence about the trainable parameters that change nothing of what a pass returns: those
    to which it gives no gradient, and without effect where they have other numbers. Raises
    `OutOfTime`, and what the code raises.
    """
    attention = replace(passes.attention, has_graph=True)
    if passes.module is None or _n_parameters(passes.module) > _SMALL or attention.is_copied:
        return
    inputs = Inputs(passes.text[None])

    def returned() -> list[Tensor]:
        with seeded(0, attention.device):
            return [each for _, each in leaves(attention.result(inputs))]

    named = {name: each for name, each in passes.module.named_parameters() if each.requires_grad}
    before = returned()
    sums = [each.sum() for each in before if each.requires_grad]
    if not sums:
        return
    found = call_user(torch.autograd.grad, sums, [*named.values()], allow_unused=True)
    unread = {name: named[name] for name, each in zip(named, found, strict=True) if each is None}
    kept = {name: each.detach().clone() for name, each in unread.items()}
    try:
        for each in unread.values():
            each.data.mul_(-1.5).add_(0.1)
        after = returned() if unread else []
    finally:
        for name, each in unread.items():
            each.data.copy_(kept[name])
    if unread and len(after) == len(before) and all(map(torch.equal, before, after)):
        names = first_names([name.removesuffix(".weight") for name in unread], _MOST_PARTS)
        yield f"no output of a text of {passes.length} tokens depends on {names}"


def _switched(subject: UserAttention, request: CheckRequest) -> Iterator[UserAttention]:
    """The attention with its causal switch turned, if it has one and nothing states how it is
    meant.
    """
    is_stated = stated_causal(request) is not None or subject.example is not None
    for switch in subject.parameters("causal"):
        name = switch.name
        default = switch.default
        is_known = "causal" in name.lower() and isinstance(default, bool)
        kept = is_stated or subject.mode == "cross" or name in (*subject.others, *subject.unread)
        if is_known and not kept:
            turned = replace(subject, others={**subject.others, name: not default})
            with suppress(*NO_ANSWER):  # it needs a mask
                replace(turned, is_copied=True)(random_inputs(turned), seed=0)
                yield replace(turned, mode="full" if default else "causal")


def _n_parameters(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _of_behaviour(tester: BehaviourTester, target: str) -> Examination:
    """The report on a model by its behaviour, and by the comparison of what is inside."""
    verdict: Verdict = "consistent" if tester.holds else "unknown"
    if tester.findings:
        verdict = "wrong"
    is_compared = tester.inside and all(each.verdict == "right" for each in tester.inside)
    if verdict == "consistent" and is_compared and not tester.omitted:
        verdict = "right"
    answers = [b for b in tester.behaviours if b.ok is None]
    if tester.intent.packed:  # what is stated comes first
        answers.sort(key=lambda b: b.name != "packing")
    first_open = next((f"{b.name}: {b.reason}" for b in answers), "")
    report = Examination(
        verdict=verdict,
        target=target,
        called=tester.passes.attention.described,
        findings=tuple(tester.findings),
        reason=first_open if verdict == "unknown" else None,
        n_parameters=_n_parameters(tester.passes.module),
        behaviour=tester.behaviours,
        sees=() if tester.seeing is None else tester.seeing.cells,
        n_passes=tester.passes.n_passes,
        inside=tester.inside,
        compared=tester.compared or Compared.of_all(()),
        attempts=tuple(tester.passes.attention.built.tried),
        not_examined=tuple(tester.omitted),
    )
    if all(answer.ok is not False for answer in tester.behaviours):
        return report
    advice = "" if tester.inside else "; attention in a class of its own can be"
    return replace(report, notes=(f"{report.attention_inside}{advice}",))


class ModeReport(NamedTuple):
    """The report on one mode of an attention, and what time did not suffice for."""

    subject: UserAttention
    examination: Examination
    untried: tuple[str, ...] = ()


def _with_behaviour(subject: UserAttention, request: CheckRequest) -> ModeReport:
    """The report on one mode, with its behaviour over a long text where it reads one sequence of
    vectors.
    """
    stage = subject.built.stage
    _leave(_begun(subject, request), stage)
    compared = _seen_and_compared(subject, request)
    report = compared.examination
    _leave(report, stage)
    text_model = None if subject.mode == "cross" else text_model_of_vectors(subject)
    if text_model is None or report.verdict == "wrong":
        return compared
    try:
        passes = Passes(text_model, request.seed, requested=request.length)
        claim = stated_causal(request)
        claim = _intended_causal(report, request) if claim is None else claim
        tester = BehaviourTester(passes, Intent(claim, packed=request.packed))
    except OutOfTime as over:
        reason = report.reason or f"not tried: {over}"
        undecided = replace(report, verdict="unknown", reason=reason)
        return ModeReport(subject, undecided, (*compared.untried, *TESTS))
    except TooLong:
        raise
    except NO_ANSWER as failure:  # no text works alone
        reason_of(failure)  # raises it again where memory lacks
        return compared
    # the text of a model is longer than that of a call
    tester.results |= {each.name: each for each in report.behaviour if each.name != "packing"}
    if report.reason == NO_ATTENTION:  # what else it is given may be cut with its text
        tester.results["prefix"] = Behaviour(
            name="prefix", ok=None, reason=f"{NOT_TRIED}{NO_ATTENTION}"
        )
    parts = _ask(tester, None)
    if report.verdict == "unknown":  # it may be a block around an attention
        _compare_inside(parts, tester, request)
    # a causal model that has nothing to compare, such as one of convolutions
    has_none = parts == {} and report.reason == _NO_PROJECTIONS and claim and tester.holds
    is_pooled = subject.is_pooled and report.verdict == "unknown"
    if tester.inside or is_pooled or has_none:
        behaved = _of_behaviour(tester, report.target)
        report = replace(
            behaved,
            called=report.called,
            arguments=report.arguments,
            example=report.example,
            sees=report.sees,
        )
    else:
        report = _joined(report, tester)
    return ModeReport(subject, report, (*compared.untried, *tester.omitted))


def _seen_and_compared(subject: UserAttention, request: CheckRequest) -> ModeReport:
    """The report on one mode: who sees whom beside what is stated, and the comparison with the
    reference. Of attention that sees others than it should only mistakes in its triangle are
    looked for.
    """
    statement = statement_of(request)
    if statement is None or subject.is_pooled or subject.mode == "cross":
        return _compared(subject, request)
    subject.built.stage(f"comparing who sees whom in {subject.built.name}", limited=False)
    try:
        found = seeing_in(subject, text_model_of_vectors(subject), statement, request)
    except OutOfTime as over:
        reason = f"{over} before it was compared who sees whom"
        return ModeReport(subject, replace(_begun(subject, request), reason=reason), ("sees",))
    if found is None:
        report = _compared(subject, request)
        note = "not compared: who sees whom, because no token can be replaced alone"
        noted = replace(report.examination, notes=(*report.examination.notes, note))
        return report._replace(examination=noted)
    is_right = not found.findings
    report = ModeReport(subject, _begun(subject, request))
    if is_right or request.causal:
        report = _compared(subject, request)
    examination = report.examination
    if not is_right:
        proven = (finding for finding in examination.findings if finding.proven)
        examination = replace(
            examination, verdict="wrong", reason=None, findings=(*found.findings, *proven)
        )
    seen = Behaviour(name="sees", ok=is_right, reason=found.words, tried=Tried(found.length, 1))
    behaviour = (seen, *examination.behaviour)
    examination = replace(examination, behaviour=behaviour, sees=found.cells)
    return report._replace(examination=examination)


def _intended_causal(report: Examination, request: CheckRequest) -> bool | None:
    """Whether tokens are meant to see only earlier ones: as stated, or as the comparison shows."""
    choices = {choice.name for choice in report.choices}
    is_causal = request.causal or not choices.isdisjoint(("meant-causal", "causal"))
    if is_causal and "causal-by-mask" not in choices:
        return True
    return False if request.not_causal else None


def _joined(report: Examination, tester: BehaviourTester) -> Examination:
    """A report of a comparison that is not wrong, with the behaviour."""
    verdict: Verdict = "wrong" if tester.findings else report.verdict
    reason = report.reason
    packing = tester.results["packing"]
    if tester.omitted and verdict == "right":
        verdict = "unknown"
        reason = f"{tester.over}: not tried: {', '.join(tester.omitted)}"
    elif tester.intent.packed and packing.ok is None and verdict == "right":
        verdict = "unknown"
        reason = f"packing: {packing.reason}"
    return replace(
        report,
        verdict=verdict,
        reason=reason,
        findings=tuple(tester.findings),
        behaviour=tester.behaviours,
        n_passes=tester.passes.n_passes,
    )


def _begun(subject: UserAttention, request: CheckRequest) -> Examination:
    """The report on how an attention is called, before anything is compared."""
    return Examination(
        verdict="unknown",
        target=request.target_request.target,
        called=subject.described,
        arguments=arguments_of(subject.built),
        reason="its output is of a whole text, not of each token",
        n_parameters=_n_parameters(subject.module),
        environment=_ENVIRONMENT,
        attempts=tuple(subject.built.tried),
    )


def _leave(report: Examination, stage: Stage) -> None:
    """Leaves a report, which stands if the process ends early."""
    stage(f"examining {report.target}", limited=False, report=report.to_dict())


def _compared(subject: UserAttention, request: CheckRequest) -> ModeReport:
    """The report on the comparison of one mode with the reference."""
    report = _begun(subject, request)
    if subject.is_pooled:
        return ModeReport(subject, _of_pooled(subject, request) or report)
    try:
        inner = within_block(subject)
        probed = probe(inner, request)
        subject.built.stage(f"comparing {report.target} with the reference", limited=False)
    except OutOfTime as over:
        reason = f"{over} before it was compared with the reference"
        return ModeReport(subject, replace(report, reason=reason), (REFERENCE,))
    diagnosis = diagnose(probed)
    findings, over_measuring = findings_of(diagnosis)
    untried = tuple(diagnosis.untried)
    if over_measuring is not None:
        untried = (*untried, "parameters without effect")
    isolated = None
    try:  # before gradients, which leaks make wrong
        isolated = _isolated(diagnosis)
    except OutOfTime as over:
        over_measuring = over_measuring or over
        untried = (*untried, "packing")
    findings = (*_leaks(isolated, diagnosis), *findings)
    beyond = _further(diagnosis, findings)
    findings = tuple(beyond.findings)
    over_measuring = over_measuring or beyond.over
    if beyond.over is not None:
        untried = (*untried, GRID)
    passed = (*diagnosis.passed, *subject.unread)
    if beyond.compared is not None:
        passed += tuple(text.partition("=")[0] for text in beyond.compared.arguments)
    report = replace(
        report,
        verdict="wrong" if findings else "right",
        example="" if subject.example else subject.example_text,
        findings=findings,
        choices=(*_choices(diagnosis), *beyond.choices),
        compared=beyond.compared,
        probes=probed.probes,
        comparison=_comparison(diagnosis, dtype_name(subject.dtype)),
        reason=None,
        n_parameters=_n_parameters(probed.module),
        n_hypotheses=diagnosis.n_hypotheses,
        not_examined=tuple(
            name for name in (*inner.untried, *diagnosis.not_examined) if name not in passed
        ),
        notes=(
            *arguments_without_effect(subject),
            *arguments_changed(subject, request.seed),
            *diagnosis.notes,
            *beyond.notes,
        ),
        behaviour=tuple(filter(None, (diagnosis.cache, isolated))),
    )
    if not findings and untried:
        reason = f"{diagnosis.over or over_measuring} while it was compared with the reference"
        report = replace(report, verdict="unknown", reason=reason)
    elif not findings and not diagnosis.is_right:
        report = _undecided(report, diagnosis)
    return ModeReport(subject, report, untried)


def _isolated(diagnosis: Diagnosis) -> Behaviour | None:
    """Whether documents are isolated, None where there are none. Raises `OutOfTime`."""
    try:
        return isolation(diagnosis.subject, diagnosis.request.seed)
    except NO_ANSWER as failure:
        reason = f"{NOT_TRIED}{reason_of(failure)}"
        return Behaviour(name="packing", ok=None, reason=reason)


def _leaks(isolated: Behaviour | None, diagnosis: Diagnosis) -> Iterator[Finding]:
    """The finding where documents are not isolated."""
    if isolated is None or isolated.ok is not False:
        return
    line = LayerSites(diagnosis.call).line_for((), "", diagnosis.subject.built)
    size = f"{isolated.largest or math.inf:.2g} × the largest output"
    evidence = f"with other tokens in all other documents it differs by {size}"
    yield finding_of("documents-leak", evidence, line, message=isolated.reason, fix="")


def _of_pooled(subject: UserAttention, request: CheckRequest) -> Examination | None:
    """The report on attention that makes its queries itself; None where none is found."""
    with suppress(*NO_ANSWER):
        own = with_own_queries(subject)
        report = None if own is None else _compared(own, request).examination
        if report is not None and report.verdict != "unknown":
            return replace(report, called=subject.described)
    return None


def _further(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Beyond:
    """What further calls show of attention that is right in its first ones, and the gradients of
    attention that is not understood; without them the mistakes that are known.
    """
    if findings:
        return Beyond([*findings])
    if diagnosis.is_right:
        return compare_beyond(diagnosis)
    if diagnosis.request.no_backward:
        return Beyond()
    try:
        own = without_reference(diagnosis.probed)
    except OutOfTime as over:
        return Beyond(over=over)
    return Beyond(own.findings, notes=own.notes)


def _comparison(diagnosis: Diagnosis, dtype: str) -> OutputComparison | None:
    """How far the layer that was accepted is from the outputs; None without one."""
    if diagnosis.candidate is None:
        return None
    errors = [
        (error_of(diagnosis.layer, diagnosis.mistakes, [case]), case.tolerance)
        for case in diagnosis.cases
    ]
    relative, tolerance = max(errors)
    return OutputComparison(
        "reference", dtype, len(errors), finite(relative * tolerance), tolerance
    )


# --------------------------------------------------------------------- the attention inside a model


ModulesByClass = Mapping[type, Mapping[str, nn.Module]]
"""Modules by class and name."""


class _Inside(NamedTuple):
    """The modules that compute attention weights in a pass of a model, by class and name, and of
    each of their calls that reads the text itself whether it hides later tokens.
    """

    modules: ModulesByClass
    hide_later: Sequence[bool]


def _attention_inside(passes: Passes) -> _Inside:
    """The attention in a pass over a text, which is a short one for a large model."""
    modules = passes.attention.built.parts
    found = dict[type, dict[str, nn.Module]]()
    hide_later = list[bool]()
    text = passes.texts[-1] if _n_parameters(passes.module) > _SMALL else passes.text

    def take(call: Call) -> None:
        name = call.name if call.name in modules else ""
        # what holds the weights of the attention stands for it, not a part without any
        while name and not [*modules[name].parameters()]:
            name = name.rpartition(".")[0]
        found.setdefault(type(modules[name]), {})[name] = modules[name]
        *_, q_len, k_len = call.shape
        is_of_text = passes.attention.is_pooled or q_len == len(text)
        if q_len == k_len > 1 and is_of_text and call.unreadable is None:
            hide_later.append(not cells_of(call).expand(-1, -1, q_len, k_len).triu(1).any())

    if passes.module is not None:
        # compiled code hides its attention, and code that torch's fused layers skip may raise
        # anything
        with suppress(OutOfTime, *NO_ANSWER), captured(passes.module, take, anywhere=True):
            passes.run_pass(text)
    return _Inside(found, hide_later)


def _ask(tester: BehaviourTester, claimed: bool | None) -> ModulesByClass | None:
    """Asks all behaviours, and gives the modules that compute attention weights, None if the model
    itself does. Where nothing states if tokens may see later ones, an attention that hides them
    does, else what is `claimed`.
    """
    inside = _attention_inside(tester.passes)
    if tester.intent.is_causal is None:
        hides_somewhere = any(inside.hide_later)
        # attentions that hide later tokens beside others that do not are those of a decoder: the
        # others see them by mistake, or read a memory of the same length
        is_decoder = hides_somewhere and not all(inside.hide_later)
        tester.intent = tester.intent._replace(
            is_causal=True if is_decoder else claimed, hides_later=hides_somewhere
        )
    tester.test()
    is_itself = any("" in named for named in inside.modules.values())
    return None if is_itself else inside.modules


class ClassReport(NamedTuple):
    """The report on a class of attention inside a model: what it was compared in, None where it is
    not right, its mistakes, and whether time was over.
    """

    inside: AttentionInside
    compared: Compared | None
    findings: tuple[Finding, ...]
    is_over: bool


def _not_decided(
    cls: type, names: tuple[str, ...], reason: str, *, is_over: bool = False
) -> ClassReport:
    """The report on modules of a class of which nothing was found out."""
    return ClassReport(AttentionInside(cls.__name__, names, "unknown", reason), None, (), is_over)


def _compare_inside(
    parts: ModulesByClass | None, tester: BehaviourTester, request: CheckRequest
) -> None:
    """Compares each class of attention inside a model with the reference; their mistakes come
    before those of behaviour.
    """
    stage = tester.passes.attention.built.stage
    reports = list[ClassReport]()
    try:
        if parts == {}:
            reports = [*_unseen(tester.passes, request, stage)]
    except OutOfTime:
        tester.omitted.append(f"{REFERENCE} of the attention inside")
    for cls, named in (parts or {}).items():
        reports += _of_class(cls, named, request, stage)
    tester.omitted += [f"{REFERENCE} of {each.inside.type}" for each in reports if each.is_over]
    tester.inside = tuple(each.inside for each in reports)
    tester.compared = Compared.of_all([each.compared for each in reports])
    mistakes = _by_place(finding for each in reports for finding in each.findings)
    if tester.seeing is not None and tester.seeing.findings:  # which longer calls show too
        mistakes = [finding for finding in mistakes if finding.proven]
    tester.findings = [*mistakes, *tester.findings]


def _of_class(
    cls: type, named: Mapping[str, nn.Module], request: CheckRequest, stage: Stage
) -> Iterator[ClassReport]:
    """The reports on the modules of a class, of which one stands for all with the same settings.
    Where one is not decided, the others are not examined.
    """
    alike = dict[frozenset[tuple[str, object]], dict[str, nn.Module]]()
    for name, module in named.items():
        alike.setdefault(_settings_of(module), {})[name] = module
    groups = [*alike.values()]
    while groups:
        report = _of_alike(cls, groups.pop(0), request, stage)
        if report.inside.verdict == "unknown":
            names = (*report.inside.names, *(name for group in groups for name in group))
            inside = AttentionInside(cls.__name__, names, "unknown", report.inside.reason)
            report = report._replace(inside=inside)
            groups = []
        yield report


def _of_alike(
    cls: type, named: Mapping[str, nn.Module], request: CheckRequest, stage: Stage
) -> ClassReport:
    """The report on modules of a class with the same settings."""
    names = tuple(named)
    try:
        reports = [_compared(*mode) for mode in _alone(named[names[-1]], request, stage)]
    except OutOfTime as over:
        return _not_decided(cls, names, str(over), is_over=True)
    except NO_ANSWER as failure:
        return _not_decided(cls, names, reason_of(failure))
    report = combined(reports)
    inside = AttentionInside(cls.__name__, names, report.verdict, report.reason or "")
    compared = report.compared if report.verdict == "right" else None
    findings = tuple(replace(finding, parts=names) for finding in report.findings)
    return ClassReport(inside, compared, findings, any(each.untried for each in reports))


def _by_place(findings: Iterable[Finding]) -> list[Finding]:
    """The mistakes, each of a line once, with all parts in which it was found."""
    joined = dict[object, Finding]()
    for finding in findings:
        key = finding.message, finding.file, finding.line
        parts = joined[key].parts if key in joined else ()
        joined[key] = replace(joined.get(key, finding), parts=parts + finding.parts)
    return [*joined.values()]


def _unseen(passes: Passes, request: CheckRequest, stage: Stage) -> Iterator[ClassReport]:
    """The reports on the innermost modules of the user's classes in which a token changes the
    output of another: kernels and compiled code show no attention weights. Raises `OutOfTime`.
    """
    found = dict[type, dict[str, nn.Module]]()
    inner = ""  # the last one that was taken
    parts = [*passes.attention.built.parts.items()]
    for name, part in reversed(parts[1:]):  # parts before what holds them
        if not is_of_torch(part) and _n_parameters(part) and not inner.startswith(f"{name}."):
            found.setdefault(type(part), {})[name] = part
            inner = name
    calls = passes.run_pass(passes.text)[0].parts() if found else {}
    for cls, every in reversed(found.items()):
        named = dict(reversed(every.items()))
        name, module = next(iter(named.items()))
        try:
            subjects = [each for each in _alone(module, request, stage) if _attends(*each)]
            is_repeated = any(_repeats(subject, calls.get((name, 0))) for subject, _ in subjects)
        except OutOfTime:
            raise
        except NO_ANSWER as failure:
            reason_of(failure)  # raises it again where memory lacks
            continue
        if is_repeated:
            yield from _of_class(cls, named, request, stage)
        elif subjects:
            reason = "by itself it gives other outputs than in the model"
            yield _not_decided(cls, tuple(named), reason)


def _attends(subject: UserAttention, request: CheckRequest) -> bool:
    """Whether a token changes the output of another."""
    seen = influence_in(ProbedAttention(subject, request), subject.sizes.q_len)
    return seen is not None and bool(seen.fill_diagonal_(False).any())


def _repeats(subject: UserAttention, call: tuple[Tensor | None, Tensor | None] | None) -> bool:
    """Whether a call gives what a module gave in its model for the same rows."""
    rows, output = call or (None, None)
    if rows is None or output is None or subject.mode == "cross":
        return False
    return not differing(output[None], subject(Inputs(rows[None].double()))).any()


def _alone(
    module: nn.Module, request: CheckRequest, stage: Stage
) -> Iterator[tuple[UserAttention, CheckRequest]]:
    """The modes of a module inside a model as those of a target, each with its request."""
    with naming(copied(module)) as target:
        alone = replace(request, target=target, arg=(), call_arg=(), example=None, causal=False)
        built = load_built(alone.target_request, stage)
        for subject in find_modes(built, alone.target_request):
            yield subject, alone


def _settings_of(module: nn.Module) -> frozenset[tuple[str, object]]:
    """What a module and its parts hold besides weights, such as a scale, the name of a mode or the
    table of a mask, but for the number of its layer.
    """
    settings = set[tuple[str, object]]()
    for path, part in module.named_modules():
        settings.add((path, type(part).__qualname__))
        for name, item in [*vars(part).items(), *part.named_buffers(recurse=False)]:
            is_setting = isinstance(item, int | float | str | Tensor | FunctionType | None)
            if is_setting and role_of(name) != "layer":
                value = _contents(item) if isinstance(item, Tensor) else item
                settings.add((f"{path}.{name}", value))
    return frozenset(settings)


def _contents(tensor: Tensor) -> object:
    """What two tensors have in common only if they are equal: the digest of their numbers, or where
    these have no bytes of their own the tensor itself.
    """
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        return id(tensor)
    numbers = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    return tensor.shape, tensor.dtype, blake2b(numbers.numpy().tobytes()).digest()


# --------------------------------------------------------------------------------------- the report


def _choices(diagnosis: Diagnosis) -> tuple[Choice, ...]:
    """The design choices of the diagnosed layer, and those that the probes show."""
    probed = diagnosis.probed
    candidate = diagnosis.candidate
    form = diagnosis.mask_form
    choices = list[Choice]()
    if candidate is not None:
        layer = candidate.layer
        weights = candidate.layer.weights
        choices += candidate.choices
        if weights is not None:
            named = zip(("q", "k", "v", "the output"), weights, strict=True)
            unbiased = ", ".join(
                name for name, each in named if each is not None and each.bias is None
            )
            d_v = len(weights.v.weight) // layer.n_kv_heads
            if unbiased:
                choices.append(Choice("no-bias", f"no bias: {unbiased}"))
            if layer.n_kv_heads != layer.n_heads:
                words = f"{layer.n_heads} query heads share {layer.n_kv_heads} kv heads"
                choices.append(Choice("gqa", words))
            if d_v != layer.d_head:
                words = f"values are {d_v} wide, queries and keys {layer.d_head}"
                choices.append(Choice("d-v", words))
        if layer.causal and not probed.expects_causal and not diagnosis.mistakes:
            choices.append(Choice("causal", "it hides later tokens by itself"))
    if probed.expects_causal and not probed.request.causal and not probed.subject.is_turned:
        causal_by = probed.subject.causal_by
        source = "its name" if causal_by is None else f"its argument {causal_by}"
        choices.append(Choice("meant-causal", f"it is meant to be causal, as {source} says"))
    is_of_queries = form is not None and "query" in form.axes
    if probed.expects_causal and probed.visible == "full" and is_of_queries:
        words = "it is causal only through the mask that it is given"
        choices.append(Choice("causal-by-mask", words))
    return tuple(dict.fromkeys([*choices, *diagnosis.choices]))


def _undecided(report: Examination, diagnosis: Diagnosis) -> Examination:
    """The report without a verdict, with the reason and with suggestions: it is no attention, its
    weights cannot be read, or a site differs.
    """
    probed = diagnosis.probed
    likeliest = diagnosis.candidate or diagnosis.likeliest
    request = probed.request
    if probed.visible == "itself only":
        siblings = targets_beside(*split_target(report.target))
        others = [f"mha check {shlex.quote(other)}" for other in siblings[:_MOST_PARTS]]
        trace = f"mha trace {shlex.quote(report.target)}"
        return replace(report, verdict="unknown", reason=NO_ATTENTION, next_steps=(trace, *others))
    departure = None
    unclear = diagnosis.unexplained
    if likeliest is not None:
        departure = sites_in(diagnosis.call, likeliest.layer).first_difference()
        if diagnosis.candidate is None and likeliest.reading is not None:
            unclear = [*likeliest.reading.unused]
    width = probed.subject.sizes.d_in
    reason = "no known mistake explains its output"
    if likeliest is None:
        reason = _NO_PROJECTIONS
        if request.n_heads and width % request.n_heads:
            heads = f"--heads {request.n_heads}"
            reason = f"{heads} does not divide the width {width} of its input"
    elif unclear:
        names = first_names(dict.fromkeys(unclear), _MOST_PARTS)
        reason = f"it is not clear what it does with {names}"
    elif departure is not None:
        reason = f"it is not clear how it computes {departure.site}"
    steps = (
        "--against TARGET compares it with code that you trust",
        "--heads, --scale, --rope, --mask-means and --causal state what its code does not show",
    )
    return replace(report, verdict="unknown", reason=reason, departure=departure, next_steps=steps)


# ------------------------------------------------------------------------- both modes as one report


_SEVERITY: Sequence[Verdict] = ("wrong", "unknown", "consistent", "right")


def _of_modes(reports: Sequence[ModeReport]) -> Iterator[Finding]:
    """The findings of several modes, each code once, with all its modes and the evidence of each.
    Beside a turned causal switch, the usual mode is the other one.
    """
    turned = {each.subject.mode for each in reports if each.subject.is_turned}
    usual: Mode | None = "causal" if "full" in turned else "full" if turned else None
    by_code = dict[str, list[tuple[Mode | None, Finding]]]()
    for subject, report, _ in reports:
        for finding in report.findings:
            by_code.setdefault(finding.code, []).append((subject.mode or usual, finding))
    for found in by_code.values():
        likeliest = max((finding for _, finding in found), key=lambda one: one.proven)
        modes = tuple(dict.fromkeys(mode for mode, _ in found if mode is not None))
        lines = [f"in {mode} attention: {finding.evidence}" for mode, finding in found]
        evidence = "\n".join(lines) if lines[1:] else likeliest.evidence
        yield replace(likeliest, evidence=evidence, modes=modes)


def combined(reports: Sequence[ModeReport]) -> Examination:
    """The report on the worst mode, with the findings of all, proven ones first."""
    every = [report.examination for report in reports]
    worst = min(every, key=lambda report: _SEVERITY.index(report.verdict))
    untried = dict.fromkeys(name for report in reports for name in report.untried)
    common = [name for name in worst.not_examined if all(name in one.not_examined for one in every)]
    worst = replace(worst, not_examined=tuple(dict.fromkeys([*common, *untried])))
    if len(every) == 1:
        return worst
    plain = [each.examination for each in reports if not each.subject.is_turned]
    return replace(
        worst,
        called="; ".join(dict.fromkeys([*(report.called for report in plain), worst.called])),
        compared=Compared.of_all([report.compared for report in every]),
        findings=tuple(sorted(_of_modes(reports), key=lambda finding: not finding.proven)),
        choices=tuple(dict.fromkeys(choice for report in every for choice in report.choices)),
        n_hypotheses=sum(report.n_hypotheses for report in every),
        notes=tuple(dict.fromkeys(note for report in every for note in report.notes)),
    )
