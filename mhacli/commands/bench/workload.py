"""The workloads of `mha bench`: sizes, backends, and their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

from mhacli.errors import UsageError
from mhacli.settings import ITEM_BYTES, MAX_LENGTH, MAX_WIDTH, Config, Dtype, counts, like, setting, words_of

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
_OFF_CUDA = ("explicit", "sdpa", "math", "flash", "torch-mha", "torch-mha-weights")
"""The default backends on other devices than CUDA."""
RETURNS_PATTERN = "torch-mha-weights"
_HOLDS_SCORES = ("explicit", "math", "compiled", "torch-mha", "torch-mha-weights")
"""Backends that hold all scores of a call at a time."""

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
        for name in self.backends:
            if name not in BACKENDS:
                raise UsageError(f"--backends {name[:40]!r} is not among {', '.join(BACKENDS)}")
        if self.decode and self.directions != ("forward",):
            chosen = ",".join(self.directions)
            raise UsageError(f"--direction {chosen} does not go with --decode: a decoding step has no backward pass")
        for n_heads, n_kv_heads, d_head in product(self.n_heads, self.n_kv_heads or (None,), self.d_head or (64,)):
            _require_sizes(n_heads, n_kv_heads, d_head)
        for name, values in (("batch", self.batch), ("lengths", self.lengths)):
            if not all(1 <= value <= MAX_LENGTH for value in values):
                raise UsageError(f"--{name} {','.join(map(str, values))}: each is a number from 1 to {MAX_LENGTH}")
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
        batches = full.batch or ((1,) if full.decode else (None,))
        sizes: list[Workload] = []
        for dtype, direction, d_head in product(full.dtypes, full.directions, full.d_head):
            for n_heads in full.n_heads or (max(1, width // d_head),):
                for n_kv_heads in full.n_kv_heads or (n_heads,):
                    _require_sizes(n_heads, n_kv_heads, d_head)
                    sizes += [
                        Workload(
                            batch or max(1, n_tokens // length), n_heads, n_kv_heads, d_head,
                            1 if full.decode else length, length, dtype, full.causal, direction,
                        )
                        for batch, length in product(batches, full.lengths)
                    ]  # fmt: skip
        return tuple(dict.fromkeys(sizes))


def _require_sizes(n_heads: int, n_kv_heads: int | None, d_head: int) -> None:
    """Raises `UsageError` for heads and widths that contradict each other."""
    Config(d_model=MAX_WIDTH, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head).resolved()


# ---------------------------------------------------------------------------------------------------------------- cost


_PASSES = {"forward": 1, "backward": 1, "both": 2}
"""Passes of a projection: only the input's gradient is computed, with one product of the forward size."""


def expected_flops(backend: str, workload: Workload) -> int:
    """The operations of the products of attention, and of the four projections if the backend has them."""
    if backend not in LAYERS:
        return workload.attention_flops
    width = workload.n_heads * workload.d_head
    rows = workload.batch * (2 * workload.q_len + 2 * workload.k_len)
    return workload.attention_flops + 2 * rows * width * width * _PASSES[workload.direction]


def expected_moved_bytes(backend: str, workload: Workload) -> int:
    """The least bytes to move. Attention: q and z for every head, k and v for every kv head. A layer: input, output, and
    weights of the projections, and a returned pattern, which is also read for its gradient."""
    w = workload
    if backend not in LAYERS:
        numbers = 2 * w.batch * (w.n_heads * w.q_len + w.n_kv_heads * w.k_len) * w.d_head
        passes = {"forward": 1, "backward": 2, "both": 3}  # backward reads forward's inputs and outputs too
        return numbers * ITEM_BYTES[w.dtype] * passes[w.direction]
    width = w.n_heads * w.d_head
    numbers = 2 * w.batch * w.q_len * width + 4 * width * width
    numbers += w.batch * w.n_heads * w.q_len * w.k_len * (backend == RETURNS_PATTERN)
    return numbers * ITEM_BYTES[w.dtype] * _PASSES[w.direction]


def least_bytes(backend: str, workload: Workload) -> int:
    """Roughly the memory that a call needs: its inputs, its results, and the scores that it holds at a time: the scores and
    the pattern, backward also the gradients."""
    n_matrices = (2 if workload.direction == "forward" else 3) if backend in _HOLDS_SCORES else 0
    scores = workload.batch * workload.n_heads * workload.q_len * workload.k_len * max(ITEM_BYTES[workload.dtype], 4)
    return 2 * _PASSES[workload.direction] * workload.input_bytes + n_matrices * scores
