"""Files of every kind with one part changed are read, or refused in a sentence: no traceback, no
fault of mha, and nothing written.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import checkpoints
from support.gguf_files import llama_gguf
from support.mha import Ended, run
from support.mutations import changed, mutated
from support.scans import corpus_file, has, sentences

LAYER = "--heads 2 --d-model 8 --repeat 1"
MODEL = "run 'the cat sat' --model m --verbose"
Make = Callable[[Path], object]


class Kind(NamedTuple):
    """How the files are made in a folder, which of them are changed, and what reads them."""

    make: Make
    files: str
    commands: tuple[str, ...]
    needs: str = "torch"


def weights(folder: Path) -> None:
    run(folder, *shlex.split(f"run 'a b c' {LAYER} --view none --save-weights w.safetensors"))


def scan(folder: Path) -> None:
    checkpoint("gpt2")(folder)
    corpus_file(folder / "c.jsonl", sentences(18))
    run(folder, *"scan c.jsonl --model m --out o --layer 1".split())
    shutil.copytree(folder / "o", folder / "whole")


def checkpoint(name: str) -> Make:
    return lambda folder: checkpoints.copy_of(name, folder / "m")


def shards(folder: Path) -> None:
    """A checkpoint whose weights are in two files."""
    place = checkpoints.copy_of("gpt2", folder / "m")
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    names = {name: f"{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in ("0.safetensors", "1.safetensors"):
        part = {name: tensors[name] for name in tensors if names[name] == file}
        save_file(part, place / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def chat(folder: Path) -> None:
    checkpoint("gpt2")(folder)
    settings = folder / "m" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the cat"}]
    (folder / "chat.json").write_text(json.dumps(messages))


def arrays(folder: Path) -> None:
    pattern = np.random.default_rng(0).random((2, 3, 4)).astype("f4")
    pattern /= pattern.sum(-1, keepdims=True)
    np.savez(folder / "a.npz", pattern=pattern)
    np.save(folder / "a.npy", pattern)
    save_file({"pattern": pattern}, folder / "a.safetensors")
    (folder / "labels.txt").write_text("the cat sat on")


def places(folder: Path) -> None:
    checkpoint("gpt2")(folder)
    run(folder, *shlex.split("diff m 'the cat' --save p"))


def vocabulary(folder: Path) -> None:
    run(folder, *shlex.split("vocab 'a b c' --save v.json"))


TOKENIZER = (
    MODEL,
    "vocab 'the cat' --tokenizer m/tokenizer.json",
    "run 'the cat' --model m --tokens",
)
READS = (MODEL, "weights m --tensors", "heads 'the cat' --model m --json")
KINDS = {
    "weights": Kind(
        weights, "w.*", ("weights w.safetensors", "run 'a b c' --weights w.safetensors")
    ),
    "scan": Kind(
        scan,
        "o/**/*",
        ("show o", "scan c.jsonl --model m --out o --layer 1", "diff o whole --json"),
    ),
    **{
        f"config of {name}": Kind(checkpoint(name), "m/*config.json", READS)
        for name in ("gpt2", "llama", "bert", "t5")
    },
    "tokenizer": Kind(checkpoint("gpt2"), "m/*token*.json", TOKENIZER),
    "tokenizer of bert": Kind(checkpoint("bert"), "m/*token*.json", TOKENIZER),
    "tensors": Kind(checkpoint("gpt2"), "m/model.safetensors", READS),
    "index": Kind(shards, "m/*.index.json", READS),
    "shards": Kind(shards, "m/?.safetensors", READS),
    "chat": Kind(chat, "chat.json", ("run --chat chat.json --model m",)),
    "vocabulary": Kind(vocabulary, "v.json", ("run 'a b c' --vocab v.json --tokens",)),
    "arrays": Kind(
        arrays,
        "a.*",
        (
            "show a.npz --axes head,query,key --labels labels.txt",
            "show a.npy --axes head,query,key",
            "show a.safetensors --axes head,query,key --json",
        ),
    ),
    "places": Kind(places, "p", ("diff p m", "diff m p --json")),
    "gguf": Kind(
        lambda folder: llama_gguf(folder / "m.gguf"),
        "m.gguf",
        ("run 'the cat' --model m.gguf", "weights m.gguf"),
        needs="gguf",
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Kind, Path]:
    """A kind, and the folder with its files."""
    kind = KINDS[request.param]
    if not has(kind.needs):
        pytest.skip(f"needs {kind.needs}")
    whole = tmp_path_factory.mktemp("whole") / "whole"
    whole.mkdir()
    kind.make(whole)
    return kind, whole


def read_changed(kind: Kind, whole: Path, place: Path, seed: int, *, cold: bool = False) -> Ended:
    """How a command ends that reads a file of the kind with one part changed."""
    shutil.copytree(whole, place, symlinks=True)
    chance = random.Random(seed)
    path = chance.choice(sorted(path for path in place.glob(kind.files) if path.is_file()))
    content = path.read_bytes()
    if b'{"mha":' in content[:400] and chance.random() < 0.5:
        content, what = mutated(path, seed)
    else:
        content, what = changed(content, seed)
    path.write_bytes(content)
    command = chance.choice(
        [line for line in kind.commands if path.suffix in line] or kind.commands
    )
    ended = run(place, *shlex.split(command), code=(0, 1, 2, 3), writes=["o"], cold=cold)
    assert "Warning" not in ended.stderr, what
    shutil.rmtree(place)
    return ended


def test_a_changed_file_is_read_or_refused(kind: tuple[Kind, Path], tmp_path: Path) -> None:
    for seed in range(3):
        read_changed(*kind, tmp_path / "place", seed)


@pytest.mark.real
def test_many_changed_files_are_read_or_refused(kind: tuple[Kind, Path], tmp_path: Path) -> None:
    for seed in range(3, 30):
        read_changed(*kind, tmp_path / "place", seed)


def test_weights_that_are_infinite_are_refused_without_a_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[[np.inf, -np.inf]]], "f4"))
    ended = run(tmp_path, "show", "a.npy", "--axes", "head,query,key", code=1)
    assert ended.missing("a.npy", "inf") == []
    assert "Warning" not in ended.stderr
