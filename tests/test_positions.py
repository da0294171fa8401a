"""Positions: where a token stands, as numbers."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

from mhacli.attention.positions import alibi, rotate, sinusoidal
from mhacli.variants import alibi_slopes


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


@pytest.mark.parametrize("width", [1, 6, 7])
def test_a_place_gives_the_same_wave_wherever_it_stands(width):
    places = torch.tensor([[0, 0, 3, 1], [4, 2, 0, 1]])
    found, table = sinusoidal(places, width, dtype=torch.float64), oracle.waves(5, width)
    assert found.shape == (2, 4, width)
    for b in range(2):
        for t in range(4):
            assert found[b, t].tolist() == pytest.approx(table[places[b, t]].tolist(), abs=1e-14)


# -------------------------------------------------------------------------------------------------------------- rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("theta", [10_000.0, 7.5])
@pytest.mark.parametrize("d_head", [2, 6, 10])
def test_rotation_agrees_with_a_product_of_complex_numbers(interleaved, theta, d_head, normal):
    heads, places = normal(2, 3, 5, d_head), [[0, 1, 2, 3, 4], [0, 0, 7, 300, 1]]
    found = rotate(heads, torch.tensor(places), theta=theta, interleaved=interleaved)
    expected = oracle.rotated(heads, places, theta=theta, interleaved=interleaved)
    assert (found - torch.from_numpy(expected)).abs().max() <= 1e-12


@pytest.mark.parametrize("interleaved", [False, True])
def test_places_that_all_sequences_share_turn_each_of_them_alike(interleaved, normal):
    heads = normal(3, 2, 5, 6)
    shared, own = (
        rotate(heads, places, interleaved=interleaved)
        for places in (torch.arange(5), torch.arange(5).expand(3, 5).clone())
    )
    assert torch.equal(shared, own)


def test_by_hand_the_two_pairings_turn_different_columns():
    heads = torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]], dtype=torch.float64)
    half = rotate(heads, torch.tensor([1]))[0, 0, 0].tolist()
    paper = rotate(heads, torch.tensor([1]), interleaved=True)[0, 0, 0].tolist()
    assert half == pytest.approx([math.cos(1), 0.0, math.sin(1), 0.0], abs=1e-16)
    assert paper == pytest.approx([math.cos(1), math.sin(1), 0.0, 0.0], abs=1e-16)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_dot_product_of_turned_rows_depends_on_their_distance_alone(interleaved, normal):
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8)

    def product(i, j):
        one, other = (rotate(row, torch.tensor([at]), interleaved=interleaved) for row, at in ((q, i), (k, j)))
        return (one * other).sum().item()

    assert product(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-15)
    for i, j in ((5, 2), (103, 100), (20_003, 20_000)):
        assert product(i, j) == pytest.approx(product(3, 0), abs=1e-11)
    assert abs(product(3, 0) - product(0, 3)) > 1e-3


def test_a_rotation_keeps_lengths_and_the_first_place_turns_nothing(normal):
    heads = normal(2, 3, 5, 6)
    turned = rotate(heads, torch.arange(5))
    assert torch.equal(turned[:, :, 0], heads[:, :, 0])
    assert (turned.norm(dim=-1) - heads.norm(dim=-1)).abs().max() <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_rotation_far_from_the_beginning_is_as_fine_as_its_dtype(dtype, normal):
    heads, places = normal(1, 2, 3, 6).to(dtype), torch.tensor([20_000, 30_001, 32_767])
    found = rotate(heads, places)
    assert found.dtype == dtype
    exact = torch.from_numpy(oracle.rotated(heads.double(), [places.tolist()], theta=10_000.0, interleaved=False))
    assert ((found.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * heads.double().abs().max()).all()


# --------------------------------------------------------------------------------------------------------------- ALiBi


def test_by_hand_the_slopes_of_eight_heads_are_those_of_the_paper():
    assert alibi_slopes(8) == (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)
    assert alibi_slopes(1) == (1 / 256,)
    assert alibi_slopes(3) == (1 / 16, 1 / 256, 1 / 4)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5, 9, 12, 16, 100, 1024])
def test_slopes_agree_with_the_program_of_the_paper(n_heads):
    found = alibi_slopes(n_heads)
    assert len(found) == n_heads
    assert found == pytest.approx(oracle.slopes(n_heads), rel=1e-12)


@pytest.mark.parametrize("n_heads", [1, 2, 6])
def test_distance_costs_its_slope_in_both_directions(n_heads):
    q_places, k_places = [[0, 1, 2], [0, 0, 5]], [[0, 1, 2, 3, 4], [0, 0, 0, 1, 9]]
    found = alibi(n_heads, torch.tensor(q_places), torch.tensor(k_places), dtype=torch.float64)
    assert found.shape == (2, n_heads, 3, 5)
    expected = torch.from_numpy(oracle.distances(n_heads, q_places, k_places))
    assert (found - expected).abs().max() <= 1e-12
    shared = alibi(n_heads, torch.tensor(q_places[0]), torch.tensor(k_places[0]), dtype=torch.float64)
    assert torch.equal(shared, found[0])
