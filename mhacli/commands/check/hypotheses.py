"""Hypotheses about a user's attention, and their evidence: numbers, source lines, and the smallest input."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes import Mistake, MistakeVariant
from mhacli.attention.mistakes.masks import MASKING
from mhacli.attention.mistakes.scores import assigned_names
from mhacli.attention.mistakes.stages import RIGHT, ReferenceLayer, Stages, run
from mhacli.commands.check.inputs import HIDDEN, InputCase, InputKind, make_case, max_error, output_for
from mhacli.commands.check.result import FirstDifference
from mhacli.usercode.call.user_attention import UserAttention, drawer_of
from mhacli.usercode.names import is_within
from mhacli.usercode.operations import watch
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import read_name
from mhacli.usercode.types import Built, Inputs, Operation


class AppliedMistake(NamedTuple):
    """A mistake in one of its variants."""

    mistake: Mistake
    variant: MistakeVariant

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that it changes."""
        return self.variant.sites or (self.mistake.site,)


@dataclass(frozen=True)
class Hypothesis:
    """A layer with some mistakes or none. `error` is the largest difference from the outputs relative to each case's tolerance;
    up to 1 is a match."""

    layer: ReferenceLayer
    mistakes: tuple[AppliedMistake, ...] = ()
    error: float = math.inf

    @property
    def stages(self) -> Stages:
        """The reference stages with these mistakes."""
        return stages_with(self.mistakes)

    @property
    def matches(self) -> bool:
        """Whether the difference is within rounding."""
        return self.error <= 1.0


def stages_with(mistakes: Iterable[AppliedMistake]) -> Stages:
    """The reference stages with these mistakes in place."""
    replacements: dict[str, Any] = {}
    for applied in mistakes:
        replacements |= {str(applied.mistake.stage): applied.variant.replacement, **applied.variant.besides}
    return replace(RIGHT, **replacements)


def may_be_nan(mistakes: Iterable[AppliedMistake]) -> bool:
    """Whether one of the mistakes may produce only NaN."""
    return any(applied.mistake.may_be_nan for applied in mistakes)


def difference(layer: ReferenceLayer, stages: Stages, case: InputCase, *, may_be_nan: bool = False) -> float:
    """The largest difference from the output; infinite if shapes or NaN positions differ, if the mistake does not apply to this
    layer, or if everything is NaN and not `may_be_nan`.

    Rows that are not counted and queries without visible keys have no right output and are left out.
    """
    try:
        with torch.no_grad():
            out, keep = run(stages, layer, case.rows)
        if out.shape != case.output.shape:
            return math.inf
        counted = _counted(case, keep, out)
    except Exception:  # the mistake does not apply here, or a norm of the module fails
        return math.inf
    compared = out[counted]
    is_nan = bool(compared.isnan().all())
    return (
        math.inf if not compared.numel() or (is_nan and not may_be_nan) else max_error(compared, case.output[counted])
    )


def _counted(case: InputCase, keep: Tensor | None, out: Tensor) -> Tensor:
    """The compared rows of the output, `[batch, query]`, or with heads for a function."""
    counted = torch.ones(out.shape[:-1], dtype=torch.bool)
    if case.counted is not None:
        counted &= case.counted if out.ndim == 3 else case.counted[:, None]
    if keep is not None:
        has_key = keep.any(dim=-1)  # [batch, head, query]
        counted &= has_key.all(dim=1) if out.ndim == 3 else has_key
    return counted


def evaluate(
    layer: ReferenceLayer, mistakes: tuple[AppliedMistake, ...], cases: Sequence[InputCase], enough: float = math.inf
) -> Hypothesis:
    """A hypothesis with its error over all cases. Stops once a case exceeds `enough`."""
    stages, worst = stages_with(mistakes), 0.0
    for case in cases:
        worst = max(worst, difference(layer, stages, case, may_be_nan=may_be_nan(mistakes)) / case.tolerance)
        if worst > enough:
            break
    return Hypothesis(layer, mistakes, worst)


def variants_of(mistakes: Iterable[Mistake]) -> list[AppliedMistake]:
    """Every variant of the mistakes that changes a stage."""
    return [AppliedMistake(mistake, variant) for mistake in mistakes if mistake.stage for variant in mistake.variants]


def singles(
    layer: ReferenceLayer,
    pool: Sequence[AppliedMistake],
    cases: Sequence[InputCase],
    base: tuple[AppliedMistake, ...],
) -> Iterator[Hypothesis]:
    """Hypotheses with the mistakes of `base` and one more."""
    taken = {applied.mistake.stage for applied in base}
    return (
        evaluate(layer, (*base, applied), cases, enough=1.0) for applied in pool if applied.mistake.stage not in taken
    )


def pairs(
    layer: ReferenceLayer,
    pool: Sequence[AppliedMistake],
    cases: Sequence[InputCase],
    base: tuple[AppliedMistake, ...],
) -> Iterator[Hypothesis]:
    """Hypotheses with the mistakes of `base` and two more, at different stages."""
    taken = {applied.mistake.stage for applied in base}
    free = [applied for applied in pool if applied.mistake.stage not in taken and not applied.variant.is_rare]
    for first, second in combinations(free, 2):
        if first.mistake.stage != second.mistake.stage:
            yield evaluate(layer, (*base, first, second), cases, enough=1.0)


# --------------------------------------------------------------------------------------------------------- source lines


_SHOWN_AS = {"scaled": "scores"}
"""Reports call the scaled products scores: without a mask they are an intermediate step."""
SITES = ("q_proj", "k_proj", "v_proj", "q", "k", "v", "qk", "scaled", "scores", "pattern", "z", "concat", "out")
_SHAPING = (
    "view",
    "reshape",
    "unflatten",
    "flatten",
    "transpose",
    "permute",
    "swapaxes",
    "cat",
    "stack",
    "contiguous",
    "einsum",
)
_PREFERRED: Mapping[str, tuple[str, ...]] = {
    "q": _SHAPING[:3], "k": _SHAPING[:3], "v": _SHAPING[:3], "concat": (*_SHAPING[:4], "cat", "mean", "sum"),
}  # fmt: skip


@dataclass(frozen=True)
class SourceLocator:
    """The recorded operations of a user's attention, and the reference's tensors at each site for the same input."""

    operations: tuple[Operation, ...]
    sites: Mapping[str, Tensor]

    def line_of(self, site: str) -> SourceLine:
        """The line that produces a site's numbers, or those of the first later site that is found."""
        for later in SITES[SITES.index(site) :] if site in SITES else ():
            operation = self._producer(later)
            if operation is not None:
                return operation.at
        return SourceLine()

    def names_in(self, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
        """Sites with the variable of a function that holds their numbers."""
        for site in ("q", "k", "v", "scaled", "scores", "pattern", "z"):
            producer = self._producer(site)
            if producer is None or not is_within(producer.at, function):
                continue
            names = assigned_names(producer.source)
            candidates = names if len(names) == 1 else [name for name in names if read_name(name)[0] == site]
            last_operation = next(op for op in reversed(self.operations) if op.at == producer.at)
            if len(candidates) == 1 and (site in "qkv" or _same_numbers(last_operation.output, self.sites[site])):
                yield site, candidates[0]

    def line_by(self, names: Sequence[str]) -> SourceLine:
        """The line of the first operation with one of these names, in order of preference."""
        with_line = [op for op in self.operations if op.line is not None]
        operation = next((op for name in names for op in with_line if op.name == name), None)
        return SourceLine() if operation is None else operation.at

    def lines_for(self, mistake: Mistake, sites: Sequence[str], built: Built) -> list[SourceLine]:
        """The lines of a mistake, at least one: by operation name, by source pattern, or by site."""
        by_name = self.line_by(mistake.operations)
        if by_name.line is not None:
            return [by_name]
        in_source = line_in_source(built, mistake)
        if in_source.line is not None or not sites:
            return [in_source]
        return list(dict.fromkeys(self.line_of(site) for site in sites))

    def numbers_below(self, bound: float) -> list[float]:
        """Distinct finite numbers below a bound in masking operations, such as the value for masked scores."""
        masking = [op for op in self.operations if op.name.rstrip("_") in MASKING]
        numbers = [value for op in masking for value in op.arguments.values() if isinstance(value, int | float)]
        numbers += [t.item() for op in masking for t in op.inputs if t.numel() == 1 and t.is_floating_point()]
        return list(dict.fromkeys(float(value) for value in numbers if -1e7 < value < bound))

    def _producer(self, site: str) -> Operation | None:
        expected = self.sites.get(site)
        if expected is None:
            return None
        producers = [op for op in self.operations if op.line is not None and _same_numbers(op.output, expected)]
        preferred = [op for op in producers if op.name in _PREFERRED.get(site, ())]
        if site in _PREFERRED and not preferred:
            preferred = [op for op in producers if op.name in _SHAPING]
        if site in ("q_proj", "k_proj", "v_proj"):  # by variable name, because the shapes may be the same
            preferred = [
                op for op in producers if site[0] in (read_name(name)[0] for name in assigned_names(op.source))
            ]
        return next(iter(preferred or producers), None)

    def first_missing(self) -> str | None:
        """The first site whose numbers the subject never produces; None if it produces all."""
        return next((site for site in SITES if site in self.sites and not self._is_produced(site)), None)

    def departure(self) -> FirstDifference:
        """The first missing site, and the last site in common before it."""
        missing = self.first_missing()
        before = [site for site in SITES[: SITES.index(missing) if missing else None] if site in self.sites]
        shared = next((site for site in reversed(before) if site not in _SHOWN_AS), None)
        line = SourceLine() if missing is None or not before else self._after(before[-1])
        return FirstDifference("out" if missing is None else _SHOWN_AS.get(missing, missing), shared, *line)

    def _is_produced(self, site: str) -> bool:
        return any(_same_numbers(operation.output, self.sites[site]) for operation in self.operations)

    def _after(self, site: str) -> SourceLine:
        """The line of the first operation after the one that produces a site."""
        producer = self._producer(site)
        later = [] if producer is None else list(self.operations[self.operations.index(producer) + 1 :])
        operation = next((op for op in later if op.line is not None and op.name not in _SHAPING), producer)
        return SourceLine() if operation is None else operation.at


def _same_numbers(produced: Tensor, expected: Tensor) -> bool:
    """Whether two tensors hold the same numbers in any order, or one holds those of the other's first head."""
    if not produced.is_floating_point():
        return False
    numbers = produced.detach().to("cpu", torch.float64).flatten()
    for candidate in (expected, expected[:, 0] if expected.ndim == 4 else expected):
        if candidate.numel() == numbers.numel():
            a, b = (_lowest_as_infinite(t) for t in (numbers.sort().values, candidate.flatten().sort().values))
            if torch.equal(a.isfinite(), b.isfinite()):
                a, b = a[a.isfinite()], b[b.isfinite()]
                return bool(not a.numel() or (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1e-30))
    return False


def _lowest_as_infinite(numbers: Tensor) -> Tensor:
    return numbers.masked_fill(numbers < HIDDEN, -math.inf)


def observe(subject: UserAttention, layer: ReferenceLayer, stages: Stages, case: InputCase) -> SourceLocator:
    """A locator for one recorded run of a case."""
    _, operations = watch(lambda: output_for(subject, case.inputs, case.form, case.padding), subject.built.files)
    sites: dict[str, Tensor] = {}

    def keep(site: str, tensor: Tensor, **where: Any) -> None:
        sites[site] = tensor

    run(stages, layer, case.rows, tap=keep)
    return SourceLocator(operations, sites)


def line_in_source(built: Built, mistake: Mistake) -> SourceLine:
    """The first source line that matches the mistake's pattern, `forward` first; empty if none matches. A mistake with neither
    a pattern nor a site has the first line of `forward`."""
    for part in (getattr(built.thing, "forward", None), built.thing):
        try:
            lines, first = inspect.getsourcelines(part)  # type: ignore[arg-type]
        except (OSError, TypeError):
            continue
        for number, line in enumerate(lines, first):
            plain = line.split("#")[0]
            is_code = not plain.lstrip().startswith(("def ", "class ", '"'))
            if mistake.in_source and is_code and re.search(mistake.in_source, plain):
                return SourceLine(built.file, number, line.strip())
        if not (mistake.in_source or mistake.site):
            return SourceLine(built.file, first, lines[0].strip())
    return SourceLine()


class Smallest(NamedTuple):
    """The smallest input with a different output, and the difference."""

    batch: int
    q_len: int
    k_len: int
    difference: float
    largest: float
    is_nan: bool


_SMALL = ((1, 1, 1), (1, 2, 2), (1, 1, 2), (2, 1, 1), (2, 2, 2), (1, 3, 3), (1, 2, 3), (2, 3, 3))


def smallest(
    subject: UserAttention, layer: ReferenceLayer, stages: Stages, like: InputCase, seed: int
) -> Smallest | None:
    """The smallest input, of the kind of a case, whose output differs from the layer with these stages; None if none of a few
    small ones differs. Inputs on which the subject raises are skipped."""
    has_separate_keys = like.rows.queries.shape[-2] != like.rows.keys.shape[-2]
    for batch, q_len, k_len in _SMALL:
        if q_len != k_len and not has_separate_keys:
            continue
        try:
            case = _small(like.kind, subject, like, seed, (batch, q_len, k_len), other=like.inputs.keys is not None)
            if layer.bias is not None:
                layer.bias(case.rows)  # raises if the bias cannot be read at this size
            error = difference(layer, stages, case)
        except Exception:  # an input too small for the module
            continue
        if error > case.tolerance:
            finite = case.output[case.output.isfinite()].abs()
            largest = finite.max().item() if finite.numel() else math.nan
            return Smallest(batch, q_len, k_len, error, largest, bool(case.output.isnan().any()))
    return None


def _small(
    kind: InputKind, subject: UserAttention, like: InputCase, seed: int, sizes: tuple[int, int, int], *, other: bool
) -> InputCase:
    batch, q_len, k_len = sizes
    inputs = drawer_of(subject, seed).inputs(with_context=other, batch=batch, q_len=q_len, k_len=k_len)
    if like.form is not None:
        inputs = inputs._replace(allowed=torch.ones(1, 1, q_len, k_len, dtype=torch.bool).tril(k_len - q_len))
    if like.padding is not None:
        real = torch.arange(k_len)[None] < torch.tensor([[max(1, k_len - 1)]] * batch)
        inputs = inputs._replace(real=real)
    return make_case(kind, like.name, subject, Inputs(*inputs), like.form, like.padding)
