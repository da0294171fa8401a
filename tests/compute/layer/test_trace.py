"""The walkthrough: its numbers about every tensor, counted and recomputed independently."""

from __future__ import annotations

import math

import numpy as np
import pytest
import safetensors.numpy
import torch
from support import oracle

from mhacli.attention.routes import ROUTES
from mhacli.compute.base import setup
from mhacli.compute.base.taps import summarise
from mhacli.compute.layer.run import RecordingOptions, weights_content
from mhacli.compute.layer.trace import walk
from mhacli.errors import UsageError
from mhacli.requests.layer import CellIndex, layer_request
from mhacli.spec.config import Config
from mhacli.text.encode import encode

CONFIG = Config(d_model=6, n_heads=4, n_kv_heads=2, d_head=3, d_v=2, dtype="float64", device="cpu", init="uniform")
TEXTS = ["the cat sat on the mat", "a cat"]
CONTEXT = ["some other words", "words that are some other"]
QUICK = RecordingOptions(repeat=1)


def walked(texts=TEXTS, context=(), config=CONFIG, **how):
    return walk(layer_request(encode(texts, config, context=context), config, options=QUICK), **how)


def steps(record):
    return {step.site: step for step in record.trace}


def loops_over(texts, context, config, allowed):
    """The layer's tensors by the oracle, from the ids and the weights as a plain safetensors file holds them."""
    encoded = encode(texts, config, context=context)
    weights = safetensors.numpy.load(weights_content(layer_request(encoded, config)))
    padded = [
        [[*s.ids, *[-1] * (max(len(t.ids) for t in group) - len(s.ids))] for s in group]
        for group in (encoded.sequences, encoded.context or encoded.sequences)
    ]
    x, rows = (oracle.embed(ids, weights["embed.weight"], sinusoidal=True) for ids in padded)
    shape = (len(texts), config.n_heads, x.shape[1], rows.shape[1])
    return oracle.layer(
        x, weights, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, softcap=config.softcap,
        context=rows if context else None, allowed=oracle.full(allowed, *shape),
    )  # fmt: skip


class Counted:
    """A number that counts how often it is calculated with."""

    operations = 0

    def _count(self, _other=None):
        Counted.operations += 1
        return Counted()

    __add__ = __sub__ = __mul__ = __truediv__ = function = _count


def counted(work):
    Counted.operations = 0
    work()
    return Counted.operations


def product(n_rows, n_out, n_in, bias):
    for _ in range(n_rows * n_out):
        total = Counted()
        for _ in range(n_in):
            total = total + Counted() * Counted()
        if bias:
            total = total + Counted()


def softmax_row(n):
    powers = []
    for _ in range(n):
        largest = Counted().function()  # the larger of two
        powers.append((Counted() - largest).function())  # exp
    total = Counted()
    for power in powers:
        total = total + power
    for power in powers:
        _ = power / total


def score(softcap, n_added):
    scaled = Counted() * Counted()
    if softcap:
        scaled = (scaled / Counted()).function() * Counted()
    for _ in range(n_added):
        scaled = scaled + Counted()


def turned(n_numbers):
    """Two products and one sum or difference for every number of a pair."""
    for _ in range(n_numbers):
        _ = Counted() * Counted() - Counted() * Counted()


def cost():
    """A slope times a distance, which is a whole number and the same for every head."""
    _ = Counted() * Counted()


def by_counting(facts):
    """Operations per site, from loops that do the work.

    `facts` are batch, heads, kv heads, query, key, d_head, d_v, d_model, d_input, bias, softcap, what is added to scores.
    """
    b, h, g, q, k, d, v, m, n_in, bias, softcap, n_added = facts
    cells = range(b * h * q * k)
    return {
        "ids": 0, "random": 0, "embed": 0, "bias": 0, "q": 0, "k": 0, "v": 0, "concat": 0,
        "positions": counted(lambda: [(Counted() * Counted()).function() for _ in range(q * n_in)]),
        "x": counted(lambda: [Counted() + Counted() for _ in range(b * q * n_in)]),
        "context": counted(lambda: [Counted() + Counted() for _ in range(b * k * n_in)])
        + counted(lambda: [(Counted() * Counted()).function() for _ in range(k * n_in)]),
        "q_proj": counted(lambda: product(b * q, h * d, n_in, bias)),
        "q_per_head": counted(lambda: [product(b * q, d, n_in, bias) for _ in range(h)]),
        "k_proj": counted(lambda: product(b * k, g * d, n_in, bias)),
        "k_per_head": counted(lambda: [product(b * k, d, n_in, bias) for _ in range(g)]),
        "v_proj": counted(lambda: product(b * k, g * v, n_in, bias)),
        "v_per_head": counted(lambda: [product(b * k, v, n_in, bias) for _ in range(g)]),
        "qkv": counted(lambda: product(b * q, h * d + g * d + g * v, n_in, bias)),
        "kv": counted(lambda: product(b * k, g * d + g * v, n_in, bias)),
        "q_rot": counted(lambda: turned(b * h * q * d)),
        "k_rot": counted(lambda: turned(b * g * k * d)),
        "alibi": counted(lambda: [cost() for _ in range(h * q * k)]),
        "qk": counted(lambda: [product(q, k, d, False) for _ in range(b * h)]),
        "scores": counted(lambda: [score(softcap, n_added) for _ in cells]),
        "pattern": counted(lambda: [softmax_row(k) for _ in range(b * h * q)]),
        "dropped": counted(lambda: [Counted() * Counted() / Counted() for _ in cells]),
        "z": counted(lambda: [product(q, v, k, False) for _ in range(b * h)]),
        "head_out": counted(lambda: [product(b * q, m, v, False) for _ in range(h)]),
        "out": counted(lambda: product(b * q, m, h * v, bias)),
        "out_sum": counted(
            lambda: [[Counted() + Counted() for _ in range(h - 1 + bias)] for _ in range(b * q * m)]
        ),
    }  # fmt: skip


def counts_for(config, k_len, n_added=0):
    return by_counting(
        (2, 4, config.n_kv_heads, 6, k_len, config.d_head, config.d_v, 6, config.d_input or 6, config.bias,
         config.softcap is not None, n_added)
    )  # fmt: skip


def flops_of(record):
    return {step.site: step.flops for step in record.trace}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("context", [(), CONTEXT])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"bias": False},
        {"softcap": 5.0},
        {"train": True, "dropout": 0.5},
        {"n_kv_heads": 4, "d_v": 3},
        {"d_input": 5},
        {"d_input": 7, "bias": False, "n_kv_heads": 1},
    ],
)
def test_operations_agree_with_counting_them_one_by_one(route, context, choices):
    config = Config(**{**vars(CONFIG), **choices})
    record = walked(context=context, config=config, route=route)
    expected = counts_for(config, 5 if context else 6)
    assert flops_of(record) == {step.site: expected[step.site] for step in record.trace}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("positions", ["rope", "rope-interleaved", "alibi", "learned", "none"])
def test_operations_of_other_positions_agree_with_counting_them_one_by_one(route, padding, positions):
    config = Config(**{**vars(CONFIG), "positions": positions, "d_head": 4, "softcap": 5.0, "padding": padding})
    record = walked(config=config, route=route)
    expected = counts_for(config, 6, n_added=positions == "alibi")
    expected |= {"positions": 0} | ({} if positions == "learned" else {"x": 0})  # a row of a table is a copy
    if padding == "left":
        expected["alibi"] *= 2  # sequences that do not begin together have costs of their own
    assert flops_of(record) == {step.site: expected[step.site] for step in record.trace}
    own = {
        "rope": {"q_rot", "k_rot"},
        "rope-interleaved": {"q_rot", "k_rot"},
        "alibi": {"alibi"},
        "learned": {"positions"},
    }
    assert flops_of(record).keys() & {"q_rot", "k_rot", "alibi", "positions"} == own.get(positions, set())


@pytest.mark.parametrize("context", [(), CONTEXT])
@pytest.mark.parametrize("positions", ["learned", "none"])
def test_a_context_costs_what_is_added_to_it(context, positions):
    config = Config(**{**vars(CONFIG), "positions": positions})
    record = walked(context=context, config=config)
    if context:
        assert flops_of(record)["context"] == (2 * 5 * 6 if positions == "learned" else 0)
    assert flops_of(record)["x"] == (2 * 6 * 6 if positions == "learned" else 0)


@pytest.mark.parametrize("route", ROUTES)
def test_waves_for_sequences_that_begin_apart_are_made_for_each(route):
    config = Config(**{**vars(CONFIG), "padding": "left"})
    expected = counts_for(config, 6)
    expected["positions"] *= 2
    record = walked(config=config, route=route)
    assert flops_of(record) == {step.site: expected[step.site] for step in record.trace}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("positions", "n_added"), [("none", 1), ("alibi", 2)])
def test_random_rows_and_a_bias_of_a_file_cost_what_is_done_with_them(route, positions, n_added, tmp_path):
    path = str(tmp_path / "b.safetensors")
    safetensors.numpy.save_file({"bias": np.ones((4, 6, 6), np.float32)}, path)
    config = Config(**{**vars(CONFIG), "random": (2, 6), "positions": positions, "score_bias": path})
    record = walked(texts=[], config=config, route=route)
    expected = counts_for(config, 6, n_added) | {"x": 0}
    assert flops_of(record) == {step.site: expected[step.site] for step in record.trace}
    assert [step.site for step in record.trace][:2] == ["random", "x"]
    assert steps(record)["x"].view_of == "random"
    assert steps(record)["bias"].formula == f"bias = {path}"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("context", [(), CONTEXT])
def test_shapes_dtypes_and_bytes_are_those_of_the_tensors(route, context):
    record = walked(context=context, config=Config(**{**vars(CONFIG), "dtype": "float16"}), route=route)
    encoded, options = (
        encode(TEXTS, record.config, context=context),
        RecordingOptions(repeat=1, keep=tuple(steps(record))),
    )
    kept = walk(layer_request(encoded, record.config, options=options), route=route)
    assert record.trace[0].site == "ids"
    for site, step in steps(record).items():
        assert step.shape == kept.arrays[site].shape
        item = {"int64": 8, "float32": 4, "float16": 2}[step.dtype]
        assert step.bytes == math.prod(step.shape) * item
        assert len(step.axes) == len(step.shape) == len(step.strides)
    assert {site for site, step in steps(record).items() if step.dtype != "float16"} == {"ids", "scores"}


def test_views_and_strides_of_the_separate_route():
    found = {step.site: (step.layout, step.view_of, step.strides) for step in walked().trace}
    assert found["q_proj"] == ("copy", None, (6 * 12, 12, 1))
    assert found["q"] == ("view", "q_proj", (6 * 12, 3, 12, 1))
    assert found["k"] == ("view", "k_proj", (6 * 6, 3, 6, 1))
    assert found["v"] == ("view", "v_proj", (6 * 4, 2, 4, 1))
    assert found["concat"] == ("copy", None, (6 * 8, 8, 1))
    assert [site for site, (layout, _, _) in found.items() if layout == "view"] == ["q", "k", "v"]


def test_views_and_strides_of_the_fused_route():
    width = 12 + 6 + 4
    found = {step.site: (step.view_of, step.strides) for step in walked(route="fused").trace}
    assert found["q"] == ("qkv", (6 * width, 3, width, 1))
    assert found["k"] == ("qkv", (6 * width, 3, width, 1))
    assert found["v"] == ("qkv", (6 * width, 2, width, 1))
    crossed = steps(walked(context=CONTEXT, route="fused"))
    assert [crossed[site].view_of for site in "qkv"] == ["q_proj", "kv", "kv"]


def test_what_is_passed_on_unchanged_is_a_view():
    config = Config(d_model=6, n_heads=1, out_proj=False, positions="none", device="cpu")
    found = {step.site: step.view_of for step in walked(config=config).trace}
    assert (found["x"], found["concat"], found["out"]) == ("embed", "z", "concat")


def test_steps_name_the_weights_that_they_use():
    found = {step.site: [(p.name, p.shape) for p in step.parameters] for step in walked().trace}
    assert found["q_proj"] == [("q_proj.weight", (12, 6)), ("q_proj.bias", (12,))]
    assert found["out"] == [("o_proj.weight", (6, 8)), ("o_proj.bias", (6,))]
    assert found["q"] == found["pattern"] == []


@pytest.mark.parametrize("route", ROUTES)
def test_the_routes_are_checked_against_each_other(route):
    record = walked(route=route)
    assert [check.route for check in record.routes] == ["separate", "fused", "per-head"]
    for check in record.routes:
        assert check.ok
        assert check.max_abs_difference <= 1e-14 < check.tolerance < 1e-11
    shown = next(check for check in record.routes if check.route == route)
    assert shown.sites == tuple(steps(record))


def test_a_route_that_errs_is_found_out(monkeypatch):
    def wrong(layer, reading, tap):
        return ROUTES["fused"](layer, reading, tap) + 1e-6

    monkeypatch.setattr(setup, "ROUTES", {**ROUTES, "fused": wrong})
    assert {check.route: check.ok for check in walked().routes} == {"separate": True, "fused": False, "per-head": True}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("context", [(), CONTEXT])
def test_the_numbers_of_a_cell_agree_with_the_loops(route, context):
    n_keys = (3, 5) if context else (6, 2)
    config = Config(**{**vars(CONFIG), "softcap": 4.0})
    record = walked(context=context, config=config, route=route, place=CellIndex(1, 3, 1, 0))
    expected = loops_over(TEXTS, context, config, lambda b, i, j: j < n_keys[b] and i < (6, 2)[b])
    cell, attention = record.cell, expected.attention
    assert (cell.sequence, cell.head, cell.query, cell.key, cell.allowed) == (1, 3, 1, 0, True)
    assert (cell.scale, cell.softcap) == (3**-0.5, 4.0)
    for found, wanted in (
        (cell.q, expected.q[1, 3, 1]), (cell.k, expected.k[1, 1, 0]), (cell.v, expected.v[1, 1, 0]),
        (cell.qk, attention.qk[1, 3, 1, 0]), (cell.score, attention.scores[1, 3, 1, 0]),
        (cell.scores_row, attention.scores[1, 3, 1, : n_keys[1]]),
        (cell.pattern_row, attention.pattern[1, 3, 1, : n_keys[1]]),
        (cell.share, attention.pattern[1, 3, 1, 0]), (cell.z, attention.z[1, 3, 1]),
    ):  # fmt: skip
        assert np.shape(found) == np.shape(wanted)
        assert np.abs(np.array(found) - wanted).max() <= 1e-12


def test_a_forbidden_cell_has_no_score_and_the_weight_zero():
    record = walked(config=Config(**{**vars(CONFIG), "causal": True}), place=CellIndex(0, 2, 1, 4))
    assert (record.cell.allowed, record.cell.score, record.cell.share) == (False, None, 0.0)
    assert [score is None for score in record.cell.scores_row] == [False, False, True, True, True, True]
    assert record.cell.pattern_row[2:] == (0.0,) * 4


def test_in_training_the_weight_of_a_cell_is_what_dropout_left():
    config = Config(**{**vars(CONFIG), "train": True, "dropout": 0.5})
    weights, patterns = [], []
    for key in range(6):
        cell = walked(config=config, place=CellIndex(0, 0, 0, key)).cell
        weights.append(cell.share)
        patterns.append(cell.pattern_row[key])
    assert all(weight in (0.0, 2 * pattern) for weight, pattern in zip(weights, patterns, strict=True))
    assert 0 < weights.count(0.0) < 6


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (CellIndex(2, 0, 0, 0), "--sequence 2 is out of range: 0 to 1"),
        (CellIndex(-1, 0, 0, 0), "--sequence -1 is out of range: 0 to 1"),
        (CellIndex(0, 4, 0, 0), "--cell 4,0,0: head 4 is out of range: 0 to 3"),
        (CellIndex(1, 0, 2, 0), "--cell 0,2,0: query 2 is out of range: 0 to 1"),
        (CellIndex(1, 0, 0, 2), "--cell 0,0,2: key 2 is out of range: 0 to 1"),
    ],
)
def test_a_place_outside_the_pattern_is_refused(place, message):
    with pytest.raises(UsageError) as caught:
        walked(place=place)
    assert caught.value.message == message


def test_keys_of_a_place_are_counted_in_the_context():
    assert walked(context=CONTEXT, place=CellIndex(1, 0, 0, 4)).cell.key == 4
    with pytest.raises(UsageError) as caught:
        walked(context=CONTEXT, place=CellIndex(0, 0, 0, 3))
    assert "key 3" in caught.value.message


def test_values_summarise_every_tensor_and_are_absent_unless_requested():
    assert all(step.values is None for step in walked().trace)
    record = walk(
        layer_request(encode(TEXTS, CONFIG), CONFIG, options=RecordingOptions(repeat=1, keep=("out", "pattern"))),
        values=True,
    )
    for site in ("out", "pattern"):
        found, array = steps(record)[site].values, record.arrays[site]
        assert (found.min, found.max) == (array.min(), array.max())
        assert (found.mean, found.std) == pytest.approx((array.mean(), array.std()), abs=1e-14)
        assert found.histogram == tuple(np.histogram(array, bins=16)[0])
        assert (found.n_nan, found.n_inf, found.numbers) == (0, 0, None)
    masked = steps(walked(config=Config(**{**vars(CONFIG), "causal": True}), values=True))["scores"].values
    assert masked.n_inf == 4 * (36 - 21) + 4 * (36 - 3)  # the second sequence: 3 visible cells of 36


def test_by_hand_a_summary_leaves_what_is_not_finite_out():
    found = summarise(torch.tensor([1.0, 3.0, math.nan, math.inf, -math.inf, 5.0, 3.0]))
    assert (found.min, found.max, found.mean, found.std) == (1.0, 5.0, 3.0, math.sqrt(2))
    assert (found.n_nan, found.n_inf) == (1, 2)
    assert (found.histogram[0], found.histogram[8], found.histogram[15], sum(found.histogram)) == (1, 2, 1, 4)
    assert found.numbers == (1.0, 3.0, None, None, None, 5.0, 3.0)
    empty = summarise(torch.full((65,), math.nan))
    assert (empty.min, empty.std, empty.n_nan, sum(empty.histogram), empty.numbers) == (None, None, 65, 0, None)
    assert summarise(torch.arange(3)).mean == 1.0
