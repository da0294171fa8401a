"""A mask alone: its rules, a picture of the visible keys of each query, and JSON of schema `mha.mask/1`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.render.base.doc import Column, Grid
from mhacli.render.base.format import count_of, fitted, flowing, token_text
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen
from mhacli.render.heads.head_map import sums
from mhacli.sites import mask_rules
from mhacli.text.escape import visible
from mhacli.text.numbers import shown

if TYPE_CHECKING:
    from mhacli.run import Run

MASK_SCHEMA = "mha.mask/1"
Mask = Mapping[str, Any]
"""The mask of a sequence, as in JSON."""
_LABEL_WIDTH = 12


def mask_view(run: Run, masks: Sequence[Mask], screen: Screen) -> RenderableType:
    """The rules, then a picture and the density for each sequence. Long texts are pooled to blocks."""
    rules = [visible(rule) for rule in mask_rules(run.dims)] or ["every key is visible"]
    parts: list[RenderableType] = [flowing(["mask", *rules], screen.width, style="bold")]
    for index, mask in enumerate(masks):
        counts = mask["visible_per_query"]
        n_cells, n_visible, q_len = mask["n_cells"], mask["n_visible"], len(counts)
        title = f"sequence {index}: {q_len} queries × {n_cells // q_len} keys"
        sees = f"a query sees {min(counts):,} to {max(counts):,} keys, mean {shown(n_visible / q_len, 'short')}"
        if min(counts) == max(counts):
            sees = f"every query sees {count_of(counts[0], 'key')}"
        density = f"density {100 * mask['density']:.3g} %: {n_visible:,} of {n_cells:,} cells are visible"
        picture = grids([_grid(run, mask, index, title, 1)], screen, form="shades")
        parts += [Text(""), *picture, flowing([density, sees], screen.width, style="bold")]
    return Group(*parts)


def mask_document(run: Run, masks: Sequence[Mask], command: tuple[str, ...]) -> str:
    """The masks as one JSON document, schema `mha.mask/1`."""
    context = run.context_sequences
    content = {
        "schema": MASK_SCHEMA,
        "command": command,
        "config": asdict(run.config),
        "sequences": [asdict(sequence) for sequence in run.sequences],
        "context": None if context is None else [asdict(sequence) for sequence in context],
        "rules": mask_rules(run.dims),
        "masks": masks,
    }
    return json.dumps(content, allow_nan=False) + "\n"


def _grid(run: Run, mask: Mask, index: int, title: str, merge: int) -> Grid:
    """The visible part of each cell, or of blocks of `merge` cells. Keys are numbered as tokens of their text."""
    q_len, side = len(mask["visible_per_query"]), mask["block"] * merge
    k_len = mask["n_cells"] // q_len
    sequence, keys = run.sequences[index], (run.context_sequences or run.sequences)[index]
    first = (
        run.config.first_column(len(sequence.tokens), q_len),
        run.config.first_column(len(keys.tokens), k_len),
    )
    heights, widths = (np.minimum(side, n - np.arange(0, n, side)) for n in (q_len, k_len))
    counts = sums(sums(np.array(mask["block_counts"]), merge), merge, axis=1)
    sees = mask["visible_per_query"]
    starts, places = range(0, q_len, side), [key - first[1] for key in range(0, k_len, side)]
    return Grid(
        title=title,
        values=counts / (heights[:, None] * widths),
        allowed=counts > 0,
        rows=[
            fitted(token_text(sequence.tokens, row - first[0]), _LABEL_WIDTH) if side == 1 else str(row)
            for row in starts
        ],
        columns=[str(place) if 0 <= place < len(keys.tokens) else "–" for place in places],
        top=1.0,
        corner="query",
        meaning=f"each cell {side} × {side} tokens" if side > 1 else "each row: the keys that a query sees",
        places=places,
        beside=[Column(heading="sees", value=lambda row: sees[row], unit="integer")] if side == 1 else [],
        has_all_rows=True,
        smaller=lambda rows, columns: _grid(
            run, mask, index, title, max(1, -(-len(counts) // rows), -(-counts.shape[1] // columns)) * merge
        ),
    )
