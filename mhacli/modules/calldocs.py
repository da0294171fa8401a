"""What an author says of the arguments of a call: which axes rows have, and what True in a mask stands for. Only clear
statements count: what contradicts itself, or may be about something else, says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from mhacli.modules.callsignatures import role_of

Meaning = Literal["keep", "hide"]
Axes = tuple[str, ...]

_TRUE = re.compile(r"(?<![\w.=-])(True|1s?|1\.0?|ones?|non-?zeros?)(?![\w-]|\.\d)", re.I)
_FALSE = re.compile(r"(?<![\w.-])(False|0s?|0\.0?|zeros?)(?![\w-]|\.\d)", re.I)
_KEEP = (
    r"keep|keeps|kept|attend|attends|attended|visible|real|valid|allow|allows|allowed|allowing|unmasked|see|sees|seen|participates?"
    r"|takes?\s+part|included?|permit(?:s|ted)?|retain(?:s|ed)?|actual|non-?pad(?:ding|ded)?|look(?:s|ed)?\s+at"
)
_HIDE = (
    r"masked|masks?\s+out|to\s+mask|ignor(?:e|es|ed|ing)|hides?|hidden|pad|pads|padding|padded|block|blocks|blocked|exclude[sd]?"
    r"|forbid|forbids|forbidden|disallow(?:s|ed)?|prevent(?:s|ed)?|prohibit(?:s|ed)?|invalid|drop|dropped|suppress(?:es|ed)?"
    r"|illegal|skip|skipped|filled\s+up|fill-?ups?|fillers?"
)
_VERDICT = re.compile(rf"(?<![\w-])(?:(?P<keep>{_KEEP})|(?P<hide>{_HIDE}))(?![\w-])", re.I)
_NOT = re.compile(
    r"\b(?:not|never|cannot|no|\w+n['’]t|prevent(?:s|ed)?|disallow(?:s|ed)?|forbid(?:s|den)?|prohibit(?:s|ed)?)\b"
    r"(?:[\s*]+\w+){0,3}?[\s*]+$",
    re.I,
)
_CLAUSES = re.compile(r"[,;()]|\b(?:and|while|whereas|else|otherwise|but|or)\b|\.(?:\s|$)|(?<=\w)\s+/\s+(?=\w)", re.I)
_ADDITIVE = re.compile(r"additive|[-−]\s?inf|[-−]\s?∞|[-−]1e\d|added\s+to|adds?\s+to", re.I)
_OWNER = re.compile(
    r"^\s*(?:[-*•]\s+|:param\s+(?:\w+\s+)?|@param\s+)?[`*]*(\w+)[`*]*\s*(?:\([^)]*\)|\[[^\]]*\])?\s*(?::|–|—|--?\s|=\s)"
)


def documented_meaning(documentation: str, parameter: str) -> Meaning | None:
    """What True, or 1, in the mask `parameter` stands for, where the documentation states it.

    Statements about the parameter by its name count first; those about a mask without another name count after them.
    """
    own, general = _passages(documentation, parameter)
    for passages in (own, general):
        said = {meaning for passage in passages for meaning in _meanings(passage)}
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


def _meanings(passage: str) -> Iterator[Meaning]:
    text = re.sub(r"\[[^\]]*\]|\((?:\s*[\w*]+\s*,)+\s*[\w*]*\s*\)|``|`|\*\*", " ", passage)
    additive = bool(_ADDITIVE.search(text))
    for clause in _CLAUSES.split(text):
        truths, lies = list(_TRUE.finditer(clause)), list(_FALSE.finditer(clause))
        if bool(truths) == bool(lies):
            continue
        token = (truths or lies)[0]
        if additive and token[0].lower() not in ("true", "false"):
            continue
        verdicts = _verdicts(clause[token.end() :]) or _verdicts(clause[: token.start()])
        if len(verdicts) == 1:
            kept = verdicts.pop() == bool(truths)
            yield "keep" if kept else "hide"


def _verdicts(text: str) -> set[bool]:
    return {
        (match["keep"] is not None) != bool(_NOT.search(text[: match.start()])) for match in _VERDICT.finditer(text)
    }


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
