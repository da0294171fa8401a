"""Finds the mistakes in a user's attention: puts mistakes of the catalogue into the reference until
the outputs match.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch

from mhacli.attention.mistakes import MISTAKES, multiplied, sentinels
from mhacli.attention.stages import (
    Inputs,
    Mistake,
    NotPossible,
    ReferenceLayer,
    run_stages,
    stages_with,
)
from mhacli.attention.taps import largest_difference
from mhacli.io.data import finite
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.graph import RecordedCall
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.masks import MaskForm, as_tokenizers_mean
from mhacli.usercode.names import is_switched_off
from mhacli.usercode.roles import call_role, called_function, signature_of
from mhacli.usercode.target import Choice
from mhacli.usercode.user_attention import UserAttention

from .candidates import Candidate, candidates
from .layer_sites import LayerSites, sites_in
from .probes import (
    LARGE_SCORES,
    InputCase,
    ProbedAttention,
    counted_rows,
    is_same_unmasked,
    large_case,
    make_case,
    masked_cases,
    recorded_case,
    unmasked_inputs,
)
from .result import Behaviour, CheckRequest
from .steps import Steps, is_chunked, read_in_steps

_MOST_RANKED = 100
"""The most layers that are ranked by what they share with the call."""
_LAYERS_FOR_ONE = 12
"""The layers that are tried with each single mistake: a few seconds' work."""
_LAYERS_FOR_MORE = 2
"""Those that are tried with several mistakes: the first two may be one layer, without and with its
own causal mask."""
_PLAIN = 3
"""The layers of the fewest choices, which are tried whatever they share with the call."""
_MOST_MISTAKES = 4
REFERENCE = "comparison with the reference"
"""The first thing that a diagnosis tries, by the name under which reports list it."""
_HIDES = -1e4
"""A masked score that no ordinary score falls below. Source: the first BERT, whose masked scores
were −10,000."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A layer that may explain some cases, alone or with mistakes of a `pool`; `call` is the
    recorded first case.
    """

    candidate: Candidate
    cases: list[InputCase]
    call: RecordedCall
    pool: Sequence[Mistake] = ()

    def sites_with(self, *mistakes: Mistake) -> LayerSites:
        """The sites of the layer with these mistakes in the call."""
        return sites_in(self.call, self.candidate.layer, mistakes)

    def n_produced(self, *mistakes: Mistake) -> int:
        """How many tensors the layer with these mistakes has in common with the call."""
        return self.sites_with(*mistakes).n_produced

    def likelihood(self, mistakes: Sequence[Mistake]) -> tuple[int, bool]:
        """How many tensors it has in common with the call, and whether the line of the last mistake
        reads like it.
        """
        sites = self.sites_with(*mistakes)
        last = mistakes[-1]
        source = sites.line_of(last.site).source
        return sites.n_produced, any(re.search(pattern, source) for pattern in last.at)

    def with_one_more(self, known: tuple[Mistake, ...]) -> list[tuple[Mistake, ...]]:
        """The known mistakes with each of the pool that replaces other stages."""
        taken = {stage for mistake in known for stage in mistake.stages}
        return [(*known, mistake) for mistake in self.pool if taken.isdisjoint(mistake.stages)]


class Explanation(NamedTuple):
    """The mistakes with which the layer of a trial gives the outputs of its cases, all of them or
    none, and the largest difference, relative to the tolerance.
    """

    trial: Trial
    mistakes: tuple[Mistake, ...]
    error: float


def _first(explanations: Iterable[Explanation | None]) -> Explanation | None:
    """The first explanation; what would be tried behind it is not."""
    return next(filter(None, explanations), None)


@dataclass
class Diagnosis:
    """The result of a diagnosis of what was `probed`. `call` is the recorded first case. `proofs`
    are the mistakes that together give the outputs, each with the explanation that showed it. Where
    nothing explains the output, `likeliest` is the layer that has the most tensors in common with
    the call, and `likeliest_mistake` the mistake of it that gives the weighted values of the call.
    `not_examined` are masks that the code says it does not read in these calls, `ignored` those
    that hide nothing whatever stands in them, and `unexplained` those that no hypothesis matches.
    `cache` is what `steps` behind a cache gave, and `notes` are for callers. `over` ended it, if
    its time was over, and left `untried` what it had still to try.
    """

    probed: ProbedAttention
    cases: list[InputCase] = field(default_factory=list)
    call: RecordedCall = field(
        default_factory=lambda: RecordedCall(torch.empty(0), Inputs(torch.empty(0, 0, 0)))
    )
    candidate: Candidate | None = None
    likeliest: Candidate | None = None
    likeliest_mistake: Mistake | None = None
    proofs: dict[Mistake, Explanation] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    not_examined: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    n_hypotheses: int = 0
    cache: Behaviour | None = None
    steps: Steps | None = None
    notes: list[str] = field(default_factory=list)
    over: OutOfTime | None = None
    untried: list[str] = field(default_factory=list)

    @property
    def subject(self) -> UserAttention:
        """The attention that was probed."""
        return self.probed.subject

    @property
    def request(self) -> CheckRequest:
        """What was requested."""
        return self.probed.request

    @property
    def layer(self) -> ReferenceLayer:
        """The layer that was accepted."""
        assert self.candidate is not None
        return self.candidate.layer

    @property
    def passed(self) -> tuple[str, ...]:
        """The arguments that steps were given."""
        return () if self.steps is None else self.steps.convention.names

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
        layer = replace(self.layer, **changes)
        known = (*self.mistakes, *more)
        hiding: list[tuple[Mistake, ...]] = [known, *((*known, each) for each in sentinels(-1e9))]
        return any(error_of(layer, mistakes, [case]) <= 1.0 for mistakes in hiding)

    def trial(self, candidate: Candidate, cases: list[InputCase], call: RecordedCall) -> Trial:
        """A trial with the mistakes of the catalogue that cannot be design choices."""
        probed = self.probed
        reading = candidate.reading
        is_named = all(choice.name != "unnamed" for choice in candidate.choices)
        known = {
            "causal": probed.expects_causal,
            "context": probed.subject.is_named,
            "pairing": probed.request.rope is not None,
            "scale": probed.request.scale is None,
            "order": probed.subject.n_rows == 3 or is_named,
            "fused": reading is not None and reading.order is not None,
        }
        facts = {name for name, is_known in known.items() if is_known}
        below = call.numbers_below(-4.0)
        numbers = [
            *(mistake for number in below for mistake in sentinels(number)),
            *(mistake for number in (*below, -1e9) for mistake in multiplied(number)),
        ]
        pool = [
            each
            for each in (*MISTAKES, *numbers)
            if each.shown_by != "steps" and facts.issuperset(each.needs)
        ]
        request = probed.request
        if request.not_causal or (request.sees is not None and not request.causal):
            pool = [each for each in pool if each.stage != "causal_rule"]
        return Trial(candidate, cases, call, pool)

    def explained(
        self, trial: Trial, hypotheses: Sequence[tuple[Mistake, ...]]
    ) -> Explanation | None:
        """The tuple of mistakes that explains the cases of a trial, None if none does: of several,
        the one whose layer shares the most tensors with the call, and then one whose line reads
        like it. All of them are counted as tried.
        """
        self.n_hypotheses += len(hypotheses)
        self.probed.subject.built.stage(f"trying the {REFERENCE}", limited=False)
        tried = (
            Explanation(trial, mistakes, error_of(trial.candidate.layer, mistakes, trial.cases))
            for mistakes in hypotheses
        )
        matching = [each for each in tried if each.error <= 1.0]
        if matching[1:]:
            return max(matching, key=lambda each: trial.likelihood(each.mistakes))
        return _first(matching)

    def explained_by_more(self, trial: Trial, n_more: int = 1) -> Explanation | None:
        """The mistakes that are known with some of the pool, which explain the cases of a trial
        together: one, else one more after each that shares the most tensors with the call. None if
        none do.
        """
        leads = [self.mistakes]
        n_shared = 0
        for n_left in reversed(range(n_more)):
            found = _first(self.explained(trial, trial.with_one_more(lead)) for lead in leads)
            if found is not None:
                return found
            counts = [
                (trial.n_produced(*more), more) for more in trial.with_one_more(leads[0]) if n_left
            ]
            n_shared = max(n_shared, trial.n_produced(*leads[0]))
            n_best = max((n for n, _ in counts), default=0)
            if n_best <= n_shared:
                break
            leads = [more for n, more in counts if n == n_best]
        return None

    def keep(self, explanation: Explanation) -> None:
        """Makes an explanation the result: its layer, those of its mistakes that are new, and its
        cases.
        """
        trial = explanation.trial
        self.candidate = trial.candidate
        for mistake in explanation.mistakes:
            self.proofs.setdefault(mistake, explanation)
        self.cases += [case for case in trial.cases if case not in self.cases]


def error_of(
    layer: ReferenceLayer, mistakes: Sequence[Mistake], cases: Sequence[InputCase]
) -> float:
    """The largest difference from the outputs, relative to each case's tolerance: up to 1 is a
    match, and the first larger one ends the comparison. Infinite if shapes or NaN positions differ,
    if a mistake does not apply to this layer, or if everything is NaN and none of the mistakes
    leaves only that.

    Padded queries and those without visible keys have no right output and are left out.
    """
    stages = stages_with(mistakes)
    worst = 0.0
    may_be_nan = any(mistake.may_be_nan for mistake in mistakes)
    for case in cases:
        try:
            with torch.no_grad():
                out, keep = run_stages(stages, layer, case.inputs)
            if out.shape != case.output.shape:
                return math.inf
            counted = counted_rows(case.inputs, out, keep)
        except (NotPossible, *NO_ANSWER):  # in this layer, or a norm of the module fails
            return math.inf
        compared = out[counted]
        if not compared.numel():
            return math.inf
        worst = max(worst, largest_difference(compared, case.output[counted]) / case.tolerance)
        if worst > 1.0:
            break
        if not may_be_nan and bool(compared.isnan().all()):
            return math.inf
    return worst


def diagnose(probed: ProbedAttention) -> Diagnosis:
    """Diagnoses a subject, as far as its time allows: each step stands on the layer that the first
    one accepts, and on the mistakes that those before it found. What is not done when time is over
    is `untried`. Raises `UserRaised`.
    """
    result = Diagnosis(probed)
    steps: dict[str, Callable[..., None]] = {
        REFERENCE: _explain_unmasked,
        **{
            name: partial(_explain_mask, forms=forms)
            for name, forms in _forms_to_try(probed).items()
        },
        LARGE_SCORES: _explain_large_scores,
        "cache": _explain_steps,
    }
    result.untried = [*steps]
    try:
        for name, explain in steps.items():
            explain(result)
            result.untried.remove(name)
    except OutOfTime as over:
        result.over = over
    return result


def _explain_unmasked(result: Diagnosis) -> None:
    """Puts into a diagnosis the layer that explains the outputs without masks."""
    subject = result.subject
    result.cases = [
        make_case(name, subject, inputs)
        for name, inputs in unmasked_inputs(subject, result.request.seed).items()
    ]
    first = result.cases[0]
    result.call = recorded_case(subject, first)
    again = make_case("", subject, first.inputs)
    if largest_difference(again.output, first.output) <= again.tolerance:  # else no layer matches
        _explain_core(result)


def _explain_large_scores(result: Diagnosis) -> None:
    """Puts into the diagnosis of a layer what masks of windows show, and then huge scores under
    each form that it obeys, which a mistake must explain together with huge scores without a
    mask. These are tried alone where no mask of queries is obeyed.
    """
    if result.candidate is None:
        return
    subject = result.subject
    obeyed = [case for case in result.cases if case.form is not None]
    forms = [case.form for case in obeyed if case.form is not None]
    masks = [form for form in forms if not form.is_padding]
    of_windows = [form._replace(n_shared=2) for form in masks[:1] if "batch" in form.axes]
    # two images with two windows each
    for case in masked_cases(subject, result.request.seed, of_windows, batch=4):
        _explain_further(result, [case])
    unmasked = large_case(subject, result.cases[0])
    for case in obeyed:
        _explain_further(result, [large_case(subject, case), unmasked])
    if not masks:
        _explain_further(result, [unmasked])


def _forms_to_try(probed: ProbedAttention) -> dict[str, list[MaskForm]]:
    """The forms of each mask and padding by the name of its argument, those of the stated meaning
    of True.
    """
    subject = probed.subject
    means = probed.request.mask_means
    masks = [form for form in subject.mask_forms if call_role(form.parameter) != "bias"]
    by_name: dict[str, list[MaskForm]] = {}
    for form in (*(masks or subject.mask_forms), *subject.padding_forms):
        # what is added to scores, such as −∞, has no True, and lengths have none either
        is_meant = form.kind != "additive" and form.true_means == means
        if means is None or form.kind == "lengths" or is_meant:
            by_name.setdefault(form.parameter, []).append(form)
    if means is None:
        return {name: as_tokenizers_mean(each) for name, each in by_name.items()}
    return by_name


def _explain_core(result: Diagnosis) -> None:
    """Keeps the first layer that matches without a mistake, or with one; then the same for layers
    that contradict a statement; then one with several mistakes; else the likeliest. Few are tried
    where no token attends to another, which few mistakes explain.
    """
    probed = result.probed
    call = result.call
    ranked = list[Trial]()
    attends = probed.visible != "itself only"
    most = _LAYERS_FOR_ONE if attends else _PLAIN
    found: Explanation | None = None
    for _, group in groupby(
        candidates(probed, call), key=lambda each: bool(each.contradicts(probed.request))
    ):
        plain = [Trial(candidate, result.cases, call) for candidate in group]
        found = _first(result.explained(trial, [()]) for trial in plain)
        if found is not None:
            break
        by_run = sorted(plain[:_MOST_RANKED], key=lambda trial: -trial.n_produced())
        few = dict.fromkeys([by_run[0], *plain[:_PLAIN], *by_run[:most], *plain[:most]])
        likely = {trial: result.trial(trial.candidate, result.cases, call) for trial in few}
        ranked = ranked or [likely[trial] for trial in by_run[:most]]
        result.likeliest = ranked[0].candidate
        found = _first(map(result.explained_by_more, likely.values()))
        if found is not None:
            break
    if found is None and attends:
        found = _first(
            result.explained_by_more(trial, _MOST_MISTAKES) for trial in ranked[:_LAYERS_FOR_MORE]
        )
    if found is not None:
        result.keep(found)
    else:
        result.likeliest_mistake = _mistake_of_values(ranked)


def _mistake_of_values(ranked: Sequence[Trial]) -> Mistake | None:
    """The one mistake of the likeliest layer that gives weighted values of the call, where no layer
    gives them without a mistake.
    """
    if not ranked or any(trial.sites_with().producers("z") for trial in ranked):
        return None
    shown = [each for each in ranked[0].pool if ranked[0].sites_with(each).producers("z")]
    return shown[0] if len({mistake.code for mistake in shown}) == 1 else None


def _explain_mask(result: Diagnosis, forms: Sequence[MaskForm]) -> None:
    """Puts into the diagnosis of a layer what one mask does, by its forms, the likeliest first. The
    first of these that holds is the answer: a form is obeyed; a mask takes the place of the causal
    one; the code reads it under a condition alone; mistakes explain a form; or it is unexplained,
    and ignored if the output is as if it hid nothing.
    """
    subject = result.subject
    candidate = result.candidate
    if candidate is None:
        return
    cases = list(masked_cases(subject, result.request.seed, forms))
    if result.mistakes:  # an all-NaN output cannot show another mistake
        cases = [case for case in cases if case.output.isfinite().any()]
    if not cases:
        return
    # which a mistake must explain too
    unmasked = [case for case in result.cases if case.form is None]
    obeyed = next(filter(result.explains, cases), None)
    if obeyed is not None:
        if obeyed.form is not None and obeyed.form.kind == "additive":
            for other in cases:  # (1 − mask) · −10 also hides where −∞ is given
                _explain_further(result, [other])
        result.cases.append(obeyed)
        result.choices.append(Choice("mask-form", obeyed.name))
        return
    replacing = _replacing_causality(result, cases)
    if replacing is not None:
        what = f"a mask that is given takes the place of its own causal mask ({replacing.name})"
        result.choices.append(Choice("mask-replaces-causal", what))
        return
    name = forms[0].parameter
    if _is_switched_off(result, cases[0], name):
        result.not_examined.append(name)
        return
    trials = (
        result.trial(candidate, [case, *unmasked], recorded_case(subject, case)) for case in cases
    )
    found = _first(map(result.explained_by_more, trials))
    if found is not None:
        result.keep(found)
        return
    result.unexplained.append(name)
    if is_same_unmasked(subject, cases[0]):
        result.ignored.append(name)


def _replacing_causality(result: Diagnosis, cases: Sequence[InputCase]) -> InputCase | None:
    """The first case whose mask of queries hides all that is hidden, in a layer that is else
    causal.
    """
    of_queries = [case for case in cases if case.form is not None and "query" in case.form.axes]
    explained = (case for case in of_queries if result.explains(case, causal=False))
    return next(explained, None) if result.layer.causal else None


def _is_switched_off(result: Diagnosis, case: InputCase, parameter: str) -> bool:
    """Whether no operation reads a mask, and the code, or that of a part that may be given it, says
    under which condition it would.
    """
    subject = result.subject
    if len(recorded_case(subject, case).outside) > len(result.call.outside):
        return False
    parts: list[Any] = [subject.built.call, *subject.built.parts.values()]
    for part in parts:
        names = {parameter, *(each.name for each in signature_of(part, "mask"))}
        function = called_function(part)
        if any(is_switched_off(function, name, subject.untried) for name in names):
            return True
    return False


def _explain_further(result: Diagnosis, cases: list[InputCase]) -> None:
    """Puts into a diagnosis what only some inputs show, those of the first case: masks of windows,
    or huge scores, which show a finite mask value and a softmax without subtracting the maximum. A
    value that hides all ordinary scores is a choice; a mistake must explain all cases.
    """
    case = cases[0]
    if result.candidate is None or result.explains(case):
        return
    call = recorded_case(result.subject, case)
    for number in call.numbers_below(_HIDES):
        if any(result.explains(case, mistake) for mistake in sentinels(number)):
            what = f"masked scores become {number:g}, which hides every score below {-number:g}"
            result.choices.append(Choice("mask-value", what))
            return
    trial = result.trial(result.candidate, cases, call)
    pool = [mistake for mistake in trial.pool if mistake.shown_by == "further"]
    found = result.explained_by_more(replace(trial, pool=pool))
    if found is not None:
        result.keep(found)


def _explain_steps(result: Diagnosis) -> None:
    """Puts into a diagnosis whether steps behind a cache are right: a mistake of theirs that is
    known, or what else they show, as the behaviour `cache`, and a note for callers.
    """
    result.subject.built.stage(
        f"giving {result.request.target_request.target} a text step by step", limited=False
    )
    steps = read_in_steps(result.probed, result.mask_form)
    if steps is None:
        return
    mistake = _mistake_of_steps(result, steps)
    if mistake is not None:
        result.keep(mistake)
    ok, reason, note = _judged(steps, is_named=mistake is not None)
    if note:
        result.notes.append(note)
    result.steps = steps
    reason = f"{reason} ({', '.join(steps.convention.names)})"
    result.cache = Behaviour(name="cache", ok=ok, reason=reason, largest=finite(steps.largest))


def _mistake_of_steps(diagnosis: Diagnosis, steps: Steps) -> Explanation | None:
    """The known mistake of steps that differ from one call. None is named where only later steps of
    several tokens differ, and torch masks them as it masks a first call.
    """
    if not steps.differing or diagnosis.candidate is None:
        return None
    takes_single_steps = is_chunked(steps.differing[0])
    cases = [case for case in steps.cases if takes_single_steps or not is_chunked(case)]
    call = steps.recorded()
    if takes_single_steps and any("is_causal" in each.at.source for each in call.operations):
        return None
    pool = [each for each in MISTAKES if each.shown_by == "steps"]
    return diagnosis.explained_by_more(Trial(diagnosis.candidate, cases, call, pool))


class _Judgement(NamedTuple):
    """Whether steps are right, None where that is left to the caller; what they give; and a note
    for callers.
    """

    ok: bool | None
    reason: str
    note: str = ""


def _judged(steps: Steps, *, is_named: bool) -> _Judgement:
    """The judgement of steps. If steps of one token do not differ, later ones of several tokens
    that are refused, or whose mistake is not named, are left to the caller.
    """
    single = "token by token, after a prefill"
    same = "the same as in one call"
    chunk = "a later step of several tokens with the cache"
    if not steps.differing:
        if any(map(is_chunked, steps.cases)):
            return _Judgement(True, f"{single}, in chunks: {same}")
        note = f"not examined: {chunk}, which raises an error"
        return _Judgement(True, f"{single}: {same}", note)
    first = steps.differing[0]
    if is_chunked(first) and not is_named:
        note = f"{chunk} gives another output than one call: give one token at a time"
        return _Judgement(None, f"{single}: {same}; later chunks differ", note)
    return _Judgement(False, f"{first.name} give other outputs than one call")
