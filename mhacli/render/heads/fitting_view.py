"""Chooses the view that shows most of some patterns if not all keys fit on the screen as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from rich.text import Text

from mhacli.render.base.cells import WEIGHTS
from mhacli.render.base.format import count_of, percent_text
from mhacli.render.base.options import Screen, ViewOptions, balanced
from mhacli.render.base.tokens import MAX_TOKEN_ROWS
from mhacli.render.heads.head_map import HeadPattern, largest_of
from mhacli.render.heads.heatmap import fitted_map
from mhacli.render.heads.matrix import MAX_ROWS, fits

ENOUGH = 0.9
"""The fraction of the attention that numbers must show to be preferred to a heatmap."""


def fitting_view(heads: Sequence[HeadPattern], options: ViewOptions, screen: Screen) -> tuple[ViewOptions, Text | None]:
    """The view to draw for the option `auto`, and a note on what it leaves out.

    If all keys fit as numbers, it is the matrix. Otherwise it is the first view with nine tenths of the attention of
    all queries, or the one with most: numbers with fewer decimals, the top keys, or the heatmap.
    """
    if options.view != "auto":
        return options, None
    whole = replace(options, view="matrix")
    with_rows = [head for head in heads if len(head.weights)]
    if not with_rows or options.everything or all(fits(head, whole, screen.width) for head in with_rows):
        return whole, None
    shorter = [replace(whole, precision=n) for n in range(options.precision - 1, 0, -1)]
    candidates = [candidate for candidate in shorter if all(fits(head, candidate, screen.width) for head in with_rows)]
    candidates += [replace(options, view="top"), replace(options, view="heatmap")]
    parts = [float(np.mean([_shown(head, candidate, screen) for head in with_rows])) for candidate in candidates]
    place = next((i for i, part in enumerate(parts) if part >= ENOUGH), int(np.argmax(parts)))
    return candidates[place], _note(with_rows, candidates[place], screen)


def _shown(head: HeadPattern, options: ViewOptions, screen: Screen) -> float:
    """The fraction of a head's attention that a view shows, without weights printed as zero or with the lowest sign.

    A heatmap that pools `n` keys counts as showing one in `n`.
    """
    weights = np.nan_to_num(head.weights.astype(np.float64))
    total = float(weights.sum())
    if not total:
        return 1.0
    if options.view == "heatmap":
        least = 0.0 if screen.colour else largest_of([head]) / len(WEIGHTS.signs)
        return float(weights[weights >= least].sum()) / total / fitted_map(head, options, screen).block
    most = len(weights) if head.rows is not None else MAX_TOKEN_ROWS if options.view == "top" else MAX_ROWS
    rows = weights[list(balanced(len(weights), most).shown)]
    if options.view == "top":
        cells = np.sort(rows, axis=1)[:, -options.top :]
    else:
        cells = rows if screen.colour else rows[rows >= 0.5 * 10.0**-options.precision]
    return float(cells.sum()) / total


def _note(heads: Sequence[HeadPattern], options: ViewOptions, screen: Screen) -> Text:
    """What is drawn in place of the matrix, and how to see the matrix."""
    keys = count_of(max(head.weights.shape[1] for head in heads), "key")
    if options.view == "matrix":
        text = f"{count_of(options.precision, 'decimal')}, so that all {keys} fit the screen"
    elif options.view == "top":
        part = float(np.mean([_shown(head, options, screen) for head in heads]))
        strongest = f"the {options.top} strongest of each query, {percent_text(part)} of all attention"
        text = f"{keys} do not fit the screen as numbers: {strongest}"
    else:
        text = f"{keys} do not fit the screen as numbers: a heatmap"
    return Text(f"{text} (--view matrix, --all)", style="dim")
