"""Hypotheses of what a user's attention is, and what shows them: numbers, lines, and the smallest input."""

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

from mhacli.adapters.usercode.call.user_attention import UserAttention, drawer_of
from mhacli.adapters.usercode.names import is_within
from mhacli.adapters.usercode.operations import watch
from mhacli.adapters.usercode.process import SourceLine
from mhacli.adapters.usercode.projections import read_name
from mhacli.adapters.usercode.types import Built, Inputs, Operation
from mhacli.attention.mistakes import Mistake, MistakeVariant
from mhacli.attention.mistakes.masks import MASKING
from mhacli.attention.mistakes.scores import assigned_names
from mhacli.attention.mistakes.stages import RIGHT, ReferenceLayer, Stages, run
from mhacli.compute.check.inputs import HIDDEN, InputCase, InputKind, ask, make_case, max_error
from mhacli.results.check import FirstDifference


class AppliedMistake(NamedTuple):
    """A mistake in one of its variants."""

    mistake: Mistake
    variant: MistakeVariant

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that it spoils."""
        return self.variant.sites or (self.mistake.site,)


@dataclass(frozen=True)
class Hypothesis:
    """A layer with no mistake or some; `error` is the largest difference from what was answered, relative to the tolerance
    of each case: 1 or less is a match."""

    layer: ReferenceLayer
    made: tuple[AppliedMistake, ...] = ()
    error: float = math.inf

    @property
    def stages(self) -> Stages:
        """The reference with the mistakes in it."""
        return stages_with(self.made)

    @property
    def matches(self) -> bool:
        """Whether the difference is rounding."""
        return self.error <= 1.0


def stages_with(made: Iterable[AppliedMistake]) -> Stages:
    """The right stages, with those of the mistakes in their place."""
    places: dict[str, Any] = {}
    for one in made:
        places |= {str(one.mistake.stage): one.variant.replacement, **one.variant.besides}
    return replace(RIGHT, **places)


def may_be_nan(made: Iterable[AppliedMistake]) -> bool:
    """Whether one of the mistakes may leave nothing but NaN."""
    return any(one.mistake.may_be_nan for one in made)


def difference(layer: ReferenceLayer, stages: Stages, case: InputCase, *, may_be_nan: bool = False) -> float:
    """The largest difference from what was answered; infinite where shapes or NaN differ, the mistake cannot be made, or
    nothing but NaN is left, unless it `may_be_nan`.

    Rows that are not counted, and queries that may attend to nothing, are left out: there is no right answer to them.
    """
    try:
        with torch.no_grad():
            out, keep = run(stages, layer, case.rows)
        if out.shape != case.answer.shape:
            return math.inf
        counted = _counted(case, keep, out)
    except Exception:  # a mistake that cannot be made here, or a norm of theirs that wants something else
        return math.inf
    compared = out[counted]
    is_nan = bool(compared.isnan().all())
    return (
        math.inf if not compared.numel() or (is_nan and not may_be_nan) else max_error(compared, case.answer[counted])
    )


def _counted(case: InputCase, keep: Tensor | None, out: Tensor) -> Tensor:
    """Which rows of the output are compared, `[batch, query]`, or with the heads of a function."""
    counted = torch.ones(out.shape[:-1], dtype=torch.bool)
    if case.counted is not None:
        counted &= case.counted if out.ndim == 3 else case.counted[:, None]
    if keep is not None:
        some = keep.any(dim=-1)  # [batch, head, query]
        counted &= some.all(dim=1) if out.ndim == 3 else some
    return counted


def tried(
    layer: ReferenceLayer, made: tuple[AppliedMistake, ...], cases: Sequence[InputCase], enough: float = math.inf
) -> Hypothesis:
    """A hypothesis with its error over all cases; given up when a case is further off than `enough`."""
    stages, worst = stages_with(made), 0.0
    for case in cases:
        worst = max(worst, difference(layer, stages, case, may_be_nan=may_be_nan(made)) / case.tolerance)
        if worst > enough:
            break
    return Hypothesis(layer, made, worst)


def variants_of(mistakes: Iterable[Mistake]) -> list[AppliedMistake]:
    """Every mistake in every variant that changes a stage."""
    return [AppliedMistake(mistake, variant) for mistake in mistakes if mistake.stage for variant in mistake.variants]


def singles(
    layer: ReferenceLayer,
    pool: Sequence[AppliedMistake],
    cases: Sequence[InputCase],
    base: tuple[AppliedMistake, ...],
) -> Iterator[Hypothesis]:
    """The layer with the mistakes of `base` and one more."""
    taken = {made.mistake.stage for made in base}
    return (tried(layer, (*base, made), cases, enough=1.0) for made in pool if made.mistake.stage not in taken)


def pairs(
    layer: ReferenceLayer,
    pool: Sequence[AppliedMistake],
    cases: Sequence[InputCase],
    base: tuple[AppliedMistake, ...],
) -> Iterator[Hypothesis]:
    """The layer with the mistakes of `base` and two more, at two stages."""
    taken = {made.mistake.stage for made in base}
    free = [made for made in pool if made.mistake.stage not in taken and not made.variant.is_rare]
    for first, second in combinations(free, 2):
        if first.mistake.stage != second.mistake.stage:
            yield tried(layer, (*base, first, second), cases, enough=1.0)


# --------------------------------------------------------------------------------------------------- lines of the source


_SHOWN_AS = {"scaled": "scores"}
"""The scaled products without a mask are a step on the way to the scores, as every report calls them."""
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
    """Operations of one run of a user's attention, and what the reference makes at each site on the same input."""

    operations: tuple[Operation, ...]
    sites: Mapping[str, Tensor]

    def line_of(self, site: str) -> SourceLine:
        """The line that makes what the reference makes at a site, or at the first later one that the author makes too."""
        for later in SITES[SITES.index(site) :] if site in SITES else ():
            operation = self._maker(later)
            if operation is not None:
                return operation.at
        return SourceLine()

    def names_in(self, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
        """Sites, and the variable of a function that holds what the reference makes there."""
        for site in ("q", "k", "v", "scores", "pattern", "z"):
            maker = self._maker(site)
            if maker is None or not is_within(maker.at, function):
                continue
            names = assigned_names(maker.source)
            named_so = names if len(names) == 1 else [name for name in names if read_name(name)[0] == site]
            last = next(op for op in reversed(self.operations) if op.at == maker.at)
            if len(named_so) == 1 and (site in "qkv" or _same_numbers(last.output, self.sites[site])):
                yield site, named_so[0]

    def line_by(self, names: Sequence[str]) -> SourceLine:
        """The line of the first operation of one of these names, the likeliest first."""
        placed = [op for op in self.operations if op.line is not None]
        found = next((op for name in names for op in placed if op.name == name), None)
        return SourceLine() if found is None else found.at

    def lines_for(self, mistake: Mistake, sites: Sequence[str], built: Built) -> list[SourceLine]:
        """The lines of a mistake, at least one: of the operation that makes it, as its source looks, or of what it makes."""
        by_name = self.line_by(mistake.operations)
        if by_name.line is not None:
            return [by_name]
        in_source = line_in_source(built, mistake)
        if in_source.line is not None or not sites:
            return [in_source]
        return list(dict.fromkeys(self.line_of(site) for site in sites))

    def numbers_below(self, bound: float) -> list[float]:
        """Finite numbers below a bound that operations were given, each once, such as what is put in a mask's place."""
        masking = [op for op in self.operations if op.name.rstrip("_") in MASKING]
        given = [value for op in masking for value in op.arguments.values() if isinstance(value, int | float)]
        given += [t.item() for op in masking for t in op.inputs if t.numel() == 1 and t.is_floating_point()]
        return list(dict.fromkeys(float(value) for value in given if -1e7 < value < bound))

    def _maker(self, site: str) -> Operation | None:
        wanted = self.sites.get(site)
        if wanted is None:
            return None
        making = [op for op in self.operations if op.line is not None and _same_numbers(op.output, wanted)]
        preferred = [op for op in making if op.name in _PREFERRED.get(site, ())]
        if site in _PREFERRED and not preferred:
            preferred = [op for op in making if op.name in _SHAPING]
        if site in ("q_proj", "k_proj", "v_proj"):  # of two that are made alike, the one that is named so
            preferred = [op for op in making if site[0] in (read_name(name)[0] for name in assigned_names(op.source))]
        return next(iter(preferred or making), None)

    def first_not_made(self) -> str | None:
        """The first site whose numbers the author never makes; None where all are made."""
        return next((site for site in SITES if site in self.sites and not self._is_made(site)), None)

    def departure(self) -> FirstDifference:
        """The first site whose numbers the author never makes, and the last shared before it, as reports call them."""
        missing = self.first_not_made()
        before = [site for site in SITES[: SITES.index(missing) if missing else None] if site in self.sites]
        shared = next((site for site in reversed(before) if site not in _SHOWN_AS), None)
        line = SourceLine() if missing is None or not before else self._after(before[-1])
        return FirstDifference("out" if missing is None else _SHOWN_AS.get(missing, missing), shared, *line)

    def _is_made(self, site: str) -> bool:
        return any(_same_numbers(op.output, self.sites[site]) for op in self.operations)

    def _after(self, site: str) -> SourceLine:
        """The line of the first operation behind the one that makes a site."""
        maker = self._maker(site)
        behind = [] if maker is None else list(self.operations[self.operations.index(maker) + 1 :])
        found = next((op for op in behind if op.line is not None and op.name not in _SHAPING), maker)
        return SourceLine() if found is None else found.at


def _same_numbers(made: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors hold the same numbers in any order and layout, or one the numbers of the other's first head."""
    if not made.is_floating_point():
        return False
    mine = made.detach().to("cpu", torch.float64).flatten()
    for theirs in (wanted, wanted[:, 0] if wanted.ndim == 4 else wanted):
        if theirs.numel() == mine.numel():
            a, b = (_lowest_as_infinite(t) for t in (mine.sort().values, theirs.flatten().sort().values))
            if torch.equal(a.isfinite(), b.isfinite()):
                a, b = a[a.isfinite()], b[b.isfinite()]
                return bool(not a.numel() or (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1e-30))
    return False


def _lowest_as_infinite(numbers: Tensor) -> Tensor:
    """With −10⁹ and the like as −∞."""
    return numbers.masked_fill(numbers < HIDDEN, -math.inf)


def observe(subject: UserAttention, layer: ReferenceLayer, stages: Stages, case: InputCase) -> SourceLocator:
    """One run of a case's input, watched, beside the reference's own."""
    _, operations = watch(lambda: ask(subject, case.inputs, case.form, case.padding), subject.built.files)
    sites: dict[str, Tensor] = {}

    def keep(site: str, tensor: Tensor, **where: Any) -> None:
        sites[site] = tensor

    run(stages, layer, case.rows, tap=keep)
    return SourceLocator(operations, sites)


def line_in_source(built: Built, mistake: Mistake) -> SourceLine:
    """The line of its source that looks like a mistake, in what is called first; nothing where none does."""
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
    return SourceLine()


class Smallest(NamedTuple):
    """The smallest input on which the reference and the module differ."""

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
    """The smallest input, of the kind of a case, whose output is not that of the layer with these stages; None where none of a
    few small ones is. What raises on an input does not count."""
    is_other = like.rows.queries.shape[-2] != like.rows.keys.shape[-2]
    for batch, q_len, k_len in _SMALL:
        if q_len != k_len and not is_other:
            continue
        try:
            case = _small(like.kind, subject, like, seed, (batch, q_len, k_len), other=like.inputs.keys is not None)
            if layer.bias is not None:
                layer.bias(case.rows)  # which raises where it cannot be read at this size
            gap = difference(layer, stages, case)
        except Exception:  # an input too small for the module
            continue
        if gap > case.tolerance:
            finite = case.answer[case.answer.isfinite()].abs()
            largest = finite.max().item() if finite.numel() else math.nan
            return Smallest(batch, q_len, k_len, gap, largest, bool(case.answer.isnan().any()))
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
