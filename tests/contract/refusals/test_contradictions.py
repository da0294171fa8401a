"""Records that contradict themselves are refused, with the part that does not fit, before anything
is computed from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.mha import Ended, run
from support.mutations import HUGE, mutated, saved, stored

import mhacli

Mha = Callable[..., Ended]
FILES = Path(__file__).parents[1] / "old" / "files"
KINDS = {
    "run": "run-cross",
    "texts": "run-padded",
    "trace": "trace-cell",
    "code": "trace-code",
    "decode": "decode",
    "heads": "heads",
    "model": "model-chat",
    "pair": "model-pair",
    "effect": "model-edges",
    "scan": "scan.mha/summary",
}
READERS = (
    ("show", "m.safetensors", "--verbose"),
    ("show", "m.safetensors", "--json"),
    ("diff", "m.safetensors", "whole.safetensors"),
    ("show", "m.safetensors", "--html", "m.html"),
    ("show", "m.safetensors", "--csv"),
)


def is_read_or_refused(mha: Mha, folder: Path, kind: str, seed: int) -> None:
    """One changed record gets a proper answer, or an error that is short and names a part of it.
    What any run must keep is asserted by `mha`.
    """
    whole = FILES / f"{KINDS[kind]}.safetensors"
    data, what = mutated(whole, seed)
    (folder / "whole.safetensors").write_bytes(whole.read_bytes())
    (folder / "m.safetensors").write_bytes(data)
    ended = mha(*READERS[seed % len(READERS)], code=(0, 1, 2, 3))
    assert "Warning" not in ended.stderr, what
    if '"bad-file"' in ended.stderr or "m.safetensors: " in ended.stderr:
        assert re.search(r"[$\w]+[.\[ ]|schema", ended.said), (what, ended.said)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_with_one_other_part_is_read_or_refused(
    mha: Mha, tmp_path: Path, kind: str
) -> None:
    for seed in range(6):
        is_read_or_refused(mha, tmp_path, kind, seed)


@pytest.mark.real
@pytest.mark.parametrize("kind", KINDS)
def test_many_records_with_one_other_part_are_read_or_refused(
    mha: Mha, tmp_path: Path, kind: str
) -> None:
    for seed in range(6, 120):
        is_read_or_refused(mha, tmp_path, kind, seed)


def _shorter(name: str, axis: int) -> Callable[[Any, Any], None]:
    def change(arrays: Any, document: Any) -> None:
        arrays[name] = arrays[name].take(range(arrays[name].shape[axis] - 1), axis=axis)

    return change


def _put(value: Any, *place: str | int) -> Callable[[Any, Any], None]:
    def change(arrays: Any, document: Any) -> None:
        for key in place[:-1]:
            document = document[key]
        document[place[-1]] = value

    return change


def _without(name: str) -> Callable[[Any, Any], None]:
    return lambda arrays, document: arrays.pop(name)


def _as(name: str, dtype: type) -> Callable[[Any, Any], None]:
    return lambda arrays, document: arrays.update({name: arrays[name].astype(dtype)})


CONTRADICTIONS = {
    "ids": ("run", _put([1], "sequences", 0, "ids"), "sequences[0].ids"),
    "offsets": ("run", _put([[0, 1]], "sequences", 0, "offsets"), "sequences[0].offsets"),
    "end": ("run", _put([0, 999], "sequences", 0, "offsets", 0), "offsets"),
    "no texts": ("run", _put([], "sequences"), "sequences"),
    "context": ("run", _put([], "context"), "context"),
    "no tokens": ("model", _put([], "sequences", 0, "tokens"), "sequences[0]."),
    "pieces": ("model", lambda a, d: d["sequences"][0]["pieces"].pop(), "sequences[0].pieces"),
    "fewer heads": ("model", lambda a, d: d["heads"].pop(), "layers.0."),
    "equal heads": ("model", _put(0, "heads", 1, "head"), "heads"),
    "no heads": ("heads", _put([], "heads"), "the shape of "),
    "sink": ("heads", _put(99, "heads", 0, "largest", 0, "key"), "a key of heads"),
    "sequence": ("heads", _put(-1, "heads", 0, "largest", 0, "sequence"), "of heads"),
    "span": ("model", lambda a, d: d["spans"].pop(), "span"),
    "span texts": ("model", _put([], "spans", 0, "tokens"), "spans[0].tokens"),
    "steps": ("heads", lambda a, d: d["survey"]["steps"].pop(), "profile"),
    "block": ("heads", _put(0, "survey", "block"), "survey.block"),
    "axes": ("trace", _put([], "trace", 0, "axes"), "trace[0]"),
    "cell": ("trace", _put(77, "cell", "query"), "query of cell"),
    "row": ("trace", _put([0.5], "cell", "pattern_row"), "cell.scores_row"),
    "cache": ("decode", _put([], "trace", -1, "cache", "tokens"), "cache.tokens"),
    "corpus": ("scan", lambda a, d: d["corpus"]["heads"].pop(), "corpus.heads"),
    "edge": ("effect", _put(99, "effects", 0, "key"), "key of effects[0]"),
    "huge": ("effect", _put(HUGE, "effects", 0, "query"), "query"),
    "huge float": ("heads", _put(HUGE, "heads", 0, "entropy"), "entropy"),
    "n_heads": ("run", _put(1, "config", "n_heads"), "the shape of "),
    "head axis": ("run", _shorter("pattern", 1), "pattern"),
    "query axis": ("pair", _shorter("layers.0.entropy", 2), "layers.0.entropy"),
    "key axis": ("pair", _shorter("layers.1.pattern", 3), "layers.1.pattern"),
    "mask": ("run", _without("allowed"), "allowed"),
    "map": ("effect", _without("layers.1.map"), "layers.1."),
    "no bytes": ("model", lambda a, d: a.update({"layers.0.z": np.zeros((0,), "f")}), "layers.0.z"),
    "integers": ("run", _as("pattern", np.int64), "pattern"),
    "floats": ("run", _as("strongest_key", np.float32), "strongest_key"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_where_the_record_is_read(tmp_path: Path, name: str) -> None:
    kind, change, field = CONTRADICTIONS[name]
    arrays, document = stored(FILES / f"{KINDS[kind]}.safetensors")
    for sums in ("checksum", "array_checksums"):
        document.pop(sums, None)
    change(arrays, document)
    path = tmp_path / "m.safetensors"
    path.write_bytes(saved(arrays, document))
    with pytest.raises(mhacli.MhaError) as refused:
        mhacli.load(str(path))
    assert refused.value.message.startswith(str(path))
    assert field in refused.value.message


def test_a_header_whose_metadata_are_null_is_no_record(mha: Mha, tmp_path: Path) -> None:
    header = b'{"__metadata__": null}'
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for words in (("show",), ("diff", "m.safetensors"), ("weights", "info")):
        assert "m.safetensors" in mha(*words, "m.safetensors", code=(0, 1)).stderr + "m.safetensors"
    assert "not a record" in mha("show", "m.safetensors", code=1).said


def test_records_without_arrays_and_of_parts_are_read(tmp_path: Path) -> None:
    """What a writer could ever have written: no arrays at all, the mean of heads, padded texts."""
    for kind in KINDS:
        arrays, document = stored(FILES / f"{KINDS[kind]}.safetensors")
        for sums in ("checksum", "array_checksums"):
            document.pop(sums, None)
        (tmp_path / "bare").write_bytes(saved({}, document))
        record = mhacli.load(str(tmp_path / "bare"))
        assert len(record.heads) == len(document["heads"])
        optional = {"layers", "spans", "effects", "routes", "not_kept", "survey", "corpus", "model"}
        less = {name: each for name, each in document.items() if each or name not in optional}
        (tmp_path / "less").write_bytes(saved(arrays, json.loads(json.dumps(less))))
        assert mhacli.load(str(tmp_path / "less")).arrays.keys() == arrays.keys()


def test_the_example_of_a_scan_is_read(tmp_path: Path) -> None:
    """It has no heads of a corpus yet."""
    arrays, document = stored(FILES / "scan.mha" / "summary.safetensors")
    for sums in ("checksum", "array_checksums"):
        document.pop(sums, None)
    document["corpus"]["heads"] = []
    (tmp_path / "example").write_bytes(saved(arrays, document))
    corpus = mhacli.load(str(tmp_path / "example")).corpus
    assert corpus is not None
    assert corpus.heads == ()


def test_records_made_in_python_are_read_again(tmp_path: Path) -> None:
    config = mhacli.Config(n_heads=2, d_model=8)
    plain = mhacli.inspect(["a b c", "d"], config)
    rng = np.random.default_rng(0)
    weights = rng.random((2, 1, 3, 4, 5))
    given = mhacli.record_of([*(weights / weights.sum(-1, keepdims=True))])
    for number, record in enumerate((plain, plain.mean_of_heads(), given, given.mean_of_heads())):
        path = str(tmp_path / f"{number}")
        record.save(path)
        assert mhacli.load(path).arrays.keys() == record.arrays.keys()


# ------------------------------------------------------------------------------- places of a model


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with what a model computes at its places."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "m").symlink_to(checkpoints.folder("gpt2"))
    run(folder, "diff", "m", "the cat", "--save", "p")
    return folder / "p"


OF_PLACES: dict[str, Callable[[Any, Any, Any], object]] = {
    "a tensor for a field": lambda arrays, document, call: call[1].update(q=5),
    "a scale that is no number": lambda arrays, document, call: call[1].update(scale="x"),
    "no keys": lambda arrays, document, call: call[2].pop("k"),
    "an output with a name": lambda arrays, document, call: document["entries"].append(
        [call[0], None, {"x": "0"}]
    ),
    "keys of another width": lambda arrays, document, call: arrays.update(
        {call[2]["k"]: arrays[call[2]["k"]][..., :-1]}
    ),
    "values of fewer heads": lambda arrays, document, call: arrays.update(
        {call[2]["v"]: arrays[call[2]["v"]][:, :-1]}
    ),
    "queries of three axes": lambda arrays, document, call: arrays.update(
        {call[2]["q"]: arrays[call[2]["q"]][0]}
    ),
    "no ids": lambda arrays, document, call: document["inputs"].update(input_ids=[[]]),
    "ids that are none": lambda arrays, document, call: document["inputs"].update(
        input_ids=[[None, {}]]
    ),
    "a negative id": lambda arrays, document, call: document["inputs"].update(input_ids=[[-1]]),
    "no inputs": lambda arrays, document, call: document["inputs"].clear(),
}


@pytest.mark.parametrize("what", OF_PLACES)
def test_places_that_contradict_themselves_are_refused(
    mha: Mha, tmp_path: Path, places: Path, what: str
) -> None:
    (tmp_path / "m").symlink_to(places.with_name("m"))
    arrays, document = stored(places)
    call = next(entry for entry in document["entries"] if entry[1] is not None)
    OF_PLACES[what](arrays, document, call)
    (tmp_path / "p").write_bytes(saved(arrays, document))
    for words in (("p", "m"), ("m", "p")):
        error = mha("diff", *words, "--json", code=1).error
        assert (error["code"], error["message"][:2]) == ("bad-file", "p:")


def test_places_of_tensors_without_numbers_are_compared(
    mha: Mha, tmp_path: Path, places: Path
) -> None:
    (tmp_path / "m").symlink_to(places.with_name("m"))
    arrays, document = stored(places)
    _, _, tensors = next(entry for entry in document["entries"] if entry[1] is None)
    arrays[tensors[""]] = arrays[tensors[""]][:0]
    (tmp_path / "p").write_bytes(saved(arrays, document))
    assert "[0, " in mha("diff", "p", "m").stdout
