"""What each backend is expected to do and to need, by formula: operations, bytes moved, memory beyond its inputs."""

from __future__ import annotations

from mhacli.results.bench.sweep import BACKENDS
from mhacli.results.bench.workload import Workload
from mhacli.spec.config import ITEM_BYTES

_PASSES = {"forward": 1, "backward": 1, "both": 2}
"""Of a projection: gradients are taken of the inputs alone, one product of the size of the forward one."""
_EXACT_BLOCKS_BYTES = 512 << 20
"""Of the scores of a block of queries, and what stands beside them."""

TILE_CELLS = {"cpu": 512 * 1024, "cuda": 2048 * 8192}
"""Of one tile of our own on a kind of device; others are as CUDA."""


def expected_flops(backend: str, workload: Workload) -> int:
    """Operations of the products: those of attention, and of the four projections where the backend has them."""
    if not BACKENDS[backend].projects:
        return workload.attention_flops
    width = workload.n_heads * workload.d_head
    rows = workload.batch * (2 * workload.q_len + 2 * workload.k_len)
    return workload.attention_flops + 2 * rows * width * width * _PASSES[workload.direction]


def expected_moved_bytes(backend: str, workload: Workload) -> int:
    """The least bytes to move: those of attention, or with projections of rows in and out and of the weights.

    A pattern that is a result is written too, and read where its gradient is taken.
    """
    kind, passes, item = BACKENDS[backend], _PASSES[workload.direction], ITEM_BYTES[workload.dtype]
    if not kind.projects:
        return workload.attention_bytes
    width = workload.n_heads * workload.d_head
    numbers = 2 * workload.batch * workload.q_len * width + 4 * width * width
    if kind.returns_pattern:
        numbers += workload.batch * workload.n_heads * workload.q_len * workload.k_len
    return numbers * item * passes


def exact_bytes(workload: Workload) -> int:
    """The memory that the exact answer in float64 takes: inputs and result, three times over where gradients are taken."""
    of_queries, of_keys = workload.n_heads * workload.q_len, workload.n_heads * workload.k_len
    copies = 1 if workload.direction == "forward" else 3
    return copies * 8 * workload.batch * workload.d_head * 2 * (of_queries + of_keys) + _EXACT_BLOCKS_BYTES


def expected_extra_bytes(backend: str, workload: Workload, kind: str) -> int:
    """The memory beyond the inputs at its largest, the result with it, on a kind of device.

    Counted from what each backend keeps at one time, in whole matrices of scores and rows of heads; kernels' own small
    buffers (about 0.6 MiB per thread on a CPU) are left out.
    """
    counts = _Counts(workload)
    if backend in ("explicit", "compiled"):
        return counts.explicit()
    if backend == "math":
        return counts.math()
    if backend == "tiled":
        return counts.tiled(kind)
    if BACKENDS[backend].projects:
        return counts.torch_mha(weights=BACKENDS[backend].returns_pattern, kind=kind)
    return counts.fused()


class _Counts:
    """Bytes of a matrix of scores and of rows, in the inputs' dtype, and `wide`, in the one that softmax runs in."""

    def __init__(self, workload: Workload) -> None:
        item = ITEM_BYTES[workload.dtype]
        heads, self.growth = workload.batch * workload.n_heads, max(item, 4) / item
        self.q = heads * workload.q_len * workload.d_head * item
        self.k = heads * workload.k_len * workload.d_head * item
        self.is_shared = workload.n_kv_heads != workload.n_heads
        self.matrix = heads * workload.q_len * workload.k_len * item
        self.wide = round(self.matrix * self.growth)
        self.lse = heads * workload.q_len * 4
        self.mask = workload.q_len * workload.k_len if workload.is_masked else 0
        self.has_fast_path = not self.mask and workload.n_heads % 2 == 0
        self.item, self.is_forward = item, workload.direction == "forward"

    def fused(self) -> int:
        """The result and the log-sum-exp; backward three gradients besides, and what it saves on the way."""
        return self.q + self.lse if self.is_forward else 4 * self.q + 2 * self.k + 2 * self.lse

    def tiled(self, kind: str) -> int:
        """The result in the dtype of the maths, rounded where that is another; six vectors; the scores of one tile."""
        rounded = self.q if self.growth > 1 else 0
        wide_item = round(self.item * self.growth)
        tile = TILE_CELLS.get(kind, TILE_CELLS["cuda"]) * wide_item
        return round(self.q * self.growth) + rounded + 6 * self.lse // 4 * wide_item + tile

    def explicit(self) -> int:
        """Scores and their softmax, a third copy to round to 16 bits; backward the pattern and two gradients of its size."""
        copied = self.k if self.is_shared else 0
        if not self.is_forward:
            return 3 * self.wide + self.q + 2 * self.k + 2 * copied + self.mask
        rounded = self.matrix if self.growth > 1 else 0
        return max(2 * self.wide + rounded + self.mask, self.matrix + self.q) + copied

    def math(self) -> int:
        """As explicit, with a byte per cell for rows without a key; scaled queries and keys; 16 bits are widened first."""
        copied = 2 * self.k if self.is_shared else 0
        rows = round((2 * self.q + 2 * self.k) * self.growth) if self.growth > 1 else self.q + self.k
        if not self.is_forward:
            return 3 * self.wide + rows + self.q + 2 * self.k + copied
        cells = self.matrix // self.item
        return 2 * self.wide + cells + 4 * self.mask + rows + copied

    def torch_mha(self, *, weights: bool, kind: str) -> int:
        """Projections, and one matrix where its fast path runs unfused, on a CPU; with weights as explicit.

        A mask, or an odd number of heads, bars the fast path.
        """
        mask = self.mask * self.item
        if not self.is_forward:
            return 12 * self.q + mask + (3 * self.matrix if weights else 0)
        if weights:
            return (5 * self.q + self.matrix) if self.has_fast_path else 3 * self.q + 2 * self.matrix + mask
        is_unfused = kind == "cpu" and self.has_fast_path
        return 3 * self.q + self.matrix if is_unfused else 6 * self.q + mask
