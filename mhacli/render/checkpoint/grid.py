"""All heads of all layers at a glance: a sign and a colour for the kind of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from mhacli.render.base.colours import EMPTY, KIND_SIGNS
from mhacli.render.base.format import fitted, flowing
from mhacli.render.base.options import Screen
from mhacli.render.base.selection import LayerView, short_name
from mhacli.results.record.heads import HeadStatistics, Kind
from mhacli.results.record.record import InspectedLayer, Record
from mhacli.text.escape import visible

_CALM = ("mixed", "uniform")
"""Kinds that say little: drawn so that the others stand out."""
_NOT_LOOKED_AT = " "
_STEP, _FEW = 5, 3


def grid(record: Record, layers: Sequence[LayerView], screen: Screen) -> RenderableType:
    """A row per layer, a column per head, the layers of each kind together; below, how many heads there are of each kind."""
    said = [layer.inspected for layer in layers]
    n_heads = max(layer.n_heads for layer in said)
    label = max(cell_len(name) for name in ("layer", *(short_name(layer, record.layers) for layer in said))) + 1
    room = screen.width - label - 1
    width = next((w for w in (len(str(n_heads - 1)) + 1, 2) if n_heads * w <= room), 2)
    n_panels = -(-n_heads // max(1, room // width))
    size = -(-n_heads // n_panels)
    panels: list[RenderableType] = []
    for start in range(0, n_heads, size):
        columns = range(start, min(n_heads, start + size))
        lines = [_axis(columns, label, width)]
        for name, row in _rows(record, layers):
            if isinstance(row, str):
                instead = fitted(f"– {row}", max(1, room))
                lines.append(Text(f"{name:>{label - 1}}  {instead}", style="dim"))
            else:
                lines.append(_row(row, name, columns, label, width))
        panels.append(Text("\n").join(lines))
    return Group(*panels, _legend(record, [head for layer in layers for head in layer.record.heads], screen))


def _rows(record: Record, layers: Sequence[LayerView]) -> Iterator[tuple[str, LayerView | str]]:
    """Names of rows with their layers, and where a layer has no attention what it has instead, in the order of a stack."""
    missing = [] if record.model is None else [*record.model.without]
    for kind in dict.fromkeys(layer.inspected.kind for layer in layers):
        rows: list[tuple[int, str, LayerView | str]] = [
            (layer.inspected.layer, short_name(layer.inspected, record.layers), layer)
            for layer in layers
            if layer.inspected.kind == kind
        ]
        if kind != "encoder" and len(layers) == len(record.layers):
            rows += [(without.layer, str(without.layer), visible(without.type)) for without in missing]
            missing = []
        for _, name, row in sorted(rows, key=lambda row: row[0]):
            yield name, row


def _axis(columns: range, label: int, width: int) -> Text:
    """The numbers of the heads, those that fit."""
    axis = [" "] * (len(columns) * width + width)
    free = 0
    for place, head in enumerate(columns):
        number, at = str(head), place * width
        is_round = width > len(str(columns[-1])) or head % _STEP == 0
        if at >= free and (place == 0 or is_round):
            axis[at : at + len(number)] = number
            free = at + len(number) + 1
    return Text(f"{'layer':>{label - 1}}  {''.join(axis).rstrip()}", style="dim")


def _row(layer: LayerView, name: str, columns: range, label: int, width: int) -> Text:
    is_sure = layer.inspected.verified
    line = Text(f"{name:>{label - 1}}", style="" if is_sure else "bold red")
    line.append(" " if is_sure else "!", style="bold red").append(" ")
    kinds = {head.head: head.kind for head in layer.record.heads}
    for head in columns:
        sign, style = _sign(kinds[head]) if head in kinds else (_NOT_LOOKED_AT, Style.null())
        line.append(sign, style=style).append(" " * (width - 1))
    return line


def _sign(kind: Kind) -> tuple[str, Style]:
    sign, colour = KIND_SIGNS[kind]
    return sign, EMPTY if kind in _CALM else Style(color=colour)


def _legend(record: Record, heads: Sequence[HeadStatistics], screen: Screen) -> Text:
    """The signs that occur, how many heads are of each kind, and which they are where they are few."""
    names: Mapping[tuple[int, str], InspectedLayer] = {(layer.layer, layer.name): layer for layer in record.layers}
    parts: list[Text] = []
    unit = "layer.head "
    for kind in KIND_SIGNS:
        own = [head for head in heads if head.kind == kind]
        if not own:
            continue
        sign, style = _sign(kind)
        part = Text().append(sign, style=style).append(f" {kind} {len(own)}")
        if len(own) <= _FEW and kind not in _CALM:
            listed = (f"{short_name(names[head.layer, head.attention], record.layers)}.{head.head}" for head in own)
            part.append(f" ({unit}{', '.join(listed)})", style="dim")
            unit = ""  # told once
        parts.append(part)
    return flowing(parts, screen.width)
