"""The tolerance in low precision: `attend` errs at most twice as much as the formula in four lines of torch.

Both are compared with float64 over the same rounded inputs. The absolute term is the rounding that no code can avoid.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracle

from mhacli.attention import attend, masks
from mhacli.attention.positions import alibi, rotate

CEILING = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 2e-2}
BATCH, KV_HEADS, HEADS, LENGTH, D_HEAD, D_V = 2, 3, 6, 11, 8, 5

VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "rope": {"rope": True},
    "rope, causal": {"rope": True, "causal": True},
    "alibi": {"alibi": True},
    "alibi, causal": {"alibi": True, "causal": True},
    "softcap": {"softcap": 2.0},
    "softcap, rope, causal": {"softcap": 1.0, "rope": True, "causal": True},
    "softcap, alibi": {"softcap": 3.0, "alibi": True},
    "own scale": {"scale": 0.9},
}


def plain(q, k, v, *, cells, bias, scale, softcap):
    """The formula, in the dtype of its inputs, with the keys scaled instead of the scores."""
    k, v = (torch.stack([t[:, h // (HEADS // KV_HEADS)] for h in range(HEADS)], dim=1) for t in (k, v))
    scores = q @ (k * scale).transpose(2, 3)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.to(q.dtype)
    return torch.softmax(scores.masked_fill(~cells, -torch.inf), dim=-1) @ v


def plainly_turned(heads):
    """Rotary positions as they are often written: tables of cosines and sines in the dtype, columns in two halves."""
    rates = 100.0 ** -(torch.arange(D_HEAD // 2) * 2 / D_HEAD)
    angles = torch.cat([torch.arange(LENGTH)[:, None] * rates] * 2, dim=-1)
    crossed = torch.cat([-heads[..., D_HEAD // 2 :], heads[..., : D_HEAD // 2]], dim=-1)
    return heads * angles.cos().to(heads.dtype) + crossed * angles.sin().to(heads.dtype)


def worst(found, expected):
    assert torch.isfinite(found).all()
    return (found.double() - expected).abs().max().item()


@pytest.mark.parametrize("dtype", CEILING, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attend_errs_at_most_twice_as_much_as_the_plain_formula(variant, dtype, normal):
    how = VARIANTS[variant]
    scale, softcap, is_causal = how.get("scale", D_HEAD**-0.5), how.get("softcap"), how.get("causal", False)
    q = normal(BATCH, HEADS, LENGTH, D_HEAD, dtype=dtype)
    k, v = (normal(BATCH, KV_HEADS, LENGTH, d, dtype=dtype) for d in (D_HEAD, D_V))
    places = [list(range(LENGTH))] * BATCH
    exact, near = [t.double().numpy() for t in (q, k)], [q, k]
    crude = [q, k]
    if "rope" in how:
        exact = [oracle.rotated(t, places, theta=100.0) for t in exact]
        near = [rotate(t, torch.arange(LENGTH), theta=100.0) for t in near]
        crude = [plainly_turned(t) for t in crude]
    costs = oracle.distances(HEADS, places, places) if "alibi" in how else None
    cells = oracle.full(lambda b, i, j: j <= i or not is_causal, BATCH, HEADS, LENGTH, LENGTH)
    reference = torch.from_numpy(
        oracle.attention(*exact, v.double(), scale=scale, softcap=softcap, bias=costs, allowed=cells).z
    )
    bias = alibi(HEADS, torch.arange(LENGTH), torch.arange(LENGTH), dtype=torch.float32) if "alibi" in how else None
    allowed = masks.causal() if is_causal else None
    error = worst(attend(*near, v, allowed=allowed, bias=bias, scale=scale, softcap=softcap), reference)
    by_formula = worst(
        plain(*crude, v, cells=torch.from_numpy(cells), bias=bias, scale=scale, softcap=softcap), reference
    )
    rounded = reference.to(dtype)
    rounding = 2 * worst(rounded + 0.3 - 0.3, reference)
    assert error <= (2 if softcap is None else 3) * by_formula + rounding
    assert error <= CEILING[dtype]


@pytest.mark.parametrize("dtype", CEILING, ids=str)
def test_rows_of_a_low_precision_pattern_still_sum_to_one(dtype, normal):
    q, k = normal(BATCH, HEADS, LENGTH, D_HEAD, dtype=dtype), normal(BATCH, KV_HEADS, LENGTH, D_HEAD, dtype=dtype)
    seen = {}
    attend(
        q, k, normal(BATCH, KV_HEADS, LENGTH, D_V, dtype=dtype), allowed=masks.either(masks.window(2, 1), masks.leading(1)),
        tap=lambda site, tensor, **_: seen.update({site: tensor}),
    )  # fmt: skip
    sums = seen["pattern"].double().sum(dim=-1)
    assert (sums - 1).abs().max() <= {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    expected = np.array([[abs(i - j) <= 1 or j == i - 2 or j == 0 for j in range(LENGTH)] for i in range(LENGTH)])
    assert (seen["pattern"][:, :, ~torch.from_numpy(expected)] == 0.0).all()
