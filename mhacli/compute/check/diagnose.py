"""Which mistakes a user's attention makes: the catalogue put into the reference, until it gives what was answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from torch import Tensor, nn

from mhacli.adapters.usercode.call.signature import call_role
from mhacli.adapters.usercode.call.user_attention import UserAttention
from mhacli.adapters.usercode.types import MaskForm
from mhacli.attention.mistakes import MISTAKES, Mistake, MistakeVariant
from mhacli.attention.mistakes.masks import filled_with
from mhacli.attention.mistakes.stages import RIGHT, ReferenceLayer, SourceHints
from mhacli.compute.check.candidates import Candidate, with_fitting_surroundings
from mhacli.compute.check.hypotheses import (
    SITES,
    AppliedMistake,
    Hypothesis,
    observe,
    pairs,
    singles,
    stages_with,
    tried,
    variants_of,
)
from mhacli.compute.check.inputs import InputCase, core_cases, large_case, mask_cases, padding_cases, windows_case
from mhacli.results.check import Choice

_LAYERS_FOR_ONE, _LAYERS_FOR_TWO, _MOST_PAIRS = 24, 2, 2500
"""How many readings are tried with one mistake, how many with two, and how many pairs in each in the usual time: a few seconds'
worth. The first two readings are the same layer without and with a causal mask of its own, where that is open."""
_READER = {"q": "qk", "k": "qk", "v": "z", "concat": "out"}
"""The site that is made of heads, or of joined heads."""
_FINITE = AppliedMistake(
    Mistake("", "", "", "", "", stage="mask"),
    MistakeVariant("masked scores are −10⁹", filled_with(-1e9)),
)
"""No mistake: what is lower than every score is as good as −∞ while something is left to attend to."""


@dataclass(frozen=True)
class PriorKnowledge:
    """What is known before: what the source says, which token moves which output, None where that is one of the usual patterns,
    the forms of masks that agree with what is stated of them, and whether the source speaks of windows. `patience` is how many
    times the usual number of pairs of mistakes may be tried."""

    hints: SourceHints = field(default_factory=SourceHints)
    sees: Tensor | None = None
    mask_forms: tuple[MaskForm, ...] = ()
    padding_forms: tuple[MaskForm, ...] = ()
    has_windows: bool = False
    patience: float = 1.0


class MatchEvidence(NamedTuple):
    """How near a hypothesis with a mistake came to what was answered, in which cases."""

    error: float
    tolerance: float
    cases: tuple[InputCase, ...]


@dataclass
class Diagnosis:
    """What was found. `made` are the mistakes that together give what was answered, and `proofs` the hypothesis that showed each;
    `alternatives` are those that give the same. `unexplained` are inputs that no hypothesis explains, `closest` the one that came
    closest on the first of them. `n_nan_rows` are rows that are NaN where padding stands on the left of its own causal mask;
    `is_cut_short`: not all pairs of mistakes were tried."""

    candidate: Candidate | None = None
    made: tuple[AppliedMistake, ...] = ()
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
        """Whether the reference alone gives everything that was answered."""
        return self.candidate is not None and not self.made and not self.unexplained

    def narrow(self, made: AppliedMistake, left: Sequence[AppliedMistake]) -> None:
        """Puts what is left of a mistake and its alternatives in their place."""
        first, *others = left
        code = made.mistake.code
        self.made = tuple(first if one is made else one for one in self.made)
        self.proofs[first.mistake.code] = self.proofs.pop(code)
        self.alternatives.pop(code)
        if others:
            self.alternatives[first.mistake.code] = tuple(others)


def diagnose(
    subject: UserAttention, module: nn.Module | None, candidates: Sequence[Candidate], known: PriorKnowledge, seed: int
) -> Diagnosis:
    """The diagnosis of a subject, `module` where it is one, that may be any of these layers. Raises what the subject raises."""
    result = Diagnosis(cases=list(core_cases(subject, seed)))
    if not candidates:
        return result
    if not _is_right_layer(result, candidates):
        fitting = with_fitting_surroundings(candidates, subject, module, result.cases[0])
        _explain_core(result, fitting, known, subject)
    if result.candidate is None:
        result.unexplained.append(result.cases[0].name)
        return result
    general = {form.parameter for form in known.mask_forms}
    paddings = tuple(form for form in known.padding_forms if form.parameter not in general)  # else it is asked already
    for kind, forms in (("mask", known.mask_forms), ("padding", paddings)):
        make = mask_cases if kind == "mask" else padding_cases
        for of_one in _of_each_parameter(forms):
            _explain_masked(result, list(make(subject, seed, of_one)), known)
    if known.has_windows:
        _explain_windows(result, subject, seed)
    for case in _large_cases(result, subject):
        _explain_large(result, subject, case)
    _look_at_left_padding(result)
    return result


def _of_each_parameter(forms: Sequence[MaskForm]) -> list[tuple[MaskForm, ...]]:
    """The forms of each parameter, for each must hide what it says; a bias only where there is nothing else to hide with."""
    named: dict[str, list[MaskForm]] = {}
    for form in forms:
        named.setdefault(form.parameter, []).append(form)
    masks = [name for name in named if call_role(name) != "bias"]
    return [tuple(named[name]) for name in masks or named]


def _pool(known: PriorKnowledge, candidate: Candidate) -> list[AppliedMistake]:
    """The mistakes that can be told from what another author would have chosen."""
    is_order_known = not any(choice.name in ("unnamed", "fused-order") for choice in candidate.choices)
    hints = known.hints._replace(is_order_known=is_order_known)
    return variants_of(mistake for mistake in MISTAKES if mistake.may_be_made(hints, candidate.layer))


# --------------------------------------------------------------------------------------------------------- without masks


def _is_right_layer(result: Diagnosis, candidates: Sequence[Candidate]) -> bool:
    """Whether a layer without a mistake gives what was answered."""
    for candidate in candidates:
        hypothesis = tried(candidate.layer, (), result.cases)
        if _count_hypothesis(result, hypothesis):
            _settle(result, candidate, [hypothesis], result.cases)
            return True
    return False


def _explain_core(
    result: Diagnosis, candidates: Sequence[Candidate], known: PriorKnowledge, subject: UserAttention
) -> None:
    """A pattern of its own, one mistake, two: the first of these that gives what was answered."""
    cases = result.cases
    if _is_own_pattern(result, candidates, known):
        return
    for candidate in islice(candidates, _LAYERS_FOR_ONE):
        ones = [h for h in singles(candidate.layer, _pool(known, candidate), cases, ()) if _count_hypothesis(result, h)]
        if ones:
            _settle(result, candidate, ones, cases)
            return
    _try_pairs(result, candidates, known, subject)


def _is_own_pattern(result: Diagnosis, candidates: Sequence[Candidate], known: PriorKnowledge) -> bool:
    """Whether a pattern of its own explains it, such as a window; one that shows the future to what is meant to be
    causal does not count."""
    if known.sees is None or (known.hints.expects_causal and bool(known.sees.triu(1).any())):
        return False
    cases = result.cases[:1]
    if not cases[0].answer.isfinite().all():  # else what is NaN would count as what sees nothing
        return False
    for candidate in candidates:
        hypothesis = tried(replace(candidate.layer, causal=False, sees=known.sees), (), cases)
        if _count_hypothesis(result, hypothesis):
            own = Choice("own-pattern", "tokens see others by a rule of its own, such as a window")
            result.cases = cases
            _settle(
                result,
                replace(candidate, layer=hypothesis.layer, choices=(*candidate.choices, own)),
                [hypothesis],
                cases,
            )
            return True
    return False


def _try_pairs(
    result: Diagnosis, candidates: Sequence[Candidate], known: PriorKnowledge, subject: UserAttention
) -> None:
    """Two mistakes at once in the likeliest layers, as many as can be tried in a few seconds."""
    for candidate in islice(candidates, _LAYERS_FOR_TWO):
        pool = _from_departure_on(_pool(known, candidate), candidate.layer, subject, result.cases[0])
        hypotheses = pairs(candidate.layer, pool, result.cases, ())
        for hypothesis in islice(hypotheses, int(_MOST_PAIRS * known.patience)):
            if _count_hypothesis(result, hypothesis):
                _settle(result, candidate, [hypothesis], result.cases)
                return
        result.is_cut_short |= next(hypotheses, None) is not None


def _from_departure_on(
    pool: Sequence[AppliedMistake], layer: ReferenceLayer, subject: UserAttention, case: InputCase
) -> Sequence[AppliedMistake]:
    """The mistakes of the first site that the author does not make, then those behind it, then those before it."""
    try:
        missing = observe(subject, layer, RIGHT, case).first_not_made()
    except Exception:  # what cannot be watched has no sites
        return pool
    start = SITES.index(missing) if missing is not None else 0
    return sorted(pool, key=lambda made: (SITES.index(_seen_at(made)) - start) % len(SITES))


def _seen_at(made: AppliedMistake) -> str:
    """The first site whose numbers a mistake changes: heads cut or joined in another order hold the same numbers."""
    site = made.sites[0]
    return _READER.get(site, site) if made.mistake.stage in ("split", "merge") else site


def _count_hypothesis(result: Diagnosis, hypothesis: Hypothesis) -> bool:
    """Counts a hypothesis, keeps it if none came closer, and says whether it matches."""
    result.n_hypotheses += 1
    if result.closest is None or hypothesis.error < result.closest.error:
        result.closest = hypothesis
    return hypothesis.matches


def _settle(
    result: Diagnosis, candidate: Candidate, matching: Sequence[Hypothesis], cases: Sequence[InputCase]
) -> None:
    """Takes the first of the hypotheses that match; the others are alternatives to its last mistake."""
    first = matching[0]
    result.candidate, result.closest = candidate, None
    fresh = [made for made in first.made if made not in result.made]
    result.made = first.made
    tolerance = max(case.tolerance for case in cases)
    for made in fresh:
        code = made.mistake.code
        result.proofs[code] = MatchEvidence(first.error * tolerance, tolerance, tuple(cases))
        others = [h.made[-1] for h in matching[1:] if h.made[-1].mistake.code != code]
        if len(fresh) == 1 and others:
            result.alternatives[code] = tuple(others)


# ------------------------------------------------------------------------------------------------------------ with masks


def _explain_masked(result: Diagnosis, cases: Sequence[InputCase], known: PriorKnowledge) -> None:
    """The form of the mask under which all is well; else the mistake under the likeliest form."""
    candidate = result.candidate
    if result.made:  # where a mistake has left nothing but NaN, another cannot be told
        cases = [case for case in cases if case.answer.isfinite().any()]
    if not cases or candidate is None:
        return
    for case in cases:
        bases = (result.made, (*result.made, _FINITE))
        if any(_count_hypothesis(result, tried(candidate.layer, base, [case])) for base in bases):
            result.cases.append(case)
            result.choices.append(Choice("mask-form", case.name))
            result.closest = None
            return
    pool = [made for made in _pool(known, candidate) if made.mistake.is_shown_by_masks]
    for search in (singles, pairs):
        for case in cases:
            matching = [h for h in search(candidate.layer, pool, [case], result.made) if _count_hypothesis(result, h)]
            if matching:
                result.cases.append(case)
                _settle(result, candidate, _of_whose_padding(matching, case), [case])
                return
    result.unexplained.append(cases[0].name)


def _explain_windows(result: Diagnosis, subject: UserAttention, seed: int) -> None:
    """Which window of a batch of several images each mask hides keys from."""
    candidate, masked = result.candidate, next((case for case in result.cases if case.form is not None), None)
    if candidate is None or masked is None or masked.form is None:
        return
    case = windows_case(subject, seed, masked.form)
    if case is None or tried(candidate.layer, result.made, [case]).matches:
        return
    pool = variants_of(mistake for mistake in MISTAKES if "windows" in mistake.shown_by)
    matching = [h for h in singles(candidate.layer, pool, [case], result.made) if _count_hypothesis(result, h)]
    if matching:
        result.cases.append(case)
        _settle(result, candidate, matching, [case])


def _of_whose_padding(matching: Sequence[Hypothesis], case: InputCase) -> Sequence[Hypothesis]:
    """The hypotheses, the likelier first: padding that changes the rows of padding is not ignored, it lies along the queries."""
    first, whole = matching[0], replace(case, counted=None)
    if first.made[-1].mistake.code != "padding-ignored" or tried(first.layer, first.made, [whole]).matches:
        return matching
    return sorted(matching, key=lambda h: h.made[-1].mistake.code != "padding-of-queries")


def _large_cases(result: Diagnosis, subject: UserAttention) -> Iterator[InputCase]:
    """The inputs with scores a million times as large, without masks and with each kind of them."""
    for kind in ("mask", "padding"):
        yield from (large_case(subject, case) for case in result.cases[:] if case.kind == kind)
    if not any(case.kind == "mask" for case in result.cases):
        yield large_case(subject, result.cases[0])


def _explain_large(result: Diagnosis, subject: UserAttention, case: InputCase) -> None:
    """Scores so large that only −∞ is low enough, and only a softmax that subtracts the largest is finite."""
    candidate = result.candidate
    assert candidate is not None
    bases = (result.made, (*result.made, _FINITE))
    if any(tried(candidate.layer, base, [case]).matches for base in bases):
        return
    written = observe(subject, candidate.layer, stages_with(result.made), case).numbers_below(-4.0)
    pool = [made for mistake in MISTAKES if "large" in mistake.shown_by for made in _variants_with(mistake, written)]
    matching = [h for h in singles(candidate.layer, pool, [case], result.made) if h.matches]
    if matching:
        result.cases.append(case)
        _settle(result, candidate, matching, [case])


def _variants_with(mistake: Mistake, numbers: Iterable[float]) -> list[AppliedMistake]:
    """The ways to make a mistake, those with the numbers that the author uses first."""
    more = () if mistake.with_number is None else tuple(variant for n in numbers for variant in mistake.with_number(n))
    return variants_of([replace(mistake, variants=(*more, *mistake.variants))])


def stated(forms: Iterable[MaskForm], means: str | None) -> tuple[MaskForm, ...]:
    """The forms that agree with what True is stated to mean; all where nothing is stated."""
    if means is None:
        return tuple(forms)
    return tuple(
        form for form in forms if form.kind == "lengths" or (form.kind != "additive" and form.true_means == means)
    )


def _look_at_left_padding(result: Diagnosis) -> None:
    """Counts rows of NaN that it makes of its own causal mask and padding on the left, which leave the first tokens no key."""
    assert result.candidate is not None
    padded = next((case for case in result.cases if case.kind == "padding"), None)
    if padded is not None and result.candidate.layer.causal and not result.made:
        result.n_nan_rows = int(padded.answer.isnan().any(dim=-1).sum())
