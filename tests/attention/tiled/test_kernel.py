"""The Triton kernel, run by its interpreter on the CPU: every statistic by its definition, and wrong kernels that must show."""

from __future__ import annotations

import importlib.util
import json
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

import mhacli
from mhacli.attention import masks
from mhacli.attention.tiled import reducer
from mhacli.attention.tiled.conditions import matcher
from mhacli.attention.tiled.scores import Scores, VirtualPattern, tensor_bias
from mhacli.attention.tiled.statistics import StatisticsRequest
from mhacli.compute.base.head_statistics import block_of
from mhacli.compute.heads import prepare_heads
from mhacli.errors import MhaError
from mhacli.requests.layer import layer_request
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.spec import reduction
from mhacli.spec.conditions import parse_pattern
from mhacli.spec.config import Config
from mhacli.text.encode import encode

KERNEL, HOST = (Path(reducer.__file__).with_name(f"{name}.py") for name in ("kernel", "kernel_statistics"))
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """A pattern to reduce. `sees(b, h, i, j)` says in Python what the mask does; `programs` are those of a head; `step` says how
    far apart the numbers of a head lie."""

    mask: Any = None
    sees: Callable[[int, int, int, int], bool] = lambda b, h, i, j: True
    q_len: int = 19
    k_len: int = 37
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    d_head: int = 16
    step: int = 1
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
    "window wider than a tile": Case(
        masks.window(13, 0, 31), lambda b, h, i, j: -13 <= j - i - 31 <= 0, q_len=16, k_len=48
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
    "bias under any predicate": Case(
        lambda q, k: (q[:, None] + k) % 3 > 0, lambda b, h, i, j: (i + j) % 3 > 0, bias=True, q_len=5, k_len=7
    ),
    "numbers of a head apart": Case(step=3, q_len=5, k_len=7),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
    "sums in parts": Case(d_head=72, n_parts=4, q_len=5, k_len=7),
    "sums in parts of an odd head": Case(d_head=6, n_parts=4, q_len=5, k_len=7),
    "d_head 31": Case(d_head=31, q_len=5, k_len=7),
    "d_head 64": Case(d_head=64, q_len=5, k_len=7, dtype=torch.float16),
    "d_head 80": Case(d_head=80, q_len=5, k_len=7),
    "d_head 128": Case(d_head=128, q_len=5, k_len=7, dtype=torch.bfloat16),
    "d_head 256": Case(d_head=256, q_len=5, k_len=7),
    "coarse cells": Case(k_len=50, block=8),
    "a block of several tiles": Case(q_len=40, block=32),
    "wide tiles": Case(tile=(16, 32), programs=1, block=1),
    "large tiles": Case(tile=(32, 32), block=8, is_self=False),
}


def inputs_of(case, device=CPU):
    """Scores, a log-sum-exp and a request, and what the oracle says the pattern is."""
    generator = torch.Generator().manual_seed(20)

    def draw(*shape):
        wide = torch.randn(*shape[:-1], case.step * shape[-1], generator=generator)
        return wide.to(case.dtype)[..., :: case.step]

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
    return {
        "mass": p.sum(-1),
        "entropy": -(p * logs).sum(-1),
        "squares": (p * p).sum(-1),
        "peak": np.where(visible.any(-1), np.where(visible, np.log(np.maximum(p, 1e-300)), -np.inf).max(-1), -math.inf),
        "distance": (p * abs(i - j)).sum(-1),
        "first": (p * asked.first.numpy()[:, None, None]).sum(-1),
        "leading": (p * asked.leading.numpy()[:, None, None]).sum(-1),
        "received": p.sum(-2),
        "map": cells,
        "profile": profile,
        "duplicate": (p * on(k_tokens, 0)[:, None]).sum((-1, -2)),
        "induction": (p * on(before, 1)[:, None]).sum((-1, -2)),
    }


LARGEST_ERROR = 1e-5


NAMES = [f"mhacli.attention.tiled.{path.stem}" for path in (KERNEL, HOST)]


def loaded(patch, kernel=KERNEL, host=HOST):
    """The kernel and what starts it as modules, without the checks of shapes around functions: Triton reads their source."""
    for name, path in zip(NAMES, (kernel, host), strict=True):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernel():
    with pytest.MonkeyPatch.context() as patch:
        module = loaded(patch)
        reducer.kernel_fault.cache_clear()
        yield module
    reducer.kernel_fault.cache_clear()


@np.errstate(all="ignore")
def differences(module, case, device=CPU):
    """By how much each statistic of a kernel is wrong, relative to its largest number."""
    pattern, asked, p, visible = inputs_of(case, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "_PROGRAMS", case.programs * case.batch * case.heads)
        patch.setattr(module, "ADDED_BYTES", case.added_bytes)
        found = module.kernel_statistics(
            pattern,
            asked,
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
    assert compiled[0].n_spills <= 128
    assert compiled[0].metadata.shared <= 48 << 10
    for name in ("mass", "entropy", "received", "profile", "map", "duplicate"):
        assert torch.equal(getattr(first, name), getattr(second, name))


COMPILER = Path(__file__).parents[2] / "support" / "compiled_kernel.py"


def compiler(tmp_path, *words):
    """What the compiler says of the kernel, without a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(COMPILER), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("capability", "dtype", "d_head", "mask"),
    [(80, "bfloat16", 64, "causal"), (90, "float16", 128, "documents"), (90, "float32", 256, "any")],
)
def test_a_program_keeps_to_half_of_the_shared_memory_and_to_its_registers(capability, dtype, d_head, mask, tmp_path):
    found = compiler(tmp_path, "resources", capability, dtype, d_head, 20_000, mask)
    assert found["shared"] <= 48 << 10
    assert found["spilled"] <= 128


@pytest.mark.triton
@pytest.mark.parametrize(
    ("dtype", "d_head", "n_kernels"), [("bfloat16", 64, 3), ("float16", 80, 3), ("float32", 31, 3)]
)
def test_texts_of_all_lengths_share_a_few_kernels(dtype, d_head, n_kernels, tmp_path):
    lengths = (1, 2, 16, 17, 100, 160, 255, 333, 768, 769, 1000, 1024, 1999, 4097, 6143, 6145, 8192, 10_007, 16_384)
    assert compiler(tmp_path, "signatures", dtype, d_head, *lengths) == n_kernels


CONDITIONS = {
    "tok[k] == tok[q] and k < q": True,
    "tok[k - 1] == tok[q] or abs(q - k) <= 2 and tok[k] != 'b'": True,
    "not (q - k) % 3 == 1": True,
    "q * k > 20": False,
    "tok[k] == 'a'": True,
}
"""Conditions, and whether the kernel can be given them."""


def chosen(asked, texts, *, first=(0, 0), n_spans=3):
    """The request with conditions, and with spans that overlap, of which the last has no keys."""
    generator = torch.Generator().manual_seed(2)

    def conditions(text):
        ids = {"a": 0, "b": 1}
        pairs = zip(asked.q_tokens, asked.k_tokens, strict=True)
        return tuple(matcher(parse_pattern(text), *pair, lambda word: ids.get(word, -1), first=first) for pair in pairs)

    q_spans, k_spans = (
        torch.rand(len(tokens), n_spans, tokens.shape[1], generator=generator) < 0.4
        for tokens in (asked.q_tokens, asked.k_tokens)
    )
    k_spans[:, -1] = False
    return replace(asked, matches=tuple(map(conditions, texts)), q_spans=q_spans, k_spans=k_spans)


CHOOSING = {
    "conditions": Case(masks.causal(18), lambda b, h, i, j: j <= i + 18, heads=4, kv_heads=2, batch=2, programs=2),
    "conditions beside a mask of cells": replace(CASES["any predicate"], programs=1),
}


@np.errstate(all="ignore")
def chosen_differences(module, case, texts=tuple(CONDITIONS), **how):
    """By how much the masses on chosen cells and between spans are wrong, by the definition of both."""
    pattern, asked, p, _ = inputs_of(case)
    asked = chosen(asked, texts, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "_PROGRAMS", case.programs * case.batch * case.heads)
        patch.setattr(module, "ADDED_BYTES", case.added_bytes)
        found = module.kernel_statistics(pattern, asked, launch=module.Launch(*case.tile))
    places = torch.arange(case.q_len), torch.arange(case.k_len)
    cells = np.array([[condition(*places).numpy() for condition in own] for own in asked.matches]).reshape(
        len(texts), case.batch, case.q_len, case.k_len
    )
    matched = np.einsum("bhij,nbij->bhn", p, cells)
    between = np.einsum("bhij,bsi,btj->bhst", p, *(spans.double().numpy() for spans in (asked.q_spans, asked.k_spans)))
    assert found.matched.shape == matched.shape
    assert found.between.shape == between.shape
    return max(np.abs(found.matched.numpy() - matched).max(), np.abs(found.between.numpy() - between).max())


@pytest.mark.triton
@pytest.mark.parametrize("name", CHOOSING)
def test_conditions_and_spans_are_counted_where_they_hold(name, kernel):
    assert chosen_differences(kernel, CHOOSING[name]) < LARGEST_ERROR


@pytest.mark.triton
def test_conditions_on_texts_behind_padding_are_counted_from_their_beginning(kernel):
    assert chosen_differences(kernel, CHOOSING["conditions"], first=(3, 5)) < LARGEST_ERROR


@pytest.mark.triton
def test_only_conditions_that_are_no_comparisons_are_left_to_the_tiles(kernel, monkeypatch):
    pattern, asked, *_ = inputs_of(Case(q_len=5, k_len=7))
    left = []
    monkeypatch.setattr(kernel, "reduce_tiles", lambda pattern, reducers: left.extend(reducers))
    kernel.kernel_statistics(pattern, chosen(asked, CONDITIONS))
    assert len(left) == list(CONDITIONS.values()).count(False)
    kernel.kernel_statistics(pattern, chosen(asked, [text for text, can in CONDITIONS.items() if can]))
    assert len(left) == list(CONDITIONS.values()).count(False)


@pytest.mark.triton
def test_the_progress_of_a_pass_in_strips_adds_up_to_all_cells(kernel, monkeypatch):
    pattern, asked, *_ = inputs_of(Case(masks.causal(18), bias=True))
    monkeypatch.setattr(kernel, "ADDED_BYTES", 1)
    heard = []
    kernel.kernel_statistics(pattern, asked, heard.append, launch=kernel.Launch(16, 16))
    assert len(heard) == 2
    assert sum(heard) == 2 * 19 * 37


@pytest.mark.triton
def test_a_kernel_that_agrees_is_chosen_where_it_is_asked_for(kernel):
    assert reducer.choice("triton", CPU, torch.float32) == ("triton", None)


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
        reducer.choice("triton", CPU, torch.float32)
    reducer.kernel_fault.cache_clear()
    assert "received" in caught.value.message


@pytest.mark.triton
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_model_in_memory_is_reduced_by_what_can_run_and_the_record_says_so(name, kernel, monkeypatch):
    because = None if name == "triton" else "it is raining"
    monkeypatch.setattr(reducer, "_torch_because", lambda asked, device, dtype: because)
    torch.manual_seed(0)
    model, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
    with mhacli.inspecting(model) as seen:
        model(x, x, x, need_weights=False)
    survey = seen.record.layers[0].survey
    assert seen.record.self_check.ok
    assert (survey.reducer, survey.torch_because) == (name, because)


@pytest.mark.triton
@pytest.mark.parametrize(
    "shape", [(1, 12, 5000, 5000), (1, 2, 70_000, 70_000), (3, 32, 300, 9000), (2, 500, 2000, 2000)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_memory_of_the_sums_is_foreseen(shape, dtype, kernel):
    batch, heads, q_len, k_len = shape
    q, k = (torch.empty(batch, heads, n, 64, dtype=dtype, device="meta") for n in (q_len, k_len))
    pattern = VirtualPattern(Scores(q, k, 1.0), torch.empty(shape[:3], device="meta"))
    ids = torch.zeros(batch, 1, dtype=torch.int64)
    asked = StatisticsRequest(block_of(max(shape)), ids, ids, ids, ids > 0, ids > 0)
    sums = kernel._Sums.made(pattern, asked, 0, kernel.launch_for(dtype.itemsize, 64))
    taken = sum(tensor.nbytes for tensor in sums) + sums.received[0].nbytes + sums.profile[0].nbytes
    foreseen = reduction._kernel_bytes(batch * heads, q_len, k_len)
    assert taken <= foreseen
    assert sums.received.nbytes + sums.profile.nbytes <= max(reduction.PARTIAL_BYTES, taken / sums.received.shape[0])


MUTANTS = {
    "the diagonal is forbidden": ("(distance >= low) & (distance <= high)", "(distance >= low) & (distance < high)"),
    "the diagonal of documents": ("keep = _in_band(i, j, low, high)", "keep = _in_band(i, j, low, high - 1)"),
    "a mixed tile that is not masked": ("(farthest > high) | ", ""),
    "the last keys are not masked": ("(start + K > n_keys) | ", ""),
    "the first keys of a window are not masked": ("(nearest < low) | ", ""),
    "numbers that lie side by side": ("[None, :] * step_d", "[None, :]"),
    "a bias that a mask replaces": ("torch.where(keep, added, PENALTY)", "torch.where(keep, 0.0, PENALTY)"),
    "distances on one side": ("tl.where(nearest >= 0, column, K - column)", "tl.where(nearest >= 0, column, column)"),
    "distances from another corner": ("start - i, i - start - K)", "start - i, i - start)"),
    "the diagonal has one side": ("(nearest < 0) & (farthest > 0)", "(nearest < 0) & (farthest < 0)"),
    "marks that are not counted": ("marks & (FIRST | LEADING), 0) > 0", "marks & (FIRST | LEADING), 0) > 3"),
    "the last key before a window": ("_in_band(i, j, near_low,", "_in_band(i, j, near_low - 1,"),
    "leading keys beside the window": ("near_high) | ", "near_high) & "),
    "the last tile of documents": ("mask=is_key, other=NO_KEY)", "mask=is_key, other=0)"),
    "rows beyond the last": ("(q_start + Q > q_stop)", "(q_start > q_stop)"),
    "the first tile of a band": ("tl.maximum(q_start + low, 0) // K", "tl.maximum(q_start + low, 0) // K + 1"),
    "the last tile of a band": (
        "tl.cdiv(tl.minimum(q_start + Q + high, n_keys), K)",
        "tl.minimum(q_start + Q + high, n_keys) // K",
    ),
    "a tile that nobody may skip": ("if n_visible > 0:", "if n_visible > 1:"),
    "an edge counted twice": ("tl.where(is_right, 0.0, turned)", "tl.where(row + column <= K, 0.0, turned)"),
    "diagonals above": ("below = at - K", "below = at + K"),
    "the corner of a tile": ("n_queries - 1 + start - q_start", "n_queries + start - q_start"),
    "lost partial sums": ("self.received.sum(dim=0)", "self.received[0]"),
    "lost partial diagonals": ("self.profile.sum(dim=0)", "self.profile[0]"),
    "a block of queries left out": ("n_blocks, n_programs)", "n_blocks, n_programs + 1)"),
    "the last block twice": ("(n_blocks - 1 - number)", "(n_blocks - 1 - number // 2)"),
    "keys of another head": ("(head // group) * k_h", "(head % group) * k_h"),
    "sequences mixed": ("q_ids + batch * n_queries", "q_ids"),
    "one part of a sum": ("tl.static_range(N_PARTS)", "tl.static_range(1)"),
    "the scale of softcap": ("2.0 * scores.scale / cap", "scores.scale / cap"),
    "the log-sum-exp added": ("- lse[:, None]", "+ lse[:, None]"),
    "natural logarithms": ("scores.scale * LOG2_E if cap", "scores.scale if cap"),
    "a natural bias": ("other=0.0) * _LOG2_E", "other=0.0)"),
    "no square": ("tl.sum(p * p, 1)", "tl.sum(p, 1)"),
    "the lowest peak": ("tl.maximum(peak, tl.max(log2, 1))", "tl.max(log2, 1)"),
    "absent tokens are alike": ("torch.where(tokens < 0, NOR_THIS.value, tokens)", "tokens"),
    "a key is its own duplicate": ("matches & (j[None, :] - i[:, None] != shift)", "matches"),
    "a key near the corner is its own duplicate": (
        "(nearest <= 1) & (farthest >= 0)",
        "(nearest < 0) & (farthest >= 0)",
    ),
    "the shift of induction": ("before, 1, is_near", "before, 0, is_near"),
    "the place of a cell": ("n_columns + k_start // block", "n_columns + k_start // K"),
    "the place of a fine cell": ("column = k_start // GRAIN", "column = k_start // K"),
    "the largest of a block": (".sum(dim=-1).movedim", ".amax(dim=-1).movedim"),
    "a strip that begins at 0": ("- q_start.to(tl.int64) * added_t", ""),
    "leading for first": ("((marks & FIRST) > 0)", "((marks & LEADING) > 0)"),
}
NEEDS = {
    "the first keys of a window are not masked": "window wider than a tile",
    "numbers that lie side by side": "numbers of a head apart", "a bias that a mask replaces": "bias under any predicate",
    "rows beyond the last": "no mask", "the diagonal of documents": "documents",
    "the last tile of documents": "documents and padding",
    "the last keys are not masked": "no mask", "distances on one side": "no mask", "distances from another corner": "no mask",
    "a natural bias": "bias", "the place of a fine cell": "coarse cells", "the largest of a block": "a block of several tiles",
    "the last block twice": "no mask", "a key near the corner is its own duplicate": "no mask",
    "the last key before a window": "window with sinks",
    "leading keys beside the window": "window with sinks", "the first tile of a band": "window far from the first key",
    "a tile that nobody may skip": "documents", "keys of another head": "no heads share",
    "sequences mixed": "padding on the right",
    "one part of a sum": "sums in parts", "the scale of softcap": "softcap",
    "lost partial sums": "no mask", "lost partial diagonals": "no mask", "the place of a cell": "prefix",
    "a strip that begins at 0": "any predicate", "the last tile of a band": "causal",
}  # fmt: skip
"""The case that shows a mistake; the others are shown by that of a causal mask."""


def changed(right, wrong, folder):
    """Copies of the kernel and of what starts it, with a change in one of them."""
    sources = [path.read_text() for path in (KERNEL, HOST)]
    assert sum(right in source for source in sources) == 1
    paths = [folder / path.name for path in (KERNEL, HOST)]
    for path, source in zip(paths, sources, strict=True):
        path.write_text(source.replace(right, wrong))
    return paths


@pytest.mark.triton
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name, tmp_path):
    paths = changed(*MUTANTS[name], tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        errors = differences(loaded(patch, *paths), CASES[NEEDS.get(name, "causal")])
    assert not max(errors.values()) < LARGEST_ERROR


WRONGLY_CHOSEN = {
    "the end of an interval": ("(number[None, :] <= high[:, None])", "(number[None, :] < high[:, None])"),
    "the beginning of an interval": ("(number[None, :] >= low[:, None])", "(number[None, :] > low[:, None])"),
    "answers in another order": ("<< (m - first)", "<< (last - 1 - m)"),
    "comparisons of the condition before": ("for m in range(first, last)", "for m in range(0, last - first)"),
    "conditions of another sequence": ("k_numbers + batch * n_keys", "k_numbers"),
    "queries of another sequence": ("q_numbers + batch * n_queries", "q_numbers"),
    "masses of the condition before": ("chosen + n * rows_n", "chosen"),
    "spans turned round": ("request.q_spans.to(", "request.k_spans.to("),
    "the others in their place": ("matched[..., is_other] = cells.matched", "matched[..., is_other] = 0"),
}


@pytest.mark.triton
@pytest.mark.parametrize("name", WRONGLY_CHOSEN)
def test_a_kernel_that_chooses_other_cells_is_noticed(name, tmp_path):
    paths = changed(*WRONGLY_CHOSEN[name], tmp_path)
    case = replace(CHOOSING["conditions"], q_len=37, mask=masks.causal(), sees=lambda b, h, i, j: j <= i)
    with pytest.MonkeyPatch.context() as patch:
        error = chosen_differences(loaded(patch, *paths), case)
    assert not error < LARGEST_ERROR
