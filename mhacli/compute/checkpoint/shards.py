"""The heads of a layer in this process if a model is split over several, and the combined results of all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.compute.heads import HeadResults
from mhacli.errors import MhaError
from mhacli.models.calls import Call
from mhacli.models.device_map import has_part_of_heads
from mhacli.models.ranks import Ranks


class Shard(NamedTuple):
    """The heads of one layer that this process reduces, by their numbers in the layer, None for all. `n` is the number of
    processes among which the heads are divided."""

    heads: range | None = None
    n: int = 1

    def local_heads(self, wanted: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The requested heads (None: all) in this process, by its own numbers."""
        if self.heads is None or (wanted is None and self.heads):
            return wanted
        return tuple(head - self.heads.start for head in wanted or () if head in self.heads)

    def numbered(self, part: HeadResults) -> HeadResults:
        """The results of heads with their numbers in the layer instead of those of this process."""
        first = 0 if self.heads is None else self.heads.start
        return (
            part._replace(heads=tuple(replace(head, head=head.head + first) for head in part.heads)) if first else part
        )


ShardResults = tuple[list[HeadResults], dict[str, Tensor]]
"""The results of heads, group by group, and their kept matrices."""


@dataclass(frozen=True)
class Shards:
    """The processes that a `model` is split over."""

    ranks: Ranks
    model: Any

    def of(self, call: Call) -> Shard:
        """The heads of an attention in this process. An attention that every process computes in full is reduced by the first.

        Raises `MhaError` if the processes together have another number of heads than the config says.
        """
        n_here, n = call.shape[1], self.ranks.n
        is_part = has_part_of_heads(self.model, call.name)
        shard = Shard(range(n_here * self.ranks.rank, n_here * (self.ranks.rank + 1)), n) if is_part else Shard()
        n_heads = self.model.config.get_text_config(decoder=True).num_attention_heads
        if isinstance(n_heads, int) and n_here * shard.n != n_heads:
            raise MhaError(
                f"--device-map tp: {n} processes have {n_here} heads of {call.name} each, of {n_heads} heads in all",
                hint="--device-map auto spreads whole layers",
                code="not-split",
            )
        return shard if is_part or self.ranks.rank == 0 else Shard(range(0))

    def require_same_masks(self, call: Call, n_masks: int) -> None:
        """Raises `MhaError` if heads have different masks, because this process does not know those of other processes."""
        if n_masks > 1 and has_part_of_heads(self.model, call.name):
            raise MhaError(
                f"--device-map tp: the heads of {call.name} have masks of their own",
                hint="--device-map auto spreads whole layers",
                code="not-split",
            )

    def gathered(self, make: Callable[[], ShardResults]) -> ShardResults:
        """The results of `make` on all ranks, with the heads of the layer in order."""
        of_ranks = self.ranks.gathered(make)
        matrices = [kept for _, kept in of_ranks if kept]
        return [part for parts, _ in of_ranks for part in parts], _side_by_side(matrices)


def _side_by_side(matrices: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The matrices `[batch, head, …]` of several groups of heads, concatenated; `allowed` is the same for all heads."""
    first: Mapping[str, Tensor] = matrices[0] if matrices else {}
    return {
        name: array if name == "allowed" else torch.cat([group[name] for group in matrices], dim=1)
        for name, array in first.items()
    }
