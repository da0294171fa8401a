"""Turns a captured attention call into a mask predicate, an additive bias and a pattern that can be evaluated tile by tile."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mhacli.attention import masks
from mhacli.attention.core import visible_cells
from mhacli.attention.masks import Mask
from mhacli.attention.tiled.scores import ComputedPattern, Scores, tensor_bias
from mhacli.attention.tiled.softmax import AttentionResult, attend_lse, exact_enough, pattern_of
from mhacli.models.calls import Call

FORBIDDING = -9e3
"""A value up to this one, added to a score, masks its cell: code uses −∞, the lowest number of a dtype, −1e5 and −1e4."""


KEPT_MASKS = 4
"""The number of masks kept: a model has one, or two with and without a window; an encoder-decoder has one per kind of
attention."""


Added = tuple[Mask | None, Tensor | None]
"""The mask, and the bias added to the scores."""


class KnownMasks:
    """A cache of the prepared masks of a pass, because many models pass the same tensor to all layers. Only the last few are
    kept, because other models make a tensor as large as the pattern for every layer. The model's own tensors are not kept
    alive."""

    def __init__(self) -> None:
        self._known: dict[object, Added] = {}

    def of(self, call: Call, real: Bool[Tensor, "batch query"]) -> Added:
        """The mask and bias of a call."""
        rows = real.cpu().numpy().tobytes()  # two kinds of layers may differ only in their padded queries
        key = (*self.key(call), rows, _place(call.mask), _place(call.bias))
        if key not in self._known:
            while len(self._known) >= KEPT_MASKS:
                del self._known[next(iter(self._known))]
            self._known[key] = mask_of(call, real)
        return self._known[key]

    @staticmethod
    def key(call: Call) -> tuple[object, ...]:
        """The settings besides tensors that a mask depends on."""
        return (call.causal, call.device, call.shape)


def _place(tensor: Tensor | None) -> tuple[object, ...] | None:
    """A key of a tensor: its storage, layout, and number of writes in place, which inference mode does not count. While the weak
    reference exists, no other storage gets the same identity; it does not keep the storage alive."""
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else tensor._version
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), version


def as_attention(call: Call, real: Bool[Tensor, "batch query"], known: KnownMasks) -> AttentionResult:
    """A captured attention with all heads, ready for evaluation; `real` marks the queries that are not padding."""
    return _of_softmax(call, real) if call.q is None else _of_scores(call, *known.of(call, real))


def _of_scores(call: Call, allowed: Mask | None, bias: Tensor | None) -> AttentionResult:
    (q, k, v), z = call.qkv, call.z
    assert z is not None
    added = None if bias is None else tensor_bias(bias)
    scores = Scores(q, k, bias=added, allowed=allowed, scale=call.scale, softcap=call.softcap)
    known = None if call.device.type == "cpu" else attend_lse(scores, v).lse
    pattern = pattern_of(scores, known, call.sink_scores)
    lse = pattern.lse if known is None else known
    return AttentionResult(range(q.shape[1]), pattern, lse, z, v, call.kernel, call.sink_scores)


@dataclass(frozen=True)
class CapturedPattern(ComputedPattern):
    """A pattern that a model computed in full from `scores`, evaluated in at least float32; float64 would suggest precision that
    its weights do not have."""

    scores: Float[Tensor, "batch head query key"] = field(kw_only=True)

    @property
    def like(self) -> Tensor:
        """An empty tensor with the dtype of the maths, on the pattern's device."""
        return self.pattern.new_empty(0, dtype=torch.promote_types(self.pattern.dtype, torch.float32))

    def of_heads(self, heads: range) -> CapturedPattern:
        """The pattern of some neighbouring heads."""
        span = slice(heads.start, heads.stop)
        allowed = None if self.allowed is None else masks.of_heads(self.allowed, heads)
        return CapturedPattern(self.pattern[:, span], allowed, scores=self.scores[:, span])

    def of_queries(self, queries: Int[Tensor, " query"]) -> CapturedPattern:
        """The rows of some queries, in any order."""
        allowed = None if self.allowed is None else masks.of_queries(self.allowed, queries)
        return CapturedPattern(self.pattern[:, :, queries], allowed, scores=self.scores[:, :, queries])


def _of_softmax(call: Call, real: Bool[Tensor, "batch query"]) -> AttentionResult:
    """An attention with a fully captured pattern. A cell is masked if its weight is 0 because of a very low score.

    Weights in 16 bits, whose rows do not sum to 1, are recomputed from the scores.
    """
    assert call.pattern is not None
    assert call.scores is not None
    hidden = (call.pattern == 0) & (call.scores <= FORBIDDING)
    keep = _alike(~hidden) & real[:, None, :, None]
    scores = call.scores.to(torch.promote_types(call.scores.dtype, torch.float32)).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    is_wide = call.pattern.dtype in (torch.float32, torch.float64)
    shares = call.pattern if is_wide else (scores - lse[..., None]).exp()
    pattern = CapturedPattern(shares.masked_fill(~keep, 0.0), masks.from_tensor(keep), scores=call.scores)
    v, z = (None, lse.new_zeros(*lse.shape, 1)) if call.v is None or call.z is None else (call.v, call.z)
    return AttentionResult(range(lse.shape[1]), pattern, lse, z, v, "softmax")


def _alike(keep: Bool[Tensor, "batch head query key"]) -> Bool[Tensor, "batch _head query key"]:
    """The mask with a head axis of 1 if it is equal for all heads."""
    return keep[:, :1] if keep.shape[1] > 1 and bool((keep == keep[:, :1]).all()) else keep


def _copied(keep: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """A copy of a tensor's data that keeps expanded axes expanded."""
    once = keep[tuple(slice(0, 1) if step == 0 else slice(None) for step in keep.stride())]
    return once.clone().expand(keep.shape)


def mask_of(call: Call, real: Bool[Tensor, "batch query"]) -> tuple[Mask | None, Float[Tensor, "..."] | None]:
    """The mask of a call, and the bias added to its scores."""
    rules: list[Mask] = [masks.causal()] if call.causal else []
    added: list[Tensor] = []
    for tensor in (call.mask, call.bias):
        if tensor is None:
            continue
        keep = tensor if tensor.dtype == torch.bool else tensor > FORBIDDING
        keep = _alike(keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape)))
        keep = _copied(keep) if tensor.dtype == torch.bool else keep
        if not bool(keep.all()):
            rules.append(masks.from_tensor(keep))
        if tensor.dtype != torch.bool:
            rest = tensor.masked_fill(~keep, 0.0)
            added += [rest.to(torch.promote_types(rest.dtype, torch.float32))] if bool(rest.any()) else []
    if not bool(real.all()):
        rules.append(masks.from_tensor(real[:, None, :, None]))
    bias = None if not added else sum(added[1:], start=added[0])
    return masks.both(*rules) if rules else None, bias


def full_matrices(attention: AttentionResult) -> dict[str, Tensor]:
    """The matrices of an attention, computed where the model did not: `qk`, `scores`, `pattern` and `allowed`.

    They are at least float32, and the weights equal those of the statistics. `scores` is −∞ at masked cells.
    """
    pattern, (batch, _, n_queries, n_keys) = attention.pattern, attention.shape
    q_idx, k_idx = (torch.arange(n, device=pattern.like.device) for n in (n_queries, n_keys))
    keep = visible_cells(pattern.allowed, q_idx, k_idx)
    full = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q_idx.device) if keep is None else keep
    full = full.expand(batch, -1, n_queries, n_keys)
    if isinstance(pattern, CapturedPattern):
        scores = pattern.scores.to(pattern.like.dtype).masked_fill(~full, -torch.inf)
        return {"scores": scores, "pattern": pattern.pattern, "allowed": full}
    assert attention.scores is not None
    qk, scores = attention.scores.matrices()
    scores = scores.masked_fill(~full, -torch.inf)
    largest = scores.amax(dim=-1)
    finer = exact_enough(attention.scores, torch.where(full.any(dim=-1), largest, 0.0))
    if finer.is_wide:
        qk, scores = finer.matrices()
        scores = scores.masked_fill(~full, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    if attention.sink_logits is not None:
        lse = torch.logaddexp(lse, attention.sink_logits.to(scores.dtype))
    weights = torch.where(full, (scores - lse[..., None]).exp(), 0.0)
    shown = torch.promote_types(attention.scores.q.dtype, torch.float32)
    return {"qk": qk.to(shown), "scores": scores.to(shown), "pattern": weights.to(shown), "allowed": full}
