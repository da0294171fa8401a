"""torch's fused kernels: the same z, and which of them ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mhacli.attention import attend, masks
from mhacli.attention.fused import KERNELS, fused_attend, kernel_among, only, operators_of

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
