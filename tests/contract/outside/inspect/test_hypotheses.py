"""Texts that beams generate: the record has what the model computed for one of them, or says why
it leaves attentions out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.small_models import filled, llama

import mhacli

pytestmark = pytest.mark.real


def marian() -> Any:
    import transformers

    sides = ("encoder", "decoder")
    sizes = {f"{side}_{name}": n for side in sides for name, n in SIZES.items()}
    ids = {"pad_token_id": 99, "eos_token_id": 0, "decoder_start_token_id": 99}
    more = {"bos_token_id": None, "forced_eos_token_id": None, "max_position_embeddings": 32}
    config = transformers.MarianConfig(vocab_size=100, d_model=32, **sizes, **ids, **more)
    return filled(transformers.MarianMTModel(config), scale=0.25)


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def test_cross_attention_of_reordered_beams_is_left_out() -> None:
    model, ids = marian(), torch.tensor([[5, 6, 7, 8, 0]])
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model.generate(input_ids=ids, max_new_tokens=6, num_beams=3)
    assert {layer.kind for layer in seen.record.layers} == {"encoder"}
    assert any("beam search" in note for note in seen.notes)


def test_no_layer_of_reordered_beams_is_shown() -> None:
    ids = torch.tensor([[3, 20, 30, 40]])
    with mhacli.inspecting(llama(), layers=[0]) as seen:
        seen._model.generate(ids, max_new_tokens=8, num_beams=4, pad_token_id=2)
    with pytest.raises(mhacli.MhaError, match="beam search"):
        _ = seen.record
