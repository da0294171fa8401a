"""The catalogue of mistakes: wrong replacements for stages of attention.

`mha check` puts one entry after another into the reference until the outputs match. A new mistake is an entry in the file of
its part, below its replacement function, and a line in record/mistakes.toml.
"""

from __future__ import annotations

from collections.abc import Mapping

from mhacli.attention.mistakes.caching import CACHING
from mhacli.attention.mistakes.heads import HEADS
from mhacli.attention.mistakes.masks import MASKS
from mhacli.attention.mistakes.projections import PROJECTIONS
from mhacli.attention.mistakes.scores import SCORES
from mhacli.attention.mistakes.stages import Mistake, MistakeVariant

__all__ = ["BY_CODE", "MISTAKES", "Mistake", "MistakeVariant"]

MISTAKES: tuple[Mistake, ...] = (*HEADS, *SCORES, *MASKS, *PROJECTIONS, *CACHING)
"""Every entry, the likelier first within a stage. A code may have several entries."""

BY_CODE: Mapping[str, Mistake] = {mistake.code: mistake for mistake in reversed(MISTAKES)}
"""The first entry of every code."""
