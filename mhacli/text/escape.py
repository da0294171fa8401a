"""Escapes untrusted text before it reaches a terminal or a page."""

import unicodedata
from functools import lru_cache

# Characters that Python calls printable: joiners, fillers, variation selectors, blanks.
_INVISIBLE = {
    *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0),
    *range(0x180B, 0x1810),
    *range(0xFE00, 0xFE10),
    *range(0xE0100, 0xE01F0),
}
_OURS = "␣◌\\\n"
"""Signs of escapes, and breaks of lines, which text has from here. In data they are escaped too."""


def visible(text: str) -> str:
    r"""`text` with control, bidi and zero-width characters as visible escapes such as `\x1b` or
    `\u202e`.

    Different texts stay different: a backslash is doubled, and no-break spaces are escaped. An
    undecodable byte becomes `\xff`, and a combining mark without a base character gets a dotted
    circle.

    >>> visible("red\x1b[31m")
    'red\\x1b[31m'
    """
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    shown = "".join(map(_visible_character, text))
    return (
        "◌" + shown
        if unicodedata.category(text[0]).startswith("M") and shown[0] == text[0]
        else shown
    )


def harmless(text: str) -> str:
    r"""`text` as it leaves for a surface: what is still obeyed or hidden becomes an escape;
    line breaks, and what `visible`, `token_label` or `repr` gave, stay as they are.

    >>> harmless(visible("\\ \x1b")) == visible("\\ \x1b")
    True
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in _OURS else _visible_character(c) for c in text)


def token_label(token: str) -> str:
    """A token for tables: as `visible`, with each space as `␣`, so that no two tokens look
    alike.
    """
    return visible(token).replace(" ", "␣")


def without_surrogates(text: str) -> str:
    """`text` with each undecodable byte (a lone surrogate in Python) as an escape, for strict JSON
    readers.
    """
    return "".join(_visible_character(c) if "\ud800" <= c <= "\udfff" else c for c in text)


@lru_cache(maxsize=4096)
def _visible_character(character: str) -> str:
    point = ord(character)
    if 0xDC80 <= point <= 0xDCFF:  # Python's encoding of an undecodable byte
        return f"\\x{point - 0xDC00:02x}"
    if character.isprintable() and point not in _INVISIBLE and character not in _OURS:
        return character
    if character.isascii():
        return character.encode("unicode_escape").decode()
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
