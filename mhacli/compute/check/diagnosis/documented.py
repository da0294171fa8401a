"""What the documentation of somebody's attention says of scales and rotations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mhacli.attention.mistakes.stages import Pairing

_SCORES = r"(?:dot[- ]products?|scores?|logits?|q\s*[·@]?\s*k\S*|attention|softmax|they|it)"
_UNSCALED = re.compile(
    rf"(?i)(\bunscaled\b|\b{_SCORES}\s+(?:is|are)\s*(?:not|n[o']t|never)\s+(?:being\s+)?(?:scaled|divided)"
    rf"|\b{_SCORES}\s+(?:isn[’']t|aren[’']t)\s+(?:scaled|divided)"
    r"|(?:without|no)\s+(?:any\s+)?(?:1\s*/\s*√\w+\s+|softmax\s+|score\s+)?scal(?:e|ing)\b(?!\s+(?:of|to|rate))"
    rf"|(?:does|do|did) not\s+(?:scale|divide)\s+(?:by|the\s+{_SCORES}|{_SCORES})|(?:does|do) not apply (?:any )?scaling"
    r"|(?:without|not)\s+dividing|without\s+(?:the\s+)?1\s*/\s*(?:√|sqrt)|scaling\s+is\s+not\s+(?:applied|used|done)"
    r"|(?:scale|scaling|√\S+|sqrt\S*)\s+is\s+(?:folded|absorbed)\s+into)"
)
_NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?(?![\d\w^]|\.\d|\s*(?:\*\*|\^|/))"
_GIVEN = re.compile(
    rf"(?i)\b(?:scal(?:e|es|ed|ing)(?:\s+factor)?(?:\s*(?:by|of|is|:|=))?|(divided)\s+by)\s+{_NUMBER}|\bscale\s*[=:]\s*{_NUMBER}"
)


def documented_scales(documentation: str) -> Iterator[tuple[float, str]]:
    """Scales that a documentation states: none at all, or a number, each once."""
    said: dict[float, str] = {}
    unscaled = _UNSCALED.search(documentation)
    if unscaled:
        said[1.0] = unscaled[0]
    for match in _GIVEN.finditer(documentation):
        divided, *numbers = match.groups()
        over, under = (float(n) if n else 1.0 for n in (numbers[:2] if numbers[0] else numbers[2:]))
        value = over / under if under else 0.0
        if value:
            said.setdefault(1 / value if divided else value, match[0])
    yield from said.items()


_BY_HEAD = re.compile(r"(?i)1\s*/\s*d(?:_?head|_?k)?\b(?!\s*(?:\*\*|\^))|(?:divided|scaled)\s+by\s+d_?(?:head|k)\b")
_BY_MODEL = re.compile(
    r"(?i)(?:√|sqrt\s*\(?|root of\s+(?:the\s+)?)\s*\(?(?:d_?model|embed_dim|model(?:'s)? width)\b"
    r"|d_?model\s*(?:\*\*|\^)\s*\(?-?(?:0?\.5|1/2)"
)


def documented_widths(documentation: str) -> tuple[str, ...]:
    """Scales of the layer's own widths that a documentation states, other than the usual one."""
    found = {"1 / d_head": _BY_HEAD, "1 / √d_model": _BY_MODEL}
    return tuple(said for said, pattern in found.items() if pattern.search(documentation))


_HALF = re.compile(
    r"(?i)(rotate[_ -]half|half[_ -]rotation|(?:by|of|into|two|as|for) halves|first half|neox|j and j \+ d/2)"
)
_NEIGHBOURS = re.compile(
    r"(?i)(interleaved|neighbou?r(?:s|ing)|adjacent|consecutive|gpt-?j\b|every[_ ]two|(?:even|odd)[ -]and[ -](?:even|odd)"
    r"|2j and 2j \+ 1)"
)


def documented_pairing(documentation: str) -> Pairing | None:
    """How a documentation says that rotary positions pair columns; None where it says nothing, or both."""
    if not re.search(r"(?i)\b(rope|rotary|rotat\w+)", documentation):
        return None
    half, neighbours = _HALF.search(documentation), _NEIGHBOURS.search(documentation)
    if (half is None) == (neighbours is None):
        return None
    return "half" if half else "interleaved"
