"""A new keyword of a model's attention function takes edits in three files, as docs/CONTRIBUTING.md has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from support.checkpoints_saved import TEXT, Checkpoints

import mhacli

pytestmark = pytest.mark.full

PACKAGE = Path(mhacli.__file__).parent
MODEL = """
import sys
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention

plain, forward = AttentionInterface._global_mapping["sdpa"], LlamaAttention.forward

def cooled(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, cooling=1.0, **more):
    return plain(module, query * cooling, key, value, attention_mask, scaling=scaling, dropout=dropout,
                 is_causal=is_causal, **more)

AttentionInterface._global_mapping["sdpa"] = cooled
LlamaAttention.forward = lambda self, *given, **more: forward(self, *given, cooling=0.25, **more)
from mhacli.cli.app import main
sys.exit(main())
"""
"""`mha`, with a Llama whose attention takes a keyword `cooling`, a factor on every score."""
EDITS: Mapping[str, Sequence[tuple[str, str]]] = {
    "adapters/hf/calls.py": (
        ("    softcap: float | None = None\n", "    softcap: float | None = None\n    cooling: float = 1.0\n"),
        ('COMPUTED = frozenset(("is_causal",', 'COMPUTED = frozenset(("cooling", "is_causal",'),
        ('        "softcap": arguments.get("softcap"),\n',
         '        "softcap": arguments.get("softcap"),\n        "cooling": arguments.get("cooling", 1.0),\n'),
        ("    @property\n    def sink_scores(",
         "    @property\n    def extras(self) -> dict[str, str]:\n"
         '        return {} if self.cooling == 1.0 else {"cooling": f"scores × {self.cooling:g}"}\n\n'
         "    @property\n    def sink_scores("),
        ('{"scale": self.scale, "softcap": self.softcap}',
         '{"scale": self.scale, "softcap": self.softcap, "cooling": self.cooling}'),
    ),
    "attention/tiled/scores.py": (
        ("    softcap: float | None = None\n", "    softcap: float | None = None\n    cooling: float = 1.0\n"),
        ("        return self.softcap is None and self.bias is None\n",
         "        return self.softcap is None and self.bias is None and self.cooling == 1.0\n"),
        ('        """From scaled products to scores, in place: all that comes after the scale, in this one place."""\n',
         "        scaled.mul_(self.cooling)\n"),
        ('        scaled, c = f"{self.scale:.6g} · qk", self.softcap\n',
         '        scaled, c = f"{self.scale:.6g} · {self.cooling:g} · qk", self.softcap\n'),
    ),
}  # fmt: skip


def edited(folder: Path) -> Path:
    """A copy of the package, with the edits in it."""
    shutil.copytree(PACKAGE, folder / "mhacli", ignore=shutil.ignore_patterns("__pycache__"))
    for name, pairs in EDITS.items():
        path = folder / "mhacli" / name
        text = path.read_text()
        for old, new in pairs:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path.write_text(text)
    return folder


def mha(place: Path, folder: Path, *words: str, code: int = 0) -> str:
    """What the command writes, of the package in `place`."""
    env = {
        **os.environ,
        "PYTHONPATH": str(place),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", MODEL, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints")).of("llama")


def layers_of(place: Path, folder: Path, llama: str, *, code: int = 0) -> list[dict[str, Any]]:
    told = mha(place, folder, "heads", TEXT, "--model", llama, "--json", code=code)
    layers: list[dict[str, Any]] = json.loads(told)["layers"]
    return layers


def test_a_keyword_that_is_not_known_is_told(llama: str, tmp_path: Path) -> None:
    for layer in layers_of(PACKAGE.parent, tmp_path, llama, code=3):
        assert not layer["verified"]
        assert "the keyword cooling is not understood" in layer["unverified"]
        assert "extras" not in layer


def test_a_keyword_is_handled_after_edits_in_few_files(llama: str, tmp_path: Path) -> None:
    place = edited(tmp_path / "edited")
    for layer in layers_of(place, tmp_path, llama):
        assert layer["verified"], layer["unverified"]
        assert layer["extras"] == {"cooling": "scores × 0.25"}
    assert "scores × 0.25" in mha(place, tmp_path, "heads", TEXT, "--model", llama)
    assert "0.25 · qk" in mha(place, tmp_path, "trace", TEXT, "--model", llama, "--layer", "1")


def test_the_whole_matrices_have_the_keyword_too(llama: str, tmp_path: Path) -> None:
    place = edited(tmp_path / "edited")
    run = json.loads(
        mha(place, tmp_path, "run", TEXT, "--model", llama, "--layer", "1", "--json", "--keep", "qk,scores")
    )
    (layer,) = run["layers"]
    qk, scores = (layer[name][0][0][-1] for name in ("qk", "scores"))
    assert scores == pytest.approx([0.25 * layer["scale"] * product for product in qk], rel=1e-5)
