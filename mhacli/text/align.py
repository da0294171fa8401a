"""Which tokens of two texts correspond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby

MOST_STEPS = 20_000_000
"""The most steps of difflib for all texts together: about two seconds."""


@dataclass(frozen=True)
class Match:
    """`length` tokens that are equal in both texts, from the positions `a` and `b`."""

    a: int
    b: int
    length: int


@dataclass(frozen=True)
class Alignment:
    """The equal tokens of two texts of `n_a` and `n_b` tokens, in order.

    Without `exact`, the texts were too long and too different for difflib. Between their common beginning and their
    common end, tokens at the same position were then compared.
    """

    n_a: int
    n_b: int
    matches: tuple[Match, ...]
    exact: bool = True

    @property
    def n_equal(self) -> int:
        """The number of equal tokens."""
        return sum(match.length for match in self.matches)

    @property
    def parts(self) -> Iterator[tuple[range, range, bool]]:
        """All positions of both texts in order: ranges, and whether their tokens are equal."""
        a = b = 0
        for match in (*self.matches, Match(self.n_a, self.n_b, 0)):
            if (a, b) != (match.a, match.b):
                yield range(a, match.a), range(b, match.b), False
            a, b = match.a + match.length, match.b + match.length
            if match.length:
                yield range(match.a, a), range(match.b, b), True

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The positions of tokens that correspond: equal ones, and those replaced one to one between equal ones."""
        return [pair for a, b, _ in self.parts if len(a) == len(b) for pair in zip(a, b, strict=True)]


def align(a: Sequence[Hashable], b: Sequence[Hashable], *, most_steps: int = MOST_STEPS) -> Alignment:
    """The longest parts that two sequences have in common, unless that takes more than `most_steps`.

    >>> align("the cat sat".split(), "the dog sat".split()).matches
    (Match(a=0, b=0, length=1), Match(a=2, b=2, length=1))
    """
    first = _n_common(a, b)
    last = _n_common(a[first:][::-1], b[first:][::-1])
    ends = len(a) - last, len(b) - last
    inner_a, inner_b = a[first : ends[0]], b[first : ends[1]]
    counts = Counter(inner_b)
    n_steps = sum(n * counts[token] for token, n in Counter(inner_a).items()) * min(len(inner_a), len(inner_b))
    exact = n_steps <= most_steps
    if exact:
        blocks = SequenceMatcher(None, inner_a, inner_b, autojunk=False).get_matching_blocks()
        inner = [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]
    else:
        inner = [(n, n) for n, (x, y) in enumerate(zip(inner_a, inner_b, strict=False)) if x == y]
    pairs = [(n, n) for n in range(first)] + [(i + first, j + first) for i, j in inner]
    pairs += [(ends[0] + n, ends[1] + n) for n in range(last)]
    return Alignment(len(a), len(b), tuple(_runs(pairs)), exact)


def _n_common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[Match]:
    """Pairs of positions, with consecutive ones as one match."""
    for _, run in groupby(enumerate(pairs), key=lambda item: (item[1][0] - item[0], item[1][1] - item[0])):
        places = [pair for _, pair in run]
        yield Match(*places[0], len(places))
