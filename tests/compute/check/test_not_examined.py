"""The verdict of `mha check` names the arguments that it does not cover."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.attention_zoo import Case
from support.examinations import RIGHT, drawn
from support.examined import examined, written

from mhacli.results.check import Examination

SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, mask=None, {more}):
        q, k, v = (p(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        {lines}
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        z = torch.softmax(scores, dim=-1) @ v
        return self.o(z.transpose(1, 2).flatten(2))
"""


def right(folder: Path, more: str, lines: str = "pass") -> Examination:
    case = Case("", "Attention")
    found = examined(case, written(folder, case, SOURCE.format(more=more, lines=lines)))
    assert found.verdict == "right"
    return found


def left_out(folder: Path, more: str, lines: str = "pass") -> tuple[str, ...]:
    found = right(folder, more, lines)
    assert found.to_dict()["not_examined"] == found.not_examined
    assert found.notes == ()
    return found.not_examined


def test_an_argument_that_changes_the_result_and_was_never_given_is_named(tmp_path):
    lines = "k = k if gate is None else k * gate; q = q if head_mask is None else q * head_mask"
    assert left_out(tmp_path, "gate=None, head_mask=None", lines) == ("gate", "head_mask")


def test_a_switch_is_named_where_its_other_position_moves_the_output(tmp_path):
    assert left_out(tmp_path, "sharpen=False", "q = q * 3 if sharpen else q") == ("sharpen",)
    assert left_out(tmp_path, "fast=True", "q = q.contiguous() if fast else q") == ()


@pytest.mark.parametrize(
    "more", ["output_attentions=None", "return_dict=True", "need_weights=False", "*, verbose=False"]
)
def test_switches_for_more_results_are_not_listed(tmp_path, more):
    assert left_out(tmp_path, more) == ()


def test_a_mask_that_was_given_and_a_position_that_was_not_are_distinguished(tmp_path):
    assert left_out(tmp_path, "start_pos: int = 0", "v = v + 0 * start_pos") == ("start_pos",)


@pytest.mark.parametrize("more", ["head_mask=None", "*, positions", "gate: int = 0"])
def test_an_argument_that_the_code_never_reads_is_named_with_that(tmp_path, more):
    found = right(tmp_path, more)
    (note,) = found.to_dict()["notes"]
    assert "never reads " + re.findall(r"\w+", more)[0] in note
    assert found.not_examined == ()


@pytest.mark.parametrize(
    ("lines", "is_named"),
    [
        ("v = v + 0 * positions.sum()", True),
        ("scores = positions - positions[:, :1]", True),
        ("q = q * positions[..., None]", False),
    ],
)
def test_positions_that_are_read_and_change_nothing_are_named(tmp_path, lines, is_named):
    case = Case("", "Attention")
    found = examined(case, written(tmp_path, case, SOURCE.format(more="*, positions", lines=lines)))
    assert [("positions" in note, "never" in note) for note in found.notes] == [(True, False)] * is_named


def test_the_names_stand_under_the_verdict():
    noted = replace(RIGHT, not_examined=("kv_cache", "start_\x1bpos"), notes=("one\x1b", "two"))
    first, second, third, *others = drawn(noted).splitlines()
    assert first.startswith("✓ right")
    assert second == "the reference gives the same output with the same weights"
    assert third == "not examined: kv_cache (cache), start_\\x1bpos (positions)"
    assert others[:2] == ["note: one\\x1b", "note: two"]
