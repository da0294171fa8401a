"""Folders and files that people give to `--model`: what can be run is run, and errors name the
reason and a way that works.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import (
    IMAGE,
    SIZE,
    TEXT,
    bert_pair,
    byte_tokenizer,
    filled,
    llama_folder,
    saved,
    word_tokenizer,
)

WIDE = {"COLUMNS": "1000"}
ANY = (0, 1, 2)


def words_of(ended: Any) -> str:
    """Everything that a person reads, on one line."""
    return " ".join(f"{ended.stdout} {ended.stderr}".split())


@pytest.mark.real
def test_a_saved_encoder_decoder_of_two_berts_is_run(mha: Any, tmp_path: Path) -> None:
    model = bert_pair()
    model.config.encoder.vocab_size = 180
    word_tokenizer(saved(model, tmp_path / "model"))
    mha("run", TEXT, "--context", "a small river runs", "--model", "model", "--view", "none")


@pytest.mark.real
def test_the_way_to_convert_a_pickle_works_for_tied_weights(mha: Any, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    config = transformers.GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.save_pretrained(folder)
    byte_tokenizer(folder)
    torch.save(
        filled(transformers.GPT2LMHeadModel(config)).state_dict(), folder / "pytorch_model.bin"
    )
    words = words_of(mha("run", TEXT, "--model", "model", code=ANY, env=WIDE))
    is_bare = re.search(r"torch\.load.*save_file", words)
    if is_bare and not re.search("save_pretrained|save_model|clone|share", words):
        save_file(
            torch.load(folder / "pytorch_model.bin", weights_only=True),
            folder / "model.safetensors",
        )
        (folder / "pytorch_model.bin").unlink()
        mha("run", TEXT, "--model", "model")


@pytest.mark.real
def test_code_of_a_checkpoint_does_not_run_and_the_error_says_how_to_inspect_it(
    mha: Any, tmp_path: Path
) -> None:
    folder = llama_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    maps = {"AutoConfig": "configuration_my.MyConfig", "AutoModel": "modeling_my.MyModel"}
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "mymodel", "auto_map": maps})
    )
    for name in ("modeling_my.py", "configuration_my.py"):
        (folder / name).write_text("open('ran', 'w')")
    words = words_of(mha("run", TEXT, "--model", "model", code=ANY, env=WIDE))
    assert not list(tmp_path.rglob("ran"))
    assert re.search("inspecting|trust_remote_code", words)


@pytest.mark.real
def test_doctor_does_not_read_a_file_of_weights_as_a_config(mha: Any, tmp_path: Path) -> None:
    llama_folder(tmp_path / "model")
    words = words_of(
        mha("doctor", "--model", "model/model.safetensors", code=(0, 1, 2, 3), env=WIDE)
    )
    assert "is not a valid JSON" not in words


@pytest.mark.real
def test_a_file_of_weights_leads_to_its_folder(mha: Any, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m")
    ended = mha("run", TEXT, "--model", folder / "model.safetensors", code=ANY, env=WIDE)
    leads = re.search(
        r"(folder|directory|try|--model) \S*/m\b(?!/model)|the folder that", words_of(ended)
    )
    assert leads or ended.code == 0


def test_a_folder_of_llama_cpp_is_refused_by_the_name_of_its_format(
    mha: Any, tmp_path: Path
) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "tiny.Q4_K_M.gguf").write_bytes(b"GGUF" + b"\3\0\0\0" + bytes(64))
    ended = mha("run", TEXT, "--model", "g", code=ANY, env=WIDE)
    assert ended.code == 0 or re.search(
        "GGUF|llama.cpp", words_of(ended).replace("tiny.Q4_K_M.gguf", "")
    )


@pytest.mark.real
def test_an_adapter_without_its_base_is_named_and_the_hint_leads_on(
    mha: Any, tmp_path: Path
) -> None:
    base, adapter = llama_folder(tmp_path / "base"), tmp_path / "adapter"
    byte_tokenizer(adapter)
    lora = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
    }
    config = json.dumps({**lora, "bias": "none", "base_model_name_or_path": str(base)})
    (adapter / "adapter_config.json").write_text(config)
    prefix, shapes = "base_model.model.model.layers", {"A": (2, 32), "B": (32, 2)}
    names = [(layer, side) for layer in range(2) for side in "AB"]
    tensors = {
        f"{prefix}.{i}.self_attn.q_proj.lora_{side}.weight": torch.ones(shapes[side])
        for i, side in names
    }
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    ended = mha("run", TEXT, "--model", "adapter", code=ANY, env=WIDE)
    words = words_of(ended)
    if hint := re.search(r"try (\S+)", words):
        mha("run", TEXT, "--model", hint[1], env=WIDE)
    assert ended.code == 0 or re.search("merge|PEFT|LoRA|base model", words, re.IGNORECASE)


@pytest.mark.real
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod."])
def test_a_prefix_before_every_tensor_is_left_out(mha: Any, tmp_path: Path, prefix: str) -> None:
    path = llama_folder(tmp_path / "model") / "model.safetensors"
    words = ("effect", TEXT, "--model", "model", "--head", "0.1,1.2", "--json")
    expected = mha(*words).json["effects"]
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert mha(*words).json["effects"] == expected


@pytest.mark.real
def test_a_model_that_reads_images_is_refused_as_that(mha: Any, tmp_path: Path) -> None:
    import transformers

    saved(
        filled(transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE, **SIZE))),
        tmp_path / "model",
    )
    assert re.search(
        "image|pixel_values", words_of(mha("run", TEXT, "--model", "model", code=ANY, env=WIDE))
    )


@pytest.mark.real
def test_a_model_that_reads_sound_leads_to_the_public_function(mha: Any, tmp_path: Path) -> None:
    import transformers

    halves = {
        f"{half}_{name}": n
        for half in ("encoder", "decoder")
        for name, n in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
    }
    config = transformers.WhisperConfig(
        vocab_size=320,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **halves,
    )
    byte_tokenizer(
        saved(filled(transformers.WhisperForConditionalGeneration(config)), tmp_path / "model")
    )
    assert "mhacli.inspecting" in words_of(mha("run", TEXT, "--model", "model", code=ANY, env=WIDE))
