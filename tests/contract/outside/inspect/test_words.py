"""One row for one word, over heads and layers; and heads in the order of a condition."""

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


def merged(weights: np.ndarray, words: tuple[range, ...]) -> np.ndarray:
    """The mean over the queries of a word of the sums over the keys of a word."""
    return np.array(
        [[weights[np.ix_([*q], [*k])].sum(axis=1).mean() for k in words] for q in words]
    )


def test_patterns_of_words_and_of_the_mean_of_heads(folder: Path, mha: Any) -> None:
    mha("run", TEXT, "--model", "model", "--save", "r.st")
    record = mhacli.load(folder.parent / "r.st")
    words = record.sequences[0].words
    whole = np.asarray(record.pattern(layer=1))
    mean = record.pattern(layer=1, heads="mean", words=True)
    assert np.allclose(mean, merged(whole.mean(axis=0), words), atol=1e-6)
    assert mean.dims == ("query", "key")
    one = record.pattern(layer=1, head=2, words=True)
    assert np.allclose(one, merged(whole[2], words), atol=1e-6)
    assert len(one.query_tokens) == len(words)
    assert record.pattern(heads="mean").dims == ("layer", "query", "key")
    assert (
        len(record.pattern(heads="mean", words=True).columns()["pattern"][1]) == 2 * len(words) ** 2
    )
    with pytest.raises(mhacli.MhaError):
        record.pattern(layer=1, head=2, heads="mean")


@pytest.mark.parametrize(
    ("layers", "numbers"), [("all", [0, 1]), ("last", [1]), ("-1", [1]), ("0", [0])]
)
def test_a_row_of_a_word_is_that_of_the_mean_in_each_layer(
    layers: str, numbers: list[int], folder: Path, mha: Any
) -> None:
    mha("run", TEXT, "--model", "model", "--save", "r.st")
    record = mhacli.load(folder.parent / "r.st")
    view = ["--layer", layers, "--head", "mean", "--words", "--from", "3", "--view", "top"]
    view += ["--top", "2", "--precision", "6"]
    for words in (["run", TEXT, "--model", "model"], ["show", "r.st"]):
        said = mha(*words, *view).stdout
        assert [int(n) for n in re.findall(r"layer (\d+) · mean of all heads", said)] == numbers
        rows = re.findall(r"(?m)^ *3 “.*→ +(\d+) “.*?” (\.\d{6})", said)
        for number, (key, weight) in zip(numbers, rows, strict=True):
            row = np.asarray(record.pattern(layer=number, heads="mean", words=True))[3]
            assert int(key) == row.argmax()
            assert float(weight) == pytest.approx(row.max(), abs=2e-6)
    page = ["--layer", layers, "--head", "mean", "--words", "--html", "p.html", "--force"]
    mha("run", TEXT, "--model", "model", *page)
    assert "mean of all heads" in (folder.parent / "p.html").read_text()


@pytest.mark.parametrize(
    "words",
    [
        "effect {text} --model model --layer last",
        "heads {text} --model model --layer all",
        "run {text} --head mean",
        "run {text} --model model --head mean --save x.st",
    ],
)
def test_words_for_layers_and_heads_are_refused_where_nothing_reads_them(
    words: str, folder: Path, mha: Any
) -> None:
    said = mha(*(TEXT if word == "{text}" else word for word in words.split()), code=2).said
    assert re.search(r"mha run|--model|--head mean", said)


@pytest.mark.parametrize("name", ["where", "where1", "pattern_1", "where2:up", "p1", "p2:up"])
def test_heads_are_in_the_order_of_a_condition(name: str, folder: Path, mha: Any) -> None:
    conditions = ["--where", "q - k == 2", "--where", "k == 0"]
    words = ["heads", TEXT, "--model", "model", *conditions, "--brief", "--all"]
    document = mha(*words, "--json").json
    at = 1 if "2" in name else 0
    numbers = {(head["layer"], head["head"]): head["patterns"][at] for head in document["heads"]}
    said = mha(*words, "--sort", name).stdout
    found = [(int(a), int(b)) for a, b in re.findall(r"(?m)^ +(\d) +(\d) ", said)]
    assert found == sorted(numbers, key=numbers.__getitem__, reverse=":up" not in name)
    lacking = mha("heads", TEXT, "--model", "model", "--sort", "where", code=2).said
    assert "--where" in lacking
