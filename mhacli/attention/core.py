"""Attention, by definition. Every faster way of computing it is tested against this file.

Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1, with the paper's d_k called
`d_head` here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Queries = Float[Tensor, "batch head query d_head"]
Keys = Float[Tensor, "batch kv_head key d_head"]
Values = Float[Tensor, "batch kv_head key d_v"]
HeadOutputs = Float[Tensor, "batch head query d_v"]
"""What `z` is: the weighted values of each head."""
Matrices = Float[Tensor, "batch head query key"]
"""Scores, or weights."""
PerQuery = Float[Tensor, "batch head query"]
ScoreBias = Float[Tensor, "..."]
"""What is added to scores, and broadcasts to them."""
QueryIdx = Int[Tensor, " query"]
KeyIdx = Int[Tensor, " key"]
"""The positions of keys."""
VisibleCells = Bool[Tensor, "#batch #head #query #key"]
"""True where a query may attend to a key."""
Allowed = Callable[[QueryIdx, KeyIdx], Bool[Tensor, "..."]]
"""A mask as a predicate: given query and key positions, a bool tensor that broadcasts to `[batch,
head, query, key]`.

True means that the query may attend to the key. See `mhacli.attention.masks`.
"""


class Keep(NamedTuple):
    """The cells of a mask, `[#batch, #head, #query, #key]`, and whether it is known that each query
    sees a key, and that each key is seen by a query.
    """

    cells: VisibleCells
    each_sees: bool
    each_is_seen: bool


Tap = Callable[..., None]
"""A callback that receives the tensors of a computation: `tap(site, tensor, **where)`, once per
site of `mhacli.record.sites.SITES`, in the order of execution. It observes and never changes
them."""


def no_tap(site: str, tensor: Tensor, **where: Any) -> None:
    """The tap that ignores what it gets."""


def attend(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_v"],
    *,
    allowed: Allowed | None = None,
    bias: Float[Tensor, "..."] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    tap: Tap | None = None,
) -> Float[Tensor, "batch head query d_v"]:
    """Each query's weighted sum of the values: `z = softmax(scale · q kᵀ, masked) v`.

    `head` is a multiple of `kv_head`: query head `h` reads kv head `h // (head / kv_head)`. Order
    of operations: `scale` (default `d_head ** -0.5`), softcap `c · tanh(score / c)`, additive
    `bias` (broadcasts to the scores; −∞ in it means masked), mask, softmax. 16-bit inputs get their
    softmax in float32. A masked key has exactly the weight 0; a query without any allowed key gets
    a row of zeros, and `z = 0`. Taps: `qk`, `scores`, `pattern`, `z`. Source of the softcap: Gemma
    Team 2024, "Gemma 2", section 2.

    Two tokens that match themselves twice as well as each other, one head, d_head 1, scale 1:

    >>> q = k = torch.tensor([[[[1.0], [2.0]]]]); v = torch.tensor([[[[0.0], [1.0]]]])
    >>> attend(q, k, v, scale=1.0)[0, 0, 0].item()  # e² / (e¹ + e²)
    0.7310585975646973
    """
    tap = no_tap if tap is None else tap
    keep = visible_cells_of(q, k, allowed, bias)
    pattern = attention_pattern(q, k, keep=keep, bias=bias, scale=scale, softcap=softcap, tap=tap)
    return weighted_sum(pattern, v, keep=keep, tap=tap)


def attention_pattern(
    q: Queries,
    k: Keys,
    *,
    keep: Keep | None,
    bias: ScoreBias | None,
    scale: float | None,
    softcap: float | None,
    tap: Tap,
) -> Matrices:
    """The first half of `attend`: the weight that each query gives each key."""
    scores = q @ per_query_head(k, q.shape[1]).mT
    tap("qk", scores)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~keep.cells, -torch.inf)
    tap("scores", scores)
    # a masked cell needs no care, exp(−∞) is exactly 0
    if keep is None or keep.each_sees:
        pattern = scores.softmax(dim=-1)
    # a row without a key would be 0/0: it is made harmless before the softmax, so that gradients
    # stay finite too
    else:
        no_key = ~keep.cells.any(dim=-1, keepdim=True)
        pattern = scores.masked_fill(no_key, 0.0).softmax(dim=-1).masked_fill(no_key, 0.0)
    pattern = pattern.to(q.dtype)
    tap("pattern", pattern)
    return pattern


def weighted_sum(
    pattern: Matrices,
    v: Values,
    *,
    keep: Keep | None,
    tap: Tap,
) -> HeadOutputs:
    """The second half of `attend`: the values, weighted by the pattern.

    A key that no query may attend to, such as padding, contributes nothing, whatever its value
    holds (0 · NaN is NaN).
    """
    values = per_query_head(v, pattern.shape[1])
    if keep is not None and not keep.each_is_seen:
        values = values.masked_fill(~keep.cells.any(dim=-2).unsqueeze(-1), 0.0)
    z = pattern @ values
    tap("z", z)
    return z


def per_query_head(
    t: Float[Tensor, "batch kv_head key d"], n_heads: int
) -> Float[Tensor, "batch head key d"]:
    """Keys or values with each kv head repeated for the query heads that share it: 0 0 1 1, never 0
    1 0 1.

    Source: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models", section
    2.2.
    """
    n_kv_heads = t.shape[1]
    return t if n_kv_heads == n_heads else t.repeat_interleave(n_heads // n_kv_heads, dim=1)


def visible_cells_of(
    q: Queries,
    k: Keys,
    allowed: Allowed | None,
    bias: ScoreBias | None,
) -> Keep | None:
    """`visible_cells` of all queries and keys; None where there is neither mask nor bias."""
    if allowed is None and bias is None:
        return None
    n_queries, n_keys = q.shape[2], k.shape[2]
    q_idx, k_idx = (torch.arange(n, device=q.device) for n in (n_queries, n_keys))
    cells = visible_cells(allowed, q_idx, k_idx, bias)
    covers = getattr(allowed, "covers", None)  # a mask may know it by its band
    if bias is None and covers is not None and covers(n_queries, n_keys):
        return Keep(cells, each_sees=True, each_is_seen=True)
    return Keep(cells, _each_has_one(cells, dim=-1), _each_has_one(cells, dim=-2))


def visible_cells(
    allowed: Allowed | None,
    q_idx: QueryIdx,
    k_idx: KeyIdx,
    bias: ScoreBias | None = None,
) -> VisibleCells:
    """The mask evaluated on these queries and keys, True = may attend.

    What a `bias` sets to −∞ is masked too: a row of nothing else would otherwise be 0/0.
    """
    if allowed is None:
        cells = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q_idx.device)
    else:
        cells = four_axes(allowed(q_idx, k_idx))
    return cells if bias is None else cells & ~four_axes(torch.isneginf(bias))


def four_axes(tensor: Tensor) -> Tensor:
    """The tensor with axes of 1 before its own, as many as `[batch, head, query, key]` has."""
    return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as options and records have it: `float32`."""
    return str(dtype).removeprefix("torch.")


def is_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite. Either would show in the sum, which takes one read; a
    sum of finite numbers may overflow, and then the smallest and largest tell.
    """
    if not tensor.numel() or bool(tensor.sum().isfinite()):
        return True
    return all(bool(end.isfinite()) for end in tensor.aminmax())


def _each_has_one(keep: Bool[Tensor, "..."], dim: int) -> bool:
    """Whether every row along an axis holds a True, by its largest byte: on a CPU 20 times as fast
    as `any` of bools.

    `torch.compile` cannot choose by numbers, and a device would have to be waited for: there the
    answer is no, so that what is rare is cared for.
    """
    if torch.compiler.is_compiling() or keep.device.type != "cpu" or not keep.shape[dim]:
        return False
    return bool(keep.view(torch.uint8).amax(dim).all())
