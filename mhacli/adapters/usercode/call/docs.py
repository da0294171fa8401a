"""What an author says of the arguments of a call: which axes rows have, and what True in a mask stands for. Only clear
statements count: what contradicts itself, or may be about something else, says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from mhacli.adapters.usercode.call.signature import role_of

Meaning = Literal["keep", "hide"]
Axes = tuple[str, ...]

_TRUE = re.compile(r"(?<![\w.=−-])(True|1s?|1\.0?|ones?|non[-\s]?zeros?)(?![\w-]|[.,]\d)", re.I)
_FALSE = re.compile(r"(?<![\w.−-])(?<!non\s)(False|0s?|0\.0?|zeros?)(?![\w-]|[.,]\d)", re.I)
_KEEP = (
    r"keep|keeps|kept|attend|attends|attended|visible|real|valid|allow|allows|allowed|allowing|unmasked|see|sees|seen|participates?"
    r"|takes?\s+part|included?|permit(?:s|ted)?|retain(?:s|ed)?|actual|look(?:s|ed)?\s+at"
    r"|non[-\s]?(?:pad(?:ding|ded|s)?|masked|hidden|ignored|blocked)|un-?(?:padded|hidden|blocked)"
)
_HIDE = (
    r"masked|masks?\s+out|to\s+mask|ignor(?:e|es|ed|ing)|hides?|hidden|pad|pads|padding|padded|block|blocks|blocked|exclude[sd]?"
    r"|forbid|forbids|forbidden|disallow(?:s|ed)?|prevent(?:s|ed)?|prohibit(?:s|ed)?|invalid|drop|dropped|suppress(?:es|ed)?"
    r"|illegal|skip|skipped|filled\s+up|fill-?ups?|fillers?"
    r"|non[-\s]?(?:valid|visible|real|attend(?:ed|able))|un(?:attended|seen)"
)
_VERDICT = re.compile(rf"(?<![\w-])(?:(?P<keep>{_KEEP})|(?P<hide>{_HIDE}))(?![\w-])", re.I)
_NEGATION = (
    r"\b(?:not|never|cannot|no|nor|neither|none|nothing|nobody|lack(?:s|ing)?|\w+n['’]t|prevent(?:s|ed)?|disallow(?:s|ed)?"
    r"|forbid(?:s|den)?|prohibit(?:s|ed)?)\b"
)
_NOT = re.compile(rf"{_NEGATION}(?:[\s*]+\w+){{0,3}}?[\s*]+$", re.I)
_NOT_AT_ONCE = re.compile(rf"{_NEGATION}(?:\s+(?:be|being|equal|to|set|marked|a|the|value|of|with|where))*\s+$", re.I)
_EXCEPT = re.compile(
    r"\b(?:unless|except(?:s|ed|ing|ions?)?(?:\s+for)?|excluding|apart\s+from|aside\s+from|save\s+for)\b",
    re.I,
)
_OTHER_THAN = re.compile(
    r"\b(?:other\s+than|without|outside|free\s+of|rather\s+than|instead\s+of|until|before|up\s+to|prior\s+to)\b", re.I
)
_ALL_BUT = re.compile(
    r"\b((?:all|any\w*|every\w*|no\w*)(?:\s+\w+){0,3}?)\s+but\b(?!\s+(?:not|True|False|0|1|ones?|zeros?)\b)", re.I
)
_ELSEWHERE = re.compile(
    r"\b(?:unlike|contrary\s+to|in\s+contrast|as\s+opposed|opposite|inverse|complement|negation|invert\w*)\b", re.I
)
"""Words of a passage that tells how it is not."""
_UNEQUAL = re.compile(r"(?:!=|≠|<>|(?<![-=<])>|<(?![-=]))\s*$")
_COUNTS = re.compile(
    r"\s+(?:heads?|batch|sequence|quer(?:y|ies)|key|token|layer|step|row|dim\w*|channel|mask|x|by|times|of)\b", re.I
)
_SIZES = re.compile(
    r"\b(?:shape|size|length|dims?|dimensions?|ax[ei]s|least|most|than|head|layer|step|fig\w*|table|eq\w*|section"
    r"|sums?(?:\s+up)?\s+to|adds?(?:\s+up)?\s+to)\s+(?:of\s+)?$",
    re.I,
)
_OF_PATTERNS = re.compile(r"\b(?:weights?|probabilit\w+|logits?|softmax|scores?|gradients?)\b", re.I)
_ONE = re.compile(r"(?:\ba|\bvalues?|\bequals?|\bequal\s+to|\bset\s+to|\bvalue\s+of|[=:])\s*$", re.I)
_CLAUSES = re.compile(r"[,;()]|\b(?:and|while|whereas|else|otherwise|but|or)\b|\.(?:\s|$)|(?<=\w)\s+/\s+(?=\w)", re.I)
_ADDED = re.compile(r"\b(?:additive|added\s+to|adds?\s+to|bias)\b", re.I)
_LOW = re.compile(
    r"[-−–]\s?(?:float\W+)?(?:inf|∞)|[-−–]\s?1\.?0*e\+?\d|[-−–]\s?\d[\d_,]{3,}|finfo|(?:negative|minus)\s+(?:inf|∞|\d|number|value)"
    r"|(?:large|big|huge|very|highly|strongly)(?:\s+\w+)?[\s-]+negative",
    re.I,
)
_OWNER = re.compile(
    r"^\s*(?:[-*•]\s+|:param\s+(?:\w+\s+)?|@param\s+)?[`*]*(\w+)[`*]*\s*(?:\([^)]*\)|\[[^\]]*\])?\s*(?::|–|—|--?\s|=\s)"
)


def documented_meaning(documentation: str, parameter: str) -> Meaning | None:
    """What True, or 1, in the mask `parameter` stands for, where the documentation states it.

    Statements about the parameter by its name count first; those about a mask without another name count after them. Numbers of
    masks that are added to the scores say nothing.
    """
    own, general = _passages(documentation, parameter)
    for passages, context in ((own, own), (general, [*own, *general])):
        added = any(_ADDED.search(passage) for passage in context)
        said = {
            meaning
            for passage in passages
            for meaning in _meanings(passage, additive=added or _LOW.search(passage) is not None)
        }
        if said:
            return said.pop() if len(said) == 1 else None
    return None


def _passages(documentation: str, parameter: str) -> tuple[list[str], list[str]]:
    """Passages about the parameter, and passages about masks at large (for a padding mask: about padding masks)."""
    padding = role_of(parameter) == "padding"
    word = re.compile(r"\bpad\w*[\s_-]+mask", re.I) if padding else re.compile(r"(?<!padding )\bmasks?\b", re.I)
    name = re.compile(rf"\b{re.escape(parameter)}\b")
    own, general = [], []
    for owner, passage in _owned(documentation):
        others = {found for found in re.findall(r"\b\w*mask\w*\b", passage, re.I) if "_" in found} - {parameter}
        if owner == parameter or (
            name.search(passage) and (owner is None or role_of(owner) not in ("mask", "padding"))
        ):
            own.append(passage)
        elif (owner is None or role_of(owner) not in ("mask", "padding")) and word.search(passage) and not others:
            general.append(passage)
    return own, general


def _owned(documentation: str) -> Iterator[tuple[str | None, str]]:
    """The documentation in passages, each with the parameter in whose entry it stands: an entry goes on while its lines are
    indented further, any other passage is one sentence."""
    owner: str | None = None
    indent, lines = 0, list[str]()
    for line in [*documentation.splitlines(), ""]:
        depth = len(line) - len(line.lstrip())
        match = _OWNER.match(line)
        goes_on = (
            bool(lines)
            and bool(line.strip())
            and (depth > indent if owner else line.lstrip()[:1].islower() and not match)
        )
        if not goes_on:
            if lines:
                text = " ".join(lines)
                yield from [(owner, text)] if owner else ((None, part) for part in re.split(r"(?<=\.)\s+", text))
            lines, indent = [], depth
            owner = match[1] if match and match[1].lower() not in _NO_OWNERS else None
        if line.strip():
            lines.append(line.strip())


_NO_OWNERS = {
    *(
        "true",
        "false",
        "0",
        "1",
        "note",
        "notes",
        "warning",
        "e",
        "i",
        "args",
        "arguments",
        "parameters",
        "params",
        "input",
    ),
    *(
        "inputs",
        "return",
        "returns",
        "shape",
        "shapes",
        "example",
        "examples",
        "output",
        "outputs",
        "raises",
        "attributes",
    ),
}
"""Words before a colon that are no parameter whose entry begins there."""


def _meanings(passage: str, *, additive: bool) -> Iterator[Meaning]:
    if _ELSEWHERE.search(passage):
        return
    for clause in _CLAUSES.split(_plain(passage)):
        truths, lies = (
            [m for m in words.finditer(clause) if _is_value(m, additive=additive)] for words in (_TRUE, _FALSE)
        )
        if bool(truths) == bool(lies):
            continue
        token = (truths or lies)[0]
        verdicts = list(_VERDICT.finditer(clause))
        nearest = [verdict for verdict in verdicts if verdict.start() >= token.end()] or verdicts
        said = {_keeps(token, verdict, is_true=bool(truths)) for verdict in nearest}
        if len(said) == 1 and None not in said:
            yield "keep" if said.pop() else "hide"


def _plain(passage: str) -> str:
    """The passage without shapes, without marks of emphasis, and with the names of masks as masks."""
    text = re.sub(r"\[[^\]]*\]|\((?:\s*[\w*]+\s*,)+\s*[\w*]*\s*\)|``|`|\*\*", " ", passage)
    text = re.sub(r"\b\w+(?:\s+(?:x|by)\s+\w+)+\b|\b\w+(?:\s*×\s*\w+)+", " ", text)
    text = re.sub(r"(?<!non )(?<!non-)\bpad(?:ding|ded)?[\s-]+masks?\b", "mask", text, flags=re.I)
    return _ALL_BUT.sub(r"\1 except", text)


def _is_value(token: re.Match[str], *, additive: bool) -> bool:
    """Whether a word for true or false stands for what is in a mask, and is not a size, a count or a number of the pattern."""
    word, before, after = token[0].lower(), token.string[: token.start()], token.string[token.end() :]
    if word in ("true", "false"):
        return True
    if additive or _OF_PATTERNS.search(token.string) or _SIZES.search(before) or _COUNTS.match(after):
        return False
    return word != "one" or _ONE.search(before) is not None


def _keeps(token: re.Match[str], verdict: re.Match[str], *, is_true: bool) -> bool | None:
    """Whether a clause says that True keeps: each negation and each exception between the two words turns it round. None where
    one stands elsewhere, or further off."""
    clause = token.string
    first, second = sorted((token, verdict), key=lambda match: match.start())
    before, between, after = clause[: first.start()], clause[first.end() : second.start()], clause[second.end() :]
    near, at_once = _NOT.search(before), _NOT_AT_ONCE.search(before)
    if _EXCEPT.search(before) or _OTHER_THAN.search(before) or _EXCEPT.search(after):
        return None
    if first is token and near and not at_once:
        return None
    turned = _NOT.search(between) is not None
    if not turned and re.search(_NEGATION, between, re.I):
        return None
    n_turns = turned + (near is not None) + len(_EXCEPT.findall(between)) + len(_OTHER_THAN.findall(between))
    n_turns += _UNEQUAL.search(clause[: token.start()]) is not None
    return ((verdict["keep"] is not None) == is_true) == (n_turns % 2 == 0)


_AXIS_WORDS = {
    "batch": "b bs bsz batch batches batchsize nbatches bz nb",
    "head": "head heads nheads numheads nhead nh h hn numhead",
    "row": "t s l seq seqlen seqlength sequence sequencelength length len time tokens ntokens numtokens qlen querylen klen"
    " keylen query queries key keys lq lk tq tk sq sk qlength klength tgtlen srclen tgt src nq nk nseq lens timesteps q k",
    "width": "d dim dmodel dk dv dq dhead embeddim embed emb embedding embeddingdim e c dh hd headdim headsize"
    " hidden hiddensize hiddendim feature features width channels channel embedsize nembd model size din dimhead",
}
_AXIS = {word: axis for axis, words in _AXIS_WORDS.items() for word in words.split()}


def stated_axes(source: str, documentation: str, names: Iterable[str]) -> Axes | None:
    """The axes of the rows that the lines of a call unpack from the shape of a parameter, such as `B, T, C = x.shape`, or that an
    annotation or the documentation states beside its name, such as `x: [batch, seq, d_model]`."""
    annotated = re.sub(r"\w+\[(?:torch\.)?Tensor,\s*\"", '"', f"{source}\n{documentation}")
    for name in names:
        word = re.escape(name)
        anew = re.search(rf"^[ \t]+(?:[\w, ]*\b)?{word}\b[\w, ]*=(?!=)", source, re.M)
        untouched = source if anew is None else source[: anew.start()]
        listed = rf"\b{word}\b[^\n\[(\"]{{0,40}}[\[(\"]([^\])\"\n]+)[\])\"]"
        matches = (
            *re.finditer(rf"^[ \t]*([\w, ]+?)\s*=\s*{word}\.(?:shape|size\(\))\s*(?:#.*)?$", untouched, re.M),
            *re.finditer(rf"\b{word}:\s*\"([^\"\n]+)\"", annotated),
            *re.finditer(listed, documentation),
        )
        axes = next((axes for match in matches if (axes := _axes_of(match[1]))), None)
        if axes is not None:
            return axes
    return None


def _axes_of(text: str) -> Axes | None:
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
