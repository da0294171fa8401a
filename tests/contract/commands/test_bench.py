"""`mha bench`: its rows agree with their samples. No time is judged."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.browser import contrasts_of, opened, overlaps_of
from support.mha import Ended, run
from torch.overrides import TorchFunctionMode

import mhacli

Mha = Callable[..., Ended]
Document = dict[str, Any]
ON_CPU = ("--device", "cpu", "--threads", "1", "--repeat", "12", "--budget", "0.01")
LENGTHS = (7, 14)
BACKENDS, MISSING = ("explicit", "sdpa"), "cudnn"
DIRECTIONS = ("forward", "both")
N_HEADS, N_KV_HEADS, D_HEAD, BATCH = 6, 3, 5, 2
SIZES = f"--heads {N_HEADS} --kv-heads {N_KV_HEADS} --d-head {D_HEAD} --batch {BATCH}".split()
MEASURED = (
    *"--lengths 7..14 --backends explicit,sdpa,cudnn --causal".split(),
    *SIZES,
    *ON_CPU,
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with the JSON, the picture and the page of a run in each direction. All workers
    share it.
    """
    place = Path(os.environ["MHA_TESTS_SHARED"]) / "bench"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            place.mkdir()
            for direction in DIRECTIONS:
                files = ("--svg", f"{direction}.svg", "--html", f"{direction}.html")
                words = ("--direction", direction, *files, "--json")
                done = run(place, "bench", *MEASURED, *words, writes=[".cache", ".config"])
                (place / f"{direction}.json").write_text(done.stdout)
    return place


@pytest.fixture(scope="module")
def document(folder: Path) -> Document:
    """The document of the run forward, with the rows of both."""
    forward, both = (json.loads((folder / f"{name}.json").read_text()) for name in DIRECTIONS)
    return {**forward, "rows": forward["rows"] + both["rows"]}


def ranks(n: int) -> int:
    """The innermost order statistic (from 1) that bounds an interval which holds the median in 95 %
    of all draws.
    """
    below, rank = 0.0, 0
    while 2 * (below + math.comb(n, rank) * 0.5**n) <= 0.05:
        below += math.comb(n, rank) * 0.5**n
        rank += 1
    return rank


# ----------------------------------------------------------------------------------------- measured


@pytest.mark.real
def test_every_size_and_backend_has_a_row_in_order(document: Document) -> None:
    assert (document["schema"], document["seed"]) == ("mha.bench/1", 0)
    assert document["environment"]["device"] == "cpu"
    rows = document["rows"]
    expected = [(d, n, b) for d in DIRECTIONS for n in LENGTHS for b in (*BACKENDS, MISSING)]
    assert [(row["direction"], row["k_len"], row["backend"]) for row in rows] == expected
    for row in rows:
        assert (row["batch"], row["n_heads"], row["n_kv_heads"], row["d_head"]) == (
            BATCH,
            N_HEADS,
            N_KV_HEADS,
            D_HEAD,
        )
        assert (row["q_len"], row["dtype"], row["causal"]) == (row["k_len"], "float32", True)


@pytest.mark.real
def test_the_numbers_of_a_row_follow_from_its_samples(document: Document) -> None:
    for row in document["rows"]:
        if row["backend"] == MISSING:
            assert (row["status"], row["samples_s"], row["median_s"], row["max_error"]) == (
                "unsupported",
                [],
                None,
                None,
            )
            assert MISSING in row["reason"]
            continue
        samples = sorted(row["samples_s"])
        assert row["status"] == "ok"
        assert len(samples) == row["n_samples"] == 12
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        assert row["median_s"] == pytest.approx(statistics.median(samples))
        assert (row["p25_s"], row["p75_s"], row["min_s"]) == pytest.approx((low, high, samples[0]))
        rank = ranks(len(samples))
        assert (row["median_low_s"], row["median_high_s"]) == (samples[rank - 1], samples[-rank])
        assert row["tflops"] == pytest.approx(row["flops"] / row["median_s"] / 1e12)


@pytest.mark.real
def test_work_and_bytes_are_those_of_the_visible_cells_and_of_the_tensors(
    document: Document,
) -> None:
    """Two products for each visible cell. A pass backward has five more of them, and reads and
    writes twice as much.
    """
    for row in document["rows"]:
        n, is_forward = row["k_len"], row["direction"] == "forward"
        n_products = 2 if is_forward else 7
        assert row["flops"] == n_products * 2 * BATCH * N_HEADS * D_HEAD * (n * (n + 1) // 2)
        tensors = 4 * BATCH * n * D_HEAD * (2 * N_HEADS + 2 * N_KV_HEADS)
        assert row["bytes"] == tensors * (1 if is_forward else 3)


@pytest.mark.real
def test_each_backend_is_compared_with_float64_and_names_the_kernel_that_ran(
    document: Document,
) -> None:
    for row in document["rows"]:
        if row["status"] == "ok":
            assert 0 < row["mean_error"] <= row["max_error"] < 2e-6
            assert (
                row["ran"] == row["backend"]
                if row["backend"] != "sdpa"
                else row["ran"] in ("flash", "math")
            )


@pytest.mark.real
def test_ratios_are_to_the_fastest_of_a_size(document: Document) -> None:
    for direction, length in ((d, n) for d in DIRECTIONS for n in LENGTHS):
        of_size = [
            row
            for row in document["rows"]
            if (row["direction"], row["k_len"]) == (direction, length)
        ]
        rows = [row for row in of_size if row["status"] == "ok"]
        fastest = min(row["median_s"] for row in rows)
        for row in rows:
            assert row["ratio"] == pytest.approx(row["median_s"] / fastest)
            assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


@pytest.mark.real
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_picture_and_page_are_those_of_the_run(folder: Path, direction: str) -> None:
    picture = (folder / f"{direction}.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("}svg")
    rows = json.loads((folder / f"{direction}.json").read_text())["rows"]
    n_timed = sum(row["median_s"] is not None for row in rows)
    page = (folder / f"{direction}.html").read_text()
    assert page.count("<circle") == 2 * n_timed, "a time and a rate"


SHAPES = """(elements) => elements.map((e) => {
  const box = e.getBoundingClientRect(), outer = e.closest(".scroll").getBoundingClientRect();
  const style = getComputedStyle(e);
  return [box.left - outer.left, outer.right - box.right,
    [style.stroke, style.strokeDasharray].join()];
})"""
"""The distance of shapes from the sides of the box in which they scroll, and their strokes."""


@pytest.fixture(scope="module")
def plotted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """The page of backends that need more lines than there are colours, and their number."""
    backends = "explicit,sdpa,math,flash,torch-mha,torch-mha-weights"
    words = ("--lengths", "2..1k", "--backends", backends, "--heads", "2", "--d-head", "4")
    place = tmp_path_factory.mktemp("plotted")
    done = run(place, "bench", *words, *ON_CPU, "--html", "all.html", "--json")
    n_timed = len({row["backend"] for row in done.json["rows"] if row["median_s"] is not None})
    return (place / "all.html").read_text(), n_timed


@pytest.mark.real
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_plots_of_all_backends_can_be_read_on_a_phone_and_in_the_dark(
    plotted: tuple[str, int], tmp_path: Path, width: int, scheme: str
) -> None:
    html, n_timed = plotted
    with opened(tmp_path, html, size=(width, 900), scheme=scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert overlaps_of(tab, "svg text") == []
        shapes = tab.locator("svg :is(text, polyline, circle)").evaluate_all(SHAPES)
        assert len(shapes) > 4 * n_timed
        assert min(shape[0] for shape in shapes) >= 0
        assert min(shape[1] for shape in shapes) >= 0
        lines = tab.locator("svg polyline").evaluate_all(SHAPES)
        assert len({line[2] for line in lines}) == n_timed == 6
        paint = "(all, name) => all.forEach((e) => e.style.color = getComputedStyle(e)[name])"
        tab.locator("svg text").evaluate_all(paint, "fill")
        assert min(contrasts_of(tab, "svg text")) >= 4.5
        strokes = tab.locator("svg polyline").evaluate_all(
            "(all) => all.map((e) => getComputedStyle(e).stroke)"
        )
        texts = "(all, strokes) => strokes.map((s, i) => all[i % all.length].style.color = s)"
        tab.locator("svg text").evaluate_all(texts, [*dict.fromkeys(strokes)])
        assert min(contrasts_of(tab, "svg text")) >= 3


@pytest.mark.real
def test_csv_has_a_line_for_each_row(mha: Mha) -> None:
    words = ("--lengths", "7", *SIZES, *ON_CPU, "--backends", f"explicit,{MISSING}", "--csv")
    ran, missing = csv.DictReader(io.StringIO(mha("bench", *words).stdout))
    assert (ran["backend"], ran["status"], ran["k_len"], ran["n_samples"]) == (
        "explicit",
        "ok",
        "7",
        "12",
    )
    assert float(ran["p25_s"]) <= float(ran["median_s"]) <= float(ran["p75_s"])
    assert (missing["status"], missing["median_s"], missing["max_error"]) == ("unsupported", "", "")


@pytest.mark.real
def test_where_no_backend_runs_the_rows_are_printed_and_the_exit_code_is_1(mha: Mha) -> None:
    """A call would take longer than it may."""
    sizes = "--lengths 1000k --heads 1 --d-head 8 --batch 1 --call-limit 0.01".split()
    done = mha("bench", *ON_CPU, *sizes, "--backends", "sdpa", "--json", code=1)
    assert [row["status"] for row in done.json["rows"]] == ["too-slow"]
    assert all(row["reason"] for row in done.json["rows"])
    assert (done.error["code"], "sdpa" in done.error["message"]) == ("nothing-ran", True)


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_function_measures_decoding(dtype: str) -> None:
    """One query against all keys; 16 bits are less exact."""
    made = mhacli.bench(
        [7, 13],
        backends=["sdpa"],
        batch=[2],
        n_heads=[6],
        n_kv_heads=[3],
        d_head=[5],
        dtypes=[dtype],
        decode=True,
        device="cpu",
        threads=1,
        repeat=6,
        budget_s=0.01,
    )
    rows = made.to_dict()["rows"]
    assert {(row["q_len"], row["k_len"], row["dtype"]) for row in rows} == {
        (1, k_len, dtype) for k_len in (7, 13)
    }
    for row in rows:
        assert row["flops"] == 4 * 2 * 6 * 5 * row["k_len"]
        assert (row["max_error"] > 1e-5) == (row["dtype"] == "bfloat16")
    assert "\n" not in repr(made)


class OutOfMemory(TorchFunctionMode):
    """torch on a device whose memory another process takes after some calls of its kernel."""

    n_calls = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.n_calls += function is torch.nn.functional.scaled_dot_product_attention
        if self.n_calls > 8:
            self.n_calls -= 1
            raise RuntimeError("CUDA out of memory")
        return function(*args, **kwargs or {})


@pytest.mark.real
def test_an_error_in_the_rounds_is_the_row_of_its_backend() -> None:
    with OutOfMemory():
        made = mhacli.bench([16], backends=["explicit", "sdpa"], device="cpu", threads=1, repeat=12)
    explicit, sdpa = made.to_dict()["rows"]
    assert (explicit["status"], explicit["n_samples"], explicit["ratio"]) == ("ok", 12, 1.0)
    assert (sdpa["status"], sdpa["median_s"], sdpa["samples_s"]) == ("out-of-memory", None, ())
    assert sdpa["reason"] == "CUDA out of memory"


@pytest.mark.real
def test_without_answers_in_float64_the_error_is_null() -> None:
    (row,) = mhacli.bench(
        [8192], backends=["sdpa"], n_heads=[1], d_head=[8], device="cpu", repeat=1
    ).to_dict()["rows"]
    assert (row["status"], row["reason"], row["max_error"], row["n_error_queries"]) == (
        "ok",
        None,
        None,
        0,
    )


# -------------------------------------------------------------- refused before anything is measured

USAGE = [
    *(
        ["--lengths", word]
        for word in ("", ",", "12x", "0", "-1", "8,", "16..8", "8..", "1_0", "9999999k")
    ),
    ["--batch", "x"],
    ["--heads", "0"],
    ["--kv-heads", "two"],
    ["--d-head", "1..0"],
    ["--backends", "SDPA2"],
    ["--direction", "up"],
    ["--dtype", "float8"],
    ["--device", "tpu"],
    ["--threads", "0"],
    ["--seed", "-1"],
    ["--repeat", "0"],
    ["--budget", "0"],
    ["--call-limit", "nan"],
    ["--heads", "9", "--kv-heads", "2"],
    ["--strict"],
    ["--fail-if", "slower:2"],
    ["--compare", "b.json"],
    ["--save-baseline", "b.json"],
    ["--direction", "both", "--decode"],
    ["--direction", "forward,both"],
    ["--direction", "backward"],
    ["--heads", "2,4"],
    ["--svg", "out", "--html", "./out"],
]


@pytest.mark.parametrize("words", USAGE, ids=" ".join)
def test_what_has_no_meaning_is_refused_by_its_option(mha: Mha, words: list[str]) -> None:
    done = mha("bench", *words, "--json", code=2)
    name = words[0].lstrip("-")
    assert done.error["code"] == "usage"
    assert name in done.error["message"] or name.replace("-", "_") in done.error["message"]


@pytest.mark.parametrize("option", ["--svg", "--html"])
def test_a_file_that_cannot_be_written_is_refused(mha: Mha, tmp_path: Path, option: str) -> None:
    (tmp_path / "old").write_text("old")
    done = mha("bench", option, "old", "--json", code=1)
    assert (done.error["code"], done.error["path"]) == ("exists", "old")
    assert "none" in mha("bench", option, "none/new", code=1).said


def test_a_number_where_the_function_takes_a_list_is_refused() -> None:
    lengths: Any = 512
    with pytest.raises(mhacli.MhaError, match="lengths=512"):
        mhacli.bench(lengths)


def test_a_missing_device_and_heads_that_do_not_fit_are_named(mha: Mha) -> None:
    assert "cuda:99" in mha("bench", "--device", "cuda:99", "--lengths", "8", code=1).said
    assert "--kv-heads" in mha("bench", "--kv-heads", "3", "--device", "cpu", code=2).said
