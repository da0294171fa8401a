"""A captured call as an attention that can be evaluated: its mask and its bias are read from the
tensors that the model's code adds or compares, once for the layers that share them.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.axes import StatisticsRequest
from mhacli.attention.core import four_axes
from mhacli.attention.masks import Mask
from mhacli.attention.reduction import make_baseline
from mhacli.attention.scores import Attention, GivenAttention, ScoredAttention, tensor_bias
from mhacli.attention.statistics import PassResults
from mhacli.models import foreign

from .capture import FORBIDDING, Call

_KEPT_MASKS = 4
"""The number of masks kept: a model has one, or two with and without a window; an encoder-decoder
has one per kind of attention. Other models make a tensor as large as the pattern for every
layer."""


class Masking(NamedTuple):
    """What a call masks, None for nothing; the bias added to its scores; and the queries that see a
    key by its tensors, None if all do.
    """

    allowed: Mask | None
    bias: Float[Tensor, "..."] | None
    sees: Bool[Tensor, "batch head query"] | None


class _KnownMask(NamedTuple):
    """A mask, and the statistics of uniform attention under it."""

    masking: Masking
    baseline: PassResults


@dataclass
class MaskCache:
    """The last masks of a pass, each made once for successive layers that share it."""

    _known: dict[object, _KnownMask] = field(default_factory=dict)

    def attention_of(self, call: Call, request: StatisticsRequest) -> tuple[Attention, PassResults]:
        """The attention of a call, and the statistics of uniform attention under its mask. It has
        no v if its z does not follow from its weights.
        """
        real = request.real
        if call.q is None:  # written out, with its mask in its own scores
            attention = as_attention(call, real)
            baseline = make_baseline(attention, request)
        else:
            tensors = (foreign.state_of(call.mask), foreign.state_of(call.bias))
            key = (request, call.causal, call.shape, *tensors)
            known = self._known.pop(key, None)
            masking = masking_of(call, real) if known is None else known.masking
            attention = as_attention(call, real, masking)
            baseline = make_baseline(attention, request) if known is None else known.baseline
            self._known[key] = _KnownMask(masking, baseline)  # now the last one
            if len(self._known) > _KEPT_MASKS:
                del self._known[next(iter(self._known))]
        if "dropout" in call.unknown:
            attention = replace(attention, v=None)
        return attention, baseline


def masking_of(call: Call, real: Bool[Tensor, "batch query"] | None) -> Masking:
    """The mask of a call, and the bias added to its scores; `real` marks the queries that are not
    padding, None if none is.
    """
    rules = list[Mask]()
    if call.causal:
        rules.append(masks.causal())
    sees: Tensor | None = None
    bias: Tensor | None = None
    for tensor in (call.mask, call.bias):
        if tensor is None:
            continue
        is_rule = tensor.dtype == torch.bool
        # a copy: what the model writes into its mask later does not count
        keep = four_axes(tensor.clone() if is_rule else tensor > FORBIDDING)
        added = tensor.new_zeros(()) if is_rule else tensor.masked_fill(~keep, 0.0)
        known = (keep.all(), (keep == keep[:, :1]).all(), (added != 0).any())
        # read at once, as each read waits for a device
        hides_none, is_of_one_head, is_bias = torch.stack(known).cpu().tolist()
        if not hides_none:
            keep = keep[:, :1] if is_of_one_head else keep
            rules.append(masks.from_tensor(keep))
            sees = keep.any(dim=-1) if sees is None else sees & keep.any(dim=-1)
        if is_bias:
            added = added.to(torch.promote_types(added.dtype, torch.float32))
            bias = added if bias is None else bias + added
    if real is not None:
        rules.append(masks.from_tensor(real[:, None, :, None]))
    return Masking(masks.both(*rules) if rules else None, bias, sees)


def as_attention(
    call: Call, real: Bool[Tensor, "batch query"] | None = None, masking: Masking | None = None
) -> Attention:
    """A captured attention with all heads, ready for evaluation; `real` marks the queries that are
    not padding, None if none is, and a `masking` is that of another call with the same mask. The
    output of a query that sees no key is zeros, whatever the model's code makes of it. A cell of a
    captured pattern is masked if its weight is 0 because of a very low score; weights in 16 bits,
    whose rows do not sum to 1, are computed again from the scores.
    """
    if call.q is None:
        return _written_out(call, real)
    q, k, v = call.qkv
    allowed, bias, sees = masking or masking_of(call, real)
    z, sinks = call.z, call.sinks
    if z is not None and sees is not None:
        z = z.masked_fill(~sees[..., None], 0.0)
    if sinks is not None and sinks.ndim == 1:
        sinks = sinks.reshape(1, -1, 1)
    return ScoredAttention(
        q=q,
        k=k.contiguous(),  # which are read for each block of queries
        v=v,
        z=z,
        scale=call.scale,
        softcap=call.softcap,
        bias=None if bias is None else tensor_bias(bias),
        allowed=allowed,
        kernel=call.kernel,
        sink_logits=sinks,
    )


def _written_out(call: Call, real: Bool[Tensor, "batch query"] | None) -> Attention:
    """The attention of a captured softmax, whose values may be missing."""
    pattern, scores = call.pattern, call.scores
    assert pattern is not None
    assert scores is not None
    hidden = (pattern == 0) & (scores <= FORBIDDING)
    keep = _of_one_head(~hidden)
    if real is not None:
        keep = keep & real[:, None, :, None]
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide = wide.masked_fill(hidden, -torch.inf)
    is_exact = call.is_changed or pattern.dtype in (torch.float32, torch.float64)
    weights = pattern if is_exact else wide.softmax(dim=-1)
    has_values = call.v is not None and call.z is not None
    return GivenAttention(
        weights=weights.masked_fill(~keep, 0.0),
        scores=scores,
        allowed=masks.from_tensor(keep),
        v=call.v if has_values else None,
        z=call.z if has_values else wide.new_zeros(*wide.shape[:3], 1),
        kernel="softmax",
    )


def _of_one_head(
    keep: Bool[Tensor, "batch head query key"],
) -> Bool[Tensor, "batch _head query key"]:
    """The mask with a head axis of 1 if it is equal for all heads."""
    return keep[:, :1] if keep.shape[1] > 1 and bool((keep == keep[:, :1]).all()) else keep
