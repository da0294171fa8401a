"""Conversions against the modules that people really run: what they project, and every bit on the way back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from safetensors.torch import load, load_file
from support import families_made

from mhacli.attention import masks
from mhacli.attention.convert import to_family_file, to_layer_file
from mhacli.attention.layer_file import new_attention
from mhacli.checkpoints.conversion import ConversionRequest, plan_conversion
from mhacli.checkpoints.families import FAMILIES
from mhacli.checkpoints.folder import read_checkpoint
from mhacli.checkpoints.mha_weights import read_layer_file

PRE_SCALED = {"opt", "whisper", "deberta-v2", "gpt_oss"}
"""Families whose queries or keys carry a factor that others put on the dot product."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of a case, saved once."""
    made = {}

    def save(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            families_made.save_model(families_made.model_of(name), folder)
            made[name] = folder
        return made[name]

    return save


@pytest.mark.parametrize(("name", "stack"), families_made.LAYERS)
def test_queries_keys_and_values_are_those_of_the_real_module(name, stack, saved):
    folder = saved(name)
    plan = plan_conversion(read_checkpoint(str(folder)), ConversionRequest(layer=1, stack=stack))
    assert plan.layout.name in (name, *(FAMILIES[families_made.CASES[name].family].layout,))
    ours, sizes = load(to_layer_file(plan).content), plan.sizes
    seen = families_made.observed(families_made.model_of(name), families_made.CASES[name].modules[stack], sizes.n_heads)
    for part, rows, n, real in (
        ("q", seen.rows, sizes.n_heads, seen.q),
        ("k", seen.key_rows, sizes.n_kv_heads, seen.k),
        ("v", seen.key_rows, sizes.n_kv_heads, seen.v),
    ):
        flat = nn.functional.linear(rows, ours[f"{part}_proj.weight"], ours.get(f"{part}_proj.bias"))
        found = flat.unflatten(1, (n, -1)).repeat_interleave(sizes.n_heads // n, dim=1)
        factor = float((found * real).sum() / (found * found).sum())
        assert factor == pytest.approx(1.0, abs=1e-5) or (name in PRE_SCALED and part != "v")
        torch.testing.assert_close(real, factor * found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "stack"), families_made.LAYERS)
def test_a_layer_goes_to_a_file_of_ours_and_back_bit_for_bit(name, stack, saved, tmp_path):
    folder = saved(name)
    plan = plan_conversion(read_checkpoint(str(folder)), ConversionRequest(layer=1, stack=stack))
    (tmp_path / "layer.safetensors").write_bytes(to_layer_file(plan).content)
    source = read_layer_file(str(tmp_path / "layer.safetensors"), {})
    back = load(to_family_file(source, plan.layout, plan.found.prefix).content)
    original = load_file(folder / "model.safetensors")
    assert back.keys() == {tensor.name for tensor in plan.found.tensors.values()}
    for tensor_name, tensor in back.items():
        assert torch.equal(tensor, original[tensor_name]), tensor_name


EXPRESSED = [
    layer
    for layer in families_made.LAYERS
    if layer[1] != "cross"
    and layer[0]
    not in ("deberta-v2", "t5", "qwen3", "gemma3_text", "gpt_oss", "olmo2", "phi", "gpt_neox", "codegen", "gptj")
]
"""Layers whose attention a config of ours holds whole; of the others a note says what is missing."""


@pytest.mark.parametrize(("name", "stack"), EXPRESSED)
def test_the_pattern_of_a_text_is_that_of_the_real_module_with_its_positions_mask_and_scale(name, stack, saved):
    plan = plan_conversion(read_checkpoint(str(saved(name))), ConversionRequest(layer=1, stack=stack))
    config, n = plan.config, plan.sizes.n_heads
    model = families_made.model_of(name)
    seen = families_made.observed(model, families_made.CASES[name].modules[stack], n, length=7)
    layer = new_attention(config, torch.Generator())
    layer.load_state_dict({k: t for k, t in load(to_layer_file(plan).content).items() if not k.startswith("embed")})
    rules = [masks.causal()] if config.causal else []
    rules += [] if config.window is None else [masks.window(*config.window)]
    with torch.no_grad():
        rows = seen.rows.unflatten(0, (len(seen.pattern), -1))
        _, pattern = layer(rows, allowed=masks.both(*rules) if rules else None)
    torch.testing.assert_close(pattern, seen.pattern, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", families_made.CASES)
def test_whoever_is_not_held_whole_is_told_so(name, saved):
    for stack in families_made.CASES[name].modules:
        plan = plan_conversion(read_checkpoint(str(saved(name))), ConversionRequest(layer=1, stack=stack))
        words = (
            "learned positions is not converted",
            "comes after the output",
            "tokenizer.json",
            "embedd",
            "is left out",
        )
        missing = [note for note in plan.notes if not any(word in note for word in words)]
        assert bool(missing) == ((name, stack) not in EXPRESSED and stack != "cross"), missing


@pytest.mark.parametrize(
    ("name", "stack", "table", "skipped"),
    [
        ("gpt2", "self", "wpe.weight", 0),
        ("roberta", "self", "embeddings.position_embeddings.weight", 2),
        ("opt", "self", "decoder.embed_positions.weight", 2),
        ("bart", "decoder", "decoder.embed_positions.weight", 2),
        ("bart", "encoder", "encoder.embed_positions.weight", 2),
        ("whisper", "encoder", "encoder.embed_positions.weight", 0),
        ("vit", "self", "embeddings.position_embeddings", 0),
        ("clip", "vision", "vision_model.embeddings.position_embedding.weight", 0),
        ("clip", "text", "text_model.embeddings.position_embedding.weight", 0),
    ],
)
def test_place_0_of_learned_positions_is_the_row_that_the_model_reads_first(name, stack, table, skipped, saved):
    plan = plan_conversion(read_checkpoint(str(saved(name))), ConversionRequest(layer=1, stack=stack))
    found = load(to_layer_file(plan).content)["embed_positions.weight"]
    expected = load_file(saved(name) / "model.safetensors")[table].reshape(-1, found.shape[1])[skipped:]
    assert plan.config.max_positions == len(expected)
    assert torch.equal(found, expected)
