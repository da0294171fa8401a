"""The reference stages against loops over the formula, against `attend`, and against numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support import oracle
from torch import nn

from mhacli.attention import attend, masks
from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.heads import split_flat
from mhacli.attention.mistakes.stages import (
    RIGHT,
    Projection,
    Projections,
    ReferenceInputs,
    ReferenceLayer,
    Stages,
    run,
)

BATCH, D_IN, D_CONTEXT = 2, 5, 7
SITES = ["q_proj", "k_proj", "v_proj", "q", "k", "v", "qk", "scaled", "scores", "pattern", "z", "concat", "out"]
EXACT = 1e-12


class Shape(NamedTuple):
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_v: int
    q_len: int
    k_len: int


SHAPES = {
    "one head": Shape(1, 1, 3, 2, 4, 4),
    "three heads of their own": Shape(3, 3, 4, 4, 5, 5),
    "values of another width": Shape(3, 3, 4, 2, 5, 5),
    "six heads share two": Shape(6, 2, 4, 3, 5, 5),
    "one kv head for all": Shape(3, 1, 2, 5, 5, 5),
    "fewer queries than keys": Shape(6, 2, 4, 3, 3, 5),
    "one token": Shape(3, 3, 2, 2, 1, 1),
}


class Drawn(NamedTuple):
    """A layer, its inputs, and its weights by the oracle's names."""

    layer: ReferenceLayer
    rows: ReferenceInputs
    weights: dict[str, list]


def drawn(shape, normal, *, biases="qkvo", out=True, context=True, **told):
    d_context = D_CONTEXT if context else D_IN
    widths = {
        "q": (shape.n_heads * shape.d_head, D_IN),
        "k": (shape.n_kv_heads * shape.d_head, d_context),
        "v": (shape.n_kv_heads * shape.d_v, d_context),
        "o": (9, shape.n_heads * shape.d_v),
    }
    made, named = {}, {}
    for letter, (wide, read) in widths.items():
        weight, bias = normal(wide, read), normal(wide) if letter in biases else None
        made[letter] = Projection(weight, bias)
        if letter != "o" or out:
            named[f"{letter}_proj.weight"] = weight.tolist()
            named[f"{letter}_proj.bias"] = None if bias is None else bias.tolist()
    weights = Projections(made["q"], made["k"], made["v"], made["o"] if out else None)
    queries = normal(BATCH, shape.q_len, D_IN)
    keys = normal(BATCH, shape.k_len, D_CONTEXT) if context else queries
    return Drawn(
        ReferenceLayer(shape.n_heads, shape.n_kv_heads, weights=weights, **told),
        ReferenceInputs(queries, keys, keys),
        named,
    )


def expected(case, **how):
    keys = case.rows.keys.numpy()
    layer = case.layer
    return oracle.layer(
        case.rows.queries.numpy(), case.weights, n_heads=layer.n_heads, n_kv_heads=layer.n_kv_heads, context=keys, **how
    )


def cells(case, rule):
    return oracle.full(rule, BATCH, case.layer.n_heads, case.rows.queries.shape[1], case.rows.keys.shape[1])


def out_of(case, **asked):
    return run(RIGHT, case.layer, case.rows._replace(**asked)).out


def worst(tensor, array):
    assert tuple(tensor.shape) == tuple(np.asarray(array).shape)
    assert np.isfinite(np.asarray(array)).all()
    return (tensor - torch.from_numpy(np.asarray(array))).abs().max().item()


# ------------------------------------------------------------------------------------------------------------- whole layers


@pytest.mark.parametrize("biases", ["qkvo", "qv", ""])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_agrees_with_loops_over_the_formula(shape, biases, normal):
    case = drawn(SHAPES[shape], normal, biases=biases)
    assert worst(out_of(case), expected(case).out) <= EXACT


def test_values_may_come_from_rows_of_their_own(normal):
    case = drawn(SHAPES["three heads of their own"], normal)
    values = normal(BATCH, 5, D_CONTEXT)
    q, k, v = (
        oracle.cut(oracle.linear(rows.numpy(), case.weights, name), 3)
        for rows, name in ((case.rows.queries, "q_proj"), (case.rows.keys, "k_proj"), (values, "v_proj"))
    )
    z = oracle.joined(oracle.attention(q, k, v).z)
    assert worst(out_of(case, values=values), oracle.linear(z, case.weights, "o_proj")) <= EXACT


def test_without_an_output_projection_the_heads_lie_side_by_side(normal):
    case = drawn(SHAPES["six heads share two"], normal, out=False)
    assert worst(out_of(case), expected(case).concat) <= EXACT


@pytest.mark.parametrize("shape", ["six heads share two", "fewer queries than keys"])
def test_a_causal_layer_takes_the_queries_for_the_last_of_the_keys(shape, normal):
    case = drawn(SHAPES[shape], normal, causal=True)
    later = SHAPES[shape].k_len - SHAPES[shape].q_len
    assert worst(out_of(case), expected(case, allowed=cells(case, lambda b, i, j: j <= i + later)).out) <= EXACT


@pytest.mark.parametrize("is_causal", [False, True])
def test_causality_the_callers_mask_and_padding_all_act_together(is_causal, normal):
    case = drawn(SHAPES["fewer queries than keys"], normal, causal=is_causal)
    lengths = (3, 5)
    allowed = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()[None, None]
    real = torch.arange(5)[None] < torch.tensor(lengths)[:, None]

    def rule(b, i, j):
        return allowed[0, 0, i, j] and j < lengths[b] and (not is_causal or j <= i + 2)

    assert worst(out_of(case, allowed=allowed, real=real), expected(case, allowed=cells(case, rule)).out) <= EXACT


def test_a_mask_may_differ_in_each_sequence(normal):
    case = drawn(SHAPES["three heads of their own"], normal)
    allowed = torch.ones(BATCH, 1, 5, 5, dtype=torch.bool)
    allowed[0, 0, :, 3], allowed[1, 0, 2, :4] = False, False
    right = expected(case, allowed=cells(case, lambda b, i, j: bool(allowed[b, 0, i, j])))
    assert worst(out_of(case, allowed=allowed), right.out) <= EXACT


def test_another_pattern_of_its_own_acts_like_a_mask(normal):
    sees = torch.ones(5, 5).tril(1).triu(-1).bool()
    case = drawn(SHAPES["three heads of their own"], normal, sees=sees)
    assert worst(out_of(case), expected(case, allowed=cells(case, lambda b, i, j: abs(i - j) <= 1)).out) <= EXACT


def test_a_query_that_may_see_nothing_gets_zeros_and_so_the_bias_of_the_output(normal):
    case = drawn(SHAPES["three heads of their own"], normal)
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    allowed[..., 2, :] = False
    seen = {}
    out = run(
        RIGHT, case.layer, case.rows._replace(allowed=allowed), tap=lambda site, t, **_: seen.update({site: t})
    ).out
    assert seen["pattern"][:, :, 2].abs().max() == 0
    assert torch.equal(out[:, 2], case.layer.weights.out.bias.expand(BATCH, -1))
    assert not out.isnan().any()


def test_visible_cells_have_four_axes_and_are_none_without_a_mask(normal):
    case = drawn(SHAPES["fewer queries than keys"], normal)
    assert run(RIGHT, case.layer, case.rows).keep is None
    keep = run(RIGHT, replace(case.layer, causal=True), case.rows).keep
    assert keep.tolist() == [[[[j <= i + 2 for j in range(5)] for i in range(3)]]]


@pytest.mark.parametrize("told", [{"scale": 0.3}, {"softcap": 1.7}, {"scale": 2.0, "softcap": 0.9}])
def test_a_scale_and_a_cap_act_in_this_order_and_before_the_mask(told, normal):
    case = drawn(SHAPES["six heads share two"], normal, causal=True, **told)
    assert worst(out_of(case), expected(case, allowed=cells(case, lambda b, i, j: j <= i), **told).out) <= EXACT


def test_norms_and_the_input_itself_stand_around_the_layer(normal):
    case = drawn(SHAPES["three heads of their own"], normal, out=False, context=False)
    norm = nn.LayerNorm(D_IN).double()
    wide = nn.Linear(12, D_IN).double()

    def plain(rows):
        return oracle.layer(rows.numpy(), case.weights, n_heads=3, n_kv_heads=3).out

    def around(layer):
        return run(RIGHT, layer, case.rows).out

    with torch.no_grad():
        normed = norm(case.rows.queries)
        assert worst(around(replace(case.layer, before=norm)), plain(normed)) <= EXACT
        added = replace(case.layer, after=lambda out, x: norm(wide(out) + x))
        right = norm(wide(torch.from_numpy(plain(case.rows.queries))) + case.rows.queries)
        assert worst(around(added), right.numpy()) <= EXACT


def test_what_comes_after_is_given_the_input_before_its_norm(normal):
    case = drawn(SHAPES["three heads of their own"], normal, context=False)
    given = []
    run(RIGHT, replace(case.layer, before=lambda x: 2 * x, after=lambda out, x: given.append(x) or out), case.rows)
    assert torch.equal(given[0], case.rows.queries)


def test_norms_of_heads_act_before_the_rotation(normal):
    case = drawn(SHAPES["six heads share two"], normal, context=False, pairing="half")

    def unit(heads):
        return heads / np.sqrt((heads**2).sum(axis=-1, keepdims=True))

    layer = replace(case.layer, q_norm=lambda t: t / t.norm(dim=-1, keepdim=True), k_norm=lambda t: 3 * t)
    q, k, v = (
        oracle.cut(oracle.linear(case.rows.queries.numpy(), case.weights, f"{one}_proj"), n)
        for one, n in (("q", 6), ("k", 2), ("v", 2))
    )
    places = [list(range(5))] * BATCH
    z = oracle.attention(oracle.rotated(unit(q), places), oracle.rotated(3 * k, places), v).z
    right = oracle.linear(oracle.joined(z), case.weights, "o_proj")
    assert worst(run(RIGHT, layer, case.rows).out, right) <= EXACT


# ---------------------------------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("theta", [10000.0, 100.0])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("shape", ["six heads share two", "fewer queries than keys"])
def test_rotary_positions_agree_with_loops_over_the_formula(shape, pairing, theta, normal):
    case = drawn(SHAPES[shape], normal, pairing=pairing, theta=theta)
    later = SHAPES[shape].k_len - SHAPES[shape].q_len

    def turn(heads):
        start = later if heads.shape[1] == case.layer.n_heads else 0  # queries are the last of the keys
        places = [list(range(start, start + heads.shape[2]))] * BATCH
        return oracle.rotated(heads, places, theta=theta, interleaved=pairing == "interleaved")

    assert worst(out_of(case), expected(case, turn=turn).out) <= EXACT


def test_a_rotation_worked_out_by_hand():
    """Base 4 and four columns: pairs turn by place · 1 and place · 1/2. At place 2 that is by 2 and by 1."""
    row = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64).expand(1, 1, 3, 4)
    layer = ReferenceLayer(1, 1, theta=4.0)
    two, one = (math.cos(2), math.sin(2)), (math.cos(1), math.sin(1))
    halves = [1 * two[0] - 3 * two[1], 2 * one[0] - 5 * one[1], 3 * two[0] + 1 * two[1], 5 * one[0] + 2 * one[1]]
    neighbours = [1 * two[0] - 2 * two[1], 2 * two[0] + 1 * two[1], 3 * one[0] - 5 * one[1], 5 * one[0] + 3 * one[1]]
    for pairing, right in (("half", halves), ("interleaved", neighbours)):
        turned = stages.rotated(row, layer, 0, pairing)[0, 0]
        assert turned[0].tolist() == [1.0, 2.0, 3.0, 5.0]
        assert turned[2].tolist() == pytest.approx(right, abs=1e-14)
        assert torch.equal(stages.rotated(row[:, :, :1], layer, 2, pairing)[0, 0, 0], turned[2])


def test_a_table_of_angles_may_be_laid_out_otherwise_than_columns_are_paired():
    """With d = 4 the table for halves is [a, b, a, b], for neighbours [a, a, b, b]; here a = place, b = place / 2."""
    row = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64).expand(1, 1, 3, 4)
    a, b = 2.0, 1.0
    mixed = stages.rotated(row, ReferenceLayer(1, 1, theta=4.0), 0, "interleaved", "half")[0, 0, 2]
    right = [1 * math.cos(a) - 2 * math.sin(a), 2 * math.cos(b) + 1 * math.sin(b)]
    right += [3 * math.cos(a) - 5 * math.sin(a), 5 * math.cos(b) + 3 * math.sin(b)]
    assert mixed.tolist() == pytest.approx(right, abs=1e-14)


def test_turning_backwards_undoes_turning(normal):
    heads = normal(2, 3, 4, 6)
    for pairing in ("half", "interleaved"):
        there = stages.rotated(heads, ReferenceLayer(3, 3), 2, pairing)
        back = stages.rotated(there, ReferenceLayer(3, 3), 2, pairing, sign=-1)
        assert not torch.allclose(there, heads)
        assert torch.allclose(back, heads, rtol=0, atol=EXACT)


# ------------------------------------------------------------------------------------------------------------- heads, columns


def test_heads_are_columns_side_by_side_or_every_nth_column():
    row = torch.arange(6.0, dtype=torch.float64).expand(1, 2, 6)
    beside = stages.split(ReferenceLayer(2, 2), row, 2, "q")
    every = stages.split(ReferenceLayer(2, 2, interleaved_split=True), row, 2, "q")
    assert beside[0, :, 1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert every[0, :, 1].tolist() == [[0, 2, 4], [1, 3, 5]]


def test_heads_that_are_cut_by_a_reshape_alone_hold_the_rows_in_their_order():
    rows = torch.arange(12.0, dtype=torch.float64).view(1, 3, 4)
    layer = ReferenceLayer(2, 2)
    assert split_flat("q", "k")(layer, rows, 2, "k").tolist() == [
        [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    ]  # 6 numbers a head, not 2 columns a head
    assert split_flat("q", "k")(layer, rows, 2, "v").tolist() == [
        [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    ]


def test_heads_are_joined_side_by_side_or_column_by_column():
    z = torch.arange(12.0, dtype=torch.float64).view(1, 2, 2, 3)
    assert stages.merge(ReferenceLayer(2, 2), z).tolist() == [[[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]]
    joined = stages.merge(ReferenceLayer(2, 2, interleaved_merge=True), z)
    assert joined.tolist() == [[[0, 6, 1, 7, 2, 8], [3, 9, 4, 10, 5, 11]]]


def test_a_layer_whose_heads_have_every_nth_column_is_one_with_its_weights_sorted(normal):
    case = drawn(SHAPES["three heads of their own"], normal)
    order = [c * 3 + h for h in range(3) for c in range(4)]  # column c of head h stands at 3c + h
    sorted_weights = dict(case.weights)
    for letter in "qkv":
        for kind in ("weight", "bias"):
            lines = case.weights[f"{letter}_proj.{kind}"]
            sorted_weights[f"{letter}_proj.{kind}"] = [lines[column] for column in order]
    weight = case.weights["o_proj.weight"]
    sorted_weights["o_proj.weight"] = [[line[column] for column in order] for line in weight]
    right = expected(case._replace(weights=sorted_weights)).out
    both = replace(case.layer, interleaved_split=True, interleaved_merge=True)
    assert worst(run(RIGHT, both, case.rows).out, right) <= EXACT


# ----------------------------------------------------------------------------------------------------- beside `attend`, taps


@pytest.mark.parametrize("told", [{}, {"scale": 0.4}, {"softcap": 1.1}])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_without_projections_give_what_attend_gives(shape, told, normal):
    size = SHAPES[shape]
    q = normal(BATCH, size.n_heads, size.q_len, size.d_head)
    k = normal(BATCH, size.n_kv_heads, size.k_len, size.d_head)
    v = normal(BATCH, size.n_kv_heads, size.k_len, size.d_v)
    real = torch.arange(size.k_len)[None] < torch.tensor([max(1, size.k_len - 1), size.k_len])[:, None]
    layer = ReferenceLayer(size.n_heads, size.n_kv_heads, causal=True, **told)
    z = run(RIGHT, layer, ReferenceInputs(q, k, v, real=real)).out
    rule = masks.both(masks.causal(size.k_len - size.q_len), masks.padding(real.sum(dim=1)))
    assert worst(z, attend(q, k, v, allowed=rule, **told).numpy()) <= EXACT
    assert (
        worst(run(RIGHT, replace(layer, causal=False), ReferenceInputs(q, k, v)).out, attend(q, k, v, **told).numpy())
        <= EXACT
    )


def tapped(layer, rows):
    seen = []
    run(RIGHT, layer, rows, tap=lambda site, tensor, **_: seen.append((site, tensor)))
    return seen


def test_a_layer_shows_its_sites_in_order_with_the_numbers_of_the_formula(normal):
    case = drawn(SHAPES["fewer queries than keys"], normal, causal=True, softcap=2.0)
    seen = tapped(case.layer, case.rows)
    right = expected(case, allowed=cells(case, lambda b, i, j: j <= i + 2), softcap=2.0)
    at = dict(seen)
    assert [site for site, _ in seen] == SITES
    for site, wanted in (("q", right.q), ("k", right.k), ("v", right.v), ("concat", right.concat), ("out", right.out)):
        assert worst(at[site], wanted) <= EXACT, site
    for site, wanted in (("qk", right.attention.qk), ("pattern", right.attention.pattern), ("z", right.attention.z)):
        assert worst(at[site], wanted) <= EXACT, site
    for one in "qkv":
        rows = case.rows.queries if one == "q" else case.rows.keys
        assert worst(at[f"{one}_proj"], oracle.linear(rows.numpy(), case.weights, f"{one}_proj")) <= EXACT
    hidden = torch.from_numpy(right.attention.scores == -math.inf)
    assert torch.equal(at["scores"] == -math.inf, hidden)
    assert worst(at["scaled"][~hidden], right.attention.scores[~hidden.numpy()]) <= EXACT
    assert at["scaled"].isfinite().all()


def test_heads_without_projections_have_no_sites_of_projections(normal):
    rows = ReferenceInputs(normal(2, 3, 4, 5), normal(2, 3, 4, 5), normal(2, 3, 4, 6))
    assert [site for site, _ in tapped(ReferenceLayer(3, 3), rows)] == SITES[3:-2]


def test_queries_and_keys_are_shown_as_turned(normal):
    case = drawn(SHAPES["six heads share two"], normal, context=False, pairing="half")
    at = dict(tapped(case.layer, case.rows))
    plain = dict(tapped(replace(case.layer, pairing=None), case.rows))
    for site in "qk":
        right = oracle.rotated(plain[site].numpy(), [list(range(5))] * BATCH)
        assert worst(at[site], right) <= EXACT


def test_every_stage_can_be_exchanged_by_its_name(normal):
    """Each is called in a layer that has everything, and only what stands in its place is called instead."""
    bias = normal(1, 6, 5, 5)
    told = {"causal": True, "pairing": "half", "softcap": 2.0, "bias": lambda rows: bias}
    case = drawn(SHAPES["six heads share two"], normal, **told)
    rows = case.rows._replace(
        allowed=torch.ones(1, 1, 5, 5, dtype=torch.bool), real=torch.ones(BATCH, 5, dtype=torch.bool)
    )
    right = run(RIGHT, case.layer, rows).out
    for stage in fields(Stages):
        calls = []

        def noted(*given, stage=stage, calls=calls):
            calls.append(stage.name)
            return getattr(stages, stage.name)(*given)

        out = run(replace(RIGHT, **{stage.name: noted}), case.layer, rows).out
        assert torch.equal(out, right)
        assert calls, stage.name


def test_a_bias_is_added_to_the_scores_before_the_softmax(normal):
    case = drawn(SHAPES["six heads share two"], normal, context=False)
    bias = normal(1, 6, 5, 5)
    plain = dict(tapped(case.layer, case.rows))
    at = dict(tapped(replace(case.layer, bias=lambda rows: bias), case.rows))
    assert worst(at["scores"], (plain["scaled"] + bias).numpy()) <= EXACT
    powers = np.exp(plain["scaled"].numpy() + bias.numpy())
    assert worst(at["pattern"], powers / powers.sum(-1, keepdims=True)) <= EXACT


def test_a_sink_takes_the_weight_of_a_key_whose_score_is_its_logit(normal):
    case = drawn(SHAPES["six heads share two"], normal, context=False)
    logits = normal(6)
    plain = dict(tapped(case.layer, case.rows))
    at = dict(tapped(replace(case.layer, sinks=logits), case.rows))
    powers, of_sinks = np.exp(plain["scores"].numpy()), np.exp(logits.numpy())[:, None, None]
    assert worst(at["pattern"], powers / (powers.sum(-1, keepdims=True) + of_sinks)) <= EXACT


def test_the_width_of_a_head_is_known_where_there_are_weights(normal):
    assert drawn(SHAPES["six heads share two"], normal).layer.d_head == 4
    assert ReferenceLayer(6, 2).d_head is None
