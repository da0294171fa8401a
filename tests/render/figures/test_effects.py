"""The picture of effects, read back as XML: colours, numbers, tooltips, the scale, and what has no picture."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from support.effects_made import SUMMARY, VERIFIED, edge_effect, head_effect, with_effects
from support.layers_made import layered
from support.svg_read import Shape, shapes, texts

from mhacli.errors import MhaError
from mhacli.render.base.options import ViewOptions
from mhacli.render.figures.document import figure
from mhacli.results.record.record import Record

LESS, NONE, MORE = (86, 180, 233), (68, 68, 68), (230, 159, 0)
CHANGES = {(0, 0): -1.0, (0, 1): 0.25, (0, 2): 0.0, (1, 2): -0.5}


def drawn(record: Record) -> list[Shape]:
    """The cells: what has a tooltip."""
    return [shape for shape in shapes(figure(record, ViewOptions())) if shape.tag == "rect" and shape.said]


def expected(change: float, largest: float) -> tuple[int, ...]:
    end = LESS if change < 0 else MORE
    part = round(255 * abs(change) / largest) / 255
    return tuple(round(float(np.interp(part, (0, 1), (none, own)))) for none, own in zip(NONE, end, strict=True))


def test_each_head_has_its_colour_place_number_and_every_number_of_the_record() -> None:
    record = with_effects(*(head_effect(*place, change) for place, change in CHANGES.items()))
    cells = {shape.said.split(" ·")[0]: shape for shape in drawn(record)}
    assert {*cells} == {f"{layer}.{head}" for layer, head in CHANGES}
    for (layer, head), change in CHANGES.items():
        cell = cells[f"{layer}.{head}"]
        assert cell.rgb == expected(change, 1.0)
        assert float(re.search(r"Δlogit ([-+.\d]+)", cell.said)[1]) == change
        assert float(re.search(r"Δoutput ([.\d]+)", cell.said)[1]) == abs(change)
    assert cells["1.2"].x == cells["0.2"].x > cells["0.1"].x
    assert cells["1.2"].y > cells["0.2"].y == cells["0.1"].y
    assert [words for words in texts(figure(record, ViewOptions())) if re.fullmatch(r"-?\d?\.\d\d|0", words)] == [
        "0", "0", "-1.00", ".25", "0", "-.50",
    ]  # fmt: skip


def test_the_scale_goes_as_far_below_zero_as_above_and_says_how_far() -> None:
    svg = figure(with_effects(head_effect(0, 0, -2.5), head_effect(0, 1, 0.5)), ViewOptions())
    stops = [shape.attributes["stop-color"] for shape in shapes(svg) if shape.tag == "stop"]
    ends = [tuple(bytes.fromhex(stops[place][1:])) for place in (0, len(stops) // 2, -1)]
    assert ends == [LESS, NONE, MORE]
    assert any("-2.5 … 2.5" in words for words in texts(svg))


def test_the_change_of_an_output_has_one_side() -> None:
    record = with_effects(head_effect(0, 0, 0.5), summary=replace(SUMMARY, metric="d_output", target=None))
    svg = figure(record, ViewOptions())
    stops = [shape.attributes["stop-color"] for shape in shapes(svg) if shape.tag == "stop"]
    assert [tuple(bytes.fromhex(stops[place][1:])) for place in (0, -1)] == [NONE, MORE]


def test_tokens_carry_the_colour_of_their_edge() -> None:
    changes = (-1.0, 0.0, 0.5)
    record = with_effects(*(edge_effect(key, change) for key, change in enumerate(changes)))
    cells = drawn(record)
    assert [cell.rgb for cell in cells] == [expected(change, 1.0) for change in changes]
    tokens = record.sequences[0].tokens[:3]
    written = [shape for shape in shapes(figure(record, ViewOptions())) if shape.text in tokens]
    assert [shape.text for shape in written[:3]] == [*tokens]
    for cell, word in zip(cells, written, strict=False):
        assert cell.x < word.x < cell.x + cell.number("width")


def test_a_chosen_head_or_figure_is_drawn_in_place_of_effects() -> None:
    record = with_effects(head_effect(0, 0, 1.0))
    assert "Δlogit" not in figure(record, ViewOptions(figure="grid"))
    assert "Δlogit" not in figure(record, ViewOptions(heads=(1,), layers=((None, 0),)))


@pytest.mark.parametrize(
    "record",
    [
        layered(n_layers=1),
        with_effects(
            head_effect(0, 0, 1.0), summary=replace(SUMMARY, verified=replace(VERIFIED, max_abs_error=1.0, ok=False))
        ),
    ],
    ids=["a record without effects", "effects that are not proven"],
)
def test_nothing_is_drawn_of(record: Record) -> None:
    with pytest.raises(MhaError):
        figure(record, ViewOptions(figure="effects"))
