"""A fault of mha in a copy of the process is none of the file, and a note reaches the terminal."""

import sys
import warnings

import pytest

from mhacli.cli.app import main
from mhacli.errors import MhaError
from mhacli.io.bounded import bounded


def test_a_result_that_cannot_be_sent_is_a_fault_of_mha() -> None:
    with pytest.raises(RuntimeError, match="process of its own"):
        bounded("the chat template", "m", object)


def test_memory_that_is_missing_is_said_of_the_file() -> None:
    with pytest.raises(MhaError, match="more than 1 GiB"):
        bounded("the chat template", "m", lambda: "a" * (3 << 30))


def test_a_warning_that_is_not_of_numpy_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mha", "--version"])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        main()
        for text in ("torch computes statistics: no compiler", "overflow encountered in cast"):
            warnings.warn_explicit(text, RuntimeWarning, "f.py", 1, module="mhacli.attention")
    assert [str(each.message) for each in shown] == ["torch computes statistics: no compiler"]
