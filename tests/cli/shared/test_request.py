"""The choices of a command line: what is named, what is left open, and what is taken off again."""

from __future__ import annotations

import pytest

from mhacli.cli.options import DeviceOptions, LayerOptions, SourceOptions, TextOptions
from mhacli.cli.shared.request import given_choices


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        ({}, {}),
        ({"window": "2"}, {"window": (2, 0)}),
        ({"window": "2,0", "prefix": 3, "sink": 1}, {"window": (2, 0), "prefix": 3, "sink": 1}),
        ({"window": "none", "prefix": 0, "sink": 0}, {"window": None, "prefix": None, "sink": None}),
    ],
)
def test_a_window_a_prefix_and_sinks_are_left_open_named_or_taken_off(layer, found):
    made = given_choices(SourceOptions(), LayerOptions(**layer), DeviceOptions(), TextOptions())
    assert {name: made[name] for name in ("window", "prefix", "sink") if name in made} == found
