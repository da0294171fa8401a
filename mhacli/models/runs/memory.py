"""The memory of a pass of a checkpoint and of removals from it, predicted before its first tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mhacli.attention.memory import FLOAT32_BYTES, require_room, statistics_bytes
from mhacli.io import memory

LEAST_ROWS = 2
"""The rows of the smallest batch of removals: one removal and an untouched row."""


@dataclass(frozen=True)
class CheckpointFacts:
    """The sizes that determine the memory of a loaded checkpoint's pass, and of removals from it.

    `holds_matrices`: attention builds query × key matrices, layer by layer. `kept_matrices` are the matrices (of all
    heads) that the record would keep, within `keep_limit`, and `kept_cells` the single cells kept of every head.
    `on_gpu`: heads are reduced on a GPU. `n_vocabulary` are the logits of a row of removals.
    """

    batch: int
    length: int
    d_model: int
    d_inner: int
    n_layers: int
    n_heads: int
    item_bytes: int
    holds_matrices: bool
    kept_matrices: int
    keep_limit: int
    kept_cells: int = 0
    on_gpu: bool = False
    n_vocabulary: int = 0

    def peak_bytes(self) -> int:
        """The peak of a pass in bytes, without the weights. A kept matrix exists once more while it is assembled."""
        wide, cells = max(FLOAT32_BYTES, self.item_bytes), self.batch * self.length * self.length
        rows = self.batch * self.length * (8 * self.d_model + 3 * self.d_inner) * self.item_bytes
        kept = min(self.keep_limit, self.kept_matrices * cells * self.n_heads * FLOAT32_BYTES)
        matrices = 4 * (self.holds_matrices + (kept > 0)) * cells * self.n_heads * wide
        cell_bytes = 4 * self.kept_cells * self.batch * self.n_heads * FLOAT32_BYTES
        shape = self.length, self.length
        statistics = statistics_bytes(self.batch, self.n_heads, shape, wide=FLOAT32_BYTES, on_gpu=self.on_gpu)
        return rows + matrices + 3 * cells + kept + cell_bytes + statistics

    def require(self, available: int) -> int:
        """The predicted peak of a pass in bytes, without the weights. Raises `MhaError` as `require_room` does."""
        what = f"{self.length} tokens, {self.n_heads} heads, batch {self.batch}"
        return require_room(lambda n: replace(self, length=n).peak_bytes(), self.length, available, what=what)

    def removal_bytes(self, n_rows: int, n_run: int) -> int:
        """The larger peak, without the weights, of the pass over the text and of a batch of `n_rows` removals.

        A row runs `n_run` tokens of the text. Outputs of blocks and heads are kept twice, and keys and values once."""
        row_bytes, n_run = self.length * self.d_model * self.item_bytes, min(n_run, self.length)
        batch = replace(self, batch=n_rows).peak_bytes() * n_run // self.length
        logit_bytes = max(FLOAT32_BYTES, self.item_bytes) + 32
        kept = 5 * self.n_layers * row_bytes + n_rows * self.n_vocabulary * logit_bytes
        return max(self.peak_bytes(), batch + 2 * n_rows * row_bytes) + kept

    def rows_that_fit(self, most: int, available: int, *, n_run: int) -> int:
        """The number of rows of `n_run` tokens, at most `most`, that a batch of removals may have. Raises `MhaError` as
        `require_room` does if `LEAST_ROWS` do not fit."""

        def least(n: int) -> int:
            return replace(self, length=n).removal_bytes(LEAST_ROWS, n_run)

        what = f"{LEAST_ROWS} copies of {self.length} tokens, {self.n_heads} heads, {self.n_vocabulary} logits"
        require_room(least, self.length, available, what=what)
        rows = range(max(most, LEAST_ROWS), LEAST_ROWS, -1)
        return next((n for n in rows if memory.fits(self.removal_bytes(n, n_run), available)), LEAST_ROWS)
