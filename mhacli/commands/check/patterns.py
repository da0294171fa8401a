"""What an attention hides by itself at any length, as the visible cells of one text show."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

Cells = Bool[Tensor, "query key"]


class Pattern(NamedTuple):
    """What an attention hides by itself: the cells `[query, key]` that are visible at some lengths,
    where the queries are the last of the keys, and the rule in words. `is_of_length`: it is known
    at one length alone.
    """

    words: str
    cells: Callable[[int, int], Cells]
    is_of_length: bool = False


def _window(before: int, after: int) -> Pattern:
    return Pattern(
        f"each token sees {before} tokens before it and {after} behind it",
        _by_places(lambda query, key: (key >= query - before) & (key <= query + after)),
    )


def _chunks(size: int, *, causal: bool) -> Pattern:
    return Pattern(
        f"each token sees its chunk of {size} tokens",
        _by_places(lambda q, key: (q // size == key // size) & (not causal or key <= q)),
    )


def _blocks(size: int) -> Pattern:
    return Pattern(
        f"each token sees its block of {size} tokens and those before it",
        _by_places(lambda query, key: key // size <= query // size),
    )


def _prefix(size: int) -> Pattern:
    return Pattern(
        f"each token sees the first {size} tokens and those before it",
        _by_places(lambda query, key: (key < size) | (key <= query)),
    )


def _by_places(sees: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int, int], Cells]:
    """The cells of a rule of places; the queries are the last of the keys."""
    return lambda q_len, k_len: sees(
        torch.arange(k_len - q_len, k_len)[:, None], torch.arange(k_len)
    )


def pattern_of(seen: Cells) -> Pattern:
    """The rule that gives these visible cells of self-attention; where it is none of the usual
    ones, or tokens see all or all before them, the cells themselves, at this length alone.
    """
    length, n_see_first = len(seen), int(seen[:, 0].cumprod(0).sum())
    n_first, patterns = int(seen[0].sum()), list[Pattern]()
    if 0 < n_see_first < length and seen[-1].any():
        before, after = length - 1 - int(seen[-1].nonzero()[0]), int(seen[0].nonzero()[-1])
        size = n_see_first
        patterns = [_window(before, after), *(_chunks(size, causal=each) for each in (True, False))]
    elif 1 < n_first < length:
        patterns = [_prefix(n_first), _blocks(n_first)]
    for pattern in patterns:
        if torch.equal(pattern.cells(length, length), seen):
            return pattern
    words = "tokens see others by a rule of its own, such as a window"
    return Pattern(words, lambda q_len, k_len: seen, is_of_length=True)
