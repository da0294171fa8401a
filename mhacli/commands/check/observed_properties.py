"""Properties of a user's attention that a recorded run shows: score biases, learned scales, sinks, rotations, norms, and what
stands around the attention.

Of scores and scales only tensors that do not depend on the inputs are read, so that mistakes that depend on inputs stay visible.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhacli.attention.mistakes.stages import Pairing, ReferenceInputs
from mhacli.commands.check.inputs import HIDDEN, TOLERANCE, rows_of
from mhacli.usercode.graph import KERNEL, Graph, Operation, recorded
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import is_norm
from mhacli.usercode.target import Choice
from mhacli.usercode.user_attention import UserAttention


class Run(NamedTuple):
    """A recorded call, and its inputs."""

    graph: Graph
    rows: ReferenceInputs

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.rows.queries.shape[-2], self.rows.keys.shape[-2]

    def combined(self, *names: str) -> Iterator[tuple[Operation, Operation]]:
        """The operations of these names that combine what depends on the inputs with one tensor that does not, and its source."""
        for operation in self.graph.operations:
            fixed = [source for source in operation.sources if not source.live]
            if operation.name.rstrip("_") in names and operation.live and len(fixed) == 1:
                yield operation, fixed[0]

    def path(self, role: str) -> list[Operation]:
        """The operations from a projection to the queries or keys of the first product; `role` is q or k."""
        ends = [attention[role] for attention in self.graph.attentions[:1] if role in attention]
        path = {operation for end in ends for operation in end.upstream()}
        return [operation for operation in self.graph.operations if operation in path]

    def vectors(self, role: str) -> list[Tensor]:
        """What is made on the way to the queries or keys, `[batch, head, length, d]` or without heads."""
        found = []
        for tensor in [operation.output for operation in self.path(role)]:
            axes = [axis for axis in range(tensor.ndim - 1) if tensor.shape[axis] in self.lengths]
            if tensor.is_floating_point() and tensor.ndim in (3, 4) and axes:
                found.append(_plain(tensor).movedim(axes[-1], -2))
        return found

    def as_scores(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """A tensor broadcast to scores as `[batch, head, query, key]`; None if the shape does not fit scores."""
        batch, n_numbers = self.rows.queries.shape[0], math.prod(shape)
        if (
            tuple(shape[-2:]) != self.lengths
            or tensor.ndim > len(shape)
            or n_numbers % (batch * math.prod(self.lengths))
        ):
            return None
        return _plain(tensor).expand(shape).reshape(batch, -1, *self.lengths)


def run_of(
    subject: UserAttention, seed: int, *, other: bool, q_len: int | None = None, k_len: int | None = None
) -> Run:
    """A recorded run of a subject, with separate keys if `other`. Raises what the subject raises."""
    inputs = subject.drawer(seed).inputs(with_context=other, q_len=q_len, k_len=k_len)
    return Run(recorded(subject, inputs, seed), rows_of(subject, inputs))


def _is_learned(source: Operation) -> bool:
    """Whether a tensor that does not depend on the inputs is a parameter, or computed from parameters."""
    used = [source, *(leaf for operation in source.upstream() for leaf in operation.sources)]
    return any(isinstance(each.output, nn.Parameter) for each in used)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


# ------------------------------------------------------------------------------------------------------------ score bias


def score_bias(
    subject: UserAttention, seed: int, run: Run
) -> tuple[Callable[[ReferenceInputs], Tensor | None], SourceLine] | None:
    """The score bias `[1, head, query, key]` for inputs of any length, which raises what the subject raises, and the line that
    adds it; None without one."""
    added = bias_terms(run)
    if not added:
        return None

    @functools.cache
    def at_lengths(is_own: bool, q_len: int, k_len: int) -> Tensor | None:
        terms = [term for term, _ in bias_terms(run_of(subject, seed, other=not is_own, q_len=q_len, k_len=k_len))]
        return torch.stack(terms).sum(dim=0) if terms else None

    def bias(rows: ReferenceInputs) -> Tensor | None:
        return at_lengths(rows.keys is rows.queries, rows.queries.shape[-2], rows.keys.shape[-2])

    return bias, added[0][1]


def bias_terms(run: Run) -> list[tuple[Tensor, SourceLine]]:
    """Every bias added to scores in a run, `[1, head, query, key]`, scaled as it reaches the softmax, with its line; masks are
    left out. A bias that its code mistakes is returned as it was meant: as a penalty for distance, with its heads in order."""
    found = []
    for op, source in run.combined("add", "sub", "baddbmm", KERNEL):
        shape, added = op.output.shape, source.output
        if not added.is_floating_point():
            continue
        if op.name == KERNEL:
            shape = torch.Size((*op.inputs[0].shape[:-1], op.inputs[1].shape[-2]))
        bias = run.as_scores(added, shape)
        if bias is None or bias[bias >= HIDDEN].unique().numel() <= 2:
            continue
        visible = bias[0, 0] >= HIDDEN
        factor = next(filter(None, map(_factor_of, op.readers)), 1.0)
        if op.name.startswith("sub"):
            factor = -factor
        bias = _in_order(run, bias.masked_fill(bias < HIDDEN, 0.0) * factor)
        if not _is_learned(source) and _rewards_distance(bias, visible):
            bias = -bias
        found.append((bias, op.at))
    return found


def _factor_of(operation: Operation) -> float | None:
    """The number that an operation multiplies by, None if it does not."""
    number = operation.arguments.get("other", operation.arguments.get("1"))
    if operation.name.rstrip("_") not in ("mul", "div") or not isinstance(number, int | float):
        return None
    return number if operation.name.startswith("mul") else 1 / number


def _in_order(run: Run, bias: Tensor) -> Tensor:
    """The bias `[batch, head, query, key]` as `[1, head, query, key]`, with heads and sequences in the intended order. Raises
    ValueError if it differs between sequences."""
    batch, n_heads, *lengths = bias.shape
    if not torch.equal(bias, bias[:1].expand_as(bias)):
        by_head = bias.reshape(n_heads, batch, *lengths)  # sequences vary faster than heads
        if not torch.equal(by_head, by_head[:, :1].expand_as(by_head)):
            raise ValueError("the bias differs between sequences")
        return by_head[None, :, 0]
    if n_heads == 1:
        return bias[:1]
    for op in run.graph.operations:  # a learned table with heads last, reshaped to heads first without a transpose
        if op.name not in ("view", "reshape") or op.live or not _is_learned(op):
            continue
        table, reshaped = op.inputs[0].shape, op.output.shape
        if table[-1] == n_heads and table != reshaped and reshaped[-3:] == bias.shape[1:]:
            return bias[0].reshape(*lengths, n_heads).permute(2, 0, 1)[None]
    return bias[:1]


def _rewards_distance(bias: Tensor, visible: Tensor) -> bool:
    """Whether a fixed bias increases linearly with the distance to earlier visible keys, in every head."""
    last_query = bias[0, :, -1]
    slopes = last_query[:, visible[-1]].diff(dim=-1)
    if slopes.shape[-1] < 2 or slopes.max() >= 0:
        return False
    return torch.allclose(slopes, slopes[:, :1].expand_as(slopes))


# ------------------------------------------------------------------------------------------------------------ scale and sinks


def learned_scales(run: Run) -> Iterator[tuple[float | Tensor, SourceLine]]:
    """Every learned factor of vectors or scores, a number or one for each head, `[head, 1, 1]`, with its line."""
    for op, source in run.combined("mul", "div"):
        if not _is_learned(source):
            continue
        factor = 1 / source.output if op.name.startswith("div") else source.output
        scores = run.as_scores(factor, op.output.shape)
        if scores is not None and torch.equal(scores, scores[:1, :, :1, :1].expand_as(scores)):
            yield scores[0, :, :1, :1], op.at
        elif factor.numel() == 1:
            yield float(factor), op.at


def cap_of(run: Run) -> float | None:
    """The number that scores are divided by before a tanh, their softcap; None without one."""
    for op in run.graph.operations:
        factor = _factor_of(op.sources[0]) if op.name == "tanh" else None
        if factor and run.as_scores(op.output, op.output.shape) is not None:
            return 1 / factor
    return None


def sinks(run: Run) -> tuple[Tensor, SourceLine] | None:
    """The sink logit of each head, `[head]`, an extra score column that is equal for all queries; None without one."""
    k_len = run.lengths[1]
    for op, source in run.combined("cat"):
        column = source.output
        if column.shape[-1] != 1 or op.output.shape[-1] != k_len + 1:
            continue
        logits = run.as_scores(column, torch.Size((*op.output.shape[:-1], k_len)))
        if logits is not None and torch.equal(logits, logits[:1, :, :1].expand_as(logits)):
            return logits[0, :, 0, 0], op.at
    return None


# ------------------------------------------------------------------------------------------------------------- rotations


PAIRS: dict[Pairing, str] = {"half": "column j with column j + d/2", "interleaved": "neighbouring columns"}


class Rotation(NamedTuple):
    """A rotation of queries and keys: pair `j` of the first `2 · len(rates)` columns by position · `rates[j]` radians, or by
    position · base^(−2j/d) in all columns without `rates`. `base` is None for rates without one, `pairing` None for no
    rotation."""

    pairing: Pairing | None
    base: float | None
    rates: Tensor | None = None

    @property
    def is_backward(self) -> bool:
        """Whether the angles fall with the position."""
        return self.rates is not None and bool(self.rates[0] < 0)

    def description(self, d_head: int | None) -> str:
        """A description, for heads of this width."""
        assert self.pairing is not None
        n_turned = d_head if self.rates is None else 2 * len(self.rates)
        columns = "" if d_head in (None, n_turned) else f"the first {n_turned} of {d_head} columns, "
        angles = "angles of its own" if self.base is None else f"base {self.base:g}"
        backwards = ", backwards" if self.is_backward else ""
        return f"rotary positions rotate {columns}{PAIRS[self.pairing]}, {angles}{backwards}"


def rotations(run: Run) -> list[Rotation]:
    """Every distinct rotation of queries or keys in a run, by position or by head, backward ones last."""
    distinct: dict[tuple[Pairing, tuple[float, ...]], Rotation] = {}
    pairs = [pair for role in "qk" for pair in combinations(run.vectors(role), 2)]
    for (x, y), pairing, axis in product(pairs, PAIRS, (-2, -3)):
        if x.shape != y.shape or x.shape[-1] % 2:
            continue
        rates = _rates(x.movedim(axis, 0), y.movedim(axis, 0), pairing)
        if rates is not None:
            angles = tuple(rates.round(decimals=4).tolist())
            distinct.setdefault((pairing, angles), Rotation(pairing, _base(rates), rates))
    return sorted(distinct.values(), key=lambda rotation: rotation.is_backward)


def has_tables(run: Run) -> bool:
    """Whether queries or keys are multiplied by tables of numbers, as in rotations."""
    path = {*run.path("q"), *run.path("k")}
    products = run.combined("mul", "addcmul", "matmul", "bmm", "einsum")
    return any(source.output.ndim > 1 and op in path and not op.projects for op, source in products)


def _rates(x: Tensor, y: Tensor, pairing: Pairing) -> Tensor | None:
    """The angle per position by which each rotated pair of columns is turned from x to y, `[position, …, d]`; None if y is no
    such rotation, or its angles do not look like positions: of one sign, and falling from pair to pair."""
    a, b = _pairs(x, pairing), _pairs(y, pairing)
    others = tuple(range(1, a.ndim - 1))
    products, squares = b * a.conj(), a.abs().square()
    rotor = products.sum(others, keepdim=True) / squares.sum(others, keepdim=True)
    steps = rotor[1:] / rotor[:-1]
    is_rotation = (rotor.abs() - 1).abs().max() <= 1e-4
    is_rotation &= (b - rotor * a).abs().max() <= TOLERANCE * x.abs().max()
    if len(steps) < 2 or not is_rotation or (steps - steps[:1]).abs().max() > 1e-4:
        return None
    rates = steps.mean(dim=0).angle().flatten()
    rates = rates[rates.abs() > 1e-6]
    sizes = rates * rates[:1].sign()
    if not len(rates) or sizes.min() < 0 or bool((sizes.diff() > 1e-6).any()):
        return None
    return rates


def _pairs(rows: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        return torch.complex(*rows.chunk(2, dim=-1))
    return torch.complex(rows[..., 0::2], rows[..., 1::2])


def _base(rates: Tensor) -> float | None:
    """Theta if the rates are theta^(−2j/d)."""
    exponents = torch.arange(len(rates), dtype=torch.float64) / len(rates)
    base = 10000.0 if len(rates) == 1 else float(rates[1].abs()) ** -len(rates)
    is_base = torch.allclose(rates.abs(), base**-exponents, rtol=1e-3, atol=1e-7)
    return base if is_base else None


# ----------------------------------------------------------------------------------------------------------------- norms


_NORMS: tuple[Callable[..., Tensor], ...] = (F.rms_norm, F.layer_norm)
_EPS = (0.0, torch.finfo(torch.float32).eps, 1e-6, 1e-5)


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of heads `[batch, head, length, d]`: torch's `rms_norm` or `layer_norm`, then `gain` and `shift`, `[head or 1, 1,
    d]`."""

    function: Callable[..., Tensor]
    eps: float
    gain: Tensor
    shift: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """The normalised heads."""
        return self.function(rows, rows.shape[-1:], eps=self.eps) * self.gain + self.shift

    @property
    def is_unit(self) -> bool:
        """Whether every output vector has length 1."""
        if self.function is not F.rms_norm or self.shift.abs().max() > 1e-6:
            return False
        unit = self.gain.shape[-1] ** -0.5
        return bool((self.gain - unit).abs().max() < 1e-6)


def norm_of(run: Run, role: str) -> Norm | None:
    """The norm of the heads of queries or keys in a run, with all that follows it, such as a gain; None without one."""
    rows = [tensor for tensor in run.vectors(role) if tensor.ndim == 4]
    pairs = [(x, y) for n, x in enumerate(rows) for y in reversed(rows[n + 1 :]) if x.shape == y.shape]
    norms = (_norm(x, y) for x, y in pairs)
    return next((norm for norm in norms if norm is not None), None)


def _norm(x: Tensor, y: Tensor) -> Norm | None:
    """The norm from x to y, `[batch, head, length, d]`; None if there is none."""
    fits = [_fitted(x, y, function, eps) for function, eps in product(_NORMS, _EPS)]
    gaps = [float((norm(x) - y).abs().max()) for norm in fits]
    least = min(gaps)
    if least <= TOLERANCE * y.abs().max():  # not if the rows are 0, and the norm NaN
        return fits[gaps.index(least)]
    return None


def _fitted(x: Tensor, y: Tensor, function: Callable[..., Tensor], eps: float) -> Norm:
    """The norm with the best gain and shift for each head and column, or for all heads if these are equal."""
    normed = function(x, x.shape[-1:], eps=eps)
    u, y = (rows.movedim(1, 0).flatten(1, -2) for rows in (normed, y))
    mean_u, mean_y = u.mean(dim=1, keepdim=True), y.mean(dim=1, keepdim=True)
    covariance = ((u - mean_u) * (y - mean_y)).mean(dim=1, keepdim=True)
    variance = (u - mean_u).square().mean(dim=1, keepdim=True)
    gain = covariance / variance.clamp(min=1e-30)
    shift = mean_y - gain * mean_u
    if torch.allclose(gain, gain[:1].expand_as(gain), rtol=1e-4, atol=1e-7):
        gain, shift = gain.mean(dim=0, keepdim=True), shift.mean(dim=0, keepdim=True)
    return Norm(function, eps, gain, shift)


# ------------------------------------------------------------------------------------------------- around the attention


Before = Callable[[Tensor], Tensor]
After = Callable[[Tensor, Tensor], Tensor]
_ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu")


def around(run: Run, module: nn.Module | None) -> tuple[Before | None, After | None, tuple[Choice, ...]]:
    """What the run does to the input of attention and to its output, as choices: a norm of the module, a residual connection, an
    activation at the end."""
    x, out, last = run.rows.queries, _plain(run.graph.out), run.graph.operations[-1]
    made = [_as_rows(op.output) for op in run.graph.operations if op.output.ndim > 2]
    made = [rows for each in made for rows in (each, each.transpose(0, 1)) if rows.shape == out.shape]
    name, activation = last.name.rstrip("_"), None
    if name in _ACTIVATIONS:
        out, activation = _as_rows(last.inputs[0]), getattr(F, name)
    children = [] if module is None else [*module.modules()][1:]
    norms_of_module = [_of_rows(child) for child in children if is_norm(child)]
    first = next((norm for norm in norms_of_module if _is_among(_applied(norm, x), made)), None)
    for norm, is_residual in product((*norms_of_module, None), (True, False)):
        if is_residual and x.shape != out.shape:
            continue
        if any(_is_among(_applied(norm, rows + x if is_residual else rows), [out]) for rows in made):
            break

    def after(out: Tensor, x: Tensor) -> Tensor:
        summed = out + x if is_residual else out
        normed = summed if norm is None else norm(summed)
        return normed if activation is None else activation(normed)

    shown = [
        (activation is not None, Choice("activation", f"the output passes through {name}")),
        (first is not None, Choice("pre-norm", "the input is normalised first")),
        (norm is not None, Choice("post-norm", "the output is normalised")),
        (is_residual, Choice("residual", "the input is added to the output")),
    ]
    changes_output = is_residual or norm is not None or activation is not None
    return first, after if changes_output else None, tuple(choice for is_so, choice in shown if is_so)


def _as_rows(tensor: Tensor) -> Tensor:
    """The tensor in float64, a map of channels as rows."""
    rows = _plain(tensor)
    return rows.flatten(2).mT if rows.ndim == 4 else rows


def _of_rows(norm: nn.Module) -> Before:
    """A norm as a function of rows, `[batch, length, width]`; a norm of groups of channels takes them first."""
    if isinstance(norm, nn.GroupNorm):
        return lambda rows: norm(rows.mT).mT
    return norm


def _applied(norm: Before | None, rows: Tensor) -> Tensor | None:
    try:
        return rows if norm is None else norm(rows).detach()
    except Exception:  # a norm of heads
        return None


def _is_among(rows: Tensor | None, made: Sequence[Tensor]) -> bool:
    """Whether a run makes these rows."""
    if rows is None:
        return False
    others = [other for other in made if other.shape == rows.shape]
    return any(bool((rows - other).abs().max() <= TOLERANCE * rows.abs().max()) for other in others)
