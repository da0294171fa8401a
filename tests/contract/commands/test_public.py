"""The Python names of `mhacli`: each exists, is documented, and its errors say what is wrong and
how to mend it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
        (lambda: mhacli.bench([8.5]), 2, "--lengths"),
        (lambda: mhacli.bench([8], repeat=0), 2, "--repeat"),
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
