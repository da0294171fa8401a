"""Mistakes that a single call does not show: in dropout, in state between calls, and in decoding with a cache.

A decoding step is described by a layout: which cached tokens are in which columns, at which position they are rotated, and
which are visible. The right layout gives the last rows of one call with the whole text. Each mistake with a cache is another
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from mhacli.attention.mistakes.stages import (
    Mistake,
    MistakeVariant,
    ReferenceInputs,
    ReferenceLayer,
    Stages,
    Symptoms,
    attend_and_merge,
    heads,
)
from mhacli.errors import first_names

# ---------------------------------------------------------------------------------------------------------- one step of decoding


@dataclass(frozen=True)
class DecodingStep:
    """The position of a step in its text: all calls so far start at `starts`, and this one ends at `end`. `is_causal`: no token
    sees a later one. `n_keys` is the number of keys in its scores, None if unknown."""

    starts: tuple[int, ...]
    end: int
    is_causal: bool
    n_keys: int | None = None

    @property
    def start(self) -> int:
        """The first token of the step."""
        return self.starts[-1]

    @property
    def length(self) -> int:
        """The number of tokens in the step."""
        return self.end - self.start

    @property
    def calls(self) -> list[tuple[int, int]]:
        """The token range of every call, `(first, end)`."""
        return list(pairwise((*self.starts, self.end)))

    def call_of(self, token: int) -> int:
        """The index of the call with a token."""
        return max(number for number, start in enumerate(self.starts) if start <= token)


@dataclass(frozen=True)
class CacheLayout:
    """The keys and values of a step. `keys` and `values` give the token in each column of the scores, −1 for an empty column;
    `visible` is bool `[query, key]`. `query_positions` and `key_positions` are the rotary positions, those of keys by column.
    Columns in `keys_of_values` hold values in place of keys, those in `values_of_keys` the reverse; columns in `of_first` come
    from the first sequence."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    query_positions: tuple[int, ...]
    key_positions: tuple[int, ...]
    visible: Tensor
    keys_of_values: frozenset[int] = frozenset()
    values_of_keys: frozenset[int] = frozenset()
    of_first: frozenset[int] = frozenset()


Change = Callable[[DecodingStep, CacheLayout], CacheLayout]


def right_layout(step: DecodingStep) -> CacheLayout:
    """The right layout: all tokens so far, in order."""
    tokens = tuple(range(step.end))
    return CacheLayout(tokens, tokens, tokens[step.start :], tokens, last_rows(step, step.end))


def last_rows(step: DecodingStep, n_keys: int, shift: int = 0) -> Tensor:
    """`[query, key]`: the last rows of a causal triangle with this number of columns, or everything."""
    ones = torch.ones(step.length, n_keys, dtype=torch.bool)
    return ones.tril(n_keys - step.length + shift) if step.is_causal else ones


def with_tokens(step: DecodingStep, layout: CacheLayout, keys: tuple[int, ...], values: tuple[int, ...]) -> CacheLayout:
    """The layout with other tokens in its columns, each at its own position."""
    positions = tuple(max(token, 0) for token in keys)
    return replace(layout, keys=keys, values=values, key_positions=positions, visible=last_rows(step, len(keys)))


@dataclass(frozen=True, eq=False)
class ProjectedText:
    """A text `[batch, length, d_in]` projected to heads of queries, keys and values, before rotation. `rotated` caches rotated
    vectors, which many layouts share."""

    layer: ReferenceLayer
    stages: Stages
    rows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    rotated: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def row(self, role: str, token: int, position: int) -> Tensor:
        """One query, key or value vector, rotated to a position; zeros for token −1."""
        vector = self.rotated.get((role, token, position))
        if vector is None:
            plain = {"q": self.q, "k": self.k, "v": self.v}[role]
            row = plain[:, :, token : token + 1] if token >= 0 else torch.zeros_like(plain[:, :, :1])
            vector = row if role == "v" else _rotated(self.layer, self.stages, row, position, is_query=role == "q")
            self.rotated[role, token, position] = vector
        return vector


def projected_text(layer: ReferenceLayer, stages: Stages, rows: Tensor) -> ProjectedText:
    """The text, projected and split into heads by a layer."""
    inputs = rows if layer.before is None else layer.before(rows)
    return ProjectedText(
        layer, stages, rows, *heads(stages, replace(layer, pairing=None), ReferenceInputs(inputs, inputs, inputs))
    )


def step_output(text: ProjectedText, step: DecodingStep, layout: CacheLayout) -> Tensor:
    """The output `[batch, query, d_out]` of a step with this layout."""
    queries = range(step.start, step.end)
    q = torch.cat(
        [text.row("q", token, position) for token, position in zip(queries, layout.query_positions, strict=True)], dim=2
    )
    keys, values = [], []
    for n, (key, value, position) in enumerate(zip(layout.keys, layout.values, layout.key_positions, strict=True)):
        k = text.row("v", key, 0) if n in layout.keys_of_values else text.row("k", key, position)
        v = text.row("k", value, value) if n in layout.values_of_keys else text.row("v", value, 0)
        keys.append(k[:1].expand_as(k) if n in layout.of_first else k)
        values.append(v[:1].expand_as(v) if n in layout.of_first else v)
    qkv = (q, torch.cat(keys, dim=2), torch.cat(values, dim=2))
    return attend_and_merge(
        text.stages, text.layer, qkv, layout.visible[None, None], None, text.rows[:, step.start : step.end]
    )


def _rotated(layer: ReferenceLayer, stages: Stages, row: Tensor, position: int, *, is_query: bool = False) -> Tensor:
    """One query or key vector, rotated to a position."""
    if layer.pairing is None:
        return row
    padded = row.new_zeros(*row.shape[:2], position + 1, row.shape[-1])
    if is_query:
        return stages.rotate(layer, row, padded)[0]
    padded[:, :, position:] = row
    return stages.rotate(layer, row, padded)[1][:, :, position:]


# ------------------------------------------------------------------------------------------------------------------- positions


def _at_positions(queries: Callable[[DecodingStep, int], int], keys: Callable[[DecodingStep, int], int]) -> Change:
    """Queries and keys rotated to other positions, given by token; empty columns are not rotated."""

    def change_layout(step: DecodingStep, layout: CacheLayout) -> CacheLayout:
        return replace(
            layout,
            query_positions=tuple(max(0, queries(step, token)) for token in range(step.start, step.end)),
            key_positions=tuple(max(0, keys(step, token)) if token >= 0 else 0 for token in layout.keys),
        )

    return change_layout


def _right(step: DecodingStep, token: int) -> int:
    return token


def _in_step(step: DecodingStep, token: int) -> int:
    return token - step.starts[step.call_of(token)]


def _by_call_count(step: DecodingStep, token: int) -> int:
    return _in_step(step, token) + step.call_of(token)


def _shifted(by: int) -> Callable[[DecodingStep, int], int]:
    return lambda step, token: token + by if step.call_of(token) else token


def _rotated_again(step: DecodingStep, token: int) -> int:
    return token * (len(step.starts) - step.call_of(token))


def _last_of_call(step: DecodingStep, token: int) -> int:
    call = step.call_of(token)
    return step.calls[call][1] - 1 if call else token


def _start_of_step(step: DecodingStep, token: int) -> int:
    return step.start if step.start else token


def _from(start: int) -> Callable[[DecodingStep, int], int]:
    return lambda step, token: start + _in_step(step, token) if step.call_of(token) else token


_POSITIONS = (
    MistakeVariant("a step is rotated as if it began at position 0", _at_positions(_in_step, _in_step)),
    MistakeVariant(
        "the queries of a step are rotated as if it began at position 0, its keys as they should be",
        _at_positions(_in_step, _right),
    ),
    MistakeVariant(
        "the keys of a step are rotated as if it began at position 0, its queries as they should be",
        _at_positions(_right, _in_step),
    ),
    MistakeVariant(
        "cached keys, rotated already, are rotated again in every step", _at_positions(_right, _rotated_again)
    ),
    MistakeVariant("a step stands one position too far to the right", _at_positions(_shifted(1), _shifted(1))),
    MistakeVariant("a step stands one position too far to the left", _at_positions(_shifted(-1), _shifted(-1))),
    MistakeVariant("the queries of a step stand one position too far to the right", _at_positions(_shifted(1), _right)),
    MistakeVariant("the queries of a step stand one position too far to the left", _at_positions(_shifted(-1), _right)),
    MistakeVariant("the keys of a step stand one position too far to the right", _at_positions(_right, _shifted(1))),
    MistakeVariant("the keys of a step stand one position too far to the left", _at_positions(_right, _shifted(-1))),
    MistakeVariant("positions count the calls and not the tokens", _at_positions(_by_call_count, _by_call_count)),
    MistakeVariant("all tokens of a step stand at its last position", _at_positions(_last_of_call, _last_of_call)),
    MistakeVariant(
        "all keys, cached ones too, are rotated by the position of the step", _at_positions(_right, _start_of_step)
    ),
    *(
        MistakeVariant(f"every step is rotated as if it began at position {n}", _at_positions(_from(n), _from(n)))
        for n in range(1, 9)
    ),
)

# ----------------------------------------------------------------------------------------------------------------------- order


def _rows(tokens: Callable[[DecodingStep], list[int]], part: str = "both", *, by_column: bool = False) -> Change:
    """Other tokens in the columns of keys, values, or both, rotated by token position or by column."""

    def change_layout(step: DecodingStep, layout: CacheLayout) -> CacheLayout:
        token_columns = tuple(tokens(step))
        keys = token_columns if part != "values" else layout.keys
        values = token_columns if part != "keys" else layout.values
        if len(keys) != len(values):
            raise ValueError("as many keys as values")
        new_layout = with_tokens(step, layout, keys, values)
        return replace(new_layout, key_positions=tuple(range(len(keys)))) if by_column else new_layout

    return change_layout


def _new_first(step: DecodingStep) -> list[int]:
    return [token for first, end in reversed(step.calls) for token in range(first, end)]


def _step_reversed(step: DecodingStep) -> list[int]:
    return list(reversed(range(step.end)))


def _written_from(start: Callable[[DecodingStep, int], int]) -> Callable[[DecodingStep], list[int]]:
    """The first columns of a cache in which every call writes from a given column on."""

    def tokens(step: DecodingStep) -> list[int]:
        columns = [-1] * (2 * step.end + 2)
        for number, (first, end) in enumerate(step.calls):
            column = max(0, start(step, number))
            columns[column : column + end - first] = range(first, end)
        return columns[: step.end]

    return tokens


def _this_step(step: DecodingStep) -> list[int]:
    return list(range(step.start, step.end))


def _two_steps(step: DecodingStep) -> list[int]:
    return list(range(step.starts[-2] if len(step.starts) > 1 else 0, step.end))


def _first_and_this(step: DecodingStep) -> list[int]:
    return [
        *range(step.starts[1] if len(step.starts) > 1 else 0),
        *(_this_step(step) if len(step.starts) > 1 else range(step.end)),
    ]


def _twice(step: DecodingStep) -> list[int]:
    return [*range(step.end), *range(step.start, step.end)] if step.start else list(range(step.end))


def _first_columns(step: DecodingStep) -> list[int]:
    return list(range(step.length))


def _without_step(step: DecodingStep) -> list[int]:
    return list(range(step.start)) or list(range(step.end))


def _cached_from_first(step: DecodingStep, layout: CacheLayout) -> CacheLayout:
    return replace(layout, of_first=frozenset(n for n, token in enumerate(layout.keys) if 0 <= token < step.start))


def _all_from_first(step: DecodingStep, layout: CacheLayout) -> CacheLayout:
    return replace(layout, of_first=frozenset(range(len(layout.keys)))) if step.start else layout


def _swapped(keep: Callable[[DecodingStep, int], bool], *, keys: bool = True, values: bool = True) -> Change:
    """The layout with keys and values exchanged for some tokens."""

    def change_layout(step: DecodingStep, layout: CacheLayout) -> CacheLayout:
        columns = frozenset(n for n, token in enumerate(layout.keys) if token >= 0 and keep(step, token))
        empty: frozenset[int] = frozenset()
        return replace(layout, keys_of_values=columns if keys else empty, values_of_keys=columns if values else empty)

    return change_layout


def _is_old(step: DecodingStep, token: int) -> bool:
    return token < step.start


def _is_odd(step: DecodingStep, token: int) -> bool:
    """Whether keys and values were exchanged an odd number of times on the way to this step."""
    return (len(step.starts) - 1 - step.call_of(token)) % 2 == 1


_WRITTEN = {
    "over the first rows of the cache": lambda step, number: 0,
    "one row too early, over the last cached one": lambda step, number: step.starts[number] - 1,
    "one row too late": lambda step, number: step.starts[number] + bool(number),
    "at a place that counts the calls and not the tokens": lambda step, number: number,
}
_ORDERS = (
    *(
        MistakeVariant(
            f"new {what} stand before the cached ones{turned}", _rows(_new_first, of, by_column=bool(turned))
        )
        for what, of in (("rows", "both"), ("keys", "keys"), ("values", "values"))
        for turned in ("", ", and keys are rotated by their positions")
    ),
    *(
        MistakeVariant(f"the {what} of every step are written {where}", _rows(_written_from(place), of))
        for what, of in (("rows", "both"), ("keys", "keys"), ("values", "values"))
        for where, place in _WRITTEN.items()
    ),
    MistakeVariant("a step reads its own rows alone, nothing that is cached", _rows(_this_step)),
    MistakeVariant("only the rows of the step before are kept", _rows(_two_steps)),
    MistakeVariant("only the rows of the first call are kept", _rows(_first_and_this)),
    MistakeVariant("as many rows are read from the beginning of the cache as the step has", _rows(_first_columns)),
    MistakeVariant("the rows of the step itself are not read", _rows(_without_step)),
    MistakeVariant("the rows of a step stand in the cache twice", _rows(_twice)),
    MistakeVariant("all rows are read in the opposite order", _rows(_step_reversed)),
    MistakeVariant("the values alone are read in the opposite order", _rows(_step_reversed, "values")),
    MistakeVariant("every sequence of the batch reads the cached rows of the first one", _cached_from_first),
    MistakeVariant("every sequence of the batch reads the rows of the first one", _all_from_first),
    MistakeVariant("cached keys and values are exchanged whenever they are handed on", _swapped(_is_odd)),
    MistakeVariant("cached keys are read as values, and values as keys", _swapped(_is_old)),
    MistakeVariant(
        "all keys are read as values, and values as keys, as soon as there is a cache",
        _swapped(lambda step, token: True),
    ),
    MistakeVariant("cached keys are read for the cached values", _swapped(_is_old, keys=False)),
    MistakeVariant("cached values are read for the cached keys", _swapped(_is_old, values=False)),
)

# ----------------------------------------------------------------------------------------------------------------------- masks


def _with_visibility(rule: Callable[[DecodingStep, int], torch.Tensor]) -> Change:
    def change_layout(step: DecodingStep, layout: CacheLayout) -> CacheLayout:
        return replace(layout, visible=rule(step, len(layout.keys))) if step.start else layout

    return change_layout


def _top_left(step: DecodingStep, n_keys: int) -> torch.Tensor:
    return torch.ones(step.length, n_keys, dtype=torch.bool).tril()


def _columns(keep: Callable[[DecodingStep, int], bool]) -> Callable[[DecodingStep, int], torch.Tensor]:
    def rule(step: DecodingStep, n_keys: int) -> torch.Tensor:
        is_kept = torch.tensor([keep(step, column) for column in range(n_keys)])
        return last_rows(step, n_keys) & is_kept

    return rule


def _with_empty_columns(applies: Callable[[DecodingStep], bool], *, sees_all: bool) -> Change:
    """The layout with the empty columns of the cache, in some steps."""

    def change_layout(step: DecodingStep, layout: CacheLayout) -> CacheLayout:
        n_empty = (step.n_keys or 0) - len(layout.keys)
        if n_empty <= 0 or not applies(step):
            return layout
        visible = torch.ones(step.length, len(layout.keys) + n_empty, dtype=torch.bool)
        if not sees_all:
            visible[:, : len(layout.keys)] = layout.visible
        empty = (-1,) * n_empty
        return replace(
            layout,
            keys=layout.keys + empty,
            values=layout.values + empty,
            key_positions=layout.key_positions + (0,) * n_empty,
            visible=visible,
        )

    return change_layout


UNMASKED = MistakeVariant(
    "nothing keeps the tokens of a step from attending to the later ones of it",
    _with_visibility(lambda step, n_keys: torch.ones(step.length, n_keys, dtype=torch.bool)),
)
TOP_LEFT = MistakeVariant(
    "the causal mask of a step puts its first query at the first key", _with_visibility(_top_left)
)
TOP_LEFT_CHUNKS = MistakeVariant(
    "the causal mask of a step of several tokens puts its first query at the first key",
    _with_visibility(lambda step, n_keys: (_top_left if step.length > 1 else last_rows)(step, n_keys)),
)
_VISIBILITY = (
    TOP_LEFT,
    TOP_LEFT_CHUNKS,
    UNMASKED,
    MistakeVariant("a step sees one key too few: not itself", _with_visibility(lambda step, n: last_rows(step, n, -1))),
    MistakeVariant("a step sees one key too many", _with_visibility(lambda step, n: last_rows(step, n, 1))),
    MistakeVariant(
        "the cached keys are hidden from a step", _with_visibility(_columns(lambda step, column: column >= step.start))
    ),
    MistakeVariant(
        "the keys of a step are hidden from it", _with_visibility(_columns(lambda step, column: column < step.start))
    ),
    MistakeVariant("the first key is hidden from a step", _with_visibility(_columns(lambda step, column: column > 0))),
    MistakeVariant(
        "the last cached key is hidden from a step",
        _with_visibility(_columns(lambda step, column: column != step.start - 1)),
    ),
    MistakeVariant(
        "the empty places of the cache are attended to", _with_empty_columns(lambda step: True, sees_all=False)
    ),
    MistakeVariant(
        "nothing is masked, and the empty places of the cache are attended to",
        _with_empty_columns(lambda step: True, sees_all=True),
    ),
    MistakeVariant(
        "in later steps the empty places of the cache are attended to",
        _with_empty_columns(lambda step: step.start > 0, sees_all=True),
    ),
    MistakeVariant(
        "in steps of one token the empty places of the cache are attended to",
        _with_empty_columns(lambda step: step.length == 1, sees_all=True),
    ),
)


def _acts_in_eval(symptoms: Symptoms) -> str | None:
    if symptoms.is_random:
        return symptoms.messages["determinism"]
    return symptoms.messages["dropout in eval"] if symptoms.is_random_with_dropout else None


CACHING = (
    Mistake(
        "dropout-in-eval",
        site="pattern",
        operations=("dropout", "scaled_dot_product_attention"),
        in_source=r"dropout\(",
        symptom=_acts_in_eval,
    ),
    Mistake(
        "dropout-not-rescaled",
        site="pattern",
        operations=("bernoulli", "bernoulli_", "rand_like", "rand", "dropout"),
        in_source=r"rand|bernoulli",
        symptom=lambda seen: seen.messages["dropout in training"] if seen.is_rescaled is False else None,
    ),
    Mistake(
        "state-kept-between-calls",
        site="k",
        in_source=r"self\.\w+\s*[-+*/]?=(?!=)|\.append\(|\.copy_\(|if self\.\w+ is None",
        symptom=lambda seen: seen.messages["determinism"] if seen.keeps_state else None,
    ),
    Mistake(
        "batch-leak",
        symptom=lambda seen: seen.messages["batch independence"] if seen.leaks_batch else None,
    ),
    Mistake(
        "unused-parameters",
        symptom=lambda seen: f"no output depends on {first_names(seen.unused, 4)}" if seen.unused else None,
    ),
    Mistake(
        "cache-position",
        site="q",
        operations=("getitem", "arange", "index_select", "narrow", "embedding", "mul", "cos", "sin"),
        in_source=r"(?i)freqs|rope|rota|\bcos|\bsin|pos|offset|angle|arange|start",
        applies=lambda hints, layer: layer.pairing is not None,
    ),
    Mistake(
        "cache-order",
        site="k",
        operations=("cat", "setitem", "copy_", "index_copy_", "slice_scatter", "stack", "getitem", "narrow"),
        in_source=r"(?i)cache|past|prev|mem|kept|state|update|\bbuf|\bkeys?\b|\bvalues?\b",
    ),
    Mistake(
        "cache-mask",
        site="scores",
        operations=("tril", "triu", "masked_fill", "masked_fill_", "where", "scaled_dot_product_attention", "softmax"),
    ),
)

CACHE_LAYOUTS: Mapping[str, tuple[MistakeVariant, ...]] = {
    "cache-order": _ORDERS,
    "cache-position": _POSITIONS,
    "cache-mask": _VISIBILITY,
}
"""The wrong layouts of each code; each replacement is a `Change`."""
