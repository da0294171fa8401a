"""One attention of a checkpoint, as it was called: what went in, what came out, and which way it was seen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mhacli.results.record.checkpoint import AttentionKind

Rung = Literal["registry", "module", "sdpa", "softmax"]
"""How a call was seen, the surest way first: by the function that transformers' registry holds for the implementation in use;
by the modelling file's own `eager_attention_forward`; by torch's `scaled_dot_product_attention`; or only by its softmax."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention: the `name` of its module, its place in the pass, and how it was seen.

    `layer` is the number of its layer. A module may compute several attentions in one layer: `part` counts those before.
    `v` are the values and `z` what it gave, None where the product of the pattern and the values was not found. `unknown`
    names the keywords that the function got and whose meaning is not known here.
    """

    name: str
    layer: int
    kind: AttentionKind
    part: int
    rung: Rung
    implementation: str
    v: Float[Tensor, "batch kv_head key d_v"] | None = None
    z: Float[Tensor, "batch head query d_v"] | None = None
    unknown: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What tells it from the others of its layer: the name of its module, and which of the module's attentions it is."""
        return self.name if self.part == 0 else f"{self.name}, call {self.part + 1}"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)` of the pattern."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ScoredCall(Call):
    """An attention whose queries, keys and values were seen, after any rotation and from any cache.

    `mask` is bool (True = may attend) or added to the scores; `causal` hides later keys, query 0 being key 0. `sinks` are
    scores that take part in the softmax and give nothing, one of each head or of each query. `lse` is the log-sum-exp that the
    `kernel` told, if any.
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
    def sink_scores(self) -> Float[Tensor, "_batch head _query"] | None:
        """The scores of sinks, with an axis of 1 where batch and query do not matter."""
        return self.sinks if self.sinks is None or self.sinks.ndim == 3 else self.sinks.reshape(1, -1, 1)


@dataclass(frozen=True, kw_only=True)
class SoftmaxCall(Call):
    """An attention written out by hand, of which softmax was seen: `scores` with everything added, and the `pattern`."""

    scores: Float[Tensor, "batch head query key"]
    pattern: Float[Tensor, "batch head query key"]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)`."""
        return tuple(self.scores.shape)


NEUTRAL = frozenset((
    "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "key", "labels",
    "layer_idx", "logits_to_keep", "max_length_k", "max_length_q", "module", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "query",
    "return_dict", "sliding_window", "training", "use_cache", "value",
))  # fmt: skip
"""What an attention function takes besides what is captured, and that does not change what it computes beside its mask.
`sliding_window` is in the mask already, where the implementation takes one. Source: transformers 5, integrations/."""
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


_FUSED = re.compile(r"_scaled_dot_product_(?:fused_)?(\w+?)_?attention(?:_for_cpu|_overrideable)?$")


class KernelWatch(TorchDispatchMode):
    """Sees which of torch's kernels computed an attention, and takes the log-sum-exp that it gives besides."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernel: str | None = None
        self.lse: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, and looks at it if it is an attention."""
        result = func(*args, **(kwargs or {}))
        found = _FUSED.search(func.overloadpacket.__name__)
        if found is not None:
            self.kernel = found[1]
            lse = result[1] if isinstance(result, tuple) and len(result) > 1 else None
            is_lse = isinstance(lse, Tensor) and lse.ndim == 3 and lse.numel() > 0
            self.lse = lse if is_lse and found[1] != "math" else None
        return result

    def lse_of(self, q: Float[Tensor, "batch head query d_head"]) -> Float[Tensor, "batch head query"] | None:
        """The log-sum-exp of these queries. None where the kernel gave none, or rounded it as its 16-bit inputs are."""
        if self.lse is None or q.dtype not in (torch.float32, torch.float64):
            return None
        lse = self.lse[..., : q.shape[2]]
        return lse if tuple(lse.shape) == tuple(q.shape[:3]) else None
