"""Positions: where a token stands, as numbers."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

from mhacli.attention.positions import sinusoidal


@pytest.mark.parametrize(("length", "d_model"), [(7, 5), (5, 8), (1, 1), (3, 2), (11, 13)])
def test_the_waves_agree_with_the_formula_written_out(length, d_model):
    found = sinusoidal(length, d_model, dtype=torch.float64, device="cpu")
    assert (found - torch.from_numpy(oracle.waves(length, d_model))).abs().max() <= 1e-14


def test_by_hand_the_second_position_of_four_columns():
    found = sinusoidal(2, 4, dtype=torch.float64, device="cpu")[1].tolist()
    assert found == pytest.approx([math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)], abs=1e-16)


def test_the_first_position_is_zeros_and_ones():
    assert sinusoidal(1, 5, dtype=torch.float32, device="cpu")[0].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_the_waves_are_rounded_once_far_from_the_beginning():
    last = sinusoidal(20_001, 6, dtype=torch.float32, device="cpu")[20_000]
    expected = torch.tensor([math.sin(20_000), math.cos(20_000)], dtype=torch.float64).float()
    assert torch.equal(last[:2], expected)


def test_a_shift_of_positions_turns_every_pair_by_the_same_angle():
    p = sinusoidal(20, 6, dtype=torch.float64, device="cpu")
    products = p @ p.T
    for distance in (1, 4):
        diagonal = products.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_positions_come_in_the_dtype_that_was_asked_for(dtype):
    exact = sinusoidal(9, 4, dtype=torch.float64, device="cpu")
    assert torch.equal(sinusoidal(9, 4, dtype=dtype, device="cpu"), exact.to(dtype))
