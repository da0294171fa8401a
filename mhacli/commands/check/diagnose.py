"""Finds the mistakes in a user's attention: puts mistakes of the catalogue into the reference until the outputs match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from torch import Tensor, nn

from mhacli.attention.mistakes import MISTAKES, Mistake, MistakeVariant
from mhacli.attention.mistakes.masks import filled_with, sentinel_variants
from mhacli.attention.mistakes.stages import RIGHT, ReferenceLayer, SourceHints
from mhacli.commands.check.candidates import Candidate, with_matching_norms
from mhacli.commands.check.hypotheses import (
    SITES,
    AppliedMistake,
    Hypothesis,
    evaluate,
    observe,
    pairs,
    singles,
    stages_with,
    variants_of,
)
from mhacli.commands.check.inputs import InputCase, core_cases, large_case, mask_cases, padding_cases, windows_case
from mhacli.usercode.call.signature import call_role
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.target import Choice
from mhacli.usercode.types import MaskForm

_LAYERS_FOR_ONE, _LAYERS_FOR_TWO, _MOST_PAIRS = 24, 2, 2500
"""The most readings for one mistake and for two, and the most pairs for each reading: a few seconds' work. The first two
readings may be the same layer without and with its own causal mask."""
_REVEALING_SITE = {"q": "qk", "k": "qk", "v": "z", "concat": "out"}
"""The site whose numbers reveal how heads were split or joined."""
_HIDES = -1e4
"""A masked score that no ordinary score falls below. Source: the first BERT, whose masked scores were −10,000."""
_FINITE = AppliedMistake(
    Mistake("", "mask"),
    MistakeVariant("masked scores are −10⁹", filled_with(-1e9)),
)
"""Not a mistake: a large negative number works like −∞ as long as some key is visible."""


@dataclass(frozen=True)
class PriorKnowledge:
    """Facts from the source and the probes. `visible` tells which token influences which output, None for the usual patterns.
    The mask and padding forms agree with their documented meaning. `has_windows`: the source mentions windows. `patience`
    multiplies the number of pairs of mistakes to try."""

    hints: SourceHints = field(default_factory=SourceHints)
    visible: Tensor | None = None
    mask_forms: tuple[MaskForm, ...] = ()
    padding_forms: tuple[MaskForm, ...] = ()
    has_windows: bool = False
    patience: float = 1.0


class MatchEvidence(NamedTuple):
    """The error of a hypothesis that matches, with its tolerance and its cases."""

    error: float
    tolerance: float
    cases: tuple[InputCase, ...]


@dataclass
class Diagnosis:
    """The result of a diagnosis. `mistakes` together reproduce the outputs, with the evidence for each in `proofs`;
    `alternatives` are mistakes that give the same numbers. `unexplained` are inputs without a matching hypothesis, and
    `closest` is the best hypothesis for the first of them. `n_nan_rows` counts NaN rows caused by left padding under its own
    causal mask. `is_cut_short`: some pairs of mistakes were not tried."""

    candidate: Candidate | None = None
    mistakes: tuple[AppliedMistake, ...] = ()
    alternatives: dict[str, tuple[AppliedMistake, ...]] = field(default_factory=dict)
    proofs: dict[str, MatchEvidence] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    cases: list[InputCase] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    closest: Hypothesis | None = None
    n_hypotheses: int = 0
    n_nan_rows: int = 0
    is_cut_short: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the plain reference reproduces every output."""
        return self.candidate is not None and not self.mistakes and not self.unexplained

    def narrow(self, applied: AppliedMistake, remaining: Sequence[AppliedMistake]) -> None:
        """Replaces a mistake and its alternatives by the remaining ones."""
        first, *others = remaining
        code = applied.mistake.code
        self.mistakes = tuple(first if mistake is applied else mistake for mistake in self.mistakes)
        self.proofs[first.mistake.code] = self.proofs.pop(code)
        self.alternatives.pop(code)
        if others:
            self.alternatives[first.mistake.code] = tuple(others)


def diagnose(
    subject: UserAttention, module: nn.Module | None, candidates: Sequence[Candidate], prior: PriorKnowledge, seed: int
) -> Diagnosis:
    """Diagnoses a subject that may be any of these layers. Raises what the subject raises."""
    result = Diagnosis(cases=list(core_cases(subject, seed)))
    if not candidates:
        return result
    if not _is_right_layer(result, candidates):
        fitting = with_matching_norms(candidates, subject, module, result.cases[0])
        _explain_core(result, fitting, prior, subject)
    if result.candidate is None:
        result.unexplained.append(result.cases[0].name)
        return result
    general = {form.parameter for form in prior.mask_forms}
    paddings = tuple(form for form in prior.padding_forms if form.parameter not in general)  # else tested as a mask
    for kind, forms in (("mask", prior.mask_forms), ("padding", paddings)):
        make = mask_cases if kind == "mask" else padding_cases
        for parameter_forms in _forms_by_parameter(forms):
            _explain_masked(result, list(make(subject, seed, parameter_forms)), prior)
    if prior.has_windows:
        _explain_windows(result, subject, seed)
    for case in _large_cases(result, subject):
        _explain_large(result, subject, case)
    _count_left_padding_nans(result)
    return result


def _forms_by_parameter(forms: Sequence[MaskForm]) -> list[tuple[MaskForm, ...]]:
    """The forms of each mask parameter. Biases count only without a mask."""
    named: dict[str, list[MaskForm]] = {}
    for form in forms:
        named.setdefault(form.parameter, []).append(form)
    masks = [name for name in named if call_role(name) != "bias"]
    return [tuple(named[name]) for name in masks or named]


def _pool(prior: PriorKnowledge, candidate: Candidate) -> list[AppliedMistake]:
    """The mistakes that cannot be design choices."""
    is_order_known = not any(choice.name in ("unnamed", "fused-order") for choice in candidate.choices)
    hints = prior.hints._replace(is_order_known=is_order_known)
    return variants_of(mistake for mistake in MISTAKES if mistake.may_be_made(hints, candidate.layer))


# --------------------------------------------------------------------------------------------------------- without masks


def _is_right_layer(result: Diagnosis, candidates: Sequence[Candidate]) -> bool:
    """Whether a layer without mistakes matches."""
    for candidate in candidates:
        hypothesis = evaluate(candidate.layer, (), result.cases)
        if _count_hypothesis(result, hypothesis):
            _accept(result, candidate, [hypothesis], result.cases)
            return True
    return False


def _explain_core(
    result: Diagnosis, candidates: Sequence[Candidate], prior: PriorKnowledge, subject: UserAttention
) -> None:
    """Accepts the first match of: a custom pattern, one mistake, two mistakes."""
    cases = result.cases
    if _is_custom_pattern(result, candidates, prior):
        return
    for candidate in islice(candidates, _LAYERS_FOR_ONE):
        matching = [
            h for h in singles(candidate.layer, _pool(prior, candidate), cases, ()) if _count_hypothesis(result, h)
        ]
        if matching:
            _accept(result, candidate, matching, cases)
            return
    _try_pairs(result, candidates, prior, subject)


def _is_custom_pattern(result: Diagnosis, candidates: Sequence[Candidate], prior: PriorKnowledge) -> bool:
    """Whether a custom pattern explains the outputs, such as a window. For attention meant to be causal, a pattern that shows
    the future does not count."""
    if prior.visible is None or (prior.hints.expects_causal and bool(prior.visible.triu(1).any())):
        return False
    cases = result.cases[:1]
    if not cases[0].output.isfinite().all():  # a NaN output would count as one that sees nothing
        return False
    for candidate in candidates:
        hypothesis = evaluate(replace(candidate.layer, causal=False, sees=prior.visible), (), cases)
        if _count_hypothesis(result, hypothesis):
            choice = Choice("own-pattern", "tokens see others by a rule of its own, such as a window")
            result.cases = cases
            _accept(
                result,
                replace(candidate, layer=hypothesis.layer, choices=(*candidate.choices, choice)),
                [hypothesis],
                cases,
            )
            return True
    return False


def _try_pairs(
    result: Diagnosis, candidates: Sequence[Candidate], prior: PriorKnowledge, subject: UserAttention
) -> None:
    """Tries pairs of mistakes in the likeliest layers, within the limit."""
    for candidate in islice(candidates, _LAYERS_FOR_TWO):
        pool = _ordered_by_departure(_pool(prior, candidate), candidate.layer, subject, result.cases[0])
        hypotheses = pairs(candidate.layer, pool, result.cases, ())
        for hypothesis in islice(hypotheses, int(_MOST_PAIRS * prior.patience)):
            if _count_hypothesis(result, hypothesis):
                _accept(result, candidate, [hypothesis], result.cases)
                return
        result.is_cut_short |= next(hypotheses, None) is not None


def _ordered_by_departure(
    pool: Sequence[AppliedMistake], layer: ReferenceLayer, subject: UserAttention, case: InputCase
) -> Sequence[AppliedMistake]:
    """The mistakes in order of site, from the first site that the subject does not compute."""
    try:
        missing = observe(subject, layer, RIGHT, case).first_missing()
    except Exception:  # the call cannot be recorded
        return pool
    start = SITES.index(missing) if missing is not None else 0
    return sorted(pool, key=lambda applied: (SITES.index(_first_site(applied)) - start) % len(SITES))


def _first_site(applied: AppliedMistake) -> str:
    """The first site whose numbers the mistake changes. Splitting or joining heads differently keeps the numbers."""
    site = applied.sites[0]
    return _REVEALING_SITE.get(site, site) if applied.mistake.stage in ("split", "merge") else site


def _count_hypothesis(result: Diagnosis, hypothesis: Hypothesis) -> bool:
    """Whether the hypothesis matches. Counts it, and keeps it if it is the closest so far."""
    result.n_hypotheses += 1
    if result.closest is None or hypothesis.error < result.closest.error:
        result.closest = hypothesis
    return hypothesis.matches


def _accept(
    result: Diagnosis, candidate: Candidate, matching: Sequence[Hypothesis], cases: Sequence[InputCase]
) -> None:
    """Accepts the first matching hypothesis. The others become alternatives to its last mistake."""
    first = matching[0]
    result.candidate, result.closest = candidate, None
    new = [applied for applied in first.mistakes if applied not in result.mistakes]
    result.mistakes = first.mistakes
    tolerance = max(case.tolerance for case in cases)
    for applied in new:
        code = applied.mistake.code
        result.proofs[code] = MatchEvidence(first.error * tolerance, tolerance, tuple(cases))
        others = [h.mistakes[-1] for h in matching[1:] if h.mistakes[-1].mistake.code != code]
        if len(new) == 1 and others:
            result.alternatives[code] = tuple(others)


# ------------------------------------------------------------------------------------------------------------ with masks


def _explain_masked(result: Diagnosis, cases: Sequence[InputCase], prior: PriorKnowledge) -> None:
    """Accepts the mask form that matches, else a mistake under the likeliest form."""
    candidate = result.candidate
    if result.mistakes:  # an all-NaN output cannot show another mistake
        cases = [case for case in cases if case.output.isfinite().any()]
    if not cases or candidate is None:
        return
    for case in cases:
        bases = (result.mistakes, (*result.mistakes, _FINITE))
        if any(_count_hypothesis(result, evaluate(candidate.layer, base, [case])) for base in bases):
            result.cases.append(case)
            result.choices.append(Choice("mask-form", case.name))
            result.closest = None
            return
    open_layer = replace(candidate.layer, causal=False)
    for case in cases:
        is_whole = candidate.layer.causal and case.form is not None and "query" in case.form.axes
        if is_whole and evaluate(open_layer, result.mistakes, [case]).matches:
            what = f"a mask that is given takes the place of its own causal mask ({case.name})"
            result.choices.append(Choice("mask-replaces-causal", what))
            return
    pool = [applied for applied in _pool(prior, candidate) if applied.mistake.is_shown_by_masks]
    for search in (singles, pairs):
        for case in cases:
            matching = [
                h for h in search(candidate.layer, pool, [case], result.mistakes) if _count_hypothesis(result, h)
            ]
            if matching:
                result.cases.append(case)
                _accept(result, candidate, _ordered_by_padding(matching, case), [case])
                return
    result.unexplained.append(cases[0].name)


def _explain_windows(result: Diagnosis, subject: UserAttention, seed: int) -> None:
    """Finds which window each mask is applied to in a batch of several images."""
    candidate, masked = result.candidate, next((case for case in result.cases if case.form is not None), None)
    if candidate is None or masked is None or masked.form is None:
        return
    case = windows_case(subject, seed, masked.form)
    if case is None or evaluate(candidate.layer, result.mistakes, [case]).matches:
        return
    pool = variants_of(mistake for mistake in MISTAKES if "windows" in mistake.shown_by)
    matching = [h for h in singles(candidate.layer, pool, [case], result.mistakes) if _count_hypothesis(result, h)]
    if matching:
        result.cases.append(case)
        _accept(result, candidate, matching, [case])


def _ordered_by_padding(matching: Sequence[Hypothesis], case: InputCase) -> Sequence[Hypothesis]:
    """The hypotheses in order of likelihood. Padding that changes padded queries is not ignored: it is applied along the
    queries."""
    first, all_rows = matching[0], replace(case, counted=None)
    if (
        first.mistakes[-1].mistake.code != "padding-ignored"
        or evaluate(first.layer, first.mistakes, [all_rows]).matches
    ):
        return matching
    return sorted(matching, key=lambda h: h.mistakes[-1].mistake.code != "padding-of-queries")


def _large_cases(result: Diagnosis, subject: UserAttention) -> Iterator[InputCase]:
    """The inputs with scores a million times as large, without masks and with each kind of mask."""
    for kind in ("mask", "padding"):
        yield from (large_case(subject, case) for case in result.cases[:] if case.kind == kind)
    if not any(case.kind == "mask" for case in result.cases):
        yield large_case(subject, result.cases[0])


def _explain_large(result: Diagnosis, subject: UserAttention, case: InputCase) -> None:
    """Finds mistakes that only huge scores show: a finite mask value, and a softmax without subtracting the maximum."""
    candidate = result.candidate
    assert candidate is not None
    bases = (result.mistakes, (*result.mistakes, _FINITE))
    if any(evaluate(candidate.layer, base, [case]).matches for base in bases):
        return
    numbers = observe(subject, candidate.layer, stages_with(result.mistakes), case).numbers_below(-4.0)
    for number in numbers:
        hidden = [AppliedMistake(_FINITE.mistake, variant) for variant in sentinel_variants(number)]
        if number <= _HIDES and any(
            evaluate(candidate.layer, (*result.mistakes, one), [case]).matches for one in hidden
        ):
            what = f"masked scores become {number:g}, which hides every score below {-number:g}"
            result.choices.append(Choice("mask-value", what))
            return
    pool = [
        applied for mistake in MISTAKES if "large" in mistake.shown_by for applied in _variants_with(mistake, numbers)
    ]
    matching = [h for h in singles(candidate.layer, pool, [case], result.mistakes) if h.matches]
    if matching:
        result.cases.append(case)
        _accept(result, candidate, matching, [case])


def _variants_with(mistake: Mistake, numbers: Iterable[float]) -> list[AppliedMistake]:
    """The variants of a mistake, those with numbers from the user's code first."""
    more = () if mistake.with_number is None else tuple(variant for n in numbers for variant in mistake.with_number(n))
    return variants_of([replace(mistake, variants=(*more, *mistake.variants))])


def forms_with_meaning(forms: Iterable[MaskForm], means: str | None) -> tuple[MaskForm, ...]:
    """The forms that agree with the stated meaning of True; all forms without a statement."""
    if means is None:
        return tuple(forms)
    return tuple(
        form for form in forms if form.kind == "lengths" or (form.kind != "additive" and form.true_means == means)
    )


def _count_left_padding_nans(result: Diagnosis) -> None:
    """Counts the NaN rows due to left padding under its own causal mask, where the first tokens have no visible key."""
    assert result.candidate is not None
    padded = next((case for case in result.cases if case.kind == "padding"), None)
    if padded is not None and result.candidate.layer.causal and not result.mistakes:
        result.n_nan_rows = int(padded.output.isnan().any(dim=-1).sum())
