"""`mha scan` as a process: what it prints, how it is interrupted, and that it goes on."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from support.checkpoints_saved import Checkpoints
from support.processes import MHA, PATIENCE_S
from support.scans import corpus_file, sentences

from mhacli.cli.shared.scanning import ScanReport, progress_text
from mhacli.compute.scan.progress import ScanProgress

N_DOCUMENTS, N_UNITS = 40, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a corpus, and the result of a scan that nothing interrupted."""
    place = tmp_path_factory.mktemp("scan")
    os.symlink(Checkpoints(place).of("gpt2"), place / "model")
    corpus_file(place / "c.jsonl", sentences(N_DOCUMENTS))
    done = run(place, "whole.mha")
    assert done.returncode == 0, done.stderr
    return place


def words(out: str, *more: str) -> list[str]:
    return [sys.executable, MHA, "scan", "--model", "model", "c.jsonl", "--out", out, *more]


def run(folder: Path, out: str, *more: str, prefix: str = "") -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'{prefix} exec "$@"', "sh", *words(out, *more)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def digests(out: Path) -> dict[str, str]:
    files = (path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def begun(folder: Path, out: str) -> subprocess.Popen[str]:
    """A scan that has written a unit."""
    process = subprocess.Popen(words(out), cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not any((folder / out).glob("units/*")):
        time.sleep(0.01)
    return process


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_a_scan_that_is_ended_goes_on_to_the_same_bytes(folder: Path, sent: signal.Signals) -> None:
    out = f"{sent.name}.mha"
    process = begun(folder, out)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}[sent]
    assert ("the same command resumes the scan" in stderr) == (sent == signal.SIGINT)
    assert 0 < len([*(folder / out).glob("units/*")]) < N_UNITS
    shown = subprocess.run(
        [sys.executable, MHA, "show", out], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (shown.returncode, "its scan is not finished" in shown.stderr) == (1, True)
    assert run(folder, out).returncode == 0
    assert digests(folder / out) == digests(folder / "whole.mha")


@pytest.mark.full
def test_a_full_disk_is_a_clean_error_and_the_scan_goes_on_later(folder: Path) -> None:
    full = run(folder, "full.mha", prefix="ulimit -f 24;")
    assert full.returncode == 1
    (line,) = full.stderr.splitlines()
    assert "cannot be written: File too large" in line
    assert run(folder, "full.mha").returncode == 0
    assert digests(folder / "full.mha") == digests(folder / "whole.mha")


def test_json_is_the_record_and_progress_goes_to_stderr_as_lines(folder: Path) -> None:
    done = run(folder, "json.mha", "--max-docs", "18", "--json")
    assert done.returncode == 0
    corpus = json.loads(done.stdout)["corpus"]
    assert (corpus["n_documents"], corpus["n_bad"], len(corpus["heads"])) == (18, 0, 12)
    lines = [json.loads(line)["progress"] for line in done.stderr.splitlines() if line.startswith("{")]
    assert lines[-1]["n_documents"] == lines[-1]["of_documents"] == 18


def test_progress_in_words_has_the_least_and_the_most_of_several_workers() -> None:
    done = ScanProgress(n_documents=320, of_documents=3000, by_worker={"a, process 1": 144, "b, process 2": 176})
    assert progress_text(done) == "320 of 3,000 documents, 2 workers with 144 to 176"
    assert progress_text(replace(done, by_worker={"a, process 1": 320})) == "320 of 3,000 documents"


def test_the_end_is_told_once_however_soon_it_comes() -> None:
    told: list[int] = []
    report = ScanReport(lambda done: told.append(done.n_documents), every_s=3600.0, _last=monotonic())
    for n in (16, 32, 48, 48):
        report.report_progress(ScanProgress(n_documents=n, of_documents=48, seconds=1.0))
    assert told == [48]


@pytest.mark.parametrize(
    "given",
    [
        ["--span", "s=0:3"],
        ["--sink-weight", "2"],
        ["--where", "k =="],
        ["--lines", "--field", "text"],
        ["--layer", "9"],
    ],
)
def test_what_no_document_can_answer_is_refused_before_anything_is_computed(folder: Path, given: list[str]) -> None:
    refused = run(folder, "refused.mha", *given)
    assert refused.returncode == 2
    assert not (folder / "refused.mha").exists()
