"""What is asked of a checkpoint, before anything of it is loaded, and how much memory a pass of it takes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from mhacli.checkpoints.folder import Checkpoint
from mhacli.errors import MhaError
from mhacli.io import memory
from mhacli.io.files import format_size
from mhacli.requests.layer import FLOAT32_BYTES, TILE_BYTES, VECTORS
from mhacli.results.record.heads import Wanted
from mhacli.results.record.record import LayerChoice
from mhacli.spec.config import DEFAULT_KEEP_LIMIT, Side
from mhacli.text.spans import Message


@dataclass(frozen=True)
class ModelRequest:
    """The checkpoint by its path or id, its folder where that is already read, the texts, and what to find out.

    `context` is what the encoder of a model of two halves reads, `chat` the messages that take the place of a text. `spans`
    are words of `--span`. `n_generated` tokens are made by the model itself, greedily. `tokenizer` None is the checkpoint's
    own; `dtype` None is that of its weights. `max_tokens` cuts texts; without it longer ones are refused. `keep` are matrices
    of each layer, None for as many as fit, within `keep_limit` bytes.
    """

    source: str
    checkpoint: Checkpoint | None
    texts: tuple[str, ...]
    wanted: Wanted
    revision: str | None = None
    context: tuple[str, ...] = ()
    chat: tuple[Message, ...] = ()
    spans: tuple[str, ...] = ()
    layers: tuple[LayerChoice, ...] | None = None
    n_generated: int = 0
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str | None = None
    threads: int | None = None
    padding: Side | None = None
    max_tokens: int | None = None
    keep: tuple[str, ...] | None = None
    keep_limit: int = DEFAULT_KEEP_LIMIT


_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


def is_hub_id(source: str) -> bool:
    """Whether it can only be the id of a checkpoint on a hub: nothing of that name is here, it is not written as a path, and
    what would be its first folder is not here either."""
    first = source.partition("/")[0]
    is_path = source.startswith((".", "/", "~")) or (first != source and os.path.isdir(first))
    return not os.path.lexists(source) and not is_path and bool(_HUB_ID.fullmatch(source))


# ------------------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class CheckpointFacts:
    """What the memory of a pass of a loaded checkpoint depends on.

    `holds_matrices`: it computes attention by matrices of queries × keys, layer by layer. `kept_matrices` are those that the
    record would hold, of all heads, within `keep_limit`, and `kept_cells` those of every head besides.
    """

    batch: int
    length: int
    d_model: int
    d_inner: int
    n_heads: int
    item_bytes: int
    holds_matrices: bool
    kept_matrices: int
    keep_limit: int
    kept_cells: int = 0

    def peak_bytes(self) -> int:
        """What a pass takes beside the weights, at its fullest, layer by layer."""
        cells = self.batch * self.length * self.length
        rows = self.batch * self.length * (8 * self.d_model + 3 * self.d_inner) * self.item_bytes
        matrices = 4 * cells * self.n_heads * max(FLOAT32_BYTES, self.item_bytes) if self.holds_matrices else 0
        vectors = self.batch * self.n_heads * self.length * 2 * VECTORS * FLOAT32_BYTES
        kept = min(self.keep_limit, self.kept_matrices * cells * self.n_heads * FLOAT32_BYTES)
        made = 4 * cells * self.n_heads * FLOAT32_BYTES if kept else 0
        cell_bytes = 4 * self.kept_cells * self.batch * self.n_heads * FLOAT32_BYTES
        return rows + matrices + 3 * cells + vectors + kept + made + cell_bytes + TILE_BYTES


def foresee_checkpoint(facts: CheckpointFacts, available: int) -> int:
    """The predicted peak in bytes of a pass, beside the weights. Raises `MhaError` where it is more than 80 % of what is
    `available`, with the longest text that fits."""
    needed = facts.peak_bytes()
    if memory.fits(needed, available):
        return needed
    longest, too_long = 0, facts.length
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if memory.fits(replace(facts, length=middle).peak_bytes(), available):
            longest = middle
        else:
            too_long = middle
    raise MhaError(
        f"attention of {facts.length} tokens, {facts.n_heads} heads, batch {facts.batch}, must fit in the "
        f"{format_size(available)} that are available, got {format_size(needed)}",
        hint=f"--max-tokens {longest} fits" if longest else "a smaller model or a shorter text is needed",
        code="out-of-memory",
    )
