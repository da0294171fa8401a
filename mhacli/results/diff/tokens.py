"""Whose tokens are whose: the texts of two records aligned, in a time that is bounded."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from mhacli.results.diff.result import Match, TextDifference, TokenFamily
from mhacli.spec.tokens import TokenSequence

_MOST_STEPS = 20_000_000
"""Steps of difflib in the worst case, for all texts together: about two seconds."""


def aligned_texts(
    family: TokenFamily, a: Sequence[TokenSequence], b: Sequence[TokenSequence]
) -> tuple[TextDifference, ...]:
    """For each sequence that both have, how its tokens match; sequences are paired by their number."""
    most = _MOST_STEPS // max(1, min(len(a), len(b)))
    return tuple(_aligned_text(family, i, *pair, most) for i, pair in enumerate(zip(a, b, strict=False)))


def _aligned_text(family: TokenFamily, sequence: int, a: TokenSequence, b: TokenSequence, most: int) -> TextDifference:
    matches, exact = aligned(a.tokens, b.tokens, most_steps=most)
    pairs = ((match.a + n, match.b + n) for match in matches for n in range(match.length))
    n_other = sum(a.ids[i] != b.ids[j] for i, j in pairs)
    return TextDifference(family, sequence, len(a.tokens), len(b.tokens), matches, n_other, exact)


def aligned(
    a: Sequence[Hashable], b: Sequence[Hashable], *, most_steps: int = _MOST_STEPS
) -> tuple[tuple[Match, ...], bool]:
    """The parts that two sequences share, in order, and whether they are the longest: beyond `most_steps` only those are found
    that hold, or lie beside, something that each sequence has once.

    >>> aligned("the cat sat".split(), "the dog sat".split())
    ((Match(a=0, b=0, length=1), Match(a=2, b=2, length=1)), True)
    """
    first = _common(a, b)
    last = _common(a[first:][::-1], b[first:][::-1])
    inner_a, inner_b = a[first : len(a) - last], b[first : len(b) - last]
    exact = _worst_steps(inner_a, inner_b) <= most_steps
    inner = _longest(inner_a, inner_b) if exact else _anchored(inner_a, inner_b)
    found = [Match(0, 0, first), *(Match(m.a + first, m.b + first, m.length) for m in inner)]
    return tuple(_joined([*found, Match(len(a) - last, len(b) - last, last)])), exact


def _common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _worst_steps(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """difflib looks at every pair of equal tokens for each part that it finds, of which there are at most as many as tokens."""
    counts = Counter(b)
    return sum(n * counts[token] for token, n in Counter(a).items()) * min(len(a), len(b))


def _longest(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Match]:
    return [Match(*block) for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()]


def _anchored(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Match]:
    """Matches that grow from tokens that both have once, as many as keep their order.

    Source: "patience diff", Bram Cohen 2010, https://bramcohen.livejournal.com/73318.html, without its recursion.
    """
    ends = ((-1, -1), *_rising(_single_pairs(a, b)), (len(a), len(b)))
    found = []
    for (a0, b0), (a1, b1) in pairwise(ends):
        inner_a, inner_b = a[a0 + 1 : a1], b[b0 + 1 : b1]
        after = _common(inner_a, inner_b)
        before = _common(inner_a[after:][::-1], inner_b[after:][::-1])
        found += [Match(max(a0, 0), max(b0, 0), after + (a0 >= 0)), Match(a1 - before, b1 - before, before)]
    return found


def _single_pairs(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    n_a, n_b = Counter(a), Counter(b)
    places = {token: place for place, token in enumerate(b) if n_b[token] == 1}
    return [(place, places[token]) for place, token in enumerate(a) if n_a[token] == 1 and token in places]


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs whose second numbers rise, the first ones rising by themselves."""
    tops: list[int] = []
    top_of: list[int] = []
    before: list[int] = []
    for number, (_, b) in enumerate(pairs):
        place = bisect_left(tops, b)
        before.append(top_of[place - 1] if place else -1)
        tops[place : place + 1], top_of[place : place + 1] = [b], [number]
    chain, number = [], top_of[-1] if top_of else -1
    while number >= 0:
        chain.append(pairs[number])
        number = before[number]
    return chain[::-1]


def _joined(matches: Sequence[Match]) -> Iterator[Match]:
    """Without empty ones, and those that touch in one."""
    last = Match(0, 0, 0)
    for match in matches:
        if (last.a + last.length, last.b + last.length) == (match.a, match.b):
            last = Match(last.a, last.b, last.length + match.length)
        elif match.length:
            yield from [last] if last.length else []
            last = match
    yield from [last] if last.length else []
