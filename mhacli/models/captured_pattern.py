"""Turns a captured call into an attention that can be reduced: a mask predicate, an additive bias, scores or weights."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mhacli.attention import masks
from mhacli.attention.masks import Mask
from mhacli.attention.scores import Attention, GivenAttention, ScoredAttention, tensor_bias
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


def as_attention(call: Call, real: Bool[Tensor, "batch query"], known: KnownMasks) -> Attention:
    """A captured attention with all heads, ready for evaluation; `real` marks the queries that are not padding."""
    if call.q is None:
        return _of_softmax(call, real)
    (q, k, v), (allowed, bias) = call.qkv, known.of(call, real)
    return ScoredAttention(
        q=q,
        k=k,
        v=v,
        z=call.z,
        scale=call.scale,
        softcap=call.softcap,
        bias=None if bias is None else tensor_bias(bias),
        allowed=allowed,
        kernel=call.kernel,
        sink_logits=call.sink_scores,
    )


def _of_softmax(call: Call, real: Bool[Tensor, "batch query"]) -> GivenAttention:
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
    v, z = (None, lse.new_zeros(*lse.shape, 1)) if call.v is None or call.z is None else (call.v, call.z)
    return GivenAttention(
        weights=shares.masked_fill(~keep, 0.0),
        scores=call.scores,
        allowed=masks.from_tensor(keep),
        v=v,
        z=z,
        kernel="softmax",
    )


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
