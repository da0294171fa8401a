"""What somebody's attention is asked, and what it answered: inputs that bring one thing after another into play."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mhacli.adapters.usercode.asker import cast_dtype
from mhacli.adapters.usercode.user_attention import Inputs, MaskForm, UserAttention
from mhacli.attention.mistakes.stages import Rows

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
