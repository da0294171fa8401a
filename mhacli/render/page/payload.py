"""What a page's script reads: tokens, heads and maps as one JSON text, schema `mha.page/1`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mhacli.render.base.cells import DECADES
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import token_text
from mhacli.render.base.options import Scale
from mhacli.render.heads.drawing import kv_head_of
from mhacli.render.heads.head_map import DrawableHead
from mhacli.render.page.budget import Maps
from mhacli.render.page.html import Html
from mhacli.spec.tokens import TokenSequence

SCHEMA = "mha.page/1"


@dataclass(frozen=True)
class View:
    """What a page draws: heads of sequences, on which scale, with sinks or without; `quantised` says in words what coarse
    codes did to the shares, None where they are exact. `begin` is where the head stands that is seen first."""

    heads: tuple[DrawableHead, ...]
    sequences: tuple[int, ...]
    scale: Scale
    hide_sinks: bool
    quantised: str | None = None
    begin: int = 0

    @property
    def bits(self) -> int:
        """How many bits a share has in the record: with more than 32 the page rounds it."""
        shares = (head.record.arrays.get("pattern", head.record.arrays.get("map")) for head in self.heads)
        return max((8 * array.itemsize for array in shares if array is not None), default=32)


def payload(view: View, maps: Maps) -> Html:
    """The text of the script element that holds it. No character of it ends the element, or is not ASCII."""
    texts: dict[tuple[str, ...], int] = {}
    layers = {id(head.record): head for head in view.heads}
    places = {key: place for place, key in enumerate(layers)}
    tops = {"largest": maps.top(hide_sinks=False), "largest_without_sinks": maps.top(hide_sinks=True)}
    document = {
        "schema": SCHEMA,
        "layers": [_layer(head, view.sequences, texts) for head in layers.values()],
        "texts": list(texts),
        "sequences": len(view.sequences),
        "numbers": view.sequences,
        "begin": view.begin,
        "heads": [_head(head, places[id(head.record)]) for head in view.heads],
        "masks": [asdict(mask) for mask in maps.masks],
        "scale": {"kind": view.scale, "decades": DECADES, **tops},
        "hide_sinks": view.hide_sinks,
        "bits": view.bits,
        "quantised": _quantised(view, maps),
    }
    known = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return script_safe(f'{known[:-1]},"maps":[{",".join(one.json for one in maps.maps)}]}}')


def script_safe(text: str) -> Html:
    """JSON in which nothing begins a tag or a comment: the same value to whoever reads it."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)


def _layer(head: DrawableHead, sequences: Sequence[int], texts: dict[tuple[str, ...], int]) -> Mapping[str, Any]:
    def places(family: Sequence[TokenSequence]) -> list[int]:
        return [texts.setdefault(_labels(family[b]), len(texts)) for b in sequences]

    return {
        "label": "" if head.layer is None else head.layer.label,
        "verified": head.layer is None or head.layer.verified,
        "queries": places(head.record.sequences),
        "keys": places(head.record.keys),
    }


def _labels(sequence: TokenSequence) -> tuple[str, ...]:
    return tuple(token_text(sequence, place) for place in range(len(sequence.tokens)))


def _head(head: DrawableHead, layer: int) -> Mapping[str, Any]:
    said = head.statistics
    return {
        "layer": layer,
        "head": head.head,
        "label": head.label,
        "kv": kv_head_of(head.record, head.head),
        "kind": None if said is None else said.kind,
        "sign": "" if said is None else KIND_SIGNS[said.kind][0],
        "certainty": None if said is None else said.certainty,
        "entropy": None if said is None else said.entropy,
    }


def _quantised(view: View, maps: Maps) -> Mapping[str, Any] | None:
    if view.quantised is None:
        return None
    return {"code": maps.fineness.code, "error": maps.error, "block": maps.fineness.factor, "text": view.quantised}
