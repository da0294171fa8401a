"""Calls of models with several kinds of attention inside `mhacli.inspecting`: every layer is there,
with its weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.small_models import (
    IMAGE,
    SIZE,
    bert_config,
    bert_pair,
    eager,
    filled,
    llama,
    llava,
    without_head,
)
from torch import nn

import mhacli

pytestmark = pytest.mark.real
ATOL = 2e-5


def inspected(model: Any, **call: Any) -> Any:
    """The record of a call."""
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(**call)
    return seen.record


def image_and_question() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "input_ids": torch.tensor([[3, 9, 9, 9, 9, 50, 60]]),
        "pixel_values": torch.randn(1, 3, 16, 16),
    }


def test_cross_attention_of_an_encoder_decoder_of_two_berts_is_recorded() -> None:
    model = bert_pair()
    call = {
        "input_ids": torch.tensor([[2, 20, 21, 22, 3]]),
        "decoder_input_ids": torch.tensor([[2, 30, 31]]),
    }
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**call, output_attentions=True).cross_attentions
    model.set_attn_implementation("sdpa")
    record = inspected(model, **call)
    assert [layer.kind for layer in record.layers].count("cross") == 2
    for n in range(2):
        weights = record.pattern(layer=n, kind="cross").values
        assert weights.shape == (4, 3, 5)
        np.testing.assert_allclose(weights, expected[n][0], rtol=0, atol=ATOL)


def test_the_words_of_a_caption_attend_to_the_patches_of_the_image() -> None:
    import transformers

    text = dict(
        vocab_size=100,
        encoder_hidden_size=32,
        projection_dim=16,
        bos_token_id=3,
        eos_token_id=1,
        **SIZE,
    )
    config = transformers.BlipConfig(
        text_config={**text, "pad_token_id": 0}, vision_config={**IMAGE, **SIZE}, projection_dim=16
    )
    model = filled(transformers.BlipForConditionalGeneration(config))
    torch.manual_seed(0)
    record = inspected(
        model, pixel_values=torch.randn(1, 3, 16, 16), input_ids=torch.tensor([[3, 7, 8]])
    )
    assert any("text_decoder" in layer.name and "cross" in layer.name for layer in record.layers)


def test_a_batch_padded_on_both_sides_is_right_and_passes_its_self_check() -> None:
    model = llama(attention="eager")
    mask = torch.tensor(
        [[0, 0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0]]
    )
    torch.manual_seed(3)
    call = {
        "input_ids": torch.randint(5, 100, mask.shape).masked_fill(mask == 0, 2),
        "attention_mask": mask,
    }
    with torch.no_grad():
        expected = model(**call, output_attentions=True).attentions
    record = inspected(model, **call)
    for batch in range(3):
        real = mask[batch].bool().numpy()
        for layer in range(2):
            weights, reference = (
                record.pattern(layer=layer, batch=batch).values,
                expected[layer][batch].numpy(),
            )
            reference = reference[:, real][:, :, real]
            if weights.shape != reference.shape:
                weights = weights[:, real][:, :, real]
            np.testing.assert_allclose(weights, reference, rtol=0, atol=ATOL)
    assert record.self_check.ok


def test_the_prompt_may_be_in_a_cache_that_was_filled_before() -> None:
    model, ids = llama(), torch.tensor([[0, 20, 30, 40, 50, 60, 70]])
    with torch.no_grad():
        expected = eager(model)(ids, output_attentions=True).attentions[1][0, :, 4:]
        cache = model(ids[:, :4], use_cache=True).past_key_values
    weights = inspected(model, input_ids=ids[:, 4:], past_key_values=cache).pattern(layer=1).values
    np.testing.assert_allclose(weights, expected, rtol=0, atol=ATOL)


def test_the_language_layers_of_a_model_with_an_image_are_recorded() -> None:
    model, call = llava(), image_and_question()
    with torch.no_grad():
        expected = eager(model)(**call, output_attentions=True).attentions
    record = inspected(model, **call)
    layers = [
        layer
        for layer in record.layers
        if "language_model" in layer.name or "text_model" in layer.name
    ]
    assert len(layers) == 2
    for layer, weights in zip(layers, expected, strict=True):
        np.testing.assert_allclose(
            record.pattern(layer=layer.layer).values, weights[0], rtol=0, atol=ATOL
        )


def test_the_number_of_a_layer_in_a_record_is_that_of_removals() -> None:
    model, call = llava(), image_and_question()
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return model.generate(
            **call, **options, return_dict_in_generate=True, output_logits=True
        ).logits[0]

    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        logits()
    (first,) = [
        layer
        for layer in seen.record.layers
        if layer.name.endswith("language_model.layers.0.self_attn")
    ]
    with mhacli.removed(model, heads=[(first.layer, 1)]):
        without = logits()
    hook = without_head(model.model.language_model.layers[0].self_attn.o_proj, 1)
    expected = logits()
    hook.remove()
    assert (without - expected).abs().max() < 1e-4


TEXT_TOWER = {"vocab_size": 320, "max_position_embeddings": 128, "num_key_value_heads": 2, **SIZE}
IMAGE_TOWER = {**IMAGE, **SIZE, "num_hidden_layers": 3}


def paligemma() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model whose image tower ends in torch's own attention."""
    import transformers

    tower, text = (
        transformers.SiglipVisionConfig(**IMAGE_TOWER),
        transformers.GemmaConfig(**TEXT_TOWER, head_dim=8),
    )
    config = transformers.PaliGemmaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=9,
        projection_dim=32,
        hidden_size=32,
    )
    call = image_and_question()
    call["token_type_ids"] = torch.zeros_like(call["input_ids"])
    return filled(transformers.PaliGemmaForConditionalGeneration(config)), call


def mllama() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model in which layer 1 of the text attends to the image alone."""
    import transformers

    tower = {
        **IMAGE,
        "hidden_size": 32,
        "attention_heads": 4,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "intermediate_size": 48,
        "intermediate_layers_indices": [0, 1],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
        "vision_output_dim": 96,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {
        **TEXT_TOWER,
        "num_hidden_layers": 3,
        "cross_attention_layers": [1],
        "pad_token_id": 2,
        "rope_parameters": rope,
    }
    config = transformers.MllamaConfig(vision_config=tower, text_config=text, image_token_index=9)
    call = {
        "input_ids": torch.tensor([[3, 9, 50, 60]]),
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 4, 1, 1, dtype=torch.long),
    }
    return filled(transformers.MllamaForConditionalGeneration(config)), call


def image_captioner() -> tuple[Any, dict[str, torch.Tensor]]:
    """ViT as an encoder, and GPT-2 as the decoder that attends to it."""
    import transformers

    tower = transformers.ViTConfig(**IMAGE_TOWER)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(tower, gpt2())
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    call = {
        "pixel_values": torch.randn(1, 3, 16, 16),
        "decoder_input_ids": torch.tensor([[2, 30, 31]]),
    }
    return filled(transformers.VisionEncoderDecoderModel(config)), call


def qwen2_vl() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model whose image tower gives one token for four patches."""
    import transformers

    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    tower = {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "patch_size": 4,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT_TOWER, "rope_parameters": rope},
        vision_config=tower,
        image_token_id=9,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    ids = torch.tensor([[3, 5, 9, 9, 9, 9, 6, 60]])
    call = {
        "input_ids": ids,
        "pixel_values": torch.randn(16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 9).long(),
    }
    return filled(transformers.Qwen2VLForConditionalGeneration(config)), call


def of_text(make: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model that may read images, without one."""
    return make()[0], {"input_ids": torch.tensor([[3, 50, 60]])}


def two_images() -> tuple[Any, dict[str, torch.Tensor]]:
    return llava(), {
        "input_ids": torch.tensor([[3, 9, 9, 9, 9, 50, 9, 9, 9, 9, 60]]),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }


def gpt2(**choices: Any) -> Any:
    """The config of a GPT-2 that attends to an encoder."""
    import transformers

    sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2Config(**sizes, add_cross_attention=True, is_decoder=True, **choices)


def bert_and_gpt2() -> tuple[Any, dict[str, torch.Tensor]]:
    import transformers

    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        bert_config(num_hidden_layers=3), gpt2()
    )
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    call = {
        "input_ids": torch.tensor([[2, 20, 21, 22, 3]]),
        "decoder_input_ids": torch.tensor([[2, 30, 31]]),
    }
    return filled(transformers.EncoderDecoderModel(config)), call


def decoder_alone() -> tuple[Any, dict[str, torch.Tensor]]:
    """A decoder that is given what an encoder would give."""
    import transformers

    call = {
        "input_ids": torch.tensor([[2, 30, 31]]),
        "encoder_hidden_states": torch.randn(1, 5, 32),
    }
    return filled(transformers.GPT2LMHeadModel(gpt2())), call


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (paligemma, {"encoder": [0, 1, 2, 3], "self": [0, 1]}),
        (mllama, {"encoder": [0, 1, 2], "self": [0, 2], "cross": [1]}),
        (image_captioner, {"encoder": [0, 1, 2], "decoder": [0, 1], "cross": [0, 1]}),
        (qwen2_vl, {"encoder": [0, 1, 2], "self": [0, 1]}),
        (two_images, {"encoder": [0, 1, 2], "self": [0, 1]}),
        (bert_and_gpt2, {"encoder": [0, 1, 2], "decoder": [0, 1], "cross": [0, 1]}),
        (decoder_alone, {"self": [0, 1], "cross": [0, 1]}),
        (lambda: of_text(lambda: (llava(), {})), {"self": [0, 1]}),
        (lambda: of_text(paligemma), {"self": [0, 1]}),
        (lambda: of_text(mllama), {"self": [0, 2]}),
        (lambda: of_text(qwen2_vl), {"self": [0, 1]}),
    ],
    ids=[
        "paligemma",
        "mllama",
        "vit + gpt2",
        "qwen2-vl",
        "two images",
        "bert + gpt2",
        "gpt2 with cross-attention",
        "llava without image",
        "paligemma without image",
        "mllama without image",
        "qwen2-vl without image",
    ],
)
def test_each_kind_of_layer_is_numbered_as_in_the_model_and_has_its_weights(
    make: Any, kinds: Any
) -> None:
    model, call = make()
    record = inspected(model, **call)
    assert record.self_check.ok
    found: dict[str, list[int]] = {}
    for layer in record.layers:
        assert layer.verified
        found.setdefault(layer.kind, []).append(layer.layer)
        assert f".{layer.layer}." in layer.name or "global" in layer.name or "head" in layer.name
    assert found == kinds
    skipped = [layer.layer for layer in record.model.without if layer.layer < 3]
    assert skipped == (
        [1] if kinds == {"self": [0, 2]} else []
    )  # without an image, a layer that attends to it does not run
    with torch.no_grad():
        outputs, own = eager(model)(**call, output_attentions=True), model(**call)
    if (own[0] - outputs[0]).abs().max() > 1e-3:
        # without a mask, PaliGemma has two meanings in transformers: the record shows the one that
        # ran
        return
    names = {"self": "attentions", "cross": "cross_attentions", "decoder": "decoder_attentions"}
    for index, layer in enumerate(record.layers):
        expected = getattr(outputs, names.get(layer.kind, ""), None) or ()
        if layer.layer < len(expected) and len(expected) > max(kinds[layer.kind]):
            actual = record.arrays[f"layers.{index}.pattern"]
            np.testing.assert_allclose(actual, expected[layer.layer], rtol=0, atol=ATOL)


# --------------------------------------------------------------------- the list that numbers layers


class FirstToken(nn.Module):
    """What a classifier or a bi-encoder reads of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = filled(transformers.BertModel(bert_config()))

    def forward(self, ids: Any) -> Any:
        return self.bert(ids).last_hidden_state[:, 0]


class Towers(nn.Module):
    """Two towers in a list, which read the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([FirstToken(), FirstToken()])

    def forward(self, ids: Any) -> Any:
        return sum(tower(ids) for tower in self.towers)


class Stages(nn.Module):
    """Stages of blocks, in `nn.Sequential`, of which each holds one attention."""

    def __init__(self) -> None:
        super().__init__()
        block = partial(nn.TransformerEncoderLayer, 16, 2, 32, batch_first=True)
        self.stages = nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(2)))

    def forward(self, x: Any) -> Any:
        return self.stages(x)


IDS = torch.tensor([[2, 20, 21, 22, 3]])


@pytest.mark.parametrize(
    ("model", "given", "names"),
    [
        (
            nn.Sequential(FirstToken(), nn.Linear(32, 2)),
            IDS,
            [f"0.bert.encoder.layer.{n}.attention.self" for n in range(2)],
        ),
        (
            nn.Sequential(nn.Sequential(FirstToken()), nn.Linear(32, 2)),
            IDS,
            [f"0.0.bert.encoder.layer.{n}.attention.self" for n in range(2)],
        ),
        (
            Towers(),
            IDS,
            [
                f"towers.{tower}.bert.encoder.layer.{n}.attention.self"
                for tower in range(2)
                for n in range(2)
            ],
        ),
        (
            Stages(),
            torch.randn(1, 5, 16),
            [f"stages.{stage}.{n}.self_attn" for stage in range(2) for n in range(2)],
        ),
    ],
    ids=["backbone and head", "in a module of its own", "towers", "stages"],
)
def test_a_layer_has_the_number_that_tells_it_from_all_others(
    model: nn.Module, given: torch.Tensor, names: list[str]
) -> None:
    with mhacli.inspecting(model.train(), keep=["pattern"]) as seen, torch.no_grad():
        model(given)
    assert [(layer.layer, layer.name) for layer in seen.record.layers] == [*enumerate(names)]


def test_a_head_of_one_layer_is_removed_from_that_layer_alone() -> None:
    model = nn.Sequential(FirstToken(), nn.Linear(32, 2)).eval()
    layers = model[0].bert.encoder.layer
    for number in range(2):
        hook = without_head(layers[number].attention.output.dense, 1)
        with torch.no_grad():
            expected = model(IDS)
            hook.remove()
            with mhacli.removed(model, heads=[(number, 1)]):
                without = model(IDS)
        assert (without - expected).abs().max() < 1e-4
