"""Gradients against differences of two passes, and pictures of attention against numpy over the weights of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.model_families import FAMILIES, ids_of, loaded_of, made, run_plain

from mhacli.compute.effect.metric import rank_correlation
from mhacli.compute.effect.removal import Removal
from mhacli.compute.effect.run import EffectRun, Target

N, HEADS, LAYERS, TARGET, QUERY = 11, 4, 3, 5, 10
PROJECTIONS = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "llama": "model.layers.{}.self_attn.o_proj",
    "gemma2": "model.layers.{}.self_attn.o_proj",
}


def model_of(name: str, **how: Any) -> Any:
    family = FAMILIES[name]
    return made(family.kind, family.choices, automatic="AutoModelForCausalLM", **how).double()


def logit_with(model: Any, projection: Any, columns: slice, places: slice, factor: float) -> float:
    """The target's logit where some columns of the projection's input are scaled."""

    def scale(_: Any, args: Any) -> Any:
        x = args[0].clone()
        x[:, places, columns] *= factor
        return (x,)

    handle = projection.register_forward_pre_hook(scale)
    logit = float(run_plain(model, {"input_ids": ids_of(1, N)}).logits[0, QUERY, TARGET])
    handle.remove()
    return logit


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("at", [None, 6])
def test_estimates_are_the_slope_at_the_untouched_model(name: str, at: int | None) -> None:
    model = model_of(name)
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    plan = [(Removal(("self", layer), (head,), at=at),) for layer, head in heads]
    run = EffectRun(
        loaded_of(model), {"input_ids": ids_of(1, N)}, plan, QUERY, Target(TARGET), n_verified=0, n_screened=len(plan)
    )
    run.run()
    for item, (layer, head) in enumerate(heads):
        projection = model.get_submodule(PROJECTIONS[name].format(layer))
        weight = projection.weight if name == "gpt2" else projection.weight.T
        width = weight.shape[0] // HEADS
        columns, places = slice(head * width, (head + 1) * width), slice(None) if at is None else slice(at, at + 1)
        less, more = (logit_with(model, projection, columns, places, 1 + step) for step in (-1e-4, 1e-4))
        tolerance = 1e-6 if name == "gpt2" else 1e-2  # the norms of the others are in float32
        assert run.estimates[item] == pytest.approx(-(more - less) / 2e-4, abs=tolerance)


def test_pictures_rank_edges_as_their_formulas_do() -> None:
    model, ids = model_of("gpt2", attn_implementation="eager"), ids_of(1, N)
    edges = [(layer, key) for layer in range(LAYERS) for key in range(N)]
    query = QUERY - 2
    plan = [(Removal(("self", layer), (0, 1, 2, 3), (query,), (key,), "renormalise"),) for layer, key in edges]
    run = EffectRun(loaded_of(model), {"input_ids": ids}, plan, query, Target(TARGET), n_verified=0, is_judged=True)
    run.run()
    seen = [item for item, (_, key) in enumerate(edges) if key <= query]
    changes = [abs(run.size(item)) for item in seen]
    pictures = _pictures(model, ids, query)
    assert [judged.n for judged in run.judgements] == [len(seen)] * 4
    for judged, picture in zip(run.judgements, pictures, strict=True):
        assert judged.correlation == pytest.approx(_spearman([picture[edges[item]] for item in seen], changes))
    assert len({judged.correlation for judged in run.judgements}) == 4, "each says something else"


def _pictures(model: Any, ids: torch.Tensor, query: int) -> list[np.ndarray]:
    """The four pictures of each layer and key, by the weights of the model."""
    patterns, values = _patterns_and_values(model, ids)
    attention, weighted, rollout, graded = (np.zeros((LAYERS, N)) for _ in range(4))
    passed_on = np.eye(N)
    for layer, block in enumerate(model.transformer.h):
        p = patterns[layer]
        v, d = values[layer], values[layer].shape[1]
        attention[layer] = p[:, query].mean(axis=0)
        added = np.zeros((N, d))
        for head in range(HEADS):
            part = slice(head * d // HEADS, (head + 1) * d // HEADS)
            added += p[head, query][:, None] * v[:, part] @ block.attn.c_proj.weight.numpy()[part]
        weighted[layer] = np.linalg.norm(added, axis=1)
        passed_on = (0.5 * p.mean(axis=0) + 0.5 * np.eye(N)) @ passed_on
        rollout[layer] = passed_on[query]
        for key in range(N):
            graded[layer, key] = abs(_slope(model, block.attn.c_proj, ids, query, added[key]))
    return [attention, weighted, rollout, graded]


def _patterns_and_values(model: Any, ids: torch.Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of each layer the pattern [head, query, key], and the values of all heads side by side [key, d_model]."""
    inputs = {}
    for layer, block in enumerate(model.transformer.h):
        block.attn.register_forward_pre_hook(
            lambda _, args, kwargs, layer=layer: inputs.update({layer: (args or (kwargs["hidden_states"],))[0][0]}),
            with_kwargs=True,
        )
    patterns = [p[0].numpy() for p in run_plain(model, {"input_ids": ids}, output_attentions=True).attentions]
    values = []
    for layer, block in enumerate(model.transformer.h):
        qkv = inputs[layer].numpy() @ block.attn.c_attn.weight.numpy() + block.attn.c_attn.bias.numpy()
        values.append(qkv[:, 2 * qkv.shape[1] // 3 :])
    return patterns, values


@pytest.mark.parametrize("at", [None, 6])
def test_pictures_rank_heads_as_their_formulas_do(at: int | None) -> None:
    model, ids = model_of("gpt2", attn_implementation="eager"), ids_of(1, N)
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    plan = [(Removal(("self", layer), (head,), at=at),) for layer, head in heads]
    together = tuple(removal for removals in plan[:2] for removal in removals)
    given = {"input_ids": ids}, [*plan, together], QUERY, Target(TARGET)
    run = EffectRun(loaded_of(model), *given, n_verified=0, is_judged=True)
    run.run()
    changes, places = [abs(run.size(item)) for item in range(len(heads))], range(N) if at is None else [at]
    patterns, values = _patterns_and_values(model, ids)
    largest, written, graded = [], [], []
    for layer, head in heads:
        width = values[layer].shape[1] // HEADS
        part = slice(head * width, (head + 1) * width)
        projection = model.transformer.h[layer].attn.c_proj
        added = patterns[layer][head] @ values[layer][:, part] @ projection.weight.numpy()[part]
        largest.append(np.mean([patterns[layer][head, place].max() for place in places]))
        written.append(np.mean([np.linalg.norm(added[place]) for place in places]))
        columns = slice(0, N) if at is None else slice(at, at + 1)
        less, more = (logit_with(model, projection, part, columns, 1 + step) for step in (-1e-4, 1e-4))
        graded.append(abs(more - less))
    assert [(judged.picture, judged.n) for judged in run.judgements] == [
        ("attention weight", 12), ("value-weighted attention", 12), ("attention rollout", 0), ("gradient × attention", 12),
    ]  # fmt: skip
    expected = [_spearman(largest, changes), _spearman(written, changes), None, _spearman(graded, changes)]
    assert [judged.correlation for judged in run.judgements] == [
        None if each is None else pytest.approx(each) for each in expected
    ]


def _slope(model: Any, projection: Any, ids: torch.Tensor, query: int, vector: np.ndarray) -> float:
    """How fast the logit changes when a vector is added to what a projection gives to one token."""

    def logit(step: float) -> float:
        def add(_: Any, args: Any, output: Any) -> Any:
            output = output.clone()
            output[0, query] += step * torch.from_numpy(vector)
            return output

        handle = projection.register_forward_hook(add)
        found = float(run_plain(model, {"input_ids": ids}).logits[0, query, TARGET])
        handle.remove()
        return found

    return (logit(1e-4) - logit(-1e-4)) / 2e-4


def _spearman(one: list[float], other: list[float]) -> float:
    """Pearson's correlation of the ranks. A rank counts the smaller numbers, and half of those that are equal."""
    ranks = []
    for numbers in (one, other):
        rows = np.array(numbers)[:, None]
        ranks.append((rows > rows.T).sum(axis=1) + (rows == rows.T).sum(axis=1) / 2)
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_correlation_is_that_of_ranks_by_counting(seed: int) -> None:
    one, other = np.random.default_rng(seed).integers(0, 6, (2, 17)).tolist()
    assert rank_correlation(one, other) == pytest.approx(_spearman(one, other))


def test_equal_numbers_share_the_mean_of_their_ranks() -> None:
    assert rank_correlation([0, 0, 0, 5], [1, 2, 3, 4]) == pytest.approx(3 / (3 * 5) ** 0.5)
    assert rank_correlation([3, 3, 3], [1, 2, 3]) is None
