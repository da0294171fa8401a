"""The sample files of an installed package, beside which pip puts compiled ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mhacli.commands import samples


def test_compiled_files_beside_the_samples_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__pycache__" / "my_gpt.pyc").write_bytes(b"\0")
    (package / "my_gpt.py").write_text("print()\n")
    monkeypatch.setattr(samples, "_folder", lambda: package)
    samples.samples.perform({"folder": str(tmp_path / "out")})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["my_gpt.py"]
