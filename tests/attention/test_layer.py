"""The layer around `attend`: against loops, against torch's own layer, and as a module that trains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import oracle

from mhacli.attention import masks
from mhacli.attention.layer import (
    CACHES,
    MultiHeadAttention,
    added_positions,
    drop,
    embed_tokens,
    initialise,
    merge_heads,
    new_embedding,
    place_rows,
    split_heads,
)
from mhacli.errors import UsageError
from mhacli.spec.sites import SITES

GROUPED = {"d_model": 10, "n_heads": 9, "n_kv_heads": 3, "d_head": 5, "d_v": 2}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def made(*, bias=True, seed=0, **sizes):
    """A float64 layer whose every number, biases too, is random and not small."""
    sizes = {**GROUPED, **sizes}
    layer = MultiHeadAttention(sizes.pop("d_model"), sizes.pop("n_heads"), bias=bias, generator=seeded(), **sizes)
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in layer.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer.eval()


def weights_of(layer):
    return {name: tensor.tolist() for name, tensor in layer.state_dict().items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out_proj", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_the_layer_agrees_with_loops_over_its_formula(bias, out_proj, cross, normal):
    layer = made(bias=bias, out_proj=out_proj, softcap=3.0)
    x, context = normal(2, 5, 10), normal(2, 7, 10) if cross else None
    seen = {}
    out, pattern = layer(
        x, context, allowed=masks.causal(1), tap=lambda site, tensor, **_: seen.update({site: tensor.detach()})
    )
    expected = oracle.layer(
        x.tolist(), weights_of(layer), n_heads=9, n_kv_heads=3, softcap=3.0,
        context=None if context is None else context.tolist(),
        allowed=oracle.full(lambda b, i, j: j <= i + 1, 2, 9, 5, 7 if cross else 5),
    )  # fmt: skip
    for found, wanted in (
        (out, expected.out), (pattern, expected.attention.pattern), (seen["q"], expected.q), (seen["k"], expected.k),
        (seen["v"], expected.v), (seen["z"], expected.attention.z), (seen["concat"], expected.concat),
    ):  # fmt: skip
        assert found.shape == wanted.shape
        assert np.abs(found.detach().numpy() - wanted).max() <= 1e-12 * max(1.0, np.abs(wanted).max())
    assert list(seen) == [site for site in SITES if site in seen]


def test_values_may_come_from_other_rows_than_keys(normal):
    layer = made()
    query, key, value = normal(2, 5, 10), normal(2, 7, 10), normal(2, 7, 10)
    weights = weights_of(layer)
    q, k, v = (
        oracle.cut(oracle.linear(rows.tolist(), weights, name), n)
        for rows, name, n in ((query, "q_proj", 9), (key, "k_proj", 3), (value, "v_proj", 3))
    )
    expected = oracle.linear(oracle.joined(oracle.attention(q, k, v).z), weights, "o_proj")
    assert np.abs(layer(query, key, value)[0].detach().numpy() - expected).max() <= 1e-11


@pytest.mark.parametrize("cross", [True, False])
def test_the_layer_agrees_with_the_one_of_torch_holding_the_same_weights(cross, normal):
    ours = made(d_model=21, n_heads=3, n_kv_heads=3, d_head=7, d_v=7)
    theirs = torch.nn.MultiheadAttention(21, 3, batch_first=True).double().train()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
        theirs.out_proj.bias.copy_(ours.o_proj.bias)
    x = normal(2, 5, 21)
    rows = normal(2, 11, 21) if cross else x
    ignored = torch.ones(5, rows.shape[1], dtype=torch.bool).triu(1)
    out, pattern = ours(x, rows, allowed=masks.causal())
    expected, shares = theirs(x, rows, rows, attn_mask=ignored, average_attn_weights=False)
    assert (out - expected).abs().max() <= 1e-11
    assert (pattern - shares).abs().max() <= 1e-12
    assert ours.o_proj.bias.abs().min() > 0


def test_parameters_have_the_names_and_shapes_of_the_file_format():
    assert {name: tuple(p.shape) for name, p in MultiHeadAttention(**GROUPED).named_parameters()} == {
        "q_proj.weight": (45, 10), "q_proj.bias": (45,),
        "k_proj.weight": (15, 10), "k_proj.bias": (15,),
        "v_proj.weight": (6, 10), "v_proj.bias": (6,),
        "o_proj.weight": (10, 18), "o_proj.bias": (10,),
    }  # fmt: skip
    bare = MultiHeadAttention(12, 3, bias=False, out_proj=False)
    assert {name: tuple(p.shape) for name, p in bare.named_parameters()} == {
        "q_proj.weight": (12, 12),
        "k_proj.weight": (12, 12),
        "v_proj.weight": (12, 12),
    }


def test_a_head_is_a_block_of_neighbouring_columns():
    rows = torch.arange(12.0).view(1, 2, 6)
    assert split_heads(rows, 3).tolist() == [[[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]]


def test_splitting_and_merging_heads_undo_each_other(normal):
    rows = normal(2, 5, 21)
    heads = split_heads(rows, 3)
    assert heads.shape == (2, 3, 5, 7)
    assert heads.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    assert torch.equal(merge_heads(heads), rows)
    z = normal(2, 3, 5, 7)
    assert torch.equal(split_heads(merge_heads(z), 3), z)


def test_one_step_of_training_moves_every_parameter_and_lowers_the_loss(normal):
    layer = made().train()
    x, target = normal(2, 5, 10), normal(2, 5, 10)
    optimiser = torch.optim.SGD(layer.parameters(), lr=1e-4)
    before = (layer(x)[0] - target).square().mean()
    before.backward()
    for name, parameter in layer.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        if name != "k_proj.bias":  # it adds the same to every score of a row, so that its gradient is 0
            assert parameter.grad.abs().max() > 1e-9, name
    assert layer.k_proj.bias.grad.abs().max() <= 1e-12
    optimiser.step()
    assert (layer(x)[0] - target).square().mean() < before


def test_gradients_agree_with_small_differences(normal):
    layer = made(d_model=3, n_heads=2, n_kv_heads=1, d_head=2, d_v=1)
    x = normal(1, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: layer(rows, allowed=masks.causal())[0], (x,))


def test_dropout_acts_in_training_only_and_leaves_the_returned_pattern_alone(normal):
    layer = made(dropout=0.5)
    x = normal(2, 5, 10)
    rested, pattern = layer(x)
    assert torch.equal(rested, layer(x)[0])
    layer.train()
    layer.generator = seeded(1)
    seen = {}
    trained, still = layer(x, tap=lambda site, tensor, **_: seen.update({site: tensor}))
    assert torch.equal(still, pattern)
    assert not torch.equal(trained, rested)
    dropped = seen["dropped"]
    assert ((dropped == 0) | (dropped == 2 * pattern)).all()
    assert 0 < (dropped == 0).sum() < dropped.numel()
    v = torch.stack([seen["v"][:, h // 3] for h in range(9)], dim=1)
    assert (seen["z"] - dropped @ v).abs().max() <= 1e-12
    assert torch.equal(layer.eval()(x)[0], rested)


def test_dropout_with_the_same_generator_state_repeats_itself(normal):
    layer, x = made(dropout=0.3).train(), normal(2, 5, 10)
    outs = []
    for seed in (7, 7, 8):
        layer.generator = seeded(seed)
        outs.append(layer(x)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_dropout_sets_the_stated_fraction_to_zero_and_keeps_the_mean():
    pattern = torch.ones(2, 10, 100, 100)
    dropped = drop(pattern, 0.3, seeded())
    assert (dropped == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert dropped.double().mean().item() == pytest.approx(1.0, abs=0.01)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])


def linear_like(d_in, d_out, init, seed=0):
    linear = torch.nn.Linear(d_in, d_out, dtype=torch.float64)
    initialise(linear, init, seeded(seed))
    return linear.weight.detach(), linear.bias.detach()


def test_xavier_fills_its_bounds_and_leaves_biases_zero():
    weight, bias = linear_like(50, 100, "xavier")
    bound = math.sqrt(6 / 150)
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert abs(weight.mean().item()) < 0.05 * bound
    assert (bias == 0).all()


def test_normal_weights_deviate_by_a_fiftieth_and_have_zero_biases():
    weight, bias = linear_like(50, 100, "normal")
    assert weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert weight.abs().max() > 0.05
    assert (bias == 0).all()


def test_uniform_fills_the_bounds_of_torchs_linear_with_weights_and_biases():
    weight, bias = linear_like(50, 1000, "uniform")
    bound = 1 / math.sqrt(50)
    for numbers in (weight, bias):
        assert 0.99 * bound < numbers.abs().max() <= bound
        assert numbers.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("init", ["xavier", "normal", "uniform"])
def test_initial_weights_depend_on_the_seed_alone(init):
    first, again, other = (linear_like(7, 5, init, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_embeddings_are_standard_normal_numbers_from_the_generator():
    rows = new_embedding(500, 20, seeded())
    assert (rows.dtype, rows.shape) == (torch.float64, (500, 20))
    assert rows.mean().item() == pytest.approx(0.0, abs=0.03)
    assert rows.std().item() == pytest.approx(1.0, abs=0.03)
    assert torch.equal(rows, new_embedding(500, 20, seeded()))


def test_making_and_running_a_layer_leaves_the_global_generator_alone(normal):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    layer = MultiHeadAttention(12, 3, dropout=0.5, init="uniform", generator=seeded()).train()
    layer(normal(2, 5, 12, dtype=torch.float32))
    new_embedding(5, 12, seeded())
    assert torch.equal(torch.random.get_rng_state(), state)


def placed(ids, embedding, places, *, positions, table=None):
    """Embedded tokens with their positions, as a run makes them, and what was seen on the way."""
    seen = {}

    def tap(site, tensor):
        seen[site] = tensor

    ids = torch.tensor(ids)
    rows = embed_tokens(ids, embedding, tap=tap)
    added = added_positions(places, embedding.shape[1], positions=positions, dtype=embedding.dtype, table=table)
    return place_rows(rows, added, real=ids >= 0, tap=tap), seen


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope", "rope-interleaved", "alibi", "none"])
def test_embedded_tokens_agree_with_the_loops_and_padding_is_zeros(positions, normal):
    ids, embedding, table = [[3, 0, 3, 1, 2], [1, 2, -1, -1, -1]], normal(4, 7), normal(9, 7)
    x, seen = placed(ids, embedding, torch.arange(5), positions=positions, table=table)
    places = [list(range(5))] * 2
    expected = oracle.placed(ids, places, embedding.tolist(), positions=positions, table=table.tolist())
    assert np.abs(x.numpy() - expected).max() <= 1e-14
    assert (x[1, 2:] == 0).all()
    assert (seen["embed"][1, 2:] == 0).all()
    added = ["positions"] if positions in ("sinusoidal", "learned") else []
    assert list(seen) == ["ids", "embed", *added, "x"]
    assert seen["x"] is x
    if added:
        assert seen["positions"].shape == (5, 7)
    else:
        assert x is seen["embed"]


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_sequences_that_count_their_own_places_get_the_rows_of_those(positions, normal):
    ids, embedding, table = [[3, 0, 3, 1, 2], [-1, -1, -1, 1, 2]], normal(4, 7), normal(9, 7)
    places = [[0, 1, 0, 1, 2], [0, 0, 0, 0, 1]]
    x, seen = placed(ids, embedding, torch.tensor(places), positions=positions, table=table)
    expected = oracle.placed(ids, places, embedding.tolist(), positions=positions, table=table.tolist())
    assert np.abs(x.numpy() - expected).max() <= 1e-14
    assert seen["positions"].shape == (2, 5, 7)
    assert (x[1, :3] == 0).all()


TURNING = {"rope": False, "rope-interleaved": True}
PLACES = [[0, 1, 2, 3, 4], [0, 0, 1, 2, 9]]


@pytest.mark.parametrize("positions", ["rope", "rope-interleaved", "alibi"])
@pytest.mark.parametrize("n_context", [None, 7])
@pytest.mark.parametrize("has_separate_positions", [True, False])
def test_positions_inside_the_layer_agree_with_loops_over_their_formula(
    positions, n_context, has_separate_positions, normal
):
    layer = made(d_head=6, positions=positions, rope_theta=50.0, softcap=3.0)
    x, context = normal(2, 5, 10), None if n_context is None else normal(2, n_context, 10)
    q_places = PLACES if has_separate_positions else [list(range(5))] * 2
    k_places = q_places if context is None else [list(range(n_context))] * 2
    seen, costs = {}, oracle.distances(9, q_places, k_places) if positions == "alibi" else None
    out, pattern = layer(
        x, context, places=torch.tensor(PLACES) if has_separate_positions else None,
        tap=lambda site, tensor, **_: seen.update({site: tensor.detach()}),
    )  # fmt: skip

    def turn(heads):
        its_places = q_places if heads.shape[1] == 9 else k_places
        return oracle.rotated(heads, its_places, theta=50.0, interleaved=TURNING[positions])

    expected = oracle.layer(
        x.tolist(), weights_of(layer), n_heads=9, n_kv_heads=3, softcap=3.0, bias=costs,
        context=None if context is None else context.tolist(), turn=turn if positions in TURNING else None,
    )  # fmt: skip
    checks = [(out, expected.out), (pattern, expected.attention.pattern), (seen["q"], expected.q)]
    checks += [(seen["k"], expected.k), (seen["qk"], expected.attention.qk)]
    if positions in TURNING:
        checks += [(seen["q_rot"], turn(expected.q)), (seen["k_rot"], turn(expected.k))]
    else:
        checks += [(seen["alibi"].expand(2, 9, 5, n_context or 5), costs)]
        assert seen["alibi"].ndim == (4 if has_separate_positions else 3)
    for found, wanted in checks:
        assert found.shape == wanted.shape
        assert np.abs(found.detach().numpy() - wanted).max() <= 1e-11 * max(1.0, np.abs(wanted).max())
    assert list(seen) == [site for site in SITES if site in seen]
    assert ("q_rot" in seen, "alibi" in seen) == (positions in TURNING, positions == "alibi")


@pytest.mark.parametrize("shape", [(5, 5), (9, 5, 5), (2, 1, 1, 5), (2, 9, 5, 5)])
@pytest.mark.parametrize("positions", ["none", "alibi"])
def test_a_bias_is_added_to_the_scores_and_may_forbid_cells(shape, positions, normal):
    layer, x, bias = made(positions=positions), normal(2, 5, 10), normal(*shape)
    bias[..., 2] = -torch.inf
    seen = {}
    out, pattern = layer(x, bias=bias, tap=lambda site, tensor, **_: seen.update({site: tensor.detach()}))
    whole = bias.expand(2, 9, 5, 5)
    costs = oracle.distances(9, [range(5)] * 2, [range(5)] * 2) if positions == "alibi" else 0.0
    expected = oracle.layer(
        x.tolist(), weights_of(layer), n_heads=9, n_kv_heads=3, bias=(whole.numpy() + costs).tolist()
    )
    assert (pattern[..., 2] == 0).all()
    assert np.abs(pattern.detach().numpy() - expected.attention.pattern).max() <= 1e-12
    assert np.abs(out.detach().numpy() - expected.out).max() <= 1e-11 * max(1.0, np.abs(expected.out).max())
    assert torch.equal(seen["bias"], whole)
    assert list(seen) == [site for site in SITES if site in seen]


def test_a_bias_of_nothing_but_minus_infinity_leaves_rows_of_zeros(normal):
    bias = torch.zeros(5, 5, dtype=torch.float64)
    bias[3] = -torch.inf
    out, pattern = made(out_proj=False)(normal(2, 5, 10), bias=bias)
    assert (pattern[:, :, 3] == 0).all()
    assert (out[:, 3] == 0).all()
    assert (pattern[:, :, [0, 1, 2, 4]].sum(-1) - 1).abs().max() <= 1e-14


@pytest.mark.parametrize("positions", ["rope", "rope-interleaved", "alibi"])
def test_gradients_through_positions_agree_with_small_differences(positions, normal):
    layer = made(d_model=3, n_heads=2, n_kv_heads=1, d_head=2, d_v=1, positions=positions)
    x, bias = normal(1, 3, 3).requires_grad_(), normal(3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows, b: layer(rows, allowed=masks.causal(), bias=b)[0], (x, bias))


def test_rows_of_another_width_are_projected_into_the_layer(normal):
    layer = made(d_input=7)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters() if name.endswith("weight")} == {
        "q_proj.weight": (45, 7), "k_proj.weight": (15, 7), "v_proj.weight": (6, 7), "o_proj.weight": (10, 18),
    }  # fmt: skip
    x = normal(2, 5, 7)
    expected = oracle.layer(x.tolist(), weights_of(layer), n_heads=9, n_kv_heads=3)
    assert np.abs(layer(x)[0].detach().numpy() - expected.out).max() <= 1e-11


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("positions", ["none", "rope", "rope-interleaved", "alibi"])
@pytest.mark.parametrize("prompt_len", [0, 3])
def test_decoding_token_by_token_agrees_with_the_whole_at_once(cache, positions, prompt_len, normal):
    layer, x, bias = made(d_head=6, positions=positions), normal(2, 5, 10), normal(9, 5, 5)
    expected, shares = layer(x, allowed=masks.causal(), bias=bias)
    past, step = CACHES[cache](layer, 2, 5), prompt_len or 1
    for start in (0, *range(step, 5)):
        end = step if start == 0 else start + 1
        out, pattern, past = layer.decode(
            x[:, start:end], past, allowed=masks.causal(start), bias=bias[:, start:end, :end]
        )
        assert past.length == end
        assert (out - expected[:, start:end]).abs().max() <= 1e-11
        assert (pattern - shares[:, :, start:end, :end]).abs().max() <= 1e-12


def test_sizes_that_do_not_fit_together_are_refused():
    with pytest.raises(UsageError) as caught:
        MultiHeadAttention(64, 5)
    assert "--heads 5" in caught.value.message
    with pytest.raises(UsageError) as caught:
        MultiHeadAttention(64, 8, n_kv_heads=3)
    assert "--kv-heads 3" in caught.value.message
    with pytest.raises(UsageError) as caught:
        MultiHeadAttention(10, 2, positions="rope")
    assert "d_head 5" in caught.value.message
