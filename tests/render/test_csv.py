import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.heads_made import surveyed
from support.hostile import obeyed_or_hidden
from support.records import make_record

from mhacli.errors import MhaError
from mhacli.render.csv import cell_text, pieces
from mhacli.render.json import pieces as json_pieces
from mhacli.results.record.head_statistics import STATISTICS

HEADER = ["sequence", "head", "query", "query_token", "key", "key_token", "allowed", "pattern"]


def read(cell):
    """The text that a cell stands for."""
    return json.loads(cell) if cell.startswith('"') else cell


def table_of(record):
    header, *rows = csv.reader(io.StringIO("".join(pieces(record)), newline=""))
    assert header == HEADER
    return rows


def test_there_is_a_line_for_every_cell_that_is_no_padding():
    record = make_record(("the", "cat", "sat"), ("a", "dog"))
    places = [tuple(map(int, (row[0], row[1], row[2], row[4]))) for row in table_of(record)]
    lengths = [3, 2]
    assert places == [
        (b, h, i, j) for b in (0, 1) for h in (0, 1) for i in range(lengths[b]) for j in range(lengths[b])
    ]


def test_shares_and_permissions_are_those_of_the_record():
    record = make_record(("the", "cat", "sat"), ("a", "dog"), causal=True)
    for b, h, i, _, j, _, allowed, weight in table_of(record):
        place = int(b), int(h), int(i), int(j)
        assert np.float32(weight) == record.arrays["pattern"][place]
        assert allowed == str(int(place[3] <= place[2]))


def test_keys_of_a_context_are_named_by_it():
    rows = table_of(make_record(("a",), context=[("the", "cat")]))
    assert [(row[3], row[5]) for row in rows[:2]] == [("a", "the"), ("a", "cat")]


def test_numbers_are_the_shortest_that_read_back():
    record = make_record()
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 0] = [0.1, 0.2, 0.7]
    rows = table_of(replace(record, arrays={**record.arrays, "pattern": pattern}))
    assert [row[7] for row in rows[:3]] == ["0.1", "0.2", "0.7"]


def test_a_weight_that_is_not_a_number_is_empty():
    record = make_record()
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 1] = np.nan
    rows = table_of(replace(record, arrays={**record.arrays, "pattern": pattern}))
    assert [row[7] == "" for row in rows[:9]] == [False] * 3 + [True] * 3 + [False] * 3


@settings(max_examples=100)
@given(
    st.lists(
        st.text(min_size=1) | st.sampled_from(["=1+1", "+1", "-1", "@x", "\t=1", ",", '"', "\r\n", "\ud800"]),
        min_size=1,
        max_size=4,
    )
)
def test_any_token_is_given_back_and_none_begins_a_formula(tokens):
    record = make_record(tokens)
    rows = table_of(record)
    assert [read(row[5]) for row in rows[: len(tokens)]] == tokens
    assert [read(row[3]) for row in rows[:: len(tokens)][: len(tokens)]] == tokens
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for row in rows for cell in row)
    assert not obeyed_or_hidden("".join(pieces(record)).replace("\r\n", "\n"))


@pytest.mark.parametrize(
    ("token", "cell"),
    [
        *((token, token) for token in ("the", " mat", "don't", "é中", "1+1", "a\\b", 'a"b', "")),
        ("-", '"-"'), (" =1", '" =1"'), ('"', '"\\""'), ("\u202e", '"\\u202e"'), ("\n", '"\\n"'),
    ],
)  # fmt: skip
def test_a_token_stands_as_it_is_unless_it_could_be_taken_for_something_else(token, cell):
    assert cell_text(token) == cell


def test_headings_are_the_names_of_json_fields():
    surveyed_record = surveyed("the cat sat on the mat", causal=True)
    (heading,) = csv.reader(["".join(pieces(surveyed_record)).split("\n")[0]])
    document = json.loads("".join(json_pieces(surveyed_record)))["heads"][0]
    plain = [name for name in heading if not name.startswith(("uniform_", "pattern_"))]
    assert set(plain) <= set(document)
    assert {name.removeprefix("uniform_") for name in heading if name.startswith("uniform_")} <= set(
        document["uniform"]
    )
    assert {row.field for row in STATISTICS} <= set(plain)


def test_a_record_without_its_pattern_is_refused():
    record = make_record()
    arrays = {name: array for name, array in record.arrays.items() if name != "pattern"}
    with pytest.raises(MhaError) as caught:
        list(pieces(replace(record, arrays=arrays)))
    assert caught.value.message == "--csv needs the pattern, which the record does not have"
    assert (caught.value.hint, caught.value.code) == ("--keep pattern keeps it", "not-kept")
