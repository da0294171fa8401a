"""Three ways of writing one computation: the same result, by the sites that each of them says it passes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from support import oracle

from mhacli.attention import masks
from mhacli.attention.layer import MultiHeadAttention
from mhacli.attention.routes import ROUTES, RouteInputs
from mhacli.spec.config import Config
from mhacli.spec.facts import Facts
from mhacli.spec.sites import SITES

COMBINATIONS = list(product([True, False], repeat=5))


def made(*, bias, out_proj, gqa, own_d_v, n_heads=6, d_head=3, **more):
    layer = MultiHeadAttention(
        10, n_heads, n_kv_heads=2 if gqa else n_heads, d_head=d_head, d_v=5 if own_d_v else 3, bias=bias,
        out_proj=out_proj, **more,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer.eval()


def heard(route, layer, x, context=None, allowed=None, **more):
    seen = {}
    reading = RouteInputs(x, context, allowed, **more)
    out = ROUTES[route](layer, reading, lambda site, tensor, **_: seen.update({site: tensor.detach()}))
    return out.detach(), seen


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("bias", "out_proj", "gqa", "own_d_v", "cross"), COMBINATIONS)
def test_every_route_agrees_with_the_loops(route, bias, out_proj, gqa, own_d_v, cross, normal):
    layer = made(bias=bias, out_proj=out_proj, gqa=gqa, own_d_v=own_d_v)
    x, context = normal(2, 4, 10), normal(2, 7, 10) if cross else None
    out, seen = heard(route, layer, x, context, masks.causal(1))
    expected = oracle.layer(
        x.tolist(), {name: t.tolist() for name, t in layer.state_dict().items()}, n_heads=6,
        n_kv_heads=2 if gqa else 6, context=None if context is None else context.tolist(),
        allowed=oracle.full(lambda b, i, j: j <= i + 1, 2, 6, 4, 7 if cross else 4),
    )  # fmt: skip
    assert (out - torch.from_numpy(expected.out)).abs().max() <= 1e-11
    assert (seen["pattern"] - torch.from_numpy(expected.attention.pattern)).abs().max() <= 1e-12
    assert (seen["z"] - torch.from_numpy(expected.attention.z)).abs().max() <= 1e-11


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("bias", "out_proj", "gqa", "own_d_v", "cross"), COMBINATIONS)
def test_every_site_on_the_way_has_the_shape_of_the_table(route, bias, out_proj, gqa, own_d_v, cross, normal):
    layer = made(bias=bias, out_proj=out_proj, gqa=gqa, own_d_v=own_d_v)
    config = Config(
        d_model=10, n_heads=6, n_kv_heads=2 if gqa else 6, d_head=3, d_v=5 if own_d_v else 3, bias=bias,
        out_proj=out_proj,
    ).resolved()  # fmt: skip
    facts = Facts(config, batch=2, q_len=4, k_len=7 if cross else 4, cross=cross)
    _, seen = heard(route, layer, normal(2, 4, 10), normal(2, 7, 10) if cross else None)
    for site, tensor in seen.items():
        assert tuple(tensor.shape) == SITES[site].shape_for(facts), site


@pytest.mark.parametrize(
    ("route", "cross", "expected"),
    [
        ("separate", False, "q_proj q k_proj k v_proj v qk scores pattern z concat out"),
        ("separate", True, "q_proj q k_proj k v_proj v qk scores pattern z concat out"),
        ("fused", False, "qkv q k v qk scores pattern z concat out"),
        ("fused", True, "q_proj kv q k v qk scores pattern z concat out"),
        ("per-head", False, "q_per_head k_per_head v_per_head qk scores pattern z head_out out_sum"),
        ("per-head", True, "q_per_head k_per_head v_per_head qk scores pattern z head_out out_sum"),
    ],
)
def test_every_route_passes_its_own_sites_in_the_order_of_the_table(route, cross, expected, normal):
    layer = made(bias=True, out_proj=True, gqa=True, own_d_v=True)
    _, seen = heard(route, layer, normal(2, 4, 10), normal(2, 7, 10) if cross else None)
    assert list(seen) == expected.split()
    assert list(seen) == [site for site in SITES if site in seen]


@pytest.mark.parametrize(
    ("positions", "bias", "inserted"),
    [
        ("rope", False, "q_rot k_rot"),
        ("rope-interleaved", True, "q_rot k_rot bias"),
        ("alibi", False, "alibi"),
        ("alibi", True, "alibi bias"),
        ("none", True, "bias"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_what_acts_on_queries_keys_and_scores_is_passed_between_values_and_products(
    route, positions, bias, inserted, normal
):
    layer = made(bias=True, out_proj=True, gqa=True, own_d_v=True, d_head=4, positions=positions)
    x, more = normal(2, 4, 10), {"bias": normal(4, 4)} if bias else {}
    _, plain = heard(route, made(bias=True, out_proj=True, gqa=True, own_d_v=True, d_head=4), x)
    _, seen = heard(route, layer, x, **more)
    before, after = (list(plain)[: list(plain).index("qk")], list(plain)[list(plain).index("qk") :])
    assert list(seen) == [*before, *inserted.split(), *after]
    assert list(seen) == [site for site in SITES if site in seen]


PLACES = [[0, 1, 2, 3], [0, 0, 1, 8]]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("positions", ["none", "rope", "rope-interleaved", "alibi"])
@pytest.mark.parametrize(("cross", "has_separate_positions", "biased"), list(product([True, False], repeat=3)))
def test_every_route_agrees_with_the_loops_about_positions_and_biases(
    route, positions, cross, has_separate_positions, biased, normal
):
    layer = made(bias=True, out_proj=True, gqa=True, own_d_v=True, d_head=4, positions=positions, d_input=7)
    x, context = normal(2, 4, 7), normal(2, 5, 7) if cross else None
    q_places = PLACES if has_separate_positions else [list(range(4))] * 2
    k_places = [list(range(5))] * 2 if cross else q_places
    given = normal(2, 6, 4, 5 if cross else 4) if biased else None
    added = oracle.distances(6, q_places, k_places) if positions == "alibi" else np.zeros((2, 6, 4, len(k_places[0])))
    added = added if given is None else added + given.numpy()

    def turn(heads):
        its_places = q_places if heads.shape[1] == 6 else k_places
        return oracle.rotated(heads, its_places, theta=1e4, interleaved=positions == "rope-interleaved")

    expected = oracle.layer(
        x.tolist(), {name: t.tolist() for name, t in layer.state_dict().items()}, n_heads=6, n_kv_heads=2,
        context=None if context is None else context.tolist(), bias=added,
        turn=turn if positions.startswith("rope") else None,
    )  # fmt: skip
    places = torch.tensor(PLACES) if has_separate_positions else None
    out, seen = heard(route, layer, x, context, bias=given, places=places)
    assert (out - torch.from_numpy(expected.out)).abs().max() <= 1e-11
    assert (seen["pattern"] - torch.from_numpy(expected.attention.pattern)).abs().max() <= 1e-12
    config = Config(
        d_model=10, n_heads=6, n_kv_heads=2, d_head=4, d_v=5, d_input=7, positions=positions, padding="left"
    ).resolved()
    facts = Facts(config, batch=2, q_len=4, k_len=len(k_places[0]), cross=cross, padded=has_separate_positions)
    for site, tensor in seen.items():
        assert tuple(tensor.shape) == SITES[site].shape_for(facts), site


def test_what_each_head_adds_is_what_the_output_loses_without_it(normal):
    layer, x = made(bias=True, out_proj=True, gqa=True, own_d_v=True), normal(2, 4, 10)
    whole, seen = heard("per-head", layer, x)
    with torch.no_grad():
        layer.o_proj.weight[:, 5 * 4 : 5 * 5] = 0.0
    without, _ = heard("separate", layer, x)
    assert (whole - without - seen["head_out"][:, 4]).abs().max() <= 1e-12


def test_the_cut_of_the_fused_product_is_a_view(normal):
    layer = made(bias=True, out_proj=True, gqa=True, own_d_v=True)
    _, seen = heard("fused", layer, normal(2, 4, 10))
    for name in "qkv":
        assert seen[name].untyped_storage().data_ptr() == seen["qkv"].untyped_storage().data_ptr()


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_drops_the_same_shares_in_training(route, normal):
    layer, x = made(bias=True, out_proj=True, gqa=True, own_d_v=True).train(), normal(2, 4, 10)
    layer.dropout = 0.4
    layer.generator = torch.Generator().manual_seed(5)
    expected = layer(x)[0].detach()
    layer.generator = torch.Generator().manual_seed(5)
    out, seen = heard(route, layer, x)
    assert (out - expected).abs().max() <= 1e-12
    assert (seen["dropped"] == 0).any()
