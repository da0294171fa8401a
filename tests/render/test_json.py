import json
from dataclasses import replace

import numpy as np
import pytest
from support.records import make_record, walked

from mhacli.render.json import pieces


def no_constant(word):
    raise AssertionError(f"{word} is no JSON")


def unique(pairs):
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names)
    return dict(pairs)


def document_of(record):
    text = "".join(pieces(record))
    assert text.isascii()
    assert text.endswith("}\n")
    return json.loads(text, parse_constant=no_constant, object_pairs_hook=unique)


def with_array(record, name, array):
    return replace(record, arrays={**record.arrays, name: array})


RECORDS = [
    make_record(),
    make_record(("the", "cat", "sat"), ("a", "dog"), causal=True),
    make_record(("a",), context=[("the", "cat")]),
    make_record(dropout=0.5),
    walked(make_record()),
    make_record(("\x1b[31m", "\ud800", '"\\', "漢字", "\u2028")),
]


@pytest.mark.parametrize("record", RECORDS)
def test_the_document_is_strict_json_of_the_schema(record):
    document = document_of(record)
    assert list(document)[:12] == [
        "schema",
        "command",
        "config",
        "sequences",
        "context",
        "vocabulary",
        "trace",
        "qk",
        "scores",
        "pattern",
        "z",
        "out",
    ]
    assert {"heads", "timings", "self_check", "environment", "nonfinite"} <= document.keys()
    assert document["schema"] == "mha.record/1"
    assert [sequence["tokens"] for sequence in document["sequences"]] == [list(s.tokens) for s in record.sequences]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("name", ["qk", "scores"])
def test_scores_are_null_exactly_where_a_query_may_not_attend(record, name):
    found = np.array(document_of(record)[name], dtype=object)
    allowed = np.broadcast_to(record.arrays["allowed"], found.shape)
    assert ((found == None) == ~allowed).all()  # noqa: E711
    assert (found[allowed].astype(np.float32) == record.arrays[name][allowed]).all()


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("name", ["pattern", "z", "out", "entropy", "strongest_key"])
def test_other_arrays_read_back_as_the_same_numbers(record, name):
    assert np.array_equal(np.array(document_of(record)[name], record.arrays[name].dtype), record.arrays[name])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_are_the_shortest_that_read_back(dtype):
    numbers = np.array([0.1, 1 / 3, 1e-8, 54321.0, 5e-7, 0.0, -2.5, np.finfo(dtype).max], dtype)
    record = make_record()
    shape = record.arrays["z"].shape
    array = np.resize(numbers, shape)
    text = "".join(pieces(with_array(record, "z", array)))
    written = text.split('"z":')[1].split(',\n"')[0].replace("[", "").replace("]", "").split(",")
    flat = array.flatten()
    assert len(written) == flat.size
    for word, number in zip(written, flat, strict=True):
        assert dtype(word) == number
        digits = len(word.split("e")[0].replace(".", "").replace("-", "").strip("0"))
        with np.errstate(over="ignore"):
            shortest = next(n for n in range(1, 18) if dtype(f"{number:.{n - 1}e}") == number)
        assert digits <= shortest


def test_numbers_that_are_not_finite_are_null_and_counted():
    record = make_record(("the", "cat", "sat"), ("a",), causal=True)
    pattern, out, qk = (record.arrays[name].copy() for name in ("pattern", "out", "qk"))
    pattern[0, 1, 2] = np.nan
    out[0, 0, 3], out[0, 1, 1] = np.inf, -np.inf
    qk[0, 0, 1, 0], qk[0, 0, 0, 2] = np.nan, np.nan  # one where attention is allowed, one where it is not
    record = replace(record, arrays={**record.arrays, "pattern": pattern, "out": out, "qk": qk})
    document = document_of(record)
    assert document["nonfinite"] == {"pattern": 3, "out": 2, "qk": 1}
    assert document["pattern"][0][1][2] == [None] * 3
    assert document["out"][0][0][3] is None
    assert document["qk"][0][0][1][0] is None


def test_minus_infinity_where_attention_is_forbidden_is_no_fault():
    assert document_of(make_record(causal=True))["nonfinite"] == {}


def test_an_array_that_was_not_kept_is_null():
    record = make_record()
    arrays = {name: array for name, array in record.arrays.items() if name not in ("qk", "pattern")}
    document = document_of(replace(record, arrays=arrays, not_kept=("qk", "pattern")))
    assert (document["qk"], document["pattern"], document["not_kept"]) == (None, None, ["qk", "pattern"])
    assert document["z"] is not None


def test_other_sites_that_were_kept_are_there_by_name():
    record = make_record(dropout=0.5)
    document = document_of(with_array(record, "q", np.ones((1, 2, 3, 3), np.float32)))
    assert document["q"] == np.ones((1, 2, 3, 3)).tolist()
    assert np.array(document["dropped"]).shape == (1, 2, 3, 3)


def test_the_array_of_the_context_does_not_hide_its_texts():
    record = make_record(("a",), context=[("the", "cat")])
    document = document_of(with_array(record, "context", np.full((1, 2, 6), np.nan, np.float32)))
    assert document["context"][0]["tokens"] == ["the", "cat"]
    assert document["context_array"] == [[[None] * 6] * 2]
    assert document["nonfinite"] == {"context_array": 12}


def test_a_large_document_comes_in_pieces():
    sizes = [len(piece) for piece in pieces(make_record(tuple(f"t{i}" for i in range(100))))]
    assert max(sizes) < sum(sizes) / 10
