"""The workloads of `mha bench`: sizes, backends, and their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

from mhacli.errors import UsageError
from mhacli.settings import ITEM_BYTES, MAX_LENGTH, MAX_WIDTH, Config, Dtype

Direction = Literal["forward", "backward", "both"]

_TIMES_FORWARD_FLOPS = {"forward": 2, "backward": 5, "both": 7}
"""In halves of the forward pass: backward has five products against two, recomputed scores included.

Source: Dao 2023, "FlashAttention-2", section 4.1.
"""


@dataclass(frozen=True)
class Workload:
    """One size of attention to measure, with values as wide as keys. With `causal`, queries are the last tokens."""

    batch: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    q_len: int
    k_len: int
    dtype: Dtype
    causal: bool
    direction: Direction

    @property
    def name(self) -> str:
        """The size as text."""
        return f"{self.length_text} · {self.family}"

    @property
    def family(self) -> str:
        """The properties that sizes differing only in batch and length have in common, as text."""
        parts = [f"{self.n_heads} head{'s' * (self.n_heads != 1)} × {self.d_head}"]
        if self.n_kv_heads != self.n_heads:
            parts.append(f"{self.n_kv_heads} kv head{'s' * (self.n_kv_heads != 1)}")
        parts.append(self.dtype)
        if self.q_len < self.k_len:
            return " · ".join([*parts, "one query, all keys"])
        direction = "forward and backward" if self.direction == "both" else self.direction
        return " · ".join([*parts, "causal" if self.causal else "full", direction])

    @property
    def length_text(self) -> str:
        """Batch and length: `1,024 tokens`, `4 × 256 tokens`, or `8,192 keys` for a single query."""
        batch = "" if self.batch == 1 else f"{self.batch} × "
        return f"{batch}{self.k_len:,} {'keys' if self.q_len < self.k_len else 'tokens'}"

    @property
    def offset(self) -> int:
        """The key position of the first query."""
        return self.k_len - self.q_len

    @property
    def pairs(self) -> int:
        """The visible cells of one head."""
        return self.q_len * self.k_len - (self.q_len * (self.q_len - 1) // 2 if self.causal else 0)

    @property
    def is_masked(self) -> bool:
        """Whether any cell is masked. A single query that is the newest token sees all keys."""
        return self.pairs < self.q_len * self.k_len

    @property
    def attention_flops(self) -> int:
        """The operations of the products: forward `4 · batch · n_heads · pairs · d_head`, backward 2.5 times as many."""
        return 2 * self.batch * self.n_heads * self.pairs * self.d_head * _TIMES_FORWARD_FLOPS[self.direction]

    @property
    def input_bytes(self) -> int:
        """The bytes of q, k and v."""
        numbers = self.n_heads * self.q_len + 2 * self.n_kv_heads * self.k_len
        return self.batch * numbers * self.d_head * ITEM_BYTES[self.dtype]


# ------------------------------------------------------------------------------------------------- backends and sweeps


MAX_WORKLOADS = 1000


class Backend(NamedTuple):
    """The properties of a backend that are known before it runs. `n_matrices`: how many matrices of all scores it holds."""

    about: str
    n_matrices: int = 0
    is_compiled: bool = False
    hopes_for_fused: bool = False
    projects: bool = False
    returns_pattern: bool = False


BACKENDS: Mapping[str, Backend] = {
    "explicit": Backend("the readable definition, attend, which builds the whole pattern", n_matrices=2),
    "sdpa": Backend("scaled_dot_product_attention with the kernel that torch picks", hopes_for_fused=True),
    "math": Backend("scaled_dot_product_attention, its unfused kernel", n_matrices=2),
    "flash": Backend("scaled_dot_product_attention, its flash kernel"),
    "efficient": Backend("scaled_dot_product_attention, its memory-efficient kernel"),
    "cudnn": Backend("scaled_dot_product_attention, cuDNN's kernel"),
    "flex": Backend("FlexAttention through torch.compile", is_compiled=True, hopes_for_fused=True),
    "compiled": Backend("attend through torch.compile", 2, is_compiled=True, hopes_for_fused=True),
    "torch-mha": Backend("nn.MultiheadAttention without weights", 1, hopes_for_fused=True, projects=True),
    "torch-mha-weights": Backend(
        "nn.MultiheadAttention with weights for every head", 2, projects=True, returns_pattern=True
    ),
}
"""The backends in default order. A backend that projects is a whole layer, and cannot decode because it has no cache."""

ALL = "all"


class DeviceDefaults(NamedTuple):
    """Default sizes for a type of device: the width of all heads, tokens per batch, and lengths."""

    backends: tuple[str, ...]
    dtype: Dtype
    width: int
    tokens: int
    lengths: tuple[int, ...]
    decode_lengths: tuple[int, ...]


SCALES: Mapping[str, DeviceDefaults] = {
    "cpu": DeviceDefaults(
        ("explicit", "sdpa", "math", "flash", "torch-mha", "torch-mha-weights"),
        "float32", 512, 1024, (256, 512, 1024, 2048), (512, 1024, 2048, 4096, 8192),
    ),
    "cuda": DeviceDefaults(
        tuple(BACKENDS), "bfloat16", 2048, 16384, (512, 1024, 2048, 4096, 8192, 16384, 32768),
        (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    ),
    "mps": DeviceDefaults(
        ("explicit", "sdpa", "math", "torch-mha", "torch-mha-weights"),
        "float32", 1024, 4096, (512, 1024, 2048, 4096, 8192), (1024, 2048, 4096, 8192),
    ),
}  # fmt: skip
"""Tokens per batch and the width of all heads are constant, as in the benchmark of FlashAttention, scaled to the
device.

Source: Dao 2023, "FlashAttention-2", section 4.1: 16k tokens, hidden dimension 2048.
"""


@dataclass(frozen=True)
class Sweep:
    """The sizes to measure. `on` fills in empty tuples and None for a device."""

    backends: tuple[str, ...] = ()
    batch: tuple[int, ...] = ()
    n_heads: tuple[int, ...] = ()
    n_kv_heads: tuple[int, ...] = ()
    d_head: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    dtypes: tuple[Dtype, ...] = ()
    causal: bool = False
    directions: tuple[Direction, ...] = ("forward",)
    decode: bool = False

    def checked(self) -> Sweep:
        """The sweep itself. Raises `UsageError` for unknown backends and invalid sizes."""
        for name in self.backends:
            if name not in BACKENDS:
                raise UsageError(f"there is no backend {name!r}: choose from {', '.join([*BACKENDS, ALL])}")
        if self.decode and self.directions != ("forward",):
            directions = ",".join(self.directions)
            raise UsageError(
                f"--direction {directions} does not go with --decode: a decoding step has no backward pass"
            )
        for n_heads, n_kv_heads, d_head in product(self.n_heads, self.n_kv_heads or (None,), self.d_head or (64,)):
            _require_sizes(n_heads, n_kv_heads, d_head)
        for name, values in (("batch", self.batch), ("lengths", self.lengths)):
            if not all(1 <= value <= MAX_LENGTH for value in values):
                raise UsageError(f"--{name} {','.join(map(str, values))}: each is a number from 1 to {MAX_LENGTH}")
        if not self.directions:
            raise UsageError("--direction names none: choose from forward, backward, both")
        return self

    def on(self, kind: str) -> Sweep:
        """The sweep with defaults for a type of device, except for the batch, which depends on the length."""
        scale = SCALES[kind]
        d_head = self.d_head or (64,)
        lengths = self.lengths or (scale.decode_lengths if self.decode else scale.lengths)
        backends = self.backends or tuple(
            name for name in scale.backends if not (self.decode and BACKENDS[name].projects)
        )
        dtypes = self.dtypes or (scale.dtype,)
        return replace(self, backends=backends, d_head=d_head, lengths=lengths, dtypes=dtypes)

    def workloads(self, kind: str) -> tuple[Workload, ...]:
        """Every size, family by family. Raises `UsageError` for too many of them, or for a broken rule."""
        full, scale = self.on(kind), SCALES[kind]
        batches = full.batch or ((1,) if full.decode else (None,))
        sizes: list[Workload] = []
        for dtype, direction, d_head in product(full.dtypes, full.directions, full.d_head):
            for n_heads in full.n_heads or (max(1, scale.width // d_head),):
                for n_kv_heads in full.n_kv_heads or (n_heads,):
                    _require_sizes(n_heads, n_kv_heads, d_head)
                    sizes += [
                        Workload(
                            batch or max(1, scale.tokens // length), n_heads, n_kv_heads, d_head,
                            1 if full.decode else length, length, dtype, full.causal, direction,
                        )
                        for batch, length in product(batches, full.lengths)
                    ]  # fmt: skip
        if len(sizes) > MAX_WORKLOADS:
            raise UsageError(
                f"these options combine to {len(sizes)} sizes: the most for a run is {MAX_WORKLOADS}",
                hint="shorten one of the lists",
            )
        return tuple(dict.fromkeys(sizes))


def _require_sizes(n_heads: int, n_kv_heads: int | None, d_head: int) -> None:
    """Raises `UsageError` for heads and widths that contradict each other."""
    Config(d_model=MAX_WIDTH, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head).resolved()


# ---------------------------------------------------------------------------------------------------------------- cost


_PASSES = {"forward": 1, "backward": 1, "both": 2}
"""Passes of a projection: only the input's gradient is computed, with one product of the forward size."""


def expected_flops(backend: str, workload: Workload) -> int:
    """The operations of the products of attention, and of the four projections if the backend has them."""
    if not BACKENDS[backend].projects:
        return workload.attention_flops
    width = workload.n_heads * workload.d_head
    rows = workload.batch * (2 * workload.q_len + 2 * workload.k_len)
    return workload.attention_flops + 2 * rows * width * width * _PASSES[workload.direction]


def expected_moved_bytes(backend: str, workload: Workload) -> int:
    """The least bytes to move. Attention: q and z for every head, k and v for every kv head. A layer: input, output, and
    weights of the projections, and a returned pattern, which is also read for its gradient."""
    w, kind, passes = workload, BACKENDS[backend], _PASSES[workload.direction]
    if not kind.projects:
        numbers = 2 * w.batch * (w.n_heads * w.q_len + w.n_kv_heads * w.k_len) * w.d_head
        passes = {"forward": 1, "backward": 2, "both": 3}[
            w.direction
        ]  # backward reads forward's inputs and outputs too
    else:
        width = w.n_heads * w.d_head
        numbers = 2 * w.batch * w.q_len * width + 4 * width * width
        numbers += w.batch * w.n_heads * w.q_len * w.k_len * kind.returns_pattern
    return numbers * ITEM_BYTES[w.dtype] * passes


def least_bytes(backend: str, workload: Workload) -> int:
    """Roughly the memory that a call needs: its inputs, its results, and the scores that it holds at a time."""
    n_matrices, passes = BACKENDS[backend].n_matrices, _PASSES[workload.direction]
    if workload.direction != "forward" and n_matrices:
        n_matrices = 3  # the pattern and two gradients of its size
    cells = workload.batch * workload.n_heads * workload.q_len * workload.k_len
    return 2 * passes * workload.input_bytes + n_matrices * cells * max(ITEM_BYTES[workload.dtype], 4)
