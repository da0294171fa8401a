"""The folder of a scan: the same bytes however it was computed, and refused where settings or
documents are others.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import checkpoints
from support.mha import PATIENCE_S, environment, forked, run, start
from support.scans import corpus_file, digests, has, rows_of, sentences

import mhacli

N_DOCUMENTS, UNIT = 18, 16
"""The documents of the corpus, and those of a unit."""
LAYER = ("--layer", "1")
Mha = Any


def words(out: str, *more: str) -> tuple[str, ...]:
    """The command in a folder that has the model and the corpus."""
    return ("scan", "--model", "model", "c.jsonl", "--out", out, *LAYER, *more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a corpus, and `whole`, the result of a scan that nothing
    interrupted.
    """
    folder = tmp_path_factory.mktemp("scan")
    (folder / "model").symlink_to(checkpoints.folder("gpt2"))
    corpus_file(folder / "c.jsonl", sentences(N_DOCUMENTS))
    (folder / "document.json").write_text(run(folder, *words("whole", "--json")).stdout)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A folder of the test with the same model and corpus."""
    (tmp_path / "model").symlink_to(checkpoints.folder("gpt2"))
    shutil.copy(made / "c.jsonl", tmp_path)
    return tmp_path


@pytest.fixture
def finished(made: Path, place: Path) -> Path:
    """A copy of the whole result."""
    return Path(shutil.copytree(made / "whole", place / "out"))


def test_a_result_has_the_documented_files(made: Path) -> None:
    names = {path.name for path in (made / "whole").iterdir()}
    expected = "manifest.json summary.safetensors rows units example-00000000.safetensors"
    assert names == set(expected.split())
    manifest = json.loads((made / "whole" / "manifest.json").read_text())
    assert (manifest["schema"], manifest["n_documents"], len(manifest["units"])) == (
        "mha.scan/1",
        N_DOCUMENTS,
        2,
    )
    assert [path.stem for path in sorted((made / "whole" / "rows").iterdir())] == manifest["units"]


def test_the_same_command_again_gives_the_same_bytes(mha: Mha, made: Path, finished: Path) -> None:
    mha(*words("out"))
    assert digests(finished) == digests(made / "whole")


@pytest.mark.real
@pytest.mark.parametrize("first", [17, *(pytest.param(n, marks=pytest.mark.real) for n in (1, 16))])
def test_documents_that_are_added_at_the_end_are_computed(
    mha: Mha, made: Path, place: Path, first: int
) -> None:
    assert (
        mha(*words("out", "--max-docs", str(first), "--json")).json["corpus"]["n_documents"]
        == first
    )
    mha(*words("out"))
    assert digests(place / "out") == digests(made / "whole")


def test_an_example_is_shown_as_the_record_of_its_text(mha: Mha, finished: Path) -> None:
    example = str(finished / "example-00000000.safetensors")
    text = mhacli.load(example).sequences[0].text
    shown = mha("show", example, "--layer", "1").stdout
    heads = mha("heads", text, "--model", "model", *LAYER).stdout
    begin = shown.index("head type")
    assert shown[begin : shown.index("self-check")] in heads
    assert "means over documents" not in shown
    mha("show", example, "--layer", "1", "--head", "2", "--html", "e.html")


def test_the_document_is_the_record_that_show_prints_and_diff_compares(
    mha: Mha, made: Path, finished: Path
) -> None:
    document = json.loads((made / "document.json").read_text())
    shown = mha("show", "out", "--json").json
    assert shown["corpus"] == document["corpus"]
    assert shown["heads"] == document["heads"]
    assert mha("diff", "out", "out", "--tolerance", "0", "--json").json["verdict"] == "agree"
    corpus_file(finished.parent / "other.jsonl", [*sentences(4), "a red cat"])
    mha("scan", "--model", "model", "other.jsonl", "--out", "other", *LAYER)
    differences = mha("diff", "out", "other", "--json", code=3).json
    assert differences["verdict"] == "differ"
    assert [
        site["site"]
        for layer in differences["layers"]
        for site in layer["sites"]
        if site["status"] == "beyond"
    ]


# ------------------------------------------------------------------------------ damaged and missing


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-14] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("rows", cut),
        ("units", change),
        ("example-00000000.safetensors", Path.unlink),
        *(
            pytest.param(*case, marks=pytest.mark.real)
            for case in (
                ("rows", change),
                ("rows", Path.unlink),
                ("units", cut),
                ("units", Path.unlink),
                ("summary.safetensors", cut),
                ("summary.safetensors", Path.unlink),
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_damaged_or_missing_is_computed_again(
    mha: Mha, made: Path, finished: Path, name: str, damage: Any
) -> None:
    path = finished / name
    path = sorted(path.iterdir())[1] if path.is_dir() else path
    damage(path)
    mha(*words("out"))
    assert digests(finished) == digests(made / "whole")


@pytest.mark.real
@pytest.mark.parametrize("damage", [cut, change])
def test_damaged_rows_are_named(mha: Mha, finished: Path, damage: Any) -> None:
    path = sorted((finished / "rows").iterdir())[0]
    damage(path)
    assert f"out/rows/{path.name}" in mha(*words("out"), env={"COLUMNS": "1000"}).stderr


@pytest.mark.parametrize("content", [b'{"schema": ', b'{"schema": "mha.scan/1", "settings": [{}]}'])
def test_a_damaged_manifest_is_refused_by_name_with_another_folder(
    mha: Mha, finished: Path, content: bytes
) -> None:
    (finished / "manifest.json").write_bytes(content)
    ended = mha(*words("out", "--json"), code=1)
    assert ended.missing("manifest.json", "--out") == []
    assert (finished / "manifest.json").read_bytes() == content


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("more", "mentions"),
    [
        (["--max-tokens", "4"], "max_tokens"),
        (["--dtype", "float64"], "dtype"),
        (["--where", "k == 0"], "conditions"),
        (["--effect"], "effect"),
        (["--threads", "2"], "threads"),
        (["--layer", "2"], "layers"),
    ],
    ids=str,
)
def test_other_settings_are_refused_with_what_differs(
    mha: Mha, made: Path, finished: Path, more: list[str], mentions: str
) -> None:
    ended = mha(*words("out", *more, "--json"), code=2)
    assert mentions in ended.said
    assert digests(finished) == digests(made / "whole")


def test_another_model_is_refused_and_the_same_elsewhere_goes_on(
    mha: Mha, made: Path, finished: Path
) -> None:
    other = checkpoints.copy_of("gpt2", finished.parent / "elsewhere")
    mha("scan", "--model", other, "c.jsonl", "--out", "out", *LAYER)
    for part in ("rows", "units"):
        assert digests(finished / part) == digests(made / "whole" / part)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01")
    assert (
        "model_digest"
        in mha("scan", "--model", other, "c.jsonl", "--out", "out", *LAYER, "--json", code=2).said
    )


def test_changed_and_missing_documents_are_refused(mha: Mha, made: Path, finished: Path) -> None:
    missing = mha(*words("out", "--max-docs", "16", "--json"), code=2)
    assert "1 unit" in missing.said
    texts = sentences(N_DOCUMENTS)
    corpus_file(finished.parent / "c.jsonl", [*texts[:3], f"{texts[3]} now", *texts[4:]])
    changed = mha(*words("out", "--json"), code=2)
    assert changed.missing("c.jsonl:1 to", "c.jsonl:16") == []
    assert digests(finished) == digests(made / "whole")


def test_a_bad_document_that_is_mended_is_computed(mha: Mha, made: Path, place: Path) -> None:
    texts: list[Any] = sentences(N_DOCUMENTS)
    corpus_file(place / "c.jsonl", [*texts[:16], {"no": "text"}, texts[17]])
    assert mha(*words("out", "--json")).json["corpus"]["n_bad"] == 1
    shutil.copy(made / "c.jsonl", place)
    mha(*words("out"))
    assert digests(place / "out") == digests(made / "whole")


def test_a_folder_of_other_files_is_refused(mha: Mha, place: Path) -> None:
    (place / "thesis").mkdir()
    (place / "thesis" / "thesis.tex").write_text("")
    assert "thesis" in mha(*words("thesis", "--json"), code=2).said
    assert "file" in mha(*words("c.jsonl/file", "--json"), code=(1, 2)).said


def test_what_a_killed_process_has_left_does_not_stand_in_the_way(
    mha: Mha, made: Path, finished: Path
) -> None:
    left = [finished / part / ".x.7.0aff1.tmp" for part in (".", "rows", "units")]
    for path in left:
        path.write_bytes(b"half")
    mha(*words("out"))
    assert digests(finished) == digests(made / "whole")


@pytest.mark.parametrize(
    "more",
    [
        "--span s=0:3",
        "--sink-weight 2",
        "--where k==",
        "--lines --field text",
        "--layer 9",
        "--cpus-per-worker 2",
        "--max-tokens 0",
        "--max-docs 0",
    ],
)
def test_options_that_no_document_can_answer_are_refused_before_anything_is_written(
    mha: Mha, place: Path, more: str
) -> None:
    assert more.split()[0] in mha(*words("out", *more.split(), "--json"), code=2).said
    assert not (place / "out").exists()


def test_spans_of_an_encoder_and_decoder_are_refused(mha: Mha, place: Path) -> None:
    t5 = checkpoints.folder("t5")
    assert (
        "--span"
        in mha(
            "scan", "--model", t5, "c.jsonl", "--out", "out", "--span", "s=/cat/", "--json", code=2
        ).said
    )


@pytest.mark.parametrize("texts", [["the cat", {"no": "text"}, " "], [" ", ""]], ids=str)
def test_strict_scans_end_at_a_bad_document_and_none_is_an_error(
    mha: Mha, place: Path, texts: list[Any]
) -> None:
    corpus_file(place / "c.jsonl", texts)
    has_good = texts[0] == "the cat"
    assert (
        f"c.jsonl:{2 if has_good else 1}"
        in mha(*words("strict", "--strict", "--json"), code=1).said
    )
    ended = mha(*words("out", "--json"), code=0 if has_good else 1)
    if has_good:
        assert [bad["place"] for bad in ended.json["corpus"]["bad"]] == [2, 3]
        assert "c.jsonl:2" in mha(*words("out", "--strict", "--json"), code=1).said, (
            "known from before"
        )
    else:
        assert "c.jsonl:1" in ended.said


# ---------------------------------------------------------------- processes: ended, and in parallel


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a corpus of four units, and the result of a scan that nothing
    interrupted.
    """
    folder = tmp_path_factory.mktemp("longer")
    (folder / "model").symlink_to(checkpoints.folder("gpt2"))
    corpus_file(folder / "c.jsonl", sentences(4 * UNIT))
    run(folder, *words("whole"))
    return folder


@pytest.fixture
def begin(place: Path, longer: Path) -> Iterator[Any]:
    """Starts a scan of the longer corpus as a process, and kills what is left of it at the end."""
    shutil.copy(longer / "c.jsonl", place)
    begun: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="mha") as short:  # Ray's sockets need a short path

        def scan(out: str, *more: str) -> subprocess.Popen[bytes]:
            process = start(
                place,
                *words(out, *more),
                env=environment(place, TMPDIR=short),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            begun.append(process)
            return process

        yield scan
        for process in begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def await_unit(out: Path, is_running: Callable[[], bool]) -> None:
    """Waits until a unit is written."""
    until = time.monotonic() + PATIENCE_S
    while not [*out.glob("units/*.safetensors")]:
        assert time.monotonic() < until
        assert is_running()
        time.sleep(0.01)


@pytest.mark.real
@pytest.mark.parametrize(
    "sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name
)
def test_a_scan_that_is_ended_goes_on_to_the_same_bytes(
    mha: Mha, place: Path, longer: Path, sent: signal.Signals
) -> None:
    shutil.copy(longer / "c.jsonl", place)
    with tempfile.TemporaryFile() as nothing, tempfile.TemporaryFile() as printed:
        fds = (nothing.fileno(), nothing.fileno(), printed.fileno())
        process = forked(place, *words("out"), env=environment(place), fds=fds)
        await_unit(place / "out", process.is_alive)
        os.kill(process.pid, sent)
        process.join(PATIENCE_S)
        printed.seek(0)
        stderr = printed.read().decode()
    assert process.exitcode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[sent]
    assert stderr.count("mha: interrupted: ") == (sent != signal.SIGKILL)
    assert 0 < len([*(place / "out" / "units").iterdir()]) < 4
    assert "out" in mha("show", "out", "--json", code=1).said
    mha(*words("out"))
    assert digests(place / "out") == digests(longer / "whole")


@pytest.mark.real
def test_a_full_disk_is_an_error_and_the_scan_goes_on_later(
    mha: Mha, made: Path, place: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 10, before[1]))
    try:
        full = mha(*words("out", "--json"), code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "out/" in full.said
    mha(*words("out"))
    assert digests(place / "out") == digests(made / "whole")


def descendants(pid: int) -> Iterator[tuple[int, bytes]]:
    """The processes that a process began, and those that they began, with their command lines."""
    with contextlib.suppress(FileNotFoundError):  # a thread or a process that ends meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child, Path(f"/proc/{child}/cmdline").read_bytes()
                yield from descendants(child)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.real
@pytest.mark.skipif(not has("ray"), reason="needs Ray")
@pytest.mark.parametrize("ends", ["a worker is killed", "the scan is interrupted"])
def test_workers_give_what_one_process_gives(
    mha: Mha, place: Path, longer: Path, begin: Any, ends: str
) -> None:
    process = begin("out", "--workers", "2")
    await_unit(place / "out", lambda: process.poll() is None)
    family = [*descendants(process.pid)]
    if ends == "a worker is killed":
        worker = next(pid for pid, command in family if b"ray::Worker" in command)
        os.kill(worker, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (0 if ends == "a worker is killed" else 130), stderr
    until = time.monotonic() + PATIENCE_S
    while any(is_alive(pid) for pid, _ in family):  # they end, if not at once
        assert time.monotonic() < until
        time.sleep(0.1)
    assert (place / "out" / "summary.safetensors").exists() == (ends == "a worker is killed")
    if ends != "a worker is killed":
        mha(*words("out"))
    assert digests(place / "out") == digests(longer / "whole")


def test_one_of_several_processes_of_torchrun_is_refused(mha: Mha, place: Path) -> None:
    ended = mha(*words("out", "--json"), code=2, env={"RANK": "0", "WORLD_SIZE": "2"})
    assert "--workers" in ended.error["hint"]
    assert not (place / "out").exists()


def test_progress_is_lines_of_json_that_end_with_all_documents(mha: Mha, place: Path) -> None:
    ended = mha(*words("out", "--max-docs", "3", "--json"))
    lines = [
        json.loads(line)["progress"] for line in ended.stderr.splitlines() if line.startswith("{")
    ]
    assert lines[-1]["n_documents"] == lines[-1]["of_documents"] == 3
    assert sum(lines[-1]["by_worker"].values()) == 3
    assert len(rows_of(place / "out")) == 3 * checkpoints.N_HEADS
