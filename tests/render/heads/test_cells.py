"""Shaded cells of every view: only a number's colour makes its cell brighter or darker."""

from __future__ import annotations

import pytest
from rich.console import Group
from support.heads_made import surveyed
from support.layers_made import layered, text_of
from support.painted import characters, printed
from support.records import make_record

from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.checkpoint.view import layers_view
from mhacli.render.diff.view import diff_view
from mhacli.render.heads.view import heads_view
from mhacli.render.run.mask import mask_view
from mhacli.render.run.view import run_view
from mhacli.results.diff.compare import compare
from mhacli.results.mask import SequenceMask
from mhacli.results.record.head_statistics import Corner, HeadsRequest, Kept

WIDTH = 100
LONG = tuple(f"t{i}" for i in range(60))
MEDIUM = " ".join(f"w{i % 7}" for i in range(40))
LONGER = " ".join(f"w{i % 11}" for i in range(700))
WEIGHTS = {"bold", "faint", "underlined"}
SIGNS, OF_SIGNS = "■·░▒▓◀┃╲≡↻▪⇠○", ("grid", "mask", "mask-of-blocks")


def run(words=LONG, **options):
    return run_view(make_record(words, causal=True, dropout=0.5), ViewOptions(**options), Screen(WIDTH, True))


def heads(text, **options):
    kept = Kept(corner=Corner(2, 6, 0, 8))
    record = surveyed(text, causal=True, n_heads=2, d_model=6, wanted=HeadsRequest(kept=kept))
    return heads_view(record, ViewOptions(**options), Screen(WIDTH, True))


def difference(words):
    a, b = make_record(words, causal=True), make_record(words, causal=True, seed=1)
    options = ViewOptions(view="heatmap")
    return diff_view(compare(a, b), (a, b), ("a", "b"), options=options, screen=Screen(WIDTH, True))


def mask(block):
    from render.run.test_mask import survey_of

    n = 16
    counts = [[block * block if key < query else 0 if key > query else block for key in range(n)] for query in range(n)]
    per_query = [min(n, row // block + 1) * block for row in range(n * block)]
    seen = SequenceMask(tuple(per_query), (n * block) ** 2, block, tuple(map(tuple, counts)))
    words = tuple(f"t{i}" for i in range(n * block))
    return mask_view(survey_of(words, masks=[seen]), Screen(WIDTH, True))


def checkpoint(**options):
    return Group(*[layers_view(layered(text_of(LONG), causal=True), ViewOptions(**options), Screen(WIDTH, True))])


VIEWS = {
    "matrix": lambda: run(LONG[:6]),
    "large-matrix": lambda: run(),
    "named-heatmap": lambda: run(LONG[:6], view="heatmap"),
    "heatmap": lambda: run(view="heatmap"),
    "checkpoint-heatmap": lambda: checkpoint(view="heatmap", layers=(("self", 1),), heads=(0,)),
    "grid": checkpoint,
    "map": lambda: heads(MEDIUM, maps=(0,)),
    "halved-map": lambda: heads(LONGER, maps=(1,)),
    "corner": lambda: heads(MEDIUM),
    "difference": lambda: difference(LONG[:6]),
    "halved-difference": lambda: difference(LONG),
    "mask": lambda: mask(1),
    "mask-of-blocks": lambda: mask(64),
}


@pytest.mark.parametrize("name", VIEWS)
def test_no_cell_is_bold_faint_or_underlined(name):
    lines = printed(VIEWS[name](), WIDTH).split("\n")
    cells = [
        (sign, look)
        for line in lines
        for sign, look in characters(line)
        if look.back or (look.fore and (sign in "▀▄" or (sign in SIGNS and name in OF_SIGNS)))
    ]
    assert len(cells) >= 12
    assert [(sign, look) for sign, look in cells if look.attributes & WEIGHTS] == []


def test_forbidden_cells_of_a_matrix_are_not_faint_either():
    text = printed(run(LONG[:6]), WIDTH)
    zeros = [look for sign, look in characters(text) if sign == "0" and look.fore]
    assert len(zeros) >= 15
    assert not any(look.attributes & WEIGHTS for look in zeros)
