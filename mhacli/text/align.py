"""Which tokens of two texts correspond."""

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache

import numpy as np

from mhacli.io.data import Array

MOST_STEPS = 20_000_000
"""The most steps of difflib for a pair of texts: about two seconds."""
Part = tuple[range, range, bool]
"""Positions in both texts, and whether their tokens are equal."""


@lru_cache(maxsize=64)
def align(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[list[Part], bool]:
    """All positions of two texts in order, in parts of equal tokens and of others; and whether
    these are the longest equal parts.

    They are unless difflib needs more than `MOST_STEPS`. Then, between the common beginning and the
    common end, tokens at the same position are compared.

    >>> for part in align(("the", "cat", "sat"), ("the", "dog", "sat"))[0]:
    ...     print(*part)
    range(0, 1) range(0, 1) True
    range(1, 2) range(1, 2) False
    range(2, 3) range(2, 3) True
    """
    shorter = min(len(a), len(b))
    first = next((n for n in range(shorter) if a[n] != b[n]), shorter)
    last = next((n for n in range(shorter - first) if a[-1 - n] != b[-1 - n]), shorter - first)
    ends = len(a) - last, len(b) - last
    inner_a, inner_b = a[first : ends[0]], b[first : ends[1]]
    counts = Counter(inner_b)
    n_steps = sum(n * counts[token] for token, n in Counter(inner_a).items()) * min(
        len(inner_a), len(inner_b)
    )
    is_exact = n_steps <= MOST_STEPS
    x: Sequence[object] = inner_a if is_exact else [*enumerate(inner_a)]
    y: Sequence[object] = inner_b if is_exact else [*enumerate(inner_b)]
    parts = [(range(first), range(first), True)]
    for kind, i, i_end, j, j_end in SequenceMatcher(None, x, y, autojunk=False).get_opcodes():
        parts.append(
            (range(first + i, first + i_end), range(first + j, first + j_end), kind == "equal")
        )
    parts.append((range(ends[0], len(a)), range(ends[1], len(b)), True))
    return [part for part in parts if part[0] or part[1]], is_exact


def pairs(a: tuple[str, ...], b: tuple[str, ...]) -> Array:
    """The positions `[2, tokens]` of tokens that correspond: equal ones, and those replaced one to
    one between equal ones.
    """
    pairs = [
        pair for x, y, _ in align(a, b)[0] if len(x) == len(y) for pair in zip(x, y, strict=True)
    ]
    return np.array(pairs, int).reshape(-1, 2).T
