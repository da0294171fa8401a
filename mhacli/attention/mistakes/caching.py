"""Mistakes that show only when a text is given step by step, with a cache: positions, the order of what is cached, and masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from mhacli.attention.mistakes.decoding import Arrangement, Change, Step, last_rows, with_rows
from mhacli.attention.mistakes.entry import Mistake, Way

# ------------------------------------------------------------------------------------------------------------------- positions


def _placed(queries: Callable[[Step, int], int], keys: Callable[[Step, int], int]) -> Change:
    """Queries and keys turned by other places than their own, by token; what is empty is not turned."""

    def change(step: Step, laid: Arrangement) -> Arrangement:
        return replace(
            laid,
            query_places=tuple(max(0, queries(step, token)) for token in range(step.start, step.end)),
            key_places=tuple(max(0, keys(step, token)) if token >= 0 else 0 for token in laid.keys),
        )

    return change


def _own(step: Step, token: int) -> int:
    return token


def _in_step(step: Step, token: int) -> int:
    return token - step.starts[step.call_of(token)]


def _from_number(step: Step, token: int) -> int:
    return _in_step(step, token) + step.call_of(token)


def _shifted(by: int) -> Callable[[Step, int], int]:
    return lambda step, token: token + by if step.call_of(token) else token


def _again(step: Step, token: int) -> int:
    return token * (len(step.starts) - step.call_of(token))


def _last(step: Step, token: int) -> int:
    call = step.call_of(token)
    return step.calls[call][1] - 1 if call else token


def _of_step(step: Step, token: int) -> int:
    return step.start if step.start else token


def _from(place: int) -> Callable[[Step, int], int]:
    return lambda step, token: place + _in_step(step, token) if step.call_of(token) else token


_PLACES = (
    Way("a step is turned as if it began at position 0", _placed(_in_step, _in_step)),
    Way(
        "the queries of a step are turned as if it began at position 0, its keys as they should be",
        _placed(_in_step, _own),
    ),
    Way(
        "the keys of a step are turned as if it began at position 0, its queries as they should be",
        _placed(_own, _in_step),
    ),
    Way("cached keys, turned already, are turned again in every step", _placed(_own, _again)),
    Way("a step stands one position too far to the right", _placed(_shifted(1), _shifted(1))),
    Way("a step stands one position too far to the left", _placed(_shifted(-1), _shifted(-1))),
    Way("the queries of a step stand one position too far to the right", _placed(_shifted(1), _own)),
    Way("the queries of a step stand one position too far to the left", _placed(_shifted(-1), _own)),
    Way("the keys of a step stand one position too far to the right", _placed(_own, _shifted(1))),
    Way("the keys of a step stand one position too far to the left", _placed(_own, _shifted(-1))),
    Way("positions count the calls and not the tokens", _placed(_from_number, _from_number)),
    Way("all tokens of a step stand at its last position", _placed(_last, _last)),
    Way("all keys, cached ones too, are turned by the position of the step", _placed(_own, _of_step)),
    *(Way(f"every step is turned as if it began at position {n}", _placed(_from(n), _from(n))) for n in range(1, 9)),
)

# ----------------------------------------------------------------------------------------------------------------------- order


def _rows(tokens: Callable[[Step], list[int]], of: str = "both", *, by_column: bool = False) -> Change:
    """Other tokens in the columns of the keys, of the values, or of both; turned by their own places or by their columns."""

    def change(step: Step, laid: Arrangement) -> Arrangement:
        found = tuple(tokens(step))
        keys = found if of != "values" else laid.keys
        values = found if of != "keys" else laid.values
        if len(keys) != len(values):
            raise ValueError("as many keys as values")
        made = with_rows(step, laid, keys, values)
        return replace(made, key_places=tuple(range(len(keys)))) if by_column else made

    return change


def _new_first(step: Step) -> list[int]:
    return [token for first, end in reversed(step.calls) for token in range(first, end)]


def _step_reversed(step: Step) -> list[int]:
    return list(reversed(range(step.end)))


def _written_at(place: Callable[[Step, int], int]) -> Callable[[Step], list[int]]:
    """What is left where every call writes its rows from some place on, and the first columns are read."""

    def left(step: Step) -> list[int]:
        columns = [-1] * (2 * step.end + 2)
        for number, (first, end) in enumerate(step.calls):
            at = max(0, place(step, number))
            columns[at : at + end - first] = range(first, end)
        return columns[: step.end]

    return left


def _this_step(step: Step) -> list[int]:
    return list(range(step.start, step.end))


def _two_steps(step: Step) -> list[int]:
    return list(range(step.starts[-2] if len(step.starts) > 1 else 0, step.end))


def _first_and_this(step: Step) -> list[int]:
    return [
        *range(step.starts[1] if len(step.starts) > 1 else 0),
        *(_this_step(step) if len(step.starts) > 1 else range(step.end)),
    ]


def _twice(step: Step) -> list[int]:
    return [*range(step.end), *range(step.start, step.end)] if step.start else list(range(step.end))


def _first_columns(step: Step) -> list[int]:
    return list(range(step.length))


def _late(step: Step) -> list[int]:
    return list(range(step.start)) or list(range(step.end))


def _old_by_first(step: Step, laid: Arrangement) -> Arrangement:
    return replace(laid, of_first=frozenset(n for n, token in enumerate(laid.keys) if 0 <= token < step.start))


def _all_by_first(step: Step, laid: Arrangement) -> Arrangement:
    return replace(laid, of_first=frozenset(range(len(laid.keys)))) if step.start else laid


def _swapped(keep: Callable[[Step, int], bool], *, keys: bool = True, values: bool = True) -> Change:
    """Rows of some tokens stand as values where keys should, and as keys where values should."""

    def change(step: Step, laid: Arrangement) -> Arrangement:
        found = frozenset(n for n, token in enumerate(laid.keys) if token >= 0 and keep(step, token))
        none: frozenset[int] = frozenset()
        return replace(laid, keys_of_values=found if keys else none, values_of_keys=found if values else none)

    return change


def _is_old(step: Step, token: int) -> bool:
    return token < step.start


def _is_odd(step: Step, token: int) -> bool:
    """Each handing over exchanges what came before: what went through an odd number of them is exchanged."""
    return (len(step.starts) - 1 - step.call_of(token)) % 2 == 1


_WRITTEN = {
    "over the first rows of the cache": lambda step, number: 0,
    "one row too early, over the last cached one": lambda step, number: step.starts[number] - 1,
    "one row too late": lambda step, number: step.starts[number] + bool(number),
    "at a place that counts the calls and not the tokens": lambda step, number: number,
}
_ORDERS = (
    *(Way(f"new {what} stand before the cached ones{turned}", _rows(_new_first, of, by_column=bool(turned)))
      for what, of in (("rows", "both"), ("keys", "keys"), ("values", "values"))
      for turned in ("", ", and keys are turned by where they stand")),
    *(Way(f"the {what} of every step are written {where}", _rows(_written_at(place), of))
      for what, of in (("rows", "both"), ("keys", "keys"), ("values", "values")) for where, place in _WRITTEN.items()),
    Way("a step reads its own rows alone, nothing that is cached", _rows(_this_step)),
    Way("only the rows of the step before are kept", _rows(_two_steps)),
    Way("only the rows of the first call are kept", _rows(_first_and_this)),
    Way("as many rows are read from the beginning of the cache as the step has", _rows(_first_columns)),
    Way("the rows of the step itself are not read", _rows(_late)),
    Way("the rows of a step stand in the cache twice", _rows(_twice)),
    Way("all rows are read in the opposite order", _rows(_step_reversed)),
    Way("the values alone are read in the opposite order", _rows(_step_reversed, "values")),
    Way("every sequence of the batch reads the cached rows of the first one", _old_by_first),
    Way("every sequence of the batch reads the rows of the first one", _all_by_first),
    Way("cached keys and values are exchanged whenever they are handed on", _swapped(_is_odd)),
    Way("cached keys are read as values, and values as keys", _swapped(_is_old)),
    Way("all keys are read as values, and values as keys, as soon as there is a cache", _swapped(lambda step, token: True)),
    Way("cached keys are read for the cached values", _swapped(_is_old, keys=False)),
    Way("cached values are read for the cached keys", _swapped(_is_old, values=False)),
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------- masks


def _seen(rule: Callable[[Step, int], torch.Tensor]) -> Change:
    def change(step: Step, laid: Arrangement) -> Arrangement:
        return replace(laid, visible=rule(step, len(laid.keys))) if step.start else laid

    return change


def _top_left(step: Step, n_keys: int) -> torch.Tensor:
    return torch.ones(step.length, n_keys, dtype=torch.bool).tril()


def _columns(keep: Callable[[Step, int], bool]) -> Callable[[Step, int], torch.Tensor]:
    def rule(step: Step, n_keys: int) -> torch.Tensor:
        kept = torch.tensor([keep(step, column) for column in range(n_keys)])
        return last_rows(step, n_keys) & kept

    return rule


def _with_room(is_meant: Callable[[Step], bool], *, sees_all: bool) -> Change:
    """In some steps columns for all that the cache has room for, what is empty too."""

    def change(step: Step, laid: Arrangement) -> Arrangement:
        n_empty = (step.room or 0) - len(laid.keys)
        if n_empty <= 0 or not is_meant(step):
            return laid
        visible = torch.ones(step.length, len(laid.keys) + n_empty, dtype=torch.bool)
        if not sees_all:
            visible[:, : len(laid.keys)] = laid.visible
        more = (-1,) * n_empty
        return replace(laid, keys=laid.keys + more, values=laid.values + more, key_places=laid.key_places + (0,) * n_empty,
                       visible=visible)  # fmt: skip

    return change


UNMASKED = Way("nothing keeps the tokens of a step from attending to the later ones of it",
               _seen(lambda step, n_keys: torch.ones(step.length, n_keys, dtype=torch.bool)))  # fmt: skip
TOP_LEFT = Way("the causal mask of a step puts its first query at the first key", _seen(_top_left))
TOP_LEFT_CHUNKS = Way(
    "the causal mask of a step of several tokens puts its first query at the first key",
    _seen(lambda step, n_keys: (_top_left if step.length > 1 else last_rows)(step, n_keys)),
)
_SEEN = (
    TOP_LEFT,
    TOP_LEFT_CHUNKS,
    UNMASKED,
    Way("a step sees one key too few: not itself", _seen(lambda step, n: last_rows(step, n, -1))),
    Way("a step sees one key too many", _seen(lambda step, n: last_rows(step, n, 1))),
    Way("the cached keys are hidden from a step", _seen(_columns(lambda step, column: column >= step.start))),
    Way("the keys of a step are hidden from it", _seen(_columns(lambda step, column: column < step.start))),
    Way("the first key is hidden from a step", _seen(_columns(lambda step, column: column > 0))),
    Way("the last cached key is hidden from a step", _seen(_columns(lambda step, column: column != step.start - 1))),
    Way("the empty places of the cache are attended to", _with_room(lambda step: True, sees_all=False)),
    Way("nothing is masked, and the empty places of the cache are attended to", _with_room(lambda step: True, sees_all=True)),
    Way("in later steps the empty places of the cache are attended to", _with_room(lambda step: step.start > 0, sees_all=True)),
    Way("in steps of one token the empty places of the cache are attended to",
        _with_room(lambda step: step.length == 1, sees_all=True)),
)  # fmt: skip

CACHING = (
    Mistake(
        "cache-position",
        "with a cache, the rows of a step are placed at wrong positions",
        "q, k = rotate(q, freqs[:t]), rotate(k, freqs[:t])  # whatever start_pos is",
        "one call with the whole text is right, generating token by token is not: distances are wrong",
        "q, k = rotate(q, freqs[start : start + t]), rotate(k, freqs[start : start + t])  # each key once, when it is cached",
        site="q",
    ),
    Mistake(
        "cache-order",
        "the cached rows are joined in the wrong order, overwritten, or read at the wrong place",
        "k = torch.cat([k, past_k], dim=2)",
        "one call with the whole text is right, generating token by token is not: keys and values of other tokens are read",
        "k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)",
        site="k",
    ),
    Mistake(
        "cache-mask",
        "with a cache, the mask of a step hides keys that it should show, or shows what it should hide",
        "torch.ones(q_len, k_len).tril()  # the queries of a step are the last of the keys",
        "one call with the whole text is right, generating token by token is not: tokens miss the past, or see what is not there",
        "torch.ones(q_len, k_len).tril(diagonal=k_len - q_len)  # True = may attend",
        site="scores",
        fix_in_torch="F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q_len, k_len).tril(k_len - q_len).bool())",
    ),
)

ARRANGEMENTS: Mapping[str, tuple[Way, ...]] = {"cache-order": _ORDERS, "cache-position": _PLACES, "cache-mask": _SEEN}
"""What each of them makes of a step: a `Change` of its arrangement."""
