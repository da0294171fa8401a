"""Heads and patterns as tables: every library gets the record's numbers."""

import csv
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.effects_made import SUMMARY
from support.heads_made import surveyed
from support.layers_made import layered, text_of
from support.records import make_record

from mhacli.errors import MhaError, UsageError
from mhacli.render.csv import pieces
from mhacli.results.record.effect import Effect
from mhacli.results.record.head_statistics import STATISTICS
from mhacli.results.record.record import Record
from mhacli.results.record.storage import load

NAMES = ["layer", "attention", "head", "kind", *(row.field for row in STATISTICS)]
TEXTS = (("the", "cat", "sat", "on"), ("a", "dog"))


def lines_of(record: Record) -> list[dict[str, str]]:
    return [*csv.DictReader("".join(pieces(record)).splitlines())]


def test_heads_are_a_tuple_and_a_table_of_the_json_fields() -> None:
    record = layered(n_layers=2, n_heads=3)
    table = record.heads.to_dicts()
    assert record.heads == tuple(record.heads)
    assert [(row["layer"], row["head"]) for row in table] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [*table[0]] == NAMES
    for row, own in zip(table, record.document()["heads"], strict=True):
        assert row == {name: own[name] for name in NAMES}


def test_every_statistic_of_the_csv_of_heads_is_in_the_table() -> None:
    record = surveyed("the cat sat on the mat and the cat slept", n_heads=2, causal=True)
    for line, row in zip(lines_of(record), record.heads.to_dicts(), strict=True):
        known = {name: value for name, value in line.items() if not name.startswith("uniform_") and value}
        assert len(known) > 15
        assert {name: str(row[name]) for name in known} == known


def test_heads_stay_a_table_in_a_layer_in_a_changed_record_and_in_a_file(tmp_path) -> None:
    record = layered(n_layers=2)
    record.save(str(tmp_path / "r.safetensors"))
    for known in (record.of_layer(1), replace(record, heads=record.heads[4:]), load(str(tmp_path / "r.safetensors"))):
        assert known.heads.to_dicts() == record.heads.to_dicts()[-len(known.heads) :]


def with_effects() -> Record:
    """A head alone with a direct effect, and two heads together."""
    alone = Effect(0, "self", 2, None, None, "head", "zero", None, -1.5, -0.5, 0.25, 3, 0.125, direct=-1.0)
    both = replace(alone, layer=None, head=None, removed="heads", heads=((0, 2), (1, 0)), direct=None)
    return replace(layered(n_layers=2, n_heads=3), effects=(alone, both))


def test_effects_are_a_tuple_and_a_table_of_the_json_fields(tmp_path) -> None:
    record = with_effects()
    record.save(str(tmp_path / "r.safetensors"))
    for known in (record, load(str(tmp_path / "r.safetensors"))):
        assert known.effects == tuple(record.effects)
        for row, own in zip(known.effects.to_dicts(), record.document()["effects"], strict=True):
            together = {name: json.dumps(own.get(name, [])) for name in ("heads", "spans", "layers")}
            assert {name: row[name] for name in (*own, *together)} == own | together
        assert [row["later"] for row in known.effects.to_dicts()] == [-0.5, None]


def test_effects_have_one_row_of_csv_each_with_the_columns_of_the_table() -> None:
    record = replace(with_effects(), effect=SUMMARY)
    for line, row in zip(lines_of(record), record.effects.to_dicts(), strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in row.items()}


def test_other_libraries_get_effects_as_numbers_with_missing_values() -> None:
    polars, pandas = pytest.importorskip("polars"), pytest.importorskip("pandas")
    effects = with_effects().effects
    frame, other = effects.to_polars(), effects.to_pandas()
    assert frame.to_dicts() == effects.to_dicts()
    assert (frame.schema["rank"], frame.schema["later"], frame.schema["heads"]) == (
        polars.Int64, polars.Float64, polars.String,
    )  # fmt: skip
    assert [None if pandas.isna(value) else value for value in other["head"]] == [2, None]


def test_polars_and_pandas_have_numbers_and_missing_values() -> None:
    polars, pandas = pytest.importorskip("polars"), pytest.importorskip("pandas")
    record = layered(n_layers=2)
    dicts = record.heads.to_dicts()
    frame, other = record.heads.to_polars(), record.heads.to_pandas()
    assert frame.to_dicts() == dicts
    assert frame.columns == [*other.columns] == NAMES
    assert (frame.schema["window_50"], frame.schema["learned_sink"]) == (polars.Int64, polars.Float64)
    assert (str(other["window_50"].dtype), other["learned_sink"].dtype) == ("Int64", np.float64)
    for name in NAMES:
        values = [None if pandas.isna(value) else value for value in other[name]]
        assert values == [row[name] for row in dicts], name


def test_arrow_gets_every_column_with_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {name: lambda name=name: name for name in ("int64", "float64", "string", "bool_")}
    fake = SimpleNamespace(__spec__="known", array=lambda values, kind: (kind, [*values]), table=dict, **words)
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    record = layered(n_layers=1)
    table = record.heads.to_arrow()
    assert {name: values for name, (_, values) in table.items()} == {
        name: [row[name] for row in record.heads.to_dicts()] for name in NAMES
    }
    kinds = {name: kind for name, (kind, _) in table.items()}
    assert (kinds["head"], kinds["kind"], kinds["entropy"], kinds["offset"]) == ("int64", "string", "float64", "int64")


def test_a_table_of_arrow_has_the_lines_of_the_dicts() -> None:
    pytest.importorskip("pyarrow")
    record = layered(n_layers=2)
    assert record.heads.to_arrow().to_pylist() == record.heads.to_dicts()
    assert record.pattern(layer=1).to_arrow().to_pylist() == record.pattern(layer=1).to_dicts()


@pytest.mark.parametrize("name", ["polars", "pandas", "pyarrow", "xarray"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    pattern = make_record().pattern(head=0)
    methods = {
        "polars": pattern.to_polars,
        "pandas": pattern.to_pandas,
        "pyarrow": pattern.to_arrow,
        "xarray": pattern.to_xarray,
    }
    with pytest.raises(MhaError, match=f"needs {name}, which") as fault:
        methods[name]()
    assert fault.value.code == "missing-extra"
    assert f'pip install "{name}' in (fault.value.hint or "")


# ------------------------------------------------------------------------------------------------------------ patterns


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_cells_of_a_pattern_are_the_lines_of_the_csv(side: str) -> None:
    record = layered(*(text_of(own, parts=()) for own in TEXTS), n_layers=2, n_heads=3, causal=True, padding=side)
    lines = lines_of(record)
    for batch in (0, 1):
        for layer in (0, 1):
            known = [own for own in lines if (own["layer"], own["sequence"]) == (str(layer), str(batch))]
            rows = record.pattern(layer=layer, batch=batch).to_dicts()
            assert len(rows) == len(known) == 3 * len(record.sequences[batch].tokens) ** 2
            for row, line in zip(rows, known, strict=True):
                assert [str(row[name]) for name in ("layer", "sequence", "head", "query", "key")] == [
                    line[name] for name in ("layer", "sequence", "head", "query", "key")
                ]
                assert (row["query_token"], row["key_token"]) == (line["query_token"], line["key_token"])
                assert row["allowed"] == (line["allowed"] == "1")
                assert row["pattern"] == pytest.approx(float(line["pattern"]), rel=1e-6)


def test_a_pattern_is_an_array_of_the_head_that_is_requested() -> None:
    record = make_record(*TEXTS, causal=True, n_heads=3)
    found = record.pattern(head=2, batch=1)
    assert np.array_equal(np.asarray(found), record.arrays["pattern"][1, 2, :2, :2])
    assert (found.dims, found.layer, found.head, found.batch) == (("query", "key"), 0, 2, 1)
    assert found.query_tokens == found.key_tokens == ("a", "dog")
    assert found.allowed.tolist() == [[True, False], [True, True]]
    assert np.asarray(found, dtype=np.float64).dtype == np.float64


def test_the_array_of_a_record_has_its_layers_heads_and_tokens() -> None:
    xarray = pytest.importorskip("xarray")
    record = layered(n_layers=2, n_heads=3)
    whole = record.pattern().to_xarray()
    assert isinstance(whole, xarray.DataArray)
    assert whole.dims == ("layer", "head", "query", "key")
    assert [*whole.coords["query"].values] == [*record.sequences[0].tokens]
    assert [*whole.coords["head"].values] == [0, 1, 2]
    cell = whole.sel(layer=1, head=2).isel(query=3, key=4)
    assert float(cell) == float(record.arrays["layers.1.pattern"][0, 2, 3, 4])
    assert record.pattern(layer=1).to_xarray().identical(whole.sel(layer=1, drop=True))


def test_keys_of_cross_attention_are_those_of_the_context() -> None:
    record = layered(text_of(("a", "b"), parts=()), context=[text_of(("c", "d", "e"), parts=())], n_layers=2)
    cross = record.pattern(layer=1, head=0, kind="cross")
    assert (cross.query_tokens[1:3], cross.key_tokens[1:4]) == (("a", "b"), ("c", "d", "e"))
    assert cross.values.shape == (4, 5)
    assert record.pattern(kind="encoder").values.shape == (2, 4, 5, 5)
    with pytest.raises(UsageError, match="3 attentions of layer 1"):
        record.pattern(layer=1)
    with pytest.raises(UsageError, match="several attentions of a layer"):
        record.pattern()


def test_attentions_of_two_texts_of_one_length_are_no_array() -> None:
    record = layered(text_of(("a", "b", "c"), parts=()), context=[text_of(("d", "e", "f"), parts=())], n_layers=1)
    with pytest.raises(UsageError, match="several attentions of a layer"):
        record.pattern(head=0)


def test_heads_that_were_chosen_have_their_own_numbers() -> None:
    record = layered(n_layers=1, n_heads=4)
    some = {
        name: array[:, [1, 3]] if array.ndim > 2 and array.shape[1] == 4 else array
        for name, array in record.arrays.items()
    }
    chosen = replace(record, heads=(record.heads[1], record.heads[3]), arrays=some)
    assert np.array_equal(chosen.pattern(layer=0, head=3).values, record.pattern(layer=0, head=3).values)
    with pytest.raises(UsageError, match="head 2 is not in layer 0 of the record, which has the heads 1, 3"):
        chosen.pattern(layer=0, head=2)


def test_a_pattern_that_was_not_kept_is_an_error_that_says_how_to_keep_it() -> None:
    for record in (layered(keep=False), surveyed("the cat sat", n_heads=2)):
        with pytest.raises(MhaError, match="the pattern of layer 0 is not in the record") as fault:
            record.pattern(layer=0)
        assert fault.value.code == "not-kept"
        assert "--keep pattern" in (fault.value.hint or "")


@pytest.mark.parametrize(("asked", "fault"), [
    ({"layer": 7}, "layer 7 is not in the record, which has layers 0, 1"),
    ({"layer": 0, "kind": "cross"}, "kind 'cross' is not in the record, which has self"),
    ({"batch": 1}, "batch 1 is out of range: only 0 exists"),
    ({"layer": 0, "head": 9}, "head 9 is not in layer 0 of the record, which has the heads 0, 1, 2, 3"),
])  # fmt: skip
def test_a_pattern_that_the_record_does_not_have_is_named(asked: dict[str, object], fault: str) -> None:
    with pytest.raises(UsageError) as found:
        layered(n_layers=2).pattern(**asked)  # type: ignore[arg-type]
    assert found.value.message == fault
