"""Finds the mistakes in a user's attention: puts mistakes of the catalogue into the reference until
the outputs match.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.mistakes import MISTAKES, sentinels
from mhacli.attention.stages import (
    Inputs,
    Mistake,
    NotPossible,
    ReferenceLayer,
    run_stages,
    stages_with,
)
from mhacli.attention.taps import largest_difference
from mhacli.commands.check.candidates import Candidate, candidates
from mhacli.commands.check.layer_sites import sites_in
from mhacli.commands.check.probes import (
    InputCase,
    ProbedAttention,
    large_case,
    make_case,
    masked_cases,
    recorded_case,
    unmasked_inputs,
)
from mhacli.commands.check.result import Behaviour
from mhacli.io.data import finite
from mhacli.usercode.build import as_float64, cast_copy
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.graph import RecordedCall, Watcher
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.masks import MaskForm
from mhacli.usercode.names import is_read_only_with
from mhacli.usercode.process import Stage
from mhacli.usercode.roles import call_role, called_function
from mhacli.usercode.steps import StepConvention, causal_inputs, step_conventions
from mhacli.usercode.target import Choice

_MOST_RANKED, _LAYERS_FOR_ONE, _LAYERS_FOR_MORE, _PLAIN = 100, 12, 2, 3
"""The most layers to rank, to try with one mistake, and with several: a few seconds' work. The
first two may be the same layer without and with its own causal mask. The plainest are tried
early."""
_MOST_MISTAKES = 4
_HIDES = -1e4
"""A masked score that no ordinary score falls below. Source: the first BERT, whose masked scores
were −10,000."""


@dataclass(frozen=True)
class Trial:
    """A layer that may explain some cases, alone or with mistakes of a `pool`; `call` is the
    recorded first case.
    """

    candidate: Candidate
    cases: list[InputCase]
    call: RecordedCall
    stage: Stage
    pool: Sequence[Mistake] = ()

    def require_time(self) -> None:
        """Raises `OutOfTime` if the time of the examination is over."""
        self.stage("comparing with the reference", limited=False)

    def n_produced(self, mistakes: Sequence[Mistake]) -> int:
        """How many tensors the layer with these mistakes has in common with the call."""
        return sites_in(self.call, self.candidate.layer, mistakes).n_produced

    def likelihood(self, mistakes: Sequence[Mistake]) -> tuple[int, bool]:
        """How many tensors it has in common with the call, and whether the line of the last mistake
        reads like it.
        """
        sites, last = sites_in(self.call, self.candidate.layer, mistakes), mistakes[-1]
        source = sites.line_of(last.site).source
        return sites.n_produced, any(re.search(pattern, source) for pattern in last.at)

    def with_one_more(self, known: tuple[Mistake, ...]) -> list[tuple[Mistake, ...]]:
        """The known mistakes with each of the pool that replaces other stages."""
        taken = {stage for mistake in known for stage in mistake.stages}
        return [(*known, mistake) for mistake in self.pool if taken.isdisjoint(mistake.stages)]


@dataclass
class Diagnosis:
    """The result of a diagnosis. `call` is the recorded first case. `proofs` are the mistakes that
    together give the outputs, each with the largest difference, relative to the tolerance, and the
    trial that shows it. Where nothing explains the output, `likeliest` is the layer that has the
    most tensors in common with the call, and `likeliest_mistake` the mistake of it that gives the
    weighted values of the call. `not_examined` are masks that act only beside another argument,
    `ignored` those that hide nothing whatever stands in them, and `unexplained` those that no
    hypothesis matches. `cache` is what steps behind a cache gave, to which the arguments `passed`
    were given, and `notes` are for callers. `over` ended it, if its time was over.
    """

    cases: list[InputCase]
    call: RecordedCall
    candidate: Candidate | None = None
    likeliest: Candidate | None = None
    likeliest_mistake: Mistake | None = None
    proofs: dict[Mistake, tuple[float, Trial]] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    not_examined: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    n_hypotheses: int = 0
    cache: Behaviour | None = None
    passed: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    over: OutOfTime | None = None

    @property
    def layer(self) -> ReferenceLayer:
        """The layer that was accepted."""
        assert self.candidate is not None
        return self.candidate.layer

    @property
    def mistakes(self) -> tuple[Mistake, ...]:
        """The mistakes that together reproduce the outputs."""
        return tuple(self.proofs)

    @property
    def is_right(self) -> bool:
        """Whether the plain reference reproduces every output."""
        is_explained = self.candidate is not None and not self.unexplained
        return is_explained and not self.mistakes and self.over is None

    @property
    def mask_form(self) -> MaskForm | None:
        """The form of a mask of queries and keys that it obeys; None if it takes none, or reads it
        wrongly.
        """
        forms = (
            case.form for case in self.cases if case.form is not None and not case.form.is_padding
        )
        return next(forms, None) if self.is_right else None

    def explains(self, case: InputCase, *more: Mistake, **changes: Any) -> bool:
        """Whether the layer with its mistakes and some more gives the output of a case, whether it
        hides scores by −∞ or by −10⁹; `changes` are other fields of it.
        """
        layer, known = replace(self.layer, **changes), (*self.mistakes, *more)
        return any(
            error_of(layer, (*known, *hides), [case]) <= 1.0
            for hides in ((), *zip(sentinels(-1e9)))
        )

    def accepts(self, trial: Trial, hypotheses: Sequence[tuple[Mistake, ...]]) -> bool:
        """Whether one of these tuples of mistakes explains the cases of a trial. Keeps it: of
        several, the one whose layer shares the most tensors with the call, and then one whose line
        reads like it.
        """
        self.n_hypotheses += len(hypotheses)
        trial.require_time()
        errors = [
            (error_of(trial.candidate.layer, mistakes, trial.cases), mistakes)
            for mistakes in hypotheses
        ]
        matching = [match for match in errors if match[0] <= 1.0]
        if not matching:
            return False
        error, mistakes = (
            max(matching, key=lambda match: trial.likelihood(match[1]))
            if matching[1:]
            else matching[0]
        )
        self.candidate = trial.candidate
        self.proofs |= {new: (error, trial) for new in mistakes if new not in self.proofs}
        self.cases += [case for case in trial.cases if case not in self.cases]
        return True

    def finds(self, trial: Trial, n_more: int = 1) -> bool:
        """Whether mistakes of the pool explain the cases together with those that are known, and
        keeps them: one, else one more after each that shares the most tensors with the call.
        """
        leads, n_shared = [self.mistakes], 0
        for n_left in reversed(range(n_more)):
            if any(self.accepts(trial, trial.with_one_more(lead)) for lead in leads):
                return True
            counts = [
                (trial.n_produced(more), more) for more in trial.with_one_more(leads[0]) if n_left
            ]
            n_shared = max(n_shared, trial.n_produced(leads[0]))
            n_best = max((n for n, _ in counts), default=0)
            if n_best <= n_shared:
                break
            leads = [more for n, more in counts if n == n_best]
        return False


def error_of(
    layer: ReferenceLayer, mistakes: Sequence[Mistake], cases: Sequence[InputCase]
) -> float:
    """The largest difference from the outputs, relative to each case's tolerance: up to 1 is a
    match, and the first larger one ends the comparison. Infinite if shapes or NaN positions differ,
    if a mistake does not apply to this layer, or if everything is NaN and none of the mistakes
    leaves only that.

    Padded queries and those without visible keys have no right output and are left out.
    """
    stages, worst = stages_with(mistakes), 0.0
    may_be_nan = any(mistake.may_be_nan for mistake in mistakes)
    for case in cases:
        try:
            with torch.no_grad():
                out, keep = run_stages(stages, layer, case.inputs)
            if out.shape != case.output.shape:
                return math.inf
            counted = case.counted(out, keep)
        except (NotPossible, *NO_ANSWER):  # in this layer, or a norm of the module fails
            return math.inf
        compared = out[counted]
        if not compared.numel() or (not may_be_nan and bool(compared.isnan().all())):
            return math.inf
        worst = max(worst, largest_difference(compared, case.output[counted]) / case.tolerance)
        if worst > 1.0:
            break
    return worst


def diagnose(probed: ProbedAttention) -> Diagnosis:
    """Diagnoses a subject, as far as its time allows. Raises `UserRaised`."""
    result = Diagnosis([], RecordedCall(torch.empty(0), Inputs(torch.empty(0, 0, 0))))
    try:
        _diagnose(result, probed)
        stage, name = probed.subject.built.stage, probed.request.target_request.target
        stage(f"giving {name} a text step by step", limited=False)
        examine_stepwise(probed, result)
    except OutOfTime as over:
        result.over = over
    return result


def _diagnose(result: Diagnosis, probed: ProbedAttention) -> None:
    """Puts into a diagnosis which layer explains the outputs, with which mistakes."""
    subject, seed = probed.subject, probed.request.seed
    cases = [
        make_case(name, subject, inputs) for name, inputs in unmasked_inputs(subject, seed).items()
    ]
    result.cases, result.call = cases, recorded_case(subject, cases[0])
    again = make_case("", subject, cases[0].inputs)
    if (
        largest_difference(again.output, cases[0].output) <= again.tolerance
    ):  # else no layer matches
        _explain_core(result, probed)
    if result.candidate is None:
        return
    of_masks = [
        form for form in subject.mask_forms if call_role(form.parameter) != "bias"
    ] or subject.mask_forms
    forms, means = [*of_masks, *subject.padding_forms], probed.request.mask_means
    if means is not None:  # what is added to scores, such as −∞, has no True
        forms = [
            each
            for each in forms
            if each.kind != "additive" and (each.kind == "lengths" or each.true_means == means)
        ]
    for name in dict.fromkeys(form.parameter for form in forms):
        of_name = [form for form in forms if form.parameter == name]
        _explain_masked(result, probed, list(masked_cases(subject, seed, of_name)))
    masked = [case for case in result.cases if case.form is not None]
    masks = [case.form for case in masked if case.form is not None and not case.form.is_padding]
    of_windows = [form._replace(n_shared=2) for form in masks[:1] if "batch" in form.axes]
    for case in masked_cases(
        subject, seed, of_windows, batch=4
    ):  # two images with two windows each
        _explain_further(result, probed, [case])
    unmasked = large_case(subject, cases[0])
    for case in masked:
        _explain_further(result, probed, [large_case(subject, case), unmasked])
    if not masks:
        _explain_further(result, probed, [unmasked])


def _pool(probed: ProbedAttention, candidate: Candidate, call: RecordedCall) -> list[Mistake]:
    """The mistakes that cannot be design choices."""
    order = None if candidate.reading is None else candidate.reading.order
    known = {
        "causal": probed.expects_causal,
        "pairing": probed.request.rope is not None,
        "order": (
            probed.subject.n_rows == 3
            or all(choice.name != "unnamed" for choice in candidate.choices)
        ),
        "fused": order is not None,
    }
    facts = {name for name, is_known in known.items() if is_known}
    numbers = [mistake for number in call.numbers_below(-4.0) for mistake in sentinels(number)]
    possible = [
        each
        for each in (*MISTAKES, *numbers)
        if each.shown_by != "steps" and facts.issuperset(each.needs)
    ]
    return [
        each for each in possible if not (probed.request.not_causal and each.stage == "causal_rule")
    ]


def _explain_core(result: Diagnosis, probed: ProbedAttention) -> None:
    """Accepts the first layer that matches without a mistake, or with one; then the same for layers
    that contradict a statement; then one with several mistakes. Few are tried where no token
    attends to another, which few mistakes explain.
    """
    call, ranked, attends = result.call, list[Trial](), probed.visible != "itself only"
    most = _LAYERS_FOR_ONE if attends else _PLAIN
    for _, group in groupby(
        candidates(probed, call), key=lambda each: bool(each.contradicts(probed.request))
    ):
        layers = list(group)
        stage = probed.subject.built.stage
        plain = [Trial(candidate, result.cases, call, stage) for candidate in layers]
        if any(result.accepts(trial, [()]) for trial in plain):
            return
        by_run = sorted(
            layers[:_MOST_RANKED], key=lambda candidate: -sites_in(call, candidate.layer).n_produced
        )
        few = dict.fromkeys([by_run[0], *layers[:_PLAIN], *by_run[:most], *layers[:most]])
        likely = {
            layer: Trial(layer, result.cases, call, stage, _pool(probed, layer, call))
            for layer in few
        }
        ranked = ranked or [likely[layer] for layer in by_run[:most]]
        result.likeliest = ranked[0].candidate
        if any(map(result.finds, likely.values())):
            return
    if attends and any(result.finds(trial, _MOST_MISTAKES) for trial in ranked[:_LAYERS_FOR_MORE]):
        return
    if ranked and not any(sites_in(call, trial.candidate.layer).producers("z") for trial in ranked):
        layer, pool = ranked[0].candidate.layer, ranked[0].pool
        shown = [mistake for mistake in pool if sites_in(call, layer, [mistake]).producers("z")]
        result.likeliest_mistake = (
            shown[0] if len({mistake.code for mistake in shown}) == 1 else None
        )


def _explain_masked(result: Diagnosis, probed: ProbedAttention, cases: list[InputCase]) -> None:
    """Accepts the mask form that matches, else mistakes under the likeliest form."""
    subject, candidate = probed.subject, result.candidate
    if result.mistakes:  # an all-NaN output cannot show another mistake
        cases = [case for case in cases if case.output.isfinite().any()]
    if not cases or candidate is None:
        return
    unmasked = [
        case for case in result.cases if case.form is None
    ]  # which a mistake must explain too
    for case in cases:
        if result.explains(case):
            is_added = case.form is not None and case.form.kind == "additive"
            for other in cases if is_added else ():  # (1 − mask) · −10 also hides where −∞ is given
                _explain_further(result, probed, [other])
            result.cases.append(case)
            result.choices.append(Choice("mask-form", case.name))
            return
    for case in cases if result.layer.causal else ():
        if (
            case.form is not None
            and "query" in case.form.axes
            and result.explains(case, causal=False)
        ):
            what = f"a mask that is given takes the place of its own causal mask ({case.name})"
            result.choices.append(Choice("mask-replaces-causal", what))
            return
    form = cases[0].form
    assert form is not None
    if is_read_only_with(called_function(subject.built.call), form.parameter, subject.untried):
        result.not_examined.append(form.parameter)  # it belongs to an argument that is never given
        return
    for case in cases:
        call = recorded_case(subject, case)
        pool = _pool(probed, candidate, call)
        if result.finds(Trial(candidate, [case, *unmasked], call, subject.built.stage, pool)):
            return
    result.unexplained.append(form.parameter)
    inputs = cases[0].inputs
    allowed, real = (
        None if each is None else torch.ones_like(each) for each in (inputs.allowed, inputs.real)
    )
    if torch.equal(
        as_float64(subject(inputs._replace(allowed=allowed, real=real), mask=form)), cases[0].output
    ):
        result.ignored.append(form.parameter)


def _explain_further(result: Diagnosis, probed: ProbedAttention, cases: list[InputCase]) -> None:
    """Finds a mistake that only some inputs show, those of the first case: masks of windows, or
    huge scores, which show a finite mask value and a softmax without subtracting the maximum. It
    must explain all cases.
    """
    case = cases[0]
    if result.candidate is None or result.explains(case):
        return
    call = recorded_case(probed.subject, case)
    for number in call.numbers_below(_HIDES):
        if any(result.explains(case, mistake) for mistake in sentinels(number)):
            what = f"masked scores become {number:g}, which hides every score below {-number:g}"
            result.choices.append(Choice("mask-value", what))
            return
    pool = [
        mistake
        for mistake in _pool(probed, result.candidate, call)
        if mistake.shown_by == "further"
    ]
    result.finds(Trial(result.candidate, cases, call, probed.subject.built.stage, pool))


# ----------------------------------------------------------------------------- steps behind a cache


_FEWEST = 4
"""The shortest text that is read in steps."""
_LATER_CHUNK = "a later step of several tokens with the cache"


def examine_stepwise(probed: ProbedAttention, diagnosis: Diagnosis) -> None:
    """Reads a text after a prefill, token by token, and in longer steps, by each convention until
    one gives what one call gives, and diagnoses the first that does not. Nothing if the subject
    takes no cache, if no convention works, and if tokens see later ones.
    """
    attention, form = probed.subject, diagnosis.mask_form
    if probed.module is not None:  # which no call has left anything in
        attention = attention.with_call(cast_copy(probed.module, attention.dtype, attention.device))
    takes_causal = (
        probed.visible == "full" and form is not None and {"query", "key"} <= set(form.axes)
    )
    is_causal = takes_causal or (
        probed.influence is not None and not bool(probed.influence.triu(1).any())
    )
    length, mask = attention.sizes.q_len, form if takes_causal else None
    conventions = [*step_conventions(attention, mask)] if is_causal and length >= _FEWEST else []
    if attention.mode == "cross" or "dropout-in-eval" in probed.evidence or not conventions:
        return
    rows = attention.drawer(probed.request.seed).rows(length).to(attention.dtype)
    whole = as_float64(
        replace(attention, is_copied=True)(causal_inputs(rows, 0, length, mask), mask=mask)
    )
    tried = []
    for convention in conventions:
        cases = list(_cases(convention, rows))
        differing = [
            case for case in cases if largest_difference(case.output, whole) > case.tolerance
        ]
        tried += [(convention, cases, differing)] if cases else []
        if cases and not differing:
            break
    if not tried:
        return
    convention, cases, differing = min(tried, key=lambda each: bool(each[2]))
    ok, reason = _judged(convention, cases, differing, diagnosis)
    largest = max(largest_difference(case.output, whole) for case in cases)
    diagnosis.passed, reason = convention.names, f"{reason} ({', '.join(convention.names)})"
    diagnosis.cache = Behaviour(name="cache", ok=ok, reason=reason, largest=finite(largest))


def _cases(convention: StepConvention, rows: Tensor) -> Iterator[InputCase]:
    """The cases of a prefill with single steps, of single tokens, and of longer steps where they
    are accepted; none if the first raises, or if what is read later does not depend on what was
    read first.
    """
    length, text = rows.shape[1], as_float64(rows)
    start = length - 2
    changed = torch.cat([rows[:, :start].flip(-1) + 0.5, rows[:, start:]], dim=1)
    single, longer = tuple(range(1, length + 1)), ((length - 3, length - 1, length), (2, length))
    for ends in ((start, length - 1, length), single, *longer):
        # not every attention accepts longer steps, or a first step of one token
        with suppress(*NO_ANSWER):
            out = convention(rows, ends)
            if (
                ends[0] == start
                and largest_difference(out[:, start:], convention(changed, ends)[:, start:]) <= 1e-9
            ):
                return
            name = (
                f"steps of {' + '.join(str(end - start) for start, end in pairwise((0, *ends)))}"
                " tokens"
            )
            yield InputCase(name, Inputs(text, ends=ends), out)


def _is_chunked(case: InputCase) -> bool:
    """Whether a step after the first has several tokens."""
    return any(end - start > 1 for start, end in pairwise(case.inputs.ends))


def _judged(
    convention: StepConvention,
    cases: Sequence[InputCase],
    differing: Sequence[InputCase],
    diagnosis: Diagnosis,
) -> tuple[bool | None, str]:
    """Whether steps are right, and what they give. The mistake of those that differ from one call
    joins the diagnosis if it is known. If steps of one token do not differ, later ones of several
    tokens that are masked as torch masks a first call, or not understood, are left to the caller.
    """
    same, has_chunks = "token by token, after a prefill", any(map(_is_chunked, cases))
    if not differing:
        diagnosis.notes += (
            [] if has_chunks else [f"not examined: {_LATER_CHUNK}, which raises an error"]
        )
        return True, f"{same}{', in chunks' * has_chunks}: the same as in one call"
    takes_single_steps = _is_chunked(differing[0])
    judged = [case for case in cases if takes_single_steps or not _is_chunked(case)]
    watcher = Watcher(convention.attention.built.file)
    with suppress(*NO_ANSWER):  # the call cannot be recorded
        convention(differing[0].inputs.queries, differing[0].inputs.ends, within=watcher)
    call = RecordedCall(differing[0].output, differing[0].inputs, operations=watcher.operations)
    is_of_torch = any("is_causal" in operation.at.source for operation in call.operations)
    pool = (
        []
        if takes_single_steps and is_of_torch
        else [each for each in MISTAKES if each.shown_by == "steps"]
    )
    is_named = diagnosis.candidate is not None and diagnosis.finds(
        Trial(diagnosis.candidate, judged, call, convention.attention.built.stage, pool)
    )
    if takes_single_steps and not is_named:
        diagnosis.notes.append(
            f"{_LATER_CHUNK} gives another output than one call: give one token at a time"
        )
        return None, f"{same}: the same as in one call; later chunks differ"
    return False, f"{differing[0].name} give other outputs than one call"
