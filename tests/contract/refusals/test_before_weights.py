"""What the config or the file system shows to be wrong is refused before weights are read: here
they cannot be.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints
from support.mha import Ended
from support.terminal import viewing

TEXT = "the cat sat on the mat"
WRONG = [
    ("run TEXT --layer 99", "--layer 99"),
    ("run TEXT --head 99", "--head 99"),
    ("run TEXT --save nowhere/r.safetensors", "nowhere"),
    ("run TEXT --html nowhere/r.html", "nowhere"),
    ("run --file missing.txt", "missing.txt"),
    ("heads TEXT --layer 99", "--layer 99"),
    ("heads TEXT --head 99", "--head 99"),
    ("heads TEXT --head 6.0", "--head '6.0'"),
    ("heads TEXT --map 99", "--map 99"),
    ("heads --file missing.txt", "missing.txt"),
    ("effect TEXT --layer 99", "--layer 99"),
    ("effect TEXT --head 6.0", "--head 6.0"),
    ("effect TEXT --head 1.99", "--head 1.99"),
    ("effect TEXT --edges --head 6.0", "--head 6.0"),
    ("effect TEXT --save nowhere/r.safetensors", "nowhere"),
    ("decode TEXT --layer 99", "--layer 99"),
    ("decode --file missing.txt --layer 0", "missing.txt"),
    ("trace TEXT --layer 99", "--layer 99"),
    ("trace TEXT --layer 0 --cell 99,0,0", "--cell 99,0,0"),
    ("trace TEXT --layer 0 --save nowhere/r.safetensors", "nowhere"),
    ("scan missing.txt --out out", "missing.txt"),
    ("scan missing-*.txt --out out", "missing-*.txt"),
    ("scan here.txt --out out --layer 99", "--layer 99"),
    ("scan here.txt --out here.txt/out", "here.txt is no folder"),
    ("scan here.txt --out out --layer last", "--layer"),
    ("diff MODEL ./missing TEXT", "./missing"),
    ("diff MODEL missing.py:build TEXT", "missing.py"),
    ("diff MODEL MODEL --file missing.txt", "missing.txt"),
    ("diff MODEL TEXT --save nowhere/r", "nowhere"),
    ("diff MODEL MODEL TEXT --html nowhere/r.html", "nowhere"),
    ("check --html nowhere/r.html", "nowhere"),
]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are cut off."""
    folder = tmp_path_factory.mktemp("before-weights") / "damaged"
    shutil.copytree(checkpoints.folder("gpt2"), folder)
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def test_the_weights_cannot_be_read(mha: Callable[..., Ended], damaged: Path) -> None:
    assert "safetensors" in mha("run", TEXT, "--model", damaged, code=1).said


@pytest.mark.parametrize(("words", "named"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_value_is_refused_before_weights_are_read(
    mha: Callable[..., Ended], damaged: Path, tmp_path: Path, words: str, named: str
) -> None:
    (tmp_path / "here.txt").write_text(TEXT)
    line = [{"TEXT": TEXT, "MODEL": damaged}.get(word, word) for word in words.split()]
    if "MODEL" not in words:
        line += ["--model", damaged]
    ended = mha(*line, code=range(1, 3))
    assert named in ended.said
    assert ".safetensors" not in ended.said.replace(named, "").replace("r.safetensors", "")


@pytest.mark.parametrize("words", ["--head 99", "--layer 99"])
def test_the_viewer_refuses_before_weights_are_read(
    damaged: Path, tmp_path: Path, words: str
) -> None:
    with viewing(tmp_path, TEXT, "--model", damaged, *words.split()) as terminal:
        terminal.until(f"mha: error: {words} is out of range")
