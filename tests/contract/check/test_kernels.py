"""A kernel with the signature and the order of axes that it has is compared as any function of q, k
and v, and one of Triton on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import some, user_code

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = Path(__file__).with_name("cases")
SIGNATURES = CASES / "signatures.py"
TRITON = CASES / "triton_kernels.py"
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="it needs triton"
)


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
    "Texts": Signature("forward(hidden_states, cu_seqlens=…)  # rows [total, d]"),
    "ByHand": Signature("forward(q, k, v, causal=False"),
    "by_hand": Signature("forward(q, k, v, causal=False"),
}


@pytest.mark.parametrize(
    "name", some(RIGHT, default=("by_strides", "packed_heads", "packed_keys", "Texts", "by_hand"))
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
    assert re.match(rf"(in \w+ attention: )?{re.escape(mistake.evidence)}", finding.evidence)
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


# ------------------------------------------------------------------------------------------- triton


IMITATED = """
import os
import triton
from signatures import attention
assert os.environ.get("TRITON_INTERPRET") == "1"


def attend(q, k, v):
    return attention(q, k, v)
"""


def test_a_file_that_imports_triton_is_interpreted_where_there_is_no_gpu(
    tmp_path: Path, mha: Any
) -> None:
    (tmp_path / "triton.py").touch()
    (tmp_path / "signatures.py").write_text(SIGNATURES.read_text())
    (tmp_path / "imitated.py").write_text(IMITATED)
    document = json.loads(mha("check", "imitated.py:attend", "--json").stdout)
    assert document["verdict"] == "right", document["summary"]
    compared = document["compared"]
    assert compared["interpreted"]
    assert (max(compared["lengths"]), len(compared["shapes"])) == (130, 8)
    assert all("H=1" in shape or "H=2" in shape for shape in compared["shapes"])
    assert compared["dtypes"] == ["float32", "float16"]
    assert "in Triton's interpreter" in document["summary"]
    longer = json.loads(mha("check", "imitated.py:attend", "--json", "--length", "200").stdout)
    assert max(longer["compared"]["lengths"]) == 200


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        ("RuntimeError('0 active drivers ([]).')", "needs a GPU, or Triton's interpreter"),
        ("ValueError('cannot be accessed from Triton (cpu tensor?)')", "TRITON_INTERPRET=1"),
    ],
)
def test_what_runs_a_kernel_is_said(raised: str, says: str) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        raise eval(raised)

    with pytest.raises(mhacli.MhaError) as error:
        mhacli.check(attend)
    assert says in f"{error.value} {error.value.hint}"


@pytest.mark.real
@NEEDS_TRITON
def test_triton_without_block_pointers_is_named_with_its_version() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        raise NotImplementedError("Block pointers have been removed")  # triton 3.9 says it

    with pytest.raises(mhacli.MhaError) as error:
        mhacli.check(attend)
    version = importlib.metadata.version("triton")
    assert f"uses block pointers, which triton {version} lacks" in str(error.value)


KEYS = "for start in range(0, n_k, BLOCK):"
TRITON_MISTAKES = {
    "last block dropped": Mistake(
        KEYS,
        "for start in range(0, tl.maximum(n_k // BLOCK, 1) * BLOCK, BLOCK):",
        "differs-beyond",
        "out differs",
        "only where the last block of 32 keys is incomplete",
    ),
    "sum not rescaled": Mistake(
        "total = total * shrink +", "total = total +", "differs-beyond", "out differs", "keys"
    ),
    "keys beyond the last": Mistake(
        'scores = tl.where(keys[None, :] < n_k, scores, float("-inf"))',
        'scores = tl.where((keys[None, :] < n_k) | (n_k > BLOCK), scores, float("-inf"))',
        "differs-beyond",
        "out differs",
        "only where the last block of 32 keys is incomplete",
    ),
    "dk without scale": Mistake(
        "dk_rows * scale", "dk_rows", "gradient-differs", "dk differs", "at every shape"
    ),
    "dq of the last block alone": Mistake(
        "tl.atomic_add(dq + at_rows, tl.dot(d_scores, k_rows) * scale, mask=is_row)",
        "tl.store(dq + at_rows, tl.dot(d_scores, k_rows) * scale, mask=is_row)",
        "gradient-differs",
        "dq differs",
        "only with more than 7 keys",
    ),
    "delta left out": Mistake(
        " - deltas[:, None])", ")", "gradient-differs", "dq, dk differ", "at every shape"
    ),
    "causal corner of the backward": Mistake(
        "rows[:, None] + n_k - n_q, weights",
        "rows[:, None], weights",
        "gradient-differs",
        "dq, dk, dv differ",
        "Tq",
    ),
}


@pytest.mark.real
@NEEDS_TRITON
@pytest.mark.parametrize("name", ["attend", "attend_causally"])
def test_a_right_kernel_of_triton_is_right_in_the_interpreter(mha: Any, name: str) -> None:
    process = mha("check", f"{TRITON}:{name}", "--json", "--time-limit", "60", cold=True)
    document = json.loads(process.stdout)
    assert document["verdict"] == "right", document["summary"]
    compared = document["compared"]
    assert compared["interpreted"]
    assert compared["backward"]["compared"]
    assert max(compared["lengths"]) == 130
    assert compared["dtypes"] == ["float32", "float16"]


@pytest.mark.real
@NEEDS_TRITON
@pytest.mark.parametrize("mistake", TRITON_MISTAKES)
def test_a_mistake_of_a_kernel_of_triton_is_found(tmp_path: Path, mha: Any, mistake: str) -> None:
    each = TRITON_MISTAKES[mistake]
    path = changed(tmp_path, TRITON, each.old, each.new)
    target = f"{path}:{'attend' if mistake == 'keys beyond the last' else 'attend_causally'}"
    process = mha("check", target, "--json", "--time-limit", "60", code=3, cold=True)
    (finding,) = json.loads(process.stdout)["findings"]
    assert finding["code"] == each.code
    assert finding["evidence"].startswith(each.evidence)
    assert each.where in finding["where"]
