"""Which tokens of two texts correspond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

MOST_STEPS = 20_000_000
"""The most steps of difflib for all texts together: about two seconds."""
Part = tuple[range, range, bool]
"""Positions in both texts, and whether their tokens are equal."""


def align(a: Sequence[Hashable], b: Sequence[Hashable], *, most_steps: int = MOST_STEPS) -> tuple[list[Part], bool]:
    """All positions of two texts in order, in parts of equal tokens and of others; and whether these are the longest
    equal parts.

    They are unless difflib needs more than `most_steps`. Then, between the common beginning and the common end, tokens
    at the same position are compared.

    >>> align("the cat sat".split(), "the dog sat".split())[0]
    [(range(0, 1), range(0, 1), True), (range(1, 2), range(1, 2), False), (range(2, 3), range(2, 3), True)]
    """
    shorter = min(len(a), len(b))
    first = next((n for n in range(shorter) if a[n] != b[n]), shorter)
    last = next((n for n in range(shorter - first) if a[-1 - n] != b[-1 - n]), shorter - first)
    ends = len(a) - last, len(b) - last
    inner_a, inner_b = a[first : ends[0]], b[first : ends[1]]
    counts = Counter(inner_b)
    n_steps = sum(n * counts[token] for token, n in Counter(inner_a).items()) * min(len(inner_a), len(inner_b))
    if n_steps <= most_steps:
        matches = [
            tuple(match) for match in SequenceMatcher(None, inner_a, inner_b, autojunk=False).get_matching_blocks()
        ]
    else:
        matches = [(n, n, 1) for n, (x, y) in enumerate(zip(inner_a, inner_b, strict=False)) if x == y]
    inner = [(i + first, j + first, n) for i, j, n in matches]
    return _parts([(0, 0, first), *inner, (*ends, last)], len(a), len(b)), n_steps <= most_steps


def _parts(matches: Sequence[tuple[int, int, int]], n_a: int, n_b: int) -> list[Part]:
    """The equal parts, joined where nothing lies between them, and the parts between them."""
    parts: list[Part] = []
    i = j = begin_a = begin_b = 0
    for next_i, next_j, length in (*(match for match in matches if match[2]), (n_a, n_b, 0)):
        if (i, j) != (next_i, next_j):
            parts += [(range(begin_a, i), range(begin_b, j), True)] if begin_a < i else []
            parts.append((range(i, next_i), range(j, next_j), False))
            begin_a, begin_b = next_i, next_j
        i, j = next_i + length, next_j + length
    return parts + ([(range(begin_a, i), range(begin_b, j), True)] if begin_a < i else [])


def pairs(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """The positions of tokens that correspond: equal ones, and those replaced one to one between equal ones."""
    return [pair for a, b, _ in parts if len(a) == len(b) for pair in zip(a, b, strict=True)]
