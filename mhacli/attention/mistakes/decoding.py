"""One step of decoding with a cache, by the stages of attention: which cached rows stand where, at which position they were
turned, and what sees them. With everything as it should be it gives the last rows of one call with the whole text; what people
get wrong is another arrangement, one of `mhacli.attention.mistakes.caching`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from mhacli.attention.mistakes.stages import Layer, Rows, Stages, finished, heads


@dataclass(frozen=True)
class Step:
    """Where a step stands in its text: the calls so far, this one too, began at `starts`, and it ends at `end`. `is_causal`: no
    token sees a later one. `room` is how many keys its scores have, None where nobody knows."""

    starts: tuple[int, ...]
    end: int
    is_causal: bool
    room: int | None = None

    @property
    def start(self) -> int:
        """The first token of the step."""
        return self.starts[-1]

    @property
    def length(self) -> int:
        """How many tokens the step brings."""
        return self.end - self.start

    @property
    def calls(self) -> list[tuple[int, int]]:
        """The tokens of every call, `(first, behind the last)`."""
        return list(pairwise((*self.starts, self.end)))

    def call_of(self, token: int) -> int:
        """Which call brought a token."""
        return max(number for number, start in enumerate(self.starts) if start <= token)


@dataclass(frozen=True)
class Arrangement:
    """What a step attends with: `keys` and `values` tell for every column of the scores the token that stands there, −1 for an
    empty place; `visible`, bool `[query, key]`, who sees it. `query_places` and `key_places` are the positions that rows are
    turned by, those of keys by column. Columns of `keys_of_values` hold values in the place of keys, those of `values_of_keys`
    the other way round; those of `of_first` are rows of the first sequence."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    query_places: tuple[int, ...]
    key_places: tuple[int, ...]
    visible: Tensor
    keys_of_values: frozenset[int] = frozenset()
    values_of_keys: frozenset[int] = frozenset()
    of_first: frozenset[int] = frozenset()


Change = Callable[[Step, Arrangement], Arrangement]


def arranged(step: Step) -> Arrangement:
    """The step as it should be: all tokens so far in their order."""
    tokens = tuple(range(step.end))
    return Arrangement(tokens, tokens, tokens[step.start :], tokens, last_rows(step, step.end))


def last_rows(step: Step, n_keys: int, shift: int = 0) -> Tensor:
    """`[query, key]`: the last rows of the causal triangle over as many columns, or everything."""
    ones = torch.ones(step.length, n_keys, dtype=torch.bool)
    return ones.tril(n_keys - step.length + shift) if step.is_causal else ones


def with_rows(step: Step, laid: Arrangement, keys: tuple[int, ...], values: tuple[int, ...]) -> Arrangement:
    """The arrangement with other tokens in its columns, each turned by its own place."""
    places = tuple(max(token, 0) for token in keys)
    return replace(laid, keys=keys, values=values, key_places=places, visible=last_rows(step, len(keys)))


@dataclass(frozen=True, eq=False)
class Text:
    """A text `[batch, length, d_in]` as the stages of a layer project it: heads of queries, keys and values, not turned. `turned`
    remembers rows that were turned, for many arrangements share them."""

    layer: Layer
    stages: Stages
    rows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    turned: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def row(self, which: str, token: int, place: int) -> Tensor:
        """A row of queries, of keys, or of values in their place, turned by a position; zeros where the token is −1."""
        found = self.turned.get((which, token, place))
        if found is None:
            plain = {"q": self.q, "k": self.k, "v": self.v}[which]
            row = plain[:, :, token : token + 1] if token >= 0 else torch.zeros_like(plain[:, :, :1])
            found = row if which == "v" else _turned(self.layer, self.stages, row, place, is_query=which == "q")
            self.turned[which, token, place] = found
        return found


def text_of(layer: Layer, stages: Stages, rows: Tensor) -> Text:
    """The text, projected and cut into heads by the stages of a layer."""
    asked = rows if layer.before is None else layer.before(rows)
    return Text(layer, stages, rows, *heads(stages, replace(layer, pairing=None), Rows(asked, asked, asked)))


def answered(text: Text, step: Step, laid: Arrangement) -> Tensor:
    """The output `[batch, query, d_out]` of a step that attends so."""
    queries = range(step.start, step.end)
    q = torch.cat([text.row("q", token, place) for token, place in zip(queries, laid.query_places, strict=True)], dim=2)
    keys, values = [], []
    for n, (key, value, place) in enumerate(zip(laid.keys, laid.values, laid.key_places, strict=True)):
        k = text.row("v", key, 0) if n in laid.keys_of_values else text.row("k", key, place)
        v = text.row("k", value, value) if n in laid.values_of_keys else text.row("v", value, 0)
        keys.append(k[:1].expand_as(k) if n in laid.of_first else k)
        values.append(v[:1].expand_as(v) if n in laid.of_first else v)
    made = (q, torch.cat(keys, dim=2), torch.cat(values, dim=2))
    return finished(text.stages, text.layer, made, laid.visible[None, None], None, text.rows[:, step.start : step.end])


def _turned(layer: Layer, stages: Stages, row: Tensor, place: int, *, is_query: bool = False) -> Tensor:
    """A row of queries or keys as the layer turns it at a place: queries stand at the end of the keys, keys from the
    beginning."""
    if layer.pairing is None:
        return row
    long = row.new_zeros(*row.shape[:2], place + 1, row.shape[-1])
    if is_query:
        return stages.turn(layer, row, long)[0]
    long[:, :, place:] = row
    return stages.turn(layer, row, long)[1][:, :, place:]
