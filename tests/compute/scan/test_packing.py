"""Packed texts: what they are made of, by a script of its own, and that a scan of them is like any other."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints_saved import N_POSITIONS, Checkpoints, attentions
from support.scans import corpus_file, digests, found, sentences, study

from mhacli.errors import UsageError
from mhacli.requests.scan import ScanRequest
from mhacli.results.record.consistency import contradictions
from mhacli.text.corpus import CorpusFormat

TEXTS = [*sentences(20), "日本語 naïve ☃" * 9]
LENGTH = 13
PACKED = {"pack": True, "max_tokens": LENGTH}


def packed_ids(folder: str, texts: Sequence[str], length: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The ids of every packed text, and its first document (from 1) and number of documents."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    around = [i for i in tokenizer("a").input_ids if i in tokenizer.all_special_ids]
    is_behind = tokenizer("a").input_ids[-1:] == around
    stream: list[tuple[int, int]] = []
    for number, text in enumerate(texts, 1):
        stream += [(tokenizer.eos_token_id, number - 1)] if stream else []
        stream += [(i, number) for i in tokenizer(text, add_special_tokens=False).input_ids]
    step = length - len(around)
    cut = [stream[start : start + step] for start in range(0, len(stream), step)]
    bare = [[i for i, _ in part] for part in cut]
    ids = [part + around if is_behind else around + part for part in bare]
    return ids, [(part[0][1], len({owner for _, owner in part})) for part in cut]


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted((out / "rows").iterdir()) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_statistics_are_those_of_the_joined_and_cut_tokens(
    checkpoints: Checkpoints, tmp_path: Path, family: str
) -> None:
    folder = checkpoints.of(family)
    found(folder, corpus_file(tmp_path / "c.jsonl", TEXTS), tmp_path / "out", request=PACKED)
    rows, (ids, names) = rows_of(tmp_path / "out"), packed_ids(folder, TEXTS, LENGTH)
    assert {len(text) for text in ids[:-1]} == {LENGTH}
    per_text = len(rows) // len(ids)
    for number, (text, name) in enumerate(zip(ids, names, strict=True)):
        own = rows[number * per_text : (number + 1) * per_text]
        assert {(row["place"], row["n_documents"], row["n_tokens"]) for row in own} == {(*name, len(text))}
        maps = attentions(folder, input_ids=torch.tensor([text])).attentions
        for row in own:
            weights = maps[row["layer"]][0, row["head"]].double()
            entropy = float(-(weights * weights.clamp(min=1e-300).log()).sum(-1).mean())
            np.testing.assert_allclose(row["entropy"], entropy, atol=1e-5)
            np.testing.assert_allclose(row["previous"], float(weights.diagonal(-1).sum()) / len(text), atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_a_document_that_fits_is_packed_into_itself(checkpoints: Checkpoints, tmp_path: Path, family: str) -> None:
    folder, text = checkpoints.of(family), "the cat 日 sat on the mat"
    request: dict[str, Any] = {"max_tokens": 40, "conditions": ("k == 0",), "effect": family != "t5"}
    request |= {} if family == "t5" else {"spans": ("s=/cat .*on/",)}
    file = corpus_file(tmp_path / "c.jsonl", [text])
    alone = found(folder, file, tmp_path / "alone", request=request)
    packed = found(folder, file, tmp_path / "packed", request={**request, "pack": True})
    assert rows_of(tmp_path / "packed") == rows_of(tmp_path / "alone")
    assert packed.corpus == alone.corpus
    assert (packed.sequences, packed.context, packed.spans) == (alone.sequences, alone.context, alone.spans)
    assert all(np.array_equal(packed.arrays[name], alone.arrays[name], equal_nan=True) for name in alone.arrays)


def test_the_example_and_cells_name_the_first_document_and_how_many_there_are(model: str, tmp_path: Path) -> None:
    record = found(model, corpus_file(tmp_path / "c.jsonl", TEXTS), tmp_path / "out", request=PACKED)
    assert record.corpus is not None
    ids, names = packed_ids(model, TEXTS, LENGTH)
    (sequence,) = record.sequences
    assert list(sequence.ids) in ids
    place, n = names[ids.index(list(sequence.ids))]
    assert record.corpus.example_named == f"{tmp_path}/c.jsonl:{place}" + (f" and {n - 1} more" if n > 1 else "")
    assert {(cell.place, cell.n_documents) for head in record.corpus.heads for cell in head.cells} <= set(names)
    assert record.corpus.n_documents == len(ids)
    assert record.corpus.n_tokens == sum(map(len, ids))
    assert contradictions(record) == ()


def test_the_text_of_a_packed_text_is_that_of_its_documents(model: str, tmp_path: Path) -> None:
    request = {"pack": True, "max_tokens": N_POSITIONS}
    record = found(model, corpus_file(tmp_path / "c.jsonl", ["a cat", "日 dog"]), tmp_path / "out", request=request)
    (sequence,) = record.sequences
    assert sequence.text == "a cat</s>日 dog"
    assert [sequence.text[a:b] for a, b in sequence.offsets if b - a == 4] == ["</s>"]
    assert [piece.name for piece in sequence.pieces if piece.special] == ["</s>"]


def test_bad_documents_are_listed_and_not_packed(model: str, tmp_path: Path) -> None:
    texts: list[Any] = ["the cat", {"no": "text"}, " ", "the dog"]
    record = found(model, corpus_file(tmp_path / "c.jsonl", texts), tmp_path / "out", request=PACKED)
    assert record.corpus is not None
    assert [(entry.place, entry.reason) for entry in record.corpus.bad] == [
        (2, "no field 'text'"),
        (3, "only white space"),
    ]
    ids, names = packed_ids(model, ["the cat", "the dog"], LENGTH)
    assert [(row["n_documents"], row["n_tokens"]) for row in rows_of(tmp_path / "out")[:1]] == [(2, len(ids[0]))]
    assert names == [(1, 2)]


# ----------------------------------------------------------------------------------------------- stopped, grown, refused


def test_stopped_scans_ranks_and_grown_corpora_give_the_same_bytes(model: str, tmp_path: Path) -> None:
    texts = [*TEXTS[:20], {"no": "text"}, {"no": "text"}, *TEXTS, " "]
    corpus, whole = corpus_file(tmp_path / "c.jsonl", texts), tmp_path / "whole"
    found(model, corpus, whole, request=PACKED)
    assert len(os.listdir(whole / "units")) > 2
    ends = tmp_path / "stopped"
    is_stopped = (ends / "example-00000000.safetensors").exists
    assert study(model, corpus, ends, request=PACKED, is_stopped=is_stopped).run() is None
    found(model, corpus, ends, request=PACKED)
    assert digests(ends) == digests(whole)
    assert study(model, corpus, tmp_path / "ranks", request=PACKED, share=(1, 2)).run() is None
    assert study(model, corpus, tmp_path / "ranks", request=PACKED, share=(0, 2)).run() is not None
    assert digests(tmp_path / "ranks") == digests(whole)
    for n in (*range(1, len(texts), 3), len(texts)):
        found(model, corpus, tmp_path / "grown", request=PACKED, form=CorpusFormat(max_docs=n))
    assert digests(tmp_path / "grown") == digests(whole)


def test_changed_documents_and_settings_are_refused(model: str, tmp_path: Path) -> None:
    corpus = corpus_file(tmp_path / "c.jsonl", TEXTS)
    found(model, corpus, tmp_path / "out", request=PACKED)
    with pytest.raises(UsageError, match="was made with other settings: pack was true and is false"):
        study(model, corpus, tmp_path / "out", request={"max_tokens": LENGTH}).run()
    for texts in ([*TEXTS[:-1], TEXTS[-1][:-1] + "x", "more"], [TEXTS[0].upper(), *TEXTS[1:], "more"]):
        corpus_file(tmp_path / "c.jsonl", texts)
        with pytest.raises(UsageError, match="was made of other documents"):
            study(model, corpus, tmp_path / "out", request=PACKED).run()


def test_a_pack_without_a_length_is_refused() -> None:
    with pytest.raises(UsageError, match="--pack needs --max-tokens"):
        ScanRequest("model", pack=True)


@pytest.mark.parametrize(
    ("family", "request_of", "message"),
    [
        ("gpt2", {"max_tokens": 65}, "--pack makes texts of 65 tokens, more than the 64 positions of"),
        ("gpt2", {"tokenizer": "byte"}, "the tokenizer of byte names no end-of-text token and no separator"),
        ("llama", {"max_tokens": 1}, "--max-tokens 1 leaves no token for a text: the tokenizer puts 1 around it"),
    ],
)
def test_texts_that_a_model_cannot_have_are_refused_before_anything_is_written(
    checkpoints: Checkpoints, tmp_path: Path, family: str, request_of: dict[str, Any], message: str
) -> None:
    corpus = corpus_file(tmp_path / "c.jsonl", TEXTS)
    with pytest.raises(UsageError, match=message):
        study(checkpoints.of(family), corpus, tmp_path / "out", request={**PACKED, **request_of}).run()
    assert not (tmp_path / "out").exists()
