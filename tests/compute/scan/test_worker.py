import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints_saved import Checkpoints
from support.scans import corpus_file, sentences, start_of, units_of

from mhacli.compute.checkpoint.prepare import prepare_checkpoint
from mhacli.compute.effect.study import prepare_effect
from mhacli.compute.scan.engines.single import SingleEngine
from mhacli.compute.scan.worker import settings_here
from mhacli.errors import MhaError, UsageError
from mhacli.requests.effect import EffectRequest
from mhacli.requests.scan import ScanRequest
from mhacli.results.record import storage
from mhacli.results.scan.sums import UnitSums, read_sums
from mhacli.results.scan.unit import Unit, UnitFiles

CONDITION = "k == 0"


def computed(request: ScanRequest, made: list[Unit]) -> list[UnitFiles]:
    done: list[UnitFiles] = []
    SingleEngine().run(iter(made), start_of(request), lambda unit, files, worker: done.append(files))
    return done


def rows_of(files: UnitFiles) -> list[dict[str, object]]:
    return [json.loads(line) for line in files.rows.splitlines()]


def sums_of(files: UnitFiles, path: Path) -> UnitSums:
    path.write_bytes(files.sums)
    return read_sums(str(path))


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_rows_are_those_of_heads_on_each_document_alone(checkpoints: Checkpoints, tmp_path: Path, family: str) -> None:
    request, texts = ScanRequest(checkpoints.of(family), conditions=(CONDITION,)), sentences(5)
    made = [*units_of(corpus_file(tmp_path / "c.jsonl", texts), request)]
    rows = [row for files in computed(request, made) for row in rows_of(files)]
    for place, text in enumerate(texts, 1):
        run, _ = prepare_checkpoint(request.of_document(text))
        run.run()
        expected = run.record().heads.to_dicts()
        own = [row for row in rows if row["place"] == place]
        assert [{name: row[name] for name in expected[0]} for row in own] == expected


@pytest.mark.parametrize(
    ("family", "layers", "heads"),
    [("gpt2", None, None), pytest.param("gpt2", ((None, 1),), (0, 2), marks=pytest.mark.full), ("bert", None, None)],
    ids=str,
)
def test_effects_in_rows_are_those_of_removals_from_each_document_alone(
    checkpoints: Checkpoints, tmp_path: Path, family: str, layers: Any, heads: Any
) -> None:
    request, texts = ScanRequest(checkpoints.of(family), effect=True, layers=layers, heads=heads), sentences(3)
    made = [*units_of(corpus_file(tmp_path / "c.jsonl", texts), request)]
    rows = [row for files in computed(request, made) for row in rows_of(files)]
    for place, text in enumerate(texts, 1):
        study, _ = prepare_effect(EffectRequest(replace(request.of_document(text), layers=layers)))
        study.inspect()
        study.run()
        expected = [one for one in study.table() if heads is None or one.head in heads]
        own = [row for row in rows if row["place"] == place]
        assert [(row["layer"], row["head"]) for row in own] == [(one.layer, one.head) for one in expected]
        for name in ("d_logit", "direct", "later", "d_logprob", "kl", "d_output"):
            changes = np.array([[row[name], getattr(one, name)] for row, one in zip(own, expected, strict=True)], float)
            np.testing.assert_allclose(changes[:, 0], changes[:, 1], rtol=1e-4, atol=1e-6)


def test_a_fault_that_ends_the_scan_names_its_document(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ScanRequest(checkpoints.of("gpt2"))
    (unit,) = units_of(corpus_file(tmp_path / "c.jsonl", ["the cat", "the dog"]), request)
    worker = start_of(request).load()
    monkeypatch.setattr("mhacli.compute.checkpoint.run.free_bytes", lambda device: 1)
    with pytest.raises(MhaError, match=r"c\.jsonl:1: out of memory; 5 tokens") as caught:
        worker.compute(unit)
    assert caught.value.code == "out-of-memory"


def test_the_same_unit_gives_the_same_bytes_after_others_and_in_another_worker(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    request = ScanRequest(checkpoints.of("llama"))
    made = [*units_of(corpus_file(tmp_path / "c.jsonl", sentences(9)), request)]
    one = computed(request, made)
    assert computed(request, made[::-1]) == one[::-1]


def test_a_start_can_be_pickled(checkpoints: Checkpoints) -> None:
    start = start_of(ScanRequest(checkpoints.of("llama"), conditions=(CONDITION,), spans=("s=/cat/",)))
    assert pickle.loads(pickle.dumps(start)) == start


def test_a_worker_with_another_model_is_refused(checkpoints: Checkpoints) -> None:
    start = start_of(ScanRequest(checkpoints.of("llama")))
    with pytest.raises(MhaError, match="a worker differs from its scan: it has model_digest"):
        start.__class__(ScanRequest(checkpoints.of("bert")), start.settings).load()


def test_bad_documents_are_listed_with_their_place_and_leave_the_others_alone(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    request = ScanRequest(checkpoints.of("bert"))
    texts = ["the cat sat", " \n", {"other": 1}, "the cat " * 60, "on the mat"]
    (files,) = computed(request, [*units_of(corpus_file(tmp_path / "c.jsonl", texts), request, size=8)])
    facts = sums_of(files, tmp_path / "sums.safetensors").facts
    assert [document.place for document in facts.documents] == [1, 5]
    assert [entry.place for entry in facts.bad] == [2, 3, 4]
    assert facts.bad[0].reason == "only white space"
    assert re.fullmatch(r"has \d+ tokens, more than the 64 positions of .*", facts.bad[2].reason)
    assert (files.n_documents, files.n_bad) == (2, 3)


def test_a_unit_of_bad_documents_alone_has_no_rows(checkpoints: Checkpoints, tmp_path: Path) -> None:
    request = ScanRequest(checkpoints.of("llama"))
    (files,) = computed(request, [*units_of(corpus_file(tmp_path / "c.jsonl", ["\n", " "]), request)])
    assert files.rows == b""
    assert sums_of(files, tmp_path / "sums.safetensors").facts.documents == ()


def test_the_example_is_the_longest_document_that_is_short_and_a_record(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    request = ScanRequest(checkpoints.of("llama"))
    (unit,) = units_of(corpus_file(tmp_path / "c.jsonl", ["the cat", "the cat sat on", "the dog"]), request)
    files, without = computed(request, [unit._replace(wants_example=True), unit])
    (tmp_path / "example.safetensors").write_bytes(files.example)
    record = storage.load(str(tmp_path / "example.safetensors"))
    assert record.sequences[0].text == "the cat sat on"
    assert not without.example
    assert files.sums == without.sums


def test_the_example_keeps_no_text_behind_its_tokens(checkpoints: Checkpoints, tmp_path: Path) -> None:
    request = ScanRequest(checkpoints.of("llama"), max_tokens=6)
    (unit,) = units_of(corpus_file(tmp_path / "c.jsonl", ["the cat sat on the mat " * 50]), request)
    (files,) = computed(request, [unit._replace(wants_example=True)])
    (tmp_path / "example.safetensors").write_bytes(files.example)
    (sequence,) = storage.load(str(tmp_path / "example.safetensors")).sequences
    assert len(sequence.ids) == 6
    assert sequence.text == "".join(sequence.tokens[1:])


def test_masses_of_spans_are_summed_over_the_documents_that_have_them(checkpoints: Checkpoints, tmp_path: Path) -> None:
    spans = ("cats=/cat/", "dogs=/dog/")
    request, texts = ScanRequest(checkpoints.of("llama"), spans=spans), ["the cat saw a dog", "a cat", "rain fell"]
    (files,) = computed(request, [*units_of(corpus_file(tmp_path / "c.jsonl", texts), request)])
    arrays = sums_of(files, tmp_path / "sums.safetensors").arrays
    assert arrays["span_counts"].tolist() == [[2, 1], [1, 1]]
    expected = np.zeros_like(arrays["span_mass"])
    for text, words in zip(texts[:2], (spans, spans[:1]), strict=True):
        run, _ = prepare_checkpoint(request.of_document(text, words))
        run.run()
        record = run.record()
        n = len(words)
        expected[:, :n, :n] += np.concatenate(
            [record.of_layer(i).arrays["span_mass"][0] for i in range(len(record.layers))]
        )
    np.testing.assert_allclose(arrays["span_mass"], expected, rtol=1e-6)


def test_a_span_that_max_tokens_cuts_off_is_one_that_the_document_does_not_have(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    request = ScanRequest(checkpoints.of("llama"), spans=("dogs=/dog/",), max_tokens=6)
    texts = ["dog sat", "the cat sat on the mat and the dog saw it"]
    (files,) = computed(request, [*units_of(corpus_file(tmp_path / "c.jsonl", texts), request)])
    sums = sums_of(files, tmp_path / "sums.safetensors")
    assert [document.place for document in sums.facts.documents] == [1, 2]
    assert sums.arrays["span_counts"].tolist() == [[1]]


def test_spans_of_a_pair_of_encoder_and_decoder_are_refused_before_any_document(checkpoints: Checkpoints) -> None:
    with pytest.raises(UsageError, match="--span does not work with a pair of encoder and decoder"):
        settings_here(ScanRequest(checkpoints.of("t5"), spans=("s=/cat/",)))
