"""Tokens that would do something if they were not shown as text, and a tokenizer that keeps each whole."""

from __future__ import annotations

import json

from support.processes import obeyed_or_hidden

ESCAPES = [
    "\x1b]52;c;aGk=\x07",
    "\x1b[2J",
    "\x1b]8;;http://e\x1b\\here\x1b]8;;\x1b\\",
    "\x9b31mred",
    "\x90q\x9c",
]
MARKUP = ["[mask]", "[/b]", "[/INST]", "[red]", "[link=http://e]", ":bug:"]
HIDDEN = ["ab", "a\u202eb", "a\u2066b", "a\u061cb", "a\u200bb", "a\ufeffb", "a\U000e0041b", "a\u2060b"]
WIDE = ["日本語", "漢字", "ｶﾅ", "한국"]
JOINED = ["👨\u200d👩\u200d👧", "🇩🇪", "\u0301x"]
FORMULAS = ['=HYPERLINK("http://e")', "+1", "-1", "@SUM(A1)"]
HOSTILE = [*ESCAPES, *MARKUP, *HIDDEN, *WIDE, *JOINED, *FORMULAS]
WEB = [
    "<script>alert(1)</script>",
    "</script><!--",
    '"><img/src=x/onerror=alert(1)>',
    "'onmouseover='alert(1)",
    "&lt;b&gt;",
    "]]>",
    "</title></svg><style>*{display:none}</style>",
    "javascript:alert(1)",
    "{{7*7}}",
]
"""What a page or a picture must show as text."""


def escaped(token: str) -> str:
    """What a reader must see of a token: everything that is obeyed or hidden as an escape, a backslash doubled.

    From 0x80 on `\\x` is left to bytes that are no UTF-8.
    """

    def shown(character: str) -> str:
        point = ord(character)
        if character == "\\":
            return "\\\\"
        if not obeyed_or_hidden(character):
            return character
        return f"\\x{point:02x}" if point < 0x80 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"

    return "".join(map(shown, token))


def tokenizer_of(tokens: list[str], **model: object) -> str:
    """A `tokenizer.json` whose tokens are what stands between spaces."""
    known = {token: i for i, token in enumerate(["<unk>", *tokens])}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": known, "unk_token": "<unk>"} | model,
        }
    )
