"""The Python names of `mhacli`: each exists, is documented, and its errors say what is wrong and
how to mend it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhacli

NAMES = """
    Config MhaError MultiHeadAttention Record assert_right bench check diff doctor effects heads
    inspect inspecting load removed
""".split()


def test_every_public_name_is_listed_and_documented() -> None:
    assert list(mhacli.__all__) == sorted(mhacli.__all__)
    assert dir(mhacli) == list(mhacli.__all__)
    assert set(mhacli.__all__) >= {*NAMES, "__version__"}
    for name in NAMES:
        assert getattr(mhacli, name).__doc__, name
    assert Path(mhacli.__file__).with_name("py.typed").exists()
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        mhacli.nothing_of_that_name  # noqa: B018


@pytest.mark.parametrize(
    ("call", "exit_code", "mentions"),
    [
        (lambda: mhacli.load("missing.safetensors"), 1, "missing.safetensors"),
        (lambda: mhacli.inspect("the cat", mhacli.Config(n_heads=5)), 2, "5"),
        (lambda: mhacli.inspect("", mhacli.Config()), 1, "token"),
        (lambda: mhacli.bench([64], backends=["none"]), 2, "none"),
        (lambda: mhacli.bench([8.5]), 2, "lengths="),
        (lambda: mhacli.bench([8], repeat=0), 2, "repeat=0"),
        (lambda: mhacli.doctor(device="cuda:99"), 1, "cuda:99"),
        (lambda: mhacli.check(7), 2, "int"),
        (lambda: mhacli.MultiHeadAttention(7, 2), 2, "7"),
    ],
    ids=["load", "inspect", "empty", "bench", "lengths", "repeat", "doctor", "check", "layer"],
)
def test_an_error_has_a_message_a_code_and_an_exit_code(
    call: Callable[[], Any], exit_code: int, mentions: str
) -> None:
    with pytest.raises(mhacli.MhaError) as caught:
        call()
    fault = caught.value
    assert fault.exit_code == exit_code
    assert fault.code
    assert fault.hint is None or fault.hint.strip()
    assert mentions in fault.message
    assert fault.message in str(fault)


def _small() -> mhacli.Record:
    return mhacli.inspect("the cat sat", mhacli.Config(n_heads=2, device="cpu"))


class Attention(nn.Module):
    def __init__(self, d_model: int, n_heads: int, glub) -> None:
        super().__init__()
        self.q, self.n_heads = nn.Linear(d_model, d_model), n_heads

    def forward(self, x: Tensor, wibble: object) -> Tensor:
        return self.q(x) * wibble.factor


class Sized(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x)


def _config(**given: Any) -> Callable[[], Any]:
    return lambda: mhacli.inspect("the cat", mhacli.Config(**given))


@pytest.mark.parametrize(
    ("call", "mentions"),
    [
        (_config(n_heads=5), ["n_heads=5", "n_heads=4", "d_model=65", "d_head"]),
        (_config(n_heads=4, n_kv_heads=3), ["n_kv_heads=3", "n_kv_heads=4"]),
        (_config(positions="rope", d_head=3), ["positions rope", "d_head=4"]),
        (_config(device="cuda:99"), ["device cuda:99", "device cpu"]),
        (lambda: mhacli.MultiHeadAttention(7, 2), ["n_heads=2", "d_model=8"]),
        (lambda: mhacli.inspect("a" * 4000), ["max_token_len=10000"]),
        (lambda: mhacli.load(__file__), ["text file"]),
        (lambda: mhacli.diff(nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(2), map=["a"]), ["map"]),
        (lambda: mhacli.check(Attention, arguments={"glub": 1}, sees="q >="), ["sees"]),
        (lambda: mhacli.check(Sized), ['arguments={"glub": 64}']),
        (lambda: mhacli.check(Attention, arguments={"glub": 1}), ["wibble", "example"]),
        (lambda: mhacli.check(Attention, accept={"glob": "why"}), ["accept", "glob"]),
        (lambda: mhacli.assert_right(Sized), ['arguments={"glub": 64}']),
        (lambda: mhacli.doctor(texts=["the cat"]), ["model"]),
        (lambda: mhacli.doctor("no-such-folder"), ["no-such-folder"]),
        (lambda: mhacli.doctor(dtype="foo"), ["dtype foo"]),
        (lambda: mhacli.bench([8], foo=3), ["bench", "foo"]),
        (lambda: mhacli.effects(nn.Linear(2, 2).eval(), [[1]], metric=3), ["metric 3"]),
        (lambda: mhacli.MultiHeadAttention(8, 2)(torch.ones(2, 3, 7)), ["query", "7", "d_input 8"]),
        (lambda: mhacli.bench([8], n_heads=[3], n_kv_heads=[2]), ["n_kv_heads=2", "n_kv_heads=3"]),
        (lambda: mhacli.bench([8], budget_s=-1), ["budget_s=-1"]),
        (lambda: mhacli.bench([8], decode=True, directions=["both"]), ["directions", "decode"]),
        (lambda: mhacli.heads("no-such-folder", "the cat"), ["no-such-folder"]),
        (lambda: mhacli.effects("folder", [[1]]), ["from_pretrained"]),
        (lambda: mhacli.inspecting("folder").__enter__(), ["from_pretrained"]),
        (lambda: mhacli.removed(nn.Linear(2, 2), [(0, 1)], replace="x").__enter__(), ["replace"]),
        (lambda: mhacli.record_of(torch.ones(1, 2, 3, 3)), ["axes"]),
        (lambda: mhacli.record_of([torch.ones(1, 2, 3, 3)], tokens=["a"] * 3), ["raw=True"]),
        (lambda: _small().save(__file__), ["force=True"]),
        (lambda: _small().pattern(head=9), ["head 9"]),
    ],
)
def test_errors_in_python_name_parameters_and_no_command(
    call: Callable[[], Any], mentions: list[str]
) -> None:
    with pytest.raises(mhacli.MhaError) as caught:
        call()
    fault = caught.value
    words = f"{fault.message}\n{fault.hint or ''}"
    assert [word for word in mentions if word not in words] == []
    for said in (words, "".join(traceback.format_exception_only(fault))):
        assert not re.search(r"(?<!\w)--\w|exit code|\bmha (run|show|check|explain|trace)\b", said)
    assert fault.hint is None or f"hint: {fault.hint}" in fault.__notes__


def of_tanh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).tanh().softmax(-1) @ v


@pytest.mark.parametrize("target", [of_tanh, nn.Linear(8, 8)], ids=["attention", "none"])
def test_reports_in_python_name_parameters_and_no_command(target: Any) -> None:
    report = mhacli.check(target)
    assert report.verdict == "unknown"
    assert "example=" in str(report)
    assert ("against=" in "".join(report.next_steps)) == (target is of_tanh)
    for said in (str(report), repr(report), unescape(report._repr_html_()), *report.next_steps):
        assert not re.search(r"(?<![-\w])--[a-z]\w* |\bmha (run|check|explain|trace)\b", said)


def test_a_path_of_a_record_is_a_text_or_a_path_object(tmp_path: Path) -> None:
    record = mhacli.inspect("the cat sat", mhacli.Config(n_heads=2, device="cpu"))
    record.save(str(tmp_path / "r"))
    assert mhacli.load(tmp_path / "r").sequences == record.sequences
    assert mhacli.diff(tmp_path / "r", record, tolerance=0).verdict == "agree"


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_that_no_difference_could_exceed_is_refused(tolerance: float) -> None:
    record = mhacli.inspect("the cat sat", mhacli.Config(n_heads=2, device="cpu"))
    with pytest.raises(mhacli.MhaError) as caught:
        mhacli.diff(record, record, tolerance=tolerance)
    assert caught.value.exit_code == 2
