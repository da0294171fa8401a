"""The view chosen if not all keys fit: the one that shows most of the attention."""

from dataclasses import replace

import numpy as np
import pytest
from support.records import drawn, make_record

from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.heads.fitting_view import fitting_view
from mhacli.render.heads.head_map import HeadPattern
from mhacli.render.run.view import run_view

AUTO = ViewOptions(view="auto")


def record_of(count, pattern):
    """A record of `count` tokens whose heads have this pattern."""
    record = make_record(tuple(f"t{i}" for i in range(count)))
    shape = record.arrays["pattern"].shape
    return replace(record, arrays={**record.arrays, "pattern": np.broadcast_to(np.float32(pattern), shape)})


def peaked(count, largest):
    """Each query gives `largest` to the key before it, and the rest to all others alike."""
    pattern = np.full((count, count), (1 - largest) / (count - 1))
    pattern[np.arange(count), np.arange(count) - 1] = largest
    return pattern


def uniform(count):
    return np.full((count, count), 1 / count)


def fitted(record, *, colour=False, width=80, options=AUTO):
    settled, note = fitting_view([HeadPattern(record, 0, 0)], options, Screen(width, colour))
    return settled.view, settled.precision, None if note is None else note.plain


def test_what_fits_is_a_matrix_and_nothing_is_noted():
    assert fitted(record_of(9, uniform(9))) == ("matrix", 2, None)


def test_fewer_decimals_come_first_where_they_show_nine_tenths():
    view, precision, note = fitted(record_of(16, peaked(16, 0.93)))
    assert (view, precision) == ("matrix", 1)
    assert "16 keys" in note


def test_colour_shows_what_is_printed_as_zero():
    record = record_of(16, peaked(16, 0.5))  # the others are .03, printed as .0
    assert fitted(record, colour=True)[:2] == ("matrix", 1)
    assert fitted(record, width=60, colour=True)[0] == "heatmap"


def test_the_strongest_keys_come_before_a_heatmap_where_they_show_nine_tenths():
    record = record_of(16, peaked(16, 0.93))
    view, _, note = fitted(record, width=50, colour=True)
    assert view == "top"
    assert f"{93 + 2 * 7 / 15:.0f} % of all attention" in note


def test_without_colour_a_heatmap_counts_what_is_above_its_lowest_sign():
    pattern = np.full((16, 16), 0.5 / 13)  # three keys have half of the attention, thirteen the rest
    pattern[:, :3] = 0.5 / 3
    record = record_of(16, pattern)
    assert fitted(record, width=50)[0] == "heatmap"  # a fifth of .17 is .03, less than any of them
    pattern[:, :3], pattern[:, 3:] = 0.8 / 3, 0.2 / 13
    assert fitted(record_of(16, pattern), width=50)[0] == "top"


def test_of_a_long_text_the_rows_that_are_hidden_count():
    record = record_of(200, peaked(200, 0.6))  # 16 rows of 200; of a heatmap that pools few keys much more
    assert fitted(record, colour=True)[0] == "heatmap"


@pytest.mark.parametrize("view", ["matrix", "heatmap", "top", "none"])
def test_a_view_that_was_chosen_is_kept(view):
    assert fitted(record_of(60, uniform(60)), options=ViewOptions(view=view)) == (view, 2, None)


def test_everything_is_a_matrix():
    options = replace(AUTO, everything=True)
    assert fitted(record_of(60, uniform(60)), options=options) == ("matrix", 2, None)


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("count", [9, 16, 40, 200])
def test_the_note_stands_before_the_patterns(colour, count):
    lines = drawn(run_view(record_of(count, peaked(count, 0.7)), AUTO, Screen(80, colour)), 80)
    notes = [i for i, line in enumerate(lines) if "(--view matrix, --all)" in line]
    first = next(i for i, line in enumerate(lines) if "head 0 ─" in line)
    assert [i < first for i in notes] == ([] if count == 9 else [True])
