"""A condition as a few comparisons of a number of the query with a number of the key, which a kernel does cell by cell.

`q - k < 50` asks whether `k > q - 50`: one side belongs to the query, the other to the key. Each comparison asks whether the
key's number lies between two numbers of the query; a truth table says which of the answers make the condition true.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mhacli.attention.tiled.conditions import CellValues, TokenCondition, ValuesOfTile
from mhacli.text.conditions import Axis

MAX_COMPARISONS = 5
"""Of a condition: all their answers are an index into a table of 32 bits."""
_TABLES = (0xAAAAAAAA, 0xCCCCCCCC, 0xF0F0F0F0, 0xFF00FF00, 0xFFFF0000)
"""The truth table of each comparison: bit n is bit i of n."""
_ALL = 0xFFFFFFFF
_SAFE = 1 << 61
"""Numbers below it can be moved to the other side of a comparison without wrapping round."""
_LOWEST, _HIGHEST, _ABSENT = 0, 2**31 - 2, 2**31 - 1
"""No lower bound, no upper bound, and a key's number that lies within no bounds."""
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


class Comparisons(NamedTuple):
    """A condition holds where bit `Σ 2^n (low[n] ≤ key[n] ≤ high[n])` of the `table` is set."""

    low: Int[Tensor, "comparison query"]
    high: Int[Tensor, "comparison query"]
    key: Int[Tensor, "comparison key"]
    table: int


def comparisons_of(
    condition: object, n_queries: int, n_keys: int, device: torch.device | str = "cpu"
) -> Comparisons | None:
    """The condition for so many queries and keys as comparisons of int32; None where it is no condition on tokens and positions,
    or cannot be written with `MAX_COMPARISONS`, as `q * k > 50` cannot."""
    if not isinstance(condition, TokenCondition) or condition.pattern.largest(max(n_queries, n_keys)) >= _SAFE:
        return None
    q_idx, k_idx = (torch.arange(n, device=device) for n in (n_queries, n_keys))
    separated = _Separated(condition.tile(q_idx, k_idx))
    try:
        table = separated.table(condition.pattern.holds(separated))
    except _InseparableError:
        return None
    low, high, key = (torch.stack(numbers) for numbers in zip(*separated.found, strict=True))
    return Comparisons(low, high, key, table.bits)


class _InseparableError(Exception):
    """A part of the condition compares more than a number of the query with a number of the key."""


class _Table(NamedTuple):
    """A condition by its truth table over the comparisons."""

    bits: int


class _Sum(NamedTuple):
    """A number of the query and one of the key added, of which the absolute value or a remainder may be meant."""

    of_q: CellValues
    of_k: CellValues
    is_absolute: bool = False
    modulus: int | None = None


_Number = CellValues | _Sum
_Plane = Bool[Tensor, "#query #key"]
_Condition = _Plane | _Table


class _Separated:
    """The operations of `mhacli.text.conditions.Cells`, of which those that compare query and key are put off.

    What depends on one axis is a tensor with an axis of 1 for the other one, as in `ValuesOfTile`, which calculates it.
    """

    def __init__(self, tile: ValuesOfTile) -> None:
        self._tile = tile
        self._shape = (tile.places["q"].shape[0], tile.places["k"].shape[1])
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []

    def position(self, axis: Axis) -> CellValues:
        return self._tile.position(axis)

    def number(self, value: int) -> CellValues:
        return self._tile.number(value)

    def absolute(self, number: _Number) -> _Number:
        if isinstance(number, _Sum):
            return _plain(number)._replace(is_absolute=True)
        return self._tile.absolute(number)

    def calculate(self, sign: str, left: _Number, right: _Number, *, may_divide_by_0: bool) -> _Number:
        if isinstance(left, CellValues) and isinstance(right, CellValues) and _has_one_axis(left.values, right.values):
            return self._tile.calculate(sign, left, right, may_divide_by_0=may_divide_by_0)

        def each(a: CellValues, b: CellValues) -> CellValues:
            return self._tile.calculate(sign, a, b, may_divide_by_0=False)

        if sign in "+-":
            a, b = self._sum(left), self._sum(right)
            return _Sum(each(a.of_q, b.of_q), each(a.of_k, b.of_k))
        if sign == "*" and _is_constant(left):
            left, right = right, left
        if sign == "*" and _is_constant(right):
            return _Sum(*(each(side, right) for side in self._sum(left)[:2]))  # type: ignore[arg-type]
        if sign == "%" and _is_constant(right):
            return self._sum(left)._replace(modulus=int(right.values))  # type: ignore[union-attr]
        raise _InseparableError

    def token(self, axis: Axis, position: CellValues) -> CellValues:
        return self._tile.token(axis, position)

    def word(self, text: str) -> CellValues:
        return self._tile.word(text)

    def compare_numbers(self, relation: str, left: _Number, right: _Number) -> _Condition:
        if isinstance(left, CellValues) and isinstance(right, CellValues) and _has_one_axis(left.values, right.values):
            return self._tile.compare_numbers(relation, left, right)
        if isinstance(right, _Sum) and (right.is_absolute or right.modulus is not None):
            relation, left, right = _FLIPPED[relation], right, left
        if isinstance(left, _Sum) and left.modulus is not None:
            return self._compare_remainder(relation, left, left.modulus, right)
        if isinstance(left, _Sum) and left.is_absolute:
            return self._compare_absolute(relation, left._replace(is_absolute=False), right)
        if relation == "!=":
            return self.any_of([self.compare_numbers(sign, left, right) for sign in "<>"])
        difference = self.calculate("-", left, right, may_divide_by_0=False)
        assert isinstance(difference, _Sum)
        of_k = self._tile.calculate("-", self.number(0), difference.of_k, may_divide_by_0=False)
        return self._compare(relation, difference.of_q, of_k)

    def compare_tokens(self, relation: str, left: CellValues, right: CellValues) -> _Condition:
        if _has_one_axis(left.values, right.values):
            return self._tile.compare_tokens(relation, left, right)
        of_q, of_k = (left, right) if left.values.shape[1] == 1 else (right, left)
        equal = self._compare("==", of_q, of_k)
        if relation == "==":
            return equal
        return self.all_of([self.negate(equal), *(side.known for side in (of_q, of_k) if side.known is not None)])

    def is_listed(self, relation: str, token: CellValues, words: Sequence[str]) -> _Plane:
        return self._tile.is_listed(relation, token, words)

    def negate(self, condition: _Condition) -> _Condition:
        return _Table(_ALL ^ condition.bits) if isinstance(condition, _Table) else self._tile.negate(condition)

    def all_of(self, conditions: Iterable[_Condition]) -> _Condition:
        return self._joined(self._tile.all_of, operator.and_, conditions)

    def any_of(self, conditions: Iterable[_Condition]) -> _Condition:
        return self._joined(self._tile.any_of, operator.or_, conditions)

    def table(self, condition: _Condition) -> _Table:
        """The condition as a table: what depends on one axis is a comparison with 1."""
        if isinstance(condition, _Table):
            return condition
        one, numbers = self.number(1), CellValues(condition.long())
        return self._compare("==", numbers, one) if condition.shape[1] == 1 else self._compare("==", one, numbers)

    def _joined(
        self,
        of_planes: Callable[[list[Tensor]], Tensor],
        of_bits: Callable[[int, int], int],
        conditions: Iterable[_Condition],
    ) -> _Condition:
        """Conditions on one axis make one plane; what then is left of several axes is joined as tables."""
        given = list(conditions)
        planes = [plane for plane in given if not isinstance(plane, _Table)]
        of_q = [plane for plane in planes if plane.shape[1] == 1]
        of_k = [plane for plane in planes if plane.shape[1] > 1]
        parts: list[_Condition] = [of_planes(same) for same in (of_q, of_k) if same]
        parts += [table for table in given if isinstance(table, _Table)]
        return parts[0] if len(parts) == 1 else _Table(reduce(of_bits, (self.table(part).bits for part in parts)))

    def _sum(self, number: _Number) -> _Sum:
        if isinstance(number, _Sum):
            return _plain(number)
        zero = self.number(0)
        return _Sum(number, zero) if number.values.shape[1] == 1 else _Sum(zero, number)

    def _compare_absolute(self, relation: str, number: _Sum, right: _Number) -> _Condition:
        """`|x| < y` where both `x < y` and `−x < y`, `|x| > y` where one is."""
        if relation in ("==", "!="):
            sides = [
                self._compare_absolute(sign, number, right) for sign in (("<=", ">=") if relation == "==" else "<>")
            ]
            return self.all_of(sides) if relation == "==" else self.any_of(sides)
        opposite = self.calculate("-", self.number(0), number, may_divide_by_0=False)
        both = [self.compare_numbers(relation, side, right) for side in (number, opposite)]
        return self.all_of(both) if relation in ("<", "<=") else self.any_of(both)

    def _compare_remainder(self, relation: str, number: _Sum, modulus: int, right: _Number) -> _Condition:
        """`(a + b) % n == r` where `a % n == (r − b) % n`, if r is a remainder of n at all."""
        if relation not in ("==", "!=") or not _is_constant(right):
            raise _InseparableError
        assert isinstance(right, CellValues)
        divisor = self.number(modulus)

        def remainder(values: CellValues) -> CellValues:
            return self._tile.calculate("%", values, divisor, may_divide_by_0=False)

        rest = remainder(self._tile.calculate("-", right, number.of_k, may_divide_by_0=False))
        is_remainder = self._tile.compare_numbers("==", remainder(right), right)
        equal = self.all_of([self._compare("==", remainder(number.of_q), rest), is_remainder])
        known = [side.known for side in (number.of_q, number.of_k, right) if side.known is not None]
        return equal if relation == "==" else self.all_of([self.negate(equal), *known])

    def _compare(self, relation: str, of_q: CellValues, of_k: CellValues) -> _Table:
        """Where a number of the query has a relation to one of the key, by their ranks among all of them."""
        if len(self.found) == MAX_COMPARISONS:
            raise _InseparableError
        a, b = (side.values.flatten().expand(n) for side, n in zip((of_q, of_k), self._shape, strict=True))
        ranks = torch.cat([a, b]).unique()
        a, b = (torch.searchsorted(ranks, side.contiguous()).int() + 1 for side in (a, b))
        lowest, highest = (torch.full_like(a, bound) for bound in (_LOWEST, _HIGHEST))
        low, high = {
            "==": (a, a), "<": (a + 1, highest), "<=": (a, highest), ">": (lowest, a - 1), ">=": (lowest, a),
        }[relation]  # fmt: skip
        if of_q.known is not None:
            low = torch.where(of_q.known.flatten(), low, _HIGHEST)
            high = torch.where(of_q.known.flatten(), high, _LOWEST)
        if of_k.known is not None:
            b = torch.where(of_k.known.flatten(), b, _ABSENT)
        self.found.append((low, high, b))
        return _Table(_TABLES[len(self.found) - 1])


def _plain(number: _Sum) -> _Sum:
    """The sum, if it is that and nothing more."""
    if number.is_absolute or number.modulus is not None:
        raise _InseparableError
    return number


def _has_one_axis(*values: Tensor) -> bool:
    """Whether the numbers belong to the queries alone, or to the keys alone, or to neither."""
    return any(all(each.shape[axis] == 1 for each in values) for axis in (0, 1))


def _is_constant(number: _Number) -> bool:
    return isinstance(number, CellValues) and number.values.numel() == 1 and number.known is None
