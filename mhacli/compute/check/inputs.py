"""What a user's attention is asked, and what it answered: inputs that bring one thing after another into kind."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.asker import cast, cast_copy, map_rows, seeded
from mhacli.adapters.usercode.call.signature import called_function
from mhacli.adapters.usercode.call.user_attention import UserAttention, drawer_of
from mhacli.adapters.usercode.operations import watch
from mhacli.adapters.usercode.types import Built, Inputs, MaskForm, Operation
from mhacli.attention.mistakes.stages import ReferenceInputs
from mhacli.compute.check.probes.catalogue import Probed
from mhacli.spec.tolerances import TOLERANCES

InputKind = Literal["core", "mask", "padding", "large"]
TOLERANCE = TOLERANCES["float32"].runs
"""Relative to the largest number of the output: rounding of float32, which many modules compute with inside."""
HIDDEN = -500.0
"""What is lower, among scores or added to them, hides a key, whatever number an author writes for −∞."""
LARGE_TOLERANCE = 1e-2
LARGE = 1000.0
"""Rows times this make scores a million times as large: what is meant to be −∞ must be lower still."""


@dataclass(frozen=True)
class InputCase:
    """One input, `rows`, and what was answered, `[batch, query, d_out]`, both in float64. `form` is how its mask was written, and
    `padding` how its padding. `counted`, bool `[batch, query]`, says which rows are compared, None for all."""

    kind: InputKind
    name: str
    rows: ReferenceInputs
    answer: Tensor
    inputs: Inputs
    form: MaskForm | None = None
    padding: MaskForm | None = None
    counted: Tensor | None = None

    @property
    def tolerance(self) -> float:
        """The largest difference that is rounding."""
        finite = self.answer[self.answer.isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 1.0
        return max(largest, 1e-30) * (LARGE_TOLERANCE if self.kind == "large" else TOLERANCE)


def ask(
    subject: UserAttention, inputs: Inputs, mask: MaskForm | None = None, padding: MaskForm | None = None
) -> Tensor:
    """What the subject answers, in float64 on the CPU; it sees the inputs in its own dtype."""
    answer = subject(inputs_for(subject, inputs), mask=mask, padding=padding)
    return answer.out.detach().to("cpu", torch.float64)


def inputs_for(subject: UserAttention, inputs: Inputs) -> Inputs:
    """The inputs in the subject's dtype, on its device."""
    given = map_rows(inputs, lambda rows: rows.to(subject.device, subject.dtype))
    allowed, real = (None if t is None else t.to(subject.device) for t in (inputs.allowed, inputs.real))
    return given._replace(allowed=allowed, real=real)


def rows_of(subject: UserAttention, inputs: Inputs) -> ReferenceInputs:
    """The same inputs for the reference: as the subject's dtype rounds them."""

    def rounded(t: Tensor) -> Tensor:
        return t.to(subject.dtype).to(torch.float64)

    queries = rounded(inputs.queries)
    keys = queries if inputs.keys is None else rounded(inputs.keys)
    return ReferenceInputs(
        queries, keys, keys if inputs.values is None else rounded(inputs.values), inputs.allowed, inputs.real
    )


def make_case(
    kind: InputKind,
    name: str,
    subject: UserAttention,
    inputs: Inputs,
    form: MaskForm | None = None,
    padding: MaskForm | None = None,
) -> InputCase:
    """The case of asking this. Raises what the subject raises."""
    counted = None
    if inputs.real is not None and (inputs.keys is None or inputs.real.shape[1] == inputs.queries.shape[-2]):
        counted = inputs.real
    answer = ask(subject, inputs, form, padding)
    return InputCase(kind, name, rows_of(subject, inputs), answer, inputs, form, padding, counted)


def max_error(one: Tensor, other: Tensor) -> float:
    """The largest difference of two outputs; infinite where shapes or NaN differ, 0 where all is NaN."""
    if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    difference = torch.where(one == other, 0.0, (one - other).abs())[~one.isnan()]
    return difference.max().item() if difference.numel() else 0.0


def arguments_without_effect(subject: UserAttention, seed: int) -> Iterator[str]:
    """A sentence about each argument that its lines never read, or that was given and changes nothing: positions backwards."""
    name = getattr(called_function(subject.built.call), "__name__", subject.built.name)
    for parameter in subject.unread:
        yield f"{name}() never reads {parameter}: no value of it changes the output"
    rows = drawer_of(subject, seed).inputs(with_context=False)
    for recipe in subject.convention.extras:
        if recipe.kind == "positions" and recipe.parameter not in subject.unread:
            others = tuple(other for other in subject.convention.extras if other != recipe)
            backwards = (*others, recipe._replace(kind="positions backwards"))
            turned = replace(subject, convention=replace(subject.convention, extras=backwards))
            try:
                is_idle = max_error(ask(subject, rows), ask(turned, rows)) == 0.0
            except Exception:  # positions that rise may be all that it bears
                continue
            if is_idle:
                yield f"{recipe.parameter} does not change the output: backwards it gives the same"


def core_cases(subject: UserAttention, seed: int) -> Iterator[InputCase]:
    """Without masks: the rows themselves, and other rows for each argument that there is for some."""
    draw = drawer_of(subject, seed)
    yield make_case("core", "self-attention", subject, draw.inputs(with_context=False))
    if subject.takes_context:
        yield make_case("core", "fewer queries than keys", subject, draw.inputs(with_context=True))
    elif subject.n_rows > 1:
        yield make_case("core", "other rows for each argument", subject, draw.inputs(with_context=True))


def mask_cases(subject: UserAttention, seed: int, forms: tuple[MaskForm, ...]) -> Iterator[InputCase]:
    """The same mask written in every form that is accepted, one case each."""
    draw = drawer_of(subject, seed)
    inputs = draw.inputs(with_context=subject.takes_context)
    inputs = inputs._replace(allowed=draw.allowed(inputs))
    for form in forms:
        wanted = inputs
        if "batch" not in form.axes and inputs.allowed is not None:
            wanted = inputs._replace(allowed=inputs.allowed[:1])
        try:
            yield make_case("mask", _mask_text(form), subject, wanted, form)
        except Exception:  # a form that these sizes do not fit
            continue


def windows_case(subject: UserAttention, seed: int, form: MaskForm) -> InputCase | None:
    """The mask in this form, of half as many windows as there are in the batch, two images of two; None where it takes none."""
    if form.axes[0] != "batch" or "head" in form.axes:
        return None
    draw = drawer_of(subject, seed)
    inputs = draw.inputs(with_context=subject.takes_context, batch=4)
    inputs = inputs._replace(allowed=draw.allowed(inputs)[:2].repeat(2, 1, 1, 1))
    try:
        return make_case("mask", f"{form.parameter} of two windows", subject, inputs, form._replace(n_shared=2))
    except Exception:  # a mask must be as long as the batch
        return None


def padding_cases(subject: UserAttention, seed: int, forms: tuple[MaskForm, ...]) -> Iterator[InputCase]:
    """Padding written in every form that is accepted, one case each."""
    draw = drawer_of(subject, seed)
    inputs = draw.inputs(with_context=subject.takes_context)
    holes, right = draw.real(inputs, on_the_right=False), draw.real(inputs)
    for form in forms:
        padded = inputs._replace(real=right if form.kind == "lengths" else holes)
        try:
            yield make_case("padding", _mask_text(form), subject, padded, padding=form)
        except Exception:
            continue


def large_case(subject: UserAttention, like: InputCase) -> InputCase:
    """The inputs of another case with scores a million times as large."""
    inputs = like.inputs
    large = inputs._replace(queries=inputs.queries * LARGE, keys=None if inputs.keys is None else inputs.keys * LARGE)
    if large.allowed is not None:  # one key for each query, so that all it may attend to can have low scores
        q_len, k_len = large.allowed.shape[-2:]
        large = large._replace(allowed=torch.eye(k_len, dtype=torch.bool)[torch.arange(q_len) % k_len][None, None])
    return make_case("large", "scores × 1,000,000", subject, large, like.form, like.padding)


def _mask_text(form: MaskForm) -> str:
    if form.kind == "additive":
        return f"{form.parameter} as 0 and −∞"
    if form.kind == "lengths":
        return f"{form.parameter} as lengths"
    kind = {"bool": "True", "01": "1", "whole": "1"}[form.kind]
    return (
        f"{form.parameter} [{', '.join(form.axes)}], {kind} = {'may attend' if form.true_means == 'keep' else 'hidden'}"
    )


# ---------------------------------------------------------------------------------------------------- weights of our own


@dataclass(frozen=True)
class Examined:
    """A subject that was made ready: with weights of our own, without dropout, a fresh one for each call where it keeps state."""

    subject: UserAttention
    module: nn.Module | None
    tensors: Mapping[str, Tensor]
    keeps_state: bool = False


def with_own_weights(subject: UserAttention, probed: Probed, seed: int) -> Examined:
    """The subject with random weights and biases: those of a new module hide what a bias of zero, or a small weight, does."""
    module = _pristine(subject.built, probed)
    if module is None:
        tensors = {name: t.detach().to("cpu", torch.float64) for name, t in _tensors_of(subject).items()}
        return Examined(subject, None, tensors)
    module = cast(randomised(module, seed), subject.dtype)
    asked = subject.of(module, subject.dtype)
    forgetful = replace(asked, is_forgetful=True)
    keeps_state = bool(probed.facts.keeps_state) or _remembers_masks(subject, forgetful, seed)
    plain = cast_copy(module, torch.float64, "cpu")
    return Examined(forgetful if keeps_state else asked, plain, {}, keeps_state)


def _pristine(built: Built, probed: Probed) -> nn.Module | None:
    """The module; where it is random, or has kept something of earlier calls, built anew, without dropout."""
    facts = probed.facts
    if built.module is None or not (facts.is_random or facts.keeps_state):
        return built.module
    try:
        return built.rebuild(dict.fromkeys(facts.dropout_names, 0.0)).module
    except Exception:  # a constructor that does not want it
        return built.module


def _remembers_masks(subject: UserAttention, forgetful: UserAttention, seed: int) -> bool:
    """Whether the mask of one call is still there in the next one."""
    draw = drawer_of(subject, seed)
    inputs = draw.inputs(with_context=subject.takes_context)
    for form in (*subject.padding_forms[:1], *subject.mask_forms[:1]):
        is_padding = form in subject.padding_forms
        given = (
            inputs._replace(real=draw.real(inputs)) if is_padding else inputs._replace(allowed=draw.allowed(inputs)[:1])
        )
        first = given._replace(
            allowed=None if given.allowed is None else torch.ones_like(given.allowed),
            real=None if given.real is None else torch.ones_like(given.real),
        )
        how = {"padding": form} if is_padding else {"mask": form}
        try:
            used = forgetful.of(copy.deepcopy(forgetful.built.call), forgetful.dtype)
            ask(used, first, **how)
            with seeded(0, subject.device):
                second = ask(used, given, **how)
            with seeded(0, subject.device):
                alone = ask(forgetful, given, **how)
        except Exception:  # a form that these sizes do not fit
            continue
        if not torch.equal(second.nan_to_num(), alone.nan_to_num()):
            return True
    return False


def _tensors_of(subject: UserAttention) -> Mapping[str, Tensor]:
    """The weights of what is no module: those that a call is given, or that an instance holds."""
    given = dict(subject.tensors)
    held = getattr(subject.built.call, "__dict__", {})
    return given or {n: value for n, value in held.items() if isinstance(value, Tensor) and value.is_floating_point()}


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """A copy with normal weights, scaled so that queries and keys are of size one, and biases that are not zero."""
    made, generator = copy.deepcopy(module), torch.Generator().manual_seed(seed + 1)
    for parameter in made.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 1:
            continue
        numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim == 1:
            numbers = numbers * 0.5 if not _is_gain(parameter) else (1 + numbers * 0.2).abs()
        elif _is_gain(parameter):
            numbers = (1 + numbers * 0.2).abs()
        else:
            numbers = numbers * 1.2 * sorted(parameter.shape)[-1] ** -0.5
        parameter.data.copy_(numbers)
    return made


def _is_gain(parameter: Tensor) -> bool:
    """Whether it is all ones, as the gain of a norm is before training, or a temperature."""
    return bool((parameter.detach() == 1).all())


# ----------------------------------------------------------------------------------------------------- two runs, watched


class Unreadable(Exception):
    """What cannot be read from a run, such as one that takes other steps with other rows."""


class OperationPair(NamedTuple):
    """One operation, in both runs."""

    first: Operation
    second: Operation

    def fixed_inputs(self) -> list[bool]:
        """Of each input, whether it is the same in both runs."""
        return [same(a, b) for a, b in zip(self.first.inputs, self.second.inputs, strict=True)]


@dataclass(frozen=True)
class PairedRuns:
    """The steps of two runs of the same sizes; `rows` are those of the first."""

    steps: tuple[OperationPair, ...]
    batch: int
    q_len: int
    k_len: int
    rows: ReferenceInputs

    @cached_property
    def learned(self) -> frozenset[int]:
        """The tensors of the first run, by their ids, that are made from parameters."""
        found: set[int] = set()
        for op, _ in self.steps:
            if any(isinstance(t, nn.Parameter) or id(t) in found for t in op.inputs):
                found.add(id(op.output))
        return frozenset(found)

    def is_learned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the first run is a parameter, or made from parameters."""
        return isinstance(tensor, nn.Parameter) or id(tensor) in self.learned

    def moving(self) -> Iterator[tuple[int, OperationPair]]:
        """The steps whose result depends on the rows, numbered."""
        return ((n, step) for n, step in enumerate(self.steps) if not same(step.first.output, step.second.output))

    def as_scores(self, tensor: Tensor, shape: torch.Size) -> Tensor | None:
        """A tensor that goes with scores of this shape as `[batch, head, query, key]`; None where these are no scores."""
        places = [axis for axis, size in enumerate(shape) if size == self.k_len]
        if not places or tensor.ndim > len(shape):
            return None
        key = places[-1]
        queries = [axis for axis, size in enumerate(shape) if size == self.q_len and axis != key]
        if not queries or shape.numel() % (self.batch * self.q_len * self.k_len):
            return None
        wide = tensor.detach().to("cpu", torch.float64).expand(shape).movedim((queries[-1], key), (-2, -1))
        return wide.reshape(self.batch, -1, self.q_len, self.k_len)


def runs_of(
    subject: UserAttention, seed: int, *, other: bool, q_len: int | None = None, k_len: int | None = None
) -> PairedRuns:
    """Two runs of a subject, watched; with `other` keys have rows of their own. Raises `Unreadable` where the runs do not take
    the same steps, and what the subject raises."""
    asked = [
        drawer_of(subject, seed + number).inputs(with_context=other, q_len=q_len, k_len=k_len) for number in range(2)
    ]
    first, second = (watch(partial(ask, subject, inputs), subject.built.files)[1] for inputs in asked)
    if [_kind(op) for op in first] != [_kind(op) for op in second]:
        raise Unreadable
    rows = rows_of(subject, asked[0])
    steps = tuple(OperationPair(*pair) for pair in zip(first, second, strict=True))
    return PairedRuns(steps, rows.queries.shape[0], rows.queries.shape[-2], rows.keys.shape[-2], rows)


def _kind(operation: Operation) -> tuple[object, ...]:
    shapes = tuple(t.shape for t in operation.inputs)
    return operation.name, operation.line, operation.output.shape, shapes


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN in the same places."""
    return a is b or bool(a.shape == b.shape and torch.equal(a, b)) or _same_but_nan(a, b)


def _same_but_nan(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point() or not a.isnan().any():
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
