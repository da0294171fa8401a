"""The Triton kernel, run by its interpreter on the CPU: every statistic by its definition, and wrong kernels that must show."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle

from mhacli.attention import masks
from mhacli.attention.tiled import reducer
from mhacli.attention.tiled.scores import Scores, VirtualPattern, tensor_bias
from mhacli.attention.tiled.statistics import StatisticsRequest, summarise
from mhacli.compute.heads import prepare_heads
from mhacli.errors import MhaError
from mhacli.requests.layer import layer_request
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.spec.config import Config
from mhacli.text.encode import encode

KERNEL = Path(reducer.__file__).with_name("kernel.py")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """A pattern to reduce. `sees(b, h, i, j)` says in Python what the mask does; `programs` are those of a head."""

    mask: Any = None
    sees: Callable[[int, int, int, int], bool] = lambda b, h, i, j: True
    q_len: int = 19
    k_len: int = 37
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    d_head: int = 16
    softcap: float | None = None
    bias: bool = False
    dtype: torch.dtype = torch.float32
    n_parts: int = 1
    block: int = 4
    is_self: bool = True
    tile: tuple[int, int] = (16, 16)
    programs: int = 64
    added_bytes: int = 1 << 20


def window_with_sink(b, h, i, j):
    return j <= i + 9 and (i + 9 - 6 <= j or j < 2)


HIDDEN = torch.rand(2, 2, 19, 37, generator=torch.Generator().manual_seed(5)) < 0.4
HIDDEN[0, 1, 3] = True
PLACES = torch.arange(37)
CASES = {
    "no mask": Case(),
    "causal": Case(masks.causal(18), lambda b, h, i, j: j <= i + 18, programs=1),
    "causal, a square": Case(masks.causal(), lambda b, h, i, j: j <= i, k_len=19, block=1),
    "causal, queries without keys": Case(masks.causal(-3), lambda b, h, i, j: j <= i - 3),
    "window": Case(masks.window(6, 2, 9), lambda b, h, i, j: -6 <= j - i - 9 <= 2, block=16),
    "window far from the first key": Case(masks.window(3, 0, 25), lambda b, h, i, j: -3 <= j - i - 25 <= 0, k_len=50),
    "window with sinks": Case(
        masks.both(masks.causal(9), masks.either(masks.window(6, 0, 9), masks.leading(2))), window_with_sink
    ),
    "prefix": Case(masks.prefix(5, 2), lambda b, h, i, j: j < 5 or j <= i + 2, block=64),
    "padding on the right": Case(
        masks.both(masks.padding([37, 20]), masks.padding([19, 4], of="query")),
        lambda b, h, i, j: b == 0 or (j < 20 and i < 4),
        batch=2,
    ),
    "padding on the left": Case(
        masks.both(masks.causal(18), masks.padding([37, 20], "left", padded_len=37)),
        lambda b, h, i, j: j <= i + 18 and (b == 0 or j >= 17),
        batch=2,
    ),
    "documents": Case(
        masks.both(masks.causal(18), masks.documents((PLACES[:19] + 18) // 17, PLACES // 17)),
        lambda b, h, i, j: j <= i + 18 and (i + 18) // 17 == j // 17,
    ),
    "documents and padding": Case(
        masks.both(masks.documents(PLACES[:19] // 7 - 1, PLACES // 7 - 1), masks.padding([30])),
        lambda b, h, i, j: i // 7 == j // 7 and j < 30,
    ),
    "a tensor, per head": Case(
        masks.from_tensor(~HIDDEN), lambda b, h, i, j: not HIDDEN[b, h, i, j], batch=2, added_bytes=1
    ),
    "any predicate": Case(lambda q, k: (q[:, None] + k) % 3 > 0, lambda b, h, i, j: (i + j) % 3 > 0, added_bytes=1),
    "one token": Case(q_len=1, k_len=1),
    "one query": Case(q_len=1, block=64),
    "one key": Case(k_len=1, is_self=False),
    "keys shared by three heads": Case(heads=6, kv_heads=2, q_len=5, k_len=7),
    "no heads share": Case(heads=3, kv_heads=3, q_len=5, k_len=7),
    "softcap": Case(softcap=1.5, q_len=5, k_len=7),
    "bias": Case(masks.causal(18), lambda b, h, i, j: j <= i + 18, bias=True, added_bytes=1),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
    "sums in parts": Case(d_head=72, n_parts=4, q_len=5, k_len=7),
    "sums in parts of an odd head": Case(d_head=6, n_parts=4, q_len=5, k_len=7),
    "d_head 31": Case(d_head=31, q_len=5, k_len=7),
    "d_head 64": Case(d_head=64, q_len=5, k_len=7, dtype=torch.float16),
    "d_head 80": Case(d_head=80, q_len=5, k_len=7),
    "d_head 128": Case(d_head=128, q_len=5, k_len=7, dtype=torch.bfloat16),
    "d_head 256": Case(d_head=256, q_len=5, k_len=7),
    "wide tiles": Case(tile=(16, 32), programs=1, block=1),
    "large tiles": Case(tile=(32, 32), block=8, is_self=False),
}


def inputs_of(case, device=CPU):
    """Scores, a log-sum-exp and a request, and what the oracle says the pattern is."""
    generator = torch.Generator().manual_seed(20)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(case.dtype)

    q, k = (
        draw(case.batch, case.heads, case.q_len, case.d_head),
        draw(case.batch, case.kv_heads, case.k_len, case.d_head),
    )
    added = torch.randn(case.heads, case.q_len, case.k_len, generator=generator) if case.bias else None
    cells = [[[case.sees(b, h, i, j) for j in range(case.k_len)] for i in range(case.q_len)]
             for b in range(case.batch) for h in range(case.heads)]  # fmt: skip
    visible = np.array(cells).reshape(case.batch, case.heads, case.q_len, case.k_len)
    bias = None if added is None else added.expand(case.batch, -1, -1, -1).double().numpy()
    v = np.zeros((case.batch, case.kv_heads, case.k_len, 1))
    exact = oracle.attention(
        q.double(), k.double(), v, scale=2 * case.d_head**-0.5, softcap=case.softcap, bias=bias, allowed=visible
    )
    with np.errstate(divide="ignore"):
        lse = np.nan_to_num(np.logaddexp.reduce(exact.scores, axis=-1), neginf=0.0)
    scores = Scores(
        q.to(device), k.to(device), 2 * case.d_head**-0.5, case.softcap,
        None if added is None else tensor_bias(added.to(device)), case.mask, case.n_parts,
    )  # fmt: skip
    tokens = torch.randint(-1, 4, (case.batch, max(case.q_len, case.k_len)), generator=generator)
    k_tokens = tokens[:, : case.k_len]
    places = torch.arange(case.k_len).expand(case.batch, -1)
    asked = StatisticsRequest(
        case.block, tokens[:, : case.q_len], k_tokens, k_tokens.roll(1, 1), places == 0, places < 4, case.is_self
    )
    return VirtualPattern(scores, torch.from_numpy(lse).float().to(device)), asked.on(device), exact.pattern, visible


def expected(p, visible, asked):
    """Every statistic by its definition, in float64."""
    batch, heads, q_len, k_len = p.shape
    i, j = np.arange(q_len)[:, None], np.arange(k_len)
    q_tokens, k_tokens, before = (t.numpy() for t in (asked.q_tokens, asked.k_tokens, asked.before_k))
    logs = np.log(np.where(p > 0, p, 1.0))

    def on(k_labels, shift):
        same = (q_tokens[:, :, None] == k_labels[:, None, :]) & (q_tokens >= 0)[:, :, None]
        return same & (j != i + shift) if asked.is_self else same

    cells = np.zeros((batch, heads, -(-q_len // asked.block), -(-k_len // asked.block)))
    profile = np.zeros((batch, heads, q_len + k_len - 1))
    for row in range(q_len):
        for column in range(k_len):
            cells[:, :, row // asked.block, column // asked.block] += p[:, :, row, column]
            profile[:, :, column - row + q_len - 1] += p[:, :, row, column]
    floor = LIFT / np.maximum(visible.sum(axis=-1, keepdims=True), 1)
    return {
        "mass": p.sum(-1),
        "entropy": -(p * logs).sum(-1),
        "squares": (p * p).sum(-1),
        "peak": np.where(visible.any(-1), np.where(visible, np.log(np.maximum(p, 1e-300)), -np.inf).max(-1), -math.inf),
        "distance": (p * abs(i - j)).sum(-1),
        "first": (p * asked.first.numpy()[:, None, None]).sum(-1),
        "leading": (p * asked.leading.numpy()[:, None, None]).sum(-1),
        "received": p.sum(-2),
        "lifted": ((p >= floor) & visible).sum(-2),
        "map": cells,
        "profile": profile,
        "duplicate": (p * on(k_tokens, 0)[:, None]).sum((-1, -2)),
        "induction": (p * on(before, 1)[:, None]).sum((-1, -2)),
    }


LIFT, LARGEST_ERROR = 1.3, 1e-5


NAME = "mhacli.attention.tiled.kernel"


def loaded(path, name):
    """A kernel's file as a module, without the checks of shapes around functions: Triton reads their source."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernel():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, NAME, loaded(KERNEL, NAME))
        reducer.kernel_fault.cache_clear()
        yield sys.modules[NAME]
    reducer.kernel_fault.cache_clear()


@np.errstate(all="ignore")
def differences(module, case, device=CPU):
    """By how much each statistic of a kernel is wrong, relative to its largest number."""
    pattern, asked, p, visible = inputs_of(case, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PROGRAMS", case.programs * case.batch * case.heads)
        patch.setattr(module, "_ADDED_BYTES", case.added_bytes)
        found = module.kernel_statistics(
            pattern,
            asked,
            visible=torch.from_numpy(visible.sum(-1)).float().to(device),
            lift=LIFT,
            launch=module.Launch(*case.tile),
        )
    errors = {}
    for name, wanted in expected(p, visible, asked.on(CPU)).items():
        got = getattr(found, name).double().cpu().numpy()
        assert got.shape == wanted.shape, name
        if name == "peak":
            got = np.where(got < -1e20, -math.inf, got)
            wanted, got = np.exp(wanted), np.exp(got)
        errors[name] = np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max())
    return errors


@pytest.mark.triton
@pytest.mark.parametrize("name", CASES)
def test_every_statistic_of_the_kernel_agrees_with_the_definition(name, kernel):
    errors = differences(kernel, CASES[name])
    assert max(errors.values()) < LARGEST_ERROR


@pytest.mark.triton
def test_the_same_input_gives_the_same_bytes(kernel):
    pattern, asked, *_ = inputs_of(CASES["causal"])
    first, second = (kernel.kernel_statistics(pattern, asked, launch=kernel.Launch(16, 16)) for _ in range(2))
    for name in ("mass", "entropy", "received", "profile", "map", "duplicate"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_device_every_statistic_agrees_with_the_definition(name, kernel):
    errors = differences(kernel, CASES[name], GPU)
    assert max(errors.values()) < LARGEST_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_device_the_kernel_is_taken(dtype, kernel):
    assert reducer.kernel_fault(GPU, dtype) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "d_head"), [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 256)])
def test_on_a_device_a_program_keeps_to_its_registers_and_repeats_its_bytes(dtype, d_head, kernel):
    case = Case(masks.causal(), q_len=200, k_len=200, d_head=d_head, dtype=dtype)
    compiled = []
    start = kernel.reduce_pattern.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel.reduce_pattern, "run", lambda *given, **how: compiled.append(start(*given, **how)))
        pattern, asked, *_ = inputs_of(case, GPU)
        first, second = (kernel.kernel_statistics(pattern, asked) for _ in range(2))
    assert compiled[0].n_spills <= 64
    assert compiled[0].metadata.shared <= 48 << 10
    for name in ("mass", "entropy", "received", "profile", "map", "duplicate"):
        assert torch.equal(getattr(first, name), getattr(second, name))


COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mhacli.attention.tiled.kernel import launch_for, reduce_pattern
import torch

dtype, d_head, parts, capability = sys.argv[1], *map(int, sys.argv[2:])
launch = launch_for(getattr(torch, dtype), d_head)
fixed = {"Q": launch.queries, "K": launch.keys, "D_HEAD": d_head, "WIDTH": d_head // parts, "N_PARTS": parts, "WIDENS": False,
         "ROWS": 8, "COLUMNS": 8, "HAS_SOFTCAP": True, "HAS_ADDED": dtype == "float32", "HAS_NEAR": True, "MAY_SKIP": True,
         "IS_SELF": True, "q_d": 1, "k_d": 1}
kinds = {"q": dtype, "k": dtype, "q_ids": "int32", "k_ids": "int32", "scale": "fp32", "softcap": "fp32"}
short = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
numbers = ("of_queries", "added", "rows", "columns", "profile", "cells")
signature = {name: "constexpr" if name in fixed else "*fp32" if name in numbers
             else short.get(kinds.get(name), kinds.get(name, "i32")) for name in reduce_pattern.arg_names}
place = {name: (index,) for index, name in enumerate(reduce_pattern.arg_names)}
aligned = {place[name]: [["tt.divisibility", 16]] for name in ("q", "k", "q_b", "q_h", "q_t", "k_b", "k_h", "k_t")}
source = ASTSource(reduce_pattern, signature, {place[name]: value for name, value in fixed.items()}, aligned)
options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
made = triton.compile(source, GPUTarget("cuda", capability, 32), options)
print(made.metadata.shared)
"""


@pytest.mark.triton
@pytest.mark.parametrize(
    ("dtype", "d_head", "parts", "capability"),
    [("bfloat16", 64, 1, 80), ("float16", 128, 1, 90), ("float32", 256, 4, 90)],
)
def test_the_kernel_compiles_for_devices_in_half_of_the_memory_that_each_program_may_have(
    dtype, d_head, parts, capability, tmp_path
):
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(script), dtype, str(d_head), str(parts), str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 48 << 10


@pytest.mark.triton
def test_conditions_and_spans_beside_the_kernel_are_those_of_the_tiles(kernel):
    pattern, asked, *_ = inputs_of(Case(q_len=5, k_len=7))
    spans = torch.tensor([[[True, True, False, False, False], [False, False, True, True, True]]])
    asked = StatisticsRequest(
        **vars(asked)
        | {
            "matches": ((lambda q_idx, k_idx: q_idx[:, None] > k_idx,),),
            "q_spans": spans,
            "k_spans": torch.nn.functional.pad(spans, (0, 2)),
        }
    )
    found, wanted = kernel.kernel_statistics(pattern, asked), summarise(pattern, asked)
    assert torch.equal(found.matched, wanted.matched)
    assert torch.equal(found.between, wanted.between)
    assert found.matched.shape == (1, 2, 1)
    assert found.between.shape == (1, 2, 2, 2)


@pytest.mark.triton
def test_the_progress_of_a_pass_in_strips_adds_up_to_all_cells(kernel, monkeypatch):
    pattern, asked, *_ = inputs_of(Case(masks.causal(18), bias=True))
    monkeypatch.setattr(kernel, "_ADDED_BYTES", 1)
    heard = []
    kernel.kernel_statistics(pattern, asked, heard.append, launch=kernel.Launch(16, 16))
    assert len(heard) == 2
    assert sum(heard) == 2 * 19 * 37


@pytest.mark.triton
def test_a_kernel_that_agrees_is_chosen_where_it_is_asked_for(kernel):
    assert reducer.settled("triton", CPU, torch.float32) == ("triton", ())


@pytest.mark.triton
@pytest.mark.parametrize("layer", [Config(n_heads=4, n_kv_heads=2, causal=True), Config(n_heads=2, positions="alibi")])
def test_a_look_at_heads_by_the_kernel_is_that_by_torch(layer, kernel):
    texts = ["the cat sat on the mat", "a dog"]
    encoded = encode(texts, layer, context=())
    by_torch, by_kernel = (records(encoded, layer, reducer=name) for name in ("torch", "triton"))
    assert by_kernel.self_check.ok
    for name, array in by_torch.arrays.items():
        np.testing.assert_allclose(by_kernel.arrays[name], array, atol=2e-6, rtol=2e-6)


def records(encoded, layer, **wanted):
    """The record of `mha heads`."""
    run = prepare_heads(layer_request(encoded, layer), HeadsRequest(**wanted))
    run.run()
    return run.record()


@pytest.mark.triton
def test_a_kernel_that_disagrees_is_refused_with_the_statistic(monkeypatch, kernel):
    right = kernel.kernel_statistics

    def wrong(*args, **how):
        found = right(*args, **how)
        return replace(found, received=found.received * 1.01)

    monkeypatch.setattr(kernel, "kernel_statistics", wrong)
    reducer.kernel_fault.cache_clear()
    with pytest.raises(MhaError) as caught:
        reducer.settled("triton", CPU, torch.float32)
    reducer.kernel_fault.cache_clear()
    assert "received" in caught.value.message


MUTANTS = {
    "the sign of distances": ("distance = j[None, :] - i[:, None]", "distance = i[:, None] - j[None, :]"),
    "the diagonal is forbidden": ("& (distance <= high)", "& (distance < high)"),
    "the last key before a window": ("(distance >= near_low)", "(distance >= near_low - 1)"),
    "leading keys beside the window": ("(is_near | ", "(is_near & "),
    "the last tile is unmasked": ("j < n_keys, other=_NO_KEY)", "j < n_keys, other=0)"),
    "rows beyond the last": ("is_query, other=_NO_QUERY)", "is_query, other=0)"),
    "the first tile of a band": ("tl.maximum(q_start + low, 0) // K", "tl.maximum(q_start + low, 0) // K + 1"),
    "the last tile of a band": (
        "tl.cdiv(tl.minimum(q_start + Q + high, n_keys), K)",
        "tl.minimum(q_start + Q + high, n_keys) // K",
    ),
    "a tile that nobody may skip": ("if n_visible > 0:", "if n_visible > 1:"),
    "an edge counted twice": ("tl.where(is_right, 0.0, turned)", "tl.where(row + column <= K, 0.0, turned)"),
    "diagonals above": ("below = at - K", "below = at + K"),
    "the corner of a tile": ("corner = n_queries - 1 + tile * K - q_start", "corner = n_queries + tile * K - q_start"),
    "lost partial sums": ("self.columns.sum(dim=0)", "self.columns[0]"),
    "lost partial diagonals": ("self.profile.sum(dim=0)", "self.profile[0]"),
    "a block of queries left out": ("tl.num_programs(0)):", "tl.num_programs(0) + 1):"),
    "keys of another head": ("(head // group) * k_h", "(head % group) * k_h"),
    "sequences mixed": ("q_ids + batch * n_queries", "q_ids"),
    "one part of a sum": ("tl.static_range(N_PARTS)", "tl.static_range(1)"),
    "the scale of softcap": ("2.0 * score / softcap", "score / softcap"),
    "the log-sum-exp added": ("- lse[:, None]", "+ lse[:, None]"),
    "natural logarithms": ("score * _LOG2_E", "score"),
    "no square": ("tl.sum(p * p, 1)", "tl.sum(p, 1)"),
    "the lowest peak": ("tl.maximum(peak, tl.max(log2, 1))", "tl.max(log2, 1)"),
    "a floor from above": ("p >= floor[:, None]", "p <= floor[:, None]"),
    "absent tokens are alike": ("& (token >= 0)[:, None]", ""),
    "a key is its own duplicate": ("matches & (distance != shift)", "matches"),
    "the shift of induction": ("before, 1, IS_SELF)", "before, 0, IS_SELF)"),
    "the place of a cell": ("column = k_start // block", "column = k_start // COLUMNS"),
    "a strip that begins at 0": ("- q_start.to(tl.int64) * added_t", ""),
    "leading for first": ("((marks & _FIRST) > 0)", "((marks & _LEADING) > 0)"),
}
NEEDS = {
    "rows beyond the last": "bias", "the last key before a window": "window with sinks",
    "leading keys beside the window": "window with sinks", "the first tile of a band": "window far from the first key",
    "a tile that nobody may skip": "documents", "keys of another head": "no heads share",
    "sequences mixed": "padding on the right", "the last tile is unmasked": "no mask",
    "one part of a sum": "sums in parts", "the scale of softcap": "softcap",
    "lost partial sums": "no mask", "lost partial diagonals": "no mask", "the place of a cell": "prefix",
    "a strip that begins at 0": "any predicate", "the last tile of a band": "causal",
}  # fmt: skip
"""The case that shows a mistake; the others are shown by that of a causal mask."""


@pytest.mark.triton
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name, tmp_path):
    right, wrong = MUTANTS[name]
    source = KERNEL.read_text()
    assert right in source
    path = tmp_path / "wrong.py"
    path.write_text(source.replace(right, wrong))
    errors = differences(loaded(path, f"wrong_{abs(hash(name))}"), CASES[NEEDS.get(name, "causal")])
    assert not max(errors.values()) < LARGEST_ERROR
