"""`mhacli.MultiHeadAttention`: the formula, the layer of torch, steps over a cache, and a module
that trains.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import oracle

from mhacli import MhaError, MultiHeadAttention
from mhacli.attention import masks

GROUPED = {"d_model": 10, "n_heads": 9, "n_kv_heads": 3, "d_head": 6, "d_v": 2}
POSITIONS = ("none", "rope", "rope-interleaved", "alibi")
PLACES = [[0, 1, 2, 3, 4], [0, 0, 1, 2, 9]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(**sizes: Any) -> MultiHeadAttention:
    """A float64 layer whose every number, biases too, is random and not small."""
    sizes = {**GROUPED, **sizes}
    layer = (
        MultiHeadAttention(sizes.pop("d_model"), sizes.pop("n_heads"), generator=seeded(), **sizes)
        .double()
        .eval()
    )
    generator = seeded()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def weights_of(layer: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in layer.state_dict().items()}


def require_near(computed: torch.Tensor, right: np.ndarray, tolerance: float = 1e-12) -> None:
    assert computed.shape == right.shape
    assert np.abs(computed.detach().numpy() - right).max() <= tolerance * max(
        1.0, np.abs(right).max()
    )


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"bias": False},
        {"out_proj": False},
        {"d_input": 7},
        {"n_kv_heads": 1, "scale": -0.3},
        {"n_kv_heads": 9, "d_v": 6},
    ],
)
def test_a_layer_computes_the_formula(choices: dict[str, Any], cross: bool, normal: Any) -> None:
    layer, width = made(softcap=3.0, **choices), choices.get("d_input", 10)
    x, context = normal(2, 5, width), normal(2, 7, width) if cross else None
    seen: dict[str, torch.Tensor] = {}
    out, pattern = layer(
        x, context, allowed=masks.causal(1), tap=lambda site, t, **_: seen.update({site: t})
    )
    k_len = 7 if cross else 5
    right = oracle.layer(
        x,
        weights_of(layer),
        n_heads=9,
        n_kv_heads=choices.get("n_kv_heads", 3),
        context=context,
        softcap=3.0,
        scale=choices.get("scale"),
        allowed=np.tri(5, k_len, 1, dtype=bool),
    )
    tensors = {
        "q": right.q,
        "k": right.k,
        "v": right.v,
        "z": right.attention.z,
        "concat": right.concat,
        "out": right.out,
    }
    for name, tensor in tensors.items():
        require_near(seen[name], tensor)
    require_near(out, right.out)
    require_near(pattern, right.attention.pattern)
    assert " ".join(seen) == "q_proj q k_proj k v_proj v qk scores pattern z concat out"


@pytest.mark.parametrize("places", [None, PLACES])
@pytest.mark.parametrize("positions", POSITIONS[1:])
def test_positions_act_inside_of_the_layer(positions: Any, places: Any, normal: Any) -> None:
    layer, x, bias = made(positions=positions, rope_theta=50.0), normal(2, 5, 10), normal(9, 5, 5)
    bias[..., 2] = -torch.inf
    out, pattern = layer(x, bias=bias, places=None if places is None else torch.tensor(places))
    right = oracle.layer(
        x,
        weights_of(layer),
        n_heads=9,
        n_kv_heads=3,
        positions=positions,
        theta=50.0,
        places=places,
        bias=np.nan_to_num(bias.numpy(), neginf=0.0),
        allowed=np.isfinite(bias.numpy()),
    )
    require_near(pattern, right.attention.pattern)
    require_near(out, right.out, 1e-11)


@pytest.mark.parametrize("positions", POSITIONS[1:])
def test_keys_of_another_text_count_their_places_from_0(positions: Any, normal: Any) -> None:
    layer, x, context = (
        made(positions=positions, rope_theta=50.0),
        normal(2, 5, 10),
        normal(2, 7, 10),
    )
    seen: dict[str, torch.Tensor] = {}
    layer(
        x,
        context,
        places=torch.tensor(PLACES),
        tap=lambda site, t, **_: seen.update({site: t.detach()}),
    )
    k_places = [list(range(7))] * 2
    if positions == "alibi":
        require_near(
            seen["scores"] - seen["qk"] * 6**-0.5, oracle.alibi(9, PLACES, k_places), 1e-11
        )
    else:
        turn = {"theta": 50.0, "interleaved": positions != "rope"}
        require_near(seen["q_rot"], oracle.rotated(seen["q"].numpy(), PLACES, **turn))
        require_near(seen["k_rot"], oracle.rotated(seen["k"].numpy(), k_places, **turn))


def test_values_may_come_from_other_rows_than_keys(normal: Any) -> None:
    layer, (query, key, value) = made(), (normal(2, n, 10) for n in (5, 7, 7))
    weights = weights_of(layer)
    heads = ((query, "q_proj", 9), (key, "k_proj", 3), (value, "v_proj", 3))
    q, k, v = (oracle.split_heads(oracle.linear(rows, weights, name), n) for rows, name, n in heads)
    right = oracle.linear(oracle.merge_heads(oracle.attention(q, k, v).z), weights, "o_proj")
    require_near(layer(query, key, value)[0], right, 1e-11)


@pytest.mark.parametrize("cross", [True, False])
def test_a_layer_computes_what_the_layer_of_torch_computes(cross: bool, normal: Any) -> None:
    ours = made(d_model=21, n_heads=3, n_kv_heads=3, d_head=7, d_v=7)
    theirs = torch.nn.MultiheadAttention(21, 3, batch_first=True).double().train()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(
            torch.cat([p.weight for p in (ours.q_proj, ours.k_proj, ours.v_proj)])
        )
        theirs.in_proj_bias.copy_(
            torch.cat([p.bias for p in (ours.q_proj, ours.k_proj, ours.v_proj)])
        )
        theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    x = normal(2, 5, 21)
    rows = normal(2, 11, 21) if cross else x
    hidden = torch.ones(5, rows.shape[1], dtype=torch.bool).triu(1)
    out, pattern = ours(x, rows, allowed=masks.causal())
    right, weights = theirs(x, rows, rows, attn_mask=hidden, average_attn_weights=False)
    assert (out - right).abs().max() <= 1e-11
    assert (pattern - weights).abs().max() <= 1e-12


def test_parameters_have_the_names_and_shapes_of_the_files() -> None:
    def shapes(layer: MultiHeadAttention) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in layer.named_parameters()}

    assert shapes(MultiHeadAttention(**GROUPED, d_input=7)) == {
        "q_proj.weight": (54, 7),
        "q_proj.bias": (54,),
        "k_proj.weight": (18, 7),
        "k_proj.bias": (18,),
        "v_proj.weight": (6, 7),
        "v_proj.bias": (6,),
        "o_proj.weight": (10, 18),
        "o_proj.bias": (10,),
    }
    bare = MultiHeadAttention(12, 3, bias=False, out_proj=False)
    assert shapes(bare) == dict.fromkeys(
        ("q_proj.weight", "k_proj.weight", "v_proj.weight"), (12, 12)
    )


# ------------------------------------------------------------------------------------------ a cache


class Kept(NamedTuple):
    """A cache as a user may write it: a value that is never changed."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def length(self) -> int:
        return self.k.shape[2]

    def extended(self, k: torch.Tensor, v: torch.Tensor) -> Kept:
        return Kept(torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2))


@pytest.mark.parametrize("steps", [[1] * 7, [2, 1, 3, 1], [4, 1, 1, 1]])
@pytest.mark.parametrize("positions", POSITIONS)
def test_steps_over_a_cache_give_the_rows_of_the_whole(
    positions: Any, steps: list[int], normal: Any
) -> None:
    layer = made(positions=positions, rope_theta=20.0, softcap=1.5).requires_grad_(False)
    x, bias, past, start = (
        normal(2, 7, 10),
        normal(9, 7, 7),
        Kept(torch.empty(2, 3, 0, 6).double(), torch.empty(2, 3, 0, 2).double()),
        0,
    )
    bias[3, 4, 1], bias[:, 5, :3] = -torch.inf, -torch.inf
    out, pattern = layer(x, allowed=masks.both(masks.causal(), masks.window(3, 0)), bias=bias)
    for n_new in steps:
        end, before = start + n_new, past.k.clone()
        allowed = masks.both(masks.causal(start), masks.window(3, 0, offset=start))
        new, weights, after = layer.decode(
            x[:, start:end], past, allowed=allowed, bias=bias[:, start:end, :end]
        )
        assert (new - out[:, start:end]).abs().max() <= 1e-11
        assert (weights - pattern[:, :, start:end, :end]).abs().max() <= 1e-12
        assert torch.equal(past.k, before), "the state that goes in stays as it is"
        past, start = after, end
    assert past.length == 7


def test_one_new_token_needs_no_mask_and_only_new_rows_are_projected(normal: Any) -> None:
    layer, x = made(positions="rope").requires_grad_(False), normal(2, 5, 10)
    past, shapes = Kept(torch.empty(2, 3, 0, 6).double(), torch.empty(2, 3, 0, 2).double()), {}
    for t in range(5):
        new, _, past = layer.decode(
            x[:, t : t + 1], past, tap=lambda site, tensor, **_: shapes.update({site: tensor.shape})
        )
    assert (new - layer(x, allowed=masks.causal())[0][:, 4:]).abs().max() <= 1e-12
    assert (shapes["q_proj"], shapes["k_rot"], shapes["qk"]) == (
        (2, 1, 54),
        (2, 3, 1, 6),
        (2, 9, 1, 5),
    )
    whole: dict[str, torch.Tensor] = {}
    layer(x, tap=lambda site, tensor, **_: whole.update({site: tensor}))
    assert (past.k - whole["k_rot"]).abs().max() <= 1e-12, "keys are kept turned"


# ----------------------------------------------------------------------------------------- training


@pytest.mark.real
def test_a_step_of_training_moves_every_parameter_and_lowers_the_loss(normal: Any) -> None:
    layer, x, target = made().train(), normal(2, 5, 10), normal(2, 5, 10)
    before = (layer(x)[0] - target).square().mean()
    before.backward()
    for name, parameter in layer.named_parameters():
        largest = (
            parameter.grad.abs().max()
        )  # the bias of keys adds the same to every score of a row
        assert largest <= 1e-12 if name == "k_proj.bias" else largest > 1e-9, name
    torch.optim.SGD(layer.parameters(), lr=1e-4).step()
    assert (layer(x)[0] - target).square().mean() < before


@pytest.mark.parametrize("positions", POSITIONS)
def test_gradients_are_those_of_small_differences(positions: Any, normal: Any) -> None:
    layer = made(d_model=3, n_heads=2, n_kv_heads=1, d_head=2, d_v=1, positions=positions)
    x, bias = normal(1, 3, 3).requires_grad_(), normal(3, 3).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda rows, b: layer(rows, allowed=masks.causal(), bias=b)[0], (x, bias)
    )


def test_dropout_acts_in_training_alone_and_repeats_itself_with_its_generator(normal: Any) -> None:
    layer, x, seen = made(dropout=0.5), normal(2, 5, 10), {}
    rested, pattern = layer(x)
    assert torch.equal(rested, layer(x)[0])
    layer.train()
    layer.generator = seeded(1)
    trained, still = layer(x, tap=lambda site, tensor, **_: seen.update({site: tensor}))
    assert torch.equal(still, pattern)
    assert ((seen["dropped"] == 0) | (seen["dropped"] == 2 * pattern)).all()
    assert 0.3 < (seen["dropped"] == 0).double().mean() < 0.7
    assert (
        seen["z"] - seen["dropped"] @ seen["v"].repeat_interleave(3, dim=1)
    ).abs().max() <= 1e-12
    layer.generator = seeded(1)
    assert torch.equal(layer(x)[0], trained)
    layer.generator = seeded(2)
    assert not torch.equal(layer(x)[0], trained)
    assert torch.equal(layer.eval()(x)[0], rested)


BOUND = math.sqrt(6 / 150)
INITS = {  # largest number, deviation, whether biases are zeros
    "xavier": (BOUND, BOUND / math.sqrt(3), True),
    "normal": (None, 0.02, True),
    "uniform": (1 / math.sqrt(50), 1 / math.sqrt(150), False),
}


@pytest.mark.parametrize("init", INITS)
def test_new_weights_have_the_spread_of_their_initialisation_and_come_from_the_generator_alone(
    init: Any,
) -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    first, again, other = (
        MultiHeadAttention(50, 5, d_head=20, init=init, generator=seeded(seed)).q_proj
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    largest, deviation, has_zeros = INITS[init]
    assert first.weight.std().item() == pytest.approx(deviation, rel=0.03)
    assert largest is None or 0.99 * largest < first.weight.abs().max() <= largest
    assert (first.bias == 0).all() == has_zeros


@pytest.mark.parametrize(
    ("sizes", "mentioned"),
    [
        ({"d_model": 64, "n_heads": 5}, "5"),
        ({"d_model": 64, "n_heads": 8, "n_kv_heads": 3}, "3"),
        ({"d_model": 10, "n_heads": 2, "positions": "rope"}, "5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], mentioned: str) -> None:
    with pytest.raises(MhaError) as caught:
        MultiHeadAttention(**sizes)
    assert mentioned in caught.value.message
