"""What statistics need of the tokens on both axes: where texts begin, equal tokens, spans, and where a condition holds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mhacli.record.record import SpanTokens
from mhacli.settings import SINK_TOKENS, PaddingSide
from mhacli.text.conditions import OPERATIONS, RELATIONS, Condition, axes_of, is_token
from mhacli.text.tokens import TokenSequence

Queries = Int[Tensor, " query"]
Keys = Int[Tensor, " key"]
Cells = Bool[Tensor, "query key"]
Matches = Callable[[Queries, Keys], Cells]
_Numbers = Int[Tensor, "#query #key"]
_Plane = Bool[Tensor, "#query #key"]

_NO_TOKEN, _NOR_THIS = -1, -2
"""Two ways to be no token, for the two sides of `==`: so nothing equals nothing without a plane that says what is missing."""

MAP_CELLS = 192
"""Cells of a map along its longer side, at most."""


@dataclass(frozen=True)
class StatisticsRequest:
    """What the statistics depend on: the blocks of the map, tokens, marked keys, matching cells.

    `block` queries and keys, a power of two, make a cell of the map. `q_tokens` and `k_tokens` are ids, below 0 where there is no
    token; `before_k` is the token before each key in its text. With `is_self` a key is no duplicate of itself. `first` marks the
    first key of every text, `leading` the first few. `matches` has, for each condition, one predicate per sequence. `q_spans` and
    `k_spans` mark the tokens of named parts of the texts, between which weights are added up.
    """

    block: int
    q_tokens: Int[Tensor, "batch query"]
    k_tokens: Int[Tensor, "batch key"]
    before_k: Int[Tensor, "batch key"]
    first: Bool[Tensor, "batch key"]
    leading: Bool[Tensor, "batch key"]
    is_self: bool = True
    matches: tuple[tuple[Matches, ...], ...] = ()
    q_spans: Bool[Tensor, "batch span query"] | None = None
    k_spans: Bool[Tensor, "batch span key"] | None = None


@dataclass(frozen=True)
class Axes:
    """The texts on the query axis, of length `q_len`, and on the key axis, with padding on a `side` of the shorter ones.

    `is_self` where both are the same tokens; `id_of` gives the id of a word, or a number below 0; `dtype` is that of the
    computation, which says how far two ways of doing it may be apart.
    """

    queries: tuple[TokenSequence, ...]
    keys: tuple[TokenSequence, ...]
    q_len: int
    k_len: int
    side: PaddingSide
    is_self: bool
    id_of: Callable[[str], int]
    dtype: str
    device: torch.device

    def first_query(self, sequence: int) -> int:
        """The column in which a sequence's queries begin."""
        return self._first(len(self.queries[sequence].ids), self.q_len)

    def first_key(self, sequence: int) -> int:
        """The column in which its keys begin."""
        return self._first(len(self.keys[sequence].ids), self.k_len)

    def on_queries(self, rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "batch query"]:
        """A number for every query of every text, and `fill` for padding."""
        return self._filled(rows, fill, self.q_len)

    def on_keys(self, rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "batch key"]:
        """The same for the keys."""
        return self._filled(rows, fill, self.k_len)

    def real_queries(self) -> Bool[Tensor, "batch query"]:
        """Which columns of the query axis hold a token."""
        return self.on_queries([[1] * len(text.ids) for text in self.queries], 0) > 0

    def _first(self, n_tokens: int, length: int) -> int:
        return length - n_tokens if self.side == "left" else 0

    def _filled(self, rows: Sequence[Sequence[int]], fill: int, length: int) -> Int[Tensor, "batch length"]:
        full = []
        for row in rows:
            first = self._first(len(row), length)
            full.append([fill] * first + list(row) + [fill] * (length - len(row) - first))
        return torch.tensor(full, dtype=torch.int64, device=self.device)


def block_of(longest: int) -> int:
    """How many queries and keys make a cell of a map: the least power of two that leaves at most `MAP_CELLS`."""
    return 1 << (-(-longest // MAP_CELLS) - 1).bit_length()


def make_statistics_request(
    axes: Axes, patterns: Sequence[Condition] = (), *, sink_tokens: int = SINK_TOKENS, spans: Sequence[SpanTokens] = ()
) -> StatisticsRequest:
    """The request for the statistics of heads over these tokens.

    Patterns count places from the beginning of a text, through its documents. `spans` are the tokens of named parts, which are
    parts of the queries' texts and of the keys'.
    """
    places = axes.on_keys([text.places for text in axes.keys], -1)
    k_tokens = axes.on_keys([text.ids for text in axes.keys], -1)
    return StatisticsRequest(
        block=block_of(max(axes.q_len, axes.k_len)),
        q_tokens=axes.on_queries([text.ids for text in axes.queries], -1),
        k_tokens=k_tokens,
        before_k=torch.where(places > 0, k_tokens.roll(1, dims=1), -1),
        first=places == 0,
        leading=(places >= 0) & (places < sink_tokens),
        is_self=axes.is_self,
        matches=tuple(_matches(pattern, axes) for pattern in patterns),
        q_spans=_marked(spans, [len(t.ids) for t in axes.queries], axes.on_queries) if spans else None,
        k_spans=_marked(spans, [len(t.ids) for t in axes.keys], axes.on_keys) if spans else None,
    )


def _marked(
    spans: Sequence[SpanTokens], lengths: Sequence[int], placed: Callable[[list[list[int]], int], Tensor]
) -> Bool[Tensor, "batch span idx"]:
    """Which columns belong to each span."""
    rows = []
    for span in spans:
        own = [set(tokens) for tokens in span.tokens]
        rows.append(placed([[int(i in of) for i in range(n)] for of, n in zip(own, lengths, strict=True)], 0) > 0)
    return torch.stack(rows, dim=1)


def _matches(pattern: Condition, axes: Axes) -> tuple[Matches, ...]:
    """The pattern as a predicate of columns, for each sequence: places are counted from the first token of its text."""

    def of_sequence(b: int, queries: TokenSequence, keys: TokenSequence) -> Matches:
        q_tokens, k_tokens = (torch.tensor(s.ids, dtype=torch.int32, device=axes.device) for s in (queries, keys))
        return matcher(pattern, q_tokens, k_tokens, axes.id_of, first=(axes.first_query(b), axes.first_key(b)))

    pairs = zip(axes.queries, axes.keys, strict=True)
    return tuple(of_sequence(b, *pair) for b, pair in enumerate(pairs))


# ---------------------------------------------------------------------------------------------------------- conditions


def matcher(
    pattern: Condition,
    q_tokens: Int[Tensor, " query_len"],
    k_tokens: Int[Tensor, " key_len"],
    id_of: Callable[[str], int],
    *,
    first: tuple[int, int] = (0, 0),
) -> Matches:
    """A predicate like a mask: `matches(q_idx, k_idx)` is True where the pattern holds, `[query, key]`. What depends on the query
        alone is calculated as `[query, 1]`, on the key alone as `[1, key]`; only what compares the two costs a whole block.

        The ids are those of one text for the queries and one for the keys, −1 for padding; `q_idx` and `k_idx` are places in
        them, once the columns of the `first` query and key are subtracted. `id_of` says the id of a word, −1 for one that the
        vocabulary lacks: it equals no token. A comparison is false where one side is padding, outside the text, or a division by
        zero, even `!=`; `not` around it is then true.
        Raises nothing of its own; what `id_of` raises is raised here, not by the predicate.

        >>> from mhacli.record.record import SpanTokens
    from mhacli.settings import SINK_TOKENS, PaddingSide
    from mhacli.text.conditions import parse_condition
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
