"""The arguments of a user's constructor: their roles, values from the command line, guesses, and errors."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from mhacli.errors import MhaError, first_names
from mhacli.usercode.process import shortened

Role = Literal[
    "d_model", "d_out", "n_heads", "n_kv_heads", "d_head", "d_v", "dropout", "context_length", "bias", "causal", "batch_first",
    "layer", "n_layers", "device", "dtype", "config", "eps", "theta", "scale", "temperature", "softcap",
]  # fmt: skip

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
"""The names of each role, in snake case. Other names are compared without underscores and case."""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


_EXACT: Final[Mapping[str, Role]] = {name: role for role, names in SPELLINGS.items() for name in names.split()}
"""Exact names first: torch's `kdim` is the input width of the keys, while `k_dim` usually is the width of one key."""
_ROLES: Final[Mapping[str, Role]] = {_plain(name): role for role, names in SPELLINGS.items() for name in names.split()}
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
    return _EXACT.get(name) or _ROLES.get(plain)


def stated(arguments: Mapping[str, Any], role: Role) -> Any:
    """The value of a role among the arguments, config fields (`config.n_head`) included; None if no argument has it."""
    names = frozenset(name.rpartition(".")[2] for name in arguments)
    for name, value in arguments.items():
        if role_of(name.rpartition(".")[2], names) == role and value is not None:
            return value
    return None


_WORDS: Final[Mapping[str, object]] = {
    "true": True, "false": False, "none": None, "null": None, "inf": math.inf, "-inf": -math.inf, "nan": math.nan,
}  # fmt: skip
_LONGEST_LITERAL: Final = 10_000


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
        return _of_torch(word)
    if len(word) > _LONGEST_LITERAL:
        return text
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _of_torch(word: str) -> object:
    first, *attributes = word.split(".")
    value: object = torch if first == "torch" else nn
    for name in attributes:
        if not hasattr(value, name):
            return word
        value = getattr(value, name)
    return value


# ------------------------------------------------------------------------------------------------------- guessed values


D_HEAD: Final = 8
"""Even for rotary positions, and large enough to distinguish their column pairings."""
_HEADS: Final = (5, 7, 3, 9, 15, 11, 13, 4, 6, 8, 12, 10, 16, 14, 20, 24, 32, 2, 1)
_GROUPED_HEADS: Final = (15, 9, 21, 25, 35, 6, 12, 10, 20, 4, 8, 16, 18, 24, 32, 14, 2, 5, 7, 3, 1)
"""Numbers with a divisor for kv heads come first."""
_CONTEXTS: Final = (64, 48, 96)
SIZES: Final[frozenset[Role]] = frozenset(
    {"d_model", "d_out", "n_heads", "n_kv_heads", "d_head", "d_v", "context_length"}
)


MEANINGS: Final[Mapping[Role, str]] = {
    "d_model": "the width of a token",
    "d_out": "the width of the output",
    "n_heads": "the number of heads",
    "n_kv_heads": "the number of kv heads",
    "d_head": "the width of a head",
    "d_v": "the width of a head's values",
    "dropout": "dropout, which eval turns off",
    "context_length": "the longest text",
    "bias": "with biases",
    "batch_first": "the batch stands first",
    "layer": "the first layer",
    "n_layers": "the number of layers",
    "device": "--device",
    "dtype": "the usual one",
    "eps": "a small number",
    "theta": "the usual base of rotary positions",
    "scale": "1/√d_head",
    "temperature": "√d_head",
}
"""A short description of each guessed role."""


class GuessContext(NamedTuple):
    """The settings that guesses depend on besides sizes: `--causal` and the device."""

    causal: bool
    device: str


def guess_values(roles: Set[Role], known: Mapping[Role, Any], context: GuessContext) -> dict[Role, Any]:
    """A value for each role, consistent with the known values."""
    sizes = _sizes(roles, {role: value for role, value in known.items() if role in SIZES and is_size(value)})
    d_head = int(sizes["d_head"])
    others: dict[Role, Any] = {
        "dropout": 0.1,
        "bias": True,
        "causal": context.causal,
        "batch_first": True,
        "layer": 0,
        "n_layers": 2,
        "device": context.device,
        "dtype": torch.float32,
        "eps": 1e-5,
        "theta": 10000.0,
        "scale": d_head**-0.5,
        "temperature": d_head**0.5,
    }
    return {role: sizes[role] if role in SIZES else others[role] for role in roles if role in SIZES or role in others}


def guess_reason(role: Role, context: GuessContext) -> str:
    """A short reason for the guess."""
    return MEANINGS.get(role, "--causal" if context.causal else "no --causal")


def is_size(value: object) -> bool:
    """Whether the value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _sizes(roles: Set[Role], known: Mapping[Role, int]) -> dict[Role, int]:
    """All sizes. Unless given, `d_model = n_heads · d_head`, and `n_kv_heads` divides `n_heads`."""
    is_grouped = "n_kv_heads" in roles or "n_kv_heads" in known
    width = known.get("d_out", known.get("d_model"))
    n_heads = known.get("n_heads") or _n_heads(known, width, is_grouped)
    d_head = known.get("d_head") or (
        width // n_heads if width and width >= n_heads else D_HEAD if n_heads != D_HEAD else D_HEAD + 4
    )
    d_model = known.get("d_model") or known.get("d_out") or n_heads * d_head
    context = next(length for length in _CONTEXTS if length not in (d_model, n_heads * d_head))
    return {
        "d_model": d_model,
        "d_out": known.get("d_out") or (d_model if d_model % n_heads == 0 else n_heads * d_head),
        "n_heads": n_heads,
        "n_kv_heads": known.get("n_kv_heads") or _n_kv_heads(n_heads),
        "d_head": d_head,
        "d_v": known.get("d_v") or d_head,
        "context_length": known.get("context_length") or context,
    }


def _n_heads(known: Mapping[Role, int], width: int | None, is_grouped: bool) -> int:
    """A number of heads: if possible at least three, odd, and different from the head width."""
    n_kv_heads, d_head = known.get("n_kv_heads", 1), known.get("d_head")
    if width and d_head and width % d_head == 0 and width // d_head % n_kv_heads == 0:
        return width // d_head
    candidates = [n for n in (_GROUPED_HEADS if is_grouped else _HEADS) if n % n_kv_heads == 0 and n != d_head]
    if "n_kv_heads" in known:
        candidates = [n_kv_heads * group for group in (3, 5, 2, 4, 1) if group != n_kv_heads] + [n_kv_heads]
    if not width or d_head:
        return candidates[0]
    return min(candidates, key=lambda n: _drawbacks(n, width))


def _drawbacks(n_heads: int, width: int) -> tuple[bool, ...]:
    """The drawbacks of a number of heads for this width, the worst first."""
    d_head = width // n_heads
    return (
        width % n_heads != 0,
        d_head < 2,
        n_heads < 3,
        d_head % 2 != 0,
        d_head < 4,
        d_head == n_heads,
        n_heads % 2 == 0,
    )


def _n_kv_heads(n_heads: int) -> int:
    """A number of kv heads: if possible more than one, with several queries each, and different from the group size."""
    inner = [n for n in range(2, n_heads) if n_heads % n == 0]
    unlike = [n for n in inner if n * n != n_heads]
    odd = [n for n in unlike if n % 2]
    return max(odd) if odd and n_heads % 2 else (unlike or inner or [1])[0]


# ------------------------------------------------------------------------------------------ parameters of a constructor


EMPTY: Final = inspect.Parameter.empty
_MOST_SHOWN: Final = 40


class Parameters(NamedTuple):
    """The named parameters of a constructor, annotations resolved if possible. `takes_any`: it has `**kwargs`."""

    named: tuple[inspect.Parameter, ...]
    takes_any: bool

    @property
    def required(self) -> list[inspect.Parameter]:
        """The parameters without a default."""
        return [parameter for parameter in self.named if parameter.default is EMPTY]


def parameters_of(cls: Callable[..., Any]) -> Parameters:
    """The parameters of a class or factory function. For a class that only forwards `**kwargs`, those of its base class."""
    parameters = _parameters(cls)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = _named(parameters)
    for base in cls.__mro__[1:] if takes_any and not named and inspect.isclass(cls) else ():
        if "__init__" in vars(base) and base not in (object, nn.Module):
            named = _named(_parameters(base))
            if named:
                break
    return Parameters(tuple(named), takes_any)


def _parameters(cls: Callable[..., Any]) -> list[inspect.Parameter]:
    if getattr(cls, "__init__", None) is nn.Module.__init__:  # accepts any argument, only to reject it
        return []
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return []
    hints = _hints(cls)
    return [parameter.replace(annotation=hints.get(parameter.name, parameter.annotation)) for parameter in parameters]


def _named(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    return [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _hints(cls: Callable[..., Any]) -> dict[str, Any]:
    """The resolved annotations of the constructor, without `None`; empty if one of them cannot be resolved."""
    try:
        hints = typing.get_type_hints(cls.__init__ if inspect.isclass(cls) else cls)
    except Exception:  # evaluating the user's annotations may raise anything
        return {}
    return {name: _without_none(hint) for name, hint in hints.items()}


def _without_none(hint: Any) -> Any:
    inner = [option for option in typing.get_args(hint) if option is not type(None)]
    return inner[0] if len(inner) == 1 and type(None) in typing.get_args(hint) else hint


def describe_parameters(parameters: Mapping[str, Any]) -> str:
    """Parameters with their defaults, as text: `d_model, n_heads=8`."""
    shown = [name if default is EMPTY else f"{name}={_short(default)}" for name, default in parameters.items()]
    return first_names(shown, _MOST_SHOWN)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a user's __repr__ may raise
        text = type(value).__name__
    return shortened(text, 60)


def require_known(name: str, parameters: Mapping[str, Any]) -> None:
    """Raises `MhaError` unless the parameter exists. The message lists the parameters with their defaults."""
    if name in parameters:
        return
    by_end = {parameter.rpartition(".")[2]: parameter for parameter in parameters}
    near = difflib.get_close_matches(name.rpartition(".")[2], list(by_end), n=1, cutoff=0.5)
    raise MhaError(
        f"--arg {name}: there is no such argument, only {describe_parameters(parameters)}"
        if parameters
        else f"--arg {name}: the constructor takes no arguments",
        hint=f"did you mean --arg {by_end[near[0]]}?" if near else None,
        code="argument",
    )


def describe_unknown(owner: str, names: Sequence[str]) -> MhaError:
    """The error for required parameters without a value or a usual name."""
    return MhaError(
        f"{owner} needs a value for {' and '.join(names)}, which mha cannot guess from the name",
        hint=f"for example {' '.join(f'--arg {name}=1' for name in names)}",
        code="argument",
    )
