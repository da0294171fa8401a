"""Tiny models of every family, with random weights, made from their configs alone, and what their attention computes.

Heads, widths and layers are small and, where a family allows it, different from each other.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

D = {"vocab_size": 40}
LLAMA = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
         "intermediate_size": 16, **D}  # fmt: skip
BERT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16, **D}
GPT = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16, **D}
HALVES = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 60, "pad_token_id": 1,
          "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}  # fmt: skip
HALVES_MODULES = {
    "encoder": "encoder.layers.1.self_attn",
    "decoder": "decoder.layers.1.self_attn",
    "cross": "decoder.layers.1.encoder_attn",
}
LLAMA_MODULE = {"self": "layers.1.self_attn"}
SLIDING = ["full_attention", "sliding_attention"]
ALL_COLUMNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}}
GPT_MODULE = {"self": "h.1.attn"}
BERT_MODULE = {"self": "encoder.layer.1.attention.self"}
FALCON = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, **D}


class Case(NamedTuple):
    """A family's config, and the module of layer 1 in the model that reads it, for each stack."""

    family: str
    choices: dict[str, Any]
    modules: dict[str, str]


CASES: dict[str, Case] = {
    "gpt2": Case("gpt2", GPT, GPT_MODULE),
    "gpt_bigcode": Case("gpt_bigcode", GPT, GPT_MODULE),
    "gpt_bigcode-per-head": Case("gpt_bigcode", {**GPT, "multi_query": False}, GPT_MODULE),
    "bert": Case("bert", BERT, BERT_MODULE),
    "roberta": Case("roberta", BERT, BERT_MODULE),
    "electra": Case("electra", {**BERT, "embedding_size": 8}, BERT_MODULE),
    "distilbert": Case("distilbert", {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 16, **D},
                       {"self": "transformer.layer.1.attention"}),
    "albert": Case("albert", {**BERT, "embedding_size": 8},
                   {"self": "encoder.albert_layer_groups.0.albert_layers.0.attention"}),
    "modernbert": Case("modernbert", {**BERT, "num_hidden_layers": 4, "local_attention": 4, "pad_token_id": 0, "bos_token_id": 1,
                                      "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
                       {"self": "layers.1.attn"}),
    "deberta-v2": Case("deberta-v2", {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, BERT_MODULE),
    "llama": Case("llama", {**LLAMA, "head_dim": 8}, LLAMA_MODULE),
    "llama with biases": Case("llama", {**LLAMA, "attention_bias": True}, LLAMA_MODULE),
    "mistral": Case("mistral", {**LLAMA, "head_dim": 8, "sliding_window": 4}, LLAMA_MODULE),
    "mixtral": Case("mixtral", {**LLAMA, "num_local_experts": 2}, LLAMA_MODULE),
    "qwen2": Case("qwen2", LLAMA, LLAMA_MODULE),
    "qwen3": Case("qwen3", {**LLAMA, "head_dim": 6}, LLAMA_MODULE),
    "gemma": Case("gemma", {**LLAMA, "head_dim": 6}, LLAMA_MODULE),
    "gemma2": Case("gemma2", {**LLAMA, "head_dim": 6, "sliding_window": 4, "layer_types": SLIDING,
                              "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3}, LLAMA_MODULE),
    "gemma3_text": Case("gemma3_text", {**LLAMA, "head_dim": 6}, LLAMA_MODULE),
    "gpt_oss": Case("gpt_oss", {**LLAMA, "head_dim": 6, "num_local_experts": 2, "num_experts_per_tok": 1}, LLAMA_MODULE),
    "olmo2": Case("olmo2", LLAMA, LLAMA_MODULE),
    "phi3": Case("phi3", {**LLAMA, "pad_token_id": 0}, LLAMA_MODULE),
    "phi3 with a window": Case("phi3", {**LLAMA, "pad_token_id": 0, "sliding_window": 4}, LLAMA_MODULE),
    "granite": Case("granite", {**LLAMA, "attention_multiplier": 0.125}, LLAMA_MODULE),
    "phi, all columns": Case("phi", {**LLAMA, "num_key_value_heads": 6, **ALL_COLUMNS}, LLAMA_MODULE),
    "phi": Case("phi", {**LLAMA, "num_key_value_heads": 6}, LLAMA_MODULE),
    "gpt_neox, all columns": Case("gpt_neox", {**BERT, **ALL_COLUMNS}, {"self": "layers.1.attention"}),
    "gpt_neox": Case("gpt_neox", BERT, {"self": "layers.1.attention"}),
    "bloom": Case("bloom", {"hidden_size": 24, "n_layer": 2, "n_head": 3, **D}, {"self": "h.1.self_attention"}),
    "falcon-multi-query": Case("falcon", FALCON, {"self": "h.1.self_attention"}),
    "falcon-new-decoder": Case("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
                               {"self": "h.1.self_attention"}),
    "falcon-per-head": Case("falcon", {**FALCON, "multi_query": False, "bias": True}, {"self": "h.1.self_attention"}),
    "mpt": Case("mpt", {"d_model": 24, "n_layers": 2, "n_heads": 4, "max_seq_len": 16, **D}, {"self": "blocks.1.attn"}),
    "codegen": Case("codegen", {**GPT, "n_head": 8, "n_embd": 48, "rotary_dim": 4}, GPT_MODULE),
    "opt": Case("opt", {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 16,
                        "word_embed_proj_dim": 24, "max_position_embeddings": 16, **D},
                {"self": "decoder.layers.1.self_attn"}),
    "gptj": Case("gptj", {**GPT, "rotary_dim": 4}, GPT_MODULE),
    "gptj, all columns": Case("gptj", {**GPT, "rotary_dim": 8}, GPT_MODULE),
    "codegen, all columns": Case("codegen", {**GPT, "n_head": 8, "n_embd": 48, "rotary_dim": 6}, GPT_MODULE),
    "gpt_neo": Case("gpt_neo", {"hidden_size": 24, "num_layers": 2, "num_heads": 3, "window_size": 4,
                                "max_position_embeddings": 16,
                                "attention_types": [[["global", "local"], 1]], **D}, {"self": "h.1.attn.attention"}),
    "t5": Case("t5", {"d_model": 24, "d_kv": 6, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 3, "d_ff": 16, **D,
                      "decoder_start_token_id": 0},
               {"encoder": "encoder.block.1.layer.0.SelfAttention", "decoder": "decoder.block.1.layer.0.SelfAttention",
                "cross": "decoder.block.1.layer.1.EncDecAttention"}),
    "bart": Case("bart", {**HALVES, "max_position_embeddings": 16}, HALVES_MODULES),
    "mbart": Case("mbart", {**HALVES, "max_position_embeddings": 16}, HALVES_MODULES),
    "marian": Case("marian", {**HALVES, "max_position_embeddings": 16}, HALVES_MODULES),
    "whisper": Case("whisper", {**HALVES, "max_source_positions": 20, "max_target_positions": 10, "num_mel_bins": 8},
                    HALVES_MODULES),
    "vit": Case("vit", {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16,
                        "image_size": 16, "patch_size": 8}, {"self": "layers.1.attention"}),
    "clip": Case("clip", {"text_config": BERT, "vision_config": {**BERT, "hidden_size": 32, "num_attention_heads": 4,
                                                                 "image_size": 16, "patch_size": 8}},
                 {"text": "text_model.encoder.layers.1.self_attn", "vision": "vision_model.encoder.layers.1.self_attn"}),
}  # fmt: skip
LAYERS = [(name, stack) for name, case in CASES.items() for stack in case.modules]


def model_of(name: str) -> Any:
    """The model of a case: every parameter, biases too, from one seeded generator; in evaluation, on plain attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig, AutoModel

        for quiet in ("transformers", "huggingface_hub"):
            logging.getLogger(quiet).setLevel(logging.ERROR)
        case = CASES[name]
        config = AutoConfig.for_model(case.family, **case.choices)
        model = AutoModel.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(len(name))
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def save_model(model: Any, folder: Any, **how: Any) -> None:
    """`save_pretrained`, without its progress."""
    from transformers.utils import logging as said

    said.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **how)


class Seen(NamedTuple):
    """Rows that went into an attention `[row, width]`, those that keys read, q, k, v `[row, head, width]`, and the pattern."""

    rows: Tensor
    key_rows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Tensor


class _Products(TorchFunctionMode):
    """The operands of the products of batches of matrices: the only ones in an attention besides its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("matmul", "bmm", "__matmul__"):
            self.pairs.append((args[0], args[1]))
        elif name == "baddbmm":
            named = kwargs or {}
            batches = [named.get("batch1"), named.get("batch2")]
            self.pairs.append(tuple(batches) if batches[0] is not None else tuple(args[1:3]))
        elif name == "scaled_dot_product_attention":
            raise AssertionError("plain attention was asked for")
        self.pairs = [pair for pair in self.pairs if min(each.ndim for each in pair) >= 3]
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def observed(model: Any, path: str, n_heads: int, *, length: int = 1) -> Seen:
    """What the module at `path` computes in a run of the model on seven texts: of one token, at place 0 nothing is turned."""
    module = model.get_submodule(path)
    for name in ("q_norm", "k_norm"):
        if hasattr(module, name):
            setattr(module, name, nn.Identity())
    products, rows = _Products(), {}

    def before(_: Any, args: Any, kwargs: Any) -> None:
        given = [*args, *(kwargs.get(name) for name in ("hidden_states", "x"))]
        rows["query"] = next(each for each in given if isinstance(each, Tensor))
        others = [kwargs.get("key_value_states"), kwargs.get("encoder_hidden_states"), *args[1:2]]
        context = [each for each in others if isinstance(each, Tensor) and each.ndim == 3]
        rows["key"] = context[0] if context and "cross" in CASES_CROSS.get(path, ()) else rows["query"]
        products.pairs.clear()  # a module may serve several layers
        products.__enter__()

    def after(*_: Any) -> None:
        products.__exit__(None, None, None)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(**_inputs(model, length))
    batch = rows["query"].shape[0]
    (q, k), (pattern, v) = products.pairs[0], products.pairs[-1]
    q, k, v = (_by_head(each, batch, n_heads) for each in (q, k.transpose(-1, -2), v))
    return Seen(
        rows["query"].flatten(0, 1),
        rows["key"].flatten(0, 1),
        q,
        k,
        v,
        pattern.reshape(batch, n_heads, *pattern.shape[-2:]),
    )


CASES_CROSS = {path: ("cross",) for case in CASES.values() for stack, path in case.modules.items() if stack == "cross"}


def _by_head(each: Tensor, batch: int, n_heads: int) -> Tensor:
    """`[batch, head, length, width]` or `[batch·head, length, width]` as `[row, head, width]`, every head with its own."""
    if each.ndim == 3:
        each = each.unflatten(0, (batch, -1))
    each = each.repeat_interleave(n_heads // each.shape[1], dim=1)
    return each.transpose(1, 2).flatten(0, 1)


def _inputs(model: Any, length: int) -> dict[str, Any]:
    ids, family = torch.arange(3, 3 + 7 * length).view(7, length) % 30 + 3, model.config.model_type
    pixels = torch.randn(7, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    if family == "vit":
        return {"pixel_values": pixels}
    if family == "clip":
        return {"input_ids": ids, "pixel_values": pixels}
    if family == "whisper":
        sound = torch.randn(7, 8, 40, generator=torch.Generator().manual_seed(1))
        return {"input_features": sound, "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
