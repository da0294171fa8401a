"""Mistakes in decoding with a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Form, Forms, ReferenceLayer, mistakes

_POSITIONS = r"(freqs|rope|rota|\bcos|\bsin|\bpos|_pos|offset|angle)"
_CACHES = r"(cache|past|prev|mem|kept|state|buf|\bkeys?\b|\bvalues?\b)"


def new_first(cached: Tensor, new: Tensor) -> Tensor:
    """The new rows before the cached ones."""
    return torch.cat([new, cached], dim=2)


def over_the_first(cached: Tensor, new: Tensor) -> Tensor:
    """The new rows in place of the first cached ones, and empty ones at the end."""
    n_new = new.shape[2]
    return torch.cat([new, cached[:, :, n_new:], torch.zeros_like(cached[:, :, :n_new])], dim=2)


def joined(
    way: Callable[[Tensor, Tensor], Tensor], letters: str, layer: ReferenceLayer, cached: Tensor, new: Tensor, role: str
) -> Tensor:
    """Keys, values or both joined in a wrong way."""
    return way(cached, new) if role in letters else stages.join(layer, cached, new, role)


@mistakes(
    "join",
    shown_by="steps",
    at=(rf"(?i)cat\(.*{_CACHES}", rf"(?i){_CACHES}\w*\[.*\] =", rf"(?i){_CACHES}\w*\.\w+\(", rf"(?i){_CACHES}"),
)
def order() -> Forms:
    """The rows of a cache in another order."""
    for rows, letters in (("rows", "kv"), ("keys", "k"), ("values", "v")):
        yield Form("cache-order", partial(joined, new_first, letters), f"new {rows} stand before the cached ones")
        over = f"the {rows} of every step are written over the first ones"
        yield Form("cache-order", partial(joined, over_the_first, letters), over)
    kept = "only the rows of the step before are kept"
    yield Form("cache-order", {"cache": lambda layer, keys, values, n: (keys[:, :, -n:], values[:, :, -n:])}, kept)
    handed = "cached keys and values are exchanged whenever they are handed on"
    yield Form("cache-order", {"cache": lambda layer, keys, values, n: (values, keys)}, handed)
    exchanged = "keys are read as values, and values as keys"
    yield Form("cache-order", {"read": lambda layer, keys, values: (values, keys)}, exchanged)


def rotated_again(layer: ReferenceLayer, cached: Tensor, new: Tensor, role: str) -> Tensor:
    """The new keys behind the cached ones, which are rotated already and rotated once more."""
    return stages.join(layer, stages.rotate(layer, cached, cached)[1] if role == "k" else cached, new, role)


@mistakes("place", shown_by="steps", at=(rf"(?i){_POSITIONS}.*\[", rf"(?i)arange|{_POSITIONS}"))
def position() -> Forms:
    """Queries and keys at another position."""
    yield Form("cache-position", lambda layer, start, role: 0, "every step begins at position 0")
    keys_began = "the keys of every step begin at position 0"
    yield Form("cache-position", lambda layer, start, role: 0 if role == "k" else start, keys_began)
    yield Form("cache-position", {"join": rotated_again}, "cached keys are rotated again in every step")
    shifted = "a step stands one position too far to the right"
    yield Form("cache-position", lambda layer, start, role: start + (start > 0), shifted)


@mistakes("diagonal", shown_by="steps", at=("tril|triu", "masked_fill", r"where\(", "scaled_dot_product", "softmax"))
def mask() -> Forms:
    """Another mask of a step."""
    top_left = "the first query of a step stands at the first key"
    yield Form("cache-mask", lambda layer, q_len, k_len: 0, top_left)
    of_chunks = f"{top_left}, if it has several tokens"
    yield Form("cache-mask", lambda layer, q_len, k_len: 0 if q_len > 1 else k_len, of_chunks)
