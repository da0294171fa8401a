"""Mistakes in decoding with a cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import Mistake, ReferenceLayer, wrong_for

_POSITIONS = r"(freqs|rope|rota|\bcos|\bsin|\bpos|_pos|offset|angle)"
_CACHES = r"(cache|past|prev|mem|kept|state|buf|\bkeys?\b|\bvalues?\b)"


def mistakes() -> Iterator[Mistake]:
    """The rows of a cache in another order, queries and keys at another position, and other masks of a step."""
    writing = (rf"(?i)cat\(.*{_CACHES}", rf"(?i){_CACHES}\w*\[.*\] =", rf"(?i){_CACHES}\w*\.\w+\(", rf"(?i){_CACHES}")
    order = partial(Mistake, "cache-order", shown_by="steps", at=writing)
    for rows, letters in (("rows", "kv"), ("keys", "k"), ("values", "v")):
        yield order(wrong_for(letters, "join", new_first), f"new {rows} stand before the cached ones")
        over = f"the {rows} of every step are written over the first ones"
        yield order(wrong_for(letters, "join", over_the_first), over)
    kept = "only the rows of the step before are kept"
    yield order({"cache": lambda layer, keys, values, n: (keys[:, :, -n:], values[:, :, -n:])}, kept)
    handed = "cached keys and values are exchanged whenever they are handed on"
    yield order({"cache": lambda layer, keys, values, n: (values, keys)}, handed)
    yield order({"read": lambda layer, keys, values: (values, keys)}, "keys are read as values, and values as keys")

    places = (rf"(?i){_POSITIONS}.*\[", rf"(?i)arange|{_POSITIONS}")
    position = partial(Mistake, "cache-position", shown_by="steps", at=places)
    for rows, letters in (("every step begins", "qk"), ("the keys of every step begin", "k")):
        yield position(wrong_for(letters, "rotate", from_0), f"{rows} at position 0")
    yield position(wrong_for("k", "join", rotated_again), "cached keys are rotated again in every step")
    shifted = {"rotate": lambda layer, heads, start, role: stages.rotate(layer, heads, start + (start > 0), role)}
    yield position(shifted, "a step stands one position too far to the right")

    masking = ("tril|triu", "masked_fill", r"where\(", "scaled_dot_product", "softmax")
    mask = partial(Mistake, "cache-mask", shown_by="steps", at=masking)
    top_left = "the first query of a step stands at the first key"
    yield mask({"diagonal": lambda layer, q_len, k_len: 0}, top_left)
    of_chunks = {"diagonal": lambda layer, q_len, k_len: 0 if q_len > 1 else k_len}
    yield mask(of_chunks, f"{top_left}, if it has several tokens")


def new_first(layer: ReferenceLayer, cached: Tensor, new: Tensor, role: str) -> Tensor:
    """The new rows before the cached ones."""
    return torch.cat([new, cached], dim=2)


def over_the_first(layer: ReferenceLayer, cached: Tensor, new: Tensor, role: str) -> Tensor:
    """The new rows in place of the first cached ones, and empty ones at the end."""
    n_new = new.shape[2]
    return torch.cat([new, cached[:, :, n_new:], torch.zeros_like(cached[:, :, :n_new])], dim=2)


def rotated_again(layer: ReferenceLayer, cached: Tensor, new: Tensor, role: str) -> Tensor:
    """The new keys behind the cached ones, which are rotated already and rotated once more."""
    return stages.join(layer, stages.rotate(layer, cached, 0, role), new, role)


def from_0(layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Rows rotated as if they stood at the beginning."""
    return stages.rotate(layer, heads, 0, role)
