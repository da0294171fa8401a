"""The benchmark as data: by hand, through JSON and back, and invalid files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.benchmarks_made import CEILING, SIZE, made_benchmark, made_control, made_row, size

from mhacli.errors import MhaError
from mhacli.results.bench.comparison import compare
from mhacli.results.bench.result import Benchmark, BenchRow, MachinePeak, read_benchmark, workload_of
from mhacli.results.bench.workload import Sweep, Workload, expected_flops, expected_moved_bytes

FULL = made_benchmark(
    made_row("explicit", [0.25, 0.5, 0.125]),
    made_row("sdpa", [0.1], ratio=0.3, ratio_low=0.1, ratio_high=0.7, is_similar=True, is_fastest=True, ran="flash"),
    made_row("cudnn"),
    made_row("math", status="out-of-memory", reason="can't allocate memory", first_s=3.5),
    made_row("torch-mha", [1e-9, 1e-9, 2e-9], workload=size(n_kv_heads=9, causal=True, direction="both")),
    made_row("explicit", [3.0], workload=size(dtype="bfloat16"), max_error=None, reason="results are not finite"),
    controls=[made_control(0.9, 1.1), made_control(workload=size(dtype="bfloat16"), backend="explicit")],
    ceilings=[CEILING, MachinePeak("bfloat16", 1 / 3, 1e-3)],
    environment={"driver": "550.54", "load_average": None, "device_name": "A ⟨device⟩ \u2028"},
    sweep=Sweep(
        ("explicit",), (2,), (9,), (3,), (11,), (5, 7), ("float32", "bfloat16"), True, ("forward", "both"), False
    ),
)


def written(folder: Path, document: Any) -> str:
    path = folder / "run.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def refusal(path: str) -> tuple[str, str | None]:
    """Message and hint of the refusal, the path in them written FILE."""
    with pytest.raises(MhaError) as caught:
        read_benchmark(path)
    assert caught.value.exit_code == 1
    assert caught.value.code == "bad-file"
    return caught.value.message.replace(path, "FILE"), caught.value.hint


def changed(change: dict[str, Any], benchmark: Benchmark = FULL) -> dict[str, Any]:
    """The document with fields of its first row changed; `...` takes a field away."""
    document: dict[str, Any] = json.loads(benchmark.to_json())
    for name, value in change.items():
        if value is ...:
            del document["rows"][0][name]
        else:
            document["rows"][0][name] = value
    return document


def test_a_run_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path, FULL.to_json())
    assert read_benchmark(path) == FULL
    assert read_benchmark(path).to_json() == FULL.to_json()


def test_an_empty_run_comes_back_too(tmp_path: Path) -> None:
    empty = made_benchmark(ceilings=())
    assert read_benchmark(written(tmp_path, empty.to_json())) == empty


@given(
    st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=9),
    st.floats(0, 1e12),
    st.integers(0, 2**63),
    st.text(max_size=20),
)
def test_every_number_and_word_survives_json(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], error: float, extra: int, reason: str
) -> None:
    made = replace(made_row("sdpa", [1.0]), samples_s=tuple(times), max_error=error, extra_bytes=extra, reason=reason)
    benchmark = made_benchmark(made)
    folder = tmp_path_factory.mktemp("file", numbered=True)
    path = folder / "run.json"
    path.write_bytes(benchmark.to_json().encode("utf-8"))
    assert read_benchmark(str(path)) == benchmark


def test_the_json_has_a_row_per_line_and_a_name_for_each_number() -> None:
    text = FULL.to_json()
    document = json.loads(text)
    assert list(document) == [
        "schema", "summary", "command", "seed", "environment", "sweep", "ceilings", "rows", "controls",
    ]  # fmt: skip
    assert document["schema"] == "mha.bench/1"
    assert sum(line.startswith('{"batch":') for line in text.splitlines()) == len(FULL.rows) + len(FULL.controls)
    names = (
        "backend ran status batch n_heads n_kv_heads d_head q_len k_len dtype causal direction samples_s median_s p25_s "
        "p75_s flops tflops share_of_peak extra_bytes predicted_bytes max_error reason is_fallback first_s n_calls "
        "median_low_s median_high_s min_s ratio ratio_low ratio_high is_sure is_similar is_fastest limit mean_error "
        "n_error_queries n_samples bytes flops_per_byte"
    )
    for row in document["rows"]:
        assert sorted(row) == sorted(names.split())


def test_by_hand_what_a_document_says_of_a_row() -> None:
    row = made_row("sdpa", [0.5, 0.25, 1.0]).document()
    assert row["n_samples"] == 3
    assert row["median_s"] == 0.5
    assert row["flops"] == 4 * 2 * 9 * 25 * 11
    assert row["bytes"] == 2 * 2 * (9 * 5 + 3 * 5) * 11 * 4
    assert row["flops_per_byte"] == row["flops"] / row["bytes"]
    assert row["tflops"] == pytest.approx(row["flops"] / 0.5 / 1e12, rel=1e-15)
    assert made_row("cudnn").document()["tflops"] is None


def test_by_hand_the_least_time_and_what_sets_it() -> None:
    ceiling = MachinePeak("float32", matmul_tflops=2.0, copy_gb_per_s=10.0)
    assert ceiling.floor_s(4 * 10**12, 5 * 10**9) == (2.0, "compute")
    assert ceiling.floor_s(10**12, 5 * 10**9) == (0.5, "compute")
    assert ceiling.floor_s(10**11, 5 * 10**9) == (0.5, "memory")


def test_the_better_of_two_measurements_is_taken_rate_by_rate() -> None:
    one, other = MachinePeak("float16", 2.0, 10.0), MachinePeak("float16", 1.0, 30.0)
    assert one.or_higher(other) == other.or_higher(one) == MachinePeak("float16", 2.0, 30.0)
    assert one.or_higher(one) == one


def test_a_row_under_a_ceiling_has_its_fraction_of_the_ceiling() -> None:
    bare = made_row("sdpa", [0.5], limit=None, share_of_peak=None)
    flops, moved = expected_flops("sdpa", SIZE), expected_moved_bytes("sdpa", SIZE)
    compute_bound = bare.under(MachinePeak("float32", matmul_tflops=flops / 1e11, copy_gb_per_s=1e12))
    assert (compute_bound.limit, compute_bound.share_of_peak) == ("compute", pytest.approx(0.2))
    memory_bound = bare.under(MachinePeak("float32", matmul_tflops=1e9, copy_gb_per_s=moved / 1e8))
    assert (memory_bound.limit, memory_bound.share_of_peak) == ("memory", pytest.approx(0.2))
    assert made_row("cudnn").under(CEILING) == made_row("cudnn")


def test_a_layer_s_projections_count_as_its_work() -> None:
    work = size(n_kv_heads=9)
    layer, kernel = made_row("torch-mha", [0.5], workload=work), made_row("sdpa", [0.5], workload=work)
    assert layer.flops - kernel.flops == 4 * 2 * (2 * 5) * 99 * 99
    assert layer.tflops == pytest.approx(layer.flops / 0.5e12)


def test_rows_of_two_runs_belong_together_where_backend_and_every_size_agree() -> None:
    row = made_row("sdpa", [0.5])
    assert row.key == made_row("sdpa", [0.25, 0.5], is_fastest=True).key
    others = [
        made_row("flash", [0.5]).key,
        *(
            made_row("sdpa", [0.5], workload=size(**{name: value})).key
            for name, value in {
                "batch": 3, "n_heads": 6, "n_kv_heads": 9, "d_head": 13, "q_len": 1, "k_len": 7, "dtype": "float64",
                "causal": True, "direction": "both",
            }.items()
        ),
    ]  # fmt: skip
    assert len({row.key, *others}) == 1 + len(others) == 11


def test_a_control_is_found_by_its_size() -> None:
    found = FULL.control(made_row("flash", workload=size(dtype="bfloat16")))
    assert found is FULL.controls[1]
    assert FULL.control(size(batch=77)) is None
    assert FULL.controls[0].interval == (1.0, 0.9, 1.1)


def test_a_row_without_times_has_no_intervals() -> None:
    assert (made_row("cudnn").interval, made_row("cudnn").ratio_interval, made_row("cudnn").tflops) == (None,) * 3
    assert made_row("sdpa", [1.0, 2.0, 4.0], ratio=0.5, ratio_low=0.25).ratio_interval == (0.5, 0.25, 1.0)
    assert made_row("sdpa", [1.0, 2.0, 4.0]).interval == (2.0, 1.0, 4.0)


def test_the_size_of_a_row_is_a_plain_workload() -> None:
    found = workload_of(made_row("sdpa", [1.0]))
    assert type(found) is Workload
    assert found == SIZE


def test_numbers_that_are_none_are_never_written() -> None:
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
            made_benchmark(made_row("sdpa", [1.0], max_error=wrong)).to_json()


@pytest.mark.parametrize(
    "content",
    ["", "{", "NaN", '{"schema":"mha.bench/1","schema":"mha.bench/1"}', "[" * 200_000],
    ids=["empty", "cut", "NaN", "twice", "deep"],
)
def test_what_is_not_json_is_refused(tmp_path: Path, content: str) -> None:
    message, hint = refusal(written(tmp_path, content))
    assert message.startswith("FILE is not a benchmark: it is ")
    assert "JSON" in message
    assert hint == "mha bench --save-baseline FILE writes one"


@pytest.mark.parametrize(
    ("document", "got"),
    [
        ([], "no schema"),
        ([{"schema": "mha.bench/1"}], "no schema"),
        (7, "no schema"),
        ({}, "no schema"),
        ({"schema": None}, "no schema"),
        ({"schema": "mha.record/1"}, "the schema 'mha.record/1'"),
        ({"schema": "mha.bench/2", "rows": []}, "the schema 'mha.bench/2'"),
        ({"schema": ["mha.bench/1"]}, "the schema ['mha.bench/1']"),
        ({"schema": "x" * 500}, "the schema '" + 79 * "x"),
    ],
    ids=str,
)
def test_what_is_no_benchmark_is_refused_by_its_schema(tmp_path: Path, document: Any, got: str) -> None:
    message = f"FILE is not a benchmark: it has {got}, not 'mha.bench/1'"
    assert refusal(written(tmp_path, document)) == (message, "mha bench --save-baseline FILE writes one")


def test_a_file_that_is_no_text_is_refused_in_the_same_form(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"\xff{}")
    message, hint = refusal(str(path))
    assert message == "FILE is not a benchmark: it is not UTF-8: byte 0 cannot be decoded"
    assert hint == "mha bench --save-baseline FILE writes one"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": ...}, "FILE.rows[0] "),
        (
            {"backend": ..., "status": ..., "predicted_bytes": ...},
            "FILE.rows[0] ",
        ),
        ({"median_s": -0.5}, "FILE: a time of rows[0] is not between 1e-12 and 1e+12 s: -0.5, 0.125, 0.5"),
        ({"median_s": 0}, "FILE: a time of rows[0] is not between 1e-12 and 1e+12 s: 0.0, 0.125, 0.5"),
        ({"median_s": None}, "FILE: a time of rows[0] is not between 1e-12 and 1e+12 s: None, 0.125, 0.5"),
        ({"median_s": ...}, "FILE: a time of rows[0] is not between 1e-12 and 1e+12 s: None, 0.125, 0.5"),
        ({"status": "fine"}, "FILE.rows[0].status "),
        ({"dtype": "int8"}, "FILE.rows[0].dtype "),
        ({"direction": 3}, "FILE.rows[0].direction "),
        ({"batch": 1.5}, "FILE.rows[0].batch "),
        ({"batch": True}, "FILE.rows[0].batch "),
        ({"q_len": 10**30}, "FILE.rows[0].q_len "),
        ({"median_s": 10**400}, "FILE.rows[0].median_s "),
        ({"samples_s": [0.5, "fast"]}, "FILE.rows[0].samples_s[1] "),
        ({"samples_s": 0.5}, "FILE.rows[0].samples_s "),
        ({"backend": ["sdpa"]}, "FILE.rows[0].backend "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_row_that_says_what_cannot_be_is_refused_by_its_place(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    told, hint = refusal(written(tmp_path, changed(change)))
    assert told.startswith(message)
    assert hint is None


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, word: str) -> None:
    text = FULL.to_json().replace('"median_s":0.25', f'"median_s":{word}')
    assert word in refusal(written(tmp_path, text))[0]


def test_a_number_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    text = FULL.to_json().replace('"median_s":0.25', '"median_s":1e999')
    assert refusal(written(tmp_path, text))[0].startswith("FILE.rows[0].median_s ")


@pytest.mark.parametrize("value", [0.0, -1.0, None, 1e-300, 1e300])
def test_the_ends_of_an_interval_must_be_times_too(tmp_path: Path, value: float | None) -> None:
    rule = "FILE: a time of rows[0] is not between 1e-12 and 1e+12 s:"
    assert refusal(written(tmp_path, changed({"median_low_s": value})))[0] == f"{rule} 0.25, {value}, 0.5"
    assert refusal(written(tmp_path, changed({"median_high_s": value})))[0] == f"{rule} 0.25, 0.125, {value}"


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e300])
def test_a_machine_without_a_rate_is_refused(tmp_path: Path, value: float) -> None:
    document = changed({})
    document["ceilings"][1]["matmul_tflops"] = value
    message = f"FILE: a rate of ceilings[1] is not between 1e-12 and 1e+12: {value}, 0.001"
    assert refusal(written(tmp_path, document)) == (message, None)


def test_a_hostile_file_that_is_read_can_be_compared_and_the_outcome_written(tmp_path: Path) -> None:
    document = changed({"median_s": 1e-12, "median_low_s": 1e-12, "median_high_s": 1e12, "samples_s": [], "batch": 2})
    document["ceilings"][0] |= {"matmul_tflops": 1e-12, "copy_gb_per_s": 1e12}
    hostile = read_benchmark(written(tmp_path, document))
    for one, other in ((FULL, hostile), (hostile, FULL)):
        json.dumps(compare(one, other, "then.json").document(), allow_nan=False)


def test_fields_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    document = changed({"from_the_future": [1, 2]}) | {"more": {}}
    assert read_benchmark(written(tmp_path, document)) == FULL


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    with pytest.raises(MhaError) as caught:
        read_benchmark(path)
    assert (caught.value.message, caught.value.code) == (f"{path} does not exist", "unreadable")


def test_a_row_that_did_not_run_needs_no_times(tmp_path: Path) -> None:
    kept: BenchRow = read_benchmark(written(tmp_path, FULL.to_json())).rows[2]
    assert (kept.status, kept.median_s, kept.samples_s) == ("unsupported", None, ())


# ---------------------------------------------------------------------------------------------------- the run in a sentence


LONG, SHORT = size(batch=1, q_len=1024, k_len=1024), size(batch=1, q_len=64, k_len=64)


def ranked(backend: str, ratio: float, *, workload: Workload = LONG, n: int = 6, **fields: Any) -> BenchRow:
    """A row whose ratio is known to 1 %."""
    bounds = {"ratio": ratio, "ratio_low": 0.99 * ratio, "ratio_high": 1.01 * ratio}
    return made_row(backend, [0.01 * ratio] * n, workload=workload, **bounds | fields)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "nothing could be timed"),
        ([made_row("cudnn")], "nothing could be timed"),
        ([ranked("flash", 1.0)], "flash takes 10 ms at 1,024 tokens; no other backend was timed"),
        (
            [ranked("explicit", 3.4), ranked("flash", 1.0), ranked("math", 5.0)],
            "flash is 3.40 × faster than explicit at 1,024 tokens, beyond noise (34 ms against 10 ms, 95 % interval 3.40 "
            "to 3.40 ×)",
        ),
        (
            [ranked("math", 1.04), ranked("efficient", 1.2), ranked("flash", 0.8)],
            "flash is 1.50 × faster than efficient at 1,024 tokens, beyond noise (12 ms against 8 ms, 95 % interval 1.50 to "
            "1.50 ×)",
        ),
        (
            [ranked("explicit", 1.01, is_similar=True), ranked("flash", 1.0)],
            "flash and explicit differ by no more than the noise at 1,024 tokens: ratio 1.01 (10.1 ms against 10 ms, 95 % "
            "interval 1.01 to 1.01 ×), noise up to 1.03 ×",
        ),
        (
            [ranked("explicit", 24.6, n=3, is_sure=False), ranked("flash", 1.0, n=3, is_sure=False)],
            "flash was 24.6 × faster than explicit at 1,024 tokens (246 ms against 10 ms), but that is not certain: it "
            "needs 6 rounds or more, and this run has 3",
        ),
        (
            [ranked("explicit", 2.0, is_sure=False), ranked("flash", 1.0, is_sure=False)],
            "flash was 2.00 × faster than explicit at 1,024 tokens, beyond noise (20 ms against 10 ms, 95 % interval 2.00 to "
            "2.00 "
            "×); the times are uncertain: the machine was busy, other processes used 1.2 of its CPUs",
        ),
        (
            [ranked("explicit", 9.0, workload=SHORT), ranked("flash", 1.0, workload=SHORT), ranked("flash", 1.0)],
            "flash is 9.00 × faster than explicit at 64 tokens, beyond noise (90 ms against 10 ms, 95 % interval 9.00 to 9.00 ×)",
        ),
    ],
)
def test_a_run_in_a_sentence(rows: list[BenchRow], sentence: str) -> None:
    control = replace(made_control(0.98, 1.03, workload=LONG), foreign_load=1.24)
    run = made_benchmark(*rows, controls=[control])
    assert run.summary == (sentence,)
    assert run.to_dict()["summary"] == [sentence]


def test_by_hand_the_ratio_of_two_backends_is_that_of_their_medians_with_the_interval_of_their_rounds() -> None:
    fast, slow = [0.1, 0.2, 0.4, 0.1, 0.2, 0.4], [0.3, 0.4, 1.0, 0.3, 0.52, 1.6]  # round by round 3, 2, 2.5, 3, 2.6, 4
    rows = [
        made_row(name, times, workload=LONG, ratio=r) for name, times, r in (("math", slow, 1.4), ("sdpa", fast, 0.5))
    ]
    (sentence,) = made_benchmark(*rows).summary
    assert "sdpa is 2.30 ×" in sentence  # 460 / 200
    assert "(460 ms against 200 ms, 95 % interval 2.00 to 4.00 ×)" in sentence


@pytest.mark.parametrize(
    ("low", "high", "noise"),
    [(0.29, 1.12, 1 / 0.29), (0.9, 1.5, 1.5), (1.1, 1.3, 1.3), (0.5, 0.8, 2.0), (1.0, 1.0, 1.0)],
)
def test_by_hand_noise_is_the_whole_interval_whichever_timing_was_slower(low: float, high: float, noise: float) -> None:
    control = made_control(low, high)
    assert control.noise == pytest.approx(noise)
    run = made_benchmark(ranked("explicit", 1.0), controls=[control])
    assert run.to_dict()["controls"][0]["noise"] == control.noise


@pytest.mark.parametrize(
    ("noise", "sentence"),
    [
        (
            1.5,
            "sdpa is 2.70 × faster than math at 1,024 tokens, beyond noise (27 ms against 10 ms, 95 % interval 2.00 to 4.00 ×)",
        ),
        (
            2.5,
            "sdpa was 2.70 × faster than math at 1,024 tokens (27 ms against 10 ms, 95 % interval 2.00 to 4.00 ×), but that is "
            "not certain: the interval reaches into the noise, which goes up to 2.50 ×",
        ),
        (
            3.0,
            "sdpa and math differ by no more than the noise at 1,024 tokens: ratio 2.70 (27 ms against 10 ms, 95 % interval 2.00 "
            "to 4.00 ×), noise up to 3.00 ×",
        ),
    ],
)
def test_by_hand_ratio_interval_and_noise_decide_the_sentence(noise: float, sentence: str) -> None:
    slow = [0.02, 0.02, 0.026, 0.028, 0.04, 0.04]
    rows = [made_row("math", slow, workload=LONG), made_row("sdpa", [0.01] * 6, workload=LONG)]
    assert made_benchmark(*rows, controls=[made_control(1 / noise, 1.01, workload=LONG)]).summary == (sentence,)


def test_each_family_of_sizes_has_a_sentence_under_its_name() -> None:
    causal = replace(LONG, causal=True)
    rows = [ranked("explicit", 2.0), ranked("sdpa", 1.0), ranked("sdpa", 1.0, workload=causal)]
    first, second = made_benchmark(*rows).summary
    assert first.startswith(f"{LONG.family}: sdpa is 2.00 × faster")
    assert second.startswith(f"{causal.family}: sdpa takes 10 ms")
