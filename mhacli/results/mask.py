"""What is said of a mask that is looked at alone. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mhacli.spec.config import Config
from mhacli.spec.tokens import TokenSequence


@dataclass(frozen=True)
class SequenceMask:
    """What the mask allows in one sequence: how many keys each query sees, padding included, and a map of blocks.

    `block_counts` are visible cells per block of `block` × `block` queries and keys; blocks at the end may be smaller.
    """

    visible_per_query: tuple[int, ...]
    n_cells: int
    block: int
    block_counts: tuple[tuple[int, ...], ...]

    @property
    def n_visible(self) -> int:
        """How many cells are allowed."""
        return sum(self.visible_per_query)

    @property
    def density(self) -> float:
        """The part of cells that are allowed."""
        return self.n_visible / self.n_cells


@dataclass(frozen=True)
class MaskSummary:
    """A mask looked at alone: its rules, and what they come to in each sequence."""

    config: Config
    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    rules: tuple[str, ...]
    masks: tuple[SequenceMask, ...]
