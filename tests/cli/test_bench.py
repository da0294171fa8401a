"""The installed `mha bench` as a real process: what it prints, saves, compares and refuses, and how it ends.

Times are never judged, only how they agree with each other. Most processes are forks, see `support.forks`.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import signal
import statistics
import struct
import subprocess
import termios
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from support import forks
from support.processes import (
    WITH_TORCH,
    Launch,
    Outcome,
    attempt,
    forms,
    obeyed_or_hidden,
    require_invariants,
    shell_code,
    start,
)

PATIENCE_S = 120
LENGTHS, CONTESTANTS, KERNEL_LESS = (8, 16, 32), ("explicit", "sdpa", "math"), "cudnn"
SHORT = ("--device", "cpu", "--repeat", "3", "--budget", "0.05")
MEASURED = (
    *SHORT,
    "--threads",
    "1",
    "--lengths",
    "8..32",
    "--batch",
    "1",
    "--backends",
    "explicit,sdpa,math,cudnn",
    "--causal",
)
ONE_SIZE = (*SHORT, "--lengths", "8", "--backends", "sdpa")
LACKING = "torch has no cudnn kernel for this device and these inputs"
FIELDS = {
    "backend", "ran", "status", "batch", "n_heads", "n_kv_heads", "d_head", "q_len", "k_len", "dtype", "causal", "direction",
    "samples_s", "median_s", "p25_s", "p75_s", "flops", "tflops", "share_of_peak", "extra_bytes", "predicted_bytes",
    "max_error",
}  # fmt: skip
Document = dict[str, Any]


def bench(
    folder: Path,
    *words: str,
    code: int = 0,
    form: Sequence[str] = (),
    env: Mapping[str, str] = {},
    colour: bool = False,
) -> Outcome:
    """A run that measures, and how it ended. It may take its time, and leaves no temporary folder."""
    process = forked(folder, [*form, *words], env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    text = stdout.decode()
    if "--csv" in words:
        text = text.replace("\r\n", "\n")  # the line ends of RFC 4180
    outcome = Outcome(shell_code(process.returncode), text, stderr.decode(), 0, form)
    require_invariants(outcome, {code}, colour=colour)
    assert temporary_in(folder) == []
    return outcome


def forked(folder: Path, words: Sequence[str], env: Mapping[str, str] = {}, **streams: Any) -> subprocess.Popen[bytes]:
    """`mha bench` with its home and its temporary files in a folder."""
    home = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), "LC_ALL": "C.UTF-8"}
    return subprocess.Popen(
        [forks.program(), "bench", *words],
        cwd=folder,
        env={**home, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        **streams,
    )


def temporary_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("mha-*"))


def copied(source: Path, folder: Path, change: Callable[[Document], object] = lambda document: None) -> Path:
    """A baseline like another one, but for a change, named `then.json`."""
    document = json.loads(source.read_text())
    change(document)
    target = folder / "then.json"
    target.write_text(json.dumps(document))
    return target


FAR = 1e6
"""A factor between two times that no busy machine makes."""


def times(factor: float) -> Callable[[Document], None]:
    """Every time of a document is multiplied by a factor."""

    def change(document: Document) -> None:
        for row in document["rows"]:
            for name in [name for name in row if name.endswith("_s") and row[name] is not None]:
                row[name] = [one * factor for one in row[name]] if name == "samples_s" else row[name] * factor

    return change


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def printed(place: Path) -> str:
    """The JSON of a run that saved a baseline, a picture and a page too."""
    saved = ("--save-baseline", "b.json", "--svg", "b.svg", "--html", "b.html")
    done = bench(place, *MEASURED, *saved, form=("--json",))
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def document(printed: str) -> Document:
    return dict(json.loads(printed))


@pytest.fixture(scope="module")
def baseline(place: Path, printed: str) -> Path:
    return place / "b.json"


@pytest.fixture
def light(tmp_path: Path, baseline: Path) -> Path:
    """A folder with a baseline `then.json`, for processes that must not measure anything."""
    copied(baseline, tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------------------------------- JSON


def test_the_document_has_its_schema_the_command_and_every_row_in_order(document: Document) -> None:
    assert document["schema"] == "mha.bench/1"
    assert document["command"][:4] == ["mha", "bench", "--json", "--device"]
    assert document["seed"] == 0
    assert document["environment"]["device"] == "cpu"
    found = [(row["k_len"], row["backend"]) for row in document["rows"]]
    assert found == [(length, backend) for length in LENGTHS for backend in (*CONTESTANTS, KERNEL_LESS)]
    assert "comparison" not in document
    for row in document["rows"]:
        assert row.keys() >= FIELDS
        assert (row["batch"], row["n_heads"], row["n_kv_heads"], row["d_head"]) == (1, 8, 8, 64)
        assert row["q_len"] == row["k_len"]
        assert (row["dtype"], row["causal"], row["direction"]) == ("float32", True, "forward")


def test_the_numbers_of_a_row_agree_with_each_other(document: Document) -> None:
    (ceiling,) = document["ceilings"]
    for row in document["rows"]:
        if row["backend"] == KERNEL_LESS:
            continue
        assert row["status"] == "ok"
        assert len(row["samples_s"]) == row["n_samples"] == 3
        assert row["median_s"] == statistics.median(row["samples_s"])
        low, _, high = statistics.quantiles(row["samples_s"], n=4, method="inclusive")
        assert (row["p25_s"], row["p75_s"]) == (low, high)
        assert (row["min_s"], row["median_low_s"]) == (min(row["samples_s"]), min(row["samples_s"]))
        pairs = sum(1 for query in range(row["q_len"]) for key in range(row["k_len"]) if key <= query)
        assert row["flops"] == 4 * row["batch"] * row["n_heads"] * row["d_head"] * pairs
        assert row["bytes"] == 4 * 4 * row["n_heads"] * row["q_len"] * row["d_head"]
        assert row["tflops"] == pytest.approx(row["flops"] / row["median_s"] / 1e12)
        least = {
            "compute": row["flops"] / ceiling["matmul_tflops"] / 1e12,
            "memory": row["bytes"] / ceiling["copy_gb_per_s"] / 1e9,
        }
        assert row["limit"] == max(least, key=least.__getitem__)
        assert row["share_of_peak"] == pytest.approx(max(least.values()) / row["median_s"])
        assert row["ran"] in (row["backend"], "flash")
        assert 0 < row["mean_error"] <= row["max_error"] < 2e-6
        assert row["predicted_bytes"] > 0


def test_ratios_are_to_the_fastest_and_the_noise_is_that_of_the_one_that_ran_twice(document: Document) -> None:
    assert [control["k_len"] for control in document["controls"]] == list(LENGTHS)
    for control in document["controls"]:
        of_size = [row for row in document["rows"] if row["k_len"] == control["k_len"] and row["status"] == "ok"]
        fastest = min(statistics.median(row["samples_s"]) for row in of_size)
        for row in of_size:
            assert row["ratio"] == pytest.approx(statistics.median(row["samples_s"]) / fastest)
            assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
            assert row["is_similar"] == (row["ratio"] > 1 and row["ratio_low"] <= control["noise"])
        assert control["noise"] == pytest.approx(max(1, control["ratio_high"], 1 / control["ratio_low"]))
        (twice,) = [row for row in of_size if row["backend"] == control["backend"]]
        again = statistics.median(control["samples_s"]) / statistics.median(twice["samples_s"])
        assert control["ratio"] == pytest.approx(again)


def test_what_cannot_run_is_a_row_with_its_reason_and_without_times(document: Document) -> None:
    lacking = [row for row in document["rows"] if row["backend"] == KERNEL_LESS]
    for row in lacking:
        assert (row["status"], row["reason"]) == ("unsupported", LACKING)
        assert row["samples_s"] == []
        assert {row[name] for name in ("ran", "median_s", "tflops", "share_of_peak", "ratio", "max_error")} == {None}


def test_the_baseline_is_what_was_printed(printed: str, baseline: Path) -> None:
    assert baseline.read_text() == printed


def test_picture_and_page_are_written_beside_the_baseline(place: Path, printed: str) -> None:
    assert ElementTree.fromstring((place / "b.svg").read_text()).tag == "{http://www.w3.org/2000/svg}svg"
    page = (place / "b.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<tr") == 1 + len(LENGTHS) * 4
    assert {path.name for path in place.iterdir()} - {"modules"} <= {"b.json", "b.svg", "b.html", ".config", ".cache"}


# ---------------------------------------------------------------------------------------------------------------- text


def widest(text: str) -> int:
    return max(cell_len(line) for line in text.splitlines())


@pytest.mark.full
def test_beside_a_baseline_on_80_columns_without_colour(baseline: Path, tmp_path: Path) -> None:
    copied(baseline, tmp_path, times(FAR))
    done = bench(
        tmp_path,
        *("--device", "cpu", "--repeat", "3", "--compare", "then.json", "--fail-if", "slower:1.10"),
        env={"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1"},
    )
    assert "\x1b" not in done.stdout
    assert widest(done.stdout) <= 80
    lines = done.stdout.splitlines()
    assert "8 heads × 64 · float32 · causal · forward" in lines
    above, below = lines[: lines.index("against then.json")], lines[lines.index("against then.json") + 1 :]
    above = above[above.index("8 heads × 64 · float32 · causal · forward") + 1 :]
    assert [sum(line.split()[:1] == [str(length)] for line in above) for length in LENGTHS] == [1, 1, 1]
    names = [f"batch 1, {n} × {n} tokens, 8 heads × 64, float32, causal, forward" for n in LENGTHS]
    assert [line for line in below if line in names] == names
    for backend in CONTESTANTS:
        assert sum(line.startswith(f"{backend} ") and "–" in line for line in below) == len(LENGTHS)
    assert f"{KERNEL_LESS}: unsupported: {LACKING}" in lines


@pytest.mark.full
def test_on_40_columns_in_colour_and_surely_slower(baseline: Path, tmp_path: Path) -> None:
    copied(baseline, tmp_path, times(1 / FAR))
    words = (*ONE_SIZE, "--compare", "then.json", "--fail-if", "slower:1.10")
    done = bench(tmp_path, *words, code=3, env={"COLUMNS": "40", "FORCE_COLOR": "1", "TERM": "xterm"}, colour=True)
    assert "\x1b[31m" in done.stdout
    plain = without_colour(done.stdout)
    assert widest(plain) <= 40
    assert done.stderr == ""
    assert "slower: 1 of 1 timing is more than 1.1 × that in then.json" in " ".join(plain.split())


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.full
def test_on_200_columns_nothing_is_left_out_and_a_terminal_is_told_how_far_it_is(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    process = forked(tmp_path, ONE_SIZE, {"COLUMNS": "200", "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    told = b""
    while piece := read_or_end(ours):
        told += piece
    os.close(ours)
    stdout = process.communicate(timeout=PATIENCE_S)[0].decode()
    assert process.returncode == 0
    heading = next(line for line in stdout.splitlines() if line.startswith("tokens"))
    assert heading.split("  ")[0] == "tokens"
    assert " ".join(heading.split()) == (
        "tokens backend median p25–p75 min n first ratio 95 % interval speed GFLOP/s FLOP/B peak memory predicted error "
        "mean error"
    )
    assert widest(stdout) <= 200
    assert not obeyed_or_hidden(stdout)
    assert "━" in told.decode()
    assert "8 tokens: sdpa" in told.decode()
    assert "8 tokens: rounds" in told.decode()
    assert told.endswith(b"\x1b[2K") or told.endswith(b"\x1b[?25h\r\x1b[1A\x1b[2K"), told[-80:]


def read_or_end(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the way in which Linux says that nobody is left at the other end
        return b""


# --------------------------------------------------------------------------------------------------- verdicts, statuses


def widened(document: Document) -> None:
    """Every time may have been anything from a thousandth of itself to the thousandfold."""
    for row in document["rows"]:
        if row["median_s"] is not None:
            middle = row["median_s"]
            row["samples_s"] = [middle / 1000, middle, middle * 1000]
            row["median_low_s"], row["median_high_s"] = middle / 1000, middle * 1000


@pytest.mark.full
def test_a_rule_that_the_noise_hides_is_inconclusive_and_no_failure(baseline: Path, tmp_path: Path) -> None:
    copied(baseline, tmp_path, widened)
    words = (*ONE_SIZE, "--compare", "then.json", "--fail-if", "slower:1.20")
    done = bench(tmp_path, *words, form=("--json",), code=0)
    rule = json.loads(done.stdout)["comparison"]["rule"]
    assert (rule["limit"], rule["outcome"]) == (1.2, "inconclusive")
    (row,) = rule["undecided"]
    assert row["shows_from"] > 1000
    assert done.stderr.splitlines()[-1] == f"mha: {json.loads(done.stdout)['comparison']['summary']}"
    strict = bench(tmp_path, *words, "--strict", form=("--json",), code=3)
    assert strict.stderr == ""


@pytest.mark.full
def test_with_json_a_slower_run_prints_its_comparison_alone(baseline: Path, tmp_path: Path) -> None:
    copied(baseline, tmp_path, times(1 / FAR))
    words = (*SHORT, "--lengths", "8", "--backends", "sdpa,math", "--threads", "2")
    done = bench(tmp_path, *words, "--compare", "then.json", "--fail-if", "slower:1.10", form=("--json",), code=3)
    assert done.stderr == ""
    document = json.loads(done.stdout)
    comparison = document["comparison"]
    assert comparison["baseline"] == "then.json"
    then = {row["backend"]: row for row in json.loads(baseline.read_text())["rows"] if row["k_len"] == 8}
    assert [change["backend"] for change in comparison["changes"]] == ["sdpa", "math"]
    for change, row in zip(comparison["changes"], document["rows"], strict=True):
        assert row["causal"], "what the words leave open is the baseline's"
        assert change["median_s"] <= row["median_s"], "of two measurements the milder one"
        assert change["baseline_s"] == pytest.approx(then[change["backend"]]["median_s"] / FAR)
        assert change["ratio"] == pytest.approx(change["median_s"] / change["baseline_s"])
        assert change["verdict"] == "slower"
    assert comparison["rule"]["outcome"] == "slower"
    assert len(comparison["unmatched"]) == len(LENGTHS) * 4 - 2
    assert "threads differs: 1 then, 2 now" in comparison["warnings"]


def test_what_cannot_fit_or_would_take_too_long_is_told_as_csv_and_the_rest_is_measured(tmp_path: Path) -> None:
    sizes = ("--lengths", "8,1000k", "--heads", "1", "--d-head", "8", "--batch", "1", "--call-limit", "0.01")
    done = bench(tmp_path, *SHORT, *sizes, "--backends", "explicit,sdpa", "--csv")
    assert done.stderr == ""
    header, *lines = csv.reader(io.StringIO(done.stdout))
    assert len(lines) == 4
    assert set(header) >= FIELDS - {"samples_s"}
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [(row["k_len"], row["backend"], row["status"]) for row in rows] == [
        ("8", "explicit", "ok"),
        ("8", "sdpa", "ok"),
        ("1024000", "explicit", "too-large"),
        ("1024000", "sdpa", "too-slow"),
    ]
    assert float(rows[0]["median_s"]) > 0
    assert int(rows[2]["predicted_bytes"]) == 2 * 4 * 1024000**2
    too_large, too_slow = (row["reason"] for row in rows[2:])
    assert too_large.startswith("needs 7.6 TiB, and ")
    assert too_large.endswith(" is available")
    assert " × --call-limit or more, " in too_slow
    assert {row["median_s"] for row in rows[2:]} == {""}


@pytest.mark.full
def test_a_backend_that_cannot_run_alone_is_a_failure_whose_row_is_still_told(tmp_path: Path) -> None:
    words = (*SHORT, "--lengths", "8", "--backends", KERNEL_LESS)
    done = bench(tmp_path, *words, form=("--json",), code=1)
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["status"], row["reason"]) == ("unsupported", LACKING)
    assert done.error == {
        "code": "nothing-ran",
        "message": f"no backend could run: cudnn unsupported: {LACKING}",
        "hint": None,
        "path": None,
        "exit": 1,
    }


# ------------------------------------------------------------------------------------------------------ refused at once

USAGE: list[list[str]] = [
    *(
        ["--lengths", word]
        for word in ("", " ", ",", "12x", "0", "-1", "8,", "16..8", "8..", "8..16..32", "1_0", "8K", "12345678", "1.5k")
    ),
    ["--lengths", "9999999k"],
    ["--batch", "x"],
    ["--heads", "0"],
    ["--kv-heads", "two"],
    ["--d-head", "1..0"],
    *(["--backends", word] for word in ("", "sdpa2", "SDPA", "sdpa,")),
    ["--direction", "up"],
    ["--dtype", "float8"],
    *(
        ["--fail-if", word, "--compare", "then.json"]
        for word in ("", "1.10", "faster:2", "slower:0", "slower:-1", "slower:1e3", "slower:nan")
    ),
    *(["--decode", "--direction", word] for word in ("backward", "both", "forward,backward")),
    ["--heads", "9", "--kv-heads", "2"],
    ["--threads", "0"],
    ["--threads", "2.5"],
    ["--seed", "-1"],
    ["--repeat", "0"],
    *([f"--{name}", word] for name in ("budget", "call-limit") for word in ("0", "-1", "86401", "nan", "1s")),
    ["--device", "tpu"],
    ["the cat"],
]


@pytest.mark.parametrize("words", USAGE, ids=" ".join)
def test_what_cannot_mean_anything_is_refused_with_what_was_typed(tmp_path: Path, words: list[str]) -> None:
    done = attempt(tmp_path, "bench", *words, code=2, form=("--json",))
    assert (done.error["code"], done.stdout) == ("usage", "")
    name = words[0].lstrip("-")
    assert name in done.error["message"] or name.replace("-", "_") in done.error["message"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--fail-if", "slower:2"], "--fail-if needs a baseline to compare with", "add --compare FILE"),
        (["--strict"], "--strict works only with --fail-if", "add --fail-if slower:1.10"),
        (["--budget", "86401"], "--budget 86401 is out of range: it takes seconds, above 0 and at most 86400", None),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, words: list[str], message: str, hint: str | None
) -> None:
    done = attempt(tmp_path, "bench", *words, code=2, form=("--json",))
    assert (done.error["message"], done.error["hint"]) == (message, hint)


def test_heads_that_do_not_divide_those_of_the_device_are_refused(tmp_path: Path) -> None:
    words = ("--kv-heads", "3", "--device", "cpu")
    done = attempt(tmp_path, "bench", *words, code=2, launch=Launch(WITH_TORCH))
    assert "hint: try --kv-heads 4\n" in done.stderr


def test_a_device_that_is_not_there_is_refused_with_the_reason(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    built = torch.version.cuda is not None or torch.version.hip is not None
    lack = (
        "this machine has no CUDA device that torch can use"
        if built
        else f"this build of torch ({torch.__version__}) has no CUDA"
    )
    done = attempt(tmp_path, "bench", "--device", "cuda", "--lengths", "8", code=1, launch=Launch(WITH_TORCH))
    assert done.stderr == (f"mha: error: --device cuda is not available: {lack}\nhint: --device cpu works everywhere\n")


@forms
@pytest.mark.parametrize("option", ["--save-baseline", "--svg", "--html"])
def test_a_file_that_exists_is_kept_before_anything_is_measured(
    tmp_path: Path, option: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "old").write_text("old")
    done = attempt(tmp_path, "bench", option, "old", code=1, form=form)
    assert done.told.removeprefix("mha: error: ").startswith("old ")
    assert "--force overwrites it" in done.told
    if form:
        assert (done.error["code"], done.error["path"]) == ("exists", "old")


@pytest.mark.parametrize("option", ["--save-baseline", "--svg", "--html"])
def test_a_folder_that_is_missing_is_told_before_anything_is_measured(tmp_path: Path, option: str) -> None:
    done = attempt(tmp_path, "bench", option, "none/new", code=1)
    assert f"{tmp_path}/none" in done.stderr


@pytest.mark.parametrize(
    ("one", "other"), [("--svg", "--html"), ("--save-baseline", "--svg"), ("--save-baseline", "--html")]
)
@pytest.mark.parametrize("forced", [(), ("--force",)], ids=["new", "forced"])
def test_two_files_of_one_name_are_refused_before_anything_is_measured(
    tmp_path: Path, one: str, other: str, forced: tuple[str, ...]
) -> None:
    done = attempt(tmp_path, "bench", one, "out", other, "./out", *forced, code=2)
    assert done.stderr == f"mha: error: {one} and {other} name the same file, ./out: each needs its own file\n"


HIDING = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name == "matplotlib" else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
"""A Python in which matplotlib is not installed."""


@pytest.mark.parametrize("option", ["--svg", "--html"])
def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(tmp_path: Path, option: str) -> None:
    launch = Launch({"sitecustomize": HIDING, "torch": "import os\nos._exit(99)\n"})
    done = attempt(tmp_path, "bench", option, "new", code=1, launch=launch)
    assert 'hint: pip install "matplotlib<4,>=3.9" installs it\n' in done.stderr


# ------------------------------------------------------------------------------------------------------------ baselines


def without_field(document: Document) -> None:
    del document["rows"][0]["backend"]


def without_median(document: Document) -> None:
    document["rows"][1]["median_s"] = None


def without_schema(document: Document) -> None:
    del document["schema"]


BROKEN: list[tuple[str, Callable[[Document], object], str]] = [
    ("another schema", lambda d: d.update(schema="mha.record/1"), "'mha.record/1'"),
    ("a later schema", lambda d: d.update(schema="mha.bench/2"), "'mha.bench/2'"),
    ("no schema", without_schema, "then.json"),
    ("a row without its backend", without_field, "then.json.rows[0]"),
    ("no rows", lambda d: d.pop("rows"), "then.json"),
    ("a time that is none", without_median, "rows[1]"),
    ("a status of no meaning", lambda d: d["rows"][0].update(status="fine"), "then.json.rows[0].status"),
    ("a count that is a word", lambda d: d["rows"][0].update(batch="1"), "then.json.rows[0].batch"),
    ("a backend of no meaning", lambda d: d["sweep"].update(backends=["\x1b[2J"]), "'\\x1b[2J'"),
]


@pytest.mark.parametrize(("change", "part"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_baseline_that_is_none_is_refused_before_anything_is_measured(
    light: Path, change: Callable[[Document], object], part: str
) -> None:
    copied(light / "then.json", light, change)
    done = attempt(light, "bench", "--compare", "then.json", code=2 if "x1b" in part else 1)
    assert done.stdout == ""
    assert part in done.stderr.splitlines()[0]


@pytest.mark.parametrize(
    "content",
    [b"", b"time 5 ms", b'{"schema":NaN}', b"\xff\xfe{}", b"[" * 100_000, b"[1]", b"\x80\x04\x95"],
    ids=["empty", "words", "NaN", "UTF-16", "deep", "a list", "a pickle"],
)
def test_a_file_that_is_no_document_is_refused_before_anything_is_measured(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "then.json").write_bytes(content)
    done = attempt(tmp_path, "bench", "--compare", "then.json", code=1)
    assert done.stdout == ""
    assert "then.json" in done.stderr.splitlines()[0]


def test_a_rule_without_a_length_to_judge_is_refused_before_anything_is_measured(light: Path) -> None:
    words = ("--compare", "then.json", "--fail-if", "slower:1.10", "--lengths", "512,64")
    done = attempt(light, "bench", *words, code=1, form=("--json",))
    assert done.stdout == ""
    assert done.error == {
        "code": "nothing-compared",
        "message": "then.json has no row for the lengths of this run",
        "hint": f"lengths of then.json: {', '.join(map(str, LENGTHS))}; of this run: 64, 512",
        "path": None,
        "exit": 1,
    }


@pytest.mark.full
def test_a_rule_without_a_row_to_judge_is_an_error_alone(baseline: Path, tmp_path: Path) -> None:
    copied(baseline, tmp_path)
    words = (*ONE_SIZE, "--d-head", "16", "--compare", "then.json", "--fail-if", "slower:1.10")
    done = bench(tmp_path, *words, form=("--json",), code=1)
    assert done.stdout == ""
    assert (done.error["code"], done.error["message"]) == (
        "nothing-compared",
        "no row of then.json was measured in this run",
    )


def test_a_baseline_that_is_missing_is_told_with_its_path(tmp_path: Path) -> None:
    done = attempt(tmp_path, "bench", "--compare", "gone.json", code=1, form=("--json",))
    assert done.error == {
        "code": "unreadable", "message": "gone.json does not exist", "hint": None, "path": "gone.json", "exit": 1
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------- interrupted, unread


def descendants(pid: int) -> list[int]:
    """The processes below one, and below those."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [one for child in map(int, children) for one in (child, *descendants(child))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@pytest.mark.parametrize(
    ("number", "code", "sizes"),
    [
        pytest.param(signal.SIGINT, 130, ("--lengths", "16", "--budget", "60"), marks=pytest.mark.full),
        pytest.param(
            signal.SIGTERM,
            143,
            ("--lengths", "12k", "--heads", "8", "--batch", "1", "--call-limit", "600"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["SIGINT in short rounds", "SIGTERM in one long call"],
)
def test_a_signal_while_it_measures_ends_it_and_all_that_it_started(
    tmp_path: Path, number: int, code: int, sizes: tuple[str, ...]
) -> None:
    words = [
        "bench",
        "--device",
        "cpu",
        "--backends",
        "sdpa",
        *sizes,
        "--save-baseline",
        "new.json",
        "--svg",
        "new.svg",
    ]
    process = start(tmp_path, words, Launch(WITH_TORCH), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: is_copied(process.pid) or process.poll() is not None)
    started = descendants(process.pid)
    wait_until(lambda: not is_copied(process.pid))
    assert process.poll() is None, "it is past the memory, and in its own first call"
    time.sleep(0.5)
    started += descendants(process.pid)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (shell_code(process.returncode), stdout) == (code, b"")
    assert re.fullmatch(rb"mha: .* about .* s; .*\n", stderr), "nothing but how long it would take"
    assert started
    wait_until(lambda: not any(map(is_alive, started)))
    assert temporary_in(tmp_path) == []
    assert not list(tmp_path.glob("new*"))


def is_copied(pid: int) -> bool:
    """Whether the process to measure memory in runs a size just now."""
    return len(descendants(pid)) > 1


@pytest.mark.sampled(1)
def test_a_run_whose_reader_left_ends_in_silence(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = forked(tmp_path, ONE_SIZE, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    stderr = process.communicate(timeout=PATIENCE_S)[1]
    assert (shell_code(process.returncode) in (0, 141), stderr) == (True, b"")
    assert temporary_in(tmp_path) == []
