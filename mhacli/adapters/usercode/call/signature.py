"""The parameters of a call of somebody's attention, and what their names say that each is for."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Role = Literal[
    "x", "query", "key", "value", "kv", "context",
    "mask", "padding", "lengths", "bias", "causal", "pattern", "mean", "off", "training", "cache", "positions", "offset",
    "rope", "weight", "weight bias", "heads", "d_head", "d_model", "scale", "dropout", "batch", "q_len", "k_len", "other mask",
    "rest", "unknown",
]  # fmt: skip
"""What a parameter is for. The first line are rows. `pattern` asks for the pattern besides, `mean` for its mean over heads,
`off` is a switch that stays off, `rest` are `*args`."""
ROWS: tuple[Role, ...] = ("x", "query", "key", "value", "kv", "context")
MASKS: tuple[Role, ...] = ("mask", "padding", "lengths", "bias")

_NAMES: dict[Role, str] = {
    "query": "q|qs|query|queries|querys|x_?q|xq|q_?in|q_?input|q_?x|query_?input|query_?states|query_?layer|query_?tensor"
    "|inputs?_?q|query_?embeddings?|queries_?in|q_?seq|query_?seq(uence)?|from_?tensor|q_?states|inp_?q|q_?vec(s|tors)?",
    "key": "k|ks|keys?|x_?k|xk|k_?in|k_?input|k_?x|key_?input|key_?states|key_?layer|key_?tensor|inputs?_?k|key_?embeddings?"
    "|k_?seq|key_?seq(uence)?|k_?states|inp_?k|k_?vec(s|tors)?",
    "value": "v|vs|values?|vals?|x_?v|xv|v_?in|v_?input|v_?x|value_?input|value_?states|value_?layer|value_?tensor|inputs?_?v"
    "|value_?embeddings?|v_?seq|value_?seq(uence)?|v_?states|inp_?v|v_?vec(s|tors)?",
    "kv": "kv|key_?values?|key_?value_?states|keys_?(and_?)?values|x_?kv|kv_?in|kv_?input|kv_?x|inputs?_?kv|kv_?states|kv_?seq"
    "|to_tensor",
    "x": "x|xs|x_?in|x_?input|inputs?|inp|input_?tensor|input_?seq(uence)?|input_?embeddings?|inputs_?embeds|hiddens?"
    "|hidden_?states?|embeddings?|embeds?|embs?|embedded|tokens?|token_?embeddings?|token_?embs?|sequences?|seqs?|features?"
    "|feats?|data|states?|rows|xb|src|x_?1|tensor|tgt|trg|target|x_?seq|dec(oder)?_?(hidden_?)?(states?|inputs?|outputs?|out)?",
    "context": "context|contexts|ctx|memory|mem|xa|encoder_?hidden_?states?|encoder_?outputs?|enc_?out(puts?)?|encoder_?out"
    "|enc(oder)?|cross|cond|conditioning|condition|y|other|others|source|x_?2|context_?states|encoder_?(states?|x)|media|latents"
    "|memory_?states|enc_?states|cross_?(inputs?|states?|x|hidden_?states)|x_?context|x_?enc(oder)?|x_?cross|kv_?source|x_?other"
    "|src_?states",
    "causal": "is_?causal|causal|use_?causal(_?mask)?|autoregressive|apply_?causal(_?mask)?|unidirectional|add_?causal_?mask",
    "pattern": "(need|needs|return|returns|output|with|get|ret|keep)_?(the_?)?(attn|attentions?|att|weights?|pattern|probs|scores"
    "|attention_?scores|attention_?probs)(_?(weights?|scores|probs|matrix|map|maps|pattern))?",
    "mean": "average_?(attn|attention)_?(weights?|heads)|average_?heads|mean_?heads",
    "training": "training|train|is_?training|train_?mode",
    "cache": "pasts?|.*past_?(key|value|kv|state|k|v).*|layer_?past|.*_?past|.*cache|caches"
    "|(kv_?)?cache_?(k|v|kv|keys?|values?|state|dict)"
    "|use_?past|incremental_?state|static_?kv|memory_?kv|presents?|prev(ious)?_?(kv|k|v|keys?|values?|state)|cached_?(kv|k|v|keys?|values?)",
    "positions": "pos(ition)?_?ids|positions|input_?pos(itions)?|pos_?idx|position_?indices|cache_?position",
    "offset": "start_?pos(ition)?|offset|start|(pos(ition)?|cache|kv|seq(_?len)?|rope|rotary)_?offset|pos|position"
    "|start_?(idx|index)|past_?(seq_?)?len(gth)?"
    "|cache_?(len(gth)?|pos|idx|index|size)|cur(rent)?_?(pos(ition)?|len(gth)?|idx|index)|n_?past|prefix_?len(gth)?|kv_?(len(gth)?_?)?offset"
    "|token_?(pos|idx)|past_?offset",
    "rope": "freqs?_?cis|freqs_?complex|freqs?|rope.*|rotary.*|cos|sin|freqs?_?(cos|sin)|(cos|sin)_?(cached|emb|freqs)?"
    "|position_?embeddings?|pos_?emb(ed)?s?|pos_?embeddings?|rot_?mats?",
    "padding": "key_?padding(_?mask)?|.*pad(ding)?_?mask|pad(ding)?|key_?mask|k_?mask|kv_?mask|valid(_?mask)?|context_?mask"
    "|encoder_?attention_?mask|token_?mask|input_?mask|x_?mask|non_?pad|is_?pad(ding)?|seq_?mask|sequence_?mask|is_?real|real",
    "lengths": "(valid_?|seq_?|key_?|kv_?|src_?|input_?|x_?|memory_?|context_?|sequence_?|k_?)?(lens|lengths)|valid_?(len|length)"
    "|seq_?lens|(valid_?)?seqlens|actual_?seq_?len|true_?lengths?|n_?valid|length",
    "bias": "(attn|attention|score|scores|rel(ative)?_?pos(ition)?|position|pos|mask|alibi|additive)_?bias(es)?|bias|alibi"
    "|additive_?mask|rel_?pos|relative_?pos(itions?)?",
    "other mask": "(layer_?)?head_?mask|q(uery)?_?mask|drop_?mask|dropout_?mask|head_?pruning.*|loss_?mask|weight_?mask",
    "mask": ".*mask|masks|msk|allowed|visible|visibility|may_?attend|can_?attend|m|mask_?tensor|attn_?masks",
    "heads": "n_?heads?|num_?heads?|h|heads?|nhead|n_?attention_?heads|num_?attention_?heads|n_?h|nb_?heads?|head_?num"
    "|head_?count",
    "d_head": "d_?k|d_?head|head_?dim|dim_?head|head_?size|d_?h|d_?q|dim_?k|d_?v",
    "d_model": "d_?model|embed_?dim|emb_?dim|d|dim|hidden_?size|n_?embd|model_?dim|embed_?size",
    "scale": "scale|scaling|softmax_?scale|scale_?factor|sm_?scale|scaling_?factor",
    "dropout": "dropout(_?p|_?rate|_?prob)?|p|p_?drop(out)?|drop|attn_?dropout|attention_?dropout|dropout_?module",
    "batch": "batch_?size|bsz|bs|b|n_?batch",
    "q_len": "seq_?len|seq_?length|q_?len|query_?len|tgt_?len|q_?length|t|max_?len|n_?tokens|num_?tokens|max_?seq_?len"
    "|context_?length",
    "k_len": "k_?len|key_?len|kv_?len|kv_?seq_?len|s",
}  # fmt: skip
_PATTERNS = {role: re.compile(names) for role, names in _NAMES.items()}
_OF_NUMBERS: tuple[Role, ...] = (
    "heads", "d_head", "d_model", "scale", "dropout", "batch", "q_len", "k_len", "offset", "lengths",
)  # fmt: skip
_ORDER: tuple[Role, ...] = (
    "query", "key", "value", "kv", "causal", "pattern", "mean", "training", "cache", "positions", "offset", "rope", "padding",
    "lengths", "bias", "other mask", "mask", "x", "context", "heads", "d_head", "d_model", "scale", "dropout", "batch", "q_len",
    "k_len",
)  # fmt: skip
_LETTERS = "q|k|v|o|out|qkv|kv|qk|query|key|value|queries|keys|values|output|in|proj|c"
_WEIGHT = re.compile(
    rf"(w|weights?|kernel|mat)_?({_LETTERS})(_?proj)?|({_LETTERS})(_?proj)?_?(w|weights?|kernel|matrix|mat)|({_LETTERS})_?proj|w"
)
_WEIGHT_BIAS = re.compile(rf"(b|bias)_?({_LETTERS})(_?proj)?|({_LETTERS})(_?proj)?_?(b|bias)")


class Parameter(NamedTuple):
    """One parameter of a call. `by_place`: it cannot be given by its name. `default` is None where it has none, too."""

    name: str
    role: Role
    required: bool
    by_place: bool = False
    default: object = None


class Signature(NamedTuple):
    """What a call takes: its `parameters` in order, those that its source reads from `**kwargs` last. `known` is False where
    torch or the author tell no signature at all, `takes_any` says that there is a `**kwargs`."""

    parameters: tuple[Parameter, ...]
    known: bool = True
    takes_any: bool = False

    def of_role(self, *roles: Role) -> tuple[Parameter, ...]:
        """The parameters of these roles, in the order of the call."""
        return tuple(parameter for parameter in self.parameters if parameter.role in roles)


def signature_of(call: Callable[..., Any]) -> Signature:
    """The parameters of a module's `forward`, of an instance's `__call__`, or of a function."""
    function = called_function(call)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = _parameters_of_document(function)
        if not parameters:
            return Signature((Parameter("args", "rest", True, True),), known=False)
    found = [_parameter(parameter) for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    open_name = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    names = {parameter.name for parameter in found}
    for name, required in _read_from(open_name, source_of(function)) if open_name else ():
        if name not in names:
            names.add(name)
            found.append(Parameter(name, role_of(name), required))
    if not any(parameter.role in ROWS for parameter in found):
        found = _rows_by_place(found)
    return Signature(tuple(_told_apart(found)), takes_any=open_name is not None)


def called_function(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose parameters are those of the call."""
    if inspect.isroutine(call):
        return call
    forward = getattr(call, "forward", None)
    if callable(forward):
        return forward  # type: ignore[no-any-return]
    own = vars(type(call)).get("__call__") or getattr(type(call), "__call__")  # noqa: B004, B009
    return call.__call__ if inspect.isfunction(own) else call  # type: ignore[operator]


def source_of(function: Callable[..., Any]) -> str:
    """The author's lines, empty where there are none to read."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError):
        return ""


def role_of(name: str, default: object = inspect.Parameter.empty, annotation: object = None) -> Role:
    """What a parameter is for, by its name; a default or an annotation that is a number or bool rules rows and masks out."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")
    switch = isinstance(default, bool) or annotation in (bool, "bool")
    number = not switch and (isinstance(default, int | float) or annotation in (int, float, "int", "float"))
    if switch:
        for role in ("causal", "pattern", "mean", "training"):
            if _PATTERNS[role].fullmatch(plain):
                return role
        return "causal" if re.fullmatch(r"(causal_?|use_?)?mask(ed)?", plain) else "off"
    if number:
        return next((role for role in _OF_NUMBERS if _PATTERNS[role].fullmatch(plain)), "unknown")
    if _WEIGHT_BIAS.fullmatch(plain):
        return "weight bias"
    if _WEIGHT.fullmatch(plain):
        return "weight"
    return next((role for role in _ORDER if _PATTERNS[role].fullmatch(plain)), "unknown")


def _parameter(parameter: inspect.Parameter) -> Parameter:
    kinds = inspect.Parameter
    if parameter.kind is kinds.VAR_POSITIONAL:
        return Parameter(parameter.name, "rest", True, True)
    required = parameter.default is kinds.empty
    role = role_of(parameter.name, parameter.default, parameter.annotation)
    by_place = parameter.kind is kinds.POSITIONAL_ONLY
    return Parameter(parameter.name, role, required, by_place, None if required else parameter.default)


def _parameters_of_document(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Of a function made in C: its parameters as the first line of its docstring that shows a call tells them."""
    name = getattr(function, "__name__", "")
    document = getattr(function, "__doc__", None) or ""
    match = re.search(rf"^\s*{re.escape(name)}\((.*?)\)\s*(->[^\n]*)?:?\s*$", document, re.M | re.S)
    if not name or match is None:
        return []
    untyped = " ".join(re.sub(r":\s*[\w\[\].]+", "", match[1]).split())
    try:
        lambda_ = ast.parse(f"lambda {untyped}: 0", mode="eval").body
    except SyntaxError:
        return []
    assert isinstance(lambda_, ast.Lambda)
    positional = [*lambda_.args.posonlyargs, *lambda_.args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(lambda_.args.defaults))
    pairs = [*zip(positional, [*defaults, *lambda_.args.defaults], strict=True)]
    pairs += [*zip(lambda_.args.kwonlyargs, lambda_.args.kw_defaults, strict=True)]
    return [
        inspect.Parameter(argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=_constant(default))
        for argument, default in pairs
    ]


def _constant(default: ast.expr | None) -> object:
    if default is None:
        return inspect.Parameter.empty
    return default.value if isinstance(default, ast.Constant) else None


def _read_from(open_name: str, source: str) -> list[tuple[str, bool]]:
    """The names that the author's lines read from `**kwargs`, and whether they do it without a default."""
    pattern = rf"""\b{open_name}(\.get\(|\.pop\(|\[)\s*["'](\w+)["']\s*([,\])])"""
    return [
        (match[2], match[1] == "[" or (match[1] == ".pop(" and match[3] != ","))
        for match in re.finditer(pattern, source)
    ]


def _rows_by_place(found: list[Parameter]) -> list[Parameter]:
    """Where no name is known, up to three required parameters of unknown names that come first are rows, by their place."""
    first: list[int] = []
    for number, parameter in enumerate(found):
        unsure = parameter.role == "unknown" or (len(parameter.name) == 1 and parameter.role != "weight")
        if not (unsure and parameter.required) or parameter.role == "mask":
            break
        first.append(number)
    roles: dict[int, tuple[Role, ...]] = {1: ("x",), 2: ("x", "context"), 3: ("query", "key", "value")}
    named = dict(zip(first, roles.get(len(first), ()), strict=False))
    return [parameter._replace(role=named.get(number, parameter.role)) for number, parameter in enumerate(found)]


def _told_apart(found: list[Parameter]) -> list[Parameter]:
    """Names that mean one thing alone and another beside others: of two like `x` the second is context; `x` beside a key is
    the query; a source beside a target is context; a value without a key is both."""
    roles = [parameter.role for parameter in found]
    targets = [n for n, parameter in enumerate(found) if re.match(r"tgt|trg|target|dec", parameter.name.lower())]
    likes = [n for n, role in enumerate(roles) if role == "x"]
    first = next((n for n in likes if n in targets), likes[0] if likes else None)
    for n in likes:
        if n != first:
            roles[n] = "context" if found[n].required or "context" not in roles else "unknown"
    if first is None and "query" not in roles and "context" in roles:
        first = roles.index("context")
        roles[first] = "x"
    if first is not None and "query" not in roles and ("key" in roles or "kv" in roles):
        roles[first] = "query"
    if "key" not in roles and "value" in roles and "query" in roles:
        roles[roles.index("value")] = "kv"
    return [parameter._replace(role=role) for parameter, role in zip(found, roles, strict=True)]
