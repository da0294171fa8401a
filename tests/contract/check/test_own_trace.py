"""`mha trace FILE.py:NAME`: the tensors of the user's code with their axes, lines and warnings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.mha import Ended, run

MINE = """
import math
import torch
import torch.nn.functional as F
from torch import nn


class Separate(nn.Module):
    def __init__(self, d_model=42, n_heads=3):
        super().__init__()
        self.h, self.d = n_heads, d_model // n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), -1, self.h, self.d).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))
        v = self.split(self.W_v(value))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = torch.softmax(scores, dim=-1)
        z = torch.matmul(weights, v)
        return self.W_o(z.transpose(1, 2).reshape(query.size(0), -1, self.h * self.d))


class Fused(nn.Module):
    def __init__(self, d_model=64, n_heads=8, axis=-1, mixed=False):
        super().__init__()
        self.h, self.axis, self.mixed = n_heads, axis, mixed
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        print("\\x1b[31mloud\\x1b[0m")
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.mT * (C // self.h) ** -0.5, dim=self.axis)
        z = weights @ v
        return self.proj(z.reshape(B, T, C) if self.mixed else z.transpose(1, 2).reshape(B, T, C))


class Grouped(nn.Module):
    def __init__(self, d_model=96, n_heads=6, n_kv_heads=2):
        super().__init__()
        self.h, self.kv, self.d = n_heads, n_kv_heads, d_model // n_heads
        self.q_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.k_proj, self.v_proj = (nn.Linear(d_model, self.d * n_kv_heads) for _ in range(2))

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.h, self.d).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        k, v = (each.repeat_interleave(self.h // self.kv, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Endless(nn.Module):
    def forward(self, x):
        while True:
            pass


def attend(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    return scores.softmax(dim=-1) @ v
"""
SITES = ("q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out")


def trace(folder: Path, *words: str, **how: Any) -> Ended:
    (folder / "mine.py").write_text(MINE)
    return run(folder, "trace", *words, **how)


def steps(ended: Ended) -> dict[str, dict[str, Any]]:
    return {step["site"]: step for step in ended.json["trace"]}


def line_of(words: str) -> int:
    return next(number for number, line in enumerate(MINE.splitlines(), 1) if words in line)


@pytest.mark.parametrize(
    ("target", "axes", "lines"),
    [
        (
            "Separate",
            {
                "qk": "batch head query key",
                "pattern": "batch head query key",
                "z": "batch head query d_head",
                "out": "batch query d_model",
            },
            {
                "pattern": "torch.softmax(scores",
                "z": "z = torch.matmul(weights",
                "out": "self.W_o(z",
            },
        ),
        pytest.param(
            "Fused",
            {"z": "batch head query d_head", "kᵀ": "batch head d_head key"},
            {"pattern": "weights = F.softmax", "out": "self.proj(z"},
            marks=pytest.mark.real,
        ),
        pytest.param(
            "Grouped",
            {"k": "batch head key d_head", "z": "batch head query d_head"},
            {"z": "y = F.scaled_dot_product", "k": "repeat_interleave"},
            marks=pytest.mark.real,
        ),
        pytest.param(
            "attend",
            {"pattern": "batch head query key"},
            {"qk": "scores = q @ k"},
            marks=pytest.mark.real,
        ),
    ],
)
def test_each_tensor_has_its_axes_and_the_line_that_makes_it(tmp_path, target, axes, lines) -> None:
    ended = trace(tmp_path, f"mine.py:{target}", "--json")
    document, found = ended.json, steps(ended)
    assert (document["schema"], document["module"]["target"]) == (
        "mha.record/1",
        f"mine.py:{target}",
    )
    assert {site: " ".join(found[site]["axes"]) for site in axes} == axes
    assert {site: found[site]["line"] for site in lines} == {
        site: line_of(words) for site, words in lines.items()
    }
    assert [site for site in SITES if site in found] == [site for site in found if site in SITES]
    for step in document["trace"]:
        assert len(step["shape"]) == len(step["axes"])
        assert step["remark"] == ""
    if "qk" in found and target != "Grouped":
        *planes, q_len, k_len = found["qk"]["shape"]
        d_head = found["z"]["shape"][-1]
        assert found["qk"]["flops"] == 2 * planes[0] * planes[1] * q_len * k_len * d_head


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "site", "mentions"),
    [
        (("--arg", "axis=-2"), "pattern", ("query", "key")),
        (("--arg", "mixed=true"), "concat", ("head", "query")),
    ],
)
def test_a_tensor_that_mixes_axes_has_a_warning(tmp_path, words, site: str, mentions) -> None:
    remarks = {
        name: step["remark"]
        for name, step in steps(trace(tmp_path, "mine.py:Fused", *words, "--json")).items()
    }
    assert [name for name, remark in remarks.items() if remark] == [site]
    assert all(word in remarks[site] for word in mentions)


@pytest.mark.real
def test_the_screen_shows_lines_and_steps_and_a_saved_trace_shows_the_same(tmp_path) -> None:
    shown = trace(tmp_path, "mine.py:Fused", "--save", "walk.safetensors", env={"COLUMNS": "80"})
    flat = " ".join(shown.stdout.split())
    assert f"line {line_of('weights = F.softmax')}: weights = F.softmax" in flat
    assert "batch head query key" in flat
    assert "\\x1b[31mloud" in flat
    assert max(map(len, shown.stdout.splitlines())) <= 80
    again = run(tmp_path, "show", "walk.safetensors", env={"COLUMNS": "80"}).stdout
    assert again.splitlines()[:20] == shown.stdout.splitlines()[:20]
    assert "--csv" in run(tmp_path, "show", "walk.safetensors", "--csv", code=2).said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("mine.py:Separate", "the cat"), "the cat"),
        (("mine.py:Separate", "--cell", "0,1,2"), "--cell"),
        (("mine.py:Separate", "--heads", "4"), "--heads"),
        (("mine.py:Separate", "--mask"), "--mask"),
        (("mine.py:Separate", "--context", "cat"), "--context"),
        (("mine.py:Separate", "--arg", "d_model"), "d_model"),
        (("the cat", "--arg", "d_model=8"), "--arg"),
        (("the cat", "--time-limit", "3"), "--time-limit"),
        (("mine.py",), "mine.py:Separate"),
    ],
)
def test_words_that_do_not_go_together_are_a_usage_error(tmp_path, words, says: str) -> None:
    assert says in trace(tmp_path, *words, code=2).said


@pytest.mark.parametrize(
    "words", [("12:30",), ("so mine.py:Separate it is",), ("the cat", "--text", "mine.py")]
)
def test_other_words_with_a_colon_or_a_file_are_texts(tmp_path, words) -> None:
    document = trace(tmp_path, *words, "--mask", "--d-model", "8", "--heads", "2", "--json").json
    assert document["sequences"][0]["text"] == words[0]


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("missing.py:A",), "missing.py"),
        (("mine.py:Missing",), "Missing"),
        (("mine.py:Endless", "--time-limit", "1.5"), "1.5"),
    ],
)
def test_code_that_cannot_be_traced_is_reported(tmp_path, words, says: str) -> None:
    assert says in trace(tmp_path, *words, code=1).said


def test_a_trace_that_cannot_be_saved_is_refused_before_the_code_runs(tmp_path) -> None:
    (tmp_path / "side.py").write_text("open('ran', 'w')\ndef attend(q, k, v):\n    return v\n")
    run(tmp_path, "trace", "side.py:attend", "--save", "none/r.safetensors", code=1)
    assert not (tmp_path / "ran").exists()


CHUNKED = (
    MINE.partition("class Grouped")[0].replace(
        "self.qkv(x).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)",
        "(part.view(B, T, self.h, C // self.h).transpose(1, 2) for part in self.parts(x))",
    )
    + """
    def parts(self, x):
        first, second, third = self.qkv(x).chunk(3, dim=-1)
        return first, second, third
"""
)


def test_the_parts_of_a_fused_projection_are_counted_in_their_order(
    mha: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(CHUNKED)
    steps = mha("trace", "mine.py:Fused", "--json").json["trace"]
    parts = [
        re.findall(r"\d+", step["formula"])
        for step in steps
        if "chunk" in step["formula"].partition("=")[2]
    ]
    assert parts[:3] == [["1"], ["2"], ["3"]]
