"""What a command computes: the settings, the sizes of the texts, and what is kept of the result. Made before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.record.heads import Kept
from mhacli.settings import DEFAULT_KEEP_LIMIT, Config, ModelSettings, Statistics
from mhacli.sites import SITES, Dims
from mhacli.text.numbers import shown

if TYPE_CHECKING:
    from mhacli.io.safetensors import TensorFile
    from mhacli.models.folder import Checkpoint
    from mhacli.text.spans import Message

DEFAULT_KEEP = ("pattern", "out", "z", "scores", "qk")
"""The arrays that a record keeps by default, the most important first."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings and what to compute, of a layer of mha or of a checkpoint (`model.path`).

    A layer reads texts of these sizes (`dims`) under a resolved config, with weights of a file or of the config's seed; the ids
    are those of the `vocabulary`. A checkpoint reads `texts`, or a `chat` in place of one;
    `pair` are the second texts of pairs, `context` is the input of an encoder, `spans` are named parts of the text as typed, and
    `n_generated` tokens are generated greedily. `max_tokens` truncates texts; without it, longer texts are refused. Its folder is
    the `checkpoint`, if it is read already.

    `keep` are the arrays to keep, within `keep_limit` bytes; None keeps as many as fit. `also` are arrays to keep besides, and
    `kept` cells of long texts. `repeat` is the number of timed runs. `notes` are for the user.
    """

    dims: Dims = Dims(Config(), batch=0, q_len=0, k_len=0)
    vocabulary: tuple[str, ...] = ()
    weights: TensorFile | None = None
    model: ModelSettings = ModelSettings()
    checkpoint: Checkpoint | None = None
    texts: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    chat: tuple[Message, ...] = ()
    spans: tuple[str, ...] = ()
    n_generated: int = 0
    max_tokens: int | None = None
    statistics: Statistics = Statistics()
    keep: tuple[str, ...] | None = None
    keep_limit: int = DEFAULT_KEEP_LIMIT
    also: tuple[str, ...] = ()
    kept: Kept = Kept()
    repeat: int | None = None
    allow_nonfinite: bool = False
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The path or id of the checkpoint."""
        assert self.model.path is not None, "a layer of mha has no checkpoint"
        return self.model.path

    @property
    def config(self) -> Config:
        """The resolved config of a layer."""
        return self.dims.config

    @property
    def plan(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """What `arrays_to_keep` says of this run."""
        return self.arrays_to_keep(self.dims)

    def arrays_to_keep(self, dims: Dims) -> tuple[dict[str, int], tuple[str, ...]]:
        """The arrays of a layer that fit into the limit with their bytes, and the names of the others: all of `keep`, or as many
        of `DEFAULT_KEEP` and `also` as fit.

        Raises `UsageError` for an unknown site, and `MhaError` if `keep` does not fit.
        """
        names = self.keep
        if names is None:
            names = (*DEFAULT_KEEP, *(["dropped"] if dims.config.train else []), *self.also)
        kept = dict[str, int]()
        for name in names:
            if name not in SITES:
                raise UsageError(f"--keep: {name!r} is not a site", hint=f"sites: {' '.join(SITES)}")
            n_bytes = prod(SITES[name].shape_for(dims)) * dims.item_bytes
            if self.keep is not None or sum(kept.values()) + n_bytes <= self.keep_limit:
                kept[name] = n_bytes
        total = sum(kept.values())
        if total > self.keep_limit:
            raise MhaError(
                f"--keep {','.join(kept)} takes {shown(total, 'bytes')}, above the limit of {shown(self.keep_limit, 'bytes')}",
                hint=f"--keep-limit {-(-total >> 20)}M raises the limit; --keep pattern takes less",
                code="too-large",
            )
        return kept, tuple(name for name in names if name not in kept)


CellIndex = tuple[int, int, int, int]
"""A cell of the pattern by sequence, head, query and key."""


def require_inside(
    place: CellIndex, n_heads: int, queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]
) -> None:
    """Raises `UsageError` for a cell outside of the patterns of texts with these ids."""
    sequence, *cell = place
    if sequence >= len(queries):
        raise UsageError(out_of_range("--sequence", sequence, len(queries)))
    counts = {"head": n_heads, "query": len(queries[sequence]), "key": len(keys[sequence])}
    for index, (name, count) in zip(cell, counts.items(), strict=True):
        if index >= count:
            raise UsageError(out_of_range(f"--cell {','.join(map(str, cell))}: {name}", index, count))
