"""The output of `mha diff` of two models: where they part in a sentence, and a grid of blocks × places, where it grows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.commands.diff.result import CAUSES, ModelDiff, Row, where
from mhacli.render.base.doc import Column, Grid, Table
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import table
from mhacli.text.escape import visible

_MOST_UNMATCHED = 6
_SHORT = {"scores": "score", "residual": "sum", "q_rotated": "q′", "k_rotated": "k′", "output_norm": "norm"}


def model_diff_view(d: ModelDiff, screen: Screen, *, everything: bool = False) -> RenderableType:
    """The complete output."""
    sides = [" ".join([d[side], *d["dtypes"][n : n + 1]]) for n, side in enumerate("ab")]
    return Group(
        Text(visible(d["summary"]), style="bold green" if d["verdict"] == "agree" else "bold red"),
        Text(visible(f"A = {sides[0]} · B = {sides[1]}"), style="bold"),
        *(Text(visible(note), style="yellow") for note in d["notes"]),
        Text(),
        *_grid(d, screen),
        *_table(d, screen, everything),
    )


def _grid(d: ModelDiff, screen: Screen) -> Iterator[RenderableType]:
    """The blocks in rows, their places in columns, shaded by how far differences are above rounding."""
    cells: dict[str, dict[tuple[str, str], float]] = {}
    for place in d["places"]:
        if place["layer"] is not None:
            of_layer = cells.setdefault(f"{place['stack'] or ''} {place['layer']}".strip(), {})
            of_layer[place["part"], place["site"]] = _decades(place)
    if not cells:
        return
    columns = [key for key in CAUSES if any(key in of_layer for of_layer in cells.values())]
    values = np.array([[of_layer.get(key, math.nan) for key in columns] for of_layer in cells.values()])
    names = ["mlp" if key == ("mlp", "output") else _SHORT.get(key[1], key[1].replace("_", " ")) for key in columns]
    grid = Grid(
        title="how far each place is beyond rounding",
        values=np.nan_to_num(values),
        allowed=~np.isnan(values),
        rows=[*cells],
        columns=["out" if name == "output" else name for name in names],
        top=max(1.0, float(np.nanmax(values))),
        corner="layer ",
        unit="number",
        meaning=f"powers of ten of relative difference ÷ rounding; beyond rounding from {math.log10(d['times_rounding']):.1f} on",
    )
    yield from grids([grid], screen, form="shades")
    yield Text()


def _decades(place: Row) -> float:
    """By how many powers of ten a difference is larger than rounding, 0 if it is not."""
    relative = place["relative"]
    return 12.0 if relative is None else max(0.0, math.log10(max(relative, 1e-300) / place["rounding"]))


def _table(d: ModelDiff, screen: Screen, everything: bool) -> Iterator[RenderableType]:
    """The first place and those outside of blocks, with `everything` all places; and what is unmatched."""
    places, unmatched = d["places"], d["unmatched"]
    rows = [place for place in places if everything or place["layer"] is None or place == d["first"]]
    columns: list[Column[Row]] = [
        Column(heading="place", value=where, style=lambda row: "red" * (row["beyond"] and not row["healed"]), least=34),
        Column(heading="relative", value=lambda row: row["relative"], unit="error"),
        Column(heading="rounding", value=lambda row: row["rounding"], unit="error"),
        Column(heading="largest", value=lambda row: row["largest"], unit="number", drop=1),
        Column(heading="module in A", value=lambda row: visible(row["name_a"]), drop=2),
    ]
    more = [f"{len(places) - len(rows)} more places (--all)"] if len(places) > len(rows) else []
    yield from table(Table(columns=columns, rows=rows), screen.width, *more) if places else ()
    shown = unmatched if everything else unmatched[:_MOST_UNMATCHED]
    for place in shown:
        yield Text(f"not compared: {where(place)}: {visible(place['why'])}", style="dim")
    if len(shown) < len(unmatched):
        yield Text(f"not compared: {len(unmatched) - len(shown)} more (--all)", style="dim")
