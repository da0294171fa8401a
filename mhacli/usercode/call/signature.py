"""The facts about a call that need no trial: its parameters, its documentation, and the sizes of its module."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from mhacli.usercode.arguments import SPELLINGS
from mhacli.usercode.types import Built, MaskMeaning

AxisNames = tuple[str, ...]
CallRole = Literal[
    "x", "query", "key", "value", "kv", "context",
    "mask", "padding", "lengths", "bias", "causal", "pattern", "mean", "off", "training", "cache", "positions", "offset",
    "rope", "weight", "weight bias", "heads", "d_head", "d_model", "scale", "dropout", "batch", "q_len", "k_len", "other mask",
    "rest", "unknown",
]  # fmt: skip
"""The purpose of a parameter. The first line are token vectors. `pattern` also returns the pattern, `mean` its mean over heads,
`off` is a switch that stays off, `rest` are `*args`."""
ROWS: tuple[CallRole, ...] = ("x", "query", "key", "value", "kv", "context")
MASKS: tuple[CallRole, ...] = ("mask", "padding", "lengths", "bias")

_NAMES: dict[CallRole, str] = {
    "query": "q|qs|query|queries|querys|x_?q|xq|q_?in|q_?input|q_?x|query_?input|query_?states|query_?layer|query_?tensor"
    "|inputs?_?q|query_?embeddings?|queries_?in|q_?seq|query_?seq(uence)?|from_?tensor|q_?states|inp_?q|q_?vec(s|tors)?",
    "key": "k|ks|keys?|x_?k|xk|k_?in|k_?input|k_?x|key_?input|key_?states|key_?layer|key_?tensor|inputs?_?k|key_?embeddings?"
    "|k_?seq|key_?seq(uence)?|k_?states|inp_?k|k_?vec(s|tors)?",
    "value": "v|vs|values?|vals?|x_?v|xv|v_?in|v_?input|v_?x|value_?input|value_?states|value_?layer|value_?tensor|inputs?_?v"
    "|value_?embeddings?|v_?seq|value_?seq(uence)?|v_?states|inp_?v|v_?vec(s|tors)?",
    "kv": "kv|key_?values?|key_?value_?states|keys_?(and_?)?values|x_?kv|kv_?in|kv_?input|kv_?x|inputs?_?kv|kv_?states|kv_?seq"
    "|to_tensor",
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
    "x": "x|xs|x_?in|x_?input|inputs?|inp|input_?tensor|input_?seq(uence)?|input_?embeddings?|inputs_?embeds|hiddens?"
    "|hidden_?states?|embeddings?|embeds?|embs?|embedded|tokens?|token_?embeddings?|token_?embs?|sequences?|seqs?|features?"
    "|feats?|data|states?|rows|xb|src|x_?1|tensor|tgt|trg|target|x_?seq|dec(oder)?_?(hidden_?)?(states?|inputs?|outputs?|out)?",
    "context": "context|contexts|ctx|memory|mem|xa|encoder_?hidden_?states?|encoder_?outputs?|enc_?out(puts?)?|encoder_?out"
    "|enc(oder)?|cross|cond|conditioning|condition|y|other|others|source|x_?2|context_?states|encoder_?(states?|x)|media|latents"
    "|memory_?states|enc_?states|cross_?(inputs?|states?|x|hidden_?states)|x_?context|x_?enc(oder)?|x_?cross|kv_?source|x_?other"
    "|src_?states",
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
"""Tried in this order."""
_OF_NUMBERS: tuple[CallRole, ...] = (
    "heads", "d_head", "d_model", "scale", "dropout", "batch", "q_len", "k_len", "offset", "lengths",
)  # fmt: skip
_LETTERS = "q|k|v|o|out|qkv|kv|qk|query|key|value|queries|keys|values|output|in|proj|c"
_WEIGHT = re.compile(
    rf"(w|weights?|kernel|mat)_?({_LETTERS})(_?proj)?|({_LETTERS})(_?proj)?_?(w|weights?|kernel|matrix|mat)|({_LETTERS})_?proj|w"
)
_WEIGHT_BIAS = re.compile(rf"(b|bias)_?({_LETTERS})(_?proj)?|({_LETTERS})(_?proj)?_?(b|bias)")


class CallParameter(NamedTuple):
    """One parameter of a call. `by_place`: it is positional only. `default` is also None without a default."""

    name: str
    role: CallRole
    required: bool
    by_place: bool = False
    default: object = None


class Signature(NamedTuple):
    """The `parameters` of a call in order, then those that its source reads from `**kwargs`. `known` is False without any
    signature; `takes_any`: the call has `**kwargs`."""

    parameters: tuple[CallParameter, ...]
    known: bool = True
    takes_any: bool = False

    def of_role(self, *roles: CallRole) -> tuple[CallParameter, ...]:
        """The parameters with these roles, in order."""
        return tuple(parameter for parameter in self.parameters if parameter.role in roles)


def signature_of(call: Callable[..., Any]) -> Signature:
    """The parameters of a module's `forward`, of an instance's `__call__`, or of a function."""
    function = called_function(call)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = _parameters_in_docstring(function)
        if not parameters:
            return Signature((CallParameter("args", "rest", True, True),), known=False)
    call_parameters = [
        _parameter(parameter) for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    open_name = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    names = {parameter.name for parameter in call_parameters}
    for name, required in _read_from(open_name, source_of(function)) if open_name else ():
        if name not in names:
            names.add(name)
            call_parameters.append(CallParameter(name, call_role(name), required))
    if not any(parameter.role in ROWS for parameter in call_parameters):
        call_parameters = _rows_by_place(call_parameters)
    return Signature(tuple(_distinguish(call_parameters)), takes_any=open_name is not None)


def called_function(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function that holds the parameters of the call."""
    if inspect.isroutine(call):
        return call
    forward = getattr(call, "forward", None)
    if callable(forward):
        return forward  # type: ignore[no-any-return]
    method = vars(type(call)).get("__call__") or getattr(type(call), "__call__")  # noqa: B004, B009
    return call.__call__ if inspect.isfunction(method) else call  # type: ignore[operator]


def source_of(function: Callable[..., Any]) -> str:
    """The source of a function, empty if unavailable."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError):
        return ""


def never_read(call: Callable[..., Any]) -> frozenset[str]:
    """The parameters that the source never reads; none if the source cannot be parsed or uses `locals()`."""
    try:
        definition = ast.parse(source_of(called_function(call))).body[0]
    except (SyntaxError, ValueError, RecursionError, IndexError):
        return frozenset()
    if not isinstance(definition, ast.FunctionDef):
        return frozenset()
    signature = definition.args
    names = {argument.arg for argument in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)}
    read = {
        node.id
        for line in definition.body
        for node in ast.walk(line)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return frozenset() if "locals" in read else frozenset(names - read - {"self"})


def call_role(name: str, default: object = inspect.Parameter.empty, annotation: object = None) -> CallRole:
    """The role of a parameter by its name. A number or bool, as default or annotation, excludes inputs and masks."""
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
    return next((role for role, pattern in _PATTERNS.items() if pattern.fullmatch(plain)), "unknown")


def _parameter(parameter: inspect.Parameter) -> CallParameter:
    kinds = inspect.Parameter
    if parameter.kind is kinds.VAR_POSITIONAL:
        return CallParameter(parameter.name, "rest", True, True)
    required = parameter.default is kinds.empty
    role = call_role(parameter.name, parameter.default, parameter.annotation)
    by_place = parameter.kind is kinds.POSITIONAL_ONLY
    return CallParameter(parameter.name, role, required, by_place, None if required else parameter.default)


def _parameters_in_docstring(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a C function, from the call in its docstring."""
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
    """The names that the source reads from `**kwargs`, and whether each is required."""
    pattern = rf"""\b{open_name}(\.get\(|\.pop\(|\[)\s*["'](\w+)["']\s*([,\])])"""
    return [
        (match[2], match[1] == "[" or (match[1] == ".pop(" and match[3] != ","))
        for match in re.finditer(pattern, source)
    ]


def _rows_by_place(parameters: list[CallParameter]) -> list[CallParameter]:
    """Without any known name, up to three leading required parameters become inputs by position."""
    candidates: list[int] = []
    for number, parameter in enumerate(parameters):
        is_candidate = parameter.role == "unknown" or (len(parameter.name) == 1 and parameter.role != "weight")
        if not (is_candidate and parameter.required) or parameter.role == "mask":
            break
        candidates.append(number)
    roles: dict[int, tuple[CallRole, ...]] = {1: ("x",), 2: ("x", "context"), 3: ("query", "key", "value")}
    assigned = dict(zip(candidates, roles.get(len(candidates), ()), strict=False))
    return [
        parameter._replace(role=assigned.get(number, parameter.role)) for number, parameter in enumerate(parameters)
    ]


def _distinguish(parameters: list[CallParameter]) -> list[CallParameter]:
    """Resolves names that depend on the other parameters: of two like `x` the second is the context; `x` beside a key is the
    query; a source beside a target is the context; a value without a key serves as both."""
    roles = [parameter.role for parameter in parameters]
    targets = [n for n, parameter in enumerate(parameters) if re.match(r"tgt|trg|target|dec", parameter.name.lower())]
    inputs = [n for n, role in enumerate(roles) if role == "x"]
    first = next((n for n in inputs if n in targets), inputs[0] if inputs else None)
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


# ------------------------------------------------------------------------------------------------------- documentation


_VALUE = re.compile(
    r"(?<![\w.-])(True|False|non-?zero|[01](?=s?\s*(?:=|->|for|where|means?|marks?|at|is|are|indicates?|keeps?|hides?)(?!\w)))(?!\w)"
    r"|(?:(?<![!<>])=|->|\bis|\bare|\bwhere|\bat)\s*([01])(?![\w.])",
    re.I,
)
_VERDICT = re.compile(
    r"\b(?P<not>(?:not|never|cannot|non)[\s-]+(?:be\s+)?)?(?:"
    r"(?P<keep>keep|kept|keeps|attend(?:s|ed)?|visible|real|valid|allow(?:s|ed)?(?:\s+to\s+\w+)?|unmasked|sees?|seen"
    r"|takes? part|participates?|includ(?:e|es|ed)|permit(?:s|ted)?|retain(?:s|ed)?|actual|look(?:s|ed)? at)"
    r"|(?P<hide>masked|masks? out|to mask|ignor(?:e|es|ed)|hides?|hidden|pad|pads|padd(?:ing|ed)|block(?:s|ed)?|exclude[sd]?"
    r"|forbid(?:s|den)?|disallow(?:s|ed)?|prevent(?:s|ed)?|prohibit(?:s|ed)?|invalid|illegal|drop(?:s|ped)?|suppress(?:es|ed)?"
    r"|skip(?:s|ped)?|fill(?:ed)?[\s-]?ups?|fillers?))\b",
    re.I,
)
_UNCLEAR = re.compile(
    r"\b(?:not|no|non\w*|never|nor|neither|nothing|without|un\w+|except\w*|but|other than|apart|up to|weights?|shape|heads?)\b"
    r"|n't\b|!=|(?<!-)>|<",
    re.I,
)
"""Negations, exceptions and sizes, which make a clause ambiguous."""
_ADDITIVE = re.compile(r"\b(?:add(?:s|ed)?|additive|bias|negative|inf|finfo)\b|\de\d|[-−]\d", re.I)
"""Words about masks added to scores, where 0 keeps and 1 has no meaning."""
_CLAUSES = re.compile(r"[,;()]|\b(?:and|while|whereas|else|otherwise|or)\b|\bbut(?=\s+(?:True|False|[01])\b)", re.I)
_ENTRY = re.compile(r"\s*(?:[-*]\s+|:param\s+|@param\s+)?[`*]*(\w+)[`*]*\s*(?:\([^)]*\)|\[[^\]]*\])?\s*(?::|--?\s|=\s)")


def documented_meaning(documentation: str, parameter: str) -> MaskMeaning | None:
    """The documented meaning of True, or 1, in the mask `parameter`.

    Only plain clauses count, such as `True = hidden`, `1 for real tokens`, `positions to be masked are True`. Statements about
    this parameter have priority over statements about an unnamed mask. None if they contradict each other.
    """
    is_padding = call_role(parameter) == "padding"
    unnamed = re.compile(r"\bpad\w*[\s_-]+mask" if is_padding else r"(?<!padding )\bmasks?\b", re.I)
    specific, general = set[MaskMeaning](), set[MaskMeaning]()
    for entry, sentence, numbers in _sentences(documentation):
        if entry != parameter and entry is not None and call_role(entry) in ("mask", "padding"):
            continue
        if re.search(r"\b(?:unlike|opposite|inverse|invert\w*)\b", sentence, re.I):
            continue
        meanings = {
            meaning for clause in _CLAUSES.split(_plain(sentence)) if (meaning := _meaning(clause, numbers=numbers))
        }
        others = {name for name in re.findall(r"\w*mask\w*", sentence, re.I) if "_" in name} - {parameter}
        if entry == parameter or re.search(rf"\b{re.escape(parameter)}\b", sentence):
            specific |= meanings
        elif unnamed.search(sentence) and not others:
            general |= meanings
    meanings_found = specific or general
    return meanings_found.pop() if len(meanings_found) == 1 else None


def _sentences(documentation: str) -> Iterator[tuple[str | None, str, bool]]:
    """Each sentence, the parameter whose entry `name: …` contains it, and whether numbers have a meaning there."""
    blocks = re.split(rf"\n\s*\n|\n(?={_ENTRY.pattern})", documentation)
    for block in blocks[:: _ENTRY.groups + 1]:
        entry = _ENTRY.match(block)
        for sentence in re.split(r"(?<=\.)\s+", " ".join(block.split())):
            yield None if entry is None else entry[1], sentence, not _ADDITIVE.search(block)


def _plain(sentence: str) -> str:
    """The sentence without shapes and emphasis, and with "padding mask" as "mask"."""
    text = re.sub(r"\[[^\]]*\]|\((?:\s*[\w*]+\s*,)+\s*[\w*]*\s*\)|[`*]+", " ", sentence)
    return re.sub(r"\bpad(?:ding|ded)?[\s-]+masks?\b", "mask", text, flags=re.I)


def _meaning(clause: str, *, numbers: bool) -> MaskMeaning | None:
    words = [(first or second).lower() for first, second in _VALUE.findall(clause)]
    values = {word not in ("false", "0") for word in words if numbers or word in ("true", "false")}
    verdicts = {(match["keep"] is None) == (match["not"] is None) for match in _VERDICT.finditer(clause)}
    if len(values) != 1 or len(verdicts) != 1 or _UNCLEAR.search(_VERDICT.sub("", _VALUE.sub("", clause))):
        return None
    return "hide" if values == verdicts else "keep"


_AXIS_WORDS = {
    "batch": "b bs bsz batch batches batchsize nbatches bz nb",
    "head": "head heads nheads numheads nhead nh h hn numhead",
    "row": "t s l seq seqlen seqlength sequence sequencelength length len time tokens ntokens numtokens qlen querylen klen"
    " keylen query queries key keys lq lk tq tk sq sk qlength klength tgtlen srclen tgt src nq nk nseq lens timesteps q k",
    "width": "d dim dmodel dk dv dq dhead embeddim embed emb embedding embeddingdim e c dh hd headdim headsize"
    " hidden hiddensize hiddendim feature features width channels channel embedsize nembd model size din dimhead",
}
_AXIS = {word: axis for axis, words in _AXIS_WORDS.items() for word in words.split()}


def stated_axes(source: str, documentation: str, names: Iterable[str]) -> AxisNames | None:
    """The stated axes of the inputs: unpacked from a parameter's shape, such as `B, T, C = x.shape`, or written beside its name
    in an annotation or the documentation, such as `x: [batch, seq, d_model]`."""
    annotated = re.sub(r"\w+\[(?:torch\.)?Tensor,\s*\"", '"', f"{source}\n{documentation}")
    for name in names:
        word = re.escape(name)
        reassignment = re.search(rf"^[ \t]+(?:[\w, ]*\b)?{word}\b[\w, ]*=(?!=)", source, re.M)
        source_before = source if reassignment is None else source[: reassignment.start()]
        in_brackets = rf"\b{word}\b[^\n\[(\"]{{0,40}}[\[(\"]([^\])\"\n]+)[\])\"]"
        matches = (
            *re.finditer(rf"^[ \t]*([\w, ]+?)\s*=\s*{word}\.(?:shape|size\(\))\s*(?:#.*)?$", source_before, re.M),
            *re.finditer(rf"\b{word}:\s*\"([^\"\n]+)\"", annotated),
            *re.finditer(in_brackets, documentation),
        )
        axes = next((axes for match in matches if (axes := _axes_of(match[1]))), None)
        if axes is not None:
            return axes
    return None


def _axes_of(text: str) -> AxisNames | None:
    words = [re.sub(r"[^a-z]", "", word.lower()) for word in re.split(r"[,×]\s*|\bx\b|\s+(?=\w)", text.strip(" ,"))]
    if not 2 <= len(words) <= 4:
        return None
    axes = [_AXIS.get(word) for word in words]
    if words[-1] in ("", "h", "hidden"):
        axes[-1] = "width"
    if "n" in words and "batch" not in axes:
        axes[words.index("n")] = "row" if "row" not in axes else "batch"
    if None in axes or len(set(axes)) < len(axes) or "row" not in axes or "width" not in axes:
        return None
    return tuple(str(axis) for axis in axes)


# ---------------------------------------------------------------------------------------------------------------- sizes


_WIDTHS = {
    "in": """d_in dim_in input_dim in_dim in_features input_size query_dim q_dim query_size d_input in_channels
        d_model embed_dim emb_dim embedding_dim embed_size hidden_size n_embd model_dim dim_model dim hidden_dim
        emb_size embedding_size d_emb d_embed n_embed dmodel num_hiddens n_state width channels d c k emb
        n_units hidden size feature_dim num_features features model_size units hid_dim""",
    "context": """d_context context_dim cross_attention_dim kdim d_ctx kv_dim encoder_dim dim_context d_kv_in key_dim_in
        memory_dim d_memory d_cross encoder_hidden_size dim_kv key_size cross_dim context_width d_encoder d_cond""",
}
"""The names of input widths, the most specific first."""
_HEADS, _D_HEAD, _LIMITS = (
    frozenset(name.replace("_", "") for name in SPELLINGS[role].split())
    for role in ("n_heads", "d_head", "context_length")
)
_LONGEST = 4096
"""The longest fixed length to try."""
FREE_WIDTH, FREE_HEADS, FREE_HEAD_WIDTH = 32, 4, 8
"""The width, heads and head width for a target without sizes of its own, such as a plain function."""


class KnownSizes(NamedTuple):
    """The sizes known before any call. `widths` and `context_widths` are candidates, the likeliest first. `limits` are maximal
    or exact lengths. `taken` are numbers with another meaning, which lengths should avoid."""

    widths: tuple[int, ...]
    context_widths: tuple[int, ...]
    n_heads: int | None
    d_head: int | None
    limits: tuple[int, ...]
    taken: frozenset[int]


class TrialLengths(NamedTuple):
    """The lengths of a trial."""

    batch: int
    q_len: int
    k_len: int


def known_sizes(built: Built) -> KnownSizes:
    """The sizes that the constructor's arguments and the parameters' shapes show."""
    numbers = dict(_numbers(built.arguments))
    shapes = _shapes(built.module)
    n_heads = _size_named(built, numbers, _HEADS)
    widths = list(_values(numbers, _WIDTHS["in"].split()))
    linear = _linear_widths(built.module, r"(^|[._])(w?_?q|to_?q|query|queries|qkv|c_attn|in_proj|w?qkv)")
    context = [
        *_values(numbers, _WIDTHS["context"].split()),
        *_linear_widths(built.module, r"(^|[._])(w?_?kv?|to_?kv?|keys?|key_value)"),
    ]
    sides = [size for _, shape in shapes for size in shape[-2:]] if not widths and not linear else []
    first = _unique([*widths, *linear, *_linear_widths(built.module, ""), *(side for side in sides if side > 1)])
    d_head = _size_named(built, numbers, _D_HEAD)
    if d_head is None and n_heads and first and first[0] % n_heads == 0:
        d_head = first[0] // n_heads
    if n_heads is None and d_head and first and first[0] % d_head == 0:
        n_heads = first[0] // d_head
    taken = {*numbers.values(), *(size for _, shape in shapes for size in shape), d_head or 0, n_heads or 0}
    limit = _size_named(built, numbers, _LIMITS)
    limits = [*([limit] if limit else []), *_square_buffers(built.module), *_position_rows(shapes)]
    return KnownSizes(tuple(first), tuple(_unique(context)), n_heads, d_head, tuple(_unique(limits)), frozenset(taken))


def _numbers(arguments: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, int]]:
    """Integers among the arguments, by name, config fields included."""
    for name, value in arguments.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield name.lower(), value
        elif depth < 2 and not isinstance(value, Tensor | nn.Module):
            yield from _numbers(_fields(value), depth + 1)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {name: part for name, part in value.items() if isinstance(name, str)}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else {}


def _values(numbers: Mapping[str, int], names: Iterable[str]) -> Iterator[int]:
    return (numbers[name] for name in names if numbers.get(name, 0) > 0)


def _size_named(built: Built, numbers: Mapping[str, int], names: frozenset[str]) -> int | None:
    """The first positive integer with one of these names among arguments and module attributes."""
    attributes = {} if built.module is None else vars(built.module)
    numeric_attributes = {
        name: value for name, value in attributes.items() if isinstance(value, int) and not isinstance(value, bool)
    }
    sizes = (
        value
        for name, value in [*numbers.items(), *numeric_attributes.items()]
        if name.lower().replace("_", "") in names
    )
    return next((size for size in sizes if size > 0), None)


def _shapes(module: nn.Module | None) -> list[tuple[str, tuple[int, ...]]]:
    if module is None:
        return []
    return [
        (name, tuple(p.shape)) for name, p in module.named_parameters() if not nn.parameter.is_lazy(p) and p.ndim > 1
    ]


def _linear_widths(module: nn.Module | None, pattern: str) -> list[int]:
    """The input widths of the linear layers with a matching name, in order of creation."""
    if module is None:
        return []
    layers = [(name, part) for name, part in module.named_modules() if re.search(pattern, name, re.I)]
    widths = []
    for _, part in layers:
        if isinstance(part, nn.Linear):
            widths.append(part.in_features)
        elif type(part).__name__ == "Conv1D" and isinstance(getattr(part, "weight", None), Tensor):
            widths.append(part.weight.shape[0])
        elif isinstance(part, nn.Conv1d | nn.Conv2d):
            widths.append(part.in_channels)
    return [width for width in widths if width > 0]


def _square_buffers(module: nn.Module | None) -> list[int]:
    """The sides of square buffers, usually causal masks of the maximal length."""
    buffers = [] if module is None else [buffer for buffer in module.buffers() if buffer.ndim > 1]
    return [buffer.shape[-1] for buffer in buffers if buffer.shape[-1] == buffer.shape[-2] and buffer.shape[-1] > 1]


def _position_rows(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> list[int]:
    return [shape[-2] for name, shape in shapes if re.search(r"pos|rel|(^|\.)er$", name, re.I)]


def _unique(numbers: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


def lengths_to_try(sizes: KnownSizes, *, separate_keys: bool, hinted: Iterable[int] = ()) -> list[TrialLengths]:
    """The lengths of trials, the most informative first: with `separate_keys` a different number of keys than queries, then
    equal numbers, then the known limits, then even numbers."""
    limit = min(sizes.limits, default=None)
    batch = _pick((3, 4, 6), sizes.taken, None)
    q_len = _pick((5, 7, 9, 6), sizes.taken | {batch}, limit)
    k_len = _pick((11, 13, 10, 9, 8, 7, 6, 5, 4, 3, 2), sizes.taken | {batch, q_len}, limit)
    same = _pick((7, 5, 9, 6, 4, 3, 2), sizes.taken | {batch}, limit)
    candidates = [TrialLengths(batch, q_len, k_len)] if separate_keys and q_len != k_len else []
    candidates.append(TrialLengths(batch, same, same))
    for exact in _unique(
        [*hinted, *sorted(sizes.limits), *(size for size in (8, 16) if limit is None or size <= limit)]
    ):
        if 1 < exact <= _LONGEST:
            candidates += [TrialLengths(batch if batch != exact else batch + 1, exact, exact)]
    return list(dict.fromkeys(candidates))


def _pick(preferred: tuple[int, ...], taken: frozenset[int], limit: int | None) -> int:
    small = [number for number in preferred if limit is None or number <= limit] or [limit or preferred[0]]
    return next((number for number in small if number not in taken), small[0])


_MOST_HINTS = 8
_WIDTH_ERRORS = (
    r"shapes cannot be multiplied \(\d+x\d+ and (\d+)x\d+\)", r"embedding dim(?:ension)? of (\d+)", r"normalized_shape=\[(\d+)\]",
    r"expected input\[.*?\] to have (\d+) channels", r"last dim(?:ension)? (?:to be|must be|of) (\d+)",
)  # fmt: skip


def widths_in_errors(errors: Iterable[str]) -> list[int]:
    """The widths that torch's error messages request."""
    return _numbers_in(errors, _WIDTH_ERRORS)


def lengths_in_errors(errors: Iterable[str]) -> list[int]:
    """The numbers in error messages that may be a required length."""
    return [number for number in _numbers_in(errors, (r"(?<![\w.])(\d+)(?![\w.])",)) if 3 < number <= _LONGEST][
        :_MOST_HINTS
    ]


def _numbers_in(errors: Iterable[str], patterns: Iterable[str]) -> list[int]:
    return _unique(int(match[1]) for error in errors for pattern in patterns for match in re.finditer(pattern, error))
