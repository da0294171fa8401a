import copy
import json
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from safetensors.numpy import save
from support.layers_made import layered, text_of
from support.records import make_record, walked

from mhacli.errors import MhaError
from mhacli.render import csv
from mhacli.render import json as json_view
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.run.trace import closing, step_blocks
from mhacli.render.run.view import run_view
from mhacli.results.record import storage
from mhacli.results.record.record import Cell

DOG = ("a", "dog")
RECORDS = {
    "one": make_record(),
    "batch": make_record(("the", "cat", "sat"), DOG, causal=True),
    "context": make_record(DOG, context=[("the", "cat", "sat")]),
    "training": make_record(dropout=0.5),
    "walked": walked(make_record()),
}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.safetensors")


def written(path, document, arrays):
    """A file with this document and these arrays, whatever they hold."""
    with open(path, "wb") as file:
        file.write(save({k: np.array(v, order="C") for k, v in arrays.items()}, metadata={"mha": json.dumps(document)}))
    return path


def fault_of(path, document, arrays):
    with pytest.raises(MhaError) as caught:
        storage.load(written(path, document, arrays))
    assert caught.value.message.startswith(path)
    return caught.value.message.removeprefix(path).removeprefix(": ").strip()


def arrays_of(record):
    return dict(record.arrays)


@pytest.mark.parametrize("name", RECORDS)
def test_a_saved_record_comes_back_as_it_was(name, path):
    record = RECORDS[name]
    record.save(path)
    found = storage.load(path)
    assert replace(found, arrays={}) == replace(record, arrays={})
    assert list(found.timings) == list(record.timings)
    assert found.arrays.keys() == record.arrays.keys()
    for key, array in record.arrays.items():
        assert found.arrays[key].dtype == array.dtype
        assert np.array_equal(found.arrays[key], array)


def test_scores_keep_their_minus_infinity(path):
    RECORDS["batch"].save(path)
    scores = storage.load(path).arrays["scores"]
    assert scores[0, 0].tolist()[0][1:] == [-np.inf, -np.inf]
    assert np.isfinite(scores[0, 0, 2]).all()


def test_the_same_record_gives_the_same_bytes(tmp_path):
    RECORDS["batch"].save(str(tmp_path / "a"))
    storage.load(str(tmp_path / "a")).save(str(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_existing_file_is_kept_without_force(path):
    RECORDS["one"].save(path)
    with pytest.raises(MhaError) as caught:
        RECORDS["one"].save(path)
    assert caught.value.code == "exists"
    RECORDS["batch"].save(path, force=True)
    assert len(storage.load(path).sequences) == 2


def test_the_document_has_the_fields_of_the_schema_in_their_order():
    document = RECORDS["batch"].document()
    assert list(document) == [
        "schema",
        "command",
        "config",
        "sequences",
        "context",
        "vocabulary",
        "trace",
        "heads",
        "timings",
        "self_check",
        "environment",
        "weights",
        "not_kept",
        "routes",
        "cell",
        "decoding",
        "survey",
        "model",
        "layers",
        "spans",
        "module",
        "effects",
        "effect",
        "corpus",
    ]
    assert document["schema"] == "mha.record/1"
    assert document["sequences"][1] == {
        "text": "a dog",
        "tokens": ["a", "dog"],
        "ids": [0, 2],
        "offsets": [[0, 1], [2, 5]],
        "documents": [],
        "pieces": [],
    }
    assert document["context"] is None
    assert list(document["self_check"]) == ["max_abs_error", "tolerance", "ok"]
    assert {"d_model", "n_heads", "n_kv_heads", "d_head", "d_v", "d_input", "seed", "tokenizer"} <= document[
        "config"
    ].keys()
    assert {"positions", "rope_theta", "max_positions", "causal", "window", "prefix", "sink", "documents", "padding",
            "score_bias", "random", "distribution"} <= document["config"].keys()  # fmt: skip
    assert {"site", "axes", "shape", "dtype", "formula", "meaning", "layout", "flops", "bytes", "time_s"} <= (
        document["trace"][0].keys()
    )
    assert document == json.loads(json.dumps(document, allow_nan=False))


def packed():
    """A record of one text of two documents, and of one that is a single one."""
    record = make_record(("the", "cat", "sat"), DOG)
    first, second = record.sequences
    sequences = (replace(first, documents=(0, 0, 1)), replace(second, documents=(0, 0)))
    return replace(record, config=replace(record.config, documents="|"), sequences=sequences)


def test_the_documents_of_a_text_come_back_and_give_each_token_its_place(path):
    packed().save(path)
    found = storage.load(path)
    assert [s.documents for s in found.sequences] == [(0, 0, 1), (0, 0)]
    assert [s.places for s in found.sequences] == [(0, 1, 0), (0, 1)]
    assert (found.facts.packed, RECORDS["batch"].facts.packed) == (True, False)
    assert found.document()["sequences"][0]["documents"] == [0, 0, 1]


@pytest.mark.parametrize("documents", [[0], [0, 0, 1, 1]])
def test_documents_that_leave_out_a_token_are_refused(path, documents):
    document = packed().document()
    document["sequences"][0]["documents"] = documents
    assert fault_of(path, document, arrays_of(packed())) == "must give every token its document and piece, or none"


@pytest.mark.parametrize(
    ("side", "queries", "keys"), [("right", [0, 0], [0, 0]), ("left", [0, 1], [2, 0])], ids=["right", "left"]
)
def test_a_record_shows_where_the_tokens_of_each_sequence_begin(side, queries, keys):
    record = make_record(("the", "cat", "sat"), DOG, context=[("a",), ("a", "b", "c")])
    record = replace(record, config=replace(record.config, padding=side))
    assert [record.first_query(b) for b in range(2)] == queries
    assert [record.first_key(b) for b in range(2)] == keys


def test_numbers_that_are_not_finite_are_null_in_the_document():
    record = RECORDS["one"]
    check = replace(record.self_check, max_abs_error=float("nan"), ok=False)
    assert replace(record, self_check=check).document()["self_check"]["max_abs_error"] is None


def test_keys_are_the_texts_themselves_or_their_context():
    assert RECORDS["one"].keys == RECORDS["one"].sequences
    assert RECORDS["context"].keys == RECORDS["context"].context


# ------------------------------------------------------------------------------------------------------ hostile files


def test_a_file_that_is_no_record_is_refused(path):
    record = RECORDS["one"]
    assert fault_of(path, None, arrays_of(record)) == "is not a record of schema mha.record/1: it has no schema"
    assert fault_of(path, [1], {}) == "is not a record of schema mha.record/1: it has no schema"
    document = record.document() | {"schema": "mha.record/2"}
    assert fault_of(path, document, {}) == "is not a record of schema mha.record/1: it has 'mha.record/2'"
    other = {"format": "mha.weights/1"}
    assert fault_of(path, other, {}) == "is not a record of schema mha.record/1: it has 'mha.weights/1'"


@pytest.mark.parametrize("name", ["qk", "scores", "pattern", "z", "out", "allowed", "entropy", "strongest_key"])
def test_an_array_whose_shape_does_not_fit_its_tokens_is_refused(path, name):
    record = RECORDS["batch"]
    whole = record.arrays[name]
    for wrong in (whole[:1], whole[..., :1], np.zeros((), whole.dtype)):
        message = fault_of(path, record.document(), arrays_of(record) | {name: wrong})
        shapes = f"{list(wrong.shape)}, but its tokens and heads need {list(whole.shape)}"
        assert message == f"{name} has the shape {shapes}"


@pytest.mark.parametrize("name", ["pattern", "scores", "z", "entropy", "allowed", "strongest_key"])
def test_an_array_of_the_wrong_kind_of_numbers_is_refused(path, name):
    record = RECORDS["one"]
    wrong = record.arrays[name].astype(np.float32 if name in ("allowed", "strongest_key") else np.int64)
    assert fault_of(path, record.document(), arrays_of(record) | {name: wrong}).startswith(f"{name} must hold ")


@pytest.mark.parametrize("name", ["allowed", "entropy", "strongest_key"])
def test_an_array_that_every_view_needs_must_be_there(path, name):
    record = RECORDS["one"]
    arrays = arrays_of(record)
    del arrays[name]
    assert fault_of(path, record.document(), arrays) == f"lacks the array {name}"


@pytest.mark.parametrize("position", [-2, 3, 2**40])
def test_a_strongest_key_that_is_none_is_refused(path, position):
    record = RECORDS["one"]
    strongest = record.arrays["strongest_key"].copy()
    strongest[0, 1, 2] = position
    message = fault_of(path, record.document(), arrays_of(record) | {"strongest_key": strongest})
    assert message == "strongest_key must hold key positions from -1 to 2"


@pytest.mark.parametrize("share", [np.inf, -np.inf, -0.5, 1.5])
def test_a_pattern_that_holds_no_weights_is_refused(path, share):
    record = RECORDS["one"]
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 0, 0] = share
    message = fault_of(path, record.document(), arrays_of(record) | {"pattern": pattern})
    assert message == "pattern must hold weights from 0 to 1"


@pytest.mark.parametrize(
    ("field", "value"),
    [("ids", [0]), ("offsets", [[0, 1]]), ("tokens", ["the"]), ("tokens", ["a"] * 9), ("tokens", [])],
)
@pytest.mark.parametrize("family", ["sequences", "context"])
def test_tokens_ids_and_offsets_must_match(path, family, field, value):
    record = make_record(("the", "cat", "sat"), context=[("a", "big", "dog")])
    document = record.document()
    document[family][0][field] = value
    assert fault_of(path, document, arrays_of(record)) == "must give every token its id and offsets"


@pytest.mark.parametrize("change", [{"sequences": []}, {"context": []}, {"context": "twice"}])
def test_sequences_must_be_there_and_have_their_contexts(path, change):
    record = RECORDS["context"]
    document = record.document()
    document |= {"context": document["context"] * 2} if change == {"context": "twice"} else change
    assert fault_of(path, document, arrays_of(record)) == "must have sequences, and either no contexts or as many"


@pytest.mark.parametrize(
    "change", [{"n_heads": 0}, {"d_head": -1}, {"n_kv_heads": 3}, {"window": [-1, 2]}, {"dtype": "int8"}]
)
def test_a_config_that_breaks_a_rule_is_refused_by_the_file(path, change):
    document = RECORDS["one"].document()
    document["config"] |= change
    assert fault_of(path, document, arrays_of(RECORDS["one"]))


def test_what_a_config_leaves_open_is_filled_in(path):
    document = RECORDS["one"].document()
    document["config"] |= {"d_head": None, "d_v": None, "scale": None, "n_kv_heads": None}
    assert storage.load(written(path, document, arrays_of(RECORDS["one"]))).config == RECORDS["one"].config


@pytest.mark.parametrize(
    ("field", "value"), [("sequence", 1), ("sequence", -1), ("head", 2), ("query", 3), ("key", 3), ("key", -4)]
)
def test_a_cell_outside_of_the_record_is_refused(path, field, value):
    document = RECORDS["walked"].document()
    document["cell"][field] = value
    assert fault_of(path, document, arrays_of(RECORDS["walked"])) == "cell must lie within the record"


@pytest.mark.parametrize("field", ["scores_row", "pattern_row"])
def test_a_cell_with_a_short_row_is_refused(path, field):
    document = RECORDS["walked"].document()
    document["cell"][field].pop()
    assert fault_of(path, document, arrays_of(RECORDS["walked"])) == "cell must lie within the record"


@pytest.mark.parametrize("name", ["pattern", "scores", "qk"])
@pytest.mark.parametrize("index", [0, 2])
def test_a_layer_with_a_matrix_must_have_its_mask(path, name, index):
    record = layered()
    prefix = f"layers.{index}."
    arrays = {key: array for key, array in arrays_of(record).items() if key != f"{prefix}allowed"}
    arrays[prefix + name] = arrays.pop(f"{prefix}pattern")
    message = f"lacks the array {prefix}allowed"
    assert fault_of(path, record.document(), arrays) == message
    del arrays[prefix + name]
    storage.load(written(path, record.document(), arrays))


@pytest.mark.parametrize("prompts", [[], [3], [3, 4, 5], [0, 3], [3, 5], [-1, 2]])
def test_prompts_that_are_not_those_of_the_sequences_are_refused(path, prompts):
    record = layered(text_of(("a", "big", "red", "dog"), parts=()), text_of(("a", "cat"), parts=()))
    document = record.document()
    document["model"]["generated"] = {"prompt_lens": prompts, "n_tokens": 2, "repeated": 2}
    message = "generated.prompt_lens must have a number from 1 to its length for every sequence"
    assert fault_of(path, document, arrays_of(record)) == message
    document["model"]["generated"]["prompt_lens"] = [6, 1]
    storage.load(written(path, document, arrays_of(record)))


@pytest.mark.parametrize(("kind", "size"), [("encoder", (6, 6)), ("decoder", (4, 4)), ("cross", (4, 6))])
def test_a_cell_lies_within_the_texts_that_its_layer_reads(path, kind, size):
    full = layered(
        text_of(("a", "dog"), parts=()), context=[text_of(("the", "cat", "sat", "down"), parts=())], n_layers=1
    )
    index = [layer.kind for layer in full.layers].index(kind)
    name = full.layers[index].name
    arrays = {f"layers.0.{k}": a for k, a in full.of_layer(index).arrays.items()}
    heads = tuple(head for head in full.heads if head.attention == name)
    row = (0.0,) * size[1]
    cell = Cell(0, 3, size[0] - 1, size[1] - 1, (), (), (), 0.0, 1.0, None, True, 0.0, row, row, 0.0, ())
    record = replace(full, layers=(full.layers[index],), heads=heads, arrays=arrays, cell=cell)
    assert storage.load(written(path, record.document(), arrays_of(record))).cell == cell
    for wrong in (replace(cell, query=size[0]), replace(cell, key=size[1]), replace(cell, head=4)):
        document = replace(record, cell=wrong).document()
        assert fault_of(path, document, arrays_of(record)) == "cell must lie within the record"


def test_arrays_of_later_versions_are_left_out(path):
    record = RECORDS["one"]
    for name in ("later", 'quote"', "config"):
        found = storage.load(written(path, record.document(), arrays_of(record) | {name: np.ones(3)}))
        assert found.arrays.keys() == record.arrays.keys()


def test_an_unreadable_kind_of_numbers_is_refused(path):
    record = RECORDS["one"]
    message = fault_of(path, record.document(), arrays_of(record) | {"later": np.ones(3, np.uint16)})
    assert message == "array 'later' has dtype U16, which is not one of F64, F32, F16, I64, I32, BOOL"


def test_a_file_that_only_the_library_refuses_is_no_bug_of_mha(path):
    RECORDS["one"].save(path)
    with open(path, "rb") as file:
        data = file.read()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    extra = b',"more":{"dtype":"F32","shape":[%d,%d,0],"data_offsets":[0,0]}}' % (1 << 60, 1 << 60)
    header = header.rstrip()[:-1] + extra
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(MhaError) as caught:
        storage.load(path)
    assert (caught.value.code, caught.value.path) == ("bad-file", path)


def test_bytes_that_are_neither_true_nor_false_are_refused(path):
    record = RECORDS["one"]
    odd = np.full(record.arrays["allowed"].shape, 7, np.uint8).view(bool)
    message = fault_of(path, record.document(), arrays_of(record) | {"allowed": odd})
    assert message == "allowed must hold bytes of 0 and 1"


@pytest.mark.parametrize("name", ["one", "layers"])
def test_the_arrays_of_an_opened_record_are_read_when_one_is_requested(name, path, monkeypatch):
    record = RECORDS["one"] if name == "one" else layered(text_of(("a", "big", "red", "dog"), parts=()))
    record.save(path)
    read = []
    load = safetensors.numpy.load
    monkeypatch.setattr(safetensors.numpy, "load", lambda data: read.append(len(data)) or load(data))
    found = storage.load_late(path)
    assert found.arrays.keys() == record.arrays.keys()
    assert len(found.arrays) == len(record.arrays)
    assert "pattern" in (found if name == "one" else found.of_layer(0)).arrays
    assert "patterns" not in found.arrays
    assert 3 not in found.arrays
    views = [(found, record)] if name == "one" else [(found.of_layer(i), record.of_layer(i)) for i in range(2)]
    assert all(own.arrays.keys() == meant.arrays.keys() for own, meant in views)
    with pytest.raises(KeyError):
        found.arrays["patterns"]
    assert read == []
    for own, meant in views:
        assert all(np.array_equal(own.arrays[key], array, equal_nan=True) for key, array in meant.arrays.items())
    assert len(read) == 1


def test_an_opened_record_shows_numbers_without_meaning_when_they_are_requested(path):
    record = RECORDS["one"]
    arrays = arrays_of(record) | {"pattern": np.full_like(record.arrays["pattern"], 1.5)}
    opened = storage.load_late(written(path, record.document(), arrays))
    for _ in range(2):
        with pytest.raises(MhaError, match="pattern must hold weights from 0 to 1"):
            opened.arrays["entropy"]


def test_a_file_that_is_another_by_the_time_its_numbers_are_requested_is_reported(path, tmp_path):
    RECORDS["one"].save(path)
    opened = storage.load_late(path)
    RECORDS["batch"].save(path, force=True)
    with pytest.raises(MhaError, match="the file was replaced while it was read"):
        opened.arrays["entropy"]
    (tmp_path / "run.safetensors").unlink()
    with pytest.raises(MhaError) as caught:
        opened.arrays["entropy"]
    assert caught.value.code == "unreadable"


def everything(record):
    """Every view of a record."""
    screen = Screen(80, True)
    console = Console(file=StringIO(), width=80)
    for view in ("matrix", "heatmap", "top", "none"):
        for colour in (True, False):
            console.print(run_view(record, ViewOptions(view=view), replace(screen, colour=colour)))
    console.print(Group(*step_blocks(record, screen), closing(record, screen)))
    document = "".join(json_view.pieces(record))
    return json.loads(document), "".join(csv.pieces(record))


def paths_in(value, prefix=()):
    yield prefix
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_in(item, (*prefix, key))


DOCUMENT = walked(make_record(("the", "cat", "sat"), DOG, dropout=0.25)).document()
PATHS = [place for place in paths_in(DOCUMENT) if place]
HOSTILE = [None, True, -1, 0, 3, 2**40, 10**400, 1e307, "", "\x1b[2J\u202e\ud800", [], [[]], {}, {"a": 1}]


@pytest.mark.full
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PATHS), change=st.sampled_from(["delete", "twice", *range(len(HOSTILE))]))
def test_a_header_that_was_altered_is_refused_or_drawn_but_never_breaks(place, change, tmp_path_factory):
    record = make_record(("the", "cat", "sat"), DOG, dropout=0.25)
    document = copy.deepcopy(DOCUMENT)
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    if change == "delete":
        del holder[place[-1]]
    elif change == "twice":
        holder[place[-1]] = [holder[place[-1]], holder[place[-1]]]
    else:
        holder[place[-1]] = HOSTILE[change]
    path = str(tmp_path_factory.mktemp("fuzz") / "run.safetensors")
    try:
        found = storage.load(written(path, document, record.arrays))
    except MhaError:
        return
    everything(found)
