"""What a step of decoding costs: by hand, and against loops that do the work and count."""

from __future__ import annotations

from typing import get_args

import pytest

from mhacli import costs
from mhacli.attention.weights import new_attention
from mhacli.config import Config
from mhacli.costs import CacheKind
from mhacli.studies.ways import interpolated_sum

KINDS = get_args(CacheKind)
SMALL = Config(d_model=5, n_heads=6, n_kv_heads=2, d_head=4, d_v=3, d_input=9, dtype="float64").resolved()
LAYERS = {
    "all different": SMALL,
    "no biases": Config(d_model=5, n_heads=6, n_kv_heads=2, d_head=4, d_v=3, d_input=9, bias=False).resolved(),
    "no output projection": Config(d_model=5, n_heads=3, d_head=4, d_v=2, out_proj=False, dtype="float16").resolved(),
    "one kv head": Config(d_model=12, n_heads=4, n_kv_heads=1, dtype="bfloat16").resolved(),
}


def test_by_hand_the_weights_and_tokens_of_a_small_layer():
    assert costs.projection_parameters(SMALL) == 9 * 24 + 24 + 9 * 8 + 8 + 9 * 6 + 6 + 18 * 5 + 5
    assert costs.weight_bytes(SMALL) == 475 * 8
    assert costs.token_bytes(SMALL) == 2 * (4 + 3) * 8
    assert costs.token_bytes(SMALL, SMALL.n_heads) == 6 * (4 + 3) * 8
    assert costs.crossing(SMALL, 1) == 475 / 14
    assert costs.crossing(SMALL, 3) == pytest.approx(475 / 42)


def test_by_hand_the_operations_of_a_step():
    products, biases, cell = 9 * 24 + 9 * 8 + 9 * 6 + 18 * 5, 24 + 8 + 6 + 5, 2 * 6 * (4 + 3)
    cached = 2 * (2 * products + biases + cell * 10)
    assert costs.step_flops(SMALL, batch=2, n_new=1, length=10, cache="concat") == cached
    assert costs.step_flops(SMALL, batch=2, n_new=1, length=10, cache="preallocated") == cached
    assert costs.step_flops(SMALL, batch=2, n_new=1, length=10, cache="none") == 10 * cached
    assert costs.step_flops(SMALL, batch=2, n_new=10, length=10, cache="concat") == 10 * cached


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_and_bytes_are_those_of_a_real_layer(name):
    config = LAYERS[name]
    layer = new_attention(config)
    assert costs.projection_parameters(config) == sum(p.numel() for p in layer.parameters())
    assert costs.weight_bytes(config) == sum(p.numel() * p.element_size() for p in layer.parameters())


def counted_operations(config, batch, rows, length):
    """Two for each multiplication with a weight, one for each bias, two for each number of a query, key and value met."""
    count = 0
    widths = [("q", config.d_input, config.n_heads * config.d_head)]
    widths += [("k", config.d_input, config.n_kv_heads * config.d_head)]
    widths += [("v", config.d_input, config.n_kv_heads * config.d_v)]
    widths += [("o", config.n_heads * config.d_v, config.d_model)] if config.out_proj else []
    for _ in range(batch * rows):
        for _, n_in, n_out in widths:
            for _ in range(n_out):
                count += 2 * n_in
                count += 1 if config.bias else 0
        for _ in range(config.n_heads * length):
            count += 2 * config.d_head
            count += 2 * config.d_v
    return count


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("n_new", "length"), [(1, 1), (1, 6), (4, 4), (2, 7)])
def test_operations_agree_with_loops_that_count(name, n_new, length):
    for cache in KINDS:
        found = costs.step_flops(LAYERS[name], batch=3, n_new=n_new, length=length, cache=cache)
        rows = length if cache == "none" else n_new
        assert found == counted_operations(LAYERS[name], 3, rows, length)


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
            found = costs.moved_bytes(config, batch=3, n_new=n_new, length=length, cache=cache)
            assert found == 3 * counted_tokens(cache, n_new, length) * costs.token_bytes(config)
        steps = [costs.moved_bytes(config, batch=3, n_new=1, length=t, cache=cache) for t in range(1, length + 1)]
        assert costs.total_moved_bytes(config, batch=3, length=length, cache=cache) == sum(steps)


def test_at_the_crossing_a_step_reads_as_many_bytes_of_keys_and_values_as_of_weights():
    config = LAYERS["one kv head"]
    length = costs.crossing(config, 2)
    assert 2 * length * costs.token_bytes(config) == pytest.approx(costs.weight_bytes(config))


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
