"""What each backend is expected to do and to need, by formula: operations, bytes moved, memory beyond its inputs."""

from __future__ import annotations

from mhacli.config import ITEM_BYTES
from mhacli.workload import Workload

_PROJECTS = ("torch-mha", "torch-mha-weights")
_PASSES = {"forward": 1, "backward": 1, "both": 2}
"""Of a projection: gradients are taken of the inputs alone, one product of the size of the forward one."""


def expected_flops(backend: str, workload: Workload) -> int:
    """Operations of the products: those of attention, and of the four projections where the backend has them."""
    if backend not in _PROJECTS:
        return workload.flops
    width = workload.n_heads * workload.d_head
    rows = workload.batch * (2 * workload.q_len + 2 * workload.k_len)
    return workload.flops + 2 * rows * width * width * _PASSES[workload.direction]


def expected_moved_bytes(backend: str, workload: Workload) -> int:
    """The least bytes to move: for attention as `Workload.bytes`; with projections rows in and out, and the weights."""
    if backend not in _PROJECTS:
        return workload.bytes
    width = workload.n_heads * workload.d_head
    numbers = 2 * workload.batch * workload.q_len * width + 4 * width * width
    return numbers * ITEM_BYTES[workload.dtype] * _PASSES[workload.direction]


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
    if backend in _PROJECTS:
        return counts.torch_mha(weights=backend == "torch-mha-weights", kind=kind)
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
        self.item, self.is_forward = item, workload.direction == "forward"

    def fused(self) -> int:
        """The result and the log-sum-exp; backward three gradients besides, and what it saves on the way."""
        return self.q + self.lse if self.is_forward else 4 * self.q + 2 * self.k + 2 * self.lse

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
        """Projections, and one matrix where its fast path runs unfused, on a CPU; with weights as explicit."""
        mask = self.mask * self.item
        if not self.is_forward:
            return 12 * self.q + mask + (3 * self.matrix if weights else 0)
        if weights:
            return (5 * self.q + self.matrix) if not mask else 3 * self.q + 2 * self.matrix + mask
        is_unfused = kind == "cpu" and not mask
        return 3 * self.q + self.matrix if is_unfused else 6 * self.q + mask
