"""Position schemes: how a token's place reaches the numbers."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def sinusoidal(
    length: int, d_model: int, *, dtype: torch.dtype, device: torch.device | str
) -> Float[Tensor, "query d_model"]:
    """Waves of growing length, one pair of columns each: `p[i, 2j] = sin(i / 10000^(2j/d_model))`, `p[i, 2j+1]` its cos.

    Computed in float64 and rounded once. An odd `d_model` ends with a sine. Source: Vaswani et al. 2017, section 3.5.

    >>> sinusoidal(2, 2, dtype=torch.float64, device="cpu")[1].tolist()  # sin(1), cos(1)
    [0.8414709848078965, 0.5403023058681398]
    """
    column = torch.arange(d_model, dtype=torch.float64)
    rate = 10000.0 ** -(2 * (column // 2) / d_model)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * rate
    waves = torch.where(column % 2 == 0, angle.sin(), angle.cos())
    return waves.to(device=device, dtype=dtype)
