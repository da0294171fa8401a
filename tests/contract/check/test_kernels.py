"""A kernel with the signature and the order of axes that it has is compared as any function of q, k
and v.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import some, user_code

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = Path(__file__).with_name("cases")
SIGNATURES = CASES / "signatures.py"


class Signature(NamedTuple):
    """How a function is called: words of the report, and the choices that it names."""

    called: str
    choices: tuple[str, ...] = ()


RIGHT = {
    "heads": Signature("heads(q, k, v)"),
    "tokens": Signature("tokens(q, k, v)  # rows [batch, seq, head, d]"),
    "needs_scale": Signature("causal=False, sm_scale=0.35"),
    "needs_window": Signature("window=16", ("causal", "own-pattern")),
    "by_strides": Signature("rows [batch, seq, head, d]"),
    "packed_tokens": Signature("rows [batch, seq, part, head, d]"),
    "packed_heads": Signature("rows [batch, part, head, seq, d]"),
    "packed_first": Signature("rows [part, batch, head, seq, d]", ("causal",)),
    "packed_keys": Signature("packed_keys(q, kv)  # rows [batch, seq, part, head, d]"),
    "texts": Signature("max_seqlen_q=5, max_seqlen_k=11)  # rows [total, head, d]"),
    "causal_texts": Signature("rows [total, head, d]", ("meant-causal",)),
    "packed_texts": Signature("max_seqlen=7)  # rows [total, part, head, d]"),
    "ByHand": Signature("forward(q, k, v, causal=False"),
    "by_hand": Signature("forward(q, k, v, causal=False"),
}


@pytest.mark.parametrize(
    "name", some(RIGHT, default=("by_strides", "packed_heads", "packed_keys", "texts", "by_hand"))
)
def test_a_right_kernel_is_right_with_its_own_signature(name: str) -> None:
    expected = RIGHT[name]
    examination = user_code.check(getattr(user_code.load(SIGNATURES), name))
    assert examination.verdict == "right", examination.summary
    assert expected.called in examination.called
    assert max(examination.compared.lengths) == 257
    assert examination.compared.backward.compared
    assert tuple(choice.name for choice in examination.choices) == expected.choices


class Mistake(NamedTuple):
    """What stands in the place of what, the code of its finding, what its evidence begins with, and
    where it shows.
    """

    old: str
    new: str
    code: str
    evidence: str
    where: str


BLOCKS = "n_k = q.shape[1] // k.shape[1], k.shape[2]"
LAST_BLOCK = Mistake(
    BLOCKS,
    f"{BLOCKS} // BLOCK * BLOCK or k.shape[2]",
    "differs-beyond",
    "out differs",
    "only where the last block of 32 keys is incomplete",
)
DK_TWICE = Mistake(
    "return dq, dk, dv,",
    "return dq, 2 * dk, dv,",
    "gradient-differs",
    "dk differs",
    "at every shape",
)
WRONG = {
    **dict.fromkeys(("tokens", "by_strides", "packed_heads", "packed_keys", "texts"), LAST_BLOCK),
    "by_hand": DK_TWICE,
    "as_many_keys": Mistake("", "", "differs-beyond", "out differs", "only where Tq < Tk"),
}


def changed(folder: Path, file: Path, old: str, new: str) -> Path:
    """A copy of a file with another piece."""
    text = file.read_text()
    assert old in text
    path = folder / file.name
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize("name", some(WRONG, default=("packed_keys", "texts", "by_hand")))
def test_a_mistake_is_found_with_any_signature(tmp_path: Path, name: str) -> None:
    mistake = WRONG[name]
    path = changed(tmp_path, SIGNATURES, mistake.old, mistake.new)
    examination = user_code.check(getattr(user_code.load(path), name))
    (finding,) = examination.findings
    assert finding.code == mistake.code
    assert finding.evidence.startswith(mistake.evidence)
    assert finding.where == mistake.where


def test_texts_of_other_lengths_are_read_too(tmp_path: Path) -> None:
    ends = "[*range(0, max_seqlen_{0} * len(cu_seqlens_{0}), max_seqlen_{0})]"
    old = "(each.tolist() for each in (cu_seqlens_q, cu_seqlens_k))"
    path = changed(tmp_path, SIGNATURES, old, f"({ends.format('q')}, {ends.format('k')})")
    assert not user_code.check(user_code.load(path).texts).ok


@pytest.mark.parametrize("states", [{}, {"causal": True}])
def test_either_corner_of_a_causal_mask_is_a_choice(states: dict[str, Any]) -> None:
    examination = user_code.check(user_code.load(CASES / "forms.py").top_left, **states)
    assert examination.verdict == "right"
    assert "causal-top-left" in [choice.name for choice in examination.choices]


def test_a_switch_decides_and_not_a_name() -> None:
    def causal_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return user_code.load(SIGNATURES).attention(q, k, v, causal)

    assert user_code.check(causal_attention).verdict == "right"
    stated = user_code.check(causal_attention, causal=True)
    assert stated.verdict == "right"
    assert "causal=True" in stated.called
