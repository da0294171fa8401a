"""Mistakes in decoding with a cache: wrong stages of a step. Right ones give the last rows of one call with the whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes.stages import ReferenceInputs, ReferenceLayer, Stages, attend_and_merge, heads

RIGHT_STEP: Stages = {
    **dict.fromkeys(("place_q", "place_k"), lambda start: start),
    **dict.fromkeys(("join_k", "join_v"), lambda cached, new, *_: torch.cat([cached, new], dim=2)),
    "keep": lambda keys, values, n_new: (keys, values),
    "read": lambda keys, values: (keys, values),
    "diagonal": lambda q_len, k_len: k_len - q_len,
}
"""The stages of a step: the position from which its queries and keys are rotated; its keys and values with the cached ones; what
is cached of them; which of them are read as keys and values; up to which diagonal keys are visible."""


class CacheMistake(NamedTuple):
    """A mistake under a code of record/mistakes.toml, with its stages. Its `description` completes "matches exactly if …"."""

    code: str
    description: str
    stages: Mapping[str, Callable[..., Any]]


def decoded(layer: ReferenceLayer, stages: Stages, rows: Tensor, ends: Sequence[int], mistake: CacheMistake) -> Tensor:
    """The output `[batch, length, d_out]` of a causal layer for a text `[batch, length, d_in]`, read in steps that end at `ends`
    with a mistake. Raises if the mistake does not fit these steps."""
    x = rows if layer.before is None else layer.before(rows)
    q, k, v = heads(stages, replace(layer, pairing=None), ReferenceInputs(x, x, x))
    step = {**RIGHT_STEP, **mistake.stages}

    def rotated(of: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """As queries and as keys."""
        before = torch.zeros_like(of[:, :, :1]).expand(-1, -1, start, -1)
        queries, keys = stages["rotate"](layer, of, torch.cat([before, of], dim=2))
        return queries, keys[:, :, start:]

    outs, cached = [], (k[:, :, :0], v[:, :, :0])
    for start, end in pairwise((0, *ends)):
        queries, _ = rotated(q[:, :, start:end], step["place_q"](start))
        _, new = rotated(k[:, :, start:end], step["place_k"](start))
        keys = step["join_k"](cached[0], new, rotated)
        values = step["join_v"](cached[1], v[:, :, start:end])
        cached = step["keep"](keys, values, end - start)
        keys, values = step["read"](keys, values)
        sizes = end - start, keys.shape[2]
        visible = torch.ones(sizes, dtype=torch.bool).tril(step["diagonal"](*sizes) if start else 0)
        qkv = queries, keys, values
        outs.append(attend_and_merge(stages, layer, qkv, visible[None, None], None, rows[:, start:end]))
    return torch.cat(outs, dim=1)


# ---------------------------------------------------------------------------------------------------------- wrong stages


def new_first(cached: Tensor, new: Tensor, *_: object) -> Tensor:
    """The new rows before the cached ones."""
    return torch.cat([new, cached], dim=2)


def over_the_first(cached: Tensor, new: Tensor, *_: object) -> Tensor:
    """The new rows in place of the first cached ones, and empty ones at the end."""
    n_new = new.shape[2]
    return torch.cat([new, cached[:, :, n_new:], torch.zeros_like(cached[:, :, :n_new])], dim=2)


def rotated_again(cached: Tensor, new: Tensor, rotated: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """The new keys behind the cached ones, which are rotated already and rotated once more."""
    return torch.cat([rotated(cached, 0)[1], new], dim=2)


def _mistakes() -> Iterator[tuple[str, str, Mapping[str, Callable[..., Any]]]]:
    for rows, stages in (("rows", ("join_k", "join_v")), ("keys", ("join_k",)), ("values", ("join_v",))):
        yield "cache-order", f"new {rows} stand before the cached ones", dict.fromkeys(stages, new_first)
        over = f"the {rows} of every step are written over the first ones of the cache"
        yield "cache-order", over, dict.fromkeys(stages, over_the_first)
    kept = "only the rows of the step before are kept"
    yield "cache-order", kept, {"keep": lambda keys, values, n_new: (keys[:, :, -n_new:], values[:, :, -n_new:])}
    handed = "cached keys and values are exchanged whenever they are handed on"
    yield "cache-order", handed, {"keep": lambda keys, values, n_new: (values, keys)}
    read = "all keys are read as values, and values as keys, as soon as there is a cache"
    yield "cache-order", read, {"read": lambda keys, values: (values, keys)}
    began = "a step is rotated as if it began at position 0"
    yield "cache-position", began, dict.fromkeys(("place_q", "place_k"), lambda start: 0)
    keys_began = "the keys of a step are rotated as if it began at position 0"
    yield "cache-position", keys_began, {"place_k": lambda start: 0}
    again = "cached keys, rotated already, are rotated again in every step"
    yield "cache-position", again, {"join_k": rotated_again}
    shifted = "a step stands one position too far to the right"
    yield "cache-position", shifted, dict.fromkeys(("place_q", "place_k"), lambda start: start + (start > 0))
    top_left = "the causal mask of a step puts its first query at the first key"
    yield "cache-mask", top_left, {"diagonal": lambda q_len, k_len: 0}
    of_chunks = f"{top_left}, if it has several tokens"
    yield "cache-mask", of_chunks, {"diagonal": lambda q_len, k_len: 0 if q_len > 1 else k_len}
    unmasked = "nothing keeps the tokens of a step from attending to the later ones of it"
    yield "cache-mask", unmasked, {"diagonal": lambda q_len, k_len: k_len}


CACHE_MISTAKES = [CacheMistake(*mistake) for mistake in _mistakes()]
"""The mistakes that are tried, in this order."""
UNMASKED = CACHE_MISTAKES[-1]
"""The one that leaves steps of one token right."""
