"""The shapes in the annotations of attention hold in every call that the tests of attention
make.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.real
def test_every_annotated_shape_holds() -> None:
    words = ["-n0", "-rs", "-p", "no:cacheprovider", "tests/contract/attend"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MHA_TESTS_CHECK_SHAPES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert (
        Path(__file__).name not in done.stdout
    )  # the reason of a test that is skipped without the variable
