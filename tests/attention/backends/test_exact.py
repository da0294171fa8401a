"""The exact answer against the formula in numpy, and the distance of backends from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from mhacli.attention import attend, masks
from mhacli.attention import backends as exact
from mhacli.attention.backends import Exact, Prepared, deviation, draw_heads, exact_answer, prepare
from mhacli.results.bench.workload import Direction, Workload

CPU = torch.device("cpu")
ENOUGH = 1e15
GROUPED = Workload(2, 6, 3, 11, 23, 23, "float64", True, "both")
SIZES = {
    "grouped, causal": GROUPED,
    "full": replace(GROUPED, n_kv_heads=6, causal=False),
    "one kv head, float32": replace(GROUPED, n_kv_heads=1, dtype="float32"),
    "a step of decoding": replace(GROUPED, q_len=1, k_len=29, direction="forward"),
    "queries of another text": replace(GROUPED, q_len=19, k_len=29, causal=False),
}


class Answer(NamedTuple):
    """z and its gradients for a weight, in float64."""

    z: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def by_formula(q: np.ndarray, k: np.ndarray, v: np.ndarray, weight: np.ndarray, *, causal: bool) -> Answer:
    """Softmax by hand, head by head, and its gradients by the chain rule: dS = P ∘ (dP − Σ dP ∘ P)."""
    shared = q.shape[1] // k.shape[1]
    scale = 1 / math.sqrt(q.shape[3])
    answer = Answer(np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // shared
            scores = scale * q[b, h] @ k[b, g].T
            if causal:
                scores[np.triu_indices(len(scores), 1)] = -np.inf
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            pattern = powers / powers.sum(axis=1, keepdims=True)
            answer.z[b, h] = pattern @ v[b, g]
            of_pattern = weight[b, h] @ v[b, g].T
            of_scores = pattern * (of_pattern - (of_pattern * pattern).sum(axis=1, keepdims=True))
            answer.q[b, h] = scale * of_scores @ k[b, g]
            answer.k[b, g] += scale * of_scores.T @ q[b, h]
            answer.v[b, g] += pattern.T @ weight[b, h]
    return answer


def explicit(work: Workload, seed: int = 3) -> Prepared:
    return prepare("explicit", work, draw_heads(work, CPU, seed), seed)


def expected(prepared: Prepared, work: Workload, found: Exact) -> Answer:
    q, k, v = (leaf.detach().double().numpy() for leaf in prepared.leaves)
    weight = np.zeros_like(q) if found.weight is None else found.weight.double().numpy()
    return by_formula(q, k, v, weight, causal=work.is_masked)


def worst(found: Tensor, array: np.ndarray) -> float:
    assert found.dtype == torch.float64
    assert found.shape == array.shape
    return float(np.abs(found.detach().numpy() - array).max())


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "in blocks"])
def test_the_exact_answer_is_that_of_the_formula(name: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_cut:
        monkeypatch.setattr(exact, "_BLOCK_BYTES", 5 * 8 * 12 * 23)  # five queries, the last block smaller
    work = SIZES[name]
    prepared = explicit(work)
    found = exact_answer(prepared, work, most_flops=ENOUGH)
    answer = expected(prepared, work, found)
    assert found.queries.tolist() == list(range(work.q_len))
    assert worst(found.out, answer.z) <= 1e-13
    assert len(found.gradients) == (0 if work.direction == "forward" else 3)
    for gradient, array in zip(found.gradients, answer[1:], strict=False):
        assert worst(gradient, array) <= 1e-12


def test_by_hand_two_tokens() -> None:
    work = Workload(1, 1, 1, 1, 2, 2, "float64", False, "forward")
    heads = tuple(
        torch.tensor(rows, dtype=torch.float64).view(1, 1, 2, 1) for rows in ([1.0, 0.0], [1.0, 2.0], [0.0, 1.0])
    )
    found = exact_answer(Prepared(heads, partial(attend, *heads)), work, most_flops=ENOUGH)
    assert found.out.flatten().tolist() == pytest.approx([math.exp(2) / (math.exp(1) + math.exp(2)), 0.5], rel=1e-14)
    off = Prepared(heads, lambda: torch.tensor([[[[1.0], [0.25]]]], dtype=torch.float64))
    first = 1 - math.exp(2) / (math.exp(1) + math.exp(2))
    assert deviation(off, work, found) == pytest.approx((first, (first + 0.25) / 2, 2))


def test_spread_queries_hold_the_first_and_the_last_and_none_twice() -> None:
    for share in [2.0, 1.0, 0.999, 0.5, 0.1, 1e-9]:
        for q_len in [1, 15, 16, 17, 100, 1021]:
            work = Workload(2, 6, 3, 11, q_len, q_len, "float32", True, "backward")
            places = exact._spread_queries(work, share * work.attention_flops).tolist()
            assert places[0] == 0
            assert places[-1] == q_len - 1
            assert len(places) == min(q_len, max(16, math.floor(q_len * min(1.0, share))))
            steps = {b - a for a, b in pairwise(places)}
            assert all(step >= 1 for step in steps)
            assert not steps or max(steps) - min(steps) <= 1


@pytest.mark.parametrize(("q_len", "n_queries"), [(8192, 8191), (32768, 32713), (65536, 65505), (10**7, 10**7 - 3)])
def test_many_queries_are_named_once_each(q_len: int, n_queries: int) -> None:
    work = Workload(1, 1, 1, 1, q_len, q_len, "float32", False, "forward")
    places = exact._spread_queries(work, (n_queries + 0.5) / q_len * work.attention_flops)
    assert len(places) == n_queries
    assert int(places.diff().min()) == 1
    assert int(places[-1]) == q_len - 1


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("backend", ["explicit", "sdpa"])
def test_at_few_queries_the_answer_is_that_of_the_whole_at_these(direction: Direction, backend: str) -> None:
    work = replace(GROUPED, q_len=53, k_len=53, direction=direction)
    prepared = prepare(backend, work, draw_heads(work, CPU, 3), 3)
    whole = exact_answer(prepared, work, most_flops=ENOUGH)
    few = exact_answer(prepared, work, most_flops=0.4 * work.attention_flops)
    assert len(few.queries) == 21
    assert (few.out - whole.out[:, :, few.queries]).abs().max() <= 1e-14
    answer = expected(prepared, work, few)
    for gradient, array in zip(few.gradients, answer[1:], strict=False):
        assert worst(gradient, array) <= 1e-12
    if few.weight is not None:
        elsewhere = torch.ones(53, dtype=torch.bool).index_fill(0, few.queries, False)
        assert not few.weight[:, :, elsewhere].any()
        assert few.weight[:, :, few.queries].abs().min() > 0
    found = deviation(prepared, work, few)
    assert found.n_queries == 21
    assert found.max_error <= 1e-13


def test_the_deviation_at_few_queries_is_that_of_the_whole_at_these() -> None:
    work = replace(GROUPED, q_len=53, k_len=53, direction="forward", dtype="float32")
    prepared = explicit(work)
    whole = exact_answer(prepared, work, most_flops=ENOUGH)
    few = exact_answer(prepared, work, most_flops=0.4 * work.attention_flops)
    differences = (prepared.forward().double() - whole.out).abs()[:, :, few.queries]
    found = deviation(prepared, work, few)
    assert found.max_error == differences.max().item() > 0
    assert found.mean_error == pytest.approx(differences.mean().item(), rel=1e-12)
    assert found.max_error <= deviation(prepared, work, whole).max_error


def test_by_hand_the_deviation_counts_every_number_of_result_and_gradients() -> None:
    """Only one number of one gradient is off, by 0.5."""
    work = replace(GROUPED, direction="both")
    prepared = explicit(work)
    found = exact_answer(prepared, work, most_flops=ENOUGH)
    gradients = [gradient.clone() for gradient in found.gradients]
    gradients[1][1, 2, 3, 4] += 0.5
    n_numbers = 2 * (2 * 6 * 23 * 11) + 2 * (2 * 3 * 23 * 11)
    error = deviation(prepared, work, found._replace(gradients=gradients))
    assert error.max_error == pytest.approx(0.5, abs=1e-12)
    assert error.mean_error == pytest.approx(0.5 / n_numbers, rel=1e-6)
    only_backward = deviation(prepared, replace(work, direction="backward"), found._replace(gradients=gradients))
    assert only_backward.mean_error == pytest.approx(0.5 / (n_numbers - 2 * 6 * 23 * 11), rel=1e-6)


def test_a_forward_pass_is_judged_by_its_result_and_a_backward_pass_by_its_gradients() -> None:
    def off_by(amount: float, leaves: tuple[Tensor, ...], allowed: Callable[..., Tensor]) -> Tensor:
        return attend(*leaves, allowed=allowed) + amount

    for direction, seen in (("forward", 0.25), ("backward", 0.0), ("both", 0.25)):
        work: Workload = replace(GROUPED, direction=direction)  # type: ignore[arg-type]
        right = explicit(work)
        shifted = replace(right, forward=partial(off_by, 0.25, right.leaves, masks.causal()))
        found = deviation(shifted, work, exact_answer(right, work, most_flops=ENOUGH))
        assert found.max_error == pytest.approx(seen, abs=1e-12)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_number_that_is_none_makes_the_deviation_none(wrong: float) -> None:
    work = replace(GROUPED, direction="forward")
    right = explicit(work)
    found = exact_answer(right, work, most_flops=ENOUGH)

    def forward() -> Tensor:
        z = right.forward().clone()
        z[1, 2, 3, 4] = wrong
        return z

    broken = deviation(replace(right, forward=forward), work, found)
    assert not math.isfinite(broken.max_error)
    assert not math.isfinite(broken.mean_error)


def test_the_answer_leaves_its_inputs_alone() -> None:
    prepared = explicit(GROUPED)
    before = [leaf.detach().clone() for leaf in prepared.leaves]
    deviation(prepared, GROUPED, exact_answer(prepared, GROUPED, most_flops=ENOUGH))
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(prepared.leaves, before, strict=True))
    assert all(leaf.grad is None for leaf in prepared.leaves)


def test_with_projections_the_exact_answer_is_that_of_the_layer_in_float64() -> None:
    work = Workload(2, 6, 6, 4, 13, 13, "float64", True, "both")
    prepared = prepare("torch-mha-weights", work, draw_heads(work, CPU, 3), 3)
    found = exact_answer(prepared, work, most_flops=ENOUGH)
    assert found.out.shape == prepared.leaves[0].shape == (2, 13, 24)
    out = prepared.forward()
    assert (out - found.out).abs().max() <= 1e-13
    (gradient,) = torch.autograd.grad(out, prepared.leaves, found.weight)
    assert (gradient - found.gradients[0]).abs().max() <= 1e-12
