"""What `mhacli.inspecting` asks of a device, counted without one."""

import math
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from support import pretended
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

import mhacli
from mhacli.attention import on_device
from mhacli.attention.core import attend
from mhacli.attention.masks import causal, leading

transformers = pytest.importorskip("transformers")

N_TOKENS = 1024
LN_2 = math.log(2)


def asked_by_a_pass(
    n_layers: int, n_heads: int = 12, scale: float = 1.0
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
        pytest.MonkeyPatch.context() as patch,
        torch.no_grad(),
        pretended.asked(patch) as asked,
        mhacli.inspecting(model) as seen,
    ):
        model(ids, use_cache=False)
    return asked, seen.record


asked_by_torch = cache(asked_by_a_pass)
"""The same of the usual path, once for all tests."""


def test_a_layer_starts_few_kernels_and_waits_for_none() -> None:
    (one, record), (two, _) = (asked_by_torch(n) for n in (1, 2))
    assert record.layers[0].verified
    assert two.kernels["rest"] - one.kernels["rest"] <= 70
    assert two.on_cpu["rest"] - one.on_cpu["rest"] <= 150
    assert two.waits["rest"] == one.waits["rest"]
    assert one.waits["rest"] == 2  # for the ids, before anything is computed, and for the results


def small_model(n_layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=n_layers,
        n_head=2,
        n_embd=16,
        vocab_size=100,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    pretended.move(model)
    return model


def test_ids_and_mask_are_read_by_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, mask = small_model(2), torch.randint(100, (2, 7)), torch.ones(2, 7).long()
    mask[1, 5:] = 0
    with torch.no_grad(), pretended.asked(monkeypatch) as asked, mhacli.inspecting(model) as seen:
        inputs = {"input_ids": ids, "attention_mask": mask}
        model(**{name: pretended.on_device(each) for name, each in inputs.items()}, use_cache=False)
    assert [len(text.ids) for text in seen.record.sequences] == [7, 5]
    # for what is read, the mask of the layers, and the results
    assert asked.waits["rest"] == 3


@pytest.mark.parametrize("padded", [False, True])
def test_each_step_of_a_generation_waits_once(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(n_layers: int, n_steps: int) -> int:
        model, cache = small_model(n_layers), transformers.DynamicCache()
        ids = pretended.on_device(torch.randint(100, (2, 5)))
        mask = torch.ones(2, 5).long()
        mask[1, :2] = 0
        given: Tensor = pretended.on_device(mask)
        with (
            torch.no_grad(),
            pretended.asked(monkeypatch) as asked,
            mhacli.inspecting(model) as seen,
        ):
            for _ in range(n_steps):
                masks = {"attention_mask": given} if padded else {}
                out = model(ids, past_key_values=cache, use_cache=True, **masks)
                ids = out.logits[:, -1:].argmax(dim=-1)
                given = torch.cat([given, torch.ones_like(ids)], dim=1)
        assert len(seen.passes) == 1
        assert all(layer.verified for layer in seen.record.layers)
        return asked.waits["rest"]

    assert waits(1, 4) - waits(1, 3) == 1
    assert waits(3, 3) == waits(1, 3)


class OnTwoDevices(nn.Module):
    """Two attentions, the second on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.attn_of_first, self.attn_of_second = (SelfAttention() for _ in range(2))
        pretended.move(self)
        pretended.move(self.attn_of_second, pretended.SECOND)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.attn_of_first(self.embed(input_ids))
        return self.attn_of_second(x.to(pretended.SECOND))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_each_of_several_devices_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = OnTwoDevices(), pretended.on_device(torch.randint(10, (1, 6)))
    with torch.no_grad(), pretended.asked(monkeypatch) as asked, mhacli.inspecting(model) as seen:
        model(ids)
    assert [layer.verified for layer in seen.record.layers] == [True, True]
    assert asked.waits["rest"] == 1 + 2  # for the ids, and for the results of each device


class Launch:
    """A kernel of the statistics, whose launch is counted, and computed by torch on the CPU."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.number = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **_: Any) -> None:
            self.number += 1
            with _disable_current_modes():
                self.kernel(*(getattr(each, "held", each) for each in arguments))

        return launch


def scores_of(q: Tensor, k: Tensor, rule: tuple[Any, ...]) -> Tensor:
    """The scores to base 2 of heads with keys of their own, −∞ outside of the band."""
    scale, low, high, *others = rule
    assert others == [None, None, 0]
    steps = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
    scores = scale * (q.double() @ k.double().mT)
    return scores.masked_fill((steps < low) | (steps > high), -torch.inf)


def rows(q: Any, k: Any, _: Any, marks: Any, sums: Any, lse: Any, *shape: Any) -> None:
    """What `kernels.rows` writes."""
    scores = scores_of(q, k, shape[-1])
    p = (scores * LN_2).softmax(dim=-1)
    steps = torch.arange(p.shape[2]) - torch.arange(p.shape[1])[:, None]
    of_queries = (
        p.sum(dim=-1),
        torch.special.entr(p).sum(dim=-1),
        p.square().sum(dim=-1),
        p.amax(dim=-1).log(),
        (p * steps.abs()).sum(dim=-1),
        (p * (marks & 1)).sum(dim=-1),
        (p * (marks >> 1)).sum(dim=-1),
        scores.amax(dim=-1),
        (scores - scores.amax(dim=-1, keepdim=True)).exp2().sum(dim=-1).log2(),
    )
    sums.copy_(torch.stack(of_queries))
    lse.copy_((scores * LN_2).logsumexp(dim=-1))


def diagonals(q: Any, k: Any, reference: Any, log: Any, tokens: Any, *written: Any) -> None:
    """What `kernels.diagonals` writes, each sum at one of its places."""
    of_rows, profile, copies, *_, rule = written
    p = (scores_of(q, k, rule) - reference[..., None] - log[..., None]).exp2()
    n, steps = p.shape[1], torch.arange(p.shape[2]) - torch.arange(p.shape[1])[:, None]
    size = -(-n // of_rows.shape[1])
    of_rows[..., :n] = p.unflatten(1, (-1, size)).sum(dim=2)
    start = -(-n // profile.shape[3]) * profile.shape[3] - n + 1
    by_distance = torch.zeros(len(p), 2 * n - 1, dtype=p.dtype)
    by_distance.index_add_(1, (steps + n - 1).flatten(), p.flatten(1))
    profile[:, 0].view(len(p), -1)[:, start : start + 2 * n - 1] = by_distance
    of_queries, *labels = (each.held for each in tokens)
    copies.zero_()
    for copy, label, own in zip(copies, labels, (0, 1), strict=True):
        equal = (of_queries[:, None] == label) & (steps != own)
        copy[:, 0] = (p * equal).sum(dim=(1, 2))


def test_a_layer_with_our_kernels_starts_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ModuleType("mhacli.attention.kernels")
    launches = Launch(rows), Launch(diagonals)
    kernels.rows, kernels.diagonals = launches  # type: ignore[attr-defined]
    _, by_torch = asked_by_torch(1, 4)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setenv("MHA_KERNELS", "1")
    monkeypatch.setattr(on_device, "runs_kernels", lambda device: device == pretended.DEVICE)
    monkeypatch.setattr(on_device, "_fault", lambda numbers: None)
    (one, record), (two, _) = (asked_by_a_pass(n, 4) for n in (1, 2))
    assert [launch.number for launch in launches] == [3, 3]
    assert record.layers[0].verified
    for ours, right in zip(record.heads, by_torch.heads, strict=True):
        for name in ("entropy", "distance", "duplicate", "induction", "previous", "max_score"):
            assert getattr(ours, name) == pytest.approx(getattr(right, name), rel=1e-4, abs=1e-6)
    assert two.waits == one.waits
    of_mha = ("rest", "reduce_heads")
    started = sum(two.kernels[who] - one.kernels[who] for who in of_mha)
    assert started + 2 <= 70  # with the launches of a layer


def test_no_operator_is_run_for_each_head() -> None:
    few, many = (asked_by_torch(1, n_heads)[0] for n_heads in (4, 12))
    assert few.kernels["rest"] == many.kernels["rest"]
    assert few.on_cpu["rest"] == many.on_cpu["rest"]


def test_a_layer_whose_scores_need_care_is_measured_again() -> None:
    asked, record = asked_by_torch(1, scale=60.0)
    usual, _ = asked_by_torch(1)
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
