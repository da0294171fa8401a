"""Mistakes in decoding with a cache.

A mistake with a cache says what a step reads: which tokens are in which columns, at which positions they are rotated, and which
of them are visible. What is right gives the last rows of one call with the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes.stages import ReferenceInputs, ReferenceLayer, Stages, attend_and_merge, heads

# ---------------------------------------------------------------------------------------------------------- what a step reads


class Step(NamedTuple):
    """One of the calls that read a text: the tokens `(first, end)` of every call so far, of which the last is this one."""

    calls: tuple[tuple[int, int], ...]

    @property
    def start(self) -> int:
        """The first token of the step."""
        return self.calls[-1][0]

    @property
    def end(self) -> int:
        """The end of its tokens."""
        return self.calls[-1][1]

    def call_of(self, token: int) -> int:
        """The number of the call with a token."""
        return next(number for number, (_, end) in enumerate(self.calls) if token < end)

    def place_in_call(self, token: int) -> int:
        """The place of a token in its call."""
        return token - self.calls[self.call_of(token)][0]


Columns = Callable[[Step], Sequence[int]]
Position = Callable[[Step, int], int]


def _so_far(step: Step) -> Sequence[int]:
    return range(step.end)


def _its_own(step: Step, token: int) -> int:
    return token


def _last_rows(n_queries: int, n_keys: int) -> int:
    return n_keys - n_queries


@dataclass(frozen=True)
class CacheMistake:
    """A mistake in decoding with a cache, under a code of record/mistakes.toml; `description` completes "matches exactly if …".

    `keys` and `values` give the token in each column, −1 for an empty one. A token's query is rotated at the position
    `query_at`, its key at `key_at`. Keys are visible up to the `diagonal` for so many queries and keys. `exchanges`: whether a
    token's key and value stand in each other's place. The defaults are right.
    """

    code: str
    description: str
    keys: Columns = _so_far
    values: Columns = _so_far
    query_at: Position = _its_own
    key_at: Position = _its_own
    diagonal: Callable[[int, int], int] = _last_rows
    exchanges: Callable[[Step, int], bool] = lambda step, token: False


def decoded(layer: ReferenceLayer, stages: Stages, rows: Tensor, ends: Sequence[int], mistake: CacheMistake) -> Tensor:
    """The output `[batch, length, d_out]` of a causal layer for a text `[batch, length, d_in]`, read in steps that end at `ends`
    with a mistake. Raises if the mistake does not fit these steps."""
    x = rows if layer.before is None else layer.before(rows)
    q, k, v = heads(stages, replace(layer, pairing=None), ReferenceInputs(x, x, x))

    def row(of: Tensor, token: int) -> Tensor:
        return of[:, :, token : token + 1] if token >= 0 else torch.zeros_like(of[:, :, :1])

    def rotated(of: Tensor, token: int, position: int) -> Tensor:
        before = torch.zeros_like(of[:, :, :1]).expand(-1, -1, max(0, position), -1)
        queries, keys = stages.rotate(layer, row(of, token), torch.cat([before, row(of, token)], dim=2))
        return queries if of is q else keys[:, :, -1:]

    outs = []
    for n_calls in range(1, len(ends) + 1):
        step = Step(tuple(pairwise((0, *ends[:n_calls]))))
        tokens = range(step.start, step.end)
        queries = [rotated(q, token, mistake.query_at(step, token)) for token in tokens]
        keys, values = [], []
        for key, value in zip(mistake.keys(step), mistake.values(step), strict=True):
            keys.append(row(v, key) if mistake.exchanges(step, key) else rotated(k, key, mistake.key_at(step, key)))
            values.append(rotated(k, value, value) if mistake.exchanges(step, value) else row(v, value))
        diagonal = mistake.diagonal if step.start else _last_rows
        visible = torch.ones(len(tokens), len(keys), dtype=torch.bool).tril(diagonal(len(tokens), len(keys)))
        qkv = (torch.cat(queries, dim=2), torch.cat(keys, dim=2), torch.cat(values, dim=2))
        residual = rows[:, step.start : step.end]
        outs.append(attend_and_merge(stages, layer, qkv, visible[None, None], None, residual))
    return torch.cat(outs, dim=1)


# ------------------------------------------------------------------------------------------------------------------- mistakes


def _new_first(step: Step) -> list[int]:
    return [token for first, end in reversed(step.calls) for token in range(first, end)]


def _over_the_first(step: Step) -> list[int]:
    columns = [-1] * step.end
    for first, end in step.calls:
        columns[: end - first] = range(first, end)
    return columns


def _in_order(description: str, columns: Columns) -> list[CacheMistake]:
    """The mistake for keys and values together, and for either; `{}` in the description says which."""
    return [
        CacheMistake("cache-order", description.format("rows"), keys=columns, values=columns),
        CacheMistake("cache-order", description.format("keys"), keys=columns),
        CacheMistake("cache-order", description.format("values"), values=columns),
    ]


def _last_call_only(step: Step) -> range:
    return range(step.calls[-2][0] if step.start else 0, step.end)


def _first_call_only(step: Step) -> list[int]:
    return [*range(step.calls[0][1]), *(range(step.start, step.end) if step.start else ())]


def _handed_on_oddly(step: Step, token: int) -> bool:
    return (len(step.calls) - 1 - step.call_of(token)) % 2 == 1


def _rotated_again(step: Step, token: int) -> int:
    return token * (len(step.calls) - step.call_of(token))


def _shifted(by: int) -> Position:
    return lambda step, token: token + by if step.call_of(token) else token


UNMASKED = CacheMistake(
    "cache-mask",
    "nothing keeps the tokens of a step from attending to the later ones of it",
    diagonal=lambda n_queries, n_keys: n_keys,
)
CACHE_MISTAKES = (
    *_in_order("new {} stand before the cached ones", _new_first),
    *_in_order("the {} of every step are written over the first rows of the cache", _over_the_first),
    CacheMistake(
        "cache-order", "only the rows of the step before are kept", keys=_last_call_only, values=_last_call_only
    ),
    CacheMistake(
        "cache-order", "only the rows of the first call are kept", keys=_first_call_only, values=_first_call_only
    ),
    CacheMistake(
        "cache-order",
        "cached keys and values are exchanged whenever they are handed on",
        exchanges=_handed_on_oddly,
    ),
    CacheMistake(
        "cache-order",
        "all keys are read as values, and values as keys, as soon as there is a cache",
        exchanges=lambda step, token: True,
    ),
    CacheMistake(
        "cache-position",
        "a step is rotated as if it began at position 0",
        query_at=Step.place_in_call,
        key_at=Step.place_in_call,
    ),
    CacheMistake(
        "cache-position",
        "the queries of a step are rotated as if it began at position 0, its keys as they should be",
        query_at=Step.place_in_call,
    ),
    CacheMistake(
        "cache-position",
        "the keys of a step are rotated as if it began at position 0, its queries as they should be",
        key_at=Step.place_in_call,
    ),
    CacheMistake(
        "cache-position", "cached keys, rotated already, are rotated again in every step", key_at=_rotated_again
    ),
    CacheMistake(
        "cache-position",
        "a step stands one position too far to the right",
        query_at=_shifted(1),
        key_at=_shifted(1),
    ),
    CacheMistake(
        "cache-position",
        "a step stands one position too far to the left",
        query_at=_shifted(-1),
        key_at=_shifted(-1),
    ),
    CacheMistake(
        "cache-mask",
        "the causal mask of a step puts its first query at the first key",
        diagonal=lambda n_queries, n_keys: 0,
    ),
    CacheMistake(
        "cache-mask",
        "the causal mask of a step of several tokens puts its first query at the first key",
        diagonal=lambda n_queries, n_keys: 0 if n_queries > 1 else n_keys - 1,
    ),
    UNMASKED,
    CacheMistake(
        "cache-mask",
        "a step sees one key too few: not itself",
        diagonal=lambda n_queries, n_keys: n_keys - n_queries - 1,
    ),
)
"""The mistakes that are tried, in this order."""
