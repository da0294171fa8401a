"""Turns a captured call into an attention that can be reduced: a mask predicate, an additive bias, scores or weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.weak import WeakIdRef

from mhacli.attention import masks
from mhacli.attention.masks import Mask
from mhacli.attention.scores import Attention, GivenAttention, ScoredAttention, tensor_bias
from mhacli.models.calls import Call

FORBIDDING = -9e3
"""A value up to this one, added to a score, masks its cell: code uses −∞, the lowest number of a dtype, −1e5 and −1e4."""


KEPT_MASKS = 4
"""The number of masks kept: a model has one, or two with and without a window; an encoder-decoder has one per kind of
attention."""


class Added(NamedTuple):
    """The mask of a call, the bias added to its scores, and the queries that see a key, None if all do."""

    allowed: Mask | None
    bias: Float[Tensor, "..."] | None
    sees: Bool[Tensor, "batch head query"] | None


KnownMasks = dict[object, Added]
"""The prepared masks of a pass, because many models pass the same tensor to all layers. Only the last few are kept, because other
models make a tensor as large as the pattern for every layer."""


def _known(call: Call, real: Bool[Tensor, "batch query"], known: KnownMasks) -> Added:
    """The mask and bias of a call, prepared once for successive layers that share them."""
    rows = real.cpu().numpy().tobytes()  # two kinds of layers may differ only in their padded queries
    key = (call.causal, call.device, call.shape, rows, _state(call.mask), _state(call.bias))
    if key not in known:
        while len(known) >= KEPT_MASKS:
            del known[next(iter(known))]
        known[key] = mask_of(call, real)
    return known[key]


def _state(tensor: Tensor | None) -> object:
    """What stands for a tensor and its numbers: a reference that does not keep it alive, and the number of writes in place, which
    inference mode does not count. There a tensor is never known."""
    if tensor is None:
        return None
    return object() if tensor.is_inference() else (WeakIdRef(tensor), tensor._version)


def as_attention(call: Call, real: Bool[Tensor, "batch query"], known: KnownMasks) -> Attention:
    """A captured attention with all heads, ready for evaluation; `real` marks the queries that are not padding. The output of a
    query that sees no key is zeros, whatever the model's code makes of it."""
    if call.q is None:
        return _of_softmax(call, real)
    (q, k, v), (allowed, bias, sees) = call.qkv, _known(call, real, known)
    z = call.z if call.z is None or sees is None else call.z.masked_fill(~sees[..., None], 0.0)
    return ScoredAttention(
        q=q,
        k=k,
        v=v,
        z=z,
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


def mask_of(call: Call, real: Bool[Tensor, "batch query"]) -> Added:
    """The mask of a call, and the bias added to its scores."""
    rules: list[Mask] = [masks.causal()] if call.causal else []
    sees: Tensor | None = None
    added: list[Tensor] = []
    for tensor in (call.mask, call.bias):
        if tensor is None:
            continue
        keep = tensor if tensor.dtype == torch.bool else tensor > FORBIDDING
        keep = _alike(keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape)))
        keep = _copied(keep) if tensor.dtype == torch.bool else keep
        if not bool(keep.all()):
            rules.append(masks.from_tensor(keep))
            sees = sees if bool((seen := keep.any(dim=-1)).all()) else seen if sees is None else sees & seen
        if tensor.dtype != torch.bool:
            rest = tensor.masked_fill(~keep, 0.0)
            added += [rest.to(torch.promote_types(rest.dtype, torch.float32))] if bool(rest.any()) else []
    if not bool(real.all()):
        rules.append(masks.from_tensor(real[:, None, :, None]))
    bias = None if not added else sum(added[1:], start=added[0])
    return Added(masks.both(*rules) if rules else None, bias, sees)
