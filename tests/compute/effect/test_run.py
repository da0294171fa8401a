"""Effects against other ways to get them: edited copies of the weights, and masks that the model itself reads."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.model_families import FAMILIES, ids_of, loaded_of, made, run_plain
from torch import Tensor

from mhacli.compute.effect import run as effect_run
from mhacli.compute.effect.metric import Target
from mhacli.compute.effect.parts import find_parts
from mhacli.compute.effect.removal import Removal, Remover, softmax_without
from mhacli.compute.effect.run import EffectRun
from mhacli.errors import MhaError
from mhacli.io.memory import USABLE_FRACTION
from mhacli.requests.memory import CheckpointFacts, EffectFacts
from mhacli.spec.tolerances import TOLERANCES

N, HEADS, LAYERS, TARGET = 11, 4, 3, 5
PROJECTIONS = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "llama": "model.layers.{}.self_attn.o_proj",
    "qwen3": "model.layers.{}.self_attn.o_proj",
    "gemma2": "model.layers.{}.self_attn.o_proj",
    "gpt_neox": "gpt_neox.layers.{}.attention.dense",
    "gpt_oss": "model.layers.{}.self_attn.o_proj",
}
"""The output projection of a layer, by the family's own names."""
MASKED = ("gpt2", "llama", "gemma2", "gpt_neox")
ONLY_FLOAT32 = ("gpt_oss",)
"""Families whose experts cannot be computed in float64."""
FLOAT32_SOFTMAX = {"gemma2": 1e-4}
"""Families whose softmax is in float32 whatever the model is in, and how far that moves a logit."""


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    family = FAMILIES[name]
    return made(family.kind, family.choices, automatic="AutoModelForCausalLM").to(dtype)


def run_of(model: Any, *plan: tuple[Removal, ...], ids: Tensor | None = None, **how: Any) -> EffectRun:
    ids = ids_of(1, N) if ids is None else ids
    run = EffectRun(loaded_of(model), {"input_ids": ids}, plan, ids.shape[1] - 1, Target(TARGET), **how)
    run.run()
    return run


def logit_without_head(name: str, model: Any, layer: int, head: int, ids: Tensor) -> float:
    """The target's logit of a copy whose output projection ignores a head."""
    edited = copy.deepcopy(model)
    projection = edited.get_submodule(PROJECTIONS[name].format(layer))
    weight = projection.weight.data if type(projection).__name__ == "Conv1D" else projection.weight.data.T
    width = weight.shape[0] // HEADS
    weight[head * width : (head + 1) * width] = 0
    return float(run_plain(edited, {"input_ids": ids}).logits[0, -1, TARGET])


@pytest.mark.parametrize("name", PROJECTIONS)
def test_every_head_changes_what_zeros_in_a_copy_of_the_weights_change(name: str) -> None:
    is_single = name in ONLY_FLOAT32
    model, ids = model_of(name, torch.float32 if is_single else torch.float64), ids_of(1, N)
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    run = run_of(model, *((Removal(("self", layer), (head,)),) for layer, head in heads))
    plain = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET])
    for item, (layer, head) in enumerate(heads):
        expected = logit_without_head(name, model, layer, head, ids) - plain
        assert float(run.results[item].d_logit) == pytest.approx(expected, abs=2e-5 if is_single else 1e-9), (
            layer,
            head,
        )
        assert abs(expected) > 1e-6, "a head that does something"


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("layer", [0, 1])
def test_every_edge_changes_what_a_mask_of_one_layer_changes(name: str, layer: int) -> None:
    model, ids, query = model_of(name), ids_of(1, N), N - 1
    keys = range(N)
    run = run_of(
        model,
        *((Removal(("self", layer), tuple(range(HEADS)), (query,), (key,), "renormalise"),) for key in keys),
    )
    plain = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET])
    module = model.get_submodule(PROJECTIONS[name].format(layer).rpartition(".")[0])
    for key in keys:
        mask = torch.zeros(1, 1, N, N, dtype=torch.float64).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
        window = FAMILIES[name].windows[layer]
        if window is not None:
            mask = mask.masked_fill(torch.ones(N, N).tril(-window).bool(), -torch.inf)
        mask[0, 0, query, key] = -torch.inf

        def masked(_: Any, args: Any, kwargs: Any, mask: Tensor = mask) -> Any:
            return args, kwargs | {"attention_mask": mask}

        handle = module.register_forward_pre_hook(masked, with_kwargs=True)
        expected = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET]) - plain
        handle.remove()
        assert float(run.results[key].d_logit) == pytest.approx(expected, abs=FLOAT32_SOFTMAX.get(name, 1e-9)), key


def test_an_edge_that_the_mask_forbids_changes_nothing_at_all() -> None:
    run = run_of(model_of("gpt2"), (Removal(("self", 0), (1,), (3,), (7,), "renormalise"),))
    assert float(run.results[0].d_output) == 0


def test_the_mean_of_a_head_stands_in_its_place_at_one_position_or_all() -> None:
    model, ids, layer, head = model_of("llama"), ids_of(1, N), 1, 2
    projection = model.get_submodule(PROJECTIONS["llama"].format(layer))
    width = projection.weight.shape[1] // HEADS
    columns = slice(head * width, (head + 1) * width)

    def logit(at: slice) -> float:
        def edit(_: Any, args: Any) -> Any:
            x = args[0].clone()
            x[:, at, columns] = args[0][:, :, columns].mean(dim=1, keepdim=True)
            return (x,)

        handle = projection.register_forward_pre_hook(edit)
        value = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET])
        handle.remove()
        return value

    plain = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET])
    run = run_of(
        model,
        (Removal(("self", layer), (head,), replace="mean"),),
        (Removal(("self", layer), (head,), replace="mean", at=N - 1),),
    )
    assert float(run.results[0].d_logit) == pytest.approx(logit(slice(None)) - plain, abs=1e-9)
    assert float(run.results[1].d_logit) == pytest.approx(logit(slice(N - 1, N)) - plain, abs=1e-9)


@pytest.mark.parametrize("at", [None, N - 1, 2])
def test_a_head_gives_what_it_gives_in_another_text(at: int | None) -> None:
    model, ids, other, layer, head = model_of("llama"), ids_of(1, N), ids_of(1, N, seed=7), 1, 2
    projection = model.get_submodule(PROJECTIONS["llama"].format(layer))
    width = projection.weight.shape[1] // HEADS
    columns, places = slice(head * width, (head + 1) * width), slice(None) if at is None else slice(at, at + 1)
    seen = []
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    run_plain(model, {"input_ids": other})
    handle.remove()

    def edit(_: Any, args: Any) -> Any:
        x = args[0].clone()
        x[:, places, columns] = seen[0][:, places, columns]
        return (x,)

    plain = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET])
    handle = projection.register_forward_pre_hook(edit)
    expected = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET]) - plain
    handle.remove()
    z = find_parts(model, {"input_ids": other}, 0).attention.z
    run = run_of(model, (Removal(("self", layer), (head,), replace="resample", at=at),), resampled=z)
    assert float(run.results[0].d_logit) == pytest.approx(expected, abs=1e-9)
    assert run.verified.n == 1
    assert run.verified.ok


def test_heads_of_several_layers_are_removed_together() -> None:
    model, ids = model_of("gpt2"), ids_of(1, N)
    run = run_of(model, (Removal(("self", 0), (3,)), Removal(("self", 2), (1,))))
    edited = copy.deepcopy(model)
    for layer, head in ((0, 3), (2, 1)):
        edited.get_submodule(PROJECTIONS["gpt2"].format(layer)).weight.data[12 * head : 12 * head + 12] = 0
    change = float(
        run_plain(edited, {"input_ids": ids}).logits[0, -1, TARGET]
        - run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET]
    )
    assert float(run.results[0].d_logit) == pytest.approx(change, abs=1e-9)


def test_changes_of_tokens_follow_from_the_logits() -> None:
    model, ids = model_of("gpt2"), ids_of(1, N)
    run = run_of(model, (Removal(("self", 1), (0,)),))
    edited = copy.deepcopy(model)
    edited.get_submodule(PROJECTIONS["gpt2"].format(1)).weight.data[:12] = 0
    after, before = (run_plain(m, {"input_ids": ids}).logits[0, -1].numpy() for m in (edited, model))
    p, q = (np.exp(x) / np.exp(x).sum() for x in (before, after))
    changes = run.results[0]
    assert float(changes.d_logprob) == pytest.approx(np.log(q[TARGET] / p[TARGET]), abs=1e-9)
    assert float(changes.kl) == pytest.approx((p * np.log(p / q)).sum(), abs=1e-9)
    assert int(changes.rank) == sum(after > after[TARGET])


# ------------------------------------------------------------------------------------------------------------ the proof


PLAN = [
    (Removal(("self", 1), (2,)),),
    (Removal(("self", 0), (1,), replace="mean"),),
    (Removal(("self", 2), (3,), at=4),),
    (Removal(("self", 1), (0,), (N - 1,), (2,), "renormalise"),),
]


def test_removals_are_verified_by_another_computation() -> None:
    verified = run_of(model_of("llama", torch.float32), *PLAN).verified
    assert verified.n == 4
    assert verified.identical
    assert verified.ok
    assert verified.max_abs_error <= verified.tolerance


def deep_model() -> Any:
    """Of so many layers that 16 bits add up to more than two roundings."""
    return made("llama", FAMILIES["llama"].choices | {"num_hidden_layers": 24}, automatic="AutoModelForCausalLM").to(
        torch.bfloat16
    )


def test_what_rounding_adds_up_to_over_many_layers_is_verified_and_another_head_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = deep_model()
    plan = [(Removal(("self", 1), (2,), (N - 1,), (key,), "renormalise"),) for key in range(N)]
    fewer = TOLERANCES["bfloat16"]._replace(runs=1e-3)  # as if of still more layers: what is right lies beyond
    monkeypatch.setitem(TOLERANCES, "bfloat16", fewer)  # type: ignore[arg-type]
    right = run_of(model, *plan)
    assert right.verified.max_abs_error > fewer.runs * float(right.untouched.hidden.abs().max())
    assert right.verified.ok
    cut = Remover._cut_edges

    def neighbour(remover: Remover, z: Tensor, call: Any, removal: Removal, row: int) -> None:
        cut(remover, z, call, replace(removal, heads=(removal.heads[0] ^ 1,)), row)

    monkeypatch.setattr(Remover, "_cut_edges", neighbour)
    assert not run_of(model, *plan).verified.ok


def test_edges_are_verified_where_the_model_computes_its_softmax_in_float32_whatever_its_dtype() -> None:
    assert run_of(model_of("gemma2"), PLAN[3]).verified.ok


def test_edges_of_one_head_change_what_a_mask_of_that_head_changes_where_heads_share_keys() -> None:
    model, ids, layer = model_of("llama"), ids_of(1, N), 1
    plan = [(Removal(("self", layer), (head,), (N - 1,), (2, 3), "renormalise"),) for head in range(HEADS)]
    run = run_of(model, *plan)
    plain = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET])
    module = model.get_submodule(PROJECTIONS["llama"].format(layer).rpartition(".")[0])
    for head in range(HEADS):
        mask = torch.zeros(1, HEADS, N, N, dtype=torch.float64).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
        mask[0, head, N - 1, 2:4] = -torch.inf

        def masked(_: Any, args: Any, kwargs: Any, mask: Tensor = mask) -> Any:
            return args, kwargs | {"attention_mask": mask}

        handle = module.register_forward_pre_hook(masked, with_kwargs=True)
        expected = float(run_plain(model, {"input_ids": ids}).logits[0, -1, TARGET]) - plain
        handle.remove()
        assert float(run.results[head].d_logit) == pytest.approx(expected, abs=1e-9), head


def test_a_model_that_is_put_off_by_its_own_numbers_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_off(*given: Any) -> Any:
        parts = find_parts(*given)
        parts.hidden += 1e-6
        return parts

    monkeypatch.setattr(effect_run, "find_parts", put_off)
    verified = run_of(model_of("gpt2", torch.float32), PLAN[0]).verified
    assert not verified.identical
    assert not verified.ok


def test_the_second_ways_leave_the_model_as_it_was() -> None:
    model = model_of("gpt2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run_of(model, *PLAN)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


# ---------------------------------------------------------------------------------------------------------------- floor


def test_many_batches_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = model_of("gpt2"), [(Removal(("self", 1), (head,)),) for head in range(HEADS)]
    one = run_of(model, *plan)
    monkeypatch.setattr(effect_run, "TOKENS_AT_ONCE", 3 * N)
    many = run_of(model, *plan)
    assert (one.n_batches, many.n_batches) == (1, 4)
    for item in range(HEADS):
        assert float(many.results[item].d_logit) == pytest.approx(float(one.results[item].d_logit), abs=1e-10)


def test_batches_have_as_many_rows_as_fit_in_memory() -> None:
    model, plan = model_of("gpt2"), [(Removal(("self", 1), (head,)),) for head in range(HEADS)]
    run = EffectRun(loaded_of(model), {"input_ids": ids_of(1, N)}, plan, N - 1, Target(TARGET))
    one = CheckpointFacts(1, N, 48, 192, HEADS, 8, holds_matrices=False, kept_matrices=0, keep_limit=0)
    facts = EffectFacts(one, LAYERS, 99, N)
    room = int(facts.peak_bytes(4) / USABLE_FRACTION) + 9
    cost = run.foresee(facts, room)
    run.run()
    assert (run.n_batches, cost.n_removals) == (2, HEADS)
    assert cost.peak_bytes == facts.peak_bytes(4)
    with pytest.raises(MhaError):
        run.foresee(facts, facts.peak_bytes(3))


def test_the_floor_is_above_what_untouched_rows_show() -> None:
    run = run_of(model_of("llama", torch.float32), *[(Removal(("self", 2), (0,), at=2),)] * 9)
    assert all(abs(float(done.d_output)) <= run.floor("d_output") for done in run.results.values()), "another position"
    assert run.floor("d_output") < 1e-4


def test_what_is_left_of_a_row_sums_to_one_with_its_sink() -> None:
    scores = torch.tensor([[[0.0, 1.0, 2.0]]], dtype=torch.float64)
    is_cut = torch.tensor([False, True, False])
    e = np.exp
    assert softmax_without(scores, is_cut, None)[0, 0].tolist() == pytest.approx([1 / (1 + e(2)), 0, e(2) / (1 + e(2))])
    with_sink = softmax_without(scores, is_cut, torch.tensor([[0.5]], dtype=torch.float64))[0, 0].tolist()
    assert with_sink == pytest.approx([1 / (1 + e(2) + e(0.5)), 0, e(2) / (1 + e(2) + e(0.5))])
    assert softmax_without(scores, torch.tensor([True] * 3), None)[0, 0].tolist() == [0, 0, 0]
