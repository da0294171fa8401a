"""Uniform attention over the visible keys: the baseline of every statistic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mhacli.attention.masks import Band, Mask
from mhacli.attention.scores import Attention, ScoredAttention
from mhacli.attention.statistics import Statistics, StatisticsRequest, reduce_heads


@dataclass(frozen=True)
class Baseline:
    """Uniform attention: how many keys each query sees, and its statistics. Head axes of 1 hold for all."""

    visible: Float[Tensor, "batch _head query"]
    statistics: Statistics

    def of_heads(self, heads: range) -> Baseline:
        """The baseline of some heads."""
        if self.visible.shape[1] == 1:
            return self
        span = slice(heads.start, heads.stop)
        return Baseline(self.visible[:, span], {name: sums[:, span] for name, sums in self.statistics.items()})


def make_baseline(attention: Attention, request: StatisticsRequest) -> Baseline:
    """The statistics of uniform attention over the same visible keys: by formula where all queries see the keys of a band,
    else of scores that are all 0."""
    batch, _, n_queries, n_keys = attention.shape
    allowed, like = attention.allowed, attention.like
    band = Band() if allowed is None else allowed.band if isinstance(allowed, Mask) and allowed.cells is None else None
    if band is not None and not request.matches:
        statistics, visible = _of_band(band, request, (batch, n_queries, n_keys))
        own = {name: of_text[:, None].to(attention.dtype) for name, of_text in statistics.items()}
        return Baseline(visible[:, None].to(attention.dtype), own)
    first = torch.zeros(1, dtype=torch.int64, device=like.device)
    n_heads = attention.visible(first, first).shape[1]
    zeros = torch.zeros((), dtype=attention.dtype, device=like.device)
    q, k = zeros.expand(batch, n_heads, n_queries, 1), zeros.expand(batch, 1, n_keys, 1)
    reduced = reduce_heads(ScoredAttention(q=q, k=k, scale=1.0, allowed=allowed), request, range(n_heads))
    visible = torch.where(reduced.has_keys, reduced.lse.exp().round(), 0.0)
    return Baseline(visible.to(attention.dtype), reduced.statistics)


def _of_band(
    band: Band, request: StatisticsRequest, shape: tuple[int, int, int]
) -> tuple[Statistics, Float[Tensor, "batch query"]]:
    """The statistics of queries that see the keys from `low` to before `high`, of which each gets `weight`."""
    (batch, n_queries, n_keys), device = shape, request.first.device
    i = torch.arange(n_queries, device=device)
    low = (i + band.low).clamp(0, n_keys)
    high = torch.maximum((i + band.high + 1).clamp(0, n_keys), low)
    seen = (high - low).double()
    weight = torch.where(seen > 0, 1 / seen, 0.0)

    def counted(marks: Tensor) -> Tensor:
        """How many marked keys each query sees."""
        until = torch.nn.functional.pad(marks.double().cumsum(dim=-1), (1, 0))
        found: Tensor = until[..., high] - until[..., low]
        return found

    def steps(offset: Tensor) -> Tensor:
        """Σ |t| over the offsets t from 0 to this one, less where it is negative."""
        return offset.sign() * offset * (offset + 1) / 2

    distances = torch.arange(1 - n_queries, n_keys, device=device)
    mass_before = torch.nn.functional.pad(weight.cumsum(dim=0), (1, 0))
    profile = mass_before[(n_keys - distances).clamp(0, n_queries)] - mass_before[(-distances).clamp(0, n_queries)]
    changes = weight.new_zeros(n_keys + 1).index_add_(0, low, weight).index_add_(0, high, -weight)
    for_all = {
        "mass": (seen > 0).double(),
        "entropy": seen.clamp(min=1).log(),
        "squares": weight,
        "peak": weight.log(),
        "distance": weight * (steps(high - 1 - i) - steps(low - 1 - i)),
        "received": changes.cumsum(dim=0)[:-1],
        "map": _map(low, high, weight, request.block, n_keys),
        "profile": torch.where((distances >= band.low) & (distances <= band.high), profile, 0.0),
    }
    statistics = {name: numbers.expand(batch, *numbers.shape) for name, numbers in for_all.items()}
    statistics |= {"first": weight * counted(request.first), "leading": weight * counted(request.leading)}
    for shift, (name, labels) in enumerate((("duplicate", request.k_tokens), ("induction", request.before_k))):
        texts = zip(request.q_tokens, labels, strict=True)
        equal = [_equal(*text, low, high, shift if request.is_self else None) for text in texts]
        statistics[name] = torch.stack(equal).double() @ weight
    statistics |= {"matched": weight.new_zeros(batch, 0), "between": weight.new_zeros(batch, 0, 0)}
    if request.q_spans is not None and request.k_spans is not None:
        statistics["between"] = request.q_spans.double() @ (weight * counted(request.k_spans)).mT
    return statistics, seen.expand(batch, -1)


def _map(low: Tensor, high: Tensor, weight: Tensor, block: int, n_keys: int) -> Float[Tensor, "query_block key_block"]:
    """Of each block of queries: between two edges of blocks of keys lie as many keys as before the one less those before the
    other."""
    edges = torch.arange(0, n_keys + block, block, device=low.device).clamp(max=n_keys)
    rows = [
        own @ (torch.minimum(last[:, None], edges) - torch.minimum(first[:, None], edges)).double()
        for first, last, own in zip(low.split(block), high.split(block), weight.split(block), strict=True)
    ]
    return torch.stack(rows).diff(dim=1)


def _equal(
    tokens: Int[Tensor, " query"],
    labels: Int[Tensor, " key"],
    low: Tensor,
    high: Tensor,
    shift: int | None,
) -> Int[Tensor, " query"]:
    """How many of the keys that a query sees have its token for a label, but for the key at `query + shift`."""
    n_keys = len(labels)
    codes = (labels * n_keys + torch.arange(n_keys, device=labels.device)).sort().values
    own = torch.where(tokens < 0, -2, tokens) * n_keys
    counts = torch.searchsorted(codes, own + high) - torch.searchsorted(codes, own + low)
    if shift is not None:
        key = torch.arange(len(tokens), device=tokens.device) + shift
        is_same = (labels[key.clamp(max=n_keys - 1)] == tokens) & (tokens >= 0)
        counts = counts - ((key >= low) & (key < high) & is_same).long()
    return counts
