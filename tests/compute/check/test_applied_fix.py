"""A corrected expression, typed in place of the wrong one, makes the code right."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.examined import examination_of

from mhacli.requests.user_code import CheckRequest, TargetRequest

SOURCE = """
import math
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.h, self.hd = 3, 10
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(30, 30) for _ in range(4))

    def forward(self, rows):
        n, steps, width = rows.shape
        a = self.wq(rows).view(n, steps, self.h, self.hd).transpose(1, 2)
        b = self.wk(rows).view(n, steps, self.h, self.hd).transpose(1, 2)
        c = self.wv(rows).view(n, steps, self.h, self.hd).transpose(1, 2)
        s = {scores}
        p = {pattern}
        return self.wo({merged})
"""
RIGHT = {
    "scores": "a @ b.transpose(-2, -1) / math.sqrt(self.hd)",
    "pattern": "s.softmax(-1)",
    "merged": "(p @ c).transpose(1, 2).reshape(n, steps, width)",
}


def examined(path: Path, source: str):
    path.write_text(source)
    return examination_of(CheckRequest(TargetRequest(f"{path}:Mine")))


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("scores", "a @ b.transpose(-2, -1) / self.hd"),
        ("scores", "a @ b.transpose(-2, -1) / math.sqrt(width)"),
        ("scores", "a @ b.transpose(-2, -1)"),
        ("pattern", "s.softmax(-2)"),
        ("pattern", "s.softmax(-1) * torch.ones(steps, steps).tril()"),
        ("merged", "(p @ c).reshape(n, steps, width)"),
    ],
)
@pytest.mark.parametrize("has_width", [True, False])
def test_the_fix_in_place_of_the_wrong_expression_is_right(tmp_path, place, wrong, has_width):
    def written(**parts: str) -> str:
        source = SOURCE.format(**RIGHT | parts)
        return source if has_width else source.replace("self.h, self.hd = 3, 10", "self.h = 3").replace("self.hd", "10")

    found = examined(tmp_path / "wrong.py", written(**{place: wrong}))
    assert found.verdict == "wrong"
    fix = found.findings[0].fix
    assert "self.hd" not in fix or has_width
    assert examined(tmp_path / "mended.py", written(**{place: fix})).verdict == "right"
