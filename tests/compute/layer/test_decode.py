"""Decoding step by step: the record against that of one full pass, and every number of a step by hand."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mhacli.attention.layer import ConcatCache, PreallocatedCache
from mhacli.checkpoints.mha_weights import read_layer_file
from mhacli.cli.app import main
from mhacli.compute.layer import decode as study
from mhacli.compute.layer.run import RecordingOptions, inspect, weights_content
from mhacli.errors import MhaError, UsageError
from mhacli.requests.layer import decodable, layer_request
from mhacli.results.record.record import SelfCheck
from mhacli.spec.config import Config
from mhacli.text.encode import encode

CHOICES = {
    "d_model": 5, "n_heads": 6, "n_kv_heads": 2, "d_head": 4, "d_v": 3, "d_input": 9, "init": "uniform",
    "dtype": "float64", "device": "cpu", "max_positions": 9, "scale": 1.5,
}  # fmt: skip
TEXTS = ("the cat | sat on the | mat a", "a mat | sat")
CACHES = ("none", "concat", "preallocated")
QUICK = RecordingOptions(repeat=1)
time_caches = study.time_caches


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The ways of keeping the past are compared where a test is about them."""
    monkeypatch.setattr(study, "time_caches", lambda *_: ())


def config_of(**choices):
    return Config(**CHOICES | choices)


def decoded(texts=TEXTS, config=None, **how):
    config = config or config_of()
    options, source = how.pop("options", QUICK), how.pop("source", None)
    return study.decode(layer_request(encode(texts, config), config, source=source, options=options), **how)


VARIANTS = {
    "plain": {"positions": "none", "bias": False},
    "sinusoidal": {"softcap": 2.0},
    "learned, left padding": {"positions": "learned", "padding": "left"},
    "rope, left padding, window": {"positions": "rope", "padding": "left", "window": (1, 0), "rope_theta": 30.0},
    "interleaved, documents, sink": {
        "positions": "rope-interleaved", "documents": "|", "window": (1, 5), "sink": 1, "rope_theta": 30.0,
    },
    "alibi, documents, left padding": {"positions": "alibi", "documents": "|", "padding": "left"},
    "alibi, one kv head, no projection": {"positions": "alibi", "n_kv_heads": 1, "out_proj": False},
}  # fmt: skip


@pytest.mark.parametrize("prompt_len", [0, 3])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", CACHES)
def test_steps_gather_the_arrays_of_one_run_over_everything(cache, variant, prompt_len):
    config = config_of(**VARIANTS[variant])
    record = decoded(config=config, cache=cache, prompt_len=prompt_len)
    whole = inspect(TEXTS, config_of(**VARIANTS[variant], causal=True), options=QUICK)
    require_same(record, whole)
    assert record.config == whole.config
    for found, expected in zip(record.heads, whole.heads, strict=True):
        assert found.entropy == pytest.approx(expected.entropy, abs=1e-12)
        assert found.entropy_share == pytest.approx(expected.entropy_share, abs=1e-12)
    assert (record.decoding.cache, record.decoding.prompt_len) == (cache, prompt_len)


def require_same(record, whole):
    cells = np.broadcast_to(whole.arrays["allowed"], whole.arrays["pattern"].shape)
    assert record.arrays.keys() == whole.arrays.keys()
    assert np.array_equal(record.arrays["allowed"], whole.arrays["allowed"])
    one, other = (np.maximum(each.arrays["strongest_key"], 0)[..., None] for each in (record, whole))
    weights = [np.take_along_axis(whole.arrays["pattern"], key, axis=-1) for key in (one, other)]
    assert np.abs(weights[0] - weights[1]).max() <= 1e-12  # the same key, or one of two like tokens
    for name in ("pattern", "z", "out", "entropy"):
        assert np.abs(record.arrays[name] - whole.arrays[name]).max() <= 1e-12, name
    for name in ("qk", "scores"):
        assert np.abs(record.arrays[name][cells] - whole.arrays[name][cells]).max() <= 1e-12, name
    assert (record.arrays["scores"][~cells] == -np.inf).all()
    assert (record.arrays["pattern"][~cells] == 0.0).all()
    assert record.self_check.ok
    assert record.self_check.max_abs_error <= 1e-12


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("prompt_len", [2, 4, 7])
def test_a_prefix_that_lies_in_the_prompt_is_read_at_once(cache, prompt_len):
    choices = {"prefix": 2, "window": (2, 0), "positions": "rope"}
    record = decoded(config=config_of(**choices), cache=cache, prompt_len=prompt_len)
    require_same(record, inspect(TEXTS, config_of(**choices), options=QUICK))
    assert record.arrays["pattern"][0, :, 0, 1].min() > 0  # the first token sees the second


@pytest.mark.parametrize(
    ("choices", "prompt_len"), [({"padding": "left"}, 6), ({"documents": "|"}, 7)], ids=["padded", "packed"]
)
def test_a_prefix_that_padding_or_documents_move_behind_the_prompt_is_refused_before_any_work(choices, prompt_len):
    # on the left: 4 of padding, then the 2; packed: the last document's 2 are the 6th and 7th
    config = config_of(prefix=2, **choices)
    assert decoded(config=config, prompt_len=prompt_len).self_check.ok
    with pytest.raises(UsageError) as caught:
        decoded(config=config, prompt_len=2)
    assert caught.value.hint == f"try --prompt-len {prompt_len}"


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1), (7, 1), (1, 7), (7, 7), (6, 7, 7), (6, 1, 1), (2, 1, 7, 7)])
@pytest.mark.parametrize("cache", ["none", "preallocated"])
def test_a_score_bias_of_any_shape_reaches_the_steps(shape, cache, tmp_path, normal):
    bias = normal(*shape)
    if shape[-2:] == (7, 7):
        bias[..., 4, 1:], bias[..., 6, 5] = -torch.inf, -torch.inf
    save_file({"bias": bias}, tmp_path / "bias.safetensors")
    choices = {"score_bias": str(tmp_path / "bias.safetensors"), "positions": "alibi"}
    record = decoded(config=config_of(**choices), cache=cache, prompt_len=2)
    require_same(record, inspect(TEXTS, config_of(**choices, causal=True), options=QUICK))


@pytest.mark.parametrize("cache", CACHES)
def test_random_rows_are_decoded_like_tokens(cache):
    config = config_of(random=(3, 5), positions="rope", d_head=2)
    record = decoded((), config, cache=cache, prompt_len=1)
    require_same(record, inspect((), config_of(random=(3, 5), positions="rope", d_head=2, causal=True), options=QUICK))
    assert [step.cache.tokens for step in record.trace][:2] == [(("x0",),) * 3, (("x1",),) * 3]


def test_weights_from_a_file_are_decoded_with(tmp_path):
    config = config_of(seed=4, positions="rope")
    path = tmp_path / "w.safetensors"
    path.write_bytes(weights_content(layer_request(encode(TEXTS, config), config)))
    source = read_layer_file(str(path), {"dtype": "float64", "device": "cpu"})
    record = decoded(config=source.config, source=source)
    require_same(record, inspect(TEXTS, config_of(seed=4, positions="rope", causal=True), options=QUICK))
    assert record.weights == str(path)


def test_every_step_has_one_entry_that_shows_its_tokens_and_shapes():
    record = decoded()
    steps = [step.cache for step in record.trace]
    assert [step.site for step in record.trace] == [f"step {n}" for n in range(7)]
    assert [(s.phase, s.start, s.n_past) for s in steps] == [("decode", n, n) for n in range(7)]
    assert [s.tokens for s in steps] == [
        (("the",), ("a",)), (("cat",), ("mat",)), (("sat",), ("sat",)), (("on",), ()), (("the",), ()), (("mat",), ()),
        (("a",), ()),
    ]  # fmt: skip
    assert {(s.q_shape, s.k_shape, s.v_shape) for s in steps} == {((2, 6, 1, 4), (2, 2, 1, 4), (2, 2, 1, 3))}
    assert {(step.shape, step.axes, step.dtype) for step in record.trace} == {
        ((2, 1, 5), ("batch", "query", "d_model"), "float64")
    }
    assert record.timings.keys() == {*(f"step {n}" for n in range(7)), "total"}


def test_a_prefill_is_one_entry_and_left_padding_comes_first():
    record = decoded(config=config_of(padding="left", out_proj=False), prompt_len=5)
    steps = [step.cache for step in record.trace]
    assert [(s.phase, s.start, s.n_past) for s in steps] == [("prefill", 0, 0), ("decode", 5, 5), ("decode", 6, 6)]
    assert steps[0].tokens == (("the", "cat", "sat", "on", "the"), ("a",))
    assert [s.tokens for s in steps[1:]] == [(("mat",), ("mat",)), (("a",), ("sat",))]
    assert [s.q_shape for s in steps] == [(2, 6, 5, 4), (2, 6, 1, 4), (2, 6, 1, 4)]
    assert [(step.shape, step.axes) for step in record.trace] == [
        ((2, n, 18), ("batch", "query", "head·d_v")) for n in (5, 1, 1)
    ]


TOKEN = 2 * 2 * (4 + 3) * 8
"""Bytes of one place of the cache by hand: batch 2, kv heads 2, d_head 4 and d_v 3, 8 bytes each: 224."""


@pytest.mark.parametrize(
    ("cache", "read", "appended", "moved", "held"),
    [
        ("none", [0, 0, 0], [0, 0, 0], [10, 12, 14], [0, 0, 0]),
        ("concat", [5, 6, 7], [5, 1, 1], [10, 17, 20], [5, 6, 7]),
        ("preallocated", [5, 6, 7], [5, 1, 1], [10, 7, 8], [7, 7, 7]),
    ],
)
def test_by_hand_the_bytes_of_a_prefill_of_five_and_two_steps(cache, read, appended, moved, held):
    steps = [step.cache for step in decoded(cache=cache, prompt_len=5).trace]
    assert [s.read_bytes for s in steps] == [n * TOKEN for n in read]
    assert [s.appended_bytes for s in steps] == [n * TOKEN for n in appended]
    assert [s.moved_bytes for s in steps] == [n * TOKEN for n in moved]
    assert [s.cache_bytes for s in steps] == [n * TOKEN for n in held]


def test_without_a_cache_each_step_computes_all_queries_keys_and_values_again():
    steps = [step.cache for step in decoded(cache="none", prompt_len=5).trace]
    assert [(s.q_shape[2], s.k_shape[2], s.v_shape[2]) for s in steps] == [(5, 5, 5), (6, 6, 6), (7, 7, 7)]


def forgetful(state, k, v):
    """A cache that loses the newest value."""
    return original(state, k, v * 0 if state.length else v)


original = ConcatCache.extended


def test_a_step_that_goes_wrong_fails_the_self_check_and_says_by_how_much(monkeypatch):
    assert decoded(cache="concat").self_check.ok
    monkeypatch.setattr(ConcatCache, "extended", forgetful)
    record = decoded(cache="concat")
    found = [step.cache.max_abs_difference for step in record.trace]
    assert found[0] <= 1e-12 < 1e-3 < min(found[1:])
    assert record.self_check.max_abs_error == max(found)
    assert not record.self_check.ok


def test_what_is_shown_must_keep_its_own_tolerance_which_is_the_stricter_one(monkeypatch):
    make_record, bound = study.make_record, decoded().self_check.tolerance / 2
    shown = SelfCheck(1.5 * bound, bound, False)
    monkeypatch.setattr(study, "make_record", lambda *given: replace(make_record(*given), self_check=shown))
    assert decoded().self_check == shown


def test_a_step_that_is_not_finite_fails_the_self_check(monkeypatch):
    full = PreallocatedCache.extended
    monkeypatch.setattr(PreallocatedCache, "extended", lambda state, k, v: full(state, k, v * torch.nan))
    record = decoded(options=RecordingOptions(repeat=1, allow_nonfinite=True))
    assert record.trace[0].cache.max_abs_difference is None
    assert (record.self_check.ok, record.self_check.max_abs_error) == (False, None)
    with pytest.raises(MhaError) as caught:
        decoded()
    assert caught.value.code == "not-finite"


def test_the_command_ends_with_3_when_a_step_goes_wrong(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mha", "decode", "the cat sat", "--cache", "concat", "--repeat", "1"])
    assert main() == 0
    said = capsys.readouterr()
    assert "self-check ok" in said.out
    monkeypatch.setattr(ConcatCache, "extended", forgetful)
    assert main() == 3
    said = capsys.readouterr()
    assert "self-check FAILED" in said.out
    assert said.err.startswith("mha: error: the output ")


@pytest.mark.parametrize(
    ("choices", "context", "prompt_len", "message", "hint"),
    [
        ({}, (), 8, "--prompt-len 8", None),
        ({}, (), -1, "--prompt-len -1", None),
        ({}, ("a b",), 0, "--context", "mha run shows cross-attention"),
        (
            {"train": True, "dropout": 0.5}, (), 0,
            "--train", "leave out --train",
        ),
        (
            {"prefix": 3}, (), 2,
            "--prompt-len 2", "try --prompt-len 3",
        ),
        (
            {"prefix": 9}, (), 0,
            "--prompt-len 0", "try --prompt-len 7",
        ),
        (
            {"prefix": 2, "padding": "left"}, (), 5,
            "--prompt-len 5", "try --prompt-len 6",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused_with_the_rule(choices, context, prompt_len, message, hint):
    config = config_of(**choices).resolved()
    with pytest.raises(UsageError) as caught:
        decodable(layer_request(encode(TEXTS, config, context=context), config), prompt_len)
    assert caught.value.message.startswith(message + " ")
    assert caught.value.hint == hint


def test_decoding_means_a_causal_mask_and_a_prefix_brings_its_own():
    def request(**choices):
        config = config_of(**choices)
        return layer_request(encode(TEXTS, config), config)

    causal = decodable(request(), 0)
    assert causal.config.causal
    assert causal.facts.config.causal
    with_prefix = request(prefix=2)
    assert decodable(with_prefix, 2) == with_prefix
    first_alone = request(
        prefix=1, documents="|", padding="left"
    )  # the first token alone sees nothing that comes later
    assert decodable(first_alone, 0) == first_alone


def test_the_kinds_of_cache_are_compared_at_the_lengths_that_were_requested(monkeypatch):
    monkeypatch.setattr(study, "time_caches", time_caches)
    record = decoded(lengths=(3, 2, 3))
    assert [(way.length, way.cache) for way in record.decoding.ways] == [(n, cache) for n in (2, 3) for cache in CACHES]
    of_text = decoded(("the cat sat",)).decoding.ways
    assert [way.length for way in of_text] == [3, 3, 3]
    assert [way.cache_bytes for way in record.decoding.ways] == [0, 2 * TOKEN, 2 * TOKEN, 0, 3 * TOKEN, 3 * TOKEN]
    assert [way.step_bytes for way in record.decoding.ways[3:]] == [6 * TOKEN, 8 * TOKEN, 4 * TOKEN]
    assert [way.total_bytes for way in record.decoding.ways[3:]] == [12 * TOKEN, 15 * TOKEN, 9 * TOKEN]
    for way in record.decoding.ways:
        assert way.n_timed == way.length
        assert way.step.median_s > 0
        assert way.total_s >= way.step.median_s


def test_by_hand_a_busy_moment_meets_the_steps_of_all_lengths_alike(monkeypatch):
    """Each timing takes as long as its number: 9 warm up, then 50 rounds of 9, so their median is round 25.5."""
    numbers = itertools.count(1)
    monkeypatch.setattr(study, "_seconds", lambda *_: float(next(numbers)))
    monkeypatch.setattr(study, "_BUDGET_S", math.inf)
    monkeypatch.setattr(study, "time_caches", time_caches)
    none, concat, preallocated = decoded(lengths=(3,)).decoding.ways
    assert [way.step.median_s for way in (none, concat, preallocated)] == [9 * 25.5 + place for place in (7, 8, 9)]
    assert none.total_s == 3 * 9 * 25.5 + 1 + 4 + 7
    assert concat.total_s == 3 * 9 * 25.5 + 2 + 5 + 8


def test_decoding_leaves_the_global_generator_alone(monkeypatch):
    monkeypatch.setattr(study, "time_caches", time_caches)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    decoded(("the cat",))
    assert torch.equal(torch.random.get_rng_state(), state)
