"""The kept arrays and the memory of a run, predicted before any tensor exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from mhacli.errors import MhaError, UsageError
from mhacli.requests.memory import (
    BASE_BYTES,
    CheckpointFacts,
    EffectFacts,
    array_bytes,
    cpu_tile_bytes,
    make_plan,
    plan_memory,
    rows_that_fit,
)
from mhacli.spec.config import DEFAULT_KEEP_LIMIT, Config
from mhacli.spec.facts import Facts
from mhacli.spec.reduction import device_bytes
from mhacli.spec.sites import SITES

MIB = 1 << 20
CHOICES = {"d_model": 10, "n_heads": 9, "n_kv_heads": 3, "d_head": 5, "d_v": 2}


def facts(batch=2, q_len=7, k_len=11, cross=True, **choices):
    return Facts(Config(**{**CHOICES, **choices}).resolved(), batch, q_len, k_len, cross)


@pytest.mark.parametrize(("dtype", "item"), [("float64", 8), ("float32", 4), ("bfloat16", 4), ("float16", 4)])
def test_by_hand_the_bytes_of_arrays_as_the_record_holds_them(dtype, item):
    found = {site: array_bytes(facts(dtype=dtype), site) for site in ("pattern", "z", "out", "k", "x")}
    assert found == {
        "pattern": 2 * 9 * 7 * 11 * item,
        "z": 2 * 9 * 7 * 2 * item,
        "out": 2 * 7 * 10 * item,
        "k": 2 * 3 * 11 * 5 * item,
        "x": 2 * 7 * 10 * item,
    }


def test_by_default_the_most_wanted_arrays_are_kept_while_they_fit():
    pattern, out, z = 2 * 9 * 7 * 11 * 4, 2 * 7 * 10 * 4, 2 * 9 * 7 * 2 * 4

    def choice(limit):
        plan = make_plan(facts(), None, limit)
        return plan.keep, plan.not_kept

    assert choice(1 << 40) == (("pattern", "out", "z", "scores", "qk"), ())
    assert choice(3 * pattern + out + z) == (("pattern", "out", "z", "scores", "qk"), ())
    assert choice(3 * pattern + out + z - 1) == (("pattern", "out", "z", "scores"), ("qk",))
    assert choice(pattern + out + z) == (("pattern", "out", "z"), ("scores", "qk"))
    assert choice(pattern - 1) == (("out", "z"), ("pattern", "scores", "qk"))
    assert choice(0) == ((), ("pattern", "out", "z", "scores", "qk"))


def test_training_keeps_what_dropout_left_as_well():
    plan = make_plan(facts(train=True, dropout=0.1), None)
    assert plan.keep == ("pattern", "out", "z", "scores", "qk", "dropped")


def test_more_arrays_than_the_usual_are_kept_while_they_fit_and_none_beside_those_that_were_requested():
    usual = make_plan(facts(), None).keep
    assert make_plan(facts(), None, also=("v",)).keep == (*usual, "v")
    assert make_plan(facts(), None, 0, also=("v",)).not_kept == (*usual, "v")
    assert make_plan(facts(), ("z",), also=("v",)).keep == ("z",)


def test_what_was_requested_is_kept_once_and_nothing_else():
    plan = make_plan(facts(), ("z", "q_proj", "z"))
    assert (plan.keep, plan.not_kept) == (("z", "q_proj"), ())
    assert make_plan(facts(), ()).keep == ()


def test_a_name_that_is_no_site_is_refused_with_those_that_are():
    with pytest.raises(UsageError) as caught:
        make_plan(facts(), ("pattern", "attn"))
    assert caught.value.message == "--keep: 'attn' is not a site"
    assert caught.value.hint == "sites: " + " ".join(SITES)


def test_arrays_that_do_not_fit_the_limit_are_refused_with_the_number_that_would_do():
    long = facts(batch=1, q_len=1024, k_len=1024, cross=False)  # 9 · 4 MiB each
    with pytest.raises(MhaError) as caught:
        make_plan(long, ("qk", "pattern"), 40 * MIB)
    assert caught.value.message == "--keep qk,pattern takes 72.0 MiB, above the limit of 40.0 MiB"
    assert caught.value.hint == "--keep-limit 72M raises the limit; --keep pattern takes less"
    assert (caught.value.code, caught.value.exit_code) == ("too-large", 1)
    assert make_plan(long, ("qk", "pattern"), 72 * MIB).keep == ("qk", "pattern")


def test_the_prediction_grows_by_what_is_kept():
    nothing, some = make_plan(facts(), ()), make_plan(facts(), ("pattern", "z"))
    assert nothing.peak_bytes > BASE_BYTES
    assert some.peak_bytes - nothing.peak_bytes == 2 * 9 * 7 * 11 * 4 + 2 * 9 * 7 * 2 * 4


def test_a_run_that_fits_passes_without_a_word():
    plan = make_plan(facts(), None)
    assert plan_memory(facts(), None, DEFAULT_KEEP_LIMIT, available=plan.peak_bytes * 5 // 4 + 1) == plan


def test_too_little_memory_is_refused_with_both_numbers_and_alternatives():
    large = facts(batch=1, q_len=20_000, k_len=20_000, cross=False)
    with pytest.raises(MhaError) as caught:
        plan_memory(large, (), 0, available=16 * 1024 * MIB)
    needed = make_plan(large, ()).peak_bytes / 1024**3
    assert caught.value.message == (
        f"out of memory; 20000 × 20000 tokens, 9 heads, batch 1: {needed:.1f} GiB needed, 16.0 GiB available"
    )
    assert re.fullmatch(r"--max-tokens \d+ fits, so does --heads \d+", caught.value.hint)
    assert (caught.value.code, caught.value.exit_code) == ("out-of-memory", 1)


def ways_out(of, keep, limit, available):
    """The numbers of tokens and heads that would fit by the error message."""
    with pytest.raises(MhaError) as caught:
        plan_memory(of, keep, limit, available)
    found = [re.search(pattern, caught.value.hint) for pattern in (r"--max-tokens (\d+)", r"--heads (\d+)")]
    return [match and int(match[1]) for match in found]


def test_removals_of_which_not_one_fits_are_refused_with_both_numbers_and_a_length_that_does():
    one = CheckpointFacts(1, 500, 64, 256, 4, 4, holds_matrices=True, kept_matrices=0, keep_limit=0)
    wide, narrow = EffectFacts(one, 2, 50_000, 500), EffectFacts(one, 2, 50_000, 1)
    logits = 4 * 499 * 50_000  # float32, of all positions but one
    assert wide.peak_bytes(3) - narrow.peak_bytes(3) == 3 * logits
    with pytest.raises(MhaError) as caught:
        rows_that_fit(wide, 8, 200 * MIB)
    needed = wide.peak_bytes(3) / MIB
    assert caught.value.message == (
        f"out of memory; 3 copies of 500 tokens, 4 heads, 50000 logits: {needed:.1f} MiB needed, 200.0 MiB available"
    )
    longest = int(re.fullmatch(r"--max-tokens (\d+) fits", caught.value.hint)[1])
    fits = {n: EffectFacts(replace(one, length=n), 2, 50_000, n) for n in (longest, longest + 1)}
    assert rows_that_fit(fits[longest], 8, 200 * MIB) >= 3
    with pytest.raises(MhaError):
        rows_that_fit(fits[longest + 1], 8, 200 * MIB)
    assert rows_that_fit(narrow, 8, 1 << 40) == 8


def test_rows_that_go_on_from_a_cache_take_the_memory_of_their_own_tokens_and_of_copies_of_keys_and_values():
    one = CheckpointFacts(1, 500, 64, 256, 4, 4, holds_matrices=True, kept_matrices=0, keep_limit=0)
    whole, last = EffectFacts(one, 2, 100, 1), EffectFacts(one, 2, 100, 1, n_run=1)
    copies = 2 * 500 * 64 * 4
    assert last.peak_bytes(3) < whole.peak_bytes(3)
    assert last.peak_bytes(1) - whole.peak_bytes(1) == 2 * copies, "both run the whole text once, and one keeps a cache"
    of_row = replace(one, batch=5000).peak_bytes() / 500 / 5000 + copies
    assert (last.peak_bytes(5000) - last.peak_bytes(4000)) / 1000 == pytest.approx(of_row + 100 * 36, rel=0.01)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_reduction_on_a_gpu_takes_tiles_or_the_sums_of_the_kernel(has_bias):
    asked = {"batch": 1, "n_heads": 12, "has_bias": has_bias}
    tile = 4 * (512 * 8192 + 3 * 512 * (512 + 8192 + 1))  # log2 p; p and two planes of equal cells among zeros
    masks = 2 * 4 * 512 * 8192
    added = 3 * (256 << 20) if has_bias else 0
    assert device_bytes(n_queries=2048, n_keys=8192, **asked) >= tile + masks + added
    long = device_bytes(n_queries=1 << 17, n_keys=1 << 17, **asked)
    assert 1 << 30 < long < 1.3 * (1 << 30) + masks + added
    assert device_bytes(n_queries=100, n_keys=100, **asked) < 80 * MIB
    eight_times = device_bytes(n_queries=1 << 20, n_keys=1 << 20, **asked)
    assert eight_times < 2.5 * long


def test_what_a_checkpoint_takes_on_a_gpu_is_more_than_on_a_cpu():
    one = CheckpointFacts(1, 20_000, 64, 256, 4, 2, holds_matrices=False, kept_matrices=0, keep_limit=0)
    more = replace(one, on_gpu=True).peak_bytes() - one.peak_bytes()
    n = {"n_queries": 20_000, "n_keys": 20_000}
    assert more == device_bytes(batch=1, n_heads=4, has_bias=True, **n) - cpu_tile_bytes(4, 20_000, 20_000)


LIMITS = [(None, DEFAULT_KEEP_LIMIT), (None, 1 << 50), (("pattern",), 1 << 50), ((), 0)]


@pytest.mark.parametrize("available", [1 << 30, 4 << 30, 16 << 30])
@pytest.mark.parametrize(("keep", "limit"), LIMITS)
@pytest.mark.parametrize("lengths", [(30_000, 30_000), (2_000_000, 500), (500, 2_000_000)])
def test_the_number_of_tokens_that_is_reported_to_fit_does_fit(available, keep, limit, lengths):
    large = facts(1, *lengths, d_model=64, n_heads=16, n_kv_heads=16)
    n_tokens, _ = ways_out(large, keep, limit, available)
    shorter = facts(1, *(min(n_tokens, length) for length in lengths), d_model=64, n_heads=16, n_kv_heads=16)
    plan_memory(shorter, keep, limit, available)


@pytest.mark.parametrize("available", [1 << 30, 4 << 30, 16 << 30])
def test_the_number_of_tokens_that_is_reported_to_fit_is_not_far_below_what_does(available):
    large = facts(1, 30_000, 30_000, d_model=64, n_heads=16, n_kv_heads=16)
    n_tokens, _ = ways_out(large, (), 0, available)
    longer = facts(1, int(1.05 * n_tokens), int(1.05 * n_tokens), d_model=64, n_heads=16, n_kv_heads=16)
    with pytest.raises(MhaError):
        plan_memory(longer, (), 0, available)


@pytest.mark.parametrize("length", [2000, 6000, 9000, 20_000])
@pytest.mark.parametrize(("keep", "limit"), LIMITS)
def test_the_number_of_heads_that_is_reported_to_fit_does_fit_and_divides_the_width(keep, limit, length):
    available = 4 << 30
    _, n_heads = ways_out(Facts(Config(n_heads=64).resolved(), 1, length, length), keep, limit, available)
    if n_heads is not None:
        fewer = Facts(Config(n_heads=n_heads).resolved(), 1, length, length)
        plan_memory(fewer, keep, limit, available)


def test_where_nothing_fits_a_shorter_text_is_all_that_can_be_advised():
    single = facts(batch=1, q_len=9, k_len=9, cross=False, n_heads=1, n_kv_heads=1)
    with pytest.raises(MhaError) as caught:
        plan_memory(single, None, DEFAULT_KEEP_LIMIT, available=BASE_BYTES)
    assert caught.value.hint == "a shorter text or a smaller --d-model needs less"


MEASURED = r"""
import json, re, sys
from mhacli.spec.config import Config
from mhacli.requests.memory import make_plan
from mhacli.compute.layer.run import RecordingOptions, inspect
from mhacli.text.encode import encode
from mhacli.requests.layer import facts_of

choices = json.loads(sys.argv[1])
texts = [] if "random" in choices else ["word " * 1600, "word " * 1500]
config = Config(**{"d_model": 64, "n_heads": 4, "device": "cpu", **choices}).resolved()
encoded = encode(texts[: 2 if "padding" in choices else 1], config)
inspect(encoded, config, options=RecordingOptions(repeat=1))
peak = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
print(json.dumps([peak, make_plan(facts_of(encoded, config), None).peak_bytes]))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads the high-water mark from /proc, which is this process's own")
@pytest.mark.parametrize(
    "choices",
    [
        {"dtype": "float32"},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param({"dtype": "float64", "positions": "alibi"}, marks=pytest.mark.full),
        pytest.param({"dtype": "bfloat16", "positions": "rope", "padding": "left"}, marks=pytest.mark.full),
        pytest.param({"dtype": "bfloat16", "padding": "left", "d_model": 2048, "d_head": 8}, marks=pytest.mark.full),
        pytest.param({"dtype": "float32", "random": [2, 512], "d_model": 8, "d_input": 65_536}, marks=pytest.mark.full),
    ],
    ids=lambda choices: " ".join(map(str, choices.values())),
)
def test_a_run_takes_no_more_memory_than_predicted(choices):
    command = [sys.executable, "-c", MEASURED, json.dumps(choices)]
    measured, predicted = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert measured <= predicted <= 2 * measured
