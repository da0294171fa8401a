"""`mhacli.inspecting` around and within `mhacli.removed`: the record has what the model used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.small_models import eager, llama, record_without, without_head
from torch import nn

import mhacli

pytestmark = pytest.mark.real
IDS = torch.tensor([[3, 45, 17, 99, 150, 201, 33, 8]])


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_heads_are_removed_in_the_record(attention: str, outside: bool) -> None:
    model = llama(attention=attention)
    record = record_without(model, IDS, outside=outside, heads=[(0, 1)])
    twin = eager(model)
    without_head(twin.model.layers[0].self_attn.o_proj, 1)
    with torch.no_grad():
        expected = twin(IDS, output_attentions=True).attentions
    for layer, weights in enumerate(expected):
        shown = record.pattern(layer=layer).values
        np.testing.assert_allclose(shown, weights[0], rtol=0, atol=2e-5)
    z = record.arrays["layers.0.z"][0]
    assert (z[1] == 0).all()
    assert (z[2] != 0).any()
    mean = record_without(model, IDS, outside=outside, heads=[(0, 1)], replace="mean")
    rows = mean.arrays["layers.0.z"][0, 1]
    assert (rows == rows[0]).all()
    assert (rows != 0).any()


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_edges_are_removed_in_the_record(attention: str, outside: bool) -> None:
    model = llama(attention=attention)
    plain = record_without(model, IDS, outside=outside, heads=[(1, 3)]).pattern(layer=0).values
    record = record_without(model, IDS, outside=outside, edges=[(0, 1, 5, 2)])
    plain[1, 5, 2] = 0
    plain[1, 5] /= plain[1, 5].sum()
    np.testing.assert_allclose(record.pattern(layer=0).values, plain, rtol=0, atol=2e-6)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (4, 4)).transpose(1, 2)
        z = nn.functional.scaled_dot_product_attention(q, q, q)
        return z.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attends in rows and in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.row_attention, self.column_attention = Attention(), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.column_attention(self.row_attention(x))
        return rows


def test_a_head_of_two_attentions_with_one_number_is_refused_with_their_names() -> None:
    model = nn.Sequential(Block(), Block()).eval()
    with (
        pytest.raises(mhacli.MhaError, match=r"0\.row_attention, 0\.column_attention"),
        mhacli.removed(model, heads=[(0, 1)]),
    ):
        model(torch.randn(2, 5, 16))
