"""Statistics of a pattern: numbers that say what a head does, and where it looks most."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Pattern = Float[Tensor, "batch head query key"]
_BLOCK_CELLS = 1 << 22


def row_entropy(pattern: Pattern) -> Float[Tensor, "batch head query"]:
    """Entropy of each row, `−Σ p ln p`, in nats: 0 when one key takes all, `ln n` for n equal shares. float64.

    Source: Shannon 1948, theorem 2. A row of zeros (no allowed key) has entropy 0.

    >>> row_entropy(torch.tensor([[[[0.5, 0.5, 0.0]]]]))[0, 0].tolist()
    [0.6931471805599453]
    """
    batch, head, _, key = pattern.shape
    block = max(1, _BLOCK_CELLS // (batch * head * key))  # float64 copies of a whole large pattern would not fit
    return torch.cat([torch.special.entr(rows.double()).sum(dim=-1) for rows in pattern.split(block, dim=2)], dim=2)


def strongest_key(pattern: Pattern) -> Int[Tensor, "batch head query"]:
    """The key with the largest share, the first of equals; −1 for a row of zeros."""
    share, key = pattern.max(dim=-1)
    return torch.where(share > 0, key, -1)


def entropy_share(
    entropy: Float[Tensor, "batch head query"],
    visible: Int[Tensor, "#batch #head query"],
) -> Float[Tensor, "batch head query"]:
    """Entropy divided by its largest possible value, `ln(visible keys)`: 1 is uniform. Rows with one key or none: 0."""
    largest = visible.double().log()
    return torch.where(visible > 1, entropy / largest, 0.0)


def mean_over(
    per_query: Float[Tensor, "batch head query"], queries: Bool[Tensor, "#batch #head query"]
) -> Float[Tensor, " head"]:
    """The mean over the queries marked True, per head; NaN where there is none."""
    weight = queries.double().expand(per_query.shape)
    return (per_query * weight).sum(dim=(0, 2)) / weight.sum(dim=(0, 2))
