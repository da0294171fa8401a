"""A fault of mha never becomes a verdict about the code that it examines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import faults


@pytest.mark.real
def test_a_fault_of_mha_never_becomes_a_verdict() -> None:
    """A sample of the faults that `python tests/kills.py --faults` tries."""
    command = [sys.executable, "-m", "support.faults", "--sample", "60", "--json"]
    done = subprocess.run(
        command, cwd=faults.ROOT / "tests", capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    assert result["n_tried"] == 60
    assert result["wrong"] == []
