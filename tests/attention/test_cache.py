"""The KV cache: steps over what is kept give what a run over everything gives, and states are values."""

from __future__ import annotations

import pytest
import torch

from mhacli.attention import masks
from mhacli.attention.layer import CACHES, ConcatCache, MultiHeadAttention, PreallocatedCache
from mhacli.attention.positions import rotate

BATCH, LENGTH, D_INPUT = 2, 7, 9
POSITIONS = ("none", "rope", "rope-interleaved", "alibi")
STEPS = {
    "token by token": [1] * LENGTH,
    "in chunks": [2, 1, 3, 1],
    "after a prefill": [4, 1, 1, 1],
}
PADDED = torch.tensor([4, 7])
OWN = torch.tensor([[0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
"""Places where the first sequence is padded by three on the left."""
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])
OF_DOCUMENTS = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 0]])
BIAS = torch.randn(6, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
BIAS[3, 4, 1], BIAS[:, 5, :3] = -torch.inf, -torch.inf

MASKS = {
    "causal": (masks.causal(), None, None),
    "window": (masks.both(masks.causal(), masks.window(2, 0)), None, None),
    "sink": (masks.both(masks.causal(), masks.either(masks.window(1, 0), masks.leading(1))), None, None),
    "left padding": (
        masks.both(
            masks.causal(),
            masks.padding(PADDED, "left", padded_len=LENGTH),
            masks.padding(PADDED, "left", padded_len=LENGTH, of="query"),
        ),
        OWN,
        None,
    ),
    "left padding with a sink": (
        masks.both(
            masks.causal(),
            masks.either(masks.window(1, 0), masks.leading(1, OWN)),
            masks.padding(PADDED, "left", padded_len=LENGTH),
        ),
        OWN,
        None,
    ),
    "documents": (masks.both(masks.causal(), masks.documents(DOCUMENTS)), OF_DOCUMENTS, None),
    "score bias": (masks.causal(), None, BIAS),
    "documents and score bias": (masks.both(masks.causal(), masks.documents(DOCUMENTS)), OF_DOCUMENTS, BIAS),
}


def layer_of(positions="none", seed=1, **choices):
    sizes = {"n_kv_heads": 2, "d_head": 4, "d_v": 3, "d_input": D_INPUT, "rope_theta": 20.0, "init": "uniform"}
    generator = torch.Generator().manual_seed(seed)
    layer = MultiHeadAttention(5, 6, positions=positions, generator=generator, **sizes | choices)
    return layer.double().eval().requires_grad_(False)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("cache", CACHES)
def test_steps_over_a_cache_give_the_rows_of_the_whole_run(cache, positions, mask, steps, normal):
    layer, x = layer_of(positions), normal(BATCH, LENGTH, D_INPUT, std=2.0)
    allowed, places, bias = MASKS[mask]
    out, pattern = layer(x, allowed=allowed, bias=bias, places=places)
    past, start = CACHES[cache](layer, BATCH, LENGTH), 0
    for n_new in STEPS[steps]:
        end = start + n_new
        own_bias = None if bias is None else bias[:, start:end, :end]
        has_separate_positions = None if places is None else places[:, start:end]
        new, shares, past = layer.decode(
            x[:, start:end], past, allowed=masks.shifted(allowed, start), bias=own_bias, places=has_separate_positions
        )
        assert (new - out[:, start:end]).abs().max() <= 1e-12
        assert (shares - pattern[:, :, start:end, :end]).abs().max() <= 1e-12
        assert (pattern[:, :, start:end, end:] == 0.0).all()
        assert past.length == end
        start = end


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("n_kv_heads", "softcap"), [(1, None), (6, 1.5)])
def test_a_cache_serves_every_count_of_kv_heads_with_and_without_softcap(cache, positions, n_kv_heads, softcap, normal):
    layer = layer_of(positions, n_kv_heads=n_kv_heads, softcap=softcap, scale=2.0, out_proj=False)
    x = normal(BATCH, LENGTH, D_INPUT)
    out, _ = layer(x, allowed=masks.causal())
    past = CACHES[cache](layer, BATCH, LENGTH)
    assert past.k.shape == (BATCH, n_kv_heads, 0, 4)
    assert past.v.shape == (BATCH, n_kv_heads, 0, 3)
    for t in range(LENGTH):
        new, _, past = layer.decode(x[:, t : t + 1], past)  # a single new token needs no mask
        assert (new - out[:, t : t + 1]).abs().max() <= 1e-12
    assert past.k.shape == (BATCH, n_kv_heads, LENGTH, 4)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("positions", ["rope", "rope-interleaved"])
def test_the_cache_keeps_keys_that_are_turned_already_and_plain_values(cache, positions, normal):
    layer, x = layer_of(positions), normal(BATCH, LENGTH, D_INPUT)
    seen = {}
    layer(x, allowed=masks.causal(), tap=lambda site, tensor, **_: seen.update({site: tensor}))
    past = CACHES[cache](layer, BATCH, LENGTH)
    for t in range(LENGTH):
        past = layer.decode(x[:, t : t + 1], past)[2]
    turned = rotate(seen["k"], torch.arange(LENGTH), theta=20.0, interleaved=positions != "rope")
    assert (past.k - turned).abs().max() <= 1e-13
    assert (past.k[:, :, 1:] - seen["k"][:, :, 1:]).abs().max() > 0.1
    assert (past.v - seen["v"]).abs().max() <= 1e-13


def filled(cache, layer, rows):
    """A state with the first rows in it."""
    past = CACHES[cache](layer, BATCH, LENGTH)
    return layer.decode(rows, past, allowed=masks.causal())[2] if rows.shape[1] else past


@pytest.mark.parametrize("cache", CACHES)
def test_the_state_that_goes_in_stays_as_it_is(cache, normal):
    layer, x = layer_of("rope"), normal(BATCH, LENGTH, D_INPUT)
    past = filled(cache, layer, x[:, :3])
    k, v = past.k.clone(), past.v.clone()
    first, shares, _ = layer.decode(x[:, 3:4], past)
    again, same_shares, _ = layer.decode(x[:, 3:4], past)
    assert (past.length, past.k.shape[2]) == (3, 3)
    assert torch.equal(past.k, k)
    assert torch.equal(past.v, v)
    assert torch.equal(first, again)
    assert torch.equal(shares, same_shares)


def test_an_older_state_of_a_concat_cache_stays_valid_when_two_go_on_from_it(normal):
    layer, x = layer_of(), normal(BATCH, LENGTH, D_INPUT)
    past = filled("concat", layer, x[:, :3])
    one, other = (layer.decode(x[:, t : t + 1], past)[2] for t in (3, 5))
    assert torch.equal(one.k[:, :, :3], other.k[:, :, :3])
    expected = layer(torch.cat([x[:, :3], x[:, 3:4]], dim=1), allowed=masks.causal())[0][:, -1:]
    again = ConcatCache(one.k[:, :, :3], one.v[:, :, :3])
    assert (layer.decode(x[:, 3:4], again)[0] - expected).abs().max() <= 1e-12
    assert not torch.equal(one.k, other.k)


def test_two_states_from_the_same_preallocated_one_share_their_room(normal):
    layer, x = layer_of(), normal(BATCH, LENGTH, D_INPUT)
    past = filled("preallocated", layer, x[:, :3])
    one = layer.decode(x[:, 3:4], past)[2]
    of_one = one.k.clone()
    other = layer.decode(x[:, 5:6], past)[2]
    assert (one.length, other.length, past.length) == (4, 4, 3)
    assert one.k.data_ptr() == other.k.data_ptr() == past.k_buffer.data_ptr()
    assert torch.equal(one.k, other.k)  # the second overwrote what the first had written
    assert not torch.equal(one.k, of_one)
    assert torch.equal(one.k[:, :, :3], of_one[:, :, :3])


def test_a_preallocated_cache_writes_what_is_new_and_moves_nothing_else(normal):
    layer, x = layer_of(), normal(BATCH, LENGTH, D_INPUT)
    past = filled("preallocated", layer, x[:, :3])
    buffer = past.k_buffer.clone()
    after = layer.decode(x[:, 3:5], past, allowed=masks.causal(3))[2]
    changed = (after.k_buffer != buffer).any(dim=3).any(dim=1).any(dim=0)
    assert changed.tolist() == [False, False, False, True, True, False, False]
    assert after.k_buffer.untyped_storage().nbytes() == BATCH * 2 * LENGTH * 4 * 8
    assert after.v_buffer.untyped_storage().nbytes() == BATCH * 2 * LENGTH * 3 * 8


@pytest.mark.parametrize(("steps", "end", "capacity"), [([4], 4, 3), ([3, 1], 4, 3), ([1, 1, 2], 4, 3), ([1], 1, 0)])
def test_more_tokens_than_there_is_room_for_are_refused_with_both_numbers(steps, end, capacity, normal):
    layer, x = layer_of(), normal(BATCH, LENGTH, D_INPUT)
    past = PreallocatedCache.empty(layer, BATCH, capacity)
    for n_new in steps[:-1]:
        past = layer.decode(x[:, :n_new], past)[2]
    kept = past.k.clone()
    with pytest.raises(ValueError) as caught:
        layer.decode(x[:, : steps[-1]], past)
    assert str(caught.value) == f"the cache has room for {capacity} tokens, not {end}"
    assert torch.equal(past.k, kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", CACHES)
def test_an_empty_cache_has_the_dtype_of_the_layer_and_no_tokens(cache, dtype):
    past = CACHES[cache](layer_of().to(dtype), 3, 5)
    assert (past.length, past.k.dtype, past.v.dtype) == (0, dtype, dtype)
    assert past.k.shape == (3, 2, 0, 4)
    assert past.v.shape == (3, 2, 0, 3)


@pytest.mark.parametrize("positions", POSITIONS)
def test_places_follow_the_past_where_nobody_says_them(positions, normal):
    layer, x = layer_of(positions), normal(BATCH, LENGTH, D_INPUT)
    past = filled("concat", layer, x[:, :3])
    said = layer.decode(x[:, 3:5], past, allowed=masks.causal(3), places=torch.tensor([3, 4]))
    unsaid = layer.decode(x[:, 3:5], past, allowed=masks.causal(3))
    assert torch.equal(said[0], unsaid[0])
    assert torch.equal(said[2].k, unsaid[2].k)


def test_only_the_new_rows_are_projected(normal):
    layer, x = layer_of("rope"), normal(BATCH, LENGTH, D_INPUT)
    past = filled("preallocated", layer, x[:, :4])
    shapes = {}
    layer.decode(
        x[:, 4:6], past, allowed=masks.causal(4), tap=lambda site, tensor, **_: shapes.update({site: tensor.shape})
    )
    assert list(shapes) == [
        "q_proj", "q", "k_proj", "k", "v_proj", "v", "q_rot", "k_rot", "qk", "scores", "pattern", "z", "concat", "out",
    ]  # fmt: skip
    assert shapes["q_proj"] == (BATCH, 2, 24)
    assert shapes["k_rot"] == (BATCH, 2, 2, 4)
    assert shapes["qk"] == (BATCH, 6, 2, 6)
    assert shapes["out"] == (BATCH, 2, 5)
