"""Position schemes: how a token's place reaches the numbers.

Sinusoidal and learned positions are added to the rows before the layer; rotary ones turn queries and keys; ALiBi is an
additive bias of the scores. Places are whole numbers, one per row: 0 is the first token of a text.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhacli.sites import WAVES_AT_ONCE, alibi_slopes


def sinusoidal(places: Int[Tensor, "*rows"], width: int, *, dtype: torch.dtype) -> Float[Tensor, "*rows width"]:
    """Waves of growing length, one pair of columns each: `p[i, 2j] = sin(i / 10000^(2j/width))`, `p[i, 2j+1]` its cos.

    Computed in float64 where the device has it, and rounded once. An odd `width` ends with a sine. Source: Vaswani et al.
    2017, section 3.5, whose d_model is the width.

    >>> sinusoidal(torch.tensor([1]), 2, dtype=torch.float64)[0].tolist()  # sin(1), cos(1)
    [0.8414709848078965, 0.5403023058681398]
    """
    pair = torch.arange((width + 1) // 2, dtype=_finest(places), device=places.device)
    rate = 10000.0 ** -(2 * pair / width)

    def waves(part: Tensor) -> Tensor:
        angle = part[:, None] * rate
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width].to(dtype)

    parts = places.flatten().split(max(1, WAVES_AT_ONCE // width))  # a long text at once would take gigabytes
    whole: Tensor = torch.cat([waves(part) for part in parts]).unflatten(0, places.shape)
    return whole


def rotate(
    heads: Float[Tensor, "batch head length d_head"],
    places: Int[Tensor, "*#batch length"],
    *,
    theta: float = 10_000.0,
    interleaved: bool = False,
) -> Float[Tensor, "batch head length d_head"]:
    """Each pair of columns turned by `place · theta^(−2j/d_head)`, so that dot products depend on distances alone.

    Pair `j` is columns `j` and `j + d_head/2` (half-rotation, as Llama and GPT-NeoX pair them), or `2j` and `2j + 1`
    (`interleaved`, the paper's own). Weights made for one pairing are wrong under the other. Cosines and sines are
    computed in float64 where the device has it; 16-bit numbers are turned in float32. Source: Su et al. 2021, "RoFormer",
    equation 34.

    The row (1, 0) at place 1 is turned by one radian:

    >>> turn = rotate(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([1]))[0, 0, 0]
    >>> [round(x, 4) for x in turn.tolist()]  # cos 1, sin 1
    [0.5403, 0.8415]
    """
    d_head = heads.shape[-1]
    pair = torch.arange(0, d_head, 2, dtype=_finest(places), device=places.device)
    angle = places[..., None] * theta ** (-pair / d_head)
    if places.ndim == 2:
        angle = angle[:, None]  # the same for every head
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    cos, sin = angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return joined.to(heads.dtype)


def alibi(
    n_heads: int,
    q_places: Int[Tensor, "*#batch query"],
    k_places: Int[Tensor, "*#batch key"],
    *,
    dtype: torch.dtype,
) -> Float[Tensor, "*#batch {n_heads} query key"]:
    """What distance costs: `−m[h] · |i − j|`, to be added to the scores. `m` are the slopes of `alibi_slopes`.

    The paper's attention is causal; here a later key costs as much as an earlier one. Source: Press et al. 2021, "Train
    Short, Test Long", section 3.

    >>> alibi(1, torch.tensor([2]), torch.arange(3), dtype=torch.float64)[0, 0].tolist()
    [-0.0078125, -0.00390625, -0.0]
    """
    slopes = torch.tensor(alibi_slopes(n_heads), dtype=dtype, device=q_places.device)
    distance = (q_places[..., :, None] - k_places[..., None, :]).abs().to(dtype)
    return -slopes[:, None, None] * distance[..., None, :, :]


def _finest(places: Tensor) -> torch.dtype:
    """float64, but float32 on MPS, which has no other."""
    return torch.float32 if places.device.type == "mps" else torch.float64
