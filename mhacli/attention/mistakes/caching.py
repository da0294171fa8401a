"""Mistakes that one call does not show: in dropout, in what is kept between calls, and in decoding step by step with a cache.

One step of decoding, by the stages of attention, is an arrangement: which cached rows stand where, at which position they are
rotated, and what attends to them. As it should be, it gives the last rows of one call with the whole text; what people get
wrong with a cache is another arrangement.
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
    finished,
    heads,
)

# ---------------------------------------------------------------------------------------------------------- one step of decoding


@dataclass(frozen=True)
class DecodingStep:
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
class CacheLayout:
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


Change = Callable[[DecodingStep, CacheLayout], CacheLayout]


def right_layout(step: DecodingStep) -> CacheLayout:
    """The step as it should be: all tokens so far in their order."""
    tokens = tuple(range(step.end))
    return CacheLayout(tokens, tokens, tokens[step.start :], tokens, last_rows(step, step.end))


def last_rows(step: DecodingStep, n_keys: int, shift: int = 0) -> Tensor:
    """`[query, key]`: the last rows of the causal triangle over as many columns, or everything."""
    ones = torch.ones(step.length, n_keys, dtype=torch.bool)
    return ones.tril(n_keys - step.length + shift) if step.is_causal else ones


def with_rows(step: DecodingStep, laid: CacheLayout, keys: tuple[int, ...], values: tuple[int, ...]) -> CacheLayout:
    """The arrangement with other tokens in its columns, each turned by its own place."""
    places = tuple(max(token, 0) for token in keys)
    return replace(laid, keys=keys, values=values, key_places=places, visible=last_rows(step, len(keys)))


@dataclass(frozen=True, eq=False)
class ProjectedText:
    """A text `[batch, length, d_in]` as the stages of a layer project it: heads of queries, keys and values, not rotated.
    `rotated` remembers rows that were, for many arrangements share them."""

    layer: ReferenceLayer
    stages: Stages
    rows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    rotated: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def row(self, which: str, token: int, place: int) -> Tensor:
        """A row of queries, of keys, or of values in their place, turned by a position; zeros where the token is −1."""
        found = self.rotated.get((which, token, place))
        if found is None:
            plain = {"q": self.q, "k": self.k, "v": self.v}[which]
            row = plain[:, :, token : token + 1] if token >= 0 else torch.zeros_like(plain[:, :, :1])
            found = row if which == "v" else _rotated(self.layer, self.stages, row, place, is_query=which == "q")
            self.rotated[which, token, place] = found
        return found


def projected_text(layer: ReferenceLayer, stages: Stages, rows: Tensor) -> ProjectedText:
    """The text, projected and split into heads by the stages of a layer."""
    asked = rows if layer.before is None else layer.before(rows)
    return ProjectedText(
        layer, stages, rows, *heads(stages, replace(layer, pairing=None), ReferenceInputs(asked, asked, asked))
    )


def answered(text: ProjectedText, step: DecodingStep, laid: CacheLayout) -> Tensor:
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


def _rotated(layer: ReferenceLayer, stages: Stages, row: Tensor, place: int, *, is_query: bool = False) -> Tensor:
    """A row of queries or keys as the layer turns it at a place: queries stand at the end of the keys, keys from the
    beginning."""
    if layer.pairing is None:
        return row
    long = row.new_zeros(*row.shape[:2], place + 1, row.shape[-1])
    if is_query:
        return stages.rotate(layer, row, long)[0]
    long[:, :, place:] = row
    return stages.rotate(layer, row, long)[1][:, :, place:]


# ------------------------------------------------------------------------------------------------------------------- positions


def _placed(queries: Callable[[DecodingStep, int], int], keys: Callable[[DecodingStep, int], int]) -> Change:
    """Queries and keys turned by other places than their own, by token; what is empty is not turned."""

    def change(step: DecodingStep, laid: CacheLayout) -> CacheLayout:
        return replace(
            laid,
            query_places=tuple(max(0, queries(step, token)) for token in range(step.start, step.end)),
            key_places=tuple(max(0, keys(step, token)) if token >= 0 else 0 for token in laid.keys),
        )

    return change


def _own(step: DecodingStep, token: int) -> int:
    return token


def _in_step(step: DecodingStep, token: int) -> int:
    return token - step.starts[step.call_of(token)]


def _from_number(step: DecodingStep, token: int) -> int:
    return _in_step(step, token) + step.call_of(token)


def _shifted(by: int) -> Callable[[DecodingStep, int], int]:
    return lambda step, token: token + by if step.call_of(token) else token


def _again(step: DecodingStep, token: int) -> int:
    return token * (len(step.starts) - step.call_of(token))


def _last(step: DecodingStep, token: int) -> int:
    call = step.call_of(token)
    return step.calls[call][1] - 1 if call else token


def _of_step(step: DecodingStep, token: int) -> int:
    return step.start if step.start else token


def _from(place: int) -> Callable[[DecodingStep, int], int]:
    return lambda step, token: place + _in_step(step, token) if step.call_of(token) else token


_PLACES = (
    MistakeVariant("a step is rotated as if it began at position 0", _placed(_in_step, _in_step)),
    MistakeVariant(
        "the queries of a step are rotated as if it began at position 0, its keys as they should be",
        _placed(_in_step, _own),
    ),
    MistakeVariant(
        "the keys of a step are rotated as if it began at position 0, its queries as they should be",
        _placed(_own, _in_step),
    ),
    MistakeVariant("cached keys, rotated already, are rotated again in every step", _placed(_own, _again)),
    MistakeVariant("a step stands one position too far to the right", _placed(_shifted(1), _shifted(1))),
    MistakeVariant("a step stands one position too far to the left", _placed(_shifted(-1), _shifted(-1))),
    MistakeVariant("the queries of a step stand one position too far to the right", _placed(_shifted(1), _own)),
    MistakeVariant("the queries of a step stand one position too far to the left", _placed(_shifted(-1), _own)),
    MistakeVariant("the keys of a step stand one position too far to the right", _placed(_own, _shifted(1))),
    MistakeVariant("the keys of a step stand one position too far to the left", _placed(_own, _shifted(-1))),
    MistakeVariant("positions count the calls and not the tokens", _placed(_from_number, _from_number)),
    MistakeVariant("all tokens of a step stand at its last position", _placed(_last, _last)),
    MistakeVariant("all keys, cached ones too, are rotated by the position of the step", _placed(_own, _of_step)),
    *(
        MistakeVariant(f"every step is rotated as if it began at position {n}", _placed(_from(n), _from(n)))
        for n in range(1, 9)
    ),
)

# ----------------------------------------------------------------------------------------------------------------------- order


def _rows(tokens: Callable[[DecodingStep], list[int]], of: str = "both", *, by_column: bool = False) -> Change:
    """Other tokens in the columns of the keys, of the values, or of both; turned by their own places or by their columns."""

    def change(step: DecodingStep, laid: CacheLayout) -> CacheLayout:
        found = tuple(tokens(step))
        keys = found if of != "values" else laid.keys
        values = found if of != "keys" else laid.values
        if len(keys) != len(values):
            raise ValueError("as many keys as values")
        made = with_rows(step, laid, keys, values)
        return replace(made, key_places=tuple(range(len(keys)))) if by_column else made

    return change


def _new_first(step: DecodingStep) -> list[int]:
    return [token for first, end in reversed(step.calls) for token in range(first, end)]


def _step_reversed(step: DecodingStep) -> list[int]:
    return list(reversed(range(step.end)))


def _written_at(place: Callable[[DecodingStep, int], int]) -> Callable[[DecodingStep], list[int]]:
    """What is left where every call writes its rows from some place on, and the first columns are read."""

    def left(step: DecodingStep) -> list[int]:
        columns = [-1] * (2 * step.end + 2)
        for number, (first, end) in enumerate(step.calls):
            at = max(0, place(step, number))
            columns[at : at + end - first] = range(first, end)
        return columns[: step.end]

    return left


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


def _late(step: DecodingStep) -> list[int]:
    return list(range(step.start)) or list(range(step.end))


def _old_by_first(step: DecodingStep, laid: CacheLayout) -> CacheLayout:
    return replace(laid, of_first=frozenset(n for n, token in enumerate(laid.keys) if 0 <= token < step.start))


def _all_by_first(step: DecodingStep, laid: CacheLayout) -> CacheLayout:
    return replace(laid, of_first=frozenset(range(len(laid.keys)))) if step.start else laid


def _swapped(keep: Callable[[DecodingStep, int], bool], *, keys: bool = True, values: bool = True) -> Change:
    """Rows of some tokens stand as values where keys should, and as keys where values should."""

    def change(step: DecodingStep, laid: CacheLayout) -> CacheLayout:
        found = frozenset(n for n, token in enumerate(laid.keys) if token >= 0 and keep(step, token))
        none: frozenset[int] = frozenset()
        return replace(laid, keys_of_values=found if keys else none, values_of_keys=found if values else none)

    return change


def _is_old(step: DecodingStep, token: int) -> bool:
    return token < step.start


def _is_odd(step: DecodingStep, token: int) -> bool:
    """Each handing over exchanges what came before: what went through an odd number of them is exchanged."""
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
        MistakeVariant(f"the {what} of every step are written {where}", _rows(_written_at(place), of))
        for what, of in (("rows", "both"), ("keys", "keys"), ("values", "values"))
        for where, place in _WRITTEN.items()
    ),
    MistakeVariant("a step reads its own rows alone, nothing that is cached", _rows(_this_step)),
    MistakeVariant("only the rows of the step before are kept", _rows(_two_steps)),
    MistakeVariant("only the rows of the first call are kept", _rows(_first_and_this)),
    MistakeVariant("as many rows are read from the beginning of the cache as the step has", _rows(_first_columns)),
    MistakeVariant("the rows of the step itself are not read", _rows(_late)),
    MistakeVariant("the rows of a step stand in the cache twice", _rows(_twice)),
    MistakeVariant("all rows are read in the opposite order", _rows(_step_reversed)),
    MistakeVariant("the values alone are read in the opposite order", _rows(_step_reversed, "values")),
    MistakeVariant("every sequence of the batch reads the cached rows of the first one", _old_by_first),
    MistakeVariant("every sequence of the batch reads the rows of the first one", _all_by_first),
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


def _visible_by(rule: Callable[[DecodingStep, int], torch.Tensor]) -> Change:
    def change(step: DecodingStep, laid: CacheLayout) -> CacheLayout:
        return replace(laid, visible=rule(step, len(laid.keys))) if step.start else laid

    return change


def _top_left(step: DecodingStep, n_keys: int) -> torch.Tensor:
    return torch.ones(step.length, n_keys, dtype=torch.bool).tril()


def _columns(keep: Callable[[DecodingStep, int], bool]) -> Callable[[DecodingStep, int], torch.Tensor]:
    def rule(step: DecodingStep, n_keys: int) -> torch.Tensor:
        kept = torch.tensor([keep(step, column) for column in range(n_keys)])
        return last_rows(step, n_keys) & kept

    return rule


def _with_room(is_meant: Callable[[DecodingStep], bool], *, sees_all: bool) -> Change:
    """In some steps columns for all that the cache has room for, what is empty too."""

    def change(step: DecodingStep, laid: CacheLayout) -> CacheLayout:
        n_empty = (step.room or 0) - len(laid.keys)
        if n_empty <= 0 or not is_meant(step):
            return laid
        visible = torch.ones(step.length, len(laid.keys) + n_empty, dtype=torch.bool)
        if not sees_all:
            visible[:, : len(laid.keys)] = laid.visible
        more = (-1,) * n_empty
        return replace(
            laid,
            keys=laid.keys + more,
            values=laid.values + more,
            key_places=laid.key_places + (0,) * n_empty,
            visible=visible,
        )

    return change


UNMASKED = MistakeVariant(
    "nothing keeps the tokens of a step from attending to the later ones of it",
    _visible_by(lambda step, n_keys: torch.ones(step.length, n_keys, dtype=torch.bool)),
)
TOP_LEFT = MistakeVariant("the causal mask of a step puts its first query at the first key", _visible_by(_top_left))
TOP_LEFT_CHUNKS = MistakeVariant(
    "the causal mask of a step of several tokens puts its first query at the first key",
    _visible_by(lambda step, n_keys: (_top_left if step.length > 1 else last_rows)(step, n_keys)),
)
_SEEN = (
    TOP_LEFT,
    TOP_LEFT_CHUNKS,
    UNMASKED,
    MistakeVariant("a step sees one key too few: not itself", _visible_by(lambda step, n: last_rows(step, n, -1))),
    MistakeVariant("a step sees one key too many", _visible_by(lambda step, n: last_rows(step, n, 1))),
    MistakeVariant(
        "the cached keys are hidden from a step", _visible_by(_columns(lambda step, column: column >= step.start))
    ),
    MistakeVariant(
        "the keys of a step are hidden from it", _visible_by(_columns(lambda step, column: column < step.start))
    ),
    MistakeVariant("the first key is hidden from a step", _visible_by(_columns(lambda step, column: column > 0))),
    MistakeVariant(
        "the last cached key is hidden from a step",
        _visible_by(_columns(lambda step, column: column != step.start - 1)),
    ),
    MistakeVariant("the empty places of the cache are attended to", _with_room(lambda step: True, sees_all=False)),
    MistakeVariant(
        "nothing is masked, and the empty places of the cache are attended to",
        _with_room(lambda step: True, sees_all=True),
    ),
    MistakeVariant(
        "in later steps the empty places of the cache are attended to",
        _with_room(lambda step: step.start > 0, sees_all=True),
    ),
    MistakeVariant(
        "in steps of one token the empty places of the cache are attended to",
        _with_room(lambda step: step.length == 1, sees_all=True),
    ),
)


def _acts_in_eval(seen: Symptoms) -> str | None:
    if seen.is_random:
        return seen.messages["determinism"]
    return seen.messages["dropout in eval"] if seen.is_random_with_dropout else None


def _remembers_calls(seen: Symptoms) -> str | None:
    if seen.keeps_state:
        return seen.messages["determinism"]
    return "the mask of one call still acts in the next one" if seen.remembers_masks else None


CACHING = (
    Mistake(
        "dropout-in-eval",
        "dropout acts although the module is in evaluation",
        "F.dropout(pattern, self.p)  # or F.scaled_dot_product_attention(…, dropout_p=self.p)",
        "the same input gives another output each time",
        "F.dropout(pattern, self.p, training=self.training)",
        site="pattern",
        fix_in_torch="F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)",
        operations=("dropout", "scaled_dot_product_attention"),
        in_source=r"dropout\(",
        symptom=_acts_in_eval,
    ),
    Mistake(
        "dropout-not-rescaled",
        "what dropout keeps is not divided by 1 − p",
        "pattern * (torch.rand_like(pattern) > p)",
        "outputs in training are smaller than in evaluation, by the factor 1 − p",
        "F.dropout(pattern, p, training=self.training)",
        site="pattern",
        operations=("bernoulli", "bernoulli_", "rand_like", "rand", "dropout"),
        in_source=r"rand|bernoulli",
        symptom=lambda seen: seen.messages["dropout in training"] if seen.is_rescaled is False else None,
    ),
    Mistake(
        "state-kept-between-calls",
        "the module remembers earlier calls: the same input gives another output later",
        "self.cache = torch.cat([self.cache, k], dim=1)",
        "the output of a text depends on earlier calls",
        "pass the cache in and out: forward(x, past) -> out, past",
        site="k",
        in_source=r"self\.\w+\s*[-+*/]?=(?!=)|\.append\(|\.copy_\(|if self\.\w+ is None",
        symptom=_remembers_calls,
    ),
    Mistake(
        "cache-position",
        "with a cache, the rows of a step are placed at wrong positions",
        "q, k = rotate(q, freqs[:t]), rotate(k, freqs[:t])  # whatever start_pos is",
        "one call with the whole text is right; token by token the distances are wrong",
        "q, k = rotate(q, freqs[start : start + t]), rotate(k, freqs[start : start + t])  # each key once, when it is cached",
        site="q",
        operations=("getitem", "arange", "index_select", "narrow", "embedding", "mul", "cos", "sin"),
        in_source=r"(?i)freqs|rope|rota|\bcos|\bsin|pos|offset|angle|arange|start",
        applies=lambda hints, layer: layer.pairing is not None,
    ),
    Mistake(
        "cache-order",
        "the cached rows are joined in the wrong order, overwritten, or read at the wrong place",
        "k = torch.cat([k, past_k], dim=2)",
        "one call with the whole text is right; token by token, keys and values of other tokens are read",
        "k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)",
        site="k",
        operations=("cat", "setitem", "copy_", "index_copy_", "slice_scatter", "stack", "getitem", "narrow"),
        in_source=r"(?i)cache|past|prev|mem|kept|state|update|\bbuf|\bkeys?\b|\bvalues?\b",
    ),
    Mistake(
        "cache-mask",
        "with a cache, the mask of a step hides keys that it should show, or shows what it should hide",
        "torch.ones(q_len, k_len).tril()  # the queries of a step are the last of the keys",
        "one call with the whole text is right; token by token, earlier tokens are missed, or empty entries attended to",
        "torch.ones(q_len, k_len).tril(diagonal=k_len - q_len)  # True = may attend",
        site="scores",
        fix_in_torch="F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q_len, k_len).tril(k_len - q_len).bool())",
        operations=("tril", "triu", "masked_fill", "masked_fill_", "where", "scaled_dot_product_attention", "softmax"),
    ),
)

CACHE_LAYOUTS: Mapping[str, tuple[MistakeVariant, ...]] = {
    "cache-order": _ORDERS,
    "cache-position": _PLACES,
    "cache-mask": _SEEN,
}
"""What each of them makes of a step: a `Change` of its arrangement."""
