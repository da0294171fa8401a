"""Norms of queries and keys, read from runs: rows over their length or their spread, times a gain, whatever does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mhacli.compute.check.inputs import TOLERANCE
from mhacli.compute.check.traits.runs import Runs, Step

_ROOTS = frozenset((
    "normalize", "rms_norm", "layer_norm", "norm", "linalg_norm", "linalg_vector_norm", "rsqrt", "sqrt", "var", "std", "pow",
))  # fmt: skip
"""What no norm does without."""
_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps)
Kind = Literal["length", "spread"]


@dataclass(frozen=True, eq=False)
class Norm:
    """Rows `[batch, head, length, d]` over their root mean square, or with `spread` less their mean over their standard
    deviation, times `gain` and plus `shift`, `[head or 1, 1, d]`. `source` are the rows that it was seen to norm."""

    kind: Kind
    eps: float
    gain: Tensor
    shift: Tensor
    source: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """The rows, normed."""
        return _normed(rows, self.kind, self.eps) * self.gain + self.shift

    @property
    def is_unit(self) -> bool:
        """Whether every row has the length 1 afterwards."""
        unit = self.gain.shape[-1] ** -0.5
        return (
            self.kind == "length" and bool((self.gain - unit).abs().max() < 1e-6) and not self.shift.abs().max() > 1e-6
        )

    def is_of(self, rows: Tensor) -> bool:
        """Whether these are the rows that it was seen to norm."""
        return rows.shape == self.source.shape and torch.allclose(rows, self.source, rtol=1e-4, atol=1e-5)

    def is_like(self, other: Norm) -> bool:
        """Whether it is the same norm."""
        is_alike = self.kind == other.kind and self.gain.shape == other.gain.shape
        return is_alike and torch.allclose(self.gain, other.gain, rtol=1e-4) and torch.allclose(
            self.shift, other.shift, rtol=1e-4, atol=1e-6
        )  # fmt: skip


def unlike(found: Sequence[Norm]) -> list[Norm]:
    """Norms of any rows, each once."""
    kept: list[Norm] = []
    for norm in found:
        if not any(norm.is_like(other) for other in kept):
            kept.append(norm)
    return kept


def norms(runs: Runs) -> list[Norm]:
    """Every norm over the last axis of heads in a run, each once of the same rows. Empty where nothing takes a root."""
    if not any(step.first.name.rstrip("_") in _ROOTS for _, step in runs.moving()):
        return []
    found: list[Norm] = []
    for before, after in _rows(runs):
        norm = _norm(runs, before, after)
        if norm is not None and not any(norm.is_like(other) and norm.is_of(other.source) for other in found):
            found.append(norm)
    return found


def uses_all_parameters(runs: Runs, n_parameters: int) -> bool:
    """Whether a run touches as many parameters as there are."""
    return len({id(t) for op, _ in runs.steps for t in op.inputs if isinstance(t, torch.nn.Parameter)}) >= n_parameters


def _rows(runs: Runs) -> Iterator[tuple[Step, Step]]:
    """Pairs of results of the same shape, one after the other, that may be heads."""
    rows = [step for _, step in runs.moving() if _heads(runs, step.first.output) is not None]
    for n, after in enumerate(rows):
        for before in rows[:n]:
            if before.first.output.shape == after.first.output.shape:
                yield before, after


def _heads(runs: Runs, tensor: Tensor) -> Tensor | None:
    """A tensor as `[batch, head, length, d]`; None where it is none of that."""
    if not tensor.is_floating_point() or tensor.ndim != 4 or tensor.shape[0] != runs.batch or tensor.shape[-1] < 2:
        return None
    places = [axis for axis in (1, 2) if tensor.shape[axis] in (runs.q_len, runs.k_len)]
    return tensor.detach().to("cpu", torch.float64).movedim(places[-1], 2) if places else None


def _norm(runs: Runs, before: Step, after: Step) -> Norm | None:
    """The norm that makes one result of another, in both runs; None where none does."""
    x, y = _heads(runs, before.first.output), _heads(runs, after.first.output)
    again, wanted = _heads(runs, before.second.output), _heads(runs, after.second.output)
    assert x is not None
    assert y is not None
    assert again is not None
    assert wanted is not None
    for kind in ("length", "spread"):
        if _gap(_fitted(x, y, kind, 0.0), x, y) > 100 * TOLERANCE:
            continue
        best = min((_fitted(x, y, kind, eps) for eps in _EPS), key=lambda norm: _gap(norm, x, y))
        if max(_gap(best, x, y), _gap(best, again, wanted)) <= TOLERANCE:
            return best
    return None


def _gap(norm: Norm, x: Tensor, y: Tensor) -> float:
    return float((norm(x) - y).abs().max() / y.abs().max().clamp(min=1e-30))


def _fitted(x: Tensor, y: Tensor, kind: Kind, eps: float) -> Norm:
    """The gain and the shift with which a norm comes nearest, one for each head and column, or for all heads where that is as
    good."""
    u = _normed(x, kind, eps)
    middle_u, middle_y = (t.mean((0, 2), keepdim=True) for t in (u, y))
    gain = ((u - middle_u) * (y - middle_y)).sum((0, 2)) / (u - middle_u).square().sum((0, 2)).clamp(min=1e-30)
    shift = middle_y[0, :, 0] - gain * middle_u[0, :, 0]
    if torch.allclose(gain, gain[:1].expand_as(gain), rtol=1e-4, atol=1e-7):
        gain, shift = gain.mean(0, keepdim=True), shift.mean(0, keepdim=True)
    shift = torch.where(shift.abs() < 1e-6, 0.0, shift)
    return Norm(kind, eps, gain[:, None], shift[:, None], x)


def _normed(rows: Tensor, kind: Kind, eps: float) -> Tensor:
    rows = rows - rows.mean(-1, keepdim=True) if kind == "spread" else rows
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
