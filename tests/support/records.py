"""Records whose weights are known, each saved once per test run: what the tests of views and files
show and read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from safetensors.numpy import load_file, save_file

from support import checkpoints
from support.mha import run

SEVEN = "the cat sat on a mat and"
THIRTEEN = "the cat sat on a mat and then the dog ran away home"
"""Long enough for keys that count as sinks."""
EXAMPLE = "on the mat a dog"
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><!--",
    '"><img/src=x/onerror=alert(1)>',
    "&lt;b&gt;",
    "\u202egnp.exe",
    "a\u200bb",
    "\x1b[31m",
    "[bold]x[/]",
    "{{7*7}}",
    "=1+1",
    "日本語",
    "注" * 40,
)
SHOWN = {"\u202egnp.exe": "\\u202egnp.exe", "a\u200bb": "a\\u200bb", "\x1b[31m": "\\x1b[31m"}
"""How a token with invisible characters is shown."""
BIASED = ("--heads", "3", "--d-model", "6", "--scale", "1e-9", "--score-bias", "bias.safetensors")
"""A layer whose weights are the softmax of a bias: the dot products do not matter."""
RECIPES: dict[str, Sequence[str]] = {
    "plain": (
        "run",
        SEVEN,
        *"--heads 3 --d-model 33 --keep qk,scores,pattern,z,out,v".split(),
    ),
    "sinks": ("run", THIRTEEN, "--causal", *BIASED),
    "nan": ("run", SEVEN, "--allow-nonfinite", *BIASED),
    "pair": ("run", SEVEN, "a dog ran", "--heads", "2", "--padding", "left", "--causal"),
    "cross": ("run", "the cat", "--context", "v w x y z", "--heads", "2"),
    "long": ("run", " ".join(f"w{place}" for place in range(97)), "--heads", "2", "--causal"),
    "many": (
        "run",
        " ".join(f"w{place % 97}" for place in range(300)),
        *"--heads 12 --d-model 96 --causal".split(),
    ),
    "hostile": "run --file text.txt --tokenizer tokenizer.json --heads 1 --view none".split(),
    "bare": ("run", SEVEN, "--heads", "2", "--keep", "z"),
    "trained": ("run", SEVEN, "--heads", "2", "--train", "--dropout", "0.5"),
    "traced": ("trace", "the cat sat", "--heads", "2"),
    "decoded": ("decode", "the cat sat on", "--heads", "2"),
    "blocks": (
        "heads",
        " ".join(f"w{place % 97}" for place in range(700)),
        "--heads",
        "2",
        "--causal",
    ),
    "gpt2": ("run", "the cat sat on the mat", "--model", "gpt2"),
    "gpt_oss": ("run", "the cat sat on the mat", "--model", "gpt_oss"),
    "t5": ("run", "the cat sat", "--context", "the mat and the dog", "--model", "t5"),
    "effects": ("effect", "the cat sat on the mat", "--model", "gpt2"),
    "edges": ("effect", "the cat sat", "--model", "gpt2", "--edges", "--head", "0.1"),
}
"""The command of each record, without `--save`. Words behind `--model` name a family of
`support.checkpoints`."""


def bias(name: str) -> np.ndarray:
    """The score bias of a record with one, `[head, query, key]`: in `sinks` head 1 attends to key
    0, head 2 to keys 2 and 4.
    """
    n = 13 if name == "sinks" else 7
    bias = 2 * np.random.default_rng(3).normal(size=(3, n, n))
    if name == "sinks":
        bias[1, :, 0] += 6
        bias[2][:, [2, 4]] = 9, 9.2
    else:
        bias[0, 4, 1] = np.nan
        bias[1, 2] = -np.inf
    return bias.astype(np.float32)


@functools.cache
def saved(name: str) -> Path:
    """The record's file, in a folder of its own. Never write to it."""
    place = Path(os.environ["MHA_TESTS_SHARED"]) / "records" / name
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}.safetensors"
    with FileLock(
        place.with_suffix(".lock")
    ):  # outside: a command's folder may not change while it runs
        if not path.exists():
            _make(name, place, path.name)
    return path


def _make(name: str, place: Path, file: str) -> None:
    words: list[str | Path] = list(RECIPES[name])
    if "--model" in words:
        at = words.index("--model") + 1
        words[at] = checkpoints.folder(str(words[at]))
    if "bias.safetensors" in words:
        save_file({"bias": bias(name)}, place / "bias.safetensors")
    if "tokenizer.json" in words:
        (place / "tokenizer.json").write_text(checkpoints.words_tokenizer(*HOSTILE))
        (place / "text.txt").write_text(" ".join(HOSTILE))
    once = ("--repeat", "1") if words[0] == "run" and "--model" not in words else ()
    run(place, *words, *once, "--save", file)


@functools.cache
def scanned() -> Path:
    """The folder of a scan of three documents with `gpt2`, whose example is the second,
    `EXAMPLE`.
    """
    pytest.importorskip("ray")
    place = Path(os.environ["MHA_TESTS_SHARED"]) / "scan"
    place.mkdir(exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        if not (place / "scan.mha").exists():
            (place / "corpus.txt").write_text(f"the cat sat\n{EXAMPLE}\nit ran\n")
            model = ("--model", checkpoints.folder("gpt2"))
            words = ("corpus.txt", "--lines", *model, "--out", "scan.mha")
            run(place, "scan", *words, writes=("torchinductor_root",))  # what torch leaves there
    return place / "scan.mha"


@functools.cache
def document(name: str) -> dict[str, Any]:
    """The record as `mha show --json` prints it. Do not change it."""
    path = saved(name)
    return dict(run(path.parent, "show", path.name, "--json").json)


@functools.cache
def pattern(name: str, layer: int | None = None) -> np.ndarray:
    """The weights `[batch, head, query, key]` in the file, or of a layer of a checkpoint in the
    JSON, where null is NaN.
    """
    if layer is None:
        return load_file(saved(name))["pattern"].astype(float)
    return np.array(document(name)["layers"][layer]["pattern"], float)


def tokens(name: str, sequence: int = 0) -> list[str]:
    """The tokens of a sequence."""
    return list(document(name)["sequences"][sequence]["tokens"])


def short(weight: float, decimals: int = 2) -> str:
    """A weight as views print it: without the zero before the point."""
    return f"{weight:.{decimals}f}".removeprefix("0")
