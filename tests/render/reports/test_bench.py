"""Benchmarks as tables, JSON and CSV, from given numbers: contents, order, and omissions."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.benchmarks_made import CEILING, made_benchmark, made_control, made_row, size
from support.processes import obeyed_or_hidden
from support.records import drawn

from mhacli.render.base.options import Screen
from mhacli.render.reports.bench import (
    _COLUMNS,
    _SIMILAR,
    backend_text,
    bench_view,
    csv_pieces,
    families,
    json_pieces,
    size_text,
)
from mhacli.results.bench.comparison import compare
from mhacli.results.bench.intervals import ratio_text
from mhacli.results.bench.result import Benchmark, BenchRow, MachinePeak, read_benchmark
from mhacli.results.columns import BENCH_COLUMNS
from mhacli.results.glossary import meanings

WIDTHS = [40, 80, 120, 200]
widths = pytest.mark.parametrize("width", WIDTHS)
WIDE = 200
HOSTILE = '=HYPERLINK("http://e","x")\x1b]52;c;eA==\x07\x1b[2J\u202e\u200b\r\n[red]"quoted", \\'
EIGHT = (0.5,) * 8
SQUARE = size(n_heads=3, n_kv_heads=3, batch=1, q_len=7, k_len=7)


def lines_of(benchmark: Benchmark, width: int = WIDE, then: Benchmark | None = None) -> list[str]:
    comparison = None if then is None else compare(benchmark, then, "then.json")
    return drawn(bench_view(benchmark, comparison, Screen(width, False)), width)


def words_of(benchmark: Benchmark, width: int = WIDE, then: Benchmark | None = None) -> str:
    """All words, whatever breaks the lines."""
    return " ".join(" ".join(lines_of(benchmark, width, then)).split())


def table_of(benchmark: Benchmark, width: int = WIDE) -> list[list[str]]:
    """The heading and the lines of the first table, as words."""
    lines = lines_of(benchmark, width)
    begins = next(place for place, line in enumerate(lines) if line.startswith("tokens "))
    ends = next((place for place, line in enumerate(lines) if place > begins and not line), len(lines))
    return [line.split() for line in lines[begins:ends]]


def contest(*changed: BenchRow) -> Benchmark:
    """Three backends that ran and one that could not, slowest first."""
    rows = [
        made_row("explicit", [0.004, 0.004, 0.004], ratio=4.0, ratio_low=3.9, ratio_high=4.25),
        made_row("math", [0.00101, 0.00101, 0.00101], ratio=1.01, ratio_low=0.98, ratio_high=1.03, is_similar=True),
        made_row("cudnn"),
        made_row("sdpa", [0.001, 0.00125, 0.001], ran="flash", is_fastest=True),
    ]
    return made_benchmark(*rows, *changed, controls=[made_control(0.97, 1.02, samples_s=(0.002, 0.001, 0.003))])


# -------------------------------------------------------------------------------------------------------------- families


def test_rows_that_differ_in_batch_length_and_backend_are_one_family() -> None:
    rows = [
        made_row("sdpa", workload=size(batch=batch, q_len=length, k_len=length))
        for batch, length in ((2, 5), (1, 5), (2, 9))
    ]
    assert families([*rows, made_row("math")]) == [(rows[0].family, [*rows, made_row("math")])]


def test_families_stand_in_the_order_of_measuring_under_their_names() -> None:
    works = [size(direction=direction) for direction in ("both", "forward")]
    run = made_benchmark(*(made_row("sdpa", [0.5], workload=work) for work in works))
    lines = lines_of(run)
    names = [work.family for work in works]
    assert lines.index(names[0]) < lines.index(names[1])
    assert [name for name, _ in families(run.rows)] == names


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "2 × 5"),
        ({"batch": 1}, "5"),
        ({"q_len": 1, "k_len": 77}, "2 × 77"),
        ({"batch": 1, "k_len": 16384}, "16384"),
    ],
)
def test_a_size_is_its_batch_and_its_length(changes: dict[str, Any], text: str) -> None:
    assert size_text(size(**changes)) == text


@pytest.mark.parametrize(
    ("backend", "fields", "text"),
    [
        ("sdpa", {"ran": "sdpa"}, "sdpa"),
        ("sdpa", {"ran": None}, "sdpa"),
        ("sdpa", {"ran": "flash"}, "sdpa → flash"),
        ("sdpa", {"ran": "math", "is_fallback": True}, "sdpa → math!"),
        ("flex", {"ran": "flex, unfused", "is_fallback": True}, "flex → flex, unfused!"),
        ("torch-mha", {"ran": "unfused", "is_fallback": True}, "torch-mha → unfused!"),
        ("torch-mha-weights", {"ran": "unfused"}, "torch-mha-weights"),
        ("torch-mha-weights", {"ran": "flash"}, "torch-mha-weights → flash"),
    ],
)
def test_a_backend_is_named_with_what_ran_where_its_name_does_not_say_so(
    backend: str, fields: dict[str, Any], text: str
) -> None:
    assert backend_text(made_row(backend, [0.5], **fields)) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0, "1.00"),
        (0.994, "0.99"),
        (9.994, "9.99"),
        (9.995, "10.0"),
        (99.94, "99.9"),
        (99.96, "100"),
        (1234.5, "1,234"),
    ],
)
def test_a_ratio_has_three_digits(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


# ---------------------------------------------------------------------------------------------------------------- tables


def test_by_hand_a_table_on_80_columns() -> None:
    lines = lines_of(contest(), 80)
    begins = lines.index("9 heads × 11 · 3 kv heads · float32 · full · forward")
    assert lines[begins + 1 : begins + 8] == [
        "tokens backend        median   ratio speed           peak  memory error",
        "2 × 5  sdpa → flash     1 ms   1.00* ████████    0.05 % m 2.0 KiB 1e-06",
        "       math          1.01 ms  ≈ 1.01 ████████    0.05 % m 2.0 KiB 1e-06",
        "       explicit         4 ms    4.00 ██          0.01 % m 2.0 KiB 1e-06",
        "       cudnn               –         unsupported                –",
        "       noise of sdpa            1.03",
        "cudnn: unsupported: there is no such kernel",
    ]


def test_the_noise_lies_within_the_interval_beside_it() -> None:
    noisy = made_benchmark(made_row("flash", EIGHT), controls=[made_control(0.63, 1.43, backend="flash")])
    (line,) = [" ".join(line) for line in table_of(noisy, 200) if line[:1] == ["noise"]]
    assert line == "noise of flash 1 1.59 0.63–1.59"


@widths
def test_backends_stand_by_their_time_what_did_not_run_below_and_the_noise_last(width: int) -> None:
    backends = [line[0] if place else line[3] for place, line in enumerate(table_of(contest(), 200)[1:6])]
    assert backends == ["sdpa", "math", "explicit", "cudnn", "noise"]
    lines_of(contest(), width)


def test_the_order_is_that_of_each_size() -> None:
    other = size(k_len=9, q_len=9)
    run = contest(
        made_row("sdpa", [0.004], workload=other, ratio=2.0, ratio_low=1.9, ratio_high=2.1),
        made_row("explicit", [0.002], workload=other),
    )
    lines = [line.split()[:4] for line in lines_of(run)]
    at = next(place for place, line in enumerate(lines) if line[:3] == ["2", "×", "9"])
    assert lines[at][3] == "explicit"
    assert lines[at + 1][0] == "sdpa"


def test_on_a_wide_screen_every_number_is_there() -> None:
    heading, first, *_ = table_of(
        made_benchmark(
            made_row(
                "sdpa", [0.001, 0.002, 0.004], n_calls=3, first_s=0.75, ratio=1.5, ratio_low=1.25, ratio_high=1.75,
                extra_bytes=3 << 20, max_error=3.2e-7, mean_error=4.6e-8, workload=SQUARE,
                ceiling=MachinePeak("float32", 1e-5, 1e3),
            )
        )
    )  # fmt: skip
    assert " ".join(heading) == (
        "tokens backend median p25–p75 min n first ratio 95 % interval speed GFLOP/s FLOP/B peak memory predicted error mean "
        "error"
    )
    flops, moved = 4 * 3 * 7 * 7 * 11, 4 * 4 * 3 * 7 * 11
    assert " ".join(first) == (
        f"7 sdpa 2 ms 1.5–3 1 3 750 ms 1.50 1.25–1.75 █████ {flops / 0.002 / 1e9:.3g} {flops / moved:.3g} "
        f"{flops / 1e7 / 0.002 * 100:.0f} % c 3.0 MiB 4.0 KiB 3e-07 5e-08"
    )


def test_from_one_teraflop_per_second_on_rates_are_in_those() -> None:
    work = size(q_len=4096, k_len=4096, n_heads=64, n_kv_heads=64, d_head=128)
    heading, first, *_ = table_of(made_benchmark(made_row("sdpa", [0.5], workload=work)))
    assert "TFLOP/s" in heading
    assert f"{4 * 2 * 64 * 128 * 4096**2 / 0.5 / 1e12:.3g}" in first


@pytest.mark.parametrize("status", ["unsupported", "out-of-memory", "too-large", "too-slow", "failed"])
@widths
def test_what_has_no_times_has_a_status_and_below_the_table_the_reason(status: str, width: int) -> None:
    row = made_row("math", status=status, reason="it [red]is so", extra_bytes=None)
    run = made_benchmark(made_row("sdpa", [0.5]), row, made_row("math", status=status, reason="it [red]is so"))
    words = words_of(run, width)
    assert words.count(f"math: {status}: it [red]is so") == 1
    if width >= 80:
        (line,) = [line for line in lines_of(run, width) if line.split()[:2] == ["math", "–"]][:1]
        assert status in line
        assert line.endswith("–") or "4.0 KiB" in line


def test_a_reason_that_is_not_about_all_sizes_names_those_that_it_is_about() -> None:
    sizes = [size(q_len=n, k_len=n) for n in (5, 7, 9)]
    rows = [made_row("sdpa", [0.5], workload=work) for work in sizes]
    rows += [made_row("math", workload=work, reason="it is so") for work in sizes[1:]]
    lines = lines_of(made_benchmark(*rows))
    assert [line for line in lines if line.startswith("math: ")] == ["math: unsupported: it is so (at 2 × 7, 2 × 9)"]


@pytest.mark.parametrize(("width", "n_hidden"), [(80, 9), (88, 8), (104, 6), (120, 4), (134, 2), (150, 1), (160, 0)])
def test_the_legend_counts_the_columns_of_a_wider_screen(width: int, n_hidden: int) -> None:
    words = words_of(made_benchmark(made_row("sdpa", EIGHT)), width)
    assert (f"160 columns show {n_hidden} more" in words) == (n_hidden > 0)


def test_every_heading_is_a_term_of_the_glossary() -> None:
    run = contest()
    lines = lines_of(run)
    (heading,) = [line for line in lines if line.startswith("tokens ")]
    for name in _COLUMNS:
        assert BENCH_COLUMNS[name].heading in heading
        assert "bench" in [term.group for term in meanings(BENCH_COLUMNS[name].heading)]


def test_a_row_with_times_and_a_reason_shows_both() -> None:
    row = made_row("sdpa", [0.001], max_error=None, mean_error=None, reason="it is so")
    run = made_benchmark(row)
    _, first, *rest = table_of(run, 80)
    assert first[-1] == "–"
    assert " ".join(rest[0]) == "sdpa: it is so"


def test_an_exact_result_has_the_error_zero() -> None:
    _, first, *_ = table_of(made_benchmark(made_row("explicit", [0.001], max_error=0.0)), 80)
    assert first[-1] == "0"


@pytest.mark.parametrize("backend", ["torch-mha → unfused!", "torch-mha-weights"])
@pytest.mark.parametrize("status", ["ok", "out-of-memory"])
@widths
def test_numbers_are_never_cut_to_make_room(backend: str, status: str, width: int) -> None:
    name, _, ran = backend.partition(" → ")
    work = size(batch=16, q_len=16384, k_len=16384)
    rows = [
        made_row("sdpa", [0.0123], workload=work, ran="flash", is_fastest=True),
        made_row(
            name, [1.234] if status == "ok" else (), workload=work, ratio=123.4, ratio_low=101.0, ratio_high=140.0,
            ran="unfused", is_fallback=bool(ran), extra_bytes=123 << 20, is_similar=True,
        ) if status == "ok" else made_row(name, workload=work, status=status, reason="it is too much"),
    ]  # fmt: skip
    words = words_of(made_benchmark(*rows, controls=[made_control(workload=work, samples_s=(0.0124,))]), width)
    assert "…" not in words
    for number in ("12.3 ms", "1.00*", *(["1.23 s", "≈ 123"] if status == "ok" else [])):
        assert number in words


# ---------------------------------------------------------------------------------------------------------- head and foot


@widths
def test_the_head_shows_the_machine_and_its_ceilings(width: int) -> None:
    about = {"device": "cuda:0", "device_name": "H200", "driver": "550.1", "device_asked": "auto"}
    ceilings = [CEILING, MachinePeak("bfloat16", 812.34, 4321.0)]
    words = words_of(made_benchmark(made_row("sdpa", [0.5]), ceilings=ceilings, environment=about), width)
    head = "mha 0.1.0 bench · cuda:0 (auto) · H200 · driver 550.1 · 3 threads of 7 cores · torch 2.9.1 · load 0.5 at the start"
    for part in [*head.split(" · "), "seed 0"]:
        assert part in words
    assert "this machine's best, float32: matrix product 500 GFLOP/s, copy 20 GB/s" in words
    assert "this machine's best, bfloat16: matrix product 812 TFLOP/s, copy 4.32e+03 GB/s" in words


def test_a_device_that_was_named_and_a_system_without_load_are_reported_as_they_are() -> None:
    about = {"device_asked": "cpu", "load_average": None, "threads": 1, "n_cpus": 1}
    line = lines_of(made_benchmark(made_row("sdpa", [0.5]), environment=about))[0]
    assert line == "mha 0.1.0 bench · cpu · Some CPU · 1 thread of 1 core · torch 2.9.1 · seed 0"


ALWAYS = (
    "ratio: median ÷ that of the fastest, the first row",
    "peak: shortest possible time on this machine ÷ median; c: compute-bound, m: memory-bound",
    "error: largest difference from float64",
)
NEEDED: list[tuple[str, BenchRow, dict[str, Any]]] = [
    ("! not a fused kernel", made_row("sdpa", EIGHT, ran="math", is_fallback=True), {}),
    ("torch-mha computes the projections too", made_row("torch-mha-weights", EIGHT, ran="unfused"), {}),
    (
        "error: of at least 2 queries and their gradients, where all would take too long",
        made_row("sdpa", EIGHT, n_error_queries=2),
        {},
    ),
    (
        "above 100 %: data from a cache, or the machine was busy while its best was measured",
        replace(made_row("sdpa", EIGHT), share_of_peak=1.01),
        {},
    ),
    (
        "? uncertain times: the machine was busy, other processes used 0.0 of its CPUs",
        replace(made_row("sdpa", EIGHT), is_sure=False),
        {},
    ),
    ("with 3 rounds an interval contains the true median with a probability of 75 %", made_row("sdpa", (0.5,) * 3), {}),
    ("with 1 round an interval contains the true median with a probability of 0 %", made_row("sdpa", (0.5,)), {}),
    (
        "~ less than a millisecond: mostly the cost of calling torch, not of attention",
        made_row("sdpa", (0.0009,) * 8),
        {},
    ),
]


@widths
@pytest.mark.parametrize("place", range(len(NEEDED)))
def test_the_legend_shows_what_the_tables_need_and_no_more(place: int, width: int) -> None:
    told, row, about = NEEDED[place]
    words = words_of(made_benchmark(row, environment=about), width)
    for line in (*ALWAYS, told):
        assert line in words
    others = {line[:12] for line, _, _ in NEEDED} - {told[:12]}
    assert not [line for line in others if line in words]


def test_the_legend_explains_the_signs_that_occur() -> None:
    signs = ("≈ not certainly slower: ", "* certainly the fastest", "noise of: ")
    words = words_of(made_benchmark(made_row("sdpa", EIGHT)))
    assert not [sign for sign in signs if sign in words]
    words = words_of(contest())
    assert not [sign for sign in signs if sign not in words]


def test_the_legend_of_a_plain_run_has_its_lines_alone() -> None:
    words = words_of(made_benchmark(made_row("sdpa", EIGHT)))
    assert not [line for line, _, _ in NEEDED if line[:12] in words]
    assert "memory: beyond the inputs, in a fresh process" in words


def test_memory_is_of_a_fresh_process_on_a_cpu_alone() -> None:
    words = words_of(made_benchmark(made_row("sdpa", EIGHT), environment={"device": "cuda:0"}))
    assert "memory: beyond the inputs" in words
    assert "fresh process" not in words


@pytest.mark.parametrize(("device", "mark"), [("cpu", "~"), ("mps", "~"), ("cuda:0", "")])
def test_a_time_of_less_than_a_millisecond_is_marked_but_on_cuda(device: str, mark: str) -> None:
    run = made_benchmark(made_row("sdpa", (0.0009,) * 8), environment={"device": device})
    _, first, *_ = table_of(run, 80)
    assert f"{mark}900" in first


def test_where_nothing_ran_no_legend_explains_numbers_that_are_not_there() -> None:
    words = words_of(made_benchmark(made_row("cudnn")))
    assert words.endswith(f" {made_benchmark().summary[0]}")
    assert "cudnn: unsupported: there is no such kernel" in words
    for line in ALWAYS:
        assert line not in words


# ------------------------------------------------------------------------------------------------------------ comparison


def compared() -> tuple[Benchmark, Benchmark]:
    now = made_benchmark(
        made_row("sdpa", [0.002] * 8 + [0.003] * 3),
        made_row("math", [0.001] * 8),
        made_row("explicit", [0.5] * 8),
        made_row("flash", status="failed", reason="it [b]broke"),
        made_row("efficient", [0.25] * 8),
        environment={"threads": 5},
    )
    then = made_benchmark(
        made_row("sdpa", [0.001] * 8),
        made_row("math", [0.004] * 8),
        made_row("explicit", [0.5] * 8),
        made_row("flash", [0.125] * 8),
        made_row("torch-mha", [0.125] * 8),
    )
    return now, then


def test_by_hand_the_changes_since_a_baseline() -> None:
    lines = lines_of(*compared()[:1], WIDE, compared()[1])
    below = [" ".join(line.split()) for line in lines[lines.index("against then.json") :]]
    below = below[: below.index("") + 1]
    name = "batch 2, 5 × 5 tokens, 9/3 heads × 11, float32, full, forward"
    assert below == [
        "against then.json",
        name,
        "backend then now now / then 95 % of both verdict",
        "sdpa 1 ms 2 ms 2.00 2.00–3.00 slower",
        "math 4 ms 1 ms 0.25 0.25–0.25 faster",
        "explicit 500 ms 500 ms ≈ 1.00 1.00–1.00",
        _SIMILAR,
        "threads differs: 3 then, 5 now",
        f"flash, {name}: failed now (it [b]broke)",
        f"efficient, {name}: not in then.json",
        f"torch-mha, {name}: not measured now",
        "",
    ]
    assert " ".join(words_of(*compared()[:1], WIDE, compared()[1]).split()).endswith(
        compare(*compared(), "then.json").summary
    )


@pytest.mark.parametrize(("time_s", "verdict"), [(0.45, "unclear"), (0.55, "unclear"), (0.25, "faster")])
def test_a_change_that_only_the_noise_leaves_open_is_unclear(time_s: float, verdict: str) -> None:
    now = made_benchmark(made_row("sdpa", [time_s] * 8), controls=[made_control(1.0, 1.3)])
    lines = lines_of(now, WIDE, made_benchmark(made_row("sdpa", EIGHT)))
    (line,) = [line for line in lines[lines.index("against then.json") :] if line.startswith("sdpa ")]
    assert line.split()[-1] == verdict


def test_what_is_inconclusive_stands_line_by_line() -> None:
    now, then = (made_benchmark(made_row("sdpa", times)) for times in ([0.4, 0.5, 0.7], [0.5]))
    comparison = compare(now, then, "then.json").ruled(1.1)
    lines = drawn(bench_view(now, comparison, Screen(WIDE, False)), WIDE)
    assert [line for line in lines if line][-3:] == list(comparison.conclusions)


def test_many_rows_of_one_run_alone_are_counted() -> None:
    names = ("math", "explicit", "flash", "efficient")
    then = made_benchmark(*(made_row(name, EIGHT) for name in names))
    below = words_of(made_benchmark(made_row("sdpa", EIGHT)), WIDE, then)
    assert "against then.json 4 rows of then.json not measured now 1 row measured now, not in then.json" in below
    assert "math, " not in below


def test_every_size_of_a_comparison_has_its_changes_below_its_name() -> None:
    works = [SQUARE, size(k_len=9, q_len=9)]
    run = made_benchmark(*(made_row(backend, EIGHT, workload=work) for work in works for backend in ("sdpa", "math")))
    lines = lines_of(run, 80, run)
    below = lines[lines.index("against then.json") + 1 :]
    below = [line.split()[0] if " tokens, " not in line else line for line in below if line][: 4 * len(works)]
    assert below == [line for work in works for line in (work.name, "backend", "sdpa", "math")]


@widths
def test_whatever_the_width_a_change_has_its_ratio_and_its_verdict(width: int) -> None:
    now, then = compared()
    words = words_of(now, width, then)
    below = words[words.index("against then.json") :]
    for word in ("sdpa", "math", "explicit", "2.00", "0.25", "≈ 1.00", "slower", "faster"):
        assert word in below
    assert "…" not in below


@pytest.mark.parametrize(("backend", "code"), [("sdpa", "31"), ("math", "32"), ("explicit", "")])
def test_slower_is_red_and_faster_is_green(backend: str, code: str) -> None:
    from rich.console import Console

    now, then = compared()
    paper = io.StringIO()
    Console(file=paper, width=WIDE, force_terminal=True, color_system="standard", legacy_windows=False).print(
        bench_view(now, compare(now, then, "then.json"), Screen(WIDE, True))
    )
    text = paper.getvalue()
    (line,) = [line for line in text[text.index("against") :].split("\n") if f"{backend} " in line and " ms" in line]
    assert [other for other in ("31", "32") if f"\x1b[{other}m" in line] == ([code] if code else [])


# ----------------------------------------------------------------------------------------------------------- JSON and CSV


@pytest.mark.parametrize("has_rows", [True, False])
def test_with_a_comparison_the_document_is_whole_and_has_it_at_the_end(has_rows: bool) -> None:
    now, then = compared()
    run = now if has_rows else made_benchmark()
    comparison = compare(run, then, 'th"en}.json')
    document = json.loads("".join(json_pieces(run, comparison)))
    assert list(document)[-1] == "comparison"
    assert document.pop("comparison") == json.loads(json.dumps(comparison.document()))
    assert document == json.loads(json.dumps(run.to_dict()))


def test_without_a_comparison_the_document_is_that_of_the_baseline() -> None:
    now, _ = compared()
    assert "".join(json_pieces(now, None)) == now.to_json()


def test_a_document_with_a_comparison_is_a_baseline_too(tmp_path: Path) -> None:
    now, then = compared()
    (tmp_path / "b.json").write_text("".join(json_pieces(now, compare(now, then, "then.json"))))
    assert read_benchmark(str(tmp_path / "b.json")) == now


def parsed_csv(run: Benchmark) -> tuple[str, list[dict[str, str]]]:
    text = "".join(csv_pieces(run))
    return text, list(csv.DictReader(io.StringIO(text, newline="")))


def test_csv_has_a_line_per_row_and_every_number_but_the_samples() -> None:
    run = contest()
    text, lines = parsed_csv(run)
    assert text.count("\n") == 1 + len(run.rows)
    assert len(lines) == len(run.rows)
    for line, row in zip(lines, run.rows, strict=True):
        document = row.document()
        assert set(line) == set(document) - {"samples_s"}
        for name, cell in line.items():
            value = document[name]
            if value is None:
                assert cell == ""
            elif name == "reason":
                assert cell == value
            elif isinstance(value, (bool, str)):
                assert cell == str(value)
            else:
                assert float(cell) == value


def test_a_hostile_reason_comes_back_from_csv_and_starts_no_formula() -> None:
    text, (first, second) = parsed_csv(
        made_benchmark(made_row("sdpa", reason=HOSTILE), made_row("sdpa", reason="=1+1"))
    )
    assert json.loads(first["reason"]) == HOSTILE
    assert json.loads(second["reason"]) == "=1+1"
    assert not obeyed_or_hidden(text.replace("\r\n", "\n"))
    for line in csv.reader(io.StringIO(text, newline="")):
        assert not [cell for cell in line if cell[:1] in ("=", "+", "@", "\t", "\r")]


# ---------------------------------------------------------------------------------------------------- texts from outside


def hostile(tmp_path: Path, backend: str = "flash") -> Benchmark:
    """A run that somebody else wrote, read from its file."""
    run = made_benchmark(
        made_row("sdpa", [0.5], reason=HOSTILE),
        made_row("math", reason=HOSTILE),
        made_row("flash"),
        environment={
            name: HOSTILE for name in ("mha", "torch", "device", "device_name", "device_asked", "driver", "cpu_name")
        },
    )
    document = json.loads(run.to_json()) | {"command": ["mha", HOSTILE]}
    document["rows"][2]["backend"] = backend
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(document))
    return read_benchmark(str(path))


@widths
def test_nothing_of_a_hostile_file_is_obeyed_or_hidden(tmp_path: Path, width: int) -> None:
    run, then = hostile(tmp_path), hostile(tmp_path, backend=HOSTILE)
    comparison = compare(made_benchmark(made_row("flash", [0.5]), made_row("math", [0.5])), then, HOSTILE)
    text = "\n".join(drawn(bench_view(run, comparison, Screen(width, False)), width))
    assert not obeyed_or_hidden(text), ascii(text)
    assert "[red]" in text
    assert "\\x1b" in text


def test_nothing_of_a_hostile_file_is_raw_in_json_or_csv(tmp_path: Path) -> None:
    run = hostile(tmp_path)
    comparison = compare(made_benchmark(made_row("flash", [0.5])), hostile(tmp_path, backend=HOSTILE), HOSTILE)
    assert not obeyed_or_hidden("".join(json_pieces(run, comparison)))
    text, lines = parsed_csv(run)
    assert not obeyed_or_hidden(text.replace("\r\n", "\n")), ascii(text)
    for line in lines:
        assert not [cell for cell in line.values() if cell[:1] in ("=", "+", "@", "\t", "\r")]


def test_drawing_gives_the_same_twice() -> None:
    run = contest()
    assert lines_of(run) == lines_of(run)


def test_a_ratio_that_is_not_known_well_enough_is_marked() -> None:
    rows = [
        replace(made_row(name, EIGHT), is_sure=False, ratio=ratio) for name, ratio in (("sdpa", 1.0), ("math", 3.0))
    ]
    lines = lines_of(made_benchmark(*rows), 80)
    assert any("  ? 3.00" in line for line in lines)
    similar = lines_of(made_benchmark(*(replace(row, is_similar=row.ratio == 3.0) for row in rows)), 80)
    assert any(" ≈? 3.00" in line for line in similar)
