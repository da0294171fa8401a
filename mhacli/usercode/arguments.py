"""The arguments of a user's constructor by their names: the role of each, values from the command line, and usual values."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import nn

Role = Literal[
    "d_model", "d_out", "n_heads", "n_kv_heads", "d_head", "d_v", "dropout", "context_length", "bias", "causal", "batch_first",
    "layer", "n_layers", "n_tokens", "device", "dtype", "config", "eps", "theta", "scale", "temperature", "softcap",
]  # fmt: skip

SPELLINGS: Final[Mapping[Role, str]] = {
    "d_model": """d_model embed_dim dim hidden_size n_embd n_embed d_in emb_size embedding_dim model_dim size width input_dim
        features d_embed embed_size emb_dim embedding_size hidden_dim d_hidden hidden emb embed in_channels channels
        in_features in_dim dim_in input_size n_state n_feat units num_hiddens query_dim query_size d k c context_dim d_context
        cross_attention_dim kdim vdim dim_model num_features""",
    "d_out": "d_out out_dim output_dim dim_out out_channels out_features output_size",
    "n_heads": "n_heads num_heads heads nhead n_head h num_attention_heads nheads num_head head n_q_heads num_query_heads",
    "n_kv_heads": "n_kv_heads num_kv_heads num_key_value_heads kv_heads n_groups num_groups n_kv_head n_kv num_query_groups",
    "d_head": "d_k head_dim dim_head head_size key_dim d_head d_key dim_k k_dim dim_key attention_head_size d_kv key_size",
    "d_v": "d_v dim_v v_dim value_dim v_head_dim value_size d_value",
    "dropout": """dropout attn_dropout p attn_pdrop dropout_rate dropout_p drop drop_rate resid_dropout resid_pdrop attn_drop
        attention_dropout proj_drop attention_probs_dropout_prob hidden_dropout_prob drop_prob dropout_prob rate""",
    "context_length": """context_length block_size max_len max_seq_len seq_len max_position_embeddings max_length n_ctx
        context_size seq_length sequence_length max_seq_length max_sequence_length n_positions num_tokens""",
    "bias": "bias qkv_bias use_bias attention_bias add_bias with_bias proj_bias out_bias",
    "causal": "causal is_causal masked causal_mask autoregressive is_decoder mask",
    "batch_first": "batch_first",
    "layer": "layer_idx layer_id layer_index layer_number layer block_idx",
    "n_layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "n_tokens": "vocab_size",
    "device": "device",
    "dtype": "dtype torch_dtype",
    "config": "config cfg args params conf hparams model_config model_args",
    "eps": "eps norm_eps layer_norm_eps rms_norm_eps layer_norm_epsilon",
    "theta": "rope_theta theta rope_base",
    "scale": "scale softmax_scale scaling",
    "temperature": "temperature temp",
    "softcap": "softcap soft_cap logit_cap attn_logit_softcapping",
}
"""The names of each role, in snake case. Other names are compared without underscores and case."""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


_EXACT: Final[Mapping[str, Role]] = {name: role for role, names in SPELLINGS.items() for name in names.split()}
"""Exact names first: torch's `kdim` is the input width of the keys, while `k_dim` usually is the width of one key."""
_PLAIN: Final[Mapping[str, Role]] = {_plain(name): role for name, role in _EXACT.items()}
_INPUT_WIDTHS: Final = frozenset({"keysize", "valuesize", "keydim", "valuedim"})
"""Names of input widths, not head widths, if the constructor also has a query width."""


def role_of(name: str, other_names: frozenset[str] = frozenset()) -> Role | None:
    """The role of an argument by its name, None for an unusual name, given the names of the other arguments.

    >>> role_of("numHeads"), role_of("key_size"), role_of("key_size", frozenset({"query_size"}))
    ('n_heads', 'd_head', 'd_model')
    """
    plain = _plain(name)
    if plain in _INPUT_WIDTHS and {"querysize", "querydim"} & {_plain(other) for other in other_names}:
        return "d_model"
    return _EXACT.get(name) or _PLAIN.get(plain)


def stated(arguments: Mapping[str, Any], role: Role) -> Any:
    """The value of a role among the arguments, config fields (`config.n_head`) included; None if no argument has it."""
    names = frozenset(name.rpartition(".")[2] for name in arguments)
    roles = {name: role_of(name.rpartition(".")[2], names) for name in arguments}
    return next((value for name, value in arguments.items() if roles[name] == role and value is not None), None)


# ------------------------------------------------------------------------------------------------------- typed values


_WORDS: Final[Mapping[str, object]] = {
    "true": True, "false": False, "none": None, "null": None, "inf": math.inf, "-inf": -math.inf, "nan": math.nan,
}  # fmt: skip


def parse_value(text: str) -> object:
    """The value of a command-line word: a Python literal, `true`, `none`, `torch.float32`, `nn.ReLU`, else the string
    itself.

    >>> parse_value("64"), parse_value("true"), parse_value("(2, 3)"), parse_value("'8'"), parse_value("relu")
    (64, True, (2, 3), '8', 'relu')
    """
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if re.fullmatch(r"(torch|nn)(\.[A-Za-z_]\w*)+", word):
        value: Any = torch if word.startswith("torch") else nn
        for name in word.split(".")[1:]:
            value = getattr(value, name, None)
        return word if value is None else value
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


# ------------------------------------------------------------------------------------------------------- usual values


_D_HEAD: Final = 8
"""Even for rotary positions, and large enough to distinguish their column pairings."""
_HEADS: Final = (5, 7, 3, 9, 15, 11, 13, 4, 6, 8, 12, 10, 16, 14, 20, 24, 32, 2, 1)
_GROUPED_HEADS: Final = (15, 9, 21, 25, 35, 6, 12, 10, 20, 4, 8, 16, 18, 24, 32, 14, 2, 5, 7, 3, 1)
"""Numbers with a divisor for kv heads come first."""


def usual_values(
    known: Mapping[Role | None, Any], *, is_grouped: bool, causal: bool, device: str
) -> dict[Role | None, tuple[Any, str]]:
    """A value for each role that can be guessed, with its meaning. They agree with the known values: unless given,
    `d_model = n_heads · d_head`, and `n_kv_heads` divides `n_heads` where heads are grouped."""
    sizes = {role: value for role, value in known.items() if type(value) is int and value > 0}
    width, d_head = sizes.get("d_out", sizes.get("d_model")), sizes.get("d_head")
    n_heads = sizes.get("n_heads") or _n_heads(width, d_head, sizes.get("n_kv_heads"), is_grouped)
    if d_head is None:
        own = _D_HEAD if n_heads != _D_HEAD else _D_HEAD + 4
        d_head = width // n_heads if width and width >= n_heads else own
    d_model = sizes.get("d_model") or width or n_heads * d_head
    inner = [n for n in range(2, n_heads) if n_heads % n == 0]
    usual: dict[Role | None, tuple[Any, str]] = {
        "d_model": (d_model, "the width of a token"),
        "d_out": (d_model if d_model % n_heads == 0 else n_heads * d_head, "the width of the output"),
        "n_heads": (n_heads, "the number of heads"),
        "n_kv_heads": (min(inner, key=lambda n: n * n == n_heads, default=1), "the number of kv heads"),
        "d_head": (d_head, "the width of a head"),
        "d_v": (d_head, "the width of a head's values"),
        "context_length": (64 if 64 not in (d_model, n_heads * d_head) else 96, "the longest text"),
        "dropout": (0.1, "dropout, which eval turns off"),
        "bias": (True, "with biases"),
        "causal": (causal, "--causal" if causal else "no --causal"),
        "batch_first": (True, "the batch stands first"),
        "layer": (0, "the first layer"),
        "n_layers": (2, "the number of layers"),
        "n_tokens": (101, "the number of different tokens"),
        "device": (device, "--device"),
        "dtype": (torch.float32, "the usual one"),
        "eps": (1e-5, "a small number"),
        "theta": (10000.0, "the usual base of rotary positions"),
        "scale": (d_head**-0.5, "1/√d_head"),
        "temperature": (d_head**0.5, "√d_head"),
    }
    return usual | {role: (size, usual[role][1]) for role, size in sizes.items() if role in usual}


def _n_heads(width: int | None, d_head: int | None, n_kv_heads: int | None, is_grouped: bool) -> int:
    """A number of heads: if possible at least three, odd, and different from the head width."""

    def drawbacks(n_heads: int) -> tuple[bool, ...]:
        """The drawbacks of a number, the worst first."""
        head, remainder = divmod(width, n_heads) if width else (d_head or _D_HEAD, 0)
        is_alike = n_kv_heads in (n_heads, n_heads**0.5) or head == n_heads
        return (
            remainder != 0 or head != (d_head or head),
            head < 4 or n_heads < 3,
            is_alike,
            head % 2 != 0,
            n_heads % 2 == 0,
        )

    choices = _GROUPED_HEADS if is_grouped or n_kv_heads else _HEADS
    if width and d_head:
        choices = (max(1, width // d_head), *choices)
    fitting = [n for n in choices if n % (n_kv_heads or 1) == 0]
    return min(fitting or [3 * (n_kv_heads or 1)], key=drawbacks)
