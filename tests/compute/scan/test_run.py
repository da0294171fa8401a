"""The study of a corpus: what it finds, and that nobody can tell afterwards how often it was interrupted."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints_saved import Checkpoints
from support.scans import corpus_file, digests, found, sentences, study

from mhacli.compute.checkpoint.prepare import prepare_checkpoint
from mhacli.compute.scan.engines.single import SingleEngine
from mhacli.errors import MhaError, UsageError
from mhacli.io.files import write_whole
from mhacli.requests.scan import ScanRequest
from mhacli.results.record import storage
from mhacli.results.record.consistency import contradictions
from mhacli.text.corpus import CorpusFormat

TEXTS = sentences(20)
CONDITION = "k == 0"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpus_file(tmp_path_factory.mktemp("corpus") / "c.jsonl", TEXTS)


@pytest.fixture(scope="module")
def whole(model: str, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of a scan that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    found(model, corpus, out)
    return digests(out)


# -------------------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_the_statistics_of_a_corpus_are_the_means_over_its_documents(
    checkpoints: Checkpoints, tmp_path: Path, family: str
) -> None:
    texts = TEXTS[:7]
    request: dict[str, Any] = {"conditions": (CONDITION,)}
    out = tmp_path / "out"
    record = found(checkpoints.of(family), corpus_file(tmp_path / "c.jsonl", texts), out, request=request)
    alone = []
    for text in texts:
        run, _ = prepare_checkpoint(ScanRequest(checkpoints.of(family), **request).of_document(text))
        run.run()
        alone.append(run.record())
    assert record.corpus is not None
    for number, own in enumerate(record.corpus.heads):
        for spread in own.spreads:
            values = [document.heads.to_dicts()[number][spread.statistic] for document in alone]
            known = [value for value in values if value is not None]
            assert spread.n == len(known)
            np.testing.assert_allclose(spread.mean, np.mean(known), rtol=1e-6)
        kinds = [document.heads[number].kind for document in alone]
        assert own.kinds == {kind: kinds.count(kind) for kind in kinds}
        assert own.agree == kinds.count(record.heads[number].kind) / len(kinds)
    assert record.corpus.n_tokens == sum(len((one.context or one.sequences)[0].ids) for one in alone)
    assert contradictions(storage.load(str(out))) == ()


def test_the_profile_is_the_mean_profile_of_the_documents(model: str, tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "rain fell", "a dog saw it sit there while rain fell on a red roof"]
    record = found(model, corpus_file(tmp_path / "c.jsonl", texts), tmp_path / "out")
    total = np.zeros_like(record.arrays["layers.1.profile"])
    for text in texts:
        run, _ = prepare_checkpoint(ScanRequest(model).of_document(text))
        run.run()
        profile = run.record().arrays["layers.1.profile"]
        total[..., : profile.shape[-1]] += profile
    np.testing.assert_allclose(record.arrays["layers.1.profile"], total / 3, atol=1e-6)


def test_effects_of_a_corpus_are_the_means_over_its_documents(model: str, tmp_path: Path) -> None:
    record = found(model, corpus_file(tmp_path / "c.jsonl", TEXTS[:3]), tmp_path / "out", request={"effect": True})
    (file,) = (tmp_path / "out" / "rows").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert record.corpus is not None
    for own in record.corpus.heads:
        of_head = [row for row in rows if (row["layer"], row["head"]) == (own.layer, own.head)]
        for name in ("d_logit", "kl", "d_output"):
            spread = own.spread(name)
            assert spread is not None
            np.testing.assert_allclose(spread.mean, np.mean([row[name] for row in of_head]), rtol=1e-12)


def test_bad_documents_are_counted_and_listed(model: str, tmp_path: Path) -> None:
    texts: list[Any] = ["the cat", {"no": "text"}, " ", "the dog"]
    record = found(model, corpus_file(tmp_path / "c.jsonl", texts), tmp_path / "out")
    assert record.corpus is not None
    assert [entry.place for entry in record.corpus.bad] == [2, 3]
    assert (record.corpus.n_documents, record.corpus.n_bad) == (2, 2)
    with pytest.raises(MhaError, match=r"--strict: .*c.jsonl:2: no field 'text'"):
        study(model, str(tmp_path / "c.jsonl"), tmp_path / "strict", strict=True).run()
    with pytest.raises(MhaError, match=r"--strict: .*c.jsonl:2: no field 'text'"):  # where it was found before, too
        study(model, str(tmp_path / "c.jsonl"), tmp_path / "out", strict=True).run()


def test_a_corpus_without_a_good_document_is_an_error_that_names_the_first(model: str, tmp_path: Path) -> None:
    with pytest.raises(MhaError, match=r"the corpus has no good document: .*c.jsonl:1: only white space, and 1 more"):
        study(model, corpus_file(tmp_path / "c.jsonl", [" ", ""]), tmp_path / "out").run()


# --------------------------------------------------------------------------------------------------------- interruptions


class KilledError(Exception):
    """The process ends in the middle of something."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ends_at", range(8), ids=str)
def test_a_scan_that_ends_at_any_write_goes_on_to_the_same_bytes(
    model: str, corpus: str, tmp_path: Path, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch, ends_at: int
) -> None:
    """Writes: the manifest, rows, example and sums of the first unit, rows and sums of the second, the summary, the manifest."""
    writes: list[str] = []

    def write_or_end(path: str, data: bytes, *, force: bool) -> None:
        if len(writes) == ends_at:
            raise KilledError
        writes.append(path)
        write_whole(path, data, force=force)

    monkeypatch.setattr("mhacli.results.scan.folder.write_whole", write_or_end)
    with pytest.raises(KilledError):
        study(model, corpus, tmp_path / "out").run()
    monkeypatch.undo()
    assert found(model, corpus, tmp_path / "out").corpus is not None
    assert digests(tmp_path / "out") == whole


def test_a_scan_that_is_stopped_finishes_its_unit_and_goes_on(
    model: str, corpus: str, tmp_path: Path, whole: dict[str, str]
) -> None:
    out = tmp_path / "out"
    assert study(model, corpus, out, is_stopped=lambda: (out / "example-00000000.safetensors").exists()).run() is None
    assert len(os.listdir(out / "units")) == 1
    found(model, corpus, out)
    assert digests(out) == whole


def test_ranks_share_the_units_and_the_last_one_merges(
    model: str, corpus: str, tmp_path: Path, whole: dict[str, str]
) -> None:
    assert study(model, corpus, tmp_path / "out", share=(1, 2)).run() is None
    assert study(model, corpus, tmp_path / "out", share=(0, 2)).run() is not None
    assert digests(tmp_path / "out") == whole


def test_the_progress_of_a_rank_is_that_of_its_own_units(model: str, corpus: str, tmp_path: Path) -> None:
    for rank, n_documents in ((1, 4), (0, 16), (1, 4)):  # done before, at last
        ranked = study(model, corpus, tmp_path / "out", share=(rank, 2))
        ranked.run()
        assert (ranked.progress.n_documents, ranked.progress.of_documents) == (n_documents, n_documents)
    assert study(model, corpus, tmp_path / "out").run() is not None


def test_progress_counts_the_documents_of_each_worker(model: str, corpus: str, tmp_path: Path) -> None:
    whole = study(model, corpus, tmp_path / "out")
    whole.run()
    assert [*whole.progress.by_worker.values()] == [len(TEXTS)]


def test_the_size_of_a_stream_is_told_at_its_end(model: str, corpus: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(["cp", corpus, str(tmp_path / "pipe")])
    told: list[int | None] = []
    streamed = study(model, str(tmp_path / "pipe"), tmp_path / "out", form=CorpusFormat(field="text"))
    streamed.report_progress = lambda progress: told.append(progress.of_documents)
    streamed.run()
    assert writer.wait() == 0
    assert (told[0], told[-1]) == (None, len(TEXTS))


@pytest.mark.full
@pytest.mark.parametrize("room", ["rows", "units"])
def test_a_damaged_unit_is_named_and_computed_again(
    model: str, corpus: str, tmp_path: Path, whole: dict[str, str], room: str
) -> None:
    out, notes = tmp_path / "out", list[str]()
    found(model, corpus, out)
    damaged = sorted((out / room).iterdir())[1]
    damaged.write_bytes(damaged.read_bytes()[:-9])
    found(model, corpus, out, note=notes.append)
    assert [str(damaged) in note for note in notes] == [True]
    assert digests(out) == whole


@pytest.mark.full
def test_a_missing_example_is_made_again(model: str, corpus: str, tmp_path: Path, whole: dict[str, str]) -> None:
    found(model, corpus, tmp_path / "out")
    (tmp_path / "out" / "example-00000000.safetensors").unlink()
    found(model, corpus, tmp_path / "out")
    assert digests(tmp_path / "out") == whole


# -------------------------------------------------------------------------------------------------------- what is refused


def test_other_settings_are_refused_with_what_differs(model: str, corpus: str, tmp_path: Path) -> None:
    found(model, corpus, tmp_path / "out", form=CorpusFormat(max_docs=3))
    with pytest.raises(UsageError, match="was made with other settings: max_tokens was null and is 4"):
        study(model, corpus, tmp_path / "out", request={"max_tokens": 4}).run()


def test_the_engine_is_ended_where_a_scan_is_refused(
    model: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(SingleEngine, "end", lambda self: ended.append("ended"))
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="holds other files"):
        found(model, corpus, tmp_path)
    assert ended == ["ended"]


def test_other_documents_are_refused_and_a_corpus_that_has_grown_goes_on(
    model: str, tmp_path: Path, corpus: str, whole: dict[str, str]
) -> None:
    out, file = tmp_path / "out", Path(corpus)
    found(model, corpus, out, form=CorpusFormat(max_docs=18))
    with pytest.raises(UsageError, match=r"has 1 units of documents that the corpus does not have"):
        study(model, corpus, out, form=CorpusFormat(max_docs=16)).run()
    changed = study(model, corpus, out)
    text = file.read_text()
    try:
        file.write_text(text.replace(TEXTS[3], TEXTS[3] + " now"))
        with pytest.raises(UsageError, match=r"was made of other documents: .*c.jsonl:1 to .*c.jsonl:16 have changed"):
            replace(changed).run()
    finally:
        file.write_text(text)
    found(model, corpus, out)
    assert digests(out) == whole
