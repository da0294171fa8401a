"""The names of arguments: what those of a constructor and of a call are for, and the parameters of a call."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

# ------------------------------------------------------------------------------------------ arguments of a constructor

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


# ----------------------------------------------------------------------------------------------- parameters of a call

CallRole = Literal[
    "x", "query", "key", "value", "kv", "context",
    "mask", "padding", "lengths", "bias", "causal", "pattern", "mean", "off", "training", "cache", "positions", "offset",
    "rope", "weight", "weight bias", "heads", "d_head", "d_model", "scale", "dropout", "other mask", "rest", "any", "unknown",
]  # fmt: skip
"""The purpose of a parameter. The first line are token vectors. `pattern` also returns the pattern, `mean` its mean over heads,
`off` is a switch that stays off, `rest` are `*args`, `any` are `**kwargs`."""
ROWS: tuple[CallRole, ...] = ("x", "query", "key", "value", "kv", "context")
IN_ORDER: Mapping[int, tuple[CallRole, ...]] = {1: ("x",), 2: ("x", "context"), 3: ("query", "key", "value")}
"""What one, two or three arguments without a known name are."""
MASKS: tuple[CallRole, ...] = ("mask", "padding", "lengths", "bias")

_WORDS: Mapping[CallRole, str] = {
    "query": "q qs query queries fromtensor",
    "key": "k ks key keys",
    "value": "v vs value values vals",
    "kv": "kv keyvalue keyvalues keysvalues totensor",
    "x": """x xs inp input inputs inputtensor inputsembeds inputseq hidden hiddens embedding embeddings embeds
        emb embedded token tokens sequence sequences seq features data state states rows src tensor tgt trg target dec decoder""",
    "context": "context ctx memory mem encoder enc encout encoderout cross cond condition other source y",
    "positions": "positions positionids posids inputpos cacheposition",
    "offset": """offset start startpos startposition pos position curpos cachelen pastlen posoffset seqoffset npast
        nprefix curlen startidx cacheoffset kvoffset ropeoffset""",
    "rope": "freqscis freqscomplex freqs freq rope rotary rotaryemb rotaryposemb cos sin positionembeddings posemb posembed",
    "lengths": "lens lengths length validlens validlen validlength seqlens",
    "bias": "bias attnbias attentionbias scorebias positionbias relposbias relativepositionbias relpos alibi",
    "mask": "allowed visible msk m",
    "padding": "pad padding valid",
    "causal": "causal iscausal usecausal autoregressive mask masked usemask causalmask usecausalmask",
    "mean": "averageattnweights averageattentionweights averageheads",
    "training": "training train istraining",
    "heads": "nheads numheads nhead nhead heads h",
    "d_head": "dhead dk headdim dimhead headsize",
    "d_model": "dmodel embeddim dim hiddensize nembd d",
    "scale": "scale scaling softmaxscale scalefactor",
    "dropout": "dropout dropoutp p pdrop attndropout",
}
"""What parameters are called, without underscores."""
_ROLES: Mapping[str, list[CallRole]] = {
    word: [role for role, words in _WORDS.items() if word in words.split()]
    for word in " ".join(_WORDS.values()).split()
}  # fmt: skip
_FILLERS = "input inputs in state states layer tensor seq sequence embedding embeddings embeds x vec"
"""Words that say nothing beside others: `query_states` is a query."""
_OF_SWITCHES = ("causal", "mean", "training")
_OF_NUMBERS = ("heads", "d_head", "d_model", "scale", "dropout", "offset", "lengths")
_OF_TOKENS = "pad padding valid key k kv token input x context encoder memory seq"
_OF_OTHER_MASKS = "head q query drop dropout loss"
_LETTERS = "q|k|v|o|out|qkv|kv|query|key|value|output|in|proj"
_WEIGHT = re.compile(rf"(w|weights?)_?({_LETTERS})(_?proj)?|({_LETTERS})(_?proj)?_?(w|weights?)|({_LETTERS})_proj|w")
_WEIGHT_BIAS = re.compile(rf"(b|bias)_?({_LETTERS})(_?proj)?|({_LETTERS})(_?proj)?_?(b|bias)")
_PATTERN = re.compile(
    r"(needs?|returns?|output|with|get|keep)_?.*(attn|attentions?|att|weights?|pattern|probs|scores)(_.*)?"
)


class CallParameter(NamedTuple):
    """One parameter of a call. `by_place`: it is positional only. `default` is also None without a default."""

    name: str
    role: CallRole
    required: bool
    by_place: bool = False
    default: object = None


def signature_of(call: Callable[..., Any], *roles: CallRole) -> tuple[CallParameter, ...]:
    """The parameters of a module's `forward`, of an instance's `__call__`, or of a function, in order: all, or those with some
    roles."""
    try:
        found = [_parameter(each) for each in inspect.signature(called_function(call)).parameters.values()]
    except (TypeError, ValueError):  # a function in C
        found = [CallParameter("args", "rest", False, True), CallParameter("kwargs", "any", False)]
    found = _distinguished(found)
    return tuple(parameter for parameter in found if not roles or parameter.role in roles)


def called_function(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function that holds the parameters of the call."""
    if inspect.isroutine(call):
        return call
    forward = getattr(call, "forward", None)
    if callable(forward):
        return forward  # type: ignore[no-any-return]
    method = vars(type(call)).get("__call__") or getattr(type(call), "__call__")  # noqa: B004, B009
    return call.__call__ if inspect.isfunction(method) else call  # type: ignore[operator]


def never_read(call: Callable[..., Any]) -> frozenset[str]:
    """The parameters that the code never reads; none if it cannot be seen or uses `locals()`."""
    code = getattr(inspect.unwrap(called_function(call)), "__code__", None)
    if code is None or "locals" in code.co_names:
        return frozenset()
    read: set[object] = set()
    for each in dis.get_instructions(code):
        if "LOAD" in each.opname and each.opname != "LOAD_CONST":
            read.update(each.argval if isinstance(each.argval, tuple) else [each.argval])
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - read - {"self"}


_BATCH_FIRST = re.compile(r"(?i)\b(b|n|bs\w*|batch\w*), *(t|l|s|n?_?seq\w*|\w*len\w*|time|steps|n?_?tokens?)\b")


def states_batch_first(thing: object) -> bool:
    """Whether the code of a class or a function names a batch before a length: `B, T, C = x.shape`."""
    try:
        return _BATCH_FIRST.search(inspect.getsource(thing)) is not None  # type: ignore[arg-type]
    except (OSError, TypeError):  # there is no source
        return False


def argument_names(call: Callable[..., Any], n: int) -> list[str]:
    """The names of the first `n` positional arguments of a call, `args[2]` for those without one."""
    named = [parameter.name for parameter in signature_of(call) if parameter.role not in ("rest", "any")]
    return [named[number] if number < len(named) else f"args[{number}]" for number in range(n)]


def call_role(name: str, default: object = inspect.Parameter.empty, annotation: object = None) -> CallRole:
    """The role of a parameter by its name. A number or bool, as default or annotation, excludes inputs and masks."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").split("_")
    roles = _ROLES.get("".join(words), [])
    if isinstance(default, bool) or annotation in (bool, "bool"):
        if _PATTERN.fullmatch("_".join(words)) and "mean" not in roles:
            return "pattern"
        return next((role for role in roles if role in _OF_SWITCHES), "off")
    if isinstance(default, int | float) or annotation in (int, float, "int", "float"):
        return next((role for role in roles if role in _OF_NUMBERS), "unknown")
    return _role_of_tensor(words)


def _role_of_tensor(words: list[str]) -> CallRole:
    """The role of a parameter that is no number and no switch, by the words of its name."""
    told = [word for word in words if word not in _FILLERS.split()] or words
    if words[-1] in ("mask", "masks"):
        if {*words} & {*_OF_OTHER_MASKS.split()} and "key" not in words:
            return "other mask"
        return "padding" if {*words} & {*_OF_TOKENS.split()} else "mask"
    if {"past", "cache", "cached", "incremental", "prev", "present"} & {*words} and words[-1] != "position":
        return "cache"
    if _WEIGHT_BIAS.fullmatch("_".join(words)):
        return "weight bias"
    if _WEIGHT.fullmatch("_".join(words)):
        return "weight"
    known = _ROLES.get("".join(words)) or _ROLES.get("".join(told))
    if known:
        return known[0]
    if told[0] in ("encoder", "enc", "context", "memory", "cross"):
        return "context"
    return "rope" if words[0] in ("rope", "rotary", "freqs", "cos", "sin") else "unknown"


def _parameter(parameter: inspect.Parameter) -> CallParameter:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return CallParameter(parameter.name, "rest", False, True)
    if parameter.kind is parameter.VAR_KEYWORD:
        return CallParameter(parameter.name, "any", False)
    required = parameter.default is parameter.empty
    role = call_role(parameter.name, parameter.default, parameter.annotation)
    by_place = parameter.kind is parameter.POSITIONAL_ONLY
    return CallParameter(parameter.name, role, required, by_place, None if required else parameter.default)


def _distinguished(parameters: list[CallParameter]) -> list[CallParameter]:
    """Resolves names that depend on the other parameters: of two like `x` the second is the context; `x` beside a key is the
    query; a source beside a target is the context; a value without a key serves as both. Without any known name, up to three
    leading required parameters become inputs by position."""
    roles = [parameter.role for parameter in parameters]
    if not {*roles} & {*ROWS}:
        is_other = [not parameter.required or parameter.role != "unknown" for parameter in parameters]
        by_place = IN_ORDER.get([*is_other, True].index(True), ())
        roles[: len(by_place)] = by_place
        return [parameter._replace(role=role) for parameter, role in zip(parameters, roles, strict=True)]
    inputs = [n for n, role in enumerate(roles) if role == "x"]
    targets = [n for n in inputs if re.match(r"tgt|trg|target|dec", parameters[n].name.lower())]
    first = next(iter(targets or inputs), None)
    for n in inputs:
        if n != first:
            roles[n] = "context" if parameters[n].required or "context" not in roles else "unknown"
    if first is None and "query" not in roles and "context" in roles:
        first = roles.index("context")
        roles[first] = "x"
    if first is not None and "query" not in roles and ("key" in roles or "kv" in roles):
        roles[first] = "query"
    if "key" not in roles and "value" in roles and "query" in roles:
        roles[roles.index("value")] = "kv"
    return [parameter._replace(role=role) for parameter, role in zip(parameters, roles, strict=True)]
