"""The layer around `attend`: positions, projections, heads, output. A trainable module, made of
functions that can be read alone. Its weights become bytes and come back, with a probe: what the
layer answers to a fixed input, where a transposed square matrix has the right shape, but not the
right answer.

Sinusoidal and learned positions are added to the rows before the layer; rotary ones turn queries
and keys; ALiBi is an additive bias of the scores. Places are whole numbers, one per row: 0 is the
first token of a text.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.safetensors import METADATA_KEY, TensorFile
from mhacli.record.sites import WAVES_AT_ONCE, alibi_slopes
from mhacli.record.weights_file import (
    EMBEDDING,
    FORMAT,
    POSITION_EMBEDDING,
    RUN_CHOICES,
    Probe,
    saved_metadata,
)
from mhacli.settings import ROPE, Config, Init, LayerPositions

from .core import (
    Allowed,
    HeadOutputs,
    Keys,
    Matrices,
    Queries,
    ScoreBias,
    Tap,
    Values,
    attention_pattern,
    is_finite,
    no_tap,
    visible_cells_of,
    weighted_sum,
)
from .scores import exact_dtype

TokenVectors = Float[Tensor, "batch query d_input"]
KeyRows = Float[Tensor, "batch key d_input"]
Places = Int[Tensor, "*#batch length"]
"""The place of each row in its text, 0 first: `[length]` where all sequences of the batch agree,
else `[batch, length]`."""
BothPlaces = tuple[Places, Int[Tensor, "*#batch key"]]
"""The places of queries and of keys."""


class MultiHeadAttention(nn.Module):
    """Multi-head attention whose every intermediate tensor can be observed, and which can be
    trained.

    Parameters are named as on disk: `q_proj.weight [n_heads·d_head, d_input]`, `k_proj.weight
    [n_kv_heads·d_head, d_input]`, `v_proj.weight [n_kv_heads·d_v, d_input]`, `o_proj.weight
    [d_model, n_heads·d_v]`, and a `.bias` of each. `d_head` defaults to `d_model / n_heads`, `d_v`
    to `d_head`, `n_kv_heads` to `n_heads`, `d_input` to `d_model`. Without `out_proj` the result is
    the heads side by side. `positions` are those that act inside the layer, `rope`,
    `rope-interleaved` and `alibi`; others are added to the rows before it. `dropout` acts on the
    pattern, in training mode only; its randomness, and that of the initial weights, comes from
    `generator` (None: torch's own). Raises `UsageError` for sizes that do not fit together.

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
        d_input: int | None = None,
        bias: bool = True,
        out_proj: bool = True,
        positions: LayerPositions = "none",
        rope_theta: float = 10_000.0,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        init: Init = "xavier",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        sizes = Config(
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            d_v=d_v,
            d_input=d_input,
            positions=positions,
            rope_theta=rope_theta,
            scale=scale,
            softcap=softcap,
            dropout=dropout,
            init=init,
        ).resolved()
        self.n_heads, self.n_kv_heads = n_heads, sizes.n_kv_heads or n_heads
        self.d_head, self.d_v = sizes.d_head or 0, sizes.d_v or 0
        self.scale = sizes.scale
        self.softcap = softcap
        self.dropout = dropout
        self.generator = generator
        if sizes.layer_positions != positions:
            where = "added to the rows before the layer, and do not act inside it"
            raise UsageError(f"positions {positions!r} are {where}")
        self.positions, self.rope_theta = positions, rope_theta
        width = sizes.d_input or d_model
        new = partial(new_projection, bias=bias, init=init, generator=generator)
        self.q_proj = new(width, n_heads * self.d_head)
        self.k_proj = new(width, self.n_kv_heads * self.d_head)
        self.v_proj = new(width, self.n_kv_heads * self.d_v)
        self.o_proj = new(n_heads * self.d_v, d_model) if out_proj else None

    def forward(
        self,
        query: TokenVectors,
        key: KeyRows | None = None,
        value: KeyRows | None = None,
        *,
        allowed: Allowed | None = None,
        bias: ScoreBias | None = None,
        places: Places | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Tensor, "batch query d_out"], Matrices]:
        """`(out, pattern)`: the result, and the weights before dropout. `key` defaults to `query`,
        `value` to `key`.

        `allowed` and `bias` as for `attend`. `places` are the queries' places for rotary positions
        and ALiBi, by default 0, 1, 2, …; keys that are not the queries count from 0.
        """
        tap = no_tap if tap is None else tap
        at = places_of(query, key, places)
        q, k, v = self.rotated(*self.projected(query, key, value, tap=tap), at, tap)
        z, pattern = self.attended(q, k, v, at, allowed=allowed, bias=bias, tap=tap)
        return self.joined(z, tap), pattern

    def decode(
        self,
        new: TokenVectors,
        past: KvCache,
        *,
        allowed: Allowed | None = None,
        bias: ScoreBias | None = None,
        places: Places | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Tensor, "batch query d_out"], Matrices, KvCache]:
        """`(out, pattern, past)` for the rows of new tokens, whose queries read all keys and values
        kept so far.

        Only the new rows are projected. `places` turn new queries and keys; ALiBi counts rows,
        which is the same wherever places count from the same beginning. `allowed` is called with
        the new rows as queries 0, 1, … and all tokens as keys: `masks.causal(past.length)`, or
        `masks.shifted(mask, past.length)` for any other. One new token needs no causal mask: there
        is nothing later. `places` default to those that follow the past. Source: Shazeer 2019,
        "Fast Transformer Decoding", section 2.4.
        """
        tap = no_tap if tap is None else tap
        rows = torch.arange(past.length + new.shape[1], device=new.device)
        new_rows = rows[past.length :]
        places = new_rows if places is None else places
        q, k, v = self.rotated(*self.projected(new, tap=tap), (places, places), tap)
        past = past.extended(k, v)
        z, pattern = self.attended(
            q, past.k, past.v, (new_rows, rows), allowed=allowed, bias=bias, tap=tap
        )
        return self.joined(z, tap), pattern, past

    def projected(
        self,
        query: TokenVectors,
        key: KeyRows | None = None,
        value: KeyRows | None = None,
        *,
        tap: Tap = no_tap,
    ) -> tuple[Queries, Keys, Values]:
        """Queries, keys and values by head. The arguments as for `forward`. Raises `UsageError`
        for rows of another width.
        """
        key = query if key is None else key
        value = key if value is None else value

        def heads_of(name: str, rows: Tensor, projection: nn.Linear, n_heads: int) -> Tensor:
            if rows.ndim != 3 or rows.shape[-1] != projection.in_features:
                argument = {"q": "query", "k": "key", "v": "value"}[name]
                axes = f"[batch, {argument}, d_input], with d_input {projection.in_features}"
                raise UsageError(f"the shape {[*rows.shape]} of {argument} is not {axes}")
            flat = projection(rows)
            tap(f"{name}_proj", flat)
            heads = split_heads(flat, n_heads)
            tap(name, heads)
            return heads

        return (
            heads_of("q", query, self.q_proj, self.n_heads),
            heads_of("k", key, self.k_proj, self.n_kv_heads),
            heads_of("v", value, self.v_proj, self.n_kv_heads),
        )

    def rotated(
        self, q: Queries, k: Keys, v: Values, at: BothPlaces, tap: Tap = no_tap
    ) -> tuple[Queries, Keys, Values]:
        """Queries, and keys, turned by their places where positions are rotary, else as they are:
        all that attention reads.
        """
        if self.positions in ROPE:
            turn = partial(
                rotate, theta=self.rope_theta, interleaved=self.positions == "rope-interleaved"
            )
            q, k = turn(q, at[0]), turn(k, at[1])
            tap("q_rot", q)
            tap("k_rot", k)
        return q, k, v

    def attended(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        at: BothPlaces,
        *,
        allowed: Allowed | None,
        bias: ScoreBias | None,
        tap: Tap,
    ) -> tuple[HeadOutputs, Matrices]:
        """`attend` with this layer's scale, with the cost of distance where positions are ALiBi,
        and with dropout between its halves in training: `(z, pattern)`. `at` are the places of
        queries and keys; only the bias may forbid a cell, with −∞.

        Source of the dropout: Srivastava et al. 2014, "Dropout", section 10 (inverted form).
        """
        added, keep = None, visible_cells_of(q, k, allowed, bias)
        if self.positions == "alibi":
            wide = torch.promote_types(q.dtype, torch.float32)
            added = alibi(alibi_slopes(self.n_heads), *at, dtype=wide)
            tap("alibi", added)
        if bias is not None:
            tap("bias", bias.expand(*q.shape[:3], k.shape[2]))
            added = bias if added is None else bias + added
        pattern = attention_pattern(
            q, k, keep=keep, bias=added, scale=self.scale, softcap=self.softcap, tap=tap
        )
        weights = pattern
        if self.training and self.dropout:
            draw = torch.rand(pattern.shape, generator=self.generator, device=pattern.device)
            stays = draw >= self.dropout
            weights = pattern * stays / (1 - self.dropout)  # keeps the expected sum
            tap("dropped", weights)
        return weighted_sum(weights, v, keep=keep, tap=tap), pattern

    def joined(self, z: HeadOutputs, tap: Tap) -> Float[Tensor, "batch query d_out"]:
        """The heads side by side, and through the output projection where there is one."""
        concat = merge_heads(z)
        tap("concat", concat)
        out: Tensor = concat if self.o_proj is None else self.o_proj(concat)
        tap("out", out)
        return out


def split_heads(
    rows: Float[Tensor, "batch length width"], n_heads: int
) -> Float[Tensor, "batch {n_heads} length width//{n_heads}"]:
    """Each head's own columns: first cut the width, then move the head axis before the length. A
    view, no copy.
    """
    batch, length, width = rows.shape
    return rows.view(batch, length, n_heads, width // n_heads).transpose(1, 2)


def merge_heads(z: HeadOutputs) -> Float[Tensor, "batch query head*d_v"]:
    """The heads side by side again: the reverse of `split_heads`. A copy, unless there is one head
    or one query.
    """
    return z.transpose(1, 2).flatten(2)


def places_of(query: TokenVectors, key: KeyRows | None, places: Places | None) -> BothPlaces:
    """The places of queries, by default 0, 1, 2, …, and of keys, which count from 0 where they are
    not the queries.
    """
    q_places = torch.arange(query.shape[1], device=query.device) if places is None else places
    if key is None or key is query:
        return q_places, q_places
    return q_places, torch.arange(key.shape[1], device=key.device)


@torch.no_grad()
def new_projection(
    d_in: int, d_out: int, *, bias: bool, init: Init, generator: torch.Generator | None
) -> nn.Linear:
    """A projection with random numbers, drawn in float64 and rounded once.

    `xavier`: uniform within `±√(6 / (d_in + d_out))`, biases 0 (Glorot and Bengio 2010, equation
    16). `normal`: deviation 0.02, biases 0 (Radford et al. 2018, GPT, section 4.1). `uniform`:
    weights and biases within `±1/√d_in`, as `torch.nn.Linear`.
    """
    # on another device it would draw numbers from torch's global generator
    linear = nn.Linear(d_in, d_out, bias=bias, device="meta")
    if init == "normal":
        weight = 0.02 * torch.randn(d_out, d_in, generator=generator, dtype=torch.float64)
    else:
        bound = (6 / (d_in + d_out)) ** 0.5 if init == "xavier" else d_in**-0.5
        weight = _uniform((d_out, d_in), bound, generator)
    linear.weight = nn.Parameter(weight.to(torch.get_default_dtype()))
    if bias:
        numbers = torch.zeros(d_out)
        if init == "uniform":
            numbers = _uniform((d_out,), d_in**-0.5, generator)
        linear.bias = nn.Parameter(numbers.to(torch.get_default_dtype()))
    return linear


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator | None) -> Tensor:
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound


# ------------------------------------------------------------------------------------------- routes


def fused(
    layer: MultiHeadAttention, x: TokenVectors, context: KeyRows | None, *, tap: Tap
) -> list[Tensor]:
    """Queries, keys and values by one product (keys and values, where they come from a context),
    then cut.
    """
    q, kv = layer.q_proj, [layer.k_proj, layer.v_proj]
    products = [("qkv", x, [q, *kv])]
    if context is not None:
        products = [("q_proj", x, [q]), ("kv", context, kv)]
    flat: list[Tensor] = []
    for name, rows, projections in products:
        weight, bias = torch.cat([each.weight for each in projections]), None
        if q.bias is not None:  # as all have one, or none
            bias = torch.cat([each.bias for each in projections])
        joined = linear(rows, weight, bias)
        tap(name, joined)
        flat += joined.split([projection.out_features for projection in projections], dim=-1)
    counts = layer.n_heads, layer.n_kv_heads, layer.n_kv_heads
    heads = [split_heads(rows, n) for rows, n in zip(flat, counts, strict=True)]
    for name, tensor in zip("qkv", heads, strict=True):
        tap(name, tensor)
    return heads


def per_head(
    layer: MultiHeadAttention, x: TokenVectors, context: KeyRows | None, *, tap: Tap
) -> list[Tensor]:
    """Queries, keys and values by a small weight per head, all heads in one batched product."""
    heads, keys = [], x if context is None else context
    for name, rows, projection, n_heads in (
        ("q_per_head", x, layer.q_proj, layer.n_heads),
        ("k_per_head", keys, layer.k_proj, layer.n_kv_heads),
        ("v_per_head", keys, layer.v_proj, layer.n_kv_heads),
    ):
        weight = projection.weight.unflatten(0, (n_heads, -1)).mT  # [head, d_input, d]
        tensor: Tensor = rows[:, None] @ weight
        if projection.bias is not None:
            tensor = tensor + projection.bias.unflatten(0, (n_heads, 1, -1))
        tap(name, tensor)
        heads.append(tensor)
    return heads


ROUTES: Mapping[str, Callable[..., Sequence[Tensor]]] = {
    "separate": MultiHeadAttention.projected,
    "fused": fused,
    "per-head": per_head,
}
"""The three ways in which people write the projections. The tensors on the way differ; the result
must not."""


# ------------------------------------------------------------------------------------- the KV cache


class KvCache(NamedTuple):
    """The keys and values of the tokens so far, at the beginning of two buffers.

    A step writes its tokens into the buffers. Where they do not fit, they are copied, with all
    before them, into new buffers without further room. States share their buffers: extending the
    same state twice overwrites what the first extension wrote, and gradients do not flow back
    through several steps. So a layer is trained with a cache without room.
    """

    k_buffer: Float[Tensor, "batch kv_head room d_head"]
    v_buffer: Float[Tensor, "batch kv_head room d_v"]
    length: int

    @staticmethod
    def empty(layer: MultiHeadAttention, batch: int, *, room: int = 0) -> KvCache:
        """No tokens, and room for some, on the layer's device and in its dtype."""
        shape, like = (batch, layer.n_kv_heads, room), layer.k_proj.weight
        return KvCache(like.new_zeros(*shape, layer.d_head), like.new_zeros(*shape, layer.d_v), 0)

    @property
    def k(self) -> Float[Tensor, "batch kv_head length d_head"]:
        """The keys so far: a view."""
        return self.k_buffer[:, :, : self.length]

    @property
    def v(self) -> Float[Tensor, "batch kv_head length d_v"]:
        """The values so far: a view."""
        return self.v_buffer[:, :, : self.length]

    def extended(
        self,
        k: Float[Tensor, "batch kv_head new d_head"],
        v: Float[Tensor, "batch kv_head new d_v"],
    ) -> KvCache:
        """The state with new tokens behind it."""
        end = self.length + k.shape[2]
        if end > self.k_buffer.shape[2]:
            return KvCache(torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2), end)
        self.k_buffer[:, :, self.length : end] = k
        self.v_buffer[:, :, self.length : end] = v
        return self._replace(length=end)


# ---------------------------------------------------------------------------------------- positions


def rates(width: int, theta: float, device: torch.device) -> Float[Tensor, " pair"]:
    """The radians by which each pair of columns turns from one place to the next:
    `theta^(−2j/width)`, in float64 where the device has it.
    """
    return theta ** -(torch.arange(0, width, 2, dtype=exact_dtype(device), device=device) / width)


def sinusoidal(
    places: Int[Tensor, "*rows"], width: int, *, dtype: torch.dtype
) -> Float[Tensor, "*rows width"]:
    """Waves of growing length, one pair of columns each: `p[i, 2j] = sin(i / 10000^(2j/width))`,
    `p[i, 2j+1]` its cos.

    Computed in float64 where the device has it, and rounded once. An odd `width` ends with a sine.
    Source: Vaswani et al. 2017, section 3.5, whose d_model is the width.

    >>> sinusoidal(torch.tensor([1]), 2, dtype=torch.float64)[0].tolist()  # sin(1), cos(1)
    [0.8414709848078965, 0.5403023058681398]
    """
    rate = rates(width, 10_000.0, places.device)

    def waves(part: Tensor) -> Tensor:
        angle = part[:, None] * rate
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width].to(dtype)

    # a long text at once would take gigabytes
    parts = places.flatten().split(max(1, WAVES_AT_ONCE // width))
    whole: Tensor = torch.cat([waves(part) for part in parts]).unflatten(0, places.shape)
    return whole


def rotate(
    heads: Float[Tensor, "batch head length d_head"],
    places: Int[Tensor, "*#batch length"],
    *,
    theta: float = 10_000.0,
    interleaved: bool = False,
) -> Float[Tensor, "batch head length d_head"]:
    """Each pair of columns turned by `place · theta^(−2j/d_head)`, so that dot products depend on
    distances alone.

    Pair `j` is columns `j` and `j + d_head/2` (half-rotation, as Llama and GPT-NeoX pair them), or
    `2j` and `2j + 1` (`interleaved`, the paper's own). Weights made for one pairing are wrong under
    the other. Cosines and sines are computed in float64 where the device has it; 16-bit numbers are
    turned in float32. Source: Su et al. 2021, "RoFormer", equation 34.

    The row (1, 0) at place 1 is turned by one radian:

    >>> turn = rotate(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([1]))[0, 0, 0]
    >>> [round(x, 4) for x in turn.tolist()]  # cos 1, sin 1
    [0.5403, 0.8415]
    """
    angle = places[..., None] * rates(heads.shape[-1], theta, places.device)
    if places.ndim == 2:
        angle = angle[:, None]  # the same for every head
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    cos, sin = angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return joined.to(heads.dtype)


def alibi(
    slopes: Sequence[float],
    q_places: Int[Tensor, "*#batch query"],
    k_places: Int[Tensor, "*#batch key"],
    *,
    dtype: torch.dtype,
) -> Float[Tensor, "*#batch head query key"]:
    """What distance costs: `−m[h] · |i − j|`, to be added to the scores. `m` are the slopes of
    `alibi_slopes`.

    The paper's attention is causal; here a later key costs as much as an earlier one. Source: Press
    et al. 2021, "Train Short, Test Long", section 3.

    >>> alibi((0.25,), torch.tensor([2]), torch.arange(3), dtype=torch.float64)[0, 0].tolist()
    [-0.5, -0.25, -0.0]
    """
    of_heads = torch.tensor(slopes, dtype=dtype, device=q_places.device)[:, None, None]
    distances = (q_places[..., :, None] - k_places[..., None, :]).abs().to(dtype)
    return -of_heads * distances[..., None, :, :]


# ---------------------------------------------------------------------------------- weights on disk

PROBE_TOLERANCE = 1e-6
"""Largest difference from a stored probe, relative to its largest number: its rounding to 9 digits,
with room."""

_PROBED = {"embed": EMBEDDING, "embed_positions": POSITION_EMBEDDING, "out": "o_proj.weight"}
"""The weight of each output of the probe, if it has another name."""
_POSITION_STREAM = 1 << 62
"""Added to the seed for the table of learned positions."""


class LayerWeights(NamedTuple):
    """An embedding, the attention that reads it, and the table of learned positions where there is
    one.
    """

    embedding: Float[Tensor, "vocabulary d_input"]
    attention: MultiHeadAttention
    position_table: Float[Tensor, "place d_input"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every weight by its name on disk."""
        tables = {EMBEDDING: self.embedding}
        if self.position_table is not None:
            tables[POSITION_EMBEDDING] = self.position_table
        return tables | self.attention.state_dict()  # which has no gradients

    def to(self, device: torch.device) -> LayerWeights:
        """The same on a device."""
        table = None if self.position_table is None else self.position_table.to(device)
        return LayerWeights(self.embedding.to(device), self.attention.to(device), table)


def new_layer(config: Config, n_tokens: int) -> LayerWeights:
    """The layer that a resolved config describes, with random weights from its seed, on the CPU.

    The embedding is drawn last, so that other words leave everything else alone; learned positions
    have a stream of their own, so that other positions do.
    """
    generator, dtype = torch.Generator().manual_seed(config.seed), getattr(torch, config.dtype)
    attention = new_attention(config, generator)
    # as `torch.nn.Embedding` begins, rounded once
    normal = partial(torch.randn, dtype=torch.float64)
    width, table = config.d_input or config.d_model, None
    if config.positions == "learned":
        own_stream = torch.Generator().manual_seed((config.seed + _POSITION_STREAM) % 2**64)
        table = normal(config.max_positions, width, generator=own_stream).to(dtype)
    return LayerWeights(normal(n_tokens, width, generator=generator).to(dtype), attention, table)


def new_attention(config: Config, generator: torch.Generator | None = None) -> MultiHeadAttention:
    """The attention that a resolved config describes, with random weights, in its dtype, on the
    CPU, not in training.
    """
    attention = MultiHeadAttention(
        config.d_model,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.d_head,
        d_v=config.d_v,
        d_input=config.d_input,
        bias=config.bias,
        out_proj=config.out_proj,
        positions=config.layer_positions,
        rope_theta=config.rope_theta,
        scale=config.scale,
        softcap=config.softcap,
        dropout=config.dropout,
        init=config.init,
        generator=generator,
    )
    return attention.to(getattr(torch, config.dtype)).train(config.train)


def to_bytes(layer: LayerWeights, config: Config, vocabulary: tuple[str, ...]) -> bytes:
    """The file's content: the same layer gives the same bytes. Raises `MhaError` for weights that
    are not finite.
    """
    from safetensors.torch import save

    tensors = layer.tensors()
    require_finite_weights(tensors)
    choices = {name: value for name, value in asdict(config).items() if name not in RUN_CHOICES}
    metadata = {
        "format": FORMAT,
        "config": choices,
        "vocabulary": vocabulary,
        "tokenizer": config.tokenizer,
        "probe": probe(layer, config),
    }
    header = json.dumps(metadata, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return save(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        metadata={METADATA_KEY: header},
    )


def from_file(
    file: TensorFile, config: Config, n_tokens: int, *, allow_nonfinite: bool
) -> LayerWeights:
    """The layer in a checked file, in the dtype of its config; without vectors of tokens in it,
    those of `n_tokens` are random.

    Raises `MhaError` for numbers that are not finite, and, with exit code 3, when the stored probe
    says that the weights are not what was saved.
    """
    from safetensors.torch import load

    tensors, saved = load(file.data), saved_metadata(file.path, file.metadata)
    if not allow_nonfinite:
        require_finite_weights(tensors, file.path)
    table = tensors.pop(POSITION_EMBEDDING, None)
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is None:
        embedding = new_layer(config, n_tokens).embedding
    attention = new_attention(config, torch.Generator()).double()  # holds every saved dtype exactly
    attention.load_state_dict(tensors)
    if saved is not None and not allow_nonfinite:
        outputs = probe(LayerWeights(embedding, attention, table), saved.config.resolved())
        for name, a in outputs.items():
            b, weight = saved.probe.get(name, ()), _PROBED.get(name, f"{name}_proj.weight")
            differences = [math.inf]
            if len(a) == len(b):
                differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
            if max(differences, default=0.0) > PROBE_TOLERANCE * max([1e-30, *map(abs, b)]):
                fault = (
                    f"{weight} does not give the stored probe outputs: they differ by"
                    f" {max(differences):.3g}"
                )
                raise MhaError(
                    f"{file.path}: {fault}",
                    hint=(
                        "the weights were changed after saving; a transposed square matrix"
                        " causes this"
                    ),
                    code="probe-mismatch",
                    exit_code=EXIT_CHECK,
                    path=file.path,
                )
    dtype = getattr(torch, config.dtype)
    table = table.to(dtype) if table is not None and config.positions == "learned" else None
    return LayerWeights(embedding.to(dtype), attention.to(dtype), table)


def require_finite_weights(tensors: Mapping[str, Tensor], path: str | None = None) -> None:
    """Raises `MhaError` with the count and the first place of NaN or Inf in the first tensor, of a
    file, that has any.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            bad, hint = ~tensor.isfinite(), "--allow-nonfinite continues anyway"
            fault = (
                f"{name} has {int(bad.sum())} NaN or Inf, the first at {bad.nonzero()[0].tolist()}"
            )
            raise MhaError(
                f"{path or 'the weights'}: {fault}", hint=hint, code="not-finite", path=path
            )


@torch.no_grad()
def probe(layer: LayerWeights, config: Config) -> Probe:
    """The layer's answers to the probe input, in float64 on the CPU: three rows of the embedding
    plus fixed waves.

    `config` is the one that the weights are saved with: a run may look at them with another scale,
    or other positions.

    One row of each projection and of the output, and a blend of all rows of each embedding, are
    enough to notice any exchange of rows or columns.
    """
    embedding = layer.embedding.detach().double().cpu()
    rows = embedding[[0, len(embedding) // 2, -1]] if len(embedding) else 0.0
    waves = torch.sin(1.0 + torch.arange(3 * embedding.shape[1], dtype=torch.float64)).view(3, -1)
    seen: dict[str, Tensor] = {}
    attention = copy.deepcopy(layer.attention).double().cpu().eval()
    attention.scale, attention.softcap = config.scale, config.softcap
    attention.positions, attention.rope_theta = config.layer_positions, config.rope_theta
    attention((rows + waves)[None], tap=lambda site, tensor, **_: seen.update({site: tensor}))
    table = torch.empty(0)
    if layer.position_table is not None:
        table = _blend(layer.position_table.detach().double().cpu())
    answers = {"embed": _blend(embedding), "embed_positions": table}
    answers |= {n: seen[f"{n}_proj"][0, 1] for n in "qkv"} | {"out": seen["out"][0, 2]}
    return {name: tuple(float(f"{x:.9g}") for x in row.tolist()) for name, row in answers.items()}


def _blend(table: Float[Tensor, "rows width"]) -> Float[Tensor, " width"]:
    return torch.sin(1.0 + torch.arange(len(table), dtype=torch.float64)) @ table
