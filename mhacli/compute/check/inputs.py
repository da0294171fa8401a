"""What a user's attention is asked, and what it answered: inputs that bring one thing after another into play."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.asker import cast, cast_dtype
from mhacli.adapters.usercode.operations import watch
from mhacli.adapters.usercode.user_attention import Answer, Built, Inputs, MaskForm, Operation, UserAttention
from mhacli.attention.mistakes.stages import Rows
from mhacli.compute.check.probes.catalogue import Probed

Play = Literal["core", "mask", "padding", "large"]
TOLERANCE = 1e-5
"""Relative to the largest number of the output: rounding of float32, which many modules compute with inside."""
HIDDEN = -500.0
"""What is lower, among scores or added to them, hides a key, whatever number an author writes for −∞."""
LARGE_TOLERANCE = 1e-2
LARGE = 1000.0
"""Rows times this make scores a million times as large: what is meant to be −∞ must be lower still."""


@dataclass(frozen=True)
class Scene:
    """One input, `rows`, and what was answered, `[batch, query, d_out]`, both in float64. `form` is how its mask was written, and
    `padding` how its padding. `counted`, bool `[batch, query]`, says which rows are compared, None for all."""

    play: Play
    name: str
    rows: Rows
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
        return max(largest, 1e-30) * (LARGE_TOLERANCE if self.play == "large" else TOLERANCE)


class Draw:
    """Seeded inputs for a subject."""

    def __init__(self, subject: UserAttention, seed: int) -> None:
        self.subject, self.generator = subject, torch.Generator().manual_seed(seed)

    def rows(self, length: int, *, context: bool = False, batch: int | None = None) -> Tensor:
        """Standard normal rows, `[batch, length, d_in]`, or heads of them."""
        sizes = self.subject.sizes
        batch = sizes.batch if batch is None else batch
        width = sizes.d_context if context else sizes.d_in
        shape = (batch, self.subject.n_heads, length, width) if self.subject.is_function else (batch, length, width)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def inputs(
        self, *, other: bool, batch: int | None = None, q_len: int | None = None, k_len: int | None = None
    ) -> Inputs:
        """Rows for queries, and with `other` rows of their own for keys, and for values where those are given apart; of a
        function always q, k and v of their own."""
        sizes = self.subject.sizes
        q_len = sizes.q_len if q_len is None else q_len
        if self.subject.is_function:
            k_len = (sizes.k_len if other else q_len) if k_len is None else k_len
            return Inputs(self.rows(q_len, batch=batch), *(self.rows(k_len, context=True, batch=batch) for _ in "kv"))
        if not other and sizes.d_in == sizes.d_context:
            return Inputs(self.rows(q_len, batch=batch))
        if not other:
            return Inputs(self.rows(q_len, batch=batch), self.rows(q_len, context=True, batch=batch))
        k_len = sizes.k_len if k_len is None else k_len
        queries, keys = self.rows(q_len, batch=batch), self.rows(k_len, context=True, batch=batch)
        is_apart = self.subject.n_rows > 2
        return Inputs(queries, keys, self.rows(k_len, context=True, batch=batch) if is_apart else None)

    def allowed(self, inputs: Inputs) -> Tensor:
        """A random mask that leaves each query a key, and is neither symmetric nor a triangle."""
        batch, q_len, k_len = _lengths(inputs)
        keep = torch.rand(batch, 1, q_len, k_len, generator=self.generator) < 0.6
        keep[..., torch.arange(q_len), torch.randint(k_len, (q_len,), generator=self.generator)] = True
        return keep

    def real(self, inputs: Inputs, *, on_the_right: bool = True) -> Tensor:
        """Padding, other in each sequence: on the right, or anywhere, the first token of some sequences too."""
        batch, _, k_len = _lengths(inputs)
        if on_the_right:
            lengths = torch.tensor([max(1, k_len - 1 - row * max(1, k_len // 3)) for row in range(batch)])
            lengths[-1] = k_len if batch > 1 else lengths[-1]
            return torch.arange(k_len)[None] < lengths[:, None]
        real = torch.rand(batch, k_len, generator=self.generator) < 0.7
        real[0, 0], real[-1, 0] = True, batch == 1 or k_len == 1
        real[:, -1] |= ~real.any(dim=1)
        return real


def _lengths(inputs: Inputs) -> tuple[int, int, int]:
    keys = inputs.queries if inputs.keys is None else inputs.keys
    return inputs.queries.shape[0], inputs.queries.shape[-2], keys.shape[-2]


def ask(
    subject: UserAttention, inputs: Inputs, mask: MaskForm | None = None, padding: MaskForm | None = None
) -> Tensor:
    """What the subject answers, in float64 on the CPU; it sees the inputs in its own dtype."""
    answer = subject(inputs_for(subject, inputs), mask=mask, padding=padding)
    return answer.out.detach().to("cpu", torch.float64)


def inputs_for(subject: UserAttention, inputs: Inputs) -> Inputs:
    """The inputs in the subject's dtype, on its device."""
    queries = inputs.queries.to(subject.device, subject.dtype)
    return Inputs(
        queries, *(None if t is None else t.to(subject.device, cast_dtype(t, subject.dtype)) for t in inputs[1:])
    )


def rows_of(subject: UserAttention, inputs: Inputs) -> Rows:
    """The same inputs for the reference: as the subject's dtype rounds them."""

    def rounded(t: Tensor) -> Tensor:
        return t.to(subject.dtype).to(torch.float64)

    queries = rounded(inputs.queries)
    keys = queries if inputs.keys is None else rounded(inputs.keys)
    return Rows(queries, keys, keys if inputs.values is None else rounded(inputs.values), inputs.allowed, inputs.real)


def make_scene(
    play: Play,
    name: str,
    subject: UserAttention,
    inputs: Inputs,
    form: MaskForm | None = None,
    padding: MaskForm | None = None,
) -> Scene:
    """The scene of asking this. Raises what the subject raises."""
    counted = None
    if inputs.real is not None and (inputs.keys is None or inputs.real.shape[1] == inputs.queries.shape[-2]):
        counted = inputs.real
    answer = ask(subject, inputs, form, padding)
    return Scene(play, name, rows_of(subject, inputs), answer, inputs, form, padding, counted)


def core_scenes(subject: UserAttention, seed: int) -> Iterator[Scene]:
    """Without masks: the rows themselves, and other rows for each argument that there is for some."""
    draw = Draw(subject, seed)
    yield make_scene("core", "rows that attend to themselves", subject, draw.inputs(other=False))
    if subject.takes_context:
        yield make_scene("core", "fewer queries than keys", subject, draw.inputs(other=True))
    elif subject.n_rows > 1:
        yield make_scene("core", "other rows for each argument", subject, draw.inputs(other=True))


def mask_scenes(subject: UserAttention, seed: int, forms: tuple[MaskForm, ...]) -> Iterator[Scene]:
    """The same mask written in every form that is accepted, one scene each."""
    draw = Draw(subject, seed)
    inputs = draw.inputs(other=subject.takes_context)
    inputs = inputs._replace(allowed=draw.allowed(inputs))
    for form in forms:
        wanted = inputs
        if "batch" not in form.axes and inputs.allowed is not None:
            wanted = inputs._replace(allowed=inputs.allowed[:1])
        try:
            yield make_scene("mask", _written(form), subject, wanted, form)
        except Exception:  # a form that these sizes do not fit
            continue


def windows_scene(subject: UserAttention, seed: int, form: MaskForm) -> Scene | None:
    """The mask in this form, of half as many windows as there are in the batch, two images of two; None where it takes none."""
    if form.axes[0] != "batch" or "head" in form.axes:
        return None
    draw = Draw(subject, seed)
    inputs = draw.inputs(other=subject.takes_context, batch=4)
    inputs = inputs._replace(allowed=draw.allowed(inputs)[:2].repeat(2, 1, 1, 1))
    try:
        return make_scene("mask", f"{form.parameter} of two windows", subject, inputs, form._replace(n_shared=2))
    except Exception:  # a mask must be as long as the batch
        return None


def padding_scenes(subject: UserAttention, seed: int, forms: tuple[MaskForm, ...]) -> Iterator[Scene]:
    """Padding written in every form that is accepted, one scene each."""
    draw = Draw(subject, seed)
    inputs = draw.inputs(other=subject.takes_context)
    holes, right = draw.real(inputs, on_the_right=False), draw.real(inputs)
    for form in forms:
        padded = inputs._replace(real=right if form.kind == "lengths" else holes)
        try:
            yield make_scene("padding", _written(form), subject, padded, padding=form)
        except Exception:
            continue


def large_scene(subject: UserAttention, seed: int, like: Scene) -> Scene:
    """The inputs of another scene with scores a million times as large."""
    inputs = like.inputs
    large = inputs._replace(queries=inputs.queries * LARGE, keys=None if inputs.keys is None else inputs.keys * LARGE)
    if large.allowed is not None:  # one key for each query, so that all it may attend to can have low scores
        q_len, k_len = large.allowed.shape[-2:]
        large = large._replace(allowed=torch.eye(k_len, dtype=torch.bool)[torch.arange(q_len) % k_len][None, None])
    return make_scene("large", "scores × 1,000,000", subject, large, like.form, like.padding)


def _written(form: MaskForm) -> str:
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
    asked, forgetful = subject.of(module, subject.dtype), Anew(subject.of(module, subject.dtype), module)
    keeps_state = bool(probed.facts.keeps_state) or _remembers_masks(subject, forgetful, seed)
    plain = cast(copy.deepcopy(module), torch.float64, "cpu")
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


def _remembers_masks(subject: UserAttention, forgetful: Anew, seed: int) -> bool:
    """Whether the mask of one call is still there in the next one."""
    draw = Draw(subject, seed)
    inputs = draw.inputs(other=subject.takes_context)
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
            used = forgetful.inner.of(copy.deepcopy(forgetful.module), subject.dtype)
            ask(used, first, **how)
            second, alone = (_seeded(one, given, how) for one in (used, forgetful))
        except Exception:  # a form that these sizes do not fit
            continue
        if not torch.equal(second.nan_to_num(), alone.nan_to_num()):
            return True
    return False


def _seeded(subject: UserAttention, inputs: Inputs, how: Mapping[str, MaskForm]) -> Tensor:
    """An answer in which what is random is the same each time."""
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        torch.manual_seed(0)
        return ask(subject, inputs, **how)


def _tensors_of(subject: UserAttention) -> Mapping[str, Tensor]:
    """The weights of what is no module: those that a call is given, or that an instance holds."""
    given = dict(getattr(subject, "tensors", {}))
    held = getattr(subject.built.call, "__dict__", {})
    return given or {n: value for n, value in held.items() if isinstance(value, Tensor) and value.is_floating_point()}


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """A copy with normal weights, scaled so that queries and keys are of size one, and biases that are not zero."""
    made, generator = copy.deepcopy(module), torch.Generator().manual_seed(seed + 1)
    for parameter in made.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 1:
            continue
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim == 1:
            drawn = drawn * 0.5 if not _is_gain(parameter) else (1 + drawn * 0.2).abs()
        elif _is_gain(parameter):
            drawn = (1 + drawn * 0.2).abs()
        else:
            drawn = drawn * 1.2 * sorted(parameter.shape)[-1] ** -0.5
        parameter.data.copy_(drawn)
    return made


def _is_gain(parameter: Tensor) -> bool:
    """Whether it is all ones, as the gain of a norm is before training, or a temperature."""
    return bool((parameter.detach() == 1).all())


@dataclass(frozen=True)
class Anew:
    """A subject that forgets: every call asks a fresh copy."""

    inner: UserAttention
    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        """What the subject has."""
        return getattr(self.inner, name)

    def __call__(
        self,
        inputs: Inputs,
        *,
        mask: MaskForm | None = None,
        padding: MaskForm | None = None,
        training: bool = False,
    ) -> Answer:
        """Asks a copy that has not been asked before."""
        fresh = self.inner.of(copy.deepcopy(self.module), self.inner.dtype)
        return fresh(inputs, mask=mask, padding=padding, training=training)


# ----------------------------------------------------------------------------------------------------- two runs, watched


class Unreadable(Exception):
    """What cannot be read from a run, such as one that takes other steps with other rows."""


class Step(NamedTuple):
    """One operation, in both runs."""

    first: Operation
    second: Operation

    def fixed_inputs(self) -> list[bool]:
        """Of each input, whether it is the same in both runs."""
        return [same(a, b) for a, b in zip(self.first.inputs, self.second.inputs, strict=True)]


@dataclass(frozen=True)
class Runs:
    """The steps of two runs of the same sizes; `rows` are those of the first."""

    steps: tuple[Step, ...]
    batch: int
    q_len: int
    k_len: int
    rows: Rows

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

    def moving(self) -> Iterator[tuple[int, Step]]:
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
) -> Runs:
    """Two runs of a subject, watched; with `other` keys have rows of their own. Raises `Unreadable` where the runs do not take
    the same steps, and what the subject raises."""
    files = [] if subject.built.file is None else [subject.built.file]
    asked = [Draw(subject, seed + number).inputs(other=other, q_len=q_len, k_len=k_len) for number in range(2)]
    first, second = (watch(partial(ask, subject, inputs), files)[1] for inputs in asked)
    if [_kind(op) for op in first] != [_kind(op) for op in second]:
        raise Unreadable
    rows = rows_of(subject, asked[0])
    steps = tuple(Step(*pair) for pair in zip(first, second, strict=True))
    return Runs(steps, rows.queries.shape[0], rows.queries.shape[-2], rows.keys.shape[-2], rows)


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
