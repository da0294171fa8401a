"""The names of arguments: what those of a constructor and of a call are for, and the parameters of
a call.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from .door import call_user, first_that_works

ROWS = ("x", "query", "key", "value", "context")
"""The roles of token vectors."""
PACKED = ("qkv", "kv")
"""The roles of what holds several of them."""
IN_ORDER: Mapping[int, tuple[str, ...]] = {
    1: ("x",),
    2: ("x", "context"),
    3: ("query", "key", "value"),
}
"""What one, two or three arguments without a known name are."""
MASKS = ("mask", "padding", "lengths", "bias")
WITHOUT_EFFECT = ("rest", "any", "result", "caching", "training", "n_heads", "d_head", "d_model")
"""The roles of parameters whose values do not change the output in evaluation, or state its
sizes."""

_OF_CALLS = {
    "query": "q query queries",
    "key": "k key keys",
    "value": "v value values",
    "x": (
        "x inp input inputs inputsembeds inputseq hidden embedding embeddings embeds emb token "
        "tokens sequence seq features state states src tensor tgt trg target decoder"
    ),
    "context": (
        "kv keyvalue keyvalues context ctx memory encoder enc encoderout cross cond source y xa"
    ),
    "positions": "positions positionids posids cacheposition",
    "segments": (
        "seg segs segids segment segments segmentids segmentinfo segmentlabel types typeids "
        "tokentypes tokentypeids sequenceids seqids"
    ),
    "documents": "documentids documentid docids docid sampleids sampleid seqidx",
    "offset": "offset start startpos pos position cachelen pastlen seqoffset npast cacheoffset",
    "rope": "freqscis freqs rope rotary rotaryemb rotaryposemb cos sin positionembeddings posemb",
    "lengths": "lens lengths length validlens validlength seqlens",
    "starts": "cuseqlens cuseqlensq cuseqlensk cuseqlenskv cuseqlen",
    "longest": "maxseqlen maxseqlenq maxseqlenk maxseqlenkv maxlengthq maxlengthk",
    "window": "window windowsize",
    "mask": "allowed visible m adj adjacency",
    "padding": "pad padding valid",
    "training": "training train",
}
"""What parameters of a call are called, by their roles: without underscores, and with `n` for
`num`."""
_OF_BOTH = {
    "bias": (
        "bias attnbias attentionbias positionbias relpos alibi qkvbias usebias projbias outbias"
    ),
    "causal": "causal iscausal usecausal autoregressive mask masked causalmask isdecoder",
    "n_heads": "heads nheads nhead head h nattentionheads nqheads attentionheads",
    "d_head": "dhead dk headdim dimhead headsize keydim dimk attentionheadsize dkv",
    "d_model": (
        "dmodel modeldim nfeat embeddim dim hiddensize nembd din embsize embeddingdim size width "
        "inputdim features embdim embeddingsize hiddendim hidden emb inchannels channels "
        "infeatures dimin nstate units nhiddens querydim querysize keysize valuesize embedsize "
        "indim d k contextdim crossattentiondim kdim vdim dimmodel dimq dimk dimv hiddenunits "
        "nqinputchannels nkvinputchannels"
    ),
    "n_tokens": (
        "vocabsize vocabdim vocab nvocab ntoken ntokens srcvocab srcvocabsize tgtvocab "
        "tgtvocabsize typevocabsize nitem nitems nuser nusers"
    ),
    "scale": "scale scaling softmaxscale smscale scalefactor",
    "dropout": (
        "dropout dropoutp p pdrop dropoutrate drop droprate dropprob dropoutprob rate attndropout "
        "attnpdrop attndrop pdropout attentiondropout attentionprobsdropoutprob hiddendropoutprob "
        "residdropout residpdrop projdrop"
    ),
}
_OF_CONSTRUCTORS = {
    "d_out": "dout outdim outputdim dimout outchannels outfeatures",
    "n_kv_heads": "nkvheads nkvhead nkeyvalueheads kvheads nkv ngroups nquerygroups nkvgroups",
    "d_v": "dv valuedim vheaddim",
    "context_length": (
        "contextlength contextsize blocksize maxlen maxlength maxseqlen maxseqlength seqlen "
        "maxpositionembeddings nctx npositions"
    ),
    "n_texts": "maxbatchsize maxbatch maxbsz",
    "batch_first": "batchfirst",
    "d_ff": (
        "dff dffn ffdim ffndim dimfeedforward feedforwarddim intermediatesize mlpdim nhid ninner "
        "dinner"
    ),
    "layer": "layeridx layerid layerindex layernumber layer blockidx",
    "n_layers": "nlayer nlayers nhiddenlayers nblocks depth",
    "device": "device",
    "dtype": "dtype torchdtype",
    "config": "config cfg args params conf hparams hp settings options modelconfig modelargs",
    "eps": "eps normeps layernormeps rmsnormeps layernormepsilon",
    "theta": "ropetheta theta ropebase base",
    "temperature": "temperature temp",
    "softcap": "softcap logitcap attnlogitsoftcapping",
}


@cache
def role_of(name: str) -> str | None:
    """The role of an argument of a constructor, or of a field of its config, by its name; None for
    an unusual name.

    >>> role_of("numHeads"), role_of("vit_n_heads"), role_of("tide"), role_of("image_size")
    ('n_heads', 'n_heads', None, None)
    """
    forms = (name, _OF_A_PART.sub("", name))
    known = (role for each in forms for role in _roles_of(each, _OF_BOTH | _OF_CONSTRUCTORS))
    return next(known, None)


_OF_A_PART = re.compile(
    r"(?i)^(vit|lm|llm|vlm|vision|text|image|audio|model|attention|attn|encoder|decoder"
    r"|transformer)_"
    r"(?=\w+_|(heads|dim|width|dropout)$)"
)
"""The part of a model at the beginning of a name, as in `vit_n_heads`, before what tells a role."""


def role_of_last(path: str) -> str | None:
    """The role of an argument, or that of its field in `config.n_head`."""
    return role_of(path.rpartition(".")[2])


_SHORTER = (
    (r"(?<=[a-z])(?=[A-Z])", "_"),
    (r"(?i)(\w+)_of_(\w+)", r"\2_\1"),
    (r"(?i)(\w+)_(num(ber)?|no?|count)$", r"n_\1"),
    ("(?i)^num", "n_"),
    ("(?i)ratio", "rate"),
    ("(?i)dimension(s|ality)?|width|size", "dim"),
    ("(?i)probability", "prob"),
    ("(?i)vocabulary", "vocab"),
    ("(?i)maximum", "max"),
    ("(?i)sequence", "seq"),
    ("(?i)length", "len"),
)
"""Whole words in names, and the short forms that the roles have: `number_of_heads` is `n_heads`."""


def _roles_of(name: str, words_of_roles: Mapping[str, str]) -> Iterator[str]:
    short = name
    for whole, instead in _SHORTER:
        short = re.sub(whole, instead, short)
    plain = re.sub("^num", "n", name.replace("_", "").lower())
    forms = dict.fromkeys([plain, short.replace("_", "").lower()])
    return (
        role for each in forms for role, words in words_of_roles.items() if each in words.split()
    )


def stated(arguments: Mapping[str, Any], role: str) -> Any:
    """The value of a role among the arguments, config fields (`config.n_head`) included; None if no
    argument has it.
    """
    values = (value for name, value in arguments.items() if role_of_last(name) == role)
    return next((value for value in values if value is not None), None)


_FILLERS = (
    "input inputs in state states layer tensor seq sequence embedding embeddings embeds x vec"
)
"""Words that say nothing beside others: `query_states` is a query."""
_OF_NUMBERS = (
    "n_heads",
    "d_head",
    "d_model",
    "scale",
    "dropout",
    "offset",
    "lengths",
    "longest",
    "window",
)
"""The roles of parameters that take a number."""
_OF_CACHES = {"past", "cache", "cached", "incremental", "prev", "present"}
_OF_OTHER_MASKS = ("head", "q", "query", "drop", "dropout", "loss")
_OF_TOKENS = "pad padding valid key k kv token input x context encoder memory seq"
_LETTERS = "q|k|v|o|out|qkv|kv|query|key|value|output|in|proj"
_WEIGHT = re.compile(
    rf"(w|weights?)_?({_LETTERS})(_?proj)?|({_LETTERS})(_?proj)?_?(w|weights?)|({_LETTERS})_proj|w"
)
_WEIGHT_BIAS = re.compile(rf"(b|bias)_?({_LETTERS})(_?proj)?|({_LETTERS})(_?proj)?_?(b|bias)")
_OF_PATTERN = r"(with|keep)_?(att|weights|pattern|probs|scores).*|average_.*"
_RESULT = re.compile(
    r"(return|output|use_return|need|get|ret)_.*|return|verbose|debug|is_?debug|logger"
    rf"|{_OF_PATTERN}"
)
_CACHING = re.compile(
    r"(?i)(use|return|output|with)_(cache|kvs?|kv_cache|key_values|pasts?|presents?|state)"
)


class CallParameter(NamedTuple):
    """One parameter of a call. `positional_only`: it takes no name. `default` is also None without
    a default.

    A `role` has the words above, or is `cache`; `off`, a switch that stays off; `caching`, one by
    which a call remembers what it read; `result`, which changes what is returned or printed alone;
    `weight` or `weight bias`; `other mask`; `rest`, for `*args`; `any`, for `**kwargs`; or
    `unknown`.
    """

    name: str
    role: str
    required: bool
    positional_only: bool = False
    default: object = None

    @property
    def part(self) -> str:
        """What it takes of the token vectors: q, k or v, or several of them."""
        known = {"x": "q", "query": "q", "value": "v", **{each: each for each in PACKED}}
        return known.get(self.role, "k")


def signature_of(call: Callable[..., Any], *roles: str) -> tuple[CallParameter, ...]:
    """The parameters of a module's `forward`, of an instance's `__call__`, or of a function, in
    order: all, or those with some roles.
    """
    parameters = []
    for parameter in signature(called_function(call)).parameters.values():
        role = call_role(parameter.name, parameter.default, parameter.annotation)
        if parameter.kind is parameter.VAR_POSITIONAL:
            role = "rest"
        elif parameter.kind is parameter.VAR_KEYWORD:
            role = "any"
        elif role in ("off", "unknown") and _RESULT.fullmatch(parameter.name.lower()):
            role = "result"
        lacks_default = parameter.default is parameter.empty
        required = lacks_default and role not in ("rest", "any")
        default = None if lacks_default else parameter.default
        is_unnamed = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
        parameters.append(CallParameter(parameter.name, role, required, is_unnamed, default))
    return tuple(
        parameter
        for parameter in _distinguished(parameters)
        if not roles or parameter.role in roles
    )


def signature(thing: Callable[..., Any]) -> inspect.Signature:
    """The signature, annotations resolved if possible; that of any arguments if there is none."""
    found = first_that_works(  # annotations are code of the user
        (True, False), lambda resolve: call_user(inspect.signature, thing, eval_str=resolve)
    )
    return found or inspect.signature(lambda *args, **kwargs: None)


def called_function(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function that holds the parameters of the call."""
    forward = getattr(call, "forward", None)
    if callable(forward):
        return forward  # type: ignore[no-any-return]
    return call.__call__ if inspect.ismethod(call.__call__) else call  # type: ignore[operator]


def call_role(
    name: str, default: object = inspect.Parameter.empty, annotation: object = None
) -> str:
    """The role of a parameter by the words of its name. A number or bool, as default or annotation,
    excludes inputs and masks.
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").split("_")
    telling = [word for word in words if word not in _FILLERS.split()] or words
    known = [
        role
        for plain in ("_".join(words), "_".join(telling))
        for role in _roles_of(plain, _OF_CALLS | _OF_BOTH)
    ]
    if _CACHING.fullmatch(name):
        return "caching"
    if isinstance(default, bool) or annotation in (bool, "bool"):
        return _first(known, ("causal", "training"), otherwise="off")
    if isinstance(default, int | float) or annotation in (int, float, "int", "float"):
        return _first(known, _OF_NUMBERS, otherwise="unknown")
    if words[-1] in ("mask", "masks"):
        return _mask_role({*words})
    if words[-1] != "position" and not _OF_CACHES.isdisjoint(words):
        return "cache"
    joined = "_".join(words)
    if _WEIGHT_BIAS.fullmatch(joined):
        return "weight bias"
    if _WEIGHT.fullmatch(joined):
        return "weight"
    if known:
        return known[0]
    return _first(_roles_of(telling[0], _OF_CALLS), ("context", "rope"), otherwise="unknown")


def _first(roles: Iterable[str], possible: Sequence[str], *, otherwise: str) -> str:
    """The first role that is possible."""
    return next((role for role in roles if role in possible), otherwise)


def _mask_role(words: set[str]) -> str:
    """The role of a mask by the words of its name."""
    if "key" not in words and not words.isdisjoint(_OF_OTHER_MASKS):
        return "other mask"
    return "mask" if words.isdisjoint(_OF_TOKENS.split()) else "padding"


def _distinguished(parameters: Sequence[CallParameter]) -> list[CallParameter]:
    """The parameters with the roles that depend on the other ones. Each rule reads what those
    before it gave.
    """
    roles = _one_input(parameters, _inputs_in_order(parameters))
    if {"x", "query"}.isdisjoint(roles) and "context" in roles:  # `forward(memory)`
        roles[roles.index("context")] = "x"
    if "query" in roles and "value" in roles and "key" not in roles:
        roles[roles.index("value")] = "context"  # `forward(query, value)`: it serves as both
    return [
        parameter._replace(role=role) for parameter, role in zip(parameters, roles, strict=True)
    ]


def _inputs_in_order(parameters: Sequence[CallParameter]) -> list[str]:
    """The roles, in which, without any known name, up to three leading required parameters are
    inputs by their position, as in `forward(melody)` and `forward(melody, prompt)`.
    """
    roles = [parameter.role for parameter in parameters]
    if not {*roles}.isdisjoint(ROWS):
        return roles
    may_be_inputs = [
        parameter.required and parameter.role in ("unknown", "n_heads") for parameter in parameters
    ]
    in_order = IN_ORDER.get([*may_be_inputs, False].index(False), ())
    return [*in_order, *roles[len(in_order) :]]


def _one_input(parameters: Sequence[CallParameter], roles: Sequence[str]) -> list[str]:
    """The roles, in which one of several like `x` is the input: the first target, as `tgt` in
    `forward(src, tgt)`, or else the first. Another one is a context, except an optional one beside
    a context, of which nothing is known.
    """
    inputs = [n for n, role in enumerate(roles) if role == "x"]
    targets = [n for n in inputs if re.match(r"tgt|trg|target|dec", parameters[n].name.lower())]
    distinguished = [*roles]
    for n in inputs:
        if n != [*targets, *inputs][0]:
            is_context = parameters[n].required or "context" not in distinguished
            distinguished[n] = "context" if is_context else "unknown"
    return distinguished
