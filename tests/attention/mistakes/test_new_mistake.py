"""A new entry in one file of the catalogue suffices for `mha check` to find the mistake, with its proof, line and fix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mhacli

pytestmark = pytest.mark.full

PART = Path("mhacli/attention/mistakes/scores.py")
ABOVE = "_SOFTMAXES = (\n"
"""The entries of the softmax: a function goes above them, an entry among them."""
FUNCTION = '''
def squared(layer: ReferenceLayer, pattern: Tensor, v: Tensor) -> Tensor:
    """The squares of the attention weights as weights."""
    return pattern.square() @ v


'''
ENTRY = """    Mistake(
        "pattern-squared",
        "the attention weights are squared before they weigh the values",
        "pattern.square() @ v",
        "the weights of a query no longer sum to 1",
        "pattern @ v",
        "weigh",
        (MistakeVariant("the values are weighed by the squares of the pattern", squared),),
        operations=("square",),
    ),
"""
MODULE = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        batch, length, d_model = x.shape
        shape = batch, length, self.n_heads, d_model // self.n_heads
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        pattern = (q @ k.transpose(-2, -1) / shape[-1] ** 0.5).softmax(dim=-1)
        weights = pattern.square()
        return self.out_proj((weights @ v).transpose(1, 2).reshape(x.shape))
"""


def checked(root: Path, target: str) -> dict[str, object]:
    """The report of the package in a folder on a target."""
    command = [sys.executable, "-m", "mhacli", "check", target, "--json"]
    ran = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert ran.stdout, ran.stderr
    return json.loads(ran.stdout)


def test_a_new_mistake_of_check_is_one_edit_in_one_file(tmp_path):
    shutil.copytree(Path(mhacli.__file__).parent, tmp_path / "mhacli", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mine.py").write_text(MODULE)
    assert checked(tmp_path, "mine.py:Attention")["verdict"] == "unknown"

    text = (tmp_path / PART).read_text()
    assert text.count(ABOVE) == 1
    (tmp_path / PART).write_text(text.replace(ABOVE, FUNCTION + ABOVE + ENTRY))
    examination = checked(tmp_path, "mine.py:Attention")

    (finding,) = examination["findings"]
    assert (examination["verdict"], finding["code"], finding["proven"]) == ("wrong", "pattern-squared", True)
    assert finding["source"] == "weights = pattern.square()"
    assert finding["line"] == 1 + MODULE.splitlines().index("        weights = pattern.square()")
    assert finding["fix"] == "pattern @ v"
