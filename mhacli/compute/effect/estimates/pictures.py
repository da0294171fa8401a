"""What usual pictures of attention say of single weights, to be compared with what their removal changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.adapters.hf.capture import Call, captured
from mhacli.adapters.hf.captured_pattern import KnownMasks, as_attention, full_matrices
from mhacli.adapters.hf.inputs import outputs_of
from mhacli.adapters.hf.layer_names import LayerKey
from mhacli.compute.effect.metric import rank_correlation
from mhacli.compute.effect.parts import AttentionParts, by_input
from mhacli.compute.effect.removal import Removal
from mhacli.results.record.effect import Judgement

PICTURES = ("attention weight", "value-weighted attention", "attention rollout", "gradient × attention")


@dataclass
class _Layer:
    """Of one query: its weights, the values that they weigh, and its row of the rollout, None where that is not defined."""

    weights: Float[Tensor, "head key"]
    v: Float[Tensor, "head key d_v"]
    rollout: Float[Tensor, " key"] | None


@dataclass
class Pictures:
    """The weights of one query in every attention, and what is needed to picture them."""

    query: int
    layers: dict[LayerKey, _Layer] = field(default_factory=dict)
    _rollout: Float[Tensor, "query key"] | None = None

    def take(self, call: Call) -> None:
        """Keeps one attention of a pass."""
        if call.part != 0 or call.v is None or call.kind not in ("self", "decoder", "cross"):
            return
        real = torch.ones(1, call.shape[2], dtype=torch.bool, device=call.device)
        pattern = full_matrices(as_attention(call, real, KnownMasks()))["pattern"][0].double()
        rollout = None if call.kind == "cross" else self._roll(pattern.mean(dim=0))[self.query]
        v = call.v[0].double().repeat_interleave(pattern.shape[0] // call.v.shape[1], dim=0)
        self.layers[call.kind, call.layer] = _Layer(pattern[:, self.query], v, rollout)

    def _roll(self, mean: Float[Tensor, "query key"]) -> Float[Tensor, "query key"]:
        """Attention passed on from layer to layer, half of it along the residual stream. Source: Abnar and Zuidema 2020."""
        here = (mean + torch.eye(len(mean), dtype=mean.dtype, device=mean.device)) / 2
        self._rollout = here if self._rollout is None else here @ self._rollout
        return self._rollout

    def of_edge(
        self, removal: Removal, attention: AttentionParts, gradients: Mapping[LayerKey, Tensor]
    ) -> tuple[float | None, ...] | None:
        """What each of `PICTURES` says of an edge, None where it is not defined. None for an edge that has no weight."""
        layer, key, heads = self.layers[removal.layer], (removal.keys or (0,))[0], list(removal.heads)
        weights, v = layer.weights[heads, key], layer.v[heads, key]
        if not bool(weights.any()):
            return None
        projection, gradient = attention.projections.get(removal.layer), gradients.get(removal.layer)
        added = weighted = None
        if projection is not None:
            by_head = by_input(projection).double().reshape(len(layer.v), v.shape[1], -1)[heads]
            added = float((weights[:, None, None] * (v[:, None] @ by_head)).sum(dim=0).norm())
        if gradient is not None:
            weighted = abs(float((weights * (v * gradient[heads, self.query]).sum(dim=1)).sum()))
        return float(weights.mean()), added, None if layer.rollout is None else float(layer.rollout[key]), weighted


def judgements(
    model: nn.Module,
    attention: AttentionParts,
    keywords: Mapping[str, Tensor],
    edges: Sequence[tuple[Removal, float]],
    gradients: Mapping[LayerKey, Tensor],
) -> tuple[Judgement, ...]:
    """How well each picture ranks the edges of one query, of which the size of the change by their removal is known."""
    pictures = Pictures(edges[0][0].queries[0])
    with torch.no_grad(), captured(model, pictures.take, batch=1):
        outputs_of(model, keywords)
    rows = [(pictures.of_edge(edge, attention, gradients), abs(change)) for edge, change in edges]
    seen: list[tuple[Any, float]] = [(row, change) for row, change in rows if row is not None]
    judged = []
    for place, name in enumerate(PICTURES):
        pairs = [(row[place], change) for row, change in seen if row[place] is not None]
        correlation = rank_correlation(*zip(*pairs, strict=True)) if pairs else None
        judged.append(Judgement(name, correlation, len(pairs)))
    return tuple(judged)
