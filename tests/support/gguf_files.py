"""A GGUF file of the small Llama, as llama.cpp writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from support.small_models import SIZE, byte_tokenizer, llama

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def llama_gguf(path: Path, *, quantized: bool = False, architecture: str = "llama") -> Path:
    """The file; `quantized` in blocks of 8 bits, otherwise in float32."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    model, blocks = llama(), GGMLQuantizationType.Q8_0
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(SIZE["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(SIZE["hidden_size"])
    writer.add_feed_forward_length(SIZE["intermediate_size"])
    writer.add_head_count(SIZE["num_attention_heads"])
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    _add_tokenizer(writer, path.parent)
    for name, parameter in model.state_dict().items():
        numbers = parameter.numpy()
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        name = name.replace("model.layers.", "blk.")
        if ".attn_q." in name or ".attn_k." in name:  # rotated in pairs
            by_head = numbers.reshape(-1, 2, 4, numbers.shape[1])
            numbers = by_head.swapaxes(1, 2).reshape(numbers.shape)
        if quantized and numbers.ndim == 2 and numbers.shape[1] % 32 == 0:
            packed = quants.quantize(numbers, blocks)
            writer.add_tensor(name, packed, raw_dtype=blocks)
        else:
            writer.add_tensor(name, np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, folder: Path) -> None:
    library = json.loads(byte_tokenizer(folder).backend_tokenizer.to_str())["model"]
    tokens = sorted(library["vocab"], key=library["vocab"].get)
    unused = [f"[PAD{number}]" for number in range(len(tokens), 320)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + unused)
    types = [_CONTROL] * 4 + [_NORMAL] * (len(tokens) - 4)
    writer.add_token_types(types + [_UNUSED] * len(unused))
    writer.add_token_merges([" ".join(pair) for pair in library["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)
