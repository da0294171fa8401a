"""The output of `mha diff` of two models: where they part in a sentence, and a grid of blocks × places, where it grows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.commands.diff.result import CAUSES, SITE_NAMES, ModelDiff, part_name
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import table
from mhacli.text.escape import visible

_MOST_UNMATCHED = 6
_SHORT = {
    "scores": "score",
    "output": "out",
    "residual": "sum",
    "q_rotated": "q′",
    "k_rotated": "k′",
    "output_norm": "norm",
    "q_norm": "q norm",
    "k_norm": "k norm",
}


def model_diff_view(d: ModelDiff, screen: Screen, *, everything: bool = False) -> RenderableType:
    """The complete output."""
    colour = "bold green" if d["verdict"] == "agree" else "bold red"
    sides = [" ".join([d[side], *d["dtypes"][n : n + 1]]) for n, side in enumerate("ab")]
    names = Text(f"A = {visible(sides[0])} · B = {visible(sides[1])}", style="bold")
    notes = [Text(visible(note), style="yellow") for note in d["notes"]]
    return Group(
        Text(visible(d["summary"]), style=colour),
        names,
        *notes,
        Text(),
        *_grid(d, screen),
        *_table(d, screen, everything),
    )


def _grid(d: ModelDiff, screen: Screen) -> Iterator[RenderableType]:
    """The blocks in rows, their places in columns, shaded by how far differences are above rounding."""
    cells: dict[tuple[str, tuple[str, str]], float] = {}
    for place in d["places"]:
        if place["layer"] is not None:
            row = f"{place['stack'] or ''} {place['layer']}".strip()
            cells[row, (place["part"], place["site"])] = _decades(place)
    if not cells:
        return
    rows, columns = (
        [*dict.fromkeys(row for row, _ in cells)],
        [key for key in CAUSES if any(key == c for _, c in cells)],
    )
    values = np.array([[cells.get((row, key), 0.0) for key in columns] for row in rows])
    grid = Grid(
        title="how far each place is beyond rounding",
        values=values,
        allowed=np.array([[(row, key) in cells for key in columns] for row in rows]),
        rows=rows,
        columns=["mlp" if (part, site) == ("mlp", "output") else _SHORT.get(site, site) for part, site in columns],
        top=max(1.0, float(values.max())),
        corner="layer ",
        unit="number",
        meaning=f"powers of ten of relative difference ÷ rounding; beyond rounding from {math.log10(d['times_rounding']):.1f} on",
    )
    yield from grids([grid], screen, form="shades")
    yield Text()


def _decades(place: Mapping[str, Any]) -> float:
    """By how many powers of ten a difference is larger than rounding, 0 if it is not."""
    relative = place["relative"]
    return 12.0 if relative is None else max(0.0, math.log10(max(relative, 1e-300) / place["rounding"]))


def _table(d: ModelDiff, screen: Screen, everything: bool) -> Iterator[RenderableType]:
    """The first place and those outside of blocks, with `everything` all places; and what is unmatched."""
    places = d["places"]
    first = [place for place in places if place["beyond"] and not place["healed"]][:1]
    some = [place for place in places if place["layer"] is None or place in first]
    columns: list[Column[Mapping[str, Any]]] = [
        Column(heading="place", value=_name, style=lambda row: "red" * (row["beyond"] and not row["healed"]), least=34),
        Column(heading="relative", value=lambda row: row["relative"], unit="error"),
        Column(heading="rounding", value=lambda row: row["rounding"], unit="error"),
        Column(heading="largest", value=lambda row: row["largest"], unit="number", drop=1),
        Column(heading="module in A", value=lambda row: visible(row["name_a"]), drop=2),
    ]
    n_more = len(places) - len(some)
    yield from (
        ()
        if not places
        else table(
            Table(columns=columns, rows=places if everything else some),
            screen.width,
            *([] if everything or not n_more else [f"{n_more} more places (--all)"]),
        )
    )
    unmatched = d["unmatched"]
    shown = unmatched if everything else unmatched[:_MOST_UNMATCHED]
    for place in shown:
        yield Text(f"not compared: {_name(place)}: {visible(place['why'])}", style="dim")
    if len(shown) < len(unmatched):
        yield Text(f"not compared: {len(unmatched) - len(shown)} more (--all)", style="dim")


def _name(place: Mapping[str, Any]) -> str:
    layer = "" if place["layer"] is None else f"layer {place['layer']} "
    site = SITE_NAMES.get(place["site"], place["site"])
    part = part_name(place["part"], place["name_a"])
    return f"{place['stack'] or ''} {layer}{part}{'' if site == place['part'] else f' {site}'}".strip()
