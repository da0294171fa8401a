"""The kernels of the statistics, without a GPU: in Triton's interpreter they give what the formulas
give in float64, and they compile for GPUs. CI runs `-k triton` of this file where triton is.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import oracle

from mhacli.attention import masks, on_device
from mhacli.attention.axes import Axes, Axis, StatisticsRequest, make_statistics_request
from mhacli.attention.on_device import Sums
from mhacli.attention.reduction import reduce_heads, reducer_of
from mhacli.attention.scores import ScoredAttention, tensor_bias
from mhacli.attention.statistics import Reduced

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="it needs triton")
ROOT = Path(__file__).parents[2]
FAR = 1 << 30


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen on the CPU, for texts of any length, and nothing is known of them. The
    compiled block is not there, as on a device.
    """
    monkeypatch.setenv("MHA_KERNELS", "1")
    monkeypatch.setenv("MHA_BLOCK", "torch")
    monkeypatch.setattr(on_device, "runs_kernels", lambda device: True)
    monkeypatch.setattr(on_device, "MIN_TOKENS", 1)
    monkeypatch.setattr(on_device, "_faults", {})


@pytest.fixture
def interpreted(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in Triton's interpreter, in small tiles."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = on_device.Tiles(16, 4, 1)
    monkeypatch.setattr(on_device, "TILES", dict.fromkeys(on_device.TILES, small))


# -------------------------------------------------------------------------------------- the numbers


@dataclass(frozen=True, kw_only=True)
class Case:
    """An attention: its sizes, and what its scores and masks are made of."""

    n_q: int = 33
    n_k: int | None = None
    batch: int = 1
    kv_heads: int = 1
    group: int = 2
    width: int = 16
    v_width: int | None = None
    dtype: torch.dtype = torch.float32
    size: float = 1.0
    band: tuple[int, int] | None = (-FAR, 0)
    hidden: float = 0.0
    heads_differ: bool = False
    shorter: int = 0
    side: str = "right"
    documents: bool = False
    softcap: float | None = None
    has_bias: bool = False
    sinks: str = ""
    block: int = 1
    seed: int = 0
    heads_at_once: int | None = None

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return self.n_k is None


FIXED = {
    "causal": Case(),
    "everything": Case(band=None, n_q=16, kv_heads=2, group=1),
    "a window, a map of 4": Case(band=(-7, 0), n_q=40, block=4),
    "a window of both sides, a map of 32": Case(band=(-5, 9), n_q=47, block=32),
    "other keys, wide heads": Case(n_q=20, n_k=37, band=None, width=80),
    "the last of a cache": Case(n_q=1, n_k=35, band=(-FAR, 34)),
    "padding and holes": Case(batch=2, shorter=9, side="left", hidden=0.3, heads_differ=True),
    "documents in 16 bits": Case(documents=True, dtype=torch.float16, block=8, v_width=8),
    "softcap, bias and sinks": Case(softcap=5.0, has_bias=True, sinks="head", size=3.0),
    "a sink of each query, in parts": Case(
        batch=2, kv_heads=2, sinks="query", dtype=torch.bfloat16, heads_at_once=1
    ),
}


def random_case(seed: int) -> Case:
    """A case of any kind."""
    draw = random.Random(seed)
    n_q = draw.choice([1, 5, 16, 17, 31, 40])
    other = draw.choice([None, None, 7, 32])
    batch = draw.choice([1, 1, 2])
    causal = (-FAR, 0 if other is None else other - n_q)
    return Case(
        n_q=n_q,
        n_k=other,
        batch=batch,
        kv_heads=draw.choice([1, 2]),
        group=draw.choice([1, 2]),
        width=draw.choice([3, 16, 24]),
        v_width=draw.choice([None, 8]),
        dtype=draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16]),
        size=draw.choice([0.5, 2.0, 6.0]),
        band=draw.choice([None, causal, causal, (-draw.randint(0, 20), draw.choice([0, 0, 9]))]),
        hidden=draw.choice([0.0, 0.0, 0.2]),
        heads_differ=draw.random() < 0.5,
        shorter=draw.randint(0, n_q - 1) if batch == 2 else 0,
        side="right" if other else draw.choice(["left", "right"]),
        documents=draw.random() < 0.3,
        softcap=draw.choice([None, None, 5.0]),
        has_bias=draw.random() < 0.3,
        sinks=draw.choice(["", "", "head", "query"]),
        block=draw.choice([1, 2, 8, 16, 64]),
        seed=seed,
        heads_at_once=draw.choice([None, 1, 2]),
    )


@dataclass(frozen=True)
class Made:
    """An attention of a case, and the parts that formulas need."""

    attention: ScoredAttention
    request: StatisticsRequest
    bias: torch.Tensor | None
    cells: torch.Tensor


def made(case: Case) -> Made:
    """The attention of a case, with the last text shorter, and the cells that it sees."""
    generator = torch.Generator().manual_seed(case.seed)
    n_q, n_k, heads = case.n_q, case.n_k or case.n_q, case.kv_heads * case.group

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = case.size * normal(case.batch, heads, n_q, case.width)
    # as models give them: heads beside heads
    k = (case.size * normal(case.batch, n_k, case.kv_heads, case.width)).transpose(1, 2)
    v = normal(case.batch, n_k, case.kv_heads, case.v_width or case.width).transpose(1, 2)

    def axis(length: int) -> Axis:
        lengths = [length] * (case.batch - 1) + [length - min(case.shorter, length - 1)]
        ids = [torch.randint(6, (n,), generator=generator).tolist() for n in lengths]
        documents = [tuple(j // 9 for j in range(n)) if case.documents else () for n in lengths]
        return Axis(tuple(map(tuple, ids)), tuple(documents), length, case.side, q.device)

    queries = axis(n_q)
    keys = queries if case.is_self else replace(axis(n_k), side="right")
    axes = Axes(queries, keys, case.is_self, lambda word: -1, "float32")
    request = replace(make_statistics_request(axes), block=case.block)
    rules = [] if case.band is None else [masks.Mask(band=masks.Band(*case.band))]
    real = request.k_tokens[:, None, None] >= 0
    if case.hidden or not bool(real.all()):
        shape = (case.batch, heads if case.heads_differ else 1, n_q, n_k)
        rules.append(
            masks.from_tensor(real & (torch.rand(shape, generator=generator) >= case.hidden))
        )
    allowed = masks.both(*rules) if rules else None
    bias = normal(1, heads, n_q, n_k) if case.has_bias else None
    sinks = {"": None, "head": normal(1, heads, 1), "query": normal(case.batch, heads, n_q)}
    attention = ScoredAttention(
        q=q.to(case.dtype),
        k=k.to(case.dtype),
        v=v.to(case.dtype),
        scale=case.width**-0.5,
        softcap=case.softcap,
        bias=None if bias is None else tensor_bias(bias),
        allowed=allowed,
        sink_logits=sinks[case.sinks],
    )
    cells = attention.visible(torch.arange(n_q), torch.arange(n_k)).expand(attention.shape)
    return Made(attention, request, bias, cells)


def by_formulas(this: Made) -> dict[str, torch.Tensor]:
    """Every sum by its definition, in float64, from the whole matrix."""
    attention, request = this.attention, this.request
    n_q, n_k = attention.shape[2:]
    scores = oracle.attention(
        *(t.double().numpy() for t in (attention.q, attention.k, attention.v)),
        scale=attention.scale,
        softcap=attention.softcap,
        bias=this.bias,
        allowed=this.cells.numpy(),
    ).scores
    scores = torch.from_numpy(scores)
    lse, of_all = scores.logsumexp(-1), scores.logsumexp(-1)
    if attention.sink_logits is not None:
        of_all = torch.logaddexp(of_all, attention.sink_logits.double())
    p = (scores - torch.where(of_all.isneginf(), 0.0, of_all)[..., None]).exp()
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)[None, :]
    values = attention.v.double().repeat_interleave(p.shape[1] // attention.n_kv_heads, 1)
    tokens = torch.where(request.q_tokens < 0, -2, request.q_tokens)[:, None, :, None]
    copies, following = (
        tokens == labels[:, None, None, :] for labels in (request.k_tokens, request.before_k)
    )
    if request.axes.is_self:
        copies, following = copies & (i != j), following & (i + 1 != j)
    in_rows = torch.nn.functional.one_hot(torch.arange(n_q) // request.block).double()
    in_columns = torch.nn.functional.one_hot(torch.arange(n_k) // request.block).double()
    return {
        "lse": torch.where(lse.isneginf(), 0.0, lse),
        "mass": p.sum(-1),
        "entropy": torch.special.entr(p).sum(-1),
        "squares": p.square().sum(-1),
        "peak": p.amax(-1).log(),
        "distance": (p * (i - j).abs()).sum(-1),
        "first": (p * request.first[:, None, None]).sum(-1),
        "leading": (p * request.leading[:, None, None]).sum(-1),
        "received": p.sum(2),
        "map": in_rows.T @ p @ in_columns,
        "profile": torch.stack([(p * (j - i == x)).sum((2, 3)) for x in range(1 - n_q, n_k)], 2),
        "duplicate": (p * copies).sum((2, 3)),
        "induction": (p * following).sum((2, 3)),
        "z": p @ values,
    }


def errors(reduced: Reduced, right: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each sum, relative to numbers above 1."""
    found = reduced.statistics | {"lse": reduced.lse, "z": reduced.z}
    differences = {}
    for name, exact in right.items():
        assert found[name].shape == exact.shape, name
        assert torch.equal(found[name].isneginf(), exact.isneginf()), name
        ours, exact = (t.double().nan_to_num(nan=9e9, neginf=0.0) for t in (found[name], exact))
        differences[name] = float(((ours - exact).abs() / exact.abs().clamp(min=1)).amax())
    return differences


def require_right(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that the kernels give what formulas give, and the torch path too."""
    this = made(case)
    heads = range(this.attention.shape[1])
    if case.heads_at_once is not None:
        monkeypatch.setattr(on_device, "TEMPORARY_BYTES", case.heads_at_once)
        monkeypatch.setattr(on_device, "_bytes_per_head", lambda *of: 1)
    monkeypatch.setattr(on_device, "_fault", lambda numbers: None)
    assert reducer_of(this.attention, this.request) == ("triton", None)
    reduced = reduce_heads(this.attention, this.request, heads)
    right = by_formulas(this)
    # z is rounded to the 16 bits of the values
    rounds = {"z": max(5e-5, 2 * torch.finfo(case.dtype).eps)}
    for name, error in errors(reduced, right).items():
        assert error <= rounds.get(name, 3e-5), (name, error)
    monkeypatch.setenv("MHA_KERNELS", "0")
    by_torch = reduce_heads(this.attention, this.request, heads)
    for name, sums in by_torch.statistics.items():
        assert reduced.statistics[name].dtype == sums.dtype, name
        assert reduced.statistics[name].shape == sums.shape, name
    assert reduced.lse.dtype == by_torch.lse.dtype
    assert reduced.z is not None
    assert reduced.z.dtype == case.dtype


@pytest.mark.real
@NEEDS_TRITON
@pytest.mark.parametrize("name", FIXED)
def test_kernels_of_triton_give_what_formulas_give(
    name: str, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_right(FIXED[name], monkeypatch)


@pytest.mark.real
@NEEDS_TRITON
@pytest.mark.parametrize("seed", range(10))
def test_kernels_of_triton_are_right_in_random_cases(
    seed: int, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_right(random_case(seed), monkeypatch)


@pytest.mark.parametrize("block", ["c", "torch"])
@pytest.mark.parametrize("name", FIXED)
def test_both_blocks_of_a_cpu_give_what_formulas_give(
    block: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MHA_BLOCK", block)
    this = made(FIXED[name])
    if block == "c" and reducer_of(this.attention, this.request).name != "c":
        pytest.skip("the compiled block was not built, or leaves this to torch")
    reduced = reduce_heads(this.attention, this.request, range(this.attention.shape[1]))
    eps = torch.finfo(FIXED[name].dtype).eps
    for of, error in errors(reduced, by_formulas(this)).items():
        assert error <= (max(3e-5, 2 * eps) if of == "z" else 3e-5), (of, error)


# ---------------------------------------------------------------------------------------- a choice


def by_torch(
    attention: ScoredAttention, request: StatisticsRequest, heads: range, *, wrong: float = 0.0
) -> Sums:
    """What stands for the kernels: sums of torch, with `wrong` more of the first weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHA_KERNELS", "0")
        reduced = reduce_heads(attention, request, heads)
    names = (*on_device.OF_QUERIES, "received", "map", "profile", "duplicate", "induction")
    sums = {name: reduced.statistics[name].clone() for name in names}
    sums["first"] += wrong
    return sums | {"lse": reduced.lse.clone()}


def reduced_twice(this: Made) -> tuple[Reduced, list[str]]:
    """The heads, reduced two times, and the warnings of both."""
    heads = range(this.attention.shape[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reduce_heads(this.attention, this.request, heads)
        reduced = reduce_heads(this.attention, this.request, heads)
    return reduced, [str(each.message) for each in caught]


def test_kernels_that_agree_with_torch_are_used(
    chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def kernel_sums(*of: Any) -> Sums:
        seen.append(of)
        return by_torch(*of)

    monkeypatch.setattr(on_device, "kernel_sums", kernel_sums)
    this = made(Case(v_width=8))
    reduced, notes = reduced_twice(this)
    assert notes == []
    assert len(seen) == 3  # with the trial
    assert reducer_of(this.attention, this.request) == ("triton", None)
    assert max(errors(reduced, by_formulas(this)).values()) < 1e-5


WRONG = {
    "numbers": ({"wrong": 1e-3}, "first differs from torch's by 1.0e-03"),
    "compiler": ({}, "no C compiler"),
}


@pytest.mark.parametrize("name", WRONG)
def test_torch_takes_over_with_one_note(
    name: str, chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, why = WRONG[name]

    def kernel_sums(*of: Any) -> Sums:
        if not given:
            raise RuntimeError("no C compiler\nand more about it")
        return by_torch(*of, **given)

    monkeypatch.setattr(on_device, "kernel_sums", kernel_sums)
    this = made(Case())
    reduced, notes = reduced_twice(this)
    (note,) = notes
    assert note.startswith("torch computes statistics: kernels cannot be used here")
    assert why in note
    assert "more about it" not in note
    reducer = reducer_of(this.attention, this.request)
    assert reducer.name == "torch"
    assert why in str(reducer.torch_because)
    assert max(errors(reduced, by_formulas(this)).values()) < 1e-5
    assert on_device.compiler_on(this.attention.q.device) is None


def test_without_triton_torch_takes_over_with_one_note(
    chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "mhacli.attention.kernels", raising=False)
    this = made(Case())
    reduced, (note,) = reduced_twice(this)
    assert "triton" in note
    assert max(errors(reduced, by_formulas(this)).values()) < 1e-5


def test_a_form_that_does_not_compile_is_left_to_torch(
    chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel_sums(attention: ScoredAttention, *of: Any) -> Sums:
        if attention.bias is not None:
            raise RuntimeError("out of registers")
        return by_torch(attention, *of)

    monkeypatch.setattr(on_device, "kernel_sums", kernel_sums)
    this = made(Case(has_bias=True))
    reduced, (note,) = reduced_twice(this)
    assert "out of registers" in note
    assert max(errors(reduced, by_formulas(this)).values()) < 1e-5


def test_scores_beyond_float32_are_left_to_torch(
    chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel_sums(*of: Any) -> Sums:
        return by_torch(*of, wrong=0.0 if of[0].scale < 1 else 0.5)

    monkeypatch.setattr(on_device, "kernel_sums", kernel_sums)
    this = made(Case())
    large = replace(this, attention=replace(this.attention, scale=400.0))
    reduced = reduce_heads(large.attention, large.request, range(2), is_careful=True)
    assert max(errors(reduced, by_formulas(large)).values()) < 1e-4
    reducer = reducer_of(reduced.attention, large.request)
    assert reducer == ("torch", "some scores are larger than float32 holds")


def test_what_kernels_lack_comes_from_torch(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "kernel_sums", by_torch)
    this = made(Case(batch=2))
    near = masks.Mask(lambda q_idx, k_idx: (q_idx[:, None] - k_idx).abs() < 3)
    spans = torch.rand(2, 3, 33, generator=torch.Generator().manual_seed(0)) < 0.5
    request = replace(
        this.request,
        matches=((lambda q, k: near(q, k),) * 2,),
        q_spans=spans,
        k_spans=spans,
    )
    reduced = reduce_heads(this.attention, request, range(2))
    monkeypatch.setenv("MHA_KERNELS", "0")
    right = reduce_heads(this.attention, request, range(2))
    assert right.statistics["matched"].amin() > 0
    for name, sums in right.statistics.items():
        torch.testing.assert_close(reduced.statistics[name], sums, rtol=0, atol=1e-6)


LEFT = {
    "begin at 512": {"n": 511},
    "at most 65,536 tokens": {"n": 65_537},
    "not in float64": {"dtype": torch.float64},
    "at most 256 columns": {"width": 257},
    "chosen by MHA_KERNELS=1": {"choice": "0"},
    "more than 256 MiB": {"n": 16_384, "has_mask": True},
    "bias of this text takes": {"n": 16_384, "has_bias": True},
}


@pytest.mark.parametrize("why", LEFT)
def test_the_reason_for_torch_is_said(
    why: str, chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"n": 512, "width": 16, "dtype": torch.float32, "choice": "1"} | LEFT[why]
    monkeypatch.setattr(on_device, "MIN_TOKENS", 512)
    monkeypatch.setenv("MHA_KERNELS", how["choice"])
    monkeypatch.setattr(on_device, "_fault", lambda numbers: None)
    n = how["n"]
    q = torch.zeros((), dtype=how["dtype"]).expand(1, 2, n, how["width"])
    hidden = masks.Mask(lambda q_idx, k_idx: q_idx[:, None] >= k_idx)
    attention = ScoredAttention(
        q=q,
        k=q,
        scale=1.0,
        allowed=hidden if "has_mask" in how else masks.causal(),
        bias=tensor_bias(torch.zeros(1, 1)) if "has_bias" in how else None,
    )
    axis = Axis((tuple(range(n)),), ((),), n, "right", q.device)
    request = make_statistics_request(Axes(axis, axis, True, lambda word: -1, "float32"))
    reducer = reducer_of(attention, request)
    assert reducer.name == "torch"
    assert why in str(reducer.torch_because)
    usual = replace(attention, q=q[..., :16].float(), k=q[..., :16].float(), v=None)
    if n == 512 and how["choice"] == "1":
        assert reducer_of(usual, request) == ("triton", None)


def test_a_long_compilation_is_announced_on_a_terminal(
    chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    monkeypatch.setattr(said, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(on_device, "_SILENT_S", 0.0)

    def kernel_sums(*of: Any) -> Sums:
        time.sleep(0.2)
        return by_torch(*of)

    monkeypatch.setattr(on_device, "kernel_sums", kernel_sums)
    this = made(Case())
    reduced_twice(this)
    assert said.getvalue() == "mha: the kernels of the statistics are compiled, once on a machine\n"


# ------------------------------------------------------------------------------------ the compiler


@pytest.mark.real
@NEEDS_TRITON
def test_usual_forms_of_triton_compile_without_spills_and_atomics(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "compiled.py", "--few", "64"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [*map(json.loads, done.stdout.splitlines())]
    assert {(line["kernel"], line["target"]) for line in lines} >= {
        ("rows", 80),
        ("rows", 90),
        ("diagonals", 80),
        ("diagonals", 90),
    }
    assert not any(line["atomic"] or line["spilled"] for line in lines)
    assert "atomic" not in (ROOT / "mhacli" / "attention" / "kernels.py").read_text()
