"""The arguments of somebody's attention: values from words, and what a name stands for in the spellings that people use."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import nn

Role = Literal[
    "d_model",
    "d_out",
    "n_heads",
    "n_kv_heads",
    "d_head",
    "d_v",
    "dropout",
    "context_length",
    "bias",
    "causal",
    "batch_first",
    "layer",
    "n_layers",
    "device",
    "dtype",
    "config",
    "eps",
    "theta",
    "scale",
    "temperature",
    "softcap",
]

SPELLINGS: Final[Mapping[Role, str]] = {
    "d_model": """d_model embed_dim dim hidden_size n_embd n_embed d_in emb_size embedding_dim model_dim size width input_dim
        features d_embed embed_size emb_dim embd_dim embedding_size hidden_dim hid_dim d_hidden hidden d_emb emb embedding
        in_channels channels in_features in_dim dim_in input_size d_input n_state n_units n_feat units num_hiddens query_dim
        query_size d_q_in num_features n_features dims embed_dims d_embedding attention_dim hidden_units d k c d_embd
        context_dim d_context cross_attention_dim kdim vdim dim_model embed""",
    "d_out": "d_out out_dim output_dim dim_out out_channels out_features output_size d_output",
    "n_heads": """n_heads num_heads heads nhead n_head h num_attention_heads nheads n_attention_heads num_head head head_num
        heads_num n_attn_heads num_attn_heads attention_heads attn_heads n_q_heads num_q_heads num_query_heads n_query_heads
        q_heads number_of_heads head_count""",
    "n_kv_heads": """n_kv_heads num_kv_heads num_key_value_heads kv_heads n_groups num_groups n_kv_head n_kv num_kv n_query_groups
        num_query_groups num_kv_groups n_kv_groups groups kv_head num_kv_head kvheads""",
    "d_head": """d_k head_dim dim_head head_size key_dim d_head d_key dim_k k_dim dim_key size_per_head dim_per_head head_width
        qk_dim d_qk d_q q_dim attention_head_size hdim per_head_dim hidden_per_head d_kv key_size qk_head_dim hs""",
    "d_v": "d_v dim_v v_dim value_dim v_head_dim value_size d_value dim_value head_dim_v value_head_dim",
    "dropout": """dropout attn_dropout p attn_pdrop dropout_rate dropout_p p_dropout drop drop_rate resid_dropout resid_pdrop
        attention_dropout attn_drop proj_drop attention_probs_dropout_prob hidden_dropout_prob drop_prob dropout_prob
        dropout_probability embd_pdrop hidden_dropout rate p_drop attn_dropout_rate""",
    "context_length": """context_length block_size max_len max_seq_len seq_len max_position_embeddings max_length n_ctx
        context_size context_len ctx_len ctx seq_length sequence_length max_seq_length max_sequence_length max_context_length
        n_positions max_context max_positions num_tokens seq_size maxlen context_window max_t t""",
    "bias": """bias qkv_bias use_bias attention_bias add_bias with_bias has_bias proj_bias out_bias qkv_proj_bias out_proj_bias
        attn_bias""",
    "causal": "causal is_causal masked causal_mask use_causal_mask use_causal autoregressive unidirectional mask",
    "batch_first": "batch_first",
    "layer": "layer_idx layer_id layer_index layer_number layer block_idx block_id idx layer_i",
    "n_layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "device": "device",
    "dtype": "dtype torch_dtype",
    "config": "config cfg args params conf hparams hyperparams model_config model_args configuration",
    "eps": "eps norm_eps layer_norm_eps rms_norm_eps layer_norm_epsilon epsilon",
    "theta": "rope_theta theta rope_base rotary_base",
    "scale": "scale softmax_scale attention_scale scaling",
    "temperature": "temperature temp",
    "softcap": "softcap soft_cap logit_cap cap attn_logit_softcapping attn_softcap logits_soft_cap score_cap tanh_cap",
}
"""What each role is called, in snake case; other names are compared without underscores and capitals."""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


_EXACT: Final[Mapping[str, Role]] = {name: role for role, names in SPELLINGS.items() for name in names.split()}
"""torch's `kdim` is the width of what keys are made of, anybody's `k_dim` that of a key."""
_ROLES: Final[Mapping[str, Role]] = {_plain(name): role for role, names in SPELLINGS.items() for name in names.split()}
_OF_INPUTS: Final = frozenset({"keysize", "valuesize", "keydim", "valuedim"})
"""Widths of what is projected, not of a head, where a width of queries stands beside them."""


def role_of(name: str, beside: frozenset[str] = frozenset()) -> Role | None:
    """What an argument of that name stands for, None where the name is no usual one. `beside` are the names of the others.

    >>> role_of("numHeads"), role_of("key_size"), role_of("key_size", frozenset({"query_size"}))
    ('n_heads', 'd_head', 'd_model')
    """
    plain = _plain(name)
    if plain in _OF_INPUTS and {"querysize", "querydim"} & {_plain(other) for other in beside}:
        return "d_model"
    return _EXACT.get(name) or _ROLES.get(plain)


def stated(arguments: Mapping[str, Any], role: Role) -> Any:
    """What the arguments say of a role, those of a config (`config.n_head`) too; None where none of them says anything."""
    names = frozenset(name.rpartition(".")[2] for name in arguments)
    for name, value in arguments.items():
        if role_of(name.rpartition(".")[2], names) == role and value is not None:
            return value
    return None


_WORDS: Final[Mapping[str, object]] = {
    "true": True,
    "false": False,
    "none": None,
    "null": None,
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
}
_LONGEST_LITERAL: Final = 10_000


def parse_value(text: str) -> object:
    """The value that a word of the command line means: a Python literal, `true`, `none`, `torch.float32`, `nn.ReLU`; anything
    else is a string.

    >>> parse_value("64"), parse_value("true"), parse_value("(2, 3)"), parse_value("'8'"), parse_value("relu")
    (64, True, (2, 3), '8', 'relu')
    """
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if re.fullmatch(r"(torch|nn)(\.[A-Za-z_]\w*)+", word):
        return _of_torch(word)
    if len(word) > _LONGEST_LITERAL:
        return text
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _of_torch(word: str) -> object:
    first, *rest = word.split(".")
    found: object = torch if first == "torch" else nn
    for name in rest:
        if not hasattr(found, name):
            return word
        found = getattr(found, name)
    return found
