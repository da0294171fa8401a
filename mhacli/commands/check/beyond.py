"""Compares an attention that is right in its first calls with the reference in those of the grid,
forward and backward: where it differs is a mistake, and what it was compared in is said.

A number of a call differs beyond a multiple of what the plain formula loses in the same dtype, and
beyond the rounding of its scores. In 16 bits, with scores that are not sharp, the norm of all
errors has a limit too, which shows a wrong scale that single numbers hide.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.core import dtype_name
from mhacli.attention.stages import (
    RIGHT,
    Inputs,
    NotPossible,
    Projections,
    require,
    run_stages,
)
from mhacli.errors import first_names
from mhacli.numbers import shown
from mhacli.usercode.build import as_float64, cast_copy
from mhacli.usercode.door import NO_ANSWER, Unreadable, UserRaised, call_user
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.masks import MARKS
from mhacli.usercode.target import Choice
from mhacli.usercode.user_attention import UserAttention

from .candidates import FROM_FIRST_KEY, DesignChoice, own_pattern
from .derivatives import derivatives, gradients_of
from .diagnose import Diagnosis
from .gradients import MOST_NAMED, OwnGradients, leaves_of
from .grid import (
    BUDGET_NARROWER,
    NARROW,
    PLAIN,
    SHORTER,
    Cell,
    Separation,
    Shape,
    cells_of,
    in_tiles,
    inputs_of,
    separation_of,
    shapes_of,
    variants_of,
    within_budget,
)
from .layer_sites import LayerSites
from .patterns import pattern_of
from .probes import TOLERANCE, ProbedAttention, counted_rows, influence_in
from .reproduce import script_of
from .result import Backward, CheckRequest, Compared, Finding, finding_of
from .steps import steps_of

GRID = "further lengths, dtypes and gradients"
"""What the grid examines, by the name under which reports list it."""
_CELL_ERRORS = 8.0
"""How many times further than the plain formula a right one may round in a number."""
_NORM_ERRORS = 5.5
"""The same for the norm of all errors in 16 bits: right log-sum-exp forms reach 4.4."""
_COARSER = {torch.float32: NARROW, torch.float16: NARROW[:1]}
"""The dtypes in which code may compute inside."""
_MOST_LETTERS = 120
"""The most letters of an exception's text in a note."""

Results = Mapping[str, Tensor]
"""What a call gives in float64 by name: `out`, and the gradients, such as `dq` or `d x`."""


class Truth(NamedTuple):
    """What a call must give, what the plain formula gives in its dtype, computed when first asked
    for, the random gradient of its output, the largest score, and which rows of the output count.
    """

    results: Results
    plain: Callable[[], Results]
    cotangent: Tensor
    largest_score: float
    counted: Tensor


class Mismatch(NamedTuple):
    """Numbers of a tensor that differ: the first of them, how many of how many, their rows, and the
    largest error beside its limit.
    """

    tensor: str
    at: tuple[int, ...]
    n_wrong: int
    n: int
    rows: tuple[int, int]
    error: float
    limit: float

    @property
    def words(self) -> str:
        """The numbers in a line."""
        error, limit = (shown(number, "error") for number in (self.error, self.limit))
        first, last = self.rows
        return (
            f"{self.tensor}{list(self.at)} and {self.n_wrong - 1:,} more of {self.n:,} numbers,"
            f" rows {first} to {last}: largest error {error}, limit {limit}"
        )


@dataclass(frozen=True)
class CellResult:
    """What a call of the grid showed: how it refused, the tensors that differ, those without a
    gradient, parameters that the reference does not have, whether the output has a gradient at
    all, and what the backward pass raised.
    """

    cell: Cell
    refusal: str = ""
    mismatches: tuple[Mismatch, ...] = ()
    missing: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    is_differentiable: bool = False
    raised: UserRaised | None = None

    @property
    def differs(self) -> bool:
        """Whether its output differs."""
        return any(each.tensor == "out" for each in self.mismatches)


@dataclass
class Beyond:
    """What the grid showed: mistakes, choices, what was compared, and notes; `over` if time ended
    it.
    """

    findings: list[Finding] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: Compared | None = None
    over: OutOfTime | None = None


# ----------------------------------------------------------------------------------- one call


class Comparison:
    """A subject and the layer that it is, in calls of any size."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        probed = diagnosis.probed
        candidate = diagnosis.candidate
        assert candidate is not None
        self.probed = probed
        self.seed = probed.request.seed
        self._subjects: dict[torch.dtype, UserAttention] = {}
        forms = (case.form for case in diagnosis.cases if case.form is not None)
        self.variants = variants_of(probed.subject, dict.fromkeys(forms))
        self.layer = candidate.layer
        seen = probed.influence
        self.length = None
        is_own = any(choice.name == "own-pattern" for choice in candidate.choices)
        if is_own and seen is not None and pattern_of(seen).is_of_length:
            self.length = len(seen)
        self.module = probed.module
        self.projections = set[str]()
        if candidate.reading is not None:
            self.projections = {*candidate.reading.parts}
            # read anew, so that gradients reach the parameters
            q, k, v = (role.projection for role in candidate.reading.qkv)
            self.layer = replace(
                candidate.design, weights=Projections(q, k, v, candidate.reading.out)
            )

    def adopt(self, design: DesignChoice, found: Beyond) -> None:
        """Compares with another design of the layer from now on, and adds its choices."""
        self.layer = replace(self.layer, **design.changes)
        found.choices += design.choices

    def parameters(self, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        """The trainable parameters of the reference, by the names of the user's module; in 16 bits
        those of projections, because the plain formula computes all others in float64.
        """
        if self.module is None or self.probed.subject.is_copied:
            return {}
        return {
            name: each
            for name, each in self.module.named_parameters()
            if each.requires_grad
            and (
                dtype not in NARROW
                or not self.projections.isdisjoint((name, name.rpartition(".")[0]))
            )
        }

    def results(
        self, shapes: Sequence[Shape], dtype: torch.dtype, *, is_narrower: bool = False
    ) -> list[CellResult]:
        """What the calls of some shapes in a dtype show. Raises `OutOfTime`."""
        cells = cells_of(shapes, dtype, self.variants, is_narrower=is_narrower)
        # where a call ends the process, all shorter ones have passed
        shown = {cell: self.result(cell) for cell in sorted(cells, key=lambda it: it.shape.k_len)}
        return [shown[cell] for cell in cells]

    def result(self, cell: Cell) -> CellResult:
        """What a call shows. Raises `OutOfTime`."""
        found = self._result(cell)
        variant = cell.variant
        if variant.scale and found.differs:  # which may divide
            other = self._result(cell._replace(variant=variant._replace(scale=1 / variant.scale)))
            return found if other.differs else other
        return found

    def _result(self, cell: Cell) -> CellResult:
        """What a call shows by its output and gradients, with the scale that it is given. What the
        code raises is a refusal; where the reference raises, it does not apply to the call.
        """
        if cell.dtype not in NARROW and cell.inner is None:
            cell = cell._replace(inner=self.probed.subject.inner)
        variant = cell.variant
        try:
            subject = replace(self.subject_in(cell.dtype), is_strided=variant.is_strided)
            inputs = inputs_of(cell, subject, self.seed).map(lambda rows: rows.requires_grad_())
            run = partial(subject, seed=0, mask=variant.form, given=dict(variant.given))
            with torch.enable_grad():
                out = run(inputs)
                if variant.is_between:
                    run(inputs_of(cell, subject, self.seed + 1))
        except NO_ANSWER as failure:
            return CellResult(cell, str(failure))
        try:
            truth = self._truth(cell, inputs)
            if out.shape != truth.results["out"].shape:
                return CellResult(cell, f"gives {list(out.shape)}")
            return self._judged(cell, subject, inputs, out, truth)
        except (NotPossible, *NO_ANSWER) as failure:
            return CellResult(cell, f"the reference does not apply: {failure}")

    def own_gradients(self, first: CellResult) -> OwnGradients:
        """What derivatives show, in the first call, of the parameters that the reference does not
        have and of training mode. Raises `OutOfTime`.
        """
        found = OwnGradients()
        subject = self.subject_in(first.cell.dtype)
        module = subject.module
        is_slow = subject.built.is_interpreted
        if module is None or is_slow or first.cell.computed != torch.float64:
            found.leave(first.unreached)
            return found
        named = {f"d {name}": each for name, each in module.named_parameters()}
        wanted = {name: named[name] for name in first.unreached if name in named}
        inputs = inputs_of(first.cell, subject, self.seed).map(lambda rows: rows.requires_grad_())
        try:
            if wanted:
                run = partial(subject, inputs, seed=0)
                measured = derivatives(run, subject.computing, wanted, self.seed)
                found.take(measured, f"at {first.cell.words}")
            steps = self.diagnosis.steps
            if not found.findings and steps is not None and not steps.differing:
                found.take_steps(steps.convention, self.seed, self.probed.request.length)
            if not found.findings:
                found.take_training(subject, inputs, self.seed)
        except NO_ANSWER as failure:
            if isinstance(failure, OutOfTime):
                raise
            found.notes.append(f"not compared: {first.cell.words}, in training mode: {failure}")
        if self.probed.subject.is_copied:
            found.notes.append("not compared: gradients of its parameters, because it keeps state")
        return found

    def behind_a_cache(self, results: Sequence[CellResult]) -> list[Finding]:
        """The mistake that a text as long as the longest call shows, whose last token is read
        behind a cache. Raises `OutOfTime`.
        """
        shapes = [each.cell.shape for each in results if not each.refusal]
        if (steps := self.diagnosis.steps) is None or steps.differing:
            return []
        longest = max(shape.q_len for shape in shapes)
        convention = steps.convention
        with suppress(*NO_ANSWER):
            further = steps_of(convention, longest, (longest - 1, longest), self.seed)
            if further.differing:
                where = f"behind a cache of {longest - 1} tokens"
                evidence = f"{where} outputs are not those of one call"
                error = further.largest
                limit = further.cases[0].tolerance
                return [
                    finding_of(
                        "differs-beyond", evidence, where=where, error=error, tolerance=limit
                    )
                ]
        return []

    def script_of(self, cell: Cell, tensor: str) -> str | None:
        """A script that prints the largest error of a tensor in a call; None without one."""
        return script_of(self.probed.subject, self.layer, cell, tensor, self.seed)

    def subject_in(self, dtype: torch.dtype) -> UserAttention:
        """A copy of the subject in a dtype. Raises `UserRaised` if it cannot be cast, and
        `Unreadable` if one of its arguments is larger than the numbers of the dtype.
        """
        if dtype not in self._subjects:
            subject = self.probed.subject
            largest = torch.finfo(dtype).max
            for name, value in subject.built.arguments.items():
                if isinstance(value, int | float) and abs(value) > largest:
                    raise Unreadable(f"{name}={value:g} does not fit")
            copy = subject.with_call(cast_copy(subject.built.call, dtype))
            self._subjects[dtype] = replace(
                copy, dtype=dtype, is_copied=subject.is_copied, has_graph=True
            )
        return self._subjects[dtype]

    @torch.enable_grad()
    def _truth(self, cell: Cell, inputs: Inputs) -> Truth:
        """What the reference gives."""
        scores = [0.0]
        layer = self.layer
        scale = cell.variant.scale
        if scale is not None:
            layer = replace(layer, scale=scale)
        if n_heads := cell.shape.n_heads:
            layer = replace(layer, n_heads=n_heads, n_kv_heads=cell.shape.n_kv_heads)

        def tap(site: str, tensor: Tensor, **_: object) -> None:
            """Keeps the sizes of the largest scores."""
            if site == "scaled":
                scores.extend(abs(end.item()) for end in tensor.detach().aminmax())

        out, keep = run_stages(RIGHT, layer.in_dtype(cell.dtype, is_rounded=True), inputs, tap)
        # what sees nothing has no right output, and may have no gradient but NaN
        require(keep is None or bool(keep.any(-1).all()))
        counted = counted_rows(inputs, out)
        generator = torch.Generator().manual_seed(self.seed + 2)
        cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        cotangent = cotangent.to(cell.dtype).double() * counted[..., None]
        wanted = leaves_of(self.probed.subject, inputs, self.parameters(cell.dtype))
        results = {"out": out.detach(), **gradients_of(out, wanted, cotangent)}

        @cache
        @torch.enable_grad()
        def plain() -> Results:
            """The same in the dtype of the call, which costs as much and is seldom needed."""
            if cell.computed == torch.float64:
                return results
            rows = inputs.map(lambda each: each.to(cell.computed))
            out, _ = run_stages(RIGHT, layer.in_dtype(cell.computed), rows)
            return {"out": as_float64(out), **gradients_of(out, wanted, cotangent)}

        return Truth(results, plain, cotangent, max(scores), counted)

    def _judged(
        self, cell: Cell, subject: UserAttention, inputs: Inputs, out: Tensor, truth: Truth
    ) -> CellResult:
        """What the output and the gradients of a call show. Gradients are compared only where the
        output is right, because those of a wrong one are wrong too.
        """
        limits = _Limits(cell, truth)
        module = subject.module
        ours = torch.where(truth.counted[..., None], as_float64(out), truth.results["out"])
        wrong = limits.mismatch("out", ours)
        if wrong is not None or not out.requires_grad or self.probed.request.no_backward:
            return CellResult(cell, mismatches=() if wrong is None else (wrong,))
        own = {} if module is None else dict(module.named_parameters())
        wanted = leaves_of(
            self.probed.subject, inputs, {name: own[name] for name in self.parameters(cell.dtype)}
        )
        built = subject.built
        built.stage(f"calling the backward pass of {built.name}")
        try:
            with warnings.catch_warnings(action="ignore"), subject.computing():
                gradients = call_user(gradients_of, out, wanted, truth.cotangent)
        except UserRaised as raised:
            if cell.variant.is_between:  # torch says that numbers were overwritten
                return CellResult(cell, str(raised))
            return CellResult(cell, is_differentiable=True, raised=raised)
        finally:
            built.stage(f"examining {built.name}", limited=False)
        absent = [name for name in wanted if name not in gradients or not gradients[name].any()]
        # a key bias has none but rounding, and the softmax of sharp scores may leave none
        missing = [name for name in absent if limits.moves(name)]
        given = [name for name in wanted if name in gradients and name not in missing]
        found = [limits.mismatch(name, gradients[name]) for name in given]
        return CellResult(
            cell,
            mismatches=tuple(filter(None, found)),
            missing=tuple(missing),
            unreached=tuple(name for name in wanted if name not in truth.results),
            is_differentiable=True,
        )


class _Limits:
    """How far the numbers of a call may be from the truth. The plain formula is asked only about
    what is further than rounding.
    """

    def __init__(self, cell: Cell, truth: Truth) -> None:
        self.truth = truth
        self.dtype = cell.computed
        self.eps = torch.finfo(self.dtype).eps
        is_mild = not cell.variant.is_sharp and cell.shape.k_len > 1
        self.has_norm_limit = cell.computed in NARROW and is_mild
        # models compute rotations and norms in float32 in any dtype
        step = TOLERANCE if cell.computed == torch.float64 else 2 * self.eps
        self.rounding = step * (1 + truth.largest_score)
        self.sizes = {name: each.abs().max().item() for name, each in truth.results.items()}
        gradients = [size for name, size in self.sizes.items() if name != "out"]
        self.largest_gradient = max(gradients, default=0.0)

    def mismatch(self, name: str, ours: Tensor) -> Mismatch | None:
        """Where a tensor differs; None where it does not, or has no reference."""
        if name not in self.truth.results:
            return None
        true = self.truth.results[name]
        errors = torch.where(ours.isfinite(), (ours - true).abs(), torch.inf)
        error = errors.max().item()
        norm = 0.0
        # a gradient of 0 has no norm of its own
        if self.has_norm_limit and self.sizes[name] > TOLERANCE * self.largest_gradient:
            norm = errors.norm().item() - self.eps * true.norm().item()
        # the plain formula loses no less than rounding its result does
        least = _NORM_ERRORS * (true.to(self.dtype).double() - true).norm().item()
        if error <= self._rounding_of(name) and norm <= least:
            return None
        limit = self.limit(name)
        if error <= limit and norm <= _NORM_ERRORS * self._lost(name).norm().item():
            return None
        limit = min(limit, error / 2)  # where only the norm is too large, half of the largest
        at = (errors > limit).nonzero()
        rows = at[:, -2:][:, 0]  # of a vector its one axis
        extent = (int(rows.min()), int(rows.max()))
        return Mismatch(name, tuple(at[0].tolist()), len(at), errors.numel(), extent, error, limit)

    def moves(self, name: str) -> bool:
        """Whether the plain formula gives a tensor numbers beyond the limit."""
        plain = self.truth.plain()
        return name in plain and plain[name].abs().max().item() > self.limit(name)

    def limit(self, name: str) -> float:
        """How far a number of a tensor may be from the truth."""
        return _CELL_ERRORS * self._lost(name).max().item() + self._rounding_of(name)

    def _rounding_of(self, name: str) -> float:
        """How far a number may be off by the rounding of scores alone."""
        if name == "out":
            return self.rounding * self.sizes[name]
        # the gradient of one key is 0, and what rounds to it is not
        return self.rounding * max(self.sizes[name], self.largest_gradient)

    def _lost(self, name: str) -> Tensor:
        """What the plain formula loses."""
        lost = (self.truth.plain()[name] - self.truth.results[name]).abs()
        return lost.nan_to_num(nan=torch.inf)


# ------------------------------------------------------------------------------------- all calls


def compare_beyond(diagnosis: Diagnosis) -> Beyond:
    """What the grid shows of an attention that is right in its first calls."""
    found = Beyond()
    request = diagnosis.request
    subject = diagnosis.subject
    if subject.ids is not None:
        return found
    if subject.inner is not None:
        found.notes.append(f"inside it rounds as coarsely as {dtype_name(subject.inner)}")
    comparison = Comparison(diagnosis)
    results = list[CellResult]()
    try:
        _run(comparison, request.length, results, found)
        found.findings += _findings(comparison, results)
        # the first is the longest
        plain = (each for each in results if each.is_differentiable and each.raised is None)
        if (first := next(plain, None)) is not None and not found.findings:
            own = comparison.own_gradients(first)
            found.findings += own.findings or comparison.behind_a_cache(results)
            found.notes += own.notes
    except OutOfTime as over:
        found.over = over
        found.findings = found.findings or [*_findings(comparison, results)]
    line = LayerSites(diagnosis.call).line_for((), "", subject.built)
    found.findings = [replace(finding, **line._asdict()) for finding in found.findings]
    found.compared = _compared(results, diagnosis.probed)
    refused = {
        (each.cell.dtype, each.refusal): each.cell
        for each in reversed(results)
        if each.refusal and not each.cell.shape.is_unusual and not each.cell.variant.is_strided
    }
    found.notes += [
        f"not compared: {cell.words}: {refusal[:_MOST_LETTERS]}"
        for (_, refusal), cell in refused.items()
    ]
    return found


def _run(
    comparison: Comparison, longest: int | None, results: list[CellResult], found: Beyond
) -> None:
    """Adds to `results` what the calls show in the subject's dtype, then, if all agree, in the
    narrower ones: they are given, so that they are known also where time ends this. A rule that the
    first calls were too short to show is adopted with its choices, and replaces what they showed.
    Where the longest call is refused, shorter ones and whole tiles follow.
    """
    subject = comparison.probed.subject
    run = comparison.results
    shapes = shapes_of(subject, comparison.layer, longest)
    if length := comparison.length:
        shapes = [shape._replace(q_len=length, k_len=length) for shape in shapes[:1]]
    results += run(shapes, subject.dtype)
    if (rule := _rule_shown(comparison, results)) is not None:
        comparison.adopt(rule, found)
        shapes = shapes_of(subject, comparison.layer, longest)
        results[:] = run(shapes, subject.dtype)
    refused = {each.cell.shape for each in results if each.refusal}
    tiled = dict.fromkeys(in_tiles(shape) for shape in shapes if shape in refused)
    if refused.issuperset(shapes[:1]):
        results += _in_shorter(comparison, shapes[0], tiled)
        if (rule := _rule_shown(comparison, results)) is not None:
            comparison.adopt(rule, found)
            results[:] = run([*dict.fromkeys(each.cell.shape for each in results)], subject.dtype)
    agreeing = dict.fromkeys(each.cell.shape for each in results if not each.refusal)
    shapes = within_budget(agreeing, comparison.layer, BUDGET_NARROWER)
    for dtype in subject.built.kernel_dtypes:
        if dtype != subject.dtype and not any(map(_is_wrong, results)):
            results += _in_narrower(comparison, shapes, dtype, found)


def _in_shorter(
    comparison: Comparison, first: Shape, tiled: Iterable[Shape]
) -> Iterator[CellResult]:
    """What calls show that are shorter than the first, up to one that works, where the positions of
    the code end; else calls in whole tiles.
    """
    dtype = comparison.probed.subject.dtype
    for n in SHORTER:
        if n < first.k_len:
            shorter = comparison.results([first._replace(q_len=n, k_len=n)], dtype)
            yield from shorter
            if not shorter[-1].refusal:
                return
    for shape in tiled:
        yield from comparison.results([shape], dtype)


def _is_wrong(result: CellResult) -> bool:
    return bool(result.mismatches or result.missing)


def _in_narrower(
    comparison: Comparison, shapes: Sequence[Shape], dtype: torch.dtype, found: Beyond
) -> list[CellResult]:
    """What calls show in a dtype, or, where they differ and none does in a coarser one, in that."""
    own = comparison.results(shapes, dtype, is_narrower=True)
    if not any(map(_is_wrong, own)):
        return own
    for inner in _COARSER.get(dtype, ()):
        inside = [comparison.result(each.cell._replace(inner=inner)) for each in own]
        if not any(map(_is_wrong, inside)):
            found.notes.append(f"in {dtype_name(dtype)} it computes in {dtype_name(inner)}")
            return inside
    return own


def _rule_shown(comparison: Comparison, results: Sequence[CellResult]) -> DesignChoice | None:
    """The design by which outputs differ alone, because tokens see a window or their chunk, or a
    causal mask starts at the first key, which the first calls are too short to show; None for none.
    """
    plain = [each for each in results if each.cell.variant == PLAIN]
    shapes = [each.cell.shape for each in plain if each.differs]
    layer = comparison.layer
    is_from_last = layer.causal and not layer.top_left and comparison.probed.subject.is_function
    if shapes and is_from_last and all(shape.q_len < shape.k_len for shape in shapes):
        # the first calls may have equal lengths
        return DesignChoice({"top_left": True}, (FROM_FIRST_KEY,))
    square = [shape.q_len for shape in shapes if shape.q_len == shape.k_len]
    seen = influence_in(comparison.probed, min(square)) if square else None
    if seen is None or (pattern := pattern_of(seen)).is_of_length:
        return None
    return own_pattern(pattern)


def _findings(comparison: Comparison, results: Sequence[CellResult]) -> Iterator[Finding]:
    """The mistakes that calls show, the output's first."""
    ran = [each for each in results if not each.refusal]
    wide = [each for each in ran if each.cell.dtype not in NARROW]
    if differing := [each for each in wide if each.differs]:
        yield _finding("differs-beyond", comparison, differing, wide)
        return
    yield from _gradient_findings(comparison, wide)
    narrow = [each for each in ran if each.cell.dtype in NARROW]
    if differing := [each for each in narrow if each.mismatches]:
        yield _finding("differs-in-16-bits", comparison, differing, narrow)


def _gradient_findings(comparison: Comparison, ran: Sequence[CellResult]) -> Iterator[Finding]:
    """The mistakes of the backward pass."""
    # one key has a weight of 1 and no gradient, whatever is wrong
    differentiable = [each for each in ran if each.is_differentiable and each.cell.shape.k_len > 1]
    is_asked = comparison.probed.request.backward
    if is_asked and ran and not any(each.is_differentiable for each in ran):
        yield finding_of("gradient-cut", "the output requires no gradient, although its inputs do")
    if cut := _cut(differentiable):
        names = first_names(cut, MOST_NAMED)
        evidence = f"no gradient reaches {names}, which the output depends on"
        script = comparison.script_of(differentiable[0].cell, cut[0])
        yield finding_of("gradient-cut", evidence, reproduce=script)
    raised = [each for each in differentiable if each.raised is not None]
    if raised and not (len(raised) == len(differentiable) and _lacks_backward(raised[0].raised)):
        where = f"first at {raised[0].cell.words}"
        evidence = f"the backward pass raises {raised[0].raised}, {where}"
        yield finding_of("gradient-differs", evidence, where=where)
    if differing := [each for each in differentiable if each.mismatches]:
        yield _finding("gradient-differs", comparison, differing, differentiable)


def _lacks_backward(raised: UserRaised | None) -> bool:
    """Whether an exception says that code has no backward pass, or comes from torch and from no
    line of the user's, as where numbers that it needs are overwritten.
    """
    fault = None if raised is None else raised.fault
    is_of_torch = raised is not None and raised.line() is None
    return isinstance(fault, NotImplementedError) or (is_of_torch and type(fault) is RuntimeError)


def _cut(differentiable: Sequence[CellResult]) -> list[str]:
    """The gradients that no call has: one that some have is wrong where it is 0."""
    plain = [each for each in differentiable if each.cell.variant == PLAIN]
    missing = dict.fromkeys(name for each in plain for name in each.missing)
    return [name for name in missing if all(name in each.missing for each in plain)]


def _finding(
    code: str,
    comparison: Comparison,
    differing: Sequence[CellResult],
    ran: Sequence[CellResult],
) -> Finding:
    """A finding for calls that differ among those that ran."""
    first = differing[0]
    worst = differing[0].mismatches[0]
    # one key has a weight of 1 and no gradient, whatever is wrong
    passing = [each.cell for each in ran if not each.mismatches and each.cell.shape.k_len > 1]
    apart = separation_of([each.cell for each in differing], passing)
    if first.cell.dtype in NARROW:
        apart = Separation(f"in {dtype_name(first.cell.dtype)}, {apart.words}", apart.beyond)
    tensors = dict.fromkeys(each.tensor for result in differing for each in result.mismatches)
    names = first_names(tensors, MOST_NAMED)
    verb = "differs" if len(tensors) == 1 else "differ"
    return finding_of(
        code,
        f"{names} {verb} {apart.words}; at {first.cell.words} {worst.words}",
        beyond=apart.beyond,
        where=apart.words,
        error=worst.error,
        tolerance=worst.limit,
        reproduce=comparison.script_of(first.cell, worst.tensor),
    )


def _compared(results: Sequence[CellResult], probed: ProbedAttention) -> Compared:
    """What the calls that ran compared."""
    ran = [each for each in results if not each.refusal and not each.mismatches]
    shapes = dict.fromkeys(each.cell.shape for each in ran)
    longest = max((shape.k_len for shape in shapes), default=0)
    # a dtype counts as compared where the longest call ran in it
    dtypes = {dtype_name(each.cell.dtype): 0 for each in ran if each.cell.shape.k_len == longest}
    return Compared(
        lengths=tuple(sorted({max(shape.q_len, shape.k_len) for shape in shapes})),
        shapes=tuple(shape.words for shape in shapes),
        dtypes=tuple(dtypes),
        attention=bool(ran),
        backward=_backward(ran, probed.request),
        arguments=_passed(ran, probed.subject),
        interpreted=probed.subject.built.is_interpreted,
    )


def _backward(ran: Sequence[CellResult], request: CheckRequest) -> Backward:
    """Whether gradients were compared, and why not."""
    raised = {str(each.raised) for each in ran if each.raised is not None}
    reason = None
    if request.no_backward:
        reason = "not asked for"
    elif raised:
        reason = f"the backward pass raises {min(raised)}"
    elif not any(each.is_differentiable for each in ran):
        reason = "it gives none"
    return Backward(compared=reason is None, reason=reason)


def _passed(ran: Sequence[CellResult], subject: UserAttention) -> tuple[str, ...]:
    """The arguments that some calls were given besides, as code, with what a mask holds that is no
    mark of what may be seen.
    """
    given = list[str]()
    for variant in (each.cell.variant for each in ran):
        form = variant.form
        if form is not None and (form.kind not in MARKS or form.true_means == "hide"):
            given.append(f"{variant.words} ({form.as_passed})")
        elif form is not None or variant.given:
            given.append(variant.words)
    if subject.is_turned:
        switches = [each.name for each in subject.parameters("causal")]
        given += [f"{name}={subject.others[name]}" for name in switches if name in subject.others]
    return tuple(dict.fromkeys(given))
