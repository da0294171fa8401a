"""The catalogue of mistakes: wrong stages of attention.

`mha check` puts one entry after another into the reference until the outputs match. A new mistake is a line in the
function of its stage, in the file of its part, and a line in record/mistakes.toml.
"""

from __future__ import annotations

from mhacli.attention.mistakes import heads, scores, masks, projections, caching  # isort: skip # in the order in which they are tried
from mhacli.attention.mistakes.stages import MISTAKES, Mistake

__all__ = ["MISTAKES", "Mistake", "caching", "heads", "masks", "projections", "scores"]
