"""Gradients without a reference are compared with the change of the outputs: of parameters that the
reference does not have, with dropout, and of attention that is not understood.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import some, user_code
from support.kernels import MISTAKES, Layer, kernel
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = user_code.load(Path(__file__).with_name("cases") / "gradients.py")


class Wrong(NamedTuple):
    """A class, the code of its mistake, and words of the evidence."""

    name: str
    code: str
    evidence: str


WRONG = {
    each.name: each
    for each in (
        Wrong("GainCut", "gradient-cut", "d q_norm.weight is"),
        Wrong("BiasCut", "gradient-cut", "d table is"),
        Wrong("DropoutDrawnAnew", "gradient-differs", "training mode with dropout"),
        Wrong("OtherInTraining", "differs-beyond", "training mode"),
        Wrong("SigmoidDoubled", "gradient-differs", "d query.weight"),
        Wrong("SigmoidCut", "gradient-cut", "d key.weight"),
        Wrong("SigmoidCutAndDoubled", "gradient-cut", "d key.weight"),
        Wrong("BackwardRaises", "gradient-differs", "raises ValueError: to do"),
    )
}


@pytest.mark.parametrize(
    "name", some([*WRONG], default=("GainCut", "DropoutDrawnAnew", "SigmoidCutAndDoubled"))
)
def test_gradients_that_do_not_fit_the_outputs_are_named(name: str) -> None:
    each = WRONG[name]
    examination = user_code.check(getattr(CASES, name)())
    assert examination.verdict == "wrong"
    assert [finding.code for finding in examination.findings] == [each.code]
    assert each.evidence in examination.findings[0].evidence
    for_inference = user_code.check(getattr(CASES, name)(), backward=False)
    if each.code.startswith("gradient"):
        assert for_inference.verdict in ("right", "unknown")


RIGHT = ("Plain", "Normed", "Biased", "DropoutByHand", "Checkpointed", "DropPath")


@pytest.mark.parametrize("name", some(RIGHT, default=()))
def test_gradients_without_a_reference_that_fit_are_right(name: str) -> None:
    examination = user_code.check(getattr(CASES, name)())
    assert examination.verdict == "right"
    assert examination.compared.backward.compared


def test_attention_in_16_bits_is_compared_as_such() -> None:
    examination = user_code.check(CASES.InBfloat16())
    assert examination.verdict == "right"
    assert any("bfloat16" in note for note in examination.notes)


@pytest.mark.parametrize(
    "name",
    some(["Sigmoid", "Selecting", "Rounding", "RoundedScale", "Kinked"], default=("RoundedScale",)),
)
def test_attention_without_a_reference_is_accused_of_no_gradient_that_may_be_meant(
    name: str,
) -> None:
    examination = user_code.check(getattr(CASES, name)())
    assert not examination.ok
    codes = [finding.code for finding in examination.findings]
    assert not [code for code in codes if code.startswith("gradient")]


class Cached(Layer):
    """The layer with a cache of keys and values."""

    def forward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """The output for each token, and the cache."""
        rows = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (each.unflatten(-1, (-1, 24)).transpose(1, 2) for each in rows)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        return self.out_proj(self.attend(q, k, v).transpose(1, 2).flatten(2)), (k, v)


@pytest.mark.parametrize("mistake", some([None, "backward from the top left"], default=()))
def test_the_gradients_of_a_step_behind_a_cache_are_examined(
    tmp_path: Path, mistake: str | None
) -> None:
    examination = user_code.check(Cached(kernel(tmp_path, mistake).attend_causally))
    found = [(finding.code, finding.where) for finding in examination.findings]
    assert found == ([] if mistake is None else [("gradient-differs", "behind a cache")])


class Block(nn.Module):
    """An attention and a layer for each token."""

    def __init__(self, attend: object) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(96), Layer(attend)
        self.ff = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.ff(x)


class GPT(nn.Module):
    """Two blocks, in which kernels show no attention weights."""

    def __init__(self, attend: object) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(65, 96), nn.Embedding(300, 96)
        self.blocks = nn.Sequential(Block(attend), Block(attend))
        self.head = nn.Linear(96, 65)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of each token."""
        return self.head(self.blocks(self.tokens(ids) + self.places(torch.arange(ids.shape[1]))))


SAME_LENGTHS = ("backward from the top left",)
"""What is no mistake where queries and keys are those of one text."""


@pytest.mark.parametrize(
    "mistake", some([None, *MISTAKES], default=(None, "last block dropped", "dk without scale"))
)
def test_a_kernel_inside_a_model_is_compared(tmp_path: Path, mistake: str | None) -> None:
    examination = user_code.check(GPT(kernel(tmp_path, mistake).attend_causally))
    (inside,) = examination.inside
    assert inside.type == "Layer"
    assert inside.names == ("blocks.0.attention", "blocks.1.attention")
    is_right = mistake is None or mistake in SAME_LENGTHS
    assert examination.verdict == ("right" if is_right else "wrong")
    assert examination.ok == is_right
    assert examination.compared.attention == is_right
    if is_right:
        assert max(examination.compared.lengths) == 257
        assert examination.compared.backward.compared


def test_a_model_without_attention_of_its_own_class_is_not_compared() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(65, 32), nn.Linear(32, 65)
            self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            q, k, v = (each(x)[:, None] for each in (self.q, self.k, self.v))
            return self.head(x + nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])

    examination = user_code.check(Flat())
    assert examination.compared is None or not examination.compared.attention
    assert examination.verdict != "right"


@pytest.mark.parametrize("option", ["--backward", "--no-backward"])
@pytest.mark.parametrize("other", [("--against", "torch.nn:MultiheadAttention"), ("--model", ".")])
def test_gradients_are_compared_with_the_reference_alone(
    mha: Any, option: str, other: tuple[str, str]
) -> None:
    target = ("torch.nn:MultiheadAttention",) if other[0] == "--against" else ()
    error = mha("check", *target, option, *other, code=2).error
    assert option in error["message"]
    assert other[0] in error["message"]
