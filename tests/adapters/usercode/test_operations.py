"""Recording torch operations in a user's attention: name, values at the time, and source line."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhacli.adapters.usercode.operations as watching
from mhacli.adapters.usercode.operations import watch
from mhacli.adapters.usercode.types import Operation
from mhacli.errors import MhaError

HERE = [__file__]
A, B = torch.randn(2, 3, generator=torch.manual_seed(0)), torch.randn(3, 2)


def watched(ask: object) -> tuple[Operation, ...]:
    return watch(ask, HERE)[1]  # type: ignore[arg-type]


def line_of(text: str) -> int:
    (number,) = [n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip() == text]
    return number


class Attention(nn.Module):
    """Attention that scales and masks in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.o = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.mT
        scores /= math.sqrt(6)
        scores.masked_fill_(torch.ones(5, 5).tril() == 0, float("-inf"))
        scores[:, 0, 0] = 7.0
        pattern = nn.Softmax(dim=-1)(scores)
        out: Tensor = self.o(pattern @ v)
        return out


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda: A @ B, "matmul"), (lambda: torch.matmul(A, B), "matmul"), (lambda: A.matmul(B), "matmul"),
        (lambda: torch.mm(A, B), "mm"), (lambda: torch.bmm(A[None], B[None]), "bmm"),
        (lambda: torch.softmax(A, -1), "softmax"), (lambda: A.softmax(-1), "softmax"),
        (lambda: F.softmax(A, -1), "softmax"), (lambda: nn.Softmax(-1)(A), "softmax"),
        (lambda: torch.nn.functional.linear(A, A), "linear"), (lambda: nn.Dropout(0.5)(A), "dropout"),
        (lambda: A + 1, "add"), (lambda: 2 * A, "mul"), (lambda: 1 - A, "sub"), (lambda: 1 / A, "div"),
        (lambda: A.T, "transpose"), (lambda: A.mT, "transpose"), (lambda: A.swapaxes(0, 1), "transpose"),
        (lambda: A > 0, "gt"), (lambda: ~(A > 0), "logical_not"), (lambda: A[0], "getitem"),
        (lambda: torch.concat([A, A]), "cat"), (lambda: torch.where(A > 0, A, 0.0), "where"),
    ],
)  # fmt: skip
def test_an_operation_has_one_name_whichever_way_it_is_written(ask: object, name: str) -> None:
    assert watched(ask)[-1].name == name


def test_operations_come_in_order_with_their_source_line() -> None:
    module, x = Attention(), torch.randn(2, 5, 6)
    out, operations = watch(lambda: module(x), HERE)
    names = [one.name for one in operations]
    assert names == [
        "linear", "chunk", "chunk", "chunk", "transpose", "matmul", "div_", "ones", "tril", "eq", "masked_fill_",
        "setitem", "softmax", "matmul", "linear",
    ]  # fmt: skip
    assert torch.equal(out, module(x))
    assert operations[-1].output is out
    scaled = operations[6]
    assert (scaled.file, scaled.line) == (__file__, line_of("scores /= math.sqrt(6)"))
    assert scaled.source == "scores /= math.sqrt(6)"
    assert operations[0].line == line_of("q, k, v = self.qkv(x).chunk(3, dim=-1)")
    assert [one.arguments["output"] for one in operations[1:4]] == [0, 1, 2]


def test_what_a_later_operation_overwrites_keeps_the_numbers_that_it_had() -> None:
    module, x = Attention(), torch.randn(2, 5, 6)
    _, operations = watch(lambda: module(x), HERE)
    product, scaled, masked, written = (operations[i] for i in (5, 6, 10, 11))
    q, k, _ = F.linear(x, module.qkv.weight, module.qkv.bias).chunk(3, dim=-1)
    qk = q @ k.transpose(-1, -2)
    assert torch.equal(product.output, qk)
    assert torch.equal(scaled.inputs[0], qk)
    assert torch.equal(scaled.output, qk / math.sqrt(6))
    assert not torch.isinf(masked.inputs[0]).any()
    assert torch.isinf(masked.output[:, 0, 1:]).all()
    assert (written.inputs[0][:, 0, 0] != 7).all()
    assert (written.output[:, 0, 0] == 7).all()


def test_an_input_is_the_output_of_the_operation_that_made_it() -> None:
    module = Attention()
    _, operations = watch(lambda: module(torch.ones(2, 5, 6)), HERE)
    made = {id(one.output): number for number, one in enumerate(operations)}
    chain = {6: 5, 10: 6, 11: 10, 12: 11, 13: 12, 14: 13}
    inner = operations[1:] if operations[0].name == "ones" else operations
    offset = len(operations) - len(inner)
    for number, source in chain.items():
        assert made[id(inner[number].inputs[0])] == source + offset


def test_arguments_have_names_however_they_were_given() -> None:
    (whole,) = watched(lambda: A.masked_fill(torch.tensor(True), float("-inf")))[-1:]
    assert whole.arguments == {"value": float("-inf")}
    assert len(whole.inputs) == 2
    assert watched(lambda: A.view(3, 2))[-1].arguments == {"shape": (3, 2)}
    assert watched(lambda: A.reshape((6,)))[-1].arguments == {"shape": (6,)}
    assert watched(lambda: A.permute(1, 0))[-1].arguments == {"dims": (1, 0)}
    assert watched(lambda: A.transpose(0, -1))[-1].arguments == {"dim0": 0, "dim1": -1}
    assert watched(lambda: A.sum(axis=1))[-1].arguments == {"dim": 1}  # type: ignore[call-overload]
    assert watched(lambda: 1 - A)[-1].arguments == {"input": 1}
    assert watched(lambda: torch.einsum("ij,jk->ik", A, B))[-1].arguments == {"equation": "ij,jk->ik"}
    softmax = watched(lambda: F.softmax(A, dim=0))[-1]
    assert softmax.arguments["dim"] == 0
    assert "_stacklevel" not in softmax.arguments


def test_the_method_where_has_its_tensors_in_the_order_of_the_function() -> None:
    condition = A > 0
    for ask in (lambda: A.where(condition, B.T), lambda: torch.where(condition, A, B.T)):
        one = watched(ask)[-1]
        assert one.inputs[0] is condition
        assert one.inputs[1] is A


def test_the_fused_kernel_is_recorded_with_its_mask_and_causality() -> None:
    q = torch.randn(2, 3, 5, 4)
    one = watched(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3))[-1]
    assert one.name == "scaled_dot_product_attention"
    assert len(one.inputs) == 3
    assert one.arguments == {"is_causal": True, "scale": 0.3}
    mask = torch.ones(5, 5).tril().bool()
    assert watched(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask))[-1].inputs[3] is mask


def test_the_inner_operations_of_torchs_own_attention_are_seen_without_a_line() -> None:
    module = nn.MultiheadAttention(6, 3, batch_first=True).eval()
    x = torch.randn(2, 5, 6)
    (out, _), operations = watch(lambda: module(x, x, x), [])
    names = [one.name for one in operations]
    assert "multi_head_attention_forward" not in names
    assert {"linear", "bmm", "softmax"} <= set(names)
    assert {one.file for one in operations} == {None}
    torch.testing.assert_close(out, module(x, x, x)[0])


def test_what_was_changed_to_see_inside_is_put_back_also_when_it_raises() -> None:
    before = torch.overrides.has_torch_function
    module = nn.MultiheadAttention(6, 3)
    with pytest.raises(AssertionError):
        watch(lambda: module(torch.ones(2, 5, 4), torch.ones(2, 5, 4), torch.ones(2, 5, 4)), [])
    assert F.has_torch_function is before  # type: ignore[attr-defined]
    watch(lambda: module(*[torch.ones(2, 5, 6)] * 3), [])
    assert F.has_torch_function is before  # type: ignore[attr-defined]


def test_too_many_operations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_OPERATIONS", 3)
    with pytest.raises(MhaError, match=r"^one call runs more than 3 operations, too many to record$"):
        watched(lambda: A + 1 + 1 + 1 + 1)


def test_a_function_inside_of_vmap_is_left_out_and_harms_nothing() -> None:
    out, _ = watch(lambda: torch.vmap(lambda row: row * 2)(A), HERE)
    assert torch.equal(out, A * 2)
