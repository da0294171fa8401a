"""Rotary positions, read from runs: what turns pairs of columns by angles that grow with the place, whatever it is called."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes.stages import Pairing
from mhacli.compute.check.inputs import TOLERANCE
from mhacli.compute.check.traits.runs import Runs, Step

_PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
_MULTIPLYING = ("mul", "mul_", "addcmul", "addcmul_", "matmul", "bmm", "einsum")


class Turn(NamedTuple):
    """A rotation of the first `2 · len(rates)` columns of rows: pair `j` by place · `rates[j]` radians. `base` is theta where the
    rates are theta^(−2j/d), None where they are others."""

    pairing: Pairing
    rates: Tensor
    base: float | None


def turns(runs: Runs) -> list[Turn]:
    """Every rotation by places in a run, each once, those backwards last. Empty where no table of places multiplies rows."""
    if not has_tables(runs):
        return []
    found: dict[tuple[object, ...], Turn] = {}
    for before, after in _as_long(runs):
        turn = _turn(runs, before, after)
        if turn is not None:
            found.setdefault((turn.pairing, *(round(rate, 4) for rate in turn.rates.tolist())), turn)
    return sorted(found.values(), key=lambda turn: bool(turn.rates[0] < 0))


def has_tables(runs: Runs) -> bool:
    """Whether rows are multiplied by numbers that differ from place to place, as rotations are, or by complex ones."""
    for _, (op, other) in runs.moving():
        if op.name not in _MULTIPLYING:
            continue
        fixed = [t for t, is_fixed in zip(op.inputs, Step(op, other).fixed_inputs(), strict=True) if is_fixed]
        if any(t.is_complex() or (t.ndim > 1 and {runs.q_len, runs.k_len} & set(t.shape[:-1])) for t in fixed):
            return True
    return False


def _as_long(runs: Runs) -> Iterator[tuple[Step, Step]]:
    """Pairs of steps whose rows are as long, one after the other, and not the same."""
    rows = [step for _, step in runs.moving() if _may_be_rows(runs, step.first.output)]
    lengths = [step.first.output.detach().to("cpu", torch.float64).norm(dim=-1) for step in rows]
    for n, after in enumerate(rows):
        for m in range(n - 1, -1, -1):
            if lengths[m].shape != lengths[n].shape or rows[m].first.output.shape != after.first.output.shape:
                continue
            if torch.allclose(lengths[m], lengths[n], rtol=1e-4):
                yield rows[m], after


def _may_be_rows(runs: Runs, tensor: Tensor) -> bool:
    shape = tensor.shape
    is_place = bool({runs.q_len, runs.k_len} & set(shape[:-1]))
    return tensor.is_floating_point() and tensor.ndim in (3, 4) and shape[-1] % 2 == 0 and is_place


def _turn(runs: Runs, before: Step, after: Step) -> Turn | None:
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
                    return Turn(pairing, exact, base)
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
