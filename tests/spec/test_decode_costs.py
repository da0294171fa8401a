"""The cost of a decoding step: by hand, against torch's counter, and against a count token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhacli.attention.layer import CACHES
from mhacli.attention.layer_file import new_attention
from mhacli.compute.layer.decode import interpolated_sum
from mhacli.spec.config import Config
from mhacli.spec.facts import (
    CacheKind,
    crossing_len,
    moved_bytes,
    projection_parameters,
    step_flops,
    token_bytes,
    total_moved_bytes,
    weight_bytes,
)

KINDS = get_args(CacheKind)
SMALL = Config(d_model=5, n_heads=6, n_kv_heads=2, d_head=4, d_v=3, d_input=9, dtype="float64").resolved()
LAYERS = {
    "all different": SMALL,
    "no biases": Config(d_model=5, n_heads=6, n_kv_heads=2, d_head=4, d_v=3, d_input=9, bias=False).resolved(),
    "no output projection": Config(d_model=5, n_heads=3, d_head=4, d_v=2, out_proj=False, dtype="float16").resolved(),
    "one kv head": Config(d_model=12, n_heads=4, n_kv_heads=1, dtype="bfloat16").resolved(),
}


def test_by_hand_the_weights_and_tokens_of_a_small_layer():
    assert projection_parameters(SMALL) == 9 * 24 + 24 + 9 * 8 + 8 + 9 * 6 + 6 + 18 * 5 + 5
    assert weight_bytes(SMALL) == 475 * 8
    assert token_bytes(SMALL) == 2 * (4 + 3) * 8
    assert token_bytes(SMALL, SMALL.n_heads) == 6 * (4 + 3) * 8
    assert crossing_len(SMALL, 1) == 475 / 14
    assert crossing_len(SMALL, 3) == pytest.approx(475 / 42)


def test_by_hand_the_operations_of_a_step():
    products, biases, cell = 9 * 24 + 9 * 8 + 9 * 6 + 18 * 5, 24 + 8 + 6 + 5, 2 * 6 * (4 + 3)
    cached = 2 * (2 * products + biases + cell * 10)
    assert step_flops(SMALL, batch=2, n_new=1, length=10, cache="concat") == cached
    assert step_flops(SMALL, batch=2, n_new=1, length=10, cache="preallocated") == cached
    assert step_flops(SMALL, batch=2, n_new=1, length=10, cache="none") == 10 * cached
    assert step_flops(SMALL, batch=2, n_new=10, length=10, cache="concat") == 10 * cached


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_and_bytes_are_those_of_a_real_layer(name):
    config = LAYERS[name]
    layer = new_attention(config)
    assert projection_parameters(config) == sum(p.numel() for p in layer.parameters())
    assert weight_bytes(config) == sum(p.numel() * p.element_size() for p in layer.parameters())


def counted_by_torch(layer, rows, cache, n_new):
    """What torch counts while the layer computes the step of the last `n_new` rows. It leaves biases out."""
    with torch.no_grad():
        if cache == "none":
            with FlopCounterMode(display=False) as counter:
                layer(rows)
        else:
            past = CACHES[cache](layer, rows.shape[0], rows.shape[1])
            if rows.shape[1] > n_new:
                past = layer.decode(rows[:, :-n_new], past)[2]
            with FlopCounterMode(display=False) as counter:
                layer.decode(rows[:, -n_new:], past)
    return counter.get_total_flops()


@pytest.mark.parametrize("widths", [(12, 2, 2, 12), (5, 4, 3, 9), (7, 1, 5, 2)])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(1, 1), (6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("out_proj", [True, False], ids=["projected", "side by side"])
@pytest.mark.parametrize("cache", KINDS)
def test_operations_without_the_biases_are_what_torch_counts(widths, n_heads, n_kv_heads, out_proj, cache):
    d_model, d_head, d_v, d_input = widths
    sizes = Config(d_model=d_model, d_head=d_head, d_v=d_v, d_input=d_input, n_heads=n_heads, n_kv_heads=n_kv_heads)
    for has_bias in (True, False):
        config = replace(sizes, out_proj=out_proj, bias=has_bias).resolved()
        layer = new_attention(config)
        added = sum(linear.out_features for linear in layer.children()) if has_bias else 0
        for batch, n_new, length in ((1, 1, 1), (3, 1, 6), (2, 4, 4), (2, 2, 7)):
            found = step_flops(config, batch=batch, n_new=n_new, length=length, cache=cache)
            n_rows = batch * (length if cache == "none" else n_new)
            rows = torch.zeros(batch, length, d_input)
            assert found - n_rows * added == counted_by_torch(layer, rows, cache, n_new)


def counted_tokens(cache, n_new, length):
    """How many tokens' keys and values one step reads or writes, token by token."""
    moved, old = 0, length - n_new
    if cache == "concat":
        moved += old  # read, to be copied
        moved += old  # written again
    moved += length if cache == "none" else n_new  # what is computed is written
    moved += length  # all is read by the queries
    return moved


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("cache", KINDS)
def test_moved_bytes_agree_with_a_count_and_their_sum_with_the_formula_for_all_steps(name, cache):
    config = LAYERS[name]
    for length in (1, 2, 7, 30):
        for n_new in {1, length}:
            found = moved_bytes(config, batch=3, n_new=n_new, length=length, cache=cache)
            assert found == 3 * counted_tokens(cache, n_new, length) * token_bytes(config)
        steps = [moved_bytes(config, batch=3, n_new=1, length=t, cache=cache) for t in range(1, length + 1)]
        assert total_moved_bytes(config, batch=3, length=length, cache=cache) == sum(steps)


def test_at_the_crossing_a_step_reads_as_many_bytes_of_keys_and_values_as_of_weights():
    config = LAYERS["one kv head"]
    length = crossing_len(config, 2)
    assert 2 * length * token_bytes(config) == pytest.approx(weight_bytes(config))


@pytest.mark.parametrize(
    ("known", "total"),
    [
        ({1: 1.0, 4: 4.0}, 10.0),
        ({5: 2.5}, 2.5),
        ({1: 3.0, 2: 1.0}, 4.0),
        ({1: 0.0, 3: 4.0, 5: 0.0}, 8.0),  # 0 2 4 2 0
        ({4: 8.0, 1: 2.0}, 20.0),
    ],
)
def test_by_hand_the_sum_over_lengths_between_those_that_were_timed(known, total):
    assert interpolated_sum(known) == pytest.approx(total, abs=1e-12)


def test_the_interpolated_sum_agrees_with_adding_up_every_length():
    known = {1: 0.25, 4: 7.0, 5: 1.0, 11: 2.5, 64: 100.0}
    total = 0.0
    for length in range(1, 65):
        left = max(point for point in known if point <= length)
        right = min(point for point in known if point >= length)
        part = 0.0 if left == right else (length - left) / (right - left)
        total += known[left] + part * (known[right] - known[left])
    assert interpolated_sum(known) == pytest.approx(total, rel=1e-12)
