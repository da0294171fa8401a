"""Common pictures of attention as ratings of heads and single weights, for comparison with the effects of removing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.commands.effect.metric import rank_correlation
from mhacli.commands.effect.parts import AttentionParts, by_input
from mhacli.commands.effect.removal import Removal
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.captured_pattern import KnownMasks, as_attention, full_matrices
from mhacli.models.inputs import outputs_of
from mhacli.models.layer_names import LayerKey
from mhacli.record.effect import Judgement

PICTURES = ("attention weight", "value-weighted attention", "attention rollout", "gradient × attention")


@dataclass
class _Layer:
    """The weights of one query, the values, and its row of the rollout, None if that is not defined."""

    weights: Float[Tensor, "head key"]
    v: Float[Tensor, "head key d_v"]
    rollout: Float[Tensor, " key"] | None


_Ratings = tuple[float | None, ...]
"""The rating of a removal by each of `PICTURES`, None if not defined."""


@dataclass
class Pictures:
    """The ratings of removals by pictures of attention: of edges from `query`, or of heads if that is None."""

    query: int | None
    attention: AttentionParts
    gradients: Mapping[LayerKey, Tensor]
    layers: dict[LayerKey, _Layer] = field(default_factory=dict)
    largest: dict[LayerKey, Float[Tensor, "head query"]] = field(default_factory=dict)
    _rollout: Float[Tensor, "query key"] | None = None

    def take(self, call: Call) -> None:
        """Stores the numbers of one attention that the pictures need."""
        key = (call.kind, call.layer)
        if call.part != 0 or call.v is None or key not in self.attention.z:
            return
        if self.query is not None and call.kind == "encoder":  # its queries are those of another text
            return
        real = torch.ones(1, call.shape[2], dtype=torch.bool, device=call.device)
        pattern = full_matrices(as_attention(call, real, KnownMasks()))["pattern"][0].double()
        if self.query is None:
            self.largest[key] = pattern.amax(dim=-1)
            return
        rollout = None if call.kind == "cross" else self._roll(pattern.mean(dim=0))[self.query]
        v = call.v[0].double().repeat_interleave(pattern.shape[0] // call.v.shape[1], dim=0)
        self.layers[key] = _Layer(pattern[:, self.query], v, rollout)

    def _roll(self, mean: Float[Tensor, "query key"]) -> Float[Tensor, "query key"]:
        """Attention passed on from layer to layer, half of it along the residual stream. Source: Abnar and Zuidema 2020."""
        here = (mean + torch.eye(len(mean), dtype=mean.dtype, device=mean.device)) / 2
        self._rollout = here if self._rollout is None else here @ self._rollout.to(here.device)
        return self._rollout

    def of_edge(self, removal: Removal) -> _Ratings | None:
        """The ratings of an edge, None for one without weight."""
        layer, key, heads = self.layers[removal.layer], (removal.keys or (0,))[0], list(removal.heads)
        weights, v = layer.weights[heads, key], layer.v[heads, key]
        if not bool(weights.any()):
            return None
        by_head, gradient = self._projection(removal.layer), self.gradients.get(removal.layer)
        weighted = weights[:, None] * v
        return (
            float(weights.mean()),
            None if by_head is None else float((weighted[:, None] @ by_head[heads]).sum(dim=0).norm()),
            None if layer.rollout is None else float(layer.rollout[key]),
            None if gradient is None else abs(float((weighted * gradient[heads, self.query]).sum())),
        )

    def of_head(self, removal: Removal) -> _Ratings:
        """The ratings of a head at the positions where it is removed. Rollout averages over heads and has no rating for one.

        Source: Voita et al. 2019 for the largest weight of each query, Michel et al. 2019 for the gradient."""
        places = slice(None) if removal.at is None else slice(removal.at, removal.at + 1)
        by_head, gradient = self._projection(removal.layer), self.gradients.get(removal.layer)
        (head,) = removal.heads
        z = self.attention.z[removal.layer][0, head, places].double()
        return (
            float(self.largest[removal.layer][head, places].mean()),
            None if by_head is None else float((z @ by_head[head]).norm(dim=1).mean()),
            None,
            None if gradient is None else abs(float((z * gradient[head, places]).sum())),
        )

    def _projection(self, layer: LayerKey) -> Float[Tensor, "head d_v d_model"] | None:
        """The rows of the output projection by head, None if it is not known."""
        projection = self.attention.projections.get(layer)
        if projection is None:
            return None
        _, n_heads, _, d_v = self.attention.z[layer].shape
        return by_input(projection).double().reshape(n_heads, d_v, -1)


def judgements(
    model: nn.Module,
    attention: AttentionParts,
    keywords: Mapping[str, Tensor],
    removals: Sequence[tuple[Removal, float]],
    gradients: Mapping[LayerKey, Tensor],
) -> tuple[Judgement, ...]:
    """The rank correlation of each picture with the known effects of heads, or of edges of one query."""
    are_heads = removals[0][0].keys is None
    pictures = Pictures(None if are_heads else removals[0][0].queries[0], attention, gradients)
    with torch.no_grad(), captured(model, pictures.take, batch=1):
        outputs_of(model, keywords)
    rate = pictures.of_head if are_heads else pictures.of_edge
    rows = [(rate(removal), abs(change)) for removal, change in removals]
    rated = [(row, change) for row, change in rows if row is not None]
    judged = []
    for place, name in enumerate(PICTURES):
        pairs = [(rating, change) for row, change in rated if (rating := row[place]) is not None]
        correlation = rank_correlation(*zip(*pairs, strict=True)) if pairs else None
        judged.append(Judgement(name, correlation, len(pairs)))
    return tuple(judged)
