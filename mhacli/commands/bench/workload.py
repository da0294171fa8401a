"""The workloads of `mha bench`: sizes, backends, and their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

from mhacli.errors import UsageError
from mhacli.settings import (
    ITEM_BYTES,
    MAX_LENGTH,
    MAX_SECONDS,
    MAX_WIDTH,
    Config,
    Dtype,
    counts,
    like,
    require_ranges,
    setting,
    words_of,
)

Direction = Literal["forward", "backward", "both"]

BACKENDS: Mapping[str, str] = {
    "explicit": "the readable definition, attend, which builds the whole pattern",
    "sdpa": "scaled_dot_product_attention with the kernel that torch picks",
    "math": "scaled_dot_product_attention, its unfused kernel",
    "flash": "scaled_dot_product_attention, its flash kernel",
    "efficient": "scaled_dot_product_attention, its memory-efficient kernel",
    "cudnn": "scaled_dot_product_attention, cuDNN's kernel",
    "flex": "FlexAttention through torch.compile",
    "compiled": "attend through torch.compile",
    "torch-mha": "nn.MultiheadAttention without weights",
    "torch-mha-weights": "nn.MultiheadAttention with weights for every head",
}
"""The backends in default order, each with what it is."""
COMPILED = ("flex", "compiled")
EXPECTED_FUSED = ("sdpa", "flex", "compiled", "torch-mha")
"""Backends that are expected to run a fused kernel."""
LAYERS = ("torch-mha", "torch-mha-weights")
"""Whole layers: they compute the projections too, and cannot decode because they have no cache."""
_OFF_CUDA = ("explicit", "sdpa", "math", "flash", *LAYERS)
"""The default backends on other devices than CUDA."""
RETURNS_PATTERN = "torch-mha-weights"
_HOLDS_SCORES = ("explicit", "math", "compiled", *LAYERS)
"""Backends that hold all scores of a call at a time."""


@dataclass(frozen=True)
class Workload:
    """One size of attention to measure, with values as wide as keys. A single query is the newest token, which sees all keys."""

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
    def title(self) -> str:
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
    def is_masked(self) -> bool:
        """Whether any cell is masked."""
        return self.causal and self.q_len > 1

    def cost(self, backend: str) -> tuple[int, int, int]:
        """The operations of the products, the least bytes to move, and roughly the bytes that a call holds at a time.

        Forward has two products of visible cells and backward five, recomputed scores included. A layer has four
        projections too, of which backward computes the gradient of the input alone. Source: Dao 2023,
        "FlashAttention-2", section 4.1.
        """
        item, width, rows = ITEM_BYTES[self.dtype], self.n_heads * self.d_head, self.batch * self.q_len
        n_passes = {"forward": 1, "backward": 1, "both": 2}[self.direction]
        all_cells = rows * self.n_heads * self.k_len
        cells = all_cells - self.is_masked * rows * self.n_heads * (self.q_len - 1) // 2
        flops = 2 * cells * self.d_head * {"forward": 2, "backward": 5, "both": 7}[self.direction]
        of_keys = 2 * self.batch * self.n_kv_heads * self.k_len * self.d_head
        if backend in LAYERS:
            flops += 8 * rows * width * width * n_passes
            moved = (2 * rows * width + 4 * width * width + (backend == RETURNS_PATTERN) * all_cells) * n_passes
        else:  # backward reads inputs and results of forward too
            moved = (2 * rows * width + of_keys) * {"forward": 1, "backward": 2, "both": 3}[self.direction]
        n_matrices = (2 if self.direction == "forward" else 3) if backend in _HOLDS_SCORES else 0
        held = 2 * n_passes * (rows * width + of_keys) * item + n_matrices * all_cells * max(item, 4)
        return flops, moved * item, held


# ------------------------------------------------------------------------------------------------------------- settings


_ALL = "all"
_COMPUTED, _SIZES = "Computation", "Sizes"
_BACKENDS = f"Backends to measure: {', '.join(BACKENDS)}; or {_ALL}."


def _backends(word: str) -> tuple[str, ...]:
    chosen = words_of(*BACKENDS, _ALL)(word)
    return tuple(BACKENDS) if _ALL in chosen else chosen


_list: Any = partial(setting, (), metavar="LIST", common=True)
_like: Any = partial(like, Config, value=(), metavar="LIST", low=None, high=None, common=True)


@dataclass(frozen=True)
class Sweep:
    """The sizes to measure: all lists are combined. `on` fills in empty ones for a type of device."""

    # fmt: off
    backends: tuple[str, ...] = _list(
        _COMPUTED, _BACKENDS, default="those that suit the device", parse=_backends, words=(*BACKENDS, _ALL))
    directions: tuple[Direction, ...] = setting(
        ("forward",), _COMPUTED, "Pass to time: forward, backward, or both.", "--direction", default="forward",
        parse=words_of(*get_args(Direction)), metavar="LIST", common=True)
    causal: bool = like(Config, "causal", _COMPUTED)
    decode: bool = setting(False, _COMPUTED, "Time one decoding step: one query against all keys.", common=True)
    lengths: tuple[int, ...] = _list(
        _SIZES, "Numbers of tokens, such as 512,1k or 512..16k, which doubles.", "--lengths --seq-len",
        default="on a CPU 256..2k, with --decode 512..8k; longer on a GPU",
        parse=counts)
    batch: tuple[int, ...] = _list(
        _SIZES, "Numbers of sequences.", "--batch --batch-size", parse=counts,
        default="chosen so that every length has the same number of tokens")
    n_heads: tuple[int, ...] = _like(
        "n_heads", _SIZES, parse=counts, default="512 ÷ d_head, on CUDA 2048 ÷ d_head")
    n_kv_heads: tuple[int, ...] = _like("n_kv_heads", _SIZES, parse=counts)
    d_head: tuple[int, ...] = _like("d_head", _SIZES, parse=counts, default="64")
    dtypes: tuple[Dtype, ...] = _like(
        "dtype", _SIZES, names=("--dtype",), parse=words_of(*get_args(Dtype)),
        default="float32; on CUDA, bfloat16")
    # fmt: on

    def checked(self) -> Sweep:
        """The sweep itself. Raises `UsageError` for unknown backends and invalid sizes."""
        require_ranges(self)
        for name in self.backends:
            if name not in BACKENDS:
                raise UsageError(f"--backends {name[:40]!r} is not among {', '.join(BACKENDS)}")
        if self.decode and self.directions != ("forward",):
            chosen = ",".join(self.directions)
            raise UsageError(f"--direction {chosen} does not go with --decode: a decoding step has no backward pass")
        for name, values in (("batch", self.batch), ("lengths", self.lengths)):
            if not all(1 <= value <= MAX_LENGTH for value in values):
                raise UsageError(f"--{name} {','.join(map(str, values))}: each is a number from 1 to {MAX_LENGTH}")
        if self.n_heads:
            self.workloads("cpu")
        return self

    def on(self, kind: str) -> Sweep:
        """The sweep with the defaults of a type of device, except those of the batch and of heads."""
        is_cuda = kind == "cuda"
        lengths = ("1k..64k" if is_cuda else "512..8k") if self.decode else ("512..32k" if is_cuda else "256..2k")
        suited = tuple(BACKENDS) if is_cuda else _OFF_CUDA
        return replace(
            self,
            backends=self.backends or tuple(name for name in suited if not self.decode or name not in LAYERS),
            d_head=self.d_head or (64,),
            lengths=self.lengths or counts(lengths),
            dtypes=self.dtypes or ("bfloat16" if is_cuda else "float32",),
        )

    def workloads(self, kind: str) -> tuple[Workload, ...]:
        """Every size, family by family. Raises `UsageError` for heads that contradict each other.

        By default the width of all heads and the tokens of a batch are constant, as in the benchmark of FlashAttention,
        scaled to the device. Source: Dao 2023, "FlashAttention-2", section 4.1: 16k tokens, hidden dimension 2048.
        """
        full = self.on(kind)
        width, n_tokens = (2048, 16_384) if kind == "cuda" else (512, 1024)
        sizes: list[Workload] = []
        for dtype, direction, d_head in product(full.dtypes, full.directions, full.d_head):
            for n_heads in full.n_heads or (max(1, width // d_head),):
                for n_kv_heads, batch, k_len in product(
                    full.n_kv_heads or (n_heads,), full.batch or (1 if full.decode else None,), full.lengths
                ):
                    Config(d_model=MAX_WIDTH, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head).resolved()
                    n, q_len = batch or max(1, n_tokens // k_len), 1 if full.decode else k_len
                    sizes.append(Workload(n, n_heads, n_kv_heads, d_head, q_len, k_len, dtype, full.causal, direction))
        return tuple(dict.fromkeys(sizes))


_TIMING = "Timing"
_BUDGET = "Seconds of timing for each size."
_CALL_LIMIT = "Skip a backend whose single call is predicted to take longer."
_REPEAT = "until each median is accurate to 1 %, or --budget is spent"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Where and how long sizes are measured."""

    # fmt: off
    device: str = like(Config, "device", _TIMING, default="", common=True)
    threads: int | None = like(Config, "threads", _TIMING)
    repeat: int | None = setting(None, _TIMING, "Number of timed runs.", low=1, high=100_000, default=_REPEAT)
    budget: float = setting(3.0, _TIMING, _BUDGET, above=0, high=MAX_SECONDS, metavar="SECONDS")
    call_limit: float = setting(5.0, _TIMING, _CALL_LIMIT, above=0, high=MAX_SECONDS, metavar="SECONDS")
    seed: int = like(Config, "seed", _TIMING)
    # fmt: on

    def checked(self) -> Timing:
        """The settings themselves. Raises `UsageError` for one that is out of its range."""
        require_ranges(self)
        Config(d_model=1, n_heads=1, device=self.device).resolved()
        return self
