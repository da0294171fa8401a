"""The direct contributions of a model's parts to the target's logit, through the final norm with its scale frozen and the
language head (direct logit attribution).

Every part is measured separately, none as a remainder, so that comparing their sum with the logit is a test.
Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, "virtual weights and the residual stream".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.commands.effect.metric import Reading, Target, compared
from mhacli.commands.effect.parts import ModelParts, blocks_of, by_input
from mhacli.commands.effect.removal import Removal, StandIns
from mhacli.models.device_map import fetched
from mhacli.models.layer_names import LayerKey, is_numbered, kind_of
from mhacli.models.load import Loaded
from mhacli.record.checks import TOLERANCES
from mhacli.record.effect import DirectSum


@dataclass(frozen=True)
class DirectPaths:
    """The contribution to the metric per unit of each head's z at the position, and the sum over all parts."""

    heads: dict[LayerKey, Float[Tensor, "head d_v"]]
    sum: DirectSum

    def change(self, removals: Sequence[Removal], stand_ins: StandIns, position: int) -> float | None:
        """The change of the metric by removing heads if no later layer reacts. None for edges and unknown paths."""
        total = 0.0
        for removal in removals:
            if removal.keys is not None:
                return None
            if removal.layer[0] == "encoder" or removal.at not in (None, position):
                continue  # another position reaches this one only through later attention
            if removal.layer not in self.heads:
                return None
            for head in removal.heads:
                z = stand_ins.untouched[removal.layer][0, head, position].double()
                change = stand_ins.of(removal, head)[position].double() - z
                total += float(change @ self.heads[removal.layer][head])
        return total


def direct_paths(loaded: Loaded, parts: ModelParts, untouched: Reading, target: Target, position: int) -> DirectPaths:
    """The direct paths to the logit of a target, or to its difference from that of another token."""
    stream, head = _Stream(loaded.model, parts), _language_head(loaded.model, parts, untouched, target)
    final = stream.final_norm(untouched.hidden[0])
    heads, of_heads, biases, direction = {}, 0.0, head.constant, head.direction
    if final is not None:
        direction, biases = final.before(direction), biases + float(final.bias @ direction)
    for key, projection in parts.attention.projections.items():
        if key[0] == "encoder" or by_input(projection).shape[1] != len(direction):  # of another width than the stream
            continue
        norm, bias = stream.norm_behind(stream.names[id(projection)]), fetched(projection, "bias")
        z = parts.attention.z[key][0].double()
        here = (direction if norm is None else norm.before(direction)).to(z.device)
        heads[key] = (by_input(projection).double() @ here).reshape(z.shape[0], z.shape[2])
        of_heads += float((z[:, position] * heads[key]).sum())
        biases += 0.0 if bias is None else float(bias.double() @ here)
        biases += 0.0 if norm is None else float(norm.bias @ direction)
    others = [float(vector @ direction) for vector in stream.other_parts(len(direction))]
    terms = (float(stream.embedding(direction) @ direction), of_heads, sum(others), biases)
    assert untouched.logits is not None
    logit = float(compared(untouched.logits, target))
    tolerance = max(map(abs, (*terms, *others, logit))) * max(
        TOLERANCES[name].runs for name in (loaded.dtype, "float32")
    )
    residue = logit - sum(terms)
    return DirectPaths(heads, DirectSum(*terms, residue, tolerance, abs(residue) <= tolerance))


class _Head(NamedTuple):
    direction: Float[Tensor, " d_model"]
    constant: float


def _language_head(model: Any, parts: ModelParts, untouched: Reading, target: Target) -> _Head:
    """The language head as a linear map to the metric. Its factor is measured, because some models divide their logits."""
    head, logits = model.get_output_embeddings(), untouched.logits
    assert logits is not None
    raw = parts.vectors.leaving[next(name for name, module in model.named_modules() if module is head)]
    factor = float(logits[0].to(raw.device) @ raw[: logits.shape[1]] / (raw @ raw))
    bias = fetched(head, "bias")
    constant = 0.0 if bias is None else float(compared(bias.double()[None], target))
    rows = fetched(head)[[target.id, *([] if target.versus is None else [target.versus])]].to(raw)
    return _Head((rows[0] - rows[1:].sum(dim=0)) * factor, constant * factor)


class FrozenNorm(NamedTuple):
    """A norm with the scale that it has for one vector, as a linear map: x ↦ gain · x + bias; if `is_centred`, the mean of x is
    subtracted first."""

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    is_centred: bool

    def before(self, direction: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        """The direction before the norm that corresponds to `direction` after it."""
        scaled = direction * self.gain
        return scaled - scaled.mean() if self.is_centred else scaled


def frozen_norm(
    norm: nn.Module, x: Float[Tensor, " d_model"], y: Float[Tensor, " d_model"], like: Tensor
) -> FrozenNorm:
    """The linear map of a norm that computed `y` from `x`, found by running the norm on test vectors.

    Its bias is its output for 0. Its output for alternating signs, far from 0, is proportional to its weights; the factor follows
    from `x` and `y`. It is centred if adding a constant changes nothing.
    """

    def ask(vector: Tensor) -> Tensor:
        answer: Tensor = norm(vector.to(like.dtype)[None, None])[0, 0]
        return answer.double()

    signs = torch.ones_like(x)
    signs[1::2] = -1.0
    signs -= signs.mean()
    bias = ask(torch.zeros_like(x))
    weight = (ask(signs) - bias) / signs
    is_centred = bool((ask(signs + 1) - bias - weight * signs).norm() < 0.5 * weight.norm())
    part = weight * (x - x.mean() if is_centred else x)
    return FrozenNorm(weight * ((y - bias) @ part / (part @ part)), bias, is_centred)


class _Stream:
    """The residual stream at the position: the modules that write to it, and the norms after them."""

    def __init__(self, model: Any, parts: ModelParts) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self._model, self._vectors = model, parts.vectors
        self._taken = {
            *parts.attention.names.values(),
            *(self.names[id(p)] for p in parts.attention.projections.values()),
        }
        is_pair = bool(model.config.is_encoder_decoder)
        self._blocks = [name for name in blocks_of(model) if kind_of(name, is_pair=is_pair) != "encoder"]

    def embedding(self, like: Tensor) -> Tensor:
        """The input of the first block; zeros if it is unknown or has another width than the stream."""
        first = next((vector for name, vector in self._vectors.entering.items() if name in self._blocks), None)
        return torch.zeros_like(like) if first is None or first.shape != like.shape else first

    def final_norm(self, hidden: Tensor) -> FrozenNorm | None:
        """The norm whose output enters the language head, if one does."""
        return next(
            (
                self._frozen(name)
                for name in self._norms
                if torch.equal(self._vectors.leaving[name], hidden.to(self._vectors.leaving[name].device))
            ),
            None,
        )

    def norm_behind(self, name: str) -> FrozenNorm | None:
        """The norm that reads the output of a module before it is added to the stream, if one does."""
        norm = self._reader(name)
        return None if norm is None else self._frozen(norm)

    def other_parts(self, d_model: int) -> Iterator[Tensor]:
        """The contributions of blocks other than the output projections of attention: of the largest modules that have matrices
        and no attention, each through the norm after it."""
        for block in self._blocks:
            for name in self._writers(block):
                written = self._vectors.leaving[self._reader(name) or name]
                if len(written) == d_model:
                    yield written

    def _writers(self, outer: str) -> Iterator[str]:
        for short, module in self._model.get_submodule(outer).named_children():
            name = f"{outer}.{short}"
            if name in self._taken:
                continue
            if is_numbered(name) or name not in self._vectors.leaving or self._has_attention(name):
                yield from self._writers(name)
            elif any(parameter.ndim > 1 for parameter in module.parameters()):
                yield name

    def _has_attention(self, name: str) -> bool:
        return any(taken.startswith(f"{name}.") for taken in self._taken)

    @cached_property
    def _norms(self) -> list[str]:
        """The modules without matrices that change their input and keep its size."""
        entering, leaving = self._vectors.entering, self._vectors.leaving
        return [
            name
            for name, module in self._model.named_modules()
            if name in entering and name in leaving and all(parameter.ndim < 2 for parameter in module.parameters())
            if entering[name].shape == leaving[name].shape and not torch.equal(entering[name], leaving[name])
        ]

    def _reader(self, name: str) -> str | None:
        written = self._vectors.leaving[name]
        return next((norm for norm in self._norms if torch.equal(self._vectors.entering[norm], written)), None)

    def _frozen(self, name: str) -> FrozenNorm:
        vectors, like = self._vectors, next(self._model.parameters())
        return frozen_norm(self._model.get_submodule(name), vectors.entering[name], vectors.leaving[name], like)
