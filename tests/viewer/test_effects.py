"""The screen of effects: the cursor finds each removal, and what stands below the grid are its numbers in the record."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("textual")

from support.effects_made import SUMMARY, VERIFIED, edge_effect, head_effect, with_effects
from support.records import make_record
from support.viewer_driven import drive, seen

from mhacli.results.record.record import Record
from mhacli.viewer.app import Viewer
from mhacli.viewer.head import HeadScreen

CHANGES = {(0, 0): -1.0, (0, 1): 0.25, (0, 2): 0.0, (1, 2): -0.5}


def heads() -> Record:
    return with_effects(*(head_effect(*place, change) for place, change in CHANGES.items()))


def below(shown: str) -> tuple[str, float]:
    """What was removed under the cursor, and its change of the logit."""
    found = re.search(r"^─ (\S+).*─\nΔlogit (\S+)", shown, re.MULTILINE)
    assert found is not None, shown
    return found[1], float(found[2])


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ((), (0, 0)),
        (("right",), (0, 1)),
        (("right", "right", "down"), (1, 2)),
        (("down",), (1, 2)),
        (("left",), (0, 0)),
        (("end",), (0, 2)),
        (("end", "home"), (0, 0)),
        (("down", "up"), (0, 2)),
        (("end", "right"), (1, 2)),
    ],
)
def test_the_cursor_begins_at_the_largest_change_and_moves_over_what_was_removed(
    keys: Any, place: tuple[int, int]
) -> None:
    _, shown = drive(heads(), "e", *keys)
    assert below(shown) == (f"{place[0]}.{place[1]}", CHANGES[place])


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 50), (24, 8)])
def test_every_head_stands_in_its_row_where_there_is_room(size: tuple[int, int], colour: bool) -> None:
    _, shown = drive(heads(), "e", size=size, colour=colour)
    rows = [line.split() for line in shown.split("\n") if re.match(r" +\d +-", line)]
    assert rows == [["0", "-1.00", ".25", "0"], ["1", "-.50"]][: len(rows)]
    assert len(rows) == 2 or size[1] < 12


def test_a_token_is_chosen_by_the_mouse_and_its_edge_is_told() -> None:
    record = with_effects(*(edge_effect(key, change) for key, change in enumerate((-1.0, 0.25, 0.5))))
    query, key = record.sequences[0].tokens[2], record.sequences[0].tokens[1]

    async def click(app: Viewer, pilot: Any) -> None:
        lines = seen(app).split("\n")
        row = next(number for number, line in enumerate(lines) if re.match(r" +0\.1  ", line))
        await pilot.click(offset=(lines[row].index(key), row))

    _, shown = drive(record, "e", act=click)
    assert below(shown) == ("0.1", 0.25)
    assert f"2 {query} → 1 {key}" in shown


def test_enter_opens_the_head_that_was_removed() -> None:
    end, _ = drive(heads(), "e", "down", "enter")
    assert isinstance(end.screen, HeadScreen)
    assert end.app.session.head().label == "layer 1 · head 2"


def test_what_was_removed_together_is_a_line_that_opens_nothing() -> None:
    joint = replace(head_effect(0, 0, -1.5), removed="heads", layer=None, head=None, heads=((0, 0), (1, 2)))
    end, shown = drive(
        with_effects(head_effect(0, 0, -1.0), head_effect(1, 2, -0.25), joint), "e", "end", "down", "enter"
    )
    assert re.search(r"^─ 0\.0 \+ 1\.2 ─+\nΔlogit -1\.5000", shown, re.MULTILINE)
    assert not isinstance(end.screen, HeadScreen)


def test_the_key_is_offered_where_there_are_effects() -> None:
    assert "e effects" in drive(heads())[1].split("\n")[-1]
    _, shown = drive(make_record(("a", "b")), "e")
    assert "no effects" in shown.split("\n")[-1]
    assert "e effects" not in drive(make_record(("a", "b")))[1]


def test_without_proof_no_number_is_shown() -> None:
    failed = replace(SUMMARY, verified=replace(VERIFIED, max_abs_error=1.0, ok=False))
    _, shown = drive(with_effects(head_effect(0, 0, -1.2345), summary=failed), "e", "right", "enter")
    assert "1.23" not in shown
    assert "NOT verified" in shown
