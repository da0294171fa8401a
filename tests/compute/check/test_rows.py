"""Queries, keys and values are passed separately where possible, with as many axes as the target accepts."""

from __future__ import annotations

import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.examined import examination_of

from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.check import Examination

FILE = Path(__file__).parents[2] / "support" / "attentions" / "three_rows.py"
D, H = 24, 3
AXES = {"of_any_axes": (2, 4, 5), "of_three_axes": (4, 5), "of_two_axes": (5,), "stated_to_be_of_two_axes": (5,)}
"""Right functions, with the axes before the width that they are to be asked with."""
OVER_ANOTHER_AXIS = {
    "softmax_over_the_second": (2, 4, 5),
    "softmax_over_the_second_with_mask": (2, 4, 5),
    "softmax_over_the_second_of_three": (4, 5),
}
OTHER_ROWS = {
    "ValuesOfKeys": "values-of-keys",
    "ValuesOfQueries": "values-of-queries",
    "KeysOfValues": "keys-of-values",
    "KeysOfQueries": "keys-of-queries",
    "ValuesOfKeysOfOneLength": "values-of-keys",
}


@functools.cache
def examined(name: str) -> Examination:
    arguments = () if name[0].islower() else (("d_model", str(D)), ("n_heads", str(H)))
    return examination_of(CheckRequest(TargetRequest(f"{FILE}:{name}", arguments)))


def thing(name: str) -> Any:
    spec = importlib.util.spec_from_file_location("three_rows", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def is_attention(name: str, axes: tuple[int, ...]) -> bool:
    """Whether a function computes softmax(q kᵀ / √d) v, summed cell by cell, for these axes before the width."""
    q, k, v = torch.randn(3, *axes, 8, generator=torch.Generator().manual_seed(3)).unbind(0)
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) / math.sqrt(8)
    shares = scores.exp() / scores.exp().sum(-1, keepdim=True)
    answer = thing(name)(q, k, v)
    answer = answer[0] if isinstance(answer, tuple) else answer
    return torch.allclose(answer, (shares[..., None] * v[..., None, :, :]).sum(-2), atol=1e-5)


@pytest.mark.parametrize("name", AXES)
def test_a_function_that_holds_with_the_axes_it_is_made_for_is_right(name: str) -> None:
    assert is_attention(name, AXES[name])
    assert examined(name).verdict == "right"


@pytest.mark.parametrize("name", OVER_ANOTHER_AXIS)
def test_a_function_that_takes_sequences_is_not_right_for_holding_with_one_alone(name: str) -> None:
    assert not is_attention(name, OVER_ANOTHER_AXIS[name])
    assert [finding.code for finding in examined(name).findings] == ["softmax-axis"]


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_rows_that_are_read_from_the_argument_of_others_are_named(name: str) -> None:
    torch.manual_seed(0)
    layer = thing(name)(D, H)
    query, key, value, other = torch.randn(4, 2, 5, D).unbind(0)
    unread = (query, key, other) if name.startswith("Values") else (query, other, value)
    with torch.no_grad():
        assert torch.equal(layer(query, key, value), layer(*unread))
    assert [finding.code for finding in examined(name).findings] == [OTHER_ROWS[name]]
    assert examined(name).findings[0].proven


def test_a_layer_that_reads_each_argument_is_right() -> None:
    assert examined("Attention").verdict == "right"
