"""One mistake put into a right module, in several styles that many people copy: the module is right, and the mistake is named."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
from examined import no_stage

from mhacli.findings import Examination
from mhacli.modules.request import CheckRequest, TargetRequest
from mhacli.studies.check import examine
from mhacli.values import pairs


class Style(NamedTuple):
    """A right module: its name, its arguments, and its source."""

    name: str
    arguments: str
    source: str


STYLES = {
    "transformer": Style(
        "MultiHeadAttention",
        "n_head=4 d_model=32 d_k=8 d_v=8",
        """
        import torch
        import torch.nn as nn
        import torch.nn.functional as F


        class ScaledDotProductAttention(nn.Module):
            def __init__(self, temperature, attn_dropout=0.1):
                super().__init__()
                self.temperature = temperature
                self.dropout = nn.Dropout(attn_dropout)

            def forward(self, q, k, v, mask=None):
                attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
                if mask is not None:
                    attn = attn.masked_fill(mask == 0, -1e9)
                attn = self.dropout(F.softmax(attn, dim=-1))
                return torch.matmul(attn, v), attn


        class MultiHeadAttention(nn.Module):
            def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
                super().__init__()
                self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
                self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
                self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
                self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
                self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
                self.attention = ScaledDotProductAttention(temperature=d_k ** 0.5)
                self.dropout = nn.Dropout(dropout)
                self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

            def forward(self, q, k, v, mask=None):
                batch, q_len, k_len, residual = q.size(0), q.size(1), k.size(1), q
                q = self.w_qs(q).view(batch, q_len, self.n_head, self.d_k).transpose(1, 2)
                k = self.w_ks(k).view(batch, k_len, self.n_head, self.d_k).transpose(1, 2)
                v = self.w_vs(v).view(batch, k_len, self.n_head, self.d_v).transpose(1, 2)
                q, attn = self.attention(q, k, v, mask=None if mask is None else mask.unsqueeze(1))
                q = q.transpose(1, 2).contiguous().view(batch, q_len, -1)
                return self.layer_norm(self.dropout(self.fc(q)) + residual), attn
        """,
    ),
}


class Edit(NamedTuple):
    """What the source of a style says, what it says with the mistake, and the code of that."""

    style: str
    code: str
    old: str
    new: str


EDITS = (
    Edit("transformer", "scale-d-model", "temperature=d_k ** 0.5", "temperature=d_model ** 0.5"),
    Edit("transformer", "scale-not-root", "temperature=d_k ** 0.5", "temperature=d_k"),
    Edit("transformer", "scale-multiplied", "temperature=d_k ** 0.5", "temperature=d_k ** -0.5"),
    Edit("transformer", "values-from-keys", "self.w_vs(v)", "self.w_ks(v)"),
    Edit(
        "transformer",
        "split-without-transpose",
        "self.w_qs(q).view(batch, q_len, self.n_head, self.d_k).transpose(1, 2)",
        "self.w_qs(q).view(batch, self.n_head, q_len, self.d_k)",
    ),
)


def examined_with(folder: Path, style: Style, source: str) -> Examination:
    path = folder / "theirs.py"
    path.write_text(source, encoding="utf-8")
    return examine(CheckRequest(TargetRequest(f"{path}:{style.name}", pairs(style.arguments.split(), "arg"))), no_stage)


@pytest.mark.parametrize("name", STYLES)
def test_a_right_module_of_a_style_is_right(name: str, tmp_path: Path) -> None:
    examination = examined_with(tmp_path, STYLES[name], dedent(STYLES[name].source))
    assert examination.verdict == "right"


@pytest.mark.parametrize("edit", EDITS, ids=[f"{edit.style}-{edit.code}-{n}" for n, edit in enumerate(EDITS)])
def test_one_mistake_in_it_is_named_with_a_proof(edit: Edit, tmp_path: Path) -> None:
    source = dedent(STYLES[edit.style].source)
    assert source.count(edit.old) == 1
    examination = examined_with(tmp_path, STYLES[edit.style], source.replace(edit.old, edit.new))
    assert examination.verdict == "wrong"
    assert [finding.code for finding in examination.findings] == [edit.code]
    assert all(finding.proven for finding in examination.findings)
