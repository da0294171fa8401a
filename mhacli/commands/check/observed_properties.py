"""Properties of a user's attention that two recorded runs show: score biases, learned scales, sinks, rotations, norms, and what
stands around the attention.

Of scores and scales only tensors that do not depend on the inputs are read, so that mistakes that depend on inputs stay visible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhacli.attention.mistakes.stages import Pairing, ReferenceInputs
from mhacli.commands.check.inputs import HIDDEN, TOLERANCE, output_for, rows_of
from mhacli.usercode.call.user_attention import UserAttention, drawer_of
from mhacli.usercode.operations import watch
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import is_norm
from mhacli.usercode.target import Choice
from mhacli.usercode.types import Operation

Step = tuple[Operation, Operation]
"""The same operation in both runs."""


@dataclass(frozen=True)
class PairedRuns:
    """The operations of two runs with inputs of the same sizes; `rows` and `output` are those of the first."""

    steps: tuple[Step, ...]
    rows: ReferenceInputs
    output: Tensor
    batch: int
    q_len: int
    k_len: int

    @cached_property
    def learned(self) -> frozenset[int]:
        """The ids of tensors in the first run that are parameters or computed from parameters."""
        ids: set[int] = set()
        for op, _ in self.steps:
            ids |= {id(t) for t in op.inputs if isinstance(t, nn.Parameter)}
            if any(id(t) in ids for t in op.inputs):
                ids.add(id(op.output))
        return frozenset(ids)

    @cached_property
    def moving(self) -> list[tuple[int, Step]]:
        """The numbered steps whose output depends on the inputs."""
        return [(n, step) for n, step in enumerate(self.steps) if not _same(step[0].output, step[1].output)]

    def as_scores(self, tensor: Tensor, shape: torch.Size) -> Tensor | None:
        """A tensor broadcast to scores as `[batch, head, query, key]`; None if the shape does not fit scores."""
        key_axes = [axis for axis, size in enumerate(shape) if size == self.k_len]
        if not key_axes or tensor.ndim > len(shape):
            return None
        key = key_axes[-1]
        query_axes = [axis for axis, size in enumerate(shape) if size == self.q_len and axis != key]
        if not query_axes or shape.numel() % (self.batch * self.q_len * self.k_len):
            return None
        scores = tensor.detach().to("cpu", torch.float64).expand(shape).movedim((query_axes[-1], key), (-2, -1))
        return scores.reshape(self.batch, -1, self.q_len, self.k_len)

    def uses(self, n_parameters: int) -> bool:
        """Whether the run uses at least this number of parameters."""
        return len({id(t) for op, _ in self.steps for t in op.inputs if isinstance(t, nn.Parameter)}) >= n_parameters


def runs_of(
    subject: UserAttention, seed: int, *, other: bool, q_len: int | None = None, k_len: int | None = None
) -> PairedRuns:
    """Two recorded runs of a subject, with separate keys if `other`. Raises ValueError if the operations differ, and what the
    subject raises."""
    draws = [drawer_of(subject, seed + n).inputs(with_context=other, q_len=q_len, k_len=k_len) for n in range(2)]
    (output, first), (_, second) = (watch(partial(output_for, subject, draw), subject.built.files) for draw in draws)
    if [_kind(op) for op in first] != [_kind(op) for op in second]:
        raise ValueError("the two runs have different operations")
    rows = rows_of(subject, draws[0])
    sizes = rows.queries.shape[0], rows.queries.shape[-2], rows.keys.shape[-2]
    return PairedRuns(tuple(zip(first, second, strict=True)), rows, output, *sizes)


def _kind(operation: Operation) -> tuple[object, ...]:
    return operation.name, operation.line, operation.output.shape, *(t.shape for t in operation.inputs)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    if a is b or a.shape != b.shape or not a.is_floating_point():
        return a is b or bool(a.shape == b.shape and torch.equal(a, b))
    return bool(torch.equal(a, b)) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _fixed(step: Step) -> list[bool]:
    """For each input of a step, whether it is equal in both runs."""
    return [_same(a, b) for a, b in zip(step[0].inputs, step[1].inputs, strict=True)]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


# ------------------------------------------------------------------------------------------------------------ score bias


_FUSED = "scaled_dot_product_attention"


def score_bias(
    subject: UserAttention, seed: int, runs: PairedRuns
) -> tuple[Callable[[ReferenceInputs], Tensor | None], SourceLine] | None:
    """The score bias `[1, head, query, key]` for inputs of any length, which raises what the subject raises, and the line that
    adds it; None without one."""
    added = bias_terms(runs)
    if not added:
        return None

    @functools.cache
    def at_lengths(is_own: bool, q_len: int, k_len: int) -> Tensor | None:
        terms = [term for term, _ in bias_terms(runs_of(subject, seed, other=not is_own, q_len=q_len, k_len=k_len))]
        return torch.stack(terms).sum(dim=0) if terms else None

    def bias(rows: ReferenceInputs) -> Tensor | None:
        return at_lengths(rows.keys is rows.queries, rows.queries.shape[-2], rows.keys.shape[-2])

    return bias, added[0][1]


def bias_terms(runs: PairedRuns) -> list[tuple[Tensor, SourceLine]]:
    """Every bias added to scores in a run, `[1, head, query, key]`, scaled as it reaches the softmax, with its line; masks are
    left out. A bias that its code mistakes is returned as it was meant: as a penalty for distance, with its heads in order."""
    found = []
    for number, step in runs.moving:
        op = step[0]
        index, factor, shape = _addend(step)
        tensor = None if index is None else op.inputs[index]
        if tensor is None or tensor.numel() == 1 or not tensor.is_floating_point():
            continue
        bias = runs.as_scores(tensor, shape)
        if bias is None:
            continue
        hidden = bias < HIDDEN
        if bias[~hidden].unique().numel() <= 2:
            continue
        bias = _in_order(runs, bias.masked_fill(hidden, 0.0) * factor * _scaled_later(runs, number))
        is_reversed = id(tensor) not in runs.learned and _rewards_distance(bias, ~hidden[0, 0])
        found.append((-bias if is_reversed else bias, op.at))
    return found


def _addend(step: Step) -> tuple[int | None, float, torch.Size]:
    """The index of the added input, its factor, and the shape of the sum; index None if the step is no such sum."""
    op, fixed = step[0], _fixed(step)
    name = op.name.rstrip("_")
    if name in ("add", "sub") and len(fixed) == 2 and sum(fixed) == 1:
        index, sign = fixed.index(True), -1.0 if name == "sub" else 1.0
        factor = sign * _number(op, "alpha") if index == 1 else 1.0
        return None if (name, index) == ("sub", 0) else index, factor, op.output.shape
    if name == "baddbmm" and len(fixed) == 3 and fixed[0]:
        return 0, _number(op, "beta"), op.output.shape
    if name == _FUSED and len(fixed) == 4 and fixed[3]:
        q, k = op.inputs[:2]
        return 3, 1.0, torch.Size((*q.shape[:-1], k.shape[-2]))
    return None, 0.0, op.output.shape


def _number(op: Operation, name: str) -> float:
    value = op.arguments.get(name, 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def _scaled_later(runs: PairedRuns, number: int) -> float:
    """The factor that multiplies the result of a step before any other operation."""
    factor, current = 1.0, runs.steps[number][0].output
    for op, _ in runs.steps[number + 1 :]:
        if not any(t is current for t in op.inputs):
            continue
        multiplier = op.arguments.get("other", op.arguments.get("1"))
        if op.name.rstrip("_") in ("mul", "div") and isinstance(multiplier, int | float):
            factor = factor * multiplier if op.name.startswith("mul") else factor / multiplier
        elif op.name not in ("float", "to", "type_as", "view", "reshape", "contiguous"):
            break
        current = op.output
    return factor


def _in_order(runs: PairedRuns, bias: Tensor) -> Tensor:
    """The bias `[batch, head, query, key]` as `[1, head, query, key]`, with heads and sequences in the intended order. Raises
    ValueError if it differs between sequences."""
    n_heads = bias.shape[1]
    if not torch.equal(bias, bias[:1].expand_as(bias)):
        by_head = bias.reshape(n_heads, runs.batch, runs.q_len, runs.k_len)  # sequences vary faster than heads
        if not torch.equal(by_head, by_head[:, :1].expand_as(by_head)):
            raise ValueError("the bias differs between sequences")
        return by_head[None, :, 0]
    plane = (n_heads, runs.q_len, runs.k_len)
    for op, _ in runs.steps:  # a learned table with heads last, reshaped to heads first without a transpose
        is_reshaped = op.name in ("view", "reshape") and id(op.inputs[0]) in runs.learned and n_heads > 1
        is_plane = op.output.shape[-3:] == plane and op.inputs[0].shape != op.output.shape
        if is_reshaped and is_plane and op.inputs[0].shape[-1] == n_heads:
            return bias[0].reshape(*plane[1:], n_heads).permute(2, 0, 1)[None]
    return bias[:1]


def _rewards_distance(bias: Tensor, visible: Tensor) -> bool:
    """Whether a fixed bias increases linearly with the distance to earlier visible keys, in every head."""
    slopes = bias[0, :, -1][:, visible[-1]].diff(dim=-1)  # of the last query
    if slopes.shape[-1] < 2:
        return False
    return bool((slopes < 0).all() and torch.allclose(slopes, slopes[:, :1].expand_as(slopes)))


# ------------------------------------------------------------------------------------------------------------ scale and sinks


def learned_scales(runs: PairedRuns) -> Iterator[tuple[float | Tensor, SourceLine]]:
    """Every learned factor of vectors or scores, a number or one for each head, `[head, 1, 1]`, with its line."""
    for _, step in runs.moving:
        op, fixed = step[0], _fixed(step)
        if op.name.rstrip("_") not in ("mul", "div") or len(fixed) != 2 or sum(fixed) != 1:
            continue
        factor = op.inputs[fixed.index(True)]
        scores = runs.as_scores(factor, op.output.shape) if id(factor) in runs.learned else None
        if scores is not None and torch.equal(scores, scores[:1, :, :1, :1].expand_as(scores)):
            scale = scores[0, :, :1, :1]
            yield (scale if op.name.startswith("mul") else 1 / scale), op.at
        elif id(factor) in runs.learned and factor.numel() == 1:
            yield (float(factor) if op.name.startswith("mul") else 1 / float(factor)), op.at


def sinks(runs: PairedRuns) -> tuple[Tensor, SourceLine] | None:
    """The sink logit of each head, `[head]`, an extra score column that is equal for all queries; None without one."""
    for _, step in runs.moving:
        op, fixed = step[0], _fixed(step)
        if op.name != "cat" or len(fixed) != 2 or sum(fixed) != 1 or op.output.shape[-1] != runs.k_len + 1:
            continue
        column, scores = op.inputs[fixed.index(True)], op.inputs[fixed.index(False)]
        if column.shape[-1] != 1 or column.shape[:-1] != scores.shape[:-1]:
            continue
        logits = runs.as_scores(column, scores.shape)
        if logits is not None and torch.equal(logits, logits[:1, :, :1].expand_as(logits)):
            return logits[0, :, 0, 0], op.at
    return None


# ------------------------------------------------------------------------------------------------------------- rotations


PAIRS: dict[Pairing, str] = {"half": "column j with column j + d/2", "interleaved": "neighbouring columns"}
_MULTIPLYING = ("mul", "mul_", "addcmul", "addcmul_", "matmul", "bmm", "einsum")


class Rotation(NamedTuple):
    """A rotation of queries and keys: pair `j` of the first `2 · len(rates)` columns by position · `rates[j]` radians, or by
    position · base^(−2j/d) in all columns without `rates`. `base` is None for rates without one, `pairing` None for no
    rotation."""

    pairing: Pairing | None
    base: float | None
    rates: Tensor | None = None

    def description(self, d_head: int | None) -> str:
        """A description, for heads of this width."""
        assert self.pairing is not None
        n_turned = d_head if self.rates is None else 2 * len(self.rates)
        columns = "" if d_head in (None, n_turned) else f"the first {n_turned} of {d_head} columns, "
        angles = "angles of its own" if self.base is None else f"base {self.base:g}"
        backwards = ", backwards" if self.rates is not None and self.rates[0] < 0 else ""
        return f"rotary positions rotate {columns}{PAIRS[self.pairing]}, {angles}{backwards}"


def rotations(runs: PairedRuns) -> list[Rotation]:
    """Every distinct rotation in a run, by position or by another axis, backward ones last."""
    distinct: dict[tuple[object, ...], Rotation] = {}
    for before, after in _pairs_of_equal_norm(runs):
        rotation = _rotation(runs, before, after)
        if rotation is not None and rotation.rates is not None:
            key = (rotation.pairing, *(round(rate, 4) for rate in rotation.rates.tolist()))
            distinct.setdefault(key, rotation)
    return sorted(distinct.values(), key=lambda rotation: rotation.rates is not None and bool(rotation.rates[0] < 0))


def has_tables(runs: PairedRuns) -> bool:
    """Whether inputs are multiplied by position-dependent numbers, as in rotations, or by complex numbers."""
    for _, step in runs.moving:
        if step[0].name in _MULTIPLYING:
            tables = [t for t, is_fixed in zip(step[0].inputs, _fixed(step), strict=True) if is_fixed]
            if any(t.is_complex() or (t.ndim > 1 and {runs.q_len, runs.k_len} & {*t.shape[:-1]}) for t in tables):
                return True
    return False


def _pairs_of_equal_norm(runs: PairedRuns) -> Iterator[tuple[Step, Step]]:
    """Pairs of steps whose outputs have vectors of equal length but different values."""
    lengths = {runs.q_len, runs.k_len}
    steps = [
        step for _, step in runs.moving
        if (t := step[0].output).is_floating_point() and t.ndim in (3, 4) and t.shape[-1] % 2 == 0
        and lengths & {*t.shape[:-1]}
    ]  # fmt: skip
    norms_of = [_plain(step[0].output).norm(dim=-1) for step in steps]
    for n, after in enumerate(steps):
        for m in range(n - 1, -1, -1):
            is_alike = steps[m][0].output.shape == after[0].output.shape
            if is_alike and torch.allclose(norms_of[m], norms_of[n], rtol=1e-4):
                yield steps[m], after


def _rotation(runs: PairedRuns, before: Step, after: Step) -> Rotation | None:
    """The rotation from one output to the next, the same in both runs; None if there is none."""
    x, y = (_plain(step[0].output) for step in (before, after))
    changed = ((x - y).abs() > TOLERANCE * x.abs().max()).flatten(0, -2).any(dim=0).nonzero().flatten()
    if not changed.numel():
        return None
    n_changed = int(changed[-1]) + 1 + (int(changed[-1]) + 1) % 2
    axes = sorted(range(x.ndim - 1), key=lambda axis: x.shape[axis] not in (runs.q_len, runs.k_len))
    for n_rotated in dict.fromkeys((x.shape[-1], n_changed)):
        for pairing in PAIRS:
            for axis in axes:
                rotor = _rotor(x, y, axis, n_rotated, pairing)
                again = None if rotor is None else _rotor(before[1].output, after[1].output, axis, n_rotated, pairing)
                rates = None if rotor is None or again is None else _rates(rotor)
                if rates is not None and rotor is not None and again is not None and _near(rotor, again):
                    return Rotation(pairing, _base(rates), rates)
    return None


def _near(rotor: Tensor, again: Tensor) -> bool:
    return bool((rotor - again).abs().max() <= 1e-3)


def _rotor(x: Tensor, y: Tensor, axis: int, n_rotated: int, pairing: Pairing) -> Tensor | None:
    """The complex factor `[position, pair]`, of size one, for each pair of columns; None if it differs between heads or
    sequences."""
    x, y = (_plain(t).movedim(axis, 0) for t in (x, y))
    if not torch.allclose(x[..., n_rotated:], y[..., n_rotated:], rtol=TOLERANCE):
        return None
    a, b = _pairs(x[..., :n_rotated], pairing), _pairs(y[..., :n_rotated], pairing)
    other_axes = tuple(range(1, a.ndim - 1))
    rotor = (b * a.conj()).sum(other_axes, keepdim=True) / a.abs().square().sum(other_axes, keepdim=True)
    is_rotation = (rotor.abs() - 1).abs().max() <= 1e-4 and (b - rotor * a).abs().max() <= TOLERANCE * x.abs().max()
    return rotor.flatten(0, -2) if is_rotation else None


def _pairs(rows: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        return torch.complex(*rows.chunk(2, dim=-1))
    return torch.complex(rows[..., 0::2], rows[..., 1::2])


def _rates(rotor: Tensor) -> Tensor | None:
    """The angle per position of each pair; None if it varies with position or does not look like positions: falling from pair
    to pair, of one sign, and not constant."""
    n_steps = len(rotor) - 1
    if n_steps < 2:
        return None
    steps = rotor[1:] / rotor[:-1]
    if (steps - steps[:1]).abs().max() > 1e-4:
        return None
    rates = steps[0].angle()
    remainder = rotor[-1] / rotor[0] * torch.polar(torch.ones_like(rates), -rates * n_steps)
    rates = rates + remainder.angle() / n_steps
    magnitudes = rates * rates[0].sign()
    is_falling = bool((magnitudes > -1e-6).all() and (magnitudes.diff() < 1e-6).all() and magnitudes[0] > 1e-6)
    is_constant = len(magnitudes) > 1 and bool(magnitudes[0] - magnitudes[-1] < 1e-6)
    return rates if is_falling and not is_constant else None


def _base(rates: Tensor) -> float | None:
    """Theta if the rates are theta^(−2j/d)."""
    pair = torch.arange(len(rates), dtype=torch.float64)
    base = 10000.0 if len(rates) == 1 else float(rates[1].abs()) ** -len(rates)
    return base if torch.allclose(rates.abs(), base ** -(pair / len(rates)), rtol=1e-3, atol=1e-7) else None


# ----------------------------------------------------------------------------------------------------------------- norms


_ROOTS = frozenset((
    "normalize", "rms_norm", "layer_norm", "norm", "linalg_norm", "linalg_vector_norm", "rsqrt", "sqrt", "var", "std", "pow",
))  # fmt: skip
"""One of these operations is part of every norm."""
_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps)


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of heads `[batch, head, length, d]`: divides by the root mean square, or with `spread` subtracts the mean and
    divides by the standard deviation; then applies `gain` and `shift`, `[head or 1, 1, d]`. `source` is the normalised input
    observed in a run."""

    kind: Literal["length", "spread"]
    eps: float
    gain: Tensor
    shift: Tensor
    source: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """The normalised heads."""
        return _normed(rows, self.kind, self.eps) * self.gain + self.shift

    @property
    def is_unit(self) -> bool:
        """Whether every output vector has length 1."""
        distance = (self.gain - self.gain.shape[-1] ** -0.5).abs().max()
        return self.kind == "length" and bool(distance < 1e-6 and self.shift.abs().max() <= 1e-6)

    def is_of(self, rows: Tensor) -> bool:
        """Whether this is the input observed in the run."""
        return rows.shape == self.source.shape and torch.allclose(rows, self.source, rtol=1e-4, atol=1e-5)

    def is_like(self, other: Norm) -> bool:
        """Whether the norms are equal."""
        if self.kind != other.kind or self.gain.shape != other.gain.shape:
            return False
        is_alike = torch.allclose(self.gain, other.gain, rtol=1e-4)
        return is_alike and torch.allclose(self.shift, other.shift, rtol=1e-4, atol=1e-6)


def distinct_norms(norms: Sequence[Norm]) -> list[Norm]:
    """The distinct norms, whatever their inputs."""
    return [norm for n, norm in enumerate(norms) if not any(norm.is_like(other) for other in norms[:n])]


def norms(runs: PairedRuns) -> list[Norm]:
    """Every norm over the last axis of heads in a run. Empty if no operation takes a root."""
    if not any(op.name.rstrip("_") in _ROOTS for _, (op, _) in runs.moving):
        return []
    heads = [
        (x, again) for _, step in runs.moving
        if (x := _heads(runs, step[0].output)) is not None and (again := _heads(runs, step[1].output)) is not None
    ]  # fmt: skip
    pairs = ((before, after) for n, after in enumerate(heads) for before in heads[:n])
    return [norm for x, y in pairs if x[0].shape == y[0].shape and (norm := _norm(x, y)) is not None]


def _heads(runs: PairedRuns, tensor: Tensor) -> Tensor | None:
    """A tensor as `[batch, head, length, d]`; None if the shape does not fit."""
    if not tensor.is_floating_point() or tensor.ndim != 4 or tensor.shape[0] != runs.batch or tensor.shape[-1] < 2:
        return None
    length_axes = [axis for axis in (1, 2) if tensor.shape[axis] in (runs.q_len, runs.k_len)]
    return _plain(tensor).movedim(length_axes[-1], 2) if length_axes else None


def _norm(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Norm | None:
    """The norm from one output to the next, the same in both runs; None if there is none."""
    (x, second_x), (y, second_y) = before, after
    kinds: tuple[Literal["length", "spread"], ...] = ("length", "spread")
    for kind in kinds:
        if _gap(_fitted(x, y, kind, 0.0), x, y) > 100 * TOLERANCE:
            continue
        best = min((_fitted(x, y, kind, eps) for eps in _EPS), key=lambda norm: _gap(norm, x, y))
        if max(_gap(best, x, y), _gap(best, second_x, second_y)) <= TOLERANCE:
            return best
    return None


def _gap(norm: Norm, x: Tensor, y: Tensor) -> float:
    return float((norm(x) - y).abs().max() / y.abs().max().clamp(min=1e-30))


def _fitted(x: Tensor, y: Tensor, kind: Literal["length", "spread"], eps: float) -> Norm:
    """The norm with the best gain and shift for each head and column, or for all heads if these are equal."""
    u = _normed(x, kind, eps)
    mean_u, mean_y = (t.mean((0, 2), keepdim=True) for t in (u, y))
    gain = ((u - mean_u) * (y - mean_y)).sum((0, 2)) / (u - mean_u).square().sum((0, 2)).clamp(min=1e-30)
    shift = mean_y[0, :, 0] - gain * mean_u[0, :, 0]
    if torch.allclose(gain, gain[:1].expand_as(gain), rtol=1e-4, atol=1e-7):
        gain, shift = gain.mean(0, keepdim=True), shift.mean(0, keepdim=True)
    shift = torch.where(shift.abs() < 1e-6, 0.0, shift)
    return Norm(kind, eps, gain[:, None], shift[:, None], x)


def _normed(rows: Tensor, kind: str, eps: float) -> Tensor:
    rows = rows - rows.mean(-1, keepdim=True) if kind == "spread" else rows
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()


# ------------------------------------------------------------------------------------------------- around the attention


Before = Callable[[Tensor], Tensor]
After = Callable[[Tensor, Tensor], Tensor]
_ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "selu", "softplus", "mish")
_SHAPE_OF_ACTIVATION = ("approximate", "negative_slope", "alpha", "beta", "threshold")


def around(runs: PairedRuns, module: nn.Module | None) -> tuple[Before | None, After | None, tuple[Choice, ...]]:
    """What the run does to the input of attention and to its output, as choices: a norm of the module, a residual connection, an
    activation at the end."""
    x, target, activation, choices = runs.rows.queries, runs.output, None, []
    made = [rows for _, (op, _) in runs.moving if (rows := _as_rows(op.output, target.shape)) is not None]
    norms_of_module = [child for child in ([] if module is None else [*module.modules()][1:]) if is_norm(child)]
    last = runs.moving[-1][1][0]
    if last.name.rstrip("_") in _ACTIVATIONS and (inner := _as_rows(last.inputs[0], target.shape)) is not None:
        options = {name: value for name, value in last.arguments.items() if name in _SHAPE_OF_ACTIVATION}
        activation, target = partial(_function(last.name), **options), inner
        choices.append(Choice("activation", f"the output passes through {last.name.rstrip('_')}"))
    first = next((norm for norm in norms_of_module if _is_among(_applied(norm, x), made)), None)
    for norm, is_residual in product((*norms_of_module, None), (True, False)):
        if is_residual and x.shape != target.shape:
            continue
        if any(_is_among(_applied(norm, rows + x if is_residual else rows), [target]) for rows in made):
            break
    choices += [Choice("pre-norm", "the input is normalised first")] if first is not None else []
    choices += [Choice("post-norm", "the output is normalised")] if norm is not None else []
    choices += [Choice("residual", "the input is added to the output")] if is_residual else []

    def after(out: Tensor, x: Tensor) -> Tensor:
        summed = out + x if is_residual else out
        normed = summed if norm is None else norm(summed)
        return normed if activation is None else activation(normed)

    return first, after if is_residual or norm or activation else None, tuple(choices)


def _function(name: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, name.rstrip("_"))
    return function


def _as_rows(tensor: Tensor, shape: torch.Size) -> Tensor | None:
    """A tensor as rows of this shape: as it is, with the length first, or as a map of channels; None if it does not fit."""
    plain = _plain(tensor) if tensor.is_floating_point() else torch.empty(0)
    forms = [
        plain,
        plain.transpose(0, 1) if plain.ndim > 1 else plain,
        plain.flatten(2).mT if plain.ndim == 4 else plain,
    ]
    return next((form for form in forms if form.shape == shape), None)


def _applied(norm: nn.Module | None, rows: Tensor) -> Tensor | None:
    try:
        return rows if norm is None else norm(rows).detach()
    except Exception:  # a norm of heads
        return None


def _is_among(rows: Tensor | None, made: Sequence[Tensor]) -> bool:
    """Whether a run makes these rows."""
    if rows is None:
        return False
    bound = TOLERANCE * float(rows.abs().max())
    return any(rows.shape == other.shape and bool((rows - other).abs().max() <= bound) for other in made)
