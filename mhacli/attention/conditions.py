"""Where a pattern holds: a condition on places and tokens, evaluated block by block, like a mask.

What depends on the query alone is calculated as `[query, 1]`, what depends on the key alone as `[1, key]`; only what compares
the two costs a whole block.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mhacli.text.conditions import OPERATIONS, RELATIONS, Condition, axes_of, is_token

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
        plane = _where(pattern.body, _Block(places, texts, ids))
        return plane.expand(len(q_idx), len(k_idx))

    return matches


class _Values(NamedTuple):
    """The numbers of an operand, or the ids of its tokens, and where it is anything at all: `None` for everywhere."""

    values: _Numbers
    known: _Plane | None = None


class _Block(NamedTuple):
    """The places of the queries and of the keys, the ids of their texts, and those of words."""

    places: Mapping[str, Tensor]
    texts: Mapping[str, Tensor]
    ids: Mapping[str, int]


def _bordered(tokens: Int[Tensor, " text"]) -> Int[Tensor, " bordered"]:
    """A text between two absent tokens, to which all places outside it lead."""
    border = tokens.new_full((1,), _NO_TOKEN, dtype=torch.int64)
    return torch.cat([border, tokens.clamp(min=_NO_TOKEN), border])


def _joined(planes: Iterable[_Plane], join: Callable[[Tensor, Tensor], Tensor] = torch.bitwise_and) -> _Plane:
    """Where all hold, or what another operation makes of them. One by one, so that few are held; as bytes, for joining a column
    to a plane of bool takes torch eighteen times as long."""
    return reduce(join, (plane.view(torch.uint8) for plane in planes)).view(torch.bool)


def _known(*sides: _Values) -> list[_Plane]:
    return [side.known for side in sides if side.known is not None]


def _where(node: ast.expr, block: _Block) -> _Plane:
    """Where a condition holds."""
    match node:
        case ast.BoolOp(op=ast.And()):
            return _joined(_where(part, block) for part in node.values)
        case ast.BoolOp():
            return _joined((_where(part, block) for part in node.values), torch.bitwise_or)
        case ast.UnaryOp(operand=part):
            return ~_where(part, block)
        case ast.Compare():
            sides = pairwise((node.left, *node.comparators))
            return _joined(_compared(op, *pair, block) for op, pair in zip(node.ops, sides, strict=True))
    raise AssertionError(ast.dump(node))


def _compared(op: ast.cmpop, left: ast.expr, right: ast.expr, block: _Block) -> _Plane:
    """Where both sides are known and have the relation."""
    value = _evaluated(left, block)
    if isinstance(right, ast.Tuple | ast.List):
        words = [word.value for word in right.elts if isinstance(word, ast.Constant)]
        ids = [i for word, i in block.ids.items() if word in words and i >= 0]
        listed = torch.tensor(ids, dtype=torch.int64, device=value.values.device)
        return _joined([torch.isin(value.values, listed, invert=isinstance(op, ast.NotIn)), *_known(value)])
    other = _evaluated(right, block)
    if is_token(left) and isinstance(op, ast.Eq):
        return value.values == torch.where(other.values < 0, _NOR_THIS, other.values)
    return _joined([RELATIONS[type(op)](value.values, other.values), *_known(value, other)])


def _evaluated(node: ast.expr, block: _Block) -> _Values:
    """The value of a number or a token."""
    numbers = block.places["q"]
    match node:
        case ast.Name(id=axis):
            return _Values(block.places[axis])
        case ast.Constant(value=str(word)):
            return _Values(torch.full((1, 1), block.ids[word], device=numbers.device))
        case ast.Constant(value=int(value)):
            return _Values(numbers.new_full((1, 1), value))
        case ast.Call(args=[inner]) | ast.UnaryOp(operand=inner):
            number = _evaluated(inner, block)
            return _Values(number.values.abs() if isinstance(node, ast.Call) else -number.values, number.known)
        case ast.Subscript(slice=inner):  # the first token is that at place 1, behind the border
            position, text = _evaluated(inner, block), block.texts["q" if "q" in axes_of(node) else "k"]
            inside = position.values.long().clamp(-1, len(text) - 2) + 1
            inside = inside if position.known is None else torch.where(position.known, inside, 0)
            tokens = text.to(inside.device)[inside]
            return _Values(tokens, tokens >= 0)
        case ast.BinOp():
            left, right = _evaluated(node.left, block), _evaluated(node.right, block)
            planes, divisor = _known(left, right), right.values
            if isinstance(node.op, ast.FloorDiv | ast.Mod) and axes_of(node.right):
                planes.append(divisor != 0)
                divisor = torch.where(divisor == 0, 1, divisor)
            values = OPERATIONS[type(node.op)](left.values, divisor)
            return _Values(values, _joined(planes) if planes else None)
    raise AssertionError(ast.dump(node))
