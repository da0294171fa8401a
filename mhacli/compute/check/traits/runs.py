"""Somebody's attention watched in two runs with rows of their own: what of it stays the same whatever the rows hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.operations import watch
from mhacli.adapters.usercode.user_attention import Operation, UserAttention
from mhacli.attention.mistakes.stages import Rows
from mhacli.compute.check.inputs import Draw, ask, rows_of


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
