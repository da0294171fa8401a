"""Every config of transformers that builds becomes a small one that builds, with its ratios and
switches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from support import checkpoints, some
from transformers.models.auto import modeling_auto

from mhacli.models.tiny import MOST_IDS, tiny

TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "MASKED_LM": "AutoModelForMaskedLM",
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
}
FAMILIES = {
    family: automatic
    for task, automatic in reversed(TASKS.items())
    for family in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
}
NOT_BUILT = {
    "dots3_note": "it has widths that must equal others under names of their own",
    "nemo_speechlm": "an id of its blank must be below another vocabulary",
    "neomme": "a quarter of a head of 8 columns is rotated, in two axes",
    "zamba": "it has its shared layer twice or more",
}
"""Families whose small config is refused by their own code, and why."""
USUAL = {
    *("llama", "gpt2", "gemma3_text", "gemma4_text", "mixtral", "deepseek_v3", "gpt_oss", "falcon"),
    *("codegen", "bert", "t5", "bart", "qwen3_next", "mllama", "jamba", "phi3", "mt5", "glm4_moe"),
}


def built(automatic: str, config: Any) -> Any:
    """The model of a config, without numbers. Raises what its code raises."""
    with checkpoints.quiet(), torch.device("meta"):
        return getattr(transformers, automatic).from_config(config)


def switches(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, object]]:
    """The settings that are no number and no list, by their place."""
    for name, value in config.items():
        if isinstance(value, Mapping) and name != "per_layer_config":
            yield from switches(value, f"{place}{name}.")
        elif isinstance(value, bool | str):
            yield f"{place}{name}", value


def numbers(config: Any, *names: str) -> list[int] | None:
    """Numbers above 1 of a config; None if it lacks one, or has several of one: one stays one."""
    found = [config.to_dict().get(name) for name in names]
    return found if all(type(n) is int and n > 1 for n in found) else None


@pytest.mark.parametrize("family", some(FAMILIES, default=USUAL))
def test_a_small_config_builds_with_the_ratios_and_switches_of_its_family(family: str) -> None:
    automatic = FAMILIES[family]
    try:
        config = transformers.CONFIG_MAPPING[family]()
        n = sum(each.numel() for each in built(automatic, config).parameters())
        text = config.get_text_config(decoder=True)
        before = json.dumps(config.to_dict(), default=str)
        assert text.vocab_size
    except Exception as fault:  # whatever a family raises
        pytest.skip(f"not with its own defaults: {fault}")
    if family in NOT_BUILT:
        with pytest.raises(Exception, match=r"\S"):
            built(automatic, tiny(config))
        return
    small = tiny(config)
    assert json.dumps(config.to_dict(), default=str) == before
    assert sum(each.numel() for each in built(automatic, small).parameters()) <= n
    of_text = small.get_text_config(decoder=True)
    assert of_text.vocab_size == min(text.vocab_size, MOST_IDS)
    assert dict(switches(config.to_dict())) == dict(switches(small.to_dict()))
    assert {*(getattr(text, "layer_types", None) or ())} == {
        *(getattr(of_text, "layer_types", None) or ())
    }
    for part, less in (
        ("num_attention_heads", "num_key_value_heads"),
        ("num_local_experts", "num_experts_per_tok"),
        ("n_routed_experts", "num_experts_per_tok"),
    ):
        usual, ours = numbers(text, part, less), numbers(of_text, part, less)
        if usual is not None and ours is not None:
            assert usual[0] * ours[1] == usual[1] * ours[0]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        ids = getattr(of_text, name, None)
        assert all(i < of_text.vocab_size for i in (ids if isinstance(ids, list) else [ids or 0]))


def test_the_sizes_of_a_known_config_are_divided() -> None:
    config = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        num_hidden_layers=80,
        vocab_size=128256,
        bos_token_id=128000,
        eos_token_id=[128001, 7],
    )
    small = tiny(config)
    assert (small.num_hidden_layers, small.num_attention_heads, small.num_key_value_heads) == (
        *(2, 16, 2),
    )
    assert (small.hidden_size, small.head_dim, small.intermediate_size) == (128, 8, 448)
    assert (small.vocab_size, small.bos_token_id, small.eos_token_id) == (320, 319, [318, 7])
    assert small.initializer_range * 128**0.5 == pytest.approx(0.02 * 8192**0.5)
    assert tiny(config, keeps_vocabulary=True).vocab_size == 128256


def test_the_first_layer_of_each_kind_is_kept_with_what_is_said_of_it() -> None:
    config = transformers.AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=[*["sliding_attention"] * 5, "full_attention"],
        per_layer_config={5: {"head_dim": 512}},
    )
    small = tiny(config)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert small.to_dict()["per_layer_config"] == {"1": {"head_dim": 16}} or small.to_dict()[
        "per_layer_config"
    ] == {"01": {"head_dim": 16}}
