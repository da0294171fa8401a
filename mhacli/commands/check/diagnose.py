"""Finds the mistakes in a user's attention: puts mistakes of the catalogue into the reference until the outputs match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from mhacli.attention.mistakes import MISTAKES, Mistake
from mhacli.attention.mistakes.masks import sentinels
from mhacli.attention.mistakes.stages import ReferenceLayer
from mhacli.commands.check.candidates import Candidate
from mhacli.commands.check.hypotheses import SourceLocator, error_of, recorded
from mhacli.commands.check.inputs import Examined, InputCase, core_cases, large_case, masked_cases, windows_case
from mhacli.usercode.names import is_read_only_with
from mhacli.usercode.roles import call_role, called_function
from mhacli.usercode.target import Choice
from mhacli.usercode.user_attention import MaskForm

_MOST_RANKED, _LAYERS_FOR_ONE, _LAYERS_FOR_MORE = 100, 12, 2
"""The most readings to rank, to try with one mistake, and with several: a few seconds' work. The first two readings may be the
same layer without and with its own causal mask."""
_MOST_MISTAKES = 4
_HIDES = -1e4
"""A masked score that no ordinary score falls below. Source: the first BERT, whose masked scores were −10,000."""


@dataclass
class Diagnosis:
    """The result of a diagnosis. `mistakes` together reproduce the outputs; `proofs` has the largest difference, relative to the
    tolerance, and the cases for each code. `likeliest` is the layer that shares the most tensors with the run,
    and `shown` its mistake that makes the run's weighted values, where the output is not explained. `unexplained` are
    inputs without a matching hypothesis, `not_examined` masks that act only beside another argument. `n_nan_rows` counts NaN
    rows caused by left padding under its own causal mask."""

    cases: list[InputCase]
    candidate: Candidate | None = None
    likeliest: Candidate | None = None
    shown: Mistake | None = None
    mistakes: tuple[Mistake, ...] = ()
    proofs: dict[str, tuple[float, list[InputCase]]] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    not_examined: list[str] = field(default_factory=list)
    n_hypotheses: int = 0
    n_nan_rows: int = 0

    @property
    def layer(self) -> ReferenceLayer:
        """The layer that was accepted."""
        assert self.candidate is not None
        return self.candidate.layer

    @property
    def is_right(self) -> bool:
        """Whether the plain reference reproduces every output."""
        return self.candidate is not None and not self.mistakes and not self.unexplained

    @property
    def mask_form(self) -> MaskForm | None:
        """The form of a mask that it obeys; None if it takes none, or reads it wrongly."""
        return next((case.form for case in self.cases if case.kind == "mask"), None) if self.is_right else None

    def error(self, layer: ReferenceLayer, mistakes: Sequence[Mistake], cases: Sequence[InputCase]) -> float:
        """The error of one more hypothesis."""
        self.n_hypotheses += 1
        return error_of(layer, mistakes, cases)

    def accept(self, candidate: Candidate, mistakes: Sequence[Mistake], error: float, cases: list[InputCase]) -> None:
        """Keeps the hypothesis that matches these cases."""
        self.candidate = candidate
        self.proofs |= {new.code: (error, cases) for new in mistakes[len(self.mistakes) :]}
        self.mistakes = tuple(mistakes)


def diagnose(examined: Examined, layers: Sequence[Candidate]) -> Diagnosis:
    """Diagnoses a subject that may be any of these layers. Raises what the subject raises."""
    subject, seed = examined.subject, examined.request.of.seed
    result = Diagnosis(cases=list(core_cases(subject, seed)))
    run = recorded(subject, result.cases[0])
    if layers and not _explain_core(result, examined, layers, run):
        result.unexplained.append(result.cases[0].name)
    if result.candidate is None:
        return result
    masks = list(_by_parameter(subject.mask_forms))
    parameters = {forms[0].parameter for forms in masks}
    for forms in [forms for forms in masks if call_role(forms[0].parameter) != "bias"] or masks:
        _explain_masked(result, examined, list(masked_cases(subject, seed, _as_stated(forms, examined), "mask")))
    for forms in _by_parameter(subject.padding_forms):
        if forms[0].parameter not in parameters:  # else it was tried as a mask
            _explain_masked(result, examined, list(masked_cases(subject, seed, _as_stated(forms, examined), "padding")))
    _explain_windows(result, examined)
    for case in list(_large_cases(result, examined)):
        _explain_large(result, examined, case)
    padded = next((case for case in result.cases if case.kind == "padding"), None)
    if padded is not None and result.layer.causal and not result.mistakes:
        result.n_nan_rows = int(padded.output.isnan().any(dim=-1).sum())
    return result


def _by_parameter(forms: Sequence[MaskForm]) -> Iterator[list[MaskForm]]:
    """The forms of each mask parameter."""
    ordered = sorted(forms, key=lambda form: [other.parameter for other in forms].index(form.parameter))
    return (list(of_parameter) for _, of_parameter in groupby(ordered, key=lambda form: form.parameter))


def _as_stated(forms: Iterable[MaskForm], examined: Examined) -> list[MaskForm]:
    """The forms that agree with the stated meaning of True; all forms without a statement."""
    means = examined.request.mask_means
    return [
        form for form in forms
        if means is None or form.kind == "lengths" or (form.kind != "additive" and form.true_means == means)
    ]  # fmt: skip


def _pool(examined: Examined, candidate: Candidate, run: SourceLocator) -> list[Mistake]:
    """The mistakes that cannot be design choices."""
    order = None if candidate.reading is None else candidate.reading.order
    in_order = run.unpacks_in_order(order or "qkv")
    known = {
        "causal": examined.expects_causal,
        "pairing": examined.request.rope is not None,
        "order": all(choice.name != "unnamed" for choice in candidate.choices),
        "unpacked": in_order or (in_order is None and order is None),
    }
    facts = {name for name, is_known in known.items() if is_known}
    possible = [each for each in MISTAKES if each.needs <= facts and each.is_possible_in(candidate.layer)]
    return [each for each in possible if not (examined.request.not_causal and each.stage == "causal_rule")]


# --------------------------------------------------------------------------------------------------------- without masks


def _explain_core(result: Diagnosis, examined: Examined, layers: Sequence[Candidate], run: SourceLocator) -> bool:
    """Accepts the first match of: no mistake, a custom pattern, one mistake; then the same for layers that contradict a
    statement; then several mistakes."""
    ranked: list[Candidate] = []
    for _, group in groupby(layers, key=lambda candidate: bool(candidate.contradicts)):
        readings = list(group)
        if _is_right_layer(result, readings) or _has_own_pattern(result, examined, readings):
            return True
        likely = sorted(
            readings[:_MOST_RANKED], key=lambda candidate: -_n_produced(run, candidate, (), result.cases[0])
        )
        ranked = ranked or likely
        result.likeliest = ranked[0]
        few = [*likely[:_LAYERS_FOR_ONE], *readings[:_LAYERS_FOR_ONE]]
        for candidate in {id(candidate): candidate for candidate in few}.values():
            if _has_one_more(result, candidate, _pool(examined, candidate, run), (), result.cases, run):
                return True
    has_several = any(
        _has_several(result, candidate, _pool(examined, candidate, run), result.cases, run)
        for candidate in ranked[:_LAYERS_FOR_MORE]
    )
    if not has_several and not any(_makes_z(run, candidate, (), result.cases[0]) for candidate in ranked):
        pool = _pool(examined, ranked[0], run)
        shown = [mistake for mistake in pool if _makes_z(run, ranked[0], (mistake,), result.cases[0])]
        result.shown = shown[0] if len({mistake.code for mistake in shown}) == 1 else None
    return has_several


def _makes_z(run: SourceLocator, candidate: Candidate, mistakes: Sequence[Mistake], case: InputCase) -> bool:
    """Whether the run makes the weighted values of a layer, whatever it does with them."""
    try:
        return bool(run.at_sites(candidate.layer, mistakes, case).producers("z"))
    except Exception:  # the mistake is not possible here
        return False


def _is_right_layer(result: Diagnosis, readings: Sequence[Candidate]) -> bool:
    for candidate in readings:
        error = result.error(candidate.layer, (), result.cases)
        if error <= 1.0:
            result.accept(candidate, (), error, result.cases)
            return True
    return False


def _has_own_pattern(result: Diagnosis, examined: Examined, readings: Sequence[Candidate]) -> bool:
    """Whether a custom pattern explains the outputs, such as a window. For attention meant to be causal, a pattern that shows
    the future does not count."""
    probed, first = examined.probed, result.cases[:1]
    if probed.influence is None or probed.visible not in ("other", "itself only"):
        return False
    if examined.expects_causal and bool(probed.influence.triu(1).any()):
        return False
    if not first[0].output.isfinite().all():  # a NaN output would count as one that sees nothing
        return False
    choice = Choice("own-pattern", "tokens see others by a rule of its own, such as a window")
    for candidate in readings:
        layer = replace(candidate.layer, causal=False, sees=probed.influence)
        error = result.error(layer, (), first)
        if error <= 1.0:
            result.cases = first
            result.accept(replace(candidate, layer=layer, choices=(*candidate.choices, choice)), (), error, first)
            return True
    return False


def _n_produced(run: SourceLocator, candidate: Candidate, mistakes: Sequence[Mistake], case: InputCase) -> int:
    """The number of the layer's tensors that the run produces."""
    try:
        return run.at_sites(candidate.layer, mistakes, case).n_produced
    except Exception:  # the mistake is not possible here
        return -1


def _has_one_more(
    result: Diagnosis,
    candidate: Candidate,
    pool: Sequence[Mistake],
    known: tuple[Mistake, ...],
    cases: list[InputCase],
    run: SourceLocator,
) -> bool:
    """Accepts the mistake that explains the outputs together with those that are known: of several, the one whose layer shares
    the most tensors with the run."""
    errors = [(result.error(candidate.layer, (*known, one), cases), one) for one in _free(pool, known)]
    matching = [
        (_n_produced(run, candidate, (*known, one), cases[0]), error, one) for error, one in errors if error <= 1.0
    ]
    if not matching:
        return False
    _, error, best = max(matching, key=lambda match: match[0])
    result.accept(candidate, (*known, best), error, cases)
    return True


def _free(pool: Sequence[Mistake], known: Sequence[Mistake]) -> list[Mistake]:
    taken = {mistake.stage for mistake in known}
    return [mistake for mistake in pool if mistake.stage not in taken]


def _has_several(
    result: Diagnosis,
    candidate: Candidate,
    pool: Sequence[Mistake],
    cases: list[InputCase],
    run: SourceLocator,
) -> bool:
    """Applies the mistake whose layer shares the most tensors with the run, and goes on from there."""
    known = result.mistakes
    n_shared = _n_produced(run, candidate, known, cases[0])
    while len(known) < _MOST_MISTAKES:
        counts = [(_n_produced(run, candidate, (*known, one), cases[0]), one) for one in _free(pool, known)]
        n_best = max(n for n, _ in counts)
        if n_best <= n_shared:
            return False
        best = [one for n, one in counts if n == n_best]
        if any(_has_one_more(result, candidate, pool, (*known, one), cases, run) for one in best):
            return True
        known, n_shared = (*known, best[0]), n_best
    return False


# ------------------------------------------------------------------------------------------------------------ with masks


def _explain_masked(result: Diagnosis, examined: Examined, cases: list[InputCase]) -> None:
    """Accepts the mask form that matches, else a mistake under the likeliest form."""
    candidate = result.candidate
    if result.mistakes:  # an all-NaN output cannot show another mistake
        cases = [case for case in cases if case.output.isfinite().any()]
    if not cases or candidate is None:
        return
    for case in cases:
        finite = replace(candidate.layer, hidden=-1e9)
        if any(result.error(layer, result.mistakes, [case]) <= 1.0 for layer in (candidate.layer, finite)):
            result.cases.append(case)
            result.choices.append(Choice("mask-form", case.name))
            return
    if _replaces_causal_mask(result, cases) or _acts_beside_another(result, examined, cases):
        return
    runs = [recorded(examined.subject, case) for case in cases]
    pool = [one for one in _pool(examined, candidate, runs[0]) if one.is_shown_by_masks]
    for case, run in zip(cases, runs, strict=True):
        if _has_one_more(result, candidate, _ordered_by_padding(pool, result, case), result.mistakes, [case], run):
            result.cases.append(case)
            return
    for case, run in zip(cases, runs, strict=True):
        if _has_several(result, candidate, pool, [case], run):
            result.cases.append(case)
            return
    result.unexplained.append(cases[0].name)


def _replaces_causal_mask(result: Diagnosis, cases: Sequence[InputCase]) -> bool:
    """Whether a mask of queries and keys takes the place of its own causal mask, which is a choice."""
    open_layer = replace(result.layer, causal=False)
    for case in cases:
        is_whole = result.layer.causal and case.form is not None and "query" in case.form.axes
        if is_whole and error_of(open_layer, result.mistakes, [case]) <= 1.0:
            what = f"a mask that is given takes the place of its own causal mask ({case.name})"
            result.choices.append(Choice("mask-replaces-causal", what))
            return True
    return False


def _acts_beside_another(result: Diagnosis, examined: Examined, cases: Sequence[InputCase]) -> bool:
    """Whether the mask belongs to an argument that is never given: without it nothing is masked, and nothing reads it."""
    subject, form = examined.subject, cases[0].form or cases[0].padding
    assert form is not None
    is_unread = is_read_only_with(called_function(subject.built.call), form.parameter, subject.untried)
    if is_unread:
        result.not_examined.append(form.parameter)
    return is_unread


def _ordered_by_padding(pool: Sequence[Mistake], result: Diagnosis, case: InputCase) -> Sequence[Mistake]:
    """The mistakes in order of likelihood. Padding that changes padded queries is not ignored: it is applied along the
    queries."""
    ignored = next((one for one in pool if one.code == "padding-ignored"), None)
    if ignored is None or case.kind != "padding":
        return pool
    everywhere = error_of(result.layer, (*result.mistakes, ignored), [replace(case, counted=None)])
    return sorted(pool, key=lambda one: everywhere > 1.0 and one.code != "padding-of-queries")


def _explain_windows(result: Diagnosis, examined: Examined) -> None:
    """Finds which window each mask is applied to in a batch of several images."""
    form = next((case.form for case in result.cases if case.form is not None), None)
    case = None if form is None else windows_case(examined.subject, examined.request.of.seed, form)
    if case is None or error_of(result.layer, result.mistakes, [case]) <= 1.0:
        return
    assert result.candidate is not None
    pool = [mistake for mistake in MISTAKES if mistake.shown_by == "windows"]
    if _has_one_more(result, result.candidate, pool, result.mistakes, [case], recorded(examined.subject, case)):
        result.cases.append(case)


def _large_cases(result: Diagnosis, examined: Examined) -> Iterator[InputCase]:
    """The inputs with scores a million times as large, without masks and with each kind of mask."""
    masked = [case for kind in ("mask", "padding") for case in result.cases if case.kind == kind]
    yield from (large_case(examined.subject, case) for case in masked)
    if not any(case.kind == "mask" for case in masked):
        yield large_case(examined.subject, result.cases[0])


def _explain_large(result: Diagnosis, examined: Examined, case: InputCase) -> None:
    """Finds mistakes that only huge scores show: a finite mask value, and a softmax without subtracting the maximum."""
    layer, finite = result.layer, replace(result.layer, hidden=-1e9)
    if any(error_of(each, result.mistakes, [case]) <= 1.0 for each in (layer, finite)):
        return
    run = recorded(examined.subject, case)
    too_small = next(mistake for mistake in MISTAKES if mistake.code == "mask-sentinel-too-small")
    of_code: list[Mistake] = []
    for number in run.numbers_below(-4.0):
        hidden = [replace(too_small, description=each, stages={"mask": mask}) for each, mask in sentinels(number)]
        if number <= _HIDES and any(error_of(layer, (*result.mistakes, one), [case]) <= 1.0 for one in hidden):
            what = f"masked scores become {number:g}, which hides every score below {-number:g}"
            result.choices.append(Choice("mask-value", what))
            return
        of_code += hidden
    pool = [*of_code, *(mistake for mistake in MISTAKES if mistake.shown_by == "large")]
    assert result.candidate is not None
    if _has_one_more(result, result.candidate, pool, result.mistakes, [case], run):
        result.cases.append(case)
