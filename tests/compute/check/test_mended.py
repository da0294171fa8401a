"""A wrong layer passes once its mistake is corrected, so the diagnosis is about the mistake and not the style."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.attention_zoo import WRONG, Wrong
from support.examined import examined, written


@pytest.mark.sampled(17)
@pytest.mark.parametrize("case", WRONG, ids=[f"{case.file}-{case.name}" for case in WRONG])
def test_a_mended_layer_is_called_right(case: Wrong, tmp_path: Path) -> None:
    examination = examined(case, written(tmp_path, case, case.mended_text))
    assert examination.findings == ()
    assert examination.verdict == "right"
