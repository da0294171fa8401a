"""The catalogue of mistakes: wrong stages of attention.

`mha check` puts one entry after another into the reference until the outputs match. A new mistake is a line in the
file of its part, and a line in record/mistakes.toml.
"""

from __future__ import annotations

from collections.abc import Sequence

from mhacli.attention.mistakes import caching, heads, masks, projections, scores
from mhacli.attention.mistakes.stages import Mistake

__all__ = ["MISTAKES", "Mistake"]
MISTAKES: Sequence[Mistake] = [
    mistake for part in (heads, scores, masks, projections, caching) for mistake in part.mistakes()
]
"""Every form of every mistake, in the order in which they are tried, the likelier first within a stage."""
