"""One captured attention: a call of a function of transformers, of torch's own function, or attention written out in code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from mhacli.models.kernels import KernelWatch
from mhacli.text.tokens import AttentionKind

InterceptionLevel = Literal["registry", "module", "sdpa", "softmax"]
"""How a call was captured, the most reliable first: by the function in transformers' registry; by the modelling file's own
`eager_attention_forward`; by torch's `scaled_dot_product_attention`; or only by its softmax."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention: the `name` of its module, its place in the pass, and how it was captured.

    `layer` is the number of its layer. A module may compute several attentions in one layer; `part` counts the earlier ones.
    `v` are the values and `z` the head outputs, None if the product of pattern and values was not found. `unknown` names the
    keywords whose meaning is not known. `is_token_first` says that the module's inputs have the tokens as first axis and the
    sequences as second.
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
        """Its name within its layer: the name of its module, and the number of the module's attention."""
        return self.name if self.part == 0 else f"{self.name}, call {self.part + 1}"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)` of the pattern."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device on which it was computed."""
        raise NotImplementedError

    def cropped(self, queries: slice, keys: slice) -> Call:
        """The attention of some queries on some keys."""
        raise NotImplementedError

    @property
    def has_dropout(self) -> bool:
        """Whether dropout was applied after the softmax. Then z does not follow from the pattern."""
        return any(name in DROPOUT for name in self.unknown)

    @property
    def extras(self) -> dict[str, str]:
        """The keywords, with descriptions, that change the scores besides scale, softcap, bias and sinks."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ScoredCall(Call):
    """An attention whose queries, keys and values were captured, after rotation and with cached ones.

    `mask` is bool (True = may attend), or is added to the scores, or is an object of the implementation. `causal` hides later
    keys; query 0 is key 0. `sinks` are scores in the softmax that contribute no value, one per head or per query. `lse` is the
    log-sum-exp returned by the `kernel`, if any.
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
        """The device of the queries."""
        return self.q.device

    def cropped(self, queries: slice, keys: slice) -> ScoredCall:
        """The attention of some queries on some keys; a mask that is no tensor is not cropped."""
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
        """The fields of `Scores` that turn products of queries and keys into scores, except mask and bias."""
        return {"scale": self.scale, "softcap": self.softcap}

    @property
    def sink_scores(self) -> Float[Tensor, "_batch head _query"] | None:
        """The scores of sinks, with axes of 1 if batch and query do not matter."""
        return self.sinks if self.sinks is None or self.sinks.ndim == 3 else self.sinks.reshape(1, -1, 1)


@dataclass(frozen=True, kw_only=True)
class SoftmaxCall(Call):
    """An attention written out in code, captured at its softmax: the final `scores` and the `pattern`."""

    scores: Float[Tensor, "batch head query key"]
    pattern: Float[Tensor, "batch head query key"]

    def cropped(self, queries: slice, keys: slice) -> SoftmaxCall:
        """The attention of some queries on some keys."""
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
        """The device of the scores."""
        return self.scores.device


# ------------------------------------------------------------------------------------------- the arguments of a function


NEUTRAL = frozenset((
    "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "key", "labels",
    "layer_idx", "logits_to_keep", "max_length_k", "max_length_q", "module", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "query",
    "return_dict", "sliding_window", "training", "use_cache", "value",
))  # fmt: skip
"""Keywords of attention functions that are not captured and do not change the result, given the mask. `sliding_window` is
already in the mask. Source: transformers 5, integrations/."""
DROPOUT = frozenset(("dropout", "dropout_p"))
"""Keywords in `Call.unknown` that mean dropout."""
COMPUTED = frozenset(("is_causal", "position_bias", "s_aux", "scaling", "sinks", "softcap"))
"""Keywords that change the result and are captured."""


def unknown_keywords(arguments: dict[str, Any]) -> tuple[str, ...]:
    """The keywords that may change the result in an unknown way: neither known nor None nor False."""
    return tuple(
        sorted(
            name
            for name, value in arguments.items()
            if name not in NEUTRAL | COMPUTED and value is not None and value is not False
        )
    )


def seen_fields(
    module: nn.Module, arguments: dict[str, Any], z: Tensor, kernel: KernelWatch, level: InterceptionLevel
) -> dict[str, Any]:
    """The fields of `ScoredCall` for a call of an attention function with these `arguments`."""
    q, scaling, mask = arguments["query"], arguments.get("scaling"), arguments.get("attention_mask")
    is_causal = arguments.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    is_training = bool(arguments.get("dropout")) and (level == "registry" or module.training)
    return {
        "q": q,
        "k": arguments["key"],
        "v": arguments["value"],
        "z": z,
        "scale": float(q.shape[-1] ** -0.5 if scaling is None else scaling),
        "mask": mask,
        "causal": level == "registry" and mask is None and is_causal and q.shape[2] > 1,
        "softcap": arguments.get("softcap"),
        "bias": arguments.get("position_bias"),
        "sinks": _sinks(arguments),
        "lse": kernel.lse_of(q),
        "kernel": kernel.kernel or ("math" if level == "registry" else "eager"),
        "unknown": unknown_keywords(arguments) + (("dropout",) if is_training else ()),
    }


def _sinks(arguments: Mapping[str, Any]) -> Tensor | None:
    """The scores of sinks: one per head, or one per query, passed as a further key."""
    sinks = arguments.get("s_aux") if arguments.get("s_aux") is not None else arguments.get("sinks")
    return sinks.squeeze(-1) if isinstance(sinks, Tensor) and sinks.ndim == 4 else sinks
