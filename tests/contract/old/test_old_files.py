"""Files that version 0.1.0 saved are read for good, with the numbers that they hold."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from support import checkpoints
from support.mha import Ended
from support.scans import corpus_file, digests

import mhacli

Mha = Callable[..., Ended]
FILES = Path(__file__).parent / "files"
WEIGHTS = sorted(path.stem for path in FILES.glob("weights*.safetensors"))
RECORDS = sorted(path.stem for path in FILES.glob("*.safetensors") if path.stem not in WEIGHTS)
MATRICES = [
    name
    for name in RECORDS
    if name.startswith(("run-", "model"))
    and name not in ("model-heads", "model-effect", "model-edges")
]
"""Records that hold whole patterns."""


def stored(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON and the arrays of a file, as the safetensors library reads them. bfloat16 becomes
    float32.
    """
    with safe_open(path, "pt") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}
        document = json.loads(file.metadata()["mha"])
    return document, {
        name: (a.float() if a.dtype.itemsize == 2 else a).numpy() for name, a in arrays.items()
    }


GONE = {"direct", "judgements", "resampled_from"}
"""Fields of effects that records had, and that are read over now."""


def missing(stored: Any, shown: Any, place: str = "") -> list[str]:
    """Where a value lacks or changes something of a stored one. It may have more fields."""
    if isinstance(stored, dict) and isinstance(shown, dict):
        pairs = {
            f"{place}.{key}": (value, shown.get(key))
            for key, value in stored.items()
            if key not in GONE
        }
    elif isinstance(stored, list) and isinstance(shown, list) and len(stored) == len(shown):
        pairs = {f"{place}[{i}]": pair for i, pair in enumerate(zip(stored, shown, strict=True))}
    else:
        return [] if stored == shown else [place]
    return [fault for name, (one, other) in pairs.items() for fault in missing(one, other, name)]


def same(shown: Any, array: np.ndarray) -> bool:
    """Whether nested lists are an array: null where it is not finite, and shorter where it is
    padded on the right.
    """
    if isinstance(shown, list):
        return len(shown) <= len(array) and all(same(one, array[i]) for i, one in enumerate(shown))
    return not np.isfinite(array) if shown is None else bool(array.dtype.type(shown) == array)


def test_there_are_files_of_every_kind() -> None:
    assert len(RECORDS) >= 20
    assert len(WEIGHTS) == 3
    assert len(MATRICES) >= 10


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_as_json_has_every_stored_field_and_number(mha: Mha, name: str) -> None:
    document, arrays = stored(FILES / f"{name}.safetensors")
    shown = mha("show", FILES / f"{name}.safetensors", "--json").json
    layers = document.pop("layers") or []
    assert missing(document, shown) == []
    assert missing(layers, shown.get("layers") or []) == []
    compared = 0
    for key, array in arrays.items():
        place, _, field = key.rpartition(".")
        numbers = (shown["layers"][int(place.split(".")[1])] if place else shown).get(field)
        if numbers is not None:
            hides = field == "qk"  # null where it is masked
            assert same(
                numbers, np.where(arrays[key[:-2] + "allowed"], array, np.nan) if hides else array
            ), key
            compared += 1
    assert compared >= (3 if name in MATRICES else 0)


@pytest.mark.real
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_shown_drawn_and_equal_to_itself(mha: Mha, tmp_path: Path, name: str) -> None:
    path = FILES / f"{name}.safetensors"
    pictures = ["--svg", "p.svg"] if name in MATRICES else []
    assert mha("show", path, "--view", "heatmap", "--all", "--html", "p.html", *pictures).stdout
    assert "<html" in (tmp_path / "p.html").read_text()
    assert not pictures or "<svg" in (tmp_path / "p.svg").read_text()
    assert mha("diff", path, path, "--json").json["schema"] == "mha.diff/1"


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_loaded_in_python_and_saved_again(tmp_path: Path, name: str) -> None:
    path = FILES / f"{name}.safetensors"
    document, arrays = stored(path)
    record = mhacli.load(str(path))
    for key, array in arrays.items():
        if "." not in key:
            np.testing.assert_array_equal(record.arrays[key], array)
    rows = record.heads.to_dicts()
    assert len(rows) == len(document["heads"])
    for row, head in zip(rows, document["heads"], strict=True):
        assert {
            name: head[name] for name in ("head", "kind", "entropy", "sink")
        }.items() <= row.items()
    record.save(str(tmp_path / "again.safetensors"))
    again, others = stored(tmp_path / "again.safetensors")
    assert missing(document, again) == []
    assert others.keys() >= arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(others[key], array)


@pytest.mark.real
@pytest.mark.parametrize("name", MATRICES)
def test_the_patterns_of_a_record_have_their_weights_and_a_csv_a_line_for_each(
    mha: Mha, name: str
) -> None:
    rows = list(
        csv.DictReader(io.StringIO(mha("show", FILES / f"{name}.safetensors", "--csv").stdout))
    )
    document, arrays = stored(FILES / f"{name}.safetensors")
    record = mhacli.load(str(FILES / f"{name}.safetensors"))
    for i, layer in enumerate(document["layers"] or [None]):
        choice = {} if layer is None else {"layer": layer["layer"], "kind": layer["kind"]}
        array = arrays["pattern" if layer is None else f"layers.{i}.pattern"][0, 1]
        values = record.pattern(head=1, **choice).values
        np.testing.assert_array_equal(values, array[: len(values), : values.shape[1]])
    n_cells = sum(
        np.isfinite(array).sum() for key, array in arrays.items() if key.endswith("pattern")
    )
    assert 0 < len(rows) <= n_cells


# -------------------------------------------------------------------------------------- other files


@pytest.mark.real
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_run_with_their_config_and_are_saved_as_they_were(
    mha: Mha, tmp_path: Path, name: str
) -> None:
    path = FILES / f"{name}.safetensors"
    document, tensors = stored(path)
    text = "the cat" if document["config"]["tokenizer"] == "word" else "the c"
    words = ["run", text, "--weights", path, "--save-weights", "again.safetensors", "--json"]
    record = mha(*words).json
    assert record["self_check"]["ok"]
    assert missing(document["config"], record["config"]) == []
    assert record["vocabulary"] == document["vocabulary"]
    again, others = stored(tmp_path / "again.safetensors")
    assert missing(document, again) == []
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(others[key], tensor)


def test_weights_are_listed(mha: Mha) -> None:
    for name in WEIGHTS:
        _, tensors = stored(FILES / f"{name}.safetensors")
        listed = mha("weights", "info", FILES / f"{name}.safetensors", "--tensors", "--json").json[
            "tensors"
        ]
        assert {one["name"]: tuple(one["shape"]) for one in listed} == {
            key: a.shape for key, a in tensors.items()
        }


def test_a_scan_is_shown_with_the_numbers_of_its_summary(mha: Mha, tmp_path: Path) -> None:
    document, _ = stored(FILES / "scan.mha" / "summary.safetensors")
    shown = mha("show", FILES / "scan.mha", "--json").json
    assert missing(document, shown) == []
    corpus = shown["corpus"]
    assert (corpus["n_documents"], corpus["n_bad"], len(corpus["heads"])) == (3, 0, 12)
    assert mha("show", FILES / "scan.mha").stdout
    mha("show", FILES / "scan.mha", "--html", "p.html")
    assert "<html" in (tmp_path / "p.html").read_text()


def test_an_earlier_record_shows_the_fields_that_were_added(mha: Mha) -> None:
    assert "measured" in mha("show", FILES / "effect.safetensors", "--json").json["effect"]


def test_a_scan_of_an_earlier_version_does_not_go_on_and_stays_as_it_is(
    mha: Mha, tmp_path: Path
) -> None:
    shutil.copytree(FILES / "scan.mha", tmp_path / "scan.mha")
    (tmp_path / "gpt2").symlink_to(checkpoints.folder("gpt2"))
    corpus_file(tmp_path / "corpus.jsonl", ["the cat sat on the mat", "a dog ran", "the cat ran"])
    options = ("--layer", "0,1", "--effect", "--where", "k < q")
    words = ("--model", "gpt2", *options, "--out", "scan.mha", "--json")
    refused = mha("scan", "corpus.jsonl", *words, code=2, env={"MHA_BLOCK": "torch"}).said
    assert "format was" in refused
    assert not re.search("(digest|layers|conditions|unit_size|effect|pack) was", refused)
    for part in ("rows", "units"):
        assert digests(tmp_path / "scan.mha" / part) == digests(FILES / "scan.mha" / part)


def test_a_vocabulary_gives_its_ids(mha: Mha) -> None:
    record = mha(
        "run", "the zebra sat", "--d-model", "8", "--vocab", FILES / "vocabulary.json", "--json"
    ).json
    tokens = [row["token"] for row in json.loads((FILES / "vocabulary.json").read_text())["tokens"]]
    assert record["vocabulary"][: len(tokens)] == tokens
    assert record["sequences"][0]["ids"] == [tokens.index("the"), len(tokens), tokens.index("sat")]
