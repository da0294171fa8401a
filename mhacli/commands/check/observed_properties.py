"""Properties of a user's attention that recorded runs show and no name states: score biases, learned scales, sinks, rotations,
norms.

Only tensors that do not depend on the inputs are read, so that mistakes that depend on inputs stay visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes.stages import Pairing, ReferenceInputs
from mhacli.commands.check.inputs import HIDDEN, TOLERANCE, OperationPair, PairedRuns, Unreadable, runs_of
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.process import SourceLine
from mhacli.usercode.types import Operation


@dataclass(frozen=True)
class ObservedProperties:
    """The properties read from runs, None where absent. `has_tables`: inputs are multiplied by position-dependent numbers;
    `rotations` are the rotations among these. `norms` apply to heads; `uses_all`: every parameter of the module is used. `rows`
    are the inputs of the run."""

    bias: ScoreBias | None = None
    temperature: Temperature | None = None
    sinks: Sinks | None = None
    rotations: tuple[Rotation, ...] = ()
    has_tables: bool = False
    norms: tuple[Norm, ...] = ()
    uses_all: bool = True
    rows: ReferenceInputs | None = None


NO_PROPERTIES = ObservedProperties()


def observed_properties(subject: UserAttention, seed: int) -> ObservedProperties:
    """The properties of a subject, from self-attention, or from attention to a context if that cannot be recorded."""
    for other in (False, True) if subject.takes_context else (False,):
        try:
            runs = runs_of(subject, seed, other=other)
            return _read(subject, seed, runs, is_own=not other)
        except Exception:  # the call cannot be recorded, or its operations depend on the inputs
            continue
    return NO_PROPERTIES


def _read(subject: UserAttention, seed: int, runs: PairedRuns, *, is_own: bool) -> ObservedProperties:
    module = subject.built.module
    return ObservedProperties(
        score_bias(subject, seed, runs, is_own=is_own),
        temperature(runs),
        sinks(runs),
        tuple(rotations(runs)),
        has_tables(runs),
        tuple(norms(runs)),
        module is None or uses_all_parameters(runs, len(list(module.parameters()))),
        runs.rows,
    )


# ------------------------------------------------------------------------------------------------------------ score bias


_FUSED = "scaled_dot_product_attention"


class ScoreTerm(NamedTuple):
    """A bias term as intended, `[1, head, query, key]`, the line that adds it, and whether it is learned."""

    bias: Tensor
    at: SourceLine
    is_learned: bool


@dataclass
class ScoreBias:
    """The score bias, for inputs of any length. `is_learned`: it is computed from parameters.

    Some mistakes affect only the bias: it may reward distance, have its head axis last, or follow another batch order than the
    scores. They are undone here, so that the catalogue can find them.
    """

    subject: UserAttention
    seed: int
    at: SourceLine
    is_learned: bool
    cache: dict[tuple[bool, int, int], Tensor | None] = field(default_factory=dict)

    def __call__(self, rows: ReferenceInputs) -> Tensor | None:
        """The bias `[1, head, query, key]` for these inputs, None without bias. Raises what the subject raises."""
        is_own = rows.keys is rows.queries
        key = (is_own, rows.queries.shape[-2], rows.keys.shape[-2])
        if key not in self.cache:
            runs = runs_of(self.subject, self.seed, other=not is_own, q_len=key[1], k_len=key[2])
            self.cache[key] = _sum_of(terms(runs))
        return self.cache[key]


def score_bias(subject: UserAttention, seed: int, runs: PairedRuns, *, is_own: bool) -> ScoreBias | None:
    """The score bias in these runs, None without one. Raises `Unreadable` if it differs between sequences."""
    bias_terms = terms(runs)
    if not bias_terms:
        return None
    bias = ScoreBias(subject, seed, bias_terms[0].at, any(term.is_learned for term in bias_terms))
    bias.cache[is_own, runs.q_len, runs.k_len] = _sum_of(bias_terms)
    return bias


def _sum_of(bias_terms: Sequence[ScoreTerm]) -> Tensor | None:
    return torch.stack([term.bias for term in bias_terms]).sum(dim=0) if bias_terms else None


def terms(runs: PairedRuns) -> list[ScoreTerm]:
    """Every bias added to scores in a run."""
    bias_terms = []
    for number, step in runs.moving():
        added = _added(runs, number, step)
        if added is not None:
            bias_terms.append(added)
    return bias_terms


def _added(runs: PairedRuns, number: int, step: OperationPair) -> ScoreTerm | None:
    """The bias that a step adds to scores, scaled as it reaches the softmax; None if the step adds none, or a mask."""
    op = step.first
    input_idx, factor, shape = _addend(step)
    if input_idx is None:
        return None
    tensor = op.inputs[input_idx]
    bias = runs.as_scores(tensor, shape) if tensor.is_floating_point() else None
    if bias is None or tensor.numel() == 1:
        return None
    hidden = (bias < HIDDEN) | _weak_triangle(bias)
    if bias[~hidden].unique().numel() <= 2:
        return None
    visible = ~hidden[0, 0]
    bias = _in_order(runs, bias.masked_fill(hidden, 0.0) * factor * _scaled_later(runs, number))
    is_learned = runs.is_learned(tensor)
    is_reversed = not is_learned and _rewards_distance(bias, visible)
    return ScoreTerm(-bias if is_reversed else bias, op.at, is_learned)


def _weak_triangle(bias: Tensor) -> Tensor:
    """The later keys if a triangle of one lower number hides exactly them."""
    later = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1 + bias.shape[-1] - bias.shape[-2]).expand(bias.shape)
    is_weak = later.any() and bias[later].unique().numel() == 1 and bool(bias[later][0] < bias[~later].min() - 1)
    return later if is_weak else torch.zeros_like(later)


def _addend(step: OperationPair) -> tuple[int | None, float, torch.Size]:
    """The index of the added input, its factor, and the shape of the sum; index None if the step is no such sum."""
    op, fixed = step.first, step.fixed_inputs()
    if op.name in ("add", "add_", "sub", "sub_") and len(fixed) == 2 and sum(fixed) == 1:
        input_idx = fixed.index(True)
        if op.name.startswith("sub") and input_idx == 0:
            return None, 0.0, op.output.shape
        sign = -1.0 if op.name.startswith("sub") else 1.0
        return input_idx, sign * (_number(op, "alpha") if input_idx == 1 else 1.0), op.output.shape
    if op.name == "baddbmm" and len(fixed) == 3 and fixed[0]:
        return 0, _number(op, "beta"), op.output.shape
    if op.name == _FUSED and len(fixed) == 4 and fixed[3]:
        q, k = op.inputs[:2]
        return 3, 1.0, torch.Size((*q.shape[:-1], k.shape[-2]))
    return None, 0.0, op.output.shape


def _number(op: Operation, name: str) -> float:
    value = op.arguments.get(name, 1.0)
    return float(value) if isinstance(value, int | float) else 1.0


def _scaled_later(runs: PairedRuns, number: int) -> float:
    """The factor that multiplies the result of a step before any other operation."""
    factor, current = 1.0, runs.steps[number].first.output
    for op, _ in runs.steps[number + 1 :]:
        if not any(t is current for t in op.inputs):
            continue
        multiplier = op.arguments.get("other", op.arguments.get("1"))
        if len(op.inputs) == 2 and op.inputs[0] is current and op.inputs[1].numel() == 1:
            multiplier = op.inputs[1].item()
        if op.name.rstrip("_") in ("mul", "div") and isinstance(multiplier, int | float):
            factor = factor * multiplier if op.name.startswith("mul") else factor / multiplier
        elif op.name not in ("float", "to", "type_as", "view", "reshape", "contiguous"):
            break
        current = op.output
    return factor


def _in_order(runs: PairedRuns, bias: Tensor) -> Tensor:
    """The bias `[batch, head, query, key]` as `[1, head, query, key]`, with heads and sequences in the intended order."""
    n_heads = bias.shape[1]
    if not torch.equal(bias, bias[:1].expand_as(bias)):
        by_head = bias.reshape(n_heads, runs.batch, runs.q_len, runs.k_len)  # sequences vary faster than heads
        if not torch.equal(by_head, by_head[:, :1].expand_as(by_head)):
            raise Unreadable
        return by_head[None, :, 0]
    if n_heads > 1 and any(_reinterprets_heads(runs, step.first, n_heads) for step in runs.steps):
        return bias[0].reshape(runs.q_len, runs.k_len, n_heads).permute(2, 0, 1)[None]
    return bias[:1]


def _reinterprets_heads(runs: PairedRuns, op: Operation, n_heads: int) -> bool:
    """Whether a learned table with heads last is reshaped to heads first without a transpose."""
    if op.name not in ("view", "reshape") or not runs.is_learned(op.inputs[0]):
        return False
    before, after = op.inputs[0].shape, op.output.shape
    return bool(before[-1] == n_heads and before != after and tuple(after[-3:]) == (n_heads, runs.q_len, runs.k_len))


def _rewards_distance(bias: Tensor, visible: Tensor) -> bool:
    """Whether a fixed bias increases linearly with the distance to earlier visible keys, in every head."""
    q_len, k_len = bias.shape[-2:]
    distance = (torch.arange(q_len)[:, None] + k_len - q_len - torch.arange(k_len)).to(bias)
    past = visible & (distance >= 0)
    if past[-1].sum() < 3:
        return False
    last = bias[0, :, -1][:, past[-1]]  # [head, key] of the last query
    slopes = last.diff(dim=-1)
    return bool((slopes < 0).all() and torch.allclose(slopes, slopes[:, :1].expand_as(slopes)))


# ------------------------------------------------------------------------------------------------------------ scale and sinks


class Temperature(NamedTuple):
    """A learned factor for the scores of each head, `[head, 1, 1]`."""

    scale: Tensor
    at: SourceLine


def temperature(runs: PairedRuns) -> Temperature | None:
    """The learned score factor of each head; None without one."""
    for _, step in runs.moving():
        op, fixed = step.first, step.fixed_inputs()
        if op.name.rstrip("_") not in ("mul", "div") or len(fixed) != 2 or sum(fixed) != 1:
            continue
        input_idx = fixed.index(True)
        scores_shaped = (
            runs.as_scores(op.inputs[input_idx], op.output.shape) if runs.is_learned(op.inputs[input_idx]) else None
        )
        if scores_shaped is None or not torch.equal(
            scores_shaped, scores_shaped[:1, :, :1, :1].expand_as(scores_shaped)
        ):
            continue
        scale = scores_shaped[0, :, :1, :1]
        return Temperature(scale if op.name.startswith("mul") else 1 / scale, op.at)
    return None


class Sinks(NamedTuple):
    """A sink logit of each head, `[head]`, which takes part in the softmax without a key."""

    logits: Tensor
    at: SourceLine


def sinks(runs: PairedRuns) -> Sinks | None:
    """The extra score column, equal for all queries; None without one."""
    for _, step in runs.moving():
        op, fixed = step.first, step.fixed_inputs()
        if op.name != "cat" or len(fixed) != 2 or sum(fixed) != 1 or op.output.shape[-1] != runs.k_len + 1:
            continue
        input_idx = fixed.index(True)
        column, scores = op.inputs[input_idx], op.inputs[1 - input_idx]
        if column.shape[-1] != 1 or scores.shape[-1] != runs.k_len or column.shape[:-1] != scores.shape[:-1]:
            continue
        scores_shaped = runs.as_scores(column, scores.shape)
        if scores_shaped is not None and torch.equal(scores_shaped, scores_shaped[:1, :, :1].expand_as(scores_shaped)):
            return Sinks(scores_shaped[0, :, 0, 0], op.at)
    return None


# ------------------------------------------------------------------------------------------------------------- rotations


_PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
_MULTIPLYING = ("mul", "mul_", "addcmul", "addcmul_", "matmul", "bmm", "einsum")


class Rotation(NamedTuple):
    """A rotation of the first `2 · len(rates)` columns: pair `j` by position · `rates[j]` radians. `base` is theta if the rates
    are theta^(−2j/d), else None."""

    pairing: Pairing
    rates: Tensor
    base: float | None


def rotations(runs: PairedRuns) -> list[Rotation]:
    """Every distinct rotation by position in a run, backward ones last. Empty without position tables."""
    if not has_tables(runs):
        return []
    distinct: dict[tuple[object, ...], Rotation] = {}
    for before, after in _pairs_of_equal_norm(runs):
        rotation = _rotation(runs, before, after)
        if rotation is not None:
            distinct.setdefault((rotation.pairing, *(round(rate, 4) for rate in rotation.rates.tolist())), rotation)
    return sorted(distinct.values(), key=lambda rotation: bool(rotation.rates[0] < 0))


def has_tables(runs: PairedRuns) -> bool:
    """Whether inputs are multiplied by position-dependent numbers, as in rotations, or by complex numbers."""
    for _, (op, other) in runs.moving():
        if op.name not in _MULTIPLYING:
            continue
        fixed = [t for t, is_fixed in zip(op.inputs, OperationPair(op, other).fixed_inputs(), strict=True) if is_fixed]
        if any(t.is_complex() or (t.ndim > 1 and {runs.q_len, runs.k_len} & set(t.shape[:-1])) for t in fixed):
            return True
    return False


def _pairs_of_equal_norm(runs: PairedRuns) -> Iterator[tuple[OperationPair, OperationPair]]:
    """Pairs of steps whose outputs have vectors of equal length but different values."""
    steps = [step for _, step in runs.moving() if _has_positions(runs, step.first.output)]
    lengths = [step.first.output.detach().to("cpu", torch.float64).norm(dim=-1) for step in steps]
    for n, after in enumerate(steps):
        for m in range(n - 1, -1, -1):
            if lengths[m].shape != lengths[n].shape or steps[m].first.output.shape != after.first.output.shape:
                continue
            if torch.allclose(lengths[m], lengths[n], rtol=1e-4):
                yield steps[m], after


def _has_positions(runs: PairedRuns, tensor: Tensor) -> bool:
    shape = tensor.shape
    has_position_axis = bool({runs.q_len, runs.k_len} & set(shape[:-1]))
    return tensor.is_floating_point() and tensor.ndim in (3, 4) and shape[-1] % 2 == 0 and has_position_axis


def _rotation(runs: PairedRuns, before: OperationPair, after: OperationPair) -> Rotation | None:
    """The rotation from one output to the next, the same in both runs; None if there is none."""
    x, y = (step.first.output.detach().to("cpu", torch.float64) for step in (before, after))
    changed_columns = ((x - y).abs() > TOLERANCE * x.abs().max()).flatten(0, -2).any(dim=0).nonzero().flatten()
    if not changed_columns.numel():
        return None
    width = x.shape[-1]
    n_changed = int(changed_columns[-1]) + 1 + (int(changed_columns[-1]) + 1) % 2
    for n_rotated in dict.fromkeys((width, n_changed)):
        for pairing in _PAIRINGS:
            for axis in [axis for axis, size in enumerate(x.shape[:-1]) if size in (runs.q_len, runs.k_len)]:
                rotor = _rotor(x, y, axis, n_rotated, pairing)
                if rotor is None:
                    continue
                second_rotor = _rotor(before.second.output, after.second.output, axis, n_rotated, pairing)
                rates = None if second_rotor is None or (second_rotor - rotor).abs().max() > 1e-3 else _rates(rotor)
                if rates is not None:
                    base = _base(rates.abs())
                    exact = rates if base is None else _rates_of_base(base, rates)
                    return Rotation(pairing, exact, base)
    return None


def _rotor(x: Tensor, y: Tensor, axis: int, n_rotated: int, pairing: Pairing) -> Tensor | None:
    """The complex factor `[position, pair]`, of size one, for each pair of columns; None if it differs between heads or
    sequences."""
    x, y = (t.detach().to("cpu", torch.float64).movedim(axis, 0) for t in (x, y))
    if not torch.allclose(x[..., n_rotated:], y[..., n_rotated:], rtol=TOLERANCE):
        return None
    a, b = _pairs(x[..., :n_rotated], pairing), _pairs(y[..., :n_rotated], pairing)
    other_axes = tuple(range(1, a.ndim - 1))
    rotor = (b * a.conj()).sum(other_axes) / a.abs().square().sum(other_axes)
    broadcast_rotor = rotor.reshape(rotor.shape[0], *(1,) * len(other_axes), -1)
    is_rotation = (rotor.abs() - 1).abs().max() <= 1e-4 and (
        b - broadcast_rotor * a
    ).abs().max() <= TOLERANCE * x.abs().max()
    return rotor if is_rotation else None


def _pairs(rows: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        return torch.complex(*rows.chunk(2, dim=-1))
    return torch.complex(rows[..., 0::2], rows[..., 1::2])


def _rates(rotor: Tensor) -> Tensor | None:
    """The angle per position of each pair; None if it varies with position or does not look like positions: falling from pair
    to pair, of one sign, and not constant."""
    if rotor.shape[0] < 3:
        return None
    steps = rotor[1:] / rotor[:-1]
    if (steps - steps[:1]).abs().max() > 1e-4:
        return None
    rates = steps[0].angle()
    total_rotation = rotor[-1] / rotor[0]
    rates = rates + (total_rotation * torch.polar(torch.ones_like(rates), -rates * (len(rotor) - 1))).angle() / (
        len(rotor) - 1
    )
    magnitudes = rates * rates[0].sign()
    is_falling = bool((magnitudes > -1e-6).all() and (magnitudes.diff() < 1e-6).all() and magnitudes[0] > 1e-6)
    is_constant = len(magnitudes) > 1 and bool(magnitudes[0] - magnitudes[-1] < 1e-6)
    return rates if is_falling and not is_constant else None


def _base(rates: Tensor) -> float | None:
    """Theta if the rates are theta^(−2j/d), rounded if close to an integer."""
    if len(rates) < 2 or abs(float(rates[0]) - 1) > 1e-5 or float(rates[-1]) <= 0:
        return 10000.0 if len(rates) == 1 and abs(float(rates[0]) - 1) < 1e-5 else None
    base = math.exp(-math.log(float(rates[1])) * len(rates))
    rounded = float(round(base))
    base = rounded if abs(base - rounded) < 1e-3 * base else base
    expected = _rates_of_base(base, torch.ones_like(rates))
    return base if torch.allclose(rates, expected, rtol=1e-3, atol=1e-7) else None


def _rates_of_base(base: float, like: Tensor) -> Tensor:
    """The rates of a base, with the signs of `like`."""
    pair = torch.arange(len(like), dtype=torch.float64)
    return like.sign() * base ** -(pair / len(like))


# ----------------------------------------------------------------------------------------------------------------- norms


_ROOTS = frozenset((
    "normalize", "rms_norm", "layer_norm", "norm", "linalg_norm", "linalg_vector_norm", "rsqrt", "sqrt", "var", "std", "pow",
))  # fmt: skip
"""One of these operations is part of every norm."""
_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps)
NormKind = Literal["length", "spread"]


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of heads `[batch, head, length, d]`: divides by the root mean square, or with `spread` subtracts the mean and
    divides by the standard deviation; then applies `gain` and `shift`, `[head or 1, 1, d]`. `source` is the normalised input
    observed in a run."""

    kind: NormKind
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
        unit = self.gain.shape[-1] ** -0.5
        return (
            self.kind == "length" and bool((self.gain - unit).abs().max() < 1e-6) and not self.shift.abs().max() > 1e-6
        )

    def is_of(self, rows: Tensor) -> bool:
        """Whether this is the input observed in the run."""
        return rows.shape == self.source.shape and torch.allclose(rows, self.source, rtol=1e-4, atol=1e-5)

    def is_like(self, other: Norm) -> bool:
        """Whether the norms are equal."""
        is_alike = self.kind == other.kind and self.gain.shape == other.gain.shape
        return is_alike and torch.allclose(self.gain, other.gain, rtol=1e-4) and torch.allclose(
            self.shift, other.shift, rtol=1e-4, atol=1e-6
        )  # fmt: skip


def distinct_norms(norms: Sequence[Norm]) -> list[Norm]:
    """The distinct norms, whatever their inputs."""
    distinct: list[Norm] = []
    for norm in norms:
        if not any(norm.is_like(other) for other in distinct):
            distinct.append(norm)
    return distinct


def norms(runs: PairedRuns) -> list[Norm]:
    """Every distinct norm over the last axis of heads in a run. Empty if no operation takes a root."""
    if not any(step.first.name.rstrip("_") in _ROOTS for _, step in runs.moving()):
        return []
    distinct: list[Norm] = []
    for before, after in _pairs_of_heads(runs):
        norm = _norm(runs, before, after)
        if norm is not None and not any(norm.is_like(other) and norm.is_of(other.source) for other in distinct):
            distinct.append(norm)
    return distinct


def uses_all_parameters(runs: PairedRuns, n_parameters: int) -> bool:
    """Whether a run uses at least this number of parameters."""
    return len({id(t) for op, _ in runs.steps for t in op.inputs if isinstance(t, torch.nn.Parameter)}) >= n_parameters


def _pairs_of_heads(runs: PairedRuns) -> Iterator[tuple[OperationPair, OperationPair]]:
    """Pairs of outputs of the same shape, in order, that may be heads."""
    steps = [step for _, step in runs.moving() if _heads(runs, step.first.output) is not None]
    for n, after in enumerate(steps):
        for before in steps[:n]:
            if before.first.output.shape == after.first.output.shape:
                yield before, after


def _heads(runs: PairedRuns, tensor: Tensor) -> Tensor | None:
    """A tensor as `[batch, head, length, d]`; None if the shape does not fit."""
    if not tensor.is_floating_point() or tensor.ndim != 4 or tensor.shape[0] != runs.batch or tensor.shape[-1] < 2:
        return None
    length_axes = [axis for axis in (1, 2) if tensor.shape[axis] in (runs.q_len, runs.k_len)]
    return tensor.detach().to("cpu", torch.float64).movedim(length_axes[-1], 2) if length_axes else None


def _norm(runs: PairedRuns, before: OperationPair, after: OperationPair) -> Norm | None:
    """The norm from one output to the next, the same in both runs; None if there is none."""
    x, y = _heads(runs, before.first.output), _heads(runs, after.first.output)
    second_x, second_y = _heads(runs, before.second.output), _heads(runs, after.second.output)
    assert x is not None
    assert y is not None
    assert second_x is not None
    assert second_y is not None
    for kind in ("length", "spread"):
        if _gap(_fitted(x, y, kind, 0.0), x, y) > 100 * TOLERANCE:
            continue
        best = min((_fitted(x, y, kind, eps) for eps in _EPS), key=lambda norm: _gap(norm, x, y))
        if max(_gap(best, x, y), _gap(best, second_x, second_y)) <= TOLERANCE:
            return best
    return None


def _gap(norm: Norm, x: Tensor, y: Tensor) -> float:
    return float((norm(x) - y).abs().max() / y.abs().max().clamp(min=1e-30))


def _fitted(x: Tensor, y: Tensor, kind: NormKind, eps: float) -> Norm:
    """The norm with the best gain and shift for each head and column, or for all heads if these are equal."""
    u = _normed(x, kind, eps)
    mean_u, mean_y = (t.mean((0, 2), keepdim=True) for t in (u, y))
    gain = ((u - mean_u) * (y - mean_y)).sum((0, 2)) / (u - mean_u).square().sum((0, 2)).clamp(min=1e-30)
    shift = mean_y[0, :, 0] - gain * mean_u[0, :, 0]
    if torch.allclose(gain, gain[:1].expand_as(gain), rtol=1e-4, atol=1e-7):
        gain, shift = gain.mean(0, keepdim=True), shift.mean(0, keepdim=True)
    shift = torch.where(shift.abs() < 1e-6, 0.0, shift)
    return Norm(kind, eps, gain[:, None], shift[:, None], x)


def _normed(rows: Tensor, kind: NormKind, eps: float) -> Tensor:
    rows = rows - rows.mean(-1, keepdim=True) if kind == "spread" else rows
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
