"""Options that have no effect are said to have none, and what a view prints can be typed back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_models import llama_folder

import mhacli

TEXT = "the unbelievable foxes sleep by a stony mill"

pytestmark = pytest.mark.real


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "model")


@pytest.mark.parametrize("rows", ["generated", "last", "2,3"])
def test_queries_without_a_layer_are_listed_as_the_mean_of_all_heads(
    rows: str, folder: Path, mha: Any
) -> None:
    words = ["run", TEXT, "--model", "model", "--generate", "3", "--from", rows, "--precision", "6"]
    said = mha(*words, "--save", "r.st", "--top", "1").stdout
    record = mhacli.load(folder.parent / "r.st")
    mean = np.mean([np.asarray(record.pattern(layer=layer)) for layer in (0, 1)], axis=(0, 1))
    n = len(mean)
    queries = {"generated": range(n - 4, n - 1), "last": [n - 1], "2,3": [2, 3]}[rows]
    found = re.findall(r"(?m)^(\d+) “.*” +→ +(\d+) “.*?” (\.\d{6})", said)
    assert [int(query) for query, _, _ in found] == [*queries]
    for query, key, weight in found:
        assert int(key) == mean[int(query)].argmax()
        assert float(weight) == pytest.approx(mean[int(query)].max(), abs=1e-5)
    again = mha("show", "r.st", "--from", rows, "--precision", "6", "--top", "1").stdout
    assert re.findall(r"(?m)^(\d+) “.*” +→ +(\d+) “.*?” (\.\d{6})", again) == found


def test_rows_of_generated_tokens_are_refused_where_none_are(folder: Path, mha: Any) -> None:
    words = ["run", TEXT, "--model", "model", "--from", "generated"]
    assert "--generate" in mha(*words, code=2).said


@pytest.mark.parametrize(
    ("words", "needed"),
    [("--words", "--layer"), ("--top 5", "--view top")],
)
def test_an_option_without_effect_is_named_on_one_line(
    words: str, needed: str, folder: Path, mha: Any
) -> None:
    plain = mha("run", TEXT, "--model", "model", "--brief")
    ended = mha("run", TEXT, "--model", "model", "--brief", *words.split())
    assert ended.stdout == plain.stdout
    lines = [line for line in ended.stderr.splitlines() if words.split()[0] in line]
    assert len(lines) == 1
    assert needed in lines[0]


def test_the_number_of_a_word_typed_back_gives_its_row(folder: Path, mha: Any) -> None:
    words = ["run", TEXT, "--model", "model", "--layer", "1", "--head", "2", "--words"]
    every = mha(*words, "--view", "top", "--all").stdout
    for number in (0, 3, 5):
        (row,) = re.findall(rf"(?m)^ *{number} “.*→.*$", every)
        got = mha(*words, "--view", "top", "--from", str(number)).stdout
        rows = re.findall(r"(?m)^ *\d+ “.*→.*$", got)
        assert [each.split() for each in rows] == [row.split()]
    n_words = len(re.findall(r"(?m)^ *\d+ “.*→", every))
    assert str(n_words - 1) in mha(*words, "--from", str(n_words), code=2).said
