"""One captured attention: a call of a function of transformers, of torch's own function, or attention written out in code."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mhacli.text.tokens import AttentionKind

InterceptionLevel = Literal["registry", "module", "sdpa", "softmax"]
"""How a call was captured, the most reliable first: by the function in transformers' registry; by the modelling file's own
`eager_attention_forward`; by torch's `scaled_dot_product_attention`; or only by its softmax."""


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
        if self.q is None or self.k is None:
            assert self.scores is not None
            return tuple(self.scores.shape)
        return (*self.q.shape[:3], self.k.shape[2])

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

    @property
    def has_dropout(self) -> bool:
        """Whether dropout was applied after the softmax. Then z does not follow from the pattern."""
        return any(name in DROPOUT for name in self.unknown)

    @property
    def sink_scores(self) -> Float[Tensor, "_batch head _query"] | None:
        """The scores of sinks, with axes of 1 if batch and query do not matter."""
        return self.sinks if self.sinks is None or self.sinks.ndim == 3 else self.sinks.reshape(1, -1, 1)

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


NEUTRAL = frozenset((
    "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "key", "labels",
    "layer_idx", "logits_to_keep", "max_length_k", "max_length_q", "module", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "query",
    "return_dict", "sliding_window", "training", "use_cache", "value",
))  # fmt: skip
"""Keywords of attention functions that are not captured and do not change the result, given the mask. `sliding_window` is
already in the mask. Source: transformers 5, integrations/."""
COMPUTED = frozenset(("is_causal", "position_bias", "s_aux", "scaling", "sinks", "softcap"))
"""Keywords that change the result and are captured."""
DROPOUT = frozenset(("dropout", "dropout_p"))
"""Keywords in `Call.unknown` that mean dropout."""
