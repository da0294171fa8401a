"""Mistakes in decoding with a cache.

A mistake with a cache says what a step reads: which tokens are in which columns, at which positions they are rotated, and which
of them are visible. What is right gives the last rows of one call with the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes.stages import ReferenceInputs, ReferenceLayer, Stages, attend_and_merge, heads

Calls = Sequence[tuple[int, int]]
"""The tokens `(first, end)` of every call so far, of which the last one is the step."""


class Reads(NamedTuple):
    """What a step reads: the tokens in the columns of keys and of values, −1 in an empty one; the positions at which the query
    and the key of each token are rotated; the tokens whose key and value stand in each other's place; and up to which diagonal
    keys are visible, None for what is right."""

    keys: Sequence[int]
    values: Sequence[int]
    query_at: Sequence[int]
    key_at: Sequence[int]
    exchanged: Sequence[int] = ()
    diagonal: int | None = None


class CacheMistake(NamedTuple):
    """A mistake under a code of record/mistakes.toml: what it `changes` in what a step reads. The `description` completes
    "matches exactly if …"."""

    code: str
    description: str
    changes: Mapping[str, Callable[[Calls], Any]]


def decoded(layer: ReferenceLayer, stages: Stages, rows: Tensor, ends: Sequence[int], mistake: CacheMistake) -> Tensor:
    """The output `[batch, length, d_out]` of a causal layer for a text `[batch, length, d_in]`, read in steps that end at `ends`
    with a mistake. Raises if the mistake does not fit these steps."""
    x = rows if layer.before is None else layer.before(rows)
    q, k, v = heads(stages, replace(layer, pairing=None), ReferenceInputs(x, x, x))

    def row(of: Tensor, token: int) -> Tensor:
        return of[:, :, token : token + 1] if token >= 0 else torch.zeros_like(of[:, :, :1])

    def rotated(of: Tensor, token: int, position: int) -> Tensor:
        before = torch.zeros_like(of[:, :, :1]).expand(-1, -1, max(0, position), -1)
        queries, keys = stages["rotate"](layer, row(of, token), torch.cat([before, row(of, token)], dim=2))
        turned: Tensor = queries if of is q else keys[:, :, -1:]
        return turned

    outs, calls = [], list(pairwise((0, *ends)))
    for n_calls, (start, end) in enumerate(calls, 1):
        tokens = range(end)
        reads = Reads(tokens, tokens, tokens, tokens)._replace(
            **{name: change(calls[:n_calls]) for name, change in mistake.changes.items()}
        )
        queries = [rotated(q, token, reads.query_at[token]) for token in range(start, end)]
        keys = [row(v, t) if t in reads.exchanged else rotated(k, t, reads.key_at[t]) for t in reads.keys]
        values = [rotated(k, t, t) if t in reads.exchanged else row(v, t) for t in reads.values]
        diagonal = len(keys) - len(queries) if reads.diagonal is None or start == 0 else reads.diagonal
        visible = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(diagonal)
        qkv = (torch.cat(queries, dim=2), torch.cat(keys, dim=2), torch.cat(values, dim=2))
        outs.append(attend_and_merge(stages, layer, qkv, visible[None, None], None, rows[:, start:end]))
    return torch.cat(outs, dim=1)


# ------------------------------------------------------------------------------------------------------------- what changes


def _new_first(calls: Calls) -> list[int]:
    return [token for call in reversed(calls) for token in range(*call)]


def _over_the_first(calls: Calls) -> list[int]:
    columns = [-1] * calls[-1][1]
    for first, end in calls:
        columns[: end - first] = range(first, end)
    return columns


def _last_two_calls(calls: Calls) -> range:
    return range(calls[-2:][0][0], calls[-1][1])


def _handed_on_oddly(calls: Calls) -> list[int]:
    return [token for call in calls[-2::-2] for token in range(*call)]


def _at(position: Callable[[int, int, int], int], calls: Calls) -> list[int]:
    """The position of each token, of its place in the text, the first place in its call, and the number of later calls."""
    n_calls = len(calls) - 1
    return [position(token, call[0], n_calls - n) for n, call in enumerate(calls) for token in range(*call)]


def _of_chunks(calls: Calls) -> int:
    """The diagonal of a step of several tokens whose mask begins at the first key."""
    start, end = calls[-1]
    return 0 if end - start > 1 else end


_FROM_0 = partial(_at, lambda token, first, n_later: token - first)
_AGAIN = partial(_at, lambda token, first, n_later: token * (n_later + 1))
_SHIFTED = partial(_at, lambda token, first, n_later: token + (first > 0))


def _mistakes() -> Iterator[tuple[str, str, Mapping[str, Callable[[Calls], Any]]]]:
    for rows, fields in (("rows", ("keys", "values")), ("keys", ("keys",)), ("values", ("values",))):
        first, over = (dict.fromkeys(fields, change) for change in (_new_first, _over_the_first))
        yield "cache-order", f"new {rows} stand before the cached ones", first
        yield "cache-order", f"the {rows} of every step are written over the first ones of the cache", over
    kept = "only the rows of the step before are kept"
    yield "cache-order", kept, {"keys": _last_two_calls, "values": _last_two_calls}
    handed = "cached keys and values are exchanged whenever they are handed on"
    yield "cache-order", handed, {"exchanged": _handed_on_oddly}
    read = "all keys are read as values, and values as keys, as soon as there is a cache"
    yield "cache-order", read, {"exchanged": lambda calls: range(calls[-1][1])}
    began = "a step is rotated as if it began at position 0"
    yield "cache-position", began, {"query_at": _FROM_0, "key_at": _FROM_0}
    yield "cache-position", "the keys of a step are rotated as if it began at position 0", {"key_at": _FROM_0}
    again = "cached keys, rotated already, are rotated again in every step"
    yield "cache-position", again, {"key_at": _AGAIN}
    shifted = "a step stands one position too far to the right"
    yield "cache-position", shifted, {"query_at": _SHIFTED, "key_at": _SHIFTED}
    top_left = "the causal mask of a step puts its first query at the first key"
    yield "cache-mask", top_left, {"diagonal": lambda calls: 0}
    yield "cache-mask", f"{top_left}, if it has several tokens", {"diagonal": _of_chunks}
    unmasked = "nothing keeps the tokens of a step from attending to the later ones of it"
    yield "cache-mask", unmasked, {"diagonal": lambda calls: calls[-1][1]}


CACHE_MISTAKES = [CacheMistake(*mistake) for mistake in _mistakes()]
"""The mistakes that are tried, in this order."""
UNMASKED = CACHE_MISTAKES[-1]
"""The one that leaves steps of one token right."""
