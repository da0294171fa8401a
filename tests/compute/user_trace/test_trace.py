"""The trace of a user's attention: sites by dataflow, axes by sizes, source lines, and remarks."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mhacli.compute.user_trace.trace import trace_request
from mhacli.io.json_schema import decode
from mhacli.results.record import storage
from mhacli.results.record.record import Record, Step

HEAD = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n"
SEPARATE = """
class Attention(nn.Module):
    def __init__(self, d_model=42, n_heads=3):
        super().__init__()
        self.h, self.d = n_heads, d_model // n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), -1, self.h, self.d).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = torch.softmax(scores, dim=-1)
        z = torch.matmul(weights, v)
        return self.W_o(z.transpose(1, 2).reshape(query.size(0), -1, self.h * self.d))
"""
FUSED = """
class Attention(nn.Module):
    def __init__(self, d_model=64, n_heads=8):
        super().__init__()
        self.h = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.mT * (C // self.h) ** -0.5, dim=AXIS)
        z = weights @ v
        return self.proj(MERGE)
"""
EINSUM = """
class Attention(nn.Module):
    def __init__(self, dim=40, heads=5):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(heads, dim, dim // heads)) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, dim // heads, dim))

    def forward(self, x):
        q = torch.einsum("btd,hde->bhte", x, self.wq)
        k = torch.einsum("btd,hde->bhte", x, self.wk)
        v = torch.einsum("btd,hde->bhte", x, self.wv)
        logits = torch.einsum("bhqe,bhke->bhqk", q, k) * q.shape[-1] ** -0.5
        z = torch.einsum("bhqk,bhke->bhqe", logits.softmax(-1), v)
        return torch.einsum("bhqe,hed->bqd", z, self.wo)
"""
PER_HEAD = """
class Head(nn.Module):
    def __init__(self, d_model, size):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(d_model, size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))

    def forward(self, x):
        k, q, v = self.key(x), self.query(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ v

class Attention(nn.Module):
    def __init__(self, d_model=40, n_heads=5):
        super().__init__()
        self.heads = nn.ModuleList([Head(d_model, d_model // n_heads) for _ in range(n_heads)])
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        out = torch.cat([head(x) for head in self.heads], dim=-1)
        return self.proj(out)
"""
GROUPED = """
class Attention(nn.Module):
    def __init__(self, d_model=96, n_heads=6, n_kv_heads=2):
        super().__init__()
        self.h, self.kv, self.d = n_heads, n_kv_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, self.d * n_kv_heads, bias=False)
        self.v_proj = nn.Linear(d_model, self.d * n_kv_heads, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.h, self.d).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        k, v = (each.repeat_interleave(self.h // self.kv, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
"""
FUNCTION = """
def attend(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    return scores.softmax(dim=-1) @ v
"""


def walked(folder: Path, code: str, name: str = "Attention", arguments: Any = (), **more: Any) -> Record:
    """The record of tracing this code in a file of its own, decoded from the JSON of the child process."""
    path = folder / "theirs.py"
    path.write_text(HEAD + textwrap.dedent(code))
    asked = {"of": {"target": f"{path}:{name}", "arguments": [list(pair) for pair in arguments], **more}}
    return decode(Record, json.loads(trace_request(asked, lambda *_, **__: None)), "record")


def steps(record: Record) -> dict[str, Step]:
    return {step.site: step for step in record.trace}


def fused(axis: int = -1, merge: str = "z.transpose(1, 2).reshape(B, T, C)") -> str:
    return FUSED.replace("AXIS", str(axis)).replace("MERGE", merge)


def test_sites_are_found_by_dataflow_and_not_by_variable_names(tmp_path: Path) -> None:
    found = [step.site for step in walked(tmp_path, SEPARATE).trace]
    assert found == [
        "x", "context", "q_proj", "q.view", "q", "k_proj", "k.view", "k", "v_proj", "v.view", "v", "kᵀ", "qk", "scores",
        "pattern", "z", "z.transpose", "concat", "out",
    ]  # fmt: skip


def test_axes_are_named_and_queries_and_keys_are_distinguished_by_their_number(tmp_path: Path) -> None:
    record = walked(tmp_path, SEPARATE)
    found, sizes = steps(record), dict(record.module.sizes) if record.module else {}
    assert sizes["query"] != sizes["key"]
    axes = {
        site: " ".join(found[site].axes) for site in ("x", "q_proj", "q", "k", "kᵀ", "pattern", "z", "concat", "out")
    }
    assert axes == {
        "x": "batch query d_model", "q_proj": "batch query head·d_head", "q": "batch head query d_head",
        "k": "batch head key d_head", "kᵀ": "batch head d_head key", "pattern": "batch head query key",
        "z": "batch head query d_head", "concat": "batch query head·d_head", "out": "batch query d_model",
    }  # fmt: skip
    for step in record.trace:
        for axis, size in zip(step.axes, step.shape, strict=True):
            if axis in sizes:
                assert size == sizes[axis], (step.site, axis)


def test_each_step_stands_beside_the_line_that_made_it(tmp_path: Path) -> None:
    lines = (HEAD + SEPARATE).splitlines()
    for step in walked(tmp_path, SEPARATE).trace[2:]:
        assert step.line is not None
        assert step.source == lines[step.line - 1].strip()
        assert step.file == str(tmp_path / "theirs.py")


def test_heads_as_many_as_their_width_are_distinguished_by_a_rebuild(tmp_path: Path) -> None:
    record = walked(tmp_path, fused())  # 8 heads of width 8
    assert record.module is not None
    assert record.module.n_runs == 3
    assert dict(record.module.sizes)["head"] == dict(record.module.sizes)["d_head"] == 8
    found = steps(record)
    assert found["z"].axes == ("batch", "head", "query", "d_head")
    assert found["qkv"].axes == ("batch", "query", "3·head·d_head")
    assert found["qkv.view"].axes == ("batch", "query", "part", "head", "d_head")


def test_queries_and_keys_of_self_attention_are_distinguished_by_the_operations(tmp_path: Path) -> None:
    found = steps(walked(tmp_path, fused()))
    assert found["kᵀ"].axes == ("batch", "head", "d_head", "key")
    assert found["pattern"].axes == ("batch", "head", "query", "key")
    assert found["pattern"].formula == "pattern = softmax(scores) over key"
    assert not any(step.remark for step in found.values())


@pytest.mark.parametrize(("axis", "name"), [(-2, "query"), (1, "head"), (0, "batch")])
def test_a_softmax_over_another_axis_than_the_keys_gets_a_remark(tmp_path: Path, axis: int, name: str) -> None:
    step = steps(walked(tmp_path, fused(axis=axis)))["pattern"]
    assert step.formula == f"pattern = softmax(scores) over {name}"
    assert step.remark == f"the softmax runs over {name}, not over key: the weights of a query do not sum to 1"
    assert step.meaning == ""


def test_heads_merged_without_a_transpose_get_a_remark(tmp_path: Path) -> None:
    step = steps(walked(tmp_path, fused(merge="z.reshape(B, T, C)")))["concat"]
    said = "a reshape keeps the numbers in their order, and cannot exchange head and query: they are mixed"
    assert step.remark == said
    assert step.axes == ("batch", "query", "head·d_head")


def test_einsums_are_walked_by_their_letters(tmp_path: Path) -> None:
    found = steps(walked(tmp_path, EINSUM))
    assert found["qk"].axes == found["pattern"].axes == ("batch", "head", "query", "key")
    assert found["k_proj"].axes == ("batch", "head", "key", "d_head")
    assert found["out"].axes == ("batch", "query", "d_model")
    assert [p.name for p in found["out"].parameters] == ["wo"]
    batch, heads, length, d_head = found["q_proj"].shape
    assert found["qk"].flops == 2 * batch * heads * length * length * d_head


def test_a_loop_over_heads_is_one_step_for_each_line_with_its_count(tmp_path: Path) -> None:
    record = walked(tmp_path, PER_HEAD)
    found = steps(record)
    assert [step.site for step in record.trace].count("pattern") == 1
    for site in ("q_proj", "qk", "pattern", "z"):
        assert (found[site].repeats, found[site].repeats_of) == (5, "head")
    assert len(found["q_proj"].parameters) == 5
    assert found["q_proj"].meaning == "the queries, one matrix product per head"
    assert (found["concat"].repeats, found["concat"].axes) == (1, ("batch", "query", "head·d_head"))
    assert found["mask"].parameters == found["scores"].parameters == ()


def test_shared_keys_have_a_word_of_their_own_until_they_are_repeated(tmp_path: Path) -> None:
    found = steps(walked(tmp_path, GROUPED))
    assert found["k_proj"].axes == ("batch", "key", "kv_head·d_head")
    assert found["k.view"].axes == ("batch", "key", "kv_head", "d_head")
    assert found["k"].axes == found["v"].axes == ("batch", "head", "key", "d_head")
    assert found["z"].formula == "z = softmax(q kᵀ / √d_head + causal mask) v, in one kernel"


def test_a_function_is_given_queries_keys_and_values_in_heads(tmp_path: Path) -> None:
    record = walked(tmp_path, FUNCTION, "attend")
    assert [step.site for step in record.trace] == ["q", "k", "v", "kᵀ", "qk", "scores", "pattern", "z"]
    assert steps(record)["pattern"].axes == ("batch", "head", "query", "key")
    assert record.module is not None
    assert record.module.result == record.module.expected


def test_a_requested_mask_is_traced_too(tmp_path: Path) -> None:
    found = steps(walked(tmp_path, SEPARATE, causal=True))
    assert found["scores"].operation == "masked_fill"
    assert found["scaled"].formula.startswith("scaled = qk / ")
    assert found["mask"].axes[-2:] == ("query", "key")


def test_views_copies_and_in_place_operations_are_distinguished(tmp_path: Path) -> None:
    found = steps(walked(tmp_path, SEPARATE))
    assert (found["q.view"].layout, found["q.view"].view_of) == ("view", "q_proj")
    assert (found["kᵀ"].layout, found["kᵀ"].view_of) == ("view", "k")
    assert (found["qk"].layout, found["concat"].layout) == ("copy", "copy")


def test_torchs_own_attention_is_walked_inside() -> None:
    asked = {"of": {"target": "torch.nn:MultiheadAttention", "arguments": [["embed_dim", "42"], ["num_heads", "3"]]}}
    record = decode(Record, json.loads(trace_request(asked, lambda *_, **__: None)), "record")
    found = steps(record)
    assert found["pattern"].axes == ("batch·head", "query", "key")
    assert not any(step.remark or step.file for step in record.trace)


@pytest.mark.parametrize(
    ("code", "name", "bias", "out_proj"),
    [
        (SEPARATE, "Attention", True, True),
        (EINSUM, "Attention", False, True),
        (PER_HEAD, "Attention", True, True),
        (GROUPED, "Attention", False, True),
        (FUNCTION, "attend", False, False),
        (PER_HEAD, "Head", False, False),
    ],
)
def test_the_config_has_its_biases_and_its_output_projection(
    tmp_path: Path, code: str, name: str, bias: bool, out_proj: bool
) -> None:
    config = walked(tmp_path, code, name).config
    assert (config.bias, config.out_proj) == (bias, out_proj)


def test_a_record_of_a_walk_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    record = walked(tmp_path, PER_HEAD)
    record.save(str(tmp_path / "walk.safetensors"))
    assert storage.load(str(tmp_path / "walk.safetensors")) == record


def test_what_keeps_state_is_walked_as_a_first_call(tmp_path: Path) -> None:
    code = FUSED.replace("AXIS", "-1").replace("MERGE", "z.transpose(1, 2).reshape(B, T, C) + self.seen(x)")
    code += """
    def seen(self, x):
        self.n = getattr(self, "n", 0) + 1
        return self.n * torch.ones_like(x)
"""
    record = walked(tmp_path, code)
    assert record.self_check.ok
