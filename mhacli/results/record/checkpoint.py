"""What a record says of a checkpoint: the model, and every attention of it that was inspected. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mhacli.results.record.measures import SelfCheck
from mhacli.results.record.tiled import Survey
from mhacli.spec.tokens import TokenSequence

AttentionKind = Literal["self", "encoder", "decoder", "cross"]
"""Whose tokens an attention reads: those of the text itself; in a model of two halves the encoder's, the decoder's own, or from
the decoder those of the encoder."""


LayerChoice = tuple[AttentionKind | None, int]
"""A layer that is asked for: of which kind, None for any, and its number."""

_Texts = tuple[TokenSequence, ...]


def texts_of(kind: AttentionKind, sequences: _Texts, context: _Texts | None) -> tuple[_Texts, _Texts]:
    """The texts whose tokens are the queries of an attention, and those whose tokens are its keys; `context` is what an encoder
    reads."""
    encoder = context or sequences
    return encoder if kind == "encoder" else sequences, encoder if kind in ("encoder", "cross") else sequences


def kinds_of(layers: tuple[LayerChoice, ...] | None, *, is_pair: bool) -> tuple[AttentionKind, ...]:
    """The kinds of attention among the layers that are asked for (None: all), in the order in which they run."""
    known: tuple[AttentionKind, ...] = ("encoder", "decoder", "cross") if is_pair else ("self",)
    return tuple(own for own in known if layers is None or any(kind in (None, own) for kind, _ in layers))


@dataclass(frozen=True)
class LayerWithout:
    """A layer that has no attention matrix, and what the checkpoint calls its type."""

    layer: int
    type: str


@dataclass(frozen=True)
class Generated:
    """Tokens that the model made itself, greedily: each sequence's are those from `prompt_lens` on.

    `repeated` says of how many of them one pass over the whole text gives the same: all but those where rounding decides.
    """

    prompt_lens: tuple[int, ...]
    n_tokens: int
    repeated: int


@dataclass(frozen=True)
class Model:
    """The checkpoint that was inspected, and which of its ways of computing attention.

    `identical_outputs` says whether the first `compared_len` tokens gave the same bits without inspection; None where that
    was not tried. `implementation` is transformers' word; `path_inspected` what that came to. `without` are the layers that
    have no attention matrix.
    """

    path: str
    revision: str | None
    family: str
    architecture: str
    implementation: str
    path_inspected: str
    identical_outputs: bool | None
    compared_len: int
    n_layers: int
    n_parameters: int
    n_vocabulary: int
    positions: str
    max_positions: int | None
    dtype: str
    without: tuple[LayerWithout, ...] = ()
    generated: Generated | None = None


@dataclass(frozen=True)
class InspectedLayer:
    """One attention of a checkpoint.

    `name` is its module's, `captured_by` how it was seen: "registry", "module", "sdpa" or "softmax" (`Rung` in
    `mhacli.adapters.hf.capture`).
    `mask` says in words what a query sees; `bias` whether something was added to the scores, `sinks` whether learned sinks
    take a share. `verified`: the pattern times the values is what the layer returned, within the self-check's tolerance, and
    nothing was passed that is not understood; else `unverified` says why not. Where a module computes several attentions in one
    layer, `call` counts them from 1, and the later ones say it in their `name`. `extras` has what else changes the scores, by the
    keyword of the attention function, in words.
    """

    layer: int
    name: str
    kind: AttentionKind
    captured_by: str
    kernel: str
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_v: int
    scale: float | None
    softcap: float | None
    mask: str
    bias: bool
    sinks: bool
    verified: bool
    unverified: tuple[str, ...]
    self_check: SelfCheck
    survey: Survey
    call: int = 1
    extras: Mapping[str, str] = field(default_factory=dict, metadata={"omit_empty": True})

    @property
    def departures(self) -> Mapping[str, str]:
        """What departs from plain attention in the scores, each in words."""
        known = {
            "softcap": "" if self.softcap is None else f"softcap {self.softcap:g}",
            "bias": "a bias on the scores" if self.bias else "",
            "sinks": "learned sinks, which entropy counts as one more key" if self.sinks else "",
        }
        return known | dict(self.extras)

    @property
    def label(self) -> str:
        """`layer 5`, or with the kind where a model has several: `decoder layer 5`; and which call, if not the first."""
        said = f"layer {self.layer}" if self.kind == "self" else f"{self.kind} layer {self.layer}"
        return said if self.call == 1 else f"{said}, call {self.call}"


@dataclass(frozen=True)
class SpanTokens:
    """A named part of the texts: for each sequence the indices of its tokens."""

    name: str
    tokens: tuple[tuple[int, ...], ...]
