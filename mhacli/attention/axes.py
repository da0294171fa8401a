"""What statistics need of the tokens on both axes: where texts begin, equal tokens, spans, and
where a condition holds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt
from torch import Tensor
from torch.nn.functional import pad

from mhacli.conditions import OPERATIONS, Condition, axes_of, number_of
from mhacli.record.record import SpanTokens
from mhacli.run import CellIndex
from mhacli.settings import PaddingSide, Statistics
from mhacli.text.tokens import Sequences, places_in

from .core import Allowed, KeyIdx, QueryIdx
from .devices import moved
from .scores import exact_dtype

Rows = tuple[tuple[int, ...], ...]
"""A number for each token of each text."""
_Plane = Bool[Tensor, "#query #key"]

MAP_CELLS = 192
"""Cells of a map along its longer side, at most."""


CHECKED_WHOLE = 128
"""Up to so many queries z is computed again from the weights of all of them."""
CHECKED_ROWS = 16
"""Of more queries, so many are checked, which are evenly spread."""


@dataclass(frozen=True, eq=False)
class StatisticsRequest:
    """What the statistics depend on: the texts on both axes, the blocks of the map, tokens, marked
    keys, matching cells.

    `block` queries and keys, a power of two, make a cell of the map. `q_tokens` and `k_tokens` are
    ids, below 0 where there is no token; `before_k` is the token before each key in its text.
    `first` marks the first key of every text, `leading` the first few. `matches` has, for each
    condition, one predicate per sequence. `q_spans` and `k_spans` mark the tokens of named parts of
    the texts, between which weights are added up. `checked` are the queries whose z is checked,
    some of them more than once; `real` marks those that are not padding, None if none is.

    The tensors are on the device of the axes, those of the `host` on the CPU.
    """

    axes: Axes
    block: int
    checked: Int[Tensor, "batch checked"]
    q_tokens: Int[Tensor, "batch query"]
    k_tokens: Int[Tensor, "batch key"]
    before_k: Int[Tensor, "batch key"]
    first: Bool[Tensor, "batch key"]
    leading: Bool[Tensor, "batch key"]
    matches: tuple[tuple[Allowed, ...], ...] = ()
    q_spans: Bool[Tensor, "batch span query"] | None = None
    k_spans: Bool[Tensor, "batch span key"] | None = None
    real: Bool[Tensor, "batch query"] | None = None
    of_host: StatisticsRequest | None = None

    @property
    def host(self) -> StatisticsRequest:
        """The request with its tensors on the CPU."""
        return self.of_host or self

    def on(self, device: torch.device) -> StatisticsRequest:
        """The request of the CPU with its tensors on a device."""
        if device.type == "cpu":
            return self
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        tensors: dict[str, Any] = {
            name: moved(value, device) for name, value in named.items() if isinstance(value, Tensor)
        }
        return replace(self, of_host=self, **tensors)

    @cached_property
    def labels(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of queries and keys, and those before keys, in 32 bits: padding of queries
        equals no key.
        """
        of_queries = torch.where(self.q_tokens < 0, -2, self.q_tokens)
        q, k, before = (
            tokens.to(torch.int32).contiguous()
            for tokens in (of_queries, self.k_tokens, self.before_k)
        )
        return q, k, before

    @cached_property
    def marks(self) -> UInt[Tensor, "batch key"]:
        """1 for the first key of a text and 2 for a leading one, added up in a byte."""
        return self.first.to(torch.uint8) + 2 * self.leading.to(torch.uint8)


@dataclass(frozen=True)
class Axis:
    """The ids of texts in as many columns as `length`, with padding on a `side` of the shorter
    ones, and the document of each token, empty for a text that is not split.
    """

    ids: Rows
    documents: Rows
    length: int
    side: PaddingSide
    device: torch.device

    @staticmethod
    def of(texts: Sequences, side: PaddingSide, device: torch.device) -> Axis:
        """The axis of some texts."""
        ids = tuple(text.ids for text in texts)
        return Axis(ids, tuple(text.documents for text in texts), max(map(len, ids)), side, device)

    def first(self, sequence: int) -> int:
        """The column in which a sequence begins."""
        return self.length - len(self.ids[sequence]) if self.side == "left" else 0

    @property
    def places(self) -> Rows:
        """The position of each token in its document."""
        return tuple(
            places_in(of, len(ids)) for of, ids in zip(self.documents, self.ids, strict=True)
        )

    def filled(self, rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "batch length"]:
        """A number for every token of every text, and `fill` for padding, on the CPU."""
        full = np.full((len(rows), self.length), fill)
        for sequence, row in enumerate(rows):
            full[sequence, self.first(sequence) :][: len(row)] = row
        return torch.from_numpy(full)

    def checked(self) -> Int[Tensor, "batch checked"]:
        """The queries whose z is checked: all of a short text, else some that are evenly spread. A
        text with fewer of them than another has its last one more than once.
        """
        rows = []
        for sequence, row in enumerate(self.ids):
            n_checked = len(row) if len(row) <= CHECKED_WHOLE else CHECKED_ROWS
            spread = torch.linspace(0, len(row) - 1, n_checked, dtype=torch.float64).round().long()
            rows.append(self.first(sequence) + spread)
        most = max(map(len, rows))
        return torch.stack([torch.cat([row, row[-1:].expand(most - len(row))]) for row in rows])


@dataclass(frozen=True)
class Axes:
    """The texts on both axes.

    `is_self` where both are the same tokens; `id_of` gives the id of a word, or a number below 0;
    `dtype` is that of the computation, which says how far two ways of doing it may be apart.
    """

    queries: Axis
    keys: Axis
    is_self: bool
    id_of: Callable[[str], int]
    dtype: str

    def cell(self, place: CellIndex) -> tuple[int, int]:
        """The row and the column of a cell in matrices with padding."""
        sequence, _, query, key = place
        return query + self.queries.first(sequence), key + self.keys.first(sequence)

    def ahead(self, sequence: int) -> int:
        """How many columns the queries of a text begin after its keys, in whose distances they do
        not count.
        """
        return 0 if self.is_self else self.queries.first(sequence) - self.keys.first(sequence)


def make_statistics_request(
    axes: Axes, chosen: Statistics = Statistics(), spans: Sequence[SpanTokens] = ()
) -> StatisticsRequest:
    """The request for the `chosen` statistics of heads over these tokens.

    Conditions count places from the beginning of a text, through its documents. `spans` are the
    tokens of named parts, which are parts of the queries' texts and of the keys'.
    """
    places = axes.keys.filled(axes.keys.places, -1)
    longest = max(axes.queries.length, axes.keys.length)
    k_tokens = axes.keys.filled(axes.keys.ids, -1)
    real = axes.queries.filled(axes.queries.places, -1) >= 0
    return StatisticsRequest(
        axes=axes,
        # the least power of two that leaves at most so many cells
        block=1 << (-(-longest // MAP_CELLS) - 1).bit_length(),
        q_tokens=axes.queries.filled(axes.queries.ids, -1),
        k_tokens=k_tokens,
        before_k=torch.where(places > 0, k_tokens.roll(1, dims=1), -1),
        first=places == 0,
        leading=(places >= 0) & (places < chosen.first_tokens),
        checked=axes.queries.checked(),
        matches=tuple(
            tuple(matcher(condition, axes, b) for b in range(len(places)))
            for condition in chosen.conditions
        ),
        q_spans=_marked(spans, axes.queries) if spans else None,
        k_spans=_marked(spans, axes.keys) if spans else None,
        real=real if bool((~real).any()) else None,
    ).on(axes.queries.device)


def _marked(spans: Sequence[SpanTokens], axis: Axis) -> Bool[Tensor, "batch span idx"]:
    """Which columns belong to each span."""
    marked = torch.zeros(len(axis.ids), len(spans), axis.length, dtype=torch.bool)
    for number, span in enumerate(spans):
        for sequence, tokens in enumerate(span.tokens):
            marked[sequence, number, [axis.first(sequence) + token for token in tokens]] = True
    return marked


# --------------------------------------------------------------------------------------- conditions


def matcher(pattern: Condition, axes: Axes, sequence: int) -> Allowed:
    """A predicate like a mask: `matches(q_idx, k_idx)` is True where the pattern holds, `[query,
    key]`. What depends on the query alone is calculated as `[query, 1]`, on the key alone as `[1,
    key]`; only what compares the two costs a whole block.

    Places count from the first token of a text. A word that the vocabulary lacks equals no token. A
    comparison is false where one side is padding, outside the text, or a division by zero, even
    `!=`; `not` around it is then true.
    """
    ids = {word: axes.id_of(word) for word in pattern.words}
    of_axes = {"q": axes.queries, "k": axes.keys}
    is_exact_in_float32 = (
        pattern.largest(sum(len(axis.ids[sequence]) for axis in of_axes.values())) < 2**24
    )
    dtype = torch.float32 if is_exact_in_float32 else exact_dtype(axes.queries.device)
    texts = {}
    for name, axis in of_axes.items():  # all places outside of a text lead to its border
        tokens = torch.tensor(axis.ids[sequence], dtype=dtype, device=axis.device)
        texts[name] = pad(tokens.where(tokens >= 0, torch.nan), (1, 1), value=torch.nan)

    def matches(q_idx: QueryIdx, k_idx: KeyIdx) -> Bool[Tensor, "query key"]:
        places = {
            "q": q_idx[:, None] - axes.queries.first(sequence),
            "k": k_idx[None, :] - axes.keys.first(sequence),
        }
        places = {name: place.to(dtype) for name, place in places.items()}
        return evaluated(pattern.body, places, texts, ids).expand(len(q_idx), len(k_idx))

    return matches


_RELATIONS: Mapping[type[ast.cmpop], Callable[[Tensor, Tensor], Tensor]] = {
    **{
        ast.Eq: torch.eq,
        ast.Lt: torch.lt,
        ast.LtE: torch.le,
        ast.Gt: torch.gt,
        ast.GtE: torch.ge,
        ast.In: torch.isin,
    },
    ast.NotEq: lambda a, b: _joined([a != b, ~a.isnan(), ~b.isnan()]),
    ast.NotIn: lambda a, b: ~(torch.isin(a, b) | a.isnan()),
}
"""Where two values are related; NaN, which is no value, has no relation to any."""


def _divisor(number: Any) -> Any:
    """A number to divide by, NaN for 0; those of the condition alone are not 0."""
    return number.where(number != 0, torch.nan) if isinstance(number, Tensor) else number


_OF_TENSORS = {
    **OPERATIONS,
    ast.FloorDiv: lambda a, b: a // _divisor(b),
    ast.Mod: lambda a, b: a % _divisor(b),
}
"""What makes one number of two."""


def _joined(
    planes: Iterable[_Plane], join: Callable[[Tensor, Tensor], Tensor] = torch.bitwise_and
) -> _Plane:
    """Where all hold, or what another operation makes of them. One by one, so that few are held; as
    bytes, for joining a column to a plane of bool takes torch eighteen times as long.
    """
    return reduce(join, (plane.view(torch.uint8) for plane in planes)).view(torch.bool)


def evaluated(
    node: ast.expr,
    places: Mapping[str, Tensor],
    texts: Mapping[str, Tensor],
    ids: Mapping[str, int],
) -> Tensor:
    """Where a condition holds; or the value of a number or the id of a token, NaN where it has
    none, of which all comparisons are false.
    """

    def of(part: ast.expr) -> Tensor:
        return evaluated(part, places, texts, ids)

    match node:
        case ast.BoolOp():
            join = torch.bitwise_and if isinstance(node.op, ast.And) else torch.bitwise_or
            return _joined(map(of, node.values), join)
        case ast.UnaryOp(op=ast.Not()):
            return ~of(node.operand)
        case ast.Compare():
            sides = pairwise((node.left, *node.comparators))
            return _joined(
                _RELATIONS[type(op)](of(a), of(b))
                for op, (a, b) in zip(node.ops, sides, strict=True)
            )
        case ast.Constant(
            value=str(word)
        ):  # those that the vocabulary lacks differ from all, and from each other
            return places["q"].new_full(
                (1, 1), ids[word] if ids[word] >= 0 else -1 - node.col_offset
            )
        case ast.Tuple(elts=words) | ast.List(elts=words):
            return torch.cat([places["q"].new_empty(0, 1), *map(of, words)])
        case ast.Subscript(slice=inner):  # the first token is that at place 1, behind the border
            text = texts["q" if "q" in axes_of(node) else "k"]
            at = of(inner).nan_to_num(nan=-1).clamp(-1, len(text) - 2)
            return text[at.long() + 1]
    number = number_of(node, _OF_TENSORS, places)
    return torch.as_tensor(number, dtype=places["q"].dtype, device=places["q"].device)
