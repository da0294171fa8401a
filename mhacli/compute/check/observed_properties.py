"""What runs of a user's attention show that no name tells: biases of the scores, learned scales, sinks, rotations, norms.

Only what is the same whatever the rows hold is read, so that no mistake in what the rows do can hide in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.usercode.call.user_attention import UserAttention
from mhacli.adapters.usercode.process import SourceLine
from mhacli.adapters.usercode.types import Operation
from mhacli.attention.mistakes.stages import Pairing, ReferenceInputs
from mhacli.compute.check.inputs import HIDDEN, TOLERANCE, OperationPair, PairedRuns, Unreadable, runs_of


@dataclass(frozen=True)
class ObservedProperties:
    """What was read; None is what it has not. `has_tables`: rows are multiplied by numbers of their places; `rotations` are the
    rotations among that. `norms` are those of heads; `uses_all`: no parameter of the module stays unused. `rows` are what
    was asked."""

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
    """The traits of a subject that is asked about its own rows, and where these cannot be watched, about others."""
    for other in (False, True) if subject.takes_context else (False,):
        try:
            runs = runs_of(subject, seed, other=other)
            return _read(subject, seed, runs, is_own=not other)
        except Exception:  # what cannot be watched, or does other things with other rows
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


# -------------------------------------------------------------------------------------- what scores get besides products


_FUSED = "scaled_dot_product_attention"


class ScoreTerm(NamedTuple):
    """A bias in a run, as it is meant to be: `[1, head, query, key]`, where it is added, and whether it is learned."""

    bias: Tensor
    at: SourceLine
    is_learned: bool


@dataclass
class ScoreBias:
    """The bias of the scores, for rows of any length. `is_learned`: it is made from parameters.

    Some mistakes are seen in a bias alone: one that rewards distance, one whose heads are not moved to the front, one that is
    laid along the batch in another order than the scores. They are taken out of it, so that the catalogue finds them.
    """

    subject: UserAttention
    seed: int
    at: SourceLine
    is_learned: bool
    known: dict[tuple[bool, int, int], Tensor | None] = field(default_factory=dict)

    def __call__(self, rows: ReferenceInputs) -> Tensor | None:
        """`[1, head, query, key]` for these rows, None where it adds nothing to them. Raises what the subject raises."""
        is_own = rows.keys is rows.queries
        key = (is_own, rows.queries.shape[-2], rows.keys.shape[-2])
        if key not in self.known:
            runs = runs_of(self.subject, self.seed, other=not is_own, q_len=key[1], k_len=key[2])
            self.known[key] = _sum_of(terms(runs))
        return self.known[key]


def score_bias(subject: UserAttention, seed: int, runs: PairedRuns, *, is_own: bool) -> ScoreBias | None:
    """The bias that scores get in these runs, None where they get none. Raises `Unreadable` where it is another in each
    sequence."""
    found = terms(runs)
    if not found:
        return None
    read = ScoreBias(subject, seed, found[0].at, any(term.is_learned for term in found))
    read.known[is_own, runs.q_len, runs.k_len] = _sum_of(found)
    return read


def _sum_of(found: Sequence[ScoreTerm]) -> Tensor | None:
    return torch.stack([term.bias for term in found]).sum(dim=0) if found else None


def terms(runs: PairedRuns) -> list[ScoreTerm]:
    """Every bias that is added to scores in a run."""
    found = []
    for number, step in runs.moving():
        added = _added(runs, number, step)
        if added is not None:
            found.append(added)
    return found


def _added(runs: PairedRuns, number: int, step: OperationPair) -> ScoreTerm | None:
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
    return ScoreTerm(-bias if reverse else bias, op.at, is_learned)


def _weak_triangle(bias: Tensor) -> Tensor:
    """The later keys, where one number that is lower than all others hides them and nothing else."""
    later = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1 + bias.shape[-1] - bias.shape[-2]).expand(bias.shape)
    is_weak = later.any() and bias[later].unique().numel() == 1 and bool(bias[later][0] < bias[~later].min() - 1)
    return later if is_weak else torch.zeros_like(later)


def _addend(step: OperationPair) -> tuple[int | None, float, torch.Size]:
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


def _scaled_later(runs: PairedRuns, number: int) -> float:
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


def _in_order(runs: PairedRuns, bias: Tensor) -> Tensor:
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


def _moves_no_heads(runs: PairedRuns, op: Operation, n_heads: int) -> bool:
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
    at: SourceLine


def temperature(runs: PairedRuns) -> Temperature | None:
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
        return Temperature(scale if op.name.startswith("mul") else 1 / scale, op.at)
    return None


class Sinks(NamedTuple):
    """A logit of each head, `[head]`, that takes part in the softmax and is no key's."""

    logits: Tensor
    at: SourceLine


def sinks(runs: PairedRuns) -> Sinks | None:
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
            return Sinks(wide[0, :, 0, 0], op.at)
    return None


# ------------------------------------------------------------------------------------------------------------- rotations


_PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
_MULTIPLYING = ("mul", "mul_", "addcmul", "addcmul_", "matmul", "bmm", "einsum")


class Rotation(NamedTuple):
    """A rotation of the first `2 · len(rates)` columns of rows: pair `j` by place · `rates[j]` radians. `base` is theta where the
    rates are theta^(−2j/d), None where they are others."""

    pairing: Pairing
    rates: Tensor
    base: float | None


def rotations(runs: PairedRuns) -> list[Rotation]:
    """Every rotation by places in a run, each once, those backwards last. Empty where no table of places multiplies rows."""
    if not has_tables(runs):
        return []
    found: dict[tuple[object, ...], Rotation] = {}
    for before, after in _as_long(runs):
        turn = _rotation(runs, before, after)
        if turn is not None:
            found.setdefault((turn.pairing, *(round(rate, 4) for rate in turn.rates.tolist())), turn)
    return sorted(found.values(), key=lambda turn: bool(turn.rates[0] < 0))


def has_tables(runs: PairedRuns) -> bool:
    """Whether rows are multiplied by numbers that differ from place to place, as rotations are, or by complex ones."""
    for _, (op, other) in runs.moving():
        if op.name not in _MULTIPLYING:
            continue
        fixed = [t for t, is_fixed in zip(op.inputs, OperationPair(op, other).fixed_inputs(), strict=True) if is_fixed]
        if any(t.is_complex() or (t.ndim > 1 and {runs.q_len, runs.k_len} & set(t.shape[:-1])) for t in fixed):
            return True
    return False


def _as_long(runs: PairedRuns) -> Iterator[tuple[OperationPair, OperationPair]]:
    """Pairs of steps whose rows are as long, one after the other, and not the same."""
    rows = [step for _, step in runs.moving() if _may_be_rows(runs, step.first.output)]
    lengths = [step.first.output.detach().to("cpu", torch.float64).norm(dim=-1) for step in rows]
    for n, after in enumerate(rows):
        for m in range(n - 1, -1, -1):
            if lengths[m].shape != lengths[n].shape or rows[m].first.output.shape != after.first.output.shape:
                continue
            if torch.allclose(lengths[m], lengths[n], rtol=1e-4):
                yield rows[m], after


def _may_be_rows(runs: PairedRuns, tensor: Tensor) -> bool:
    shape = tensor.shape
    is_place = bool({runs.q_len, runs.k_len} & set(shape[:-1]))
    return tensor.is_floating_point() and tensor.ndim in (3, 4) and shape[-1] % 2 == 0 and is_place


def _rotation(runs: PairedRuns, before: OperationPair, after: OperationPair) -> Rotation | None:
    """The rotation that makes one result of another, in both runs; None where it is none."""
    x, y = (step.first.output.detach().to("cpu", torch.float64) for step in (before, after))
    touched = ((x - y).abs() > TOLERANCE * x.abs().max()).flatten(0, -2).any(dim=0).nonzero().flatten()
    if not touched.numel():
        return None
    width = x.shape[-1]
    partial = int(touched[-1]) + 1 + (int(touched[-1]) + 1) % 2
    for n_turned in dict.fromkeys((width, partial)):
        for pairing in _PAIRINGS:
            for axis in [axis for axis, size in enumerate(x.shape[:-1]) if size in (runs.q_len, runs.k_len)]:
                rotor = _rotor(x, y, axis, n_turned, pairing)
                if rotor is None:
                    continue
                again = _rotor(before.second.output, after.second.output, axis, n_turned, pairing)
                rates = None if again is None or (again - rotor).abs().max() > 1e-3 else _rates(rotor)
                if rates is not None:
                    base = _base(rates.abs())
                    exact = rates if base is None else _of_base(base, rates)
                    return Rotation(pairing, exact, base)
    return None


def _rotor(x: Tensor, y: Tensor, axis: int, n_turned: int, pairing: Pairing) -> Tensor | None:
    """What each pair of columns is multiplied by at each place, `[place, pair]`, complex numbers of size one; None where that is
    not the same in every head and sequence."""
    x, y = (t.detach().to("cpu", torch.float64).movedim(axis, 0) for t in (x, y))
    if not torch.allclose(x[..., n_turned:], y[..., n_turned:], rtol=TOLERANCE):
        return None
    a, b = _pairs(x[..., :n_turned], pairing), _pairs(y[..., :n_turned], pairing)
    rest = tuple(range(1, a.ndim - 1))
    rotor = (b * a.conj()).sum(rest) / a.abs().square().sum(rest)
    wide = rotor.reshape(rotor.shape[0], *(1,) * len(rest), -1)
    is_one = (rotor.abs() - 1).abs().max() <= 1e-4 and (b - wide * a).abs().max() <= TOLERANCE * x.abs().max()
    return rotor if is_one else None


def _pairs(rows: Tensor, pairing: Pairing) -> Tensor:
    """Columns in pairs, each a complex number."""
    if pairing == "half":
        return torch.complex(*rows.chunk(2, dim=-1))
    return torch.complex(rows[..., 0::2], rows[..., 1::2])


def _rates(rotor: Tensor) -> Tensor | None:
    """By how much each pair is turned from one place to the next; None where that is not the same everywhere, or is no rate that
    positions have: falling from pair to pair, in one direction, and not the same for all."""
    if rotor.shape[0] < 3:
        return None
    steps = rotor[1:] / rotor[:-1]
    if (steps - steps[:1]).abs().max() > 1e-4:
        return None
    rates = steps[0].angle()
    whole = rotor[-1] / rotor[0]
    rates = rates + (whole * torch.polar(torch.ones_like(rates), -rates * (len(rotor) - 1))).angle() / (len(rotor) - 1)
    size = rates * rates[0].sign()
    is_falling = bool((size > -1e-6).all() and (size.diff() < 1e-6).all() and size[0] > 1e-6)
    is_alike = len(size) > 1 and bool(size[0] - size[-1] < 1e-6)
    return rates if is_falling and not is_alike else None


def _base(rates: Tensor) -> float | None:
    """Theta where rates are theta^(−2j/d), as a round number where it is one."""
    if len(rates) < 2 or abs(float(rates[0]) - 1) > 1e-5 or float(rates[-1]) <= 0:
        return 10000.0 if len(rates) == 1 and abs(float(rates[0]) - 1) < 1e-5 else None
    base = math.exp(-math.log(float(rates[1])) * len(rates))
    whole = float(round(base))
    base = whole if abs(base - whole) < 1e-3 * base else base
    wanted = _of_base(base, torch.ones_like(rates))
    return base if torch.allclose(rates, wanted, rtol=1e-3, atol=1e-7) else None


def _of_base(base: float, like: Tensor) -> Tensor:
    """The rates of a base, in the direction of others."""
    pair = torch.arange(len(like), dtype=torch.float64)
    return like.sign() * base ** -(pair / len(like))


# ----------------------------------------------------------------------------------------------------------------- norms


_ROOTS = frozenset((
    "normalize", "rms_norm", "layer_norm", "norm", "linalg_norm", "linalg_vector_norm", "rsqrt", "sqrt", "var", "std", "pow",
))  # fmt: skip
"""What no norm does without."""
_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps)
NormKind = Literal["length", "spread"]


@dataclass(frozen=True, eq=False)
class Norm:
    """Rows `[batch, head, length, d]` over their root mean square, or with `spread` less their mean over their standard
    deviation, times `gain` and plus `shift`, `[head or 1, 1, d]`. `source` are the rows that it was seen to norm."""

    kind: NormKind
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


def norms(runs: PairedRuns) -> list[Norm]:
    """Every norm over the last axis of heads in a run, each once of the same rows. Empty where nothing takes a root."""
    if not any(step.first.name.rstrip("_") in _ROOTS for _, step in runs.moving()):
        return []
    found: list[Norm] = []
    for before, after in _pairs_of_heads(runs):
        norm = _norm(runs, before, after)
        if norm is not None and not any(norm.is_like(other) and norm.is_of(other.source) for other in found):
            found.append(norm)
    return found


def uses_all_parameters(runs: PairedRuns, n_parameters: int) -> bool:
    """Whether a run touches as many parameters as there are."""
    return len({id(t) for op, _ in runs.steps for t in op.inputs if isinstance(t, torch.nn.Parameter)}) >= n_parameters


def _pairs_of_heads(runs: PairedRuns) -> Iterator[tuple[OperationPair, OperationPair]]:
    """Pairs of results of the same shape, one after the other, that may be heads."""
    rows = [step for _, step in runs.moving() if _heads(runs, step.first.output) is not None]
    for n, after in enumerate(rows):
        for before in rows[:n]:
            if before.first.output.shape == after.first.output.shape:
                yield before, after


def _heads(runs: PairedRuns, tensor: Tensor) -> Tensor | None:
    """A tensor as `[batch, head, length, d]`; None where it is none of that."""
    if not tensor.is_floating_point() or tensor.ndim != 4 or tensor.shape[0] != runs.batch or tensor.shape[-1] < 2:
        return None
    places = [axis for axis in (1, 2) if tensor.shape[axis] in (runs.q_len, runs.k_len)]
    return tensor.detach().to("cpu", torch.float64).movedim(places[-1], 2) if places else None


def _norm(runs: PairedRuns, before: OperationPair, after: OperationPair) -> Norm | None:
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


def _fitted(x: Tensor, y: Tensor, kind: NormKind, eps: float) -> Norm:
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


def _normed(rows: Tensor, kind: NormKind, eps: float) -> Tensor:
    rows = rows - rows.mean(-1, keepdim=True) if kind == "spread" else rows
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
