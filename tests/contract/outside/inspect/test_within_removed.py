"""`mhacli.inspecting` around and within `mhacli.removed`: the record has what the model used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.small_models import eager, llama, record_without, without_head

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
