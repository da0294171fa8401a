"""Positions, added, turned and subtracted: against loops, against numbers by hand, and against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import oracle

from mhacli.attention.layer import added_positions
from mhacli.attention.positions import alibi, rotate, sinusoidal
from mhacli.spec.sites import alibi_slopes

PLACES = [[0, 1, 2, 3, 9], [7, 0, 0, 4, 2]]
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


# --------------------------------------------------------------------------------------------------------------- waves


@pytest.mark.parametrize(("length", "d_model"), [(7, 5), (5, 8), (1, 1), (3, 2), (11, 13)])
def test_the_waves_agree_with_the_formula_written_out(length, d_model):
    found = sinusoidal(torch.arange(length), d_model, dtype=torch.float64)
    assert (found - torch.from_numpy(oracle.waves(length, d_model))).abs().max() <= 1e-14


def test_by_hand_the_second_position_of_four_columns():
    found = sinusoidal(torch.arange(2), 4, dtype=torch.float64)[1].tolist()
    assert found == pytest.approx([math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)], abs=1e-16)


def test_the_first_position_is_zeros_and_ones():
    assert sinusoidal(torch.arange(1), 5, dtype=torch.float32)[0].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_the_waves_are_rounded_once_far_from_the_beginning():
    last = sinusoidal(torch.tensor([20_000]), 6, dtype=torch.float32)[0]
    expected = torch.tensor([math.sin(20_000), math.cos(20_000)], dtype=torch.float64).float()
    assert torch.equal(last[:2], expected)


def test_a_shift_of_positions_turns_every_pair_by_the_same_angle():
    p = sinusoidal(torch.arange(20), 6, dtype=torch.float64)
    products = p @ p.T
    for distance in (1, 4):
        diagonal = products.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_positions_come_in_the_dtype_that_was_asked_for(dtype):
    exact = sinusoidal(torch.arange(9), 4, dtype=torch.float64)
    assert torch.equal(sinusoidal(torch.arange(9), 4, dtype=dtype), exact.to(dtype))


@pytest.mark.parametrize("width", [1, 5, 8])
def test_a_place_gives_the_same_wave_wherever_it_stands(width):
    table = oracle.waves(10, width)
    found = sinusoidal(torch.tensor(PLACES), width, dtype=torch.float64)
    assert found.shape == (2, 5, width)
    for b in range(2):
        for t, place in enumerate(PLACES[b]):
            assert np.abs(found[b, t].numpy() - table[place]).max() <= 1e-14
    added = added_positions(torch.tensor(PLACES), width, positions="sinusoidal", dtype=torch.float64)
    assert torch.equal(added, found)


# -------------------------------------------------------------------------------------------------------------- rotary


@both_pairings
@pytest.mark.parametrize("theta", [10_000.0, 50.0, 0.5])
@pytest.mark.parametrize("d_head", [2, 4, 6, 10])
def test_turned_rows_agree_with_the_loops(d_head, theta, interleaved, normal):
    heads = normal(2, 3, 5, d_head)
    for places, written_out in ((PLACES, PLACES), (PLACES[0], [PLACES[0]] * 2)):  # own places, and shared ones
        expected = oracle.rotated(heads, written_out, theta=theta, interleaved=interleaved)
        found = rotate(heads, torch.tensor(places), theta=theta, interleaved=interleaved)
        assert np.abs(found.numpy() - expected).max() <= 1e-13


def test_by_hand_the_pairs_of_four_columns_turn_by_their_own_angles():
    row = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64)
    c, s, slow_c, slow_s = math.cos(2), math.sin(2), math.cos(0.2), math.sin(0.2)  # place 2, theta 100: 2 and 2 / 10
    half = rotate(row, torch.tensor([2]), theta=100.0).flatten().tolist()
    assert half == pytest.approx([c - 3 * s, 2 * slow_c - 4 * slow_s, s + 3 * c, 2 * slow_s + 4 * slow_c], abs=1e-15)
    paired = rotate(row, torch.tensor([2]), theta=100.0, interleaved=True).flatten().tolist()
    assert paired == pytest.approx([c - 2 * s, s + 2 * c, 3 * slow_c - 4 * slow_s, 3 * slow_s + 4 * slow_c], abs=1e-15)


@both_pairings
def test_turning_keeps_the_length_of_every_row_and_of_every_pair(interleaved, normal):
    heads = normal(2, 3, 5, 8)
    turned = rotate(heads, torch.tensor(PLACES), interleaved=interleaved)
    assert (turned.norm(dim=-1) - heads.norm(dim=-1)).abs().max() <= 1e-14
    for j in range(4):
        pair = [2 * j, 2 * j + 1] if interleaved else [j, j + 4]
        assert (turned[..., pair].norm(dim=-1) - heads[..., pair].norm(dim=-1)).abs().max() <= 1e-14


@both_pairings
def test_dot_products_of_turned_rows_depend_on_the_distance_alone(interleaved, normal):
    one, other = normal(1, 1, 1, 6), normal(1, 1, 1, 6)

    def product(i, j):
        turned = [
            rotate(row, torch.tensor([at]), theta=30.0, interleaved=interleaved) for row, at in ((one, i), (other, j))
        ]
        return float((turned[0] * turned[1]).sum())

    for distance in (-3, 0, 2):
        found = [product(i, i + distance) for i in (3, 4, 9, 500)]
        assert found == pytest.approx([found[0]] * 4, abs=1e-12)
        assert product(20_000, 20_000 + distance) == pytest.approx(found[0], abs=1e-11)
    assert product(0, 0) == pytest.approx(float((one * other).sum()), abs=1e-14)
    assert abs(product(3, 5) - product(5, 3)) > 1e-3  # the sign of the distance counts


def test_the_two_pairings_are_one_turn_of_columns_in_another_order(normal):
    heads, places = normal(2, 3, 5, 8), torch.tensor(PLACES)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the first of every pair, then the second
    assert torch.equal(rotate(heads, places, interleaved=True)[..., order], rotate(heads[..., order], places))
    assert (rotate(heads, places, interleaved=True) - rotate(heads, places)).abs().max() > 0.1


def test_a_single_pair_is_the_same_for_both_pairings(normal):
    heads = normal(2, 3, 5, 2)
    assert torch.equal(rotate(heads, torch.tensor(PLACES)), rotate(heads, torch.tensor(PLACES), interleaved=True))


@both_pairings
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_place_0_leaves_a_row_as_it_is_and_the_dtype_stays(dtype, interleaved, normal):
    heads = normal(2, 3, 5, 4, dtype=dtype)
    turned = rotate(heads, torch.tensor(PLACES), interleaved=interleaved)
    assert turned.dtype == dtype
    for b in range(2):
        for t, place in enumerate(PLACES[b]):
            assert torch.equal(turned[b, :, t], heads[b, :, t]) == (place == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_turn_far_from_the_beginning_is_as_fine_as_its_dtype(dtype, normal):
    heads, places = normal(1, 2, 4, 6, dtype=dtype), [32_767, 100_003, 1_000_000, 77]
    exact = oracle.rotated(heads.double(), [places], theta=10_000.0, interleaved=False)
    error = (rotate(heads, torch.tensor(places)).double() - torch.from_numpy(exact)).abs().max().item()
    largest = heads.double().norm(dim=-1).max().item()
    assert error <= largest * torch.finfo(dtype).eps


# --------------------------------------------------------------------------------------------------------------- ALiBi


BY_HAND = {
    1: (1 / 256,),
    2: (1 / 16, 1 / 256),
    4: (1 / 4, 1 / 16, 1 / 64, 1 / 256),
    8: (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256),
    3: (1 / 16, 1 / 256, 1 / 4),
    6: (1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8),
    12: (
        1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256,
        2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("n_heads", BY_HAND)
def test_by_hand_the_slopes_of_the_paper_and_of_its_code_for_other_counts(n_heads):
    assert alibi_slopes(n_heads) == BY_HAND[n_heads]


def test_there_is_one_slope_for_each_head_and_no_two_are_alike():
    for n_heads in [*range(1, 40), 100, 1024]:
        slopes = alibi_slopes(n_heads)
        assert slopes == pytest.approx(oracle.slopes(n_heads), rel=1e-14 if n_heads < 100 else 1e-12)
        assert len(set(slopes)) == n_heads
        assert all(0 < slope < 1 for slope in slopes)


@pytest.mark.parametrize("n_heads", [1, 3, 4])
def test_what_distance_costs_agrees_with_the_loops(n_heads):
    q_places, k_places = [[0, 3, 1], [5, 5, 2]], [[0, 1, 2, 9], [4, 3, 0, 0]]
    found = alibi(n_heads, torch.tensor(q_places), torch.tensor(k_places), dtype=torch.float64)
    assert found.shape == (2, n_heads, 3, 4)
    assert np.abs(found.numpy() - oracle.distances(n_heads, q_places, k_places)).max() <= 1e-15
    shared = alibi(n_heads, torch.tensor(q_places[0]), torch.tensor(k_places[0]), dtype=torch.float64)
    assert torch.equal(shared, found[0])


def test_by_hand_three_tokens_and_two_heads():
    found = alibi(2, torch.arange(3), torch.arange(3), dtype=torch.float64)
    assert (16 * found[0]).tolist() == [[0, -1, -2], [-1, 0, -1], [-2, -1, 0]]
    assert (256 * found[1]).tolist() == [[0, -1, -2], [-1, 0, -1], [-2, -1, 0]]


def test_what_distance_costs_does_not_change_when_all_places_move():
    places = torch.tensor([0, 4, 2, 7])
    moved = alibi(3, places + 100, places + 100, dtype=torch.float32)
    assert torch.equal(moved, alibi(3, places, places, dtype=torch.float32))
    assert moved.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------------- other


def test_learned_positions_are_rows_of_the_table(normal):
    table = normal(10, 3)
    found = added_positions(torch.tensor(PLACES), 3, positions="learned", dtype=torch.float64, table=table)
    for b in range(2):
        for t, place in enumerate(PLACES[b]):
            assert torch.equal(found[b, t], table[place])
    assert added_positions(torch.tensor([2]), 3, positions="learned", dtype=torch.float64, table=table).shape == (1, 3)


@pytest.mark.parametrize("positions", ["none", "rope", "rope-interleaved", "alibi"])
def test_other_schemes_add_nothing_to_the_rows(positions):
    assert added_positions(torch.arange(4), 6, positions=positions, dtype=torch.float32) is None
