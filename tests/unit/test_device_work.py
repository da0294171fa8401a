"""What `mhacli.inspecting` asks of a device, counted without one."""

from typing import Any

import pytest
import torch
from support import pretended

import mhacli
from mhacli.attention.core import attend
from mhacli.attention.masks import causal, leading

transformers = pytest.importorskip("transformers")

N_TOKENS = 1024


def asked_by_a_pass(
    monkeypatch: pytest.MonkeyPatch, n_layers: int, n_heads: int = 12, scale: float = 1.0
) -> tuple[pretended.Asked, Any]:
    """What a pass of GPT-2's shape asks, and its record."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=n_layers,
        n_head=n_heads,
        n_embd=64 * n_heads,
        n_inner=64,
        vocab_size=1000,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model = transformers.GPT2Model(config).eval()
    for block in model.h:
        block.attn.c_attn.weight.data *= scale
    ids = pretended.on_device(torch.randint(0, 1000, (1, N_TOKENS)))
    pretended.move(model)
    with (
        torch.no_grad(),
        pretended.asked(monkeypatch) as asked,
        mhacli.inspecting(model) as seen,
    ):
        model(ids, use_cache=False)
    return asked, seen.record


def test_a_layer_starts_few_kernels_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, record), (two, _) = (asked_by_a_pass(monkeypatch, n) for n in (1, 2))
    assert record.layers[0].verified
    assert two.kernels["rest"] - one.kernels["rest"] <= 70
    assert two.on_cpu["rest"] - one.on_cpu["rest"] <= 150
    assert two.waits["rest"] == one.waits["rest"]
    assert one.waits["rest"] == 2  # for the ids, before anything is computed, and for the results


def test_no_operator_is_run_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (asked_by_a_pass(monkeypatch, 1, n_heads)[0] for n_heads in (4, 12))
    assert few.kernels["rest"] == many.kernels["rest"]
    assert few.on_cpu["rest"] == many.on_cpu["rest"]


def test_a_layer_whose_scores_need_care_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, record = asked_by_a_pass(monkeypatch, 1, scale=60.0)
    usual, _ = asked_by_a_pass(monkeypatch, 1)
    assert asked.kernels["reduce_heads"] > usual.kernels["reduce_heads"]
    assert record.layers[0].survey.checks[-1].ok
    assert max(head.max_score for head in record.heads) > 64


@pytest.mark.parametrize("allowed", [causal(), leading(2), None])
def test_attend_waits_for_no_device(allowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    with pretended.asked(monkeypatch) as asked:
        z = attend(*map(pretended.on_device, (q, k, v)), allowed=allowed)
    assert not asked.waits
    assert torch.equal(z.held, attend(q, k, v, allowed=allowed))
