"""Finds the mistakes in a user's attention: puts mistakes of the catalogue into the reference until the outputs match."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.mistakes import MISTAKES, Mistake
from mhacli.attention.mistakes.masks import sentinels
from mhacli.attention.mistakes.stages import ReferenceLayer, run, stages_with
from mhacli.commands.check.candidates import Candidate, candidates
from mhacli.commands.check.inputs import (
    Examined,
    InputCase,
    InputKind,
    core_cases,
    large_case,
    masked_cases,
    max_error,
    windows_case,
)
from mhacli.commands.check.recording import Run, run_of_case
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
    """The result of a diagnosis. `run` is the recorded first case. `mistakes` together reproduce the outputs; `proofs` has the
    largest difference, relative to the tolerance, and the cases for each code. `likeliest` is the layer that shares the most
    tensors with the run, and `shown` its mistake that makes the run's weighted values, where the output is not explained.
    `unexplained` are inputs without a matching hypothesis, `not_examined` masks that act only beside another argument.
    `n_nan_rows` counts NaN rows caused by left padding under its own causal mask."""

    cases: list[InputCase]
    run: Run
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

    def explains(self, case: InputCase, **changes: Any) -> bool:
        """Whether the layer with its mistakes gives the output of a case, with −∞ or a finite number for a masked score;
        `changes` are other fields of it."""
        layers = [replace(self.layer, hidden=hidden, **changes) for hidden in (-math.inf, -1e9)]
        return any(error_of(layer, self.mistakes, [case]) <= 1.0 for layer in layers)

    def accept(self, candidate: Candidate, mistakes: Sequence[Mistake], error: float, cases: list[InputCase]) -> None:
        """Keeps the hypothesis that matches these cases."""
        self.candidate = candidate
        self.proofs |= {new.code: (error, cases) for new in mistakes[len(self.mistakes) :]}
        self.mistakes = tuple(mistakes)


def error_of(layer: ReferenceLayer, mistakes: Sequence[Mistake], cases: Sequence[InputCase]) -> float:
    """The largest difference from the outputs, relative to each case's tolerance: up to 1 is a match, and the first larger one
    ends the comparison. Infinite if shapes or NaN positions differ, if a mistake does not apply to this layer, or if everything
    is NaN and none of the mistakes leaves only that.

    Rows that are not counted and queries without visible keys have no right output and are left out.
    """
    stages, worst = stages_with(mistakes), 0.0
    may_be_nan = any(mistake.may_be_nan for mistake in mistakes)
    for case in cases:
        try:
            with torch.no_grad():
                out, keep = run(stages, layer, case.rows)
            if out.shape != case.output.shape:
                return math.inf
            counted = _counted(case, keep, out)
        except Exception:  # the mistake is not possible here, or a norm of the module fails
            return math.inf
        compared = out[counted]
        if not compared.numel() or (not may_be_nan and bool(compared.isnan().all())):
            return math.inf
        worst = max(worst, max_error(compared, case.output[counted]) / case.tolerance)
        if worst > 1.0:
            break
    return worst


def _counted(case: InputCase, keep: Tensor | None, out: Tensor) -> Tensor:
    """The compared rows of the output, `[batch, query]`, or with heads for a function."""
    counted = torch.ones(out.shape[:-1], dtype=torch.bool)
    if case.counted is not None:
        counted &= case.counted if out.ndim == 3 else case.counted[:, None]
    if keep is not None:
        has_key = keep.any(dim=-1)  # [batch, head, query]
        counted &= has_key.all(dim=1) if out.ndim == 3 else has_key
    return counted


def diagnose(examined: Examined) -> Diagnosis:
    """Diagnoses a subject. Raises what the subject raises."""
    subject = examined.subject
    cases = list(core_cases(subject, examined.request.of.seed))
    result = Diagnosis(cases, run_of_case(subject, cases[0]))
    layers = candidates(examined, result.run)
    if layers and not _explain_core(result, examined, layers):
        result.unexplained.append(cases[0].name)
    if result.candidate is None:
        return result
    for masked in _masked_cases(examined):
        _explain_masked(result, examined, masked)
    _explain_windows(result, examined)
    masked = [case for kind in ("mask", "padding") for case in result.cases if case.kind == kind]
    unmasked = [] if any(case.kind == "mask" for case in masked) else result.cases[:1]
    for case in [large_case(subject, case) for case in (*masked, *unmasked)]:
        _explain_large(result, examined, case)
    padded = next((case for case in result.cases if case.kind == "padding"), None)
    if padded is not None and result.layer.causal and not result.mistakes:
        result.n_nan_rows = int(padded.output.isnan().any(dim=-1).sum())
    return result


def _masked_cases(examined: Examined) -> Iterator[list[InputCase]]:
    """The cases of each mask, then of each padding that is none of these masks, in every form that agrees with what is stated."""
    subject, means = examined.subject, examined.request.mask_means
    masks = [form.parameter for form in subject.mask_forms]
    of_kind: dict[InputKind, list[str]] = {
        "mask": [name for name in masks if call_role(name) != "bias"] or masks,
        "padding": [form.parameter for form in subject.padding_forms if form.parameter not in masks],
    }
    for kind, names in of_kind.items():
        for name in dict.fromkeys(names):
            forms = [form for form in (*subject.mask_forms, *subject.padding_forms) if form.parameter == name]
            if means is not None:  # what is added to scores, such as −∞, has no True
                stated = [form for form in forms if form.kind != "additive" and form.true_means == means]
                forms = [form for form in forms if form.kind == "lengths" or form in stated]
            yield list(masked_cases(subject, examined.request.of.seed, forms, kind))


def _pool(examined: Examined, candidate: Candidate, run: Run) -> list[Mistake]:
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


def _explain_core(result: Diagnosis, examined: Examined, layers: Sequence[Candidate]) -> bool:
    """Accepts the first match of: no mistake, a custom pattern, one mistake; then the same for layers that contradict a
    statement; then several mistakes."""
    run, ranked = result.run, list[Candidate]()
    for _, group in groupby(layers, key=lambda candidate: bool(candidate.contradicts(examined.request))):
        readings = list(group)
        for candidate in readings:
            error = result.error(candidate.layer, (), result.cases)
            if error <= 1.0:
                result.accept(candidate, (), error, result.cases)
                return True
        if _has_own_pattern(result, examined, readings):
            return True
        likely = sorted(readings[:_MOST_RANKED], key=lambda candidate: -run.at_sites(candidate.layer).n_produced)
        ranked = ranked or likely
        result.likeliest = ranked[0]
        few = [*likely[:_LAYERS_FOR_ONE], *readings[:_LAYERS_FOR_ONE]]
        for candidate in {id(candidate): candidate for candidate in few}.values():
            if _has_one_more(result, candidate, _pool(examined, candidate, run), (), result.cases, run):
                return True
    for candidate in ranked[:_LAYERS_FOR_MORE]:
        if _has_several(result, candidate, _pool(examined, candidate, run), result.cases, run):
            return True
    if not any(run.at_sites(candidate.layer).producers("z") for candidate in ranked):
        layer, pool = ranked[0].layer, _pool(examined, ranked[0], run)
        shown = [mistake for mistake in pool if run.at_sites(layer, [mistake]).producers("z")]
        result.shown = shown[0] if len({mistake.code for mistake in shown}) == 1 else None
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
    for reading in readings:
        candidate = reading.having(({"causal": False, "sees": probed.influence}, (choice,)))
        error = result.error(candidate.layer, (), first)
        if error <= 1.0:
            result.cases = first
            result.accept(candidate, (), error, first)
            return True
    return False


def _has_one_more(
    result: Diagnosis,
    candidate: Candidate,
    pool: Sequence[Mistake],
    known: tuple[Mistake, ...],
    cases: list[InputCase],
    run: Run,
) -> bool:
    """Accepts the mistake that explains the outputs together with those that are known: of several, the one whose layer shares
    the most tensors with the run."""
    errors = [(result.error(candidate.layer, (*known, one), cases), one) for one in _free(pool, known)]
    matching = [
        (run.at_sites(candidate.layer, (*known, one)).n_produced, error, one) for error, one in errors if error <= 1.0
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
    result: Diagnosis, candidate: Candidate, pool: Sequence[Mistake], cases: list[InputCase], run: Run
) -> bool:
    """Applies the mistake whose layer shares the most tensors with the run, and goes on from there."""
    known = result.mistakes
    n_shared = run.at_sites(candidate.layer, known).n_produced
    while len(known) < _MOST_MISTAKES:
        counts = [(run.at_sites(candidate.layer, (*known, one)).n_produced, one) for one in _free(pool, known)]
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
    subject, candidate = examined.subject, result.candidate
    if result.mistakes:  # an all-NaN output cannot show another mistake
        cases = [case for case in cases if case.output.isfinite().any()]
    if not cases or candidate is None:
        return
    for case in cases:
        if result.explains(case):
            result.cases.append(case)
            result.choices.append(Choice("mask-form", case.name))
            return
    for case in cases if result.layer.causal else ():
        if case.form is not None and "query" in case.form.axes and result.explains(case, causal=False):
            what = f"a mask that is given takes the place of its own causal mask ({case.name})"
            result.choices.append(Choice("mask-replaces-causal", what))
            return
    form = cases[0].form or cases[0].padding
    assert form is not None
    if is_read_only_with(called_function(subject.built.call), form.parameter, subject.untried):
        result.not_examined.append(form.parameter)  # it belongs to an argument that is never given
        return
    runs = [run_of_case(subject, case) for case in cases]
    pool = [one for one in _pool(examined, candidate, runs[0]) if one.is_shown_by_masks]
    for number, case in enumerate(cases):
        likely = _ordered_by_padding(pool, result, case)
        if _has_one_more(result, candidate, likely, result.mistakes, [case], runs[number]):
            result.cases.append(case)
            return
    for number, case in enumerate(cases):
        if _has_several(result, candidate, pool, [case], runs[number]):
            result.cases.append(case)
            return
    result.unexplained.append(cases[0].name)


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
    if case is None or result.candidate is None or result.explains(case):
        return
    pool = [mistake for mistake in MISTAKES if mistake.shown_by == "windows"]
    if _has_one_more(result, result.candidate, pool, result.mistakes, [case], run_of_case(examined.subject, case)):
        result.cases.append(case)


def _explain_large(result: Diagnosis, examined: Examined, case: InputCase) -> None:
    """Finds mistakes that only huge scores show: a finite mask value, and a softmax without subtracting the maximum."""
    if result.candidate is None or result.explains(case):
        return
    run = run_of_case(examined.subject, case)
    too_small = next(mistake for mistake in MISTAKES if mistake.code == "mask-sentinel-too-small")
    of_code: list[Mistake] = []
    for number in run.numbers_below(-4.0):
        hidden = [replace(too_small, description=each, stages={"mask": mask}) for each, mask in sentinels(number)]
        if number <= _HIDES and any(error_of(result.layer, (*result.mistakes, one), [case]) <= 1.0 for one in hidden):
            what = f"masked scores become {number:g}, which hides every score below {-number:g}"
            result.choices.append(Choice("mask-value", what))
            return
        of_code += hidden
    pool = [*of_code, *(mistake for mistake in MISTAKES if mistake.shown_by == "large")]
    if _has_one_more(result, result.candidate, pool, result.mistakes, [case], run):
        result.cases.append(case)
