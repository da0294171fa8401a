"""The layer around `attend`: projections, heads, output. A trainable module, made of functions that can be read alone."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mhacli.attention.core import Allowed, Tap, attention_pattern, no_tap, visible_cells, weighted_sum
from mhacli.attention.positions import sinusoidal
from mhacli.config import Config, Init

Rows = Float[Tensor, "batch query d_model"]
KeyRows = Float[Tensor, "batch key d_model"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention whose every intermediate tensor can be observed, and which can be trained.

    Parameters are named as on disk: `q_proj.weight [n_heads·d_head, d_model]`, `k_proj.weight [n_kv_heads·d_head, d_model]`,
    `v_proj.weight [n_kv_heads·d_v, d_model]`, `o_proj.weight [d_model, n_heads·d_v]`, and a `.bias` of each. `d_head`
    defaults to `d_model / n_heads`, `d_v` to `d_head`, `n_kv_heads` to `n_heads`. Without `out_proj` the result is the
    heads side by side. `dropout` acts on the pattern, in training mode only; its randomness, and that of the initial
    weights, comes from `generator` (None: torch's own). Raises `UsageError` for sizes that do not fit together.

    Source: Vaswani et al. 2017, section 3.2.2; `d_head` is the paper's d_k.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        d_v: int | None = None,
        bias: bool = True,
        out_proj: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        init: Init = "xavier",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        sizes = Config(
            d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, d_v=d_v,
            scale=scale, softcap=softcap, dropout=dropout, init=init,
        ).resolved()  # fmt: skip
        self.n_heads, self.n_kv_heads = n_heads, sizes.n_kv_heads or n_heads
        self.d_head, self.d_v = sizes.d_head or 0, sizes.d_v or 0
        self.scale, self.softcap, self.dropout, self.generator = sizes.scale, softcap, dropout, generator
        self.q_proj = _linear(d_model, n_heads * self.d_head, bias)
        self.k_proj = _linear(d_model, self.n_kv_heads * self.d_head, bias)
        self.v_proj = _linear(d_model, self.n_kv_heads * self.d_v, bias)
        self.o_proj = _linear(n_heads * self.d_v, d_model, bias) if out_proj else None
        self.reset_parameters(init, generator)

    def reset_parameters(self, init: Init, generator: torch.Generator | None) -> None:
        """New random weights by one of the schemes of `initialise`."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            if linear is not None:
                initialise(linear, init, generator)

    def forward(
        self,
        query: Rows,
        key: KeyRows | None = None,
        value: KeyRows | None = None,
        *,
        allowed: Allowed | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Tensor, "batch query d_out"], Float[Tensor, "batch head query key"]]:
        """`(out, pattern)`: the result, and the shares before dropout. `key` defaults to `query`, `value` to `key`."""
        tap = no_tap if tap is None else tap
        key = query if key is None else key
        value = key if value is None else value
        q = self._projected("q", self.q_proj, query, self.n_heads, tap)
        k = self._projected("k", self.k_proj, key, self.n_kv_heads, tap)
        v = self._projected("v", self.v_proj, value, self.n_kv_heads, tap)
        z, pattern = self.attend_heads(q, k, v, allowed=allowed, tap=tap)
        concat = merge_heads(z)
        tap("concat", concat)
        out = concat if self.o_proj is None else self.o_proj(concat)
        tap("out", out)
        return out, pattern

    def attend_heads(
        self, q: Tensor, k: Tensor, v: Tensor, *, allowed: Allowed | None, tap: Tap
    ) -> tuple[Float[Tensor, "batch head query d_v"], Float[Tensor, "batch head query key"]]:
        """`attend` with this layer's scale, and with dropout between its halves in training: `(z, pattern)`."""
        keep = visible_cells(allowed, q, k)
        pattern = attention_pattern(q, k, keep=keep, scale=self.scale, softcap=self.softcap, tap=tap)
        shares = pattern
        if self.training and self.dropout:
            shares = drop(pattern, self.dropout, self.generator)
            tap("dropped", shares)
        return weighted_sum(shares, v, keep=keep, tap=tap), pattern

    def _projected(
        self,
        name: Literal["q", "k", "v"],
        proj: nn.Linear,
        rows: Float[Tensor, "batch length d_model"],
        n_heads: int,
        tap: Tap,
    ) -> Tensor:
        flat = proj(rows)
        tap(f"{name}_proj", flat)
        heads = split_heads(flat, n_heads)
        tap(name, heads)
        return heads


def split_heads(
    rows: Float[Tensor, "batch length width"], n_heads: int
) -> Float[Tensor, "batch {n_heads} length width//{n_heads}"]:
    """Each head's own columns: first cut the width, then move the head axis before the length. A view, no copy."""
    batch, length, width = rows.shape
    return rows.view(batch, length, n_heads, width // n_heads).transpose(1, 2)


def merge_heads(z: Float[Tensor, "batch head query d_v"]) -> Float[Tensor, "batch query head*d_v"]:
    """The heads side by side again: the reverse of `split_heads`. A copy, unless there is one head or one query."""
    return z.transpose(1, 2).flatten(2)


def drop(pattern: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    """Each share set to 0 with probability `p`, the others divided by `1 − p` to keep the expected sum.

    Source: Srivastava et al. 2014, "Dropout", section 10 (inverted form).
    """
    keep = torch.rand(pattern.shape, generator=generator, device=pattern.device) >= p
    return pattern * keep / (1 - p)


def embed_tokens(
    ids: Int[Tensor, "batch query"],
    embedding: Float[Tensor, "vocabulary d_model"],
    *,
    positions: str,
    tap: Tap = no_tap,
) -> Rows:
    """Rows of the embedding for ids, plus where each token stands. Padding (id −1) gets zeros. Taps to `x`."""
    padding = (ids < 0)[..., None]
    tap("ids", ids)
    x = embedding[ids.clamp(min=0)].masked_fill(padding, 0.0)
    tap("embed", x)
    if positions == "sinusoidal":
        p = sinusoidal(ids.shape[1], embedding.shape[1], dtype=x.dtype, device=x.device)
        tap("positions", p)
        x = (x + p).masked_fill(padding, 0.0)
    tap("x", x)
    return x


def new_embedding(
    n_tokens: int, d_model: int, generator: torch.Generator | None
) -> Float[Tensor, "vocabulary d_model"]:
    """Rows of independent normal numbers with deviation 1, as `torch.nn.Embedding` begins. float64, for rounding once."""
    return torch.randn(n_tokens, d_model, generator=generator, dtype=torch.float64)


@torch.no_grad()
def initialise(linear: nn.Linear, init: Init, generator: torch.Generator | None) -> None:
    """New random numbers in a projection, drawn in float64 and rounded once.

    `xavier`: uniform within `±√(6 / (d_in + d_out))`, biases 0 (Glorot and Bengio 2010, equation 16). `normal`: deviation
    0.02, biases 0 (Radford et al. 2018, GPT, section 4.1). `uniform`: weights and biases within `±1/√d_in`, as `torch.nn.Linear`.
    """
    d_out, d_in = linear.weight.shape
    if init == "normal":
        weight = 0.02 * torch.randn(d_out, d_in, generator=generator, dtype=torch.float64)
    else:
        bound = (6 / (d_in + d_out)) ** 0.5 if init == "xavier" else d_in**-0.5
        weight = _uniform((d_out, d_in), bound, generator)
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(_uniform((d_out,), d_in**-0.5, generator) if init == "uniform" else torch.zeros(d_out))


def _linear(d_in: int, d_out: int, bias: bool) -> nn.Linear:
    """A projection without numbers yet: `nn.Linear` alone would draw some from torch's global generator."""
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, d_in, d_out, bias=bias)
    return linear


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator | None) -> Tensor:
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound
