"""torch's fused kernels: the same z, and which of them ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mhacli.attention import attend, fused, masks
from mhacli.attention.fused import KERNELS, fused_attend, fused_lse, kernel_among, only, operators_of

Normal = Callable[..., Tensor]


def heads(normal: Normal, n_kv_heads: int, q_len: int, k_len: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 9, q_len, 11), normal(2, n_kv_heads, k_len, 11), normal(2, n_kv_heads, k_len, 11)


@pytest.mark.parametrize("n_kv_heads", [9, 3, 1])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(7, 7), (5, 7), (1, 13), (1, 1)])
def test_the_fused_z_is_that_of_attend(normal: Normal, n_kv_heads: int, causal: bool, sizes: tuple[int, int]) -> None:
    q, k, v = heads(normal, n_kv_heads, *sizes)
    expected = attend(q, k, v, allowed=masks.causal() if causal else None)
    assert (fused_attend(q, k, v, causal=causal) - expected).abs().max() <= 1e-12


def test_by_hand_two_tokens() -> None:
    q = k = torch.tensor([[[[1.0], [2.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64)
    assert fused_attend(q, k, v)[0, 0, 0].item() == pytest.approx(0.7310585786300049)
    assert fused_attend(q, k, v, causal=True)[0, 0, 0].item() == 0.0


@pytest.mark.parametrize("kernel", ["math", "flash"])
@pytest.mark.parametrize("n_kv_heads", [9, 3])
def test_the_gradients_are_those_of_attend(normal: Normal, kernel: str, n_kv_heads: int) -> None:
    leaves = [t.requires_grad_() for t in heads(normal, n_kv_heads, 7, 7)]
    weight = normal(2, 9, 7, 11)
    with only(kernel):
        found = torch.autograd.grad(fused_attend(*leaves, causal=True), leaves, weight)
    expected = torch.autograd.grad(attend(*leaves, allowed=masks.causal()), leaves, weight)
    assert all((a - b).abs().max() <= 1e-12 for a, b in zip(found, expected, strict=True))


def test_on_a_cpu_torch_picks_flash_and_its_operator_is_seen(normal: Normal) -> None:
    tensors = heads(normal, 9, 7, 7)
    seen = operators_of(lambda: fused_attend(*tensors))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in seen
    assert kernel_among(seen) == "flash"


@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_only_the_chosen_kernel_runs(normal: Normal, kernel: str) -> None:
    tensors = heads(normal, 3, 7, 7)
    with only(kernel):
        assert kernel_among(operators_of(lambda: fused_attend(*tensors))) == kernel
    assert kernel_among(operators_of(lambda: fused_attend(*tensors))) == "flash"


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.filterwarnings("ignore")  # torch's reasons, one by one
def test_a_kernel_that_a_cpu_lacks_is_refused_by_torch(normal: Normal, kernel: str) -> None:
    tensors = heads(normal, 9, 7, 7)
    with only(kernel), pytest.raises(RuntimeError, match=r"No available kernel|No viable backend"):
        fused_attend(*tensors)


def test_the_explicit_attention_leaves_an_unfused_softmax(normal: Normal) -> None:
    tensors = heads(normal, 9, 7, 7)
    assert kernel_among(operators_of(lambda: attend(*tensors))) == "unfused"


@pytest.mark.parametrize(
    ("operators", "kernel"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu aten::empty", "flash"),
        ("aten::scaled_dot_product_attention aten::_scaled_dot_product_flash_attention", "flash"),
        ("aten::_scaled_dot_product_flash_attention_backward", "flash"),
        ("aten::_scaled_dot_product_efficient_attention aten::_efficient_attention_forward", "efficient"),
        ("aten::_scaled_dot_product_cudnn_attention aten::_cudnn_attention_forward", "cudnn"),
        ("aten::_scaled_dot_product_attention_math aten::_safe_softmax aten::bmm", "math"),
        ("aten::_scaled_dot_product_attention_math_for_mps", "mps"),
        ("aten::_scaled_dot_product_fused_attention_overrideable", "overrideable"),
        ("aten::softmax aten::_softmax aten::bmm", "unfused"),
        ("aten::_native_multi_head_attention aten::_masked_softmax", "unfused"),
        ("aten::scaled_dot_product_attention", None),
        ("aten::bmm aten::_flash_attention_forward", None),
        ("", None),
    ],
)
def test_by_name_the_kernel_among_operators(operators: str, kernel: str | None) -> None:
    assert kernel_among(frozenset(operators.split())) == kernel


def test_every_kernel_that_can_be_chosen_can_be_told_by_the_name_of_its_operator() -> None:
    schemas = {schema.name for schema in torch._C._jit_get_all_schemas()}
    ours = [name for name in schemas if name.startswith("aten::_scaled_dot_product") and "backward" not in name]
    assert {kernel_among(frozenset({name})) for name in ours} == {*KERNELS, "mps", "overrideable"}


def test_operators_inside_others_are_seen_and_a_fault_is_passed_on() -> None:
    rows = torch.ones(3, 5, requires_grad=True)
    seen = operators_of(lambda: torch.nn.functional.linear(rows, rows).sum().backward())
    assert {"aten::linear", "aten::sum", "aten::mm"} <= seen
    with pytest.raises(ZeroDivisionError):
        operators_of(lambda: 1 // 0)
    assert operators_of(lambda: None) == frozenset()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """`operators(*calls)` puts these in place of torch's for a CPU, and answers with a list of those that were called."""
    fused._is_trusted.cache_clear()

    def replace(*calls: Callable[..., Sequence[Tensor]]) -> list[str]:
        names: list[str] = []

        def noted(number: int, call: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
            return lambda *how: (names.append(f"{number}"), call(*how))[1]

        made = tuple(fused._Operator(f"kernel {n}", noted(n, call)) for n, call in enumerate(calls))
        monkeypatch.setattr(fused, "_OPERATORS", {"cpu": made})
        fused._is_trusted.cache_clear()
        return names

    yield replace
    fused._is_trusted.cache_clear()


def right(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Sequence[Tensor]:
    """What an operator should give, with more behind it, from the definition."""
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -torch.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1), torch.tensor(7)


def in_bits(*how: Any) -> Sequence[Tensor]:
    z, lse, _ = right(*how)
    return z, lse / math.log(2)


def broken(fault: Exception) -> Callable[..., Sequence[Tensor]]:
    def call(*how: Any) -> Sequence[Tensor]:
        raise fault

    return call


WRONG: dict[str, Callable[..., Sequence[Tensor]]] = {
    "lse to base 2": in_bits,
    "lse of another shape": lambda *how: (right(*how)[0], right(*how)[1].mT),
    "no lse at all": lambda *how: (right(*how)[0], torch.empty(0)),
    "lse of NaN": lambda *how: (right(*how)[0], right(*how)[1] * torch.nan),
    "no scale": lambda q, k, v, scale, causal: right(q, k, v, 1.0, causal),
    "no causality": lambda q, k, v, scale, causal: right(q, k, v, scale, False),
    "always causal": lambda q, k, v, scale, causal: right(q, k, v, scale, True),
    "z of other heads": lambda *how: (right(*how)[0].flip(1), right(*how)[1]),
    "z of zeros": lambda *how: (0 * right(*how)[0], right(*how)[1]),
    "an operator that torch lacks": broken(AttributeError("'_OpNamespace' 'aten' object has no attribute")),
    "an operator with other arguments": broken(TypeError("takes 8 arguments")),
    "an operator that refuses": broken(RuntimeError("only for half precision")),
    "an operator for another device": broken(NotImplementedError("Could not run 'aten::…'")),
}


@pytest.mark.parametrize("n_kv_heads", [9, 3, 1])
@pytest.mark.parametrize("name", WRONG)
def test_an_operator_that_is_wrong_is_never_used(normal: Normal, name: str, n_kv_heads: int, operators: Any) -> None:
    q, k, v = heads(normal, n_kv_heads, 7, 7)
    operators(WRONG[name])
    for causal in (False, True):
        assert fused_lse(q, k, v, scale=0.3, causal=causal) is None


def test_the_first_operator_that_is_right_is_used(normal: Normal, operators: Any) -> None:
    q, k, v = heads(normal, 3, 7, 7)
    called = operators(in_bits, right, right)
    found = fused_lse(q, k, v, scale=0.3, causal=True)
    assert found is not None
    assert found[2] == "kernel 1"
    assert "2" not in called


def test_without_operators_for_a_device_there_is_nothing(normal: Normal, operators: Any) -> None:
    operators()
    assert fused_lse(*heads(normal, 3, 7, 7), scale=0.3, causal=False) is None
    on_meta = [t.to("meta") for t in heads(normal, 3, 7, 7)]
    assert fused_lse(*on_meta, scale=0.3, causal=False) is None


def test_an_operator_is_tried_once_for_tensors_of_a_kind(normal: Normal, operators: Any) -> None:
    called = operators(right)
    q, k, v = heads(normal, 3, 7, 7)
    counts = []
    for tensors in ((q, k, v), (q, k, v), (q[:1], k[:1], v[:1]), (q.float(), k.float(), v.float()), (q, k, v[..., :5])):
        assert fused_lse(*tensors, scale=0.3, causal=True) is not None
        counts.append(len(called))
    assert counts == [3, 4, 5, 8, 11]  # a trial is two calls, causal and not


def test_an_operator_is_trusted_for_the_widths_that_it_was_tried_with(normal: Normal, operators: Any) -> None:
    def narrow(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Sequence[Tensor]:
        if v.shape[-1] != q.shape[-1]:
            raise RuntimeError("values must be as wide as keys")
        return right(q, k, v, *how)

    operators(narrow)
    q, k, v = heads(normal, 3, 7, 7)
    assert fused_lse(q, k, v, scale=0.3, causal=False) is not None
    assert fused_lse(q, k, v[..., :5], scale=0.3, causal=False) is None


def definition(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Sequence[Tensor]:
    seen: dict[str, Tensor] = {}
    allowed = masks.causal() if causal else None
    z = attend(q, k, v, scale=scale, allowed=allowed, tap=lambda site, tensor, **_: seen.update({site: tensor}))
    return z, seen["scores"].logsumexp(dim=-1)


@pytest.mark.parametrize("n_kv_heads", [9, 3, 1])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(7, 7), (5, 7), (7, 5), (1, 13), (40, 700)])
def test_the_fused_sum_is_that_of_attend_and_query_0_is_token_0(
    normal: Normal, n_kv_heads: int, causal: bool, sizes: tuple[int, int]
) -> None:
    q, k, v = heads(normal, n_kv_heads, *sizes)
    found = fused_lse(q, k, v, scale=0.4, causal=causal)
    assert found is not None
    assert found[2] == "flash"
    for ours, theirs in zip(found[:2], definition(q, k, v, scale=0.4, causal=causal), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("n_kv_heads", [3, 1])
def test_shared_kv_heads_are_handed_over_without_a_copy(normal: Normal, n_kv_heads: int, operators: Any) -> None:
    handed: list[tuple[Tensor, Tensor]] = []

    def look(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Sequence[Tensor]:
        handed.append((k, v))
        return right(q, k, v, *how)

    operators(look)
    q, k, v = heads(normal, n_kv_heads, 7, 7)
    found = fused_lse(q, k, v, scale=0.4, causal=False)
    assert found is not None
    for own, theirs in zip((k, v), handed[-1], strict=True):
        assert theirs.shape == (2 * n_kv_heads, 9 // n_kv_heads, 7, 11)
        assert theirs.stride(1) == 0
        assert theirs.data_ptr() == own.data_ptr()
    for ours, theirs in zip(found[:2], definition(q, k, v, scale=0.4, causal=False), strict=True):
        assert (ours - theirs).abs().max() <= 1e-12


def test_a_sum_that_is_longer_than_the_queries_is_cut(normal: Normal, operators: Any) -> None:
    """As the memory-efficient kernel gives it."""

    def padded(*how: Any) -> Sequence[Tensor]:
        z, lse, _ = right(*how)
        return z, torch.nn.functional.pad(lse, (0, 25), value=torch.inf)

    operators(padded)
    q, k, v = heads(normal, 3, 5, 7)
    found = fused_lse(q, k, v, scale=0.4, causal=True)
    assert found is not None
    expected = definition(q, k, v, scale=0.4, causal=True)
    assert (found[1] - expected[1]).abs().max() <= 1e-12


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5)])
def test_an_operator_that_takes_the_last_query_for_the_last_key_is_not_used_where_it_matters(
    normal: Normal, sizes: tuple[int, int], operators: Any
) -> None:
    """torch's own flash for CUDA does: `scaled_dot_product_attention` never hands it causal inputs that are not square."""

    def aligned_with_the_end(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Sequence[Tensor]:
        scores = q @ k.mT * scale
        if causal:
            later = torch.ones(q.shape[2], k.shape[2]).triu(1 + k.shape[2] - q.shape[2]).bool()
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(dim=-1).nan_to_num(0.0) @ v, scores.logsumexp(dim=-1)

    operators(aligned_with_the_end)
    q, k, v = heads(normal, 3, *sizes)
    found = fused_lse(q, k, v, scale=0.4, causal=True)
    if found is not None:
        for ours, theirs in zip(found[:2], definition(q, k, v, scale=0.4, causal=True), strict=True):
            assert (ours - theirs).abs().max() <= 1e-12
