"""A fault of mha never becomes a verdict about the code that it examines, nor a layer that is
missing in its results.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import faults, some


def wrong_outcomes(n: int, *options: str) -> list[object]:
    """What a sample of the faults that `python tests/kills.py --faults` tries became instead of
    internal errors.
    """
    command = [sys.executable, "-m", "support.faults", "--sample", str(n), "--json", *options]
    done = subprocess.run(
        command, cwd=faults.ROOT / "tests", capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    assert result["n_tried"] == n
    return list(result["wrong"])


@pytest.mark.real
def test_a_fault_of_mha_never_becomes_a_verdict() -> None:
    assert wrong_outcomes(60) == []


@pytest.mark.parametrize("n", some((8, 40), default=(8,)))
def test_a_fault_of_mha_in_a_call_that_swallows_exceptions_is_an_internal_error(n: int) -> None:
    assert wrong_outcomes(n, "--in-memory") == []
