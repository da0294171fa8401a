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
    """The statistics of uniform attention over the same visible keys: by formula without a mask and with a causal one, else of
    scores that are all 0."""
    batch, _, n_queries, n_keys = attention.shape
    allowed, like = attention.allowed, attention.like
    is_causal = isinstance(allowed, Mask) and allowed.cells is None and allowed.band.low == Band().low
    if (allowed is None or is_causal) and not request.matches:
        newest = allowed.band.high if isinstance(allowed, Mask) else n_keys
        statistics, visible = _of_first_keys(newest, request, (batch, n_queries, n_keys))
        own = {name: of_text[:, None].to(attention.dtype) for name, of_text in statistics.items()}
        return Baseline(visible[:, None].to(attention.dtype), own)
    first = torch.zeros(1, dtype=torch.int64, device=like.device)
    n_heads = attention.visible(first, first).shape[1]
    zeros = torch.zeros((), dtype=attention.dtype, device=like.device)
    q, k = zeros.expand(batch, n_heads, n_queries, 1), zeros.expand(batch, 1, n_keys, 1)
    reduced = reduce_heads(ScoredAttention(q=q, k=k, scale=1.0, allowed=allowed), request, range(n_heads))
    visible = torch.where(reduced.has_keys, reduced.lse.exp().round(), 0.0)
    return Baseline(visible.to(attention.dtype), reduced.statistics)


def _of_first_keys(
    newest: int, request: StatisticsRequest, shape: tuple[int, int, int]
) -> tuple[Statistics, Float[Tensor, "batch query"]]:
    """The statistics of queries that see the keys up to `query + newest`, of which each gets `weight`."""
    (batch, n_queries, n_keys), device = shape, request.first.device
    i = torch.arange(n_queries, device=device)
    n_seen = (i + newest + 1).clamp(0, n_keys)
    weight = torch.where(n_seen > 0, 1 / n_seen.double(), 0.0)

    def counted(marks: Tensor) -> Tensor:
        """How many marked keys each query sees."""
        found: Tensor = torch.nn.functional.pad(marks.double().cumsum(dim=-1), (1, 0))[..., n_seen]
        return found

    def before(numbers: Tensor) -> Tensor:
        """The sum of the numbers of earlier queries."""
        return torch.nn.functional.pad(numbers.cumsum(dim=0), (1, 0))

    # A query sees as many keys before an edge of the map's columns as both allow: all that it sees, up to the query `enough`.
    edges = torch.arange(0, n_keys + request.block, request.block, device=device).clamp(max=n_keys)
    rows = torch.arange(0, n_queries + request.block, request.block, device=device).clamp(max=n_queries)[:, None]
    enough = torch.maximum(torch.minimum(edges - newest, rows[1:]), rows[:-1])
    mass_before, seen_before = before(weight), before((n_seen > 0).double())
    keys_before = seen_before[enough] - seen_before[rows[:-1]] + edges * (mass_before[rows[1:]] - mass_before[enough])

    behind = n_seen - 1 - i
    distances = torch.arange(1 - n_queries, n_keys, device=device)
    profile = mass_before[(n_keys - distances).clamp(0, n_queries)] - mass_before[(-distances).clamp(0, n_queries)]
    of_last = weight.new_zeros(n_keys + 1).index_add_(0, n_seen, weight)
    for_all = {
        "mass": (n_seen > 0).double(),
        "entropy": n_seen.clamp(min=1).double().log(),
        "squares": weight,
        "peak": weight.log(),
        "distance": weight * (i * (i + 1) + behind.sign() * behind * (behind + 1)) / 2,
        "received": of_last.flip(0).cumsum(dim=0).flip(0)[1:],
        "map": keys_before.diff(dim=1),
        "profile": torch.where(distances <= newest, profile, 0.0),
    }
    statistics = {name: numbers.expand(batch, *numbers.shape) for name, numbers in for_all.items()}
    statistics |= {"first": weight * counted(request.first), "leading": weight * counted(request.leading)}
    for shift, (name, labels) in enumerate((("duplicate", request.k_tokens), ("induction", request.before_k))):
        texts = zip(request.q_tokens, labels, strict=True)
        equal = [_equal(*text, n_seen, shift if request.is_self else None) for text in texts]
        statistics[name] = torch.stack(equal).double() @ weight
    statistics |= {"matched": weight.new_zeros(batch, 0), "between": weight.new_zeros(batch, 0, 0)}
    if request.q_spans is not None and request.k_spans is not None:
        statistics["between"] = request.q_spans.double() @ (weight * counted(request.k_spans)).mT
    return statistics, n_seen.double().expand(batch, -1)


def _equal(
    tokens: Int[Tensor, " query"], labels: Int[Tensor, " key"], n_seen: Tensor, shift: int | None
) -> Int[Tensor, " query"]:
    """How many of the keys that a query sees have its token for a label, but for the key at `query + shift`."""
    n_keys = len(labels)
    codes = (labels * n_keys + torch.arange(n_keys, device=labels.device)).sort().values
    own = torch.where(tokens < 0, -2, tokens) * n_keys
    counts = torch.searchsorted(codes, own + n_seen) - torch.searchsorted(codes, own)
    if shift is not None:
        key = torch.arange(len(tokens), device=tokens.device) + shift
        is_same = (labels[key.clamp(max=n_keys - 1)] == tokens) & (tokens >= 0)
        counts = counts - ((key < n_seen) & is_same).long()
    return counts
