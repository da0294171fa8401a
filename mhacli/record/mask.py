"""The summary of a mask alone, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mhacli.settings import Config
from mhacli.text.tokens import TokenSequence


@dataclass(frozen=True)
class SequenceMask:
    """The mask of one sequence: the number of keys that each query sees, padding included, and a map of blocks.

    `block_counts` are visible cells per block of `block` × `block` queries and keys. The last blocks may be smaller.
    """

    visible_per_query: tuple[int, ...]
    n_cells: int
    block: int
    block_counts: tuple[tuple[int, ...], ...]

    @property
    def n_visible(self) -> int:
        """The number of visible cells."""
        return sum(self.visible_per_query)

    @property
    def density(self) -> float:
        """The fraction of visible cells."""
        return self.n_visible / self.n_cells


@dataclass(frozen=True)
class MaskSummary:
    """The rules of a mask, and the resulting mask of each sequence."""

    config: Config
    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    rules: tuple[str, ...]
    masks: tuple[SequenceMask, ...]
