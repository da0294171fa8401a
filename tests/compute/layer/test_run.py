"""`mha run` from text to record: every array against loops over the same weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import save_file
from support import oracle

from mhacli.attention.routes import ROUTES
from mhacli.checkpoints.mha_weights import read_layer_file
from mhacli.compute.base import setup
from mhacli.compute.base.taps import largest_difference
from mhacli.compute.layer.run import RecordingOptions, inspect, weights_content
from mhacli.errors import MhaError, UsageError
from mhacli.requests.layer import layer_request
from mhacli.results.record import storage
from mhacli.spec.config import Config
from mhacli.spec.tolerances import TOLERANCES
from mhacli.text.encode import encode
from mhacli.text.vocabulary import Vocabulary

CHOICES = {
    "d_model": 10, "n_heads": 9, "n_kv_heads": 3, "d_head": 5, "d_v": 2, "init": "uniform", "dtype": "float64",
    "device": "cpu",
}  # fmt: skip
CONFIG = Config(**CHOICES)
TEXTS = ["the cat sat on the mat", "a cat sat"]
CONTEXT = ["some other words", "words that are some other"]
SITES = ("x", "q_proj", "k_proj", "v_proj", "q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out")


def config_with(**choices):
    return Config(**{**CHOICES, **choices})


def record_of(text, config=CONFIG, *, context=(), keep=SITES, **options):
    return inspect(text, config, context=context, options=RecordingOptions(repeat=1, keep=keep, **options))


def padded_ids(sequences):
    longest = max(len(sequence.ids) for sequence in sequences)
    return [[*sequence.ids, *[-1] * (longest - len(sequence.ids))] for sequence in sequences]


def loops(record, weights, allowed):
    """The layer by the oracle, from the record's ids and the weights as a plain reader finds them."""
    x, rows = (
        oracle.embed(padded_ids(s), weights["embed.weight"], sinusoidal=record.config.positions == "sinusoidal")
        for s in (record.sequences, record.keys)
    )
    lengths = [[len(s.ids) for s in sequences] for sequences in (record.sequences, record.keys)]
    cells = oracle.full(
        lambda b, i, j: i < lengths[0][b] and j < lengths[1][b] and allowed(i, j),
        len(x), record.config.n_heads, x.shape[1], rows.shape[1],
    )  # fmt: skip
    config = record.config
    return x, cells, oracle.layer(
        x, weights, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, context=rows if record.context else None,
        scale=config.scale, softcap=config.softcap, allowed=cells,
    )  # fmt: skip


def plain_weights(texts, config, context=()):
    content = weights_content(layer_request(encode(texts, config, context=context), config))
    return safetensors.numpy.load(content)


@pytest.mark.parametrize(
    ("choices", "allowed"),
    [
        ({}, lambda i, j: True),
        ({"causal": True}, lambda i, j: j <= i),
        ({"window": (2, 1)}, lambda i, j: i - 2 <= j <= i + 1),
        ({"causal": True, "window": (1, 1)}, lambda i, j: i - 1 <= j <= i),
        ({"bias": False, "positions": "none", "scale": 1.5, "softcap": 2.0}, lambda i, j: True),
        ({"n_kv_heads": 9, "d_v": 5}, lambda i, j: True),
        ({"out_proj": False}, lambda i, j: True),
    ],
)
@pytest.mark.parametrize("context", [(), CONTEXT, CONTEXT[1:]])
def test_every_array_of_the_record_agrees_with_the_loops(choices, allowed, context):
    config = config_with(**choices)
    if (config.causal or config.window) and context:
        with pytest.raises(UsageError):
            record_of(TEXTS, config, context=context)
        return
    record = record_of(TEXTS, config, context=context)
    x, cells, expected = loops(record, plain_weights(TEXTS, config, context), allowed)
    arrays = {
        "x": x, "q": expected.q, "k": expected.k, "v": expected.v, "qk": expected.attention.qk,
        "pattern": expected.attention.pattern, "z": expected.attention.z, "concat": expected.concat,
        "out": expected.out,
    }  # fmt: skip
    for name, array in arrays.items():
        assert record.arrays[name].shape == array.shape, name
        assert np.abs(record.arrays[name] - array).max() <= 1e-12, name
    assert np.array_equal(record.arrays["allowed"], cells[:, :1])
    assert (record.arrays["pattern"][~cells] == 0.0).all()
    assert (record.arrays["scores"][~cells] == -np.inf).all()
    assert np.abs(record.arrays["scores"][cells] - expected.attention.scores[cells]).max() <= 1e-12


def entropy(shares):
    return -sum(float(p) * math.log(p) for p in shares if p > 0)


@pytest.mark.parametrize(
    ("choices", "context", "allowed"),
    [
        ({}, (), lambda i, j: True),
        ({}, CONTEXT, lambda i, j: True),
        ({"causal": True}, (), lambda i, j: j <= i),
        ({"window": (1, 0)}, (), lambda i, j: j in (i - 1, i)),
    ],
)
def test_statistics_of_heads_are_means_over_real_queries_that_have_a_choice(choices, context, allowed):
    config = config_with(**choices)
    record = record_of(TEXTS, config, context=context)
    _, cells, expected = loops(record, plain_weights(TEXTS, config, context), allowed)
    pattern = expected.attention.pattern
    queries = [(b, i) for b, sequence in enumerate(record.sequences) for i in range(len(sequence.ids))]
    for h, head in enumerate(record.heads):
        entropies, weights = [], []
        for b, i in queries:
            entropies.append(entropy(pattern[b, h, i]))
            n_visible = int(cells[b, h, i].sum())
            weights += [entropies[-1] / math.log(n_visible)] if n_visible > 1 else []
            assert record.arrays["entropy"][b, h, i] == pytest.approx(entropies[-1], abs=1e-12)
            strongest = int(np.argmax(pattern[b, h, i])) if n_visible else -1
            assert record.arrays["strongest_key"][b, h, i] == strongest
        assert head.head == h
        assert head.entropy == pytest.approx(sum(entropies) / len(queries), abs=1e-12)
        assert head.entropy_share == pytest.approx(sum(weights) / len(weights), abs=1e-12)
    assert (record.arrays["strongest_key"][1, :, 3:] == -1).all()
    assert (record.arrays["entropy"][1, :, 3:] == 0).all()


def test_a_single_token_has_no_normalised_entropy():
    (head, *_) = record_of("alone").heads
    assert (head.entropy, head.entropy_share) == (0.0, None)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("context", [(), CONTEXT])
def test_a_padded_sequence_has_the_numbers_that_it_has_alone(dtype, context):
    config = config_with(dtype=dtype, softcap=4.0)
    together = record_of(TEXTS, config, context=context)
    known = Vocabulary(together.vocabulary)
    for b, text in enumerate(TEXTS):
        alone = inspect(
            encode([text], config, context=context[b : b + 1], vocabulary=known), config,
            options=RecordingOptions(repeat=1, keep=SITES),
        )  # fmt: skip
        n, n_keys = len(alone.sequences[0].ids), len(alone.keys[0].ids)
        for name in ("pattern", "z", "out"):
            rows = (
                together.arrays[name][b, ..., :n, :n_keys]
                if name == "pattern"
                else together.arrays[name][b, ..., :n, :]
            )
            assert np.abs(rows - alone.arrays[name][0]).max() <= TOLERANCES[dtype].output


def test_rows_of_padding_hold_nothing_but_the_bias_of_the_output():
    record = record_of(TEXTS)
    assert (record.arrays["z"][1, :, 3:] == 0).all()
    bias = plain_weights(TEXTS, CONFIG)["o_proj.bias"]
    assert (record.arrays["out"][1, 3:] == bias).all()
    assert np.abs(bias).min() > 0


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("choices", [{}, {"train": True, "dropout": 0.3}, {"out_proj": False}, {"n_kv_heads": 9}])
def test_the_self_check_recomputes_the_output_from_what_is_shown(dtype, choices):
    config = config_with(dtype=dtype, **choices)
    check = record_of(TEXTS, config).self_check
    assert check.ok
    assert check.tolerance >= TOLERANCES[dtype].output
    assert check.max_abs_error <= check.tolerance


@pytest.mark.parametrize("change", [lambda out: out + 1e-5, lambda out: out.flip(1), lambda out: out * math.nan])
def test_the_self_check_notices_an_output_that_is_not_of_the_pattern(change, monkeypatch):
    def wrong(layer, reading, tap):
        return ROUTES["separate"](layer, reading, lambda s, t, **_: tap(s, change(t) if s == "out" else t))

    monkeypatch.setattr(setup, "ROUTES", {**ROUTES, "separate": wrong})
    check = record_of(TEXTS, config_with(dtype="float32"), allow_nonfinite=True).self_check
    assert not check.ok


def test_the_self_check_in_blocks_of_queries_sees_every_row(monkeypatch):
    monkeypatch.setattr("mhacli.compute.layer.run._BLOCK_CELLS", 1)

    def wrong(layer, reading, tap):
        def spoil(site, tensor, **_):
            tap(
                site,
                tensor.index_add(1, torch.tensor([4]), torch.ones_like(tensor[:, :1])) if site == "out" else tensor,
            )

        return ROUTES["separate"](layer, reading, spoil)

    assert record_of(TEXTS).self_check.ok
    monkeypatch.setattr(setup, "ROUTES", {**ROUTES, "separate": wrong})
    found = record_of(TEXTS).self_check
    assert (found.ok, found.max_abs_error) == (False, pytest.approx(1.0))


def test_the_record_keeps_what_was_requested_and_what_its_views_need():
    always = {"allowed", "entropy", "strongest_key"}
    assert record_of(TEXTS, keep=("z", "q_proj")).arrays.keys() == {"z", "q_proj"} | always
    usual = record_of(TEXTS, keep=None)
    assert usual.arrays.keys() == {"pattern", "out", "z", "scores", "qk"} | always
    assert usual.not_kept == ()


def test_a_limit_on_what_is_kept_leaves_out_the_least_wanted():
    bytes_of = {"pattern": 2 * 9 * 36 * 8, "out": 2 * 6 * 10 * 8, "z": 2 * 9 * 6 * 2 * 8}
    record = record_of(TEXTS, keep=None, keep_limit=sum(bytes_of.values()))
    assert {name: array.nbytes for name, array in record.arrays.items() if name in SITES} == bytes_of
    assert record.not_kept == ("scores", "qk")


def test_training_shows_what_dropout_left_and_the_output_follows_it():
    config = config_with(train=True, dropout=0.4)
    record = record_of(TEXTS, config, keep=None)
    pattern, dropped = record.arrays["pattern"], record.arrays["dropped"]
    survived = dropped != 0
    assert 0.4 < survived[pattern > 0].mean() < 0.8
    assert np.abs(dropped[survived] - pattern[survived] / 0.6).max() <= 1e-15
    assert "dropped" in [step.site for step in record.trace]
    rested = record_of(TEXTS, config_with(dropout=0.4), keep=None)
    assert "dropped" not in rested.arrays
    assert np.array_equal(rested.arrays["pattern"], pattern)
    assert not np.array_equal(rested.arrays["z"], record.arrays["z"])
    assert np.array_equal(dropped, record_of(TEXTS, config, keep=None).arrays["dropped"])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(dtype):
    config = config_with(dtype=dtype)
    first, again = record_of(TEXTS, config), record_of(TEXTS, config)
    assert all(np.array_equal(array, again.arrays[name]) for name, array in first.arrays.items())
    other = record_of(TEXTS, config_with(dtype=dtype, seed=1))
    assert not any(np.array_equal(first.arrays[name], other.arrays[name]) for name in ("x", "qk", "v", "out"))


def test_other_words_leave_the_projections_alone():
    one, two = plain_weights(TEXTS, CONFIG), plain_weights(["quite other words"], CONFIG)
    assert all(np.array_equal(one[name], two[name]) for name in one if name != "embed.weight")


def test_a_lower_precision_rounds_the_same_weights():
    exact, rounded = plain_weights(TEXTS, CONFIG), plain_weights(TEXTS, config_with(dtype="float32"))
    for name in ("embed.weight", "q_proj.weight", "o_proj.bias"):
        assert np.abs(exact[name] - rounded[name]).max() <= 2**-24 * 4


def test_inspecting_leaves_the_global_generator_alone():
    torch.manual_seed(11)
    state = torch.random.get_rng_state()
    record_of(TEXTS, config_with(train=True, dropout=0.4))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_saved_record_comes_back_with_identical_arrays(dtype, tmp_path):
    record = record_of(TEXTS, config_with(dtype=dtype, causal=True), command=("mha", "run"))
    path = str(tmp_path / "record.safetensors")
    record.save(path)
    found = storage.load(path)
    assert found.document() == record.document()
    assert found.arrays.keys() == record.arrays.keys()
    for name, array in record.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].tobytes() == np.ascontiguousarray(array).tobytes()


def overflowing_file(path, heads):
    """A float16 layer whose queries and keys are 400 in the given heads of three: products of 320 000."""
    rows = torch.zeros(3, 2, 4)
    rows[heads] = 100.0
    one = torch.ones(6, 4)
    tensors = {"embed": torch.ones(3, 4), "q_proj": rows.flatten(0, 1), "k_proj": rows.flatten(0, 1), "v_proj": one}
    save_file({f"{name}.weight": t.half().contiguous().clone() for name, t in tensors.items()}, path)
    return read_layer_file(str(path), {"n_heads": 3, "positions": "none", "device": "cpu"})


@pytest.mark.parametrize(("heads", "named"), [([1], "head 1"), ([0, 2], "heads 0, 2")])
def test_products_too_large_for_sixteen_bits_name_their_heads(heads, named, tmp_path):
    source = overflowing_file(tmp_path / "large.safetensors", heads)
    with pytest.raises(MhaError) as caught:
        inspect("a b c", source=source)
    n_bad = 9 * len(heads)
    assert caught.value.message == f"{n_bad} numbers of the dot products q·k of {named} are NaN or Inf in float16"
    assert (
        caught.value.hint
        == "--dtype bfloat16 and --dtype float32 have a wider range; --allow-nonfinite continues anyway"
    )
    assert (caught.value.code, caught.value.exit_code) == ("not-finite", 1)


def test_numbers_that_are_not_finite_are_shown_when_allowed(tmp_path):
    source = overflowing_file(tmp_path / "large.safetensors", [1])
    record = inspect("a b c", source=source, options=RecordingOptions(repeat=1, allow_nonfinite=True))
    assert np.isinf(record.arrays["qk"][0, 1]).all()
    assert np.isfinite(record.arrays["qk"][0, [0, 2]]).all()
    assert np.isnan(record.arrays["pattern"][0, 1]).all()
    assert [head.entropy is None for head in record.heads] == [False, True, False]
    assert record.weights == source.path
    saved = str(tmp_path / "record.safetensors")
    record.save(saved)
    assert storage.load(saved).arrays["qk"].tobytes() == record.arrays["qk"].tobytes()


def test_timings_cover_every_site_and_their_sum():
    record = record_of(TEXTS)
    sites = [step.site for step in record.trace]
    assert list(record.timings) == [*sites, "total"]
    assert [step.time_s for step in record.trace] == [record.timings[site].median_s for site in sites]
    assert record.timings["total"].samples_s == (pytest.approx(sum(record.timings[s].samples_s[0] for s in sites)),)


def test_the_self_check_of_a_tiny_output_still_bites():
    honest = inspect("a b c", Config(init="normal", dtype="bfloat16", out_proj=True))
    assert honest.self_check.ok
    assert honest.self_check.tolerance < 0.2 * abs(honest.arrays["out"]).max()


def test_an_output_that_is_not_finite_where_it_should_be_fails_the_comparison():
    nan, one = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])
    assert largest_difference(nan, nan) == 0
    assert largest_difference(nan, one) == float("inf")
    assert largest_difference(one, one + 0.5) == 0.5


def test_a_site_that_the_run_does_not_pass_cannot_be_kept():
    with pytest.raises(UsageError) as caught:
        inspect("a b", Config(positions="none"), options=RecordingOptions(keep=("pattern", "qkv")))
    assert caught.value.message == "--keep: this run does not compute qkv"
    assert caught.value.hint == ("it computes ids embed x q_proj q k_proj k v_proj v qk scores pattern z concat out")
