"""The contents of every picture of effects: a row of heads for each layer, the texts that queries read, and the scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mhacli.record.effect import Effect, EffectSummary
from mhacli.record.record import InspectedLayer, Record, texts_of
from mhacli.render.base.cells import FORBIDDEN, change_levels
from mhacli.render.base.doc import shown
from mhacli.render.base.format import number_text
from mhacli.render.base.selection import short_name
from mhacli.text.escape import token_label, visible
from mhacli.text.tokens import AttentionKind

_KINDS = {"class": "the class ", "tag": "the tag ", "span": "the answer "}
"""What a target is that is no token."""
AT_POSITION = ("token", "tag", "vector")
"""What is measured at one position."""


@dataclass(frozen=True)
class EffectRow:
    """The heads of a layer with their effects, None for a head that was not removed; or the `tokens` of a text, each with the
    effect of the edge to it."""

    name: str
    effects: tuple[Effect | None, ...]
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class EffectMap:
    """The rows and texts of a record with effects, with a scale from `-largest`, or 0 if changes have no sign, to `largest`."""

    record: Record
    summary: EffectSummary

    @staticmethod
    def of(record: Record) -> EffectMap:
        """The map of a record with effects."""
        assert record.effect is not None, "a record with effects has a summary"
        return EffectMap(record, record.effect)

    @cached_property
    def largest(self) -> float:
        """The end of the scale."""
        changes = (self.summary.change_of(effect) for effect in self.record.effects)
        return max((abs(change) for change in changes if change is not None), default=0.0)

    @property
    def has_signs(self) -> bool:
        """Whether a change can be below 0."""
        return self.summary.metric == "d_logit"

    @property
    def low(self) -> str:
        """The lower end of the scale in words."""
        return f"-{number_text(self.largest)}" if self.has_signs and self.largest else "0"

    @property
    def meaning(self) -> str:
        """The meaning of a change."""
        if self.has_signs:
            at = f" at {self.summary.position}" if self.summary.measured in AT_POSITION else ""
            return f"change of {measured_words(self.summary)}{at} · negative: what was removed supports the target"
        return "change of the output by the removal, relative to its length"

    def level(self, effect: Effect | None) -> int:
        """The level of a change, 0 … 510; `FORBIDDEN` for a head that was not removed."""
        change = None if effect is None else self.summary.change_of(effect)
        return FORBIDDEN if change is None else int(change_levels(np.array(change), self.largest))

    def word(self, effect: Effect | None) -> str:
        """A change in five columns: `-1.20`, `.31`, `0`; empty for a head that was not removed."""
        change = None if effect is None else self.summary.change_of(effect)
        return "" if change is None else shown(change, "brief")

    @cached_property
    def rows(self) -> tuple[EffectRow, ...]:
        """A row for each layer with heads removed one at a time; a layer of mha has no name."""
        by_head = {(e.kind, e.layer, e.head): e for e in self.record.effects if e.removed == "head"}
        if by_head and not self.record.layers:
            kind = self.record.effects[0].kind
            return (EffectRow("", tuple(by_head.get((kind, 0, h)) for h in range(self.record.config.n_heads))),)
        layers = [layer for layer in self.record.layers if any(key[:2] == (layer.kind, layer.layer) for key in by_head)]
        return tuple(
            EffectRow(
                short_name(layer, self.record.layers),
                tuple(by_head.get((layer.kind, layer.layer, head)) for head in range(layer.n_heads)),
            )
            for layer in layers
        )

    @property
    def n_columns(self) -> int:
        """The heads of the widest row."""
        return max((len(row.effects) for row in self.rows), default=0)

    @cached_property
    def texts(self) -> tuple[EffectRow, ...]:
        """The edges of each head, or of each layer if they were removed from all its heads together."""
        grouped: dict[str, list[Effect]] = {}
        for effect in self.record.effects:
            if effect.removed == "edge":
                grouped.setdefault(removal_name(effect, self.record), []).append(effect)
        return tuple(EffectRow(name, tuple(edges), tuple(self._tokens(edges))) for name, edges in grouped.items())

    def _tokens(self, edges: list[Effect]) -> Iterator[str]:
        _, keys = texts_of(edges[0].kind, self.record.sequences, self.record.context)
        yield from (token_label(keys[0].tokens[edge.key or 0]) for edge in edges)


def measured_words(summary: EffectSummary) -> str:
    """The name of the measured logit, or difference of two logits."""
    if summary.measured in ("score", "metric"):
        return f"the {summary.measured}"
    minus = "" if summary.versus is None else f" minus that of “{token_label(summary.versus)}”"
    return f"the logit of {_KINDS.get(summary.measured, '')}“{token_label(summary.target or '')}”{minus}"


def removal_name(effect: Effect, record: Record) -> str:
    """The name of a removal, such as `5.1`; `head 1` in a layer of mha."""
    if effect.removed == "spans":
        return " → ".join(map(visible, effect.spans))
    if effect.removed == "heads":
        kinds = effect.kinds or (effect.kind,) * len(effect.heads)
        pairs = zip(kinds, effect.heads, strict=True)
        return " + ".join(_head_name(kind, layer, head, record) for kind, (layer, head) in pairs)
    if effect.layer is not None and effect.head is not None:
        return "head " * (not record.layers) + _head_name(effect.kind, effect.layer, effect.head, record)
    layer = layer_of(record, effect.kind, effect.layer)
    return "all heads" if layer is None else f"layer {short_name(layer, record.layers)}"


def _head_name(kind: AttentionKind, number: int, head: int, record: Record) -> str:
    """`5.1`, `cross 5.1`; `1` in a layer of mha."""
    layer = layer_of(record, kind, number)
    return str(head) if layer is None else f"{short_name(layer, record.layers)}.{head}"


def layer_of(record: Record, kind: AttentionKind, number: int | None) -> InspectedLayer | None:
    """The layer of a checkpoint, None for a layer of mha."""
    return next((layer for layer in record.layers if (layer.kind, layer.layer) == (kind, number)), None)
