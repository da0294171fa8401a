"""The layer around `attend`: against loops, against torch's own layer, and as a module that trains."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch

from mhacli.attention import masks
from mhacli.attention.blocks import (
    MultiHeadAttention,
    drop,
    embed_tokens,
    initialise,
    merge_heads,
    new_embedding,
    split_heads,
)
from mhacli.errors import UsageError
from mhacli.trace import SITES

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


@pytest.mark.parametrize("positions", ["sinusoidal", "none"])
def test_embedded_tokens_agree_with_the_loops_and_padding_is_zeros(positions, normal):
    ids, embedding = [[3, 0, 3, 1, 2], [1, 2, -1, -1, -1]], normal(4, 7)
    seen = {}
    x = embed_tokens(
        torch.tensor(ids), embedding, positions=positions, tap=lambda site, tensor: seen.update({site: tensor})
    )
    expected = oracle.embed(ids, embedding.tolist(), sinusoidal=positions == "sinusoidal")
    assert np.abs(x.numpy() - expected).max() <= 1e-14
    assert (x[1, 2:] == 0).all()
    assert list(seen) == ["ids", "embed", "positions", "x"] if positions == "sinusoidal" else ["ids", "embed", "x"]
    assert seen["x"] is x


def test_sizes_that_do_not_fit_together_are_refused():
    with pytest.raises(UsageError) as caught:
        MultiHeadAttention(64, 5)
    assert caught.value.message == "d_model (64) must be a multiple of n_heads (5)"
    assert caught.value.hint == "try --heads 4 or --d-model 65, or set --d-head"
    with pytest.raises(UsageError) as caught:
        MultiHeadAttention(64, 8, n_kv_heads=3)
    assert caught.value.message == "n_heads (8) must be a multiple of n_kv_heads (3)"
