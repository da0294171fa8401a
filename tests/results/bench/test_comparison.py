"""A benchmark against an earlier one: ratios by hand, noise, missing rows, and warnings."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.benchmarks_made import CEILING, SIZE, made_benchmark, made_control, made_row, size

from mhacli.errors import EXIT_USAGE, UsageError
from mhacli.results.bench.comparison import TimeChange, compare, parse_rule, too_slow
from mhacli.results.bench.result import MachinePeak

seconds = st.floats(1e-6, 1e3)
triples = st.tuples(seconds, seconds, seconds)


def only_change(now: Any, then: Any) -> TimeChange:
    (change,) = compare(now, then, "then.json").changes
    return change


def timed(*times_s: float, controls: Any = ()) -> Any:
    return made_benchmark(made_row("sdpa", times_s), controls=controls)


def test_by_hand_the_ratio_and_its_interval() -> None:
    change = only_change(timed(2.0, 3.0, 5.0), timed(1.0, 1.5, 2.0))
    assert (change.baseline_s, change.median_s) == (1.5, 3.0)
    assert (change.ratio, change.ratio_low, change.ratio_high) == (2.0, 2.0 / 2.0, 5.0 / 1.0)
    assert change.backend == "sdpa"
    assert asdict(change).items() >= asdict(SIZE).items()


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ((1.2, 1.25, 1.3), "slower"),
        ((0.5, 0.55, 0.6), "faster"),
        ((0.9, 1.25, 1.5), "similar"),
        ((0.99, 1.0, 1.01), "similar"),
        ((1.0, 1.25, 1.5), "similar"),  # it touches 1
    ],
)
def test_without_controls_only_a_ratio_of_exactly_one_is_noise(now: tuple[float, ...], verdict: str) -> None:
    assert only_change(timed(*now), timed(1.0)).verdict == verdict


@pytest.mark.parametrize("is_now", [True, False], ids=["noise now", "noise then"])
@pytest.mark.parametrize(
    ("low", "high", "ratio", "verdict"),
    [
        (0.9, 1.05, 1.2, "slower"),
        (0.8, 1.1, 1.2, "similar"),  # 1 / 0.8 = 1.25: which of the two timings was slower is chance
        (0.8, 1.25, 1.2, "similar"),
        (0.8, 1.1, 0.85, "similar"),
        (0.9, 1.1, 0.85, "faster"),
        (1.05, 1.3, 1.2, "similar"),
        (1.1, 1.3, 1.05, "similar"),  # from 1 on
        (0.7, 0.9, 1.05, "similar"),
        (0.97, 0.99, 1.05, "slower"),
    ],
)
def test_a_change_is_noise_where_a_control_of_either_run_was_as_far_from_one(
    is_now: bool, low: float, high: float, ratio: float, verdict: str
) -> None:
    noisy = [made_control(low, high)]
    now, then = timed(ratio, controls=noisy if is_now else ()), timed(1.0, controls=() if is_now else noisy)
    assert only_change(now, then).verdict == verdict


def test_the_controls_of_both_runs_count_and_those_of_other_sizes_do_not() -> None:
    now, then = timed(1.2, controls=[made_control(0.9, 1.1)]), timed(1.0, controls=[made_control(0.99, 1.25)])
    assert only_change(now, then).verdict == "similar"
    elsewhere = timed(1.2, controls=[made_control(0.1, 9.0, workload=size(batch=77))])
    assert only_change(elsewhere, timed(1.0)).verdict == "slower"


@given(triples, triples)
def test_turning_the_comparison_round_turns_ratio_and_verdict_round(
    ours: tuple[float, ...], theirs: tuple[float, ...]
) -> None:
    there, back = only_change(timed(*ours), timed(*theirs)), only_change(timed(*theirs), timed(*ours))
    assert there.ratio_low <= there.ratio <= there.ratio_high
    assert there.ratio * back.ratio == pytest.approx(1)
    assert there.ratio_low * back.ratio_high == pytest.approx(1)
    opposite = {"slower": "faster", "faster": "slower", "similar": "similar"}
    touches_one = min(abs(there.ratio_low - 1), abs(there.ratio_high - 1)) < 1e-9
    assert touches_one or back.verdict == opposite[there.verdict]


def test_a_run_beside_itself_has_changed_nowhere() -> None:
    run = made_benchmark(made_row("sdpa", [1.0, 2.0, 3.0] * 2), made_row("explicit", [5.0] * 6), made_row("cudnn"))
    found = compare(run, run, "then.json")
    assert [change.verdict for change in found.changes] == ["similar", "similar"]
    assert (found.broken, found.unmatched, found.warnings) == ((), (), ())
    assert found.baseline == "then.json"


def test_rows_are_matched_by_what_they_measured_not_by_where_they_stand() -> None:
    now = made_benchmark(made_row("sdpa", [2.0]), made_row("flash", [3.0]))
    then = made_benchmark(made_row("flash", [1.0]), made_row("sdpa", [1.0]))
    found = compare(now, then, "then.json")
    assert [(change.backend, change.ratio) for change in found.changes] == [("sdpa", 2.0), ("flash", 3.0)]


def test_a_row_that_ran_and_runs_no_more_is_broken() -> None:
    now = made_benchmark(made_row("sdpa", status="failed", reason="it fell over"))
    found = compare(now, timed(1.0), "then.json")
    assert found.broken == (
        "sdpa, batch 2, 5 × 5 tokens, 9/3 heads × 11, float32, full, forward: failed now (it fell over)",
    )  # fmt: skip
    assert (found.changes, found.unmatched) == ((), ())


def test_a_row_that_ran_in_neither_run_or_only_now_is_not_told() -> None:
    bare = made_benchmark(made_row("sdpa"))
    assert compare(bare, bare, "a") == compare(timed(*6 * [1.0]), bare, "a")
    assert compare(bare, bare, "a").broken == ()


def test_rows_of_one_run_alone_are_named_with_the_run_that_lacks_them() -> None:
    work = size(n_kv_heads=9, k_len=7, causal=True, direction="both", dtype="bfloat16")
    now, then = made_benchmark(made_row("flash", [1.0], workload=work)), made_benchmark(made_row("cudnn"))
    assert compare(now, then, "then.json").unmatched == (
        "flash, batch 2, 5 × 7 tokens, 9 heads × 11, bfloat16, causal, both: not in then.json",
        "cudnn, batch 2, 5 × 5 tokens, 9/3 heads × 11, float32, full, forward: not measured now",
    )


@pytest.mark.parametrize(("now", "then", "fewest"), [(5, 6, 5), (6, 3, 3), (1, 4, 1), (6, 6, None)])
def test_rounds_too_few_for_intervals_are_reported(now: int, then: int, fewest: int | None) -> None:
    found = compare(timed(*now * [1.0]), timed(*then * [1.0]), "then.json").warnings
    told = f"intervals of 95 % need more than {fewest} rounds: these are the whole range"
    assert found == (() if fewest is None else (told,))


def test_inputs_of_another_seed_are_reported() -> None:
    found = compare(replace(made_benchmark(), seed=3), made_benchmark(), "then.json").warnings
    assert found == ("seed differs: 0 then, 3 now",)


def test_every_difference_of_the_machines_is_reported() -> None:
    differing = {
        "device_name": "Other", "cpu_name": "Third", "n_cpus": 8, "threads": 2, "driver": "1.2", "torch": "9", "python": "4",
        "platform": "BeOS", "mha": "0.2.0",
    }  # fmt: skip
    found = compare(made_benchmark(environment=differing), made_benchmark(), "then.json").warnings
    assert found == (
        "device_name differs: Some CPU then, Other now",
        "cpu_name differs: Some CPU then, Third now",
        "n_cpus differs: 7 then, 8 now",
        "threads differs: 3 then, 2 now",
        "driver differs: None then, 1.2 now",
        "torch differs: 2.9.1 then, 9 now",
        "python differs: 3.12.1 then, 4 now",
        "platform differs: Linux x86_64 then, BeOS now",
        "mha differs: 0.1.0 then, 0.2.0 now",
    )
    unlike = {"load_average": 7.0, "numpy": "1.0", "device_asked": "cpu"}
    assert compare(made_benchmark(environment=unlike), made_benchmark(), "then.json").warnings == ()


BUSIER_NOW = "the machine is busier now, or it is a different machine"
BUSIER_THEN = "the machine was busier then, or it is a different machine; measure the baseline again"


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        ((1.0, 1.0), []),
        ((1.09, 0.92), []),
        (
            (0.5, 1.0),
            [f"the machine's own float32 matrix product runs 0.50 times as fast as in the baseline: {BUSIER_NOW}"],
        ),
        ((1.0, 3.0), [f"the machine's own float32 copy runs 3.00 times as fast as in the baseline: {BUSIER_THEN}"]),
        (
            (1.11, 0.9),
            [
                f"the machine's own float32 matrix product runs 1.11 times as fast as in the baseline: {BUSIER_THEN}",
                f"the machine's own float32 copy runs 0.90 times as fast as in the baseline: {BUSIER_NOW}",
            ],
        ),
    ],
)
def test_a_machine_of_another_speed_is_reported(factors: tuple[float, float], told: list[str]) -> None:
    matmul, copy = factors
    now = MachinePeak("float32", CEILING.matmul_tflops * matmul, CEILING.copy_gb_per_s * copy)
    ceilings = [now, MachinePeak("float64", 1.0, 1.0)]
    found = compare(made_benchmark(ceilings=ceilings), made_benchmark(), "then.json").warnings
    assert list(found) == told


@pytest.mark.parametrize(
    ("word", "ratio"),
    [("slower:1.10", 1.1), ("slower:2", 2.0), (" slower:0.95 ", 0.95), ("slower:999999.999999999", 999999.999999999)],
)
def test_a_rule_is_read_as_its_ratio(word: str, ratio: float) -> None:
    assert parse_rule(word) == ratio


@pytest.mark.parametrize(
    "word",
    ["", "slower", "slower:", "slower:0", "slower:0.0", "slower:-1", "slower:1.", "slower:1e3", "slower:nan", "faster:2",
     "SLOWER:2", "slower: 2", "slower:1,1", "slower:1234567", "slower:10%", "slower:１", "slower:2\n3"],
)  # fmt: skip
def test_a_rule_of_another_form_is_refused_with_the_form(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rule(word)
    assert caught.value.exit_code == EXIT_USAGE


def test_of_a_long_rule_only_the_beginning_is_shown() -> None:
    with pytest.raises(UsageError) as caught:
        parse_rule("x" * 100)
    assert caught.value.message == f"--fail-if {'x' * 40!r} is no rule: it takes slower:RATIO, such as slower:1.10"


def test_too_slow_is_what_lies_above_the_ratio_with_its_whole_interval() -> None:
    now = made_benchmark(
        made_row("sdpa", [1.2, 1.3, 1.4]), made_row("math", [1.1, 1.5, 2.0]), made_row("flash", [0.9, 1.0, 1.1])
    )
    then = made_benchmark(*(made_row(name, [1.0]) for name in ("sdpa", "math", "flash")))
    found = compare(now, then, "then.json")
    assert [change.backend for change in too_slow(found, 1.1)] == ["sdpa"]
    assert [change.backend for change in too_slow(found, 1.05)] == ["sdpa", "math"]
    assert [change.backend for change in too_slow(found, 0.5)] == ["sdpa", "math", "flash"]
    assert too_slow(found, 1.2) == ()


def test_a_comparison_is_json() -> None:
    now = made_benchmark(made_row("sdpa", [2.0]), made_row("flash", [2.0]), environment={"threads": 5})
    document = compare(now, timed(1.0), "then.json").document()
    assert json.loads(json.dumps(document))["changes"][0]["verdict"] == "slower"
    assert set(document) == {"baseline", "changes", "broken", "unmatched", "warnings", "rule", "summary"}


def test_a_baseline_whose_median_alone_was_changed_is_compared_by_that_median() -> None:
    now = timed(*(1.0,) * 8)
    then = replace(now, rows=(replace(now.rows[0], median_s=0.1),))
    change = only_change(now, then)
    assert (change.ratio, change.ratio_low, change.ratio_high) == pytest.approx((10.0, 10.0, 10.0))
    assert change.verdict == "slower"


@pytest.mark.parametrize(
    ("matmul", "copy", "verdict"),
    [(1.0, 1.0, "slower"), (0.8, 1.0, "similar"), (1.0, 0.8, "similar"), (1.25, 1.0, "slower")],
)
def test_a_change_is_noise_where_the_machine_itself_has_slowed_as_much(
    matmul: float, copy: float, verdict: str
) -> None:
    def at(time_s: float, matmul: float, copy: float) -> Any:
        rates = replace(CEILING, matmul_tflops=matmul, copy_gb_per_s=copy)
        return made_benchmark(made_row("sdpa", (time_s,)), ceilings=(rates,))

    assert only_change(at(1.2, matmul, copy), at(1.0, 1.0, 1.0)).verdict == verdict


def test_what_is_noise_is_not_too_slow_unless_faster_is_requested() -> None:
    noisy = compare(timed(1.3, controls=[made_control(0.7, 1.4)]), timed(1.0), "then.json")
    assert too_slow(noisy, 1.2) == ()
    assert len(too_slow(noisy, 0.9)) == 1


def test_the_milder_of_two_measurements_counts() -> None:
    then = timed(1.0)
    first, second = (compare(timed(time_s), then, "then.json") for time_s in (1.5, 1.1))
    assert [change.ratio for change in first.milder(second).changes] == [1.1]
    assert [change.ratio for change in second.milder(first).changes] == [1.1]
    assert first.milder(replace(second, changes=())).changes == first.changes


# ------------------------------------------------------------------------------------------------------------ what a rule says


@pytest.mark.parametrize(
    ("now", "limit", "outcome"),
    [
        ((0.9, 1.0, 1.1), 1.2, "passed"),
        ((1.3, 1.4, 1.5), 1.2, "slower"),
        ((0.14, 0.8, 4.82), 1.2, "inconclusive"),
        ((1.1, 1.15, 1.3), 1.2, "inconclusive"),
        ((1.3, 1.4, 1.5), 1.4, "inconclusive"),
        ((0.5, 0.6, 0.95), 0.9, "inconclusive"),
    ],
)
def test_a_rule_passes_only_where_no_interval_reaches_above_it(
    now: tuple[float, ...], limit: float, outcome: str
) -> None:
    rule = compare(timed(*now), timed(1.0), "then.json").ruled(limit).rule
    assert rule is not None
    assert (rule.limit, rule.outcome) == (limit, outcome)
    assert bool(rule.undecided) == (outcome == "inconclusive")


def test_a_rule_says_nothing_where_nothing_is_compared() -> None:
    now, then = made_benchmark(made_row("sdpa", [1.0])), made_benchmark(made_row("math", [1.0]))
    assert compare(now, then, "then.json").ruled(1.2).rule is None


def test_by_hand_what_a_wide_interval_could_have_shown() -> None:
    rule = compare(timed(0.14, 0.8, 4.82), timed(1.0), "then.json").ruled(1.2).rule
    assert rule is not None
    (row,) = rule.undecided
    assert (row.backend, row.ratio, row.ratio_low, row.ratio_high) == ("sdpa", 0.8, 0.14, 4.82)
    assert row.shows_from == pytest.approx(1.2 * 0.8 / 0.14)


@given(triples, st.floats(0.5, 3), st.floats(1, 2))
def test_a_run_slowed_by_more_than_could_be_shown_is_shown_to_be_slower_and_by_less_is_not(
    times: tuple[float, float, float], limit: float, noise: float
) -> None:
    def at(factor: float) -> Any:
        now = timed(*(factor * time for time in times), controls=[made_control(1 / noise, noise)])
        return compare(now, timed(1.0), "then.json")

    (change,) = at(1.0).changes
    needed = change.shows_from(limit) / change.ratio  # a run that is so much slower than this one
    assert len(too_slow(at(1.001 * needed), limit)) == 1
    assert not too_slow(at(0.999 * needed), limit)


def test_a_row_that_does_not_run_any_more_breaks_the_rule() -> None:
    now = made_benchmark(made_row("sdpa", [1.0]), made_row("flash"))
    then = made_benchmark(made_row("sdpa", [1.0]), made_row("flash", [1.0]))
    rule = compare(now, then, "then.json").ruled(1.2).rule
    assert rule is not None
    assert (rule.outcome, rule.undecided) == ("slower", ())


NAME = "batch 2, 5 × 5 tokens, 9/3 heads × 11, float32, full, forward"


@pytest.mark.parametrize(
    ("now", "limit", "sentence"),
    [
        ((0.9, 1.0, 1.1), 1.2, "passed: none of 1 timing is more than 1.2 × that in then.json"),
        (
            (1.3, 1.4, 1.5),
            1.2,
            "slower: 1 of 1 timing is more than 1.2 × that in then.json, beyond noise; the largest ratio is 1.40 (1.30 to 1.50) "
            f"for sdpa, {NAME}",
        ),
        (
            (1.0, 1.1, 1.3),
            1.2,
            "inconclusive: 1 of 1 timing may be more than 1.2 × that in then.json, none certainly is; widest: 1.10 (1.00 to "
            f"1.30) for sdpa, {NAME}, which would show a slowdown of 32 % or more; a quieter machine or more rounds (--repeat, "
            "--budget) narrow it",
        ),
    ],
)
def test_a_rule_in_a_sentence(now: tuple[float, ...], limit: float, sentence: str) -> None:
    found = compare(timed(*now), timed(1.0), "then.json").ruled(limit)
    assert found.summary == found.document()["summary"] == sentence


def test_a_slowdown_of_twice_the_time_or_more_is_a_factor() -> None:
    sentence = compare(timed(0.14, 0.8, 4.82), timed(1.0), "then.json").ruled(1.2).summary
    assert f"which would show a slowdown of {1.2 * 0.8 / 0.14:.3g} × or more;" in sentence


def test_an_interval_that_shows_nothing_below_ten_times_the_time_is_too_wide() -> None:
    sentence = compare(timed(0.04, 1.66, 2.97), timed(1.0), "then.json").ruled(1.1).summary
    assert "too wide an interval for any conclusion" in sentence
    assert "would show" not in sentence


def test_an_interval_above_the_limit_that_decides_nothing_says_which_noise_is_as_large() -> None:
    now = timed(1.36, 1.8, 2.8, controls=[made_control(0.9, 1.5)])
    found = compare(now, timed(1.0), "then.json").ruled(1.1)
    assert found.rule is not None
    assert found.rule.outcome == "inconclusive"
    assert "1 lies wholly above the limit, but within the noise: " in found.summary
    assert "differed by up to 1.5 ×" in found.summary


@pytest.mark.parametrize(
    ("now", "then", "sentence"),
    [
        ({"sdpa": 1.0}, {"math": 1.0}, "no row of then.json was measured now"),
        ({"sdpa": 1.0}, {"sdpa": 1.0}, "of 1 timing, none is slower or faster than in then.json, beyond noise"),
        (
            {"sdpa": 2.0, "math": 1.5, "flash": 0.5, "explicit": 1.0},
            {"sdpa": 1.0, "math": 1.0, "flash": 1.0, "explicit": 1.0},
            "of 4 timings, 2 are slower and 1 is faster than in then.json, beyond noise; the largest ratio is 2.00 (2.00 to "
            f"2.00) for sdpa, {NAME}",
        ),
        (
            {"sdpa": None, "math": None},
            {"sdpa": 1.0, "math": 1.0},
            "2 rows with a time in then.json could not run now",
        ),
    ],
)
def test_changes_in_a_sentence(now: dict[str, float | None], then: dict[str, float | None], sentence: str) -> None:
    runs = [made_benchmark(*(made_row(name, [s] if s else []) for name, s in run.items())) for run in (now, then)]
    assert compare(*runs, "then.json").summary == sentence
