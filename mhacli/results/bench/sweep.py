"""Which attentions `mha bench` measures: backends and where they exist, and the sizes that options come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from mhacli.errors import UsageError
from mhacli.results.bench.workload import Direction, Workload
from mhacli.spec.config import MAX_LENGTH, MAX_WIDTH, Config, Dtype

MAX_WORKLOADS = 1000


class Backend(NamedTuple):
    """What is known of a way to compute attention before it runs."""

    about: str
    is_compiled: bool = False
    hopes_for_fused: bool = False
    projects: bool = False
    returns_pattern: bool = False


BACKENDS: Mapping[str, Backend] = {
    "explicit": Backend("the readable definition, attend, which builds the whole pattern"),
    "sdpa": Backend("scaled_dot_product_attention with the kernel that torch picks", hopes_for_fused=True),
    "math": Backend("scaled_dot_product_attention, its unfused kernel"),
    "flash": Backend("scaled_dot_product_attention, its flash kernel"),
    "efficient": Backend("scaled_dot_product_attention, its memory-efficient kernel"),
    "cudnn": Backend("scaled_dot_product_attention, cuDNN's kernel"),
    "flex": Backend("FlexAttention through torch.compile", is_compiled=True, hopes_for_fused=True),
    "compiled": Backend("attend through torch.compile", is_compiled=True, hopes_for_fused=True),
    "tiled": Backend("softmax(qk)v tile by tile in plain torch calls, as mha heads does where no fused kernel fits"),
    "torch-mha": Backend("nn.MultiheadAttention without weights", hopes_for_fused=True, projects=True),
    "torch-mha-weights": Backend(
        "nn.MultiheadAttention with weights for every head", projects=True, returns_pattern=True
    ),
}
"""The backends in the order of the default. One that projects is a whole layer, and cannot decode: it keeps no past."""

ALL = "all"
_EVERYWHERE = ("explicit", "sdpa", "math", "torch-mha", "torch-mha-weights")


class Scale(NamedTuple):
    """What suits a kind of device: the width of all heads, tokens per batch, lengths, and long rows of batch 1."""

    backends: tuple[str, ...]
    dtype: Dtype
    width: int
    tokens: int
    lengths: tuple[int, ...]
    long_lengths: tuple[int, ...]
    decode_lengths: tuple[int, ...]


SCALES: Mapping[str, Scale] = {
    "cpu": Scale(
        ("explicit", "sdpa", "math", "flash", "torch-mha", "torch-mha-weights"),
        "float32", 512, 1024, (256, 512, 1024), (2048,), (512, 1024, 2048, 4096, 8192),
    ),
    "cuda": Scale(
        tuple(BACKENDS), "bfloat16", 2048, 16384, (512, 1024, 2048, 4096, 8192, 16384), (32768,),
        (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    ),
    "mps": Scale(_EVERYWHERE, "float32", 1024, 4096, (512, 1024, 2048, 4096), (8192,), (1024, 2048, 4096, 8192)),
}  # fmt: skip
"""Tokens per batch and the width of all heads are constant, as in the benchmark of FlashAttention, scaled to the device.

Source: Dao 2023, "FlashAttention-2", section 4.1: 16k tokens, hidden dimension 2048.
"""


@dataclass(frozen=True)
class Sweep:
    """The sizes to measure. An empty tuple or None is open: `on` fills it in for a device."""

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
        """The sweep itself. Raises `UsageError` for a backend that does not exist, and for sizes that cannot be."""
        for name in self.backends:
            if name not in BACKENDS:
                raise UsageError(f"backends must be among {', '.join(BACKENDS)} or {ALL}, got {name!r}")
        for name in ("batch", "lengths"):
            low = min(getattr(self, name), default=1)
            if low < 1:
                raise UsageError(f"{name} must be counts from 1 up, got {low}")
        if not self.directions:
            raise UsageError("directions must name one at least, got none")
        if self.decode and self.directions != ("forward",):
            raise UsageError("direction must be forward with decode: a step of decoding has no backward pass")
        for n_heads, n_kv_heads, d_head in product(self.n_heads, self.n_kv_heads or (None,), self.d_head or (64,)):
            _require_sizes(n_heads, n_kv_heads, d_head)
        for length in self.lengths:
            if length > MAX_LENGTH:
                raise UsageError(f"lengths must be at most {MAX_LENGTH}, got {length}")
        return self

    def on(self, kind: str) -> Sweep:
        """The sweep with what is open filled in for a kind of device, except for a batch, which goes with the length."""
        scale = SCALES[kind]
        d_head = self.d_head or (64,)
        lengths = self.lengths or (scale.decode_lengths if self.decode else scale.lengths + scale.long_lengths)
        backends = self.backends or tuple(
            name for name in scale.backends if not (self.decode and BACKENDS[name].projects)
        )
        dtypes = self.dtypes or (scale.dtype,)
        return replace(self, backends=backends, d_head=d_head, lengths=lengths, dtypes=dtypes)

    def workloads(self, kind: str) -> tuple[Workload, ...]:
        """Every size, family by family. Raises `UsageError` for more of them than one would wait for, or a rule broken."""
        full, scale = self.on(kind), SCALES[kind]
        found: list[Workload] = []
        for dtype, direction, d_head in product(full.dtypes, full.directions, full.d_head):
            for n_heads in full.n_heads or (max(1, scale.width // d_head),):
                for n_kv_heads in full.n_kv_heads or (n_heads,):
                    _require_sizes(n_heads, n_kv_heads, d_head)
                    for batch, length in _batches(full, scale):
                        q_len = 1 if full.decode else length
                        found.append(
                            Workload(batch, n_heads, n_kv_heads, d_head, q_len, length, dtype, full.causal, direction)
                        )
        if len(found) > MAX_WORKLOADS:
            raise UsageError(f"the sweep must have at most {MAX_WORKLOADS} sizes, got {len(found)}")
        return tuple(dict.fromkeys(found))


def _require_sizes(n_heads: int, n_kv_heads: int | None, d_head: int) -> None:
    """Raises `UsageError` for heads and widths that do not fit together."""
    Config(d_model=MAX_WIDTH, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head).resolved()


def _batches(full: Sweep, scale: Scale) -> Sequence[tuple[int, int]]:
    """(batch, length): every batch asked for, or else as many sequences as make up the tokens of a batch; 1 to decode."""
    if full.batch:
        return list(product(full.batch, full.lengths))
    return [(1 if full.decode else max(1, scale.tokens // length), length) for length in full.lengths]
