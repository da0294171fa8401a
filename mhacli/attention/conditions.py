"""Where a pattern holds: a condition on places and tokens, evaluated block by block, like a mask.

What depends on the query alone is calculated as `[query, 1]`, what depends on the key alone as `[1, key]`; only what compares
the two costs a whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mhacli.text.conditions import OPERATIONS, RELATIONS, Condition

Queries = Int[Tensor, " query"]
Keys = Int[Tensor, " key"]
Cells = Bool[Tensor, "query key"]
Matches = Callable[[Queries, Keys], Cells]
_Numbers = Int[Tensor, "#query #key"]
_Plane = Bool[Tensor, "#query #key"]

_NO_TOKEN, _NOR_THIS = -1, -2
"""Two ways to be no token, for the two sides of `==`: so nothing equals nothing without a plane that says what is missing."""


def matcher(
    pattern: Condition,
    q_tokens: Int[Tensor, " query_len"],
    k_tokens: Int[Tensor, " key_len"],
    id_of: Callable[[str], int],
    *,
    first: tuple[int, int] = (0, 0),
) -> Matches:
    """A predicate like a mask: `matches(q_idx, k_idx)` is True where the pattern holds, `[query, key]`.

    The ids are those of one text for the queries and one for the keys, −1 for padding; `q_idx` and `k_idx` are places in
    them, once the columns of the `first` query and key are subtracted. `id_of` says the id of a word, −1 for one that the
    vocabulary lacks: it equals no token. A comparison is false where one side is padding, outside the text, or a division by
    zero, even `!=`; `not` around it is then true.
    Raises nothing of its own; what `id_of` raises is raised here, not by the predicate.

    >>> from mhacli.text.conditions import parse_condition
    >>> ids = torch.tensor([4, 7, 4])
    >>> matches = matcher(parse_condition("tok[k - 1] == tok[q]"), ids, ids, lambda word: -1)
    >>> matches(torch.arange(3), torch.arange(3)).int().tolist()
    [[0, 1, 0], [0, 0, 1], [0, 1, 0]]
    """
    ids = {word: id_of(word) for word in pattern.words}
    texts = {"q": _bordered(q_tokens), "k": _bordered(k_tokens)}
    is_small = pattern.largest(max(len(text) for text in texts.values())) < 2**31
    dtype = torch.int32 if is_small else torch.int64  # a difference of places takes a sixth of the time in int32

    def matches(q_idx: Queries, k_idx: Keys) -> Cells:
        places = {"q": (q_idx.to(dtype) - first[0])[:, None], "k": (k_idx.to(dtype) - first[1])[None, :]}
        plane: Tensor = pattern.holds(ValuesOfBlock(places, texts, ids))
        return plane.expand(len(q_idx), len(k_idx))

    return matches


class CellValues(NamedTuple):
    """What an operand is, and where it is anything at all: `None` for everywhere."""

    values: _Numbers
    known: _Plane | None = None


def _bordered(tokens: Int[Tensor, " text"]) -> Int[Tensor, " bordered"]:
    """A text between two absent tokens, to which all places outside it lead."""
    border = tokens.new_full((1,), _NO_TOKEN, dtype=torch.int64)
    return torch.cat([border, tokens.clamp(min=_NO_TOKEN), border])


def _joined(join: Callable[[Tensor, Tensor], Tensor], planes: Iterable[_Plane]) -> _Plane:
    """One by one, so that few are held. As bytes: joining a column to a plane of bool takes torch eighteen times as long."""
    return reduce(join, (plane.view(torch.uint8) for plane in planes)).view(torch.bool)


def _known(*sides: CellValues) -> list[_Plane]:
    return [side.known for side in sides if side.known is not None]


class ValuesOfBlock(NamedTuple):
    """The cells of a block, as `mhacli.text.conditions.Cells`: numbers and tokens are `CellValues`, conditions planes of bool."""

    places: Mapping[str, Tensor]
    texts: Mapping[str, Tensor]
    ids: Mapping[str, int]

    def _filled(self, value: int, dtype: torch.dtype) -> CellValues:
        return CellValues(torch.full((1, 1), value, dtype=dtype, device=self.places["q"].device))

    def position(self, axis: str) -> CellValues:
        """The places of the queries or of the keys."""
        return CellValues(self.places[axis])

    def number(self, value: int) -> CellValues:
        """A whole number."""
        return self._filled(value, self.places["q"].dtype)

    def absolute(self, number: CellValues) -> CellValues:
        """A number without its sign."""
        return CellValues(number.values.abs(), number.known)

    def calculate(self, sign: str, left: CellValues, right: CellValues, *, may_divide_by_0: bool) -> CellValues:
        """A calculation, of which nothing is known where it divides by 0."""
        divisor, planes = right.values, _known(left, right)
        if may_divide_by_0:
            planes.append(divisor != 0)
            divisor = torch.where(divisor == 0, 1, divisor)
        values = OPERATIONS[sign](left.values, divisor)
        return CellValues(values, self.all_of(planes) if planes else None)

    def token(self, axis: str, position: CellValues) -> CellValues:
        """Place 0 stands behind the border; what has no place leads to the border."""
        text = self.texts[axis]
        inside = position.values.long().clamp(-1, len(text) - 2) + 1
        tokens = text.to(inside.device)[inside if position.known is None else torch.where(position.known, inside, 0)]
        return CellValues(tokens, tokens >= 0)

    def word(self, text: str) -> CellValues:
        """The id of a word."""
        return self._filled(self.ids[text], torch.int64)

    def compare_numbers(self, relation: str, left: CellValues, right: CellValues) -> _Plane:
        """Where both are numbers that have the relation."""
        return self.all_of([RELATIONS[relation](left.values, right.values), *_known(left, right)])

    def compare_tokens(self, relation: str, left: CellValues, right: CellValues) -> _Plane:
        """Where both are tokens and equal, or different."""
        if relation == "!=":
            return self.compare_numbers(relation, left, right)
        return left.values == torch.where(right.values < 0, _NOR_THIS, right.values)

    def is_listed(self, relation: str, token: CellValues, words: Sequence[str]) -> _Plane:
        """Where a token is, or is not, one of the words."""
        known_ids = [self.ids[word] for word in words if self.ids[word] >= 0]
        listed = torch.tensor(known_ids, dtype=torch.int64, device=token.values.device)
        return self.all_of([torch.isin(token.values, listed, invert=relation == "not in"), *_known(token)])

    def negate(self, condition: _Plane) -> _Plane:
        """Where the condition does not hold."""
        return ~condition

    def all_of(self, conditions: Iterable[_Plane]) -> _Plane:
        """Where all hold."""
        return _joined(torch.bitwise_and, conditions)

    def any_of(self, conditions: Iterable[_Plane]) -> _Plane:
        """Where one holds."""
        return _joined(torch.bitwise_or, conditions)
