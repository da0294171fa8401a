"""What an attention hides by itself at any length, as the visible cells of one text show."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from mhacli.conditions import SEES, parse_condition

from .sees import Statement

Cells = Bool[Tensor, "query key"]
"""Which query sees which key."""


class Pattern(NamedTuple):
    """What an attention hides by itself: the cells that are visible at some lengths, with an axis
    of heads or without, where the queries are the last of the keys, and the rule in words.
    `is_of_length`: it is known at one length alone.
    """

    words: str
    cells: Callable[[int, int], Tensor]
    is_of_length: bool = False


def pattern_of(seen: Cells) -> Pattern:
    """The rule that gives these visible cells of self-attention; where it is none of the usual
    ones, or tokens see all or all before them, the cells themselves, at this length alone.
    """
    length = len(seen)
    n_see_first = int(seen[:, 0].cumprod(0).sum())
    n_first = int(seen[0].sum())
    rules = dict[str, str]()
    if 0 < n_see_first < length and seen[-1].any():
        before = length - 1 - int(seen[-1].nonzero()[0])
        after = int(seen[0].nonzero()[-1])
        is_in_chunk = f"q // {n_see_first} == k // {n_see_first}"
        chunk = f"its chunk of {n_see_first} tokens"
        rules = {
            f"k >= q - {before} and k <= q + {after}": (
                f"{before} tokens before it and {after} behind it"
            ),
            f"{is_in_chunk} and k <= q": chunk,
            is_in_chunk: chunk,
        }
    elif 1 < n_first < length:
        rules = {
            f"k < {n_first} or k <= q": f"the first {n_first} tokens and those before it",
            f"k // {n_first} <= q // {n_first}": (
                f"its block of {n_first} tokens and those before it"
            ),
        }
    for rule, words in rules.items():
        cells = Statement(parse_condition(rule, SEES)).cells
        if torch.equal(cells(length, length)[0], seen):
            return Pattern(f"each token sees {words}", cells)
    words = "tokens see others by a rule of its own, such as a window"
    return Pattern(words, lambda q_len, k_len: seen, is_of_length=True)
