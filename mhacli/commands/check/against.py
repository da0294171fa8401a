"""Compares two implementations of attention with the same weights and inputs, and finds the first
difference.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mhacli.attention.core import dtype_name
from mhacli.attention.stages import Inputs
from mhacli.attention.taps import largest_difference
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.usercode.build import (
    arguments_of,
    as_float64,
    cast,
    cast_copy,
    is_factory,
    load_built,
    parameters_of,
)
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.find_call import find_modes
from mhacli.usercode.graph import NO_NUMBER, recorded, sorted_numbers
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.masks import MaskForm
from mhacli.usercode.process import Stage
from mhacli.usercode.roles import role_of
from mhacli.usercode.target import Choice, TargetRequest, find_target
from mhacli.usercode.user_attention import UserAttention

from .candidates import readings_of
from .probes import (
    TOLERANCE,
    InputCase,
    arguments_without_effect,
    counted_rows,
    make_case,
    randomised,
    unmasked_inputs,
    unparametrized,
)
from .result import (
    CheckRequest,
    Examination,
    FirstDifference,
    OutputComparison,
    Verdict,
    finding_of,
)

_ARGUMENT_OPTION = re.compile(r"--(?=(call-)?arg\b)")
_SIZES = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_v")
"""Sizes that the second implementation gets too if the first has them by default, because inputs
must fit both."""
_MOST_READINGS = 5
"""The most ways to read the weights of one module."""
Pair = tuple[UserAttention, UserAttention]


class Gap(NamedTuple):
    """A case of the first implementation, the form of the mask of the second one, and the
    difference of their outputs.
    """

    case: InputCase
    form: MaskForm | None
    difference: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within rounding."""
        return self.difference <= self.case.tolerance


class Comparison(NamedTuple):
    """The gaps of two implementations whose weights were copied in one way; where time was `over`,
    `untried` are the inputs, or the other ways, that were left.
    """

    pair: Pair
    weights: Choice
    gaps: list[Gap]
    untried: tuple[str, ...] = ()
    over: OutOfTime | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether they are the same: of several ways to copy weights, another one may be right."""
        is_only_way = self.weights.message in (_BY_NAME, _NO_WEIGHTS)
        if any(not gap.ok for gap in self.gaps) and (self.over is None or is_only_way):
            return "wrong"
        return "unknown" if self.reason else "right"

    @property
    def reason(self) -> str | None:
        """Why the inputs do not show that they are the same."""
        if self.over is not None:
            return f"{self.over} while they were compared"
        if not any(gap.case.output.isfinite().any() for gap in self.gaps):
            return "neither gives a finite number"
        return None


def compare(request: CheckRequest, stage: Stage) -> Examination:
    """Compares two implementations. Raises `MhaError` if one cannot be built or called, or if no
    input fits both.
    """
    assert request.against is not None
    target = request.target_request.target
    other = request.against.target
    try:
        first = find_modes(load_built(request.target_request, stage), request.target_request)[-1]
        second = _other(request.against, first, stage)
        stage(f"comparing {target} with {other}", limited=False)
    except OutOfTime as over:
        return Examination(
            verdict="unknown",
            target=target,
            called="",
            reason=f"{over} before the two were compared",
            against=other,
            not_examined=(f"comparison with {other}",),
        )
    compared = _compared(_with_same_weights((first, second), request), request.seed)
    built = [argument for argument in arguments_of(second.built) if argument.origin != "default"]
    given = ", ".join(f"{argument.name}={argument.value}" for argument in built)
    choices = (
        Choice("built", f"the other is {second.built.name}({given})"),
        Choice("called", f"the other is called {second.described}"),
    )
    notes = [
        f"{name}: {note}"
        for name, subject in ((target, first), (other, second))
        for note in arguments_without_effect(subject)
    ]
    defaults = [
        name for subject in compared.pair for name in subject.untried if name not in subject.unread
    ]
    report = Examination(
        verdict=compared.verdict,
        target=target,
        called=first.described,
        arguments=arguments_of(first.built),
        choices=(compared.weights, *choices),
        comparison=_outputs(compared, other, dtype_name(first.dtype)),
        against=other,
        reason=compared.reason,
        not_examined=tuple(dict.fromkeys([*defaults, *compared.untried])),
        notes=tuple(notes),
    )
    return _with_finding(report, compared, request.seed) if report.verdict == "wrong" else report


def _outputs(compared: Comparison, other: str, dtype: str) -> OutputComparison | None:
    """The worst gap; None without any."""
    if not compared.gaps:
        return None
    worst = max(compared.gaps, key=lambda gap: gap.difference / gap.case.tolerance)
    n = len(compared.gaps)
    largest = finite(worst.difference)
    return OutputComparison(other, dtype, n, largest, worst.case.tolerance)


def _with_finding(report: Examination, compared: Comparison, seed: int) -> Examination:
    """The report on two that differ, with the first site that does."""
    failing = [gap for gap in compared.gaps if not gap.ok]
    departure = _departure(failing[0], compared.pair, seed)
    fix = f"compare mha trace {report.target} with mha trace {report.against}, step by step"
    if departure is not None:
        fix = f"compare the two lines that compute {departure.site}"
    evidence = [f"{gap.case.name}: largest difference {gap.difference:.2e}" for gap in failing]
    evidence += [f"{gap.case.name}: the same" for gap in compared.gaps if gap.ok]
    finding = finding_of("differs", "\n".join(evidence), fix=fix)
    return replace(report, findings=(finding,), departure=departure)


def _compared(pairs: Iterable[tuple[Pair, Choice]], seed: int) -> Comparison:
    """The differences of the first pair without any, else of the first pair. Raises `MhaError` if
    there is none.
    """
    first = None
    for pair, weights in pairs:
        inputs = _shared_inputs(*pair, seed)
        gaps = list[Gap]()
        try:
            for each in inputs:
                gaps += each.gaps(pair)
        except OutOfTime as over:
            if first is not None:
                return first._replace(over=over, untried=("other ways to copy the weights",))
            tried = [gap.case.name for gap in gaps]
            untried = tuple(each.name for each in inputs if each.name not in tried)
            return Comparison(pair, weights, gaps, untried, over)
        compared = Comparison(pair, weights, gaps)
        if all(gap.ok for gap in gaps):
            return compared
        first = first or compared
    if first is None:
        raise MhaError(
            "cannot give both the same weights: the names or shapes of their projections do not"
            " correspond",
            hint=(
                "projections are recognised by names such as q_proj, wk, qkv, out_proj;"
                " --against-arg NAME=VALUE sets a size"
            ),
            code="cannot-compare",
        )
    return first


def _other(request: TargetRequest, first: UserAttention, stage: Stage) -> UserAttention:
    """The second implementation, ready to be called, with the given and guessed arguments and all
    sizes of the first under its names, such as `num_heads` for `n_heads`. Arguments without such a
    name are dropped, and its own have priority. Raises `MhaError` that names the `--against-`
    options.
    """
    stage(f"importing {request.target}")
    try:
        thing = find_target(request.target)
        is_built = inspect.isclass(thing) or is_factory(thing, dict(request.arguments))
        names = list(parameters_of(thing)) if is_built else []
        by_role = {role_of(name): name for name in reversed(names) if role_of(name) is not None}
        arguments: dict[str, str] = {}
        for argument in arguments_of(first.built):
            role = role_of(argument.name)
            name = argument.name if argument.name.partition(".")[0] in names else by_role.get(role)
            is_size = role in _SIZES and argument.value.isdigit()
            if name is not None and (is_size or argument.origin != "default"):
                arguments[name] = argument.value
        request = replace(request, arguments=tuple((arguments | dict(request.arguments)).items()))
        return find_modes(load_built(request, stage), request)[-1]
    except MhaError as fault:
        fault.typed_message = _ARGUMENT_OPTION.sub("--against-", fault.typed_message)
        fault.typed_hint = fault.typed_hint and _ARGUMENT_OPTION.sub("--against-", fault.typed_hint)
        raise


# -------------------------------------------------------------------------------------- the weights


Cells = Mapping[str, Tensor]
"""The numbers of the parameter cells that hold each projection, or each parameter, 0 where there is
none."""
_BY_NAME = "weights are copied by their names"
_NO_WEIGHTS = "there are no weights to copy"


def _with_same_weights(both: Pair, request: CheckRequest) -> Iterator[tuple[Pair, Choice]]:
    """Both with the same random weights: by name, else in every possible correspondence of
    projections. What one of them has no cell for, such as a bias, becomes zero in both, and what it
    has one cell for becomes equal in both.
    """
    first, second = (subject.module for subject in both)
    if first is None or second is None or not list(second.parameters()):
        yield both, Choice("weights", _NO_WEIGHTS)
        return
    modules = randomised(first, request.seed), unparametrized(second)
    readings = (
        _cells(module, subject, request) for module, subject in zip(modules, both, strict=True)
    )
    for (_, cells), (words, other_cells) in product(*readings):
        if _shapes(cells) != _shapes(other_cells):
            continue
        copies = [cast_copy(module, torch.float64, "cpu") for module in modules]
        ours, theirs = (
            F.pad(parameters_to_vector(copy.parameters()).detach(), (1, 0)) for copy in copies
        )
        for name, places in cells.items():
            theirs[other_cells[name]] = ours[places]
            theirs[0] = 0
            ours[places] = theirs[other_cells[name]]
            ours[0] = 0
        if all(
            torch.equal(ours[places], theirs[other_cells[name]]) for name, places in cells.items()
        ):
            pair = list[UserAttention]()
            for subject, copy, numbers in zip(both, copies, (ours, theirs), strict=True):
                vector_to_parameters(numbers[1:], copy.parameters())
                pair.append(subject.with_call(cast(copy, subject.dtype, subject.device)))
            yield (pair[0], pair[1]), Choice("weights", words)
            if words == _BY_NAME:
                return


def _shapes(cells: Cells) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in cells.items()}


def _cells(
    module: nn.Module, subject: UserAttention, request: CheckRequest
) -> Iterator[tuple[str, Cells]]:
    """The cells by name of the parameters, then in each reading of the projections, with the words
    for such a copy. They are read from a copy in which each cell holds its number.
    """
    numbered = cast_copy(module, torch.float64, "cpu")
    count = sum(parameter.numel() for parameter in numbered.parameters())
    vector_to_parameters(torch.arange(1, count + 1, dtype=torch.float64), numbered.parameters())
    yield (
        _BY_NAME,
        {name: parameter.detach().long() for name, parameter in numbered.named_parameters()},
    )
    for reading in islice(readings_of(subject, numbered, {}, request.n_heads), _MOST_READINGS):
        cells = {}
        for name, projection in reading.weights._asdict().items():
            if projection is not None:
                weight = projection.weight.detach()
                bias = weight.new_zeros(len(weight))
                if projection.bias is not None:
                    bias = projection.bias.detach()
                cells[name] = torch.cat([weight, bias[:, None]], dim=1).long()
        yield f"weights are copied: {', '.join(reading.parts)}", cells


# -------------------------------------------------------------------------------------- the outputs


Forms = tuple[MaskForm | None, ...]


class SharedInput(NamedTuple):
    """An input that both take, with the forms of its mask in each."""

    name: str
    inputs: Inputs
    forms: Forms = (None,)
    others: Forms = (None,)

    def gaps(self, pair: Pair) -> list[Gap]:
        """The smallest gap, because the meaning of True is a choice; none for a mask that does not
        fit both. Raises `MhaError` if an input without masks does not.
        """
        first, second = pair
        gaps = []
        for form, other in product(self.forms, self.others):
            with suppress(*NO_ANSWER):  # the form does not fit these sizes
                case = make_case(self.name, first, self.inputs, form)
                ours = case.output
                theirs = as_float64(second(self.inputs, mask=other))
                if ours.shape == theirs.shape:
                    counted = counted_rows(case.inputs, ours)
                    ours = ours[counted]
                    theirs = theirs[counted]
                gaps.append(Gap(case, other, largest_difference(ours, theirs)))
        if not gaps and None in self.forms:
            raise MhaError(
                f"cannot compare the two: an input for {self.name} fits only one",
                code="cannot-compare",
            )
        return sorted(gaps, key=lambda gap: gap.difference)[:1]


def _shared_inputs(first: UserAttention, second: UserAttention, seed: int) -> list[SharedInput]:
    """The inputs that both take: self-attention, a context, a mask and padding."""
    common = min(first, second, key=lambda attention: (attention.takes_context, attention.n_rows))
    shared = [SharedInput(*named) for named in unmasked_inputs(common, seed).items()]
    drawer = common.drawer(seed)
    inputs = drawer.inputs(with_context=common.takes_context)
    masked = inputs._replace(allowed=drawer.allowed(inputs)[:1])
    padded = inputs._replace(real=drawer.real(inputs))
    shared += [
        SharedInput("a mask", masked, first.mask_forms[:4], second.mask_forms[:4]),
        SharedInput("padding", padded, first.padding_forms[:4], second.padding_forms[:4]),
    ]
    return [each for each in shared if each.forms and each.others]


# --------------------------------------------------------------------------------- first difference


_SITES = ("q", "k", "qk", "scores", "pattern", "v", "z", "concat", "out")
_UP_TO_A_FACTOR = ("q", "k", "qk")
"""Sites before the scale, which some apply to the queries and others to the scores."""
_INPUTS = ("q", "k", "v")
"""Sites that may agree although one that stands before them in the list does not."""


def _departure(gap: Gap, pair: Pair, seed: int) -> FirstDifference | None:
    """The first site that differs after all that are the same. None if a call cannot be recorded,
    if time is over, or if no site differs.
    """
    try:
        first, second = (
            recorded(subject, gap.case.inputs, seed, form).tensors_at_sites()
            for subject, form in zip(pair, (gap.case.form, gap.form), strict=True)
        )
    except (OutOfTime, *NO_ANSWER):
        return None
    same = list[str]()
    sites = [site for site in _SITES if site in first and site in second]
    for site in sites:
        # heads stand in columns
        width = first[site].tensors[0].shape[-1] if site == "concat" else 1
        a, b = (
            sorted_numbers(torch.cat([*map(torch.flatten, call[site].tensors)]), width)
            for call in (first, second)
        )
        if site in _UP_TO_A_FACTOR:
            b = b * a.norm() / b.norm().clamp(min=1e-300)
        if largest_difference(a, b) <= TOLERANCE * float(a[a.abs() < NO_NUMBER].abs().max()):
            same.append(site)
    last_shared = max((sites.index(site) for site in same if site not in _INPUTS), default=-1)
    differing = next((site for site in sites[last_shared + 1 :] if site not in same), None)
    if differing is None:
        return None
    before = [site for site in sites[: sites.index(differing)] if site in same]
    return FirstDifference(
        differing, before[-1] if before else None, *first[differing].line, *second[differing].line
    )
