"""Where a pattern holds: a condition on places and tokens, asked tile by tile, like a mask.

What depends on the query alone is calculated as `[query, 1]`, what depends on the key alone as `[1, key]`; only what compares
the two costs a whole tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mhacli.spec.conditions import (
    OPERATIONS,
    RELATIONS,
    Absolute,
    AllOf,
    AnyOf,
    Comparison,
    Condition,
    Not,
    Number,
    Numeric,
    Operand,
    Pattern,
    Place,
    Token,
    Word,
    Words,
    largest,
    parts,
)

Queries = Int[Tensor, " query"]
Keys = Int[Tensor, " key"]
Cells = Bool[Tensor, "query key"]
Matches = Callable[[Queries, Keys], Cells]
_Numbers = Int[Tensor, "#query #key"]
_Plane = Bool[Tensor, "#query #key"]

_NO_TOKEN, _NOR_THIS = -1, -2
"""Two ways to be no token, for the two sides of `==`: so nothing equals nothing without a plane that says what is missing."""


def matcher(
    pattern: Pattern,
    q_tokens: Int[Tensor, " query_len"],
    k_tokens: Int[Tensor, " key_len"],
    id_of: Callable[[str], int],
) -> Matches:
    """A question like a mask's: `matches(q_idx, k_idx)` is True where the pattern holds, `[query, key]`.

    The ids are those of one text for the queries and one for the keys, −1 for padding; `q_idx` and `k_idx` are places in
    them. `id_of` says the id of a word, −1 for one that the vocabulary lacks: it equals no token. A comparison is false
    where one side is padding, outside the text, or a division by zero, even `!=`; `not` around it is then true.
    Raises nothing of its own; what `id_of` raises is raised here, not by the question.

    >>> from mhacli.spec.conditions import parse_pattern
    >>> ids = torch.tensor([4, 7, 4])
    >>> matches = matcher(parse_pattern("tok[k - 1] == tok[q]"), ids, ids, lambda word: -1)
    >>> matches(torch.arange(3), torch.arange(3)).int().tolist()
    [[0, 1, 0], [0, 0, 1], [0, 1, 0]]
    """
    everything = list(parts(pattern.expression))
    longest = max(len(q_tokens), len(k_tokens))
    most = max((largest(part, longest) for part in everything if isinstance(part, Numeric)), default=0)
    dtype = torch.int32 if most < 2**31 else torch.int64  # a difference of places takes a sixth of the time in int32
    words = {part.text for part in everything if isinstance(part, Word)}
    words |= {text for part in everything if isinstance(part, Words) for text in part.texts}
    ids = {word: id_of(word) for word in words}
    texts = {"q": _bordered(q_tokens), "k": _bordered(k_tokens)}

    def matches(q_idx: Queries, k_idx: Keys) -> Cells:
        places = {"q": q_idx.to(dtype)[:, None], "k": k_idx.to(dtype)[None, :]}
        found = _condition(pattern.expression, _Tile(places, texts, ids))
        return found.expand(len(q_idx), len(k_idx))

    return matches


class _Tile(NamedTuple):
    places: Mapping[str, Tensor]
    texts: Mapping[str, Tensor]
    ids: Mapping[str, int]

    def filled(self, value: int, dtype: torch.dtype) -> _Numbers:
        return torch.full((1, 1), value, dtype=dtype, device=self.places["q"].device)


class _Values(NamedTuple):
    """What an operand is, and where it is anything at all: `None` for everywhere."""

    values: _Numbers
    known: _Plane | None = None


def _bordered(tokens: Int[Tensor, " text"]) -> Int[Tensor, " bordered"]:
    """A text between two absent tokens, to which all places outside it lead."""
    border = tokens.new_full((1,), _NO_TOKEN, dtype=torch.int64)
    return torch.cat([border, tokens.clamp(min=_NO_TOKEN), border])


def _condition(condition: Condition, tile: _Tile) -> _Plane:
    match condition:
        case Not(inner):
            return ~_condition(inner, tile)
        case AllOf(several):
            return _joined(torch.bitwise_and, (_condition(part, tile) for part in several))
        case AnyOf(several):
            return _joined(torch.bitwise_or, (_condition(part, tile) for part in several))
    return _joined(torch.bitwise_and, _compared(condition, tile))


def _joined(join: Callable[[Tensor, Tensor], Tensor], planes: Iterable[_Plane]) -> _Plane:
    """One by one, so that few are held. As bytes: joining a column to a plane of bool takes torch eighteen times as long."""
    return reduce(join, (plane.view(torch.uint8) for plane in planes)).view(torch.bool)


def _compared(comparison: Comparison, tile: _Tile) -> Iterator[_Plane]:
    """Planes that must all be true."""
    found: dict[Operand | Words, _Values] = {
        operand: _operand(operand, tile) for operand in comparison.operands if not isinstance(operand, Words)
    }
    for relation, (left, right) in zip(comparison.relations, pairwise(comparison.operands), strict=True):
        if isinstance(right, Words):
            yield from _listed(found[left], [tile.ids[text] for text in right.texts], inside=relation == "in")
        elif relation == "==" and isinstance(left, Token | Word):
            others = found[right].values
            yield found[left].values == torch.where(others < 0, _NOR_THIS, others)
        else:
            yield RELATIONS[relation](found[left].values, found[right].values)
            yield from _known(found[left], found[right])


def _listed(tokens: _Values, ids: Sequence[int], *, inside: bool) -> list[_Plane]:
    known_ids = torch.tensor([word for word in ids if word >= 0], dtype=torch.int64, device=tokens.values.device)
    plane = torch.isin(tokens.values, known_ids, invert=not inside)
    return [plane, *_known(tokens)]


def _known(*sides: _Values) -> list[_Plane]:
    return [side.known for side in sides if side.known is not None]


def _operand(operand: Operand, tile: _Tile) -> _Values:
    match operand:
        case Word(text):
            return _Values(tile.filled(tile.ids[text], torch.int64))
        case Token(index, axis):
            return _token(_number(index, tile), tile.texts[axis])
    return _number(operand, tile)


def _token(place: _Values, text: Int[Tensor, " bordered"]) -> _Values:
    """Place 0 stands behind the border; what has no place leads to the border."""
    inside = place.values.long().clamp(-1, len(text) - 2) + 1
    tokens = text.to(inside.device)[inside if place.known is None else torch.where(place.known, inside, 0)]
    return _Values(tokens, tokens >= 0)


def _number(number: Numeric, tile: _Tile) -> _Values:
    match number:
        case Number(value):
            return _Values(tile.filled(value, tile.places["q"].dtype))
        case Place(axis):
            return _Values(tile.places[axis])
        case Absolute(inner):
            values, known = _number(inner, tile)
            return _Values(values.abs(), known)
    left, right = _number(number.left, tile), _number(number.right, tile)
    divisor, planes = right.values, _known(left, right)
    if number.operator in ("//", "%") and not isinstance(number.right, Number):
        planes.append(divisor != 0)
        divisor = torch.where(divisor == 0, 1, divisor)
    values = OPERATIONS[number.operator](left.values, divisor)
    return _Values(values, _joined(torch.bitwise_and, planes) if planes else None)
