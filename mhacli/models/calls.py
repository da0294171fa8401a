"""One captured attention: a call of a function of transformers, of torch's own function, or attention written out in code; and
the attention that can be reduced, with a mask predicate, an additive bias, and scores or weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.utils.weak import WeakIdRef

from mhacli.attention import masks
from mhacli.attention.masks import Mask
from mhacli.attention.scores import Attention, GivenAttention, ScoredAttention, tensor_bias
from mhacli.text.tokens import AttentionKind

InterceptionLevel = Literal["registry", "module", "sdpa", "softmax"]
"""How a call was captured, the most reliable first: by the function in transformers' registry; by the modelling file's own
`eager_attention_forward`; by torch's `scaled_dot_product_attention`; or only by its softmax."""
KNOWN = frozenset((
    "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "is_causal", "key",
    "labels", "layer_idx", "logits_to_keep", "max_length_k", "max_length_q", "module", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_bias", "position_embeddings", "position_ids",
    "query", "return_dict", "s_aux", "scaling", "sinks", "sliding_window", "softcap", "training", "use_cache", "value",
))  # fmt: skip
"""Keywords of attention functions that are captured, or do not change the result, given the mask. `sliding_window` is already in
the mask. Source: transformers 5, integrations/."""
FORBIDDING = -9e3
"""A value up to this one, added to a score, masks its cell: code uses −∞, the lowest number of a dtype, −1e5 and −1e4."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention of a model: the `name` of its module, its place in the pass, its tensors, and how it was captured.

    `layer` is the number of its layer. A module may compute several attentions in one layer; `part` counts the earlier ones.

    A call of a function has queries, keys and values after rotation and with cached ones, and the head outputs `z`. Then `mask`
    is bool (True = may attend), or is added to the scores, or is an object of the implementation. `causal` hides later keys;
    query 0 is key 0. `sinks` are scores in the softmax that contribute no value, one per head or per query.

    Attention written out in code has its final `scores` and its `pattern` instead of queries and keys, and neither v nor z if the
    product of pattern and values was not found.

    `unknown` names the keywords whose meaning is not known. `is_token_first` says that the module's inputs have the tokens as
    first axis and the sequences as second.
    """

    name: str
    layer: int
    kind: AttentionKind
    part: int
    level: InterceptionLevel
    kernel: str
    v: Float[Tensor, "batch kv_head key d_v"] | None = None
    z: Float[Tensor, "batch head query d_v"] | None = None
    q: Float[Tensor, "batch head query d_head"] | None = None
    k: Float[Tensor, "batch kv_head key d_head"] | None = None
    scale: float = 1.0
    mask: Shaped[Tensor, "..."] | None = None
    causal: bool = False
    softcap: float | None = None
    bias: Float[Tensor, "..."] | None = None
    sinks: Float[Tensor, " head"] | Float[Tensor, "batch head query"] | None = None
    scores: Float[Tensor, "batch head query key"] | None = None
    pattern: Float[Tensor, "batch head query key"] | None = None
    unknown: tuple[str, ...] = ()
    is_token_first: bool = False

    @property
    def title(self) -> str:
        """Its name within its layer: the name of its module, and the number of the module's attention."""
        return self.name if self.part == 0 else f"{self.name}, call {self.part + 1}"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)` of the pattern."""
        if self.scores is not None:
            return tuple(self.scores.shape)
        q, k, _ = self.qkv
        return (*q.shape[:3], k.shape[2])

    @property
    def device(self) -> torch.device:
        """The device on which it was computed."""
        return next(tensor for tensor in (self.q, self.scores) if tensor is not None).device

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of a call of a function."""
        assert self.q is not None
        assert self.k is not None
        assert self.v is not None
        return self.q, self.k, self.v

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def holding(self, tensors: dict[str, Any]) -> Call:
        """The call with other tensors, by name, instead of its own."""
        held: dict[str, Any] = dict.fromkeys(self.tensors)
        return replace(self, **held | tensors)

    @property
    def has_dropout(self) -> bool:
        """Whether dropout was applied after the softmax. Then z does not follow from the pattern."""
        return "dropout" in self.unknown

    @property
    def unread_mask(self) -> str | None:
        """The reason why its mask cannot be read, None if it can or there is none."""
        mask: Any = self.mask
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else (0,)
        is_of_keys = self.level != "sdpa" and len(shape) == 2  # flash-attention has a mask for padding only
        sizes = zip(reversed(shape), reversed(self.shape), strict=False)
        is_read = not is_of_keys and len(shape) <= len(self.shape) and all(n in (1, of) for n, of in sizes)
        return None if mask is None or is_read else "attention whose mask is no tensor of batch, head, query and key"

    def behind(self, n: int) -> Call:
        """The attention with `n` queries of zeros before its own."""
        padded: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            widths = (n, 0) if name == "sinks" else (0, 0, n, 0)
            axis = tensor.ndim - len(widths) // 2
            if name not in ("k", "v") and axis >= 0 and tensor.shape[axis] == self.shape[2]:
                padded[name] = torch.nn.functional.pad(tensor, widths)
        return replace(self, **padded)

    def cropped(self, queries: slice, keys: slice) -> Call:
        """The attention of some queries on some keys; a mask that is no tensor is not cropped."""
        q_len, k_len = self.shape[2:]
        cut: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            if name in ("q", "z", "k", "v"):
                cut[name] = tensor[:, :, queries if name in ("q", "z") else keys]
            elif name == "sinks":
                cut[name] = tensor[:, :, queries] if tensor.ndim == 3 else tensor
            else:
                cells = tensor[..., keys] if tensor.shape[-1] == k_len else tensor
                cut[name] = cells[..., queries, :] if cells.ndim > 1 and cells.shape[-2] == q_len else cells
        return replace(self, **cut)


# --------------------------------------------------------------------------------------------- an attention to be reduced


Masking = tuple[Mask | None, Float[Tensor, "..."] | None, Bool[Tensor, "batch head query"] | None]
"""The mask of a call, the bias added to its scores, and the queries that see a key, None if all do."""


def state_of(tensor: Tensor | None) -> object:
    """What stands for a tensor and its numbers: a reference that does not keep it alive, and the number of writes in place, which
    inference mode does not count. There a tensor is never known."""
    if tensor is None:
        return None
    return object() if tensor.is_inference() else (WeakIdRef(tensor), tensor._version)


def masking_of(call: Call, real: Bool[Tensor, "batch query"]) -> Masking:
    """The mask of a call, and the bias added to its scores; `real` marks the queries that are not padding."""
    rules: list[Mask] = [masks.causal()] if call.causal else []
    sees: Tensor | None = None
    added: list[Tensor] = []
    for tensor in (call.mask, call.bias):
        if tensor is None:
            continue
        keep = tensor.clone() if tensor.dtype == torch.bool else tensor > FORBIDDING
        keep = _alike(keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape)))
        if not bool(keep.all()):
            rules.append(masks.from_tensor(keep))
            sees = keep.any(dim=-1) if sees is None else sees & keep.any(dim=-1)
        if tensor.dtype != torch.bool:
            rest = tensor.masked_fill(~keep, 0.0)
            added += [rest.to(torch.promote_types(rest.dtype, torch.float32))] if bool(rest.any()) else []
    if not bool(real.all()):
        rules.append(masks.from_tensor(real[:, None, :, None]))
    return masks.both(*rules) if rules else None, sum(added[1:], start=added[0]) if added else None, sees


def as_attention(call: Call, real: Bool[Tensor, "batch query"], masking: Masking | None = None) -> Attention:
    """A captured attention with all heads, ready for evaluation; `real` marks the queries that are not padding, and a `masking`
    is that of another call with the same mask. The output of a query that sees no key is zeros, whatever the model's code makes
    of it."""
    if call.q is None:
        return _of_softmax(call, real)
    (q, k, v), (allowed, bias, sees) = call.qkv, masking or masking_of(call, real)
    is_of_heads = call.sinks is not None and call.sinks.ndim == 1
    return ScoredAttention(
        q=q.contiguous(),  # each is read many times
        k=k.contiguous(),
        v=v,
        z=call.z if call.z is None or sees is None else call.z.masked_fill(~sees[..., None], 0.0),
        scale=call.scale,
        softcap=call.softcap,
        bias=None if bias is None else tensor_bias(bias),
        allowed=allowed,
        kernel=call.kernel,
        sink_logits=call.sinks.reshape(1, -1, 1) if call.sinks is not None and is_of_heads else call.sinks,
    )


def _of_softmax(call: Call, real: Bool[Tensor, "batch query"]) -> GivenAttention:
    """An attention with a fully captured pattern. A cell is masked if its weight is 0 because of a very low score.

    Weights in 16 bits, whose rows do not sum to 1, are recomputed from the scores.
    """
    pattern, scores = call.pattern, call.scores
    assert pattern is not None
    assert scores is not None
    hidden = (pattern == 0) & (scores <= FORBIDDING)
    keep = _alike(~hidden) & real[:, None, :, None]
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(hidden, -torch.inf)
    weights = pattern if pattern.dtype in (torch.float32, torch.float64) else wide.softmax(dim=-1)
    v, z = (None, wide.new_zeros(*wide.shape[:3], 1)) if call.v is None or call.z is None else (call.v, call.z)
    return GivenAttention(
        weights=weights.masked_fill(~keep, 0.0),
        scores=scores,
        allowed=masks.from_tensor(keep),
        v=v,
        z=z,
        kernel="softmax",
    )


def _alike(keep: Bool[Tensor, "batch head query key"]) -> Bool[Tensor, "batch _head query key"]:
    """The mask with a head axis of 1 if it is equal for all heads."""
    return keep[:, :1] if keep.shape[1] > 1 and bool((keep == keep[:, :1]).all()) else keep
