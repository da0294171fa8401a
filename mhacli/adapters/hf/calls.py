"""One attention as it was called: by a function of transformers with its arguments, by torch's own, or written out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from mhacli.adapters.hf.kernels import KernelWatch
from mhacli.spec.tokens import AttentionKind

InterceptionLevel = Literal["registry", "module", "sdpa", "softmax"]
"""How a call was seen, the surest way first: by the function that transformers' registry holds for the implementation in use;
by the modelling file's own `eager_attention_forward`; by torch's `scaled_dot_product_attention`; or only by its softmax."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention: the `name` of its module, its place in the pass, and how it was seen.

    `layer` is the number of its layer. A module may compute several attentions in one layer: `part` counts those before.
    `v` are the values and `z` what it gave, None where the product of the pattern and the values was not found. `unknown`
    names the keywords that the function got and whose meaning is not known here. `is_token_first` where its module takes inputs
    whose first axis is that of tokens, and the second that of sequences.
    """

    name: str
    layer: int
    kind: AttentionKind
    part: int
    level: InterceptionLevel
    implementation: str
    v: Float[Tensor, "batch kv_head key d_v"] | None = None
    z: Float[Tensor, "batch head query d_v"] | None = None
    unknown: tuple[str, ...] = ()
    is_token_first: bool = False

    @property
    def title(self) -> str:
        """What tells it from the others of its layer: the name of its module, and which of the module's attentions it is."""
        return self.name if self.part == 0 else f"{self.name}, call {self.part + 1}"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)` of the pattern."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where it was computed."""
        raise NotImplementedError

    def cropped(self, queries: slice, keys: slice) -> Call:
        """The attention from some queries to some keys."""
        raise NotImplementedError

    @property
    def has_dropout(self) -> bool:
        """Whether weights were set to 0 at random behind the softmax: what it gave is then not of the weights that are shown."""
        return any(name in DROPOUT for name in self.unknown)

    @property
    def extras(self) -> dict[str, str]:
        """What changes the scores beside scale, softcap, bias and sinks, by keyword, each in words for a reader."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ScoredCall(Call):
    """An attention whose queries, keys and values were seen, after any rotation and from any cache.

    `mask` is bool (True = may attend) or added to the scores; an implementation may have an object of its own. `causal` hides
    later keys, query 0 being key 0. `sinks` are scores that take part in the softmax and give nothing, one of each head or of
    each query. `lse` is the log-sum-exp that the `kernel` told, if any.
    """

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_v"]
    z: Float[Tensor, "batch head query d_v"]
    scale: float
    mask: Shaped[Tensor, "..."] | None = None
    causal: bool = False
    softcap: float | None = None
    bias: Float[Tensor, "..."] | None = None
    sinks: Float[Tensor, " head"] | Float[Tensor, "batch head query"] | None = None
    lse: Float[Tensor, "batch head query"] | None = None
    kernel: str = "eager"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)`."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def device(self) -> torch.device:
        """That of the queries."""
        return self.q.device

    def cropped(self, queries: slice, keys: slice) -> ScoredCall:
        """The attention from some queries to some keys; a mask that is no tensor stays whole."""
        q_len, k_len = self.shape[2:]

        def cells(added: Tensor | None) -> Tensor | None:
            if not isinstance(added, Tensor):
                return added
            added = added[..., keys] if added.shape[-1] == k_len else added
            return added[..., queries, :] if added.ndim > 1 and added.shape[-2] == q_len else added

        return replace(
            self,
            q=self.q[:, :, queries],
            k=self.k[:, :, keys],
            v=self.v[:, :, keys],
            z=self.z[:, :, queries],
            mask=cells(self.mask),
            bias=cells(self.bias),
            sinks=self.sinks if self.sinks is None or self.sinks.ndim != 3 else self.sinks[:, :, queries],
            lse=None if self.lse is None else self.lse[:, :, queries],
        )

    @property
    def scoring(self) -> dict[str, Any]:
        """What makes scores of the products of queries and keys, mask and bias aside, by the fields of `Scores`."""
        return {"scale": self.scale, "softcap": self.softcap}

    @property
    def sink_scores(self) -> Float[Tensor, "_batch head _query"] | None:
        """The scores of sinks, with an axis of 1 where batch and query do not matter."""
        return self.sinks if self.sinks is None or self.sinks.ndim == 3 else self.sinks.reshape(1, -1, 1)


@dataclass(frozen=True, kw_only=True)
class SoftmaxCall(Call):
    """An attention written out by hand, of which softmax was seen: `scores` with everything added, and the `pattern`."""

    scores: Float[Tensor, "batch head query key"]
    pattern: Float[Tensor, "batch head query key"]

    def cropped(self, queries: slice, keys: slice) -> SoftmaxCall:
        """The attention from some queries to some keys."""
        return replace(
            self,
            scores=self.scores[:, :, queries, keys],
            pattern=self.pattern[:, :, queries, keys],
            v=None if self.v is None else self.v[:, :, keys],
            z=None if self.z is None else self.z[:, :, queries],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)`."""
        return tuple(self.scores.shape)

    @property
    def device(self) -> torch.device:
        """That of the scores."""
        return self.scores.device


# ------------------------------------------------------------------------------------------- the arguments of a function


NEUTRAL = frozenset((
    "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "key", "labels",
    "layer_idx", "logits_to_keep", "max_length_k", "max_length_q", "module", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "query",
    "return_dict", "sliding_window", "training", "use_cache", "value",
))  # fmt: skip
"""What an attention function takes besides what is captured, and that does not change what it computes beside its mask.
`sliding_window` is in the mask already, where the implementation takes one. Source: transformers 5, integrations/."""
DROPOUT = frozenset(("dropout", "dropout_p"))
"""Those of `Call.unknown` that are known for what they are."""
COMPUTED = frozenset(("is_causal", "position_bias", "s_aux", "scaling", "sinks", "softcap"))
"""What it takes and that does change it."""


def unknown_keywords(given: dict[str, Any]) -> tuple[str, ...]:
    """The keywords that may carry mathematics that is not known here: neither understood nor None nor False."""
    return tuple(
        sorted(
            name
            for name, value in given.items()
            if name not in NEUTRAL | COMPUTED and value is not None and value is not False
        )
    )


def seen_fields(
    module: nn.Module, given: dict[str, Any], z: Tensor, kernel: KernelWatch, level: InterceptionLevel
) -> dict[str, Any]:
    """What a call of an attention function holds, by the fields of `ScoredCall`; `given` are its arguments."""
    q, scaling, mask = given["query"], given.get("scaling"), given.get("attention_mask")
    is_causal = given.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    is_training = bool(given.get("dropout")) and (level == "registry" or module.training)
    return {
        "q": q,
        "k": given["key"],
        "v": given["value"],
        "z": z,
        "scale": float(q.shape[-1] ** -0.5 if scaling is None else scaling),
        "mask": mask,
        "causal": level == "registry" and mask is None and is_causal and q.shape[2] > 1,
        "softcap": given.get("softcap"),
        "bias": given.get("position_bias"),
        "sinks": _sinks(given),
        "lse": kernel.lse_of(q),
        "kernel": kernel.kernel or ("math" if level == "registry" else "eager"),
        "unknown": unknown_keywords(given) + (("dropout",) if is_training else ()),
    }


def _sinks(given: Mapping[str, Any]) -> Tensor | None:
    """The scores of sinks: one of each head, or of each query, in which case they come as one more key."""
    sinks = given.get("s_aux") if given.get("s_aux") is not None else given.get("sinks")
    return sinks.squeeze(-1) if isinstance(sinks, Tensor) and sinks.ndim == 4 else sinks
