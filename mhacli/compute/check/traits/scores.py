"""What scores get besides products of queries and keys, read from runs: a bias, a learned scale of each head, sinks.

Only what is the same whatever the rows hold is read, so that no mistake in what the rows do can hide in it. A table of two
numbers, and what is far below every score, is a mask and no bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.usercode.user_attention import Operation, UserAttention
from mhacli.attention.mistakes.stages import Rows
from mhacli.compute.check.inputs import HIDDEN
from mhacli.compute.check.traits.runs import Runs, Step, Unreadable, runs_of

_FUSED = "scaled_dot_product_attention"


class Place(NamedTuple):
    """A line of the author's code."""

    file: str | None
    line: int | None

    def __str__(self) -> str:
        """As it ends a sentence, empty where it is not known."""
        return "" if self.file is None else f" at {Path(self.file).name}:{self.line}"


class Term(NamedTuple):
    """A bias in a run, as it is meant to be: `[1, head, query, key]`, where it is added, and whether it is learned."""

    bias: Tensor
    place: Place
    is_learned: bool


@dataclass
class ScoreBias:
    """The bias of the scores, for rows of any length. `is_learned`: it is made from parameters.

    Some mistakes are seen in a bias alone: one that rewards distance, one whose heads are not moved to the front, one that is
    laid along the batch in another order than the scores. They are taken out of it, so that the catalogue finds them.
    """

    subject: UserAttention
    seed: int
    place: Place
    is_learned: bool
    known: dict[tuple[bool, int, int], Tensor | None] = field(default_factory=dict)

    def __call__(self, rows: Rows) -> Tensor | None:
        """`[1, head, query, key]` for these rows, None where it adds nothing to them. Raises what the subject raises."""
        is_own = rows.keys is rows.queries
        key = (is_own, rows.queries.shape[-2], rows.keys.shape[-2])
        if key not in self.known:
            runs = runs_of(self.subject, self.seed, other=not is_own, q_len=key[1], k_len=key[2])
            self.known[key] = _sum_of(terms(runs))
        return self.known[key]


def score_bias(subject: UserAttention, seed: int, runs: Runs, *, is_own: bool) -> ScoreBias | None:
    """The bias that scores get in these runs, None where they get none. Raises `Unreadable` where it is another in each
    sequence."""
    found = terms(runs)
    if not found:
        return None
    read = ScoreBias(subject, seed, found[0].place, any(term.is_learned for term in found))
    read.known[is_own, runs.q_len, runs.k_len] = _sum_of(found)
    return read


def _sum_of(found: Sequence[Term]) -> Tensor | None:
    return torch.stack([term.bias for term in found]).sum(dim=0) if found else None


def terms(runs: Runs) -> list[Term]:
    """Every bias that is added to scores in a run."""
    found = []
    for number, step in runs.moving():
        added = _added(runs, number, step)
        if added is not None:
            found.append(added)
    return found


def _added(runs: Runs, number: int, step: Step) -> Term | None:
    """What a step adds to scores, as it reaches the softmax; None where it adds none, or a mask."""
    op = step.first
    which, factor, shape = _addend(step)
    if which is None:
        return None
    tensor = op.inputs[which]
    bias = runs.as_scores(tensor, shape) if tensor.is_floating_point() else None
    if bias is None or tensor.numel() == 1:
        return None
    hidden = (bias < HIDDEN) | _weak_triangle(bias)
    if bias[~hidden].unique().numel() <= 2:
        return None
    seen = ~hidden[0, 0]
    bias = _in_order(runs, bias.masked_fill(hidden, 0.0) * factor * _scaled_later(runs, number))
    is_learned = runs.is_learned(tensor)
    reverse = not is_learned and _rewards_distance(bias, seen)
    return Term(-bias if reverse else bias, Place(op.file, op.line), is_learned)


def _weak_triangle(bias: Tensor) -> Tensor:
    """The later keys, where one number that is lower than all others hides them and nothing else."""
    later = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1 + bias.shape[-1] - bias.shape[-2]).expand(bias.shape)
    is_weak = later.any() and bias[later].unique().numel() == 1 and bool(bias[later][0] < bias[~later].min() - 1)
    return later if is_weak else torch.zeros_like(later)


def _addend(step: Step) -> tuple[int | None, float, torch.Size]:
    """Which input of a step is added to what depends on the rows, times which number, and the shape of the sum."""
    op, fixed = step.first, step.fixed_inputs()
    if op.name in ("add", "add_", "sub", "sub_") and len(fixed) == 2 and sum(fixed) == 1:
        which = fixed.index(True)
        if op.name.startswith("sub") and which == 0:
            return None, 0.0, op.output.shape
        sign = -1.0 if op.name.startswith("sub") else 1.0
        return which, sign * (_number(op, "alpha") if which == 1 else 1.0), op.output.shape
    if op.name == "baddbmm" and len(fixed) == 3 and fixed[0]:
        return 0, _number(op, "beta"), op.output.shape
    if op.name == _FUSED and len(fixed) == 4 and fixed[3]:
        q, k = op.inputs[:2]
        return 3, 1.0, torch.Size((*q.shape[:-1], k.shape[-2]))
    return None, 0.0, op.output.shape


def _number(op: Operation, name: str) -> float:
    value = op.arguments.get(name, 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def _scaled_later(runs: Runs, number: int) -> float:
    """What the result of a step is multiplied by before anything else is done with it."""
    factor, current = 1.0, runs.steps[number].first.output
    for op, _ in runs.steps[number + 1 :]:
        if not any(t is current for t in op.inputs):
            continue
        by = op.arguments.get("other", op.arguments.get("1"))
        if len(op.inputs) == 2 and op.inputs[0] is current and op.inputs[1].numel() == 1:
            by = op.inputs[1].item()
        if op.name.rstrip("_") in ("mul", "div") and isinstance(by, int | float):
            factor = factor * by if op.name.startswith("mul") else factor / by
        elif op.name not in ("float", "to", "type_as", "view", "reshape", "contiguous"):
            break
        current = op.output
    return factor


def _in_order(runs: Runs, bias: Tensor) -> Tensor:
    """A bias `[batch, head, query, key]` as `[1, head, query, key]`, with heads and sequences in the order that is meant."""
    n_heads = bias.shape[1]
    if not torch.equal(bias, bias[:1].expand_as(bias)):
        inside = bias.reshape(n_heads, runs.batch, runs.q_len, runs.k_len)  # each head for every sequence in turn
        if not torch.equal(inside, inside[:, :1].expand_as(inside)):
            raise Unreadable
        return inside[None, :, 0]
    if n_heads > 1 and any(_moves_no_heads(runs, step.first, n_heads) for step in runs.steps):
        return bias[0].reshape(runs.q_len, runs.k_len, n_heads).permute(2, 0, 1)[None]
    return bias[:1]


def _moves_no_heads(runs: Runs, op: Operation, n_heads: int) -> bool:
    """Whether an operation reads a learned table with the heads last as one with the heads first, without moving them."""
    if op.name not in ("view", "reshape") or not runs.is_learned(op.inputs[0]):
        return False
    before, after = op.inputs[0].shape, op.output.shape
    return bool(before[-1] == n_heads and before != after and tuple(after[-3:]) == (n_heads, runs.q_len, runs.k_len))


def _rewards_distance(bias: Tensor, seen: Tensor) -> bool:
    """Whether a fixed bias rises in proportion to the distance to earlier keys, for every head, where keys are seen."""
    q_len, k_len = bias.shape[-2:]
    far = (torch.arange(q_len)[:, None] + k_len - q_len - torch.arange(k_len)).to(bias)
    past = seen & (far >= 0)
    if past[-1].sum() < 3:
        return False
    last = bias[0, :, -1][:, past[-1]]  # [head, key] of the last query
    slopes = last.diff(dim=-1)
    return bool((slopes < 0).all() and torch.allclose(slopes, slopes[:, :1].expand_as(slopes)))


# ------------------------------------------------------------------------------------------------------------ scale and sinks


class Temperature(NamedTuple):
    """What the scores of each head are multiplied by, learned: `[head, 1, 1]`."""

    scale: Tensor
    place: Place


def temperature(runs: Runs) -> Temperature | None:
    """The learned factor of the scores, one for each head; None where there is none."""
    for _, step in runs.moving():
        op, fixed = step.first, step.fixed_inputs()
        if op.name.rstrip("_") not in ("mul", "div") or len(fixed) != 2 or sum(fixed) != 1:
            continue
        which = fixed.index(True)
        wide = runs.as_scores(op.inputs[which], op.output.shape) if runs.is_learned(op.inputs[which]) else None
        if wide is None or not torch.equal(wide, wide[:1, :, :1, :1].expand_as(wide)):
            continue
        scale = wide[0, :, :1, :1]
        return Temperature(scale if op.name.startswith("mul") else 1 / scale, Place(op.file, op.line))
    return None


class Sinks(NamedTuple):
    """A logit of each head, `[head]`, that takes part in the softmax and is no key's."""

    logits: Tensor
    place: Place


def sinks(runs: Runs) -> Sinks | None:
    """The column that is put beside the scores, the same for all queries; None where there is none."""
    for _, step in runs.moving():
        op, fixed = step.first, step.fixed_inputs()
        if op.name != "cat" or len(fixed) != 2 or sum(fixed) != 1 or op.output.shape[-1] != runs.k_len + 1:
            continue
        which = fixed.index(True)
        column, scores = op.inputs[which], op.inputs[1 - which]
        if column.shape[-1] != 1 or scores.shape[-1] != runs.k_len or column.shape[:-1] != scores.shape[:-1]:
            continue
        wide = runs.as_scores(column, scores.shape)
        if wide is not None and torch.equal(wide, wide[:1, :, :1].expand_as(wide)):
            return Sinks(wide[0, :, 0, 0], Place(op.file, op.line))
    return None
