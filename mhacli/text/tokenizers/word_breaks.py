"""Where words end, by the characters of a text alone: what a reader calls a word, whatever a tokenizer calls one."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Final

_JOINER: Final = "\u200d"
_APOSTROPHES: Final = "'’"
_DECIMALS: Final = ".,"
_SPACELESS: Final = ("CJK ", "HIRAGANA ", "KATAKANA", "HALFWIDTH KATAKANA", "THAI ", "LAO ", "KHMER ", "MYANMAR ")
"""How the Unicode names of letters begin whose scripts are written without spaces between words."""


def continues(stream: str, place: int) -> bool:
    """Whether no word ends before the character at `place`.

    Letters and digits make words, also around an apostrophe between letters and a point or comma between digits; marks,
    joiners and skin tones belong to the character before them; other characters are words of their own, with their
    repetitions. In scripts without spaces between words, the tokens are the words.

    Source: Unicode Standard Annex #29, word boundaries WB3c, WB4 to WB7, WB8 to WB12 and WB15, simplified.
    """
    before2, before, after, after2 = (stream[i : i + 1] if i >= 0 else "" for i in range(place - 2, place + 2))
    if not before or before.isspace() or after.isspace():
        return False
    if _extends(after) or before == _JOINER:
        return True
    if _is_letter(before) and _is_letter(after):
        return not (_is_spaceless(before) or _is_spaceless(after))
    for mark, left, right in ((after, before, after2), (before, before2, after)):
        if mark in _APOSTROPHES and _is_letter(left) and _is_letter(right):
            return True
        if mark in _DECIMALS and left.isdigit() and right.isdigit():
            return True
    both = before + after
    return before == after or all("\U0001f1e6" <= c <= "\U0001f1ff" for c in both) or all(map(_is_lone_byte, both))


def _extends(character: str) -> bool:
    skin_tone = "\U0001f3fb" <= character <= "\U0001f3ff"
    return character == _JOINER or skin_tone or unicodedata.category(character).startswith("M")


def _is_letter(character: str) -> bool:
    is_selector = "\ufe00" <= character <= "\ufe0f"  # a mark that belongs to symbols
    return character.isalnum() or (
        character != "" and not is_selector and unicodedata.category(character).startswith("M")
    )


@lru_cache(maxsize=4096)
def _is_spaceless(character: str) -> bool:
    return unicodedata.name(character, "").startswith(_SPACELESS)


def _is_lone_byte(character: str) -> bool:
    return "\udc80" <= character <= "\udcff"
